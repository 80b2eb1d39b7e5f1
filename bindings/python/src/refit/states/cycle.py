"""States leave and return, whatever happens in between: the part of a controller that moves.

    training ──offload──► cleared ──restore──► returning ──wait──► training

A phase changes only when its work is done on every device; each device knows by itself how far it
is (see ``regions``). So after an exception, Ctrl-C too, the same verb goes on, and
``restore`` brings back what has left from wherever it is.

Code that a thread runs in the middle of a verb of its own, as a signal handler does, cannot move or
use the states: it gets a BusyError. If the handler lets it pass, it ends the verb as Ctrl-C does.
Other threads wait. Methods with an underscore are called with the call lock held.

``refit_controller`` (refit/controller.h) is the cycle of C callers. This one calls the offloaders
itself, for three reasons. PyTorch frees and takes memory between two calls of an offloader, on the
thread whose streams PyTorch uses. An exception may end a verb between any two lines. And a tensor
counts as away before its first copy starts: a phase here says what a use of a tensor does first,
and a state in C what the offloaders have done.

``Inventory`` says what there is, ``RegionsPerDevice`` where it is, ``Figures`` how it went.
Independent of hooks, publishers and options of the user.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch

from refit._c import abi
from refit._c.call_lock import WaitingCallLock
from refit._c.config import Config
from refit._c.stats import flatten
from refit.errors import BusyError, NotFoundError, StateError
from refit.observe.observers import COPIES, Observers
from refit.states.checkpoint import Image
from refit.states.grads import Accumulation, Policy
from refit.states.inventory import Inventory
from refit.states.offloaded_tensor import OffloadedTensor, OffloadedTensors, untouched
from refit.states.offloader import KEEP, ZERO
from refit.states.regions import RegionsPerDevice
from refit.states.storages import GRADS, SCRATCH, STATES, OffloadPlan, StateInventory, is_emptied
from refit.states.torch_memory import Devices, refuse_capture

TRAINING = "training"
CLEARED = "cleared"
RETURNING = "returning"

EARLY = (GRADS, SCRATCH)
"""What is there when ``restore`` returns."""

ARENA = "refit's arena"
"""The name of its memory in pictures."""


class Figures:
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
        self._tell_restore(now, per_device)

    def fill(self, figures: abi.refit_stats) -> None:
        """Writes what was counted into the struct of all figures."""
        figures.cycles = self._cycles
        figures.cycle_failures = self._failures
        figures.cycle_seconds_last = self._cycle_s
        figures.cycle_blocked_seconds_last = self._blocked_s

    def tell_host_memory(self, per_device: RegionsPerDevice) -> None:
        """Tells the timeline what the arenas take."""
        if self._observers.drawn:
            self._observers.hold(ARENA, int(per_device.stats().host_bytes))

    def _tell_restore(self, now: float, per_device: RegionsPerDevice) -> None:
        """Tells the timeline how long the copies back took; on a GPU they may not be done."""
        if not self._observers.drawn or not per_device.on_device:
            return
        took = float(per_device.stats().restore_seconds_last)
        self._observers.past(COPIES, now - self._returned, took, per_device.nbytes)


class Cycle:
    """The states of some optimizers, on all their devices. Used by one thread at a time."""

    def __init__(
        self,
        inventory: Inventory,
        config: Config,
        grads: Policy,
        observers: Observers,
        devices: Devices,
    ) -> None:
        self.figures = Figures(observers)
        self.accumulation = Accumulation(self._gradients, self._holds)
        self.phase = TRAINING
        self.readers: set[object] = set()
        self.abandoned = False
        self.resident: list[tuple[str, str]] = []
        self._inventory = inventory
        self._grads = grads
        self._observers = observers
        self._moving = WaitingCallLock("controller")
        bring_all = cast(Any, torch.compiler).disable(self._bring_all)  # it is not part of a graph
        self._offloaded = OffloadedTensors(bring_all, self._moving, zeroable=GRADS)
        self.per_device = RegionsPerDevice(config, devices)
        self._stock: StateInventory | None = None
        self._scan: OffloadPlan | None = None
        self._grads_lost = False
        self._identities: list[int] = []
        self._addresses: list[int] = []

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those whose states these are."""
        return self._inventory.optimizers

    @property
    def is_cleared(self) -> bool:
        """Whether states are away, or may be: ``restore`` has something to do."""
        return self.phase == CLEARED

    @property
    def shows_image(self) -> bool:
        """Whether all states are in the cycle's own image while they are away."""
        return self._inventory.lives_elsewhere is None

    def _gradients(self) -> list[tuple[int, torch.Tensor]]:
        """Every gradient that there is, away or not, and what tells its owner from others."""
        grads = [(id(p), p.grad) for p in self._inventory.parameters()]
        return [(owner, grad) for owner, grad in grads if grad is not None]

    def _holds(self, grad: torch.Tensor) -> bool:
        """Whether a gradient is not all zeros, wherever its bytes are."""
        if self.phase == CLEARED:
            with self._moving:
                self._wait()  # copies may be under way, after Ctrl-C
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

    # ---- offload --------------------------------------------------------------------------------

    def offload(self) -> None:
        """States, and gradients by their policy, leave; returns when their memory is free."""
        with self._moving, self.figures.verb():
            began = time.perf_counter()
            if self.phase == CLEARED and self._stock is None:
                self._restore()  # copies back had failed: gradients are in use, storages let go of
            if self.phase == RETURNING:
                self._join()
            if self.phase == TRAINING:
                self.figures.begin(began)
                self._refuse_clear()
                self._refresh()
                self._grads_lost = False
                self.figures.tell_host_memory(self.per_device)
            else:
                self._refuse_moved()
            try:
                with self._told("offload", self.per_device.nbytes):
                    if self.phase == RETURNING:
                        self._join()
                    if self.phase == TRAINING and not self.per_device.held:
                        self._refresh()
                    self._leave()
            finally:
                self.figures.waited(began)

    @contextmanager
    def _told(self, phase: str, nbytes: int = 0) -> Iterator[None]:
        """Observers are told of a phase. They may use the states, as nothing is half done then; so
        the block looks again at where the states are."""
        with ExitStack() as stack:
            stack.enter_context(self._moving.letting_in(True))
            stack.enter_context(self._observers.phase(phase, nbytes))
            stack.enter_context(self._moving.letting_in(False))
            yield

    @property
    def is_accumulating(self) -> bool:
        """Whether gradients hold what no step has used, those in memory of a framework's own
        too."""
        said = self.accumulation.said is not None
        return self.accumulation.open or (not said and self._inventory.is_accumulating())

    def _refuse_clear(self) -> None:
        if self.readers:
            raise BusyError(
                "a checkpoint() is open and reads the states where they are: leave its block first"
            )
        if self._grads != "keep" and self.is_accumulating:
            raise StateError(
                f"a gradient accumulation is open, and grads={self._grads!r} would lose it: step "
                'first, use grads="keep", or set accumulating = False if it is to be lost'
            )
        for device in {p.device for p in self._inventory.parameters()}:
            refuse_capture(device)

    def _leave(self) -> None:
        self.phase = CLEARED  # from here on restore() settles what was begun
        try:
            self._guard()  # first: what is leaving must not be written to
            for regions in self.per_device:
                regions.leave()
            for regions in self.per_device:
                regions.free()
        except BaseException:
            if self.per_device.on_device:
                self._offloaded.lift(STATES, *EARLY)
                self.phase = TRAINING
            raise
        self._lose_grads()

    def _guard(self) -> None:
        """From now on a use of a tensor whose memory is about to go brings it back."""
        stock, decided = self._stock, self._scan
        if stock is None or decided is None:
            return
        for group, numbers in decided.by_group.items():
            tensors = [stock.tensors[number] for number in numbers]
            self._offloaded.put(group, tensors + stock.wrappers if group == STATES else tensors)
            grads = [number for number in numbers if number >= stock.states]
            self._offloaded.watch(group, [stock.owners[number] for number in grads])

    def _lose_grads(self) -> None:
        """By agreement; once, and only when all that was to leave has left."""
        if self._grads == "keep" or self._grads_lost:
            return
        for parameter in self._inventory.parameters():
            if self._grads == "discard":
                parameter.grad = None
            elif parameter.grad is not None and not isinstance(parameter.grad, OffloadedTensor):
                parameter.grad.zero_()
        self._grads_lost = True

    # ---- what there is --------------------------------------------------------------------------

    def _refresh(self) -> None:
        """Looks again at what the optimizers hold, and makes a new plan if it has changed."""
        self._wait()
        stock = self._inventory.take()
        identities = stock.identities()
        if not self._holds_for(stock, identities):
            found = self._inventory.decide(stock)
            self._scan, self.resident = None, found.resident
            grads = KEEP if self._grads == "keep" else ZERO
            policies = {STATES: KEEP, GRADS: grads, SCRATCH: ZERO}
            self.per_device.plan(found, stock, policies)
            self._scan, self._identities = found, identities
            self._addresses = stock.addresses(found.others)
        self._stock = stock

    def _holds_for(self, stock: StateInventory, identities: list[int]) -> bool:
        """Whether what was decided is right for a stock (see ``storages``); then its storages are
        held."""
        known = self._scan
        if known is None or known.passing or not self.per_device.on_device:
            return False
        if identities != self._identities or stock.addresses(known.others) != self._addresses:
            return False
        return self.per_device.hold(known, stock)

    def _refuse_moved(self) -> None:
        """An offload that failed goes on: what is still here leaves from where it was."""
        if self._scan and self._stock and not self.per_device.hold(self._scan, self._stock):
            raise StateError(
                "a state's memory was resized or replaced after an offload() had begun and failed: "
                "call restore(), then offload()"
            )

    def _wait(self) -> None:
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
        with self._moving:
            self._restore()

    def _restore(self) -> None:
        if self.phase != CLEARED:  # another thread did it meanwhile
            return
        began = time.perf_counter()
        self.figures.returns(began)
        with self.figures.verb():
            try:
                with self._told("restore", self.per_device.nbytes):
                    if self.phase == CLEARED:
                        self._come_back()
            finally:
                self.figures.waited(began)

    def _come_back(self) -> None:
        for regions in self.per_device:
            refuse_capture(regions.device)
            regions.come_back()
        for regions in self.per_device:
            for group in EARLY:  # a backward pass writes to them, long before the step
                regions.join(group)
        self._offloaded.lift(*EARLY)
        for regions in self.per_device:
            regions.are_there(EARLY)
        if self._stock is not None and self._scan is not None and self._scan.others_move:
            self._addresses = self._stock.addresses(self._scan.others)
        self._stock = None
        self.phase = RETURNING

    def wait(self) -> None:
        """Makes the current stream wait until all bytes are back; on a CPU the caller waits.

        StateError while they are away: restore first.
        """
        with self._moving:
            self._join()

    def _join(self) -> None:
        began = time.perf_counter()
        with self.figures.verb():
            self._refuse_join()
            with self._told("wait"):
                self._refuse_join()
                self._join_devices()
                self._offloaded.lift(*EARLY, STATES)
                joined, self.phase = self.phase, TRAINING
            if joined == RETURNING:
                self.figures.end(began, self.per_device)

    def _refuse_join(self) -> None:
        if self.phase == CLEARED:
            raise StateError("the states are away: restore() brings them back, then wait()")
        if self.phase == RETURNING:
            for regions in self.per_device:
                refuse_capture(regions.device)  # it would wait for what is outside of the graph

    def _join_devices(self) -> None:
        try:
            for regions in self.per_device:
                regions.join()
        except BaseException:
            if not self.per_device.back:
                self.phase = CLEARED  # copies failed: restore() moves what is still on the host
            raise

    def bring_back(self) -> None:
        """Restore and join, from wherever things are. Any thread: a backward pass has one a GPU."""
        with self._moving:
            self._count_early()
            self._bring_back()

    def _count_early(self) -> None:
        if self.phase == CLEARED:
            self.figures.early()

    def _bring_back(self) -> None:
        self._restore()
        if self.phase == RETURNING:
            self._join()
        for regions in self.per_device:
            regions.forget()

    def _bring_all(self) -> None:
        """As ``bring_back``, for a tensor that is used while it is away, on any stream: no copy is
        under way when this returns."""
        with self._moving:
            self._count_early()
            self._restore()
            if self.phase == RETURNING:
                self._wait()
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
        for device in {p.device for p in self._inventory.parameters()}:
            refuse_capture(device)

    def invalidate(self) -> None:
        """Nothing that was decided holds any longer."""
        self._scan = None

    def begin_reading(self, reader: object) -> None:
        """No copy is under way when this returns, and no ``offload`` begins until the reader has
        left
        ``readers``."""
        with self._moving:
            if self.phase == RETURNING:
                self._join()
            self._wait()
            self.readers.add(reader)

    # ---- the rest -------------------------------------------------------------------------------

    def stats(self, *others: tuple[Callable[..., int], int]) -> dict[str, float]:
        """The figures of all devices, and of ``others`` (see ``gather``), as one flat dict."""
        figures = self.per_device.stats(*others)
        self.figures.fill(figures)
        figures.offload_reclaimed_bytes_last = sum(regions.reclaimed for regions in self.per_device)
        return flatten(figures, {"early_returns": self.figures.early_returns})

    def trim(self) -> None:
        """Gives the host memory back. StateError while states are away."""
        with self._moving:
            if self.phase == RETURNING:
                self._join()
            if self.phase == CLEARED:
                raise StateError("the states are in that memory: restore() them first")
            self.per_device.trim()
            self.figures.tell_host_memory(self.per_device)

    def close(self) -> None:
        """Brings back what is away, then closes all. Fails, and stays open, if that fails."""
        with self._moving:
            self._bring_back()
            self.per_device.close()
            self.figures.tell_host_memory(self.per_device)

    def abandon(self) -> None:
        """No call follows: the states return now, and all is closed after the last
        reader."""
        self.abandoned = True
        if self._moving.is_mine:  # the controller was collected in the middle of ``_bring_all``
            return
        if self.readers:
            self.bring_back()
        else:
            self.close()
