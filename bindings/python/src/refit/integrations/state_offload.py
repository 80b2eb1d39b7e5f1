"""Options by which frameworks let states live on the host, as keywords of ``refit.Controller``.

    chosen = refit.integrations.state_offload.take(args)      # before the optimizer is made
    ...
    controller = refit.Controller(optimizer, model, **chosen)

| option | framework | keyword |
|---|---|---|
| ``swap_optimizer`` | xtuner, MindSpeed | ``states="host"`` |
| ``swap_optimizer_times`` | xtuner, MindSpeed | ``window_bytes``, if ``state_bytes`` is given |
| ``chunked_optimizer_state_offload``, ``offload_optimizer_states`` | Megatron | ``states="host"`` |
| ``optimizer_state_offload_chunk_size_mb`` | Megatron | ``window_bytes`` |
| ``optimizer_state_offload_fraction`` | Megatron | ``host_fraction`` |

What a name means there and not here is a warning, or an error where the training would be another.
docs/windows.md has the differences. The names and defaults are those of megatron/core/optimizer/
optimizer_config.py (NVIDIA/Megatron-LM dev, 2026-08), xtuner/v1/optim/swap_adamw.py (InternLM/
xtuner main, 2026-08) and mindspeed/core/optimizer/swap_optimizer (Ascend/MindSpeed master and
r0.8.0). None of them is imported here.
"""

import warnings
from collections.abc import Mapping, MutableMapping
from math import isfinite
from typing import Any

from refit.errors import InvalidError, UnsupportedError

SWAP = "swap_optimizer"
TIMES = "swap_optimizer_times"
SIZES = ("swap_optimizer_size", "swap_optimizer_sizes")
CHUNKED = "chunked_optimizer_state_offload"
ALIAS = "offload_optimizer_states"
CHUNK = "optimizer_state_offload_chunk_size_mb"
FRACTION = "optimizer_state_offload_fraction"
SWITCHES = (SWAP, CHUNKED, ALIAS)

SMALLEST_WINDOW = 64 << 10
"""Of ``offload.window_bytes``."""


def keywords(options: Any, *, state_bytes: int | None = None) -> dict[str, Any]:
    """The keywords of ``refit.Controller`` that a framework's options ask for; empty if none does.

    ``options``: a mapping or an object with attributes, such as an ``argparse.Namespace``; names
    with ``-`` or ``_``. ``state_bytes``: the bytes of this rank's states and masters (12 for each
    parameter of Adam with fp32 masters, 8 without), which a count of times divides. Changes
    nothing; does not block. InvalidError: a value that cannot be, or two frameworks at once.
    UnsupportedError: an option that has no meaning here.
    """
    return _read(options, state_bytes)


def take(options: Any, *, state_bytes: int | None = None) -> dict[str, Any]:
    """As ``keywords``, and switches the framework's own offload off in ``options``, which would
    move the same states: call it before the framework makes its optimizer.

    InvalidError also if ``options`` cannot be changed; then nothing is.
    """
    found = _read(options, state_bytes)
    if found:
        _switch_off(options)
    return found


def _read(options: Any, state_bytes: int | None) -> dict[str, Any]:
    said = _Said(options)
    swaps, chunks = said.flag(SWAP), said.flag(CHUNKED) or said.flag(ALIAS)
    if swaps and chunks:
        raise InvalidError(
            f"both {SWAP} and {CHUNKED} are set: they are the same choice of two frameworks; "
            "leave one out"
        )
    if swaps:
        return _of_swap(said, state_bytes)
    return _of_chunks(said) if chunks else {}


def _of_swap(said: "_Said", state_bytes: int | None) -> dict[str, Any]:
    for name in SIZES:
        if said.has(name):
            raise UnsupportedError(
                f"{name} says how many GiB of states live on the host: give refit.Controller "
                "resident_bytes, the bytes of states that stay on the device, and leave it out"
            )
    times = said.number(TIMES)
    found: dict[str, Any] = {"states": "host"}
    if times is None:
        return found
    if times < 1 or times != int(times):
        raise InvalidError(f"{TIMES} is {times}: it is a whole number from 1 on")
    if state_bytes is None:
        warnings.warn(
            f"{TIMES}={times} is not used: windows are sized in bytes, and how many bytes of "
            "states it divides is not known here; windows have offload.window_bytes, unless "
            "state_bytes or window_bytes is given",
            stacklevel=_CALLER,
        )
        return found
    if state_bytes < 0:
        raise InvalidError(f"state_bytes is {state_bytes}: the bytes of a rank's states")
    window_bytes = max(-(-state_bytes // int(times)), SMALLEST_WINDOW)
    return {**found, "window_bytes": window_bytes}


def _of_chunks(said: "_Said") -> dict[str, Any]:
    _refuse_beside_chunks(said)
    chunk, fraction = said.number(CHUNK) or 0, said.number(FRACTION)
    if chunk < 0:
        raise InvalidError(f"{CHUNK} is {chunk}: it is 0 or more")
    if fraction is not None and not 0 <= fraction <= 1:
        raise InvalidError(f"{FRACTION} is {fraction}: it is a share from 0 to 1")
    if fraction == 0:  # to Megatron this is the same as without the switch
        return {}
    found: dict[str, Any] = {"states": "host"}
    if chunk:
        found["window_bytes"] = int(chunk * (1 << 20))
    else:
        warnings.warn(
            f"{CHUNK}=0 brings all states to the device at once in Megatron; here they come in "
            "windows of offload.window_bytes",
            stacklevel=_CALLER,
        )
    if fraction is not None:
        found["host_fraction"] = float(fraction)
    return found


def _refuse_beside_chunks(said: "_Said") -> None:
    if said.flag("optimizer_cpu_offload"):
        raise InvalidError(
            f"optimizer_cpu_offload and {CHUNKED} are both set: the first steps states on the "
            "CPU, the second on the device; leave one out"
        )
    if said.flag("optimizer_cuda_graph"):
        raise UnsupportedError(
            "optimizer_cuda_graph captures the optimizer's step, and states that live on the host "
            "are copied between its parts: leave one of the two out"
        )


_CALLER = 4
"""From a warning to the code that called ``keywords`` or ``take``."""


class _Said:
    """What the options say, by names with ``_``. None is as if it were not said."""

    def __init__(self, options: Any) -> None:
        self._options = options
        self._by_name: dict[str, Any] | None = None
        if isinstance(options, Mapping):
            self._by_name = {_plain(key): value for key, value in options.items()}

    def _get(self, name: str) -> Any:
        if self._by_name is not None:
            return self._by_name.get(name)
        return getattr(self._options, name, None)

    def has(self, name: str) -> bool:
        return self._get(name) not in (None, 0)

    def flag(self, name: str) -> bool:
        value = self._get(name)
        if value is not None and not isinstance(value, bool):
            raise InvalidError(f"{name} is {value!r}: it is true or false")
        return bool(value)

    def number(self, name: str) -> int | float | None:
        value = self._get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise InvalidError(f"{name} is {value!r}: it is a number")
        return value


def _plain(key: Any) -> str:
    return str(key).lstrip("-").replace("-", "_")


def _switch_off(options: Any) -> None:
    try:
        if isinstance(options, MutableMapping):
            for key in [one for one in options if _plain(one) in SWITCHES]:
                options[key] = False
        elif isinstance(options, Mapping):
            raise TypeError(f"a {type(options).__name__} cannot be changed")
        else:
            for name in [one for one in SWITCHES if getattr(options, one, None)]:
                setattr(options, name, False)
    except (AttributeError, TypeError, ValueError) as why:
        raise InvalidError(
            f"the framework's own offload cannot be switched off in its options: {why}; set "
            f"{', '.join(SWITCHES)} to false yourself, and call keywords"
        ) from why
