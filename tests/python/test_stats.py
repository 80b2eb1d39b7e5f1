"""stats: the C library's figures as a flat dict of floats."""

import re
from pathlib import Path
from typing import Any

import pytest
from refit._c import abi, stats
from refit._c.library import lib
from refit.errors import InvalidError


def filled(every: int | None = None) -> abi.refit_stats:
    """A struct in which every figure is another number, or the same one."""
    made = stats.empty()
    for number, (name, _) in enumerate(made._fields_[1:], start=1):
        setattr(made, name, every or number)
    return made


def test_every_figure_is_the_field_it_says_as_a_float() -> None:
    made = filled()
    flat = stats.flatten(made)
    assert all(type(value) is float for value in flat.values())
    for name, field in stats.FIGURES.items():
        assert flat[f"refit/{name}"] == float(getattr(made, field)), name
    assert len(set(stats.FIGURES.values())) == len(stats.FIGURES)


def test_the_guides_table_of_figures_has_every_key_and_its_unit(root: Path) -> None:
    text = (root / "docs" / "statistics.md").read_text()
    rows = re.findall(r"^\| `(refit/\w+)` \| (\S+) \| (.+) \|$", text, re.M)
    units = {key: unit for key, unit, _ in rows}
    assert len(units) == len(rows)
    assert set(units) == set(stats.flatten(stats.empty()))
    for key, unit in units.items():
        ending = {"_s": "s", "bytes": "bytes", "gbps": "GB/s", "version": "number"}
        wanted = [one for end, one in ending.items() if key.endswith(end)]
        assert unit == (wanted[0] if wanted else "count"), key


def test_a_controller_has_the_keys_of_the_table_and_no_others() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    import refit

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    with refit.Controller(optimizer) as controller:
        assert set(controller.stats()) == set(stats.flatten(stats.empty()))


def test_rates_are_bytes_over_seconds_in_gigabytes() -> None:
    made = stats.empty()
    assert stats.flatten(made)["refit/offload_gbps"] == 0.0  # before anything was moved
    made.offload_bytes_last, made.offload_seconds_last = 6_000_000_000, 1.5
    assert stats.flatten(made)["refit/offload_gbps"] == 4.0


def test_what_python_knows_replaces_what_c_says() -> None:
    flat = stats.flatten(filled(), {"cycles": 7, "refit/workers": 8, "my_own": 9})
    assert flat["refit/cycles"] == 7.0
    assert flat["refit/workers"] == 8.0
    assert flat["refit/my_own"] == 9.0
    assert "refit/refit/workers" not in flat
    with pytest.raises(ValueError, match="could not convert"):
        stats.flatten(stats.empty(), {"cycles": "many"})  # type: ignore[dict-item]


def test_figures_of_objects_add_up_and_failure_is_raised() -> None:
    def device(seconds: int, figures: Any, _error: Any) -> int:
        figures._obj.offload_regions, figures._obj.restore_seconds_last = 3, seconds
        return abi.REFIT_OK

    both = stats.gather((device, 5), (device, 4))
    assert (both.offload_regions, both.restore_seconds_last) == (6, 5)
    with pytest.raises(InvalidError):
        stats.gather((device, 5), (lib.refit_publisher_stats, 0))
