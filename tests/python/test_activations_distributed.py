"""Activations leave where ranks train together: DDP, FSDP1, FSDP2 and DTensor, with each way of
checkpointing, on two ranks, which meet by gloo: their tensors lie on the host on any machine."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing

sys.path.insert(0, str(Path(__file__).parent))

import activation_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw in each scene. A rank that hangs fails all of them by the timeout."""
    if not hasattr(torch.cpu.Stream, "record_event"):
        pytest.skip("FSDP2 of this PyTorch runs on GPUs only: 2.6")
    folder = tmp_path_factory.mktemp("activations")
    torch.multiprocessing.spawn(activation_ranks.play, (str(folder),), nprocs=2, join=True)
    return [torch.load(folder / f"rank{rank}", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("scene", [one.__name__ for one in activation_ranks.SCENES])
def test_ranks_have_the_bits_of_ranks_without_refit(seen: list[dict[str, Any]], scene: str) -> None:
    assert [one[scene] for one in seen] == [True, True]
