"""The parameters of one optimizer on one device that the CPU steps, by kernels of the C library.

Their states lie in the host image (see ``host_buffer``) and never visit the device. In a step

    start    gradients and parameters leave for the host, after the current stream
    run      the CPU steps what has landed; each new parameter leaves for the device at once
    join     the current stream, or on a CPU the caller, waits until the parameters are there

Gradients may leave before, one by one as the backward pass makes them final (``leave_early``). Such
a gradient has *left*: until the step it has a class by which a use of it is seen (see
``states.offloaded_tensor``). Code that reads it, or multiplies it by a factor, as clipping and a
GradScaler do, does so on the device, and the factor is applied to the copy in the step. After any
other use it is as if the gradient had not left: the step copies it again.

The parameter is copied in each step, too: that of the device is stepped, whatever has changed it.

What the kernels do not know (see ``cpu_kernels``), PyTorch's own code steps, on tensors of the
host; that is the business of ``windowed_step``.
"""

import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch

from refit._c.call_lock import WaitingCallLock
from refit._c.waiting import interrupts_held
from refit.errors import RefitError
from refit.states.hooks import in_backward, on_accumulation
from refit.states.offloaded_tensor import OffloadedTensors, kind_of, untouched
from refit.states.offloader import NO_STREAM
from refit.states.torch_memory import current_stream, users_of
from refit.step.cpu_kernels import (
    CpuKernels,
    Options,
    Parameter,
    can_make_states,
    first_states,
    names_of,
    options_of,
    root_of_torch,
)
from refit.step.host_buffer import HostBuffer
from refit.step.param_state import ParamState, State
from refit.step.stand_in import is_dense, local

Optimizer = torch.optim.Optimizer

_NONE = -1
"""No group of an ``OffloadedTensors``: a gradient that has left cannot be zeroed without being
used."""

_FACTORS = 2
"""By as many the C library multiplies a gradient, one after the other."""
_LARGEST = torch.finfo(torch.float32).max
_USERS = 2
"""References to the storage of a gradient that is alone: its own, and that of who asks."""
_TOGETHER = 64
"""Gradients in one memory that leave early, at most: for each of them all are counted."""
_LONGEST_PAUSE = 64
"""Steps in which gradients stay until the step, at most, since others used them before."""


_KernelKey = tuple[int, int, tuple[str, ...]]
"""Where a parameter is, its group, and the names of its states."""


class _Place(NamedTuple):
    """A parameter that the kernels step."""

    number: int
    param_state: ParamState
    key: _KernelKey


@dataclass(eq=False, slots=True)
class _Departed:
    """A gradient that is on its way to the host, or there."""

    parameter: Any
    gradient: Any
    """The parameter's: a tensor, or a DTensor around ``plain``."""
    plain: torch.Tensor
    versions: tuple[int, int]
    address: int
    which: int
    """Which step of the parameter the next one is."""
    factors: list[Any] = field(default_factory=list)
    """What it was multiplied by on the device since."""


# ---- What the kernels can step, and which gradients may leave before the step.


def _filled(options: Sequence[Options | None]) -> list[Options] | None:
    """Options for each group: those of one that the kernels do not know are read for no parameter.
    None if they know no group."""
    some = next((one for one in options if one is not None), None)
    return None if some is None else [one or some for one in options]


def _kernel_key_of(parameter: Any, group: int, options: Options) -> _KernelKey:
    return local(parameter).data_ptr(), group, names_of(options)


def _lies_as(param_state: ParamState, plain: torch.Tensor) -> bool:
    """Whether each state is fp32, and one tensor whose elements lie as those of a parameter."""
    layout = tuple(plain.shape), tuple(plain.stride())
    return all(
        len(one.slots) == 1
        and one.slots[0].dtype == torch.float32
        and (one.slots[0].shape, one.slots[0].stride) == layout
        for _, one in param_state.pairs
    )


def _gradients_in(parameters: Iterable[Any]) -> Counter[int]:
    """How many gradients of parameters lie in each storage."""
    grads = (local(one.grad) for one in parameters if one.grad is not None)
    strided = {id(one): one for one in grads if one.layout is torch.strided}
    return Counter(one.untyped_storage()._cdata for one in strided.values())


def _is_alone(plain: torch.Tensor, inside: Mapping[int, int]) -> bool:
    """Whether no other tensor or array has the memory of a gradient, so that none changes it
    unseen. The shards of FSDP2 are views of what one reduction has made for several parameters, in
    a storage that has so many gradients ``inside``."""
    storage = plain.untyped_storage()
    if plain._base is None:
        return storage.nbytes() == plain.nbytes and users_of(storage) <= _USERS
    return users_of(storage) <= _USERS + inside[storage._cdata]  # and their base


def _versions(whole: Any, plain: torch.Tensor) -> tuple[int, int]:
    """What counts the changes of a gradient, and those of the tensor in it."""
    return whole._version, plain._version


def _is_plain(tensor: Any) -> bool:
    """Whether a tensor has memory of its own, and is not a wrapper of others."""
    kind = type(tensor)
    return kind in (torch.nn.Parameter, torch.Tensor) and tensor.layout is torch.strided


def _overlapping(parameters: Sequence[Any]) -> set[int]:
    """The identities of parameters that are there twice, or share memory with another."""
    found: set[int] = set()
    before, end = None, 0
    plain = [(local(one).data_ptr(), local(one).nbytes, one) for one in parameters]
    plain = [one for one in plain if one[1]]
    for address, nbytes, one in sorted(plain, key=lambda place: place[0]):
        if before is not None and address < end:
            found |= {id(before), id(one)}
        if address + nbytes > end:
            before, end = one, address + nbytes
    return found


def _count_change(tensors: Iterable[torch.Tensor]) -> None:
    """Counts a change of tensors whose memory C has written: a backward pass that has saved them is
    refused, as after PyTorch's own step."""
    counted = [one for one in tensors if not one.is_inference()]
    cast(Any, torch.autograd.graph).increment_version(counted)


def _values_of(counters: list[torch.Tensor]) -> list[float]:
    """What tensors of one number say. Those of a GPU are brought in one copy."""
    if not counters or all(one.device.type == "cpu" for one in counters):
        return [float(one) for one in counters]
    return cast(list[float], torch.stack([one.double() for one in counters]).tolist())


def _placements(tensor: Any) -> Any:
    """How a DTensor lies on its devices; None of any other."""
    return getattr(tensor, "placements", None)


def _is_offloaded(parameter: Any) -> bool:
    """Whether FSDP2 keeps a parameter on the host, and brings its gradient there after a use on a
    GPU, which a hook could wait for only."""
    mesh = getattr(parameter, "device_mesh", None)
    return mesh is not None and mesh.device_type != local(parameter).device.type


def _is_final(parameter: Any) -> bool:
    """Whether a gradient that a backward pass has made is that of all ranks. Of a DTensor it is:
    its placements say how it lies on the ranks, and FSDP2 calls hooks after it has reduced it. What
    a communication hook of DDP writes later no counter of changes tells, in a group of one rank
    neither."""
    if _placements(parameter) is not None:
        return True
    return not (torch.distributed.is_available() and torch.distributed.is_initialized())


def _shows(state: Mapping[Any, Any], pairs: Iterable[tuple[Any, State]]) -> bool:
    """Whether the states of a parameter are the tensors over the image."""
    for key, one in pairs:  # noqa: SIM110  # asked of each parameter in each step
        if state.get(key) is not one.shown:
            return False
    return True


def _has_stayed(one: _Departed, inside: Mapping[int, int]) -> bool:
    """Whether a gradient that has left is still its parameter's, and as it was."""
    with untouched():
        return (
            one.parameter.grad is one.gradient
            and local(one.gradient) is one.plain
            and _versions(one.gradient, one.plain) == one.versions
            and one.plain.data_ptr() == one.address
            and _is_alone(one.plain, inside)
        )


# ---- The share.


class CpuShare:
    """Parameters of one optimizer whose states are in one buffer. Used by one thread at a time.

    ``param_states`` in the order in which a forward pass uses them. ``lock`` is held by the caller
    of every method, and taken where a use of a gradient comes here by itself. ``is_early``:
    gradients leave during the backward pass. ``kernels``: those of the C library step what they
    know.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        buffer: HostBuffer,
        param_states: Sequence[ParamState],
        lock: WaitingCallLock,
        *,
        is_early: bool,
        kernels: bool,
    ) -> None:
        self.buffer = buffer
        self.optimizer = optimizer
        self._param_states = list(param_states)
        self._lock = lock
        self._use_kernels = kernels
        self._kernels: CpuKernels | None = None
        self._seen: set[int] = set()
        """Parameters for which the kernels were opened, or that they cannot step; by their
        identity."""
        self._places: dict[int, _Place] = {}
        """Those that the kernels step, by their identity."""
        self._begun: list[Options] | None = None
        """What the kernels were told of the groups, once gradients have begun to leave."""
        self._read: list[torch.Tensor] = []
        """Gradients that the kernels may be reading: they are held until these do not."""
        self._must_skip = False
        """Whether the kernels may know more than ``_departed`` says."""
        self._departed: dict[int, _Departed] = {}
        """Gradients that have left before the step, by the number of their parameters."""
        self._siblings: dict[int, list[Any]] = {}
        """Of parameters whose gradients were views of one memory in the last step, by their
        identity: those parameters."""
        self._submitted: list[_Place] = []
        """What ``run`` is to step."""
        self._scales: list[float] = []
        """What ``run`` multiplies gradients by."""
        self._counts: dict[int, int] = {}
        """How often each parameter was stepped, as of the last step, by the identity of its
        ``ParamState``."""
        self._plan_of: tuple[Any, ...] = ()
        """The groups when the kernels were opened: their lengths, and the states they have."""
        self._process = os.getpid()
        touched = cast(Any, torch.compiler).disable(self._touched)
        self._offloaded = OffloadedTensors(touched, lock, zeroable=_NONE, in_place=self)
        self._early = _Early(self) if is_early else None

    @property
    def is_elsewhere(self) -> bool:
        """Whether the parameters are on another device than the CPU."""
        return self.buffer.device.type != "cpu"

    def parameters(self) -> list[Any]:
        """Those of the share."""
        return [one.parameter for one in self._param_states]

    # ---- what the kernels can step --------------------------------------------------------------

    def _options(self) -> list[Options | None]:
        """Of each group what the kernels are told; None: they do not know such a step."""
        groups = self.optimizer.param_groups
        if not self._use_kernels:
            return [None] * len(groups)
        return [options_of(self.optimizer, group, self.buffer.device) for group in groups]

    @staticmethod
    def _kernel_key(
        param_state: ParamState, group: int, options: Options | None
    ) -> _KernelKey | None:
        """Where a parameter is, its group, and the names of its states; None: the kernels cannot
        step it, for it is not fp32, or a state's elements do not lie as its own."""
        if options is None:
            return None
        plain = local(param_state.parameter)
        if not _is_plain(plain):
            return None
        key = _kernel_key_of(param_state.parameter, group, options)
        fits = (
            tuple(param_state.states) == key[2]
            and plain.dtype == torch.float32
            and plain.numel() > 0
            and is_dense(plain)
            and _lies_as(param_state, plain)
        )
        return key if fits else None

    def _gradient(self, parameter: Any) -> torch.Tensor | None:
        """The plain gradient of a parameter as the kernels can read it, or None."""
        plain, whole = local(parameter), parameter.grad
        if whole is None:
            return None
        with untouched():
            grad = local(whole)
            is_unwrapped = plain is parameter and grad is whole
            alike = (
                (is_unwrapped or _placements(whole) == _placements(parameter))
                and kind_of(grad) is torch.Tensor
                and grad.dtype == plain.dtype
                and grad.layout is torch.strided
                and grad.device == plain.device
                and grad.shape == plain.shape
                and grad.stride() == plain.stride()
                and not grad.is_neg()
            )
        return cast(torch.Tensor, grad) if alike else None

    def _read_counts(self, places: Sequence[_Place]) -> dict[int, int]:
        """How often each parameter was stepped, by its number; 0 where this step makes the states.
        Leaves out those of which the optimizer lacks a state, or has others as well, or which share
        a counter. Waits for a counter that is on a GPU."""
        counters: dict[int, torch.Tensor] = {}
        found: dict[int, int] = {}
        for place in places:
            state = self.optimizer.state.get(place.param_state.parameter)
            pairs = place.param_state.pairs
            if not state:
                if can_make_states(self.optimizer):
                    found[place.number] = 0
                continue
            if not _shows(state, pairs):
                continue
            if type(self.optimizer) is torch.optim.SGD:
                if len(state) == len(pairs):
                    found[place.number] = 1
                continue
            counter = state.get("step")
            if type(counter) is torch.Tensor and len(state) == len(pairs) + 1:
                counters[place.number] = counter
        uses = Counter(map(id, counters.values()))
        alone = {
            number: one
            for number, one in counters.items()
            if uses[id(one)] == 1 and not one.is_inference()
        }
        values = dict(zip(alone, _values_of(list(alone.values())), strict=True))
        found |= {n: int(v) for n, v in values.items() if 0 <= v < 2**53 and v == int(v)}
        return found

    # ---- a step ---------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Takes the host memory that the kernels need for the parameters, as they are now. Blocks
        for the page-lock. What ``CpuKernels`` raises."""
        if not self._seen:
            self._plan(self._options())

    def start(self, entries: Sequence[tuple[Any, int]], unscale: float) -> list[Any]:
        """Gradients and parameters of these, which are to be stepped, leave; each comes with its
        group. ``unscale``: the step multiplies gradients by it. Gives those that ``run`` will step;
        the others are PyTorch's to step.

        What ``CpuKernels`` raises: nothing was stepped, call again.
        """
        options = self._options()
        if not self._fits(entries, options):
            self.wait()
            self._plan(options)
        twice = Counter(id(parameter) for parameter, _ in entries)
        places = [
            place
            for parameter, _ in entries
            if (place := self._places.get(id(parameter))) is not None and twice[id(parameter)] == 1
        ]
        counts = self._read_counts(places)
        submitted: list[tuple[_Place, torch.Tensor, int]] = []
        for place in places:
            grad = self._gradient(place.param_state.parameter)
            if grad is not None and place.number in counts:
                submitted.append((place, grad, counts[place.number] + 1))
        chosen = _filled(options)
        self._check_left(chosen, {place.number: which for place, _, which in submitted}, unscale)
        if self._early is not None:
            self._early.step_begins(bool(self._departed))
        if not submitted or chosen is None:
            return []
        self._begin(chosen)
        self._offloaded.unmark(*self._departed)
        self._must_skip = True  # until all are stepped
        self._submitted = [place for place, *_ in submitted]
        self._counts.update((id(place.param_state), which - 1) for place, _, which in submitted)
        self._read += [grad for place, grad, _ in submitted if place.number not in self._departed]
        coming = [
            (place.number, None if place.number in self._departed else grad.data_ptr(), which)
            for place, grad, which in submitted
        ]
        cast(CpuKernels, self._kernels).submit(coming, current_stream(self.buffer.device))
        return [place.param_state.parameter for place in self._submitted]

    def _fits(self, entries: Sequence[tuple[Any, int]], options: Sequence[Options | None]) -> bool:
        """Whether the kernels were opened for these parameters, as they are now."""
        if self._plan_of != self._groups_of(options):
            return False
        for parameter, group in entries:
            if id(parameter) not in self._seen:
                return False
            place, one = self._places.get(id(parameter)), options[group]
            if place is None:
                continue
            if one is None or place.key != _kernel_key_of(parameter, group, one):
                return False
        return True

    def _groups_of(self, options: Sequence[Options | None]) -> tuple[Any, ...]:
        lengths = [len(group["params"]) for group in self.optimizer.param_groups]
        names = [None if one is None else names_of(one) for one in options]
        return tuple(zip(lengths, names, strict=True))

    def _plan(self, options: Sequence[Options | None]) -> None:
        """Opens the kernels for all parameters that they can step, as these are now. It takes host
        memory for their gradients and themselves."""
        groups = {
            id(p): at for at, one in enumerate(self.optimizer.param_groups) for p in one["params"]
        }
        self._close_kernels()
        found: list[tuple[ParamState, _KernelKey]] = []
        for param_state in self._param_states:
            group = groups.get(id(param_state.parameter))
            if group is not None:
                key = self._kernel_key(param_state, group, options[group])
                if key is not None:
                    found.append((param_state, key))
        every = [one for group in self.optimizer.param_groups for one in group["params"]]
        shared = _overlapping([one for one in every if _is_plain(local(one))])
        found = [one for one in found if id(one[0].parameter) not in shared]
        if found:
            self._kernels = CpuKernels(
                self.buffer.offloader,
                [
                    Parameter(
                        param_state.name,
                        key[0],
                        local(param_state.parameter).numel(),
                        key[1],
                        tuple(one.slots[0].region for _, one in param_state.pairs),
                    )
                    for param_state, key in found
                ],
            )
            roots = root_of_torch() if self.buffer.device.type == "cpu" else None
            self._kernels.take_roots(*(roots or (0, 0)))
        self._seen = set(map(id, self.parameters()))
        self._plan_of = self._groups_of(options)
        self._places = {
            id(param_state.parameter): _Place(number, param_state, key)
            for number, (param_state, key) in enumerate(found)
        }
        if self._early is not None:
            self._early.watch(param_state.parameter for param_state, _ in found)

    def _check_left(
        self, chosen: list[Options] | None, counts: Mapping[int, int], unscale: float
    ) -> None:
        """Takes all back unless each gradient that has left is still the one to be stepped, and is
        multiplied by the same as all others."""
        stays = not self._must_skip and (self._begun is None or self._begun == chosen)
        inside = Counter[int]() if self._early is None else self._find_siblings()
        for number, one in self._departed.items():
            stays = stays and counts.get(number) == one.which and _has_stayed(one, inside)
        factors = self._factors()
        if factors and counts.keys() != self._departed.keys():
            stays = False  # the others bring theirs with them
        if unscale != 1.0:
            factors = None if factors is None else [*factors, unscale]
        if not stays or factors is None or len(factors) > _FACTORS:
            self._note_use()
            self.take_back()
            factors = [] if unscale == 1.0 else [unscale]
        self._scales = factors

    def _find_siblings(self) -> Counter[int]:
        """How many gradients lie in each storage in which there are several."""
        together: dict[int, list[Any]] = {}
        with untouched():
            for group in self.optimizer.param_groups:
                for one in group["params"]:
                    whole = one.grad
                    if whole is None or _placements(whole) is None:
                        continue
                    plain = local(whole)
                    if plain.layout is torch.strided and plain._base is not None:
                        together.setdefault(plain.untyped_storage()._cdata, []).append(one)
            few = [ones for ones in together.values() if len(ones) <= _TOGETHER]
            self._siblings = {id(one): ones for ones in few for one in ones}
            return _gradients_in(one for ones in few for one in ones)

    def _begin(self, chosen: list[Options]) -> None:
        if self._begun is None:
            self._must_skip = True  # if Ctrl-C comes right after the call
            cast(CpuKernels, self._kernels).begin(chosen)
            self._begun = chosen

    def run(self, done: Callable[[Any], None]) -> None:
        """The CPU steps what ``start`` has submitted; ``done`` is called with each parameter that
        was stepped. Not to be interrupted. What ``CpuKernels.run`` raises: the others keep their
        values, and their gradients count as not having left."""
        kernels, stream = cast(CpuKernels, self._kernels), current_stream(self.buffer.device)
        made = {}
        with interrupts_held(), torch.no_grad():
            for place in self._submitted:
                one = place.param_state
                if not self.optimizer.state.get(one.parameter):
                    made[id(one)] = first_states(self.optimizer, one.pairs)
                    one.blank()
        try:
            first, second, *_ = [*self._scales, 1.0, 1.0]
            kernels.run(first, second, stream)
            stepped = [place.param_state for place in self._submitted]
        except BaseException:
            stepped = [
                place.param_state for place in self._submitted if kernels.stepped(place.number)
            ]
            raise
        finally:
            _count_change(local(param_state.parameter) for param_state in stepped)
            self._count_step(stepped, made)
            for param_state in stepped:
                done(param_state.parameter)
            self._must_skip = len(stepped) < len(self._submitted)
            if not self._must_skip:
                self._submitted.clear()
                self._read.clear()
                self._begun = None
                self._departed.clear()

    def _count_step(
        self, stepped: Sequence[ParamState], made: Mapping[int, Mapping[Any, Any]]
    ) -> None:
        """``made``: states that the step has made, by the identity of the ``ParamState``."""
        counters = []
        with interrupts_held(), torch.no_grad():
            for param_state in stepped:
                state = self.optimizer.state.setdefault(param_state.parameter, {})
                state.update(made.get(id(param_state), {}))
                before = 0
                if "step" in state:
                    counters.append(state["step"])
                    before = self._counts[id(param_state)]
                self._counts[id(param_state)] = before + 1
            if counters:
                torch._foreach_add_(counters, 1)

    def join(self) -> None:
        """The current stream waits until the new parameters are there; on a CPU the caller does.
        What ``CpuKernels`` raises: call again."""
        if self._kernels is None:
            return
        stream = current_stream(self.buffer.device)
        if stream == NO_STREAM:
            self._kernels.wait()
        else:
            self._kernels.join(stream)

    # ---- gradients leave before the step --------------------------------------------------------

    def leave_early(self, parameter: Any) -> None:
        """The gradient of a parameter is final, and leaves. Nothing, if the kernels will not step
        it, or if it could be changed unseen. What ``CpuKernels`` raises: it has not left."""
        place = self._places.get(id(parameter))
        if place is None or self._must_skip:
            return
        with untouched():
            inside = _gradients_in(self._siblings.get(id(parameter), ()))
        before = self._departed.get(place.number)
        if before is not None:
            if _has_stayed(before, inside):
                return
            self.take_back()  # a step was left out, and the gradients are others
        whole, plain = parameter.grad, self._gradient(parameter)
        if plain is None or plain.requires_grad or not _is_alone(plain, inside):
            return
        if whole is not plain and _placements(whole) is None:
            return  # what multiplies a wrapper of another kind may not multiply what is in it
        count = self._counts.get(id(place.param_state))
        if count is None:  # PyTorch's code has made the step before
            count = self._read_counts([place]).get(place.number)
        if count is None or local(parameter).data_ptr() != place.key[0]:
            return
        chosen = self._begun
        if chosen is None:
            options = self._options()
            chosen = _filled(options)
            if chosen is None or self._plan_of != self._groups_of(options):
                return
        self._begin(chosen)
        self._must_skip = True
        self._read.append(plain)
        stream = current_stream(self.buffer.device)
        address, which = plain.data_ptr(), count + 1
        cast(CpuKernels, self._kernels).gradient(place.number, address, which, stream)
        versions = _versions(whole, plain)
        self._departed[place.number] = _Departed(parameter, whole, plain, versions, address, which)
        marked = {id(one): one for one in (plain, whole, plain._base) if one is not None}
        self._offloaded.mark(place.number, list(marked.values()))
        self._offloaded.watch(place.number, [parameter])
        self._must_skip = False

    def leave_in_backward(self, parameter: Any) -> None:
        """The same, from a backward pass, which a GPU runs on a thread of PyTorch's: does not wait.
        Nothing where ranks may add to the gradient after this. In the middle of another call
        nothing, either."""
        if not _is_final(parameter):
            return
        if self._lock.is_mine or self._process != os.getpid():
            return
        if parameter.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        try:
            with self._lock.at_once:
                self.leave_early(parameter)
        except RefitError:
            return  # the step copies it, and says what it meets

    def _touched(self) -> None:
        """Something uses a gradient that has left: then none has. A forked process has the
        gradients, and not the kernels' threads."""
        with self._lock:
            if self._process != os.getpid():
                self._offloaded.unmark(*self._departed)
                self._departed.clear()
                return
            self._note_use()
            self.take_back()

    def _note_use(self) -> None:
        """What has left is copied again, and so will that of the next step be, if it leaves."""
        if self._departed and self._early is not None:
            self._early.was_used = True

    def lend_none_of(self, optimizer: Optimizer) -> None:
        """Before another optimizer steps: gradients of its parameters have not left. What
        ``CpuKernels.skip`` raises."""
        if self._departed:
            left = {id(one.parameter) for one in self._departed.values()}
            if any(id(one) in left for group in optimizer.param_groups for one in group["params"]):
                self.take_back()

    def take_back(self) -> None:
        """Gradients that have left count as not having left. What ``CpuKernels.skip`` raises: call
        again."""
        if self._begun is not None or self._must_skip:
            cast(CpuKernels, self._kernels).skip()
            self._begun, self._must_skip = None, False
        self._submitted.clear()
        self._read.clear()
        self._offloaded.unmark(*self._departed)
        self._departed.clear()

    # ---- what others do with gradients that have left --------------------------------------------

    def may_scale(self, tensors: Sequence[Any]) -> bool:
        """Whether gradients may be multiplied on the device, and those that have left again on the
        host, as the two factors of ``run``. Waits for their copies to the host."""
        with self._lock:
            mine = self._departed_of(tensors)
            if self._process != os.getpid() or len(set(map(id, tensors))) < len(tensors):
                return False
            if not mine or any(len(one.factors) == _FACTORS for one in mine):
                return False
            try:
                cast(CpuKernels, self._kernels).gather()
            except RefitError:
                return False  # then none has left: the step copies them, and says what it meets
            return True

    def is_base(self, tensor: Any) -> bool:
        """Whether FSDP2 has cut from it the gradient that left last, and may cut the next."""
        last = next(reversed(self._departed.values()), None)
        with untouched():
            return last is not None and last.plain._base is tensor

    def scaled(self, tensors: Sequence[Any], factor: Any) -> None:
        """They were."""
        with self._lock:
            if isinstance(factor, torch.Tensor):
                factor = factor.detach().clone()
            for one in self._departed_of(tensors):
                one.factors.append(factor)
                with untouched():
                    one.versions = _versions(one.gradient, one.plain)

    def _departed_of(self, tensors: Sequence[Any]) -> list[_Departed]:
        given = set(map(id, tensors))
        return [one for one in self._departed.values() if id(one.gradient) in given]

    def _factors(self) -> list[float] | None:
        """What all gradients that have left were multiplied by since, in this order. None: not all
        by the same, or not by numbers that are finite."""
        each = [one.factors for one in self._departed.values()]
        if not each or not any(each):
            return []
        first = each[0]
        if any(len(one) != len(first) for one in each):
            return None
        values = {id(factor): float(factor) for one in each for factor in one}
        found = [values[id(factor)] for factor in first]
        alike = all([values[id(factor)] for factor in one] == found for one in each)
        return found if alike and all(abs(one) <= _LARGEST for one in found) else None

    # ---- the end --------------------------------------------------------------------------------

    def wait(self) -> None:
        """No gradient has left, and all parameters are on the device. Waits for copies."""
        self.take_back()
        if self._kernels is not None:
            self._kernels.wait()

    def _close_kernels(self) -> None:
        self._seen.clear()
        self._places.clear()
        kernels, self._kernels = self._kernels, None
        if kernels is not None:
            kernels.close()

    def close(self) -> None:
        """Waits for copies, and gives the kernels' memory back; the states stay."""
        if self._early is not None:
            self._early.remove()
        self.wait()
        self._close_kernels()


class _Early:
    """Lets gradients leave during the backward pass, as they become final.

    A hook on each parameter counts how often its gradient was added to; the last step tells how
    often it will be. If code reads gradients before the step, as clipping does, what has left is
    copied again; then gradients stay until the step, for more and more steps.
    """

    def __init__(self, share: CpuShare) -> None:
        self._share = weakref.ref(share)
        self._hook = cast(Any, torch.compiler).disable(self._final)  # it is not part of a graph
        self._handles: dict[int, tuple[Any, Any]] = {}
        self._added: dict[int, int] = {}
        self._expected: dict[int, int] = {}
        self._pause = self._next_pause = 0
        self.was_used = False
        """Whether a gradient that had left was used before the step."""

    def watch(self, parameters: Iterable[Any]) -> None:
        """From the next backward pass on gradients of these leave."""
        for one in parameters:
            fits = one.is_leaf and one.requires_grad and not _is_offloaded(one)
            if fits and id(one) not in self._handles:
                self._handles[id(one)] = one, on_accumulation(one, self._hook)

    def _final(self, parameter: torch.Tensor) -> None:
        share = self._share()
        if share is None:
            return
        added = self._added.get(id(parameter), 0) + 1
        self._added[id(parameter)] = added
        if self._pause == 0 and added == self._expected.get(id(parameter)):
            share.leave_in_backward(parameter)

    def step_begins(self, had_left: bool) -> None:
        """The counts of this step are those of the next; had_left: gradients stayed away. A hook
        that was not called, though there is a gradient, may have been lost: it is registered again,
        unless the step is made by a hook, which may come before this one. A parameter that is
        frozen has none."""
        watched = [] if in_backward() else list(self._handles.items())
        for number, (one, handle) in watched:
            if not one.requires_grad:
                handle.remove()
                del self._handles[number]
            elif number not in self._added and one.grad is not None:
                handle.remove()
                self._handles[number] = one, on_accumulation(one, self._hook)
        self._expected, self._added = self._added, {}
        if self.was_used:
            self._next_pause = min(_LONGEST_PAUSE, 2 * self._next_pause or 1)
            self._pause = self._next_pause
        elif self._pause > 0:
            self._pause -= 1
        elif had_left:
            self._next_pause = 0
        self.was_used = False

    def remove(self) -> None:
        """Takes the hooks away."""
        for _, handle in self._handles.values():
            handle.remove()
        self._handles.clear()
