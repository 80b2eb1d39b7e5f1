"""Which weights a refit publishes, in which order, and which of them are one tensor.

Weights are tied if they share all their bytes: the same memory, read the same way, in the same type
on the wire. Those tied to one come right behind it, since its bytes are taken once. How a model is
walked and how sharded tensors are gathered is unknown here.
"""

import hashlib
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from refit import dtypes
from refit._merged import MergedLayer
from refit._ties import Ties
from refit.errors import InvalidError, StateError, UnsupportedError
from refit.manifest import TensorSpec
from refit.module_walk import Found
from refit.source import layout_of


class PlannedWeight(NamedTuple):
    """One weight as it is named now, the type that it travels in, and what it is tied to."""

    name: str
    tensor: torch.Tensor
    dtype: torch.dtype
    tie: str | None
    merged: MergedLayer | None = None
    """What gives its values; None: `tensor` has them."""
    parameter: str = ""
    """Its name there."""

    @property
    def spec(self) -> TensorSpec:
        """What is declared of it."""
        dtype = dtypes.of_torch(self.dtype)
        shape = tuple(self.tensor.shape)
        if dtype.pack > 1 and shape:
            shape = (*shape[:-1], shape[-1] * dtype.pack)
        return TensorSpec(self.name, dtype.name, shape, self.tie)

    @property
    def identity(self) -> Any:
        """Equal for weights that share all their bytes, if they begin at the same place."""
        tensor = self.tensor
        layer = None if self.merged is None else id(self.merged.layer)
        if isinstance(tensor, DTensor):
            return layer, self.dtype, id(tensor)
        return layer, self.dtype, tensor.dtype, tensor.shape, layout_of(tensor)

    def gather(self) -> torch.Tensor:
        """All of it, in the type that it has; on all ranks, where it is sharded."""
        if self.merged is not None:
            return self._merged_one(self.merged.take(self.parameter))
        whole = self.tensor.detach()
        return whole.full_tensor() if isinstance(whole, DTensor) else whole

    def _merged_one(self, made: torch.Tensor) -> torch.Tensor:
        if made.dtype != self.tensor.dtype or made.shape != self.tensor.shape:
            raise UnsupportedError(
                f'weight "{self.name}" is {made.dtype} {list(made.shape)} once its adapter is '
                f"merged, and not {self.tensor.dtype} {list(self.tensor.shape)}: merge it before"
            )
        return made


def planned(ties: Ties, name: str, found: Found, dtype: torch.dtype) -> PlannedWeight:
    """The weight, and what it is tied to of those before. StateError, UnsupportedError."""
    parameter = found.name.rpartition(".")[2]
    one = PlannedWeight(name, found.tensor, dtype, None, found.merged, parameter)
    tie = ties.find(name, _place(name, found.tensor), one)
    if tie is None and found.merged is not None:
        found.merged.want(parameter)
    return one if tie is None else one._replace(tie=tie)


def _place(name: str, tensor: torch.Tensor) -> int | tuple[str, int]:
    """Equal for two names if they may share all their bytes. Raises what has no plain bytes."""
    if isinstance(tensor, DTensor):
        _refuse_strange(name, tensor._local_tensor)
        return ("sharded", id(tensor))
    _refuse_strange(name, tensor)
    place = tensor.data_ptr()
    if place:
        return place
    if tensor.numel():
        raise StateError(f'weight "{name}" has no memory now: bring it back before you publish it')
    return ("empty", id(tensor))


def _refuse_strange(name: str, tensor: torch.Tensor) -> None:
    kind = type(tensor)
    plain = kind is nn.Parameter or kind is torch.Tensor
    if not plain or tensor.layout is not torch.strided:
        what = kind.__name__ if not plain else f"tensor with layout {tensor.layout}"
        raise UnsupportedError(
            f'weight "{name}" is a {what}, which has no plain bytes of its own: leave it out by '
            "names=, and send its plain parts or a dequantized copy under names of their own"
        )
    if tensor.is_meta:
        raise StateError(f'weight "{name}" is on the meta device: it has no values')


def ordered(plan: list[PlannedWeight]) -> list[PlannedWeight]:
    """Right behind each weight those that are tied to it, which may have come much later."""
    if all(one.tie is None for one in plan):
        return plan
    groups: dict[str, list[PlannedWeight]] = {}
    for one in plan:
        groups.setdefault(one.tie or one.name, []).append(one)
    return [one for group in groups.values() for one in group]


def refuse_duplicates(names: list[str]) -> None:
    """InvalidError names those that are there twice."""
    if len(set(names)) == len(names):
        return
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    raise InvalidError(f"more than one weight would be published as {some(twice)}")


def digest_of(plan: list[PlannedWeight]) -> str:
    """Equal on ranks that will gather the same."""
    text = "\n".join(str(one.spec) for one in plan)
    return hashlib.sha256(text.encode()).hexdigest()


def some(names: list[str], most: int = 5) -> str:
    """Names for a sentence."""
    shown = ", ".join(f'"{name}"' for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
