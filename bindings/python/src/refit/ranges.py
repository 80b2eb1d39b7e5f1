"""Phases as NVTX ranges, which Nsight Systems shows beside the kernels and copies.

``refit/offload``, ``refit/publish``, ``refit/commit``, ``refit/restore``: through
``torch.cuda.nvtx`` where torch is loaded and has a GPU; everywhere else a range is nothing and
costs a look-up. torch is never imported for it.
"""

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any


def nvtx_range(label: str) -> AbstractContextManager[Any]:
    """A context manager that shows ``label`` in a profile, or does nothing without a GPU.

    Does not block. Since 0.1.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return nullcontext()
    shown: AbstractContextManager[Any] = torch.cuda.nvtx.range(label)
    return shown
