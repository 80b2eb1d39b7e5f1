"""The objectives: GRPO with group-relative advantages, and PPO with a value head.

ratio = exp(log p_now(token) - log p_sampled(token))
loss  = -mean of min(ratio * A, clip(ratio, 1 - c, 1 + c) * A) - entropy bonus [+ value loss]
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.nn import functional

from .policy import GROUP, Batch, Policy
from .task import ANSWER_TOKENS

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
