"""How much memory this process takes at this moment, on its device and on the host.

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
