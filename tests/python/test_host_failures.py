"""A step in windows that is broken off: by a call that fails, by the optimizer's code, by Ctrl-C
before any line. It is known which parameters were stepped, and resume_step() steps the rest once:
weights and states end with the bits of a run that nothing disturbed."""

import concurrent.futures
import copy
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import refit
import refit.away
import refit.home
import refit.twin
import refit.window
import torch
import training
from refit.errors import BusyError, CopyError, DeviceMemoryError, RefitError, StateError
from test_interrupting_code import MOST, Handler
from torch import nn
from training import drawn

pytestmark = pytest.mark.usefixtures("default_device")

WINDOW = "64KiB"
SIZES = (9000, 70, 8000, 12000, 5)
"""Parameters: two of them fill a window alone, one is stepped in parts, one stays on the device."""


class Drill:
    """Some parameters, and steps that depend on nothing but their number."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer] | None = None) -> None:
        torch.manual_seed(3)
        self.parameters = [nn.Parameter(drawn(size)) for size in SIZES]
        named = {"params": self.parameters, "lr": 0.1}
        self.optimizer = (make or torch.optim.AdamW)([named])
        self.steps = 0

    def give_gradients(self) -> None:
        source = torch.Generator().manual_seed(self.steps)
        for one in self.parameters:
            one.grad = drawn(*one.shape, generator=source)

    def step(self) -> None:
        self.give_gradients()
        self.optimizer.step()
        self.steps += 1

    def counters(self) -> list[int]:
        states = [self.optimizer.state.get(one, {}) for one in self.parameters]
        return [int(state.get("step", 0)) for state in states]


def on_host(drill: Drill, **options: Any) -> refit.Controller:
    options.setdefault("window_bytes", WINDOW)
    options.setdefault("windows", 2)
    return refit.Controller(drill.optimizer, states="host", **options)


def assert_same(alone: Drill, moved: Drill) -> None:
    for mine, theirs in zip(alone.parameters, moved.parameters, strict=True):
        assert torch.equal(mine, theirs)
        one, other = alone.optimizer.state.get(mine, {}), moved.optimizer.state.get(theirs, {})
        assert list(one) == list(other)
        for key in one:
            assert torch.equal(one[key].cpu(), other[key].cpu()), key


@pytest.fixture
def twins() -> Iterator[tuple[Drill, Drill, refit.Controller]]:
    alone, moved = Drill(), Drill()
    with on_host(moved) as controller:
        yield alone, moved, controller


class FailingCall:
    """Stands for ``call``: fails before, or behind, the C function at a given number."""

    def __init__(self, at: int, error: BaseException, behind: bool, times: int = 1) -> None:
        self.at, self.error, self.behind, self.times = at, error, behind, times
        self.count = 0
        self.real = refit.window.call

    def __call__(self, function: Any, *arguments: Any) -> None:
        self.count += 1
        fails = self.at <= self.count < self.at + self.times
        if not fails or self.behind:
            self.real(function, *arguments)
        if fails:
            raise self.error


def finish(controller: refit.Controller, drill: Drill, why: BaseException) -> None:
    """What the error's sentence tells to do."""
    before = drill.counters()
    stepped = getattr(why, "stepped", None)
    if stepped is None:  # before the step had begun, or behind its end
        if set(before) != {drill.steps + 1}:
            drill.optimizer.step()
    else:
        told = " ".join([str(why), *getattr(why, "__notes__", [])])
        if "resume_step()" in told:
            with pytest.raises(StateError, match="resume_step"):
                drill.optimizer.step()
            assert drill.counters() == before
            controller.resume_step()
        else:
            assert stepped == []
            assert "step() can be called again" in told
            drill.optimizer.step()
    drill.steps += 1


@pytest.mark.parametrize("first", [True, False], ids=["birth", "later"])
@pytest.mark.parametrize("behind", [True, False], ids=["behind", "before"])
@pytest.mark.parametrize("error", [CopyError("the copy failed"), KeyboardInterrupt()], ids=str)
def test_every_call_of_the_library_may_fail_once(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, behind: bool, first: bool
) -> None:
    if behind and isinstance(error, RefitError):
        pytest.skip("a call that fails has not done its work")
    failed = 0
    for at in range(1, 200):
        alone, moved = Drill(), Drill()
        with on_host(moved) as controller:
            if not first:
                alone.step(), moved.step()
            failing = FailingCall(at, copy.copy(error), behind)
            moved.give_gradients()
            with monkeypatch.context() as patch:
                patch.setattr(refit.window, "call", failing)
                try:
                    moved.optimizer.step()
                    moved.steps += 1
                    seen: BaseException | None = None
                except (RefitError, KeyboardInterrupt) as why:
                    seen = why
            if seen is not None:
                failed += 1
                finish(controller, moved, seen)
            alone.step()
            assert_same(alone, moved)
            alone.step(), moved.step()
            assert_same(alone, moved)
        if failing.count < at:
            break
    else:
        pytest.fail("a step never ends")
    assert failed > 8


@pytest.mark.parametrize("times", [2, 3, 50])
def test_a_failure_that_lasts_is_told_again_until_it_is_over(
    monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    for at in range(1, 40):
        alone, moved = Drill(), Drill()
        with on_host(moved) as controller:
            alone.step(), moved.step()
            moved.give_gradients()
            failing = FailingCall(at, CopyError("the link is down"), False, times)
            why: BaseException | None = None
            with monkeypatch.context() as patch:
                patch.setattr(refit.window, "call", failing)
                try:
                    moved.optimizer.step()
                    moved.steps += 1
                except CopyError as error:
                    why = error
                for _ in range(4 if why is not None else 0):
                    with suppress(CopyError):
                        controller.resume_step()
            if why is not None:
                if "again" in str(why):
                    moved.optimizer.step()
                else:
                    controller.resume_step()
                moved.steps += 1
            alone.step()
            assert_same(alone, moved)
        if failing.count < at:
            break
    else:
        pytest.fail("a step never ends")
    assert at > 10


def test_an_error_names_the_parameters_that_were_stepped(
    twins: tuple[Drill, Drill, refit.Controller], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, moved, controller = twins
    alone.step(), moved.step()
    real = refit.window.Window.next
    calls: list[int] = []

    def third(self: refit.window.Window) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise CopyError("a copy failed")
        return real(self)

    moved.give_gradients()
    with monkeypatch.context() as patch:
        patch.setattr(refit.window.Window, "next", third)
        with pytest.raises(CopyError, match=r"of 5 parameters were stepped") as seen:
            moved.optimizer.step()
    stepped = [number for number, count in enumerate(moved.counters()) if count == 2]
    assert 0 < len(stepped) < 5
    assert sorted(seen.value.stepped) == sorted(f"0.{number}" for number in stepped)
    assert seen.value.text == str(seen.value)
    assert seen.value.torn == []
    controller.resume_step()
    assert moved.counters() == [2] * 5
    controller.resume_step()
    moved.steps += 1
    alone.step()
    assert_same(alone, moved)


# ---- The optimizer's own code.


class Failing(torch.optim.AdamW):
    """Fails at a given parameter, before or behind its update; on request."""

    fails_at: int | None = None
    behind = False

    def _init_group(self, group: Any, params: Any, *rest: Any) -> Any:
        found = super()._init_group(group, params, *rest)
        if self.fails_at is not None and not self.behind:
            for one in params:
                if one.numel() == self.fails_at:
                    raise MemoryError("no room for temporaries")
        return found

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        if self.fails_at is not None and self.behind:
            for group in self.param_groups:
                if any(one.numel() == self.fails_at for one in group["params"]):
                    raise MemoryError("half way")
        return loss


@pytest.mark.parametrize("size", SIZES)
def test_code_that_fails_before_it_changes_anything_runs_again(size: int) -> None:
    alone, moved = Drill(), Drill(Failing)
    with on_host(moved) as controller:
        for _ in range(2):  # in the first step, and in a later one
            moved.give_gradients()
            Failing.fails_at = size
            try:
                with pytest.raises(MemoryError, match="temporaries") as seen:
                    moved.optimizer.step()
                assert seen.value.torn == []
                if seen.value.stepped:
                    with pytest.raises(MemoryError, match="temporaries"):
                        controller.resume_step()
            finally:
                Failing.fails_at = None
            finish(controller, moved, seen.value)
            alone.step()
            assert_same(alone, moved)


@pytest.mark.parametrize("size", SIZES)
def test_code_that_fails_half_way_is_told(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, moved = Drill(), Drill(Failing)
    monkeypatch.setattr(Failing, "behind", True)
    with on_host(moved) as controller:
        alone.step(), moved.step()
        moved.give_gradients()
        monkeypatch.setattr(Failing, "fails_at", size)
        with pytest.raises(MemoryError, match="half way") as seen:
            moved.optimizer.step()
        monkeypatch.setattr(Failing, "fails_at", None)
        assert seen.value.torn
        assert any("failed half way through" in note for note in seen.value.__notes__)
        controller.resume_step()  # here the code had done all that it does
        moved.steps += 1
        alone.step()
        assert_same(alone, moved)


# ---- Ctrl-C.


@pytest.fixture
def no_collection() -> Iterator[None]:
    """No ``__del__`` of an earlier run is called at any line: what is raised there goes nowhere."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("first", [True, False], ids=["birth", "later"])
def test_ctrl_c_before_any_line_of_a_step(first: bool) -> None:
    def press() -> None:
        handler = signal.getsignal(signal.SIGINT)
        assert callable(handler)
        handler(signal.SIGINT, None)  # raises, or notes it for the end of a block that holds it

    alone = Drill()
    alone.step()
    if not first:
        alone.step()
    broken = 0
    for at in range(1, MOST, 13):
        moved = Drill()
        with on_host(moved) as controller:
            if not first:
                moved.step()
            moved.give_gradients()
            handler = Handler(press, at)
            try:
                with handler:
                    moved.optimizer.step()
                moved.steps += 1
            except KeyboardInterrupt as why:
                broken += 1
                finish(controller, moved, why)
            assert_same(alone, moved)
        if not handler.done:
            break
    else:
        pytest.fail("a step never ends")
    assert broken > 50


def test_ctrl_c_while_the_code_runs_waits_for_the_window() -> None:
    pressed: list[int] = []

    class Pressing(torch.optim.AdamW):
        presses = False

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            if self.presses and any(group["params"] for group in self.param_groups):
                os.kill(os.getpid(), signal.SIGINT)
                for _ in range(100):
                    pressed.append(1)
            return super().step(closure)

    alone, moved = Drill(), Drill(Pressing)
    with on_host(moved) as controller:
        alone.step(), moved.step()
        moved.give_gradients()
        Pressing.presses = True
        times = 0
        with pytest.raises(KeyboardInterrupt) as seen:
            moved.optimizer.step()
        assert seen.value.stepped
        while True:
            times += 1
            try:
                controller.resume_step()
                break
            except KeyboardInterrupt:
                assert times < 20
        assert len(pressed) == 100 * times
        Pressing.presses = False
        moved.steps += 1
        alone.step()
        assert_same(alone, moved)


# ---- What may be done with a step that was broken off.


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Drill, Drill, refit.Controller]]:
    """Twins in the middle of the second step of one of them."""
    alone, moved = Drill(), Drill()
    with on_host(moved) as controller:
        alone.step(), moved.step()
        moved.give_gradients()
        with monkeypatch.context() as patch:
            patch.setattr(refit.window, "call", FailingCall(8, CopyError("down"), False))
            with pytest.raises(CopyError, match=r"resume_step\(\)") as seen:
                moved.optimizer.step()
        assert seen.value.stepped
        yield alone, moved, controller


def resumed(broken: tuple[Drill, Drill, refit.Controller]) -> None:
    alone, moved, controller = broken
    controller.resume_step()
    moved.steps += 1
    alone.step()
    assert_same(alone, moved)
    alone.step(), moved.step()
    assert_same(alone, moved)


def test_states_may_be_read_and_copied_in_between(
    broken: tuple[Drill, Drill, refit.Controller],
) -> None:
    _, moved, _ = broken
    counts = set()
    for one in moved.parameters:
        state = moved.optimizer.state[one]
        counts.add(int(state["step"]))
        assert state["exp_avg"].isfinite().all()
    assert counts == {1, 2}
    copy.deepcopy(moved.optimizer)
    resumed(broken)


def test_a_checkpoint_in_between_refuses_to_resume(
    broken: tuple[Drill, Drill, refit.Controller],
) -> None:
    _, _, controller = broken
    with controller.checkpoint(), pytest.raises(BusyError):
        controller.resume_step()
    resumed(broken)


def test_gradients_may_leave_and_return_in_between(
    broken: tuple[Drill, Drill, refit.Controller],
) -> None:
    controller = broken[2]
    controller.clear()
    controller.restore()
    resumed(broken)


def test_a_checkpoint_that_is_loaded_ends_it(
    broken: tuple[Drill, Drill, refit.Controller],
) -> None:
    alone, moved, controller = broken
    with torch.no_grad():
        for mine, theirs in zip(alone.parameters, moved.parameters, strict=True):
            theirs.copy_(mine)
    moved.optimizer.load_state_dict(copy.deepcopy(alone.optimizer.state_dict()))
    controller.resume_step()
    alone.step(), moved.step()
    assert_same(alone, moved)


def test_a_controller_may_be_closed_in_between(
    broken: tuple[Drill, Drill, refit.Controller],
) -> None:
    _, moved, controller = broken
    counts = moved.counters()
    controller.close()
    assert moved.counters() == counts
    moved.step()


# ---- Memory.


def test_too_little_device_memory_means_fewer_windows_then_smaller_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = torch.empty
    for room in (4 << 20, 500 << 10, 300 << 10, 130 << 10, 100 << 10, 80 << 10):
        alone, moved = Drill(torch.optim.Adagrad), Drill(torch.optim.Adagrad)
        with on_host(moved, window_bytes="128KiB", windows=3) as controller:
            alone.step(), moved.step()
            moved.optimizer.state_dict()

            def empty(*size: Any, room: int = room, **options: Any) -> torch.Tensor:
                if options.get("dtype") is torch.uint8 and size[0] > room:
                    raise torch.OutOfMemoryError("no room")
                return real(*size, **options)

            with monkeypatch.context() as patch:
                patch.setattr(torch, "empty", empty)
                alone.step(), moved.step()
                assert 0 < controller.stats()["refit/window_bytes"] <= room
            assert_same(alone, moved)


def test_no_device_memory_at_all_moves_nothing(
    twins: tuple[Drill, Drill, refit.Controller], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, moved, controller = twins
    alone.step(), moved.step()
    moved.optimizer.state_dict()
    moved.give_gradients()
    with monkeypatch.context() as patch:
        patch.setattr(refit.home.Home, "_allocate", lambda *_: False)
        with pytest.raises(
            DeviceMemoryError, match=f"no memory on {training.DEVICE} for one window"
        ) as seen:
            moved.optimizer.step()
    finish(controller, moved, seen.value)
    alone.step()
    assert_same(alone, moved)


def refuse_to_allocate(error: BaseException) -> Callable[..., torch.Tensor]:
    real = torch.empty

    def empty(*size: Any, **options: Any) -> torch.Tensor:
        if options.get("dtype") is torch.uint8:
            raise error
        return real(*size, **options)

    return empty


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("no room"),
        MemoryError("no room"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"),
        RuntimeError("CUDA error: out of memory"),
    ],
    ids=str,
)
def test_every_way_to_say_that_there_is_no_memory(
    twins: tuple[Drill, Drill, refit.Controller],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
) -> None:
    alone, moved, _ = twins
    moved.give_gradients()
    moved.optimizer.step()
    moved.optimizer.state_dict()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", refuse_to_allocate(error))
        with pytest.raises(DeviceMemoryError, match="for one window"):
            moved.optimizer.step()
    moved.steps += 1
    alone.step()
    assert_same(alone, moved)


def test_another_failure_of_an_allocation_is_told_as_it_is(
    twins: tuple[Drill, Drill, refit.Controller], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, moved, controller = twins
    alone.step(), moved.step()
    moved.optimizer.state_dict()
    moved.give_gradients()
    with monkeypatch.context() as patch:
        error = RuntimeError("CUDA error: an illegal memory access was encountered")
        patch.setattr(torch, "empty", refuse_to_allocate(error))
        with pytest.raises(RuntimeError, match="illegal memory access") as seen:
            moved.optimizer.step()
    assert seen.value is error
    finish(controller, moved, error)
    alone.step()
    assert_same(alone, moved)


class Room:
    """Stands for ``torch.zeros_like``, and has memory for so many bytes at once."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.taken = 0
        self.refused = 0
        self.real = torch.zeros_like

    def __call__(self, like: torch.Tensor, **options: Any) -> torch.Tensor:
        if self.taken + like.nbytes > self.nbytes:
            self.refused += 1
            raise torch.OutOfMemoryError("no room")
        made = self.real(like, **options)
        self.taken += made.nbytes
        weakref.finalize(made, self._free, made.nbytes)
        return made

    def _free(self, nbytes: int) -> None:
        self.taken -= nbytes


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adadelta])
def test_states_are_born_a_few_at_a_time_where_there_is_little_memory(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[Any], torch.optim.Optimizer]
) -> None:
    for kib in (400, 200, 100):  # all states take 233 KiB, those of the largest parameter 96
        alone, moved = Drill(make), Drill(make)
        with on_host(moved, window_bytes="1MiB", windows=3):
            alone.step()
            with monkeypatch.context() as patch:
                room = Room(kib << 10)
                patch.setattr(torch, "zeros_like", room)
                moved.step()
            assert (room.refused > 0) == (kib < 400)
            assert room.taken < 2048, "states that are on the host are held"
            assert_same(alone, moved)
            alone.step(), moved.step()
            assert_same(alone, moved)


def test_states_that_cannot_be_born_are_told_and_born_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone, moved = Drill(), Drill()
    with on_host(moved, window_bytes="1MiB") as controller:
        with monkeypatch.context() as patch:
            room = Room(75 << 10)
            patch.setattr(torch, "zeros_like", room)
            moved.give_gradients()
            with pytest.raises(DeviceMemoryError, match="alone") as seen:
                moved.optimizer.step()
            assert room.taken < 2048, "the error holds states"
            assert moved.counters() == [1, 1, 1, 0, 1]
            assert len(seen.value.stepped) == 4
            with pytest.raises(DeviceMemoryError, match="alone"):
                controller.resume_step()
            assert moved.counters() == [1, 1, 1, 0, 1]
        finish(controller, moved, seen.value)
        alone.step()
        assert_same(alone, moved)
        alone.step(), moved.step()
        assert_same(alone, moved)


def test_little_memory_to_calculate_with_means_fewer_parameters_at_a_time(
    twins: tuple[Drill, Drill, refit.Controller], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, moved, controller = twins
    alone.step(), moved.step()
    real = refit.twin.Stepping.run_on
    sizes: list[int] = []

    def run_on(self: Any, made: Any, *arguments: Any) -> None:
        stepped = [one for group in made.param_groups for one in group["params"]]
        sizes.append(len(stepped))
        states = [made.state[one]["exp_avg"] for one in stepped]
        if len(stepped) > 1:
            for state in states:
                state.fill_(7)  # as if half the arithmetic was done
            raise torch.OutOfMemoryError("no room")
        real(self, made, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(refit.twin.Stepping, "run_on", run_on)
        moved.step()
    assert max(sizes) > 1
    alone.step()
    assert_same(alone, moved)
    controller.clear()


def test_late_states_that_find_no_host_memory_stay_until_there_is_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Late(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        state = self.state[p]
                        state["step"] = state.get("step", 0) + 1
                        size = 1000 + p.numel()
                        state.setdefault("codes", torch.zeros(size, device=p.device)).add_(
                            p.grad.sum()
                        )
                        p.sub_(p.grad * state["codes"][0], alpha=0.01)

    alone, moved = Drill(Late), Drill(Late)
    with on_host(moved) as controller:
        moved.give_gradients()
        with monkeypatch.context() as patch:

            def none(*_: Any, **__: Any) -> None:
                raise refit.BudgetError("no budget")

            patch.setattr("refit.host_states.Home", none)
            with pytest.raises(refit.BudgetError, match="5 of 5 parameters were stepped"):
                moved.optimizer.step()
        controller.resume_step()
        moved.steps += 1
        alone.step()
        assert_all_same(alone, moved)
        alone.step(), moved.step()
        assert_all_same(alone, moved)
        state = moved.optimizer.state[moved.parameters[0]]
        assert controller._host is not None
        assert controller._host.owns(moved.parameters[0], "codes", state["codes"])


def assert_all_same(alone: Drill, moved: Drill) -> None:
    for mine, theirs in zip(alone.parameters, moved.parameters, strict=True):
        assert torch.equal(mine, theirs)
        one, other = alone.optimizer.state[mine], moved.optimizer.state[theirs]
        assert torch.equal(one["codes"].cpu(), other["codes"].cpu())


def test_nothing_is_left_behind() -> None:
    gc.collect()
    before = {id(one) for one in gc.get_objects() if isinstance(one, refit.home.Home)}
    drill = Drill()
    controller = on_host(drill)
    drill.step()
    drill.step()
    controller.close()
    del controller
    drill.optimizer.state.clear()
    gc.collect()
    after = [one for one in gc.get_objects() if isinstance(one, refit.home.Home)]
    assert all(id(one) in before for one in after)


def test_a_signal_handler_in_a_step_cannot_use_the_states() -> None:
    alone, moved = Drill(), Drill()
    seen: list[BaseException] = []

    def use(*_: Any) -> None:
        try:
            float(moved.optimizer.state[moved.parameters[0]]["exp_avg"].sum())
        except BusyError as why:
            seen.append(why)

    with on_host(moved):
        alone.step(), moved.step()
        for at in range(1, 6000, 97):
            handler = Handler(lambda: use(), at)
            with handler:
                moved.step()
            alone.step()
            assert_same(alone, moved)
    assert seen


def test_a_thread_that_copies_gets_whole_states_or_is_told() -> None:
    drill = Drill()
    end = time.monotonic() + 2
    refused: list[BusyError] = []
    whole = 0

    def copies() -> None:
        nonlocal whole
        while time.monotonic() < end:
            try:
                state = copy.deepcopy(drill.optimizer.state_dict())["state"]
            except BusyError as why:
                refused.append(why)
                continue
            for one in state.values():
                assert type(one["exp_avg"]) is torch.Tensor
                assert one["exp_avg"].min() == one["exp_avg"].max()
            whole += 1

    def steps() -> None:
        for one in drill.parameters:
            one.grad = torch.full_like(one, drill.steps + 1)
        drill.optimizer.step()
        drill.steps += 1

    with on_host(drill), concurrent.futures.ThreadPoolExecutor(1) as pool:
        steps()
        copying = pool.submit(copies)
        while not copying.done():
            steps()
        copying.result()
        assert whole > 0
        assert drill.counters() == [drill.steps] * len(SIZES)
    assert all("checkpoint()" in str(why) for why in refused)


@pytest.mark.parametrize("is_away", [True, False], ids=["away", "there"])
def test_a_step_waits_for_the_copy_of_a_state(
    twins: tuple[Drill, Drill, refit.Controller], monkeypatch: pytest.MonkeyPatch, is_away: bool
) -> None:
    """Whether the copy has waited for the step before, or the state was there when it began."""
    alone, moved, _ = twins
    alone.step(), moved.step()
    state = moved.optimizer.state[moved.parameters[0]]["exp_avg"]
    moved.optimizer.state_dict()
    if is_away:
        alone.step(), moved.step()
    real = torch.UntypedStorage.clone
    thread = threading.Thread(target=moved.step)

    def clone(self: torch.UntypedStorage) -> torch.UntypedStorage:
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        return real(self)

    with monkeypatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "clone", clone)
        copied = copy.deepcopy(state)
    thread.join()
    assert type(copied) is torch.Tensor
    assert torch.equal(copied, alone.optimizer.state[alone.parameters[0]]["exp_avg"].cpu())
    assert moved.counters()[0] == moved.steps


def test_a_copy_that_takes_too_long_is_told(
    twins: tuple[Drill, Drill, refit.Controller], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, moved, _ = twins
    moved.step()
    state_dict = moved.optimizer.state_dict()
    real = torch.UntypedStorage.clone

    def clone(self: torch.UntypedStorage) -> torch.UntypedStorage:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(moved.step).result()
        return real(self)

    with monkeypatch.context() as patch:
        patch.setattr(refit.away, "_PATIENCE", 0.05)
        patch.setattr(torch.UntypedStorage, "clone", clone)
        with pytest.raises(BusyError, match="copy states in the thread"):
            copy.deepcopy(state_dict["state"][0]["exp_avg"])
    assert moved.steps == 2
    found = copy.deepcopy(state_dict)["state"][0]["exp_avg"]
    assert torch.equal(found, moved.optimizer.state[moved.parameters[0]]["exp_avg"])


def test_a_thread_that_reads_waits_for_the_step() -> None:
    alone, moved = Drill(), Drill()
    end = time.monotonic() + 2
    bad: list[BaseException] = []

    def read() -> None:
        while time.monotonic() < end:
            try:
                moved.optimizer.state_dict()
                float(moved.optimizer.state[moved.parameters[0]]["exp_avg"].sum())
            except BaseException as why:
                bad.append(why)
                return

    with on_host(moved):
        alone.step(), moved.step()
        thread = threading.Thread(target=read)
        thread.start()
        while thread.is_alive():
            alone.step(), moved.step()
        thread.join()
        assert bad == []
        assert_same(alone, moved)
