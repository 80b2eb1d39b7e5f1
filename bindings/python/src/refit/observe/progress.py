"""Bars for work that takes long: a large offload, a large restore.

A bar is shown with tqdm, if that is installed, by rank 0 alone, and only on a terminal.
Otherwise it is a counter that is not shown.

It moves when it is told, and no thread of refit's own looks after it. A controller tells it at the
end of a phase: it shows that something goes on and how much that is, then that it is done, and
nothing in between. The first page-lock, which comes before the first offload, and a publish, of
which it is not known before how much it will send, show none.

Independent of what is measured: a bar is told bytes.
"""

import os
import sys
from typing import Any

from refit._c.closing import Closing

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
