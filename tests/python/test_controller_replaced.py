"""The controller and states that others replace, resize or drop between two cycles."""

import gc
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from refit.errors import CopyError, StateError  # noqa: E402
from refit.states.offloader import Offloader  # noqa: E402
from refit.states.regions import DeviceRegions  # noqa: E402
from refit.states.storages import StateInventory  # noqa: E402
from training import WIDTH, Run, whole_cycle  # noqa: E402


def test_states_that_were_replaced_by_hand_are_found_again(run: Run, controller: Any) -> None:
    whole_cycle(controller)
    state = next(iter(run.optimizer.state.values()))
    state["exp_avg"] = torch.full_like(state["exp_avg"], 3.0)
    state["exp_avg_sq"].data = torch.full_like(state["exp_avg_sq"], 4.0)
    controller.offload()
    assert run.away()
    controller.prepare_for_training()
    assert bool((state["exp_avg"] == 3.0).all())
    assert bool((state["exp_avg_sq"] == 4.0).all())


def lengthen(moment: torch.Tensor) -> list[torch.Tensor]:
    """A longer storage, and what is in its new half."""
    storage = moment.untyped_storage()
    storage.resize_(2 * storage.nbytes())
    rest = moment.new_empty(0)
    rest.set_(storage, moment.numel(), (moment.numel(),), (1,))
    rest.fill_(5.0)
    return [rest]


def shorten(moment: torch.Tensor) -> list[torch.Tensor]:
    with torch.no_grad():
        moment.set_(moment.untyped_storage(), 0, (WIDTH, 1), (1, 1))
    moment.untyped_storage().resize_(WIDTH * 4)
    return []


def replace(moment: torch.Tensor) -> list[torch.Tensor]:
    moment.set_(torch.full_like(moment, 7.0).untyped_storage(), 0, moment.shape, moment.stride())
    return []


def refill(moment: torch.Tensor) -> list[torch.Tensor]:
    nbytes = moment.untyped_storage().nbytes()
    kept = moment.untyped_storage()
    kept.resize_(0)
    taken = torch.zeros(nbytes // 4)  # its old place, as a rule
    kept.resize_(nbytes)
    moment.fill_(float(taken[0]) + 3.0)
    return []


def renew(moment: torch.Tensor) -> list[torch.Tensor]:
    moment.data = torch.full_like(moment, 9.0)
    return []


@pytest.mark.parametrize("change", [lengthen, shorten, replace, refill, renew])
@pytest.mark.parametrize("hidden", [False, True], ids=["seen", "unseen"])
def test_a_storage_that_was_resized_or_replaced_is_found_again(
    run: Run, controller: Any, monkeypatch: pytest.MonkeyPatch, change: Any, hidden: bool
) -> None:
    # trap 3: an allocator may well give the same address again, so tensors may look unchanged
    moment = run.moments()[0]
    whole_cycle(controller)
    if hidden:
        monkeypatch.setattr(StateInventory, "addresses", lambda _, numbers: [0] * len(numbers))
        whole_cycle(controller)
    other = change(moment)
    values = [one.clone() for one in (*run.moments(), *other)]
    controller.offload()
    assert run.away()
    assert all(one.untyped_storage().nbytes() == 0 for one in other)
    controller.prepare_for_training()
    assert all(map(torch.equal, (*run.moments(), *other), values))


def clear_in_vain(controller: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies out fail before they have begun, and where the bytes are is not known."""
    with monkeypatch.context() as patch:
        patch.setattr(Offloader, "offload", fail_to_offload)
        patch.setattr(DeviceRegions, "on_device", property(lambda _: False))
        with pytest.raises(CopyError):
            controller.offload()
    assert controller.state == "cleared"


def test_a_view_of_a_state_that_moved_elsewhere_is_found_again(run: Run, controller: Any) -> None:
    moment = run.moments()[0]
    view = moment.view(-1)[:2]
    run.optimizer.state[next(iter(run.optimizer.state))]["part"] = view
    whole_cycle(controller)
    whole_cycle(controller)
    view.data = torch.full_like(view, 7.0)
    kept = moment.clone()
    controller.offload()
    assert moment.untyped_storage().nbytes() == 0
    assert view.untyped_storage().nbytes() == 0
    controller.prepare_for_training()
    assert torch.equal(moment, kept)
    assert view.tolist() == [7.0, 7.0]


def test_a_storage_resized_after_a_failed_clear_is_copied_anew(
    run: Run, controller: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_cycle(controller)
    values = [one.clone() for one in run.moments()]
    clear_in_vain(controller, monkeypatch)
    storage = run.moments()[0].untyped_storage()
    storage.resize_(2 * storage.nbytes())
    with pytest.raises(StateError, match=r"restore\(\), then offload"):
        controller.offload()
    controller.restore()
    controller.offload()
    assert run.away()
    controller.prepare_for_training()
    assert all(map(torch.equal, run.moments(), values))


def test_a_state_replaced_after_a_failed_clear_comes_back_first(
    run: Run, controller: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_cycle(controller)
    clear_in_vain(controller, monkeypatch)
    replace(run.moments()[0])
    assert controller.state == "training"
    values = [one.clone() for one in run.moments()]
    controller.offload()
    assert run.away()
    controller.prepare_for_training()
    assert all(map(torch.equal, run.moments(), values))


def fail_to_offload(_offloader: Offloader, _after: int = 0) -> None:
    raise CopyError("the copy failed")


def test_states_that_were_dropped_leave_nothing_to_move(run: Run, controller: Any) -> None:
    whole_cycle(controller)
    run.optimizer.state.clear()
    controller.offload()
    assert controller.stats()["refit/regions"] == 0
    controller.prepare_for_training()
    run.step()
    controller.offload()
    assert run.away()


def test_replaced_states_are_not_held_in_memory(run: Run, controller: Any) -> None:
    whole_cycle(controller)
    run.step()  # by then a GPU's copies have ended
    old = weakref.ref(run.moments()[0])
    for state in run.optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].clone()
    gc.collect()
    assert old() is None
