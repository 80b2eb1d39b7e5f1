"""Weights that ranks publish in shards: boxes, who sends them, and how ranks agree on that."""

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import division_scenes
import pytest
import ranks
import refit
import torch
import torch.distributed as dist
from refit.errors import InvalidError, NotFoundError, UnsupportedError
from refit.weights.boxes import Box, box_of
from refit.weights.checkpoint_names import Piece
from refit.weights.manifest import Alias, Declared, TensorSpec
from refit.weights.shards import assigned, box_of_mesh, local_part, piece_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore


def cut(whole: torch.Tensor, box: Box) -> torch.Tensor:
    """The elements of a box."""
    ranges = zip(box.first, box.shape, strict=True)
    return whole[tuple(slice(at, at + count) for at, count in ranges)]


def chunks(whole: torch.Tensor, count: int, dim: int) -> list[torch.Tensor]:
    """As ``torch.chunk``, and empty ones at the end."""
    found = list(whole.chunk(count, dim)) if whole.shape[dim] else []
    return found + [whole.narrow(dim, 0, 0)] * (count - len(found))


def divided(whole: torch.Tensor, mesh: Sequence[int], at: Sequence[int], how: Any) -> torch.Tensor:
    """What a place in a mesh has, with PyTorch's own operations on the tensor."""
    for size, place, placement in zip(mesh, at, how, strict=True):
        if isinstance(placement, _StridedShard):
            parts = chunks(whole, placement.split_factor, placement.dim)
            mine = [chunks(one, size, placement.dim)[place] for one in parts]
            whole = torch.cat(mine, placement.dim)
        elif isinstance(placement, Shard):
            whole = chunks(whole, size, placement.dim)[place]
    return whole


def is_box(mine: torch.Tensor, shape: Sequence[int]) -> bool:
    """Whether elements that are numbered as a tensor of this shape numbers them are a box there."""
    if mine.numel() == 0:
        return True
    ranges = torch.unravel_index(mine.reshape(-1), list(shape))
    return all(
        int(one.max() - one.min()) < size for one, size in zip(ranges, mine.shape, strict=True)
    )


def placements(source: random.Random, mesh: Sequence[int], ndim: int) -> list[Any]:
    """Any for each dimension of a mesh; one from the right to the left as FSDP2 makes them."""
    found = [source.choice([Replicate(), *map(Shard, range(ndim))]) for _ in mesh]
    for at, later in itertools.combinations(range(len(mesh)), 2):
        both = found[at], found[later]
        same = all(type(one) is Shard for one in both) and both[0] == both[1]
        if same and len(mesh) == 2 and source.random() < 0.5:
            found[at] = _StridedShard(both[0].dim, split_factor=mesh[later])
    return found


@pytest.mark.parametrize("seed", range(60))
def test_boxes_of_a_mesh_tile_the_tensor(seed: int) -> None:
    source = random.Random(seed)
    shape = [source.randrange(0, 12) for _ in range(source.randrange(1, 4))]
    mesh = [source.randrange(1, 5) for _ in range(source.randrange(1, 4))]
    how = placements(source, mesh, len(shape))
    whole = torch.arange(max(1, torch.Size(shape).numel()))[: torch.Size(shape).numel()].view(shape)
    times = torch.zeros(shape, dtype=torch.int64)
    places = list(itertools.product(*map(range, mesh)))
    for at in places:
        mine = divided(whole, mesh, at, how)
        if any(isinstance(one, _StridedShard) for one in how) and not is_box(mine, shape):
            with pytest.raises(UnsupportedError, match="in several places"):
                box_of_mesh(shape, mesh, at, how)
            return
        box = box_of_mesh(shape, mesh, at, how)
        assert box.is_within(shape)
        assert torch.equal(cut(whole, box), mine) or box.numel == mine.numel() == 0
        cut(times, box).add_(1)
    copies = [size for size, one in zip(mesh, how, strict=True) if one.is_replicate()]
    assert (times == torch.Size(copies).numel()).all()


def test_rows_in_several_places_and_sums_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="several places"):
        box_of_mesh([8], [2], [0], [_StridedShard(0, split_factor=2)])
    with pytest.raises(UnsupportedError, match=r"not added up \(Partial\)"):
        box_of_mesh([8], [2], [0], [Partial()])


@pytest.mark.parametrize("rank", range(6))
def test_what_pytorch_gives_a_rank_is_its_box(rank: int) -> None:
    dist.init_process_group("fake", rank=rank, world_size=6, store=FakeStore())
    try:
        flat, mesh = init_device_mesh("cpu", (6,)), init_device_mesh("cpu", (2, 3))
        cases: list[tuple[Any, Any, list[Any]]] = [
            ((13, 4), flat, [Shard(0)]),
            ((4, 13), flat, [Shard(1)]),
            ((3, 2), flat, [Shard(0)]),  # there and above ranks have nothing
            ((7, 5), mesh, [Shard(0), Shard(1)]),
            ((7, 5), mesh, [Shard(0), Shard(0)]),
            ((7, 5), mesh, [Replicate(), Shard(0)]),
            ((12, 5), mesh, [_StridedShard(0, split_factor=3), Shard(0)]),
        ]
        for shape, on, how in cases:
            whole = torch.rand(shape)
            given = distribute_tensor(whole, on, how, src_data_rank=None)
            found = local_part(given)
            if found is None:
                assert given.to_local().numel() == 0
            else:
                assert torch.equal(found[0], cut(whole, found[1]))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("seed", range(40))
def test_pieces_of_a_shard_tile_the_weight(seed: int) -> None:
    """Experts of a stacked parameter, gate and up of a fused one, each as it lies or turned."""
    source = random.Random(seed)
    shape = [source.randrange(1, 6) for _ in range(3)]
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    view = whole[source.randrange(shape[0])]
    begin = source.randrange(shape[1])
    view = view[begin : source.randrange(begin + 1, shape[1] + 1)]
    view = view.T if source.random() < 0.5 else view
    view = view if source.random() < 0.5 else view[None]
    piece = Piece("whole", tuple(view.shape), view.stride(), view.storage_offset())
    ranks_, dim = source.randrange(1, 5), source.randrange(3)
    times = torch.zeros(view.shape, dtype=torch.int64)
    for rank in range(ranks_):
        box = box_of_mesh(shape, [ranks_], [rank], [Shard(dim)])
        found = piece_of(cut(whole, box), box, shape, piece)
        if found is not None:
            assert torch.equal(found[0], cut(view, found[1]))
            cut(times, found[1]).add_(1)
    assert (times == 1).all()


def test_a_piece_that_runs_across_rows_is_refused() -> None:
    whole = torch.arange(12).view(4, 3)
    piece = Piece("whole", (6,), (1,), 0)
    with pytest.raises(UnsupportedError, match="another way"):
        piece_of(whole, Box.whole((4, 3)), (4, 3), piece)


def test_each_box_is_sent_once_and_ranks_send_alike() -> None:
    own = [{"w": (Box((4 * rank,), (4,)), 16)} for rank in range(3)]
    sizes = {"a": 100, "b": 60, "c": 50, "d": 40, "e": 30, "f": 20}
    same = {name: (Box.whole((size,)), size) for name, size in sizes.items()}
    found = assigned([{**one, **same} for one in own])
    assert found == assigned([{**dict(reversed(same.items())), **one} for one in own])
    assert all(one["w"] == mine["w"][0] for one, mine in zip(found, own, strict=True))
    sent = [name for one in found for name in one if name != "w"]
    assert sorted(sent) == sorted(sizes)
    loads = [sum(sizes.get(name, 16) for name in one) for one in found]
    assert max(loads) - min(loads) <= 20


def test_parts_are_slices_or_a_first_index_and_a_length() -> None:
    assert box_of("a", None, (4, 3)) == Box((0, 0), (4, 3))
    assert box_of("a", (slice(1, 3),), (4, 3)) == Box((1, 0), (2, 3))
    assert box_of("a", ((1, 2), slice(2, None)), (4, 3)) == Box((1, 2), (2, 1))
    for wrong in ((slice(0, 5),), ((3, 2),), (slice(0, 4, 2),), (1,), ((0, 1),) * 3, "rows"):
        with pytest.raises(InvalidError, match=r"^a: "):
            box_of("a", wrong, (4, 3))


SPECS = (
    TensorSpec("a", "F32", (4, 3)),
    TensorSpec("b", "F32", (2,)),
    TensorSpec("tied", "F32", (4, 3), "a"),
)


def test_a_rank_gives_its_part_and_nothing_else() -> None:
    declared = Declared(SPECS).sharded(
        {"a": (slice(1, 3),), "tied": ((1, 2),), "b": (slice(0, 0),)}
    )
    assert declared.boxes == {"a": Box((1, 0), (2, 3))}
    index, weight = declared.match("a", torch.ones(2, 3))
    assert index == 0
    assert weight is not None
    assert declared.match("tied", Alias("a")) == (2, None)
    assert declared.match("b", torch.ones(0)) == (1, None)
    with pytest.raises(InvalidError, match=r"a is F32 \[4, 3\], but this rank's part .* \[2, 3\]"):
        declared.match("a", torch.ones(4, 3))
    with pytest.raises(InvalidError, match="b: this rank has no part of it"):
        declared.match("b", torch.ones(2))
    with pytest.raises(NotFoundError):
        Declared(SPECS).sharded({"c": None})
    with pytest.raises(InvalidError, match="tied is tied to a"):
        Declared(SPECS).sharded({"a": None, "tied": (slice(0, 1),)})


def test_boxes_that_a_framework_gives_are_checked() -> None:
    given = refit.sharded_weights([("a", torch.ones(2, 3), (4, 3), (2, 0))])
    assert given.manifest() == [SPECS[0]]
    assert [one.box for one in given.shards()] == [Box((2, 0), (2, 3))]
    with pytest.raises(UnsupportedError, match=r"refit\.Transaction"):
        list(given)
    with pytest.raises(InvalidError, match="not within"):
        refit.sharded_weights([("a", torch.ones(2, 3), (4, 3), (3, 0))])
    with pytest.raises(InvalidError, match="more than one box"):
        refit.sharded_weights([("a", torch.ones(1), (4,), (at,)) for at in range(2)])


# ---- Ranks


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw in each scene. A rank that hangs fails all of them by the timeout."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    return ranks.run(division_scenes.play, folder, count=division_scenes.RANKS)


@pytest.mark.slow
@ranks.needs_fsdp2
@pytest.mark.parametrize("scene", division_scenes.SCENES)
def test_what_ranks_see(seen: list[dict[str, Any]], scene: str) -> None:
    assert [one[scene] for one in seen] == division_scenes.SCENES[scene][1]
