"""One thread at a time: what publishers and subscribers of the C library ask of their callers.

A second thread is refused with a sentence instead of being let into C, and so is a signal handler
that comes back into an object in the middle of a call of it.
"""

import threading
from types import TracebackType

from refit.errors import StateError


class Turn:
    """Held for the length of a call. It never waits, but by ``wait``."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock = threading.Lock()
        self._holder = 0

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise StateError(
                f"this {self._what} is in the middle of a call: one thread at a time uses it"
            )
        self._holder = threading.get_ident()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._holder = 0
        self._lock.release()

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread holds it."""
        return self._holder == threading.get_ident()

    def wait(self) -> None:
        """Waits until nobody holds it."""
        with self._lock:
            pass
