"""The Python lines in README.md run as they stand there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

TRAINER = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
loader = torch.randn(4, 5, 8)
logged = []

def generate(prompts):
    assert not logged or all(
        one.untyped_storage().nbytes() == 0
        for state in optimizer.state.values() for one in state.values() if one.dim() > 0)
    return prompts

def policy_loss(model, rollouts):
    return model(rollouts).square().mean()

def log(stats):
    logged.append(stats)
"""

TRAINER_ENDS = """
assert len(logged) == 4
assert publisher.version == 4
assert [worker.committed for worker in publisher.workers()] == [True, True]
assert logged[-1]["refit/version"] == 4 and logged[-1]["refit/workers_committed"] == 2, logged[-1]
assert logged[-1]["refit/offload_s"] > 0 and logged[-1]["refit/offload_bytes"] > 0, logged[-1]
"""

WORKER = """
import sys, torch
name = sys.argv[1]
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
seen = []

def generate(version):
    seen.append(version)
    if version == 4:
        raise SystemExit
"""


def blocks(root: Path) -> tuple[str, str]:
    found = re.findall(r"^```python\n(.*?)^```", (root / "README.md").read_text(), re.M | re.S)
    trainer = [one for one in found if "refit.Controller(" in one]
    worker = [one for one in found if "refit.Subscriber(" in one]
    return trainer[0], worker[0]


def start(program: str, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(300)  # three processes import PyTorch
@pytest.mark.usefixtures("runtime_dir")
def test_trainer_and_workers_run_as_written(root: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    trainer, worker = blocks(root)
    assert sum("refit" in line or "tx" in line for line in trainer.splitlines()) < 10
    running = [start(WORKER + worker, f"rollout-{index}") for index in range(2)]
    running.append(start(TRAINER + trainer + TRAINER_ENDS))
    try:
        for one in running[::-1]:
            _, complaint = one.communicate(timeout=280)
            assert one.returncode == 0, complaint
    finally:
        for one in running:
            one.kill()
            one.wait()


def test_the_install_command_names_the_package(root: Path) -> None:
    text = (root / "README.md").read_text()
    assert "pip install './bindings/python[torch]'" in text
    assert (root / "bindings" / "python" / "pyproject.toml").exists()


def test_every_integration_is_in_the_table(root: Path) -> None:
    folder = root / "bindings" / "python" / "src" / "refit" / "integrations"
    modules = {path.stem for path in folder.glob("*.py") if not path.stem.startswith("_")}
    page = (root / "docs" / "frameworks.md").read_text()
    table = page[page.index("| framework |") :].partition("\n\n")[0] + "\n"
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \| [^|]+ \|$", table, re.M)[1:]
    assert {re.findall(r"`refit\.integrations\.(\w+)", row)[0] for row in rows} == modules
