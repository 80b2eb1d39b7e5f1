"""progress: bars on long work, for rank 0 on a terminal alone."""

import builtins
import io
import sys
import types
from typing import Any

import pytest
from refit.observe import observers
from refit.observe.observers import LARGE, bar, rank


class Terminal(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self) -> bool:
        return True


def show_terminal(monkeypatch: pytest.MonkeyPatch, stderr: Any = None) -> Any:
    """Called by a test itself: between its fixtures and it pytest takes stderr again."""
    made = stderr or Terminal()
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
    with bar("offload", 1, wanted=True) as shown:
        assert shown.visible


@pytest.mark.parametrize(
    ("nbytes", "wanted", "stderr", "others"),
    [
        (LARGE - 1, None, Terminal(), {}),
        (LARGE, False, Terminal(), {}),
        (LARGE, True, Terminal(), {"RANK": "3"}),
        (LARGE, True, io.StringIO(), {}),
    ],
    ids=["small", "not wanted", "another rank", "a pipe"],
)
def test_others_show_none(
    monkeypatch: pytest.MonkeyPatch, nbytes: int, wanted: Any, stderr: Any, others: dict[str, str]
) -> None:
    show_terminal(monkeypatch, stderr)
    for name, value in others.items():
        monkeypatch.setenv(name, value)
    with bar("offload", nbytes, wanted=wanted) as shown:
        assert not shown.visible
    assert stderr.getvalue() == ""


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
    hidden = observers.Bar(None, 10)
    hidden.reach(4)
    hidden.reach(2)
    hidden.advance(1)
    assert hidden.done == 5


def test_a_bar_closes_when_the_work_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    show_terminal(monkeypatch)
    shown = bar("publish", LARGE)
    with pytest.raises(OSError, match="gone"), shown:
        raise OSError("gone")
    assert not shown.visible
    shown.close()


def test_the_rank_is_that_of_the_running_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert rank() == 1
    group = types.SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda: 2
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", group)
    assert rank() == 2


@pytest.mark.parametrize(("said", "known"), [("2", 2), ("", 0), ("first", 0), ("-1", 0)])
def test_a_rank_may_be_no_number(monkeypatch: pytest.MonkeyPatch, said: str, known: int) -> None:
    monkeypatch.setenv("RANK", said)
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    assert rank() == known
