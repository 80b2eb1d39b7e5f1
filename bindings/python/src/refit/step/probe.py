"""What a step of an optimizer does to its states, learned from a tiny twin before the first step.

A *stand-in* is an object of the optimizer's class that was never constructed: it has the same
attributes, and groups and states of its own. PyTorch's own code of ``step`` runs on it, so that the
optimizer that the user holds changes only when the work is done. ``Stepping`` runs stand-ins for
some parameters at a time.

A *twin* is a stand-in with tiny parameters. Three things are learned from it:

- the states that a parameter will have, and their shapes: its sizes are prime numbers, so a size of
  a state tells which sizes of the parameter it comes from;
- whether a step may be made for some parameters at a time: parameters that are stepped together and
  apart must end with the same bits, at several magnitudes of gradients, and so must all that the
  optimizer holds, such as a schedule that counts its calls: the code runs once for each window. No
  random number may be drawn, which parts of a step would draw in another order;
- whether a step may be made for a part of a parameter: the bits of two halves must be those of the
  whole.

Four steps of two parameters do not show everything: parameters that depend on each other from a
later step on, above a size or a threshold, or only where there are more of them; or a step that is
skipped where any gradient is not finite. Classes that are known for it are refused by name.

A twin holds copies (see ``copying``), and generators are as they were afterwards: a trial changes
nothing that the optimizer holds. What cannot be copied, as what a function closes over, is the same
for a twin, and what a step changes there is changed.

Nothing here knows where states are kept.
"""

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import _default_to_fused_or_foreach

from refit._c.waiting import interrupts_held
from refit.errors import UnsupportedError
from refit.states.offloaded_tensor import kind_of
from refit.states.storages import opened
from refit.step.copying import Copies, Draws, copied, held_in, is_generator, is_same

Optimizer = torch.optim.Optimizer

_HOOKS = tuple(
    f"_optimizer_{verb}_{when}_hooks"
    for verb in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
)
_PRIMES = (11, 13, 17, 19, 23, 29, 31, 37, 149)
"""Sizes of a twin's parameter. One that has a single size gets the last: it has two parts then."""
PART = 64
"""Parts of a parameter begin at multiples of as many elements: a vector of the CPU never holds
elements of two parts. A tail that fills none may be rounded another way."""
_SCALES = ((1.0, 1e-3), (1e3, 1.0), (1e-2, 1e2), (1.0, 1.0))
"""Magnitudes of the gradients of two parameters, step by step: where an optimizer limits the norm
of all gradients together, some of these are above the limit."""

ELEMENTWISE = frozenset(
    {
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
"""Classes of PyTorch that update each element by itself. No subclass counts as one."""


# ---- Steps of some parameters at a time.


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
    vars(made).update(_attributes(optimizer), **{name: OrderedDict() for name in _HOOKS})
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


def _attributes(optimizer: Optimizer) -> dict[str, Any]:
    return {key: value for key, value in vars(optimizer).items() if key not in _OWN}


def loose(optimizer: Optimizer) -> dict[Any, Any]:
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
    attributes, groups, state = copied((_attributes(optimizer), groups, dict(state)), copies)
    vars(made).update(attributes)
    made.state.update(state)
    for group, theirs in zip(groups, optimizer.param_groups, strict=True):
        made.param_groups.append({**group, "params": list(theirs["params"])})
    return made


class Stepping:
    """One step of an optimizer, made for some of its parameters at a time.

    Each ``run`` finds the groups' values and the optimizer's attributes as they were before the
    step, as a step of all parameters would, and steps by foreach or by a loop, as that would.
    ``finish`` gives the optimizer what the last run has
    made of them: a counter in a group counts one step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._step = arithmetic_of(optimizer)
        self._groups = [{**group, **_decided(group)} for group in optimizer.param_groups]
        self._attributes = _attributes(optimizer)
        self._loose = loose(optimizer)
        self._changed: list[dict[str, Any] | None] = [None] * len(self._groups)
        self._bound: dict[str, Any] | None = None
        self._loose_now: dict[Any, Any] = {}

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
        return stand_in(self._optimizer, groups, {**self._loose, **(state or {})})

    def take(self, made: Optimizer, numbers: Iterable[int] | None = None) -> None:
        """Notes what a step has made of the values of groups; None: of those that no run had."""
        others = [at for at, changed in enumerate(self._changed) if changed is None]
        for number in others if numbers is None else numbers:
            self._changed[number] = _changes(self._groups[number], made.param_groups[number])
        if numbers is not None or self._bound is None:
            self._bound = _changes(self._attributes, _attributes(made))
            self._loose_now = loose(made)

    def finish(self) -> None:
        """Gives the groups' values and the attributes to the optimizer. A second call, and one
        without a run, changes nothing more."""
        for group, changed in zip(self._optimizer.param_groups, self._changed, strict=False):
            group.update(changed or {})
        vars(self._optimizer).update(self._bound or {})
        self._optimizer.state.update(self._loose_now)


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


# ---- What is learned.


class Kind(NamedTuple):
    """What parameters that are treated alike have in common."""

    group: int
    ones: tuple[bool, ...]
    """Of each dimension whether its size is 1."""
    order: tuple[int, ...]
    """The dimensions, that of the largest stride first."""
    dtype: torch.dtype
    device: torch.device
    sparse: bool
    """Whether its gradient is."""
    begun: bool = False
    """Whether its optimizer makes its states in its constructor: Adagrad, before PyTorch 2.13."""


def local(tensor: Any) -> Any:
    """The plain tensor in a wrapper that holds one, as a DTensor does; else the tensor itself."""
    if type(tensor) in (torch.nn.Parameter, torch.Tensor):
        return tensor
    inner = [one for _, one in opened(tensor)]
    return inner[0] if len(inner) == 1 else tensor


def kind_of_parameter(group: int, parameter: Any) -> Kind:
    """The kind of a parameter of a group."""
    plain = local(parameter)
    grad = parameter.grad
    order = sorted(range(plain.dim()), key=lambda at: (-plain.stride(at), at))
    return Kind(
        group,
        tuple(size == 1 for size in plain.shape),
        tuple(order),
        plain.dtype,
        plain.device,
        grad is not None and grad.layout is torch.sparse_coo,
    )


@dataclass(frozen=True, slots=True)
class Foreseen:
    """A state that the first step of a parameter makes."""

    key: Any
    dtype: torch.dtype
    sizes: tuple[tuple[int, ...], ...] | None
    """Of each dimension the dimensions of the parameter whose sizes make its own; None: shape and
    strides are those of the parameter."""

    def like(self, parameter: torch.Tensor) -> torch.Tensor:
        """A tensor without memory that has its shape and strides."""
        if self.sizes is None:
            return torch.empty_like(
                parameter.detach(),
                dtype=self.dtype,
                device="meta",
                memory_format=torch.preserve_format,
            )
        shape = [math.prod(parameter.shape[at] for at in dims) for dims in self.sizes]
        return torch.empty(shape, dtype=self.dtype, device="meta")


@dataclass(frozen=True, slots=True)
class StateLayout:
    """What was learned of an optimizer for one kind of parameters."""

    states: tuple[Foreseen, ...] | None
    """The states that a first step makes; None: their shapes are not to be foreseen."""
    elementwise: bool
    """Whether a parameter may be stepped part by part."""
    stays: Mapping[Any, str] = field(default_factory=dict)
    """Why states under a key stay where they are: on another device than the parameter, or shared
    by parameters and only read."""
    written: frozenset[Any] = frozenset()
    """The keys of states that a step changes in place."""
    closure_first: bool = True
    """Whether a step evaluates a closure once, before it changes a parameter."""


def alike(optimizer: Optimizer, kind: Kind) -> Any:
    """Equal for kinds of an optimizer of which the same is learned: hundreds of groups that differ
    by their learning rates are one kind. What is learned depends at most on whether a number is 0.
    PyTorch's own classes read no more of a group than their options; others may read all of it."""
    group = optimizer.param_groups[kind.group]
    own = type(optimizer) in ELEMENTWISE
    keys = optimizer.defaults if own else group.keys() - {"params", "param_names"}
    options = tuple((key, _option(group.get(key))) for key in sorted(keys))
    return options, kind._replace(group=-1)


def _option(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return "a tensor", value.device
    if isinstance(value, tuple | list):
        return tuple(map(_option, value))
    if type(value) is float:
        return value == 0
    return value if isinstance(value, int | str | None) else id(value)


def learn(optimizer: Optimizer, kind: Kind, allow_unverified: bool = False) -> StateLayout:
    """Steps a twin, and says what is seen. Changes neither the optimizer nor random numbers.

    A twin that cannot be stepped is given states, if the optimizer has some, then sparse gradients.
    ``allow_unverified``: an optimizer
    whose parameters depend on each other is not refused. UnsupportedError for one that is, or that
    holds its parameters by itself.
    """
    refuse_entangled(optimizer)
    if not allow_unverified:
        refuse_outside(optimizer)
        refuse_known(optimizer)
    with interrupts_held(), Draws([kind.device]):
        try:
            together, apart = _tried(optimizer, kind)
            first = type(optimizer) in ELEMENTWISE or _evaluates_first(optimizer, kind)
        except UnsupportedError:
            raise
        except Exception as why:
            if not kind.begun and _begun(optimizer, kind) is not None:
                return learn(optimizer, kind._replace(begun=True), allow_unverified)
            if not kind.sparse and len(kind.ones) > 0 and _takes_sparse(optimizer, kind):
                return learn(optimizer, kind._replace(sparse=True), allow_unverified)
            if allow_unverified:
                return StateLayout(None, False)
            raise UnsupportedError(
                f"a {type(optimizer).__name__} could not be tried on parameters of its own, so it "
                "is unknown whether its step can be made for some parameters at a time "
                f"(allow_unverified=True goes on without): {type(why).__name__}: {why}"
            ) from why
        if any(isinstance(one, torch.Tensor) for one in together.optimizer.state):
            raise UnsupportedError(
                f"a {type(optimizer).__name__} makes states by something that it holds, such as a "
                "method of its own: its step cannot be made for some parameters at a time. Keep "
                "its states with refit.Cycle()"
            )
        if not allow_unverified:
            _refuse_dependent(optimizer, together, apart)
        elementwise = type(optimizer) in ELEMENTWISE and not kind.sparse
        elementwise = elementwise and _halves_agree(optimizer, kind)
        stays = together.stays()
        written = frozenset(together.written)
        return StateLayout(together.foreseen(stays), elementwise, stays, written, first)


def _tried(optimizer: Optimizer, kind: Kind) -> tuple["_Twin", "_Twin"]:
    """Twins whose parameters were stepped together, and apart."""
    together, apart = _Twin(optimizer, kind), _Twin(optimizer, kind)
    together.steps([[0, 1]])
    apart.steps([[0], [1]])
    return together, apart


def _refuse_dependent(optimizer: Optimizer, together: "_Twin", apart: "_Twin") -> None:
    """UnsupportedError for one that makes another step for some parameters at a time."""
    why = ""
    changed = together.changed_otherwise(apart)
    common = sorted(map(str, together.shared() & together.written))
    if together.has_drawn:
        why = (
            "draws random numbers in its step, and would draw them in another order for some "
            "parameters at a time"
        )
    elif changed:
        why = (
            f"changes {changed} in its step, which would be changed once for each window, and not "
            "once for each step"
        )
    elif common:
        why = f"has one {common[0]} for several parameters, and changes it for each"
    elif not is_same(together.outcome(), apart.outcome()):
        why = (
            "ends with other values when parameters are stepped apart than when they are stepped "
            "together: its update of one parameter reads others"
        )
    if why:
        raise UnsupportedError(
            f"a {type(optimizer).__name__} {why}. Keep its states with refit.Cycle(), or say "
            "allow_unverified=True if another result will do"
        )


def _evaluates_first(optimizer: Optimizer, kind: Kind) -> bool:
    """True for an optimizer that takes no closure."""
    twin = _Twin(optimizer, kind)
    twin.give_gradients(_SCALES[0])
    before = [one.detach().clone() for one in twin.parameters]
    seen: list[list[torch.Tensor]] = []

    def closure() -> torch.Tensor:
        seen.append([one.detach().clone() for one in twin.parameters])
        return torch.zeros((), device=kind.device)

    chosen: list[Sequence[Any]] = [[] for _ in optimizer.param_groups]
    chosen[kind.group] = twin.parameters
    with suppress(Exception):  # of code that takes none
        Stepping(twin.optimizer).run(chosen, {}, (closure,))
    return len(seen) <= 1 and all(is_same(one, before) for one in seen)


def _begun(optimizer: Optimizer, kind: Kind) -> torch.Tensor | None:
    """A parameter of a kind that has states."""
    wanted = kind._replace(sparse=False, begun=False)
    for one in optimizer.param_groups[kind.group]["params"]:
        like = kind_of_parameter(kind.group, one)._replace(sparse=False)
        if optimizer.state.get(one) and like == wanted:
            found: torch.Tensor = one
            return found
    return None


def _zeros(state: Mapping[Any, Any], of: torch.Tensor, parameter: torch.Tensor) -> dict[Any, Any]:
    """States for a parameter, as those of another one are, but zero."""
    return {
        key: torch.zeros_like(parameter, dtype=value.dtype).detach()
        if is_many(value) and value.shape == of.shape
        else torch.zeros_like(value)
        if isinstance(value, torch.Tensor)
        else value
        for key, value in state.items()
    }


def _takes_sparse(optimizer: Optimizer, kind: Kind) -> bool:
    try:
        _tried(optimizer, kind._replace(sparse=True))
    except Exception:
        return False
    return True


def refuse_entangled(optimizer: Optimizer) -> None:
    """UnsupportedError for one that holds its parameters, or another optimizer, by itself, or that
    reads gradients from elsewhere."""
    if getattr(optimizer, "use_decoupled_grad", False):
        raise UnsupportedError(
            f"a {type(optimizer).__name__} reads gradients from decoupled_grad and not from grad, "
            "so which parameters a step is for cannot be seen (Megatron's "
            "use_precision_aware_optimizer sets it). Leave that out, or keep the states with "
            "refit.Cycle()"
        )
    parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, value in _attributes(optimizer).items():
        for one in held_in(value):
            is_other = isinstance(one, Optimizer) and one is not optimizer
            if id(one) in parameters or is_other:
                held = "another optimizer" if is_other else "its parameters"
                raise UnsupportedError(
                    f"a {type(optimizer).__name__} holds {held} as {name}, and not in its groups "
                    "alone: its step cannot be made for some parameters at a time. Keep its states "
                    "with refit.Cycle()"
                )


def refuse_outside(optimizer: Optimizer) -> None:
    """UnsupportedError for one that uses states outside of ``step``, as schedule-free ones do."""
    for name in ("train", "eval"):
        if callable(getattr(type(optimizer), name, None)):
            raise UnsupportedError(
                f"a {type(optimizer).__name__} uses its states in {name}() as well, where they are "
                "not on the device: keep them with refit.Cycle() (allow_unverified=True insists)"
            )


_LATER = frozenset(
    {
        "Prodigy",
        "ProdigyPlusScheduleFree",
        "DAdaptAdaGrad",
        "DAdaptAdam",
        "DAdaptAdamIP",
        "DAdaptAdan",
        "DAdaptLion",
        "DAdaptSGD",
        "DoG",
        "LDoG",
    }
)
"""Classes that estimate one rate from all parameters, which a few steps need not show."""


def refuse_known(optimizer: Optimizer) -> None:
    """UnsupportedError for classes whose parameters are known to depend on each other."""
    if any(one.__name__ in _LATER for one in type(optimizer).__mro__):
        raise UnsupportedError(
            f"a {type(optimizer).__name__} estimates a rate from all parameters together: keep its "
            "states with refit.Cycle() (allow_unverified=True insists)"
        )


class _Twin:
    """Two tiny parameters of a kind, and an optimizer of the class for them."""

    def __init__(self, optimizer: Optimizer, kind: Kind) -> None:
        self.kind = kind
        self._source = torch.Generator().manual_seed(7)
        primes = iter(_PRIMES if kind.ones.count(False) > 1 else _PRIMES[-1:])
        shape = [1 if one else next(primes) for one in kind.ones]
        self.parameters = [self._tensor(shape).requires_grad_() for _ in range(2)]
        self._copies: Copies = {}
        self.optimizer = stand_in_of_copies(optimizer, self._copies)
        for number, group in enumerate(self.optimizer.param_groups):
            group["params"] = list(self.parameters) if number == kind.group else []
            group.pop("param_names", None)
        for name in ("grad_scale", "found_inf"):  # of a GradScaler, for one step
            vars(self.optimizer).pop(name, None)
        self._held = self.held()
        self.states: dict[Any, Any] = {}
        begun = _begun(optimizer, kind) if kind.begun else None
        if begun is not None:
            state = optimizer.state[begun]
            self.states = {one: _zeros(state, begun, one) for one in self.parameters}
        self.written: set[Any] = set()
        """The keys of states that a step has changed in place."""
        self.has_drawn = False
        self._born: dict[Any, Foreseen | None] | None = None

    def _tensor(self, shape: Sequence[int]) -> torch.Tensor:
        kind = self.kind
        if not (kind.dtype.is_floating_point or kind.dtype.is_complex):
            raise UnsupportedError(f"a parameter of {kind.dtype} has no gradient to step by")
        wide = torch.complex64 if kind.dtype.is_complex else torch.float32
        cpu: Any = {"generator": self._source, "device": "cpu"}
        values = torch.randn(list(shape), dtype=wide, **cpu).to(kind.dtype)
        made = torch.empty([shape[at] for at in kind.order], dtype=kind.dtype, device=kind.device)
        back = sorted(range(len(shape)), key=lambda at: kind.order[at])
        return made.permute(back).copy_(values)

    def give_gradients(self, scales: Sequence[float]) -> None:
        for parameter, scale in zip(self.parameters, scales, strict=True):
            grad = self._tensor(parameter.shape).mul_(scale)
            parameter.grad = grad.to_sparse(1) if self.kind.sparse else grad

    def step(self, windows: Sequence[Sequence[Any]], states: dict[Any, Any]) -> None:
        """One step of the optimizer, window by window."""
        stepping = Stepping(self.optimizer)
        for window in windows:
            chosen: list[Sequence[Any]] = [[] for _ in self.optimizer.param_groups]
            chosen[self.kind.group] = window
            known = {one: states.get(one, {}) for one in window}
            states.update(stepping.run(chosen, known))
        idle = stepping.empty()
        arithmetic_of(self.optimizer)(idle)
        stepping.take(idle)
        stepping.finish()

    def steps(self, windows: Sequence[Sequence[int]]) -> None:
        """All steps. They draw the same random numbers each time."""
        with Draws([self.kind.device]) as draws:
            for number, scales in enumerate(_SCALES):
                self.give_gradients(scales)
                before = self._states_now()
                self.step([[self.parameters[at] for at in one] for one in windows], self.states)
                if number == 0:
                    self._born = _born(self.parameters[0], self.states.get(self.parameters[0], {}))
                self.written |= {key for key, one, copy in before if not is_same(one, copy)}
            own = [pair for pair in self._copies.values() if is_generator(pair[0])]
            self.has_drawn = draws.any or not all(is_same(*pair) for pair in own)

    def _states_now(self) -> list[tuple[Any, torch.Tensor, torch.Tensor]]:
        """The tensors in the states, by their keys, and a copy of each."""
        return [
            (key, one, one.detach().clone())
            for state in map(self._state_of, self.parameters)
            for key, one in state.items()
            if isinstance(one, torch.Tensor)
        ]

    def _state_of(self, parameter: torch.Tensor) -> Mapping[Any, Any]:
        found = self.states.get(parameter)
        return found if isinstance(found, Mapping) else {}

    def foreseen(self, stays: Mapping[Any, str]) -> tuple[Foreseen, ...] | None:
        """The states that the first step has made, but for those that stay where they are. None:
        the shape of one does not come from the parameter."""
        if self._born is None:
            return None
        found = [one for key, one in self._born.items() if key not in stays]
        known = tuple(one for one in found if one is not None)
        return known if len(known) == len(found) else None

    def stays(self) -> dict[Any, str]:
        """Why states stay where they are, by their keys."""
        found = {
            key: f"the optimizer keeps it on {one.device}"
            for parameter in self.parameters
            for key, one in self._state_of(parameter).items()
            if is_many(one) and is_elsewhere(one, parameter)
        }
        read = dict.fromkeys(self.shared() - self.written, "parameters share it and only read it")
        return {**read, **found}

    def shared(self) -> frozenset[Any]:
        """The keys of states that are one tensor for both parameters."""
        one, other = map(self._state_of, self.parameters)
        return frozenset(
            key for key in one.keys() & other.keys() if _places(one[key]) & _places(other[key])
        )

    def held(self) -> dict[str, Any]:
        """What the optimizer holds beside parameters and their states, by name."""
        found = dict(_attributes(self.optimizer))
        for number, group in enumerate(self.optimizer.param_groups):
            found.update(
                (f"param_groups[{number}][{key!r}]", value)
                for key, value in group.items()
                if key != "params"
            )
        found.update((f"state[{key!r}]", value) for key, value in loose(self.optimizer).items())
        return found

    def changed_otherwise(self, other: "_Twin") -> str | None:
        """The name of an object that the steps have changed in place, and those of another twin
        in another way; None if there is none."""
        mine, theirs = self.held(), other.held()
        for name, value in self._held.items():
            if mine.get(name) is value and not is_same(value, theirs.get(name)):
                return name
        return None

    def outcome(self) -> Any:
        """All that the steps have made."""
        states = [self.states.get(one, {}) for one in self.parameters]
        return [one.detach() for one in self.parameters], states, self.held()


def is_elsewhere(state: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether a state is on another device than its parameter."""
    return state.device != parameter.device


def _places(state: Any) -> set[int]:
    """Where the memory of a state is."""
    if not isinstance(state, torch.Tensor):
        return set()
    plain = [one for _, one in opened(state) if type(one) is torch.Tensor]
    return {one.data_ptr() for one in plain if one.layout is torch.strided} - {0}


def _born(parameter: torch.Tensor, state: Any) -> dict[Any, Foreseen | None] | None:
    """Of each state how it looks; None: its shape does not come from the parameter."""
    if not isinstance(state, Mapping):
        return None
    return {key: _foreseen(parameter, key, one) for key, one in state.items() if is_many(one)}


def _foreseen(parameter: torch.Tensor, key: Any, one: torch.Tensor) -> Foreseen | None:
    if type(one) is not torch.Tensor or one.layout is not torch.strided:
        return None
    like = torch.empty_like(parameter.detach(), device="meta")
    if one.shape == like.shape and one.stride() == like.stride():
        return Foreseen(key, one.dtype, None)
    sizes = _sizes(parameter.shape, one)
    return None if sizes is None else Foreseen(key, one.dtype, sizes)


def _sizes(shape: Sequence[int], state: torch.Tensor) -> tuple[tuple[int, ...], ...] | None:
    """Which sizes of the parameter make each size of a state. None: one comes from elsewhere, or
    the state is not contiguous."""
    if not state.is_contiguous():
        return None
    found = []
    for size in state.shape:
        dims = tuple(at for at, one in enumerate(shape) if one != 1 and size % one == 0)
        if math.prod(shape[at] for at in dims) != size:
            return None
        found.append(dims)
    return tuple(found)


def _halves_agree(optimizer: Optimizer, kind: Kind) -> bool:
    """Whether a parameter that is stepped in two parts ends with the bits of one that is not."""
    try:
        whole, parted = _Twin(optimizer, kind), _Twin(optimizer, kind)
        whole.steps([[0, 1]])
        for scales in _SCALES:
            parted.give_gradients(scales)
            _step_parted(parted)
        return is_same(whole.outcome()[:2], parted.outcome()[:2])
    except Exception:
        return False  # then the parameter is stepped as a whole


def _step_parted(twin: _Twin) -> None:
    windows: list[list[Any]] = []
    states: dict[Any, Any] = {}
    origin: list[tuple[Any, list[tuple[Any, int, int]]]] = []
    for parameter in twin.parameters:
        state = twin.states.get(parameter, {})
        if not can_be_parted(parameter, state):
            raise UnsupportedError("the states do not lie as the parameter does")
        half = parameter.numel() // 2 // PART * PART
        bounds = [(0, half), (half, parameter.numel() - half)]
        parts = [(part_of(parameter, *one), *one) for one in bounds if one[1]]
        for part, first, count in parts:
            states[part] = {
                key: flat(one, first, count) if is_many(one) else _single(one)
                for key, one in state.items()
            }
            windows.append([part])
        origin.append((parameter, parts))
    twin.step(windows, states)
    for parameter, parts in origin:
        state = twin.states.setdefault(parameter, {})
        for part, first, count in parts:
            for key, one in states[part].items():
                if not is_many(one):
                    state[key] = one
                    continue
                if key not in state:
                    state[key] = torch.empty_like(parameter.detach(), dtype=one.dtype)
                flat(state[key], first, count).copy_(one)


def is_many(value: Any) -> bool:
    """Whether a state is a tensor that has dimensions."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _single(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
