"""Failures of a step or a cycle, and what an error's sentence tells to do about them."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import refit
import refit.activations.arena
import refit.states.offloader
import refit.step.cpu_kernels
import refit.step.window
import torch
import training
from refit.errors import CopyError, DeadlineError, StateError
from schedules import Layers, Twins
from torch import nn
from training import drawn

MODULES: tuple[Any, ...] = (
    refit.step.window,
    refit.step.cpu_kernels,
    refit.states.offloader,
    refit.activations.arena,
)
SIZES = (9000, 70, 8000, 12000, 5)
"""Parameters: two of them fill a window alone, one is stepped in parts, one stays on the device."""


class Drill(Layers):
    """Some parameters, whose gradients depend on nothing but the number of the step."""

    def __init__(self, make: training.Maker = training.adamw) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = nn.ParameterList([drawn(size) for size in SIZES])
        self.optimizer = make(list(self.model))

    def loss(self) -> torch.Tensor:
        source = torch.Generator().manual_seed(self.steps)
        parts = [(one * drawn(*one.shape, generator=source)).sum() for one in self.model]
        return torch.stack(parts).sum()

    def backward(self) -> float:
        """Gradients that are clipped, and that may be made again."""
        self.optimizer.zero_grad()
        self.loss().backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        return 0.0

    def counters(self) -> list[int]:
        states = [self.optimizer.state.get(one, {}) for one in self.model]
        return [int(state.get("step", 0)) for state in states]


class FailingCall:
    """In its block a call of the C library fails, before what it does, or after it: the one of this
    number, and as many as ``times`` says in all. ``late`` are endings of the names of those that
    fail after what they do, and the names in ``never`` do not count. No garbage of an earlier run
    makes a call."""

    def __init__(
        self,
        at: int,
        error: BaseException,
        *,
        after: bool = False,
        times: int = 1,
        late: tuple[str, ...] = (),
        never: tuple[str, ...] = (),
    ) -> None:
        self.at, self.error, self.after, self.times = at, error, after, times
        self.late, self.never = late, never
        self.count = 0
        self.failed: list[str] = []

    def __enter__(self) -> "FailingCall":
        gc.disable()
        self.real = refit.step.window.call
        for module in MODULES:
            module.call = self
        return self

    def __exit__(self, *_: object) -> None:
        gc.enable()
        for module in MODULES:
            module.call = self.real

    def __call__(self, function: Any, *arguments: Any) -> None:
        name = function.__name__
        counts = name not in self.never
        self.count += counts
        fails = counts and self.at <= self.count < self.at + self.times
        if not fails or self.after or name.endswith(self.late):
            try:
                self.real(function, *arguments)
            except DeadlineError:  # a slice of a wait, which is made again
                self.count -= counts
                raise
        if fails:
            self.failed.append(name)
            raise copy.copy(self.error)  # whose traceback nothing holds

    @property
    def done(self) -> bool:
        return self.count >= self.at


def refuse_to_allocate(error: BaseException, room: int = -1) -> Callable[..., torch.Tensor]:
    """Stands for ``torch.empty``: windows larger than ``room`` find no memory."""
    real = torch.empty

    def empty(*size: Any, **options: Any) -> torch.Tensor:
        if options.get("dtype") is torch.uint8 and size[0] > room:
            raise error
        return real(*size, **options)

    return empty


def finish_step(controller: refit.Controller, optimizer: Any, why: BaseException) -> None:
    """Ends a step that was broken off, as its error tells to."""
    told = " ".join([str(why), *getattr(why, "__notes__", [])])
    if "resume_step()" in told:
        with pytest.raises(StateError, match="resume_step"):
            optimizer.step()
        controller.resume_step()
    else:
        assert "step() can be called again" in told
        assert getattr(why, "stepped", []) == []
        optimizer.step()


def end_step(twins: Twins, why: BaseException | None) -> None:
    """What the error's sentence tells to do."""
    run = twins.moved
    if getattr(why, "stepped", None) is not None:
        finish_step(twins.controller, run.optimizer, why)  # type: ignore[arg-type]
    elif set(run.counters()) != {run.steps + 1}:  # before it had begun: a join of copies may fail
        assert isinstance(why, CopyError | KeyboardInterrupt)
        run.optimizer.step()
    run.optimizer.zero_grad()
    run.steps += 1
