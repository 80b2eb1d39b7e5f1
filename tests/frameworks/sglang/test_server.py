"""A running server of SGLang is driven by HTTP: weights still come from the trainer directly."""

import json
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import engines
import pytest
from broadcasting import NOWHERE
from engines import weights_of
from refit.errors import ClosedError, DeadlineError, PeerError, SecurityError, StateError
from refit.integrations.sglang import LOADERS, Server, order, refit_load, refit_update
from serving import free_port, served
from trainers import WAIT_S, trainer

KEY = "a key of this test"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return engines.save_versions(tmp_path_factory.mktemp("tied_llama"), "tied_llama", 3)


@pytest.fixture(scope="module")
def expected(folders: list[str]) -> list[engines.Outputs]:
    return engines.outputs_of_fresh(folders)


class Running:
    def __init__(self, url: str) -> None:
        self.url = url
        self.server = Server(url, KEY)

    def outputs(self) -> engines.Outputs:
        said = {
            "input_ids": engines.PROMPTS,
            "sampling_params": engines.GREEDY,
            "return_logprob": True,
        }
        request = urllib.request.Request(f"{self.url}/generate", json.dumps(said).encode())
        request.add_header("Content-Type", "application/json")
        request.add_header("Authorization", f"Bearer {KEY}")
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            return [engines.read_answer(one) for one in json.load(answer)]


@pytest.fixture(scope="module")
def running(folders: list[str], expected: Any) -> Iterator[Running]:
    """Started as configs/frameworks/sglang.yaml and docs/framework-sglang.md say."""
    said = engines.options_of(folders[0])
    words = [
        f"--{name.replace('_', '-')}={value}" for name, value in said.items() if value is not True
    ]
    words += ["--disable-cuda-graph", "--skip-server-warmup", f"--api-key={KEY}"]
    command = [sys.executable, "-m", "sglang.launch_server", *words]
    loaders = ["--custom-weight-loader", *LOADERS]
    with served(lambda port: [*command, f"--port={port}", *loaders]) as one:
        yield Running(one.url)


@pytest.mark.slow
def test_a_server_takes_each_version(
    running: Running, folders: list[str], expected: list[engines.Outputs]
) -> None:
    assert running.outputs() == expected[0]
    with trainer() as publishing:
        for version in (1, 2):
            done = publishing.publish(weights_of(folders[version]))
            found = refit_update(running.server, publishing.endpoint, version, timeout=WAIT_S)
            assert (found, done.result(WAIT_S)) == (version, version)
            assert running.outputs() == expected[version]


@pytest.mark.slow
def test_weights_are_handed_over_in_the_call(
    running: Running, folders: list[str], expected: list[engines.Outputs]
) -> None:
    refit_load(running.server, weights_of(folders[3]).items())
    assert running.outputs() == expected[3]


@pytest.mark.slow
def test_failures_are_typed_and_the_server_goes_on(
    running: Running, folders: list[str], expected: list[engines.Outputs]
) -> None:
    before = running.outputs()
    with pytest.raises(SecurityError):
        Server(running.url, "another key").begin_weight_update()
    assert not running.server.update_weights_from_tensor(order(NOWHERE, 1), LOADERS[1])[0]
    with trainer() as publishing:
        with pytest.raises(DeadlineError):
            refit_update(running.server, publishing.endpoint, timeout=0.3)
        assert running.server.begin_weight_update()[0]
        with pytest.raises(StateError, match="already open"):
            refit_update(running.server, publishing.endpoint, timeout=0.3)
        assert running.server.end_weight_update()[0]
        assert running.outputs() == before
        wrong = {
            **weights_of(folders[1]),
            "model.norm.weight": weights_of(folders[1])["model.embed_tokens.weight"],
        }
        done = publishing.publish(wrong)
        with pytest.raises(PeerError, match="AssertionError"):
            refit_update(running.server, publishing.endpoint, timeout=WAIT_S)
        with pytest.raises(PeerError):
            done.result(WAIT_S)
        done = publishing.publish(weights_of(folders[1]))
        refit_update(running.server, publishing.endpoint, timeout=WAIT_S)
        done.result(WAIT_S)
    assert running.outputs() == expected[1]


def test_a_server_that_is_gone_is_a_closed_error() -> None:
    nothing = Server(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ClosedError, match="does not answer"):
        refit_update(nothing, NOWHERE, 1)
