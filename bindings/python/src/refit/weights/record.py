"""Learns from an engine's own loader where each element of a version goes.

    parts = refit.record(model.load_weights, update, model)     # once
    update.load_into(parts)                                     # each version: the same bytes

The loader runs twice, over tensors of random values. The first time every operation on them is
seen (TorchDispatchMode). A memory is known by its storage: views of it (slices, transposes,
``.data``) need no notice. What is copied, converted, joined or cloned is a write: a box of a memory
that goes to a box of another. A write from a memory that was itself written before is taken back to
the version's tensors. Any other operation on them makes values that no copy gives: where these
reach a parameter, or decide what the loader does, it is refused.

The second time nothing is watched and the values are others. What the recorded parts make of them
must be what the loader made, byte by byte, in all parameters and buffers: so what was not seen (a
value read through NumPy, a thread's write, a loader that goes by what it reads) is found out here.
Then all of the model is put back as it was, also if the loader has raised.
"""

import gc
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from refit._c import dtypes
from refit._c.waiting import interrupts_held
from refit.errors import InvalidError, UnsupportedError
from refit.weights.dimensions import Dim, mapped, merged
from refit.weights.load import listed
from refit.weights.parts import Layout, Part, Parts, tensors_of, write
from refit.weights.source import weight_named
from refit.weights.view import View

aten = torch.ops.aten


def record(
    load: Callable[[Iterator[tuple[str, Any]]], Any], weights: Any, model: Any = None
) -> Parts:
    """Runs an engine's loader and returns what it does, for ``update.load_into``.

    ``load`` takes an iterator of (name, tensor): vLLM's and SGLang's ``model.load_weights``.
    ``weights`` say the names, shapes and types that versions will have: an update, or names with
    tensors or views, as a mapping or as pairs; their values are not read. ``model`` is the module,
    or the mapping of tensors, that is loaded; by default the module whose method ``load`` is.

    The loader runs twice, over random values on the CPU. Nothing may use the model meanwhile; it is
    as it was before when this returns, whatever happens. Takes host memory for a copy of the model,
    the largest storage once more, and the tensors that the loader holds: they are made one at a
    time.

    UnsupportedError names what cannot be expressed as copies (a sum, a quantised weight, a value
    that is read, parameters that are replaced, what a loader keeps elsewhere than in parameters and
    buffers): load versions with the loader itself then.
    InvalidError: no names were given, or the model is not known. What the loader raises.
    """
    model = getattr(load, "__self__", None) if model is None else model
    if model is None:
        raise InvalidError("give the model that is loaded: record(load, weights, model)")
    kinds = _kinds(weights)
    if not kinds:
        raise InvalidError("no tensors were given: give the names that versions have")
    engine = _Engine(model)
    try:
        recorder = _Recorder(engine.names)
        sources = recorder.sources(kinds)
        try:
            # Above this, operations that consist of others are gone before they are seen.
            with recorder, torch._C._AutoDispatchBelowAutograd():
                load(sources)
        except Exception as why:
            if recorder.refused in (None, why):
                raise
            raise recorder.refused from why
        sources.close()
        engine.check()
        recorder.check()
        found, overlap = recorder.parts()
        load(_tensors(kinds, 1))
        engine.check()
        engine.compare(found, kinds)
    finally:
        with interrupts_held():
            engine.put_back()
    manifest = {name: (one.name, one.shape) for name, one in kinds.items()}
    return Parts(model, manifest, found, overlap, *_version_of(weights))


# ---- The version's tensors


class _Kind(NamedTuple):
    """One tensor, as it is made here."""

    number: int
    name: str
    shape: tuple[int, ...]
    """As a version says it."""
    dtype: torch.dtype
    torch_shape: tuple[int, ...]

    def make(self, seed: int) -> torch.Tensor:
        """Random values: the same for the same seed. None that an engine could take offence at."""
        random = torch.Generator().manual_seed(2 * self.number + seed)
        if self.dtype == torch.bool:
            return torch.randint(0, 2, self.torch_shape, generator=random).to(torch.bool)
        nbytes = math.prod(self.torch_shape) * self.dtype.itemsize
        words = torch.empty((nbytes + 7) // 8, dtype=torch.int64)
        words.random_(-(2**63), None, generator=random)
        if self.dtype.is_floating_point or self.dtype.is_complex:
            width = self.dtype.itemsize // (2 if self.dtype.is_complex else 1)
            words &= _FINITE[width]
        return words.view(torch.uint8)[:nbytes].view(self.dtype).view(self.torch_shape)


_FINITE = {
    width: ~int.from_bytes((bytes(width - 1) + b"\x40") * (8 // width), "little")
    for width in (1, 2, 4, 8)
}
"""For words of floats of so many bytes: without the highest bit of their exponents."""


def _kinds(weights: Any) -> dict[str, _Kind]:
    pairs: Iterable[tuple[str, Any]]
    if hasattr(weights, "views"):
        pairs = ((view.name, view) for view in weights.views())
    else:
        pairs = weights.items() if isinstance(weights, Mapping) else weights
    found: dict[str, _Kind] = {}
    for number, (name, one) in enumerate(pairs):
        if isinstance(one, View):
            dtype, shape = dtypes.by_name(one.dtype), one.shape
        elif isinstance(one, torch.Tensor):  # also one without memory
            dtype, shape = dtypes.of_torch(one.dtype), tuple(one.shape)
            if dtype.pack > 1:
                shape = (*shape[:-1], shape[-1] * dtype.pack)
        else:
            weight = weight_named(name, one)
            dtype, shape = weight.dtype, weight.shape
        if name in found:
            raise InvalidError(f"{name} is there twice")
        here = (*shape[:-1], shape[-1] // dtype.pack) if dtype.pack > 1 else shape
        found[name] = _Kind(number, dtype.name, shape, dtypes.to_torch(dtype), here)
    return found


def _version_of(weights: Any) -> tuple[bytes | None, dict[str, str]]:
    """What tells versions of these tensors, if they are all of a version's, and which are tied."""
    pairs = weights.items() if isinstance(weights, Mapping) else ()
    views = weights.views() if hasattr(weights, "views") else [one for _, one in pairs]
    ties: dict[str, str] = {}
    digests = set()
    for view in views:
        if not isinstance(view, View):
            return None, {}
        cut = getattr(view._owner, "_selected", None) is not None
        digests.add(None if cut else getattr(view._owner, "_manifest", None))
        if view.alias_of is not None:
            ties[view.name] = view.alias_of
    return (digests.pop() if len(digests) == 1 else None), ties


def _tensors(kinds: Mapping[str, _Kind], seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    for name, kind in kinds.items():
        yield name, kind.make(seed)


# ---- The engine


class _Engine:
    """A model as it was: put back afterwards, and compared with."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._tensors = tensors_of(model)
        self._attributes = [(one, {**one}) for one in _attributes_of(model)]
        """Dictionaries, and what was in each."""
        self._parts = [(one, {**one}) for one in _parts_of(model)]
        self._layouts = {name: Layout.of(one) for name, one in self._tensors.items()}
        self._data = [(one, one.detach()) for one in self._tensors.values()]
        self.names: dict[int, list[tuple[str, torch.Tensor]]] = {}
        """The tensors of each storage."""
        for name, one in self._tensors.items():
            if not one.is_meta:
                self.names.setdefault(one.untyped_storage()._cdata, []).append((name, one.detach()))
        if not self.names:
            raise InvalidError("there is nothing to load into: the model has no tensors")
        self._saved = {
            key: _raw(these[0][1]).to("cpu", copy=True) for key, these in self.names.items()
        }

    def check(self) -> None:
        """UnsupportedError: the loader has put other tensors in the place of the model's."""
        now = tensors_of(self._model)
        other = [
            name
            for name in {**self._layouts, **now}
            if name not in now or self._layouts.get(name) != Layout.of(now[name])
        ]
        if other:
            raise UnsupportedError(
                f"the loader replaces {listed(other)}, where versions have to be written into "
                "tensors that stay: load them with the loader itself"
            )

    def compare(self, parts: list[Part], kinds: Mapping[str, _Kind]) -> None:
        """Whether the parts make of the second values what the loader has made of them.
        UnsupportedError names the tensors that differ."""
        here: dict[int, list[Part]] = {key: [] for key in self.names}
        for part in parts:
            here[self._layouts[part.target].storage].append(part)
        other: list[str] = []
        for key, these in self.names.items():
            made = _raw(these[0][1])
            expected = self._saved[key].to(made.device, copy=True)
            memory = expected.untyped_storage()
            write([(one, one.into(memory)) for one in here[key]], lambda name: kinds[name].make(1))
            if not torch.equal(expected, made):
                other += [name for name, _ in these]
        if other:
            raise UnsupportedError(
                f"what the loader writes to {listed(other)} does not come from copies alone: load "
                "versions with the loader itself"
            )

    def put_back(self) -> None:
        """The model's own tensors, with the bytes that they had."""
        for there, before in self._attributes:
            if list(map(id, there.values())) != list(map(id, before.values())):
                there.clear()
                there.update(before)
        for there, before in self._parts:
            for name in [name for name, one in there.items() if _may_hold(one)]:
                if there[name] is not before.get(name, there):
                    del there[name]
            for name, one in before.items():
                if _may_hold(one):
                    there[name] = one
        with torch.inference_mode():
            for key, these in self.names.items():
                storage, saved = these[0][1].untyped_storage(), self._saved[key]
                if storage.nbytes() != saved.nbytes:
                    storage.resize_(saved.nbytes)
                _raw(these[0][1]).copy_(saved)
        for tensor, data in self._data:
            if Layout.of(tensor) != Layout.of(data):
                tensor.data = data


def _may_hold(value: Any) -> bool:
    """Whether it may be something that a loader has made of weights: values, or what computes with
    them."""
    return value is None or isinstance(value, (torch.Tensor, float)) or callable(value)


def _attributes_of(model: Any) -> Iterator[dict[str, Any]]:
    """The attributes of a model's layers."""
    for module in model.modules() if isinstance(model, torch.nn.Module) else ():
        yield from (vars(module), module._parameters, module._buffers, module._modules)


def _parts_of(model: Any) -> Iterator[dict[str, Any]]:
    """The attributes of the objects that a model's layers have, and that others may use, too."""
    for module in model.modules() if isinstance(model, torch.nn.Module) else ():
        for one in vars(module).values():
            known = isinstance(one, (torch.nn.Module, torch.Tensor, type))
            if type(one).__module__ != "builtins" and not known:
                yield getattr(one, "__dict__", {})


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor's storage."""
    storage = tensor.untyped_storage()
    place = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return place.set_(storage, 0, (storage.nbytes(),), (1,))


# ---- The loader at work


class _Write(NamedTuple):
    """A box that came into a memory. Strides: of its origin, and of this memory."""

    dims: list[Dim]
    source: str
    """The version's tensor; empty for `value`."""
    source_offset: int
    offset: int
    dtypes: tuple[torch.dtype, ...]
    """Of the origin, and where it was converted."""
    value: torch.Tensor | None = None


class _Memory:
    """What is known of one storage."""

    def __init__(self, tensor: torch.Tensor, name: str = "", target: bool = False) -> None:
        self.storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        """Its number is not given to another one as long as this is here."""
        self.name = name
        """The version's tensor that lies here, or an empty one."""
        self.target = target
        self.writes: dict[Any, _Write] = {}
        """By their places here, in their order."""
        self.written: dict[str, None] = {}
        """The version's tensors that they are of."""
        self.made: dict[str, None] = {}
        """The version's tensors that an operation has made something of here,"""
        self.operation = ""
        """and which one that was."""

    def origins(self) -> dict[str, None]:
        """The version's tensors that there is something of."""
        return {self.name: None} if self.name else {**self.written, **self.made}


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees what a loader does. `names`: the tensors of each storage of the engine."""

    def __init__(self, names: Mapping[int, list[tuple[str, torch.Tensor]]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names
        self.refused: UnsupportedError | None = None
        self._memories: dict[int, _Memory] = {
            key: _Memory(these[0][1], target=True) for key, these in names.items()
        }

    def sources(
        self, kinds: Mapping[str, _Kind]
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """The version's tensors, one after the other."""
        for name, tensor in _tensors(kinds, 0):
            self._memories[tensor.untyped_storage()._cdata] = _Memory(tensor, name)
            yield name, tensor
            del tensor

    def check(self) -> None:
        """What is refused when the loader is done. Raises a refusal again that it has caught."""
        if self.refused is not None:
            raise self.refused
        if self._kept():
            gc.collect()  # what refers to itself
        if kept := self._kept():
            raise UnsupportedError(
                f"the loader keeps what it was given or has made of {listed(kept)}, elsewhere than "
                "in parameters and buffers: load versions with the loader itself"
            )

    def _kept(self) -> list[str]:
        kept: dict[str, None] = {}
        for memory in self._memories.values():
            if not memory.target and not memory.storage.expired():  # type: ignore[no-untyped-call]
                kept |= memory.origins()
        return list(kept)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        memories = [memory for one in tensors if (memory := self._memory(one)) is not None]
        origins = {name: None for memory in memories for name in memory.origins()}
        if origins:
            self._check(func, args, kwargs, origins)
        if func.namespace in _OURS:
            with self:  # what consists of others is seen in its pieces
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        made = func(*args, **kwargs)
        before = {_key(one) for one in tensors}
        fresh = [
            one
            for one in tree_leaves(made)
            if isinstance(one, torch.Tensor) and not one.is_meta and _key(one) not in before
        ]
        for one in fresh:
            if _key(one) != 0:
                self._memories[_key(one)] = _Memory(one)
        if func is aten.copy_.default:
            self._copied(args[0], args[1])
        elif func in (aten._to_copy.default, aten.clone.default):
            self._copied(made, args[0])
        elif func is aten.cat.default:
            self._joined(made, args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0))
        elif func is aten.stack.default:
            dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
            for number, one in enumerate(args[0]):
                self._copied(made.select(dim, number), one)
        elif func in (aten.fill_.Scalar, aten.zero_.default):
            value = args[1] if func is aten.fill_.Scalar else 0
            self._copied(args[0], torch.tensor(value, dtype=args[0].dtype))
        elif origins:
            self._computed(func, args, kwargs, fresh, origins)
        return made

    # ---- Copies

    def _joined(self, whole: torch.Tensor, pieces: list[torch.Tensor], dim: int) -> None:
        begin = 0
        for one in pieces:
            if one.dim() == whole.dim():  # an empty one may have another shape
                self._copied(whole.narrow(dim, begin, one.shape[dim]), one)
                begin += one.shape[dim]

    def _copied(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """`source` was copied to `to`, converted if their types differ."""
        origin, memory = self._memory(source), self._memory(to)
        known = origin is not None and origin.origins()
        if to.numel() == 0 or memory is None:
            return
        if origin is not None and origin.made:
            self._mark(memory, origin.made, origin.operation, to)
            return
        if known and (source.is_neg() or source.is_conj() or to.is_neg() or to.is_conj()):
            self._mark(memory, origin.origins() if origin else {}, "neg or conj", to)
            return
        if memory.name:  # the loader writes into the version's tensor
            memory.made = memory.origins()
            memory.operation = "a copy into it"
            return
        if not known:
            self._constant(memory, to, source)
            return
        assert origin is not None
        for one in self._traced(origin, source, to):
            self._add(memory, one)

    def _constant(self, memory: _Memory, to: torch.Tensor, value: torch.Tensor) -> None:
        if not memory.target:
            if memory.writes:
                self._mark(memory, memory.origins(), "a constant within it", to)
            return
        kept = value.detach().to(to.device, copy=True).expand(to.shape)
        dims = list(zip(to.shape, kept.stride(), to.stride(), strict=True))
        at, kinds = int(to.storage_offset()), (value.dtype, to.dtype)
        self._add(memory, _Write(dims, "", 0, at, kinds, kept))

    def _add(self, memory: _Memory, new: _Write) -> None:
        if new.source:
            new = new._replace(dims=merged(new.dims))
            memory.written[new.source] = None
        place = _place(new)
        memory.writes.pop(place, None)  # the later one is the last
        memory.writes[place] = new

    def _traced(self, origin: _Memory, source: torch.Tensor, to: torch.Tensor) -> list[_Write]:
        """A copy, as writes from the version's tensors."""
        seen = source.detach().expand(to.shape)
        shape = list(zip(to.shape, seen.stride(), to.stride(), strict=True))
        begin, offset = int(seen.storage_offset()), int(to.storage_offset())
        if origin.name:
            return [_Write(shape, origin.name, begin, offset, _chain((source.dtype,), to.dtype))]
        dims = merged([(size, other, one) for size, one, other in shape])
        dims = [(size, other, one) for size, one, other in dims]
        found: list[_Write] = []
        left = math.prod(to.shape)
        for one in origin.writes.values():
            kinds = one.dtypes
            if kinds[-1] != source.dtype:
                if len(kinds) > 1 or kinds[0].itemsize != source.dtype.itemsize or not one.source:
                    self._refuse(to, origin.origins(), "a view as another type")
                kinds = (source.dtype,)
            kinds = _chain(kinds, to.dtype)
            there = [(size, other, first) for size, first, other in one.dims]
            if (inside := mapped(dims, begin, there, one.offset)) is not None:
                new, start = inside
                found.append(_Write(new, one.source, one.source_offset + start, offset, kinds))
            elif (inside := mapped(there, one.offset, dims, begin)) is not None:
                new, start = inside
                turned = [(size, other, first) for size, first, other in new]
                found.append(_Write(turned, one.source, one.source_offset, offset + start, kinds))
            else:
                continue
            if not one.source:
                self._refuse(to, origin.origins(), "a copy of a constant")
            left -= math.prod(size for size, _, _ in found[-1].dims)
        if left != 0:
            self._refuse(to, origin.origins(), "a copy of a part of it in another order")
        if any(len(one.dtypes) > 2 for one in found):
            self._refuse(to, origin.origins(), "two conversions")
        return found

    # ---- All else

    def _check(self, func: Any, args: Any, kwargs: Any, origins: dict[str, None]) -> None:
        """Refuses an operation on the version's tensors, before it is done, that leaves what is
        neither seen here nor put back."""
        operation = func.overloadpacket.__name__
        tells = not any("Tensor" in str(one.type) for one in func._schema.returns)
        if operation in _READING or (tells and func.namespace not in _OURS):
            self._refuse(None, origins, operation)
        for one in _written(func, args, kwargs):
            if self._memory(one) is None and one.numel() > 0 and not one.is_meta:
                self._refuse(one, origins, operation)

    def _computed(
        self, func: Any, args: Any, kwargs: Any, fresh: list[torch.Tensor], origins: dict[str, None]
    ) -> None:
        """An operation that copies nothing: what it makes of the version's tensors has no origin,
        but for views, which lie in their memory."""
        operation = func.overloadpacket.__name__
        if any(_key(one) == 0 for one in fresh):
            self._refuse(None, origins, operation)
        if operation.endswith("_like") or operation.startswith("new_"):
            return  # of the same shape, with other values
        for one in (*_written(func, args, kwargs), *fresh):
            if (memory := self._memory(one)) is not None:
                self._mark(memory, origins, operation, one)

    def _mark(
        self, memory: _Memory, origins: dict[str, None], operation: str, place: torch.Tensor
    ) -> None:
        """What lies in this memory was made of these tensors of the version."""
        if memory.target:
            self._refuse(place, origins, operation)
        memory.made = {**memory.made, **origins}
        memory.operation = operation

    def _refuse(self, place: torch.Tensor | None, origins: dict[str, None], operation: str) -> None:
        of = listed(list(origins))
        if place is None:
            text = f"the loader reads values of {of} ({operation})"
        else:
            memory = self._memory(place)
            into = "what is not of the model"
            if memory is not None:
                into = self._name_at(place) if memory.target else "a tensor"
            text = f"the loader writes to {into} what {operation} makes of {of}"
        self.refused = UnsupportedError(f"{text}: load versions with the loader itself")
        raise self.refused

    # ---- Memories

    def _memory(self, tensor: torch.Tensor) -> _Memory | None:
        return self._memories.get(_key(tensor))

    def _name_at(self, tensor: torch.Tensor) -> str:
        return _name_of(self._names[_key(tensor)], int(tensor.storage_offset()) * tensor.itemsize)

    # ---- What it came to

    def parts(self) -> tuple[list[Part], bool]:
        """The parts, and whether pieces of some are overwritten by others."""
        found: list[Part] = []
        overlap = False
        for key, these in self._names.items():
            writes, mixed = _survivors(list(self._memories[key].writes.values()))
            overlap = overlap or mixed
            for one in writes:
                dtype = one.dtypes[-1]
                found.append(
                    Part(
                        source=one.source,
                        target=_name_of(these, one.offset * dtype.itemsize),
                        shape=tuple(dim[0] for dim in one.dims),
                        source_offset=one.source_offset,
                        source_strides=tuple(dim[1] for dim in one.dims),
                        target_offset=one.offset,
                        target_strides=tuple(dim[2] for dim in one.dims),
                        source_dtype=one.dtypes[0],
                        target_dtype=dtype,
                        value=one.value,
                    )
                )
        if not overlap:  # all that is taken of a tensor stands together
            order = {name: i for i, name in enumerate(dict.fromkeys(one.source for one in found))}
            found.sort(key=lambda one: order[one.source])
        return found, overlap


_OURS = ("aten", "prim", "prims")
"""PyTorch's own operations. Others are not looked into: they may work on addresses."""

_READING = ("_local_scalar_dense", "equal", "is_nonzero", "item")
"""Operations that make no tensor of what they read. All that do so and are not PyTorch's own may
keep it."""


def _key(tensor: torch.Tensor) -> int:
    """The number of its storage; 0 for what has none."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The tensors that an operation writes into."""
    for number, one in enumerate(func._schema.arguments):
        if one.alias_info is None or not one.alias_info.is_write:
            continue
        value = args[number] if number < len(args) else kwargs.get(one.name)
        for tensor in tree_leaves(value):
            if isinstance(tensor, torch.Tensor):
                yield tensor


def _chain(kinds: tuple[torch.dtype, ...], last: torch.dtype) -> tuple[torch.dtype, ...]:
    """The conversions in a row, without those that another undoes exactly."""
    if len(kinds) > 1 and last != kinds[-1] and _is_exact(kinds[-2], kinds[-1]):
        kinds = kinds[:-1]
    return kinds if kinds[-1] == last else (*kinds, last)


def _is_exact(narrow: torch.dtype, wide: torch.dtype) -> bool:
    both = narrow.is_floating_point and wide.is_floating_point
    return both and wide.itemsize >= 4 and wide.itemsize > narrow.itemsize


def _name_of(tensors: list[tuple[str, torch.Tensor]], at: int) -> str:
    """The one of a storage's tensors in which the byte lies."""
    for name, one in tensors:
        begin = int(one.storage_offset()) * one.itemsize
        steps = zip(one.shape, one.stride(), strict=True)
        reach = 1 + sum((size - 1) * stride for size, stride in steps)
        if begin <= at < begin + reach * one.itemsize:
            return name
    return tensors[0][0]


def _place(one: _Write) -> tuple[Any, ...]:
    dims = [(size, 0, stride) for size, _, stride in one.dims]
    return one.offset, tuple((size, stride) for size, _, stride in merged(dims)), one.dtypes[-1]


def _survivors(writes: list[_Write]) -> tuple[list[_Write], bool]:
    """Without those that are overwritten as a whole; and whether some are in pieces."""
    width = min((one.dtypes[-1].itemsize for one in writes), default=1)
    reach = [_range(one) for one in writes]
    order = sorted(range(len(writes)), key=lambda i: reach[i])
    ends = [reach[i][1] for i in order]
    if all(end <= reach[i][0] for end, i in zip(ends, order[1:], strict=False)):
        return writes, False
    owner = torch.full((max(ends) // width,), -1, dtype=torch.int32)
    for number, one in enumerate(writes):
        each = one.dtypes[-1].itemsize // width
        shape = [*(dim[0] for dim in one.dims), each]
        strides = [*(dim[2] * each for dim in one.dims), 1]
        owner.as_strided(shape, strides, one.offset * each).fill_(number)
    left = torch.bincount(owner[owner >= 0], minlength=len(writes)).tolist()
    wholes = [
        math.prod(dim[0] for dim in one.dims) * (one.dtypes[-1].itemsize // width) for one in writes
    ]
    mixed = any(0 < here < whole for here, whole in zip(left, wholes, strict=True))
    return [one for one, here in zip(writes, left, strict=True) if here > 0], mixed


def _range(one: _Write) -> tuple[int, int]:
    """The first byte, and that after the last."""
    last = one.offset + sum((size - 1) * stride for size, _, stride in one.dims)
    width = one.dtypes[-1].itemsize
    return one.offset * width, (last + 1) * width
