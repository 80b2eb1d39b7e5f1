"""Tied tensors: found where all are there together, and checked where they come one by one.

What is tied travels once, so a tie that is none is another's weights under this name. Tensors that
are there together are tied if they are the same memory, read the same way. Of an iterator nothing
can be seen by where a tensor lies; a tie that was declared is held against the bytes.
"""

import ctypes
import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from refit.errors import InvalidError, UnsupportedError
from refit.source import Weight, in_row_order

if TYPE_CHECKING:
    from refit.manifest import TensorSpec


class Ties:
    """Finds tensors that are the same as an earlier one, by where they begin."""

    def __init__(self) -> None:
        self._begin: dict[int, list[tuple[Weight, str]]] = {}

    def find(self, name: str, weight: Weight) -> str | None:
        """The name of the first tensor that is the same, or None, and this is the first."""
        if weight.nbytes == 0:
            return None
        here = self._begin.get(weight.pointer)
        if here is None:
            self._begin[weight.pointer] = [(weight, name)]
            return None
        for one, first in here:
            if one.identity == weight.identity:
                return first
        here.append((weight, name))
        return None


class TieCheck:
    """Compares tensors that come one by one with those that they were declared as tied to."""

    def __init__(self, specs: Iterable["TensorSpec"]) -> None:
        self._of = {one.name: one.alias_of for one in specs if one.alias_of is not None}
        self._heads = set(self._of.values())
        self._seen: dict[str, tuple[str, bytes]] = {}

    def concerns(self, name: str) -> bool:
        """Whether it has a tie, so that its bytes must be seen."""
        return name in self._of or name in self._heads

    def see(self, name: str, weight: Weight) -> None:
        """Compares, before the tensor may change. InvalidError: its bytes are not those of the one
        that it was declared as tied to. Reads all of it."""
        head = self._of.get(name) or name
        digest = _digest(name, weight)
        first, known = self._seen.setdefault(head, (name, digest))
        if known != digest:
            raise InvalidError(
                f"{name} and {first} were declared as tied, but an iterator gave other bytes for "
                "the one than for the other: declare them with bytes of their own, or give them "
                "together in a mapping"
            )


def _digest(name: str, weight: Weight) -> bytes:
    if weight.device >= 0:
        weight = _on_host(name, weight)
    weight = in_row_order(weight)
    if weight.nbytes == 0:
        return b""
    memory = (ctypes.c_char * weight.nbytes).from_address(weight.pointer)
    return hashlib.blake2b(memory, digest_size=32).digest()


def _on_host(name: str, weight: Weight) -> Weight:
    if not hasattr(weight.tensor, "data_ptr"):
        raise UnsupportedError(
            f"{name} was declared as tied, and its bytes in a GPU's memory cannot be compared: "
            "give refit.Alias in its place, or all weights together in a mapping"
        )
    there = weight.tensor.detach().cpu()
    layout = None if weight.layout is None else (there.stride(), False, False)
    return weight._replace(tensor=there, pointer=there.data_ptr(), device=-1, layout=layout)
