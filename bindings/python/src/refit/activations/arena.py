"""The C arena of activations as a Python object: groups of tensors leave the device and return.

One method for each verb of refit/advanced/activations.h, which says in which order they come and
what each failure leaves; addresses are plain numbers. Independent of whose memory a tensor is, and
of when it is wanted again.
"""

import ctypes
from collections.abc import Sequence
from contextlib import suppress

from refit._c import abi
from refit._c.config import Config
from refit._c.device import Device
from refit._c.handle import Handle
from refit._c.library import call, lib, status_of
from refit._c.waiting import run_interruptibly
from refit.errors import BusyError


class Arena(Handle):
    """Page-locked host memory for tensors of ``device``, which is borrowed. Any thread.

    Takes ``activations.host_bytes``; blocks for it, unless offload.background is set. ConfigError
    (host_bytes is 0), UnsupportedError (use_pinned_optimizer_offload: false), BudgetError,
    PinError, HostMemoryError.
    """

    def __init__(self, device: Device, config: Config) -> None:
        self._device = device  # it closes after its arena
        pointer = device.pointer
        run_interruptibly(lambda: self._open(lib.refit_activations_open, pointer, config._as_c))

    def _close(self, pointer: int) -> None:
        """DeadlineError, and nothing is closed, while a copy hangs. The device is closed unless
        others use it."""
        call(lib.refit_activations_close, pointer)
        with suppress(BusyError):
            self._device.close()

    def begin(self) -> int:
        """Begins a group, and gives its number. Waits for the arena if it is still being taken."""
        group = ctypes.c_uint64()
        call(lib.refit_activations_begin, self._live, ctypes.byref(group))
        return group.value

    def add(self, group: int, memories: Sequence[int], nbytes: Sequence[int]) -> list[int | None]:
        """Adds tensors to a group that was begun. Gives their places in the group; None: there is
        no room for that one."""
        count = len(memories)
        places = (ctypes.c_uint32 * count)()
        call(
            lib.refit_activations_add,
            self._live,
            group,
            (ctypes.c_void_p * count)(*memories),
            (ctypes.c_uint64 * count)(*nbytes),
            count,
            places,
        )
        return [None if it == abi.REFIT_ACTIVATION_STAYS else it for it in places]

    def commit(self, group: int, stream: int) -> None:
        """Starts the copies out, after what ``stream`` has queued. CopyError and others: none is
        under way."""
        call(lib.refit_activations_commit, self._live, group, abi.refit_stream_ref(stream))

    def join(self, group: int, stream: int) -> None:
        """Lets ``stream`` wait for the group's copies; 0: waits here. DeadlineError."""
        call(lib.refit_activations_join, self._live, group, abi.refit_stream_ref(stream))

    def wait(self, group: int, timeout_ms: int) -> None:
        """Waits until the group's copies are over; 0 only looks. DeadlineError."""
        call(lib.refit_activations_wait, self._live, group, timeout_ms)

    def is_still(self, group: int) -> bool:
        """Whether no copy of the group is under way. Does not wait."""
        return status_of(lib.refit_activations_wait, self._live, group, 0) == abi.REFIT_OK

    def fetch(self, group: int, memories: Sequence[int], stream: int) -> None:
        """Starts the copies in, to the addresses by place; 0: not this one. CopyError and others:
        no copy in is under way."""
        array = (ctypes.c_void_p * len(memories))(*(one or None for one in memories))
        call(
            lib.refit_activations_fetch,
            self._live,
            group,
            array,
            len(memories),
            abi.refit_stream_ref(stream),
        )

    def release(self, group: int, stream: int) -> None:
        """Gives the group back; ``stream`` waits for copies that are still under way."""
        call(lib.refit_activations_release, self._live, group, abi.refit_stream_ref(stream))
