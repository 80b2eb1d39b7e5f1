"""Whether a bench fits into the memory of this machine, said before it starts.

A part says what it takes for each parameter of its model; where that is not there, a smaller model
is measured, and where even the smallest is too large the part is refused. Independent of what is
done with the memory.
"""

from dataclasses import dataclass

from refit.errors import HostMemoryError

SMALLEST = 1e6
"""Parameters of a model that is worth measuring; a smaller one only where it was asked for."""


@dataclass(frozen=True)
class MemoryNeed:
    """The memory of a part of the bench: bytes for each parameter, and other bytes."""

    part: str
    bytes_per_parameter: float
    besides: float = 0.0

    def takes(self, parameters: float) -> float:
        """Bytes for so many parameters."""
        return parameters * self.bytes_per_parameter + self.besides

    def fitting(self, parameters: float, available: float) -> float:
        """As many of the parameters as fit. HostMemoryError if too few would."""
        fits = min(parameters, (available - self.besides) / self.bytes_per_parameter)
        least = min(parameters, SMALLEST)
        if fits < least:
            raise HostMemoryError(
                f"{self.part} asks for {_gb(self.takes(least))} of free memory with its smallest "
                f"model, and there are {_gb(max(0, available))}: end something, or take a larger "
                "machine"
            )
        return fits

    def told(self, parameters: float, available: float) -> str:
        """One line on what will be measured, and what it takes. HostMemoryError as ``fitting``."""
        fits = self.fitting(parameters, available)
        if fits < parameters:
            return (
                f"{self.part}: {_millions(parameters)} parameters ask for "
                f"{_gb(self.takes(parameters))} of free memory, and there are {_gb(available)}: "
                f"{_millions(fits)} are measured"
            )
        asked = _gb(self.takes(fits))
        return f"{self.part}: {_millions(fits)} parameters, which ask for {asked} of free memory"


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB"


def _millions(parameters: float) -> str:
    return f"{parameters / 1e6:.3g} M"
