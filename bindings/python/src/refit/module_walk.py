"""The weights of a module tree under the names that its inference engine knows.

Training wraps modules: DDP, ``torch.compile``, activation checkpointing and PEFT each put a module
of their own around one, and a component into every name below it. The walk goes through those
wrappers wherever they sit, so a name is the one that the plain model has, which is the one in its
Hugging Face checkpoint. It knows names and wrappers only, not what becomes of the tensors.
"""

from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DataParallel, DistributedDataParallel

from refit.errors import UnsupportedError

_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")
"""Where torch.compile and the checkpoint wrapper keep the module that they wrap."""


class Found(NamedTuple):
    """One parameter or buffer; `saved`: whether a checkpoint would have it."""

    name: str
    tensor: torch.Tensor
    is_parameter: bool
    saved: bool


def walk_weights(model: nn.Module) -> list[Found]:
    """Every parameter and buffer; tied ones come once per name.

    FSDP2 modules are resharded first, so that what is read is what the optimizer writes.
    UnsupportedError for FSDP1 and for adapters that are not merged.
    """
    found: list[Found] = []
    _walk(model, "", found)
    return found


def _walk(module: nn.Module, prefix: str, found: list[Found]) -> None:
    inner = _inside(module, prefix) if module._modules else None
    if inner is not None:
        _walk(inner, prefix, found)
        return
    if isinstance(module, FSDPModule):
        module.reshard()
    for name, parameter in module._parameters.items():
        if parameter is not None:
            found.append(Found(prefix + name, parameter, True, True))
    for name, buffer in module._buffers.items():
        if buffer is not None:
            saved = name not in module._non_persistent_buffers_set
            found.append(Found(prefix + name, buffer, False, saved))
    for name, child in module._modules.items():
        if child is not None:
            _walk(child, f"{prefix}{name}.", found)


def _inside(module: nn.Module, prefix: str) -> nn.Module | None:
    """The module that `module` merely wraps; None if it is one of the model's own."""
    if isinstance(module, DistributedDataParallel | DataParallel):
        return _as_module(module.module)
    if "_fsdp_wrapped_module" in module._modules:
        raise UnsupportedError(
            f'"{prefix.rstrip(".") or "the model"}" is wrapped by FullyShardedDataParallel, whose '
            "flat parameters have no names of their own: use torch.distributed.fsdp.fully_shard, "
            "or send dict(model.named_parameters()) within FSDP.summon_full_params(model)"
        )
    for name in _WRAPPED:
        if name in module._modules:
            return _as_module(module._modules[name])
    return _inside_peft(module, prefix)


def _inside_peft(module: nn.Module, prefix: str) -> nn.Module | None:
    """Likewise for what PEFT puts in, told by its attributes: the package may not be there."""
    if hasattr(module, "peft_config") and "base_model" in module._modules:
        base = _as_module(module._modules["base_model"])
        return _as_module(base._modules["model"]) if "model" in base._modules else base
    if "base_layer" in module._modules and hasattr(module, "merged"):
        if not module.merged:
            raise UnsupportedError(
                f'the adapter of "{prefix.rstrip(".")}" is not merged, so these are not the '
                "weights that the policy has: call model.merge_adapter() before, and "
                "model.unmerge_adapter() after"
            )
        return _as_module(module._modules["base_layer"])
    if "original_module" in module._modules and "modules_to_save" in module._modules:
        saved = _as_module(module._modules["modules_to_save"])
        active = getattr(module, "active_adapter", None)
        chosen = active if isinstance(active, str) else "default"
        return _as_module(saved._modules.get(chosen) or module._modules["original_module"])
    return None


def _as_module(found: object) -> nn.Module:
    if not isinstance(found, nn.Module):
        raise UnsupportedError(f"a wrapper holds a {type(found).__name__} instead of a module")
    return found
