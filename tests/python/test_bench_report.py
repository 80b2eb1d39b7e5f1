"""bench report: one page, with the tables and pictures of what was measured."""

import json
from pathlib import Path

import pytest
import torch
from refit.bench import __main__ as entry
from refit.bench import host_sweep, report
from refit.errors import HostMemoryError
from refit.observe import memory_now

QUICK = ["--device", "cpu", "--parameters", "2e5", "--rounds", "1", "--lengths", "32"]


def test_the_page_has_a_table_of_each_part_and_its_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(report, "FRACTIONS", (1.0,))
    folder = tmp_path / "new" / "page"
    assert entry.main(["report", str(folder), *QUICK]) == 0
    page = (folder / "report.md").read_text()
    sections = page.split("\n## ")[1:]
    assert [one.partition("\n")[0] for one in sections] == [part.title for part in report.PARTS]
    assert all("\n|--" in one for one in sections)
    for picture in ("host_sweep.svg", "activations.svg"):
        assert f"]({picture})" in page
        assert (folder / picture).stat().st_size > 1000
    assert "says nothing of one" in page
    written = json.loads((folder / "report.json").read_text())
    assert [one["bench"] for one in written["results"]] == [
        "gpu_offload",
        "gpu_weights",
        "host_sweep",
        "activations",
    ]


def test_a_device_that_is_not_there_is_refused_before_minutes_of_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host_sweep, "measure", pytest.fail)
    with pytest.raises(SystemExit) as end:
        report.main([str(tmp_path), "--device", "nowhere:0"])
    assert end.value.code == 2
    assert "--device nowhere:0" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SystemExit):
        report.main([str(tmp_path), "--device", "cpu"])
    assert "CUDA_VISIBLE_DEVICES" in capsys.readouterr().err
    monkeypatch.undo()
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        report.main([str(tmp_path / "file" / "page"), "--device", "cpu"])
    assert "cannot be made" in capsys.readouterr().err


def test_too_little_memory_writes_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory_now, "available_bytes", lambda: 1 << 20)
    assert report.main([str(tmp_path), *QUICK]) == 1
    assert "memory" in capsys.readouterr().err
    assert not (tmp_path / "report.md").exists()
    with pytest.raises(HostMemoryError):
        report.PARTS[0].measure(report._options([str(tmp_path), *QUICK]))
