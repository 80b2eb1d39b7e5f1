"""Brings the bytes of tensors into the version under way, many with one call of the C library.

Tensors that are there together are only pointed to until a batch is written. Those on a GPU that
are not made on the way are lent: workers on that GPU read them where they are until the version is
over. What an iterator gave is taken before the next one is asked for: small tensors are copied, so
that they still travel many at a time, and large ones are written at once. What came before in the
version is known as far as its ties go. Independent of when a version begins and ends.
"""

import ctypes
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

from refit._c import abi
from refit._c.device import Device, stream_of
from refit._c.library import call, lib
from refit._c.waiting import Calls
from refit.errors import CancelledError, UnsupportedError
from refit.weights import manifest
from refit.weights.manifest import (
    Alias,
    Collected,
    Declared,
    Row,
    Tensors,
    is_settled,
    lasting,
    pairs_of,
)
from refit.weights.source import RawTensor, Weight, in_row_order, weight_named
from refit.weights.ties import TieCheck

# ---- Copies of weights that do not stay what they are while others are looked at.
#
# The tensors of a mapping or a list are there together: they may all be held, and two that
# lie in the same memory are tied. An iterator may make each tensor in the memory of the one
# before, or put back afterwards what it changed: the tensor that it gave counts only until
# the next one is asked for.

COPIED_BYTES = 1 << 20
GPU_COPIED_BYTES = 32 << 20
"""Up to here a copy, in host memory or in a GPU's, is cheaper than a call of the C library for this
tensor alone."""


def settled(weights: Tensors) -> Tensors:
    """Weights that can be looked at before they are sent: of what an iterator gives, copies."""
    if is_settled(weights) or callable(getattr(weights, "manifest", None)):
        return weights
    return [(name, copy_of(name, tensor)) for name, tensor in pairs_of(weights)]


def copied(weight: Weight) -> Weight | None:
    """The same in memory of its own; None for what is better, or can only be, read where it is."""
    if weight.layout is not None:
        return in_row_order(weight)
    if weight.nbytes > (COPIED_BYTES if weight.device < 0 else GPU_COPIED_BYTES):
        return None
    if weight.device < 0:
        raw = ctypes.string_at(weight.pointer, weight.nbytes) if weight.nbytes else b""
        place = ctypes.cast(ctypes.c_char_p(raw), ctypes.c_void_p).value
        return weight._replace(tensor=raw, pointer=place or 0)
    if not hasattr(weight.tensor, "data_ptr"):
        return None
    made = weight.tensor.detach().clone()
    return weight._replace(tensor=made, pointer=made.data_ptr())


def copy_of(name: str, tensor: Any) -> Any:
    """In memory of its own on the host; an ``Alias`` as it is. UnsupportedError."""
    if isinstance(tensor, Alias):
        return tensor
    weight = weight_named(name, tensor)
    if hasattr(tensor, "data_ptr"):
        return tensor.detach().to("cpu", copy=True)
    if hasattr(tensor, "copy"):
        return tensor.copy()
    return _copy_of_bytes(weight)


def _copy_of_bytes(weight: Weight) -> RawTensor:
    """Of what cannot copy itself: ``RawTensor`` bytes, a memoryview, a view of an update."""
    if weight.device >= 0:
        raise UnsupportedError(
            "an iterator gave memory of a GPU that cannot be copied: give a mapping, or tensors of "
            "PyTorch; a publisher takes it once it has declared the tensors (publisher.declare)"
        )
    raw = bytearray()  # not bytes: Python has one object for all that are one byte long and equal
    if weight.nbytes:
        raw += (ctypes.c_char * weight.nbytes).from_address(weight.pointer)
    return RawTensor(raw, weight.dtype.name, weight.shape)


# ---- Many tensors' bytes on their way into a version, as one list for C.
#
# A batch is of one device, and of one stream, which was the current one when its tensors were
# taken: an iterator may make them on a stream of its own. It holds what would go away before
# it is written: tensors that a generator made, and copies in row order of those that are
# scattered. So much of that makes it full.

HELD_BYTES = 64 << 20
PART_BYTES = 256 << 20
LENT_PART_BYTES = 2 << 30  # digested, as a rule, and copied where nothing can be lent

_ENTRY = struct.Struct("@IPQ")  # refit_weight
assert _ENTRY.size == ctypes.sizeof(abi.refit_weight)


class Batch:
    """Tensors of one device; ``device`` is a CUDA device's number, or -1. They are read after
    what ``stream`` has queued. ``lent``: they stay as they are until the version is over."""

    def __init__(
        self,
        device: int = -1,
        stream: int | None = None,
        lent: bool = False,
        rows: Iterable[Row] = (),
    ) -> None:
        self.device = device
        self.stream = stream
        self.lent = lent
        self._items: list[tuple[int, int, int]] = list(rows)
        self._held: list[Any] = []
        self._held_bytes = 0

    def __len__(self) -> int:
        return len(self._items)

    @property
    def full(self) -> bool:
        """Whether it holds as much as it should."""
        return self._held_bytes >= HELD_BYTES

    def add(self, index: int, weight: Weight) -> None:
        """Adds tensor ``index`` of the manifest, and holds it."""
        weight = in_row_order(weight)
        self._held.append(weight.tensor)
        self._held_bytes += 0 if self.lent else weight.nbytes
        self._items.append((index, weight.pointer, weight.nbytes))

    @cached_property
    def parts(self) -> list[Any]:
        """Arrays of refit_weight: so few bytes in each that Ctrl-C is heard between them."""
        return list(self._parts())

    def _parts(self) -> Iterator[Any]:
        first, nbytes, most = 0, 0, LENT_PART_BYTES if self.lent else PART_BYTES
        for i, (_, _, more) in enumerate(self._items):
            if nbytes and nbytes + more > most:
                yield _pack(self._items[first:i])
                first, nbytes = i, 0
            nbytes += more
        yield _pack(self._items[first:])


Batches = dict[tuple[int, int | None, bool], Batch]
"""Those that are being filled: by device, stream, and whether they are lent. One for each, since
lent tensors and others may come by turns."""


def _pack(items: list[tuple[int, int, int]]) -> Any:
    packed = bytearray(len(items) * _ENTRY.size)
    for i, item in enumerate(items):
        _ENTRY.pack_into(packed, i * _ENTRY.size, *item)
    return (abi.refit_weight * len(items)).from_buffer(packed)


class PublisherCalls(Calls):
    """Calls of one publisher that may wait for workers; Ctrl-C cancels the one under way."""

    def __init__(self, publisher: int) -> None:
        super().__init__()
        self.publisher = publisher

    def run_cancellably(
        self, function: Callable[[], None], cancelled: threading.Event | None = None
    ) -> None:
        """Runs it. Ctrl-C sets ``cancelled`` as well."""
        cancelled = cancelled or threading.Event()

        def cancel() -> None:
            cancelled.set()
            lib.refit_publisher_cancel(self.publisher)

        try:
            self.run(function, cancel)
        finally:
            if cancelled.is_set():
                self._take_back_cancel()

    def _take_back_cancel(self) -> None:
        """One that came too late for its call is not to end the next one."""
        try:
            call(lib.refit_publisher_wait_workers, self.publisher, 0, 0)
        except CancelledError:
            return


# ---- The writer


class Writer:
    """Writes for one publisher, whose calls it is given each time. Owns the devices it opens."""

    def __init__(self) -> None:
        self._devices: dict[int, Device] = {}
        self._ties: TieCheck | None = None
        self._lent: list[Batch] = []
        self._whole: tuple[dict[int, list[Row]], list[Batch]] | None = None
        """The batches of what was collected last; they hold nothing."""

    def forget(self) -> None:
        """The version is over: later tensors belong to another."""
        self._ties = None
        self._lent.clear()

    def close(self) -> None:
        """Closes its devices; after the publisher."""
        while self._devices:
            self._devices.popitem()[1].close()

    def write_collected(self, calls: PublisherCalls, found: Collected) -> None:
        """``found`` stays until the version is over: only copies are bounded."""
        if self._whole is None or self._whole[0] is not found.rows:
            made = [Batch(it, None, it >= 0, rows) for it, rows in found.rows.items()]
            self._whole = found.rows, made
        for batch in self._whole[1]:
            batch.stream = stream_of(batch.device) if batch.device >= 0 else None
            self._flush(calls, batch)
        batches: Batches = {}
        for index, weight in found.scattered:
            self._add(calls, batches, index, weight)
        self._flush_all(calls, batches)

    def write_together(
        self, calls: PublisherCalls, declared: Declared, weights: Tensors, *, lend: bool
    ) -> None:
        """The tensors may be made as they are taken, and stay: what is held is bounded. ``lend``:
        those that are not made so stay until the version is over."""
        batches: Batches = {}
        ties = self._ties_of(declared)
        lasts = lasting(weights) if lend else None
        try:
            for name, tensor in manifest.pairs_of(weights):
                index, weight = declared.match(name, tensor)
                if ties.concerns(name):
                    ties.see(name, weight, stays=True)
                if weight is None or declared.is_tied(index):
                    continue
                own = lasts is not None and lasts(name)
                lent = own and weight.device >= 0 and weight.layout is None
                self._add(calls, batches, index, weight, lent=lent)
            self._flush_all(calls, batches)
        finally:
            ties.leave()

    def write_each(self, calls: PublisherCalls, declared: Declared, weights: Tensors) -> None:
        """Each tensor counts only until the next one is asked for."""
        batches: Batches = {}
        ties = self._ties_of(declared)
        for name, tensor in manifest.pairs_of(weights):
            index, weight = declared.match(name, tensor)
            if ties.concerns(name):
                ties.see(name, weight, stays=False)
            if weight is None or declared.is_tied(index):
                continue
            own = copied(weight)
            if own is None:
                self._write_alone(calls, index, weight)
            else:
                self._add(calls, batches, index, own)
        self._flush_all(calls, batches)

    def _ties_of(self, declared: Declared) -> TieCheck:
        if self._ties is None:
            self._ties = TieCheck(declared.specs)
        return self._ties

    def _write_alone(self, calls: PublisherCalls, index: int, weight: Weight) -> None:
        batches: Batches = {}
        self._add(calls, batches, index, weight)
        self._flush_all(calls, batches)

    def _add(
        self,
        calls: PublisherCalls,
        batches: Batches,
        index: int,
        weight: Weight,
        *,
        lent: bool = False,
    ) -> None:
        """Adds a tensor's bytes to the batch of its kind, which is written first if it is full."""
        stream = stream_of(weight.device) if weight.device >= 0 else None
        kind = weight.device, stream, lent
        batch = batches.get(kind)
        if batch is not None and batch.full:
            self._flush(calls, batches.pop(kind))
            batch = None
        if batch is None:
            batch = batches[kind] = Batch(*kind)
        batch.add(index, weight)

    def _flush_all(self, calls: PublisherCalls, batches: Batches) -> None:
        while batches:
            self._flush(calls, batches.pop(next(iter(batches))))

    def _flush(self, calls: PublisherCalls, batch: Batch) -> None:
        if len(batch) == 0:
            return
        device = self._device(batch.device).pointer if batch.device >= 0 else None
        stream = abi.refit_stream_ref(batch.stream)
        function = lib.refit_publisher_lend if batch.lent else lib.refit_publisher_write_all
        if batch.lent:
            self._lent.append(batch)

        stop = threading.Event()

        def write() -> None:
            for part in batch.parts:
                if stop.is_set():
                    raise CancelledError("the publish was interrupted")
                call(function, calls.publisher, part, len(part), device, stream)

        calls.run_cancellably(write, stop)

    def _device(self, number: int) -> Device:
        """The C library's device for PyTorch's CUDA device of that number; open until close."""
        found = self._devices.get(number)
        if found is None:
            found = self._devices[number] = Device(f"cuda:{number}")
        return found
