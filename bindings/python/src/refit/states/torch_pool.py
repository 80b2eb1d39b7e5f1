"""PyTorch's part of a memory pool: its allocator, the settings that a pool needs, what is alive.

All functions that are PyTorch's own affair stand here, those without a promise of PyTorch's too.
Independent of arenas, and of what the pool is for.
"""

import ctypes
import functools
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from refit._c.library import lib
from refit._c.waiting import interrupts_held
from refit.errors import UnsupportedError
from refit.states.torch_memory import device_guard

_EXPANDABLE = re.compile(r"expandable_segments\s*:\s*(\w+)")


def refuse_unfit() -> None:
    """UnsupportedError for a PyTorch whose pools lose memory that is in use, or that has none."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8):
        raise UnsupportedError(
            f"refit.mem_pool() needs PyTorch 2.8 or later, and this is {torch.__version__}, which "
            "gives memory of a dropped pool to cudaFree. 2.11 or later is better: its pools keep "
            "their allocator alive. Without a pool the states leave all the same"
        )
    backend = torch.cuda.memory.get_allocator_backend()
    if backend != "native":
        raise UnsupportedError(
            f"refit.mem_pool() needs PyTorch's own allocator, and this process has {backend}: take "
            "backend:cudaMallocAsync out of PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF"
        )


@functools.cache
def _allocator() -> Any:
    """refit's two functions, as PyTorch wants them; one object serves every pool and device.

    It is never freed, not even when the interpreter ends: before PyTorch 2.11 a pool keeps a bare
    pointer to it, and uses that for as long as a tensor of the pool is alive.
    """
    kind: Any = torch.cuda.memory.CUDAPluggableAllocator
    made = kind(lib._name, "refit_torch_alloc", "refit_torch_free").allocator()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
    return made


def make_pool(device: torch.device) -> "torch.cuda.MemPool":
    """A pool of PyTorch's on ``device``, which allocates by refit's functions."""
    with device_guard(device):  # PyTorch ties the allocator to the device that is current
        return torch.cuda.MemPool(_allocator())


@contextmanager
def allocating(pool: "torch.cuda.MemPool", device: torch.device) -> Iterator[None]:
    """This thread's allocations on ``device`` within the block come from ``pool``.

    Gives PyTorch's cached memory back first: PyTorch does not while a pool is in use, and reports
    out of memory instead.
    """
    entered = ExitStack()
    try:
        with interrupts_held():  # else Ctrl-C could leave the pool in use
            entered.enter_context(_fixed_segments())
            torch.cuda.empty_cache()
            entered.enter_context(torch.cuda.use_mem_pool(pool, device))
        yield
    finally:
        with interrupts_held():
            entered.close()


def live_bytes(pool: Any) -> int:
    """The bytes of a pool that tensors use."""
    return sum(segment["allocated_size"] for segment in pool.snapshot())


# ---- expandable segments ---------------------------------------------------------------------


class _FixedSegments:
    """Keeps expandable segments off while a pool is in use, and restores the setting.

    With them PyTorch maps memory by itself: a pool raises then, or its allocator is passed over and
    addresses do not stay. The setting is the process's, so the first to come switches it off and
    the last to go switches it on.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before: str | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if self._users == 0:
                self._before = _switch_off()
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0 and self._before is not None:
                    _apply(self._before)


_fixed_segments = _FixedSegments()


def _switch_off() -> str | None:
    """Switches expandable segments off. Returns what brings all back; None if they were off."""
    settings = _settings()
    if not settings["expandable_segments"]:
        return None
    given = str(settings.get("PYTORCH_CUDA_ALLOC_CONF", "")).rstrip(", ")
    try:
        _apply(_with(given, False))
    except RuntimeError as why:
        raise UnsupportedError(f"{_REFUSED}: {why}") from why
    if _settings()["expandable_segments"]:
        _apply(given)
        raise UnsupportedError(_REFUSED)
    named = _EXPANDABLE.findall(given)
    # One that was set in an earlier call is on without standing in the last one's text.
    return given if named and named[-1] == "True" else _with(given, True)


_REFUSED = (
    "a pool cannot be used with PyTorch's expandable segments, and they could not be switched off: "
    "take expandable_segments:True out of PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF"
)


def _settings() -> dict[str, Any]:
    """The allocator's settings as they are, whichever variable or call they came from."""
    found: dict[str, Any] = torch.cuda.memory._snapshot()["allocator_settings"]
    return found


def _with(given: str, expandable: bool) -> str:
    """Settings with this one besides. All must be said: what is left out, PyTorch resets."""
    return f"{given}{',' if given else ''}expandable_segments:{expandable}"


def _apply(settings: str) -> None:
    change = torch.cuda.memory._set_allocator_settings
    # Inside it is the function without the deprecation warning of PyTorch 2.13: what is to be
    # called in its place, 2.8 does not have.
    getattr(change, "__wrapped__", change)(settings)
