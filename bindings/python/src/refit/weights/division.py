"""How ranks agree that each publishes what it has of a version, and who sends what several have.

Before a version every rank tells the others whether it has a publisher and where, and a digest of
what it has of the weights. If that is new to any rank, all exchange their boxes, choose one rank
for each, and say it to their publishers (``Publisher.shard``); otherwise the publishers know it
from the version before. All ranks come to the same conclusion from the same messages: shards, all
of it gathered on one rank, or an error.
"""

import hashlib
import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from refit._c import dtypes
from refit.errors import InvalidError, UnsupportedError
from refit.weights import lockstep
from refit.weights.boxes import Box
from refit.weights.lockstep import LockstepError
from refit.weights.manifest import TensorSpec
from refit.weights.publisher import Publisher
from refit.weights.shards import PlannedShards, Shard, assigned

_log = logging.getLogger("refit")
_told: set[str] = set()
"""Why weights were gathered: each reason is told once."""


class _Offer(NamedTuple):
    """What a rank tells the others before each version."""

    endpoint: str | None
    """Of its publisher; None: it has none."""
    digest: str
    """Of what it has."""
    known: str
    """The key of what its publisher was told last; empty: it was told nothing."""
    number: int
    """Of the version, if this rank coordinates."""
    repeated: bool
    """Whether that is committed already."""
    required: bool
    """Whether nothing may be gathered."""
    why_not: str | None
    """Why it cannot be published in shards."""


class _Known(NamedTuple):
    """What a publisher was told last; ``key`` is equal while all ranks have the same."""

    key: str
    specs: tuple[TensorSpec, ...]
    boxes: Mapping[str, Box]


_KNOWN: "weakref.WeakKeyDictionary[Publisher, _Known]" = weakref.WeakKeyDictionary()


@dataclass
class Division:
    """A version that ranks publish together, as this rank takes part in it."""

    publisher: Publisher | None
    """None: no rank has one, and nothing is published."""
    number: int
    repeated: bool
    """Whether it is committed already."""
    specs: tuple[TensorSpec, ...]
    boxes: Mapping[str, Box]
    """What this rank sends."""
    weights: PlannedShards
    """The tensors with that."""
    place: tuple[str, int, int]
    """The coordinator's endpoint, this rank as the publishers count, and how many there are."""
    key: str
    known: bool
    """Whether all publishers know it: if one does not, all are told, since each waits for all."""

    def tell(self) -> None:
        """Says it to the publisher, if one of them does not know. Raises what ``declare`` and
        ``shard`` raise."""
        if self.publisher is None or self.known:
            return
        self.forget()
        parts = {
            name: tuple(zip(box.first, box.shape, strict=True)) for name, box in self.boxes.items()
        }
        self.publisher.declare(self.specs)
        self.publisher.shard(*self.place, parts)
        _KNOWN[self.publisher] = _Known(self.key, self.specs, self.boxes)

    def forget(self) -> None:
        """All ranks tell their publishers again before the next version."""
        if self.publisher is not None:
            _KNOWN.pop(self.publisher, None)


def divide(
    publisher: Publisher | None, weights: Sequence[Any], asked: int | None, repeated: bool
) -> Division | None:
    """How the ranks publish weights together; None: they are gathered. A collective.

    ``asked`` is the version's number and ``repeated`` whether it is committed already; those of the
    root count. LockstepError on all ranks: one of them failed, holds other weights, or lacks a
    publisher. UnsupportedError on all ranks: what must not be gathered cannot be published in
    shards. Raises what looking at the weights raises.
    """
    first = next(one for one in weights if getattr(one, "divides", False))
    group, root = first.group, first.root
    try:
        _check_root(group, root)
        plan = _joined(weights)
        mine = _offer_of(publisher, weights, plan, asked, repeated)
    except Exception as why:
        lockstep.agree(group, "sending", error=lockstep.sentence_of(why))
        raise
    same = _digest_of(plan.specs) if plan.alike else ""
    offers: list[_Offer] = lockstep.exchange(group, "sending", mine, detail=same)
    rank = lockstep.rank_in(group)
    if not _divides(offers, root, rank):
        return None
    leader = offers[root]
    key = _digest_of([root, *((one.endpoint, one.digest) for one in offers)])
    known = all(one.known == key for one in offers)
    specs: tuple[TensorSpec, ...] = ()
    boxes: Mapping[str, Box] = {}
    if publisher is not None and not leader.repeated:
        if known:
            _, specs, boxes = _KNOWN[publisher]
        else:
            specs, boxes = _chosen(group, rank, plan)
    place = leader.endpoint or "", _place_of(rank, root), len(offers)
    chosen = plan.limited_to(boxes, specs)
    return Division(
        publisher, leader.number, leader.repeated, specs, boxes, chosen, place, key, known
    )


def _offer_of(
    publisher: Publisher | None,
    weights: Sequence[Any],
    plan: PlannedShards,
    asked: int | None,
    repeated: bool,
) -> _Offer:
    return _Offer(
        endpoint=None if publisher is None else publisher.endpoint,
        digest=_digest_of([plan.specs, [(name, one.box) for name, one in plan.shards.items()]]),
        known="" if publisher is None else _key_of(publisher),
        number=asked or (0 if publisher is None else publisher.next_version),
        repeated=repeated,
        required=any(getattr(one, "must_divide", False) for one in weights),
        why_not=plan.why_not,
    )


def _key_of(publisher: Publisher) -> str:
    """Of what it was told; empty: nothing, or something else since."""
    known = _KNOWN.get(publisher)
    if known is None or publisher.shards != known.boxes or publisher.declared != known.specs:
        return ""
    return known.key


def _check_root(group: Any, root: int) -> None:
    ranks = torch.distributed.get_world_size(group)
    if not 0 <= root < ranks:
        raise InvalidError(f"rank {root} cannot be the root: there are {ranks} ranks")


def _joined(weights: Sequence[Any]) -> PlannedShards:
    """What this rank has of all of them. InvalidError: a name comes twice."""
    specs: list[TensorSpec] = []
    shards: dict[str, Shard] = {}
    casts: dict[str, torch.dtype] = {}
    alike, why_not = True, None
    for one in weights:
        if not callable(getattr(one, "planned_shards", None)):
            why_not = why_not or (
                f"a {type(one).__name__} is sent with them: give each model to refit.named_weights"
            )
            continue
        plan: PlannedShards = one.planned_shards()
        names = {spec.name for spec in specs}
        twice = next((spec.name for spec in plan.specs if spec.name in names), None)
        if twice is not None:
            raise InvalidError(f'"{twice}" is sent twice in one version')
        specs += plan.specs
        shards.update(plan.shards)
        casts.update(plan.casts)
        alike, why_not = alike and plan.alike, why_not or plan.why_not
    return PlannedShards(specs, shards, casts, alike=alike, why_not=why_not)


def _divides(offers: Sequence[_Offer], root: int, here: int) -> bool:
    """Whether weights are published in shards. LockstepError, UnsupportedError."""
    lacking = [rank for rank, one in enumerate(offers) if one.endpoint is None]
    required = any(one.required for one in offers)
    if len(lacking) == len(offers):
        return required
    if not required and lacking == [rank for rank in range(len(offers)) if rank != root]:
        return False
    if lacking:
        some = ", ".join(map(str, lacking[:5])) + (" and more" if len(lacking) > 5 else "")
        gathered = "" if required else f", or on rank {root} alone, which then gathers all weights"
        raise LockstepError(
            f"of {len(offers)} ranks these have no publisher: {some}; open a refit.Publisher on "
            f"every rank, so that each publishes what it has{gathered}"
        )
    for rank, one in enumerate(offers):
        if one.why_not is not None:
            if required:
                raise UnsupportedError(
                    f"rank {rank}: {one.why_not}; leave gather=False out, and all is gathered on "
                    f"rank {root}"
                )
            if here == root:
                _say_once(f"all weights are gathered on rank {root}, since {one.why_not}")
            return False
    return True


def _say_once(text: str) -> None:
    if text not in _told:
        _told.add(text)
        _log.warning("%s", text)


def _chosen(
    group: Any, rank: int, plan: PlannedShards
) -> tuple[tuple[TensorSpec, ...], dict[str, Box]]:
    """All tensors, and what this rank sends of them. A collective. LockstepError: ranks differ in
    what a tensor is."""
    size_of = {one.name: dtypes.by_name(one.dtype) for one in plan.specs}
    claims = {
        name: (one.box, size_of[name].nbytes(one.box.shape)) for name, one in plan.shards.items()
    }
    said = None if plan.alike else plan.specs, claims
    seen = lockstep.exchange(group, "division", said)
    specs = plan.specs if plan.alike else _union([one for one, _ in seen])
    return specs, assigned([one for _, one in seen])[rank]


def _union(of_ranks: Sequence[Sequence[TensorSpec]]) -> tuple[TensorSpec, ...]:
    found: dict[str, tuple[TensorSpec, int]] = {}
    for rank, specs in enumerate(of_ranks):
        for one in specs:
            other, before = found.setdefault(one.name, (one, rank))
            if other != one:
                raise LockstepError(
                    f'"{one.name}" is {other.dtype} {list(other.shape)} on rank {before} and '
                    f"{one.dtype} {list(one.shape)} on rank {rank}: all ranks must give the type "
                    "and the shape of the whole tensor"
                )
    return tuple(one for one, _ in found.values())


def _place_of(rank: int, root: int) -> int:
    """The rank as the publishers count, of which 0 coordinates."""
    return {root: 0, 0: root}.get(rank, rank)


def _digest_of(what: object) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()
