"""Boxes of tensors: what a worker selects of each version, and what one of several publishers has.

A box is a range of indexes in each dimension. Here slices become boxes, and boxes the C library's
selections. Neither PyTorch nor versions are known here.
"""

import ctypes
import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, TypeAlias

from refit._c import abi
from refit._c.library import encoded
from refit.errors import InvalidError

Cut: TypeAlias = Sequence[slice] | Sequence[tuple[int, int]] | None
"""A part of a tensor: slices, or (first, length), of its first dimensions; None: all of it."""


class Box(NamedTuple):
    """So many indexes of each dimension, from a first one on."""

    first: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        """All of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    def is_within(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of that shape has it."""
        if len(shape) != len(self.first) or len(shape) != len(self.shape):
            return False
        each = zip(self.first, self.shape, shape, strict=True)
        return all(0 <= first <= first + count <= size for first, count, size in each)

    def packed(self, pack: int) -> "Box":
        """The same, where an element of the last dimension stands for so many."""
        if pack == 1 or not self.shape:
            return self
        first, shape = (
            (*dims[:-1], dims[-1] * pack) for dims in (tuple(self.first), tuple(self.shape))
        )
        return Box(first, shape)


def slices_of(name: str, given: Any) -> tuple[slice, ...]:
    """Checked: ranges of indexes that C takes. InvalidError."""
    cut = tuple(given) if isinstance(given, Sequence) else (given,)
    if len(cut) > abi.REFIT_RANK_MAX:
        raise InvalidError(f"{name} has at most {abi.REFIT_RANK_MAX} dimensions")
    for one in cut:
        if not isinstance(one, slice) or one.step not in (None, 1):
            raise InvalidError(f"{name}: {one!r} is not a slice with step 1")
        start, stop = one.start or 0, one.stop
        if start < 0 or (stop is not None and not start < stop < 1 << 63):
            raise InvalidError(f"{name}: {one} is not a range of indexes from 0")
    return cut


def box_of(name: str, cut: Any, shape: tuple[int, ...]) -> Box:
    """The box that slices, or pairs of (first, length), of the first dimensions are of a tensor of
    this shape; None: all of it. InvalidError: it is none, or not within the tensor."""
    if cut is None:
        return Box.whole(shape)
    if not isinstance(cut, Sequence) or len(cut) > len(shape):
        raise InvalidError(
            f"{name}: {cut!r} does not fit a tensor of {len(shape)} dimensions: give slices, or "
            "(first, length), of the first of them"
        )
    ranges = [_range_of(name, one, size) for one, size in zip(cut, shape[: len(cut)], strict=True)]
    first = tuple(one[0] for one in ranges) + (0,) * (len(shape) - len(ranges))
    box = Box(first, tuple(one[1] for one in ranges) + shape[len(ranges) :])
    if not box.is_within(shape):
        raise InvalidError(
            f"{name}: {list(box.shape)} from {list(box.first)} is not within {list(shape)}"
        )
    return box


def _range_of(name: str, one: Any, size: int) -> tuple[int, int]:
    if isinstance(one, slice):
        if one.step not in (None, 1):
            raise InvalidError(f"{name}: {one!r} is not a slice with step 1")
        start = one.start or 0
        return start, (size if one.stop is None else one.stop) - start
    if isinstance(one, Sequence) and len(one) == 2:
        return int(one[0]), int(one[1])
    raise InvalidError(f"{name}: {one!r} is neither a slice nor a pair of first and length")


def selections(parts: Collection[tuple[str, Sequence[slice]]]) -> Any:
    """The array of refit_selection: names, and slices of their first dimensions. InvalidError: a
    name that C cannot take."""
    raw = (abi.refit_selection * len(parts))()
    for one, (name, slices) in zip(raw, parts, strict=True):
        one.size, one.name = ctypes.sizeof(one), encoded(name, "the name of a part")
        for index, it in enumerate(slices):
            one.rank = index + 1
            one.first[index] = it.start or 0
            to_end = it.stop is None
            one.shape[index] = abi.REFIT_TO_THE_END if to_end else it.stop - one.first[index]
    return raw


def selections_of(boxes: Collection[tuple[str, Box]]) -> Any:
    """The same of boxes."""
    return selections(
        [
            (name, [slice(at, at + count) for at, count in zip(box.first, box.shape, strict=True)])
            for name, box in boxes
        ]
    )
