"""The loaders of SGLang's own models are recorded, whole and divided among two ranks."""

import json
from pathlib import Path
from typing import Any

import engines
import models
import pytest
import torch
from engines import weights_of
from recording_loader import CHECK

KINDS = ["llama", "tied_llama", "qwen2", "qwen3_moe"]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def recorded(kind: str, ranks: int, dtype: str, folder: Path) -> list[dict[str, Any]]:
    """What each rank's recording has. The weights are fp32, the engine's of `dtype`."""
    path = models.save(models.make(kind), folder / "model")
    with engines.engine(path, dtype=dtype, tp_size=ranks, custom_weight_loader=[CHECK]) as live:
        live("begin_weight_update")
        said = [(str(folder), torch.zeros(1)), *weights_of(path).items()]
        done = live("update_weights_from_tensor", said, load_format=CHECK)
        live("end_weight_update")
        assert done[0], done
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def check(found: dict[str, Any], kind: str, dtype: str) -> None:
    assert found["unused"] == []
    assert found["parts"] >= found["tensors"]
    assert not found["overlap"]
    assert found["rows"] == found["parts"]
    assert found["converted"] == (0 if dtype == "float32" else found["parts"])
    assert any("qkv_proj" in one for one in found["targets"])
    assert any(
        ("w13" if kind == "qwen3_moe" else "gate_up_proj") in one for one in found["targets"]
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_models_loader_is_recorded(kind: str, dtype: str, tmp_path: Path) -> None:
    (found,) = recorded(kind, 1, dtype, tmp_path)
    check(found, kind, dtype)


@pytest.mark.slow
def test_each_of_two_ranks_records_its_share(kind: str, tmp_path: Path) -> None:
    for one in recorded(kind, 2, "bfloat16", tmp_path):
        check(one, kind, "bfloat16")
