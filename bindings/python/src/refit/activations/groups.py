"""Groups of saved storages: each leaves the device in the forward pass and returns in the backward.

A group is what one layer has saved. ``Groups`` has one heading for each part of its life: which
storages leave, when their device memory is freed, when they return, and when it is released. Its
bytes are in the arena from its copies out until nothing needs them.

What is still needed is known by reference counts:

- ``Storage`` lives as long as autograd holds a view of it. Its end is only noted, since it may come
  at any point of any thread. The next call in a forward pass acts on it, or the next request for
  another group in a backward pass (``Groups.tidy``).
- The memory of a storage on the device is freed by dropping our reference to it. If anyone else
  references a storage, dropping ours frees nothing: it stays. One that is still referenced when the
  forward pass ends does not leave the next time.

``Plan`` says how much of each group leaves.
"""

import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import torch

from refit._c.waiting import interrupts_held
from refit.activations.arena import Arena
from refit.activations.saved_tensors import Saved, Storage
from refit.errors import DeadlineError, DeviceError, NotFoundError, RefitError
from refit.states.torch_memory import current_stream, lacks_memory, used_on, users_of

_MEASURE_MS: Final = 60_000
"""The longest wait for the copies of a group that is measured."""

_MEASURED_PASSES: Final = 2

_LEAST_SHARE: Final = 1 / 32
"""A smaller share of a group does not leave: it frees little, and costs as many calls."""


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
        "arena_number",
        "device_memory",
        "fetched_for",
        "fetching_from",
        "forward",
        "is_away",
        "last_stream",
        "layer_streams",
        "name",
        "needed_count",
        "order",
        "shared",
        "storages",
    )

    def __init__(self, name: str, order: int, forward: "Forward") -> None:
        self.name = name
        self.order = order
        """Its number in the forward pass."""
        self.forward = forward
        self.arena_number = 0
        """Its number in the arena; 0: it has none."""
        self.storages: list[Needed] = []
        """Those that leave with it, by ``arena_place``."""
        self.shared: list[weakref.ref[Storage]] = []
        """Those that left with groups before it, and return with it."""
        self.needed_count = 0
        """Those of ``storages`` that are away or on their way, and still needed."""
        self.device_memory: list[Any] = []
        """What copies read while it leaves, or write while it returns."""
        self.is_away = False
        self.fetching_from: list[Group] = []
        """The groups whose bytes are on their way back for this one."""
        self.fetched_for: Group | None = None
        """The group for which bytes of this one are on their way back."""
        self.last_stream = 0
        """On which its last copies were ordered."""
        self.layer_streams: list[int] = []
        """On which the layer has worked, and which wait for the copies out."""

    def to_fetch(self) -> list[Storage]:
        """What is away and returns with it."""
        return [
            one
            for one in (*alive(self.storages), *alive(self.shared))
            if one.return_group is self and one.memory is None and one.group is not None
        ]


class Forward:
    """What one block has saved so far. Used by the thread of the block alone."""

    __slots__ = (
        "all_streams",
        "autograd_hooks",
        "freed_bytes",
        "has_saved",
        "held_by_others",
        "is_alone",
        "is_over",
        "layer_storages",
        "layer_streams",
        "layer_time",
        "measured",
        "order",
        "passed_over",
        "saved_bytes",
        "shared",
        "stayed_bytes",
        "storages",
        "thread",
    )

    def __init__(self, autograd_hooks: Any, is_alone: bool) -> None:
        self.autograd_hooks = autograd_hooks
        """Those that save and load, while they are autograd's."""
        self.storages: weakref.WeakValueDictionary[int, Storage] = weakref.WeakValueDictionary()
        """Those that are on the device, by an identity that is theirs as long as they are."""
        self.layer_storages: list[Storage] = []
        """What the layer that runs has saved."""
        self.shared: list[Storage] = []
        """What it has saved again that layers before it have."""
        self.held_by_others: list[tuple[int, Storage]] = []
        """Those that have left while others held them; with the order of the group."""
        self.passed_over: list[tuple[int, weakref.ref[Storage]]] = []
        """Those that do not leave because others held them to the end of an earlier forward pass;
        with the order of the group."""
        self.layer_streams: dict[int, Any] = {}
        """The streams of a GPU on which the layer that runs has saved."""
        self.all_streams: dict[int, Any] = {}
        """Those on which all of its layers have worked, as far as that is seen."""
        self.order = 0
        """The number of the layer that runs."""
        self.thread = threading.get_ident()
        self.has_saved = False
        self.is_over = False
        self.is_alone = is_alone
        """Nothing of other forward passes was away when it began."""
        self.layer_time: LayerTime | None = None
        """That of the layer that runs, where the forward pass is measured."""
        self.measured: list[tuple[int, int, LayerTime, float]] = []
        """Of each layer that has ended: the bytes that it saved, those chosen to leave, its time,
        and that of its copies, or 0."""
        self.saved_bytes = 0
        self.freed_bytes = 0
        self.stayed_bytes = 0


class Groups:
    """The groups of all forward passes that something may return with. All of it is guarded by
    ``lock``, which the caller holds.

    ``prefetch``: so many groups return ahead of the backward pass."""

    def __init__(self, arena: Arena, device: torch.device, plan: "Plan", prefetch: int) -> None:
        self.arena = arena
        self.device = device
        self.lock = threading.RLock()
        self.all: list[Group] = []
        """In the order of the forward passes."""
        self.leaving: deque[Group] = deque()
        """Those whose device memory is not freed yet, in order."""
        self.held_anyway: set[tuple[int, int]] = set()
        """Where storages are saved that others hold beyond the forward pass: order of the group,
        number in its layer."""
        self.layers_awaited = 0
        """The layers of the last forward pass, until a backward pass has asked for one."""
        self.stuck: list[tuple[int, Any]] = []
        """What holds memory under copies that could not be waited for; with the number of a group
        that is to be released once they are over, or 0."""
        self._plan = plan
        self._prefetch = prefetch
        self._ended_storages: deque[Needed] = deque()

    # ---- a layer has ended: its group leaves -----------------------------------------------------

    def new(self, forward: Forward, name: str, order: int) -> Group:
        """The group of a layer that has ended, with what it shares with those before it."""
        group = Group(name, order, forward)
        shared, forward.shared = forward.shared, []
        for storage in shared:
            storage.return_group = group
            group.shared.append(weakref.ref(storage))
        self.all.append(group)
        return group

    def choose(self, forward: Forward, group: Group, found: Sequence[Storage]) -> list[Storage]:
        """Those that leave, as the plan says; the large ones first where not all do."""
        may = []
        for one in found:
            if (group.order, one.number_in_layer) in self.held_anyway:
                forward.passed_over.append((group.order, weakref.ref(one)))
            elif one.memory.nbytes() == one.nbytes:  # its owner has not taken the memory back
                may.append(one)
        share = self._plan.share(group.order)
        if share >= 1.0:
            return may
        left = share * sum(one.nbytes for one in may)
        chosen = []
        for one in sorted(may, key=lambda one: -one.nbytes):
            if one.nbytes <= left:
                left -= one.nbytes
                chosen.append(one)
        return sorted(chosen, key=lambda one: one.number_in_layer)

    def leave(self, group: Group, chosen: Sequence[Storage], streams: Mapping[int, Any]) -> None:
        """Starts the copies out, after all streams that the layer has worked on."""
        if not chosen:
            return
        group.last_stream = current_stream(self.device)
        group.layer_streams = list({group.last_stream: None, **streams})
        for one in group.layer_streams[1:]:
            torch.cuda.current_stream(self.device).wait_stream(streams[one])
        try:
            group.arena_number = self.arena.begin()
            self._add(group, chosen)
            self.arena.commit(group.arena_number, group.last_stream)
        except RefitError as why:
            self._keep_failed(group, why)
            return
        except BaseException:
            self._keep(group)
            raise
        if group.storages:
            self.leaving.append(group)
        else:  # the arena has room for none
            self._release(group)

    def _add(self, group: Group, chosen: Sequence[Storage]) -> None:
        places = self.arena.add(
            group.arena_number,
            [storage.memory.data_ptr() for storage in chosen],
            [storage.nbytes for storage in chosen],
        )
        for storage, place in zip(chosen, places, strict=True):
            if place is not None:
                storage.arena_place = place
                storage.group = storage.return_group = group
                needed = Needed(storage, self._ended_storages.append)
                needed.group = group
                group.storages.append(needed)
                group.device_memory.append(storage.memory)
                group.needed_count += 1

    def time_copies(self, group: Group) -> float:
        """Waits for the copies out of a group that is measured: how long they took."""
        began = time.perf_counter()
        if group.arena_number and self.leaving:
            with suppress(RefitError):  # free_memory meets it again, or waits on
                self.arena.wait(group.arena_number, _MEASURE_MS)
        return time.perf_counter() - began

    # ---- later layers have ended: its device memory is freed -------------------------------------

    def free_memory(self, most: int) -> None:
        """Frees the device memory of groups whose copies out are over. The layers' streams wait for
        those of others, oldest first, until at most ``most`` groups are on their way."""
        while self.leaving:
            group = self.leaving[0]
            try:
                if not self.arena.is_still(group.arena_number):
                    if len(self.leaving) <= most:
                        return
                    for stream in group.layer_streams:
                        self.arena.join(group.arena_number, stream)
            except RefitError as why:
                self.leaving.popleft()
                self._keep_failed(group, why)
                continue
            self.leaving.popleft()
            self._free_group(group)

    def _free_group(self, group: Group) -> None:
        """The group is away. Its device memory goes, but for what others hold besides us."""
        group.is_away = True
        for storage in alive(group.storages):
            if storage.group is None:
                continue
            if users_of(storage.memory) == 1:
                self._free_storage(group.forward, storage)
            elif not group.forward.is_over:
                group.forward.held_by_others.append((group.order, storage))
            else:
                self.keep_storage(storage)
        group.device_memory.clear()
        if group.needed_count == 0:
            self._release(group)

    def _free_storage(self, forward: Forward, storage: Storage) -> None:
        """Its identity may be another storage's from now on, and its memory, too: that belongs to
        the stream on which it was taken, which need not be one of those that wait for the copies.
        Later layers may read it too, without saving it."""
        used_on([storage.memory], forward.all_streams.values())
        if forward.storages.get(storage.memory._cdata) is storage:
            del forward.storages[storage.memory._cdata]
        forward.freed_bytes += storage.nbytes
        storage.memory = None

    def free_held(self, forward: Forward) -> None:
        """Frees what others held when its group was freed, and do not any more."""
        held, forward.held_by_others = forward.held_by_others, []
        while held:
            order, storage = held.pop()
            if storage.group is None or storage.memory is None:
                continue
            if users_of(storage.memory) == 1:
                self._free_storage(forward, storage)
            else:
                forward.held_by_others.append((order, storage))

    def learn(self, forward: Forward) -> None:
        """What others hold beyond the forward pass does not leave the next time."""
        self.free_held(forward)
        held, forward.held_by_others = forward.held_by_others, []
        for order, storage in held:
            self.held_anyway.add((order, storage.number_in_layer))
            forward.stayed_bytes += storage.nbytes
            self.keep_storage(storage)
        for order, reference in forward.passed_over:
            passed = reference()
            if passed is not None and users_of(passed.memory) == 1:
                self.held_anyway.discard((order, passed.number_in_layer))

    # ---- it stays on the device after all --------------------------------------------------------

    def keep_storage(self, storage: Storage) -> None:
        """It stays on the device for good."""
        group, storage.group = storage.group, None
        if group is None:
            return
        group.storages[storage.arena_place].group = None
        group.needed_count -= 1
        if group.needed_count == 0:
            self._release(group)

    def _keep(self, group: Group) -> None:
        for storage in alive(group.storages):
            self.keep_storage(storage)
        self._release(group)

    def _keep_failed(self, group: Group, why: RefitError) -> None:
        """The copies out of a group could not be started, or waited for."""
        self._keep(group)
        if isinstance(why, DeviceError):
            raise _with_name(why, group) from why
        warnings.warn(
            f"activations of {group.name} stay on the device: {why}", RuntimeWarning, stacklevel=5
        )

    def _cancel(self, group: Group) -> None:
        """A group that is asked for while it leaves stays."""
        for needed in group.storages:
            needed.group = None
            storage = needed()
            if storage is not None:
                storage.group = None
        group.needed_count = 0
        self._release(group)

    # ---- the backward pass asks for it: it returns -----------------------------------------------

    def restore(self, saved: Saved, storage: Storage) -> Any:
        """The device memory of a storage that leaves, is away or has returned. The first storage
        that is asked for brings its group, and starts the groups before it."""
        group = storage.return_group
        if not storage.group.is_away:
            with interrupts_held():
                self._cancel(storage.group)
            return storage.memory
        if storage.memory is None or group.fetching_from:
            self.tidy()
            with interrupts_held():
                if storage.memory is None:
                    self._fetch(group)
                self._join(group)
                self._prefetch_before(self.all.index(group))
        stream = current_stream(self.device)
        if storage.stream != stream:  # another stream than that which has joined the copies
            try:
                self.arena.join(storage.group.arena_number, stream)
            except RefitError as why:
                storage.memory = None
                raise _with_name(why, group) from why
        memory = storage.memory
        storage.ask(saved)
        return memory

    def begin_backward(self) -> None:
        """The backward pass has come to the layers that stay: those before them are next."""
        self.layers_awaited = 0
        with interrupts_held():
            self._prefetch_before(len(self.all))

    def _prefetch_before(self, index: int) -> None:
        """Starts the groups that the backward pass comes to next, which stand before this one."""
        left = self._prefetch
        while index > 0 and left > 0:
            index -= 1
            group = self.all[index]
            if group.needed_count == 0 and not group.shared:
                continue
            left -= 1
            if group.fetching_from:
                continue
            try:
                self._fetch(group)
            except Exception as why:
                if isinstance(why, RefitError) or lacks_memory(why):
                    return  # it is fetched again when it is asked for, and then this is told
                raise

    def _fetch(self, group: Group) -> None:
        """Starts the copies in of all that returns with a group."""
        stream = current_stream(self.device)
        by_source: dict[Group, list[Storage]] = {}
        for storage in group.to_fetch():
            by_source.setdefault(storage.group, []).append(storage)
        for source, storages in by_source.items():
            if source.fetched_for is not None:
                self._join(source.fetched_for)
            taken = [_take_memory(storage.nbytes, self.device) for storage in storages]
            addresses = [0] * len(source.storages)
            for storage, memory in zip(storages, taken, strict=True):
                addresses[storage.arena_place] = memory.data_ptr()
            # Before the call: an exception that another thread sends to this one may come right
            # after it, and copies be under way. Where none is, a join does nothing.
            group.device_memory.extend(taken)
            source.fetched_for = group
            source.last_stream = group.last_stream = stream
            group.fetching_from.append(source)
            try:
                self.arena.fetch(source.arena_number, addresses, stream)
            except RefitError as why:
                if isinstance(why, DeadlineError):
                    self.stuck.append((0, taken))
                source.fetched_for = None
                group.fetching_from.pop()
                del group.device_memory[-len(taken) :]
                raise _with_name(why, group) from why
            for storage, memory in zip(storages, taken, strict=True):
                storage.return_to(memory, stream)

    def _join(self, group: Group) -> None:
        """The stream of the backward pass waits for the copies in."""
        stream = current_stream(self.device)
        while group.fetching_from:
            source = group.fetching_from[-1]
            try:
                # The stream of the fetch, too: its allocator gets the memory back.
                for one in {stream, source.last_stream} if source.arena_number else ():
                    self.arena.join(source.arena_number, one)
            except RefitError as why:
                # the copies go on, and can be waited for again
                raise _with_name(why, group) from why
            source.fetched_for = None
            group.fetching_from.pop()
        group.device_memory.clear()

    def return_all(self) -> None:
        """Brings all groups back for good."""
        for group in self.all:
            self._fetch(group)
        for group in self.all:
            self._join(group)
        for group in self.all:
            self._cancel(group)
        self.all.clear()

    # ---- nothing needs it any more: it is released -----------------------------------------------

    def tidy(self) -> None:
        """Acts on storages that are not needed any more."""
        if self._ended_storages:
            with interrupts_held():
                self._count_down()

    def _count_down(self) -> None:
        released = False
        while self._ended_storages:
            group = self._ended_storages.popleft().group
            if group is None:
                continue
            group.needed_count -= 1
            if group.needed_count == 0 and group.arena_number:
                self._release(group)
                released = True
        if released:
            self.drop_ended()

    def drop_ended(self) -> None:
        """Forgets groups with which nothing returns any more."""
        ended = [one for one in self.all if not one.arena_number and not alive(one.shared)]
        for group in ended:
            self._end_copies(group)
            self.all.remove(group)

    def _end_copies(self, group: Group) -> None:
        """The current stream waits for bytes that are on their way and not needed any more, so
        that their memory may go."""
        with suppress(RefitError):
            self._join(group)
        if group.fetching_from:
            self.stuck.append((0, group))

    def _release(self, group: Group) -> None:
        """Gives its room in the arena back, once all of it is on the device, or not needed."""
        if not group.arena_number:
            return
        if group in self.leaving:
            self.leaving.remove(group)
        leaving = [] if group.is_away else list(group.device_memory)
        self._end_copies(group)
        number = group.arena_number
        # until it is known that no copy uses what it holds
        self.stuck.append((number, (group, leaving)))
        group.arena_number = 0
        self.arena.release(number, group.last_stream)
        self.stuck.pop()
        group.storages.clear()  # they know the group, too: a cycle would wait for the collector
        # Copies out may go on: then no one needs their bytes, and what they read may change. It
        # must not be unmapped, and belongs to streams that need not wait for them.
        used_on(leaving, group.forward.all_streams.values())
        if not group.fetching_from:
            group.device_memory.clear()

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
                self.arena.release(number, current_stream(self.device))
            except NotFoundError:
                pass  # an exception came right after its release
            except RefitError:
                continue
            self.stuck.remove(one)


def alive(storages: Iterable["weakref.ref[Storage]"]) -> list[Storage]:
    return [one for reference in storages if (one := reference()) is not None]


def _take_memory(nbytes: int, device: torch.device) -> Any:
    storage: Any = torch.UntypedStorage
    return storage(nbytes, device=device)


def _with_name(why: RefitError, group: Group) -> RefitError:
    """A failure in the backward pass, with the layer's name."""
    text = f"activations of {group.name} could not be brought back: {why.text}"
    return type(why)(text, why.status, why.subsystem)


class LayerTime:
    """How long a layer takes, in a forward pass that is measured. On one thread.

    ``submitted_s``: until the CPU had submitted its work. The layer may have waited for the device
    in between. ``computed_s``: the time of its work on the device, without what the device waited
    for before the layer.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin = self._end = self._mark()
        self._began = time.perf_counter()
        self.submitted_s = 0.0

    def _mark(self) -> Any:
        """An event on the current stream."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def end(self) -> None:
        """The layer has ended, as far as the CPU knows."""
        self.submitted_s = time.perf_counter() - self._began
        self._end = self._mark()

    @property
    def computed_s(self) -> float:
        """Waits until the device has come to its end."""
        if self._device.type != "cuda":
            return self.submitted_s
        self._begin.synchronize()
        self._end.synchronize()
        elapsed_ms: float = self._begin.elapsed_time(self._end)
        return elapsed_ms / 1000


@dataclass(slots=True)
class Measure:
    """A group in a forward pass: bytes that its layer saved, those of them that leave, times."""

    saved_bytes: int
    left_bytes: int
    submitted_s: float
    computed_s: float
    copy_s: float

    @property
    def forward_s(self) -> float:
        """Of its layer: the slower of CPU and device sets the pace."""
        return max(self.submitted_s, self.computed_s)

    def shorten_to(self, before: "Measure") -> None:
        """Takes the times of an earlier pass where those are shorter, for as many saved bytes."""
        both = before.saved_bytes > 0 and self.saved_bytes > 0
        scale = self.saved_bytes / before.saved_bytes if both else 1.0
        self.submitted_s = min(self.submitted_s, before.submitted_s * scale)
        self.computed_s = min(self.computed_s, before.computed_s * scale)


class Plan:
    """How much of each group of a model's forward pass leaves, so that no copy delays the compute.
    Groups are known by their order in the forward pass.

    The first two forward passes measure. In the first one each group's copies end before the next
    layer begins, which shows how long they take. The second one waits for copies as later passes
    do, and shows how long a layer takes: a device that waits for the CPU after every layer seems
    slower than it is. Of each of a layer's two times the shorter one counts, for the first pass
    also compiles and allocates, and in the second the CPU may wait for copies within a layer.

    From then on copies are followed through one queue: those of a group begin when its forward pass
    ends and the copies before it have left, and have to end within the ``in_flight`` groups after
    it, for then its memory is freed. A group leaves by the share of its bytes for which there is
    time. Shares, not bytes: batches of other lengths compute as much longer as they copy.
    """

    def __init__(self, in_flight: int, for_memory: bool) -> None:
        self._in_flight = in_flight
        self._for_memory = for_memory
        self._passes = 0
        self._measured: list[Measure] = []
        self._shares: dict[int, float] = {}

    @property
    def measures(self) -> bool:
        """Whether the next forward pass measures."""
        return not self._for_memory and self._passes < _MEASURED_PASSES

    @property
    def measures_copies(self) -> bool:
        """Whether in the next forward pass copies end before the next layer begins."""
        return self.measures and self._passes == 0

    def end_pass(self, measured: Sequence[Measure]) -> None:
        """A forward pass that measures has ended, with these groups; after the last such pass the
        shares are known. ``copy_s`` counts in the first one alone."""
        if self._passes > 0:
            a_byte_s = self._copy_s_of_a_byte()
            for one in measured:
                one.copy_s = one.left_bytes * a_byte_s
            for one, before in zip(measured, self._measured, strict=False):
                one.shorten_to(before)
                if before.left_bytes > 0:
                    one.copy_s = before.copy_s * one.left_bytes / before.left_bytes
        self._measured[: len(measured)] = measured
        self._passes += 1
        if not self.measures:
            self._shares = self._divide()

    def _copy_s_of_a_byte(self) -> float:
        """For groups of which nothing has left in the first pass."""
        nbytes = sum(one.left_bytes for one in self._measured)
        return sum(one.copy_s for one in self._measured) / nbytes if nbytes else 0.0

    def share(self, order: int) -> float:
        """The share of a group's bytes that leaves. 1 for a group that was not measured."""
        return self._shares.get(order, 1.0)

    @property
    def is_empty(self) -> bool:
        """Whether no group leaves, because each copy would delay the compute."""
        return bool(self._shares) and not any(
            share for order, share in self._shares.items() if self._measured[order].left_bytes
        )

    def forget(self) -> None:
        """Forgets what was measured: the next forward passes measure again."""
        self._passes = 0
        self._measured.clear()
        self._shares.clear()

    def _divide(self) -> dict[int, float]:
        ends = list(accumulate(one.forward_s for one in self._measured))
        shares: dict[int, float] = {}
        free_at = 0.0
        for order, one in enumerate(self._measured):
            begins = max(ends[order], free_at)
            last = order + self._in_flight
            # After the last groups no forward pass waits for memory.
            time_left = ends[last] - begins if last < len(ends) else one.copy_s
            share = 1.0 if one.copy_s <= max(time_left, 0.0) else max(time_left, 0.0) / one.copy_s
            shares[order] = share if share >= _LEAST_SHARE else 0.0
            free_at = begins + shares[order] * one.copy_s
        return shares
