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
- Adapters of PEFT are merged into copies of the weights, one layer at a time, or sent alone.

It knows nothing of publishers. Torch is imported here.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import chain
from typing import Literal, TypeAlias

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from refit import lockstep
from refit._adapters import adapter_weights
from refit._ties import Ties
from refit._weight_plan import (
    PlannedWeight,
    digest_of,
    ordered,
    planned,
    refuse_duplicates,
    some,
)
from refit.errors import InvalidError, NotFoundError
from refit.manifest import TensorSpec
from refit.module_walk import Found, walk_weights

Names: TypeAlias = Collection[str] | Callable[[str], str | None]
Keep: TypeAlias = Sequence[str] | Callable[[str, torch.Tensor], bool]
Buffers: TypeAlias = Literal["persistent", "all", "none"]
Lora: TypeAlias = Literal["merged", "adapter"]

_CASTABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""What a dtype policy applies to. Integers, booleans and fp8 mean something else by their bits."""


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
        lora: Lora | None,
    ) -> None:
        self._model = model
        self._dtype = dtype
        self._keep = keep
        self._names = names
        self._buffers = buffers
        self._root = root
        self._lora = lora
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
        return [one.spec for one in ordered(self._plan())]

    def planned(self) -> "NamedWeights | PlannedWeights":
        """The same, looked at once: for a caller that takes the manifest and iterates at once."""
        return self if self.collective else PlannedWeights(ordered(self._plan()))

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.collective:
            return self._iterate_together()
        return iter(PlannedWeights(ordered(self._plan())))

    def _iterate_together(self) -> Iterator[tuple[str, torch.Tensor]]:
        left = iter(ordered(self._plan_together()))
        mine = self._is_root
        try:
            for one in left:
                if one.tie is None:
                    given = one.gather()
                    if mine:
                        given = given.to(one.dtype)
                if mine:
                    yield one.name, given
        finally:
            for one in left:
                if one.tie is None:
                    one.gather()

    def _plan_together(self) -> list[PlannedWeight]:
        """The weights to gather, once all ranks have said that they will gather the same."""
        try:
            self._check_root()
            plan = self._plan()
        except Exception as why:
            lockstep.agree(self.group, "beginning", error=lockstep.sentence_of(why))
            raise
        lockstep.agree(self.group, "beginning", detail=digest_of(plan))
        return plan

    def _check_root(self) -> None:
        ranks = torch.distributed.get_world_size(self.group)
        if self._root is not None and not 0 <= self._root < ranks:
            raise InvalidError(f"rank {self._root} cannot be the root: there are {ranks} ranks")

    def _plan(self) -> list[PlannedWeight]:
        plan: list[PlannedWeight] = []
        ties = Ties()
        for name, found in self._chosen():
            own = found.tensor.dtype
            dtype = own if self._dtype is None else self._dtype_of(name, found)
            plan.append(planned(ties, name, found, dtype))
        refuse_duplicates([one.name for one in plan])
        return plan

    def _chosen(self) -> Iterator[tuple[str, Found]]:
        seen = set()
        for found in self._walk():
            if not found.is_parameter and not self._wants_buffer(found):
                continue
            seen.add(found.name)
            chosen = found.name if self._names is None else self._rename(found.name)
            if chosen is not None:
                yield chosen, found
        if self._names is not None and not callable(self._names):
            missing = sorted(set(self._names) - seen)
            if missing:
                raise NotFoundError(f"the model has no weight {some(missing)}")

    def _walk(self) -> list[Found]:
        if self._lora == "adapter":
            return adapter_weights(self._model)
        return walk_weights(self._model, merge=self._lora == "merged")

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

    def __init__(self, plan: list[PlannedWeight]) -> None:
        self._plan = plan

    def manifest(self) -> list[TensorSpec]:
        """All names, tied ones included, with dtype and shape. Since 0.1."""
        return [one.spec for one in self._plan]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for one in self._plan:
            if one.merged is not None:
                one.merged.forget()
        for one in self._plan:
            if one.tie is None:
                given = one.gather()
                if given.dtype != one.dtype:
                    given = given.to(one.dtype)
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
    lora: Lora | None = None,
) -> NamedWeights:
    """The weights of `model` as (Hugging Face name, tensor), each name once; borrows the model.

    `dtype`: what floating-point parameters are published in; None: as they are. Those that `keep`
    names (patterns such as ``"*.router.*"``, or a function of name and tensor) keep their own, and
    so do buffers, integers and fp8. `names`: the ones to take, or a function that gives the name to
    publish under, None to leave one out. `buffers`: "persistent" (those a checkpoint has), "all",
    or "none". Names come without what DDP, torch.compile, activation checkpointing and PEFT's
    adapters put into them.

    `lora`: "merged" gives the weights of a PEFT model with its active adapters in them, equal to
    the bit to what ``merge_adapter`` makes, by PEFT's own ``merge`` on a copy of one layer after
    the other; the model stays as it is, and only weights of layers with adapters are copied. One
    that ties a weight with adapters to one without has two tensors then, as the policy does. A
    model without adapters is given as it is. "adapter" gives the active adapter alone, under the
    names that PEFT saves it under and engines load it by
    (``base_model.model.<module>.lora_A.weight``). None: adapters must be merged already.

    Sharded models (DTensors): all ranks of `group` iterate, and only `root` yields (None: all do).
    Raises while iterated: UnsupportedError (a wrapper or tensor type that has no plain bytes, an
    adapter that cannot be merged so),
    StateError (a weight that has no memory now), NotFoundError, InvalidError (two under one name),
    and on all ranks alike ``refit.lockstep.LockstepError``. Does not block. Since 0.1.
    """
    if not isinstance(model, nn.Module):
        raise InvalidError(f"named_weights takes a torch.nn.Module, not a {type(model).__name__}")
    if buffers not in ("persistent", "all", "none"):
        raise InvalidError(f'buffers must be "persistent", "all" or "none", not {buffers!r}')
    if lora not in (None, "merged", "adapter"):
        raise InvalidError(f'lora must be "merged", "adapter" or None, not {lora!r}')
    if isinstance(names, str) or isinstance(keep, str):
        raise InvalidError("names and keep take a list of names, not one text")
    if dtype is not None and dtype not in _CASTABLE:
        raise InvalidError(
            f"weights cannot be cast to {dtype} here: its values need a scale that belongs to them"
        )
    return NamedWeights(model, dtype, keep, names, buffers, root, group, lora)


def is_sharded(model: nn.Module) -> bool:
    """Whether ranks hold parts of its weights, so that all must refit together. Since 0.1."""
    tensors = chain(model.parameters(), model.buffers())
    if any(isinstance(one, DTensor) for one in tensors):
        return True
    return any(isinstance(one, FSDPModule) for one in model.modules())
