"""What the tests of the frameworks share: the version under test, and a clean environment."""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

VERSION = os.environ.pop("FRAMEWORK_VERSION", "")
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

# pytest puts this folder on the path, where trl/ and others would be packages with the names of
# frameworks that an environment does not have. Of tests/python, ranks.py and broadcasting.py are
# needed.
ours = [one for one in sys.path if one != str(HERE)]
sys.path[:] = [str(HERE / "shared"), *ours, str(ROOT / "tests/python")]

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


@pytest.fixture(autouse=True, scope="session")
def _own_runtime_dir() -> Iterator[None]:
    """Sockets of refit are kept apart from the user's; the path is short enough for them."""
    with tempfile.TemporaryDirectory(prefix="refit-") as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder
        yield
