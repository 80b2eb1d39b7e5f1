"""A step in windows that is broken off in the middle: what may be done with it, what follows when
the optimizer's own code fails or memory is short, and what other threads see."""

import concurrent.futures
import copy
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import refit
import refit.states.offloaded_tensor
import refit.step.stand_in
import torch
from failures import SIZES, Drill, FailingCall, end_step, finish_step, refuse_to_allocate
from interrupts import AtLine
from refit.errors import BusyError, CopyError, DeviceMemoryError
from schedules import WINDOWS, Twins, lives_on_host

pytestmark = pytest.mark.usefixtures("default_device")


class Given(Drill):
    """Its gradients are given, so that no window comes in early."""

    def backward(self) -> float:
        source = torch.Generator().manual_seed(self.steps)
        for one in self.model:
            one.grad = torch.randn(one.shape, generator=source).to(self.device)
        return 0.0

    def moments(self) -> list[torch.Tensor]:
        """Without a counter that is a plain number."""
        found = [one for state in self.optimizer.state.values() for one in state.values()]
        return [one for one in found if isinstance(one, torch.Tensor) and one.dim() > 0]


def twins_of(make: Any = None, **options: Any) -> Twins:
    return Twins(WINDOWS, *([] if make is None else [make]), run=Given, **options)


# ---- What may be done with a step that was broken off.


@pytest.fixture
def broken() -> Iterator[Twins]:
    """Twins in the middle of the second step of one of them. The step goes on in the end."""
    with twins_of(before=1) as twins:
        twins.backward()
        with FailingCall(8, CopyError("down")), pytest.raises(CopyError) as seen:
            twins.moved.optimizer.step()
        told = r"of 5 parameters were stepped \(.stepped names them\); controller.resume_step\(\)"
        assert seen.match(told)
        stepped = [str(at) for at, count in enumerate(twins.moved.counters()) if count == 2]
        assert 0 < len(stepped) < 5
        assert sorted(seen.value.stepped) == stepped  # type: ignore[attr-defined]
        assert seen.value.torn == []  # type: ignore[attr-defined]
        assert seen.value.text == str(seen.value)
        yield twins
        twins.controller.resume_step()
        assert twins.moved.counters() == [2] * 5
        twins.controller.resume_step()
        twins.moved.optimizer.zero_grad()
        twins.moved.steps += 1
        twins.alone.finish()
        twins.assert_same()
        twins.step()


def test_states_may_be_read_and_copied_in_between(broken: Twins) -> None:
    assert set(broken.moved.counters()) == {1, 2}
    assert all(bool(one.isfinite().all()) for one in broken.moved.moments())
    copy.deepcopy(broken.moved.optimizer)


def test_a_checkpoint_in_between_refuses_to_resume(broken: Twins) -> None:
    with broken.controller.checkpoint(), pytest.raises(BusyError):
        broken.controller.resume_step()


def test_gradients_may_leave_and_return_in_between(broken: Twins) -> None:
    broken.controller.offload()
    broken.controller.restore()


def test_a_checkpoint_that_is_loaded_ends_it_and_so_does_close() -> None:
    for end in ("load", "close"):
        with twins_of(before=1) as twins:
            run = twins.moved
            twins.backward()
            with FailingCall(8, CopyError("down")), pytest.raises(CopyError):
                run.optimizer.step()
            if end == "close":
                twins.controller.close()
                assert set(run.counters()) == {1, 2}
                run.optimizer.step()
                assert set(run.counters()) == {2, 3}
            with torch.no_grad():
                for mine, theirs in zip(twins.alone.model, run.model, strict=True):
                    theirs.copy_(mine)
            run.optimizer.load_state_dict(copy.deepcopy(twins.alone.optimizer.state_dict()))
            if end == "load":
                twins.controller.resume_step()
            for one in twins:
                one.optimizer.zero_grad()


# ---- The optimizer's own code.


class Failing(torch.optim.AdamW):
    """Fails on request if it is to step a parameter of a given size, before or after that."""

    fails_at: int | None = None
    after = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        sizes = {one.numel() for group in self.param_groups for one in group["params"]}
        fails = self.fails_at in sizes
        if fails and not self.after:
            raise MemoryError("no room for temporaries")
        loss = super().step(closure)
        if fails:
            raise MemoryError("half way")
        return loss


@pytest.mark.parametrize("size", SIZES)
def test_code_that_fails_before_it_changes_anything_runs_again(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with twins_of(Failing) as twins:
        for _ in range(2):  # in the first step, and in a later one
            twins.backward()
            with monkeypatch.context() as patch:
                patch.setattr(Failing, "fails_at", size)
                with pytest.raises(MemoryError, match="temporaries") as seen:
                    twins.moved.optimizer.step()
                assert seen.value.torn == []  # type: ignore[attr-defined]
                if seen.value.stepped:  # type: ignore[attr-defined]
                    with pytest.raises(MemoryError, match="temporaries"):
                        twins.controller.resume_step()
            end_step(twins, seen.value)
            twins.alone.finish()
            twins.assert_same()


@pytest.mark.parametrize("size", SIZES)
def test_code_that_fails_half_way_is_told(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with twins_of(Failing, before=1) as twins:
        twins.backward()
        with monkeypatch.context() as patch:
            patch.setattr(Failing, "after", True)
            patch.setattr(Failing, "fails_at", size)
            with pytest.raises(MemoryError, match="half way") as seen:
                twins.moved.optimizer.step()
        assert seen.value.torn  # type: ignore[attr-defined]
        assert any("failed half way through" in note for note in seen.value.__notes__)
        end_step(twins, seen.value)  # here the code had done all that it does
        twins.alone.finish()


def stop(*_: object) -> None:
    raise SystemExit


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_code_runs_waits_for_the_window(number: signal.Signals) -> None:
    pressed: list[int] = []
    before = signal.getsignal(number)
    if number != signal.SIGINT:
        signal.signal(number, stop)

    class Pressing(torch.optim.AdamW):
        presses = False

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            if self.presses and any(group["params"] for group in self.param_groups):
                os.kill(os.getpid(), number)
                pressed.extend(1 for _ in range(100))
            return super().step(closure)

    with twins_of(Pressing, before=1) as twins:
        twins.backward()
        Pressing.presses = True
        times = 0
        with pytest.raises((KeyboardInterrupt, SystemExit)) as seen:
            twins.moved.optimizer.step()
        assert seen.value.stepped  # type: ignore[union-attr]
        assert seen.value.torn == []  # type: ignore[union-attr]
        while True:
            times += 1
            try:
                twins.controller.resume_step()
                break
            except (KeyboardInterrupt, SystemExit):
                assert times < 20
        assert len(pressed) == 100 * times
        Pressing.presses = False
        end_step(twins, None)
        twins.alone.finish()
    signal.signal(number, before)


# ---- Memory.


@pytest.mark.parametrize("kib", [4096, 500, 300, 130, 100, 80])
def test_little_device_memory_means_fewer_and_smaller_windows(
    monkeypatch: pytest.MonkeyPatch, kib: int
) -> None:
    options: dict[str, Any] = {"window_bytes": "128KiB", "windows": 3}
    with twins_of(torch.optim.Adagrad, before=1, **options) as twins:
        empty = refuse_to_allocate(torch.OutOfMemoryError("no room"), kib << 10)
        monkeypatch.setattr(torch, "empty", empty)
        twins.step()
        monkeypatch.undo()
        assert 0 < twins.controller.stats()["refit/window_bytes"] <= kib << 10


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("no room"),
        MemoryError("no room"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
    ],
    ids=str,
)
def test_no_device_memory_at_all_moves_nothing(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    with twins_of(before=1) as twins:
        twins.moved.optimizer.state_dict()
        twins.backward()
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", refuse_to_allocate(error))
            if "illegal" in str(error):  # told as it is
                with pytest.raises(RuntimeError, match="illegal memory access") as seen:
                    twins.moved.optimizer.step()
                assert seen.value is error
            else:
                with pytest.raises(DeviceMemoryError, match="for one window") as seen:
                    twins.moved.optimizer.step()
                assert seen.match(f"no memory on {twins.moved.device}")
        end_step(twins, seen.value)
        twins.alone.finish()


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
        weakref.finalize(made, self.free, made.nbytes)
        return made

    def free(self, nbytes: int) -> None:
        self.taken -= nbytes


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adadelta])
@pytest.mark.parametrize("kib", [400, 200, 100])
def test_little_memory_means_few_states_born_at_a_time(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[Any], torch.optim.Optimizer], kib: int
) -> None:
    """All states take 233 KiB, those of the largest parameter 96."""
    with twins_of(make, window_bytes="1MiB", windows=3) as twins:
        twins.alone.step()
        with monkeypatch.context() as patch:
            room = Room(kib << 10)
            patch.setattr(torch, "zeros_like", room)
            twins.moved.step()
        assert (room.refused > 0) == (kib < 400)
        assert room.taken < 2048, "states that are on the host are held"
        twins.assert_same()
        twins.step()


def test_states_that_cannot_be_born_are_told_and_born_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with twins_of(window_bytes="1MiB") as twins:
        twins.backward()
        with monkeypatch.context() as patch:
            room = Room(75 << 10)
            patch.setattr(torch, "zeros_like", room)
            with pytest.raises(DeviceMemoryError, match="alone") as seen:
                twins.moved.optimizer.step()
            assert room.taken < 2048, "the error holds states"
            assert twins.moved.counters() == [1, 1, 1, 0, 1]
            assert len(seen.value.stepped) == 4  # type: ignore[attr-defined]
            with pytest.raises(DeviceMemoryError, match="alone"):
                twins.controller.resume_step()
            assert twins.moved.counters() == [1, 1, 1, 0, 1]
        end_step(twins, seen.value)
        twins.alone.finish()
        twins.assert_same()
        twins.step()


def test_little_memory_means_fewer_parameters_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    real = refit.step.stand_in.Stepping.run_on
    sizes: list[int] = []

    def run_on(self: Any, made: Any, *arguments: Any) -> None:
        stepped = [one for group in made.param_groups for one in group["params"]]
        sizes.append(len(stepped))
        if len(stepped) > 1:
            for one in stepped:
                made.state[one]["exp_avg"].fill_(7)  # as if half the arithmetic was done
            raise torch.OutOfMemoryError("no room")
        real(self, made, *arguments)

    with twins_of(before=1) as twins:
        twins.alone.step()
        with monkeypatch.context() as patch:
            patch.setattr(refit.step.stand_in.Stepping, "run_on", run_on)
            twins.moved.step()
        assert max(sizes) > 1


class Late(torch.optim.Optimizer):
    """Has states of a size that no plan foresees."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                size = 1000 + p.numel()
                state.setdefault("codes", torch.zeros(size, device=p.device)).add_(p.grad.sum())
                p.sub_(p.grad * state["codes"][0], alpha=0.01)


def test_late_states_stay_until_there_is_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any, **__: Any) -> None:
        raise refit.BudgetError("no budget")

    with twins_of(Late) as twins:
        twins.backward()
        with monkeypatch.context() as patch:
            patch.setattr("refit.step.placement.HostBuffer", none)
            with pytest.raises(refit.BudgetError, match="5 of 5 parameters were stepped") as seen:
                twins.moved.optimizer.step()
        finish_step(twins.controller, twins.moved.optimizer, seen.value)
        end_step(twins, None)
        twins.alone.finish()
        twins.assert_same()
        twins.step()
        assert all(map(lives_on_host, twins.moved.moments()))


# ---- Signal handlers and other threads.


def test_a_signal_handler_in_a_step_cannot_use_the_states() -> None:
    seen: list[BaseException] = []

    def use() -> None:
        try:
            float(twins.moved.moments()[0].sum())
        except BusyError as why:
            seen.append(why)

    with twins_of(before=1) as twins:
        for at in range(1, 6000, 197):
            with AtLine(at, use) as handler:
                twins.moved.step()
            twins.alone.step()
            twins.assert_same()
            if not handler.done:
                break
    assert seen


def test_a_step_waits_for_the_copy_of_a_state_that_was_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with twins_of(before=1) as twins:
        state = twins.moved.moments()[0]
        twins.moved.optimizer.state_dict()
        twins.step()
        real = torch.UntypedStorage.clone
        thread = threading.Thread(target=twins.moved.step)

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
        assert torch.equal(copied, twins.alone.moments()[0].cpu())
        twins.alone.step()


def test_a_copy_that_a_step_overtakes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with twins_of(before=1) as twins:
        state_dict = twins.moved.optimizer.state_dict()
        real = torch.UntypedStorage.clone

        def clone(self: torch.UntypedStorage) -> torch.UntypedStorage:
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                pool.submit(twins.moved.step).result()
            return real(self)

        with monkeypatch.context() as patch:
            patch.setattr(torch.UntypedStorage, "clone", clone)
            with pytest.raises(BusyError, match="copy states in the thread"):
                copy.deepcopy(state_dict["state"][0]["exp_avg"])
        found = copy.deepcopy(state_dict)["state"][0]["exp_avg"]
        assert torch.equal(found, twins.moved.moments()[0])
        twins.alone.step()


def test_a_thread_that_reads_waits_for_the_step() -> None:
    with twins_of(before=1) as twins, concurrent.futures.ThreadPoolExecutor(1) as pool:
        optimizer, state = twins.moved.optimizer, twins.moved.moments()[0]

        def read() -> None:
            for _ in range(100):
                optimizer.state_dict()
                float(state.sum())

        reading = pool.submit(read)
        while not reading.done():
            twins.step()
        reading.result()
