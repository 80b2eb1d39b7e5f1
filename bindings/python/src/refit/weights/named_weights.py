"""A model's weights as a refit publishes them: each once, under its Hugging Face name.

``named_weights(model)`` is iterated like ``model.named_parameters()``. What it does besides:

- A tied weight is one tensor with several names: they come one after the other, with the very same
  tensor object, which travels once and reaches every worker under all its names. ``ties`` says
  which they are.
- DTensors are gathered, one at a time, on all ranks in the same order; so are the parameters of
  DeepSpeed's ZeRO 3, as many at a time as have 64 MiB. Only the root rank yields
  them. A consumer that stops early makes no other rank wait: the rest is gathered all the same.
  Where every rank has a publisher, nothing is gathered: ``shards`` are what a rank has.
- The dtype on the wire is said by the caller: fp32 masters can be published as bf16 while routers
  and norms keep theirs.
- Buffers that a checkpoint has are included; the others on request.
- Adapters of PEFT are merged into copies of the weights, one layer at a time, or sent alone.

It knows nothing of publishers. Torch is imported here.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from refit._c import dtypes
from refit.errors import InvalidError, NotFoundError, StateError, UnsupportedError
from refit.weights import lockstep
from refit.weights.adapters import adapter_weights
from refit.weights.checkpoint_names import Piece
from refit.weights.layers import Found, walk_weights
from refit.weights.manifest import TensorSpec
from refit.weights.merged import MergedLayer
from refit.weights.shards import PlannedShards, Shard, local_part, piece_of
from refit.weights.source import lacks_memory, layout_of
from refit.weights.target import fingerprint_of, tensors_of
from refit.weights.ties import Ties
from refit.weights.zero import AT_ONCE, gathered, is_divided, nbytes_of, shape_of

Names: TypeAlias = Collection[str] | Callable[[str], str | None]
Keep: TypeAlias = Sequence[str] | Callable[[str, torch.Tensor], bool]
Buffers: TypeAlias = Literal["persistent", "all", "none"]
Lora: TypeAlias = Literal["merged", "adapter"]

_CASTABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Types that a dtype policy applies to: integers, booleans and fp8 are never cast."""


# ---- The plan: which weights a refit publishes, in which order, and which of them are one tensor.
#
# Weights are tied if they share all their bytes: the same memory, read the same way, in the same
# type on the wire. Those tied to one come right after it, since its bytes are taken once.


class PlannedWeight(NamedTuple):
    """One weight as it is named now, the type that it travels in, and what it is tied to."""

    name: str
    tensor: torch.Tensor
    dtype: torch.dtype
    tie: str | None
    merged: MergedLayer | None = None
    """Makes its values; None: `tensor` has them."""
    parameter: str = ""
    """Its name there."""
    piece: Piece | None = None
    """What it is of these values; None: all."""

    @property
    def spec(self) -> TensorSpec:
        """The declaration of it."""
        dtype = dtypes.of_torch(self.dtype)
        shape = tuple(shape_of(self.tensor)) if self.piece is None else self.piece.shape
        if dtype.pack > 1 and shape:
            shape = (*shape[:-1], shape[-1] * dtype.pack)
        return TensorSpec(self.name, dtype.name, shape, self.tie)

    @property
    def identity(self) -> Any:
        """Equal for weights that share all their bytes, if they begin at the same place."""
        tensor = self.tensor
        layer = None if self.merged is None else id(self.merged.layer)
        if isinstance(tensor, DTensor) or is_divided(tensor):
            return layer, self.dtype, id(tensor), self.piece
        if self.piece is not None:
            return layer, self.dtype, id(tensor), self.piece
        return layer, self.dtype, tensor.dtype, tensor.shape, layout_of(tensor)

    @property
    def is_divided(self) -> bool:
        """Whether it is gathered with others, by DeepSpeed."""
        return self.merged is None and is_divided(self.tensor)

    @property
    def is_own(self) -> bool:
        """Whether it travels, as the model has it."""
        return self.tie is None and self.is_as_it_is

    @property
    def is_as_it_is(self) -> bool:
        """Whether nothing is made of it."""
        made = self.merged is not None or isinstance(self.tensor, DTensor) or self.is_divided
        if made or self.tensor.dtype != self.dtype:
            return False
        return self.piece is None or self.tensor.is_contiguous()

    def shard(self) -> Shard | None:
        """What this rank has of it, as it lies there; None for nothing. UnsupportedError."""
        try:
            if self.merged is not None:
                raise UnsupportedError("its adapter is merged into all of it")
            if self.is_divided:
                raise UnsupportedError("ZeRO 3 of DeepSpeed has divided it into flat parts")
            found = local_part(self.tensor)
            if found is not None and self.piece is not None:
                found = piece_of(*found, shape_of(self.tensor), self.piece)
        except UnsupportedError as why:
            raise UnsupportedError(
                f'"{self.name}" cannot be published in shards: {why.text}'
            ) from None
        if found is None or found[1].numel == 0:
            return None
        return Shard(self.name, found[0], found[1].packed(dtypes.of_torch(self.dtype).pack))

    def gather(self) -> torch.Tensor:
        """All of it, in the type that it has; on all ranks, where it is sharded."""
        if self.merged is not None:
            return self._merged_one(self.merged.take(self.parameter))
        whole = self.tensor.detach()
        return whole.full_tensor() if isinstance(whole, DTensor) else whole

    def _merged_one(self, made: torch.Tensor) -> torch.Tensor:
        if made.dtype != self.tensor.dtype or made.shape != shape_of(self.tensor):
            raise UnsupportedError(
                f'weight "{self.name}" is {made.dtype} {list(made.shape)} once its adapter is '
                f"merged, and not {self.tensor.dtype} {list(shape_of(self.tensor))}: merge "
                "it before"
            )
        return made


def _planned(ties: Ties, name: str, found: Found, dtype: torch.dtype) -> PlannedWeight:
    """The weight, and what it is tied to of those before. StateError, UnsupportedError."""
    source = found.name if found.piece is None else found.piece.source
    parameter = source.rpartition(".")[2]
    one = PlannedWeight(name, found.tensor, dtype, None, found.merged, parameter, found.piece)
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
    if is_divided(tensor):
        return ("sharded", id(tensor))
    if lacks_memory(tensor):
        raise StateError(f'weight "{name}" has no memory now: bring it back before you publish it')
    return tensor.data_ptr() or ("empty", id(tensor))


def _refuse_strange(name: str, tensor: torch.Tensor) -> None:
    if torch.overrides.has_torch_function_unary(tensor):
        tensor.detach()  # one that is parked comes back when it is used
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


def _ordered(plan: list[PlannedWeight]) -> list[PlannedWeight]:
    """Right after each weight those that are tied to it, which may have come much later."""
    if all(one.tie is None for one in plan):
        return plan
    groups: dict[str, list[PlannedWeight]] = {}
    for one in plan:
        groups.setdefault(one.tie or one.name, []).append(one)
    return [one for group in groups.values() for one in group]


class _Gathered:
    """Gives each weight with all of its values; one that is tied with those of the weight that it
    is tied to. What ZeRO 3 has divided is gathered ahead, several weights at a time.

    It goes on after a weight that failed.
    """

    def __init__(self, plan: list[PlannedWeight]) -> None:
        self._plan = plan
        self._next = 0
        self._ready: dict[int, torch.Tensor] = {}
        self._values = torch.empty(0)
        self._whole: tuple[Any, torch.Tensor] | None = None

    def __iter__(self) -> Iterator[tuple[PlannedWeight, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[PlannedWeight, torch.Tensor]:
        number = self._next
        if number == len(self._plan):
            raise StopIteration
        self._next += 1
        one = self._plan[number]
        if one.tie is None:
            if one.piece is not None:
                self._values = one.piece.of(self._whole_of(one))
                return one, self._values
            self._whole = None
            if one.is_divided and number not in self._ready:
                self._gather_from(number)
            self._values = self._ready.pop(number) if one.is_divided else one.gather()
        return one, self._values

    def _whole_of(self, one: PlannedWeight) -> torch.Tensor:
        """The parameter that it is a piece of, which is gathered once for pieces in a row."""
        if self._whole is None or self._whole[0] is not one.tensor:
            with gathered([one.tensor] if one.is_divided else []):
                self._whole = one.tensor, one.gather()
        return self._whole[1]

    def _gather_from(self, first: int) -> None:
        """Gathers a divided weight, and those after it up to a number of bytes."""
        chosen: list[int] = []
        left = AT_ONCE
        for number in range(first, len(self._plan)):
            one = self._plan[number]
            if one.tie is None and one.is_divided and one.piece is None:
                left -= nbytes_of(one.tensor)
                if chosen and left < 0:
                    break
                chosen.append(number)
        with gathered(self._plan[number].tensor for number in chosen):
            self._ready = {number: self._plan[number].gather() for number in chosen}


def _refuse_duplicates(names: list[str]) -> None:
    """InvalidError names those that are there twice."""
    if len(set(names)) == len(names):
        return
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    raise InvalidError(f"more than one weight would be published as {_some(twice)}")


def _digest_of(plan: list[PlannedWeight]) -> str:
    """Equal on ranks that will gather the same."""
    text = "\n".join(str(one.spec) for one in plan)
    return hashlib.sha256(text.encode()).hexdigest()


def _some(names: list[str], most: int = 5) -> str:
    """Names for a sentence."""
    shown = ", ".join(f'"{name}"' for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


# ---- The weights of a model


class NamedWeights:
    """The weights of a model; made by ``named_weights``. Iterate it as often as you like.

    It borrows the model, and looks at it again at each iteration: tensors must not change during
    an iteration.
    """

    settled = True
    """A tensor that it yields stays as it is while later ones are taken."""

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
        gather: bool | None,
    ) -> None:
        self._model = model
        self._dtype = dtype
        self._keep = keep
        self._names = names
        self._buffers = buffers
        self._root = root
        self._lora = lora
        self._gather = gather
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
    def divides(self) -> bool:
        """Whether the ranks publish it together, each what it has, if each has a publisher."""
        if self._gather is True or self._root is None or not lockstep.are_many(self.group):
            return False
        return self._gather is False or is_sharded(self._model)

    @property
    def must_divide(self) -> bool:
        """Whether it must not be gathered."""
        return self._gather is False

    @property
    def root(self) -> int:
        """The rank that coordinates."""
        return self._root or 0

    def shards(self) -> Iterator[Shard]:
        """What this rank has of each weight that is not tied to another: its name, a tensor with
        the elements, in the type that it travels in, and their box. Weights that are not sharded
        are there whole, on each rank. Gathers nothing. UnsupportedError names a weight of which a
        rank has no box."""
        planned = self.planned_shards()
        if planned.why_not is not None:
            raise UnsupportedError(planned.why_not)
        for name, tensor in planned:
            if name in planned.shards:
                yield planned.shards[name]._replace(tensor=tensor)

    def planned_shards(self) -> PlannedShards:
        """The same, for all ranks to agree who sends what. Raises what iterating raises."""
        plan = _ordered(self._plan())
        shards: dict[str, Shard] = {}
        why_not = None
        try:
            found = (one.shard() for one in plan if one.tie is None)
            shards = {one.name: one for one in found if one is not None}
        except UnsupportedError as why:
            why_not = why.text
        casts = {one.name: one.dtype for one in plan}
        return PlannedShards([one.spec for one in plan], shards, casts, alike=True, why_not=why_not)

    @property
    def _is_root(self) -> bool:
        return self._root is None or lockstep.rank_in(self.group) == self._root

    @property
    def ties(self) -> dict[str, str]:
        """Of each tied name, the name that its bytes come under."""
        return {one.name: one.tie for one in self._plan() if one.tie is not None}

    def manifest(self) -> list[TensorSpec]:
        """All names, tied ones included, with dtype and full shape. Gathers nothing."""
        return [one.spec for one in _ordered(self._plan())]

    def planned(self) -> "NamedWeights | PlannedWeights":
        """The same, looked at once: for a caller that takes the manifest and iterates at once."""
        if self.collective:
            return self
        plan, found = _ordered(self._plan()), self.fingerprint()
        own = {} if found[0] is None else tensors_of(self._model)
        is_own = all(own.get(one.name) is one.tensor and one.is_as_it_is for one in plan)
        return PlannedWeights(plan, found if is_own else (None, []))

    def fingerprint(self) -> tuple[Any, list[Any]]:
        """Equal for two whose models have the same tensors where they were, if all that comes is
        these, under their own names; and what holds their memory. None: only the plan tells."""
        if callable(self._names) or callable(self._keep) or self._lora is not None:
            return None, []
        found, held = (None, []) if self.collective else fingerprint_of(self._model)
        chosen = [None if one is None else tuple(one) for one in (self._names, self._keep)]
        return None if found is None else (found, self._dtype, self._buffers, chosen), held

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.collective:
            if self._gather is False:
                raise UnsupportedError(
                    "gather=False: no rank gets all of these weights; send them with "
                    "refit.Transaction and a publisher on every rank, or iterate shards()"
                )
            return self._iterate_together()
        return iter(PlannedWeights(_ordered(self._plan())))

    def _iterate_together(self) -> Iterator[tuple[str, torch.Tensor]]:
        left = _Gathered(_ordered(self._plan_together()))
        mine = self._is_root
        try:
            for one, values in left:
                if mine:
                    if one.tie is None:
                        given = values.to(one.dtype)
                    yield one.name, given
        finally:
            for _ in left:
                pass

    def _plan_together(self) -> list[PlannedWeight]:
        """The weights to gather, once all ranks have said that they will gather the same."""
        try:
            self._check_root()
            plan = self._plan()
        except Exception as why:
            lockstep.agree(self.group, "beginning", error=lockstep.sentence_of(why))
            raise
        lockstep.agree(self.group, "beginning", detail=_digest_of(plan))
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
            plan.append(_planned(ties, name, found, dtype))
        _refuse_duplicates([one.name for one in plan])
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
                raise NotFoundError(f"the model has no weight {_some(missing)}")

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
    """Weights as they are named and tied now, all of them here."""

    settled = True

    def __init__(
        self, plan: list[PlannedWeight], fingerprint: tuple[Any, list[Any]] = (None, [])
    ) -> None:
        self._plan = plan
        self._fingerprint = fingerprint
        self._lasting: set[str] | None = None

    def fingerprint(self) -> tuple[Any, list[Any]]:
        """See ``NamedWeights.fingerprint``; None unless all are the model's own tensors."""
        return self._fingerprint

    def manifest(self) -> list[TensorSpec]:
        """All names, tied ones included, with dtype and shape."""
        return [one.spec for one in self._plan]

    def lasts(self, name: str) -> bool:
        """Whether it is the model's own memory that comes: not gathered, merged or cast."""
        if self._lasting is None:
            self._lasting = {one.name for one in self._plan if one.is_own}
        return name in self._lasting

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for one in self._plan:
            if one.merged is not None:
                one.merged.forget()
        for one, values in _Gathered(self._plan):
            if one.tie is None:
                given = values if values.dtype == one.dtype else values.to(one.dtype)
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
    gather: bool | None = None,
) -> NamedWeights:
    """The weights of `model` as (Hugging Face name, tensor), each name once; borrows the model.

    `dtype`: what floating-point parameters are published in; None: as they are. Those that `keep`
    names (patterns such as ``"*.router.*"``, or a function of name and tensor) keep their own, and
    so do buffers, integers and fp8. `names`: the ones to take, or a function that gives the name to
    publish under, None to leave one out. `buffers`: "persistent" (those a checkpoint has), "all",
    or "none". Names come without what DDP, torch.compile, activation checkpointing and PEFT's
    adapters put into them. A model of transformers has the names of its checkpoint: experts that
    it holds as one parameter are published one by one, as views.

    `lora`: "merged" gives the weights of a PEFT model with its active adapters in them, equal to
    the bit to what ``merge_adapter`` makes, by PEFT's own ``merge`` on a copy of one layer after
    the other; the model stays as it is, and only weights of layers with adapters are copied. One
    that ties a weight with adapters to one without has two tensors then, as the policy does. A
    model without adapters is given as it is. "adapter" gives the active adapter alone, under the
    names that PEFT saves it under and engines load it by
    (``base_model.model.<module>.lora_A.weight``). None: adapters must be merged already.

    Sharded models (DTensors, ZeRO 3 of DeepSpeed): all ranks of `group` iterate, and only `root`
    yields (None: all do). `gather` is for ``refit.Transaction``. None: if every rank has a
    publisher, each publishes the shards that it holds, with that of `root` as coordinator, and
    nothing is gathered; what cannot be cut into boxes is gathered, as everything is if `root` alone
    has a publisher. True: it is gathered in any case. False: never, which is an error where it
    must be; the replicas of a model that is not sharded share the work then. Raises while
    iterated: UnsupportedError (a wrapper or tensor type that has no plain bytes, an adapter that
    cannot be merged so), StateError (a weight that has no memory now), NotFoundError, InvalidError
    (two under one name), and on all ranks alike
    ``refit.weights.lockstep.LockstepError``. Does not block.
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
    if gather is False and root is None:
        raise InvalidError("root=None gives all weights to all ranks, which gather=False rules out")
    return NamedWeights(model, dtype, keep, names, buffers, root, group, lora, gather)


def is_sharded(model: nn.Module) -> bool:
    """Whether ranks hold parts of its weights, so that all must refit together."""
    # Megatron's DistributedDataParallel has a list in the place of the method buffers().
    tensors = chain(model.parameters(), (one for _, one in model.named_buffers()))
    if any(isinstance(one, DTensor) or is_divided(one) for one in tensors):
        return True
    return any(isinstance(one, FSDPModule) for one in model.modules())
