"""examples/grpo_torch.py as a user runs it: it learns, changes no bit, and outlives its workers.
And grpo_async.py, whose workers sample all the time."""

import json
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import refit
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.timeout(300)
slow = pytest.mark.slow  # each process imports PyTorch


MIB = 1 << 20


def command(root: Path, *arguments: object, name: str = "grpo_torch.py") -> list[str]:
    return [sys.executable, str(root / "examples" / name), *map(str, arguments)]


def run(
    root: Path, *arguments: object, name: str = "grpo_torch.py"
) -> subprocess.CompletedProcess[str]:
    whole = command(root, *arguments, name=name)
    return subprocess.run(whole, capture_output=True, text=True, timeout=280)


def succeeded(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def start(root: Path, *arguments: object, name: str = "grpo_torch.py") -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    whole = command(root, *arguments, name=name)
    return subprocess.Popen(whole, stdout=pipe, stderr=pipe, text=True)


def wait_for_cycle(trainer: subprocess.Popen[str]) -> None:
    """Until the first line of the table has come, after its header."""
    assert trainer.stdout is not None
    assert trainer.stdout.readline().startswith("cycle")
    assert trainer.stdout.readline().strip().startswith("1 ")


def workers_of(trainer: subprocess.Popen[str]) -> list[psutil.Process]:
    children = psutil.Process(trainer.pid).children()
    return [one for one in children if "spawn_main" in " ".join(one.cmdline())]


HOST = ["--states", "host", "--window-bytes", "64KiB"]
SHARE = ["--host-fraction", "0.5"]
LEAVING = ["--activations"]
ONE = ["--workers", "1"]
CHECKED = {
    "grpo": [],
    "ppo": [*ONE, "--ppo"],
    "host": [*ONE, *HOST],
    "host-ppo": [*ONE, *HOST, "--ppo"],
    "share": [*ONE, *SHARE],
    "share-ppo": [*ONE, *SHARE, "--ppo"],
    "host-share": [*ONE, *HOST, *SHARE],
    "activations": [*ONE, *LEAVING],
    "activations-ppo": [*ONE, *LEAVING, "--ppo", "--layers", "3"],
    "activations-host-share": [*ONE, *LEAVING, *HOST, *SHARE],
}


@slow
@pytest.mark.parametrize("options", CHECKED.values(), ids=CHECKED.keys())
def test_losses_weights_and_states_match_run_without_refit(root: Path, options: list[str]) -> None:
    done = succeeded(run(root, "--check", "--cycles", 4, *options))
    for what in ("losses", "rewards", "weights", "states"):
        assert f"  {what:8} identical" in done.stdout


def logged(root: Path, folder: Path, *arguments: object) -> tuple[list[dict[str, Any]], str]:
    """The figures that a run writes, cycle by cycle, and what it says."""
    figures = folder / "figures.json"
    done = succeeded(run(root, "--json", figures, *arguments))
    return [json.loads(line) for line in figures.read_text().splitlines()], done.stdout


@slow
def test_it_learns_and_writes_what_it_did(root: Path, tmp_path: Path) -> None:
    saved = ["--save-every", 15, "--save-dir", tmp_path]
    lines, _ = logged(root, tmp_path, "--cycles", 30, "--target", "0.3", *saved)
    assert [line["cycle"] for line in lines] == list(range(1, 31))
    assert lines[0]["reward"] < 0.2
    assert all(line["stats"]["refit/workers_committed"] == 2 for line in lines)
    assert all(line["stats"]["refit/offload_bytes"] > 0 for line in lines[1:])
    found = sorted(path.name for path in tmp_path.glob("*.pt"))
    assert found == ["cycle-00015.pt", "cycle-00030.pt"]
    assert_resumable(torch.load(tmp_path / "cycle-00030.pt", weights_only=True))
    assert_the_same_in_bfloat16(tmp_path / "cycle-00030")


@slow
def test_host_states_leave_nothing_to_clear_and_are_saved_whole(root: Path, tmp_path: Path) -> None:
    saved = ["--save-every", 3, "--save-dir", tmp_path]
    lines, _ = logged(root, tmp_path, "--cycles", 3, *saved, *HOST)
    last = lines[-1]["stats"]
    assert last["refit/step_in_bytes"] == last["refit/step_out_bytes"] > 3 * (64 << 10)
    assert 0 < last["refit/window_bytes"] <= 3 * (64 << 10)
    assert_resumable(torch.load(tmp_path / "cycle-00003.pt", weights_only=True))


@slow
def test_activations_leave_and_the_memory_of_a_step_is_shown(root: Path, tmp_path: Path) -> None:
    found, said = logged(root, tmp_path, "--cycles", 2, "--layers", 4, *LEAVING)
    last = found[-1]["stats"]
    assert last["refit/activation_left_bytes_last"] > MIB
    assert last["refit/activation_out_bytes_total"] == last["refit/activation_in_bytes_total"]
    lines = said.splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("device memory of a"))
    bars = [line.split("|") for line in lines[start + 2 : start + 18]]
    assert [bar[0].strip() for bar in bars if bar[0].strip()] == ["forward", "backward"]
    peaks = [max(float(bar[column].split()[0]) for bar in bars) for column in (1, 2)]
    assert peaks[1] < peaks[0]
    assert lines[start + 18].split() == ["peak", f"{peaks[0]:.2f}", "->", f"{peaks[1]:.2f}"]


def assert_the_same_in_bfloat16(path: Path) -> None:
    """The weights next to a checkpoint are its own, and each has its name once."""
    weights = load_file(path.with_suffix(".safetensors"))
    policy = torch.load(path.with_suffix(".pt"), weights_only=True)["policy"]
    assert set(weights) == set(policy) - {"head.weight"}  # tied to embed.weight
    for name, tensor in weights.items():
        assert torch.equal(tensor, policy[name].to(torch.bfloat16)), name


def assert_resumable(saved: dict[str, Any]) -> None:
    """The optimizer's states in the file are whole: every moment has its values."""
    states = saved["optimizer"]["state"].values()
    assert len(states) == len(saved["optimizer"]["param_groups"][0]["params"])
    assert all(state["exp_avg_sq"].abs().sum() > 0 for state in states)
    assert all(torch.isfinite(state["exp_avg"]).all() for state in states)


@slow
def test_a_run_goes_on_from_the_weights_of_another(root: Path, tmp_path: Path) -> None:
    """And at the learning rate of post-training a step leaves most bfloat16 weights as they are."""
    small = ["--width", 32, "--layers", 1, "--cycles", 2, "--save-every", 1, "--save-dir"]
    succeeded(run(root, *small, tmp_path / "a"))
    start = ["--from", tmp_path / "a" / "cycle-00002.pt", "--learning-rate", "1e-6"]
    succeeded(run(root, *small, tmp_path / "b", *start))
    before = load_file(tmp_path / "a" / "cycle-00002.safetensors")
    after = load_file(tmp_path / "b" / "cycle-00001.safetensors")
    changed = sum((before[name] != after[name]).sum().item() for name in before)
    assert 0 < changed < sum(one.numel() for one in before.values()) / 4


@pytest.fixture
def example(root: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, in this process."""
    monkeypatch.syspath_prepend(str(root / "examples"))
    import grpo_torch

    return grpo_torch


@pytest.mark.parametrize(
    ("arguments", "reward", "status", "said"),
    [
        ([], 0.9, 0, "target 0.90 reached"),
        ([], 0.89, 1, "target 0.90 NOT reached"),
        (["--cycles", "199"], 0.1, 0, "too short for the target of 0.90, which takes 200 cycles"),
        (["--cycles", "2", "--target", "0.2"], 0.1, 1, "target 0.20 NOT reached"),
        (["--cycles", "2", "--target", "0.2"], 0.2, 0, "target 0.20 reached"),
    ],
)
def test_a_run_that_is_too_short_for_the_target_does_not_miss_it(
    example: Any,
    arguments: list[str],
    reward: float,
    status: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert example.judge(reward, example.read_options(arguments)) == status
    assert capsys.readouterr().out == said + "\n"


UNFIT = "grpo: weights.pt does not hold the weights of a policy like this"


@pytest.mark.parametrize(
    ("arguments", "weights", "status", "said"),
    [
        (["--workers", "0"], None, 2, "usage:"),
        (["--cycles", "none"], None, 2, "usage:"),
        (["--polish"], None, 2, "usage:"),
        (["--states", "x"], None, 2, "usage:"),
        ([*LEAVING, "--activation-bytes", "none"], None, 1, "grpo: "),
        (["--from", "weights.pt"], None, 1, UNFIT),
        (["--from", "weights.pt"], {"policy": {"embed.weight": torch.zeros(2, 2)}}, 1, UNFIT),
        (["--from", "weights.pt"], b"no checkpoint", 1, UNFIT),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(
    example: Any,
    arguments: list[str],
    weights: Any,
    status: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if isinstance(weights, bytes):
        Path("weights.pt").write_bytes(weights)
    elif weights is not None:
        torch.save(weights, "weights.pt")
    monkeypatch.setattr(example, "be_deterministic", lambda: None)
    monkeypatch.setattr(sys, "argv", ["grpo", "--cycles", "1", *arguments])
    try:
        ended = example.main()
    except SystemExit as why:
        ended = why.code
    assert ended == status
    assert capsys.readouterr().err.startswith(said)


ASYNC = "grpo_async.py"


@slow
def test_it_learns_from_rollouts_that_are_a_few_versions_old(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "cycles.json"
    done = succeeded(run(root, "--json", file, name=ASYNC))
    assert "target 0.90 reached" in done.stdout
    cycles = [json.loads(line) for line in file.read_text().splitlines()]
    assert [one["version"] for one in cycles] == list(range(1, 201))
    assert 0 < max(one["oldest"] for one in cycles) <= 2


@slow
@pytest.mark.parametrize("name", ["grpo_torch.py", ASYNC])
def test_a_worker_that_is_killed_is_named_and_replaced(root: Path, name: str) -> None:
    trainer = start(root, "--cycles", 12, "--target", 0, name=name)
    wait_for_cycle(trainer)
    victim = workers_of(trainer)[0]
    victim.kill()
    out, err = trainer.communicate(timeout=280)
    assert trainer.returncode == 0, out + err
    assert f"(pid {victim.pid}) ended with -9; a new one takes its place" in err
    assert "\n12 cycles in " in out


@slow
@pytest.mark.parametrize("name", ["grpo_torch.py", ASYNC])
def test_ctrl_c_ends_the_trainer_and_its_workers(root: Path, name: str) -> None:
    trainer = start(root, "--cycles", 10000, name=name)
    wait_for_cycle(trainer)
    workers = workers_of(trainer)
    assert len(workers) == 2
    trainer.send_signal(signal.SIGINT)
    out, err = trainer.communicate(timeout=60)
    assert trainer.returncode == 130, out + err
    assert "Traceback" not in err
    assert psutil.wait_procs(workers, timeout=30)[1] == []


@slow
@pytest.mark.parametrize("name", ["grpo_torch.py", ASYNC])
def test_workers_end_when_the_trainer_is_killed(root: Path, name: str) -> None:
    trainer = start(root, "--cycles", 10000, name=name)
    wait_for_cycle(trainer)
    workers = workers_of(trainer)
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.communicate(timeout=60)
    assert psutil.wait_procs(workers, timeout=60)[1] == []


def work_that_dies_once(endpoint: str, worker: int, seed: int, pipe: Connection) -> None:
    """A worker; the first one dies while it applies version 2, if it has not died before."""
    from grpo_torch import Batch, send_batch

    with refit.Subscriber(endpoint, worker=f"rollout-{worker}") as subscriber:
        for update in subscriber:
            died = Path(os.environ["GRPO_TEST_DIED"])
            if worker == 0 and update.version == 2 and not died.exists():
                died.touch()
                os._exit(9)
            with update:
                version = update.version
            send_batch(pipe, Batch(version, *[torch.zeros(1)] * 4))


@slow
def test_worker_dying_during_switch_does_not_end_training(
    example: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("GRPO_TEST_DIED", str(tmp_path / "died"))
    policy = example.Policy(example.Size())
    optimizer = torch.optim.AdamW(policy.parameters())
    with (
        refit.Publisher("tcp://127.0.0.1:0") as publisher,
        refit.Controller(optimizer, policy) as controller,
        example.Fleet(2, work_that_dies_once, publisher.endpoint, 0) as workers,
    ):
        publisher.wait_workers(2, 120)
        for _ in range(3):
            version = example.refit_workers(controller, publisher, workers, policy)
            assert [batch.version for batch in workers.gather(version)] == [version] * 2
    assert (tmp_path / "died").exists()
    said = capsys.readouterr().err
    assert "rollout-0" in said.splitlines()[0]
    assert "ended with 9; a new one takes its place" in said
