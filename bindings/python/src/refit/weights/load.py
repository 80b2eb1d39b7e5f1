"""Copying a version into tensors that exist: checked whole first, then written.

A check names everything that does not fit at once. It compares views with a module, or with a
mapping of tensors; the caller keeps a ``Fit`` for the next version.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from refit._c import dtypes
from refit._c.waiting import interrupts_held
from refit.errors import InvalidError, RefitError, UnsupportedError
from refit.weights.source import Weight, weight_of
from refit.weights.target import Fingerprint, NoPlace, target_of, tensors_of
from refit.weights.view import Entry, View, same_bytes

_NAMED = 8


class Loaded(NamedTuple):
    """What a load left out, as PyTorch's ``load_state_dict`` says it."""

    missing: list[str]
    """Names of the target that the version does not have."""
    unexpected: list[str]
    """Names of the version that the target does not have."""


class Plan(NamedTuple):
    """A load that fits."""

    copies: list[tuple[View, Weight]]
    left_out: Loaded
    lasts: bool
    """Whether it fits every version of the same tensors: none of this one's bytes was read, and
    all that was found in the target is a tensor."""

    def is_into(self, target: Any) -> bool:
        """Whether what is written are the target's own tensors, and not pieces that were made of
        them for this time."""
        own = target.values() if isinstance(target, Mapping) else tensors_of(target).values()
        known = set(map(id, own))
        return self.lasts and all(id(place.tensor) in known for _, place in self.copies)


class Fit(NamedTuple):
    """A load that fitted a version, for those of the same tensors. It holds none of the target's:
    they may go."""

    entries: Mapping[str, Entry]
    target: Fingerprint
    strict: bool
    cast: bool
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    targets: Any
    """The array of refit_target."""

    def is_for(
        self, entries: Mapping[str, Entry], target: Fingerprint | None, strict: bool, cast: bool
    ) -> bool:
        """Whether nothing that it depends on has changed."""
        asked = self.strict is strict and self.cast is cast
        return self.entries is entries and asked and self.target == target

    @property
    def left_out(self) -> Loaded:
        """For the caller to keep."""
        return Loaded(list(self.missing), list(self.unexpected))


def check(views: Mapping[str, View], target: Any, *, strict: bool, cast: bool) -> Plan:
    """Compares names, types, shapes, and the bytes of two tensors that go into one memory; writes
    nothing. InvalidError names what does not fit."""
    places, optional, _ = target_of(target).named_as(views)
    wrong: list[str] = []
    copies: list[tuple[View, Weight]] = []
    known: dict[str, Weight] = {}
    other: list[str] = []
    for name, place in places.items():
        if name in optional and name not in views:
            continue
        if not _is_tensor(place):
            other.append(name)
            if strict:
                wrong.append(_no_tensor(name, place))
            continue
        try:
            known[name] = weight_of(place)
        except RefitError as why:
            wrong.append(f"{name}: {why.text}")
            continue
        if name in views:
            wrong += _misfit(views[name], known[name], cast)
            copies.append((views[name], known[name]))
    left_out = Loaded(_missing(views, known), _unexpected(views, places))
    if strict:
        wrong += _absent(left_out)
    pairs = [] if wrong else list(_meeting(copies))
    for one, later in pairs:
        wrong += _conflict(one, later)
    for name in other:
        (left_out.unexpected if name in views else left_out.missing).append(name)
    if wrong:
        raise InvalidError(
            f"the version does not fit, and nothing was changed: {listed(wrong, '; ')}"
        )
    tied = all(_head(one.view) == _head(later.view) for one, later in pairs)
    return Plan(copies, left_out, lasts=tied and not other)


def _head(view: View) -> str:
    """The name under which its bytes travel."""
    return view.alias_of or view.name


def apply(plan: Plan) -> Loaded:
    """Writes all bytes; returns what was left out. Blocks until they are there."""
    places = [(view, place.tensor) for view, place in plan.copies]
    tensors = [(view, place) for view, place in places if hasattr(place, "data_ptr")]
    if tensors:
        _fill_tensors(tensors)
    for view, place in places:
        if not hasattr(place, "data_ptr"):
            place[...] = view.on_host()
    return plan.left_out


def apply_as_they_come(plan: Plan, tensors: Iterator[tuple[str, Any]]) -> Loaded:
    """The same from tensors that come one after the other. Blocks until all have."""
    import torch

    places: dict[str, list[Any]] = {}
    for view, place in plan.copies:
        if not hasattr(place.tensor, "data_ptr"):
            raise UnsupportedError(
                f"{view.name} is to go into a {type(place.tensor).__name__}, and the version is "
                "streamed: load it into PyTorch tensors"
            )
        places.setdefault(view.name, []).append(place.tensor)
    for name, tensor in tensors:
        for place in places.get(name, ()):
            with interrupts_held(), torch.inference_mode():
                place.detach().copy_(tensor)
    for place in (one for some in places.values() for one in some):
        if place.device.type == "cuda":
            torch.cuda.current_stream(place.device).synchronize()
    return plan.left_out


def _fill_tensors(copies: list[tuple[View, Any]]) -> None:
    import torch

    for view, place in copies:
        # In this mode tensors that were made in it and out of it may be changed.
        with interrupts_held(), torch.inference_mode():
            place.detach().copy_(view.torch())
    for device in {place.device for _, place in copies if place.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()


def _is_tensor(place: Any) -> bool:
    return any(hasattr(place, one) for one in ("data_ptr", "flags", "__dlpack__"))


def _no_tensor(name: str, place: Any) -> str:
    kind = f"{name} is a {type(place).__name__}, no tensor"
    return f"{place if isinstance(place, NoPlace) else kind} (strict=False leaves it as it is)"


def _misfit(view: View, place: Weight, cast: bool) -> list[str]:
    if view._entry.holes:
        return [f"of {view.name} only what a recorded loader reads was taken"]
    if view.shape != place.shape:
        return [f"{view.name} is {list(view.shape)} and not {list(place.shape)}"]
    if view.dtype != place.dtype.name:
        if not cast:
            return [f"{view.name} is {view.dtype} and not {place.dtype.name} (cast=True converts)"]
        if 1 in (_whole(view.dtype), _whole(place.dtype.name)):
            return [f"{view.name} cannot be converted from {view.dtype} to {place.dtype.name}"]
    return _unwritable(view, place)


def _whole(name: str) -> int:
    """1 for types whose values no library here converts."""
    return int(dtypes.by_name(name).bits % 8 != 0)


def _unwritable(view: View, place: Weight) -> list[str]:
    tensor = place.tensor
    try:
        if hasattr(tensor, "data_ptr"):
            dtypes.to_torch(dtypes.by_name(view.dtype))
            if _repeats(tensor):
                return [f"{view.name} is to go into an expanded tensor, whose elements share bytes"]
        elif not hasattr(tensor, "flags"):
            return [f"{view.name} is to go into a {type(tensor).__name__}, no tensor or array"]
        elif not tensor.flags.writeable:
            return [f"{view.name} is to go into an array that is read-only"]
        else:
            dtypes.to_numpy(dtypes.by_name(view.dtype))
    except UnsupportedError as why:
        return [f"{view.name}: {why.text}"]
    return []


def _repeats(tensor: Any) -> bool:
    return any(
        step == 0 and length > 1 for step, length in zip(tensor.stride(), tensor.shape, strict=True)
    )


def _missing(views: Mapping[str, View], places: Mapping[str, Weight]) -> list[str]:
    """Names without bytes in the version, but for those tied to one that has them."""
    loaded = {places[name].identity for name in places if name in views}
    return [
        name
        for name, place in places.items()
        if name not in views and (place.identity is None or place.identity not in loaded)
    ]


def _unexpected(views: Mapping[str, View], places: Mapping[str, Any]) -> list[str]:
    """Names without a place in the target, but for those tied to one that has one."""
    loaded = {view.alias_of or name for name, view in views.items() if name in places}
    return [
        name
        for name, view in views.items()
        if name not in places and (view.alias_of or name) not in loaded
    ]


def _absent(left_out: Loaded) -> list[str]:
    found = []
    if left_out.missing:
        found.append(f"it lacks {listed(left_out.missing)}")
    if left_out.unexpected:
        found.append(f"it has {listed(left_out.unexpected)}, which the target lacks")
    return found


def listed(names: list[str], comma: str = ", ") -> str:
    """The first names, and how many more there are."""
    more = len(names) - _NAMED
    return comma.join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


# ---- Tensors of a target that share memory, into which a version would be written one over the
# other.
#
# Two tensors of a version may go into one memory only if they have the same type and the same
# bytes: then it does not matter which is written last. Any other overlap is an error. Tensors
# that lie in one range of memory without an element in common (columns of a matrix) are
# apart.


class _Range(NamedTuple):
    """From the first byte of a tensor to its last one."""

    begin: int
    end: int
    view: View
    place: Weight


def _meeting(copies: list[tuple[View, Weight]]) -> Iterator[tuple[_Range, _Range]]:
    """Each pair in one range of memory."""
    ranges = sorted(
        (_range(view, place) for view, place in copies if place.nbytes),
        key=lambda one: (one.begin, one.end),
    )
    open_ones: list[_Range] = []
    for one in ranges:
        open_ones = [other for other in open_ones if other.end > one.begin]
        yield from ((other, one) for other in open_ones)
        open_ones.append(one)


def _range(view: View, place: Weight) -> _Range:
    if place.layout is None:
        return _Range(place.pointer, place.pointer + place.nbytes, view, place)
    width, steps = _steps(place.tensor)
    reach = [(length - 1) * step for length, step in steps]
    begin = place.pointer + sum(one for one in reach if one < 0)
    end = place.pointer + sum(one for one in reach if one > 0) + width
    return _Range(begin, end, view, place)


def _steps(tensor: Any) -> tuple[int, list[tuple[int, int]]]:
    """Bytes of an element, and for each dimension its length and the bytes between neighbours."""
    if hasattr(tensor, "data_ptr"):
        width = tensor.element_size()
        strides = [step * width for step in tensor.stride()]
    else:
        width, strides = tensor.itemsize, tensor.strides
    return width, list(zip(tensor.shape, strides, strict=True))


def _conflict(a: _Range, b: _Range) -> Iterator[str]:
    """A sentence if they cannot both be written. Reads what has to be compared."""
    names = f"{a.view.name} and {b.view.name}"
    if _is_one(a, b):
        if not same_bytes(a.view, b.view):
            yield (
                f"{names} have one memory here, but differ in the version: untie them here, so "
                "that each has its own memory, or tie them at the trainer"
            )
    elif a.place.layout is None and b.place.layout is None:
        yield f"the memory of {names} overlaps"
    else:
        yield from _interleaved(names, a.place.tensor, b.place.tensor)


def _is_one(a: _Range, b: _Range) -> bool:
    """Whether the same bytes would be written to the same places."""
    if a.place.dtype is not b.place.dtype or a.begin != b.begin or a.end != b.end:
        return False
    rows = a.place.layout is None and b.place.layout is None
    return rows or a.place.identity == b.place.identity


class _Shape:
    """The elements of a tensor as NumPy takes them, wherever they lie: it reads none of them."""

    def __init__(self, tensor: Any) -> None:
        width, steps = _steps(tensor)
        pointer = tensor.data_ptr() if hasattr(tensor, "data_ptr") else tensor.ctypes.data
        self.__array_interface__ = {
            "data": (pointer, True),
            "shape": tuple(length for length, _ in steps),
            "strides": tuple(step for _, step in steps),
            "typestr": f"|V{width}",
            "version": 3,
        }


def _interleaved(names: str, a: Any, b: Any) -> Iterator[str]:
    try:
        import numpy
    except ImportError:
        yield f"the memory of {names} may overlap, which takes NumPy to tell: install it"
        return
    if numpy.shares_memory(numpy.asarray(_Shape(a)), numpy.asarray(_Shape(b))):
        yield f"the memory of {names} overlaps"
