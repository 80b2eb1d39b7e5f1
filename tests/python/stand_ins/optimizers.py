"""An optimizer of PyTorch with one parameter, for frameworks to move."""

from typing import Any

import torch


def adamw(**options: Any) -> torch.optim.Optimizer:
    torch.manual_seed(3)
    return torch.optim.AdamW([torch.nn.Parameter(torch.randn(64, 8))], lr=0.1, **options)


def stepped(**options: Any) -> torch.optim.Optimizer:
    """One that has its states."""
    optimizer = adamw(**options)
    step(optimizer)
    return optimizer


def step(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [one["exp_avg"] for one in optimizer.state.values()]


def is_away(what: Any) -> bool:
    """Whether an optimizer has moments, or a list tensors, and all are without memory."""
    tensors = what if isinstance(what, list) else moments(what)
    return bool(tensors) and all(one.untyped_storage().nbytes() == 0 for one in tensors)


def assert_same_states(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    for mine, theirs in zip(one.state.values(), other.state.values(), strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
