"""What is away, read from the host image: as single tensors, and as a state_dict that stays whole.

A tensor whose storage is empty keeps its dtype, shape and strides. ``Image`` makes a view with the
same over its bytes in the image, which a read lock holds.

``reading`` gives a state_dict that can be read now, wherever the states are, and that nothing tears
meanwhile. While states are on the device it is the optimizer's own, and no offload is allowed until
the block ends. While they are away its tensors are such views: CPU tensors, read-only by agreement,
and empty once the block ends; what stayed on the device is copied, so that all is of one moment.
What cannot be shown like that (a DTensor, a segment of a pool, an optimizer that makes its
state_dict by its own ways) is brought back first.
"""

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from refit._c.handle import Closing
from refit._c.waiting import interrupts_held
from refit.states.offloaded_tensor import untouched
from refit.states.offloader import ReadLock
from refit.states.storages import opened

if TYPE_CHECKING:
    from refit.states.cycle import StateCycle
    from refit.states.regions import DeviceRegions


# ---- single tensors -------------------------------------------------------------------------


class Unshowable(Exception):
    """A tensor whose bytes are away and that no CPU tensor can stand for."""


class Image(Closing):
    """Views over the image of some devices' regions, which are away. ``close`` empties them and
    lets the image go. StateError unless the image is whole."""

    def __init__(self, per_device: Iterable["DeviceRegions"]) -> None:
        self._locks: list[ReadLock] = []
        self._regions: dict[int, tuple[ReadLock, int]] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._made: list[torch.Tensor] = []
        try:
            for regions in per_device:
                if regions.specs:
                    with interrupts_held():  # a read lock that no one knows of would keep all here
                        self._locks.append(regions.read_lock())
                    self._add(self._locks[-1], regions.region_by_storage())
        except BaseException:
            self.close()
            raise

    def _add(self, lock: ReadLock, regions: dict[int, int]) -> None:
        self._regions.update({storage: (lock, region) for storage, region in regions.items()})

    def view(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A read-only CPU tensor like ``tensor``, with its bytes; None if they are not away.

        Valid until ``close``. Unshowable for a wrapper of tensors; NotFoundError for memory that
        has no bytes in the image, since it returns as zeros.
        """
        with untouched():
            if not self._is_away(tensor):
                return None
            storage = self._storage(tensor.untyped_storage()._cdata)
            view = torch.empty(0, dtype=tensor.dtype)
            view.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        self._made.append(view)
        return view

    def _is_away(self, tensor: torch.Tensor) -> bool:
        inner = [one for _, one in opened(tensor) if one.layout is torch.strided]
        away = any(one.untyped_storage()._cdata in self._regions for one in inner)
        if away and (len(inner) != 1 or inner[0] is not tensor):
            raise Unshowable
        return away

    def _storage(self, identity: int) -> torch.UntypedStorage:
        if identity not in self._storages:
            lock, region = self._regions[identity]
            address, count = lock.read(region)
            memory = (ctypes.c_char * count).from_address(address)
            self._storages[identity] = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        return self._storages[identity]

    def close(self) -> None:
        """No view shows bytes any longer that an offload may overwrite."""
        with interrupts_held():  # it is called once
            for view in self._made:
                view.set_(torch.empty(0, dtype=view.dtype).untyped_storage())
            self._made.clear()
            self._storages.clear()
            self._regions.clear()
            for lock in self._locks:
                lock.close()
            self._locks.clear()


# ---- a state_dict ---------------------------------------------------------------------------


@contextmanager
def reading(cycle: "StateCycle") -> Iterator[list[dict[str, Any]]]:
    """One state_dict for each optimizer, valid until the block ends."""
    reader = object()
    try:  # from here on, for Ctrl-C may come right after the call
        cycle.begin_reading(reader)  # an offload that ended by its deadline may still be copying
        with ExitStack() as stack:
            yield _state_dicts(cycle, stack)
    finally:
        cycle.readers.discard(reader)
        if cycle.abandoned and not cycle.readers:
            cycle.close()


def _state_dicts(cycle: "StateCycle", stack: ExitStack) -> list[dict[str, Any]]:
    pieces = any(regions.has_pieces for regions in cycle.per_device)
    shows = cycle.shows_image and all(map(_is_plain, cycle.optimizers))
    if cycle.is_cleared and not pieces and shows:
        image = Image(cycle.per_device)
        try:
            shown = [_shown(image, _references(one)) for one in cycle.optimizers]
        except (Unshowable, LookupError):
            image.close()
        except BaseException:
            image.close()
            raise
        else:
            stack.callback(image.close)
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


def _shown(image: Image, value: Any) -> Any:
    """``value`` again, with a view for each tensor whose bytes are away."""
    if isinstance(value, torch.Tensor):
        view = image.view(value)
        # A tensor in place is copied: a step counter may go on within the block.
        return value.detach().clone() if view is None else view
    if isinstance(value, dict):
        return {key: _shown(image, one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_shown(image, one) for one in value)
    return value
