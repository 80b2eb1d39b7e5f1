"""What the Python tests share.

The environment is the tests' own: no option of refit comes from it (``REFIT_LIBRARY`` names the
library and stays). With ``REFIT_TEST_CUDA=real`` only the tests that take ``torch_device`` are run,
and their tensors lie on the first GPU, if torch sees one. All others need no GPU.
"""

import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = ("REFIT_LIBRARY",)
WANTED = os.environ.pop("REFIT_TEST_CUDA", "")

os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell's background jobs ignore Ctrl-C, and so would all that they start; the tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Passes REFIT_TEST_CUDA to a worker of pytest-xdist, whose environment lacks it by now."""
    node.workerinput["wanted"] = WANTED


def wanted(config: pytest.Config) -> str:
    """What REFIT_TEST_CUDA said."""
    found: str = getattr(config, "workerinput", {}).get("wanted", WANTED)
    return found


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if wanted(config) == "real":
        others = [one for one in items if "torch_device" not in getattr(one, "fixturenames", ())]
        config.hook.pytest_deselected(items=others)
        items[:] = [one for one in items if "torch_device" in getattr(one, "fixturenames", ())]


def pytest_collection_finish() -> None:
    """What libraries have made by now stays: a collection that looks at all of it takes 0.2 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("REFIT_") and name not in OURS:
            monkeypatch.delenv(name)


@pytest.fixture
def no_garbage() -> None:
    """What the collector closes during the test is the test's own."""
    gc.collect()


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@contextmanager
def new_runtime_dir() -> Iterator[Path]:
    """Becomes XDG_RUNTIME_DIR, with a path short enough for sockets below it."""
    with (
        tempfile.TemporaryDirectory(prefix="refit-") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


@pytest.fixture(autouse=True, scope="session")
def own_runtime_dir() -> Iterator[None]:
    """Sockets of the tests, and of what they start, are kept apart from those of the user."""
    with new_runtime_dir():
        yield


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """XDG_RUNTIME_DIR is of this test alone."""
    with new_runtime_dir() as folder:
        yield folder


@pytest.fixture
def run(torch_device: str) -> Any:
    """A training run after two steps, for the test to disturb."""
    from training import Run

    made = Run(device=torch_device)
    made.step(2)
    return made


@pytest.fixture
def reference_run(run: Any) -> Iterator[Any]:
    """The same run without refit. When the test ends, both have the same bits."""
    from training import Run, assert_same

    made = Run(device=run.device)
    made.step(2)
    yield made
    assert_same(run, made)


@pytest.fixture
def controller(run: Any) -> Iterator[Any]:
    """A controller of ``run``, which is closed when the test ends."""
    import refit

    with refit.Controller(run.optimizer, run.model) as made:
        yield made


@pytest.fixture(scope="session")
def torch_device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where tensors go: "cpu", or with REFIT_TEST_CUDA=real "cuda:0"."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    if wanted(request.config) == "real" and torch.cuda.is_available():
        yield "cuda:0"
    else:
        yield "cpu"


@pytest.fixture
def options() -> dict[str, Any]:
    """The options of a trainer and its workers (broadcasting.py). A test gives others by
    ``@pytest.mark.parametrize("options", [...])``."""
    return {}


@pytest.fixture
def publisher(options: dict[str, Any]) -> Iterator[Any]:
    from broadcasting import LOCAL, UNHURRIED, Publisher

    with Publisher(LOCAL, **{**UNHURRIED, **options}) as opened:
        yield opened


@pytest.fixture
def pair(options: dict[str, Any]) -> Iterator[Any]:
    """A ``Pair``: a publisher, and a worker that takes its versions on a thread."""
    import broadcasting

    with broadcasting.pair(**options) as opened:
        yield opened


@pytest.fixture
def trainer(options: dict[str, Any]) -> Iterator[Any]:
    """A ``Trainer``, which publishes on a thread what the test takes from its subscriber."""
    from broadcasting import Trainer, both

    with both(**options) as (publisher, subscriber):
        made = Trainer(publisher, subscriber)
        yield made
        subscriber.close()  # an update that was left open ends
        made.join()


@pytest.fixture(scope="module")
def default_device(torch_device: str) -> Iterator[None]:
    """What ``training`` makes lies on ``torch_device``, where a test names no device."""
    import training

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "DEVICE", torch_device)
        yield


@pytest.fixture(params=["cycle", "windows", "share", "both"])
def schedule(request: pytest.FixtureRequest) -> Any:
    """Each schedule of a controller, in turn: for what every one of them keeps."""
    import schedules

    return getattr(schedules, request.param.upper())
