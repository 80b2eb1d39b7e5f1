"""Recording an engine's loader: what it copies is learned, and what it computes is refused."""

import ctypes
import gc
import itertools
import operator
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from broadcasting import Trainer
from refit import Parts, record
from refit._c import dtypes
from refit._c.library import call, lib
from refit.errors import InvalidError, StateError, UnsupportedError
from refit.weights import update as module
from refit.weights.parts import write
from torch.utils._python_dispatch import TorchDispatchMode

H, HEADS, MLP, EXPERTS, VOCAB = 8, 12, 6, 3, 10
BF16 = torch.bfloat16
Weights = dict[str, torch.Tensor]


def checkpoint(dtype: torch.dtype = BF16, layers: int = 2) -> Weights:
    """Names and shapes of a small model with experts, and random values."""
    shapes = {"embed": (VOCAB, H), "head": (VOCAB, H), "norm": (H,)}
    for layer in range(layers):
        shapes |= {f"{layer}.q": (HEADS, H), f"{layer}.k": (4, H), f"{layer}.v": (4, H)}
        shapes |= {f"{layer}.o": (H, HEADS), f"{layer}.gate": (MLP, H), f"{layer}.up": (MLP, H)}
        for expert in range(EXPERTS):
            name = f"{layer}.experts.{expert}"
            shapes |= {f"{name}.gate": (MLP, H), f"{name}.up": (MLP, H), f"{name}.down": (H, MLP)}
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


class Engine(torch.nn.Module):
    """Has fused, divided and gathered parameters, as vLLM and SGLang have them. Of `size` ranks it
    is number `rank`; the embedding is padded, and with `tied` it is the head."""

    def __init__(self, layers: int = 2, rank: int = 0, size: int = 1, tied: bool = False) -> None:
        super().__init__()
        self.rank, self.size, self.tied = rank, size, tied

        def room(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(shape).to(BF16))

        self.embed = room(VOCAB // size + 2, H)
        self.head = self.embed if tied else room(VOCAB // size, H)
        self.norm = room(H)
        self.register_buffer("cos", torch.randn(4))
        for layer in range(layers):
            for name, shape in {
                "qkv": ((HEADS + 8) // size, H),
                "o": (H, HEADS // size),
                "gate_up": (2 * MLP // size, H),
                "w13": (EXPERTS, 2 * MLP // size, H),
                "w2": (EXPERTS, MLP // size, H),
            }.items():
                self.register_parameter(f"{name}{layer}", room(*shape))

    def share(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        length = tensor.shape[dim] // self.size
        return tensor.narrow(dim, self.rank * length, length)

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.load_one(name, tensor)

    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        if name == "embed":
            rows = self.share(tensor, 0)
            self.embed[: len(rows)].data.copy_(rows)
            self.embed[len(rows) :].data.fill_(0)
        elif name == "head":
            if not self.tied:
                self.head.data.copy_(self.share(tensor, 0))
        elif name == "norm":
            self.norm.data.copy_(tensor)
        else:
            self.load_in_layer(*name.split(".", 1), tensor)

    def load_in_layer(self, layer: str, name: str, tensor: torch.Tensor) -> None:
        def place(kind: str) -> torch.Tensor:
            return self.get_parameter(f"{kind}{layer}").data

        if name in ("q", "k", "v"):
            begin = {"q": 0, "k": HEADS, "v": HEADS + 4}[name] // self.size
            rows = self.share(tensor, 0)
            place("qkv").narrow(0, begin, len(rows)).copy_(rows)
        elif name == "o":
            place("o").copy_(self.share(tensor, 1))
        elif name in ("gate", "up"):
            place("gate_up").chunk(2, 0)[name == "up"].copy_(self.share(tensor, 0))
        else:
            _, expert, kind = name.split(".")
            if kind == "down":  # it has them the other way round
                place("w2")[int(expert)].copy_(self.share(tensor, 1).t())
            else:
                place("w13")[int(expert)].chunk(2, 0)[kind == "up"].copy_(self.share(tensor, 0))


def bits(module: torch.nn.Module) -> dict[str, bytes]:
    """All bytes of a module's memory, in each parameter's place."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {
        name: bytes(one.detach().contiguous().view(torch.uint8).flatten().tolist())
        for name, one in tensors.items()
    }


class Loads(torch.nn.Module):
    """An engine of the parameter ``w``, and a loader that a test gives."""

    def __init__(self, load: Callable[[Any, dict[str, Any]], Any], *shape: int, **options: Any):
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(shape or (4, 6)).to(**options))
        self._load = load

    def load_weights(self, weights: Any) -> None:
        with torch.no_grad():
            self._load(self, dict(weights))


def check_same(one: Any, other: Any, weights: Weights) -> Parts:
    """Records the loader of an engine, and lets its twin load: both have the same bytes then, and
    recording has changed nothing."""
    other.load_state_dict(one.state_dict())
    before = bits(one)
    parts = record(one.load_weights, weights)
    assert bits(one) == before
    write(parts.places(), weights.__getitem__)
    other.load_weights(iter(weights.items()))
    assert bits(one) == bits(other)
    return parts


def check_load(load: Any, weights: Weights, *shape: int, **options: Any) -> Parts:
    return check_same(Loads(load, *shape, **options), Loads(load, *shape, **options), weights)


def check_refused(load: Any, match: str, **weights: torch.Tensor) -> None:
    """Refused in these words, and the engine is as it was."""
    engine = Loads(load)
    before, w = bits(engine), engine.w
    with pytest.raises(UnsupportedError, match=match):
        record(engine.load_weights, weights or {"a": torch.zeros(4, 6)})
    assert bits(engine) == before
    assert engine.w is w


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
def test_fused_and_divided_parameters_have_the_loaders_bytes(
    dtype: torch.dtype, tied: bool, rank: int, size: int
) -> None:
    made = [Engine(rank=rank, size=size, tied=tied) for _ in range(2)]
    weights = checkpoint(dtype)
    parts = check_same(*made, weights)
    assert len(parts) == len(weights) - tied + 1  # one for each tensor, and the padding
    assert parts.unused == (("head",) if tied else ())
    assert parts.untouched == ("cos",)
    assert all(len(part.shape) <= 2 for part in parts.parts)
    assert ("converted" in repr(parts)) == (dtype != BF16)


def test_versions_are_loaded_by_the_recording(trainer: Trainer) -> None:
    engine, other = Engine(rank=1, size=2), Engine(rank=1, size=2)
    other.load_state_dict(engine.state_dict())
    with trainer.offer(checkpoint(torch.float32)) as update:
        parts = record(engine.load_weights, update, engine)
        update.load_into(parts)
    for _ in range(2):
        with trainer.offer(checkpoint(torch.float32)) as update:
            assert update.load_into(parts) == (["cos"], [])
            other.load_weights(update.tensors())
            assert bits(engine) == bits(other)


class Library:
    """Takes the place of refit_update_copy, for an engine in host memory that passes for a GPU's.
    What it is told is a C structure, as the library reads it."""

    def __init__(self, update: Any, patch: pytest.MonkeyPatch) -> None:
        self.boxes: list[Any] = []
        self.wholes = 0
        self._names = list(update)
        self._update = update
        patch.setattr(module, "call", self._call)
        patch.setattr(module, "cuda_number", lambda tensor: 0)
        patch.setattr(module, "stream_of", lambda number: 0)
        update._engine = 0

    def _call(self, function: Any, *rest: Any) -> None:
        if function is not lib.refit_update_copy:
            call(function, *rest)
            return
        for target in rest[1]:
            view = self._update[self._names[target.tensor]]
            if target.box:
                self._copy(view, target, target.box.contents)
            else:
                self.wholes += 1
                assert target.bytes == view.nbytes
                ctypes.memmove(target.memory, bytes(view.bytes), view.nbytes)

    def _copy(self, view: Any, target: Any, box: Any) -> None:
        self.boxes.append(box)
        assert dtypes.by_number(box.dtype).name == view.dtype
        shape, width = tuple(box.shape[: box.rank]), dtypes.by_name(view.dtype).bits // 8
        steps = {side: getattr(box, side)[: box.rank] for side in ("from_strides", "to_strides")}
        for at in itertools.product(*map(range, shape)):
            source = box.offset + sum(map(operator.mul, at, steps["from_strides"]))
            place = width * sum(map(operator.mul, at, steps["to_strides"]))
            assert place + width <= target.bytes
            one = bytes(view.bytes[width * source : width * (source + 1)])
            ctypes.memmove(target.memory + place, one, width)


def test_on_a_gpu_one_call_copies_all_that_is_rows(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, other = Engine(rank=1, size=2), Engine(rank=1, size=2)
    other.load_state_dict(engine.state_dict())
    parts = record(engine.load_weights, checkpoint())
    with trainer.offer(checkpoint()) as update:
        told = Library(update, monkeypatch)
        update.load_into(parts)
        other.load_weights(update.tensors())
    assert bits(engine) == bits(other)
    transposed = 2 * EXPERTS
    assert told.wholes == 1  # the norm
    assert len(told.boxes) == len(parts) - 2 - transposed  # without the padding


def test_conversions_are_of_rows_where_the_version_is_on_the_gpu() -> None:
    parts = record(Engine(size=2).load_weights, checkpoint(torch.float32))
    fp32 = dtypes.by_name("F32")
    assert not any(part.rows(fp32, False) for part in parts.parts)
    told = {part.source: part.rows(fp32, True) for part in parts.parts}
    assert told["0.q"] is not None
    assert (told["0.q"].dtype.name, told["0.q"].nbytes) == ("BF16", 2 * HEADS // 2 * H)
    assert told["0.o"] is None  # columns
    assert told["0.experts.0.down"] is None


def test_where_a_gpu_takes_no_parts_pytorch_copies(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise UnsupportedError("this device takes no digests")

    engine, other = Engine(), Engine()
    other.load_state_dict(engine.state_dict())
    parts = record(engine.load_weights, checkpoint())
    with trainer.offer(checkpoint()) as update:
        monkeypatch.setattr(Library, "_call", refuse)
        Library(update, monkeypatch)
        update.load_into(parts)
        monkeypatch.undo()
        other.load_weights(update.tensors())
    assert bits(engine) == bits(other)


def test_a_version_of_another_kind_changes_nothing(trainer: Trainer) -> None:
    engine = Engine()
    weights = checkpoint()
    parts = record(engine.load_weights, weights)
    before = bits(engine)
    changes: list[tuple[Weights, str]] = [
        ({**weights, "more": torch.zeros(1)}, "it has more, which the recording lacks"),
        ({**weights, "norm": torch.zeros(H)}, r"norm is F32 \[8\] and not BF16 \[8\]"),
        ({**weights, "norm": torch.zeros(9, dtype=BF16)}, r"norm is BF16 \[9\]"),
        ({name: one for name, one in weights.items() if name != "0.k"}, r"it lacks 0\.k"),
    ]
    for changed, sentence in changes:
        update = trainer.offer(changed)
        with pytest.raises(InvalidError, match=f"nothing was changed: .*{sentence}"):
            update.load_into(parts)
        assert bits(engine) == before
        update.refuse()
        update.close()


def test_a_model_that_has_moved_is_not_written() -> None:
    engine = Engine()
    parts = record(engine.load_weights, checkpoint())
    parts.check(parts.manifest)
    engine.qkv0.data = engine.qkv0.data.clone()
    with pytest.raises(StateError, match="qkv0 is not where it was recorded"):
        parts.check(parts.manifest)
    engine = Engine()
    parts = record(engine.load_weights, checkpoint())
    engine.cos = torch.ones(7)  # what the loader does not write may change
    engine.norm = torch.nn.Parameter(engine.norm.data)
    parts.check(parts.manifest)  # the same memory
    engine.norm = torch.nn.Parameter(engine.norm.data.clone())
    with pytest.raises(StateError, match="norm is not where"):
        parts.check(parts.manifest)
    del engine.norm
    with pytest.raises(StateError, match="norm is not where"):
        parts.check(parts.manifest)


def test_a_model_whose_memory_is_gone_is_not_written() -> None:
    engine = Engine()
    parts = record(engine.load_weights, checkpoint())
    engine.norm.untyped_storage().resize_(0)
    with pytest.raises(StateError, match="norm: it has no memory now"):
        parts.check(parts.manifest)


ROWS = torch.arange(24.0).view(4, 6)
WAYS: dict[str, Any] = {
    "as it is": lambda w, a: w.copy_(a),
    "transposed": lambda w, a: w.t().copy_(a.t()),
    "over a copy": lambda w, a: w.copy_(a.t().contiguous().t()),
    "by index": lambda w, a: [w[i].copy_(a[i]) for i in range(4)],
    "by column": lambda w, a: [w[:, i].copy_(a[:, i]) for i in range(6)],
    "every other": lambda w, a: (w[:, ::2].copy_(a[:, 1::2]), w[:, 1::2].copy_(a[:, ::2])),
    "joined": lambda w, a: w.copy_(torch.cat([a[2:], a[:2]])),
    "joined in columns": lambda w, a: w.copy_(torch.cat((a[:, 3:], a[:, :3]), dim=1)),
    "stacked": lambda w, a: w.copy_(torch.stack([a[3], a[2], a[1], a[0]])),
    "stacked in columns": lambda w, a: w.copy_(torch.stack(a.t().unbind(), 1)),
    "a piece of what was joined": lambda w, a: w[1:].copy_(torch.cat([a, a])[4:7]),
    "halves put in turn": lambda w, a: w.copy_(
        a.view(2, 2, 6).transpose(0, 1).reshape(4, 6)
    ),  # as rotary embeddings are
    "flat": lambda w, a: w.view(-1).copy_(a.t().reshape(-1)),
    "flat, of a copy": lambda w, a: w.view(-1)[4:20].copy_(a.clone().view(-1)[:16]),
    "parts of a copy": lambda w, a: [
        w[i].copy_(one) for i, one in enumerate(a.t().contiguous().t().unbind())
    ],
    "assigned": lambda w, a: w.__setitem__((slice(1, 3), slice(2, 5)), a[:2, :3]),
    "expanded": lambda w, a: w.copy_(a[1:2]),
    "wider and back": lambda w, a: w.copy_(a.double().to(a.dtype)),
    "in pieces of bytes": lambda w, a: w.view(torch.uint8).copy_(a.view(torch.uint8)),
    "through a buffer": lambda w, a: w.copy_(torch.empty_like(a).copy_(a)),
    "through itself": lambda w, a: (w[:2].copy_(a[1:3]), w[2:].copy_(w[:2])),
    "emptied first": lambda w, a: (w.zero_(), w[1:3].copy_(a[:2])),
    "from numbers": lambda w, a: (w.copy_(a), w[0].copy_(torch.arange(6.0))),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("inference", [False, True])
def test_each_way_to_copy_is_learned(way: str, inference: bool) -> None:
    def load(engine: Loads, weights: Weights) -> None:
        WAYS[way](engine.w.data, weights["a"])

    with torch.inference_mode(inference):
        check_load(load, {"a": ROWS.clone()})


@pytest.mark.parametrize(
    ("source", "target"),
    [(torch.float32, BF16), (BF16, torch.float32), (torch.float32, torch.float16)],
)
def test_types_are_converted_on_the_way(source: torch.dtype, target: torch.dtype) -> None:
    weights = {"a": torch.randn(4, 6).to(source)}
    for load in (
        lambda engine, weights: engine.w.data.copy_(weights["a"]),
        lambda engine, weights: engine.w.data.copy_(weights["a"].to(target)),
        lambda engine, weights: engine.w.data.copy_(weights["a"].t().to(target).t()),
        lambda engine, weights: engine.w.data[:, 1:].copy_(weights["a"].to(target)[:, :5]),
    ):
        parts = check_load(load, weights, dtype=target)
        assert [(one.source_dtype, one.target_dtype) for one in parts.parts] == [(source, target)]


def test_bytes_of_one_type_may_be_those_of_another() -> None:
    weights = {"a": torch.randint(0, 256, (4, 12), dtype=torch.uint8)}
    check_load(lambda engine, one: engine.w.data.copy_(one["a"].view(BF16)), weights, dtype=BF16)
    weights = {"a": torch.randn(4, 6).to(torch.float8_e4m3fn)}

    def load(engine: Loads, one: Weights) -> None:
        engine.w.data.view(torch.uint8).copy_(one["a"].view(torch.uint8))

    check_load(load, weights, dtype=torch.float8_e4m3fn)


def test_what_is_written_last_stays() -> None:
    weights = {"a": ROWS, "b": -ROWS, "c": 7 + ROWS}

    def twice(engine: Loads, all: Weights) -> None:
        engine.w.data.copy_(all["a"])
        engine.w.data[:2].copy_(all["b"][:2])
        engine.w.data[2:].copy_(all["c"][2:])

    parts = check_load(twice, weights)
    assert parts.unused == ("a",)
    assert not parts.overlap

    def pieces(engine: Loads, all: Weights) -> None:
        engine.w.data.copy_(all["a"])
        engine.w.data[1:3, 1:3].copy_(all["b"][:2, :2])

    parts = check_load(pieces, weights)
    assert parts.overlap
    assert parts.unused == ("c",)


def test_one_tensor_may_go_to_several_places() -> None:
    def load(engine: Loads, all: Weights) -> None:
        engine.w.data[:2].copy_(all["a"][:2])
        engine.w.data[2:].copy_(all["a"][:2])

    assert len(check_load(load, {"a": ROWS})) == 2


def test_names_that_the_loader_ignores_are_unused() -> None:
    parts = check_load(
        lambda engine, all: engine.w.data.copy_(all["a"]), {"a": ROWS, "rotary": torch.ones(3)}
    )
    assert parts.unused == ("rotary",)
    assert parts.left_out == ([], ["rotary"])
    text = str(parts)
    assert "1 tensors in 1 parts to 1 places; 1 tensors unused" in text
    assert "  a -> w" in text


def test_a_recording_says_what_goes_where() -> None:
    lines = str(record(Engine(rank=1, size=2).load_weights, checkpoint(torch.float32))).split("\n")
    assert lines[0].startswith("<refit.Parts: 33 tensors in 34 parts to 13 places, 33 of them conv")
    for line in (
        "embed[5:10] -> embed[0:5], float32 to bfloat16",
        "a constant -> embed[5:7]",
        "norm -> norm, float32 to bfloat16",
        "0.k[2:4] -> qkv0[6:8], float32 to bfloat16",
        "0.o[0:8, 6:12] -> o0, float32 to bfloat16",
        "1.experts.2.up[3:6] -> w131[2:3, 3:6], float32 to bfloat16",
    ):
        assert f"  {line}" in lines


def test_a_mapping_of_tensors_can_be_the_model() -> None:
    place = {"x": torch.zeros(2, 3), "count": 3}

    def load(weights: Any) -> None:
        place["x"].copy_(dict(weights)["a"])

    parts = record(load, {"a": torch.zeros(2, 3)}, place)
    write(parts.places(), lambda name: torch.full((2, 3), 5.0))
    assert place["x"].sum() == 30


def double(weights: Weights) -> torch.Tensor:
    return weights["a"] * 2


COMPUTED: dict[str, tuple[Any, str]] = {
    "a product": (lambda e, all: e.w.copy_(double(all)), "writes to w what mul makes of a"),
    "a product in place": (lambda e, all: e.w.copy_(all["a"].mul_(2)), "to w what mul_ makes of a"),
    "added to what was loaded": (lambda e, all: e.w.copy_(all["a"]).add_(1), "w what add_ .* of a"),
    "a scale": (lambda e, all: e.w.copy_(all["a"] / all["a"].amax()), "what div makes of a"),
    "a mean": (lambda e, all: e.w[0, 0].copy_(all["a"].mean()), "what mean makes of a"),
    "filled with a value": (lambda e, all: e.w.fill_(all["a"].sum()), "what sum|fill_ makes of a"),
    "a value": (lambda e, all: e.w.fill_(all["a"][0, 0].item()), "reads values of a"),
    "a decision": (
        lambda e, all: e.w.copy_(all["a"]) if all["a"].any() else 0,
        "reads values of a",
    ),
    "rounded in between": (
        lambda e, all: e.w.copy_(all["a"].bfloat16().float()),
        "two conversions",
    ),
    "backwards": (lambda e, all: e.w.copy_(all["a"].flip(0)), "what flip makes of a"),
    "a piece of two": (
        lambda e, all: e.w.copy_(torch.cat([all["a"]] * 2)[2:6]),
        "what a copy of a",
    ),
    "looked up": (lambda e, all: e.w.copy_(all["a"][torch.tensor([3, 1, 2, 0])]), "what index"),
    "quantised": (
        lambda e, all: e.w.view(torch.int8)[:, :6].copy_((all["a"] * 127).round().to(torch.int8)),
        "what (mul|round) makes of a",
    ),
    "through NumPy": (
        lambda e, all: e.w.copy_(torch.from_numpy(all["a"].numpy().copy())),
        "to w does not come from copies alone",
    ),
    "random": (lambda e, all: e.w.copy_(all["a"]).normal_(), "what normal_ makes of a"),
    "made anew": (lambda e, all: e.w.normal_(), "to w does not come from copies alone"),
    "replaced data": (lambda e, all: setattr(e.w, "data", all["a"].clone()), "replaces w"),
    "replaced": (lambda e, all: setattr(e, "w", torch.nn.Parameter(all["a"])), "replaces w"),
    "emptied": (lambda e, all: e.w.untyped_storage().resize_(0), "to w does not come from copies"),
    "taken away": (lambda e, all: delattr(e, "w"), "replaces w"),
    "added": (lambda e, all: e.register_buffer("more", all["a"]), "replaces more"),
}


HANDLES = [0]


@torch.library.custom_op("refit_test::handle", mutates_args=())
def handle(tensor: torch.Tensor) -> int:
    """Keeps the tensor where PyTorch does not see it."""
    HANDLES[0] += 1
    return HANDLES[0]


def composite(tensor: torch.Tensor) -> int:
    HANDLES[0] += 1
    return tensor.data_ptr()


LIBRARY = torch.library.Library("refit_test", "FRAGMENT")
LIBRARY.define("composite(Tensor tensor) -> int")
LIBRARY.impl("composite", composite, "CompositeImplicitAutograd")


class Keeping(Loads):
    """Has a tensor that is neither a parameter nor a buffer, and an object that has one."""

    def __init__(self, load: Any) -> None:
        super().__init__(load)
        self.plain = torch.ones(4, 6)
        self.scale = 0.5
        self.kernel = SimpleNamespace(packed=None, number=0)
        self.apply_to = torch.neg
        self.handles = 0

    def prepare(self, packed: torch.Tensor) -> None:
        self.apply_to = lambda one: one @ packed
        del self.scale

    def handle(self, tensor: torch.Tensor) -> None:
        self.handles = torch.ops.refit_test.handle(tensor)


@pytest.mark.parametrize(
    ("load", "match"),
    [
        (lambda e, all: e.plain.copy_(all["a"]), "to what is not of the model what copy_ makes of"),
        (lambda e, all: e.plain.mul_(all["a"]), "to what is not of the model what mul_ makes of a"),
        (lambda e, all: setattr(e, "plain", all["a"]), "keeps .* of a, elsewhere"),
        (lambda e, all: setattr(e, "plain", all["a"].clone()), "keeps .* of a, elsewhere"),
        (lambda e, all: setattr(e, "more", all["a"] * 2), "keeps .* of a, elsewhere"),
        (lambda e, all: setattr(e.kernel, "packed", all["a"].t() * 2), "keeps .* of a, elsewhere"),
        (lambda e, all: e.prepare(all["a"] * 2), "keeps .* of a, elsewhere"),
        (lambda e, all: e.handle(all["a"]), "reads values of a"),
        (lambda e, all: torch.ops.refit_test.composite(all["a"].t()), "reads values of a"),
        (lambda e, all: setattr(e, "packed", all["a"].to_mkldnn()), "reads values of a"),
        (lambda e, all: KEPT.append(all["a"][:2]), "keeps .* of a, elsewhere"),
    ],
)
def test_what_is_kept_elsewhere_is_refused_and_put_back(load: Any, match: str) -> None:
    engine = Keeping(load)
    plain, before = engine.plain, bits(engine)
    with pytest.raises(UnsupportedError, match=match):
        record(engine.load_weights, {"a": ROWS})
    KEPT.clear()
    assert bits(engine) == before
    assert engine.plain is plain
    assert torch.equal(plain, torch.ones(4, 6))
    assert not hasattr(engine, "more")
    assert (engine.scale, engine.apply_to, engine.handles, HANDLES) == (0.5, torch.neg, 0, [0])
    assert engine.kernel.packed is None


KEPT: list[Any] = []


@pytest.mark.parametrize("what", COMPUTED)
def test_what_is_computed_is_refused_by_name(what: str) -> None:
    check_refused(*COMPUTED[what])


def test_a_refusal_that_the_loader_catches_is_one_all_the_same() -> None:
    def load(engine: Loads, all: Weights) -> None:
        try:
            engine.w.add_(all["a"])
        except Exception:
            engine.w.copy_(all["a"])

    check_refused(load, "writes to w what add_ makes of a")


def test_a_refusal_is_told_that_the_loader_makes_another_error_of() -> None:
    def load(engine: Loads, all: Weights) -> None:
        try:
            engine.w.add_(all["a"])
        except Exception:
            raise KeyError("no other way") from None

    check_refused(load, "writes to w what add_ makes of a")


def test_what_another_thread_writes_is_found_out() -> None:
    def load(engine: Loads, all: Weights) -> None:
        thread = threading.Thread(target=lambda: engine.w.data.copy_(all["a"]))
        thread.start()
        thread.join()

    check_refused(load, "to w does not come from copies alone")


def test_an_operation_that_goes_nowhere_is_allowed() -> None:
    def load(engine: Loads, all: Weights) -> None:
        (all["a"] * 2).sum()
        engine.w.data.copy_(all["a"])

    check_load(load, {"a": ROWS})


@pytest.mark.parametrize("after", [0, 1])
def test_a_loader_that_raises_leaves_the_model_as_it_was(after: int) -> None:
    runs: list[int] = []

    def load(engine: Loads, all: Weights) -> None:
        engine.w.data.copy_(all["a"])
        runs.append(1)
        if len(runs) > after:
            raise KeyError("no such layer")

    engine = Loads(load)
    before = bits(engine)
    with pytest.raises(KeyError, match="no such layer"):
        record(engine.load_weights, {"a": ROWS})
    assert bits(engine) == before


def test_what_cannot_be_recorded_is_said() -> None:
    engine = Engine()
    with pytest.raises(InvalidError, match="no tensors were given"):
        record(engine.load_weights, {})
    with pytest.raises(InvalidError, match="give the model"):
        record(lambda weights: None, checkpoint())
    with pytest.raises(InvalidError, match="neither a module nor a mapping"):
        record(engine.load_weights, checkpoint(), 3)
    with pytest.raises(InvalidError, match="nothing to load into"):
        record(engine.load_weights, checkpoint(), torch.nn.Module())
    with pytest.raises(InvalidError, match="norm is there twice"):
        record(engine.load_weights, [*checkpoint().items(), ("norm", torch.zeros(H))])


def test_names_may_come_without_memory() -> None:
    engine = Engine()
    metas = {name: one.to("meta") for name, one in checkpoint().items()}
    assert len(record(engine.load_weights, metas)) == len(metas) + 1


def test_tensors_are_made_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Any]] = []
    most = 0

    class Counting(Engine):
        def load_one(self, name: str, tensor: torch.Tensor) -> None:
            nonlocal most
            super().load_one(name, tensor)
            gc.collect()
            alive.append(weakref.ref(tensor))
            most = max(most, sum(one() is not None for one in alive))

    record(Counting().load_weights, checkpoint())
    assert most <= 2


class Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_the_work_grows_with_the_number_of_tensors_trap_10x() -> None:
    recorded, written = [], []
    for layers in (1, 10):
        engine, weights = Engine(layers), checkpoint(layers=layers)
        with Counter() as counter:
            parts = record(engine.load_weights, weights)
        recorded.append(counter.calls)
        with Counter() as counter:
            write(parts.places(), weights.__getitem__)
        written.append(counter.calls)
        assert counter.calls <= 2 * len(parts) + 1  # for each a view, and the copy
    assert recorded[1] <= 10 * recorded[0]
    assert written[1] <= 10 * written[0]


def test_random_copies_are_learned_or_refused() -> None:
    """What is recorded has the loader's bytes: `record` itself compares."""
    learned = 0
    for seed in range(150):
        chosen = random.Random(seed)
        steps = [chosen.randrange(7) for _ in range(chosen.randrange(1, 5))]
        cuts = [chosen.random() for _ in range(20)]

        def load(engine: Loads, all: Weights, steps: Any = steps, cuts: Any = cuts) -> None:
            draw = iter(cuts * 2)
            one = all["a"]
            for step in steps:
                dim = int(next(draw) * one.dim())
                size = one.shape[dim]
                if step == 0:
                    begin = int(next(draw) * size)
                    one = one.narrow(dim, begin, max(1, int(next(draw) * (size - begin))))
                elif step == 1:
                    one = one.transpose(0, dim)
                elif step == 2:
                    one = one.clone()
                elif step == 3:
                    one = one.contiguous()
                elif step == 4:
                    one = one.reshape(-1) if one.dim() > 2 else one.reshape(1, *one.shape)
                elif step == 5:
                    one = torch.cat([one, one], dim)[tuple(slice(0, n) for n in one.shape)]
                else:
                    one = one.to(torch.float64)
            flat = one.reshape(-1)[: engine.w.numel()]
            engine.w.data.view(-1)[: len(flat)].copy_(flat)

        try:
            check_load(load, {"a": torch.randn(4, 6, 5)}, 120)
        except UnsupportedError:
            continue
        learned += 1
    assert learned > 120
