"""The cost of a cycle besides moving bytes: many tiny tensors, through the whole controller.

Seconds on the clock, and processor time of the thread that calls, which other work on the machine
does not change: copies are made by refit's own threads, so this is the Python side, with the calls
into C and, told apart, what freeing and allocating the same storages costs torch alone.

Then what a plan costs, for models of more and more tensors: the first one, one with gradients that
were not there before, one after ``load_state_dict``, and a cycle in which the plan holds. All with
a new optimizer and a new controller in each round.
"""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from refit.bench.series import Series
from refit.controller import Controller

TENSORS = 4000
PLANNED = (1_000, 10_000, 100_000)
MOST_ROUNDS = 5  # of plans: each makes a new optimizer
ELEMENTS = 16
FEW = 2


def measure(
    rounds: int, tensors: int = TENSORS, planned: Sequence[int] = PLANNED
) -> dict[str, Any]:
    """A cycle with ``tensors`` states of 64 bytes, and one with two; and plans for ``planned``."""
    few, many = _cycles(FEW, rounds), _cycles(tensors, rounds)
    storages = many.storages.median / tensors * 1e6
    processor = (many.processor.median - few.processor.median) / (tensors - FEW) * 1e6
    return {
        "bench": "overhead",
        "tensors": tensors,
        "rounds": rounds,
        "cycle_ms_with_two_tensors": few.clock.median * 1e3,
        "processor_ms_with_two_tensors": few.processor.median * 1e3,
        "cycle_ms_median": many.clock.median * 1e3,
        "cycle_ms_p95": many.clock.p95 * 1e3,
        "us_per_tensor": (many.clock.median - few.clock.median) / (tensors - FEW) * 1e6,
        "processor_us_per_tensor": processor,
        "processor_us_per_tensor_in_torch_storages": storages,
        "processor_us_per_tensor_in_python": processor - storages,
        "plans": [row for count in planned for row in _plans(count, rounds)],
    }


@dataclass
class Times:
    """Cycles on the clock, in the caller's processor time, and the storages alone in that."""

    clock: Series = field(default_factory=Series)
    processor: Series = field(default_factory=Series)
    storages: Series = field(default_factory=Series)


def _optimizer(states: int) -> torch.optim.Optimizer:
    weights = [torch.nn.Parameter(torch.zeros(ELEMENTS)) for _ in range(states // 2)]
    for weight in weights:
        weight.grad = torch.ones(ELEMENTS)
    made = torch.optim.AdamW(weights)
    made.step()
    made.zero_grad(set_to_none=True)
    return made


def _cycles(states: int, rounds: int) -> Times:
    """Whole cycles, and then as often the storages alone."""
    found = Times()
    optimizer = _optimizer(states)
    moments = [it[name] for it in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    with Controller(optimizer, device="host") as controller:
        for _ in range(rounds + 1):
            start, busy = time.perf_counter(), time.thread_time()
            controller.offload()
            controller.restore()
            controller.wait()
            found.clock.add(time.perf_counter() - start)
            found.processor.add(time.thread_time() - busy)
    for _ in range(rounds + 1):
        found.storages.add(_storages_alone(moments))
    return found


def _plans(states: int, rounds: int) -> Iterator[dict[str, Any]]:
    """A row for each scene, in microseconds for each tensor that leaves."""
    found: dict[str, tuple[int, Times]] = {}
    for _ in range(min(rounds, MOST_ROUNDS) + 1):
        for scene, leaving, clock, processor in _scenes(states):
            times = found.setdefault(scene, (leaving, Times()))[1]
            times.clock.add(clock)
            times.processor.add(processor)
    for scene, (leaving, times) in found.items():
        yield {
            "tensors": states,
            "scene": scene,
            "leaving": leaving,
            "us_per_tensor_median": times.clock.median / leaving * 1e6,
            "us_per_tensor_p95": times.clock.p95 / leaving * 1e6,
            "processor_us_per_tensor_median": times.processor.median / leaving * 1e6,
            "processor_us_per_tensor_p95": times.processor.p95 / leaving * 1e6,
        }


def _scenes(states: int) -> Iterator[tuple[str, int, float, float]]:
    """Names, tensors that leave, seconds on the clock and of the caller's processor time."""
    optimizer = _optimizer(states)
    weights = optimizer.param_groups[0]["params"]
    with Controller(optimizer) as controller:

        def cycle() -> None:
            controller.offload()
            controller.prepare_for_training()

        yield "first plan", states, *_timed(controller.offload)
        cycle()
        yield "steady cycle", states, *_timed(cycle)
        for weight in weights:
            weight.grad = torch.ones(ELEMENTS)
        yield "plan with fresh gradients", states + len(weights), *_timed(controller.offload)
        controller.prepare_for_training()
        optimizer.zero_grad(set_to_none=True)
        cycle()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        yield "plan after a load", states, *_timed(controller.offload)
        controller.prepare_for_training()


def _timed(action: Callable[[], None]) -> tuple[float, float]:
    start, busy = time.perf_counter(), time.thread_time()
    action()
    return time.perf_counter() - start, time.thread_time() - busy


def _storages_alone(tensors: list[torch.Tensor]) -> float:
    found = [it.untyped_storage() for it in tensors]
    start = time.thread_time()
    for it in found:
        it.resize_(0)
    for it in found:
        it.resize_(ELEMENTS * 4)
    return time.thread_time() - start
