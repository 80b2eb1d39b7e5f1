"""Which framework an optimizer is from, and what its integration makes of it."""

from typing import Any

from refit.integrations import deepspeed, megatron


def adapted(given: Any, model: Any = None) -> list[Any]:
    """The optimizers that were given, one or several: torch's as they are, and for each wrapper or
    engine of a known framework a ``refit.states.optimizers.OptimizerAdapter``."""
    several = given if isinstance(given, list | tuple) else [given]
    return [_adapted(one, model) for one in several]


def _adapted(optimizer: Any, model: Any) -> Any:
    if deepspeed.is_deepspeed(optimizer):  # first: Megatron's wrappers look alike
        return deepspeed.unwrap(optimizer, model)
    return megatron.unwrap(optimizer, model) if megatron.is_megatron(optimizer) else optimizer
