"""The first steps made twice: the real ones find what a trial of two parameters cannot."""

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from refit.errors import UnsupportedError
from schedules import BOTH, CYCLE, SHARE, WINDOWS, Layers, Schedule, Twins, assert_alike

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
    with pytest.raises(TypeError, match="verify_steps"):
        CYCLE.open(run.optimizer, run.model, verify_steps=1)


@dataclass
class Mean:
    """A state of a class of its own."""

    value: torch.Tensor
    norms: list[float] = field(default_factory=list)

    def __eq__(self, other: Any) -> bool:
        return torch.equal(self.value, other.value) and self.norms == other.norms


class Nested(torch.optim.Optimizer):
    """Keeps tensors in lists, dicts and objects of its own, and writes them in place."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                state["means"] = [torch.zeros_like(p), {"slow": torch.zeros_like(p)}]
                state["object"] = Mean(torch.zeros_like(p))
                state["large"] = torch.zeros_like(p)
            fast, slow = state["means"][0], state["means"][1]["slow"]
            found = state["object"]
            for mean in (fast, slow, found.value, state["large"]):
                mean.mul_(0.9).add_(p.grad)
            found.norms.append(float(p.grad.norm()))
            p.sub_(fast + slow + found.value + state["large"], alpha=len(found.norms) * 1e-3)


@ELSEWHERE
def test_a_verified_step_changes_no_state_of_any_kind(schedule: Schedule) -> None:
    with Twins(schedule, Nested, verify_steps=3) as twins:
        twins.step(4)


class Noisy(torch.optim.Optimizer):
    """Draws from what it holds, and from the generators of the process; has no states, so that all
    parameters are in one window."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})
        self.torch = torch.Generator().manual_seed(3)
        self.numpy = np.random.default_rng(3)
        self.held = SimpleNamespace(python=random.Random(3), drawn=0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(p.grad, alpha=float(torch.rand((), generator=self.torch)))
                p.add_(self.numpy.random() + self.held.python.random(), alpha=1e-3)
                p.add_(torch.rand((), device="cpu").item() + random.random(), alpha=1e-3)
                p.add_(np.random.rand(), alpha=1e-3)
                self.held.drawn += 1


def test_a_verified_step_draws_no_random_numbers() -> None:
    runs = [Layers(Noisy), Layers(Noisy)]
    for run, options in zip(runs, ({}, {"allow_unverified": True, "verify_steps": 3}), strict=True):
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        controller = WINDOWS.open(run.optimizer, run.model, **options) if options else None
        for _ in range(4):
            run.step()
        if controller is not None:
            controller.close()
    assert_alike(*runs)
    assert runs[1].optimizer.held.drawn == 4 * len(runs[1].parameters())
