"""examples/gpu_cycle.py as a user runs it, without a GPU."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # each process imports PyTorch


def start(root: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(root / "examples" / "gpu_cycle.py"), "--device", "cpu"]
    pipe = subprocess.PIPE
    return subprocess.Popen([*command, *arguments], stdout=pipe, stderr=pipe, text=True)


def await_first_cycle(trainer: subprocess.Popen[str]) -> None:
    assert trainer.stdout is not None
    for line in trainer.stdout:
        if line.split()[:1] == ["1"]:
            return


def test_it_says_what_each_cycle_has_moved(root: Path) -> None:
    with start(root, "--model", "tiny", "--cycles", "3") as trainer:
        out, errors = trainer.communicate(timeout=280)
    assert trainer.returncode == 0, errors
    assert max(map(len, out.splitlines())) <= 80
    lines = [line.split() for line in out.splitlines()]
    header = next(place for place, line in enumerate(lines) if line[:1] == ["cycle"])
    rows = lines[header + 1 : header + 4]
    assert [row[0] for row in rows] == ["1", "2", "3"]
    assert [row[2] for row in rows] == ["0.0", "0.6", "0.6"]  # no states before the first step
    assert "0.6 MB of states left" in out


def test_an_engine_that_dies_ends_the_run_with_a_sentence(root: Path) -> None:
    with start(root, "--model", "tiny", "--cycles", "1000") as trainer:
        await_first_cycle(trainer)
        (engine,) = [
            one
            for one in psutil.Process(trainer.pid).children()
            if "spawn_main" in " ".join(one.cmdline())
        ]
        engine.kill()
        _, errors = trainer.communicate(timeout=280)
    assert trainer.returncode != 0
    assert "the engine has died" in errors or "PeerError" in errors


def test_a_trainer_that_is_interrupted_does_not_wait_for_its_engine(root: Path) -> None:
    with start(root, "--model", "tiny", "--cycles", "1000") as trainer:
        await_first_cycle(trainer)
        trainer.send_signal(signal.SIGINT)
        trainer.communicate(timeout=120)  # an engine that waits for a version does so for 600 s
    assert trainer.returncode != 0
