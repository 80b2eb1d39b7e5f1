"""The controller: states leave, return exactly, and are there whenever they are used."""

import copy
import gc
import os
import pickle
import signal
import weakref
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
from refit.storages import Stock  # noqa: E402
from training import WIDTH, Run, adamw, assert_same, assert_same_states  # noqa: E402


@pytest.fixture
def run(torch_device: str) -> Run:
    return Run(device=torch_device)


def test_a_cycle_takes_the_memory_away_and_brings_every_bit_back(run: Run) -> None:
    same = Run(device=run.device)
    with refit.Controller(run.optimizer, run.model) as controller:
        for number in range(5):
            assert run.step() == same.step()
            controller.clear()
            assert controller.state == "cleared"
            assert run.away()
            controller.restore(non_blocking=number % 2 == 0)
            controller.join()
            assert controller.state == "training"
            assert_same(run, same)


def test_what_is_given_in_anothers_place_is_refused_with_a_sentence(run: Run) -> None:
    with (
        refit.Publisher("tcp://127.0.0.1:0") as publisher,
        refit.Controller(run.optimizer, run.model) as controller,
    ):
        with pytest.raises(InvalidError, match="publisher="), controller.refit(publisher):  # type: ignore[arg-type]
            pass
        with pytest.raises(InvalidError, match="is a text"), controller.refit(publisher="tcp://"):
            pass
        with pytest.raises(InvalidError, match="named_weights"), controller.refit() as tx:
            tx.send(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(InvalidError, match=r"torch\.nn\.Module"):
        refit.named_weights(run.optimizer)  # type: ignore[arg-type]


def test_every_verb_may_be_called_twice(run: Run) -> None:
    run.step()
    with refit.Controller(run.optimizer) as controller:
        for verb in (controller.clear, controller.restore, controller.join):
            verb()
            verb()
        controller.offload_before_refit()
        controller.offload_after_refit()
        controller.offload()
        assert run.away()
        controller.prepare_for_training()
        controller.prepare_for_training()
        assert controller.state == "training"


def test_objects_views_strides_and_groups_are_the_same_ones_afterwards(run: Run) -> None:
    # traps 4 and 7
    run.step()
    moments = run.moments()
    view = moments[0].t()[1:]
    before = [(id(t), t.shape, t.stride(), t.storage_offset()) for t in moments]
    keys = [list(state) for state in run.optimizer.state.values()]
    groups = run.optimizer.param_groups
    bytes_of_view = view.clone()
    with refit.Controller(run.optimizer) as controller:
        controller.clear()
        controller.prepare_for_training()
        assert [(id(t), t.shape, t.stride(), t.storage_offset()) for t in run.moments()] == before
    assert [list(state) for state in run.optimizer.state.values()] == keys
    assert run.optimizer.param_groups is groups
    assert torch.equal(view, bytes_of_view)


def test_step_counters_stay_where_they_are(run: Run) -> None:
    # trap 8
    run.step()
    counters = [state["step"] for state in run.optimizer.state.values()]
    with refit.Controller(run.optimizer, run.model) as controller:
        controller.clear()
        assert all(float(one) == 1.0 for one in counters)
        assert ("0.weight.step", "a step counter stays where it is") in controller.resident


def test_a_clear_before_the_first_step_moves_nothing_and_the_next_one_all(run: Run) -> None:
    # trap 9
    with refit.Controller(run.optimizer) as controller:
        controller.clear()
        assert controller.state == "cleared"
        assert len(run.optimizer.state) == 0
        run.step()
        controller.clear()
        assert run.away()


def test_a_step_while_states_are_away_brings_them_back_first(run: Run) -> None:
    # trap 10
    same = Run(device=run.device)
    run.step(), same.step()
    with refit.Controller(run.optimizer) as controller:
        controller.clear()
        run.step(), same.step()
        assert controller.state == "training"
    assert_same(run, same)


def test_a_state_dict_while_states_are_away_or_returning_is_whole(run: Run) -> None:
    # trap 13
    same = Run(device=run.device)
    run.step(2), same.step(2)
    with refit.Controller(run.optimizer) as controller:
        controller.clear()
        assert_same_states(run.optimizer.state_dict(), same.optimizer.state_dict())
        controller.clear()
        controller.restore()
        assert_same_states(run.optimizer.state_dict(), same.optimizer.state_dict())


def test_a_state_dict_loaded_while_states_are_away_replaces_them(run: Run) -> None:
    # trap 15
    same = Run(device=run.device)
    run.step(), same.step(3)
    saved = copy.deepcopy(same.optimizer.state_dict())
    with refit.Controller(run.optimizer) as controller:
        controller.clear()
        run.optimizer.load_state_dict(saved)
        assert_same_states(run.optimizer.state_dict(), same.optimizer.state_dict())
        controller.clear()
        assert run.away()
    assert_same_states(run.optimizer.state_dict(), same.optimizer.state_dict())


def test_a_state_dict_that_refers_to_states_that_are_away_can_be_loaded(run: Run) -> None:
    run.step()
    live = run.optimizer.state_dict()
    values = copy.deepcopy(live)
    with refit.Controller(run.optimizer) as controller:
        controller.clear()
        run.optimizer.load_state_dict(live)
        assert_same_states(run.optimizer.state_dict(), values)


def test_a_load_that_is_refused_loses_nothing(run: Run) -> None:
    run.step()
    values = copy.deepcopy(run.optimizer.state_dict())
    other = Run(lambda p: torch.optim.SGD(list(p)[:1], momentum=0.9)).optimizer.state_dict()
    with refit.Controller(run.optimizer) as controller:
        controller.clear()
        with pytest.raises(ValueError, match="parameter group"):
            run.optimizer.load_state_dict(other)
    assert_same_states(run.optimizer.state_dict(), values)


def test_parameters_added_meanwhile_are_moved_from_the_next_clear_on(run: Run) -> None:
    run.step()
    extra = torch.nn.Parameter(torch.ones(5, device=run.device))
    with refit.Controller(run.optimizer) as controller:
        controller.clear()
        run.optimizer.add_param_group({"params": [extra]})
        extra.grad = torch.ones_like(extra)
        run.step()
        controller.clear()
        assert run.away()
        assert run.optimizer.state[extra]["exp_avg"].untyped_storage().nbytes() == 0
        controller.prepare_for_training()
        assert run.optimizer.state[extra]["exp_avg"].sum() != 0


def test_states_that_were_replaced_by_hand_are_found_again(run: Run) -> None:
    run.step()
    with refit.Controller(run.optimizer) as controller:
        controller.clear()
        controller.prepare_for_training()
        state = next(iter(run.optimizer.state.values()))
        state["exp_avg"] = torch.full_like(state["exp_avg"], 3.0)
        state["exp_avg_sq"].data = torch.full_like(state["exp_avg_sq"], 4.0)
        controller.clear()
        assert run.away()
        controller.prepare_for_training()
        assert bool((state["exp_avg"] == 3.0).all())
        assert bool((state["exp_avg_sq"] == 4.0).all())


@pytest.mark.parametrize("change", ["longer", "shorter", "set_", "emptied and filled", "data"])
@pytest.mark.parametrize("hidden", [False, True], ids=["seen", "unseen"])
def test_a_storage_that_somebody_has_resized_or_replaced_is_found_again(
    run: Run, monkeypatch: pytest.MonkeyPatch, change: str, hidden: bool
) -> None:
    # trap 3: an allocator may well give the same address again, so tensors may look unchanged
    run.step(2)
    moment = run.moments()[0]
    with refit.Controller(run.optimizer, run.model) as controller:
        whole_cycle(controller)
        if hidden:
            monkeypatch.setattr(Stock, "addresses", lambda stock: [0] * len(stock.tensors))
            whole_cycle(controller)
        other = CHANGES[change](moment)
        values = [one.clone() for one in (*run.moments(), *other)]
        controller.clear()
        assert run.away()
        assert all(one.untyped_storage().nbytes() == 0 for one in other)
        controller.prepare_for_training()
        assert all(map(torch.equal, (*run.moments(), *other), values))


def lengthen(moment: torch.Tensor) -> list[torch.Tensor]:
    """A longer storage, and what is in its new half."""
    storage = moment.untyped_storage()
    storage.resize_(2 * storage.nbytes())
    behind = moment.new_empty(0)
    behind.set_(storage, moment.numel(), (moment.numel(),), (1,))
    behind.fill_(5.0)
    return [behind]


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


CHANGES: dict[str, Any] = {
    "longer": lengthen,
    "shorter": shorten,
    "set_": replace,
    "emptied and filled": refill,
    "data": renew,
}


def test_a_storage_that_is_replaced_while_a_clear_has_failed_is_not_copied_from_its_old_place(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.step(2)
    with refit.Controller(run.optimizer) as controller:
        whole_cycle(controller)
        real = Offloader.offload
        with monkeypatch.context() as patch:
            patch.setattr(Offloader, "offload", fail_to_offload)
            patch.setattr(Regions, "home", property(lambda _: False))
            with pytest.raises(CopyError):
                controller.clear()
        assert controller.state == "cleared"
        assert Offloader.offload is real
        replace(run.moments()[0])
        values = [one.clone() for one in run.moments()]
        with pytest.raises(StateError, match=r"restore\(\), then clear"):
            controller.clear()
        controller.restore()
        controller.clear()
        assert run.away()
        controller.prepare_for_training()
        assert all(map(torch.equal, run.moments(), values))


def fail_to_offload(_offloader: Offloader, _after: int = 0) -> None:
    raise CopyError("the copy failed")


def test_several_optimizers_are_one_cycle(run: Run) -> None:
    other = Run(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), device=run.device)
    run.step(), other.step()
    with refit.Controller([run.optimizer, other.optimizer]) as controller:
        controller.clear()
        assert run.away()
        assert other.away()
        other.step()  # any of them brings all back
        assert controller.state == "training"
        assert not run.away()


def test_a_wrapped_optimizer_is_opened(run: Run) -> None:
    class Wrapper:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

    run.step()
    with refit.Controller(Wrapper(Wrapper(run.optimizer))) as controller:
        controller.clear()
        assert run.away()
        run.step()


@pytest.mark.parametrize("wrong", [None, 3, [], "adam", object()])
def test_what_is_no_optimizer_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidError):
        refit.Controller(wrong)


def test_an_optimizer_has_one_controller_at_a_time(run: Run) -> None:
    first = refit.Controller(run.optimizer)
    with pytest.raises(BusyError, match="controller already"):
        refit.Controller(run.optimizer)
    first.close()
    refit.Controller(run.optimizer).close()


def test_close_brings_the_states_back_and_takes_the_hooks_away(run: Run) -> None:
    same = Run(device=run.device)
    run.step(), same.step()
    controller = refit.Controller(run.optimizer)
    controller.clear()
    controller.close()
    controller.close()
    assert_same(run, same)
    assert not run.optimizer._optimizer_step_pre_hooks
    assert not run.optimizer._optimizer_state_dict_pre_hooks
    assert not run.optimizer._optimizer_load_state_dict_pre_hooks
    for verb in (controller.clear, controller.restore, controller.join, controller.stats):
        with pytest.raises(StateError, match="closed"):
            verb()


def test_a_controller_that_nobody_refers_to_brings_the_states_back(run: Run) -> None:
    same = Run(device=run.device)
    run.step(), same.step()
    controller = refit.Controller(run.optimizer)
    controller.clear()
    del controller
    gc.collect()
    assert not run.away()
    assert_same(run, same)
    assert not run.optimizer._optimizer_step_pre_hooks


def test_a_controller_is_not_pickled_and_an_optimizer_with_one_is(run: Run) -> None:
    # trap 27
    run.step()
    with refit.Controller(run.optimizer) as controller:
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(controller)
        twin = copy.deepcopy(run.optimizer)
        assert not twin._optimizer_step_pre_hooks


@pytest.mark.parametrize("again", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_of_an_optimizer_whose_states_are_away_is_whole(run: Run, again: Any) -> None:
    # trap 13: PyTorch fills a copy of an empty storage with whatever there is
    run.step(2)
    whole = copy.deepcopy(run.optimizer.state_dict())
    with refit.Controller(run.optimizer) as controller:
        controller.clear()
        twin = again(run.optimizer)
        assert_same_states(twin.state_dict(), whole)
        assert "__getstate__" not in vars(twin)
    assert "__getstate__" not in vars(run.optimizer)


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


def test_a_budget_that_does_not_suffice_is_said_before_anything_moves(run: Run) -> None:
    # trap 26
    run.step()
    with refit.Controller(run.optimizer, offload_budget_bytes="4KiB") as controller:
        with pytest.raises(MemoryError, match="budget"):
            controller.clear()
        assert controller.state == "training"
        assert not run.away()
        run.step()


def test_join_while_states_are_away_says_what_to_do(run: Run) -> None:
    run.step()
    with refit.Controller(run.optimizer) as controller:
        controller.clear()
        with pytest.raises(StateError, match=r"restore\(\)"):
            controller.join()


def test_host_memory_is_given_back_on_request_and_taken_again(run: Run) -> None:
    run.step()
    with refit.Controller(run.optimizer) as controller:
        controller.clear()
        with pytest.raises(StateError, match="restore"):
            controller.release()
        controller.prepare_for_training()
        assert controller.stats()["refit/host_bytes"] > 0
        controller.release()
        assert controller.stats()["refit/host_bytes"] == 0
        controller.clear()
        assert run.away()


def test_the_pageable_path_is_exact_too(run: Run) -> None:
    same = Run(device=run.device)
    with refit.Controller(run.optimizer, use_pinned_optimizer_offload=False) as controller:
        for _ in range(3):
            run.step(), same.step()
            controller.clear()
            assert run.away()
            controller.restore()
    assert_same(run, same)


def test_stats_are_a_flat_dict_of_floats(run: Run) -> None:
    run.step()
    with refit.Controller(run.optimizer) as controller:
        assert controller.stats()["refit/cycles"] == 0.0
        controller.clear()
        controller.prepare_for_training()
        stats = controller.stats()
        moved = sum(t.untyped_storage().nbytes() for t in run.moments())
        assert all(type(value) is float for value in stats.values())
        assert stats["refit/offload_bytes"] == stats["refit/reclaimed_bytes"] == moved
        assert stats["refit/cycles"] == 1.0
        assert stats["refit/cycle_s"] >= stats["refit/cycle_exposed_s"] > 0


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
        assert controller._cycle.tally._counted is None
        before = failures()
        whole_cycle(controller)
        commit()
        assert failures() == before


def fail_to_commit(_publisher: refit.Publisher) -> None:
    raise PeerError("the workers were lost")


def test_a_controller_says_where_its_states_are(run: Run) -> None:
    run.step()
    moved = sum(t.untyped_storage().nbytes() for t in run.moments())
    with refit.Controller(run.optimizer) as controller:
        assert repr(controller) == "Controller(training, tensors=0, bytes=0)"
        controller.clear()
        assert repr(controller) == f"Controller(cleared, tensors=8, bytes={moved})"
        with controller.refit(5):
            pass
        assert repr(controller).startswith("Controller(cleared, ")
    assert repr(controller) == "Controller(closed)"


def test_figures_have_the_publishers_of_the_last_refit_until_it_is_closed(run: Run) -> None:
    run.step()
    with refit.Controller(run.optimizer) as controller:
        with refit.Publisher("tcp://127.0.0.1:0", broadcast_shm="off") as publisher:
            with controller.refit(7, publisher) as tx:
                tx.send({"w": run.moments()[0].new_ones(4)})
            stats = controller.stats()
            assert stats["refit/version"] == 7
            assert stats["refit/publish_bytes"] > 0
            assert stats["refit/offload_bytes"] > 0
        assert controller.stats()["refit/version"] == 0


def test_refit_without_a_publisher_clears_and_an_exception_passes_through(run: Run) -> None:
    run.step()
    with refit.Controller(run.optimizer) as controller:
        with controller.refit():
            assert run.away()
        controller.prepare_for_training()
        with pytest.raises(ZeroDivisionError), controller.refit():
            raise ZeroDivisionError
        assert controller.state == "cleared"
        run.step()


def test_options_are_those_of_the_library(run: Run) -> None:
    with pytest.raises(refit.RefitError, match="offload_slab"):
        refit.Controller(run.optimizer, offload_slab="1GiB")
    assert not run.optimizer._optimizer_step_pre_hooks


def test_two_hundred_cycles_keep_their_bits() -> None:
    run, same = Run(adamw), Run(adamw)
    with refit.Controller(run.optimizer) as controller:
        for _ in range(200):
            run.step(), same.step()
            controller.clear()
            controller.restore()
    assert_same(run, same)


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


def whole_cycle(controller: Any) -> None:
    controller.clear()
    controller.restore()
    controller.join()


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
        monkeypatch.setattr(Regions, "home", property(lambda _: False))
        monkeypatch.setattr(Regions, "back", property(lambda _: False))
        monkeypatch.setattr(Regions, "settle", fail_to_copy)
        with pytest.raises(CopyError):
            controller.join()
        monkeypatch.undo()
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
        monkeypatch.setattr(Regions, "home", property(lambda _: False))
        monkeypatch.setattr(Regions, "back", property(lambda _: False))
        monkeypatch.setattr(Regions, "settle", fail_to_copy)
        with pytest.raises(CopyError):
            controller.join()
        monkeypatch.undo()
        controller.clear()
        assert run.away()
        assert all(p.grad.isnan().all() for p in run.model.parameters())
        run.step(), same.step()
    assert_same(run, same)


def fail_to_copy(_regions: Regions) -> None:
    raise CopyError("the copy failed")


def test_states_that_all_went_away_by_themselves_leave_nothing_to_move(run: Run) -> None:
    run.step()
    with refit.Controller(run.optimizer) as controller:
        controller.clear()
        controller.prepare_for_training()
        run.optimizer.state.clear()
        controller.clear()
        assert controller.stats()["refit/regions"] == 0
        controller.prepare_for_training()
        run.step()
        controller.clear()
        assert run.away()


def test_a_fork_is_refused_with_a_sentence_and_harms_nobody(run: Run) -> None:
    # trap 27
    run.step()
    with refit.Controller(run.optimizer) as controller:
        controller.clear()
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            said = "nothing"
            try:
                controller.restore()
            except StateError as why:
                said = str(why)
            os.write(writing, said.encode())
            os._exit(0)
        os.waitpid(child, 0)
        assert b"a forked process makes its own" in os.read(reading, 1000)
        os.close(reading), os.close(writing)
        run.step()


def test_replaced_states_are_not_held_in_memory(run: Run) -> None:
    run.step()
    with refit.Controller(run.optimizer) as controller:
        controller.clear()
        controller.prepare_for_training()
        old = weakref.ref(run.moments()[0])
        for state in run.optimizer.state.values():
            state["exp_avg"] = state["exp_avg"].clone()
        gc.collect()
        assert old() is None


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_the_memory_of_the_states_really_goes_and_comes_back() -> None:
    # 256 MiB of moments, in tensors of a size that malloc keeps in its heap
    count, each = 512, 64 << 10
    parameters = [torch.nn.Parameter(torch.zeros(each)) for _ in range(count)]
    optimizer = torch.optim.AdamW(parameters, foreach=False)
    for parameter in parameters:
        parameter.grad = torch.ones(each)
    optimizer.step()
    optimizer.zero_grad()
    moved = 2 * count * each * 4
    assert moved == 256 << 20
    with refit.Controller(optimizer) as controller:
        controller.clear()
        controller.prepare_for_training()  # the host image is there from now on
        full = resident_bytes()
        controller.clear()
        assert full - resident_bytes() > 0.9 * moved
        controller.prepare_for_training()
        assert abs(full - resident_bytes()) < 0.1 * moved


@pytest.mark.slow
def test_two_hundred_cycles_do_not_grow() -> None:
    run = Run()
    run.step()
    with refit.Controller(run.optimizer, grads="keep") as controller:
        sizes = []
        for number in range(400):
            run.step()
            run.backward()
            controller.clear()
            controller.restore()
            if number in (200, 399):
                gc.collect()
                sizes.append(resident_bytes())
    assert sizes[1] - sizes[0] < 1 << 20
