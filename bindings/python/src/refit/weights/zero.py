"""Weights that DeepSpeed's ZeRO 3 has divided among the ranks: their shapes and values.

Such a parameter is empty between two passes; its rank's part is in ``ds_tensor``. DeepSpeed is
imported only where there is one.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

AT_ONCE = 64 << 20
"""How many bytes are gathered at a time, or one weight that is larger: each time is a collective of
all ranks."""


def is_divided(tensor: Any) -> bool:
    """Whether ZeRO 3 has divided a parameter."""
    return hasattr(tensor, "ds_tensor") and hasattr(tensor, "ds_id")


def shape_of(tensor: Any) -> torch.Size:
    """The shape of all of it."""
    return torch.Size(tensor.ds_shape) if is_divided(tensor) else tensor.shape


def nbytes_of(tensor: Any) -> int:
    """The bytes of all of it."""
    return int(shape_of(tensor).numel() * tensor.element_size())


@contextmanager
def gathered(parameters: Iterable[Any]) -> Iterator[None]:
    """A block in which parameters have all their values, on all ranks; nothing for others.

    A collective. They must not be changed. A tensor that ``detach`` gave stays as it is after it.
    """
    divided = [one for one in parameters if is_divided(one)]
    if not divided:
        yield
        return
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    with GatheredParameters(divided):
        yield


def unwrapped_engine(module: Any) -> Any:
    """The model in an engine of DeepSpeed; None for another module."""
    for kind in type(module).__mro__:
        if kind.__name__ == "DeepSpeedEngine" and kind.__module__.startswith("deepspeed."):
            return module.module
    return None
