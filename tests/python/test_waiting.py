"""Ctrl-C ends every wait, none is lost, and no call goes on after it was interrupted.

Signals are real ones, sent to this process while it waits in C.
"""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from refit._waiting import SLICE_MS, run_interruptibly, wait_in_slices
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


def interrupt_when(event: threading.Event, times: int = 1) -> threading.Thread:
    """Sends real SIGINTs to this process, once `event` is set."""

    def send() -> None:
        assert event.wait(60)
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def threads_of_calls() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name == "refit-call"]


def test_wait_returns_what_the_step_returns() -> None:
    assert wait_in_slices(lambda left: f"within {left}", 60) == f"within {SLICE_MS}"


def test_wait_goes_on_in_slices_until_it_is_there() -> None:
    seen: list[int] = []

    def step(left: int) -> int:
        seen.append(left)
        if len(seen) < 5:
            raise DeadlineError("nothing new yet")
        return 42

    assert wait_in_slices(step, None) == 42
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
    assert len(seen) >= 2


def test_wait_of_no_time_looks_once() -> None:
    seen: list[int] = []

    def step(left: int) -> None:
        seen.append(left)
        raise DeadlineError("nothing new yet")

    with pytest.raises(DeadlineError):
        wait_in_slices(step, 0)
    assert seen == [0]


@pytest.mark.parametrize("wrong", [-1, -0.001, float("nan"), float("-inf")])
def test_wait_refuses_what_is_no_time(wrong: float) -> None:
    with pytest.raises(InvalidError, match="seconds"):
        wait_in_slices(lambda left: left, wrong)


def test_wait_takes_endless_time() -> None:
    assert wait_in_slices(lambda left: left, float("inf")) == SLICE_MS


def test_wait_lets_other_errors_through() -> None:
    def step(_left: int) -> None:
        raise PeerError("the trainer is gone")

    with pytest.raises(PeerError):
        wait_in_slices(step, None)


def test_ctrl_c_ends_a_wait_in_slices(bell: Bell) -> None:
    def step(left: int) -> None:
        if not bell.wait(left):
            raise DeadlineError("nothing new yet")

    sender = interrupt_when(bell.waiting)
    with pytest.raises(KeyboardInterrupt):
        wait_in_slices(step, None)
    sender.join()


def test_call_gives_its_result() -> None:
    assert run_interruptibly(lambda: 42) == 42
    assert threads_of_calls() == []


def test_call_raises_its_error_with_its_trace() -> None:
    def fail() -> None:
        raise PeerError("worker 3 was lost")

    with pytest.raises(PeerError, match="worker 3") as caught:
        run_interruptibly(fail)
    assert "fail" in [frame.name for frame in caught.traceback]
    assert threads_of_calls() == []


def test_ctrl_c_cancels_a_call_and_waits_for_its_end(bell: Bell) -> None:
    ended: list[bool] = []

    def commit() -> None:
        ended.append(bell.wait())
        raise CancelledError("the version was cancelled")

    sender = interrupt_when(bell.waiting)
    with pytest.raises(KeyboardInterrupt) as caught:
        run_interruptibly(commit, bell.ring)
    sender.join()
    assert ended == [True]
    assert isinstance(caught.value.__context__, CancelledError)
    assert threads_of_calls() == []


def test_ctrl_c_is_not_lost_when_the_call_succeeds(bell: Bell) -> None:
    sender = interrupt_when(bell.waiting)
    with pytest.raises(KeyboardInterrupt):
        run_interruptibly(bell.wait, bell.ring)
    sender.join()


def test_without_cancel_the_call_ends_first(bell: Bell) -> None:
    done: list[bool] = []
    sender = interrupt_when(bell.waiting)

    def clear() -> None:
        done.append(bell.wait())

    def ring() -> None:
        sender.join()  # the signal has been sent: it comes before the call's end
        bell.ring()

    ringer = threading.Thread(target=ring)
    ringer.start()
    with pytest.raises(KeyboardInterrupt):
        run_interruptibly(clear)
    ringer.join()
    assert done == [True]


def test_many_ctrl_c_cancel_once(bell: Bell) -> None:
    cancels: list[int] = []

    def cancel() -> None:
        cancels.append(1)
        signal.raise_signal(signal.SIGINT)
        bell.ring()

    sender = interrupt_when(bell.waiting, times=3)
    with pytest.raises(KeyboardInterrupt):
        run_interruptibly(bell.wait, cancel)
    try:
        sender.join()
    except KeyboardInterrupt:  # one that came after the call
        sender.join()
    assert cancels == [1]


def test_ctrl_c_that_another_thread_was_given_does_not_wait_for_the_call(bell: Bell) -> None:
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

    sender = interrupt_when(bell.waiting)
    with pytest.raises(KeyboardInterrupt) as caught:
        run_interruptibly(bell.wait, cancel)
    sender.join()
    assert isinstance(caught.value.__context__, PeerError)
    assert threads_of_calls() == []


def test_ctrl_c_handler_of_the_program_is_respected(bell: Bell) -> None:
    seen: list[int] = []

    def ask_to_stop(number: int, _frame: object) -> None:
        seen.append(number)

    before = signal.signal(signal.SIGINT, ask_to_stop)
    try:
        sender = interrupt_when(bell.waiting)
        assert run_interruptibly(bell.wait, bell.ring)
        sender.join()
        assert signal.getsignal(signal.SIGINT) is ask_to_stop
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT]


def test_ignored_ctrl_c_stays_ignored(bell: Bell) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        sender = interrupt_when(bell.waiting)

        def ring() -> None:
            sender.join()
            bell.ring()

        ringer = threading.Thread(target=ring)
        ringer.start()
        assert run_interruptibly(bell.wait, lambda: pytest.fail("was cancelled"))
        ringer.join()
    finally:
        signal.signal(signal.SIGINT, before)


class Terminated(Exception):
    pass


def test_handlers_of_other_signals_cancel_too(bell: Bell) -> None:
    def terminate(_number: int, _frame: object) -> None:
        raise Terminated

    def send() -> None:
        assert bell.waiting.wait(60)
        os.kill(os.getpid(), signal.SIGUSR1)

    ended: list[bool] = []
    before = signal.signal(signal.SIGUSR1, terminate)
    sender = threading.Thread(target=send)
    try:
        sender.start()
        with pytest.raises(Terminated):
            run_interruptibly(lambda: ended.append(bell.wait()), bell.ring)
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)
    assert ended == [True]
    assert threads_of_calls() == []


def test_second_handler_does_not_leave_the_call_running(bell: Bell) -> None:
    """One exception ends the wait, another comes while the call's end is waited for."""

    def terminate(_number: int, _frame: object) -> None:
        raise Terminated

    def cancel() -> None:
        def send() -> None:
            os.kill(os.getpid(), signal.SIGUSR1)
            bell.ring()

        threading.Thread(target=send).start()

    def send() -> None:
        assert bell.waiting.wait(60)
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, terminate)
    sender = threading.Thread(target=send)
    try:
        sender.start()
        with pytest.raises(Terminated):
            run_interruptibly(bell.wait, cancel)
        assert threads_of_calls() == []
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)


def test_the_handler_is_back_however_the_wait_ends() -> None:
    def fail() -> None:
        raise PeerError("lost")

    before = signal.getsignal(signal.SIGINT)
    run_interruptibly(lambda: None)
    with pytest.raises(PeerError):
        run_interruptibly(fail)
    assert signal.getsignal(signal.SIGINT) is before


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
        except KeyboardInterrupt:  # behind the last call
            count += 1
        assert count == 1
        assert threads_of_calls() == []
