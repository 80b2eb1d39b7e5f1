"""CpuStep: a share of the parameters is stepped on the CPU, where its states
live. Which parameters these are, what steps them, and when their gradients leave."""

from typing import Any

import pytest
import refit
import refit.step.cpu_kernels
import torch
import training
from changes import CHANGES
from refit.errors import BudgetError, CopyError, StateError
from refit.states.offloaded_tensor import OffloadedTensor
from refit.step.cpu_kernels import CpuKernels
from refit.step.cpu_step import CpuShare
from refit.step.stand_in import Stepping
from schedules import BOTH, SHARE, Schedule, Twins, count_left, stepped_by_cpu
from torch import nn
from torch.utils._foreach_utils import _foreach_supported_types as listed

pytestmark = pytest.mark.usefixtures("default_device")

ALL = Schedule("all", (refit.CpuStep(fraction=1.0),))
"""The CPU steps all that it can."""
WEIGHTS = ["0.weight", "2.weight", "4.weight"]
ELEMENTS = 24 * 96 + 2 * 96 * 96


def by_kernels(controller: refit.Controller) -> float:
    """How many elements of parameters the kernels of the C library have stepped last."""
    return controller.stats()["refit/host_step_out_bytes"] / 4


MAKERS: dict[str, tuple[training.Maker, bool]] = {
    "adamw": (training.adamw, True),
    "adam": (lambda p: torch.optim.Adam(p, amsgrad=True, weight_decay=0.1), True),
    "maximize": (lambda p: torch.optim.Adam(p, maximize=True, betas=(0.3, 0.4)), True),
    "lr of a tensor": (lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2)), True),
    "foreach": (lambda p: torch.optim.AdamW(p, foreach=True), True),
    "adagrad": (lambda p: torch.optim.Adagrad(p, lr_decay=0.1, weight_decay=0.1), True),
    "sgd": (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True), True),
    "dampening": (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.5), True),
    "fused": (lambda p: torch.optim.AdamW(p, fused=True), False),
    "rmsprop": (lambda p: torch.optim.RMSprop(p, momentum=0.5), False),
    "nadam": (torch.optim.NAdam, False),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_kernels_step_what_they_know_and_pytorch_the_rest(kind: str) -> None:
    make, is_known = MAKERS[kind]
    with Twins(ALL, make) as twins:
        twins.step(3)
        assert stepped_by_cpu(twins.controller) == WEIGHTS
        is_known = is_known and refit.step.cpu_kernels.root_of_torch() is not None
        if training.DEVICE == "cpu" or kind != "fused":  # a GPU's parameters are stepped by a loop
            assert by_kernels(twins.controller) == (ELEMENTS if is_known else 0)


def test_pytorchs_code_takes_the_roots_of_the_kernels_for_a_gpus_parameters() -> None:
    values = torch.rand(10000, generator=torch.Generator().manual_seed(1)) * 1e-6
    nearest = values.double().sqrt().float()
    doubled, made = values.double().sqrt(), values.sqrt()
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    with refit.step.cpu_kernels.nearest_roots(torch.optim.Adagrad(parameters)):
        assert torch.equal(values.sqrt(), nearest)
        assert torch.equal(torch._foreach_sqrt([values])[0], nearest)
        assert torch.equal(values.double().sqrt(), doubled)
    with refit.step.cpu_kernels.nearest_roots(torch.optim.RMSprop(parameters)):
        assert torch.equal(values.sqrt(), made)
    assert torch.equal(values.sqrt(), made)


def test_pytorchs_own_code_steps_if_it_is_asked_to() -> None:
    with Twins(ALL, backend="torch") as twins:
        twins.step(3)
        assert stepped_by_cpu(twins.controller) == WEIGHTS
        assert by_kernels(twins.controller) == 0


@pytest.mark.parametrize("make", [torch.optim.NAdam, torch.optim.Adamax])
def test_parameters_of_another_device_are_stepped_by_copies(
    make: training.Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the kernels do not know is copied to the host, stepped by PyTorch there, and back."""
    monkeypatch.setattr(CpuShare, "is_elsewhere", True)
    with Twins(ALL, make) as twins:
        twins.step(4)


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_the_kernels_are_found_whatever_the_defaults_are(kind: torch.dtype) -> None:
    found = refit.step.cpu_kernels.root_of_torch()
    before = torch.get_default_dtype()
    refit.step.cpu_kernels.root_of_torch.cache_clear()
    torch.set_default_dtype(kind)
    try:
        with torch.device("meta"):
            assert refit.step.cpu_kernels.root_of_torch() == found
    finally:
        torch.set_default_dtype(before)
        refit.step.cpu_kernels.root_of_torch.cache_clear()


def test_first_step_makes_counters_of_the_cpu_whatever_the_default_device_is() -> None:
    with Twins(ALL) as twins:
        twins.backward()
        twins.alone.finish()
        with torch.device("meta"):
            twins.moved.finish()
        states = twins.moved.optimizer.state.values()
        assert {one["step"].device.type for one in states} == {"cpu"}
        twins.step()


def test_foreach_changes_gradients_and_refuses_options_as_in_pytorch() -> None:
    if training.DEVICE != "cpu":
        pytest.skip("a GPU's parameters are stepped by a loop")
    nesterov = lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, foreach=True)  # noqa: E731
    with Twins(ALL, nesterov) as twins:
        for _ in range(2):
            twins.backward()
            for run in twins:
                run.optimizer.step()
            for mine, theirs in zip(*(run.gradients() for run in twins), strict=True):
                assert torch.equal(mine, theirs)
            for run in twins:
                run.optimizer.zero_grad()
    with Twins(ALL) as twins:
        twins.backward()
        for run in twins:
            (group,) = run.optimizer.param_groups
            before = dict(group)
            group.update(foreach=True, lr=torch.tensor(1e-2))
            with pytest.raises(RuntimeError, match="lr as a Tensor is not supported"):
                run.optimizer.step()
            group.update(before)
        twins.finish()


# ---- Which parameters.


@pytest.mark.parametrize(
    ("parts", "picked"),
    [
        ((refit.CpuStep(fraction=0.0),), []),
        ((refit.CpuStep(fraction=0.01),), []),
        ((refit.CpuStep(fraction=0.5),), ["4.weight"]),
        ((refit.CpuStep(fraction=0.95),), ["2.weight", "4.weight"]),
        ((refit.CpuStep(fraction=1.0),), WEIGHTS),
        ((refit.CpuStep(fraction=0.5, params="largest"),), ["4.weight"]),
        ((refit.CpuStep(fraction=0.5, params=["2.*", "4.*"]),), ["2.weight"]),
        ((refit.CpuStep(params=["2.*", "0.weight"]),), ["0.weight", "2.weight"]),
        # States of a bias are small.
        ((refit.CpuStep(params=["0.bias", "4.weight"]),), ["4.weight"]),
        ((refit.HostStates(), refit.CpuStep(fraction=0.5)), ["4.weight"]),
        ((refit.HostStates(fraction=0.5), refit.CpuStep(fraction=0.4)), []),
    ],
    ids=str,
)
def test_a_share_is_of_whole_parameters(parts: tuple[Any, ...], picked: list[str]) -> None:
    with Twins(Schedule("", parts), lambda p: torch.optim.AdamW(list(p)[::-1])) as twins:
        assert stepped_by_cpu(twins.controller) == picked
        twins.step(3)


def test_the_largest_parameters() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 16), nn.Linear(16, 40))
    optimizer = torch.optim.AdamW(model.parameters())
    with refit.Controller(
        optimizer, model, schedule=refit.CpuStep(fraction=0.8, params="largest")
    ) as controller:
        assert stepped_by_cpu(controller) == ["0.weight"]


# ---- Gradients leave during the backward pass.


def begin(twins: Twins) -> None:
    """Steps until gradients leave early, and the backward pass of another step."""
    twins.step(3)
    twins.backward()


@pytest.mark.parametrize("change", ["clip", "read", "scale and clip"])
def test_gradients_leave_from_the_second_step_on(
    monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """And are not submitted again in the step after what changes them all alike."""
    submitted: list[Any] = []
    submit = CpuKernels.submit
    monkeypatch.setattr(
        CpuKernels, "submit", lambda *args: submitted.extend(args[1]) or submit(*args)
    )
    with Twins(ALL) as twins:
        for number in range(4):
            submitted.clear()
            twins.backward()
            assert count_left(twins.moved) == (3 if number else 0)
            for run in twins:
                CHANGES[change](run)
            twins.finish()
            assert [gradient is None for _, gradient, _ in submitted] == [number > 0] * 3


@pytest.mark.parametrize("schedule", [SHARE, BOTH], ids=lambda one: one.name)
def test_without_overlap_they_leave_at_the_step(schedule: Schedule) -> None:
    with Twins(schedule, overlap=False) as twins:
        begin(twins)
        assert count_left(twins.moved) == 0
        twins.finish()


@pytest.mark.parametrize("change", ["clip", "clip one by one", "scale and clip", "read"])
def test_clipping_keeps_gradients_away(change: str) -> None:
    with Twins(ALL) as twins:
        begin(twins)
        for run in twins:
            CHANGES[change](run)
        assert count_left(twins.moved) == 3
        for mine, theirs in zip(*(run.gradients() for run in twins), strict=True):
            assert torch.equal(mine, theirs)
        assert count_left(twins.moved) == 0  # torch.equal is not known to read only
        twins.finish()


def test_clipping_reads_all_that_have_left_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does others: one by one it would be slower, and a norm of a GPU have other bits."""
    norm, read = torch._foreach_norm, []
    monkeypatch.setattr(
        torch, "_foreach_norm", lambda *args: read.append(len(args[0])) or norm(*args)
    )
    with Twins(ALL) as twins:
        begin(twins)
        assert count_left(twins.moved) == 3
        for run in twins:
            nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
        assert read == [len(run.gradients()) for run in twins]
        twins.finish()
    assert not any(issubclass(one, OffloadedTensor) for one in listed)


def test_gradients_used_before_the_step_stay_for_a_while() -> None:
    with Twins(ALL) as twins:
        twins.step(4)
        seen = []
        for _ in range(12):
            twins.backward()
            seen.append(count_left(twins.moved) > 0)
            for run in twins:
                run.gradients()[-2].add_(0.5)
            twins.finish()
    pauses = (1, 2, 4, 1)
    assert seen == [one for pause in pauses for one in (True, *[False] * pause)]


def test_gradients_leave_in_the_last_of_several_backward_passes() -> None:
    with Twins(ALL) as twins:
        for number in range(4):
            for micro in range(3):
                twins.backward()
                assert (count_left(twins.moved) > 0) == (number >= 1 and micro == 2)
            twins.finish()


def test_a_gradient_that_has_an_alias_stays_until_the_step() -> None:
    with Twins(ALL) as twins:
        begin(twins)
        held = [[one.data for one in run.gradients()] for run in twins]
        for run in twins:
            run.optimizer.step()
            run.optimizer.zero_grad(set_to_none=False)
            run.steps += 1
        twins.backward()
        assert count_left(twins.moved) == 0
        for aliases in held:
            for one in aliases:
                one.mul_(0.5)
        twins.finish()


def test_clear_takes_gradients_back() -> None:
    with Twins(ALL) as twins:
        begin(twins)
        assert count_left(twins.moved) == 3
        twins.cycle()
        assert count_left(twins.moved) == 0
        twins.finish()


# ---- When things go wrong.


def test_a_gradient_that_cannot_leave_early_leaves_at_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []

    def failing(_step: CpuKernels, number: int, *_rest: Any) -> None:
        calls.append(number)
        raise CopyError("a gradient has not left")

    with Twins(ALL) as twins:
        twins.step(3)
        with monkeypatch.context() as patch:
            patch.setattr(CpuKernels, "gradient", failing)
            twins.backward()
        assert calls
        assert count_left(twins.moved) == 0
        twins.finish()


def test_code_that_fails_after_gradients_left_can_be_resumed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That of the device's part: it and the CPU's are made later."""

    def failing(*_: Any) -> None:
        raise RuntimeError("no")

    with Twins(SHARE) as twins:
        begin(twins)
        with monkeypatch.context() as patch:
            patch.setattr(Stepping, "run_on", failing)
            with pytest.raises(RuntimeError, match="no"):
                twins.moved.optimizer.step()
        try:
            twins.moved.optimizer.step()
        except StateError:
            twins.controller.resume_step()
        twins.alone.optimizer.step()
        for run in twins:
            run.optimizer.zero_grad()
            run.steps += 1


def test_too_little_host_memory_is_told_before_any_step() -> None:
    states = 2 * 4 * ELEMENTS
    with Twins(ALL, before=1) as twins:
        twins.controller.close()
        run = twins.moved
        for budget in (states - 1, states + 1000):  # too little for states; for gradients
            with pytest.raises(BudgetError, match="budget"):
                ALL.open(run.optimizer, run.model, offload_budget_bytes=budget)
        twins.step(2)


@pytest.mark.parametrize("schedule", [SHARE, BOTH], ids=["share", "both"])
def test_a_parameter_with_a_gradient_may_be_frozen(schedule: Schedule) -> None:
    with Twins(schedule) as twins:
        twins.step(2)
        twins.backward()
        for run in twins:
            run.optimizer.step()  # its gradients stay
            run.parameters()[4].requires_grad_(False)
        twins.backward()
        twins.finish()
        twins.step()
        for run in twins:
            run.parameters()[4].requires_grad_(True)
        twins.step(2)
