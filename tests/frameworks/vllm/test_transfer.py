"""vLLM's weight transfer with refit: an engine that the test drives, or vLLM's server that vLLM's
trainer end drives; the trainer is another process."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import extension_engines as engines
import models
import processes
import pytest
from broadcasting import NOWHERE
from processes import Trainer, fresh

UPDATES = 20
SLOW = pytest.mark.slow


class Engine:
    """It knows refit by the plugin of refit's wheel alone."""

    def __init__(self, llm: Any) -> None:
        llm.collective_rpc("name_device")
        self.llm = llm

    def trainer(self, folder: Path) -> AbstractContextManager[Trainer]:
        return processes.trainer(folder)

    def connect(self, one: Trainer) -> None:
        said = {"endpoint": one.says["endpoint"], "connect_s": 30.0}
        self.llm.init_weight_transfer_engine({"init_info": said})

    def update(self, **said: Any) -> None:
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": {"timeout_s": 60.0, **said}})
        self.llm.finish_weight_update()
        self.llm.reset_prefix_cache()

    def finish(self) -> None:
        """After an update that failed: 0.22 wants it finished, later ones have ended it."""
        with suppress(Exception):
            self.llm.finish_weight_update()

    def send(self, one: Trainer, name: str, seed: int, fault: str | None = None) -> dict[str, Any]:
        """What the trainer says of a version that was sent."""
        one.tell(name, seed, fault)
        if fault is None:
            self.update()
        else:
            with pytest.raises(Exception, match=r"(?i)fail|error"):
                self.update()
        answer = one.answer()
        self.finish()
        return answer

    def greedy(self) -> Any:
        return engines.greedy(self.llm)


class Server:
    """vLLM's, and vLLM's factory makes the trainer's end."""

    def __init__(self, server: processes.Server) -> None:
        self.server = server
        self.greedy: Callable[[], Any] = server.greedy

    def trainer(self, folder: Path) -> AbstractContextManager[Trainer]:
        return processes.trainer(folder, self.server.url)

    def connect(self, one: Trainer) -> None:
        """The trainer's end has done so."""

    def send(self, one: Trainer, name: str, seed: int, fault: str | None = None) -> dict[str, Any]:
        return one.send(name, seed, fault)


Side = Engine | Server
BY_ENGINE = pytest.mark.parametrize("side", [Engine], indirect=True)


@contextmanager
def a_server(version: str, folder: Path) -> Iterator[Server]:
    if version.startswith("0.2") and int(version.split(".")[1]) < 26:
        pytest.skip("its weight transfer has no trainer's end")
    with processes.server(models.save(models.make("llama", 1), folder)) as server:
        yield Server(server)


@pytest.fixture(scope="module", params=[Engine, pytest.param(Server, marks=SLOW)])
def side(
    request: pytest.FixtureRequest, version: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Side]:
    if request.param is Server:
        with a_server(version, tmp_path_factory.mktemp("served")) as server:
            yield server
        return
    with engines.engine(models.make("llama", 1), **engines.transfers("OnCpu")) as llm:
        yield Engine(llm)


@pytest.fixture
def training(side: Side, tmp_path: Path) -> Iterator[Trainer]:
    with side.trainer(tmp_path) as one:
        side.connect(one)
        yield one


def settle(side: Side, one: Trainer, name: str, seed: int) -> Any:
    """One version from the trainer into the engine, and what that answers then."""
    answer = side.send(one, name, seed)
    assert "version" in answer, answer
    return side.greedy()


@SLOW
@pytest.mark.timeout(1200)  # vLLM 0.22 starts each fresh engine in 20 s
def test_each_of_twenty_versions_answers_as_a_fresh_engine(side: Side, training: Trainer) -> None:
    names = [f"v{seed}" for seed in range(1, UPDATES + 1)]
    found = [settle(side, training, name, seed) for seed, name in enumerate(names, 1)]
    assert all(one != other for one, other in pairwise(found))
    assert found == fresh([training.folder / name for name in names])


@pytest.mark.parametrize("fault", ["shape", pytest.param("stranger", marks=SLOW)])
def test_load_failing_halfway_is_reported_and_next_one_recovers(
    side: Side, training: Trainer, fault: str
) -> None:
    settle(side, training, "good", 1)
    refused = side.send(training, "bad", 2, fault)
    assert refused["error"] == "PeerError"
    assert "did not apply it" in refused["why"]
    assert len(side.greedy()) == 4  # of both versions, but the engine lives
    assert [settle(side, training, "next", 3)] == fresh([training.folder / "next"])


@SLOW
def test_dead_trainer_is_not_waited_for_and_another_takes_over(side: Side, tmp_path: Path) -> None:
    with side.trainer(tmp_path) as one, ThreadPoolExecutor(1) as pool:
        side.connect(one)
        before = settle(side, one, "v", 1)
        if isinstance(side, Engine):
            waiting = pool.submit(side.update, timeout_s=600.0)
            time.sleep(2)  # for it to be in its wait, or to begin it without a trainer
            one.kill()
            with pytest.raises(Exception, match="hears no trainer"):
                waiting.result(300)
            side.finish()
        else:
            side.server.post("start_weight_update")
            one.kill()
            with pytest.raises(Exception, match="500"):
                side.server.post("update_weights", timeout=300, update_info={"timeout_s": 600.0})
    assert side.greedy() == before
    with side.trainer(tmp_path / "other") as one:
        side.connect(one)
        assert [settle(side, one, "next", 3)] == fresh([one.folder / "next"])


@SLOW
@BY_ENGINE
def test_without_a_version_nothing_is_touched(side: Engine, training: Trainer) -> None:
    before = settle(side, training, "v", 1)
    with pytest.raises(Exception, match=r"(?i)deadline|nothing|no .*version"):
        side.update(timeout_s=0.5)
    side.finish()
    assert side.greedy() == before


@BY_ENGINE
def test_an_engine_that_knows_no_trainer_says_what_to_do(side: Engine) -> None:
    connect = side.llm.init_weight_transfer_engine
    with pytest.raises(Exception, match="hears no trainer"):
        connect({"init_info": {"endpoint": NOWHERE, "connect_s": 0.1}})
    with pytest.raises(Exception, match="Invalid init_info"):
        connect({"init_info": {"endpoint": NOWHERE, "unknown": 1}})


@SLOW
def test_an_engine_that_dies_ends_the_trainers_call(version: str, tmp_path: Path) -> None:
    with a_server(version, tmp_path / "served") as side, side.trainer(tmp_path) as training:
        settle(side, training, "good", 1)
        side.server.end()
        answer = side.send(training, "lost", 2)
    assert answer["error"] in ("ConnectionError", "PeerError")


@SLOW
def test_a_quantized_model_is_refused_by_its_method() -> None:
    transfer = engines.transfers("OnCpu")["weight_transfer_config"]
    with (
        engines.quantized(weight_transfer_config=transfer) as one,
        pytest.raises(Exception, match=r"quantized \((?i:.*gptq.*)\)"),
    ):
        one.init_weight_transfer_engine({"init_info": {"endpoint": NOWHERE}})
