"""observers: timers and timelines learn of the phases of a cycle."""

import sys
import types
from contextlib import contextmanager
from functools import partial

import pytest
from refit.errors import InvalidError
from refit.observe.observers import Bar, Observers, nvtx_range


class NemoTimer:
    """Refuses a label that is running, as NeMo-RL's Timer does."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.running: set[str] = set()

    @contextmanager
    def time(self, label: str):
        if label in self.running:
            raise ValueError(f"Timer '{label}' is already running")
        self.running.add(label)
        try:
            yield
        finally:
            self.running.discard(label)
            self.seen.append(label)


@contextmanager
def marked_timer(label: str, timing_raw: dict):
    """Has the shape of verl's."""
    yield
    timing_raw[label] = timing_raw.get(label, 0) + 1


class Timeline:
    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    @contextmanager
    def phase(self, name: str, nbytes: int = 0):
        self.seen.append((name, nbytes))
        yield


def test_a_timer_object_measures_each_phase_under_its_label() -> None:
    observers = Observers(timer := NemoTimer())
    for name in ("offload", "publish", "commit", "restore"):
        with observers.phase(name):
            assert timer.running == {f"refit/{name}"}
    assert timer.seen == ["refit/offload", "refit/publish", "refit/commit", "refit/restore"]


def test_a_phase_within_one_of_the_same_name_is_measured_once() -> None:
    observers = Observers(timer := NemoTimer())
    with observers.phase("offload"), observers.phase("offload"):
        pass
    with observers.phase("offload"), observers.phase("commit"):
        pass
    assert timer.seen == ["refit/offload", "refit/commit", "refit/offload"]


def test_a_phase_that_fails_is_over_and_may_be_entered_again() -> None:
    observers = Observers(timer := NemoTimer())
    with pytest.raises(OSError, match="gone"), observers.phase("restore"):
        raise OSError("gone")
    assert timer.running == set()
    with observers.phase("restore"):
        pass
    assert timer.seen == ["refit/restore"] * 2


def test_a_timer_that_refuses_leaves_no_phase_open() -> None:
    timer, timeline = NemoTimer(), Timeline()
    timer.running.add("refit/offload")
    observers = Observers(timer, timeline)
    with pytest.raises(ValueError, match="already running"), observers.phase("offload"):
        raise AssertionError("the phase must not begin")
    timer.running.clear()
    with observers.phase("offload"):
        assert timer.running == {"refit/offload"}


def test_a_function_of_a_label_is_a_timer_too() -> None:
    timing: dict[str, int] = {}
    with Observers(partial(marked_timer, timing_raw=timing)).phase("commit"):
        pass
    assert timing == {"refit/commit": 1}


def test_a_cycle_needs_no_observers() -> None:
    observers = Observers()
    with observers.phase("offload", nbytes=3):
        observers.hold("arena", 3)
        observers.past("copies", 2, 1)


def test_a_timeline_hears_the_name_and_the_bytes() -> None:
    timeline = Timeline()
    with Observers(timeline=timeline).phase("offload", nbytes=3):
        pass
    assert timeline.seen == [("offload", 3)]


@pytest.mark.parametrize("timer", [3, "timer", object()])
def test_what_measures_nothing_is_refused_at_once(timer: object) -> None:
    with pytest.raises(InvalidError, match="measures nothing"):
        Observers(timer)  # type: ignore[arg-type]


def test_a_function_without_a_context_manager_is_refused() -> None:
    observers = Observers(lambda label: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(InvalidError, match="refit/offload"), observers.phase("offload"):
        raise AssertionError("the phase must not begin")


def test_a_hidden_bar_is_given_where_bars_are_not_wanted() -> None:
    with Observers(progress=False).bar("offload", 1 << 40) as shown:
        shown.advance(1)
        assert not shown.visible


def test_a_phase_that_moves_bytes_fills_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[str, int, bool | None]] = []
    made = Bar(None, 7)

    def recorded(what: str, nbytes: int, wanted: bool | None) -> Bar:
        shown.append((what, nbytes, wanted))
        return made

    monkeypatch.setattr("refit.observe.observers.bar", recorded)
    with Observers(progress=True).phase("offload", nbytes=7):
        assert made.done == 0
    assert made.done == 7
    with Observers(progress=True).phase("wait"):
        pass
    assert shown == [("offload", 7, True), ("wait", 0, False)]


class NvtxRecorder:
    """Stands in for torch with a GPU."""

    def __init__(self, available: bool) -> None:
        self.seen: list[str] = []
        nvtx = types.SimpleNamespace(range=self.ranges)
        self.cuda = types.SimpleNamespace(is_available=lambda: available, nvtx=nvtx)

    @contextmanager
    def ranges(self, label: str):
        self.seen.append(f"+{label}")
        yield
        self.seen.append(f"-{label}")


@pytest.mark.parametrize("available", [True, False])
def test_a_gpu_gets_a_range_in_a_profiler(monkeypatch: pytest.MonkeyPatch, available: bool) -> None:
    torch = NvtxRecorder(available)
    monkeypatch.setitem(sys.modules, "torch", torch)
    with nvtx_range("refit/offload"):
        assert torch.seen == ["+refit/offload"] * available
    assert torch.seen == ["+refit/offload", "-refit/offload"] * available


def test_without_torch_there_is_none_and_torch_is_not_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with nvtx_range("refit/offload"):
        assert "torch" not in sys.modules


def test_the_torch_that_is_here_takes_a_range() -> None:
    import torch

    with nvtx_range("refit/offload"):
        assert torch.ones(1).item() == 1.0
