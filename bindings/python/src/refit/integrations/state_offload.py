"""Options by which frameworks let states live on the host, and the CPU step a share of them, as
a ``schedule`` of ``refit.Controller``, and options.

    chosen = refit.integrations.state_offload.take(args)      # before the optimizer is made
    ...
    controller = refit.Controller(optimizer, model, **chosen)

| option | framework | here |
|---|---|---|
| ``swap_optimizer`` | xtuner, MindSpeed | ``HostStates()`` |
| ``swap_optimizer_times`` | xtuner, MindSpeed | its ``window_bytes``, if ``state_bytes`` is given |
| ``chunked_optimizer_state_offload``, ``offload_optimizer_states`` | Megatron | ``HostStates()`` |
| ``optimizer_state_offload_chunk_size_mb`` | Megatron | its ``window_bytes`` |
| ``optimizer_state_offload_fraction`` | Megatron | its ``fraction`` |
| ``optimizer_cpu_offload``, ``optimizer_offload_fraction`` | Megatron | ``CpuStep(fraction)`` |
| ``overlap_cpu_optimizer_d2h_h2d`` | Megatron | its ``overlap`` |
| ``use_torch_optimizer_for_cpu_offload`` | Megatron | its ``backend="torch"``, if true |
| ``pin_cpu_grads``, ``pin_cpu_params`` | Megatron | ``offload_pin="off"``, if false |
| ``offload_optimizer.device``, ``.ratio`` | DeepSpeed | ``CpuStep(fraction)`` |
| ``offload_optimizer.pin_memory`` | DeepSpeed | ``offload_pin="off"``, if false |

What a name means there and not here is a warning, or an error where the training would be another.
docs/framework-megatron.md has the differences. The names and defaults are those of
megatron/core/optimizer/optimizer_config.py (NVIDIA/Megatron-LM main and dev, 2026-08),
deepspeed/runtime/zero/offload_config.py (deepspeedai/DeepSpeed master, 2026-08),
xtuner/v1/optim/swap_adamw.py (InternLM/xtuner main, 2026-08) and mindspeed/core/optimizer/
swap_optimizer (Ascend/MindSpeed master and r0.8.0). None of them is imported here.
"""

import warnings
from collections.abc import Mapping
from typing import Any

from refit._c.config import bytes_of
from refit.errors import InvalidError, UnsupportedError
from refit.integrations._options import Said, changes, make, refuse_none
from refit.step.schedule import CpuStep, HostStates

SWAP = "swap_optimizer"
TIMES = "swap_optimizer_times"
SIZES = ("swap_optimizer_size", "swap_optimizer_sizes")
CHUNKED = "chunked_optimizer_state_offload"
ALIAS = "offload_optimizer_states"
CHUNK = "optimizer_state_offload_chunk_size_mb"
FRACTION = "optimizer_state_offload_fraction"
SWITCHES = (SWAP, CHUNKED, ALIAS)

CPU_STEP = "optimizer_cpu_offload"
STEP_FRACTION = "optimizer_offload_fraction"
CPU_OVERLAP = "overlap_cpu_optimizer_d2h_h2d"
CPU_TORCH = "use_torch_optimizer_for_cpu_offload"
CPU_PINS = ("pin_cpu_grads", "pin_cpu_params")
CPU_SWITCHES = (CPU_STEP, CPU_OVERLAP, CPU_TORCH)

PRECISE = "use_precision_aware_optimizer"
PRECISE_FLAGS = (PRECISE, f"{PRECISE}_no_fp8_or_ds_fp8")
"""Megatron asks for the first beside its own CPU offload, and derives the second. Without that
offload they choose an optimizer that steps on GPUs only."""
PRECISE_DTYPES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
FLOAT32 = ("fp32", "float32", "float")

ZERO = "zero_optimization"
ZERO_OFFLOAD = "offload_optimizer"
NOT_LOCKED = {"offload_pin": "off"}

SMALLEST_WINDOW = 64 << 10
"""Of ``offload.window_bytes``."""


def keywords(options: Any, *, state_bytes: int | str | None = None) -> dict[str, Any]:
    """The keywords of ``refit.Controller`` that a framework's options ask for; empty if none does.

    ``options``: a mapping or an object with attributes, such as an ``argparse.Namespace``; names
    with ``-`` or ``_``. DeepSpeed's: its configuration, its ``zero_optimization``, or what has
    ``offload_optimizer``, as mappings. ``state_bytes``: the bytes of this rank's states and masters
    (12 for each parameter of Adam with fp32 masters, 8 without; or "12GiB"), which a count of times
    divides.
    Changes nothing; does not block. InvalidError: a value that cannot be, or two frameworks at
    once. UnsupportedError: an option that has no meaning here.
    """
    return _read(options, state_bytes)


def take(options: Any, *, state_bytes: int | str | None = None) -> dict[str, Any]:
    """As ``keywords``, and switches the framework's own offload off in ``options``, which would
    move the same states: call it before the framework makes its optimizer.

    Of Megatron's CPU offload that includes ``use_precision_aware_optimizer``, which is asked for
    beside it. InvalidError also if ``options`` cannot be changed; then nothing is.
    """
    found = _read(options, state_bytes)
    if found:
        switch_off(options)
    return found


def switch_off(options: Any) -> None:
    """What ``take`` does with options of which ``keywords`` were read before. InvalidError: they
    cannot be changed, and nothing is."""
    steps = Said(options).flag(CPU_STEP)
    names = (*SWITCHES, *CPU_SWITCHES, *PRECISE_FLAGS) if steps else SWITCHES
    zero = _zero_offload(options)
    try:
        make([*changes(options, names, False), *changes(zero, ("device",), "none")])
    except (AttributeError, TypeError, ValueError) as why:
        raise InvalidError(
            f"the framework's own offload cannot be switched off in its options: {why}; set "
            f"{', '.join(names)} to false yourself, and call keywords"
        ) from why


def _read(options: Any, state_bytes: int | str | None) -> dict[str, Any]:
    refuse_none(options)
    said = Said(options)
    zero = Said(_zero_offload(options))
    on = {
        SWAP: said.flag(SWAP),
        CHUNKED: said.flag(CHUNKED) or said.flag(ALIAS),
        CPU_STEP: said.flag(CPU_STEP),
        ZERO_OFFLOAD: _zero_is_on(zero),
    }
    asked = [name for name, is_on in on.items() if is_on]
    if asked == [CHUNKED, CPU_STEP]:
        raise InvalidError(
            f"{CPU_STEP} and {CHUNKED} are both set: the first steps states on the CPU, the second "
            "on the device; leave one out"
        )
    if len(asked) > 1:
        raise InvalidError(
            f"both {' and '.join(asked)} are set: they are the same choice of two frameworks; "
            "leave one out"
        )
    if on[SWAP]:
        return _of_swap(said, state_bytes)
    if on[CHUNKED]:
        return _of_chunks(said)
    if on[CPU_STEP]:
        return _of_cpu_step(said)
    return _of_zero(zero) if on[ZERO_OFFLOAD] else {}


def _of_swap(said: Said, state_bytes: int | str | None) -> dict[str, Any]:
    for name in SIZES:
        if said.has(name):
            raise UnsupportedError(
                f"{name} says how many GiB of states live on the host: give refit.HostStates "
                "resident_bytes, the bytes of states that stay on the device, and leave it out"
            )
    times = said.number(TIMES)
    whole: dict[str, Any] = {"schedule": HostStates()}
    if times is None:
        return whole
    if times < 1 or times != int(times):
        raise InvalidError(f"{TIMES} is {times}: it is a whole number from 1 on")
    if state_bytes is None:
        warnings.warn(
            f"{TIMES}={times} is not used: windows are sized in bytes, and how many bytes of "
            "states it divides is not known here; windows have offload.window_bytes, unless "
            "state_bytes or window_bytes is given",
            stacklevel=_CALLER,
        )
        return whole
    window_bytes = max(-(-bytes_of("state_bytes", state_bytes) // int(times)), SMALLEST_WINDOW)
    return {"schedule": HostStates(window_bytes=window_bytes)}


def _of_chunks(said: Said) -> dict[str, Any]:
    _refuse_graphs(said)
    chunk, fraction = said.number(CHUNK) or 0, said.share(FRACTION)
    if chunk < 0:
        raise InvalidError(f"{CHUNK} is {chunk}: it is 0 or more")
    if fraction == 0:  # to Megatron this is the same as without the switch
        return {}
    if not chunk:
        warnings.warn(
            f"{CHUNK}=0 brings all states to the device at once in Megatron; here they come in "
            "windows of offload.window_bytes",
            stacklevel=_CALLER,
        )
    return {
        "schedule": HostStates(
            window_bytes=int(chunk * (1 << 20)) if chunk else None,
            fraction=None if fraction is None else float(fraction),
        )
    }


def _of_cpu_step(said: Said) -> dict[str, Any]:
    _refuse_graphs(said)
    fraction, overlap = said.share(STEP_FRACTION), said.get(CPU_OVERLAP)
    if fraction is None:
        raise InvalidError(
            f"{CPU_STEP} is set and {STEP_FRACTION} is not: it is 1.0 on Megatron's command line "
            "and 0.0 in its OptimizerConfig, so say which share the CPU steps"
        )
    if said.flag(PRECISE):
        _refuse_other_dtypes(said)
    if fraction == 0:
        warnings.warn(
            f"{CPU_STEP} is set and {STEP_FRACTION} is 0, which is the default of Megatron's "
            "OptimizerConfig: the CPU steps nothing",
            stacklevel=_CALLER,
        )
    step = CpuStep(
        fraction=float(fraction),
        overlap=overlap is None or said.flag(CPU_OVERLAP),
        backend="torch" if said.flag(CPU_TORCH) else "auto",
    )
    found: dict[str, Any] = {"schedule": step}
    pins = [said.flag(name) for name in CPU_PINS if said.get(name) is not None]
    if not all(pins):
        found.update(NOT_LOCKED)
    return found


def _of_zero(said: Said) -> dict[str, Any]:
    ratio = said.share("ratio", of=f"{ZERO_OFFLOAD}.")
    found: dict[str, Any] = {"schedule": CpuStep(fraction=1.0 if ratio is None else float(ratio))}
    if said.get("pin_memory") is not None and not said.flag("pin_memory"):
        found.update(NOT_LOCKED)
    return found


def _zero_offload(options: Any) -> Any:
    """The ``offload_optimizer`` of DeepSpeed's configuration, or an empty mapping. Other frameworks
    have a switch of the same name, which is true or false and no mapping."""
    for outer in (options, Said(options).get(ZERO)):
        found = Said(outer).get(ZERO_OFFLOAD)
        if isinstance(found, Mapping) or hasattr(found, "device"):
            return found
    return {}


def _zero_is_on(said: Said) -> bool:
    """Whether states live on the CPU; refused where they would live on a disk."""
    device = said.get("device")
    name = getattr(device, "value", device)
    if name == "nvme":
        raise UnsupportedError(
            f'{ZERO_OFFLOAD}.device is "nvme": states live in host memory here, and on no disk; '
            'say "cpu"'
        )
    if name not in (None, "none", "cpu"):
        raise InvalidError(f"{ZERO_OFFLOAD}.device is {name!r}: it is none or cpu")
    return bool(name == "cpu")


def _refuse_graphs(said: Said) -> None:
    if said.flag("optimizer_cuda_graph"):
        raise UnsupportedError(
            "optimizer_cuda_graph captures the optimizer's step, and states that live on the host "
            "are copied between its parts: leave one of the two out"
        )


def _refuse_other_dtypes(said: Said) -> None:
    for name in PRECISE_DTYPES:
        value = said.get(name)
        if value is not None and str(value).removeprefix("torch.") not in FLOAT32:
            raise UnsupportedError(
                f"{name} is {value}: beside {CPU_STEP} states, masters and their gradients are "
                f"fp32; leave {name} out, or {CPU_STEP}"
            )


_CALLER = 4
"""From a warning to the code that called ``keywords`` or ``take``."""
