"""A share of the parameters is stepped on the CPU, and training has the same bits as without refit:
whatever the loop does, the optimizer, the shapes, the types, the groups and the share are."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import training
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_host_any_sequence import Ours, Player
from test_host_every_optimizer import same
from torch import nn

pytestmark = pytest.mark.usefixtures("default_device")

Kind = Callable[[Any], torch.optim.Optimizer]

KERNEL: dict[str, Kind] = {
    "Adam": lambda groups: torch.optim.Adam(groups, lr=1e-2),
    "Adam, all options": lambda groups: torch.optim.Adam(
        groups, lr=1e-2, amsgrad=True, maximize=True, weight_decay=0.1
    ),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "AdamW, all options": lambda groups: torch.optim.AdamW(
        groups, lr=1e-2, amsgrad=True, maximize=True, weight_decay=0.1, foreach=False
    ),
    "Adagrad": lambda groups: torch.optim.Adagrad(
        groups, lr=1e-2, lr_decay=0.01, weight_decay=0.1, initial_accumulator_value=0.1
    ),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-2),
    "SGD, momentum": lambda groups: torch.optim.SGD(
        groups, lr=1e-2, momentum=0.9, dampening=0.1, weight_decay=0.1, maximize=True
    ),
    "SGD, nesterov": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True),
}
"""Optimizers that the library steps with code of its own, where parameters are fp32."""

TORCH: dict[str, Kind] = {
    "AdamW, foreach": lambda groups: torch.optim.AdamW(groups, lr=1e-2, foreach=True),
    "AdamW, fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
    "Adam, rate in a tensor": lambda groups: torch.optim.Adam(groups, lr=torch.tensor(1e-2)),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3, centered=True, momentum=0.9),
    "NAdam": lambda groups: torch.optim.NAdam(groups, lr=1e-2),
    # With eps[0] None all of a group have the epsilon of the first one's type.
    "Adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-2, eps=(1e-8, 1e-3)),
}
"""Those that PyTorch steps on the host."""

KINDS = {**KERNEL, **TORCH}
SHAPES = [(), (1,), (2,), (7,), (64,), (300, 40), (40, 30), (9000,), (3, 3, 40), (70_001,)]
MIXED = [torch.float32, torch.float32, torch.bfloat16, torch.float64]


def _scale_gradient(parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(0.5)


class Trainer(Player):
    """A Player that also does what a training loop does with parameters, gradients and losses."""

    def __init__(self, kind: Kind, seed: int, shapes: Any, dtypes: Any) -> None:
        self.dtypes = iter(dtypes)
        super().__init__(kind, seed, shapes)
        self.late = self.parameters.pop()  # of a group that is added in the middle
        self.scaler = torch.amp.GradScaler(training.DEVICE.split(":")[0], init_scale=64.0)
        self.handles: list[Any] = []
        self.schedulers = [torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.7)]

    def made(self, shape: Any, source: torch.Generator) -> nn.Parameter:
        value = training.drawn(*shape, generator=source).to(next(self.dtypes))
        return nn.Parameter(value.t() if shape == (40, 30) else value)

    def groups(self) -> list[dict[str, Any]]:
        first, second, third = self.parameters[:2], self.parameters[2:-2], self.parameters[-2:-1]
        groups = [{"params": first}, {"params": second, "lr": 3e-3}, {"params": third}]
        return [group for group in groups if group["params"]]

    def loss(self, which: int) -> torch.Tensor | None:
        """Of the parameters whose bits are set; of those that are trained, at least one."""
        total = None
        trained = [one for one in self.parameters if one.requires_grad]
        for number, one in enumerate(trained):
            weight = training.drawn(*one.shape, generator=self.source).to(one.dtype)
            if (which >> number) & 1 or number == which % len(trained):
                term = (one * weight).sum().double() + one.double().pow(2).sum() * 0.01
                total = term if total is None else total + term
        return total

    def backward(self, which: int) -> None:
        loss = self.loss(which)
        if loss is not None:
            loss.backward()

    def accumulate(self, which: int) -> None:
        for micro_batch in range(1 + which % 3):
            self.backward(which >> micro_batch)

    def train(self, which: int) -> None:
        self.optimizer.zero_grad(set_to_none=bool(which & 1))
        self.accumulate(which)
        if which & 2:
            nn.utils.clip_grad_norm_(self.parameters, 0.5)
        self.optimizer.step()

    def closure(self, which: int) -> None:
        def closure() -> float:
            self.optimizer.zero_grad()
            self.backward(which)
            return float(which)

        assert self.optimizer.step(closure) == which

    def clip_norm(self, which: int) -> None:
        kind = float("inf") if which & 1 else 2.0
        nn.utils.clip_grad_norm_(self.parameters, 0.1, kind, foreach=bool(which & 2))

    def clip_values(self, _: int) -> None:
        if any(one.grad is not None for one in self.parameters):
            nn.utils.clip_grad_value_(self.parameters, 0.05)

    def scaled(self, which: int) -> None:
        """A step with a loss scale; one of four has a gradient that is infinite, and is skipped. A
        fused optimizer makes states in a step that is skipped, and refit makes none in it."""
        self.optimizer.zero_grad()
        loss = self.loss(which)
        if loss is None:
            return
        self.scaler.scale(loss).backward()
        having = [one for one in self.parameters if one.grad is not None]
        fused = self.optimizer.defaults.get("fused")
        if which & 3 == 3 and not (fused and set(having) - set(self.optimizer.state)):
            grad = having[which % len(having)].grad
            grad[(0,) * grad.dim()] = float("inf")
        if which & 4:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.parameters, 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def write_parameters(self, which: int) -> None:
        one = self.parameters[which % len(self.parameters)]
        if which & 8:
            one.data.mul_(0.9)
        elif which & 16:
            one.data = one.data * 0.8
        else:
            with torch.no_grad():
                one.add_(0.125)

    def write_gradients(self, which: int) -> None:
        for one in self.parameters[which % 2 :: 2]:
            if one.grad is None:
                continue
            if which & 8:
                one.grad.data.mul_(0.5)
            elif which & 16:
                one.grad.mul_(0.5)
            elif which & 32:
                one.grad = one.grad * 0.25
            else:
                one.grad.data = one.grad.data * 0.75

    def count(self, which: int) -> None:
        """The step counters of some parameters are written, as by a checkpoint of another run."""
        for state in [*self.optimizer.state.values()][which % 2 :: 2]:
            if "step" in state:
                state["step"].add_(which % 5)

    def assign(self, which: int) -> None:
        """Gradients that no backward pass accumulates."""
        loss = self.loss(which)
        having = [one for one in self.parameters if one.requires_grad]
        if loss is not None:
            found = torch.autograd.grad(loss, having, allow_unused=True)
            for one, grad in zip(having, found, strict=True):
                one.grad = grad

    def twice(self, which: int) -> None:
        """One graph, two backward passes, the second of which is a part of the first."""
        loss = self.loss(which)
        if loss is not None:
            loss.backward(retain_graph=True)
            some = [one for one in self.parameters if one.requires_grad][which % 2 :: 2]
            if some:
                loss.backward(inputs=some)

    def hook(self, which: int) -> None:
        """Hooks that change gradients, before and behind those of refit."""
        if self.handles:
            self.handles.pop().remove()
            return
        one = self.parameters[which % len(self.parameters)]
        if one.requires_grad and which & 8:
            self.handles.append(one.register_hook(lambda grad: grad * 0.5))
        elif one.requires_grad:
            scale = one.register_post_accumulate_grad_hook(_scale_gradient)
            self.handles.append(scale)

    def lose_gradients(self, which: int) -> None:
        self.parameters[which % len(self.parameters)].grad = None

    def freeze(self, which: int) -> None:
        for number, one in enumerate(self.parameters[1:]):
            one.requires_grad_(bool((which >> number) & 1))

    def schedule(self, which: int) -> None:
        if which & 1 and len(self.schedulers) < 3:
            rate = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)
            self.schedulers.append(rate)
        self.optimizer.step()
        for one in self.schedulers:
            one.step()

    def options(self, which: int) -> None:
        group = self.optimizer.param_groups[which % len(self.optimizer.param_groups)]
        if "betas" in group:
            group["betas"] = (0.8, 0.95)
        if "weight_decay" in group:
            group["weight_decay"] = 0.01 * (which % 4)

    def pickled(self, _: int) -> None:
        self.optimizer.load_state_dict(pickle.loads(pickle.dumps(self.optimizer.state_dict())))

    def load_its_own(self, _: int) -> None:
        self.optimizer.load_state_dict(self.optimizer.state_dict())

    def add_group(self, which: int) -> None:
        if not any(one is self.late for one in self.parameters):
            self.saved = None  # of the groups before
            self.schedulers = []
            self.parameters.append(self.late)
            self.optimizer.add_param_group({"params": [self.late], "lr": 1e-3 * (1 + which % 4)})


class Share(Ours):
    """What is done besides with the run of which the CPU steps a share, and changes nothing."""

    def checkpoint(self, _: int) -> None:
        with self.controller.checkpoint() as state:
            copy.deepcopy(state)

    def deepcopy(self, _: int) -> None:
        copied = copy.deepcopy(self.moved.optimizer)
        for group in copied.param_groups:
            for one in group["params"]:
                one.grad = torch.ones_like(one)
        copied.step()

    def resident(self, _: int) -> None:
        assert all(isinstance(name, str) for name, _ in self.controller.resident)
        assert all(isinstance(value, float) for value in self.controller.stats().values())


BOTH = (
    *("train", "train", "backward", "accumulate", "step", "closure", "scaled"),
    *("assign", "twice", "hook", "clip_norm", "clip_values", "clear_gradients", "lose_gradients"),
    *(
        "write",
        "drop",
        "save",
        "load",
        "pickled",
        "load_its_own",
        "rate",
        "schedule",
        "options",
        "count",
    ),
    *("write_parameters", "write_gradients", "freeze", "add_group"),
)
OURS = ("cycle", "checkpoint", "deepcopy", "read", "again", "refused", "resident")

VERBS = st.lists(st.tuples(st.sampled_from([*BOTH, *OURS]), st.integers(0, 127)), max_size=30)
ALIKE = [("clear_gradients", 1), ("backward", 127)]
"""How each of several steps begins: then gradients leave in the backward pass."""


@st.composite
def in_steps(draw: Any) -> list[tuple[str, int]]:
    """Steps that are alike, with something else between some backward passes and their steps."""
    verbs = [*ALIKE, ("step", 0)] * 2
    for _ in range(draw(st.integers(1, 6))):
        between = draw(VERBS)[: draw(st.sampled_from([0, 1, 1, 2, 3]))]
        verbs += [*ALIKE, *between, ("step", 0)]
    return verbs


@st.composite
def placed(draw: Any, share: float) -> dict[str, Any]:
    """Keywords of the controller by which the CPU steps this share."""
    said: dict[str, Any] = {
        "overlap": draw(st.booleans()),
        "host_pick": draw(st.sampled_from(["late", "largest"])),
        "host_step": draw(st.sampled_from(["auto", "auto", "torch"])),
    }
    if draw(st.sampled_from([True, True, False])):
        return {"states": "cycle", "host_fraction": share, **said}
    windows = {"states": "host", "window_bytes": "64KiB", "windows": 2, "cpu_fraction": share}
    return {**windows, **said, **draw(st.sampled_from([{}, {"host_fraction": 1.0}]))}


def assert_same(alone: Trainer, moved: Trainer, when: str = "") -> None:
    for number, (mine, theirs) in enumerate(zip(alone.parameters, moved.parameters, strict=True)):
        assert same(mine.detach(), theirs.detach()), f"parameter {number}{when}"
        assert (mine.grad is None) == (theirs.grad is None), f"gradient {number}{when}"
        assert mine.grad is None or same(mine.grad, theirs.grad), f"gradient {number}{when}"
        one, other = alone.optimizer.state.get(mine, {}), moved.optimizer.state.get(theirs, {})
        assert list(one) == list(other), f"states of parameter {number}{when}"
        for key in one:
            assert same(one[key], other[key]), f"{key} of parameter {number}{when}"
    said, told = alone.optimizer.state_dict(), moved.optimizer.state_dict()
    assert list(said["state"]) == list(told["state"]), when
    assert same(said, told), when


def compare(
    kind: Kind, options: dict[str, Any], shapes: Any, dtypes: Any, verbs: list[tuple[str, int]]
) -> None:
    """Plays the verbs in both runs."""
    alone, moved = (Trainer(kind, 5, shapes, dtypes) for _ in range(2))
    ours = Share(moved, options)
    try:
        for number, (verb, which) in enumerate(verbs):
            if verb in OURS:
                getattr(ours, verb)(which)
                continue
            for run in (alone, moved):
                with torch.set_grad_enabled(verb not in ("write", "drop")):
                    getattr(run, verb)(which)
            assert_same(alone, moved, f" behind verb {number}, {verb}")
        assert_same(alone, moved)
    finally:
        ours.controller.close()
    for run in (alone, moved):
        run.train(127)
    assert_same(alone, moved)


@pytest.mark.parametrize(
    ("name", "share"), [("AdamW", 0.0), *((name, share) for name in KINDS for share in (0.3, 1.0))]
)
@settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_training_has_the_same_bits(name: str, share: float, data: Any) -> None:
    shapes = data.draw(st.lists(st.sampled_from(SHAPES), min_size=4, max_size=7))
    mixes = "fused" not in name and data.draw(st.booleans())
    dtypes = [MIXED[number % len(MIXED)] if mixes else torch.float32 for number in range(8)]
    options = data.draw(placed(share))
    verbs = data.draw(in_steps() | VERBS)
    compare(KINDS[name], options, shapes, dtypes, verbs)
