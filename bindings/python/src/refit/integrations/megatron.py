"""What a Megatron-Core optimizer holds, in the words of ``refit.Controller``.

    held = refit.integrations.megatron.unwrap(optimizer, model)
    controller = refit.Controller(held)                   # or of `optimizer`: it is recognized
    held.release_gradients(step_open=False)               # where the framework does not do that

A Megatron optimizer is a wrapper: a ``ChainedOptimizer`` of several, a ``DistributedOptimizer``
around a torch or Transformer Engine optimizer, or a stub around nothing on a rank without
parameters. Its bytes are at three places: the states of the innermost optimizers (also
``master_param``, where the optimizer is precision aware), the fp32 masters that the wrapper keeps
beside them, and the flat grad buffers of the model. This file finds them and translates nothing
else; it knows no Megatron module and imports none.

Never moved, and listed with the reason: fp32 groups that are views of the model's own weights, what
a ``HybridDeviceOptimizer`` places by itself, grad buffers that NCCL has registered or that share
their memory with weights.

The shapes are those of megatron/core/optimizer/{optimizer,distrib_optimizer}.py and
megatron/core/distributed/param_and_grad_buffer.py (NVIDIA/Megatron-LM main, 2026-08).
"""

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from refit.errors import StateError, UnsupportedError
from refit.integrations import state_offload
from refit.integrations._overlay import Overlay, precede
from refit.step.schedule import CpuStep

MASTERS = ("shard_fp32_from_float16_groups", "fp32_from_float16_groups")
"""Where wrappers keep fp32 masters: the distributed optimizer, and the plain fp16/bf16 one."""

MASTER = "master_param"
"""The state of Transformer Engine's FusedAdam that is an fp32 master, where it keeps one."""

WEIGHTS = {
    "shard_fp32_from_float16_groups": ("shard_float16_groups", "model_float16_groups"),
    "fp32_from_float16_groups": ("float16_groups",),
}
"""Where the weights of those are, in lists of the same shape: this rank's shards of them, or, where
a wrapper does not keep those, the parameters."""

ALIASES = ("shard_fp32_groups", "fp32_from_fp32_groups")
"""Where they keep parameters that are fp32 already: these are the model's own."""

_ROUNDING = "_copy_main_params_to_model_params"
_COPIED = {
    "shard_fp32_from_float16_groups": "model_float16_groups",
    "fp32_from_float16_groups": "float16_groups",
}
"""Megatron's method that copies masters to weights, and the lists that it goes through together."""
_REMAKING = ("_copy_model_params_to_main_params", "load_state_dict")
"""Those which give all masters other bytes: of the weights, or of a checkpoint."""

Key = tuple[str, int]


class MegatronOptimizer:
    """The optimizers and tensors of one Megatron optimizer. Made by ``unwrap``; borrows both.

    Each call looks at the optimizer again, since states and buffers come and go.
    """

    def __init__(self, optimizer: Any, model: Any = None) -> None:
        self.wrapped = optimizer
        self._chunks = _as_list(model)

    @property
    def wrappers(self) -> list[Any]:
        """The Megatron optimizers that have parameters on this rank, chains taken apart."""
        return [one for one in _links(self.wrapped) if not _is_stub(one)]

    @property
    def inner(self) -> list[torch.optim.Optimizer]:
        """The torch optimizers whose states may be moved."""
        return [one.optimizer for one in self.wrappers if not _is_hybrid(one.optimizer)]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The fp32 masters beside the states, by name; none that is a view of a weight."""
        weights = self._weight_keys()
        for name, tensor in self._masters():
            if _key(tensor) not in weights:
                yield name, tensor

    def weights(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The fp32 masters, and of each the model's weights that are rounded from it.

        A precision-aware optimizer keeps them in the states of the weights.
        """
        for inner in self.inner:
            for weight, state in inner.state.items():
                master = state.get(MASTER) if isinstance(state, dict) else None
                if torch.is_tensor(master):
                    yield master, weight
        for one in self.wrappers:
            for attribute in MASTERS:
                masters = _as_list(getattr(one, attribute, None))
                for name in WEIGHTS[attribute]:
                    weights = _as_list(getattr(one, name, None))
                    if weights:
                        yield from _pairs(masters, weights)
                        break

    def stepped_masters(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The masters that can live on the host (``HostStates``), and the weights of each: those
        from which the wrapper rounds weights of a plain type after each step, and by no other way.
        """
        owned = {id(tensor) for _, tensor in self.tensors()}
        for one in self.wrappers:
            if not _rounds_after_steps(one):
                continue
            for attribute in MASTERS:
                masters = _as_list(getattr(one, attribute, None))
                for name in WEIGHTS[attribute]:
                    weights = _as_list(getattr(one, name, None))
                    if weights:
                        pairs = _pairs(masters, weights)
                        yield from (pair for pair in pairs if id(pair[0]) in owned)
                        break

    def leave_out(self, is_rounded: Callable[[torch.Tensor], bool]) -> Callable[[], None]:
        """From now on Megatron's copy of masters to weights, after a step, leaves those out of
        which this is True. What it gives undoes that."""
        told = [one for one in self.wrappers if _rounds_after_steps(one)]
        for one in told:
            setattr(one, _ROUNDING, Overlay(one, _ROUNDING, _narrowed(one, is_rounded)))

        def undo() -> None:
            for one in told:
                vars(one).pop(_ROUNDING, None)

        return undo

    def before_remaking(self, call: Callable[[], None]) -> Callable[[], None]:
        """From now on this is called before Megatron gives all masters other bytes, in
        ``reload_model_params`` and ``load_state_dict``. What it gives undoes that."""
        undoing = [
            precede(one, name, call)
            for one in self.wrappers
            for name in _REMAKING
            if _rounds_after_steps(one) and callable(getattr(type(one), name, None))
        ]

        def undo() -> None:
            for each in undoing:
                each()

        return undo

    def modules(self) -> Iterator[torch.nn.Module]:
        """The model, or its chunks."""
        for chunk in self._all_chunks():
            if isinstance(chunk, torch.nn.Module):
                yield chunk

    def round_others(self) -> None:
        """Megatron's copy of masters to weights. What it does to gather them from other ranks
        after a step is the caller's."""
        for one in self.wrappers:
            if _rounds_after_steps(one):
                getattr(one, _ROUNDING)()

    def others(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The flat buffers, which move by Megatron's own methods if at all, although the gradients
        of fp32 parameters lie in them."""
        for name, buffer in self._buffers():
            yield name, buffer.grad_data

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The flat grad buffers that may be discarded or kept; not those that are away."""
        for name, buffer in self._buffers():
            if self._why_grads_stay(buffer) is None:
                yield name, buffer.grad_data

    def release_gradients(self, *, step_open: bool) -> int:
        """Gives the memory of the grad buffers back; they return as zeros. Returns how many went.

        By Megatron's own methods, so that its own reload finds what it left. `step_open`: whether
        gradients are there that no step has used, which Megatron does not know; they would be lost,
        so that is StateError.
        """
        if step_open:
            raise StateError(
                "a training step is open, and giving the grad buffers back would lose what it has "
                "accumulated: step first, or leave them"
            )
        return self._tell_buffers("offload_to_cpu", lambda one: self._why_grads_stay(one) is None)

    def restore_gradients(self) -> int:
        """Takes the memory of the grad buffers again, zeroed. Returns how many came."""
        return self._tell_buffers("reload_from_cpu", _is_away)

    def _tell_buffers(self, method: str, which: Callable[[Any], bool]) -> int:
        told = [buffer for _, buffer in self._buffers() if which(buffer)]
        for buffer in told:
            getattr(buffer, method)(move_params=False, move_grads=True)
        return len(told)

    def _why_grads_stay(self, buffer: Any) -> str | None:
        return _why_grads_stay(buffer, self._configs())

    @property
    def resident(self) -> list[tuple[str, str]]:
        """Tensors that stay on the device, and why."""
        return list(self._staying())

    def _staying(self) -> Iterator[tuple[str, str]]:
        for index, one in enumerate(self.wrappers):
            if _is_hybrid(one.optimizer):
                yield f"optimizer {index}", "a HybridDeviceOptimizer places its states by itself"
        weights = self._weight_keys()
        for name, tensor in self._masters():
            if _key(tensor) in weights:
                yield name, "it is a view of the model's weights"
        for name, _ in self._grouped(ALIASES):
            yield name, "an fp32 parameter is its own master: the model's weight"
        for name, buffer in self._buffers():
            reason = self._why_grads_stay(buffer)
            if reason is not None:
                yield name, reason

    def _masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._grouped(MASTERS)

    def _grouped(self, names: tuple[str, ...]) -> Iterator[tuple[str, torch.Tensor]]:
        for index, one in enumerate(self.wrappers):
            if _is_hybrid(one.optimizer):
                continue
            for attribute in names:
                for place, tensor in _flat(getattr(one, attribute, None)):
                    yield f"optimizer.{index}.{attribute}.{place}", tensor

    def _weight_keys(self) -> set[Key]:
        """The storages of the model's weights."""
        keys = {_key(tensor) for _, tensor in self._grouped(ALIASES)}
        for chunk in self._all_chunks():
            keys.update(_key(parameter) for parameter in chunk.parameters())
        for _, buffer in self._all_buffers():
            if torch.is_tensor(getattr(buffer, "param_data", None)):
                keys.add(_key(buffer.param_data))
        return keys

    def _all_chunks(self) -> list[Any]:
        known = list(self._chunks)
        for one in self.wrappers:
            known += _as_list(getattr(one, "model_chunks", None))
        return list({id(chunk): chunk for chunk in known}.values())

    def _all_buffers(self) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()
        for at, chunk in enumerate(self._all_chunks()):
            for kind in ("buffers", "expert_parallel_buffers"):
                found = getattr(chunk, kind, None)
                # On a plain module `buffers` is torch's method, not Megatron's list.
                for index, buffer in enumerate(found if isinstance(found, list) else []):
                    if id(buffer) not in seen:
                        seen.add(id(buffer))
                        yield f"model.{at}.{kind}.{index}.grad_data", buffer

    def _buffers(self) -> Iterator[tuple[str, Any]]:
        for name, buffer in self._all_buffers():
            if torch.is_tensor(getattr(buffer, "grad_data", None)):
                yield name, buffer

    def _configs(self) -> list[Any]:
        chunks = [getattr(chunk, "ddp_config", None) for chunk in self._all_chunks()]
        return chunks + [getattr(one, "config", None) for one in self.wrappers]


def unwrap(optimizer: Any, model: Any = None) -> MegatronOptimizer:
    """Looks into a Megatron optimizer; `model` is the DDP model or the list of its chunks.

    UnsupportedError for something that is neither a Megatron optimizer nor a chain of them. Does
    not block; moves nothing.
    """
    if not is_megatron(optimizer):
        raise UnsupportedError(
            f"a {type(optimizer).__name__} is not a Megatron optimizer: it has neither "
            "chained_optimizers nor an optimizer of its own; give a torch optimizer to "
            "refit.Controller directly"
        )
    return MegatronOptimizer(optimizer, model)


def offload_keywords(options: Any) -> dict[str, Any]:
    """The keywords of ``refit.Controller`` for the offload of states that Megatron's options ask
    for, as ``refit.integrations.state_offload.keywords`` reads them.

    Empty, with a warning, if the CPU is to step and the optimizers that Megatron makes in this
    process are those of Transformer Engine or Apex, which step on GPUs only: leave Megatron its own
    offload then.
    """
    found = state_offload.keywords(options)
    if not isinstance(found.get("schedule"), CpuStep) or _makes_optimizers_of_pytorch():
        return found
    warnings.warn(
        f"{state_offload.CPU_STEP} stays Megatron's own: the optimizer that it makes without it is "
        "one of Transformer Engine or Apex, which steps on GPUs only, and refit steps those of "
        "PyTorch on the CPU",
        stacklevel=2,
    )
    return {}


def _makes_optimizers_of_pytorch() -> bool:
    """By what Megatron found when it was imported; where it is not, nothing says the contrary."""
    megatron = sys.modules.get("megatron.core.optimizer")
    return bool(getattr(megatron, "USING_PYTORCH_OPTIMIZER", True))


def is_megatron(optimizer: Any) -> bool:
    """Whether it is built like Megatron's: a chain, or a wrapper with a state of its own."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return False
    chained = isinstance(getattr(optimizer, "chained_optimizers", None), list)
    return chained or (hasattr(optimizer, "optimizer") and hasattr(optimizer, "_get_state"))


def _links(optimizer: Any) -> Iterator[Any]:
    chain = getattr(optimizer, "chained_optimizers", None)
    if isinstance(chain, list):
        for one in chain:
            yield from _links(one)
    else:
        yield optimizer


def _is_stub(optimizer: Any) -> bool:
    stub = bool(getattr(optimizer, "is_stub_optimizer", False))
    return stub or getattr(optimizer, "optimizer", None) is None


def _is_hybrid(inner: Any) -> bool:
    """By name, since importing Megatron's class would import Megatron."""
    return any(kind.__name__ == "HybridDeviceOptimizer" for kind in type(inner).__mro__)


def _flat(groups: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of groups of lists. Entries are None where another rank has that parameter."""
    for at, group in enumerate(_as_list(groups)):
        for index, tensor in enumerate(_as_list(group)):
            if torch.is_tensor(tensor) and tensor.numel() > 0:
                yield f"{at}.{index}", tensor


def _pairs(masters: list[Any], weights: list[Any]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What stands at the same place of both lists of lists; either may be None there."""
    for ours, theirs in zip(masters, weights, strict=False):
        for master, weight in zip(_as_list(ours), _as_list(theirs), strict=False):
            if torch.is_tensor(master) and torch.is_tensor(weight):
                yield master, weight


def _rounds_after_steps(one: Any) -> bool:
    """Whether a wrapper copies its masters to plain weights after each step."""
    configs = [getattr(one, "config", None), getattr(one, "ddp_config", None)]
    elsewhere = ("reuse_grad_buf_for_mxfp8_param_ag", "use_megatron_fsdp")
    return (
        callable(getattr(type(one), _ROUNDING, None))
        and not _is_hybrid(one.optimizer)
        and not any(_any_set(configs, name) for name in elsewhere)
    )


def _narrowed(one: Any, is_rounded: Callable[[torch.Tensor], bool]) -> Callable[[], None]:
    """Megatron's method, for the masters of which this is False."""

    def copy_main_params_to_model_params() -> None:
        before = {}
        left = False
        for masters, models in _COPIED.items():
            pairs = [
                [pair for pair in zip(ours, theirs, strict=False) if not is_rounded(pair[0])]
                for ours, theirs in zip(
                    _as_list(getattr(one, masters, None)),
                    _as_list(getattr(one, models, None)),
                    strict=False,
                )
            ]
            if pairs:
                left = left or any(pairs)
                before.update({name: getattr(one, name) for name in (masters, models)})
                setattr(one, masters, [[pair[0] for pair in group] for group in pairs])
                setattr(one, models, [[pair[1] for pair in group] for group in pairs])
        try:
            if left or hasattr(one, "shard_fp32_groups"):  # which the same method copies
                getattr(type(one), _ROUNDING)(one)
        finally:
            for name, groups in before.items():
                setattr(one, name, groups)

    return copy_main_params_to_model_params


def _why_grads_stay(buffer: Any, configs: Iterable[Any]) -> str | None:
    if getattr(buffer, "nccl_ub", False) or _any_set(configs, "nccl_ub"):
        return "NCCL has registered this buffer, and would lose that with its memory"
    if _any_set(configs, "reuse_grad_buf_for_mxfp8_param_ag") or _shares_weights(buffer):
        return "it shares its memory with weights"
    if _is_away(buffer):
        return "its memory is given back already, by the framework"
    return None


def _is_away(buffer: Any) -> bool:
    empty: bool = buffer.grad_data.untyped_storage().nbytes() == 0
    return empty


def _shares_weights(buffer: Any) -> bool:
    weights = getattr(buffer, "param_data", None)
    return torch.is_tensor(weights) and _key(weights) == _key(buffer.grad_data)


def _any_set(configs: Iterable[Any], name: str) -> bool:
    return any(bool(getattr(config, name, False)) for config in configs)


def _key(tensor: torch.Tensor) -> Key:
    """A storage by identity. Storages without memory have no address; their own object is it."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    storage = local.untyped_storage()
    return str(local.device), storage.data_ptr() or -storage._cdata


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
