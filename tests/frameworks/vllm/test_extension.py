"""A vLLM engine takes each version by the worker extension, and answers as a fresh one does."""

import models
import pytest
import torch
from extension_engines import engine, greedy, versions_of
from processes import fresh_of
from refit import named_weights
from refit.integrations import vllm
from trainers import WAIT_S, trainer


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("llama", "float32"), pytest.param("qwen2", "bfloat16", marks=pytest.mark.slow)],
)
def test_each_version_answers_as_a_fresh_engine(kind: str, dtype: str) -> None:
    model = models.make(kind, 1, getattr(torch, dtype))
    with engine(model, dtype=dtype) as llm, trainer() as one:
        found = [greedy(llm)]
        vllm.refit_connect(llm, one.endpoint, worker="rollout")
        for version in (1, 2, 3):
            models.change(model, version)
            done = one.publish(named_weights(model))
            assert vllm.refit_update(llm, timeout=WAIT_S) == done.result(WAIT_S) == version
            assert vllm.refit_version(llm) == version
            found.append(greedy(llm))
            assert versions_of(llm) in ({str(version)}, None)
        assert [worker.name for worker in one.publisher.workers()] == ["rollout"]
        vllm.refit_close(llm)
        vllm.refit_close(llm)
        assert vllm.refit_version(llm) == 0
        assert greedy(llm) == found[-1]
    assert found[0] != found[1] != found[2] != found[3]
    assert fresh_of(model, dtype=dtype) == found[-1]
