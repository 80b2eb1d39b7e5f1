"""What the Python tests share.

The environment is the tests' own: no option of refit comes from it (``REFIT_LIBRARY`` names the
library and stays). With ``REFIT_TEST_CUDA=real`` tensors of the tests that take ``torch_device``
lie on the first GPU, if torch sees one; everything else is the same.
"""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = ("REFIT_LIBRARY",)
WANTED = os.environ.pop("REFIT_TEST_CUDA", "")

os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell's background jobs ignore Ctrl-C, and so would all that they start; the tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_option_comes_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("REFIT_") and name not in OURS:
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """For XDG_RUNTIME_DIR: of this test alone, with a path short enough for sockets below it."""
    with tempfile.TemporaryDirectory(prefix="refit-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def torch_device() -> Iterator[str]:
    """Where tensors go: "cpu", or with REFIT_TEST_CUDA=real "cuda:0"."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    if WANTED == "real" and torch.cuda.is_available():
        yield "cuda:0"
    else:
        yield "cpu"


@pytest.fixture
def default_device(torch_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``training`` makes lies on ``torch_device``, where a test names no device."""
    import training

    monkeypatch.setattr(training, "DEVICE", torch_device)
