"""The regions of all devices that some state is on: a lane each, made when it is first needed.

Which storages leave is decided before; when they do is the cycle's business.
"""

from collections.abc import Callable, Iterator

import torch

from refit import _abi
from refit._library import lib
from refit.config import Config
from refit.device import Device
from refit.regions import Regions
from refit.stats import gather
from refit.storages import Scan, Slots, Stock


class Lanes:
    """All lanes, to go through. Used by one thread at a time."""

    def __init__(self, config: Config, arenas_of: Callable[[torch.device], Device | None]) -> None:
        """``arenas_of`` gives the handle that knows a device's arenas, if there is one."""
        self._config = config
        self._arenas_of = arenas_of
        self._by_device: dict[torch.device, Regions] = {}

    def __iter__(self) -> Iterator[Regions]:
        """Those that are open: a close that Ctrl-C cut short leaves others behind, all home."""
        return iter([lane for lane in self._by_device.values() if not lane.closed])

    @property
    def nbytes(self) -> int:
        """Bytes of all storages that leave."""
        return sum(lane.nbytes for lane in self)

    @property
    def home(self) -> bool:
        """Whether all bytes are on their devices and no copy uses them. Does not block."""
        return all(lane.home for lane in self)

    @property
    def held(self) -> bool:
        """Whether all storages of the plan are held."""
        return all(lane.held for lane in self)

    @property
    def back(self) -> bool:
        """Whether all bytes are on their devices or surely on their way. Does not block."""
        return all(lane.back for lane in self)

    def plan(self, decided: Scan, stock: Stock, policies: dict[int, int]) -> None:
        """Makes what was decided the regions; only while all are home. See ``Regions.plan``."""
        for device in {**self._by_device, **decided.slots}:
            self._open(device)
            slots = decided.slots.get(device, Slots())
            storages = _storages(slots, stock)
            self._by_device[device].plan(slots, storages, policies, stock.tensors)

    def _open(self, device: torch.device) -> None:
        known = self._by_device.get(device)
        if known is not None and known.closed:
            known.close()  # what Ctrl-C has left of it
        if known is None or known.closed:
            self._by_device[device] = Regions(device, self._config, self._arenas_of(device))

    def hold(self, decided: Scan, stock: Stock) -> bool:
        """Holds the storages of the plan in lanes that are home: they are held only while they are
        to leave. False, and nothing is held, if one is not what was planned."""
        if any(lane.closed for lane in self._by_device.values()):
            return False
        held = {
            lane: _storages(decided.slots.get(device, Slots()), stock)
            for device, lane in self._by_device.items()
            if lane.home
        }
        if not all(lane.fits(storages) for lane, storages in held.items()):
            return False
        for lane, storages in held.items():
            lane.hold(storages, stock.tensors)
        return True

    def settle(self) -> None:
        """Waits, on the CPU, until no copy is under way. CopyError, DeadlineError."""
        for lane in self:
            lane.settle()

    def trim(self) -> None:
        """Gives the host memory back. StateError while anything is away."""
        for lane in self:
            lane.settle()
            lane.offloader.trim()

    def stats(self, *others: tuple[Callable[..., int], int]) -> _abi.refit_stats:
        """The figures of all devices, and of ``others``, in one struct (see ``stats.gather``)."""
        return gather(
            *((lib.refit_offloader_stats, lane.offloader._live) for lane in self), *others
        )

    def close(self) -> None:
        """Closes all, which are home. After a failure the rest is still there, and after Ctrl-C
        what it was in the middle of: call again."""
        for device, lane in list(self._by_device.items()):
            lane.settle()
            lane.close()
            del self._by_device[device]


def _storages(slots: Slots, stock: Stock) -> list[torch.UntypedStorage]:
    return [stock.tensors[number].untyped_storage() for number in slots.tensors]
