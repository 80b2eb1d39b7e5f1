"""Tensors of a target that share memory, into which a version would be written one over the other.

Two tensors of a version may go into one memory only if they have the same type and the same bytes:
then it does not matter which is written last. Any other overlap is an error. Tensors that lie in
one stretch of memory without an element in common (columns of a matrix) are apart.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from refit.source import Weight
from refit.view import View, same_bytes


class _Stretch(NamedTuple):
    """From the first byte of a tensor to its last one."""

    begin: int
    end: int
    view: View
    place: Weight


def conflicts(copies: list[tuple[View, Weight]]) -> Iterator[str]:
    """A sentence for each pair that cannot both be written. Reads what has to be compared."""
    stretches = sorted(
        (_stretch(view, place) for view, place in copies if place.nbytes),
        key=lambda one: (one.begin, one.end),
    )
    open_ones: list[_Stretch] = []
    for one in stretches:
        open_ones = [other for other in open_ones if other.end > one.begin]
        for other in open_ones:
            yield from _conflict(other, one)
        open_ones.append(one)


def _stretch(view: View, place: Weight) -> _Stretch:
    if place.layout is None:
        return _Stretch(place.pointer, place.pointer + place.nbytes, view, place)
    width, steps = _steps(place.tensor)
    reach = [(length - 1) * step for length, step in steps]
    begin = place.pointer + sum(one for one in reach if one < 0)
    end = place.pointer + sum(one for one in reach if one > 0) + width
    return _Stretch(begin, end, view, place)


def _steps(tensor: Any) -> tuple[int, list[tuple[int, int]]]:
    """Bytes of an element, and for each dimension its length and the bytes between neighbours."""
    if hasattr(tensor, "data_ptr"):
        width = tensor.element_size()
        strides = [step * width for step in tensor.stride()]
    else:
        width, strides = tensor.itemsize, tensor.strides
    return width, list(zip(tensor.shape, strides, strict=True))


def _conflict(a: _Stretch, b: _Stretch) -> Iterator[str]:
    names = f"{a.view.name} and {b.view.name}"
    if _is_one(a, b):
        if not same_bytes(a.view, b.view):
            yield (
                f"{names} have one memory here, but differ in the version: untie them here, so "
                "that each has its own memory, or tie them at the trainer"
            )
    elif a.place.layout is None and b.place.layout is None:
        yield f"the memory of {names} overlaps"
    else:
        yield from _interleaved(names, a.place.tensor, b.place.tensor)


def _is_one(a: _Stretch, b: _Stretch) -> bool:
    """Whether the same bytes would be written to the same places."""
    if a.place.dtype is not b.place.dtype or a.begin != b.begin or a.end != b.end:
        return False
    rows = a.place.layout is None and b.place.layout is None
    return rows or a.place.identity == b.place.identity


class _Shape:
    """The elements of a tensor as NumPy takes them, wherever they lie: it reads none of them."""

    def __init__(self, tensor: Any) -> None:
        width, steps = _steps(tensor)
        pointer = tensor.data_ptr() if hasattr(tensor, "data_ptr") else tensor.ctypes.data
        self.__array_interface__ = {
            "data": (pointer, True),
            "shape": tuple(length for length, _ in steps),
            "strides": tuple(step for _, step in steps),
            "typestr": f"|V{width}",
            "version": 3,
        }


def _interleaved(names: str, a: Any, b: Any) -> Iterator[str]:
    try:
        import numpy
    except ImportError:
        yield f"the memory of {names} may overlap, which takes NumPy to tell: install it"
        return
    if numpy.shares_memory(numpy.asarray(_Shape(a)), numpy.asarray(_Shape(b))):
        yield f"the memory of {names} overlaps"
