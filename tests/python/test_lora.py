"""The weights of models with PEFT's adapters: merged as PEFT merges them, or these alone."""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft", reason="PEFT is not installed")

from broadcasting import Trainer, same  # noqa: E402
from refit.errors import InvalidError, StateError, UnsupportedError  # noqa: E402
from refit.weights.named_weights import named_weights  # noqa: E402
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
        for one in model.parameters():
            if one.requires_grad:
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


def fan_in_fan_out() -> Any:
    """Its layers have their weights the other way round."""
    pytorch_utils = pytest.importorskip("transformers.pytorch_utils")
    torch.manual_seed(3)
    model = nn.Sequential(pytorch_utils.Conv1D(16, 8), nn.ReLU(), pytorch_utils.Conv1D(8, 16))
    return shaken(peft.get_peft_model(model, lora(fan_in_fan_out=True, target_modules=["0", "2"])))


MODELS: dict[str, Callable[[], Any]] = {
    "linear": lambda: adapted(lora()),
    "bfloat16": lambda: adapted(lora(), dtype=torch.bfloat16),
    "half": lambda: adapted(lora(), dtype=torch.float16),
    "rslora": lambda: adapted(lora(use_rslora=True, lora_alpha=7)),
    "dora": lambda: adapted(lora(use_dora=True)),
    "bias": lambda: adapted(lora(lora_bias=True)),
    "trained bias": lambda: adapted(lora(bias="all")),
    "fan_in_fan_out": fan_in_fan_out,
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
    "modules exchanged": lambda: adapted(peft.LNTuningConfig(target_modules=["norm"])),
    "weights rotated": lambda: adapted(
        peft.OFTConfig(target_modules=["up"], r=4, oft_block_size=0)
    ),
    "weights reflected": lambda: adapted(peft.HRAConfig(target_modules=["up", "down"], r=4)),
    "banks shared": lambda: adapted(peft.VeraConfig(target_modules=["up"], r=4)),
}


def base_of(model: Any) -> dict[str, Any]:
    """The weights below the adapters, under the names of the plain model."""
    other = copy.deepcopy(model)
    return dict(other.unload().state_dict())


def merged_by_peft(model: Any) -> dict[str, Any]:
    """Under the names of the plain model."""
    other = copy.deepcopy(model)
    other.merge_adapter()
    return {name: one.clone() for name, one in named_weights(other)}


@pytest.mark.parametrize("kind", MODELS)
def test_merged_weights_are_those_that_peft_makes(kind: str) -> None:
    model = MODELS[kind]()
    before, parameters = copy.deepcopy(model.state_dict()), list(model.parameters())
    found = dict(named_weights(model, lora="merged"))
    assert same(before, model.state_dict())
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert same(found, merged_by_peft(model))
    assert found.keys() == base_of(model).keys()
    assert not same(found, base_of(model))
    specs = {one.name for one in named_weights(model, lora="merged").manifest()}
    assert specs == found.keys()


@pytest.mark.parametrize("kind", ["linear", "dora", "embedding", "two adapters"])
def test_a_plain_worker_computes_what_the_policy_does(trainer: Trainer, kind: str) -> None:
    model, worker = MODELS[kind](), Tiny()
    trainer.offer(named_weights(model, lora="merged")).load_into(worker)
    torch.testing.assert_close(worker(TOKENS), model(TOKENS))


TOKENS = torch.arange(22).remainder(11).view(2, 11)


@pytest.mark.parametrize("kind", sorted(MODELS.keys() - {"fan_in_fan_out", "bfloat16", "half"}))
@pytest.mark.parametrize("way", ["merged", None])
def test_with_adapters_off_the_reference_is_sent(kind: str, way: Any) -> None:
    model, plain = MODELS[kind]().eval(), Tiny().eval()
    if kind == "parameters" and way is None:
        pytest.skip("PEFT changes the parameter for each forward pass")
    with model.disable_adapter(), torch.no_grad():
        plain.load_state_dict(dict(named_weights(model, lora=way)))
        torch.testing.assert_close(plain(TOKENS), model(TOKENS))


def test_the_module_that_is_saved_is_that_of_the_active_adapter() -> None:
    model = adapted(lora(modules_to_save=["norm"]))
    model.add_adapter("second", lora(modules_to_save=["norm"]))
    model.set_adapter("second")
    saved = model.base_model.model.norm.modules_to_save["second"]
    nn.init.constant_(saved.weight, 3.0)
    assert dict(named_weights(model, lora="merged"))["norm.weight"].equal(saved.weight)


def merged_and_off() -> Any:
    model = adapted(lora())
    model.merge_adapter()
    return off(model)


def off(model: Any) -> Any:
    model.base_model.disable_adapter_layers()
    return model


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
            assert sum(other() is not None for other in made) <= 2  # a weight and its bias
            made.append(weakref.ref(one))
    assert len(made) == 6
    only = named_weights(model, lora="merged", names=["up.bias"])
    assert [name for name, _ in only] == ["up.bias"]


def test_merged_model_or_one_without_adapters_is_taken_as_is() -> None:
    model, plain = adapted(lora()), Tiny(tied=True)
    model.merge_adapter()
    for one in (model, plain):
        assert same(dict(named_weights(one, lora="merged")), dict(named_weights(one)))
    assert named_weights(plain, lora="merged").ties == {"head.weight": "embed.weight"}


def test_types_on_the_wire_are_converted_after_the_merge() -> None:
    model = adapted(lora())
    expected = {name: one.bfloat16() for name, one in merged_by_peft(model).items()}
    assert same(dict(named_weights(model, lora="merged", dtype=torch.bfloat16)), expected)


def test_a_tie_ends_where_one_of_two_names_has_an_adapter() -> None:
    model = adapted(lora(target_modules=["head"]), tied=True)
    weights = named_weights(model, lora="merged")
    assert weights.ties == {}
    found = dict(weights)
    assert torch.equal(found["embed.weight"], model.base_model.model.embed.weight)
    assert not torch.equal(found["embed.weight"], found["head.weight"])


# ---- The adapters alone


@pytest.mark.parametrize("kind", ["linear", "dora", "embedding", "modules_to_save", "conv"])
def test_adapters_alone_have_the_names_that_peft_saves(kind: str) -> None:
    model = MODELS[kind]()
    expected = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    found = dict(named_weights(model, lora="adapter"))
    assert same(found, expected)
    assert all(name.startswith("base_model.model.") for name in found)
    assert not any("default" in name for name in found)
    assert all(found[name].data_ptr() == one.data_ptr() for name, one in expected.items())


def test_a_peft_worker_takes_the_adapters(trainer: Trainer) -> None:
    model, worker = adapted(lora()), peft.get_peft_model(Tiny(), lora())
    worker.base_model.model.load_state_dict(
        {n: p for n, p in model.base_model.model.state_dict().items() if "lora" not in n}, False
    )
    update = trainer.offer(named_weights(model, lora="adapter"))
    peft.set_peft_model_state_dict(worker, dict(update.tensors(copy=True)))
    tokens = torch.arange(11).view(1, 11)
    assert torch.equal(worker(tokens), model(tokens))


def test_adapters_within_wrappers_have_plain_names() -> None:
    model = adapted(lora())
    plain = [name for name, _ in named_weights(model, lora="adapter")]
    model.base_model.model.up = torch.compile(model.base_model.model.up, backend="eager")
    whole = torch.compile(model, backend="eager")
    assert sorted(name for name, _ in named_weights(whole, lora="adapter")) == sorted(plain)
    merged = dict(named_weights(whole, lora="merged"))
    assert {"up.weight", "up.bias", "down.weight"} <= merged.keys()


def test_with_a_prompt_off_the_base_model_is_sent() -> None:
    model = prompted()
    with model.disable_adapter():
        found = dict(named_weights(model))
    assert same(found, dict(named_weights(model.get_base_model())))
    with pytest.raises(UnsupportedError, match="a prompt that was learnt"):
        list(named_weights(model))


def test_adapters_around_others_are_merged_after_them(trainer: Trainer) -> None:
    """A rotation around a layer that adds turns what is added, too."""
    torch.manual_seed(3)
    inner = peft.LoHaConfig(r=2, target_modules=["up"], init_weights=False)
    outer = peft.OFTConfig(r=0, oft_block_size=4, target_modules=["up"], init_weights=False)
    model = peft.PeftMixedModel(Tiny(), inner, "inner")
    model.add_adapter("outer", outer)
    model.set_adapter(["outer", "inner"])
    worker = Tiny()
    trainer.offer(named_weights(shaken(model), lora="merged")).load_into(worker)
    torch.testing.assert_close(worker(TOKENS), model(TOKENS))


# ---- What is refused


def broken() -> Any:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("no way")

    model = adapted(lora())
    model.base_model.model.up.get_delta_weight = fail
    return model


def llama(config: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 16}
    small = transformers.LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    return peft.get_peft_model(transformers.LlamaForCausalLM(small), config)


def prompted() -> Any:
    """Has learnt a prompt, which no weight holds."""
    return llama(peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


def prompted_within() -> Any:
    """Has learnt one for its attention."""
    few = {"adapter_len": 4, "adapter_layers": 1}
    return llama(peft.AdaptionPromptConfig(task_type="CAUSAL_LM", **few))


@pytest.mark.parametrize(
    ("model", "way", "error", "sentence"),
    [
        (MODELS["linear"], None, UnsupportedError, r'lora="merged".*lora="adapter"'),
        (broken, "merged", UnsupportedError, r'"up" cannot be merged .*no way.*lora="adapter"'),
        (prompted, None, UnsupportedError, "a prompt that was learnt"),
        (prompted, "merged", UnsupportedError, "a prompt that was learnt"),
        (prompted_within, None, UnsupportedError, r'self_attn" has a prompt .*AdaptionPrompt'),
        (prompted_within, "merged", UnsupportedError, "AdaptionPrompt"),
        (two_adapters, "adapter", UnsupportedError, r"2 adapters are active \(default, second\)"),
        (merged_and_off, "merged", UnsupportedError, '"up" are off, but merged'),
        (merged_and_off, None, UnsupportedError, '"up" are off, but merged'),
        (lambda: off(adapted(lora())), "adapter", StateError, "they are off now"),
        (Tiny, "adapter", InvalidError, "a Tiny has none"),
        (Tiny, "merge", InvalidError, 'lora must be "merged"'),
    ],
)
def test_what_cannot_be_sent_is_refused_with_the_reason(
    model: Callable[[], Any], way: Any, error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        list(named_weights(model(), lora=way))
