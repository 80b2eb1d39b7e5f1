"""The names that a checkpoint has, where a model of transformers holds its weights otherwise.

transformers 5 holds the experts of a mixture as one parameter, and names parts of some models
otherwise than their checkpoints do, which are the names that inference engines know. What
``save_pretrained`` does to get these is done here on tensors without memory: it tells of which
elements of which parameter each weight of a checkpoint is made. All are views; a weight that is
joined of several parameters is not known here.

transformers is not imported: a model of it shows that it is.
"""

import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from refit.errors import StateError, UnsupportedError
from refit.weights.source import ASLEEP, lacks_memory


class Piece(NamedTuple):
    """A weight of a checkpoint: elements of a parameter that lies in row order."""

    source: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def is_all_of(self, shape: Sequence[int]) -> bool:
        """Whether it is the parameter as it is. A square one may be turned, and have its shape."""
        rows = torch.empty(self.shape, device="meta").stride()
        return tuple(shape) == self.shape and self.stride == rows

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The view of the parameter, or of a copy in row order. StateError: it has no memory."""
        if self.is_all_of(whole.shape):
            return whole
        if lacks_memory(whole):
            raise StateError(f"{self.source}: {ASLEEP}")
        rows = whole.contiguous()
        return rows.as_strided(self.shape, self.stride, rows.storage_offset() + self.offset)


TensorMeta = tuple[str, tuple[int, ...], torch.dtype]
"""A parameter or buffer: its name, shape and type."""

_KNOWN: "weakref.WeakKeyDictionary[Any, tuple[list[TensorMeta], dict[str, Piece] | None]]"
_KNOWN = weakref.WeakKeyDictionary()


def pieces_of(model: Any, metas: Iterable[TensorMeta]) -> Mapping[str, Piece] | None:
    """By name the weights that a checkpoint would have; None: those that the model has.
    UnsupportedError: one is joined of several parameters."""
    loading: Any = sys.modules.get("transformers.core_model_loading")
    base: Any = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", ())
    if loading is None or not hasattr(loading, "revert_weight_conversion"):
        return None
    if not isinstance(model, base):
        return None
    metas = list(metas)
    if model not in _KNOWN or _KNOWN[model][0] != metas:
        _KNOWN[model] = metas, _found(model, metas, loading.revert_weight_conversion)
    return _KNOWN[model][1]


def _found(model: Any, metas: list[TensorMeta], revert: Any) -> dict[str, Piece] | None:
    stand_ins = {
        name: torch.empty(shape, dtype=dtype, device="meta") for name, shape, dtype in metas
    }
    with cast(Any, _Views)():
        made = revert(model, dict(stand_ins))
    sources = {one.untyped_storage()._cdata: name for name, one in stand_ins.items()}
    found = {}
    for name, one in made.items():
        source = sources.get(one.untyped_storage()._cdata)
        if source is None:
            raise UnsupportedError(
                f'weight "{name}" of the checkpoint is joined of several parameters of this '
                f"{type(model).__name__}, and would be copied: send what save_pretrained saves, or "
                "dict(model.named_parameters()) to an engine that has the same"
            )
        found[name] = Piece(source, tuple(one.shape), one.stride(), one.storage_offset())
    same = all(
        name == piece.source and piece.is_all_of(stand_ins[name].shape)
        for name, piece in found.items()
    )
    return None if same and found.keys() == stand_ins.keys() else found


class _Views(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A copy of a tensor is the tensor."""

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            return args[0]
        return func(*args, **(kwargs or {}))
