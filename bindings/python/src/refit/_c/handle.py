"""The common part of all objects that own an object of the C library.

Such an object belongs to the process that opened it and to no other: a forked child is refused, and
so is pickling, each with a sentence. It is closed once, by ``close``, by ``with``, when no
reference to it is left, or when the interpreter ends, the youngest first; a second close does
nothing. One that another thread uses stays open. A close that fails where no caller could catch it
is a ResourceWarning.
"""

import ctypes
import os
import sys
import warnings
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn, Self

from refit._c.library import call, is_used_elsewhere, log
from refit._c.waiting import interrupts_held
from refit.errors import RefitError, StateError

# ---- Objects that are closed once: by ``close``, or at the end of a ``with`` block ---------------


class Closing:
    """A context manager of what has a ``close``."""

    def close(self) -> None:
        """Ends it; a second call does nothing."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Handle(Closing):
    """One object of the C library. Subclasses give ``_close``, which frees the pointer."""

    _pointer: int | None = None
    _process: int = 0
    _at_exit: "weakref.finalize[[weakref.ref[Handle]], Handle] | None" = None

    def _open(self, function: Any, *arguments: Any) -> None:
        """Lets a C function open it, which gives the pointer through its last argument. An
        exception that comes right after it, Ctrl-C for one, leaves nothing open."""
        out = ctypes.c_void_p()
        log.follow()
        try:
            call(function, *arguments, ctypes.byref(out))
            assert out.value is not None
            self._adopt(out.value)
        except BaseException:
            if out.value is not None:
                self._pointer, self._process = out.value, os.getpid()
                _close_silently(self)
            raise

    def _adopt(self, pointer: int) -> None:
        self._pointer = pointer
        self._process = os.getpid()
        # By its end the interpreter has taken apart what a close needs; workers await a goodbye.
        self._at_exit = weakref.finalize(self, _close_late, weakref.ref(self))

    @property
    def _live(self) -> int:
        """The C pointer, for a call; StateError once closed, or in a forked child."""
        if self._pointer is None:
            raise StateError(f"this {type(self).__name__} is closed")
        refuse_fork(self._process, type(self).__name__)
        return self._pointer

    @property
    def closed(self) -> bool:
        """Whether it has been closed."""
        return self._pointer is None

    def _close(self, pointer: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Closes it; does nothing if it is closed, or was opened by the process that forked."""
        if self._pointer is None or self._process != os.getpid():
            return
        self._refuse_use(self._pointer)
        with interrupts_held():  # else Ctrl-C before the call of C would leave it open for good
            # Taken before: C gives up the GIL, and another thread may close it meanwhile.
            pointer, self._pointer = self._pointer, None
            if pointer is None:  # it just has
                return
            try:
                self._close(pointer)
            except RefitError:  # refused. After anything else C may have freed it
                self._pointer = pointer
                raise
            if self._at_exit is not None:
                self._at_exit.detach()

    def _refuse_use(self, pointer: int) -> None:
        """StateError while another thread is in a call of it, as a daemon thread may be when the
        interpreter ends. For what has a lock of its own, ``_close`` does that."""
        if is_used_elsewhere(pointer):
            raise StateError(
                f"this {type(self).__name__} is in the middle of a call of another thread: close "
                "it after that"
            )

    def _close_at_exit(self) -> None:
        self.close()

    def __del__(self, _is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not _is_ending():
            with log.quiet():
                _close_silently(self)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled: it owns memory, threads and sockets "
            "of this process. Send its endpoint or its configuration, and open another one there."
        )


def refuse_fork(process: int, what: str) -> None:
    """StateError in another process than this one, whose object ``what`` is."""
    if process != os.getpid():
        raise StateError(
            f"this {what} belongs to process {process}: a forked process opens its own (use the "
            "spawn start method of multiprocessing)"
        )


def _close_silently(handle: Handle, at_exit: bool = False) -> None:
    """Closes it where no caller could catch an exception."""
    try:
        if at_exit:
            handle._close_at_exit()
        else:
            handle.close()
    except RefitError as why:
        what = type(handle).__name__
        warnings.warn(f"a {what} could not be closed: {why}", ResourceWarning, stacklevel=2)


def _close_late(reference: "weakref.ref[Handle]") -> None:
    handle = reference()
    if handle is not None:
        _close_silently(handle, at_exit=True)
