"""ms-swift's table of callbacks with refit's in it. ms-swift is a stand-in that has the table alone
(swift/callbacks/mapping.py of 4.6); transformers and refit are real."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from refit.errors import StateError
from refit.integrations import ms_swift
from test_transformers import CHOSEN, a_trainer, assert_same, left

NAME = "activation_cpu_offload"


class ActivationCpuOffloadCallBack:
    """ms-swift's own, as it is made."""

    def __init__(self, args: Any, trainer: Any) -> None:
        raise AssertionError("ms-swift's own callback was made")


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found: dict[str, Any] = {NAME: ActivationCpuOffloadCallBack, "lisa": object}
    for name in ("swift", "swift.callbacks"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["swift.callbacks"].callbacks_map = found  # type: ignore[attr-defined]
    return found


def test_the_callback_that_ms_swift_makes_is_refits(tmp_path: Path, table: dict[str, Any]) -> None:
    remove = ms_swift.install(**CHOSEN)
    args = SimpleNamespace(callbacks=[NAME])
    callbacks = [table[name](args, None) for name in args.callbacks]  # swift/trainers/mixin.py
    plain = a_trainer(tmp_path, [])
    plain.train()
    ours = a_trainer(tmp_path, callbacks)
    ours.train()
    assert_same(plain, ours)
    assert min(left(ours)) > 0
    remove()
    remove()
    assert table[NAME] is ActivationCpuOffloadCallBack


def test_a_second_installation_is_refused_and_one_over_it_is_left(table: dict[str, Any]) -> None:
    remove = ms_swift.install(**CHOSEN)
    with pytest.raises(StateError, match="installed in this ms-swift already"):
        ms_swift.install(**CHOSEN)
    table[NAME] = object
    remove()
    assert table[NAME] is object


def test_without_ms_swift_nothing_can_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "swift.callbacks", None)
    with pytest.raises(ImportError):
        ms_swift.install(**CHOSEN)
