"""Versions kept as files: while they arrive, rebuilt byte for byte, removed when they are old."""

import os
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import refit
from broadcasting import Pair, contents, pair
from refit.weights.archive import Archive, Snapshot
from refit.weights.update import Update

numpy = pytest.importorskip("numpy")

NAMES = ("embed", "head", "norm")


def weights_of(version: int) -> dict[str, Any]:
    """Two tensors, one of which few elements change of, and a tied one."""
    embed = numpy.arange(100_000, dtype=numpy.uint16)
    embed[:: 100 + version] ^= 1
    norm = numpy.full((3, 5), version, dtype=numpy.float32)
    return {"embed": embed, "head": embed, "norm": norm}


def publish_through(archive: Archive, versions: range) -> list[Any]:
    """A trainer that publishes them, to a worker that keeps all it receives."""

    def keep(update: Update) -> Any:
        return archive.keep(update), contents(update)

    with pair(keep) as (publisher, worker):
        for version in versions:
            publisher.publish(weights_of(version))
        return worker.seen


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """An archive of seven versions, anchors at 1, 4 and 7. Of each: what became of it, and its
    bytes as the worker had them."""
    folder = tmp_path_factory.mktemp("archive") / "kept"
    with Archive(folder, write=True, archive_anchor_every=3) as archive:
        return folder, publish_through(archive, range(1, 8))


@pytest.fixture
def folder(made: tuple[Path, list[Any]], tmp_path: Path) -> Any:
    """A copy of it."""
    return shutil.copytree(made[0], tmp_path / "kept")


@pytest.fixture
def archive(folder: Path) -> Iterator[Archive]:
    """The copy, opened to read."""
    with refit.Archive(folder) as opened:
        yield opened


def test_every_version_is_rebuilt_byte_for_byte(archive: Archive, made: Any) -> None:
    _, seen = made
    assert len(archive) == len(seen) == 7
    for number, (info, bytes_of) in enumerate(seen, 1):
        snapshot = archive.read(number)
        assert snapshot.info == info
        assert snapshot.version == number
        assert {name: bytes(view.bytes) for name, view in snapshot.items()} == bytes_of


def test_what_changed_is_told(archive: Archive, folder: Path, made: Any) -> None:
    _, seen = made
    versions = archive.versions()
    assert versions == [info for info, _ in seen]
    assert [one.base for one in versions] == [None, 1, 2, None, 4, 5, None]
    assert versions[0].density == 1.0
    assert 0 < versions[1].density < 0.1
    assert versions[1].file_bytes < versions[0].file_bytes / 10
    assert versions[1].blocks[1] == 2
    assert versions[1].tensors == 3
    assert len({one.digest for one in versions}) == 7
    assert all(len(one.digest) == 32 and (folder / one.file).is_file() for one in versions)


def test_materialize_gives_pytorch_tensors_that_own_their_memory(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    weights = refit.materialize(folder, 5)
    assert tuple(weights) == NAMES
    assert weights["norm"].tolist() == [[5.0] * 5] * 3
    expected = torch.from_numpy(weights_of(5)["embed"].view(numpy.int16))
    assert torch.equal(weights["embed"].view(torch.int16), expected)
    assert weights["head"].data_ptr() == weights["embed"].data_ptr()
    weights["norm"] += 1  # no other snapshot has this memory
    assert refit.materialize(str(folder), 5)["norm"].tolist() == [[5.0] * 5] * 3


def test_a_snapshot_lives_as_long_as_what_was_made_of_it(archive: Archive) -> None:
    snapshot = archive.read(2)
    alive = weakref.ref(snapshot)
    array = dict(snapshot.arrays())["embed"]
    part = array[10:20]
    archive.close()
    del snapshot, array
    assert alive() is not None
    assert part.tolist() == weights_of(2)["embed"][10:20].tolist()
    del part
    assert alive() is None


def test_a_snapshot_is_a_mapping(archive: Archive) -> None:
    torch = pytest.importorskip("torch")
    for number in (3, numpy.int64(3), torch.tensor(3)):
        snapshot = archive.read(number)
        assert repr(snapshot) == "<refit.Snapshot: version 3, 3 tensors>"
    assert tuple(snapshot) == NAMES
    assert "norm" in snapshot
    assert "other" not in snapshot
    assert snapshot.get("other") is None
    assert snapshot["head"].alias_of == "embed"
    with pytest.raises(refit.NotFoundError, match="no tensor 'other'"):
        _ = snapshot["other"]
    with pytest.raises(BufferError, match="numpy"):
        snapshot["norm"].__dlpack__()
    target = {name: numpy.empty_like(array) for name, array in weights_of(0).items()}
    assert snapshot.load_into(target) == ([], [])
    assert (target["norm"] == 3).all()


def test_old_versions_are_removed(folder: Path) -> None:
    with Archive(folder, write=True) as archive:
        assert archive.prune(3) == 0
        assert archive.prune(2) == 3
        assert [one.version for one in archive.versions()] == [4, 5, 6, 7]
        with pytest.raises(refit.InvalidError):
            archive.prune(0)
        with pytest.raises(refit.NotFoundError):
            archive.read(3)
        with pytest.raises(refit.BusyError):
            Archive(folder, write=True)


def test_damaged_files_are_refused_or_left_out(archive: Archive, folder: Path) -> None:
    path = folder / archive.versions()[1].file
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(refit.CorruptError, match=path.name):
        archive.read(3)
    path.write_bytes(whole[:100])
    with pytest.raises(refit.RefitError, match=path.name):
        archive.versions()
    assert [one.version for one in archive.versions(strict=False)] == [1, 3, 4, 5, 6, 7]


def test_trainers_that_count_from_one_again_are_told_apart(tmp_path: Path) -> None:
    with Archive(tmp_path / "kept", write=True) as archive:
        epochs = [publish_through(archive, range(1, 3))[0][0].epoch for _ in range(2)]
        assert len(set(epochs)) == 2
        with pytest.raises(refit.ExistsError, match="several trainers"):
            archive.read(2)
        for epoch in epochs:
            assert archive.read(2, epoch=epoch).info.epoch == epoch
            assert archive.read(2, epoch=f"{epoch:016x}").info.epoch == epoch


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ((-1,), refit.InvalidError, "not a version"),
        ((1 << 64,), refit.InvalidError, "not a version"),
        ((2.0,), TypeError, "float"),
        ((0,), refit.NotFoundError, "version 0"),
        ((1, "1"), refit.InvalidError, "16 hexadecimal"),
        ((1, "x" * 16), refit.InvalidError, "16 hexadecimal"),
        ((1, "0" * 17), refit.InvalidError, "16 hexadecimal"),
    ],
)
def test_a_version_that_cannot_be_is_not_read(
    archive: Archive, arguments: Any, error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        archive.read(arguments[0], epoch=(*arguments, None)[1])


def test_wrong_calls_are_refused(archive: Archive, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(refit.NotFoundError):
        refit.Archive(tmp_path / "nowhere")
    with pytest.raises(refit.InvalidError, match="NUL"):
        refit.Archive("a\0b")
    with pytest.raises(refit.StateError):
        archive.prune(1)
    with refit.Archive(folder, limits_tensors=1) as small, pytest.raises(refit.LimitError):
        small.read(1)
    archive.close()
    with pytest.raises(refit.StateError, match="closed"):
        archive.read(1)
    assert repr(archive) == "<refit.Archive: closed>"


def test_a_reader_does_not_keep(pair: Pair, archive: Archive) -> None:
    pair.worker.apply = archive.keep
    with pytest.raises(refit.PeerError, match="StateError"):
        pair.publisher.publish(weights_of(1))


def test_a_forked_child_frees_nothing(archive: Archive) -> None:
    snapshots: list[Snapshot] = [archive.read(2)]
    child = os.fork()
    if child == 0:
        same = bytes(snapshots[0]["norm"].bytes) == weights_of(2)["norm"].tobytes()
        snapshots.clear()
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert bytes(snapshots[0]["norm"].bytes) == weights_of(2)["norm"].tobytes()
