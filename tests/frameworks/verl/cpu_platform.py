"""verl's platform for a machine without a GPU, as verl's plugins write theirs.

Importing it registers it, ``VERL_PLATFORM=cpu`` chooses it; ``VERL_USE_EXTERNAL_MODULES`` makes
verl import it in each process.
"""

from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


def _nothing(*_given: Any, **_named: Any) -> None:
    """There is nothing to do on a CPU."""


class _Device:
    """``torch.cpu``, with what ``torch.cuda`` has besides and verl calls."""

    empty_cache = ipc_collect = reset_peak_memory_stats = staticmethod(_nothing)

    get_rng_state = staticmethod(torch.get_rng_state)
    set_rng_state = staticmethod(torch.set_rng_state)

    def memory_allocated(self, device: Any = None) -> int:
        return 0

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """The host: one device, whose name is what tensors are moved to."""

    device_name = "cpu"
    vendor_name = "host"
    device_module = _Device()
    set_device = synchronize = empty_cache = profiler_start = profiler_stop = _nothing
    set_allocator_settings = cudart = _nothing

    def is_available(self) -> bool:
        return True

    def is_ipc_supported(self) -> bool:
        return False

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "VERL_NO_DEVICES"

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    @contextmanager
    def nvtx_range(self, msg: str) -> Any:
        yield
