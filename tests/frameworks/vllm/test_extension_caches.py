"""What an engine has computed with a version is gone with it; and engines that sleep, that are
divided by layers, or whose weights are quantized."""

import inspect
from collections.abc import Iterator
from typing import Any

import models
import pytest
from broadcasting import NOWHERE
from extension_engines import BROKEN, EXTENSION, PROMPTS, engine, greedy, quantized
from processes import fresh_of
from refit import named_weights
from refit.errors import StateError, UnsupportedError
from refit.integrations import vllm
from trainers import WAIT_S, Trainer, trainer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def connected() -> Iterator[tuple[Any, Any, Trainer]]:
    """An engine that follows a trainer, and the trainer's model."""
    model = models.make("llama", 3)
    with engine(model) as llm, trainer() as one:
        vllm.refit_connect(llm, one.endpoint)
        yield llm, model, one
        vllm.refit_close(llm)


def update(connected: tuple[Any, Any, Trainer], **said: Any) -> int:
    llm, model, one = connected
    models.change(model, 11)
    done = one.publish(named_weights(model))
    version = vllm.refit_update(llm, timeout=WAIT_S, **said)
    assert done.result(WAIT_S) == version
    return version


def cached(llm: Any) -> int:
    """Tokens of the prompts that come from the prefix cache when they are asked for."""
    from vllm import SamplingParams

    answers = llm.generate(PROMPTS, SamplingParams(max_tokens=1), use_tqdm=False)
    return sum(one.num_cached_tokens for one in answers)


def test_prompt_cached_before_update_is_computed_again(
    connected: tuple[Any, Any, Trainer],
) -> None:
    llm, model, _ = connected
    greedy(llm)
    assert cached(llm) == 32 * len(PROMPTS)
    update(connected)
    found = greedy(llm)
    assert cached(llm) == 32 * len(PROMPTS)
    assert fresh_of(model) == found


def test_requests_under_way_are_computed_anew(connected: tuple[Any, Any, Trainer]) -> None:
    from vllm import SamplingParams

    llm, _, _ = connected
    if "mode" not in inspect.signature(llm.sleep).parameters:
        pytest.skip("this vLLM keeps no requests while it pauses")
    within = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    within.add_request("under way", PROMPTS[0], params)
    for _ in range(4):
        within.step()
    llm.sleep(0, mode="keep")
    with pytest.raises(StateError, match="requests are under way"):
        update(connected, reset_running_requests=False)
    version = update(connected)
    assert vllm.refit_version(llm) == version
    llm.wake_up(["scheduling"])
    left: list[Any] = []
    while within.has_unfinished_requests():
        left = within.step() or left
    tokens = list(left[0].outputs[0].token_ids)
    assert len(tokens) == 60
    whole = {"prompt_token_ids": [*PROMPTS[0]["prompt_token_ids"], *tokens[:50]]}
    llm.reset_prefix_cache()
    assert greedy(llm, [whole])[0][0][:10] == tokens[50:]


def test_an_update_between_sleep_and_wake(connected: tuple[Any, Any, Trainer]) -> None:
    # On a CPU the memory stays, and vLLM says so in its log; what sleeps is the scheduler.
    llm, model, _ = connected
    for level in (1, 2):
        llm.sleep(level)
        update(connected)
        llm.wake_up()
    assert fresh_of(model) == greedy(llm)


# ---- Divided by layers


def test_each_stage_takes_the_layers_that_it_has() -> None:
    # vLLM's CPU platform starts two stages, and fails at the first request, without refit too: so
    # the weights are compared, and not the answers.
    model = models.make("llama", 4)
    options = {"extension": BROKEN, "pipeline_parallel_size": 2}
    with engine(model, **options) as llm, trainer() as one:
        vllm.refit_connect(llm, one.endpoint)
        for version in (1, 2):
            models.change(model, version)
            done = one.publish(named_weights(model), workers=2)
            assert vllm.refit_update(llm, timeout=WAIT_S) == done.result(WAIT_S) == version
        llm.collective_rpc("break_next_load", args=(1, 3))
        done = one.publish(named_weights(model), workers=2)
        with pytest.raises(Exception, match="no room after 3 tensors"):
            vllm.refit_update(llm, timeout=WAIT_S)
        assert done.exception(WAIT_S) is not None
        assert llm.collective_rpc("refit_version") == [0, 0]
        models.change(model, 3)
        done = one.publish(named_weights(model), 4, workers=2)
        assert vllm.refit_update(llm, 4, timeout=WAIT_S) == done.result(WAIT_S) == 4
        found = llm.collective_rpc("read_weights")
        assert set(found[0]).isdisjoint(found[1])
    with engine(model, **options) as other:
        assert other.collective_rpc("read_weights") == found


# ---- Quantized


def test_a_quantized_model_is_refused_by_its_method() -> None:
    with quantized(worker_extension_cls=EXTENSION) as llm:
        with pytest.raises(UnsupportedError, match=r"quantized \((?i:.*gptq.*)\)"):
            vllm.refit_connect(llm, NOWHERE)
        with pytest.raises(StateError, match="knows no trainer"):
            vllm.refit_update(llm, timeout=0)
