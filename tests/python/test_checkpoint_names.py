"""Weights of models of transformers under the names of their checkpoints, and back into such."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from broadcasting import Trainer
from refit.errors import InvalidError, StateError, UnsupportedError
from refit.weights.named_weights import named_weights
from torch.distributed.fsdp import fully_shard

transformers = pytest.importorskip("transformers")
load_file = pytest.importorskip("safetensors.torch").load_file

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def qwen3_moe() -> Any:
    few = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8}
    config = transformers.Qwen3MoeConfig(**SIZES, **few)
    return transformers.Qwen3MoeForCausalLM(config)


def mixtral() -> Any:
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4)
    return transformers.MixtralForCausalLM(config)


def qwen2_vl() -> Any:
    rope = {"type": "mrope", "mrope_section": [1, 1, 2]}
    vision = {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 16, "patch_size": 4}
    config = transformers.Qwen2VLConfig(
        text_config={**SIZES, "rope_scaling": rope}, vision_config=vision
    )
    return transformers.Qwen2VLForConditionalGeneration(config)


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


MODELS = pytest.mark.parametrize("make", [qwen3_moe, mixtral, qwen2_vl, llama])


def made(make: Callable[[], Any], seed: int = 1) -> Any:
    torch.manual_seed(seed)
    return make()


def saved(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    found: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return found


def assert_equal(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(found[name].equal(one) for name, one in expected.items())


@MODELS
@pytest.mark.parametrize("compiled", [False, True])
def test_names_are_those_of_the_checkpoint(make: Any, compiled: bool, tmp_path: Path) -> None:
    model = made(make)
    weights = named_weights(torch.compile(model) if compiled else model)
    found = dict(weights)
    expected = saved(model, tmp_path)
    assert_equal({name: found[name] for name in expected}, expected)  # it leaves tied ones out
    assert [one.name for one in weights.manifest()] == list(found)
    own = {one.untyped_storage().data_ptr() for one in model.state_dict().values()}
    assert all(one.untyped_storage().data_ptr() in own for one in found.values())


@MODELS
@pytest.mark.parametrize("bound", [False, True])
def test_a_model_takes_what_another_one_gives(trainer: Trainer, make: Any, bound: bool) -> None:
    source, engine = made(make), made(make, seed=2)
    if bound:
        trainer.subscriber.bind(engine)
    with trainer.offer(named_weights(source)) as update:
        assert (update.apply() if bound else update.load_into(engine)) == ([], [])
    assert all(map(torch.equal, source.parameters(), engine.parameters()))


def test_its_own_names_are_taken_too(trainer: Trainer) -> None:
    source, engine = made(qwen3_moe), made(qwen3_moe, seed=2)
    weights = {**source.state_dict(), "another": torch.ones(3)}
    assert trainer.offer(weights).load_into(engine, strict=False) == ([], ["another"])
    assert all(map(torch.equal, source.parameters(), engine.parameters()))
    trainer.subscriber.bind(engine)
    with pytest.raises(InvalidError, match="those of its checkpoint are bound"):
        trainer.offer(source.state_dict()).apply()
    trainer.subscriber.unbind()
    trainer.subscriber.bind(dict(engine.named_parameters()))
    with trainer.offer(dict(made(qwen3_moe, seed=3).named_parameters())) as update:
        assert update.apply() == ([], [])


def nomic_bert() -> Any:
    """Its checkpoint joins three parameters."""
    few = {key: SIZES[key] for key in ("vocab_size", "hidden_size", "intermediate_size")}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.NomicBertModel(transformers.NomicBertConfig(**few, **heads))


@pytest.mark.skipif(not hasattr(transformers, "NomicBertModel"), reason="of transformers 5.13")
def test_weights_joined_in_checkpoint_are_known_by_own_names(trainer: Trainer) -> None:
    source, engine = made(nomic_bert), made(nomic_bert, seed=2)
    with pytest.raises(UnsupportedError, match="joined of several parameters"):
        dict(named_weights(source))
    assert trainer.offer(dict(source.named_parameters())).load_into(engine) == ([], [])
    assert all(map(torch.equal, source.parameters(), engine.parameters()))


def test_experts_that_sleep_are_refused_by_name(trainer: Trainer) -> None:
    engine = made(qwen3_moe)
    update = trainer.offer(named_weights(made(qwen3_moe)))
    engine.model.layers[1].mlp.experts.down_proj.untyped_storage().resize_(0)
    for use in (update.load_into, trainer.subscriber.bind, lambda one: dict(named_weights(one))):
        with pytest.raises(StateError, match=r"1\.mlp\.experts\.down_proj: it has no memory now"):
            use(engine)


def test_experts_may_lie_in_another_order(trainer: Trainer) -> None:
    source = made(qwen3_moe)
    expected = {name: one.clone() for name, one in named_weights(source)}
    experts = source.model.layers[0].mlp.experts
    large = torch.zeros(experts.down_proj.numel() + 5)
    moved = large[5:].view(experts.down_proj.shape[::-1]).permute(2, 1, 0)
    experts.down_proj.data = moved.copy_(experts.down_proj.data)
    assert_equal(dict(named_weights(source)), expected)
    with pytest.raises(InvalidError, match="another order than its rows: make it contiguous"):
        trainer.offer(expected).load_into(source)


def test_square_weight_is_transposed_if_checkpoint_transposes_it(
    trainer: Trainer, tmp_path: Path
) -> None:
    loading = pytest.importorskip("transformers.core_model_loading")
    name = "self_attn.q_proj.weight"
    source, engine = made(llama), made(llama, seed=2)
    for one in (source, engine):
        turn = loading.Transpose(0, 1)
        one._weight_conversions = [loading.WeightConverter(name, name, operations=[turn])]
    expected = saved(source, tmp_path)
    found = dict(named_weights(source))
    assert not found[f"model.layers.0.{name}"].equal(source.model.layers[0].self_attn.q_proj.weight)
    assert_equal({name: found[name] for name in expected}, expected)
    assert trainer.offer(found).load_into(engine) == ([], [])
    assert all(map(torch.equal, source.parameters(), engine.parameters()))


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    where = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=where, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_experts_that_are_sharded_are_gathered_once(monkeypatch: Any) -> None:
    model = made(qwen3_moe)
    expected = {name: one.clone() for name, one in named_weights(model)}
    fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,)))
    from torch.distributed.tensor import DTensor

    plain, calls = DTensor.full_tensor, 0

    def counted(self: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return plain(self, **options)

    monkeypatch.setattr(DTensor, "full_tensor", counted)
    assert_equal(dict(named_weights(model)), expected)
    assert calls == len(list(model.parameters()))


def test_adapters_of_experts_are_merged_into_each(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj"], target_parameters=["experts.down_proj"]
    )
    model = peft.get_peft_model(made(qwen3_moe), config)
    with torch.no_grad():
        for one in model.parameters():
            if one.requires_grad:
                one.add_(torch.randn_like(one) * 0.3)
    merged = copy.deepcopy(model).merge_and_unload()
    assert_equal(dict(named_weights(model, lora="merged")), dict(named_weights(merged)))
