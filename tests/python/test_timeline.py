"""timeline: the cycle as a trace and as a picture."""

import gzip
import json
import mmap
import threading
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
import refit
from refit.errors import InvalidError, StateError
from refit.observe import memory_now, picture
from refit.observe.observers import Observers
from refit.observe.timeline import Series, Span, Timeline

MIB = 1 << 20


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


def recorded() -> Timeline:
    """One cycle: 0.5 s of each phase, an arena that comes with the first."""
    clock = Clock()
    timeline = Timeline(clock=clock)
    timeline.hold("arena", 0)
    for name in ("offload", "publish", "commit", "restore"):
        with timeline.phase(name, nbytes=1_000_000_000):
            clock.at += 0.5
        if name == "offload":
            timeline.hold("arena", 64 * MIB)
    return timeline


def test_phases_are_complete_events_with_their_bytes_and_rate() -> None:
    events = [it for it in recorded().trace()["traceEvents"] if it["ph"] == "X"]
    assert [it["name"] for it in events] == ["offload", "publish", "commit", "restore"]
    assert [it["ts"] for it in events] == [0, 500_000, 1_000_000, 1_500_000]
    assert {it["dur"] for it in events} == {500_000}
    assert events[0]["args"] == {"bytes": 1_000_000_000, "GB/s": 2.0}


def test_memory_is_counters_of_device_and_host() -> None:
    events = [it for it in recorded().trace()["traceEvents"] if it["ph"] == "C"]
    arena = [it["args"]["bytes"] for it in events if it["name"] == "host memory: arena"]
    assert arena == [0] * 3 + [64 * MIB] * 7
    process = [it for it in events if it["name"] == "device memory: process"]
    assert len(process) == 10
    assert process[0]["args"]["bytes"] > MIB


def test_what_is_held_by_name_is_not_the_rest_of_the_process() -> None:
    timeline = Timeline()
    timeline.sample()
    timeline.hold("arena", 8 * MIB)
    before, after = (value for _, value in timeline.series["process"].points)
    assert after <= before - 4 * MIB


@pytest.mark.parametrize(("arena", "rest", "store"), [(0, 100, 50), (30, 100, 20), (70, 80, 0)])
def test_an_arena_is_shared_memory_and_no_store_of_weights(
    monkeypatch: pytest.MonkeyPatch, arena: int, rest: int, store: int
) -> None:
    monkeypatch.setattr(memory_now, "process_bytes", lambda: {"RssAnon": 100, "RssShmem": 50})
    timeline = Timeline()
    timeline.hold("arena", arena)
    last = {name: series.points[-1][1] for name, series in timeline.series.items()}
    assert (last["process"], last["weights store"]) == (rest, store)


def test_what_was_recorded_can_be_forgotten_but_not_what_is_held() -> None:
    timeline = recorded()
    timeline.forget()
    assert timeline.spans == []
    timeline.sample()
    assert [value for _, value in timeline.series["arena"].points] == [64 * MIB]


def test_memory_that_is_really_taken_is_seen() -> None:
    said = "Name:\tx\nRssAnon:\t 3 kB\nRssShmem:\t 2 kB\n"
    assert memory_now.process_bytes(lambda: said) == {"RssAnon": 3072, "RssShmem": 2048}
    timeline = Timeline()
    timeline.sample()
    # not from the heap, which may have as much that is free and resident
    held = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held.write(b"\1" * len(held))
    timeline.sample()
    before, after = (value for _, value in timeline.series["process"].points)
    assert after - before > 48 * MIB
    held.close()


def test_observers_reach_the_timeline() -> None:
    clock = Clock()
    timeline = Timeline(clock=clock)
    with suppress(OSError), Observers(timeline=timeline).phase("offload", nbytes=5):
        raise OSError("gone")
    Observers(timeline=timeline).hold("arena", 3)
    assert timeline.series["arena"].points[-1][1] == 3
    clock.at += 5  # copies that went on meanwhile are a phase that is over
    Observers(timeline=timeline).past("restore, copies", seconds_ago=2, seconds=1.5, nbytes=7)
    found = [(it.name, it.start, it.seconds, it.nbytes) for it in timeline.spans]
    assert found == [("offload", 0, 0, 5), ("restore, copies", 3, 1.5, 7)]


def test_an_open_timeline_samples_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    several = threading.Event()
    threads: list[int] = []

    def count() -> dict[str, int]:
        threads.append(threading.get_ident())
        if len(threads) > 5:
            several.set()
        return {"RssAnon": 1, "RssShmem": 1}

    monkeypatch.setattr(memory_now, "process_bytes", count)
    timeline = Timeline(sample_every_s=0.001)
    with timeline:
        assert several.wait(60)
        with pytest.raises(StateError, match="open already"):
            timeline.__enter__()
    assert "refit-timeline" not in {it.name for it in threading.enumerate()}
    assert set(threads) - {threading.get_ident()}


def test_without_an_interval_there_is_no_thread() -> None:
    before = threading.active_count()
    with Timeline() as timeline:
        assert threading.active_count() == before
    assert len(timeline.series["process"].points) == 2
    for every in (0, -1, 1e-9, float("nan")):  # would keep a core busy
        with pytest.raises(InvalidError, match=r"at least 0\.001"):
            Timeline(sample_every_s=every)


def test_a_saved_trace_is_json_that_a_viewer_reads(tmp_path: Path) -> None:
    timeline = recorded()
    timeline.save(tmp_path / "cycle.json")
    timeline.save(tmp_path / "cycle.json.gz")
    plain = json.loads((tmp_path / "cycle.json").read_text())
    assert plain == json.loads(gzip.decompress((tmp_path / "cycle.json.gz").read_bytes()))
    assert plain == timeline.trace()
    for event in plain["traceEvents"]:
        assert {"ph", "name", "pid", "tid"} <= set(event)
    with pytest.raises(FileNotFoundError):
        timeline.save(tmp_path / "nowhere" / "cycle.json")


def test_the_picture_names_every_phase_and_unit(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        recorded().picture(tmp_path / "cycle.svg")
    text = (tmp_path / "cycle.svg").read_text()
    for word in ("offload", "publish", "commit", "restore", "500 ms", "time (s)", "iB", "arena"):
        assert word in text, word


def test_a_gpus_memory_is_drawn_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    held = {"allocated": 3 * MIB, "reserved": 5 * MIB}
    monkeypatch.setattr(memory_now, "gpu_bytes", lambda: held)
    timeline = recorded()
    sides = {name: it.side for name, it in timeline.series.items()}
    assert sides["allocated"] == sides["reserved"] == "device"
    assert sides["process"] == sides["arena"] == "host"
    timeline.picture(tmp_path / "cycle.png", title="Four phases")
    assert (tmp_path / "cycle.png").read_bytes().startswith(b"\x89PNG")
    moment = Timeline()
    with pytest.raises(StateError, match="empty"):
        moment.picture(tmp_path / "cycle.png")
    moment.sample()
    moment.picture(tmp_path / "moment.png")  # without phases


def test_refit_phases_keep_their_colours_and_all_differ() -> None:
    names = ["rollout", "restore", "step", "offload", "publish", "commit", "wait"]
    colours = picture.colours_of(names)
    assert colours["offload"] == picture.PHASES["offload"]
    assert len(set(colours.values())) == len(names)
    assert list(colours) == names


def test_the_pictures_time_begins_with_the_first_thing_recorded() -> None:
    series = [Series("arena", "host", [(5.0, 1), (7.0, 2)])]
    spans, moved = picture.from_the_first([Span("offload", 6.0, 1.0)], series)
    assert (spans[0].start, moved[0].points) == (1.0, [(0.0, 1), (2.0, 2)])
    assert series[0].points[0] == (5.0, 1)


def test_words_of_the_picture() -> None:
    rows = {name: picture.row_of(name) for name in ("offload", "overlapped copies", "rollouts")}
    assert rows == {"offload": "refit", "overlapped copies": "overlapped", "rollouts": "loop"}
    durations = [picture.duration(seconds) for seconds in (2.345, 0.25, 0.0012, 0)]
    assert durations == ["2.35 s", "250 ms", "1.2 ms", "0 ms"]


def test_a_series_has_its_last_value_until_the_next_sample() -> None:
    series = Series("arena", "host", [(1.0, 5), (2.0, 7)])
    assert [picture.value_at(series, at) for at in (0.5, 1.0, 1.5, 2.0, 9.0)] == [0, 5, 5, 7, 7]


def test_a_controller_draws_its_phases_its_arena_and_its_copies() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from refit.controller import Controller

    weight = torch.nn.Parameter(torch.ones(1 << 18))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight])
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    timeline = Timeline()
    with Controller(optimizer, device="host", timeline=timeline) as controller:
        controller.offload()
        held = timeline.series["refit's arena"].points[-1][1]
        controller.restore()
        optimizer.step()
    assert held >= 2 * weight.nbytes
    names = [it.name for it in timeline.spans]
    assert names == ["offload", "restore", "wait", "overlapped copies"]
    assert timeline.spans[3].nbytes == 2 * weight.nbytes
    assert timeline.spans[3].start <= timeline.spans[2].start
    assert timeline.series["refit's arena"].points[-1][1] == 0


def test_a_step_in_windows_has_its_windows_copies_and_memory() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")

    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    timeline = Timeline()
    with refit.Controller(
        optimizer,
        model,
        timeline=timeline,
        schedule=refit.HostStates(window_bytes="1MiB", windows=2),
    ) as controller:
        for _ in range(2):
            timeline.forget()
            model(torch.ones(2, 256)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        controller.offload()
        moved = controller.stats()
    (step,) = [it for it in timeline.spans if it.name == "step"]
    windows = [it for it in timeline.spans if it.name == "window"]
    waits = [it for it in timeline.spans if it.name == "wait for states"]
    states = 8 * 2 * 4 * (256 * 256 + 256)
    assert sum(it.nbytes for it in windows) == states == moved["refit/step_in_bytes"]
    assert len(windows) == len(waits) >= states >> 20
    for before, one in pairwise(windows):
        assert step.start <= before.start + before.seconds <= one.start
    assert windows[-1].start + windows[-1].seconds <= step.start + step.seconds
    copies = [it for it in timeline.spans if it.name == "overlapped copies" and it.nbytes]
    assert [it.nbytes for it in copies] == [states, 2 * states]
    assert copies[1].start <= windows[0].start
    held = [value for _, value in timeline.series["states on the host"].points]
    assert held[0] == states
    assert held[-1] == 0
