"""named_weights: each weight once, under the name that the engine knows, in the dtype asked for."""

from typing import Any

import pytest
import torch
from refit.errors import InvalidError, NotFoundError, StateError, UnsupportedError
from refit.weights import is_sharded, named_weights
from torch import nn
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


def names_of(model: nn.Module, **options: Any) -> list[str]:
    return [name for name, _ in named_weights(model, **options)]


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


def test_a_tie_by_storage_is_found_where_the_parameters_are_distinct() -> None:  # trap 1
    model = Tiny()
    model.head.weight = nn.Parameter(model.embed.weight.detach())
    assert named_weights(model).ties == {"head.weight": "embed.weight"}


def test_parts_of_one_flat_buffer_are_not_ties() -> None:  # trap 2
    flat = torch.rand(20)
    model = nn.Module()
    model.a = nn.Parameter(flat[:10])
    model.b = nn.Parameter(flat[10:])
    model.c = nn.Parameter(flat[:5])
    weights = named_weights(model)
    assert weights.ties == {}
    assert torch.equal(dict(weights)["b"], flat[10:])


def test_the_same_memory_read_in_another_way_is_no_tie() -> None:  # trap 2
    matrix = torch.arange(9.0).view(3, 3)
    pairs = torch.complex(matrix, matrix + 1)
    model = nn.Module()
    for name, tensor in {
        "matrix": matrix,
        "turned": matrix.t(),
        "turned_again": matrix.t(),
        "imag": pairs.imag,
        "negative": pairs.conj().imag,
        "complex": pairs,
        "conjugate": pairs.conj(),
    }.items():
        model.register_buffer(name, tensor)
    weights = named_weights(model)
    assert weights.ties == {"turned_again": "turned"}
    given = dict(weights)
    assert torch.equal(given["negative"], -given["imag"])


def test_empty_parameters_are_not_taken_for_ties() -> None:  # trap 4
    model = nn.Module()
    model.a = nn.Parameter(torch.empty(0))
    model.b = nn.Parameter(torch.empty(0))
    assert named_weights(model).ties == {}
    assert names_of(model) == ["a", "b"]


def test_the_same_memory_in_two_dtypes_is_no_tie() -> None:  # trap 33
    model = Tiny()
    weights = named_weights(model, dtype=torch.bfloat16, keep=["head.*"])
    assert weights.ties == {}
    given = dict(weights)
    assert given["head.weight"].dtype == torch.float32
    assert given["embed.weight"].dtype == torch.bfloat16


def test_masters_are_published_as_bf16_and_routers_and_buffers_keep_theirs() -> None:  # trap 33
    model = Tiny()
    given = dict(named_weights(model, dtype=torch.bfloat16, keep=["*router*", "norm.*"]))
    kept = {name for name, tensor in given.items() if tensor.dtype != torch.bfloat16}
    assert kept == {"router.weight", "norm.weight", "norm.bias", "count", "scale"}
    assert torch.equal(given["embed.weight"], model.embed.weight.to(torch.bfloat16))
    assert model.embed.weight.dtype == torch.float32


def test_keep_may_be_a_function_of_name_and_tensor() -> None:  # trap 33
    given = dict(
        named_weights(Tiny(), dtype=torch.float16, keep=lambda _, tensor: tensor.dim() < 2)
    )
    assert given["norm.weight"].dtype == torch.float32
    assert given["router.weight"].dtype == torch.float16


def test_without_a_dtype_everything_is_given_where_it_lies() -> None:
    model = Tiny()
    for name, tensor in named_weights(model):
        assert tensor.data_ptr() == model.state_dict()[name].data_ptr()
        assert not tensor.requires_grad


def test_fp8_weights_are_not_cast() -> None:  # trap 33
    model = nn.Module()
    model.w = nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn), requires_grad=False)
    assert dict(named_weights(model, dtype=torch.bfloat16))["w"].dtype == torch.float8_e4m3fn


def test_a_cast_to_fp8_is_refused_because_its_scale_would_be_missing() -> None:  # trap 33
    with pytest.raises(InvalidError, match="scale"):
        named_weights(Tiny(), dtype=torch.float8_e4m3fn)


def test_persistent_buffers_are_included_and_the_others_by_option() -> None:  # trap 32
    model = Tiny()
    assert {"count", "scale"} <= set(names_of(model))
    assert "inv_freq" not in names_of(model)
    assert "inv_freq" in names_of(model, buffers="all")
    assert not {"count", "scale", "inv_freq"} & set(names_of(model, buffers="none"))


def test_wrappers_leave_no_trace_in_the_names() -> None:
    plain = names_of(Tiny())
    compiled = torch.compile(Tiny(), backend="eager")
    assert names_of(compiled) == plain
    assert names_of(DataParallel(compiled)) == plain
    inside = Tiny()
    inside.norm = torch.compile(inside.norm, backend="eager")
    assert names_of(inside) == plain


def test_checkpoint_wrappers_leave_no_trace_in_the_names() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Tiny()
    model.norm = checkpoint_wrapper(model.norm)
    assert names_of(model) == names_of(Tiny())


def test_a_module_that_is_called_module_keeps_its_name() -> None:
    outer = nn.Module()
    outer.module = nn.Linear(2, 2)
    assert names_of(outer) == ["module.weight", "module.bias"]


class Adapted(nn.Module):
    """What PEFT puts in the place of a layer."""

    def __init__(self, base: nn.Module, merged: bool) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(4, 2, bias=False)})
        self.merged = merged


class PeftLike(nn.Module):
    """What PEFT wraps a model in."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model
        self.peft_config = {"default": object()}


def test_merged_adapters_give_the_names_of_the_base_model() -> None:
    model = Tiny()
    plain = names_of(model)
    model.router = Adapted(model.router, merged=True)  # type: ignore[assignment]
    assert names_of(PeftLike(model)) == plain


def test_adapters_that_are_not_merged_are_refused_with_what_to_do() -> None:
    model = Tiny()
    model.router = Adapted(model.router, merged=False)  # type: ignore[assignment]
    ways = r'"router" is not merged.*lora="merged".*lora="adapter"'
    with pytest.raises(UnsupportedError, match=ways):
        names_of(PeftLike(model))


def test_names_choose_and_rename() -> None:
    model = Tiny()
    assert names_of(model, names=["norm.weight", "norm.bias"]) == ["norm.weight", "norm.bias"]
    renamed = names_of(model, names=lambda name: f"policy.{name}" if "norm" in name else None)
    assert renamed == ["policy.norm.weight", "policy.norm.bias"]


def test_a_tied_weight_whose_first_name_is_left_out_comes_under_the_other() -> None:  # trap 1
    weights = named_weights(Tiny(), names=["head.weight"])
    assert [name for name, _ in weights] == ["head.weight"]
    assert weights.ties == {}


def test_a_name_that_the_model_lacks_is_named() -> None:  # trap 33
    with pytest.raises(NotFoundError, match=r'"norm\.wait"'):
        names_of(Tiny(), names=["norm.wait"])


def test_two_weights_under_one_name_are_refused() -> None:  # trap 33
    with pytest.raises(InvalidError, match='"same"'):
        names_of(Tiny(), names=lambda _: "same")


def test_a_weight_without_memory_is_refused_before_it_is_read() -> None:  # trap 10
    model = Tiny()
    model.norm.weight.untyped_storage().resize_(0)
    with pytest.raises(StateError, match=r'"norm\.weight" has no memory now'):
        names_of(model)


def test_a_weight_on_the_meta_device_is_refused() -> None:
    model = nn.Linear(2, 2, device="meta")
    with pytest.raises(StateError, match="meta device"):
        names_of(model)


class Quantized(torch.Tensor):
    """A tensor type whose bytes are not what it looks like."""


def test_an_unknown_tensor_type_is_refused_by_name() -> None:  # trap 5
    model = nn.Module()
    model.register_buffer("w", torch.rand(3).as_subclass(Quantized))
    with pytest.raises(UnsupportedError, match='"w" is a Quantized'):
        names_of(model)


def test_a_sparse_weight_is_refused() -> None:  # trap 5
    model = nn.Module()
    model.register_buffer("w", torch.eye(3).to_sparse())
    with pytest.raises(UnsupportedError, match="sparse"):
        names_of(model)


@pytest.mark.parametrize(
    "options", [{"buffers": "some"}, {"names": "weight"}, {"keep": "norm"}, {"dtype": torch.int32}]
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidError):
        named_weights(Tiny(), **options)


def test_weights_can_be_iterated_again_and_show_what_the_model_has_then() -> None:
    model = Tiny()
    weights = named_weights(model)
    before = dict(weights)["scale"].clone()
    model.get_buffer("scale").mul_(3)
    assert torch.equal(dict(weights)["scale"], before * 3)


def test_a_model_of_transformers_gives_the_names_of_its_checkpoint() -> None:
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
