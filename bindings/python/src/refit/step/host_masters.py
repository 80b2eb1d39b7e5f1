"""fp32 masters that live on the host: parameters that an inner optimizer steps for a framework, and
from which the framework rounds the weights of its model.

Between steps the memory of a master is given back, and its bytes are in the host image, beside the
states of its optimizer. In a window the optimizer steps a parameter over the window's memory, and
the weights are rounded from it before it leaves (see ``windowed_step``); so the framework's own
rounding after the step leaves these masters out. What uses a master in between, such as a
checkpoint of the framework, brings all of them to the device (see ``states.offloaded_tensor``); the
next step takes them to the host again.

Masters of bf16 weights are *coded*: in the image is what the weights lack of them (see
``host_buffer``). Such a master can be made again only while its weights are what they were when it
left. So a load of the model's weights brings the masters to the device first. Weights that are
written in other ways are seen when the masters are next used: CorruptError, until the weights are
put back, or until the framework gives its masters other bytes. Masters that leave while their
weights are away lie whole in memory of the process, until the weights are back.

Which masters there are is known to the framework's adapter. Independent of when they move.
"""

import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch

from refit._c.waiting import interrupts_held
from refit.errors import CorruptError, DeviceMemoryError, StateError
from refit.states.offloaded_tensor import OffloadedTensors, kind_of
from refit.states.optimizers import OptimizerAdapters
from refit.states.storages import can_fill
from refit.states.torch_memory import lacks_memory
from refit.step.host_buffer import HostBuffer
from refit.step.param_state import BufferSlot, ParamState, extent
from refit.step.stand_in import is_dense

_NONE = -1
_MASTERS = 0
_PLAIN = (torch.Tensor, torch.nn.Parameter)

Undo = Callable[[], None]


class HostMasters:
    """The masters of some optimizers, which ``adapters`` knows. ``can_code``: those of bf16 weights
    travel by these; ``lock`` is held by all calls; ``wait`` waits for the copies of the last step.
    Used by one thread at a time."""

    def __init__(
        self,
        adapters: OptimizerAdapters,
        can_code: bool,
        lock: AbstractContextManager[Any],
        wait: Callable[[], None],
    ) -> None:
        self._adapters = adapters
        self._can_code = can_code
        self._lock = lock
        self._wait = wait
        self._away: dict[int, ParamState] = {}
        self._apart: dict[int, torch.Tensor] = {}
        """The bytes of coded masters that are away and not in the image."""
        self._in_use: dict[int, torch.Tensor] = {}
        self._weights: Mapping[int, torch.Tensor] = adapters.stepped_masters()
        self._used = set(self._weights)
        """Masters that other code may have written since the last step of their optimizer."""
        bring_back = cast(Any, torch.compiler).disable(self._bring_back)
        self._offloaded = OffloadedTensors(bring_back, lock, zeroable=_NONE)
        self._undo: list[Undo] = []
        self._is_closed = False
        if self._weights:
            self._undo += adapters.leave_out(self.is_away)
            self._undo += adapters.before_remaking(self._before_remaking)
            self._undo += _before_loads(self, adapters.modules())

    def invalidate(self) -> None:
        """Asks the adapters where the weights are now."""
        if self._weights:
            self._weights = self._adapters.stepped_masters()

    def knows(self, parameter: Any) -> bool:
        """Whether it is a master."""
        return id(parameter) in self._weights

    def can_live(self, parameter: Any) -> bool:
        """Whether a parameter is a master whose memory is its own, and can be given back."""
        weight = self._weights.get(id(parameter))
        if weight is None or kind_of(parameter) not in _PLAIN or type(weight) not in _PLAIN:
            return False
        alike = weight.is_contiguous() and weight.numel() == parameter.numel()
        return alike and parameter.device == weight.device and _has_own_memory(parameter)

    def weights_to_code_by(self, parameter: Any) -> int:
        """Where the weights are by which a master, one that can live here, may travel; 0 if it
        travels whole."""
        weight = self._weights[id(parameter)]
        kinds = parameter.dtype, weight.dtype
        fits = self._can_code and kinds == (torch.float32, torch.bfloat16)
        return weight.data_ptr() if fits else 0

    def weight_of(self, param_state: ParamState) -> torch.Tensor:
        """The weights that are rounded from a master, as a plain view in one dimension."""
        return self._weights[id(param_state.parameter)].detach().view(-1)

    def is_away(self, parameter: Any) -> bool:
        """Whether the bytes of a master are on the host."""
        return id(parameter) in self._away

    def is_buffer_in_use(self, buffer: HostBuffer) -> bool:
        """Whether masters are on the host that this buffer has to bring back."""
        return any(one.buffer is buffer and one.is_coded for one in self._in_image())

    def have_left(self, found: Iterable[ParamState]) -> bool:
        """Whether all of these masters are in the image."""
        return not self._apart and all(self.is_away(one.parameter) for one in found)

    def _in_image(self) -> list[ParamState]:
        return [one for place, one in self._away.items() if place not in self._apart]

    # ---- the weights of those that are coded ----------------------------------------------------

    def bind_weights(self, found: Iterable[ParamState]) -> None:
        """Gives the buffers of coded masters the places of their weights now, and holds these until
        ``release``: copies of masters read them. StateError for weights that are not there, or
        others."""
        for one in found:
            if not one.is_coded:
                continue
            why = self._why_weights_lack(one)
            if why is not None:
                raise StateError(f"{why}, or set offload.masters to whole")
            weight = self._weights[id(one.parameter)]
            cast(HostBuffer, one.buffer).bind_weights(_slot(one).region, weight.data_ptr())
            self._in_use[id(one.parameter)] = weight.detach()

    def _why_weights_lack(self, one: ParamState) -> str | None:
        """Why a coded master cannot be made of its weights; None if it can."""
        weight = self._weights.get(id(one.parameter))
        there = weight is not None and weight.device == cast(HostBuffer, one.buffer).device
        if weight is None or not there or not weight.data_ptr():
            return (
                f"the weights of {one.name} have left the device, and the bytes of its master "
                "cannot be made without them: bring the weights back first"
            )
        count = one.parameter.numel()
        alike = weight.dtype is torch.bfloat16 and weight.numel() == count
        if not alike or not weight.is_contiguous():
            return (
                f"the weights of {one.name} were {count} of bfloat16 in a row when its master "
                f"left, and are {weight.numel()} of {weight.dtype} now: make them what they were"
            )
        return None

    def release(self) -> None:
        """No copy is under way: lets go of the weights."""
        self._in_use.clear()

    def before_load(self) -> None:
        """Weights are about to be loaded: coded masters come to the device before."""
        with self._lock:
            if any(one.is_coded for one in self._in_image()):
                self.bring_back()

    def _before_remaking(self) -> None:
        """The framework is about to give all masters other bytes. Those that cannot come back get
        their weights'."""
        with self._lock:
            try:
                self.bring_back()
            except CorruptError:
                self._return(self._salvage, list(self._away.values()))

    # ---- out and back ---------------------------------------------------------------------------

    def leave(self, found: Iterable[ParamState]) -> None:
        """Copies masters to the image and gives their memory back. Not while copies are under
        way; blocks for the copies. Those whose weights are not there leave all the same."""
        apart = [self._away[place] for place in self._apart]
        if apart and not any(map(self._why_weights_lack, apart)):
            self.bring_back()
        leaving = [one for one in found if not self.is_away(one.parameter)]
        if not leaving:
            return
        for one in leaving:
            if not _is_as_planned(one):
                raise StateError(
                    f"the master of {one.name} has got another type or shape, or memory that is "
                    "not its own, which cannot be given back: make it what it was"
                )
        apart = [one for one in leaving if one.is_coded and self._why_weights_lack(one)]
        whole = {id(one.parameter): one.parameter.detach().to("cpu", copy=True) for one in apart}
        coded = [one for one in leaving if one.is_coded and id(one.parameter) not in whole]
        self.bind_weights(coded)
        for one in leaving:
            if not one.is_coded:
                with interrupts_held(), torch.no_grad():
                    _slot(one).view.copy_(one.parameter.detach())
        for buffer, ones in _by_buffer(coded).items():
            buffer.store([(_slot(one).region, one.parameter.detach().view(-1)) for one in ones])
        with interrupts_held():
            self._apart.update(whole)
            self._away.update((id(one.parameter), one) for one in leaving)
            self._offloaded.mark(_MASTERS, [one.parameter for one in self._away.values()])
            for one in leaving:  # each copy was waited for, on the CPU
                one.parameter.untyped_storage().resize_(0)
        self.release()

    def _bring_back(self) -> None:
        """As ``bring_back``, for a master that is used, in any thread."""
        with self._lock:
            self.bring_back()

    def bring_back(self, found: Iterable[ParamState] | None = None) -> None:
        """Takes masters to the device, all or those of ``found``. DeviceMemoryError, CopyError and,
        for weights that have changed, CorruptError: none has moved."""
        asked = self._away.values() if found is None else found
        away = [one for one in asked if self.is_away(one.parameter)]
        if not away:
            return
        self._wait()
        self.invalidate()
        self.bind_weights(self._in_image())
        try:
            self._return(self._write_all, away)
        except CorruptError as why:
            advise(why)
            raise
        self.release()
        self._used.update(self._weights if found is None else (id(one.parameter) for one in away))

    def _return(
        self, fill: Callable[[Sequence[ParamState]], None], away: Sequence[ParamState]
    ) -> None:
        """Takes the memory of masters, which ``fill`` writes."""
        taken: list[Any] = []
        try:
            with interrupts_held():
                for one in away:
                    storage = one.parameter.untyped_storage()
                    if not can_fill(storage):
                        raise StateError(
                            f"the memory of {one.name} was shared or fixed by other code while "
                            "the master was on the host: share or export masters after they were "
                            "used, or keep them with refit.Cycle()"
                        )
                    taken.append(storage)
                    storage.resize_(_slot(one).nbytes)
                with torch.no_grad():
                    fill(away)
                # In between others are in no group, and what uses one waits for the lock.
                self._offloaded.mark(_MASTERS, [one.parameter for one in away])
                self._offloaded.unmark(_MASTERS)
                for one in away:
                    del self._away[id(one.parameter)]
                    self._apart.pop(id(one.parameter), None)
                taken.clear()
                self._offloaded.mark(_MASTERS, [one.parameter for one in self._away.values()])
                self._let_go()
        except BaseException as why:
            for storage in taken:
                storage.resize_(0)
            if isinstance(why, DeviceMemoryError) or lacks_memory(why):
                raise DeviceMemoryError(
                    f"no memory on the device for {len(away)} masters, which live on the "
                    f"host; nothing is lost. Free some memory, and use them again: {why}"
                ) from why
            raise

    def _write_all(self, away: Sequence[ParamState]) -> None:
        """Writes masters whose memory is there."""
        image = [one for one in away if id(one.parameter) not in self._apart]
        for buffer, ones in _by_buffer(one for one in image if one.is_coded).items():
            buffer.fetch([(_slot(one).region, _over(one.parameter).view(-1)) for one in ones])
        for one in away:
            whole = self._apart.get(id(one.parameter))
            if whole is not None:
                _over(one.parameter).copy_(whole)
            elif not one.is_coded:
                _over(one.parameter).copy_(_slot(one).view)

    def _salvage(self, away: Sequence[ParamState]) -> None:
        """Writes masters whose memory is there; those whose weights have changed get these."""
        for one in away:
            try:
                self._write_all([one])
            except CorruptError:
                _over(one.parameter).view(-1).copy_(self.weight_of(one))

    def round_written(self, found: Iterable[ParamState]) -> None:
        """Before a step of these masters: those without a gradient are not stepped in a window. The
        framework rounds weights from them too, which matters if they may have been written."""
        mine = [one for one in found if id(one.parameter) in self._used]
        without = [one for one in mine if one.parameter.grad is None]
        if without:
            self.bring_back()
            self.invalidate()
            self.round(without)
        self._used.difference_update(id(one.parameter) for one in mine)

    def round(self, found: Iterable[ParamState]) -> None:
        """Rounds the weights from masters that are on the device."""
        for one in found:
            with interrupts_held(), torch.no_grad():
                self.weight_of(one).copy_(one.parameter.detach().view(-1))

    def round_others(self) -> None:
        """After a step that was resumed, which the framework has not seen: it rounds weights from
        the masters that do not live here."""
        if self._weights:
            self._adapters.round_others()

    def close(self) -> None:
        """The framework rounds all weights by itself again, once the masters that are away have
        been used."""
        self._is_closed = True
        self._let_go()

    def _let_go(self) -> None:
        if self._is_closed and not self._away:
            for undo in self._undo:
                undo()
            self._undo = []


def advise(why: CorruptError) -> None:
    """Says what there is to do about weights that were changed."""
    why.text = (
        f"{why.text}. In Python: put weights that were changed back and call again; or, to go on "
        "with them as they are, let reload_model_params() of Megatron's optimizer make the masters "
        "of them. offload.masters: whole needs no weights"
    )
    why.args = (why.text,)


def _slot(param_state: ParamState) -> BufferSlot:
    assert param_state.master is not None
    return param_state.master.slots[0]


def _has_own_memory(parameter: Any) -> bool:
    storage = parameter.untyped_storage()
    own = parameter.storage_offset() == 0 and storage.nbytes() == extent(parameter) > 0
    plain = parameter.is_contiguous() and is_dense(parameter)
    return bool(own and plain and storage.resizable())


def _is_as_planned(param_state: ParamState) -> bool:
    """Whether a master still is what its place in the image was made for."""
    slot, parameter = _slot(param_state), param_state.parameter
    look = parameter.dtype, tuple(parameter.shape), parameter.device
    planned = slot.dtype, slot.shape, cast(HostBuffer, param_state.buffer).device
    return look == planned and _has_own_memory(parameter)


def _by_buffer(found: Iterable[ParamState]) -> dict[HostBuffer, list[ParamState]]:
    by_buffer: dict[HostBuffer, list[ParamState]] = {}
    for one in found:
        by_buffer.setdefault(cast(HostBuffer, one.buffer), []).append(one)
    return by_buffer


def _over(parameter: Any) -> torch.Tensor:
    """A tensor of the plain class over the memory of one whose class may be another now."""
    made = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    storage, shape = parameter.untyped_storage(), parameter.shape
    return made.set_(storage, parameter.storage_offset(), shape, parameter.stride())


# ---- Loads of weights.


class _BeforeLoad:
    """A hook on a module that has weights. A copy of the module does nothing with it."""

    def __init__(self, masters: HostMasters) -> None:
        self._masters = weakref.ref(masters)
        self._process = os.getpid()

    def __call__(self, *_: Any) -> None:
        masters = self._masters()
        if masters is not None and self._process == os.getpid():  # a fork has copies of both
            masters.before_load()

    def __reduce__(self) -> Any:
        # A function that takes anything and does nothing, and is there where refit is not.
        return getattr, ("", "format")


def _before_loads(masters: HostMasters, modules: Iterable[torch.nn.Module]) -> list[Undo]:
    """Hooks on every module that has parameters of its own: a load may begin at any of them."""
    found = {id(one): one for module in modules for one in module.modules() if one._parameters}
    hook = _BeforeLoad(masters)
    return [cast(Any, one).register_load_state_dict_pre_hook(hook).remove for one in found.values()]
