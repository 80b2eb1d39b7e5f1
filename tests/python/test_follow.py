"""Following an archive: what a trainer writes to a folder, taken from there as from the trainer."""

import copy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import refit
from broadcasting import TIMEOUT, contents, pair
from forks import said_in_a_fork
from refit.weights.archive import Archive
from refit.weights.subscriber import Subscriber

numpy = pytest.importorskip("numpy")

QUICK = {"broadcast_heartbeat_ms": "20ms"}


def weights_of(version: int) -> dict[str, Any]:
    """Two tensors, one of which few elements change of, and a tied one."""
    embed = numpy.arange(100_000, dtype=numpy.uint16)
    embed[:: 100 + version] ^= 1
    return {"embed": embed, "head": embed, "norm": numpy.full((3, 5), version, numpy.float32)}


def bits_of(version: int) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in weights_of(version).items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kept"


@pytest.fixture
def trainer(folder: Path) -> Iterator[Archive]:
    """That of a trainer, which writes."""
    with refit.Archive(folder, write=True, archive_anchor_every=4) as archive:
        yield archive


@pytest.fixture
def engine(folder: Path) -> Iterator[Subscriber]:
    with refit.Subscriber(archive=folder, timeout=TIMEOUT, **QUICK) as subscriber:
        yield subscriber


def take(engine: Subscriber, version: int) -> None:
    """The next version is this one, to the bit; accepted."""
    with engine.next() as update:
        assert update.version == version
        assert contents(update) == bits_of(version)
    assert engine.describe().version == version


def test_a_version_that_a_worker_has_kept_is_the_trainers(folder: Path, trainer: Archive) -> None:
    with pair(lambda update: (trainer.keep(update), contents(update))) as (publisher, worker):
        for version in range(1, 6):
            publisher.publish(weights_of(version))
        _, last = worker.seen[-1]
    with refit.Subscriber(f"archive://{folder}", **QUICK) as engine:
        with engine.next(TIMEOUT) as update:
            assert update.version == 5
            assert contents(update) == last == bits_of(5)
        now = engine.describe()
        assert (now.path, now.connected, now.version) == ("archive", True, 5)
        assert engine.poll() is None


def test_it_ends_where_no_archive_comes(folder: Path) -> None:
    soon = {"broadcast_heartbeat_timeout_ms": "100ms", **QUICK}
    with refit.Subscriber(archive=folder, idle_timeout=0.3, **soon) as engine:
        assert list(engine) == []
        with pytest.raises(refit.ClosedError, match="idle_timeout_ms"):
            engine.next()


def test_close_ends_a_wait(engine: Subscriber) -> None:
    closer = threading.Timer(0.2, engine.close)
    closer.start()
    with pytest.raises(refit.StateError):
        engine.next()
    closer.join()
    engine.close()
    with pytest.raises(refit.StateError, match="closed"):
        engine.next()


def test_a_forked_child_is_refused(engine: Subscriber, trainer: Archive) -> None:
    assert "belongs to process" in said_in_a_fork(lambda: engine.next(0))
    trainer.keep(weights_of(1))
    take(engine, 1)


def test_wrong_calls_are_refused(folder: Path, engine: Subscriber) -> None:
    with pytest.raises(refit.InvalidError, match="not both"):
        refit.Subscriber("user://refit", archive=folder)
    with pytest.raises(refit.InvalidError, match="names no folder"):
        refit.Subscriber("archive://")
    with pytest.raises(refit.ConfigError, match=r"broadcast\.shm"):
        refit.Subscriber(archive=folder, broadcast_shm="require")
    with pytest.raises(refit.InvalidError):
        refit.Publisher("archive:///tmp/kept")


# ---- A trainer that keeps its own weights


def test_parts_are_not_taken_of_an_archive(folder: Path) -> None:
    with pytest.raises(refit.errors.UnsupportedError, match="whole versions"):
        Subscriber(archive=folder, parts=["norm"])


def test_weights_are_numbered_and_told(folder: Path, trainer: Archive) -> None:
    first, second = trainer.keep(weights_of(1)), trainer.keep(weights_of(2).items())
    assert (first.version, first.base, first.tensors) == (1, None, 3)
    assert (second.version, second.base, second.epoch) == (2, 1, first.epoch)
    assert trainer.keep(weights_of(7), version=7).base is None
    assert trainer.keep(weights_of(8)).version == 8
    with pytest.raises(refit.ExistsError):
        trainer.keep(weights_of(9), version=8)
    assert trainer.keep(weights_of(9)).version == 9
    with refit.Archive(folder) as archive:
        for version in (1, 2, 7, 8, 9):
            kept = archive.read(version)
            assert {name: bytes(view.bytes) for name, view in kept.items()} == bits_of(version)
        with pytest.raises(refit.StateError):
            archive.keep(weights_of(1))
    with pytest.raises(refit.InvalidError):
        trainer.keep(weights_of(1), version=0)
    with pytest.raises(refit.InvalidError, match="named_weights"):
        trainer.keep(3)  # type: ignore[arg-type]
    with pytest.raises(refit.InvalidError, match="is not a version"):
        trainer.keep(weights_of(1), version=1 << 64)
    assert trainer.keep(weights_of(10)).version == 10


def test_the_number_of_a_failed_write_is_not_used_again(folder: Path, trainer: Archive) -> None:
    trainer.keep(weights_of(1))
    in_the_way = folder / ".next"
    in_the_way.mkdir()
    with pytest.raises(refit.InputOutputError):
        trainer.keep(weights_of(2))
    in_the_way.rmdir()
    assert trainer.keep(weights_of(3)).version == 3


def test_weights_are_not_copied_for_an_archive_that_takes_none(folder: Path) -> None:
    def never() -> Iterator[tuple[str, Any]]:
        raise AssertionError
        yield

    with refit.Archive(folder, write=True) as archive:
        pass
    with pytest.raises(refit.StateError, match="closed"):
        archive.keep(never())
    with (
        refit.Archive(folder) as archive,
        pytest.raises(refit.StateError, match="open for reading"),
    ):
        archive.keep(never())


def test_what_an_iterator_gives_counts_until_the_next(trainer: Archive, engine: Subscriber) -> None:
    array = numpy.zeros((64, 32), numpy.float32)

    def made() -> Iterator[tuple[str, Any]]:
        for number in range(5):
            array.fill(number)
            yield f"layer.{number}", array

    trainer.keep(made())
    with engine.next() as update:
        for number in range(5):
            assert set(update[f"layer.{number}"].numpy().flat) == {float(number)}


def test_a_received_version_has_its_own_number(trainer: Archive) -> None:
    with (
        pair(lambda update: trainer.keep(update, version=2)) as (publisher, _),
        pytest.raises(refit.PeerError, match="InvalidError"),
    ):
        publisher.publish(weights_of(1))


# ---- PyTorch


def model_of(torch: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Embedding(50, 16),
        torch.nn.Linear(16, 32),
        torch.nn.LayerNorm(32),
        torch.nn.Linear(32, 4),
    ).to(torch.bfloat16)


def same_bits(torch: Any, left: Any, right: Any) -> bool:
    pairs = zip(left.state_dict().values(), right.state_dict().values(), strict=True)
    return all(one.view(torch.int16).equal(other.view(torch.int16)) for one, other in pairs)


def test_a_model_is_loaded(trainer: Archive, engine: Subscriber) -> None:
    torch = pytest.importorskip("torch")
    trained, loaded = model_of(torch, 1), model_of(torch, 2)
    for _ in range(6):
        trainer.keep(refit.named_weights(trained))
        with engine.next() as update:
            update.load_into(loaded)
        assert same_bits(torch, trained, loaded)
        with torch.no_grad():
            trained[1].weight[0] *= 1.5
            trained[3].bias += 0.25


def test_a_model_is_written_in_place_and_back(trainer: Archive, engine: Subscriber) -> None:
    torch = pytest.importorskip("torch")
    trained, bound = model_of(torch, 1), model_of(torch, 2)
    engine.bind(bound)
    trainer.keep(refit.named_weights(trained))
    with engine.next() as update:
        update.apply()
    assert same_bits(torch, trained, bound)
    before = copy.deepcopy(trained)
    with torch.no_grad():
        trained[1].weight[0] *= 1.5
    trainer.keep(refit.named_weights(trained))
    with engine.next() as update:
        update.apply()
        assert same_bits(torch, trained, bound)
        update.refuse("not today")
    assert same_bits(torch, before, bound)
    trainer.keep(refit.named_weights(trained))
    with engine.next() as update:
        update.apply()
    assert same_bits(torch, trained, bound)


def test_scattered_tensors_are_kept_in_row_order(trainer: Archive, engine: Subscriber) -> None:
    torch = pytest.importorskip("torch")
    wide = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    trainer.keep({"t": wide.t(), "row": wide[1], "same": wide.t()})
    with engine.next() as update:
        assert update["t"].torch().equal(wide.t())
        assert update["same"].torch().equal(wide.t())
        assert update["row"].torch().equal(wide[1])
