"""A device's memory as a test says it is, for ``resident_bytes="auto"``."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import refit
import refit.step.auto_resident
import torch
from refit.step.auto_resident import Memory

MARGIN = 64 << 10
"""A window of the tests, which is more than a twentieth of the memory."""
ROOM = 1 << 20
"""The memory."""


class Space:
    """What PyTorch's allocator would tell of a device in whose iterations ``need`` bytes, of
    ``total``, are in use besides the states that stay. An iteration is remembered until the next.
    """

    def __init__(self) -> None:
        self.total, self.need, self.failures = ROOM, ROOM, 0
        self.controller: refit.Controller | None = None
        self.begun = 0

    def leave(self, nbytes: int, margin: int = MARGIN) -> None:
        """From now on iterations leave so many bytes besides two margins to states that stay."""
        self.need = self.total - 2 * margin - nbytes

    def memory_of(self, _: torch.device) -> Memory:
        stay = 0 if self.controller is None else resident_bytes(self.controller)
        return Memory(self.need + stay, self.total, self.failures)

    def forget_peak(self, _: torch.device) -> None:
        self.begun += 1

    @contextmanager
    def patched(self) -> Iterator["Space"]:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("memory_of", "forget_peak"):
                patch.setattr(refit.step.auto_resident, name, getattr(self, name))
            patch.setattr(refit.step.auto_resident, "_ITERATIONS", 1)
            yield self


class ChangingSpace(Space):
    """Leaves something else after each iteration."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._draw = random.Random(seed)

    def memory_of(self, device: torch.device) -> Memory:
        self.leave(self._draw.choice([-ROOM, 0, 100_000, 300_000, 700_000, ROOM, 4 * ROOM]))
        self.failures += self._draw.random() < 0.1
        return super().memory_of(device)


def resident_bytes(controller: refit.Controller) -> int:
    return int(controller.stats()["refit/resident_bytes"])
