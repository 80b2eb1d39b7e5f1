"""The trainer's end: what is declared, written and committed, and what goes wrong."""

import ctypes
import gc
import os
import pickle
import signal
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from broadcasting import LOCAL, NOWHERE, ONE, TIMEOUT, Pair, WorkerThread, bytes_of
from interrupts import AtCall, ctrl_c_after, lines
from refit._c import abi, dtypes
from refit._c import device as devices
from refit._c.device import Device
from refit._c.library import call as call_c
from refit._c.library import lib
from refit.errors import (
    BusyError,
    CancelledError,
    ConfigError,
    DeadlineError,
    InvalidError,
    LimitError,
    NotFoundError,
    PeerError,
    SecurityError,
    StaleError,
    StateError,
    UnsupportedError,
)
from refit.weights.manifest import Alias, RawTensor, TensorSpec
from refit.weights.publisher import Publisher
from refit.weights.source import weight_of
from refit.weights.subscriber import Subscriber
from refit.weights.update import Update


def test_a_version_reaches_a_worker_whole(pair: Pair, torch_device: str) -> None:
    matrix = torch.arange(6.0, device=torch_device).view(2, 3)
    weights = {
        "a": matrix,
        "a.tied": matrix,
        "a.turned": matrix.t(),
        "bf16": matrix.bfloat16(),
        "fp8": matrix.to(torch.float8_e4m3fn),
        "scalar": torch.tensor(3, device=torch_device),
        "empty": torch.empty(0, 4, device=torch_device),
        "array": np.arange(3, dtype=np.int16),
        "bytes": b"abc",
        "alias": Alias("array"),
    }
    assert pair.publisher.publish(weights) == pair.publisher.version == 1
    assert pair.worker.subscriber.describe().version == 1
    (seen,) = pair.worker.seen
    assert list(seen) == list(weights)
    assert seen["a"] == seen["a.tied"] == struct.pack("6f", *range(6))
    assert seen["a.turned"] == struct.pack("6f", 0, 3, 1, 4, 2, 5)
    for name, dtype in (("bf16", torch.bfloat16), ("fp8", torch.float8_e4m3fn)):
        assert seen[name] == matrix.to(dtype).view(torch.uint8).cpu().numpy().tobytes()
    assert seen["scalar"] == struct.pack("q", 3)
    assert seen["empty"] == b""
    assert seen["array"] == seen["alias"] == struct.pack("3h", 0, 1, 2)
    assert seen["bytes"] == b"abc"


@pytest.mark.parametrize("options", [{"broadcast_shm": "auto"}, {"broadcast_shm": "off"}])
def test_every_type_is_carried(pair: Pair) -> None:
    pair.worker.apply = lambda update: {
        view.name: (view.dtype, view.shape, bytes_of(view)) for view in update.views()
    }
    shape = (3, 4)
    sent = {
        name: (name, shape, os.urandom(dtype.nbytes(shape)))
        for name, dtype in dtypes.DTYPES.items()
    }
    pair.publisher.publish({name: RawTensor(raw, name, shape) for name, _, raw in sent.values()})
    assert pair.worker.seen == [sent]


def test_it_declares_again_only_when_something_changed(pair: Pair) -> None:
    publisher, worker = pair
    publisher.publish(ONE)
    before = publisher.declared
    publisher.publish({"w": np.zeros(4, np.float32)})
    assert publisher.declared is before
    publisher.publish({"w": np.zeros(5, np.float32)})
    assert publisher.declared == (TensorSpec("w", "F32", (5,)),)
    publisher.publish({"w": np.zeros(5, np.float32), "x": np.zeros(1, np.int8)})
    assert [len(seen["w"]) for seen in worker.seen] == [16, 16, 20, 20]


def test_versions_are_numbered_by_the_caller_or_by_it_trap_35(publisher: Publisher) -> None:
    numbers = (None, 7, None, np.int64(9), torch.tensor(10))
    assert [publisher.publish(ONE, number) for number in numbers] == [1, 7, 8, 9, 10]
    with pytest.raises(StaleError, match="10"):
        publisher.publish(ONE, 10)
    for bad in (0, -1, 2**64):
        with pytest.raises(InvalidError, match="they count from 1"):
            publisher.publish(ONE, bad)
    with pytest.raises(TypeError, match="float"):
        publisher.publish(ONE, 11.0)  # type: ignore[arg-type]
    assert publisher.version == 10


def test_the_steps_can_be_taken_one_by_one(pair: Pair) -> None:
    publisher, worker = pair
    publisher.declare([TensorSpec("b", "I8", (2,)), TensorSpec("a", "F32", (1,))])
    publisher.begin()
    publisher.write("a", np.ones(1, np.float32))
    publisher.write("b", memoryview(b"xy").cast("b"))
    publisher.commit()
    publisher.begin(9)
    publisher.abort()
    assert publisher.version == 1
    assert worker.seen == [{"b": b"xy", "a": struct.pack("f", 1)}]


def test_a_step_out_of_order_is_refused(publisher: Publisher) -> None:
    for refused in (publisher.begin, publisher.commit, publisher.abort):
        with pytest.raises(StateError):
            refused()
    publisher.declare(ONE)
    with pytest.raises(StateError, match="begin"):
        publisher.write("w", ONE["w"])
    publisher.begin()
    for refused in (publisher.begin, publisher.commit, lambda: publisher.declare({"x": b"a"})):
        with pytest.raises(StateError):
            refused()
    assert [spec.name for spec in publisher.declared] == ["w"]
    publisher.write("w", ONE["w"])  # it lacked a tensor, and stayed open
    publisher.commit()
    assert publisher.version == 1


def test_a_write_is_checked_against_what_was_declared_trap_33(publisher: Publisher) -> None:
    publisher.declare([TensorSpec("w", "F32", (4,)), TensorSpec("tied", "F32", (4,), "w")])
    publisher.begin()
    for tensor, sentence in (
        (np.zeros(4), r"w is F64 \[4\], but was declared as F32 \[4\]"),
        (np.zeros((2, 2), np.float32), r"w is F32 \[2, 2\]"),
        (Alias("tied"), "bytes of its own, not as tied"),
    ):
        with pytest.raises(InvalidError, match=sentence):
            publisher.write("w", tensor)
    with pytest.raises(NotFoundError, match="'x' was not declared"):
        publisher.write("x", ONE["w"])
    publisher.write("tied", ONE["w"][:])  # travels with the one it is tied to
    publisher.write("w", ONE["w"])
    publisher.commit()


@pytest.mark.parametrize("options", [{"limits_tensors": 2}])
@pytest.mark.parametrize(
    ("weights", "error"), [({}, InvalidError), (dict.fromkeys("abc", b"x"), LimitError)]
)
def test_what_cannot_be_declared_is_refused_and_nothing_breaks(
    publisher: Publisher, weights: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        publisher.publish(weights)
    assert publisher.declared == ()
    assert publisher.publish(ONE) == 1


def test_a_refusal_names_the_worker_and_its_reason(pair: Pair) -> None:
    def refuse(update: Update) -> None:
        raise RuntimeError("no such layer: lm_head")

    pair.worker.apply = refuse
    with pytest.raises(PeerError) as failed:
        pair.publisher.publish(ONE)
    (named,) = failed.value.workers
    assert named.name == "w0"
    assert "RuntimeError: no such layer: lm_head" in named.reason
    assert named.status
    assert pickle.loads(pickle.dumps(failed.value)).workers == (named,)


def test_workers_and_figures_are_described(pair: Pair) -> None:
    pair.publisher.publish(ONE)
    (one,) = pair.publisher.workers()
    assert (one.name, one.version, one.status, one.reason) == ("w0", 1, 0, "")
    assert one.subscribed
    assert one.member
    assert one.committed
    assert one.path in ("shm", "socket")
    with pytest.raises(AttributeError):
        one.name = "else"  # type: ignore[misc]
    figures = pair.publisher.stats()
    assert figures["publish_version"] == 1
    assert figures["publish_bytes_last"] == 16
    assert figures["workers"] == figures["workers_committed_last"] == 1
    assert all(isinstance(value, (int, float)) for value in figures.values())


def test_waiting_for_workers_says_how_many_there_are(publisher: Publisher) -> None:
    publisher.wait_workers(0)
    with pytest.raises(DeadlineError, match="0 of 2"):
        publisher.wait_workers(2, 0.01)
    with pytest.raises(TimeoutError):
        publisher.wait_workers(1, 0)
    for bad in (-1, 2**32):
        with pytest.raises(InvalidError, match="cannot be waited for"):
            publisher.wait_workers(bad)
    with pytest.raises(InvalidError, match="timeout"):
        publisher.wait_workers(1, -1)


# ---- Endpoints


@pytest.mark.parametrize(
    ("endpoint", "options", "error", "sentence"),
    [
        ("tcp://0.0.0.0:0", {}, SecurityError, "insecure"),
        ("nonsense", {}, InvalidError, "nonsense"),
        ("tcp://127.0.0.1:0\0", {}, InvalidError, "NUL"),
        (LOCAL, {"broadcast_slots": 3}, ConfigError, "slots"),
    ],
)
def test_a_publisher_that_cannot_be_is_refused_with_a_sentence(
    endpoint: str, options: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        Publisher(endpoint, **options)


def test_both_ends_meet_without_an_endpoint(runtime_dir: Path) -> None:
    with Publisher() as publisher, WorkerThread(None) as worker:
        assert publisher.endpoint == f"ipc://{runtime_dir}/refit/refit.sock"
        publisher.wait_workers(1, TIMEOUT)
        publisher.publish(ONE)
        with pytest.raises(BusyError):
            Publisher()
        with Publisher("user://*") as one, Publisher("user://second") as other:
            assert len({publisher.endpoint, one.endpoint, other.endpoint}) == 3
    assert len(worker.seen) == 1
    assert list((runtime_dir / "refit").iterdir()) == []


@pytest.mark.usefixtures("runtime_dir")
def test_an_endpoint_that_every_user_reaches_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    def warnings() -> int:
        lines = [one.getMessage() for one in caplog.records if one.name == "refit"]
        return sum("has no keys: every user of this machine" in line for line in lines)

    with Publisher(LOCAL) as publisher, Subscriber(publisher.endpoint):
        assert publisher.endpoint.startswith("tcp://127.0.0.1:")
        assert warnings() == 2
    with Publisher() as publisher, Subscriber():
        assert warnings() == 2
    with Publisher(LOCAL, broadcast_insecure=True):
        assert warnings() == 2


def test_what_comes_from_the_socket_is_never_unpickled(pair: Pair, tmp_path: Path) -> None:
    zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")
    made = tmp_path / "made"
    bomb = f"cos\nmkdir\n(V{made}\ntR.".encode()
    with zmq.Context() as context:
        for kind in (zmq.DEALER, zmq.REQ):
            with context.socket(kind) as stranger:
                stranger.linger = int(TIMEOUT * 1000)  # until it is sent
                stranger.connect(pair.publisher.endpoint)
                stranger.send(bomb)
    assert pair.publisher.publish(ONE) == 1
    assert len(pair.worker.seen) == 1
    assert not made.exists()
    pickle.loads(bomb)
    assert made.exists()


# ---- Threads, Ctrl-C and the end


def test_one_thread_at_a_time_uses_it(publisher: Publisher) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def slow() -> Iterator[tuple[str, Any]]:
        inside.set()
        go_on.wait(TIMEOUT)
        yield "w", ONE["w"]

    trainer = threading.Thread(target=publisher.publish, args=(slow(),))
    trainer.start()
    assert inside.wait(TIMEOUT)
    for call in (
        publisher.begin,
        publisher.abort,
        publisher.close,
        publisher.commit,
        lambda: publisher.publish(ONE),
    ):
        with pytest.raises(StateError, match="one thread at a time"):
            call()
    assert publisher.version == 0  # these are for any thread
    assert publisher.stats()["workers"] == 0
    go_on.set()
    trainer.join()
    assert publisher.version == 1


def test_another_thread_ends_a_wait(pair: Pair) -> None:
    publisher, worker = pair
    cancelled = threading.Event()

    def cancel(update: Update) -> None:
        publisher.cancel()
        cancelled.wait(TIMEOUT)

    worker.apply = cancel
    with pytest.raises(CancelledError):
        publisher.publish(ONE)
    cancelled.set()
    assert publisher.version == 1  # the worker had been told: the version stands
    publisher.cancel()
    with pytest.raises(CancelledError):
        publisher.wait_workers(5)


@pytest.mark.parametrize("options", [{"broadcast_slots": 1}])
@pytest.mark.parametrize(
    ("waiting", "at_call", "left", "then"),
    [("begin", 1, {1}, 2), ("commit", 1, {0, 1}, 2), ("wait_workers", 2, {0}, 1)],
)
def test_ctrl_c_ends_a_wait_and_it_is_still_good(
    pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
    waiting: str,
    at_call: int,
    left: set[int],
    then: int,
) -> None:
    publisher, worker = pair
    go_on, calls = threading.Event(), []
    real = getattr(lib, f"refit_publisher_{waiting}")

    def hold(update: Update) -> None:
        if waiting == "begin":
            update.accept()
        go_on.wait(TIMEOUT)  # and keeps the only slot meanwhile

    def interrupted(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == at_call:
            os.kill(os.getpid(), signal.SIGINT)
        return real(*arguments)

    worker.apply = hold
    if waiting == "begin":
        publisher.publish(ONE)
    with monkeypatch.context() as patch:
        patch.setattr(lib, f"refit_publisher_{waiting}", interrupted)
        with pytest.raises(KeyboardInterrupt):
            publisher.wait_workers(2) if waiting == "wait_workers" else publisher.publish(ONE)
    go_on.set()
    assert publisher.version in left
    assert publisher.publish(ONE) == then


def test_ctrl_c_at_any_call_of_a_publish_leaves_no_version_open(pair: Pair) -> None:
    publisher, _ = pair
    for at in lines(True, ""):
        interrupt = AtCall(at)
        with suppress(KeyboardInterrupt), interrupt:
            publisher.publish(ONE)
        before = publisher.version
        assert publisher.publish(ONE) > before
        if not interrupt.done:
            break


def test_after_close_all_calls_but_a_second_close_are_refused() -> None:
    publisher = Publisher(LOCAL)
    publisher.close()
    publisher.close()
    assert publisher.closed
    assert publisher.endpoint
    for call in (
        lambda: publisher.publish(ONE),
        lambda: publisher.wait_workers(1, 0),
        lambda: publisher.version,
        lambda: publisher.use_device("host"),
        publisher.begin,
        publisher.commit,
        publisher.abort,
        publisher.cancel,
        publisher.workers,
        publisher.stats,
    ):
        with pytest.raises(StateError, match="this Publisher is closed"):
            call()


def opened(kind: type[Publisher | Subscriber]) -> Publisher | Subscriber:
    return kind(NOWHERE if kind is Subscriber else LOCAL)


@pytest.mark.usefixtures("no_garbage")
@pytest.mark.parametrize("kind", [Publisher, Subscriber])
def test_a_close_cut_short_by_ctrl_c_is_not_done_twice_trap_12(
    monkeypatch: pytest.MonkeyPatch, kind: type[Publisher | Subscriber]
) -> None:
    name = f"refit_{kind.__name__.lower()}_close"
    real = getattr(lib, name)
    freed: list[int] = []

    def close_and_raise(pointer: int) -> None:
        freed.append(pointer)
        real(pointer)
        raise KeyboardInterrupt

    one = opened(kind)
    monkeypatch.setattr(lib, name, close_and_raise)
    with pytest.raises(KeyboardInterrupt):
        one.close()
    one.close()
    assert one.closed
    del one
    assert len(freed) == 1


# ---- Devices


def test_a_device_is_named_in_the_callers_words(publisher: Publisher) -> None:
    publisher.use_device(torch.device("cpu"))  # nothing to share: nothing happens
    publisher.use_device("host")
    for wrong, sentence in ((3.5, r"3\.5 is not a device"), ("mainframe", "mainframe")):
        with pytest.raises(InvalidError, match=sentence):
            publisher.use_device(wrong)
    assert publisher.publish(ONE) == 1
    with Publisher(LOCAL, broadcast_gpu="require") as other, pytest.raises(UnsupportedError):
        other.use_device("host")


def test_devices_by_any_name() -> None:
    names = (torch.device("cuda", 2), torch.device("cpu"), 1, "cuda:0:capacity=1GiB")
    assert list(map(devices.spec_of, names)) == ["cuda:2", "host", "cuda:1", names[3]]


@pytest.mark.usefixtures("no_garbage")
@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize("end", [Publisher, Subscriber])
def test_a_device_that_it_opened_is_closed_after_it_trap_12(
    end: type[Publisher | Subscriber], interrupted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    what = end.__name__.lower()
    closing = "refit_publisher_end" if end is Publisher else "refit_subscriber_close"
    ended: list[str] = []

    def noting(name: str) -> Any:
        real = getattr(lib, name)

        def close(*arguments: Any) -> Any:
            ended.append(name)
            return real(*arguments)

        return close

    with Device("host") as mine:
        for name in ("refit_device_close", closing):
            monkeypatch.setattr(lib, name, noting(name))
        with opened(end) as one:
            with ctrl_c_after(f"refit_{what}_use_device") if interrupted else nullcontext():
                one.use_device("host")
            gc.collect()
            assert ended == []
        assert ended == [closing, "refit_device_close"]
        with opened(end) as one:
            monkeypatch.undo()
            one.use_device(mine)
        assert not mine.closed


class OfAnotherLibrary:
    """Host memory that is said to be a GPU's, as CuPy shows it."""

    def __init__(self, memory: Any) -> None:
        self.asked: list[int | None] = []
        self.memory = np.array(memory, np.float32)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 3

    def __dlpack__(self, stream: int | None = None) -> Any:
        self.asked.append(stream)
        return self.memory.__dlpack__()


class Streams:
    """PyTorch's current stream of every device is the one of this number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self.cuda_stream = number
        self.asked: list[int] = []
        monkeypatch.setattr(torch.cuda, "current_stream", self._of)

    def _of(self, device: int) -> "Streams":
        self.asked.append(device)
        return self


def test_device_bytes_are_read_after_caller_work_trap_17(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, stream = Device("host"), abi.refit_stream_ref()
    call_c(lib.refit_stream_open, device.pointer, ctypes.byref(stream))
    monkeypatch.setattr("refit.weights.writer.Device", {"cuda:3": device}.__getitem__)
    streams = Streams(monkeypatch, stream.native)
    there = {
        name: OfAnotherLibrary([value] * 4) for name, value in zip("abd", range(3), strict=True)
    }
    weights = {"a": there["a"], "b": there["b"], "c": ONE["w"], "d": there["d"]}
    runs: list[list[str]] = []

    def count(name: str) -> None:
        function = getattr(lib, name)

        def counted(*arguments: Any) -> Any:
            if arguments[3] is not None:
                runs[-1].append(name.removeprefix("refit_publisher_"))
            return function(*arguments)

        monkeypatch.setattr(lib, name, counted)

    count("refit_publisher_write_all")
    count("refit_publisher_lend")
    for given in (weights, iter(weights.items()), {"x": there["a"]}):
        runs.append([])
        pair.publisher.publish(given)
    call_c(lib.refit_stream_close, device.pointer, stream)
    whole = {name: one.memory.tobytes() for name, one in there.items()}
    whole["c"] = ONE["w"].tobytes()
    assert pair.worker.seen == [whole, whole, {"x": whole["a"]}]
    assert set(streams.asked) == {3}
    # Tensors there stay, and are lent together; of an iterator's each is one, and goes.
    assert runs == [["lend"], ["write_all"] * 3, ["lend"]]


def test_other_library_work_comes_before_reading_trap_17(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = OfAnotherLibrary(range(4))
    for number in (0x7F00, 0):  # 0 is PyTorch's name of the default stream
        Streams(monkeypatch, number)
        assert weight_of(other).device == 3
        assert devices.stream_of(3) == (number or 1)
        with monkeypatch.context() as patch:  # as in builds for GPUs
            raw = {3: number}.__getitem__
            patch.setattr(torch._C, "_cuda_getCurrentRawStream", raw, raising=False)
            patch.delattr(torch.cuda, "current_stream")
            assert devices.stream_of(3) == (number or 1)
    monkeypatch.delitem(sys.modules, "torch")
    weight_of(other)
    assert devices.stream_of(3) == 1
    assert other.asked == [0x7F00, 1, 1]


def test_a_wait_for_ranks_that_fails_leaves_the_shard() -> None:
    """The other ranks may come yet; or this one has all of the tensors again."""
    specs, rows = [TensorSpec("a", "F32", (4, 2))], {"a": (slice(0, 2),)}
    with Publisher(LOCAL) as first, Publisher(LOCAL) as second:
        for one in (first, second):
            one.declare(specs)
        with pytest.raises(DeadlineError, match="1 missing"):
            first.shard(first.endpoint, 0, 2, rows, timeout=0.1)
        assert first.declared == tuple(specs)
        assert first.shards is not None
        assert first.shards["a"].shape == (2, 2)
        with pytest.raises(PeerError, match="not all there"):
            first.begin()
        second.shard(first.endpoint, 1, 2, {"a": (slice(2, 4),)})
        number = first.begin()
        assert second.begin() == 0  # rank 0 chooses it
        first.abort()
        second.abort()
        assert number == 1
        first.unshard()
        first.publish({"a": torch.ones(4, 2)})
        assert first.version == 2
