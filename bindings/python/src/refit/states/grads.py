"""What becomes of gradients while states are away: kept, zeroed or discarded.

``keep``     their bytes leave and return exactly;
``zero``     their memory leaves, and returns as zeros;
``discard``  ``p.grad`` becomes None, as ``zero_grad()`` makes it.

The last two lose what was accumulated, by agreement, so they are refused while an accumulation is
open: when a gradient has changed since the last ``step()`` and is not zero. Changes are seen by the
tensor's version counter, so no hook runs in a backward pass.

Of each gradient that was used its counter is kept, by a tensor without memory that shares it: so no
other gradient gets the same counter. A weak reference to the gradient would say as much, but
``torch.utils.swap_tensors``, and with it ``module.to()`` of FSDP2, refuses tensors that have one.
What is swapped has another counter, and counts as changed.
"""

from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias, cast

import torch

from refit._c.waiting import interrupts_held
from refit.errors import InvalidError
from refit.states.offloaded_tensor import untouched
from refit.states.storages import opened
from refit.states.version_counter import counter_of

Policy: TypeAlias = Literal["keep", "discard", "zero"]

_Counters: TypeAlias = list[tuple[torch.Tensor, int]]
"""Of each plain tensor in a gradient a tensor that shares its version counter, and the version."""


def policy_of(text: str) -> Policy:
    """The policy that a word names. InvalidError for another word."""
    if text not in ("keep", "discard", "zero"):
        raise InvalidError(f"grads={text!r}: say keep, discard or zero")
    return cast(Policy, text)


def _plain(grad: torch.Tensor) -> list[torch.Tensor]:
    """The tensors whose counters count the writes to a gradient; a DTensor's is its local one."""
    return [grad] if type(grad) is torch.Tensor else [inner for _path, inner in opened(grad)]


def _counters(grad: torch.Tensor) -> _Counters | None:
    """What tells later whether a gradient is the same and unchanged; None: it has no counter, as
    inference tensors have none, or is of a kind that cannot share it."""
    try:
        return [(counter_of(one), one._version) for one in _plain(grad)]
    except (NotImplementedError, RuntimeError):
        return None


def _is_same(counter: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether two tensors share a counter: what counts up for one does for the other. Afterwards
    the counter is what it was."""
    with torch.autograd.grad_mode._unsafe_preserve_version_counter(counter):
        torch.autograd.graph.increment_version(counter)
        return tensor._version == counter._version


class Accumulation:
    """Knows whether gradients hold more than the last ``step()`` has used."""

    def __init__(
        self,
        gradients: Callable[[], Iterable[tuple[int, torch.Tensor]]],
        is_nonzero: Callable[[torch.Tensor], bool],
    ) -> None:
        """``gradients``: all there are, each with what tells its owner from others; ``is_nonzero``:
        whether one is not all zeros, wherever its bytes are."""
        self._gradients = gradients
        self._is_nonzero = is_nonzero
        self._used: dict[int, _Counters | None] = {}
        self.set_by_user: bool | None = None

    def step_done(self) -> None:
        """All gradients as they are now have been used."""
        self.set_by_user = None
        with interrupts_held(), untouched(), torch.no_grad():
            self._used = {owner: _counters(grad) for owner, grad in self._gradients()}

    @property
    def open(self) -> bool:
        """The value that the caller set, or else whether the gradients show an accumulation.

        May wait for the device.
        """
        if self.set_by_user is not None:
            return self.set_by_user
        with interrupts_held():  # an exception could leave a counter other than it was
            changed = [grad for owner, grad in self._gradients() if self._changed(owner, grad)]
        return any(map(self._is_nonzero, changed))

    def _changed(self, owner: int, grad: torch.Tensor) -> bool:
        used = self._used.get(owner)
        if used is None:
            return True
        with untouched():
            tensors = _plain(grad)
            return len(tensors) != len(used) or not all(
                counter._version == version == one._version and _is_same(counter, one)
                for one, (counter, version) in zip(tensors, used, strict=True)
            )
