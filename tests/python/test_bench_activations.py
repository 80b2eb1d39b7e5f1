"""bench activations: time and device memory of steps whose activations leave."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from refit.bench import __main__ as entry
from refit.bench import activation_picture, activation_ways, activations, figures, table
from refit.bench.activation_ways import CHECKPOINT, KINDS, MEMORY, NONE, OVERLAP
from refit.bench.decoder import Decoder, Sizes, tokens_of
from refit.errors import HostMemoryError
from refit.observe import memory_now

MIB = 1 << 20
SMALL = Sizes(width=64, layers=4, vocabulary=96)


# ---- the ways ----


def trained(kind: activation_ways.Kind, steps: int = 3) -> tuple[Decoder, Any]:
    torch.manual_seed(3)
    model = Decoder(SMALL, kind.checkpointed)
    tokens = tokens_of(2, 200, SMALL.vocabulary)
    way = kind.make(model, 64 * MIB)
    for _ in range(steps):
        model.zero_grad(set_to_none=True)
        way.loss(tokens).backward()
    return model, way


@pytest.mark.parametrize("kind", KINDS[1:], ids=lambda kind: kind.name)
def test_gradients_have_the_bits_of_those_of_the_plain_step(kind: activation_ways.Kind) -> None:
    plain, first = trained(KINDS[0])
    model, way = trained(kind)
    for one, two in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)
    out, back = way.moved()
    assert out == back
    assert (out > 0) == (kind.name != CHECKPOINT)
    for it in (first, way):
        it.close()


class Stack(torch.nn.Module):
    """Each layer saves its input (and a parameter), and its sigmoid."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(100, 100, bias=False), torch.nn.Sigmoid())
            for _ in range(3)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs.sin().sum()


def test_saved_bytes_count_storages_of_layers_once_and_no_inputs() -> None:
    model: Any = Stack()
    inputs = torch.randn(10, 100)
    # the caller's input is not counted; the input of the next layer is the sigmoid before it
    assert activations.saved_by_layer(model, inputs, 0) == [4000, 4000, 4000]
    assert activations.saved_by_layer(model, inputs, 4001) == [0, 0, 0]


# ---- the part ----


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "SIZES", SMALL)
    monkeypatch.setattr(activations, "SHAPES", ((1, 16), (2, 300)))


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_each_shape_reports_every_way_without_higher_peak() -> None:
    result = activations.measure(rounds=1)
    rows = result["ways"]
    names = [kind.name for kind in KINDS]
    assert [(row["shape"], row["way"]) for row in rows] == [
        (shape, name) for shape in ("1x16", "2x300") for name in names
    ]
    for row in rows:
        assert row["bit_equal"], row
        assert row["step_s_p95"] >= row["step_s_median"] > 0
        assert row["cold_step_s"] > 0
        assert row["out_bytes"] == row["back_bytes"]
        ours = row["way"] in (OVERLAP, MEMORY)
        assert not ours or row["peak_over_none"] <= 1, row
        # at 1x16 no storage has min_bytes
        assert (row["leavable_share"] is not None) == (ours and row["shape"] == "2x300")
    plain = [row for row in rows if row["way"] == NONE]
    assert all(row["over_none"] == row["peak_over_none"] == 1 for row in plain)
    assert all(row["blocked_s"] == 0 and row["out_bytes"] == 0 for row in plain)
    large = {row["way"]: row for row in rows if row["shape"] == "2x300"}
    assert 0.95 <= large[MEMORY]["leavable_share"] <= 1
    assert large[MEMORY]["peak_bytes"] < large[NONE]["peak_bytes"]
    assert large[CHECKPOINT]["peak_bytes"] < large[NONE]["peak_bytes"]
    assert set(result["memory"]) == set(names)
    shown = table.activations(result).splitlines()
    assert len([line for line in shown if line.startswith("|")]) == 2 + len(rows)


@pytest.mark.usefixtures("small")
def test_a_way_whose_last_bit_differs_is_not_bit_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.view(torch.int32).view(-1)[-1].bitwise_xor_(1)

    class Spoilt(activation_ways.Plain):
        def __init__(self, model: Decoder) -> None:
            super().__init__(model)
            model.head.weight.register_post_accumulate_grad_hook(spoil)

    kinds = (KINDS[0], activation_ways.Kind("spoilt", lambda model, _: Spoilt(model)))
    monkeypatch.setattr(activations, "KINDS", kinds)
    monkeypatch.setattr(activations, "RECORDED", 1)
    monkeypatch.setattr(activations, "UNTIMED", 0)
    monkeypatch.setattr(activations, "crossover", lambda rows, name: None)
    rows = activations.measure(rounds=2, lengths=[8])["ways"]
    assert [row["bit_equal"] for row in rows] == [True, False]


def test_the_crossover_is_where_no_longer_shape_is_slower() -> None:
    def rows(*steps: tuple[int, float]) -> list[dict[str, Any]]:
        return [
            {"way": way, "shape": f"1x{tokens}", "tokens": tokens, "step_s_median": seconds}
            for tokens, mine in steps
            for way, seconds in ((MEMORY, mine), (CHECKPOINT, 1.0))
        ]

    assert activations.crossover(rows((8, 0.5), (16, 2.0), (32, 1.0), (64, 0.9)), MEMORY) == 32
    assert activations.crossover(rows((8, 0.5), (16, 0.5)), MEMORY) == 8
    assert activations.crossover(rows((8, 0.5), (16, 1.5)), MEMORY) is None


# ---- the command ----


def test_too_little_memory_names_shorter_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_now, "available_bytes", lambda: 1 << 20)
    with pytest.raises(HostMemoryError, match="name shorter --lengths"):
        activations.memory_told([1 << 20])


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_figures_of_a_real_run_are_lines_and_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    whole, lines, drawn = (tmp_path / name for name in ("whole.json", "lines.json", "one.svg"))
    asked = ["activations", "--rounds", "1", "--lengths", "300", "--json"]
    assert entry.main([*asked, str(whole)]) == 0
    figures.read(str(whole), {"activations": activation_picture.check})
    assert entry.main(["picture", str(drawn), "--figures", str(whole)]) == 0
    assert len(drawn.read_text()) < 300_000
    assert entry.main([*asked, str(lines), "--lines"]) == 0
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [row["way"] for row in rows] == [kind.name for kind in KINDS]
    assert all("memory" not in row and row["shape"] == "1x300" for row in rows)
