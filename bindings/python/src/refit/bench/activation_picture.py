"""The picture of docs/benchmarks.md: device memory over one training step, without refit's offload
of activations and with it, and time and peak of all ways, from figures that ``activations`` has
written.

    python -m refit.bench activations --json activations.json
    python -m refit.bench picture activations.svg --figures activations.json
"""

from collections.abc import Iterator
from typing import Any

from refit.bench.activation_ways import MEMORY, NONE, OVERLAP

COLOURS = {NONE: "#777777", OVERLAP: "#56B4E9", MEMORY: "#0072B2"}
OTHERS, EDGE = "#E69F00", "#FFFFFF"
NUMBERS = ("step_s_median", "step_s_p95", "peak_bytes")
MB = 1e6


def check(result: dict[str, Any]) -> None:
    """Raises ValueError, KeyError or TypeError if a figure that is drawn is not there."""
    if not _rows(result):
        raise ValueError("it has no rows of the shape whose memory was recorded")
    for row in _rows(result):
        if not all(isinstance(row[name], int | float) for name in NUMBERS):
            raise ValueError(f"a figure of {row['way']} is not a number")
    for drawn in result["memory"].values():
        float(drawn["forward_s"]), [(float(at), int(nbytes)) for at, nbytes in drawn["points"]]
    str(result["device"]), float(result["parameters"])


def draw(path: str, result: dict[str, Any], machine: dict[str, Any]) -> None:
    """Writes the picture to ``path``; its ending says the format. The same figures give the same
    bytes of an SVG."""
    import matplotlib
    from matplotlib.figure import Figure

    rows = _rows(result)
    drawn = {way: result["memory"][way] for way in COLOURS if way in result["memory"]}
    figure = Figure(figsize=(9.6, 7.2 if drawn else 3.4), dpi=110, layout="constrained")
    grid = figure.add_gridspec(2 if drawn else 1, 2, height_ratios=(1.25, 1) if drawn else None)
    if drawn:
        _memory(figure.add_subplot(grid[0, :]), drawn)
    left, right = (figure.add_subplot(grid[-1, column]) for column in range(2))
    _bars(left, "a training step (ms): median, and p95 after it", rows, "step_s_median", 1e3)
    medians = [row["step_s_median"] * 1e3 for row in rows]
    after = [max(0.0, row["step_s_p95"] * 1e3 - it) for row, it in zip(rows, medians, strict=True)]
    left.errorbar(medians, range(len(rows)), xerr=([0.0] * len(rows), after), fmt="none",
                  ecolor="#333333", elinewidth=0.8, capsize=2)  # fmt: skip
    _bars(right, "peak of device memory (MB)", rows, "peak_bytes", 1 / MB)
    right.set_yticklabels([])
    figure.suptitle(_title(result, machine), fontsize=11, x=0.01, ha="left")
    is_svg = path.lower().endswith(".svg")
    with matplotlib.rc_context({"svg.hashsalt": "refit"}):
        figure.savefig(path, metadata={"Date": None} if is_svg else None)


def _rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in result["ways"] if row["shape"] == result["memory_shape"]]


def _memory(axes: Any, drawn: dict[str, dict[str, Any]]) -> None:
    """Lines of steps, since memory is as it is until the next allocation. Both passes have the same
    width for each way, so that the same layers are above each other."""
    for way, it in drawn.items():
        most = max(nbytes for _, nbytes in it["points"]) / MB
        places, heights = zip(*_by_pass(it), strict=True)
        axes.step(places, heights, where="post", lw=1.2, color=COLOURS[way],
                  label=f"{way}: peak {most:.0f} MB")  # fmt: skip
    axes.axvline(1, color="#333333", lw=0.8, ls=":")
    axes.set_title("device memory (MB) over one step", fontsize=10, loc="left")
    axes.set_xticks([0.5, 1.5], ["forward pass", "backward pass"])
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(0, 2)
    _dress(axes, "y")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=9, frameon=False)


def _by_pass(drawn: dict[str, Any]) -> Iterator[tuple[float, float]]:
    """MB, and where: from 0 to 1 in the time of the forward pass, to 2 in that of the other."""
    turns, end = drawn["forward_s"], drawn["points"][-1][0]
    for at, nbytes in drawn["points"]:
        place = at / turns if at <= turns else 1 + (at - turns) / (end - turns)
        yield place, nbytes / MB


def _bars(axes: Any, title: str, rows: list[dict[str, Any]], name: str, scale: float) -> None:
    ways = [row["way"] for row in rows]
    colours = [COLOURS.get(way, COLOURS[MEMORY] if "refit" in way else OTHERS) for way in ways]
    axes.barh(range(len(ways)), [row[name] * scale for row in rows], color=colours, edgecolor=EDGE)
    axes.set_yticks(range(len(ways)), ways, fontsize=9)
    axes.invert_yaxis()
    axes.set_title(title, fontsize=10, loc="left")
    _dress(axes, "x")


def _dress(axes: Any, across: str) -> None:
    axes.grid(axis=across, color="#DDDDDD", lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _title(result: dict[str, Any], machine: dict[str, Any]) -> str:
    device = result["device"]
    where = f"{machine['cores']} cores of {machine['processor']}" if device == "cpu" else device
    batch, _, length = str(result["memory_shape"]).partition("x")
    return (
        f"Forward and backward pass of a decoder of {result['parameters'] / 1e6:.0f} M parameters, "
        f"{batch} x {length} tokens, on {where}"
    )
