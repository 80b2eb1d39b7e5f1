"""A failure at any point of a cycle or of a step: of a call of the C library, of an allocation, by
Ctrl-C before any line, by the end of the process. It is told what to do, nothing is lost, and each
parameter is stepped once: training ends with the bits of a run that nothing disturbed."""

import copy
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import refit
import torch
import training
from failures import Drill, FailingCall, end_step
from interrupts import MOST, AtLine
from refit.errors import CopyError, RefitError
from schedules import BOTH, CYCLE, SHARE, WINDOWS, Schedule, Twins

pytestmark = pytest.mark.usefixtures("default_device")

QUICK = pytest.param(False, 1, id="some")
EVERY = [
    pytest.param(True, before, marks=pytest.mark.slow, id=f"every-{before}") for before in (0, 1, 4)
]
"""Whether it happens at every place or at some, and how many steps were made before."""


@pytest.mark.parametrize(("every", "before"), [QUICK, *EVERY])
@pytest.mark.parametrize(
    ("error", "after"),
    [
        (CopyError("the copy failed"), False),
        (KeyboardInterrupt(), False),
        (KeyboardInterrupt(), True),
    ],
    ids=["the copy failed", "Ctrl-C before", "Ctrl-C after"],
)
def test_every_call_of_the_library_may_fail_once(
    schedule: Schedule, error: BaseException, after: bool, every: bool, before: int
) -> None:
    """In a step, the backward pass before it, and what of a cycle there is."""
    for at in range(1, 200, 1 if every else 5):
        with Twins(schedule, run=Drill) as twins:
            twins.step(before)
            run, controller = twins.moved, twins.controller
            why: BaseException | None = None
            with FailingCall(at, error, after=after) as failing:
                for verb in (
                    () if schedule.has_windows else (controller.offload, controller.restore)
                ):
                    with suppress(CopyError, KeyboardInterrupt):
                        verb()
                try:
                    run.backward()
                except KeyboardInterrupt:  # the loop makes the gradients again
                    run.backward()
                try:
                    run.optimizer.step()
                except (RefitError, KeyboardInterrupt) as seen:
                    why = seen
            end_step(twins, why)
            twins.alone.step()
            twins.assert_same()
            twins.step(2)
        if not failing.done:
            break
    assert at < 199
    assert at > 4 or (schedule is CYCLE and before == 0)


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("times", [2, 3, 50])
@pytest.mark.parametrize("schedule", [WINDOWS, SHARE, BOTH], ids=lambda one: one.name)
def test_a_failure_that_lasts_is_told_again_until_it_is_over(
    schedule: Schedule, times: int, stride: int
) -> None:
    for at in range(1, 100, stride):
        with Twins(schedule, run=Drill) as twins:
            twins.step()
            twins.backward()
            why: BaseException | None = None
            with FailingCall(at, CopyError("the link is down"), times=times) as failing:
                try:
                    twins.moved.optimizer.step()
                except CopyError as seen:
                    why = seen
                    for _ in range(4):
                        try:
                            twins.controller.resume_step()
                        except CopyError as later:
                            why = later
            if why is not None and "again" in str(why):
                twins.moved.optimizer.step()
            elif why is not None:
                twins.controller.resume_step()
            end_step(twins, None)
            twins.alone.finish()
        if not failing.done:
            break
    assert 4 < at < 99


# ---- Ctrl-C.


@pytest.mark.parametrize(("every", "before"), [QUICK, *EVERY])
@pytest.mark.parametrize("what", ["backward", "step"])
def test_ctrl_c_before_any_line_of_a_backward_pass_and_of_a_step(
    schedule: Schedule, what: str, every: bool, before: int
) -> None:
    """Of clipping, too; and of the return of states that are away."""
    alone = Drill()
    alone.step(before + 1)
    broken = 0
    for at in range(1, MOST, 11 if every else 61):
        twins = Twins(schedule, run=Drill)
        run = twins.moved
        run.step(before)
        if schedule is CYCLE:
            twins.controller.offload()
            if at & 1:
                twins.controller.restore()
        if what == "step":
            run.backward()
        why: BaseException | None = None
        pressed = AtLine(at)
        try:
            with pressed:
                (run.optimizer.step if what == "step" else run.backward)()
        except KeyboardInterrupt as seen:
            why = seen
            broken += 1
        if what == "backward":
            if why is not None:
                run.backward()
            run.optimizer.step()
            why = None
        end_step(twins, why)
        twins.alone = alone
        twins.assert_same()
        twins.controller.close()
        if not pressed.done:
            break
    assert not pressed.done
    # A GPU's backward pass has a thread of its own, which Ctrl-C does not end.
    in_backward = schedule is not CYCLE and before > 0 and training.DEVICE == "cpu"
    runs_refit = what == "step" or in_backward
    assert broken > (15 if every else 5) or not runs_refit


KILLED = """
import os, signal, sys, torch, refit.step.cpu_kernels
sys.path.insert(0, {tests!r})
from failures import Drill
from schedules import BOTH

drill = Drill()
with BOTH.open(drill.optimizer):
    drill.step(3)
    torch.save([list(drill.model), drill.optimizer.state_dict()], {file!r})
    run = refit.step.cpu_kernels.CpuKernels.run

    def killed(*arguments):
        run(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    refit.step.cpu_kernels.CpuKernels.run = killed
    drill.step()
"""


@pytest.mark.slow
def test_a_process_killed_in_a_step_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    file = str(tmp_path / "checkpoint.pt")
    code = KILLED.format(tests=str(Path(__file__).parent), file=file)
    done = subprocess.run([sys.executable, "-c", code], env=dict(os.environ), timeout=300)
    assert done.returncode == -signal.SIGKILL
    with Twins(BOTH, run=Drill) as twins:
        parameters, state = torch.load(file, weights_only=False)
        twins.alone.step(3)
        with torch.no_grad():
            for mine, saved in zip(twins.moved.model, parameters, strict=True):
                mine.copy_(saved)
        twins.moved.optimizer.load_state_dict(copy.deepcopy(state))  # into memory of PyTorch
        twins.moved.steps = 3
        twins.step(2)


# ---- Of the cycle.


class Failing:
    """Fails the call of a given number, from the outside."""

    def __init__(self, real: Callable[..., Any], error: BaseException, at: int) -> None:
        self.real, self.error, self.left = real, error, at

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return self.real(*arguments, **named)


@pytest.mark.parametrize("error", [MemoryError("no memory"), KeyboardInterrupt()], ids=str)
@pytest.mark.parametrize("verb", ["clear", "restore", "clear, then train"])
def test_a_storage_that_cannot_be_resized_is_tried_again(  # trap 12
    monkeypatch: pytest.MonkeyPatch, verb: str, error: BaseException
) -> None:
    for at in range(1, 100):
        with Twins(CYCLE, before=2) as twins:
            if verb == "restore":
                twins.controller.offload()
            act = getattr(twins.controller, verb.partition(",")[0])
            with monkeypatch.context() as patch:
                failing = Failing(torch.UntypedStorage.resize_, error, at)
                patch.setattr(torch.UntypedStorage, "resize_", lambda *a, f=failing: f(*a))
                with suppress(type(error), RefitError):
                    act()
                    assert failing.left > 0, "the error was not told"
                if not verb.endswith("train"):
                    act()
            twins.step()
        if failing.left > 0:
            break
    assert 4 < at < 99


class NoPublisher:
    """A publisher whose every call fails."""

    def __getattr__(self, name: str) -> Any:
        raise ConnectionError(f"{name}: no peer")


def test_a_publisher_that_fails_leaves_states_safe(schedule: Schedule) -> None:
    with Twins(schedule, before=2) as twins:
        with (
            pytest.raises(ConnectionError, match="no peer"),
            twins.controller.refit(publisher=NoPublisher()) as tx,
        ):
            tx.send(refit.named_weights(twins.moved.model))
        assert twins.controller.state in ("cleared", "training")
        twins.controller.restore()
        twins.step()
