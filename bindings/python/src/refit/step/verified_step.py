"""A step of all parameters at once, on copies, which a step by other ways is held against.

The trial of an optimizer on two tiny parameters cannot find all that makes a step in windows, or on
the CPU, end with other bits than one of all parameters (see ``probe``). Here the real step is made
twice: before it, PyTorch's own code steps copies of the parameters, gradients and states; then the
bits are compared. What the CPU steps is held against a step of all parameters on the CPU.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from refit.errors import UnsupportedError
from refit.step.copying import Copies, Draws, is_same
from refit.step.stand_in import Stepping, own_state_of, stand_in_of_copies

Optimizer = torch.optim.Optimizer


class _Copy(NamedTuple):
    parameter: Any
    made: torch.Tensor


class WholeStep:
    """Made before the step; ``check`` after it. It takes the memory of all parameters, gradients
    and states once more, on their devices."""

    def __init__(
        self,
        optimizer: Optimizer,
        on_cpu: Callable[[Any], bool],
        lives_on_host: Callable[[Any, Any, Any], bool],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        """``on_cpu``: whether the CPU steps a parameter. ``lives_on_host``: whether a state, of a
        parameter and under a key, visits the parameter's device for a step."""
        self._optimizer = optimizer
        self._lives_on_host = lives_on_host
        self._copies: list[_Copy] = []
        self._states: dict[Any, Any] = {}
        groups = [
            [p for p in group["params"] if p.grad is not None] for group in optimizer.param_groups
        ]
        stepped = [parameter for group in groups for parameter in group]

        def moves(parameter: Any) -> bool:
            return on_cpu(parameter) and parameter.device.type != "cpu"

        with Draws({parameter.device for parameter in stepped}):
            for to_cpu in set(map(moves, stepped)):
                copies: Copies = {}
                for parameter in stepped:
                    self._copy(parameter, to_cpu, moves(parameter), copies)
                theirs = {p: optimizer.state[p] for p in stepped if p in optimizer.state}
                alone = stand_in_of_copies(optimizer, copies, {**own_state_of(optimizer), **theirs})
                states = {p: one for p, one in alone.state.items() if isinstance(p, torch.Tensor)}
                chosen = [[copies[id(p)][1] for p in group] for group in groups]
                self._states.update(Stepping(alone).run(chosen, states, args, kwargs, to_cpu))
                self._copies += [_Copy(*copies[id(one)]) for one in stepped if moves(one) == to_cpu]

    def _copy(self, parameter: Any, to_cpu: bool, moves: bool, copies: Copies) -> None:
        """Copies a parameter, its gradient, and its states that are not where it is stepped.
        ``moves``: they live on the CPU, which steps it."""
        device = "cpu" if to_cpu else parameter.device
        made = parameter.detach().to(device, copy=True).requires_grad_()
        made.grad = parameter.grad.detach().to(device, copy=True)
        copies[id(parameter)] = parameter, made
        for key, one in self._optimizer.state.get(parameter, {}).items():
            is_there = not to_cpu and not moves and not self._lives_on_host(parameter, key, one)
            if isinstance(one, torch.Tensor) and not is_there:
                place = device if to_cpu or one.dim() > 0 else one.device
                copies[id(one)] = one, one.detach().to(place, copy=True)

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
                    "once makes: keep its states with refit.Cycle()"
                )
