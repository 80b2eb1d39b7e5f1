"""Code that runs in the middle of a verb, in its thread: a signal handler, a finalizer. Whatever it
does with the states, training is the same to the bit as without refit, or it gets a BusyError."""

import gc
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest
import refit
import torch
from interrupts import PACKAGE, STRIDE, AtCall, AtLine, lines, press
from refit.errors import BusyError, StateError
from training import Run


class Small(Run):
    """Of one layer: each line that it runs for a tensor, it runs for few of them."""

    def __init__(self) -> None:
        super().__init__(layers=1)


def contents(run: Run) -> list[Any]:
    parameters = list(run.model.parameters())
    return [*parameters, *(p.grad for p in parameters), *run.moments()]


def read_checkpoint(run: Run, controller: refit.Controller) -> None:
    with controller.checkpoint() as states:
        assert states["state"]


Action = Callable[[Run, refit.Controller], Any]
USES: dict[str, Action] = {
    "Ctrl-C": lambda *_: press(),
    "state_dict": lambda run, _: run.optimizer.state_dict(),
    "use": lambda run, _: [float(one.sum()) for one in run.moments()],
    "zero gradients": lambda run, _: run.optimizer.zero_grad(set_to_none=False),
    "restore": lambda _, controller: controller.restore(),
    "restore and wait": lambda _, controller: controller.restore(non_blocking=False),
    "clear": lambda _, controller: controller.offload(),
    "release": lambda _, controller: controller.release(),
    "checkpoint": read_checkpoint,
    "accumulating": lambda _, controller: controller.accumulating,
}
VERBS: dict[str, Action] = {
    "clear": lambda _, controller: controller.offload(),
    "restore": lambda _, controller: controller.restore(),
    "prepare_for_training": lambda _, controller: controller.prepare_for_training(),
    "a use": lambda run, _: run.moments()[0] + 1,
}
REFUSALS = (BusyError, StateError)
"""StateError: join, release or the checkpoint's read lock, asked of states that are away."""


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("caught", [False, True], ids=["raises", "catches"])
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("use", USES)
def test_a_handler_before_any_line_is_safe(use: str, verb: str, caught: bool, every: bool) -> None:
    alone, moved = Small(), Small()
    alone.step(), moved.step()
    alone.backward(), moved.backward()
    between = use == "clear" and verb in ("prepare_for_training", "a use")  # restore and join
    refused = 0
    with refit.Controller(moved.optimizer, moved.model) as controller:

        def what() -> None:
            with suppress(*REFUSALS if caught else ()):
                USES[use](moved, controller)

        for at in lines(every, f"{use} {verb} {caught}"):
            adds = at & 1 and use != "zero gradients"  # to gradients that no step has used
            if adds:
                alone.backward(), moved.backward()
            if verb != "clear":
                controller.offload()
            handler = AtLine(at, what)
            try:
                with handler:
                    VERBS[verb](moved, controller)
            except (KeyboardInterrupt, *REFUSALS):
                assert handler.done
                assert between or not caught or use == "Ctrl-C"
                refused += 1
                if at & 2:
                    VERBS[verb](moved, controller)  # what it broke off goes on
            if adds and at & 4:
                assert controller.accumulating
            for run in (alone, moved):
                if not adds:
                    run.optimizer.zero_grad(set_to_none=False)
                run.backward()
                run.optimizer.step()
            assert all(map(torch.equal, contents(moved), contents(alone))), at
            assert {type(one) for one in contents(moved)} == {torch.nn.Parameter, torch.Tensor}
            if not handler.done:
                break
    assert at > 3 * STRIDE
    assert caught or use == "accumulating" or refused > 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_leaves_no_checkpoint_open() -> None:
    """States of which one is read cannot leave."""
    run = Small()
    run.step()
    interrupted = 0
    with refit.Controller(run.optimizer, run.model) as controller:
        for at in lines(True, ""):
            controller.offload()
            interrupt = AtCall(at)
            try:
                with interrupt:
                    read_checkpoint(run, controller)
            except KeyboardInterrupt:
                interrupted += 1
            try:
                controller.prepare_for_training()
                controller.offload()
            except BusyError:  # the exception still holds what it came through
                gc.collect()
                controller.offload()
            if not interrupt.done:
                break
    assert interrupted > STRIDE


class InMode(AtLine):
    """Before a line of PyTorch's code that enters or leaves a mode for refit's."""

    def __init__(self, at: int) -> None:
        super().__init__(at, within=torch.autograd.grad_mode.__file__)

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        back = frame.f_back
        if event == "call" and (back is None or not back.f_code.co_filename.startswith(PACKAGE)):
            return None
        return super().trace(frame, event, argument)


@pytest.mark.parametrize("schedule", ["cycle", "host_states"])
def test_ctrl_c_leaves_no_mode_of_pytorch_on(schedule: str) -> None:
    """Without a gradient mode the next backward pass raises."""
    run = Small()
    run.step()
    interrupted = 0
    with refit.Controller(run.optimizer, run.model, schedule=schedule) as controller:
        for at in lines(True, ""):
            run.backward()
            interrupt = InMode(at)
            try:
                with interrupt:
                    run.optimizer.step()
                    run.optimizer.zero_grad(set_to_none=False)
                    assert not controller.accumulating
                    controller.offload()
                    run.optimizer.zero_grad(set_to_none=False)
                    controller.restore()
                    controller.prepare_for_training()
            except KeyboardInterrupt:
                interrupted += 1
            assert torch.is_grad_enabled()
            assert not torch.is_inference_mode_enabled()
            controller.resume_step()
            controller.prepare_for_training()
            if not interrupt.done:
                break
    assert interrupted > 3
