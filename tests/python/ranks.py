"""A rank of a test: a process that joins the others by gloo, and how it ends."""

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist


def join(
    rank: int,
    ranks: int,
    folder: Path,
    *,
    backend: str = "gloo",
    timeout: timedelta | None = None,
) -> None:
    """Joins the group of so many ranks, which meet in ``folder``."""
    store = dist.FileStore(str(folder / f"store{ranks}"), ranks)
    dist.init_process_group(backend, timeout=timeout, rank=rank, world_size=ranks, store=store)


def leave() -> NoReturn:
    """Ends this process once all ranks have come here.

    Python is not finalized. DTensor keeps the group, and so the threads of gloo, beyond
    ``destroy_process_group`` (PyTorch 2.13). A thread that releases the tensors of a collective
    needs the GIL. If Python is finalizing by then, it ends that thread inside C++, which aborts
    the process: "terminate called without an active exception".
    """
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
