"""Which parts of a version's tensors a recorded loader reads, as boxes: what is asked of a trainer
that sends nothing else.

A box may have more than is read, never less. Boxes of one tensor that meet become one around both,
since the C library takes all of a tensor of which boxes meet.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from refit._c import dtypes
from refit.weights.boxes import Box
from refit.weights.dimensions import mapped

if TYPE_CHECKING:
    from refit.weights.parts import Part

Boxes = dict[str, list[Box]]

_MOST = 64
"""Boxes of one tensor. Of more, one around all of them is taken."""

_DIGIT = 64  # bits of an index


def needed(
    parts: Iterable["Part"],
    manifest: Mapping[str, tuple[str, tuple[int, ...]]],
    whose: Mapping[str, str],
) -> Boxes:
    """What the parts read, by the names under which the bytes travel: `whose` has those of tied
    tensors."""
    found: Boxes = {}
    for part in parts:
        if part.source and part.numel > 0:
            dtype, shape = manifest[part.source]
            found.setdefault(whose.get(part.source, part.source), []).append(
                _box_of(part, dtypes.by_name(dtype), shape)
            )
    return {name: _apart(boxes, manifest[name][1]) for name, boxes in found.items()}


def nbytes(boxes: Boxes, manifest: Mapping[str, tuple[str, tuple[int, ...]]]) -> int:
    """How many bytes they have."""
    return sum(
        dtypes.by_name(manifest[name][0]).nbytes(one.shape)
        for name, these in boxes.items()
        for one in these
    )


def _box_of(part: "Part", dtype: dtypes.Dtype, shape: tuple[int, ...]) -> Box:
    strides = _strides(shape)
    if dtype.pack > 1 or 8 * part.source_dtype.itemsize != dtype.bits:
        return Box.whole(shape)
    # Each dimension of the tensor goes to a digit of its own.
    digits = [
        (size, stride, 1 << _DIGIT * at)
        for at, (size, stride) in enumerate(zip(shape, strides, strict=True))
        if size > 1
    ]
    dims = [(size, step, 0) for size, step in zip(part.shape, part.source_strides, strict=True)]
    inside = mapped(dims, part.source_offset, digits, 0)
    if inside is None:
        reach = sum((size - 1) * step for size, step, _ in dims)
        return _around(part.source_offset, part.source_offset + reach, shape)
    found, start = inside
    first = [start >> _DIGIT * at & (1 << _DIGIT) - 1 for at in range(len(shape))]
    length = [1] * len(shape)
    for size, to, _ in found:
        if to > 0:
            at = (to.bit_length() - 1) // _DIGIT
            length[at] += (to >> _DIGIT * at) * (size - 1)
    return Box(tuple(first), tuple(length))


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[at + 1 :]) for at in range(len(shape))]


def _around(begin: int, last: int, shape: tuple[int, ...]) -> Box:
    """The box around all elements from one to another."""
    first, length = [], []
    for at, stride in enumerate(_strides(shape)):
        (low, begin), (high, last) = divmod(begin, stride), divmod(last, stride)
        first.append(low)
        length.append(high - low + 1)
        if low != high:
            return Box((*first, *(0 for _ in shape[at + 1 :])), (*length, *shape[at + 1 :]))
    return Box(tuple(first), tuple(length))


def _apart(boxes: list[Box], shape: tuple[int, ...]) -> list[Box]:
    """The same, or more, in boxes of which none begins before the end of another."""
    strides = _strides(shape)

    def reach(box: Box) -> tuple[int, int]:
        ends = zip(box.first, box.shape, strides, strict=True)
        begin = sum(first * stride for first, stride in zip(box.first, strides, strict=True))
        return begin, sum((first + size - 1) * stride for first, size, stride in ends)

    while True:
        boxes = sorted(set(boxes), key=reach)
        pairs = itertools.pairwise(map(reach, boxes))
        meets = [later <= end for (_, end), (later, _) in pairs]
        if not any(meets) and len(boxes) <= _MOST:
            return boxes
        joined = boxes[:1]
        for box, meet in zip(boxes[1:], meets, strict=True):
            if meet or len(boxes) > _MOST:
                joined[-1] = _union(joined[-1], box)
            else:
                joined.append(box)
        boxes = joined


def _union(one: Box, other: Box) -> Box:
    first = tuple(map(min, one.first, other.first))
    ends = [
        max(at + size for at, size in both)
        for both in zip(
            zip(one.first, one.shape, strict=True),
            zip(other.first, other.shape, strict=True),
            strict=True,
        )
    ]
    return Box(first, tuple(end - at for end, at in zip(ends, first, strict=True)))
