"""States leave and return, whatever happens in between: the state machine of a controller.

    training ──offload──► cleared ──restore──► returning ──wait──► training

The functions that a state passes in one cycle, in order. Each class's file stands where it first
occurs; ``StateCycle`` is in this one:

    Controller.offload                          controller.py
      StateCycle.offload
        StateCycle._update_plan
          StateSource.take_inventory            state_source.py: what there is now
          StateSource.make_plan                 storages.py decides what can leave
          DeviceRegions.set_plan                regions.py adds and seals, if the plan is new
        StateCycle._leave
          OffloadedTensors.mark                 offloaded_tensor.py: using one brings all back
          DeviceRegions.leave                   starts the copies
            refit_offloader_offload             offloader.py; lib/REGION.md goes on from here
          DeviceRegions.free                    waits for the copies, then empties the storages
    Controller.restore
      StateCycle._come_back
        DeviceRegions.come_back                 takes memory, and starts the copies back
          refit_offloader_restore
    Controller.wait, Optimizer.step             hooks.py
      StateCycle.wait, _join
        DeviceRegions.join                      the current stream waits for the copies back
        OffloadedTensors.unmark                 states are used as ever
    What uses a state                           offloaded_tensor.py
      StateCycle._on_use                        the CPU waits for the copies back

``CLEARED`` is set before the first copy, the other phases when their work is done on every device;
each device knows by itself how far it is (see ``regions``). So after an exception, Ctrl-C too, the
same verb goes on, and ``restore`` brings back what has left from wherever it is.

Code that a thread runs in the middle of a verb of its own, as a signal handler does, cannot move or
use the states: it gets a BusyError. If the handler lets it pass, it ends the verb as Ctrl-C does.
Other threads wait. Methods with an underscore are called with the call lock held.

``refit_controller`` (refit/controller.h) is the cycle of C callers. This one calls the offloaders
itself, for three reasons. PyTorch frees and takes memory between two calls of an offloader, on the
thread whose streams PyTorch uses. An exception may end a verb between any two lines. And a tensor
counts as away before its first copy starts: ``phase`` decides what using a tensor triggers; the C
state says how far the copies are.

``StateSource`` says what there is, ``RegionsPerDevice`` where it is, ``CycleCounters`` how it went.
Independent of hooks, publishers and options of the user.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch

from refit._c import abi
from refit._c.call_lock import WaitingCallLock
from refit._c.config import Config
from refit._c.stats import flatten
from refit.errors import BusyError, NotFoundError, StateError
from refit.observe.observers import COPIES, Observers
from refit.states.checkpoint import Image
from refit.states.grads import Accumulation, Policy
from refit.states.offloaded_tensor import OffloadedTensor, OffloadedTensors, untouched
from refit.states.regions import RegionsPerDevice
from refit.states.state_source import StateSource
from refit.states.storages import STATES, OffloadPlan, StateInventory, is_emptied
from refit.states.torch_memory import Devices, refuse_capture

if TYPE_CHECKING:
    from refit.states.weight_source import WeightSource

TRAINING = "training"
CLEARED = "cleared"
RETURNING = "returning"

ARENA = "refit's arena"
"""The name of its memory in pictures."""


class StateCycle:
    """The states of some optimizers, on all their devices. Used by one thread at a time."""

    def __init__(
        self,
        source: "StateSource | WeightSource",
        config: Config,
        grads: Policy,
        observers: Observers,
        devices: Devices,
    ) -> None:
        self.counters = CycleCounters(observers)
        self.accumulation = Accumulation(self._gradients, self._is_nonzero)
        self.phase = TRAINING
        self.readers: set[object] = set()
        self.abandoned = False
        self.resident: list[tuple[str, str]] = []
        self._source = source
        self._grads = grads
        self._observers = observers
        self._lock = WaitingCallLock("controller")
        on_use = cast(Any, torch.compiler).disable(self._on_use)  # it is not part of a graph
        self._offloaded = OffloadedTensors(on_use, self._lock, zeroable=source.zeroable)
        self.per_device = RegionsPerDevice(config, devices, source.reuse)
        self._inventory: StateInventory | None = None
        self._plan: OffloadPlan | None = None
        self._grads_lost = False
        self._planned_identities: list[int] = []
        self._planned_addresses: list[int] = []

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those whose states these are."""
        return self._source.optimizers

    @property
    def is_cleared(self) -> bool:
        """Whether states are away, or may be: ``restore`` has something to do."""
        return self.phase == CLEARED

    @property
    def shows_image(self) -> bool:
        """Whether all states are in the cycle's own image while they are away."""
        return self._source.lives_elsewhere is None

    # ---- offload --------------------------------------------------------------------------------

    def offload(self) -> None:
        """States, and gradients by their policy, leave; returns when their memory is free."""
        with self._lock, self.counters.verb():
            began = time.perf_counter()
            if self.phase == CLEARED and self._inventory is None:
                self._restore()  # copies back had failed: gradients are in use, storages let go of
            if self.phase == RETURNING:
                self._join()
            if self.phase == TRAINING:
                self.counters.begin(began)
                self._refuse_offload()
                self._update_plan()
                self._grads_lost = False
                self.counters.report_host_memory(self.per_device)
            else:
                self._refuse_moved()
            try:
                with self._observed("offload", self.per_device.nbytes):
                    if self.phase == RETURNING:
                        self._join()
                    if self.phase == TRAINING and not self.per_device.held:
                        self._update_plan()
                    self._leave()
            finally:
                self.counters.waited(began)

    @contextmanager
    def _observed(self, phase: str, nbytes: int = 0) -> Iterator[None]:
        """Observers are told of a phase. They may use the states, as nothing is half done then; so
        the block looks again at where the states are."""
        with ExitStack() as stack:
            stack.enter_context(self._lock.letting_in(True))
            stack.enter_context(self._observers.phase(phase, nbytes))
            stack.enter_context(self._lock.letting_in(False))
            yield

    def _refuse_offload(self) -> None:
        if self.readers:
            raise BusyError(
                "a checkpoint() is open and reads the states where they are: leave its block first"
            )
        if self._grads != "keep" and self.is_accumulating:
            raise StateError(
                f"a gradient accumulation is open, and grads={self._grads!r} would lose it: step "
                'first, use grads="keep", or set accumulating = False if it is to be lost'
            )
        for device in {p.device for p in self._source.parameters()}:
            refuse_capture(device)

    def _leave(self) -> None:
        self.phase = CLEARED  # from here on restore() settles what was begun
        try:
            self._watch()  # first: what is leaving must not be written to
            for regions in self.per_device:
                regions.leave()
            for regions in self.per_device:
                regions.free()
        except BaseException:
            if self.per_device.on_device:
                self._offloaded.unmark_all()
                self.phase = TRAINING
            raise
        self._lose_grads()

    def _watch(self) -> None:
        """From now on a use of a tensor whose memory is about to go brings it back."""
        inventory, plan = self._inventory, self._plan
        if inventory is None or plan is None:
            return
        for group, numbers in plan.by_group.items():
            tensors = [inventory.tensors[number] for number in numbers]
            self._offloaded.mark(
                group, tensors + inventory.wrappers if group == STATES else tensors
            )
            grads = [number for number in numbers if number >= inventory.states]
            self._offloaded.watch(group, [inventory.owners[number] for number in grads])

    # ---- the plan -------------------------------------------------------------------------------

    def _update_plan(self) -> None:
        """Looks again at what the optimizers hold, and makes a new plan if it has changed."""
        self._wait_for_copies()
        inventory = self._source.take_inventory()
        identities = inventory.identities()
        if not self._plan_holds(inventory, identities):
            plan = self._source.make_plan(inventory)
            self._plan, self.resident = None, plan.resident
            self.per_device.set_plan(plan, inventory, self._source.policies())
            self._plan, self._planned_identities = plan, identities
            self._planned_addresses = inventory.addresses(plan.others)
        self._inventory = inventory

    def _plan_holds(self, inventory: StateInventory, identities: list[int]) -> bool:
        """Whether the plan is right for an inventory (see ``storages``); then its storages are
        held."""
        plan = self._plan
        if plan is None or plan.passing or not self.per_device.on_device:
            return False
        if identities != self._planned_identities:
            return False
        if inventory.addresses(plan.others) != self._planned_addresses:
            return False
        return self.per_device.hold(plan, inventory)

    def _refuse_moved(self) -> None:
        """An offload that failed goes on: what is still here leaves from where it was."""
        if self._plan and self._inventory and not self.per_device.hold(self._plan, self._inventory):
            raise StateError(
                "a state's memory was resized or replaced after an offload() had begun and failed: "
                "call restore(), then offload()"
            )

    def _wait_for_copies(self) -> None:
        """Waits for copies that a join on a GPU has made only a stream wait for."""
        try:
            self.per_device.wait()
        except BaseException:
            if not self.per_device.back:
                self.phase = CLEARED  # they have failed: restore() moves what is still on the host
            raise

    # ---- restore --------------------------------------------------------------------------------

    def restore(self) -> None:
        """Allocates the storages and starts the copies back; nothing if they are back."""
        if self.phase != CLEARED:
            return
        with self._lock:
            self._restore()

    def _restore(self) -> None:
        if self.phase != CLEARED:  # another thread did it meanwhile
            return
        began = time.perf_counter()
        self.counters.returns(began)
        with self.counters.verb():
            try:
                with self._observed("restore", self.per_device.nbytes):
                    if self.phase == CLEARED:
                        self._come_back()
            finally:
                self.counters.waited(began)

    def _come_back(self) -> None:
        for regions in self.per_device:
            refuse_capture(regions.device)
            regions.come_back()
        for regions in self.per_device:
            for group in self._source.early:  # a backward pass writes to them before the step
                regions.join(group)
        self._offloaded.unmark(*self._source.early)
        for regions in self.per_device:
            regions.make_departure_stream_wait(self._source.early)
        if self._inventory is not None and self._plan is not None and self._plan.others_move:
            self._planned_addresses = self._inventory.addresses(self._plan.others)
        self._inventory = None
        self.phase = RETURNING

    def wait(self) -> None:
        """Makes the current stream wait until all bytes are back; on a CPU the caller waits.

        StateError while they are away: restore first.
        """
        with self._lock:
            self._join()

    def _join(self) -> None:
        began = time.perf_counter()
        with self.counters.verb():
            self._refuse_join()
            with self._observed("wait"):
                self._refuse_join()
                self._join_devices()
                self._offloaded.unmark_all()
                joined, self.phase = self.phase, TRAINING
            if joined == RETURNING:
                self.counters.end(began, self.per_device)

    def _refuse_join(self) -> None:
        if self.phase == CLEARED:
            raise StateError("the states are away: restore() brings them back, then wait()")
        if self.phase == RETURNING:
            for regions in self.per_device:
                refuse_capture(regions.device)  # it would wait for what is outside of the graph

    def join_group(self, group: int) -> None:
        """The same for one group; brings all back first, if they are away."""
        if self.phase == TRAINING:
            return
        with self._lock:
            self._count_early()
            self._restore()
            if self.phase == RETURNING:
                self._join_devices(group)
                self._offloaded.unmark(group)

    def _join_devices(self, group: int | None = None) -> None:
        try:
            for regions in self.per_device:
                regions.join(group)
        except BaseException:
            if not self.per_device.back:
                self.phase = CLEARED  # copies failed: restore() moves what is still on the host
            raise

    def bring_back(self) -> None:
        """Restore and join, from wherever things are. Any thread: a backward pass has one a GPU."""
        with self._lock:
            self._count_early()
            self._bring_back()

    def _count_early(self) -> None:
        if self.phase == CLEARED:
            self.counters.early()

    def _bring_back(self) -> None:
        self._restore()
        if self.phase == RETURNING:
            self._join()
        for regions in self.per_device:
            regions.forget()

    def _on_use(self) -> None:
        """As ``bring_back``, for a tensor that is used while it is away, on any stream: no copy is
        under way when this returns."""
        with self._lock:
            self._count_early()
            self._restore()
            if self.phase == RETURNING:
                self._wait_for_copies()
                self._join()
        if self.abandoned and not self.readers:
            self.close()

    def refuse_step(self) -> None:
        """What refuses a step of states that live on the host: BusyError for an open checkpoint,
        StateError while a CUDA graph is captured."""
        if self.readers:
            raise BusyError(
                "a checkpoint() is open and reads the states, which a step would change: leave its "
                "block first"
            )
        for device in {p.device for p in self._source.parameters()}:
            refuse_capture(device)

    def invalidate(self) -> None:
        """The plan does not hold any longer."""
        self._plan = None

    def begin_reading(self, reader: object) -> None:
        """No copy is under way when this returns, and no ``offload`` begins until the reader has
        left ``readers``."""
        with self._lock:
            if self.phase == RETURNING:
                self._join()
            self._wait_for_copies()
            self.readers.add(reader)

    # ---- gradients ------------------------------------------------------------------------------

    @property
    def is_accumulating(self) -> bool:
        """Whether gradients hold what no step has used, those in memory of a framework's own
        too."""
        if self.accumulation.open:
            return True
        return self.accumulation.set_by_user is None and self._source.is_accumulating()

    def _gradients(self) -> list[tuple[int, torch.Tensor]]:
        """Every gradient that there is, away or not, and what tells its owner from others."""
        grads = [(id(p), p.grad) for p in self._source.parameters()]
        return [(owner, grad) for owner, grad in grads if grad is not None]

    def _is_nonzero(self, grad: torch.Tensor) -> bool:
        """Whether a gradient is not all zeros, wherever its bytes are."""
        if self.phase == CLEARED:
            with self._lock:
                self._wait_for_copies()  # copies may be under way, after Ctrl-C
        if self._offloaded.is_zero(grad):
            return False
        with untouched():
            if not is_emptied(grad):
                return bool(grad.any())
        with Image(regions for regions in self.per_device if not regions.on_device) as image:
            try:
                view = image.view(grad)
            except NotFoundError:
                return False  # it returns as zeros
            return view is not None and bool(view.any())

    def _lose_grads(self) -> None:
        """By agreement; once, and only when all that was to leave has left."""
        if self._grads == "keep" or self._grads_lost:
            return
        for parameter in self._source.parameters():
            if self._grads == "discard":
                parameter.grad = None
            elif parameter.grad is not None and not isinstance(parameter.grad, OffloadedTensor):
                parameter.grad.zero_()
        self._grads_lost = True

    # ---- the rest -------------------------------------------------------------------------------

    def stats(self, *others: tuple[Callable[..., int], int]) -> dict[str, float]:
        """The figures of all devices, and of ``others`` (see ``gather``), as one flat dict."""
        figures = self.per_device.stats(*others)
        self.counters.fill(figures)
        figures.offload_reclaimed_bytes_last = sum(regions.reclaimed for regions in self.per_device)
        return flatten(figures, {"early_returns": self.counters.early_returns})

    def trim(self) -> None:
        """Gives the host memory back. StateError while states are away."""
        with self._lock:
            if self.phase == RETURNING:
                self._join()
            if self.phase == CLEARED:
                raise StateError("the states are in that memory: restore() them first")
            self.per_device.trim()
            self.counters.report_host_memory(self.per_device)

    def close(self) -> None:
        """Brings back what is away, then closes all. Fails, and stays open, if that fails."""
        with self._lock:
            self._bring_back()
            self.per_device.close()
            self.counters.report_host_memory(self.per_device)

    def abandon(self) -> None:
        """No call follows: the states return now, and all is closed after the last reader."""
        self.abandoned = True
        if self._lock.is_mine:  # the controller was collected in the middle of ``_on_use``
            return
        if self.readers:
            self.bring_back()
        else:
            self.close()


class CycleCounters:
    """Counters and times of the cycles: how often they ran and failed, how long they took.

    A verb that raises counts once, also when it was called by another verb that raises the same.
    Seconds are those of ``time.perf_counter``: with PyTorch's part of a verb, which C cannot see.
    """

    def __init__(self, observers: Observers) -> None:
        self._observers = observers
        self._cycles = 0
        self._failures = 0
        self.early_returns = 0
        self._verbs = 0
        self._counted: BaseException | None = None
        self._began = self._returned = self._blocked = 0.0
        self._cycle_s = self._blocked_s = 0.0

    @contextmanager
    def verb(self) -> Iterator[None]:
        """Around a verb of the cycle: if it raises, that counts. Verbs may call each other."""
        self._verbs += 1
        try:
            yield
        except BaseException as why:
            if why is not self._counted:
                self._failures += 1
                self._counted = why
            raise
        finally:
            self._verbs -= 1
            if self._verbs == 0:
                self._counted = None  # it holds the frames that it came through

    def early(self) -> None:
        """The states come back before ``restore``, because something uses them."""
        self.early_returns += 1

    def begin(self, now: float) -> None:
        """A cycle begins."""
        self._began, self._blocked = now, 0.0

    def waited(self, since: float) -> None:
        """The caller has waited for the cycle since then."""
        self._blocked += time.perf_counter() - since

    def returns(self, now: float) -> None:
        """The restore begins."""
        self._returned = now

    def end(self, since: float, per_device: RegionsPerDevice) -> None:
        """A cycle is over; for its last verb the caller has waited since ``since``."""
        now = time.perf_counter()
        self._cycles += 1
        self._cycle_s, self._blocked_s = now - self._began, self._blocked + now - since
        self._report_restore(now, per_device)

    def fill(self, figures: abi.refit_stats) -> None:
        """Writes what was counted into the struct of all figures."""
        figures.cycles = self._cycles
        figures.cycle_failures = self._failures
        figures.cycle_seconds_last = self._cycle_s
        figures.cycle_blocked_seconds_last = self._blocked_s

    def report_host_memory(self, per_device: RegionsPerDevice) -> None:
        """Tells the timeline what the arenas take."""
        if self._observers.drawn:
            self._observers.hold(ARENA, int(per_device.stats().host_bytes))

    def _report_restore(self, now: float, per_device: RegionsPerDevice) -> None:
        """Tells the timeline how long the copies back took; on a GPU they may not be done."""
        if not self._observers.drawn or not per_device.on_device:
            return
        took = float(per_device.stats().restore_seconds_last)
        self._observers.past(COPIES, now - self._returned, took, per_device.nbytes)
