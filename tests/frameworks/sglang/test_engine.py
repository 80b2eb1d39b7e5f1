"""A live engine of SGLang takes its weights from a trainer; another one was started from them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engines
import pytest
import torch
from engines import EngineProcess, weights_of
from refit.errors import (
    DeadlineError,
    InvalidError,
    PeerError,
    StateError,
)
from refit.integrations import sglang
from trainers import WAIT_S, Trainer, trainer

UPDATES = 20


@pytest.fixture
def publishing() -> Iterator[Trainer]:
    with trainer() as one:
        yield one


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return engines.save_versions(tmp_path_factory.mktemp("llama"), "llama", UPDATES)


@pytest.fixture(scope="module")
def expected(folders: list[str]) -> list[engines.Outputs]:
    """What SGLang says with each version that it read from disk itself."""
    return engines.outputs_of_fresh(folders)


@pytest.fixture(scope="module")
def live(folders: list[str], expected: Any) -> Iterator[EngineProcess]:
    """An engine that all tests here go on with, whatever the one before it did to it."""
    with engines.engine(folders[0]) as one:
        yield one


def update(
    live: EngineProcess, publishing: Trainer, folder: str, version: int = 0
) -> tuple[int, int]:
    """A version reaches the engine: its number as the trainer has it, and as the engine says."""
    done = publishing.publish(weights_of(folder))
    loaded = live("refit_update", publishing.endpoint, version, timeout=WAIT_S)
    return done.result(WAIT_S), loaded


def test_each_version_says_what_an_engine_says_that_read_it(
    live: EngineProcess,
    publishing: Trainer,
    folders: list[str],
    expected: list[engines.Outputs],
) -> None:
    assert live("outputs") == expected[0]
    for version in range(1, UPDATES + 1):
        assert update(live, publishing, folders[version], version) == (version, version)
        assert live("outputs") == expected[version], f"version {version}"
        assert live("versions") in ({str(version)}, None)
    assert len({str(one) for one in expected}) == UPDATES + 1


@pytest.mark.slow
def test_an_engine_that_starts_from_a_version_says_the_same(
    folders: list[str], expected: list[engines.Outputs]
) -> None:
    assert engines.outputs_of_fresh(folders[UPDATES:]) == [expected[UPDATES]]


def test_tensors_that_are_handed_over_are_loaded(
    live: EngineProcess, folders: list[str], expected: list[engines.Outputs]
) -> None:
    for version in (3, 4, 5):
        weights = weights_of(folders[version])
        live("refit_load", weights if version == 5 else list(weights.items()))
        assert live("outputs") == expected[version]


def test_an_update_empties_the_prefix_cache(
    live: EngineProcess, publishing: Trainer, folders: list[str]
) -> None:
    live("outputs")
    assert all(live("cached_tokens"))
    update(live, publishing, folders[6])
    assert not any(live("cached_tokens"))


def test_version_is_loaded_again_after_sglang_reload(
    live: EngineProcess, publishing: Trainer, folders: list[str], expected: Any
) -> None:
    assert update(live, publishing, folders[7], 1) == (1, 1)
    assert live("reload", folders[8]) == expected[8]
    assert live("refit_update", publishing.endpoint, 1, timeout=WAIT_S) == 1
    assert live("outputs") == expected[7]


def test_a_trainer_that_is_started_again_counts_from_one(
    live: EngineProcess, folders: list[str], expected: Any
) -> None:
    endpoint = f"user://again-{os.getpid()}"
    for folder in (9, 10):
        with trainer(endpoint) as one:
            assert update(live, one, folders[folder], 1) == (1, 1)
        assert live("outputs") == expected[folder]


@pytest.mark.parametrize(
    ("is_open", "version", "why"),
    [
        pytest.param(False, 2, "must run between", id="no session"),
        pytest.param(True, 2, "refit DeadlineError: ", id="no such version"),
        pytest.param(True, None, "refit InvalidError: pull takes what", id="weights for an order"),
    ],
)
def test_failed_order_returns_sglang_error_and_changes_nothing(
    live: EngineProcess,
    publishing: Trainer,
    folders: list[str],
    expected: Any,
    is_open: bool,
    version: int | None,
    why: str,
) -> None:
    update(live, publishing, folders[8], 1)
    given = (
        list(weights_of(folders[9]).items())
        if version is None
        else sglang.order(publishing.endpoint, version, timeout=0.2)
    )
    if is_open:
        live("begin_weight_update")
    done, said = live("update_weights_from_tensor", given, load_format=sglang.PULL)
    if is_open:
        assert live("end_weight_update")[0]
    assert (done, why in said) == (False, True), said
    assert live("outputs") == expected[8]


def test_a_session_that_is_open_is_a_state_error(
    live: EngineProcess, publishing: Trainer, folders: list[str], expected: Any
) -> None:
    assert live("begin_weight_update")[0]
    with pytest.raises(StateError, match="already open"):
        live("refit_update", publishing.endpoint, 1, timeout=0)
    assert live("end_weight_update")[0]
    assert update(live, publishing, folders[9], 1) == (1, 1)
    assert live("outputs") == expected[9]


def test_no_version_in_time_is_a_deadline_error(
    live: EngineProcess, publishing: Trainer, folders: list[str], expected: Any
) -> None:
    before = live("outputs")
    with pytest.raises(DeadlineError):
        live("refit_update", publishing.endpoint, 1, timeout=0.5)
    assert live("outputs") == before
    assert update(live, publishing, folders[10], 1) == (1, 1)
    assert live("outputs") == expected[10]


def test_weights_that_do_not_fit_are_refused_at_both_ends(
    live: EngineProcess, publishing: Trainer, folders: list[str], expected: Any
) -> None:
    wrong = weights_of(folders[11])
    wrong["model.norm.weight"] = torch.ones(7)
    done = publishing.publish(wrong)
    with pytest.raises(PeerError, match=r'at weight "model\.norm\.weight": AssertionError.*\[7\]'):
        live("refit_update", publishing.endpoint, 1, timeout=WAIT_S)
    with pytest.raises(PeerError):
        done.result(WAIT_S)
    assert update(live, publishing, folders[11]) == (2, 2)
    assert live("outputs") == expected[11]


def test_wrong_calls_change_nothing(
    live: EngineProcess, publishing: Trainer, folders: list[str], expected: Any
) -> None:
    update(live, publishing, folders[12])
    weights = list(weights_of(folders[13]).items())
    with pytest.raises(InvalidError, match=r'weight "[^"]+" came twice: nothing was loaded'):
        live("refit_load", [*weights, weights[0]])
    with pytest.raises(InvalidError, match="no endpoint"):
        live("refit_update", "", 1)
    with pytest.raises(InvalidError, match="a number of seconds"):
        live("refit_update", publishing.endpoint, 1, timeout=-1)
    assert live("outputs") == expected[12]


TRAINER = """
import sys, time
from refit import Publisher
from safetensors.torch import load_file
publisher = Publisher("tcp://127.0.0.1:0")
print(publisher.endpoint, flush=True)
publisher.wait_workers(1, 60)
publisher.publish(load_file(sys.argv[1]))
time.sleep(600)
"""


@pytest.mark.slow
def test_engine_survives_killed_trainer_and_takes_another(
    live: EngineProcess, publishing: Trainer, folders: list[str], expected: Any
) -> None:
    command = [sys.executable, "-c", TRAINER, str(Path(folders[14], "model.safetensors"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            endpoint = process.stdout.readline().strip()
            assert live("refit_update", endpoint, 1, timeout=WAIT_S) == 1
            assert live("outputs") == expected[14]
        finally:
            process.kill()
    with pytest.raises(DeadlineError, match=r"hears no trainer at .* for 30 s"):
        live("refit_update", endpoint, 2)
    assert live("outputs") == expected[14]
    assert update(live, publishing, folders[15], 1) == (1, 1)
    assert live("outputs") == expected[15]


def test_engine_takes_version_after_sleep_before_cache_resumes(
    live: EngineProcess, publishing: Trainer, folders: list[str], expected: Any
) -> None:
    live("release_memory_occupation")
    live("resume_memory_occupation", tags=["weights"])
    assert update(live, publishing, folders[16], 1) == (1, 1)
    live("resume_memory_occupation", tags=["kv_cache", "cuda_graph"])
    assert live("outputs") == expected[16]
