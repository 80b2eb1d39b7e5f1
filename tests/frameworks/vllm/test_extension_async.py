"""AsyncLLM takes versions while requests are under way."""

import asyncio
from typing import Any

import models
import pytest
from extension_engines import EXTENSION, OPTIONS, PROMPTS, saved
from processes import fresh_of
from refit import named_weights
from refit.errors import DeadlineError, InvalidError
from refit.integrations import vllm
from trainers import WAIT_S, trainer

pytestmark = pytest.mark.slow

PROMPT = PROMPTS[0]
LENGTH = 40


async def answer(llm: Any, name: str, length: int = LENGTH, prompt: Any = PROMPT) -> list[int]:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0,
        max_tokens=length,
        ignore_eos=True,
        output_kind=RequestOutputKind.CUMULATIVE,
    )
    tokens: list[int] = []
    async for output in llm.generate(prompt, params, name):
        tokens = list(output.outputs[0].token_ids)
    return tokens


async def run(folder: str, model: Any) -> list[int]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    options = {**OPTIONS, "worker_extension_cls": EXTENSION}
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=folder, **options))
    try:
        with pytest.raises(InvalidError, match="_async"):
            vllm.refit_update(llm)
        with trainer() as one:
            await vllm.refit_connect_async(llm, one.endpoint)
            with pytest.raises(DeadlineError):
                await vllm.refit_update_async(llm, timeout=0.2)
            assert not await llm.is_paused()
            before = await answer(llm, "before")
            for version in (1, 2, 3):
                models.change(model, version)
                running = [
                    asyncio.ensure_future(answer(llm, f"{version}-{row}", LENGTH, prompt))
                    for row, prompt in enumerate(PROMPTS)
                ]
                await asyncio.sleep(0.1)
                done = one.publish(named_weights(model))
                loaded = await vllm.refit_update_async(llm, timeout=WAIT_S)
                assert loaded == version == done.result(WAIT_S)
                assert [len(tokens) for tokens in await asyncio.gather(*running)] == [LENGTH] * 4
                assert await vllm.refit_version_async(llm) == version
                now = await answer(llm, f"after-{version}", 12)
                assert now != before[:12]
                before = now
            await vllm.refit_close_async(llm)
            return now
    finally:
        llm.shutdown()


def test_requests_go_on_after_each_version() -> None:
    model = models.make("llama", 6)
    with saved(model) as folder:
        found = asyncio.run(run(folder, model))
    assert fresh_of(model)[0][0] == found
