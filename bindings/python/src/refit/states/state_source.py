"""Where the states of a cycle are found, and what else is known to lie in the same memory.

It asks the optimizers, the model, and what stands for optimizers of frameworks, for an inventory;
``storages`` then makes the plan of what can leave. Independent of how and when that leaves.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from refit._c.config import Config
from refit._c.device import spec_of
from refit.states.grads import Policy
from refit.states.offloader import KEEP, ZERO
from refit.states.optimizers import OptimizerAdapters
from refit.states.storage_swap import swap_fixed
from refit.states.storages import (
    GRADS,
    SCRATCH,
    STATES,
    OffloadPlan,
    Place,
    StateInventory,
    make_plan,
    places,
    take_inventory,
)

if TYPE_CHECKING:
    from refit.memory_pool import MemPool


def why_device_stays(
    config: Config, tensors: Iterable[torch.Tensor]
) -> Callable[[torch.device], str | None]:
    """Says of a device why memory on it is not moved, or None; of what has these tensors."""
    chosen = str(config.get("device")).partition(":capacity")[0]
    if chosen == "auto":
        on_gpu = any(one.is_cuda for one in tensors)
        return lambda device: (
            "it is in host memory already" if on_gpu and device.type == "cpu" else None
        )

    def why(device: torch.device) -> str | None:
        if chosen in (spec_of(device), device.type):
            return None
        return f"it is on {device}, and the configuration says device: {chosen}"

    return why


class StateSource:
    """Looks at optimizers, a model and a pool. It changes no value; but a state whose memory cannot
    be resized gets memory that can (see ``storage_swap``)."""

    early = (GRADS, SCRATCH)
    """The groups that are there when ``restore`` returns."""
    zeroable = GRADS
    """The group whose tensors nothing else reads meanwhile, so that they may be zeroed later."""
    reuse = False
    """Whether what has not changed leaves without a copy."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        model: torch.nn.Module | None,
        config: Config,
        grads: Policy,
        adapters: OptimizerAdapters,
        pool: "MemPool | None" = None,
    ) -> None:
        self.optimizers = list(optimizers)
        self._model = model
        self._config = config
        self._grads = grads
        self._adapters = adapters
        self._pool = pool
        self._warned = False
        self.lives_elsewhere: Callable[[Any, Any, Any], bool] | None = None
        """Whether a state (its parameter, its key, its value) is not the concern of a cycle."""
        self.masters_elsewhere: Callable[[Any], bool] | None = None
        """The same of a master."""

    def policies(self) -> dict[int, int]:
        """What becomes of the bytes of each group while they are away."""
        grads = KEEP if self._grads == "keep" else ZERO
        return {STATES: KEEP, GRADS: grads, SCRATCH: ZERO}

    def parameters(self) -> list[Any]:
        """Every parameter that is optimized, and those of a framework's model."""
        shown = [
            p for one in self.optimizers for group in one.param_groups for p in group["params"]
        ]
        return [*shown, *self._adapters.parameters()]

    def is_accumulating(self) -> bool:
        """Whether a framework's own memory has gradients that no step has used."""
        return self._adapters.is_accumulating()

    def take_inventory(self) -> StateInventory:
        """The inventory at this moment."""
        elsewhere = self.masters_elsewhere or (lambda _: False)
        beside = [one for one in self._adapters.tensors() if not elsewhere(one[1])]
        with_grads = self._grads != "discard"
        more = self._adapters.gradients(with_grads)
        inventory = take_inventory(self.optimizers, with_grads, beside, self.lives_elsewhere, more)
        if self._config.get("offload.masters") == "auto":
            inventory.weights = self._adapters.weights()
        return inventory

    def names(self) -> dict[int, str]:
        """The names of all parameters that are optimized, by their identity."""
        names = self._names_in_model()
        self._name_by_group(names)
        return names

    def make_plan(self, inventory: StateInventory) -> OffloadPlan:
        """Decides which part of the inventory can leave. HostMemoryError (see ``swap_fixed``)."""
        pieces = [] if self._pool is None else self._pool.pieces()
        names, others = self._surroundings()
        plan = make_plan(inventory, others, names, self._why_device_stays(), pieces)
        if plan.fixed:
            moved, held = swap_fixed(inventory, others, self._why_device_stays())
            if moved:
                plan = make_plan(inventory, others, names, self._why_device_stays(), pieces)
            plan.passing = held
        self._warn(inventory, plan)
        return plan

    def survey(
        self, inventory: StateInventory, why_device_stays: Callable[[torch.device], str | None]
    ) -> OffloadPlan:
        """Which storages of an inventory have memory of their own; changes nothing."""
        names, others = self._surroundings()
        return make_plan(inventory, others, names, why_device_stays)

    def _surroundings(self) -> tuple[dict[int, str], dict[Place, str]]:
        """Names of the parameters by their identity, and memory that is not the optimizers'."""
        names = self._names_in_model()
        others = places(self._others(names))
        self._name_by_group(names)
        return names, others

    def _warn(self, inventory: StateInventory, plan: OffloadPlan) -> None:
        """Says, once, that there are states and none of them leaves."""
        if self._warned or self.lives_elsewhere is not None:
            return
        if any(STATES in specs.groups for specs in plan.specs.values()):
            return
        if all("step" in path for path in inventory.paths):
            self._warn_of_inner()
            return
        self._warned = True
        stays = [one for one in plan.resident if "a step counter" not in one[1]]
        name, reason = stays[0] if stays else ("the states", "all are empty or step counters")
        warnings.warn(
            f"no optimizer state leaves: {name}: {reason}; controller.resident names all",
            stacklevel=2,
        )

    def _warn_of_inner(self) -> None:
        """Says, once, that states are with an optimizer within another one, which is not known."""
        for optimizer in self.optimizers:
            for name, inner in vars(optimizer).items():
                if isinstance(inner, torch.optim.Optimizer) and inner.state:
                    self._warned = True
                    warnings.warn(
                        f"no optimizer state leaves: the states of this {type(optimizer).__name__} "
                        f"are those of its .{name}: give that to the controller",
                        stacklevel=2,
                    )

    def _names_in_model(self) -> dict[int, str]:
        """The names of the model's parameters, by their identity."""
        if self._model is None:
            return {}
        return {id(p): name for name, p in self._model.named_parameters()}

    def _name_by_group(self, names: dict[int, str]) -> None:
        """Names the other parameters as their group does, or by their place in it."""
        for number, optimizer in enumerate(self.optimizers):
            which = f"optimizer{number}." if len(self.optimizers) > 1 else ""
            for place, group in enumerate(optimizer.param_groups):
                given = group.get("param_names") or []
                for index, p in enumerate(group["params"]):
                    if id(p) not in names:
                        name = given[index] if index < len(given) else f"{which}{place}.{index}"
                        names[id(p)] = name

    def _others(self, names: Mapping[int, str]) -> Iterator[tuple[str, Any]]:
        """Memory that is not the optimizers' own: weights, buffers, gradients that do not leave.

        What is kept beside a state may be a parameter to the optimizer, and is its own all the
        same: masters of weights in a shorter type.
        """
        masters = {id(tensor) for _, tensor in self._adapters.tensors()}
        parameters = self.parameters()
        weights = [p for p in parameters if id(p) not in masters]
        leaving = set() if self._grads == "discard" else set(map(id, parameters))
        staying = list(self._adapters.others())
        model = self._model or torch.nn.Module()
        known = set(map(id, weights))
        rest = [p for p in model.parameters() if id(p) not in known]
        yield from staying
        yield from _named("a parameter", weights)
        yield from ((f"parameter {names[id(p)]}", p) for p in rest)
        # Megatron's DistributedDataParallel has a list in the place of the method buffers().
        buffers = list(model.named_buffers())
        yield from ((f"buffer {name}", b) for name, b in buffers)
        tensors = [*(b for _, b in buffers), *(tensor for _, tensor in staying)]
        every = [*parameters, *rest, *tensors]
        grads = [p.grad for p in every if id(p) not in leaving]
        yield from _named("a gradient", [grad for grad in grads if grad is not None])

    def _why_device_stays(self) -> Callable[[torch.device], str | None]:
        """Says of a device why memory on it is not moved, or None."""
        return why_device_stays(self._config, self.parameters())


def _named(name: str, tensors: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((name, tensor) for tensor in tensors)
