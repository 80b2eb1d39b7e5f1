"""The C window as a Python object: states that live on the host visit the device in windows.

refit/advanced/window.h says what parts are and in which order the verbs come; ``HostBuffer`` calls
them in that order. Independent of whose memory the windows are.
"""

import ctypes
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from refit._c import abi
from refit._c.handle import Handle
from refit._c.library import call, lib
from refit._c.waiting import wait_in_slices
from refit.states.offloader import Offloader

SAME_WINDOW: Final = abi.REFIT_PART_SAME_WINDOW
NEW: Final = abi.REFIT_PART_NEW
_PART = struct.Struct("@NIIQQ")  # refit_window_part
assert _PART.size == ctypes.sizeof(abi.refit_window_part)


class Part(NamedTuple):
    """Bytes of a region that a step uses."""

    region: int
    flags: int
    """``SAME_WINDOW``: in the same window as the part before it; ``NEW``: the step makes its bytes.
    """
    offset: int
    nbytes: int


class Window(Handle):
    """The C window as a Python object: the window of an offloader whose regions live on the host.
    Used by one thread at a time.

    One method for each verb of refit/advanced/window.h, which says what parts are and in which
    order the verbs come; addresses are plain numbers. ``offloader`` is sealed, and is borrowed: it
    stays open as long. StateError, BusyError (it has a window), UnsupportedError
    (use_pinned_optimizer_offload: false).
    """

    def __init__(self, offloader: Offloader) -> None:
        self._offloader = offloader
        self._packed: tuple[list[Part], ctypes.Array[abi.refit_window_part]] = [], _array([])
        self._open(lib.refit_window_open, offloader._live)

    def _close(self, pointer: int) -> None:
        call(lib.refit_window_close, pointer)

    def set_memory(self, memory: int, window_bytes: int, windows: int) -> None:
        """Gives it device memory for ``windows`` times ``window_bytes``, borrowed until the next
        call or the close; 0 takes it back. StateError and BusyError while copies use it."""
        call(lib.refit_window_set_memory, self._live, memory or None, window_bytes, windows)

    def measure(self, parts: Sequence[Part]) -> int:
        """The smallest window in which these parts can be stepped, in bytes."""
        out = ctypes.c_uint64()
        array = self._array(parts)
        call(lib.refit_window_measure, self._live, array, len(parts), ctypes.byref(out))
        return out.value

    def begin(self, parts: Sequence[Part], after: int) -> None:
        """Starts a step over these parts: the first copies in begin, after what the stream
        ``after`` has queued. Waits for the copies out of the step before. LimitError: parts that
        belong together are larger than the memory that was given; BusyError, StateError,
        CopyError."""
        stream = abi.refit_stream_ref(after)
        call(lib.refit_window_begin, self._live, self._array(parts), len(parts), stream)

    def _array(self, parts: Sequence[Part]) -> ctypes.Array[abi.refit_window_part]:
        """The parts as C has them. Those of a step are mostly those of the step before."""
        if self._packed[0] != parts:
            self._packed = list(parts), _array(parts)
        return self._packed[1]

    def next(self) -> tuple[int, list[int]]:
        """Waits until the parts of the next window are there. Gives the number of the first, and
        the address of each, 0 for one that is ``NEW``; no address once all were stepped.
        CopyError and others: call again."""
        view = abi.refit_window_view(ctypes.sizeof(abi.refit_window_view))
        call(lib.refit_window_next, self._live, ctypes.byref(view))
        return view.first, [view.memory[at] or 0 for at in range(view.count)]

    def place(self, part: int, memory: int) -> None:
        """Says where the bytes of a ``NEW`` part are. They stay there until ``done`` of the next
        window, or ``wait``."""
        call(lib.refit_window_place, self._live, part, memory)

    def done(self, stream: int) -> None:
        """What ``stream`` has queued is the last that uses this window: copies out follow it,
        after it has waited for those of the window before. The window counts as stepped whatever is
        raised; call again then."""
        call(lib.refit_window_done, self._live, abi.refit_stream_ref(stream))

    def end(self) -> None:
        """Ends the step, also before all parts were stepped. Waits for copies out only if they read
        weights of masters, and no stream waits for them."""
        call(lib.refit_window_end, self._live)

    def wait(self, timeout: float | None = None) -> None:
        """Waits until no copy is under way, at most ``timeout`` seconds (None: offload.timeout_ms).

        Starts copies out that could not be started. DeadlineError, CopyError: call again.
        """
        pointer = self._live
        wait_in_slices(
            lambda slice_ms: call(lib.refit_window_wait, pointer, slice_ms),
            self._offloader._timeout_s if timeout is None else timeout,
        )

    @property
    def progress(self) -> int:
        """How many parts of the last list were stepped, from the first on."""
        count: int = lib.refit_window_progress(self._live)
        return count

    def host(self, region: int) -> tuple[int, int]:
        """Address and length of a region's host bytes, to read and write while no step is under
        way. The address stays until the offloader is closed. UnsupportedError for masters that
        travel by their weights."""
        address, count = ctypes.c_void_p(), ctypes.c_uint64()
        call(lib.refit_window_host, self._live, region, ctypes.byref(address), ctypes.byref(count))
        return address.value or 0, count.value

    def trim(self) -> None:
        """Lets go of memory that was given, and frees host memory that masters once went whole into
        and have left again. Waits for copies. StateError while a step is under way."""
        call(lib.refit_window_trim, self._live)


def _array(parts: Sequence[Part]) -> ctypes.Array[abi.refit_window_part]:
    packed = bytearray(b"".join(_PART.pack(_PART.size, *part) for part in parts))
    return (abi.refit_window_part * len(parts)).from_buffer(packed)
