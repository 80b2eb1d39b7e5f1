"""The schedules that a controller offers, and twins: training with one and without refit."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any

import refit
import torch
import training
from hooked import calls_refit
from refit.errors import StateError
from refit.states.offloaded_tensor import OffloadedTensor
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Schedule:
    """When the states of a controller's optimizers are on the device: its ``parts``."""

    name: str
    parts: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def open(self, optimizer: Any, model: Any = None, **options: Any) -> refit.Controller:
        """``options``: those of the controller, and of a part: the last that has a field of the
        name."""
        options = {**self.options, **options}
        parts = list(self.parts)
        for number, one in reversed(list(enumerate(parts))):
            own = {its.name for its in fields(one)} & options.keys()
            parts[number] = replace(one, **{name: options.pop(name) for name in own})
        return refit.Controller(optimizer, model, schedule=parts, **options)

    @property
    def has_windows(self) -> bool:
        return any(isinstance(one, refit.HostStates) for one in self.parts)

    @property
    def has_share(self) -> bool:
        return self.name in ("share", "both")


WIDE = refit.HostStates(window_bytes="64KiB", windows=2)
CYCLE = Schedule("cycle")
"""States leave between steps, and return."""
WINDOWS = Schedule("windows", (WIDE,))
"""States live on the host, and visit the device while the optimizer steps."""
SHARE = Schedule("share", (refit.CpuStep(fraction=0.95),))
"""The CPU steps some parameters, where their states live; the others' take part in the cycle."""
BOTH = Schedule("both", (WIDE, refit.CpuStep(fraction=0.5)))
"""The CPU steps some parameters; the others' states visit the device."""
SCHEDULES = (CYCLE, WINDOWS, SHARE, BOTH)


class Layers(training.Run):
    """Three weights, of which all but the first are larger than a window, and biases, whose states
    are small."""

    def __init__(self, make: training.Maker = training.adamw) -> None:
        super().__init__(make)
        first, last = nn.Linear(training.WIDTH, 96), nn.Linear(96, 96)
        layers = (first, nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), last)
        self.model = nn.Sequential(*layers).to(self.device)
        self.optimizer = make(self.model.parameters())

    def parameters(self) -> list[Any]:
        return [one for group in self.optimizer.param_groups for one in group["params"]]

    def gradients(self) -> list[torch.Tensor]:
        return [one.grad for one in self.parameters() if one.grad is not None]

    def loss(self) -> torch.Tensor:
        source = torch.Generator().manual_seed(self.steps)
        batch = training.drawn(8, training.WIDTH, generator=source)
        return self.model(batch.to(self.parameters()[0].dtype)).pow(2).mean()

    def backward(self) -> float:
        loss = self.loss()
        loss.backward()
        return float(loss.detach())


class Twins:
    """A run without refit and one with a schedule. A test does the same to both. They are alike at
    the end of the block, and after one more step, which both make without a controller."""

    def __init__(
        self,
        schedule: Schedule,
        make: training.Maker = training.adamw,
        *,
        run: Callable[[training.Maker], Any] = Layers,
        before: int = 0,
        **options: Any,
    ) -> None:
        self.alone, self.moved = run(make), run(make)
        self.step(before)
        self.open(schedule, **options)

    def __iter__(self) -> Iterator[Any]:
        yield self.alone
        yield self.moved

    def open(self, schedule: Schedule, **options: Any) -> None:
        """Another controller, once the one before is closed."""
        self.controller = schedule.open(self.moved.optimizer, self.moved.model, **options)
        step_like(self.alone.optimizer, self.controller, self.alone.model)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            # The one with refit first: its step may choose what the CPU steps.
            losses = [run.step() for run in (self.moved, self.alone)]
            assert repr(losses[0]) == repr(losses[1])

    def backward(self) -> None:
        for run in self:
            run.backward()

    def finish(self) -> None:
        for run in self:
            run.finish()

    def cycle(self) -> None:
        training.whole_cycle(self.controller)

    def assert_same(self) -> None:
        assert_alike(self.alone, self.moved)

    def __enter__(self) -> "Twins":
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is not None:
            return
        self.assert_same()
        self.controller.close()
        self.alone.step()
        assert not calls_refit(self.moved.step)
        self.assert_same()
        assert not any(map(lives_on_host, self.moved.moments()))


def step_like(
    optimizer: Any, controller: refit.Controller | None, model: torch.nn.Module | None = None
) -> None:
    """The CPU steps those parameters of ``optimizer`` that it steps for ``controller``, by
    PyTorch's own loop over them: what a GPU steps has other bits. On a CPU nothing changes."""
    optimizer.__class__ = getattr(type(optimizer), "stands_for", type(optimizer))
    if controller is None:
        return
    every = [one for group in optimizer.param_groups for one in group["params"]]
    if not stepped_by_cpu(controller) or every[0].device.type == "cpu":
        return
    kind = type(optimizer)
    plain = kind.step.__wrapped__  # without the hooks of a step
    reference = weakref.ref(controller)

    def chosen() -> set[Any]:
        followed = reference()
        if followed is None:
            return set()
        named = {} if model is None else dict(model.named_parameters())
        for number, group in enumerate(optimizer.param_groups):
            named.update({f"{number}.{at}": one for at, one in enumerate(group["params"])})
        try:
            return {named[name] for name in stepped_by_cpu(followed)}
        except StateError:  # it is closed
            return set()

    def step(self: Any, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups, on_cpu, known = self.param_groups, chosen(), list(self.state)
        whole = [group["params"] for group in groups]
        try:
            for by_cpu in (False, True):
                for group, its in zip(groups, whole, strict=True):
                    group["params"] = [one for one in its if (one in on_cpu) is by_cpu]
                known_to_kernels = kind in (
                    torch.optim.Adam,
                    torch.optim.AdamW,
                    torch.optim.Adagrad,
                )
                rounded = Roots() if by_cpu and known_to_kernels else nullcontext()
                with moved_to_cpu(self, on_cpu if by_cpu else set()), rounded:
                    plain(self)
        finally:
            for group, its in zip(groups, whole, strict=True):
                group["params"] = its
            order = dict.fromkeys([*known, *(one for its in whole for one in its)])
            states = {one: self.state.pop(one) for one in order if one in self.state}
            self.state.update(states)  # as one step over all would have made them
        return loss

    optimizer.__class__ = type(kind.__name__, (kind,), {"step": step, "stands_for": kind})
    optimizer._patch_step_function()


class Roots(TorchDispatchMode):
    """Square roots of fp32 are rounded to nearest, as the kernels round a GPU's: PyTorch's on a CPU
    are MKL's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        root = torch.ops.aten.sqrt.default
        if func is root and made.dtype == torch.float32:
            return func(args[0].double()).float()
        return made


@contextmanager
def moved_to_cpu(optimizer: Any, parameters: set[Any]) -> Iterator[None]:
    """These parameters, their gradients and states are on the CPU within the block."""
    before = [(one, one.data, one.grad) for one in parameters]
    if not before:
        yield
        return
    asked = [
        (group, {key: group[key] for key in ("capturable", "foreach", "fused") if key in group})
        for group in optimizer.param_groups
    ]
    scale, inf = (vars(optimizer).pop(key, None) for key in ("grad_scale", "found_inf"))
    counts_there = any(options.get("capturable") or options.get("fused") for _, options in asked)
    places: dict[Any, Any] = {}
    for one, _, grad in before:
        one.grad = None
        one.data = one.data.cpu()
        if grad is not None and not (inf is not None and bool(inf)):  # else no step
            one.grad = grad.cpu() if scale is None else grad.cpu() * (1 / float(scale))
        for key, value in optimizer.state.get(one, {}).items():
            if isinstance(value, torch.Tensor):
                places[one, key] = value.device
                optimizer.state[one][key] = value.cpu()
    for group, options in asked:
        group.update(dict.fromkeys(options, False))
    try:
        yield
    finally:
        for group, options in asked:
            group.update(options)
        given = {"grad_scale": scale, "found_inf": inf}
        vars(optimizer).update({key: one for key, one in given.items() if one is not None})
        for one, data, grad in before:
            one.grad, stepped = None, one.data
            one.data = data.copy_(stepped)
            one.grad = grad
            for key, value in optimizer.state.get(one, {}).items():
                if isinstance(value, torch.Tensor):
                    born = data.device if value.dim() > 0 or counts_there else value.device
                    optimizer.state[one][key] = value.to(places.get((one, key), born))


def assert_alike(one: Any, other: Any) -> None:
    """Weights, gradients, states and groups of two runs are equal to the bit."""
    for number, (mine, theirs) in enumerate(zip(one.parameters(), other.parameters(), strict=True)):
        assert same(mine.detach(), theirs.detach()), f"parameter {number}"
        assert same(mine.grad, theirs.grad), f"gradient {number}"
    said, told = one.optimizer.state_dict(), other.optimizer.state_dict()
    assert list(said["state"]) == list(told["state"])
    for number, state in said["state"].items():
        assert same(state, told["state"][number]), f"states of parameter {number}"
    assert same(said["param_groups"], told["param_groups"])


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal to the bit and have the same type. Tensors have the same dtype,
    shape and layout, too. NaN equals NaN."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
            return False
        if one.layout is not torch.strided:
            one, other = one.to_dense(), other.to_dense()
        one, other = one.cpu(), other.cpu()
        return torch.equal(one, other) or bool(((one == other) | (one != one)).all())
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def lives_on_host(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies over the image, whose memory PyTorch has not allocated."""
    return not tensor.untyped_storage().resizable()


def stepped_by_cpu(controller: refit.Controller) -> list[str]:
    """The names of the parameters that the CPU steps."""
    return [name for name, why in controller.resident if "the CPU steps it" in why]


def count_left(run: Any) -> int:
    """Counts the gradients that have left before the step."""
    return sum(isinstance(one, OffloadedTensor) for one in run.gradients())
