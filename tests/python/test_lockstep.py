"""Sharded models: two ranks gather together or stop together, and neither hangs (trap 34)."""

from typing import Any

import pytest
import rank_scenes
import ranks

pytestmark = [pytest.mark.slow, ranks.needs_fsdp2]  # three Pythons with PyTorch


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw in each scene. A rank that hangs fails all of them by the timeout."""
    return ranks.run(rank_scenes.play, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("scene", rank_scenes.SCENES)
def test_what_two_ranks_see(seen: list[dict[str, Any]], scene: str) -> None:
    found = [one[scene] for one in seen]
    if found == [None, None]:
        pytest.skip("PEFT is not installed")
    assert found == rank_scenes.SCENES[scene][1]
