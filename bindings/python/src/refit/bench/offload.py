"""States leave and come back: refit's way beside the others, in turn, round by round."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from refit.bench import machine
from refit.bench.arms import Arm, Flat, OneCopy, PerTensor, Refit
from refit.bench.series import Series, both, ratio
from refit.bench.states import ROOM, adamw_states, checksum

ARMS: tuple[Callable[[list[torch.Tensor], bool], Arm], ...] = (Refit, PerTensor, Flat, OneCopy)


@dataclass
class Measured:
    """What one way took."""

    name: str
    out: Series = field(default_factory=Series)
    back: Series = field(default_factory=Series)
    allocations: int = 0
    page_faults: int = 0
    peak_bytes: int = 0


def measure(parameters: float, rounds: int) -> dict[str, Any]:
    """All ways with storages kept, then with storages freed and allocated again.

    HostMemoryError if even a small model does not fit.
    """
    fits = ROOM.fitting(parameters, machine.available_bytes())
    tensors = adamw_states(fits)
    nbytes = sum(it.nbytes for it in tensors)
    before = checksum(tensors)
    modes = {
        name: _mode(tensors, keep, rounds)
        for name, keep in (("kept", True), ("re-allocated", False))
    }
    if checksum(tensors) != before:
        raise RuntimeError("the states came back changed: these figures mean nothing")
    return {
        "bench": "offload",
        "parameters": sum(it.numel() for it in tensors) // 2,
        "parameters_wanted": int(parameters),
        "shortened": fits < parameters,
        "tensors": len(tensors),
        "bytes": nbytes,
        "rounds": rounds,
        "storages": {name: _report(found, nbytes) for name, found in modes.items()},
    }


def _mode(tensors: list[torch.Tensor], keep: bool, rounds: int) -> list[Measured]:
    arms: list[Arm] = []
    try:
        found = []
        for make in ARMS:
            found.append(_first(make, tensors, keep, arms))
        for _ in range(rounds):
            for arm, it in zip(arms, found, strict=True):
                _round(arm, it)
        for arm, it in zip(arms, found, strict=True):
            it.allocations, it.page_faults = _count(arm)
        return found
    finally:
        for arm in reversed(arms):
            arm.close()


def _first(
    make: Callable[[list[torch.Tensor], bool], Arm],
    tensors: list[torch.Tensor],
    keep: bool,
    arms: list[Arm],
) -> Measured:
    """The cold round, what it takes to get ready included, and the peak of memory in it."""
    resident = machine.status_bytes("VmRSS")
    machine.begin_peak()
    start = time.perf_counter()
    arms.append(make(tensors, keep))
    ready = time.perf_counter() - start
    it = Measured(arms[-1].name)
    _round(arms[-1], it)
    it.out.cold += ready
    it.peak_bytes = max(0, machine.status_bytes("VmHWM") - resident)
    return it


def _round(arm: Arm, it: Measured) -> None:
    arm.ready()
    start = time.perf_counter()
    arm.out()
    between = time.perf_counter()
    arm.back()
    end = time.perf_counter()
    it.out.add(between - start)
    it.back.add(end - between)


def _count(arm: Arm) -> tuple[int, int]:
    """Tensors allocated and pages touched for the first time in one more round, not timed."""
    arm.ready()
    allocations, faults = arm.allocations, machine.page_faults()
    arm.out()
    arm.back()
    return arm.allocations - allocations, machine.page_faults() - faults


def _report(found: list[Measured], nbytes: int) -> list[dict[str, Any]]:
    ours = found[0]
    return [_row(it, ours, nbytes) for it in found]


def _row(it: Measured, ours: Measured, nbytes: int) -> dict[str, Any]:
    cycle = both(it.out, it.back)
    return {
        "way": it.name,
        "offload_gbps": it.out.gbps(nbytes),
        "restore_gbps": it.back.gbps(nbytes),
        "out_seconds_median": it.out.median,
        "out_seconds_p95": it.out.p95,
        "back_seconds_median": it.back.median,
        "back_seconds_p95": it.back.p95,
        "cold_out_seconds": it.out.cold,
        "cold_back_seconds": it.back.cold,
        "cycle_seconds_median": cycle.median,
        "cycle_seconds_p95": cycle.p95,
        "allocations_per_cycle": it.allocations,
        "page_faults_per_cycle": it.page_faults,
        "peak_host_bytes": it.peak_bytes,
        "refit_speedup": ratio(cycle, both(ours.out, ours.back)),
    }
