"""How much of each group of activations leaves, so that no copy delays the compute.

The first two forward passes measure each group: its bytes, how long its forward pass took, and how
long its copy. The shorter of two times counts, since a first pass also compiles and allocates. From
then on copies are followed through one queue: those of a group begin when its forward pass ends and
the copies before it have left, and have to end within the ``in_flight`` groups after it, for then
its memory is given back. A group leaves by the share of its bytes for which there is time. Shares,
not bytes: batches of other lengths compute as much longer as they copy.

Independent of what a group is made of, and of how it leaves.
"""

from dataclasses import dataclass

MEASURED = 2
"""Forward passes that measure."""
_LEAST = 1 / 32
"""A smaller share of a group does not leave: it frees little, and costs as many calls."""


@dataclass(slots=True)
class _Measure:
    nbytes: int
    forward_s: float
    copy_s: float


class Plan:
    """The shares of the groups of a model's forward pass, by their order in it."""

    def __init__(self, in_flight: int, for_memory: bool) -> None:
        self._in_flight = in_flight
        self._for_memory = for_memory
        self._passes = 0
        self._groups: dict[int, _Measure] = {}
        self._shares: dict[int, float] = {}

    @property
    def measures(self) -> bool:
        """Whether the next forward pass measures: copies end before the next group begins."""
        return not self._for_memory and self._passes < MEASURED

    def note(self, order: int, nbytes: int, forward_s: float, copy_s: float) -> None:
        """What a group took in a forward pass that measures."""
        before = self._groups.get(order)
        if before is not None and before.nbytes == nbytes:
            forward_s = min(forward_s, before.forward_s)
            copy_s = min(copy_s, before.copy_s)
        self._groups[order] = _Measure(nbytes, forward_s, copy_s)

    def end(self) -> None:
        """A forward pass that measures has ended; after the last one the shares are known."""
        self._passes += 1
        if not self.measures and not self._for_memory:
            self._shares = self._divided()

    def share(self, order: int) -> float:
        """The share of a group's bytes that leaves. 1 for a group that was not measured."""
        return self._shares.get(order, 1.0)

    @property
    def is_empty(self) -> bool:
        """Whether no group leaves, because each copy would delay the compute."""
        return bool(self._shares) and not any(
            share for order, share in self._shares.items() if self._groups[order].nbytes
        )

    def again(self) -> None:
        """Forgets what was measured."""
        self._passes = 0
        self._groups.clear()
        self._shares.clear()

    def _divided(self) -> dict[int, float]:
        orders = sorted(self._groups)
        ends: list[float] = []
        now = 0.0
        for order in orders:
            now += self._groups[order].forward_s
            ends.append(now)
        shares: dict[int, float] = {}
        free_at = 0.0
        for at, order in enumerate(orders):
            one = self._groups[order]
            begins = max(ends[at], free_at)
            after = at + self._in_flight
            # After the last groups no forward pass waits for memory.
            time = ends[after] - begins if after < len(ends) else one.copy_s
            share = 1.0 if one.copy_s <= max(time, 0.0) else max(time, 0.0) / one.copy_s
            shares[order] = share if share >= _LEAST else 0.0
            free_at = begins + shares[order] * one.copy_s
        return shares
