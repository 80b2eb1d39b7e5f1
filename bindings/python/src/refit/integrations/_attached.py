"""An optimizer's controller, for frameworks that hand over nothing but the optimizer.

The controller hangs on the optimizer as an attribute: it lives as long, there is no table to clean,
and neither a state_dict nor a copy of the optimizer has it. Whose optimizer it is, is unknown here.
"""

from typing import TYPE_CHECKING, Any

from refit.integrations.megatron import is_megatron, unwrap

if TYPE_CHECKING:
    from refit.controller import Controller

_NAME = "_refit_controller"


def attached(optimizer: Any) -> "Controller | None":
    """The optimizer's controller, if it has one that is open."""
    found: Controller | None = getattr(optimizer, _NAME, None)
    return found


def attach(optimizer: Any, config: Any = None) -> "Controller | None":
    """The optimizer's controller, made when first asked for, by `config`; None where there is
    nothing to move."""
    found = attached(optimizer)
    if found is None:
        found = controller_of(optimizer, None, config)
        if found is not None:
            setattr(optimizer, _NAME, found)
    return found


def controller_of(optimizer: Any, model: Any, config: Any) -> "Controller | None":
    """A new controller; Megatron's optimizers are looked into. None for one that has no parameters
    on this rank, or that places its states by itself."""
    from refit.controller import Controller

    if is_megatron(optimizer):
        held = unwrap(optimizer, model)
        return Controller(held, config=config) if held.inner else None
    return Controller(optimizer, model=model, config=config)


def detach(optimizer: Any) -> None:
    """Brings the states back and ends the optimizer's controller. Idempotent."""
    found = attached(optimizer)
    if found is not None:
        delattr(optimizer, _NAME)
        found.close()
