"""bench host_step and host_sweep: steps on the CPU are measured beside the others', and drawn."""

import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from refit.bench import __main__ as entry
from refit.bench import command, host_picture, host_step, host_sweep, host_ways, machine, table
from refit.bench import figures as written
from refit.bench.memory import MemoryNeed
from refit.bench.steps import Model
from refit.errors import HostMemoryError

TINY = 2e5
HERE = tuple(way for way in host_ways.WAYS if way is not host_ways.DeepSpeed)
EXACT = ("torch, for-loop", "torch, foreach", "refit, host_fraction=1")


@pytest.fixture
def refit_command() -> str:
    """The program of the build under test."""
    ours = os.environ.get("REFIT_LIBRARY")
    root = Path(__file__).resolve().parents[2]
    path = (Path(ours).resolve().parents[1] if ours else root / "build") / "bin" / "refit"
    if not path.exists():
        pytest.skip(f"{path} is not built")
    return str(path)


@pytest.fixture(autouse=True)
def without_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a minute to build, and not every machine has it."""
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setitem(sys.modules, "deepspeed.ops.adam", None)


def script(folder: Path, text: str) -> str:
    path = folder / "refit"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def small_model() -> Model:
    made = torch.Generator().manual_seed(3)
    weights = [torch.randn(shape, generator=made) for shape in ((30, 40), (7,), (400,))]
    return Model(weights, [torch.randn(it.shape, generator=made) for it in weights])


# ---- the step alone ----


def test_every_way_is_reported_for_each_number_of_tensors(refit_command: str) -> None:
    result = host_step.measure(TINY, rounds=2, program=refit_command, finer=(1, 10))
    names = [way.name for way in HERE]
    rows = result["ways"]
    kernel_names = [
        name for (_, is_own), name in host_step.KERNELS.items() if len(host_step._roots()) > is_own
    ]
    assert [row["way"] for row in rows] == [*names, *kernel_names, *names]
    tensors = sorted({row["tensors"] for row in rows})
    assert tensors[0] * 10 == tensors[1]
    for row in rows:
        assert row["step_s_p95"] >= row["step_s_median"] > 0
        assert row["cold_step_s"] > 0
        assert row["parameters_per_s"] == pytest.approx(result["parameters"] / row["step_s_median"])
        assert row["share_of_limit"] > 0
    assert rows[0]["speedup_over_for_loop"] == 1
    assert [row["speedup_over_faster"] for row in rows if row["way"] == "torch, fused"] == [1, 1]
    kernels = [row for row in rows if "kernel" in row["way"]]
    assert [row["bytes_per_parameter"] for row in kernels] == [28] * (len(kernels) - 1) + [26]
    assert all(row["bit_equal"] is None for row in kernels)
    assert list(result["left_out"]) == ["DeepSpeedCPUAdam"]
    shown = table.host_step(result).splitlines()
    assert len(shown) == 2 + 2 + len(names) + len(kernel_names)
    assert f"of {tensors[0]} tensors" in shown[2]
    assert f"step of {tensors[1]}" in shown[2]
    assert all("ms" in line.split("|")[-2] for line in shown[4 : 4 + len(names)])
    assert shown[-1].split("|")[-2].strip() == ""


def test_a_way_is_bit_equal_only_if_it_has_the_bits_of_the_loop() -> None:
    rows = {row["way"]: row for row in host_step.measure(TINY, 1, finer=(1,))["ways"]}
    for name in EXACT:
        assert (rows[name]["bit_equal"], rows[name]["different_share"]) == (True, 0)
    for row in rows.values():
        assert row["bit_equal"] == (row["different_share"] == 0)
        assert 0 <= row["different_share"] < 1


@pytest.mark.parametrize("make", HERE, ids=lambda make: make.name)
def test_a_way_whose_last_bit_differs_is_not_bit_equal(
    make: type[host_ways.HostWay],
) -> None:
    model = small_model()
    loop, other = host_ways.ForLoop(model), make(model)
    for way in (loop, other):
        way.step()
    before = host_ways.differing(loop, other, model)
    *_, (_, last) = other.held()
    last.view(torch.int32)[5].bitwise_xor_(1)
    count = sum(it.numel() for _, it in loop.held())
    assert abs(host_ways.differing(loop, other, model) - before) == pytest.approx(1 / count)
    for way in (loop, other):
        way.close()


@pytest.mark.parametrize("make", HERE[1:], ids=lambda make: make.name)
@pytest.mark.parametrize("spoilt", ["no step", "a NaN"])
def test_a_way_that_makes_other_steps_makes_no_report(
    make: type[host_ways.HostWay], spoilt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make.step
    made = []

    def spoil(self: host_ways.HostWay) -> None:
        made.append(self)
        if spoilt == "a NaN" or len(made) == 1:
            whole(self)
        if spoilt == "a NaN":
            next(self.held())[1].view(-1)[0] = float("nan")

    monkeypatch.setattr(make, "step", spoil)
    with pytest.raises(RuntimeError, match="the figures mean nothing"):
        host_step.measure(TINY, rounds=1, finer=(1,))


def test_a_way_that_is_not_installed_is_left_out_and_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    absent = str(tmp_path / "refit")
    asked = ["host_step", "--parameters", "1e5", "--rounds", "1", "--refit", absent, "--json", "-"]
    assert entry.main([*asked, "--lines"]) == 0
    said = capsys.readouterr()
    assert "DeepSpeedCPUAdam is left out: pip install deepspeed ninja" in said.err
    assert (
        f"refit, kernel is left out: there is no command {absent}: name it by --refit" in said.err
    )
    rows = [json.loads(line) for line in said.out.splitlines()]
    assert [row["way"] for row in rows] == [way.name for way in HERE] * 3
    assert all(row["bench"] == "host_step" and row["cores"] >= 1 for row in rows)


def test_deepspeed_that_cannot_be_built_is_left_out_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        os.write(1, b"a compiler's words\n")
        print("a logger's words")
        raise RuntimeError("Ninja is required")

    for name in ("deepspeed", "deepspeed.ops", "deepspeed.ops.adam"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(
        sys.modules["deepspeed.ops.adam"], "DeepSpeedCPUAdam", refuse, raising=False
    )
    with pytest.raises(host_ways.NotInstalled, match="it was not built: Ninja is required"):
        host_ways.DeepSpeed(small_model())
    said = capfd.readouterr()
    assert said.out == ""
    assert "a compiler's words" in said.err
    assert "a logger's words" in said.err


def test_what_the_constructor_of_a_way_raises_closes_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed = []

    class Broken(host_ways.Foreach):
        def _made(self) -> torch.optim.Optimizer:
            raise ValueError("broken")

    class Kept(host_ways.ForLoop):
        def close(self) -> None:
            closed.append(self.name)
            super().close()

    monkeypatch.setattr(host_step, "WAYS", (Kept, Broken))
    with pytest.raises(ValueError, match="broken"):
        host_step.measure(TINY, rounds=1, finer=(1,))
    assert closed == ["torch, for-loop"]


def test_bytes_are_divided_whole_and_never_into_nothing() -> None:
    for times in (1, 10, 100):
        model = host_step._model(TINY, times)
        assert sum(it.numel() for it in model.weights) == 200_064
        assert min(it.numel() for it in model.weights) >= 1
        assert len(model.weights) <= 24 * times


def test_the_limit_is_the_faster_loop_of_each_round() -> None:
    against = host_step.Round()
    for seconds in (5.0, 1.0, 4.0):
        against.loops.add(seconds)
    assert against.limit.seconds == [1.0, 4.0]
    for seconds in (6.0, 2.0, 3.0):
        against.command.add(seconds)
    assert (against.limit.cold, against.limit.seconds) == (5.0, [1.0, 3.0])


def test_the_loops_of_the_limit_move_each_byte_of_a_step() -> None:
    limit = host_ways.Limit(1000)
    limit()
    gradient, weight, first, second = limit._arrays
    assert first.eq(2).all()
    assert all(it.eq(1).all() for it in (gradient, weight, second))


@pytest.mark.parametrize(
    ("found", "count"), [(None, 1), ((0, 0), 1), ((4096, 8192), 2)], ids=["none", "nearest", "MKL"]
)
def test_the_kernel_is_measured_with_the_roots_that_pytorch_takes(
    found: tuple[int, int] | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_step, "root_of_torch", lambda: found)
    libraries = host_step._roots()
    assert (libraries[0], len(libraries)) == (None, count)
    for library in libraries[1:]:
        assert library is not None
        assert Path(library).name == "libtorch_cpu.so"


# ---- the command ----


def test_the_command_is_asked_for_as_many_parameters_and_threads(tmp_path: Path) -> None:
    row = '{"bench":"host step","way":"kernel"}'
    program = script(tmp_path, f"echo \"$@\" > '{tmp_path}/asked'\necho '{row}'")
    assert command.host_step(program, 1_000_000, threads=3, rounds=2)[0]["way"] == "kernel"
    asked = (tmp_path / "asked").read_text().split()
    assert asked[:3] == ["bench", "host-step", "--json"]
    assert asked[asked.index("--mib") + 1] == "27"  # 28e6 bytes
    assert asked[asked.index("--rounds") + 1] == "2"
    assert asked[-1] == "offload.host_step_threads=3"
    command.host_step(program, 1_000_000, threads=3, rounds=2, roots="a library")
    assert (tmp_path / "asked").read_text().endswith(" --roots a library\n")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo refit: no memory >&2; exit 1", "host-step .*: refit: no memory$"),
        ("echo no rows", "does not write rows"),
        ("echo '[]'", "does not write rows"),
        ("echo '{}'", "does not write rows"),
        ("exec sleep 60", "timed out after 0.2 seconds"),
    ],
)
def test_a_command_that_fails_is_told(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "PATIENCE_S", 0.2 if "sleep" in text else 600.0)
    with pytest.raises(RuntimeError, match=said):
        command.host_step(script(tmp_path, text), 1000, threads=1, rounds=1)


def test_a_file_that_is_no_program_is_no_command(tmp_path: Path) -> None:
    plain = tmp_path / "refit"
    plain.write_text("no program")
    assert command.found(str(plain)) is None
    assert command.found(str(tmp_path)) is None


# ---- Megatron's form ----


@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_the_first_parameters_are_stepped_from_copies_up_to_the_share(fraction: float) -> None:
    made = torch.Generator().manual_seed(5)
    parameters = [torch.nn.Parameter(torch.randn(100, generator=made)) for _ in range(8)]
    same = [torch.nn.Parameter(it.detach().clone()) for it in parameters]
    hybrid = host_ways.Hybrid(parameters, fraction, foreach=False)
    count = round(8 * fraction)
    assert hybrid.host_elements == 100 * count
    loop = (
        torch.optim.AdamW(same[count:], foreach=False, **host_ways.OPTIONS) if count < 8 else None
    )
    fused = torch.optim.AdamW(same[:count], fused=True, **host_ways.OPTIONS) if count else None
    for _ in range(3):
        for one, two in zip(parameters, same, strict=True):
            one.grad = torch.randn(100, generator=made)
            two.grad = one.grad.clone()
        for step in (hybrid, loop, fused):
            if step is not None:
                step.step()
        hybrid.zero_grad()
        assert all(it.grad is None for it in parameters)
    for number, (one, two) in enumerate(zip(parameters, same, strict=True)):
        assert torch.equal(one, two)
        other = fused if number < count else loop
        assert other is not None
        assert torch.equal(hybrid.state(number)["exp_avg_sq"], other.state[two]["exp_avg_sq"])


def test_a_parameter_without_a_gradient_is_not_stepped() -> None:
    parameters = [torch.nn.Parameter(torch.ones(10)) for _ in range(2)]
    hybrid = host_ways.Hybrid(parameters, 1.0)
    parameters[0].grad = torch.ones(10)
    hybrid.step()
    assert not parameters[0].eq(1).any()
    assert parameters[1].eq(1).all()
    hybrid.zero_grad()
    before = parameters[0].detach().clone()
    hybrid.step()
    assert torch.equal(parameters[0], before)


# ---- whole steps ----


def test_every_share_of_every_kind_is_reported() -> None:
    result = host_sweep.measure(TINY, rounds=2, fractions=(0.0, 0.5, 1.0))
    rows = result["ways"]
    expected = [(kind.name, share) for kind in host_sweep.KINDS for share in (0.0, 0.5, 1.0)]
    assert [(row["way"], row["host_fraction"]) for row in rows] == [
        (host_sweep.PLAIN, 0.0),
        *expected,
    ]
    whole = rows[0]["peak_device_bytes"]
    assert whole == 8 * result["parameters"]
    for row in rows:
        assert row["step_s_p95"] >= row["step_s_median"] > 0
        for name in ("cold_step_s", "forward_s_median", "backward_s_median", "optimizer_s_median"):
            assert row[name] > 0
        assert row["over_longer"] > 0
        assert row["peak_device_bytes"] == whole - row["host_state_bytes"]
        if row["host_fraction"] in (0, 1):  # refit leaves states of up to 512 bytes
            least = whole * row["host_fraction"]
            assert least * 0.99 <= row["host_state_bytes"] <= least
        else:
            assert 0 < row["host_state_bytes"] < whole
        if row["host_fraction"] == 0 or row["way"] != "HybridDeviceOptimizer":
            assert row["bit_equal"], row
    assert rows[0]["over_plain"] == 1
    assert "states on the device" in table.host_sweep(result)


def test_a_kind_that_ends_with_other_weights_is_not_bit_equal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Spoilt(host_sweep.Plain):
        def __init__(self, model: torch.nn.Module, fraction: float) -> None:
            super().__init__(model)
            self.last = list(model.parameters())[-1]

        def step(self) -> None:
            super().step()
            self.last.detach().view(torch.int32).view(-1)[-1].bitwise_xor_(1)

    class Same(host_sweep.Plain):
        def __init__(self, model: torch.nn.Module, fraction: float) -> None:
            super().__init__(model)

    kinds = host_sweep.Kind("spoilt", Spoilt), host_sweep.Kind("same", Same)
    monkeypatch.setattr(host_sweep, "KINDS", kinds)
    rows = host_sweep.measure(TINY, rounds=1, fractions=(1.0,))["ways"]
    assert [row["bit_equal"] for row in rows] == [True, False, True]


def test_a_case_that_fails_is_closed_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    class Broken(host_sweep.Plain):
        def __init__(self, model: torch.nn.Module, fraction: float) -> None:
            super().__init__(model)

        def step(self) -> None:
            raise RuntimeError("broken")

        def close(self) -> None:
            closed.append(self)

    monkeypatch.setattr(host_sweep, "KINDS", (host_sweep.Kind("broken", Broken),))
    with pytest.raises(RuntimeError, match="broken"):
        host_sweep.measure(TINY, rounds=1, fractions=(1.0,))
    assert len(closed) == 1


@pytest.mark.parametrize("parameters", [TINY, 2e6, 1e7, 2.5e7, 1e8])
def test_the_transformer_has_about_the_parameters_asked_for(parameters: float) -> None:
    with torch.device("meta"):
        model = host_sweep.Transformer(parameters)
    assert sum(it.numel() for it in model.parameters()) == pytest.approx(parameters, rel=0.1)


def test_backward_and_step_are_held_against_the_longer_of_the_two_alone() -> None:
    def case(name: str, backward: float, step: float) -> host_sweep.Case:
        made = host_sweep.Case(name, 0.5, lambda model, _: host_sweep.Plain(model))
        made.take([1.0], {"backward_s": backward, "optimizer_s": step}, cold=1.0)
        return made

    cases = [
        case(host_sweep.PLAIN, 2.0, 9.0),
        case(host_sweep.OVERLAPPED, 3.0, 1.0),
        case(host_sweep.ALONE, 2.5, 4.0),
    ]
    assert host_sweep._over_longer(cases[1], cases) == 4.0 / 4.0
    assert host_sweep._over_longer(cases[2], cases) == 6.5 / 4.0
    assert host_sweep._over_longer(cases[0], cases) == 11.0 / 9.0


# ---- the parts and the picture ----


@pytest.mark.parametrize("need", [host_step.NEED, host_sweep.NEED])
def test_too_little_memory_is_refused_with_what_it_takes(need: MemoryNeed) -> None:
    with pytest.raises(HostMemoryError, match=rf"{need.part} asks for .* there are 0.0 GB: end"):
        need.fitting(50e6, 1e6)


def test_what_will_be_taken_is_said_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host_step, "measure", pytest.fail)
    monkeypatch.setattr(machine, "available_bytes", lambda: 1 << 20)
    assert entry.main(["host_step"]) == 1
    assert capsys.readouterr().err.startswith("host_step asks for ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["host_step", "--lines"], "--lines is of --json"),
        (["host-step"], "there is no part 'host-step': say offload, "),
    ],
)
def test_bad_options_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        entry.main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.fixture
def figures() -> dict[str, Any]:
    rows = [
        {
            "way": way,
            "host_fraction": share,
            "step_s_median": 1.0 + share,
            "step_s_p95": 2.0,
            "peak_device_bytes": 8_000_000 * (1 - share),
        }
        for way in ("torch.optim.AdamW", "refit", "refit, overlap=False", "HybridDeviceOptimizer")
        for share in ((0.0,) if way.startswith("torch") else (0.0, 0.5, 1.0))
    ]
    return {
        "machine": {"cores": 2, "processor": "a processor"},
        "results": [
            {"bench": "offload"},
            {
                "bench": "host_sweep",
                "device": "cpu",
                "parameters": 1_000_000,
                "tokens": 256,
                "ways": rows,
            },
        ],
    }


def test_figures_are_drawn_the_same_each_time(tmp_path: Path, figures: dict[str, Any]) -> None:
    pytest.importorskip("matplotlib")
    source = tmp_path / "sweep.json"
    source.write_text(json.dumps(figures))
    files = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for file in files:
        assert entry.main(["picture", str(file), "--figures", str(source)]) == 0
    text = files[0].read_text()
    assert text == files[1].read_text()
    assert text.startswith("<?xml")
    assert len(text) < 200_000
    for words in ("refit, overlap=False", "a processor", "no host memory"):
        assert f"<!-- {words}" in text or words in text
    assert entry.main(["picture", str(tmp_path / "one.PNG"), "--figures", str(source)]) == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda it: it.clear(), "is no file of --json"),
        (lambda it: it["results"].pop(), "has no figures of host_sweep"),
        (lambda it: it["results"][1]["ways"][0].pop("step_s_p95"), "is no file of --json"),
        (lambda it: it["results"][1]["ways"][0].update(step_s_p95="1"), "is no number"),
        (lambda it: it["results"][1].pop("device"), "is no file of --json"),
        (lambda it: it.pop("machine"), "is no file of --json"),
    ],
    ids=["empty", "another part", "no figure", "a word", "no device", "no machine"],
)
def test_figures_that_are_not_there_are_refused(
    change: Any,
    said: str,
    tmp_path: Path,
    figures: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("matplotlib")
    change(figures)
    source = tmp_path / "sweep.json"
    source.write_text(json.dumps(figures))
    with pytest.raises(SystemExit) as ended:
        entry.main(["picture", str(tmp_path / "one.svg"), "--figures", str(source)])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "one.svg").exists()


def test_a_trace_is_of_a_run_and_not_of_figures(
    tmp_path: Path, figures: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    source = tmp_path / "sweep.json"
    source.write_text(json.dumps(figures))
    asked = ["picture", str(tmp_path / "a.svg"), "--figures", str(source), "--trace"]
    with pytest.raises(SystemExit):
        entry.main([*asked, str(tmp_path / "trace.json")])
    assert "with --figures nothing is run" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        entry.main(["picture", str(tmp_path / "a.svg"), "--figures", str(tmp_path / "none.json")])
    assert "none.json is no file of --json" in capsys.readouterr().err


def test_figures_of_a_real_run_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    source, picture = tmp_path / "sweep.json", tmp_path / "sweep.svg"
    asked = ["host_sweep", "--parameters", "1e5", "--rounds", "1", "--json", str(source)]
    assert entry.main(asked) == 0
    result, _ = written.read(str(source), {"host_sweep": host_picture.check})
    assert len(result["ways"]) == 1 + 5 * len(host_sweep.KINDS)
    assert entry.main(["picture", str(picture), "--figures", str(source)]) == 0
    assert picture.stat().st_size > 10_000
