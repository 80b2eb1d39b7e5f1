"""The controller: states leave, return exactly, and are there whenever they are used."""

import copy
import gc
import os
import pickle
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import refit  # noqa: E402
from refit.errors import BusyError, InvalidError, StateError  # noqa: E402
from training import Run, adamw, assert_same, assert_same_states  # noqa: E402


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


class Chunk(torch.nn.Sequential):
    """As Megatron's DistributedDataParallel, which has a list of buffers where a module has a
    method."""

    def __init__(self, *layers: Any) -> None:
        super().__init__(*layers)
        self.buffers = []


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("is_listed", [False, True])
def test_a_model_may_be_a_list_of_megatrons_chunks(chunks: int, is_listed: bool) -> None:
    layers = [torch.nn.Linear(64, 64) for _ in range(chunks)]
    whole = [Chunk(one) for one in layers] if is_listed else Chunk(*layers)
    parameters = [one for layer in layers for one in layer.parameters()]
    optimizer = torch.optim.AdamW(parameters)
    for layer in layers:
        layer(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    with refit.Controller(optimizer, whole) as controller:
        controller.clear()
        assert controller.stats()["refit/offload_bytes"] > 0
    for nothing in ([], [optimizer], "model"):
        with pytest.raises(InvalidError, match=r"model is a .*give a torch\.nn\.Module, or a list"):
            refit.Controller(optimizer, nothing)  # type: ignore[arg-type]


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
    assert controller.state == "closed"
    assert_same(run, same)
    assert not run.optimizer._optimizer_step_pre_hooks
    assert not run.optimizer._optimizer_state_dict_pre_hooks
    assert not run.optimizer._optimizer_load_state_dict_pre_hooks
    for verb in (controller.clear, controller.restore, controller.join, controller.stats):
        with pytest.raises(StateError, match="closed"):
            verb()


def test_an_unreferenced_controller_brings_the_states_back(run: Run) -> None:
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
        assert stats["refit/offload_bytes"] == moved
        assert stats["refit/cycles"] == 1.0
        assert stats["refit/cycle_s"] >= stats["refit/cycle_exposed_s"] > 0


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
