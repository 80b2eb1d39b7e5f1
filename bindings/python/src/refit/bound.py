"""The engine's own tensors, that versions are written into where they lie.

What was bound is a module or a mapping; C has the addresses of its tensors. Addresses change when
a module is moved or its parameters are replaced, so they are looked at again before each version:
bytes for a model that has gone elsewhere would be lost without a word. The tensors are kept alive
meanwhile. Versions and subscribers are unknown here.
"""

import ctypes
import sys
from collections.abc import Mapping
from typing import Any

from refit import _abi
from refit.device import Device
from refit.errors import InvalidError, RefitError, StateError
from refit.source import Weight, weight_named
from refit.target import Target, target_of


class Bound:
    """The tensors of ``target``, as they were when this was made. ``close`` when C has let go."""

    def __init__(self, target: Any, cast: bool) -> None:
        self.target = target
        self.cast = cast
        self._weights = _weights_of(target)
        self._devices: dict[int, Device] = {}
        if not self._weights:
            raise InvalidError("there is no tensor to bind")
        for name, weight in self._weights.items():
            if weight.layout is not None:
                raise InvalidError(
                    f"{name} has its elements in another order than its rows: make it contiguous, "
                    "or use update.load_into"
                )

    def as_c(self) -> Any:
        """The array of refit_destination. Opens the devices. What a device answers."""
        array = (_abi.refit_destination * len(self._weights))()
        for entry, (name, weight) in zip(array, self._weights.items(), strict=True):
            entry.size = ctypes.sizeof(_abi.refit_destination)
            entry.name = name.encode()
            entry.memory = weight.pointer or None
            entry.bytes = weight.nbytes
            entry.dtype = weight.dtype.number
            entry.cast = int(self.cast)
            if weight.device >= 0:
                entry.device = self._device(weight.device).pointer
        return array

    def _device(self, number: int) -> Device:
        if number not in self._devices:
            self._devices[number] = Device(f"cuda:{number}")
        return self._devices[number]

    def check_in_place(self) -> None:
        """StateError if a tensor lies elsewhere by now, has another type or shape, or is new."""
        now = _weights_of(self.target)
        for name, weight in self._weights.items():
            if name not in now or now[name][:6] != weight[:6]:
                raise StateError(
                    f"{name} is not where it was bound: unbind and bind again after the model was "
                    "moved, or its tensors replaced"
                )
        if new := sorted(now.keys() - self._weights.keys()):
            raise StateError(
                f"{new[0]} was no tensor yet when the model was bound: unbind and bind again"
            )

    def settle(self) -> None:
        """Waits for what PyTorch has queued on the GPUs that the tensors are on."""
        torch = sys.modules.get("torch")
        for number in self._devices:
            if torch is not None:
                torch.cuda.synchronize(number)

    def close(self) -> None:
        """Closes the devices. C must not use them any more."""
        while self._devices:
            self._devices.popitem()[1].close()


def bound_names(target: Any) -> Target:
    """What is written, under the names that ``named_weights`` gives."""
    found = target_of(target)
    return found.checkpoint or found


def _weights_of(target: Any) -> Mapping[str, Weight]:
    """Entries that are no tensors are left out: a strict apply names them. StateError: one has no
    memory."""
    found: dict[str, Weight] = {}
    for name, place in bound_names(target).places.items():
        try:
            found[name] = weight_named(name, place)
        except StateError:
            raise
        except RefitError:
            continue
    return found
