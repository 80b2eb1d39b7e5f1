"""The kernels of the C library that step on the CPU: what they know, and how they are called.

They know Adam, AdamW, Adagrad and SGD of ``torch.optim``, on fp32 numbers, and give the bits of its
single-tensor path on the CPU (see kernels/optim.h): ``options_of`` says whether a group of an
optimizer is such a one. ``CpuKernels`` is a handle of C's host step, refit/advanced/host_step.h.
Independent of whose memory a parameter is.
"""

import ctypes
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from refit._c import abi
from refit._c.handle import Handle
from refit._c.library import call, encoded, lib
from refit._c.waiting import run_interruptibly, wait_in_slices
from refit.states.offloader import Offloader
from refit.step.stand_in import arithmetic_of

Optimizer = torch.optim.Optimizer

ADAM: Final = abi.REFIT_ADAM
ADAGRAD: Final = abi.REFIT_ADAGRAD
SGD: Final = abi.REFIT_SGD
STEPPED: Final = abi.REFIT_PARAMETER_STEPPED

_NUMBERS: Mapping[type, int] = {
    torch.optim.Adam: ADAM,
    torch.optim.AdamW: ADAM,
    torch.optim.Adagrad: ADAGRAD,
    torch.optim.SGD: SGD,
}
"""What the kernels know, by class. No subclass counts as one."""

_CODE = {kind: arithmetic_of(object.__new__(kind)) for kind in _NUMBERS}
"""PyTorch's own code of their steps: a class whose step was replaced is another optimizer."""


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


# ---- What the kernels know.


def options_of(
    optimizer: Optimizer, group: Mapping[str, Any], device: torch.device
) -> Options | None:
    """What the kernels are told of a group; None where they would not do what its code does.

    On a CPU that is the code's result to the bit. A GPU has its own arithmetic, and the kernels
    stand for that of the CPU there, whatever ``fused`` and ``foreach`` say.
    """
    number = _NUMBERS.get(type(optimizer))
    if number is None or arithmetic_of(optimizer) is not _CODE[type(optimizer)]:
        return None
    lr = group["lr"]
    lr_is_tensor = isinstance(lr, torch.Tensor)
    if device.type == "cpu":
        if group.get("fused") or group.get("capturable"):
            return None
        if group.get("foreach") and (lr_is_tensor or group.get("nesterov")):
            return None  # PyTorch refuses the first, and changes the gradient with the second
        if root_of_torch() is None:
            return None
    betas = group.get("betas", (0.0, 0.0))
    if lr_is_tensor and (lr.dim() > 0 or lr.dtype != torch.float32):
        return None
    numbers: dict[str, Any] = {key: group.get(key, 0.0) for key in _NUMBERS_OF_A_GROUP}
    numbers.update(lr=float(lr), beta1=betas[0], beta2=betas[1])
    if group.get("differentiable") or not _are_known(number, numbers, bool(group.get("nesterov"))):
        return None
    return Options(
        optimizer=number,
        **numbers,
        decoupled=bool(group.get("decoupled_weight_decay", False)),
        lr_is_tensor=lr_is_tensor,
        amsgrad=bool(group.get("amsgrad", False)),
        nesterov=bool(group.get("nesterov", False)),
        maximize=bool(group.get("maximize", False)),
    )


_NUMBERS_OF_A_GROUP = ("weight_decay", "eps", "lr_decay", "momentum", "dampening")


def _are_known(optimizer: int, numbers: Mapping[str, Any], nesterov: bool) -> bool:
    """Whether the kernels take these numbers: finite ones, from 0 on, and betas below 1."""
    if not all(isinstance(one, int | float) and math.isfinite(one) for one in numbers.values()):
        return False
    if any(one < 0 for key, one in numbers.items() if key != "dampening"):
        return False
    if optimizer == ADAM:
        return bool(numbers["beta1"] < 1 and numbers["beta2"] < 1)
    return not nesterov or bool(numbers["momentum"] > 0 and numbers["dampening"] == 0)


def names_of(options: Options) -> tuple[str, ...]:
    """The names of the states that a step with these options has, in the order of the kernels."""
    if options.optimizer == ADAM:
        names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        return names if options.amsgrad else names[:2]
    if options.optimizer == ADAGRAD:
        return ("sum",)
    return ("momentum_buffer",) if options.momentum else ()


def can_make_states(optimizer: Optimizer) -> bool:
    """Whether the kernels make the states of a parameter in its first step, as PyTorch's code
    would: from zeros, or from the gradient. Adagrad's states need not start at zero."""
    return _NUMBERS.get(type(optimizer)) in (ADAM, SGD)


def first_states(optimizer: Optimizer, pairs: Iterable[tuple[Any, Any]]) -> dict[str, Any]:
    """What the optimizer has of a parameter that the kernels step for the first time, with the
    step count still 0. ``pairs``: its states by their names."""
    made = {name: one.shown for name, one in pairs}
    if _NUMBERS[type(optimizer)] == SGD:
        return made
    wide = torch.get_default_dtype() == torch.float64
    dtype = torch.float64 if wide else torch.float32
    return {"step": torch.tensor(0.0, dtype=dtype, device="cpu"), **made}


@functools.cache
def root_of_torch() -> tuple[int, int] | None:
    """What ``sqrt`` of an fp32 tensor calls on this CPU: zeros where it rounds to nearest, as the
    kernels do, or the addresses of MKL's vmsSqrt and MKL_Set_Num_Threads_Local. None where neither
    gives its bits, or where PyTorch's other arithmetic is not that of the kernels, as on a CPU
    without FMA."""
    plainly: Any = {"dtype": torch.float32, "device": "cpu"}  # the defaults may be others
    values = torch.linspace(0.25, 4.0, 4099, **plainly)
    one, nearly = (torch.tensor([v], **plainly).expand(33) for v in (1.0, 1 + 2**-12))
    if not bool((torch.addcmul(-one, nearly, nearly, value=1.0) == (1 + 2**-12) ** 2 - 1).all()):
        return None  # the product was rounded before it was added
    roots = torch.sqrt(values)
    nearest = torch.tensor([math.sqrt(one) for one in values.tolist()], **plainly)
    if torch.equal(roots, nearest):
        return 0, 0
    if not cast(Any, torch.backends.mkl).is_available():
        return None
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        functions = library.vmsSqrt, library.MKL_Set_Num_Threads_Local
    except (OSError, AttributeError):
        return None
    root, threads = (ctypes.cast(one, ctypes.c_void_p).value or 0 for one in functions)
    return root, threads


class _NearestRoots(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.sqrt.default:
            return _nearest_root(args[0])
        if func is torch.ops.aten._foreach_sqrt.default:
            return [_nearest_root(one) for one in args[0]]
        return func(*args, **(kwargs or {}))


def _nearest_root(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype != torch.float32:
        return torch.sqrt(tensor)
    return torch.sqrt(tensor.double()).float()  # the second rounding changes no root


def nearest_roots(optimizer: Optimizer) -> AbstractContextManager[Any]:
    """A block in which PyTorch's code for a step that the kernels know takes its square roots as
    they do where they are not told of MKL's."""
    if _NUMBERS.get(type(optimizer)) not in (ADAM, ADAGRAD) or root_of_torch() == (0, 0):
        return nullcontext()
    return _NearestRoots()  # type: ignore[no-untyped-call]


# ---- How they are called.


class CpuKernels(Handle):
    """Parameters that the kernels step, whose states are regions of an offloader on the host. Used
    by one thread at a time.

    One method for each verb of refit/advanced/host_step.h, which says in which order they come and
    what each failure leaves; addresses are plain numbers. ``offloader`` is sealed, and is borrowed.
    ``parameters`` return in their order. Takes page-locked memory for their gradients and
    themselves, and starts threads; blocks for that. BudgetError, PinError, HostMemoryError,
    UnsupportedError (use_pinned_optimizer_offload: false), BusyError (it has a host step).
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
        of this parameter, from 1 on. CopyError and others: it is not submitted."""
        after = abi.refit_stream_ref(stream)
        call(lib.refit_host_step_gradient, self._live, parameter, gradient, number, after)

    def submit(self, submitted: Iterable[tuple[int, int | None, int]], stream: int) -> None:
        """Starts the copies of parameters to the host, as ``stream`` has made them by now: what is
        stepped is what the device has. Each comes with the address of its gradient, which is
        submitted before it, as by ``gradient``, or None, and the number of its step. Many at once,
        for single calls would take twice as long. CopyError and others: some may be under way; call
        again, or ``skip``."""
        pointer, after = self._live, abi.refit_stream_ref(stream)
        for parameter, gradient, number in submitted:
            if gradient is not None:
                call(lib.refit_host_step_gradient, pointer, parameter, gradient, number, after)
            call(lib.refit_host_step_refresh, pointer, parameter, after)

    def gather(self) -> None:
        """Waits for the gradients that were submitted, which may be changed then.
        DeadlineError: call again."""
        pointer = self._live
        run_interruptibly(lambda: call(lib.refit_host_step_norm, pointer, None, None))

    def run(self, unscale: float, clip: float, stream: int) -> None:
        """Steps the parameters whose gradients were submitted, multiplied by the two factors; the
        new parameters leave for the device, after what ``stream`` has queued. Blocks for the
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
        call(
            lib.refit_host_step_join,
            self._live,
            abi.REFIT_EACH_PARAMETER,
            abi.refit_stream_ref(stream),
        )

    def wait(self, timeout: float | None = None) -> None:
        """Waits until all parameters are back, at most ``timeout`` seconds (None:
        offload.timeout_ms). CopyError and others: call again."""
        pointer = self._live
        wait_in_slices(
            lambda slice_ms: call(lib.refit_host_step_wait, pointer, slice_ms),
            self._offloader._timeout_s if timeout is None else timeout,
        )
