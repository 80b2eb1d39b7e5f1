"""An AdamW's states leave a GPU and return: by ``refit.Controller``, and as PyTorch loops do it.

All ways move the same states, in turn within each round. Out ends when the states are on the host
and their memory is the driver's again, where another process can take it, but for the way that says
otherwise. Back ends when they are on the device. A third time is that of a step's passes with the
states returning at the same time; beyond the time of the passes alone it is what a step waits.
On the CPU the ways work as well, which is for tests.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch

from refit.bench.device_memory import free_bytes, is_gpu, synchronize
from refit.bench.machine import NotInstalled
from refit.bench.memory import MemoryNeed
from refit.bench.series import Series, both
from refit.bench.states import checksum, shapes
from refit.controller import Controller
from refit.observe import memory_now

ROUNDS_OF_SLOW = 3
LARGE_BYTES = 1 << 29
PASSES_RATE = 25e9
"""The passes take as long as the states at this many bytes a second: twice a link of 50 GB/s."""
FEW = 20
"""Products that are timed to find out how many the passes are."""
NEED = MemoryNeed("offload", 8 * 11, 1 << 30)
"""On the host: a copy for each way, and PyTorch takes page-locked memory in powers of two."""

Tensors = list[torch.Tensor]


class Way(Protocol):
    """It takes its memory in the first round, which is cold."""

    name: str

    def __init__(self, optimizer: torch.optim.Optimizer, states: Tensors) -> None:
        """NotInstalled."""

    is_slow: bool
    """It takes seconds: few rounds are enough."""
    moved: Tensors
    """What leaves and returns: the states, or copies of them in memory of its own."""

    def out(self) -> None:
        """The states leave; returns when they have, and their memory is given back."""

    def begin_back(self) -> None:
        """They begin to return; work that is submitted from now on may use the device."""

    def end_back(self) -> None:
        """What an optimizer's step calls first. Afterwards they are there, in stream order."""

    def close(self) -> None:
        """Gives back what it took."""


def measure(parameters: float, rounds: int, device: str) -> dict[str, Any]:
    """All ways. HostMemoryError if even a small model does not fit the host."""
    fits = NEED.fitting(parameters, memory_now.available_bytes())
    optimizer = _optimizer(fits, device)
    states = [
        state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")
    ]
    nbytes = sum(it.nbytes for it in states)
    passes = Passes(device, nbytes / PASSES_RATE)
    before = checksum(states)
    ways: list[tuple[Way, Figures]] = []
    left_out: dict[str, str] = {}
    try:
        for make in WAYS:
            try:
                ways.append((make(optimizer, states), Figures()))
            except NotInstalled as why:
                left_out[make.name] = str(why)
                continue
            _cold(*ways[-1], passes, device)
            _check(ways[-1][0], before)
        for number in range(rounds):
            passes.alone.add(_timed(device, passes.run))
            for way, figures in ways:
                if not (way.is_slow and number >= ROUNDS_OF_SLOW):
                    _round(way, figures, passes, device)
                    _check(way, before)
    finally:
        for way, _ in reversed(ways):
            way.close()
        _give_back(device)
    return {
        "bench": "gpu_offload",
        "device": torch.cuda.get_device_name(device) if is_gpu(device) else device,
        "parameters": sum(it.numel() for it in states) // 2,
        "tensors": len(states),
        "bytes": nbytes,
        "rounds": rounds,
        "passes_seconds_median": passes.alone.median,
        "left_out": left_out,
        "ways": [figures.row(way.name, nbytes, ways[0][1], passes.alone) for way, figures in ways],
    }


def _optimizer(parameters: float, device: str) -> torch.optim.AdamW:
    """With the states of its first step, in fp32, filled so that each byte counts."""
    weights = [
        torch.nn.Parameter(torch.zeros(shape, device=device)) for _, shape in shapes(parameters)
    ]
    for weight in weights:
        weight.grad = torch.ones(1, device=device).expand(weight.shape)
    optimizer = torch.optim.AdamW(weights, foreach=False)
    optimizer.step()
    optimizer.zero_grad()
    for state in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name].view(torch.int32).random_()
    return optimizer


def _check(way: Way, before: list[int]) -> None:
    if checksum(way.moved) != before:
        raise RuntimeError(f"{way.name}: the states came back changed")


def _give_back(device: str) -> None:
    """What PyTorch keeps of what the ways took, also of page-locked memory where it can."""
    if is_gpu(device):
        torch.cuda.empty_cache()
        getattr(torch._C, "_host_emptyCache", lambda: None)()


class Passes:
    """What a forward and backward pass is here: products of matrices, for about so long."""

    def __init__(self, device: str, seconds: float) -> None:
        width = 4096 if is_gpu(device) else 128
        dtype = torch.bfloat16 if is_gpu(device) else torch.float32
        self._one = torch.ones(width, width, device=device, dtype=dtype)
        self._product = torch.empty_like(self._one)
        self._count = FEW
        self.run()  # whose first call is slow
        self._count = max(1, round(FEW * seconds / _timed(device, self.run)))
        self.alone = Series()
        self.alone.add(_timed(device, self.run))

    def run(self) -> None:
        """Submits them."""
        for _ in range(self._count):
            torch.mm(self._one, self._one, out=self._product)


class Figures:
    """The times of one way, and what it took and gave."""

    def __init__(self) -> None:
        self.out, self.back, self.step = Series(), Series(), Series()
        self.given_back = 0
        self.host_bytes = 0

    def row(self, name: str, nbytes: int, refit: "Figures", alone: Series) -> dict[str, Any]:
        """As a result has it."""
        return {
            "way": name,
            **self.out.figures("out_"),
            **self.back.figures("back_"),
            **self.out.cold_figure("out_"),
            **self.back.cold_figure("back_"),
            "offload_gbps": self.out.gbps(nbytes),
            "restore_gbps": self.back.gbps(nbytes),
            "step_waits_seconds": max(0.0, self.step.median - alone.median),
            "over_refit": both(self.out, self.back).median / both(refit.out, refit.back).median,
            "device_bytes_given_back": self.given_back,
            "host_bytes": self.host_bytes,
        }


def _cold(way: Way, figures: Figures, passes: Passes, device: str) -> None:
    _give_back(device)
    available, free = memory_now.available_bytes(), free_bytes(device)
    figures.out.add(_timed(device, way.out))
    figures.given_back = max(0, free_bytes(device) - free)
    figures.host_bytes = max(0, available - memory_now.available_bytes())
    figures.back.add(_timed(device, lambda: _whole(way)))
    _step(way, figures, passes, device)


def _round(way: Way, figures: Figures, passes: Passes, device: str) -> None:
    """The step comes first: the way before has moved the states to other addresses."""
    _step(way, figures, passes, device)
    figures.out.add(_timed(device, way.out))
    figures.back.add(_timed(device, lambda: _whole(way)))


def _whole(way: Way) -> None:
    way.begin_back()
    way.end_back()


def _step(way: Way, figures: Figures, passes: Passes, device: str) -> None:
    """Passes, during which the states return if the way can do that."""

    def step() -> None:
        way.begin_back()
        passes.run()
        way.end_back()

    way.out()
    figures.step.add(_timed(device, step))


def _timed(device: str, call: Callable[[], None]) -> float:
    """Seconds, with the device waited for at both ends."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


# ---- refit


class RefitWay:
    """The cycle of a training loop: offload, restore, and the wait that a step makes."""

    name = "refit.Controller"
    is_slow = False

    def __init__(self, optimizer: torch.optim.Optimizer, states: Tensors) -> None:
        self._controller = Controller(optimizer)
        self.moved = states
        self.out = self._controller.offload
        self.begin_back = self._controller.restore
        self.end_back = self._controller.wait
        self.close = self._controller.close


# ---- What loops in PyTorch do


class _TorchWay:
    """Each state is copied by itself; its storage is emptied, and filled again."""

    name: str
    is_slow = False
    gives_back = True

    def __init__(self, optimizer: torch.optim.Optimizer, states: Tensors) -> None:
        self.moved = states
        self._device = str(states[0].device)
        self._sizes = [it.untyped_storage().nbytes() for it in states]
        self._saved: Tensors = []

    def out(self) -> None:
        self._saved = self._copies()
        synchronize(self._device)
        for it in self.moved:
            it.untyped_storage().resize_(0)
        if self.gives_back and is_gpu(self._device):
            torch.cuda.empty_cache()

    def _copies(self) -> Tensors:
        """On the host, or on their way there."""
        raise NotImplementedError

    def begin_back(self) -> None:
        for it, size, saved in zip(self.moved, self._sizes, self._saved, strict=True):
            it.untyped_storage().resize_(size)
            it.copy_(saved, non_blocking=True)

    def end_back(self) -> None:
        """The copies are in the order of the stream."""

    def close(self) -> None:
        self._saved = []


class PageableWay(_TorchWay):
    """``.to("cpu")``, one state after the other, as trainers do by default."""

    name = '.to("cpu")'
    is_slow = True

    def _copies(self) -> Tensors:
        self._saved = []
        return [it.to("cpu", copy=True) for it in self.moved]


class NonBlockingWay(_TorchWay):
    """PyTorch takes page-locked memory for it, and keeps that for the next time."""

    name = '.to("cpu", non_blocking=True)'

    def _copies(self) -> Tensors:
        self._saved = []  # whose memory is taken again
        return [it.to("cpu", non_blocking=True, copy=True) for it in self.moved]


class CoalescedWay(_TorchWay):
    """A copy of each state into one page-locked buffer that stays."""

    name = "one page-locked buffer"

    def _copies(self) -> Tensors:
        if not self._saved:
            places = [(size + 511) // 512 * 512 for size in self._sizes]
            on_gpu = is_gpu(self._device)
            buffer = torch.empty(sum(places), dtype=torch.uint8, pin_memory=on_gpu)
            self._saved = [
                part[: it.nbytes].view(it.dtype).view(it.shape)
                for part, it in zip(torch.split(buffer, places), self.moved, strict=True)
            ]
        for saved, it in zip(self._saved, self.moved, strict=True):
            saved.copy_(it, non_blocking=True)
        return self._saved


class KeptWay(CoalescedWay):
    """The same without ``empty_cache``: no other process can have the memory."""

    name = "the same, PyTorch keeps the memory"
    gives_back = False


class LargeWay:
    """The link: as many bytes by large copies between two buffers that stay."""

    name = "one large copy"
    is_slow = False

    def __init__(self, optimizer: torch.optim.Optimizer, states: Tensors) -> None:
        self.moved = states
        self._total = sum(it.untyped_storage().nbytes() for it in states)
        size = min(self._total, LARGE_BYTES)
        device = states[0].device
        self._here = torch.ones(size, dtype=torch.uint8, device=device)
        self._there = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        left = self._total
        while left > 0:
            part = min(left, source.numel())
            to[:part].copy_(source[:part], non_blocking=True)
            left -= part

    def out(self) -> None:
        self._copy(self._there, self._here)

    def begin_back(self) -> None:
        self._copy(self._here, self._there)

    def end_back(self) -> None:
        """The copies are in the order of the stream."""

    def close(self) -> None:
        del self._here, self._there


_TAG = "refit.bench"


class MemorySaverWay:
    """torch_memory_saver pauses and resumes the memory of copies of the states, which takes as much
    of the GPU once more. Its ``hook_mode="torch"`` needs no preloaded library."""

    name = "torch_memory_saver, with a copy on the host"
    is_slow = True

    def __init__(self, optimizer: torch.optim.Optimizer, states: Tensors) -> None:
        if not is_gpu(str(states[0].device)):
            raise NotInstalled("it needs a GPU")
        try:
            from torch_memory_saver import torch_memory_saver
        except ImportError as why:
            raise NotInstalled(f"pip install torch_memory_saver ({why})") from why
        self._saver = torch_memory_saver
        with suppress(AttributeError):  # one that is in use has its mode
            self._saver.hook_mode = "torch"
        with self._saver.region(_TAG, enable_cpu_backup=True):
            self.moved = [it.clone() for it in states]

    def out(self) -> None:
        self._saver.pause(_TAG)

    def begin_back(self) -> None:
        self._saver.resume(_TAG)

    def end_back(self) -> None:
        """The memory has its bytes when it is resumed."""

    def close(self) -> None:
        self.moved = []


WAYS: tuple[type[Way], ...] = (
    RefitWay,
    PageableWay,
    NonBlockingWay,
    CoalescedWay,
    KeptWay,
    LargeWay,
    MemorySaverWay,
)
