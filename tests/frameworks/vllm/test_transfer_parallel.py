"""vLLM's weight transfer with two workers, each of which has a part of the model."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import models
import pytest
from extension_engines import (
    WAIT_S,
    Trainer,
    engine,
    fresh,
    greedy,
    publish_to_one_that_fails,
    trainer,
)
from refit import named_weights

pytestmark = pytest.mark.slow

WORKERS = 2
DIVIDED = {"tensor_parallel_size": WORKERS}


@pytest.fixture(scope="module")
def divided() -> Iterator[tuple[Any, Any]]:
    """An engine whose model is divided among two workers, and the model that it began with."""
    from vllm.config import WeightTransferConfig

    model = models.make("llama", 2)
    transfer = WeightTransferConfig(backend="refit")
    with engine(
        model, extension="on_cpu.BreakingOnCpu", weight_transfer_config=transfer, **DIVIDED
    ) as llm:
        llm.collective_rpc("name_device")
        yield llm, model


@pytest.fixture
def following(divided: tuple[Any, Any]) -> Iterator[tuple[Any, Any, Trainer]]:
    """The engine with version 1 of its own trainer."""
    llm, model = divided
    with trainer() as one:
        llm.init_weight_transfer_engine({"init_info": {"endpoint": one.endpoint}})
        assert settle(llm, model, one, 1) == 1
        yield llm, model, one


def update(llm: Any, **said: Any) -> None:
    llm.start_weight_update()
    llm.update_weights({"update_info": {"timeout_s": WAIT_S, **said}})
    llm.finish_weight_update()
    llm.reset_prefix_cache()


def finish(llm: Any) -> None:
    """What a driver does behind an update that failed: vLLM has ended it at one worker alone."""
    with suppress(Exception):
        llm.finish_weight_update()


def settle(llm: Any, model: Any, one: Trainer, version: int) -> int:
    models.change(model, version)
    done = one.publish(named_weights(model), version, workers=WORKERS)
    update(llm, version=version)
    return done.result(WAIT_S)


def test_each_version_answers_as_a_fresh_engine(following: tuple[Any, Any, Trainer]) -> None:
    llm, model, one = following
    found = [greedy(llm)]
    for version in (2, 3):
        assert settle(llm, model, one, version) == version
        found.append(greedy(llm))
    assert found[0] != found[1] != found[2]
    assert found[-1] == fresh(model, **DIVIDED)


@pytest.mark.parametrize(("rank", "tensors"), [(0, 0), (0, 15), (1, 5)])
def test_a_load_that_fails_at_one_worker_counts_at_none(
    following: tuple[Any, Any, Trainer], rank: int, tensors: int
) -> None:
    llm, model, one = following
    done = publish_to_one_that_fails(llm, model, one, rank, tensors)
    with pytest.raises(Exception, match=f"no room behind {tensors} tensors"):
        update(llm, version=2)
    with pytest.raises(Exception, match="2 workers did not apply it"):
        done.result(WAIT_S)
    finish(llm)
    assert llm.collective_rpc("echo", args=(7,)) == [7, 7]  # calls are in step
    assert settle(llm, model, one, 3) == 3
    assert greedy(llm) == fresh(model, **DIVIDED)


def test_without_a_version_the_wait_ends_and_calls_stay_in_step(
    following: tuple[Any, Any, Trainer],
) -> None:
    llm, model, one = following
    before = greedy(llm)
    for asked in range(3):
        with pytest.raises(Exception, match=r"(?i)deadline|no .*version|nothing"):
            update(llm, version=2, timeout_s=0.2)
        finish(llm)
        assert llm.collective_rpc("echo", args=(asked,)) == [asked, asked]
    assert greedy(llm) == before
    assert settle(llm, model, one, 2) == 2
    assert greedy(llm) != before
