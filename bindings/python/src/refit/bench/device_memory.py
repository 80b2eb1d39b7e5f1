"""What the tensors of the device take while something runs: the peak, and how it rises and falls.

On a GPU PyTorch's caching allocator counts. On a CPU "device" is main memory: every allocation and
every free of PyTorch's CPU allocator counts, as its own profiler records them, in the forward and
in the backward pass. Each storage counts once, however many tensors view it, and so do the
temporaries of kernels. Nothing that is measured is changed: neither tensors nor their storages are
held, wrapped or looked at. Host memory that must not count is taken by another allocator: refit's
arena is, and so is ``host_memory``.

A free on a thread that did not begin the recording is not seen.
"""

import gc
import os
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

MEMORY = "[memory]"  # of PyTorch's profiler: one allocation or one free
Points = list[tuple[float, int]]


class DeviceMemory:
    """A context manager that records the device's memory while it is entered.

    ``resident_bytes`` is what lives all the while, which the figures include. On a CPU it has to
    be said, since it was allocated before: ``storage_bytes`` counts it. A GPU's allocator knows.
    """

    def __init__(self, device: torch.device, resident_bytes: int = 0) -> None:
        self._device = device
        self._profile: Any = None
        self._began_ns = 0
        self.resident_bytes = resident_bytes
        self.peak_bytes = 0
        self.points: Points = []
        """Seconds since the beginning, and the bytes from then on; empty on a GPU."""

    @property
    def on_gpu(self) -> bool:
        return self._device.type == "cuda"

    def seconds(self) -> float:
        """Since the beginning, on the clock of ``points``."""
        return (time.time_ns() - self._began_ns) / 1e9

    def __enter__(self) -> Self:
        gc.collect()  # what was taken before must not be given back meanwhile
        if self.on_gpu:
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self.resident_bytes = torch.cuda.memory_allocated(self._device)
        else:
            self._profile = torch.autograd.profiler.profile(profile_memory=True)
            with _stderr_apart():
                self._profile.__enter__()
        self._began_ns = time.time_ns()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.on_gpu:
            self.peak_bytes = torch.cuda.max_memory_allocated(self._device)
            return
        with _stderr_apart():
            self._profile.__exit__(kind, value, trace)
        self.points = list(self._sums())
        self.peak_bytes = max(nbytes for _, nbytes in self.points)
        self._profile = None

    def _sums(self) -> Iterator[tuple[float, int]]:
        """The bytes after each allocation and each free, in the order in which they were made."""
        held = self.resident_bytes
        yield 0.0, held
        for event in self._profile.kineto_results.events():
            if event.name() == MEMORY and event.device_type() == torch.profiler.DeviceType.CPU:
                held += event.nbytes()
                yield (event.start_ns() - self._began_ns) / 1e9, held


def storage_bytes(*tensors: torch.Tensor) -> int:
    """Of the storages of these tensors, each counted once."""
    found = {it.untyped_storage()._cdata: it.untyped_storage().nbytes() for it in tensors}
    return sum(found.values())


class HostMemory:
    """Host memory that is not memory of the device, kept for the next use of its size when the last
    tensor over it is gone, as PyTorch keeps what it has page-locked: by powers of two.

    Where there is a GPU PyTorch takes and locks it, else NumPy takes it, so that it does not count.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray[Any, Any]]] = {}

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of this type and shape, and of these strides if they are dense."""
        shape = torch.empty_like(tensor, device="meta")
        if tensor.is_cuda:
            return torch.empty_like(tensor, device="cpu", pin_memory=True)
        if shape.nbytes == 0:
            return torch.empty_like(tensor)
        memory = torch.from_numpy(self._take(shape.nbytes)).view(tensor.dtype)
        return memory.as_strided(shape.shape, shape.stride())

    def _take(self, nbytes: int) -> np.ndarray[Any, Any]:
        size = 1 << (nbytes - 1).bit_length()
        free = self._free.setdefault(size, [])
        whole = free.pop() if free else np.empty(size, dtype=np.uint8)
        part = whole[:nbytes]
        weakref.finalize(part, free.append, whole).atexit = False
        return part


@contextmanager
def _stderr_apart() -> Iterator[None]:
    """PyTorch's profiler says on stderr that it begins and ends."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def is_gpu(device: Any) -> bool:
    """Whether it is one of CUDA's."""
    return torch.device(device).type == "cuda"


def synchronize(device: Any) -> None:
    """Waits for a GPU, so that times are of what was done."""
    if is_gpu(device):
        torch.cuda.synchronize(device)


def free_bytes(device: Any) -> int:
    """What the driver has free on a GPU; 0 on a CPU."""
    return torch.cuda.mem_get_info(device)[0] if is_gpu(device) else 0
