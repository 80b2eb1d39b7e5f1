"""What two ranks of one job do, each in a process of its own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import deepspeed
import engines
import pytest
import refit
import torch
from broadcasting import pair
from ranks import leave
from refit.weights.lockstep import LockstepError


def play(
    rank: int, folder: Path, scene: Callable[..., None], arguments: tuple[Any, ...]
) -> NoReturn:
    """Plays one scene as one of two ranks."""
    torch.set_num_threads(1)
    engines.join(rank, 2, folder)
    deepspeed.init_distributed("gloo")
    scene(rank, *arguments)
    leave()


def a_training(rank: int, stage: int, kind: str, accumulate: int) -> None:
    ended, _ = engines.train_the_same(stage, kind, accumulate=accumulate, rank=rank)
    if stage:
        whole = sum(p.numel() for p in engines.Language().parameters())
        assert sum(master.numel() for master in ended.masters) < 0.6 * whole


def a_publishing(rank: int, stage: int) -> None:
    """Rank 0 publishes; the other helps to gather. One refit fails on rank 1, and on both then."""
    engine = engines.make(stage)
    with refit.Controller(engine, **engines.OFF) as controller:
        if rank:
            expected = refits(engine, controller, None, rank, stage)
            return
        with pair() as (publisher, worker):
            expected = refits(engine, controller, publisher, rank, stage)
            assert publisher.version == 4
        assert worker.seen == expected


def a_refit_that_fails(engine: Any, controller: Any, publisher: Any, rank: int) -> None:
    with controller.refit(publisher=publisher, lockstep=True) as refitting:
        if rank == 1:
            raise RuntimeError("the reward model is gone")
        refitting.send(refit.named_weights(engine))


def refits(
    engine: Any, controller: Any, publisher: Any, rank: int, stage: int
) -> list[dict[str, bytes]]:
    seen = []
    for number in range(4):
        engines.train(engine, 2, rank=rank)
        expected = engines.bytes_of(engines.weights_of(engine))
        if number == 1 and stage == 3:  # before, rank 0 needs no other rank, and commits
            with pytest.raises((LockstepError, RuntimeError), match="the reward model is gone"):
                a_refit_that_fails(engine, controller, publisher, rank)
            continue
        with controller.refit(publisher=publisher, lockstep=True) as refitting:
            refitting.send(refit.named_weights(engine))
        seen.append(expected)
    return seen


def a_checkpoint(rank: int, folder: str, stage: int) -> None:
    plain = engines.make(stage)
    engines.train(plain, 3, rank=rank)
    plain.save_checkpoint(f"{folder}/plain", tag="a")
    expected = engines.train(plain, 3, rank=rank)
    engine = engines.make(stage)
    with refit.Controller(engine, **engines.OFF) as controller:
        engines.train(engine, 3, controller, rank=rank)
        controller.offload()
        engine.save_checkpoint(f"{folder}/ours", tag="a")
        engines.train(engine, 2, rank=rank)
        controller.offload()
        engine.load_checkpoint(f"{folder}/ours", tag="a")
        again = engines.train(engine, 3, controller, rank=rank)
    engines.assert_same(expected, again)
