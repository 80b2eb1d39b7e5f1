"""The ways for AdamW to step fp32 parameters on the CPU, each in its simplest correct form.

Each way has weights and states of its own, all begin equal and have the same gradients. The loop
over tensors of ``torch.optim.AdamW`` comes first: ``bit_equal`` says which ways have its bits.
"""

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from refit.bench.machine import NotInstalled
from refit.bench.steps import MOMENTS, Model, Tensors
from refit.controller import Controller
from refit.step.schedule import CpuStep

OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


class HostWay(Protocol):
    """One way: its states are made by its first step, or by its constructor."""

    name: str

    def __init__(self, model: Model) -> None: ...

    def step(self) -> None:
        """As ``optimizer.step()``."""

    def held(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights (``"weight"``) and the states, under their names."""

    def close(self) -> None:
        """Gives back what it took."""


class _WithOptimizer:
    """The common part of the ways whose parameters are those of one optimizer."""

    def __init__(self, model: Model) -> None:
        self._parameters = [torch.nn.Parameter(it.clone()) for it in model.weights]
        for parameter, gradient in zip(self._parameters, model.gradients, strict=True):
            parameter.grad = gradient
        self._optimizer = self._made()

    def _made(self) -> torch.optim.Optimizer:
        raise NotImplementedError

    def step(self) -> None:
        self._optimizer.step()

    def held(self) -> Iterator[tuple[str, torch.Tensor]]:
        for parameter in self._parameters:
            yield "weight", parameter.detach()
            for name in MOMENTS:
                yield name, self._optimizer.state[parameter][name]

    def close(self) -> None:
        self._optimizer.state.clear()


class ForLoop(_WithOptimizer):
    """A loop over the tensors, op by op: PyTorch's default on a CPU."""

    name = "torch, for-loop"

    def _made(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self._parameters, foreach=False, **OPTIONS)


class Foreach(_WithOptimizer):
    """Op by op over lists of tensors."""

    name = "torch, foreach"

    def _made(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self._parameters, foreach=True, **OPTIONS)


class Fused(_WithOptimizer):
    """One pass over each tensor."""

    name = "torch, fused"

    def _made(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self._parameters, fused=True, **OPTIONS)


class DeepSpeed(_WithOptimizer):
    """``DeepSpeedCPUAdam``, which a compiler makes on the machine at its first use."""

    name = "DeepSpeedCPUAdam"

    def _made(self) -> torch.optim.Optimizer:
        try:
            with _stdout_to_stderr():
                from deepspeed.ops.adam import DeepSpeedCPUAdam

                made: torch.optim.Optimizer = DeepSpeedCPUAdam(
                    self._parameters, adamw_mode=True, **OPTIONS
                )
        except ImportError as why:
            raise NotInstalled(f"pip install deepspeed ninja ({why})") from why
        except (OSError, RuntimeError) as why:
            raise NotInstalled(f"it was not built: {why}") from why
        return made


class Refit(ForLoop):
    """refit's controller: all parameters are stepped on the CPU, from copies of their gradients,
    and the new ones are copied back, as if they were on a device. With as many threads as PyTorch.
    """

    name = "refit, CpuStep"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._controller = Controller(
            self._optimizer,
            offload_host_step_threads=torch.get_num_threads(),
            schedule=CpuStep(fraction=1.0),
        )

    def close(self) -> None:
        self._controller.close()
        super().close()


class Hybrid:
    """The form of Megatron-Core's ``HybridDeviceOptimizer``: copies of the first parameters, up to
    ``fraction`` of all elements, are stepped on the CPU, from copies of their gradients, and the
    new parameters are copied back. The other parameters are stepped where they are.

    The copies are page-locked where there is a GPU. The CPU's optimizer is ``fused=True``, as
    Megatron makes it; ``device_options`` are those of the other one. Copies of gradients go after
    each other, before the device's step, and those of parameters after the CPU's step, which
    waits for all gradients (``overlap_cpu_optimizer_d2h_h2d=False``, the default).
    """

    def __init__(
        self, parameters: list[torch.nn.Parameter], fraction: float, **device_options: Any
    ) -> None:
        self.parameters = parameters
        count = _first_of(parameters, fraction)
        self._pairs = [(it, _host_copy(it)) for it in parameters[:count]]
        copies, rest = [copy for _, copy in self._pairs], parameters[count:]
        self._host = torch.optim.AdamW(copies, fused=True, **OPTIONS) if copies else None
        self._device = torch.optim.AdamW(rest, **device_options, **OPTIONS) if rest else None

    @property
    def host_elements(self) -> int:
        """Of the parameters that the CPU steps."""
        return sum(copy.numel() for _, copy in self._pairs)

    @torch.no_grad()
    def step(self) -> None:
        for parameter, copy in self._pairs:
            copy.grad = _filled(copy.grad, parameter.grad)
        arrived = _event(self.parameters[0])
        if self._device is not None:
            self._device.step()
        if arrived is not None:
            arrived.synchronize()
        if self._host is not None:
            self._host.step()
        for parameter, copy in self._pairs:
            parameter.copy_(copy, non_blocking=True)

    def state(self, number: int) -> dict[str, torch.Tensor]:
        """Of the parameter with this number."""
        if number < len(self._pairs):
            assert self._host is not None
            found: dict[str, torch.Tensor] = self._host.state[self._pairs[number][1]]
            return found
        assert self._device is not None
        found = self._device.state[self.parameters[number]]
        return found

    def zero_grad(self) -> None:
        """Drops the gradients of the parameters; the copies keep their memory."""
        for it in self.parameters:
            it.grad = None

    def close(self) -> None:
        """Lets go of states and copies."""
        self._pairs.clear()
        self._host = self._device = None


class HybridOnHost:
    """``Hybrid`` with all parameters, whose device is main memory."""

    name = "HybridDeviceOptimizer"

    def __init__(self, model: Model) -> None:
        parameters = [torch.nn.Parameter(it.clone()) for it in model.weights]
        for parameter, gradient in zip(parameters, model.gradients, strict=True):
            parameter.grad = gradient
        self._all = Hybrid(parameters, 1.0)

    def step(self) -> None:
        self._all.step()

    def held(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, parameter in enumerate(self._all.parameters):
            yield "weight", parameter.detach()
            for name in MOMENTS:
                yield name, self._all.state(number)[name]

    def close(self) -> None:
        self._all.close()


class Limit:
    """What the memory gives for the bytes of a step: three loops of PyTorch's with its threads,
    over arrays of all parameters. Together they read four arrays and write three, 28 bytes a
    parameter, as a step does that reads the gradient and reads and writes weight and states.
    """

    def __init__(self, elements: int) -> None:
        self._arrays: Tensors = [torch.ones(elements) for _ in range(4)]

    def __call__(self) -> None:
        gradient, weight, first, second = self._arrays
        first.add_(gradient)
        second.mul_(1.0)
        weight.mul_(1.0)


def _first_of(parameters: list[torch.nn.Parameter], fraction: float) -> int:
    """How many parameters it takes to have this share of the elements: whole ones, rounded up."""
    wanted = fraction * sum(it.numel() for it in parameters)
    count, taken = 0, 0
    while taken < wanted:
        taken += parameters[count].numel()
        count += 1
    return count


def _host_copy(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    copy = parameter.detach().to("cpu", copy=True)
    return torch.nn.Parameter(copy.pin_memory() if parameter.is_cuda else copy)


def _filled(copy: torch.Tensor | None, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """The gradient on the host, in the memory that it had in the last step."""
    if gradient is None:
        return None
    if copy is None:
        copy = torch.empty(gradient.shape, dtype=gradient.dtype, pin_memory=gradient.is_cuda)
    return copy.copy_(gradient, non_blocking=True)


def _event(parameter: torch.nn.Parameter) -> Any:
    """What is over when the work is that was queued by now; None on the CPU, where it is over."""
    if not parameter.is_cuda:
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """DeepSpeed and the compiler that it starts write to stdout, where figures go."""
    sys.stdout.flush()
    kept, shown = os.dup(1), sys.stdout
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        sys.stdout = shown
        os.dup2(kept, 1)
        os.close(kept)


def differing(mine: HostWay, other: HostWay, model: Model) -> float:
    """The share of elements of weights and states whose bits differ.

    RuntimeError if a way has not made the same steps: a tensor that is further from the other's
    than a thousandth of what the steps have changed.
    """
    count = different = 0
    starts = (start for it in model.weights for start in (it, *(None for _ in MOMENTS)))
    for (name, one), (_, two), start in zip(mine.held(), other.held(), starts, strict=True):
        moved = (one if start is None else one - start).norm()
        apart = (two - one).norm()
        if not math.isfinite(apart) or apart > 1e-3 * moved:
            raise RuntimeError(
                f"{other.name}: {name} is {apart:.3g} from that of {mine.name}, whose steps have "
                f"moved it by {moved:.3g}: the figures mean nothing"
            )
        count += one.numel()
        different += int((one.view(torch.int32) != two.view(torch.int32)).sum())
    return different / count


WAYS: tuple[type[HostWay], ...] = (ForLoop, Foreach, Fused, DeepSpeed, HybridOnHost, Refit)
