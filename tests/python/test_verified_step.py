"""The first steps made twice: the real ones find what a trial of two parameters cannot."""

from typing import Any

import pytest
import torch
from refit.errors import InvalidError, UnsupportedError
from schedules import BOTH, CYCLE, SHARE, WINDOWS, Layers, Schedule, Twins

ELSEWHERE = pytest.mark.parametrize(
    "schedule", [WINDOWS, SHARE, BOTH], ids=["windows", "share", "both"]
)


class Late(torch.optim.AdamW):
    """From its sixth step on it limits the norm of all gradients together."""

    count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        gradients = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        if self.count > 5 and gradients:
            torch.nn.utils.clip_grads_with_norm_(
                [p for g in self.param_groups for p in g["params"] if p.grad is not None],
                1e-3,
                torch.nn.utils.get_total_norm(gradients),
            )
        super().step(closure)


@ELSEWHERE
def test_what_begins_later_is_found_by_the_step_itself(schedule: Schedule) -> None:
    run = Layers(lambda parameters: Late(parameters, lr=1e-2))
    with schedule.open(run.optimizer, run.model, verify_steps=8):
        for _ in range(5):
            run.step()
        with pytest.raises(UnsupportedError, match=r"step 6 of a Late has made other bits of \d"):
            run.step()
    run.finish()
    run.step()  # goes on without refit


@ELSEWHERE
def test_steps_that_are_right_are_as_if_nobody_had_looked(schedule: Schedule) -> None:
    with Twins(schedule, verify_steps=3) as twins:
        twins.step(2)
        for run in twins:
            run.optimizer.zero_grad()
        twins.step(3)


def test_a_cycle_has_nothing_to_verify() -> None:
    run = Layers()
    with pytest.raises(InvalidError, match="verify_steps is for"):
        CYCLE.open(run.optimizer, run.model, verify_steps=1)
