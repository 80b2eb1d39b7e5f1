"""What tests/gpu/run.sh measures of PyTorch and of refit from Python works, here on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import refit


@pytest.mark.slow
def test_every_way_moves_the_list_and_says_how_fast(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    sizes = [512, 4096, 100_000]
    listed = [*sizes, 2 << 20]  # the last is more than --mib leaves room for
    (tmp_path / "list").write_text("".join(f"state.{i} {size}\n" for i, size in enumerate(listed)))
    sources = str(Path(refit.__file__).parents[1])
    script, names = root / "tests" / "gpu" / "torch_cases.py", tmp_path / "list"
    done = subprocess.run(
        [sys.executable, str(script), str(names), "--device", "cpu", "--rounds", "2", "--mib", "1"],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"PYTHONPATH": sources},
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len({row["way"] for row in rows}) == 5
    assert [row["rounds"] for row in rows] == [0] * 5 + [1] * 5 + [2] * 5  # after each round
    assert rows[-1]["way"] == "refit.Controller"
    for row in rows:
        assert row["bench"] == "torch"
        assert row["bytes"] == sum(sizes)
        assert row["offload_gbps"] > 0
        assert row["restore_gbps"] > 0


@pytest.mark.slow
def test_every_way_to_step_states_on_the_host_has_the_same_bits(root: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    sources = str(Path(refit.__file__).parents[1])
    script = root / "tests" / "gpu" / "host_steps.py"
    done = subprocess.run(
        [sys.executable, str(script), "--device", "cpu", "--rounds", "2", "--mib", "2"],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"PYTHONPATH": sources},
    )
    assert done.returncode == 0, done.stdout
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == len({row["way"] for row in rows}) == 4
    for row in rows:
        assert row["bench"] == "torch window"
        assert 1 << 20 < row["bytes"] <= 2 << 20
        assert row["step_s_p95"] >= row["step_s_median"] > 0
        assert row["train_s_p95"] >= row["train_s_median"] > row["step_s_median"] / 2
        assert (row["step_in_gbps"] > 0) == (row["way"] != "resident")


@pytest.mark.slow
def test_the_scenes_of_activations_on_a_gpu_pass_on_a_cpu(root: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    script = root / "tests" / "gpu" / "activations.py"
    done = subprocess.run(
        [sys.executable, str(script), "--device", "cpu"],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"PYTHONPATH": str(Path(refit.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("passed") == 6
