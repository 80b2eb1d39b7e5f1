"""Storages that several layers save, and that are changed in place in between: what returns has the
bytes that PyTorch would have, or PyTorch's error is raised."""

import contextlib
from collections.abc import Callable

import pytest
import refit
import torch
from torch import nn

Pair = tuple[torch.Tensor, torch.Tensor]


class Stage(nn.Module):
    """A layer that is one function."""

    def __init__(self, function: Callable[..., Pair]) -> None:
        super().__init__()
        self.function = function

    def forward(self, given: Pair) -> Pair:
        return self.function(*given)


class Stages(nn.Module):
    def __init__(self, *functions: Callable[..., Pair]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1.0, 2.0, 8))
        self.layers = nn.ModuleList(Stage(one) for one in functions)

    def forward(self, x: torch.Tensor) -> Pair:
        given = (x * self.weight, x)
        for layer in self.layers:
            given = layer(given)
        return given


def gradient(model: Stages) -> torch.Tensor:
    """Of the first output; the second one lives until then."""
    model.zero_grad()
    first, second = model(torch.linspace(0.0, 1.0, 8192).reshape(1024, 8))
    first.sum().backward()
    del second
    assert model.weight.grad is not None
    return model.weight.grad.clone()


def rest(first: torch.Tensor, second: torch.Tensor) -> Pair:
    return first * 2, second


CHANGED = {
    # The sine is held and never asked for; the cosine is.
    "in the next layer": (
        lambda y, _: (y, y.sin()),
        lambda y, aside: (y.add_(1.0).cos(), aside),
        rest,
        rest,
    ),
    "behind a layer that saved it too": (
        lambda y, _: (y, y.sin()),
        lambda y, aside: (y, aside + y.sin()),
        lambda y, aside: (y.add_(1.0).cos(), aside),
        rest,
    ),
    "between two saves of the next layer": (
        lambda y, _: (y, y.sin()),
        lambda y, aside: (y, aside + y.sin() + y.add_(1.0).cos() * 0),
        lambda y, aside: (y.cos(), aside),
        rest,
    ),
    "before the first layer ends, and behind it": (
        lambda y, _: (y, y.sin() + y.add_(1.0).tan() * 0),
        lambda y, aside: (y.mul_(0.5).cos(), aside),
        rest,
        rest,
    ),
    "in another part with a version of its own": (
        lambda y, _: (lambda a, b: (a.sin(), b))(*(y * 1.0).unsafe_chunk(2)),
        lambda a, b: (a + b.add_(1.0).cos(), a),
        rest,
        rest,
    ),
}


@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("where", CHANGED)
def test_a_storage_that_is_changed_between_two_layers_that_save_it(
    where: str, in_flight: int
) -> None:
    model = Stages(*CHANGED[where])
    wanted = gradient(model)
    offload = refit.ActivationOffload(
        model,
        model.layers,
        host_bytes="1MiB",
        min_bytes=1,
        keep_last=0,
        in_flight=in_flight,
        aim="memory",
    ).attach()
    with contextlib.closing(offload):
        for _ in range(3):
            assert torch.equal(gradient(model), wanted)
        assert offload.stats()["refit/activation_out_bytes_total"] > 0
        assert offload.stats()["refit/activation_groups"] == 0
