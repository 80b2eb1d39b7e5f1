"""The ways out and back that are measured, each in its simplest correct form.

On a machine without a GPU "device" and host are both main memory: ``.to("cpu")`` would copy
nothing there, so the per-tensor way copies with ``clone``, which takes fresh pageable memory as
``.to("cpu")`` of a CUDA tensor does. ``keep`` says whether the device's storages stay allocated
while the bytes are away, as a caching allocator's do, or are freed and allocated again, which on
this device costs page faults.
"""

from collections import deque
from typing import Any, Protocol

import torch

from refit._c.abi import refit_stream_ref
from refit._c.config import Config
from refit._c.device import Device
from refit._c.library import call, lib
from refit.states.offloader import Offloader

LIMIT_BYTES = 1 << 29


class Case(Protocol):
    """One way: its memory is taken by its constructor and given back by ``close``."""

    name: str
    allocations: int  # so far: memory for a tensor, or for an arena

    def ready(self) -> None:
        """Called before each round, not timed: other ways may have moved the tensors."""

    def out(self) -> None:
        """All bytes leave the tensors; returns when they are on the host."""

    def back(self) -> None:
        """All bytes return; returns when they are there."""

    def close(self) -> None:
        """Gives back what it took."""


class OnTensors:
    """The common part of the ways that move tensors. ``keep``: see above."""

    def __init__(self, tensors: list[torch.Tensor], keep: bool) -> None:
        self.allocations = 0
        self._tensors, self._keep = tensors, keep
        self._sizes = [it.untyped_storage().nbytes() for it in tensors]

    def ready(self) -> None:
        """Nothing."""

    def _free(self) -> None:
        for it in self._tensors:
            it.untyped_storage().resize_(0)

    def _allocate(self) -> None:
        for it, size in zip(self._tensors, self._sizes, strict=True):
            it.untyped_storage().resize_(size)
        self.allocations += len(self._tensors)

    def _places(self) -> list[int]:
        return [it.untyped_storage().data_ptr() for it in self._tensors]


class Refit(OnTensors):
    """refit's offloader: one arena, batches of copies."""

    name = "refit"

    def __init__(self, tensors: list[torch.Tensor], keep: bool) -> None:
        super().__init__(tensors, keep)
        config = Config()
        self._device = Device("host", config)
        self._offloader = Offloader(self._device, config)
        self._known: list[int] = []
        self._regions: list[int] = []
        self.ready()
        self.allocations += 1  # the arena

    def ready(self) -> None:
        if self._known == self._places():
            return
        if self._known:
            self._offloader.unseal()
            self._offloader.clear()
        self._known = self._places()
        self._regions = [
            self._offloader.add(f"state {number}", place, size)
            for number, (place, size) in enumerate(zip(self._known, self._sizes, strict=True))
        ]
        self._offloader.seal()

    def out(self) -> None:
        self._offloader.offload()
        self._offloader.wait()
        if not self._keep:
            self._offloader.unbind_each(self._regions)
            self._free()

    def back(self) -> None:
        if not self._keep:
            self._allocate()
            self._known = self._places()
            self._offloader.bind_each(self._regions, self._known)
        self._offloader.restore().wait()

    def close(self) -> None:
        self._offloader.close()
        self._device.close()


class PerTensor(OnTensors):
    """(a) What frameworks do: each tensor by itself, into fresh pageable memory."""

    name = "per-tensor pageable"

    def __init__(self, tensors: list[torch.Tensor], keep: bool) -> None:
        super().__init__(tensors, keep)
        self._saved: deque[torch.Tensor] = deque()

    def out(self) -> None:
        for it in self._tensors:
            self._saved.append(it.clone())
            self.allocations += 1
            if not self._keep:
                it.untyped_storage().resize_(0)

    def back(self) -> None:
        for it, size in zip(self._tensors, self._sizes, strict=True):
            if not self._keep:
                it.untyped_storage().resize_(size)
                self.allocations += 1
            it.copy_(self._saved.popleft())

    def close(self) -> None:
        self._saved.clear()


class Flat(OnTensors):
    """(b) What the patch for NeMo-RL does: one reused flat tensor, a copy for each tensor."""

    name = "one flat tensor"

    def __init__(self, tensors: list[torch.Tensor], keep: bool) -> None:
        super().__init__(tensors, keep)
        places = [(size + 511) // 512 * 512 for size in self._sizes]
        flat = torch.empty(sum(places), dtype=torch.uint8)
        self.allocations += 1
        self._views = [
            part[: it.nbytes].view(it.dtype).view(it.shape)
            for part, it in zip(torch.split(flat, places), tensors, strict=True)
        ]

    def out(self) -> None:
        for view, it in zip(self._views, self._tensors, strict=True):
            view.copy_(it)
        if not self._keep:
            self._free()

    def back(self) -> None:
        if not self._keep:
            self._allocate()
        for view, it in zip(self._views, self._tensors, strict=True):
            it.copy_(view)

    def close(self) -> None:
        self._views.clear()


class OneCopy:
    """(c) The ceiling: as many bytes in large copies between two buffers that stay, by refit's
    copying threads."""

    name = "one large copy"

    def __init__(self, tensors: list[torch.Tensor], keep: bool) -> None:
        self.allocations = 0
        self._total = sum(it.untyped_storage().nbytes() for it in tensors)
        self._device = Device("host", Config())
        size = min(self._total, LIMIT_BYTES)
        self._here = torch.ones(size, dtype=torch.uint8)
        self._there = torch.zeros(size, dtype=torch.uint8)

    def ready(self) -> None:
        """Nothing: its buffers are its own."""

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        nothing: Any = refit_stream_ref(None)
        done = 0
        while done < self._total:
            part = min(to.nbytes, self._total - done)
            call(
                lib.refit_stream_copy, self._device.pointer, nothing,
                to.data_ptr(), source.data_ptr(), part,
            )  # fmt: skip
            done += part

    def out(self) -> None:
        self._copy(self._there, self._here)

    def back(self) -> None:
        self._copy(self._here, self._there)

    def close(self) -> None:
        self._device.close()
