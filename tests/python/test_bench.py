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
    activations,
    async_weights,
    cases,
    gpu_offload,
    gpu_weights,
    host_step,
    host_sweep,
    offload,
    overhead,
    picture,
    scale,
    scale_publishers,
    states,
    steps,
    table,
    ways,
    weights,
    window,
    workers,
)
from refit.bench.memory import MemoryNeed
from refit.bench.series import Series, both, ratio
from refit.errors import HostMemoryError
from refit.observe import memory_now

TINY = 2e5

Make = Callable[[list[torch.Tensor], bool], cases.Case]


# ---- series ----

SAMPLES = json.loads((Path(__file__).parents[1] / "bench" / "series.json").read_text())


@pytest.mark.parametrize("samples", SAMPLES, ids=lambda samples: samples["name"])
def test_samples_have_the_figures_that_refit_bench_gives_them(samples: dict[str, Any]) -> None:
    series = Series()
    for seconds in (samples["cold"], *samples["seconds"]):
        series.add(seconds)
    found = series.figures("case_") | series.cold_figure("case_")
    assert found == pytest.approx(samples["figures"], rel=1e-12)
    assert series.gbps(samples["bytes"]) == pytest.approx(samples["gbps"], rel=1e-12)
    beside = Series(**samples["beside"])
    assert ratio(series, beside) == pytest.approx(samples["ratio"], rel=1e-12)


def test_a_cycle_is_both_ways_round_by_round() -> None:
    cycle = both(Series(1, [1, 2]), Series(2, [3, 4]))
    assert (cycle.cold, cycle.seconds) == (3, [4, 6])


# ---- what is measured, and the memory for it ----


@pytest.mark.parametrize("parameters", [TINY, 1e6, 2e7, 1e8, 0.6e9])
def test_a_model_has_about_the_parameters_asked_for(parameters: float) -> None:
    found = list(states.shapes(parameters))
    assert sum(math.prod(shape) for _, shape in found) == pytest.approx(parameters, rel=0.05)
    assert len({name for name, _ in found}) == len(found)
    assert parameters < 0.6e9 or 2 * len(found) == 620  # as Qwen3


NEEDS = [states.NEED, weights.need((1, 8)), *(it.NEED for it in (picture, window, host_step))]


@pytest.mark.parametrize("need", [*NEEDS, host_sweep.NEED], ids=lambda need: need.part)
def test_short_memory_makes_a_smaller_model_and_too_little_none(need: MemoryNeed) -> None:
    assert need.fitting(1e6, 1 << 40) == 1e6
    short = need.fitting(0.6e9, 4 << 30)
    assert short < 0.6e9
    assert need.takes(short) == pytest.approx(4 << 30)
    with pytest.raises(HostMemoryError, match=rf"{need.part} asks for .* there are 0.0 GB: end"):
        need.fitting(0.6e9, 1e6)


def test_worker_need_includes_process_memory_before_weights() -> None:
    say = "from refit.bench import workers, machine; print(machine.status_bytes('RssAnon'))"
    done = subprocess.run([sys.executable, "-c", say], capture_output=True, text=True, check=True)
    one = int(done.stdout)
    assert one > 0
    assert weights.need((1, 4)).takes(0) >= 5 * one
    assert weights.need((1, 8)).takes(0) >= 9 * one


def test_a_containers_limit_counts_and_its_cached_files_do_not(tmp_path: Path) -> None:
    assert memory_now.available_bytes(tmp_path) > 0
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_now.available_bytes(tmp_path) > 0
    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.current").write_text("4000000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 300000\n")
    assert memory_now.available_bytes(tmp_path) == 1_300_000
    (tmp_path / "memory.current").write_text("9000000\n")
    assert memory_now.available_bytes(tmp_path) == 0


def test_small_machine_is_told_what_is_measured_instead() -> None:
    need = MemoryNeed("offload", 40, 0)
    assert need.told(1e8, 8e9) == "offload: 100 M parameters, which ask for 4.0 GB of free memory"
    assert need.told(6e8, 8e9).endswith("of free memory, and there are 8.0 GB: 200 M are measured")


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
        if isinstance(case, cases.OnTensors):
            assert (0 in {it.untyped_storage().nbytes() for it in tensors}) != keep
            if keep:
                for it in tensors:
                    it.zero_()
        case.back()
        assert states.checksum(tensors) == before
    case.close()
    tensors[-1].view(torch.uint8).view(-1)[3] ^= 1
    assert states.checksum(tensors) != before


def test_report_has_every_way_with_kept_and_new_storages() -> None:
    result = offload.measure(TINY, rounds=2)
    count = result["tensors"]
    expected = {"kept": [0, count, 0, 0], "re-allocated": [count, 2 * count, count, 0]}
    assert list(result["storages"]) == list(expected)
    for storages, rows in result["storages"].items():
        assert [row["way"] for row in rows] == [make.name for make in offload.CASES]
        assert [row["allocations_per_cycle"] for row in rows] == expected[storages]
        assert rows[0]["refit_speedup"] == 1.0
        assert all(row["cycle_seconds_median"] > 0 and row["offload_gbps"] > 0 for row in rows)
    assert "per-tensor pageable" in table.offload(result)


def test_states_that_come_back_changed_make_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    class Spoilt(cases.Flat):
        def __init__(self, tensors: list[torch.Tensor], keep: bool) -> None:
            super().__init__(tensors, keep)
            self.first = tensors[0]

        def back(self) -> None:
            super().back()
            self.first.view(torch.int32).zero_()

    monkeypatch.setattr(offload, "CASES", (*offload.CASES, Spoilt))
    with pytest.raises(RuntimeError, match="came back changed"):
        offload.measure(TINY, rounds=1)


# ---- weights ----


def test_a_worker_notices_a_version_that_is_old_or_incomplete() -> None:
    shapes = {"a": (3, 5), "b": ()}
    made = ways.blank(shapes)
    before = {name: it.view(torch.int16).clone() for name, it in made.items()}
    ways.change(made)
    assert all((it.view(torch.int16) != before[name]).all() for name, it in made.items())
    ways.Receiver(shapes, load=True).take(made)
    with pytest.raises(RuntimeError, match="version 1 came as"):
        ways.Receiver(shapes, load=False).take({"a": made["a"]})
    ways.change(made)
    with pytest.raises(RuntimeError, match=r"came as \[2\]"):
        ways.Receiver(shapes, load=False).take(made)


def _fails(number: int) -> None:
    raise OSError(f"worker {number} has no luck")


@pytest.mark.slow
def test_what_fails_in_a_worker_is_said_by_the_trainer() -> None:
    with workers.WorkerProcesses(1) as processes:
        processes.begin(1, _fails)
        with pytest.raises(RuntimeError, match="worker 0 has no luck"):
            processes.end(1)


@pytest.mark.slow
def test_a_trainer_waits_for_workers_that_generate_only_if_it_asks_to() -> None:
    result = async_weights.measure(TINY, rounds=3, generates_s=0.5, trains_s=0.05)
    found = [(row["transport"], row["way"]) for row in result["ways"]]
    each = ["no worker", *async_weights.WAITS]
    assert found == [(it, way) for it in ("shared memory", "sockets") for way in each]
    assert not any(row["evicted"] or row["aborted"] for row in result["ways"])
    assert "sockets" in table.async_weights(result)


def test_a_host_receives_once_whatever_its_workers() -> None:
    result = scale.measure(TINY, rounds=2, counts=(1, 2))
    sent = {row["way"]: row["sent"] for row in result["ways"]}
    expected = {"1, one host": 1, "2, one host": 1, "2, a host each": 2, "2, a share each": 1}
    assert sent == pytest.approx(expected, rel=0.05)
    assert "hosts" in table.scale(result)


def test_each_of_several_publishers_sends_its_share() -> None:
    result = scale_publishers.measure(TINY, rounds=2, counts=(1, 2), rate=None)
    sent = {row["publishers"]: (row["sent_least"], row["sent_most"]) for row in result["ways"]}
    assert sent[1] == pytest.approx((1, 1), rel=0.05)
    assert sent[2] == pytest.approx((0.5, 0.5), rel=0.05)
    assert "0.50" in table.scale_publishers(result)


@pytest.mark.slow
def test_every_way_reaches_every_worker() -> None:
    result = weights.measure(TINY, rounds=2, counts=(1, 2))
    found = [(row["workers"], row["way"]) for row in result["ways"]]
    assert found == [(count, way.name) for count in (1, 2) for way in ways.WAYS]
    assert all(row["seconds_median"] > 0 for row in result["ways"])
    assert "gloo" in table.weights(result)


def test_all_ways_of_a_gpu_bring_the_states_back() -> None:
    result = gpu_offload.measure(TINY, rounds=4, device="cpu")
    saver = gpu_offload.MemorySaverWay.name
    here = [way.name for way in gpu_offload.WAYS if way.name != saver]
    assert [row["way"] for row in result["ways"]] == here
    assert result["left_out"] == {saver: "it needs a GPU"}
    assert result["bytes"] == 8 * result["parameters"]
    for row in result["ways"]:
        assert row["cold_out_seconds"] > 0
        assert row["back_seconds_p95"] >= row["back_seconds_median"] > 0
        assert (row["over_refit"] == 1) == (row["way"] == gpu_offload.RefitWay.name)
    shown = table.gpu_offload(result)
    assert "a step waits" in shown
    assert f"{saver} is left out: it needs a GPU" in shown


@pytest.mark.parametrize("returns", [0, 2], ids=["at once", "in a later round"])
def test_states_that_a_way_of_a_gpu_spoils_give_no_figures(
    monkeypatch: pytest.MonkeyPatch, returns: int
) -> None:
    class Spoils(gpu_offload.PageableWay):
        """An element of one state is another one, from that return on."""

        left = returns
        closed = False

        def begin_back(self) -> None:
            if self.left == 0:
                self._saved[-1].view(torch.int32).view(-1)[-1] += 1
            self.left = max(0, self.left - 1)
            super().begin_back()

        def close(self) -> None:
            Spoils.closed = True

    monkeypatch.setattr(gpu_offload, "WAYS", (Spoils,))
    with pytest.raises(RuntimeError, match="came back changed"):
        gpu_offload.measure(TINY, rounds=1, device="cpu")
    assert Spoils.closed


@pytest.mark.slow
def test_every_way_reaches_an_engine() -> None:
    """On the CPU; on a GPU PyTorch shares memory by other handles."""
    result = gpu_weights.measure(TINY, rounds=2, device="cpu")
    assert [row["way"] for row in result["ways"]] == [way.name for way in gpu_weights.WAYS]
    assert all(row["seconds_median"] > 0 for row in result["ways"])
    found = {row["way"]: row["over_handles"] for row in result["ways"]}
    assert found[gpu_weights.HandlesWay.name] == 1
    assert "refit" in table.gpu_weights(result)


def test_an_engine_notices_a_version_that_is_old() -> None:
    engine = gpu_weights.Engine({"a": (3, 5), "b": ()}, "cpu")
    made = ways.blank({"a": (3, 5), "b": ()})
    ways.change(made)
    engine.copy(made)
    engine.check()
    with pytest.raises(RuntimeError, match="version 2 came as"):
        engine.check()


# ---- steps of states on the host ----


def test_every_way_to_step_is_reported_with_bytes_moved() -> None:
    result = window.measure(TINY, rounds=2)
    rows = {row["way"]: row for row in result["ways"]}
    assert list(rows) == [way.name for way in steps.WAYS]
    for name, row in rows.items():
        assert row["step_s_p95"] >= row["step_s_median"] > 0
        assert row["peak_device_bytes"] <= (row["window_bytes"] or result["bytes"]), name
        assert row["in_bytes"] == row["out_bytes"], name
    resident, host, per_tensor, two_slots, sharded = (row["in_bytes"] for row in rows.values())
    assert resident == sharded == 0
    assert 0 < result["bytes"] - host <= result["tensors"] * 512  # small states stay on the device
    assert per_tensor == two_slots == result["bytes"]
    assert rows["resident"]["blocked_s"] == 0
    assert rows["per tensor, no overlap"]["speedup_over_no_overlap"] == 1
    assert "two slots" in table.window(result)


def test_chunks_have_every_parameter_once_and_fit_into_a_slot() -> None:
    weights = [torch.zeros(count) for count in (100, 4000, 10, 10, 300, 20000, 1)]
    way = steps.TwoSlots(steps.Model(weights, list(map(torch.ones_like, weights)), 40_000))
    assert way._chunks == [[0, 1, 2, 3, 4], [5], [6]]
    assert way.peak_device_bytes == 2 * 160_768
    way.close()


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


# ---- overhead ----


def test_the_overheads_parts_add_up_and_every_plan_is_measured() -> None:
    result = overhead.measure(rounds=2, tensors=40, planned=(10, 20))
    parts = ("in_torch_storages", "in_python")
    total = sum(result[f"processor_us_per_tensor_{part}"] for part in parts)
    assert total == pytest.approx(result["processor_us_per_tensor"])
    assert result["cycle_ms_median"] > 0
    scenes = ("first plan", "steady cycle", "plan with fresh gradients", "plan after a load")
    found = [(row["tensors"], row["scene"]) for row in result["plans"]]
    assert found == [(count, scene) for count in (10, 20) for scene in scenes]
    assert [row["leaving"] for row in result["plans"]] == [10, 10, 15, 10, 20, 20, 30, 20]
    shown = table.overhead(result)
    assert all(words in shown for words in ("Python", *scenes))


# ---- the command ----


def test_the_command_writes_a_table_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, asked = tmp_path / "figures.json", ["--parameters", "2e5", "--rounds", "1", "--json"]
    assert entry.main(["window", *asked, str(file)]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("window: ")
    assert said.err.startswith("window: 0.2 M parameters")
    written = json.loads(file.read_text())
    assert written["machine"]["cores"] >= 1
    assert written["results"][0]["bench"] == "window"
    assert entry.main(["offload", *asked, "-"]) == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["bench"] == "offload"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "there is no part 'nothing': say offload, "),
        (["offload", "picture"], "picture goes by itself"),
        (["--rounds", "0"], "0 is not above 0"),
        (["--workers", "0"], "is not a list of numbers from 1 to 64"),
        (["scale", "--link", "1gbit"], "--link is of --publishers"),
        (["--parameters", "nan"], "nan is not above 0"),
        (["--json", "no/such/folder/figures.json"], "there is no directory"),
        (["host_step", "--lines"], "--lines is of --json"),
        *(
            (["activations", f"--lengths={text}"], "is not a list of lengths: 128,512,2048")
            for text in ("", "0", "12,x", "1,,2", "-5", "99999999")
        ),
    ],
    ids=str,
)
def test_bad_options_are_refused_before_anything_is_measured(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        entry.main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("part", [offload, host_step, activations], ids=lambda it: it.__name__)
def test_too_little_memory_is_told_before_anything_is_measured(
    part: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory_now, "available_bytes", lambda: 1 << 20)
    monkeypatch.setattr(part, "measure", pytest.fail)
    name = part.__name__.rpartition(".")[2]
    assert entry.main([name]) == 1
    said = capsys.readouterr()
    assert said.err.startswith(f"{name} asks for ")
    assert said.out == ""


def test_missing_package_is_reported_before_measurement(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = {"torch": True}
    monkeypatch.setattr("refit.bench.options.find_spec", there.get)
    monkeypatch.setattr(offload, "measure", pytest.fail)
    with pytest.raises(SystemExit) as ended:
        entry.main(["offload", "weights"])
    assert ended.value.code == 2
    assert "pip install pyzmq\n" in capsys.readouterr().err
