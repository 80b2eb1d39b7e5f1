"""HostStates: states visit the device in windows while the optimizer steps. What
travels, when and in which parts, where states stay, and what they take of the device's memory."""

import contextlib
import copy
import gc
import importlib
import random
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import refit
import refit.step.host_states
import refit.step.probe
import refit.step.window
import torch
import training
from refit.errors import StateError, UnsupportedError
from refit.step.host_buffer import HostBuffer
from schedules import SHARE, WINDOWS, Layers, Schedule, Twins, lives_on_host, same
from torch import nn
from torch.profiler import ProfilerActivity, profile
from training import drawn

Optimizer = torch.optim.Optimizer
pytestmark = pytest.mark.usefixtures("default_device")

LARGE = 2 * 4 * (24 * 96 + 2 * 96 * 96)
"""Bytes of the states of ``Layers`` that live on the host."""


def window_bytes(controller: refit.Controller) -> float:
    return controller.stats()["refit/window_bytes"]


# ---- What a step moves.


def test_a_step_tells_what_it_has_moved() -> None:
    with Twins(WINDOWS) as twins:
        for moved in (0, LARGE):
            twins.step()
            twins.moved.optimizer.state_dict()
            stats = twins.controller.stats()
            assert stats["refit/step_in_bytes"] == moved
            assert stats["refit/step_out_bytes"] == LARGE
        assert stats["refit/step_s"] > 0
        assert stats["refit/step_blocked_s"] > 0


@pytest.mark.parametrize("prefetch", [True, False])
def test_states_of_parameters_without_gradients_do_not_travel(prefetch: bool) -> None:
    with Twins(WINDOWS, prefetch=prefetch) as twins:
        for number in range(6):
            twins.backward()
            for run in twins:
                if number in (2, 3):
                    run.model[0].weight.grad = None
            twins.finish()
            twins.moved.optimizer.state_dict()
            small = 8 * 24 * 96 if number in (2, 3) else 0
            assert twins.controller.stats()["refit/step_out_bytes"] == LARGE - small


def test_a_step_like_the_one_before_prepares_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of small parameters would pay for each list and each tensor over a window."""
    lists: list[Any] = []
    made: list[Any] = []
    call, empty = refit.step.window.call, torch.empty

    def watched_call(function: Any, *arguments: Any) -> None:
        if function.__name__ == "refit_window_begin":
            lists.append(arguments[1])
        call(function, *arguments)

    def watched(*size: Any, **options: Any) -> torch.Tensor:
        made.append(options)
        return empty(*size, **options)

    monkeypatch.setattr(refit.step.window, "call", watched_call)
    with Twins(WINDOWS) as twins:
        twins.step(3)
        room = window_bytes(twins.controller)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", watched)
            twins.step(3)
        assert made == []
        assert len(lists) == 6
        assert all(one is lists[2] for one in lists[2:])
        assert window_bytes(twins.controller) == room > 0


@pytest.mark.parametrize("way", ["step", "read", "write", "other gradients", "clear"])
@pytest.mark.parametrize("prefetch", [True, False])
def test_the_first_windows_come_in_during_the_backward_pass(prefetch: bool, way: str) -> None:
    with Twins(WINDOWS, prefetch=prefetch) as twins:
        for _ in range(2):
            twins.step()
            twins.moved.optimizer.state_dict()
            assert window_bytes(twins.controller) == 0
            twins.backward()
            assert (window_bytes(twins.controller) > 0) == prefetch
            states = [run.optimizer.state[run.model[0].weight] for run in twins]
            if way == "read":
                assert torch.equal(*(state["exp_avg"].cpu() for state in states))
            elif way == "write":
                for state in states:
                    state["exp_avg"].add_(1)
            elif way == "clear":
                twins.controller.offload()
            elif way == "other gradients":
                for run in twins:
                    run.model[2].weight.grad = None
            if way in ("read", "write", "clear"):
                assert window_bytes(twins.controller) == 0
            twins.finish()
            twins.assert_same()


def test_a_backward_pass_in_a_thread_does_not_wait_for_a_step() -> None:
    late: list[bool] = []

    class Differentiating(torch.optim.SGD):
        """Its step runs a backward pass, whose hooks a GPU calls on a thread of PyTorch's."""

        def step(self, closure: Any = None) -> Any:
            passing = threading.Thread(target=run.backward)
            passing.start()
            passing.join(20)
            late.append(passing.is_alive())
            return super().step(closure)

    run = Layers(lambda parameters: Differentiating(parameters, lr=0.1, momentum=0.9))
    with WINDOWS.open(run.optimizer, run.model, allow_unverified=True):
        run.step(2)
    assert late
    assert not any(late)


def test_a_step_that_a_cuda_graph_would_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with Twins(WINDOWS, before=1) as twins:
        if training.DEVICE == "cpu":  # which has no graphs

            def capturing(device: torch.device) -> None:
                assert device == torch.device("cpu")
                raise StateError("a CUDA graph is being captured")

            captured: Callable[[], Any] = contextlib.nullcontext
            monkeypatch.setattr(refit.step.host_states, "refuse_capture", capturing)
        else:

            def captured() -> Any:
                return torch.cuda.graph(torch.cuda.CUDAGraph())

        twins.moved.backward()
        for call in (twins.moved.optimizer.step, twins.controller.resume_step):
            with pytest.raises(StateError, match="graph is being captured"), captured():
                call()
        monkeypatch.undo()
        twins.moved.optimizer.zero_grad()
        twins.step()


# ---- Windows and parts.


def test_states_are_born_next_to_smaller_windows() -> None:
    """Adagrad has states before its first step, and its windows are there when Adam's are born."""
    runs = Layers(), Layers()
    pairs = []
    for run in runs:
        small = torch.optim.Adagrad([run.model[0].weight], lr=0.1)
        pairs.append([small, torch.optim.Adam([run.model[2].weight], lr=1e-2)])
    with refit.Controller(pairs[1], runs[1].model, schedule=refit.HostStates(prefetch=False)):
        for run, both in zip(runs, pairs, strict=True):
            for _ in range(3):
                run.backward()
                for one in both:
                    one.step()
                run.model.zero_grad()
        assert all(map(torch.equal, *(run.model.parameters() for run in runs)))


def test_a_large_parameter_is_stepped_in_parts() -> None:
    def make() -> tuple[nn.Parameter, Optimizer]:
        torch.manual_seed(1)
        parameter = nn.Parameter(drawn(200, 301).t())
        return parameter, torch.optim.AdamW([parameter], lr=0.1)

    def step(number: int, *shape: int) -> None:
        for parameter, optimizer in ((one, alone), (other, moved)):
            torch.manual_seed(number)
            grad = drawn(*shape)
            parameter.grad = grad if parameter.shape == shape else grad.t()
            optimizer.step()

    (one, alone), (other, moved) = make(), make()
    with WINDOWS.open(moved) as controller:
        counters = []
        for number in range(3):
            step(number, 200, 301)
            counters.append(moved.state[other]["step"])
            assert window_bytes(controller) <= 2 * (64 << 10)
        assert controller.resident == []
        assert counters[1] is counters[2]
        assert float(counters[2]) == 3
        assert same(alone.state_dict(), moved.state_dict())
        assert torch.equal(one, other)
        # A gradient that lies otherwise cannot be divided: the window grows for this step.
        step(9, 301, 200)
        assert window_bytes(controller) > 2 * 301 * 200 * 4
        assert "the window grows" in controller.resident[0][1]
        assert same(alone.state_dict(), moved.state_dict())
        assert torch.equal(one, other)


def test_a_large_state_that_cannot_be_split_grows_its_window() -> None:
    parameter = nn.Parameter(drawn(200, 200))
    optimizer = torch.optim.Muon([parameter])
    with WINDOWS.open(optimizer) as controller:
        for _ in range(2):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        why = (
            "its states take 160000 bytes and are stepped as a whole: the window grows to them, "
            "above its 65536 bytes"
        )
        assert controller.resident == [("0.0", why)]
        assert window_bytes(controller) >= 160000


@pytest.mark.parametrize(("given", "size"), [({}, 128 << 10), ({"window_bytes": 1 << 18}, 1 << 18)])
def test_keywords_go_over_sizes_of_the_configuration(given: dict[str, Any], size: int) -> None:
    config = refit.load_config(offload={"window_bytes": "128KiB", "windows": 2})
    parameter = nn.Parameter(drawn(200_000))
    optimizer = torch.optim.AdamW([parameter])
    schedule = refit.HostStates(**given)
    with refit.Controller(optimizer, config=config, schedule=schedule) as controller:
        for _ in range(2):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        assert window_bytes(controller) == 2 * size


class Odd(nn.Parameter):
    """A parameter of a class that no foreach function of PyTorch takes."""


@pytest.mark.parametrize("kind", [Odd, nn.Parameter])
def test_windows_are_stepped_by_foreach_if_the_group_would_be(
    kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only if it takes every parameter of the group that has a gradient."""
    monkeypatch.setattr(
        sys.modules["torch.optim.optimizer"],
        "_get_foreach_kernels_supported_devices",
        lambda: ["cuda", training.DEVICE],
    )
    seen: set[Any] = set()

    class Watched(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            if self.param_groups[0]["params"]:
                seen.add(self.param_groups[0]["foreach"])
            return super().step(closure)

    parameters = [kind(drawn(9000)), *(nn.Parameter(drawn(9000)) for _ in range(3))]
    optimizer = Watched(parameters)
    with WINDOWS.open(optimizer):
        for has_none in (None, None, 0, None):
            for at, one in enumerate(parameters):
                one.grad = None if at == has_none else torch.ones_like(one.data)
            seen.clear()
            optimizer.step()
            assert seen == {False if kind is Odd and has_none is None else None}
        assert optimizer.param_groups[0]["foreach"] is None


def test_a_frozen_parameter_with_a_gradient_has_its_windows() -> None:
    parameter = torch.ones(40_000, device=training.DEVICE)
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2))])
    optimizer.param_groups[0]["params"] = [parameter]
    with WINDOWS.open(optimizer) as controller:
        for _ in range(2):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            controller.offload()
            assert controller.stats()["refit/step_out_bytes"] == 2 * 4 * 40_000
    assert bool((parameter == parameter[0]).all())
    assert parameter[0] < 1


# ---- States that stay on the device.


@pytest.mark.parametrize(
    ("share", "stay"),
    [
        ({"resident_bytes": 0}, 0),
        ({"resident_bytes": 8 * 24 * 96}, 1),
        ({"resident_bytes": "1GiB"}, 3),
        ({"fraction": 1.0}, 0),
        ({"fraction": 0.0}, 3),
        ({"fraction": 0.5}, 1),
    ],
    ids=str,
)
def test_a_share_of_the_states_stays_on_the_device(share: dict[str, Any], stay: int) -> None:
    with Twins(WINDOWS, **share) as twins:
        twins.step(3)
        weights = [twins.moved.model[at].weight for at in (0, 2, 4)]
        states = [twins.moved.optimizer.state[one]["exp_avg"] for one in weights]
        assert [lives_on_host(one) for one in states] == [False] * stay + [True] * (3 - stay)
        named = [name for name, why in twins.controller.resident if "resident_bytes" in why]
        assert named[:1] == (["0.weight"] if stay else [])
        twins.controller.offload()
        away = [one.untyped_storage().nbytes() == 0 for one in states]
        assert away == [True] * stay + [False] * (3 - stay)
        twins.step()  # brings it back


class Apart(Optimizer):
    """Keeps one state on its parameter's device, and one, of doubles, in the memory of the CPU."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})
        self.fails = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        stepped = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        for p in stepped:
            state = self.state[p]
            if not state:
                state["near"] = torch.zeros_like(p)
                state["far"] = torch.zeros(p.shape, dtype=torch.float64, device="cpu")
            if self.fails and p.dim() == 2:
                state["far"].add_(1)
                raise ValueError("half way")
            state["near"].lerp_(p.grad, 0.1)
            state["far"].add_(p.grad.to(state["far"]))
            p.sub_(state["near"] + state["far"].to(p), alpha=self.param_groups[0]["lr"])
        return loss


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    if training.DEVICE == "cpu":  # there is no other device with memory: doubles stand for it
        monkeypatch.setattr(
            refit.step.probe, "is_elsewhere", lambda one, _: one.dtype == torch.float64
        )


@pytest.mark.usefixtures("apart")
def test_a_state_on_another_device_stays_where_it_is() -> None:
    with Twins(WINDOWS, Apart) as twins:
        optimizer = twins.moved.optimizer
        weight = twins.moved.model[0].weight
        twins.step()
        far = optimizer.state[weight]["far"]
        twins.step(2)
        assert optimizer.state[weight]["far"] is far
        assert far.device.type == "cpu"
        assert not lives_on_host(far)
        assert lives_on_host(optimizer.state[weight]["near"])
        assert ("0.weight.far", "the optimizer keeps it on cpu") in twins.controller.resident
        twins.assert_same()
        for run in twins:
            run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
        assert not lives_on_host(optimizer.state[weight]["far"])
        twins.step(2)
        twins.controller.offload()
        twins.step()


@pytest.mark.usefixtures("apart")
def test_code_that_fails_after_a_change_of_a_state_is_torn() -> None:
    run = Layers(Apart)
    with WINDOWS.open(run.optimizer, run.model) as controller:
        run.step()
        run.optimizer.fails = True  # type: ignore[attr-defined]
        run.backward()
        with pytest.raises(ValueError, match="half way") as seen:
            run.optimizer.step()
        run.optimizer.fails = False  # type: ignore[attr-defined]
        assert "0.weight" in seen.value.torn  # type: ignore[attr-defined]
        controller.resume_step()
        assert "far" in run.optimizer.state[run.model[0].weight]


def test_a_load_that_leaves_none_as_a_state() -> None:
    run = Layers(lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9))
    with WINDOWS.open(run.optimizer, run.model):
        run.step()
        groups = run.optimizer.state_dict()["param_groups"]
        run.optimizer.load_state_dict({"state": {0: None}, "param_groups": groups})
    with pytest.raises((AttributeError, TypeError, ValueError)):
        run.optimizer.load_state_dict({"state": None, "param_groups": groups})


# ---- The end.


def test_a_tensor_over_the_image_outlives_the_controller() -> None:
    run = Layers()
    controller = WINDOWS.open(run.optimizer, run.model)
    run.step(2)
    state = run.optimizer.state[run.model[0].weight]["exp_avg"]
    expected = state.clone()
    controller.close()
    del controller
    run.step(3)
    gc.collect()
    assert torch.equal(state, expected)
    state.add_(1)


def let_go(held: list[refit.Controller]) -> None:
    held.clear()
    gc.collect()


def no_memory(*_: Any, **__: Any) -> torch.Tensor:
    raise torch.OutOfMemoryError("none left")


def test_the_device_has_no_memory_for_the_states_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone, moved = Layers(), Layers()
    held = [WINDOWS.open(moved.optimizer, moved.model)]
    alone.step(2), moved.step(2)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", no_memory)
        with pytest.raises(refit.DeviceMemoryError, match=f"no memory on {training.DEVICE}"):
            held[0].close()
    assert held[0].state == "training"
    alone.step(2), moved.step(2)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", no_memory)
        remedy = r"load_state_dict\(optimizer.state_dict\(\)\).*none left"
        with pytest.warns(RuntimeWarning, match=remedy):
            let_go(held)
    moved.optimizer.load_state_dict(moved.optimizer.state_dict())  # once there is memory again
    alone.step(2), moved.step(2)
    assert same(alone.optimizer.state_dict(), moved.optimizer.state_dict())
    assert all(map(torch.equal, alone.model.parameters(), moved.model.parameters()))


# ---- The device's memory, by PyTorch's own account of what its allocator gives and takes back.

WINDOW = 256 << 10
COUNT, SIZE = 24, 20000
"""Parameters, and elements of each. Their states take 24 * 20000 * 8 bytes, 15 windows."""
STATES = COUNT * SIZE * 8
SLACK = 64 << 10
"""Step counters, alignment, and what PyTorch takes for lists."""


def peak_of(action: Callable[[], Any]) -> int:
    """The most bytes that PyTorch's allocator has given at once, above those at the beginning."""
    if training.DEVICE != "cpu":
        return peak_on_gpu(action)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        action()
    events = seen.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    now = most = 0
    for _, nbytes in changes:
        now += nbytes
        most = max(most, now)
    return most


def peak_on_gpu(action: Callable[[], Any]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    action()
    torch.cuda.synchronize()
    most: int = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    return most - before


def make(size: int = SIZE, count: int = COUNT) -> tuple[list[Any], Any]:
    torch.manual_seed(1)
    parameters = [nn.Parameter(drawn(size)) for _ in range(count)]
    for one in parameters:
        one.grad = torch.ones_like(one)
    return parameters, torch.optim.AdamW(parameters, lr=0.1, fused=True)


def in_windows(optimizer: Optimizer, **options: Any) -> refit.Controller:
    return WINDOWS.open(optimizer, **{"window_bytes": WINDOW, "windows": 3, **options})


def test_the_measure_sees_the_states_of_a_step_without_refit() -> None:
    _, optimizer = make()
    assert STATES < peak_of(optimizer.step) < STATES + SLACK


@pytest.mark.parametrize("windows", [1, 2, 3, 4])
def test_a_step_takes_its_windows(windows: int) -> None:
    (expected, alone), (parameters, optimizer) = make(), make()
    with in_windows(optimizer, windows=windows) as controller:
        peaks = [peak_of(optimizer.step) for _ in range(3)]
        assert WINDOW // 2 <= max(peaks) <= windows * WINDOW + SLACK, peaks
        for _ in range(3):
            alone.step()
        optimizer.state_dict()
        assert peak_of(lambda: None) == 0
        assert window_bytes(controller) == 0
        assert all(map(torch.equal, expected, parameters))


def test_a_parameter_larger_than_all_windows_is_born_in_parts() -> None:
    _, optimizer = make(size=SIZE * COUNT, count=1)
    with in_windows(optimizer, windows=2):
        for _ in range(3):
            assert peak_of(optimizer.step) <= 2 * WINDOW + SLACK


def test_what_is_loaded_goes_to_the_host_alone() -> None:
    _, alone = make()
    alone.step()
    saved = copy.deepcopy(alone.state_dict())
    _, optimizer = make()
    with in_windows(optimizer):
        assert peak_of(lambda: optimizer.load_state_dict(saved)) <= SLACK
        assert peak_of(optimizer.step) <= 3 * WINDOW + SLACK


def test_states_that_are_there_leave_their_memory() -> None:
    _, optimizer = make()
    held: list[refit.Controller] = []

    def step_then_move() -> None:
        optimizer.step()
        held.append(in_windows(optimizer))

    assert peak_of(step_then_move) < STATES + SLACK
    with held[0]:
        large = [v for one in optimizer.state.values() for v in one.values() if v.numel() > 1]
        assert all(one.untyped_storage().nbytes() == one.nbytes for one in large)
        assert peak_of(optimizer.step) <= 3 * WINDOW + SLACK


def test_the_windows_are_no_larger_than_what_travels() -> None:
    _, optimizer = make(size=300, count=2)
    with refit.Controller(optimizer, schedule=refit.HostStates()) as controller:  # of 256 MiB
        optimizer.step()
        assert peak_of(optimizer.step) < SLACK
        assert window_bytes(controller) < SLACK


def test_a_state_that_is_used_and_a_clear_give_the_windows_back() -> None:
    parameters, optimizer = make()
    with in_windows(optimizer) as controller:
        state = optimizer.state[parameters[0]]
        for give_back in (lambda: float(state["exp_avg"].sum()), controller.offload):
            optimizer.step(), optimizer.step()
            assert window_bytes(controller) == 3 * WINDOW
            give_back()
            assert window_bytes(controller) == 0


def test_steps_over_ever_other_parameters_keep_no_more_tensors() -> None:
    def tensors() -> int:
        return sum(type(one) is torch.Tensor for one in gc.get_objects())

    parameters, optimizer = make(size=300, count=60)
    draw = random.Random(0)
    with WINDOWS.open(optimizer):
        optimizer.step()
        least = tensors() - len(parameters)  # gradients
        for _ in range(40):
            for one in parameters:
                one.grad = torch.ones_like(one) if draw.random() < 0.5 else None
            optimizer.step()
        assert tensors() - least < 5 * 2 * len(parameters)


def test_nothing_is_left_of_a_controller_and_its_optimizer() -> None:
    def homes() -> set[int]:
        gc.collect()
        return {id(one) for one in gc.get_objects() if type(one) is HostBuffer}

    before = homes()
    run = Layers()
    controller = WINDOWS.open(run.optimizer, run.model)
    run.step(2)
    assert homes() - before
    controller.close()
    del controller
    run.optimizer.state.clear()
    assert homes() <= before


class OtherAdam(torch.optim.AdamW):
    """Might read all of a group, for all that is known."""


@pytest.mark.parametrize("make", [torch.optim.AdamW, OtherAdam])
@pytest.mark.parametrize("schedule", [WINDOWS, SHARE], ids=["windows", "share"])
def test_groups_that_differ_by_a_rate_are_tried_once(
    monkeypatch: pytest.MonkeyPatch, schedule: Schedule, make: Any
) -> None:
    code: Any = importlib.import_module("torch.optim.adam")
    plain, calls = code.adam, 0

    def counted(*arguments: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        plain(*arguments, **options)

    monkeypatch.setattr(code, "adam", counted)
    made = []
    for count in (10, 40):
        calls, weights = 0, [torch.ones(300, 2).requires_grad_() for _ in range(count)]
        groups = [{"params": [one], "lr": 1e-3 * (at + 1)} for at, one in enumerate(weights)]
        schedule.open(make(groups)).close()
        made.append(calls)
    assert 0 < made[1] <= 5 * made[0]


@pytest.mark.parametrize(
    ("layer", "sentence"),
    [
        (lambda: nn.LazyLinear(8), r"0\.weight has no shape yet: run the model once"),
        (lambda: nn.Linear(4, 8, device="meta"), r"0\.weight is on the meta device"),
    ],
)
def test_parameters_that_are_not_made_yet_are_refused_by_name(layer: Any, sentence: str) -> None:
    model = nn.Sequential(layer(), nn.Linear(8, 8))
    for schedule in (WINDOWS, SHARE):
        with pytest.raises(StateError, match=sentence):
            schedule.open(torch.optim.AdamW(model.parameters()), model)


class Ahead(torch.optim.AdamW):
    """Evaluates its closure where the parameters will be, as schedule-free ones do."""

    def step(self, closure: Any = None) -> Any:
        self.scale(2.0)
        loss = None if closure is None else closure()
        self.scale(0.5)
        super().step()
        return loss

    @torch.no_grad()
    def scale(self, by: float) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                one.mul_(by)


def test_a_closure_that_is_evaluated_in_between_is_refused() -> None:
    run = Layers(Ahead)
    with WINDOWS.open(run.optimizer, run.model):
        run.step()
        with pytest.raises(UnsupportedError, match="a Ahead evaluates its closure"):
            run.optimizer.step(run.backward)


ON_BOTH = [
    WINDOWS,
    SHARE,
    Schedule("half a share", (refit.CpuStep(fraction=0.5),)),
    Schedule("some resident", (replace(WINDOWS.parts[0], resident_bytes=40000),)),
]
HANDS_ON = pytest.mark.parametrize("schedule", ON_BOTH, ids=[one.name for one in ON_BOTH])


def large_states(run: Layers) -> list[dict[str, Any]]:
    return [run.optimizer.state[one] for one in run.parameters() if one.shape == (96, 96)]


def exchange(one: dict[str, Any], other: dict[str, Any]) -> None:
    one["exp_avg"], other["exp_avg"] = other["exp_avg"], one["exp_avg"]


def transpose(one: dict[str, Any], _: dict[str, Any]) -> None:
    one["exp_avg"].t_()


def replace(one: dict[str, Any], _: dict[str, Any]) -> None:
    one["exp_avg"].data = torch.full_like(one["exp_avg"], 0.5)


@HANDS_ON
@pytest.mark.parametrize("change", [exchange, transpose, replace])
def test_states_that_are_changed_by_hand_are_taken(schedule: Schedule, change: Any) -> None:
    with Twins(schedule) as twins:
        twins.step(3)
        for run in twins:
            change(*large_states(run))
        twins.step(3)


@HANDS_ON
@pytest.mark.parametrize("key", ["exp_avg", "step"])
def test_one_state_of_two_parameters_is_refused_by_name(schedule: Schedule, key: str) -> None:
    run = Layers()
    for _ in range(2):
        run.step()
    one, other = large_states(run)
    kept, other[key] = other[key], one[key]
    with pytest.raises(StateError, match=rf"4\.weight\.{key} and 2\.weight\.{key} are one"):
        schedule.open(run.optimizer, run.model)
    other[key] = kept
    with schedule.open(run.optimizer, run.model):
        run.step()
        other["exp_avg"], kept = one["exp_avg"], other["exp_avg"]
        with pytest.raises(StateError, match=r"4\.weight\.exp_avg and 2\.weight\.exp_avg are one"):
            run.step()
        other["exp_avg"] = kept
        run.finish()
        run.step()


class Reading(torch.optim.Optimizer):
    """Keeps a table, a part of it and a number of it in every state, and only reads them."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})
        self.table = torch.linspace(1, 2, 500, device=training.DEVICE)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                state.update(mean=torch.zeros_like(p), at=0)
                state.update(table=self.table, part=self.table[:9], one=self.table[3])
            state["mean"].mul_(0.9).add_(p.grad * state["one"] * state["part"][1])
            p.sub_(state["mean"], alpha=float(state["table"][state["at"]]) * 1e-2)
            state["at"] += 1


@HANDS_ON
@pytest.mark.parametrize("before", [0, 2])
def test_what_states_share_and_a_step_only_reads_stays_one(schedule: Schedule, before: int) -> None:
    if schedule.has_share and training.DEVICE != "cpu":
        pytest.skip("its code reads a table on the GPU while the CPU steps")
    with Twins(schedule, Reading, before=before, verify_steps=2) as twins:
        twins.step(2)
        twins.cycle()
        twins.step()
        optimizer = twins.moved.optimizer
        assert all(one["table"] is optimizer.table for one in optimizer.state.values())
        assert not lives_on_host(optimizer.table)
        reason = "parameters share it and only read it"
        assert ("0.weight.table", reason) in twins.controller.resident
        assert "0.weight.part" not in dict(twins.controller.resident)
        for run in twins:
            run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
        twins.step()


class MadeAnew(torch.optim.Optimizer):
    """Makes its state anew in each step, and only reads another."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            start = state.setdefault("start", p.detach().clone())
            state["mean"] = state.get("mean", torch.zeros_like(p)) * 0.9 + p.grad
            p.sub_(state["mean"] + 0.01 * start, alpha=1e-2)


@HANDS_ON
@pytest.mark.parametrize("key", ["start", "mean"])
def test_states_without_changes_in_place_may_be_shared_by_hand(
    schedule: Schedule, key: str
) -> None:
    def share(run: Layers) -> None:
        one, other = large_states(run)
        other[key] = one[key]

    with Twins(schedule, MadeAnew, before=2) as twins:
        twins.step()
        for run in twins:
            share(run)
        twins.step(2)


def test_allow_unverified_takes_states_apart_that_a_step_changes() -> None:
    run = Layers()
    run.step()
    one, other = large_states(run)
    other["exp_avg"] = one["exp_avg"]
    with WINDOWS.open(run.optimizer, run.model, allow_unverified=True):
        run.step()
        assert not same(one["exp_avg"], other["exp_avg"])
