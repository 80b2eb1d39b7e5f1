"""Optimizer states at addresses that stay: PyTorch allocates them from an arena of refit.

    pool = refit.mem_pool("cuda:0", 40 << 30)
    optimizer.step()                                      # the first one makes the states
    pool.migrate(optimizer)                               # they move into the pool, and gradients
    controller = refit.Controller(optimizer, pool=pool)

Their memory goes when they are cleared and returns to the same addresses, so graphs that were
captured after ``migrate`` stay valid. PyTorch takes memory from the arena in segments, and a
segment leaves as one: put nothing but states and gradients into the pool. Independent of what a
controller does with it.
"""

import ctypes
from contextlib import AbstractContextManager
from typing import Any

import torch

from refit._c.config import ConfigLike, make_config
from refit._c.device import Device
from refit._c.handle import Handle
from refit._c.library import call, lib
from refit.errors import BusyError, InvalidError, NotFoundError, UnsupportedError
from refit.integrations._recognized import opened
from refit.states import torch_pool
from refit.states.hooks import refuse_second
from refit.states.inventory import Inventory, OptimizerAdapters
from refit.states.migration import migrate
from refit.states.torch_memory import refuse_capture


def mem_pool(
    device: torch.device | str | int | None, nbytes: int, config: ConfigLike = None
) -> "MemPool":
    """A pool of at most ``nbytes`` for a GPU's optimizer states. None is the current device.

    Reserves addresses and takes no memory yet. One pool for each device and process (ExistsError).
    It takes PyTorch 2.8 or later, and its native allocator. Expandable segments may be on. With
    2.11 or later tensors may outlive the pool. UnsupportedError (without a GPU, or with another
    PyTorch), InvalidError, DeviceMemoryError.
    """
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "refit.mem_pool() needs a GPU that PyTorch can use: on a CPU the states move without it"
        )
    found = torch.device("cuda" if device is None else device)
    if found.type != "cuda":
        raise InvalidError(f"a pool is for a GPU: {found} is none")
    torch_pool.refuse_unfit()
    index = torch.cuda.current_device() if found.index is None else found.index
    return MemPool(torch.device("cuda", index), nbytes, config)


class MemPool(Handle):
    """An arena that PyTorch allocates from. Made by ``mem_pool``; outlives its tensors."""

    def __init__(self, device: torch.device, nbytes: int, config: ConfigLike = None) -> None:
        if nbytes <= 0:
            raise InvalidError(f"a pool of {nbytes} bytes holds nothing: say how large it may grow")
        self.device = device
        spec = "host" if device.type == "cpu" else f"cuda:{device.index}"
        self._config = make_config(config)
        self.handle = Device(spec, self._config)
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
            self._pool = torch_pool.make_pool(self.device)
        made: torch.cuda.MemPool = self._pool
        return made

    def use(self) -> AbstractContextManager[None]:
        """This thread's allocations on the device within the block come from the pool.

        Temporaries too, and they keep their memory when states leave: so let no step run within;
        ``migrate`` moves what a step has made. Entering gives PyTorch's cached memory back to the
        device, since PyTorch does not while a pool is in use. Expandable segments are off in the
        whole process within the block, however they were switched on; its end brings back the
        allocator's settings as they were. UnsupportedError if they cannot be switched off.
        """
        return torch_pool.allocating(self.pool, self.device)

    def migrate(
        self, optimizer: Any, model: torch.nn.Module | None = None
    ) -> list[tuple[str, str]]:
        """Moves the states that an optimizer has, after its first step, into the pool.

        Gradients that are there move too: a captured step reads them. (``zero_grad()`` frees them;
        ``zero_grad(set_to_none=False)`` keeps them where they are.)
        ``optimizer`` and ``model``: as for ``refit.Controller``, which is made afterwards. Tensors
        stay the objects they are, their bytes too; their addresses change, so capture graphs
        afterwards. Takes at most 256 MiB more than there was, or one more of the largest state.
        Returns what stays outside, by name, and why. Waits for the device. Does nothing for states
        that are in the pool already: call it again after a failure, or when states were added.

        BusyError: the optimizer has a controller; close that one first. DeviceMemoryError: the pool
        is full, or the GPU; what has moved stays moved, the others where they were, nothing is
        lost. StateError, UnsupportedError (see ``use``).
        """
        refuse_capture(self.device)
        held = OptimizerAdapters(opened(optimizer, model))
        for one in held.optimizers:
            refuse_second(one)
        inventory = Inventory(held.optimizers, model, self._config, "keep", held)
        stock = inventory.take()
        found = inventory.survey(stock, self._why_stays)
        return migrate(stock, found, self.device, self.pieces(), self.use)

    adopt = migrate
    """``migrate``; goes in 0.2."""

    def _why_stays(self, device: torch.device) -> str | None:
        if device == self.device:
            return None
        return f"it is on {device}, and the pool on {self.device}"

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
        used = 0 if self._pool is None else torch_pool.live_bytes(self._pool)
        if used > 0:
            raise BusyError(
                f"tensors use {used} bytes of the pool: drop them (the optimizer, its states, "
                "captured graphs), then close the pool"
            )
        self._pool = None
        if self._attached:
            torch.cuda.empty_cache()
            call(lib.refit_torch_detach, pointer)
            self._attached = False
        call(lib.refit_arena_close, pointer)
        self.handle.close()
