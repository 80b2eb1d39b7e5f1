"""How many states stay on the device with ``HostStates(resident_bytes="auto")``.

After each iteration PyTorch's allocator is asked how much of the device's memory was in use at the
highest point of forward pass, backward pass and step. What was left then, less a margin, takes
states of further parameters; if less than the margin was left, or an allocation has failed, states
of the last of them visit the device in windows again. An iteration ends once all optimizers of the
controller have stepped, and the first one is only measured.

So that the share does not follow each batch, the highest need of the last iterations counts, and it
grows only into what leaves two margins, while it shrinks below one. Independent of how states move.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from refit.states.torch_memory import usable_bytes

_ITERATIONS = 64
"""Iterations whose need is remembered."""
_PART = 20
"""The margin is one part of so many of the memory, or a window if that is larger."""


class Memory(NamedTuple):
    """A device's memory in this process, in bytes."""

    peak: int
    """The most that PyTorch's allocator has given at once since ``forget_peak``."""
    total: int
    """The most that it could give now."""
    failures: int
    """How often it has found none, or none before it gave back what it had kept."""


def memory_of(device: torch.device) -> Memory | None:
    """None for a device that does not say: on a CPU no states stay."""
    if device.type != "cuda":
        return None
    stats = torch.cuda.memory_stats(device)
    failures = stats.get("num_ooms", 0) + stats.get("num_alloc_retries", 0)
    return Memory(torch.cuda.max_memory_allocated(device), usable_bytes(device), failures)


def forget_peak(device: torch.device) -> None:
    """An iteration begins."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def next_count(sizes: Sequence[int], count: int, peak: int, total: int, margin: int) -> int:
    """Of how many parameters the states are to stay, whose bytes are ``sizes``, where those of the
    first ``count`` stay now, and ``peak`` bytes of ``total`` were in use with them."""
    spare = total - peak
    while count < len(sizes) and spare - sizes[count] >= 2 * margin:
        spare -= sizes[count]
        count += 1
    if spare < margin:
        while count > 0 and spare < 2 * margin:
            count -= 1
            spare += sizes[count]
    return count


class AutoResident:
    """What the iterations of some optimizers have needed, on each device. Used by one thread at a
    time."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._optimizers = frozenset(map(id, optimizers))
        self._not_stepped = set(self._optimizers)
        self._needs: dict[torch.device, deque[int]] = {}
        """Of the last iterations, without the states that stayed."""
        self._failures: dict[torch.device, int] = {}
        """Those before this iteration."""

    def is_over(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an iteration ends with this optimizer's step, which was made."""
        self._not_stepped.discard(id(optimizer))
        if self._not_stepped:
            return False
        self._not_stepped = set(self._optimizers)
        return True

    def next_count(
        self, device: torch.device, sizes: Sequence[int], count: int, window_bytes: int
    ) -> int:
        """After an iteration: see ``next_count`` above."""
        memory = memory_of(device)
        if memory is None or device not in self._needs:
            return count
        resident = sum(sizes[:count])
        has_failed = memory.failures > self._failures[device]
        needs = self._needs[device]
        needs.append((memory.total if has_failed else memory.peak) - resident)
        margin = max(window_bytes, memory.total // _PART)
        return next_count(sizes, count, max(needs) + resident, memory.total, margin)

    def begin(self, device: torch.device) -> None:
        """The next iteration begins, with states where they are now."""
        memory = memory_of(device)
        if memory is not None:
            self._needs.setdefault(device, deque(maxlen=_ITERATIONS))
            self._failures[device] = memory.failures
            forget_peak(device)
