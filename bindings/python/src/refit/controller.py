"""The refit cycle as a training loop calls it.

    controller.offload()                       states leave the device, for pinned host memory
    with controller.refit(version, publisher) as tx:   the same, and the workers get new weights
        tx.send(refit.named_weights(model))
    controller.restore()                       states return during the next forward and backward
    optimizer.step()                           waits for them by itself

Which states take part in this cycle, and what steps the others, is for the ``schedule`` to say (see
``step.schedule``).

A controller owns a ``StateCycle``, which moves bytes, and hooks on the optimizers, which call it
when states are used. It is independent of how bytes move, and of what a transaction sends.
"""

import logging
import os
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, NoReturn

import torch

from refit._c.config import Config, ConfigLike, make_config
from refit._c.handle import Closing, refuse_fork
from refit._c.library import lib, log
from refit.activations.offload import ActivationOffload
from refit.errors import (
    BudgetError,
    BusyError,
    HostMemoryError,
    InvalidError,
    PinError,
    StateError,
    UnsupportedError,
)
from refit.integrations._recognized import adapted
from refit.memory_pool import MemPool
from refit.observe.observers import Observers, PhaseWatcher, TimerLike
from refit.states.checkpoint import reading
from refit.states.cycle import CLEARED, TRAINING, StateCycle
from refit.states.grads import Policy, policy_of
from refit.states.hooks import Hooks, refuse_second
from refit.states.optimizers import OptimizerAdapters
from refit.states.parked import RESIDENT, Parked, parkable
from refit.states.regions import RegionsPerDevice
from refit.states.state_source import StateSource
from refit.states.torch_memory import Devices
from refit.step.host_states import HostStateManager
from refit.step.schedule import ScheduleLike, chosen, refuse_keywords
from refit.weights.named_weights import is_sharded
from refit.weights.publisher import Publisher, Wait
from refit.weights.transaction import Transaction

_log = logging.getLogger("refit")

_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1))
REFITTED = "refitted"
CLOSED = "closed"


class Controller(Closing):
    """Moves the states of torch optimizers out of the way of a refit and back.

    ``optimizer``: one or a list; wrappers that keep theirs as ``.optimizer`` are opened, Megatron's
    with the masters that they keep (``refit.integrations.megatron``), and so is a DeepSpeed engine
    (``refit.integrations.deepspeed``). ``model`` names the states and tells which memory is not
    theirs; Megatron's is a list of chunks. ``config``: as for ``load_config``; ``overrides`` go
    over it, ``use_pinned_optimizer_offload=False`` say, and None is as if not given. ``grads``:
    what becomes of gradients that are there when states leave: "keep", "discard" or "zero", see
    ``refit.states.grads``. ``pool``: what ``refit.mem_pool`` gave; states that were born in it keep
    their addresses. ``timer``, ``timeline``, ``progress``: what is told of the phases, see
    ``refit.observe.observers``.

    ``schedule``: where states live and what steps their parameters: ``refit.Cycle()``, the default;
    ``refit.HostStates(...)``; ``refit.CpuStep(...)``; or a list of the last two. With
    ``HostStates``
    ``optimizer.state[p][name]`` is a tensor of the host between steps, to read and to write; states
    of no dimensions, and of at most 512 bytes, stay on the device. A ``state_dict`` holds the same
    tensors: a step, a load, and states that are made anew write into them, so copy what is to be
    kept. Its windows' memory is given back when a state is used, at ``offload``, and at
    ``checkpoint``; ``resident`` names what made a window grow. ``pool`` holds none of these states.
    With ``CpuStep`` the current stream waits for the new parameters when ``step()`` returns.

    ``weights="park"``: the parameters and buffers of ``model`` leave too, after the states and, in
    ``refit``, once the workers have them; they return before the states, layer by layer (see
    ``refit.park``), and ``step`` has them back. Memory of the host is taken for them as well.

    ``activations``: a ``refit.ActivationOffload`` of the same model. States and activations are
    then held against one ``offload.budget_bytes``, and ``config`` is that of the activations unless
    another one is given; ``stats`` has its figures too. Its owner closes it, before or after this.

    What reads or writes a state or a gradient while it is away brings all back first, or raises
    what ``restore`` raises; ``refit.states.offloaded_tensor`` names what is not seen. A state that
    lives on the host stays there, and what uses it waits for the copies of the last step.

    Used by one thread at a time. It holds the optimizers; it is closed by ``close`` or ``with``, or
    when no reference to it is left, and brings the states back in each case. InvalidError,
    ConfigError, BusyError (an optimizer has a controller already), TypeError (a keyword of a
    schedule); with ``HostStates`` and ``CpuStep`` also UnsupportedError, BudgetError, PinError and
    HostMemoryError.
    """

    def __init__(
        self,
        optimizer: Any,
        model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
        config: ConfigLike = None,
        *,
        schedule: ScheduleLike = None,
        activations: ActivationOffload | None = None,
        grads: Policy = "keep",
        pool: MemPool | None = None,
        weights: Literal["stay", "park"] = "stay",
        timer: TimerLike = None,
        timeline: PhaseWatcher | None = None,
        progress: bool | None = None,
        **overrides: Any,
    ) -> None:
        refuse_keywords(overrides)
        parts = chosen(schedule)
        division = parts.division()
        whole = None if model is None else _whole(model)
        adapters = OptimizerAdapters(adapted(optimizer, whole))
        optimizers = adapters.optimizers
        whole = adapters.model if whole is None else whole
        if division is not None and adapters.why_cycle_only is not None:
            raise UnsupportedError(adapters.why_cycle_only)
        policy = policy_of(grads)
        if config is None and activations is not None:
            config = activations._config
        self._config = make_config(config, {**overrides, **parts.sizes})
        observers = Observers(timer, timeline, progress)
        self._observers = observers
        source = StateSource(optimizers, whole, self._config, policy, adapters, pool)
        self._activations = None if activations is None else weakref.ref(activations)
        self._devices = _devices_of(activations, pool, self._config)
        self._cycle = StateCycle(source, self._config, policy, observers, self._devices)
        for one in optimizers:
            refuse_second(one)
        self._weights = self._weights_to_park(weights, whole)
        self._host: HostStateManager | None = None
        if division is not None:
            self._host = HostStateManager(
                optimizers,
                source.names,
                self._config,
                self._devices,
                division,
                adapters,
                prefetch=parts.host is not None and parts.host.prefetch,
                overlap=parts.cpu is None or parts.cpu.overlap,
                kernels=parts.cpu is None or parts.cpu.backend == "auto",
                allow_unverified=parts.allow_unverified,
                may_step=self._cycle.refuse_step,
                observers=observers,
                verify_steps=parts.verify_steps,
                is_auto=parts.is_auto,
            )
            source.lives_elsewhere = self._host.placement.owns
            source.masters_elsewhere = self._host.placement.owns_master
            try:
                self._host.place_states()
            except BaseException:
                self._host.abandon()
                raise
        self._hooks = Hooks(self, optimizers, adapters.before_uses)
        self._adapters = adapters
        self._refitted_as: int | None = None
        self._is_told = False
        self._publisher: weakref.ref[Publisher] | None = None
        self._is_sharded = whole is not None and is_sharded(whole)
        self._several = isinstance(optimizer, list | tuple)
        self._process = os.getpid()
        self._end = weakref.finalize(
            self, _end, self._cycle, self._hooks, self._host, self._process
        )
        self._end.atexit = False  # the process ends: no step follows

    def _weights_to_park(self, weights: str, model: torch.nn.Module | None) -> Parked | None:
        if weights == "stay":
            return None
        if weights != "park":
            raise InvalidError(f'weights={weights!r} is not "stay" or "park"')
        if model is None:
            raise InvalidError('weights="park" needs the model whose weights are to leave')
        return parkable(model, None, self._config, self._devices)

    def _open(self) -> StateCycle:
        if not self._end.alive:
            raise StateError("this Controller is closed: make another one for the optimizer")
        refuse_fork(self._process, "Controller")
        return self._cycle

    # ---- the cycle ------------------------------------------------------------------------------

    def offload(self) -> None:
        """States, and gradients by their policy, leave the device, and weights that are parked;
        their memory is given back.

        Blocks until that is done, the first time also for the page-lock of the host memory; then
        the log also says what leaves and what does not (logger "refit", INFO). States that are not
        there yet (before the first step) do not matter. A second call does nothing, or goes on with
        what failed. StateError (an open accumulation, a graph capture), BusyError (a checkpoint is
        being read), BudgetError, HostMemoryError, PinError (nothing has moved), DeadlineError,
        CopyError; after any of them training may go on.
        """
        self._offload_states()
        if self._weights is not None:
            self._weights.offload()

    def offload_before_refit(self) -> None:
        """``offload`` without the weights, which are to be read: NeMo-RL's name for it."""
        self._offload_states()

    def _offload_states(self) -> None:
        cycle = self._open()
        if cycle.phase != CLEARED:
            self._refitted_as = None
        if self._host is not None:
            self._host.place_states()
            self._host.wait()
        try:
            cycle.offload()
        except (BudgetError, HostMemoryError, PinError):
            if self._host is None or not self._host.give_way():
                raise
            cycle.offload()
        if not self._is_told and cycle.per_device.nbytes:
            self._is_told = True
            _log.info("%s", _summary(cycle.per_device, cycle.resident))

    def restore(self, non_blocking: bool = True) -> None:
        """Allocates the states' memory again and starts the copies back; of parked weights first.

        With ``non_blocking`` the next forward and backward pass run meanwhile, and ``step()``
        waits; gradients are there when this returns. False waits for all. Does nothing if they are
        there. DeviceMemoryError and CopyError: nothing is lost; free some memory and call
        again.
        """
        cycle = self._open()
        if self._weights is not None:
            self._weights.restore()
            if cycle.per_device.has_masters:
                self._weights.bring_back()
        cycle.restore()
        if not non_blocking:
            self._wait_for_weights()
            if cycle.phase != TRAINING:
                cycle.wait()

    def _wait_for_weights(self) -> None:
        if self._weights is not None and self._weights.state != RESIDENT:
            self._weights.wait()

    def wait(self) -> None:
        """Makes the current stream wait for the states, and for parked weights; ``step()`` does
        this.

        On a GPU the stream waits and the CPU goes on; on a CPU this blocks. Call it on every stream
        that uses the states. StateError before ``restore``; CorruptError: restore again.
        """
        self._open().wait()
        self._wait_for_weights()

    @contextmanager
    def refit(
        self,
        version: int | None = None,
        publisher: Any = None,
        *,
        lockstep: bool | None = None,
        group: Any = None,
        wait: Wait | None = None,
    ) -> Iterator[Transaction]:
        """Offloads, yields a ``Transaction`` to send the weights with, and commits at the end;
        weights that are to be parked leave after that.

        An exception in the block aborts the version and goes on to the caller; the states are safe
        on the host either way: ``restore`` brings them back. ``version`` None is the next number.
        ``publisher`` None publishes nothing; ``lockstep`` and ``group`` are the transaction's, for
        ranks that refit together (None: if the model that was given is sharded). ``wait``: for what
        the end of the block waits, as in ``Publisher.publish``. What ``offload``
        and the transaction raise; StateError if there is a publisher and the block sends nothing;
        InvalidError for a publisher in another's place.
        """
        if isinstance(version, Publisher):
            raise InvalidError("refit takes the version first: say refit(publisher=...)")
        if isinstance(publisher, str):
            raise InvalidError(f'publisher="{publisher}" is a text: give a refit.Publisher')
        self._publisher = weakref.ref(publisher) if isinstance(publisher, Publisher) else None
        with self._cycle.counters.verb():
            transaction = Transaction(
                publisher,
                version,
                lockstep=self._is_sharded if lockstep is None else lockstep,
                group=group,
                phases=self._observers.phase,
                wait=wait,
            )
            try:
                with transaction:
                    self._offload_states()  # in here, so that other ranks hear of it if it fails
                    yield transaction
                if self._weights is not None:
                    self._weights.offload()
            finally:
                if transaction.handed_over and self._cycle.phase == CLEARED:
                    self._refitted_as = transaction.version

    clear = offload_after_refit = offload
    """``offload``, by the names of refit 0.1's first users and of NeMo-RL; ``clear`` goes in
    0.2."""

    join = wait
    """``wait``; goes in 0.2."""

    def prepare_for_training(self) -> None:
        """``restore`` and ``wait``, as NeMo-RL calls it."""
        self.restore()
        self.wait()

    # ---- what there is to see -------------------------------------------------------------------

    @property
    def state(self) -> str:
        """ "training", "cleared", "refitted" (cleared, and the workers hold the new version; with
        ``wait="none"`` they may yet), "returning" (copies back are under way; what uses a state
        waits for them), or "closed"."""
        if not self._end.alive:
            return CLOSED
        phase = self._open().phase
        return REFITTED if phase == CLEARED and self._refitted_as is not None else phase

    @property
    def resident(self) -> list[tuple[str, str]]:
        """Tensors that are not moved, by name, and why; as of the last ``offload``.

        A state of the host that ``torch.load`` gave, or that ``.numpy()`` was called on, gets other
        memory at an ``offload``, and then leaves; an array that owned its memory (``from_numpy``)
        keeps the old bytes. While an array or a view of it is held, it stays.
        """
        place = None if self._host is None else self._host.placement
        host = [] if place is None else [*place.resident, *place.grown]
        weights = [] if self._weights is None else self._weights.stays
        return [*self._open().resident, *self._adapters.resident(), *host, *weights]

    @property
    def accumulating(self) -> bool:
        """Whether gradients hold what no step has used; found by itself, or set by hand.

        Also of gradients that are away. While it is True, ``offload`` refuses to discard or zero
        them. What was set holds until the next step. May wait for the device.
        """
        return self._open().is_accumulating

    @accumulating.setter
    def accumulating(self, is_open: bool) -> None:
        self._open().accumulation.set_by_user = bool(is_open)

    def stats(self) -> dict[str, float]:
        """A flat dict of floats, keys ``refit/...``, for any logger. Does not block, unless another
        thread is in a call of the activations' offload.

        With the figures of the publisher that the last ``refit`` was given, until it is closed.
        Each key with its unit and meaning is in docs/statistics.md.
        """
        publisher = self._publisher() if self._publisher is not None else None
        others = [] if self._host is None else self._host.placement.sources
        if publisher is not None and not publisher.closed:
            others = [*others, (lib.refit_publisher_stats, publisher._live)]
        figures = self._open().stats(*others)
        if self._host is not None:
            figures["refit/resident_bytes"] = float(self._host.placement.resident_bytes)
        if self._weights is not None:
            figures["refit/parked_bytes"] = float(self._weights.nbytes)
        activations = self._activations() if self._activations is not None else None
        return figures if activations is None else {**figures, **activations.stats()}

    def checkpoint(self) -> AbstractContextManager[Any]:
        """A block in which a state_dict can be read, wherever the states are, and stays whole.

        Gives what ``optimizer.state_dict()`` gives, or a list of these if the controller was given
        a list. While states are away its tensors are read-only CPU views of the host image, empty
        after the block (what was made of them, a slice, is not, and must not be read then, for its
        memory may be gone): write them out, or copy them, within. ``offload`` is refused meanwhile
        (BusyError), so keep the block open until an asynchronous save has read all; a ``step()``
        in it changes what is on the device.
        """
        cycle = self._open()
        if self._host is not None:
            self._host.place_states()
        return _checkpoint(cycle, self._several)

    def resume_step(self) -> None:
        """Finishes an ``optimizer.step()`` that an error broke off: the parameters that it did not
        reach are stepped, once, with their gradients as they are now.

        For ``refit.HostStates``; the error's ``stepped`` names the parameters that were stepped.
        Until then ``step()`` raises a StateError. Does nothing if no step was broken off. What
        ``step()`` raises: call again then.
        """
        self._open()
        if self._host is not None:
            self._host.resume()

    def release(self) -> None:
        """Gives the pinned host memory back, while states are on the device; the next
        ``offload`` takes it again. StateError while they are away. Blocks for the system."""
        self._open().trim()
        if self._weights is not None:
            self._weights.release()

    # ---- what the hooks call --------------------------------------------------------------------

    def _before_step(self) -> None:
        if self._end.alive:
            if self._weights is not None:
                self._weights.bring_back()
            self._open().bring_back()

    def _before_use(self) -> None:
        if self._end.alive:
            self._open().bring_back()
            if self._host is not None:
                self._host.wait()

    def _before_load(self) -> None:
        self._before_use()  # what is loaded may lie in the storages that are away
        self._cycle.invalidate()

    def _after_step(self) -> None:
        self._cycle.accumulation.step_done()

    # ---- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        """Brings the states back, waits for them, takes the hooks away and frees the host memory.

        A second call does nothing. BusyError while a checkpoint is open; DeviceMemoryError and
        others: it stays open, call again.
        """
        if not self._end.alive or self._process != os.getpid():
            return
        if self._cycle.readers:
            raise BusyError("a checkpoint() is open: leave its block first")
        if self._host is not None:
            self._host.close()
        if self._weights is not None:
            self._weights.close()
        self._cycle.close()
        self._hooks.remove()
        self._end.detach()

    def __repr__(self) -> str:
        if not self._end.alive or self._process != os.getpid():
            return "Controller(closed)" if not self._end.alive else "Controller(of another process)"
        per_device = self._cycle.per_device
        tensors = sum(len(regions.specs) for regions in per_device)
        host = "" if self._host is None else f", host_bytes={self._host.placement.nbytes}"
        return f"Controller({self.state}, tensors={tensors}, bytes={per_device.nbytes}{host})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Controller cannot be pickled: it owns host memory, threads and hooks of this "
            "process. Make one where the optimizer is."
        )


@contextmanager
def _checkpoint(cycle: StateCycle, several: bool) -> Iterator[Any]:
    with reading(cycle) as state_dicts:
        yield state_dicts if several else state_dicts[0]


def _end(cycle: StateCycle, hooks: Hooks, host: HostStateManager | None, process: int) -> None:
    """No reference to the controller is left: the states are brought back, not lost with it."""
    if process == os.getpid():
        with log.quiet():
            hooks.remove()
            try:
                if host is not None:
                    host.abandon()
            finally:
                cycle.abandon()


def _summary(per_device: RegionsPerDevice, stays: Sequence[tuple[str, str]]) -> str:
    """What leaves, how much that is, and what does not and why: for the log."""
    group = torch.distributed
    ranked = group.is_available() and group.is_initialized()
    whose = f"[rank {group.get_rank()}] " if ranked else ""
    count = sum(len(regions.specs) for regions in per_device)
    reasons = Counter(reason for _, reason in stays)
    first = {reason: name for name, reason in reversed(stays)}
    kept = [f"{number} ({first[reason]}: {reason})" for reason, number in reasons.most_common(4)]
    more = f" and others for {len(reasons) - 4} more reasons" if len(reasons) > 4 else ""
    rest = f"; these stay: {', '.join(kept)}{more}" if kept else ", and nothing stays"
    unit, size = next(one for one in _UNITS if per_device.nbytes >= one[1])
    return f"{whose}{per_device.nbytes / size:.1f} {unit} leave, {count} tensors{rest}"


def _devices_of(
    activations: ActivationOffload | None, pool: MemPool | None, config: Config
) -> Devices:
    """The handles that states use, which are those of the activations and of the pool."""
    known = {} if pool is None else {pool.device: pool.handle}
    if activations is None:
        return Devices(config, known)
    if not isinstance(activations, ActivationOffload):
        raise InvalidError(
            f"activations is a {type(activations).__name__}: give a refit.ActivationOffload"
        )
    devices = activations._devices
    for device, handle in known.items():
        if devices[device] is not handle:
            raise InvalidError(
                "pool: give it to the ActivationOffload as well, for the states in it and the "
                "activations are held against one offload.budget_bytes"
            )
    return devices


def _whole(model: torch.nn.Module | Sequence[torch.nn.Module]) -> torch.nn.Module:
    """The model as one module. InvalidError for what is none."""
    chunks: list[Any] = list(model) if isinstance(model, list | tuple) else [model]
    if not chunks or not all(isinstance(one, torch.nn.Module) for one in chunks):
        raise InvalidError(
            f"model is a {type(model).__name__}: give a torch.nn.Module, or a list of them"
        )
    whole: torch.nn.Module = chunks[0] if len(chunks) == 1 else torch.nn.ModuleList(chunks)
    return whole
