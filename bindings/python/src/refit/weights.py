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
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from typing import Literal, TypeAlias

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from refit import dtypes, lockstep
from refit.errors import InvalidError, NotFoundError, StateError, UnsupportedError
from refit.manifest import TensorSpec
from refit.module_walk import walk_weights

Names: TypeAlias = Collection[str] | Callable[[str], str | None]
Keep: TypeAlias = Sequence[str] | Callable[[str, torch.Tensor], bool]
Buffers: TypeAlias = Literal["persistent", "all", "none"]

_CASTABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""What a dtype policy applies to. Integers, booleans and fp8 mean something else by their bits."""


@dataclass(frozen=True)
class _Weight:
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
        return is_sharded(self._model) and lockstep.are_many(self.group)

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
        return [one.spec for group in _grouped(self._plan()) for one in group]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._iterate_together() if self.collective else self._iterate_alone()

    def _iterate_alone(self) -> Iterator[tuple[str, torch.Tensor]]:
        for group in _grouped(self._plan()):
            given = _gather(group[0].tensor).to(group[0].dtype)
            for one in group:
                yield one.name, given

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
            plan = self._plan()
        except Exception as why:
            lockstep.agree(self.group, "beginning", error=lockstep.sentence_of(why))
            raise
        lockstep.agree(self.group, "beginning", detail=_digest(plan))
        return plan

    def _plan(self) -> list[_Weight]:
        first: dict[tuple[object, ...], str] = {}
        plan: list[_Weight] = []
        for name, tensor in self._chosen():
            dtype = self._dtype_of(name, tensor)
            tie = first.setdefault((*_identity(name, tensor), dtype), name)
            plan.append(_Weight(name, tensor, dtype, None if tie == name else tie))
        _refuse_duplicates([one.name for one in plan])
        return plan

    def _chosen(self) -> Iterator[tuple[str, torch.Tensor]]:
        seen = set()
        for name, tensor, in_checkpoint in walk_weights(self._model):
            is_buffer = not isinstance(tensor, nn.Parameter)
            if is_buffer and not (self._buffers == "all" or self._wants_buffer(in_checkpoint)):
                continue
            seen.add(name)
            chosen = self._rename(name)
            if chosen is not None:
                yield chosen, tensor
        if self._names is not None and not callable(self._names):
            missing = sorted(set(self._names) - seen)
            if missing:
                raise NotFoundError(f"the model has no weight {_some(missing)}")

    def _wants_buffer(self, in_checkpoint: bool) -> bool:
        return self._buffers == "persistent" and in_checkpoint

    def _rename(self, name: str) -> str | None:
        if self._names is None:
            return name
        if callable(self._names):
            return self._names(name)
        return name if name in self._names else None

    def _dtype_of(self, name: str, tensor: torch.Tensor) -> torch.dtype:
        if self._dtype is None or tensor.dtype not in _CASTABLE:
            return tensor.dtype
        if not isinstance(tensor, nn.Parameter) or self._is_kept(name, tensor):
            return tensor.dtype
        return self._dtype

    def _is_kept(self, name: str, tensor: torch.Tensor) -> bool:
        if self._keep is None:
            return False
        if callable(self._keep):
            return self._keep(name, tensor)
        return any(fnmatchcase(name, pattern) for pattern in self._keep)


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
    if tensor.numel() == 0:
        return ("empty", id(tensor))
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        raise StateError(f'weight "{name}" has no memory now: bring it back before you publish it')
    place = (storage.data_ptr(), tensor.storage_offset())
    return (str(tensor.device), *place, tensor.dtype, tuple(tensor.shape), tensor.stride())


def _refuse_strange(name: str, tensor: torch.Tensor) -> None:
    kind = type(tensor)
    plain = kind in (torch.Tensor, nn.Parameter)
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
