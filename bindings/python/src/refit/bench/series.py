"""Seconds of several rounds, the first of which is cold and told apart."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Series:
    """What one way took, round by round; ``cold`` is the round before those."""

    cold: float = 0.0
    seconds: list[float] = field(default_factory=list)

    def add(self, seconds: float) -> None:
        """One more round; the very first is the cold one."""
        if self.cold == 0.0:
            self.cold = seconds
        else:
            self.seconds.append(seconds)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds) if self.seconds else self.cold

    @property
    def p95(self) -> float:
        return p95(self.seconds or [self.cold])

    def gbps(self, nbytes: int) -> float:
        """GB/s (10^9) of ``nbytes`` moved in the median time."""
        return nbytes / self.median / 1e9


def p95(values: Sequence[float]) -> float:
    """The value that 95 of 100 do not exceed; the largest of less than 20."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * 95 // 100)]


def ratio(slow: Series, fast: Series) -> float:
    """The median of how many times as long ``slow`` took: rounds that ran next to each other are
    compared with each other."""
    pairs = list(zip(slow.seconds, fast.seconds, strict=False))
    pairs = pairs or [(slow.cold, fast.cold)]
    return statistics.median(a / b for a, b in pairs)


def both(out: Series, back: Series) -> Series:
    """The sum of two ways, round by round."""
    return Series(
        out.cold + back.cold, [a + b for a, b in zip(out.seconds, back.seconds, strict=True)]
    )
