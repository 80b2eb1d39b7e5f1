"""named_weights: each weight once, under the name that the engine knows, in the dtype asked for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from refit.errors import InvalidError, NotFoundError, StateError, UnsupportedError
from refit.weights.manifest import lasting
from refit.weights.named_weights import is_sharded, named_weights
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DataParallel


class Tiny(nn.Module):
    """An embedding whose head is tied to it, a router, a norm, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.router = nn.Linear(4, 3, bias=False)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.arange(3))
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("inv_freq", torch.rand(4), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.head(self.norm(self.embed(tokens)))
        return hidden


def holding(**tensors: torch.Tensor) -> nn.Module:
    """A module with these parameters and buffers."""
    model = nn.Module()
    for name, tensor in tensors.items():
        if isinstance(tensor, nn.Parameter):
            model.register_parameter(name, tensor)
        else:
            model.register_buffer(name, tensor)
    return model


def names_of(model: nn.Module, **options: Any) -> list[str]:
    return [name for name, _ in named_weights(model, **options)]


# ---- Ties


def test_tied_weights_are_one_tensor_under_all_its_names() -> None:  # trap 1
    model = Tiny()
    weights = named_weights(model, dtype=torch.bfloat16)
    given = list(weights)
    at = [name for name, _ in given].index("embed.weight")
    assert given[at + 1][0] == "head.weight"
    assert given[at][1] is given[at + 1][1]
    assert len(given) == len(dict(given)) == len(model.state_dict())
    assert weights.ties == {"head.weight": "embed.weight"}
    aliases = {one.name: one.alias_of for one in weights.manifest()}
    assert aliases["head.weight"] == "embed.weight"
    assert set(model.state_dict()) == set(aliases)


def test_tie_by_storage_is_found_for_distinct_parameters() -> None:  # trap 1
    model = Tiny()
    model.head.weight = nn.Parameter(model.embed.weight.detach())
    assert named_weights(model).ties == {"head.weight": "embed.weight"}


@pytest.mark.parametrize("options", [{"names": ["head.weight"]}, {"keep": ["head.*"]}])
def test_a_tie_ends_where_one_is_left_out_or_in_another_dtype(options: Any) -> None:  # traps 1, 33
    weights = named_weights(Tiny(), dtype=torch.bfloat16, **options)
    assert weights.ties == {}
    kept = torch.float32 if "keep" in options else torch.bfloat16
    assert dict(weights)["head.weight"].dtype == kept


FLAT, MATRIX = torch.rand(20), torch.arange(9.0).view(3, 3)
PAIRS = torch.complex(MATRIX, MATRIX + 1)


@pytest.mark.parametrize(
    ("tensors", "ties"),
    [
        ({"a": nn.Parameter(FLAT[:10]), "b": nn.Parameter(FLAT[10:]), "c": FLAT[:5]}, {}),
        ({"a": nn.Parameter(torch.empty(0)), "b": nn.Parameter(torch.empty(0))}, {}),
        (
            {"matrix": MATRIX, "turned": MATRIX.t(), "turned_again": MATRIX.t()},
            {"turned_again": "turned"},
        ),
        (
            {
                "imag": PAIRS.imag,
                "negative": PAIRS.conj().imag,
                "complex": PAIRS,
                "conjugate": PAIRS.conj(),
            },
            {},
        ),
    ],
    ids=["parts of one", "empty", "turned", "conjugate"],
)
def test_only_the_same_memory_read_in_the_same_way_is_a_tie(  # traps 2, 4
    tensors: dict[str, torch.Tensor], ties: dict[str, str]
) -> None:
    weights = named_weights(holding(**tensors))
    assert weights.ties == ties
    given = dict(weights)
    assert given.keys() == tensors.keys()
    assert all(torch.equal(given[name], one) for name, one in tensors.items())


# ---- Types


@pytest.mark.parametrize(
    "keep", [["*router*", "norm.*"], lambda name, one: one.dim() < 2 or name == "router.weight"]
)
def test_masters_become_bf16_and_what_is_kept_stays(keep: Any) -> None:  # trap 33
    model = Tiny()
    given = dict(named_weights(model, dtype=torch.bfloat16, keep=keep))
    kept = {name for name, tensor in given.items() if tensor.dtype != torch.bfloat16}
    assert kept == {"router.weight", "norm.weight", "norm.bias", "count", "scale"}
    assert torch.equal(given["embed.weight"], model.embed.weight.to(torch.bfloat16))
    assert model.embed.weight.dtype == torch.float32


def test_without_a_dtype_everything_is_given_where_it_lies_now() -> None:
    model = Tiny()
    weights = named_weights(model)
    for _ in range(2):
        for name, tensor in weights:
            assert tensor.data_ptr() == model.state_dict()[name].data_ptr()
            assert not tensor.requires_grad
        model.scale = torch.zeros(2)


def test_only_the_models_own_memory_is_lent() -> None:
    """What is made as it is asked for would take memory for as long as workers read it."""
    model = Tiny()
    model.router.bfloat16()
    weights = named_weights(model, dtype=torch.bfloat16).planned()
    storages = {one.untyped_storage().data_ptr() for one in model.state_dict().values()}
    lent = {name for name, _ in weights if weights.lasts(name)}
    assert lent == {"router.weight", "count", "scale"}  # buffers keep their type
    own = named_weights(model).planned()
    for name, tensor in own:
        tied = name == "head.weight"
        assert own.lasts(name) == (not tied)
        assert tied or tensor.untyped_storage().data_ptr() in storages
    assert lasting(model.state_dict())("router.weight")
    assert lasting([("a", model.count)])("a")
    assert not lasting(iter([("a", model.count)]))("a")


def test_fp8_weights_are_not_cast() -> None:  # trap 33
    model = holding(w=torch.ones(4).to(torch.float8_e4m3fn))
    assert dict(named_weights(model, dtype=torch.bfloat16))["w"].dtype == torch.float8_e4m3fn


# ---- Names


@pytest.mark.parametrize(
    ("options", "buffers"),
    [
        ({}, {"count", "scale"}),
        ({"buffers": "all"}, {"count", "scale", "inv_freq"}),
        ({"buffers": "none"}, set()),
    ],
)
def test_persistent_buffers_are_included_and_others_by_option(  # trap 32
    options: dict[str, Any], buffers: set[str]
) -> None:
    assert set(names_of(Tiny(), **options)) & {"count", "scale", "inv_freq"} == buffers


def wrapped_inside(wrap: Callable[[nn.Module], Any]) -> nn.Module:
    model = Tiny()
    model.norm = wrap(model.norm)
    return model


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda: torch.compile(Tiny(), backend="eager"),
        lambda: DataParallel(torch.compile(Tiny(), backend="eager")),
        lambda: wrapped_inside(torch.compile),
        lambda: wrapped_inside(checkpoint_wrapper),
    ],
    ids=["compiled", "parallel", "compiled inside", "checkpoint"],
)
def test_wrappers_leave_no_trace_in_the_names(wrapped: Callable[[], nn.Module]) -> None:
    assert names_of(wrapped()) == names_of(Tiny())


def test_a_module_that_is_called_module_keeps_its_name() -> None:
    outer = nn.Module()
    outer.module = nn.Linear(2, 2)
    assert names_of(outer) == ["module.weight", "module.bias"]


def test_names_choose_and_rename() -> None:
    model = Tiny()
    assert names_of(model, names=["norm.weight", "norm.bias"]) == ["norm.weight", "norm.bias"]
    renamed = names_of(model, names=lambda name: f"policy.{name}" if "norm" in name else None)
    assert renamed == ["policy.norm.weight", "policy.norm.bias"]


class Adapted(nn.Module):
    """What PEFT puts in the place of a layer."""

    def __init__(self, base: nn.Module, merged: bool) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(4, 2, bias=False)})
        self.merged = merged


def peft_like(merged: bool) -> nn.Module:
    """What PEFT wraps a model in."""
    outer, model = nn.Module(), Tiny()
    model.router = Adapted(model.router, merged)  # type: ignore[assignment]
    outer.base_model = nn.Module()
    outer.base_model.model = model
    outer.peft_config = {"default": object()}
    return outer


def test_merged_adapters_give_the_names_of_the_base_model() -> None:
    assert names_of(peft_like(True)) == names_of(Tiny())


def test_transformers_model_gives_names_of_its_checkpoint() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=True)
    model = transformers.LlamaForCausalLM(config)
    weights = named_weights(model)
    assert weights.ties == {"lm_head.weight": "model.embed_tokens.weight"}
    assert {one.name for one in weights.manifest()} == set(model.state_dict())


def test_a_plain_model_is_not_sharded() -> None:
    assert not is_sharded(Tiny())
    assert not named_weights(Tiny()).collective


# ---- What is refused


class Quantized(torch.Tensor):
    """A tensor type whose bytes are not what it looks like."""


def quantized() -> nn.Module:
    return holding(w=torch.rand(3).as_subclass(Quantized))


def without_memory() -> nn.Module:
    model = Tiny()
    model.norm.weight.untyped_storage().resize_(0)
    return model


@pytest.mark.parametrize(
    ("model", "options", "error", "sentence"),
    [
        (Tiny, {"names": ["norm.wait"]}, NotFoundError, r'"norm\.wait"'),  # trap 33
        (Tiny, {"names": lambda _: "same"}, InvalidError, '"same"'),  # trap 33
        (Tiny, {"names": "weight"}, InvalidError, "names"),
        (Tiny, {"keep": "norm"}, InvalidError, "keep"),
        (Tiny, {"buffers": "some"}, InvalidError, "buffers"),
        (Tiny, {"dtype": torch.int32}, InvalidError, "int32"),
        (Tiny, {"dtype": torch.float8_e4m3fn}, InvalidError, "scale"),  # it would be missing
        (without_memory, {}, StateError, r'"norm\.weight" has no memory now'),  # trap 10
        (lambda: nn.Linear(2, 2, device="meta"), {}, StateError, "meta device"),
        (quantized, {}, UnsupportedError, '"w" is a Quantized'),  # trap 5
        (lambda: holding(w=torch.eye(3).to_sparse()), {}, UnsupportedError, "sparse"),
        (lambda: peft_like(False), {}, UnsupportedError, 'is not merged.*"merged".*"adapter"'),
    ],
)
def test_what_cannot_be_sent_is_refused_before_it_is_read(
    model: Callable[[], nn.Module], options: Any, error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        names_of(model(), **options)
