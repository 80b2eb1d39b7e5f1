"""Sharded models: two ranks gather together or stop together, and neither hangs."""

from typing import Any

import pytest
import rank_scenes
import ranks

pytestmark = [pytest.mark.slow, ranks.needs_fsdp2]  # three Pythons with PyTorch


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw in each scene. A rank that hangs fails all of them by the timeout."""
    return ranks.run(rank_scenes.play, tmp_path_factory.mktemp("ranks"))


def test_only_the_root_yields_what_all_ranks_gather(seen: list[dict[str, Any]]) -> None:
    # trap 34
    names = [one["gathers_on_the_root_alone"][0] for one in seen]
    assert names == [["a", "b", "c", "d"], []]
    assert all(one["gathers_on_the_root_alone"][1:] == ({"d": "a"}, True, True) for one in seen)


def test_every_rank_yields_where_there_is_no_root(seen: list[dict[str, Any]]) -> None:  # trap 34
    assert [one["gathers_on_every_rank"] for one in seen] == [["a", "d", "b", "c"]] * 2


def test_a_consumer_that_stops_early_leaves_no_rank_waiting(seen: list[dict[str, Any]]) -> None:
    # trap 34
    assert [one["root_stops_early"] for one in seen] == ["stopped", "went through"]


def test_a_rank_that_cannot_begin_stops_all_with_its_sentence(seen: list[dict[str, Any]]) -> None:
    # trap 34
    for one in seen:
        said = one["one_rank_cannot_begin"]
        assert said.endswith("because of rank 1: StateError: this rank has lost its weights")


def test_ranks_with_other_weights_stop_before_they_gather(seen: list[dict[str, Any]]) -> None:
    # trap 34
    assert all("holds other weights" in one["ranks_hold_other_weights"] for one in seen)


def test_a_root_that_is_no_rank_is_refused(seen: list[dict[str, Any]]) -> None:
    assert all("rank 2 cannot be the root" in one["root_is_no_rank"] for one in seen)


def test_a_rank_that_failed_before_it_sent_is_heard_at_the_beginning(
    seen: list[dict[str, Any]],
) -> None:  # trap 34
    here, there = (one["one_rank_is_at_its_end_already"] for one in seen)
    assert there == "ended"
    assert "rank 1: KeyError: 'before it sent anything'" in here


def test_fsdp2_weights_are_read_from_their_shards(seen: list[dict[str, Any]]) -> None:  # trap 34
    assert [one["fsdp2_model_gives_what_it_had"] for one in seen] == [(True, True, True)] * 2


def test_fsdp2_adapters_are_merged_as_one_process_would(seen: list[dict[str, Any]]) -> None:
    found = [one["fsdp2_adapters_are_merged_as_one_process_would"] for one in seen]
    if found == [None, None]:
        pytest.skip("PEFT is not installed")
    assert found == [[True, True, True]] * 2


def test_all_ranks_learn_the_version_that_the_root_committed(seen: list[dict[str, Any]]) -> None:
    # trap 34
    assert [one["all_ranks_learn_the_version"] for one in seen] == [("committed", "", 6)] * 2


def test_a_root_that_cannot_begin_stops_all(seen: list[dict[str, Any]]) -> None:  # traps 34, 35
    here, there = (one["root_cannot_begin"] for one in seen)
    assert here[0] == "StaleError"
    assert there[0] == "LockstepError"
    assert "rank 0: StaleError" in there[1]


@pytest.mark.parametrize(
    ("scene", "failed"), [("root_fails_in_the_block", 0), ("another_rank_fails_in_the_block", 1)]
)
def test_a_rank_that_fails_in_the_block_stops_all_and_nothing_is_committed(
    seen: list[dict[str, Any]], scene: str, failed: int
) -> None:  # trap 34
    outcomes = [one[scene] for one in seen]
    assert outcomes[failed][0] == "KeyError"
    assert outcomes[1 - failed][0] == "LockstepError"
    assert f"rank {failed}: KeyError: 'in the block'" in outcomes[1 - failed][1]
    assert [one[2] for one in outcomes] == [None, None]
