"""The controller where a step fails, is cut short or is tried in a fork: nothing is lost."""

import signal
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import refit  # noqa: E402
from refit._library import lib  # noqa: E402
from refit.errors import (  # noqa: E402
    BusyError,
    CopyError,
    DeviceMemoryError,
    InvalidError,
    PeerError,
    StateError,
)
from refit.offloader import Offloader  # noqa: E402
from refit.regions import Regions  # noqa: E402
from training import (  # noqa: E402
    Run,
    assert_same,
    assert_same_states,
    refusal_in_a_fork,
    whole_cycle,
)


@pytest.fixture
def run(torch_device: str) -> Run:
    return Run(device=torch_device)


class Failing:
    """``resize_`` of storages, which raises at one call."""

    def __init__(self, call: int, why: BaseException) -> None:
        self.calls = -1
        self.failing, self.why = call, why
        self.resize = torch.UntypedStorage.resize_

    def as_method(self) -> Any:
        return lambda storage, size: self(storage, size)

    def __call__(self, storage: Any, size: int) -> Any:
        self.calls += 1
        if self.calls == self.failing:
            raise self.why
        return self.resize(storage, size)


def test_no_memory_to_come_back_to_loses_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    # trap 12: at every storage in turn
    same = Run(device=run.device)
    run.step(2), same.step(2)
    with refit.Controller(run.optimizer) as controller:
        for number in range(len(run.moments())):
            controller.clear()
            scarce = Failing(number, RuntimeError("out of memory"))
            monkeypatch.setattr(torch.UntypedStorage, "resize_", scarce.as_method())
            with pytest.raises(DeviceMemoryError, match=r"restore\(\) again"):
                controller.restore()
            monkeypatch.undo()
            assert controller.state == "cleared"
            controller.prepare_for_training()
            assert_same(run, same)


def test_an_exception_while_memory_is_freed_loses_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # trap 12: at every storage in turn; then the step, or another clear, goes on
    same = Run(device=run.device)
    run.step(2), same.step(2)
    with refit.Controller(run.optimizer) as controller:
        for number in range(len(run.moments())):
            interrupted = Failing(number, KeyboardInterrupt())
            monkeypatch.setattr(torch.UntypedStorage, "resize_", interrupted.as_method())
            with pytest.raises(KeyboardInterrupt):
                controller.clear()
            monkeypatch.undo()
            if number % 2:
                controller.clear()
                assert run.away()
            run.step(), same.step()
            assert_same(run, same)


def test_every_verb_that_failed_counts_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.step()

    def failures() -> float:
        return controller.stats()["refit/cycle_failures"]

    def attempt(verb: Any, kind: type[BaseException]) -> None:
        before = failures()
        with pytest.raises(kind):
            verb()
        assert failures() == before + 1

    def nothing_is_sent() -> None:
        with controller.refit(publisher=publisher):
            pass

    def the_worker_is_lost() -> None:
        with controller.refit(publisher=publisher) as tx:
            tx.send({"w": torch.ones(4)})
            raise KeyError("the block")

    def bad_weights() -> None:
        with controller.refit(publisher=publisher) as tx:
            tx.send({"w": "text"})  # type: ignore[dict-item]

    def commit() -> None:
        with controller.refit(publisher=publisher) as tx:
            tx.send({"w": torch.ones(4)})

    def clear_in_a_refit() -> None:
        with controller.refit():
            pass

    with (
        refit.Publisher("tcp://127.0.0.1:0", broadcast_shm="off") as publisher,
        refit.Controller(run.optimizer) as controller,
    ):
        for verb, kind in (
            (nothing_is_sent, StateError),
            (the_worker_is_lost, KeyError),
            (bad_weights, InvalidError),
            (controller.join, StateError),
        ):
            attempt(verb, kind)
        with monkeypatch.context() as patch:
            patch.setattr(refit.Publisher, "commit", fail_to_commit)
            attempt(commit, PeerError)
        with monkeypatch.context() as patch:
            scarce = Failing(0, RuntimeError("out of memory"))
            patch.setattr(torch.UntypedStorage, "resize_", scarce.as_method())
            attempt(controller.restore, DeviceMemoryError)
        controller.prepare_for_training()
        with controller.checkpoint():
            attempt(controller.clear, BusyError)
            attempt(clear_in_a_refit, BusyError)
        assert controller._cycle.figures._counted is None
        before = failures()
        whole_cycle(controller)
        commit()
        assert failures() == before


def fail_to_commit(_publisher: refit.Publisher) -> None:
    raise PeerError("the workers were lost")


class Interrupted:
    """A method of the offloader that does its work, and then Ctrl-C comes."""

    def __init__(self, method: Any) -> None:
        self.method = method
        self.calls = 0

    def as_method(self) -> Any:
        return lambda offloader, *rest: self(offloader, *rest)

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        result = self.method(*arguments)
        if self.calls == 1:
            raise KeyboardInterrupt
        return result


@pytest.mark.parametrize("function", ["refit_offloader_close", "refit_device_close"])
@pytest.mark.parametrize("then", ["close", "go on"])
def test_ctrl_c_in_the_middle_of_a_close_leaves_the_optimizer_in_use(
    run: Run, monkeypatch: pytest.MonkeyPatch, function: str, then: str
) -> None:
    # trap 12
    same = Run(device=run.device)
    controller = refit.Controller(run.optimizer)
    run.step(2), same.step(2)
    whole_cycle(controller)
    real = getattr(lib, function)

    def interrupted(*arguments: Any) -> int:
        status: int = real(*arguments)
        signal.raise_signal(signal.SIGINT)
        return status

    monkeypatch.setattr(lib, function, interrupted)
    with pytest.raises(KeyboardInterrupt):
        controller.close()
    monkeypatch.undo()
    if then == "go on":
        run.step(), same.step()
        assert_same_states(run.optimizer.state_dict(), same.optimizer.state_dict())
        assert controller.stats()["refit/cycles"] == 1
        whole_cycle(controller)
    controller.close()
    refit.Controller(run.optimizer).close()
    run.step(), same.step()
    assert_same(run, same)


@pytest.mark.parametrize("verb", ["offload", "finish", "unbind_each", "bind_each", "restore"])
@pytest.mark.parametrize("then", ["step", "again"])
def test_ctrl_c_after_any_verb_of_the_offloader_loses_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch, verb: str, then: str
) -> None:
    # trap 12
    same = Run(device=run.device)
    run.step(2), same.step(2)
    with refit.Controller(run.optimizer) as controller:
        monkeypatch.setattr(Offloader, verb, Interrupted(getattr(Offloader, verb)).as_method())
        with pytest.raises(KeyboardInterrupt):
            whole_cycle(controller)
        if then == "again":
            controller.clear()
            assert run.away()
            controller.restore()
        run.step(), same.step()
        monkeypatch.undo()
        assert_same(run, same)
        controller.clear()
        assert run.away()
    assert_same(run, same)


def test_copies_back_that_failed_are_told_and_made_again(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # trap 12: the host image stays until the last byte is back
    same = Run(device=run.device)
    run.step(2), same.step(2)
    with refit.Controller(run.optimizer) as controller:
        controller.clear()
        controller.restore()
        join_in_vain(controller, monkeypatch)
        assert controller.state == "cleared"
        run.step(), same.step()
    assert_same(run, same)


def test_a_clear_after_copies_back_failed_puts_gradients_away_like_any_other(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # trap 12: a backward pass would write to memory that has gone
    same = Run(device=run.device)
    run.step(2), same.step(2)
    run.backward(), same.backward()
    with refit.Controller(run.optimizer) as controller:
        controller.clear()
        controller.restore()
        join_in_vain(controller, monkeypatch)
        controller.clear()
        assert run.away()
        assert all(p.grad.untyped_storage().nbytes() == 0 for p in run.model.parameters())
        run.step(), same.step()
    assert_same(run, same)


def join_in_vain(controller: refit.Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies back have not come, and fail."""
    with monkeypatch.context() as patch:
        patch.setattr(Regions, "home", property(lambda _: False))
        patch.setattr(Regions, "back", property(lambda _: False))
        patch.setattr(Regions, "settle", fail_to_copy)
        with pytest.raises(CopyError):
            controller.join()


def fail_to_copy(_regions: Regions) -> None:
    raise CopyError("the copy failed")


def test_a_fork_is_refused_with_a_sentence_and_its_parent_goes_on(run: Run) -> None:
    # trap 27
    run.step()
    with refit.Controller(run.optimizer) as controller:
        controller.clear()
        assert "a forked process opens its own" in refusal_in_a_fork(controller.restore)
        run.step()
