"""One call at a time: what publishers, subscribers and controllers ask of their callers.

A ``CallLock`` refuses a second thread with a sentence instead of letting it into C; with a
``WaitingCallLock`` it waits. Both refuse a signal handler that comes back into an object in the
middle of a call of it.

Ctrl-C may be raised wherever Python code begins or a call of it ends. So a lock is released by a
method that is written in C, and one that was just taken is released where it was taken.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

from refit._c.waiting import SLICE_MS, interrupts_held
from refit.errors import BusyError, RefitError, StateError

_RLock: Any = type(threading.RLock())


class CallLock(_RLock):  # type: ignore[misc]
    """Held for the length of a call. It never waits, but by ``wait``. ``__exit__`` is the lock's
    own: one in Python would be skipped if Ctrl-C came as it begins, and leave the lock held."""

    _waits: ClassVar[bool] = False
    _lets_in = False

    def __init__(self, what: str) -> None:
        self._what = what

    def __new__(cls, what: str) -> "CallLock":
        made: CallLock = super().__new__(cls)
        return made

    def __enter__(self) -> Literal[True]:
        mine_before = self.is_mine
        try:
            if (self._lets_in or not mine_before) and self.acquire(blocking=self._waits):
                self._lets_in = self._lets_in and mine_before
                return True
        except BaseException:
            if self.is_mine and not mine_before:
                self.release()
            raise
        raise self._refusal()

    def _refusal(self) -> RefitError:
        return StateError(
            f"this {self._what} is in the middle of a call: one thread at a time uses it"
        )

    @property
    def at_once(self) -> "_AtOnce":
        """What a block takes it by that never waits: refused while another thread has it, too."""
        return _AtOnce(self)

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread holds it."""
        return bool(self._is_owned())

    def wait(self) -> None:
        """Waits until no other thread holds it. Not for a thread that holds it."""
        is_free = False
        while not is_free:
            with interrupts_held():  # between the two Ctrl-C would leave the lock held for good
                is_free = self.acquire(timeout=SLICE_MS / 1000)
                if is_free:
                    self.release()


class _AtOnce:
    """Takes a lock for a block if nothing holds it. ``__exit__`` is found before, and is the
    lock's own."""

    def __init__(self, lock: CallLock) -> None:
        self._lock = lock

    def __enter__(self) -> Literal[True]:
        lock = self._lock
        if not lock.is_mine:
            try:
                if lock.acquire(blocking=False):
                    return True
            except BaseException:
                if lock.is_mine:
                    lock.release()
                raise
        raise lock._refusal()

    @property
    def __exit__(self) -> Callable[..., None]:
        leave: Callable[..., None] = self._lock.__exit__
        return leave


class WaitingCallLock(CallLock):
    """Held while memory moves. Another thread waits; the thread that holds it is refused."""

    _waits = True

    @contextmanager
    def letting_in(self, lets_in: bool) -> Iterator[None]:
        """A block, within the lock, in which the thread that holds it may take it again or not."""
        before, self._lets_in = self._lets_in, lets_in
        try:
            yield
        finally:
            self._lets_in = before

    def _refusal(self) -> RefitError:
        return BusyError(
            f"this {self._what} is in the middle of a call in this thread: a signal handler, a "
            "finalizer or a log handler cannot use or move the states now. Set a flag there, and "
            "do it after the call"
        )
