"""Ranks of a test: processes that meet by gloo, play their part, and end together."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

needs_fsdp2 = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"),
    reason="FSDP2 of this PyTorch runs on GPUs only: 2.6",
)


def run(play: Callable[..., Any], folder: Path, *arguments: Any, count: int = 2) -> list[Any]:
    """What ``play(rank, folder, *arguments)`` returns on each rank, in a process of its own.

    A rank that raises or ends with another exit code than 0 ends the other ranks and is raised
    here. No rank is left running if the test ends, not even by its timeout.
    """
    of_all = (play, folder, count, arguments)
    started = torch.multiprocessing.spawn(_play, of_all, nprocs=count, join=False)
    try:
        while not started.join():
            pass
    finally:
        for one in started.processes:
            one.kill()
    seen = [folder / f"rank{rank}of{count}" for rank in range(count)]
    return [torch.load(one, weights_only=True) for one in seen]


def _play(
    rank: int, play: Callable[..., Any], folder: Path, count: int, arguments: tuple[Any, ...]
) -> NoReturn:
    torch.set_num_threads(1)
    torch.save(play(rank, folder, *arguments), folder / f"rank{rank}of{count}")
    leave()


def join(rank: int, ranks: int, folder: Path, *, backend: str = "gloo") -> None:
    """Joins the group of so many ranks, which meet in ``folder``."""
    store = dist.FileStore(str(folder / f"store{ranks}"), ranks)
    dist.init_process_group(backend, rank=rank, world_size=ranks, store=store)


def join_as_launched(rank: int, ranks: int, folder: Path) -> None:
    """``join`` for frameworks, which read from the environment that torchrun has launched them."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(one) for name, one in names.items()}, MASTER_ADDR="127.0.0.1")
    join(rank, ranks, folder)


def leave() -> NoReturn:
    """Ends this process once all ranks have come here.

    Python is not finalized. DTensor keeps the group, and so the threads of gloo, beyond
    ``destroy_process_group`` (PyTorch 2.13). A thread that releases the tensors of a collective
    needs the GIL. If Python is finalizing by then, it ends that thread inside C++, which aborts
    the process: "terminate called without an active exception".
    """
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
