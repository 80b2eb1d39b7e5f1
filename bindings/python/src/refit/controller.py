"""The refit cycle as a training loop calls it.

    controller.clear()                         states off the device, in pinned host memory
    with controller.refit(version, publisher) as tx:   the same, and the workers get new weights
        tx.send(refit.named_weights(model))
    controller.restore()                       states come back behind the next forward, backward
    optimizer.step()                           waits for them by itself

With ``states="host"`` there is a second schedule: states live on the host, and visit the device in
windows while ``optimizer.step()`` runs (see ``host_states``). With ``host_fraction`` a third: a
share of the parameters is stepped on the CPU (see ``step.cpu_step``).

A controller owns a ``Cycle``, which moves bytes, and hooks on the optimizers, which call it when
states are used. How bytes move is unknown here; so is what a transaction sends.
"""

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, NoReturn

import torch

from refit._c.closing import Closing
from refit._c.config import ConfigLike, bytes_of, make_config
from refit._c.handle import refuse_fork
from refit._c.library import lib, log
from refit.errors import BusyError, InvalidError, StateError, UnsupportedError
from refit.integrations._recognized import opened
from refit.memory_pool import MemPool
from refit.observe.observers import Observers, PhaseWatcher, TimerLike
from refit.states.checkpoint import reading
from refit.states.cycle import CLEARED, TRAINING, Cycle
from refit.states.device_states import Devices
from refit.states.grads import Policy, policy_of
from refit.states.hooks import Hooks, refuse_second
from refit.states.inventory import Holdings, Inventory
from refit.step.division import Division, Pick
from refit.step.host_states import HostStates
from refit.weights.named_weights import is_sharded
from refit.weights.publisher import Publisher
from refit.weights.transaction import Transaction

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

    ``states="host"``: states live on the host, and visit the device in ``windows`` (1 to 4) of
    ``window_bytes`` while ``optimizer.step()`` runs; both may also come from the configuration. The
    device memory is these windows, also in the first step, and goes back when a state is used, at
    ``clear``, and at ``checkpoint``. Between steps ``optimizer.state[p][name]`` is a tensor of the
    host, to read and to write; states of no dimensions, and of at most 512 bytes, stay on the
    device. A ``state_dict`` holds the same tensors: a step, a load, and states that are made anew
    write into them, so copy what is to be kept. ``prefetch``: the first windows come in behind the
    backward pass, if there is memory (not with FSDP2). ``resident_bytes`` (a number, or "2GiB") or
    ``host_fraction`` (0 to 1): the first parameters' states stay on the device, and leave and
    return with the cycle. Parameters whose states are larger than a window are stepped part by part
    where PyTorch's arithmetic is element by element; else the window grows, and ``resident`` says
    so. An optimizer is tried on a twin with two tiny parameters: one whose update of a parameter
    reads another is refused, unless ``any_optimizer=True``; then each window is a step of its own
    for it. ``verify_steps``: so many first steps are made on copies as well, of all parameters at
    once, and UnsupportedError names what has other bits: for an optimizer that nobody has tried,
    once; it takes the memory of parameters, gradients and states on the device again. ``pool``
    holds none of these states.

    ``host_fraction`` (0 to 1) without ``states="host"``: parameters with so large a share of the
    states' bytes are stepped on the CPU, where their states live; the others take part in the
    cycle. With ``states="host"`` this share is ``cpu_fraction``, of the bytes of all states.
    ``host_pick`` says which parameters these are: "late": the last ones of the model, whose
    gradients are final first; "largest"; or a list of names, with ``*`` and ``?``, then of all that
    match if no share is given. ``overlap``: their gradients leave during the backward pass, from
    the second step on, in a process that trains alone; otherwise at ``step()``. Adam, AdamW,
    Adagrad and SGD of ``torch.optim`` on fp32 parameters are stepped by kernels of the C library,
    by ``offload.host_step_threads``, with the bits of PyTorch's for-loop on the CPU; all others,
    and on a CPU those with ``fused=True``, by PyTorch's own code on tensors of the host; with
    ``host_step="torch"`` all are. When
    ``step()`` returns, the current stream waits for the new parameters.

    What reads or writes a state or a gradient while it is away brings all back first, or raises
    what ``restore`` raises; ``refit.states.offloaded_tensor`` names what is not seen. A state that
    lives on the host stays there, and what uses it waits for the copies of the last step.

    Used by one thread at a time. It holds the optimizers; it is closed by ``close`` or ``with``, or
    when no reference to it is left, and brings the states back in each case. InvalidError,
    ConfigError, BusyError (an optimizer has a controller already); with ``states="host"`` also
    UnsupportedError, BudgetError, PinError and HostMemoryError.
    """

    def __init__(
        self,
        optimizer: Any,
        model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
        config: ConfigLike = None,
        *,
        grads: Policy = "keep",
        pool: MemPool | None = None,
        timer: TimerLike = None,
        timeline: PhaseWatcher | None = None,
        progress: bool | None = None,
        states: Literal["cycle", "host"] = "cycle",
        window_bytes: int | str | None = None,
        windows: int | None = None,
        prefetch: bool = True,
        resident_bytes: int | str | None = None,
        host_fraction: float | None = None,
        cpu_fraction: float | None = None,
        host_pick: Pick = "late",
        overlap: bool = True,
        host_step: Literal["auto", "torch"] = "auto",
        any_optimizer: bool = False,
        verify_steps: int = 0,
        **overrides: Any,
    ) -> None:
        division = division_of(
            states=states,
            resident_bytes=resident_bytes,
            host_fraction=host_fraction,
            cpu_fraction=cpu_fraction,
            host_pick=host_pick,
            host_step=host_step,
            any_optimizer=any_optimizer,
            verify_steps=verify_steps,
        )
        whole = None if model is None else _whole(model)
        holdings = Holdings(opened(optimizer, whole))
        optimizers = holdings.optimizers
        whole = holdings.model if whole is None else whole
        if division is not None and holdings.why_cycle_only is not None:
            raise UnsupportedError(holdings.why_cycle_only)
        policy = policy_of(grads)
        sizes = {"offload_window_bytes": window_bytes, "offload_windows": windows}
        self._config = make_config(config, {**overrides, **_given(sizes)})
        observers = Observers(timer, timeline, progress)
        self._observers = observers
        inventory = Inventory(optimizers, whole, self._config, policy, holdings, pool)
        known = {} if pool is None else {pool.device: pool.handle}
        self._devices = Devices(self._config, known)
        self._cycle = Cycle(inventory, self._config, policy, observers, self._devices)
        for one in optimizers:
            refuse_second(one)
        self._host: HostStates | None = None
        if division is not None:
            self._host = HostStates(
                optimizers,
                inventory.names,
                self._config,
                self._devices,
                division,
                prefetch=prefetch and states == "host",
                overlap=overlap,
                kernels=host_step == "auto",
                any_optimizer=any_optimizer,
                may_step=self._cycle.refuse_step,
                observers=observers,
                framework=holdings,
                verify_steps=verify_steps,
            )
            inventory.lives_elsewhere = self._host.owns
            inventory.masters_elsewhere = self._host.owns_master
            try:
                self._host.settle_in()
            except BaseException:
                self._host.abandon()
                raise
        self._hooks = Hooks(self, optimizers, holdings.before_uses)
        self._holdings = holdings
        self._refitted_as: int | None = None
        self._publisher: weakref.ref[Publisher] | None = None
        self._is_sharded = whole is not None and is_sharded(whole)
        self._several = isinstance(optimizer, list | tuple)
        self._process = os.getpid()
        self._end = weakref.finalize(
            self, _end, self._cycle, self._hooks, self._host, self._process
        )
        self._end.atexit = False  # the process ends: no step follows

    def _open(self) -> Cycle:
        if not self._end.alive:
            raise StateError("this Controller is closed: make another one for the optimizer")
        refuse_fork(self._process, "Controller")
        return self._cycle

    # ---- the cycle ------------------------------------------------------------------------------

    def clear(self) -> None:
        """States, and gradients by their policy, leave the device; their memory is given back.

        Blocks until that is done, the first time also for the page-lock of the host memory. States
        that are not there yet (before the first step) are no matter. A second call does nothing,
        or goes on with what failed. StateError (an open accumulation, a graph capture), BusyError
        (a checkpoint is being read), BudgetError, HostMemoryError, PinError (nothing has moved),
        DeadlineError, CopyError; after any of them training may go on.
        """
        cycle = self._open()
        if cycle.phase != CLEARED:
            self._refitted_as = None
        if self._host is not None:
            self._host.settle_in()
            self._host.settle()
        cycle.clear()

    def restore(self, non_blocking: bool = True) -> None:
        """Allocates the states' memory again and starts the copies back.

        With ``non_blocking`` the next forward and backward pass run meanwhile, and ``step()``
        waits; gradients are there when this returns. False waits for all. Does nothing if they are
        there. DeviceMemoryError and CopyError: nothing is lost; free some memory and call
        again.
        """
        cycle = self._open()
        cycle.restore()
        if not non_blocking and cycle.phase != TRAINING:
            cycle.join()

    def join(self) -> None:
        """Makes the current stream wait for the states; ``step()`` does this.

        On a GPU the stream waits and the CPU goes on; on a CPU this blocks. Call it on every stream
        that uses the states. StateError before ``restore``; CorruptError: restore again.
        """
        self._open().join()

    @contextmanager
    def refit(
        self,
        version: int | None = None,
        publisher: Any = None,
        *,
        lockstep: bool | None = None,
        group: Any = None,
    ) -> Iterator[Transaction]:
        """Clears, yields a ``Transaction`` to send the weights with, and commits at the end.

        An exception in the block aborts the version and goes on to the caller; the states are safe
        on the host either way: ``restore`` brings them back. ``version`` None is the next number.
        ``publisher`` None publishes nothing; ``lockstep`` and ``group`` are the transaction's, for
        ranks that refit together (None: if the model that was given is sharded). What ``clear`` and
        the transaction raise; StateError if there is a publisher and the block sends nothing;
        InvalidError for a publisher in another's place.
        """
        if isinstance(version, Publisher):
            raise InvalidError("refit takes the version first: say refit(publisher=...)")
        if isinstance(publisher, str):
            raise InvalidError(f'publisher="{publisher}" is a text: give a refit.Publisher')
        self._publisher = weakref.ref(publisher) if isinstance(publisher, Publisher) else None
        with self._cycle.figures.verb():
            transaction = Transaction(
                publisher,
                version,
                lockstep=self._is_sharded if lockstep is None else lockstep,
                group=group,
                phases=self._observers.phase,
            )
            try:
                with transaction:
                    self.clear()  # in here, so that other ranks hear of it if it fails
                    yield transaction
            finally:
                if transaction.committed and self._cycle.phase == CLEARED:
                    self._refitted_as = transaction.version

    def offload(self) -> None:
        """``clear``, as others call it."""
        self.clear()

    def offload_before_refit(self) -> None:
        """``clear``, as NeMo-RL calls it."""
        self.clear()

    def offload_after_refit(self) -> None:
        """``clear``, as NeMo-RL calls it once more after the refit: does nothing then."""
        self.clear()

    def prepare_for_training(self) -> None:
        """``restore`` and ``join``."""
        self.restore()
        self.join()

    # ---- what there is to see -------------------------------------------------------------------

    @property
    def state(self) -> str:
        """ "training", "cleared", "refitted" (cleared, and the workers hold the new version) or
        "returning" (copies back are under way; what uses a state waits for them), or "closed"."""
        if not self._end.alive:
            return CLOSED
        phase = self._open().phase
        return REFITTED if phase == CLEARED and self._refitted_as is not None else phase

    @property
    def resident(self) -> list[tuple[str, str]]:
        """Tensors that are not moved, by name, and why; as of the last ``clear``.

        A state of the host that ``torch.load`` gave, or that ``.numpy()`` was called on, gets other
        memory at a ``clear``, and then leaves; an array that owned its memory (``from_numpy``)
        keeps the old bytes. While an array or a view of it is held, it stays.
        """
        host = [] if self._host is None else [*self._host.resident, *self._host.grown]
        return [*self._open().resident, *self._holdings.resident(), *host]

    @property
    def accumulating(self) -> bool:
        """Whether gradients hold what no step has used; found by itself, or set by hand.

        Also of gradients that are away. While it is True, ``clear`` refuses to discard or zero
        them. What was set holds until the next step. May wait for the device.
        """
        return self._open().is_accumulating

    @accumulating.setter
    def accumulating(self, is_open: bool) -> None:
        self._open().accumulation.said = bool(is_open)

    def stats(self) -> dict[str, float]:
        """A flat dict of floats, keys ``refit/...``, for any logger. Does not block.

        With the figures of the publisher that the last ``refit`` was given, until it is closed.
        Each key with its unit and meaning is in docs/python.md, under Statistics.
        """
        publisher = self._publisher() if self._publisher is not None else None
        others = [] if self._host is None else self._host.sources
        if publisher is not None and not publisher.closed:
            others = [*others, (lib.refit_publisher_stats, publisher._live)]
        return self._open().stats(*others)

    def checkpoint(self) -> AbstractContextManager[Any]:
        """A block in which a state_dict can be read, wherever the states are, and stays whole.

        Gives what ``optimizer.state_dict()`` gives, or a list of these if the controller was given
        a list. While states are away its tensors are read-only CPU views of the host image, empty
        after the block (what was made of them, a slice, is not, and must not be read then, for its
        memory may be gone): write them out, or copy them, within. ``clear`` is refused meanwhile
        (BusyError), so keep the block open until an asynchronous save has read all; a ``step()``
        in it changes what is on the device.
        """
        cycle = self._open()
        if self._host is not None:
            self._host.settle_in()
        return _checkpoint(cycle, self._several)

    def resume_step(self) -> None:
        """Finishes an ``optimizer.step()`` that an error broke off: the parameters that it did not
        reach are stepped, once, with their gradients as they are now.

        For ``states="host"``; the error's ``stepped`` names the parameters that were stepped. Until
        then ``step()`` raises a StateError. Does nothing if no step was broken off. What ``step()``
        raises: call again then.
        """
        self._open()
        if self._host is not None:
            self._host.resume()

    def release(self) -> None:
        """Gives the pinned host memory back, while states are on the device; the next ``clear``
        takes it again. StateError while they are away. Blocks for the system."""
        self._open().trim()

    # ---- what the hooks call --------------------------------------------------------------------

    def _before_step(self) -> None:
        if self._end.alive:
            self._open().bring_back()

    def _before_use(self) -> None:
        if self._end.alive:
            self._open().bring_back()
            if self._host is not None:
                self._host.settle()

    def _before_load(self) -> None:
        self._before_use()  # what is loaded may lie in the storages that are away
        self._cycle.look_again()

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
        self._cycle.close()
        self._hooks.remove()
        self._end.detach()

    def __repr__(self) -> str:
        if not self._end.alive or self._process != os.getpid():
            return "Controller(closed)" if not self._end.alive else "Controller(of another process)"
        per_device = self._cycle.per_device
        tensors = sum(len(regions.slots) for regions in per_device)
        host = "" if self._host is None else f", host_bytes={self._host.nbytes}"
        return f"Controller({self.state}, tensors={tensors}, bytes={per_device.nbytes}{host})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Controller cannot be pickled: it owns host memory, threads and hooks of this "
            "process. Make one where the optimizer is."
        )


@contextmanager
def _checkpoint(cycle: Cycle, several: bool) -> Iterator[Any]:
    with reading(cycle) as state_dicts:
        yield state_dicts if several else state_dicts[0]


def _end(cycle: Cycle, hooks: Hooks, host: HostStates | None, process: int) -> None:
    """No reference to the controller is left: the states are brought back, not lost with it."""
    if process == os.getpid():
        with log.quiet():
            hooks.remove()
            try:
                if host is not None:
                    host.abandon()
            finally:
                cycle.abandon()


def division_of(
    *,
    states: str = "cycle",
    resident_bytes: int | str | None = None,
    host_fraction: float | None = None,
    cpu_fraction: float | None = None,
    host_pick: Pick = "late",
    host_step: str = "auto",
    any_optimizer: bool = False,
    verify_steps: int = 0,
) -> Division | None:
    """Where states live that a cycle does not move; None: it moves all. InvalidError for keywords
    that cannot be, or not together."""
    if states not in ("cycle", "host"):
        raise InvalidError(f"states={states!r}: say cycle or host")
    if host_step not in ("auto", "torch"):
        raise InvalidError(f"host_step={host_step!r}: say auto or torch")
    division = _shares(states, resident_bytes, host_fraction, cpu_fraction, host_pick)
    if division is None and (any_optimizer or verify_steps):
        raise InvalidError(
            f'{"any_optimizer" if any_optimizer else "verify_steps"} is for states="host" and for '
            "host_fraction: in a cycle each step is the optimizer's own"
        )
    return division


def _shares(
    states: str,
    resident_bytes: int | str | None,
    host_fraction: float | None,
    cpu_fraction: float | None,
    pick: Pick,
) -> Division | None:
    for name, share in (("host_fraction", host_fraction), ("cpu_fraction", cpu_fraction)):
        if share is not None and not (isinstance(share, int | float) and 0 <= share <= 1):
            raise InvalidError(f"{name}={share!r}: say a share from 0 to 1")
    is_word = isinstance(pick, str)
    if is_word and pick not in ("late", "largest"):
        raise InvalidError(
            f"host_pick={pick!r}: say late, largest, or a list of names of parameters"
        )
    if not is_word and not all(isinstance(one, str) for one in pick):
        raise InvalidError(f"host_pick={pick!r}: the names in a list are texts")
    if states == "cycle":
        if resident_bytes is not None or cpu_fraction is not None:
            raise InvalidError(
                'resident_bytes and cpu_fraction are for states="host": in a cycle all states '
                "leave, but for those of host_fraction, which the CPU steps"
            )
        fraction = host_fraction if is_word or host_fraction is not None else 1.0
        if not fraction:
            return None
        return Division(cpu_fraction=fraction, pick=pick, windows=False)
    if resident_bytes is not None and host_fraction is not None:
        raise InvalidError("resident_bytes and host_fraction say the same: give one of them")
    if host_fraction is not None and cpu_fraction is not None and cpu_fraction > host_fraction:
        raise InvalidError(
            f"cpu_fraction={cpu_fraction} is more than host_fraction={host_fraction}: both are "
            "shares of all states, and the CPU steps parameters whose states live on the host"
        )
    on_cpu = cpu_fraction if cpu_fraction is not None else 0.0 if is_word else 1.0
    stays = None if resident_bytes is None else bytes_of("resident_bytes", resident_bytes)
    return Division(stays, host_fraction, on_cpu, pick)


def _whole(model: torch.nn.Module | Sequence[torch.nn.Module]) -> torch.nn.Module:
    """The model as one module. InvalidError for what is none."""
    chunks: list[Any] = list(model) if isinstance(model, list | tuple) else [model]
    if not chunks or not all(isinstance(one, torch.nn.Module) for one in chunks):
        raise InvalidError(
            f"model is a {type(model).__name__}: give a torch.nn.Module, or a list of them"
        )
    whole: torch.nn.Module = chunks[0] if len(chunks) == 1 else torch.nn.ModuleList(chunks)
    return whole


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if value is not None}
