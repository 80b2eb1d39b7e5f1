"""Every optimizer of torch.optim, and others that are installed, with every schedule: weights and
states are those of a step without refit, to the bit, whatever the groups, the shapes, the types and
the options are, and the states are where the schedule keeps them."""

import inspect
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import training
from refit.errors import UnsupportedError
from schedules import CYCLE, SHARE, WINDOWS, Schedule, lives_on_host, same, step_like

pytestmark = pytest.mark.usefixtures("default_device")

STEPS = 4

KINDS: dict[str, dict[str, Any]] = {
    "Adadelta": {},
    "Adafactor": {"eps": (1e-8, 1e-3)},  # with None a group has that of its first one's type
    "Adagrad": {},
    "Adam": {},
    "AdamW": {},
    "Adamax": {},
    "ASGD": {"t0": 2},
    "LBFGS": {"max_iter": 3, "history_size": 3},
    "Muon": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "SparseAdam": {},
}
"""Each optimizer, with options that make it keep all the state it can."""
SWITCHES = ("foreach", "fused", "maximize", "amsgrad", "decoupled_weight_decay")
if torch.cuda.is_available():
    SWITCHES += ("capturable",)
DECAY = {"weight_decay": 0.1}
RARE = ("-maximize=True", "-decoupled_weight_decay=True", "-foreach=False-weight_decay=0.1")
"""Ways that are left out of the quick ring."""


def ways_of(kind: Any, options: dict[str, Any]) -> list[dict[str, Any]]:
    takes = set(inspect.signature(kind).parameters) - set(options)
    decay = DECAY if "weight_decay" in takes else {}
    ways = [{}, *({name: True} for name in SWITCHES if name in takes)]
    if decay:
        ways.append(decay)
    if "foreach" in takes:
        ways.append({"foreach": False, **decay})
    if {"foreach", "maximize"} <= takes:
        ways.append({"foreach": True, "maximize": True, **decay})
    if {"fused", "amsgrad"} <= takes:
        ways.append({"fused": True, "amsgrad": True, **decay})
    return ways


def variants() -> list[Any]:
    found = []
    for name, options in KINDS.items():
        kind = getattr(torch.optim, name, None)
        for way in [] if kind is None else ways_of(kind, options):
            title = "-".join([name, *(f"{key}={value}" for key, value in way.items())])
            marks = [pytest.mark.slow] if title.endswith(RARE) else []
            found.append(pytest.param(kind, {**options, **way}, id=title, marks=marks))
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


class Drawn:
    """Parameters, groups and gradients, drawn by a seed; two of the same seed are the same."""

    def __init__(self, kind: Any, options: dict[str, Any], seed: int, plain: bool = False) -> None:
        self.sparse = kind.__name__ == "SparseAdam"
        self.alone = kind is torch.optim.LBFGS
        # By foreach, SGD steps a group some of whose parameters have no momentum yet another way.
        self.likely = 1.0 if kind is torch.optim.SGD and options.get("foreach") else 0.75
        self.draw = random.Random(seed)
        self.source = torch.Generator().manual_seed(seed)
        matrices = kind.__name__ in ("Muon", "SparseAdam") or plain
        dtypes = [torch.float32]
        if not matrices and not options.get("fused") and not self.alone:
            dtypes += [torch.float64, torch.bfloat16]
        self.every = [
            self.parameter(self.draw.choice(dtypes), matrices)
            for _ in range(self.draw.randint(4, 6))
        ]
        cut = self.draw.randint(1, len(self.every) - 2)
        first, second = {"params": self.every[:cut]}, {"params": self.every[cut:-1], "lr": 0.03}
        self.optimizer = kind(self.every if self.alone else [first, second], **options)
        # Before PyTorch 2.13 Adagrad makes states in its constructor, and none for a later group.
        self.grows = not self.alone and not self.optimizer.state
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

    def closure(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = torch.stack([(one * one).sum() for one in self.every]).sum()
        loss.backward()
        return loss

    def step(self) -> None:
        self.done += 1
        if self.alone:
            self.optimizer.step(self.closure)
            return
        if self.done == 3 and self.grows:
            self.optimizer.add_param_group({"params": self.every[-1:], "lr": 0.02})
        for one in self.every:
            one.grad = None
            if self.draw.random() < self.likely or self.done == STEPS:
                grad = training.drawn(*one.shape, generator=self.source).to(one.dtype)
                grad = torch.empty_like(one).copy_(grad)
                one.grad = grad.detach().to_sparse(1) if self.sparse else grad.detach()
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * 0.9
        self.optimizer.step()

    def tensors(self) -> list[torch.Tensor]:
        """All that the optimizer's state holds, in lists and dicts too."""

        def found(value: Any) -> list[torch.Tensor]:
            if isinstance(value, dict):
                value = list(value.values())
            if isinstance(value, list | tuple):
                return [tensor for one in value for tensor in found(one)]
            return [value] if isinstance(value, torch.Tensor) else []

        return found(list(self.optimizer.state.values()))

    def everything(self) -> Any:
        """What a step changes, the order of the states included."""
        places = {id(one): at for at, one in enumerate(self.every)}
        state = {places[id(one)]: held for one, held in self.optimizer.state.items()}
        groups = [{**one, "params": 0} for one in self.optimizer.param_groups]
        return [one.detach() for one in self.every], state, groups


def step_or_skip(alone: Drawn) -> None:
    try:
        alone.step()
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as why:
        pytest.skip(f"the optimizer itself: {why}")


def compare(schedule: Schedule, make: Callable[[], Drawn], number: int) -> None:
    try:
        alone, moved, tried = make(), make(), make()
    except (RuntimeError, ValueError) as why:
        pytest.skip(f"the optimizer itself: {why}")
    step_or_skip(tried)
    options: dict[str, Any] = {}
    if schedule.has_windows:
        options = {"windows": 1 + number % 4, "prefetch": bool(number % 2)}
    if schedule.has_share:
        options["fraction"] = (0.4, 1.0)[number % 2]
    with schedule.open(moved.optimizer, **options) as controller:
        step_like(alone.optimizer, controller)
        for step in range(STEPS):
            step_or_skip(alone)
            moved.step()
            if (step + number) % 2:
                looks = [(id(t), t.shape, t.stride(), t.storage_offset()) for t in moved.tensors()]
                sizes = {id(t): t.untyped_storage().nbytes() for t in moved.tensors()}
                controller.offload()
                stay = [t for t in moved.tensors() if t.untyped_storage().nbytes() == sizes[id(t)]]
                stay = [t for t in stay if sizes[id(t)] > 0 and not lives_on_host(t)]
                assert all(t.numel() == 1 for t in stay) or alone.alone  # trap 8
                assert len(stay) <= len(controller.resident)
                assert all(reason for _, reason in controller.resident)
                if step > 1:  # otherwise the step brings them back  # trap 10
                    controller.restore()
                    controller.wait()
                    assert same(alone.everything(), moved.everything())
                    found = moved.tensors()
                    assert looks == [
                        (id(t), t.shape, t.stride(), t.storage_offset()) for t in found
                    ]
        assert same(alone.everything(), moved.everything())
        if schedule is CYCLE:
            assert not any(map(lives_on_host, moved.tensors()))
    assert not any(map(lives_on_host, moved.tensors()))
    alone.step(), moved.step()
    assert same(alone.everything(), moved.everything())


@pytest.mark.parametrize(("kind", "options"), variants())
def test_an_optimizer_ends_with_the_bits_of_a_step_without_refit(
    schedule: Schedule, kind: Any, options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    if kind is torch.optim.LBFGS and schedule is not CYCLE:
        with pytest.raises(UnsupportedError, match=r"refit\.Cycle"):
            schedule.open(Drawn(kind, options, 1).optimizer)
        return
    number = sum(map(ord, request.node.name))
    compare(schedule, lambda: Drawn(kind, options, number), number)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [WINDOWS, SHARE], ids=lambda one: one.name)
@pytest.mark.parametrize(
    ("package", "name"),
    [pytest.param(one, name, id=f"{one}-{name}") for one, names in THIRD.items() for name in names],
)
def test_an_optimizer_of_another_package_ends_with_the_same_bits(
    schedule: Schedule, package: str, name: str
) -> None:
    kind = getattr(pytest.importorskip(package), name, None)
    if kind is None:
        pytest.skip(f"{package} has no {name}")
    options = {"relative_step": False, "scale_parameter": False} if name == "Adafactor" else {}
    if "lr" in inspect.signature(kind).parameters:
        options["lr"] = 1e-3
    compare(schedule, lambda: Drawn(kind, options, 5, plain=True), 5)


def test_the_optimizers_that_are_compared_are_those_of_torch() -> None:
    known = {name for name, one in vars(torch.optim).items() if inspect.isclass(one)}
    found = {n for n in known if issubclass(getattr(torch.optim, n), torch.optim.Optimizer)}
    assert found - {"Optimizer"} == set(KINDS)


def test_states_born_in_parts_stand_in_the_order_of_one_step(schedule: Schedule) -> None:
    def made() -> torch.optim.Optimizer:
        parameters = [torch.nn.Parameter(training.drawn(size)) for size in (300, 40_000, 4)]
        for one in parameters:
            one.grad = torch.ones_like(one)
        return torch.optim.AdamW(parameters)

    alone, moved = made(), made()
    alone.step()
    with schedule.open(moved):
        moved.step()
        ordered = moved.state_dict()["state"]
        assert list(ordered) == list(alone.state_dict()["state"]) == [0, 1, 2]
        assert [list(one) for one in ordered.values()] == [["step", "exp_avg", "exp_avg_sq"]] * 3
