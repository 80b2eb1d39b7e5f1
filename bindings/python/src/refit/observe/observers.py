"""Observers of the phases of a cycle: a timer, a timeline, a profiler, a bar.

A controller enters ``Observers.phase("offload")`` around each phase and knows nothing of the
observers. Phases have four names, ``offload``, ``publish``, ``commit`` and ``restore``, and one
more, ``wait``, for the time in which the optimizer step waits. Where states live on the host,
``step`` is the optimizer step in windows; a timeline has each window in it.

Independent of what happens in a phase.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

from refit._c.handle import Closing
from refit._c.stats import PREFIX
from refit.errors import InvalidError

# ---- Bars for work that takes long: a large offload, a large restore -----------------------------
# A bar is shown with tqdm, if that is installed, by rank 0 alone, and only on a terminal.
# Otherwise it is a counter that is not shown.
#
# It moves when it is told, and no thread of refit's own looks after it. A controller tells it at
# the end of a phase: it shows that something goes on and how much that is, then that it is done,
# and nothing in between. The first page-lock, which comes before the first offload, and a publish,
# of which it is not known before how much it will send, show none.

LARGE = 4 << 30
"""Bytes from which on a bar is shown without having been asked for."""


class Bar(Closing):
    """So many bytes of a known number. A context manager; made by ``bar``."""

    def __init__(self, shown: Any, total: int) -> None:
        self._shown = shown
        self.total = total
        self.done = 0

    @property
    def visible(self) -> bool:
        """Whether it is shown."""
        return self._shown is not None

    def advance(self, nbytes: int) -> None:
        """So many bytes more are done."""
        self.done += nbytes
        if self._shown is not None:
            self._shown.update(nbytes)

    def reach(self, nbytes: int) -> None:
        """So many bytes are done in all; fewer than before changes nothing."""
        self.advance(max(0, nbytes - self.done))

    def close(self) -> None:
        """Takes the bar away. A second call does nothing."""
        if self._shown is not None:
            self._shown.close()
            self._shown = None


def bar(what: str, nbytes: int, wanted: bool | None = None) -> Bar:
    """A bar for ``nbytes`` bytes of work, named ``what``.

    ``wanted``: True shows it however small the work, False never, None from ``LARGE`` on; it is
    shown by rank 0 on a terminal only, and if tqdm is installed. Does not block.
    """
    asked = nbytes >= LARGE if wanted is None else wanted
    if not asked or rank() != 0 or not sys.stderr.isatty():
        return Bar(None, nbytes)
    return Bar(_tqdm(what, nbytes), nbytes)


def rank() -> int:
    """This process's number: torch.distributed's where that runs, else ``RANK``, else 0."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    said = os.environ.get("RANK", "")
    return int(said) if said.isdecimal() else 0


def _tqdm(what: str, nbytes: int) -> Any:
    try:
        from tqdm.auto import tqdm  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        return None
    unit = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
    return tqdm(total=nbytes, desc=f"refit {what}", leave=False, **unit)


COPIES = "overlapped copies"
"""The name in pictures of copies that overlap others."""


class Timer(Protocol):
    """The interface of NeMo-RL's Timer: a context manager measures a label."""

    def time(self, label: str) -> AbstractContextManager[Any]:
        """Measures ``label`` until the block ends."""
        ...


TimerLike = Timer | Callable[[str], AbstractContextManager[Any]] | None
"""What ``timer=`` takes: such an object, a function that makes a context manager of a label (such
as ``functools.partial(marked_timer, timing_raw=timing)`` with verl), or nothing."""


class PhaseWatcher(Protocol):
    """The interface of a timeline."""

    def phase(self, name: str, nbytes: int = 0) -> AbstractContextManager[Any]:
        """A phase that lasts until the block ends, and what it is to move."""
        ...

    def span(self, name: str, start: float, seconds: float, nbytes: int = 0) -> None:
        """A phase that is over, which began at ``start`` of its ``now``."""
        ...

    def now(self) -> float:
        """Its time."""
        ...

    def hold(self, name: str, nbytes: int) -> None:
        """From now on ``name`` takes so many bytes of host memory."""
        ...


class Observers:
    """All observers, as one. Used by one thread.

    ``timer``: see ``TimerLike``; its labels are ``refit/offload`` and so on. A phase within one of
    the same name is measured once: timers refuse a label that is running. ``timeline``: a
    ``refit.Timeline``. ``progress``: see ``refit.observe.observers.bar``.
    """

    def __init__(
        self,
        timer: TimerLike = None,
        timeline: PhaseWatcher | None = None,
        progress: bool | None = None,
    ) -> None:
        self._time = _measure_of(timer)
        self._timeline = timeline
        self._progress = progress
        self._open: set[str] = set()

    @contextmanager
    def phase(self, name: str, nbytes: int = 0) -> Iterator[None]:
        """Tells all that ``name`` begins, and at the end of the block that it is over.

        One that moves many bytes shows a bar, which is full at its end. An exception of the block
        passes through.
        """
        if name in self._open:
            yield
            return
        with ExitStack() as stack:
            stack.callback(self._open.discard, name)
            self._open.add(name)
            if self._timeline is not None:
                stack.enter_context(self._timeline.phase(name, nbytes))
            if self._time is not None:
                stack.enter_context(self._time(PREFIX + name))
            stack.enter_context(nvtx_range(PREFIX + name))
            shown = stack.enter_context(self.bar(name, nbytes))
            yield
            shown.reach(nbytes)

    @property
    def drawn(self) -> bool:
        """Whether memory and background phases are recorded: there is a timeline."""
        return self._timeline is not None

    def past(self, name: str, seconds_ago: float, seconds: float, nbytes: int = 0) -> None:
        """A phase that overlapped others, such as copies; told once it is over."""
        if self._timeline is not None:
            start = max(0.0, self._timeline.now() - seconds_ago)
            self._timeline.span(name, start, seconds, nbytes)

    def hold(self, name: str, nbytes: int) -> None:
        """From now on ``name`` takes so many bytes of host memory."""
        if self._timeline is not None:
            self._timeline.hold(name, nbytes)

    def bar(self, what: str, nbytes: int) -> Bar:
        """A bar for long work within a phase."""
        return bar(what, nbytes, self._progress if nbytes > 0 else False)


def _measure_of(timer: TimerLike) -> Callable[[str], AbstractContextManager[Any]] | None:
    """A function of a label, whatever kind of timer it is."""
    if timer is None:
        return None
    measure = getattr(timer, "time", timer)
    if not callable(measure):
        raise InvalidError(
            f"timer={timer!r} measures nothing: give an object with .time(label), or a function of "
            "a label, that returns a context manager"
        )

    def measured(label: str) -> AbstractContextManager[Any]:
        block = measure(label)
        if not hasattr(block, "__enter__"):
            raise InvalidError(
                f"the timer gave {block!r} for {label!r}, which is not a context manager"
            )
        made: AbstractContextManager[Any] = block
        return made

    return measured


def nvtx_range(label: str) -> AbstractContextManager[Any]:
    """A context manager that shows ``label`` in Nsight Systems, beside the kernels and copies.

    Without a GPU that torch uses it does nothing; torch is never imported for it. Does not block.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return nullcontext()
    shown: AbstractContextManager[Any] = torch.cuda.nvtx.range(label)
    return shown
