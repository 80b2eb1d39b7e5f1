"""vLLM's weight transfer with refit: an engine, and a trainer that is another process."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import models
import pytest
from extension_engines import engine, greedy, quantized
from processes import Trainer, fresh, trainer

UPDATES = 20


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    """An engine that knows refit by the plugin of its wheel alone."""
    from vllm.config import WeightTransferConfig

    transfer = WeightTransferConfig(backend="refit")
    model = models.make("llama", 1)
    with engine(model, extension="on_cpu.OnCpu", weight_transfer_config=transfer) as one:
        one.collective_rpc("name_device")
        yield one


@pytest.fixture
def training(llm: Any, tmp_path: Path) -> Iterator[Trainer]:
    with trainer(tmp_path) as one:
        connect(llm, one)
        yield one


def connect(llm: Any, one: Trainer) -> None:
    said = {"endpoint": one.says["endpoint"], "connect_s": 30.0}
    llm.init_weight_transfer_engine({"init_info": said})


def update(llm: Any, **said: Any) -> None:
    llm.start_weight_update()
    llm.update_weights({"update_info": {"timeout_s": 60.0, **said}})
    llm.finish_weight_update()
    llm.reset_prefix_cache()


def settle(llm: Any, one: Trainer, name: str, seed: int) -> Any:
    """One version from the trainer into the engine, and what that answers then."""
    one.tell(name, seed)
    update(llm)
    assert "version" in one.answer()
    return greedy(llm)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # vLLM 0.22 starts each fresh engine in 20 s
def test_each_of_twenty_versions_answers_as_a_fresh_engine(llm: Any, training: Trainer) -> None:
    names = [f"v{seed}" for seed in range(1, UPDATES + 1)]
    found = [settle(llm, training, name, seed) for seed, name in enumerate(names, 1)]
    assert all(one != other for one, other in pairwise(found))
    assert found == fresh(training.folder, *names)


@pytest.mark.parametrize("fault", ["shape", pytest.param("stranger", marks=pytest.mark.slow)])
def test_a_load_that_fails_half_way_is_told_to_both_and_the_next_one_heals(
    llm: Any, training: Trainer, fault: str
) -> None:
    settle(llm, training, "good", 1)
    training.tell("bad", 2, fault)
    with pytest.raises(Exception, match=r"(?i)fail|error"):
        update(llm)
    refused = training.answer()
    assert refused["error"] == "PeerError"
    assert "did not apply it" in refused["why"]
    with suppress(Exception):  # 0.22 wants it finished, later ones have ended it
        llm.finish_weight_update()
    assert len(greedy(llm)) == 4  # of both versions, but the engine lives

    assert [settle(llm, training, "next", 3)] == fresh(training.folder, "next")


@pytest.mark.slow
def test_without_a_trainer_nothing_is_touched(llm: Any, tmp_path: Path) -> None:
    with trainer(tmp_path) as one:
        connect(llm, one)
        before = settle(llm, one, "v", 1)
        with pytest.raises(Exception, match=r"(?i)deadline|nothing|no .*version"):
            update(llm, timeout_s=0.5)
    with suppress(Exception):
        llm.finish_weight_update()
    assert greedy(llm) == before


@pytest.mark.slow
def test_a_trainer_that_dies_is_not_waited_for_and_another_one_takes_over(
    llm: Any, tmp_path: Path
) -> None:
    with trainer(tmp_path) as one, ThreadPoolExecutor(1) as pool:
        connect(llm, one)
        before = settle(llm, one, "v", 1)
        waiting = pool.submit(update, llm, timeout_s=600.0)
        time.sleep(2)
        began = time.monotonic()
        one.kill()
        with pytest.raises(Exception, match=r"hears no trainer"):
            waiting.result(90)
        assert time.monotonic() - began < 60
    with suppress(Exception):
        llm.finish_weight_update()
    assert greedy(llm) == before
    with trainer(tmp_path / "other") as one:
        connect(llm, one)
        assert [settle(llm, one, "next", 3)] == fresh(one.folder, "next")


def test_an_engine_that_knows_no_trainer_says_what_to_do(llm: Any) -> None:
    with pytest.raises(Exception, match="hears no trainer"):
        llm.init_weight_transfer_engine({"init_info": {"endpoint": "user://no", "connect_s": 0.1}})
    with pytest.raises(Exception, match="Invalid init_info"):
        llm.init_weight_transfer_engine({"init_info": {"endpoint": "user://no", "unknown": 1}})


@pytest.mark.slow
def test_a_quantized_model_is_refused_by_its_method() -> None:
    from vllm.config import WeightTransferConfig

    transfer = WeightTransferConfig(backend="refit")
    with (
        quantized(weight_transfer_config=transfer) as one,
        pytest.raises(Exception, match=r"quantized \((?i:.*gptq.*)\)"),
    ):
        one.init_weight_transfer_engine({"init_info": {"endpoint": "user://x"}})
