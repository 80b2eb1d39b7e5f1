"""What the ranks of test_host_distributed.py do: sharded training, with its states on the host."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import refit
import torch
import torch.distributed.checkpoint as dcp
from ranks import join, leave
from refit.away import kind_of
from refit.errors import BusyError
from shard_scenes import Sharded, same
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

Scene = Callable[[int, Path], object]
WIDTH = 301
"""Of the hidden layer: each rank's shard of it has states that live on the host."""


def on_host(run: Sharded, **options: Any) -> refit.Controller:
    return refit.Controller(
        run.optimizer, run.model, states="host", window_bytes="64KiB", **options
    )


def on_image(controller: refit.Controller, tensors: list[torch.Tensor]) -> int:
    """How many of these tensors lie over the image, by what they hold."""
    assert controller._host is not None
    kept = controller._host._kept.values()
    views = [slot.view for one in kept for state in one.states.values() for slot in state.slots]
    inner = [t._local_tensor if isinstance(t, DTensor) else t for t in tensors]
    return sum(any(one is view for view in views) for one in inner)


def steps(kind: str, make: Callable[..., Any] = torch.optim.AdamW) -> object:
    alone, moved = Sharded(kind, WIDTH, make), Sharded(kind, WIDTH, make)
    with on_host(moved) as controller:
        for _ in range(4):
            alone.step()
            moved.step()
            pairs = zip(alone.moments(), moved.moments(), strict=True)
            kinds = [type(mine) is kind_of(theirs) for mine, theirs in pairs]
            if not same(alone, moved):
                return "other bits"
        looks = [[(t.shape, t.stride()) for t in run.moments()] for run in (alone, moved)]
        found = on_image(controller, moved.moments())
        controller.clear()
        controller.restore()
        alone.step(), moved.step()
        if not same(alone, moved):
            return "other bits behind a cycle"
    alone.step(), moved.step()
    if not same(alone, moved):
        return "other bits behind the end"
    return True if all(kinds) and looks[0] == looks[1] and found > 0 else (kinds, looks, found)


def fsdp2(_rank: int, _folder: Path) -> object:
    return steps("fsdp2")


def dtensor(_rank: int, _folder: Path) -> object:
    return steps("dtensor")


def fsdp1(_rank: int, _folder: Path) -> object:
    return steps("fsdp1")


def fsdp1_flat(_rank: int, _folder: Path) -> object:
    return steps("fsdp1_flat")


def momentum(_rank: int, _folder: Path) -> object:
    def make(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9, nesterov=True)

    return steps("fsdp2", make)


def used_by_hand(_rank: int, _folder: Path) -> object:
    """States are read and written as DTensors between steps."""
    alone, moved = Sharded("fsdp2", WIDTH), Sharded("fsdp2", WIDTH)
    with on_host(moved):
        for _ in range(3):
            for run in (alone, moved):
                run.step()
                for one in run.moments():
                    one.mul_(0.5)
            seen = [
                [t.full_tensor() if isinstance(t, DTensor) else t for t in run.moments()]
                for run in (alone, moved)
            ]
            if not all(map(torch.equal, *seen)):
                return "other values"
        copied = copy.deepcopy(moved.optimizer.state_dict())
        alone.step(), moved.step()
        return same(alone, moved) and len(copied["state"]) == 4


def saves(folder: Path, asynchronous: bool) -> object:
    run, other = Sharded("fsdp2", WIDTH), Sharded("fsdp2", WIDTH)
    name = folder / ("host-async" if asynchronous else "host-sync")
    with on_host(run) as controller, on_host(other):
        run.step(), run.step()
        with controller.checkpoint() as state:
            inner = [t for one in state["state"].values() for t in one.values() if t.dim() > 0]
            read = on_image(controller, inner)
            named = get_optimizer_state_dict(run.model, run.optimizer)
            if asynchronous:
                saving: Any = dcp.async_save({"optimizer": named}, checkpoint_id=name)
                try:
                    run.optimizer.step()
                    refused = False
                except BusyError:
                    refused = True
                saving.result()
            else:
                refused = True
                dcp.save({"optimizer": named}, checkpoint_id=name)
        expected = [t.detach().clone() for t in run.shards()]
        other.step()
        with torch.no_grad():
            for mine, theirs in zip(other.model.parameters(), run.model.parameters(), strict=True):
                mine.copy_(theirs)
        loaded = {"optimizer": get_optimizer_state_dict(other.model, other.optimizer)}
        dcp.load(loaded, checkpoint_id=name)
        set_optimizer_state_dict(other.model, other.optimizer, loaded["optimizer"])
        other.steps = run.steps
        back = all(torch.equal(a, b) for a, b in zip(expected, other.shards(), strict=True))
        run.step(), other.step()
        return refused and back and read > 0 and same(run, other)


def saved_at_once(_rank: int, folder: Path) -> object:
    return saves(folder, False)


def saved_behind(_rank: int, folder: Path) -> object:
    return saves(folder, True)


SCENES: list[Scene] = [
    fsdp2,
    dtensor,
    fsdp1,
    fsdp1_flat,
    momentum,
    used_by_hand,
    saved_at_once,
    saved_behind,
]


def play(rank: int, folder: str) -> NoReturn:
    """Plays all scenes as one of two ranks, and leaves what it saw in `folder`."""
    torch.set_num_threads(1)
    join(rank, 2, Path(folder), backend="cpu:gloo")
    seen = {scene.__name__: scene(rank, Path(folder)) for scene in SCENES}
    torch.save(seen, Path(folder) / f"rank{rank}")
    leave()
