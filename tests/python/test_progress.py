"""progress: bars on long work, for rank 0 on a terminal alone."""

import builtins
import io
import sys
import types

import pytest
from refit import progress
from refit.progress import LARGE, bar, rank


class Terminal(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self) -> bool:
        return True


def show_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Called by a test itself: between its fixtures and it pytest takes stderr again."""
    made = Terminal()
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "stderr", made)
    return made


def test_large_work_on_a_terminal_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tqdm")
    terminal = show_terminal(monkeypatch)
    with bar("offload", LARGE) as shown:
        assert shown.visible
        shown.advance(LARGE // 2)
    assert "refit offload" in terminal.getvalue()


def test_small_work_shows_none_unless_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tqdm")
    show_terminal(monkeypatch)
    assert not bar("offload", LARGE - 1).visible
    with bar("offload", 1, wanted=True) as shown:
        assert shown.visible


def test_one_that_is_not_wanted_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = show_terminal(monkeypatch)
    assert not bar("offload", LARGE, wanted=False).visible
    assert terminal.getvalue() == ""


def test_another_rank_shows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    show_terminal(monkeypatch)
    monkeypatch.setenv("RANK", "3")
    assert not bar("offload", LARGE, wanted=True).visible


def test_a_file_or_a_pipe_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert not bar("offload", LARGE, wanted=True).visible


def test_without_tqdm_the_work_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    show_terminal(monkeypatch)
    plain = builtins.__import__

    def without(name, *rest, **named):
        if name.startswith("tqdm"):
            raise ImportError(name)
        return plain(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with bar("offload", LARGE) as shown:
        shown.advance(5)
    assert not shown.visible
    assert shown.done == 5


def test_a_hidden_bar_counts_all_the_same() -> None:
    hidden = progress.Bar(None, 10)
    hidden.reach(4)
    hidden.reach(2)
    hidden.advance(1)
    assert hidden.done == 5


def test_a_bar_closes_when_the_work_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    show_terminal(monkeypatch)

    def fail() -> None:
        with bar("publish", LARGE) as shown:
            fail.shown = shown  # type: ignore[attr-defined]
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        fail()
    assert not fail.shown.visible  # type: ignore[attr-defined]
    fail.shown.close()  # type: ignore[attr-defined]


def test_the_rank_is_that_of_the_running_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert rank() == 1
    group = types.SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda: 2
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", group)
    assert rank() == 2


@pytest.mark.parametrize("said", ["", "first", "-1"])
def test_a_rank_that_is_no_number_is_taken_for_the_first(
    said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", said)
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    assert rank() == 0
