"""verl's FSDP2 engine with refit in the place of verl's own offload, bit for bit."""

from typing import Any

import engine_scenes
import models
import pytest
import torch
import torch.multiprocessing


@pytest.fixture(
    scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)], ids=["1 rank", "2 ranks"]
)
def seen(request: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw in each schedule."""
    folder = tmp_path_factory.mktemp("engine")
    models.save(models.make("llama"), folder / "model")
    torch.multiprocessing.spawn(
        engine_scenes.run, (request.param, str(folder)), nprocs=request.param, join=True
    )
    return [torch.load(folder / f"seen{rank}") for rank in range(request.param)]


@pytest.mark.parametrize("schedule", engine_scenes.SCHEDULES)
def test_an_engine_trains_to_the_bits_of_verl_alone(
    seen: list[dict[str, Any]], schedule: str
) -> None:
    for rank in seen:
        found = rank[schedule]
        assert found["differ"] == {}
        stats = found["stats"]
        if "host" in schedule:
            assert stats["refit/step_in_bytes"] + stats.get("refit/host_step_s", 0.0) > 0
        else:
            assert stats["refit/cycles"] >= engine_scenes.STEPS
            assert stats["refit/early_returns"] == 0  # load_fsdp_optimizer has brought them back
        if "activations" in schedule:
            assert len(found["left"]) == engine_scenes.STEPS
            assert min(found["left"]) > 0


def test_installing_takes_the_places_where_verl_calls(seen: list[dict[str, Any]]) -> None:
    assert sorted(seen[0]["cycle"]["places"]) == [
        "verl.utils.activation_offload.enable_activation_offloading",
        "verl.utils.fsdp_utils.load_fsdp_optimizer",
        "verl.utils.fsdp_utils.offload_fsdp_optimizer",
        "verl.workers.engine.fsdp.transformer_impl.enable_activation_offloading",
        "verl.workers.engine.fsdp.transformer_impl.load_fsdp_optimizer",
        "verl.workers.engine.fsdp.transformer_impl.offload_fsdp_optimizer",
    ]
