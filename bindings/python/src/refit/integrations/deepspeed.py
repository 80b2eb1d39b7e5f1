"""What a DeepSpeed engine holds, in the words of ``refit.Controller``.

    controller = refit.Controller(engine)                  # it is recognized; its optimizer, too
    with controller.refit(publisher=publisher) as tx:
        tx.send(refit.named_weights(engine))               # ZeRO 3: gathered, on all ranks
    controller.restore()
    engine.backward(engine(batch)); engine.step()          # waits for the states by itself

DeepSpeed's optimizers wrap a torch optimizer that steps flat fp32 partitions. Their bytes are at
three places: the states of the torch optimizer, the flat fp32 masters, and gradients in lists and
flat buffers of their own. Tensors of the model point into masters and states
(``_hp_mapping``); they are named here as well, so that a use of one while it is away brings its
memory back. This file finds all that; it imports nothing of DeepSpeed.

Never moved: the model's weights, masters that are the model's weights (ZeRO 3 in fp32), and what
``offload_optimizer`` keeps in host memory of a GPU's process.

The shapes are those of deepspeed/runtime/{engine,bf16_optimizer}.py, runtime/fp16 and
runtime/zero/{stage_1_and_2,stage3}.py of DeepSpeed 0.19.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from refit.errors import StateError, UnsupportedError
from refit.integrations._overlay import precede
from refit.states.optimizers import innermost

_USES = (
    "state_dict",
    "load_state_dict",
    "offload_states",
    "reload_states",
    "refresh_fp32_params",
    "update_lp_params",
    "destroy",
)
"""Methods of DeepSpeed's optimizers, besides ``step``, that read masters and states, or give them
other memory."""

_MASTERS = (
    # masters, the weights rounded from them, and whether those are divided among the ranks
    ("single_partition_of_fp32_groups", "parallel_partitioned_bit16_groups", True),  # ZeRO 1 and 2
    ("fp32_partitioned_groups_flat", "fp16_partitioned_groups_flat", False),  # ZeRO 3
    ("fp32_groups_flat_partition", "bf16_partitioned_groups", True),  # BF16_Optimizer
    ("fp32_groups_flat", "fp16_groups_flat", False),  # FP16_Optimizer
    ("fp32_groups", "fp16_groups", False),  # FP16_UnfusedOptimizer
)

_WEIGHTS = ("lp_param_buffer", "bit16_groups_flat", "bf16_groups_flat", "fp16_groups_flat")
"""Flat memory of the model's weights."""

_GRADIENTS = (
    "grad_partitions_flat_buffer",  # ZeRO 3
    "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition",
    "averaged_gradients",  # ZeRO 1, 2 and 3
    "all_grad_tensors",
    "fp32_groups_gradients_flat",  # BF16_Optimizer
    "fp32_groups_gradients",
    "fp32_groups_actual_gradients_flat",
    "fp32_groups_gradient_flat_partition",
)
"""Flat gradients, and what lies in them; the whole before its parts."""


class DeepSpeedStates:
    """The optimizer and the tensors of one DeepSpeed engine. Made by ``unwrap``; borrows it.

    Each call looks at the engine's optimizer again, since states and gradients come and go.
    """

    why_steps_itself = (
        "DeepSpeed steps its flat partitions itself: it has ways of its own to keep states on the "
        "host (zero_optimization.offload_optimizer); leave the schedule out, and "
        "states leave and return with the cycle"
    )

    def __init__(
        self, optimizer: Any, model: torch.nn.Module | None = None, engine: Any = None
    ) -> None:
        self.optimizer = optimizer
        self.model = model
        self._engine = engine

    @property
    def inner(self) -> list[torch.optim.Optimizer]:
        """The torch optimizer that steps; with a share on the CPU (``ratio``) the two."""
        found = [innermost(self.optimizer)]
        second = getattr(self.optimizer, "backup_optimizer", None)
        return found + ([innermost(second)] if second is not None else [])

    def parameters(self) -> Iterator[torch.Tensor]:
        """The parameters of the model, and the flat ones that the torch optimizer has during a step
        only."""
        yield from (master for _, master, _ in self._masters())
        yield from self._weights()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The masters beside the states, and what points into masters and states.

        StateError while DeepSpeed's own ``offload_states`` has them.
        """
        away = getattr(self.optimizer, "offloaded_states", None)
        if away:
            names = ", ".join(sorted(str(getattr(one, "value", one)) for one in away))
            raise StateError(
                f"engine.offload_states() has taken {names}: call engine.reload_states() first, or "
                "let one of the two move the states"
            )
        for name, master, _ in self._masters():
            yield name, master
        for index, weight in enumerate(self._weights()):
            link = getattr(weight, "_hp_mapping", None)
            if link is None:
                continue
            if torch.is_tensor(link.hp_fragment):
                yield f"weight.{index}.hp_fragment", link.hp_fragment
            for key, part in (link.optim_fragment or {}).items():
                if torch.is_tensor(part):
                    yield f"weight.{index}.optim_fragment.{key}", part

    def weights(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The fp32 masters, and of each the model's weights that are rounded from it."""
        for _, master, weight in self._masters():
            if weight is not None and weight.numel() == master.numel():
                yield master, weight

    def others(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The flat memory of the weights."""
        for attribute in _WEIGHTS:
            yield from _tensors(attribute, getattr(self.optimizer, attribute, None))
        for index, weight in enumerate(self._weights()):
            if torch.is_tensor(part := getattr(weight, "ds_tensor", None)):
                yield f"weight.{index}.ds_tensor", part

    @property
    def resident(self) -> list[tuple[str, str]]:
        """Nothing besides what the controller finds by itself."""
        return []

    def framework_gradients(self) -> Iterator[tuple[Any, str, torch.Tensor]]:
        """Gradients that are none of a flat partition: the parameter whose ``.grad`` it is, or
        None, a name, and the tensor."""
        for attribute in _GRADIENTS:
            name = attribute.rpartition("__")[2]
            for found, tensor in _tensors(name, getattr(self.optimizer, attribute, None)):
                yield None, found, tensor
        for index, weight in enumerate(self._weights()):
            if weight.grad is not None:
                yield weight, f"weight.{index}.grad", weight.grad
            if torch.is_tensor(part := getattr(weight, "grad_accum", None)):
                yield None, f"weight.{index}.grad_accum", part

    def scratch(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The buckets in which gradients are reduced, which are empty between backward passes."""
        for kind, bucket in getattr(self.optimizer, "ipg_buckets", {}).items():
            yield from _tensors(f"ipg_bucket.{kind}", getattr(bucket, "buffer", None))

    @property
    def accumulating(self) -> bool:
        """Whether the framework's gradients have what no step has used."""
        one = self.optimizer
        lists = [getattr(one, name, None) for name in ("averaged_gradients", "all_grad_tensors")]
        if any(grads is not None for each in lists if each for grads in each.values()):
            return True
        flags = getattr(one, "fp32_groups_has_gradients", [])
        if any(any(group) for group in flags):
            return True
        return any(torch.is_tensor(getattr(p, "grad_accum", None)) for p in self._weights())

    def before_uses(
        self, step: Callable[[], None], use: Callable[[], None]
    ) -> list[Callable[[], None]]:
        """From now on ``step`` is called before DeepSpeed's optimizer steps, and ``use`` before it
        reads or replaces what it has, and before the model loads other weights, by which masters
        that are away could not be made again. What it gives undoes that."""
        calls = [(self.optimizer, "step", step)]
        calls += [(self.optimizer, name, use) for name in _USES]
        if isinstance(self.optimizer, torch.optim.Optimizer):
            calls = []  # it has hooks for that
        calls.append((self._engine, "load_checkpoint", use))
        undoing = [
            precede(one, name, call)
            for one, name, call in calls
            if callable(getattr(type(one), name, None)) and name not in vars(one)
        ]
        if self.model is not None:
            model: Any = self.model
            undoing.append(model.register_load_state_dict_pre_hook(use).remove)
        return undoing

    def _masters(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
        """The masters by name, and the weights of each where these have memory of their own."""
        one = self.optimizer
        for attribute, rounded, divided in _MASTERS:
            weights = _as_list(getattr(one, rounded, None))
            for index, master in enumerate(_as_list(getattr(one, attribute, None))):
                weight = weights[index] if index < len(weights) else None
                if divided:
                    weight = _mine(one, index, weight)
                several = isinstance(master, list | tuple)
                pairs = zip(master, weight or [], strict=False) if several else [(master, weight)]
                for place, (tensor, lower) in enumerate(pairs):
                    if torch.is_tensor(tensor) and tensor.numel():
                        name = f"{attribute}.{index}" + (f".{place}" if several else "")
                        plain = lower if torch.is_tensor(lower) else None
                        yield name, tensor, plain

    def _weights(self) -> Iterable[torch.nn.Parameter]:
        if self.model is not None:
            return self.model.parameters()
        found: list[Any] = []
        for attribute in ("bit16_groups", "fp16_groups", "bf16_groups"):
            for group in _as_list(getattr(self.optimizer, attribute, None)):
                found += _as_list(group)
        return found


def unwrap(given: Any, model: torch.nn.Module | None = None) -> DeepSpeedStates:
    """Looks into an engine, one of DeepSpeed's optimizers, or what accelerate puts around one.

    ``model``: the engine's module, where an optimizer is given. UnsupportedError for what is none
    of these, for an engine without an optimizer, and for states that DeepSpeed keeps in files or
    steps in processes of its own. Does not block; moves nothing.
    """
    engine = _found(given, "DeepSpeedEngine")
    optimizer = engine.optimizer if engine is not None else _found(given, "DeepSpeedOptimizer")
    if engine is not None and model is None:
        model = engine.module
    while isinstance(optimizer, torch.optim.Optimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    if optimizer is None or not hasattr(inner, "param_groups") or not _steps(inner):
        raise UnsupportedError(
            f"this {type(given).__name__} has no optimizer of DeepSpeed that steps: give the "
            "engine that deepspeed.initialize returned for an optimizer"
        )
    _refuse_elsewhere(optimizer)
    return DeepSpeedStates(optimizer, model, engine)


def is_deepspeed(given: Any) -> bool:
    """Whether it is an engine of DeepSpeed, or one of its optimizers, or a wrapper of one."""
    return _found(given, "DeepSpeedEngine", "DeepSpeedOptimizer") is not None


def _found(given: Any, *names: str) -> Any:
    """What is of DeepSpeed's class, in wrappers that keep it as ``.optimizer``. Properties of that
    name are not asked: Megatron's chain of several optimizers raises."""
    seen: set[int] = set()
    while given is not None and id(given) not in seen:
        if _is_a(given, *names):
            return given
        seen.add(id(given))
        if isinstance(given, torch.nn.Module):
            return None
        given = getattr(given, "__dict__", {}).get("optimizer")
    return None


def _is_a(given: Any, *names: str) -> bool:
    """By name, since importing DeepSpeed's classes would import DeepSpeed."""
    return any(
        kind.__name__ in names and kind.__module__.startswith("deepspeed.")
        for kind in type(given).__mro__
    )


def _steps(inner: Any) -> bool:
    return type(inner).__name__ not in ("DummyOptim", "DeepSpeedZeRoOffload")


def _refuse_elsewhere(optimizer: Any) -> None:
    """UnsupportedError for states that are not in this process's memory between steps."""
    reason = None
    if getattr(optimizer, "swap_optimizer", False):
        reason = "offload_optimizer.device nvme keeps them in files"
    elif getattr(optimizer, "zenflow", None):
        reason = "zenflow steps them in a process of its own"
    elif any("SuperOffload" in kind.__name__ for kind in type(optimizer).__mro__):
        reason = "super_offload steps them in a process of its own"
    if reason is not None:
        raise UnsupportedError(f"the states of this engine cannot leave by refit: {reason}")


def _mine(optimizer: Any, index: int, parts: Any) -> Any:
    """This rank's part of a flat group that is divided."""
    groups = getattr(optimizer, "real_dp_process_group", None)
    if groups is None or not isinstance(parts, list | tuple):
        return None
    rank = torch.distributed.get_rank(groups[index])
    return parts[rank] if rank < len(parts) else None


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in lists and mappings, which have None where there is none now."""
    if torch.is_tensor(value):
        yield name, value
        return
    flat = getattr(value, "flat_partition", None)
    if torch.is_tensor(flat):
        yield f"{name}.flat", flat
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _tensors(f"{name}.{key}", one)
    elif isinstance(value, list | tuple):
        for index, one in enumerate(value):
            yield from _tensors(f"{name}.{index}", one)


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []
