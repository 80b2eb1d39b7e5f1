"""The storages of each device, as regions of one offloader: they leave, are freed, and come back.

The order is what keeps bytes safe. Out: copied, waited for, unbound, freed. Back: allocated on the
current stream, bound, copied; a storage is emptied only when the C library holds its bytes on the
host. Every step looks at what is there (the offloader's state, a storage's size) and not at what
was intended, so that one that failed, or that Ctrl-C ended, is done by calling it again.

Independent of which storages those are, and of when they leave.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from refit._c import abi
from refit._c.config import Config
from refit._c.device import Device
from refit._c.library import lib
from refit._c.stats import gather
from refit.errors import BusyError, DeviceMemoryError, LimitError, RefitError, StateError
from refit.states.offloaded_tensor import untouched
from refit.states.offloader import Future, Offloader, ReadLock
from refit.states.storage_swap import TensorsByStorage
from refit.states.storages import OffloadPlan, RegionSpecs, StateInventory, can_fill, is_emptied
from refit.states.torch_memory import (
    Devices,
    current_stream,
    device_guard,
    empty_storage,
    give_heap_back,
    make_wait,
    resident_bytes,
    stream_objects,
    used_on,
)

_UNSETTLED = (abi.REFIT_OFFLOADING, abi.REFIT_RESTORING, abi.REFIT_FAILED)
_AWAY = (abi.REFIT_OFFLOADED, abi.REFIT_FAILED)

_PLANS = 3
"""The most plans of one departure: the C library lets masters travel whole after the second."""

Weights = list[torch.Tensor | None]
"""Of each region the weights whose masters it holds, or None."""


class DeviceRegions:
    """The storages of one device, whose ``handle`` others may share. Used by one thread at a
    time."""

    def __init__(
        self, device: torch.device, config: Config, handle: Device, reuse: bool = False
    ) -> None:
        """``reuse``: what has not changed leaves without a copy."""
        self.device = device
        self._handle = handle
        self._reuse = reuse
        self.offloader = Offloader(self._handle, config)
        self.specs = RegionSpecs()
        self.nbytes = 0
        self.reclaimed = 0
        self._bound: list[int] = []
        self._policies: dict[int, int] = {}
        self._storages: list[torch.UntypedStorage] = []
        self._tensors: Sequence[Any] = ()
        self._weights: Weights = []
        self._weights_at: list[int] = []
        self._fresh: dict[int, torch.UntypedStorage] = {}
        self._future: Future | None = None
        self._departure_streams: dict[int, Any] = {}
        """The stream of a GPU after which the storages left, and which may use them again."""
        self._taken_on: dict[int, Any] = {}
        """The streams of a GPU on which the storages were taken: a restore that found no memory may
        have gone on on another one."""
        self._users: set[int] = set()
        """Streams of which PyTorch's allocator knows that they use the storages."""

    @property
    def closed(self) -> bool:
        """Whether nothing can leave any more; then all bytes are on the device, and ``close`` may
        have to go on."""
        return self.offloader.closed

    @property
    def on_device(self) -> bool:
        """Whether all bytes are on the device and no copy uses them. Does not block."""
        return self.closed or self.offloader.state in (abi.REFIT_OPEN, abi.REFIT_RESIDENT)

    @property
    def back(self) -> bool:
        """Whether all bytes are on the device or surely on their way. Does not block."""
        return self.on_device or self.offloader.state == abi.REFIT_RESTORING

    @property
    def is_away(self) -> bool:
        """Whether all bytes are on the host, and the storages are empty. Does not block."""
        away = self.offloader.state == abi.REFIT_OFFLOADED
        return away and not any(storage.nbytes() for storage in self._storages)

    def addresses(self) -> list[int]:
        """Where the storages begin."""
        return [storage.data_ptr() for storage in self._storages]

    # ---- the plan -------------------------------------------------------------------------------

    def hold(
        self, storages: list[torch.UntypedStorage], tensors: Sequence[Any], weights: Weights
    ) -> None:
        """Keeps references to the plan's storages, after ``fits`` said they are unchanged, and to
        their tensors and weights."""
        self._storages, self._tensors, self._fresh = storages, tensors, {}
        self._weights = weights

    def fits(self, storages: Sequence[torch.UntypedStorage], weights: Weights) -> bool:
        """Whether the storages of the plan are where the C library was told, and as long.

        They are not if other code has resized them, made them fixed (one ``.numpy()`` does), or
        given their tensors other ones.
        """
        count = len(storages)
        return (
            [storage.nbytes() for storage in storages] == self.specs.nbytes[:count]
            and [storage.data_ptr() for storage in storages] == self._bound[:count]
            and all(storage.resizable() for storage in storages)
            and [weight is not None for weight in weights] == list(map(bool, self._weights_at))
        )

    def set_plan(
        self,
        specs: RegionSpecs,
        storages: list[torch.UntypedStorage],
        policies: dict[int, int],
        tensors: Sequence[Any],
        weights: Weights,
    ) -> None:
        """Makes these storages, in which ``tensors`` lie, the regions; only while all are on the
        device.

        Nothing happens if they are what they were; the host memory is kept in any case. Blocks for
        the first page-lock. BudgetError and others: nothing has moved, call again.
        """
        at = [0 if weight is None else weight.data_ptr() for weight in weights]
        same = (specs.names, specs.nbytes, specs.groups, specs.addresses, policies, at) == (
            *(self.specs.names, self.specs.nbytes, self.specs.groups),
            *(self._bound, self._policies, self._weights_at),
        )
        if not same or self.offloader.state == abi.REFIT_OPEN:
            self._replan(specs, policies, at)
        self.specs, self._policies = specs, policies
        self.hold(storages, tensors, weights)
        self.nbytes = sum(specs.nbytes)

    def _replan(self, specs: RegionSpecs, policies: dict[int, int], weights_at: list[int]) -> None:
        self._bound = []
        if self.offloader.state != abi.REFIT_OPEN:
            self.offloader.unseal()
        self.offloader.clear()
        kept = [policies.get(group, abi.REFIT_KEEP) for group in specs.groups]
        self.offloader.add_each(
            *(specs.names, specs.addresses, specs.nbytes, kept, specs.groups, specs.groups),
            weights=weights_at,
            reuse=self._reuse,
        )
        self.offloader.seal()
        self._bound, self._weights_at = list(specs.addresses), weights_at

    @property
    def has_pieces(self) -> bool:
        """Whether pieces of an arena are among what leaves."""
        return len(self.specs) > len(self.specs.tensors)

    # ---- offload --------------------------------------------------------------------------------

    def leave(self) -> None:
        """Starts the copies out, after the current stream. Nothing if they have left. StateError
        if the storages were let go of: nothing leaves."""
        if self.on_device:
            self._refuse_unheld()
            self._tell_weights()
        if self.offloader.state == abi.REFIT_RESTORING:
            self.offloader.wait()
        self._departure_streams = stream_objects(self.device)
        self.offloader.offload(current_stream(self.device))

    @property
    def held(self) -> bool:
        """Whether the storages of the plan are held."""
        return len(self._storages) == len(self.specs.tensors)

    def _refuse_unheld(self) -> None:
        """Refuses storages that are not held: their memory could not be freed and taken again."""
        if not self.held:
            raise StateError(
                f"{len(self.specs.tensors)} storages leave {self.device}, and "
                f"{len(self._storages)} are held: call restore(), then offload()"
            )

    def free(self) -> None:
        """Waits until all bytes are on the host, then gives the device memory back.

        DeadlineError and others: call again; what is not on the host is not freed.
        StateError if the storages were let go of.
        """
        self._finish_leaving()
        if self.offloader.state != abi.REFIT_OFFLOADED:
            return
        self._refuse_unheld()
        self.offloader.unbind_each(self._movable())
        self.reclaimed = self._pieces_given() + self._free_storages()

    def _finish_leaving(self) -> None:
        """Waits until all have left. Masters for which there was too little room have not, and
        leave by another plan, which the next offload makes; whole, if that is too little again."""
        for _ in range(_PLANS):
            try:
                self.offloader.wait()
            except LimitError:
                self.offloader.offload(current_stream(self.device), anew=True)
            else:
                return
        self.offloader.wait()

    def _tell_weights(self) -> None:
        """Tells the C library of weights that have moved. StateError for those that are away."""
        for number, weight in enumerate(self._weights):
            if weight is None:
                continue
            if is_emptied(weight) or weight.device != self.device:
                raise StateError(
                    f"the weights of {self.specs.names[number]} have left {self.device}, and its "
                    "bytes cannot be made without them: bring the weights back first, or set "
                    "offload.masters to whole"
                )
            if (at := weight.data_ptr()) != self._weights_at[number]:
                self.offloader.bind_weights(number, at)
                self._weights_at[number] = at

    def _movable(self) -> range:
        """The regions that are storages; pieces of an arena leave and return by themselves."""
        return range(len(self._storages))

    def _pieces_given(self) -> int:
        """Bytes of pieces of an arena: the C library counts the regions that were unbound, too."""
        counted = int(self.offloader.stats().offload_reclaimed_bytes_last)
        return max(0, counted - sum(self.specs.nbytes[: len(self._storages)]))

    def _free_storages(self) -> int:
        """Empties the storages, and gives their memory to the system; how many bytes it got.

        That is measured, for an allocator keeps what it cannot give: see ``reclaimed_bytes`` in
        docs/statistics.md.
        """
        # one that is empty may have become fixed since
        held = [storage for storage in self._storages if storage.nbytes()]
        if not held:
            return 0
        # The CPU has waited for the copies out, which follow what the stream of the departure had
        # queued: no work of it uses this memory, to whichever stream it goes back.
        with device_guard(self.device):
            before = self._taken()
            self._taken_on.clear()
            for storage in held:
                storage.resize_(0)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            return max(0, before - self._taken())

    def _taken(self) -> int:
        """Bytes that the allocator of this device has from the system. On a CPU the heap gives back
        first what is free in it, so that it is not taken for memory of the states."""
        if self.device.type == "cuda":
            return int(torch.cuda.memory_reserved(self.device))
        give_heap_back()
        return resident_bytes()

    # ---- restore --------------------------------------------------------------------------------

    def come_back(self) -> None:
        """Allocates the storages on the current stream and starts the copies back.

        Nothing if they are back or on their way. DeviceMemoryError: what was taken stays taken,
        nothing is lost, call again. A departure that has not ended is waited for first.
        """
        self._end_departure()
        if self.offloader.state not in _AWAY:
            return
        self._tell_weights()
        self._take()
        self._close_future()
        self._future = self.offloader.restore(current_stream(self.device))

    def _end_departure(self) -> None:
        if self.offloader.state != abi.REFIT_OFFLOADING:
            return
        try:
            self.offloader.wait()
        except RefitError:
            if self.offloader.state != abi.REFIT_FAILED:  # then all bytes are on the device
                raise

    def _take(self) -> None:
        by_storage = TensorsByStorage(self._tensors)
        here = stream_objects(self.device)
        with device_guard(self.device):
            for number, storage in enumerate(self._storages):
                if storage.nbytes() != self.specs.nbytes[number]:
                    self._taken_on.update(here)
                    self._allocate(number, by_storage)
        make_wait(here, self._taken_on)  # whose work may have used this memory last
        self._users = set() if self._taken_on.keys() - here.keys() else set(here)
        self._used_on({**self._departure_streams, **here})
        addresses = self.addresses()
        self.offloader.bind_each(self._movable(), addresses)
        self._bound[: len(addresses)] = addresses

    def _used_on(self, streams: Mapping[int, Any]) -> None:
        """These streams use the storages, which belong to the stream of the restore from now on:
        one that restores ahead, say. Other code frees them without knowing of it."""
        fresh = {handle: one for handle, one in streams.items() if handle not in self._users}
        used_on(self._storages, fresh.values())
        self._users |= fresh.keys()

    def make_departure_stream_wait(self, groups: Iterable[int]) -> None:
        """Makes the stream after which these groups left wait for what the current one has queued,
        the join of the copies back too: it uses the groups without another join."""
        if not set(groups).isdisjoint(self.specs.groups):
            make_wait(self._departure_streams, stream_objects(self.device))

    def _allocate(self, number: int, by_storage: TensorsByStorage) -> None:
        nbytes, storage = self.specs.nbytes[number], self._storages[number]
        try:
            if can_fill(storage):
                storage.resize_(nbytes)
            else:
                self._replace(number, storage, by_storage)
        except RefitError:  # a signal handler came in between, and raised it
            raise
        except (RuntimeError, MemoryError) as why:  # torch.OutOfMemoryError is the first
            raise DeviceMemoryError(
                f"no memory on {self.device} for the {nbytes} bytes of {self.specs.names[number]}; "
                "its bytes are safe on the host. Free some (let the inference engine sleep), then "
                f"call restore() again: {why}"
            ) from why

    def _replace(
        self, number: int, fixed: torch.UntypedStorage, by_storage: TensorsByStorage
    ) -> None:
        """A storage that became fixed or shared while it was empty is left to the code that did
        that."""
        if number not in self._fresh:  # else Ctrl-C came when some tensors had moved
            self._fresh[number] = empty_storage(self.specs.nbytes[number], self.device)
        with untouched():
            by_storage.move(fixed, self._fresh[number])
        self._storages[number] = self._fresh[number]

    def join(self, group: int | None = None) -> None:
        """Makes the current stream wait for the copies back, all or one group; a CPU waits itself.

        CorruptError, if what the copies brought was refused: call ``come_back`` again.
        """
        if self._future is not None:
            self._used_on(stream_objects(self.device))
        # A join of masters blocks in C; wait in slices instead, so that Ctrl-C works.
        has_masters = any(self._weights_at)
        if self.device.type != "cuda" or self._future is None or has_masters:
            self._wait(group)  # no future: Ctrl-C came before it was
        elif group is None:
            self._future.join(current_stream(self.device))
        else:
            self._future.join_group(group, current_stream(self.device))

    def _wait(self, group: int | None) -> None:
        if group is None or self._future is None:
            self.wait()
        elif group in self.specs.groups:
            self._future.wait_group(group)

    def wait(self) -> None:
        """Waits, on the CPU, until no copy is under way. DeadlineError; CorruptError, if what they
        brought was refused."""
        if not self.on_device and self.offloader.state in _UNSETTLED:
            self.offloader.wait()
        if self.on_device:
            self.forget()

    def forget(self) -> None:
        """Lets go of the storages if they are on the device: states that are replaced can then be
        freed."""
        if self.on_device:
            self._close_future()
            self.hold([], (), [])

    def _close_future(self) -> None:
        if self._future is not None:
            self._future.close()
            self._future = None

    def region_by_storage(self) -> dict[int, int]:
        """The regions by the identity of their storage, which also an empty one has."""
        return {storage._cdata: number for number, storage in enumerate(self._storages)}

    # ---- readers and the end --------------------------------------------------------------------

    def read_lock(self) -> ReadLock:
        """Holds the host image for a reader. StateError unless it is whole."""
        if self.offloader.state == abi.REFIT_OFFLOADED:
            self._tell_weights()
        return self.offloader.read_lock()

    def close(self) -> None:
        """Closes the offloader, and its device unless others use it; bytes that are away are lost,
        so restore before."""
        self._close_future()
        self.offloader.close()
        with suppress(BusyError):
            self._handle.close()


class RegionsPerDevice:
    """The regions of all devices that hold states, made when a device is first needed.

    Iterates over those that are open. Used by one thread at a time.
    """

    def __init__(self, config: Config, devices: Devices, reuse: bool = False) -> None:
        self._config = config
        self._devices = devices
        self._reuse = reuse
        self._by_device: dict[torch.device, DeviceRegions] = {}

    def __iter__(self) -> Iterator[DeviceRegions]:
        """A close that Ctrl-C cut short leaves regions that are not open; their bytes are on the
        device."""
        return iter([regions for regions in self._by_device.values() if not regions.closed])

    @property
    def nbytes(self) -> int:
        """Bytes of all storages that leave."""
        return sum(regions.nbytes for regions in self)

    @property
    def on_device(self) -> bool:
        """Whether all bytes are on their devices and no copy uses them. Does not block."""
        return all(regions.on_device for regions in self)

    @property
    def held(self) -> bool:
        """Whether all storages of the plan are held."""
        return all(regions.held for regions in self)

    @property
    def has_masters(self) -> bool:
        """Whether masters travel by their weights, which are read as they return."""
        return any(any(regions._weights_at) for regions in self)

    @property
    def on_host(self) -> bool:
        """Whether all bytes are on the host, and nothing is left to be done for it."""
        return all(regions.is_away for regions in self)

    @property
    def back(self) -> bool:
        """Whether all bytes are on their devices or surely on their way. Does not block."""
        return all(regions.back for regions in self)

    def set_plan(
        self, plan: OffloadPlan, inventory: StateInventory, policies: dict[int, int]
    ) -> None:
        """Makes what the plan names the regions; only while all are on their devices. See
        ``DeviceRegions.set_plan``."""
        for device in {**self._by_device, **plan.specs}:
            self._open(device)
            specs = plan.specs.get(device, RegionSpecs())
            storages = _storages(specs, inventory)
            weights = _weights(specs, inventory)
            self._by_device[device].set_plan(specs, storages, policies, inventory.tensors, weights)

    def _open(self, device: torch.device) -> None:
        known = self._by_device.get(device)
        if known is not None and known.closed:
            known.close()  # what Ctrl-C has left of it
        if known is None or known.closed:
            self._by_device[device] = DeviceRegions(
                device, self._config, self._devices[device], self._reuse
            )

    def hold(self, plan: OffloadPlan, inventory: StateInventory) -> bool:
        """Holds the storages of the plan whose regions are on their devices: they are held only
        while they are to leave. False, and nothing is held, if one is not what was planned."""
        if any(regions.closed for regions in self._by_device.values()):
            return False
        specs_of = {
            regions: plan.specs.get(device, RegionSpecs())
            for device, regions in self._by_device.items()
            if regions.on_device
        }
        held = {
            regions: (_storages(specs, inventory), _weights(specs, inventory))
            for regions, specs in specs_of.items()
        }
        if not all(regions.fits(*found) for regions, found in held.items()):
            return False
        for regions, (storages, weights) in held.items():
            regions.hold(storages, inventory.tensors, weights)
        return True

    def wait(self) -> None:
        """Waits, on the CPU, until no copy is under way. CopyError, DeadlineError."""
        for regions in self:
            regions.wait()

    def trim(self) -> None:
        """Gives the host memory back. StateError while anything is away."""
        for regions in self:
            regions.wait()
            regions.offloader.trim()

    def stats(self, *others: tuple[Callable[..., int], int]) -> abi.refit_stats:
        """The figures of all devices, and of ``others``, in one struct (see ``stats.gather``)."""
        return gather(
            *((lib.refit_offloader_stats, regions.offloader._live) for regions in self), *others
        )

    def close(self) -> None:
        """Closes all, whose bytes are on their devices. After a failure the rest is still there,
        and after Ctrl-C what it was in the middle of: call again."""
        for device, regions in list(self._by_device.items()):
            regions.wait()
            regions.close()
            del self._by_device[device]


def _storages(specs: RegionSpecs, inventory: StateInventory) -> list[torch.UntypedStorage]:
    return [inventory.tensors[number].untyped_storage() for number in specs.tensors]


def _weights(specs: RegionSpecs, inventory: StateInventory) -> Weights:
    """Pieces of an arena, which stand after the storages, hold more than one tensor."""
    if not inventory.weights:
        return [None] * len(specs)
    masters = zip(
        (inventory.tensors[number] for number in specs.tensors), specs.nbytes, strict=False
    )
    found = [_weights_of(master, nbytes, inventory) for master, nbytes in masters]
    return found + [None] * (len(specs) - len(found))


def _weights_of(master: Any, nbytes: int, inventory: StateInventory) -> torch.Tensor | None:
    """The bf16 weights of a master that fills its storage, element by element."""
    weight = inventory.weights.get(id(master))
    if weight is None or (master.dtype, weight.dtype) != (torch.float32, torch.bfloat16):
        return None
    fills = master.is_contiguous() and master.numel() * master.element_size() == nbytes
    alike = weight.is_contiguous() and weight.numel() == master.numel()
    placed = weight.device == master.device and not is_emptied(weight)
    return weight if fills and alike and placed else None
