"""bench host_step and host_sweep: steps on the CPU are measured with those of others in turn."""

import json
import sys
from pathlib import Path

import pytest
import torch
from refit.bench import __main__ as entry
from refit.bench import figures, host_picture, host_step, host_sweep, host_ways, table
from refit.bench.steps import Model

TINY = 2e5
HERE = tuple(way for way in host_ways.WAYS if way is not host_ways.DeepSpeed)
EXACT = ("torch, for-loop", "torch, foreach", "refit, CpuStep")


@pytest.fixture(autouse=True)
def without_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a minute to build, and not every machine has it."""
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setitem(sys.modules, "deepspeed.ops.adam", None)


def small_model() -> Model:
    made = torch.Generator().manual_seed(3)
    weights = [torch.randn(shape, generator=made) for shape in ((30, 40), (7,), (400,))]
    return Model(weights, [torch.randn(it.shape, generator=made) for it in weights])


def test_the_limit_moves_each_byte_of_a_step() -> None:
    limit = host_ways.Limit(1000)
    limit()
    assert [float(one.sum()) for one in limit._arrays] == [1000, 1000, 2000, 1000]


def test_backward_and_step_are_compared_with_longer_one_alone() -> None:
    cases = []
    phases = {"PLAIN": (2.0, 9.0), "OVERLAPPED": (3.0, 1.0), "ALONE": (2.5, 4.0)}
    for name, (backward, step) in phases.items():
        made = host_sweep.Case(getattr(host_sweep, name), 0.5, host_sweep.Plain)
        made.take([1.0], {"backward_s": backward, "optimizer_s": step}, cold=1.0)
        cases.append(made)
    found = [host_sweep._over_longer(one, cases) for one in cases]
    assert found == [11.0 / 9.0, 4.0 / 4.0, 6.5 / 4.0]


# ---- the step alone ----


def test_every_way_is_reported_for_each_number_of_tensors() -> None:
    result = host_step.measure(TINY, rounds=2, finer=(1, 10))
    names = [way.name for way in HERE]
    rows = result["ways"]
    assert [row["way"] for row in rows] == [*names, *names]
    assert result["parameters"] == 200_064
    tensors = sorted({row["tensors"] for row in rows})
    assert tensors[0] * 10 == tensors[1]
    for row in rows:
        assert row["step_s_p95"] >= row["step_s_median"] > 0
        assert row["cold_step_s"] > 0
        assert row["parameters_per_s"] == pytest.approx(result["parameters"] / row["step_s_median"])
        assert row["share_of_limit"] > 0
    assert rows[0]["speedup_over_for_loop"] == 1
    assert [row["speedup_over_faster"] for row in rows if row["way"] == "torch, fused"] == [1, 1]
    assert list(result["left_out"]) == ["DeepSpeedCPUAdam"]
    shown = table.host_step(result).splitlines()
    assert len(shown) == 2 + 2 + len(names)
    assert f"of {tensors[0]} tensors" in shown[2]
    assert f"step of {tensors[1]}" in shown[2]


@pytest.mark.slow
def test_a_way_is_bit_equal_only_if_it_has_the_bits_of_the_loop() -> None:
    result = host_step.measure(TINY, 1, finer=(100,))
    rows = {row["way"]: row for row in result["ways"]}
    assert result["parameters"] == 200_064
    assert rows[EXACT[0]]["tensors"] < 24 * 100  # of fewer elements no part is made
    for name in EXACT:
        assert (rows[name]["bit_equal"], rows[name]["different_share"]) == (True, 0)
    for row in rows.values():
        assert row["bit_equal"] == (row["different_share"] == 0)
        assert 0 <= row["different_share"] < 1


@pytest.mark.parametrize("make", HERE[1:], ids=lambda make: make.name)
def test_one_bit_is_counted_and_other_steps_are_refused(make: type[host_ways.HostWay]) -> None:
    model = small_model()
    loop, other = host_ways.ForLoop(model), make(model)
    for way in (loop, other):
        way.step()
    before = host_ways.differing(loop, other, model)
    *_, (_, last) = other.held()
    last.view(torch.int32)[5].bitwise_xor_(1)
    count = sum(it.numel() for _, it in loop.held())
    assert abs(host_ways.differing(loop, other, model) - before) == pytest.approx(1 / count)
    loop.step()
    with pytest.raises(RuntimeError, match="the figures mean nothing"):
        host_ways.differing(loop, other, model)
    other.step()
    next(other.held())[1].view(-1)[0] = float("nan")
    with pytest.raises(RuntimeError, match="the figures mean nothing"):
        host_ways.differing(loop, other, model)
    for way in (loop, other):
        way.close()


def test_a_way_that_is_not_installed_is_left_out_and_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["host_step", "--parameters", "1e5", "--rounds", "1", "--json", "-"]
    assert entry.main([*asked, "--lines"]) == 0
    said = capsys.readouterr()
    assert "DeepSpeedCPUAdam is left out: pip install deepspeed ninja" in said.err
    rows = [json.loads(line) for line in said.out.splitlines()]
    assert [row["way"] for row in rows] == [way.name for way in HERE] * 3
    assert all(row["bench"] == "host_step" and row["cores"] >= 1 for row in rows)


# ---- Megatron's form ----


@pytest.mark.parametrize("fraction", [0.0, 0.25, 1.0])
def test_first_parameters_up_to_share_are_stepped_from_copies(fraction: float) -> None:
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
    shares = (0.0, 0.5, 1.0)
    result = host_sweep.measure(TINY, rounds=1, fractions=shares)
    rows = {(row["way"], row["host_fraction"]): row for row in result["ways"]}
    kinds = [kind.name for kind in host_sweep.KINDS if kind.name not in result["left_out"]]
    assert set(result["left_out"]) == {"torchao, CPUOffloadOptimizer"}
    expected = [(kind, share) for kind in kinds for share in shares]
    assert list(rows) == [(host_sweep.PLAIN, 0.0), *expected]
    plain = rows[host_sweep.PLAIN, 0.0]
    whole = plain["peak_device_bytes"]
    assert whole == 8 * result["parameters"]
    for (way, share), row in rows.items():
        assert row["step_s_p95"] >= row["step_s_median"] > 0
        assert row["cold_step_s"] > 0
        assert row["forward_s_median"] > 0
        alone = rows[host_sweep.ALONE, share] if way == host_sweep.OVERLAPPED else row
        longer = max(plain["backward_s_median"], alone["optimizer_s_median"])
        both = row["backward_s_median"] + row["optimizer_s_median"]
        assert row["over_longer"] == pytest.approx(both / longer)
        assert row["peak_device_bytes"] == whole - row["host_state_bytes"]
        if share in (0, 1):  # refit leaves states of up to 512 bytes
            assert whole * share * 0.99 <= row["host_state_bytes"] <= whole * share
        else:
            assert 0 < row["host_state_bytes"] < whole
        if share == 0 or way != "HybridDeviceOptimizer":
            assert row["bit_equal"], row
    assert plain["over_plain"] == 1
    shown = table.host_sweep(result)
    assert "states on the device" in shown
    assert "CPUOffloadOptimizer is left out: it needs a GPU" in shown


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


@pytest.mark.parametrize("parameters", [TINY, 2e6, 1e7, 2.5e7, 1e8])
def test_the_transformer_has_about_the_parameters_asked_for(parameters: float) -> None:
    with torch.device("meta"):
        model = host_sweep.Transformer(parameters)
    assert sum(it.numel() for it in model.parameters()) == pytest.approx(parameters, rel=0.1)


@pytest.mark.slow
def test_figures_of_a_real_run_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    source, picture = tmp_path / "sweep.json", tmp_path / "sweep.svg"
    asked = ["host_sweep", "--parameters", "1e5", "--rounds", "1", "--json", str(source)]
    assert entry.main(asked) == 0
    result, _ = figures.read(str(source), {"host_sweep": host_picture.check})
    shares = [1 if kind.only_all else 5 for kind in host_sweep.KINDS]
    assert len(result["ways"]) == 1 + sum(shares) - len(result["left_out"])
    assert entry.main(["picture", str(picture), "--figures", str(source)]) == 0
    assert picture.stat().st_size > 10_000
