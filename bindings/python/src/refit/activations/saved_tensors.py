"""What autograd saves, as a storage and a view of it.

A tensor that autograd saves is handed over as one of three things, which are told apart when it is
asked for:

- ``Kept``: the tensor itself, on the device, and its version.
- ``Saved``: a view of a storage that may be away. It says all that a view is: size, strides,
  offset, type. Autograd owns it; when the last one of a storage is gone, its bytes are not needed
  any more.
- ``Wrapped``: a tensor that is made of others (DTensor, a quantized one), some of which are
  ``Saved``.

PyTorch checks versions only of what it saves itself, not of what hooks save, so it is done here:
a tensor that was changed in place after it was saved is refused with PyTorch's words.

Independent of where the bytes are, and of how they come back.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from refit.states.version_counter import counter_of

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class Kept(NamedTuple):
    """A tensor that stays where it is. Detached: a graph that held its own outputs would never
    end."""

    tensor: torch.Tensor
    version: int

    def checked(self) -> torch.Tensor:
        """The tensor; RuntimeError if it has been changed in place since it was saved."""
        tensor = self.tensor
        if tensor._version != self.version:
            _refuse_changed(tensor.dtype, tensor.size(), tensor._version, self.version)
        return tensor


class Wrapped(NamedTuple):
    """A tensor subclass, and what autograd was given for each tensor inside."""

    kind: Any
    inside: dict[str, Any]
    context: Any
    size: Any
    stride: Any


class Storage:
    """A storage that was saved. It lives as long as a ``Saved`` of it.

    ``memory`` is what it has on the device, None while it is away; then its bytes are in the arena,
    at ``arena_place`` of ``group``. They return with ``return_group``, the last group that has
    saved a view of it, for that is the first that the backward pass asks for.

    The forward pass alone changes ``order``, the number of the layer that saved it last;
    ``version``, that of the tensors which this layer saved; and ``view_count``, the number of its
    ``Saved``. ``number_in_layer`` is its number among the storages that its first layer saved.

    The backward pass counts in ``visit`` how often it has returned, and in ``asked_count`` how many
    views were asked for since; ``asked_twice`` is set once one was asked for two times in a visit.
    What changes after the forward pass is guarded by the lock of ``Groups``.
    """

    __slots__ = (
        "__weakref__",
        "arena_place",
        "asked_count",
        "asked_twice",
        "group",
        "memory",
        "nbytes",
        "number_in_layer",
        "order",
        "return_group",
        "stream",
        "version",
        "view_count",
        "visit",
    )

    def __init__(
        self, memory: torch.UntypedStorage, nbytes: int, order: int, number_in_layer: int
    ) -> None:
        self.memory: Any = memory
        self.nbytes = nbytes
        self.order = order
        self.number_in_layer = number_in_layer
        self.group: Any = None
        self.return_group: Any = None
        self.arena_place = -1
        self.view_count = 0
        self.visit = 0
        self.asked_count = 0
        self.asked_twice = False
        self.stream = 0
        self.version = 0

    def return_to(self, memory: torch.UntypedStorage, stream: int) -> None:
        """Its bytes come back to this memory, which is used on this stream."""
        self.memory = memory
        self.stream = stream
        self.visit += 1
        self.asked_count = 0

    def ask(self, saved: "Saved") -> None:
        """A view was asked for. Once all were, the memory is theirs who asked: with retain_graph it
        comes another time."""
        if saved.visit == self.visit:
            self.asked_twice = True
            return
        saved.visit = self.visit
        self.asked_count += 1
        if self.asked_count == self.view_count and not self.asked_twice:
            self.memory = None


class Saved:
    """A view of a storage, as autograd holds it."""

    __slots__ = (
        "conjugate",
        "counter",
        "dtype",
        "negative",
        "offset",
        "size",
        "storage",
        "stride",
        "version",
        "visit",
    )

    def __init__(self, storage: Storage, tensor: torch.Tensor, empty: torch.Tensor) -> None:
        """``empty``: a strided tensor without elements."""
        self.storage = storage
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.dtype = tensor.dtype
        self.conjugate = tensor.is_conj()
        self.negative = tensor.is_neg()
        self.counter = counter_of(tensor, empty)
        self.version = tensor._version
        self.visit = 0
        storage.view_count += 1

    def rebuilt(self, memory: Any) -> torch.Tensor:
        """The tensor, over memory of the device that has its bytes."""
        made = torch.empty(0, dtype=self.dtype, device=memory.device)
        made.set_(memory, self.offset, self.size, self.stride)
        if self.conjugate:
            made = torch._conj(made)
        if self.negative:
            made = torch._neg_view(made)
        return made

    def check(self) -> None:
        """RuntimeError if the tensor has been changed in place since it was saved."""
        if self.counter._version != self.version:
            _refuse_changed(self.dtype, self.size, self.counter._version, self.version)


def keep(tensor: torch.Tensor) -> Kept:
    """What autograd gets for a tensor that stays."""
    return Kept(tensor.detach(), tensor._version)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a view of one storage and nothing else: neither a nested nor a quantized
    one, which has more than sizes and strides, nor one that a transform of ``torch.func`` wraps."""
    return (
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor._is_zerotensor())
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def wrap(tensor: torch.Tensor, save: Callable[[torch.Tensor], Any]) -> Any:
    """Saves what a tensor subclass is made of: tensors, and others, a device mesh for one, as they
    are. One that cannot be taken apart is kept, and so is one of whose tensors none is ``Saved``.
    The result of a collective that may be under way is never looked into. Of a jagged tensor its
    values may leave: it is known by which tensor its offsets are, and not by what they say."""
    if not is_traceable_wrapper_subclass(tensor) or hasattr(tensor, "trigger_wait"):
        return keep(tensor)
    names, context = tensor.__tensor_flatten__()
    inside = {name: getattr(tensor, name) for name in names}
    inside = {n: save(one) if _may_leave(tensor, one) else one for n, one in inside.items()}
    if not any(isinstance(one, (Saved, Wrapped)) for one in inside.values()):
        return keep(tensor)
    return Wrapped(type(tensor), inside, context, tensor.size(), tensor.stride())


def _may_leave(tensor: torch.Tensor, inner: Any) -> bool:
    return isinstance(inner, torch.Tensor) and not (
        tensor.is_nested and not (inner.is_floating_point() or inner.is_complex())
    )


def unwrap(one: Wrapped, load: Callable[[Any], torch.Tensor]) -> torch.Tensor:
    """The tensor subclass again."""
    kinds = Kept, Saved, Wrapped
    inside = {n: load(one) if isinstance(one, kinds) else one for n, one in one.inside.items()}
    made: torch.Tensor = one.kind.__tensor_unflatten__(inside, one.context, one.size, one.stride)
    return made


def is_owned(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor is a parameter or a buffer, a view of a parameter, or a leaf that gets
    a gradient: memory that its owner holds."""
    base = tensor._base
    return (
        type(tensor) is not torch.Tensor
        or (base is not None and isinstance(base, torch.nn.Parameter))
        or (tensor.requires_grad and tensor.is_leaf)
    )


def _refuse_changed(dtype: torch.dtype, size: Any, version: int, expected: int) -> None:
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: a tensor of {str(dtype).removeprefix('torch.')} {list(size)} is at version "
        f"{version}; expected version {expected} instead. Hint: enable anomaly detection to find "
        "the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True)."
    )
