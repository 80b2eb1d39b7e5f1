"""Planning: what is looked at when states leave, and how much work that is.

Work is counted in instructions of the interpreter, which a busy machine does not change: ten times
the tensors are to take ten times the work, within a quarter.
"""

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import refit  # noqa: E402
from arena import Arena  # noqa: E402
from training import whole_cycle  # noqa: E402

FEW, TIMES = 20, 10
WIDTH = 8
STATES = ("exp_avg", "exp_avg_sq")


class Many:
    """A model of many small parameters, and an AdamW that has stepped."""

    def __init__(self, count: int) -> None:
        weights = [torch.nn.Parameter(torch.ones(WIDTH)) for _ in range(count)]
        self.model = torch.nn.ParameterList(weights)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.fill_grads()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def fill_grads(self) -> None:
        """Gradients that are other tensors than those before."""
        for weight in self.model.parameters():
            weight.grad = torch.ones(WIDTH)

    def moments(self) -> list[Any]:
        return [state[name] for state in self.optimizer.state.values() for name in STATES]


@contextmanager
def counted() -> Iterator[list[int]]:
    """The instructions that the interpreter runs of refit in the block, so far."""
    instructions = [0]

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "call":
            if "refit" not in frame.f_code.co_filename:
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            instructions[0] += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield instructions
    finally:
        sys.settrace(before)


Scene = Callable[[Many, refit.Controller], Any]


def loaded(many: Many, controller: refit.Controller) -> None:
    whole_cycle(controller)
    file = io.BytesIO()
    torch.save(many.optimizer.state_dict(), file)
    file.seek(0)
    many.optimizer.load_state_dict(torch.load(file))


def in_one_buffer(many: Many, _controller: refit.Controller) -> None:
    flat = torch.zeros(2 * len(many.model) * WIDTH)
    parts = iter(flat.split(WIDTH))
    for state in many.optimizer.state.values():
        for name in STATES:
            state[name] = next(parts)


SCENES: dict[str, Scene] = {
    "the first plan": lambda *_: None,
    "steady": lambda _, controller: whole_cycle(controller),
    "fresh gradients": lambda many, controller: (whole_cycle(controller), many.fill_grads()),
    "loaded": loaded,
    # fixes their storages, which are empty: each gets another one
    "arrays": lambda many, controller: (controller.offload(), [t.numpy() for t in many.moments()]),
    "in one buffer": in_one_buffer,
}


def work_of(scene: Scene, count: int, **options: Any) -> int:
    """Instructions of the cycle that comes after a scene."""
    many = Many(count)
    with refit.Controller(many.optimizer, many.model, **options) as controller:
        scene(many, controller)
        with counted() as instructions:
            whole_cycle(controller)
    return instructions[0]


@pytest.mark.parametrize("scene", SCENES.values(), ids=list(SCENES))
def test_a_plan_takes_work_in_proportion_to_the_tensors(scene: Scene) -> None:
    work_of(scene, 1)  # Python 3.13 reports no instructions of a function's first traced call
    few, many = (work_of(scene, count) for count in (FEW, FEW * TIMES))
    assert many <= few * TIMES * 1.25


def test_a_plan_takes_work_in_proportion_to_the_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.UntypedStorage, "resizable", lambda _: True)

    def work(count: int) -> int:
        with Arena(1 << 26) as pool:

            def in_segments(many: Many, _controller: refit.Controller) -> None:
                for state in many.optimizer.state.values():
                    (state["exp_avg"],) = pool.tensors([torch.zeros(WIDTH)])

            found = work_of(in_segments, count, pool=pool)
            pool.give_back()
        return found

    few, many = work(FEW), work(FEW * TIMES)
    assert many <= few * TIMES * 1.25
