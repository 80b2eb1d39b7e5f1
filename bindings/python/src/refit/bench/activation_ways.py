"""The ways for activations to spare device memory, each in its simplest correct form.

A way has a model of its own, whose forward pass it runs; its tensors return in the backward pass by
themselves. All begin with the same weights and have the same tokens, so after a step all
gradients must hold the same bits. On a machine without a GPU "device" and host are both main
memory, and the same cores copy and compute.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from refit.activations.offload import ActivationOffload
from refit.bench.decoder import Decoder
from refit.bench.device_memory import HostMemory

Pairs = list[tuple[torch.Tensor, torch.Tensor]]


class ActivationWay(Protocol):
    """One way."""

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """Of one forward pass."""

    def moved(self) -> tuple[int, int]:
        """Bytes that it has copied out and back since it was made."""

    def left_bytes(self) -> int | None:
        """Of the storages that were off the device at the end of the last forward pass; None: it
        does not count them."""

    def off(self) -> str | None:
        """Why it leaves everything on the device; None if it does not."""

    def close(self) -> None:
        """Gives back what it took."""


class Plain:
    """Nothing leaves; with a checkpointed model, layers are computed again."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._out_bytes = self._back_bytes = 0

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self._model(tokens)
        return made

    def moved(self) -> tuple[int, int]:
        return self._out_bytes, self._back_bytes

    def left_bytes(self) -> int | None:
        return None

    def off(self) -> str | None:
        return None

    def close(self) -> None:
        """Has taken nothing."""


class SaveOnCpu(Plain):
    """The form of ``torch.autograd.graph.save_on_cpu(pin_memory=True)``: each tensor that is saved
    goes to host memory of its own, parameters and views, too, and returns when it is asked for, on
    the caller's stream. PyTorch's own would copy nothing where the device is the CPU.

    With a checkpointed model it is the form of ``gradient_checkpointing_kwargs={"offload": True}``
    of transformers.
    """

    def __init__(self, model: Decoder) -> None:
        super().__init__(model)
        self._host = HostMemory()

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        with saved_tensors_hooks(self._pack, self._unpack):
            return super().loss(tokens)

    def _pack(self, tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
        host = self._host.like(tensor)
        host.copy_(tensor.detach(), non_blocking=True)
        self._out_bytes += tensor.nbytes
        return tensor.device, host

    def _unpack(self, packed: tuple[torch.device, torch.Tensor]) -> torch.Tensor:
        device, host = packed
        self._back_bytes += host.nbytes
        return torch.empty_like(host, device=device).copy_(host, non_blocking=True)


class Copies:
    """Copies one after the other on a stream of their own; where there is none, on a thread."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._thread = None if on_gpu else ThreadPoolExecutor(1)

    def start(self, pairs: Pairs) -> Callable[[], None]:
        """Copies each first tensor into the second one, after what the caller's stream has queued.
        Gives what lets the caller's stream wait for them."""
        if self._stream is None:
            assert self._thread is not None
            ended = self._thread.submit(_copy, pairs)
            return lambda: ended.result()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            _copy(pairs)
            event = self._stream.record_event()
        return lambda: torch.cuda.current_stream().wait_event(event)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()


def _copy(pairs: Pairs) -> None:
    """The list is emptied, so that this thread is not the last that holds a tensor."""
    with torch.no_grad():
        for source, target in pairs:
            target.copy_(source, non_blocking=True)
    pairs.clear()


@dataclass
class Saved:
    """A tensor that a layer has saved: on the device, on the host, or both."""

    group: "Group"
    device: torch.Tensor | None
    host: torch.Tensor | None = None


@dataclass
class Group:
    """What one layer has saved in one forward pass, and what waits for its copies."""

    saved: list[Saved] = field(default_factory=list)
    before: "Group | None" = None
    left: Callable[[], None] | None = None
    came: Callable[[], None] | None = None


class DoubleBuffer(Plain):
    """The form of ms-swift's handler (#7201): what a layer saves is a group. A group leaves while
    the next layer computes, and its memory is given back at the end of that layer; the last one
    stays. In the backward pass the group before the one that is asked for comes meanwhile.

    Each tensor is known by the object that it was packed as: a key that counts tensors, as the
    original has it, gives wrong gradients where it is used again.
    """

    def __init__(self, model: Decoder) -> None:
        super().__init__(model)
        self._host = HostMemory()
        self._device = next(model.parameters()).device
        self._out, self._in = Copies(self._device), Copies(self._device)
        self._kept = {it.untyped_storage().data_ptr() for it in model.parameters()}
        self._group: Group | None = None
        self._hooks: saved_tensors_hooks | None = None
        self._handles = [
            handle
            for number, layer in enumerate(model.layers)
            for handle in (
                layer.register_forward_pre_hook(self._begin),
                layer.register_forward_hook(
                    partial(self._end, number + 1 == len(model.layers)), always_call=True
                ),
            )
        ]

    def _begin(self, layer: nn.Module, inputs: Any) -> None:
        self._group = Group(before=self._group)
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()

    def _end(self, is_last: bool, layer: nn.Module, inputs: Any, output: Any) -> None:
        assert self._hooks is not None
        assert self._group is not None
        self._hooks.__exit__()
        if self._group.before is not None:
            self._give_back(self._group.before)
        if is_last:
            self._group.saved.clear()
            self._group = None
        else:
            self._start_out(self._group)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | Saved:
        if tensor.untyped_storage().data_ptr() in self._kept:
            return tensor
        assert self._group is not None
        made = Saved(self._group, tensor.detach())
        self._group.saved.append(made)
        return made

    def _start_out(self, group: Group) -> None:
        pairs: Pairs = []
        for it in group.saved:
            if it.device is not None:
                it.host = self._host.like(it.device)
                pairs.append((it.device, it.host))
                self._out_bytes += it.device.nbytes
        group.left = self._out.start(pairs)

    def _give_back(self, group: Group) -> None:
        assert group.left is not None
        group.left()
        for it in group.saved:
            it.device = None

    def _unpack(self, packed: torch.Tensor | Saved) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        group = packed.group
        for wanted in (group, group.before):
            if wanted is not None and wanted.came is None and wanted.left is not None:
                wanted.came = self._in.start(list(self._brought(wanted)))
        group.before = None
        if group.came is not None:
            group.came()
        assert packed.device is not None
        made, packed.device = packed.device, None
        return made

    def _brought(self, group: Group) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        for it in group.saved:
            assert it.host is not None
            it.device = torch.empty_like(it.host, device=self._device)
            self._back_bytes += it.host.nbytes
            yield it.host, it.device
        group.saved.clear()  # a group and its tensors would hold each other

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._out.close()
        self._in.close()


class Refit(Plain):
    """refit's offload of activations, which takes ``host_bytes`` of page-locked memory."""

    def __init__(self, model: Decoder, aim: Literal["overlap", "memory"], host_bytes: int) -> None:
        super().__init__(model)
        self._offload = ActivationOffload(model, model.layers, host_bytes=host_bytes, aim=aim)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        with self._offload:
            return super().loss(tokens)

    def moved(self) -> tuple[int, int]:
        figures = self._offload.stats()
        out, back = (figures[f"refit/activation_{way}_bytes_total"] for way in ("out", "in"))
        return int(out), int(back)

    def left_bytes(self) -> int | None:
        return int(self._offload.stats()["refit/activation_left_bytes_last"])

    def off(self) -> str | None:
        return self._offload.off

    def close(self) -> None:
        self._offload.close()


@dataclass(frozen=True)
class Kind:
    """A row of the table; ``make`` takes the model and the bytes that all its layers save."""

    name: str
    make: Callable[[Decoder, int], ActivationWay]
    checkpointed: bool = False


NONE, CHECKPOINT = "none", "checkpoint"
OVERLAP, MEMORY = "refit, aim=overlap", "refit, aim=memory"
KINDS: tuple[Kind, ...] = (
    Kind(NONE, lambda model, _: Plain(model)),
    Kind("save_on_cpu", lambda model, _: SaveOnCpu(model)),
    Kind(CHECKPOINT, lambda model, _: Plain(model), checkpointed=True),
    Kind("checkpoint, save_on_cpu", lambda model, _: SaveOnCpu(model), checkpointed=True),
    Kind("double buffer by layer", lambda model, _: DoubleBuffer(model)),
    Kind(OVERLAP, lambda model, nbytes: Refit(model, "overlap", nbytes)),
    Kind(MEMORY, lambda model, nbytes: Refit(model, "memory", nbytes)),
    Kind(
        "refit, checkpoint", lambda model, nbytes: Refit(model, "memory", nbytes), checkpointed=True
    ),
)
