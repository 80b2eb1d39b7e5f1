"""A turn belongs to one thread at a time, and ends however its block ends."""

import sys
import threading
from types import FrameType

import pytest
from refit import _turn
from refit._turn import Turn
from refit.errors import StateError


def is_free(turn: Turn) -> bool:
    """Whether another thread would get it."""
    found: list[bool] = []

    def look() -> None:
        try:
            with turn:
                found.append(True)
        except StateError:
            found.append(False)

    other = threading.Thread(target=look)
    other.start()
    other.join()
    return found[0]


def test_a_second_thread_and_a_second_call_are_refused() -> None:
    turn = Turn("Publisher")
    with turn:
        assert turn.is_mine
        assert not is_free(turn)
        with pytest.raises(StateError, match="this Publisher is in the middle of a call"):
            turn.__enter__()
        assert turn.is_mine
    assert not turn.is_mine
    assert is_free(turn)


class CtrlC:
    """Raises where a signal's handler could: as a function of the module begins, or as a call of C
    in it ends, at the one of a given number."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        if frame.f_code.co_filename != _turn.__file__ or event not in ("call", "c_return"):
            return
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def use(turn: Turn) -> None:
    with turn:
        pass


def test_ctrl_c_anywhere_leaves_the_turn_to_others() -> None:  # trap 12
    steps = 0
    while True:
        turn, ctrl_c, before = Turn("Publisher"), CtrlC(steps + 1), sys.getprofile()
        sys.setprofile(ctrl_c)
        try:
            use(turn)
            break
        except KeyboardInterrupt:
            steps += 1
        finally:
            sys.setprofile(before)
        assert is_free(turn), steps
    assert steps >= 3


def test_who_waits_goes_on_once_nobody_holds_it() -> None:
    turn, waited = Turn("Subscriber"), threading.Event()
    waiter = threading.Thread(target=lambda: (turn.wait(), waited.set()))
    with turn:
        waiter.start()
        assert not waited.is_set()
    waiter.join()
    assert waited.is_set()
    assert is_free(turn)
