"""Every optimizer of torch.optim, and others that are installed, with its states on the host:
weights and states are those of a step without refit, to the bit, whatever the groups, the shapes,
the types, the options and the windows are."""

import importlib
import inspect
import random
from collections.abc import Callable
from typing import Any

import pytest
import refit
import torch
import training

pytestmark = pytest.mark.usefixtures("default_device")

STEPS = 6

SINGLE: dict[str, dict[str, Any]] = {
    "Adadelta": {},
    "Adafactor": {},
    "Adagrad": {},
    "Adam": {},
    "AdamW": {},
    "Adamax": {},
    "ASGD": {"t0": 2},
    "Muon": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "SparseAdam": {},
}
"""Each optimizer that steps parameters one by one, with options that make it keep all it can."""

SWITCHES = ("foreach", "fused", "maximize", "amsgrad", "differentiable", "decoupled_weight_decay")
if torch.cuda.is_available():
    SWITCHES += ("capturable",)
NUMBERS = {"weight_decay": 0.1}


def ways_of(kind: Any, options: dict[str, Any]) -> list[dict[str, Any]]:
    takes = set(inspect.signature(kind).parameters) - set(options)
    ways: list[dict[str, Any]] = [{}]
    ways += [{name: True} for name in SWITCHES if name in takes and name != "differentiable"]
    ways += [{name: value} for name, value in NUMBERS.items() if name in takes]
    if {"fused", "amsgrad"} <= takes:
        ways.append({"fused": True, "amsgrad": True, "weight_decay": 0.1})
    if {"foreach", "maximize"} <= takes:
        decay = NUMBERS if "weight_decay" in takes else {}
        ways.append({"foreach": True, "maximize": True, **decay})
    return ways


def variants() -> list[Any]:
    found = []
    for name, options in SINGLE.items():
        kind = getattr(torch.optim, name, None)
        if kind is None:
            continue
        for way in ways_of(kind, options):
            title = "-".join([name, *(f"{key}={value}" for key, value in way.items())])
            found.append(pytest.param(kind, {**options, **way}, id=title))
    return found


THIRD = {
    "lion_pytorch": ["Lion"],
    "torchao.optim": ["_AdamW"],
    "bitsandbytes.optim": ["Adam32bit", "Lion32bit", "RMSprop32bit"],
    "pytorch_optimizer": [
        *("AdamC", "AdamP", "Adan", "Amos", "CAME", "DiffGrad", "Grams", "GrokFastAdamW", "Kate"),
        *("LARS", "LaProp", "Lamb", "Lion", "NovoGrad", "PNM", "QHAdam", "Ranger", "SGDP", "SM3"),
        *("SOAP", "Shampoo", "SignSGD", "StableAdamW", "Tiger", "Yogi"),
    ],
    "transformers.optimization": ["Adafactor"],
}


def third_party() -> list[Any]:
    return [pytest.param(pkg, name, id=f"{pkg}-{name}") for pkg in THIRD for name in THIRD[pkg]]


class Drawn:
    """Parameters, groups and gradients, drawn by a seed; two of the same seed are the same."""

    def __init__(self, kind: Any, options: dict[str, Any], seed: int, plain: bool = False) -> None:
        self.sparse = kind.__name__ == "SparseAdam"
        self.draw = random.Random(seed)
        self.source = torch.Generator().manual_seed(seed)
        matrices = kind.__name__ in ("Muon", "SparseAdam") or plain
        dtypes = [torch.float32]
        if not matrices and not options.get("fused"):
            dtypes += [torch.float64, torch.bfloat16]
        self.parameters = [
            self.parameter(self.draw.choice(dtypes), matrices)
            for _ in range(self.draw.randint(4, 9))
        ]
        cut = self.draw.randint(1, len(self.parameters) - 2)
        groups = [
            {"params": self.parameters[:cut]},
            {"params": self.parameters[cut:-1], "lr": 0.03},
        ]
        self.optimizer = kind(groups, **options)
        self.done = 0

    def shape(self, matrices: bool) -> list[int]:
        dims = 2 if matrices else self.draw.choice([0, 1, 1, 2, 2, 3, 4])
        most = {0: 1, 1: 9000, 2: 90, 3: 20, 4: 9}[dims]
        return [self.draw.choice([1, self.draw.randint(2, most)]) for _ in range(dims)]

    def parameter(self, dtype: torch.dtype, matrices: bool) -> torch.Tensor:
        shape = [max(2, one) for one in self.shape(True)] if matrices else self.shape(False)
        made = training.drawn(*shape, generator=self.source).to(dtype)
        if len(shape) > 1 and self.draw.random() < 0.3:
            made = made.transpose(0, 1)
        if len(shape) == 4 and self.draw.random() < 0.5:
            made = made.contiguous(memory_format=torch.channels_last)
        return torch.nn.Parameter(made)

    def place_of(self, parameter: torch.Tensor) -> int:
        return next(at for at, one in enumerate(self.parameters) if one is parameter)

    def step(self) -> None:
        if self.done == 2:
            self.optimizer.add_param_group({"params": self.parameters[-1:], "lr": 0.02})
        for one in self.parameters:
            one.grad = None
            if self.draw.random() < 0.75 or self.done == 4:
                grad = training.drawn(*one.shape, generator=self.source).to(one.dtype)
                grad = torch.empty_like(one).copy_(grad)
                one.grad = grad.detach().to_sparse(1) if self.sparse else grad.detach()
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * 0.9
        self.optimizer.step()
        self.done += 1


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor) or one.dtype != other.dtype:
            return False
        if one.shape != other.shape or one.layout != other.layout:
            return False
        one, other = one.cpu(), other.cpu()
        return torch.equal(one, other) or bool(((one == other) | (one != one)).all())
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def assert_same(alone: Drawn, moved: Drawn) -> None:
    for mine, theirs in zip(alone.parameters, moved.parameters, strict=True):
        assert same(mine.detach(), theirs.detach())
    for mine, theirs in zip(alone.parameters, moved.parameters, strict=True):
        one, other = alone.optimizer.state.get(mine, {}), moved.optimizer.state.get(theirs, {})
        assert list(one) == list(other)
        for key in one:
            assert same(one[key], other[key]), key
    orders = [list(map(run.place_of, run.optimizer.state)) for run in (alone, moved)]
    assert orders[0] == orders[1]
    groups = [
        [{k: v for k, v in group.items() if k != "params"} for group in run.optimizer.param_groups]
        for run in (alone, moved)
    ]
    assert same(groups[0], groups[1])


def compare(make: Callable[[], Drawn], window_bytes: Any, windows: int, prefetch: bool) -> None:
    try:
        alone = make()
        for _ in range(STEPS + 1):
            alone.step()
        alone = make()
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as why:
        pytest.skip(f"the optimizer itself: {why}")
    moved = make()
    controller = refit.Controller(
        moved.optimizer,
        states="host",
        window_bytes=window_bytes,
        windows=windows,
        prefetch=prefetch,
    )
    with controller:
        for number in range(STEPS):
            alone.step()
            moved.step()
            if number % 2:
                assert_same(alone, moved)
        assert_same(alone, moved)
        kept = [
            value
            for state in moved.optimizer.state.values()
            for key, value in state.items()
            if controller._host is not None and controller._host._moves(moved.optimizer, key, value)
        ]
        for value in kept:
            assert value.is_cpu
            assert value.untyped_storage().data_ptr() not in {
                p.untyped_storage().data_ptr() for p in moved.parameters
            }
    alone.step()
    moved.step()
    assert_same(alone, moved)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("kind", "options"), variants())
def test_an_optimizer_ends_with_the_bits_of_a_step_without_refit(
    kind: Any, options: dict[str, Any], seed: int
) -> None:
    window_bytes = ["64KiB", "1MiB"][seed % 2]
    compare(lambda: Drawn(kind, options, seed), window_bytes, 1 + seed % 4, bool(seed % 2))


@pytest.mark.parametrize(("package", "name"), third_party())
def test_an_optimizer_of_another_package_ends_with_the_same_bits(package: str, name: str) -> None:
    kind = getattr(pytest.importorskip(package), name, None)
    if kind is None:
        pytest.skip(f"{package} has no {name}")
    options = {"relative_step": False, "scale_parameter": False} if name == "Adafactor" else {}
    if "lr" in inspect.signature(kind).parameters:
        options["lr"] = 1e-3
    compare(lambda: Drawn(kind, options, 5, plain=True), "64KiB", 2, True)


def test_the_optimizers_that_are_compared_are_those_of_torch() -> None:
    known = {name for name, one in vars(torch.optim).items() if inspect.isclass(one)}
    found = {n for n in known if issubclass(getattr(torch.optim, n), torch.optim.Optimizer)}
    assert found - {"Optimizer"} == {*SINGLE, "LBFGS"}
    assert importlib.import_module("torch.optim") is torch.optim


def test_states_that_are_born_part_by_part_stand_in_the_order_of_one_step() -> None:
    def made() -> torch.optim.Optimizer:
        sizes = [4, 40_000, 300]
        parameters = [
            torch.nn.Parameter(torch.ones(size, device=training.DEVICE)) for size in sizes
        ]
        for one in parameters:
            one.grad = torch.ones_like(one)
        return torch.optim.AdamW(parameters)

    alone, moved = made(), made()
    alone.step()
    with refit.Controller(moved, states="host", window_bytes="64KiB"):
        moved.step()
        ordered = moved.state_dict()["state"]
        assert list(ordered) == list(alone.state_dict()["state"]) == [0, 1, 2]
        assert [list(one) for one in ordered.values()] == [["step", "exp_avg", "exp_avg_sq"]] * 3
