"""Workers, as the publisher describes them."""

from dataclasses import dataclass
from typing import Any

PATHS = ("none", "socket", "shm", "cuda_ipc", "neighbor", "archive")
"""How bytes reach a worker, by refit_path."""


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker, subscribed or lost in the last version."""

    name: str
    """With keys the name of its key's file, KEY, or KEY/NAME: see broadcast.worker."""
    path: str
    """How it gets the bytes: "none" (nothing yet), "socket", "shm", "cuda_ipc", "neighbor"."""
    version: int
    """The version that it holds; 0 for none."""
    subscribed: bool
    """False: evicted, gone, or joining again."""
    member: bool
    """Whether the last version counted on it."""
    committed: bool
    """Whether it applied the last version."""
    status: int
    """Why it failed in the last version (refit.errors), or 0."""
    reason: str
    """Why it failed, in words; empty if it did not fail."""


def worker_of(raw: Any) -> Worker:
    return Worker(
        name=raw.name.decode("utf-8", "replace"),
        path=PATHS[raw.path],
        version=raw.version,
        subscribed=bool(raw.subscribed),
        member=bool(raw.member),
        committed=bool(raw.committed),
        status=raw.status,
        reason=raw.reason.decode("utf-8", "replace"),
    )
