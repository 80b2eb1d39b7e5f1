"""A timeline as a picture: the device's memory above, the host's below, phases shaded in both.

Colours are those of Okabe and Ito, which people who see colours differently can tell apart; the
legend gives each phase's name and how long it took. matplotlib is imported here, and only its
drawing half: no window is opened, and its global state is left alone.
"""

import os
import statistics
from bisect import bisect_right
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from refit.timeline import Series, Side, Span

PHASES = {
    "offload": "#E69F00",
    "publish": "#009E73",
    "commit": "#0072B2",
    "restore": "#CC79A7",
    "join": "#D55E00",
}
OTHERS = ("#F0E442", "#56B4E9", "#999999", "#B8A3D9", "#C4B49A")
INK = ("#34495E", "#85A0B8", "#C3CFDA", "#5D6D7E")
GIB, MIB = 1 << 30, 1 << 20


def draw(
    path: str | os.PathLike[str], spans: "list[Span]", series: "list[Series]", title: str | None
) -> None:
    """Writes the picture to ``path``; its ending says the format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 5.4), dpi=110, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    on_gpu = any(it.name == "allocated" for it in series)
    _panel(upper, "device", series, on_gpu)
    _panel(lower, "host", series, on_gpu)
    lower.set_xlabel("time (s)")
    lower.set_xlim(*_extent(spans, series))
    colours = colours_of(span.name for span in spans)
    for axes in (upper, lower):
        _shade(axes, spans, colours)
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
            others = sum(known not in PHASES for known in found)
            found[name] = PHASES.get(name, OTHERS[others % len(OTHERS)])
    return found


def _panel(axes: Any, side: "Side", series: "list[Series]", on_gpu: bool) -> None:
    """One side's memory: on a GPU lines, since what is allocated lies in what is reserved; else
    areas on top of each other."""
    shown = [it for it in series if it.side == side and _most(it) >= MIB]
    scale, unit = (GIB, "GiB") if sum(map(_most, shown)) >= GIB else (MIB, "MiB")
    times = sorted({at for it in shown for at, _ in it.points})
    heights = [[value_at(it, at) / scale for at in times] for it in shown]
    if side == "device" and on_gpu:
        for it, height, ink in zip(shown, heights, INK, strict=False):
            axes.plot(times, height, color=ink, lw=1.8, label=it.name)
    elif shown:
        axes.stackplot(times, heights, labels=[it.name for it in shown], colors=INK, lw=0)
    _dress(axes, side, unit, on_gpu)


def _dress(axes: Any, side: "Side", unit: str, on_gpu: bool) -> None:
    place = "device" if on_gpu else "device (the process, without what is below)"
    axes.set_title(place if side == "device" else "host", fontsize=10, loc="left")
    axes.set_ylabel(unit)
    axes.margins(y=0.12)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#DDDDDD", lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(bbox_to_anchor=(1.01, 1), loc="upper left", fontsize=9, frameon=False)


def _shade(axes: Any, spans: "list[Span]", colours: dict[str, str]) -> None:
    for span in spans:
        end = span.start + span.seconds
        axes.axvspan(span.start, end, color=colours[span.name], alpha=0.4, lw=0.4)


def _legend(figure: Any, spans: "list[Span]", colours: dict[str, str]) -> None:
    """The phases below the panels, each with the median of its seconds."""
    from matplotlib.patches import Patch

    handles = []
    for name, colour in colours.items():
        typical = statistics.median(it.seconds for it in spans if it.name == name)
        handles.append(Patch(color=colour, alpha=0.4, label=f"{name}  {duration(typical)}"))
    columns = min(6, len(handles))
    figure.legend(
        handles=handles, loc="outside lower center", ncols=columns, fontsize=9, frameon=False
    )


def _extent(spans: "list[Span]", series: "list[Series]") -> tuple[float, float]:
    """From the first thing recorded to the last."""
    times = [at for it in series for at, _ in it.points]
    times += [end for it in spans for end in (it.start, it.start + it.seconds)]
    first, last = min(times), max(times)
    return first, last if last > first else first + 1e-3


def _most(it: "Series") -> int:
    return max((value for _, value in it.points), default=0)


def value_at(it: "Series", at: float) -> int:
    """What was sampled last at that time; before the first sample there was nothing."""
    before = bisect_right(it.points, at, key=lambda point: point[0])
    return it.points[before - 1][1] if before else 0


def duration(seconds: float) -> str:
    """So many seconds with two or three digits, in the unit that suits."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.2g} ms"
