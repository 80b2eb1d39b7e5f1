"""ranges: phases in a profiler, where there is one."""

import sys
import types
from contextlib import contextmanager

import pytest
from refit.observers import nvtx_range


class Recorder:
    """Stands in for torch with a GPU."""

    def __init__(self, available: bool) -> None:
        self.seen: list[str] = []
        nvtx = types.SimpleNamespace(range=self._range)
        self.cuda = types.SimpleNamespace(is_available=lambda: available, nvtx=nvtx)

    @contextmanager
    def _range(self, label: str):
        self.seen.append(f"+{label}")
        yield
        self.seen.append(f"-{label}")


def test_a_gpu_gets_a_range(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = Recorder(available=True)
    monkeypatch.setitem(sys.modules, "torch", torch)
    with nvtx_range("refit/offload"):
        assert torch.seen == ["+refit/offload"]
    assert torch.seen == ["+refit/offload", "-refit/offload"]


def test_without_a_gpu_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = Recorder(available=False)
    monkeypatch.setitem(sys.modules, "torch", torch)
    with nvtx_range("refit/offload"):
        pass
    assert torch.seen == []


def test_without_torch_there_is_none_and_torch_is_not_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with nvtx_range("refit/offload"):
        assert "torch" not in sys.modules


def test_the_torch_that_is_here_takes_a_range() -> None:
    import torch

    with nvtx_range("refit/offload"):
        assert torch.ones(1).item() == 1.0
