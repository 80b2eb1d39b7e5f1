"""Ranks that gather sharded weights together either all go on or all stop.

A collective that one rank does not enter hangs the others. So before the first gather, and when a
transaction ends, each rank sends its standing to all others: one small exchange. It is the same
exchange at both places, so a rank that failed early, and is already at the end, meets the other
ranks at their beginning: they learn of the failure instead of waiting.

It knows nothing of weights; what the ranks compare is text.
"""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from refit.errors import PeerError


@dataclass(frozen=True)
class Standing:
    """The message of one rank to the others: its place, its details, its error, the version that
    the workers have, if this rank knows it, one that they may yet have, and what else it says."""

    place: str
    detail: str
    error: str | None
    version: int | None
    said: Any = None
    handed_over: int | None = None


class LockstepError(PeerError):
    """A rank failed, or does something else than the others: all have been told the same.

    ``version`` is the one that the workers have all the same, or None.
    """

    version: int | None = None


def are_many(group: dist.ProcessGroup | None) -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def rank_in(group: dist.ProcessGroup | None) -> int:
    """This process's rank; 0 where there are no ranks."""
    return dist.get_rank(group) if are_many(group) else 0


def sentence_of(why: BaseException) -> str:
    """The sentence that the other ranks get."""
    return f"{type(why).__name__}: {why}"


def agree(
    group: dist.ProcessGroup | None,
    place: str,
    *,
    detail: str = "",
    error: str | None = None,
    version: int | None = None,
    handed_over: int | None = None,
) -> tuple[int | None, int | None]:
    """Tells all ranks how this one fares, and hears how they do; returns the version they know, and
    one that was handed over.

    A collective: it blocks for the others, at most the process group's timeout. LockstepError on
    all ranks if any failed, this one included, or differs. Does nothing where there are no ranks.
    """
    mine = Standing(place, detail, error, version, handed_over=handed_over)
    standings = _exchanged(group, mine)
    known = (one.version for one in standings if one.version is not None)
    left = (one.handed_over for one in standings if one.handed_over is not None)
    return next(known, None), next(left, None)


def exchange(
    group: dist.ProcessGroup | None, place: str, said: Any, *, detail: str = ""
) -> list[Any]:
    """What each rank says, by rank: anything that can be pickled. As ``agree``."""
    return [one.said for one in _exchanged(group, Standing(place, detail, None, None, said))]


def _exchanged(group: dist.ProcessGroup | None, mine: Standing) -> list[Standing]:
    standings = [mine]
    if are_many(group):
        standings = [mine] * dist.get_world_size(group)
        dist.all_gather_object(standings, mine, group=group)
    refusal = _failures(standings) or _differences(mine, standings)
    if refusal:
        failed = LockstepError(refusal)
        known = (one.version for one in standings if one.version is not None)
        failed.version = next(known, None)
        raise failed
    return standings


def _failures(standings: list[Standing]) -> str:
    failed = [f"rank {rank}: {one.error}" for rank, one in enumerate(standings) if one.error]
    return "the ranks stop together, because of " + "; ".join(failed) if failed else ""


def _differences(mine: Standing, standings: list[Standing]) -> str:
    for rank, other in enumerate(standings):
        if other.place != mine.place:
            return (
                f"rank {rank} is at the {other.place} of its refit while this one is at the "
                f"{mine.place}: all ranks must send the same weights in the same order"
            )
        if other.detail != mine.detail:
            return (
                f"rank {rank} holds other weights than this one: names, shapes, dtypes and their "
                "order must be the same on all ranks"
            )
    return ""
