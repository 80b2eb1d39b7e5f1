"""What every schedule keeps: whatever a training loop does with gradients, parameters, states,
groups, hooks and closures, it ends with the bits of the same loop without refit."""

import copy
import gc
import math
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import refit
import torch
import training
from changes import CHANGES, NOT_ON_GPU, state_of
from forks import said_in_a_fork
from refit.errors import BudgetError, BusyError, InvalidError, StateError, UnsupportedError
from schedules import (
    BOTH,
    CYCLE,
    SCHEDULES,
    SHARE,
    WINDOWS,
    Layers,
    Schedule,
    Twins,
    assert_alike,
    count_left,
    lives_on_host,
    same,
    step_like,
    stepped_by_cpu,
)
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.testing._internal.two_tensor import TwoTensor
from training import WIDTH, drawn

Optimizer = torch.optim.Optimizer
pytestmark = pytest.mark.usefixtures("default_device")

ON_HOST = {
    "cycle": [],
    "windows": ["0.weight", "2.weight", "4.weight"],
    "share": ["2.weight", "4.weight"],
    "both": ["0.weight", "2.weight", "4.weight"],
}
"""Of the weights of ``Layers`` those whose states live on the host."""
BY_CPU = {"cycle": [], "windows": [], "share": ["2.weight", "4.weight"], "both": ["4.weight"]}


def momentum(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


# ---- Where states are.


@pytest.mark.parametrize("before", [0, 2])
def test_states_are_where_the_schedule_keeps_them(schedule: Schedule, before: int) -> None:
    with Twins(schedule, before=before) as twins:
        run, controller = twins.moved, twins.controller
        assert controller.state == "training"
        for _ in range(3):
            twins.step(2)
            named = run.model.named_parameters()
            here = [n for n, p in named if lives_on_host(run.optimizer.state[p]["exp_avg"])]
            assert here == ON_HOST[schedule.name]
            assert stepped_by_cpu(controller) == BY_CPU[schedule.name]
            places = [one.data_ptr() for one in run.moments() if lives_on_host(one)]
            controller.offload()
            away = [one for one in run.moments() if one.untyped_storage().nbytes() == 0]
            assert len(away) == len(run.moments()) - 2 * len(here)
            assert [one.data_ptr() for one in run.moments() if lives_on_host(one)] == places
            twins.step()  # brings them back
            assert controller.state == "training"
            controller.offload()
            controller.restore()


@pytest.mark.parametrize("grads", ["keep", "discard", "zero"])
def test_gradients_leave_and_return_as_their_policy_says(schedule: Schedule, grads: Any) -> None:
    with Twins(schedule, grads=grads) as twins:
        for _ in range(3):
            twins.step()
            twins.backward()
            if grads != "keep":
                twins.controller.accumulating = False
            twins.controller.offload()
            assert twins.controller.state == "cleared"
            twins.controller.restore()
            twins.controller.wait()
            for run in twins:
                if grads != "keep":
                    run.optimizer.zero_grad()
            twins.step()


# ---- Between a backward pass and its step.


AT_THE_STEP = Schedule("share at the step", (refit.CpuStep(fraction=1.0, overlap=False),))
"""Gradients leave for the CPU when the step begins."""
LATE = pytest.param(AT_THE_STEP, marks=pytest.mark.slow)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("schedule", [*SCHEDULES, LATE], ids=lambda one: one.name)
def test_what_a_loop_does_between_a_backward_pass_and_its_step(
    schedule: Schedule, change: str
) -> None:
    if change == "share a counter" and schedule.has_windows:
        pytest.skip("parts of a parameter are given copies of its counter")
    if change in NOT_ON_GPU and training.DEVICE != "cpu":
        pytest.skip(f"on a GPU PyTorch {NOT_ON_GPU[change]}")
    with Twins(schedule) as twins:
        for count in (3, 2):
            twins.step(count)
            twins.backward()
            for run in twins:
                CHANGES[change](run)
            twins.finish()
            twins.assert_same()


class Wide(Layers):
    """With layers whose gradients and parameters take a while to travel."""

    def __init__(self, make: training.Maker) -> None:
        super().__init__(make)
        layers = [nn.Linear(WIDTH, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.Linear(1024, 100)]
        self.model = nn.Sequential(*layers).to(self.device)
        self.optimizer = make(self.model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("make", [training.adamw, momentum])
def test_a_wide_network_reads_no_parameter_of_before_the_step(
    schedule: Schedule, make: training.Maker
) -> None:
    with Twins(schedule, make, run=Wide) as twins:
        twins.step(5)


def test_several_backward_passes_add_up_to_one_step(schedule: Schedule) -> None:
    with Twins(schedule) as twins:
        for _ in range(4):
            for _ in range(3):
                twins.backward()
            twins.finish()


def test_a_step_that_is_left_out_is_made_up_for_by_none(schedule: Schedule) -> None:
    with Twins(schedule) as twins:
        twins.step(3)
        twins.backward()
        first = weakref.ref(twins.moved.gradients()[0])
        for run in twins:
            run.optimizer.zero_grad()
        twins.step(3)
        gc.collect()
        assert first() is None


def test_a_backward_pass_over_weights_before_a_step_is_refused(schedule: Schedule) -> None:
    with Twins(schedule) as twins:
        twins.step(3)
        for run in twins:
            run.backward()
            loss = run.model(torch.ones(2, WIDTH, device=run.device)).sum()
            run.finish()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            run.optimizer.zero_grad()


# ---- Gradients that are missing, and parameters that come and go.


def test_a_parameter_without_a_gradient_is_left_as_it_is(schedule: Schedule) -> None:
    with Twins(schedule) as twins:
        for number in range(6):
            for run in twins:
                run.backward()
                for at in {2: (0,), 3: (0, 4), 4: (2, 4)}.get(number, ()):
                    run.model[at].weight.grad = None
                before = [one.detach().clone() for one in run.parameters() if one.grad is None]
                after = [one for one in run.parameters() if one.grad is None]
                run.finish()
                assert all(map(torch.equal, before, after))


def test_a_step_without_any_gradient_does_nothing(schedule: Schedule) -> None:
    with Twins(schedule) as twins:
        for run in twins:
            run.optimizer.step()
            run.step(2)
            run.optimizer.step()


def test_a_parameter_that_needs_a_gradient_later(schedule: Schedule) -> None:
    twins = Twins(schedule)
    for run in twins:
        run.model[2].weight.requires_grad_(False)
    twins.controller.close()
    twins.open(schedule)
    with twins:
        for number in range(4):
            for run in twins:
                run.model[2].weight.requires_grad_(number > 1)
            twins.step()
        state = state_of(twins.moved, 2)
        assert lives_on_host(state["exp_avg"]) == (schedule.has_windows or schedule.has_share)


def test_groups_that_are_added_and_rates_that_change(schedule: Schedule) -> None:
    with Twins(schedule) as twins:
        for number in range(6):
            for run in twins:
                if number == 2:
                    torch.manual_seed(5)
                    more = nn.Linear(96, 40).to(run.device)
                    named = {"params": list(more.parameters()), "lr": 0.3}
                    run.optimizer.add_param_group(named)
                    run.model.append(more)
                for group in run.optimizer.param_groups:
                    group["lr"] *= 0.5
            twins.step()
        state = state_of(twins.moved, -1)
        assert lives_on_host(state["exp_avg"]) == (schedule is not CYCLE)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("change", ["removed", "amsgrad"])
def test_groups_that_change(schedule: Schedule, frozen: bool, change: str) -> None:
    def make(parameters: Any) -> Optimizer:
        *rest, last, bias = parameters
        return torch.optim.AdamW([{"params": [*rest, bias]}, {"params": [last]}], lr=1e-2)

    with Twins(schedule, make) as twins:
        twins.step(3)
        for run in twins:
            group = run.optimizer.param_groups[1]
            group["params"][0].requires_grad_(not frozen)
            if change == "removed":
                del run.optimizer.param_groups[1]
                run.optimizer.state.pop(group["params"][0])
            elif frozen:
                group["amsgrad"] = True
        twins.step(3)


def test_a_parameter_that_leaves_the_optimizer_is_let_go_of(schedule: Schedule) -> None:
    with Twins(schedule) as twins:
        twins.step(2)
        for run in twins:
            group = run.optimizer.param_groups[0]
            old = group["params"][0]
            fresh = drawn(*old.shape, generator=torch.Generator().manual_seed(3))
            group["params"][0] = run.model[0].weight = nn.Parameter(fresh)
            run.optimizer.state.pop(old)
        reference = weakref.ref(old)
        del old
        twins.step(3)
        twins.cycle()
        gc.collect()
        assert reference() is None


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (training.adamw, {"amsgrad": True}),
        (lambda p: torch.optim.RMSprop(p, lr=1e-3), {"momentum": 0.9, "centered": True}),
        (momentum, {"momentum": 0}),
    ],
    ids=["one state more", "two states more", "fewer states"],
)
def test_options_that_change_before_the_first_step(
    schedule: Schedule, make: Callable[[Any], Optimizer], options: dict[str, Any]
) -> None:
    with Twins(schedule, make) as twins:
        for run in twins:
            run.optimizer.param_groups[0].update(options)
        twins.step(3)


def test_a_model_that_gets_another_type_before_the_first_step(schedule: Schedule) -> None:
    def on_host() -> int:
        return int(repr(twins.controller).partition("host_bytes=")[2].rstrip(")") or 0)

    with Twins(schedule) as twins:
        whole = on_host()
        assert (whole > 0) == (schedule is not CYCLE)
        for run in twins:
            run.model.to(torch.bfloat16)
        twins.step(3)
        assert on_host() == whole // 2 or schedule is SHARE  # the first image has gone


def test_a_state_that_is_none_is_made_anew(schedule: Schedule) -> None:
    with Twins(schedule, momentum) as twins:
        twins.step(2)
        for run in twins:
            state_of(run, 4)["momentum_buffer"] = None
        twins.step(2)


def test_an_optimizer_without_states_makes_none(schedule: Schedule) -> None:
    with Twins(schedule, lambda parameters: torch.optim.SGD(parameters, lr=0.1)) as twins:
        twins.step(2)
        assert not twins.moved.optimizer.state


@contextmanager
def deterministic() -> Iterator[None]:
    """A GPU adds rows that come twice in any order otherwise."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("rate", [0.0, 0.9])
def test_an_optimizer_with_sparse_gradients_and_states(schedule: Schedule, rate: float) -> None:
    class Table(Layers):
        def __init__(self, make: training.Maker) -> None:
            super().__init__(make)
            self.model = nn.Sequential(nn.Embedding(300, 64, sparse=True)).to(self.device)
            self.optimizer = make(self.model.parameters())

        def loss(self) -> torch.Tensor:
            rows = torch.randint(300, (9,), generator=torch.Generator().manual_seed(self.steps))
            return self.model(rows.to(self.device)).pow(2).sum()

        def moments(self) -> list[torch.Tensor]:
            return []

    def make(parameters: Any) -> Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=rate)

    with deterministic(), Twins(schedule, make, run=Table) as twins:
        twins.step(4)


# ---- Several optimizers.


@pytest.mark.parametrize("shared", [False, True], ids=["of their own", "of the same parameters"])
def test_several_optimizers_in_one_controller(schedule: Schedule, shared: bool) -> None:
    """Where they share parameters, gradients that have left for one are stepped by others first."""
    if shared and schedule.has_share and training.DEVICE != "cpu":
        pytest.skip("the reference knows by name what the CPU steps, but not for which optimizer")
    runs = Layers(), Layers()
    sets = []
    for run in runs:
        every = list(run.model.parameters())
        first, last = (every, every) if shared else (every[:3], every[3:])
        sets.append([torch.optim.AdamW(first, lr=1e-2), momentum(last)])
        if shared:
            sets[-1].append(torch.optim.Adam(every, lr=1e-3))
    for order in (1, -1):
        stays = {"fraction": 0.5} if schedule is WINDOWS and order < 0 else {}
        with schedule.open(sets[1][::order], runs[1].model, **stays) as controller:
            for one in sets[0]:
                step_like(one, controller, runs[0].model)
            for number in range(4):
                for run, every in zip(runs, sets, strict=True):
                    run.backward()
                    left = run is runs[1] and number > 1 and schedule.has_share
                    assert not left or count_left(run) > 0
                    for one in every:
                        one.step()
                    run.optimizer.zero_grad(set_to_none=False)
                    run.steps += 1
            training.whole_cycle(controller)
            for mine, theirs in zip(*sets, strict=True):
                assert same(mine.state_dict(), theirs.state_dict())
        assert all(map(torch.equal, runs[0].parameters(), runs[1].parameters()))


# ---- Parameters of other looks.


def test_two_parameters_over_one_memory(schedule: Schedule) -> None:
    assert_same_with_and_without(
        schedule,
        lambda: [nn.Parameter(weight := drawn(40, 40)), nn.Parameter(weight), drawn(40, 40)],
        lambda ps: (ps[0] @ ps[1] @ ps[2]).square().mean(),
    )


@pytest.mark.parametrize("schedule", [CYCLE, SHARE], ids=lambda one: one.name)
def test_parameters_and_gradients_that_wrap_others(schedule: Schedule) -> None:
    """By a class that takes no two tensors of one memory, such as a window."""
    assert_same_with_and_without(
        schedule,
        lambda: [
            nn.Parameter(TwoTensor(drawn(40, 40), drawn(40, 40))),
            nn.Parameter(drawn(40, 40)),
        ],
        lambda ps: (ps[0] * ps[1]).sum(),
    )


def assert_same_with_and_without(
    schedule: Schedule, make: Callable[[], list[Any]], loss: Callable[[list[Any]], torch.Tensor]
) -> None:
    runs = []
    for _ in range(2):
        torch.manual_seed(1)
        parameters = make()
        trained = [one for one in parameters if one.requires_grad]
        # By foreach, a GPU steps two of one memory at the same time.
        runs.append((parameters, torch.optim.AdamW(trained, lr=0.1, foreach=False)))
    (alone, plainly), (moved, optimizer) = runs
    with schedule.open(optimizer) as controller:
        step_like(plainly, controller)
        for _ in range(4):
            for parameters, stepped in runs:
                loss(parameters).backward()
                stepped.step()
                stepped.zero_grad()
            training.whole_cycle(controller)
    for one, other in zip(alone, moved, strict=True):
        is_two = isinstance(one, TwoTensor)
        pairs = [(one.a, other.a), (one.b, other.b)] if is_two else [(one, other)]
        assert all(torch.equal(*pair) for pair in pairs)


# ---- Hooks and closures.


def test_hooks_run_once_a_step_at_their_places(schedule: Schedule) -> None:
    run = Layers()
    seen: list[str] = []

    def says(name: str) -> Callable[..., None]:
        def hook(optimizer: Optimizer, *_: Any) -> None:
            state = optimizer.state.get(run.model[4].weight, {})
            steps = int(state["step"]) if state else 0
            total = float(state["exp_avg"].abs().sum()) if state else 0.0
            seen.append(f"{name}{steps}")
            assert (total > 0) == (steps > 0)

        return hook

    with schedule.open(run.optimizer, run.model):
        handle = run.optimizer.register_step_pre_hook(says("pre"))
        run.optimizer.register_step_post_hook(says("post"))
        every = register_optimizer_step_pre_hook(says("all"))
        try:
            run.step(2)
        finally:
            every.remove()
        assert seen == ["all0", "pre0", "post1", "all1", "pre1", "post2"]
        handle.remove()
        run.step()
    run.step()
    assert seen[6:] == ["post3", "post4"]


def test_a_hook_that_changes_gradients_runs_before_the_step(schedule: Schedule) -> None:
    def clip(optimizer: Optimizer, *_: Any) -> None:
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1e-4)

    with Twins(schedule) as twins:
        for run in twins:
            run.optimizer.register_step_pre_hook(clip)  # after the hook of the controller
            run.optimizer.register_step_pre_hook(lambda *_: None)
        twins.step(3)


def test_a_hook_that_changes_the_arguments(schedule: Schedule) -> None:
    calls: list[int] = []

    def with_closure(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        return (*args[:1], lambda: calls.append(1) or 7.0), kwargs

    with Twins(schedule) as twins:
        for run in twins:
            handle = run.optimizer.register_step_pre_hook(with_closure)
            run.backward()
            assert run.optimizer.step() == 7.0
            handle.remove()
    assert len(calls) == 2


def fail(*_: Any) -> float:
    raise KeyError("no batch")


def test_a_hook_that_fails_leaves_everything_as_it_was(schedule: Schedule) -> None:
    with Twins(schedule, before=1) as twins:
        for _ in range(2):
            handle = twins.moved.optimizer.register_step_pre_hook(fail)
            twins.moved.backward()
            with pytest.raises(KeyError, match="no batch"):
                twins.moved.optimizer.step()
            handle.remove()
            twins.moved.optimizer.zero_grad()
        twins.step()


@pytest.mark.parametrize("by_name", [True, False])
def test_a_closure_is_called_once_and_its_loss_returned(schedule: Schedule, by_name: bool) -> None:
    calls: list[bool] = []
    with Twins(schedule) as twins:
        for run in twins:

            def closure(run: Layers = run) -> torch.Tensor:
                calls.append(torch.is_grad_enabled())
                run.optimizer.zero_grad()
                return torch.tensor(run.backward())

            for _ in range(4):
                step = run.optimizer.step
                assert float(step(closure=closure) if by_name else step(closure)) > 0
                run.steps += 1
        assert calls == [True] * 8


def test_a_closure_that_fails_changes_nothing(schedule: Schedule) -> None:
    with Twins(schedule, before=1) as twins:
        with pytest.raises(KeyError, match="no batch"):
            twins.moved.optimizer.step(fail)
        twins.step()


def test_code_that_replaces_step_on_the_object(schedule: Schedule) -> None:
    if schedule.has_share and training.DEVICE != "cpu":
        pytest.skip("the reference would have to replace what the CPU steps")
    calls: list[int] = []

    def make(parameters: Any) -> Optimizer:
        made = training.adamw(parameters)
        before = made.step
        made.step = lambda *a, **k: (calls.append(1), before(*a, **k))[1]
        return made

    with Twins(schedule, make) as twins:
        twins.step(3)
        assert len(calls) == 6


@pytest.mark.parametrize("first", [True, False], ids=["made before", "made after"])
def test_schedulers_made_before_and_after_the_controller(schedule: Schedule, first: bool) -> None:
    def rates(run: Layers) -> list[Any]:
        cycle = torch.optim.lr_scheduler.OneCycleLR(run.optimizer, 0.01, total_steps=8)
        return [cycle, torch.optim.lr_scheduler.StepLR(run.optimizer, 1, 0.5)]

    if first and schedule.has_share and training.DEVICE != "cpu":
        pytest.skip("they replace the step of the reference, too")
    twins = Twins(schedule)
    if first:
        twins.controller.close()
        schedulers = [rates(run) for run in twins]
        twins.open(schedule)
    else:
        schedulers = [rates(run) for run in twins]
    with twins, warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(6):
            if number == 3:
                twins.controller.close()
            for run, mine in zip(twins, schedulers, strict=True):
                run.step()
                for one in mine:
                    one.step()
        assert schedulers[0][0].get_last_lr() == schedulers[1][0].get_last_lr()


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unscaled and clipped"])
@pytest.mark.parametrize("scale", [4.0, 2.0**126])
def test_a_gradient_scaler_skips_steps(schedule: Schedule, scale: float, fused: bool) -> None:
    kind = torch.device(training.DEVICE).type
    with Twins(schedule, lambda p: torch.optim.AdamW(p, lr=1e-2, fused=fused)) as twins:
        for run in twins:
            scaler = torch.amp.GradScaler(kind, init_scale=scale, growth_interval=2)
            for number in range(8):
                scaler.scale(run.loss() * (1e30 if number == 5 else 1)).backward()
                if number in (0, 3):
                    run.model[0].weight.grad[0] = torch.inf
                if not fused:
                    scaler.unscale_(run.optimizer)
                    nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
                before = [one.clone() for one in run.model.parameters()]
                scaler.step(run.optimizer)
                scaler.update()
                if number in (0, 3):
                    assert all(map(torch.equal, before, run.model.parameters()))
                if number == 0:  # a step that is skipped moves nothing
                    assert twins.controller.stats()["refit/step_out_bytes"] == 0
                run.optimizer.zero_grad()
                run.steps += 1


@pytest.mark.parametrize("is_scaled", [True, False])
@pytest.mark.parametrize("wrapped_first", [True, False])
def test_the_optimizer_of_accelerate(
    schedule: Schedule, is_scaled: bool, wrapped_first: bool
) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.Accelerator(cpu=True)
    from accelerate.optimizer import AcceleratedOptimizer

    kind = torch.device(training.DEVICE).type
    scaler = torch.amp.GradScaler(kind, init_scale=1.0) if is_scaled else None

    def wrap() -> Any:
        return AcceleratedOptimizer(run.optimizer, device_placement=False, scaler=scaler)

    alone, run = Layers(), Layers()
    wrapped = wrap() if wrapped_first else None
    with schedule.open(wrapped or run.optimizer, run.model) as controller:
        step_like(alone.optimizer, controller, alone.model)
        wrapped = wrapped or wrap()
        for _ in range(3):
            alone.step()
            (run.loss() if scaler is None else scaler.scale(run.loss())).backward()
            wrapped.step()
            wrapped.zero_grad()
            assert not wrapped.step_was_skipped
            run.steps += 1
        assert_alike(alone, run)


# ---- Modes of PyTorch.


@pytest.mark.slow
def test_a_step_that_torch_compiles(schedule: Schedule) -> None:
    def make(parameters: Any) -> Optimizer:  # on a GPU the compiler switches to capturable
        return torch.optim.AdamW(parameters, lr=1e-2, capturable=training.DEVICE != "cpu")

    with Twins(schedule, make) as twins:
        steps = [run.optimizer.step for run in twins]
        compiled = [torch.compile(step, backend="eager") for step in steps]
        if schedule is not CYCLE:  # no step of refit's is compiled
            compiled[0] = steps[0]
        for _ in range(3):
            for run, step in zip(twins, compiled, strict=True):
                run.backward()
                step()
                run.optimizer.zero_grad()
                run.steps += 1
    torch.compiler.reset()


def backward_of(run: Layers, batch: torch.Tensor) -> None:
    run.model(batch).pow(2).mean().backward()


@pytest.mark.slow
def test_a_backward_pass_that_torch_compiles(schedule: Schedule) -> None:
    with Twins(schedule) as twins, torch._dynamo.config.patch(compiled_autograd=True):
        compiled = torch.compile(backward_of, backend="eager")
        for number in range(4):
            batch = drawn(8, WIDTH, generator=torch.Generator().manual_seed(number))
            backward_of(twins.alone, batch)
            compiled(twins.moved, batch)
            leave = len(stepped_by_cpu(twins.controller)) if number else 0
            assert count_left(twins.moved) == leave
            twins.finish()
    torch.compiler.reset()


def test_steps_in_inference_mode(schedule: Schedule) -> None:
    with Twins(schedule, before=1) as twins:
        for number in range(4):
            twins.backward()
            with torch.inference_mode(number < 3):
                for run in twins:
                    run.optimizer.step()
            for run in twins:
                run.optimizer.zero_grad()


def test_states_that_are_born_in_inference_mode(schedule: Schedule) -> None:
    runs = alone, moved = Layers(momentum), Layers(momentum)
    with schedule.open(moved.optimizer, moved.model) as controller:
        step_like(alone.optimizer, controller, alone.model)
        for _ in range(3):
            for run in runs:
                run.backward()
            with torch.inference_mode():
                for run in runs:
                    run.optimizer.step()
            for run in runs:
                run.optimizer.zero_grad()
        assert_alike(alone, moved)
        if schedule.has_windows:
            state_of(moved, 0)["momentum_buffer"].zero_()
        training.whole_cycle(controller)


def test_another_default_device(schedule: Schedule) -> None:
    with torch.device("meta"):  # as torch.set_default_device("cuda") on a GPU
        layers = [nn.Linear(96, 96) for _ in range(2)]
        model = nn.Sequential(*layers).to_empty(device=training.DEVICE)
    with torch.no_grad():
        for one in model.parameters():
            one.fill_(1)
    optimizer = momentum(model.parameters())
    with torch.device("meta"), schedule.open(optimizer, model) as controller:
        for one in model.parameters():
            one.grad = torch.ones_like(one)
        for _ in range(2):
            optimizer.step()
            training.whole_cycle(controller)
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
        for state in optimizer.state.values():
            assert bool((state["momentum_buffer"] == 1 + 0.9 + 0.81).all())


# ---- Other threads, processes and copies.


def test_a_state_is_read_by_another_thread(schedule: Schedule) -> None:
    with Twins(schedule, before=1) as twins:
        state = state_of(twins.moved, 4)
        sums: list[float] = []

        def read() -> None:
            sums.extend(float(state["exp_avg"].sum()) for _ in range(50))

        thread = threading.Thread(target=read)
        thread.start()
        twins.step(30)
        thread.join()
        assert len(sums) == 50


def test_a_copy_of_a_run_is_one_of_its_own(schedule: Schedule) -> None:
    with Twins(schedule) as twins:
        twins.step(2)
        fresh, other = copy.deepcopy(twins.alone), copy.deepcopy(twins.moved)
        again = pickle.loads(pickle.dumps(twins.moved.optimizer))
        assert same(again.state_dict(), twins.alone.optimizer.state_dict())
        assert not any(map(lives_on_host, other.moments()))
        twins.step(2)
        twins.controller.close()
        other.optimizer.load_state_dict(other.optimizer.state_dict())  # to the device
        other.step(2), fresh.step(2)
        assert_alike(fresh, other)


def test_a_forked_process_is_refused_and_has_the_gradients(schedule: Schedule) -> None:
    with Twins(schedule) as twins:
        run = twins.moved
        twins.step(3)
        twins.backward()
        assert (count_left(run) > 0) == schedule.has_share
        if training.DEVICE != "cpu":
            pytest.skip("PyTorch refuses to use a GPU in a forked process")

        def use() -> None:
            for one in run.gradients():
                one.add_(1)
            run.optimizer.zero_grad(set_to_none=False)

        assert said_in_a_fork(use) == ""
        if not schedule.has_windows:
            twins.controller.offload()
        state = run.optimizer.state[run.model[0].weight]["exp_avg"]
        step = run.optimizer.step
        for call in (state.sum, step, run.optimizer.state_dict, twins.controller.resume_step):
            assert "belongs to process" in said_in_a_fork(call)
        twins.finish()


# ---- What is refused.


def test_a_second_controller_is_refused(schedule: Schedule) -> None:
    with Twins(schedule) as twins:
        for other in SCHEDULES:
            with pytest.raises(BusyError, match="has a controller already"):
                other.open(twins.moved.optimizer)
        twins.step(2)


def test_an_optimizer_that_cannot_be_divided_stays_as_it_was(schedule: Schedule) -> None:
    run = Layers()
    optimizer = torch.optim.LBFGS(run.model.parameters())
    if schedule is CYCLE:
        schedule.open(optimizer, run.model).close()
        return
    with pytest.raises(UnsupportedError, match=r"refit\.Cycle"):
        schedule.open(optimizer, run.model)
    CYCLE.open(optimizer, run.model).close()


def test_pageable_host_memory_is_for_the_cycle_alone(schedule: Schedule) -> None:
    run = Layers()
    options = {"use_pinned_optimizer_offload": False}
    if schedule is not CYCLE:
        with pytest.raises(UnsupportedError, match="pinned"):
            schedule.open(run.optimizer, run.model, **options)
        schedule = CYCLE
    with Twins(schedule, **options) as twins:
        twins.step()
        twins.cycle()


def test_too_small_a_budget_leaves_everything_as_it_was(schedule: Schedule) -> None:
    with Twins(schedule, before=1) as twins:
        twins.controller.close()
        run = twins.moved
        with pytest.raises(BudgetError, match="budget"):
            schedule.open(run.optimizer, run.model, offload_budget_bytes="4KiB").clear()
        gc.collect()  # that of the cycle
        twins.open(schedule, offload_budget_bytes="64MiB")
        twins.step(2)
        twins.cycle()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"disk": {}}, "'disk' is none"),
    ({"host_states": {"resident_bytes": 1, "fraction": 0.5}}, "say the same"),
    ({"host_states": {"resident_bytes": "auto", "fraction": 0.5}}, "say the same"),
    *(({"host_states": {"resident_bytes": one}}, "resident_bytes=") for one in ("2GB", -1, "much")),
    ({"host_states": {"resident_bytes": "automatic"}}, 'or "auto"'),
    *(({"host_states": {"fraction": one}}, "0 to 1") for one in (1.5, math.nan)),
    *(({"cpu_step": {"fraction": one}}, "0 to 1") for one in (1.5, -0.1, math.nan, "half")),
    ({"host_states": {"fraction": 0.5}, "cpu_step": {"fraction": 0.8}}, "more than HostStates"),
    ({"cycle": {}, "cpu_step": {}}, "do not combine"),
    ({"cycle": {"fraction": 0.5}}, "cycle has no 'fraction'"),
    ({"cpu_step": {"windows": 2}}, "cpu_step has no 'windows'"),
    ({"cpu_step": 0.5}, "not a mapping"),
    ({"cpu_step": {"fraction": 0.5, "params": "early"}}, "last, largest"),
    ({"cpu_step": {"params": ["9.weight"]}}, "9.weight"),
    ({"cpu_step": {"params": [3]}}, "as text"),
    ({"cpu_step": {"fraction": 0.5, "backend": "fast"}}, "auto or torch"),
    ({"host_states": {"window_bytes": 1}}, "window_bytes"),
    *(({"host_states": {"windows": one}}, "windows") for one in (0, 5)),
]


@pytest.mark.parametrize(("schedule", "sentence"), REFUSED, ids=str)
def test_a_schedule_that_cannot_be_is_refused(schedule: dict[str, Any], sentence: str) -> None:
    run = Layers()
    with pytest.raises((InvalidError, refit.ConfigError), match=sentence):
        refit.Controller(run.optimizer, run.model, schedule=schedule)
    refit.Controller(run.optimizer, run.model).close()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"states": "host"}, "schedule=refit.HostStates"),
        ({"host_fraction": 0.5}, r"schedule=refit.CpuStep\(fraction"),
        ({"windows": 2}, "HostStates.windows"),
        ({"any_optimizer": True}, "allow_unverified"),
        ({"schedule": 3}, "give refit.Cycle"),
        ({"schedule": refit.HostStates}, "give refit.Cycle"),
    ],
    ids=str,
)
def test_a_keyword_of_a_schedule_says_where_it_belongs(
    options: dict[str, Any], sentence: str
) -> None:
    run = Layers()
    with pytest.raises(TypeError, match=sentence):
        refit.Controller(run.optimizer, run.model, **options)
    refit.Controller(run.optimizer, run.model).close()


# ---- The end.


def test_a_controller_without_references_gives_the_states_back(schedule: Schedule) -> None:
    twins = Twins(schedule)
    twins.step(3)
    twins.backward()
    reference = weakref.ref(twins.controller)
    twins.controller = CYCLE  # type: ignore[assignment]
    gc.collect()
    assert reference() is None
    assert not any(map(lives_on_host, twins.moved.moments()))
    assert count_left(twins.moved) == 0
    twins.finish()
    twins.open(schedule)
    with twins:
        twins.step()


def test_a_closed_controller_is_refused_and_may_be_closed_again(schedule: Schedule) -> None:
    with Twins(schedule) as twins:
        twins.controller.resume_step()  # none was broken off
        twins.step()
        twins.controller.resume_step()
        twins.controller.close()
        assert twins.controller.state == "closed"
        for call in (twins.controller.offload, twins.controller.resume_step):
            with pytest.raises(StateError, match="closed"):
                call()
        twins.step()


def test_one_schedule_after_another() -> None:
    alone, moved = Layers(), Layers()
    for schedule in (WINDOWS, CYCLE, BOTH, SHARE, WINDOWS):
        with schedule.open(moved.optimizer, moved.model) as controller:
            step_like(alone.optimizer, controller, alone.model)
            alone.step(2), moved.step(2)
            training.whole_cycle(controller)
            alone.step(), moved.step()
        assert_alike(alone, moved)
