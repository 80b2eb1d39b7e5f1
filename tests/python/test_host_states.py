"""Controller(states="host"): states live on the host and visit the device while the optimizer
steps. What a training loop sees of it: the same bits, hooks, closures, schedulers, scalers, groups
that change, checkpoints, copies; and what is refused."""

import contextlib
import copy
import functools
import gc
import io
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import refit
import refit.host_states
import refit.window
import torch
import training
from refit.errors import BusyError, InvalidError, StateError, UnsupportedError
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from training import WIDTH, assert_same, assert_same_states, drawn, refusal_in_a_fork

Optimizer = torch.optim.Optimizer
pytestmark = pytest.mark.usefixtures("default_device")

WINDOW = "64KiB"


class Run(training.Run):
    """A run with two weights whose states live on the host, and two biases whose states stay."""

    def __init__(self, make: training.Maker = training.adamw) -> None:
        super().__init__(make)
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.model.to(self.device)
        self.optimizer = make(self.model.parameters())


def on_host(run: Run, **options: Any) -> refit.Controller:
    options.setdefault("window_bytes", WINDOW)
    return refit.Controller(run.optimizer, run.model, states="host", **options)


@pytest.fixture
def twins() -> Iterator[tuple[Run, Run, refit.Controller]]:
    """A run without refit, and one whose states live on the host."""
    alone, moved = Run(), Run()
    with on_host(moved) as controller:
        yield alone, moved, controller


def views(controller: refit.Controller) -> list[torch.Tensor]:
    assert controller._host is not None
    kept = controller._host._kept.values()
    return [slot.view for one in kept for state in one.states.values() for slot in state.slots]


def is_over_image(controller: refit.Controller, tensor: torch.Tensor) -> bool:
    return any(tensor is one for one in views(controller))


# ---- Steps.


def test_a_step_ends_with_the_bits_of_one_without_refit(
    twins: tuple[Run, Run, refit.Controller],
) -> None:
    alone, moved, controller = twins
    for _ in range(5):
        assert alone.step() == moved.step()
    assert_same(alone, moved)
    big = [one for one in moved.moments() if one.numel() * 4 > 512]
    assert big
    assert all(is_over_image(controller, one) for one in big)
    assert controller.state == "training"


def test_states_that_are_there_already_move_to_the_host() -> None:
    alone, moved = Run(), Run()
    alone.step(2), moved.step(2)
    before = [one.to("cpu", copy=True) for one in moved.moments()]
    with on_host(moved) as controller:
        after = [one.cpu() for one in moved.moments()]
        assert all(map(torch.equal, before, after))
        big = [one for one in moved.moments() if one.numel() * 4 > 512]
        assert all(is_over_image(controller, one) for one in big)
        alone.step(2), moved.step(2)
        assert_same(alone, moved)
    assert not any(is_over_image(controller, one) for one in moved.moments())
    alone.step(), moved.step()
    assert_same(alone, moved)


def test_a_step_allocates_its_windows_once(twins: tuple[Run, Run, refit.Controller]) -> None:
    _, moved, controller = twins
    moved.step(3)
    assert controller._host is not None
    memory = [home._memory for home in controller._host._homes]
    moved.step(3)
    assert [home._memory for home in controller._host._homes] == memory
    assert controller.stats()["refit/window_bytes"] > 0
    moved.optimizer.state_dict()
    assert controller.stats()["refit/window_bytes"] == 0


def test_a_step_like_the_one_before_prepares_nothing_anew(
    twins: tuple[Run, Run, refit.Controller], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of small parameters would pay for each list and each tensor over a window."""
    alone, moved, _ = twins
    packed: list[int] = []
    viewed: list[Any] = []
    pack, empty = refit.window._array, torch.empty
    monkeypatch.setattr(
        refit.window, "_array", lambda parts: packed.append(len(parts)) or pack(parts)
    )
    alone.step(3), moved.step(3)
    assert packed

    def watched(*size: Any, **options: Any) -> torch.Tensor:
        if size == (0,):
            viewed.append(options)
        return empty(*size, **options)

    packed.clear()
    monkeypatch.setattr(torch, "empty", watched)
    alone.step(3), moved.step(3)
    assert packed == viewed == []
    assert_same(alone, moved)


def test_figures_of_a_step(twins: tuple[Run, Run, refit.Controller]) -> None:
    _, moved, controller = twins
    moved.step()
    moved.optimizer.state_dict()
    stats = controller.stats()
    large = sum(view.nbytes for view in views(controller))
    assert stats["refit/step_in_bytes"] == 0
    assert stats["refit/step_out_bytes"] == large
    moved.step()
    moved.optimizer.state_dict()
    stats = controller.stats()
    assert stats["refit/step_in_bytes"] == stats["refit/step_out_bytes"] == large
    assert stats["refit/step_s"] > 0
    assert stats["refit/step_exposed_s"] > 0


@pytest.mark.parametrize("prefetch", [True, False])
def test_parameters_without_gradients_do_not_travel(prefetch: bool) -> None:
    alone, moved = Run(), Run()
    with on_host(moved, prefetch=prefetch) as controller:
        for number in range(6):
            for run in (alone, moved):
                run.backward()
                if number in (2, 3):
                    run.model[0].weight.grad = None
                run.optimizer.step()
                run.optimizer.zero_grad()
                run.steps += 1
            if number in (2, 3):
                moved.optimizer.state_dict()
                small = controller.stats()["refit/step_out_bytes"]
        moved.optimizer.state_dict()
        assert small < controller.stats()["refit/step_out_bytes"]
        assert_same(alone, moved)


def test_a_step_without_any_gradient_does_nothing(
    twins: tuple[Run, Run, refit.Controller],
) -> None:
    alone, moved, _ = twins
    for run in (alone, moved):
        run.optimizer.step()
        run.step(2)
        run.optimizer.step()
    assert_same(alone, moved)


def test_groups_that_are_added_and_rates_that_change() -> None:
    alone, moved = Run(), Run()
    for run in (alone, moved):
        run.optimizer = torch.optim.AdamW(run.model[0].parameters(), lr=1e-2)
    with on_host(moved):
        for number in range(6):
            for run in (alone, moved):
                if number == 2:
                    run.optimizer.add_param_group({"params": [*run.model[2].parameters()]})
                run.optimizer.param_groups[0]["lr"] *= 0.5
                run.step()
        assert_same(alone, moved)


def test_a_parameter_that_needs_a_gradient_later() -> None:
    alone, moved = Run(), Run()
    for run in (alone, moved):
        run.model[0].weight.requires_grad_(False)
    with on_host(moved) as controller:
        for number in range(4):
            for run in (alone, moved):
                run.model[0].weight.requires_grad_(number > 1)
                run.step()
        assert_same(alone, moved)
        state = moved.optimizer.state[moved.model[0].weight]
        assert is_over_image(controller, state["exp_avg"])


@pytest.mark.parametrize("prefetch", [True, False])
def test_the_first_windows_come_in_behind_the_backward_pass(prefetch: bool) -> None:
    alone, moved = Run(), Run()
    with on_host(moved, prefetch=prefetch) as controller:
        alone.step(), moved.step()
        assert controller._host is not None
        home = controller._host._homes[0]
        for way in ("step", "read", "write", "other gradients", "clear"):
            alone.backward(), moved.backward()
            assert (home.begun is not None) == prefetch
            states = [run.optimizer.state[run.model[0].weight] for run in (alone, moved)]
            if way == "read":
                assert torch.equal(*(state["exp_avg"].cpu() for state in states))
                assert home.begun is None
            if way == "write":
                for state in states:
                    state["exp_avg"].add_(1)
            if way == "clear":
                controller.clear()
                assert controller.stats()["refit/window_bytes"] == 0
            if way == "other gradients":
                for run in (alone, moved):
                    run.model[2].weight.grad = None
            for run in (alone, moved):
                run.optimizer.step()
                run.optimizer.zero_grad()
                run.steps += 1
            assert home.begun is None
            assert_same(alone, moved)
    moved.backward()
    assert not moved.model[2].bias._post_accumulate_grad_hooks


def test_a_hook_on_another_thread_does_not_wait_for_a_call_in_the_middle() -> None:
    late: list[bool] = []

    class Differentiating(torch.optim.SGD):
        """Its step runs a backward pass, whose hooks a GPU calls on a thread of PyTorch's."""

        def step(self, closure: Any = None) -> Any:
            hook = threading.Thread(target=begin)
            hook.start()
            hook.join(5)
            late.append(hook.is_alive())
            return super().step(closure)

    run = Run(lambda parameters: Differentiating(parameters, lr=0.1, momentum=0.9))
    with on_host(run, any_optimizer=True) as controller:
        assert controller._host is not None
        begin = functools.partial(controller._host.come_in_early, run.optimizer)
        run.step(2)
    assert late
    assert not any(late)


def test_a_step_that_a_cuda_graph_would_capture_is_refused(
    twins: tuple[Run, Run, refit.Controller], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, moved, controller = twins
    alone.step(), moved.step()
    if training.DEVICE == "cpu":  # which has no graphs

        def capturing(device: torch.device) -> None:
            assert device == torch.device("cpu")
            raise StateError("a CUDA graph is being captured")

        captured: Callable[[], Any] = contextlib.nullcontext
        monkeypatch.setattr(refit.host_states, "refuse_capture", capturing)
    else:

        def captured() -> Any:
            return torch.cuda.graph(torch.cuda.CUDAGraph())

    moved.backward()
    for call in (moved.optimizer.step, controller.resume_step):
        with pytest.raises(StateError, match="graph is being captured"), captured():
            call()
    monkeypatch.undo()
    moved.optimizer.zero_grad()
    alone.step(), moved.step()
    assert_same(alone, moved)


def test_several_optimizers_in_one_controller() -> None:
    def halves(run: Run) -> list[Optimizer]:
        first, last = run.model[0].parameters(), run.model[2].parameters()
        return [torch.optim.AdamW(first, lr=1e-2), torch.optim.RMSprop(last, lr=1e-3)]

    alone, moved = Run(), Run()
    pairs = halves(alone), halves(moved)
    with refit.Controller(pairs[1], moved.model, states="host", window_bytes=WINDOW):
        for _ in range(3):
            for run, pair in zip((alone, moved), pairs, strict=True):
                run.backward()
                for one in pair:
                    one.step()
                    one.zero_grad()
                run.steps += 1
        for mine, theirs in zip(*pairs, strict=True):
            assert_same_states(mine.state_dict(), theirs.state_dict())


def test_states_are_born_beside_smaller_windows_of_another_optimizer() -> None:
    """Adagrad has states before its first step, and its windows are there when Adam's are born."""
    alone, moved = Run(), Run()
    pairs = []
    for run in (alone, moved):
        small = torch.optim.Adagrad([run.model[2].weight], lr=0.1)
        pairs.append([small, torch.optim.Adam([run.model[0].weight], lr=1e-2)])
    with refit.Controller(pairs[1], moved.model, states="host", prefetch=False):
        for run, both in zip((alone, moved), pairs, strict=True):
            for _ in range(3):
                run.backward()
                for one in both:
                    one.step()
                run.model.zero_grad()
        for mine, theirs in zip(alone.model.parameters(), moved.model.parameters(), strict=True):
            assert torch.equal(mine, theirs)


def test_a_large_parameter_is_stepped_in_parts() -> None:
    def make() -> tuple[nn.Parameter, Optimizer]:
        torch.manual_seed(1)
        parameter = nn.Parameter(drawn(200, 301).t())
        return parameter, torch.optim.AdamW([parameter], lr=0.1)

    (one, alone), (other, moved) = make(), make()
    with refit.Controller(moved, states="host", window_bytes=WINDOW) as controller:
        counts = []
        for number in range(3):
            for parameter, optimizer in ((one, alone), (other, moved)):
                torch.manual_seed(number)
                parameter.grad = drawn(200, 301).t()
                optimizer.step()
            counter = moved.state[other]["step"]
            counts.append((counter.item(), id(counter)))
            assert controller.stats()["refit/window_bytes"] <= 3 * (64 << 10)
        assert controller.resident == []
        assert [number for number, _ in counts] == [1, 2, 3]
        assert len({identity for _, identity in counts[1:]}) == 1
        assert_same_states(alone.state_dict(), moved.state_dict())
        assert torch.equal(one, other)
        # A gradient that lies otherwise cannot be divided: the window grows for this step.
        for parameter, optimizer in ((one, alone), (other, moved)):
            torch.manual_seed(9)
            parameter.grad = drawn(301, 200)
            optimizer.step()
        assert controller.stats()["refit/window_bytes"] > 2 * 301 * 200 * 4
        assert "the window grows" in controller.resident[0][1]
        assert_same_states(alone.state_dict(), moved.state_dict())
        assert torch.equal(one, other)


def test_a_state_larger_than_a_window_that_cannot_be_split_grows_it() -> None:
    parameter = nn.Parameter(drawn(200, 200))
    optimizer = torch.optim.Muon([parameter])
    with refit.Controller(optimizer, states="host", window_bytes=WINDOW) as controller:
        for _ in range(2):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        assert controller.resident == [
            (
                "0.0",
                "its states take 160000 bytes and are stepped as a whole: the window grows to "
                "them, above its 65536 bytes",
            )
        ]
        assert controller.stats()["refit/window_bytes"] >= 160000


# ---- Hooks, closures, schedulers, scalers.


def test_hooks_run_once_a_step_at_their_places(twins: tuple[Run, Run, refit.Controller]) -> None:
    _, moved, controller = twins
    seen: list[str] = []

    def says(name: str) -> Callable[..., None]:
        def hook(optimizer: Optimizer, *_: Any) -> None:
            state = optimizer.state.get(moved.model[0].weight, {})
            steps = int(state["step"]) if state else 0
            total = float(state["exp_avg"].abs().sum()) if state else 0.0
            seen.append(f"{name}{steps}")
            assert (total > 0) == (steps > 0)

        return hook

    handle = moved.optimizer.register_step_pre_hook(says("pre"))
    moved.optimizer.register_step_post_hook(says("post"))
    every = register_optimizer_step_pre_hook(says("all"))
    try:
        moved.step(2)
    finally:
        every.remove()
    assert seen == ["all0", "pre0", "post1", "all1", "pre1", "post2"]
    handle.remove()
    moved.step()
    assert seen[6:] == ["post3"]
    controller.close()
    moved.step()
    assert seen[7:] == ["post4"]


def test_a_hook_that_changes_gradients_runs_before_the_step() -> None:
    alone, moved = Run(), Run()

    def clip(optimizer: Optimizer, *_: Any) -> None:
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1e-4)

    with on_host(moved):
        for run in (alone, moved):
            run.optimizer.register_step_pre_hook(clip)  # behind the hook of the controller
            run.optimizer.register_step_pre_hook(lambda *_: None)
            run.step(3)
        assert_same(alone, moved)


def test_a_hook_that_changes_the_arguments() -> None:
    alone, moved = Run(), Run()
    calls: list[int] = []

    def with_closure(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        return (*args[:1], lambda: calls.append(1) or 7.0), kwargs

    with on_host(moved):
        for run in (alone, moved):
            run.optimizer.register_step_pre_hook(with_closure)
            run.backward()
            assert run.optimizer.step() == 7.0
    assert len(calls) == 2


def test_a_hook_that_fails_leaves_everything_as_it_was(
    twins: tuple[Run, Run, refit.Controller],
) -> None:
    alone, moved, _ = twins
    alone.step(), moved.step()

    def fail(*_: Any) -> None:
        raise KeyError("a hook")

    for _ in range(2):
        handle = moved.optimizer.register_step_pre_hook(fail)
        moved.backward()
        with pytest.raises(KeyError, match="a hook"):
            moved.optimizer.step()
        handle.remove()
        moved.optimizer.zero_grad()
    alone.step(), moved.step()
    assert_same(alone, moved)


@pytest.mark.parametrize("by_name", [True, False])
def test_a_closure_is_called_once_and_its_loss_returned(by_name: bool) -> None:
    alone, moved = Run(), Run()
    calls: list[bool] = []
    with on_host(moved):
        for run in (alone, moved):

            def closure(run: Run = run) -> torch.Tensor:
                calls.append(torch.is_grad_enabled())
                run.optimizer.zero_grad()
                return torch.tensor(run.backward())

            for _ in range(3):
                loss = (
                    run.optimizer.step(closure=closure) if by_name else run.optimizer.step(closure)
                )
                run.steps += 1
                assert float(loss) > 0
        assert calls == [True] * 6
        assert_same(alone, moved)


def test_a_closure_that_fails_changes_nothing(twins: tuple[Run, Run, refit.Controller]) -> None:
    alone, moved, _ = twins
    alone.step(), moved.step()

    def closure() -> float:
        raise ValueError("no batch")

    with pytest.raises(ValueError, match="no batch"):
        moved.optimizer.step(closure)
    alone.step(), moved.step()
    assert_same(alone, moved)


@pytest.mark.parametrize("before", [True, False])
def test_schedulers_made_before_and_after_the_controller(before: bool) -> None:
    def schedule(run: Run) -> Any:
        return torch.optim.lr_scheduler.StepLR(run.optimizer, 1, 0.5)

    alone, moved = Run(), Run()
    schedulers = [schedule(alone)]
    if before:
        schedulers.append(schedule(moved))
    with on_host(moved) as controller, warnings.catch_warnings():
        warnings.simplefilter("error")
        if not before:
            schedulers.append(schedule(moved))
        for _ in range(3):
            for run, scheduler in zip((alone, moved), schedulers, strict=True):
                run.step()
                scheduler.step()
        assert_same(alone, moved)
        controller.close()
        for run, scheduler in zip((alone, moved), schedulers, strict=True):
            run.step()
            scheduler.step()
        assert_same(alone, moved)


@pytest.mark.parametrize("fused", [True, False])
def test_a_gradient_scaler_skips_steps(fused: bool) -> None:
    def make(parameters: Any) -> Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2, fused=fused)

    alone, moved = Run(make), Run(make)
    with on_host(moved) as controller:
        scalers = [
            torch.amp.GradScaler(torch.device(training.DEVICE).type, init_scale=4.0)
            for _ in range(2)
        ]
        moved_bytes = []
        for number in range(5):
            for run, scaler in zip((alone, moved), scalers, strict=True):
                run.optimizer.zero_grad()
                source = torch.Generator().manual_seed(number)
                loss = run.model(drawn(8, WIDTH, generator=source)).pow(2).mean()
                scaler.scale(loss).backward()
                if number in (0, 3):
                    run.model[0].weight.grad[0] = torch.inf
                before = [p.clone() for p in run.model.parameters()]
                scaler.step(run.optimizer)
                scaler.update()
                after = list(run.model.parameters())
                same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
                assert same == (number in (0, 3))
            moved_bytes.append(controller.stats()["refit/step_out_bytes"])
        assert moved_bytes[0] == 0
        assert scalers[0].get_scale() == scalers[1].get_scale()
        for mine, theirs in zip(alone.model.parameters(), moved.model.parameters(), strict=True):
            assert torch.equal(mine, theirs)
        assert_same_states(alone.optimizer.state_dict(), moved.optimizer.state_dict())


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("wrapped_first", [True, False])
def test_the_optimizer_of_accelerate(scaled: bool, wrapped_first: bool) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.Accelerator(cpu=True)
    from accelerate.optimizer import AcceleratedOptimizer

    alone, moved = Run(), Run()
    scaler = (
        torch.amp.GradScaler(torch.device(training.DEVICE).type, init_scale=1.0) if scaled else None
    )

    def wrap() -> Any:
        return AcceleratedOptimizer(moved.optimizer, device_placement=False, scaler=scaler)

    inner = moved.optimizer
    wrapped = wrap() if wrapped_first else None
    with refit.Controller(wrapped or inner, moved.model, states="host", window_bytes=WINDOW):
        wrapped = wrapped or wrap()
        for _ in range(3):
            alone.step()
            source = torch.Generator().manual_seed(moved.steps)
            loss = moved.model(drawn(8, WIDTH, generator=source)).pow(2).mean()
            (loss if scaler is None else scaler.scale(loss)).backward()
            wrapped.step()
            wrapped.zero_grad()
            assert not wrapped.step_was_skipped
            moved.steps += 1
        assert_same(alone, moved)


def test_a_step_that_torch_compiles() -> None:
    def make(parameters: Any) -> Optimizer:  # on a GPU the compiler switches to capturable
        return torch.optim.AdamW(parameters, lr=1e-2, capturable=training.DEVICE != "cpu")

    alone, moved = Run(make), Run(make)
    with on_host(moved):
        compiled = torch.compile(moved.optimizer.step, backend="eager")
        for _ in range(3):
            alone.step()
            moved.backward()
            compiled()
            moved.optimizer.zero_grad()
            moved.steps += 1
        assert_same(alone, moved)
    torch._dynamo.reset()


def test_code_that_replaces_step_on_the_object() -> None:
    alone, moved = Run(), Run()
    calls: list[int] = []
    before = moved.optimizer.step
    moved.optimizer.step = lambda *a, **k: (calls.append(1), before(*a, **k))[1]
    with on_host(moved):
        alone.step(3), moved.step(3)
        assert_same(alone, moved)
    assert len(calls) == 3


# ---- What a user does with states between steps.


def test_states_are_read_and_written_between_steps(
    twins: tuple[Run, Run, refit.Controller],
) -> None:
    alone, moved, _ = twins
    for number in range(4):
        assert alone.step() == moved.step()
        for run in (alone, moved):
            state = run.optimizer.state[run.model[0].weight]
            assert state["exp_avg"].is_contiguous()
            if number == 1:
                state["exp_avg"].mul_(0.5)
            if number == 2:
                state["exp_avg_sq"] = state["exp_avg_sq"].clone() + 1
    assert_same(alone, moved)


def test_states_that_are_dropped_are_born_again(twins: tuple[Run, Run, refit.Controller]) -> None:
    alone, moved, controller = twins
    for run in (alone, moved):
        run.step(2)
        run.optimizer.state.clear()
        run.step(2)
    assert_same(alone, moved)
    for run in (alone, moved):
        run.optimizer.state[run.model[0].weight] = {}
        run.step(2)
    assert_same(alone, moved)
    assert is_over_image(controller, moved.optimizer.state[moved.model[0].weight]["exp_avg"])


def test_a_state_is_read_by_another_thread(twins: tuple[Run, Run, refit.Controller]) -> None:
    alone, moved, _ = twins
    sums: list[float] = []

    def read() -> None:
        state = moved.optimizer.state[moved.model[0].weight]
        for _ in range(50):
            sums.append(float(state["exp_avg"].sum()))

    alone.step(), moved.step()
    thread = threading.Thread(target=read)
    thread.start()
    alone.step(30), moved.step(30)
    thread.join()
    assert len(sums) == 50
    assert_same(alone, moved)


def test_a_copy_of_the_optimizer_is_one_of_its_own(
    twins: tuple[Run, Run, refit.Controller],
) -> None:
    alone, moved, controller = twins
    alone.step(2), moved.step(2)
    other = copy.deepcopy(moved)
    again = pickle.loads(pickle.dumps(moved.optimizer))
    assert_same_states(again.state_dict(), alone.optimizer.state_dict())
    assert not any(is_over_image(controller, one) for one in other.moments())
    alone.step(2), moved.step(2)
    assert_same(alone, moved)
    controller.close()
    fresh = Run()
    fresh.step(2)
    other.optimizer.load_state_dict(other.optimizer.state_dict())  # to the device
    other.step(2), fresh.step(2)
    assert_same(fresh, other)


def test_a_state_dict_goes_to_an_ordinary_run_and_back(
    twins: tuple[Run, Run, refit.Controller],
) -> None:
    alone, moved, controller = twins
    alone.step(2), moved.step(2)
    held = io.BytesIO()
    torch.save(moved.optimizer.state_dict(), held)
    held.seek(0)
    saved = torch.load(held)
    assert_same_states(saved, alone.optimizer.state_dict())
    expected = copy.deepcopy(alone.optimizer.state_dict())
    alone.step(), moved.step()
    for run in (alone, moved):
        run.optimizer.load_state_dict(copy.deepcopy(saved))
    assert_same_states(moved.optimizer.state_dict(), expected)
    large = [one for one in moved.moments() if one.numel() * 4 > 512]
    assert all(is_over_image(controller, one) for one in large)
    alone.step(2), moved.step(2)
    assert_same(alone, moved)


def test_a_state_dict_is_loaded_before_the_first_step() -> None:
    alone, moved = Run(), Run()
    alone.step(2)
    with on_host(moved) as controller:
        moved.model.load_state_dict(alone.model.state_dict())
        moved.optimizer.load_state_dict(copy.deepcopy(alone.optimizer.state_dict()))
        moved.steps = alone.steps
        large = [one for one in moved.moments() if one.numel() * 4 > 512]
        assert large
        assert all(is_over_image(controller, one) for one in large)
        alone.step(2), moved.step(2)
        assert_same(alone, moved)


def test_a_state_dict_of_another_type_is_converted() -> None:
    alone, moved = Run(), Run()
    alone.step(), moved.step()
    saved = copy.deepcopy(alone.optimizer.state_dict())
    for state in saved["state"].values():
        state["exp_avg"] = state["exp_avg"].double()
    with on_host(moved):
        for run in (alone, moved):
            run.optimizer.load_state_dict(copy.deepcopy(saved))
            run.step()
        assert_same(alone, moved)


def test_what_is_loaded_makes_no_copy_on_the_device(
    twins: tuple[Run, Run, refit.Controller], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, moved, _ = twins
    alone.step()
    seen: list[int] = []
    real = Optimizer._process_value_according_to_param_policy

    def process(param: torch.Tensor, value: torch.Tensor, *rest: Any) -> torch.Tensor:
        if value.numel() * 4 > 512:
            seen.append(param.numel())
        return real(param, value, *rest)

    monkeypatch.setattr(
        Optimizer, "_process_value_according_to_param_policy", staticmethod(process)
    )
    moved.optimizer.load_state_dict(alone.optimizer.state_dict())
    assert seen
    assert set(seen) == {0}  # a stand-in of the host, not the parameter


def test_hooks_of_others_see_the_whole_state_dict(
    twins: tuple[Run, Run, refit.Controller],
) -> None:
    alone, moved, _ = twins
    alone.step(2), moved.step()
    seen: list[int] = []

    def look(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        tensors = [v for state in given["state"].values() for v in state.values()]
        seen.append(len(tensors))
        return {**given}

    moved.optimizer.register_load_state_dict_pre_hook(look)
    moved.optimizer.load_state_dict(alone.optimizer.state_dict())
    assert seen == [12]
    assert_same_states(alone.optimizer.state_dict(), moved.optimizer.state_dict())


def test_a_state_dict_that_does_not_fit_changes_nothing(
    twins: tuple[Run, Run, refit.Controller],
) -> None:
    alone, moved, _ = twins
    alone.step(), moved.step()
    wrong = alone.optimizer.state_dict()
    wrong["param_groups"] = []
    with pytest.raises(ValueError, match="parameter group"):
        moved.optimizer.load_state_dict(wrong)
    alone.step(), moved.step()
    assert_same(alone, moved)


# ---- Checkpoints.


def test_a_checkpoint_reads_the_image_and_no_step_tears_it(
    twins: tuple[Run, Run, refit.Controller],
) -> None:
    alone, moved, controller = twins
    alone.step(2), moved.step(2)
    with controller.checkpoint() as state:
        large = [v for one in state["state"].values() for v in one.values() if v.numel() * 4 > 512]
        assert all(is_over_image(controller, one) for one in large)
        assert_same_states(state, alone.optimizer.state_dict())
        moved.backward()
        for _ in range(2):
            with pytest.raises(BusyError, match="checkpoint"):
                moved.optimizer.step()
        assert_same_states(state, alone.optimizer.state_dict())
    alone.backward()
    for run in (alone, moved):
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.steps += 1
    assert_same(alone, moved)


def test_distributed_checkpoints_read_the_image(
    twins: tuple[Run, Run, refit.Controller], tmp_path: Path
) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    alone, moved, controller = twins
    alone.step(2), moved.step(2)
    warnings.simplefilter("ignore")
    with controller.checkpoint() as state:
        dcp.save({"optimizer": state}, checkpoint_id=tmp_path / "a")
    with controller.checkpoint() as state:
        future = dcp.async_save({"optimizer": state}, checkpoint_id=tmp_path / "b")
        moved.backward()
        future.result()
    expected = copy.deepcopy(alone.optimizer.state_dict())
    for run in (alone, moved):
        run.optimizer.zero_grad()
        run.step(2)
    for name in ("a", "b"):
        with controller.checkpoint() as state:
            loaded = {"optimizer": copy.deepcopy(state)}
        dcp.load(loaded, checkpoint_id=tmp_path / name)
        assert_same_states(loaded["optimizer"], expected)
    alone.optimizer.load_state_dict(expected)
    moved.optimizer.load_state_dict(loaded["optimizer"])
    alone.step(), moved.step()
    assert_same(alone, moved)


# ---- The cycle, and the share that stays.


@pytest.mark.parametrize("grads", ["keep", "discard", "zero"])
def test_a_refit_has_nothing_to_clear_but_gradients(grads: Any) -> None:
    alone, moved = Run(), Run()
    with on_host(moved, grads=grads) as controller:
        for _ in range(3):
            alone.step(), moved.step()
            alone.backward(), moved.backward()
            if grads != "keep":
                controller.accumulating = False
            controller.clear()
            assert controller.state == "cleared"
            assert controller.stats()["refit/window_bytes"] == 0
            controller.restore()
            controller.join()
            for run in (alone, moved):
                if grads != "keep":
                    run.optimizer.zero_grad()
                run.step()
        assert_same(alone, moved)


def test_a_step_while_the_share_is_away_brings_it_back() -> None:
    alone, moved = Run(), Run()
    with on_host(moved, resident_bytes=24 * 24 * 8) as controller:
        for _ in range(3):
            alone.step(), moved.step()
            controller.clear()
            state = moved.optimizer.state[moved.model[0].weight]
            assert state["exp_avg"].untyped_storage().nbytes() == 0
        controller.restore()
        assert_same(alone, moved)


@pytest.mark.parametrize(
    ("share", "stay"),
    [
        ({"resident_bytes": 0}, 0),
        ({"resident_bytes": 24 * 24 * 8}, 1),
        ({"resident_bytes": "1GiB"}, 2),
        ({"host_fraction": 1.0}, 0),
        ({"host_fraction": 0.0}, 2),
        ({"host_fraction": 0.4}, 1),
    ],
)
def test_a_share_of_the_states_stays_on_the_device(share: dict[str, Any], stay: int) -> None:
    alone, moved = Run(), Run()
    with on_host(moved, **share) as controller:
        alone.step(3), moved.step(3)
        assert_same(alone, moved)
        weights = [moved.model[0].weight, moved.model[2].weight]
        stays = [
            not is_over_image(controller, moved.optimizer.state[w]["exp_avg"]) for w in weights
        ]
        assert stays.count(True) == stay
        assert stays == sorted(stays, reverse=True)
        named = [name for name, why in controller.resident if "resident_bytes" in why]
        assert named[:1] == (["0.weight"] if stay else [])


@pytest.mark.parametrize(
    "options",
    [
        {"states": "disk"},
        {"states": "host", "resident_bytes": 1, "host_fraction": 0.5},
        {"states": "host", "host_fraction": 1.5},
        {"states": "host", "host_fraction": float("nan")},
        {"states": "cycle", "resident_bytes": 1},
        {"states": "cycle", "any_optimizer": True},
    ],
    ids=str,
)
def test_keywords_that_say_nothing(options: dict[str, Any]) -> None:
    run = Run()
    with pytest.raises(InvalidError):
        refit.Controller(run.optimizer, run.model, **options)
    refit.Controller(run.optimizer, run.model).close()


@pytest.mark.parametrize("options", [{"window_bytes": 1}, {"windows": 0}, {"windows": 5}], ids=str)
def test_sizes_out_of_range_are_refused(options: dict[str, Any]) -> None:
    run = Run()
    with pytest.raises(refit.ConfigError):
        refit.Controller(run.optimizer, run.model, states="host", **options)
    refit.Controller(run.optimizer, run.model).close()


def test_a_share_that_is_no_number_is_refused_by_its_name() -> None:
    for nbytes in ("2GB", -1, "much"):
        with pytest.raises(InvalidError, match="resident_bytes="):
            on_host(Run(), resident_bytes=nbytes)


def test_sizes_come_from_the_configuration_and_keywords_go_over_it() -> None:
    config = refit.load_config(offload={"window_bytes": "128KiB", "windows": 2})
    for given, expected in (({}, (128 << 10, 2)), ({"window_bytes": 1 << 20}, (1 << 20, 2))):
        run = Run()
        with refit.Controller(run.optimizer, config=config, states="host", **given) as controller:
            assert controller._host is not None
            home = controller._host._homes[0]
            assert (home._window_bytes, home._windows) == expected


# ---- What is refused.


@pytest.mark.parametrize("kind", ["LBFGS", "SparseAdam"])
def test_an_optimizer_that_is_refused_stays_as_it_was(kind: str) -> None:
    model = nn.Linear(40, 40).to(training.DEVICE)
    optimizer = getattr(torch.optim, kind)(model.parameters())
    if kind == "SparseAdam":
        refit.Controller(optimizer, model, states="host").close()
        return
    hooks = [len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)]
    with pytest.raises(UnsupportedError, match='states="cycle"'):
        refit.Controller(optimizer, model, states="host")
    after = [len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)]
    assert after == hooks
    refit.Controller(optimizer, model).close()


def test_pageable_host_memory_is_refused() -> None:
    run = Run()
    with pytest.raises(UnsupportedError):
        refit.Controller(run.optimizer, states="host", use_pinned_optimizer_offload=False)
    run.step(2)
    assert not run.optimizer._optimizer_step_post_hooks


def test_too_small_a_budget_leaves_everything_as_it_was() -> None:
    alone, moved = Run(), Run()
    alone.step(), moved.step()
    with pytest.raises(refit.BudgetError):
        on_host(moved, offload_budget_bytes="4KiB")
    alone.step(), moved.step()
    assert_same(alone, moved)


def test_a_second_controller_is_refused(twins: tuple[Run, Run, refit.Controller]) -> None:
    alone, moved, _ = twins
    for options in ({"states": "host"}, {}):
        with pytest.raises(BusyError, match="has a controller already"):
            refit.Controller(moved.optimizer, **options)
    alone.step(2), moved.step(2)
    assert_same(alone, moved)


def test_a_closed_controller_and_a_forked_process_are_refused() -> None:
    run = Run()
    controller = on_host(run)
    run.step()
    run.backward()
    assert "process" in refusal_in_a_fork(run.optimizer.step)
    assert "process" in refusal_in_a_fork(controller.resume_step)
    state = run.optimizer.state[run.model[0].weight]["exp_avg"]
    assert "this Controller belongs to process" in refusal_in_a_fork(lambda: state.sum())
    assert "this Controller belongs to process" in refusal_in_a_fork(run.optimizer.state_dict)
    controller.close()
    controller.close()
    with pytest.raises(StateError, match="closed"):
        controller.resume_step()
    run.step()


def test_there_is_nothing_to_resume(twins: tuple[Run, Run, refit.Controller]) -> None:
    _, moved, controller = twins
    controller.resume_step()
    moved.step()
    controller.resume_step()
    with refit.Controller(Run().optimizer) as other:
        other.resume_step()


# ---- The end.


def test_a_controller_without_references_gives_the_states_back() -> None:
    alone, moved = Run(), Run()
    controller = on_host(moved)
    reference = weakref.ref(controller)
    alone.step(2), moved.step(2)
    del controller
    gc.collect()
    assert reference() is None
    alone.step(2), moved.step(2)
    assert_same(alone, moved)
    assert not moved.optimizer._optimizer_step_post_hooks


def test_a_tensor_over_the_image_outlives_the_controller() -> None:
    run = Run()
    controller = on_host(run)
    run.step(2)
    state = run.optimizer.state[run.model[0].weight]["exp_avg"]
    expected = state.clone()
    controller.close()
    del controller
    run.step(3)
    gc.collect()
    assert torch.equal(state, expected)
    state.add_(1)


def test_one_controller_after_another() -> None:
    alone, moved = Run(), Run()
    for number in range(4):
        options: dict[str, Any] = {"states": "host"} if number % 2 else {}
        with refit.Controller(moved.optimizer, moved.model, **options) as controller:
            alone.step(2), moved.step(2)
            controller.clear()
            controller.restore()
            alone.step(), moved.step()
        assert_same(alone, moved)


def let_go(held: list[refit.Controller]) -> None:
    held.clear()
    gc.collect()


def test_the_device_has_no_memory_for_the_states_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone, moved = Run(), Run()
    controller = on_host(moved)
    alone.step(2), moved.step(2)

    def none(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("none left")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", none)
        with pytest.raises(refit.DeviceMemoryError, match=f"no memory on {training.DEVICE}"):
            controller.close()
    assert controller.state == "training"
    alone.step(2), moved.step(2)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", none)
        remedy = r"load_state_dict\(optimizer.state_dict\(\)\).*none left"
        held = [controller]
        del controller
        with pytest.warns(RuntimeWarning, match=remedy):
            let_go(held)
    assert not moved.optimizer._optimizer_step_post_hooks
    moved.optimizer.load_state_dict(moved.optimizer.state_dict())  # once there is memory again
    alone.step(2), moved.step(2)
    assert_same(alone, moved)


def test_a_parameter_that_leaves_the_optimizer_is_let_go_of() -> None:
    run = Run()
    with on_host(run) as controller:
        run.step(2)
        assert controller._host is not None
        group = run.optimizer.param_groups[0]
        old = group["params"][0]
        group["params"][0] = run.model[0].weight = nn.Parameter(drawn(24, 24))
        run.optimizer.state.pop(old)
        reference = weakref.ref(old)
        del old
        run.step(2)
        run.step(2)
        gc.collect()
        assert reference() is None


def test_a_parameter_that_requires_no_gradient_and_is_given_one_has_its_states_in_windows() -> None:
    parameter = torch.ones(40_000, device=training.DEVICE)
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])
    optimizer.param_groups[0]["params"] = [parameter]
    with refit.Controller(optimizer, states="host", window_bytes="64KiB") as controller:
        for _ in range(2):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            controller.clear()
            assert controller.stats()["refit/step_out_bytes"] == 2 * 4 * 40_000
    assert torch.equal(parameter, torch.full_like(parameter, float(parameter[0])))
    assert parameter[0] < 1
