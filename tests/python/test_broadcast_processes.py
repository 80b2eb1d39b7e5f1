"""A trainer and its workers as processes: versions, lost processes, returning processes."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import broadcast_children as children
import pytest
from broadcast_children import PATIENCE, expected, weights_of
from refit.errors import PeerError
from refit.publisher import Publisher

LOCAL = "tcp://127.0.0.1:0"
SPAWN = multiprocessing.get_context("spawn")
QUICK_TO_MISS = {"broadcast_heartbeat_ms": "100ms", "broadcast_heartbeat_timeout_ms": "2s"}

Starter = Callable[..., "Child"]


class Child:
    """A process and what it tells."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        self.told, theirs = SPAWN.Pipe()
        self.process: BaseProcess = SPAWN.Process(
            target=target, args=[theirs if one is Connection else one for one in arguments]
        )
        self.process.start()
        theirs.close()

    def hear(self) -> Any:
        """What it tells next; EOFError if it has ended."""
        assert self.told.poll(PATIENCE), "the process tells nothing"
        return self.told.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def end(self) -> None:
        """Lets a worker leave in good order."""
        self.told.close()
        self.process.join(PATIENCE)
        assert self.process.exitcode == 0


@pytest.fixture
def start() -> Iterator[Starter]:
    started: list[Child] = []

    def begin(target: Callable[..., None], *arguments: Any) -> Child:
        started.append(Child(target, *arguments))
        return started[-1]

    yield begin
    for one in started:
        one.kill()
        one.told.close()


def worker(
    start: Starter, endpoint: str, name: str, trouble: dict[int, str] | None = None, **options: Any
) -> Child:
    return start(children.roll_out, endpoint, name, Connection, options, trouble or {})


def heard(workers: list[Child]) -> list[tuple[int, str]]:
    """(version, digest) that each worker tells next."""
    return [one.hear()[1:3] for one in workers]


@pytest.mark.parametrize(
    ("transport", "shm"),
    [
        ("tcp", "auto"),
        ("ipc", "off"),
        pytest.param("tcp", "off", marks=pytest.mark.slow),
        pytest.param("ipc", "auto", marks=pytest.mark.slow),
    ],
)
def test_three_workers_have_the_same_versions(
    start: Starter, tmp_path: Path, transport: str, shm: str
) -> None:
    endpoint = LOCAL if transport == "tcp" else f"ipc://{tmp_path}/s"
    with Publisher(endpoint, broadcast_shm=shm) as publisher:
        workers = [worker(start, publisher.endpoint, f"w{i}", broadcast_shm=shm) for i in range(3)]
        publisher.wait_workers(3, PATIENCE)
        for version in range(1, 4):
            assert publisher.publish(weights_of(version)) == version
            assert heard(workers) == [(version, expected(version))] * 3
        known = publisher.workers()
        assert [(one.committed, one.version) for one in known] == [(True, 3)] * 3
        assert {one.path for one in known} == {"shm" if shm == "auto" else "socket"}
        for one in workers:
            one.end()


def test_a_worker_killed_in_the_middle_is_named_and_the_others_go_on(start: Starter) -> None:
    with Publisher(LOCAL, **QUICK_TO_MISS) as publisher:
        good = [worker(start, publisher.endpoint, f"good{i}", **QUICK_TO_MISS) for i in range(2)]
        bad = worker(start, publisher.endpoint, "bad", {2: "hang"}, **QUICK_TO_MISS)
        publisher.wait_workers(3, PATIENCE)
        publisher.publish(weights_of(1))
        assert heard([*good, bad]) == [(1, expected(1))] * 3

        begin_with_all(publisher, 2)
        assert bad.process.is_alive()
        killer = start_killing(bad)
        with pytest.raises(PeerError) as failed:
            publisher.commit()
        killer.join()
        assert [one.name for one in failed.value.workers] == ["bad"]
        assert failed.value.workers[0].reason
        assert heard(good) == [(2, expected(2))] * 2

        assert publisher.publish(weights_of(3)) == 3
        assert heard(good) == [(3, expected(3))] * 2


def begin_with_all(publisher: Publisher, version: int) -> None:
    publisher.begin(version)
    publisher.write_all((name, typed) for name, typed in weights_of(version).items())


def start_killing(child: Child) -> threading.Thread:
    """Kills it as soon as it tells that it hangs with its update open."""

    def kill() -> None:
        assert child.hear()[2] == "hangs"
        child.kill()

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


def test_a_worker_that_raises_is_named_with_its_words(start: Starter) -> None:
    with Publisher(LOCAL) as publisher:
        good = worker(start, publisher.endpoint, "good")
        bad = worker(start, publisher.endpoint, "bad", {2: "raise"})
        publisher.wait_workers(2, PATIENCE)
        publisher.publish(weights_of(1))
        with pytest.raises(PeerError) as failed:
            publisher.publish(weights_of(2), 2)
        (named,) = failed.value.workers
        assert named.name == "bad"
        assert "RuntimeError: bad cannot load version 2" in named.reason
        assert publisher.version == 2  # the other one runs on it
        assert heard([good, good]) == [(1, expected(1)), (2, expected(2))]
        assert bad.hear()[1:3] == (1, expected(1))
        assert bad.hear()[2] == "bad cannot load version 2"


def test_a_worker_that_comes_late_gets_the_current_version_trap_28(start: Starter) -> None:
    with Publisher(LOCAL) as publisher:
        for version in range(1, 4):
            publisher.publish(weights_of(version))
        late = worker(start, publisher.endpoint, "late")
        assert heard([late]) == [(3, expected(3))]
        publisher.wait_workers(1, PATIENCE)
        publisher.publish(weights_of(4))
        assert heard([late]) == [(4, expected(4))]


@pytest.mark.slow
def test_a_trainer_that_comes_back_is_another_epoch_trap_35(start: Starter) -> None:
    trainer = start(children.train, LOCAL, 3, 0, Connection)
    endpoint = trainer.hear()
    assert trainer.hear() == 3
    one = worker(start, endpoint, "w0", **QUICK_TO_MISS)
    first = one.hear()
    assert first[1:3] == (3, expected(3))
    trainer.kill()

    again = start(children.train, endpoint, 2, 1, Connection)
    assert again.hear() == endpoint
    versions = [one.hear()]
    while versions[-1][1] != 2:  # a number below the last one: another count
        versions.append(one.hear())
    assert [seen[2] for seen in versions] == [expected(seen[1]) for seen in versions]
    assert {seen[3]["epoch"] for seen in versions} != {first[3]["epoch"]}


@pytest.mark.slow
def test_workers_end_by_themselves_when_their_trainer_was_killed(start: Starter) -> None:
    trainer = start(children.train_with_workers, Connection, QUICK_TO_MISS)
    holding = dict(trainer.hear()[:2] for _ in range(2))
    assert set(holding) == {"w0", "w1"}
    try:
        trainer.kill()  # its atexit, which would terminate them, does not run
        ended = [trainer.hear() for _ in range(2)]
        assert {(name, said) for name, _, said in ended} == {("w0", "ended"), ("w1", "ended")}
        with pytest.raises(EOFError):  # the pipe is closed: the processes have ended
            trainer.hear()
    except BaseException:
        for pid in holding.values():
            os.kill(pid, signal.SIGKILL)
        raise


def test_fifty_versions_take_no_more_memory_and_no_more_descriptors(start: Starter) -> None:
    weights = weights_of(1)
    with Publisher(LOCAL) as publisher:
        one = worker(start, publisher.endpoint, "w0")
        publisher.wait_workers(1, PATIENCE)
        ours: list[dict[str, int]] = []
        theirs: list[dict[str, int]] = []
        for _ in range(60):
            publisher.publish(weights)
            ours.append(children.usage())
            theirs.append(one.hear()[3])
        for seen in (ours, theirs):
            settled, last = seen[9], seen[-1]
            assert last["fds"] <= settled["fds"]
            assert last["rss"] <= settled["rss"] + (2 << 20)


@pytest.mark.slow
def test_a_manifest_that_changes_every_time_takes_no_more_memory(start: Starter) -> None:
    with Publisher(LOCAL) as publisher:
        one = worker(start, publisher.endpoint, "w0")
        publisher.wait_workers(1, PATIENCE)
        ours: list[dict[str, int]] = []
        theirs: list[dict[str, int]] = []
        for i in range(40):
            publisher.publish({f"w{i % 3}": b"x" * (100_000 + 1000 * (i % 7))})
            ours.append(children.usage())
            theirs.append(one.hear()[3])
        for seen in (ours, theirs):
            settled, last = max(use["fds"] for use in seen[:20]), seen[-1]
            assert last["fds"] <= settled
            assert last["rss"] <= seen[19]["rss"] + (2 << 20)


# ---- Programs


def program(name: str) -> subprocess.Popen[str]:
    here = str(Path(__file__).parent)
    code = f"import sys; sys.path.insert(0, {here!r}); import broadcast_children as c; c.{name}()"
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run(name: str) -> list[str]:
    process = program(name)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    return out.splitlines()


@pytest.mark.parametrize(
    "wait", ["begin", "wait_workers", "next", pytest.param("loop", marks=pytest.mark.slow)]
)
def test_ctrl_c_ends_a_wait_and_the_object_is_still_good(wait: str) -> None:
    process = program(f"interrupt_{wait}")
    assert process.stdout is not None
    assert process.stdout.readline() == "waits\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    interrupted, then = out.splitlines()
    assert interrupted == f"interrupted at version {1 if wait == 'begin' else 0}"
    assert then in ("then 1", "then 2", "then 3", "then connecting")


def test_ctrl_c_ends_a_commit_and_the_version_stands_or_never_was() -> None:
    lines = run("interrupt_commit")
    assert lines[0] in ("interrupted at version 1", "interrupted at version 0")
    assert lines[-1] == "then 2"


def test_a_forked_process_is_refused_and_its_parent_goes_on_trap_27() -> None:
    lines = run("fork_with_live_objects")
    assert [line.split(" ")[0] for line in lines] == ["StateError", "StateError", "took", "then"]
    assert "belongs to process" in lines[0]
    assert lines[2:] == ["took True", "then 1"] or lines[2:] == ["then 1", "took True"]


def test_nothing_but_python_is_needed() -> None:
    assert run("publish_without_libraries") == ["took True", "imported []"]


def test_pyzmq_may_be_in_the_same_process() -> None:
    pytest.importorskip("zmq", reason="pyzmq is not installed")
    lines = run("publish_beside_pyzmq")
    assert lines[0] == "took True"
    assert lines[-1] == "still here"


@pytest.mark.slow
def test_a_worker_on_the_trainers_gpu_reads_the_weights_there(
    start: Starter, torch_device: str
) -> None:
    import torch

    torch_weights = {
        "w": torch.arange(256 * 128.0, device=torch_device).view(128, 256).t(),
        "b": torch.ones(3, device=torch_device),
    }
    sums = [float(tensor.double().sum()) for tensor in torch_weights.values()]
    with Publisher(LOCAL) as publisher:
        publisher.use_device(torch.device(torch_device))
        one = start(children.load_with_torch, publisher.endpoint, torch_device, Connection, {})
        publisher.wait_workers(1, PATIENCE)
        for version in (1, 2):
            publisher.publish(torch_weights)
            told = one.hear()
            assert (told[0], told[3]) == (version, sums)
            assert told[1] in ("cpu", torch_device)
            # Where the GPU's memory can be mapped, it is; a host device has nothing to share.
            assert (told[1] == "cpu") == (told[2] != "cuda_ipc")
        one.end()
