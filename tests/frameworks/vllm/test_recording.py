"""The loaders of vLLM's own models are recorded, whole and divided among two workers."""

from collections.abc import Iterator
from typing import Any

import extension_engines as engines
import models
import pytest
from refit import named_weights
from refit.integrations import vllm
from trainers import WAIT_S, trainer

EXTENSION = "recording_worker.RecordingExtension"
PLAIN = "plain_worker.PlainExtension"
KINDS = ["llama", "tied_llama", "qwen2", "qwen3_moe"]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def recorded(kind: str, workers: int, dtype: str) -> Iterator[dict[str, Any]]:
    """What each worker's recording has."""
    model = models.make(kind)
    with (
        engines.saved(model) as folder,
        engines.started(
            folder, worker_extension_cls=EXTENSION, tensor_parallel_size=workers
        ) as llm,
    ):
        path = f"{folder}/model.safetensors"
        yield from llm.collective_rpc("check_recording", args=(path, dtype))


def check(found: dict[str, Any], kind: str, dtype: str) -> None:
    assert found["unused"] == []
    assert found["parts"] >= found["tensors"]
    assert not found["overlap"]
    assert found["rows"] == found["parts"]
    assert found["converted"] == (0 if dtype == "float32" else found["parts"])
    assert any("qkv_proj" in one for one in found["targets"])
    assert any(
        ("w13" if kind == "qwen3_moe" else "gate_up_proj") in one for one in found["targets"]
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_models_loader_is_recorded(kind: str, dtype: str) -> None:
    (found,) = recorded(kind, 1, dtype)
    check(found, kind, dtype)


@pytest.mark.slow
def test_each_of_two_workers_records_its_share(kind: str) -> None:
    found = list(recorded(kind, 2, "bfloat16"))
    assert len(found) == 2
    for one in found:
        check(one, kind, "bfloat16")


def check_updates(kind: str, workers: int) -> None:
    """Three versions, of which vLLM reloads the first, and then twice more to be recorded: the
    last is what its own reload makes of it."""
    model = models.make(kind)
    options: Any = {"extension": PLAIN, "tensor_parallel_size": workers}
    with engines.engine(model, **options) as llm, trainer() as one:
        llm.collective_rpc("count_reloads")
        before = llm.collective_rpc("read_model")
        vllm.refit_connect(llm, one.endpoint)
        for version in (1, 2, 3):
            models.change(model, version)
            done = one.publish(named_weights(model))
            assert vllm.refit_update(llm, timeout=WAIT_S) == done.result(WAIT_S) == version
        found = llm.collective_rpc("read_model")
        with engines.saved(model) as folder:
            llm.collective_rpc("reload", args=(f"{folder}/model.safetensors",))
        expected = llm.collective_rpc("read_model")
    for (reloads, digests, places), (_, right, _), (_, first, where) in zip(
        found, expected, before, strict=True
    ):
        assert reloads == 3
        assert places == where
        assert digests == right
        assert digests != first


def test_the_extension_writes_versions_without_vllms_reload(kind: str) -> None:
    check_updates(kind, 1)


@pytest.mark.slow
def test_so_do_two_workers(kind: str) -> None:
    check_updates(kind, 2)


def test_weights_that_kernels_hold_are_not_recorded_and_stay() -> None:
    """vLLM's reload gives them to its kernels for CPUs; parameters that it empties say nothing."""
    model = models.make("tied_llama")
    with (
        engines.saved(model) as folder,
        engines.started(folder, worker_extension_cls=EXTENSION) as llm,
    ):
        before = engines.greedy(llm)
        (why,) = llm.collective_rpc("record_reload", args=(f"{folder}/model.safetensors",))
        assert "the loader reads values of" in why
        llm.reset_prefix_cache()
        assert engines.greedy(llm) == before
