"""States that live on the host are stepped on the device: refit's way beside the others, in turn.

A round is a few steps of each way, one after the other, so that what a step leaves to be copied
after it has returned is part of the next one's time. In each round large copies of as many bytes
are timed alone as well, in each direction. ``overlap`` is a step's time over the longest of these
and the resident step.
"""

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from refit.bench.cases import OneCopy
from refit.bench.memory import MemoryNeed
from refit.bench.series import Series, ratio
from refit.bench.states import shapes
from refit.bench.steps import WAYS, Model, Way
from refit.observe import memory_now

PARAMETERS = 0.125e9
"""Of the model at most: each way has weights and states of its own."""

STEPS = 3
WINDOWS_IN_STATES = 16
LEAST = 1 << 16
_FLOAT = 4
NEED = MemoryNeed("window", _FLOAT * (2 + 3 * len(WAYS)), 2 << 30)
"""The weights and gradients that all begin with, and weights and two states of each way."""


@dataclass
class Measured:
    """The figures of one way."""

    way: Way
    step: Series = field(default_factory=Series)


def measure(parameters: float, rounds: int) -> dict[str, Any]:
    """Every way. HostMemoryError if even a small model does not fit.

    RuntimeError if a way's weights or states are not those of the resident one.
    """
    wanted = min(parameters, PARAMETERS)
    fits = NEED.fitting(wanted, memory_now.available_bytes())
    model = _model(fits)
    copies = OneCopy([torch.empty(model.nbytes, dtype=torch.uint8, device="meta")], True)
    ways: list[Way] = []
    try:
        for make in WAYS:
            ways.append(make(model))
        found = [Measured(way) for way in ways]
        coming, leaving = _rounds(found, copies, rounds)
        _check(ways)
        return {
            "bench": "window",
            "parameters": sum(it.numel() for it in model.weights),
            "parameters_wanted": int(wanted),
            "shortened": fits < wanted,
            "tensors": 2 * len(model.weights),
            "bytes": model.nbytes,
            "rounds": rounds,
            **coming.figures("copies_in_"),
            **leaving.figures("copies_out_"),
            "ways": _report(found, coming, leaving),
        }
    finally:
        for way in reversed(ways):
            way.close()
        copies.close()


def _model(parameters: float) -> Model:
    made = torch.Generator().manual_seed(7)
    weights = [torch.randn(shape, generator=made) * 0.02 for _, shape in shapes(parameters)]
    gradients = [torch.randn(it.shape, generator=made) * 1e-3 for it in weights]
    states = 2 * sum(it.nbytes for it in weights)
    window = max(LEAST, states // WINDOWS_IN_STATES // LEAST * LEAST)
    return Model(weights, gradients, window)


def _rounds(found: list[Measured], copies: OneCopy, rounds: int) -> tuple[Series, Series]:
    """The first round is cold: it is one step, in which states are made."""
    coming, leaving = Series(), Series()
    for number in range(rounds + 1):
        for it in found:
            it.step.add(_steps(it.way, STEPS if number > 0 else 1))
        for series, copy in ((coming, copies.back), (leaving, copies.out)):
            start = time.perf_counter()
            copy()
            series.add(time.perf_counter() - start)
    return coming, leaving


def _steps(way: Way, count: int) -> float:
    """The mean of so many steps."""
    start = time.perf_counter()
    for _ in range(count):
        way.step()
    return (time.perf_counter() - start) / count


def _check(ways: list[Way]) -> None:
    resident = [it.clone() for it in ways[0].held()]
    for way in ways[1:]:
        pairs = zip(resident, way.held(), strict=True)
        if not all(torch.equal(mine, other) for mine, other in pairs):
            raise RuntimeError(f"{way.name}: other bits than resident: the figures mean nothing")


def _report(found: list[Measured], coming: Series, leaving: Series) -> list[dict[str, Any]]:
    resident = found[0].step
    pairs = zip(resident.seconds, coming.seconds, leaving.seconds, strict=True)
    longest = Series(
        max(resident.cold, coming.cold, leaving.cold), [max(values) for values in pairs]
    )
    slow = next(it.step for it in found if it.way.name == "per tensor, no overlap")
    return [_row(it, resident, longest, slow) for it in found]


def _row(it: Measured, resident: Series, longest: Series, slow: Series) -> dict[str, Any]:
    pairs = zip(it.step.seconds, resident.seconds, strict=True)
    blocked = Series(it.step.cold - resident.cold, [mine - alone for mine, alone in pairs])
    return {
        "way": it.way.name,
        "step_s_median": it.step.median,
        "step_s_p95": it.step.p95,
        "cold_step_s": it.step.cold,
        "blocked_s": blocked.median,
        "in_bytes": it.way.in_bytes,
        "out_bytes": it.way.out_bytes,
        "window_bytes": it.way.window_bytes,
        "peak_device_bytes": it.way.peak_device_bytes,
        "overlap": ratio(it.step, longest),
        "speedup_over_no_overlap": ratio(slow, it.step),
    }
