"""Weights reach 1, 2, 4 and 8 worker processes of this machine: refit beside two others.

A version is timed from the trainer's call until every worker has it whole and has said so. Ways are
measured one after another, since each needs its workers' ears; what they are compared by is the
ratio of medians.
"""

import time
from typing import Any

from refit.bench.memory import MemoryNeed
from refit.bench.series import Series
from refit.bench.states import shapes
from refit.bench.ways import WAYS, Way, Weights, blank, change
from refit.bench.workers import WorkerProcesses
from refit.observe import memory_now

PARAMETERS = 0.12e9
COUNTS = (1, 2, 4, 8)
BYTES_PER_WEIGHT = 2
PROCESS_BYTES = 1 << 28  # Python with torch, before it has any weights
COPIES_PER_WORKER = 3  # a message, what is made of it, and the worker's own


def measure(parameters: float, rounds: int, counts: tuple[int, ...] = COUNTS) -> dict[str, Any]:
    """All ways to each number of workers. HostMemoryError if even a small model does not fit."""
    wanted = min(parameters, PARAMETERS)
    fits = need(counts).fitting(wanted, memory_now.available_bytes())
    weights = blank(dict(shapes(fits)))
    nbytes = sum(it.nbytes for it in weights.values())
    with WorkerProcesses(max(counts)) as processes:
        rows = [row for count in counts for row in _to(processes, count, weights, rounds, nbytes)]
    return {
        "bench": "weights",
        "parameters": sum(it.numel() for it in weights.values()),
        "shortened": fits < wanted,
        "tensors": len(weights),
        "bytes": nbytes,
        "rounds": rounds,
        "ways": rows,
    }


def need(counts: tuple[int, ...]) -> MemoryNeed:
    """The memory for so many workers and the trainer, with as many weights left free."""
    copies = COPIES_PER_WORKER * (max(counts) + 2)
    return MemoryNeed("weights", 2 * BYTES_PER_WEIGHT * copies, (max(counts) + 1) * PROCESS_BYTES)


def _to(
    processes: WorkerProcesses, count: int, weights: Weights, rounds: int, nbytes: int
) -> list[dict[str, Any]]:
    found = {
        (way.name, load): _time(way, processes, count, weights, rounds, load)
        for way in WAYS
        for load in (False, True)
    }
    return [
        {
            "way": way.name,
            "workers": count,
            **_figures(found[way.name, False], found["refit", False], nbytes),
            **{
                f"loaded_{name}": value
                for name, value in _figures(
                    found[way.name, True], found["refit", True], nbytes
                ).items()
            },
        }
        for way in WAYS
    ]


def _figures(it: Series, ours: Series, nbytes: int) -> dict[str, float]:
    return {
        **it.figures(),
        **it.cold_figure(),
        "gbps_per_worker": it.gbps(nbytes),
        "refit_speedup": it.median / ours.median,
    }


def _time(
    make: type[Way],
    processes: WorkerProcesses,
    count: int,
    weights: Weights,
    rounds: int,
    load: bool,
) -> Series:
    """One way: a cold version, and one for each round."""
    for it in weights.values():
        _first_version(it)
    way = make(processes, count, weights, rounds + 1, load)
    series = Series()
    try:
        for _ in range(rounds + 1):
            change(weights)
            start = time.perf_counter()
            way.send(weights)
            series.add(time.perf_counter() - start)
        processes.end(count)
    finally:
        way.close()
    return series


def _first_version(it: Any) -> None:
    """The first element counts versions, and begins at 0 for each way."""
    import torch

    numbers = it.view(torch.int16).view(-1)
    numbers.sub_(numbers[0].clone())
