"""Planning: what is looked at when states leave, and how much work that is.

Work is counted in instructions of the interpreter, which a busy machine does not change: ten times
the tensors are to take ten times the work, within a quarter.
"""

import ctypes
import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import refit  # noqa: E402
from refit._library import call, lib  # noqa: E402
from refit.memory_pool import MemPool  # noqa: E402
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


class Work:
    """Counts the instructions that the interpreter runs in a block, but those of the test."""

    def __init__(self) -> None:
        self.instructions = 0

    def _trace(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "call":
            if "refit" not in frame.f_code.co_filename:
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            self.instructions += 1
        return self._trace

    @contextmanager
    def counted(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(before)


Scene = Callable[[Many, refit.Controller], None]


def first_plan(_many: Many, _controller: refit.Controller) -> None:
    pass


def steady(_many: Many, controller: refit.Controller) -> None:
    whole_cycle(controller)


def fresh_gradients(many: Many, controller: refit.Controller) -> None:
    whole_cycle(controller)
    many.fill_grads()


def loaded(many: Many, controller: refit.Controller) -> None:
    whole_cycle(controller)
    file = io.BytesIO()
    torch.save(many.optimizer.state_dict(), file)
    file.seek(0)
    many.optimizer.load_state_dict(torch.load(file))


def seen_as_arrays(many: Many, controller: refit.Controller) -> None:
    controller.clear()
    for moment in many.moments():
        moment.numpy()  # fixes its storage, which is empty: each gets another one


def in_one_buffer(many: Many, _controller: refit.Controller) -> None:
    flat = torch.zeros(2 * len(many.model) * WIDTH)
    parts = iter(flat.split(WIDTH))
    for state in many.optimizer.state.values():
        for name in STATES:
            state[name] = next(parts)


def work_of(scene: Scene, count: int, **options: Any) -> int:
    """Instructions of the cycle that comes after a scene."""
    many, work = Many(count), Work()
    with refit.Controller(many.optimizer, many.model, **options) as controller:
        scene(many, controller)
        with work.counted():
            whole_cycle(controller)
    return work.instructions


@pytest.mark.parametrize(
    "scene",
    [first_plan, steady, fresh_gradients, loaded, seen_as_arrays, in_one_buffer],
    ids=lambda scene: scene.__name__,
)
def test_a_plan_takes_work_in_proportion_to_the_tensors(scene: Scene) -> None:
    work_of(scene, 1)  # Python 3.13 reports no instructions of a function's first traced call
    few, many = (work_of(scene, count) for count in (FEW, FEW * TIMES))
    assert many <= few * TIMES * 1.25


def test_a_plan_with_a_pool_takes_work_in_proportion_to_its_segments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.UntypedStorage, "resizable", lambda _: True)

    def work(count: int) -> int:
        with MemPool(torch.device("cpu"), 1 << 26) as pool:
            taken: list[int] = []

            def in_segments(many: Many, _controller: refit.Controller) -> None:
                for state in many.optimizer.state.values():
                    state["exp_avg"] = segment(pool, taken)

            found = work_of(in_segments, count, pool=pool)
            for address in taken:
                call(lib.refit_arena_free, pool._live, address)
        return found

    few, many = work(FEW), work(FEW * TIMES)
    assert many <= few * TIMES * 1.25


def segment(pool: MemPool, taken: list[int]) -> Any:
    """A tensor that is a segment of the pool."""
    address = ctypes.c_void_p()
    call(lib.refit_arena_alloc, pool._live, 4 * WIDTH, ctypes.byref(address))
    assert address.value is not None
    taken.append(address.value)
    memory = (ctypes.c_char * (4 * WIDTH)).from_address(address.value)
    return torch.frombuffer(memory, dtype=torch.float32).zero_()
