"""Where tensors live, as the C library drives it: this machine's memory, or a GPU.

Most programs never open one: controller, publisher and subscriber find theirs by the tensors that
they are given. Independent of what a device is made of.
"""

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from refit._c import abi, log
from refit._c.config import ConfigLike, make_config
from refit._c.handle import Handle
from refit._c.library import call, encoded, lib
from refit.errors import InvalidError, RefitError


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """The description of a device."""

    kind: str
    """ "host" or "cuda"."""
    name: str
    """For people."""
    capacity_bytes: int | None
    """The most bytes that can be allocated; None if nothing bounds it."""
    used_bytes: int
    """Allocated through refit."""
    host_addressable: bool
    """Whether the CPU may read and write its memory."""
    stable_arena: bool
    """Whether it has arenas whose addresses stay."""
    kernels: bool
    """Whether refit's own kernels run on it."""
    numa_node: int | None
    """The host memory closest to it; None: none, or not known."""
    driver_version: tuple[int, int] | None
    """The CUDA version of its driver, (12, 4); None: it has none."""
    uuid: str
    """ "GPU-…" as nvidia-smi shows it, or empty."""
    small_bytes: int
    """Copies below that are gathered by a kernel; 0: none, or not known before the first use."""


class Device(Handle):
    """A device of the C library. Outlives all that is opened on it. Any thread.

    ``spec`` is "host", "host:capacity=2GiB", "cuda:0", "cuda:0:capacity=2GiB", or "auto": the first
    GPU, or the host if there is none; None asks the configuration. Raises InvalidError (a spec that
    cannot be read), NotFoundError (no driver, no such GPU), UnsupportedError, BusyError,
    DeviceError, and memory errors.
    """

    def __init__(self, spec: str | None = "auto", config: ConfigLike = None) -> None:
        options = make_config(config)
        text = None if spec is None else encoded(spec, "a device spec")
        self._open(lib.refit_device_open, text, options._as_c)

    @property
    def pointer(self) -> int:
        """The ``refit_device *``; StateError once closed, or in a forked child."""
        return self._live

    @property
    def info(self) -> DeviceInfo:
        """The description, with the figures of this moment. Does not block."""
        raw = abi.refit_device_info(size=ctypes.sizeof(abi.refit_device_info))
        call(lib.refit_device_describe, self._live, ctypes.byref(raw))
        return _info_of(raw)

    def is_same_gpu(self, other: "Device | None") -> bool:
        """Whether both are one GPU."""
        return other is not None and self.info.uuid != "" and self.info.uuid == other.info.uuid

    def _close(self, pointer: int) -> None:
        """BusyError, and nothing is closed, while something on it is open."""
        call(lib.refit_device_close, pointer)

    def __repr__(self) -> str:
        return "Device(closed)" if self.closed else f"Device({self.info.name!r})"


def _info_of(raw: Any) -> DeviceInfo:
    unbounded = raw.capacity_bytes == 2**64 - 1
    driver = divmod(raw.driver_version, 1000)
    return DeviceInfo(
        kind=raw.kind.decode(),
        name=raw.name.decode("utf-8", "replace"),
        capacity_bytes=None if unbounded else raw.capacity_bytes,
        used_bytes=raw.used_bytes,
        host_addressable=bool(raw.host_addressable),
        stable_arena=bool(raw.stable_arena),
        kernels=bool(raw.kernels),
        numa_node=None if raw.numa_node < 0 else raw.numa_node,
        driver_version=(driver[0], driver[1] // 10) if raw.driver_version else None,
        uuid=raw.uuid.decode(),
        small_bytes=raw.small_bytes,
    )


# ---- Devices by what callers name them with: a torch.device, a number, a spec, or a Device.

_LEGACY_STREAM = 1
"""cudaStreamLegacy, to the C library and to DLPack alike."""


def spec_of(device: Any) -> str:
    """The C library's spec of a torch.device ("cuda:1"), of a CUDA device's number, or of a spec.

    InvalidError for anything else. A torch.device without a number is the current one.
    """
    if isinstance(device, str):
        return device
    if isinstance(device, int) and not isinstance(device, bool) and device >= 0:
        return f"cuda:{device}"
    kind = getattr(device, "type", None)
    if kind == "cpu":
        return "host"
    if kind == "cuda":
        if device.index is not None:
            return f"cuda:{device.index}"
        import torch

        return f"cuda:{torch.cuda.current_device()}"
    raise InvalidError(
        f"{device!r} is not a device of refit: give a torch.device, a spec such as 'cuda:0', or a "
        "refit.Device"
    )


def open_device(device: Any) -> tuple[Device, bool]:
    """The device, and whether it was opened here (then the caller closes it)."""
    if isinstance(device, Device):
        return device, False
    return Device(spec_of(device)), True


def current_cuda(*, is_chosen: bool = False) -> str | None:
    """The spec of PyTorch's current CUDA device; None while this process does not use CUDA.
    ``is_chosen``: and while it may be the first of several only because none was set so far."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    number = torch.cuda.current_device()
    if is_chosen and number == 0 and torch.cuda.device_count() > 1:
        return None
    return f"cuda:{number}"


def use_asked(asked: Any, auto: str | None, use: Callable[[Any], None], what: str) -> Any:
    """Uses the device that was asked for, once it is known: ``auto`` for "auto", where one that
    cannot be used is only noted in the log. Gives what is still to be asked for; None: nothing."""
    chosen = auto if asked == "auto" else asked
    if chosen is None:
        return asked
    try:
        use(chosen)
    except RefitError as why:
        if asked != "auto":
            raise
        log.LOGGER.info("no weights are %s %s: %s", what, chosen, why.text)
    return None


def stream_of(device: int | None) -> int:
    """PyTorch's current stream on a CUDA device (None: the current one), as the library takes it.

    Without PyTorch, the default one.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return _LEGACY_STREAM
    # Builds for GPUs have the number alone, without making an object for it.
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if raw is None or device is None:
        stream = torch.cuda.current_stream(device).cuda_stream
    else:
        stream = raw(device)
    # PyTorch shows the default stream as 0; to the C library that is cudaStreamLegacy.
    return int(stream) or _LEGACY_STREAM
