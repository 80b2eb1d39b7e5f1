"""The C library's log lines go to Python's logging, under the name "refit".

C keeps its lines in a ring and never calls Python: it logs from threads of its own and from within
PyTorch's allocator, under locks that Python code must not run under. Calls into C look afterwards
whether there is anything new, which costs a read of memory. What C's threads say while no call is
made comes with the next one. No thread is started here. Independent of what the lines mean.
"""

import ctypes
import logging
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from refit._c import abi
from refit._c.waiting import interrupts_held

LOGGER = logging.getLogger("refit")

_LINES = 256
_LINE_ROOM = 400

_LEVELS = {
    abi.REFIT_LOG_DEBUG: logging.DEBUG,
    abi.REFIT_LOG_INFO: logging.INFO,
    abi.REFIT_LOG_WARNING: logging.WARNING,
    abi.REFIT_LOG_ERROR: logging.ERROR,
}


class LogRing:
    """The ring of this process. Any thread."""

    def __init__(self, lib: Any) -> None:
        out = ctypes.c_void_p()
        self._lib = lib
        self._level = _wanted_level()
        if lib.refit_log_ring_open(_LINES, self._level, ctypes.byref(out), None) != abi.REFIT_OK:
            raise MemoryError("no memory for the lines that refit's C library logs")
        self._ring = out
        self.count = lib.refit_log_ring_count(out).contents
        """Its ``value`` is not ``seen`` when there is anything new."""
        self.seen = 0
        self._draining = threading.Lock()
        self._here = threading.local()
        weakref.finalize(self, self._drain_last, weakref.ref(self))
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        """In a forked child, which does not have the thread that held the lock."""
        self._draining = threading.Lock()

    @staticmethod
    def _drain_last(ring: "weakref.ref[LogRing]") -> None:
        """At exit, after what was opened later and is closed then."""
        alive = ring()
        if alive is not None:
            alive.drain()

    def follow(self) -> None:
        """Lets C say what the logger takes now, and no more."""
        level = _wanted_level()
        if level != self._level:
            self._level = level
            self._lib.refit_log_ring_set_level(self._ring, level)

    def drain(self) -> None:
        """Hands what is new to the logger; does nothing while that is done already, or where it
        must not be done."""
        if getattr(self._here, "quiet", False):
            return
        is_mine = False
        try:
            with interrupts_held():  # else Ctrl-C right after could leave it taken for good
                is_mine = self._draining.acquire(blocking=False)
            if not is_mine:
                return
            self.follow()
            while self.seen != self.count.value:
                self.seen = self.count.value
                self._hand_over()
        finally:
            if is_mine:
                self._draining.release()

    def _hand_over(self) -> None:
        level, line = ctypes.c_int(), ctypes.create_string_buffer(_LINE_ROOM)
        to = self._ring, ctypes.byref(level), line, _LINE_ROOM, None
        while self._lib.refit_log_ring_read(*to) == abi.REFIT_OK:
            LOGGER.log(_LEVELS[level.value], "%s", line.value.decode("utf-8", "replace"))
        lost = self._lib.refit_log_ring_lost(self._ring)
        if lost:
            LOGGER.warning(
                "%d lines of the C library's log were lost: too many between calls", lost
            )

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Nothing is handed over by this thread within the block: the garbage collector may run it
        while the thread holds a lock of a log handler."""
        before = getattr(self._here, "quiet", False)
        self._here.quiet = True
        try:
            yield
        finally:
            self._here.quiet = before


def _wanted_level() -> int:
    """The most verbose level that the logger takes; errors are kept in any case."""
    for level in (abi.REFIT_LOG_DEBUG, abi.REFIT_LOG_INFO, abi.REFIT_LOG_WARNING):
        if LOGGER.isEnabledFor(_LEVELS[level]):
            return level
    return abi.REFIT_LOG_ERROR
