"""The controller: states leave, return exactly, and are there whenever they are used."""

import copy
import gc
import pickle
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import refit  # noqa: E402
from refit import Controller  # noqa: E402
from refit.errors import BusyError, InvalidError, StateError  # noqa: E402
from training import Run, assert_same_states, hooks_of, whole_cycle  # noqa: E402


@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_cycle_frees_memory_and_returns_every_bit(
    run: Run, reference_run: Run, is_pinned: bool
) -> None:
    with Controller(run.optimizer, run.model, use_pinned_optimizer_offload=is_pinned) as controller:
        for number in range(5):
            assert run.step() == reference_run.step()
            controller.offload()
            assert controller.state == "cleared"
            assert run.away()
            controller.restore(non_blocking=number % 2 == 0)
            controller.wait()
            assert controller.state == "training"
            assert_same_states(run.optimizer.state_dict(), reference_run.optimizer.state_dict())


def test_the_log_says_once_what_leaves(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    with caplog.at_level("INFO", "refit"), Controller(optimizer, model) as controller:
        controller.offload()
        assert "leave" not in caplog.text  # no state is there yet
        for _ in range(2):
            controller.restore()
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            controller.offload()
        said = [one.getMessage() for one in caplog.records if " leave, " in one.getMessage()]
        assert said == [
            "49.9 kB leave, 6 tensors; these stay: 2 (weight.step: a step counter stays "
            "where it is)"
        ]


def test_what_is_given_in_anothers_place_is_refused(run: Run, controller: Controller) -> None:
    with refit.Publisher("tcp://127.0.0.1:0") as publisher:
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
    with Controller(optimizer, whole) as controller:
        controller.offload()
        assert controller.stats()["refit/offload_bytes"] > 0
    for nothing in ([], [optimizer], "model"):
        with pytest.raises(InvalidError, match=r"model is a .*give a torch\.nn\.Module, or a list"):
            Controller(optimizer, nothing)  # type: ignore[arg-type]


def test_every_verb_may_be_called_twice(run: Run, controller: Controller) -> None:
    for verb in (controller.offload, controller.restore, controller.wait):
        verb()
        verb()
    controller.offload_before_refit()
    controller.offload_after_refit()
    controller.offload()
    assert run.away()
    controller.prepare_for_training()
    controller.prepare_for_training()
    assert controller.state == "training"


def test_objects_views_strides_and_groups_stay_the_same(run: Run, controller: Controller) -> None:
    # traps 4 and 7
    def seen() -> list[Any]:
        found = [(id(t), type(t), t.shape, t.stride(), t.storage_offset()) for t in run.moments()]
        keys = [list(state) for state in run.optimizer.state.values()]
        return [*found, *keys, id(run.optimizer.param_groups)]

    before = seen()
    view = run.moments()[0].t()[1:]
    bytes_of_view = view.clone()
    whole_cycle(controller)
    assert seen() == before
    assert torch.equal(view, bytes_of_view)


def test_step_counters_stay_where_they_are(run: Run, controller: Controller) -> None:
    # trap 8
    counters = [state["step"] for state in run.optimizer.state.values()]
    controller.offload()
    assert all(float(one) == 2.0 for one in counters)
    assert ("0.weight.step", "a step counter stays where it is") in controller.resident


def test_a_clear_before_the_first_step_moves_nothing(torch_device: str) -> None:  # trap 9
    run = Run(device=torch_device)
    with Controller(run.optimizer) as controller:
        controller.offload()
        assert controller.state == "cleared"
        assert len(run.optimizer.state) == 0
        run.step()
        controller.offload()
        assert run.away()


def test_a_state_dict_is_whole_at_any_time(
    run: Run, reference_run: Run, controller: Controller
) -> None:
    # trap 13
    controller.offload()
    assert_same_states(run.optimizer.state_dict(), reference_run.optimizer.state_dict())
    controller.offload()
    controller.restore()
    assert_same_states(run.optimizer.state_dict(), reference_run.optimizer.state_dict())


def test_a_state_dict_loaded_while_away_replaces_states(run: Run, controller: Controller) -> None:
    # trap 15
    other = Run(device=run.device)
    other.step(4)
    saved = copy.deepcopy(other.optimizer.state_dict())
    controller.offload()
    run.optimizer.load_state_dict(saved)
    assert_same_states(run.optimizer.state_dict(), saved)
    controller.offload()
    assert run.away()
    controller.close()
    assert_same_states(run.optimizer.state_dict(), saved)


def test_a_live_state_dict_can_be_loaded(
    run: Run, reference_run: Run, controller: Controller
) -> None:
    live = run.optimizer.state_dict()
    controller.offload()
    run.optimizer.load_state_dict(live)
    assert_same_states(run.optimizer.state_dict(), reference_run.optimizer.state_dict())


def test_a_load_that_is_refused_loses_nothing(
    run: Run, reference_run: Run, controller: Controller
) -> None:
    other = Run(lambda p: torch.optim.SGD(list(p)[:1], momentum=0.9)).optimizer.state_dict()
    controller.offload()
    with pytest.raises(ValueError, match="parameter group"):
        run.optimizer.load_state_dict(other)


def test_several_optimizers_are_one_cycle(run: Run) -> None:
    other = Run(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), device=run.device)
    other.step()
    with Controller([run.optimizer, other.optimizer]) as controller:
        controller.offload()
        assert run.away()
        assert other.away()
        other.step()  # any of them brings all back
        assert controller.state == "training"
        assert not run.away()


@pytest.mark.parametrize("wrong", [None, 3, [], "adam", object()])
def test_what_is_not_an_optimizer_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidError):
        Controller(wrong)


def test_an_optimizer_has_one_controller_at_a_time(run: Run, controller: Controller) -> None:
    with pytest.raises(BusyError, match="controller already"):
        Controller(run.optimizer)
    controller.close()
    Controller(run.optimizer).close()


def test_close_brings_the_states_back_and_takes_the_hooks_away(
    run: Run, reference_run: Run
) -> None:
    controller = Controller(run.optimizer)
    controller.offload()
    controller.close()
    controller.close()
    assert controller.state == "closed"
    assert_same_states(run.optimizer.state_dict(), reference_run.optimizer.state_dict())
    assert not hooks_of(run.optimizer)
    for verb in (controller.offload, controller.restore, controller.wait, controller.stats):
        with pytest.raises(StateError, match="closed"):
            verb()


def test_an_unreferenced_controller_brings_the_states_back(run: Run, reference_run: Run) -> None:
    controller = Controller(run.optimizer)
    controller.offload()
    del controller
    gc.collect()
    assert not run.away()
    assert {type(moment) for moment in run.moments()} == {torch.Tensor}
    assert not hooks_of(run.optimizer)
    run.step(), reference_run.step()


def test_an_optimizer_is_pickled_without_its_controller(run: Run, controller: Controller) -> None:
    # trap 27
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(controller)
    assert hooks_of(run.optimizer)
    assert not hooks_of(copy.deepcopy(run.optimizer))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_while_away_is_whole(
    run: Run, reference_run: Run, controller: Controller, again: Any
) -> None:  # trap 13: PyTorch fills a copy of an empty storage with whatever there is
    controller.offload()
    twin = again(run.optimizer)
    assert_same_states(twin.state_dict(), reference_run.optimizer.state_dict())
    controller.close()
    assert "__getstate__" not in {*vars(twin), *vars(run.optimizer)}


def test_host_memory_is_given_back_and_taken_again(run: Run, controller: Controller) -> None:
    controller.offload()
    for verb in (controller.release, controller.wait):
        with pytest.raises(StateError, match="restore"):
            verb()
    controller.prepare_for_training()
    assert controller.stats()["refit/host_bytes"] > 0
    controller.release()
    assert controller.stats()["refit/host_bytes"] == 0
    controller.offload()
    assert run.away()


def test_figures_are_of_the_cycle_and_its_publisher(run: Run, controller: Controller) -> None:
    assert controller.stats()["refit/cycles"] == 0.0
    whole_cycle(controller)
    stats = controller.stats()
    assert all(type(value) is float for value in stats.values())
    assert stats["refit/offload_bytes"] == sum(t.nbytes for t in run.moments())
    assert stats["refit/cycles"] == 1.0
    assert stats["refit/cycle_s"] >= stats["refit/cycle_blocked_s"] > 0
    with refit.Publisher("tcp://127.0.0.1:0", broadcast_shm="off") as publisher:
        with controller.refit(7, publisher) as tx:
            tx.send({"w": run.moments()[0].new_ones(4)})
        stats = controller.stats()
        assert stats["refit/version"] == 7
        assert stats["refit/publish_bytes"] > 0
        assert stats["refit/offload_bytes"] > 0
    assert controller.stats()["refit/version"] == 0


def test_a_controller_says_where_its_states_are(run: Run, controller: Controller) -> None:
    moved = sum(t.nbytes for t in run.moments())
    assert repr(controller) == "Controller(training, tensors=0, bytes=0)"
    controller.offload()
    assert repr(controller) == f"Controller(cleared, tensors=8, bytes={moved})"
    with controller.refit(5):
        pass
    assert repr(controller).startswith("Controller(cleared, ")
    controller.close()
    assert repr(controller) == "Controller(closed)"


def test_a_refit_clears_and_lets_an_exception_through(run: Run, controller: Controller) -> None:
    with controller.refit():
        assert run.away()
    controller.prepare_for_training()
    with pytest.raises(ZeroDivisionError), controller.refit():
        raise ZeroDivisionError
    assert controller.state == "cleared"
    run.step()


def test_options_are_those_of_the_library(run: Run) -> None:
    with pytest.raises(refit.RefitError, match="offload_slab"):
        Controller(run.optimizer, offload_slab="1GiB")
    assert not hooks_of(run.optimizer)
