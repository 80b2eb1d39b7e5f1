"""The refit cycle over time: its phases, and the memory of device and host.

    with refit.Timeline(sample_every_s=0.005) as timeline:
        controller = refit.Controller(optimizer, timeline=timeline)
        ...                                        # a few steps of training
    timeline.save("cycle.json")                    # for ui.perfetto.dev or chrome://tracing
    timeline.picture("cycle.png")                  # needs matplotlib

A controller marks its phases; a loop may mark its own (``with timeline.phase("rollout")``). Memory
is sampled at each end of a phase, and in between by a thread while a timeline with
``sample_every_s`` is open. On the host device the process itself is the device: there the device's
memory is what the process holds besides refit's arena. The arena's size is told once the call that
takes it, or gives it back (``Controller.release``), is done: until then a sample counts the pages
that come or go as the process's.

Independent of what a phase does.
"""

import gzip
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from refit._c.stats import rate
from refit.errors import InvalidError, StateError
from refit.observe import memory_now

Side = Literal["device", "host"]


@dataclass(frozen=True)
class Span:
    """One phase that is over: seconds since the timeline was made."""

    name: str
    start: float
    seconds: float
    nbytes: int = 0
    thread: int = 0


@dataclass
class Series:
    """One quantity of memory over time: pairs of seconds and bytes."""

    name: str
    side: Side
    points: list[tuple[float, int]] = field(default_factory=list)


class Timeline:
    """A record of phases and of memory, for a trace and for a picture.

    ``sample_every_s``: while the timeline is open as a context manager, a thread of its own samples
    the memory that often (at least 0.001); None: no thread, only the ends of phases are sampled.
    ``clock`` gives seconds. Any thread may mark phases. It grows with what it records: for a few
    cycles, not for a whole training.
    """

    def __init__(
        self, sample_every_s: float | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        if sample_every_s is not None and not sample_every_s >= 0.001:
            raise InvalidError(f"sample_every_s is {sample_every_s}; it is at least 0.001")
        self._every = sample_every_s
        self._clock = clock
        self._zero = clock()
        self._lock = threading.Lock()
        self._held: dict[str, tuple[Side, int]] = {}
        self._stop = threading.Event()
        self._sampler: threading.Thread | None = None
        self.spans: list[Span] = []
        self.series: dict[str, Series] = {}

    def now(self) -> float:
        """Seconds since the timeline was made."""
        return self._clock() - self._zero

    @contextmanager
    def phase(self, name: str, nbytes: int = 0) -> Iterator[None]:
        """A phase that lasts until the block ends; ``nbytes``: what it moves, for the trace.

        One that ends with an exception is recorded, too.
        """
        self.sample()
        start = self.now()
        try:
            yield
        finally:
            self.span(name, start, self.now() - start, nbytes)
            self.sample()

    def span(self, name: str, start: float, seconds: float, nbytes: int = 0) -> None:
        """Records a phase that is over, such as copies that overlapped others."""
        it = Span(name, start, seconds, nbytes, threading.get_native_id())
        with self._lock:
            self.spans.append(it)

    def hold(self, name: str, nbytes: int, side: Side = "host") -> None:
        """Says that from now on ``name`` takes so many bytes of this process's memory.

        They are shown under that name, and no more as part of the process.
        """
        with self._lock:
            self._held[name] = (side, nbytes)
        self.sample()

    def sample(self) -> None:
        """Samples all memory now. Does not block."""
        with self._lock:
            at = self.now()
            held = [(name, side, nbytes) for name, (side, nbytes) in self._held.items()]
            for name, side, value in [*held, *_found(held)]:
                series = self.series.setdefault(name, Series(name, side))
                series.points.append((at, value))

    def forget(self) -> None:
        """Drops what was recorded. Memory that was reported by name is kept."""
        with self._lock:
            self.spans, self.series = [], {}

    def __enter__(self) -> Self:
        if self._sampler is not None:
            raise StateError("this timeline is open already")
        self.sample()
        if self._every is not None:
            self._stop.clear()
            self._sampler = threading.Thread(target=self._run, name="refit-timeline", daemon=True)
            self._sampler.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._sampler is not None:
            self._stop.set()
            self._sampler.join()
            self._sampler = None
        self.sample()

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            self.sample()

    def trace(self) -> dict[str, Any]:
        """All of it in the Chrome trace format, which Perfetto reads."""
        with self._lock:
            spans = [_complete(it) for it in self.spans]
            counters = [_counter(it, *point) for it in self.series.values() for point in it.points]
        events = [_process(), *spans, *counters]
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the trace as JSON; compressed if the name ends in ``.gz``, as Perfetto takes it.

        OSError as ``open`` raises it.
        """
        text = json.dumps(self.trace(), separators=(",", ":"))
        if str(path).endswith(".gz"):
            Path(path).write_bytes(gzip.compress(text.encode()))
        else:
            Path(path).write_text(text)

    def picture(self, path: str | os.PathLike[str], title: str | None = None) -> None:
        """Draws device and host memory over time, phases shaded, as PNG, SVG or PDF by the name.

        Needs matplotlib (ImportError). StateError if nothing was recorded.
        """
        from refit.observe.picture import draw

        with self._lock:
            spans = list(self.spans)
            series = [Series(it.name, it.side, list(it.points)) for it in self.series.values()]
        if not any(it.points for it in series):
            raise StateError("this timeline is empty: open it, or mark a phase, before drawing it")
        draw(path, spans, series, title)


def _found(held: list[tuple[str, Side, int]]) -> list[tuple[str, Side, int]]:
    """Memory as torch and the kernel report it, less that of the process which is held by name.

    Host images are shared memory, of which the weights' store is the rest; where the kernel gave
    none, they are memory of the process.
    """
    gpu, process = memory_now.gpu_bytes(), memory_now.process_bytes()
    on_host = sum(value for _, side, value in held if side == "host")
    images = min(on_host, process[memory_now.SHARED])
    others = sum(value for *_, value in held) - images
    rest = max(0, process[memory_now.ANONYMOUS] - others)
    shared: tuple[str, Side, int] = ("weights store", "host", process[memory_now.SHARED] - images)
    if gpu is None:
        return [("process", "device", rest), shared]
    on_gpu: list[tuple[str, Side, int]] = [(name, "device", value) for name, value in gpu.items()]
    return [*on_gpu, ("process", "host", rest), shared]


def _complete(it: Span) -> dict[str, Any]:
    """A phase as a "complete" event; microseconds."""
    what = {"bytes": it.nbytes, "GB/s": round(rate(it.nbytes, it.seconds), 3)} if it.nbytes else {}
    times = {"ts": it.start * 1e6, "dur": it.seconds * 1e6}
    return {"ph": "X", "cat": "refit", "name": it.name, **times, **_where(it.thread), "args": what}


def _counter(it: Series, at: float, value: int) -> dict[str, Any]:
    shown = f"{it.side} memory: {it.name}"
    return {"ph": "C", "name": shown, "ts": at * 1e6, **_where(0), "args": {"bytes": value}}


def _process() -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", **_where(0), "args": {"name": "refit"}}


def _where(thread: int) -> dict[str, int]:
    return {"pid": os.getpid(), "tid": thread}
