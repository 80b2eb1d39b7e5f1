"""The picture of docs/benchmarks.md: a training step's time, and the device's memory, over the
share of the states that is on the host, from figures that ``host_sweep`` has written.

    python -m refit.bench host_sweep --json sweep.json
    python -m refit.bench picture sweep.svg --figures sweep.json
"""

from typing import Any

from refit.bench.host_sweep import PLAIN

COLOURS = ("#0072B2", "#56B4E9", "#D55E00", "#009E73")
MARKS = ("o", "s", "^", "D")
NUMBERS = ("host_fraction", "step_s_median", "step_s_p95", "peak_device_bytes")

Row = dict[str, Any]


def check(result: dict[str, Any]) -> None:
    """Raises ValueError, KeyError or TypeError if a figure that is drawn is not there."""
    for row in result["ways"]:
        if not all(isinstance(row[name], int | float) for name in NUMBERS):
            raise ValueError(f"a figure of {row['way']} is not a number")
    str(result["device"]), float(result["parameters"]), int(result["tokens"])


def draw(path: str, result: dict[str, Any], machine: dict[str, Any]) -> None:
    """Writes the picture to ``path``; its ending says the format. The same figures give the same
    bytes of an SVG."""
    import matplotlib
    from matplotlib.figure import Figure

    ways = _by_way(result["ways"])
    figure = Figure(figsize=(9.6, 4.2), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2)
    plain = ways.pop(PLAIN, None)
    if plain is not None:
        seconds = plain[0]["step_s_median"]
        left.axhline(seconds, color="#777777", lw=1.2, ls="--", label=f"{PLAIN}, no host memory")
    for number, (name, rows) in enumerate(ways.items()):
        style = {
            "color": COLOURS[number % len(COLOURS)],
            "marker": MARKS[number % len(MARKS)],
            "ms": 5,
            "lw": 1.6,
        }
        shares = [row["host_fraction"] for row in rows]
        medians = [row["step_s_median"] for row in rows]
        above = [max(0.0, row["step_s_p95"] - row["step_s_median"]) for row in rows]
        left.errorbar(
            shares,
            medians,
            yerr=([0.0] * len(above), above),
            label=name,
            capsize=3,
            elinewidth=0.8,
            **style,
        )
        held = [row["peak_device_bytes"] / 1e6 for row in rows]
        right.plot(shares, held, label=name, **style)
    on_gpu = result["device"] != "cpu"
    _dress(left, "a training step (s): median, and p95 above it", result)
    _dress(right, f"{'peak of device memory' if on_gpu else 'states on the device'} (MB)", result)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4,
                  fontsize=9, frameon=False)  # fmt: skip
    figure.suptitle(_title(result, machine), fontsize=11, x=0.01, ha="left")
    is_svg = path.lower().endswith(".svg")
    with matplotlib.rc_context({"svg.hashsalt": "refit"}):
        figure.savefig(path, metadata={"Date": None} if is_svg else None)


def _by_way(rows: list[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["way"], []).append(row)
    return found


def _dress(axes: Any, title: str, result: dict[str, Any]) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel("share of the states on the host")
    axes.set_xticks(sorted({row["host_fraction"] for row in result["ways"]}))
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#DDDDDD", lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _title(result: dict[str, Any], machine: dict[str, Any]) -> str:
    device = result["device"]
    where = f"{machine['cores']} cores of {machine['processor']}" if device == "cpu" else device
    return (
        f"A transformer of {result['parameters'] / 1e6:.0f} M parameters, AdamW, "
        f"{result['tokens']} tokens a step, on {where}"
    )
