"""What a cycle counts: how often it ran and failed, how long it took, and who is told of it.

A verb that raises counts once, also when it was called by another verb that raises the same. What
the C library counts by itself is unknown here.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from refit import _abi
from refit.observers import Observers

if TYPE_CHECKING:
    from refit.lanes import Lanes

ARENA = "refit's arena"
COPIES = "copies behind"
"""How memory and copies are called in pictures."""


class Tally:
    """The figures of the cycles of one controller. Seconds are those of ``time.perf_counter``."""

    def __init__(self, observers: Observers) -> None:
        self._observers = observers
        self._cycles = 0
        self._failures = 0
        self.early_returns = 0
        self._verbs = 0
        self._counted: BaseException | None = None
        self._began = self._returned = self._exposed = 0.0
        self._cycle_s = self._exposed_s = 0.0

    @contextmanager
    def verb(self) -> Iterator[None]:
        """Around a verb of the cycle: if it raises, that counts. Verbs may call each other."""
        self._verbs += 1
        try:
            yield
        except BaseException as why:
            if why is not self._counted:
                self._failures += 1
                self._counted = why
            raise
        finally:
            self._verbs -= 1
            if self._verbs == 0:
                self._counted = None  # it holds the frames that it came through

    def early(self) -> None:
        """What is away comes back before ``restore``, because something uses it."""
        self.early_returns += 1

    def begin(self, now: float) -> None:
        """A cycle begins."""
        self._began, self._exposed = now, 0.0

    def waited(self, since: float) -> None:
        """The caller has waited for the cycle since then."""
        self._exposed += time.perf_counter() - since

    def returns(self, now: float) -> None:
        """The way back begins."""
        self._returned = now

    def end(self, since: float, lanes: "Lanes") -> None:
        """A cycle is over; for its last verb the caller has waited since ``since``."""
        now = time.perf_counter()
        self._cycles += 1
        self._cycle_s, self._exposed_s = now - self._began, self._exposed + now - since
        self._tell_way_back(now, lanes)

    def fill(self, figures: _abi.refit_stats) -> None:
        """Writes what was counted into the struct of all figures."""
        figures.cycles = self._cycles
        figures.cycle_failures = self._failures
        figures.cycle_seconds_last = self._cycle_s
        figures.cycle_exposed_seconds_last = self._exposed_s

    def tell_host_memory(self, lanes: "Lanes") -> None:
        """Says to who draws it what the arenas take."""
        if self._observers.drawn:
            self._observers.hold(ARENA, int(lanes.stats().host_bytes))

    def _tell_way_back(self, now: float, lanes: "Lanes") -> None:
        """Likewise how long the copies took that went on behind; on a GPU they may not be done."""
        if not self._observers.drawn or not lanes.home:
            return
        took = float(lanes.stats().restore_seconds_last)
        self._observers.past(COPIES, now - self._returned, took, lanes.nbytes)
