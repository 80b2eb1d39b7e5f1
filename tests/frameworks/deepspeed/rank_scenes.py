"""What two ranks of one job do, each in a process of its own."""

import os
from collections.abc import Callable
from typing import Any, NoReturn

import deepspeed
import engines
import pytest
import refit
import torch
from ranks import leave
from refit.lockstep import LockstepError


def play(rank: int, port: int, scene: Callable[..., None], arguments: tuple[Any, ...]) -> NoReturn:
    """Plays one scene as one of two ranks."""
    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
    )
    deepspeed.init_distributed("gloo")
    scene(rank, *arguments)
    leave()


def a_training(rank: int, stage: int, kind: str, accumulate: int) -> None:
    chosen: dict[str, Any] = {"accumulate": accumulate}
    plain = engines.train(engines.make(stage, kind, **chosen), 10, accumulate=accumulate, rank=rank)
    engine = engines.make(stage, kind, **chosen)
    with refit.Controller(engine, offload_pin="off") as controller:
        before = engines.cycle(controller)
        ours = engines.train(engine, 10, accumulate=accumulate, rank=rank, before=before)
    engines.assert_same(plain, ours)
    if stage:
        whole = sum(p.numel() for p in engines.Language().parameters())
        assert sum(master.numel() for master in ours.masters) < 0.6 * whole


def a_publishing(rank: int, stage: int) -> None:
    """Rank 0 publishes; the other helps to gather. One refit fails on rank 1, and on both then."""
    engine = engines.make(stage)
    with refit.Controller(engine, offload_pin="off") as controller:
        if rank:
            expected = refits(engine, controller, None, rank, stage)
            return
        with engines.published() as (publisher, worker):
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
    with refit.Controller(engine, offload_pin="off") as controller:
        engines.train(engine, 3, rank=rank, before=engines.cycle(controller))
        controller.clear()
        engine.save_checkpoint(f"{folder}/ours", tag="a")
        engines.train(engine, 2, rank=rank)
        controller.clear()
        engine.load_checkpoint(f"{folder}/ours", tag="a")
        again = engines.train(engine, 3, rank=rank, before=engines.cycle(controller))
    engines.assert_same(expected, again)
