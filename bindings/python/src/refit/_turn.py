"""One thread at a time: what publishers and subscribers of the C library ask of their callers.

A second thread is refused with a sentence instead of being let into C, and so is a signal handler
that comes back into an object in the middle of a call of it.

Ctrl-C may be raised wherever Python code begins or a call of it ends. So a turn is given back by a
method that is written in C, and one that was just taken is given back where it was taken.
"""

import threading
from typing import Any, Literal

from refit.errors import StateError

_RLock: Any = type(threading.RLock())


class Turn(_RLock):  # type: ignore[misc]
    """Held for the length of a call. It never waits, but by ``wait``. ``__exit__`` is the lock's
    own: one in Python would be skipped if Ctrl-C came as it begins, and the turn never end."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __new__(cls, what: str) -> "Turn":
        made: Turn = super().__new__(cls)
        return made

    def __enter__(self) -> Literal[True]:
        mine_before = self.is_mine
        try:
            if not mine_before and self.acquire(blocking=False):
                return True
        except BaseException:
            if self.is_mine and not mine_before:
                self.release()
            raise
        raise StateError(
            f"this {self._what} is in the middle of a call: one thread at a time uses it"
        )

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread holds it."""
        return bool(self._is_owned())

    def wait(self) -> None:
        """Waits until no other thread holds it. Not for who holds it."""
        try:
            self.acquire()
        finally:
            if self.is_mine:
                self.release()
