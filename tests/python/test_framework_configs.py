"""The fragments in configs/frameworks are what the adapters take, down to the last key."""

import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import refit

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
pytest.importorskip("torch", reason="PyTorch is not installed")

from refit._c.config import make_config  # noqa: E402
from refit.integrations import activations, nemo_rl, state_offload, verl  # noqa: E402

pytestmark = pytest.mark.usefixtures("runtime_dir")

NAMES = [
    *("accelerate", "deepspeed", "megatron", "megatron_activations", "megatron_cpu_offload"),
    *("ms_swift", "nemo_rl", "sglang", "skyrl", "verl", "vllm", "xtuner"),
]


def _read(root: Path, name: str) -> Any:
    return yaml.safe_load((root / "configs" / "frameworks" / f"{name}.yaml").read_text())


def _named(path: str) -> Any:
    module, _, name = path.replace(":", ".").rpartition(".")
    return getattr(importlib.import_module(module), name)


def _keywords(engine: type) -> set[str]:
    return set(inspect.signature(engine).parameters) - {"bucket_size", "is_master"}


def test_there_is_no_fragment_that_is_not_tested(root: Path) -> None:
    found = sorted(one.stem for one in (root / "configs" / "frameworks").iterdir())
    assert found == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_key_has_its_reason_beside_it(root: Path, name: str) -> None:
    text = (root / "configs" / "frameworks" / f"{name}.yaml").read_text()
    assert text.startswith("# ")
    assert sum(line.strip().startswith("#") for line in text.splitlines()) >= 4
    assert yaml.safe_load(text)


def test_nemo_rl_keys_are_those_that_the_mover_reads(root: Path) -> None:
    policy = _read(root, "nemo_rl")["policy"]
    assert nemo_rl.offload_mode(policy) == "coalesced-pinned"
    settled = make_config(policy["refit"], {"use_pinned_optimizer_offload": True})
    assert settled.get("offload.background") is True


def test_nemo_rl_transport_is_the_engine_with_its_keywords(root: Path) -> None:
    generation = _read(root, "nemo_rl")["policy"]["generation"]
    path = generation["refit_transport"]
    assert path == nemo_rl.RefitWeightSynchronizer.backend
    scope = dict(generation["refit_cfg"][path])
    scope.pop("update_weights_bucket_memory_ratio")  # NeMo-RL keeps that to itself
    assert set(scope) <= _keywords(_named(path))
    made = _named(path)(1 << 20, **scope)
    assert made.prepare()["refit"].startswith("ipc:///")
    made.finalize()


def test_verl_names_the_backend_and_its_keywords(root: Path) -> None:
    said = _read(root, "verl")["actor_rollout_ref"]["rollout"]["checkpoint_engine"]
    assert importlib.import_module(said["custom_backend_module"]) is verl
    kwargs = said["engine_kwargs"][said["backend"]]
    assert set(kwargs) <= _keywords(verl.RefitCheckpointEngine)
    made = verl.RefitCheckpointEngine(1 << 20, is_master=True, **kwargs)
    assert "refit" in made.prepare()
    made.close()


def test_skyrl_calls_its_offload_as_verl_does(root: Path) -> None:
    policy = _read(root, "skyrl")["trainer"]["policy"]
    assert policy["optimizer_config"] == {"offload_after_step": True}
    assert policy["fsdp_config"] == {"cpu_offload": False}
    # offload_fsdp_optimizer(optimizer), load_fsdp_optimizer(optimizer, device_id)
    inspect.signature(verl.offload_fsdp_optimizer).bind(object())
    inspect.signature(verl.load_fsdp_optimizer).bind(object(), 0)


def test_vllm_names_the_extension(root: Path) -> None:
    extension = _named(_read(root, "vllm")["worker-extension-cls"])
    names = {name for name in vars(extension) if not name.startswith("_")}
    assert {"refit_connect", "refit_update", "refit_version"} <= names


def test_sglang_names_loaders(root: Path) -> None:
    for path in _read(root, "sglang")["custom-weight-loader"]:
        assert list(inspect.signature(_named(path)).parameters) == ["model", "named_tensors"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("megatron", {"schedule": refit.HostStates(window_bytes=256 << 20, fraction=1.0)}),
        ("megatron_cpu_offload", {"schedule": refit.CpuStep(fraction=0.5, overlap=True)}),
        ("deepspeed", {"schedule": refit.CpuStep(fraction=0.3)}),
    ],
)
def test_options_become_keywords(root: Path, name: str, expected: dict[str, Any]) -> None:
    assert state_offload.keywords(_read(root, name)) == expected


def test_megatron_arguments_for_share_stepped_on_cpu_are_known(root: Path) -> None:
    said = _read(root, "megatron_cpu_offload")
    assert set(said) == {*state_offload.CPU_SWITCHES, state_offload.STEP_FRACTION}


def test_xtuner_options_become_keywords(root: Path) -> None:
    said = _read(root, "xtuner")
    assert set(said) == {state_offload.SWAP, state_offload.TIMES}
    found = state_offload.keywords(said, state_bytes=16 << 30)
    assert found == {"schedule": refit.HostStates(window_bytes=1 << 30)}


def test_megatron_arguments_for_activations_become_keywords(root: Path) -> None:
    said = _read(root, "megatron_activations")
    found = activations.keywords(said, saved_bytes=1 << 30)
    assert found == {"host_bytes": 1 << 29, "min_bytes": 2 << 20, "in_flight": 2}
    unused = {"bf16", activations.MODULES, activations.FRACTION, activations.SMALLEST}
    assert set(said) == {*unused, activations.IN_FLIGHT}


@pytest.mark.parametrize("name", ["accelerate", "ms_swift"])
def test_configurations_of_fsdp_ask_for_activations(root: Path, name: str) -> None:
    said = _read(root, name)
    assert len(activations.asked(said)) == 1
    assert activations.take(said) == {}
    assert activations.asked(said) == []


def test_verl_asks_for_activations(root: Path) -> None:
    model = _read(root, "verl")["actor_rollout_ref"]["model"]
    assert activations.asked(model) == ["enable_activation_offload"]


def test_no_adapter_imports_its_framework() -> None:
    modules = ["activations", "megatron", "nemo_rl", "sglang", "state_offload", "verl", "vllm"]
    loads = "; ".join(f"import refit.integrations.{name}" for name in modules)
    shows = f"import sys; print(*[one for one in {[*NAMES, 'ray']!r} if one in sys.modules])"
    said = subprocess.run(
        [sys.executable, "-c", f"{loads}; {shows}"], capture_output=True, text=True, check=True
    )
    assert said.stdout.split() == []
