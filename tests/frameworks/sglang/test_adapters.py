"""An adapter alone travels, and SGLang's own loader takes it: the base weights stay."""

from collections.abc import Iterator
from typing import Any

import engines
import models
import peft
import pytest
import refit
import torch
from engines import EngineProcess
from refit.errors import ExistsError, InvalidError, PeerError
from trainers import WAIT_S, trainer

pytestmark = pytest.mark.slow

LORA = {
    "enable_lora": True,
    "max_lora_rank": 8,
    "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"],
    "lora_backend": "torch_native",
    "max_loras_per_batch": 2,
}
NAME = "policy"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return models.save(models.make("llama"), tmp_path_factory.mktemp("base"))


def adapted(seed: int, rank: int = 8) -> Any:
    """The base model with an adapter that says something."""
    config = peft.LoraConfig(
        r=rank, lora_alpha=16, target_modules=LORA["lora_target_modules"], task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(models.make("llama"), config)
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.copy_(torch.randn(weight.shape, generator=source) * 0.2)
    return model


@pytest.fixture(scope="module")
def expected(base: str, tmp_path_factory: pytest.TempPathFactory) -> list[engines.Outputs]:
    """Without an adapter, and with each that the engine was started with from a folder."""
    folders = {}
    for seed in (1, 2):
        folders[f"v{seed}"] = str(tmp_path_factory.mktemp(f"adapter{seed}"))
        adapted(seed).save_pretrained(folders[f"v{seed}"])
    with engines.engine(base, custom_weight_loader=None, lora_paths=folders, **LORA) as fresh:
        return [fresh("outputs"), *(fresh("outputs", lora_path=[one] * 3) for one in folders)]


@pytest.fixture
def live(base: str, expected: Any) -> Iterator[EngineProcess]:
    with engines.engine(base, **LORA) as one:
        yield one


def test_published_adapters_answer_like_those_loaded_from_folder(
    live: EngineProcess, expected: list[engines.Outputs]
) -> None:
    assert len({str(one) for one in expected}) == 3
    with trainer() as publishing, refit.Subscriber(publishing.endpoint) as receiving:
        for seed in (1, 2):
            model = adapted(seed)
            done = publishing.publish(refit.named_weights(model, lora="adapter"))
            with receiving.next(WAIT_S) as update:
                tensors = _own(update)
                assert sum(one.nbytes for _, one in tensors) < 100_000
                live("refit_adapter", NAME, tensors, model.peft_config["default"].to_dict())
                update.accept()
            done.result(WAIT_S)
            assert live("outputs", lora_path=[NAME] * 3) == expected[seed]
            assert live("outputs") == expected[0]


def test_unusable_adapters_are_refused_and_next_one_is_loaded(
    live: EngineProcess, expected: list[engines.Outputs]
) -> None:
    model = adapted(1)
    config = model.peft_config["default"].to_dict()
    weights = [(name, one.clone()) for name, one in refit.named_weights(model, lora="adapter")]
    with pytest.raises(InvalidError, match="no tensors"):
        live("refit_adapter", NAME, [], config)
    with pytest.raises(InvalidError, match="came twice"):
        live("refit_adapter", NAME, [*weights, weights[0]], config)
    large = adapted(1, rank=64)
    too_large = list(refit.named_weights(large, lora="adapter"))
    with pytest.raises(PeerError, match="SGLang refused the adapter"):
        live("refit_adapter", NAME, too_large, large.peft_config["default"].to_dict())
    live("refit_adapter", NAME, weights, config)
    with pytest.raises(ExistsError):
        live("refit_adapter", NAME, weights, config, replace=False)
    assert live("outputs", lora_path=[NAME] * 3) == expected[1]


def _own(update: Any) -> list[tuple[str, torch.Tensor]]:
    return [(name, one.clone()) for name, one in update.tensors()]
