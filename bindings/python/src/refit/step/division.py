"""Which parameters keep their states on the device, which send them through windows, and which the
CPU steps: a division by the bytes of the states, of whole parameters.

Independent of where the states then lie, and of what steps.
"""

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias

from refit.errors import InvalidError

STAYS = 0
"""On the device, and takes part in the cycle."""
WINDOWS = 1
"""On the host; the states visit the device."""
CPU = 2
"""On the host, where the CPU steps the parameter."""

Params: TypeAlias = Literal["last", "largest"] | Sequence[str]


class Division:
    """Divides parameters.

    ``resident_bytes`` of the first stay, or all but ``host_fraction``. ``stepped_fraction``: the
    share of all states that the CPU steps. ``params``: which these are: "last": the last parameters
    of the model, whose gradients are final first; "largest"; or names, with ``*`` and ``?`` as in a
    shell. ``windows``: the others visit the device; without, they stay.
    """

    def __init__(
        self,
        resident_bytes: int | None = None,
        host_fraction: float | None = None,
        stepped_fraction: float = 0.0,
        params: Params = "last",
        *,
        windows: bool = True,
    ) -> None:
        self._resident_bytes = resident_bytes
        self._host_fraction = host_fraction
        self._stepped_fraction = stepped_fraction
        self._params = params
        self._windows = windows
        self._total = self._on_cpu = 0
        self._unmatched = set() if isinstance(params, str) else set(params)

    @property
    def why_it_stays(self) -> str:
        """What is told of a parameter whose states stay on the device."""
        options = "HostStates(resident_bytes, fraction)" if self._windows else "CpuStep(fraction)"
        return f"its states stay on the device, by {options}"

    def divide(self, names: Sequence[str], order: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Where each parameter belongs, by its name, its place in the order of the forward pass,
        and the bytes of its states. Of parameters that come later as much goes to the CPU as is its
        share of all, and none stays that could be in windows. InvalidError for a name to pick that
        no parameter has; of one without states to move nothing follows."""
        places = [WINDOWS if self._windows else STAYS] * len(sizes)
        for number in range(self._first(sizes)):
            places[number] = STAYS
        self._total += sum(sizes)
        budget = math.floor(self._total * self._stepped_fraction)
        for number in self._picked(names, order, sizes):
            free = self._windows and places[number] == STAYS
            if not free and self._on_cpu + sizes[number] <= budget:
                places[number] = CPU
                self._on_cpu += sizes[number]
        return places

    def _first(self, sizes: Sequence[int]) -> int:
        """How many of the first parameters keep their states on the device. Once: those that are
        planned later have no share."""
        budget = self._resident_bytes or 0
        if self._host_fraction is not None:
            budget = math.floor(sum(sizes) * (1 - self._host_fraction))
        self._resident_bytes, self._host_fraction = 0, None
        for number, nbytes in enumerate(sizes):
            budget -= nbytes
            if budget < 0:
                return number
        return len(sizes)

    def _picked(
        self, names: Sequence[str], order: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """Those that the CPU may step, first those that it is to step first."""
        found = [at for at, nbytes in enumerate(sizes) if nbytes]
        if self._params == "largest":
            return sorted(found, key=lambda at: (-sizes[at], -order[at]))
        if self._params == "last":
            found.sort(key=lambda at: -order[at])
            is_all = self._stepped_fraction >= 1 or len(found) < 2
            return found if is_all else found[:-1]  # not the gradient that is final last
        matched = {one: [at for at in found if fnmatchcase(names[at], one)] for one in self._params}
        # A rank may have no element of a parameter that it names as the others do.
        self._unmatched -= {
            one for one in self._unmatched if any(fnmatchcase(name, one) for name in names)
        }
        if self._unmatched:
            raise InvalidError(
                f"CpuStep: params names {sorted(self._unmatched)[0]!r}, and no parameter that is "
                "trained has that name: say names as model.named_parameters() gives them, with * "
                "and ? if need be"
            )
        return list(dict.fromkeys(at for numbers in matched.values() for at in numbers))
