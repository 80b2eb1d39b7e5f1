"""bench picture: what is run for it is drawn, and figures that other parts have written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from refit.bench import __main__ as entry
from refit.bench import figures, host_picture, picture
from refit.bench.activation_ways import CHECKPOINT, MEMORY, NONE, OVERLAP
from refit.observe.timeline import Timeline

Written = dict[str, Any]

pytest.importorskip("matplotlib")


def test_the_picture_is_a_part_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = Timeline()
    timeline.sample()
    monkeypatch.setattr(picture, "record", lambda parameters: timeline)
    files = tmp_path / "cycle.png", tmp_path / "cycle.json"
    assert entry.main(["picture", str(files[0]), "--trace", str(files[1])]) == 0
    assert files[0].read_bytes().startswith(b"\x89PNG")
    assert json.loads(files[1].read_text())["traceEvents"]


@pytest.mark.slow
def test_the_picture_of_steps_in_windows_shows_them(tmp_path: Path) -> None:
    files = tmp_path / "step.svg", tmp_path / "step.json"
    asked = ["picture", str(files[0]), "--trace", str(files[1]), "--states", "host"]
    assert entry.main([*asked, "--parameters", "5e6"]) == 0
    assert "states that live on the host" in files[0].read_text()
    events = json.loads(files[1].read_text())["traceEvents"]
    names = [one["name"] for one in events if one["ph"] == "X"]
    assert names.count("step") == names.count("backward") == picture.STEPS
    assert names.count("window") >= picture.STEPS * 5
    assert names.count("overlapped copies") == picture.STEPS


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere/cycle.png"], "there is no directory"),
        (["cycle.txt"], "does not end in .png"),
        ([".png"], "does not end in .png"),
        (["cycle.png", "--trace", "."], "is a directory"),
        (["cycle.png", "--parameters", "nan"], "is not above 0"),
        (["cycle.png", "--figures", "none.json"], "none.json is not a file of --json"),
    ],
    ids=str,
)
def test_unwritable_picture_is_refused_before_cycles(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(picture, "record", pytest.fail)
    with pytest.raises(SystemExit) as ended:
        picture.main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_no_picture_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("refit.bench.options.find_spec", lambda name: None)
    monkeypatch.setattr(picture, "record", pytest.fail)
    with pytest.raises(SystemExit):
        picture.main([str(tmp_path / "cycle.png")])
    assert "pip install matplotlib" in capsys.readouterr().err


# ---- figures ----


def swept() -> Written:
    kinds = ("torch.optim.AdamW", "refit", "refit, overlap=False", "HybridDeviceOptimizer")
    rows = [
        {
            "way": way,
            "host_fraction": share,
            "step_s_median": 1.0 + share,
            "step_s_p95": 2.0,
            "peak_device_bytes": 8_000_000 * (1 - share),
        }
        for way in kinds
        for share in ((0.0,) if way.startswith("torch") else (0.0, 0.5, 1.0))
    ]
    what = {"device": "cpu", "parameters": 1_000_000, "tokens": 256}
    return {"bench": "host_sweep", **what, "ways": rows}


def activated() -> Written:
    rows = [
        {"way": way, "shape": "2x4", "step_s_median": 1.0, "step_s_p95": 2.0, "peak_bytes": 5e6}
        for way in (NONE, CHECKPOINT, OVERLAP, MEMORY)
    ]
    drawn = {"forward_s": 0.5, "points": [[0.0, 0], [0.5, 4_000_000], [1.0, 0]]}
    memory = {"memory_shape": "2x4", "memory": {NONE: drawn, MEMORY: drawn}}
    return {
        "bench": "activations", "device": "cpu", "parameters": 1_000_000, **memory, "ways": rows
    }  # fmt: skip


def on_a_gpu() -> Written:
    return {**activated(), "memory": {}, "device": "a GPU"}


WHERE = {"cores": 2, "processor": "a processor"}


def written_to(folder: Path, result: Written) -> str:
    """A file as --json writes it, with the figures of another part before these."""
    source = folder / "figures.json"
    source.write_text(json.dumps({"machine": WHERE, "results": [{"bench": "offload"}, result]}))
    return str(source)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (swept, ["refit, overlap=False", "a processor", "no host memory"]),
        (activated, ["backward pass", "a processor"]),
        (on_a_gpu, ["a GPU"]),
    ],
)
def test_figures_are_drawn_the_same_each_time(
    make: Callable[[], Written], words: list[str], tmp_path: Path
) -> None:
    source = written_to(tmp_path, make())
    files = [tmp_path / name for name in ("one.svg", "two.svg", "three.PNG")]
    for file in files:
        assert entry.main(["picture", str(file), "--figures", source]) == 0
    text = files[0].read_text()
    assert text == files[1].read_text()
    assert text.startswith("<?xml")
    assert len(text) < 200_000
    for one in words:
        assert one in text
    assert files[2].stat().st_size > 5_000


@pytest.mark.parametrize(
    ("make", "change", "said"),
    [
        (swept, lambda it: it.clear(), "is not a file of --json"),
        (swept, lambda it: it.update(bench="offload"), "has no figures of host_sweep or activ"),
        (swept, lambda it: it["ways"][0].pop("step_s_p95"), "is not a file of --json"),
        (swept, lambda it: it["ways"][0].update(step_s_p95="1"), "is not a number"),
        (swept, lambda it: it.pop("device"), "is not a file of --json"),
        (activated, lambda it: it["ways"].clear(), "no rows of the shape"),
        (activated, lambda it: it["ways"][0].pop("peak_bytes"), "KeyError"),
        (activated, lambda it: it["ways"][0].update(peak_bytes="1"), "is not a number"),
        (activated, lambda it: it.pop("memory"), "KeyError"),
        (activated, lambda it: it["memory"][NONE].pop("points"), "KeyError"),
        (activated, lambda it: it["memory"][NONE].update(points=[["x", 1]]), "could not convert"),
    ],
)
def test_figures_that_cannot_be_drawn_are_refused(
    make: Callable[[], Written],
    change: Callable[[Written], Any],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = make()
    change(result)
    picture_file = tmp_path / "one.svg"
    with pytest.raises(SystemExit) as ended:
        entry.main(["picture", str(picture_file), "--figures", written_to(tmp_path, result)])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert not picture_file.exists()


def test_figures_without_a_machine_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "figures.json"
    source.write_text(json.dumps({"results": [swept()]}))
    with pytest.raises(ValueError, match="is not a file of --json"):
        figures.read(str(source), {"host_sweep": host_picture.check})


def test_a_trace_is_of_a_run_and_not_of_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["picture", str(tmp_path / "a.svg"), "--trace", str(tmp_path / "trace.json")]
    with pytest.raises(SystemExit):
        entry.main([*asked, "--figures", written_to(tmp_path, swept())])
    assert "with --figures nothing is run" in capsys.readouterr().err
