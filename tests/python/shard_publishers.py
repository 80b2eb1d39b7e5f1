"""Ranks that publish what each of them has, and workers that subscribe to rank 0: processes of
test_shard_publishers.py, which play a scene and tell what they saw."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import division_scenes
import ranks
import refit
import torch
from broadcasting import TIMEOUT, UNHURRIED
from division_scenes import RANKS, Two
from refit.weights.manifest import TensorSpec
from refit.weights.publisher import Publisher
from refit.weights.subscriber import Subscriber
from refit.weights.transaction import Transaction
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

LOST_S = 3.0
"""Heartbeat timeout where a rank is killed."""
HURRIED = {"broadcast_heartbeat_timeout_ms": f"{LOST_S:g}s", "broadcast_heartbeat_ms": "100ms"}


def trainer_of(folder: Path) -> str:
    return f"ipc://{folder}/trainer.sock"


@contextmanager
def publisher_of(rank: int, folder: Path, **options: Any) -> Iterator[Publisher]:
    """A rank's own; workers subscribe to that of rank 0."""
    endpoint = trainer_of(folder) if rank == 0 else f"ipc://{folder}/rank{rank}.sock"
    with Publisher(endpoint, **{**UNHURRIED, **options}) as publisher:
        yield publisher


def await_workers(publisher: Publisher, rank: int, count: int) -> None:
    if rank == 0:
        publisher.wait_workers(count, TIMEOUT)


def refuse_to_gather(*_: object, **__: object) -> NoReturn:
    raise AssertionError("a rank gathered a tensor")


@torch.no_grad()
def double(model: nn.Module) -> None:
    """As an optimizer's step, on what each rank has."""
    for one in model.parameters():
        (one._local_tensor if isinstance(one, DTensor) else one).mul_(2)


def send(publisher: Publisher, *weights: Any) -> int | None:
    with Transaction(publisher) as tx:
        tx.send(*weights)
    return tx.version


def kind_of(play: Callable[[], object]) -> tuple[str, float]:
    """The kind of what it raises, and after how many seconds."""
    began = time.monotonic()
    try:
        play()
    except Exception as why:
        print(f"rank {os.getpid()}: {type(why).__name__}: {why}", flush=True)
        return type(why).__name__, time.monotonic() - began
    return "", time.monotonic() - began


# ---- Scenes of a rank


def trains(rank: int, folder: Path, out: Connection) -> object:
    """Two versions to three workers, and the second to one more that came in between."""
    DTensor.full_tensor = refuse_to_gather
    told = []
    real = Publisher.shard
    Publisher.shard = lambda *given, **named: (told.append(1), real(*given, **named))[1]  # type: ignore[method-assign, assignment]
    model = division_scenes.fsdp2()
    with publisher_of(rank, folder) as publisher:
        await_workers(publisher, rank, 3)
        versions = [send(publisher, refit.named_weights(model))]
        out.send("first")
        await_workers(publisher, rank, 4)
        double(model)
        versions.append(send(publisher, refit.named_weights(model)))
        shards = publisher.shards
        return versions, len(told), sorted(shards) if shards else [], publisher.version


def replicates(rank: int, folder: Path, out: Connection) -> object:
    """Replicas that share the work; then the root gives everything, and then they share again."""
    model = Two()
    with publisher_of(rank, folder) as publisher:
        await_workers(publisher, rank, 1)
        shared = refit.named_weights(model, gather=False)
        versions = [send(publisher, shared)]
        first = sorted(publisher.shards or ())
        double(model)
        versions.append(send(publisher, shared))
        return versions, first


def gathers_between(rank: int, folder: Path, out: Connection) -> object:
    """Shards, then gathered on the root, then shards again; and once more after one rank has
    declared other tensors by itself."""
    model = division_scenes.fsdp2()
    versions = []
    with publisher_of(rank, folder) as publisher:
        await_workers(publisher, rank, 1)
        for gather in (None, True, None):
            versions.append(send(publisher, refit.named_weights(model, gather=gather)))
            double(model)
        if rank == 2:
            publisher.declare([TensorSpec("other", "F32", (3,))])
        versions.append(send(publisher, refit.named_weights(model)))
    return versions


def divides_as_megatron(rank: int, folder: Path, out: Connection) -> object:
    """Two stages of two ranks: columns or rows of one matrix a stage, and a norm that both have."""
    stage, part = divmod(rank, 2)
    whole = stage_weights()
    matrix, norm = f"layers.{stage}.w", f"layers.{stage}.norm"
    cut = whole[matrix].chunk(2, dim=stage)[part]
    first = [0, 0]
    first[stage] = part * cut.shape[stage]
    given = [(matrix, cut, whole[matrix].shape, first), (norm, whole[norm], (5,), (0,))]
    with publisher_of(rank, folder) as publisher:
        await_workers(publisher, rank, 1)
        version = send(publisher, refit.sharded_weights(given))
        return version, sorted(publisher.shards or ())


def stage_weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    made = {}
    for stage in range(2):
        made[f"layers.{stage}.w"] = torch.rand(6, 8)
        made[f"layers.{stage}.norm"] = torch.rand(5)
    return made


def leaves_a_hole(rank: int, folder: Path, out: Connection) -> object:
    """Rank 2 has forgotten its rows, and remembers them."""
    rows, norm = ("a", torch.ones(2, 3), (8, 3), (2 * rank, 0)), ("b", torch.ones(3), (3,), (0,))
    with publisher_of(rank, folder) as publisher:
        try:
            send(publisher, refit.sharded_weights([norm] if rank == 2 else [rows, norm]))
        except refit.RefitError as why:
            told = type(why).__name__, "a" in str(why)
        return *told, send(publisher, refit.sharded_weights([rows, norm]))


def fails(rank: int, folder: Path, out: Connection) -> object:
    """A rank raises in the block; the next version is published."""
    model = division_scenes.fsdp2()
    with publisher_of(rank, folder) as publisher:
        await_workers(publisher, rank, 1)
        versions = [send(publisher, refit.named_weights(model))]
        double(model)

        def attempt() -> None:
            with Transaction(publisher) as tx:
                tx.send(refit.named_weights(model))
                if rank == 2:
                    raise KeyError("in the block")

        kind, _ = kind_of(attempt)
        kept = publisher.version
        versions.append(send(publisher, refit.named_weights(model)))
        return versions, kind, kept


def is_killed(rank: int, folder: Path, out: Connection) -> object:
    """Rank 2 (or 0) ends within the second version."""
    return dies(rank, folder, 2)


def root_is_killed(rank: int, folder: Path, out: Connection) -> object:
    """The coordinator ends within the second version."""
    return dies(rank, folder, 0)


def dies(rank: int, folder: Path, victim: int) -> object:
    model = division_scenes.fsdp2()
    with publisher_of(rank, folder, **HURRIED) as publisher:
        await_workers(publisher, rank, 1)
        send(publisher, refit.named_weights(model))
        double(model)
        if rank == victim:
            Publisher.lend_all = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        kind, seconds = kind_of(lambda: send(publisher, refit.named_weights(model)))
        return kind, seconds < 3 * LOST_S, publisher.version


def is_large(rank: int, folder: Path, out: Connection) -> object:
    """By how much memory grows for a version whose largest tensor has LARGE bytes."""
    DTensor.full_tensor = refuse_to_gather
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(ROWS, COLUMNS), nn.Linear(COLUMNS, 64, bias=False))
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for shard in refit.named_weights(model).shards():
            shard.tensor.copy_(values(*shard.box.shape, first=shard.box.first[0]))
    with publisher_of(rank, folder) as publisher:
        await_workers(publisher, rank, 1)
        Path("/proc/self/clear_refs").write_text("5")
        before = memory("VmRSS")
        versions = [send(publisher, refit.named_weights(model)) for _ in range(2)]
        return versions, memory("VmHWM") - before


ROWS, COLUMNS = 1 << 15, 1 << 9
LARGE = 4 * ROWS * COLUMNS


def values(rows: int, columns: int, first: int = 0) -> torch.Tensor:
    """Of these rows of a tensor; each row has others."""
    row = torch.arange(first, first + rows, dtype=torch.float32)
    return row[:, None] + torch.arange(columns) / 1024


def memory(what: str) -> int:
    """Bytes that this process has, by a line of /proc/self/status."""
    with open("/proc/self/status") as lines:
        return next(1024 * int(one.split()[1]) for one in lines if one.startswith(f"{what}:"))


# ---- Processes


def play(
    rank: int, folder: Path, scene: Callable[[int, Path, Connection], object], out: Connection
) -> None:
    """One rank. It ends at once, however the others fare."""
    torch.set_num_threads(1)
    ranks.join(rank, RANKS, folder)
    try:
        out.send(("end", scene(rank, folder, out)))
    except BaseException as why:
        out.send(("end", f"{type(why).__name__}: {why}"))
    os._exit(0)


def roll_out(folder: Path, out: Connection, options: dict[str, Any]) -> None:
    """A worker that tells of every version, until the trainer ends."""
    with Subscriber(trainer_of(folder), **options) as subscriber:
        for update in subscriber:
            with update:
                seen = {view.name: view.torch().clone() for view in update.views()}
            torch.save(seen, folder / f"{os.getpid()}-{update.version}")
            out.send((update.version, str(folder / f"{os.getpid()}-{update.version}")))
    out.send(None)


class Play:
    """All ranks of a scene, and its workers."""

    def __init__(self, folder: Path, scene: Callable[..., object]) -> None:
        self.folder = folder
        self._context = multiprocessing.get_context("spawn")
        self._processes: list[Any] = []
        self.ranks = [self._start(play, rank, folder, scene) for rank in range(RANKS)]

    def _start(self, function: Callable[..., None], *given: Any, **options: Any) -> Connection:
        here, there = self._context.Pipe()
        arguments = (*given, there, options) if function is roll_out else (*given, there)
        process = self._context.Process(target=function, args=arguments)
        process.start()
        there.close()
        self._processes.append(process)
        return here

    def worker(self, **options: Any) -> Connection:
        """Starts one."""
        return self._start(roll_out, self.folder, **{**UNHURRIED, **options})

    def ends(self) -> list[Any]:
        """What each rank says at its end; None of one that was killed."""
        return [self.end_of(one) for one in self.ranks]

    @staticmethod
    def end_of(rank: Connection) -> Any:
        with suppress(EOFError):
            while True:
                assert rank.poll(4 * TIMEOUT), "a rank does not end"
                said = rank.recv()
                if said[0] == "end":
                    return said[1]
        return None

    def __enter__(self) -> "Play":
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._processes:
            one.kill()
            one.join()


def versions_of(worker: Connection) -> dict[int, dict[str, torch.Tensor]]:
    """What a worker got until its trainer ended."""
    found = {}
    while True:
        assert worker.poll(2 * TIMEOUT), "a worker does not end"
        said = worker.recv()
        if said is None:
            return found
        found[said[0]] = torch.load(said[1], weights_only=True)
