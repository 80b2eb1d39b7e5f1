"""Whatever a training loop does with states on the host, in any order: weights and states are those
of a run without refit that does the same, to the bit."""

import copy
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import refit
import refit.window
import torch
import training
from refit.errors import BusyError, CopyError, StateError
from test_host_failures import FailingCall
from torch import nn

pytestmark = pytest.mark.usefixtures("default_device")

SHAPES = ((300, 40), (40,), (200,), (9000,), (3, 3, 40), (2,))


class Player:
    """A run that does what it is told; two of the same seed are the same."""

    def __init__(self, kind: Any, seed: int, shapes: Any = SHAPES) -> None:
        source = torch.Generator().manual_seed(seed)
        self.parameters = [self.made(one, source) for one in shapes]
        self.optimizer = kind(self.groups())
        self.source = torch.Generator().manual_seed(seed + 1)
        self.saved: dict[str, Any] | None = None

    def made(self, shape: Any, source: torch.Generator) -> nn.Parameter:
        return nn.Parameter(training.drawn(*shape, generator=source))

    def groups(self) -> list[dict[str, Any]]:
        return [{"params": self.parameters[:3]}, {"params": self.parameters[3:]}]

    def backward(self, which: int) -> None:
        for number, one in enumerate(self.parameters):
            if (which >> number) & 1:
                weight = training.drawn(*one.shape, generator=self.source)
                (one * weight).sum().backward()

    def write(self, which: int) -> None:
        for state in [*self.optimizer.state.values()][which % 3 :: 3]:
            for key, value in state.items():
                if value.dim() > 0 and which & 8:
                    value.mul_(0.5)
                elif value.dim() > 0:
                    state[key] = value * 0.75

    def drop(self, which: int) -> None:
        for one in self.parameters[which % 2 :: 3]:
            self.optimizer.state.pop(one, None)

    def save(self, _: int) -> None:
        self.saved = copy.deepcopy(self.optimizer.state_dict())

    def load(self, _: int) -> None:
        if self.saved is not None:
            self.optimizer.load_state_dict(copy.deepcopy(self.saved))

    def rate(self, which: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 1.1 if which & 1 else 0.9

    def step(self, _: int) -> None:
        self.optimizer.step()

    def clear_gradients(self, which: int) -> None:
        self.optimizer.zero_grad(set_to_none=bool(which & 1))


BOTH = ("backward", "step", "step", "write", "drop", "save", "load", "rate", "clear_gradients")
OURS = ("cycle", "checkpoint", "deepcopy", "read", "fail", "again", "refused")


class Ours:
    """What is done besides with the run whose states live on the host, and changes nothing."""

    def __init__(self, moved: Player, options: dict[str, Any]) -> None:
        self.moved, self.options = moved, options
        self.controller = self.open()
        self.reads = 0.0

    def open(self) -> refit.Controller:
        return refit.Controller(self.moved.optimizer, **{"states": "host", **self.options})

    def cycle(self, which: int) -> None:
        self.controller.clear()
        if which & 1:
            self.controller.restore(non_blocking=bool(which & 2))

    def checkpoint(self, _: int) -> None:
        with self.controller.checkpoint() as state:
            assert state["state"].keys() <= set(range(len(self.moved.parameters)))
            if any(one.grad is not None for one in self.moved.parameters):
                with pytest.raises(BusyError):
                    self.moved.optimizer.step()

    def deepcopy(self, _: int) -> None:
        copy.deepcopy(self.moved.optimizer)

    def read(self, _: int) -> None:
        for state in self.moved.optimizer.state.values():
            self.reads += sum(float(one.sum()) for one in state.values())

    def again(self, _: int) -> None:
        self.controller.close()
        self.controller = self.open()

    def refused(self, _: int) -> None:
        with pytest.raises(BusyError):
            self.open()


def failing_step(player: Player, controller: refit.Controller, at: int) -> None:
    """A step that a copy breaks off, and that is finished."""
    before = refit.window.call
    refit.window.call = FailingCall(at, CopyError("down"), False, 1 + at % 3)
    try:
        player.optimizer.step()
        return
    except CopyError as why:
        told = str(why)
    finally:
        refit.window.call = before
    if "again" in told:
        player.optimizer.step()
    else:
        with pytest.raises(StateError):
            player.optimizer.step()
        with suppress(CopyError):
            controller.resume_step()
        controller.resume_step()


def assert_same(alone: Player, moved: Player) -> None:
    for mine, theirs in zip(alone.parameters, moved.parameters, strict=True):
        assert torch.equal(mine, theirs)
        one, other = alone.optimizer.state.get(mine, {}), moved.optimizer.state.get(theirs, {})
        assert list(one) == list(other)
        for key in one:
            assert torch.equal(one[key].cpu(), other[key].cpu()), key


KINDS: list[Callable[..., Any]] = [
    torch.optim.AdamW,
    torch.optim.RMSprop,
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    torch.optim.Adafactor,
    lambda parameters: torch.optim.Adam(parameters, amsgrad=True, fused=True),
]


@pytest.mark.parametrize("seed", range(12))
def test_any_sequence_of_what_a_training_loop_does(seed: int) -> None:
    draw = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    alone, moved = Player(kind, seed), Player(kind, seed)
    options: dict[str, Any] = {"window_bytes": "64KiB", "windows": 1 + seed % 4}
    if seed % 3 == 0:
        options["host_fraction"] = 0.6
    ours = Ours(moved, options)
    for _ in range(70):
        verb, which = draw.choice([*BOTH, *OURS]), draw.randrange(64)
        if verb == "fail":
            alone.step(which)
            failing_step(moved, ours.controller, 1 + which % 24)
        elif verb in OURS:
            getattr(ours, verb)(which)
        else:
            with torch.set_grad_enabled(verb == "backward"):
                getattr(alone, verb)(which)
                getattr(moved, verb)(which)
        if draw.random() < 0.3:
            assert_same(alone, moved)
    assert_same(alone, moved)
    ours.controller.close()
    alone.step(0), moved.step(0)
    assert_same(alone, moved)
