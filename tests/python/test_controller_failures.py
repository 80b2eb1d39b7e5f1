"""The controller where a step fails, is cut short or is tried in a fork: nothing is lost."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import refit  # noqa: E402
from forks import said_in_a_fork  # noqa: E402
from interrupts import ctrl_c_after  # noqa: E402
from refit import Controller  # noqa: E402
from refit.errors import (  # noqa: E402
    BusyError,
    CopyError,
    DeviceMemoryError,
    InvalidError,
    PeerError,
    StateError,
)
from refit.states.regions import DeviceRegions  # noqa: E402
from training import Run, whole_cycle  # noqa: E402


class Broken(Exception):
    """What a user's block raises."""


def raising(why: type[BaseException]) -> Callable[..., Any]:
    """What takes the place of a function that fails."""

    def fails(*_: Any) -> Any:
        raise why("it failed")

    return fails


def test_every_verb_that_failed_counts_once(
    run: Run, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failures() -> float:
        return controller.stats()["refit/cycle_failures"]

    raised: list[Any] = []

    def attempt(verb: Callable[[], None], kind: type[BaseException]) -> None:
        before = failures()
        with pytest.raises(kind) as caught:
            verb()
        assert failures() == before + 1
        raised.append(weakref.ref(caught.value))

    def send(*sent: Any) -> None:
        with controller.refit(publisher=publisher) as tx:
            for one in sent:
                tx.send({"w": one})

    def fail_in_the_block() -> None:
        with controller.refit(publisher=publisher) as tx:
            tx.send({"w": torch.ones(4)})
            raise Broken

    def clear_in_a_refit() -> None:
        with controller.refit():
            pass

    with refit.Publisher("tcp://127.0.0.1:0", broadcast_shm="off") as publisher:
        attempt(send, StateError)
        attempt(fail_in_the_block, Broken)
        attempt(lambda: send("text"), InvalidError)
        attempt(controller.wait, StateError)
        with monkeypatch.context() as patch:
            patch.setattr(refit.Publisher, "commit", raising(PeerError))
            attempt(lambda: send(torch.ones(4)), PeerError)
        with monkeypatch.context() as patch:
            patch.setattr(torch.UntypedStorage, "resize_", raising(RuntimeError))
            attempt(controller.restore, DeviceMemoryError)
        controller.prepare_for_training()
        with controller.checkpoint():
            attempt(controller.offload, BusyError)
            attempt(clear_in_a_refit, BusyError)
        before = failures()
        whole_cycle(controller)
        send(torch.ones(4))
        assert failures() == before
    gc.collect()
    assert [one() for one in raised] == [None] * 8  # and none of what their frames hold


@pytest.mark.parametrize("function", ["refit_offloader_close", "refit_device_close"])
@pytest.mark.parametrize("then", ["close", "go on"])
def test_ctrl_c_during_close_leaves_optimizer_in_use(
    run: Run, reference_run: Run, function: str, then: str
) -> None:  # trap 12
    controller = Controller(run.optimizer)
    whole_cycle(controller)
    with ctrl_c_after(function):
        controller.close()
    if then == "go on":
        run.step(), reference_run.step()
        assert controller.stats()["refit/cycles"] == 1
        whole_cycle(controller)
    controller.close()
    Controller(run.optimizer).close()
    run.step(), reference_run.step()


@pytest.mark.parametrize("then", ["step", "clear"])
def test_copies_back_that_failed_are_told_and_made_again(
    run: Run, reference_run: Run, controller: Controller, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:  # trap 12: the host image stays until the last byte is back
    if run.device != "cpu":
        pytest.skip("on a GPU a stream waits for the copies, and the caller does not")
    run.backward(), reference_run.backward()
    controller.offload()
    controller.restore()
    with monkeypatch.context() as patch:
        patch.setattr(DeviceRegions, "on_device", property(lambda _: False))
        patch.setattr(DeviceRegions, "back", property(lambda _: False))
        patch.setattr(DeviceRegions, "wait", raising(CopyError))
        with pytest.raises(CopyError):
            controller.wait()
    assert controller.state == "cleared"
    if then == "clear":  # gradients leave again: a backward pass would write to freed memory
        controller.offload()
        assert run.away()
        assert all(p.grad.untyped_storage().nbytes() == 0 for p in run.model.parameters())
    run.step(), reference_run.step()


def test_storages_that_nothing_holds_do_not_leave(
    run: Run, reference_run: Run, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = DeviceRegions.leave

    def leave(regions: DeviceRegions) -> None:
        regions.forget()
        real(regions)

    with monkeypatch.context() as patch:
        patch.setattr(DeviceRegions, "leave", leave)
        with pytest.raises(StateError, match="0 are held"):
            controller.offload()
    assert controller.state == "training"
    controller.offload()
    assert run.away()


def test_fork_is_refused_and_its_parent_goes_on(
    run: Run, reference_run: Run, controller: Controller
) -> None:  # trap 27
    controller.offload()
    assert "a forked process opens its own" in said_in_a_fork(controller.restore)
    run.step(), reference_run.step()
