"""Ranks that gather sharded weights together either all go on or all stop.

A collective that one rank does not enter hangs the others. So before the first gather, and when a
transaction ends, each rank says to all how it fares: one small exchange. It is the same exchange at
both places, so a rank that failed early and is at the end already meets the others at their
beginning, and they hear of it instead of waiting for it.

It knows nothing of weights; what the ranks compare is text.
"""

from dataclasses import dataclass

import torch.distributed as dist

from refit.errors import PeerError


@dataclass(frozen=True)
class Standing:
    """What one rank tells the others: where it is, what it goes by, and what went wrong."""

    place: str
    detail: str
    error: str | None


class LockstepError(PeerError):
    """Another rank failed, or does something else. All ranks have been told the same."""


def are_many(group: dist.ProcessGroup | None) -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def rank_in(group: dist.ProcessGroup | None) -> int:
    """This process's rank; 0 where there are no ranks."""
    return dist.get_rank(group) if are_many(group) else 0


def agree(
    group: dist.ProcessGroup | None, place: str, detail: str = "", error: str | None = None
) -> None:
    """Tells all ranks how this one fares, and hears how they do. A collective: it blocks for them,
    at most the process group's timeout. LockstepError if any other failed or differs; a rank's own
    `error` is not raised here. Does nothing where there are no ranks.
    """
    if not are_many(group):
        return
    mine = Standing(place, detail, error)
    all_of_them: list[Standing] = [mine] * dist.get_world_size(group)
    dist.all_gather_object(all_of_them, mine, group=group)
    if error is None:
        _compare(mine, all_of_them)


def _compare(mine: Standing, all_of_them: list[Standing]) -> None:
    failed = [
        f"rank {rank}: {one.error}" for rank, one in enumerate(all_of_them) if one.error is not None
    ]
    if failed:
        raise LockstepError("the ranks stop together, because of " + "; ".join(failed))
    for rank, other in enumerate(all_of_them):
        if other.place != mine.place:
            raise LockstepError(
                f"rank {rank} is at the {other.place} of its refit while this one is at the "
                f"{mine.place}: all ranks must send the same weights in the same order"
            )
        if other.detail != mine.detail:
            raise LockstepError(
                f"rank {rank} holds other weights than this one: names, shapes, dtypes and their "
                "order must be the same on all ranks"
            )
