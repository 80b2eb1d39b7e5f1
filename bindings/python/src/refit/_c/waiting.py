"""How Python waits for C, so that Ctrl-C works.

Python runs signal handlers between bytecodes of the main thread, and a call into C is one of them:
for as long as it blocks, Ctrl-C does nothing. So C calls that take a timeout are made in slices,
and those that take none run on a helper thread while the main thread waits where signals reach it.
That thread has ended when the wait returns, or the block of ``Calls``: nothing goes on without the
caller.

An exception that a signal handler raises comes after the C call under way has returned. Code
that waits for an object of the C library keeps the pointer where it is found then, to close it.
Where an exception between two lines would lose more than that, all handlers wait: SIGTERM's and
SIGALRM's raise in many programs, too.
"""

import _signal  # type: ignore[import-not-found]
import ctypes
import math
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from queue import SimpleQueue
from types import FrameType
from typing import Any, Generic, Self, TypeVar

from refit.errors import DeadlineError, InvalidError, StateError

T = TypeVar("T")

SLICE_MS = 100

_Handler = Callable[[int, FrameType | None], object]

_SIGNALS = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})

# Those of ``signal`` look for a name for each handler: 60 microseconds for 64 signals, and not 3.
_handler_of: Callable[[int], Any] = _signal.getsignal
_handle_by: Callable[[int, Any], Any] = _signal.signal

_action_of = ctypes.PyDLL(None).sigaction
"""The system's. Python takes the place of a handler in C that stands before its own, as
faulthandler's may, and forgets ``signal.siginterrupt``."""
_Action = ctypes.c_char * 256
"""Room for a struct sigaction, which has 152 bytes or fewer."""


def wait_in_slices(step: Callable[[int], T], timeout_s: float | None) -> T:
    """Calls ``step`` with slices of the time in milliseconds until it raises no DeadlineError.

    Returns what ``step`` returned. Once ``timeout_s`` seconds have passed, the last DeadlineError
    is raised as it is; 0 polls once, None waits without a limit. Anything else that ``step`` or a
    signal handler raises ends the wait at once. InvalidError for a time that is negative or no
    number.
    """
    if timeout_s is not None and not timeout_s >= 0:
        raise InvalidError(f"a timeout of {timeout_s} s: give seconds, 0 or more, or None")
    end = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while True:
        left_ms = (end - time.monotonic()) * 1000
        slice_ms = SLICE_MS if left_ms > SLICE_MS else max(0, math.ceil(left_ms))
        try:
            return step(slice_ms)
        except DeadlineError:
            if time.monotonic() >= end:
                raise


def run_interruptibly(function: Callable[[], T], cancel: Callable[[], object] | None = None) -> T:
    """Runs a C call that takes no timeout; returns what it returns, raises what it raises.

    On the main thread, Ctrl-C meanwhile calls ``cancel`` once (from there, while the call runs:
    what it uses must be marked "any thread"), then waits for the call's end, and then does what
    Ctrl-C does, KeyboardInterrupt as a rule: it is never lost, also if the call succeeded. Handlers
    of other signals run meanwhile, and one that raises is treated alike. On another thread, which
    no signal reaches, it is a plain call.
    """
    with Calls() as calls:
        return calls.run(function, cancel)


class Calls:
    """``run_interruptibly`` many times in one block, with one helper thread, which ends with the
    block. Belongs to the thread and the process that made it."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[_Call[Any] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    def __enter__(self) -> Self:
        return self

    def run(self, function: Callable[[], T], cancel: Callable[[], object] | None = None) -> T:
        """One call, and not during another one. StateError in a process that was forked in the
        block: the thread is its parent's."""
        if self._process != os.getpid():
            raise StateError(
                "this process was forked in the middle of the call: it is its parent's"
            )
        if threading.current_thread() is not threading.main_thread():
            return function()
        call = _Call(function)
        with _Held(cancel) as held:
            try:
                self._start(call)
                while not call.wait():
                    held.call_handlers(but=signal.SIGINT)
            except BaseException:
                if call.wanted:
                    held.cancel_once()
                raise
            finally:
                call.outlast()
            return call.future.result()

    def _start(self, call: "_Call[Any]") -> None:
        if self._thread is None:
            # Where an exception has kept the block from its end, the thread ends with this object.
            end = weakref.ref(self, partial(self._queue.put, None))
            self._thread = threading.Thread(
                target=_serve, args=(self._queue, end), name="refit-call", daemon=True
            )
            self._thread.start()
        self._queue.put(call)
        call.begin()

    def __exit__(self, *_: object) -> None:
        try:
            self._end()
        except BaseException:  # an exception of another thread's making may have come before it
            self._end()
            raise

    def _end(self) -> None:
        """Waits for the thread's end, whatever handlers raise meanwhile; the last of that is raised
        then."""
        late: BaseException | None = None
        self._queue.put(None)
        while self._thread is not None:
            try:
                if self._thread.ident is not None:
                    self._thread.join()
                self._thread = None
            except BaseException as why:
                late = why
        if late is not None:
            raise late


def _serve(queue: "SimpleQueue[_Call[Any] | None]", _end: object) -> None:
    while (call := queue.get()) is not None:
        call.serve()
        del call  # it holds what was called, and a result


class _Call(Generic[T]):
    """A function on the helper thread.

    An exception of another thread's making may come while it is handed over; then it is unknown
    whether it was. So the thread begins with a look at whether it is still wanted.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self.future: Future[T] = Future()
        self.wanted = False
        self._function = function
        self._gate = threading.Event()

    def begin(self) -> None:
        self.wanted = True
        self._gate.set()

    def serve(self) -> None:
        self._gate.wait()
        if not self.wanted:
            return
        try:
            self.future.set_result(self._function())
        except BaseException as why:
            self.future.set_exception(why)

    def wait(self) -> bool:
        """For a slice of time: whether the call has ended. A signal that comes just before a thread
        goes to sleep, or that the kernel gives to another thread, does not wake it."""
        return bool(wait([self.future], SLICE_MS / 1000).done)

    def outlast(self) -> None:
        """Waits for its end, whatever handlers raise meanwhile; the last of that is raised then."""
        late: BaseException | None = None
        self._gate.set()
        while self.wanted and not self.future.done():
            try:
                self.wait()
            except BaseException as why:
                late = why
        if late is not None:
            raise late


class _Held:
    """Holds Python's signal handlers back for the length of a block, and calls them at its end.

    A handler that raises could do so at any bytecode: between the start of a thread and the wait
    for it, or between the start of a copy and the line that notes whose memory it writes to. These
    do not raise. A handler that is not Python's is left as it is. The signals themselves cannot be
    blocked: the kernel gives them to another thread then, and Python calls the handler all the
    same.
    """

    def __init__(self, cancel: Callable[[], object] | None = None) -> None:
        self._cancel = cancel
        self._handlers: dict[int, _Handler] = {}
        self._actions: dict[int, Any] = {}
        self._held: list[int] = []
        """Signals that have no handler of their own yet."""
        self._came: dict[int, FrameType | None] = {}

    def cancel_once(self) -> None:
        cancel, self._cancel = self._cancel, None
        if cancel is not None:
            cancel()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came.setdefault(number, frame)
        if number == signal.SIGINT:
            self.cancel_once()

    def __enter__(self) -> "_Held":
        try:
            for number in _SIGNALS:
                handler = _handler_of(number)
                if callable(handler):
                    self._handlers[number] = handler
                    self._actions[number] = action = _Action()
                    _action_of(number, None, action)
                    self._held.append(number)
                    _handle_by(number, self._note)
            return self
        except BaseException:  # what a handler raises that is not held yet, or another thread sends
            self._put_back()
            raise

    def _put_back(self) -> None:
        """Gives all signals their handlers, whatever those raise that have theirs. One that a
        handler has chosen meanwhile stays."""
        try:
            while self._held:
                number = self._held[-1]
                found, before = _handler_of(number), self._handlers[number]
                if found == self._note:
                    _handle_by(number, before)
                if found == self._note or found is before:
                    _action_of(number, self._actions[number], None)
                self._held.pop()
        except BaseException:
            self._put_back()
            raise

    def call_handlers(self, but: int | None = None) -> None:
        """Those of the signals that came, each once, in their order; also if one of them raises."""
        try:
            for number in list(self._came):
                if number != but:
                    self._handlers[number](number, self._came.pop(number))
        except BaseException:
            self.call_handlers(but)
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._put_back()
        except BaseException:  # an exception of another thread's making may have come before it
            self._put_back()
            raise
        finally:
            self.call_handlers()


def interrupts_held() -> AbstractContextManager[Any]:
    """A block in which Ctrl-C, and every other signal that has a handler of Python's, waits for
    the end of it. On a thread that no signal reaches it does nothing."""
    if threading.current_thread() is not threading.main_thread():
        return nullcontext()
    return _Held()
