"""checkpoint() and state_dict(): whole wherever the states are, and loaded by any schedule."""

import copy
import gc
import io
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import refit  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
import training  # noqa: E402
from forks import said_in_a_fork  # noqa: E402
from refit.errors import BusyError, DeadlineError  # noqa: E402
from refit.states.offloader import Offloader  # noqa: E402
from schedules import (  # noqa: E402
    CYCLE,
    SCHEDULES,
    Layers,
    Schedule,
    Twins,
    assert_alike,
    lives_on_host,
    same,
    step_like,
)

pytestmark = pytest.mark.usefixtures("default_device")


def saved(states: Any) -> Any:
    """What another process would load."""
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    return torch.load(file, map_location="cpu")


def values(run: Layers) -> Any:
    return copy.deepcopy(run.optimizer.state_dict())


def on_cpu(states: dict[str, Any]) -> Any:
    """With these tensors on the CPU: a forked process has no GPU."""
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, states)


# ---- A block in which states are read.


@pytest.mark.parametrize("phase", ["training", "cleared", "returning"])
def test_a_checkpoint_has_all_states_wherever_they_are(schedule: Schedule, phase: str) -> None:
    # trap 13
    with Twins(schedule, before=2) as twins:
        run, controller = twins.moved, twins.controller
        expected = values(twins.alone)
        if phase != "training":
            controller.offload()
        if phase == "returning":
            controller.restore()
        with controller.checkpoint() as states:
            is_away = phase == "cleared" and schedule is CYCLE  # all others bring back the rest
            assert (controller.state, run.away()) == (
                ("cleared" if is_away else "training"),
                is_away,
            )
            assert same(saved(states), saved(expected))
            live = run.optimizer.state[run.model[4].weight]["exp_avg"]
            assert (states["state"][4]["exp_avg"] is live) == (not is_away)
            for refused in (controller.close, *([] if is_away else [controller.offload])):
                with pytest.raises(BusyError, match="leave its block"):
                    refused()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_writer_reads_states_on_the_host(schedule: Schedule) -> None:
    """Megatron and NeMo-RL write checkpoints so."""
    if schedule is not CYCLE and training.DEVICE != "cpu":
        pytest.skip("small states stay on the GPU, which a forked process cannot use")
    with Twins(schedule, before=2) as twins:
        run, controller = twins.moved, twins.controller
        expected = on_cpu(values(twins.alone))
        controller.offload()
        with controller.checkpoint() as states:
            assert said_in_a_fork(lambda: same(saved(states), saved(expected))) == "True"
        assert same(values(run), expected)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_what_a_fork_writes_into_states_is_its_own(schedule: Schedule) -> None:
    if schedule is CYCLE:
        pytest.skip("states that are there are PyTorch's memory")
    with Twins(schedule, before=2) as twins:
        run = twins.moved
        states = run.optimizer.state_dict()["state"].values()
        first = next(state["exp_avg"] for state in states if lives_on_host(state["exp_avg"]))

        def overwrite() -> float:
            first.fill_(7.0)
            return float(first.max())

        assert said_in_a_fork(overwrite) == "7.0"
        assert same(values(run), values(twins.alone))


def test_no_step_tears_a_checkpoint_of_states_on_the_host(schedule: Schedule) -> None:
    with Twins(schedule, before=2) as twins:
        run, controller = twins.moved, twins.controller
        expected = values(twins.alone)
        controller.offload()
        with controller.checkpoint() as states:
            controller.restore()
            twins.backward()
            if schedule is CYCLE:  # what is read is an image of what returns
                run.optimizer.step()
            else:
                for _ in range(2):
                    with pytest.raises(BusyError, match="checkpoint"):
                        run.optimizer.step()
            assert same(saved(states), saved(expected))
            with pytest.raises(BusyError, match="leave its block"):
                controller.offload()
        for one in (twins.alone, run) if schedule is not CYCLE else (twins.alone,):
            one.optimizer.step()
        for one in twins:
            one.optimizer.zero_grad()
        twins.step()


def test_checkpoints_may_be_nested_and_end_with_an_exception(schedule: Schedule) -> None:
    with Twins(schedule, before=2) as twins:
        controller = twins.controller
        for _ in range(2):
            twins.backward()
            controller.offload()
            with pytest.raises(ZeroDivisionError), controller.checkpoint(), controller.checkpoint():
                raise ZeroDivisionError
            twins.finish()


def test_several_optimizers_give_a_list(schedule: Schedule) -> None:
    runs = [Layers(), Layers(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))]
    for run in runs:
        run.step()
    expected = [values(run) for run in runs]
    with schedule.open([run.optimizer for run in runs]) as controller:
        controller.offload()
        with controller.checkpoint() as states:
            assert same(saved(states), saved(expected))


def test_a_state_dict_with_a_hook_brings_the_states_back(schedule: Schedule) -> None:
    seen: list[float] = []

    def reads_bytes(_optimizer: Any, state_dict: dict[str, Any]) -> None:
        seen.append(float(state_dict["state"][0]["exp_avg"].cpu().sum()))

    with Twins(schedule, before=2) as twins:
        for run in twins:
            run.optimizer.register_state_dict_post_hook(reads_bytes)
        expected = values(twins.alone)
        twins.controller.offload()
        with twins.controller.checkpoint() as states:
            assert twins.controller.state == "training"
            assert same(saved(states), saved(expected))
        assert seen[0] == seen[1]


def test_distributed_checkpoints_are_whole(schedule: Schedule, tmp_path: Path) -> None:
    with Twins(schedule, before=2) as twins, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        controller = twins.controller
        expected = values(twins.alone)
        controller.offload()
        with controller.checkpoint() as state:
            dcp.save({"optimizer": state}, checkpoint_id=tmp_path / "a")
        controller.prepare_for_training()
        with controller.checkpoint() as state:
            future: Any = dcp.async_save({"optimizer": state}, checkpoint_id=tmp_path / "b")
            twins.backward()
            future.result()
        twins.finish()
        for name in ("a", "b"):
            with controller.checkpoint() as state:
                loaded = {"optimizer": copy.deepcopy(state)}
            dcp.load(loaded, checkpoint_id=tmp_path / name)
            assert same(saved(loaded["optimizer"]), saved(expected))
        twins.alone.optimizer.load_state_dict(expected)
        twins.moved.optimizer.load_state_dict(loaded["optimizer"])


# ---- Of the cycle alone.


@pytest.fixture
def cleared() -> Any:
    """A run whose states are away, and its controller."""
    run = Layers()
    run.step(2)
    with CYCLE.open(run.optimizer) as controller:
        controller.offload()
        yield run, controller


def test_views_are_empty_after_the_block(cleared: Any) -> None:
    # trap 21
    with cleared[1].checkpoint() as states:
        view = states["state"][0]["exp_avg"]
        assert view.numel() > 0
    assert view.numel() == 0
    assert view.untyped_storage().nbytes() == 0


def test_strides_and_offsets_are_those_of_the_states() -> None:
    run = Layers()
    run.step(2)
    state = run.optimizer.state[run.model[2].weight]
    state["exp_avg"] = torch.stack([state["exp_avg"], state["exp_avg"] + 1])[1].t()
    expected = state["exp_avg"].clone()
    with CYCLE.open(run.optimizer) as controller:
        controller.offload()
        with controller.checkpoint() as states:
            view = states["state"][2]["exp_avg"]
            assert view.stride() == state["exp_avg"].stride()
            assert torch.equal(view, expected.cpu())


def test_the_pageable_path_has_a_checkpoint_too() -> None:
    with Twins(CYCLE, before=2, use_pinned_optimizer_offload=False) as twins:
        twins.controller.offload()
        with twins.controller.checkpoint() as states:
            assert same(saved(states), saved(values(twins.alone)))


def test_a_checkpoint_waits_for_a_clear_that_met_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def too_late(*_arguments: Any, **_named: Any) -> None:
        raise DeadlineError("the copies are not done in time")

    with Twins(CYCLE, before=3) as twins:
        with monkeypatch.context() as patch:
            patch.setattr(Offloader, "wait", too_late)
            with pytest.raises(DeadlineError):
                twins.controller.offload()
        with twins.controller.checkpoint() as states:
            assert same(saved(states), saved(values(twins.alone)))
        twins.controller.offload()
        assert twins.moved.away()


class Owner:
    """An object that refers to all that a checkpoint needs, and is part of a reference cycle."""

    def __init__(self, run: Layers) -> None:
        self.controller = refit.Controller(run.optimizer)
        self.controller.offload()
        self.block = self.controller.checkpoint()
        self.states = self.block.__enter__()
        self.myself = self


@pytest.mark.parametrize("within", ["a block", "a reference cycle"])
def test_a_controller_dropped_in_its_checkpoint_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, within: str
) -> None:
    def opened() -> set[int]:
        gc.collect()
        found = [one for one in gc.get_objects() if type(one) is Offloader]
        return {id(one) for one in found if not one.closed}

    unraised: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unraised.append)
    monkeypatch.setattr(sys, "excepthook", lambda *what: unraised.append(what))
    run = Layers()
    run.step(2)
    expected = values(run)
    before = opened()
    if within == "a block":
        controller = refit.Controller(run.optimizer)
        controller.offload()
        with controller.checkpoint() as states:
            del controller
            gc.collect()
            assert same(saved(states), saved(expected))
            run.step()  # the states are back: no controller is left to bring them
            assert same(saved(states), saved(expected))
    else:
        owner = Owner(run)
        assert opened() - before
        del owner
        gc.collect()
        run.step()
    assert opened() <= before
    assert [str(one) for one in unraised] == []
    refit.Controller(run.optimizer).close()


# ---- State dicts go from any schedule to any other, and to runs without refit.


class Mixed(Layers):
    """Of bf16 and of fp32 parameters."""

    def __init__(self, make: Any = None) -> None:
        super().__init__()
        self.model[2].weight.data = self.model[2].weight.data.bfloat16()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def loss(self) -> torch.Tensor:
        with torch.autocast(torch.device(self.device).type, torch.bfloat16):
            return super().loss().float()


ANY = [None, *SCHEDULES]


def opened(schedule: Schedule | None, run: Layers) -> Any:
    return None if schedule is None else schedule.open(run.optimizer, run.model)


def name_of(one: Any) -> str:
    return one.name if isinstance(one, Schedule) else "without"


@pytest.mark.parametrize("kind", [Layers, pytest.param(Mixed, marks=pytest.mark.slow)])
@pytest.mark.parametrize("to", ANY, ids=name_of)
@pytest.mark.parametrize("source", ANY, ids=name_of)
def test_a_state_dict_is_loaded_by_another_run(
    source: Schedule | None, to: Schedule | None, kind: Callable[[], Layers]
) -> None:
    plain, writer, reader = kind(), kind(), kind()
    controllers = [opened(source, writer), opened(to, reader)]
    step_like(plain.optimizer, controllers[0], plain.model)
    plain.step(3), writer.step(3)
    weights, states = saved([writer.model.state_dict(), writer.optimizer.state_dict()])
    assert same(states, saved(plain.optimizer.state_dict()))
    reader.model.load_state_dict(weights)
    reader.optimizer.load_state_dict(copy.deepcopy(states))  # before its first step
    reader.steps = 3
    if to is not None:
        here = [lives_on_host(one) for one in reader.moments()]
        assert here.count(True) == {"cycle": 0, "share": 4}.get(to.name, 6)
    assert_alike(plain, reader)
    step_like(plain.optimizer, controllers[1], plain.model)
    for run in (plain, writer, reader):
        run.step(2)
    assert_alike(plain, reader)
    step_like(plain.optimizer, controllers[0], plain.model)
    for run in (plain, writer):
        run.model.load_state_dict(weights)
        run.optimizer.load_state_dict(copy.deepcopy(states))  # over states that are there
        run.step()
    assert_alike(plain, writer)
    for one in controllers:
        if one is not None:
            one.close()


def test_a_state_dict_of_another_type_is_converted(schedule: Schedule) -> None:
    with Twins(schedule, before=1) as twins:
        given = values(twins.alone)
        for state in given["state"].values():
            state["exp_avg"] = state["exp_avg"].double()
        for run in twins:
            run.optimizer.load_state_dict(copy.deepcopy(given))
        twins.step()


def test_hooks_of_others_see_the_whole_state_dict(schedule: Schedule) -> None:
    seen: list[int] = []

    def look(_: Any, given: dict[str, Any]) -> dict[str, Any]:
        seen.append(sum(map(len, given["state"].values())))
        return {**given}

    with Twins(schedule, before=1) as twins:
        given = values(twins.alone)
        twins.step()
        for run in twins:
            run.optimizer.register_load_state_dict_pre_hook(look)
            run.optimizer.load_state_dict(copy.deepcopy(given))
        assert seen == [18, 18]


def test_a_state_dict_that_does_not_fit_changes_nothing(schedule: Schedule) -> None:
    with Twins(schedule, before=1) as twins:
        wrong = twins.alone.optimizer.state_dict()
        wrong["param_groups"] = []
        with pytest.raises(ValueError, match="parameter group"):
            twins.moved.optimizer.load_state_dict(wrong)
        twins.step()
