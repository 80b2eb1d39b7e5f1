"""Which tensors a version has, and where their bytes lie: from named tensors of any library.

A tensor may be a ``torch.Tensor`` (host or CUDA), a NumPy array, anything with ``__dlpack__``, any
buffer, ``Typed`` bytes, or ``Alias``: the bytes of another name. Tensors that share memory and
layout are found to be tied and travel once. Neither PyTorch nor NumPy is imported here: an object
of theirs shows that they are. Nothing is known here of publishers and of versions.
"""

import ctypes
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from refit import _abi, _buffers, dtypes
from refit._buffers import Span
from refit.errors import InvalidError, UnsupportedError

_RANK_MAX = 8
_NO_ALIAS = 0xFFFFFFFF

Tensors: TypeAlias = Mapping[str, Any] | Iterable[tuple[str, Any]]
"""Named tensors: a mapping, or (name, tensor) pairs."""


@dataclass(frozen=True, slots=True)
class Alias:
    """In place of a tensor: it is tied to the one of that name, and travels no second time."""

    of: str


@dataclass(frozen=True, slots=True)
class Typed:
    """Bytes with their type and shape said: ``Typed(raw, "BF16", (1024, 512))``.

    ``memory`` is any buffer with just so many bytes, for types that its own library lacks.
    """

    memory: Any
    dtype: str
    shape: tuple[int, ...]


class TensorSpec(NamedTuple):
    """One tensor of a version, without its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    alias_of: str | None = None

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return dtypes.by_name(self.dtype).nbytes(self.shape)


class Weight(NamedTuple):
    """One tensor and what its owner shows of it; ``tie`` is equal for tensors that are the same."""

    dtype: dtypes.Dtype
    shape: tuple[int, ...]
    tie: Any
    device: int
    tensor: Any


# ---- From an object to what is known of it


def _refuse_subclass(tensor: Any) -> None:
    kind = type(tensor).__name__
    if kind == "DTensor":
        raise UnsupportedError(
            "a DTensor has a part of its bytes here only: gather it (refit.named_weights does)"
        )
    raise UnsupportedError(
        f"a {kind} keeps its bytes in other tensors: send those, or a plain tensor made of it"
    )


def _check_torch(tensor: Any, torch: Any) -> None:
    kind = type(tensor)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            _refuse_subclass(tensor)
        if torch.nn.parameter.is_lazy(tensor):
            raise InvalidError("this parameter has no shape yet: run the model once")
    if tensor.layout is not torch.strided:
        raise UnsupportedError(f"{tensor.layout} tensors cannot be sent: make it dense")


def _of_torch(tensor: Any, torch: Any) -> Weight:
    _check_torch(tensor, torch)
    dtype = dtypes.of_torch(tensor.dtype)
    place = tensor.device
    shape = tuple(tensor.shape)
    if place.type == "cpu":
        device = -1
    elif place.type == "cuda":
        device = place.index
    else:
        raise UnsupportedError(f"weights on device {place} cannot be sent: copy them to the host")
    layout = None if tensor.is_contiguous() else tensor.stride()
    tie = (tensor.data_ptr(), dtype.name, shape, layout, tensor.is_conj(), tensor.is_neg())
    if dtype.pack > 1:
        if not shape:
            raise InvalidError(f"a packed {dtype.name} tensor needs a dimension")
        shape = (*shape[:-1], shape[-1] * dtype.pack)
    return Weight(dtype, shape, tie if tensor.numel() else None, device, tensor)


def _of_numpy(array: Any) -> Weight:
    dtype = dtypes.of_numpy(array.dtype)
    layout = None if array.flags.c_contiguous else array.strides
    tie = (array.__array_interface__["data"][0], dtype.name, array.shape, layout)
    return Weight(dtype, array.shape, tie if array.size else None, -1, array)


def _of_typed(typed: Typed) -> Weight:
    dtype = dtypes.by_name(typed.dtype)
    view = _buffers.contiguous(typed.memory)
    shape = tuple(typed.shape)
    if view.nbytes != dtype.nbytes(shape):
        raise InvalidError(
            f"{dtype.name} of shape {shape} has {dtype.nbytes(shape)} bytes, but {view.nbytes} "
            "were given"
        )
    return _of_span(Span(dtype, shape, _buffers.address_of(view), -1, view))


def _of_span(span: Span) -> Weight:
    tie = (span.pointer, span.dtype.name, span.shape, None)
    there = span.dtype.nbytes(span.shape) > 0
    return Weight(span.dtype, span.shape, tie if there else None, span.device, span)


def weight_of(tensor: Any) -> Weight:
    """What is known of a tensor, without a copy. InvalidError, UnsupportedError."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _of_torch(tensor, torch)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(tensor, (numpy.ndarray, numpy.generic)):
        return _of_numpy(numpy.asarray(tensor))
    if isinstance(tensor, Typed):
        return _of_typed(tensor)
    if hasattr(tensor, "__dlpack__"):
        return _of_span(_buffers.of_dlpack(tensor))
    return _of_span(_buffers.of_buffer(tensor))


def bytes_of(weight: Weight) -> tuple[int, bool, Any]:
    """Where its contiguous bytes are, whether that is a copy, and what holds them."""
    tensor = weight.tensor
    if isinstance(tensor, Span):
        return tensor.pointer, False, tensor
    if hasattr(tensor, "data_ptr"):
        dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
        pointer = dense.data_ptr()
        return pointer, pointer != tensor.data_ptr(), dense
    import numpy

    array = numpy.ascontiguousarray(tensor)
    copied = not tensor.flags.c_contiguous
    return array.__array_interface__["data"][0], copied, array


# ---- From named tensors to a manifest


def pairs_of(tensors: Tensors) -> Iterator[tuple[str, Any]]:
    """The (name, tensor) pairs of a mapping or of an iterable of pairs. InvalidError."""
    for pair in tensors.items() if isinstance(tensors, Mapping) else tensors:
        try:
            name, tensor = pair
        except (TypeError, ValueError):
            raise InvalidError(
                "weights are a mapping or an iterable of (name, tensor) pairs, but one of them is "
                f"a {type(pair).__name__}"
            ) from None
        yield name, tensor


def _check_name(name: Any) -> None:
    if not isinstance(name, str):
        raise InvalidError(f"a tensor's name is text, and {name!r} is a {type(name).__name__}")
    if not name or "\0" in name:
        raise InvalidError(f"{name!r} cannot name a tensor: it is empty, or has a NUL in it")


class Collected(NamedTuple):
    """Named tensors, all at hand: what they are, and those that travel, by index."""

    specs: tuple[TensorSpec, ...]
    weights: list[tuple[int, Weight]]


def collect(tensors: Tensors) -> Collected:
    """Looks at all tensors and finds those that are tied. InvalidError, UnsupportedError."""
    specs: list[TensorSpec] = []
    weights: list[tuple[int, Weight]] = []
    first: dict[Any, str] = {}
    known: dict[str, TensorSpec] = {}
    for name, tensor in pairs_of(tensors):
        _check_name(name)
        if name in known:
            raise InvalidError(f"two tensors are named {name!r}")
        if type(tensor) is Alias:
            spec = _spec_of_alias(name, tensor, known)
        else:
            weight = _weight_named(name, tensor)
            tied = None if weight.tie is None else first.setdefault(weight.tie, name)
            spec = TensorSpec(name, weight.dtype.name, weight.shape, None if tied == name else tied)
            if spec.alias_of is None:
                weights.append((len(specs), weight))
        specs.append(spec)
        known[name] = spec
    return Collected(tuple(specs), weights)


def _weight_named(name: str, tensor: Any) -> Weight:
    try:
        return weight_of(tensor)
    except (InvalidError, UnsupportedError) as why:
        raise type(why)(f"{name}: {why.text}") from why


def _spec_of_alias(name: str, alias: Alias, known: Mapping[str, TensorSpec]) -> TensorSpec:
    target = known.get(alias.of)
    if target is None:
        raise InvalidError(f"{name} is tied to {alias.of!r}, which must come before it")
    return TensorSpec(name, target.dtype, target.shape, target.alias_of or target.name)


def specs_of(tensors: Any) -> tuple[TensorSpec, ...]:
    """What is declared of tensors: they themselves, ``TensorSpec``s, or what has ``manifest()``.

    Specs are anything with ``name``, ``dtype`` (a name, or PyTorch's type), ``shape`` and
    ``alias_of``. InvalidError, UnsupportedError.
    """
    if callable(getattr(tensors, "manifest", None)):
        return tuple(_spec_like(one) for one in tensors.manifest())
    pairs = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
    if all(hasattr(one, "alias_of") for one in pairs):
        return tuple(_spec_like(one) for one in pairs)
    return collect(pairs).specs


def _spec_like(one: Any) -> TensorSpec:
    if type(one) is TensorSpec:
        return one
    kind = one.dtype if isinstance(one.dtype, str) else dtypes.of_torch(one.dtype).name
    return TensorSpec(one.name, kind, tuple(one.shape), one.alias_of)


def to_c(specs: Iterable[TensorSpec]) -> Any:
    """The manifest as the C library takes it: an array of refit_tensor. InvalidError."""
    specs = tuple(specs)
    index = {spec.name: i for i, spec in enumerate(specs)}
    array = (_abi.refit_tensor * len(specs))()
    for spec, out in zip(specs, array, strict=True):
        _check_name(spec.name)
        if len(spec.shape) > _RANK_MAX:
            raise InvalidError(
                f"{spec.name} has {len(spec.shape)} dimensions: {_RANK_MAX} are the most"
            )
        if spec.alias_of is not None and spec.alias_of not in index:
            raise InvalidError(f"{spec.name} is tied to {spec.alias_of!r}, which is not there")
        out.size = ctypes.sizeof(_abi.refit_tensor)
        out.name = _encode(spec.name)
        out.dtype = dtypes.by_name(spec.dtype).number
        out.rank = len(spec.shape)
        out.shape[: out.rank] = spec.shape
        out.bytes = spec.nbytes
        out.alias_of = _NO_ALIAS if spec.alias_of is None else index[spec.alias_of]
    return array


def _encode(name: str) -> bytes:
    try:
        return name.encode()
    except UnicodeEncodeError:
        raise InvalidError(f"{name!r} cannot name a tensor: it is not UTF-8") from None
