"""A plugin of SGLang for machines without a GPU: page-locked memory is memory, no GPU has work.

SGLang's LoRA layers page-lock small tensors, and its sleep waits for the GPU, on CPUs, too, where
PyTorch refuses both. Whether memory is page-locked changes no value in it; where there is no GPU
there is nothing to wait for. The arithmetic that the tests compare is SGLang's own.
"""

import functools
from typing import Any


def install() -> None:
    import torch

    if torch.cuda.is_available():
        return
    for name in ("tensor", "empty", "zeros", "ones"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]


def _unpinned(make: Any) -> Any:
    @functools.wraps(make)
    def without(*values: Any, **named: Any) -> Any:
        named.pop("pin_memory", None)
        return make(*values, **named)

    return without
