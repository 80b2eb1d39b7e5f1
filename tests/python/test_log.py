"""What the C library says reaches logging.getLogger("refit"), after calls and nowhere else."""

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from forks import said_in_a_fork
from refit._c import abi
from refit._c.device import Device
from refit._c.handle import Handle
from refit._c.library import lib, log

NO_ARENA = "no arena is attached"


def speak() -> None:
    """C logs an error, from what PyTorch calls under a lock of its own."""
    assert not lib.refit_torch_alloc(512, 63, None)


def some_call() -> None:
    Device("host").close()


@contextmanager
def handled_by(handler: logging.Handler) -> Iterator[None]:
    logging.getLogger("refit").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("refit").removeHandler(handler)


@pytest.fixture(autouse=True)
def nothing_is_left(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    some_call()
    caplog.clear()
    yield
    caplog.set_level(logging.NOTSET, "refit")
    log.follow()


def test_a_line_comes_after_the_next_call(caplog: pytest.LogCaptureFixture) -> None:
    speak()
    assert caplog.records == []  # never from within
    some_call()
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("refit", logging.ERROR)
    assert NO_ARENA in record.getMessage()
    some_call()
    assert len(caplog.records) == 1


def test_a_failed_call_hands_over_what_a_thread_said(caplog: pytest.LogCaptureFixture) -> None:
    thread = threading.Thread(target=speak)
    thread.start()
    thread.join()
    with pytest.raises(Exception, match="no device"):
        Device("no device")
    assert len(caplog.records) == 1


def test_the_level_is_the_logger_s(caplog: pytest.LogCaptureFixture) -> None:
    if os.path.exists("/dev/nvidia0"):
        pytest.skip("there is a GPU, whose device says more")
    Device("auto").close()  # says at INFO which device that is
    assert caplog.records == []
    caplog.set_level(logging.INFO, "refit")
    Device("auto").close()
    assert [record.levelno for record in caplog.records] == [logging.INFO]
    assert "device auto: host" in caplog.text
    caplog.set_level(logging.WARNING, "refit")
    caplog.clear()
    Device("auto").close()
    assert caplog.records == []
    before = log.count.value
    Device("auto").close()
    assert log.count.value == before  # C keeps nothing that the logger does not take


def test_lines_that_are_too_many_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(300):
        speak()
    some_call()
    *lines, last = caplog.records
    assert len(lines) == 256
    assert "44 lines" in last.getMessage()
    assert last.levelno == logging.WARNING
    speak()
    some_call()
    assert NO_ARENA in caplog.records[-1].getMessage()


def test_a_handler_may_call_refit(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []

    class Calling(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())
            if len(seen) < 3:
                speak()
            some_call()

    with handled_by(Calling()):
        speak()
        some_call()
    assert len(seen) == 3


def test_ctrl_c_as_lines_come_keeps_no_later_ones_back(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = log._draining

    class Interrupted:
        release = real.release

        def acquire(self, blocking: bool) -> bool:
            found = real.acquire(blocking)
            signal.raise_signal(signal.SIGINT)
            return found

    speak()
    monkeypatch.setattr(log, "_draining", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        some_call()
    monkeypatch.undo()
    assert not real.locked()
    some_call()
    assert any(NO_ARENA in one.getMessage() for one in caplog.records)


def test_nothing_is_handed_over_where_the_collector_runs(caplog: pytest.LogCaptureFixture) -> None:
    closed: list[int] = []

    class Speaking(Handle):
        def __init__(self) -> None:
            self._adopt(1)

        def _close(self, pointer: int) -> None:
            speak()
            some_call()
            closed.append(len(caplog.records))

    thing = Speaking()
    del thing
    gc.collect()
    assert closed == [0]
    some_call()
    assert len(caplog.records) == 1
    with Speaking():
        pass
    assert closed == [0, 2]  # an explicit close is a call like others


def test_a_log_function_in_c_hears_the_same(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[bytes] = []
    function = abi.refit_log_fn(lambda _user, _level, line: heard.append(line))
    lib.refit_set_log(function, None, abi.REFIT_LOG_ERROR)
    try:
        speak()
    finally:
        lib.refit_set_log(abi.refit_log_fn(), None, abi.REFIT_LOG_ERROR)
    some_call()
    assert len(heard) == len(caplog.records) == 1
    assert NO_ARENA.encode() in heard[0]


def test_a_forked_child_has_lines_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    def seen() -> list[int]:
        some_call()
        none = len(caplog.records)
        speak()
        some_call()
        return [none, len(caplog.records)]

    speak()
    assert said_in_a_fork(seen) == "[0, 1]"
    some_call()
    assert len(caplog.records) == 1


def test_a_child_of_a_fork_in_the_middle_can_hand_over(caplog: pytest.LogCaptureFixture) -> None:
    begun, forked = threading.Event(), threading.Event()

    class Slow(logging.Handler):
        def emit(self, _record: logging.LogRecord) -> None:
            begun.set()
            assert forked.wait(60)

    def seen() -> int:
        forked.set()
        before = len(caplog.records)
        speak()
        some_call()
        return len(caplog.records) - before

    with handled_by(Slow()):
        speak()
        other = threading.Thread(target=some_call)
        other.start()
        assert begun.wait(60)
        told = said_in_a_fork(seen)
        forked.set()
        other.join()
    assert told == "1"


def test_the_last_lines_come_when_the_interpreter_ends() -> None:
    script = "from refit._c.library import lib; lib.refit_torch_alloc(512, 63, None)"
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    assert NO_ARENA in ended.stderr
