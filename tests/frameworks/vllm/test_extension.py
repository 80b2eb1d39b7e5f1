"""A vLLM engine takes each version by the worker extension, and answers as a fresh one does."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import models
import pytest
import torch
from extension_engines import (
    BROKEN,
    WAIT_S,
    Trainer,
    after,
    engine,
    fresh,
    greedy,
    publish_to_one_that_fails,
    trainer,
)
from refit import named_weights
from refit.errors import DeadlineError, PeerError, RefitError, StateError
from refit.integrations import vllm


def settle(llm: Any, done: Any) -> int:
    version = vllm.refit_update(llm, timeout=WAIT_S)
    assert done.result(WAIT_S) == version
    return version


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("llama", "float32"), pytest.param("qwen2", "bfloat16", marks=pytest.mark.slow)],
)
def test_each_version_answers_as_a_fresh_engine(kind: str, dtype: str) -> None:
    model = models.make(kind, 1, getattr(torch, dtype))
    with engine(model, dtype=dtype) as llm, trainer() as one:
        found = [greedy(llm)]
        vllm.refit_connect(llm, one.endpoint, worker="rollout")
        for version in (1, 2, 3):
            models.change(model, version)
            assert settle(llm, one.publish(named_weights(model))) == version
            assert vllm.refit_version(llm) == version
            found.append(greedy(llm))
        assert [worker.name for worker in one.publisher.workers()] == ["rollout"]
        vllm.refit_close(llm)
        vllm.refit_close(llm)
        assert vllm.refit_version(llm) == 0
        assert greedy(llm) == found[-1]
    assert found[0] != found[1] != found[2] != found[3]
    assert fresh(model, dtype=dtype) == found[-1]


# ---- Two workers, each with a part of the model


@pytest.fixture(scope="module")
def divided() -> Iterator[tuple[Any, Any]]:
    """An engine whose model is divided among two workers, and the model it began with."""
    model = models.make("llama", 2)
    with engine(model, extension=BROKEN, tensor_parallel_size=2) as llm:
        yield llm, model


@pytest.fixture
def following(divided: tuple[Any, Any]) -> Iterator[tuple[Any, Any, Trainer]]:
    """The engine with version 1 of its own trainer."""
    llm, model = divided
    with trainer() as one:
        vllm.refit_connect(llm, one.endpoint)
        models.change(model, 1)
        assert settle(llm, one.publish(named_weights(model), workers=2)) == 1
        yield llm, model, one
        vllm.refit_close(llm)


def heals(llm: Any, model: Any, one: Trainer, version: int) -> None:
    """The next version is in both workers, whatever came before, and calls are in step."""
    models.change(model, version)
    done = one.publish(named_weights(model), version, workers=2)
    assert vllm.refit_update(llm, version, timeout=WAIT_S) == version
    assert done.result(WAIT_S) == version
    assert llm.collective_rpc("refit_version") == [version, version]


@pytest.mark.slow
def test_without_a_version_the_wait_ends_and_calls_stay_in_step(
    following: tuple[Any, Any, Trainer],
) -> None:
    llm, model, one = following
    before = greedy(llm)
    for _ in range(3):
        with pytest.raises(DeadlineError):
            vllm.refit_update(llm, timeout=0.2)
        assert llm.collective_rpc("refit_version") == [1, 1]
    assert greedy(llm) == before
    assert vllm.refit_update(llm, version=1, timeout=WAIT_S) == 1  # loaded again
    assert greedy(llm) == before
    heals(llm, model, one, 2)
    assert greedy(llm) != before


@pytest.mark.slow
def test_what_a_worker_cannot_connect_to_is_raised_and_calls_stay_in_step(
    divided: tuple[Any, Any],
) -> None:
    llm, _ = divided
    with pytest.raises(StateError, match="knows no trainer"):
        vllm.refit_update(llm, timeout=1)
    with pytest.raises(RefitError, match="rank0"):
        vllm.refit_connect(llm, "no endpoint at all", worker="rollout")
    assert llm.collective_rpc("refit_version") == [0, 0]
    with pytest.raises(StateError, match="enable_lora"):
        vllm.refit_connect(llm, "user://x", lora={"name": "a", "id": 1, "peft": "{}"})
    assert llm.collective_rpc("refit_version") == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "tensors"), [(0, 0), (0, 15), (1, 5)])
def test_a_load_that_fails_at_one_worker_counts_at_none(
    following: tuple[Any, Any, Trainer], rank: int, tensors: int
) -> None:
    llm, model, one = following
    done = publish_to_one_that_fails(llm, model, one, rank, tensors)
    with pytest.raises(PeerError, match=f"no room behind {tensors} tensors .*rank{rank}"):
        vllm.refit_update(llm, timeout=WAIT_S)
    with pytest.raises(PeerError, match="2 workers did not apply it"):
        done.result(WAIT_S)
    assert llm.collective_rpc("refit_version") == [0, 0]
    heals(llm, model, one, 3)
    found = greedy(llm), llm.collective_rpc("read_weights")
    if rank == 1:
        with engine(model, extension=BROKEN, tensor_parallel_size=2) as other:
            assert found == (greedy(other), other.collective_rpc("read_weights"))


@pytest.mark.slow
def test_names_that_the_model_does_not_have_are_raised_and_the_next_trainer_heals(
    divided: tuple[Any, Any],
) -> None:
    llm, model = divided
    with trainer() as one:
        vllm.refit_connect(llm, one.endpoint)
        strange = [*named_weights(model), ("model.layers.7.strange.weight", torch.zeros(3))]
        done = one.publish(strange, workers=2)
        with pytest.raises(PeerError, match=r'at weight "model\.layers\.7\.strange'):
            vllm.refit_update(llm, timeout=WAIT_S)
        with pytest.raises(PeerError):
            done.result(WAIT_S)
    with trainer() as one:
        vllm.refit_connect(llm, one.endpoint)
        heals(llm, model, one, 1)
        vllm.refit_close(llm)


@pytest.mark.slow
def test_a_trainer_that_dies_leaves_the_engine_on_its_version(
    following: tuple[Any, Any, Trainer],
) -> None:
    llm, model, _ = following
    before = greedy(llm)
    with trainer() as other:
        vllm.refit_connect(llm, other.endpoint)
    with pytest.raises(DeadlineError):
        vllm.refit_update(llm, timeout=1)
    assert greedy(llm) == before
    with trainer() as third:
        vllm.refit_connect(llm, third.endpoint)
        heals(llm, model, third, 1)


@pytest.mark.slow
def test_a_worker_that_dies_ends_the_update_at_both_sides(divided: tuple[Any, Any]) -> None:
    llm, model = divided
    with trainer() as one:
        vllm.refit_connect(llm, one.endpoint, config={"broadcast": {"heartbeat_ms": 100}})
        one.publisher.wait_workers(2, WAIT_S)
        name = one.publisher.workers()[1].name
        process = int(name.split("-")[-2])
        after(1.0, lambda: os.kill(process, signal.SIGKILL))
        with pytest.raises(PeerError, match="the engine did not answer"):
            vllm.refit_update(llm, timeout=WAIT_S)
        with suppress(PeerError):  # the trainer may not have missed them yet
            one.publish(named_weights(model), workers=0).result(WAIT_S)
        assert one.publish(named_weights(model), 5, workers=0).result(WAIT_S) == 5
