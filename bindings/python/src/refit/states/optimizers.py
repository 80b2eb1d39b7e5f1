"""The optimizers that a controller is given: torch's, within wrappers, and those of frameworks.

A framework's optimizer may keep tensors of its own beside the state of a torch optimizer, such as
fp32 masters of bf16 weights. Its integration makes an ``OptimizerAdapter`` of it, and all of them
are asked as one, by ``OptimizerAdapters``. Independent of which frameworks there are.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from refit.errors import InvalidError
from refit.states.storages import GRADS, SCRATCH, FrameworkMemory


def innermost(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer within wrappers that keep it as ``.optimizer``, or as ``.optim``, as
    torch's ZeroRedundancyOptimizer does, whose own states are empty.

    InvalidError if there is none.
    """
    found, seen = optimizer, set()
    while id(found) not in seen:
        seen.add(id(found))
        inner = getattr(found, "optim" if shards_states(found) else "optimizer", None)
        if inner is None or inner is found:
            break
        found = inner
    if not isinstance(found, torch.optim.Optimizer):
        raise InvalidError(
            f"a {type(optimizer).__name__} is not a torch optimizer and holds none as .optimizer: "
            "give the optimizers that step, one or a list of them"
        )
    if not hasattr(found, "_optimizer_step_pre_hooks"):
        raise InvalidError(
            f"a {type(found).__name__} takes no hooks on its step, because it never called "
            "torch.optim.Optimizer.__init__: let its constructor do so, or let it keep the "
            "optimizer that steps as .optimizer"
        )
    return found


def shards_states(optimizer: Any) -> bool:
    """Whether it is torch's ZeroRedundancyOptimizer. InvalidError: it steps within DDP's hooks."""
    if not any(one.__name__ == "ZeroRedundancyOptimizer" for one in type(optimizer).__mro__):
        return False
    if getattr(optimizer, "_overlap_with_ddp", False):
        raise InvalidError(
            "a ZeroRedundancyOptimizer with overlap_with_ddp=True steps within the backward pass, "
            "by an optimizer that has no hooks: make it without"
        )
    return True


def innermost_of(optimizers: Any) -> list[torch.optim.Optimizer]:
    """The same for one or several; each counts once."""
    several = isinstance(optimizers, list | tuple)
    found = [innermost(one) for one in (optimizers if several else [optimizers])]
    if not found:
        raise InvalidError("there is no optimizer: give one, or a list of them")
    return list({id(one): one for one in found}.values())


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
class MastersAdapter(Protocol):
    """What an ``OptimizerAdapter`` has besides, if fp32 masters are among its tensors."""

    def weights(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Masters, and the weights of each that are its rounding and stay on the device."""
        ...


@runtime_checkable
class SteppedMastersAdapter(Protocol):
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
class EngineAdapter(Protocol):
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
        self._adapters = [one for one in opened if isinstance(one, OptimizerAdapter)]
        found: list[Any] = []
        for one in opened:
            found += one.inner if isinstance(one, OptimizerAdapter) else [one]
        self.optimizers = innermost_of(found)
        self._sharding = [one for one in found if shards_states(one)]
        self._of_stepped_masters = [
            one for one in self._adapters if isinstance(one, SteppedMastersAdapter)
        ]
        self._engines = [one for one in self._adapters if isinstance(one, EngineAdapter)]

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
        for one in self._adapters:
            yield from one.tensors()

    def weights(self) -> dict[int, torch.Tensor]:
        """By the identity of an fp32 master the weights that are its rounding. A wrapper that knows
        none has no method ``weights``."""
        pairs = [one.weights() for one in self._adapters if isinstance(one, MastersAdapter)]
        return {id(master): weight for each in pairs for master, weight in each}

    def stepped_masters(self) -> dict[int, torch.Tensor]:
        """By the identity of a master that can live on the host the weights rounded from it."""
        pairs = [
            one.stepped_masters()
            for one in self._adapters
            if isinstance(one, SteppedMastersAdapter)
        ]
        return {id(master): weight for each in pairs for master, weight in each}

    def leave_out(self, is_rounded: Callable[[torch.Tensor], bool]) -> list[Callable[[], None]]:
        """Tells the wrappers which masters' weights they need not round."""
        return [one.leave_out(is_rounded) for one in self._of_stepped_masters]

    def before_remaking(self, call: Callable[[], None]) -> list[Callable[[], None]]:
        """Tells the wrappers what to call before all masters get other bytes."""
        return [one.before_remaking(call) for one in self._of_stepped_masters]

    def modules(self) -> list[torch.nn.Module]:
        """Modules that have the weights of masters."""
        return [module for one in self._of_stepped_masters for module in one.modules()]

    def round_others(self) -> None:
        """The wrappers round weights as after a step."""
        for one in self._of_stepped_masters:
            one.round_others()

    def others(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whose memory stays."""
        for one in self._adapters:
            yield from one.others()

    def resident(self) -> Iterator[tuple[str, str]]:
        """Tensors that the wrappers leave in place, and why."""
        for one in self._adapters:
            yield from one.resident
