"""Groups return in the backward pass: the first tensor that is asked for brings back its group, and
starts the groups before it.
"""

from typing import Any

import torch

from refit._c.waiting import interrupts_held
from refit.activations.groups import Group, Groups, named
from refit.errors import DeadlineError, RefitError
from refit.states.saved_tensors import Saved, Storage
from refit.states.torch_memory import current_stream, lacks_memory


class Returning:
    """The way back of one offload's groups. Used with the lock of ``groups``.

    ``prefetch``: so many groups return ahead of the backward pass."""

    def __init__(self, groups: Groups, prefetch: int) -> None:
        self._groups = groups
        self._prefetch = prefetch
        self.kept_before = 0
        """The layers of the last forward pass, until a backward pass has asked for one."""

    def brought(self, saved: Saved, storage: Storage) -> Any:
        """The device memory of a storage that leaves, is away or has returned."""
        self._groups.tidy()
        back = storage.back
        if not storage.group.is_away:
            with interrupts_held():
                self._groups.cancel(storage.group)
            return storage.device
        if storage.device is None or back.sources:
            with interrupts_held():
                if storage.device is None:
                    self._fetch(back)
                self._groups.join(back)
                self._fetch_before(self._groups.all.index(back))
        stream = current_stream(self._groups.on)
        if storage.stream != stream:  # another stream than that which has joined the copies
            try:
                self._groups.arena.join(storage.group.number, stream)
            except RefitError as why:
                storage.device = None
                raise named(why, back) from why
        device = storage.device
        storage.ask(saved)
        return device

    def begin(self) -> None:
        """The backward pass has come to the layers that stay: those before them are next."""
        self.kept_before = 0
        with interrupts_held():
            self._fetch_before(len(self._groups.all))

    def _fetch_before(self, at: int) -> None:
        """Starts the groups that the backward pass comes to next, which stand before this one."""
        left = self._prefetch
        while at > 0 and left > 0:
            at -= 1
            before = self._groups.all[at]
            if before.left == 0 and not before.also:
                continue
            left -= 1
            if before.sources:
                continue
            try:
                self._fetch(before)
            except Exception as why:
                if isinstance(why, RefitError) or lacks_memory(why):
                    return  # it is fetched again when it is asked for, and then this is told
                raise

    def _fetch(self, group: Group) -> None:
        """Starts the copies in of all that returns with a group."""
        stream = current_stream(self._groups.on)
        by_source: dict[Group, list[Storage]] = {}
        for storage in group.returning():
            by_source.setdefault(storage.group, []).append(storage)
        for source, storages in by_source.items():
            if source.arriving is not None:
                self._groups.join(source.arriving)
            taken = [_memory(storage.nbytes, self._groups.on) for storage in storages]
            memories = [0] * len(source.storages)
            for storage, made in zip(storages, taken, strict=True):
                memories[storage.place] = made.data_ptr()
            # Before the call: an exception that another thread sends to this one may come right
            # after it, and copies be under way. Where none is, a join does nothing.
            group.held.extend(taken)
            source.arriving = group
            source.stream = group.stream = stream
            group.sources.append(source)
            try:
                self._groups.arena.fetch(source.number, memories, stream)
            except RefitError as why:
                if isinstance(why, DeadlineError):
                    self._groups.stuck.append((0, taken))
                source.arriving = None
                group.sources.pop()
                del group.held[-len(taken) :]
                raise named(why, group) from why
            for storage, made in zip(storages, taken, strict=True):
                storage.return_to(made, stream)

    def wait(self) -> None:
        """Brings all groups back for good."""
        for group in self._groups.all:
            self._fetch(group)
        for group in self._groups.all:
            self._groups.join(group)
        for group in self._groups.all:
            self._groups.cancel(group)
        self._groups.all.clear()


def _memory(nbytes: int, device: torch.device) -> Any:
    storage: Any = torch.UntypedStorage
    return storage(nbytes, device=device)
