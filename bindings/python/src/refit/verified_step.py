"""A step of all parameters at once, on copies, which a step by other ways is held against.

The trial of an optimizer on two tiny parameters cannot find all that makes a step in windows, or on
the CPU, end with other bits than one of all parameters (see ``refit.twin``). Here the real step is
made twice: before it, PyTorch's own code steps copies of the parameters, gradients and states; then
the bits are compared. What the CPU steps is held against a step of all parameters on the CPU.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from refit.errors import UnsupportedError
from refit.twin import Stepping, is_same

Optimizer = torch.optim.Optimizer


class _Copy(NamedTuple):
    parameter: Any
    made: torch.Tensor


class WholeStep:
    """Made before the step; ``check`` behind it. It takes the memory of all parameters, gradients
    and states once more, on their devices."""

    def __init__(
        self,
        optimizer: Optimizer,
        on_cpu: Callable[[Any], bool],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        self._optimizer = optimizer
        self._copies: list[_Copy] = []
        self._states: dict[Any, Any] = {}
        groups = [
            [p for p in group["params"] if p.grad is not None] for group in optimizer.param_groups
        ]

        def place_of(parameter: Any) -> bool:
            return on_cpu(parameter) and parameter.device.type != "cpu"

        stepping = Stepping(optimizer)
        for place in {place_of(p) for group in groups for p in group}:
            states: dict[Any, dict[Any, Any]] = {}
            chosen = [[self._copy(p, place, states) for p in group] for group in groups]
            self._states.update(stepping.run(chosen, states, args, kwargs))
            self._copies += [
                _Copy(parameter, made)
                for group, copies in zip(groups, chosen, strict=True)
                for parameter, made in zip(group, copies, strict=True)
                if place_of(parameter) == place
            ]

    def _copy(self, parameter: Any, to_cpu: bool, states: dict[Any, dict[Any, Any]]) -> Any:
        def copied(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            there = value.device if value.dim() == 0 else parameter.device
            return value.detach().to("cpu" if to_cpu else there, copy=True)

        made = copied(parameter).requires_grad_()
        made.grad = copied(parameter.grad)
        states[made] = {
            key: copied(one) for key, one in self._optimizer.state.get(parameter, {}).items()
        }
        return made

    def check(self, number: int, names: Mapping[int, str]) -> None:
        """UnsupportedError names the first that has other bits. Waits for the step's copies."""
        for parameter, made in self._copies:
            found = {None: parameter, **self._optimizer.state.get(parameter, {})}
            expected = {None: made, **self._states.get(made, {})}
            for key, one in expected.items():
                if key in found and is_same(one, found[key]):
                    continue
                name = names.get(id(parameter), "a parameter")
                raise UnsupportedError(
                    f"step {number} of a {type(self._optimizer).__name__} has made other bits of "
                    f"{name if key is None else f'{name}.{key}'} than a step of all parameters at "
                    'once makes: keep its states with states="cycle"'
                )
