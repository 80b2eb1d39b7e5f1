"""What the ranks of test_shards.py do, each in a process of its own, one scene after another."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import refit
import torch
from ranks import join
from refit.weights.named_weights import named_weights
from refit.weights.publisher import Publisher
from refit.weights.transaction import Transaction
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

RANKS = 4
Scene = Callable[[int], object]


class Two(nn.Module):
    """Layers of odd sizes, of which some ranks have less, a tie, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6, bias=False)
        self.norm = nn.LayerNorm(3)
        self.head = nn.Linear(10, 6, bias=False)
        self.head.weight = self.down.weight
        self.register_buffer("steps", torch.arange(5))


def fsdp2(**options: Any) -> nn.Module:
    model = Two()
    mesh = init_device_mesh("cpu", (RANKS,))
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def fsdp2_and_tensor_parallel() -> nn.Module:
    model = Two()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    del model.head
    model.up = nn.Linear(6, 12)
    model.down = nn.Linear(12, 6, bias=False)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    return model


def hybrid() -> nn.Module:
    model = Two()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "rows")))
    return model


def boxes_are_of_the_whole(make: Callable[[], nn.Module]) -> Scene:
    def scene(_: int) -> object:
        model = make()
        whole = dict(named_weights(model, dtype=torch.bfloat16, root=None))
        right = []
        for name, tensor, box in named_weights(model, dtype=torch.bfloat16).shards():
            ranges = zip(box.first, box.shape, strict=True)
            cut = whole[name][tuple(slice(at, at + count) for at, count in ranges)]
            right.append(torch.equal(cut, tensor))
        return all(right) and bool(right)

    return scene


def kind_of(play: Callable[[], object]) -> object:
    """What it gives, or the kind of what it raises, and the beginning of the sentence."""
    try:
        return play()
    except Exception as why:
        return f"{type(why).__name__}: {why}"


def send(rank: int, have: tuple[int, ...], *weights: Any, version: int | None = None) -> object:
    """A transaction on ranks some of which have a publisher."""

    def play() -> object:
        with Publisher("user://*") if rank in have else nullcontext(None) as publisher:
            with Transaction(publisher, version) as tx:
                tx.send(*weights)
            return tx.version, publisher is not None and publisher.shards is not None

    return kind_of(play)


def part_of(found: object, *sentences: str) -> object:
    """The first of these sentences that is in what came, or what came."""
    return next((one for one in sentences if one in str(found)), found)


MIXED = (
    "LockstepError: of 4 ranks these have no publisher: 2, 3; open a refit.Publisher on every rank,"
    " so that each publishes what it has, or on rank 0 alone, which then gathers all weights"
)
LACKING = "LockstepError: of 4 ranks these have no publisher: 1, 2, 3; open a refit.Publisher on"
OTHER = "holds other weights"
PARTIAL = '"w" cannot be published in shards: it is a sum that the ranks have not added up'
DIFFERENT = '"a" is F32 [8, 3] on rank 0 and F32 [9, 3] on rank 2'
ALL = tuple(range(RANKS))


def partial_model() -> nn.Module:
    mesh = init_device_mesh("cpu", (RANKS,))
    model = nn.Module()
    model.w = nn.Parameter(DTensor.from_local(torch.ones(4), mesh, [Partial()]))
    return model


def rows_of(rank: int, rows: int = 8) -> refit.ShardedWeights:
    return refit.sharded_weights([("a", torch.full((2, 3), float(rank)), (rows, 3), (2 * rank, 0))])


SCENES: dict[str, tuple[Scene, list[Any]]] = {
    "boxes of FSDP2": (boxes_are_of_the_whole(fsdp2), [True] * RANKS),
    "boxes of FSDP2 with tensor parallelism": (
        boxes_are_of_the_whole(fsdp2_and_tensor_parallel),
        [True] * RANKS,
    ),
    "boxes of replicas of FSDP2": (boxes_are_of_the_whole(hybrid), [True] * RANKS),
    "with one publisher all is gathered": (
        lambda rank: send(rank, (0,), named_weights(fsdp2())),
        [(1, False)] * RANKS,
    ),
    "gather=True gathers": (
        lambda rank: send(rank, ALL, named_weights(fsdp2(), gather=True)),
        [(1, False)] * RANKS,
    ),
    "some ranks have a publisher": (
        lambda rank: send(rank, (0, 1), named_weights(fsdp2())),
        [MIXED] * RANKS,
    ),
    "gather=False needs a publisher on every rank": (
        lambda rank: part_of(send(rank, (0,), named_weights(fsdp2(), gather=False)), LACKING),
        [LACKING] * RANKS,
    ),
    "gather=False publishes nothing without publishers": (
        lambda rank: send(rank, (), named_weights(fsdp2(), gather=False)),
        [(None, False)] * RANKS,
    ),
    "sums are refused with gather=False": (
        lambda rank: part_of(
            send(rank, ALL, named_weights(partial_model(), gather=False)), PARTIAL
        ),
        [PARTIAL] * RANKS,
    ),
    "sums are gathered otherwise": (
        lambda rank: send(rank, ALL, named_weights(partial_model())),
        [(1, False)] * RANKS,
    ),
    "a mapping with them is gathered": (
        lambda rank: send(rank, ALL, named_weights(fsdp2()), {"more": torch.ones(3)}),
        [(1, False)] * RANKS,
    ),
    "ranks have other weights": (
        lambda rank: part_of(
            send(rank, ALL, named_weights(fsdp2(), names=lambda name: f"{name}{rank // 2}")), OTHER
        ),
        [OTHER] * RANKS,
    ),
    "ranks have other tensors": (
        lambda rank: part_of(send(rank, ALL, rows_of(rank, 9 if rank == 2 else 8)), DIFFERENT),
        [DIFFERENT] * RANKS,
    ),
}
"""What each rank sees in each."""


def play(rank: int, folder: Path) -> dict[str, object]:
    """What one rank saw in each scene."""
    join(rank, RANKS, folder)
    return {name: scene(rank) for name, (scene, _) in SCENES.items()}
