"""An optimizer's controller, for frameworks that hand over nothing but the optimizer.

The controller hangs on the optimizer as an attribute: it lives as long, there is no table to clean,
and neither a state_dict nor a copy of the optimizer has it. Whose optimizer it is, is unknown here.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from refit._c.config import make_config
from refit.errors import NotFoundError
from refit.integrations.deepspeed import is_deepspeed
from refit.integrations.megatron import is_megatron, unwrap

if TYPE_CHECKING:
    from refit.controller import Controller

_NAME = "_refit_controller"

KEYWORDS = (
    "states",
    "window_bytes",
    "windows",
    "prefetch",
    "resident_bytes",
    "host_fraction",
    "host_pick",
    "cpu_fraction",
    "overlap",
    "host_step",
    "any_optimizer",
)
"""Keywords of ``refit.Controller`` that say where states live. In a mapping that a framework has as
refit's configuration they may stand beside the options."""


def divided(config: Any) -> tuple[Any, dict[str, Any]]:
    """The options of a configuration, and the keywords of the controller beside them."""
    if not isinstance(config, Mapping):
        return config, {}
    chosen = {key: config[key] for key in KEYWORDS if config.get(key) is not None}
    return {key: value for key, value in config.items() if key not in KEYWORDS}, chosen


def lives_on_host(config: Any) -> bool:
    """Whether a configuration asks for states that live on the host, or for a share that the CPU
    steps, where the controller has to be there before the first step."""
    chosen = divided(config)[1]
    return chosen.get("states") == "host" or "host_fraction" in chosen


def check(config: Any) -> None:
    """Raises for a configuration what a controller would raise for it: InvalidError, NotFoundError,
    ConfigError, InputOutputError."""
    from refit.controller import division_of

    options, chosen = divided(config)
    sizes = {
        f"offload_{name}": chosen.pop(name)
        for name in ("window_bytes", "windows")
        if name in chosen
    }
    try:
        make_config(options, sizes)
    except NotFoundError as why:
        beside = ", ".join(KEYWORDS)
        raise NotFoundError(f"{why}; beside refit's options stand {beside}") from None
    division_of(
        **{key: value for key, value in chosen.items() if key not in ("prefetch", "overlap")}
    )


def attached(optimizer: Any) -> "Controller | None":
    """The optimizer's controller, if it has one that is open."""
    found: Controller | None = getattr(optimizer, _NAME, None)
    return found


def attach(optimizer: Any, config: Any = None, **keywords: Any) -> "Controller | None":
    """The optimizer's controller, made when first asked for, by `config` and the controller's
    keywords over it; None where there is nothing to move."""
    found = attached(optimizer)
    if found is None:
        found = controller_of(optimizer, None, config, **keywords)
        if found is not None:
            setattr(optimizer, _NAME, found)
    return found


def controller_of(optimizer: Any, model: Any, config: Any, **keywords: Any) -> "Controller | None":
    """A new controller; Megatron's optimizers are looked into. None for one that has no parameters
    on this rank, or that places its states by itself. `config` may have ``KEYWORDS``."""
    from refit.controller import Controller

    options, chosen = divided(config)
    chosen.update(keywords)
    if not is_deepspeed(optimizer) and is_megatron(optimizer):
        held = unwrap(optimizer, model)
        return Controller(held, config=options, **chosen) if held.inner else None
    return Controller(optimizer, model=model, config=options, **chosen)


def detach(optimizer: Any) -> None:
    """Brings the states back and ends the optimizer's controller. Idempotent."""
    found = attached(optimizer)
    if found is not None:
        delattr(optimizer, _NAME)
        found.close()
