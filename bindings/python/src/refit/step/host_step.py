"""The C host step as a Python object: parameters whose states live on the host, stepped by the CPU.

One method for each verb of refit/advanced/host_step.h, which says in which order they come and what
each failure leaves; addresses are plain numbers. Independent of whose memory a parameter is, and of
which optimizer steps it.
"""

import ctypes
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from refit._c import abi
from refit._c.handle import Handle
from refit._c.library import call, encoded, lib
from refit._c.waiting import run_interruptibly, wait_in_slices
from refit.states.offloader import Offloader

ADAM: Final = abi.REFIT_ADAM
ADAGRAD: Final = abi.REFIT_ADAGRAD
SGD: Final = abi.REFIT_SGD
EACH: Final = 0xFFFFFFFF
"""``REFIT_EACH_PARAMETER``."""
STEPPED: Final = abi.REFIT_PARAMETER_STEPPED


class Options(NamedTuple):
    """What a group of an optimizer has, under PyTorch's names."""

    optimizer: int
    lr: float
    weight_decay: float = 0.0
    beta1: float = 0.0
    beta2: float = 0.0
    eps: float = 0.0
    lr_decay: float = 0.0
    momentum: float = 0.0
    dampening: float = 0.0
    decoupled: bool = False
    amsgrad: bool = False
    nesterov: bool = False
    maximize: bool = False
    lr_is_tensor: bool = False


class Parameter(NamedTuple):
    """An fp32 parameter: where it is on the device, and the regions of its states."""

    name: str
    memory: int
    elements: int
    group: int
    states: tuple[int, ...]


class HostStep(Handle):
    """The host step of an offloader whose regions live on the host. Used by one thread at a time.

    ``offloader`` is sealed, and is borrowed. ``parameters`` return in their order. Takes
    page-locked memory for their gradients and themselves, and starts threads; blocks for that.
    BudgetError, PinError, HostMemoryError, UnsupportedError (use_pinned_optimizer_offload: false),
    BusyError (it has a host step).
    """

    def __init__(self, offloader: Offloader, parameters: Sequence[Parameter]) -> None:
        self._offloader = offloader
        array = (abi.refit_host_parameter * len(parameters))()
        for entry, one in zip(array, parameters, strict=True):
            entry.size = ctypes.sizeof(abi.refit_host_parameter)
            entry.name = encoded(one.name, "the name of a parameter")
            entry.memory = one.memory
            entry.elements = one.elements
            entry.type = entry.gradient_type = abi.REFIT_F32
            entry.group = one.group
            entry.master = abi.REFIT_MASTER_NONE
            entry.state_count = len(one.states)
            entry.states[: len(one.states)] = one.states
        pointer = offloader._live
        run_interruptibly(
            lambda: self._open(lib.refit_host_step_open, pointer, array, len(parameters))
        )

    def _close(self, pointer: int) -> None:
        call(lib.refit_host_step_close, pointer)

    def take_roots(self, root: int, threads: int) -> None:
        """From the next step on square roots are taken by the function at ``root``, 0: rounded to
        nearest; see refit_host_step_set_sqrt."""
        functions = abi.refit_sqrt_fn(root), abi.refit_sqrt_threads_fn(threads)
        call(lib.refit_host_step_set_sqrt, self._live, *functions)

    def begin(self, groups: Sequence[Options]) -> None:
        """Begins a step with the options of each group. Waits for the parameters of the last
        step. CopyError and others: call again."""
        array = (abi.refit_optimizer_options * len(groups))()
        for entry, one in zip(array, groups, strict=True):
            entry.size = ctypes.sizeof(abi.refit_optimizer_options)
            for name, value in one._asdict().items():
                setattr(entry, name, value)
        call(lib.refit_host_step_begin, self._live, array, len(groups))

    def gradient(self, parameter: int, gradient: int, number: int, stream: int) -> None:
        """Starts the copy of a gradient to the host, after what ``stream`` has queued. The
        gradient stays as it is until ``run`` or ``skip`` has returned. ``number`` counts the steps
        of this parameter, from 1 on. CopyError and others: it is not named."""
        after = abi.refit_stream_ref(stream)
        call(lib.refit_host_step_gradient, self._live, parameter, gradient, number, after)

    def bring(self, named: Iterable[tuple[int, int | None, int]], stream: int) -> None:
        """Starts the copies of parameters to the host, as ``stream`` has made them by now: what is
        stepped is what the device has. Each comes with the address of its gradient, which is named
        before it, as by ``gradient``, or None, and the number of its step. Many at once, for single
        calls would take twice as long. CopyError and others: some may be under way; call again, or
        ``skip``."""
        pointer, after = self._live, abi.refit_stream_ref(stream)
        for parameter, gradient, number in named:
            if gradient is not None:
                call(lib.refit_host_step_gradient, pointer, parameter, gradient, number, after)
            call(lib.refit_host_step_refresh, pointer, parameter, after)

    def gather(self) -> None:
        """Waits for the gradients that were named, which may be changed then.
        DeadlineError: call again."""
        pointer = self._live
        run_interruptibly(lambda: call(lib.refit_host_step_norm, pointer, None, None))

    def run(self, unscale: float, clip: float, stream: int) -> None:
        """Steps the parameters whose gradients were named, multiplied by the two factors; the new
        parameters leave for the device, after what ``stream`` has queued. Blocks for the
        arithmetic. After an error ``stepped`` says which were stepped."""
        call(lib.refit_host_step_run, self._live, unscale, clip, abi.refit_stream_ref(stream))

    def skip(self) -> None:
        """Drops the gradients of the parameters that were not stepped; waits for their copies."""
        call(lib.refit_host_step_skip, self._live)

    def stepped(self, parameter: int) -> bool:
        """Whether this parameter was stepped since ``begin``."""
        return bool(lib.refit_host_step_progress(self._live, parameter) & STEPPED)

    def join(self, stream: int) -> None:
        """Makes ``stream`` wait, on the device, until all parameters are back."""
        call(lib.refit_host_step_join, self._live, EACH, abi.refit_stream_ref(stream))

    def wait(self, timeout: float | None = None) -> None:
        """Waits until all parameters are back, at most ``timeout`` seconds (None:
        offload.timeout_ms). CopyError and others: call again."""
        pointer = self._live
        wait_in_slices(
            lambda slice_ms: call(lib.refit_host_step_wait, pointer, slice_ms),
            self._offloader._timeout_s if timeout is None else timeout,
        )
