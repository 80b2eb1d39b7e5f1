"""Controller(host_fraction=...): a share of the parameters is stepped on the CPU, where its states
live. What a training loop sees of it: the same bits, whatever it does with gradients, parameters
and states between backward and step; which parameters the CPU steps; what is refused."""

import copy
import gc
import math
import os
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import refit
import refit.cpu_share
import refit.windowed_step
import torch
import training
from refit.cpu_share import CpuShare
from refit.errors import BudgetError, CopyError, InvalidError, StateError, UnsupportedError
from refit.host_step import HostStep
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from training import assert_same, drawn

Optimizer = torch.optim.Optimizer
pytestmark = pytest.mark.usefixtures("default_device")

WIDTH = 24


class Run(training.Run):
    """A run with three weights whose states can be on the host, and biases whose states stay."""

    def __init__(self, make: training.Maker = training.adamw) -> None:
        super().__init__(make)
        layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()]
        self.model = nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH)).to(self.device)
        self.optimizer = make(self.model.parameters())

    def backward_of_a_batch(self, batch: torch.Tensor) -> None:
        self.model(batch).pow(2).mean().backward()


def with_share(run: Run, fraction: float = 1.0, **options: Any) -> refit.Controller:
    return refit.Controller(run.optimizer, run.model, host_fraction=fraction, **options)


@pytest.fixture
def twins() -> Iterator[tuple[Run, Run, refit.Controller]]:
    """A run without refit, and one whose parameters the CPU steps."""
    alone, moved = Run(), Run()
    with with_share(moved) as controller:
        yield alone, moved, controller


def share_of(controller: refit.Controller) -> CpuShare:
    assert controller._host is not None
    (share,) = controller._host._shares
    return share


def by_kernel(controller: refit.Controller) -> int:
    """How many parameters the kernels of the C library step."""
    return len(share_of(controller)._places)


def gone(controller: refit.Controller) -> int:
    """How many gradients have left before the step."""
    return len(share_of(controller)._left)


def named(controller: refit.Controller) -> list[str]:
    return [name for name, why in controller.resident if "the CPU steps it" in why]


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
    "adafactor": (torch.optim.Adafactor, False),
}


@pytest.mark.parametrize("fraction", [0.3, 0.7, 1.0])
@pytest.mark.parametrize("kind", MAKERS)
def test_a_step_ends_with_the_bits_of_one_without_refit(kind: str, fraction: float) -> None:
    make, is_known = MAKERS[kind]
    alone, moved = Run(make), Run(make)
    with with_share(moved, fraction) as controller:
        for _ in range(5):
            assert alone.step() == moved.step()
            assert_same(alone, moved)
        on_cpu = len(named(controller))
        if kind != "adafactor":  # its states are small
            assert on_cpu == {0.3: 0, 0.7: 2, 1.0: 3}[fraction]
        if on_cpu and refit.cpu_share.root_of_torch() is not None:
            assert by_kernel(controller) == (on_cpu if is_known else 0)
    alone.step(2), moved.step(2)
    assert_same(alone, moved)


def test_states_are_tensors_of_the_host_and_take_part_in_no_cycle(
    twins: tuple[Run, Run, refit.Controller],
) -> None:
    alone, moved, controller = twins
    for _ in range(3):
        alone.step(2), moved.step(2)
        before = [one.data_ptr() for one in moved.moments() if one.nbytes > 512]
        controller.clear()
        assert [one.data_ptr() for one in moved.moments() if one.nbytes > 512] == before
        controller.restore()
    assert_same(alone, moved)


# ---- Which parameters.


def test_the_last_parameters_of_the_model_are_stepped_first() -> None:
    run = Run()
    run.optimizer = torch.optim.AdamW(list(run.model.parameters())[::-1])
    with with_share(run, 0.7) as controller:
        assert named(controller) == ["2.weight", "4.weight"]


def test_the_largest_parameters() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 16), nn.Linear(16, 40))
    optimizer = torch.optim.AdamW(model.parameters())
    with refit.Controller(optimizer, model, host_fraction=0.8, host_pick="largest") as controller:
        assert named(controller) == ["0.weight"]


def test_parameters_by_name() -> None:
    run = Run()
    with refit.Controller(run.optimizer, run.model, host_pick=["2.*", "0.weight"]) as controller:
        assert named(controller) == ["0.weight", "2.weight"]
        run.step(3)


def test_a_name_of_a_parameter_whose_states_are_small_picks_nothing() -> None:
    alone, moved = Run(), Run()
    options: dict[str, Any] = {"host_pick": ["0.bias", "4.weight"]}
    with refit.Controller(moved.optimizer, moved.model, **options) as controller:
        assert named(controller) == ["4.weight"]
        alone.step(2), moved.step(2)
        assert_same(alone, moved)


def test_a_share_smaller_than_each_parameter_is_none() -> None:
    run = Run()
    with with_share(run, 0.01) as controller:
        assert named(controller) == []
        run.step(2)


def test_parameters_that_come_later_get_their_share() -> None:
    alone, moved = Run(), Run()
    with with_share(moved) as controller:
        for run in (alone, moved):
            torch.manual_seed(5)
            run.step(2)
            more = nn.Linear(WIDTH, 40)
            run.optimizer.add_param_group({"params": list(more.parameters()), "lr": 0.3})
            run.model.append(more)
            run.step(3)
        assert_same(alone, moved)
        assert "5.weight" in named(controller)


def test_a_share_beside_windows() -> None:
    alone, moved = Run(), Run()
    options: dict[str, Any] = {"window_bytes": "64KiB", "cpu_fraction": 0.4}
    with refit.Controller(moved.optimizer, moved.model, states="host", **options) as controller:
        alone.step(4), moved.step(4)
        assert_same(alone, moved)
        assert named(controller) == ["4.weight"]
        assert controller.stats()["refit/step_in_bytes"] > 0


# ---- Gradients leave during the backward pass.


def begin(*runs: Run) -> None:
    """Steps until gradients leave early, and the backward pass of another step."""
    for run in runs:
        run.step(3)
        run.backward()


def finish(*runs: Run) -> None:
    for run in runs:
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.steps += 1


def test_gradients_leave_from_the_second_step_on(
    twins: tuple[Run, Run, refit.Controller], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, moved, controller = twins
    for number in range(4):
        moved.backward()
        assert gone(controller) == (by_kernel(controller) if number >= 1 else 0)
        alone.backward(), finish(alone, moved)
    begin(alone, moved)
    brought: list[Any] = []
    bring = HostStep.bring
    monkeypatch.setattr(HostStep, "bring", lambda *args: brought.extend(args[1]) or bring(*args))
    finish(alone, moved)
    assert [gradient for _, gradient, _ in brought] == [None] * by_kernel(controller)
    assert_same(alone, moved)
    begin(alone, moved), finish(alone, moved)
    assert_same(alone, moved)


def test_without_overlap_they_leave_at_the_step() -> None:
    alone, moved = Run(), Run()
    with with_share(moved, overlap=False) as controller:
        begin(alone, moved)
        assert gone(controller) == 0
        finish(alone, moved)
        assert_same(alone, moved)


def clipped(run: Run) -> None:
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3)


def clipped_one_by_one(run: Run) -> None:
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3, foreach=False)


def clipped_by_value(run: Run) -> None:
    torch.nn.utils.clip_grad_value_(run.model.parameters(), 1e-4)


def gradients_of(run: Run) -> list[torch.Tensor]:
    return [one.grad for one in run.model.parameters() if one.grad is not None]


def scaled(run: Run) -> None:
    for one in gradients_of(run):
        one.mul_(3.5)


def scaled_twice(run: Run) -> None:
    scaled(run), clipped(run)


def scaled_four_times(run: Run) -> None:
    scaled_twice(run), scaled_twice(run)


def one_of_them_scaled(run: Run) -> None:
    gradients_of(run)[-2].mul_(0.25)


def scaled_by_data(run: Run) -> None:
    for one in gradients_of(run):
        one.data.mul_(3.5)


def scaled_by_an_infinity(run: Run) -> None:
    torch._foreach_mul_(gradients_of(run), math.inf)


def divided(run: Run) -> None:
    for one in gradients_of(run):
        one /= 3


def noise(run: Run) -> None:
    source = torch.Generator().manual_seed(1)
    for one in gradients_of(run):
        one.add_(drawn(*one.shape, generator=source))


def others_given(run: Run) -> None:
    for one in run.model.parameters():
        one.grad = None if one.grad is None else one.grad.clone() * 2


def one_dropped(run: Run) -> None:
    list(run.model.parameters())[-2].grad = None


def all_dropped(run: Run) -> None:
    run.optimizer.zero_grad()


def zeroed(run: Run) -> None:
    run.optimizer.zero_grad(set_to_none=False)


def another_backward_pass(run: Run) -> None:
    run.backward()


def read(run: Run) -> None:
    assert all(bool(one.isfinite().all()) for one in gradients_of(run))


def copied(run: Run) -> None:
    assert [one.numpy().copy() for one in gradients_of(run)]


def weights_decayed_by_data(run: Run) -> None:
    for one in run.model.parameters():
        one.data.mul_(0.5)


def weights_replaced(run: Run) -> None:
    for one in run.model.parameters():
        one.data = one.data.clone() + 1


def moments_changed(run: Run) -> None:
    for one in run.moments():
        one.mul_(0.5)


def counter_changed(run: Run) -> None:
    for state in run.optimizer.state.values():
        state["step"].fill_(100)


def rate_changed(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] = 0.3


def made_fused(run: Run) -> None:
    run.optimizer.param_groups[0]["fused"] = True


def loaded(run: Run) -> None:
    state = copy.deepcopy(run.optimizer.state_dict())
    for one in state["state"].values():
        one["exp_avg"] = one["exp_avg"] * 0.25
    run.optimizer.load_state_dict(state)


def states_dropped(run: Run) -> None:
    run.optimizer.state.clear()


def model_loaded(run: Run) -> None:
    run.model.load_state_dict({key: one * 2 for key, one in run.model.state_dict().items()})


CHANGES: list[Callable[[Run], None]] = [
    *(clipped, clipped_one_by_one, clipped_by_value, scaled, scaled_twice, scaled_four_times),
    *(one_of_them_scaled, scaled_by_data, scaled_by_an_infinity, divided, noise, others_given),
    *(one_dropped, all_dropped, zeroed, another_backward_pass, read, copied),
    *(weights_decayed_by_data, weights_replaced, moments_changed, counter_changed, rate_changed),
    *(made_fused, loaded, states_dropped, model_loaded),
]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_loop_does_between_backward_and_step(
    change: Callable[[Run], None], overlap: bool
) -> None:
    alone, moved = Run(), Run()
    with with_share(moved, overlap=overlap):
        for _ in range(3):
            begin(alone, moved)
            change(alone), change(moved)
            finish(alone, moved)
            for mine, theirs in zip(alone.moments(), moved.moments(), strict=True):
                assert torch.equal(mine.nan_to_num(7), theirs.nan_to_num(7))
            for mine, theirs in zip(
                alone.model.parameters(), moved.model.parameters(), strict=True
            ):
                assert torch.equal(mine.nan_to_num(7), theirs.nan_to_num(7))


@pytest.mark.parametrize("change", [clipped, clipped_one_by_one, scaled_twice, read])
def test_clipping_keeps_gradients_away(
    change: Callable[[Run], None], twins: tuple[Run, Run, refit.Controller]
) -> None:
    alone, moved, controller = twins
    begin(alone, moved)
    change(alone), change(moved)
    assert gone(controller) == by_kernel(controller) > 0
    for mine, theirs in zip(gradients_of(alone), gradients_of(moved), strict=True):
        assert torch.equal(mine, theirs)
    assert gone(controller) == 0  # torch.equal is no function that is known to read only


def test_gradients_that_are_used_before_the_step_stay_for_a_while(
    twins: tuple[Run, Run, refit.Controller],
) -> None:
    _, moved, controller = twins
    begin(moved), finish(moved)
    seen = []
    for _ in range(12):
        moved.backward()
        seen.append(gone(controller) > 0)
        noise(moved)
        finish(moved)
    assert seen == [True] + [False] * 1 + [True] + [False] * 2 + [True] + [False] * 4 + [
        True,
        False,
    ]


def test_only_the_last_of_several_backward_passes_lets_gradients_leave(
    twins: tuple[Run, Run, refit.Controller],
) -> None:
    alone, moved, controller = twins
    for number in range(4):
        for micro in range(3):
            alone.backward(), moved.backward()
            assert (gone(controller) > 0) == (number >= 1 and micro == 2)
        finish(alone, moved)
    assert_same(alone, moved)


def test_a_step_that_is_left_out_lets_gradients_leave_again(
    twins: tuple[Run, Run, refit.Controller],
) -> None:
    alone, moved, _ = twins
    begin(alone, moved)
    first = weakref.ref(gradients_of(moved)[0])
    all_dropped(alone), all_dropped(moved)
    alone.step(3), moved.step(3)
    gc.collect()
    assert first() is None
    assert_same(alone, moved)


@pytest.mark.parametrize("scale", [2.0**4, 2.0**126])
def test_a_grad_scaler(scale: float) -> None:
    alone, moved = Run(), Run()
    with with_share(moved):
        for run in (alone, moved):
            scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
            for number in range(8):
                batch = drawn(8, WIDTH, generator=torch.Generator().manual_seed(number))
                loss = run.model(batch).pow(2).mean() * (1e30 if number == 5 else 1)
                scaler.scale(loss).backward()
                scaler.unscale_(run.optimizer)
                torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
                scaler.step(run.optimizer)
                scaler.update()
                run.optimizer.zero_grad()
        assert_same(alone, moved)


def test_a_closure_is_evaluated_once(twins: tuple[Run, Run, refit.Controller]) -> None:
    alone, moved, _ = twins
    for run in (alone, moved):
        calls = []

        def closure(run: Run = run, calls: list[int] = calls) -> float:
            calls.append(1)
            run.optimizer.zero_grad()
            return run.backward()

        for _ in range(4):
            run.optimizer.step(closure)
            run.steps += 1
        assert len(calls) == 4
    assert_same(alone, moved)


def test_clear_takes_gradients_back(twins: tuple[Run, Run, refit.Controller]) -> None:
    alone, moved, controller = twins
    begin(alone, moved)
    controller.clear()
    assert gone(controller) == 0
    controller.restore()
    finish(alone, moved)
    assert_same(alone, moved)


# ---- Checkpoints.


def test_state_dicts_go_both_ways(twins: tuple[Run, Run, refit.Controller]) -> None:
    alone, moved, _ = twins
    alone.step(3), moved.step(3)
    saved = pickle.loads(pickle.dumps(moved.optimizer.state_dict()))
    other = Run()
    other.model.load_state_dict(moved.model.state_dict())
    other.optimizer.load_state_dict(saved)
    other.steps = moved.steps
    moved.optimizer.load_state_dict(copy.deepcopy(alone.optimizer.state_dict()))
    alone.step(2), moved.step(2), other.step(2)
    assert_same(alone, moved)
    assert_same(alone, other)


# ---- When things go wrong.


def test_a_gradient_that_does_not_arrive_leaves_all_as_it_was(
    twins: tuple[Run, Run, refit.Controller], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, moved, controller = twins
    alone.step(3), moved.step(3)
    for verb in ("begin", "bring", "run", "wait"):
        alone.backward(), moved.backward()
        share_of(controller).take_back()
        real = getattr(HostStep, verb)
        calls: list[str] = []

        def failing(*args: Any, real: Any = real, calls: Any = calls, verb: str = verb) -> Any:
            calls.append(verb)
            if len(calls) == 1:
                raise CopyError(f"{verb} has failed")
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(HostStep, verb, failing)
            with pytest.raises(CopyError, match=verb):
                moved.optimizer.step()
        assert calls
        if controller._host is not None and controller._host._broken is not None:
            with pytest.raises(StateError, match="resume_step"):
                moved.optimizer.step()
            controller.resume_step()
        else:
            moved.optimizer.step()
        alone.optimizer.step()
        for run in (alone, moved):
            run.optimizer.zero_grad()
            run.steps += 1
        assert_same(alone, moved)


def test_a_gradient_that_cannot_leave_early_leaves_at_the_step(
    twins: tuple[Run, Run, refit.Controller], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, moved, controller = twins
    alone.step(3), moved.step(3)
    calls: list[int] = []

    def failing(_step: HostStep, number: int, *_rest: Any) -> None:
        calls.append(number)
        raise CopyError("a gradient has not left")

    with monkeypatch.context() as patch:
        patch.setattr(HostStep, "gradient", failing)
        alone.backward(), moved.backward()
    assert calls
    assert gone(controller) == 0
    finish(alone, moved)
    assert_same(alone, moved)


def test_code_of_the_optimizer_that_fails_keeps_the_step_to_be_resumed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device's part fails when the gradients of the CPU's have left; both are made later."""
    alone, moved = Run(), Run()
    with with_share(moved, 0.7) as controller:
        alone.step(3), moved.step(3)
        alone.backward(), moved.backward()
        with monkeypatch.context() as patch:
            window = refit.windowed_step.WindowedStep._window

            def failing(self: Any, home: Any, entries: Any, *rest: Any) -> None:
                raise RuntimeError("no")

            patch.setattr(refit.windowed_step.WindowedStep, "_window", failing)
            with pytest.raises(RuntimeError, match="no"):
                moved.optimizer.step()
            assert window is not failing
        with suppress(StateError):
            moved.optimizer.step()
        controller.resume_step()
        alone.optimizer.step()
        assert_same(alone, moved)


def test_parameters_of_another_device_are_stepped_by_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the kernels do not know is copied to the host, stepped by PyTorch there, and back."""
    monkeypatch.setattr(CpuShare, "is_elsewhere", True)
    for make in (torch.optim.NAdam, lambda p: torch.optim.AdamW(p, fused=True)):
        alone, moved = Run(make), Run(make)
        with with_share(moved):
            alone.step(4), moved.step(4)
            assert_same(alone, moved)


def test_pytorchs_own_code_steps_if_it_is_asked_to() -> None:
    alone, moved = Run(), Run()
    with with_share(moved, host_step="torch") as controller:
        alone.step(3), moved.step(3)
        assert_same(alone, moved)
        assert by_kernel(controller) == 0


def test_too_little_host_memory_is_told_before_any_step() -> None:
    alone, moved = Run(), Run()
    states = 3 * 2 * 4 * WIDTH * WIDTH
    for budget in (states - 1, states + 1000):  # too little for states; for gradients
        with pytest.raises(BudgetError, match="budget"):
            with_share(moved, offload_budget_bytes=budget)
    alone.step(2), moved.step(2)
    assert_same(alone, moved)
    with with_share(moved, offload_budget_bytes=64 << 20):
        alone.step(2), moved.step(2)
        assert_same(alone, moved)


# ---- What few loops do.


def clipped_twice_named(run: Run) -> None:
    """As a list that names a tied weight twice: its gradient is multiplied twice."""
    torch._foreach_mul_([*gradients_of(run), gradients_of(run)[-2]], 0.5)


def counter_changed_by_data(run: Run) -> None:
    for state in run.optimizer.state.values():
        state["step"].data.fill_(100)


def counter_shared(run: Run) -> None:
    counters = [state for state in run.optimizer.state.values() if state["exp_avg"].dim() > 1]
    for state in counters:
        state["step"] = counters[0]["step"]


def alias_made_by_data(run: Run) -> None:
    run.aliases = [torch.empty(0) for _ in gradients_of(run)]  # type: ignore[attr-defined]
    for alias, one in zip(run.aliases, gradients_of(run), strict=True):  # type: ignore[attr-defined]
        alias.data = one
        alias.mul_(0.5)


def storage_written(run: Run) -> None:
    for one in gradients_of(run):
        one.untyped_storage().fill_(0)


def rate_below_zero(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] = -0.01


def scaled_beyond_fp32(run: Run) -> None:
    torch._foreach_mul_(gradients_of(run), 1e39)


@pytest.mark.parametrize(
    "change",
    [
        *(clipped_twice_named, counter_changed_by_data, counter_shared, storage_written),
        alias_made_by_data,
        *(rate_below_zero, scaled_beyond_fp32),
    ],
)
def test_what_few_loops_do_between_backward_and_step(change: Callable[[Run], None]) -> None:
    test_what_a_loop_does_between_backward_and_step(change, True)


def test_a_gradient_that_has_an_alias_stays_until_the_step() -> None:
    alone, moved = Run(), Run()
    with with_share(moved) as controller:
        held: list[list[torch.Tensor]] = []
        for run in (alone, moved):
            run.step(3)
            run.backward()
            held.append([one.data for one in gradients_of(run)])
            run.optimizer.step()
            run.optimizer.zero_grad(set_to_none=False)
            run.backward()
        assert gone(controller) == 0
        for aliases in held:
            for one in aliases:
                one.mul_(0.5)
        finish(alone, moved)
        assert_same(alone, moved)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("change", ["removed", "amsgrad"])
def test_groups_that_change(frozen: bool, change: str) -> None:
    def make(parameters: Any) -> Optimizer:
        first, *rest = parameters
        return torch.optim.AdamW([{"params": rest}, {"params": [first]}], lr=1e-2)

    alone, moved = Run(make), Run(make)
    with with_share(moved):
        for run in (alone, moved):
            run.step(3)
            group = run.optimizer.param_groups[1]
            group["params"][0].requires_grad_(not frozen)
            if change == "removed":
                del run.optimizer.param_groups[1]
                run.optimizer.state.pop(group["params"][0])
            elif frozen:
                group["amsgrad"] = True
            run.step(3)
        assert_same(alone, moved)


@pytest.mark.parametrize("pick", ["late", ["0.1"]])
def test_two_parameters_over_one_memory(pick: Any) -> None:
    runs = []
    for share in (False, True):
        torch.manual_seed(1)
        weight = drawn(40, 40)
        model = nn.ParameterList([nn.Parameter(weight), nn.Parameter(weight), drawn(40, 40)])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        options: dict[str, Any] = {"host_fraction": 1.0, "host_pick": pick}
        controller = refit.Controller(optimizer, **options) if share else None
        for _ in range(4):
            (model[0] @ model[1] @ model[2]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        runs.append([one.detach().clone() for one in model])
        if controller is not None:
            controller.close()
    assert all(map(torch.equal, *runs))


def test_parameters_and_gradients_that_wrap_others() -> None:
    runs = []
    for share in (False, True):
        torch.manual_seed(1)
        inner = [nn.Parameter(TwoTensor(drawn(40, 40), drawn(40, 40))), nn.Parameter(drawn(40, 40))]
        optimizer = torch.optim.AdamW(inner, lr=0.1)
        controller = refit.Controller(optimizer, host_fraction=1.0) if share else None
        for _ in range(4):
            (inner[0] * inner[1]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        wrapper: Any = inner[0]
        runs.append([one.detach().clone() for one in (wrapper.a, wrapper.b, inner[1])])
        if controller is not None:
            controller.close()
    assert all(map(torch.equal, *runs))


def test_a_compiled_backward_pass() -> None:
    alone, moved = Run(), Run()
    with with_share(moved) as controller, torch._dynamo.config.patch(compiled_autograd=True):
        backward = torch.compile(Run.backward_of_a_batch, backend="eager")
        for number in range(4):
            batch = drawn(8, WIDTH, generator=torch.Generator().manual_seed(number))
            Run.backward_of_a_batch(alone, batch)
            backward(moved, batch)
            assert gone(controller) == (by_kernel(controller) if number >= 1 else 0)
            finish(alone, moved)
        assert_same(alone, moved)


def test_a_backward_pass_over_weights_of_before_the_step_is_refused(
    twins: tuple[Run, Run, refit.Controller],
) -> None:
    for run in twins[:2]:
        begin(run)
        loss = run.model(torch.ones(2, WIDTH, device=run.device)).sum()
        before = [one._version for one in run.model.parameters()]
        finish(run)
        assert all(
            one._version > version
            for one, version in zip(run.model.parameters(), before, strict=True)
        )
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("fraction", [0.7, 1.0])
def test_two_optimizers_of_the_same_parameters(fraction: float) -> None:
    """The gradients that have left for one of them are stepped by the other first."""
    alone, moved = Run(), Run()
    pairs = [
        (run, torch.optim.SGD(run.model.parameters(), 0.1, momentum=0.9), run.optimizer)
        for run in (alone, moved)
    ]
    for order in (1, -1):
        optimizers = list(pairs[1][1:])[::order]
        with refit.Controller(optimizers, moved.model, host_fraction=fraction) as controller:
            assert controller._host is not None
            for number in range(4):
                for run, *both in pairs:
                    run.backward()
                    left = sum(len(share._left) for share in controller._host._shares)
                    assert number < 2 or run is alone or left > 0
                    for one in both:
                        one.step()
                    run.optimizer.zero_grad()
                    run.steps += 1
            assert_same(alone, moved)


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_the_kernels_are_found_whatever_the_defaults_are(kind: torch.dtype) -> None:
    found = refit.cpu_share.root_of_torch()
    before = torch.get_default_dtype()
    refit.cpu_share.root_of_torch.cache_clear()
    torch.set_default_dtype(kind)
    try:
        with torch.device("meta"):
            assert refit.cpu_share.root_of_torch() == found
    finally:
        torch.set_default_dtype(before)
        refit.cpu_share.root_of_torch.cache_clear()


def test_a_forked_process_has_the_gradients() -> None:
    run = Run()
    with with_share(run) as controller:
        begin(run)
        assert gone(controller) > 0
        child = os.fork()
        if child == 0:
            status = 1
            with suppress(Exception):
                for one in gradients_of(run):
                    one.add_(1)
                run.optimizer.zero_grad(set_to_none=False)
                status = 0
            os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        finish(run)


def test_what_is_refused() -> None:
    run = Run()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"host_fraction": 1.5}, "0 to 1"),
        ({"host_fraction": -0.1}, "0 to 1"),
        ({"host_fraction": math.nan}, "0 to 1"),
        ({"host_fraction": "half"}, "0 to 1"),
        ({"cpu_fraction": 0.5}, 'states="host"'),
        ({"states": "host", "host_fraction": 0.5, "cpu_fraction": 0.8}, "more than host_fraction"),
        ({"host_fraction": 0.5, "host_pick": "early"}, "late, largest"),
        ({"host_pick": ["9.weight"]}, "9.weight"),
        ({"host_pick": [3]}, "texts"),
        ({"any_optimizer": True}, "host_fraction"),
        ({"host_fraction": 0.5, "host_step": "fast"}, "auto or torch"),
    ]
    for options, sentence in wrong:
        with pytest.raises(InvalidError, match=sentence):
            refit.Controller(run.optimizer, run.model, **options)
    with pytest.raises(UnsupportedError, match="pinned"):
        with_share(run, use_pinned_optimizer_offload=False)
    with with_share(run) as controller:
        run.step(2)
    assert controller.state == "closed"


def test_nothing_is_left_when_the_controller_is_let_go_of() -> None:
    alone, moved = Run(), Run()
    controller = with_share(moved)
    begin(alone, moved)
    share = weakref.ref(share_of(controller))
    del controller
    gc.collect()
    assert share() is None
    finish(alone, moved)
    assert_same(alone, moved)
    assert not any(p._post_accumulate_grad_hooks for p in moved.model.parameters())
