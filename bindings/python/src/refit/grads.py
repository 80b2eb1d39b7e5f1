"""What becomes of gradients while states are away: kept, zeroed or discarded.

``keep``     their bytes leave and return exactly;
``zero``     their memory leaves, and returns as zeros;
``discard``  ``p.grad`` becomes None, as ``zero_grad()`` makes it.

The last two lose what was accumulated, by agreement, so they are refused while an accumulation is
open: when a gradient has changed since the last ``step()`` and is not zero. Changes are seen by the
tensor's version counter, so no hook runs in a backward pass.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias, cast

import torch

from refit.away import untouched
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
    with untouched():
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
        """The value that the caller set, or else whether the gradients show an accumulation.

        May wait for the device.
        """
        if self.said is not None:
            return self.said
        return any(
            self._changed(owner, grad) and self._holds(grad) for owner, grad in self._gradients()
        )

    def _changed(self, owner: int, grad: torch.Tensor) -> bool:
        seen = self._used.get(owner)
        return seen is None or seen[0]() is not grad or seen[1] != _version(grad)
