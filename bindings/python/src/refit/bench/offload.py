"""States leave and come back: refit's way beside the others, in turn, round by round."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from refit.bench import machine
from refit.bench.cases import Case, Flat, OneCopy, PerTensor, Refit
from refit.bench.series import Series, both, ratio
from refit.bench.states import NEED, adamw_states, checksum
from refit.observe import memory_now

CASES: tuple[Callable[[list[torch.Tensor], bool], Case], ...] = (Refit, PerTensor, Flat, OneCopy)


@dataclass
class Measured:
    """The figures of one way."""

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
    fits = NEED.fitting(parameters, memory_now.available_bytes())
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
    cases: list[Case] = []
    try:
        found = []
        for make in CASES:
            found.append(_first(make, tensors, keep, cases))
        for _ in range(rounds):
            for case, it in zip(cases, found, strict=True):
                _round(case, it)
        for case, it in zip(cases, found, strict=True):
            it.allocations, it.page_faults = _count(case)
        return found
    finally:
        for case in reversed(cases):
            case.close()


def _first(
    make: Callable[[list[torch.Tensor], bool], Case],
    tensors: list[torch.Tensor],
    keep: bool,
    cases: list[Case],
) -> Measured:
    """The cold round, what it takes to get ready included, and the peak of memory in it."""
    resident = machine.status_bytes("VmRSS")
    machine.begin_peak()
    start = time.perf_counter()
    cases.append(make(tensors, keep))
    ready = time.perf_counter() - start
    it = Measured(cases[-1].name)
    _round(cases[-1], it)
    it.out.cold += ready
    it.peak_bytes = max(0, machine.status_bytes("VmHWM") - resident)
    return it


def _round(case: Case, it: Measured) -> None:
    case.ready()
    start = time.perf_counter()
    case.out()
    between = time.perf_counter()
    case.back()
    end = time.perf_counter()
    it.out.add(between - start)
    it.back.add(end - between)


def _count(case: Case) -> tuple[int, int]:
    """Tensors allocated and pages touched for the first time in one more round, not timed."""
    case.ready()
    allocations, faults = case.allocations, machine.page_faults()
    case.out()
    case.back()
    return case.allocations - allocations, machine.page_faults() - faults


def _report(found: list[Measured], nbytes: int) -> list[dict[str, Any]]:
    ours = found[0]
    return [_row(it, ours, nbytes) for it in found]


def _row(it: Measured, ours: Measured, nbytes: int) -> dict[str, Any]:
    cycle = both(it.out, it.back)
    return {
        "way": it.name,
        "offload_gbps": it.out.gbps(nbytes),
        "restore_gbps": it.back.gbps(nbytes),
        **it.out.figures("out_"),
        **it.back.figures("back_"),
        **it.out.cold_figure("out_"),
        **it.back.cold_figure("back_"),
        **cycle.figures("cycle_"),
        "allocations_per_cycle": it.allocations,
        "page_faults_per_cycle": it.page_faults,
        "peak_host_bytes": it.peak_bytes,
        "refit_speedup": ratio(cycle, both(ours.out, ours.back)),
    }
