"""What a loader of an engine does to the engine's memory, as a list of parts: boxes of a version's
tensors, each with its place in a parameter or buffer. record.py makes it.

A box is a shape with a stride for each dimension, in elements of the memory that it lies in, so a
part says of each of its elements where it comes from and where it goes. Parts are canonical: no
dimension has length one, those that go on from one another are one, and the strides in the engine's
memory fall from the first to the last. Tensors of a version are flat, in row order.
"""

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import torch

from refit._c import dtypes
from refit._c.waiting import interrupts_held
from refit.errors import InvalidError, StateError
from refit.weights import target
from refit.weights.boxes import Box
from refit.weights.load import Loaded, listed
from refit.weights.needs import Boxes, nbytes, needed
from refit.weights.source import ASLEEP, lacks_memory
from refit.weights.target import Fingerprint
from refit.weights.view import Entry

_HELD = 64 << 20
"""Ctrl-C waits for the copies of so many bytes."""


class Part(NamedTuple):
    """One box, from a tensor of a version to the engine's memory."""

    source: str
    """The version's tensor; empty for what is the same in each version."""
    target: str
    """A parameter or buffer that lies there."""
    shape: tuple[int, ...]
    source_offset: int
    source_strides: tuple[int, ...]
    target_offset: int
    """From the beginning of the storage, as PyTorch counts it."""
    target_strides: tuple[int, ...]
    source_dtype: torch.dtype
    target_dtype: torch.dtype
    """Another one: the elements are converted."""
    value: torch.Tensor | None = None
    """What is the same in each version."""

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Its elements of the version's tensor."""
        if self.value is not None:
            return self.value.expand(self.shape)
        if tensor.dtype != self.source_dtype:
            tensor = tensor.reshape(-1).view(self.source_dtype)
        offset = tensor.storage_offset() + self.source_offset
        return tensor.as_strided(self.shape, self.source_strides, offset)

    def into(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Its elements in the engine's memory."""
        place = torch.empty(0, dtype=self.target_dtype, device=storage.device)
        return place.set_(storage, self.target_offset, self.shape, self.target_strides)

    def rows(self, dtype: dtypes.Dtype, converts: bool) -> "Rows | None":
        """The part as the C library takes it, of a tensor of this type; None: it does not."""
        alike = self.source_dtype == self.target_dtype
        bits = 8 * self.source_dtype.itemsize
        target = dtype if alike and dtype.bits == bits else None
        bare = (self.source_dtype, self.target_dtype) == (torch.float32, torch.bfloat16)
        if bare and converts and dtype.name == "F32" and len(self.shape) <= 1:
            target = dtypes.by_name("BF16")
        if target is None or len(self.shape) > 4 or self.value is not None:
            return None
        dims = list(zip(self.shape, self.source_strides, self.target_strides, strict=True))
        if not dims:
            dims = [(1, 1, 1)]
        there = here = 1  # elements from the first to the last, of the dimensions so far
        for size, source, to in reversed(dims):
            if source < there or to < here:
                return None
            there += (size - 1) * source
            here += (size - 1) * to
        shape, sources, places = zip(*dims, strict=True)
        if sources[-1] != 1 or places[-1] != 1:
            return None
        nbytes = here * self.target_dtype.itemsize
        return Rows(target, shape, self.source_offset, sources, places, nbytes)


class Rows(NamedTuple):
    """A part whose innermost elements follow each other on both sides."""

    dtype: dtypes.Dtype
    shape: tuple[int, ...]
    offset: int
    source: tuple[int, ...]
    target: tuple[int, ...]
    nbytes: int
    """From its first byte in the engine to its last."""


class Layout(NamedTuple):
    """Where a tensor of the engine lies."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Layout":
        """That of a tensor now."""
        return cls(
            tensor.untyped_storage()._cdata,
            int(tensor.storage_offset()),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
        )


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    """A module's parameters and buffers, by all of their names, or a mapping's tensors."""
    if isinstance(model, torch.nn.Module):
        return target.tensors_of(model)
    if isinstance(model, Mapping):
        return {name: one for name, one in model.items() if isinstance(one, torch.Tensor)}
    raise InvalidError(f"a {type(model).__name__} is neither a module nor a mapping of tensors")


class Packed(NamedTuple):
    """Parts as the C library takes them, for versions of the same tensors and a model that stays
    where it is."""

    entries: Mapping[str, Entry]
    model: Fingerprint
    converts: bool
    targets: Any
    """The array of refit_target."""
    boxes: bytearray
    """What it points to."""
    left: list[tuple[Part, torch.Tensor]]
    """Those that the C library does not copy."""


class Parts:
    """What ``refit.record`` learned of a loader: ``update.load_into(parts)`` writes as it does.

    It holds the model. ``str`` lists the parts.
    """

    parts: tuple[Part, ...]
    """In the order in which they are written."""
    manifest: Mapping[str, tuple[str, tuple[int, ...]]]
    """The types and shapes that a version must have, by name."""
    unused: tuple[str, ...]
    """Names of the version of which the loader takes nothing."""
    untouched: tuple[str, ...]
    """Parameters and buffers to which it writes nothing."""

    def __init__(
        self,
        model: Any,
        manifest: Mapping[str, tuple[str, tuple[int, ...]]],
        parts: list[Part],
        overlap: bool,
        digest: bytes | None = None,
        ties: Mapping[str, str] | None = None,
    ) -> None:
        self.manifest = manifest
        self.digest = digest
        """Of all that versions have, as the C library says it; None: it is not known."""
        self.ties = ties or {}
        """The names under which the bytes of tied tensors travel."""
        self.parts = tuple(parts)
        self.overlap = overlap
        """Whether a part is written over a piece of another, so that their order counts."""
        self.model = model
        self.packed: Packed | None = None
        tensors = tensors_of(model)
        self._layouts = {name: Layout.of(one) for name, one in tensors.items()}
        storages = {one.untyped_storage()._cdata: one.untyped_storage() for one in tensors.values()}
        self._places = [part.into(storages[self._layouts[part.target].storage]) for part in parts]
        self._rows: dict[bool, list[Rows | None]] = {}
        used = {part.source for part in parts}
        written = {self._layouts[part.target].storage for part in parts}
        self.unused = tuple(name for name in manifest if name not in used)
        self._written = [name for name, one in self._layouts.items() if one.storage in written]
        self.untouched = tuple(
            name for name, one in self._layouts.items() if one.storage not in written
        )

    def packed_for(
        self, entries: Mapping[str, Entry], model: Fingerprint | None, converts: bool
    ) -> Packed | None:
        """What was packed for the version before, if that is as good for this one."""
        found = self.packed
        if found is None or found.entries is not entries or found.converts is not converts:
            return None
        return found if found.model == model else None

    def pack(
        self,
        entries: Mapping[str, Entry],
        model: Fingerprint,
        converts: bool,
        targets: Any,
        boxes: bytearray,
        left: list[tuple[Part, torch.Tensor]],
    ) -> None:
        """Keeps it for the next version: see ``Packed``."""
        self.packed = Packed(entries, model, converts, targets, boxes, left)

    @cached_property
    def needed(self) -> Boxes:
        """What it reads of a version, by name: boxes that are apart."""
        return needed(self.parts, self.manifest, self.ties)

    @cached_property
    def share(self) -> float:
        """How much of a version's bytes ``needed`` are."""
        names = self.manifest.keys() - self.ties.keys()
        whole = nbytes({one: [Box.whole(self.manifest[one][1])] for one in names}, self.manifest)
        return nbytes(self.needed, self.manifest) / whole if whole else 1.0

    def check(self, version: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        """Whether a version with these types and shapes can be written now; writes nothing.
        InvalidError: it is not the one that was recorded; StateError: the model is not."""
        wrong = [f"it lacks {name}" for name in self.manifest if name not in version]
        for name, (dtype, shape) in version.items():
            if name not in self.manifest:
                wrong.append(f"it has {name}, which the recording lacks")
            elif self.manifest[name] != (dtype, tuple(shape)):
                was, had = self.manifest[name]
                wrong.append(f"{name} is {dtype} {list(shape)} and not {was} {list(had)}")
        if wrong:
            raise InvalidError(
                f"the version is not like the recorded one, and nothing was changed: "
                f"{listed(wrong, '; ')}. Record the loader again"
            )
        self.check_model()

    def check_model(self) -> None:
        """StateError: the model is not where it was recorded."""
        now = tensors_of(self.model)
        for name in self._written:
            layout = self._layouts[name]
            if name not in now or Layout.of(now[name]) != layout:
                raise StateError(
                    f"{name} is not where it was recorded: record the loader again after the model "
                    "was moved, or its tensors replaced"
                )
            if lacks_memory(now[name]):
                raise StateError(f"{name}: {ASLEEP}")

    def places(self) -> list[tuple[Part, torch.Tensor]]:
        """Each part with its elements in the engine's memory."""
        return list(zip(self.parts, self._places, strict=True))

    def rows(self, converts: bool) -> "list[Rows | None]":
        """Each part as the C library takes it, or None. `converts`: where it does so."""
        if converts not in self._rows:
            self._rows[converts] = [
                part.rows(dtypes.by_name(self.manifest[part.source][0]), converts)
                if part.source
                else None
                for part in self.parts
            ]
        return self._rows[converts]

    @property
    def left_out(self) -> Loaded:
        """As ``load_into`` says it."""
        return Loaded(list(self.untouched), list(self.unused))

    def __len__(self) -> int:
        return len(self.parts)

    def __repr__(self) -> str:
        into = len({self._layouts[part.target].storage for part in self.parts})
        casts = sum(1 for one in self.parts if one.source_dtype != one.target_dtype and one.source)
        more = f", {casts} of them converted" if casts else ""
        more += f"; {len(self.unused)} tensors unused" if self.unused else ""
        used = len(self.manifest) - len(self.unused)
        return f"<refit.Parts: {used} tensors in {len(self)} parts to {into} places{more}>"

    def __str__(self) -> str:
        return "\n".join([repr(self), *(f"  {self._line_of(part)}" for part in self.parts)])

    def _line_of(self, part: Part) -> str:
        place = self._layouts[part.target]
        steps = list(zip(part.shape, part.source_strides, part.target_strides, strict=True))
        reach = [sum((size - 1) * step[side] for size, *step in steps) for side in (0, 1)]
        begin = part.target_offset - place.offset
        into = part.target + _slices(place.shape, begin, reach[1], part.numel)
        if not part.source:
            return f"a constant -> {into}"
        shape = self.manifest[part.source][1]
        of = part.source + _slices(shape, part.source_offset, reach[0], part.numel)
        kinds = [_short(one) for one in (part.source_dtype, part.target_dtype)]
        return f"{of} -> {into}" + (f", {kinds[0]} to {kinds[1]}" if kinds[0] != kinds[1] else "")


def write(
    places: list[tuple[Part, torch.Tensor]], tensor_of: Callable[[str], torch.Tensor]
) -> None:
    """Writes parts in their order, with PyTorch, one copy for each. Blocks until they are there."""
    name, tensor, at = "", torch.empty(0), 0
    while at < len(places):
        held = 0
        # In this mode tensors that were made in it and out of it may be changed.
        with interrupts_held(), torch.inference_mode():
            while at < len(places) and held < _HELD:
                part, place = places[at]
                if part.source and part.source != name:
                    name, tensor = part.source, tensor_of(part.source)
                place.copy_(part.of(tensor))
                held += place.nbytes
                at += 1
    for device in {place.device for _, place in places if place.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()


def _slices(shape: tuple[int, ...], begin: int, reach: int, count: int) -> str:
    """The slices of a tensor in row order that so many elements are, from one to the last."""
    found: list[tuple[int, int, int]] = []
    first, last = begin, begin + reach
    for size in reversed(shape):
        first, low = divmod(first, size)
        last, high = divmod(last, size)
        found.insert(0, (low, high + 1, size))
    if first != 0 or last != 0 or math.prod(high - low for low, high, _ in found) != count:
        return f", elements from {begin} on"
    while found and found[-1][:2] == (0, found[-1][2]):
        found.pop()
    return f"[{', '.join(f'{low}:{high}' for low, high, _ in found)}]" if found else ""


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
