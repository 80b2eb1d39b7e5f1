"""What a person watches while it trains: a line every ten cycles, a bar on a terminal, JSON."""

import json
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

HEADER = (
    "cycle  version  reward     loss   out MB  out ms  publish ms  commit ms  exposed ms  workers"
)
EVERY = 10


class Show:
    """A context manager; `quiet` leaves the JSON only."""

    def __init__(self, cycles: int, path: Path | None, quiet: bool = False) -> None:
        self._cycles = cycles
        self._json = path.open("w") if path is not None else None
        self._quiet = quiet
        self._bar = None if quiet else _bar(cycles)
        if not quiet:
            print(HEADER)

    def cycle(
        self, cycle: int, version: int, reward: float, loss: float, stats: dict[str, float]
    ) -> None:
        """Shows one cycle; `stats` are those of the controller."""
        if self._json is not None:
            line = {"cycle": cycle, "version": version, "reward": reward, "loss": loss}
            print(json.dumps({**line, "stats": stats}), file=self._json, flush=True)
        if self._bar is not None:
            self._bar.update()
        if not self._quiet and (cycle % EVERY == 0 or cycle in (1, self._cycles)):
            self._print(_line(cycle, version, reward, loss, stats))

    def _print(self, line: str) -> None:
        if self._bar is not None:
            self._bar.write(line)
        else:
            print(line, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        if self._json is not None:
            self._json.close()


def _bar(cycles: int) -> Any:
    """On a terminal, where tqdm is installed."""
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=cycles, unit="cycle", leave=False)


def _line(cycle: int, version: int, reward: float, loss: float, stats: dict[str, float]) -> str:
    def of(name: str, scale: float) -> float:
        return stats.get(name, 0.0) * scale

    return (
        f"{cycle:5}  {version:7}  {reward:6.3f}  {loss:7.4f}"
        f"  {of('refit/offload_bytes', 1e-6):7.2f}  {of('refit/offload_s', 1e3):6.2f}"
        f"  {of('refit/publish_s', 1e3):10.2f}"
        f"  {of('refit/commit_s', 1e3):9.2f}  {of('refit/restore_exposed_s', 1e3):10.2f}"
        f"  {of('refit/workers_committed', 1):7.0f}"
    )
