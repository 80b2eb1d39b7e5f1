"""Controller(states="host"): what a user may change between two steps, or what an optimizer holds
that no twin foresaw, ends with the bits of the same loop without refit."""

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import refit
import refit.twin
import torch
import training
from torch import nn
from training import assert_same_states, drawn

pytestmark = pytest.mark.usefixtures("default_device")

Optimizer = torch.optim.Optimizer
WIDTH = 128
WINDOW = "64KiB"
"""The states of a weight of WIDTH times WIDTH do not fit: it is stepped in parts."""


class Loop:
    """A model without and one with states on the host, to which the same is done."""

    def __init__(self, make: Callable[[Any], Optimizer], **options: Any) -> None:
        self.models = [self.model(), self.model()]
        self.optimizers = [make(model.parameters()) for model in self.models]
        options = {"window_bytes": WINDOW, **options}
        self.controller = refit.Controller(
            self.optimizers[1], self.models[1], states="host", **options
        )
        self.done = 0

    @staticmethod
    def model() -> nn.Module:
        torch.manual_seed(3)
        made = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        return made.to(training.DEVICE)

    def both(self, change: Callable[[nn.Module, Optimizer], Any]) -> None:
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            change(model, optimizer)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.both(self._backward)
            self.both(lambda _, optimizer: optimizer.step())
            self.both(lambda _, optimizer: optimizer.zero_grad())
            self.done += 1

    def _backward(self, model: nn.Module, _: Optimizer) -> None:
        torch.manual_seed(self.done)
        batch = drawn(8, WIDTH).to(next(model.parameters()).dtype)
        model(batch).pow(2).mean().backward()

    def assert_same(self) -> None:
        for one, other in zip(*(model.parameters() for model in self.models), strict=True):
            assert torch.equal(one, other)
        assert_same_states(*(optimizer.state_dict() for optimizer in self.optimizers))

    def finish(self) -> None:
        self.assert_same()
        self.controller.close()
        self.step()
        self.assert_same()


def adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def momentum(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


# ---- Groups of several kinds of parameters.


class Odd(nn.Parameter):
    """A parameter of a class that no foreach function of PyTorch takes."""

    __torch_function__ = torch._C._disabled_torch_function_impl


@pytest.mark.parametrize("make", [adamw, momentum, torch.optim.RMSprop])
@pytest.mark.parametrize("kinds", [(Odd, nn.Parameter), (nn.Parameter, nn.Parameter)])
def test_windows_are_stepped_as_the_whole_group_would_be(
    make: Callable[[Any], Optimizer], kinds: tuple[type, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By foreach only if that takes every parameter of the group that has a gradient."""
    monkeypatch.setattr(
        sys.modules["torch.optim.optimizer"],
        "_get_foreach_kernels_supported_devices",
        lambda: ["cuda", training.DEVICE],
    )
    seen: list[str] = []

    def stepped() -> list[str]:
        """By which code the parameters were stepped since the last call."""
        found = sorted(set(seen))
        seen.clear()
        return found

    name = type(make([nn.Parameter(drawn(2))])).__name__.lower().removesuffix("w")
    module = sys.modules[f"torch.optim.{name}"]
    for path in ("multi", "single"):
        function = f"_{path}_tensor_{name}"
        real = getattr(module, function)

        def watched(*args: Any, path: str = path, real: Any = real, **kwargs: Any) -> None:
            seen.append(path)
            real(*args, **kwargs)

        monkeypatch.setattr(module, function, watched)

    def group() -> list[nn.Parameter]:
        torch.manual_seed(5)
        return [
            kinds[number > 0](drawn(9000, generator=torch.Generator().manual_seed(number)))
            for number in range(4)
        ]

    runs = [group(), group()]
    optimizers = [make(parameters) for parameters in runs]
    with refit.Controller(optimizers[1], states="host", window_bytes=WINDOW):
        stepped()
        for number, idle in enumerate((None, None, 0, None)):
            for parameters, optimizer in zip(runs, optimizers, strict=True):
                source = torch.Generator().manual_seed(number)
                for at, one in enumerate(parameters):
                    one.grad = None if at == idle else drawn(9000, generator=source)
                optimizer.step()
                if optimizer is optimizers[0]:
                    expected = stepped()
                    assert expected == ["single" if Odd in kinds and idle is None else "multi"]
            assert stepped() == expected
            assert all(map(torch.equal, *runs))
        assert optimizers[1].param_groups[0]["foreach"] is None
        assert_same_states(*(optimizer.state_dict() for optimizer in optimizers))


# ---- States of another look.


@pytest.mark.parametrize("rate", [0.0, 0.9])
def test_an_optimizer_with_sparse_states(rate: float) -> None:
    def run(on_host: bool) -> tuple[torch.Tensor, list[int]]:
        torch.manual_seed(1)
        table = nn.Embedding(300, 64, sparse=True).to(training.DEVICE)
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1, momentum=rate)
        if on_host:
            controller = refit.Controller(optimizer, table, states="host", window_bytes=WINDOW)
        for number in range(4):
            torch.manual_seed(number)
            table(torch.randint(300, (9,)).to(training.DEVICE)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if on_host:
            controller.close()
        return table.weight.detach(), list(optimizer.state_dict()["state"])

    (alone, states), (moved, others) = run(False), run(True)
    assert torch.equal(alone, moved)
    assert states == others


class Apart(Optimizer):
    """Keeps one state beside its parameter, and one, of doubles, in the memory of the CPU."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["near"] = torch.zeros_like(p)
                    state["far"] = torch.zeros(p.shape, dtype=torch.float64, device="cpu")
                assert state["near"].device == p.device
                state["near"].lerp_(p.grad, 0.1)
                state["far"].add_(p.grad.to(state["far"]))
                p.sub_(state["near"] + state["far"].to(p), alpha=group["lr"])


def test_a_state_on_another_device_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    if training.DEVICE == "cpu":  # there is no other device with memory: doubles stand for it
        monkeypatch.setattr(refit.twin, "is_elsewhere", lambda one, _: one.dtype == torch.float64)
    loop = Loop(Apart)
    loop.step()
    weight = loop.optimizers[1].param_groups[0]["params"][0]
    state = loop.optimizers[1].state[weight]
    far = state["far"]
    loop.step(2)
    assert state["far"] is far
    assert far.device.type == "cpu"
    host = loop.controller._host
    assert host is not None
    assert host.owns(weight, "near", state["near"])
    assert not host.owns(weight, "far", far)
    assert ("0.weight.far", "the optimizer keeps it on cpu") in loop.controller.resident
    loop.assert_same()
    loop.both(lambda _, optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())))
    assert not host.owns(weight, "far", loop.optimizers[1].state[weight]["far"])
    loop.step(2)
    loop.controller.clear()
    loop.step()
    loop.finish()


def test_code_that_fails_behind_a_change_of_a_state_that_stays_is_torn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Failing(Apart):
        fails = False

        def step(self, closure: Any = None) -> None:
            if Failing.fails and any(p.dim() == 2 for p in self.param_groups[0]["params"]):
                for state in self.state.values():
                    state["far"].add_(1)
                raise ValueError("half way")
            super().step(closure)

    if training.DEVICE == "cpu":
        monkeypatch.setattr(refit.twin, "is_elsewhere", lambda one, _: one.dtype == torch.float64)
    loop = Loop(Failing)
    loop.step()
    Failing.fails = True
    loop._backward(loop.models[1], loop.optimizers[1])
    with pytest.raises(ValueError, match="half way") as seen:
        loop.optimizers[1].step()
    Failing.fails = False
    assert "0.weight" in seen.value.torn  # type: ignore[attr-defined]
    loop.controller.resume_step()
    assert "far" in loop.optimizers[1].state[loop.models[1][0].weight]


def test_a_state_that_is_none_is_made_anew() -> None:
    loop = Loop(momentum)
    loop.step(2)
    loop.both(lambda m, o: o.state[m[0].weight].update(momentum_buffer=None))
    loop.step(2)
    loop.finish()


def test_an_optimizer_without_states_makes_none() -> None:
    loop = Loop(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    loop.step(2)
    assert not loop.optimizers[1].state
    loop.finish()


# ---- What was foreseen, and changed.


def switched(name: str, value: Any) -> Callable[[nn.Module, Optimizer], None]:
    return lambda _, optimizer: optimizer.param_groups[0].update({name: value})


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (adamw, {"amsgrad": True}),
        (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
        (momentum, {"momentum": 0}),
    ],
    ids=["more", "two more", "fewer"],
)
def test_options_that_change_before_the_first_step(
    make: Callable[[Any], Optimizer], options: dict[str, Any]
) -> None:
    loop = Loop(make)
    for name, value in options.items():
        loop.both(switched(name, value))
    loop.step(3)
    loop.finish()


def test_a_model_that_gets_another_type_before_the_first_step() -> None:
    loop = Loop(adamw)
    whole = loop.controller._host.nbytes if loop.controller._host else 0
    loop.both(lambda model, _: model.to(torch.bfloat16))
    loop.step(3)
    assert loop.controller._host is not None
    assert loop.controller._host.nbytes == whole // 2  # the first image has gone
    loop.finish()


# ---- States that other code moves about.


def exchange_names(model: nn.Module, optimizer: Optimizer) -> None:
    state = optimizer.state[model[0].weight]
    state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"].abs_()


def exchange_values(model: nn.Module, optimizer: Optimizer) -> None:
    one, other = (optimizer.state[model[at].weight] for at in (0, 1))
    one["exp_avg"], other["exp_avg"] = other["exp_avg"], one["exp_avg"]


def exchange_parameters(model: nn.Module, optimizer: Optimizer) -> None:
    one, other = model[0].weight, model[1].weight
    optimizer.state[one], optimizer.state[other] = optimizer.state[other], optimizer.state[one]


@pytest.mark.parametrize("change", [exchange_names, exchange_values, exchange_parameters])
def test_states_that_change_places(change: Callable[[nn.Module, Optimizer], None]) -> None:
    loop = Loop(adamw)
    loop.step(2)
    loop.both(change)
    loop.step(2)
    loop.finish()


def test_a_parameter_of_two_optimizers() -> None:
    def run(on_host: bool, **options: Any) -> tuple[nn.Module, list[Any]]:
        model = Loop.model()
        pair = [adamw(model.parameters()), torch.optim.Adam(model.parameters(), lr=1e-3)]
        pair.append(momentum(model.parameters()))
        if on_host:
            controller = refit.Controller(
                pair, model, states="host", window_bytes=WINDOW, **options
            )
        for number in range(3):
            torch.manual_seed(number)
            model(drawn(8, WIDTH)).pow(2).mean().backward()
            for one in pair:
                one.step()
                one.zero_grad(set_to_none=one is pair[-1])
        states = [one.state_dict() for one in pair]
        if on_host:
            controller.close()
        return model, states

    alone, states = run(False)
    for options in ({}, {"resident_bytes": "200KiB"}):
        moved, others = run(True, **options)
        for one, other in zip(alone.parameters(), moved.parameters(), strict=True):
            assert torch.equal(one, other)
        for mine, theirs in zip(states, others, strict=True):
            assert_same_states(mine, theirs)


# ---- Modes of PyTorch.


def test_steps_in_inference_mode() -> None:
    loop = Loop(adamw)
    loop.step()
    for number in range(4):
        loop.both(loop._backward)
        with torch.inference_mode(number < 3):
            loop.both(lambda _, optimizer: optimizer.step())
        loop.both(lambda _, optimizer: optimizer.zero_grad())
    loop.finish()


def test_states_that_are_born_in_inference_mode() -> None:
    loop = Loop(momentum)
    for _ in range(3):
        loop.both(loop._backward)
        with torch.inference_mode():
            loop.both(lambda _, optimizer: optimizer.step())
        loop.both(lambda _, optimizer: optimizer.zero_grad())
    loop.assert_same()
    loop.optimizers[1].state[loop.models[1][0].weight]["momentum_buffer"].zero_()
    loop.controller.close()


def test_another_default_device() -> None:
    with torch.device("meta"):  # as torch.set_default_device("cuda") on a GPU
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
        model = nn.Sequential(*layers).to_empty(device=training.DEVICE)
    with torch.no_grad():
        for one in model.parameters():
            one.fill_(1)
    optimizer = momentum(model.parameters())
    with torch.device("meta"):
        controller = refit.Controller(optimizer, model, states="host", window_bytes=WINDOW)
        for one in model.parameters():
            one.grad = torch.ones_like(one)
        for _ in range(2):
            optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
        state = optimizer.state[model[0].weight]["momentum_buffer"]
        assert state.is_cpu
        assert torch.equal(state, torch.full_like(state, 1 + 0.9 + 0.81))
        controller.close()


# ---- Broken states.


def test_a_load_that_leaves_none_as_a_state() -> None:
    loop = Loop(momentum)
    loop.step()
    optimizer = loop.optimizers[1]
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": {0: None}, "param_groups": groups})
    loop.controller.close()
    with pytest.raises((AttributeError, TypeError, ValueError)):
        optimizer.load_state_dict({"state": None, "param_groups": groups})
