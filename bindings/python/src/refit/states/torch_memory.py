"""A device's memory as PyTorch has it: streams, allocator, storages, graph captures, and the heap.

States, steps and activations ask here. ``Devices`` gives the C library's handle of a device.
Independent of what leaves, and of when.
"""

import ctypes
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from refit._c.config import Config
from refit._c.device import Device, spec_of, stream_of
from refit._c.waiting import interrupts_held
from refit.errors import RefitError, StateError
from refit.observe import memory_now
from refit.states.offloader import NO_STREAM


def configured_spec(device: torch.device, config: Config) -> str:
    """The C library's spec of a device of torch; the configuration may bound its capacity."""
    plain = spec_of(device)
    chosen = str(config.get("device"))
    return chosen if chosen.startswith(f"{plain}:capacity") else plain


def current_stream(device: torch.device) -> int:
    """The native handle of torch's current stream; none for the CPU, whose work is done."""
    if device.type != "cuda":
        return NO_STREAM
    return stream_of(device.index)


def stream_objects(device: torch.device) -> dict[int, Any]:
    """torch's current stream as PyTorch's functions take it, by its handle; none for the CPU."""
    stream = current_stream(device)
    return {} if stream == NO_STREAM else {stream: torch.cuda.current_stream(device)}


def used_on(storages: Iterable[torch.UntypedStorage], streams: Iterable[Any]) -> None:
    """Tells PyTorch's allocator that these streams of a GPU use storages.

    Freed memory goes back to the stream on which it was taken, which PyTorch does not tell, and
    whose next work may write to it. From now on it goes there once these streams have done what
    they had queued when it was freed. For the stream on which it was taken that changes nothing.
    """
    streams = list(streams)
    if not streams:
        return
    # Neither a mode nor a subclass of others is to see these calls: checkpointing counts calls.
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        for storage in storages:
            tensor = torch.empty(0, dtype=torch.uint8, device=storage.device)
            tensor.set_(storage, 0, (storage.nbytes(),), (1,))
            for stream in streams:
                tensor.record_stream(stream)


def make_wait(waiting: Mapping[int, Any], others: Mapping[int, Any]) -> None:
    """Streams wait for what others have queued by now."""
    for handle, stream in waiting.items():
        for other in others.keys() - {handle}:
            stream.wait_stream(others[other])


def device_guard(device: torch.device) -> AbstractContextManager[Any]:
    """Makes ``device`` the current one, where memory is then allocated."""
    return _current(device) if device.type == "cuda" else nullcontext()


@contextmanager
def _current(device: torch.device) -> Iterator[None]:
    with interrupts_held(), torch.cuda.device(device):
        yield


def lacks_memory(why: BaseException) -> bool:
    """Whether an exception of PyTorch says that the device, or the CPU, has no memory.

    An allocation on a CPU raises a RuntimeError with this text, and one of the CUDA driver, too.
    """
    if isinstance(why, RefitError):
        return False
    if isinstance(why, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(why)
    return isinstance(why, RuntimeError) and (
        "DefaultCPUAllocator" in text or "CUDA error: out of memory" in text
    )


def refuse_capture(device: torch.device) -> None:
    """StateError while a CUDA graph is being captured: it would hold addresses that change."""
    with device_guard(device):  # what is asked is the current stream of the current device
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if capturing:
        raise StateError(
            "a CUDA graph is being captured: states cannot move then, and a captured graph would "
            "hold their old addresses. Capture while they stay, or give them addresses that stay "
            "with refit.mem_pool()"
        )


def usable_bytes(device: torch.device) -> int:
    """The most bytes that PyTorch's allocator could give at once on a GPU, with what it has given
    and what it keeps."""
    free, whole = torch.cuda.mem_get_info(device)
    share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)
    return min(free + torch.cuda.memory_reserved(device), int(whole * share))


def empty_storage(nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """Memory of PyTorch's own, of any content. RuntimeError or MemoryError if there is none."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()


# PyTorch 2.6 has it in its builds for GPUs alone.
_count: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda _: 0)


def users_of(storage: torch.UntypedStorage) -> int:
    """The number of references to a storage; 0 if this PyTorch does not tell."""
    return _count(storage._cdata)


def give_heap_back() -> None:
    """Returns freed heap memory to the system, as ``empty_cache`` does on a GPU.

    Freed tensors of a few MiB would stay in the C heap otherwise. A page that also has memory in
    use stays. Does nothing without glibc.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def resident_bytes() -> int:
    """Anonymous memory that the system has given this process; 0 if it does not say."""
    try:
        return memory_now.process_bytes()[memory_now.ANONYMOUS]
    except OSError:  # no /proc: the states can leave all the same
        return 0


class Devices:
    """The handles of devices that several objects share, and with them ``offload.budget_bytes``.

    ``known``: handles that are there. Others are opened when they are first asked for, and live as
    long as those that asked. One thread at a time.
    """

    def __init__(self, config: Config, known: Mapping[torch.device, Device]) -> None:
        self._config = config
        self._handles: weakref.WeakValueDictionary[torch.device, Device] = (
            weakref.WeakValueDictionary(known)
        )

    def __getitem__(self, device: torch.device) -> Device:
        found = self._handles.get(device)
        if found is None or found.closed:
            found = Device(configured_spec(device, self._config), self._config)
            self._handles[device] = found
        return found
