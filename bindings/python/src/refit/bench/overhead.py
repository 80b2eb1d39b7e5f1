"""What a cycle costs besides moving bytes: many tiny tensors, through the whole controller.

Seconds on the clock, and processor time of the thread that calls, which other work on the machine
does not change: copies are made by refit's own threads, so this is the Python side, with the calls
into C and, told apart, what freeing and allocating the same storages costs torch alone.
"""

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from refit.bench.series import Series
from refit.controller import Controller

TENSORS = 4000
ELEMENTS = 16
FEW = 2


def measure(rounds: int, tensors: int = TENSORS) -> dict[str, Any]:
    """A cycle with ``tensors`` states of 64 bytes, and one with two."""
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
            controller.clear()
            controller.restore()
            controller.join()
            found.clock.add(time.perf_counter() - start)
            found.processor.add(time.thread_time() - busy)
    for _ in range(rounds + 1):
        found.storages.add(_storages_alone(moments))
    return found


def _storages_alone(tensors: list[torch.Tensor]) -> float:
    found = [it.untyped_storage() for it in tensors]
    start = time.thread_time()
    for it in found:
        it.resize_(0)
    for it in found:
        it.resize_(ELEMENTS * 4)
    return time.thread_time() - start
