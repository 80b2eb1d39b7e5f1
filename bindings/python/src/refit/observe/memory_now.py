"""How much memory this process takes at this moment, on its device and on the host, and how much
it could take.

On a GPU torch's caching allocator is asked, if torch is loaded and has begun to use a GPU; it is
never made to. Of the host the kernel is asked (``/proc/self/status``, about 30 microseconds).

Independent of which of it belongs to refit.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ANONYMOUS = "RssAnon"
SHARED = "RssShmem"
CONTAINER = Path("/sys/fs/cgroup")
"""Where a container sees its own limits."""


def gpu_bytes() -> dict[str, int] | None:
    """Bytes "allocated" and "reserved" by torch on its current GPU; None where it uses none."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return {
        "allocated": int(torch.cuda.memory_allocated()),
        "reserved": int(torch.cuda.memory_reserved()),
    }


def process_bytes(read: Callable[[], str] = Path("/proc/self/status").read_text) -> dict[str, int]:
    """Resident bytes of this process: anonymous memory, and shared memory that it has touched."""
    found = dict.fromkeys((ANONYMOUS, SHARED), 0)
    for line in read().splitlines():
        key, _, value = line.partition(":")
        if key in found:
            found[key] = int(value.split()[0]) * 1024
    return found


def available_bytes(container: Path = CONTAINER) -> int:
    """Bytes that can be taken without swapping, within the container's limit."""
    found = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            found = int(line.split()[1]) * 1024
    return min(found, _left_in(container, found))


def _left_in(container: Path, without_limit: int) -> int:
    """Bytes that a control group still allows; cached files make way."""
    limit = container / "memory.max"
    said = limit.read_text().strip() if limit.exists() else "max"
    if said == "max":
        return without_limit
    parts = (line.split() for line in (container / "memory.stat").read_text().splitlines())
    cached = int(dict(parts).get("inactive_file", 0))
    return max(0, int(said) - int((container / "memory.current").read_text()) + cached)
