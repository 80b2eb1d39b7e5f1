"""bench: it measures what its names say, and the figures add up."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from refit.bench import __main__ as entry
from refit.bench import (
    cases,
    machine,
    offload,
    overhead,
    picture,
    states,
    steps,
    table,
    ways,
    weights,
    window,
    workers,
)
from refit.bench.memory import MemoryNeed
from refit.bench.series import Series, both, p95, ratio
from refit.errors import HostMemoryError
from refit.timeline import Timeline

TINY = 2e5

Make = Callable[[list[torch.Tensor], bool], cases.Case]


# ---- series ----


def test_the_first_round_is_cold_and_no_part_of_the_median() -> None:
    series = Series()
    for seconds in (100.0, 1.0, 3.0, 2.0):
        series.add(seconds)
    assert (series.cold, series.median, series.p95) == (100.0, 2.0, 3.0)
    assert series.gbps(4_000_000_000) == 2.0


SAMPLES = json.loads((Path(__file__).parents[1] / "bench" / "series.json").read_text())


@pytest.mark.parametrize("samples", SAMPLES, ids=lambda samples: samples["name"])
def test_samples_have_the_figures_that_refit_bench_gives_them(samples: dict[str, Any]) -> None:
    series = Series(samples["cold"], samples["seconds"])
    found = series.figures("case_") | series.cold_figure("case_")
    assert found == pytest.approx(samples["figures"], rel=1e-12)
    assert series.gbps(samples["bytes"]) == pytest.approx(samples["gbps"], rel=1e-12)
    beside = Series(**samples["beside"])
    assert ratio(series, beside) == pytest.approx(samples["ratio"], rel=1e-12)


def test_a_cycle_is_both_ways_round_by_round() -> None:
    cycle = both(Series(1, [1, 2]), Series(2, [3, 4]))
    assert (cycle.cold, cycle.seconds) == (3, [4, 6])


def test_the_95th_percentile_is_not_the_best_of() -> None:
    assert p95(list(range(100))) == 94
    assert p95([3.0, 1.0]) == 3.0


# ---- states ----


def test_the_whole_model_has_the_states_of_qwen3() -> None:
    found = list(states.shapes(0.6e9))
    assert sum(math.prod(shape) for _, shape in found) == pytest.approx(0.6e9, rel=0.01)
    assert 2 * len(found) == 620


@pytest.mark.parametrize("parameters", [TINY, 1e6, 2e7, 1e8])
def test_a_smaller_model_has_about_the_parameters_asked_for(parameters: float) -> None:
    found = list(states.shapes(parameters))
    assert sum(math.prod(shape) for _, shape in found) == pytest.approx(parameters, rel=0.05)
    assert len({name for name, _ in found}) == len(found)


@pytest.mark.parametrize("need", [states.NEED, weights.need((1, 8)), picture.NEED, window.NEED])
def test_short_memory_makes_a_smaller_model_and_never_a_larger(need: MemoryNeed) -> None:
    assert need.fitting(1e6, 1 << 40) == 1e6
    short = need.fitting(0.6e9, 4 << 30)
    assert short < 0.6e9
    assert need.takes(short) == pytest.approx(4 << 30)


@pytest.mark.parametrize("need", [states.NEED, weights.need((1, 8)), picture.NEED, window.NEED])
def test_too_little_memory_is_refused_with_what_it_takes(need: MemoryNeed) -> None:
    with pytest.raises(HostMemoryError, match=rf"{need.part} asks for .* there are 0.0 GB: end"):
        need.fitting(0.6e9, 1e6)


def test_workers_ask_for_what_a_process_takes_before_it_has_weights() -> None:
    say = "from refit.bench import workers, machine; print(machine.status_bytes('RssAnon'))"
    done = subprocess.run([sys.executable, "-c", say], capture_output=True, text=True, check=True)
    one = int(done.stdout)
    assert one > 0
    assert weights.need((1, 4)).takes(0) >= 5 * one
    assert weights.need((1, 8)).takes(0) >= 9 * one


def test_a_containers_limit_counts_and_its_cached_files_do_not(tmp_path: Path) -> None:
    free = machine.available_bytes(tmp_path)
    assert free > 0
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.available_bytes(tmp_path) == pytest.approx(free, rel=0.5)
    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.current").write_text("4000000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 300000\n")
    assert machine.available_bytes(tmp_path) == 1_300_000
    (tmp_path / "memory.current").write_text("9000000\n")
    assert machine.available_bytes(tmp_path) == 0


def test_a_machine_that_is_too_small_is_told_what_is_measured_instead() -> None:
    need = MemoryNeed("offload", 40, 0)
    assert need.told(1e8, 8e9) == "offload: 100 M parameters, which ask for 4.0 GB of free memory"
    assert need.told(6e8, 8e9).endswith("of free memory, and there are 8.0 GB: 200 M are measured")


def test_a_changed_byte_changes_the_checksum() -> None:
    tensors = states.adamw_states(TINY)
    before = states.checksum(tensors)
    tensors[-1].view(torch.uint8).view(-1)[3] ^= 1
    assert states.checksum(tensors) != before


# ---- offload ----


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "re-allocated"])
@pytest.mark.parametrize("make", offload.CASES, ids=lambda make: make.name)
def test_every_way_brings_every_byte_back(make: Make, keep: bool) -> None:
    tensors = states.adamw_states(TINY)
    before = states.checksum(tensors)
    case = make(tensors, keep)
    for _ in range(2):
        case.ready()
        case.out()
        if keep and isinstance(case, cases.OnTensors):
            for it in tensors:
                it.zero_()
        case.back()
        assert states.checksum(tensors) == before
    case.close()


@pytest.mark.parametrize("make", offload.CASES[:3], ids=lambda make: make.name)
def test_storages_are_really_freed_or_really_kept(make: Make) -> None:
    tensors = states.adamw_states(TINY)
    for keep in (True, False):
        case = make(tensors, keep)
        case.ready()
        case.out()
        sizes = {it.untyped_storage().nbytes() for it in tensors}
        assert (0 in sizes) != keep
        case.back()
        case.close()


def test_the_report_has_every_way_with_storages_kept_and_allocated_again() -> None:
    result = offload.measure(TINY, rounds=2)
    assert set(result["storages"]) == {"kept", "re-allocated"}
    for rows in result["storages"].values():
        assert [row["way"] for row in rows] == [make.name for make in offload.CASES]
        assert rows[0]["refit_speedup"] == 1.0
        for row in rows:
            assert row["cycle_seconds_median"] > 0
            assert row["offload_gbps"] > 0
    kept, again = (result["storages"][mode] for mode in ("kept", "re-allocated"))
    assert [row["allocations_per_cycle"] for row in kept] == [0, result["tensors"], 0, 0]
    count = result["tensors"]
    assert [row["allocations_per_cycle"] for row in again] == [count, 2 * count, count, 0]
    assert "per-tensor pageable" in table.offload(result)


def test_states_that_come_back_changed_make_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = cases.Flat.back

    def spoil(self: cases.Flat) -> None:
        whole(self)
        self._tensors[0].view(torch.int32).zero_()

    monkeypatch.setattr(cases.Flat, "back", spoil)
    with pytest.raises(RuntimeError, match="came back changed"):
        offload.measure(TINY, rounds=1)


# ---- weights ----


def test_every_element_of_a_version_is_new() -> None:
    made = ways.blank({"a": (3, 5), "b": ()})
    before = {name: it.view(torch.int16).clone() for name, it in made.items()}
    ways.change(made)
    for name, it in made.items():
        assert bool((it.view(torch.int16) != before[name]).all())


def test_a_worker_notices_a_version_that_is_old_or_incomplete() -> None:
    shapes = {"a": (3,), "b": (2,)}
    made = ways.blank(shapes)
    ways.change(made)
    ways.Receiver(shapes, load=True).take(made)
    with pytest.raises(RuntimeError, match="version 1 came as"):
        ways.Receiver(shapes, load=False).take({"a": made["a"]})
    ways.change(made)
    with pytest.raises(RuntimeError, match=r"came as \[2\]"):
        ways.Receiver(shapes, load=False).take(made)


def _fails(number: int) -> None:
    raise OSError(f"worker {number} has no luck")


def test_what_fails_in_a_worker_is_said_by_the_trainer() -> None:
    with workers.WorkerProcesses(1) as processes:
        processes.begin(1, _fails)
        with pytest.raises(RuntimeError, match="worker 0 has no luck"):
            processes.end(1)


@pytest.mark.slow
def test_every_way_reaches_every_worker() -> None:
    result = weights.measure(TINY, rounds=2, counts=(1, 2))
    found = [(row["workers"], row["way"]) for row in result["ways"]]
    assert found == [(count, way.name) for count in (1, 2) for way in ways.WAYS]
    assert all(row["seconds_median"] > 0 for row in result["ways"])
    assert "gloo" in table.weights(result)


# ---- steps of states on the host ----


def test_every_way_to_step_is_reported_with_the_bytes_that_it_moves() -> None:
    result = window.measure(TINY, rounds=2)
    rows = {row["way"]: row for row in result["ways"]}
    assert list(rows) == [way.name for way in steps.WAYS]
    for name, row in rows.items():
        assert row["step_s_median"] > 0
        assert row["step_s_p95"] >= row["step_s_median"]
        assert row["overlap"] > 0
        assert row["peak_device_bytes"] <= (row["window_bytes"] or result["bytes"]), name
    moved = [rows[way.name]["in_bytes"] for way in steps.WAYS]
    assert moved[0] == moved[4] == 0
    assert (
        0 < result["bytes"] - moved[1] <= result["tensors"] * 512
    )  # small states stay on the device
    assert moved[2] == moved[3] == result["bytes"]
    assert moved == [rows[way.name]["out_bytes"] for way in steps.WAYS]
    assert rows["resident"]["exposed_s"] == 0
    assert rows["per tensor, no overlap"]["speedup_over_no_overlap"] == 1
    assert "two slots" in table.window(result)


@pytest.mark.parametrize("make", steps.WAYS, ids=lambda make: make.name)
def test_a_way_that_leaves_other_bits_makes_no_report(
    make: type[steps.Way], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make.step

    def spoil(self: steps.Way) -> None:
        whole(self)
        list(self.held())[-1].view(-1)[-1:].add_(1)

    monkeypatch.setattr(make, "step", spoil)
    with pytest.raises(RuntimeError, match="other bits than resident"):
        window.measure(TINY, rounds=1)


def test_chunks_have_every_parameter_once_and_fit_into_a_slot() -> None:
    weights = [torch.zeros(count) for count in (100, 4000, 10, 10, 300, 20000, 1)]
    model = steps.Model(weights, [torch.ones_like(it) for it in weights], window_bytes=40_000)
    way = steps.TwoSlots(model)
    assert way._chunks == [[0, 1, 2, 3, 4], [5], [6]]
    assert way.peak_device_bytes == 2 * 160_768
    way.close()


# ---- overhead and the command ----


def test_the_overheads_parts_add_up() -> None:
    result = overhead.measure(rounds=2, tensors=40, planned=())
    parts = ("in_torch_storages", "in_python")
    total = sum(result[f"processor_us_per_tensor_{part}"] for part in parts)
    assert total == pytest.approx(result["processor_us_per_tensor"])
    assert result["cycle_ms_median"] > 0
    assert "Python" in table.overhead(result)


def test_every_kind_of_plan_is_measured_for_each_number_of_tensors() -> None:
    result = overhead.measure(rounds=2, tensors=4, planned=(10, 20))
    scenes = ("first plan", "steady cycle", "plan with fresh gradients", "plan after a load")
    found = [(row["tensors"], row["scene"]) for row in result["plans"]]
    assert found == [(count, scene) for count in (10, 20) for scene in scenes]
    assert [row["leaving"] for row in result["plans"]] == [10, 10, 15, 10, 20, 20, 30, 20]
    assert all(row["us_per_tensor_p95"] >= row["us_per_tensor_median"] for row in result["plans"])
    shown = table.overhead(result)
    assert all(scene in shown for scene in scenes)


def test_the_command_writes_a_table_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    options = ["offload", "--parameters", "2e5", "--rounds", "1", "--json", str(file)]
    assert entry.main(options) == 0
    assert capsys.readouterr().out.startswith("offload: ")
    written = json.loads(file.read_text())
    assert written["machine"]["cores"] >= 1
    assert written["results"][0]["bench"] == "offload"


@pytest.mark.parametrize(
    "arguments",
    [
        ["nothing"],
        ["offload", "picture"],
        ["--rounds", "0"],
        ["--workers", "0"],
        ["--parameters", "nan"],
        ["--json", "no/such/folder/figures.json"],
    ],
)
def test_bad_options_are_refused_before_anything_is_measured(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        entry.main(arguments)
    assert ended.value.code == 2
    assert "refit.bench: error" in capsys.readouterr().err


def test_what_will_be_taken_is_said_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: 1 << 20)
    monkeypatch.setattr(offload, "measure", pytest.fail)
    assert entry.main(["weights", "offload"]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("offload asks for 1.1 GB of free memory")
    assert said.out == ""


def test_steps_are_a_part_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["window", "--parameters", "2e5", "--rounds", "1"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("window: ")
    assert said.err.startswith("window: 0.2 M parameters")


def test_json_on_stdout_is_all_that_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["offload", "--parameters", "2e5", "--rounds", "1", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["bench"] == "offload"


def test_the_help_says_how_long_it_takes_and_what(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        entry.main(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    asked = round(states.NEED.takes(entry.PARAMETERS) / 1e9)
    assert f"{asked} GB of free memory" in said
    assert "minutes" in said
    assert "python -m refit.bench picture" in said


# ---- the picture ----


def test_the_picture_is_a_part_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    timeline = Timeline()
    timeline.sample()
    monkeypatch.setattr(picture, "record", lambda parameters: timeline)
    files = tmp_path / "cycle.png", tmp_path / "cycle.json"
    assert entry.main(["picture", str(files[0]), "--trace", str(files[1])]) == 0
    assert files[0].read_bytes().startswith(b"\x89PNG")
    assert json.loads(files[1].read_text())["traceEvents"]


@pytest.mark.slow
def test_the_picture_of_steps_in_windows_shows_them(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = tmp_path / "step.svg", tmp_path / "step.json"
    asked = ["picture", str(files[0]), "--trace", str(files[1]), "--states", "host"]
    assert entry.main([*asked, "--parameters", "5e6"]) == 0
    assert "states that live on the host" in picture._title(5e6, "host")
    events = json.loads(files[1].read_text())["traceEvents"]
    names = [one["name"] for one in events if one["ph"] == "X"]
    assert names.count("step") == names.count("backward") == picture.STEPS
    assert names.count("window") >= picture.STEPS * 5
    assert names.count("copies behind") == picture.STEPS


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere/cycle.png"], "there is no directory"),
        (["cycle.txt"], "does not end in .png"),
        ([".png"], "does not end in .png"),
        (["cycle.png", "--trace", "."], "is a directory"),
        (["cycle.png", "--parameters", "nan"], "is not above 0"),
    ],
)
def test_a_picture_that_cannot_be_written_is_refused_before_the_cycles(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("matplotlib")
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


def test_what_is_measured_but_not_installed_is_said_before_anything_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = {"torch": True}
    monkeypatch.setattr("refit.bench.options.find_spec", there.get)
    monkeypatch.setattr(offload, "measure", pytest.fail)
    with pytest.raises(SystemExit) as ended:
        entry.main(["offload", "weights"])
    assert ended.value.code == 2
    assert "pip install pyzmq\n" in capsys.readouterr().err


def test_a_table_is_markdown_with_columns_of_one_width() -> None:
    lines = table.table(("way", "out"), [("a long way", "1"), ("b", "22 ms")]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[1].startswith("|--")
    assert lines[1].endswith(":|")


def test_the_peak_of_memory_is_reset() -> None:
    held = bytearray(b"\1") * (64 << 20)
    assert len(held)
    del held
    machine.begin_peak()
    assert machine.status_bytes("VmHWM") < machine.status_bytes("VmRSS") + (16 << 20)
