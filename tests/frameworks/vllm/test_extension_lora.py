"""An adapter of PEFT travels alone, and vLLM's own manager loads it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from broadcasting import NOWHERE
from extension_engines import BROKEN, engine, greedy
from refit import named_weights
from refit.errors import PeerError, StateError
from refit.integrations import vllm
from trainers import WAIT_S, Trainer, trainer

peft = pytest.importorskip("peft", reason="PEFT is not installed")

pytestmark = pytest.mark.slow

LORA: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 16, "max_loras": 2}


def request(name: str = "refit", number: int = 1, path: str = "refit") -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, path)


def adapted(seed: int = 7, **options: Any) -> Any:
    model = models.make("llama", seed)
    said = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    made = peft.get_peft_model(model, peft.LoraConfig(**{**said, **options}))
    change(made, 0)
    return made


def change(model: Any, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.add_(torch.randn(weight.shape, generator=source) * 0.1)


def base() -> Any:
    return models.make("llama", 7)


def described(model: Any) -> dict[str, Any]:
    return vllm.lora_adapter(model.peft_config["default"])


@pytest.fixture(scope="module", params=[1, 2], ids=["whole", "divided"])
def workers(request: pytest.FixtureRequest, version: str) -> int:
    if version.startswith("0.22."):
        pytest.skip("vLLM 0.22 page-locks memory for adapters, which takes a GPU")
    return int(request.param)


@pytest.fixture(scope="module")
def llm(workers: int) -> Iterator[Any]:
    with engine(base(), extension=BROKEN, tensor_parallel_size=workers, **LORA) as one:
        yield one


@pytest.fixture
def following(llm: Any, workers: int) -> Iterator[tuple[Any, Any, Trainer]]:
    model = adapted()
    with trainer() as one:
        vllm.refit_connect(llm, one.endpoint, lora=described(model))
        done = one.publish(named_weights(model, lora="adapter"), workers=workers)
        assert vllm.refit_update(llm, timeout=WAIT_S) == done.result(WAIT_S) == 1
        yield llm, model, one
        vllm.refit_close(llm)


def test_each_version_matches_fresh_engine_with_saved_adapter(
    following: tuple[Any, Any, Trainer], workers: int, tmp_path: Path
) -> None:
    llm, model, one = following
    plain = greedy(llm)
    found = [greedy(llm, lora_request=request())]
    model.save_pretrained(tmp_path / "1")
    for version in (2, 3):
        change(model, version)
        model.save_pretrained(tmp_path / str(version))
        done = one.publish(named_weights(model, lora="adapter"), workers=workers)
        assert vllm.refit_update(llm, timeout=WAIT_S) == done.result(WAIT_S) == version
        found.append(greedy(llm, lora_request=request()))
    assert greedy(llm) == plain
    assert plain != found[0] != found[1] != found[2]
    assert one.publisher.stats()["publish_bytes_last"] < 200_000
    options = {**LORA, "tensor_parallel_size": workers}
    with engine(base(), extension=None, **options) as fresh:
        assert greedy(fresh) == plain
        for version, answers in enumerate(found, 1):
            disk = request(f"disk-{version}", version, str(tmp_path / str(version)))
            assert greedy(fresh, lora_request=disk) == answers


def test_the_adapter_stays_beside_others(
    following: tuple[Any, Any, Trainer], tmp_path: Path
) -> None:
    llm, _, _ = following
    before = greedy(llm, lora_request=request())
    for number in (2, 3, 4):
        other = adapted()
        change(other, 20 + number)
        other.save_pretrained(tmp_path / str(number))
        name = request(f"other-{number}", number, str(tmp_path / str(number)))
        assert greedy(llm, lora_request=name) != before
    assert greedy(llm, lora_request=request()) == before


@pytest.mark.parametrize(
    ("options", "words"),
    [({}, "strange"), ({"r": 64}, "rank 64"), ({"use_dora": True}, "DoRA")],
    ids=["layer", "rank", "dora"],
)
def test_adapter_refused_by_vllm_leaves_previous_version(
    following: tuple[Any, Any, Trainer], workers: int, options: dict[str, Any], words: str
) -> None:
    llm, model, _ = following
    before = greedy(llm, lora_request=request())
    wrong = adapted(**options)
    weights = list(named_weights(wrong, lora="adapter"))
    if not options:
        weights = [(name.replace("q_proj", "strange"), one) for name, one in weights]
    with trainer() as other:
        vllm.refit_connect(llm, other.endpoint, lora=described(wrong))
        done = other.publish(weights, workers=workers)
        with pytest.raises(PeerError, match=words):
            vllm.refit_update(llm, timeout=WAIT_S)
        with pytest.raises(PeerError):
            done.result(WAIT_S)
        assert vllm.refit_version(llm) == 0
    assert greedy(llm, lora_request=request()) == before
    with trainer() as third:
        vllm.refit_connect(llm, third.endpoint, lora=described(model))
        change(model, 5)
        done = third.publish(named_weights(model, lora="adapter"), workers=workers)
        assert vllm.refit_update(llm, timeout=WAIT_S) == done.result(WAIT_S) == 1
        assert greedy(llm, lora_request=request()) != before


def test_an_engine_without_adapters_says_what_to_start_it_with() -> None:
    with engine(base()) as plain, pytest.raises(StateError, match="enable_lora=True"):
        vllm.refit_connect(plain, NOWHERE, lora=described(adapted()))
