"""The version of a tensor, which outlives its memory.

PyTorch counts the in-place changes of a tensor, and its views and detached tensors share the
counter. A detached tensor keeps it even when its data are replaced by none.
"""

import torch


def counter_of(tensor: torch.Tensor, empty: torch.Tensor | None = None) -> torch.Tensor:
    """A tensor without memory that has the version of ``tensor``, now and later. ``empty``: a
    strided tensor without elements. RuntimeError if the tensor has no version."""
    if tensor.is_conj():
        tensor = torch._conj(tensor)
    if tensor.is_neg():
        tensor = torch._neg_view(tensor)
    counter = tensor.detach()
    if empty is None:
        empty = tensor.new_empty((0,) * (1 if tensor.layout is torch.strided else tensor.dim()))
    counter.data = empty
    return counter
