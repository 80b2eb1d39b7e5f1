"""The task: add two digits. "7+5=" is to be continued with "12".

Each digit that is right earns half of the reward, when it is said. It is verifiable, so no reward
model is needed.
"""

import torch

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
