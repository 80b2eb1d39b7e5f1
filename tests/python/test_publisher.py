"""The trainer's end: what is declared, written and committed, and what goes wrong."""

import os
import pickle
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from broadcasting import LOCAL, PATIENCE, WorkerThread, both, pair
from refit import dtypes
from refit._library import lib
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
)
from refit.manifest import Alias, TensorSpec, Typed
from refit.publisher import Publisher
from refit.subscriber import Subscriber

ONE = {"w": np.arange(4, dtype=np.float32)}


def test_a_version_reaches_a_worker_whole(torch_device: str) -> None:
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
    with pair() as (publisher, worker):
        assert publisher.publish(weights) == 1
        assert publisher.version == 1
        assert worker.subscriber.describe().version == 1
    seen = worker.seen[0]
    assert list(seen) == list(weights)
    assert seen["a"] == seen["a.tied"] == struct.pack("6f", *range(6))
    assert seen["a.turned"] == struct.pack("6f", 0, 3, 1, 4, 2, 5)
    for name, dtype in (("bf16", torch.bfloat16), ("fp8", torch.float8_e4m3fn)):
        assert seen[name] == matrix.to(dtype).view(torch.uint8).cpu().numpy().tobytes()
    assert seen["scalar"] == struct.pack("q", 3)
    assert seen["empty"] == b""
    assert seen["array"] == seen["alias"] == struct.pack("3h", 0, 1, 2)
    assert seen["bytes"] == b"abc"


@pytest.mark.parametrize("shm", ["auto", "off"])
@pytest.mark.parametrize("name", dtypes.DTYPES)
def test_every_type_is_carried(name: str, shm: str) -> None:
    shape = (3, 4)
    raw = os.urandom(dtypes.by_name(name).nbytes(shape))

    def look(update: Any) -> Any:
        return update["w"].dtype, update["w"].shape, bytes(update["w"].bytes)

    with pair(look, broadcast_shm=shm) as (publisher, worker):
        publisher.publish({"w": Typed(raw, name, shape)})
    assert worker.seen == [(name, shape, raw)]


def test_it_declares_again_only_when_something_changed() -> None:
    with pair() as (publisher, worker):
        publisher.publish(ONE)
        before = publisher.declared
        publisher.publish({"w": np.zeros(4, np.float32)})
        assert publisher.declared is before
        publisher.publish({"w": np.zeros(5, np.float32)})
        assert publisher.declared == (TensorSpec("w", "F32", (5,)),)
        publisher.publish({"w": np.zeros(5, np.float32), "x": np.zeros(1, np.int8)})
    assert [len(seen["w"]) for seen in worker.seen] == [16, 16, 20, 20]


def test_a_version_is_any_integer() -> None:
    with Publisher(LOCAL) as publisher:
        for count, number in enumerate((4, np.int64(5), torch.tensor(6)), 4):
            assert publisher.publish(ONE, number) == count  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="float"):
            publisher.publish(ONE, 7.0)  # type: ignore[arg-type]
        assert publisher.publish(ONE) == 7


def test_versions_are_numbered_by_the_caller_or_by_it_trap_35() -> None:
    with Publisher(LOCAL) as publisher:
        assert [publisher.publish(ONE, version) for version in (None, 7, None)] == [1, 7, 8]
        for used in (7, 8):
            with pytest.raises(StaleError, match=str(used)):
                publisher.publish(ONE, used)
        for bad in (0, -1, 2**64):
            with pytest.raises(InvalidError, match="they count from 1"):
                publisher.publish(ONE, bad)
        assert publisher.version == 8


def test_the_steps_can_be_taken_one_by_one() -> None:
    with pair() as (publisher, worker):
        publisher.declare([TensorSpec("b", "I8", (2,)), TensorSpec("a", "F32", (1,))])
        publisher.begin()
        publisher.write("a", np.ones(1, np.float32))
        publisher.write("b", memoryview(b"xy").cast("b"))
        publisher.commit()
        publisher.begin(9)
        publisher.abort()
        assert publisher.version == 1
    assert worker.seen == [{"b": b"xy", "a": struct.pack("f", 1)}]


def test_a_step_out_of_order_is_refused_with_what_is_missing() -> None:
    with Publisher(LOCAL) as publisher:
        for step in (publisher.begin, publisher.commit, publisher.abort):
            with pytest.raises(StateError):
                step()
        with pytest.raises(NotFoundError, match="'w' was not declared"):
            publisher.write("w", ONE["w"])
        publisher.declare(ONE)
        with pytest.raises(StateError, match="begin"):
            publisher.write("w", ONE["w"])
        publisher.begin()
        for busy in (publisher.begin, lambda: publisher.declare({"x": b"a"})):
            with pytest.raises(StateError):
                busy()
        assert [spec.name for spec in publisher.declared] == ["w"]
        with pytest.raises(StateError):
            publisher.commit()  # it lacks a tensor, and stays open
        publisher.write("w", ONE["w"])
        with pytest.raises(StateError):
            publisher.write("w", ONE["w"])
        publisher.commit()
        assert publisher.version == 1


def test_a_write_is_checked_against_what_was_declared_trap_33() -> None:
    with Publisher(LOCAL) as publisher:
        publisher.declare([*manifest_of(ONE), TensorSpec("tied", "F32", (4,), "w")])
        publisher.begin()
        with pytest.raises(InvalidError, match=r"w is F64 \[4\], but was declared as F32 \[4\]"):
            publisher.write("w", np.zeros(4))
        with pytest.raises(InvalidError, match=r"w is F32 \[2, 2\]"):
            publisher.write("w", np.zeros((2, 2), np.float32))
        with pytest.raises(NotFoundError, match="'x' was not declared"):
            publisher.write("x", np.zeros(4, np.float32))
        with pytest.raises(InvalidError, match="bytes of its own, not as tied"):
            publisher.write("w", Alias("tied"))
        publisher.write("tied", ONE["w"].copy())  # travels with the one it is tied to
        publisher.write("w", ONE["w"])
        publisher.commit()


def manifest_of(weights: Any) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, "F32", array.shape) for name, array in weights.items())


def test_a_declaration_that_is_refused_leaves_the_one_before() -> None:
    with pair() as (publisher, _worker):
        publisher.publish(ONE)
        publisher.begin()
        with pytest.raises(StateError):
            publisher.declare({"other": ONE["w"]})
        assert [one.name for one in publisher.declared] == ["w"]
        publisher.abort()


def test_a_refusal_names_the_worker_and_its_reason() -> None:
    def refuse(update: Any) -> None:
        raise RuntimeError("no such layer: lm_head")

    with pair(refuse) as (publisher, worker):
        with pytest.raises(PeerError) as failed:
            publisher.publish(ONE)
        assert [one.name for one in failed.value.workers] == ["w0"]
        assert "RuntimeError: no such layer: lm_head" in failed.value.workers[0].reason
        assert failed.value.workers[0].status
        again = pickle.loads(pickle.dumps(failed.value))
        assert again.workers == failed.value.workers
    assert [str(why) for why in worker.failures] == ["no such layer: lm_head"] * len(
        worker.failures
    )


def test_a_missed_deadline_names_the_worker() -> None:
    with both(broadcast_commit_timeout_ms="50ms") as (publisher, subscriber):
        with pytest.raises((PeerError, DeadlineError)) as failed:
            publisher.publish(ONE)
        assert [one.name for one in failed.value.workers] == ["w0"]
        assert publisher.version == 1  # it was committed all the same
        subscriber.next(PATIENCE).close()


def test_workers_are_described() -> None:
    with pair() as (publisher, _worker):
        publisher.publish(ONE)
        (one,) = publisher.workers()
        assert (one.name, one.version, one.status, one.reason) == ("w0", 1, 0, "")
        assert one.subscribed
        assert one.member
        assert one.committed
        assert one.path in ("shm", "socket")
        with pytest.raises(AttributeError):
            one.name = "else"  # type: ignore[misc]


def test_waiting_for_workers_says_how_many_there_are() -> None:
    with Publisher(LOCAL) as publisher:
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


def test_no_tensors_at_all_are_refused_or_carried_but_nothing_breaks() -> None:
    with Publisher(LOCAL) as publisher:
        with pytest.raises(InvalidError):
            publisher.publish({})
        assert publisher.publish(ONE) == 1


def test_limits_are_checked_before_memory_is_taken() -> None:
    with Publisher(LOCAL, limits_tensors=2) as publisher:
        with pytest.raises(LimitError, match=r"limits\.tensors"):
            publisher.publish(dict.fromkeys("abc", b"x"))
        assert publisher.declared == ()
        assert publisher.publish({"a": b"x"}) == 1


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


def test_an_endpoint_in_use_is_refused() -> None:
    with Publisher(LOCAL) as publisher:
        assert publisher.endpoint.startswith("tcp://127.0.0.1:")
        with pytest.raises(BusyError):
            Publisher(publisher.endpoint)


def test_both_ends_meet_without_an_endpoint(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_dir))
    with Publisher() as publisher, WorkerThread(None, lambda update: update.version) as worker:
        assert publisher.endpoint == f"ipc://{runtime_dir}/refit/refit.sock"
        publisher.wait_workers(1, PATIENCE)
        publisher.publish(ONE)
        with pytest.raises(BusyError):
            Publisher()
        with Publisher("user://*") as one, Publisher("user://second") as other:
            assert len({publisher.endpoint, one.endpoint, other.endpoint}) == 3
    assert worker.seen == [1]
    assert list((runtime_dir / "refit").iterdir()) == []


def test_an_endpoint_that_every_user_reaches_is_warned_of(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def warnings() -> int:
        lines = [one.getMessage() for one in caplog.records if one.name == "refit"]
        return sum("has no keys: every user of this machine" in line for line in lines)

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_dir))
    with Publisher(LOCAL) as publisher, Subscriber(publisher.endpoint):
        assert warnings() == 2
    with Publisher() as publisher, Subscriber():
        assert warnings() == 2
    with Publisher(LOCAL, broadcast_insecure=True):
        assert warnings() == 2


def test_one_thread_at_a_time_uses_it() -> None:
    inside = threading.Event()
    go_on = threading.Event()

    def slow() -> Iterator[tuple[str, Any]]:
        inside.set()
        go_on.wait(PATIENCE)
        yield "w", ONE["w"]

    with Publisher(LOCAL) as publisher:
        trainer = threading.Thread(target=publisher.publish, args=(slow(),))
        trainer.start()
        assert inside.wait(PATIENCE)
        for call in (publisher.begin, publisher.abort, publisher.close, publisher.commit):
            with pytest.raises(StateError, match="one thread at a time"):
                call()
        with pytest.raises(StateError, match="one thread at a time"):
            publisher.publish(ONE)
        assert publisher.version == 0  # these are for any thread
        assert publisher.stats()["workers"] == 0
        go_on.set()
        trainer.join()
        assert publisher.version == 1


def test_another_thread_ends_a_wait() -> None:
    with both() as (publisher, subscriber):

        def cancel_once_it_is_there() -> None:
            update = subscriber.next(PATIENCE)
            publisher.cancel()
            trainer_is_done.wait(PATIENCE)
            update.close()

        trainer_is_done = threading.Event()
        worker = threading.Thread(target=cancel_once_it_is_there)
        worker.start()
        with pytest.raises(CancelledError):
            publisher.publish(ONE)
        trainer_is_done.set()
        worker.join()
        assert publisher.version == 1  # the worker had been told: the version stands
        publisher.cancel()
        with pytest.raises(CancelledError):
            publisher.wait_workers(5)


def test_it_refuses_itself_within_its_own_publish() -> None:
    with Publisher(LOCAL) as publisher:

        def reentrant() -> Iterator[tuple[str, Any]]:
            yield "w", ONE["w"]
            publisher.publish(ONE)

        with pytest.raises(StateError, match="in the middle of a call"):
            publisher.publish(reentrant())
        assert publisher.publish(ONE) == 1


def test_after_close_everything_is_refused_and_a_second_close_does_nothing() -> None:
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


def test_it_cannot_be_pickled_trap_27() -> None:
    with Publisher(LOCAL) as publisher, pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(publisher)


def test_figures_are_numbers_by_their_c_names() -> None:
    with pair() as (publisher, _worker):
        publisher.publish(ONE)
        figures = publisher.stats()
        assert figures["publish_version"] == 1
        assert figures["publish_bytes_last"] == 16
        assert figures["workers"] == figures["workers_committed_last"] == 1
        assert all(isinstance(value, (int, float)) for value in figures.values())


def test_late_joiners_get_the_current_version_trap_28() -> None:
    with Publisher(LOCAL) as publisher:
        for value in range(3):
            publisher.publish({"w": np.full(4, value, np.float32)})
        with WorkerThread(publisher.endpoint, lambda update: update.version) as worker:
            publisher.wait_workers(1, PATIENCE)
            assert publisher.publish(ONE) == 4
        assert worker.seen[-1] == 4
        assert set(worker.seen) <= {3, 4}


class Bomb:
    """Leaves a trace where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (self.path, "w")


def test_what_comes_from_the_socket_is_never_unpickled_trap_36(tmp_path: Any) -> None:
    zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")
    bomb = pickle.dumps(Bomb(str(tmp_path / "exploded")))
    with pair() as (publisher, worker), zmq.Context() as context:
        for kind in (zmq.DEALER, zmq.REQ, zmq.SUB):
            with context.socket(kind) as stranger:
                stranger.linger = 0
                stranger.connect(publisher.endpoint)
                if kind != zmq.SUB:
                    for _ in range(1 if kind == zmq.REQ else 3):
                        stranger.send(bomb)
        assert publisher.publish(ONE) == 1
        assert len(worker.seen) == 1
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("kind", [Publisher, Subscriber])
def test_a_close_that_ctrl_c_cut_short_is_not_done_twice_trap_12(
    monkeypatch: pytest.MonkeyPatch, kind: type[Publisher] | type[Subscriber]
) -> None:
    name = f"refit_{kind.__name__.lower()}_close"
    real = getattr(lib, name)
    freed: list[int] = []

    def close_and_raise(pointer: int) -> None:
        freed.append(pointer)
        real(pointer)
        raise KeyboardInterrupt

    one = kind(LOCAL.replace(":0", ":9") if kind is Subscriber else LOCAL)
    monkeypatch.setattr(lib, name, close_and_raise)
    with pytest.raises(KeyboardInterrupt):
        one.close()
    one.close()
    assert one.closed
    del one
    assert len(freed) == 1
