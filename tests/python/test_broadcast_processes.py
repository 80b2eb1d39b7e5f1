"""A trainer and its workers as processes."""

import hashlib
import multiprocessing
import os
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import broadcast_children as children
import pytest
from broadcast_children import weights_of
from broadcasting import LOCAL, UNHURRIED, wait_until
from refit.weights.publisher import Publisher

SPAWN = multiprocessing.get_context("spawn")
TIMEOUT = 60.0  # seconds, for a process that starts

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
        assert self.told.poll(TIMEOUT), "the process tells nothing"
        return self.told.recv()

    def end(self) -> None:
        """Lets a worker leave in good order."""
        self.told.close()
        self.process.join(TIMEOUT)
        assert self.process.exitcode == 0


@pytest.fixture
def start() -> Iterator[Starter]:
    started: list[Child] = []

    def begin(target: Callable[..., None], *arguments: Any) -> Child:
        started.append(Child(target, *arguments))
        return started[-1]

    yield begin
    for one in started:
        one.process.kill()
        one.process.join()
        one.told.close()


@pytest.mark.parametrize(
    ("transport", "shm"), [("tcp", "auto"), pytest.param("ipc", "off", marks=pytest.mark.slow)]
)
def test_three_workers_have_the_same_versions(
    start: Starter, runtime_dir: Path, transport: str, shm: str
) -> None:
    endpoint = LOCAL if transport == "tcp" else f"ipc://{runtime_dir}/s"
    options = {**UNHURRIED, "broadcast_shm": shm}
    with Publisher(endpoint, **options) as publisher:
        workers = [
            start(children.roll_out, publisher.endpoint, f"w{i}", Connection, options)
            for i in range(3)
        ]
        publisher.wait_workers(3, TIMEOUT)
        for version in range(1, 4):
            assert publisher.publish(weights_of(version)) == version
            told = [one.hear()[:2] for one in workers]
            assert told == [(version, weights_of(version))] * 3
        known = publisher.workers()
        assert [(one.committed, one.version) for one in known] == [(True, 3)] * 3
        assert {one.path for one in known} == {"shm" if shm == "auto" else "socket"}
        for one in workers:
            one.end()


MANY = {f"layer.{i}": hashlib.sha256(bytes([i])).digest() * 4000 for i in range(64)}
"""8 MiB, 64 frames with SMALL_FRAMES."""
SMALL_FRAMES = {"broadcast_frame_bytes": "128KiB", "broadcast_window": 2}
QUORUM = {"broadcast_shm": "off", "broadcast_commit": "quorum", "broadcast_quorum": 2}


@pytest.mark.parametrize(
    "signal_number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"]
)
def test_a_neighbor_goes_on_where_the_receiver_is_lost(
    start: Starter, signal_number: signal.Signals
) -> None:
    beats = {"broadcast_heartbeat_ms": "50ms", "broadcast_heartbeat_timeout_ms": "2s"}
    with Publisher(LOCAL, **QUORUM, **SMALL_FRAMES, **beats) as publisher:
        first = start(children.roll_out, publisher.endpoint, "a", Connection, beats)
        publisher.wait_workers(1, TIMEOUT)  # the first that joins receives
        others = [
            start(children.roll_out, publisher.endpoint, it, Connection, beats) for it in "bc"
        ]
        publisher.wait_workers(3, TIMEOUT)
        publisher.declare(MANY)
        version = publisher.begin()
        names = list(MANY)
        publisher.write_all([(name, MANY[name]) for name in names[:48]])
        half = sum(len(MANY[name]) for name in names[:48])
        wait_until(lambda: publisher.stats()["publish_sent_bytes_total"] >= half * 0.9)
        assert first.process.pid is not None
        os.kill(first.process.pid, signal_number)
        wait_until(lambda: publisher.stats()["workers"] == 2)
        publisher.write_all([(name, MANY[name]) for name in names[48:]])
        publisher.commit()
        assert [one.hear()[:2] for one in others] == [(version, MANY)] * 2
        paths = [one.path for one in publisher.workers() if one.subscribed]
        assert sorted(paths) == ["neighbor", "socket"]
        # What was on its way to the receiver is sent once more, and no more than that.
        everything = sum(map(len, MANY.values()))
        assert publisher.stats()["publish_sent_bytes_total"] < 1.2 * everything


@pytest.mark.skipif(shutil.which("unshare") is None, reason="there is no unshare(1)")
def test_a_worker_in_another_pid_namespace_receives_for_itself(start: Starter) -> None:
    options = {**UNHURRIED, "broadcast_shm": "off"}
    with Publisher(LOCAL, **options) as publisher:
        near = start(children.roll_out, publisher.endpoint, "near", Connection, UNHURRIED)
        code = (
            "import refit\n"
            f"with refit.Subscriber({publisher.endpoint!r}, worker='far') as subscriber:\n"
            "    with subscriber.next(60) as update: pass\n"
        )
        apart = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
        if subprocess.run([*apart, "true"], capture_output=True).returncode != 0:
            pytest.skip("this machine has no namespaces for its users")
        with subprocess.Popen([*apart, sys.executable, "-c", code]) as far:
            publisher.wait_workers(2, TIMEOUT)
            publisher.publish(weights_of(1))
            assert near.hear()[:2] == (1, weights_of(1))
            assert far.wait(TIMEOUT) == 0
        assert publisher.stats()["publish_sent_bytes_total"] > 1.9 * sum(
            map(len, weights_of(1).values())
        )


@pytest.mark.slow
def test_workers_end_by_themselves_when_their_trainer_was_killed(start: Starter) -> None:
    trainer = start(children.train, Connection)
    endpoint = trainer.hear()
    options = {"broadcast_heartbeat_timeout_ms": "2s", "idle_timeout": 8}
    workers = [start(children.roll_out, endpoint, name, Connection, options) for name in "ab"]
    assert [one.hear()[:2] for one in workers] == [(1, weights_of(1))] * 2
    trainer.process.kill()
    for one in workers:
        with pytest.raises(EOFError):
            one.hear()
        one.end()


def another_size(i: int) -> dict[str, bytes]:
    return {f"w{i % 3}": b"x" * (100_000 + 1000 * (i % 7))}


@pytest.mark.parametrize(
    "weights",
    [
        pytest.param(lambda _: weights_of(1), id="the same"),
        pytest.param(another_size, id="another manifest each time", marks=pytest.mark.slow),
    ],
)
def test_fifty_versions_use_no_more_memory_or_descriptors(
    start: Starter, weights: Callable[[int], Any]
) -> None:
    with Publisher(LOCAL, **UNHURRIED) as publisher:
        one = start(children.roll_out, publisher.endpoint, "w0", Connection, UNHURRIED)
        publisher.wait_workers(1, TIMEOUT)
        ours: list[dict[str, int]] = []
        theirs: list[dict[str, int]] = []
        for i in range(60):
            publisher.publish(weights(i))
            ours.append(children.usage())
            theirs.append(one.hear()[2])
        for seen in (ours, theirs):
            for kind, least in (("fds", 1), ("rss", 512 << 10)):  # what leaks does so each time
                grown = [seen[at + 10][kind] - seen[at][kind] for at in range(19, 50, 10)]
                assert statistics.median(grown) < least


def run(name: str) -> list[str]:
    """What a function of broadcast_children.py prints as a program."""
    here = str(Path(__file__).parent)
    code = f"import sys; sys.path.insert(0, {here!r}); import broadcast_children as c; c.{name}()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_nothing_but_python_is_needed() -> None:
    assert run("publish_without_libraries") == ["took True", "imported []"]


def test_pyzmq_may_be_in_the_same_process() -> None:
    pytest.importorskip("zmq", reason="pyzmq is not installed")
    lines = run("publish_with_pyzmq")
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
    with Publisher(LOCAL, **UNHURRIED) as publisher:
        publisher.use_device(torch.device(torch_device))
        arguments = (publisher.endpoint, torch_device, Connection, UNHURRIED)
        one = start(children.load_with_torch, *arguments)
        publisher.wait_workers(1, TIMEOUT)
        for version in (1, 2):
            publisher.publish(torch_weights)
            told = one.hear()
            assert (told[0], told[3]) == (version, sums)
            assert told[1] in ("cpu", torch_device)
            # Where the GPU's memory can be mapped, it is; a host device has nothing to share.
            assert (told[1] == "cpu") == (told[2] != "cuda_ipc")
        one.end()
