"""Dimensions of boxes in two memories at once, each with a stride in both: how a recorded loader's
copies follow each other. No memory is touched here.
"""

import itertools

Dim = tuple[int, int, int]
"""A dimension of a part: its length, and its strides in the one memory and in the other."""


def merged(dims: list[Dim]) -> list[Dim]:
    """The canonical form: by the second stride, from the largest to the smallest."""
    found: list[Dim] = []
    for size, one, other in sorted(dims, key=lambda dim: (-dim[2], -dim[1])):
        if size == 1:
            continue
        if found and found[-1][1] == size * one and found[-1][2] == size * other:
            found[-1] = (found[-1][0] * size, one, other)
        else:
            found.append((size, one, other))
    return found


def mapped(
    dims: list[Dim], offset: int, within: list[Dim], begin: int
) -> tuple[list[Dim], int] | None:
    """A box in a memory, seen through a map of that memory to another one.

    The box begins at `offset` and has the first strides of `dims`; the map begins at `begin`, and
    takes what lies there by the first strides of `within` to the second ones. Returns the box with
    its strides in the other memory in place of the first, and how far from the map's beginning
    there it begins. None: the box is not within the map, or is not a box there.
    """
    radix = sorted(within, key=lambda dim: -dim[1])
    for (_, stride, _), (size, inner, _) in itertools.pairwise(radix):
        if stride < size * inner:
            return None
    left, used, start = offset - begin, [], 0
    for size, stride, to in radix:
        digit, left = divmod(left, stride) if stride > 0 else (-1, left)
        if not 0 <= digit < size:
            return None
        used.append(digit)
        start += digit * to
    if left != 0:
        return None
    found: list[Dim] = []
    todo = sorted((dim for dim in dims if dim[0] > 1), key=lambda dim: dim[1])
    while todo:
        size, stride, other = todo.pop()
        at = next((i for i, dim in enumerate(radix) if dim[1] <= stride), None)
        if at is None or stride % radix[at][1] != 0:
            if stride != 0:
                return None
            found.append((size, 0, other))
            continue
        length, unit, to = radix[at]
        step = stride // unit
        if used[at] + step * (size - 1) < length:
            used[at] += step * (size - 1)
            found.append((size, step * to, other))
            continue
        here = length // step  # so many are within this dimension of the map
        if used[at] != 0 or length % step != 0 or here < 2 or size % here != 0:
            return None
        todo += [(size // here, stride * here, other * here), (here, stride, other)]
    return found, start
