"""The trainer's end: what is declared, written and committed, and what goes wrong."""

import ctypes
import os
import pickle
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from broadcasting import LOCAL, PATIENCE, WorkerThread, both, contents, pair
from refit import _abi, _devices, dtypes
from refit._library import call as call_c
from refit._library import lib
from refit.device import Device
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
from refit.keys import keygen
from refit.manifest import Alias, TensorSpec, Typed
from refit.publisher import Publisher
from refit.source import Weight, weight_of
from refit.subscriber import Subscriber
from refit.weights import named_weights

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


class Failing:
    """Weights that say what they are, and fail at one of them."""

    def __init__(self, count: int, at: int, why: BaseException) -> None:
        self.count, self.at, self.why = count, at, why

    def manifest(self) -> list[TensorSpec]:
        return [TensorSpec(f"w{i}", "F32", (4,)) for i in range(self.count)]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for i in range(self.count):
            if i == self.at:
                raise self.why
            yield f"w{i}", np.full(4, i, np.float32)


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("why", [ValueError("broken"), KeyboardInterrupt()])
def test_a_version_that_fails_midway_never_was_trap_12(at: int, why: BaseException) -> None:
    with pair() as (publisher, worker):
        publisher.publish(ONE)
        with pytest.raises(type(why)):
            publisher.publish(Failing(3, at, why))
        assert publisher.version == 1
        assert worker.subscriber.describe().version == 1
        assert (
            publisher.publish(Failing(3, 3, why)) == 3
        )  # the number of the one that failed is gone
    assert [list(seen) for seen in worker.seen] == [["w"], ["w0", "w1", "w2"]]


def test_an_iterator_that_fails_before_anything_began_leaves_all_as_it_was() -> None:
    def broken() -> Iterator[tuple[str, Any]]:
        yield "w", ONE["w"]
        raise ValueError("broken")

    with Publisher(LOCAL) as publisher:
        with pytest.raises(ValueError, match="broken"):
            publisher.publish(broken())
        assert publisher.declared == ()
        assert publisher.publish(ONE) == 1


def test_a_version_that_lacks_a_tensor_is_dropped_trap_33() -> None:
    class Short(Failing):
        def __iter__(self) -> Iterator[tuple[str, Any]]:
            yield "w0", np.zeros(4, np.float32)

    with Publisher(LOCAL) as publisher:
        with pytest.raises(StateError):
            publisher.publish(Short(2, 9, ValueError()))
        assert publisher.version == 0
        assert publisher.publish(ONE) > 0


def test_weights_that_say_what_they_are_need_not_be_held_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Counted(np.ndarray):
        alive = 0
        most = 0

        def __del__(self) -> None:
            Counted.alive -= 1

    class Gathered:
        def manifest(self) -> list[TensorSpec]:
            return [TensorSpec(f"w{i}", "U8", (100,)) for i in range(50)]

        def __iter__(self) -> Iterator[tuple[str, Any]]:
            for i in range(50):
                made = np.full(100, i, np.uint8).view(Counted)
                Counted.alive += 1
                Counted.most = max(Counted.most, Counted.alive)
                yield f"w{i}", made

    monkeypatch.setattr("refit._batch.HELD_BYTES", 300)
    with pair() as (publisher, worker):
        publisher.publish(Gathered())
    assert worker.seen[0] == {f"w{i}": bytes([i]) * 100 for i in range(50)}
    assert Counted.most <= 6


SIZES = [4, 300, 64]
"""Of the tensors below, with COPIED_BYTES at 64: some are copied, some are written at once."""


def reusing(sizes: list[int], start: int = 0) -> Iterator[tuple[str, Any]]:
    """One buffer for all: the next tensor is made in the memory of the one before."""
    bucket = torch.empty(max(sizes), dtype=torch.uint8)
    for index, size in enumerate(sizes):
        yield f"w{index}", bucket[:size].fill_(start + index)
    bucket.fill_(255)  # also the last one counts only until it is asked for the next


def whole(sizes: list[int], start: int = 0) -> dict[str, bytes]:
    return {f"w{index}": bytes([start + index]) * size for index, size in enumerate(sizes)}


@pytest.mark.parametrize("sizes", [[4, 4, 4], SIZES])
def test_a_generator_may_reuse_one_buffer_for_all_trap_31(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int]
) -> None:
    monkeypatch.setattr("refit._settled.COPIED_BYTES", 64)
    with pair() as (publisher, worker):
        publisher.publish(reusing(sizes))
        assert [one.alias_of for one in publisher.declared] == [None] * 3
        publisher.publish(reusing(sizes, 10))  # as it comes: all was declared
    assert worker.seen == [whole(sizes), whole(sizes, 10)]


def test_a_list_and_the_items_of_a_mapping_are_there_together() -> None:
    given = {"a": ONE["w"], "b": ONE["w"]}
    for weights in (given.items(), list(given.items()), tuple(given.items())):
        with Publisher(LOCAL) as publisher:
            publisher.publish(weights)
            assert [one.alias_of for one in publisher.declared] == [None, "a"]


def test_a_generator_may_put_back_what_it_changed_trap_31() -> None:
    weight = torch.arange(4.0)

    def merged() -> Iterator[tuple[str, torch.Tensor]]:
        weight.add_(1.0)
        yield "w", weight
        weight.sub_(1.0)

    with pair() as (publisher, worker):
        publisher.publish(merged())
        publisher.publish(merged())
    assert worker.seen == [{"w": struct.pack("4f", 1, 2, 3, 4)}] * 2


def test_a_declaration_by_an_iterator_ties_nothing_trap_31() -> None:
    with Publisher(LOCAL) as publisher:
        publisher.declare(reusing([4, 4]))
        assert [one.alias_of for one in publisher.declared] == [None, None]


def test_tied_weights_of_a_model_arrive_through_a_generator_trap_1() -> None:
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(4, 3), "head": torch.nn.Linear(3, 4)})
    model["head"].weight = model["embed"].weight
    names = ["embed.weight", "head.weight", "head.bias"]
    with pair() as (publisher, worker):
        for declared in (None, model.state_dict(keep_vars=True)):
            if declared is not None:
                publisher.declare(declared)
                assert publisher.declared[1].alias_of == "embed.weight"
            publisher.publish(model.named_parameters(remove_duplicate=False))
    expected = [model.state_dict()[name].numpy().tobytes() for name in names]
    assert [list(seen.values()) for seen in worker.seen] == [expected] * 2


def test_a_tie_that_an_iterator_does_not_keep_is_refused_trap_1(torch_device: str) -> None:
    same = torch.zeros(4, device=torch_device)
    other = torch.ones(4, device=torch_device)
    with pair() as (publisher, worker):
        publisher.publish({"a": same, "b": same})
        for pairs in ([("a", same), ("b", other)], [("b", other), ("a", same)]):
            with pytest.raises(InvalidError, match="were declared as tied"):
                publisher.publish(iter(pairs))
        publisher.publish(iter([("a", other), ("b", Alias("a"))]))
        publisher.publish({"a": same, "b": other})
    assert [seen["a"] == seen["b"] for seen in worker.seen] == [True, True, False]


def test_an_iterator_that_gives_something_else_than_declared_is_refused_trap_33() -> None:
    with pair() as (publisher, worker):
        publisher.publish(iter(ONE.items()))
        with pytest.raises(NotFoundError, match="'v' was not declared"):
            publisher.publish(iter({**ONE, "v": ONE["w"]}.items()))
        with pytest.raises(InvalidError, match="declare the tensors again"):
            publisher.publish(iter([("w", np.zeros(9))]))
        publisher.publish(iter(ONE.items()))
    assert len(worker.seen) == 2


def test_copies_of_scattered_tensors_are_bounded(
    monkeypatch: pytest.MonkeyPatch, torch_device: str
) -> None:
    # trap 30: one that is larger than the bound travels alone
    monkeypatch.setattr("refit._batch.HELD_BYTES", 64)
    scattered = {
        f"w{i}": torch.arange(8 * (i + 1.0), device=torch_device).view(-1, 4).t() for i in range(12)
    }
    with pair() as (publisher, worker):
        publisher.publish(scattered)
    expected = {name: tensor.cpu().contiguous().numpy() for name, tensor in scattered.items()}
    assert worker.seen[0] == {name: array.tobytes() for name, array in expected.items()}


def test_casts_of_a_model_are_held_until_they_are_written_trap_31() -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
    with pair() as (publisher, worker):
        publisher.publish(named_weights(model, dtype=torch.bfloat16))
    expected = {name: one.detach().bfloat16() for name, one in model.named_parameters()}
    assert worker.seen == [
        {name: one.view(torch.uint8).numpy().tobytes() for name, one in expected.items()}
    ]


def test_many_bytes_are_written_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("refit._batch.PART_BYTES", 100)
    weights = {f"w{i}": os.urandom(size) for i, size in enumerate([10, 300, 0, 60, 40, 1, 99])}
    with pair() as (publisher, worker):
        publisher.publish(weights)
    assert worker.seen[0] == weights


def test_ctrl_c_is_heard_between_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    real = lib.refit_publisher_write_all
    stop: list[Callable[[], object]] = []
    written: list[int] = []

    def write_all(*arguments: Any) -> int:
        written.append(arguments[2])
        stop[-1]()  # as run_interruptibly does when Ctrl-C comes
        return int(real(*arguments))

    def run(function: Callable[[], Any], cancel: Callable[[], object]) -> Any:
        stop.append(cancel)
        return function()

    with pair() as (publisher, worker):
        with monkeypatch.context() as patch:
            patch.setattr("refit._batch.PART_BYTES", 100)
            patch.setattr("refit._writer.run_interruptibly", run)
            patch.setattr(lib, "refit_publisher_write_all", write_all)
            with pytest.raises(CancelledError, match="interrupted"):
                publisher.publish({f"w{i}": bytes([i]) * 100 for i in range(10)})
        assert written == [1]
        assert publisher.version == 0
        assert publisher.publish(ONE) == 2
    assert len(worker.seen) == 1


@pytest.mark.parametrize("which", [0, 1, 2])
def test_ctrl_c_right_behind_a_step_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    steps: list[int] = []

    def run(function: Callable[[], Any], _cancel: Callable[[], object]) -> Any:
        function()
        steps.append(len(steps))
        if steps[-1] == which:  # begin, write, commit
            raise KeyboardInterrupt

    with pair() as (publisher, worker):
        with monkeypatch.context() as patch:
            for module in ("_round", "_writer"):
                patch.setattr(f"refit.{module}.run_interruptibly", run)
            with pytest.raises(KeyboardInterrupt):
                publisher.publish(ONE)
        assert publisher.version == (1 if which == 2 else 0)
        publisher.begin()
        publisher.abort()
        assert publisher.publish(ONE) == 3
        assert worker.subscriber.describe().version == 3


def test_ctrl_c_right_behind_a_new_declaration_does_not_mix_up_names_trap_33(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def declare_and_raise(*arguments: Any) -> None:
        call_c(*arguments)
        raise KeyboardInterrupt

    one, two = np.zeros(4, np.float32), np.ones(4, np.float32)
    with pair() as (publisher, worker):
        publisher.publish({"a": one, "b": two})
        with monkeypatch.context() as patch:
            patch.setattr("refit.publisher.call", declare_and_raise)
            with pytest.raises(KeyboardInterrupt):
                publisher.declare({"b": two, "a": one})
        publisher.publish({"a": one, "b": two})
    assert worker.seen[-1] == {"a": one.tobytes(), "b": two.tobytes()}


def test_a_declaration_that_is_refused_leaves_the_one_before() -> None:
    with pair() as (publisher, _worker):
        publisher.publish(ONE)
        publisher.begin()
        with pytest.raises(StateError):
            publisher.declare({"other": ONE["w"]})
        assert [one.name for one in publisher.declared] == ["w"]
        publisher.abort()


def test_who_refused_and_why_is_in_the_exception() -> None:
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


def test_who_did_not_decide_in_time_is_in_the_exception() -> None:
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


def test_an_endpoint_that_cannot_be_is_refused_with_a_sentence() -> None:
    with Publisher(LOCAL) as publisher:
        assert publisher.endpoint.startswith("tcp://127.0.0.1:")
        with pytest.raises(BusyError):
            Publisher(publisher.endpoint)
    with pytest.raises(SecurityError, match="insecure"):
        Publisher("tcp://0.0.0.0:0")
    with pytest.raises(InvalidError):
        Publisher("nonsense")
    with pytest.raises(InvalidError, match="NUL"):
        Publisher("tcp://127.0.0.1:0\0")
    with pytest.raises(ConfigError, match="slots"):
        Publisher(LOCAL, broadcast_slots=3)


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


def test_a_device_is_named_in_the_callers_words() -> None:
    with Publisher(LOCAL) as publisher:
        publisher.use_device(torch.device("cpu"))  # nothing to share: nothing happens
        publisher.use_device("host")
        with pytest.raises(InvalidError, match=r"3\.5 is no device"):
            publisher.use_device(3.5)
        with pytest.raises(InvalidError):
            publisher.use_device("mainframe")
        assert publisher.publish(ONE) == 1


def test_a_device_is_required_where_there_is_none_to_share() -> None:
    with (
        Publisher(LOCAL, broadcast_gpu="require") as publisher,
        pytest.raises(UnsupportedError),
    ):
        publisher.use_device("host")


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
    """What would tell that somebody unpickled it."""

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


class OnADevice:
    """Host memory that looks like a CUDA tensor's, for the way that such bytes take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, publisher: Publisher) -> None:
        self.device = Device("host")
        stream = _abi.refit_stream_ref()
        call_c(lib.refit_stream_open, self.device.pointer, ctypes.byref(stream))
        self.stream = stream
        self.asked: list[int] = []
        monkeypatch.setattr("refit._writer.stream_of", self.stream_of)
        monkeypatch.setattr("refit._writer.Device", self.open)

    def stream_of(self, number: int) -> int:
        self.asked.append(number)
        return int(self.stream.native)

    def open(self, spec: str) -> Device:
        assert spec == "cuda:3"
        return self.device

    def weight(self, data: np.ndarray[Any, Any]) -> Weight:
        return weight_of(data)._replace(device=3)

    def end(self) -> None:
        """Before the publisher, which closes the device."""
        call_c(lib.refit_stream_close, self.device.pointer, self.stream)


def test_bytes_on_a_device_are_read_behind_the_callers_stream_trap_17(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pair() as (publisher, worker):
        there = OnADevice(monkeypatch, publisher)
        known = {"a": ONE["w"], "b": ONE["w"] + 1, "c": ONE["w"] + 2}
        placed = {name: there.weight(data) for name, data in known.items() if name != "b"}
        monkeypatch.setattr(
            "refit.manifest.weight_of", lambda one: placed.get(one, weight_of(known[one]))
        )
        publisher.publish([(name, name) for name in known])
        assert there.asked == [3, 3]  # once for each run of tensors there
        assert publisher.publish((name, name) for name in known) == 2  # nothing copied there
        assert there.asked == [3] * 4
        assert publisher.publish({"x": "a"}) == 3
        there.end()
    expected = {name: data.tobytes() for name, data in known.items()}
    assert worker.seen[:2] == [expected] * 2


class OfAnotherLibrary:
    """Memory that is said to be a GPU's, as CuPy shows it."""

    def __init__(self) -> None:
        self.asked: list[int | None] = []
        self.memory = np.arange(4, dtype=np.float32)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 3

    def __dlpack__(self, stream: int | None = None) -> Any:
        self.asked.append(stream)
        return self.memory.__dlpack__()


def test_work_of_another_library_comes_before_the_stream_that_reads_trap_17(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Stream:
        cuda_stream = 0x7F00

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: Stream)
    other = OfAnotherLibrary()
    assert weight_of(other).device == 3
    monkeypatch.delitem(sys.modules, "torch")
    weight_of(other)
    assert _devices.stream_of(3) == 1
    assert other.asked == [0x7F00, 1]


def test_the_default_stream_is_not_none_trap_17(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        cuda_stream = 0

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: Stream)
    assert _devices.stream_of(0) == 1
    Stream.cuda_stream = 0x7F00
    assert _devices.stream_of(0) == 0x7F00


@pytest.mark.parametrize(
    ("device", "spec"),
    [
        (torch.device("cuda", 2), "cuda:2"),
        (torch.device("cpu"), "host"),
        (1, "cuda:1"),
        ("cuda:0:capacity=1GiB", "cuda:0:capacity=1GiB"),
    ],
)
def test_devices_by_any_name(device: Any, spec: str) -> None:
    assert _devices.spec_of(device) == spec


def test_a_publisher_keeps_the_devices_that_it_opened_until_it_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publisher = Publisher(LOCAL)
    mine = Device("host")
    publisher.use_device(mine)
    publisher.use_device("host")
    assert len(publisher._own_devices) == 1
    theirs = publisher._own_devices[0]
    publisher.close()
    assert theirs.closed
    assert not mine.closed
    mine.close()


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


# ---- Keys


def keyed(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Options of a trainer and of a worker that it allows."""
    trainer, worker = keygen(folder, "trainer"), keygen(folder / "allow", "w0")
    return (
        {"security_key": str(trainer.secret), "security_allow": str(folder / "allow")},
        {"security_key": str(worker.secret), "security_server_key": str(trainer.public)},
    )


def test_with_keys_a_version_reaches_a_worker_until_its_file_is_gone(tmp_path: Path) -> None:
    ours, theirs = keyed(tmp_path)
    with (
        Publisher(LOCAL, **ours) as publisher,
        WorkerThread(publisher.endpoint, contents, **theirs) as worker,
    ):
        publisher.wait_workers(1, PATIENCE)
        publisher.publish(ONE)
        assert worker.seen == [{"w": ONE["w"].tobytes()}]
        other = keygen(tmp_path / "allow", "w1")
        theirs["security_key"] = str(other.secret)
        with Subscriber(publisher.endpoint, **theirs) as second:
            with second.next(PATIENCE) as update:
                assert update.version == 1
            other.public.unlink()
            with pytest.raises(SecurityError, match=r"w1.*security\.allow"):
                second.next(PATIENCE)
        assert publisher.publish(ONE) == 2
        assert len(worker.seen) == 2


def test_a_worker_whose_key_is_not_allowed_is_told(tmp_path: Path) -> None:
    ours, theirs = keyed(tmp_path)
    theirs["security_key"] = str(keygen(tmp_path, "stranger").secret)
    soon = {"broadcast_heartbeat_ms": 50, "broadcast_heartbeat_timeout_ms": 300}
    with (
        Publisher(LOCAL, **ours) as publisher,
        Subscriber(publisher.endpoint, **theirs, **soon) as subscriber,
        pytest.raises(SecurityError, match="does not allow this worker's key"),
    ):
        subscriber.next(PATIENCE)


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    ours, _ = keyed(tmp_path)
    Path(ours["security_key"]).chmod(0o644)
    with pytest.raises(SecurityError, match="chmod 600"):
        Publisher(LOCAL, **ours)
