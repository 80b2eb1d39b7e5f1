"""The memory of a training step as text, without and with activations that leave the device.

device memory of a training step (MB)
             without                           with activations that leave
   forward |   1.20 ##                       |   2.00 ###
           |   4.37 #######                  |   5.17 #########
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise

import refit
import torch
from refit.bench.device_memory import DeviceMemory, storage_bytes

SLICES, LABEL, BAR = 8, 10, 24


def memory_picture(
    model: torch.nn.Module,
    loss_of: Callable[[], torch.Tensor],
    activations: refit.ActivationOffload,
) -> list[str]:
    """A line with two bars for each slice of the forward and of the backward pass: the most that
    the device held in it. Two steps are made, which leave no gradient and change no weight."""
    columns = [slices_of(model, loss_of, block) for block in (nullcontext(), activations)]
    most = max(map(max, columns))
    lines = [
        "device memory of a training step (MB)",
        f"{'':{LABEL + 3}}{'without':{BAR + 10}}with activations that leave",
    ]
    for number, pair in enumerate(zip(*columns, strict=True)):
        label = {0: "forward", SLICES: "backward"}.get(number, "")
        bars = (f"| {held / 1e6:6.2f} {'#' * round(BAR * held / most):{BAR}}" for held in pair)
        lines.append(f"{label:>{LABEL}} {' '.join(bars)}".rstrip())
    peaks = " -> ".join(f"{max(column) / 1e6:.2f}" for column in columns)
    off = f"; off: {activations.off}" if activations.off else ""
    return [*lines, f"{'peak':>{LABEL}}   {peaks}{off}"]


def slices_of(
    model: torch.nn.Module,
    loss_of: Callable[[], torch.Tensor],
    block: AbstractContextManager[object],
) -> list[int]:
    """The most bytes in each slice: so many of the allocations and frees of a pass."""
    model.zero_grad(set_to_none=True)
    device = next(model.parameters()).device
    with DeviceMemory(device, storage_bytes(*model.parameters())) as memory:
        with block:
            loss = loss_of()
        turns = memory.seconds()
        loss.backward()
        del loss
    model.zero_grad(set_to_none=True)
    passes: tuple[list[int], list[int]] = ([], [])
    for at, held in memory.points:
        passes[at > turns].append(held)
    return [max(one) for held in passes for one in divided(held)]


def divided(values: list[int]) -> list[list[int]]:
    """SLICES parts of about equal length."""
    ends = [len(values) * number // SLICES for number in range(SLICES + 1)]
    return [values[start:end] for start, end in pairwise(ends)]
