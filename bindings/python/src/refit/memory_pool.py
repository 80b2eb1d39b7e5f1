"""Optimizer states at addresses that stay: PyTorch allocates them from an arena of refit.

    pool = refit.mem_pool("cuda:0", 40 << 30)
    with pool.use():
        optimizer.step()                                  # the first one makes the states
    controller = refit.Controller(optimizer, pool=pool)

Their memory goes when they are cleared and returns to the same addresses, so captured graphs stay
valid. PyTorch takes memory from the arena in segments, and a segment leaves as one: put nothing but
states into the pool. What a controller does with it is unknown here.
"""

import ctypes
from contextlib import AbstractContextManager
from typing import Any, cast

import torch

from refit import _library
from refit._handle import Handle
from refit._library import call, lib
from refit.config import ConfigLike, make_config
from refit.device import Device
from refit.errors import InvalidError, NotFoundError, UnsupportedError


def mem_pool(
    device: torch.device | str | int | None, nbytes: int, config: ConfigLike = None
) -> "MemPool":
    """A pool of at most ``nbytes`` for a GPU's optimizer states. None is the current device.

    Reserves addresses and takes no memory yet. One pool for each device and process (ExistsError).
    UnsupportedError without a GPU, InvalidError, DeviceMemoryError. Since 0.1.
    """
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "refit.mem_pool() needs a GPU that PyTorch can use: on a CPU the states move without it"
        )
    found = torch.device("cuda" if device is None else device)
    if found.type != "cuda":
        raise InvalidError(f"a pool is for a GPU: {found} is none")
    index = torch.cuda.current_device() if found.index is None else found.index
    return MemPool(torch.device("cuda", index), nbytes, config)


class MemPool(Handle):
    """An arena that PyTorch allocates from. Made by ``mem_pool``; outlives its tensors."""

    def __init__(self, device: torch.device, nbytes: int, config: ConfigLike = None) -> None:
        if nbytes <= 0:
            raise InvalidError(f"a pool of {nbytes} bytes holds nothing: say how large it may grow")
        self.device = device
        spec = "host" if device.type == "cpu" else f"cuda:{device.index}"
        self.handle = Device(spec, make_config(config))
        self._pool: Any = None
        self._attached = False
        self._open(lib.refit_arena_open, self.handle.pointer, nbytes)

    @property
    def pool(self) -> "torch.cuda.MemPool":
        """The pool of PyTorch's, made when first asked for."""
        if self._pool is None:
            if not self._attached:
                call(lib.refit_torch_attach, self._live)
                self._attached = True
            allocator = torch.cuda.memory.CUDAPluggableAllocator(
                str(_library._path()), "refit_torch_alloc", "refit_torch_free"
            )
            self._pool = torch.cuda.MemPool(cast(Any, allocator).allocator())
        return cast("torch.cuda.MemPool", self._pool)

    def use(self) -> AbstractContextManager[Any]:
        """What is allocated on the device within the block comes from the pool. Since 0.1."""
        used: AbstractContextManager[Any] = torch.cuda.use_mem_pool(self.pool, self.device)
        return used

    def pieces(self) -> list[tuple[int, int]]:
        """Address and length of every segment that PyTorch has taken."""
        found: list[tuple[int, int]] = []
        memory, nbytes = ctypes.c_void_p(), ctypes.c_uint64()
        while True:
            to = ctypes.byref(memory), ctypes.byref(nbytes)
            try:
                call(lib.refit_arena_piece, self._live, len(found), *to)
            except NotFoundError:
                return found
            found.append((memory.value or 0, nbytes.value))

    def _close(self, pointer: int) -> None:
        """BusyError while tensors or a controller use it; then it stays open, close it again."""
        self._pool = None
        if self._attached:
            torch.cuda.empty_cache()
            call(lib.refit_torch_detach, pointer)
            self._attached = False
        call(lib.refit_arena_close, pointer)
        self.handle.close()
