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


@pytest.mark.parametrize("kind", ["fsdp2", "dtensor"])
def test_sharded_states_leave_and_return_under_the_same_tensors(  # traps 2, 5
    seen: list[dict[str, Any]], kind: str
) -> None:
    assert [one[kind] for one in seen] == [True, True]


def test_sharded_states_that_are_away_may_be_used(seen: list[dict[str, Any]]) -> None:  # trap 5
    assert [one["used_by_hand"] for one in seen] == [True, True]


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp1_flat"])
def test_states_of_flat_parameters_leave_and_return_and_their_gradients_stay(  # traps 2, 5, 11
    seen: list[dict[str, Any]], kind: str
) -> None:
    assert [one[kind] for one in seen] == [[True, True, True]] * 2


def test_flat_parameters_are_not_published_as_they_are(seen: list[dict[str, Any]]) -> None:
    # trap 34
    for one in seen:
        assert "within FSDP.summon_full_params(model)" in one["fsdp1_weights"]


def test_a_distributed_state_dict_brings_states_back_first(seen: list[dict[str, Any]]) -> None:
    # traps 13, 15, 16
    assert [one["optimizer_state_is_asked_for_while_away"] for one in seen] == [True, True]


def test_a_distributed_checkpoint_saved_while_states_were_away_is_whole(
    seen: list[dict[str, Any]],
) -> None:  # trap 13
    assert [one["saved_at_once"] for one in seen] == [True, True]


def test_an_asynchronous_checkpoint_is_not_torn_by_the_next_clear(
    seen: list[dict[str, Any]],
) -> None:  # trap 14
    assert [one["saved_behind"] for one in seen] == [True, True]
