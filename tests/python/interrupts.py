"""Code that runs before a numbered line of refit's Python code, as a signal handler would."""

import gc
import linecache
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import refit
from refit._c.library import lib

PACKAGE = str(Path(refit.__file__).parent) + os.sep
SEED = int(os.environ.get("TEST_SEED") or random.SystemRandom().randrange(1 << 30))
STRIDE = 29
"""Of the lines that are sampled; odd, so that what a test does by a line's number alternates."""
MOST = 20000
"""Lines of one call; more mean that a test does not end."""


@cache
def runs_handlers(file: str, line: int) -> bool:
    """Whether Python may run a handler before the line. It does not between the end of a with block
    and __exit__, nor where a try begins or a constant is returned, where a try has no effect; all
    are traced."""
    text = linecache.getline(file, line).lstrip()
    return not text.startswith(("with ", "try:", "return True"))


def lines(every: bool, name: str) -> Iterator[int]:
    """Numbers of lines until the caller breaks off: every one, or a random sample. A sample prints
    its seed; TEST_SEED repeats it."""
    first = 1
    if not every:
        print(f"TEST_SEED={SEED}")
        first = random.Random(f"{SEED} {name}").randint(1, STRIDE)
    yield from range(first, MOST, 1 if every else STRIDE)
    raise AssertionError("the call never ends")


def press() -> None:
    handler = signal.getsignal(signal.SIGINT)
    assert callable(handler)
    handler(signal.SIGINT, None)  # raises, or notes it for the end of a block that holds it


class AtLine:
    """Calls ``what`` once, before a numbered line of refit's Python code, or of one file's. No
    garbage of an earlier run is collected in the block: what a ``__del__`` raises goes nowhere."""

    def __init__(self, at: int, what: Callable[[], Any] = press, within: str = PACKAGE) -> None:
        self.what, self.left, self.within = what, at, within

    @property
    def done(self) -> bool:
        return self.left <= 0

    def __enter__(self) -> "AtLine":
        gc.disable()
        self.before = sys.gettrace()
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self.before)
        gc.enable()

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(self.within):
            return None
        if event == "line" and runs_handlers(file, frame.f_lineno):
            self.left -= 1
            if self.left == 0:
                sys.settrace(self.before)  # the rest of the call runs at full speed
                self.what()
        return self.trace


class AtCall(AtLine):
    """The same where Python may run a handler for certain: as a function of refit's begins, or a
    call of C in one ends."""

    def __enter__(self) -> "AtCall":
        gc.disable()
        sys.setprofile(self.profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        gc.enable()

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(self.within):
            self.left -= 1
            if self.left == 0:
                sys.setprofile(None)
                self.what()


@contextmanager
def ctrl_c_after(name: str, done: bool = True) -> Iterator[None]:
    """Ctrl-C comes when this function of the C library has returned, or in its place, and ends the
    block."""
    real = getattr(lib, name)

    def interrupted(*arguments: Any) -> Any:
        if not done:
            raise KeyboardInterrupt
        status = real(*arguments)
        os.kill(os.getpid(), signal.SIGINT)
        return status

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lib, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            yield
