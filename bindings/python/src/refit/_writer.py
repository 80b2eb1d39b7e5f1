"""Brings the bytes of tensors into the version under way, many with one call of the C library.

Tensors that are there together are only pointed to until a batch is written. What an iterator gave
is taken before the next one is asked for: small tensors are copied, so that they still travel many
at a time, and large ones are written at once. What came before in the version is known as far as
its ties go. When a version begins and ends is unknown here.
"""

import threading

from refit import _abi, manifest
from refit._batch import Batch
from refit._devices import stream_of
from refit._library import call, lib
from refit._settled import copied
from refit._ties import TieCheck
from refit._waiting import run_interruptibly
from refit.device import Device
from refit.errors import CancelledError
from refit.manifest import Collected, Declared, Tensors
from refit.source import Weight


class Writer:
    """Writes for one publisher, whose pointer each call is given. Owns the devices it opens."""

    def __init__(self) -> None:
        self._devices: dict[int, Device] = {}
        self._ties: TieCheck | None = None

    def forget(self) -> None:
        """What comes from now on is another version's."""
        self._ties = None

    def close(self) -> None:
        """Closes its devices; after the publisher."""
        while self._devices:
            self._devices.popitem()[1].close()

    def write_collected(self, publisher: int, found: Collected) -> None:
        """The tensors are held by the caller: only copies are bounded."""
        batch = Batch(-1)
        for index, weight in found.weights:
            batch = self._add(publisher, batch, index, weight, hold=False)
        self._flush(publisher, batch)

    def write_together(self, publisher: int, declared: Declared, weights: Tensors) -> None:
        """The tensors may be made as they are taken, and stay: what is held is bounded."""
        batch, ties = Batch(-1), self._ties_of(declared)
        try:
            for name, tensor in manifest.pairs_of(weights):
                index, weight = declared.match(name, tensor)
                if ties.concerns(name):
                    ties.see(name, weight, stays=True)
                if weight is not None and not declared.is_tied(index):
                    batch = self._add(publisher, batch, index, weight, hold=True)
            self._flush(publisher, batch)
        finally:
            ties.leave()

    def write_each(self, publisher: int, declared: Declared, weights: Tensors) -> None:
        """Each tensor counts only until the next one is asked for."""
        batch, ties = Batch(-1), self._ties_of(declared)
        for name, tensor in manifest.pairs_of(weights):
            index, weight = declared.match(name, tensor)
            if ties.concerns(name):
                ties.see(name, weight, stays=False)
            if weight is None or declared.is_tied(index):
                continue
            own = copied(weight)
            if own is None:
                self._write_alone(publisher, index, weight)
            else:
                batch = self._add(publisher, batch, index, own, hold=True)
        self._flush(publisher, batch)

    def _ties_of(self, declared: Declared) -> TieCheck:
        if self._ties is None:
            self._ties = TieCheck(declared.specs)
        return self._ties

    def _write_alone(self, publisher: int, index: int, weight: Weight) -> None:
        self._flush(publisher, self._add(publisher, Batch(-1), index, weight, hold=True))

    def _add(
        self, publisher: int, batch: Batch, index: int, weight: Weight, *, hold: bool
    ) -> Batch:
        """Adds a tensor's bytes to the batch, which is written first if it is full."""
        if weight.device != batch.device or batch.full:
            self._flush(publisher, batch)
            batch = Batch(weight.device)
        batch.add(index, weight, hold=hold)
        return batch

    def _flush(self, publisher: int, batch: Batch) -> None:
        if len(batch) == 0:
            return
        device, after = None, None
        if batch.device >= 0:
            device, after = self._device(batch.device).pointer, stream_of(batch.device)
        stop = threading.Event()
        stream = _abi.refit_stream_ref(after)

        def write() -> None:
            for part in batch.parts():
                if stop.is_set():
                    raise CancelledError("the publish was interrupted")
                call(lib.refit_publisher_write_all, publisher, part, len(part), device, stream)

        run_interruptibly(write, stop.set)

    def _device(self, number: int) -> Device:
        """The C library's device for PyTorch's CUDA device of that number; open until close."""
        found = self._devices.get(number)
        if found is None:
            found = self._devices[number] = Device(f"cuda:{number}")
        return found
