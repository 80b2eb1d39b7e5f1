"""This machine, for the reader of a figure, and what a process of it takes of its memory."""

import os
import platform
import resource
from pathlib import Path
from typing import Any

RESET_PEAK = "5"  # what /proc/PID/clear_refs takes to begin a new peak


class NotInstalled(Exception):
    """A way to compare with is not on this machine. The sentence says what is missing."""


def describe() -> dict[str, Any]:
    """Processor, cores, memory, and the torch that was run."""
    import torch

    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def status_bytes(key: str) -> int:
    """A figure of this process: "VmRSS" (resident now) or "VmHWM" (its peak)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return 0


def begin_peak() -> None:
    """From now on VmHWM is the peak since now."""
    Path("/proc/self/clear_refs").write_text(RESET_PEAK)


def page_faults() -> int:
    """Page faults of this process that took a new page, so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
