"""The scripts that tests/gpu/run.sh plays with PyTorch work, here on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import refit

pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.slow


def output_of(script: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(script), *arguments, "--device", "cpu"],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": str(Path(refit.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rows_of(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def test_every_way_to_step_states_on_the_host_has_the_same_bits(root: Path) -> None:
    script = root / "tests" / "gpu" / "host_steps.py"
    rows = rows_of(output_of(script, "--rounds", "2", "--mib", "2"))
    assert len(rows) == len({row["way"] for row in rows}) == 4
    for row in rows:
        assert row["bench"] == "torch window"
        assert 1 << 20 < row["bytes"] <= 2 << 20
        assert row["step_s_p95"] >= row["step_s_median"] > 0
        assert row["train_s_p95"] >= row["train_s_median"] > row["step_s_median"] / 2
        assert (row["step_in_gbps"] > 0) == (row["way"] != "resident")


@pytest.mark.parametrize("name", ["activations.py", "lending.py"])
def test_the_scenes_of_a_gpu_pass_on_a_cpu(root: Path, name: str) -> None:
    lines = output_of(root / "tests" / "gpu" / name).splitlines()
    scenes = [line for line in lines if not line.startswith(" ")]  # what is measured is indented
    assert len(scenes) > 1
    assert [scene for scene in scenes if ": passed, " not in scene] == []
