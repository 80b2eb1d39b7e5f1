"""An optimizer's controller, for frameworks that hand over nothing but the optimizer.

The controller hangs on the optimizer as an attribute: it lives as long, there is no table to clean,
and neither a state_dict nor a copy of the optimizer has it. Independent of whose optimizer it is.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from refit._c.config import make_config
from refit.errors import NotFoundError
from refit.integrations.deepspeed import is_deepspeed
from refit.integrations.megatron import is_megatron, unwrap
from refit.step.schedule import chosen, refuse_keywords

if TYPE_CHECKING:
    from refit.controller import Controller

_NAME = "_refit_controller"

SCHEDULE = "schedule"
"""Keyword of ``refit.Controller``. In a mapping that a framework has as refit's configuration it
may stand with the options, as ``refit.step.schedule`` says."""


def divided(config: Any) -> tuple[Any, dict[str, Any]]:
    """The options of a configuration, and the keywords of the controller in it."""
    if not isinstance(config, Mapping):
        return config, {}
    refuse_keywords(config)
    options = {key: value for key, value in config.items() if key != SCHEDULE}
    return options, {SCHEDULE: config[SCHEDULE]} if config.get(SCHEDULE) is not None else {}


def lives_on_host(config: Any) -> bool:
    """Whether a configuration asks for states that live on the host, or for a share that the CPU
    steps, where the controller has to be there before the first step."""
    return chosen(divided(config)[1].get(SCHEDULE)).lives_on_host


def check(config: Any) -> None:
    """Raises for a configuration what a controller would raise for it: InvalidError, NotFoundError,
    ConfigError, InputOutputError, TypeError."""
    options, keywords = divided(config)
    sizes = chosen(keywords.get(SCHEDULE)).sizes
    try:
        make_config(options, sizes)
    except NotFoundError as why:
        raise NotFoundError(f"{why}, or schedule, which refit.Controller has") from None


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
    on this rank, or that places its states by itself. `config` may have a ``schedule``."""
    from refit.controller import Controller

    options, of_config = divided(config)
    keywords = {**of_config, **keywords}
    if not is_deepspeed(optimizer) and is_megatron(optimizer):
        held = unwrap(optimizer, model)
        return Controller(held, config=options, **keywords) if held.inner else None
    return Controller(optimizer, model=model, config=options, **keywords)


def detach(optimizer: Any) -> None:
    """Brings the states back and ends the optimizer's controller. Idempotent."""
    found = attached(optimizer)
    if found is not None:
        delattr(optimizer, _NAME)
        found.close()
