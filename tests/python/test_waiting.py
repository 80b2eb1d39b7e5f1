"""Ctrl-C ends every wait, none is lost, and no call goes on after it was interrupted.

Signals are real ones, sent to this process while it waits in C.
"""

import ctypes
import faulthandler
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import refit._c.waiting
from forks import said_in_a_fork
from interrupts import AtLine, lines
from refit._c.waiting import (
    SLICE_MS,
    Calls,
    interrupts_held,
    run_interruptibly,
    wait_in_slices,
)
from refit.errors import CancelledError, DeadlineError, InvalidError, PeerError

LIBC = ctypes.CDLL(None, use_errno=True)


class Bell:
    """A pipe on which C code waits, with the GIL given up, until it is rung."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        self.waiting = threading.Event()

    def wait(self, timeout_ms: int = 60000) -> bool:
        """In C, deaf for signals like a C library's wait: EINTR starts it again."""
        descriptor = (ctypes.c_int * 2)(self.reader, 1)  # POLLIN
        self.waiting.set()
        while (found := LIBC.poll(descriptor, 1, timeout_ms)) < 0:
            assert ctypes.get_errno() == 4
        return bool(found)

    def ring(self) -> None:
        os.write(self.writer, b"!")

    def close(self) -> None:
        os.close(self.reader)
        os.close(self.writer)


@pytest.fixture
def bell() -> Iterator[Bell]:
    one = Bell()
    yield one
    one.close()


def signal_when(
    event: threading.Event, number: int = signal.SIGINT, times: int = 1
) -> threading.Thread:
    """Sends real signals to this process, once `event` is set."""

    def send() -> None:
        assert event.wait(60)
        for _ in range(times):
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@contextmanager
def handled(number: int, handler: Any) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def threads_of_calls() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name == "refit-call"]


@pytest.fixture(autouse=True)
def nothing_goes_on_and_the_handler_is_back() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    assert threads_of_calls() == []
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("endless", [None, float("inf")])
def test_wait_goes_on_in_slices_until_it_is_there(endless: float | None) -> None:
    seen: list[int] = []

    def step(left: int) -> str:
        seen.append(left)
        if len(seen) < 5:
            raise DeadlineError("nothing new yet")
        return "there"

    assert wait_in_slices(step, endless) == "there"
    assert seen == [SLICE_MS] * 5


def test_wait_raises_the_last_deadline_when_time_is_up(bell: Bell) -> None:
    seen: list[int] = []

    def step(left: int) -> None:
        seen.append(left)
        if not bell.wait(left):
            raise DeadlineError(f"{len(seen)} looks")

    begun = time.monotonic()
    with pytest.raises(DeadlineError) as caught:
        wait_in_slices(step, 0.25)
    assert time.monotonic() - begun >= 0.25  # never sooner
    assert str(caught.value) == f"{len(seen)} looks"
    assert all(0 <= left <= SLICE_MS for left in seen)


@pytest.mark.parametrize("error", [DeadlineError, PeerError])
def test_wait_looks_once_without_time_and_after_other_errors(error: type[Exception]) -> None:
    seen: list[int] = []

    def step(left: int) -> None:
        seen.append(left)
        raise error("nothing new yet")

    with pytest.raises(error):
        wait_in_slices(step, 0 if error is DeadlineError else None)
    assert seen == [0 if error is DeadlineError else SLICE_MS]


@pytest.mark.parametrize("wrong", [-1, -0.001, float("nan"), float("-inf")])
def test_wait_refuses_what_is_not_a_time(wrong: float) -> None:
    with pytest.raises(InvalidError, match="seconds"):
        wait_in_slices(lambda left: left, wrong)


def test_ctrl_c_ends_a_wait_in_slices(bell: Bell) -> None:
    def step(left: int) -> None:
        if not bell.wait(left):
            raise DeadlineError("nothing new yet")

    sender = signal_when(bell.waiting)
    with pytest.raises(KeyboardInterrupt):
        wait_in_slices(step, None)
    sender.join()


def test_call_gives_result_or_raises_error_with_trace() -> None:
    def fail() -> None:
        raise PeerError("worker 3 was lost")

    assert run_interruptibly(lambda: 42) == 42
    with pytest.raises(PeerError, match="worker 3") as caught:
        run_interruptibly(fail)
    assert "fail" in [frame.name for frame in caught.traceback]


def test_ctrl_c_cancels_a_call_and_waits_for_its_end(bell: Bell) -> None:
    ended: list[bool] = []

    def commit() -> None:
        ended.append(bell.wait())
        raise CancelledError("the version was cancelled")

    sender = signal_when(bell.waiting)
    with pytest.raises(KeyboardInterrupt) as caught:
        run_interruptibly(commit, bell.ring)
    sender.join()
    assert ended == [True]
    assert isinstance(caught.value.__context__, CancelledError)


def test_calls_of_one_block_share_a_thread_that_ends_with_it() -> None:
    seen: list[int] = []

    def fail() -> None:
        raise PeerError("worker 3 was lost")

    with Calls() as calls:
        assert threads_of_calls() == []
        for _ in range(3):
            calls.run(lambda: seen.append(threading.get_ident()))
            assert threads_of_calls() == ["refit-call"]
        with pytest.raises(PeerError, match="worker 3"):
            calls.run(fail)
        assert calls.run(lambda: 42) == 42
    assert len(set(seen)) == 1
    assert threads_of_calls() == []


def test_a_process_that_was_forked_in_a_block_makes_no_call() -> None:
    with Calls() as calls:
        calls.run(lambda: None)
        assert "forked" in said_in_a_fork(lambda: calls.run(lambda: None))


def test_the_thread_of_a_block_that_was_left_without_its_end_ends() -> None:
    calls = Calls()
    calls.run(lambda: None)
    (thread,) = (one for one in threading.enumerate() if one.name == "refit-call")
    del calls
    thread.join(60)
    assert not thread.is_alive()


def ring_after(sender: threading.Thread, bell: Bell) -> threading.Thread:
    """The signal has been sent when the call ends."""

    def ring() -> None:
        sender.join()
        bell.ring()

    thread = threading.Thread(target=ring)
    thread.start()
    return thread


def test_without_cancel_the_call_ends_first(bell: Bell) -> None:
    done: list[bool] = []
    ringer = ring_after(signal_when(bell.waiting), bell)
    with pytest.raises(KeyboardInterrupt):
        run_interruptibly(lambda: done.append(bell.wait()))
    ringer.join()
    assert done == [True]


def test_many_ctrl_c_cancel_once(bell: Bell) -> None:
    cancels: list[int] = []

    def cancel() -> None:
        cancels.append(1)
        sender.join()  # all others come while this one is handled
        signal.raise_signal(signal.SIGINT)
        bell.ring()

    sender = signal_when(bell.waiting, times=3)
    with pytest.raises(KeyboardInterrupt):
        run_interruptibly(bell.wait, cancel)
    assert cancels == [1]


def test_ctrl_c_of_another_thread_does_not_wait_for_the_call(bell: Bell) -> None:
    """The main thread sleeps, and no signal of its own wakes it."""

    def send() -> None:
        assert bell.waiting.wait(60)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    sender = threading.Thread(target=send)
    sender.start()
    rung: list[bool] = []
    with pytest.raises(KeyboardInterrupt):
        run_interruptibly(lambda: rung.append(bell.wait()), bell.ring)
    sender.join()
    assert rung == [True]  # and not at the end of its time


def test_failing_cancel_is_not_hidden(bell: Bell) -> None:
    def cancel() -> None:
        bell.ring()
        raise PeerError("cannot be cancelled")

    sender = signal_when(bell.waiting)
    with pytest.raises(KeyboardInterrupt) as caught:
        run_interruptibly(bell.wait, cancel)
    sender.join()
    assert isinstance(caught.value.__context__, PeerError)


def test_ctrl_c_handler_of_the_program_is_respected(bell: Bell) -> None:
    seen: list[int] = []

    def ask_to_stop(number: int, _frame: object) -> None:
        seen.append(number)

    with handled(signal.SIGINT, ask_to_stop):
        sender = signal_when(bell.waiting)
        assert run_interruptibly(bell.wait, bell.ring)
        sender.join()
        assert signal.getsignal(signal.SIGINT) is ask_to_stop
    assert seen == [signal.SIGINT]


def test_ignored_ctrl_c_stays_ignored(bell: Bell) -> None:
    with handled(signal.SIGINT, signal.SIG_IGN):
        ringer = ring_after(signal_when(bell.waiting), bell)
        assert run_interruptibly(bell.wait, lambda: pytest.fail("was cancelled"))
        ringer.join()


class Terminated(Exception):
    pass


def terminate(_number: int, _frame: object) -> None:
    raise Terminated


def test_handlers_of_other_signals_cancel_too(bell: Bell) -> None:
    ended: list[bool] = []
    with handled(signal.SIGUSR1, terminate):
        sender = signal_when(bell.waiting, signal.SIGUSR1)
        with pytest.raises(Terminated):
            run_interruptibly(lambda: ended.append(bell.wait()), bell.ring)
        sender.join()
    assert ended == [True]


def test_second_handler_does_not_leave_the_call_running(bell: Bell) -> None:
    """One exception ends the wait, another comes while the call's end is waited for."""
    again, ringers = threading.Event(), []

    def cancel() -> None:
        ringers.append(ring_after(signal_when(again, signal.SIGUSR1), bell))
        again.set()

    with handled(signal.SIGUSR1, terminate):
        sender = signal_when(bell.waiting, signal.SIGUSR1)
        with pytest.raises(Terminated):
            run_interruptibly(bell.wait, cancel)
        assert threads_of_calls() == []
        sender.join()
        ringers[0].join()


def test_handlers_of_all_signals_wait_for_the_end_of_a_block() -> None:
    seen: list[int] = []

    def note(number: int, _frame: object) -> None:
        seen.append(number)

    def raise_in_a_block(numbers: Iterable[int]) -> None:
        with interrupts_held():
            for one in numbers:
                signal.raise_signal(one)
            assert seen == []

    came = signal.SIGUSR2, signal.SIGUSR1, signal.SIGALRM, signal.SIGUSR2, signal.SIGINT
    with (
        handled(signal.SIGUSR1, terminate),
        handled(signal.SIGUSR2, note),
        handled(signal.SIGALRM, note),
    ):
        with pytest.raises(KeyboardInterrupt) as caught:
            raise_in_a_block(came)
        assert isinstance(caught.value.__context__, Terminated)
        assert signal.getsignal(signal.SIGUSR1) is terminate
        assert signal.getsignal(signal.SIGUSR2) is note
    assert seen == [signal.SIGUSR2, signal.SIGALRM]  # also after one that raised


def test_what_stands_before_a_handler_stays_after_a_block() -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    with tempfile.TemporaryFile() as file:
        try:
            faulthandler.register(signal.SIGUSR1, file, chain=True)
            for _ in range(2):
                with interrupts_held(), interrupts_held():
                    pass
                at = file.seek(0, os.SEEK_END)
                signal.raise_signal(signal.SIGUSR1)
                assert file.seek(0, os.SEEK_END) > at
        finally:
            faulthandler.unregister(signal.SIGUSR1)
            signal.signal(signal.SIGUSR1, before)


def test_a_handler_that_is_chosen_in_a_block_stays() -> None:
    with handled(signal.SIGUSR1, terminate):
        with interrupts_held():
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN


def held() -> None:
    with interrupts_held():
        pass


def two_calls() -> None:
    with Calls() as calls:
        calls.run(lambda: 1)
        calls.run(lambda: 2)


@pytest.mark.parametrize("call", [held, lambda: run_interruptibly(lambda: 42), two_calls])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1, None])
def test_exception_before_any_line_leaves_handlers_unchanged(
    number: signal.Signals | None, call: Callable[[], object]
) -> None:
    """By a handler, or without one, as another thread can."""

    def interrupts() -> None:
        if number is None:
            raise Terminated
        signal.raise_signal(number)

    raised = 0
    with handled(signal.SIGUSR1, terminate), handled(signal.SIGUSR2, terminate):
        for at in lines(True, ""):
            interrupt = AtLine(at, interrupts, refit._c.waiting.__file__)
            try:
                with interrupt:
                    call()
            except (KeyboardInterrupt, Terminated):
                raised += 1
            assert raised == at if interrupt.done else raised == at - 1
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            assert signal.getsignal(signal.SIGUSR1) is terminate
            assert signal.getsignal(signal.SIGUSR2) is terminate
            if not interrupt.done:
                break
    assert raised > 10


def test_other_threads_call_plainly() -> None:
    seen: list[str] = []
    thread = threading.Thread(
        target=lambda: run_interruptibly(lambda: seen.append(threading.current_thread().name)),
        name="a worker",
    )
    thread.start()
    thread.join()
    assert seen == ["a worker"]


@pytest.mark.parametrize("late_us", [0, 50, 200, 1000])
def test_ctrl_c_at_any_moment_is_seen_exactly_once(late_us: int) -> None:
    """At the start of the thread, in the call, at its end: each time one KeyboardInterrupt."""

    def attempt(send: Callable[[], None]) -> int:
        seen = 0
        sender = threading.Thread(target=send)
        ended: list[int] = []
        started = 0
        try:
            sender.start()
            while sender.is_alive():
                started += 1
                run_interruptibly(lambda: ended.append(1))
        except KeyboardInterrupt:
            seen += 1
        sender.join()
        assert len(ended) in (started, started - 1)
        return seen

    def send() -> None:
        until = time.perf_counter() + late_us / 1e6
        while time.perf_counter() < until:
            pass
        os.kill(os.getpid(), signal.SIGINT)

    for _ in range(20):
        count = 0
        try:
            count = attempt(send)
        except KeyboardInterrupt:  # after the last call
            count += 1
        assert count == 1
        assert threads_of_calls() == []
