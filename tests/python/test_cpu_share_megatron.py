"""What Megatron-Core tests of its HybridDeviceOptimizer, asked of ``host_fraction``: fractions,
kinds of optimizers, groups, overlap, more than one step, loading, and parameters of several types.
Its tests compare with a tolerance, and here the bits have to be the same.

Drawn after tests/unit_tests/test_optimizer_cpu_offloading.py and what its optimizer does with
groups and gradients (NVIDIA/Megatron-LM main, 2026-08). The last part has Megatron-Core's own
optimizers, where it is installed.
"""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import refit
import torch
import training
from refit.errors import InvalidError, StateError
from test_host_every_optimizer import same
from torch import nn

pytestmark = pytest.mark.usefixtures("default_device")

FRACTIONS = [0.0, 0.5, 1.0]
KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda groups: torch.optim.Adam(groups, lr=1e-3),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-3),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-3),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=1e-3, momentum=0.9),
}


def small() -> nn.Module:
    """Two convolutions and three linear layers."""
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def wide() -> nn.Module:
    """With layers whose gradients and parameters take a while to travel."""
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(6), nn.Flatten()),
        *(nn.Linear(96, 1024), nn.ReLU(), nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 100)),
    )


class Net:
    """A model and its optimizer, and steps that depend on nothing but their number."""

    def __init__(
        self, kind: str = "adam", make: Callable[[], nn.Module] = small, *, grouped: bool = False
    ) -> None:
        torch.manual_seed(42)
        self.model = make().to(training.DEVICE)
        every = list(self.model.parameters())
        half = len(every) // 2
        groups: Any = [
            {"params": every[:half], "wd_mult": 1.0, "lr_mult": 1e-4},
            {"params": every[half:], "wd_mult": 0.0, "lr_mult": 2e-4, "lr": 3e-3},
        ]
        self.optimizer = KINDS[kind](groups if grouped else every)
        self.steps = 0

    def backward(self) -> None:
        source = torch.Generator().manual_seed(self.steps)
        images = torch.randn(2, 3, 32, 32, generator=source).to(training.DEVICE)
        self.model(images).sum().backward()

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            self.backward()
            self.optimizer.step()
            self.steps += 1


def assert_same(one: Net, other: Net) -> None:
    for mine, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert same(mine.detach(), theirs.detach())
    mine, theirs = one.optimizer.state_dict(), other.optimizer.state_dict()
    assert list(mine["state"]) == list(theirs["state"])
    assert same(mine, theirs)


@pytest.mark.parametrize("grouped", [False, True], ids=["one group", "two groups"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("steps", [1, 10])
def test_a_share_ends_where_training_without_refit_ends(
    steps: int, overlap: bool, fraction: float, kind: str, grouped: bool
) -> None:
    plain, ours = Net(kind, grouped=grouped), Net(kind, grouped=grouped)
    with refit.Controller(ours.optimizer, ours.model, host_fraction=fraction, overlap=overlap):
        assert ours.optimizer.state_dict()["state"] == {}
        plain.step(), ours.step()
        assert bool(ours.optimizer.state_dict()["state"]) == (kind != "sgd")
        plain.step(steps - 1), ours.step(steps - 1)
        assert_same(plain, ours)
    plain.step(), ours.step()
    assert_same(plain, ours)


@pytest.mark.parametrize("grouped", [False, True], ids=["one group", "two groups"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_a_wide_network_whose_steps_overlap_reads_no_old_parameter(
    fraction: float, kind: str, grouped: bool
) -> None:
    plain, ours = (Net(kind, wide, grouped=grouped) for _ in range(2))
    with refit.Controller(ours.optimizer, ours.model, host_fraction=fraction, overlap=True):
        plain.step(6), ours.step(6)
        assert_same(plain, ours)


@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.5, 0.9, 1.0])
def test_the_share_is_of_bytes_in_whole_parameters(fraction: float) -> None:
    run = Net("adam", wide)
    with refit.Controller(run.optimizer, run.model, host_fraction=fraction) as controller:
        run.step()
        sizes = [2 * 4 * one.numel() for one in run.model.parameters()]
        on_host = int(repr(controller).split("host_bytes=")[1].rstrip(")"))
        assert on_host > 0
        assert abs(on_host - fraction * sum(sizes)) <= max(sizes)


@pytest.mark.parametrize("to", [None, *FRACTIONS], ids=str)
@pytest.mark.parametrize("fraction", [None, *FRACTIONS], ids=str)
def test_a_state_dict_loads_with_any_other_share_and_without_refit(
    fraction: float | None, to: float | None
) -> None:
    plain, saved, loaded = Net(grouped=True), Net(grouped=True), Net(grouped=True)

    def opened(run: Net, share: float | None) -> refit.Controller | None:
        if share is None:
            return None
        return refit.Controller(run.optimizer, run.model, host_fraction=share)

    controllers = [opened(saved, fraction), opened(loaded, to)]
    plain.step(3), saved.step(3)
    written = io.BytesIO()
    torch.save([saved.model.state_dict(), saved.optimizer.state_dict()], written)
    written.seek(0)
    weights, states = torch.load(written)
    assert same(states, plain.optimizer.state_dict())
    loaded.model.load_state_dict(weights)
    loaded.optimizer.load_state_dict(states)  # before its first step
    loaded.steps = 3
    assert_same(plain, loaded)
    for run in (plain, saved, loaded):
        run.step(2)
    assert_same(plain, saved)
    assert_same(plain, loaded)
    saved.optimizer.load_state_dict(states)  # over states that are there
    plain.optimizer.load_state_dict(copy.deepcopy(states))
    plain.step(), saved.step()
    assert_same(plain, saved)
    for one in controllers:
        if one is not None:
            one.close()


class Mixed(nn.Module):
    """A weight in bf16, and a scale that stays in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(40, 40, bias=False, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.ones(40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x) * self.scale


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_states_of_bf16_and_fp32_parameters_load_into_another_optimizer(fraction: float) -> None:
    def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        inputs = torch.ones(2, 40, device=training.DEVICE, dtype=torch.bfloat16)
        model(inputs).sum().backward()
        optimizer.step()

    torch.manual_seed(1)
    models = [Mixed().to(training.DEVICE) for _ in range(3)]
    for one in models[1:]:
        one.load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.Adam(one.parameters(), lr=1e-3) for one in models]
    shared = [
        refit.Controller(optimizer, model, host_fraction=fraction)
        for model, optimizer in list(zip(models, optimizers, strict=True))[1:]
    ]
    for model, optimizer in list(zip(models, optimizers, strict=True))[:2]:
        stepped(model, optimizer)
    models[2].load_state_dict(models[1].state_dict())
    optimizers[2].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
    assert list(map(id, optimizers[2].state)) == list(map(id, models[2].parameters()))
    for model, optimizer in zip(models, optimizers, strict=True):
        stepped(model, optimizer)
    for model, optimizer in list(zip(models, optimizers, strict=True))[1:]:
        assert same(model.state_dict(), models[0].state_dict())
        assert same(optimizer.state_dict(), optimizers[0].state_dict())
    for one in shared:
        one.close()


@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_gradients_that_are_cleared_are_cleared_on_both_sides(
    fraction: float, set_to_none: bool
) -> None:
    plain, ours = Net("momentum"), Net("momentum")
    with refit.Controller(ours.optimizer, ours.model, host_fraction=fraction):
        for run in (plain, ours):
            run.step(2)
            run.backward()  # leaves for the host, and is dropped
            run.optimizer.zero_grad(set_to_none=set_to_none)
            for one in run.model.parameters():
                assert one.grad is None if set_to_none else not one.grad.any()
            run.optimizer.step()  # without gradients nothing, with zeros the momentum
            run.step()
        assert_same(plain, ours)


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_what_is_written_into_a_group_reaches_both_sides_with_the_next_step(
    fraction: float,
) -> None:
    plain, ours = Net(grouped=True), Net(grouped=True)
    with refit.Controller(ours.optimizer, ours.model, host_fraction=fraction):
        for run in (plain, ours):
            for _ in range(4):
                run.step()
                for group in run.optimizer.param_groups:
                    group["lr"] *= 0.5 + group["wd_mult"]
                    group["betas"] = (0.8, 0.9 + 0.02 * run.steps)
                    group["weight_decay"] = 0.1 * group["wd_mult"]
        assert_same(plain, ours)
        told = [group["lr_mult"] for group in ours.optimizer.state_dict()["param_groups"]]
        assert told == [1e-4, 2e-4]


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda one: torch.optim.lr_scheduler.CosineAnnealingLR(one, 5),
    "one cycle": lambda one: torch.optim.lr_scheduler.OneCycleLR(one, 0.01, total_steps=8),
    "a function": lambda one: torch.optim.lr_scheduler.LambdaLR(one, lambda step: 0.9**step),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("first", [False, True], ids=["made behind", "made before"])
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_schedulers_are_followed_on_both_sides(
    fraction: float, first: bool, scheduler: str
) -> None:
    plain, ours = Net(grouped=True), Net(grouped=True)
    make = SCHEDULERS[scheduler]
    schedulers = [make(plain.optimizer)] + ([make(ours.optimizer)] if first else [])
    with refit.Controller(ours.optimizer, ours.model, host_fraction=fraction):
        if not first:
            schedulers.append(make(ours.optimizer))
        for run, rates in zip((plain, ours), schedulers, strict=True):
            for _ in range(6):
                run.step()
                rates.step()
        assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()
        assert_same(plain, ours)


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_a_group_that_is_added_later_is_stepped(fraction: float) -> None:
    plain, ours = Net(), Net()
    more = [nn.Parameter(torch.ones(300, 10, device=training.DEVICE)) for _ in range(2)]
    with refit.Controller(ours.optimizer, ours.model, host_fraction=fraction):
        for run, late in zip((plain, ours), more, strict=True):
            run.step(2)
            run.optimizer.add_param_group({"params": [late], "lr": 0.01, "wd_mult": 0.5})
            for _ in range(3):
                (late * late).sum().backward()
                run.step()
                (late * 0.5).sum().backward()
                run.optimizer.step()
            run.model.register_parameter("late", late)
        assert_same(plain, ours)


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_a_parameter_without_a_gradient_is_left_as_it_is(fraction: float) -> None:
    plain, ours = Net("adamw"), Net("adamw")
    with refit.Controller(ours.optimizer, ours.model, host_fraction=fraction):
        for run in (plain, ours):
            run.step()
            for skipped in (0, -1, 3):
                run.optimizer.zero_grad()
                run.backward()
                every = list(run.model.parameters())
                before = every[skipped].detach().clone()
                every[skipped].grad = None
                run.optimizer.step()
                assert torch.equal(before, every[skipped])
        assert_same(plain, ours)


@pytest.mark.parametrize("fraction", [-0.5, 1.5, float("nan"), "half"])
def test_a_fraction_that_is_none_is_refused(fraction: Any) -> None:
    run = Net()
    with pytest.raises(InvalidError, match="host_fraction"):
        refit.Controller(run.optimizer, run.model, host_fraction=fraction)
    run.step()


def test_an_optimizer_with_a_share_has_one_controller_and_is_free_behind_it() -> None:
    plain, ours = Net(), Net()
    controller = refit.Controller(ours.optimizer, ours.model, host_fraction=0.5)
    ours.step()
    controller.close()
    with pytest.raises(StateError):
        controller.clear()
    with refit.Controller(ours.optimizer, ours.model, host_fraction=1.0):
        ours.step(2)
    ours.step()
    plain.step(4)
    assert_same(plain, ours)


# ---- Megatron-Core's own optimizers


@pytest.fixture
def masters() -> Any:
    """Megatron-Core's wrappers, which keep fp32 masters of bf16 weights."""
    pytest.importorskip("megatron.core.optimizer", reason="megatron-core is not installed")
    import test_host_masters

    return test_host_masters


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("kind", ["_distributed", "_float16"])
def test_the_cpu_steps_masters_of_megatron(
    masters: Any, kind: str, fraction: float, overlap: bool
) -> None:
    plain, ours = getattr(masters, kind)(), getattr(masters, kind)()
    optimizer, weights, _ = ours
    with refit.Controller(optimizer, host_fraction=fraction, overlap=overlap) as controller:
        for seed in range(4):
            masters._step(plain[0], plain[2], seed)
            masters._step(optimizer, ours[2], seed)
            assert all(map(torch.equal, weights, plain[1]))
            masters._same(ours, plain)
            controller.clear()
            controller.restore()
        masters._same(ours, plain)
    for one in (plain, ours):
        masters._step(one[0], one[2], 9)
    masters._same(ours, plain)


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_megatrons_own_state_dict_has_the_share_and_loads_it(masters: Any, fraction: float) -> None:
    plain, saved, loaded = (masters._float16() for _ in range(3))
    with (
        refit.Controller(saved[0], host_fraction=fraction),
        refit.Controller(loaded[0], host_fraction=fraction),
    ):
        for seed in (0, 2):
            masters._step(plain[0], plain[2], seed)
            masters._step(saved[0], saved[2], seed)
        written = copy.deepcopy(saved[0].state_dict())
        assert same(written["optimizer"]["state"], plain[0].state_dict()["optimizer"]["state"])
        loaded[0].load_state_dict(written)
        loaded[0]._copy_main_params_to_model_params()
        masters._same(loaded, plain)
        for one in (plain, saved, loaded):
            masters._step(one[0], one[2], 3)
        masters._same(saved, plain)
        masters._same(loaded, plain)
