"""What a rank of a sharded model holds, to compare one training with another bit for bit."""

from typing import Any

import torch


def local(one: torch.Tensor) -> torch.Tensor:
    """A copy of this rank's part of a tensor, which is all of it where it is not a DTensor."""
    return getattr(one, "_local_tensor", one).detach().clone()


def bits(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Copies of this rank's shards of all weights and states.

    state_dict() brings states back that are away.
    """
    found = {name: local(one) for name, one in model.named_parameters()}
    for number, state in optimizer.state_dict()["state"].items():
        found |= {f"{number}.{name}": local(one) for name, one in state.items()}
    return found


def differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """The names of what is not the same in both, which have the same names."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]
