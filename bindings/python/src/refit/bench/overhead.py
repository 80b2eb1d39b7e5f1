"""What a cycle costs besides moving bytes: many tiny tensors, through the whole controller.

Four figures of one run: the cycle with hardly a tensor, the cycle with many, of this the time in
which refit's C copies, and of this what freeing and allocating the same storages costs torch alone.
The rest is Python's.
"""

import time
from typing import Any

import torch

from refit.bench.series import Series
from refit.controller import Controller

TENSORS = 4000
ELEMENTS = 16
FEW = 2


def measure(rounds: int, tensors: int = TENSORS) -> dict[str, Any]:
    """A cycle with ``tensors`` states of 64 bytes, and one with two."""
    few, _, _ = _cycles(FEW, rounds)
    many, copies, storages = _cycles(tensors, rounds)
    per_tensor = (many.median - few.median) / (tensors - FEW) * 1e6
    in_c, in_torch = copies.median / tensors * 1e6, storages.median / tensors * 1e6
    return {
        "bench": "overhead",
        "tensors": tensors,
        "rounds": rounds,
        "cycle_ms_with_two_tensors": few.median * 1e3,
        "cycle_ms_median": many.median * 1e3,
        "cycle_ms_p95": many.p95 * 1e3,
        "us_per_tensor": per_tensor,
        "us_per_tensor_in_c_copies": in_c,
        "us_per_tensor_in_torch_storages": in_torch,
        "us_per_tensor_in_python": per_tensor - in_c - in_torch,
    }


def _optimizer(states: int) -> torch.optim.Optimizer:
    weights = [torch.nn.Parameter(torch.zeros(ELEMENTS)) for _ in range(states // 2)]
    for weight in weights:
        weight.grad = torch.ones(ELEMENTS)
    made = torch.optim.AdamW(weights)
    made.step()
    made.zero_grad(set_to_none=True)
    return made


def _cycles(states: int, rounds: int) -> tuple[Series, Series, Series]:
    """Whole cycles, the copies in them, and the storages alone, in turn."""
    cycle, copies, storages = Series(), Series(), Series()
    optimizer = _optimizer(states)
    moments = [it[name] for it in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    with Controller(optimizer, device="host") as controller:
        for _ in range(rounds + 1):
            start = time.perf_counter()
            controller.clear()
            controller.restore()
            controller.join()
            cycle.add(time.perf_counter() - start)
            stats = controller.stats()
            copies.add(stats["refit/offload_s"] + stats["refit/restore_s"])
    for _ in range(rounds + 1):
        storages.add(_storages_alone(moments))
    return cycle, copies, storages


def _storages_alone(tensors: list[torch.Tensor]) -> float:
    found = [it.untyped_storage() for it in tensors]
    start = time.perf_counter()
    for it in found:
        it.resize_(0)
    for it in found:
        it.resize_(ELEMENTS * 4)
    return time.perf_counter() - start
