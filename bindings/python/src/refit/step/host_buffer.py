"""The host image of some states of one device, and the window through which they visit it.

The image is page-locked memory of the C library, and each state is a region of it. CPU tensors lie
over these bytes; the image is there as long as one of them is. The memory in which states lie while
they visit the device is PyTorch's own, taken for a step, and given back once no copy uses it.

fp32 masters whose bf16 weights are known lie in the image as what the weights lack (*coded*; see
refit/advanced/window.h). No tensor lies over them: ``store`` takes them from the device, ``fetch``
brings them there.

Independent of which states these are, and of when they visit.
"""

import ctypes
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from refit._c import abi
from refit._c.config import Config
from refit._c.device import Device
from refit._c.handle import Closing
from refit._c.waiting import interrupts_held
from refit.errors import DeviceMemoryError
from refit.observe.observers import COPIES, Observers
from refit.states.offloader import KEEP, Offloader
from refit.states.torch_memory import (
    current_stream,
    device_guard,
    lacks_memory,
    stream_objects,
    usable_bytes,
    used_on,
)
from refit.step.window import NEW, SAME_WINDOW, Part, Window

UNIT: Final = 1 << 20
"""Bytes of fp32 masters that travel together: parts of masters that travel by their weights begin
and end at multiples of it, or with their region."""

_ALIGNMENT = 512
"""Of the windows' memory, in bytes."""
_FETCHED = 32 << 20
"""Bytes that ``fetch`` brings at once, at most: it waits for each, so more would not be faster."""

_KEPT = 4
"""Tensors over the windows that are kept for later steps, at most, for each part of a step."""


def _attempts(size: int, count: int, least: int) -> Iterator[tuple[int, int]]:
    """Bytes and number of the windows to try, as C does (``offload/window.c``): fewer first, down
    to two, which are enough for copies while the optimizer steps; then smaller ones."""
    kept = min(count, 2)
    for some in range(count, kept - 1, -1):
        yield size, some
    while size > least:
        size = max(least, _aligned(size // 2))
        yield size, kept
    if kept > 1:
        yield least, 1


class HostBuffer(Closing):
    """Regions of one device that live on the host. Used by one thread at a time.

    Takes the host memory when it is made, and blocks for the page-lock. BudgetError, PinError,
    HostMemoryError, UnsupportedError (use_pinned_optimizer_offload: false).

    ``weights``: of each region the address of the bf16 weights of which its fp32 masters are to be
    made again, or 0. DeviceMemoryError: none for such masters on their way.
    """

    def __init__(
        self,
        device: torch.device,
        handle: Device,
        config: Config,
        names: Sequence[str],
        nbytes: Sequence[int],
        observers: Observers,
        weights: Sequence[int],
    ) -> None:
        self.device = device
        self._observers = observers
        self._began: float | None = None
        self._window_bytes = int(config.get("offload.window_bytes"))
        self._windows = int(config.get("offload.windows"))
        self._memory: torch.Tensor | None = None
        self._base = 0
        self._taken = (0, 0)
        self._streams: dict[int, Any] = {}
        """On which the memory of the windows was used last, by its handle."""
        self._tensors: dict[tuple[int, int, tuple[int, ...]], torch.Tensor] = {}
        """What lies in the windows' memory, by address, region and shape: mostly the same in each
        step. Steps over other parts have others; ``begin`` bounds how many are kept."""
        self._new: deque[list[torch.Tensor]] = deque()
        self.begun: tuple[Part, ...] | None = None
        """The parts that are stepped, or come in early; None: nothing was begun."""
        self._is_stepping = False
        self.offloader = Offloader(handle, config)
        zeros, policies = [0] * len(names), [KEEP] * len(names)
        self.offloader.add_each(
            *(names, zeros, nbytes, policies, zeros, zeros),
            placement=abi.REFIT_PLACEMENT_HOST,
            weights=weights,
        )
        self.offloader.seal()
        self.window = Window(self.offloader)
        taken = {at: self.offloader.region(at).host_nbytes for at, one in enumerate(weights) if one}
        self._weights_at = {at: weights[at] for at in taken if taken[at] < nbytes[at]}
        self.nbytes = sum(taken.get(at, one) for at, one in enumerate(nbytes))
        """Bytes of the image."""

    def is_coded(self, region: int) -> bool:
        """Whether a region is masters that are in the image as what their weights lack."""
        return region in self._weights_at

    def memory(self, region: int) -> Any:
        """The bytes of a region in the image, as ctypes has them. As long as they are there, the
        image is. UnsupportedError for one that is coded."""
        address, count = self.window.host(region)
        memory: Any = (ctypes.c_char * count).from_address(address)
        memory.owner = self.offloader
        return memory

    # ---- the windows' memory --------------------------------------------------------------------

    @property
    def window_bytes(self) -> int:
        """The bytes of a window, as the configuration says."""
        return self._window_bytes

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory that the windows have now."""
        size, count = self._taken
        return size * count

    def _needs(self, parts: Sequence[Part]) -> tuple[int, int]:
        """How large windows are in which these parts are stepped, in bytes, and how many."""
        travelling = [part for part in parts if not part.flags & NEW]
        if not travelling:
            return 0, 0
        total = sum(_aligned(part.nbytes) for part in travelling)
        size = _aligned(max(self.window.measure(parts), min(self._window_bytes, total)))
        return size, max(1, min(self._windows, -(-total // size)))

    def _take(self, parts: Sequence[Part]) -> None:
        """Memory for a step over these parts; what there is, is kept where it is enough."""
        self.window.wait()  # as ``begin`` does; parts cannot be measured before
        size, count = self._needs(parts)
        if count == 0 and self.window.measure(parts) > self._taken[0]:
            self._give_back()  # new states need none, and do not fit into these
        if count == 0 or (self._taken[0] >= size and self._taken[1] >= count):
            return
        self._give_back()
        least = _aligned(self.window.measure(parts))
        if any(self._allocate(*one) for one in _attempts(size, count, least)):
            return
        raise DeviceMemoryError(
            f"no memory on {self.device} for one window of {least} bytes, in which the largest "
            "state of this step would visit it; no state has moved. Free some memory, then call "
            "again"
        )

    def _allocate(self, size: int, count: int) -> bool:
        """False: there is not so much memory."""
        try:
            with device_guard(self.device):
                memory = torch.empty(
                    size * count + _ALIGNMENT, dtype=torch.uint8, device=self.device
                )
        except (RuntimeError, MemoryError) as why:
            if not lacks_memory(why):
                raise
            return False
        base = _aligned(memory.data_ptr())
        self._memory, self._base = memory, memory.data_ptr()  # held as long as C may know of it
        self.window.set_memory(base, size, count)
        self._taken = size, count
        self._streams = stream_objects(self.device)
        return True

    def tensor(
        self,
        address: int,
        region: int,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
    ) -> torch.Tensor:
        """What of a region lies at an address of the windows' memory."""
        key = address, region, shape
        known = self._tensors.get(key)
        if known is not None and known.data_ptr() == address:
            return known
        assert self._memory is not None
        offset = (address - self._base) // dtype.itemsize
        made = torch.empty(0, dtype=dtype, device=self.device)
        made.set_(self._memory.untyped_storage(), offset, shape, stride)
        if not made.is_inference():
            self._tensors[key] = made
        return made

    # ---- a step ---------------------------------------------------------------------------------

    def begin(self, parts: Sequence[Part]) -> None:
        """The first parts begin to come in, unless they have already, before the backward pass."""
        if self.begun == tuple(parts):
            return
        self.end()
        self._take(parts)
        if len(self._tensors) > _KEPT * len(parts):
            self._tensors.clear()
        self._follow()
        self._is_stepping = True  # from here on, for Ctrl-C may come right after the call
        self.window.begin(parts, current_stream(self.device))
        self.begun = tuple(parts)
        self._report_copies()  # of the step before, which are over

    def _follow(self) -> None:
        """The memory belongs to the stream on which it was taken, and a step may run on another.
        After a step that was broken off, or ``fetch``, that one may have work left on it which no
        copy out has waited for."""
        for handle, stream in stream_objects(self.device).items():
            if self._memory is not None and handle not in self._streams:
                for before in self._streams.values():
                    stream.wait_stream(before)
                used_on([self._memory.untyped_storage()], [stream])
                self._streams = {handle: stream}

    def next(self) -> tuple[int, list[int]]:
        """Waits for the next window; see ``Window.next``. New states of the window before the last
        are let go of: they are out."""
        if self._windows == 1 and self._new:
            # With one window, the new states take the memory of those before.
            self.window.wait()
            self._new.clear()
        if self._began is None:
            self._began = time.perf_counter()
        self._follow()  # copies may have come in early, after another stream
        found = self.window.next()
        self._new.append([])
        while len(self._new) > 2:
            self._new.popleft()
        return found

    def fits(self, parts: Sequence[Part], besides: int) -> bool:
        """Whether the device has memory for a step over these parts now, and for ``besides`` more
        bytes. True on a CPU."""
        if self.device.type != "cuda" or self.device_bytes:
            return True
        total = sum(_aligned(part.nbytes) for part in parts)
        free = usable_bytes(self.device) - torch.cuda.memory_allocated(self.device)
        return free > besides + min(total, self._window_bytes * self._windows)

    def place(self, part: int, made: torch.Tensor) -> None:
        """The bytes of a ``NEW`` part lie in this tensor; it is held until they are out."""
        self._new[-1].append(made)
        self.window.place(part, made.data_ptr())

    def done(self) -> None:
        """The current stream has queued what uses this window's states."""
        self.window.done(current_stream(self.device))

    def end(self) -> None:
        """No further part is stepped. The last copies out go on, but for those that ``Window.end``
        waits for. A second call does nothing."""
        if self._is_stepping:
            self.begun = None
            self.window.end()
            self._is_stepping = False

    # ---- masters that are coded -----------------------------------------------------------------

    def bind_weights(self, region: int, address: int) -> None:
        """The weights of a coded region are at this address now. If they have moved it waits for
        copies."""
        if self._weights_at[region] != address:
            self.wait()
            self.offloader.bind_weights(region, address)
            self._weights_at[region] = address

    def store(self, masters: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Copies masters, tensors of one dimension on the device, into regions. Waits for it.

        CopyError and others: some of the regions have other bytes than before; call again.
        """
        self.end()
        self.begin([Part(region, NEW, 0, master.nbytes) for region, master in masters])
        while True:
            first, addresses = self.next()
            if not addresses:
                break
            for number in range(first, first + len(addresses)):
                self.place(number, masters[number][1])
            self.done()
        self.wait()

    def fetch(self, masters: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Copies the bytes of regions into tensors of one dimension on the device; the image keeps
        them. Waits for it.

        CorruptError: the weights are not those that the masters left by. DeviceMemoryError,
        CopyError and others: call again.
        """
        self.end()
        most = max(UNIT, min(_FETCHED, self._window_bytes // UNIT * UNIT))
        for parts, targets in _shares(masters, most):
            self.begin(parts)
            _, addresses = self.window.next()
            with interrupts_held(), torch.no_grad():
                for part, address, one in zip(parts, addresses, targets, strict=True):
                    there = self.tensor(address, part.region, one.dtype, one.shape, one.stride())
                    one.copy_(there)
            self.end()
        self._give_back()

    # ---- after it ------------------------------------------------------------------------------

    def wait(self) -> None:
        """Waits until the image has every byte, then gives the windows' memory back to PyTorch.

        States that had come in before the backward pass go, too. CopyError, DeadlineError: again.
        """
        if self.window.closed:
            return
        self.end()
        self.window.wait()
        self._report_copies()
        self._give_back()

    def _report_copies(self) -> None:
        """Reports to the timeline how long the copies of the last step took, once they are over."""
        began, self._began = self._began, None
        if began is None or not self._observers.drawn:
            return
        stats = self.offloader.stats()
        nbytes = stats.step_in_bytes_last + stats.step_out_bytes_last
        ago = time.perf_counter() - began
        self._observers.past(COPIES, ago, stats.step_seconds_last, nbytes)

    def _give_back(self) -> None:
        self._new.clear()
        self._tensors.clear()
        if self._memory is not None:
            self._taken = 0, 0
            self.window.trim()  # waits for copies; ``_follow`` has told PyTorch of other streams
            self._memory = None

    def close(self) -> None:
        """Waits for the copies and closes the window. The image goes with its last tensor."""
        self.wait()
        self.window.close()


def _shares(
    masters: Sequence[tuple[int, torch.Tensor]], most: int
) -> Iterator[tuple[list[Part], list[torch.Tensor]]]:
    """Parts that visit the device together, of at most so many bytes, and where each is to go."""
    parts: list[Part] = []
    targets: list[torch.Tensor] = []
    left = most
    for region, master in masters:
        at = 0
        while at < master.nbytes:
            nbytes = master.nbytes - at
            if nbytes > left:
                nbytes = left // UNIT * UNIT
            if nbytes:
                parts.append(Part(region, SAME_WINDOW if parts else 0, at, nbytes))
                targets.append(master[at // master.itemsize : (at + nbytes) // master.itemsize])
                at += nbytes
                left -= nbytes
            if at < master.nbytes:
                yield parts, targets
                parts, targets, left = [], [], most
    if parts:
        yield parts, targets


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
