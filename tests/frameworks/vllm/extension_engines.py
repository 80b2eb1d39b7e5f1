"""vLLM engines on the CPU, as the tests start them, and what they answer."""

import gc
import json
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import models
import refit
from trainers import Trainer

EXTENSION = "refit.integrations.vllm.RefitWorkerExtension"
BROKEN = "broken_worker.BrokenExtension"

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
)

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 128,
    "max_num_seqs": 8,
    "enable_prefix_caching": True,
    "block_size": 32,
    "seed": 0,
}

PROMPTS = [{"prompt_token_ids": [5 + 3 * row, *range(20 + row, 60 + row), 9]} for row in range(4)]
"""Longer than a block of the prefix cache."""


@contextmanager
def saved(model: Any) -> Iterator[str]:
    """The model in a folder, as an engine loads it."""
    with tempfile.TemporaryDirectory() as folder:
        yield models.save(model, folder)


@contextmanager
def started(folder: str, **options: Any) -> Iterator[Any]:
    """An LLM; its processes end with the block."""
    from vllm import LLM

    llm = LLM(folder, **{**OPTIONS, **options})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


@contextmanager
def engine(model: Any, *, extension: str | None = EXTENSION, **options: Any) -> Iterator[Any]:
    """An LLM with these weights."""
    if extension:
        options["worker_extension_cls"] = extension
    with saved(model) as folder, started(folder, **options) as llm:
        yield llm


@contextmanager
def quantized(**options: Any) -> Iterator[Any]:
    """An LLM whose checkpoint says that it is GPTQ's; no weights are read from it. It was seen not
    to answer on a CPU for which vLLM has no kernel."""
    with saved(models.make("llama", 5)) as folder:
        config = Path(folder, "config.json")
        said = json.loads(config.read_text())
        how = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
        config.write_text(json.dumps({**said, "quantization_config": how}))
        with started(folder, dtype="bfloat16", load_format="dummy", **options) as llm:
            yield llm


def transfers(extension: str) -> dict[str, Any]:
    """Keywords of ``engine`` for vLLM's weight transfer, with a worker of on_cpu.py."""
    from vllm.config import WeightTransferConfig

    transfer = WeightTransferConfig(backend="refit")
    return {"extension": f"on_cpu.{extension}", "weight_transfer_config": transfer}


def greedy(llm: Any, prompts: Any = PROMPTS, **said: Any) -> list[tuple[list[int], list[float]]]:
    """Tokens and their logprobs."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=12, logprobs=1, ignore_eos=True)
    answers = llm.generate(prompts, params, use_tqdm=False, **said)
    return [_of(one.outputs[0]) for one in answers]


def versions_of(llm: Any) -> set[str] | None:
    """The versions by which vLLM says that it has made its answers; None if it does not say."""
    if not hasattr(llm.llm_engine, "set_weight_version"):
        return None
    answers = llm.generate(PROMPTS, use_tqdm=False)
    return {span.version for one in answers for span in one.outputs[0].weight_versions}


def _of(output: Any) -> tuple[list[int], list[float]]:
    tokens = list(output.token_ids)
    chances = zip(tokens, output.logprobs, strict=True)
    return tokens, [there[token].logprob for token, there in chances]


def publish_to_one_that_fails(
    llm: Any, model: Any, one: Trainer, rank: int, tensors: int
) -> Future[int]:
    """Publishes version 2, whose load fails at one rank after so many tensors."""
    llm.collective_rpc("break_next_load", args=(rank, tensors))
    weights = refit.named_weights(model)
    return one.publish(((name, tensor + 1) for name, tensor in weights), 2)
