"""The weights that a layer has with its adapters merged, made beside the model.

PEFT merges into the weights of the layer itself, and what unmerging leaves is not the same to the
last bit; some methods exchange modules instead. So the layer and its adapters are copied without
their memory: other objects with the same parameters, but for the weights to merge into, which are
clones. PEFT's own ``merge`` is called on that, so the result is what ``merge_adapter`` gives,
whatever kind of adapter it is; and the model is never changed. What is sharded is gathered first,
so that ranks merge what one process would.

PEFT is not imported: a layer of it is known by its attributes.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from refit._c.waiting import interrupts_held
from refit.errors import UnsupportedError
from refit.weights.zero import gathered


class MergedLayer:
    """One layer of the model, whose merged parameters are made when the first one is taken, and
    kept until the last one is."""

    def __init__(self, name: str, layer: nn.Module) -> None:
        self._name = name
        self.layer = layer
        self._wanted: set[str] = set()
        self._made: dict[str, torch.Tensor] = {}

    def want(self, parameter: str) -> None:
        """Says that it will be taken."""
        self._wanted.add(parameter)

    def forget(self) -> None:
        """Drops merged tensors that were not taken: the weights may have changed since."""
        self._made = {}

    def take(self, parameter: str) -> torch.Tensor:
        """A parameter of the layer below all adapters. UnsupportedError: it cannot be merged."""
        if parameter not in self._made:
            made = self._merge()
            self._made = {name: one for name, one in made.items() if name in self._wanted}
        if parameter not in self._made:
            raise self._unsupported(f"{parameter} is not a parameter any more")
        return self._made.pop(parameter)

    def _merge(self) -> dict[str, torch.Tensor]:
        with interrupts_held(), torch.no_grad(), gathered(self.layer.parameters()):
            twin = _twin(self.layer)
            try:
                # The outer one computes with what the inner ones give: a rotation turns their part.
                for one in reversed(chain_of(twin)[:-1]):
                    if is_open(one):
                        one.merge()
            except Exception as why:
                raise self._unsupported(str(why) or type(why).__name__) from why
            base = chain_of(twin)[-1]  # another one, where a method exchanges them
        return {name: one.data for name, one in base._parameters.items() if one is not None}

    def _unsupported(self, why: str) -> UnsupportedError:
        return UnsupportedError(
            f'the adapter of "{self._name}" cannot be merged into a copy of its weights ({why}): '
            'send the adapters alone with lora="adapter", or what the policy has in another way'
        )


def is_adapted(module: nn.Module) -> bool:
    """Whether PEFT's adapters are around another layer here."""
    return "base_layer" in module._modules and hasattr(module, "merged")


def is_off(layer: Any) -> bool:
    """Whether the model computes without these adapters now (``disable_adapter``)."""
    return bool(getattr(layer, "disable_adapters", False))


def is_open(layer: Any) -> bool:
    """Whether the model computes with these adapters, and the weights below are without them."""
    return not layer.merged and not is_off(layer) and bool(layer.active_adapters)


def chain_of(layer: Any) -> list[Any]:
    """The layer, those of PEFT's within it, and last the one of the model's own."""
    chain = [layer]
    while "base_layer" in chain[-1]._modules:
        chain.append(chain[-1].base_layer)
    return chain


def _twin(layer: Any) -> Any:
    """A copy of a layer with adapters, and of the layers below it."""
    chain = [_shell(one) for one in chain_of(layer)]
    for outer, inner in pairwise(chain):
        for name, child in outer._modules.items():
            outer._modules[name] = inner if name == "base_layer" else _apart(child)
        _replace(outer, _whole)
    _replace(chain[-1], _own)
    return chain[0]


def _shell(module: Any) -> Any:
    """Another object with the same members, whose containers are its own."""
    shell = object.__new__(type(module))  # FSDP's classes have a __new__ that makes another type
    for name, member in vars(module).items():
        own = member.copy() if isinstance(member, dict | list | set) else member
        object.__setattr__(shell, name, own)
    return shell


def _apart(module: Any) -> Any:
    """Other modules with the same parameters, gathered if they are sharded."""
    if module is None:
        return None
    shell = _shell(module)
    _replace(shell, _whole)
    for name, child in shell._modules.items():
        shell._modules[name] = _apart(child)
    return shell


def _replace(shell: Any, by: Any) -> None:
    for name, one in shell._parameters.items():
        if one is not None:
            shell._parameters[name] = by(one)


def _whole(parameter: Any) -> Any:
    if not isinstance(parameter, DTensor):
        return parameter
    whole: Any = parameter.detach()
    return nn.Parameter(whole.full_tensor(), requires_grad=False)


def _own(parameter: Any) -> Any:
    if isinstance(parameter, DTensor):
        return _whole(parameter)
    return nn.Parameter(parameter.detach().clone(), requires_grad=False)
