"""A small transformer, built here, and the sampling from it. Knows nothing of training."""

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from .task import ANSWER_TOKENS, PROMPTS, VOCABULARY, prompts, rewards

CONTEXT = 4 + ANSWER_TOKENS
GROUP = 8  # answers to one prompt
GROUPS = 32  # prompts that one worker answers in a cycle
HEADS = 4


class Size(NamedTuple):
    """Of a policy: the elements of a hidden state (a multiple of HEADS), and the blocks."""

    width: int = 64
    layers: int = 2


class Block(nn.Module):
    """Attention to what came before, then a feed-forward layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = hidden.shape
        parts = self.qkv(self.attention_norm(hidden)).view(batch, tokens, 3, HEADS, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return hidden + self.down(functional.gelu(self.up(self.mlp_norm(hidden))))


class Policy(nn.Module):
    """Next-token logits; the embedding and the head are tied. With `critic` a value per token."""

    def __init__(self, size: Size, critic: bool = False):
        super().__init__()
        width = size.width
        self.embed = nn.Embedding(len(VOCABULARY), width)
        self.position = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(size.layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(VOCABULARY), bias=False)
        for embedding in (self.embed, self.position):  # what is said must not drown in where
            nn.init.normal_(embedding.weight, std=0.02)
        self.head.weight = self.embed.weight
        self.value = nn.Linear(width, 1) if critic else None

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """What both heads read."""
        hidden = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            hidden = block(hidden)
        return self.norm(hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(tokens))


class Batch(NamedTuple):
    """What one worker has sampled from one version of the weights."""

    version: int
    numbers: torch.Tensor  # which prompt, per answer
    tokens: torch.Tensor  # prompt and answer
    log_probs: torch.Tensor  # of the answer's tokens, when they were sampled
    rewards: torch.Tensor  # per token of the answer


@torch.no_grad()
def roll_out(policy: Policy, seed: int, version: int, worker: int) -> Batch:
    """GROUP answers to each of GROUPS prompts. The same numbers give the same batch, anywhere."""
    source = torch.Generator().manual_seed((seed * 1_000_003 + version) * 64 + worker)
    numbers = torch.randint(PROMPTS, (GROUPS,), generator=source).repeat_interleave(GROUP)
    tokens = prompts(numbers)
    log_probs = []
    for _ in range(ANSWER_TOKENS):
        ahead = functional.log_softmax(policy(tokens)[:, -1], dim=-1)
        chosen = torch.multinomial(ahead.exp(), 1, generator=source)
        log_probs.append(ahead.gather(1, chosen))
        tokens = torch.cat([tokens, chosen], dim=1)
    answers = tokens[:, -ANSWER_TOKENS:]
    earned = rewards(numbers, answers)
    return Batch(version, numbers, tokens, torch.cat(log_probs, dim=1), earned)
