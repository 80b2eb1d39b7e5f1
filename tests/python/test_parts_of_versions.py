"""Workers that take parts of versions: layers, experts, a slice of each tensor."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from broadcasting import LOCAL, TIMEOUT, UNHURRIED, WorkerThread
from refit.errors import InvalidError, NotFoundError, PeerError, UnsupportedError
from refit.weights.archive import Archive
from refit.weights.publisher import Publisher
from refit.weights.subscriber import Subscriber
from refit.weights.update import Update

Weights = dict[str, torch.Tensor]


def weights(version: int) -> Weights:
    made = {}
    for number, name in enumerate(("layers.0.w", "layers.1.w", "layers.2.w", "layers.3.w")):
        generator = torch.Generator().manual_seed(version * 10 + number)
        made[name] = torch.randn(512, 256, generator=generator).to(torch.bfloat16)
    made["norm"] = torch.full((1000,), float(version))
    return made


def cut(version: int, parts: dict[str, Any]) -> Weights:
    """What a worker with these parts is to have."""
    known = weights(version)
    return {
        name: known[name] if part is None else known[name][part] for name, part in parts.items()
    }


def nbytes(tensors: Weights) -> int:
    return sum(it.numel() * it.element_size() for it in tensors.values())


def taken(update: Update) -> Weights:
    return {name: tensor.clone() for name, tensor in update.tensors()}


def same(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


@contextmanager
def workers(
    *parts: Any, shm: str = "off", **options: Any
) -> Iterator[tuple[Publisher, list[WorkerThread]]]:
    with Publisher(LOCAL, broadcast_shm=shm, **{**UNHURRIED, **options}) as publisher:
        made = [
            WorkerThread(publisher.endpoint, taken, worker=f"w{number}", parts=it)
            for number, it in enumerate(parts)
        ]
        for it in made:
            it.__enter__()
        try:
            publisher.wait_workers(len(made), TIMEOUT)
            yield publisher, made
        finally:
            for it in made:
                it.__exit__()


ROWS = {f"layers.{i}.w": (slice(128, 256),) for i in range(4)}
COLUMNS = {f"layers.{i}.w": (slice(None), slice(64, 128)) for i in range(4)}
LAYERS = {"layers.1.w": None, "norm": None}


@pytest.mark.parametrize("shm", ["off", "auto"])
@pytest.mark.parametrize("delta", ["auto", "never"])
@pytest.mark.parametrize("parts", [ROWS, COLUMNS, LAYERS], ids=["rows", "columns", "layers"])
def test_a_worker_takes_its_part_alone(parts: Any, delta: str, shm: str) -> None:
    with workers(parts, shm=shm, broadcast_delta=delta) as (publisher, [worker]):
        for version in (1, 2, 3):
            publisher.publish(weights(version))
            assert same(worker.seen[-1], cut(version, parts))
        sent = publisher.stats()["publish_sent_bytes_total"]
        assert sent == 0 if shm == "auto" else sent <= 3 * nbytes(cut(1, parts))


def test_a_quarter_costs_a_quarter() -> None:
    for parts in (ROWS, COLUMNS):
        with workers(parts) as (publisher, _):
            publisher.publish(weights(1))
            whole = nbytes({name: it for name, it in weights(1).items() if name != "norm"})
            assert publisher.stats()["publish_sent_bytes_total"] <= 0.27 * whole


def test_what_changed_little_is_sent_as_changes() -> None:
    rows = {name: (slice(0, 256),) for name in ROWS}  # a block of 65,536 elements of each
    with workers(rows, broadcast_delta="always") as (publisher, [worker]):
        version = weights(1)
        publisher.publish(version)
        before = publisher.stats()["publish_sent_bytes_total"]
        for it in version.values():
            it.view(-1)[::1000] += 1
        publisher.publish(version)
        assert same(worker.seen[-1], {name: version[name][part] for name, part in rows.items()})
        sent = publisher.stats()["publish_sent_bytes_total"] - before
        assert sent < 0.1 * nbytes(cut(1, rows))


def test_a_list_of_parts_may_be_longer_than_a_message() -> None:
    tensors = {f"layers.{i}.w": torch.full((8, 4), float(i)) for i in range(2000)}
    parts = {name: (slice(2, 4),) for name in tensors}
    with workers(parts) as (publisher, [worker]):
        for _ in range(2):
            publisher.publish(tensors)
            assert same(worker.seen[-1], {name: it[2:4] for name, it in tensors.items()})


def test_names_may_begin_alike() -> None:
    with workers(["layers.*"]) as (publisher, [worker]):
        publisher.publish(weights(1))
        assert same(worker.seen[-1], {k: v for k, v in weights(1).items() if k != "norm"})


def test_a_host_receives_what_its_workers_take_together() -> None:
    halves = (["layers.0.w", "layers.1.w"], ["layers.1.w", "layers.2.w"])
    with workers(*halves) as (publisher, both):
        for version in (1, 2):
            publisher.publish(weights(version))
            for worker, half in zip(both, halves, strict=True):
                assert same(worker.seen[-1], cut(version, dict.fromkeys(half)))
        three = nbytes(cut(1, dict.fromkeys(("layers.0.w", "layers.1.w", "layers.2.w"))))
        assert publisher.stats()["publish_sent_bytes_total"] <= 2 * 1.01 * three
        assert sorted(it.path for it in publisher.workers()) == ["neighbor", "socket"]


def test_workers_with_and_without_parts_share_an_image() -> None:
    with workers(ROWS, None, COLUMNS) as (publisher, three):
        for version in (1, 2):
            publisher.publish(weights(version))
            assert same(three[0].seen[-1], cut(version, ROWS))
            assert same(three[1].seen[-1], weights(version))
            assert same(three[2].seen[-1], cut(version, COLUMNS))
        assert publisher.stats()["publish_sent_bytes_total"] <= 2 * 1.01 * nbytes(weights(1))


# ---- Into engines


def test_parts_are_loaded_and_applied() -> None:
    target = {name: torch.zeros(128, 256, dtype=torch.bfloat16) for name in ROWS}
    bound = torch.zeros(1000)

    def load(update: Update) -> None:
        update.load_into(target)

    def apply(update: Update) -> None:
        update.apply()

    with Publisher(LOCAL, broadcast_shm="off", **UNHURRIED) as publisher:
        binder = WorkerThread(publisher.endpoint, apply, worker="b", parts=["norm"])
        binder.subscriber.bind({"norm": bound})
        with WorkerThread(publisher.endpoint, load, worker="a", parts=ROWS), binder:
            publisher.wait_workers(2, TIMEOUT)
            for version in (1, 2):
                publisher.publish(weights(version))
                assert same(target, cut(version, ROWS))
                assert bound.equal(weights(version)["norm"])


@pytest.mark.parametrize(
    ("rows", "failure", "words"),
    [(128, NotFoundError, "not selected, or not all of it"), (512, InvalidError, "and not")],
)
def test_a_part_is_not_applied_in_place(rows: int, failure: type, words: str) -> None:
    def apply(update: Update) -> None:
        with pytest.raises(failure, match=words):
            update.apply()
        update.refuse("it is a part", kept=True)

    bound = {name: torch.zeros(rows, 256, dtype=torch.bfloat16) for name in ROWS}
    with Publisher(LOCAL, broadcast_shm="off", **UNHURRIED) as publisher:
        worker = WorkerThread(publisher.endpoint, apply, parts=ROWS)
        worker.subscriber.bind(bound)
        with worker:
            publisher.wait_workers(1, TIMEOUT)
            with pytest.raises(PeerError, match="it is a part"):
                publisher.publish(weights(1))
    assert not worker.failures
    assert not any(it.any() for it in bound.values())


def test_a_part_is_an_array_and_no_plain_bytes() -> None:
    def look(update: Update) -> None:
        view = update["layers.2.w"]
        assert view.shape == (512, 64)
        assert view.nbytes == 512 * 64 * 2
        bits = torch.from_numpy(view.numpy(bits=True).copy()).view(torch.bfloat16)
        assert bits.equal(cut(update.version, COLUMNS)["layers.2.w"])
        for take in (lambda: view.bytes, lambda: view.__dlpack__()):
            with pytest.raises(UnsupportedError, match="part of a tensor"):
                take()
        with pytest.raises(NotFoundError):
            update["norm"]
        assert "norm" not in update
        assert len(update) == 4

    with Publisher(LOCAL, broadcast_shm="off", **UNHURRIED) as publisher:
        with WorkerThread(publisher.endpoint, look, parts=COLUMNS) as worker:
            publisher.wait_workers(1, TIMEOUT)
            publisher.publish(weights(1))
        assert not worker.failures


def test_a_tied_name_has_what_was_selected_by_it() -> None:
    table = torch.randn(1024, 8)
    head = (slice(0, 10),)
    with workers({"embed": head}, {"embed": None, "head": head}) as (publisher, [one, both]):
        publisher.publish({"embed": table, "head": table, "empty": torch.zeros(0)})
        assert same(one.seen[-1], {"embed": table[head]})
        assert same(both.seen[-1], {"embed": table, "head": table[head]})


def test_a_part_is_not_archived(tmp_path: Path) -> None:
    def keep(update: Update) -> None:
        with (
            Archive(tmp_path / "kept", write=True) as archive,
            pytest.raises(UnsupportedError, match="whole versions"),
        ):
            archive.keep(update)

    with Publisher(LOCAL, broadcast_shm="off", **UNHURRIED) as publisher:
        with WorkerThread(publisher.endpoint, keep, parts=ROWS) as worker:
            publisher.wait_workers(1, TIMEOUT)
            publisher.publish(weights(1))
        assert not worker.failures


# ---- What is refused


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"w": (slice(0, 4, 2),)}, "step 1"),
        ({"w": (slice(-4, None),)}, "from 0"),
        ({"w": (slice(4, 4),)}, "from 0"),
        ({"w.*": (slice(0, 4),)}, "several tensors"),
        ({"w": (slice(0, 1),) * 9}, "at most 8"),
        ({"w": 3}, "not a slice"),
        ({"w": (slice(0, 1 << 64),)}, "from 0"),
        ("w*", "a list of names"),
        ([""], "no name"),
        ([], "at least one part"),
    ],
)
def test_mistakes_are_named(parts: Any, words: str) -> None:
    with pytest.raises(InvalidError, match=words):
        Subscriber(LOCAL.replace(":0", ":1"), parts=parts)


def test_a_part_beyond_its_tensor_refuses_the_version() -> None:
    with workers({"norm": (slice(0, 1001),)}) as (publisher, _):
        with pytest.raises(PeerError, match="not within the tensor"):
            publisher.publish(weights(1))
        with pytest.raises(PeerError, match="not within the tensor"):  # each time, at once
            publisher.publish(weights(2))
        publisher.publish({**weights(1), "norm": torch.ones(2000)})


def test_a_name_that_the_trainer_lacks_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with workers(["norm", "nrom"]) as (publisher, [worker]):
        publisher.publish(weights(1))
        assert same(worker.seen[-1], cut(1, {"norm": None}))
    assert any("selects 'nrom'" in line.getMessage() for line in caplog.records)
