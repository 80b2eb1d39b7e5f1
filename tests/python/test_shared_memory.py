"""States that code outside refit moves to shared memory, in place: by ``share_memory_()``, or by
sending them to another process with ``torch.multiprocessing``."""

from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import refit
import torch
import torch.multiprocessing  # it tells the pickler of tensors
from schedules import CYCLE, Schedule, Twins, lives_on_host

KEYS = ("exp_avg", "exp_avg_sq")


def moments(run: Any) -> Iterator[torch.Tensor]:
    for state in run.optimizer.state.values():
        yield from (state[key] for key in KEYS)


def shared(run: Any) -> None:
    for one in moments(run):
        one.share_memory_()


def storages_shared(run: Any) -> None:
    for one in moments(run):
        one.untyped_storage().share_memory_()


def sent(run: Any) -> None:
    ForkingPickler.dumps(run.optimizer.state_dict())


MOVES = [shared, storages_shared, sent]


@pytest.mark.parametrize("move", MOVES)
def test_training_goes_on_with_states_that_were_moved(
    schedule: Schedule, move: Callable[[Any], None]
) -> None:
    with Twins(schedule) as twins:
        for number in range(5):
            twins.step()
            for run in twins:
                move(run)
            if number == 2:
                for one in (one for run in twins for one in moments(run)):
                    one.mul_(0.5)
            twins.assert_same()
            if number % 2:
                twins.cycle()


@pytest.mark.parametrize("move", MOVES)
def test_what_was_moved_before_the_last_step_is_seen_at_the_end(
    schedule: Schedule, move: Callable[[Any], None]
) -> None:
    with Twins(schedule) as twins:
        twins.step(2)
        for run in twins:
            move(run)
        twins.step()
        twins.assert_same()


def test_states_that_were_moved_and_exchanged_find_their_places(schedule: Schedule) -> None:
    with Twins(schedule) as twins:
        for _ in range(3):
            twins.step()
            for run in twins:
                shared(run)
                one, other = (run.optimizer.state[run.model[at].weight] for at in (2, 4))
                one["exp_avg"], other["exp_avg"] = other["exp_avg"], one["exp_avg"]
            twins.step()
            for run in twins:
                one, other = (run.optimizer.state[run.model[at].weight] for at in (2, 4))
                one["exp_avg"], other["exp_avg"] = other["exp_avg"], one["exp_avg"]


def test_states_that_were_shared_while_away_come_back() -> None:
    with Twins(CYCLE) as twins:
        for _ in range(3):
            twins.step()
            twins.controller.offload()
            for one in moments(twins.moved):
                one.untyped_storage().share_memory_()
            twins.controller.restore()
            twins.assert_same()


def data_replaced(run: Any) -> None:
    for one in moments(run):
        one.data = one.data.clone()


@pytest.mark.parametrize("move", [shared, data_replaced])
def test_states_that_were_moved_and_dropped_are_made_anew(
    schedule: Schedule, move: Callable[[Any], None]
) -> None:
    with Twins(schedule) as twins:
        for _ in range(2):
            twins.step(2)
            for run in twins:
                move(run)
                for state in run.optimizer.state.values():
                    state.clear()
            twins.step()
            twins.assert_same()


def test_a_state_of_the_host_that_a_resident_parameter_has_is_taken_out() -> None:
    schedule = Schedule("", (refit.HostStates(fraction=0.4),))
    with Twins(schedule) as twins:
        twins.step(3)
        states = [twins.moved.optimizer.state[twins.moved.model[at].weight] for at in (2, 4)]
        assert [lives_on_host(one["exp_avg"]) for one in states] == [False, True]
        for run in twins:
            one, other = (run.optimizer.state[run.model[at].weight] for at in (2, 4))
            one["exp_avg"], other["exp_avg"] = other["exp_avg"], one["exp_avg"]
