"""Two workers, each with a part of the model, by the extension and by the weight transfer."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import models
import pytest
import torch
from broadcasting import NOWHERE
from extension_engines import BROKEN, engine, greedy, publish_to_one_that_fails, transfers
from processes import fresh_of
from refit import named_weights
from refit.errors import DeadlineError, PeerError, RefitError, StateError
from refit.integrations import vllm
from trainers import WAIT_S, Trainer, trainer

pytestmark = pytest.mark.slow

WORKERS = 2
DIVIDED = {"tensor_parallel_size": WORKERS}
EXTENSION = pytest.mark.parametrize("divided", ["extension"], indirect=True)


class Divided(NamedTuple):
    """An engine whose model is divided among two workers, and the model that it began with."""

    llm: Any
    model: Any
    by_extension: bool

    def connect(self, one: Trainer) -> None:
        if self.by_extension:
            vllm.refit_connect(self.llm, one.endpoint)
        else:
            self.llm.init_weight_transfer_engine({"init_info": {"endpoint": one.endpoint}})

    def update(self, version: int, timeout: float = WAIT_S) -> None:
        if self.by_extension:
            assert vllm.refit_update(self.llm, version, timeout=timeout) == version
            assert self.llm.collective_rpc("refit_version") == [version] * WORKERS
            return
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": {"timeout_s": timeout, "version": version}})
        self.llm.finish_weight_update()
        self.llm.reset_prefix_cache()

    def fails(self, match: str, version: int, timeout: float = WAIT_S) -> None:
        """An update fails with these words; the calls of all workers stay in step."""
        with pytest.raises(Exception, match=match):
            self.update(version, timeout)
        if not self.by_extension:
            with suppress(Exception):  # vLLM has ended it at one worker alone
                self.llm.finish_weight_update()
        assert self.llm.collective_rpc("echo", args=(timeout,)) == [timeout] * WORKERS

    def settle(self, one: Trainer, version: int) -> None:
        """The next version is in both workers, whatever came before."""
        models.change(self.model, version)
        done = one.publish(named_weights(self.model), version, workers=WORKERS)
        self.update(version)
        assert done.result(WAIT_S) == version


@pytest.fixture(scope="module", params=["extension", "transfer"])
def divided(request: pytest.FixtureRequest) -> Iterator[Divided]:
    model = models.make("llama", 2)
    by_extension = request.param == "extension"
    how = {"extension": BROKEN} if by_extension else transfers("BreakingOnCpu")
    with engine(model, **how, **DIVIDED) as llm:
        if not by_extension:
            llm.collective_rpc("name_device")
        yield Divided(llm, model, by_extension)


@pytest.fixture
def following(divided: Divided) -> Iterator[tuple[Divided, Trainer]]:
    """The engine with version 1 of its own trainer."""
    with trainer() as one:
        divided.connect(one)
        divided.wait(one, 1)
        yield divided, one
        if divided.by_extension:
            vllm.refit_close(divided.llm)


Following = tuple[Divided, Trainer]


def test_each_version_answers_as_a_fresh_engine(following: Following) -> None:
    divided, one = following
    found = [greedy(divided.llm)]
    for version in (2, 3):
        divided.wait(one, version)
        found.append(greedy(divided.llm))
    assert found[0] != found[1] != found[2]
    assert found[-1] == fresh_of(divided.model, **DIVIDED)


@pytest.mark.parametrize(("rank", "tensors"), [(0, 0), (0, 15), (1, 5)])
def test_a_load_that_fails_at_one_worker_counts_at_none(
    following: Following, rank: int, tensors: int
) -> None:
    divided, one = following
    llm, model, by_extension = divided
    done = publish_to_one_that_fails(llm, model, one, rank, tensors)
    where = f" .*rank{rank}" if by_extension else ""
    divided.fails(f"no room after {tensors} tensors{where}", 2)
    with pytest.raises(PeerError, match="2 workers did not apply it"):
        done.result(WAIT_S)
    if by_extension:
        assert llm.collective_rpc("refit_version") == [0, 0]
    divided.wait(one, 3)
    found = greedy(llm), llm.collective_rpc("read_weights")
    if rank == 1:
        with engine(model, extension=BROKEN, **DIVIDED) as other:
            assert found == (greedy(other), other.collective_rpc("read_weights"))


def test_without_a_version_the_wait_ends_and_calls_stay_in_step(following: Following) -> None:
    divided, one = following
    before = greedy(divided.llm)
    for timeout in (0.2, 0.3, 0.4):
        divided.fails(r"(?i)deadline|no .*version|nothing", 2, timeout)
    assert greedy(divided.llm) == before
    if divided.by_extension:
        divided.update(1)  # loaded again
        assert greedy(divided.llm) == before
    divided.wait(one, 2)
    assert greedy(divided.llm) != before


@EXTENSION
def test_failed_connect_raises_and_worker_calls_stay_in_step(divided: Divided) -> None:
    llm = divided.llm
    with pytest.raises(StateError, match="knows no trainer"):
        vllm.refit_update(llm, timeout=1)
    with pytest.raises(RefitError, match="rank0"):
        vllm.refit_connect(llm, "no endpoint at all", worker="rollout")
    assert llm.collective_rpc("refit_version") == [0, 0]
    with pytest.raises(StateError, match="enable_lora"):
        vllm.refit_connect(llm, NOWHERE, lora={"name": "a", "id": 1, "peft": "{}"})
    assert llm.collective_rpc("refit_version") == [0, 0]


@EXTENSION
def test_unknown_weight_names_raise_and_next_trainer_recovers(
    divided: Divided,
) -> None:
    llm, model, _ = divided
    with trainer() as one:
        divided.connect(one)
        strange = [*named_weights(model), ("model.layers.7.strange.weight", torch.zeros(3))]
        done = one.publish(strange, workers=WORKERS)
        with pytest.raises(PeerError, match=r'at weight "model\.layers\.7\.strange'):
            vllm.refit_update(llm, timeout=WAIT_S)
        with pytest.raises(PeerError):
            done.result(WAIT_S)
    with trainer() as one:
        divided.connect(one)
        divided.wait(one, 1)
        vllm.refit_close(llm)


@EXTENSION
def test_a_trainer_that_dies_leaves_the_engine_on_its_version(following: Following) -> None:
    divided, _ = following
    before = greedy(divided.llm)
    with trainer() as other:
        divided.connect(other)
    with pytest.raises(DeadlineError):
        vllm.refit_update(divided.llm, timeout=1)
    assert greedy(divided.llm) == before
    with trainer() as third:
        divided.connect(third)
        divided.wait(third, 1)


@EXTENSION
def test_a_worker_that_dies_ends_the_update_at_both_sides(divided: Divided) -> None:
    """The last test of this engine."""
    llm, model, _ = divided
    with trainer() as one:
        vllm.refit_connect(llm, one.endpoint, config={"broadcast": {"heartbeat_ms": 100}})
        one.publisher.wait_workers(WORKERS, WAIT_S)
        process = int(one.publisher.workers()[1].name.split("-")[-2])
        killing = threading.Timer(1.0, os.kill, (process, signal.SIGKILL))
        killing.start()
        with pytest.raises(PeerError, match="the engine did not answer"):
            vllm.refit_update(llm, timeout=WAIT_S)
        killing.join()
        with suppress(PeerError):  # the trainer may not have missed them yet
            one.publish(named_weights(model), workers=0).result(WAIT_S)
        assert one.publish(named_weights(model), 5, workers=0).result(WAIT_S) == 5
