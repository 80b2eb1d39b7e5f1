"""What the ranks of test_strategy.py do: SkyRL trains with its own offload, then with refit's."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import refit
import shards
import strategy as skyrl
import torch
from ranks import join, leave
from refit.integrations import verl
from refit.integrations._attached import attached, detach

STEPS = 8
SAVED_AT, LOADED_AT = 2, 5

SCHEDULES: dict[str, dict[str, Any]] = {
    "cycle": {},
    "host": {"schedule": refit.HostStates(window_bytes="64KiB")},
    "cpu_step": {"schedule": refit.CpuStep(fraction=0.5)},
}

PLACES = {
    name: getattr(skyrl.fsdp_strategy, name)
    for name in ("offload_fsdp_optimizer", "load_fsdp_optimizer")
}


def use_refit(config: dict[str, Any]) -> None:
    """What configs/frameworks/skyrl.yaml says."""
    skyrl.fsdp_strategy.offload_fsdp_optimizer = functools.partial(
        verl.offload_fsdp_optimizer, config=config
    )
    skyrl.fsdp_strategy.load_fsdp_optimizer = verl.load_fsdp_optimizer


def use_skyrl() -> None:
    for name, function in PLACES.items():
        setattr(skyrl.fsdp_strategy, name, function)


def play(
    worker: Any, folder: Path, rank: int, seen: Callable[[int, float, dict[str, Any]], None]
) -> None:
    """Training; between steps a checkpoint is saved and loaded, with the states back."""
    strategy, model, optimizer = worker.strategy, worker.model, worker.optimizer
    for step in range(STEPS):
        norm = skyrl.train(worker, step, rank)
        bits = shards.bits(model, optimizer)  # it would bring back what is away
        skyrl.away(worker)
        if step in (SAVED_AT, LOADED_AT):
            strategy.backload_to_gpu(model, optimizer)
            call = strategy.save_checkpoint if step == SAVED_AT else strategy.load_checkpoint
            more = {"node_local_rank": rank} if step == SAVED_AT else {}
            call(model, str(folder), optimizer=optimizer, scheduler=worker.scheduler, **more)
            skyrl.away(worker)
        seen(step, norm, bits)


def scenes(rank: int, folder: Path) -> dict[str, Any]:
    """For each schedule what differed, and figures that tell that refit did the work."""
    model = str(folder / "model")
    plain: list[tuple[float, dict[str, torch.Tensor]]] = []
    play(
        skyrl.make(model),
        folder / "plain",
        rank,
        lambda _step, norm, bits: plain.append((norm, bits)),
    )
    found: dict[str, Any] = {"norms": [norm for norm, _ in plain]}
    for name, config in SCHEDULES.items():
        differ: list[str] = []

        def seen(step: int, norm: float, bits: Any, differ: list[str] = differ) -> None:
            expected_norm, expected = plain[step]
            differ += [f"{step} {name}" for name in shards.differences(bits, expected)]
            if norm != expected_norm:
                differ.append(f"{step} norm")

        use_refit(config)
        try:
            worker = skyrl.make(model)
            play(worker, folder / name, rank, seen)
            controller = attached(worker.optimizer)
            found[name] = {"differ": differ, "stats": controller.stats()}
            detach(worker.optimizer)
        finally:
            use_skyrl()
    return found


def run(rank: int, world: int, folder: str) -> NoReturn:
    """One of the ranks; leaves what it saw in ``folder``."""
    torch.set_num_threads(1)
    join(rank, world, Path(folder))
    found = scenes(rank, Path(folder))
    torch.save(found, Path(folder) / f"seen{rank}")
    leave()
