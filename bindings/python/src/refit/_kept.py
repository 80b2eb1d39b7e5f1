"""What keeps the memory of an update mapped for views that outlive it.

A view may be forgotten in a variable, and then read after the update is closed or its subscriber.
It holds a ``Kept``, or the room of one, so that it reads other bytes then, and no memory that is
not there. Which views those are is unknown here.
"""

import ctypes
from collections.abc import Callable

from refit._library import call, lib

release = lib.refit_update_unkeep
"""The C function that gives the room of a ``Kept`` back, on any thread."""


class Kept:
    """Keeps the update's bytes mapped until nobody refers to it. With ``mine`` set to False until
    ``release`` of its ``address``, where ``nbytes`` are for who calls that."""

    mine = True
    _out: ctypes.c_void_p | None = None

    def __init__(self, update: int, nbytes: int = 0) -> None:
        self._out = ctypes.c_void_p()  # here before C fills it: Ctrl-C may come right behind
        call(lib.refit_update_keep, update, nbytes, ctypes.byref(self._out))

    @property
    def address(self) -> int:
        """Where its room is."""
        assert self._out is not None
        assert self._out.value is not None
        return self._out.value

    def __del__(self, _release: Callable[[ctypes.c_void_p | None], None] = release) -> None:
        if self.mine:
            _release(self._out)
