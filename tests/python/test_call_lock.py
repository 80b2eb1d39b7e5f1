"""A call lock belongs to one thread at a time, and is released however its block ends."""

import sys
import threading
from collections.abc import Callable
from types import FrameType

import pytest
from refit._c import call_lock
from refit._c.call_lock import CallLock, WaitingCallLock
from refit.errors import BusyError, StateError


def is_free(call_lock: CallLock) -> bool:
    """Whether another thread would get it."""
    found: list[bool] = []

    def look() -> None:
        try:
            with call_lock:
                found.append(True)
        except StateError:
            found.append(False)

    other = threading.Thread(target=look)
    other.start()
    other.join()
    return found[0]


def test_a_second_thread_and_a_second_call_are_refused() -> None:
    call_lock = CallLock("Publisher")
    with call_lock:
        assert call_lock.is_mine
        assert not is_free(call_lock)
        with pytest.raises(StateError, match="this Publisher is in the middle of a call"):
            call_lock.__enter__()
        assert call_lock.is_mine
    assert not call_lock.is_mine
    assert is_free(call_lock)


def test_a_block_that_does_not_wait_is_refused_under_the_lock() -> None:
    call_lock = WaitingCallLock("controller")
    with call_lock.at_once:
        assert call_lock.is_mine
        with pytest.raises(BusyError), call_lock.at_once:
            pytest.fail("it was taken twice")
        assert call_lock.is_mine
    assert not call_lock.is_mine
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        with call_lock:
            taken.set()
            done.wait(30)

    other = threading.Thread(target=hold)
    other.start()
    assert taken.wait(30)
    try:
        with pytest.raises(BusyError), call_lock.at_once:
            pytest.fail("it was taken from another thread")
    finally:
        done.set()
        other.join()
    with pytest.raises(KeyError), call_lock.at_once:
        raise KeyError("in the block")
    assert not call_lock.is_mine


class CtrlC:
    """Raises where a signal's handler could: as a function of the module begins, or as a call of C
    in it ends, at the one of a given number."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        if frame.f_code.co_filename != call_lock.__file__ or event not in ("call", "c_return"):
            return
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def use(call_lock: CallLock) -> None:
    with call_lock:
        pass


def use_at_once(call_lock: CallLock) -> None:
    with call_lock.at_once:
        pass


@pytest.mark.parametrize("use", [use, use_at_once])
def test_ctrl_c_anywhere_leaves_the_lock_to_others(  # trap 12
    use: Callable[[CallLock], None],
) -> None:
    steps = 0
    while True:
        call_lock, ctrl_c, before = CallLock("Publisher"), CtrlC(steps + 1), sys.getprofile()
        sys.setprofile(ctrl_c)
        try:
            use(call_lock)
            break
        except KeyboardInterrupt:
            steps += 1
        finally:
            sys.setprofile(before)
        assert is_free(call_lock), steps
    assert steps >= 3


def test_a_waiting_thread_goes_on_once_the_lock_is_free() -> None:
    call_lock, waited = CallLock("Subscriber"), threading.Event()
    waiter = threading.Thread(target=lambda: (call_lock.wait(), waited.set()))
    with call_lock:
        waiter.start()
        assert not waited.is_set()
    waiter.join()
    assert waited.is_set()
    assert is_free(call_lock)
