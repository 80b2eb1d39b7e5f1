#!/usr/bin/env python3
"""A trainer and an inference engine take turns on one GPU, with a model of a size that people know.

The model has the shape of Qwen2.5-1.5B or 0.5B and random weights, so nothing is downloaded. The
engine is a process of its own. In each cycle

    refit      AdamW's states leave the GPU, and the engine switches to the new weights, which it
               reads in the trainer's memory
    generate   the engine takes all memory that is free for its KV cache, and gives it back
    restore    the states come back during the forward and backward pass
    step       waits for what is left of that

`train` and `serve` are the two ends to copy from. Without a GPU a tiny model runs on the CPU, which
shows the same calls and says nothing about speed.
"""

import argparse
import math
import multiprocessing
import signal
import textwrap
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import refit
import torch
from refit.errors import DeadlineError
from torch import nn
from torch.nn import functional

PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 16, 16, 48
CONTEXT = 1024  # tokens of a sequence, for the size of the KV cache
SHARE_OF_FREE = 0.8  # the engine leaves the rest to the trainer's forward pass
TIMEOUT_S = 600.0
END_S = 5.0
ROTARY_BASE = 1e6


class Size(NamedTuple):
    """Of a model; the names are those of Qwen2's configuration."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int

    @property
    def head(self) -> int:
        """Elements of an attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def cache_bytes(self) -> int:
        """Of the keys and values of one sequence, in bf16."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head * CONTEXT * 2


SIZES = {
    "qwen2.5-1.5b": Size(1536, 8960, 28, 12, 2, 151936),
    "qwen2.5-0.5b": Size(896, 4864, 24, 14, 2, 151936),
    "tiny": Size(64, 128, 2, 4, 2, 512),
}


# ---- The trainer's end ---------------------------------------------------------------------------


def train(options: argparse.Namespace) -> None:
    """The loop, with refit."""
    device = torch.device(options.device)
    torch.manual_seed(0)
    policy = make_model(options.model, device)
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=options.learning_rate, fused=options.device != "cpu"
    )
    with (
        refit.Publisher("user://*") as publisher,
        Engine(publisher.endpoint, options) as engine,
        refit.Controller(optimizer, policy) as controller,
    ):
        engine.await_subscriber(publisher)
        say_what_this_is(policy, options)
        for cycle in range(1, options.cycles + 1):
            engine.begin(cycle)
            started = time.perf_counter()
            with controller.refit(publisher=publisher) as tx:
                tx.send(refit.named_weights(policy))
            refitted = time.perf_counter() - started
            answers = engine.answers()
            controller.restore()
            started = time.perf_counter()
            rewards = update_policy(policy, optimizer, answers.tokens.to(device))
            synchronize(device)
            stepped = time.perf_counter() - started
            say(cycle, rewards, refitted, answers, stepped, controller.stats())
        say_the_end(controller.stats())


def update_policy(
    policy: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor
) -> float:
    """One step towards the answers that earned more than the others; what they earned on average.
    An answer earns the share of its tokens that are even."""
    answers = tokens[:, PROMPT_TOKENS:]
    earned = (answers % 2 == 0).float().mean(1)
    logits = policy(tokens[:, :-1])[:, PROMPT_TOKENS - 1 :]
    likely = -functional.cross_entropy(
        logits.float().flatten(0, 1), answers.flatten(), reduction="none"
    ).view_as(answers)
    loss = -((earned - earned.mean())[:, None] * likely).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()  # waits for what has not come back yet
    return float(earned.mean())


# ---- The engine's end ----------------------------------------------------------------------------


class Answers(NamedTuple):
    """What the engine sampled from one version, and the memory that it had meanwhile."""

    tokens: torch.Tensor
    version: int
    seconds: float
    free_bytes: int
    """Of the GPU, when the KV cache was taken."""
    sequences: int
    """That found room in the KV cache."""


def serve(endpoint: str, size: str, device: str, pipe: Connection) -> None:
    """An engine: takes each version, answers the prompts, and gives the memory back."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer ends it
    model = make_model(size, torch.device(device))
    with refit.Subscriber(endpoint, worker="engine") as subscriber:
        while (cycle := pipe.recv()) is not None:
            with subscriber.next(timeout=TIMEOUT_S) as update:
                update.load_into(model)
                version = update.version
            pipe.send(generate(model, SIZES[size], version, cycle))


@torch.inference_mode()
def generate(model: "Model", size: Size, version: int, seed: int) -> Answers:
    """Samples answers, with a KV cache as large as the memory allows."""
    device = model.embed_tokens.weight.device
    source = torch.Generator(device).manual_seed(seed)
    tokens = torch.randint(
        size.vocab_size, (PROMPTS, PROMPT_TOKENS), generator=source, device=device
    )
    free = free_bytes(device)
    sequences = max(PROMPTS, int(free * SHARE_OF_FREE / size.cache_bytes))
    started = time.perf_counter()
    cache = Cache(size, sequences, device)
    new = tokens
    for _ in range(ANSWER_TOKENS):
        logits = model(new, cache)[:, -1].float()
        new = torch.multinomial(logits.softmax(-1), 1, generator=source)
        tokens = torch.cat([tokens, new], 1)
    answered = tokens.cpu()
    seconds = time.perf_counter() - started
    del cache
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Answers(answered, version, seconds, free, sequences)


class Engine:
    """The engine's process, as the trainer sees it."""

    def __init__(self, endpoint: str, options: argparse.Namespace) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (endpoint, options.model, options.device, theirs)
        self._process = context.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def await_subscriber(self, publisher: refit.Publisher) -> None:
        """Until the engine has made its model and subscribed."""
        for _ in range(int(TIMEOUT_S)):
            with suppress(DeadlineError):
                publisher.wait_workers(1, 1.0)
                return
            if not self._process.is_alive():
                raise SystemExit("gpu_cycle: the engine has died; its last lines say why")
        raise SystemExit(f"gpu_cycle: the engine has not subscribed in {TIMEOUT_S:g} s")

    def begin(self, cycle: int) -> None:
        """Lets it wait for the next version."""
        self._pipe.send(cycle)

    def answers(self) -> Answers:
        """What it sampled."""
        try:
            answers: Answers = self._pipe.recv()
        except EOFError:
            raise SystemExit("gpu_cycle: the engine has died; its last lines say why") from None
        return answers

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: Any) -> None:
        with suppress(OSError):  # it may be gone
            self._pipe.send(None)
        self._process.join(END_S)
        self._process.terminate()  # one that waits for a version that does not come
        self._process.join()


# ---- The model: Qwen2's layers, in bf16 ----------------------------------------------------------


class Cache:
    """Keys and values of `sequences` sequences; the first PROMPTS of them are used."""

    def __init__(self, size: Size, sequences: int, device: torch.device) -> None:
        shape = (sequences, size.num_key_value_heads, CONTEXT, size.head)
        self.layers = [
            torch.empty(2, *shape, dtype=torch.bfloat16, device=device)
            for _ in range(size.num_hidden_layers)
        ]
        self.length = 0


class Layer(nn.Module):
    """Attention to what came before, with a group of heads for each key, then a gated MLP."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        width, narrow = size.hidden_size, size.num_key_value_heads * size.head
        self.input_layernorm = nn.RMSNorm(width)
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, narrow)
        self.v_proj = nn.Linear(width, narrow)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(width)
        self.gate_proj = nn.Linear(width, size.intermediate_size, bias=False)
        self.up_proj = nn.Linear(width, size.intermediate_size, bias=False)
        self.down_proj = nn.Linear(size.intermediate_size, width, bias=False)

    def forward(self, hidden: torch.Tensor, begin: int, cached: Any) -> torch.Tensor:
        rows, length, width = hidden.shape
        normed = self.input_layernorm(hidden)
        parts = (self.q_proj(normed), self.k_proj(normed), self.v_proj(normed))
        query, key, value = (
            one.view(rows, length, -1, self.size.head).transpose(1, 2) for one in parts
        )
        query, key = turned(query, begin), turned(key, begin)
        if cached is not None:
            end = begin + length
            cached[0, :rows, :, begin:end], cached[1, :rows, :, begin:end] = key, value
            key, value = cached[0, :rows, :, :end], cached[1, :rows, :, :end]
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=length > 1, enable_gqa=True
        )
        hidden = hidden + self.o_proj(mixed.transpose(1, 2).reshape(rows, length, width))
        normed = self.post_attention_layernorm(hidden)
        return hidden + self.down_proj(
            functional.silu(self.gate_proj(normed)) * self.up_proj(normed)
        )


class Model(nn.Module):
    """Logits of the next token; the head is the embedding."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(size.vocab_size, size.hidden_size)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.num_hidden_layers))
        self.norm = nn.RMSNorm(size.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)

    def forward(self, tokens: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        begin = 0 if cache is None else cache.length
        hidden = self.embed_tokens(tokens)
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, begin, None if cache is None else cache.layers[number])
        if cache is not None:
            cache.length += tokens.shape[1]
        return functional.linear(self.norm(hidden), self.embed_tokens.weight)


def turned(heads: torch.Tensor, begin: int) -> torch.Tensor:
    """Rotary positions from `begin` on."""
    length, half = heads.shape[2], heads.shape[3] // 2
    at = torch.arange(begin, begin + length, device=heads.device, dtype=torch.float32)
    by = torch.exp(torch.arange(half, device=heads.device) * (-math.log(ROTARY_BASE) / half))
    angle = torch.outer(at, by)
    cos, sin = angle.cos().to(heads.dtype), angle.sin().to(heads.dtype)
    one, other = heads[..., :half], heads[..., half:]
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)


def make_model(size: str, device: torch.device) -> Model:
    """In bf16, on the device."""
    with device:
        model = Model(SIZES[size]).to(torch.bfloat16)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the same in fp32
    return model


# ---- What is shown -------------------------------------------------------------------------------


LEGEND = """\
reward     share of even tokens in the answers
out        AdamW's states that left the GPU in the refit
refit      how long it took until they had left and the engine had the weights
free       memory of the GPU for the engine's KV cache, and how many sequences
           of 1,024 tokens have room there
engine     how long it generated
step       forward and backward pass and the optimizer's step; of these,
           waited: for states that had not returned yet
"""
HEADER = "cycle  reward  out MB  refit ms  free MB  sequences  engine s  step ms  waited"


def say_what_this_is(policy: nn.Module, options: argparse.Namespace) -> None:
    """Before the first cycle."""
    millions = sum(one.numel() for one in policy.parameters()) / 1e6
    where = options.device
    if where.startswith("cuda"):
        where = torch.cuda.get_device_name(torch.device(where))
    print(f"{options.model}: {millions:,.1f} million parameters in bf16 on {where}\n")
    print(f"{LEGEND}\n{HEADER}", flush=True)


def say(
    cycle: int, reward: float, refitted: float, answers: Answers, stepped: float, stats: Any
) -> None:
    """A cycle's line."""
    free, sequences = "-", "-"
    if answers.free_bytes > 0:
        free, sequences = f"{answers.free_bytes / 1e6:,.0f}", f"{answers.sequences:,}"
    print(
        f"{cycle:5d} {reward:7.3f} {stats['refit/offload_bytes'] / 1e6:7,.1f} "
        f"{refitted * 1e3:9.1f} {free:>8} {sequences:>10} {answers.seconds:9.2f} "
        f"{stepped * 1e3:8.1f} {stats['refit/restore_blocked_s'] * 1e3:7.1f}",
        flush=True,
    )


def say_the_end(stats: Any) -> None:
    """What the last cycle moved."""
    text = (
        f"In the last cycle {stats['refit/offload_bytes'] / 1e6:,.1f} MB of states left at "
        f"{stats['refit/offload_gbps']:.1f} GB/s and returned at "
        f"{stats['refit/restore_gbps']:.1f} GB/s, and the engine had "
        f"{stats['refit/publish_bytes'] / 1e6:,.1f} MB of weights after "
        f"{stats['refit/publish_s'] * 1e3:.1f} ms. The first two cycles are slower: they take the "
        "host memory and map the weights."
    )
    print(f"\n{textwrap.fill(text, 78)}")


def free_bytes(device: torch.device) -> int:
    """Of the GPU; 0 on a CPU, where nothing tells."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def synchronize(device: torch.device) -> None:
    """Waits for the GPU, so that times are of what was done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=SIZES, default="qwen2.5-1.5b" if gpu else "tiny")
    parser.add_argument("--device", default="cuda:0" if gpu else "cpu")
    parser.add_argument("--cycles", type=int, choices=range(1, 10001), default=6, metavar="N")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
