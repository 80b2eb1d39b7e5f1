"""What the layers of a forward pass have saved, as far as it leaves or returns, in groups.

A group has its bytes in the arena from its copies out on until nothing needs them. What it still
needs is known by reference counts: ``Storage`` lives as long as autograd holds a view of it. Its
end is only noted, since it may come at any point of any thread; calls that hold the lock act on it
(``Groups.tidy``).

When groups leave is for ``leaving`` to say, when they return for ``returning``.
"""

import threading
import weakref
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch

from refit._c.waiting import interrupts_held
from refit.activations.arena import Arena
from refit.errors import NotFoundError, RefitError
from refit.states.saved_tensors import Storage
from refit.states.torch_memory import current_stream, used_on


class Needed(weakref.ref[Storage]):
    """A storage that leaves with a group. Its end puts this into a queue, by a callback that runs
    none of Python's code: what a signal handler raised there, Ctrl-C for one, would be lost, and
    the note with it."""

    __slots__ = ("group",)

    group: "Group | None"
    """None: the storage has stayed on the device, and does not count any more."""


class Group:
    """What one layer has saved, as far as it leaves or returns. Guarded by the lock."""

    __slots__ = (
        "also",
        "arriving",
        "forward",
        "held",
        "is_away",
        "left",
        "name",
        "number",
        "order",
        "sources",
        "storages",
        "stream",
        "streams",
    )

    def __init__(self, name: str, order: int, forward: "Forward") -> None:
        self.name = name
        self.order = order
        self.forward = forward
        self.number = 0
        """Its number in the arena; 0: it has none."""
        self.storages: list[Needed] = []
        """Those that leave with it, by place."""
        self.also: list[weakref.ref[Storage]] = []
        """Those that left with groups before it, and return with it."""
        self.left = 0
        """Those of ``storages`` that are away or on their way, and still needed."""
        self.held: list[Any] = []
        """Memory of the device that copies of it use."""
        self.is_away = False
        self.sources: list[Group] = []
        """The groups whose bytes are on their way back for this one."""
        self.arriving: Group | None = None
        """The group for which bytes of this one are on their way back."""
        self.stream = 0
        """On which its last copies were ordered."""
        self.streams: list[int] = []
        """On which the layer has worked, and which wait for the copies out."""

    def returning(self) -> list[Storage]:
        """What is away and returns with it."""
        return [
            one
            for one in (*alive(self.storages), *alive(self.also))
            if one.back is self and one.device is None and one.group is not None
        ]


class Forward:
    """What one block has saved so far. Used by the thread of the block alone."""

    __slots__ = (
        "freed",
        "has_saved",
        "is_alone",
        "is_over",
        "order",
        "passed_over",
        "saved",
        "saving",
        "shared",
        "since",
        "stayed",
        "storages",
        "streams",
        "streams_of_all",
        "thread",
        "unfinished",
        "waiting",
    )

    def __init__(self, saving: Any, is_alone: bool) -> None:
        self.saving = saving
        """The hooks, while they are autograd's."""
        self.storages: weakref.WeakValueDictionary[int, Storage] = weakref.WeakValueDictionary()
        """Those that are on the device, by an identity that is theirs as long as they are."""
        self.unfinished: list[Storage] = []
        """What the layer that runs has saved."""
        self.shared: list[Storage] = []
        """What it has saved again that layers before it have."""
        self.waiting: list[tuple[int, Storage]] = []
        """Those that have left, and that others still held then; with the order of the group."""
        self.passed_over: list[tuple[int, weakref.ref[Storage]]] = []
        """Those that did not leave because others held them to the end, the forward pass before."""
        self.streams: dict[int, Any] = {}
        """The streams of a GPU on which the layer that runs has saved."""
        self.streams_of_all: dict[int, Any] = {}
        """Those on which all of its layers have worked, as far as that is seen."""
        self.order = 0
        self.thread = threading.get_ident()
        self.has_saved = False
        self.is_over = False
        self.is_alone = is_alone
        """Nothing of other forward passes was away when it began."""
        self.since = 0.0
        self.saved = 0
        self.freed = 0
        self.stayed = 0


class Groups:
    """The groups of all forward passes that something may return with, and what ends them. All of
    it is guarded by ``lock``."""

    def __init__(self, arena: Arena, on: torch.device) -> None:
        self.arena = arena
        self.on = on
        self.lock = threading.RLock()
        self.all: list[Group] = []
        """In the order of the forward passes."""
        self.leaving: deque[Group] = deque()
        """Those whose device memory is not given back yet, in order."""
        self.stuck: list[tuple[int, Any]] = []
        """What holds memory under copies that could not be waited for; with the number of a group
        that is to be released once they are over, or 0."""
        self.over: deque[Needed] = deque()
        """Of storages that are not needed any more."""

    def new(self, forward: Forward, name: str, order: int) -> Group:
        """The group of a layer that has ended, with what it shares with those before it."""
        group = Group(name, order, forward)
        shared, forward.shared = forward.shared, []
        for storage in shared:
            storage.back = group
            group.also.append(weakref.ref(storage))
        self.all.append(group)
        return group

    def tidy(self) -> None:
        """Acts on storages that are not needed any more. With the lock."""
        if self.over:
            with interrupts_held():
                self._count_down()

    def _count_down(self) -> None:
        released = False
        while self.over:
            group = self.over.popleft().group
            if group is None:
                continue
            group.left -= 1
            if group.left == 0 and group.number:
                self.release(group)
                released = True
        if released:
            self.drop_ended()

    def drop_ended(self) -> None:
        """Forgets groups with which nothing returns any more."""
        ended = [one for one in self.all if not one.number and not alive(one.also)]
        for group in ended:
            self._end_copies(group)
            self.all.remove(group)

    def keep_storage(self, storage: Storage) -> None:
        """It stays on the device for good."""
        group, storage.group = storage.group, None
        if group is None:
            return
        group.storages[storage.place].group = None
        group.left -= 1
        if group.left == 0:
            self.release(group)

    def keep(self, group: Group) -> None:
        for storage in alive(group.storages):
            self.keep_storage(storage)
        self.release(group)

    def cancel(self, group: Group) -> None:
        """A group that is asked for while it leaves stays."""
        for needed in group.storages:
            needed.group = None
            storage = needed()
            if storage is not None:
                storage.group = None
        group.left = 0
        self.release(group)

    def join(self, group: Group) -> None:
        """The stream of the backward pass waits for the copies in."""
        stream = current_stream(self.on)
        while group.sources:
            source = group.sources[-1]
            try:
                # The stream of the fetch, too: its allocator gets the memory back.
                for one in {stream, source.stream} if source.number else ():
                    self.arena.join(source.number, one)
            except RefitError as why:
                raise named(why, group) from why  # the copies go on, and can be waited for again
            source.arriving = None
            group.sources.pop()
        group.held.clear()

    def _end_copies(self, group: Group) -> None:
        """The current stream waits for bytes that are on their way and not needed any more, so
        that their memory may go."""
        with suppress(RefitError):
            self.join(group)
        if group.sources:
            self.stuck.append((0, group))

    def release(self, group: Group) -> None:
        """Gives its room in the arena back, once all of it is on the device, or not needed."""
        if not group.number:
            return
        if group in self.leaving:
            self.leaving.remove(group)
        leaving = [] if group.is_away else list(group.held)
        self._end_copies(group)
        number = group.number
        # until it is known that no copy uses what it holds
        self.stuck.append((number, (group, leaving)))
        group.number = 0
        self.arena.release(number, group.stream)
        self.stuck.pop()
        group.storages.clear()  # they know the group, too: a cycle would wait for the collector
        # Copies out may go on: then no one needs their bytes, and what they read may change. It
        # must not be unmapped, and belongs to streams that need not wait for them.
        used_on(leaving, group.forward.streams_of_all.values())
        if not group.sources:
            group.held.clear()

    def release_stuck(self) -> None:
        """Releases groups whose copies hung, and are over by now."""
        for one in list(self.stuck):
            number, _ = one
            try:
                if number == 0 or not self.arena.is_still(number):
                    continue
            except RefitError:
                pass  # the device is lost, which ends the copies, too
            try:
                self.arena.release(number, current_stream(self.on))
            except NotFoundError:
                pass  # an exception came right after its release
            except RefitError:
                continue
            self.stuck.remove(one)


def alive(storages: Iterable["weakref.ref[Storage]"]) -> list[Storage]:
    return [one for reference in storages if (one := reference()) is not None]


def named(why: RefitError, group: Group) -> RefitError:
    """A failure in the backward pass, with the layer's name."""
    text = f"activations of {group.name} could not be brought back: {why.text}"
    return type(why)(text, why.status, why.subsystem)
