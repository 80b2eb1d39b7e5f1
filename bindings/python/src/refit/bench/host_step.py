"""Parameters that the CPU steps: refit's way beside those of PyTorch, DeepSpeed and Megatron.

A round is, for each way in turn, one step that is not timed, so that threads and caches are the
way's own, and then some that are. With them go a loop that reads and writes the bytes of a step,
which is what the memory gives. A share of the limit is the time of that loop over the way's. Then
the same bytes are divided into 10 and 100 times as many tensors.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from refit.bench.host_ways import WAYS, HostWay, Limit, differing
from refit.bench.machine import NotInstalled
from refit.bench.memory import MemoryNeed
from refit.bench.series import Series, ratio
from refit.bench.states import shapes
from refit.bench.steps import Model, Tensors
from refit.observe import memory_now

PARAMETERS = 50e6
STEPS = 3
FINER = (1, 10, 100)
"""How many times as many tensors the bytes are divided into."""

BYTES = 28
"""That must move for a parameter: weight and two states in and out, and the gradient in."""

_OF_WAYS, _OF_LIMIT, _AT_ONCE = 120, 16, 16
NEED = MemoryNeed("host_step", _OF_WAYS + _OF_LIMIT + _AT_ONCE, 1 << 30)
"""What all begin with, weights, states and copies of each way, and what an op takes meanwhile."""


@dataclass
class Measured:
    """The figures of one way."""

    way: HostWay
    step: Series = field(default_factory=Series)


def measure(
    parameters: float,
    rounds: int,
    finer: Sequence[int] = FINER,
    tell: Callable[[str], None] = lambda sentence: None,
) -> dict[str, Any]:
    """Every way that is installed; ``tell`` gets a sentence about each other one.

    HostMemoryError if even a small model does not fit. RuntimeError if a way ends elsewhere than
    the loop over tensors.
    """
    fits = NEED.fitting(parameters, memory_now.available_bytes())
    left_out: dict[str, str] = {}
    rows = []
    for times in finer:
        model = _model(fits, times)
        rows += _of_one_model(model, rounds, left_out)
    for name, why in left_out.items():
        tell(f"{name} is left out: {why}")
    return {
        "bench": "host_step",
        "parameters": sum(it.numel() for it in model.weights),
        "parameters_wanted": int(parameters),
        "shortened": fits < parameters,
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "left_out": left_out,
        "ways": rows,
    }


def _model(parameters: float, times: int) -> Model:
    """A decoder's weights, each divided into so many parts, as far as it has elements."""
    made = torch.Generator().manual_seed(7)
    whole = [torch.randn(shape, generator=made) * 0.02 for _, shape in shapes(parameters)]
    weights = [part for it in whole for part in _divided(it, times)]
    return Model(weights, [torch.randn(it.shape, generator=made) * 1e-3 for it in weights])


def _divided(whole: torch.Tensor, times: int) -> Tensors:
    if times == 1:
        return [whole]
    return [part for part in whole.view(-1).tensor_split(times) if part.numel() > 0]


def _of_one_model(model: Model, rounds: int, left_out: dict[str, str]) -> list[dict[str, Any]]:
    ways = _opened(model, left_out)
    try:
        found = [Measured(way) for way in ways]
        limit = _rounds(found, model, rounds)
        return _report(found, limit, model)
    finally:
        for way in reversed(ways):
            way.close()


def _opened(model: Model, left_out: dict[str, str]) -> list[HostWay]:
    ways: list[HostWay] = []
    for make in WAYS:
        try:
            ways.append(make(model))
        except NotInstalled as why:
            left_out[make.name] = str(why)
        except BaseException:
            for way in reversed(ways):
                way.close()
            raise
    return ways


def _rounds(found: list[Measured], model: Model, rounds: int) -> Series:
    """The first round is cold: it is one step, in which states are made. Gives the limit."""
    limit = Series()
    loops = Limit(sum(it.numel() for it in model.weights))
    for number in range(rounds + 1):
        count = STEPS if number > 0 else 1
        for it in found:
            if number > 0:
                it.way.step()
            it.step.add(_mean(it.way.step, count))
        loops()
        limit.add(_mean(loops, count))
    return limit


def _mean(action: Callable[[], None], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        action()
    return (time.perf_counter() - start) / count


def _report(found: list[Measured], limit: Series, model: Model) -> list[dict[str, Any]]:
    loop = found[0].way
    rows = []
    for it in found:
        different = differing(loop, it.way, model)
        row = _row(it.way.name, it.step, found, limit, model)
        rows.append(row | {"bit_equal": different == 0, "different_share": different})
    return rows


def _row(
    name: str, step: Series, found: list[Measured], limit: Series, model: Model
) -> dict[str, Any]:
    elements = sum(it.numel() for it in model.weights)
    rivals = [it.step for it in found if it.way.name in ("torch, fused", "DeepSpeedCPUAdam")]
    return {
        "way": name,
        "tensors": len(model.weights),
        "bytes_per_parameter": BYTES,
        "step_s_median": step.median,
        "step_s_p95": step.p95,
        "cold_step_s": step.cold,
        "parameters_per_s": elements / step.median,
        "share_of_limit": ratio(limit, step),
        "speedup_over_for_loop": ratio(found[0].step, step),
        "speedup_over_faster": ratio(_faster(rivals), step),
        "limit_s_median": limit.median,
    }


def _faster(rivals: list[Series]) -> Series:
    """The fastest of them, by its median."""
    return min(rivals, key=lambda it: it.median)
