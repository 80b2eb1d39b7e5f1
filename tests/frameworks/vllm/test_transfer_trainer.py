"""vLLM's weight transfer with both ends: vLLM's server, and a trainer that vLLM's factory makes."""

import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import models
import pytest
from processes import Server, Trainer, fresh, trainer

pytestmark = pytest.mark.slow

UPDATES = 20


@pytest.fixture(scope="module")
def server(version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if version.startswith("0.2") and int(version.split(".")[1]) < 26:
        pytest.skip("its weight transfer has no trainer's end")
    folder = tmp_path_factory.mktemp("served")
    models.save(models.make("llama", 1), folder)
    one = Server(folder)
    try:
        yield one
    finally:
        one.end()


@pytest.fixture
def training(server: Server, tmp_path: Path) -> Iterator[Trainer]:
    with trainer(tmp_path, server.url) as one:
        yield one


def send(server: Server, training: Trainer, name: str, seed: int) -> Any:
    answer = training.send(name, seed)
    assert "version" in answer, answer
    return server.greedy()


def test_each_of_twenty_versions_answers_as_a_fresh_engine(
    server: Server, training: Trainer
) -> None:
    names = [f"v{seed}" for seed in range(1, UPDATES + 1)]
    found = [send(server, training, name, seed) for seed, name in enumerate(names, 1)]
    assert all(one != other for one, other in pairwise(found))
    assert found == fresh(training.folder, *names)


@pytest.mark.parametrize("fault", ["shape", "stranger"])
def test_a_load_that_fails_is_raised_to_the_trainer_and_the_next_one_heals(
    server: Server, training: Trainer, fault: str
) -> None:
    send(server, training, "good", 1)
    refused = training.send("bad", 2, fault)
    assert refused["error"] == "PeerError"
    assert "did not apply it" in refused["why"]
    assert len(server.greedy()) == 4

    assert [send(server, training, "next", 3)] == fresh(training.folder, "next")


def test_a_trainer_that_dies_in_an_update_leaves_the_engine_at_work(
    server: Server, tmp_path: Path
) -> None:
    with trainer(tmp_path, server.url) as one:
        before = send(server, one, "good", 1)
        server.post("start_weight_update")
        one.kill()
        began = time.monotonic()
        with pytest.raises(Exception, match="500"):
            server.post("update_weights", update_info={"timeout_s": 600.0})
        assert time.monotonic() - began < 60
    assert server.greedy() == before
    with trainer(tmp_path / "other", server.url) as one:
        assert [send(server, one, "next", 3)] == fresh(one.folder, "next")


def test_an_engine_that_dies_ends_the_trainers_call(server: Server, training: Trainer) -> None:
    """The last test: the server is gone."""
    send(server, training, "good", 1)
    server.end()
    began = time.monotonic()
    answer = training.send("lost", 2)
    assert answer["error"] in ("ConnectionError", "PeerError")
    assert time.monotonic() - began < 60
