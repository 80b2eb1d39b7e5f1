"""Copies of weights that do not stay what they are while others are looked at.

The tensors of a mapping or a list are there together: they may all be held, and two that lie in the
same memory are tied. An iterator may make each tensor in the memory of the one before, or put back
afterwards what it changed: the tensor that it gave counts only until the next one is asked for.
What a version is, is unknown here.
"""

import ctypes
import sys
from typing import Any

from refit.errors import UnsupportedError
from refit.manifest import Alias, Tensors, is_settled, pairs_of
from refit.source import Typed, Weight, in_row_order, weight_of

COPIED_BYTES = 1 << 20
"""Up to here a copy is cheaper than a call of the C library for this tensor alone."""


def settled(weights: Tensors) -> Tensors:
    """Weights that can be looked at before they are sent: of what an iterator gives, copies."""
    if is_settled(weights) or callable(getattr(weights, "manifest", None)):
        return weights
    return [(name, _copy(tensor)) for name, tensor in pairs_of(weights)]


def copied(weight: Weight) -> Weight | None:
    """The same in memory of its own; None for what is better, or can only be, read where it is."""
    if weight.layout is not None:
        return in_row_order(weight)
    if weight.nbytes > COPIED_BYTES:
        return None
    if weight.device < 0:
        raw = ctypes.string_at(weight.pointer, weight.nbytes) if weight.nbytes else b""
        place = ctypes.cast(ctypes.c_char_p(raw), ctypes.c_void_p).value
        return weight._replace(tensor=raw, pointer=place or 0)
    if not hasattr(weight.tensor, "data_ptr"):
        return None
    import torch

    made = weight.tensor.detach().reshape(-1).view(torch.uint8).clone()
    return weight._replace(tensor=made, pointer=made.data_ptr())


def _copy(tensor: Any) -> Any:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return tensor.detach().to("cpu", copy=True)
    if isinstance(tensor, Alias):
        return tensor
    if hasattr(tensor, "copy"):
        return tensor.copy()
    return _copy_of_bytes(weight_of(tensor))


def _copy_of_bytes(weight: Weight) -> Typed:
    """Of what cannot copy itself: ``Typed`` bytes, a memoryview, a view of an update."""
    if weight.device >= 0:
        raise UnsupportedError(
            "an iterator that says first what there is gave memory of a GPU that cannot be copied: "
            "declare the tensors before (publisher.declare), or give a mapping"
        )
    raw = bytearray()  # not bytes: Python has one object for all that are one byte long and equal
    if weight.nbytes:
        raw += (ctypes.c_char * weight.nbytes).from_address(weight.pointer)
    return Typed(raw, weight.dtype.name, weight.shape)
