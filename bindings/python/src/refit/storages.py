"""What an optimizer holds, as distinct storages: which of them can leave, and why others cannot.

What leaves is never a tensor but the storage under it: its memory goes with ``resize_(0)`` and
comes back with ``resize_(nbytes)``, so tensors, their views, strides and wrappers stay the objects
they are. So each storage counts once, however many tensors lie in it, and may leave only if all
that is known to lie in it is optimizer state (or gradients, where those are asked for).

``take_stock`` goes through the state, fast, and alike every time; ``scan`` decides, slowly. A scan
holds as long as the stock is the same. Where the bytes go is unknown here.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

STATES = 0
GRADS = 1
"""Groups of regions: what is waited for together."""

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_VALUES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)

Place = tuple[torch.device, int]
"""What tells distinct memory apart: where it is, and where it begins."""

BESIDE = -1
"""In place of an optimizer's number: the tensor is in no state, but is kept beside one."""

Found = tuple[int, Any, tuple[Any, ...], Any]
"""The optimizer's number, whose state it is, under which keys, and a tensor or another object."""


@dataclass(slots=True)
class Stock:
    """What one walk through the state found: states first, then gradients, then parameters."""

    states: list[Found]
    grads: list[tuple[Any, Any]]
    """Parameters, and the gradient of each that has one."""
    tensors: list[Any]

    def identities(self) -> list[int]:
        """What tells the tensors from others."""
        return list(map(id, self.tensors))

    def addresses(self) -> list[int]:
        """Where the tensors are, now. With the identities it makes a stock the same as another."""
        try:
            return [tensor.data_ptr() for tensor in self.tensors]
        except (AttributeError, RuntimeError):  # something without memory is among them
            return list(map(begin_of, self.tensors))


@dataclass(slots=True)
class Slot:
    """One storage that can leave. ``tensor`` is the number in the stock of one that lies in it."""

    name: str
    device: torch.device
    nbytes: int
    tensor: int
    group: int
    address: int = 0
    """Of a piece of an arena, which leaves whole and returns to it; 0: the storage's own."""


@dataclass(slots=True)
class Scan:
    """What was decided about a stock."""

    slots: list[Slot]
    resident: list[tuple[str, str]]
    """What does not leave, by name, and why."""
    passing: bool = False
    """Whether something stays only as long as somebody else holds its memory."""


def take_stock(
    optimizers: Sequence[torch.optim.Optimizer],
    with_grads: bool,
    beside: Iterable[tuple[str, Any]] = (),
) -> Stock:
    """Goes through the state of ``optimizers``, the tensors kept beside it and, if asked, the
    gradients. Changes nothing."""
    states = list(_walk(optimizers))
    for name, tensor in beside:
        states += _inside(BESIDE, None, (name,), tensor)
    parameters = [p for one in optimizers for group in one.param_groups for p in group["params"]]
    grads: list[tuple[Any, Any]] = []
    if with_grads:
        grads = [(p, p.grad) for p in parameters if p.grad is not None]
    return Stock(states, grads, [s[3] for s in states] + [g[1] for g in grads] + parameters)


def _walk(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[Found]:
    """Every tensor, wrappers opened, always in the same order; and every object that is neither a
    tensor nor a plain value."""
    for number, optimizer in enumerate(optimizers):
        for owner, state in optimizer.state.items():
            yield from _inside(number, owner, (), state)


def _inside(number: int, owner: Any, keys: tuple[Any, ...], value: Any) -> Iterator[Found]:
    if isinstance(value, Mapping):
        for key, one in value.items():
            if type(one) is torch.Tensor:  # as a rule; the rest is for what is rare
                yield number, owner, (*keys, key), one
            elif type(one) not in _VALUES:
                yield from _inside(number, owner, (*keys, key), one)
    elif type(value) in _PLAIN:
        yield number, owner, keys, value
    elif isinstance(value, list | tuple):
        for index, one in enumerate(value):
            yield from _inside(number, owner, (*keys, index), one)
    elif isinstance(value, torch.Tensor):
        for path, tensor in opened(value):
            yield number, owner, (*keys, *path), tensor
    elif not isinstance(value, _VALUES):
        yield number, owner, keys, value


def opened(tensor: torch.Tensor) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The plain tensors that a wrapper holds (a DTensor its local one), with their path in it.

    A plain tensor is its own; a subclass that does not say what it holds comes as it is. What it
    holds besides tensors, such as a device mesh, has no memory that counts.
    """
    if type(tensor) in _PLAIN or not is_traceable_wrapper_subclass(tensor):
        yield (), tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        held = getattr(tensor, name)
        if isinstance(held, torch.Tensor):
            for path, inner in opened(held):
                yield (name, *path), inner


def begin_of(tensor: Any) -> int:
    """Where a tensor's storage begins; 0 for what has none, or does not say."""
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
        return 0
    return int(tensor.untyped_storage().data_ptr())


def is_emptied(tensor: Any) -> bool:
    """Whether a tensor has elements, and its storage no memory."""
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
        return False
    return bool(tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0)


def place_of(storage: torch.UntypedStorage) -> Place:
    """Where a storage is."""
    return storage.device, storage.data_ptr()


def why_tensor_stays(tensor: Any) -> str | None:
    """Why there is no storage that could be emptied under a tensor; None if there is one."""
    if not isinstance(tensor, torch.Tensor):
        return f"a {type(tensor).__name__} is not looked into: only tensors, lists and dicts are"
    if type(tensor) not in _PLAIN:
        return f"the tensor subclass {type(tensor).__name__} does not say what memory it holds"
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}: only strided tensors are moved"
    if tensor.device.type not in ("cpu", "cuda"):
        return f"{tensor.device} is no device that refit moves memory of"
    return None


def why_storage_stays(tensor: torch.Tensor, storage: torch.UntypedStorage) -> str | None:
    """Why a tensor's storage cannot be emptied and filled again; None if it can be."""
    if tensor.is_quantized:
        return "it is quantised"
    if storage.device.type == "cpu" and storage.is_shared():
        return "its memory is shared with other processes (share_memory_(), a mapped file)"
    if not storage.resizable():
        return (
            "its memory is fixed in its place: drop the NumPy array or the view of it that is held "
            "(from_blob and DLPack fix it too: then clone() it)"
        )
    return None


def places(named: Iterable[tuple[str, Any]]) -> dict[Place, str]:
    """Where the memory of tensors is, and the name of the first that is there."""
    found: dict[Place, str] = {}
    for name, tensor in named:
        for _path, inner in opened(tensor):
            if why_tensor_stays(inner) is None and inner.untyped_storage().nbytes() > 0:
                found.setdefault(place_of(inner.untyped_storage()), name)
    return found


def scan(
    stock: Stock,
    others: Mapping[Place, str],
    name_of: Callable[[Any], tuple[str, ...]],
    why_device_stays: Callable[[torch.device], str | None],
    pieces: Sequence[tuple[int, int]] = (),
) -> Scan:
    """Decides what of a stock can leave.

    ``others``: memory that somebody else knows (parameters, buffers), and by what name; ``name_of``
    names the owner of a state; ``why_device_stays`` says why memory of a device is not moved, or
    None; ``pieces``: addresses and lengths of what an arena moves as one. Does not block and
    changes nothing.
    """
    scanner = _Scanner(others, why_device_stays)
    for number, (_optimizer, owner, keys, tensor) in enumerate(stock.states):
        name = ".".join((*name_of(owner), *map(str, keys)))
        reason = "a step counter stays where it is" if "step" in keys else None
        scanner.look(name, tensor, number, reason, STATES)
    for number, (owner, grad) in enumerate(stock.grads, len(stock.states)):
        reason = "what shards it adds to it unseen" if _is_shard(owner, grad) else None
        scanner.look(".".join((*name_of(owner), "grad")), grad, number, reason, GRADS)
    return scanner.decided(pieces)


def _is_shard(owner: Any, grad: Any) -> bool:
    """Whether a gradient is a DTensor's, or of a parameter in a flat one of FSDP1, which keeps a
    reference of its own to it and takes nothing else in its place."""
    return type(grad) not in _PLAIN or bool(getattr(owner, "_fsdp_flattened", False))


class _Scanner:
    """Decides, storage by storage, for one scan."""

    def __init__(
        self,
        others: Mapping[Place, str],
        why_device_stays: Callable[[torch.device], str | None],
    ) -> None:
        self._others = others
        self._why_device_stays = why_device_stays
        self._slots: dict[Place, Slot] = {}
        self._stays: dict[Place, str] = {}
        self._scalars: dict[Place, str] = {}
        self._names: dict[str, int] = {}
        self._resident: list[tuple[str, str]] = []

    def look(self, name: str, tensor: Any, number: int, reason: str | None, group: int) -> None:
        """Takes one tensor in. ``reason``: why it stays, whatever else it is."""
        without = why_tensor_stays(tensor)
        if without is not None:
            self._resident.append((name, reason or without))
            return
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0:
            return
        place = place_of(storage)
        reason = reason or self._why_stays(tensor, storage, place)
        if reason is not None:
            self._resident.append((name, reason))
            self._stays.setdefault(place, name)
        elif tensor.dim() == 0:
            self._scalars.setdefault(place, name)
        elif place not in self._slots:
            name = self._unique(name)
            self._slots[place] = Slot(name, storage.device, storage.nbytes(), number, group)

    def _why_stays(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage, place: Place
    ) -> str | None:
        if place in self._others:
            return f"its memory is also that of {self._others[place]}"
        return why_storage_stays(tensor, storage) or self._why_device_stays(storage.device)

    def _unique(self, name: str) -> str:
        seen = self._names[name] = self._names.get(name, 0) + 1
        return name if seen == 1 else self._unique(f"{name}#{seen}")

    def decided(self, pieces: Sequence[tuple[int, int]]) -> Scan:
        """What was decided, once all tensors were seen."""
        for place, slot in self._slots.items():
            if place in self._stays:
                reason = f"its memory is also that of {self._stays[place]}, which stays"
                self._resident.append((slot.name, reason))
        for place, name in self._scalars.items():
            if place not in self._slots:
                self._resident.append((name, "a 0-dim tensor stays where it is"))
        slots = {place: slot for place, slot in self._slots.items() if place not in self._stays}
        for begin, nbytes in pieces:
            self._as_one(slots, begin, nbytes)
        return Scan(list(slots.values()), self._resident)

    def _as_one(self, slots: dict[Place, Slot], begin: int, nbytes: int) -> None:
        """Puts a piece in the place of the storages in it; it stays if anything in it stays."""
        inside = [place for place in slots if begin <= place[1] < begin + nbytes]
        if not inside:
            return
        taken = [slots.pop(place) for place in inside]
        known: dict[Place, str] = {**self._others, **self._stays, **self._scalars}
        stays = [name for place, name in known.items() if begin <= place[1] < begin + nbytes]
        stays += [slot.name for slot in taken if slot.group == GRADS]
        if stays:
            reason = f"its segment of the pool is also that of {stays[0]}, which stays"
            self._resident += [(slot.name, reason) for slot in taken]
            return
        first = taken[0]
        name = self._unique(f"pool.{first.name}")
        slots[inside[0]] = Slot(name, first.device, nbytes, first.tensor, STATES, begin)
