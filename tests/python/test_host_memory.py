"""What states on the host take of the device's memory: the windows and nothing else, in the first
step, in later ones, when a checkpoint is loaded and when states that were there move. Measured by
PyTorch's own account of what its allocator gives and takes back."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import refit
import torch
import training
from torch import nn
from torch.profiler import ProfilerActivity, profile
from training import drawn

pytestmark = pytest.mark.usefixtures("default_device")

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


def make(size: int = SIZE, count: int = COUNT, **options: Any) -> tuple[list[Any], Any]:
    torch.manual_seed(1)
    parameters = [nn.Parameter(drawn(size)) for _ in range(count)]
    for one in parameters:
        one.grad = torch.ones_like(one)
    return parameters, torch.optim.AdamW(parameters, lr=0.1, fused=True, **options)


def test_the_measure_sees_the_states_of_a_step_without_refit() -> None:
    _, optimizer = make()
    assert STATES < peak_of(optimizer.step) < STATES + SLACK


@pytest.mark.parametrize("windows", [1, 2, 3, 4])
def test_a_step_takes_its_windows(windows: int) -> None:
    _, alone = make()
    parameters, optimizer = make()
    options: dict[str, Any] = {"window_bytes": WINDOW, "windows": windows}
    with refit.Controller(optimizer, states="host", **options) as controller:
        peaks = [peak_of(optimizer.step) for _ in range(3)]
        assert WINDOW // 2 <= max(peaks) <= windows * WINDOW + SLACK, peaks
        for _ in range(3):
            alone.step()
        optimizer.state_dict()
        after = peak_of(lambda: None)
        assert after == 0
        assert controller.stats()["refit/window_bytes"] == 0
        for mine, theirs in zip(alone.param_groups[0]["params"], parameters, strict=True):
            assert torch.equal(mine, theirs)


def test_a_parameter_larger_than_all_windows_is_born_in_parts() -> None:
    _, optimizer = make(size=SIZE * COUNT, count=1)
    with refit.Controller(optimizer, states="host", window_bytes=WINDOW, windows=2):
        for _ in range(3):
            assert peak_of(optimizer.step) <= 2 * WINDOW + SLACK


def test_what_is_loaded_goes_to_the_host_alone() -> None:
    _, alone = make()
    alone.step()
    saved = copy.deepcopy(alone.state_dict())
    _, optimizer = make()
    with refit.Controller(optimizer, states="host", window_bytes=WINDOW):
        assert peak_of(lambda: optimizer.load_state_dict(saved)) <= SLACK
        assert peak_of(optimizer.step) <= 3 * WINDOW + SLACK
    _, plain = make()
    assert peak_of(lambda: plain.load_state_dict(saved)) <= SLACK


def test_states_that_are_there_leave_their_memory() -> None:
    _, optimizer = make()
    held: list[refit.Controller] = []

    def step_then_move() -> None:
        optimizer.step()
        held.append(refit.Controller(optimizer, states="host", window_bytes=WINDOW))
        now.append(1)

    now: list[int] = []
    assert peak_of(step_then_move) < STATES + SLACK
    with held[0]:
        large = [v for one in optimizer.state.values() for v in one.values() if v.numel() > 1]
        assert all(one.untyped_storage().nbytes() == one.nbytes for one in large)
        assert peak_of(optimizer.step) <= 3 * WINDOW + SLACK


def test_the_windows_are_no_larger_than_what_travels() -> None:
    _, optimizer = make(size=300, count=2)
    with refit.Controller(optimizer, states="host") as controller:  # windows of 256 MiB
        optimizer.step()
        assert peak_of(optimizer.step) < SLACK
        assert controller.stats()["refit/window_bytes"] < SLACK


def test_reading_a_state_gives_the_windows_back() -> None:
    parameters, optimizer = make()
    with refit.Controller(optimizer, states="host", window_bytes=WINDOW) as controller:
        optimizer.step()
        optimizer.step()
        assert controller.stats()["refit/window_bytes"] == 3 * WINDOW
        assert float(optimizer.state[parameters[0]]["exp_avg"].sum()) != 0
        assert controller.stats()["refit/window_bytes"] == 0
        optimizer.step()
        controller.clear()
        assert controller.stats()["refit/window_bytes"] == 0


def test_steps_over_ever_other_parameters_keep_no_more_tensors() -> None:
    parameters, optimizer = make(size=300, count=60)
    draw = random.Random(0)
    with refit.Controller(optimizer, states="host", window_bytes="64KiB") as controller:
        optimizer.step()
        assert controller._host is not None
        (home,) = controller._host._homes
        most = 0
        for _ in range(40):
            for one in parameters:
                one.grad = torch.ones_like(one) if draw.random() < 0.5 else None
            optimizer.step()
            most = max(most, len(home._tensors))
        assert 0 < most < 5 * 2 * len(parameters)
