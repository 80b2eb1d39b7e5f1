"""Element types: the names of the safetensors format, and what NumPy and PyTorch call them.

refit never looks at values: a type is a name, a number in the C library and a count of bits.
Neither NumPy nor PyTorch is imported before one of their types is asked for. What NumPy has no type
for (BF16, the 8-bit floats) it knows through ml_dtypes, where that is installed.
"""

import functools
import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from refit._c import abi
from refit.errors import InvalidError, UnsupportedError

if TYPE_CHECKING:
    import numpy
    import torch


@dataclass(frozen=True, slots=True)
class Dtype:
    """One element type. ``numpy`` and ``torch`` are the names there, empty where there is none."""

    name: str
    number: int
    bits: int
    numpy: str
    torch: str
    pack: int = 1
    """Elements in one element of the PyTorch type: two of F4 make a float4_e2m1fn_x2."""

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor of this type, packed and rounded up."""
        return (math.prod(shape) * self.bits + 7) // 8


_ALL = (
    Dtype("BOOL", abi.REFIT_BOOL, 8, "bool", "bool"),
    Dtype("F4", abi.REFIT_F4, 4, "", "float4_e2m1fn_x2", 2),
    Dtype("F6_E2M3", abi.REFIT_F6_E2M3, 6, "", ""),
    Dtype("F6_E3M2", abi.REFIT_F6_E3M2, 6, "", ""),
    Dtype("U8", abi.REFIT_U8, 8, "uint8", "uint8"),
    Dtype("I8", abi.REFIT_I8, 8, "int8", "int8"),
    Dtype("F8_E5M2", abi.REFIT_F8_E5M2, 8, "float8_e5m2", "float8_e5m2"),
    Dtype("F8_E4M3", abi.REFIT_F8_E4M3, 8, "float8_e4m3fn", "float8_e4m3fn"),
    Dtype("F8_E8M0", abi.REFIT_F8_E8M0, 8, "float8_e8m0fnu", "float8_e8m0fnu"),
    Dtype("I16", abi.REFIT_I16, 16, "int16", "int16"),
    Dtype("U16", abi.REFIT_U16, 16, "uint16", "uint16"),
    Dtype("F16", abi.REFIT_F16, 16, "float16", "float16"),
    Dtype("BF16", abi.REFIT_BF16, 16, "bfloat16", "bfloat16"),
    Dtype("I32", abi.REFIT_I32, 32, "int32", "int32"),
    Dtype("U32", abi.REFIT_U32, 32, "uint32", "uint32"),
    Dtype("F32", abi.REFIT_F32, 32, "float32", "float32"),
    Dtype("C64", abi.REFIT_C64, 64, "complex64", "complex64"),
    Dtype("F64", abi.REFIT_F64, 64, "float64", "float64"),
    Dtype("I64", abi.REFIT_I64, 64, "int64", "int64"),
    Dtype("U64", abi.REFIT_U64, 64, "uint64", "uint64"),
)

DTYPES = MappingProxyType({dtype.name: dtype for dtype in _ALL})
"""All types by name."""

_BY_NUMBER = {dtype.number: dtype for dtype in _ALL}
_BY_NUMPY = {dtype.numpy: dtype for dtype in _ALL if dtype.numpy}
_EXTRA = frozenset({"BF16", "F8_E5M2", "F8_E4M3", "F8_E8M0"})


def by_name(name: str) -> Dtype:
    """The type of that name; InvalidError, with all names, if there is none."""
    found = DTYPES.get(name)
    if found is None:
        raise InvalidError(f"there is no element type {name!r}: it is one of {', '.join(DTYPES)}")
    return found


def by_number(number: int) -> Dtype:
    """The type with that number in the C library."""
    return _BY_NUMBER[number]


@functools.cache
def _torch_types() -> dict[Any, Dtype]:
    import torch

    named = ((getattr(torch, dtype.torch, None), dtype) for dtype in _ALL if dtype.torch)
    return {there: dtype for there, dtype in named if there is not None}


@functools.lru_cache(maxsize=64)  # asked for every tensor of every version
def of_torch(there: "torch.dtype") -> Dtype:
    """refit's type of a PyTorch type; UnsupportedError if no version can carry it."""
    found = _torch_types().get(there)
    if found is None:
        raise UnsupportedError(
            f"weights of type {there} cannot be sent: there is no such type in the safetensors "
            "format; convert them, or send their bytes as uint8"
        )
    return found


def to_torch(dtype: Dtype) -> "torch.dtype":
    """The PyTorch type; UnsupportedError where this PyTorch has none."""
    import torch

    found = getattr(torch, dtype.torch, None) if dtype.torch else None
    if found is None:
        raise UnsupportedError(
            f"PyTorch {torch.__version__} has no type for {dtype.name}: read the bytes "
            "(update[name].bytes)"
        )
    return found  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=64)  # NumPy composes a type's name at each call
def of_numpy(there: "numpy.dtype[Any]") -> Dtype:
    """refit's type of a NumPy type, ml_dtypes' included; UnsupportedError."""
    found = _BY_NUMPY.get(there.name)
    if found is None or not there.isnative:
        order = "" if there.isnative else " in the other byte order"
        raise UnsupportedError(
            f"weights of type {there.name}{order} cannot be sent: convert them, or say what their "
            "bytes are with refit.RawTensor"
        )
    return found


def to_numpy(dtype: Dtype, *, bits: bool = False) -> "numpy.dtype[Any]":
    """The NumPy type; ``bits``: for one that NumPy lacks, the unsigned integer of its width.

    Raises UnsupportedError for such a type without ``bits`` and without ml_dtypes, and for those
    whose elements are not whole bytes.
    """
    import numpy

    if dtype.numpy and dtype.name not in _EXTRA:
        return numpy.dtype(dtype.numpy)
    if bits and dtype.bits % 8 == 0:
        return numpy.dtype(f"uint{dtype.bits}")
    if dtype.numpy:
        try:
            import ml_dtypes  # type: ignore[import-not-found, unused-ignore]
        except ImportError:
            pass
        else:
            there: numpy.dtype[Any] = numpy.dtype(getattr(ml_dtypes, dtype.numpy))
            return there
    hint = "ask for their bits (bits=True) or install ml_dtypes" if dtype.numpy else "read .bytes"
    raise UnsupportedError(f"NumPy has no type for {dtype.name}: {hint}")
