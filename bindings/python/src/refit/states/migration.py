"""States that exist already move into a pool, and stay the objects that they are.

A step that runs within ``pool.use()`` puts its temporaries there as well, and memory of a pool goes
back only as whole segments. So the step runs outside; then each storage of a state is copied to one
from the pool, and its tensors are given that one. Independent of cycles.
"""

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from refit.errors import DeviceMemoryError, StateError
from refit.states.storage_swap import move
from refit.states.storages import OffloadPlan, StateInventory, is_emptied, why_tensor_stays
from refit.states.torch_memory import empty_storage, users_of

ROOM = 256 << 20
"""How many bytes are there twice at most, or those of the largest state."""


def migrate(
    stock: StateInventory,
    found: OffloadPlan,
    device: torch.device,
    pieces: Sequence[tuple[int, int]],
    allocating: Callable[[], AbstractContextManager[Any]],
) -> list[tuple[str, str]]:
    """Moves what ``found`` says can leave, unless it lies in one of ``pieces``, byte for byte.

    In batches, each of which moves whole or not at all; between them the memory that became free
    goes back to the device. Returns what stays where it was, by name, and why. StateError while
    states are away. DeviceMemoryError: what has moved stays moved, nothing is lost, call again.
    """
    if any(map(is_emptied, stock.tensors[: stock.states])):
        raise StateError("states are away: restore() them, then move them into the pool")
    tensors = _by_storage(stock)
    stays = list(found.resident)
    outside = [one for one in _leaving(found) if not _is_inside(_storage(stock, one), pieces)]
    for batch in _batches(outside):
        _synchronize(device)  # other streams may still use them
        with allocating():
            fresh = [_allocate(one, device) for one in batch]
        for one, to in zip(batch, fresh, strict=True):
            storage = _storage(stock, one)
            mine = tensors[storage._cdata]
            if users_of(storage) != len(mine) + 1:  # and the Python object that stands for it
                stays.append((one.name, "a view of it is held, which would stay behind"))
                continue
            to.copy_(storage, True)
            move(mine, storage, to)
        _synchronize(device)  # the old memory goes to others now
    return stays


def _by_storage(stock: StateInventory) -> dict[int, list[torch.Tensor]]:
    found: dict[int, dict[int, torch.Tensor]] = {}
    for tensor in stock.tensors:
        if why_tensor_stays(tensor) is None:
            found.setdefault(tensor.untyped_storage()._cdata, {})[id(tensor)] = tensor
    return {storage: list(tensors.values()) for storage, tensors in found.items()}


class _Leaving(NamedTuple):
    """A storage that is to move. It is not held: once its tensors have left it, it is to go."""

    name: str
    nbytes: int
    tensor: int
    """The number in the stock of one that lies in it."""


def _leaving(found: OffloadPlan) -> Iterator[_Leaving]:
    for slots in found.slots.values():
        yield from map(_Leaving, slots.names, slots.nbytes, slots.tensors)


def _storage(stock: StateInventory, one: _Leaving) -> torch.UntypedStorage:
    storage: torch.UntypedStorage = stock.tensors[one.tensor].untyped_storage()
    return storage


def _is_inside(storage: torch.UntypedStorage, pieces: Sequence[tuple[int, int]]) -> bool:
    """Whether a storage lies in a piece; they come in the order of their addresses."""
    at = bisect.bisect_right(pieces, (storage.data_ptr(), 1 << 63)) - 1
    return at >= 0 and storage.data_ptr() < pieces[at][0] + pieces[at][1]


def _batches(storages: Iterable[_Leaving]) -> Iterator[list[_Leaving]]:
    batch: list[_Leaving] = []
    nbytes = 0
    for one in storages:
        if batch and nbytes + one.nbytes > ROOM:
            yield batch
            batch, nbytes = [], 0
        batch.append(one)
        nbytes += one.nbytes
    if batch:
        yield batch


def _allocate(one: _Leaving, device: torch.device) -> torch.UntypedStorage:
    try:
        return empty_storage(one.nbytes, device)
    except (RuntimeError, MemoryError) as why:  # torch.OutOfMemoryError is the first
        raise DeviceMemoryError(
            f"no memory in the pool for the {one.nbytes} bytes of {one.name}, which stays where "
            "it is; what has moved stays moved, and nothing is lost. Free memory of the GPU, or "
            f"make a larger pool, then call migrate() again: {why}"
        ) from why


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
