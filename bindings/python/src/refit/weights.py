"""A model's weights as a refit publishes them: each once, under its Hugging Face name.

``named_weights(model)`` is iterated like ``model.named_parameters()``. What it does besides:

- A tied weight is one tensor with several names: they come one after the other, with the very same
  tensor object, which travels once and reaches every worker under all its names. ``ties`` says
  which they are.
- DTensors are gathered, one at a time, on all ranks in the same order. Only the root rank yields
  them. A consumer that stops early makes no other rank wait: the rest is gathered all the same.
- The dtype on the wire is said by the caller: fp32 masters can be published as bf16 while routers
  and norms keep theirs.
- Buffers that a checkpoint has are included; the others on request.

It knows nothing of publishers. Torch is imported here.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import chain
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from refit import dtypes, lockstep
from refit.errors import InvalidError, NotFoundError, StateError, UnsupportedError
from refit.manifest import TensorSpec
from refit.module_walk import Found, walk_weights

Names: TypeAlias = Collection[str] | Callable[[str], str | None]
Keep: TypeAlias = Sequence[str] | Callable[[str, torch.Tensor], bool]
Buffers: TypeAlias = Literal["persistent", "all", "none"]

_CASTABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""What a dtype policy applies to. Integers, booleans and fp8 mean something else by their bits."""


class _Weight(NamedTuple):
    name: str
    tensor: torch.Tensor
    dtype: torch.dtype
    tie: str | None

    @property
    def spec(self) -> TensorSpec:
        dtype = dtypes.of_torch(self.dtype)
        shape = tuple(self.tensor.shape)
        if dtype.pack > 1 and shape:
            shape = (*shape[:-1], shape[-1] * dtype.pack)
        return TensorSpec(self.name, dtype.name, shape, self.tie)


class NamedWeights:
    """The weights of a model; made by ``named_weights``. Iterate it as often as you like.

    It borrows the model, and looks at it anew at each iteration: tensors must not change while one
    is under way. Since 0.1.
    """

    settled = True
    """What it gives stays as it is while others are taken."""

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype | None,
        keep: Keep | None,
        names: Names | None,
        buffers: Buffers,
        root: int | None,
        group: ProcessGroup | None,
    ) -> None:
        self._model = model
        self._dtype = dtype
        self._keep = keep
        self._names = names
        self._buffers = buffers
        self._root = root
        self.group = group

    @property
    def collective(self) -> bool:
        """Whether there is something to gather, so that all ranks have to iterate."""
        return lockstep.are_many(self.group) and is_sharded(self._model)

    @property
    def yields_here(self) -> bool:
        """Whether this rank gets to see the tensors; if not, it only helps to gather them."""
        return self._is_root or not self.collective

    @property
    def _is_root(self) -> bool:
        return self._root is None or lockstep.rank_in(self.group) == self._root

    @property
    def ties(self) -> dict[str, str]:
        """Of each tied name, the name that its bytes come under. Since 0.1."""
        return {one.name: one.tie for one in self._plan() if one.tie is not None}

    def manifest(self) -> list[TensorSpec]:
        """All names, tied ones included, with dtype and full shape. Gathers nothing. Since 0.1."""
        return _specs(_grouped(self._plan()))

    def planned(self) -> "NamedWeights | PlannedWeights":
        """Likewise, looked at once: for who asks for the manifest and iterates right after it."""
        return self if self.collective else PlannedWeights(_grouped(self._plan()))

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.collective:
            return self._iterate_together()
        return iter(PlannedWeights(_grouped(self._plan())))

    def _iterate_together(self) -> Iterator[tuple[str, torch.Tensor]]:
        left = iter(_grouped(self._plan_together()))
        mine = self._is_root
        try:
            for group in left:
                whole = _gather(group[0].tensor)
                if not mine:
                    continue
                given = whole.to(group[0].dtype)
                for one in group:
                    yield one.name, given
        finally:
            for group in left:
                _gather(group[0].tensor)

    def _plan_together(self) -> list[_Weight]:
        """The weights to gather, once all ranks have said that they will gather the same."""
        try:
            self._check_root()
            plan = self._plan()
        except Exception as why:
            lockstep.agree(self.group, "beginning", error=lockstep.sentence_of(why))
            raise
        lockstep.agree(self.group, "beginning", detail=_digest(plan))
        return plan

    def _check_root(self) -> None:
        ranks = torch.distributed.get_world_size(self.group)
        if self._root is not None and not 0 <= self._root < ranks:
            raise InvalidError(f"rank {self._root} cannot be the root: there are {ranks} ranks")

    def _plan(self) -> list[_Weight]:
        first: dict[tuple[object, ...], str] = {}
        plan: list[_Weight] = []
        for name, found in self._chosen():
            tensor = found.tensor
            dtype = tensor.dtype if self._dtype is None else self._dtype_of(name, found)
            tie = first.setdefault((_identity(name, tensor), dtype), name)
            plan.append(_Weight(name, tensor, dtype, None if tie is name else tie))
        _refuse_duplicates([one.name for one in plan])
        return plan

    def _chosen(self) -> Iterator[tuple[str, Found]]:
        seen = set()
        for found in walk_weights(self._model):
            if not found.is_parameter and not self._wants_buffer(found):
                continue
            seen.add(found.name)
            chosen = found.name if self._names is None else self._rename(found.name)
            if chosen is not None:
                yield chosen, found
        if self._names is not None and not callable(self._names):
            missing = sorted(set(self._names) - seen)
            if missing:
                raise NotFoundError(f"the model has no weight {_some(missing)}")

    def _wants_buffer(self, found: Found) -> bool:
        return self._buffers == "all" or (self._buffers == "persistent" and found.saved)

    def _rename(self, name: str) -> str | None:
        if self._names is None:
            return name
        if callable(self._names):
            return self._names(name)
        return name if name in self._names else None

    def _dtype_of(self, name: str, found: Found) -> torch.dtype:
        own = found.tensor.dtype
        if self._dtype is None or own not in _CASTABLE or not found.is_parameter:
            return own
        return own if self._is_kept(name, found.tensor) else self._dtype

    def _is_kept(self, name: str, tensor: torch.Tensor) -> bool:
        if self._keep is None:
            return False
        if callable(self._keep):
            return self._keep(name, tensor)
        return any(fnmatchcase(name, pattern) for pattern in self._keep)


class PlannedWeights:
    """Weights as they are named and tied now, all of them here. Since 0.1."""

    settled = True

    def __init__(self, groups: list[list[_Weight]]) -> None:
        self._groups = groups

    def manifest(self) -> list[TensorSpec]:
        """All names, tied ones included, with dtype and shape. Since 0.1."""
        return _specs(self._groups)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for group in self._groups:
            given = _gather(group[0].tensor)
            if given.dtype != group[0].dtype:
                given = given.to(group[0].dtype)
            for one in group:
                yield one.name, given


def named_weights(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    keep: Keep | None = None,
    names: Names | None = None,
    buffers: Buffers = "persistent",
    root: int | None = 0,
    group: ProcessGroup | None = None,
) -> NamedWeights:
    """The weights of `model` as (Hugging Face name, tensor), each name once; borrows the model.

    `dtype`: what floating-point parameters are published in; None: as they are. Those that `keep`
    names (patterns such as ``"*.router.*"``, or a function of name and tensor) keep their own, and
    so do buffers, integers and fp8. `names`: the ones to take, or a function that gives the name to
    publish under, None to leave one out. `buffers`: "persistent" (those a checkpoint has), "all",
    or "none". Names come without what DDP, torch.compile, activation checkpointing and merged PEFT
    adapters put into them.

    Sharded models (DTensors): all ranks of `group` iterate, and only `root` yields (None: all do).
    Raises while iterated: UnsupportedError (a wrapper or tensor type that has no plain bytes),
    StateError (a weight that has no memory now), NotFoundError, InvalidError (two under one name),
    and on all ranks alike ``refit.lockstep.LockstepError``. Does not block. Since 0.1.
    """
    if not isinstance(model, nn.Module):
        raise InvalidError(f"named_weights takes a torch.nn.Module, not a {type(model).__name__}")
    if buffers not in ("persistent", "all", "none"):
        raise InvalidError(f'buffers must be "persistent", "all" or "none", not {buffers!r}')
    if isinstance(names, str) or isinstance(keep, str):
        raise InvalidError("names and keep take a list of names, not one text")
    if dtype is not None and dtype not in _CASTABLE:
        raise InvalidError(
            f"weights cannot be cast to {dtype} here: its values need a scale that belongs to them"
        )
    return NamedWeights(model, dtype, keep, names, buffers, root, group)


def is_sharded(model: nn.Module) -> bool:
    """Whether ranks hold parts of its weights, so that all must refit together. Since 0.1."""
    tensors = chain(model.parameters(), model.buffers())
    if any(isinstance(one, DTensor) for one in tensors):
        return True
    return any(isinstance(one, FSDPModule) for one in model.modules())


def _identity(name: str, tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for two names exactly if they share all their bytes. Raises what has no plain bytes."""
    if isinstance(tensor, DTensor):
        _refuse_strange(name, tensor._local_tensor)
        return ("sharded", id(tensor))
    _refuse_strange(name, tensor)
    place = tensor.data_ptr()
    if place:
        return (place, tensor.dtype, tensor.shape, tensor.stride())
    if tensor.numel():
        raise StateError(f'weight "{name}" has no memory now: bring it back before you publish it')
    return ("empty", id(tensor))


def _refuse_strange(name: str, tensor: torch.Tensor) -> None:
    kind = type(tensor)
    plain = kind is nn.Parameter or kind is torch.Tensor
    if not plain or tensor.layout != torch.strided:
        what = kind.__name__ if not plain else f"tensor with layout {tensor.layout}"
        raise UnsupportedError(
            f'weight "{name}" is a {what}, which has no plain bytes of its own: leave it out by '
            "names=, and send its plain parts or a dequantized copy under names of their own"
        )
    if tensor.is_meta:
        raise StateError(f'weight "{name}" is on the meta device: it has no values')


def _gather(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.detach()
    return whole.full_tensor() if isinstance(whole, DTensor) else whole


def _specs(groups: list[list[_Weight]]) -> list[TensorSpec]:
    return [one.spec for group in groups for one in group]


def _grouped(plan: list[_Weight]) -> list[list[_Weight]]:
    """Each weight with those that are tied to it, which may have come much later."""
    groups: dict[str, list[_Weight]] = {}
    for one in plan:
        groups.setdefault(one.tie or one.name, []).append(one)
    return list(groups.values())


def _refuse_duplicates(names: list[str]) -> None:
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise InvalidError(f"more than one weight would be published as {_some(twice)}")


def _digest(plan: list[_Weight]) -> str:
    text = "\n".join(str(one.spec) for one in plan)
    return hashlib.sha256(text.encode()).hexdigest()


def _some(names: list[str], most: int = 5) -> str:
    shown = ", ".join(f'"{name}"' for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
