"""Memory of other libraries' objects, by Python's buffer protocol and by DLPack, both ways.

Written for ctypes alone, so that weights can be sent and read without NumPy and PyTorch. A ``Span``
says where bytes lie and holds what keeps them there. What the bytes mean is known by the caller.
"""

import ctypes
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

from refit._c.device import stream_of
from refit._c.dtypes import DTYPES, Dtype
from refit.errors import InvalidError, UnsupportedError

CPU: Final = 1
CUDA: Final = 2
_ON_HOST = frozenset({CPU, 3, 11})  # kDLCUDAHost and kDLROCMHost are host memory, too

# Codes of DLPack's DLDataTypeCode, with the bits of an element.
_BY_CODE = {
    (6, 8): "BOOL",
    (0, 8): "I8",
    (0, 16): "I16",
    (0, 32): "I32",
    (0, 64): "I64",
    (1, 8): "U8",
    (1, 16): "U16",
    (1, 32): "U32",
    (1, 64): "U64",
    (2, 16): "F16",
    (2, 32): "F32",
    (2, 64): "F64",
    (4, 16): "BF16",
    (5, 64): "C64",
    (10, 8): "F8_E4M3",
    (12, 8): "F8_E5M2",
    (14, 8): "F8_E8M0",
}
_CODES = {name: pair for pair, name in _BY_CODE.items()}
_BY_FORMAT = {"?": "BOOL", "e": "F16", "f": "F32", "d": "F64"}


class Span(NamedTuple):
    """Bytes somewhere: ``held`` keeps them alive. ``device`` is a CUDA device's number, or -1."""

    dtype: Dtype
    shape: tuple[int, ...]
    pointer: int
    device: int
    held: Any


class _PyBuffer(ctypes.Structure):
    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def address_of(memory: memoryview) -> int:
    """Where contiguous memory begins; good while ``memory`` is neither released nor collected."""
    view = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(memory), ctypes.byref(view), 0)
    try:
        return view.buf or 0
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(view))


def contiguous(memory: Any) -> memoryview:
    """Any buffer as bytes one after another; copied only if they are not. InvalidError."""
    try:
        view = memoryview(memory)
    except TypeError:
        raise InvalidError(
            f"a {type(memory).__name__} is not a tensor: give a torch.Tensor, a NumPy array, "
            "something with __dlpack__, or any buffer"
        ) from None
    return view if view.c_contiguous else memoryview(view.tobytes())


def of_buffer(memory: Any) -> Span:
    """Memory of the buffer protocol, typed by its format. InvalidError, UnsupportedError."""
    view = contiguous(memory)
    source = memoryview(memory)
    letter = source.format.lstrip("@=")
    name = _BY_FORMAT.get(letter)
    if name is None and letter in ("b", "h", "i", "l", "q", "n", "B", "H", "I", "L", "Q", "N"):
        name = f"{'I' if letter.islower() else 'U'}{source.itemsize * 8}"
    if name is None:
        raise UnsupportedError(
            f"buffers of format {source.format!r} cannot be sent: say what the bytes are with "
            "refit.RawTensor"
        )
    return Span(DTYPES[name], tuple(source.shape or ()), address_of(view), -1, view)


class _Tensor(ctypes.Structure):  # DLTensor
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):  # DLManagedTensor
    _fields_ = (
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_new_capsule = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)(("PyCapsule_New", ctypes.pythonapi))
_libc = ctypes.CDLL(None)
_malloc = _libc.malloc
_malloc.restype, _malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
_free = _libc.free
_free.restype, _free.argtypes = None, [ctypes.c_void_p]
_KIND = b"dltensor"


def _is_dense(tensor: _Tensor, shape: tuple[int, ...]) -> bool:
    if not tensor.strides or 0 in shape:
        return True
    expected = 1
    for length, stride in zip(
        reversed(shape), reversed(tensor.strides[: tensor.ndim]), strict=True
    ):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def of_dlpack(source: Any) -> Span:
    """The memory of an object with ``__dlpack__``, on the host or on a CUDA device.

    On a device the stream that the bytes are read after waits for its work. InvalidError (not
    contiguous), UnsupportedError (another kind of device, a type that no version can carry).
    """
    kind, number = source.__dlpack_device__()
    if kind not in _ON_HOST and kind != CUDA:
        raise UnsupportedError(f"weights on DLPack device type {kind} cannot be sent")
    capsule = source.__dlpack__(stream=stream_of(number)) if kind == CUDA else source.__dlpack__()
    tensor = _Managed.from_address(_get_pointer(capsule, _KIND)).tensor
    name = _BY_CODE.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if name is None:
        raise UnsupportedError(
            f"DLPack elements of code {tensor.code} and {tensor.bits} bits cannot be sent"
        )
    shape = tuple(tensor.shape[: tensor.ndim])
    if not _is_dense(tensor, shape):
        raise InvalidError("this DLPack tensor is not contiguous: make it so before it is sent")
    pointer = (tensor.data or 0) + tensor.byte_offset
    return Span(DTYPES[name], shape, pointer, number if kind == CUDA else -1, capsule)


class DescriptionMemory(Protocol):
    """Memory at ``address``, given back with its last reference, unless ``mine`` is False."""

    mine: bool

    @property
    def address(self) -> int:
        """Where it begins."""


class OwnMemory:
    """Memory that ``free`` of the C library frees. The owner holds nothing of what it describes."""

    mine = True
    address = 0

    def __init__(self, nbytes: int) -> None:
        self.address = _malloc(nbytes) or 0
        if not self.address:
            raise MemoryError("no memory for a DLPack description")

    def __del__(self, _free: Callable[[int], object] = _free) -> None:
        if self.mine:
            _free(self.address)


def to_dlpack(
    dtype: Dtype,
    shape: tuple[int, ...],
    pointer: int,
    device: int,
    memory: Callable[[int], DescriptionMemory] = OwnMemory,
    release: Any = _free,
) -> Any:
    """A DLPack capsule for memory that is borrowed.

    ``memory`` gives so many bytes for the description, and ``release`` is the C function that the
    consumer ends it with, on any thread and without Python: what keeps the memory mapped belongs to
    that memory, which is the consumer's once there is a capsule. UnsupportedError for types that
    DLPack has no code for.
    """
    pair = _CODES.get(dtype.name)
    if pair is None:
        raise UnsupportedError(f"DLPack has no code for {dtype.name}: read .bytes")
    rank = len(shape)
    held = memory(ctypes.sizeof(_Managed) + 16 * rank)
    block = held.address
    dense = (ctypes.c_int64 * (2 * rank)).from_address(block + ctypes.sizeof(_Managed))
    step = 1
    for i in reversed(range(rank)):
        dense[i], dense[rank + i] = shape[i], step
        step *= max(shape[i], 1)
    managed = _Managed.from_address(block)
    numbers = ctypes.POINTER(ctypes.c_int64)
    managed.tensor = _Tensor(
        pointer, CPU if device < 0 else CUDA, max(device, 0), rank, pair[0], pair[1], 1,
        ctypes.cast(block + ctypes.sizeof(_Managed), numbers),
        ctypes.cast(block + ctypes.sizeof(_Managed) + 8 * rank, numbers), 0,
    )  # fmt: skip
    managed.context = None
    managed.deleter = ctypes.cast(release, ctypes.c_void_p).value
    capsule = _new_capsule(block, _KIND, None)
    held.mine = False  # by no call: Ctrl-C would be raised after it, and the capsule be lost
    return capsule
