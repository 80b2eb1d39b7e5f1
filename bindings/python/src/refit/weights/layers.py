"""The weights of a module tree under the names that its inference engine knows.

Training wraps modules: DDP, ``torch.compile``, activation checkpointing and PEFT each put a module
of their own around one, and a component into every name below it. The walk goes through those
wrappers wherever they sit, so a name is the one that the plain model has, which is the one in its
Hugging Face checkpoint. It knows names and wrappers only, not what becomes of the tensors.
"""

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from refit.errors import UnsupportedError
from refit.weights.checkpoint_names import Piece, pieces_of
from refit.weights.merged import MergedLayer, chain_of, is_adapted, is_off, is_open
from refit.weights.wrappers import as_module, unwrapped
from refit.weights.zero import is_divided, shape_of


class Found(NamedTuple):
    """One parameter or buffer; `saved`: whether a checkpoint would have it."""

    name: str
    tensor: torch.Tensor
    is_parameter: bool
    saved: bool
    merged: MergedLayer | None = None
    """Makes the parameter with the adapters merged; `tensor` is without them then."""
    piece: Piece | None = None
    """What it is of `tensor`, which has to be gathered or merged first; None: all of it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight."""
        return tuple(shape_of(self.tensor)) if self.piece is None else self.piece.shape


def walk_weights(model: nn.Module, *, merge: bool = False) -> list[Found]:
    """Every parameter and buffer; tied ones come once per name.

    FSDP2 modules are resharded first, so that what is read is what the optimizer writes.
    UnsupportedError for FSDP1, and without `merge` for adapters that are not merged.
    """
    walk = _Walk(merge)
    walk.through(model, "")
    return _as_in_a_checkpoint(without_wrappers(model), walk.found)


def without_wrappers(model: nn.Module) -> nn.Module:
    """The model in all that is around it."""
    while model._modules and (inner := _inside(model, "")) is not None:
        model = inner
    return model


def _as_in_a_checkpoint(model: nn.Module, found: list[Found]) -> list[Found]:
    pieces = pieces_of(model, ((one.name, one.shape, one.tensor.dtype) for one in found))
    if pieces is None:
        return found
    sources = {one.name: one for one in found}
    return [_piece_of(sources[piece.source], name, piece) for name, piece in pieces.items()]


def _piece_of(source: Found, name: str, piece: Piece) -> Found:
    if piece.is_all_of(source.shape):
        return source._replace(name=name)
    tensor = source.tensor
    if source.merged is not None or isinstance(tensor, DTensor) or is_divided(tensor):
        return source._replace(name=name, piece=piece)
    return source._replace(name=name, tensor=piece.of(tensor.detach()))


class _Walk:
    def __init__(self, merge: bool) -> None:
        self.found: list[Found] = []
        self._merge = merge

    def through(self, module: nn.Module, prefix: str) -> None:
        if self._merge and is_adapted(module):
            self._through_adapters(module, prefix)
            return
        inner = _inside(module, prefix) if module._modules else None
        if inner is None:
            self._through_own(module, prefix, None)
        else:
            self.through(inner, prefix)

    def _through_adapters(self, layer: nn.Module, prefix: str) -> None:
        *adapters, base = chain_of(layer)
        for one in adapters:
            _refuse_merged_and_off(one, prefix)
        open_ones = [one for one in adapters if is_open(one)]
        if open_ones and "MultiheadAttention" in type(layer).__name__:
            raise UnsupportedError(
                f'the adapter of "{prefix.rstrip(".")}" cannot be merged into a copy, since its '
                "layer has weights that are not parameters: leave it out of target_modules"
            )
        for one in layer.modules():
            if isinstance(one, FSDPModule):
                one.reshard()
        if not open_ones:
            self.through(base, prefix)
        elif unwrapped(base) is None:
            self._through_own(base, prefix, MergedLayer(prefix.rstrip("."), layer))
        else:
            raise UnsupportedError(
                f'the adapter of "{prefix.rstrip(".")}" is around a {type(base).__name__}: put '
                "torch.compile and the checkpoint wrapper around layers with their adapters"
            )

    def _through_own(self, module: nn.Module, prefix: str, merged: MergedLayer | None) -> None:
        if isinstance(module, FSDPModule):
            module.reshard()
        for name, parameter in module._parameters.items():
            if parameter is not None:
                self.found.append(Found(prefix + name, parameter, True, True, merged))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                saved = name not in module._non_persistent_buffers_set
                self.found.append(Found(prefix + name, buffer, False, saved))
        for name, child in module._modules.items():
            if child is not None:
                self.through(child, f"{prefix}{name}.")


def _inside(module: nn.Module, prefix: str) -> nn.Module | None:
    """The module that `module` merely wraps; None if it is one of the model's own."""
    plain = unwrapped(module)
    if plain is not None:
        return plain
    if "_fsdp_wrapped_module" in module._modules:
        raise UnsupportedError(
            f'"{prefix.rstrip(".") or "the model"}" is wrapped by FullyShardedDataParallel, whose '
            "flat parameters have no names of their own: use torch.distributed.fsdp.fully_shard, "
            "or send dict(model.named_parameters()) within FSDP.summon_full_params(model)"
        )
    return _inside_peft(module, prefix)


def _inside_peft(module: nn.Module, prefix: str) -> nn.Module | None:
    """The same for what PEFT puts in, told by its attributes: the package may not be there."""
    if hasattr(module, "peft_config") and "base_model" in module._modules:
        base = as_module(module._modules["base_model"])
        if not any(True for _ in getattr(module, "prompt_encoder", nn.Module()).parameters()):
            return as_module(base._modules["model"]) if "model" in base._modules else base
        if vars(module).get("forward") != base.forward:  # what disable_adapter() puts there
            raise UnsupportedError(
                "the model has a prompt that was learnt, which is in none of its weights: send "
                "dict(model.prompt_encoder.named_parameters()) to an engine that takes it"
            )
        return base
    if "adaption_prompt" in module._parameters:
        raise UnsupportedError(
            f'"{prefix.rstrip(".")}" has a prompt that was learnt (AdaptionPrompt), which is in '
            "none of the model's weights: no engine takes it"
        )
    if is_adapted(module):
        _refuse_merged_and_off(module, prefix)
        if not module.merged and not is_off(module):
            raise UnsupportedError(
                f'the adapter of "{prefix.rstrip(".")}" is not merged, so these are not the '
                'weights that the policy has: use named_weights(model, lora="merged") for the '
                'weights with the adapters in them, or lora="adapter" for the adapters alone'
            )
        return as_module(module._modules["base_layer"])
    if "token_adapter" in module._modules and "original_module" in module._modules:
        return as_module(module._modules["token_adapter"])
    if "original_module" in module._modules and "modules_to_save" in module._modules:
        saved = as_module(module._modules["modules_to_save"])._modules
        active: Any = [] if is_off(module) else module.active_adapters
        if not active or any(one not in saved for one in active):
            return as_module(module._modules["original_module"])
        return as_module(saved[active[0]])
    return None


def _refuse_merged_and_off(layer: Any, prefix: str) -> None:
    if layer.merged and is_off(layer):
        raise UnsupportedError(
            f'the adapters of "{prefix.rstrip(".")}" are off, but merged: PEFT takes them out of '
            "the weights in the next forward pass; call unmerge_adapter before"
        )
