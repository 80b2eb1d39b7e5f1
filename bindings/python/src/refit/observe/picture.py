"""A timeline as a picture: phases above, the device's memory below them, then the host's.

Refit's phases are shaded in the memory, too; those of the loop, the windows of a step, and copies
that overlapped others, have rows of their own. Colours are those of Okabe and Ito, which
colour-blind readers can tell apart; the legend says each phase's name and how long it took.
matplotlib is imported here, and only its drawing half: no window is opened, its global state is
left alone.
"""

import os
import statistics
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from refit.observe.timeline import Series, Side, Span

PHASES = {
    "offload": "#E69F00",
    "publish": "#009E73",
    "commit": "#0072B2",
    "restore": "#CC79A7",
    "wait": "#D55E00",
    "step": "#CFCFCF",
}
WINDOWS = {"wait for states": "#D55E00", "window": "#0072B2"}
OWN = {**PHASES, **WINDOWS}
OTHERS = ("#F0E442", "#56B4E9", "#999999", "#B8A3D9", "#C4B49A")
OVERLAPPED = "overlapped"
ROWS = (OVERLAPPED, "windows", "refit", "loop")
INK = ("#2F4B66", "#7B95AD", "#A9B8C6", "#5D6D7E")
AREA = ("#8FA9C2", "#D3DEE8", "#B3C4D3", "#E9EEF3")
GIB, MIB = 1 << 30, 1 << 20


def draw(
    path: str | os.PathLike[str], spans: "list[Span]", series: "list[Series]", title: str | None
) -> None:
    """Writes the picture to ``path``; its ending says the format."""
    from matplotlib.figure import Figure

    spans, series = from_the_first(spans, series)
    figure = Figure(figsize=(9.6, 5.8), dpi=110, layout="constrained")
    strip, upper, lower = figure.subplots(3, 1, sharex=True, height_ratios=(0.32, 1, 1))
    on_gpu = any(it.name == "allocated" for it in series)
    colours = colours_of(span.name for span in spans)
    _bars(strip, spans, colours)
    unit = _unit(series)
    panels: list[tuple[Any, Side]] = [(upper, "device"), (lower, "host")]
    for axes, side in panels:
        shown = [it for it in series if it.side == side and _most(it) >= MIB]
        _panel(axes, shown, unit, lines=on_gpu and side == "device")
        _dress(axes, side, on_gpu)
        _shade(axes, spans, colours)
    lower.set_xlabel("time (s)")
    lower.set_xlim(*_extent(spans, series))
    figure.suptitle(title or "Memory over the refit cycle", fontsize=12, x=0.01, ha="left")
    if spans:
        _legend(figure, spans, colours)
    figure.savefig(path)


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name, in the order in which they first occur; refit's own are always the
    same."""
    found: dict[str, str] = {}
    for name in names:
        if name not in found:
            others = sum(known not in OWN for known in found)
            found[name] = OWN.get(name, OTHERS[others % len(OTHERS)])
    return found


def row_of(name: str) -> str:
    """Which row of the strip a phase is in."""
    if name.startswith(OVERLAPPED):
        return OVERLAPPED
    if name in WINDOWS:
        return "windows"
    return "refit" if name in PHASES else "loop"


def _bars(axes: Any, spans: "list[Span]", colours: dict[str, str]) -> None:
    """The strip of phases."""
    rows = [row for row in ROWS if any(row_of(it.name) == row for it in spans)]
    for it in spans:
        colour = colours[it.name]
        place = rows.index(row_of(it.name))
        edge = "white" if it.name in WINDOWS else colour  # windows touch each other
        axes.barh(place, it.seconds, 0.8, it.start, color=colour, edgecolor=edge, lw=0.5)
    axes.set_yticks(range(len(rows)), rows, fontsize=9)
    axes.tick_params(left=False, bottom=False)
    axes.spines[:].set_visible(False)


def _unit(series: "list[Series]") -> tuple[int, str]:
    """One unit for all panels."""
    most = max((_most(it) for it in series), default=0)
    return (GIB, "GiB") if 2 * most >= GIB else (MIB, "MiB")


def _panel(axes: Any, shown: "list[Series]", unit: tuple[int, str], lines: bool) -> None:
    """One side's memory: lines where one lies in the other, else areas on top of each other."""
    scale, word = unit
    times = sorted({at for it in shown for at, _ in it.points})
    heights = [[value_at(it, at) / scale for at in times] for it in shown]
    if lines:
        for it, height, ink in zip(shown, heights, INK, strict=False):
            axes.plot(times, height, color=ink, lw=1.8, label=it.name)
    elif shown:
        axes.stackplot(
            times, heights, labels=[it.name for it in shown], colors=AREA, edgecolor=INK[0], lw=0.8
        )
    axes.set_ylabel(word)


def _dress(axes: Any, side: "Side", on_gpu: bool) -> None:
    place = "device" if on_gpu else "device (this process, without what is below)"
    axes.set_title(place if side == "device" else "host", fontsize=10, loc="left")
    axes.margins(y=0.12)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#DDDDDD", lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(bbox_to_anchor=(1.01, 1), loc="upper left", fontsize=9, frameon=False)


def _shade(axes: Any, spans: "list[Span]", colours: dict[str, str]) -> None:
    for it in spans:
        if row_of(it.name) == "refit":
            colour = colours[it.name]
            axes.axvspan(it.start, it.start + it.seconds, color=colour, alpha=0.45, lw=0.5)


def _legend(figure: Any, spans: "list[Span]", colours: dict[str, str]) -> None:
    """The phases below the panels, each with the median of its seconds."""
    from matplotlib.patches import Patch

    handles = []
    for name, colour in colours.items():
        typical = statistics.median(it.seconds for it in spans if it.name == name)
        handles.append(Patch(color=colour, label=f"{name}  {duration(typical)}"))
    columns = min(5, len(handles))
    figure.legend(
        handles=handles, loc="outside lower center", ncols=columns, fontsize=9, frameon=False
    )


def from_the_first(
    spans: "list[Span]", series: "list[Series]"
) -> "tuple[list[Span], list[Series]]":
    """The same with time counted from the first thing recorded."""
    first = _extent(spans, series)[0]
    moved = [replace(it, start=it.start - first) for it in spans]
    return moved, [
        replace(it, points=[(at - first, value) for at, value in it.points]) for it in series
    ]


def _extent(spans: "list[Span]", series: "list[Series]") -> tuple[float, float]:
    """From the first thing recorded to the last."""
    times = [at for it in series for at, _ in it.points]
    times += [end for it in spans for end in (it.start, it.start + it.seconds)]
    first, last = min(times), max(times)
    return first, last if last > first else first + 1e-3


def _most(it: "Series") -> int:
    return max((value for _, value in it.points), default=0)


def value_at(it: "Series", at: float) -> int:
    """The last sample at that time; 0 before the first sample."""
    before = bisect_right(it.points, at, key=lambda point: point[0])
    return it.points[before - 1][1] if before else 0


def duration(seconds: float) -> str:
    """So many seconds with two or three digits, in the unit that suits."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.2g} ms"
