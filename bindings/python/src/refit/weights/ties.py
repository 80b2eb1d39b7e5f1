"""Tied tensors: found where all are there together, and checked where they come one by one.

Tied tensors travel once, so a wrong tie would give a name the weights of another tensor. Tensors
that are there together are tied if they are the same memory, read the same way. Where the tensors
of a version come in several calls, or from an iterator, equal addresses prove nothing: the memory
of an earlier tensor may have been reused. There a declared tie is checked by comparing bytes.
"""

import ctypes
import hashlib
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from refit.errors import InvalidError, UnsupportedError
from refit.weights.source import Weight, in_row_order

if TYPE_CHECKING:
    from refit.weights.manifest import TensorSpec


class Identified(Protocol):
    """A tensor that can be told from others at the same place."""

    @property
    def identity(self) -> Any:
        """Equal for those that are the same."""


class Ties:
    """Finds what is the same as an earlier one, by where they begin. The identity is asked for only
    where two begin at one address."""

    def __init__(self) -> None:
        self._first: dict[Hashable, tuple[Identified, str]] = {}
        self._more: dict[Hashable, list[tuple[Identified, str]]] = {}

    def find(self, name: str, place: Hashable, one: Identified) -> str | None:
        """The name of the first that is the same, or None, and this is the first."""
        mine = one, name
        first = self._first.setdefault(place, mine)
        if first is mine:
            return None
        here = self._more.setdefault(place, [first])
        for other, before in here:
            if other.identity == one.identity:
                return before
        here.append(mine)
        return None


class TieCheck:
    """Compares the tensors of one version with those that they were declared as tied to."""

    def __init__(self, specs: Iterable["TensorSpec"]) -> None:
        self._of = {one.name: one.alias_of for one in specs if one.alias_of is not None}
        self._groups: dict[str, set[str]] = {}
        for name, head in self._of.items():
            self._groups.setdefault(head, {head}).add(name)
        self._here: dict[str, tuple[str, Weight]] = {}
        self._seen: dict[str, tuple[str, bytes | None]] = {}

    def concerns(self, name: str) -> bool:
        """Whether it has a tie."""
        return name in self._of or name in self._groups

    def see(self, name: str, weight: Weight | None, *, stays: bool) -> None:
        """Compares; None: nothing came but the word that it is tied. InvalidError: its bytes are
        not those of what it is tied to. UnsupportedError: that cannot be known.

        ``stays``: it is what it is until ``leave``, so that the same memory need not be read.
        Otherwise all of it is read, now.
        """
        head = self._of.get(name, name)
        self._groups[head].discard(name)
        if weight is None:
            return
        here = self._here.setdefault(head, (name, weight)) if stays else None
        if here is not None and here[1] is not weight:
            if here[1].identity == weight.identity:
                return
            self._read(head, *here)
        if here is None or here[1] is not weight or head in self._seen:
            self._compare(head, name, weight)

    def leave(self) -> None:
        """The tensors may change from now on: those that others are compared with are read now."""
        while self._here:
            head, (name, weight) = self._here.popitem()
            if self._groups[head]:
                self._read(head, name, weight)

    def _read(self, head: str, name: str, weight: Weight) -> None:
        if head not in self._seen:
            self._seen[head] = name, _digest(weight)

    def _compare(self, head: str, name: str, weight: Weight) -> None:
        digest = _digest(weight)
        first, known = self._seen.setdefault(head, (name, digest))
        if first == name == head:  # again, since its write has failed
            self._seen[head] = name, digest
            return
        if digest is None or known is None:
            raise UnsupportedError(
                f"{name} was declared as tied, and its bytes in a GPU's memory cannot be compared: "
                "give refit.Alias in its place, or all weights together in a mapping"
            )
        if known != digest:
            raise InvalidError(
                f"{name} and {first} were declared as tied (one tensor under two names), but this "
                "version gives other bytes for the one than for the other: declare the tensors "
                "again, each with bytes of its own, or publish them together in one mapping"
            )


def _digest(weight: Weight) -> bytes | None:
    """None if its bytes cannot be read."""
    if weight.device >= 0:
        if not hasattr(weight.tensor, "data_ptr"):
            return None
        weight = _on_host(weight)
    weight = in_row_order(weight)
    if weight.nbytes == 0:
        return b""
    memory = (ctypes.c_char * weight.nbytes).from_address(weight.pointer)
    return hashlib.blake2b(memory, digest_size=32).digest()


def _on_host(weight: Weight) -> Weight:
    there = weight.tensor.detach().cpu()
    layout = None if weight.layout is None else (there.stride(), False, False)
    return weight._replace(tensor=there, pointer=there.data_ptr(), device=-1, layout=layout)
