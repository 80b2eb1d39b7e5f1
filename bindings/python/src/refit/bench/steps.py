"""The ways for AdamW to step states that live on the host, each in its simplest correct form.

On a machine without a GPU "device" and host are both main memory, and the same cores copy and do
the arithmetic. Each way has weights and states of its own, all begin equal and have the same
gradients, so after as many steps all must hold the same bits.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.optim.adamw import adamw

from refit.controller import Controller
from refit.step.schedule import HostStates

Tensors = list[torch.Tensor]

OPTIONS: dict[str, Any] = {"lr": 1e-6, "weight_decay": 0.01, "eps": 1e-8}
BETAS = (0.9, 0.999)
MOMENTS = ("exp_avg", "exp_avg_sq")
WINDOWS = 3


@dataclass(frozen=True)
class Model:
    """What every way begins with. ``gradients`` are read by all of them, and never written."""

    weights: Tensors
    gradients: Tensors
    window_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the states: two for each weight, of its type."""
        return sum(len(MOMENTS) * it.nbytes for it in self.weights)


class Way(Protocol):
    """One way: its states are made by its first step. Bytes are those of one step."""

    name: str
    in_bytes: int
    out_bytes: int
    window_bytes: int  # memory for states on the device that it was told to take
    peak_device_bytes: int  # that it took

    def __init__(self, model: Model) -> None: ...

    def step(self) -> None:
        """As ``optimizer.step()``: bytes may still be on their way out when it returns."""

    def held(self) -> Iterator[torch.Tensor]:
        """The weights and the states, when every byte is back."""

    def close(self) -> None:
        """Gives back what it took."""


class WithOptimizer:
    """The common part of the ways that call the step of ``torch.optim.AdamW``."""

    in_bytes = out_bytes = window_bytes = peak_device_bytes = 0

    def __init__(self, model: Model) -> None:
        self._parameters = [torch.nn.Parameter(it.clone()) for it in model.weights]
        for parameter, gradient in zip(self._parameters, model.gradients, strict=True):
            parameter.grad = gradient
        self._optimizer = torch.optim.AdamW(self._parameters, betas=BETAS, fused=True, **OPTIONS)

    def step(self) -> None:
        self._optimizer.step()

    def held(self) -> Iterator[torch.Tensor]:
        for parameter in self._parameters:
            yield parameter.detach()
            for name in MOMENTS:
                yield self._optimizer.state[parameter][name]

    def close(self) -> None:
        self._optimizer.state.clear()


class Resident(WithOptimizer):
    """The states stay on the device: nothing travels."""

    name = "resident"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.peak_device_bytes = model.nbytes


class Host(WithOptimizer):
    """refit's controller, with ``HostStates``."""

    name = "refit, HostStates"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._controller = Controller(
            self._optimizer,
            schedule=HostStates(window_bytes=model.window_bytes, windows=WINDOWS, prefetch=False),
        )
        self.window_bytes = WINDOWS * model.window_bytes

    def step(self) -> None:
        super().step()
        figures = self._controller.stats()
        self.in_bytes = int(figures["refit/step_in_bytes"])
        self.out_bytes = int(figures["refit/step_out_bytes"])
        self.peak_device_bytes = max(self.peak_device_bytes, int(figures["refit/window_bytes"]))

    def close(self) -> None:
        self._controller.close()
        super().close()


class _Own:
    """The common part of the ways that keep two moments on the host and copy them by themselves."""

    in_bytes = out_bytes = window_bytes = peak_device_bytes = 0

    def __init__(self, model: Model) -> None:
        self._weights = [it.clone() for it in model.weights]
        self._gradients = model.gradients
        self._moments = [[torch.zeros_like(it) for _ in MOMENTS] for it in model.weights]
        self._steps = [torch.zeros(()) for _ in model.weights]

    def _arithmetic(self, numbers: Sequence[int], moments: Sequence[Tensors]) -> None:
        """PyTorch's own, of some parameters, on these moments of theirs."""
        beta1, beta2 = BETAS
        adamw(
            [self._weights[number] for number in numbers],
            [self._gradients[number] for number in numbers],
            [first for first, _ in moments],
            [second for _, second in moments],
            [],
            [self._steps[number] for number in numbers],
            fused=True, amsgrad=False, maximize=False, beta1=beta1, beta2=beta2, **OPTIONS,
        )  # fmt: skip

    def held(self) -> Iterator[torch.Tensor]:
        for weight, moments in zip(self._weights, self._moments, strict=True):
            yield weight
            yield from moments

    def _take(self, nbytes: int) -> torch.Tensor:
        """Device memory, kept as a caching allocator keeps it."""
        self.window_bytes += nbytes
        self.peak_device_bytes += nbytes
        return torch.empty(nbytes, dtype=torch.uint8)

    def close(self) -> None:
        self._moments.clear()


def _laid_out(memory: torch.Tensor, likes: Sequence[torch.Tensor]) -> Tensors:
    """Tensors of these types and shapes, one after the other in ``memory``."""
    made, at = [], 0
    for like in likes:
        made.append(memory[at : at + like.nbytes].view(like.dtype).view(like.shape))
        at += _aligned(like.nbytes)
    return made


def _aligned(nbytes: int) -> int:
    return (nbytes + 511) // 512 * 512


def _need(moments: Sequence[torch.Tensor]) -> int:
    return sum(_aligned(it.nbytes) for it in moments)


class PerTensor(_Own):
    """xtuner's form (``SwapAdamW``): for each parameter its states in, the step, the states out."""

    name = "per tensor, no overlap"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._memory = self._take(max(map(_need, self._moments)))

    def step(self) -> None:
        self.in_bytes = self.out_bytes = 0
        for number, kept in enumerate(self._moments):
            visiting = _laid_out(self._memory, kept)
            for here, there in zip(visiting, kept, strict=True):
                here.copy_(there)
                self.in_bytes += there.nbytes
            self._arithmetic([number], [visiting])
            for here, there in zip(visiting, kept, strict=True):
                there.copy_(here)
                self.out_bytes += there.nbytes


class TwoSlots(_Own):
    """Megatron's form (``--chunked-optimizer-state-offload``): whole parameters in two slots. One
    chunk is stepped while the one before leaves and the next comes; a slot is one or the other's.

    Two threads stand for the two streams of copies that a GPU would have.
    """

    name = "two slots"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        room = max(model.window_bytes, *map(_need, self._moments))
        self._slots = [self._take(room) for _ in range(2)]
        self._chunks = list(self._divided(room))
        self._in, self._out = (ThreadPoolExecutor(1) for _ in range(2))

    def _divided(self, room: int) -> Iterator[list[int]]:
        chunk: list[int] = []
        left = room
        for number, moments in enumerate(self._moments):
            if chunk and _need(moments) > left:
                yield chunk
                chunk, left = [], room
            chunk.append(number)
            left -= _need(moments)
        yield chunk

    def step(self) -> None:
        self.in_bytes = self.out_bytes = 0
        leaving: Future[None] | None = None
        coming = self._in.submit(self._come, 0)
        for number, chunk in enumerate(self._chunks):
            visiting = coming.result()
            if leaving is not None:
                leaving.result()
            if number + 1 < len(self._chunks):
                coming = self._in.submit(self._come, number + 1)
            self._arithmetic(chunk, visiting)
            leaving = self._out.submit(self._leave, chunk, visiting)
        if leaving is not None:
            leaving.result()

    def _come(self, number: int) -> list[Tensors]:
        chunk = self._chunks[number]
        kept = [it for one in chunk for it in self._moments[one]]
        visiting = _laid_out(self._slots[number % 2], kept)
        for here, there in zip(visiting, kept, strict=True):
            here.copy_(there)
            self.in_bytes += there.nbytes
        pairs = iter(visiting)
        return [list(pair) for pair in zip(pairs, pairs, strict=True)]

    def _leave(self, chunk: list[int], visiting: list[Tensors]) -> None:
        for number, moments in zip(chunk, visiting, strict=True):
            for here, there in zip(moments, self._moments[number], strict=True):
                there.copy_(here)
                self.out_bytes += there.nbytes

    def close(self) -> None:
        self._in.shutdown()
        self._out.shutdown()
        super().close()


class Sharded:
    """FSDP2's form (``CPUOffloadPolicy``), of one rank: weights and states live on the host, and
    are stepped there by the processor. No state travels; weights do, outside the step.

    The host memory is pageable here: FSDP2 locks pages only where there is a GPU.
    """

    name = "FSDP2, CPUOffloadPolicy"
    in_bytes = out_bytes = window_bytes = peak_device_bytes = 0

    def __init__(self, model: Model) -> None:
        import torch.distributed as distributed
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
        from torch.distributed.tensor import DTensor

        distributed.init_process_group("gloo", store=_store(), rank=0, world_size=1)
        self._module = torch.nn.Module()
        for number, weight in enumerate(model.weights):
            self._module.register_parameter(str(number), torch.nn.Parameter(weight.clone()))
        policy = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        fully_shard(self._module, mesh=init_device_mesh("cpu", (1,)), offload_policy=policy)
        for parameter, gradient in zip(self._module.parameters(), model.gradients, strict=True):
            assert isinstance(parameter, DTensor)
            parameter.grad = DTensor.from_local(
                gradient, parameter.device_mesh, parameter.placements, run_check=False
            )
        self._optimizer = torch.optim.AdamW(
            self._module.parameters(), betas=BETAS, fused=True, **OPTIONS
        )

    def step(self) -> None:
        self._optimizer.step()

    def held(self) -> Iterator[torch.Tensor]:
        for parameter in self._module.parameters():
            yield _local(parameter)
            for name in MOMENTS:
                yield _local(self._optimizer.state[parameter][name])

    def close(self) -> None:
        import torch.distributed as distributed

        self._optimizer.state.clear()
        distributed.destroy_process_group()


def _store() -> Any:
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    return HashStore()


def _local(tensor: Any) -> torch.Tensor:
    made: torch.Tensor = tensor.detach().to_local()
    return made


WAYS: tuple[type[Way], ...] = (Resident, Host, PerTensor, TwoSlots, Sharded)
