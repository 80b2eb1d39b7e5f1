"""A parameter whose states live on the host: their places in the image, and the tensors over them.

A ``ParamState`` has a ``State`` for each of them. A plain state has one ``BufferSlot``, which is a
region of the image; a wrapper such as a DTensor has one for each plain tensor in it, and is made
again around other tensors, by its ``Recipe``. Independent of what steps states.
"""

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from operator import methodcaller
from typing import Any, cast

import torch

from refit._c.waiting import interrupts_held
from refit.states.offloaded_tensor import call_untouched, kind_of, untouched
from refit.states.storages import opened, why_tensor_stays
from refit.step.host_buffer import UNIT, HostBuffer
from refit.step.stand_in import PART, is_dense, local
from refit.step.window import Part

_READ = methodcaller("data_ptr"), methodcaller("size"), methodcaller("stride")


def _layout_at(tensor: torch.Tensor) -> list[Any]:
    """Where a tensor lies, and how it is read."""
    return [call_untouched(one, tensor) for one in _READ]


def plain_of(value: Any) -> list[Any]:
    """The plain tensors of a state: itself, or those in a wrapper."""
    return [one for _, one in opened(value)]


def extent(tensor: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to the last."""
    if tensor.numel() == 0:
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()


def dense_like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without memory of the same type and shape, and of the same strides if these leave
    no gap."""
    strides = tensor.stride() if is_dense(tensor) else None
    if strides is None:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="meta")


class BufferSlot:
    """One plain tensor of a state: a region of the image, and how it looks.

    ``view`` is the tensor over the image. Over masters that are coded there is none: theirs has no
    memory.
    """

    def __init__(self, buffer: HostBuffer, region: int, like: torch.Tensor) -> None:
        self.region = region
        self.dtype = like.dtype
        self.shape = tuple(like.shape)
        self.stride = tuple(like.stride())
        self.nbytes = extent(like)
        self._whole: dict[int, Part] = {}
        self.is_coded = buffer.is_coded(region)
        if self.is_coded:
            self.view = like
            return
        self._memory: Any = buffer.memory(region) if self.nbytes else None
        self._storage: torch.UntypedStorage | None = None
        self.show()

    def show(self) -> None:
        """Makes ``view``, another tensor than before."""
        # To be written in any mode.
        with interrupts_held(), torch.inference_mode(False), torch.no_grad():
            self.view = torch.empty(0, dtype=self.dtype, device="cpu")
            if self._memory is not None:
                self.view.set_(self._storage_here(), 0, self.shape, self.stride)
        self._layout = _layout_at(self.view)

    def _storage_here(self) -> torch.UntypedStorage:
        """Over the image. ``share_memory_()`` moves a storage to other memory, with all tensors
        that have it: then it is theirs, and the image gets another."""
        if self._storage is None or self._storage.data_ptr() != ctypes.addressof(self._memory):
            self._storage = torch.frombuffer(self._memory, dtype=torch.uint8).untyped_storage()
        return self._storage

    @property
    def is_displaced(self) -> bool:
        """Whether ``view`` has other memory now (``swap_tensors``, ``view.data = x``,
        ``share_memory_()``), or is read in another way (``t_()``)."""
        return not self.is_coded and _layout_at(self.view) != self._layout

    @property
    def storage_id(self) -> int:
        """Of the memory of the image that it is over; 0: of none."""
        return 0 if self.is_coded or self._storage is None else self._storage._cdata

    def whole(self, flags: int) -> Part:
        """All of it as a part of a step. The same object for the same flags: there are many."""
        if flags not in self._whole:
            self._whole[flags] = Part(self.region, flags, 0, self.nbytes)
        return self._whole[flags]


class Recipe:
    """How a tensor is made of the plain tensors in it: it is the one, or a wrapper of them."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._wrapper: tuple[Any, ...] | None = None
        path, _ = next(iter(opened(tensor)))
        if path:
            names, context = cast(Any, tensor).__tensor_flatten__()
            inner = [(name, getattr(tensor, name)) for name in names]
            recipes = [
                (name, Recipe(one) if isinstance(one, torch.Tensor) else one) for name, one in inner
            ]
            self._wrapper = kind_of(tensor), recipes, context, tensor.shape, tensor.stride()

    @property
    def is_plain(self) -> bool:
        """Whether it is the one tensor, and not a wrapper."""
        return self._wrapper is None

    def made(self, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        """The tensor over others, which come in the order of ``opened``."""
        return self._made(iter(tensors))

    def _made(self, tensors: Iterator[torch.Tensor]) -> torch.Tensor:
        if self._wrapper is None:
            return next(tensors)
        kind, recipes, context, shape, stride = self._wrapper
        inner = {
            name: one._made(tensors) if isinstance(one, Recipe) else one for name, one in recipes
        }
        made: torch.Tensor = kind.__tensor_unflatten__(inner, context, shape, stride)
        return made


class State:
    """One state of a parameter. ``shown`` is the tensor over the image that the optimizer has."""

    def __init__(self, slots: list[BufferSlot], recipe: Recipe) -> None:
        self.slots = slots
        self._recipe = recipe
        self._show()

    def _show(self) -> None:
        self.shown = self.over([slot.view for slot in self.slots])
        self.wrappers: list[Any] = []
        """``shown``, if it is one, and those in it."""
        for _ in opened(self.shown, self.wrappers):
            pass

    def over(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The state over other memory: a plain tensor for each slot."""
        if self._recipe.is_plain:
            return tensors[0]
        with interrupts_held(), torch.no_grad():
            return self._recipe.made(tensors)

    def show_again(self) -> bool:
        """Makes ``shown`` anew if it has got other memory; then the tensor that the optimizer has
        is that of other code. False: it is in its place."""
        displaced = [slot for slot in self.slots if slot.is_displaced]
        if not displaced and self._is_made_of_views():
            return False
        for slot in displaced:
            slot.show()
        self._show()
        return True

    def _is_made_of_views(self) -> bool:
        views = [slot.view for slot in self.slots]
        if self.shown is views[0]:
            return True
        with untouched():
            return list(map(id, plain_of(self.shown))) == list(map(id, views))

    def plain(self, value: Any) -> list[torch.Tensor] | None:
        """The plain tensors of a value that stands for this state; None if it looks otherwise.
        Strides do not count."""
        if value is self.shown:
            return [slot.view for slot in self.slots]
        if not isinstance(value, torch.Tensor):
            return None
        inner = plain_of(value)
        if len(inner) != len(self.slots):
            return None
        alike = all(
            why_tensor_stays(one) is None
            and one.dtype == slot.dtype
            and tuple(one.shape) == slot.shape
            for one, slot in zip(inner, self.slots, strict=True)
        )
        return inner if alike else None


class ParamState:
    """A parameter, those of its states that live on the host, and where."""

    def __init__(self, parameter: Any, name: str, elementwise: bool) -> None:
        self.parameter = parameter
        self.name = name
        self.elementwise = elementwise
        self._layout = _layout_of(parameter)
        self.states: dict[Any, State] = {}
        self.master: State | None = None
        """The place of the parameter itself, if it is a master that lives on the host, too."""
        self.buffer: HostBuffer | None = None
        self.share: Any = None
        """The ``CpuShare`` that steps it; None: it visits the device."""
        self.parted = False
        """Whether it is stepped part by part, because its states are larger than a window."""
        self.is_resident = False
        """Whether "auto" keeps its states on the device, and its master with them. Their places on
        the host stay theirs."""
        self.is_blank = True
        """Whether nothing has been written to the places of its states yet, so that these are still
        zeros."""

    @property
    def has_master_here(self) -> bool:
        """Whether the parameter is a master that lives on the host now."""
        return self.master is not None and not self.is_resident

    @property
    def grain(self) -> int:
        """Parts of it begin at multiples of so many elements."""
        return UNIT // self.parameter.element_size() if self.is_coded else PART

    @property
    def is_coded(self) -> bool:
        """Whether it is a master that is in the image as what its weights lack."""
        return self.master is not None and self.master.slots[0].is_coded

    def foresees(self) -> bool:
        """Whether the parameter still looks as it did when its states were foreseen."""
        return _layout_of(self.parameter) == self._layout

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all its states on the host, which have their places by now."""
        return sum(slot.nbytes for state in self.all for slot in state.slots)

    @cached_property
    def pairs(self) -> list[tuple[Any, State]]:
        """Its states by their keys, which have their places by now. Not to be changed."""
        return list(self.states.items())

    @property
    def all(self) -> list[State]:
        """Its master, if it has one here, and its states."""
        return [*([] if self.master is None else [self.master]), *self.states.values()]

    def blank(self) -> None:
        """Sets its states to zero before they are written. Not while copies are under way."""
        if not self.is_blank:
            with interrupts_held(), torch.no_grad():
                for state in self.states.values():
                    for slot in state.slots:
                        slot.view.zero_()
        self.is_blank = False

    def looks_as_parameter(self) -> bool:
        """Whether each state is one plain tensor whose elements lie as those of the parameter."""
        shape, stride = tuple(self.parameter.shape), tuple(self.parameter.stride())
        slots = [state.slots for state in self.all]
        return all(
            len(one) == 1 and (one[0].shape, one[0].stride) == (shape, stride) for one in slots
        )

    def bytes_of_an_element(self) -> int:
        """Of all its states together."""
        return sum(state.slots[0].dtype.itemsize for state in self.all)


def _layout_of(parameter: Any) -> tuple[Any, ...]:
    plain = local(parameter)
    return parameter.shape, plain.shape, plain.stride(), plain.dtype, plain.device


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, Any]]:
    """Its parameters, each with the number of its group."""
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            yield number, parameter
