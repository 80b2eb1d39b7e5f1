"""Tensors whose memory is away: what reads or writes one brings the memory back first.

While the memory of a tensor is away, the tensor has a class that is derived from its own and has a
``__torch_function__``. PyTorch calls that before it reads or writes the tensor: the memory comes
back, the tensor gets its own class again, and the operation goes on. What asks only for metadata
(shape, dtype, device, storage, ``.grad``) brings nothing back. ``zero_()`` of a gradient, which
``zero_grad(set_to_none=False)`` calls, is carried out when the memory is back. A backward pass asks
no class: a hook on the parameter brings the gradient back before it is added to. Tensor subclasses
that wrap others, such as DTensor, get such a class, and so do the tensors in them.

An ordinary step pays nothing: when nothing is away no tensor has such a class.

PyTorch calls no ``__torch_function__`` for what reaches memory by another way. A tensor that is
away has no memory there, so these end the process or fault on the GPU:

- views that were made before, and addresses that were taken before;
- ``torch.tensor(t)``, ``x.new_tensor(t)``, ``torch.as_tensor`` and ``torch.asarray`` that copy;
- ``x.data = t``, ``torch.utils.dlpack.to_dlpack(t)``, ``y.backward(t)``; a backward pass that adds
  to t after ``p.grad = t``, where t was the gradient of another parameter, or p was swapped;
- ``torch.vmap``, ``torch.func`` and TorchScript functions;
- extension modules in C++ that take tensors themselves;
- code within ``torch._C.DisableTorchFunctionSubclass()``; a signal handler that comes while such
  code runs, as ``checkpoint()`` and ``accumulating`` do for a moment, and reads a tensor itself.

``torch.utils.swap_tensors`` exchanges classes as well as memory, and ``as_subclass`` may be given
the class: such a tensor brings all back when it is used, and then gets its own class.

What a signal handler, a finalizer or a log handler does with states in the middle of an
``offload``, ``restore`` or ``wait`` of its thread is a BusyError (see ``cycle``).

The hooks on an optimizer (see ``hooks``) need none of this: within ``step`` all of that may be
done. Independent of how memory comes back.
"""

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from operator import methodcaller
from typing import Any, ClassVar, Protocol, cast

import torch

from refit._c.waiting import interrupts_held
from refit.errors import BusyError, StateError

_PROPERTIES = (
    "shape dtype device layout ndim itemsize nbytes name output_nr _version grad grad_fn is_leaf "
    "requires_grad retains_grad is_cpu is_cuda is_meta is_mkldnn is_nested is_quantized is_sparse "
    "is_sparse_csr is_xpu is_mps _backward_hooks _post_accumulate_grad_hooks"
)
_METHODS = (
    "dim ndimension size stride numel nelement element_size storage_offset untyped_storage "
    "get_device is_contiguous is_floating_point is_inference is_signed _is_view "
    "requires_grad_ detach_ retain_grad register_hook register_post_accumulate_grad_hook __len__"
)
_FUNCTIONS = "numel is_floating_point is_inference is_signed"
"""``is_complex`` is not among them: ``torch.distributed`` asks it of a tensor, and then writes the
memory in C++, where no class is asked."""


def _metadata_only() -> frozenset[Any]:
    """Functions that PyTorch gives to ``__torch_function__`` for uses that touch no byte."""
    tensor: Any = torch.Tensor
    found = [getattr(tensor, name).__get__ for name in _PROPERTIES.split() if hasattr(tensor, name)]
    found += [getattr(tensor, name) for name in _METHODS.split()]
    found += [getattr(torch, name) for name in _FUNCTIONS.split()]
    found += [tensor.grad.__set__, tensor.grad.__delete__, tensor.requires_grad.__set__]
    return frozenset(found)


_METADATA_ONLY = _metadata_only()
_STORAGE = torch.Tensor.untyped_storage


def _reads() -> frozenset[Any]:
    """Functions that read tensors, and give none that shares memory with them."""
    names = ["norm", "isfinite", "isnan", "isinf", "clone", "abs", "square", "sum", "mean"]
    names += ["amax", "amin", "all", "any"]
    found = [getattr(torch.Tensor, name) for name in names]
    found += [getattr(torch, name) for name in names]
    return frozenset([*found, torch.linalg.vector_norm, torch._foreach_norm])


_READS = _reads()
_FOREACH: list[Any] = torch.utils._foreach_utils._foreach_supported_types
"""The classes whose tensors ``clip_grad_norm_`` and its like handle many at a time. What they do
one by one is slower, and a norm may have another last bit."""
_DEEPCOPY = torch.Tensor.__deepcopy__.__code__
"""The code that copies a tensor. It fails if the class of the tensor changes meanwhile."""
_HOOK = "refit"
"""The key of the hook among a parameter's others, whose keys are numbers."""


class OffloadedTensor:
    """The second base of the class that a tensor has while its memory is away."""

    __slots__ = ()
    kind: ClassVar[type]
    """The class that the tensor has otherwise."""
    owner: ClassVar["OffloadedTensors"]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """PyTorch calls it in place of ``func``."""
        given = kwargs or {}
        if func in _METADATA_ONLY and not (func is _STORAGE and cls.owner.in_place is not None):
            return torch._C._disabled_torch_function_impl(func, types, args, given)
        if func == torch.Tensor.zero_ and cls.owner.zero(args):
            return args[0]
        if func == torch._foreach_zero_ and args and cls.owner.zero(args[0]):
            here = [tensor for tensor in args[0] if not cls.owner.is_zero(tensor)]
            if here:
                func(here)
            return args[0]
        if cls.owner.in_place is not None:
            found = _use_in_place(func, types, args, given)
            if found is not NotImplemented:
                return found
        if cls.owner.is_at_hand and not torch.compiler.is_compiling():
            if func is torch.Tensor.__deepcopy__:
                return cls.owner.copy(args[0], func, args, given)
            if sys._getframe(1).f_code is _DEEPCOPY:
                raise BusyError(
                    "a step began while copy.deepcopy read a state in another thread: copy states "
                    "in the thread that steps, or within controller.checkpoint(), which refuses "
                    "steps"
                )
        for kind in types:
            if issubclass(kind, OffloadedTensor):
                kind.owner.bring_back()
        _unmark_stray((args, given))
        return func(*args, **given)


class InPlaceUse(Protocol):
    """An owner that has its tensors read elsewhere, while they can still be used where they are."""

    def may_scale(self, tensors: Sequence[Any]) -> bool:
        """Whether tensors, of which some are being read, may be multiplied by a factor now. Waits
        for what reads them."""

    def scaled(self, tensors: Sequence[Any], factor: Any) -> None:
        """They were, by a number or a tensor of one."""

    def is_base(self, tensor: Any) -> bool:
        """Whether it is memory of which only views have been taken, and more of them may be."""


def _use_in_place(func: Any, types: Sequence[type], args: Any, kwargs: Any) -> Any:
    """Carries out what only reads tensors that stay usable in place, or multiplies them by one
    factor, as the clipping of gradients and a GradScaler do. NotImplemented for all else."""
    owners = {id(kind.owner): kind.owner for kind in types if issubclass(kind, OffloadedTensor)}
    in_place_uses = [one.in_place for one in owners.values()]
    if None in in_place_uses or kwargs.get("out") is not None:
        return NotImplemented
    is_cut = func is torch.as_strided and bool(args)
    if func in _READS or (is_cut and all(one.is_base(args[0]) for one in in_place_uses if one)):
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs)
    scaling = _scaling_of(func, args, kwargs)
    if scaling is None or not all(one.may_scale(scaling[0]) for one in in_place_uses if one):
        return NotImplemented
    found = torch._C._disabled_torch_function_impl(func, types, args, kwargs)
    for one in in_place_uses:
        if one is not None:
            one.scaled(*scaling)
    return found


def _scaling_of(func: Any, args: Any, kwargs: Any) -> tuple[Sequence[Any], Any] | None:
    """The tensors that a call multiplies in place by a factor, and the factor; None for another
    call."""
    if kwargs:
        return None
    if func is torch._amp_foreach_non_finite_check_and_unscale_ and len(args) == 3:
        tensors, factor = args[0], args[2]
    elif func is torch._foreach_mul_ and len(args) == 2:
        tensors, factor = args
    elif func is torch.Tensor.mul_ and len(args) == 2:
        tensors, factor = [args[0]], args[1]
    else:
        return None
    factor = _same_on_all_ranks(factor)
    if isinstance(factor, torch.Tensor):
        fits = type(factor) is torch.Tensor and factor.numel() == 1
        fits = fits and factor.dtype == torch.float32
    else:
        fits = type(factor) in (int, float)
    return (tensors, factor) if fits else None


def _same_on_all_ranks(factor: Any) -> Any:
    """The tensor in a DTensor that each rank has whole, as the norm of gradients that are DTensors
    gives one; else what is given."""
    placements = getattr(factor, "placements", ())
    is_whole = placements and all(one.is_replicate() for one in placements)
    return factor._local_tensor if is_whole else factor


def _unmark_stray(value: Any) -> None:
    """Gives tensors their own class that ``unmark`` did not know of: ``swap_tensors`` exchanged
    their class, or ``as_subclass`` gave it to them. StateError for one whose memory may be away.
    """
    if isinstance(value, OffloadedTensor):
        if value.owner.is_any:
            raise StateError(
                f"the memory of this {kind_of(value).__name__} did not come back with the others: "
                "call restore() on its controller, then use it again"
            )
        cast(Any, value).__class__ = kind_of(value)
    elif isinstance(value, list | tuple):
        for one in value:
            _unmark_stray(one)
    elif isinstance(value, dict):
        _unmark_stray(list(value.values()))


def untouched() -> AbstractContextManager[Any]:
    """A block in which this thread handles tensors that are away as they are, and nothing comes
    back. No code of others belongs in it; a signal handler may run in it, so memory that a handler
    could use must be there, or the block be short."""
    block: AbstractContextManager[Any] = torch._C.DisableTorchFunctionSubclass()
    return block


def call_untouched(func: Callable[..., Any], *arguments: Any) -> Any:
    """Such a block for one call of what is written in C: no signal handler runs in it."""
    return torch._C._disabled_torch_function_impl(func, (), arguments, {})


def kind_of(tensor: Any) -> type:
    """The class of a tensor, whether its memory is away or not."""
    kind = type(tensor)
    return kind.kind if issubclass(kind, OffloadedTensor) else kind


class OffloadedTensors:
    """The tensors of one cycle whose memory is away, in groups that come back together."""

    def __init__(
        self,
        bring_back: Callable[[], None],
        lock: AbstractContextManager[Any],
        zeroable: int,
        at_hand: Callable[[], None] | None = None,
        in_place: InPlaceUse | None = None,
    ) -> None:
        """``bring_back`` brings all back and unmarks all groups, in any thread; ``lock`` is held
        by ``mark`` and ``unmark``; ``zeroable`` is the group that nothing else reads meanwhile.
        ``at_hand``: as ``bring_back``, for a thread that holds the lock. ``in_place``: the memory
        is there, and what only reads the tensors, or multiplies them, brings nothing back.
        """
        self.bring_back = bring_back
        self.in_place = in_place
        self._lock = lock
        self._at_hand = at_hand
        self._zeroable = zeroable
        self._classes: dict[type, type] = {}
        self._listed = 0
        """How many of the classes stand for their own in ``_FOREACH``; 0 if no tensor is away."""
        self._tensors: dict[int, Sequence[Any]] = {}
        self._can_be_zeroed: set[int] = set()
        self._hooked: dict[int, list[dict[Any, Any]]] = {}
        self._zeroed: dict[int, Any] = {}

    def mark(self, group: int, tensors: Sequence[Any]) -> None:
        """From now on what uses one of these tensors, which are all of their group, brings it back.

        Call it again after a failure, with the same.
        """
        self._tensors[group] = tensors
        if group == self._zeroable:
            self._can_be_zeroed = set(map(id, tensors))
        plain = self._class_of(torch.Tensor)
        for tensor in tensors:
            kind = type(tensor)
            if kind is torch.Tensor:
                tensor.__class__ = plain
            elif not issubclass(kind, OffloadedTensor):
                tensor.__class__ = self._class_of(kind)
        if self._listed < len(self._classes):
            self._list_classes()

    def watch(self, group: int, parameters: Iterable[Any]) -> None:
        """Brings back before a backward pass adds to a gradient of one of the parameters, whose
        gradients are in the group: a backward pass does not look at the class."""
        hooked = self._hooked.setdefault(group, [])
        with untouched():
            for parameter in parameters:
                if not parameter.requires_grad:
                    continue
                hooks = parameter._backward_hooks
                if hooks is None:  # what register_hook does, which takes 8 µs for its handle
                    hooks = parameter._backward_hooks = OrderedDict()
                    if parameter.grad_fn is not None:
                        parameter.grad_fn._register_hook_dict(parameter)
                elif parameter.grad_fn is None:
                    # swap_tensors leaves the dictionary here and its registration with the other
                    # tensor, where no backward pass finds it: this registers it again.
                    parameter._backward_hooks = hooks
                hooked.append(hooks)
                hooks[_HOOK] = self._early

    def _class_of(self, kind: type) -> type:
        """The class of such tensors while they are away; their own, if none derives from it."""
        if kind not in self._classes:
            names: dict[str, Any] = {
                "__slots__": (),
                "__module__": __name__,
                "kind": kind,
                "owner": self,
            }
            if self.in_place is not None and hasattr(kind, "_local_tensor"):
                names["_local_tensor"] = self._opened(kind)
            try:
                made = type(kind)(f"Away{kind.__name__}", (OffloadedTensor, kind), names)
            except Exception:  # whatever a metaclass or __init_subclass__ of others raises
                made = kind
            self._classes[kind] = made
        return self._classes[kind]

    def _opened(self, kind: Any) -> property:
        """The tensor in a DTensor. Code that takes it may make another DTensor of it, in whose
        operations no class is asked: it counts as a use."""
        inner = kind._local_tensor

        def take(tensor: Any) -> Any:
            if torch._C._is_torch_function_enabled():
                self.bring_back()
                _unmark_stray(tensor)
            return inner.__get__(tensor)

        return property(take, inner.__set__)

    def _early(self, _grad: torch.Tensor) -> None:
        self.bring_back()

    _early.__torch_unserializable__ = True  # type: ignore[attr-defined]  # no warning of it

    @property
    def is_at_hand(self) -> bool:
        """Whether a tensor is copied while no other thread can let it go away."""
        return self._at_hand is not None

    def copy(self, tensor: Any, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Brings all back, and calls what copies the tensor before they may go away again."""
        with self._lock:
            if self._at_hand is not None:
                self._at_hand()
            _unmark_stray(tensor)
            return func(*args, **kwargs)

    def zero(self, tensors: Iterable[Any]) -> bool:
        """Notes that tensors will be zeros when they are back. False if none of them can be."""
        with self._lock:
            known = self._can_be_zeroed
            taken = {id(one): one for one in tensors if id(one) in known and _can_wait(one)}
            self._zeroed.update(taken)
            return bool(taken)

    @property
    def is_any(self) -> bool:
        """Whether any group of tensors has not come back."""
        return any(self._tensors.values())

    def is_zero(self, tensor: Any) -> bool:
        """Whether a tensor will be zeros when it is back, whatever its bytes are now."""
        return id(tensor) in self._zeroed

    def unmark(self, *groups: int) -> None:
        """The bytes of these groups are back, or the current stream waits for them: their tensors
        are what they were. Call it again after a failure."""
        plain = self._classes.get(torch.Tensor)
        for group in groups:
            if group == self._zeroable:
                self._fill_zeros()
            for hooks in self._hooked.get(group, ()):
                hooks.pop(_HOOK, None)
            self._hooked[group] = []
            for tensor in self._tensors.get(group, ()):
                kind = type(tensor)
                if kind is plain:
                    tensor.__class__ = torch.Tensor
                elif issubclass(kind, OffloadedTensor):
                    tensor.__class__ = kind.kind
            self._tensors[group] = ()
        if self._listed and not self.is_any:
            self._unlist_classes()

    def unmark_all(self) -> None:
        """``unmark`` for every group."""
        self.unmark(*self._tensors)

    def _list_classes(self) -> None:
        """Away tensors are handled many at a time where those of their own class are."""
        for kind, away in self._classes.items():
            if kind in _FOREACH and away not in _FOREACH:
                _FOREACH.append(away)
        self._listed = len(self._classes)

    def _unlist_classes(self) -> None:
        """Ends that: a class that stays in the list holds this object alive."""
        for kind, away in self._classes.items():
            if away in _FOREACH and away is not kind:
                _FOREACH.remove(away)
        self._listed = 0

    def _fill_zeros(self) -> None:
        with interrupts_held(), torch.no_grad():
            for tensor in self._zeroed.values():
                call_untouched(methodcaller("zero_"), tensor)
        self._zeroed.clear()
        self._can_be_zeroed.clear()


def _can_wait(tensor: Any) -> bool:
    """Whether zeroing a tensor later is the same as now."""
    recorded = tensor.requires_grad and torch.is_grad_enabled()
    return not (recorded or tensor.is_inference())
