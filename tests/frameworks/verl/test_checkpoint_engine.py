"""``backend: refit`` of verl's checkpoint engines, through verl's manager and workers on Ray."""

import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import ray
from fleet import Fleet

HERE = Path(__file__).parent
SOON = 40.0
"""Seconds after which a failed update has ended at every worker: engine_kwargs has 30."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    models.save(models.make("llama"), folder / "model")
    path = os.pathsep.join(
        [str(HERE), str(HERE.parent / "shared"), os.environ.get("PYTHONPATH", "")]
    )
    env = {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "cpu_platform", "PYTHONPATH": path}
    ray.init(
        num_cpus=8,
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=256 << 20,
        runtime_env={"env_vars": env},
        log_to_driver=False,
    )
    yield Fleet(str(folder / "model"), str(folder / "store"))
    ray.shutdown()


def ends(promises: list[Any]) -> list[Any]:
    """What became of each: its value, or its error. None waits longer than SOON."""
    until = time.monotonic() + SOON
    found: list[Any] = []
    for one in promises:
        try:
            found.append(ray.get(one, timeout=max(0.1, until - time.monotonic())))
        except ray.exceptions.GetTimeoutError:
            raise
        except Exception as why:
            found.append(why)
    return found


@pytest.fixture
def sign(tmp_path: Path) -> Iterator[tuple[str, int]]:
    """A pipe into which processes write when they wait: its path, and this end."""
    path = tmp_path / "sign"
    os.mkfifo(path)
    end = os.open(path, os.O_RDWR)
    yield str(path), end
    os.close(end)


def await_signs(end: int, count: int) -> None:
    """Until so many processes have written."""
    for _ in range(count):
        assert select.select([end], [], [], SOON)[0], "a process does not come to its wait"
        os.read(end, 1)


def test_every_rollout_gets_each_version_bit_for_bit(fleet: Fleet) -> None:
    for step in range(4):
        fleet.trainers.train(step)
        fleet.manager.update_weights(global_steps=10 + step)
        assert fleet.holds() == [10 + step] * 2


def test_failing_rollout_is_named_and_takes_next_version(fleet: Fleet) -> None:
    fleet.replicas[0].group.set_at_tensor("fails")
    sent, taken = fleet.begin(20)
    sent, taken = ends(sent), ends(taken)
    assert "the engine stopped before it had read all weights" in str(sent[0])
    assert sent[1] == {}
    assert "no place for" in str(taken[0])
    fleet.replicas[0].group.set_at_tensor(None)
    fleet.manager.update_weights(global_steps=21)
    assert fleet.holds() == [21] * 2


@pytest.mark.slow
def test_a_rollout_that_is_killed_is_named_and_the_other_goes_on(
    fleet: Fleet, sign: tuple[str, int]
) -> None:
    path, end = sign
    (process,) = fleet.replicas[0].group.set_at_tensor("waits", path)
    sent, taken = fleet.begin(30)
    await_signs(end, 1)
    os.kill(process, signal.SIGKILL)
    sent, taken = ends(sent), ends(taken)
    assert "rollout-0" in str(sent[0])
    assert isinstance(taken[0], ray.exceptions.RayActorError)
    assert sent[1] == {}

    fleet.manager.remove_replicas(fleet.replicas[:1])
    fleet.trainers.train(31)
    fleet.manager.update_weights(global_steps=31)
    assert fleet.holds() == [31]


@pytest.mark.slow
def test_a_trainer_that_is_killed_leaves_no_rollout_waiting(
    fleet: Fleet, sign: tuple[str, int], tmp_path: Path
) -> None:
    path, end = sign
    processes = fleet.trainers.set_halts(path)
    sent, taken = fleet.begin(40)
    await_signs(end, len(processes))
    for process in processes:
        os.kill(process, signal.SIGKILL)
    sent, taken = ends(sent), ends(taken)
    assert all(isinstance(one, ray.exceptions.RayActorError) for one in sent)
    assert "DeadlineError" in str(taken[0]) or "PeerError" in str(taken[0])

    fleet.new_trainers(str(tmp_path / "store"))
    fleet.trainers.train(41)
    fleet.manager.update_weights(global_steps=41)
    assert fleet.holds() == [41]
