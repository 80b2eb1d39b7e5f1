"""What a recorded loader of a real model must do: the bytes of the loader itself, and no others."""

from collections.abc import Callable
from typing import Any

import torch

Weights = dict[str, torch.Tensor]


def bits_of(model: Any) -> dict[str, torch.Tensor]:
    """A copy of all parameters and buffers."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: one.detach().clone() for name, one in tensors.items()}


def is_same(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(_raw(tensor), _raw(other[name])) for name, tensor in one.items()
    )


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def version(weights: Weights, seed: int) -> Weights:
    """Other values of the same names, types and shapes."""
    source = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(one.shape, generator=source).to(one.dtype)
        for name, one in weights.items()
    }


def check(model: Any, load: Callable[[Any], Any], weights: Weights) -> dict[str, Any]:
    """Records the loader, and writes a version by its parts; what the recording has. The weights
    are loaded when it returns."""
    import refit
    from refit.weights.parts import write

    load(iter(version(weights, 1).items()))
    before = bits_of(model)
    parts = refit.record(load, weights, model)
    assert is_same(before, bits_of(model)), "recording has changed the model"
    other = version(weights, 2)
    load(iter(other.items()))
    expected = bits_of(model)
    load(iter(weights.items()))
    assert not is_same(expected, bits_of(model))
    write(parts.places(), other.__getitem__)
    assert is_same(expected, bits_of(model)), "the parts have other bytes than the loader"
    load(iter(weights.items()))
    return {
        "tensors": len(weights),
        "unused": list(parts.unused),
        "untouched": list(parts.untouched),
        "overlap": parts.overlap,
        "parts": len(parts),
        "rows": sum(len(part.shape) <= 2 for part in parts.parts),
        "converted": sum(part.source_dtype != part.target_dtype for part in parts.parts),
        "targets": sorted({part.target for part in parts.parts}),
    }
