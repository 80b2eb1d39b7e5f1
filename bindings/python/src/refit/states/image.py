"""The host image of what is away, as CPU tensors that can be read.

A tensor whose storage is empty keeps its dtype, shape and strides. A view with the same dtype,
shape and strides is made over its bytes in the image, which a read lock holds. Independent of the
readers of a view.
"""

import ctypes
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from refit._c.handle import Closing
from refit._c.waiting import interrupts_held
from refit.states.offloaded_tensor import untouched
from refit.states.offloader import ReadLock
from refit.states.storages import opened

if TYPE_CHECKING:
    from refit.states.regions import DeviceRegions


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
                if regions.slots:
                    with interrupts_held():  # a read lock that no one knows of would keep all here
                        self._locks.append(regions.read_lock())
                    self._know(self._locks[-1], regions.region_of())
        except BaseException:
            self.close()
            raise

    def _know(self, lock: ReadLock, regions: dict[int, int]) -> None:
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
