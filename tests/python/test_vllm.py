"""vLLM's workers take whole versions, and say so or why not. vLLM is a stand-in, refit is real."""

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from stand_ins import vllm as fake

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from refit.errors import (  # noqa: E402
    DeadlineError,
    InvalidError,
    PeerError,
    StateError,
    UnsupportedError,
)
from refit.integrations import _vllm_extension as extension  # noqa: E402
from refit.integrations import vllm  # noqa: E402
from refit.integrations._vllm_extension import load  # noqa: E402
from refit.weights.archive import Archive  # noqa: E402
from stand_ins.trainer import WAIT_S, Trainer, trainer  # noqa: E402

GROUPS = ("tp", "pcp", "pp")


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


KILLED = """
import os, signal
from refit.integrations import _vllm_extension as extension
print(extension._Folder().path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_killed_engines_left_of_adapters_is_removed() -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True)
    left, mine = Path(killed.stdout.strip()), extension._Folder()
    assert left.is_dir()
    extension._remove_left()
    assert not left.exists()
    assert mine.path.is_dir()
    mine.remove()
    assert not mine.path.exists()


# ---- The worker extension: what no engine on a CPU can be brought to


def _worker(runner: Any, **config: Any) -> Any:
    made = fake.extended(vllm.RefitWorkerExtension)(runner)
    for name, value in config.items():
        setattr(made.vllm_config, name, value)
    return made


def test_old_vllm_that_takes_no_weights_is_refused_untouched() -> None:
    model = fake.Model(_weights(0))
    with pytest.raises(UnsupportedError, match="weights_iterator"):
        load(_worker(fake.OldModelRunner(model)), _weights(4).items())
    assert model.loads == 0


@pytest.mark.parametrize("method", ["Fp8LinearMethod", "AWQLinearMethod", "GPTQLinearMethod", ""])
def test_a_quantized_model_is_refused_by_its_method(method: str) -> None:
    model = fake.Model(_weights(0))
    if method:
        model.quant_method = type(method, (), {})()
    else:  # by the configuration
        model.quant_config = SimpleNamespace(get_name=lambda: "fp8")
    answer = _worker(fake.ModelRunner(model)).refit_connect("user://absent")
    assert answer["error"] == "UnsupportedError"
    assert f"quantized ({method or 'fp8'})" in answer["why"]


def test_layer_derived_from_unquantized_one_is_taken() -> None:
    plain = type("UnquantizedLinearMethod", (), {})
    model = fake.Model(_weights(0))
    model.quant_method = type("LowLatencyLinearMethod", (plain,), {})()
    worker = _worker(fake.ModelRunner(model), parallel_config=SimpleNamespace(world_size=1))
    assert "error" not in worker.refit_connect("user://absent")
    worker.refit_close()


def _put(monkeypatch: pytest.MonkeyPatch, name: str, members: dict[str, Any]) -> None:
    module = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


def _be_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = {f"get_{name}_group": lambda: SimpleNamespace(world_size=1) for name in GROUPS}
    _put(monkeypatch, "vllm.distributed.parallel_state", groups)


def _let_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {1: SimpleNamespace(tag="weights", is_asleep=True)}
    allocator = SimpleNamespace(instance=SimpleNamespace(pointer_to_data=parts))
    _put(monkeypatch, "vllm.device_allocator.cumem", {"CuMemAllocator": allocator})


def test_weights_that_sleep_are_not_written(
    monkeypatch: pytest.MonkeyPatch, publishing: Trainer
) -> None:
    _be_alone(monkeypatch)
    _let_sleep(monkeypatch)
    model = fake.Model(_weights(0))
    worker = _worker(fake.ModelRunner(model), parallel_config=SimpleNamespace(world_size=1))
    assert "error" not in worker.refit_connect(publishing.endpoint)

    answer = worker.refit_update(timeout=WAIT_S)

    assert answer["error"] == "StateError"
    assert 'wake_up(tags=["weights"])' in answer["why"]
    assert model.loads == 0
    worker.refit_close()


class CachingRunner:
    """Says what it was asked to reload and to empty."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(3, 2)
        self.calls: list[str] = []
        for name in ("reset_lora_state", "reset_encoder_cache", "reset_mm_cache"):
            setattr(self, name, partial(self.calls.append, name))

    def get_model(self) -> Any:
        return self.model

    def reload_weights(self, weights_iterator: Any = None) -> None:
        self.calls.append("reload")
        ours = dict(self.model.named_parameters())
        for name, tensor in weights_iterator:
            ours[name].data.copy_(tensor)


@pytest.mark.parametrize("moves", [False, True])
def test_a_version_that_is_written_directly_empties_the_caches_too(
    monkeypatch: pytest.MonkeyPatch, publishing: Trainer, moves: bool
) -> None:
    _be_alone(monkeypatch)
    _put(monkeypatch, "vllm.config", {})
    runner = CachingRunner()
    parallel = SimpleNamespace(world_size=1, enable_eplb=moves)
    worker = _worker(runner, parallel_config=parallel)
    assert "error" not in worker.refit_connect(publishing.endpoint)
    for version in (1, 2):
        runner.calls.clear()
        done = publishing.publish(
            {name: torch.full_like(one, version) for name, one in runner.model.named_parameters()}
        )
        assert worker.refit_update(timeout=WAIT_S) == {"version": version}
        assert done.result(WAIT_S) == version
        assert all(bool((one == version).all()) for one in runner.model.parameters())
        assert {"reset_lora_state", "reset_encoder_cache", "reset_mm_cache"} <= {*runner.calls}
    assert ("reload" in runner.calls) is moves
    worker.refit_close()


def test_versions_are_taken_from_an_archive(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _be_alone(monkeypatch)
    _put(monkeypatch, "vllm.config", {})
    runner = CachingRunner()
    worker = _worker(runner, parallel_config=SimpleNamespace(world_size=1, enable_eplb=False))
    with Archive(tmp_path / "kept", write=True) as archive:
        assert "error" not in worker.refit_connect(f"archive://{tmp_path}/kept")
        for version in (1, 2):
            archive.keep(
                {
                    name: torch.full_like(one, version)
                    for name, one in runner.model.named_parameters()
                }
            )
            assert worker.refit_update(timeout=WAIT_S) == {"version": version}
            assert all(bool((one == version).all()) for one in runner.model.parameters())
    worker.refit_close()


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
    engine.init_transfer_engine(engine.parse_init_info({"endpoint": "user://absent"}))
    engine.start_weight_update()
    with pytest.raises(DeadlineError, match=r"rank3.* hears no trainer at user://absent"):
        engine.update_weights({"timeout_s": WAIT_S})
    said = engine.parse_init_info({"endpoint": "user://absent", "connect_s": 0.1})
    with pytest.raises(DeadlineError, match=r"hears no trainer .* after 0\.1 s"):
        engine.init_transfer_engine(said)
    engine.shutdown()


def test_the_weight_transfer_does_not_write_weights_that_sleep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = _modern(monkeypatch)
    _let_sleep(monkeypatch)
    engine.init_transfer_engine(engine.parse_init_info({"endpoint": "user://absent"}))
    engine.start_weight_update()
    with pytest.raises(StateError, match=r'wake_up\(tags=\["weights"\]\)'):
        engine.update_weights({"timeout_s": WAIT_S})
    assert engine.model.loads == 0
    engine.shutdown()


def test_the_trainer_sends_through_the_engine_class(
    monkeypatch: pytest.MonkeyPatch, publishing: Trainer
) -> None:
    engine = _modern(monkeypatch)
    engine.init_transfer_engine(engine.parse_init_info({"endpoint": publishing.endpoint}))
    publishing.publisher.wait_workers(1, WAIT_S)
    said = {"publisher": publishing.publisher, "version": 40}
    done = publishing.call(engine.trainer_send_weights, _weights(2).items(), said)

    engine.start_weight_update()
    engine.update_weights({"version": 40, "timeout_s": WAIT_S})
    engine.finish_weight_update()

    done.result()
    assert publishing.publisher.version == 40
    assert torch.equal(engine.model.weights["embed"], _weights(2)["embed"])
    engine.shutdown()


@pytest.mark.parametrize(
    ("version", "engine"),
    [("0.15.2", None), ("1.0.0", fake.EngineOfTomorrow), ("nightly", fake.EngineOfTomorrow)],
)
def test_an_unknown_vllm_is_warned_of_and_starts(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: str,
    engine: type | None,
) -> None:
    factory = fake.install(monkeypatch, version, engine)
    vllm.register()
    assert not factory.registered
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
    trainers = fake.Factory()
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


def test_failing_engine_is_named_and_both_take_next_version(
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
