"""Steps of an optimizer for some of its parameters at a time, or for a part of one.

A *stand-in* is an object of the optimizer's class that was never constructed: it has the same
attributes, and groups and states of its own. PyTorch's own code of ``step`` runs on it, so that the
optimizer that the user holds changes only when the work is done. ``Stepping`` is one step, made by
stand-ins for some parameters at a time.

A *part* of a parameter is a range of its elements in the order of memory, stepped as a parameter of
its own.

Independent of which parameters come together, and of where their states are.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.optim.optimizer import _default_to_fused_or_foreach

from refit.errors import UnsupportedError
from refit.states.offloaded_tensor import kind_of
from refit.states.storages import opened
from refit.step.copying import Copies, copied

Optimizer = torch.optim.Optimizer

_HOOKS = tuple(
    f"_optimizer_{verb}_{when}_hooks"
    for verb in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
)

PART = 64
"""Parts of a parameter begin at multiples of as many elements: a vector of the CPU never holds
elements of two parts. A tail that fills none may be rounded another way."""


def arithmetic_of(optimizer: Optimizer) -> Callable[..., Any]:
    """The code of its ``step``, without the hooks that PyTorch has put around it."""
    function: Any = type(optimizer).step
    while getattr(function, "hooked", False) and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    found: Callable[..., Any] = function
    return found


def stand_in(
    optimizer: Optimizer, groups: list[dict[str, Any]], state: Mapping[Any, dict[Any, Any]]
) -> Optimizer:
    """An object of the same class with the same attributes, and these groups and states; no hooks.

    UnsupportedError for a class that does not let them be set.
    """
    made: Optimizer = object.__new__(type(optimizer))
    vars(made).update(attributes_of(optimizer), **{name: OrderedDict() for name in _HOOKS})
    try:
        made.param_groups = groups
        made.state = defaultdict(dict, state)
    except AttributeError as why:
        raise UnsupportedError(
            f"a {type(optimizer).__name__} does not let its groups or states be set ({why}): its "
            "step cannot be made for some parameters at a time"
        ) from why
    return made


_OWN = {"param_groups", "state", "step", "__getstate__", *_HOOKS}
"""Attributes that a stand-in does not get from the optimizer."""


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """What it holds besides groups and states."""
    return {key: value for key, value in vars(optimizer).items() if key not in _OWN}


def own_state_of(optimizer: Optimizer) -> dict[Any, Any]:
    """What an optimizer keeps in its state beside the states of its parameters."""
    return {k: v for k, v in optimizer.state.items() if not isinstance(k, torch.Tensor)}


def stand_in_of_copies(
    optimizer: Optimizer, copies: Copies, state: Mapping[Any, Any] = MappingProxyType({})
) -> Optimizer:
    """A stand-in whose steps change nothing that the optimizer holds, with a copy of ``state``. Its
    groups have the parameters of the optimizer. ``copies``: see ``copied``."""
    made = stand_in(optimizer, [], {})
    copies[id(optimizer)] = optimizer, made
    groups = [{**group, "params": None} for group in optimizer.param_groups]
    attributes, groups, state = copied((attributes_of(optimizer), groups, dict(state)), copies)
    vars(made).update(attributes)
    made.state.update(state)
    for group, theirs in zip(groups, optimizer.param_groups, strict=True):
        made.param_groups.append({**group, "params": list(theirs["params"])})
    return made


class Stepping:
    """One step of an optimizer, made for some of its parameters at a time.

    Each ``run`` finds the groups' values and the optimizer's attributes as they were before the
    step, as a step of all parameters would, and steps by foreach or by a loop, as that would.
    ``finish`` gives the optimizer what the last run has made of them: a counter in a group counts
    one step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._step = arithmetic_of(optimizer)
        self._groups = [{**group, **_decided(group)} for group in optimizer.param_groups]
        self._attributes = attributes_of(optimizer)
        self._own_state = own_state_of(optimizer)
        self._changed: list[dict[str, Any] | None] = [None] * len(self._groups)
        self._bound: dict[str, Any] | None = None
        self._own_state_now: dict[Any, Any] = {}

    def run(
        self,
        chosen: Sequence[Sequence[Any]],
        state: Mapping[Any, dict[Any, Any]],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        by_loop: bool = False,
    ) -> Mapping[Any, dict[Any, Any]]:
        """Steps ``chosen``, the parameters of each group, with ``state``; gives their states.

        The order of groups is kept, and those without parameters are there. What the code raises.
        """
        made = self.empty(chosen, state)
        self.run_on(made, [], args, kwargs or {}, by_loop)
        self.take(made, [number for number, group in enumerate(chosen) if group])
        found: Mapping[Any, dict[Any, Any]] = made.state
        return found

    def run_on(
        self,
        made: Optimizer,
        results: list[Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        by_loop: bool = False,
    ) -> None:
        """Runs the code on a stand-in. ``results`` gets what it returns, and so tells that it has
        run, in one line: an exception comes before it or after it. ``by_loop``: parameters of a
        GPU on the CPU, one after the other, whatever the groups ask the GPU for."""
        asked = [
            {key: group[key] for key in _ON_GPU if key in group} if by_loop else {}
            for group in made.param_groups
        ]
        for group, options in zip(made.param_groups, asked, strict=True):
            group.update(dict.fromkeys(options, False))
        try:
            results.append(self._step(made, *args, **kwargs))
        finally:
            for group, options in zip(made.param_groups, asked, strict=True):
                group.update(options)

    def empty(
        self,
        chosen: Sequence[Sequence[Any]] = (),
        state: Mapping[Any, dict[Any, Any]] | None = None,
    ) -> Optimizer:
        """A stand-in with the parameters ``chosen`` of each group; without any, a step of it does
        nothing."""
        parameters = [list(group) for group in chosen] or [[] for _ in self._groups]
        groups = [
            {**group, "params": one} for group, one in zip(self._groups, parameters, strict=True)
        ]
        return stand_in(self._optimizer, groups, {**self._own_state, **(state or {})})

    def take(self, made: Optimizer, numbers: Iterable[int] | None = None) -> None:
        """Notes what a step has made of the values of groups; None: of those that no run had."""
        others = [at for at, changed in enumerate(self._changed) if changed is None]
        for number in others if numbers is None else numbers:
            self._changed[number] = _changes(self._groups[number], made.param_groups[number])
        if numbers is not None or self._bound is None:
            self._bound = _changes(self._attributes, attributes_of(made))
            self._own_state_now = own_state_of(made)

    def finish(self) -> None:
        """Gives the groups' values and the attributes to the optimizer. A second call, and one
        without a run, changes nothing more."""
        for group, changed in zip(self._optimizer.param_groups, self._changed, strict=False):
            group.update(changed or {})
        vars(self._optimizer).update(self._bound or {})
        self._optimizer.state.update(self._own_state_now)


_ON_GPU = ("capturable", "foreach", "fused")
"""The options of a group that are the GPU's. PyTorch's code refuses a ``capturable`` step of CPU
tensors."""


def _decided(group: Mapping[str, Any]) -> dict[str, bool]:
    """PyTorch decides for all parameters of a group together whether it steps them by foreach: one
    that foreach cannot step makes it step all by a loop. Some of them alone might be stepped by
    foreach, whose bits may be others."""
    if group.get("foreach", True) is not None or group.get("fused") is not None:
        return {}
    if group.get("differentiable", False):
        return {}
    kinds = {(kind_of(one), one.device): one for one in group["params"] if one.grad is not None}
    if len(kinds) < 2:
        return {}
    able = [
        _default_to_fused_or_foreach([_plainly(kind, one)], False)[1]
        for (kind, _), one in kinds.items()
    ]
    return {"foreach": False} if any(able) and not all(able) else {}


def _plainly(kind: type, parameter: torch.Tensor) -> torch.Tensor:
    """A tensor of which PyTorch decides what it would of a parameter. While the memory of a master
    is away the class of the master is another."""
    plain = kind in (torch.Tensor, torch.nn.Parameter)
    return torch.empty(0, device=parameter.device) if plain else parameter


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in now.items()
        if key != "params" and (key not in before or before[key] is not value)
    }


# ---- Parts of a parameter.


def local(tensor: Any) -> Any:
    """The plain tensor in a wrapper that holds one, as a DTensor does; else the tensor itself."""
    if type(tensor) in (torch.nn.Parameter, torch.Tensor):
        return tensor
    inner = [one for _, one in opened(tensor)]
    return inner[0] if len(inner) == 1 else tensor


def is_many(value: Any) -> bool:
    """Whether a state is a tensor that has dimensions."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def counts_on_device(group: Mapping[str, Any]) -> bool:
    """Whether PyTorch's code keeps the numbers among the states, as how often it stepped, where the
    parameters are."""
    return bool(group.get("capturable") or group.get("fused"))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor fill one range of memory, in whatever order."""
    if tensor.layout is not torch.strided:
        return False
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=_by_stride):
        if size == 0:
            return True
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _by_stride(one: tuple[int, int]) -> tuple[int, int]:
    size, stride = one
    return stride, size


def flat(tensor: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Elements of a dense tensor in the order in which they lie in memory, as a view."""
    return tensor.as_strided((count,), (1,), tensor.storage_offset() + first)


def part_of(parameter: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """A part of a dense parameter as a parameter of its own, with that part of its gradient."""
    made = flat(parameter.detach(), first, count).requires_grad_()
    if parameter.grad is not None:
        made.grad = flat(parameter.grad, first, count)
    return made


def can_be_parted(parameter: torch.Tensor, state: Mapping[Any, Any]) -> bool:
    """Whether parameter, gradient and states lie in memory in the same order, or are single."""
    grad = parameter.grad
    if kind_of(parameter) not in (torch.Tensor, torch.nn.Parameter) or not is_dense(parameter):
        return False
    alike = [one for one in state.values() if isinstance(one, torch.Tensor) and one.dim() > 0]
    alike += [] if grad is None else [grad]
    return all(
        type(one) is torch.Tensor
        and one.layout is torch.strided
        and one.shape == parameter.shape
        and one.stride() == parameter.stride()
        for one in alike
    )
