"""Groups leave in the forward pass: which of their storages, and when the device's memory goes.

When a group is away, our reference to the device's memory is dropped, and with it the memory: those
who hold a storage besides us are counted, and where there are any it stays, for then its leaving
would free nothing. Those that are held beyond the forward pass do not leave the next time.
"""

import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from refit.activations.groups import Forward, Group, Groups, Needed, alive, named
from refit.activations.plan import Plan
from refit.errors import DeviceError, RefitError
from refit.states.saved_tensors import Storage
from refit.states.torch_memory import current_stream, used_on, users_of

_MEASURE_MS = 60_000
"""The longest wait for the copies of a group that is measured."""


class Leaving:
    """The way out of one offload's groups. Used with the lock of ``groups``."""

    def __init__(self, groups: Groups, plan: Plan) -> None:
        self._groups = groups
        self._plan = plan
        self.held_anyway: set[tuple[int, int]] = set()
        """Where storages are saved that others hold: order of the group, place among its own."""

    def chosen(self, forward: Forward, group: Group, found: Sequence[Storage]) -> list[Storage]:
        """Those that leave, as the plan says; the large ones first where not all do."""
        may = []
        for one in found:
            if (group.order, one.at) in self.held_anyway:
                forward.passed_over.append((group.order, weakref.ref(one)))
            elif one.device.nbytes() == one.nbytes:  # its owner has not taken the memory back
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
        return sorted(chosen, key=lambda one: one.at)

    def leave(self, group: Group, chosen: Sequence[Storage], streams: Mapping[int, Any]) -> None:
        """Starts the copies out, after all streams that the layer has worked on."""
        if not chosen:
            return
        group.stream = current_stream(self._groups.on)
        group.streams = list({group.stream: None, **streams})
        for one in group.streams[1:]:
            torch.cuda.current_stream(self._groups.on).wait_stream(streams[one])
        try:
            group.number = self._groups.arena.begin()
            self._add(group, chosen)
            self._groups.arena.commit(group.number, group.stream)
        except RefitError as why:
            self._stays(group, why)
            return
        except BaseException:
            self._groups.keep(group)
            raise
        if group.storages:
            self._groups.leaving.append(group)
        else:  # the arena has room for none
            self._groups.release(group)

    def _add(self, group: Group, chosen: Sequence[Storage]) -> None:
        for storage in chosen:
            place = self._groups.arena.add(group.number, storage.device.data_ptr(), storage.nbytes)
            if place is not None:
                storage.place = place
                storage.group = storage.back = group
                needed = Needed(storage, self._groups.over.append)
                needed.group = group
                group.storages.append(needed)
                group.held.append(storage.device)
                group.left += 1

    def give_back(self, most: int) -> None:
        """Lets go of the device memory of groups that have left, and of so many that at most
        ``most`` are on their way."""
        while self._groups.leaving:
            group = self._groups.leaving[0]
            try:
                if not self._groups.arena.is_still(group.number):
                    if len(self._groups.leaving) <= most:
                        return
                    for stream in group.streams:
                        self._groups.arena.join(group.number, stream)
            except RefitError as why:
                self._groups.leaving.popleft()
                self._stays(group, why)
                continue
            self._groups.leaving.popleft()
            self._free(group)

    def _free(self, group: Group) -> None:
        """The group is away. Its device memory goes, but for what others hold besides us."""
        group.is_away = True
        for storage in alive(group.storages):
            if storage.group is None:
                continue
            if users_of(storage.device) == 1:
                self._let_go(group.forward, storage)
            elif not group.forward.is_over:
                group.forward.waiting.append((group.order, storage))
            else:
                self._groups.keep_storage(storage)
        group.held.clear()
        if group.left == 0:
            self._groups.release(group)

    def _let_go(self, forward: Forward, storage: Storage) -> None:
        """Its identity may be another storage's from now on, and its memory, too: that belongs to
        the stream on which it was taken, which need not be one of those that wait for the copies.
        Nor do copies alone read it: a layer after its own may, which has not saved it."""
        used_on([storage.device], forward.streams_of_all.values())
        if forward.storages.get(storage.device._cdata) is storage:
            del forward.storages[storage.device._cdata]
        forward.freed += storage.nbytes
        storage.device = None

    def look_at_waiting(self, forward: Forward) -> None:
        """Lets go of what others held when it left, and do not any more."""
        waiting, forward.waiting = forward.waiting, []
        while waiting:
            order, storage = waiting.pop()
            if storage.group is None or storage.device is None:
                continue
            if users_of(storage.device) == 1:
                self._let_go(forward, storage)
            else:
                forward.waiting.append((order, storage))

    def learn(self, forward: Forward) -> None:
        """What others hold beyond the forward pass does not leave the next time."""
        self.look_at_waiting(forward)
        waiting, forward.waiting = forward.waiting, []
        for order, storage in waiting:
            self.held_anyway.add((order, storage.at))
            forward.stayed += storage.nbytes
            self._groups.keep_storage(storage)
        for order, reference in forward.passed_over:
            passed = reference()
            if passed is not None and users_of(passed.device) == 1:
                self.held_anyway.discard((order, passed.at))

    def _stays(self, group: Group, why: RefitError) -> None:
        """The copies out of a group could not be started, or waited for: it stays on the device."""
        self._groups.keep(group)
        if isinstance(why, DeviceError):
            raise named(why, group) from why
        warnings.warn(
            f"activations of {group.name} stay on the device: {why}", RuntimeWarning, stacklevel=5
        )

    def copied(self, group: Group) -> float:
        """Waits for the copies out of a group that is measured: how long they took."""
        began = time.perf_counter()
        if group.number and self._groups.leaving:
            with suppress(RefitError):  # give_back meets it again, or waits on
                self._groups.arena.wait(group.number, _MEASURE_MS)
        return time.perf_counter() - began
