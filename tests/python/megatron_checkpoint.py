"""``megatron_checkpoint.py FOLDER WAY``: Megatron's ``dist_checkpointing.save`` of states away.

Its writers are forked; one that ends leaves their parent waiting, so that this is a process that
can be given up.
"""

import sys
import warnings
from pathlib import Path
from typing import Any

import refit
import torch

WAYS: dict[str, dict[str, Any]] = {
    "host": {"schedule": refit.HostStates()},
    "cycle": {},
}


def trained() -> tuple[Any, Any]:
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    return model, torch.optim.AdamW(model.parameters())


def step(model: Any, optimizer: Any) -> None:
    for number in range(3):
        model(torch.ones(4, 64) * number).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def moments(states: Any) -> dict[str, Any]:
    return {
        f"{name}.{number}": value
        for number, state in states["state"].items()
        for name, value in state.items()
        if name != "step"
    }


def save(states: Any, folder: Path) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    sharded = {
        name: ShardedTensor.from_rank_offsets(name, value)
        for name, value in moments(states).items()
    }
    dist_checkpointing.save(
        sharded, str(folder), ("torch_dist", 1), validate_access_integrity=False
    )


def main(folder: Path, way: str) -> None:
    warnings.simplefilter("ignore")
    gpu: Any = torch.cuda  # Megatron asks for one, and does without
    gpu.synchronize = lambda *_: None
    gpu.current_device = lambda: torch.device("cpu")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}.rendezvous", rank=0, world_size=1
    )
    model, optimizer = trained()
    controller = refit.Controller(optimizer, model, **WAYS[way])
    step(model, optimizer)
    controller.offload()
    folder.mkdir()
    if way == "cycle":
        with controller.checkpoint() as states:
            save(states, folder)
    else:
        save(optimizer.state_dict(), folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
