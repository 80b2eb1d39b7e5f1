"""torch's ZeroRedundancyOptimizer, whose states are those of an optimizer within it."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import refit
import torch
import training
from refit.errors import InvalidError
from schedules import CYCLE, SCHEDULES, Layers, Schedule, same
from torch.distributed.optim import ZeroRedundancyOptimizer


@pytest.fixture(autouse=True)
def ranks(tmp_path: Any) -> Iterator[None]:
    """One rank."""
    where = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=where, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Sharded(Layers):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.optimizer: Any = ZeroRedundancyOptimizer(
            self.model.parameters(), torch.optim.AdamW, lr=1e-2, **options
        )

    def save(self) -> Any:
        self.optimizer.consolidate_state_dict()
        return self.optimizer.state_dict()


def assert_same(one: Sharded, other: Sharded) -> None:
    assert all(map(torch.equal, one.parameters(), other.parameters()))
    assert same(one.save()["state"], other.save()["state"])


@pytest.mark.parametrize("schedule", SCHEDULES, ids=[one.name for one in SCHEDULES])
def test_states_leave_and_have_the_same_bits(schedule: Schedule) -> None:
    alone, moved = Sharded(), Sharded()
    controller = schedule.open(moved.optimizer, moved.model)
    kept = None
    for number in range(6):
        for run in (alone, moved):
            run.step()
        training.whole_cycle(controller)
        if number == 2:
            kept = alone.save()
        if number == 4:
            for run in (alone, moved):
                run.optimizer.load_state_dict(copy.deepcopy(kept))
        assert_same(alone, moved)
    controller.close()
    for run in (alone, moved):
        run.step()
    assert_same(alone, moved)


def test_what_steps_within_the_backward_pass_is_refused() -> None:
    with pytest.raises(InvalidError, match="overlap_with_ddp"):
        refit.Controller(Sharded(overlap_with_ddp=True).optimizer)


class Outer(torch.optim.SGD):
    """Steps by another optimizer, under a name that nobody knows."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=1e-2)
        self.adam = torch.optim.AdamW(self.param_groups[0]["params"])

    def step(self, closure: Any = None) -> None:
        self.adam.step(closure)


def test_states_of_an_optimizer_within_are_not_left_in_silence() -> None:
    run = Layers(Outer)
    controller = CYCLE.open(run.optimizer, run.model)
    run.step()
    with pytest.warns(UserWarning, match=r"those of its \.adam: give that to the controller"):
        training.whole_cycle(controller)
    controller.close()
    controller = CYCLE.open(run.optimizer.adam, run.model)
    controller.offload()
    assert controller.stats()["refit/offload_bytes"] > 0
    controller.close()
