"""What becomes of gradients while states are away: kept, zeroed or discarded.

``keep``     their bytes leave and return exactly;
``zero``     their memory leaves, and returns as zeros;
``discard``  ``p.grad`` becomes None, as ``zero_grad()`` makes it.

The last two lose what was accumulated, by agreement, so they are refused while an accumulation is
open: when a gradient has changed since the last ``step()`` and is not zero. Changes are seen by the
tensor's version counter, so no hook runs in a backward pass.

While the memory of a gradient is away, ``p.grad`` is a stand-in of the same shape without memory of
its own, which reads as NaN: writing to its elements is an error of PyTorch's, where it would else
be a fault of the process. ``zero_grad()`` takes it away as it would the gradient, and what fills it
(``zero_grad(set_to_none=False)``) fills the gradient once that is back. A backward pass that comes
early brings the gradients back first.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeAlias, cast

import torch

from refit.errors import InvalidError
from refit.storages import opened

Policy: TypeAlias = Literal["keep", "discard", "zero"]

_Seen = tuple["weakref.ref[torch.Tensor]", int]


def policy_of(text: str) -> Policy:
    """The policy that a word names. InvalidError for another word."""
    if text not in ("keep", "discard", "zero"):
        raise InvalidError(f"grads={text!r}: say keep, discard or zero")
    return cast(Policy, text)


def _version(grad: torch.Tensor) -> int:
    """Counts the writes to a gradient; those to a DTensor are writes to its local tensor."""
    if type(grad) is torch.Tensor:
        return grad._version
    return sum(inner._version for _path, inner in opened(grad))


class Accumulation:
    """Knows whether gradients hold more than the last ``step()`` has used."""

    def __init__(
        self,
        gradients: Callable[[], Iterable[tuple[int, torch.Tensor]]],
        holds: Callable[[torch.Tensor], bool],
    ) -> None:
        """``gradients``: all there are, each with what tells its owner from others; ``holds``:
        whether one is not all zeros, wherever its bytes are."""
        self._gradients = gradients
        self._holds = holds
        self._used: dict[int, _Seen] = {}
        self.said: bool | None = None

    def step_done(self) -> None:
        """All gradients as they are now have been used."""
        self.said = None
        self._used = {
            owner: (weakref.ref(grad), _version(grad)) for owner, grad in self._gradients()
        }

    @property
    def open(self) -> bool:
        """What was said by hand, else what the gradients show. May wait for the device."""
        if self.said is not None:
            return self.said
        return any(
            self._changed(owner, grad) and self._holds(grad) for owner, grad in self._gradients()
        )

    def _changed(self, owner: int, grad: torch.Tensor) -> bool:
        seen = self._used.get(owner)
        return seen is None or seen[0]() is not grad or seen[1] != _version(grad)


class StandIns:
    """Gradients whose memory is away, and what stands in for each meanwhile."""

    def __init__(self, bring_back: Callable[[], None]) -> None:
        self._bring_back = bring_back
        self._away: list[tuple[Any, torch.Tensor, torch.Tensor, int]] = []
        self._guards: list[Any] = []
        self._owners: set[int] = set()

    def stands_in(self, parameter: Any) -> bool:
        """Whether the gradient of a parameter was put away."""
        return id(parameter) in self._owners

    def away(self) -> dict[int, torch.Tensor]:
        """Gradients by the identity of their owner, but those whose stand-in was written to,
        dropped or replaced: what is in its place then is the gradient."""
        return {
            id(parameter): grad
            for parameter, grad, stand_in, untouched in self._away
            if parameter.grad is stand_in and stand_in._version == untouched
        }

    def put(self, parameter: Any, grad: torch.Tensor) -> None:
        """From now on ``parameter.grad`` is a stand-in for ``grad``, until ``take``."""
        nothing = torch.full((), float("nan"), dtype=grad.dtype, device=grad.device)
        stand_in = nothing.expand(grad.shape)
        if parameter.requires_grad:
            self._guards.append(parameter.register_hook(self._early))
        self._away.append((parameter, grad, stand_in, stand_in._version))
        parameter.grad = stand_in
        self._owners.add(id(parameter))  # the last: what Ctrl-C ends before is put once more

    def _early(self, _grad: torch.Tensor) -> None:
        """A backward pass is about to add to a gradient that is away."""
        self._bring_back()

    def take(self) -> None:
        """Gives every parameter its gradient again, but one that was dropped or replaced.

        The gradients' bytes are back, or the current stream waits for them.
        """
        for guard in self._guards:
            guard.remove()
        self._guards.clear()
        for parameter, grad, stand_in, untouched in self._away:
            if parameter.grad is stand_in:
                if stand_in._version != untouched:
                    grad.copy_(stand_in)
                parameter.grad = grad
        self._away.clear()
        self._owners.clear()
