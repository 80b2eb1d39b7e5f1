"""Storages that PyTorch will not resize: the tensors in them move to fresh ones, which can leave.

A storage is marked so for good by ``torch.load``, and by one ``tensor.numpy()``. The mark cannot be
taken off; but a tensor can be given another storage and stay the object it is. That is done only
where every tensor in the storage is known, by the count of its users: a view or a NumPy array
that other code holds would stay behind, with the old bytes.

Independent of when storages leave, and of why others stay.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from refit._c.waiting import interrupts_held
from refit.errors import HostMemoryError
from refit.states.storages import Place, StateInventory, place_of, why_tensor_stays
from refit.states.torch_memory import empty_storage, users_of


def swap_fixed(
    inventory: StateInventory,
    others: Mapping[Place, str],
    why_device_stays: Callable[[torch.device], str | None],
) -> tuple[bool, bool]:
    """Gives what lies in plain host memory that cannot be resized memory that can, byte for byte.

    Blocks for the copies. Returns whether anything has moved, and whether some of it could not
    because other code holds it too: ask again. HostMemoryError: what had moved stays moved,
    nothing is lost, call again.
    """
    moved = held = False
    for tensors in _fixed(inventory):
        storage = tensors[0].untyped_storage()
        if place_of(tensors[0]) in others or why_device_stays(storage.device) is not None:
            continue
        if users_of(storage) == len(tensors) + 1:  # and the Python object that stands for it
            move(tensors, storage, _copy(storage))
            moved = True
        else:
            held = True
    return moved, held


def _fixed(inventory: StateInventory) -> Iterable[list[torch.Tensor]]:
    """The tensors of each storage that is to move, without those that hold a step counter."""
    found: dict[int, dict[int, torch.Tensor]] = {}
    stays: set[int] = set()
    inside = [*zip(inventory.tensors, inventory.paths, strict=False)]
    inside += [(grad, ()) for _, grad in inventory.grads]
    for tensor, path in inside:
        if why_tensor_stays(tensor) is not None or not _is_fixed(tensor):
            continue
        storage = tensor.untyped_storage()._cdata
        found.setdefault(storage, {})[id(tensor)] = tensor
        if "step" in path:
            stays.add(storage)
    groups = [list(one.values()) for storage, one in found.items() if storage not in stays]
    return [group for group in groups if any(tensor.dim() > 0 for tensor in group)]


def _is_fixed(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory is the host's, this process's alone, and cannot be resized."""
    storage = tensor.untyped_storage()
    if storage.resizable() or storage.device.type != "cpu" or storage.nbytes() == 0:
        return False
    return not (tensor.is_quantized or storage.is_shared() or storage.filename is not None)


def _copy(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    try:
        fresh = empty_storage(storage.nbytes(), storage.device)
    except (RuntimeError, MemoryError) as why:
        raise HostMemoryError(
            f"no memory for the {storage.nbytes()} bytes of a state that torch.load or .numpy() "
            f"had fixed in its place; nothing has moved. Free some, then call again: {why}"
        ) from why
    fresh.copy_(storage, False)
    return fresh


def move(
    tensors: Sequence[torch.Tensor], old: torch.UntypedStorage, fresh: torch.UntypedStorage
) -> None:
    """Puts all tensors on ``fresh``, or none: they may share bytes."""
    try:
        for tensor in tensors:
            _put(tensor, fresh)
    except BaseException:
        for tensor in tensors:
            _put(tensor, old)
        raise


class TensorsByStorage:
    """The tensors of an inventory by their storage, to be moved while it is empty."""

    def __init__(self, tensors: Iterable[Any]) -> None:
        """They are looked at when something is moved, as a rule never."""
        self._tensors = tensors

    @cached_property
    def _by_storage(self) -> dict[int, list[torch.Tensor]]:
        found: dict[int, list[torch.Tensor]] = {}
        for tensor in self._tensors:
            if why_tensor_stays(tensor) is None:
                found.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
        return found

    def move(self, old: torch.UntypedStorage, fresh: torch.UntypedStorage) -> None:
        """Puts those of ``old`` on ``fresh``. Call again after a failure, with the same two."""
        for tensor in self._by_storage.get(old._cdata, ()):
            _put(tensor, fresh)


def _put(tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
    with interrupts_held(), torch.no_grad():
        tensor.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
