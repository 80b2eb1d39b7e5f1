"""What may move, and when: a CUDA graph that is being captured on any device."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from refit.errors import StateError  # noqa: E402
from refit.states import torch_memory  # noqa: E402


def test_capture_is_looked_for_on_requested_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyTorch answers for the device that is current."""
    current, capturing = [0], 1

    @contextmanager
    def on(device: Any) -> Iterator[None]:
        before, current[0] = current[0], device.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[0] == capturing)
    torch_memory.refuse_capture(torch.device("cuda", 0))
    torch_memory.refuse_capture(torch.device("cpu"))
    with pytest.raises(StateError, match="being captured"):
        torch_memory.refuse_capture(torch.device("cuda", 1))
