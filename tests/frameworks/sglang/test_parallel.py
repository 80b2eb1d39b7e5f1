"""Two tensor-parallel ranks take a version together, each its share of the weights, or say no."""

from collections.abc import Iterator
from typing import Any

import engines
import pytest
import torch
from engines import EngineProcess, weights_of
from refit.errors import PeerError
from refit.integrations import sglang
from trainers import WAIT_S, Trainer, trainer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return engines.save_versions(tmp_path_factory.mktemp("qwen2"), "qwen2", 3, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def expected(folders: list[str]) -> list[engines.Outputs]:
    return engines.outputs_of_fresh(folders, tp_size=2)


@pytest.fixture
def live(folders: list[str], expected: Any) -> Iterator[EngineProcess]:
    with engines.engine(folders[0], tp_size=2) as one:
        yield one


def test_two_ranks_take_each_version_and_answer_with_one_voice(
    live: EngineProcess, folders: list[str], expected: list[engines.Outputs]
) -> None:
    with trainer() as publishing:
        for version in (1, 2):
            done = publishing.publish(weights_of(folders[version]), workers=2)
            assert live("refit_update", publishing.endpoint, version, timeout=WAIT_S) == version
            assert done.result(WAIT_S) == version
            assert live("outputs") == expected[version]
        _fails_on_the_second_rank(live, publishing, folders[3])
        done = publishing.publish(weights_of(folders[3]), workers=2)
        assert live("refit_update", publishing.endpoint, timeout=WAIT_S) == done.result(WAIT_S)
        assert live("outputs") == expected[3]
    live("refit_load", list(weights_of(folders[1]).items()))
    assert live("outputs") == expected[1]


def _fails_on_the_second_rank(live: EngineProcess, publishing: Trainer, folder: str) -> None:
    """A weight that has the first rank's share alone: SGLang itself answers for the first rank."""
    wrong = weights_of(folder)
    name = "model.layers.1.self_attn.q_proj.weight"
    wrong[name] = wrong[name][: len(wrong[name]) // 2].contiguous()
    done = publishing.publish(wrong, workers=2)
    live("begin_weight_update")
    order = sglang.order(publishing.endpoint, 3, WAIT_S)
    ok, why = live("update_weights_from_tensor", order, load_format=sglang.PULL)
    live("end_weight_update")
    assert not ok
    assert "(tensor-parallel rank 1 of 2)" in why, why
    with pytest.raises(PeerError):
        done.result(WAIT_S)
