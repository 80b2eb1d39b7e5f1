"""Many tensors' bytes on their way into a version, as one list for C.

A batch is of one device. It holds what would go away before it is written: tensors that a generator
made, and copies in row order of those that are scattered. So much of that makes it full.
"""

import ctypes
import struct
from collections.abc import Iterator
from typing import Any

from refit import _abi
from refit.source import Weight, in_row_order

HELD_BYTES = 64 << 20
PART_BYTES = 256 << 20

_ENTRY = struct.Struct("@IPQ")  # refit_weight
assert _ENTRY.size == ctypes.sizeof(_abi.refit_weight)


class Batch:
    """Tensors of one device; ``device`` is a CUDA device's number, or -1."""

    def __init__(self, device: int) -> None:
        self.device = device
        self._items: list[tuple[int, int, int]] = []
        self._held: list[Any] = []
        self._held_bytes = 0

    def __len__(self) -> int:
        return len(self._items)

    @property
    def full(self) -> bool:
        """Whether it holds as much as it should."""
        return self._held_bytes >= HELD_BYTES

    def add(self, index: int, weight: Weight, *, hold: bool) -> None:
        """Adds tensor ``index`` of the manifest; without ``hold`` the caller holds it."""
        if hold or weight.layout is not None:
            weight = in_row_order(weight)
            self._held.append(weight.tensor)
            self._held_bytes += weight.nbytes
        self._items.append((index, weight.pointer, weight.nbytes))

    def parts(self) -> Iterator[Any]:
        """Arrays of refit_weight: so few bytes in each that Ctrl-C is heard between them."""
        first, nbytes = 0, 0
        for i, (_, _, more) in enumerate(self._items):
            if nbytes and nbytes + more > PART_BYTES:
                yield _pack(self._items[first:i])
                first, nbytes = i, 0
            nbytes += more
        yield _pack(self._items[first:])


def _pack(items: list[tuple[int, int, int]]) -> Any:
    packed = bytearray(len(items) * _ENTRY.size)
    for i, item in enumerate(items):
        _ENTRY.pack_into(packed, i * _ENTRY.size, *item)
    return (_abi.refit_weight * len(items)).from_buffer(packed)
