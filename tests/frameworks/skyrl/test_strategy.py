"""SkyRL's FSDP strategy with refit in the place of SkyRL's own offload of states, bit for bit."""

from typing import Any

import pytest
import strategy_scenes
import torch
import torch.multiprocessing
from strategy import models


@pytest.fixture(
    scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)], ids=["1 rank", "2 ranks"]
)
def seen(request: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw in each schedule."""
    folder = tmp_path_factory.mktemp("strategy")
    models.save(models.make("llama"), folder / "model")
    torch.multiprocessing.spawn(
        strategy_scenes.run, (request.param, str(folder)), nprocs=request.param, join=True
    )
    return [torch.load(folder / f"seen{rank}") for rank in range(request.param)]


@pytest.mark.parametrize("schedule", strategy_scenes.SCHEDULES)
def test_a_strategy_trains_to_the_bits_of_skyrl_alone(
    seen: list[dict[str, Any]], schedule: str
) -> None:
    for rank in seen:
        assert len(set(rank["norms"])) == strategy_scenes.STEPS  # it trains
        assert rank[schedule]["differ"] == []
        stats = rank[schedule]["stats"]
        if schedule == "host":
            assert stats["refit/step_in_bytes"] > 0
        elif schedule == "cpu_step":
            assert stats["refit/host_step_s"] > 0
        else:
            assert stats["refit/cycles"] >= strategy_scenes.STEPS
            assert stats["refit/early_returns"] == 0  # load_fsdp_optimizer has brought them back
