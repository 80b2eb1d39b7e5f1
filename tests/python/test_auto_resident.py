"""HostStates(resident_bytes="auto"): how many states stay on the device follows the memory that
iterations leave free, and every bit is that of a training without refit while it changes."""

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import refit
import refit.step.auto_resident
import torch
import training
from device_space import MARGIN, ROOM, Space, resident_bytes
from failures import Drill, FailingCall, end_step, finish_step
from interrupts import MOST, AtLine
from refit.errors import BudgetError, CopyError, DeviceMemoryError, StateError
from refit.step.auto_resident import AutoResident, Memory, forget_peak, memory_of, next_count
from schedules import BOTH, WINDOWS, Schedule, Twins, lives_on_host, stepped_by_cpu
from torch import nn

pytestmark = pytest.mark.usefixtures("default_device")

AUTO = Schedule("auto", (replace(WINDOWS.parts[0], resident_bytes="auto"),))
SIZES = [8 * 24 * 96, 8 * 96 * 96, 8 * 96 * 96]
"""Bytes of the states of ``Layers`` that do not stay anyway."""


@pytest.fixture
def space() -> Iterator[Space]:
    with Space().patched() as made:
        yield made


def open_twins(space: Space, schedule: Schedule = AUTO, steps: int = 2, **options: Any) -> Twins:
    """Of which one iteration was seen: the first step has made the states."""
    twins = Twins(schedule, **options)
    space.controller = twins.controller
    twins.step(steps)
    return twins


def staying(twins: Twins) -> list[bool]:
    states = [twins.moved.optimizer.state[twins.moved.model[at].weight] for at in (0, 2, 4)]
    assert all(len({*map(lives_on_host, (s["exp_avg"], s["exp_avg_sq"]))}) == 1 for s in states)
    found = [not lives_on_host(one["exp_avg"]) for one in states]
    bytes_here = sum(itertools.compress(SIZES, found))
    assert resident_bytes(twins.controller) == bytes_here
    named = [name for name, why in twins.controller.resident if "resident_bytes" in why]
    assert named == list(itertools.compress(["0.weight", "2.weight", "4.weight"], found))
    return found


# ---- The rule.


def test_the_rule_leaves_a_margin_and_does_not_swing() -> None:
    margin, total = 4, 40
    for sizes in itertools.product([1, 3, 6], repeat=3):
        for count, need in itertools.product(range(4), range(60)):
            before = sum(sizes[:count])
            found = next_count(sizes, count, need + before, total, margin)
            spare = total - need - sum(sizes[:found])
            was = total - need - before
            if found > count:
                assert spare >= 2 * margin
            elif found < count:
                assert was < margin
                assert found == 0 or spare >= 2 * margin
                assert spare - sizes[found] < 2 * margin  # and no more go than have to
            elif count > 0:
                assert was >= margin
            if found < 3 and found >= count:
                assert spare - sizes[found] < 2 * margin or was < margin
            again = next_count(sizes, found, need + sum(sizes[:found]), total, margin)
            assert again == found
            for less in range(margin + 1):  # needs that swing by as much as a margin
                swings = next_count(sizes, found, need - less + sum(sizes[:found]), total, margin)
                back = next_count(sizes, swings, need + sum(sizes[:swings]), total, margin)
                assert back == swings


def test_the_rule_without_parameters_and_with_too_large_ones() -> None:
    assert next_count([], 0, 10, 100, 5) == 0
    assert next_count([91], 0, 0, 100, 5) == 0
    assert next_count([90], 0, 0, 100, 5) == 1
    assert next_count([91, 1], 0, 0, 100, 5) == 0  # the first stay
    assert next_count([10, 20], 2, 200, 100, 5) == 0


def test_the_highest_need_of_the_last_iterations_counts(space: Space, monkeypatch: Any) -> None:
    monkeypatch.setattr(refit.step.auto_resident, "_ITERATIONS", 3)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    auto, device, counts = AutoResident([optimizer]), torch.device("cpu"), []
    for left in [10, 10, 100, 0, 100, 100, 100, 100]:
        space.leave(left)
        counts.append(auto.next_count(device, [10] * 20, 0, MARGIN))
        auto.begin(device)
    assert counts == [0, 1, 1, 0, 0, 0, 10, 10]  # the first saw no beginning


def test_an_allocation_that_fails_counts_as_no_memory_left(space: Space) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    auto, device = AutoResident([optimizer]), torch.device("cpu")
    space.leave(ROOM // 2)
    auto.begin(device)
    assert auto.next_count(device, [10, 10], 2, MARGIN) == 2
    space.failures += 1
    assert auto.next_count(device, [10, 10], 2, MARGIN) == 0
    auto.begin(device)
    assert auto.next_count(device, [10, 10], 0, MARGIN) == 2


def test_an_iteration_is_over_once_all_optimizers_have_stepped() -> None:
    one, other = (torch.optim.SGD([nn.Parameter(torch.zeros(1))]) for _ in range(2))
    auto = AutoResident([one, other])
    assert [auto.is_over(it) for it in (one, one, other, other, one)] == [0, 0, 1, 0, 1]


def test_the_allocator_of_a_gpu_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    reset: list[Any] = []
    share = {"now": 1.0}
    answers = {
        "mem_get_info": (30, 100),
        "memory_reserved": 50,
        "max_memory_allocated": 45,
        "memory_stats": {"num_ooms": 2, "num_alloc_retries": 3},
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    fraction = "get_per_process_memory_fraction"
    monkeypatch.setattr(torch.cuda, fraction, lambda _: share["now"], raising=False)
    device = torch.device("cuda", 0)
    assert memory_of(device) == Memory(peak=45, total=80, failures=5)
    share["now"] = 0.7
    assert memory_of(device) == Memory(peak=45, total=70, failures=5)
    monkeypatch.delattr(torch.cuda, fraction)  # an older PyTorch
    assert memory_of(device) == Memory(peak=45, total=80, failures=5)
    forget_peak(device)
    assert reset == [device]
    assert memory_of(torch.device("cpu")) is None
    forget_peak(torch.device("cpu"))
    assert reset == [device]


# ---- States come to stay, and go.


def test_states_stay_while_there_is_memory(space: Space) -> None:
    with open_twins(space, steps=1) as twins:
        assert staying(twins) == [False] * 3
        for left, expected in [
            (SIZES[0] - 1, 0),
            (SIZES[0], 1),
            (0, 1),  # one margin and more is left
            (sum(SIZES), 3),
            (sum(SIZES) - MARGIN, 3),
            (sum(SIZES) - MARGIN - 1, 2),
            (sum(SIZES[:2]), 2),
            (-ROOM, 0),
            (ROOM, 3),
        ]:
            space.leave(left)
            twins.step()
            assert staying(twins) == [at < expected for at in range(3)], left
            twins.step()
            assert staying(twins) == [at < expected for at in range(3)], left


def test_what_stays_does_not_travel_and_leaves_with_the_cycle(space: Space) -> None:
    with open_twins(space) as twins:
        for left in (SIZES[0], sum(SIZES), -ROOM, sum(SIZES)):
            space.leave(left)
            twins.step()
            count = sum(staying(twins))
            moments = [
                one
                for at in (0, 2, 4)[:count]
                for one in list(twins.moved.optimizer.state[twins.moved.model[at].weight].values())
                if one.dim() > 0
            ]
            with twins.controller.refit():
                assert all(one.untyped_storage().nbytes() == 0 for one in moments)
                with twins.controller.checkpoint() as saved:
                    assert len(saved["state"]) == 6
            twins.controller.restore()
            twins.step()
            twins.moved.optimizer.state_dict()
            travelled = twins.controller.stats()["refit/step_in_bytes"]
            assert travelled == sum(SIZES[count:]) or count == 3


def test_only_whole_iterations_decide(space: Space) -> None:
    """The first step begins the first one: what was allocated before it says nothing."""
    space.leave(ROOM)
    with Twins(AUTO) as twins:
        space.controller = twins.controller
        twins.step()
        assert staying(twins) == [False] * 3
        assert space.begun == 1
        twins.step()
        assert staying(twins) == [True] * 3
        assert space.begun == 2


def test_on_a_device_that_does_not_say_none_stay() -> None:
    with Twins(AUTO) as twins:
        twins.step(3)
        if training.DEVICE == "cpu":
            assert staying(twins) == [False] * 3
            assert twins.controller.stats()["refit/resident_bytes"] == 0


def test_parameters_of_the_cpu_are_left_to_it(space: Space) -> None:
    with open_twins(space, BOTH, resident_bytes="auto") as twins:
        on_cpu = stepped_by_cpu(twins.controller)
        assert on_cpu == ["4.weight"]
        for left in (ROOM, -ROOM, ROOM):
            space.leave(left)
            twins.step(2)
            expected = sum(SIZES[:2]) if left > 0 else 0
            assert resident_bytes(twins.controller) == expected
            assert stepped_by_cpu(twins.controller) == on_cpu


@pytest.mark.parametrize("prefetch", [True, False])
def test_states_that_are_used_saved_and_loaded_meanwhile(space: Space, prefetch: bool) -> None:
    def use(twins: Twins) -> None:
        for run in twins:
            for one in run.optimizer.state.values():
                one["exp_avg"].mul_(0.5)

    def load(twins: Twins) -> None:
        for run in twins:
            run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))

    def load_older(twins: Twins) -> None:
        """Tensors of before, of which some lie over places of states that stay now."""
        for run, saved in zip(twins, older, strict=True):
            run.optimizer.load_state_dict(copy.deepcopy(saved))

    def exchange(twins: Twins) -> None:
        for run in twins:
            one, other = (run.optimizer.state[run.model[at].weight] for at in (2, 4))
            one["exp_avg"], other["exp_avg"] = other["exp_avg"], one["exp_avg"]

    def skip(twins: Twins) -> None:
        twins.backward()
        for run in twins:
            run.model[0].weight.grad = None
        twins.finish()

    with open_twins(space, prefetch=prefetch) as twins:
        older = [copy.deepcopy(run.optimizer.state_dict()) for run in twins]
        actions: list[Callable[[Twins], None]] = [use, load, load_older, exchange, skip]
        lefts = [SIZES[0], sum(SIZES[:2]), ROOM, -ROOM]
        for action, (before, after) in itertools.product(actions, itertools.permutations(lefts, 2)):
            space.leave(before)
            twins.step()
            action(twins)
            twins.assert_same()
            space.leave(after)
            twins.step(2)
            twins.assert_same()


def test_a_tensor_of_before_is_put_into_other_states(space: Space) -> None:
    with open_twins(space) as twins:
        old = twins.moved.optimizer.state[twins.moved.model[2].weight]["exp_avg"]
        space.leave(ROOM)
        twins.step()
        assert staying(twins) == [True] * 3
        value = old.clone()
        twins.step()
        assert torch.equal(old, value)  # it keeps the bytes of the moment at which they left it
        twins.alone.optimizer.state[twins.alone.model[4].weight]["exp_avg"] = value.clone()
        twins.moved.optimizer.state[twins.moved.model[4].weight]["exp_avg"] = old
        twins.step()
        space.leave(SIZES[0])
        twins.step(2)
        assert staying(twins) == [True, False, False]


def test_a_parameter_that_is_added_comes_to_stay(space: Space) -> None:
    with open_twins(space) as twins:
        space.leave(ROOM)
        twins.step()
        for run in twins:
            torch.manual_seed(5)
            more = nn.Linear(96, 96).to(run.device)
            run.optimizer.add_param_group({"params": list(more.parameters()), "lr": 0.3})
            run.model.append(more)
        twins.step(2)
        assert resident_bytes(twins.controller) == sum(SIZES) + SIZES[1]
        space.leave(-ROOM)
        twins.step(2)
        assert resident_bytes(twins.controller) == 0


def test_wrapped_parameters_stay_in_windows(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks would have to know: what gathers a DTensor works on one kind of device."""
    real = refit.step.placement.local

    def wrapped(tensor: Any) -> Any:
        return tensor.detach() if tensor is twins.moved.model[0].weight else real(tensor)

    with open_twins(space) as twins:
        monkeypatch.setattr(refit.step.placement, "local", wrapped)
        space.leave(ROOM)
        twins.step()
        assert staying(twins) == [False, True, True]
        monkeypatch.undo()


@pytest.mark.parametrize("with_ranks", [True, False])
def test_what_is_not_element_by_element_stays_in_windows_among_ranks(
    with_ranks: bool, space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its step may talk to other ranks, which step parameters in the same order."""

    def muon(parameters: Any) -> Any:
        return torch.optim.Muon([one for one in parameters if one.dim() == 2], lr=0.1)

    with open_twins(space, make=muon) as twins:
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: with_ranks)
        space.leave(ROOM)
        twins.step(2)
        assert resident_bytes(twins.controller) == (0 if with_ranks else sum(SIZES) // 2)


# ---- What fails.


def test_no_memory_for_states_that_are_to_stay(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: Any, **__: Any) -> torch.Tensor:
        space.failures += 1
        raise torch.OutOfMemoryError("none left")

    with open_twins(space) as twins:
        space.leave(ROOM)
        twins.backward()
        with monkeypatch.context() as patch:
            patch.setattr(refit.step.placement, "_fresh", none)
            twins.finish()  # the step is made
        assert staying(twins) == [False] * 3
        twins.step()
        assert staying(twins) == [False] * 3  # the failure counts
        twins.step()
        assert staying(twins) == [True] * 3


def test_other_errors_of_the_device_are_raised(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with open_twins(space) as twins:
        space.leave(ROOM)
        twins.backward()
        twins.alone.finish()
        with monkeypatch.context() as patch:
            patch.setattr(refit.step.placement, "_fresh", lost)
            with pytest.raises(RuntimeError, match="illegal memory access"):
                twins.moved.optimizer.step()
        twins.moved.optimizer.zero_grad()
        twins.moved.steps += 1
        twins.step(2)


def test_a_step_without_memory_for_a_window_takes_that_of_states_that_stay(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    from refit.step.host_buffer import HostBuffer

    real = HostBuffer._allocate

    def allocate(self: Any, size: int, count: int) -> bool:
        return resident_bytes(twins.controller) == 0 and real(self, size, count)

    with open_twins(space) as twins:
        space.leave(SIZES[0])
        twins.step()
        assert staying(twins) == [True, False, False]
        twins.moved.optimizer.state_dict()  # gives the windows back
        with monkeypatch.context() as patch:
            patch.setattr(HostBuffer, "_allocate", allocate)
            space.leave(0)
            twins.step()
            assert staying(twins) == [False] * 3
        twins.step()
        with monkeypatch.context() as patch:
            patch.setattr(HostBuffer, "_allocate", lambda *_: False)
            twins.moved.optimizer.state_dict()
            twins.backward()
            with pytest.raises(DeviceMemoryError, match="no state has moved"):
                twins.moved.optimizer.step()
        twins.finish()


def test_a_step_that_is_broken_off_decides_once_it_is_finished(space: Space) -> None:
    with open_twins(space) as twins:
        space.leave(SIZES[0])
        twins.step()
        for left, expected in ((ROOM, 3), (-ROOM, 0), (SIZES[0], 1)):
            space.leave(left)
            before = staying(twins)
            twins.backward()
            if any(one is False for one in before[1:]):
                with FailingCall(5, CopyError("down")), pytest.raises(CopyError) as failed:
                    twins.moved.optimizer.step()
                assert staying(twins) == before
                finish_step(twins.controller, twins.moved.optimizer, failed.value)
                twins.moved.optimizer.zero_grad()
                twins.moved.steps += 1
                twins.alone.finish()
            else:
                twins.finish()
            assert staying(twins) == [at < expected for at in range(3)]
            twins.assert_same()


@pytest.mark.parametrize("at", range(1, 12))
def test_a_copy_that_fails_anywhere_loses_nothing(space: Space, at: int) -> None:
    with open_twins(space) as twins:
        for left in (SIZES[0], ROOM, SIZES[0], -ROOM, sum(SIZES[:2])):
            space.leave(left)
            twins.backward()
            try:
                with FailingCall(at, CopyError("down")):
                    twins.moved.optimizer.step()
            except CopyError as why:
                finish_step(twins.controller, twins.moved.optimizer, why)
            twins.moved.optimizer.zero_grad()
            twins.moved.steps += 1
            twins.alone.finish()
            twins.assert_same()


@pytest.mark.parametrize("stride", [73, pytest.param(7, marks=pytest.mark.slow)])
def test_ctrl_c_anywhere_loses_nothing(space: Space, stride: int) -> None:
    with Twins(AUTO, before=1, run=Drill) as twins:
        space.controller = twins.controller
        twins.step(2)
        for number, at in enumerate(range(1, MOST, stride)):
            space.leave((ROOM, -ROOM, 100_000)[number % 3])
            twins.backward()
            pressed = AtLine(at)
            why: BaseException | None = None
            try:
                with pressed:
                    twins.moved.optimizer.step()
            except KeyboardInterrupt as caught:
                why = caught
            end_step(twins, why)
            twins.alone.finish()
            twins.assert_same()
            if not pressed.done and number % 3 == 2:
                break
        assert why is None


def test_states_that_come_to_stay_in_inference_mode(space: Space) -> None:
    with open_twins(space) as twins:
        for left in (ROOM, -ROOM, ROOM):
            space.leave(left)
            twins.backward()
            with torch.inference_mode():
                for run in twins:
                    run.optimizer.step()
            for run in twins:
                run.optimizer.zero_grad()
            assert staying(twins) == [left > 0] * 3
            twins.step()


def test_no_host_memory_for_the_cycle_sends_them_back_for_good(space: Space) -> None:
    image = sum(SIZES)
    budget = image + SIZES[0] + (256 << 10)
    with open_twins(space, offload_budget_bytes=budget, offload_slab_bytes="64KiB") as twins:
        space.leave(SIZES[0])
        twins.step()
        twins.cycle()
        assert staying(twins) == [True, False, False]
        space.leave(ROOM)
        twins.step()
        assert staying(twins) == [True] * 3
        twins.cycle()
        assert staying(twins) == [False] * 3
        twins.step(2)
        assert staying(twins) == [False] * 3
        twins.cycle()


def test_a_fixed_share_is_still_refused_its_host_memory() -> None:
    budget = sum(SIZES) // 2
    with Twins(WINDOWS, resident_bytes="1GiB", offload_budget_bytes=budget) as twins:
        twins.step()
        with pytest.raises(BudgetError):
            twins.controller.offload()


def test_the_end_while_some_stay(space: Space) -> None:
    for left in (SIZES[0], ROOM):
        with open_twins(space) as twins:
            space.leave(left)
            twins.step()
            twins.controller.close()
            with pytest.raises(StateError, match="closed"):
                twins.controller.offload()
