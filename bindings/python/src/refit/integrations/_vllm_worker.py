"""What refit's two ways into a vLLM worker share: its name, and the end of its copies.

The ways are in vllm.py (the worker extension) and _vllm_transfer.py (vLLM's weight transfer).
"""

import os
import socket
from typing import Any


def worker_name(rank: object) -> str:
    place = "" if rank is None else f"-rank{rank}"
    return f"vllm-{socket.gethostname()}-{os.getpid()}{place}"[:63]


def synchronize(device: Any) -> None:
    """Waits until the copies into the model are done: the next version may overwrite what they
    read."""
    import torch

    if device is not None and torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
