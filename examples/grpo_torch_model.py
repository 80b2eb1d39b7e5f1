"""What grpo_torch.py trains, and how: the task, a small transformer, sampling, and the objectives
of GRPO and PPO. Nothing here is about refit.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

# ---- The task: "7+5=" is to be continued with "12" ----------------------------------------------

# Each digit that is right earns half of the reward, when it is said. It is verifiable, so no reward
# model is needed.

VOCABULARY = "0123456789+="
PROMPTS = 100
ANSWER_TOKENS = 2
REWARD_MOST = 1.0


def prompts(numbers: torch.Tensor) -> torch.Tensor:
    """The tokens of "a+b=" for prompts by number, 0 … 99."""
    plus = torch.full_like(numbers, VOCABULARY.index("+"))
    equals = torch.full_like(numbers, VOCABULARY.index("="))
    return torch.stack([numbers // 10, plus, numbers % 10, equals], dim=1)


def rewards(numbers: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """What each token of the answers earns; an answer earns from 0 to REWARD_MOST."""
    total = numbers // 10 + numbers % 10
    right = torch.stack([total // 10, total % 10], dim=1)
    return (answers == right).float() * (REWARD_MOST / ANSWER_TOKENS)


# ---- The policy, and sampling from it ------------------------------------------------------------

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


# ---- The objectives: GRPO with group-relative advantages, PPO with a value head ------------------

#     ratio = exp(log p_now(token) - log p_sampled(token))
#     loss  = -mean of min(ratio * A, clip(ratio, 1 - c, 1 + c) * A) - entropy bonus [+ value loss]

CLIP = 0.2
VALUE = 0.5
LAMBDA = 0.95


class Samples(NamedTuple):
    """One cycle's answers of all workers, with what each token's choice was worth."""

    tokens: torch.Tensor
    log_probs: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor | None
    values: torch.Tensor | None


def grpo_samples(batches: list[Batch]) -> Samples:
    """A token's advantage: how much better its answer fares from there on than the others to the
    same prompt, as process rewards are used in GRPO."""
    tokens, log_probs, rewards = _joined(batches)
    groups = rewards.view(-1, GROUP, ANSWER_TOKENS)
    spread = groups.std(dim=1, correction=0, keepdim=True)
    better = (groups - groups.mean(dim=1, keepdim=True)) / (spread + 1e-4)
    advantages = better.flip(2).cumsum(2).flip(2).view_as(rewards)
    return Samples(tokens, log_probs, advantages, None, None)


@torch.no_grad()
def ppo_samples(policy: Policy, batches: list[Batch]) -> Samples:
    """A token's advantage: generalized advantage estimation from the value head."""
    tokens, log_probs, rewards = _joined(batches)
    values = _values(policy, tokens)
    advantages = torch.zeros_like(values)
    later = ahead = torch.zeros_like(values[:, 0])
    for i in reversed(range(ANSWER_TOKENS)):
        later = rewards[:, i] + ahead - values[:, i] + LAMBDA * later
        advantages[:, i] = later
        ahead = values[:, i]
    returns = advantages + values
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-4)
    return Samples(tokens, log_probs, advantages, returns, values)


def shuffled(it: Samples, parts: int) -> Iterator[Samples]:
    """The samples in another order, in so many parts."""
    for chosen in torch.randperm(len(it.tokens)).chunk(parts):
        yield Samples(*(None if one is None else one[chosen] for one in it))


def objective(policy: Policy, it: Samples, bonus: float) -> torch.Tensor:
    """The loss over these samples; `bonus` is for entropy."""
    hidden = policy.hidden(it.tokens)[:, -ANSWER_TOKENS - 1 : -1]
    ahead = functional.log_softmax(policy.head(hidden), dim=-1)
    answers = it.tokens[:, -ANSWER_TOKENS:].unsqueeze(-1)
    ratio = torch.exp(ahead.gather(2, answers).squeeze(-1) - it.log_probs)
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    entropy = -(ahead.exp() * ahead).sum(dim=-1).mean()
    loss = -torch.min(ratio * it.advantages, clipped * it.advantages).mean() - bonus * entropy
    if policy.value is None or it.values is None or it.returns is None:
        return loss
    values = policy.value(hidden).squeeze(-1)
    near = it.values + (values - it.values).clamp(-CLIP, CLIP)
    worst = torch.max((values - it.returns) ** 2, (near - it.returns) ** 2)
    return loss + VALUE * worst.mean()


def _values(policy: Policy, tokens: torch.Tensor) -> torch.Tensor:
    if policy.value is None:
        raise ValueError("this policy was built without a critic")
    return policy.value(policy.hidden(tokens)[:, -ANSWER_TOKENS - 1 : -1]).squeeze(-1)


def _joined(batches: list[Batch]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = torch.cat([batch.tokens for batch in batches])
    log_probs = torch.cat([batch.log_probs for batch in batches])
    return tokens, log_probs, torch.cat([batch.rewards for batch in batches])
