"""The tensors that a version is written into, under the names that it brings.

A target is a mapping of names to tensors, or an engine: a module, whose own parameters and buffers
are written. Its ``state_dict()`` tells their names, but may give copies of them (hooks, FSDP1):
bytes that are written there reach nobody. Names come without what DDP and ``torch.compile`` put
into them. Buffers that are in no checkpoint may be there as well: a trainer may send them. A model
of transformers is also known by the names of its checkpoint.

Independent of versions. PyTorch is not imported: a module of it shows that it is.
"""

import sys
import weakref
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from refit.errors import InvalidError, UnsupportedError
from refit.weights.source import Marks, lacks_memory, marks_of, storage_of


class Target(NamedTuple):
    """What can be written, by name."""

    places: Mapping[str, Any]
    """Tensors, arrays, and what is neither; ``NoPlace`` is not memory of the engine."""
    optional: frozenset[str] = frozenset()
    """Names that count only for a version that brings them."""

    checkpoint: "Target | None" = None
    """The same under the names of a checkpoint, where these are others."""

    def named_as(self, names: Collection[str]) -> "Target":
        """Under the names of which a version has more: its checkpoint's, or the model's own. Where
        it has as many of both, it is taken for what ``named_weights`` gives."""
        other = self.checkpoint
        if other is None:
            return self
        mine, theirs = (len(one.places.keys() & set(names)) for one in (self, other))
        return other if theirs >= mine else self


class NoPlace(NamedTuple):
    """Stands for a tensor that cannot be written; the sentence says why."""

    sentence: str

    def __str__(self) -> str:
        return self.sentence


class Fingerprint(NamedTuple):
    """What ``target_of`` gives depends on, and what is found out about its tensors. Two that are
    equal are of the same names and tensors, in the same memory, read the same way. Holds none."""

    module: "weakref.ref[Any] | None"
    names: list[str]
    kinds: tuple[int, list[str]]
    """Of a module: how many of them are parameters, and which buffers are in no checkpoint."""
    marks: Marks


def fingerprint_of(target: Any) -> tuple[Fingerprint | None, list[Any]]:
    """Of a dict or a module; and what holds the memory of its tensors. None: only ``target_of``
    and each tensor tell."""
    torch = sys.modules.get("torch")
    if type(target) in (dict, OrderedDict):
        marks, held = marks_of(target.values())
        if marks is None:
            return None, held
        return Fingerprint(None, list(target), (0, []), marks), held
    if torch is None or not isinstance(target, torch.nn.Module):
        return None, []
    found = _Own()
    found.walk(target, "")
    own = {**found.parameters, **found.buffers}
    marks, held = marks_of(own.values())
    if marks is None:
        return None, held
    kinds = len(found.parameters), found.unsaved
    return Fingerprint(weakref.ref(target), list(own), kinds, marks), held


class _Own:
    """What a tree of modules has, whatever its ``named_parameters()`` gives."""

    def __init__(self) -> None:
        self.parameters: dict[str, Any] = {}
        self.buffers: dict[str, Any] = {}
        self.unsaved: list[str] = []

    def walk(self, module: Any, prefix: str) -> None:
        for name, one in module._parameters.items():
            if one is not None:
                self.parameters[prefix + name] = one
        for name, one in module._buffers.items():
            if one is not None:
                self.buffers[prefix + name] = one
                if name in module._non_persistent_buffers_set:
                    self.unsaved.append(prefix + name)
        for name, child in module._modules.items():
            if child is not None:
                self.walk(child, f"{prefix}{name}.")


def tensors_of(module: Any) -> dict[str, Any]:
    """Its parameters and buffers, tied ones under each name."""
    found = _Own()
    found.walk(module, "")
    return {**found.parameters, **found.buffers}


def target_of(target: Any) -> Target:
    """InvalidError: it has no tensors. UnsupportedError: an engine in FSDP1. StateError: one of
    its weights has no memory now."""
    if isinstance(target, Target):
        return target
    if isinstance(target, Mapping):
        return Target(target)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(target, torch.nn.Module):
        return _of_module(target)
    if callable(getattr(target, "state_dict", None)):
        found, again = target.state_dict(), target.state_dict()
        lasting = {name for name, one in found.items() if _lasts(one, again.get(name))}
        return Target({name: found[name] if name in lasting else _copied(name) for name in found})
    raise InvalidError(
        f"a {type(target).__name__} cannot be loaded into: give a module or a mapping of tensors"
    )


def _of_module(module: Any) -> Target:
    from refit.weights.wrappers import plain_names, unwrapped

    while (inner := unwrapped(module)) is not None:
        module = inner
    if any("_fsdp_wrapped_module" in one._modules for one in module.modules()):
        raise UnsupportedError(
            "the engine is wrapped by FullyShardedDataParallel, whose state_dict() makes copies: "
            "within FSDP.summon_full_params(engine), load into dict(engine.named_parameters())"
        )
    plain = plain_names(module)
    buffers = dict(module.named_buffers(remove_duplicate=False))
    places = {plain(name): one for name, one in _own_of(module).items()}
    more = {plain(name): one for name, one in buffers.items() if plain(name) not in places}
    return _with_checkpoint(module, Target({**places, **more}, frozenset(more)))


def _own_of(module: Any) -> dict[str, Any]:
    """What ``state_dict()`` names, as the module has it."""
    import torch

    def state() -> Any:
        try:
            return module.state_dict(keep_vars=True)
        except TypeError:  # one that takes no keywords
            return module.state_dict()

    own = tensors_of(module)
    known = set(map(id, own.values()))
    storages: set[int] = set()
    again: Any = None
    found: dict[str, Any] = {}
    for name, one in state().items():
        if isinstance(one, torch.Tensor) and id(one) not in known:
            storages = storages or {storage_of(tensor) for tensor in own.values()}
            if storage_of(one) not in storages:
                again = again or state()
                one = _written(name, one, again.get(name), own.get(name))
        found[name] = one
    return found


def _written(name: str, one: Any, again: Any, mine: Any) -> Any:
    """What has to be written for a tensor that is not a parameter or buffer: itself if the module
    has it, so that a second ``state_dict()`` gives it again; the parameter of which it is a
    copy."""
    import torch

    if _lasts(one, again):
        return one
    if mine is not None and one.shape == mine.shape:
        if lacks_memory(mine):
            return mine  # whose bytes are away
        as_copied = mine.detach().to(one.device, one.dtype).contiguous().flatten()
        copy = one.detach().contiguous().flatten()
        if torch.equal(as_copied.view(torch.uint8), copy.view(torch.uint8)):
            return mine
    return _copied(name)


def _lasts(one: Any, again: Any) -> bool:
    """Whether a second ``state_dict()`` gives the same memory. True of what is not memory."""
    if hasattr(one, "untyped_storage"):
        return hasattr(again, "untyped_storage") and storage_of(one) == storage_of(again)
    places = [getattr(array, "__array_interface__", {}).get("data") for array in (one, again)]
    return places[0] == places[1]


def _copied(name: str) -> NoPlace:
    return NoPlace(
        f"{name} is a copy that state_dict() makes, and none of the engine's own tensors: load "
        "into a mapping of those"
    )


def _with_checkpoint(module: Any, own: Target) -> Target:
    from refit.weights.checkpoint_names import pieces_of

    tensors = {name: one for name, one in own.places.items() if hasattr(one, "data_ptr")}
    metas = [(name, tuple(one.shape), one.dtype) for name, one in tensors.items()]
    try:
        pieces = pieces_of(module, metas)
    except UnsupportedError:  # then its own names are all that it has
        return own
    if pieces is None:
        return own
    places = {name: one for name, one in own.places.items() if name not in tensors}
    for name, piece in pieces.items():
        whole = tensors[piece.source].detach()
        if whole.is_contiguous():
            places[name] = piece.of(whole)
        else:
            places[name] = NoPlace(
                f"{name} is a part of {piece.source}, which has its elements in another order than "
                "its rows: make it contiguous"
            )
    optional = [name for name, one in pieces.items() if one.source in own.optional]
    return own._replace(checkpoint=Target(places, frozenset(optional)))
