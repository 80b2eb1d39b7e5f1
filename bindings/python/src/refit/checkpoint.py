"""A state_dict that can be read now, wherever the states are, and that nothing tears meanwhile.

While states are on the device it is the optimizer's own, and no clear is allowed until the block
ends. While they are away its tensors lie over the bytes in the host image, held by a lease: they
are CPU tensors with the dtypes, shapes and strides of the states, read-only by agreement, and empty
once the block ends; what stayed on the device is copied, so that all is of one moment. What cannot
be shown like that (a DTensor, a segment of a pool, an optimizer that makes its state_dict by its
own ways) is brought back first.
"""

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from refit.cycle import CLEARED, RETURNING, Cycle
from refit.offloader import Lease
from refit.storages import opened


class _Unshowable(Exception):
    """A tensor whose bytes are away and that no CPU tensor can stand for."""


@contextmanager
def reading(cycle: Cycle) -> Iterator[list[dict[str, Any]]]:
    """One state_dict for each optimizer, valid until the block ends."""
    if cycle.phase == RETURNING:
        cycle.join()
    for lane in cycle.lanes:
        lane.settle()  # a clear that ended by its deadline may still be copying
    cycle.readers += 1
    try:
        with ExitStack() as stack:
            yield _state_dicts(cycle, stack)
    finally:
        cycle.readers -= 1


def _state_dicts(cycle: Cycle, stack: ExitStack) -> list[dict[str, Any]]:
    pieces = any(slot.address for lane in cycle.lanes for slot in lane.slots)
    if cycle.phase == CLEARED and not pieces and all(map(_is_plain, cycle.optimizers)):
        views = _Views(cycle)
        try:
            shown = [views.of(_references(one)) for one in cycle.optimizers]
        except (_Unshowable, LookupError):
            views.close()
        except BaseException:
            views.close()
            raise
        else:
            stack.callback(views.close)
            return shown
    return [one.state_dict() for one in cycle.optimizers]


def _is_plain(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its state_dict is torch's own, which reads no bytes."""
    return (
        type(optimizer).state_dict is torch.optim.Optimizer.state_dict
        and not optimizer._optimizer_state_dict_post_hooks
        and len(optimizer._optimizer_state_dict_pre_hooks) <= 1  # ours
    )


def _references(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Its state_dict as it is, references to empty storages, without the hook that fills them."""
    hooks = dict(optimizer._optimizer_state_dict_pre_hooks)
    optimizer._optimizer_state_dict_pre_hooks.clear()
    try:
        return optimizer.state_dict()
    finally:
        optimizer._optimizer_state_dict_pre_hooks.update(hooks)


class _Views:
    """CPU tensors over the host image. ``close`` empties them and lets the image go."""

    def __init__(self, cycle: Cycle) -> None:
        self._leases: list[Lease] = []
        self._regions: dict[int, tuple[Lease, int]] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._made: list[torch.Tensor] = []
        try:
            for lane in cycle.lanes:
                if lane.slots:
                    self._hold(lane.lease(), lane.region_of())
        except BaseException:
            self.close()
            raise

    def _hold(self, lease: Lease, regions: dict[int, int]) -> None:
        self._leases.append(lease)
        self._regions.update({storage: (lease, region) for storage, region in regions.items()})

    def of(self, value: Any) -> Any:
        """``value`` again, with a view for each tensor whose bytes are away."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, dict):
            return {key: self.of(one) for key, one in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self.of(one) for one in value)
        return value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._is_away(tensor):
            return tensor.detach().clone()  # a step counter: it may go on within the block
        storage = self._storage(tensor.untyped_storage()._cdata)
        view = torch.empty(0, dtype=tensor.dtype)
        view.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        self._made.append(view)
        return view

    def _is_away(self, tensor: torch.Tensor) -> bool:
        inner = [one for _, one in opened(tensor) if one.layout is torch.strided]
        away = any(one.untyped_storage()._cdata in self._regions for one in inner)
        if away and (len(inner) != 1 or inner[0] is not tensor):
            raise _Unshowable
        return away

    def _storage(self, identity: int) -> torch.UntypedStorage:
        if identity not in self._storages:
            lease, region = self._regions[identity]
            address, count = lease.read(region)
            memory = (ctypes.c_char * count).from_address(address)
            self._storages[identity] = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        return self._storages[identity]

    def close(self) -> None:
        """No view shows bytes any longer that an offload may overwrite."""
        for view in self._made:
            view.set_(torch.empty(0, dtype=view.dtype).untyped_storage())
        self._made.clear()
        for lease in self._leases:
            lease.close()
        self._leases.clear()
