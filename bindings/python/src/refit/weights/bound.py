"""The engine's own tensors, that versions are written into where they lie.

What was bound is a module or a mapping; C has the addresses of its tensors. Addresses change when
a module is moved or its parameters are replaced, so they are looked at again before each version:
bytes for a model that has gone elsewhere would be lost without a word. The tensors are kept alive
meanwhile. Independent of versions and subscribers.
"""

import ctypes
import sys
from collections.abc import Collection, Mapping
from typing import Any

from refit._c import abi
from refit._c.device import Device
from refit.errors import InvalidError, RefitError, StateError
from refit.weights.load import Fit
from refit.weights.source import Weight, storage_of, weight_named
from refit.weights.target import Target, target_of


class Bound:
    """The tensors of ``target``, as they were when this was made. ``close`` when C has let go."""

    def __init__(self, target: Any, cast: bool) -> None:
        self.target = target
        self.cast = cast
        self.fit: Fit | None = None
        """Of the last version that fitted."""
        self._weights = _weights_of(_as_named(target_of(target)))
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
        array = (abi.refit_destination * len(self._weights))()
        for entry, (name, weight) in zip(array, self._weights.items(), strict=True):
            entry.size = ctypes.sizeof(abi.refit_destination)
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

    def as_bound(self, names: Collection[str]) -> Target:
        """What is written for a version with these names. StateError if a tensor that it concerns
        lies elsewhere by now, has another type or shape, or is new; InvalidError if the version has
        the names of parameters, where those of the checkpoint are bound."""
        whole = target_of(self.target)
        target = _as_named(whole)
        if whole.named_as(names) is not target:
            raise InvalidError(
                "the version has the names of the model's parameters, and those of its checkpoint "
                "are bound: send named_weights(model), or bind dict(model.named_parameters())"
            )
        now = _weights_of(target)
        for name, weight in self._weights.items():
            if name in target.optional and name not in names:
                continue
            if name not in now or now[name][:6] != weight[:6]:
                raise StateError(
                    f"{name} is not where it was bound: unbind and bind again after the model was "
                    "moved, or its tensors replaced"
                )
        new = sorted(
            name
            for name in now.keys() - self._weights.keys()
            if name in names or name not in target.optional
        )
        if new:
            raise StateError(
                f"{new[0]} was not a tensor yet when the model was bound: unbind and bind again"
            )
        return target

    def wait(self) -> None:
        """Waits for what PyTorch has queued on the GPUs that the tensors are on."""
        torch = sys.modules.get("torch")
        for number in self._devices:
            if torch is not None:
                torch.cuda.synchronize(number)

    def close(self) -> None:
        """Closes the devices. C must not use them any more."""
        while self._devices:
            self._devices.popitem()[1].close()


def _as_named(target: Target) -> Target:
    """Under the names that ``named_weights`` gives."""
    return target.checkpoint or target


def _weights_of(target: Target) -> Mapping[str, Weight]:
    """Entries that are not tensors are left out: a strict apply names them. So are tensors that a
    version need not bring, if they cannot be written, or lie in the memory of others. StateError:
    one of the others has no memory."""
    found: dict[str, Weight] = {}
    for name, place in target.places.items():
        try:
            weight = weight_named(name, place)
        except StateError:
            if name not in target.optional:
                raise
        except RefitError:
            continue
        else:
            found[name] = weight
    return _apart(found, target.optional) if target.optional else found


def _apart(weights: Mapping[str, Weight], optional: Collection[str]) -> Mapping[str, Weight]:
    """Without optional ones that C would refuse: of another order, or in the memory of others."""
    required = [one.tensor for name, one in weights.items() if name not in optional]
    taken = {storage_of(one) for one in required if hasattr(one, "untyped_storage")}
    found: dict[str, Weight] = {}
    for name, one in weights.items():
        if name in optional:
            if one.layout is not None or storage_of(one.tensor) in taken:
                continue
            taken.add(storage_of(one.tensor))
        found[name] = one
    return found
