"""How long what autograd saves is held, and by whom; and storages that several layers save, and
that are changed in place in between: what returns has the bytes that PyTorch would have."""

import contextlib
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

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


@pytest.mark.parametrize("where", CHANGED)
def test_a_group_that_is_changed_while_it_leaves_is_over_behind_the_backward(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first pass learns what others hold, so that later ones have groups of one storage."""
    model = Stages(*CHANGED[where])
    wanted = gradient(model)
    offload = refit.ActivationOffload(
        model, model.layers, host_bytes="1MiB", min_bytes=1, keep_last=0, in_flight=3, aim="memory"
    ).attach()

    def has_left(number: int) -> bool:
        offload._arena.wait(number, 60_000)
        return True

    with contextlib.closing(offload):
        for is_still in (has_left, lambda number: False, has_left):
            monkeypatch.setattr(offload._arena, "is_still", is_still)
            assert torch.equal(gradient(model), wanted)
            stats = offload.stats()
            assert stats["refit/activation_groups"] == 0
            assert stats["refit/activation_used_bytes"] == 0
        assert stats["refit/activation_out_bytes_total"] > 0


class Chain(nn.Module):
    """Layers that save what they compute; ``behind`` comes after the last one."""

    def __init__(self, count: int, behind: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(count)
        )
        self.behind = behind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.behind(x)


class Probe(torch.autograd.Function):
    """Calls a function once the backward pass comes by."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, called: Callable[[], None]) -> torch.Tensor:
        ctx.called = called
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.called()
        return grad, None


def test_what_is_saved_behind_the_last_layer_goes_with_its_own_backward_pass() -> None:
    """The logits are the largest of all, and nothing but autograd needs them by then."""
    held: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def behind(h: torch.Tensor) -> torch.Tensor:
        h = Probe.apply(h, lambda: alive.append(sum(one() is not None for one in held)))
        logits = h.exp()
        held.append(weakref.ref(logits.untyped_storage()))
        return logits.sum()

    model = Chain(4, behind)
    with contextlib.closing(
        refit.ActivationOffload(model, model.layers, host_bytes="1MiB", min_bytes=1, aim="memory")
    ) as offload:
        with offload:
            loss = model(torch.randn(64, 16))
        assert held[0]() is not None
        loss.backward()
        assert offload.stats()["refit/activation_in_bytes_total"] > 0
    assert alive == [0]


def test_groups_that_are_asked_for_while_they_leave_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Copies that take longer than the forward pass: each group is cancelled, none is released."""
    model = Chain(3, torch.sum)
    offload = refit.ActivationOffload(
        model, model.layers, host_bytes="1MiB", min_bytes=1, in_flight=3, aim="memory"
    )
    monkeypatch.setattr(type(offload._arena), "is_still", lambda *_: False)
    counts = []
    for _ in range(20):
        with offload:
            loss = model(torch.randn(64, 16))
        loss.backward()
        del loss
        counts.append(len(offload._groups))
    assert counts == counts[:1] * 20
    monkeypatch.undo()
    assert offload.stats()["refit/activation_groups"] == 0
    offload.close()


def test_a_forward_pass_that_ctrl_c_ended_leaves_nothing_in_the_arena() -> None:
    """Modules call no hook behind KeyboardInterrupt; what others held meanwhile is let go, too."""
    kept: list[torch.Tensor] = []
    ends: list[bool] = [True, False]

    def behind(h: torch.Tensor) -> torch.Tensor:
        if ends and ends.pop(0):
            raise KeyboardInterrupt
        return h.sum()

    model = Chain(4, behind)
    model.layers[1].register_forward_hook(lambda _, __, h: kept.append(h.sin()) or kept.append(h))
    offload = refit.ActivationOffload(
        model, model.layers, host_bytes="1MiB", min_bytes=1, keep_last=0, aim="memory"
    ).attach()
    with contextlib.closing(offload):
        with pytest.raises(KeyboardInterrupt):
            model(torch.randn(64, 16))
        kept.clear()
        for _ in range(2):
            model(torch.randn(64, 16)).backward()
            kept.clear()
        gc.collect()
        assert offload.stats()["refit/activation_groups"] == 0
        assert offload.stats()["refit/activation_used_bytes"] == 0


def test_ctrl_c_while_a_graph_is_freed_is_neither_lost_nor_loses_room() -> None:
    """What is raised in ``__del__`` is printed and gone, so a storage's end must run no code."""
    model = Chain(6, torch.sum)
    offload = refit.ActivationOffload(
        model, model.layers, host_bytes="1MiB", min_bytes=1, keep_last=0, aim="memory"
    )
    with contextlib.closing(offload):
        with offload:
            loss = model(torch.randn(64, 16))
        assert offload.stats()["refit/activation_groups"] == 6
        calls: list[str] = []

        def follow(frame: Any, event: str, _: Any) -> None:
            if event == "call":
                calls.append(f"{frame.f_code.co_filename}: {frame.f_code.co_name}")

        sys.setprofile(follow)
        try:
            del loss
        finally:
            sys.setprofile(None)
        assert calls == []
        assert offload.stats()["refit/activation_groups"] == 0


def test_a_forward_pass_of_another_thread_leaves_the_attached_one_alone() -> None:
    """A rollout without gradients, in the middle of a training step."""
    runs = [True]

    def behind(h: torch.Tensor) -> torch.Tensor:
        if runs and runs.pop():
            thread = threading.Thread(target=torch.no_grad()(model), args=(torch.randn(64, 16),))
            thread.start()
            thread.join()
        return h.sum()

    model = Chain(4, behind)
    offload = refit.ActivationOffload(
        model, model.layers, host_bytes="1MiB", min_bytes=1, aim="memory"
    ).attach()
    with contextlib.closing(offload):
        model(torch.randn(64, 16)).backward()
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        assert offload.stats()["refit/activation_left_bytes_last"] > 0


def test_a_group_for_which_there_is_no_room_is_given_back_at_once() -> None:
    model = Chain(4, torch.sum)
    offload = refit.ActivationOffload(
        model, model.layers, host_bytes=512, min_bytes=1, in_flight=4, aim="memory"
    )
    with contextlib.closing(offload):
        with offload:
            loss = model(torch.randn(64, 16))
            assert offload.stats()["refit/activation_groups"] == 0
        del loss
