"""What training puts around a module that computes nothing of its own.

DDP, DeepSpeed, ``torch.compile`` and activation checkpointing each keep the module that they wrap;
names below them have a component more. Nothing else is known here, so that a worker that loads a
version imports no more than it uses.
"""

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from refit._zero import unwrapped_engine
from refit.errors import UnsupportedError

WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")
"""Where torch.compile and the checkpoint wrapper keep the module that they wrap."""


def unwrapped(module: nn.Module) -> nn.Module | None:
    """The module in a wrapper of DDP, DeepSpeed, torch.compile or checkpointing; None for another
    module."""
    if isinstance(module, DistributedDataParallel | DataParallel):
        return as_module(module.module)
    engine = unwrapped_engine(module)
    if engine is not None:
        return as_module(engine)
    for name in WRAPPED:
        if name in module._modules:
            return as_module(module._modules[name])
    return None


def as_module(found: object) -> nn.Module:
    """What a wrapper holds. UnsupportedError: it is no module."""
    if not isinstance(found, nn.Module):
        raise UnsupportedError(f"a wrapper holds a {type(found).__name__} instead of a module")
    return found
