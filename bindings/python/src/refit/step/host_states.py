"""States that live on the host and visit the device while their optimizer steps.

    plan     the states that are there, or that a twin foresees, get a place in the host image
    step     window by window they come, PyTorch's own code steps them, and they leave
    wait     waits for the copies: the image, and the tensors over it, have every byte

Between steps ``optimizer.state[p][name]`` is a tensor of the host over the image, with the type,
the shape and the strides of the state; a DTensor stays one. It may be read and written: what uses
it waits for the copies out of the last step (see ``states.offloaded_tensor``). A state of no
dimensions, such as a step counter, one of at most 512 bytes, and one that the optimizer makes on
another device than that of its parameter, stay where they are.

An optimizer's ``step`` is diverted by its hooks alone: the last hook before the step makes it, for
some parameters at a time, and lets PyTorch's code run on a stand-in without parameters. So hooks,
closures, schedulers and a ``GradScaler`` see one step. While it runs, the optimizer's own groups
and states are not changed; each window's results become the optimizer's when they are complete.

A state that no twin foresees (its size depends on that of the parameter in another way, or it comes
after the first step) is born on the device, and moves to the host at the end of the step.

How bytes travel is the business of ``host_buffer`` and ``window``; what a step does, that of
``probe``.
"""

import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from refit._c.call_lock import WaitingCallLock
from refit._c.config import Config
from refit._c.handle import refuse_fork
from refit._c.library import lib
from refit._c.waiting import interrupts_held
from refit.errors import CorruptError, DeviceMemoryError, RefitError, StateError, UnsupportedError
from refit.observe.observers import Observers
from refit.states.device_states import Devices, lacks_memory, refuse_capture
from refit.states.hooks import on_accumulation
from refit.states.offloaded_tensor import OffloadedTensors, untouched
from refit.states.storages import opened, why_tensor_stays
from refit.step.cpu_step import CpuShare
from refit.step.host_buffer import UNIT, HostBuffer
from refit.step.host_masters import NO_FRAMEWORK, Framework, HostMasters, advise
from refit.step.last_hook import LastHook
from refit.step.param_state import (
    BufferSlot,
    ParamState,
    Recipe,
    State,
    dense_like,
    extent,
    plain_of,
)
from refit.step.probe import StateLayout, alike, kind_of_parameter, learn
from refit.step.schedule import CPU, STAYS, Division
from refit.step.stand_in import Stepping, is_many, local
from refit.step.verified_step import WholeStep
from refit.step.windowed_step import Entry, WindowedStep, entries_of

Optimizer = torch.optim.Optimizer

SMALL = 512
"""States of at most so many bytes stay on the device."""

IMAGE = "states on the host"
"""Their memory, in pictures."""

_STATES = 0
_NONE = -1
"""Groups of an ``OffloadedTensors``: all states are one, and none of them can be zeroed while
away."""


class HostedStates:
    """The states of some optimizers, on the host. Used by one thread at a time.

    ``names``: of all parameters, by their identity; ``may_step`` raises while no step is allowed.
    UnsupportedError for an optimizer that cannot be stepped for some parameters at a time.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        names: Callable[[], Mapping[int, str]],
        config: Config,
        devices: Devices,
        division: Division,
        *,
        prefetch: bool = True,
        overlap: bool = True,
        kernels: bool = True,
        allow_unverified: bool = False,
        may_step: Callable[[], None] = lambda: None,
        observers: Observers | None = None,
        framework: Framework | None = None,
        verify_steps: int = 0,
    ) -> None:
        self._optimizers = list(optimizers)
        self._names = names
        self._config = config
        self._devices = devices
        self._division = division
        self._overlap = overlap
        self._kernels = kernels
        self._may_step = may_step
        self._observers = observers or Observers()
        self._allow_unverified = allow_unverified
        self._verify_steps = verify_steps
        self._layouts: dict[tuple[int, Any], StateLayout] = {}
        self._stays: dict[int, dict[Any, str]] = {}
        self._written: dict[int, set[Any]] = {}
        """Of each optimizer, by the keys of states: see ``StateLayout``."""
        self._image: set[int] = set()
        """The memory of all places."""
        self._entwined: set[int] = set()
        """Optimizers that evaluate a closure in between."""
        self._param_states: dict[tuple[int, int], ParamState] = {}
        self._resident: dict[tuple[int, int], Any] = {}
        self._stateless: dict[tuple[int, int], Any] = {}
        self._buffers: list[HostBuffer] = []
        self._shares: list[CpuShare] = []
        self._process = os.getpid()
        self._broken: WindowedStep | None = None
        self._loading: dict[int, dict[Any, dict[Any, Any]]] = {}
        self._idle: tuple[Optimizer, Stepping] | None = None
        self._last: dict[int, list[Entry]] = {}
        self._moving = WaitingCallLock("controller")
        wait = cast(Any, torch.compiler).disable(self.wait)
        self._offloaded = OffloadedTensors(wait, self._moving, zeroable=_NONE, at_hand=self._wait)
        can_code = config.get("offload.masters") == "auto"
        known = framework or NO_FRAMEWORK
        self._masters = HostMasters(known, can_code, self._moving, self._wait)
        self._is_away = False
        for number, optimizer in enumerate(self._optimizers):
            for group, parameter in parameters_of(optimizer):
                if self._is_trained(parameter):
                    self._refuse_unmade(parameter)
                    self._layout_of(number, optimizer, group, parameter)
        self._hooks = _StepHooks(self, self._optimizers)
        self._prefetch = _Prefetch(self) if prefetch else None

    # ---- the plan -------------------------------------------------------------------------------

    def owns(self, parameter: Any, key: Any, value: Any) -> bool:
        """Whether a state of a parameter is the tensor over the image."""
        for optimizer in self._optimizers:
            param_state = self._param_states.get(_key(optimizer, parameter))
            if (
                param_state is not None
                and key in param_state.states
                and param_state.states[key].shown is value
            ):
                return True
        return False

    def owns_master(self, tensor: Any) -> bool:
        """Whether a tensor is a master that lives on the host, whether it is there now or not."""
        found = [self._param_states.get(_key(optimizer, tensor)) for optimizer in self._optimizers]
        return any(
            param_state is not None and param_state.master is not None for param_state in found
        )

    @property
    def resident(self) -> list[tuple[str, str]]:
        """States that stay on the device, and why: by choice, or because they cannot live on the
        host. Those of 512 bytes and less are not among them."""
        names = self._names()
        reason = self._division.why_it_stays
        found = [(names.get(one, "state"), reason) for _, one in self._resident]
        found += [
            (one.name, "its states live on the host, where the CPU steps it")
            for one in self._param_states.values()
            if one.share is not None
        ]
        for optimizer in self._optimizers:
            for _, parameter in parameters_of(optimizer):
                for key, value in optimizer.state.get(parameter, {}).items():
                    why = _why_it_stays(value)
                    if isinstance(value, torch.Tensor) and _nbytes(value) > SMALL:
                        why = self._stays.get(id(optimizer), {}).get(key, why)
                    if why is not None:
                        found.append((f"{names.get(id(parameter), 'state')}.{key}", why))
        return found

    @property
    def grown(self) -> list[tuple[str, str]]:
        """States that are larger than a window and cannot be split, and what follows."""
        found = []
        for param_state in self._param_states.values():
            buffer = cast(HostBuffer, param_state.buffer)
            if (
                param_state.share is None
                and param_state.nbytes > buffer.window_bytes
                and not param_state.parted
            ):
                found.append(
                    (
                        param_state.name,
                        f"its states take {param_state.nbytes} bytes and are stepped as a whole: "
                        f"the window grows to them, above its {buffer.window_bytes} bytes",
                    )
                )
        return found

    def place_states(self) -> None:
        """Every state that there is, or that is foreseen, gets its place on the host; those that
        there are move there. Blocks for the page-lock and for copies. BudgetError and others: what
        has moved stays moved, nothing is lost, call again."""
        with self._moving:
            self._place_states()

    def _place_states(self) -> None:
        self._place_what_there_is()
        self._leave_masters()

    def _leave_masters(self) -> None:
        masters = [one for one in self._param_states.values() if one.master is not None]
        if not self._masters.have_left(masters):
            self._wait()
            self._masters.leave(masters)

    def _place_what_there_is(self) -> None:
        changed = [
            (number, optimizer, group, parameter)
            for number, optimizer in enumerate(self._optimizers)
            for group, parameter in parameters_of(optimizer)
            if not self._is_in_place(optimizer, parameter)
        ]
        self._take_apart(changed)
        known = [
            (one, self._param_states.get(_key(one, parameter))) for _, one, _, parameter in changed
        ]
        misplaced = [
            (one, param_state)
            for one, param_state in known
            if param_state and self._needs_move(one, param_state)
        ]
        if misplaced:
            self._wait()
            self._move_in(misplaced)
        found: dict[
            tuple[torch.device, Optimizer | None],
            list[tuple[Optimizer, ParamState, dict[Any, Any]]],
        ] = {}
        without = list(self._without_place(changed))
        if not without:
            return
        self._wait()
        if any(self._masters.is_away(parameter) for _, parameter, *_ in without):
            self._masters.bring_back()  # they get another place
        self._forget_others()
        self._masters.invalidate()
        names = self._names()
        sizes = [sum(map(_nbytes, likes.values())) for *_, likes in without]
        order = {one: place for place, one in enumerate(names)}
        places = self._division.divide(
            [names.get(id(parameter), "state") for _, parameter, *_ in without],
            [order.get(id(parameter), len(order)) for _, parameter, *_ in without],
            sizes,
        )
        for place, (optimizer, parameter, layout, likes) in zip(places, without, strict=True):
            if not likes:
                self._stateless[_key(optimizer, parameter)] = parameter
            elif place == STAYS or (place == CPU and not _can_leave(parameter, layout)):
                self._resident[_key(optimizer, parameter)] = parameter
            else:
                param_state = ParamState(
                    parameter, names.get(id(parameter), "state"), layout.elementwise
                )
                stepper = optimizer if place == CPU else None
                where = local(parameter).device, stepper
                found.setdefault(where, []).append((optimizer, param_state, likes))
        for (device, stepper), entries in found.items():
            entries.sort(key=lambda one: order.get(id(one[1].parameter), len(order)))
            self._open_buffer(device, entries, stepper)

    def _take_apart(self, changed: Iterable[tuple[int, Optimizer, int, Any]]) -> None:
        """Copies states out of the places of other parameters, which code has exchanged, where no
        place of their own takes them. StateError: two parameters have one state, and a step changes
        it. One that is only read may stay on the device for both, or get two places."""
        seen: dict[int, tuple[bool, Any, Any]] = {}
        for _, optimizer, _, parameter in changed:
            place = _key(optimizer, parameter)
            param_state = self._param_states.get(place)
            state = optimizer.state.get(parameter) or {}
            for key, value in state.items():
                if not isinstance(value, torch.Tensor):
                    continue
                if any(map(why_tensor_stays, plain_of(value))):
                    continue
                own = None if param_state is None else param_state.states.get(key)
                if own is not None and own.shown is value:
                    continue
                is_written = key in self._written.get(id(optimizer), ())
                is_written &= not self._allow_unverified
                owner = self._owner_of(value)
                if owner is not None and owner[1].states[owner[2]] is not own:
                    there = owner[0].state.get(owner[1].parameter) or {}
                    if is_written and there.get(owner[2]) is value:
                        self._refuse_shared(parameter, key, f"{owner[1].name}.{owner[2]}")
                    if own is None:
                        self._wait()
                        state[key] = value.detach().to(local(parameter).device, copy=True)
                    continue
                with untouched():
                    at = plain_of(value)[0].data_ptr()
                if not at:  # it is away
                    continue
                splits = is_written and place not in self._resident
                before, whose, name = seen.setdefault(at, (splits, parameter, key))
                if whose is not parameter and (splits or before):
                    self._refuse_shared(parameter, key, f"{self._name_of(whose)}.{name}")

    def _owner_of(self, value: torch.Tensor) -> tuple[Optimizer, ParamState, Any] | None:
        """Whose place a state lies over; None: over none."""
        with untouched():
            storages = {one.untyped_storage()._cdata for one in plain_of(value)}
        if not storages & self._image:
            return None
        for optimizer in self._optimizers:
            for param_state in self._param_states_of(optimizer):
                for key, one in param_state.states.items():
                    if any(slot.storage_id in storages for slot in one.slots):
                        return optimizer, param_state, key
        return None

    def _refuse_shared(self, parameter: Any, key: Any, other: str) -> None:
        raise StateError(
            f"{self._name_of(parameter)}.{key} and {other} are one tensor, which a step changes, "
            "while states that live on the host have a place each: give each parameter a state of "
            "its own, or keep them with refit.Cycle()"
        )

    def _forget_others(self) -> None:
        """Lets go of parameters that no optimizer has any longer."""
        there = {_key(one, p) for one in self._optimizers for _, p in parameters_of(one)}
        gone = [one.parameter for place, one in self._param_states.items() if place not in there]
        if any(map(self._masters.is_away, gone)):
            self._masters.bring_back()
        for known in (self._param_states, self._stateless, self._resident):
            for place in [one for one in known if one not in there]:
                del known[place]

    def _without_place(
        self, changed: Iterable[tuple[int, Optimizer, int, Any]]
    ) -> Iterator[tuple[Optimizer, Any, StateLayout, dict[Any, Any]]]:
        """Those parameters with a state that has no place yet, and all states that are to have
        one."""
        for number, optimizer, group, parameter in changed:
            if not self._has_place(optimizer, parameter):
                layout = self._layout_of(number, optimizer, group, parameter)
                yield optimizer, parameter, layout, self._likes(optimizer, parameter, layout)

    def _is_in_place(self, optimizer: Optimizer, parameter: Any) -> bool:
        """Whether a parameter's states are as a step has left them: what is asked of each parameter
        in each step, in a few microseconds. False: look more closely."""
        param_state = self._param_states.get(_key(optimizer, parameter))
        state = optimizer.state.get(parameter)
        if param_state is None or not state:
            return False
        if sum(one.show_again() for one in param_state.states.values()):  # each of them is asked
            return False
        for key, value in state.items():
            one = param_state.states.get(key)
            if one is not None:
                if one.shown is not value:
                    return False
            elif isinstance(value, torch.Tensor) and value.dim() > 0:
                return False
        return True

    def _has_place(self, optimizer: Optimizer, parameter: Any) -> bool:
        place = _key(optimizer, parameter)
        if place in self._resident:
            return True
        param_state = self._param_states.get(place)
        states = {} if param_state is None else param_state.states
        state = optimizer.state.get(parameter) or {}
        if not state:
            return (
                param_state.foresees()
                if param_state is not None
                else self._needs_none(place, parameter)
            )
        for key, value in state.items():
            one = states.get(key)
            if (one is None or one.plain(value) is None) and self._moves(optimizer, key, value):
                return False
        return True

    def _name_of(self, parameter: Any) -> str:
        return self._names().get(id(parameter), "a parameter")

    def _refuse_unmade(self, parameter: Any) -> None:
        why = ""
        if torch.nn.parameter.is_lazy(parameter):
            why = "has no shape yet: run the model once"
        elif parameter.is_meta:
            why = "is on the meta device: give it memory"
        if why:
            raise StateError(f"{self._name_of(parameter)} {why} before states live on the host")

    def _needs_none(self, place: tuple[int, int], parameter: Any) -> bool:
        return place in self._stateless or not self._is_trained(parameter)

    def _is_trained(self, parameter: Any) -> bool:
        """Whether it may be stepped. Masters require no gradient, and are given one."""
        return (
            parameter.requires_grad or parameter.grad is not None or self._masters.knows(parameter)
        )

    def _moves(self, optimizer: Optimizer, key: Any, value: Any) -> bool:
        """Whether a value in a state is one that lives on the host."""
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return False
        if key in self._stays.get(id(optimizer), ()):
            return False
        if type(value) is torch.Tensor and value.numel() * value.element_size() <= SMALL:
            return False
        inner = plain_of(value)
        if any(why_tensor_stays(one) is not None for one in inner):
            return False
        return sum(map(extent, inner)) > SMALL

    def _layout_of(
        self, number: int, optimizer: Optimizer, group: int, parameter: Any
    ) -> StateLayout:
        kind = kind_of_parameter(group, parameter)
        key = number, alike(optimizer, kind)
        if key not in self._layouts:
            self._layouts[key] = found = learn(optimizer, kind, self._allow_unverified)
            self._stays.setdefault(id(optimizer), {}).update(found.stays)
            self._written.setdefault(id(optimizer), set()).update(found.written)
            if not found.closure_first:
                self._entwined.add(id(optimizer))
        return self._layouts[key]

    def _likes(self, optimizer: Optimizer, parameter: Any, layout: StateLayout) -> dict[Any, Any]:
        """The states that move: those that there are, or tensors that look like those to come."""
        state = optimizer.state.get(parameter, {})
        if state:
            return {k: one for k, one in state.items() if self._moves(optimizer, k, one)}
        wrapped = local(parameter) is not parameter
        likes = {}
        for one in layout.states or ():
            if wrapped and one.sizes is not None:
                return {}  # how it is sharded is seen once it is there
            like = one.like(local(parameter))
            if extent(like) > SMALL:
                likes[one.key] = Recipe(parameter.detach()).made([like]) if wrapped else like
        return likes

    def _open_buffer(
        self,
        device: torch.device,
        entries: list[tuple[Optimizer, ParamState, dict[Any, Any]]],
        stepper: Optimizer | None,
    ) -> None:
        """One image for these states of some parameters; those that there are move in.
        ``stepper``: their optimizer, if the CPU is to step them."""
        names: list[str] = []
        looks: list[torch.Tensor] = []
        weights: list[int] = []
        for _, param_state, likes in entries:
            if stepper is None and self._masters.can_live(param_state.parameter):
                names.append(f"{param_state.name}.master")
                looks.append(dense_like(param_state.parameter))
                weights.append(self._weights_to_code_by(param_state, likes))
            for key, like in likes.items():
                for path, one in opened(like):
                    names.append(".".join(map(str, (param_state.name, key, *path))))
                    looks.append(dense_like(one))
                    weights.append(0)
        sizes = [extent(one) for one in looks]
        weights = _without_shared(weights, sizes)
        handle = self._devices[device]
        named = _distinct(names)
        buffer = HostBuffer(device, handle, self._config, named, sizes, self._observers, weights)
        self._buffers.append(buffer)
        share = None
        if stepper is not None:
            share = CpuShare(
                stepper,
                buffer,
                [one for _, one, _ in entries],
                self._moving,
                is_early=self._overlap,
                kernels=self._kernels,
            )
            self._shares.append(share)
        regions = iter(enumerate(looks))
        for optimizer, param_state, likes in entries:
            param_state.buffer, param_state.share = buffer, share
            if stepper is None and self._masters.can_live(param_state.parameter):
                param_state.master = State([BufferSlot(buffer, *next(regions))], Recipe(looks[0]))
            for key, like in likes.items():
                slots = [BufferSlot(buffer, *next(regions)) for _ in opened(like)]
                param_state.states[key] = State(slots, Recipe(like))
            self._move_in([(optimizer, param_state)])
            self._param_states[_key(optimizer, param_state.parameter)] = param_state
            self._stateless.pop(_key(optimizer, param_state.parameter), None)
        self._close_unused()
        if share is not None:
            share.prepare()

    def _weights_to_code_by(self, param_state: ParamState, likes: Mapping[Any, Any]) -> int:
        """Where the weights are by which a master travels; 0: it travels whole. It does so where
        parts of whole units would be larger than the windows."""
        least = sum(map(_nbytes, likes.values())) + extent(param_state.parameter)
        if param_state.elementwise:
            least = min(least, least // param_state.parameter.numel() * (UNIT // 4))
            if least > int(self._config.get("offload.window_bytes")):
                return 0
        return self._masters.weights_to_code_by(param_state.parameter)

    def _needs_move(self, optimizer: Optimizer, param_state: ParamState) -> bool:
        """Whether a state is not the tensor over the image: other code has put it there."""
        state = optimizer.state.get(param_state.parameter)
        if not state:
            return False
        return any(
            state.get(key, one.shown) is not one.shown for key, one in param_state.states.items()
        )

    def _move_in(self, misplaced: Iterable[tuple[Optimizer, ParamState]]) -> None:
        """States that are elsewhere are copied to the image, and the tensors over it take their
        place. Not while copies are under way."""
        moves = []
        for optimizer, param_state in misplaced:
            state = optimizer.state.get(param_state.parameter) or {}
            for key, one in param_state.states.items():
                value = state.get(key, one.shown)
                inner = None if value is one.shown else one.plain(value)
                if inner is not None:
                    moves.append((state, key, one, inner))
        places = {slot.view.data_ptr() for *_, one, _ in moves for slot in one.slots}
        for _, _, _, inner in moves:  # other code has exchanged states: none is overwritten
            for at, tensor in enumerate(inner):
                if tensor.untyped_storage().data_ptr() in places:
                    with interrupts_held(), torch.no_grad():
                        inner[at] = tensor.clone()
        for state, key, one, inner in moves:
            with interrupts_held(), torch.no_grad():
                for slot, tensor in zip(one.slots, inner, strict=True):
                    slot.view.copy_(tensor)
            state[key] = one.shown

    def _close_unused(self) -> None:
        """Gives back images whose states have all got another place."""
        used = {id(param_state.buffer) for param_state in self._param_states.values()}
        for share in [one for one in self._shares if id(one.buffer) not in used]:
            share.close()
            self._shares.remove(share)
        for buffer in [one for one in self._buffers if id(one) not in used]:
            buffer.close()
            self._buffers.remove(buffer)
        states = [
            one
            for param_state in self._param_states.values()
            for one in param_state.states.values()
        ]
        self._image = {slot.storage_id for one in states for slot in one.slots} - {0}
        self._observers.hold(IMAGE, self.nbytes)

    def _param_states_of(self, optimizer: Optimizer) -> Iterator[ParamState]:
        for _, parameter in parameters_of(optimizer):
            param_state = self._param_states.get(_key(optimizer, parameter))
            if param_state is not None:
                yield param_state

    # ---- a step ---------------------------------------------------------------------------------

    def step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Any) -> Stepping:
        """Steps all parameters that have gradients, window by window."""
        self._refuse()
        with self._observers.phase("step"), self._moving:
            if self._broken is not None:
                raise StateError(
                    "a step was broken off: controller.resume_step() steps the parameters that it "
                    "did not reach; load_state_dict() drops it"
                )
            stepping = Stepping(optimizer)
            if _found_inf(optimizer):
                return stepping
            self._loading.clear()  # of a load that failed
            mine = [one for one in self._param_states_of(optimizer) if one.master is not None]
            self._masters.round_written(mine)
            self._place_states()
            for share in self._shares:
                if share.optimizer is not optimizer:
                    share.lend_none_of(optimizer)
            entries = list(entries_of(optimizer, self._param_states))
            self._masters.invalidate()
            self._masters.bind_weights(
                one.param_state for one in entries if one.param_state is not None
            )
            weight_of = self._masters.weight_of
            self._carry_out(
                WindowedStep(optimizer, stepping, entries, self._names, weight_of, args, kwargs)
            )
        return stepping

    def refuse_closure(
        self, optimizer: Optimizer, closure: Any = None, *_: object, **_more: object
    ) -> None:
        """UnsupportedError for a closure that can only be evaluated in the midst of a step."""
        if closure is not None and id(optimizer) in self._entwined and not self._allow_unverified:
            raise UnsupportedError(
                f"a {type(optimizer).__name__} evaluates its closure more than once, or after it "
                "has changed parameters, while refit evaluates it before the step: call backward() "
                "before step() without a closure, or keep the states with refit.Cycle()"
            )

    def rehearse(
        self, optimizer: Optimizer, number: int, args: tuple[Any, ...], kwargs: Any
    ) -> Callable[[], None] | None:
        """Makes step ``number`` on copies, if it is one of the first that are verified. What it
        gives compares: UnsupportedError."""
        if number > self._verify_steps or self._broken is not None or _found_inf(optimizer):
            return None
        mine = list(self._param_states_of(optimizer))
        if any(one.master is not None for one in mine):
            raise UnsupportedError("verify_steps cannot copy masters that live on the host")
        shared = {id(one.parameter) for one in mine if one.share is not None}
        made = WholeStep(optimizer, lambda one: id(one) in shared, self.owns, args, kwargs)
        return lambda: made.check(number, self._names())

    def resume(self) -> None:
        """Steps what a step that was broken off has not. Does nothing if none was."""
        self._refuse()
        with self._observers.phase("step"), self._moving:
            if self._broken is not None:
                self._leave_masters()  # those that were used meanwhile
                self._masters.invalidate()
                left = [one.param_state for one in self._broken.entries if not one.done]
                self._masters.bind_weights(one for one in left if one is not None)
                self._carry_out(self._broken)
                self._masters.round_others()

    def _refuse(self) -> None:
        """StateError and others where no step is allowed."""
        self._may_step()
        for buffer in self._buffers:
            refuse_capture(buffer.device)

    def _carry_out(self, step: WindowedStep) -> None:
        self._mark_offloaded()
        try:
            self._broken = step
            step.run(self._observers)
            if step.has_made_states:
                self._place_what_there_is()  # what no plan foresaw
            self._leave_masters()
            self._broken = None
        except BaseException as why:
            if not step.unwind():
                self._broken = None
            if isinstance(why, CorruptError):
                advise(why)
            step.explain(why, self._broken is not None)
            raise
        self._last[id(step.optimizer)] = step.entries
        if self._prefetch is not None:
            self._prefetch.watch(step.optimizer)

    def _mark_offloaded(self) -> None:
        """From now on what uses a state waits for the copies."""
        if not self._is_away:
            self._is_away = True
            tensors: list[Any] = []
            for param_state in [one for one in self._param_states.values() if one.share is None]:
                for one in param_state.states.values():
                    tensors += [slot.view for slot in one.slots]
                    if one.shown is not one.slots[0].view:
                        tensors.append(one.shown)
            self._offloaded.put(_STATES, tensors)

    def prefetch(self, optimizer: Optimizer) -> None:
        """Lets the first windows of the next step come in, if the device has memory for them.

        In the middle of another call it does nothing, and never waits: a backward pass calls it,
        which a GPU runs on a thread of PyTorch's, while that call may be what waits for the pass.
        """
        if self._moving.is_mine:
            return
        try:
            with self._moving.at_once:
                self._bring_first_windows(optimizer)
        except RefitError:
            return  # the step begins by itself, and says what it meets

    def _bring_first_windows(self, optimizer: Optimizer) -> None:
        entries = self._last.get(id(optimizer))
        if not entries or self._broken is not None or any(one.begun for one in self._buffers):
            return
        if any(one.param_state is not None and one.param_state.is_coded for one in entries):
            return  # whether the weights have moved, and copies to wait for, the step finds out
        self._refuse()
        weight_of = self._masters.weight_of
        again = [one.again(optimizer) for one in entries]
        step = WindowedStep(optimizer, Stepping(optimizer), again, self._names, weight_of)
        self._mark_offloaded()
        step.prefetch()

    # ---- in between -----------------------------------------------------------------------------

    def wait(self) -> None:
        """Waits until the image has every byte; the windows' memory goes back to PyTorch.

        Any thread. CopyError and DeadlineError: nothing is lost, call again.
        """
        refuse_fork(self._process, "Controller")
        with self._moving:
            self._wait()

    def _wait(self) -> None:
        if self._broken is not None:
            self._broken.finish_window()
        for share in self._shares:
            share.wait()
        for buffer in self._buffers:
            buffer.wait()
        self._masters.release()
        if self._is_away:
            self._offloaded.lift(_STATES)
            self._is_away = False

    def before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Takes the states that live on the host out of what is to be loaded: PyTorch would make a
        copy of each on the device."""
        if not isinstance(state_dict["state"], Mapping):
            return state_dict  # PyTorch refuses it
        saved = [one for group in state_dict["param_groups"] for one in group["params"]]
        mine = [parameter for _, parameter in parameters_of(optimizer)]
        loading: dict[Any, dict[Any, Any]] = {}
        rest = dict(state_dict["state"])
        for number, parameter in zip(saved, mine, strict=False):
            state = rest.get(number)
            if not isinstance(state, Mapping) or _key(optimizer, parameter) in self._resident:
                continue
            loaded = {key: _as_loaded(parameter, key, value) for key, value in state.items()}
            loading[parameter] = {
                key: value if self._moves(optimizer, key, value) else None
                for key, value in loaded.items()
            }
            rest[number] = {k: v for k, v in state.items() if loading[parameter][k] is None}
        self._loading[id(optimizer)] = loading
        return {**state_dict, "state": rest}

    def after_load(self, optimizer: Optimizer) -> None:
        """Writes them into the image."""
        with self._moving:
            loading = self._loading.pop(id(optimizer), {})
            for parameter, values in loading.items():
                state = optimizer.state[parameter]
                optimizer.state[parameter] = {
                    key: state.get(key) if value is None else value for key, value in values.items()
                }
            self._broken = None
            self._last.pop(id(optimizer), None)
            self._place_states()

    # ---- figures and the end --------------------------------------------------------------------

    @property
    def sources(self) -> list[tuple[Callable[..., int], int]]:
        """What ``stats.gather`` takes its figures from."""
        return [(lib.refit_offloader_stats, buffer.offloader._live) for buffer in self._buffers]

    @property
    def nbytes(self) -> int:
        """Bytes of all states on the host."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def close(self) -> None:
        """Takes the states to the device, where PyTorch's own step finds them, and the hooks away.

        DeviceMemoryError: the device has no memory for them; nothing is lost, and it stays open.
        """
        with self._moving:
            self._wait()
            self._masters.bring_back()
            for optimizer in self._optimizers:
                for param_state in self._param_states_of(optimizer):
                    _move_out(optimizer, param_state, self._stays.get(id(optimizer), {}))
            self._end()

    def abandon(self) -> None:
        """No call follows. States for which the device has no memory stay tensors of the host, and
        masters whose weights have changed or are away stay there until they are used; a warning
        says what to do."""
        said: list[str] = []
        with self._moving:
            try:
                self._wait()
                try:
                    self._masters.bring_back()
                except (CorruptError, StateError) as why:
                    said.append(f"masters, which stay on the host until they are used. {why}")
                for optimizer in self._optimizers:
                    for param_state in self._param_states_of(optimizer):
                        _move_out(optimizer, param_state, self._stays.get(id(optimizer), {}))
            except DeviceMemoryError as why:
                said.append(
                    "the states that live on the host, while the device had no memory for them. "
                    "Those that found none are tensors of the CPU, with which PyTorch cannot step "
                    "parameters of a GPU: free some memory, then call "
                    f"optimizer.load_state_dict(optimizer.state_dict()) before the next step. {why}"
                )
            finally:
                self._end()
        for one in said:
            warnings.warn(
                "a Controller was let go of, for which close() would have raised an error, with "
                + one,
                RuntimeWarning,
                stacklevel=2,
            )

    def _end(self) -> None:
        self._hooks.remove()
        self._masters.close()
        if self._prefetch is not None:
            self._prefetch.remove()
        for share in self._shares:
            share.close()
        self._shares.clear()
        for buffer in self._buffers:
            if not self._masters.is_buffer_in_use(buffer):
                buffer.close()
        self._buffers.clear()
        self._param_states.clear()
        self._observers.hold(IMAGE, 0)


def _key(optimizer: Optimizer, parameter: Any) -> tuple[int, int]:
    return id(optimizer), id(parameter)


def parameters_of(optimizer: Optimizer) -> Iterator[tuple[int, Any]]:
    """Its parameters, each with the number of its group."""
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            yield number, parameter


def _why_it_stays(value: Any) -> str | None:
    """Why a state cannot live on the host; None if it can, or is not a state that matters."""
    if isinstance(value, torch.Tensor):
        if value.dim() == 0:
            return None
        return next(filter(None, map(why_tensor_stays, plain_of(value))), None)
    if isinstance(value, list | tuple | dict) and any(
        isinstance(one, torch.Tensor)
        for one in (value.values() if isinstance(value, dict) else value)
    ):
        return f"it is a {type(value).__name__} of tensors: only tensors live on the host"
    return None


def _nbytes(value: Any) -> int:
    return sum(map(extent, plain_of(value)))


def _distinct(names: Iterable[str]) -> list[str]:
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        found.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return found


def _without_shared(weights: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """The addresses of bf16 weights, or 0, of masters of these bytes; 0 for those that share some:
    a step of one master would change the weights by which the other can be had."""
    order = [number for number, at in enumerate(weights) if at]
    order.sort(key=lambda number: weights[number])
    found = list(weights)
    before, reached = -1, 0
    for number in order:
        if weights[number] < reached:
            found[number] = found[before] = 0
        end = weights[number] + sizes[number] // 2
        if end > reached:
            before, reached = number, end
    return found


def _move_out(optimizer: Optimizer, param_state: ParamState, stays: Mapping[Any, str]) -> None:
    """The states of a parameter become tensors of PyTorch's own, on its device, but for those that
    stay where the optimizer keeps them."""
    state = optimizer.state.get(param_state.parameter) or {}
    device = local(param_state.parameter).device
    try:
        for key, one in param_state.states.items():
            if state.get(key) is one.shown:
                state[key] = one.over(_fresh(one, device))
        for key, value in state.items() if param_state.share is not None else ():
            # what the step made on the CPU, and the image has no place for
            if is_many(value) and key not in stays and value.device != device:
                state[key] = value.to(device)
    except (RuntimeError, MemoryError) as why:
        if not lacks_memory(why):
            raise
        raise DeviceMemoryError(
            f"no memory on {device} for {param_state.name}.{key}: the states live on the host, "
            "and nothing is lost. Free some memory, or let go of the optimizer and the "
            f"controller together: {why}"
        ) from why


def _fresh(one: State, device: torch.device) -> list[torch.Tensor]:
    """Copies of a state's tensors on a device."""
    with interrupts_held(), torch.no_grad():
        fresh = [
            torch.empty_like(s.view, device=device, memory_format=torch.preserve_format)
            for s in one.slots
        ]
        for tensor, slot in zip(fresh, one.slots, strict=True):
            tensor.copy_(slot.view)
    return fresh


def _found_inf(optimizer: Optimizer) -> bool:
    """Whether a GradScaler has told a fused optimizer to skip this step. Waits for the device."""
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, torch.Tensor) and bool(found.any())


def _can_leave(parameter: Any, layout: StateLayout) -> bool:
    """Whether the CPU can step a parameter. A part of one that is shared among ranks of a GPU is
    stepped there if the optimizer's arithmetic is not element by element."""
    plain = local(parameter)
    return plain is parameter or plain.device.type == "cpu" or layout.elementwise


# ---- What an optimizer calls.


class _StepHooks:
    """The hooks by which a step, and what is loaded, come here. ``remove`` takes them away."""

    def __init__(self, states: HostedStates, optimizers: Sequence[Optimizer]) -> None:
        self._handles: list[Any] = []
        disable = cast(Any, torch.compiler).disable
        reference = weakref.ref(states)
        for optimizer in optimizers:
            call = _Calls(reference, optimizer)
            post = optimizer.register_step_post_hook(disable(call.after_step))
            cast(Any, optimizer._optimizer_step_post_hooks).move_to_end(post.id, last=False)
            self._handles += [
                optimizer.register_step_pre_hook(
                    LastHook("_optimizer_step_pre_hooks", disable(call.before_step))
                ),
                post,
                optimizer.register_load_state_dict_pre_hook(
                    LastHook("_optimizer_load_state_dict_pre_hooks", call.before_load)
                ),
                optimizer.register_load_state_dict_post_hook(call.after_load, prepend=True),
            ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _Calls:
    """What the hooks of one optimizer do while its states live on the host."""

    def __init__(self, states: "weakref.ref[HostedStates]", optimizer: Optimizer) -> None:
        self._states = states
        self._optimizer = weakref.ref(optimizer)
        self._idle: tuple[Optimizer, Stepping] | None = None
        self._steps = 0
        self._check: Callable[[], None] | None = None

    def _known(self, optimizer: Optimizer) -> HostedStates | None:
        """The owner of the states; None for a copy of the optimizer that took the hooks along."""
        return self._states() if self._optimizer() is optimizer else None

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Makes the step, and lets PyTorch's code run on a stand-in without parameters."""
        states = self._known(optimizer)
        if states is None:
            return None
        states.refuse_closure(optimizer, *args[1:], **kwargs)
        more, kwargs = _with_loss(args[1:], kwargs)
        self._steps += 1
        self._check = states.rehearse(optimizer, self._steps, more, kwargs)
        stepping = states.step(optimizer, more, kwargs)
        idle = stepping.empty()
        self._idle = idle, stepping
        return (idle, *more), kwargs

    def after_step(self, _optimizer: Optimizer, args: Any, _kwargs: Any) -> None:
        """Groups none of whose parameters was stepped have counted a step, too."""
        idle, self._idle = self._idle, None
        if idle is not None and args[0] is idle[0]:
            idle[1].take(idle[0])
            idle[1].finish()
            check, self._check = self._check, None
            if check is not None:
                check()

    def before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> Any:
        states = self._known(optimizer)
        return None if states is None else states.before_load(optimizer, state_dict)

    def after_load(self, optimizer: Optimizer) -> None:
        states = self._known(optimizer)
        if states is not None:
            states.after_load(optimizer)


def _as_loaded(parameter: torch.Tensor, key: Any, value: Any) -> Any:
    """A state as PyTorch would load it, but on the CPU."""
    if not isinstance(value, torch.Tensor):
        return value
    like = torch.empty(0, dtype=parameter.dtype, device="cpu")
    return Optimizer._process_value_according_to_param_policy(like, value, 0, [], key)


def _with_loss(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    """Evaluates the closure, once, and puts one in its place that returns what it returned."""
    closure = args[0] if args else kwargs.get("closure")
    if not callable(closure):
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    again: Callable[[], Any] = lambda: loss  # noqa: E731
    return ((again, *args[1:]), kwargs) if args else (args, {**kwargs, "closure": again})


class _Prefetch:
    """Lets the first windows come in during the backward pass: a hook on the parameter whose
    gradient is there first, the last one that was stepped. FSDP2 calls no such hook: there the
    step itself begins the copies."""

    def __init__(self, states: HostedStates) -> None:
        self._states = weakref.ref(states)
        self._handles: dict[int, tuple[Any, Any]] = {}
        self._called: set[int] = set()
        """The optimizers whose hook was called since they were watched."""

    def watch(self, optimizer: Optimizer) -> None:
        stepped = [p for _, p in parameters_of(optimizer) if p.grad is not None]
        accumulate = [p for p in stepped if p.is_leaf and p.requires_grad]
        last = accumulate[-1] if accumulate else None
        before, handle = self._handles.get(id(optimizer), (None, None))
        was_called = id(optimizer) in self._called
        self._called.discard(id(optimizer))
        if last is None or (before is last and was_called):
            return  # a hook that was not called may have been lost
        if handle is not None:
            handle.remove()
        reference, whose, called = self._states, weakref.ref(optimizer), self._called

        def begin(_parameter: torch.Tensor) -> None:
            states, optimizer = reference(), whose()
            if states is not None and optimizer is not None:
                called.add(id(optimizer))
                states.prefetch(optimizer)

        eager = cast(Any, torch.compiler).disable(begin)  # it is not part of a graph
        self._handles[id(optimizer)] = last, on_accumulation(last, eager)

    def remove(self) -> None:
        for _, handle in self._handles.values():
            handle.remove()
        self._handles.clear()
