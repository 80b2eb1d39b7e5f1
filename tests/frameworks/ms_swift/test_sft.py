"""``swift sft`` with refit in the place of ms-swift's own offload of activations, bit for bit."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import pytest
from refit.errors import StateError
from refit.integrations import ms_swift
from refit.integrations.transformers import ActivationCallback
from swift.callbacks import callbacks_map

STEPS = 4
CHOSEN = {"host_bytes": "8MiB", "min_bytes": "1KiB", "aim": "memory"}
PLUGIN = """
import refit.integrations.ms_swift
refit.integrations.ms_swift.install({})
"""
SLOW = pytest.mark.slow
OURS = ("--external_plugins", "refit_plugin.py", "--callbacks", ms_swift.NAME)


@dataclass
class Run:
    status: int
    said: str
    log: list[dict[str, Any]]
    weights: dict[str, bytes]

    def losses(self) -> list[tuple[float, float]]:
        return [(line["loss"], line["grad_norm"]) for line in self.log]


class Project:
    """A folder with a model of four layers, conversations and refit's plugin."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        models.save(models.make("llama", num_hidden_layers=4), folder / "model")
        words = random.Random(1)
        with open(folder / "rows.jsonl", "w") as rows:
            for _ in range(16):
                said = {
                    role: " ".join(f"w{words.randrange(4, models.WORDS)}" for _ in range(count))
                    for role, count in (("user", 8), ("assistant", 24))
                }
                turns = [{"role": role, "content": content} for role, content in said.items()]
                rows.write(json.dumps({"messages": turns}) + "\n")
        self.choose(**CHOSEN)

    def choose(self, **chosen: Any) -> None:
        keywords = ", ".join(f"{name}={value!r}" for name, value in chosen.items())
        (self.folder / "refit_plugin.py").write_text(PLUGIN.format(keywords))

    def train(self, name: str, *words: str) -> Run:
        """``swift sft`` to its end; ``name`` is the folder of its output."""
        settings: dict[str, Any] = {
            "model": "model",
            "model_type": "llama",
            "template": "dummy",
            "use_hf": "true",
            "torch_dtype": "float32",
            "tuner_type": "full",
            "dataset": "rows.jsonl",
            "dataset_num_proc": 1,
            "dataloader_num_workers": 0,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2,
            "max_steps": STEPS,
            "save_steps": STEPS,
            "logging_steps": 1,
            "report_to": "none",
            "output_dir": name,
            "add_version": "false",
        }
        command = ["swift", "sft"]
        for option, value in settings.items():
            command += [f"--{option}", str(value)]
        done = subprocess.run(
            [*command, *words],
            cwd=self.folder,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        output = self.folder / name
        lines = output / "logging.jsonl"
        checkpoint = output / f"checkpoint-{STEPS}"
        return Run(
            done.returncode,
            done.stdout,
            [one for one in map(json.loads, lines.read_text().splitlines()) if "loss" in one]
            if lines.exists()
            else [],
            {one.name: one.read_bytes() for one in checkpoint.glob("*.safetensors")},
        )


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(tmp_path_factory.mktemp("sft"))


@pytest.mark.parametrize(
    "words",
    [
        pytest.param((), id="checkpointing, which is ms-swift's default"),
        pytest.param(("--gradient_checkpointing", "false"), id="no checkpointing", marks=SLOW),
        pytest.param(("--tuner_type", "lora"), id="adapters", marks=SLOW),
    ],
)
def test_training_has_the_bits_of_ms_swift_alone(project: Project, words: tuple[str, ...]) -> None:
    name = "-".join(words).strip("-") or "default"
    plain = project.train(f"{name}-plain", *words)
    ours = project.train(f"{name}-refit", *words, *OURS)
    assert (plain.status, ours.status) == (0, 0), plain.said + ours.said
    assert len(plain.losses()) == STEPS
    assert ours.losses() == plain.losses()
    assert sum(map(len, plain.weights.values())) > 0
    assert ours.weights == plain.weights
    assert len(set(plain.losses())) == STEPS  # it trains
    assert not any("refit/activation_left_bytes_last" in line for line in plain.log)
    assert min(line["refit/activation_left_bytes_last"] for line in ours.log) > 0


def test_invalid_option_ends_command_with_error(project: Project) -> None:
    project.choose(host_bytes="eight")
    try:
        failed = project.train("failed", *OURS)
    finally:
        project.choose(**CHOSEN)
    assert failed.status != 0
    assert 'ConfigError: activations.host_bytes cannot be "eight"' in failed.said
    assert failed.log == []


@pytest.fixture
def remove() -> Iterator[Any]:
    own = callbacks_map[ms_swift.NAME]
    yield ms_swift.install(**CHOSEN)
    callbacks_map[ms_swift.NAME] = own


def test_ms_swift_table_has_refit_callback_until_removed(remove: Any) -> None:
    assert isinstance(callbacks_map[ms_swift.NAME](None, None), ActivationCallback)
    remove()
    remove()
    assert callbacks_map[ms_swift.NAME].__name__ == "ActivationCpuOffloadCallBack"


def test_a_second_installation_is_refused(remove: Any) -> None:
    with pytest.raises(StateError, match="installed in this ms-swift already"):
        ms_swift.install(**CHOSEN)


def test_what_was_installed_over_it_is_left(remove: Any) -> None:
    callbacks_map[ms_swift.NAME] = object
    remove()
    assert callbacks_map[ms_swift.NAME] is object


def test_without_ms_swift_nothing_can_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "swift.callbacks", None)
    with pytest.raises(ImportError):
        ms_swift.install(**CHOSEN)
