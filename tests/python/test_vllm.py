"""vLLM's workers take whole versions, and say so or why not. vLLM is a stand-in, refit is real."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from stand_ins import vllm as fake

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from refit.errors import DeadlineError, PeerError, StateError, UnsupportedError  # noqa: E402
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

MODERN = ["0.23.0", "0.25.1", "0.26.0", "0.31.2.dev7+gabc"]
OLDER = ["0.16.0", "0.19.1", "0.22.3"]


def _modern(monkeypatch: pytest.MonkeyPatch, version: str = "0.26.0") -> Any:
    factory = fake.install(monkeypatch, version, fake.EngineWithModel)
    vllm.register()
    config = SimpleNamespace(parallel_config=SimpleNamespace(rank=3), model_config=None)
    model = fake.Model(_weights(0))
    return factory.create_engine("refit", None, config, torch.device("cpu"), model)


@pytest.mark.parametrize("version", OLDER)
def test_older_engines_load_by_the_function_they_are_given(
    monkeypatch: pytest.MonkeyPatch, publishing: Trainer, version: str
) -> None:
    factory = fake.install(monkeypatch, version, fake.EngineWithCallback)
    vllm.register()
    engine = factory.create_engine("refit", None, SimpleNamespace(rank=0))
    model = fake.Model(_weights(0))
    engine.init_transfer_engine(engine.parse_init_info({"endpoint": publishing.endpoint}))
    done = publishing.publish(_weights(1))

    info = engine.parse_update_info({"timeout_s": WAIT_S})
    engine.receive_weights(info, model.load_weights)

    assert info.is_checkpoint_format is True
    assert done.result() == 1
    assert torch.equal(model.weights["embed"], _weights(1)["embed"])
    engine.shutdown()


@pytest.mark.parametrize("version", MODERN)
def test_newer_engines_keep_the_version_until_the_layers_are_finished(
    monkeypatch: pytest.MonkeyPatch, publishing: Trainer, version: str
) -> None:  # trap 31
    engine = _modern(monkeypatch, version)
    engine.init_transfer_engine(engine.parse_init_info({"endpoint": publishing.endpoint}))
    done = publishing.publish(_weights(5))

    engine.start_weight_update()
    engine.update_weights({"timeout_s": WAIT_S})
    assert not engine.model.weights["embed"].any()
    engine.finish_weight_update()

    assert done.result() == 1
    assert torch.equal(engine.model.weights["embed"], _weights(5)["embed"])
    engine.shutdown()
    engine.shutdown()


def test_an_engine_that_fails_to_load_refuses(
    monkeypatch: pytest.MonkeyPatch, publishing: Trainer
) -> None:
    engine = _modern(monkeypatch)
    engine.init_transfer_engine(engine.parse_init_info({"endpoint": publishing.endpoint}))
    engine.model.fails_at = "embed"
    done = publishing.publish(_weights(1))
    engine.start_weight_update()

    with pytest.raises(RuntimeError, match="no room for embed"):
        engine.update_weights({"timeout_s": WAIT_S})

    with pytest.raises(PeerError):
        done.result()
    engine.shutdown()


def test_an_engine_without_a_trainer_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _modern(monkeypatch)
    with pytest.raises(StateError, match="init_weight_transfer_engine"):
        engine.update_weights({})
    with pytest.raises(ValueError, match="Invalid init_info"):
        engine.parse_init_info({"endpoint": "x", "unknown": 1})


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


def test_registering_twice_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    factory = fake.install(monkeypatch, "0.26.0", fake.EngineWithModel)
    vllm.register()
    vllm.register()
    assert list(factory._registry) == ["refit"]


@pytest.mark.parametrize("version", ["0.15.2", "1.0.0", "nightly", "0.x"])
def test_an_unknown_vllm_is_refused_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    fake.install(monkeypatch, version, fake.EngineWithModel)
    with pytest.raises(UnsupportedError, match=r"RefitWorkerExtension"):
        vllm.register()


@pytest.mark.parametrize("version", ["0.16.0", "0.26.0"])
def test_a_known_number_with_another_shape_is_refused_too(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    fake.install(monkeypatch, version, fake.EngineOfTomorrow)
    with pytest.raises(UnsupportedError, match="takes everything"):
        vllm.register()


def test_a_finish_that_fails_lets_the_memory_go(
    monkeypatch: pytest.MonkeyPatch, publishing: Trainer
) -> None:  # trap 12
    engine = _modern(monkeypatch)
    engine.init_transfer_engine(engine.parse_init_info({"endpoint": publishing.endpoint}))
    for _ in range(2):
        done = publishing.publish(_weights(1))
        engine.start_weight_update()
        engine.update_weights({"timeout_s": WAIT_S})
        done.result()
        engine.model.pending.append(("unknown", torch.ones(1)))
        with pytest.raises(KeyError):
            engine.finish_weight_update()
    engine.shutdown()


# ---- the trainer's end, 0.26 and later


def _both_ends(
    monkeypatch: pytest.MonkeyPatch, source: fake.WeightSource, rank: int = 0
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
    client = fake.WeightSyncClient(engines)
    init_info = vllm.trainer_class().init_info_cls(rank=rank, timeout_s=WAIT_S)
    made = trainers.trainer_init("refit", None, init_info, client=client, source=source)
    return made, client


def test_vllm_drives_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    source = fake.WeightSource(_weights(0))
    engine, client = _both_ends(monkeypatch, source)
    for version in (1, 2, 3):
        source.weights = _weights(version)
        engine.send_weights()
        for one in client.engines:
            for name, tensor in _weights(version).items():
                assert torch.equal(one.model.weights[name], tensor)
    assert client.calls == ["init", *["start", "update", "finish"] * 3]
    for one in client.engines:
        one.shutdown()
    engine.shutdown()
    engine.shutdown()
    with pytest.raises(StateError, match="was shut down"):
        engine.send_weights()


def test_other_trainer_ranks_only_run_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    source = fake.WeightSource(_weights(1))  # trap 34
    engine, client = _both_ends(monkeypatch, source, rank=1)
    engine.send_weights()
    assert (source.gathered, client.calls) == (list(_weights(1)), [])
    engine.shutdown()


def test_a_worker_that_fails_is_raised_where_the_trainer_sends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = fake.WeightSource(_weights(1))
    engine, client = _both_ends(monkeypatch, source)
    engine._publisher.wait_workers(2, WAIT_S)
    client.engines[1].model.fails_at = "embed"
    with pytest.raises(PeerError, match="no room for embed"):
        engine.send_weights()
    assert source.gathered == list(_weights(1))
    assert client.calls[-1] == "update"
    for one in client.engines:
        one.shutdown()
    engine.shutdown()


def test_a_vllm_without_a_trainers_end_says_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    fake.install(monkeypatch, "0.23.0", fake.EngineWithModel)
    with pytest.raises(UnsupportedError, match=r"refit\.Publisher"):
        vllm.trainer_class()
