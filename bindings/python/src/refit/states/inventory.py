"""What the optimizers of a cycle hold, and what else is known to lie in the same memory.

It asks the optimizers, the model, and what stands for optimizers of another kind; ``storages`` then
decides what can leave. Independent of how and when that leaves.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from refit._c.config import Config
from refit.states.grads import Policy
from refit.states.hooks import innermost_of, shards_states
from refit.states.storage_swap import swap_fixed
from refit.states.storages import (
    GRADS,
    SCRATCH,
    STATES,
    FrameworkMemory,
    OffloadPlan,
    Place,
    StateInventory,
    places,
    scan,
    take_inventory,
)
from refit.states.torch_memory import spec_of

if TYPE_CHECKING:
    from refit.memory_pool import MemPool


# ---- What a controller is given: torch optimizers, or wrappers that keep tensors of their own
# beside the state of a torch optimizer, such as fp32 masters of bf16 weights. A
# ``OptimizerAdapter`` stands for a wrapper.


@runtime_checkable
class OptimizerAdapter(Protocol):
    """Stands for an optimizer that is not torch's. Asked again at each offload."""

    @property
    def inner(self) -> Sequence[torch.optim.Optimizer]:
        """The torch optimizers that step."""
        ...

    def tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Tensors that leave besides the states, by name; none that other code uses meanwhile."""
        ...

    def others(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Tensors whose memory stays, with all in it: buffers that a framework moves by itself."""
        ...

    @property
    def resident(self) -> list[tuple[str, str]]:
        """Tensors that it leaves in place, and why."""
        ...


@runtime_checkable
class HeldMasters(Protocol):
    """What an ``OptimizerAdapter`` has besides, if fp32 masters are among its tensors."""

    def weights(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Masters, and the weights of each that are its rounding and stay on the device."""
        ...


@runtime_checkable
class SteppedMasters(Protocol):
    """What an ``OptimizerAdapter`` has besides, if its masters can live on the host."""

    def stepped_masters(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Masters that an inner optimizer steps as its parameters, and the weights that the wrapper
        rounds from each after a step."""
        ...

    def leave_out(self, is_rounded: Callable[[torch.Tensor], bool]) -> Callable[[], None]:
        """From now on the wrapper does not round weights from masters of which this is True. What
        it gives undoes that."""
        ...

    def before_remaking(self, call: Callable[[], None]) -> Callable[[], None]:
        """From now on this is called before the wrapper gives all its masters other bytes: of the
        weights, or of a checkpoint. What it gives undoes that."""
        ...

    def round_others(self) -> None:
        """Rounds weights from all other masters, as it does after a step."""
        ...

    def modules(self) -> Iterable[torch.nn.Module]:
        """Modules that have the weights."""
        ...


@runtime_checkable
class HeldEngine(Protocol):
    """What an ``OptimizerAdapter`` has besides, if the framework that it comes from has parameters
    and gradients that the inner optimizers do not show between steps."""

    model: torch.nn.Module | None
    why_steps_itself: str
    """Why no other schedule than the cycle can step its states."""

    def parameters(self) -> Iterable[Any]:
        """Parameters besides those in the groups of the inner optimizers."""
        ...

    def framework_gradients(self) -> Iterable[tuple[Any, str, torch.Tensor]]:
        """Gradients besides those of the inner optimizers' parameters: the parameter whose
        ``.grad`` it is, or None for memory of the framework's own; a name; the tensor."""
        ...

    def scratch(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Memory of the framework's own, by name, whose bytes are not needed between passes."""
        ...

    @property
    def accumulating(self) -> bool:
        """Whether memory of the framework's own has gradients that no step has used."""
        ...

    def before_uses(
        self, step: Callable[[], None], use: Callable[[], None]
    ) -> Iterable[Callable[[], None]]:
        """From now on calls ``step`` before the framework steps, and ``use`` before it uses the
        states otherwise. What it gives undoes that."""
        ...


class OptimizerAdapters:
    """The torch optimizers in what was given, and the tensors beside their states.

    InvalidError if there is no optimizer.
    """

    def __init__(self, opened: Sequence[Any]) -> None:
        self._held = [one for one in opened if isinstance(one, OptimizerAdapter)]
        found: list[Any] = []
        for one in opened:
            found += one.inner if isinstance(one, OptimizerAdapter) else [one]
        self.optimizers = innermost_of(found)
        self._sharding = [one for one in found if shards_states(one)]
        self._engines = [one for one in self._held if isinstance(one, HeldEngine)]

    @property
    def model(self) -> torch.nn.Module | None:
        """The model of a framework's engine."""
        return next((one.model for one in self._engines if one.model is not None), None)

    @property
    def why_cycle_only(self) -> str | None:
        """Why states can take part in a cycle only, or None."""
        return next((one.why_steps_itself for one in self._engines), None)

    def parameters(self) -> Iterator[Any]:
        """Parameters besides those in the groups of the optimizers."""
        for one in self._engines:
            yield from one.parameters()

    def gradients(self, of_parameters: bool) -> Iterator[tuple[Any, torch.Tensor]]:
        """Gradients of frameworks, each with its parameter, or with ``FrameworkMemory`` that
        names it; those of parameters on request."""
        for one in self._engines:
            for owner, name, tensor in one.framework_gradients():
                if owner is None:
                    yield FrameworkMemory(name, GRADS), tensor
                elif of_parameters:
                    yield owner, tensor
            for name, tensor in one.scratch():
                yield FrameworkMemory(name, SCRATCH), tensor

    def is_accumulating(self) -> bool:
        """Whether memory of frameworks has gradients that no step has used."""
        return any(one.accumulating for one in self._engines)

    def before_uses(
        self, step: Callable[[], None], use: Callable[[], None]
    ) -> list[Callable[[], None]]:
        """Tells frameworks what to call before they use the states."""
        loads = [one.register_load_state_dict_pre_hook(use) for one in self._sharding]
        undo = [handle.remove for handle in loads]
        return undo + [undo for one in self._engines for undo in one.before_uses(step, use)]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors that leave besides the states."""
        for one in self._held:
            yield from one.tensors()

    def weights(self) -> dict[int, torch.Tensor]:
        """By the identity of an fp32 master the weights that are its rounding. A wrapper that knows
        none has no method ``weights``."""
        known = [one.weights() for one in self._held if isinstance(one, HeldMasters)]
        return {id(master): weight for pairs in known for master, weight in pairs}

    def stepped_masters(self) -> dict[int, torch.Tensor]:
        """By the identity of a master that can live on the host the weights rounded from it."""
        known = [one.stepped_masters() for one in self._held if isinstance(one, SteppedMasters)]
        return {id(master): weight for pairs in known for master, weight in pairs}

    def leave_out(self, is_rounded: Callable[[torch.Tensor], bool]) -> list[Callable[[], None]]:
        """Tells the wrappers which masters' weights they need not round; see ``SteppedMasters``."""
        held = [one for one in self._held if isinstance(one, SteppedMasters)]
        return [one.leave_out(is_rounded) for one in held]

    def before_remaking(self, call: Callable[[], None]) -> list[Callable[[], None]]:
        """Tells the wrappers what to call before all masters get other bytes."""
        held = [one for one in self._held if isinstance(one, SteppedMasters)]
        return [one.before_remaking(call) for one in held]

    def modules(self) -> list[torch.nn.Module]:
        """Modules that have the weights of masters."""
        held = [one for one in self._held if isinstance(one, SteppedMasters)]
        return [module for one in held for module in one.modules()]

    def round_others(self) -> None:
        """The wrappers round weights as after a step."""
        for one in self._held:
            if isinstance(one, SteppedMasters):
                one.round_others()

    def others(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whose memory stays."""
        for one in self._held:
            yield from one.others()

    def resident(self) -> Iterator[tuple[str, str]]:
        """Tensors that the wrappers leave in place, and why."""
        for one in self._held:
            yield from one.resident


# ---- What there is.


class Inventory:
    """Looks at optimizers, a model and a pool. It changes no value; but a state whose memory cannot
    be resized gets memory that can (see ``storage_swap``)."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        model: torch.nn.Module | None,
        config: Config,
        grads: Policy,
        held: OptimizerAdapters,
        pool: "MemPool | None" = None,
    ) -> None:
        self.optimizers = list(optimizers)
        self._model = model
        self._config = config
        self._grads = grads
        self._held = held
        self._pool = pool
        self._warned = False
        self.lives_elsewhere: Callable[[Any, Any, Any], bool] | None = None
        self.masters_elsewhere: Callable[[Any], bool] | None = None
        """Whether a state (its parameter, its key, its value) is not the concern of a cycle."""

    def parameters(self) -> list[Any]:
        """Every parameter that is optimized, and those of a framework's model."""
        shown = [
            p for one in self.optimizers for group in one.param_groups for p in group["params"]
        ]
        return [*shown, *self._held.parameters()]

    def is_accumulating(self) -> bool:
        """Whether a framework's own memory has gradients that no step has used."""
        return self._held.is_accumulating()

    def take(self) -> StateInventory:
        """The stock at this moment."""
        elsewhere = self.masters_elsewhere or (lambda _: False)
        beside = [one for one in self._held.tensors() if not elsewhere(one[1])]
        with_grads = self._grads != "discard"
        more = self._held.gradients(with_grads)
        stock = take_inventory(self.optimizers, with_grads, beside, self.lives_elsewhere, more)
        if self._config.get("offload.masters") == "auto":
            stock.weights = self._held.weights()
        return stock

    def names(self) -> dict[int, str]:
        """The names of all parameters that are optimized, by their identity."""
        names = self._names_in_model()
        self._name_by_group(names)
        return names

    def decide(self, stock: StateInventory) -> OffloadPlan:
        """Decides which part of the stock can leave. HostMemoryError (see ``swap_fixed``)."""
        pieces = [] if self._pool is None else self._pool.pieces()
        names, others = self._surroundings()
        found = scan(stock, others, names, self._why_device_stays(), pieces)
        if found.fixed:
            moved, held = swap_fixed(stock, others, self._why_device_stays())
            if moved:
                found = scan(stock, others, names, self._why_device_stays(), pieces)
            found.passing = held
        self._warn(stock, found)
        return found

    def survey(
        self, stock: StateInventory, why_device_stays: Callable[[torch.device], str | None]
    ) -> OffloadPlan:
        """Which storages of a stock have memory of their own; changes nothing."""
        names, others = self._surroundings()
        return scan(stock, others, names, why_device_stays)

    def _surroundings(self) -> tuple[dict[int, str], dict[Place, str]]:
        """Names of the parameters by their identity, and memory that is not the optimizers'."""
        names = self._names_in_model()
        others = places(self._others(names))
        self._name_by_group(names)
        return names, others

    def _warn(self, stock: StateInventory, found: OffloadPlan) -> None:
        """Says, once, that there are states and none of them leaves."""
        if self._warned or self.lives_elsewhere is not None:
            return
        if any(STATES in slots.groups for slots in found.slots.values()):
            return
        if all("step" in path for path in stock.paths):
            self._warn_of_inner()
            return
        self._warned = True
        stays = [one for one in found.resident if "a step counter" not in one[1]]
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
        masters = {id(tensor) for _, tensor in self._held.tensors()}
        parameters = self.parameters()
        weights = [p for p in parameters if id(p) not in masters]
        leaving = set() if self._grads == "discard" else set(map(id, parameters))
        held = list(self._held.others())
        model = self._model or torch.nn.Module()
        known = set(map(id, weights))
        rest = [p for p in model.parameters() if id(p) not in known]
        yield from held
        yield from _named("a parameter", weights)
        yield from ((f"parameter {names[id(p)]}", p) for p in rest)
        # Megatron's DistributedDataParallel has a list in the place of the method buffers().
        buffers = list(model.named_buffers())
        yield from ((f"buffer {name}", b) for name, b in buffers)
        tensors = [*(b for _, b in buffers), *(tensor for _, tensor in held)]
        every = [*parameters, *rest, *tensors]
        grads = [p.grad for p in every if id(p) not in leaving]
        yield from _named("a gradient", [grad for grad in grads if grad is not None])

    def _why_device_stays(self) -> Callable[[torch.device], str | None]:
        """Says of a device why memory on it is not moved, or None."""
        chosen = str(self._config.get("device")).partition(":capacity")[0]
        if chosen == "auto":
            on_gpu = any(p.is_cuda for p in self.parameters())
            return lambda device: (
                "it is in host memory already" if on_gpu and device.type == "cpu" else None
            )

        def why(device: torch.device) -> str | None:
            if chosen in (spec_of(device, self._config).partition(":capacity")[0], device.type):
                return None
            return f"it is on {device}, and the configuration says device: {chosen}"

        return why


def _named(name: str, tensors: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((name, tensor) for tensor in tensors)
