"""Versions kept as files: while they arrive, rebuilt byte for byte, removed when they are old."""

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import refit
from broadcasting import contents, pair
from refit.archive import Archive, Snapshot
from refit.update import Update

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
        assert not worker.failures
        return worker.seen


@pytest.fixture
def kept(tmp_path: Path) -> tuple[Path, list[Any]]:
    """An archive of seven versions, anchors at 1, 4 and 7, and what the worker saw."""
    with Archive(tmp_path / "kept", write=True, archive_anchor_every=3) as archive:
        seen = publish_through(archive, range(1, 8))
    return tmp_path / "kept", seen


def test_every_version_is_rebuilt_byte_for_byte(kept: tuple[Path, list[Any]]) -> None:
    folder, seen = kept
    with refit.Archive(folder) as archive:
        assert len(archive) == len(seen) == 7
        for number, (info, bytes_of) in enumerate(seen, 1):
            snapshot = archive.read(number)
            assert snapshot.info == info
            assert snapshot.version == number
            assert {name: bytes(view.bytes) for name, view in snapshot.items()} == bytes_of


def test_what_changed_is_told(kept: tuple[Path, list[Any]]) -> None:
    folder, seen = kept
    with refit.Archive(folder) as archive:
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


def test_materialize_gives_pytorch_tensors_that_own_their_memory(
    kept: tuple[Path, list[Any]],
) -> None:
    torch = pytest.importorskip("torch")
    folder, _ = kept
    weights = refit.materialize(folder, 5)
    gc.collect()
    assert tuple(weights) == NAMES
    assert weights["norm"].tolist() == [[5.0] * 5] * 3
    expected = torch.from_numpy(weights_of(5)["embed"].view(numpy.int16))
    assert torch.equal(weights["embed"].view(torch.int16), expected)
    assert weights["head"].data_ptr() == weights["embed"].data_ptr()
    weights["norm"] += 1  # no other snapshot has this memory
    assert refit.materialize(str(folder), 5)["norm"].tolist() == [[5.0] * 5] * 3


def test_a_snapshot_lives_as_long_as_what_was_made_of_it(kept: tuple[Path, list[Any]]) -> None:
    folder, _ = kept
    with refit.Archive(folder) as archive:
        snapshot = archive.read(2)
    alive = weakref.ref(snapshot)
    array = dict(snapshot.arrays())["embed"]
    part = array[10:20]
    del snapshot, array
    gc.collect()
    assert alive() is not None
    assert part.tolist() == weights_of(2)["embed"][10:20].tolist()
    del part
    gc.collect()
    assert alive() is None


def test_a_snapshot_is_a_mapping(kept: tuple[Path, list[Any]]) -> None:
    folder, _ = kept
    with refit.Archive(folder) as archive:
        snapshot = archive.read(3)
    assert tuple(snapshot) == NAMES
    assert "norm" in snapshot
    assert "other" not in snapshot
    assert snapshot.get("other") is None
    assert snapshot["head"].alias_of == "embed"
    with pytest.raises(refit.NotFoundError, match="no tensor 'other'"):
        _ = snapshot["other"]
    with pytest.raises(BufferError, match="numpy"):
        snapshot["norm"].__dlpack__()
    assert repr(snapshot) == "<refit.Snapshot: version 3, 3 tensors>"
    target = {name: numpy.empty_like(array) for name, array in weights_of(0).items()}
    assert snapshot.load_into(target) == ([], [])
    assert (target["norm"] == 3).all()


def test_an_archive_goes_on_where_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "kept"

    def keep(update: Update) -> Any:
        with Archive(folder, write=True) as archive:
            return archive.keep(update)

    with pair(keep) as (publisher, worker):
        for version in range(1, 4):
            publisher.publish(weights_of(version))
        assert not worker.failures
        assert [info.base for info in worker.seen] == [None, 1, 2]
    assert refit.materialize(folder, 3)["norm"].tolist() == [[3.0] * 5] * 3


def test_a_version_is_asked_for_by_any_integer(kept: tuple[Path, list[Any]]) -> None:
    torch = pytest.importorskip("torch")
    folder, _ = kept
    with refit.Archive(folder) as archive:
        for number in (2, numpy.int64(2), torch.tensor(2)):
            assert archive.read(number).version == 2
        with pytest.raises(TypeError, match="float"):
            archive.read(2.0)  # type: ignore[arg-type]


def test_compressed_files_are_smaller(tmp_path: Path) -> None:
    sizes = {}
    for compress in ("none", "zstd"):
        folder = tmp_path / compress
        with Archive(folder, write=True, broadcast_compress=compress) as archive:
            publish_through(archive, range(1, 4))
            sizes[compress] = sum(one.file_bytes for one in archive.versions())
        assert refit.materialize(folder, 3)["norm"].tolist() == [[3.0] * 5] * 3
    assert sizes["zstd"] < sizes["none"]


def test_old_versions_are_removed(kept: tuple[Path, list[Any]]) -> None:
    folder, _ = kept
    with Archive(folder, write=True) as archive:
        assert archive.prune(3) == 0
        assert archive.prune(2) == 3
        assert [one.version for one in archive.versions()] == [4, 5, 6, 7]
        with pytest.raises(refit.InvalidError):
            archive.prune(0)
        with pytest.raises(refit.NotFoundError):
            archive.read(3)
        assert archive.read(6).version == 6


def test_damaged_files_are_refused(kept: tuple[Path, list[Any]]) -> None:
    folder, seen = kept
    path = folder / seen[1][0].file
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with refit.Archive(folder) as archive:
        with pytest.raises(refit.CorruptError, match=path.name):
            archive.read(3)
        assert archive.read(1).version == 1
        path.write_bytes(whole[:100])
        with pytest.raises(refit.RefitError, match=path.name):
            archive.versions()
        assert [one.version for one in archive.versions(strict=False)] == [1, 3, 4, 5, 6, 7]
        path.unlink()
        with pytest.raises(refit.NotFoundError):
            archive.read(3)


def test_trainers_that_count_from_one_again_are_told_apart(tmp_path: Path) -> None:
    with Archive(tmp_path / "kept", write=True) as archive:
        epochs = [publish_through(archive, range(1, 3))[0][0].epoch for _ in range(2)]
        assert len(set(epochs)) == 2
        with pytest.raises(refit.ExistsError, match="several trainers"):
            archive.read(2)
        for epoch in epochs:
            assert archive.read(2, epoch=epoch).info.epoch == epoch
            assert archive.read(2, epoch=f"{epoch:016x}").info.epoch == epoch


@pytest.mark.parametrize("text", ["1", "x" * 16, "0" * 17])
def test_text_that_is_no_epoch_is_refused(kept: tuple[Path, list[Any]], text: str) -> None:
    with Archive(kept[0]) as archive, pytest.raises(refit.InvalidError, match="16 hexadecimal"):
        archive.read(1, epoch=text)


def test_wrong_calls_are_refused(kept: tuple[Path, list[Any]], tmp_path: Path) -> None:
    folder, _ = kept
    with pytest.raises(refit.NotFoundError):
        refit.Archive(tmp_path / "nowhere")
    with pytest.raises(refit.InvalidError, match="NUL"):
        refit.Archive("a\0b")
    with refit.Archive(folder) as reader:
        with pytest.raises(refit.StateError):
            reader.prune(1)
        for number in (-1, 1 << 64):
            with pytest.raises(refit.InvalidError):
                reader.read(number)
        with pytest.raises(refit.NotFoundError):
            reader.read(0)
        with pytest.raises(refit.LimitError), refit.Archive(folder, limits_tensors=1) as small:
            small.read(1)
    with pytest.raises(refit.StateError, match="closed"):
        reader.read(1)
    assert repr(reader) == "<refit.Archive: closed>"
    with Archive(folder, write=True), pytest.raises(refit.BusyError):
        Archive(folder, write=True)


def test_a_reader_does_not_keep(kept: tuple[Path, list[Any]]) -> None:
    folder, _ = kept
    with (
        refit.Archive(folder) as reader,
        pair(reader.keep) as (publisher, worker),
        pytest.raises(refit.PeerError),
    ):
        publisher.publish(weights_of(1))
    assert {type(why) for why in worker.failures} == {refit.StateError}  # its thread has ended


def test_a_forked_child_frees_nothing(kept: tuple[Path, list[Any]]) -> None:
    folder, _ = kept
    with refit.Archive(folder) as archive:
        snapshots: list[Snapshot] = [archive.read(2)]
    child = os.fork()
    if child == 0:
        same = bytes(snapshots[0]["norm"].bytes) == weights_of(2)["norm"].tobytes()
        snapshots.clear()
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert bytes(snapshots[0]["norm"].bytes) == weights_of(2)["norm"].tobytes()
