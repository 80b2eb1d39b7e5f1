"""The tensors that a version is written into, under the names that it brings.

A target is a mapping of names to tensors, or an engine: a module, whose own parameters and buffers
are written. Its ``state_dict()`` tells their names, but may give copies of them (hooks, FSDP1):
bytes that are written there reach nobody. Names come without what DDP and ``torch.compile`` put
into them. Buffers that are in no checkpoint may be there as well: a trainer may send them. A model
of transformers is also known by the names of its checkpoint.

Versions are unknown here. PyTorch is not imported: a module of it shows that it is.
"""

import sys
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from refit.errors import InvalidError, UnsupportedError


class Target(NamedTuple):
    """What can be written, by name."""

    places: Mapping[str, Any]
    """Tensors, arrays, and what is neither; ``Made`` is no memory of the engine."""
    optional: frozenset[str] = frozenset()
    """Names that a version need not bring."""

    checkpoint: "Target | None" = None
    """The same under the names of a checkpoint, where these are others."""

    def named_as(self, names: Collection[str]) -> "Target":
        """Under the names that a version has: those of a checkpoint, or the model's own."""
        other = self.checkpoint
        return self if other is None or self.places.keys() >= set(names) else other


class Made(NamedTuple):
    """Stands for a tensor that an engine's ``state_dict()`` makes."""

    name: str

    def __str__(self) -> str:
        return (
            f"{self.name} is a copy that state_dict() makes, and none of the engine's own tensors: "
            "load into a mapping of those"
        )


def target_of(target: Any) -> Target:
    """InvalidError: it has no tensors. UnsupportedError: an engine in FSDP1."""
    if isinstance(target, Target):
        return target
    if isinstance(target, Mapping):
        return Target(target)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(target, torch.nn.Module):
        return _of_module(target)
    if callable(getattr(target, "state_dict", None)):
        return Target(target.state_dict())
    raise InvalidError(
        f"a {type(target).__name__} cannot be loaded into: give a module or a mapping of tensors"
    )


def _of_module(module: Any) -> Target:
    import torch

    from refit.wrappers import WRAPPED, unwrapped

    while (inner := unwrapped(module)) is not None:
        module = inner
    if any("_fsdp_wrapped_module" in one._modules for one in module.modules()):
        raise UnsupportedError(
            "the engine is wrapped by FullyShardedDataParallel, whose state_dict() makes copies: "
            "within FSDP.summon_full_params(engine), load into dict(engine.named_parameters())"
        )

    def plain(name: str) -> str:
        return ".".join(part for part in name.split(".") if part not in WRAPPED)

    own = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    own.update(buffers)
    known = {id(one) for one in own.values()}
    places: dict[str, Any] = {}
    for name, one in module.state_dict(keep_vars=True).items():
        if isinstance(one, torch.Tensor) and id(one) not in known and not _is_within(one, own):
            mine = own.get(name)
            one = Made(name) if mine is None or mine.shape != one.shape else mine
        places[plain(name)] = one
    more = {plain(name): one for name, one in buffers.items() if plain(name) not in places}
    return _with_checkpoint(module, Target({**places, **more}, frozenset(more)))


def _with_checkpoint(module: Any, own: Target) -> Target:
    from refit.checkpoint_names import pieces_of

    tensors = {name: one for name, one in own.places.items() if hasattr(one, "data_ptr")}
    looks = [(name, tuple(one.shape), one.dtype) for name, one in tensors.items()]
    pieces = pieces_of(module, looks)
    if pieces is None:
        return own
    places = {name: one for name, one in own.places.items() if name not in tensors}
    for name, piece in pieces.items():
        whole = tensors[piece.source]
        places[name] = piece.of(whole.detach()) if whole.is_contiguous() else Made(name)
    optional = [name for name, one in pieces.items() if one.source in own.optional]
    return own._replace(checkpoint=Target(places, frozenset(optional)))


def _is_within(tensor: Any, own: Mapping[str, Any]) -> bool:
    """Whether it lies in the memory of one of these."""
    storage = tensor.untyped_storage()._cdata
    return any(one.untyped_storage()._cdata == storage for one in own.values())
