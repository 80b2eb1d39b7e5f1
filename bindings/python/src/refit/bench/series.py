"""The seconds of one way, round by round, and the figures made from them.

``bench/bench_series.c`` has the same definitions for ``refit bench``; ``tests/bench/series.json``
holds samples and figures that both must give.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Series:
    """``cold`` is the first round, which takes memory and is not counted."""

    cold: float = 0.0
    seconds: list[float] = field(default_factory=list)

    def add(self, seconds: float) -> None:
        """One more round. The first one is the cold one."""
        if self.cold == 0.0:
            self.cold = seconds
        else:
            self.seconds.append(seconds)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds or [self.cold])

    @property
    def p95(self) -> float:
        return p95(self.seconds or [self.cold])

    def gbps(self, nbytes: int) -> float:
        """GB/s (10^9) of ``nbytes`` moved in the median time."""
        return nbytes / self.median / 1e9

    def figures(self, prefix: str = "") -> dict[str, float]:
        """The median and the p95 under their names in a result."""
        return {f"{prefix}seconds_median": self.median, f"{prefix}seconds_p95": self.p95}

    def cold_figure(self, prefix: str = "") -> dict[str, float]:
        """The cold round under its name in a result."""
        return {f"cold_{prefix}seconds": self.cold}


def p95(values: Sequence[float]) -> float:
    """The smallest value that at least 95 of 100 do not exceed: the largest of fewer than 20."""
    return sorted(values)[(len(values) * 95 + 99) // 100 - 1]


def ratio(slow: Series, fast: Series) -> float:
    """The median of how many times as long ``slow`` took.

    Rounds that ran next to each other are compared with each other.
    """
    pairs = list(zip(slow.seconds, fast.seconds, strict=False))
    return statistics.median(a / b for a, b in pairs or [(slow.cold, fast.cold)])


def both(out: Series, back: Series) -> Series:
    """The sum of two ways, round by round."""
    return Series(
        out.cold + back.cold, [a + b for a, b in zip(out.seconds, back.seconds, strict=True)]
    )
