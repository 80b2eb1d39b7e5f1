"""What the tests of the frameworks share: the version under test, and a clean environment."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

VERSION = os.environ.pop("REFIT_FRAMEWORK_VERSION", "")
ROOT = Path(__file__).resolve().parents[2]

for name in [one for one in os.environ if one.startswith("REFIT_")]:
    del os.environ[name]  # no option of refit comes from outside


@pytest.fixture(scope="session")
def version() -> str:
    """The version of the framework, as environment.sh pins it."""
    return VERSION


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """For XDG_RUNTIME_DIR: of this test alone, with a path short enough for sockets below it."""
    with tempfile.TemporaryDirectory(prefix="refit-") as folder:
        yield Path(folder)
