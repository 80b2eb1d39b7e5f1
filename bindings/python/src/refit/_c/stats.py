"""The figures of refit, as numbers for any logger.

There is one struct of figures (refit/stats.h), in which the C library counts, and a controller its
cycles. Here it becomes a flat dict of floats, the shape that wandb, TensorBoard, MLflow and the
frameworks' own loggers take as it is. ``FIGURES`` says where each name comes from, and
docs/statistics.md what it means; rates are made of a figure of bytes and one of seconds.

Independent of which object the struct came from, and of torch.
"""

import ctypes
from collections.abc import Callable, Mapping

from refit._c import abi
from refit._c.library import call, lib

PREFIX = "refit/"
"""The prefix of every name."""

FIGURES: Mapping[str, str] = {
    "offload_s": "offload_seconds_last",
    "offload_blocked_s": "offload_blocked_seconds_last",
    "offload_bytes": "offload_bytes_last",
    "reclaimed_bytes": "offload_reclaimed_bytes_last",
    "publish_s": "publish_stage_seconds_last",
    "publish_bytes": "publish_bytes_last",
    "commit_s": "publish_commit_seconds_last",
    "restore_s": "restore_seconds_last",
    "restore_blocked_s": "restore_blocked_seconds_last",
    "host_bytes": "host_bytes",
    "host_pinned_bytes": "host_pinned_bytes",
    "host_pin_s": "host_pin_seconds",
    "version": "publish_version",
    "workers": "workers",
    "workers_committed": "workers_committed_last",
    "workers_evicted": "workers_evicted",
    "retries": "publish_resent_frames",
    "regions": "offload_regions",
    "offload_failures": "offload_failures",
    "cycles": "cycles",
    "cycle_failures": "cycle_failures",
    "cycle_s": "cycle_seconds_last",
    "cycle_blocked_s": "cycle_blocked_seconds_last",
    "step_s": "step_seconds_last",
    "step_blocked_s": "step_blocked_seconds_last",
    "step_in_bytes": "step_in_bytes_last",
    "step_out_bytes": "step_out_bytes_last",
    "window_bytes": "window_bytes",
    "host_step_s": "host_step_seconds_last",
    "host_step_blocked_s": "host_step_blocked_seconds_last",
    "host_step_compute_s": "host_step_compute_seconds_last",
    "host_step_in_bytes": "host_step_in_bytes_last",
    "host_step_out_bytes": "host_step_out_bytes_last",
    "host_step_bytes": "host_step_bytes",
}
"""Names without their prefix, and the fields of ``refit_stats`` that they are."""

PYTHON_SIDE = ("early_returns", "parked_bytes", "resident_bytes")
"""Names of figures that the C library does not count."""

RATES: Mapping[str, tuple[str, str]] = {
    "offload_gbps": ("offload_bytes_last", "offload_seconds_last"),
    "restore_gbps": ("restore_bytes_last", "restore_seconds_last"),
    "publish_gbps": ("publish_bytes_last", "publish_stage_seconds_last"),
}
"""Names of rates, in GB/s (10^9 bytes a second), and what is divided by what."""


def empty() -> abi.refit_stats:
    """A struct of zeros that knows its size, for the C functions that add their figures."""
    made = abi.refit_stats()
    lib.refit_stats_init(ctypes.byref(made), ctypes.sizeof(made))
    return made


def gather(*sources: tuple[Callable[..., int], int]) -> abi.refit_stats:
    """The figures of several objects in one struct.

    They are merged as ``refit_stats_merge`` does it: counts and bytes of several devices add up.
    Each source is a C function such as ``lib.refit_offloader_stats`` and the object's pointer. What
    the function reports is raised. Does not block.
    """
    made = empty()
    for function, pointer in sources:
        one = empty()
        call(function, pointer, ctypes.byref(one))
        lib.refit_stats_merge(ctypes.byref(made), ctypes.byref(one))
    return made


def flatten(
    c_stats: abi.refit_stats, python_side: Mapping[str, float] | None = None
) -> dict[str, float]:
    """One flat dict of floats, keys ``refit/...``: seconds, bytes, GB/s, counts.

    ``python_side`` is what the caller knows better than C does; its names get the prefix where they
    lack it, and its figures replace those of the same name. A rate without time is 0. Does not
    block.
    """
    flat = {PREFIX + name: float(getattr(c_stats, field)) for name, field in FIGURES.items()}
    flat |= {PREFIX + name: 0.0 for name in PYTHON_SIDE}
    for name, (amount, seconds) in RATES.items():
        flat[PREFIX + name] = rate(getattr(c_stats, amount), getattr(c_stats, seconds))
    for name, value in (python_side or {}).items():
        flat[name if name.startswith(PREFIX) else PREFIX + name] = float(value)
    return flat


def numbered(c_stats: abi.refit_stats, beginning: str) -> dict[str, float]:
    """The figures whose C names begin so, under these names after ``refit/``."""
    names = [name for name, *_ in abi.refit_stats._fields_ if name.startswith(beginning)]
    return {PREFIX + name: float(getattr(c_stats, name)) for name in names}


def rate(amount: float, seconds: float) -> float:
    """GB/s (10^9 bytes a second); 0 where no time has passed."""
    return amount / seconds / 1e9 if seconds > 0 else 0.0
