"""What ranks do whose weights are parked: train with and without refit, and compare their bits."""

from pathlib import Path
from typing import Any

import ranks
import refit
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

RANKS = 2


def blocks() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(nn.Linear(48, 96), nn.Linear(96, 48)) for _ in range(3)))


def fsdp2() -> nn.Module:
    made = blocks()
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in made:
        fully_shard(block, mesh=mesh)
    fully_shard(made, mesh=mesh)
    return made


def ddp() -> nn.Module:
    return DistributedDataParallel(blocks())


MODELS: dict[str, Any] = {"fsdp2": fsdp2, "ddp": ddp}


def trained(kind: str, rank: int, park: bool) -> list[torch.Tensor]:
    """The weights that this rank has after some steps."""
    made = MODELS[kind]()
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    controller = refit.Controller(optimizer, made, weights="park") if park else None
    source = torch.Generator().manual_seed(rank)
    for step in range(5):
        if controller is not None:
            controller.offload()
            assert controller.stats()["refit/parked_bytes"] > 0
            if step % 2:
                controller.restore()
        made(torch.randn(4, 48, generator=source)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if controller is not None:
        controller.close()
    local = [getattr(p, "_local_tensor", p) for p in made.parameters()]
    return [p.detach().clone() for p in local]


def play(rank: int, folder: Path, kind: str) -> bool:
    """Whether the bits are the same."""
    ranks.join(rank, RANKS, folder)
    plain, parked = trained(kind, rank, False), trained(kind, rank, True)
    return all(torch.equal(p, q) for p, q in zip(plain, parked, strict=True))
