"""What a worker of vLLM lacks on a CPU."""

from typing import Any

from broken_worker import BrokenExtension


class OnCpu:
    """vLLM 0.22 to 0.24 prepare layers on the worker's device, which is None on a CPU. vLLM's own
    backends of the weight transfer fail there, too."""

    device: Any

    def name_device(self) -> None:
        """Says that the device is the CPU."""
        import torch

        if self.device is None:
            self.device = torch.device("cpu")


class BreakingOnCpu(OnCpu, BrokenExtension):
    """As OnCpu, and it fails when it is told to."""
