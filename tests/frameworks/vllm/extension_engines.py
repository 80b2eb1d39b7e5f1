"""vLLM engines on the CPU, as the tests start them, and what they answer."""

import gc
import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import models
import refit

EXTENSION = "refit.integrations.vllm.RefitWorkerExtension"
BROKEN = "broken_worker.BrokenExtension"
WAIT_S = 120.0

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
def engine(model: Any, *, extension: str | None = EXTENSION, **options: Any) -> Iterator[Any]:
    """An LLM with these weights; its processes end with the block."""
    from vllm import LLM

    if extension:
        options["worker_extension_cls"] = extension
    with saved(model) as folder:
        llm = LLM(folder, **{**OPTIONS, **options})
        try:
            yield llm
        finally:
            end(llm)
            del llm
            gc.collect()


@contextmanager
def quantized(**options: Any) -> Iterator[Any]:
    """An LLM whose checkpoint says that it is GPTQ's; no weights are read from it. It was seen not
    to answer on a CPU for which vLLM has no kernel."""
    from vllm import LLM

    with saved(models.make("llama", 5)) as folder:
        config = Path(folder, "config.json")
        said = json.loads(config.read_text())
        how = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
        config.write_text(json.dumps({**said, "quantization_config": how}))
        llm = LLM(folder, **{**OPTIONS, "dtype": "bfloat16", "load_format": "dummy", **options})
        try:
            yield llm
        finally:
            end(llm)


def end(llm: Any) -> None:
    """Ends the engine's processes, if they have not ended by themselves."""
    core = llm.llm_engine.engine_core
    core.shutdown()


def greedy(llm: Any, prompts: Any = PROMPTS, **said: Any) -> list[tuple[list[int], list[float]]]:
    """Tokens and their logprobs."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=12, logprobs=1, ignore_eos=True)
    answers = llm.generate(prompts, params, use_tqdm=False, **said)
    return [_of(one.outputs[0]) for one in answers]


def _of(output: Any) -> tuple[list[int], list[float]]:
    tokens = list(output.token_ids)
    chances = zip(tokens, output.logprobs, strict=True)
    return tokens, [there[token].logprob for token, there in chances]


def fresh(model: Any, **options: Any) -> list[tuple[list[int], list[float]]]:
    """What an engine answers that starts with these weights."""
    with engine(model, extension=None, **options) as llm:
        return greedy(llm)


class Trainer:
    """A publisher, and a thread that publishes while the engine is driven."""

    def __init__(self) -> None:
        self._opened = ExitStack()
        self.publisher = self._opened.enter_context(refit.Publisher("user://*"))
        self._pool = self._opened.enter_context(ThreadPoolExecutor(1))

    @property
    def endpoint(self) -> str:
        return self.publisher.endpoint

    def publish(self, weights: Any, version: int | None = None, workers: int = 1) -> Future[int]:
        """Publishes once so many workers are there; the future has the version, or why not."""

        def run() -> int:
            self.publisher.wait_workers(workers, WAIT_S)
            self.publisher.publish(weights, version)
            return self.publisher.version

        return self._pool.submit(run)

    def close(self) -> None:
        self._opened.close()


def publish_to_one_that_fails(
    llm: Any, model: Any, one: Trainer, rank: int, tensors: int
) -> Future[int]:
    """Publishes version 2, whose load fails at one rank behind so many tensors."""
    llm.collective_rpc("break_next_load", args=(rank, tensors))
    weights = refit.named_weights(model)
    return one.publish(((name, tensor + 1) for name, tensor in weights), 2)


@contextmanager
def trainer() -> Iterator[Trainer]:
    one = Trainer()
    try:
        yield one
    finally:
        one.close()


def after(seconds: float, call: Callable[[], Any]) -> threading.Timer:
    """Calls it later, on a thread."""
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.start()
    return timer
