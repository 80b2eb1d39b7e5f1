"""Any sequence of what a training loop may do, on random optimizers, shapes, types and groups: with
every schedule, and without refit, the same to the bit after each step."""

import copy
import pickle
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import refit
import torch
import training
from device_space import ChangingSpace
from failures import FailingCall, finish_step
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from refit.errors import BusyError, CopyError, StateError
from schedules import CYCLE, Schedule, assert_alike, same
from torch import nn

pytestmark = pytest.mark.usefixtures("default_device")

Optimizer = torch.optim.Optimizer
Kind = Callable[[Any], Optimizer]

KINDS: dict[str, Kind] = {
    "Adam": lambda groups: torch.optim.Adam(groups, lr=1e-2),
    "Adam, all options": lambda groups: torch.optim.Adam(
        groups, lr=1e-2, amsgrad=True, maximize=True, weight_decay=0.1
    ),
    "Adam, rate in a tensor": lambda groups: torch.optim.Adam(groups, lr=torch.tensor(1e-2)),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "AdamW, all options": lambda groups: torch.optim.AdamW(
        groups, lr=1e-2, amsgrad=True, maximize=True, weight_decay=0.1, foreach=False
    ),
    "AdamW, foreach": lambda groups: torch.optim.AdamW(groups, lr=1e-2, foreach=True),
    "AdamW, fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
    "Adagrad": lambda groups: torch.optim.Adagrad(
        groups, lr=1e-2, lr_decay=0.01, weight_decay=0.1, initial_accumulator_value=0.1
    ),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-2),
    "SGD, momentum": lambda groups: torch.optim.SGD(
        groups, lr=1e-2, momentum=0.9, dampening=0.1, weight_decay=0.1, maximize=True
    ),
    "SGD, nesterov": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3, centered=True, momentum=0.9),
    "NAdam": lambda groups: torch.optim.NAdam(groups, lr=1e-2),
    # With eps[0] None all of a group have the epsilon of the first one's type.
    "Adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-2, eps=(1e-8, 1e-3)),
    "LBFGS": lambda groups: torch.optim.LBFGS(
        [one for group in groups for one in group["params"]], max_iter=2, history_size=2
    ),
}
SHAPES = [(), (1,), (2,), (7,), (64,), (300, 40), (40, 30), (9000,), (3, 3, 40), (70_001,)]
MIXED = [torch.float32, torch.float32, torch.bfloat16, torch.float64]

USES: dict[str, Callable[[Any, Any], Any]] = {
    "look": lambda t, _: (t.shape, t.dtype, t.stride(), t.requires_grad, len(t)),
    "read": lambda t, _: t.tolist(),
    "sum": lambda t, _: float(t.sum()),
    "norms": lambda t, other: [float(one) for one in torch._foreach_norm([t, other])],
    "compare": lambda t, other: bool((t.flatten()[0] < other.flatten()[-1]).item()),
    "copy": lambda t, _: copy.deepcopy(t).mul_(2).tolist(),
    "pickle": lambda t, _: pickle.loads(pickle.dumps(t)).tolist(),
    "numpy": lambda t, _: float((t if t.is_cpu else t.cpu()).float().numpy().sum()),
    "view": lambda t, _: t.detach().flatten()[1:].tolist(),
    "scale": lambda t, _: t.mul_(0.5) is t,
    "write one": lambda t, _: t.flatten().__setitem__(0, 0.125),
    "fill": lambda t, _: t.fill_(0.25) is t,
    "zero": lambda t, _: t.zero_() is t,
    "zero two": lambda t, other: torch._foreach_zero_([t, other]) and None,
    "lerp": lambda t, other: t.lerp_(torch.full_like(t, float(other.flatten()[0])), 0.5) is t,
    "out": lambda t, _: torch.add(t, 0.5, out=t) is t,
    "data": lambda t, _: t.data.add_(0.25) is None,
    "set data": lambda t, _: setattr(t, "data", t.clone()),
}
"""What a loop may do with a state or a gradient, wherever it is, and what it gets from that."""


def halve(parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(0.5)


class Trainer:
    """A run that does what it is told; two of the same seed are the same."""

    def __init__(self, kind: str, shapes: Any, dtypes: Any, seed: int = 5) -> None:
        self.source = torch.Generator().manual_seed(seed)
        self.draw = random.Random(seed)
        self.needs_closure = kind == "LBFGS"
        *self.every, self.late = [
            self.made(*one) for one in zip(shapes, dtypes, strict=False)
        ]  # the last is of a group that is added in the middle
        first, second, third = self.every[:2], self.every[2:-1], self.every[-1:]
        groups = [{"params": first}, {"params": second, "lr": 3e-3}, {"params": third}]
        self.optimizer = KINDS[kind]([one for one in groups if one["params"]])
        self.scaler = torch.amp.GradScaler(torch.device(training.DEVICE).type, init_scale=64.0)
        self.handles: list[Any] = []
        self.schedulers = [torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.7)]
        self.saved: Any = None

    def made(self, shape: Any, dtype: torch.dtype) -> nn.Parameter:
        value = training.drawn(*shape, generator=self.source).to(dtype)
        is_turned = shape == (40, 30) and not self.needs_closure
        return nn.Parameter(value.t() if is_turned else value)

    def parameters(self) -> list[Any]:
        return self.every

    def having(self) -> list[Any]:
        return [one for one in self.every if one.grad is not None]

    # ---- backward passes

    def loss(self, which: int) -> torch.Tensor | None:
        """Of the parameters whose bits are set; of those that are trained, at least one."""
        total = None
        trained = [one for one in self.every if one.requires_grad]
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

    def assign(self, which: int) -> None:
        """Gradients that no backward pass accumulates."""
        loss = self.loss(which)
        trained = [one for one in self.every if one.requires_grad]
        if loss is not None:
            found = torch.autograd.grad(loss, trained, allow_unused=True)
            for one, grad in zip(trained, found, strict=True):
                one.grad = grad

    def twice(self, which: int) -> None:
        """One graph, two backward passes, the second of which is a part of the first."""
        loss = self.loss(which)
        if loss is not None:
            loss.backward(retain_graph=True)
            some = [one for one in self.every if one.requires_grad][which % 2 :: 2]
            if some:
                loss.backward(inputs=some)

    # ---- steps

    def step(self, which: int) -> None:
        if self.needs_closure:
            self.closure(which)
        else:
            self.optimizer.step()

    def train(self, which: int) -> None:
        self.optimizer.zero_grad(set_to_none=bool(which & 1))
        self.accumulate(which)
        if which & 2:
            nn.utils.clip_grad_norm_(self.every, 0.5)
        self.step(which)

    def closure(self, which: int) -> None:
        def closure() -> float:
            self.optimizer.zero_grad()
            self.backward(which)
            return float(which)

        assert self.optimizer.step(closure) == which

    def scaled(self, which: int) -> None:
        """A step with a loss scale; one of four has a gradient that is infinite, and is skipped. A
        fused optimizer makes states in a step that is skipped, and refit makes none in it."""
        self.optimizer.zero_grad()
        loss = self.loss(which)
        if loss is None or self.needs_closure:
            return
        self.scaler.scale(loss).backward()
        having = self.having()
        fused = self.optimizer.defaults.get("fused")
        if which & 3 == 3 and not (fused and set(having) - set(self.optimizer.state)):
            grad = having[which % len(having)].grad
            grad[(0,) * grad.dim()] = float("inf")
        if which & 4:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.every, 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def schedule(self, which: int) -> None:
        if which & 1 and len(self.schedulers) < 3:
            rate = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)
            self.schedulers.append(rate)
        self.step(which)
        for one in self.schedulers:
            one.step()

    # ---- gradients and parameters

    def clear_gradients(self, which: int) -> None:
        self.optimizer.zero_grad(set_to_none=bool(which & 1))

    def clip_norm(self, which: int) -> Any:
        kind = float("inf") if which & 1 else 2.0
        return nn.utils.clip_grad_norm_(self.every, 0.1, kind, foreach=bool(which & 2))

    def clip_values(self, _: int) -> None:
        if self.having():
            nn.utils.clip_grad_value_(self.every, 0.05)

    def norm(self, _: int) -> Any:
        return nn.utils.get_total_norm([one.grad for one in self.having()])

    def write_gradients(self, which: int) -> None:
        for one in self.every[which % 2 :: 2]:
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

    def lose_gradients(self, which: int) -> None:
        self.every[which % len(self.every)].grad = None

    def hook(self, which: int) -> None:
        """Hooks that change gradients, before and after those of refit."""
        one = self.every[which % len(self.every)]
        if self.handles:
            self.handles.pop().remove()
        elif one.requires_grad and which & 8:
            self.handles.append(one.register_hook(lambda grad: grad * 0.5))
        elif one.requires_grad:
            self.handles.append(one.register_post_accumulate_grad_hook(halve))

    def freeze(self, which: int) -> None:
        for number, one in enumerate(self.every[1:]):
            one.requires_grad_(self.needs_closure or bool((which >> number) & 1))
            if not one.requires_grad:
                one.grad = None

    @torch.no_grad()
    def write_parameters(self, which: int) -> None:
        one = self.every[which % len(self.every)]
        if which & 8:
            one.data.mul_(0.9)
        elif which & 16:
            one.data = one.data * 0.8
        else:
            one.add_(0.125)

    # ---- states and groups

    def tensors(self, value: Any) -> list[torch.Tensor]:
        if isinstance(value, dict):
            value = [value[key] for key in sorted(value, key=str)]
        if isinstance(value, list | tuple):
            return [found for one in value for found in self.tensors(one)]
        return [value] if isinstance(value, torch.Tensor) and value.dim() > 0 else []

    @torch.no_grad()
    def use(self, tensors: list[torch.Tensor]) -> Any:
        """Something by chance, with two by chance; twins have the same luck."""
        way, one, other = self.draw.choice(sorted(USES)), *self.draw.choices(range(99), k=2)
        return tensors and USES[way](tensors[one % len(tensors)], tensors[other % len(tensors)])

    def use_states(self, _: int) -> Any:
        return self.use(self.tensors(list(self.optimizer.state.values())))

    def use_gradients(self, _: int) -> Any:
        return self.use([one.grad for one in self.having() if one.dim() > 0])

    @torch.no_grad()
    def write_states(self, which: int) -> None:
        for state in [*self.optimizer.state.values()][which % 3 :: 3]:
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim() > 0:
                    state[key] = value.mul_(0.5) if which & 8 else value * 0.75

    def count(self, which: int) -> None:
        """The step counters of some parameters are written, as by a checkpoint of another run."""
        for state in [*self.optimizer.state.values()][which % 2 :: 2]:
            if isinstance(state.get("step"), torch.Tensor):
                state["step"].add_(which % 5)

    def drop(self, which: int) -> None:
        for one in self.every[which % 2 :: 3]:
            if not self.needs_closure:
                self.optimizer.state.pop(one, None)

    def save(self, _: int) -> None:
        self.saved = copy.deepcopy(self.optimizer.state_dict())

    def load(self, _: int) -> None:
        if self.saved is not None:
            self.optimizer.load_state_dict(copy.deepcopy(self.saved))

    def pickled(self, _: int) -> None:
        self.optimizer.load_state_dict(pickle.loads(pickle.dumps(self.optimizer.state_dict())))

    def load_its_own(self, _: int) -> None:
        self.optimizer.load_state_dict(self.optimizer.state_dict())

    def rate(self, which: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 1.1 if which & 1 else 0.9

    def options(self, which: int) -> None:
        group = self.optimizer.param_groups[which % len(self.optimizer.param_groups)]
        if "betas" in group:
            group["betas"] = (0.8, 0.95)
        if "weight_decay" in group:
            group["weight_decay"] = 0.01 * (which % 4)

    def add_group(self, which: int) -> None:
        if self.late is not self.every[-1] and not self.needs_closure:
            self.saved = None  # of the groups before
            self.schedulers = []
            self.every.append(self.late)
            self.optimizer.add_param_group({"params": [self.late], "lr": 1e-3 * (1 + which % 4)})


BOTH = (
    *("train", "train", "backward", "accumulate", "assign", "twice", "step", "closure", "scaled"),
    *("schedule", "clear_gradients", "clip_norm", "clip_values", "norm", "write_gradients"),
    *("lose_gradients", "hook", "freeze", "write_parameters", "use_states", "use_gradients"),
    *("use_states", "use_gradients", "write_states", "count", "drop", "save", "load", "pickled"),
    *("load_its_own", "rate", "options", "add_group"),
)


class RefitActions:
    """Actions on the refit run only; they must change nothing."""

    def __init__(self, moved: Trainer, schedule: Schedule, options: dict[str, Any]) -> None:
        self.moved, self.schedule, self.given = moved, schedule, options
        self.controller = self.open()

    def open(self) -> refit.Controller:
        return self.schedule.open(self.moved.optimizer, **self.given)

    def clear(self, _: int) -> None:
        self.controller.offload()

    def restore(self, which: int) -> None:
        self.controller.restore(non_blocking=bool(which & 1))

    def unless_away(self, verb: Callable[[], None]) -> None:
        try:
            verb()
        except StateError:
            assert self.controller.state in ("cleared", "refitted")

    def join(self, _: int) -> None:
        self.unless_away(self.controller.wait)

    def release(self, _: int) -> None:
        self.unless_away(self.controller.release)

    def refit(self, which: int) -> None:
        with suppress(ZeroDivisionError), self.controller.refit():
            assert which & 1 or 1 / 0

    def checkpoint(self, _: int) -> None:
        with self.controller.checkpoint() as state:
            copy.deepcopy(state)
            if self.schedule.has_windows and self.moved.having():
                with pytest.raises(BusyError):
                    self.moved.optimizer.step()

    def deepcopy(self, _: int) -> None:
        copied = copy.deepcopy(self.moved.optimizer)
        for group in copied.param_groups:
            for one in group["params"]:
                one.grad = torch.ones_like(one)
        if not self.moved.needs_closure:
            copied.step()

    def look(self, _: int) -> None:
        assert all(isinstance(name, str) for name, _ in self.controller.resident)
        assert all(isinstance(value, float) for value in self.controller.stats().values())

    def again(self, _: int) -> None:
        self.controller.close()
        self.controller = self.open()

    def refused(self, _: int) -> None:
        with pytest.raises(BusyError):
            self.open()

    def fail_in_a_cycle(self, which: int) -> None:
        with FailingCall(1 + which % 12, CopyError("down")), suppress(CopyError):
            self.controller.offload()
            self.controller.restore(non_blocking=False)
        self.controller.restore()

    def failing_step(self, which: int) -> None:
        """A step that a copy breaks off, and that is finished; the other run makes a whole one."""
        try:
            with FailingCall(1 + which % 24, CopyError("down"), times=1 + which % 3):
                self.moved.optimizer.step()
        except CopyError as why:
            with suppress(CopyError):
                finish_step(self.controller, self.moved.optimizer, why)
            self.controller.resume_step()


OURS = (
    *("clear", "clear", "clear", "restore", "join", "release", "refit", "checkpoint", "deepcopy"),
    *("look", "again", "refused", "fail_in_a_cycle", "failing_step"),
)
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


def options_of(draw: Any, schedule: Schedule) -> dict[str, Any]:
    """Keywords of the controller."""
    if schedule is CYCLE:
        return {"use_pinned_optimizer_offload": draw(st.booleans())}
    said: dict[str, Any] = {}
    if schedule.has_windows:
        said["windows"] = draw(st.integers(1, 4))
        said["prefetch"] = draw(st.booleans())
    if schedule.has_share:
        said["overlap"] = draw(st.booleans())
        said["params"] = draw(st.sampled_from(["last", "largest"]))
        said["backend"] = draw(st.sampled_from(["auto", "auto", "torch"]))
        said["fraction"] = draw(st.sampled_from([0.0, 0.3, 0.3, 1.0, 1.0]))
    elif draw(st.booleans()):
        said["fraction"] = 0.6
    if schedule.has_windows and (schedule.has_share or "fraction" not in said):
        said["resident_bytes"] = draw(st.sampled_from([None, None, "auto"]))
    return said


def play(name: str, schedule: Schedule, draw: Any) -> None:
    """Plays verbs in a run without refit and in one with it."""
    shapes = draw(st.lists(st.sampled_from(SHAPES), min_size=4, max_size=7))
    mixes = "fused" not in name and name != "LBFGS" and draw(st.booleans())
    dtypes = [MIXED[number % len(MIXED)] if mixes else torch.float32 for number in range(8)]
    alone, moved = (Trainer(name, shapes, dtypes) for _ in range(2))
    options = options_of(draw, schedule)
    with ChangingSpace(draw(st.integers(0, 9))).patched():
        play_verbs(alone, moved, schedule, options, draw)


def play_verbs(
    alone: Trainer, moved: Trainer, schedule: Schedule, options: dict[str, Any], draw: Any
) -> None:
    actions = RefitActions(moved, schedule, options)
    try:
        for verb, which in draw(in_steps() | VERBS):
            if verb == "failing_step":
                if schedule is not CYCLE and not moved.needs_closure:
                    alone.optimizer.step()
                    actions.failing_step(which)
            elif verb in OURS:
                getattr(actions, verb)(which)
                continue
            else:
                assert same(*(getattr(run, verb)(which) for run in (alone, moved))), verb
            if which & 3 or schedule is not CYCLE:
                assert_alike(alone, moved)
        assert_alike(alone, moved)
    finally:
        actions.controller.close()
    for run in (alone, moved):
        run.train(127)
    assert_alike(alone, moved)


def examples(count: int) -> Any:
    checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    return settings(
        max_examples=count, deadline=None, derandomize=True, suppress_health_check=checks
    )


@examples(20)
@given(data=st.data())
def test_any_training_has_the_same_bits(schedule: Schedule, data: Any) -> None:
    kinds = [one for one in KINDS if one != "LBFGS" or schedule is CYCLE]
    play(data.draw(st.sampled_from(kinds)), schedule, data.draw)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
@examples(10)
@given(data=st.data())
def test_any_training_with_each_optimizer_has_the_same_bits(
    schedule: Schedule, name: str, data: Any
) -> None:
    if name != "LBFGS" or schedule is CYCLE:
        play(name, schedule, data.draw)


@example(verbs=["step", "clear", "step"])
@examples(10)
@given(verbs=st.lists(st.sampled_from(["clear", "restore", "step", "join"]), max_size=14))
def test_zeroed_gradients_are_zero_and_no_other_bit_changes(verbs: list[str]) -> None:
    alone, moved = (Trainer("AdamW", SHAPES[3:7], MIXED[:1] * 4) for _ in range(2))
    actions = RefitActions(moved, CYCLE, {"grads": "zero"})
    with actions.controller as controller:
        for verb in [*verbs, "clear", "restore"]:
            if verb == "step":
                for run in (alone, moved):
                    run.clear_gradients(0)
                    run.backward(127)
                    run.step(0)
            else:
                getattr(actions, verb)(0)
        controller.wait()
        assert not any(bool(one.grad.any()) for one in moved.having())
        alone.clear_gradients(0)
        assert_alike(alone, moved)
