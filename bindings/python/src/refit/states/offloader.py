"""The C offloader as a Python object: regions leave the device and come back.

One method for each verb of refit/offload.h, which says what the states and regions are; addresses
are plain numbers. Waits are cut in slices, so that Ctrl-C is seen, and calls that block without a
deadline run on a thread of their own while the caller waits.

Independent of whose memory a region is, and of what its bytes mean.
"""

import ctypes
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Final

from refit._c import abi
from refit._c.config import Config
from refit._c.device import Device
from refit._c.handle import Handle
from refit._c.library import call, encoded, lib, using
from refit._c.stats import gather
from refit._c.waiting import run_interruptibly, wait_in_slices
from refit.errors import InvalidError

KEEP: Final = abi.REFIT_KEEP
ZERO: Final = abi.REFIT_ZERO

_REGION = struct.Struct("@NPPQiIi4xi4xPI4x")  # refit_region_desc
assert _REGION.size == ctypes.sizeof(abi.refit_region_desc)

NO_STREAM: Final = 0
"""The calling thread itself: what it did is done, and to wait is to block."""


@dataclass(frozen=True, slots=True)
class RegionInfo:
    """One region as the C library knows it; ``memory`` is None while it has none."""

    name: str
    memory: int | None
    nbytes: int
    host_nbytes: int
    """What it takes in the host image, once sealed; less than ``nbytes`` for masters that travel by
    their weights."""
    policy: int
    group: int
    priority: int
    on_host: bool
    in_arena: bool


class Future:
    """An operation under way. Closed by ``close``, or with its offloader."""

    def __init__(self, pointer: int, offloader: "Offloader") -> None:
        self._pointer: int | None = pointer
        self._offloader = offloader

    @property
    def done(self) -> bool:
        """Whether all is done, however it ended; True once closed. Does not block."""
        return self._gone or bool(lib.refit_future_done(self._pointer))

    @property
    def _gone(self) -> bool:
        return self._pointer is None or self._offloader.closed

    def wait(self, timeout: float | None = None) -> None:
        """Waits until it is done, at most ``timeout`` seconds (None: offload.timeout_ms).

        DeadlineError, or how the operation failed.
        """
        if not self._gone:
            self._offloader._wait(lib.refit_future_wait, timeout, self._pointer)

    def wait_group(self, group: int, timeout: float | None = None) -> None:
        """The same for the regions of one group."""
        if not self._gone:
            self._offloader._wait(lib.refit_future_wait_group, timeout, self._pointer, group)

    def join(self, stream: int) -> None:
        """Makes a stream of the device wait for it; the CPU goes on."""
        if not self._gone:
            call(lib.refit_future_join, self._pointer, abi.refit_stream_ref(stream))

    def join_group(self, group: int, stream: int) -> None:
        """The same for the regions of one group."""
        if not self._gone:
            call(lib.refit_future_join_group, self._pointer, group, abi.refit_stream_ref(stream))

    def close(self) -> None:
        """Ends the use of it; the operation goes on. A second call does nothing."""
        if not self._gone:
            lib.refit_future_close(self._pointer)
        self._pointer = None


class ReadLock:
    """A reader's hold on the host image: until ``close``, or the end of the last reference, no
    offload overwrites it."""

    _process = 0

    def __init__(self, pointer: int) -> None:
        self._pointer: int | None = pointer
        self._process = os.getpid()

    def read(self, region: int) -> tuple[int, int]:
        """Address and length of a region's host bytes; read-only, valid until ``close``.

        NotFoundError for a region that has none (it is discarded or zeroed).
        """
        address, count = ctypes.c_void_p(), ctypes.c_uint64()
        call(
            lib.refit_read_lock_read,
            self._pointer,
            region,
            ctypes.byref(address),
            ctypes.byref(count),
        )
        return address.value or 0, count.value

    def close(self) -> None:
        """Ends it. A second call does nothing."""
        pointer, self._pointer = self._pointer, None
        lib.refit_read_lock_release(pointer)

    def __del__(
        self,
        _release: Callable[[int | None], None] = lib.refit_read_lock_release,
        _pid: Callable[[], int] = os.getpid,
    ) -> None:
        if self._process == _pid():
            _release(self._pointer)


class Offloader(Handle):
    """Regions of one device and their host image. Used by one thread at a time.

    Opens two streams on ``device``, which is borrowed and must outlive it; takes no host memory
    before ``seal``. Closing it loses what is still away. ConfigError, HostMemoryError, DeviceError.
    """

    def __init__(self, device: Device, config: Config) -> None:
        self._device = device  # borrowed by the C object: stays open as long
        self._timeout_s = float(config.get("offload.timeout_ms")) / 1000
        self._pinned = bool(config.get("use_pinned_optimizer_offload"))
        self._background = bool(config.get("offload.background"))
        self._open(lib.refit_offloader_open, device.pointer, config._as_c)

    def _close(self, pointer: int) -> None:
        call(lib.refit_offloader_close, pointer)

    def _wait(self, function: object, timeout: float | None, *arguments: object) -> None:
        """A C call whose last argument is a deadline, in slices; DeadlineError once it passed."""
        with using(self._live):  # the call may be a future's, which is part of it
            wait_in_slices(
                lambda slice_ms: call(function, *arguments, slice_ms),
                self._timeout_s if timeout is None else timeout,
            )

    def add(
        self,
        name: str,
        memory: int,
        nbytes: int,
        policy: int = KEEP,
        group: int = 0,
        priority: int = 0,
    ) -> int:
        """Adds a region and gives its number. StateError once sealed, ExistsError."""
        region = abi.refit_region_desc(
            ctypes.sizeof(abi.refit_region_desc),
            encoded(name, "the name of a region"),
            memory,
            nbytes,
            policy,
            group,
            priority,
        )
        out = ctypes.c_uint32()
        call(lib.refit_offloader_add, self._live, ctypes.byref(region), ctypes.byref(out))
        return out.value

    def add_each(
        self,
        names: Iterable[str],
        memory: Iterable[int],
        nbytes: Iterable[int],
        policies: Iterable[int],
        groups: Iterable[int],
        priorities: Iterable[int],
        placement: int = abi.REFIT_PLACEMENT_DEVICE,
        weights: Iterable[int] | None = None,
        reuse: bool = False,
    ) -> None:
        """``add`` for many, in order; those before one that fails are added.

        ``placement``: ``REFIT_PLACEMENT_HOST`` for regions that live in the image and have no
        ``memory``.
        ``weights``: of each region the address of the bf16 weights whose fp32 masters it holds, or
        0 (see "Masters" in refit/offload.h).
        ``reuse``: they leave without a copy where they have not changed ("Unchanged" there).
        """
        texts = [encoded(name, "the name of a region") for name in names]
        held = (ctypes.c_char_p * len(texts))(*texts)
        pointers = (ctypes.c_size_t * len(texts)).from_buffer(held)
        sizes, placements = repeat(_REGION.size), repeat(placement)
        of_masters = repeat(0) if weights is None else weights
        columns = (
            sizes,
            pointers,
            memory,
            nbytes,
            policies,
            groups,
            priorities,
            placements,
            of_masters,
            repeat(int(reuse)),
        )
        packed = bytearray(b"".join(map(_REGION.pack, *columns)))
        regions = (abi.refit_region_desc * len(texts)).from_buffer(packed)
        call(lib.refit_offloader_add_each, self._live, regions, len(texts))

    def seal(self) -> None:
        """Plans, and takes the host memory; blocks for that, with offload.background not at all.

        BudgetError, PinError, HostMemoryError and others leave it open as before.
        """
        pointer = self._live
        run_interruptibly(lambda: call(lib.refit_offloader_seal, pointer))

    def prepare(self, timeout: float | None = None) -> None:
        """Waits until the host memory is there. DeadlineError: call again."""
        self._wait(lib.refit_offloader_prepare, timeout, self._live)

    def unseal(self) -> None:
        """Regions may be added again; the host memory stays. StateError unless resident."""
        call(lib.refit_offloader_unseal, self._live)

    def clear(self) -> None:
        """Removes all regions. StateError unless open (not sealed)."""
        call(lib.refit_offloader_clear, self._live)

    def offload(self, after: int = NO_STREAM, anew: bool = False) -> None:
        """Starts the offload after what the stream ``after`` has queued; ``wait`` ends it.

        ``anew``: ``wait`` raised LimitError, so that it plans again and may take host memory.

        StateError, BusyError (a read lock holds the image), CopyError and others; then all stays
        where it is. Does not wait for copies, but with use_pinned_optimizer_offload: false.
        """
        if self._background and self.state == abi.REFIT_RESIDENT:
            self.prepare()  # in slices: the call itself would wait for the host memory in one
        stream = abi.refit_stream_ref(after)
        self._copy(lib.refit_offloader_offload, self._live, stream, None, blocks=anew)

    def wait(self, timeout: float | None = None) -> None:
        """Waits for the operation under way. DeadlineError: call again."""
        self._wait(lib.refit_offloader_wait, timeout, self._live)

    def unbind(self, region: int) -> None:
        """Says that the memory of an offloaded region is the caller's again."""
        call(lib.refit_offloader_unbind, self._live, region)

    def bind(self, region: int, memory: int) -> None:
        """Gives the region new memory, borrowed. ExistsError, StateError."""
        call(lib.refit_offloader_bind, self._live, region, memory)

    def bind_weights(self, region: int, weights: int) -> None:
        """Says where the weights of a region of masters are now. StateError while copies run, or a
        step in windows."""
        address = ctypes.cast(weights, ctypes.POINTER(ctypes.c_uint16))
        call(lib.refit_offloader_bind_weights, self._live, region, address)

    def unbind_each(self, regions: Sequence[int]) -> None:
        """``unbind`` for many."""
        numbers = (ctypes.c_uint32 * len(regions))(*regions)
        call(lib.refit_offloader_unbind_each, self._live, numbers, len(regions))

    def bind_each(self, regions: Sequence[int], memory: Sequence[int]) -> None:
        """``bind`` for many, an address each; those before one that fails are bound.

        InvalidError unless there are as many.
        """
        if len(memory) != len(regions):
            raise InvalidError(f"{len(regions)} regions cannot have {len(memory)} addresses")
        numbers = (ctypes.c_uint32 * len(regions))(*regions)
        addresses = (ctypes.c_void_p * len(memory))(*memory)
        call(lib.refit_offloader_bind_each, self._live, numbers, addresses, len(regions))

    def restore(self, after: int = NO_STREAM) -> Future:
        """Starts the restore after what ``after`` has queued, and returns its future.

        StateError for a region without memory, or while states are leaving.
        """
        out = ctypes.c_void_p()
        stream = abi.refit_stream_ref(after)
        try:
            self._copy(lib.refit_offloader_restore, self._live, stream, ctypes.byref(out))
        except BaseException:
            lib.refit_future_close(out)  # a Ctrl-C that came meanwhile is raised after the call
            raise
        assert out.value is not None
        return Future(out.value, self)

    def _copy(self, function: object, *arguments: object, blocks: bool = False) -> None:
        """Starts copies; the pageable path makes them, all, before it returns."""
        if self._pinned and not blocks:
            call(function, *arguments)
        else:
            run_interruptibly(lambda: call(function, *arguments))

    @property
    def state(self) -> int:
        """``REFIT_OPEN``, ``REFIT_RESIDENT`` and so on, as it is now. Does not block."""
        found: int = lib.refit_offloader_get_state(self._live)
        return found

    def __len__(self) -> int:
        count: int = lib.refit_offloader_count(self._live)
        return count

    def region(self, number: int) -> RegionInfo:
        """Describes one region. NotFoundError."""
        info = abi.refit_region_info(ctypes.sizeof(abi.refit_region_info))
        call(lib.refit_offloader_region, self._live, number, ctypes.byref(info))
        return RegionInfo(
            name=info.name.decode(),
            memory=info.memory,
            nbytes=info.bytes,
            host_nbytes=info.host_bytes,
            policy=info.policy,
            group=info.group,
            priority=info.priority,
            on_host=info.place == abi.REFIT_ON_HOST,
            in_arena=bool(info.in_arena),
        )

    def stats(self) -> abi.refit_stats:
        """Its figures, as the C struct."""
        return gather((lib.refit_offloader_stats, self._live))

    def trim(self) -> None:
        """Gives the host memory back; the next offload takes it again. StateError while anything
        is away, BusyError under a read lock. Blocks at most offload.timeout_ms."""
        pointer = self._live
        run_interruptibly(lambda: call(lib.refit_offloader_trim, pointer))

    def read_lock(self) -> ReadLock:
        """Holds the host image for a reader. StateError unless states are away."""
        out = ctypes.c_void_p()
        try:
            call(lib.refit_read_lock_acquire, self._live, ctypes.byref(out))
            assert out.value is not None
            return ReadLock(out.value)
        except BaseException:
            lib.refit_read_lock_release(
                out
            )  # Ctrl-C may come right after, and leave it without an owner
            raise
