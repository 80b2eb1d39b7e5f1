"""Where the bytes of a tensor lie, whosever tensor it is.

A tensor may be a ``torch.Tensor`` (host or CUDA), a NumPy array, anything with ``__dlpack__``, any
buffer, or ``RawTensor`` bytes. Neither PyTorch nor NumPy is imported here: an object of theirs
shows that they are. ``weight_of`` is called for every tensor that may have changed since the
version before, so it looks at as little as tells; ``marks_of`` tells of all at once that none has.
Independent of names, ties and versions.
"""

import sys
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from refit._c import dtypes
from refit.errors import InvalidError, StateError, UnsupportedError
from refit.weights import buffers
from refit.weights.buffers import Span


@dataclass(frozen=True, slots=True)
class RawTensor:
    """Bytes with their type and shape said: ``RawTensor(raw, "BF16", (1024, 512))``.

    ``memory`` is any buffer with just so many bytes, for types that its own library lacks.
    """

    memory: Any
    dtype: str
    shape: tuple[int, ...]


class Weight(NamedTuple):
    """One tensor and what its owner shows of it."""

    dtype: dtypes.Dtype
    shape: tuple[int, ...]
    device: int
    """The CUDA device's number, or -1 for host memory."""
    nbytes: int
    pointer: int
    """Where its first element is."""
    layout: Any
    """None: its bytes are in row order. Otherwise a value that identifies its layout."""
    tensor: Any
    """The object that holds the bytes."""

    @property
    def identity(self) -> Any:
        """Equal for tensors that are the same memory read the same way; None without bytes."""
        if self.nbytes == 0:
            return None
        return self.pointer, self.dtype.name, self.shape, self.layout


# ---- PyTorch


def _refuse_subclass(tensor: Any) -> None:
    kind = type(tensor).__name__
    if kind == "DTensor":
        raise UnsupportedError(
            "a DTensor has a part of its bytes here only: gather it (refit.named_weights does)"
        )
    raise UnsupportedError(
        f"a {kind} keeps its bytes in other tensors: send those, or a plain tensor made of it"
    )


def _check_kind(tensor: Any, torch: Any) -> None:
    kind = type(tensor)
    if kind is torch.nn.Parameter:
        return
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        _refuse_subclass(tensor)
    if torch.nn.parameter.is_lazy(tensor):
        raise InvalidError("this parameter has no shape yet: run the model once")


def cuda_number(tensor: Any) -> int:
    """The CUDA device of a PyTorch tensor; -1 for the host. UnsupportedError: elsewhere."""
    if tensor.is_cpu:
        return -1
    if not tensor.is_cuda:
        raise UnsupportedError(
            f"weights on device {tensor.device} cannot be sent: copy them to the host"
        )
    return int(tensor.device.index)


def _unpacked(shape: tuple[int, ...], dtype: dtypes.Dtype) -> tuple[int, ...]:
    if not shape:
        raise InvalidError(f"a packed {dtype.name} tensor needs a dimension")
    return (*shape[:-1], shape[-1] * dtype.pack)


def layout_of(tensor: Any) -> Any:
    """How a tensor of PyTorch is read: see ``Weight.layout``."""
    if tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
        return None
    return tensor.stride(), tensor.is_neg(), tensor.is_conj()


ASLEEP = "it has no memory now, as in an engine that sleeps: bring it back before a refit"


def lacks_memory(tensor: Any) -> bool:
    """Whether elements of a tensor of PyTorch lie beyond the end of its storage, which was emptied
    or cut."""
    count = tensor.numel()
    if count == 0:
        return False
    last = tensor.storage_offset()
    if tensor.is_contiguous():
        last += count - 1
    else:
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        last += sum((size - 1) * step for size, step in pairs)
    return bool(tensor.untyped_storage().nbytes() < (last + 1) * tensor.element_size())


def _of_torch(tensor: Any, torch: Any) -> Weight:
    if type(tensor) is not torch.Tensor:
        _check_kind(tensor, torch)
    if tensor.layout is not torch.strided:
        raise UnsupportedError(f"{tensor.layout} tensors cannot be sent: make it dense")
    dtype = dtypes.of_torch(tensor.dtype)
    device = cuda_number(tensor)
    shape = tuple(tensor.shape)
    layout = layout_of(tensor)
    nbytes = tensor.nbytes
    if lacks_memory(tensor):
        raise StateError(ASLEEP)
    if dtype.pack > 1:
        shape = _unpacked(shape, dtype)
    return Weight(dtype, shape, device, nbytes, tensor.data_ptr(), layout, tensor)


class Marks(NamedTuple):
    """By what tensors of PyTorch are told from others, or from themselves in other memory: lists of
    equal length. Holds no memory."""

    pointers: list[int]
    shapes: list[Any]
    strides: list[tuple[int, ...]]
    dtypes: list[Any]
    devices: list[int]
    bits: list[tuple[bool, bool]]
    """Whether they are read as conjugates, or negated."""
    storages: list[int]
    sizes: list[int]
    """Bytes of the storages, which may be emptied or cut."""


def marks_of(tensors: Collection[Any]) -> tuple[Marks | None, list[Any]]:
    """Those with which ``weight_of`` gives an equal ``Weight``, but for the object, in about a
    microsecond a tensor; and the storages, which hold the memory. None: not all are plain tensors
    of PyTorch."""
    torch = sys.modules.get("torch")
    if torch is None or False in {_is_plain(kind, torch) for kind in set(map(type, tensors))}:
        return None, []
    if {(it.layout, it.is_meta) for it in tensors} - {(torch.strided, False)}:
        return None, []
    storages = [it.untyped_storage() for it in tensors]
    marks = Marks(
        [it.data_ptr() for it in tensors],
        [it.shape for it in tensors],
        [it.stride() for it in tensors],
        [it.dtype for it in tensors],
        [it.get_device() for it in tensors],
        [(it.is_conj(), it.is_neg()) for it in tensors],
        [it._cdata for it in storages],
        [it.nbytes() for it in storages],
    )
    return marks, storages


def _is_plain(kind: type, torch: Any) -> bool:
    """Whether tensors of this class have their bytes themselves: parameters of engines do."""
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return True
    if not issubclass(kind, torch.Tensor) or hasattr(kind, "materialize"):  # one without a shape
        return False
    return bool(cast(Any, kind).__torch_dispatch__ is torch.Tensor.__torch_dispatch__)


def storage_of(tensor: Any) -> int:
    """Which memory of PyTorch a tensor lies in."""
    number: int = tensor.untyped_storage()._cdata
    return number


# ---- Others


def _of_numpy(array: Any) -> Weight:
    dtype = dtypes.of_numpy(array.dtype)
    layout = None if array.flags.c_contiguous else array.strides
    pointer = array.__array_interface__["data"][0]
    return Weight(dtype, array.shape, -1, array.nbytes, pointer, layout, array)


def _of_typed(typed: RawTensor) -> Weight:
    dtype = dtypes.by_name(typed.dtype)
    view = buffers.contiguous(typed.memory)
    shape = tuple(typed.shape)
    if view.nbytes != dtype.nbytes(shape):
        raise InvalidError(
            f"{dtype.name} of shape {shape} has {dtype.nbytes(shape)} bytes, but {view.nbytes} "
            "were given"
        )
    return _of_span(Span(dtype, shape, buffers.address_of(view), -1, view))


def _of_span(span: Span) -> Weight:
    nbytes = span.dtype.nbytes(span.shape)
    return Weight(span.dtype, span.shape, span.device, nbytes, span.pointer, None, span.held)


def weight_of(tensor: Any) -> Weight:
    """The description of a tensor, without a copy. InvalidError, UnsupportedError; StateError: it
    has no memory now."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _of_torch(tensor, torch)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(tensor, (numpy.ndarray, numpy.generic)):
        return _of_numpy(numpy.asarray(tensor))
    if isinstance(tensor, RawTensor):
        return _of_typed(tensor)
    if hasattr(tensor, "__dlpack__"):
        return _of_span(buffers.of_dlpack(tensor))
    return _of_span(buffers.of_buffer(tensor))


def weight_named(name: str, tensor: Any) -> Weight:
    """The same, with the name in the sentence of an error."""
    try:
        return weight_of(tensor)
    except (InvalidError, StateError, UnsupportedError) as why:
        raise type(why)(f"{name}: {why.text}") from why


def in_row_order(weight: Weight) -> Weight:
    """The same with its bytes in row order: itself, or a copy. May allocate."""
    if weight.layout is None:
        return weight
    tensor = weight.tensor
    if hasattr(tensor, "data_ptr"):
        tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
        return weight._replace(tensor=tensor, pointer=tensor.data_ptr(), layout=None)
    import numpy

    array = numpy.ascontiguousarray(tensor)
    pointer = array.__array_interface__["data"][0]
    return weight._replace(tensor=array, pointer=pointer, layout=None)
