"""Two gloo ranks: ZeRO divides states, masters, gradients and, from stage 3 on, weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rank_scenes
import torch.multiprocessing as processes

SLOW = pytest.mark.slow
Play = Callable[..., None]


@pytest.fixture
def on_two_ranks(tmp_path: Path) -> Play:
    def play(scene: Play, *arguments: Any) -> None:
        processes.spawn(rank_scenes.play, (tmp_path, scene, arguments), nprocs=2)

    return play


@pytest.mark.parametrize(
    ("stage", "kind", "accumulate"),
    [
        pytest.param(0, "bf16", 1, marks=SLOW),
        pytest.param(1, "bf16", 2, marks=SLOW),
        pytest.param(2, "bf16", 2, marks=SLOW),
        pytest.param(2, "fp16", 1, marks=SLOW),
        pytest.param(3, "fp32", 1, marks=SLOW),
        (3, "bf16", 2),
    ],
)
def test_a_training_is_the_same_to_the_bit(
    stage: int, kind: str, accumulate: int, on_two_ranks: Play
) -> None:
    on_two_ranks(rank_scenes.a_training, stage, kind, accumulate)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_one_rank_publishes(stage: int, on_two_ranks: Play) -> None:
    on_two_ranks(rank_scenes.a_publishing, stage)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_checkpoints_while_states_are_away(stage: int, tmp_path: Path, on_two_ranks: Play) -> None:
    on_two_ranks(rank_scenes.a_checkpoint, str(tmp_path), stage)
