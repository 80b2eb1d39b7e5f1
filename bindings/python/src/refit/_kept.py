"""What keeps the memory of an update mapped for views that outlive it.

A view may be forgotten in a variable, and then read after the update is closed or its subscriber.
It holds a ``Kept``, or the room of one, so that it reads other bytes then, and no memory that is
not there. Which views those are is unknown here.
"""

import ctypes
import os
from collections.abc import Callable

from refit._library import call, lib

release = lib.refit_update_unkeep
"""The C function that gives ``room`` back, on any thread."""


def room(update: int, nbytes: int) -> int:
    """Memory of the C library's that keeps the update's bytes mapped until ``release``."""
    out = ctypes.c_void_p()
    call(lib.refit_update_keep, update, nbytes, ctypes.byref(out))
    assert out.value is not None
    return out.value


class Kept:
    """Likewise for Python: until nobody refers to it."""

    def __init__(self, update: int) -> None:
        self._process = os.getpid()
        self._out = ctypes.c_void_p()  # here before C fills it: Ctrl-C may come right behind
        call(lib.refit_update_keep, update, 0, ctypes.byref(self._out))

    def __del__(
        self,
        _release: Callable[[ctypes.c_void_p], None] = release,
        _pid: Callable[[], int] = os.getpid,
    ) -> None:
        if self._process == _pid():  # a forked process has nothing mapped there
            _release(self._out)
