"""Training steps whose activations leave or are computed again: time, and peak of device memory.

A decoder's forward and backward pass, without an optimizer, at several batches and lengths. In a
round every way makes one step, in turn; the first step of a way is cold, and two more are not
timed, since refit measures in them. Then each way is made anew, and makes three steps while the
device's memory is recorded. All gradients must have the bits of those of the plain step.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from refit.bench.activation_ways import (
    CHECKPOINT,
    KINDS,
    MEMORY,
    OVERLAP,
    ActivationWay,
    Kind,
)
from refit.bench.decoder import Decoder, Sizes, tokens_of
from refit.bench.device_memory import DeviceMemory, Points, storage_bytes
from refit.bench.series import Series, ratio
from refit.errors import HostMemoryError
from refit.observe import memory_now

Shape = tuple[int, int]
"""Sequences of a batch, and tokens of a sequence."""

SHAPES: tuple[Shape, ...] = (
    (1, 32), (1, 128), (1, 256), (1, 512), (2, 128), (2, 256), (2, 512),
)  # fmt: skip
"""The smallest, then the batches of 8 and 16 and the lengths of 256 to 1,024 of ms-swift #7201, of
which a CPU takes an eighth and a half."""

SIZES, SIZES_ON_GPU, BATCHES_ON_GPU, LENGTHS_ON_GPU = Sizes(), Sizes(2048, 16, 32000), 2, 2
MOST_ROUNDS = 5
UNTIMED = 2
RECORDED = 3
MIN_BYTES, KEEP_LAST = 64 << 10, 1  # refit's defaults
POINTS = 600
VALUES, BESIDES_BYTES = 38, 2 << 30
"""Elements that a way takes of the host, for each token, layer and element of the width, and other
bytes. Each way keeps its host memory; PyTorch's is taken by powers of two."""


@dataclass
class Case:
    """One way at one shape, and its figures."""

    kind: Kind
    step: Series = field(default_factory=Series)
    cold_peak_bytes: int = 0
    peak_bytes: int = 0
    out_bytes: int = 0
    back_bytes: int = 0
    left_bytes: int | None = None
    off: str | None = None
    is_equal: bool = True
    points: Points = field(default_factory=list)
    forward_s: float = 0.0


@dataclass(frozen=True)
class Scene:
    """What all ways of a shape begin with."""

    shape: Shape
    sizes: Sizes
    begin: dict[str, torch.Tensor]
    tokens: torch.Tensor
    saved: tuple[int, ...]
    """Bytes that each layer saves, in the order of the layers."""

    @property
    def host_bytes(self) -> int:
        """Enough for all of them, and for what the arena's pieces lose to their alignment."""
        return sum(self.saved) * 9 // 8 + (1 << 20)

    @property
    def leavable_bytes(self) -> int:
        """That are saved by other layers than the last ones, which refit keeps."""
        return sum(self.saved[:-KEEP_LAST])

    def model(self, checkpointed: bool) -> Decoder:
        """One more, with the same weights."""
        with torch.device("meta"):
            made = Decoder(self.sizes, checkpointed)
        made.load_state_dict({name: it.clone() for name, it in self.begin.items()}, assign=True)
        return made.requires_grad_()


def measure(rounds: int, lengths: Sequence[int] | None = None) -> dict[str, Any]:
    """Every way at each shape: the usual ones, or one sequence of each of these lengths.

    HostMemoryError if it does not fit.
    """
    device = _device()
    shapes = shapes_of(lengths)
    sizes = _sizes()
    torch.manual_seed(7)
    begin = {name: it.to(device, _dtype()) for name, it in Decoder(sizes).state_dict().items()}
    rounds = min(rounds, MOST_ROUNDS)
    rows, memory = [], {}
    for shape in shapes:
        scene = _scene(shape, sizes, begin, device)
        cases = [Case(kind) for kind in KINDS]
        _time(cases, scene, rounds)
        _record(cases, scene)
        rows += [_row(it, cases, scene) for it in cases]
        memory = {it.kind.name: _drawn(it) for it in cases if it.points}
    return {
        "bench": "activations",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "parameters": sum(it.numel() for it in begin.values()),
        "layers": sizes.layers,
        "width": sizes.width,
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "crossover": {name: crossover(rows, name) for name in (OVERLAP, MEMORY)},
        "memory_shape": _name(shapes[-1]),
        "memory": memory,
        "ways": rows,
    }


def shapes_of(lengths: Sequence[int] | None) -> list[Shape]:
    """Those to be measured, the largest one last."""
    if lengths is not None:
        return [(1, length) for length in sorted(set(lengths))]
    on_gpu = _device().type == "cuda"
    wider, longer = (BATCHES_ON_GPU, LENGTHS_ON_GPU) if on_gpu else (1, 1)
    return [(batch * wider, length * longer) for batch, length in SHAPES]


def memory_told(lengths: Sequence[int] | None) -> str:
    """A line on what will be taken of the host. HostMemoryError if there is not as much."""
    shapes, sizes = shapes_of(lengths), _sizes()
    tokens = max(batch * length for batch, length in shapes)
    values = tokens * sizes.layers * sizes.width * VALUES
    takes = BESIDES_BYTES + values * _dtype().itemsize * len(KINDS)
    available = memory_now.available_bytes()
    said = f"{takes / 1e9:.1f} GB of free memory"
    if takes > available:
        raise HostMemoryError(
            f"activations asks for {said}, and there are {available / 1e9:.1f} GB: end something, "
            "or name shorter --lengths"
        )
    return f"activations: {len(shapes)} shapes, which ask for {said}"


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _dtype() -> torch.dtype:
    return torch.bfloat16 if _device().type == "cuda" else torch.float32


def _sizes() -> Sizes:
    return SIZES_ON_GPU if _device().type == "cuda" else SIZES


def _scene(
    shape: Shape, sizes: Sizes, begin: dict[str, torch.Tensor], device: torch.device
) -> Scene:
    tokens = tokens_of(*shape, sizes.vocabulary).to(device)
    empty = Scene(shape, sizes, begin, tokens, ())
    saved = tuple(saved_by_layer(empty.model(checkpointed=False), tokens, MIN_BYTES))
    return Scene(shape, sizes, begin, tokens, saved)


def saved_by_layer(model: Decoder, tokens: torch.Tensor, min_bytes: int) -> list[int]:
    """Bytes of the storages that each layer saves and no layer before it has, without parameters
    and tokens, and without tensors that have less than ``min_bytes``."""
    known = {it.untyped_storage().data_ptr() for it in (*model.parameters(), tokens)}
    found = [0]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known and storage.nbytes() >= min_bytes:
            known.add(storage.data_ptr())
            found[-1] += storage.nbytes()
        return tensor

    ends = [layer.register_forward_hook(lambda *_: found.append(0)) for layer in model.layers]
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens)
    for handle in ends:
        handle.remove()
    return found[:-1]


def _time(cases: list[Case], scene: Scene, rounds: int) -> None:
    """The figures of ``step``."""
    ways: list[ActivationWay] = []
    try:
        models = [scene.model(it.kind.checkpointed) for it in cases]
        for case, model in zip(cases, models, strict=True):
            ways.append(case.kind.make(model, scene.host_bytes))
        for number in range(1 + UNTIMED + rounds):
            for case, way, model in zip(cases, ways, models, strict=True):
                seconds = _step(way, model, scene.tokens)
                if not 1 <= number <= UNTIMED:
                    case.step.add(seconds)
        _compare(cases, models)
    finally:
        for way in reversed(ways):
            way.close()


def _step(way: ActivationWay, model: Decoder, tokens: torch.Tensor) -> float:
    model.zero_grad(set_to_none=True)
    _wait(tokens.device)
    start = time.perf_counter()
    torch.autograd.backward(way.loss(tokens))
    _wait(tokens.device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _compare(cases: list[Case], models: list[Decoder]) -> None:
    for case, model in zip(cases, models, strict=True):
        pairs = zip(models[0].parameters(), model.parameters(), strict=True)
        case.is_equal &= all(_same(one.grad, two.grad) for one, two in pairs)


def _same(one: torch.Tensor | None, two: torch.Tensor | None) -> bool:
    """Bit for bit: a NaN is as itself, and the zeros differ."""
    if one is None or two is None:
        return one is two
    return torch.equal(one.view(torch.uint8), two.view(torch.uint8))


def _record(cases: list[Case], scene: Scene) -> None:
    """The figures of memory, and of bytes that move in a step."""
    expected: Decoder | None = None
    for case in cases:
        model = scene.model(case.kind.checkpointed)
        expected = expected or model
        way = case.kind.make(model, scene.host_bytes)
        try:
            _record_one(case, way, model, scene)
            _compare([cases[0], case], [expected, model])
        finally:
            way.close()


def _record_one(case: Case, way: ActivationWay, model: Decoder, scene: Scene) -> None:
    resident = storage_bytes(*model.parameters(), scene.tokens)
    for number in range(RECORDED):
        model.zero_grad(set_to_none=True)
        before = way.moved()
        with DeviceMemory(scene.tokens.device, resident) as memory:
            loss = way.loss(scene.tokens)
            case.forward_s = memory.seconds()
            torch.autograd.backward(loss)
            del loss
        case.peak_bytes = max(case.peak_bytes, memory.peak_bytes)
        if number == 0:
            case.cold_peak_bytes = memory.peak_bytes
    case.out_bytes, case.back_bytes = (
        after - old for after, old in zip(way.moved(), before, strict=True)
    )
    case.left_bytes = way.left_bytes()
    case.points = memory.points
    case.off = way.off()


def _row(case: Case, cases: list[Case], scene: Scene) -> dict[str, Any]:
    plain = cases[0]
    later = [one - two for one, two in zip(case.step.seconds, plain.step.seconds, strict=True)]
    return {
        "way": case.kind.name,
        "shape": _name(scene.shape),
        "tokens": scene.tokens[:, 1:].numel(),
        "step_s_median": case.step.median,
        "step_s_p95": case.step.p95,
        "cold_step_s": case.step.cold,
        "over_none": ratio(case.step, plain.step),
        "blocked_s": statistics.median(later),
        "peak_bytes": case.peak_bytes,
        "cold_peak_bytes": case.cold_peak_bytes,
        "peak_over_none": case.peak_bytes / plain.peak_bytes,
        "leavable_bytes": scene.leavable_bytes,
        "leavable_share": _share(case, scene),
        "out_bytes": case.out_bytes,
        "back_bytes": case.back_bytes,
        "off": case.off,
        "bit_equal": case.is_equal,
    }


def _share(case: Case, scene: Scene) -> float | None:
    """Of the bytes that may leave, those that did. None with a checkpointed model, which saves
    others, and for ways that do not count storages."""
    if case.left_bytes is None or case.kind.checkpointed or scene.leavable_bytes == 0:
        return None
    return case.left_bytes / scene.leavable_bytes


def _name(shape: Shape) -> str:
    return "x".join(map(str, shape))


def crossover(rows: list[dict[str, Any]], name: str) -> int | None:
    """The fewest tokens from which on a step of this way is never slower than checkpointing."""
    steps = {(row["way"], row["shape"]): row["step_s_median"] for row in rows}
    mine = [row for row in rows if row["way"] == name]
    slower = [
        row["tokens"] for row in mine if row["step_s_median"] > steps[CHECKPOINT, row["shape"]]
    ]
    return min(
        (row["tokens"] for row in mine if row["tokens"] > max(slower, default=0)), default=None
    )


def _drawn(case: Case) -> dict[str, Any]:
    """Its memory over the last step that was recorded, by as many points as a picture shows."""
    return {"forward_s": case.forward_s, "points": thinned(case.points, POINTS)}


def thinned(points: Points, count: int) -> Points:
    """About so many of the points: of each range of time the lowest and the highest."""
    if len(points) <= count:
        return list(points)
    per = -(-2 * len(points) // count)
    kept: Points = []
    for start in range(0, len(points), per):
        part = points[start : start + per]
        ends = min(part, key=lambda it: it[1]), max(part, key=lambda it: it[1])
        kept += sorted(set(ends))
    return kept
