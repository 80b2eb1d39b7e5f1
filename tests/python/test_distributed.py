"""Sharded optimizers: FSDP1, FSDP2, DTensor and distributed checkpoints, on two ranks."""

from typing import Any

import pytest
import ranks
import shard_scenes

pytestmark = [pytest.mark.slow, ranks.needs_fsdp2]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw in each scene. A rank that hangs fails all of them by the timeout."""
    return ranks.run(shard_scenes.play, tmp_path_factory.mktemp("shards"))


@pytest.mark.parametrize("scene", shard_scenes.SCENES)
def test_two_ranks_train_as_without_refit(seen: list[dict[str, Any]], scene: str) -> None:
    assert [one[scene] for one in seen] == [True, True]
