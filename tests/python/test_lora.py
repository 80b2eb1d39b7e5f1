"""The weights of models with PEFT's adapters: merged as PEFT merges them, or these alone."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft", reason="PEFT is not installed")

from broadcasting import published  # noqa: E402
from refit.errors import InvalidError, UnsupportedError  # noqa: E402
from refit.weights import named_weights  # noqa: E402
from torch import nn  # noqa: E402


class Tiny(nn.Module):
    def __init__(self, dtype: Any = torch.float32, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8, dtype=dtype)
        self.conv = nn.Conv1d(8, 8, 3, padding=1, dtype=dtype)
        self.up = nn.Linear(8, 16, dtype=dtype)
        self.down = nn.Linear(16, 8, dtype=dtype)
        self.norm = nn.LayerNorm(8, dtype=dtype)
        self.head = nn.Linear(8, 11, bias=False, dtype=dtype)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Any) -> Any:
        hidden = self.embed(tokens)
        hidden = hidden + self.conv(hidden.transpose(1, 2)).transpose(1, 2)
        return self.head(self.norm(self.down(self.up(hidden).relu())))


def shaken(model: nn.Module) -> nn.Module:
    """Every adapter does something: they begin as zeros."""
    torch.manual_seed(5)
    with torch.no_grad():
        for name, one in model.named_parameters():
            if any(part in name for part in ("lora_", "hada_", "ia3_", "tokens_", "to_save")):
                one.add_(torch.randn_like(one) * 0.3)
    return model


def adapted(config: Any, **kinds: Any) -> Any:
    torch.manual_seed(3)
    return shaken(peft.get_peft_model(Tiny(**kinds), config))


def lora(**options: Any) -> Any:
    return peft.LoraConfig(**{"r": 4, "target_modules": ["up", "down"], **options})


def two_adapters() -> Any:
    model = adapted(lora())
    model.add_adapter("second", lora(r=2, lora_alpha=3, target_modules=["down", "head"]))
    model.base_model.set_adapter(["default", "second"])
    return shaken(model)


MODELS: dict[str, Callable[[], Any]] = {
    "linear": lambda: adapted(lora()),
    "bfloat16": lambda: adapted(lora(), dtype=torch.bfloat16),
    "half": lambda: adapted(lora(), dtype=torch.float16),
    "rslora": lambda: adapted(lora(use_rslora=True, lora_alpha=7)),
    "dora": lambda: adapted(lora(use_dora=True)),
    "bias": lambda: adapted(lora(lora_bias=True)),
    "trained bias": lambda: adapted(lora(bias="all")),
    "fan_in_fan_out": lambda: adapted(lora(fan_in_fan_out=True, target_modules=["norm_free"])),
    "embedding": lambda: adapted(lora(target_modules=["embed", "head"])),
    "dora embedding": lambda: adapted(lora(target_modules=["embed"], use_dora=True)),
    "conv": lambda: adapted(lora(target_modules=["conv", "up"])),
    "patterns": lambda: adapted(lora(rank_pattern={"up": 2}, alpha_pattern={"down": 5})),
    "modules_to_save": lambda: adapted(lora(modules_to_save=["norm", "head"])),
    "trainable tokens": lambda: adapted(lora(trainable_token_indices={"embed": [1, 4]})),
    "parameters": lambda: adapted(lora(target_modules=[], target_parameters=["up.weight"])),
    "two adapters": two_adapters,
    "loha": lambda: adapted(peft.LoHaConfig(r=4, target_modules=["up", "conv"])),
    "ia3": lambda: adapted(
        peft.IA3Config(target_modules=["up", "down"], feedforward_modules=["down"])
    ),
}


def fan_in_fan_out() -> Any:
    """Its layers have their weights the other way round."""
    pytorch_utils = pytest.importorskip("transformers.pytorch_utils")
    torch.manual_seed(3)
    model = nn.Sequential(pytorch_utils.Conv1D(16, 8), nn.ReLU(), pytorch_utils.Conv1D(8, 16))
    return shaken(peft.get_peft_model(model, lora(fan_in_fan_out=True, target_modules=["0", "2"])))


MODELS["fan_in_fan_out"] = fan_in_fan_out


def base_of(model: Any) -> dict[str, Any]:
    """The weights below the adapters, under the names of the plain model."""
    other = copy.deepcopy(model)
    return dict(other.unload().state_dict())


def merged_by_peft(model: Any) -> dict[str, Any]:
    """Under the names of the plain model."""
    other = copy.deepcopy(model)
    other.merge_adapter()
    return {name: one.clone() for name, one in named_weights(other)}


def state_of(model: Any) -> dict[str, bytes]:
    return {
        name: one.numpy(force=True).tobytes()
        if one.dtype != torch.bfloat16
        else one.detach().view(torch.int16).numpy().tobytes()
        for name, one in model.state_dict().items()
    }


@pytest.mark.parametrize("kind", MODELS)
def test_merged_weights_are_those_that_peft_makes(kind: str) -> None:
    model = MODELS[kind]()
    before = state_of(model)
    found = dict(named_weights(model, lora="merged"))
    assert state_of(model) == before
    expected = merged_by_peft(model)
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        assert torch.equal(found[name], one), name
    assert not any("lora" in name or "base_layer" in name for name in found)
    base = base_of(model)
    assert found.keys() == base.keys()
    assert any(not torch.equal(one, base[name]) for name, one in found.items())
    specs = {one.name: one for one in named_weights(model, lora="merged").manifest()}
    assert specs.keys() == expected.keys()


@pytest.mark.parametrize("kind", ["linear", "dora", "embedding", "two adapters"])
def test_a_plain_worker_computes_what_the_policy_does(kind: str) -> None:
    model = MODELS[kind]()
    worker = Tiny()
    with published(named_weights(model, lora="merged")) as update:
        update.load_into(worker)
    tokens = torch.arange(22).remainder(11).view(2, 11)
    torch.testing.assert_close(worker(tokens), model(tokens))


def test_weights_are_merged_again_at_each_iteration() -> None:
    model = adapted(lora())
    weights = named_weights(model, lora="merged").planned()
    first = {name: one.clone() for name, one in weights}
    half_way = iter(weights)
    while next(half_way)[0] != "up.weight":
        pass
    with torch.no_grad():
        model.base_model.model.up.lora_B["default"].weight.add_(1)
        model.base_model.model.up.base_layer.bias.add_(1)
    second = dict(weights)
    assert not torch.equal(first["up.weight"], second["up.weight"])
    assert torch.equal(first["up.bias"] + 1, second["up.bias"])
    assert torch.equal(first["down.weight"], second["down.weight"])


def test_one_merged_layer_is_alive_at_a_time() -> None:
    model = adapted(lora(target_modules=["embed", "up", "down", "head"]))
    own = {one.data_ptr() for one in model.parameters()}
    made: list[Any] = []
    for _, one in named_weights(model, lora="merged", names=lambda name: name):
        if one.data_ptr() not in own:
            gc.collect()
            assert sum(other() is not None for other in made) <= 2  # a weight and its bias
            made.append(weakref.ref(one))
    assert len(made) == 6
    only = list(named_weights(model, lora="merged", names=["up.bias"]))
    assert [name for name, _ in only] == ["up.bias"]


def test_adapters_that_are_merged_already_are_taken_as_they_are() -> None:
    model = adapted(lora())
    model.merge_adapter()
    merged = {name: one.clone() for name, one in named_weights(model)}
    again = dict(named_weights(model, lora="merged"))
    assert all(torch.equal(one, again[name]) for name, one in merged.items())


def test_models_without_adapters_are_given_as_they_are() -> None:
    model = Tiny(tied=True)
    weights = named_weights(model, lora="merged")
    assert weights.ties == {"head.weight": "embed.weight"}
    assert [name for name, _ in weights] == [name for name, _ in named_weights(model)]


def test_types_on_the_wire_are_converted_behind_the_merge() -> None:
    model = adapted(lora())
    merged = merged_by_peft(model)
    for name, one in named_weights(model, lora="merged", dtype=torch.bfloat16):
        assert torch.equal(one, merged[name].bfloat16())


def test_a_tie_ends_where_one_of_two_names_has_an_adapter() -> None:
    model = adapted(lora(target_modules=["head"]), tied=True)
    weights = named_weights(model, lora="merged")
    assert weights.ties == {}
    found = dict(weights)
    assert torch.equal(found["embed.weight"], model.base_model.model.embed.weight)
    assert not torch.equal(found["embed.weight"], found["head.weight"])


def test_without_a_word_the_refusal_names_both_ways() -> None:
    with pytest.raises(UnsupportedError, match=r'lora="merged".*lora="adapter"'):
        list(named_weights(adapted(lora())))


def test_what_cannot_be_merged_is_refused_with_the_layer() -> None:
    model = adapted(lora())

    def broken(*_: object, **__: object) -> None:
        raise ValueError("no way")

    model.base_model.model.up.get_delta_weight = broken
    with pytest.raises(UnsupportedError, match=r'"up" cannot be merged .*no way.*lora="adapter"'):
        list(named_weights(model, lora="merged"))


def test_a_learnt_prompt_is_not_left_out_in_silence() -> None:
    transformers = pytest.importorskip("transformers")
    small = transformers.LlamaConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(transformers.LlamaForCausalLM(small), config)
    for way in (None, "merged"):
        with pytest.raises(UnsupportedError, match="a prompt that was learnt"):
            list(named_weights(model, lora=way))


# ---- The adapters alone


@pytest.mark.parametrize("kind", ["linear", "dora", "embedding", "modules_to_save", "conv"])
def test_adapters_alone_have_the_names_that_peft_saves(kind: str) -> None:
    model = MODELS[kind]()
    expected = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    found = dict(named_weights(model, lora="adapter"))
    assert found.keys() == expected.keys()
    assert all(name.startswith("base_model.model.") for name in found)
    assert not any("default" in name for name in found)
    assert all(torch.equal(one, expected[name]) for name, one in found.items())
    assert all(found[name].data_ptr() == one.data_ptr() for name, one in expected.items())


def test_a_peft_worker_takes_the_adapters() -> None:
    model, worker = adapted(lora()), peft.get_peft_model(Tiny(), lora())
    worker.base_model.model.load_state_dict(
        {n: p for n, p in model.base_model.model.state_dict().items() if "lora" not in n}, False
    )
    with published(named_weights(model, lora="adapter")) as update:
        peft.set_peft_model_state_dict(worker, dict(update.tensors(copy=True)))
    tokens = torch.arange(11).view(1, 11)
    assert torch.equal(worker(tokens), model(tokens))


def test_adapters_within_wrappers_have_plain_names() -> None:
    model = adapted(lora())
    plain = [name for name, _ in named_weights(model, lora="adapter")]
    model.base_model.model.up = torch.compile(model.base_model.model.up)
    whole = torch.compile(model)
    assert sorted(name for name, _ in named_weights(whole, lora="adapter")) == sorted(plain)
    merged = dict(named_weights(whole, lora="merged"))
    assert {"up.weight", "up.bias", "down.weight"} <= merged.keys()


def test_several_active_adapters_are_not_sent_alone() -> None:
    with pytest.raises(UnsupportedError, match=r"2 adapters are active \(default, second\)"):
        list(named_weights(two_adapters(), lora="adapter"))
    with pytest.raises(InvalidError, match="a Tiny has none"):
        list(named_weights(Tiny(), lora="adapter"))
    with pytest.raises(InvalidError, match='lora must be "merged"'):
        named_weights(Tiny(), lora="merge")  # type: ignore[arg-type]
