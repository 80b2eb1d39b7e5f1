"""What a step of an optimizer does to its states, learned from a tiny probe before the first step.

A *probe* is a stand-in (see ``stand_in``) with tiny parameters. Three things are learned from it:

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

A probe holds copies (see ``copying``), and generators are as they were afterwards: a trial changes
nothing that the optimizer holds. What cannot be copied, as what a function closes over, is the same
for a probe, and what a step changes there is changed.

Independent of where states are kept.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from refit._c.waiting import interrupts_held
from refit.errors import UnsupportedError
from refit.states.storages import opened
from refit.step.copying import Copies, Draws, held_in, is_generator, is_same
from refit.step.stand_in import (
    PART,
    Stepping,
    arithmetic_of,
    attributes_of,
    can_be_parted,
    flat,
    is_many,
    local,
    own_state_of,
    part_of,
    stand_in_of_copies,
)

Optimizer = torch.optim.Optimizer

_PRIMES = (11, 13, 17, 19, 23, 29, 31, 37, 149)
"""Sizes of a probe's parameter. One that has a single size gets the last: it has two parts then."""
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
    """Steps a probe, and says what is seen. Changes neither the optimizer nor random numbers.

    A probe that cannot be stepped is given states, if the optimizer has some, then sparse
    gradients. ``allow_unverified``: an optimizer whose parameters depend on each other is not
    refused. UnsupportedError for one that is, or that holds its parameters by itself.
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


def _tried(optimizer: Optimizer, kind: Kind) -> tuple["_Probe", "_Probe"]:
    """Probes whose parameters were stepped together, and apart."""
    together, apart = _Probe(optimizer, kind), _Probe(optimizer, kind)
    together.steps([[0, 1]])
    apart.steps([[0], [1]])
    return together, apart


def _refuse_dependent(optimizer: Optimizer, together: "_Probe", apart: "_Probe") -> None:
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
    probe = _Probe(optimizer, kind)
    probe.give_gradients(_SCALES[0])
    before = [one.detach().clone() for one in probe.parameters]
    seen: list[list[torch.Tensor]] = []

    def closure() -> torch.Tensor:
        seen.append([one.detach().clone() for one in probe.parameters])
        return torch.zeros((), device=kind.device)

    chosen: list[Sequence[Any]] = [[] for _ in optimizer.param_groups]
    chosen[kind.group] = probe.parameters
    with suppress(Exception):  # of code that takes none
        Stepping(probe.optimizer).run(chosen, {}, (closure,))
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
    for name, value in attributes_of(optimizer).items():
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


class _Probe:
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
        self._first_states: dict[Any, Foreseen | None] | None = None

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
            given = {one: states.get(one, {}) for one in window}
            states.update(stepping.run(chosen, given))
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
                    self._first_states = _looks_of(
                        self.parameters[0], self.states.get(self.parameters[0], {})
                    )
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
        if self._first_states is None:
            return None
        found = [one for key, one in self._first_states.items() if key not in stays]
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
        found = dict(attributes_of(self.optimizer))
        for number, group in enumerate(self.optimizer.param_groups):
            found.update(
                (f"param_groups[{number}][{key!r}]", value)
                for key, value in group.items()
                if key != "params"
            )
        found.update(
            (f"state[{key!r}]", value) for key, value in own_state_of(self.optimizer).items()
        )
        return found

    def changed_otherwise(self, other: "_Probe") -> str | None:
        """The name of an object that the steps have changed in place, and those of another probe
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


def _looks_of(parameter: torch.Tensor, state: Any) -> dict[Any, Foreseen | None] | None:
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
        whole, parted = _Probe(optimizer, kind), _Probe(optimizer, kind)
        whole.steps([[0, 1]])
        for scales in _SCALES:
            parted.give_gradients(scales)
            _step_parted(parted)
        return is_same(whole.outcome()[:2], parted.outcome()[:2])
    except Exception:
        return False  # then the parameter is stepped as a whole


def _step_parted(probe: _Probe) -> None:
    windows: list[list[Any]] = []
    states: dict[Any, Any] = {}
    origin: list[tuple[Any, list[tuple[Any, int, int]]]] = []
    for parameter in probe.parameters:
        state = probe.states.get(parameter, {})
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
    probe.step(windows, states)
    for parameter, parts in origin:
        state = probe.states.setdefault(parameter, {})
        for part, first, count in parts:
            for key, one in states[part].items():
                if not is_many(one):
                    state[key] = one
                    continue
                if key not in state:
                    state[key] = torch.empty_like(parameter.detach(), dtype=one.dtype)
                flat(state[key], first, count).copy_(one)


def _single(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
