"""A failure at any point of a cycle: an error that says what to do, nothing lost, and the same verb
goes on where it was."""

from collections.abc import Callable
from typing import Any

import pytest
import refit
import torch
from refit.errors import BudgetError, RefitError
from training import Run, assert_same

MOST = 64
"""More calls than one cycle of these runs makes."""


class Failing:
    """Fails the call of a given number, from the outside."""

    def __init__(self, real: Callable[..., Any], error: BaseException, at: int) -> None:
        self.real, self.error, self.left = real, error, at

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return self.real(*arguments, **named)


@pytest.fixture
def twins() -> tuple[Run, Run]:
    alone, moved = Run(), Run()
    alone.step(2)
    moved.step(2)
    return alone, moved


@pytest.mark.parametrize("error", [MemoryError("no memory"), KeyboardInterrupt()], ids=str)
@pytest.mark.parametrize("verb", ["clear", "restore"])
@pytest.mark.parametrize("at", range(1, 9))
def test_a_storage_that_cannot_be_resized_is_tried_again(  # trap 12
    twins: tuple[Run, Run],
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    at: int,
    error: BaseException,
) -> None:
    alone, moved = twins
    with refit.Controller(moved.optimizer, moved.model) as controller:
        if verb == "restore":
            controller.clear()
        real = torch.UntypedStorage.resize_
        failing = Failing(real, error, at)
        monkeypatch.setattr(torch.UntypedStorage, "resize_", lambda *a: failing(*a))
        with pytest.raises((type(error), RefitError)):
            getattr(controller, verb)()
        getattr(controller, verb)()
        monkeypatch.setattr(torch.UntypedStorage, "resize_", real)
        controller.restore()
        alone.step()
        moved.step()
        assert_same(alone, moved)


@pytest.mark.parametrize("at", range(1, 9))
def test_training_may_go_on_at_once_after_a_clear_that_failed(
    twins: tuple[Run, Run], monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    alone, moved = twins
    with refit.Controller(moved.optimizer, moved.model) as controller:
        failing = Failing(torch.UntypedStorage.resize_, MemoryError("no memory"), at)
        monkeypatch.setattr(torch.UntypedStorage, "resize_", lambda *a: failing(*a))
        with pytest.raises((MemoryError, RefitError)):
            controller.clear()
        alone.step()
        moved.step()
        assert_same(alone, moved)


def calls_of_a_cycle(monkeypatch: pytest.MonkeyPatch) -> int:
    """How many calls of the C library one cycle makes."""
    counting = Failing(lambda *_: None, MemoryError(), -1)
    run = Run()
    run.step(2)
    with refit.Controller(run.optimizer, run.model) as controller:
        import refit.offloader as offloader

        real = offloader.call

        def counted(*arguments: Any) -> Any:
            counting.left -= 1
            return real(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(offloader, "call", counted)
            controller.clear()
            controller.restore()
            controller.join()
    return -1 - counting.left


def test_ctrl_c_before_any_call_of_the_library_loses_nothing(
    twins: tuple[Run, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    import refit.offloader as offloader

    count = calls_of_a_cycle(monkeypatch)
    assert 3 < count < MOST
    alone, moved = twins
    real = offloader.call
    with refit.Controller(moved.optimizer, moved.model) as controller:
        for at in range(1, count + 1):
            with monkeypatch.context() as patch:
                patch.setattr(offloader, "call", Failing(real, KeyboardInterrupt(), at))
                try:
                    controller.clear()
                    controller.restore()
                    controller.join()
                except KeyboardInterrupt:
                    pass
            alone.step()
            moved.step()
            assert_same(alone, moved)


def test_a_budget_is_refused_before_a_byte_moves(twins: tuple[Run, Run]) -> None:  # trap 26
    alone, moved = twins
    with refit.Controller(moved.optimizer, moved.model, offload_budget_bytes="4KiB") as controller:
        for _ in range(2):
            with pytest.raises(BudgetError, match="budget"):
                controller.clear()
            assert controller.state == "training"
            assert not moved.away()
        alone.step()
        moved.step()
    assert_same(alone, moved)


class NoPublisher:
    """A publisher whose every call fails."""

    def __getattr__(self, name: str) -> Any:
        raise ConnectionError(f"{name}: no peer")


def test_a_publisher_that_fails_leaves_states_safe(twins: tuple[Run, Run]) -> None:
    alone, moved = twins
    with refit.Controller(moved.optimizer, moved.model) as controller:
        with (
            pytest.raises(ConnectionError, match="no peer"),
            controller.refit(publisher=NoPublisher()) as tx,
        ):
            tx.send(refit.named_weights(moved.model))
        assert controller.state in ("cleared", "training")
        controller.restore()
        alone.step()
        moved.step()
        assert_same(alone, moved)
