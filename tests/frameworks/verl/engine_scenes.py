"""What the ranks of test_engine.py do: verl trains with its own offload, and then with refit's."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import engine as verl_engine
import shards
import torch
import torch.distributed as dist
from ranks import join, leave
from refit.integrations import verl
from refit.integrations._attached import attached, detach

STEPS = 12
SAVED_AT, LOADED_AT = 4, 8
WINDOWS = {"host_states": {"window_bytes": "64KiB"}}
HOST = {"offload": {"timeout_ms": 60_000}, "schedule": WINDOWS}

SCHEDULES: dict[str, dict[str, Any]] = {
    "cycle": {},
    "host": HOST,
    "cpu_step": {"schedule": {"cpu_step": {"fraction": 0.5}}},
    "host and CPU": {**HOST, "schedule": {**WINDOWS, "cpu_step": {"fraction": 0.5}}},
    "activations": {
        "activations": {"host_bytes": "16MiB", "min_bytes": "1KiB", "aim": "memory"},
    },
    "activations, checkpointing": {
        "activations": {"host_bytes": "16MiB", "min_bytes": "1KiB", "aim": "memory"},
    },
}


def play(engine: Any, folder: Path, rank: int, seen: Callable[[int, Any, Any], None]) -> None:
    """Training as verl's workers do it; in the middle a checkpoint, while gradients are there."""
    for step in range(STEPS):
        verl_engine.back(engine)
        verl_engine.train(engine, step, rank)
        if step in (SAVED_AT, LOADED_AT):
            with engine.train_mode():
                engine.forward_backward_batch(verl_engine.batch(100, rank), verl_engine.loss)
                assert all(p.grad is not None for p in engine.module.parameters())
                if step == SAVED_AT:
                    engine.save_checkpoint(str(folder), global_step=step)
                else:
                    engine.load_checkpoint(str(folder), del_local_after_load=False)
                    verl_engine.back(engine)
        bits = shards.bits(engine.module, engine.optimizer)  # it would bring back what is away
        verl_engine.away(engine)
        seen(step, engine, bits)


def scenes(rank: int, folder: Path) -> dict[str, Any]:
    """For each schedule what differed, and figures that tell that refit did the work."""
    model = str(folder / "model")
    found: dict[str, Any] = {}
    for checkpointing in (False, True):
        plain: list[dict[str, torch.Tensor]] = []
        play(
            verl_engine.make(model, checkpointing=checkpointing),
            folder / f"plain{checkpointing}",
            rank,
            lambda _step, _engine, bits, plain=plain: plain.append(bits),
        )
        for name, config in SCHEDULES.items():
            if name.endswith("checkpointing") == checkpointing:
                found[name] = scene(rank, folder, name, config, plain, checkpointing)
    return found


def scene(
    rank: int, folder: Path, name: str, config: Any, plain: list[Any], checkpointing: bool
) -> dict[str, Any]:
    differ: dict[int, list[str]] = {}
    left: list[float] = []
    stats: dict[str, float] = {}

    def seen(step: int, engine: Any, bits: dict[str, torch.Tensor]) -> None:
        controller = attached(engine.optimizer)
        stats.update(controller.stats())
        if offload is not None:
            left.append(offload.stats()["refit/activation_left_bytes_last"])
        if wrong := shards.differences(bits, plain[step]):
            differ[step] = wrong

    with verl.install(config) as installation:
        engine = verl_engine.make(
            str(folder / "model"),
            checkpointing=checkpointing,
            enable_activation_offload="activations" in config,
        )
        held = getattr(engine.module, "_refit_activations", None)
        offload = None if held is None else held.offload
        place = folder / "saved"
        play(engine, place, rank, seen)
        places = installation.places
        detach(engine.optimizer)
        if offload is not None:
            offload.close()
    dist.barrier()
    if rank == 0:
        shutil.rmtree(place)
    dist.barrier()
    return {"differ": differ, "stats": stats, "left": left, "places": places}


def run(rank: int, world: int, folder: str) -> NoReturn:
    """One of the ranks; leaves what it saw in ``folder``."""
    torch.set_num_threads(1)
    join(rank, world, Path(folder))
    found = scenes(rank, Path(folder))
    torch.save(found, Path(folder) / f"seen{rank}")
    leave()
