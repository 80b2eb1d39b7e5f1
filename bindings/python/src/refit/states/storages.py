"""What an optimizer holds, as distinct storages: which of them can leave, and why others cannot.

What leaves is never a tensor but the storage under it: its memory goes with ``resize_(0)`` and
comes back with ``resize_(nbytes)``, so tensors, their views, strides and wrappers stay the objects
they are. So each storage counts once, however many tensors lie in it, and may leave only if all
that is known to lie in it is optimizer state (or gradients, where those are asked for).

``take_inventory`` goes through the state, fast, and alike every time; ``make_plan`` decides,
slowly. Its plan holds as long as the same storages are there. That is known by three things:

- the tensors of the inventory have the identities that they had, in the same order;
- each storage that is to leave (found through one of its tensors) has the address and the length
  that the C library was told, and can still be resized (``DeviceRegions.fits``);
- each of the other tensors begins at the address at which it began.

Identities alone would not do: a new tensor may have that of one that is gone. Where all three are
as they were, the same bytes leave from the same place, and return to it. What else may lie in such
a storage is looked at when the plan is made, and not again: memory of a state that becomes a buffer
of the model later is noticed by the next plan. Independent of where the bytes go.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import methodcaller
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from refit.states.offloaded_tensor import call_untouched, kind_of, untouched

STATES = 0
GRADS = 1
SCRATCH = 2
"""Groups of regions: what is waited for together. The last is memory of a framework's own whose
bytes are not needed: it returns as zeros, with the gradients."""

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_VALUES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)

Place = int
"""The address where memory begins. It identifies the memory: the host and all GPUs share one
address space (CUDA's unified addressing)."""

Path = tuple[Any, ...]
"""The keys under which a tensor is found in the state of its owner."""

_DATA_PTR = methodcaller("data_ptr")


@dataclass(slots=True)
class FrameworkMemory:
    """Stands for the owner of gradients that lie in memory of a framework's own, and of memory
    that is only written while gradients are made (``group``)."""

    name: str
    group: int
    requires_grad: bool = False


@dataclass(slots=True)
class StateInventory:
    """What one walk through the state found: states first, then gradients, then parameters.

    It is kept in columns, since an object for each tensor would cost more than the walk: Python's
    garbage collector goes through all such objects again and again.
    """

    tensors: list[Any]
    """All of them. Among the states is every object that is neither a tensor nor a plain value."""
    owners: list[Any]
    """The parameter that each state belongs to, or None if it is kept besides a state; then that of
    each gradient."""
    paths: list[Path]
    """Of each state where it was found."""
    wrappers: list[Any]
    """The tensors that were opened to find others in them."""
    weights: Mapping[int, Any] = field(default_factory=dict)
    """By the identity of an fp32 master the weights that are its rounding."""

    @property
    def states(self) -> int:
        """The number of tensors that are states."""
        return len(self.paths)

    @property
    def grads(self) -> list[tuple[Any, Any]]:
        """Parameters, and the gradient of each that has one."""
        return list(zip(self.owners, self.tensors, strict=False))[self.states :]

    def identities(self) -> list[int]:
        """Numbers that identify the living tensors, and the kind of each."""
        return [self.states, len(self.owners), *map(id, self.tensors)]

    def addresses(self, numbers: Sequence[int]) -> list[int]:
        """Where the tensors of these numbers are, now."""
        tensors = [self.tensors[number] for number in numbers]
        try:
            return [
                one.data_ptr() if type(one) in _PLAIN else call_untouched(_DATA_PTR, one)
                for one in tensors
            ]
        except (AttributeError, RuntimeError):  # something without memory is among them
            with untouched():
                return list(map(begin_of, tensors))


@dataclass(slots=True)
class RegionSpecs:
    """The memory of one device that can leave: storages, and after them the pieces of an arena,
    which leave whole and return to where they were. Equal indices of the lists are one of them."""

    names: list[str] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    """Where each was when the plan was made."""
    nbytes: list[int] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    tensors: list[int] = field(default_factory=list)
    """Of each storage the number in the inventory of a tensor that lies in it. A piece has none."""

    def __len__(self) -> int:
        return len(self.names)

    def add(self, name: str, address: int, nbytes: int, group: int) -> None:
        """Adds a piece, or a storage whose tensor is added, too."""
        self.names.append(name)
        self.addresses.append(address)
        self.nbytes.append(nbytes)
        self.groups.append(group)


@dataclass(slots=True)
class OffloadPlan:
    """What leaves, and what stays, of an inventory."""

    specs: dict[torch.device, RegionSpecs]
    resident: list[tuple[str, str]]
    """Tensors that do not leave, by name, and why."""
    by_group: dict[int, list[int]]
    """For each group the tensors that lie in what leaves, all that are known, by their number in
    the inventory."""
    others: list[int]
    """The numbers of the tensors that stand for no storage in ``specs``, whether they leave or
    not."""
    others_move: bool = False
    """Whether some of ``others`` leave."""
    fixed: bool = False
    """Whether something stays because of its storage alone: see ``storage_swap``."""
    passing: bool = False
    """Whether something stays only as long as other code holds its memory."""


def take_inventory(
    optimizers: Iterable[torch.optim.Optimizer],
    with_grads: bool,
    beside: Iterable[tuple[str, Any]] = (),
    lives_elsewhere: Callable[[Any, Any, Any], bool] | None = None,
    framework_grads: Iterable[tuple[Any, torch.Tensor]] = (),
) -> StateInventory:
    """Goes through the state of ``optimizers``, the tensors kept beside it and, if asked, the
    gradients. Changes nothing. ``lives_elsewhere`` says of a parameter, a key and a value of its
    state whether that is left out. ``framework_grads``: other gradients, with their owners."""
    walk = _Walk()
    parameters: list[Any] = []
    for optimizer in optimizers:
        for owner, state in optimizer.state.items():
            if lives_elsewhere is not None and isinstance(state, Mapping):
                state = {k: v for k, v in state.items() if not lives_elsewhere(owner, k, v)}
            walk.enter(owner, (), state)
        for group in optimizer.param_groups:
            parameters += group["params"]
    for name, tensor in beside:
        walk.enter(None, (name,), tensor)
    if with_grads:
        grads = [p.grad for p in parameters]
        walk.owners += [p for p, grad in zip(parameters, grads, strict=True) if grad is not None]
        walk.tensors += [grad for grad in grads if grad is not None]
    for owner, grad in framework_grads:
        walk.owners.append(owner)
        walk.tensors.append(grad)
    return StateInventory(walk.tensors + parameters, walk.owners, walk.paths, walk.wrappers)


class _Walk:
    """Finds every tensor, wrappers opened, always in the same order; and every object that is
    neither a tensor nor a plain value."""

    def __init__(self) -> None:
        self.tensors: list[Any] = []
        self.owners: list[Any] = []
        self.paths: list[Path] = []
        self.wrappers: list[Any] = []
        self._known: dict[Path, Path] = {}

    def enter(self, owner: Any, path: Path, value: Any) -> None:
        """Takes in what is found under ``path`` in the state of ``owner``."""
        if type(value) is dict or isinstance(value, Mapping):
            for key, one in value.items():
                if type(one) is torch.Tensor:  # as a rule; the rest is for what is rare
                    self._add(owner, (*path, key), one)
                elif type(one) not in _VALUES:
                    self.enter(owner, (*path, key), one)
        elif type(value) in _PLAIN:
            self._add(owner, path, value)
        elif isinstance(value, list | tuple):
            for index, one in enumerate(value):
                self.enter(owner, (*path, index), one)
        elif isinstance(value, torch.Tensor):
            for inside, tensor in opened(value, self.wrappers):
                self._add(owner, (*path, *inside), tensor)
        elif not isinstance(value, _VALUES):
            self._add(owner, path, value)

    def _add(self, owner: Any, path: Path, tensor: Any) -> None:
        self.tensors.append(tensor)
        self.owners.append(owner)
        self.paths.append(self._known.setdefault(path, path))  # few are distinct: kept once


def opened(
    tensor: torch.Tensor, wrappers: list[Any] | None = None
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The plain tensors that a wrapper holds (a DTensor its local one), with their path in it.

    A plain tensor is its own; a subclass that does not say what it holds comes as it is. What it
    holds besides tensors, such as a device mesh, has no memory that counts. Those that are opened
    are appended to ``wrappers``.
    """
    if _is_plain(tensor) or not is_traceable_wrapper_subclass(tensor):
        yield (), tensor
        return
    if wrappers is not None:
        wrappers.append(tensor)
    for name in tensor.__tensor_flatten__()[0]:
        held = getattr(tensor, name)
        if isinstance(held, torch.Tensor):
            for path, inner in opened(held, wrappers):
                yield (name, *path), inner


def _is_plain(tensor: Any) -> bool:
    """Whether a tensor wraps no others, be its memory away or not."""
    return type(tensor) in _PLAIN or kind_of(tensor) in _PLAIN


def begin_of(tensor: Any) -> int:
    """Where a tensor's storage begins; 0 for what has none, or does not say."""
    if not _is_plain(tensor) or tensor.layout is not torch.strided:
        return 0
    first = tensor.data_ptr()  # 0 if it has no elements, or its storage no memory
    begin = first - tensor.storage_offset() * tensor.element_size() if first else 0
    if begin:
        return int(begin)
    # Not as a rule: PyTorch makes a Python object of every storage that is asked for.
    storage = tensor.untyped_storage()
    return storage.data_ptr() if storage.nbytes() else 0


def is_emptied(tensor: Any) -> bool:
    """Whether a tensor has elements, and its storage no memory."""
    if not _is_plain(tensor) or tensor.layout is not torch.strided:
        return False
    return bool(tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0)


def place_of(tensor: torch.Tensor) -> Place | None:
    """Where the memory is in which a tensor lies, one that could leave; None if there is none."""
    return begin_of(tensor) or None


def why_tensor_stays(tensor: Any) -> str | None:
    """Why there is no storage that could be emptied under a tensor; None if there is one."""
    if _is_plain(tensor) and tensor.layout is torch.strided:
        if tensor.is_cpu or tensor.is_cuda:
            return None
        return f"{tensor.device} is not a device that refit moves memory of"
    if not isinstance(tensor, torch.Tensor):
        return f"a {type(tensor).__name__} is not looked into: only tensors, lists and dicts are"
    if not _is_plain(tensor):
        return f"the tensor subclass {type(tensor).__name__} does not say what memory it holds"
    return f"its layout is {tensor.layout}: only strided tensors are moved"


def can_fill(storage: torch.UntypedStorage) -> bool:
    """Whether an empty storage can be given memory. On a CPU one that was shared while it was empty
    says that it can be resized, and resize_() ends the process."""
    return storage.resizable() and not (storage.device.type == "cpu" and storage.is_shared())


def why_storage_stays(tensor: torch.Tensor) -> str | None:
    """Why a tensor's storage cannot be emptied and filled again; None if it can be."""
    storage = tensor.untyped_storage()
    if tensor.is_quantized:
        return "it is quantised"
    if tensor.is_cpu and storage.is_shared():
        return "its memory is shared with other processes (share_memory_(), a mapped file)"
    if not storage.resizable():
        return (
            "its memory is fixed in its place: drop the NumPy array or the view of it that is held "
            "(from_blob and DLPack fix it too: then clone() it)"
        )
    return None


def unique_name(name: str, given: dict[str, int]) -> str:
    """The name, or the first of ``name#2``, ``name#3``, … that was not given before. `given` counts
    them."""
    count = given[name] = given.get(name, 0) + 1
    return name if count == 1 else unique_name(f"{name}#{count}", given)


def places(named: Iterable[tuple[str, Any]]) -> dict[Place, str]:
    """Where the memory of tensors is, and the name of the first that is there."""
    found: dict[Place, str] = {}
    for name, tensor in named:
        for _path, inner in opened(tensor):
            if why_tensor_stays(inner) is None and (place := place_of(inner)) is not None:
                found.setdefault(place, name)
    return found


def make_plan(
    inventory: StateInventory,
    others: Mapping[Place, str],
    names: Mapping[int, str],
    why_device_stays: Callable[[torch.device], str | None],
    pieces: Sequence[tuple[int, int]] = (),
) -> OffloadPlan:
    """Decides what of an inventory can leave.

    ``others``: memory that is not the optimizer's (parameters, buffers), and its name; ``names``:
    of parameters, by their identity; ``why_device_stays`` says why memory of a device is not moved,
    or None, and is asked once for each; ``pieces``: addresses and lengths of what an arena moves as
    one. The work grows with the number of tensors, and with that of the pieces. Does not block and
    changes nothing.
    """
    planner = _Planner(others, why_device_stays)
    named = {path: _name_and_reason(path) for path in set(inventory.paths)}
    looked_at = zip(inventory.tensors, inventory.owners, inventory.paths, strict=False)
    for number, (tensor, owner, path) in enumerate(looked_at):
        name, reason = named[path]
        if owner is not None:
            whose = names.get(id(owner), "state")
            name = f"{whose}.{name}" if name else whose
        planner.add(name, tensor, number, reason, STATES)
    for number, (owner, grad) in enumerate(inventory.grads, inventory.states):
        reason = "what shards it adds to it unseen" if _is_shard(owner, grad) else None
        if isinstance(owner, FrameworkMemory):
            planner.add(owner.name, grad, number, reason, owner.group)
            continue
        planner.add(f"{names.get(id(owner), 'state')}.grad", grad, number, reason, GRADS)
    return planner.plan(pieces, len(inventory.tensors))


def _name_and_reason(path: Path) -> tuple[str, str | None]:
    """The name of a path, and the reason why a tensor there stays in any case, or None."""
    return ".".join(map(str, path)), "a step counter stays where it is" if "step" in path else None


def _is_shard(owner: Any, grad: Any) -> bool:
    """Whether a gradient is a DTensor's, or of a parameter in a flat one of FSDP1, which keeps a
    reference of its own to it and takes nothing else in its place."""
    return type(grad) not in _PLAIN or bool(getattr(owner, "_fsdp_flattened", False))


class _Planner:
    """Decides, storage by storage, for one plan.

    What it finds is kept in columns and by number, for the reason that ``StateInventory`` names.
    """

    def __init__(
        self,
        others: Mapping[Place, str],
        why_device_stays: Callable[[torch.device], str | None],
    ) -> None:
        self._others = others
        self._why_device_stays = cache(why_device_stays)
        self._candidates = RegionSpecs()
        self._devices: list[torch.device] = []
        self._leaving: dict[Place, int] = {}
        self._stays: dict[Place, str] = {}
        self._scalars: dict[Place, str] = {}
        self._names: dict[str, int] = {}
        self._resident: list[tuple[str, str]] = []
        self._places: list[Place] = []
        self._numbers: list[int] = []
        self._fixed = False

    def add(self, name: str, tensor: Any, number: int, reason: str | None, group: int) -> None:
        """Takes one tensor in. ``reason``: why it stays, whatever else it is."""
        without = why_tensor_stays(tensor)
        if without is not None:
            self._resident.append((name, reason or without))
            return
        place = place_of(tensor)
        if place is None:
            return
        self._places.append(place)
        self._numbers.append(number)
        reason = reason or self._why_stays(tensor, place)
        if reason is not None:
            self._resident.append((name, reason))
            self._stays.setdefault(place, name)
        elif tensor.dim() == 0:
            self._scalars.setdefault(place, name)
        elif place not in self._leaving:
            self._leaving[place] = len(self._candidates)
            self._candidates.add(
                unique_name(name, self._names), place, tensor.untyped_storage().nbytes(), group
            )
            self._candidates.tensors.append(number)
            self._devices.append(tensor.device)

    def _why_stays(self, tensor: torch.Tensor, place: Place) -> str | None:
        if place in self._others:
            return f"its memory is also that of {self._others[place]}"
        reason = why_storage_stays(tensor)
        if reason is not None:
            self._fixed = True
        return reason or self._why_device_stays(tensor.device)

    def plan(self, pieces: Sequence[tuple[int, int]], tensors: int) -> OffloadPlan:
        """The plan, once all tensors were seen. ``tensors``: the number that the inventory has."""
        for place in [one for one in self._leaving if one in self._stays]:
            reason = f"its memory is also that of {self._stays[place]}, which stays"
            self._resident.append((self._candidates.names[self._leaving.pop(place)], reason))
        for place, name in self._scalars.items():
            if place not in self._leaving:
                self._resident.append((name, "a 0-dim tensor stays where it is"))
        candidates = self._candidates
        groups = {place: candidates.groups[index] for place, index in self._leaving.items()}
        whole = self._whole(pieces, groups)
        specs: dict[torch.device, RegionSpecs] = {}
        for address, index in self._leaving.items():
            device = self._devices[index]
            one = specs.get(device) or specs.setdefault(device, RegionSpecs())
            one.add(
                candidates.names[index], address, candidates.nbytes[index], candidates.groups[index]
            )
            one.tensors.append(candidates.tensors[index])
        for device, address, name, nbytes in whole:
            specs.setdefault(device, RegionSpecs()).add(name, address, nbytes, STATES)
        by_group = self._by_group(groups)
        standing = {number for one in specs.values() for number in one.tensors}
        others = [number for number in range(tensors) if number not in standing]
        others_move = any(number not in standing for one in by_group.values() for number in one)
        return OffloadPlan(specs, self._resident, by_group, others, others_move, self._fixed)

    def _by_group(self, groups: Mapping[Place, int]) -> dict[int, list[int]]:
        """The tensors that lie in the places that leave, by the groups of these."""
        found: dict[int, list[int]] = {STATES: [], GRADS: [], SCRATCH: []}
        for place, number in zip(self._places, self._numbers, strict=True):
            if place in groups:
                found.setdefault(groups[place], []).append(number)
        return found

    def _whole(
        self, pieces: Sequence[tuple[int, int]], groups: dict[Place, int]
    ) -> list[tuple[torch.device, Place, str, int]]:
        """Takes out the storages that lie in pieces, and gives the pieces that leave in their
        place: device, address, name, length. One stays if anything in it stays, and its places are
        taken out of ``groups``, too."""
        if not pieces:
            return []
        leaving = _Ordered(self._leaving)
        known: dict[Place, str] = {**self._others, **self._stays, **self._scalars}
        staying = _Ordered(known)
        found: list[tuple[torch.device, Place, str, int]] = []
        for begin, nbytes in pieces:
            inside = leaving.within(begin, nbytes)
            if not inside:
                continue
            taken = [self._leaving.pop(place) for place in inside]
            stays = [known[place] for place in staying.within(begin, nbytes)]
            names = [self._candidates.names[index] for index in taken]
            stays += [
                self._candidates.names[index]
                for index in taken
                if self._candidates.groups[index] != STATES
            ]
            if stays:
                reason = f"its segment of the pool is also that of {stays[0]}, which stays"
                self._resident += [(name, reason) for name in names]
                for place in inside:
                    del groups[place]
                continue
            name = unique_name(f"pool.{names[0]}", self._names)
            found.append((self._devices[taken[0]], begin, name, nbytes))
        return found


class _Ordered:
    """Places by their addresses."""

    def __init__(self, places: Iterable[Place]) -> None:
        self._places = sorted(places)

    def within(self, begin: int, nbytes: int) -> list[Place]:
        """Those that begin in a range."""
        first = bisect_left(self._places, begin)
        after = bisect_left(self._places, begin + nbytes)
        return self._places[first:after]
