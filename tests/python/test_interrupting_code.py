"""Code that runs in the middle of a verb, in its thread: a signal handler, a finalizer. Whatever it
does with the states, training is the same to the bit as without refit, or it gets a BusyError."""

import linecache
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import refit
import torch
from refit.errors import BusyError, StateError
from training import Run

PACKAGE = str(Path(refit.__file__).parent) + os.sep
MOST = 20000
"""Lines of one verb; more mean that the test does not end."""


def runs_handlers(frame: FrameType) -> bool:
    """Whether Python may run a handler before the line. It does not between the end of a with block
    and __exit__, nor where a try begins or a constant is returned, where a try has no effect; all
    are traced."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return not line.lstrip().startswith(("with ", "try:", "return True"))


class Handler:
    """Does something once, before a numbered line of refit's Python code, as a signal would."""

    def __init__(self, what: Callable[[], Any], at: int) -> None:
        self.what = what
        self.left = at
        self.done = False

    def __enter__(self) -> "Handler":
        self.before = sys.gettrace()
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self.before)

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line" and not self.done and runs_handlers(frame):
            self.left -= 1
            if self.left == 0:
                self.done = True
                self.what()
        return self.trace


def step(run: Run) -> None:
    """Gradients stay the same objects, so that a plan that holds is not made again."""
    run.optimizer.zero_grad(set_to_none=False)
    run.backward()
    run.optimizer.step()
    run.steps += 1


def assert_same(alone: Run, moved: Run) -> None:
    for a, b in zip(alone.model.parameters(), moved.model.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad)
    for a, b in zip(alone.moments(), moved.moments(), strict=True):
        assert torch.equal(a, b)


def read_checkpoint(run: Run, controller: refit.Controller) -> None:
    with controller.checkpoint() as states:
        assert states["state"]


USES: dict[str, Callable[[Run, refit.Controller], Any]] = {
    "state_dict": lambda run, _: run.optimizer.state_dict(),
    "use": lambda run, _: [float(one.sum()) for one in run.moments()],
    "use a gradient": lambda run, _: run.optimizer.zero_grad(set_to_none=False),
    "restore": lambda _, controller: controller.restore(),
    "restore and wait": lambda _, controller: controller.restore(non_blocking=False),
    "clear": lambda _, controller: controller.clear(),
    "release": lambda _, controller: controller.release(),
    "checkpoint": read_checkpoint,
    "accumulating": lambda _, controller: controller.accumulating,
}

REFUSALS = (BusyError, StateError)
"""StateError: join, release or the checkpoint's lease, asked of states that are away."""


def try_it(handler: Callable[[], Any]) -> Callable[[], None]:
    """What a handler that lets nothing pass does."""

    def tried() -> None:
        with suppress(REFUSALS):
            handler()

    return tried


@pytest.mark.parametrize("caught", [False, True], ids=["raises", "catches"])
@pytest.mark.parametrize("verb", ["clear", "restore", "prepare_for_training"])
@pytest.mark.parametrize("use", list(USES))
def test_a_handler_before_any_line_of_a_verb_loses_nothing(
    use: str, verb: str, caught: bool
) -> None:
    alone, moved = Run(), Run()
    step(alone), step(moved)
    refused = 0
    with refit.Controller(moved.optimizer, moved.model) as controller:

        def what() -> None:
            USES[use](moved, controller)

        for at in range(1, MOST):
            if verb != "clear":
                controller.clear()
            handler = Handler(try_it(what) if caught else what, at)
            try:
                with handler:
                    getattr(controller, verb)()
            except REFUSALS:
                between = use == "clear" and verb == "prepare_for_training"  # restore() and join()
                assert handler.done
                assert between or not caught
                refused += 1
                getattr(controller, verb)()  # what it broke off goes on
            if verb == "clear" and at % 2:
                controller.clear()
                controller.restore()
            step(alone), step(moved)
            assert_same(alone, moved)
            if not handler.done:
                break
        else:
            pytest.fail("a verb never ends")
    assert at > 20
    assert caught or use == "accumulating" or refused > 0


@pytest.mark.parametrize("swapped", [True, False], ids=["swap_tensors", "as_subclass"])
def test_a_tensor_that_got_the_class_of_one_that_is_away_can_be_used(swapped: bool) -> None:
    run = Run()
    step(run)
    with refit.Controller(run.optimizer, run.model) as controller:
        state = run.moments()[0]
        value = state.clone()
        controller.clear()
        other = torch.ones(state.shape)
        if swapped:
            torch.utils.swap_tensors(state, other)
        else:
            other = other.as_subclass(type(state))
        controller.restore()
        controller.join()
        assert type(other) is not torch.Tensor
        assert torch.equal(torch.stack([other, other])[0], value if swapped else other)
        assert type(other) is torch.Tensor


def test_a_tensor_that_does_not_come_back_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    step(run)
    with refit.Controller(run.optimizer, run.model) as controller:
        controller.clear()
        state = run.moments()[0]
        with monkeypatch.context() as patch:
            patch.setattr(controller._cycle._absence, "bring_back", lambda: None)
            with pytest.raises(StateError, match="did not come back"):
                state.sum()
        controller.restore()


def test_storages_that_nothing_holds_do_not_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    step(run)
    with refit.Controller(run.optimizer, run.model) as controller:
        cycle = controller._cycle
        guard = cycle._guard

        def forget() -> None:
            guard()
            for regions in cycle.per_device:
                regions.forget()

        with monkeypatch.context() as patch:
            patch.setattr(cycle, "_guard", forget)
            with pytest.raises(StateError, match="0 are held"):
                controller.clear()
        assert controller.state == "training"
        controller.clear()
        assert run.away()


def test_a_phase_that_does_not_tell_what_is_away_is_refused() -> None:
    run = Run()
    step(run)
    with refit.Controller(run.optimizer, run.model) as controller:
        controller.clear()
        controller._cycle.phase = "training"
        with pytest.raises(refit.RefitError):
            controller.clear()
        controller._cycle.phase = "cleared"
