"""Two gloo ranks: ZeRO divides states, masters, gradients and, from stage 3 on, weights."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rank_scenes
import torch.multiprocessing as processes


def on_two_ranks(scene: Callable[..., None], *arguments: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes.spawn(rank_scenes.play, (port, scene, arguments), nprocs=2)


@pytest.mark.parametrize(
    ("stage", "kind", "accumulate"),
    [
        (0, "bf16", 1),
        (1, "bf16", 2),
        (2, "bf16", 2),
        (2, "fp16", 1),
        (3, "fp32", 1),
        (3, "bf16", 2),
    ],
)
def test_a_training_is_the_same_to_the_bit(stage: int, kind: str, accumulate: int) -> None:
    on_two_ranks(rank_scenes.a_training, stage, kind, accumulate)


@pytest.mark.parametrize("stage", [2, 3])
def test_one_rank_publishes(stage: int) -> None:
    on_two_ranks(rank_scenes.a_publishing, stage)


@pytest.mark.parametrize("stage", [2, 3])
def test_checkpoints_while_states_are_away(stage: int, tmp_path: Path) -> None:
    on_two_ranks(rank_scenes.a_checkpoint, str(tmp_path), stage)
