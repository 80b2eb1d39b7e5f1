"""States leave and return, whatever happens in between: the part of a controller that moves.

    training ──clear──► cleared ──restore──► returning ──join──► training

A phase changes only when its work is done on every device; each device knows by itself how far it
is (see ``regions``). So after an exception, Ctrl-C too, the same verb goes on, and ``restore``
brings back what has left from wherever it is.

Optimizer hooks, publishers and options of the user are unknown here.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from refit._library import lib
from refit.config import Config
from refit.device import Device
from refit.errors import BusyError, StateError
from refit.grads import Accumulation, Policy, StandIns
from refit.held import Holdings
from refit.observers import Observers
from refit.offloader import KEEP, ZERO
from refit.regions import Regions, refuse_capture, spec_of
from refit.stats import flatten, gather
from refit.storages import (
    GRADS,
    STATES,
    Place,
    Scan,
    Slot,
    Stock,
    begin_of,
    places,
    scan,
    take_stock,
)

if TYPE_CHECKING:
    from refit.memory_pool import MemPool

TRAINING = "training"
CLEARED = "cleared"
RETURNING = "returning"

ARENA = "refit's arena"
COPIES = "copies behind"
"""How memory and copies are called in pictures."""


class Cycle:
    """The states of some optimizers, on all their devices. Used by one thread at a time."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        model: torch.nn.Module | None,
        config: Config,
        grads: Policy,
        observers: Observers,
        held: Holdings,
        pool: "MemPool | None" = None,
    ) -> None:
        self.optimizers = list(optimizers)
        self._held = held
        self._pool = pool
        self.accumulation = Accumulation(self._gradients)
        self.phase = TRAINING
        self.readers = 0
        self._bringing = threading.RLock()
        self.resident: list[tuple[str, str]] = []
        self._model = model
        self._config = config
        self._grads = grads
        self._observers = observers
        self._stand_ins = StandIns(self.bring_back)
        self._lanes: dict[torch.device, Regions] = {}
        self._stock: Stock | None = None
        self._scan: Scan | None = None
        self._grads_lost = False
        self._mark: tuple[list[int], list[int]] = [], []
        self._cycles = 0
        self._failures = 0
        self._began = 0.0
        self._returned = 0.0
        self._exposed = 0.0
        self._cycle_s = self._exposed_s = 0.0

    def _parameters(self) -> list[Any]:
        return [p for one in self.optimizers for group in one.param_groups for p in group["params"]]

    def _gradients(self) -> list[tuple[int, torch.Tensor]]:
        """Every gradient that there is, and what tells its owner from others."""
        return [(id(p), p.grad) for p in self._parameters() if p.grad is not None]

    @property
    def lanes(self) -> list[Regions]:
        """The regions of each device that has some."""
        return list(self._lanes.values())

    # ---- the way out ----------------------------------------------------------------------------

    def clear(self) -> None:
        """States, and gradients by their policy, leave; returns when their memory is free."""
        began = time.perf_counter()
        if self.phase == CLEARED and self._stock is None:
            self.restore()  # copies back had failed: gradients are in use, storages let go of
        if self.phase == RETURNING:
            self.join()
        if self.phase == TRAINING:
            self._began, self._exposed = began, 0.0
            self._refuse_clear()
            self._refresh()
            self._grads_lost = False
            self._tell_host_memory()
        try:
            with self._observers.phase("offload", sum(lane.nbytes for lane in self.lanes)):
                self._leave()
        except BaseException:
            self._failures += 1
            raise
        finally:
            self._exposed += time.perf_counter() - began

    def _refuse_clear(self) -> None:
        if self.readers:
            raise BusyError(
                "a checkpoint() is open and reads the states where they are: leave its block first"
            )
        if self._grads != "keep" and self.accumulation.open:
            raise StateError(
                f"a gradient accumulation is open, and grads={self._grads!r} would lose it: step "
                'first, use grads="keep", or set accumulating = False if it is to be lost'
            )
        for device in {p.device for p in self._parameters()}:
            refuse_capture(device)

    def _leave(self) -> None:
        self.phase = CLEARED  # from here on restore() settles what was begun
        try:
            for lane in self.lanes:
                lane.leave()
            self._put_stand_ins()
            for lane in self.lanes:
                lane.free()
        except BaseException:
            if all(lane.home for lane in self.lanes):
                self._stand_ins.take()
                self.phase = TRAINING
            else:
                self._put_stand_ins()  # gradients that are leaving must not be written to
            raise
        self._lose_grads()

    def _put_stand_ins(self) -> None:
        """For the gradients whose memory is about to go."""
        if self._stock is None or not self._stock.grads:
            return
        away = {address for lane in self.lanes for address in lane.addresses()} - {0}
        for owner, grad in self._stock.grads:
            if begin_of(grad) in away and not self._stand_ins.stands_in(owner):
                self._stand_ins.put(owner, grad)

    def _lose_grads(self) -> None:
        """By agreement; once, and only when all that was to leave has left."""
        if self._grads == "keep" or self._grads_lost:
            return
        for parameter in self._parameters():
            if self._grads == "discard":
                parameter.grad = None
            elif parameter.grad is not None and not self._stand_ins.stands_in(parameter):
                parameter.grad.zero_()
        self._grads_lost = True

    # ---- what there is --------------------------------------------------------------------------

    def _refresh(self) -> None:
        """Looks again at what the optimizers hold, and plans anew what has changed."""
        self._settle()
        beside = list(self._held.tensors())
        stock = take_stock(self.optimizers, self._grads != "discard", beside)
        mark = stock.identities(), stock.addresses()
        if self._scan is None or mark != self._mark:
            found = self._decide(stock, beside)
            self._scan, self.resident = None, found.resident
            self._plan(found, stock)
            self._scan, self._mark = found, mark
        else:
            self._hold(self._scan, stock)
        self._stock = stock

    def _settle(self) -> None:
        """Waits for copies that a join on a GPU has only queued a stream behind."""
        try:
            for lane in self.lanes:
                lane.settle()
        except BaseException:
            if not all(lane.back for lane in self.lanes):
                self.phase = CLEARED  # they have failed: restore() moves what is still on the host
            raise

    def _decide(self, stock: Stock, beside: Iterable[tuple[str, Any]]) -> Scan:
        pieces = [] if self._pool is None else self._pool.pieces()
        return scan(stock, self._others(beside), self._namer(), self._why_device_stays, pieces)

    def _hold(self, decided: Scan, stock: Stock) -> None:
        """Nothing has changed; but storages are only held while they are away."""
        held: dict[torch.device, list[torch.UntypedStorage]] = {one: [] for one in self._lanes}
        for slot in decided.slots:
            held[slot.device].append(stock.tensors[slot.tensor].untyped_storage())
        for device, storages in held.items():
            self._lanes[device].hold(storages)

    def _plan(self, decided: Scan, stock: Stock) -> None:
        policies = {STATES: KEEP, GRADS: KEEP if self._grads == "keep" else ZERO}
        by_device: dict[torch.device, list[Slot]] = {device: [] for device in self._lanes}
        for slot in decided.slots:
            by_device.setdefault(slot.device, []).append(slot)
        for device, slots in by_device.items():
            if device not in self._lanes:
                self._lanes[device] = Regions(device, self._config, self._arenas_of(device))
            lane = self._lanes[device]
            storages = [stock.tensors[one.tensor].untyped_storage() for one in slots]
            lane.plan(slots, storages, policies)

    def _arenas_of(self, device: torch.device) -> Device | None:
        """The pool's own handle, which knows its arena."""
        if self._pool is None or self._pool.device != device:
            return None
        return self._pool.handle

    def _others(self, beside: Iterable[tuple[str, Any]]) -> dict[Place, str]:
        """Memory that is not the optimizers' own: weights, buffers, gradients that do not leave.

        What is kept beside a state may be a parameter to the optimizer, and is its own all the
        same: masters of weights in a shorter type.
        """
        masters = {id(tensor) for _, tensor in beside}
        known: list[tuple[str, Any]] = list(self._held.others())
        known += [("a parameter", p) for p in self._parameters() if id(p) not in masters]
        if self._model is not None:
            known += [(f"parameter {name}", p) for name, p in self._model.named_parameters()]
            known += [(f"buffer {name}", b) for name, b in self._model.named_buffers()]
        ours = set() if self._grads == "discard" else {id(p) for p in self._parameters()}
        others = [*self._parameters(), *(p for _, p in known)]
        grads = [p.grad for p in others if p.grad is not None and id(p) not in ours]
        return places([*known, *(("a gradient", grad) for grad in grads)])

    def _namer(self) -> Callable[[Any], tuple[str, ...]]:
        """Names parameters: as the model does, as their group does, or by their place in it."""
        names: dict[int, str] = {}
        if self._model is not None:
            names = {id(p): name for name, p in self._model.named_parameters()}
        for number, optimizer in enumerate(self.optimizers):
            which = f"optimizer{number}." if len(self.optimizers) > 1 else ""
            for place, group in enumerate(optimizer.param_groups):
                given = group.get("param_names") or []
                for index, p in enumerate(group["params"]):
                    name = given[index] if index < len(given) else f"{which}{place}.{index}"
                    names.setdefault(id(p), name)
        return lambda owner: () if owner is None else (names.get(id(owner), "state"),)

    def _why_device_stays(self, device: torch.device) -> str | None:
        chosen = str(self._config.get("device")).partition(":capacity")[0]
        if chosen == "auto":
            on_gpu = any(p.device.type == "cuda" for p in self._parameters())
            return "it is in host memory already" if on_gpu and device.type == "cpu" else None
        if chosen in (spec_of(device, self._config).partition(":capacity")[0], device.type):
            return None
        return f"it is on {device}, and the configuration says device: {chosen}"

    # ---- the way back ---------------------------------------------------------------------------

    def restore(self) -> None:
        """Allocates the storages and starts the copies back; nothing if they are back."""
        if self.phase != CLEARED:
            return
        began = self._returned = time.perf_counter()
        try:
            with self._observers.phase("restore", sum(lane.nbytes for lane in self.lanes)):
                for lane in self.lanes:
                    refuse_capture(lane.device)
                    lane.come_back()
                for lane in self.lanes:
                    lane.join(GRADS)  # a backward pass adds to them, long before the step
            self._stand_ins.take()
            if self._stock is not None:
                self._mark = self._mark[0], self._stock.addresses()
            self._stock = None
            self.phase = RETURNING
        finally:
            self._exposed += time.perf_counter() - began

    def join(self) -> None:
        """What follows on the current stream finds all bytes back; on a CPU it waits for them.

        StateError while they are away: restore first.
        """
        if self.phase == CLEARED:
            raise StateError("the states are away: restore() brings them back, then join()")
        if self.phase == RETURNING:
            for lane in self.lanes:
                refuse_capture(lane.device)  # it would wait for what is outside of the graph
        began = time.perf_counter()
        try:
            with self._observers.phase("join"):
                for lane in self.lanes:
                    lane.join()
        except BaseException:
            if not all(lane.back for lane in self.lanes):
                self.phase = CLEARED  # copies failed: restore() moves what is still on the host
            raise
        if self.phase == RETURNING:
            self.phase = TRAINING
            self._cycles += 1
            now = time.perf_counter()
            self._tell_way_back(now)
            self._cycle_s, self._exposed_s = now - self._began, self._exposed + now - began

    def bring_back(self) -> None:
        """Restore and join, from wherever things are. Any thread: a backward pass has one a GPU."""
        with self._bringing:
            self.restore()
            if self.phase == RETURNING:
                self.join()
            for lane in self.lanes:
                lane.forget()

    def look_again(self) -> None:
        """Nothing that was decided holds any longer."""
        self._scan = None

    # ---- the rest -------------------------------------------------------------------------------

    def stats(self, *others: tuple[Callable[..., int], int]) -> dict[str, float]:
        """The figures of all devices, and of ``others`` (see ``gather``), as one flat dict."""
        sources = [(lib.refit_offloader_stats, lane.offloader._live) for lane in self.lanes]
        mine = {
            "cycles": self._cycles,
            "cycle_failures": self._failures,
            "cycle_s": self._cycle_s,
            "cycle_exposed_s": self._exposed_s,
            "reclaimed_bytes": sum(lane.reclaimed for lane in self.lanes),
        }
        return flatten(gather(*sources, *others), mine)

    def _tell_host_memory(self) -> None:
        """Says to who draws it what the arenas take."""
        if self._observers.drawn:
            held = sum(int(lane.offloader.stats().host_bytes) for lane in self.lanes)
            self._observers.hold(ARENA, held)

    def _tell_way_back(self, now: float) -> None:
        """Likewise how long the copies took that went on behind; on a GPU they may not be done."""
        if not self._observers.drawn or not all(lane.home for lane in self.lanes):
            return
        took = max((lane.offloader.stats().restore_seconds_last for lane in self.lanes), default=0)
        moved = sum(lane.nbytes for lane in self.lanes)
        self._observers.past(COPIES, now - self._returned, float(took), moved)

    def trim(self) -> None:
        """Gives the host memory back. StateError while states are away."""
        if self.phase == RETURNING:
            self.join()
        if self.phase == CLEARED:
            raise StateError("the states are in that memory: restore() them first")
        for lane in self.lanes:
            lane.settle()
            lane.offloader.trim()
        self._tell_host_memory()

    def close(self) -> None:
        """Brings back what is away, then closes all. Fails, and stays open, if that fails."""
        self.bring_back()
        for device, lane in list(self._lanes.items()):
            lane.settle()
            lane.close()
            del self._lanes[device]
        self._tell_host_memory()
