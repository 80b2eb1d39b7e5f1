"""A step of which the CPU makes a share is broken off: by a call of the library that fails, by
Ctrl-C before any line of a backward pass, of clipping or of the step, by the end of the process.
Each parameter is stepped once in the end: weights and states end with the bits of a run that
nothing disturbed."""

import copy
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import refit
import refit.host_step
import torch
from refit.errors import CopyError, RefitError
from test_host_failures import Drill, FailingCall, assert_same, finish
from test_interrupting_code import MOST, Handler

pytestmark = pytest.mark.usefixtures("default_device")


class Share(Drill):
    """A drill whose gradients a backward pass makes, so that they leave before the step."""

    def give_gradients(self) -> None:
        self.optimizer.zero_grad()
        source = torch.Generator().manual_seed(self.steps)
        parts = [
            (one * torch.randn(one.shape, generator=source).to(one.device)).sum()
            for one in self.parameters
        ]
        torch.stack(parts).sum().backward()

    def clip(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters, 0.5)

    def optimize(self) -> None:
        self.optimizer.step()

    def step(self) -> None:
        self.give_gradients()
        self.clip()
        self.optimizer.step()
        self.steps += 1


def with_share(drill: Drill, **options: Any) -> refit.Controller:
    return refit.Controller(drill.optimizer, host_fraction=1.0, **options)


def prepared(steps: int) -> tuple[Share, Share]:
    alone, moved = Share(), Share()
    for _ in range(steps):
        alone.step()
    return alone, moved


@pytest.mark.parametrize("before", [0, 1, 4])
@pytest.mark.parametrize("behind", [True, False], ids=["behind", "before"])
@pytest.mark.parametrize("error", [CopyError("the copy failed"), KeyboardInterrupt()], ids=str)
def test_every_call_of_the_library_may_fail_once(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, behind: bool, before: int
) -> None:
    if behind and isinstance(error, RefitError):
        pytest.skip("a call that fails has not done its work")
    failed = 0
    for at in range(1, 200):
        alone, moved = Share(), Share()
        with with_share(moved) as controller:
            for _ in range(before):
                alone.step(), moved.step()
            failing = FailingCall(at, copy.copy(error), behind)
            seen: BaseException | None = None
            with monkeypatch.context() as patch:
                patch.setattr(refit.host_step, "call", failing)
                try:
                    moved.give_gradients()
                    moved.clip()
                except KeyboardInterrupt:  # before the step: the loop makes the gradients again
                    moved.give_gradients()
                    moved.clip()
                try:
                    moved.optimizer.step()
                    moved.steps += 1
                except (RefitError, KeyboardInterrupt) as why:
                    seen = why
            if seen is not None:
                finish(controller, moved, seen)
            failed += failing.count >= at
            alone.step()
            assert_same(alone, moved)
            for _ in range(2):
                alone.step(), moved.step()
            assert_same(alone, moved)
        if failing.count < at:
            break
    else:
        pytest.fail("a step never ends")
    assert failed > (1 if before == 0 else 8)


@pytest.fixture
def no_collection() -> Iterator[None]:
    """No ``__del__`` of an earlier run is called at any line: what is raised there goes nowhere."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def press() -> None:
    handler = signal.getsignal(signal.SIGINT)
    assert callable(handler)
    handler(signal.SIGINT, None)  # raises, or notes it for the end of a block that holds it


def interrupted(
    before: int, action: Callable[[Share], None], resume: Callable[[Any, Share, Any], None]
) -> int:
    """Presses Ctrl-C before lines of an action, each of them in a run of its own."""
    broken = 0
    alone, _ = prepared(before + 1)
    for at in range(1, MOST, 11):
        moved = Share()
        with with_share(moved) as controller:
            for _ in range(before):
                moved.step()
            seen: BaseException | None = None
            if action is Share.optimize:
                moved.give_gradients(), moved.clip()
            handler = Handler(press, at)
            try:
                with handler:
                    action(moved)
            except KeyboardInterrupt as why:
                seen = why
                broken += 1
            resume(controller, moved, seen)
            assert_same(alone, moved)
        if not handler.done:
            return broken
    pytest.fail("it never ends")


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("before", [0, 1, 4])
def test_ctrl_c_before_any_line_of_a_step(before: int) -> None:
    def resume(controller: refit.Controller, moved: Share, seen: Any) -> None:
        if seen is None:
            moved.steps += 1
        else:
            finish(controller, moved, seen)

    assert interrupted(before, Share.optimize, resume) > 20


@pytest.mark.usefixtures("no_collection")
def test_ctrl_c_before_any_line_of_a_backward_pass_and_of_clipping() -> None:
    def backward(moved: Share) -> None:
        moved.give_gradients()
        moved.clip()

    def resume(_controller: refit.Controller, moved: Share, seen: Any) -> None:
        if seen is not None:
            moved.give_gradients()
            moved.clip()
        moved.optimizer.step()
        moved.steps += 1

    assert interrupted(4, backward, resume) > 20


KILLED = """
import os, signal, sys, threading, torch, refit, refit.host_step
sys.path.insert(0, {tests!r})
from test_cpu_share_failures import Share, with_share

drill = Share()
with with_share(drill) as controller:
    for _ in range(3):
        drill.step()
    torch.save([drill.parameters, drill.optimizer.state_dict()], {file!r})
    run = refit.host_step.HostStep.run

    def killed(*arguments):
        run(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    refit.host_step.HostStep.run = killed
    drill.step()
"""


def test_a_process_that_is_killed_in_a_step_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    file = str(tmp_path / "checkpoint.pt")
    tests = str(Path(__file__).parent)
    code = KILLED.format(tests=tests, file=file)
    done = subprocess.run([sys.executable, "-c", code], env=dict(os.environ), timeout=120)
    assert done.returncode == -signal.SIGKILL
    alone, moved = prepared(5)
    parameters, state = torch.load(file, weights_only=False)
    with torch.no_grad():
        for mine, saved in zip(moved.parameters, parameters, strict=True):
            mine.copy_(saved)
    with with_share(moved):
        moved.optimizer.load_state_dict(state)
        moved.steps = 3
        for _ in range(2):
            moved.step()
        assert_same(alone, moved)
