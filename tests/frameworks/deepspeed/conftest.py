"""DeepSpeed's tests are a job of one rank."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def _one_rank(tmp_path_factory: pytest.TempPathFactory) -> None:
    import engines

    engines.join(0, 1, tmp_path_factory.mktemp("job"))


@pytest.fixture(autouse=True)
def _tidy() -> Iterator[None]:
    yield
    gc.collect()
