"""What one rank has of a sharded model's weights: boxes, and the tensors with their elements.

A DTensor is divided dimension by dimension of its mesh, as ``torch.chunk`` divides. Several mesh
dimensions may divide one dimension of the tensor, from the left to the right, or with
``_StridedShard`` from the right to the left, as FSDP2 does on top of tensor parallelism. What a
rank has must be one box: of that its publisher sends the bytes that lie there.

What several ranks have alike, replicas for one, is divided among them, so that each box is sent
once and all ranks send about as much. It knows nothing of publishers and of processes.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed.tensor import DTensor

from refit.errors import InvalidError, UnsupportedError
from refit.weights.boxes import Box
from refit.weights.checkpoint_names import Piece
from refit.weights.manifest import Alias, TensorSpec
from refit.weights.source import weight_named

Run: TypeAlias = tuple[int, int]
"""Indexes of a dimension: the first one, and the one after the last."""


class Shard(NamedTuple):
    """What this rank has of a weight."""

    name: str
    tensor: Any
    """Its elements; those of the box."""
    box: Box
    """Where in the weight they are."""


class PlannedShards:
    """What this rank has of the weights that a version brings, looked at once. Iterated it gives
    (name, tensor), in the type that travels, and an ``Alias`` for each tied name."""

    settled = True

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        shards: Mapping[str, Shard],
        casts: Mapping[str, torch.dtype],
        *,
        alike: bool,
        why_not: str | None = None,
    ) -> None:
        self.specs = tuple(specs)
        """Of whole tensors."""
        self.shards = shards
        """With tensors as they lie there."""
        self.casts = casts
        """The types in which they travel; they have those already that are not here."""
        self.alike = alike
        """Whether all ranks have the same specs; if not, each has those of its shards."""
        self.why_not = why_not
        """Why some of it cannot be sent in shards; None: all can."""

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for name, shard in self.shards.items():
            tensor = shard.tensor
            yield name, tensor.to(self.casts[name]) if self._is_cast(name) else tensor
        for one in self.specs:
            if one.alias_of is not None:
                yield one.name, Alias(one.alias_of)

    def lasts(self, name: str) -> bool:
        """Whether it is the model's own memory that comes: not cast, and in row order."""
        if name not in self.shards or self._is_cast(name):
            return False
        tensor = self.shards[name].tensor
        return isinstance(tensor, torch.Tensor) and tensor.is_contiguous()

    def _is_cast(self, name: str) -> bool:
        return name in self.casts and self.shards[name].tensor.dtype != self.casts[name]

    def limited_to(self, names: Collection[str], specs: Sequence[TensorSpec]) -> "PlannedShards":
        """These shards alone, of a version with these tensors."""
        chosen = {name: one for name, one in self.shards.items() if name in names}
        return PlannedShards(specs, chosen, self.casts, alike=self.alike)


# ---- Of a DTensor


def box_of_mesh(
    shape: Sequence[int],
    mesh: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Any],
) -> Box:
    """The box that a place in a mesh of this shape has of a tensor. UnsupportedError: it is none.

    A dimension of the mesh that replicates divides nothing.
    """
    runs: list[list[Run]] = [[(0, size)] for size in shape]
    for size, at, placement in zip(mesh, coordinate, placements, strict=True):
        if placement.is_partial():
            raise UnsupportedError("it is a sum that the ranks have not added up (Partial)")
        if placement.is_replicate():
            continue
        factor = getattr(placement, "split_factor", 1)
        dim = getattr(placement, "dim", None)
        if not isinstance(dim, int) or type(placement).__name__ not in ("Shard", "_StridedShard"):
            raise UnsupportedError(f"its placement is {placement}, which is not known here")
        runs[dim] = _joined(
            one for part in _chunks(runs[dim], factor) for one in _chunk(part, size, at)
        )
    if any(len(one) > 1 for one in runs):
        raise UnsupportedError(f"its rows on one rank are in several places ({placements})")
    ranges = [one[0] if one else (0, 0) for one in runs]
    return Box(tuple(one[0] for one in ranges), tuple(one[1] - one[0] for one in ranges))


def _chunks(runs: list[Run], count: int) -> list[list[Run]]:
    return [_chunk(runs, count, at) for at in range(count)]


def _chunk(runs: list[Run], count: int, at: int) -> list[Run]:
    """One of so many chunks, as ``torch.chunk`` makes them: all but the last are equal."""
    length = sum(end - begin for begin, end in runs)
    each = -(-length // count)
    return _cut(runs, min(at * each, length), min((at + 1) * each, length))


def _cut(runs: list[Run], first: int, last: int) -> list[Run]:
    found, passed = [], 0
    for begin, end in runs:
        low, high = max(first - passed, 0), min(last - passed, end - begin)
        if low < high:
            found.append((begin + low, begin + high))
        passed += end - begin
    return found


def _joined(runs: Any) -> list[Run]:
    found: list[Run] = []
    for begin, end in runs:
        if found and found[-1][1] == begin:
            found[-1] = found[-1][0], end
        else:
            found.append((begin, end))
    return found


def local_part(tensor: torch.Tensor) -> tuple[torch.Tensor, Box] | None:
    """What this rank has of a parameter or buffer, as it lies there: all of a plain one; None for
    nothing. UnsupportedError: that is not one box."""
    if not isinstance(tensor, DTensor):
        plain = tensor.detach()
        return plain, Box.whole(plain.shape)
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    shape = tuple(mesh.size(dim) for dim in range(mesh.ndim))
    box = box_of_mesh(tensor.shape, shape, coordinate, tensor.placements)
    local = tensor._local_tensor.detach()
    if box.numel == 0 and local.numel() == 0:
        return None
    if tuple(local.shape) != box.shape:
        raise UnsupportedError(
            f"this rank has {list(local.shape)} of it, where {list(box.shape)} is its share: its "
            "rows are divided in another way than torch.chunk's"
        )
    return local, box


# ---- Of a weight that is cut out of a parameter


_CUT_OTHERWISE = "it is cut out of a parameter in another way than along its dimensions"


def piece_of(
    local: torch.Tensor, box: Box, whole: Sequence[int], piece: Piece
) -> tuple[torch.Tensor, Box] | None:
    """What a part of a parameter has of a weight that is cut out of it; None for nothing.
    UnsupportedError: the weight is not cut out along the parameter's dimensions."""
    strides = [math.prod(whole[dim + 1 :]) for dim in range(len(whole))]
    begins, left = [], piece.offset
    for stride in strides:
        begins.append(left // stride if stride else 0)
        left -= begins[-1] * stride
    each = zip(piece.shape, piece.stride, strict=True)
    dims = [None if size == 1 else _dim_of(strides, stride) for size, stride in each]
    known = [dim for dim in dims if dim is not None]
    spans = [1] * len(whole)
    for size, dim in zip(piece.shape, dims, strict=True):
        if dim is not None:
            spans[dim] = size
    inside = Box(tuple(begins), tuple(spans)).is_within(whole)
    if left or len(set(known)) != len(known) or not inside:
        raise UnsupportedError(_CUT_OTHERWISE)
    ranges = [
        (max(begin, first), min(begin + span, first + size))
        for begin, span, first, size in zip(begins, spans, box.first, box.shape, strict=True)
    ]
    if any(low >= high for low, high in ranges):
        return None
    spots = zip(ranges, box.first, strict=True)
    view = local[tuple(slice(low - first, high - first) for (low, high), first in spots)]
    order = [*known, *(dim for dim in range(len(whole)) if dim not in known)]
    shape = tuple(1 if dim is None else ranges[dim][1] - ranges[dim][0] for dim in dims)
    first = tuple(0 if dim is None else ranges[dim][0] - begins[dim] for dim in dims)
    return view.permute(order).reshape(shape), Box(first, shape)


def _dim_of(strides: list[int], stride: int) -> int:
    """The dimension of a parameter that a dimension of a piece goes along. UnsupportedError."""
    if stride not in strides:
        raise UnsupportedError(_CUT_OTHERWISE)
    return strides.index(stride)


# ---- Which rank sends what several have


def assigned(
    claims: Sequence[Mapping[str, tuple[Box, int]]],
) -> list[dict[str, Box]]:
    """Which boxes each rank sends, of those that each has with their bytes. What several have alike
    goes to the one that sends the least so far, the largest first. The same on all ranks."""
    holders: dict[tuple[str, Box], list[int]] = {}
    nbytes: dict[tuple[str, Box], int] = {}
    for rank, mine in enumerate(claims):
        for name, (box, size) in mine.items():
            holders.setdefault((name, box), []).append(rank)
            nbytes[name, box] = size
    loads = [0] * len(claims)
    taken: list[set[str]] = [set() for _ in claims]
    for key in sorted(holders, key=lambda one: (len(holders[one]) > 1, -nbytes[one], one)):
        ranks = holders[key]
        rank = min(ranks, key=lambda one: (loads[one], one))
        loads[rank] += nbytes[key]
        taken[rank].add(key[0])
    return [
        {name: box for name, (box, _) in mine.items() if name in names}
        for mine, names in zip(claims, taken, strict=True)
    ]


# ---- Of what frameworks say themselves


class ShardedWeights:
    """What this rank has of each weight; made by ``sharded_weights``."""

    divides = True
    must_divide = True
    collective = True
    yields_here = False
    root = 0

    def __init__(self, shards: Sequence[tuple[Shard, TensorSpec]], group: Any) -> None:
        self._shards = {shard.name: shard for shard, _ in shards}
        self._specs = [spec for _, spec in shards]
        self.group = group

    def manifest(self) -> list[TensorSpec]:
        """The whole tensors that this rank has something of."""
        return list(self._specs)

    def shards(self) -> Iterator[Shard]:
        """What this rank has of each."""
        return iter(self._shards.values())

    def planned_shards(self) -> PlannedShards:
        """The same, for all ranks to agree who sends what."""
        held = {name: one for name, one in self._shards.items() if one.box.numel}
        return PlannedShards(self._specs, held, {}, alike=False)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        raise UnsupportedError(
            "these weights are in parts on several ranks: send them with refit.Transaction and a "
            "publisher on every rank, or iterate shards()"
        )


def sharded_weights(
    shards: Iterable[tuple[str, Any, Sequence[int], Sequence[int]]], *, group: Any = None
) -> ShardedWeights:
    """Weights of which each rank has boxes, for ``tx.send`` on all ranks of ``group``.

    For frameworks that know the boxes themselves, as with the tensor, pipeline and expert
    parallelism of Megatron: `shards` gives (name, tensor with what this rank has, shape of the
    whole tensor, first index in each dimension). A rank leaves out what it has nothing of, and has
    at most one box of a tensor. Together the boxes must fill each tensor and not overlap; what
    several ranks have alike is sent by one of them. Each rank has a publisher; rank 0 coordinates.
    The tensors are held. Raises InvalidError (a name that comes twice, a box that is not within its
    tensor) and what a tensor is refused for.
    """
    found: dict[str, tuple[Shard, TensorSpec]] = {}
    for name, tensor, shape, first in shards:
        weight = weight_named(name, tensor)
        if name in found:
            raise InvalidError(f'more than one box of "{name}" is given: a rank has one at most')
        box = Box(tuple(map(int, first)), weight.shape)
        if not box.is_within(shape):
            raise InvalidError(
                f'"{name}": {list(box.shape)} from {list(box.first)} is not within {list(shape)}'
            )
        spec = TensorSpec(name, weight.dtype.name, tuple(map(int, shape)))
        found[name] = Shard(name, tensor, box), spec
    return ShardedWeights(list(found.values()), group)
