"""What refit's two ways into a vLLM worker share: its name, and the beginning and ends of a load.

The ways are in _vllm_extension.py (the worker extension) and _vllm_transfer.py (vLLM's weight
transfer).
Drawn after vllm/model_executor/model_loader/reload/layerwise.py.
"""

import importlib
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from refit.errors import StateError

LAYERWISE = "vllm.model_executor.model_loader.reload.layerwise"


def worker_name(rank: object) -> str:
    """This worker's name in the trainer's reports."""
    place = "" if rank is None else f"-rank{rank}"
    return f"vllm-{socket.gethostname()}-{os.getpid()}{place}"[:63]


def synchronize(device: Any) -> None:
    """Waits until the copies into the model are done: the next version may overwrite what they
    read."""
    import torch

    if device is not None and torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def refuse_asleep() -> None:
    """StateError if the memory of the weights is given back: a write there ends the process."""
    module = sys.modules.get("vllm.device_allocator.cumem")
    allocator = None if module is None else getattr(module.CuMemAllocator, "instance", None)
    if allocator is None:
        return
    parts = allocator.pointer_to_data.values()
    if any(getattr(one, "is_asleep", False) and one.tag == "weights" for one in parts):
        raise StateError(
            'the engine sleeps, and its weights have no memory: wake_up(tags=["weights"]) before '
            'an update, and wake_up(tags=["kv_cache"]) after it'
        )


def together(value: Any) -> list[Any]:
    """What all workers of this engine say, in the order of their ranks; blocks until all did.

    Group by group, since vLLM's group of all workers may span several engines.
    """
    state = importlib.import_module("vllm.distributed.parallel_state")
    said = [value]
    for kind in ("tp", "pcp", "pp"):
        group_of = getattr(state, f"get_{kind}_group", None)
        group = None if group_of is None else group_of()
        if group is not None and group.world_size > 1:
            said = [one for part in _gathered(said, group) for one in part]
    return said


def _gathered(value: list[Any], group: Any) -> list[list[Any]]:
    import torch.distributed

    said: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(said, value, group=group.cpu_group)
    return said


@contextmanager
def restoring(model: Any) -> Iterator[None]:
    """If the block fails, layers that were not yet loaded whole get their old tensors back.

    Without this vLLM leaves such layers without memory, so that the next request ends the engine,
    and counts what they were given as part of the next version, which is then torn. Layers that
    were loaded whole are new.
    """
    try:
        yield
    except BaseException as why:
        put_back(model, why)
        raise


def put_back(model: Any, why: BaseException) -> None:
    """Gives layers that are being reloaded their old tensors back; what fails here is a note of
    `why`, the exception that ended their load."""
    try:
        _put_back(model)
    except Exception as more:
        why.add_note(f"layers could not be put back ({more!r}): make this vLLM engine again")


def _put_back(model: Any) -> None:
    layerwise = importlib.import_module(LAYERWISE)
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)
            info.reset()
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload
