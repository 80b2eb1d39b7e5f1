"""An object of the C library is closed once, by the process that opened it, and is never copied."""

import copy
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from forks import said_in_a_fork
from interrupts import AtLine, lines
from refit._c import abi
from refit._c.config import make_config
from refit._c.device import Device
from refit._c.handle import Handle
from refit._c.library import call, lib, using
from refit.errors import BusyError, StateError
from refit.states.offloader import Offloader
from refit.weights.archive import Archive
from refit.weights.publisher import Publisher
from refit.weights.subscriber import Subscriber


class Thing(Handle):
    """Owns the number 7, and writes down each close."""

    def __init__(self, busy: int = 0, log: list[int] | None = None) -> None:
        self.log: list[int] = [] if log is None else log
        self.busy = busy
        self.begin()

    def begin(self) -> None:
        self._adopt(7)

    def use(self) -> int:
        return self._live

    def _close(self, pointer: int) -> None:
        if self.busy > 0:
            self.busy -= 1
            raise BusyError("something on it is still open")
        self.log.append(pointer)


def test_it_is_closed_once_and_refuses_uses_from_then_on() -> None:
    with Thing() as thing:
        assert thing.use() == 7
        assert not thing.closed
    thing.close()
    assert thing.closed
    with pytest.raises(StateError, match="this Thing is closed"):
        thing.use()
    with pytest.raises(KeyError), Thing(log=thing.log):
        raise KeyError
    assert thing.log == [7, 7]


def test_failed_close_can_be_called_again() -> None:
    thing = Thing(busy=1)
    with pytest.raises(BusyError):
        thing.close()
    assert not thing.closed
    thing.close()
    assert thing.log == [7]


@pytest.mark.parametrize("way", ["given", "needed"])
def test_what_another_thread_uses_stays_open(way: str) -> None:
    thing, entered, may_end = Thing(), threading.Event(), threading.Event()

    def function(*_: Any) -> int:
        entered.set()
        return 0 if may_end.wait(60) else 1

    def use() -> None:
        with using(thing.use()) if way == "needed" else nullcontext():
            call(function, thing.use() if way == "given" else 8)

    thread = threading.Thread(target=use)
    thread.start()
    assert entered.wait(60)
    with pytest.raises(StateError, match="a call of another thread"):
        thing.close()
    assert (thing.closed, thing.log) == (False, [])
    may_end.set()
    thread.join()
    thing.close()
    assert thing.log == [7]


def test_an_archive_that_another_thread_reads_stays_open(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "a", write=True)
    with ThreadPoolExecutor(1) as pool:
        with archive._call_lock, pytest.raises(StateError, match="in the middle of a call"):
            pool.submit(archive.close).result()
        assert len(archive) == 0
        archive.close()


AT_EXIT = """
import threading, time, refit
from refit._c.library import call, lib
from refit.states.offloader import Offloader
offloader = Offloader(refit.Device("host"), refit.Config())
entered = threading.Event()
real = lib.refit_offloader_close
def closing(*arguments):
    print("closed", flush=True)
    return real(*arguments)
lib.refit_offloader_close = closing
def hang(*_):
    entered.set()
    threading.Event().wait()
threading.Thread(target=call, args=(hang, offloader._live), daemon=True).start()
entered.wait()
"""


def test_at_exit_what_a_daemon_thread_uses_stays_open() -> None:
    done = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_an_unreferenced_object_is_closed_and_forgotten() -> None:
    thing = Thing()
    log, gone = thing.log, weakref.ref(thing)
    del thing
    gc.collect()
    assert log == [7]
    assert gone() is None


def test_one_that_cannot_be_closed_when_dropped_is_told() -> None:
    thing = Thing(busy=1)
    with pytest.warns(ResourceWarning, match=r"a Thing could not be closed: .* still open"):
        del thing


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("is_asked", [False, True])
def test_one_that_was_never_opened_is_not_closed(is_asked: bool) -> None:
    log: list[int] = []

    class Unopened(Thing):
        def begin(self) -> None:
            if not is_asked:
                raise BusyError("another process has the endpoint")
            self._open(lambda *_: abi.REFIT_ERR_BUSY)

    with pytest.raises(BusyError):
        Unopened(log=log)
    gc.collect()
    assert log == []


AT_THE_END = """
from refit._c import abi
from refit._c.handle import Handle
from refit.errors import BusyError

class Thing(Handle):
    def __init__(self, number):
        self._adopt(number)

    def _close(self, pointer):
        if pointer == 4:
            raise BusyError("something on it is still open")
        print("closed", pointer)

first, second, third, fourth = (Thing(number) for number in range(1, 5))
second.close()
cycle = [third]
cycle.append(cycle)
"""


def test_a_close_that_another_one_overtakes_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    thing, real = Thing(), os.getpid

    def overtaken() -> int:  # where the interpreter may go on with another thread
        monkeypatch.undo()
        thing.close()
        return real()

    monkeypatch.setattr("refit._c.handle.os.getpid", overtaken)
    thing.close()
    assert thing.log == [7]


def test_those_left_open_are_closed_at_exit_the_youngest_first() -> None:
    command = [sys.executable, "-W", "always", "-c", AT_THE_END]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0
    assert done.stdout.split("\n")[:3] == ["closed 2", "closed 3", "closed 1"]
    assert done.stderr.count("ResourceWarning: a Thing could not be closed: something on") == 1
    assert "Traceback" not in done.stderr


def an_offloader(_: Path) -> Handle:
    return Offloader(Device("host"), make_config())


def a_pool(_: Path) -> Handle:
    torch = pytest.importorskip("torch")
    from refit.memory_pool import MemPool

    return MemPool(torch.device("cpu"), 1 << 20)


OPENED: dict[str, Callable[[Path], Handle]] = {
    "archive": lambda folder: Archive(folder / "kept", write=True),
    "publisher": lambda folder: Publisher(f"ipc://{folder}/socket"),
    "subscriber": lambda folder: Subscriber(f"ipc://{folder}/socket"),
    "device": lambda _: Device("host"),
    "offloader": an_offloader,
    "arena": a_pool,
}


@pytest.mark.filterwarnings("error")
@pytest.mark.usefixtures("no_garbage")
@pytest.mark.parametrize("what", OPENED)
def test_ctrl_c_at_an_open_leaves_nothing_open_trap_12(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    ended: list[int] = []
    opens, closes = (getattr(lib, f"refit_{what}_{verb}") for verb in ("open", "close"))

    def interrupted(*arguments: Any) -> int:
        status: int = opens(*arguments)
        made.append(arguments[-2]._obj.value)
        signal.raise_signal(signal.SIGINT)
        return status

    def close(pointer: int, *more: Any) -> Any:
        ended.append(pointer)
        return closes(pointer, *more)

    monkeypatch.setattr(lib, f"refit_{what}_open", interrupted)
    monkeypatch.setattr(lib, f"refit_{what}_close", close)
    with pytest.raises(KeyboardInterrupt) as held:  # the frames, too, and what they refer to
        OPENED[what](tmp_path)
    assert ended == made
    del held
    gc.collect()
    assert len(ended) == len(made) == 1
    monkeypatch.undo()
    OPENED[what](tmp_path).close()  # its endpoint is free


@pytest.mark.usefixtures("no_garbage")
@pytest.mark.parametrize("what", OPENED)
def test_ctrl_c_at_a_close_leaves_nothing_open(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    closes = getattr(lib, f"refit_{what}_close")

    def close(pointer: int, *more: Any) -> Any:
        ended.append(pointer)
        return closes(pointer, *more)

    monkeypatch.setattr(lib, f"refit_{what}_close", close)
    for at in lines(True, what):
        opened = OPENED[what](tmp_path)
        pointer = opened._live
        ended.clear()
        interrupt = AtLine(at)
        try:
            with interrupt:
                opened.close()
        except KeyboardInterrupt:
            opened.close()
        assert ended == [pointer], at
        if not interrupt.done:
            break


@pytest.mark.parametrize("where", ["os.getpid", "weakref.finalize", "weakref.ref"])
def test_ctrl_c_after_an_open_closes_it_trap_12(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[int] = []

    class Opened(Thing):
        def begin(self) -> None:
            self._open(give)

    def give(out: Any, _: object) -> int:
        out._obj.value = 7
        monkeypatch.setattr(f"refit._c.handle.{where}", interrupted)
        return 0

    def interrupted(*_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Opened(log=log)
    gc.collect()
    assert log == [7]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_is_refused_and_closes_nothing() -> None:
    """Trap 27: fork after initialisation."""
    thing = Thing()

    def close() -> list[int]:
        thing.close()
        thing.__del__()
        return thing.log

    assert f"belongs to process {os.getpid()}" in said_in_a_fork(thing.use)
    assert said_in_a_fork(close) == "[]"
    assert thing.use() == 7
    thing.close()
    assert thing.log == [7]


@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy])
def test_pickling_and_copying_are_refused_with_a_sentence(how) -> None:  # type: ignore[no-untyped-def]
    """Trap 27: a framework that pickles what an actor holds."""
    with pytest.raises(TypeError, match=r"Thing cannot be pickled: .* open another one there"):
        how(Thing())
