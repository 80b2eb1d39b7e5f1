"""What training puts around a module that computes nothing of its own.

DDP, DeepSpeed, ``torch.compile`` and activation checkpointing each keep the module that they wrap;
names below them have a component more. Nothing else is known here, so that a worker that loads a
version imports no more than it uses.
"""

from collections.abc import Callable

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from refit.errors import UnsupportedError
from refit.weights.zero import unwrapped_engine

_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")
"""Where torch.compile and the checkpoint wrapper keep the module that they wrap."""


def unwrapped(module: nn.Module) -> nn.Module | None:
    """The module in a wrapper of DDP, DeepSpeed, torch.compile or checkpointing; None for another
    module."""
    if isinstance(module, DistributedDataParallel | DataParallel):
        return as_module(module.module)
    engine = unwrapped_engine(module)
    if engine is not None:
        return as_module(engine)
    for name in _WRAPPED:
        if name in module._modules:
            return as_module(module._modules[name])
    return None


def plain_names(model: nn.Module) -> Callable[[str], str]:
    """What gives the name that a tensor of a model has without its wrappers."""
    inside = set()
    for name, module in model.named_modules(remove_duplicate=False):
        inner = unwrapped(module)
        prefix = f"{name}." if name else ""
        inside |= {prefix + key for key, child in module._modules.items() if child is inner}

    def plain(name: str) -> str:
        parts = name.split(".")
        prefixes = (".".join(parts[: at + 1]) for at in range(len(parts)))
        kept = [part for part, prefix in zip(parts, prefixes, strict=True) if prefix not in inside]
        return ".".join(kept)

    return plain


def as_module(found: object) -> nn.Module:
    """What a wrapper holds. UnsupportedError: it is not a module."""
    if not isinstance(found, nn.Module):
        raise UnsupportedError(f"a wrapper holds a {type(found).__name__} instead of a module")
    return found
