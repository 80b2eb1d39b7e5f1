"""Devices by what callers name them with: a torch.device, a number, a spec, or a Device."""

import sys
from typing import Any, Final

from refit.device import Device
from refit.errors import InvalidError

_LEGACY_STREAM: Final = 1
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
        f"{device!r} is no device of refit: give a torch.device, a spec such as 'cuda:0', or a "
        "refit.Device"
    )


def open_device(device: Any) -> tuple[Device, bool]:
    """The device, and whether it was opened here (then the caller closes it)."""
    if isinstance(device, Device):
        return device, False
    return Device(spec_of(device)), True


def stream_of(device: int) -> int:
    """PyTorch's current stream on a CUDA device, as the C library takes it.

    Without PyTorch, the default one.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return _LEGACY_STREAM
    # PyTorch shows the default stream as 0; to the C library that is cudaStreamLegacy.
    return int(torch.cuda.current_stream(device).cuda_stream) or _LEGACY_STREAM
