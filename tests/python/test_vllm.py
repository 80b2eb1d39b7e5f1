"""vLLM's workers take whole versions, and say so or why not. vLLM is a stand-in, refit is real."""

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from stand_ins import vllm as fake

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from refit.errors import DeadlineError, InvalidError, PeerError, StateError, UnsupportedError  # noqa: E402
from refit.integrations import vllm  # noqa: E402
from stand_ins.trainer import WAIT_S, Trainer, trainer  # noqa: E402


def _weights(value: float) -> dict[str, Any]:
    return {
        "embed": torch.full((6, 4), value, dtype=torch.bfloat16),
        "layers.0.bias": torch.full((3,), value),
        "layers.0.weight": torch.full((5, 7), value, dtype=torch.float16),
    }


@pytest.fixture
def publishing() -> Iterator[Trainer]:
    with trainer() as one:
        yield one


@pytest.fixture
def worker() -> Iterator[Any]:
    made = fake.extended(vllm.RefitWorkerExtension)(fake.ModelRunner(fake.Model(_weights(0))))
    yield made
    made.refit_close()


def _holds(worker: Any, value: float) -> bool:
    weights = worker.model_runner.model.weights
    return all(torch.equal(weights[name], there) for name, there in _weights(value).items())


def test_a_worker_loads_each_version_and_knows_its_number(publishing: Trainer, worker: Any) -> None:
    name = worker.refit_connect(publishing.endpoint)
    assert worker.refit_version() == 0

    for version in (1, 2, 3):
        done = publishing.publish(_weights(version))
        assert worker.refit_update(timeout=WAIT_S) == version
        assert done.result() == version
        assert _holds(worker, version)

    assert worker.refit_version() == 3
    assert [one.name for one in publishing.publisher.workers()] == [name]


def test_layers_that_keep_references_read_what_was_sent(publishing: Trainer, worker: Any) -> None:
    # trap 31: the runner keeps every tensor until the last one has come, and copies then
    worker.refit_connect(publishing.endpoint)
    weights = {f"layer.{i}": torch.full((9,), float(i)) for i in range(20)}
    worker.model_runner.model = fake.Model(weights)
    done = publishing.publish(weights)

    worker.refit_update(timeout=WAIT_S)

    done.result()
    loaded = worker.model_runner.model.weights
    assert all(torch.equal(loaded[name], there) for name, there in weights.items())


def test_a_failed_load_is_refused_with_its_words_and_the_next_version_heals(
    publishing: Trainer, worker: Any
) -> None:  # trap 12: never ack a torn version
    worker.refit_connect(publishing.endpoint, worker="sick")
    worker.model_runner.model.fails_at = "layers.0.weight"
    done = publishing.publish(_weights(1))

    with pytest.raises(RuntimeError, match="no room for layers"):
        worker.refit_update(timeout=WAIT_S)

    with pytest.raises(PeerError) as refused:
        done.result()
    assert "no room for layers.0.weight" in refused.value.workers[0].reason
    assert worker.refit_version() == 0

    worker.model_runner.model.fails_at = None
    done = publishing.publish(_weights(2))
    while worker.refit_version() != 2:  # it may be offered the version that it has refused first
        worker.refit_update(timeout=WAIT_S)
    assert done.result() == 2
    assert _holds(worker, 2)


def test_after_a_load_that_failed_half_way_no_version_is_claimed(
    publishing: Trainer, worker: Any
) -> None:  # trap 12
    worker.refit_connect(publishing.endpoint)
    done = publishing.publish(_weights(1))
    worker.refit_update(timeout=WAIT_S)
    done.result()
    worker.model_runner.model.fails_at = "layers.0.weight"
    done = publishing.publish(_weights(2))

    with pytest.raises(RuntimeError, match="no room"):
        worker.refit_update(timeout=WAIT_S)

    with pytest.raises(PeerError):
        done.result()
    assert worker.refit_version() == 0


def test_a_version_that_is_loaded_is_not_waited_for_again(
    publishing: Trainer, worker: Any
) -> None:  # trap 35
    worker.refit_connect(publishing.endpoint)
    done = publishing.publish(_weights(1))
    worker.refit_update(version=1, timeout=WAIT_S)
    done.result()

    assert worker.refit_update(version=1, timeout=0) == 1
    assert worker.model_runner.model.loads == 1


def test_a_late_worker_gets_the_current_version(publishing: Trainer, worker: Any) -> None:
    publishing.publish(_weights(1), workers=0).result()
    publishing.publish(_weights(2), workers=0).result()

    worker.refit_connect(publishing.endpoint)

    assert worker.refit_update(timeout=WAIT_S) == 2
    assert _holds(worker, 2)


def test_without_a_trainer_the_wait_ends(worker: Any) -> None:
    with pytest.raises(StateError, match="refit_connect"):
        worker.refit_update()
    worker.refit_connect("tcp://127.0.0.1:9")
    with pytest.raises(DeadlineError):
        worker.refit_update(timeout=0)
    assert worker.refit_version() == 0


def test_connecting_again_leaves_the_first_trainer(publishing: Trainer, worker: Any) -> None:
    worker.refit_connect("tcp://127.0.0.1:9")
    worker.refit_connect(publishing.endpoint)
    done = publishing.publish(_weights(1))
    assert worker.refit_update(timeout=WAIT_S) == 1
    assert done.result() == 1
    worker.refit_close()
    worker.refit_close()
    assert worker.refit_version() == 0


def test_an_older_runner_loads_through_the_model() -> None:
    model = fake.Model(_weights(0))
    vllm.load(fake.OldModelRunner(model), _weights(4).items())
    assert all(torch.equal(model.weights[name], there) for name, there in _weights(4).items())


def test_an_older_runner_with_quantized_weights_is_refused_untouched() -> None:
    model = fake.Model(_weights(0))
    config = SimpleNamespace(quant_config=object())
    with pytest.raises(UnsupportedError, match="quantized"):
        vllm.load(fake.OldModelRunner(model), _weights(4).items(), config)
    assert model.loads == 0


# ---- vLLM's own weight transfer


def _modern(monkeypatch: pytest.MonkeyPatch, version: str = "0.26.0") -> Any:
    factory = fake.install(monkeypatch, version, fake.EngineWithModel)
    vllm.register()
    config = SimpleNamespace(parallel_config=SimpleNamespace(rank=3), model_config=None)
    model = fake.Model(_weights(0))
    return factory.create_engine("refit", None, config, torch.device("cpu"), model)


def test_an_engine_does_not_wait_for_a_trainer_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("refit.integrations._vllm_transfer.ABSENT_S", 0.2)
    engine = _modern(monkeypatch)
    engine.init_transfer_engine(engine.parse_init_info({"endpoint": "user://nobody"}))
    engine.start_weight_update()
    with pytest.raises(DeadlineError, match=r"rank3.* hears no trainer at user://nobody"):
        engine.update_weights({"timeout_s": WAIT_S})
    said = engine.parse_init_info({"endpoint": "user://nobody", "connect_s": 0.1})
    with pytest.raises(DeadlineError, match=r"hears no trainer .* after 0\.1 s"):
        engine.init_transfer_engine(said)
    engine.shutdown()


def test_the_trainer_sends_through_the_engine_class(
    monkeypatch: pytest.MonkeyPatch, publishing: Trainer
) -> None:
    engine = _modern(monkeypatch)
    engine.init_transfer_engine(engine.parse_init_info({"endpoint": publishing.endpoint}))
    publishing.publisher.wait_workers(1, WAIT_S)
    said = {"publisher": publishing.publisher, "version": 40}
    done = publishing._pool.submit(engine.trainer_send_weights, _weights(2).items(), said)

    engine.start_weight_update()
    engine.update_weights({"version": 40, "timeout_s": WAIT_S})
    engine.finish_weight_update()

    done.result()
    assert publishing.publisher.version == 40
    assert torch.equal(engine.model.weights["embed"], _weights(2)["embed"])
    engine.shutdown()


@pytest.mark.parametrize(
    ("version", "engine"),
    [
        ("0.15.2", None),
        ("1.0.0", fake.EngineOfTomorrow),
        ("nightly", fake.EngineOfTomorrow),
    ],
)
def test_an_unknown_vllm_is_warned_of_and_starts(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: str,
    engine: type | None,
) -> None:
    factory = fake.install(monkeypatch, version, engine)
    vllm.register()
    assert not factory._registry
    assert f"vLLM {version}" in caplog.text
    assert "RefitWorkerExtension" in caplog.text
    with pytest.raises(UnsupportedError, match="RefitWorkerExtension"):
        vllm.engine_class()


def test_without_vllm_registering_only_warns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    vllm.register()
    assert 'gets no backend "refit"' in caplog.text


# ---- the trainer's end, 0.26 and later


def _trainer(
    monkeypatch: pytest.MonkeyPatch, source: Any, rank: int = 0, client: Any = None
) -> tuple[Any, fake.WeightSyncClient]:
    trainers = fake._Factory()
    factory = fake.install(monkeypatch, "0.26.0", fake.EngineWithModel, trainers)
    vllm.register()
    configs = [
        SimpleNamespace(parallel_config=SimpleNamespace(rank=one), model_config=None)
        for one in range(2)
    ]
    engines = [
        factory.create_engine("refit", None, one, torch.device("cpu"), fake.Model(_weights(0)))
        for one in configs
    ]
    client = client or fake.WeightSyncClient(engines)
    init_info = vllm.RefitTrainerInitInfo(rank=rank, timeout_s=WAIT_S)
    made = trainers.trainer_init("refit", None, init_info, client=client, source=source)
    return made, client


def test_other_trainer_ranks_only_run_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    source = fake.WeightSource(_weights(1))  # trap 34
    engine, client = _trainer(monkeypatch, source, rank=1)
    engine.send_weights()
    assert (source.gathered, client.calls) == (list(_weights(1)), [])
    engine.shutdown()


def test_one_of_two_engines_that_fails_is_named_and_both_take_the_next_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = fake.WeightSource(_weights(1))
    engine, client = _trainer(monkeypatch, source)
    client.engines[1].model.fails_at = "embed"
    with pytest.raises(PeerError, match="no room for embed"):
        engine.send_weights()
    assert source.gathered == list(_weights(1))
    assert client.calls[-1] == "update"

    client.engines[1].model.fails_at = None
    engine.send_weights()  # it finishes first, for the one that has loaded
    assert client.calls[-4:] == ["finish", "start", "update", "finish"]
    for one in client.engines:
        assert torch.equal(one.model.weights["embed"], _weights(1)["embed"])
        one.shutdown()
    engine.shutdown()


@pytest.mark.parametrize("source", [None, SimpleNamespace(held_names=lambda: ["embed"])])
def test_a_source_that_is_not_whole_is_refused(
    monkeypatch: pytest.MonkeyPatch, source: Any
) -> None:
    with pytest.raises(InvalidError, match="all weights"):
        _trainer(monkeypatch, source)


def test_a_vllm_without_a_trainers_end_says_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    fake.install(monkeypatch, "0.23.0", fake.EngineWithModel)
    with pytest.raises(UnsupportedError, match=r"refit\.Publisher"):
        vllm.trainer_class()
