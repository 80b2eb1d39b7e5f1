"""checkpoint(): a state_dict that is whole, wherever the states are."""

import copy
import gc
import io
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import refit  # noqa: E402
from refit.errors import BusyError, DeadlineError  # noqa: E402
from refit.image import Image  # noqa: E402
from refit.offloader import Offloader  # noqa: E402
from training import Run, assert_same, assert_same_states  # noqa: E402


@pytest.fixture
def run(torch_device: str) -> Run:
    run = Run(device=torch_device)
    run.step(2)
    return run


def test_while_away_the_state_dict_lies_over_the_host_image(run: Run) -> None:
    # trap 13
    values = copy.deepcopy(run.optimizer.state_dict())
    with refit.Controller(run.optimizer) as controller:
        controller.clear()
        with controller.checkpoint() as state_dict:
            assert controller.state == "cleared"
            assert run.away()
            assert_same_states(state_dict, values)
            assert state_dict["param_groups"] == values["param_groups"]
            file = io.BytesIO()
            torch.save(state_dict, file)
        file.seek(0)
        assert_same_states(torch.load(file), values)


def test_views_are_empty_after_the_block(run: Run) -> None:
    # trap 21
    with refit.Controller(run.optimizer) as controller:
        controller.clear()
        with controller.checkpoint() as state_dict:
            view = state_dict["state"][0]["exp_avg"]
            assert view.numel() > 0
        assert view.numel() == 0
        assert view.untyped_storage().nbytes() == 0


def test_a_closed_image_shows_nothing(run: Run) -> None:
    # trap 21
    with refit.Controller(run.optimizer) as controller:
        controller.clear()
        away = run.optimizer.state[next(run.model.parameters())]["exp_avg"]
        image = Image(controller._cycle.per_device)
        assert image.view(away) is not None
        image.close()
        assert image.view(away) is None


def test_strides_and_offsets_are_those_of_the_states(run: Run) -> None:
    state = run.optimizer.state[next(run.model.parameters())]
    state["exp_avg"] = torch.stack([state["exp_avg"], state["exp_avg"] + 1])[1].t()
    values = state["exp_avg"].clone()
    with refit.Controller(run.optimizer) as controller:
        controller.clear()
        with controller.checkpoint() as state_dict:
            view = state_dict["state"][0]["exp_avg"]
            assert view.stride() == state["exp_avg"].stride()
            assert torch.equal(view, values.cpu())


def test_a_checkpoint_may_be_read_while_states_come_back_and_are_stepped(run: Run) -> None:
    values = copy.deepcopy(run.optimizer.state_dict())
    with refit.Controller(run.optimizer) as controller:
        controller.clear()
        with controller.checkpoint() as state_dict:
            controller.restore()
            run.step()
            assert_same_states(state_dict, values)
            with pytest.raises(BusyError, match="checkpoint"):
                controller.clear()
            assert_same_states(state_dict, values)
        controller.clear()
        assert run.away()


def test_while_resident_it_is_the_live_one_and_no_clear_tears_it(run: Run) -> None:
    # trap 14
    with refit.Controller(run.optimizer) as controller:
        with controller.checkpoint() as state_dict:
            assert state_dict["state"][0]["exp_avg"] is run.moments()[0]
            with pytest.raises(BusyError, match="leave its block"):
                controller.clear()
            assert not run.away()
        controller.clear()
        controller.restore()
        with controller.checkpoint() as state_dict:  # returning: joined first
            assert state_dict["state"][0]["exp_avg"] is run.moments()[0]


def test_checkpoints_may_be_nested_and_end_with_an_exception(run: Run) -> None:
    with refit.Controller(run.optimizer) as controller:
        controller.clear()
        with pytest.raises(ZeroDivisionError), controller.checkpoint(), controller.checkpoint():
            raise ZeroDivisionError
        controller.prepare_for_training()
        controller.clear()
        assert run.away()


def test_close_within_a_checkpoint_is_refused(run: Run) -> None:
    controller = refit.Controller(run.optimizer)
    controller.clear()
    with controller.checkpoint(), pytest.raises(BusyError, match="checkpoint"):
        controller.close()
    controller.close()


def test_several_optimizers_give_a_list(run: Run) -> None:
    other = Run(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), device=run.device)
    other.step()
    values = [copy.deepcopy(one.optimizer.state_dict()) for one in (run, other)]
    with refit.Controller([run.optimizer, other.optimizer]) as controller:
        controller.clear()
        with controller.checkpoint() as state_dicts:
            for shown, value in zip(state_dicts, values, strict=True):
                assert_same_states(shown, value)


def test_a_state_dict_with_ways_of_its_own_brings_the_states_back(run: Run) -> None:
    values = copy.deepcopy(run.optimizer.state_dict())
    seen: list[float] = []

    def reads_bytes(_optimizer: Any, state_dict: dict[str, Any]) -> None:
        seen.append(float(state_dict["state"][0]["exp_avg"].sum()))

    run.optimizer.register_state_dict_post_hook(reads_bytes)
    with refit.Controller(run.optimizer) as controller:
        controller.clear()
        with controller.checkpoint() as state_dict:
            assert controller.state == "training"
            assert_same_states(state_dict, values)
    assert seen[0] == float(values["state"][0]["exp_avg"].sum())


def test_the_pageable_path_has_a_checkpoint_too(run: Run) -> None:
    values = copy.deepcopy(run.optimizer.state_dict())
    with refit.Controller(run.optimizer, use_pinned_optimizer_offload=False) as controller:
        controller.clear()
        with controller.checkpoint() as state_dict:
            assert_same_states(state_dict, values)


def test_kept_gradients_and_states_come_back_after_a_checkpoint(run: Run) -> None:
    same = Run(device=run.device)
    same.step(2)
    run.backward(), same.backward()
    with refit.Controller(run.optimizer) as controller:
        controller.clear()
        with controller.checkpoint():
            assert run.away()
        for one in (run, same):
            one.optimizer.step()
    assert_same(run, same)


def test_a_checkpoint_waits_for_a_clear_that_ended_by_its_deadline(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.step()
    expected = [t.clone() for t in run.moments()]
    with refit.Controller(run.optimizer, run.model) as controller:
        finish = Offloader.finish

        def too_late(*_arguments: Any, **_named: Any) -> None:
            raise DeadlineError("the copies are not done in time")

        monkeypatch.setattr(Offloader, "finish", too_late)
        with pytest.raises(DeadlineError):
            controller.clear()
        monkeypatch.setattr(Offloader, "finish", finish)
        with controller.checkpoint() as state_dict:
            shown = [t for s in state_dict["state"].values() for t in s.values() if t.dim() > 0]
            assert all(torch.equal(a, b) for a, b in zip(expected, shown, strict=True))
        controller.clear()
        assert run.away()


class Owner:
    """An object that refers to all that a checkpoint needs, and is part of a reference cycle."""

    def __init__(self, run: Run) -> None:
        self.controller = refit.Controller(run.optimizer)
        self.controller.clear()
        self.block = self.controller.checkpoint()
        self.states = self.block.__enter__()
        self.myself = self


@pytest.mark.parametrize("within", ["a block", "a reference cycle"])
def test_a_controller_dropped_in_its_checkpoint_says_nothing_and_leaves_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch, within: str
) -> None:
    unraised: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unraised.append)
    monkeypatch.setattr(sys, "excepthook", lambda *what: unraised.append(what))
    values = copy.deepcopy(run.optimizer.state_dict())
    gc.collect()  # those of other tests
    closed: list[Offloader] = []
    real = Offloader._close
    monkeypatch.setattr(Offloader, "_close", lambda me, p: (closed.append(me), real(me, p))[1])
    if within == "a block":
        controller = refit.Controller(run.optimizer)
        controller.clear()
        with controller.checkpoint() as states:
            del controller
            gc.collect()
            assert_same_states(states, values)
            run.step()  # the states are back: no controller is left to bring them
            assert_same_states(states, values)
    else:
        owner = Owner(run)
        del owner
        gc.collect()
        run.step()
    gc.collect()
    assert [str(one) for one in unraised] == []
    assert len(closed) == 1
    refit.Controller(run.optimizer).close()
