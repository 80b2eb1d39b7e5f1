"""Which states of some optimizers live on the host, and the place that each has in a host image.

    place       states that are there, or that a probe foresees, get a place, and are moved in
    keep        those of some parameters move out, and stay on the device until ``dismiss``
    move_out    the states become tensors of the device again

A state that no probe foresees (its size depends on that of the parameter in another way, or it
comes after the first step) is made on the device, and gets its place at the end of the step. One of
no dimensions, such as a step counter, one of at most 512 bytes, and one that the optimizer makes on
another device than that of its parameter, stay where they are.

Other code may put a state elsewhere, or exchange those of two parameters: ``place`` looks at each
parameter in each step, and moves what is not in its place. Independent of how states are stepped.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import torch

from refit._c.call_lock import WaitingCallLock
from refit._c.config import Config
from refit._c.library import lib
from refit._c.waiting import interrupts_held
from refit.errors import DeviceMemoryError, StateError
from refit.observe.observers import Observers
from refit.states.offloaded_tensor import untouched
from refit.states.storages import opened, unique_name, why_tensor_stays
from refit.states.torch_memory import Devices, lacks_memory
from refit.step.cpu_step import CpuShare
from refit.step.host_buffer import UNIT, HostBuffer
from refit.step.host_masters import HostMasters
from refit.step.param_state import (
    BufferSlot,
    ParamState,
    Recipe,
    State,
    dense_like,
    extent,
    parameters_of,
    plain_of,
)
from refit.step.probe import StateLayout, alike, kind_of_parameter, learn
from refit.step.schedule import CPU, STAYS, Division
from refit.step.stand_in import counts_on_device, is_many, local

Optimizer = torch.optim.Optimizer

SMALL = 512
"""States of at most so many bytes stay on the device."""

IMAGE = "states on the host"
"""Their memory, in pictures."""


Unit: TypeAlias = tuple[Optimizer, ParamState]
"""A parameter of an optimizer, whose states move together."""


class Placement:
    """The states of some optimizers, and where they live. Used by one thread at a time.

    ``names``: of all parameters, by their identity. ``wait``: waits for the copies of the last
    step. ``lock`` is held by the caller. UnsupportedError for an optimizer that cannot be stepped
    for some parameters at a time.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        names: Callable[[], Mapping[int, str]],
        config: Config,
        devices: Devices,
        division: Division,
        masters: HostMasters,
        lock: WaitingCallLock,
        wait: Callable[[], None],
        observers: Observers,
        *,
        overlap: bool,
        kernels: bool,
        allow_unverified: bool,
    ) -> None:
        self._optimizers = list(optimizers)
        self._names = names
        self._config = config
        self._devices = devices
        self._division = division
        self._masters = masters
        self._lock = lock
        self._wait = wait
        self._observers = observers
        self._overlap = overlap
        self._kernels = kernels
        self._allow_unverified = allow_unverified
        self.param_states: dict[tuple[int, int], ParamState] = {}
        """By the identities of an optimizer and a parameter whose states live on the host."""
        self.buffers: list[HostBuffer] = []
        self.shares: list[CpuShare] = []
        self._resident: dict[tuple[int, int], tuple[Any, int]] = {}
        """Parameters whose states stay on the device, and the bytes of these."""
        self._stateless: dict[tuple[int, int], Any] = {}
        """Parameters without a state that could move."""
        self._layouts: dict[tuple[int, Any], StateLayout] = {}
        self._stays: dict[int, dict[Any, str]] = {}
        self._written: dict[int, set[Any]] = {}
        """Of each optimizer, by the keys of states: see ``StateLayout``."""
        self._closure_within: set[int] = set()
        """Optimizers that evaluate a closure after they have changed a parameter, or twice."""
        self._image: set[int] = set()
        """The memory of all places."""
        for number, optimizer in enumerate(self._optimizers):
            for group, parameter in parameters_of(optimizer):
                if self._is_trained(parameter):
                    self._refuse_unmade(parameter)
                    self._layout_of(number, optimizer, group, parameter)

    # ---- what there is --------------------------------------------------------------------------

    def evaluates_closure_first(self, optimizer: Optimizer) -> bool:
        """Whether a step evaluates a closure once, before it changes a parameter."""
        return id(optimizer) not in self._closure_within

    def stays(self, optimizer: Optimizer, parameter: Any) -> bool:
        """Whether the states of a parameter stay on the device, by choice."""
        place = _key(optimizer, parameter)
        param_state = self.param_states.get(place)
        return place in self._resident or (param_state is not None and param_state.is_resident)

    def owns(self, parameter: Any, key: Any, value: Any) -> bool:
        """Whether a state of a parameter is the tensor over the image."""
        for optimizer in self._optimizers:
            param_state = self.param_states.get(_key(optimizer, parameter))
            if (
                param_state is not None
                and key in param_state.states
                and param_state.states[key].shown is value
            ):
                return True
        return False

    def owns_master(self, tensor: Any) -> bool:
        """Whether a tensor is a master that lives on the host, whether it is there now or not."""
        found = [self.param_states.get(_key(optimizer, tensor)) for optimizer in self._optimizers]
        return any(param_state is not None and param_state.has_master_here for param_state in found)

    @property
    def resident(self) -> list[tuple[str, str]]:
        """States that stay on the device, and why: by choice, or because they cannot live on the
        host. Those of 512 bytes and less are not among them."""
        names = self._names()
        reason = self._division.why_it_stays
        found = [(names.get(one, "state"), reason) for _, one in self._resident]
        found += [(one.name, reason) for one in self.param_states.values() if one.is_resident]
        found += [
            (one.name, "its states live on the host, where the CPU steps it")
            for one in self.param_states.values()
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
    def resident_bytes(self) -> int:
        """Bytes of states that stay on the device by choice."""
        residents = [one for one in self.param_states.values() if one.is_resident]
        return sum(nbytes for _, nbytes in self._resident.values()) + sum(
            one.nbytes for one in residents
        )

    @property
    def grown(self) -> list[tuple[str, str]]:
        """States that are larger than a window and cannot be split, and what follows."""
        found = []
        for param_state in self.param_states.values():
            buffer = cast(HostBuffer, param_state.buffer)
            if (
                param_state.share is None
                and param_state.nbytes > buffer.window_bytes
                and not (param_state.parted or param_state.is_resident)
            ):
                found.append(
                    (
                        param_state.name,
                        f"its states take {param_state.nbytes} bytes and are stepped as a whole: "
                        f"the window grows to them, above its {buffer.window_bytes} bytes",
                    )
                )
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of all states on the host."""
        return sum(buffer.nbytes for buffer in self.buffers)

    @property
    def sources(self) -> list[tuple[Callable[..., int], int]]:
        """What ``stats.gather`` reads."""
        return [(lib.refit_offloader_stats, buffer.offloader._live) for buffer in self.buffers]

    def of(self, optimizer: Optimizer) -> Iterator[ParamState]:
        """The parameters of an optimizer whose states live on the host."""
        for _, parameter in parameters_of(optimizer):
            param_state = self.param_states.get(_key(optimizer, parameter))
            if param_state is not None:
                yield param_state

    # ---- the plan -------------------------------------------------------------------------------

    def place(self) -> None:
        """Every state that there is, or that is foreseen, gets its place; those that there are move
        there. Blocks for the page-lock and for copies. BudgetError and others: what has moved stays
        moved, nothing is lost, call again."""
        changed = [
            (number, optimizer, group, parameter)
            for number, optimizer in enumerate(self._optimizers)
            for group, parameter in parameters_of(optimizer)
            if not self._is_in_place(optimizer, parameter)
        ]
        self._separate(changed)
        self._move_back(changed)
        without = list(self._without_place(changed))
        if without:
            self._give_places(without)

    def _give_places(
        self, without: Sequence[tuple[Optimizer, Any, StateLayout, dict[Any, Any]]]
    ) -> None:
        """Opens images for states that have no place yet, as the schedule divides them."""
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
        found: dict[
            tuple[torch.device, Optimizer | None],
            list[tuple[Optimizer, ParamState, dict[Any, Any]]],
        ] = {}
        for place, nbytes, one in zip(places, sizes, without, strict=True):
            optimizer, parameter, layout, likes = one
            if not likes:
                self._stateless[_key(optimizer, parameter)] = parameter
            elif place == STAYS or (place == CPU and not _can_leave(parameter, layout)):
                self._resident[_key(optimizer, parameter)] = parameter, nbytes
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
        param_state = self.param_states.get(_key(optimizer, parameter))
        state = optimizer.state.get(parameter)
        if param_state is None or param_state.is_resident:
            return False
        # Each of them is asked, also those that the optimizer has no more: a step makes them again.
        if sum(one.show_again() for one in param_state.states.values()):
            self._wait()  # a new view is not marked: what uses it would not wait for the copies
            self._image |= _storages_of([param_state])
            return False
        if not state:
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
        if self.stays(optimizer, parameter):
            return True
        param_state = self.param_states.get(place)
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
            if (one is None or one.plain(value) is None) and self.moves(optimizer, key, value):
                return False
        return True

    def _needs_none(self, place: tuple[int, int], parameter: Any) -> bool:
        return place in self._stateless or not self._is_trained(parameter)

    def _is_trained(self, parameter: Any) -> bool:
        """Whether it may be stepped. Masters require no gradient, and are given one."""
        return (
            parameter.requires_grad or parameter.grad is not None or self._masters.knows(parameter)
        )

    def moves(self, optimizer: Optimizer, key: Any, value: Any) -> bool:
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

    def _likes(self, optimizer: Optimizer, parameter: Any, layout: StateLayout) -> dict[Any, Any]:
        """The states that move: those that there are, or tensors that look like those to come."""
        state = optimizer.state.get(parameter, {})
        if state:
            return {k: one for k, one in state.items() if self.moves(optimizer, k, one)}
        wrapped = local(parameter) is not parameter
        likes = {}
        for one in layout.states or ():
            if wrapped and one.sizes is not None:
                return {}  # how it is sharded is seen once it is there
            like = one.like(local(parameter))
            if extent(like) > SMALL:
                likes[one.key] = Recipe(parameter.detach()).made([like]) if wrapped else like
        return likes

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
                self._closure_within.add(id(optimizer))
        return self._layouts[key]

    def _forget_others(self) -> None:
        """Lets go of parameters that no optimizer has any longer."""
        there = {_key(one, p) for one in self._optimizers for _, p in parameters_of(one)}
        gone = [one.parameter for place, one in self.param_states.items() if place not in there]
        if any(map(self._masters.is_away, gone)):
            self._masters.bring_back()
        for table in (self.param_states, self._stateless, self._resident):
            for place in [one for one in table if one not in there]:
                del table[place]

    def _open_buffer(
        self,
        device: torch.device,
        entries: list[tuple[Optimizer, ParamState, dict[Any, Any]]],
        stepper: Optimizer | None,
    ) -> None:
        """One image for these states of some parameters; those that there are move in.
        ``stepper``: their optimizer, if the CPU is to step them."""
        names: list[str] = []
        shapes: list[torch.Tensor] = []
        weights: list[int] = []
        for _, param_state, likes in entries:
            if stepper is None and self._masters.can_live(param_state.parameter):
                names.append(f"{param_state.name}.master")
                shapes.append(dense_like(param_state.parameter))
                weights.append(self._weights_to_code_by(param_state, likes))
            for key, like in likes.items():
                for path, one in opened(like):
                    names.append(".".join(map(str, (param_state.name, key, *path))))
                    shapes.append(dense_like(one))
                    weights.append(0)
        sizes = [extent(one) for one in shapes]
        weights = _without_shared(weights, sizes)
        handle = self._devices[device]
        given: dict[str, int] = {}
        named = [unique_name(name, given) for name in names]
        buffer = HostBuffer(device, handle, self._config, named, sizes, self._observers, weights)
        self.buffers.append(buffer)
        share = None
        if stepper is not None:
            share = CpuShare(
                stepper,
                buffer,
                [one for _, one, _ in entries],
                self._lock,
                is_early=self._overlap,
                kernels=self._kernels,
            )
            self.shares.append(share)
        regions = iter(enumerate(shapes))
        for optimizer, param_state, likes in entries:
            param_state.buffer, param_state.share = buffer, share
            if stepper is None and self._masters.can_live(param_state.parameter):
                param_state.master = State([BufferSlot(buffer, *next(regions))], Recipe(shapes[0]))
            for key, like in likes.items():
                slots = [BufferSlot(buffer, *next(regions)) for _ in opened(like)]
                param_state.states[key] = State(slots, Recipe(like))
            self._move_in([(optimizer, param_state)])
            self.param_states[_key(optimizer, param_state.parameter)] = param_state
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

    def _close_unused(self) -> None:
        """Gives back images whose states have all got another place."""
        used = {id(param_state.buffer) for param_state in self.param_states.values()}
        for share in [one for one in self.shares if id(one.buffer) not in used]:
            share.close()
            self.shares.remove(share)
        for buffer in [one for one in self.buffers if id(one) not in used]:
            buffer.close()
            self.buffers.remove(buffer)
        self._image = _storages_of(self.param_states.values())
        self._observers.hold(IMAGE, self.nbytes)

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

    # ---- states that other code has put elsewhere -----------------------------------------------

    def _separate(self, changed: Iterable[tuple[int, Optimizer, int, Any]]) -> None:
        """Copies states out of the places of other parameters, which code has exchanged, where no
        place of their own takes them. StateError: two parameters have one state, and a step changes
        it. One that is only read may stay on the device for both, or get two places."""
        seen: dict[int, tuple[bool, Any, Any]] = {}
        for _, optimizer, _, parameter in changed:
            place = _key(optimizer, parameter)
            param_state = self.param_states.get(place)
            state = optimizer.state.get(parameter) or {}
            for key, value in state.items():
                if not isinstance(value, torch.Tensor):
                    continue
                if any(map(why_tensor_stays, plain_of(value))):
                    continue
                own = None
                if param_state is not None and not param_state.is_resident:
                    own = param_state.states.get(key)
                if own is not None and own.shown is value:
                    continue
                is_written = key in self._written.get(id(optimizer), ())
                is_written &= not self._allow_unverified
                owner = self._owner_of(value)
                if owner is not None and owner[1].states[owner[2]] is not own:
                    there = owner[0].state.get(owner[1].parameter) or {}
                    is_shared = owner[1] is not param_state and there.get(owner[2]) is value
                    if is_written and is_shared:
                        self._refuse_shared(parameter, key, f"{owner[1].name}.{owner[2]}")
                    if own is None:
                        self._wait()
                        state[key] = value.detach().to(local(parameter).device, copy=True)
                    continue
                with untouched():
                    at = plain_of(value)[0].data_ptr()
                if not at:  # it is away
                    continue
                splits = is_written and not self.stays(optimizer, parameter)
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
            for param_state in self.of(optimizer):
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

    def _move_back(self, changed: Iterable[tuple[int, Optimizer, int, Any]]) -> None:
        """States that have a place and are elsewhere move to it."""
        placed = [
            (one, self.param_states.get(_key(one, parameter))) for _, one, _, parameter in changed
        ]
        misplaced = [
            (one, param_state)
            for one, param_state in placed
            if param_state and self._needs_move(one, param_state)
        ]
        if misplaced:
            self._wait()
            self._move_in(misplaced)

    def _needs_move(self, optimizer: Optimizer, param_state: ParamState) -> bool:
        """Whether a state is not the tensor over the image: other code has put it there."""
        state = optimizer.state.get(param_state.parameter)
        if not state or param_state.is_resident:
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
                    param_state.is_blank = False
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

    # ---- states that "auto" keeps on the device -------------------------------------------------

    def units(self) -> dict[torch.device, list[Unit]]:
        """By device the parameters whose states "auto" keeps or could keep: first those it does."""
        found: dict[torch.device, list[Unit]] = {}
        for optimizer in self._optimizers:
            for one in self.of(optimizer):
                if one.is_resident or self._can_stay(optimizer, one):
                    device = cast(HostBuffer, one.buffer).device
                    found.setdefault(device, []).append((optimizer, one))
        for units in found.values():
            units.sort(key=lambda unit: not unit[1].is_resident)
        return found

    def _can_stay(self, optimizer: Optimizer, param_state: ParamState) -> bool:
        """Whether all states are there, and no other rank has to know where. With wrapped states it
        has, for what gathers them works on one kind of device; and so it has if a step talks to
        other ranks, which have to step parameters in the same order."""
        parameter = param_state.parameter
        if param_state.share is not None or local(parameter) is not parameter:
            return False
        is_alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        state = optimizer.state.get(parameter) or {}
        return (param_state.elementwise or is_alone) and all(
            state.get(key) is one.shown for key, one in param_state.pairs
        )

    def keep(self, units: Iterable[Unit]) -> None:
        """The states of these parameters, which visit the device, move there and stay. What
        ``HostMasters.bring_back`` raises: some may have, nothing is lost. Not while copies are
        under way."""
        units = list(units)
        self._masters.bring_back([one for _, one in units if one.master is not None])
        for optimizer, param_state in units:
            device = local(param_state.parameter).device
            made = {}
            with interrupts_held(), torch.inference_mode(False):  # to be written in any mode
                for key, one in param_state.pairs:
                    with self._told(param_state.parameter, key):
                        made[key] = one.over(_fresh(one, device))
                optimizer.state[param_state.parameter].update(made)
                param_state.is_resident = True

    def dismiss(self, found: Iterable[ParamState]) -> None:
        """They visit the device again; ``place`` moves them in."""
        for one in found:
            one.is_resident = False

    # ---- the end --------------------------------------------------------------------------------

    def move_out(self) -> None:
        """The states become tensors of PyTorch's own, on the device. DeviceMemoryError: some have,
        nothing is lost. Not while copies are under way."""
        shown = {
            id(one.shown): one
            for param_state in self.param_states.values()
            for one in param_state.states.values()
        }
        for optimizer in self._optimizers:
            counts_there = {
                id(one)
                for group in optimizer.param_groups
                if counts_on_device(group)
                for one in group["params"]
            }
            for _, parameter in parameters_of(optimizer):
                self._copy_out(optimizer.state.get(parameter) or {}, parameter, shown)
            for param_state in self.of(optimizer):
                if param_state.share is not None:
                    counts = id(param_state.parameter) in counts_there
                    self._numbers_out(optimizer, param_state, counts)

    def _copy_out(self, state: dict[Any, Any], parameter: Any, shown: Mapping[int, State]) -> None:
        """The states of a parameter that lie over the image, by whichever parameter's tensor: code
        may have exchanged them."""
        device = local(parameter).device
        for key, value in state.items():
            one = shown.get(id(value))
            if one is not None:
                with self._told(parameter, key):
                    state[key] = one.over(_fresh(one, device))

    def _numbers_out(self, optimizer: Optimizer, param_state: ParamState, counts: bool) -> None:
        """What a step on the CPU has made, and the image has no place for, but for what stays where
        the optimizer keeps it. ``counts``: numbers are on the device, too."""
        state = optimizer.state.get(param_state.parameter) or {}
        device = local(param_state.parameter).device
        stays = self._stays.get(id(optimizer), {})
        for key, value in state.items():
            is_there = is_many(value) or (counts and isinstance(value, torch.Tensor))
            if is_there and key not in stays and value.device != device:
                with self._told(param_state.parameter, key):
                    state[key] = value.to(device)

    @contextmanager
    def _told(self, parameter: Any, key: Any) -> Iterator[None]:
        """DeviceMemoryError with a sentence, for a device that lacks memory."""
        try:
            yield
        except (RuntimeError, MemoryError) as why:
            if not lacks_memory(why):
                raise
            raise DeviceMemoryError(
                f"no memory on {local(parameter).device} for {self._name_of(parameter)}.{key}: the "
                "states live on the host, and nothing is lost. Free some memory, or let go of the "
                f"optimizer and the controller together: {why}"
            ) from why

    def close(self) -> None:
        """Gives the images back, but for those that masters have to return from."""
        for share in self.shares:
            share.close()
        self.shares.clear()
        for buffer in self.buffers:
            if not self._masters.is_buffer_in_use(buffer):
                buffer.close()
        self.buffers.clear()
        self.param_states.clear()
        self._observers.hold(IMAGE, 0)


def _key(optimizer: Optimizer, parameter: Any) -> tuple[int, int]:
    return id(optimizer), id(parameter)


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


def _storages_of(param_states: Iterable[ParamState]) -> set[int]:
    """Of the image, those over which their states lie."""
    states = [one for param_state in param_states for one in param_state.states.values()]
    return {slot.storage_id for one in states for slot in one.slots} - {0}


def _can_leave(parameter: Any, layout: StateLayout) -> bool:
    """Whether the CPU can step a parameter. A part of one that is shared among ranks of a GPU is
    stepped there if the optimizer's arithmetic is not element by element."""
    plain = local(parameter)
    return plain is parameter or plain.device.type == "cpu" or layout.elementwise


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
