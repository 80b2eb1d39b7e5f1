"""One step of an optimizer, window by window, that can be broken off and finished later.

The parameters of a step are its entries, a large one as several. Each window's entries are stepped
on a stand-in (see ``stand_in``); what that has made becomes the optimizer's when the window is
complete. So at any point it is known what was stepped:

- the code of a window has not run, or it has changed nothing: the window is stepped again;
- it has run: its results are taken over, which can be done twice;
- it has failed after it had changed a parameter: as in a step without refit, the parameters of this
  window are half updated. They count as stepped, and the error names them.

If PyTorch finds no memory in a window, for new states or for what it calculates with, and has not
changed a parameter, all memory of the windows is given back, and the rest is stepped with fewer
parameters at a time and nothing under way meanwhile; DeviceMemoryError if that is one already.

Python's signal handlers, Ctrl-C's among them, wait while the code of a window runs. Independent of
where states live.
"""

import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, cast

import torch

from refit._c.waiting import interrupts_held
from refit.errors import DeviceMemoryError, RefitError
from refit.observe.observers import Observers
from refit.states.torch_memory import lacks_memory
from refit.step.cpu_kernels import nearest_roots
from refit.step.cpu_step import CpuShare
from refit.step.host_buffer import HostBuffer
from refit.step.param_state import BufferSlot, ParamState, State
from refit.step.stand_in import Stepping, can_be_parted, flat, is_many, local, part_of
from refit.step.window import NEW, SAME_WINDOW, Part

Optimizer = torch.optim.Optimizer

_PADDING = 512
"""Bytes that the place of a part in a window may take beyond its own."""
WAIT = "wait for states"
WINDOW = "window"
ON_CPU = "step on the CPU"
"""Names of what a step does, in pictures."""
_SMALL = 512
"""Tensors of at most so many bytes are saved before a window is stepped."""


_NOTHING: Mapping[Any, Any] = MappingProxyType({})
_NONE: tuple[dict[Any, State], list[tuple[Any, State]]] = {}, []
"""The states of a parameter that has none on the host."""


class Entry:
    """A parameter that is stepped, or a part of one: ``count`` elements from ``first``."""

    __slots__ = (
        "count",
        "done",
        "first",
        "group",
        "is_new",
        "last",
        "moving",
        "param_state",
        "parameter",
        "share",
        "state",
    )

    def __init__(
        self,
        group: int,
        parameter: Any,
        param_state: ParamState | None,
        first: int = 0,
        count: int | None = None,
    ) -> None:
        self.group = group
        self.parameter = parameter
        self.share: CpuShare | None = None if param_state is None else param_state.share
        """What steps it on the CPU, where its states are: none of them moves."""
        self.param_state = param_state if self.share is None else None
        self.first = first
        self.count = count
        self.last = True
        """Whether no other part of the parameter follows."""
        self.state = _NOTHING
        """The parameter's, as the optimizer has it."""
        self.is_new = False
        """Whether this step makes the states, all of them, or of a part its own."""
        self.moving: list[tuple[Any, State]] = []
        """The states that travel in this step, or are made by it, by their keys."""
        self.done = False

    @property
    def lead(self) -> int:
        """Parts that come before those of the states: that of a master."""
        return 0 if self.param_state is None or self.param_state.master is None else 1

    @property
    def buffer(self) -> HostBuffer | None:
        return None if self.param_state is None else self.param_state.buffer

    def again(self, optimizer: Optimizer) -> "Entry":
        """The same, not stepped yet."""
        made = Entry(self.group, self.parameter, self.param_state, self.first, self.count)
        made.share = self.share
        made.last = self.last
        made.refresh(optimizer.state.get(self.parameter, {}))
        return made

    def refresh(self, state: Mapping[Any, Any]) -> None:
        """Before a step: which states come, or whether it makes all. One in whose place the
        optimizer has something else, as None or a sparse tensor, does neither."""
        states, pairs = (
            _NONE if self.param_state is None else (self.param_state.states, self.param_state.pairs)
        )
        self.state = state
        self.is_new = states.keys().isdisjoint(state)
        all_come = self.is_new or all(state.get(key) is one.shown for key, one in pairs)
        self.moving = (
            pairs if all_come else [(key, one) for key, one in pairs if state.get(key) is one.shown]
        )

    def invalidate(self, optimizer: Optimizer) -> None:
        """Before the step goes on: states may have been changed. What is new stays so."""
        self.state = optimizer.state.get(self.parameter, {})
        if not self.is_new:
            self.refresh(self.state)

    def place_of(self, slot: BufferSlot) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
        """Of what the entry uses of a slot: first byte, bytes, shape, strides."""
        if self.count is None:
            return 0, slot.nbytes, slot.shape, slot.stride
        size = slot.dtype.itemsize
        return self.first * size, self.count * size, (self.count,), (1,)


def entries_of(
    optimizer: Optimizer, param_states: Mapping[tuple[int, int], ParamState]
) -> Iterator[Entry]:
    """Every parameter that has a gradient, by group; first those whose states are there already,
    then those whose states this step makes."""
    new: list[Entry] = []
    for group, one in enumerate(optimizer.param_groups):
        for parameter in one["params"]:
            if parameter.grad is None:
                continue
            mine = param_states.get((id(optimizer), id(parameter)))
            state = optimizer.state.get(parameter, {})
            for entry in _split(group, parameter, mine, state):
                if entry.param_state is not None and entry.is_new:
                    new.append(entry)
                else:
                    yield entry
    yield from new


def _split(
    group: int, parameter: Any, param_state: ParamState | None, state: Mapping[Any, Any]
) -> list[Entry]:
    entry = Entry(group, parameter, param_state)
    entry.refresh(state)
    if (
        param_state is None
        or param_state.is_resident
        or entry.share is not None
        or not (entry.moving or param_state.master)
    ):
        entry.param_state = None
        entry.refresh(state)
        return [entry]
    whole = [entry]
    if not param_state.elementwise or len(entry.moving) < len(param_state.states):
        return whole
    window_bytes = cast(HostBuffer, param_state.buffer).window_bytes
    if param_state.nbytes <= window_bytes:
        param_state.parted = False
        return whole
    others = {key: value for key, value in state.items() if key not in param_state.states}
    param_state.parted = (
        param_state.looks_as_parameter()
        and not any(map(is_many, others.values()))
        and can_be_parted(parameter, others)
    )
    if not param_state.parted:
        return whole
    usable = window_bytes - _PADDING * len(param_state.all)
    count = max(
        param_state.grain,
        usable // param_state.bytes_of_an_element() // param_state.grain * param_state.grain,
    )
    total = parameter.numel()
    parts = [
        Entry(group, parameter, param_state, first, min(count, total - first))
        for first in range(0, total, count)
    ]
    for one in parts:
        one.refresh(state)
        one.last = one is parts[-1]
    return parts


@dataclass(eq=False)
class _InUse:
    """The window that is being stepped."""

    buffer: HostBuffer | None
    entries: list[Entry]
    parts: list[list[int]]
    """Of each entry the numbers of its parts in the list of the step."""
    parameters: list[Any]
    states: list[dict[Any, Any]]
    """Of each entry its state as the code is given it."""
    made: Optimizer
    versions: list[tuple[Any, int | None]] = field(default_factory=list)
    saved: list[tuple[list[torch.Tensor], list[int | None], Any]] = field(default_factory=list)
    """Small tensors that look alike, their versions, and copies of them."""
    masters: dict[int, torch.Tensor] = field(default_factory=dict)
    """By the number of an entry its master in the window's memory."""
    results: list[Any] = field(default_factory=list)
    """What the code has returned, once it has run."""


class WindowedStep:
    """One step. ``run`` makes it, or what is left of it."""

    def __init__(
        self,
        optimizer: Optimizer,
        stepping: Stepping,
        entries: list[Entry],
        names: Callable[[], Mapping[int, str]],
        weight_of: Callable[[ParamState], torch.Tensor],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.optimizer = optimizer
        self._names = names
        self._weight_of = weight_of
        self.entries = entries
        self._stepping = stepping
        self._args = args
        self._kwargs = kwargs
        self._in_use: _InUse | None = None
        self._tried: Sequence[Entry] = ()
        """Those of the window that was begun last."""
        self._torn: list[Entry] = []
        self._had_states = set(map(id, optimizer.state))
        self._before = {
            id(one.parameter): {
                key: _copied(value)
                for key, value in one.state.items()
                if one.param_state is None or key not in one.param_state.states
            }
            for one in self.entries
            if one.count is not None
        }
        self._has_begun = False
        self.has_made_states = False
        """Whether any parameter has other states now, and not only others' values."""

    # ---- the way through ------------------------------------------------------------------------

    def prefetch(self) -> None:
        """Starts the copies of the first windows, if the device has memory for them and for the
        gradients that are still to come. What ``HostBuffer.begin`` raises: nothing has started."""
        for buffer, entries in self._by_buffer().items():
            if buffer is not None:
                parts, _ = self._window_parts(entries)
                to_come = [one.parameter for one in entries if one.parameter.grad is None]
                if buffer.fits(parts, sum(local(one).nbytes for one in to_come)):
                    buffer.begin(parts)
                return

    def run(self, observers: Observers) -> None:
        """Steps every entry that was not, and gives the optimizer what the step made of its
        groups. ``observers`` are told of each window. What the code, the device and the copies
        raise; DeviceMemoryError."""
        if self._in_use is not None:
            self._finish(self._in_use)
        if self._has_begun:
            self._invalidate()
        self._has_begun = True
        most: int | None = None
        while True:
            try:
                self._step_all(observers, most)
                break
            except (RuntimeError, MemoryError) as why:
                if not lacks_memory(why):
                    raise
                most = self._fewer(most, why)
        self._put_in_order()
        self._stepping.finish()
        for one in self.entries:
            one.state = _NOTHING  # the step may be kept for longer than they are

    def _invalidate(self) -> None:
        for one in self.entries:
            if not one.done:
                one.invalidate(self.optimizer)

    def _step_all(self, observers: Observers, most: int | None) -> None:
        """Steps what is left: all of it with copies under way meanwhile, or ``most`` at a time,
        with nothing in the windows' memory in between."""
        remaining = self._by_buffer()
        shares = _by_share(remaining.get(None, []))
        unscale = _unscale(self.optimizer)
        submitted = {
            share: share.start([(one.parameter, one.group) for one in entries], unscale)
            for share, entries in shares.items()
        }
        here = [one for one in remaining.pop(None, []) if one.share is None]
        if most is None:
            visits = [
                (buffer, entries, *self._window_parts(entries))
                for buffer, entries in remaining.items()
            ]
            for buffer, _, parts, _ in visits[:1]:
                buffer.begin(parts)  # what stays on the device is stepped meanwhile
            if here:
                self._window(None, here, [[] for _ in here], {})
            for buffer, entries, parts, numbers in visits:
                self._visit(buffer, entries, parts, numbers, observers)
        else:
            for some in _batches(here, most):
                self._window(None, some, [[] for _ in some], {})
            for buffer, entries in remaining.items():
                for some in _batches(entries, most):
                    self._visit(buffer, some, *self._window_parts(some), observers)
                    buffer.wait()
        for share, entries in shares.items():
            self._step_on_cpu(share, entries, submitted[share], most, observers)
        for buffer in self._buffers():
            buffer.end()
        for share in _by_share(self.entries):
            share.join()

    def _step_on_cpu(
        self,
        share: CpuShare,
        entries: list[Entry],
        submitted: Sequence[Any],
        most: int | None,
        observers: Observers,
    ) -> None:
        """Entries whose states are on the host: those that its kernels know, ``submitted``, and
        then the others by PyTorch's code."""
        began = time.perf_counter()
        mine = {id(one.parameter): one for one in entries}

        def done(parameter: Any) -> None:
            mine[id(parameter)].done = True

        if submitted:
            with interrupts_held():
                share.run(done)
        with nearest_roots(self.optimizer) if share.is_elsewhere else nullcontext():
            for some in _batches([one for one in entries if not one.done], most or len(entries)):
                self._window(None, some, [[] for _ in some], {})
        if observers.drawn:
            took = time.perf_counter() - began
            observers.past(ON_CPU, took, took)

    def _fewer(self, most: int | None, why: BaseException) -> int:
        """How many to step at a time, after a window that found no memory. What it held is given
        back. DeviceMemoryError if there are no fewer; ``why`` if it has changed a parameter."""
        torn, tried = len(self._torn), self._tried
        is_left = self.unwind()
        if len(self._torn) > torn or not tried:
            raise why
        traceback.clear_frames(why.__traceback__)  # they hold the states that it has made
        for buffer in self._buffers():
            buffer.wait()
        self._invalidate()
        if most != 1:
            return max(1, len(tried) // 2)
        name = ", ".join(self._named(tried))
        state = "what was stepped stays so" if is_left else "nothing has changed"
        raise DeviceMemoryError(
            f"no memory on {local(tried[0].parameter).device} to step {name}, alone and with no "
            f"other state there: {why}; {state}. Free some memory"
        ) from why

    def _put_in_order(self) -> None:
        """Parameters that have got their first states stand in the order of the groups, as after a
        step of all parameters; windows have another order."""
        state = self.optimizer.state
        new = [
            one
            for group in self.optimizer.param_groups
            for one in group["params"]
            if id(one) not in self._had_states and one in state
        ]
        with interrupts_held():
            for one in new:
                state[one] = state.pop(one)

    def _buffers(self) -> list[HostBuffer]:
        return list({id(one.buffer): one.buffer for one in self.entries if one.buffer}.values())

    def _by_buffer(self) -> dict[Any, list[Entry]]:
        """What is left, by buffer; what has none under None."""
        found: dict[Any, list[Entry]] = {}
        for one in self.entries:
            if not one.done:
                found.setdefault(one.buffer, []).append(one)
        return found

    def _visit(
        self,
        buffer: HostBuffer,
        entries: list[Entry],
        parts: list[Part],
        numbers: list[list[int]],
        observers: Observers,
    ) -> None:
        """The entries of one buffer, window by window."""
        buffer.begin(parts)
        at = 0
        while True:
            began = time.perf_counter()
            first, addresses = buffer.next()
            arrived = time.perf_counter()
            if not addresses:
                break
            after = at
            while after < len(entries) and numbers[after][0] < first + len(addresses):
                after += 1
            places = {first + number: address for number, address in enumerate(addresses)}
            self._window(buffer, entries[at:after], numbers[at:after], places)
            if observers.drawn:
                now = time.perf_counter()
                nbytes = sum(one.nbytes for one in parts[first : first + len(addresses)])
                observers.past(WAIT, now - began, arrived - began)
                observers.past(WINDOW, now - arrived, now - arrived, nbytes)
            at = after
        buffer.end()

    def _window_parts(self, entries: list[Entry]) -> tuple[list[Part], list[list[int]]]:
        """The parts of some entries, and of each entry the numbers of its own."""
        parts: list[Part] = []
        numbers: list[list[int]] = []
        for entry in entries:
            new = NEW if entry.is_new else 0
            mine: list[int] = []
            masters = (
                entry.param_state.master.slots
                if entry.param_state and entry.param_state.master
                else []
            )
            slots = [(slot, 0) for slot in masters]
            slots += [(slot, new) for _, one in entry.moving for slot in one.slots]
            for slot, flags in slots:
                offset, nbytes, _, _ = entry.place_of(slot)
                if nbytes:
                    mine.append(len(parts))
                    flags |= SAME_WINDOW if len(mine) > 1 else 0
                    if entry.count is None:
                        parts.append(slot.whole(flags))
                    else:
                        parts.append(Part(slot.region, flags, offset, nbytes))
            numbers.append(mine)
        return parts, numbers

    # ---- one window -----------------------------------------------------------------------------

    def _window(
        self,
        buffer: HostBuffer | None,
        entries: list[Entry],
        numbers: list[list[int]],
        places: Mapping[int, int],
    ) -> None:
        self._tried = entries
        masters = {
            at: self._master(cast(HostBuffer, buffer), one, places[numbers[at][0]])
            for at, one in enumerate(entries)
            if one.lead
        }
        parameters = [self._parameter(one, masters.get(at)) for at, one in enumerate(entries)]
        states = [self._given(buffer, *one, places) for one in zip(entries, numbers, strict=True)]
        chosen: list[list[Any]] = [[] for _ in self.optimizer.param_groups]
        for entry, parameter in zip(entries, parameters, strict=True):
            chosen[entry.group].append(parameter)
        every = self.optimizer.state
        state = {
            parameter: given
            for entry, parameter, given in zip(entries, parameters, states, strict=True)
            if given or entry.parameter in every
        }
        made = self._stepping.empty(chosen, state)
        before = [dict(one) for one in states]
        use = _InUse(buffer, entries, numbers, parameters, before, made)
        use.masters = masters
        self._save(use)
        self._in_use = use
        by_loop = any(map(_is_copied, entries)) and not _is_scaled(self.optimizer)
        with interrupts_held():
            self._stepping.run_on(made, use.results, self._args, self._kwargs, by_loop)
        self._finish(use)

    def _parameter(self, entry: Entry, master: torch.Tensor | None) -> Any:
        """What the code steps. A master is stepped as another parameter over the window's memory,
        with the gradient of the one that the optimizer has; on the CPU a copy of a parameter of
        another device, with a copy of its gradient."""
        if _is_copied(entry):
            plain: Any = local(entry.parameter).detach()
            made = plain.to("cpu", copy=True).requires_grad_()
            made.grad = local(entry.parameter.grad).to("cpu", copy=True)
            return made
        if master is not None:
            made = master.detach().requires_grad_()
            grad = entry.parameter.grad
            made.grad = grad if entry.count is None else flat(grad, entry.first, entry.count)
            return made
        if entry.count is None:
            return entry.parameter
        return part_of(entry.parameter, entry.first, entry.count)

    def _master(self, buffer: HostBuffer, entry: Entry, place: int) -> torch.Tensor:
        slot = cast(State, cast(ParamState, entry.param_state).master).slots[0]
        _, _, shape, stride = entry.place_of(slot)
        return buffer.tensor(place, slot.region, slot.dtype, shape, stride)

    def _given(
        self, buffer: HostBuffer | None, entry: Entry, numbers: list[int], places: Mapping[int, int]
    ) -> dict[Any, Any]:
        """The state that the code is given: what stays, and tensors over the window's memory."""
        if entry.count is None:
            given = dict(entry.state)
        else:
            given = {k: _copied(v) for k, v in self._before[id(entry.parameter)].items()}
        if _is_copied(entry):
            return {key: _on_cpu(value) for key, value in given.items()}
        if buffer is None or entry.is_new:
            return given
        mine = iter(numbers[entry.lead :])
        for key, one in entry.moving:
            tensors = []
            for slot in one.slots:
                _, nbytes, shape, stride = entry.place_of(slot)
                if nbytes:
                    address = places[next(mine)]
                    tensors.append(buffer.tensor(address, slot.region, slot.dtype, shape, stride))
                else:
                    tensors.append(torch.empty(shape, dtype=slot.dtype, device=buffer.device))
            given[key] = tensors[0] if entry.count is not None else one.over(tensors)
        if entry.count is None:
            return given
        return {key: given[key] for key in entry.state if key in given}

    def _save(self, use: _InUse) -> None:
        """What tells whether the code has changed anything, and small tensors as they were."""
        single: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for entry, parameter, state in zip(use.entries, use.parameters, use.states, strict=True):
            plain = local(parameter)
            use.versions.append((plain, _version(plain)))
            comes = [key for key, _ in entry.moving]
            for key, value in state.items():
                if key in comes or not isinstance(value, torch.Tensor):
                    continue
                plainly = type(value) is torch.Tensor and value.layout is torch.strided
                if plainly and value.dim() == 0:
                    single.setdefault((value.dtype, value.device), []).append(value)
                elif plainly and value.nbytes <= _SMALL:
                    use.saved.append(([value], [_version(value)], [value.detach().clone()]))
                elif entry.count is None:
                    use.versions.append((local(value), _version(local(value))))

        with interrupts_held(), torch.no_grad():  # one copy of all: on a GPU each takes a call
            use.saved += [
                ([*ones], [*map(_version, ones)], torch.stack(ones)) for ones in single.values()
            ]

    def _finish(self, use: _InUse) -> None:
        """Takes over what the code has made; the copies out follow it. Can be done twice."""
        groups = [at for at, group in enumerate(use.made.param_groups) if group["params"]]
        self._stepping.take(use.made, groups)
        buffer = use.buffer
        last = max((number for numbers in use.parts for number in numbers), default=-1)
        if buffer is None or buffer.window.progress <= last:
            for at in range(len(use.entries)):
                self._take_over(use, at)
            if buffer is not None:
                buffer.done()
        for entry in use.entries:
            entry.done = True
        self._in_use = None

    def _take_over(self, use: _InUse, at: int) -> None:
        entry, given = use.entries[at], use.states[at]
        found = use.made.state.get(use.parameters[at])
        made = {} if found is None else found
        every = self.optimizer.state
        real = {} if found is None and entry.parameter not in every else every[entry.parameter]
        taken = set()
        numbers = iter(use.parts[at][entry.lead :])
        if at in use.masters:
            self._round(entry, use.masters[at], use.parameters[at])
        if _is_copied(entry):
            self._copy_back(entry, use.parameters[at], given, made)
        makes_states = entry.is_new and entry.param_state is not None
        if entry.count is None and not makes_states and _is_in_place(entry, given, made, real):
            return
        self.has_made_states = True
        for key, one in entry.moving:
            value = made.get(key)
            inner = _plain_of(one, entry, value)
            came = None if entry.is_new else _plain_of(one, entry, given.get(key))
            for number, slot in enumerate(one.slots):
                _, nbytes, shape, stride = entry.place_of(slot)
                if not nbytes:
                    continue
                part = next(numbers)
                new = None if inner is None else inner[number]
                if entry.is_new:
                    cast(HostBuffer, use.buffer).place(part, _as_new(new, slot, shape, stride, use))
                elif new is not None and came is not None:
                    _write(came[number], new)
            if inner is not None:
                real[key] = one.shown
                taken.add(key)
        if entry.count is None:
            for key in [one for one in real if one in given and one not in made]:
                del real[key]
        for key, value in made.items():  # what nothing foresaw gets its place after the step
            if key not in taken and entry.count is not None and is_many(value):
                _join(real, key, value, entry)
            elif key not in taken and entry.last:
                _set(real, key, value, entry.count is not None)
        if entry.last:
            _order_as(made, real)

    def _copy_back(
        self, entry: Entry, stepped: torch.Tensor, given: dict[Any, Any], made: dict[Any, Any]
    ) -> None:
        """A parameter that the CPU has stepped, and states that are on its device, get the values
        of their copies."""
        with interrupts_held(), torch.no_grad():
            local(entry.parameter).copy_(stepped)
            for key, value in entry.state.items():
                is_there = isinstance(value, torch.Tensor) and value.device.type != "cpu"
                if is_there and made.get(key) is given.get(key):
                    value.copy_(given[key])
                    given[key] = made[key] = value

    def _round(self, entry: Entry, master: torch.Tensor, stepped: torch.Tensor) -> None:
        """Rounds the weights from a master, as its framework does, before it leaves."""
        _write(master, stepped)  # of an optimizer that gives a parameter other memory
        weight = self._weight_of(cast(ParamState, entry.param_state))
        count = weight.numel() if entry.count is None else entry.count
        with interrupts_held(), torch.no_grad():
            weight.narrow(0, entry.first, count).copy_(master.detach().view(-1))

    # ---- when it is broken off ------------------------------------------------------------------

    def finish_window(self) -> None:
        """Takes over the window whose code has run, if that is still to be done: before anything
        else makes use of its buffer."""
        if self._in_use is not None and self._in_use.results:
            self._finish(self._in_use)

    def unwind(self) -> bool:
        """Brings everything to the edge of a window. Whether anything was stepped, or is left."""
        use = self._in_use
        if use is not None and not use.results and self._is_torn(use):
            self._torn += use.entries
            use.results.append(None)
        try:
            if use is not None and use.results:
                self._finish(use)
            elif use is not None:
                for saved in use.saved:
                    for tensor, version, value in zip(*saved, strict=True):
                        if version is None or tensor._version != version:
                            tensor.copy_(value)
                self._in_use = None
            for buffer in self._buffers():
                buffer.end()
        except RefitError:
            return True  # what failed is tried again by the next call
        return any(one.done for one in self.entries)

    @staticmethod
    def _is_torn(use: _InUse) -> bool:
        """Whether the code has changed a parameter before it failed."""
        return any(_version(tensor) != version for tensor, version in use.versions)

    def stepped(self) -> list[str]:
        """The names of the parameters that were stepped, the whole of them."""
        left = {id(one.parameter) for one in self.entries if not one.done}
        return self._named(one for one in self.entries if id(one.parameter) not in left)

    def _named(self, entries: Iterable[Entry]) -> list[str]:
        names = self._names()
        found = {id(one.parameter): names.get(id(one.parameter), "state") for one in entries}
        return list(found.values())

    def explain(self, why: BaseException, is_left: bool) -> None:
        """Gives an error the names of the parameters that were stepped, and says what follows:
        whether something is left of the step, or nothing of it was made."""
        stepped = self.stepped()
        error: Any = why
        error.stepped = stepped
        error.torn = torn = self._named(self._torn)
        if not is_left:
            text = "no parameter was stepped: step() can be called again"
        else:
            every = len({id(one.parameter) for one in self.entries})
            text = (
                f"{len(stepped)} of {every} parameters were stepped (.stepped names them); "
                "controller.resume_step() finishes the step, the rest exactly once"
            )
        if torn:
            text += f"; the optimizer itself failed half way through {', '.join(torn[:3])}"
        if isinstance(why, RefitError):
            why.text = f"{why.text}; {text}"
            why.args = (why.text,)
        else:
            why.add_note(f"refit: {text}")


def _by_share(entries: Iterable[Entry]) -> dict[CpuShare, list[Entry]]:
    """Those that the CPU steps."""
    found: dict[CpuShare, list[Entry]] = {}
    for one in entries:
        if one.share is not None:
            found.setdefault(one.share, []).append(one)
    return found


def _batches(entries: list[Entry], most: int) -> Iterator[list[Entry]]:
    """Entries, at most so many at a time."""
    for at in range(0, len(entries), most):
        yield entries[at : at + most]


def _is_copied(entry: Entry) -> bool:
    """Whether the CPU steps a copy of a parameter, which is on another device."""
    return entry.share is not None and entry.share.is_elsewhere


def _on_cpu(value: Any) -> Any:
    """A state for the CPU to step. One that is there is the same tensor."""
    return local(value).to("cpu") if isinstance(value, torch.Tensor) else value


def _is_scaled(optimizer: Optimizer) -> bool:
    """Whether a GradScaler leaves gradients for a fused step to unscale."""
    return getattr(optimizer, "grad_scale", None) is not None


def _unscale(optimizer: Optimizer) -> float:
    """What gradients are to be multiplied by that a GradScaler leaves to a fused step."""
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else 1.0 / float(scale)


def _version(tensor: torch.Tensor) -> int | None:
    """Counts the changes of a tensor; None for one of ``torch.inference_mode``, without a count."""
    return None if tensor.is_inference() else tensor._version


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _plain_of(one: State, entry: Entry, value: Any) -> list[torch.Tensor] | None:
    """The plain tensors of a state as the code has it; None if it has another look."""
    if entry.count is None:
        return one.plain(value)
    alike = (
        isinstance(value, torch.Tensor)
        and value.shape == (entry.count,)
        and value.dtype == one.slots[0].dtype
        and value.layout is torch.strided
    )
    return [value] if alike else None


def _as_new(
    made: torch.Tensor | None,
    slot: BufferSlot,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    use: _InUse,
) -> torch.Tensor:
    """The bytes of a new state, as they are to lie in the image. Of one that the code
    has not made, or not so, any bytes: the optimizer does not get them."""
    device = cast(HostBuffer, use.buffer).device
    if made is not None and made.device == device and made.stride() == stride:
        return made.detach()
    fresh = torch.empty_strided(shape, stride, dtype=slot.dtype, device=device)
    return fresh.zero_() if made is None else fresh.copy_(made.detach())


def _write(came: torch.Tensor, made: torch.Tensor) -> None:
    """A state that the code has made anew is written over the one that came."""
    if came is not made and (came.data_ptr(), came.stride()) != (made.data_ptr(), made.stride()):
        with interrupts_held(), torch.no_grad():
            came.copy_(made)


def _is_in_place(
    entry: Entry,
    given: Mapping[Any, Any],
    made: Mapping[Any, Any],
    real: dict[Any, Any],
) -> bool:
    """Whether the code has written its states where they were, as PyTorch's does, and has made and
    dropped none. Plain values that it has changed are taken over."""
    if len(made) != len(real):
        return False
    states = {} if entry.param_state is None else entry.param_state.states
    for key, value in made.items():
        if value is not given.get(key):
            if key in states or key not in real or isinstance(value, torch.Tensor):
                return False
            real[key] = value
    return True


def _order_as(made: Mapping[Any, Any], real: dict[Any, Any]) -> None:
    """The names of a parameter's states stand in the order in which the code has made them."""
    if list(real) != list(made) and set(real) == set(made):
        ordered = {key: real[key] for key in made}
        real.clear()
        real.update(ordered)


def _join(state: dict[Any, Any], key: Any, part: torch.Tensor, entry: Entry) -> None:
    """A state that the code has made for a part of a parameter goes into one of the whole."""
    parameter, whole = entry.parameter, cast(Any, state.get(key))
    if not is_many(whole) or (whole.shape, whole.dtype) != (parameter.shape, part.dtype):
        whole = state[key] = torch.empty_like(parameter.detach(), dtype=part.dtype)
    flat(whole, entry.first, part.numel()).copy_(part.detach())


def _set(state: dict[Any, Any], key: Any, value: Any, parted: bool) -> None:
    """A state that stays on the device. The parts of a parameter were given copies of it: it stays
    the object that it is."""
    there = state.get(key)
    if parted and isinstance(there, torch.Tensor) and isinstance(value, torch.Tensor):
        with interrupts_held(), torch.no_grad():
            there.copy_(value)
    else:
        state[key] = value
