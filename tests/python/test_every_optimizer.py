"""Every optimizer of torch.optim, stepped with its states away between any two steps, does what it
does without refit: losses, weights and states equal to the bit, and the same tensors."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import refit
import torch
from torch import nn

STEPS = 4
Maker = Callable[[Any], torch.optim.Optimizer]

SINGLE: dict[str, dict[str, Any]] = {
    "Adadelta": {},
    "Adafactor": {},
    "Adagrad": {},
    "Adam": {},
    "AdamW": {},
    "Adamax": {},
    "ASGD": {},
    "LBFGS": {"max_iter": 3, "history_size": 3},
    "Muon": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "SparseAdam": {},
}
"""Each optimizer, with options that make it keep all the state it can."""


def variants() -> list[Any]:
    """Every optimizer there is, plain and in each of its implementations."""
    found = []
    for name, options in SINGLE.items():
        kind = getattr(torch.optim, name, None)
        if kind is None:
            continue
        takes = inspect.signature(kind).parameters
        ways: list[dict[str, Any]] = [{}]
        ways += [{"foreach": True}, {"foreach": False}] if "foreach" in takes else []
        ways += [{"fused": True}] if "fused" in takes else []
        ways += [{"amsgrad": True}] if "amsgrad" in takes else []
        ways += [{"maximize": True}] if "maximize" in takes else []
        for way in ways:
            title = "-".join([name, *(f"{key}={value}" for key, value in way.items())])
            found.append(pytest.param(name, {**options, **way}, id=title))
    return found


class Task:
    """A model that suits the optimizer, and steps that depend on nothing but their number."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        torch.manual_seed(3)
        self.sparse = name == "SparseAdam"
        if self.sparse:
            self.model: nn.Module = nn.Embedding(40, 8, sparse=True)
        else:
            self.model = nn.Sequential(
                nn.Linear(12, 16, bias=False), nn.Tanh(), nn.Linear(16, 4, bias=False)
            )
        kind = getattr(torch.optim, name)
        try:
            self.optimizer = kind(self.model.parameters(), **options)
        except RuntimeError as why:
            pytest.skip(f"torch itself: {why}")
        self.done = 0

    def loss(self) -> torch.Tensor:
        source = torch.Generator().manual_seed(self.done)
        if self.sparse:
            rows = torch.randint(0, 40, (16,), generator=source)
            out: torch.Tensor = self.model(rows)
        else:
            out = self.model(torch.randn(8, 12, generator=source))
        return out.pow(2).mean()

    def step(self) -> float:
        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            return loss

        if isinstance(self.optimizer, torch.optim.LBFGS):
            value = self.optimizer.step(closure).detach()
        else:
            value = closure().detach()
            self.optimizer.step()
        self.done += 1
        return float(value)

    def tensors(self) -> list[torch.Tensor]:
        """All that the optimizer's state holds, in lists and dicts too."""
        found: list[torch.Tensor] = []

        def look(value: Any) -> None:
            if isinstance(value, torch.Tensor):
                found.append(value)
            elif isinstance(value, dict):
                for one in value.values():
                    look(one)
            elif isinstance(value, list | tuple):
                for one in value:
                    look(one)

        for state in self.optimizer.state.values():
            look(state)
        return found


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    pairs = list(zip(one, other, strict=True))
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(("name", "options"), variants())
def test_an_optimizer_does_what_it_does_without_refit(name: str, options: dict[str, Any]) -> None:
    alone, moved = Task(name, options), Task(name, options)
    with refit.Controller(moved.optimizer, moved.model) as controller:
        for _ in range(STEPS):
            assert alone.step() == moved.step()
            before = moved.tensors()
            looks = [(id(t), t.shape, t.stride(), t.storage_offset()) for t in before]
            controller.clear()
            controller.restore()
            controller.join()
            after = moved.tensors()
            assert [(id(t), t.shape, t.stride(), t.storage_offset()) for t in after] == looks
            assert same(alone.tensors(), after)
        for mine, theirs in zip(alone.model.parameters(), moved.model.parameters(), strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("name", "options"), variants())
def test_what_leaves_and_what_stays_is_all_there_is(name: str, options: dict[str, Any]) -> None:
    task = Task(name, options)
    with refit.Controller(task.optimizer, task.model) as controller:
        task.step()
        task.step()
        sizes = {id(t): t.untyped_storage().nbytes() for t in task.tensors()}
        controller.clear()
        stay = [t for t in task.tensors() if t.untyped_storage().nbytes() == sizes[id(t)] > 0]
        assert len(stay) <= len(controller.resident)
        assert all(reason for _, reason in controller.resident)
        assert all(t.numel() == 1 or name == "LBFGS" for t in stay)  # trap 8
        task.step()
    alone = Task(name, options)
    for _ in range(3):
        alone.step()
    assert same(alone.tensors(), task.tensors())


@pytest.mark.parametrize(("name", "options"), variants())
def test_a_step_on_states_that_are_away_needs_no_other_call(  # trap 10
    name: str, options: dict[str, Any]
) -> None:
    alone, moved = Task(name, options), Task(name, options)
    with refit.Controller(moved.optimizer) as controller:
        for _ in range(STEPS):
            assert alone.step() == moved.step()
            controller.clear()
    assert same(alone.tensors(), moved.tensors())
