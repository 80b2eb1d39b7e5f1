"""Which tensors a version has: names, types, shapes, and which of them are tied.

Tensors that are there together, and share memory and layout, are found to be tied and travel once;
``Alias`` says so where that cannot be seen. Where the bytes of a tensor lie is known to source.py;
nothing is known here of publishers and of versions.
"""

import ctypes
from collections import OrderedDict
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from refit._c import abi, dtypes
from refit.errors import InvalidError, NotFoundError
from refit.weights.boxes import Box, Cut, box_of
from refit.weights.source import RawTensor, Weight, marks_of, weight_named
from refit.weights.ties import Ties

__all__ = [
    "Alias",
    "Collected",
    "Declared",
    "RawTensor",
    "TensorSpec",
    "Tensors",
    "collect",
    "is_settled",
    "lasting",
    "pairs_of",
    "planned",
    "specs_of",
    "to_c",
]


Tensors: TypeAlias = Mapping[str, Any] | Iterable[tuple[str, Any]]
"""Named tensors: a mapping, or (name, tensor) pairs."""


@dataclass(frozen=True, slots=True)
class Alias:
    """In place of a tensor: it is tied to the one of that name, and travels no second time. Where
    tensors are looked at to learn what there is, that one comes before it."""

    of: str


class TensorSpec(NamedTuple):
    """One tensor of a version, without its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    alias_of: str | None = None

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return dtypes.by_name(self.dtype).nbytes(self.shape)


def pairs_of(tensors: Tensors) -> Iterator[tuple[str, Any]]:
    """The (name, tensor) pairs of a mapping or of an iterable of pairs. InvalidError."""
    _check_iterable(tensors)
    for pair in tensors.items() if isinstance(tensors, Mapping) else tensors:
        if type(pair) is not tuple or len(pair) != 2:
            pair = _as_pair(pair)
        yield pair


def _check_iterable(tensors: Any) -> None:
    if not hasattr(tensors, "__iter__"):
        raise InvalidError(
            "weights are a mapping or an iterable of (name, tensor) pairs, not a "
            f"{type(tensors).__name__}: of a model, give refit.named_weights(model)"
        )


def is_settled(tensors: Any) -> bool:
    """Whether all its tensors are there together: a mapping, its items, a sequence, or what says so
    by an attribute ``settled``. What an iterator gave counts only until the next is asked for."""
    if isinstance(tensors, Mapping | Sequence | ItemsView):
        return True
    return getattr(tensors, "settled", False) is True


_ITEMS: tuple[type[Any], ...] = (type({}.items()), type(OrderedDict[str, Any]().items()))


def lasting(tensors: Tensors) -> Callable[[str], bool]:
    """Which of the tensors are there also without being asked for: all of a dict, its items, and a
    list; of others those for which a method ``lasts`` says so. What is made when it is asked for
    takes memory for as long as it is held."""
    plain = isinstance(tensors, dict) and type(tensors).items in (dict.items, OrderedDict.items)
    if plain or isinstance(tensors, list | tuple) or type(tensors) in _ITEMS:
        return lambda _: True
    found: Callable[[str], bool] = getattr(tensors, "lasts", lambda _: False)
    return found


def _as_pair(pair: Any) -> tuple[Any, Any]:
    try:
        name, tensor = pair
    except (TypeError, ValueError):
        raise InvalidError(
            "weights are a mapping or an iterable of (name, tensor) pairs, but one of them is "
            f"a {type(pair).__name__}"
        ) from None
    return name, tensor


def _check_name(name: Any) -> None:
    if not isinstance(name, str):
        raise InvalidError(f"a tensor's name is text, and {name!r} is a {type(name).__name__}")
    if not name or "\0" in name:
        raise InvalidError(f"{name!r} cannot name a tensor: it is empty, or has a NUL in it")


class Row(NamedTuple):
    """A tensor that travels, with its bytes in row order."""

    number: int
    pointer: int
    nbytes: int


class Collected(NamedTuple):
    """Named tensors, all at hand: what they are, and those that travel."""

    specs: tuple[TensorSpec, ...]
    rows: dict[int, list[Row]]
    """By the CUDA device, or -1, that they lie on."""
    scattered: list[tuple[int, Weight]]
    """Those in another order, by index."""
    held: list[Any]
    """What has the bytes, for as long as they are read."""

    @property
    def cuda_number(self) -> int | None:
        """Of the first CUDA device that tensors lie on; None: all are on the host."""
        devices = [*self.rows, *(weight.device for _, weight in self.scattered)]
        return next((number for number in devices if number >= 0), None)


def collect(tensors: Tensors, *, ties: bool = True) -> Collected:
    """Looks at all tensors, and with ``ties`` finds those that are tied: for tensors that are there
    together. InvalidError, UnsupportedError."""
    specs: list[TensorSpec] = []
    rows: dict[int, list[Row]] = {}
    scattered: list[tuple[int, Weight]] = []
    held: list[Any] = []
    seen = Ties()
    known: dict[str, TensorSpec] = {}
    for name, tensor in pairs_of(tensors):
        _check_name(name)
        if name in known:
            raise InvalidError(f"two tensors are named {name!r}")
        if type(tensor) is Alias:
            spec = _spec_of_alias(name, tensor, known)
        else:
            weight = weight_named(name, tensor)
            tied = seen.find(name, weight.pointer, weight) if ties and weight.nbytes else None
            spec = TensorSpec(name, weight.dtype.name, weight.shape, tied)
            held.append(weight.tensor)
            if tied is None and weight.layout is None:
                row = Row(len(specs), weight.pointer, weight.nbytes)
                rows.setdefault(weight.device, []).append(row)
            elif tied is None:
                scattered.append((len(specs), weight))
        specs.append(spec)
        known[name] = spec
    return Collected(tuple(specs), rows, scattered, held)


class Collector:
    """``collect`` for version after version: tensors that lie where they lay, under the same names,
    are not looked at again. While nothing has changed ``rows`` is the same object."""

    def __init__(self) -> None:
        self._known: tuple[Any, Collected] | None = None

    def known(self, tensors: Tensors) -> Collected | None:
        """What is known of them without asking for each; None: that takes ``collect``."""
        return self._same(*fingerprint_of(tensors))

    def collect(self, tensors: Tensors) -> Collected:
        """Raises what ``collect`` raises."""
        pairs = list(pairs_of(tensors))
        names = [name for name, _ in pairs]
        marks, storages = marks_of([tensor for _, tensor in pairs])
        key, _ = fingerprint_of(tensors)
        if key is None and marks is not None:
            key = names, marks
        same = self._same(key, storages)
        if same is not None:
            return same
        found = collect(pairs)
        lasts = key is not None and not found.scattered
        self._known = (key, found._replace(held=[])) if lasts else None
        return found

    def _same(self, key: Any, held: list[Any]) -> Collected | None:
        if key is None or self._known is None or self._known[0] != key:
            return None
        return self._known[1]._replace(held=held)


def _spec_of_alias(name: str, alias: Alias, known: Mapping[str, TensorSpec]) -> TensorSpec:
    target = known.get(alias.of)
    if target is None:
        raise InvalidError(f"{name} is tied to {alias.of!r}, which must come before it")
    return TensorSpec(name, target.dtype, target.shape, target.alias_of or target.name)


class Declared:
    """The tensors that versions have, as they were declared; and, where several publishers have
    them, the boxes of this one by name."""

    def __init__(
        self, specs: tuple[TensorSpec, ...], boxes: Mapping[str, Box] | None = None
    ) -> None:
        self.specs = specs
        self.boxes = boxes
        self._index = {spec.name: i for i, spec in enumerate(specs)}

    def sharded(self, parts: Mapping[str, Cut]) -> "Declared":
        """The same, of which one of several publishers has these parts. InvalidError: a part is
        not within its tensor, or one that is tied has another than what it is tied to;
        NotFoundError: a name was not declared."""
        boxes: dict[str, Box] = {}
        for name, cut in parts.items():
            if name not in self._index:
                raise NotFoundError(f"{name!r} was not declared: declare the tensors before")
            spec = self.specs[self._index[name]]
            box = box_of(name, cut, spec.shape)
            if boxes.setdefault(spec.alias_of or name, box) != box:
                raise InvalidError(f"{name} is tied to {spec.alias_of}: their parts must be equal")
        return Declared(self.specs, {name: box for name, box in boxes.items() if box.numel})

    def match(self, name: str, tensor: Any) -> tuple[int, Weight | None]:
        """Which tensor it is, and its bytes; None for an ``Alias``, and for nothing where this
        publisher has nothing. InvalidError, NotFoundError, UnsupportedError."""
        index = self._index.get(name)
        if index is None:
            raise NotFoundError(f"{name!r} was not declared: declare the tensors again")
        spec = self.specs[index]
        if type(tensor) is Alias:
            if spec.alias_of is None:
                raise InvalidError(f"{name} was declared with bytes of its own, not as tied")
            return index, None
        weight = weight_named(name, tensor)
        if self.boxes is not None:
            return self._match_part(index, spec, weight)
        if weight.shape != spec.shape or weight.dtype.name != spec.dtype:
            raise InvalidError(
                f"{name} is {weight.dtype.name} {list(weight.shape)}, but was declared as "
                f"{spec.dtype} {list(spec.shape)}: declare the tensors again"
            )
        return index, weight

    def _match_part(
        self, index: int, spec: TensorSpec, weight: Weight
    ) -> tuple[int, Weight | None]:
        box = (self.boxes or {}).get(spec.alias_of or spec.name)
        if box is None and weight.nbytes == 0:
            return index, None
        if box is None:
            raise InvalidError(
                f"{spec.name}: this rank has no part of it, as publisher.shard was told: leave it "
                "out, or say which part it has"
            )
        if weight.shape != box.shape or weight.dtype.name != spec.dtype:
            raise InvalidError(
                f"{spec.name} is {weight.dtype.name} {list(weight.shape)}, but this rank's part of "
                f"it is {spec.dtype} {list(box.shape)}: give that part, or call publisher.shard "
                "again"
            )
        return index, weight

    def is_tied(self, index: int) -> bool:
        """Whether its bytes are another's, so that it is not written."""
        return self.specs[index].alias_of is not None


def fingerprint_of(tensors: Tensors) -> tuple[Any, list[Any]]:
    """Equal for weights that would give the same tensors under the same names; and what holds their
    memory. None: only the tensors tell. ``NamedWeights`` has it of its model."""
    if isinstance(tensors, Mapping) or not is_settled(tensors):
        return None, []
    method = getattr(tensors, "fingerprint", None)
    found: tuple[Any, list[Any]] = method() if callable(method) else (None, [])
    return found


def planned(tensors: Tensors) -> Tensors:
    """The same, for two uses of them: what there is, and then the bytes. ``NamedWeights`` looks at
    its model once for both."""
    method = getattr(tensors, "planned", None)
    return method() if callable(method) else tensors


def specs_of(tensors: Any) -> tuple[TensorSpec, ...]:
    """The declarations of tensors, ``TensorSpec``s, or an object with ``manifest()``.

    Specs are anything with ``name``, ``dtype`` (a name, or PyTorch's type), ``shape`` and
    ``alias_of``. InvalidError, UnsupportedError.
    """
    if callable(getattr(tensors, "manifest", None)):
        return tuple(_spec_like(one) for one in tensors.manifest())
    _check_iterable(tensors)
    pairs = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
    if all(hasattr(one, "alias_of") for one in pairs):
        return tuple(_spec_like(one) for one in pairs)
    return collect(pairs, ties=is_settled(tensors)).specs


def _spec_like(one: Any) -> TensorSpec:
    if type(one) is TensorSpec:
        return one
    kind = one.dtype if isinstance(one.dtype, str) else dtypes.of_torch(one.dtype).name
    return TensorSpec(one.name, kind, tuple(one.shape), one.alias_of)


def to_c(specs: Iterable[TensorSpec]) -> Any:
    """The manifest as the C library takes it: an array of refit_tensor. InvalidError."""
    specs = tuple(specs)
    index = {spec.name: i for i, spec in enumerate(specs)}
    array = (abi.refit_tensor * len(specs))()
    for spec, out in zip(specs, array, strict=True):
        _check_name(spec.name)
        if len(spec.shape) > abi.REFIT_RANK_MAX:
            raise InvalidError(
                f"{spec.name} has {len(spec.shape)} dimensions: {abi.REFIT_RANK_MAX} are the most"
            )
        if spec.alias_of is not None and spec.alias_of not in index:
            raise InvalidError(f"{spec.name} is tied to {spec.alias_of!r}, which is not there")
        out.size = ctypes.sizeof(abi.refit_tensor)
        out.name = _encode(spec.name)
        out.dtype = dtypes.by_name(spec.dtype).number
        out.rank = len(spec.shape)
        out.shape[: out.rank] = spec.shape
        out.bytes = spec.nbytes
        out.alias_of = abi.REFIT_NO_ALIAS if spec.alias_of is None else index[spec.alias_of]
    return array


def _encode(name: str) -> bytes:
    try:
        return name.encode()
    except UnicodeEncodeError:
        raise InvalidError(f"{name!r} cannot name a tensor: it is not UTF-8") from None
