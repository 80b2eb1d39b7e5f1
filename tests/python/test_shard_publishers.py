"""Every rank publishes what it has: workers get whole tensors in one version, or none of it."""

from pathlib import Path

import pytest
import ranks
import shard_publishers
import torch
from broadcasting import same
from division_scenes import RANKS, Two
from shard_publishers import HURRIED, LARGE, LOST_S, Play, versions_of

pytestmark = [pytest.mark.slow, ranks.needs_fsdp2, pytest.mark.timeout(300)]


def expected(times: int = 1) -> dict[str, torch.Tensor]:
    """What a worker gets of the scenes' model, once it was doubled so often."""
    model = Two()
    for _ in range(times - 1):
        shard_publishers.double(model)
    return dict(model.state_dict())


def test_workers_get_what_one_process_would_give(tmp_path: Path) -> None:
    with Play(tmp_path, shard_publishers.trains) as run:
        workers = [run.worker(worker=f"w{number}") for number in range(3)]
        for rank in run.ranks:
            assert rank.poll(120)
            assert rank.recv() == "first"
        workers.append(run.worker(worker="late"))
        ends = run.ends()
        assert [one[0] for one in ends] == [[1, 2]] * RANKS
        assert [one[1] for one in ends] == [1] * RANKS  # told once
        assert [one[3] for one in ends] == [2] * RANKS
        names = sorted({name for one in ends for name in one[2]})
        assert names == sorted(expected().keys() - {"head.weight"})
        for worker in workers:
            seen = versions_of(worker)
            assert sorted(seen) == [1, 2]
            assert same(seen[1], expected())
            assert same(seen[2], expected(2))


def test_replicas_share_the_work(tmp_path: Path) -> None:
    with Play(tmp_path, shard_publishers.replicates) as run:
        worker = run.worker()
        ends = run.ends()
        assert [one[0] for one in ends] == [[1, 2]] * RANKS
        sent = [name for one in ends for name in one[1]]
        assert sorted(sent) == sorted(expected().keys() - {"head.weight"})
        assert all(one[1] for one in ends)
        seen = versions_of(worker)
        assert same(seen[1], expected())
        assert same(seen[2], expected(2))


def test_shards_and_gathered_versions_follow_each_other(tmp_path: Path) -> None:
    with Play(tmp_path, shard_publishers.gathers_between) as run:
        worker = run.worker()
        assert run.ends() == [[1, 2, 3, 4]] * RANKS
        seen = versions_of(worker)
        assert all(same(seen[number], expected(number)) for number in (1, 2, 3, 4))


def test_boxes_of_a_framework_make_whole_tensors(tmp_path: Path) -> None:
    with Play(tmp_path, shard_publishers.divides_as_megatron) as run:
        worker = run.worker()
        ends = run.ends()
        assert [one[0] for one in ends] == [1] * RANKS
        assert sorted(name for one in ends for name in one[1]) == [
            *("layers.0.norm", "layers.0.w", "layers.0.w"),
            *("layers.1.norm", "layers.1.w", "layers.1.w"),
        ]
        assert same(versions_of(worker)[1], shard_publishers.stage_weights())


def test_a_hole_is_refused_on_all_ranks(tmp_path: Path) -> None:
    with Play(tmp_path, shard_publishers.leaves_a_hole) as run:
        assert run.ends() == [("InvalidError", True, 1)] * RANKS


def test_a_rank_that_fails_aborts_the_version(tmp_path: Path) -> None:
    with Play(tmp_path, shard_publishers.fails) as run:
        worker = run.worker()
        ends = run.ends()
        assert [one[1] for one in ends] == ["PeerError", "PeerError", "KeyError", "PeerError"]
        assert [one[2] for one in ends] == [1] * RANKS
        assert [one[0] for one in ends] == [[1, 3]] * RANKS
        seen = versions_of(worker)
        assert sorted(seen) == [1, 3]
        assert same(seen[3], expected(2))


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_aborts_the_version(tmp_path: Path, victim: int) -> None:
    scene = shard_publishers.is_killed if victim else shard_publishers.root_is_killed
    with Play(tmp_path, scene) as run:
        worker = run.worker(idle_timeout=4 * LOST_S, **HURRIED)
        ends = run.ends()
        assert ends[victim] is None
        assert [one for one in ends if one is not None] == [("PeerError", True, 1)] * (RANKS - 1)
        seen = versions_of(worker)
        assert sorted(seen) == [1]
        assert same(seen[1], expected())


def test_no_rank_has_memory_for_a_whole_tensor(tmp_path: Path) -> None:
    with Play(tmp_path, shard_publishers.is_large) as run:
        worker = run.worker()
        ends = run.ends()
        assert [one[0] for one in ends] == [[1, 2]] * RANKS
        assert max(one[1] for one in ends) < LARGE
        seen = versions_of(worker)[2]
        assert torch.equal(seen["0.weight"], shard_publishers.values(*seen["0.weight"].shape))
