"""What of modules leaves: their parameters and buffers, in groups in the order of their layers.

A layer is a module that has tensors of its own. As many layers as make a share of the bytes are
one group, which comes back together; the first layers come back first. Modules whose weights other
code takes before the layer is called (FSDP2 gathers them, a compiled graph reads them) are one
group, and so are tensors without a module. Independent of how and when they leave.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from refit._c import abi
from refit._c.config import Config
from refit.states.state_source import why_device_stays
from refit.states.storages import (
    FrameworkMemory,
    OffloadPlan,
    StateInventory,
    make_plan,
    opened,
)

FIRST = abi.REFIT_GROUPS - 1
"""The group of the first layers: the higher a group's number, the sooner it comes back."""
_NO_GROUP = -1


class WeightSource:
    """Looks at modules, which it does not hold, and at tensors, which it does. Changes nothing."""

    early = ()
    zeroable = _NO_GROUP
    reuse = True
    lives_elsewhere = None

    def __init__(
        self, modules: Sequence[nn.Module], tensors: Mapping[str, torch.Tensor], config: Config
    ) -> None:
        self.optimizers: list[torch.optim.Optimizer] = []
        self.groups: dict[int, set[int]] = {}
        """The groups of each layer's tensors, by its identity, as of the last inventory. Tied ones
        are in that of the first layer that has them."""
        self._modules = [weakref.ref(one) for one in modules]
        self._tensors = dict(tensors)
        self._config = config

    def roots(self) -> list[nn.Module]:
        """The modules that are still there."""
        return [one for one in (reference() for reference in self._modules) if one is not None]

    def layers(self) -> list[nn.Module]:
        """Every module that has tensors of its own, in their order."""
        return [one for root in self.roots() for one in root.modules() if any(_own(one))]

    @property
    def is_layered(self) -> bool:
        """Whether each layer's tensors are used when it is called, and not before."""
        every = [one for root in self.roots() for one in root.modules()]
        plain = not any(isinstance(one, FSDPModule) or is_compiled(one) for one in every)
        return plain and not any(_is_wrapper(one) for module in every for _, one in _own(module))

    def policies(self) -> dict[int, int]:
        """All return as they were."""
        return {}

    def parameters(self) -> list[Any]:
        """All tensors."""
        return list({id(tensor): tensor for _, tensor, _ in self._found()}.values())

    def is_accumulating(self) -> bool:
        """No gradients are among them."""
        return False

    def take_inventory(self) -> StateInventory:
        """The inventory at this moment; also notes the group of each layer."""
        total = sum(map(_nbytes, self.parameters())) or 1
        layered = self.is_layered
        inventory = StateInventory([], [], [], [])
        group_of: dict[int, int] = {}
        before, self.groups = 0, {}
        for name, tensor, layer in self._found():
            groups = self.groups.setdefault(layer, set())
            if id(tensor) not in group_of:
                # Wrappers, which only modules of one group have, come back with group 0.
                group = min(groups, default=FIRST - before * FIRST // total) if layered else 0
                group_of[id(tensor)] = group
                before += _nbytes(tensor)
                for _, inner in opened(tensor, inventory.wrappers):
                    inventory.tensors.append(inner)
                    inventory.owners.append(FrameworkMemory(name, group))
            groups.add(group_of[id(tensor)])
        return inventory

    def make_plan(self, inventory: StateInventory) -> OffloadPlan:
        """Decides which part of the inventory can leave."""
        why = why_device_stays(self._config, inventory.tensors)
        return make_plan(inventory, {}, {}, why)

    def _found(self) -> Iterator[tuple[str, Any, int]]:
        """Each tensor as each layer has it: a name, and the identity of the layer."""
        for number, root in enumerate(self.roots()):
            prefix = f"{number}." if len(self._modules) > 1 else ""
            for path, module in root.named_modules():
                for name, tensor in _own(module):
                    yield f"{prefix}{path}.{name}".strip("."), tensor, id(module)
        for name, tensor in self._tensors.items():
            yield name, tensor, id(self)


def is_compiled(module: nn.Module) -> bool:
    """Whether what is called for a module may be a compiled graph."""
    in_place = getattr(module, "_compiled_call_impl", None) is not None
    return in_place or isinstance(module, torch._dynamo.eval_frame.OptimizedModule)


def _own(module: nn.Module) -> Iterable[tuple[str, Any]]:
    """Its own tensors, not those of the modules in it."""
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            if tensor is not None:
                yield name, tensor


def _is_wrapper(tensor: Any) -> bool:
    return any(inner is not tensor for _, inner in opened(tensor))


def _nbytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())
