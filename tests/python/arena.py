"""A pool on the host, of whose memory a test takes the segments that PyTorch would take."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from refit._c.library import call, lib
from refit.memory_pool import MemPool


class Arena(MemPool):
    def __init__(self, nbytes: int) -> None:
        super().__init__(torch.device("cpu"), nbytes)
        self.taken: list[int] = []

    def tensors(self, like: Sequence[Any]) -> list[Any]:
        """Tensors with the values of others, one after the other in a segment of their own."""
        address = ctypes.c_void_p()
        call(lib.refit_arena_alloc, self._live, sum(t.nbytes for t in like), ctypes.byref(address))
        assert address.value is not None
        self.taken.append(address.value)
        made, at = [], address.value
        for t in like:
            memory = (ctypes.c_char * t.nbytes).from_address(at)
            made.append(torch.frombuffer(memory, dtype=t.dtype).view(t.shape).copy_(t))
            at += t.nbytes
        return made

    def give_back(self) -> None:
        """The segments; their tensors must not be used any more."""
        while self.taken:
            call(lib.refit_arena_free, self._live, self.taken.pop())
