"""Activations leave the device in the forward pass and return in the backward pass.

    activations = refit.ActivationOffload(model, layers=model.layers, host_bytes="8GiB")
    for batch in loader:
        with activations:
            loss = model(batch).loss
        loss.backward()

In the block, autograd hands over what it saves (``torch.autograd.graph.saved_tensors_hooks``). The
ends of the layers divide the forward pass into groups: what is saved from the end of one layer to
the end of the next is one group. At its end its storages start to leave, behind what the layer has
queued:

    open ──the layer ends──► leaving ──in_flight groups later──► away ──asked for──► returning
                                 │                                 ▲                     │
                                 └── held by others: it stays      └──asked for by all── returned

When a group is away, our reference to the device's memory is dropped, and with it the memory: those
who hold a storage besides us are counted, and where there are any it stays, for then its leaving
would free nothing. In the backward pass the first tensor of a group that is asked for brings back
the group, and starts the groups before it.

What a group still needs is known by reference counts: ``Storage`` lives as long as autograd holds a
view of it. Its end is only noted, since it may come at any point of any thread; calls that hold the
lock act on it (``_tidy``).

How much leaves is for ``plan`` to say; what a saved tensor is, for ``saved_tensors``;
where the bytes are, for the C library (refit/activations.h).
"""

import os
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, Literal

import torch

from refit._c.closing import Closing
from refit._c.config import ConfigLike, make_config
from refit._c.handle import refuse_fork
from refit._c.library import lib
from refit._c.stats import PREFIX, gather, numbered
from refit._c.waiting import interrupts_held
from refit.activations.arena import Arena
from refit.activations.plan import Plan
from refit.errors import (
    DeadlineError,
    DeviceError,
    InvalidError,
    NotFoundError,
    RefitError,
    StateError,
    UnsupportedError,
)
from refit.states.device_states import (
    Devices,
    current_stream,
    lacks_memory,
    stream_objects,
    used_on,
)
from refit.states.saved_tensors import (
    Kept,
    Saved,
    Storage,
    Wrapped,
    is_owned,
    is_plain,
    keep,
    kept,
    unwrap,
    wrap,
)
from refit.states.storage_swap import users_of

_LOOKS_AGAIN = 64
"""Blocks after which an offload that is off measures again."""

_USELESS = 3
"""Forward passes in a row that have freed nothing: then it is off."""

_MEASURE_MS = 60_000
"""The longest wait for the copies of a group that is measured."""

_SEVERAL = -1
"""The version of a storage whose tensors were saved at several."""

_in_backward = torch._C._current_graph_task_id


class _Needed(weakref.ref[Storage]):
    """A storage that leaves with a group. Its end puts this into a queue, by a callback that runs
    none of Python's code: what a signal handler raised there, Ctrl-C for one, would be lost, and
    the note with it."""

    __slots__ = ("group",)

    group: "_Group | None"
    """None: the storage has stayed on the device, and does not count any more."""


class _Group:
    """What one layer has saved, as far as it leaves or returns. Guarded by the lock."""

    __slots__ = (
        "also",
        "arriving",
        "forward",
        "held",
        "is_away",
        "left",
        "name",
        "number",
        "order",
        "sources",
        "storages",
        "stream",
        "streams",
    )

    def __init__(self, name: str, order: int, forward: "_Forward") -> None:
        self.name = name
        self.order = order
        self.forward = forward
        self.number = 0
        """Its number in the arena; 0: it has none."""
        self.storages: list[_Needed] = []
        """Those that leave with it, by place."""
        self.also: list[weakref.ref[Storage]] = []
        """Those that left with groups before it, and return with it."""
        self.left = 0
        """Those of ``storages`` that are away or on their way, and still needed."""
        self.held: list[Any] = []
        """Memory of the device that copies of it use."""
        self.is_away = False
        self.sources: list[_Group] = []
        """The groups whose bytes are on their way back for this one."""
        self.arriving: _Group | None = None
        """The group for which bytes of this one are on their way back."""
        self.stream = 0
        """On which its last copies were ordered."""
        self.streams: list[int] = []
        """On which the layer has worked, and which wait for the copies out."""

    def returning(self) -> list[Storage]:
        """What is away and returns with it."""
        return [
            one
            for one in (*_alive(self.storages), *_alive(self.also))
            if one.back is self and one.device is None and one.group is not None
        ]


class _Forward:
    """What one block has saved so far. Used by the thread of the block alone."""

    __slots__ = (
        "freed",
        "has_saved",
        "is_alone",
        "is_over",
        "order",
        "passed_over",
        "saved",
        "saving",
        "shared",
        "since",
        "stayed",
        "storages",
        "streams",
        "streams_of_all",
        "thread",
        "unfinished",
        "waiting",
    )

    def __init__(self, saving: Any, is_alone: bool) -> None:
        self.saving = saving
        """The hooks, while they are autograd's."""
        self.storages: weakref.WeakValueDictionary[int, Storage] = weakref.WeakValueDictionary()
        """Those that are on the device, by an identity that is theirs as long as they are."""
        self.unfinished: list[Storage] = []
        """What the layer that runs has saved."""
        self.shared: list[Storage] = []
        """What it has saved again that layers before it have."""
        self.waiting: list[tuple[int, Storage]] = []
        """Those that have left, and that others still held then; with the order of the group."""
        self.passed_over: list[tuple[int, weakref.ref[Storage]]] = []
        """Those that did not leave because others held them to the end, the forward pass before."""
        self.streams: dict[int, Any] = {}
        """The streams of a GPU on which the layer that runs has saved."""
        self.streams_of_all: dict[int, Any] = {}
        """Those on which all of its layers have worked, as far as that is seen."""
        self.order = 0
        self.thread = threading.get_ident()
        self.has_saved = False
        self.is_over = False
        self.is_alone = is_alone
        """Nothing of other forward passes was away when it began."""
        self.since = 0.0
        self.saved = 0
        self.freed = 0
        self.stayed = 0


class _Begun(threading.local):
    """The forward passes of this thread that ``attach`` follows and that run: whether they are
    blocks, and the exception that was being handled when they began."""

    def __init__(self) -> None:
        self.passes: list[tuple[bool, BaseException | None]] = []


class ActivationOffload(Closing):
    """Lets what autograd saves leave the device until the backward pass asks for it.

    ``model``: the module whose forward pass it is. ``layers``: the modules of it at whose ends the
    forward pass is divided into groups; None: those in its longest lists (``torch.nn.ModuleList``
    that are in no other). ``host_bytes``: page-locked host memory, taken once; what does not fit
    stays on the device. ``min_bytes``: smaller storages stay. ``in_flight``: so many groups behind
    its own the memory of a group is given back at the latest. ``prefetch``: so many groups return
    ahead of the backward pass. ``keep_last``: the last groups of a forward pass never leave.
    ``aim``: "overlap": no more leaves than copies take behind the compute, which the first two
    forward passes measure; "memory": all that can. Sizes are numbers of bytes or text ("8GiB");
    None asks the configuration (``activations.*``), which ``config`` and ``overrides`` give as for
    ``load_config``. ``beside``: a ``Controller`` with whose states it shares
    ``offload.budget_bytes``, and whose configuration it has unless another one is given.

    Saved tensors of a ``with`` block leave, and between ``attach`` and ``detach`` those of every
    forward pass of ``model`` in training mode. Parameters, buffers, what others hold anyway, what
    is saved behind the last layer, and tensors of other devices stay. A gradient has the same bits
    as without. Under ``torch.utils.checkpoint`` the inputs that it keeps leave, and what it
    computes again in the backward pass does not.

    A forward pass is one thread's. A backward pass may run on any. In it, CopyError: the bytes of a
    layer could not be brought back; RuntimeError: a saved tensor was changed in place. It holds
    the model; ``close``, or the end of its last reference, takes its hooks off.

    InvalidError, ConfigError (host_bytes is not given), UnsupportedError (the whole model is
    compiled, or lies on no device of refit), BudgetError, PinError, HostMemoryError.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        layers: Iterable[torch.nn.Module] | None = None,
        *,
        host_bytes: int | str | None = None,
        min_bytes: int | str | None = None,
        in_flight: int | None = None,
        prefetch: int | None = None,
        keep_last: int | None = None,
        aim: Literal["overlap", "memory"] | None = None,
        beside: Any = None,
        config: ConfigLike = None,
        **overrides: Any,
    ) -> None:
        options = {
            "activations_host_bytes": host_bytes,
            "activations_min_bytes": min_bytes,
            "activations_in_flight": in_flight,
            "activations_prefetch": prefetch,
            "activations_keep_last": keep_last,
            "activations_aim": aim,
        }
        if beside is not None and not isinstance(getattr(beside, "_devices", None), Devices):
            raise InvalidError(f"beside is a {type(beside).__name__}: give a refit.Controller")
        if config is None and beside is not None:
            config = beside._config
        chosen = make_config(
            config, {**overrides, **{k: v for k, v in options.items() if v is not None}}
        )
        if not isinstance(model, torch.nn.Module):
            raise InvalidError(
                f"model is a {type(model).__name__}: give the torch.nn.Module whose forward passes "
                "these are; of several chunks, each its own"
            )
        _refuse_compiled(model)
        self._model = model
        self._layers = _layers_of(model, layers)
        self._on = _device_of(model)
        self._min_bytes = max(1, chosen["activations.min_bytes"])
        self._in_flight = chosen["activations.in_flight"]
        self._prefetch = chosen["activations.prefetch"]
        self._keep_last = chosen["activations.keep_last"]
        self._plan = Plan(self._in_flight, chosen["activations.aim"] == "memory")
        self._lock = threading.RLock()
        self._groups: list[_Group] = []
        """In the order of the forward passes: all that something may return with."""
        self._leaving: deque[_Group] = deque()
        self._stuck: list[tuple[int, Any]] = []
        """What holds memory under copies that could not be waited for; with the number of a group
        that is to be released once they are over, or 0."""
        self._over: deque[_Needed] = deque()
        """Of storages that are not needed any more."""
        self._held_anyway: set[tuple[int, int]] = set()
        """Where storages are saved that others hold: order of the group, place among its own."""
        self._nothing: dict[torch.dtype, torch.Tensor] = {}
        self._process = os.getpid()
        self._forward: _Forward | None = None
        self._depth = 0
        self._kept_before = 0
        """The layers of the last forward pass, until a backward pass has asked for one."""
        self._blocks = 0
        self._lengths = deque([len(self._layers)], maxlen=_USELESS)
        """Layers of the last forward passes; a short one among long ones changes nothing."""
        self._useless = 0
        self._off: str | None = None
        self._last = (0, 0, 0)
        devices = Devices(chosen, {}) if beside is None else beside._devices
        self._arena = Arena(devices[self._on], chosen)
        self._hooks = [
            _follow(layer, _Boundary(self, number))
            for number, (_, layer) in enumerate(self._layers)
        ]
        self._attached: list[Any] = []
        self._begun = _Begun()
        self._end = weakref.finalize(self, _remove, self._hooks)

    # ---- the block -------------------------------------------------------------------------------

    def __enter__(self) -> "ActivationOffload":
        """Begins a block. StateError in the block of another thread."""
        self._open()
        if self._depth > 0:
            self._refuse_other_thread()
        before = self._depth
        try:
            with interrupts_held():
                if before == 0:
                    self._begin()
                self._depth += 1
            return self
        except BaseException:  # Ctrl-C, which has waited, too: then there is no block to end
            if before == 0:
                self._abandon()
            self._depth = before
            raise

    def _begin(self) -> None:
        if self._on.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "a CUDA graph is being captured: it would hold the addresses of activations that "
                "leave. Capture without the block"
            )
        self._blocks += 1
        if self._off is not None and self._blocks % _LOOKS_AGAIN == 0:
            self._off = None
            self._plan.again()
            self._held_anyway.clear()
        with self._lock:
            self._tidy()
            if self._stuck:
                self._release_stuck()
            self._drop_ended()
            is_alone = not any(group.number for group in self._groups)
        if self._off is not None:
            return
        save, load = (partial(_untraced(one), self) for one in ("_save", "_load"))
        saving = torch.autograd.graph.saved_tensors_hooks(save, load)
        forward = _Forward(saving, is_alone)
        if self._plan.measures:
            forward.since = self._now()
        saving.__enter__()
        self._forward = forward

    def __exit__(self, kind: Any, value: Any, trace: Any, _before: int | None = None) -> None:
        """Ends the block."""
        try:
            _before = self._depth
            with interrupts_held():
                if self._depth > 1:
                    self._depth -= 1
                else:
                    self._end_block(whole=kind is None)
        except BaseException:
            if _before in (None, self._depth):  # Ctrl-C came before it was held
                self._depth -= 1
                if self._depth == 0:
                    self._abandon()
            raise

    def _end_block(self, whole: bool) -> None:
        forward = self._abandon()
        if forward is not None:
            self._finish(forward, whole)

    def _abandon(self) -> _Forward | None:
        """Autograd keeps by itself again what it saves."""
        forward, self._forward, self._depth = self._forward, None, 0
        if forward is not None:
            saving, forward.saving = forward.saving, None
            forward.unfinished = []  # groups hold it: this would stay until the last one is over
            if _is_innermost(saving):
                saving.__exit__(None, None, None)
        return forward

    def attach(self) -> "ActivationOffload":
        """Makes every forward pass of the model in training mode a block. A second call does
        nothing."""
        self._open()
        if not self._attached:
            self._attached = [
                self._model.register_forward_pre_hook(_BlockBegins(self), prepend=True),
                self._model.register_forward_hook(_BlockEnds(self), always_call=True),
            ]
            self._hooks.extend(self._attached)
        return self

    def _begin_attached(self, wanted: bool) -> None:
        with interrupts_held():  # a block that no pass is known for would never end
            if self._begun.passes:
                # Ctrl-C ended the forward pass before: hooks are not told of that.
                self._begun.passes.clear()
                self._end_block(whole=False)
            if wanted:
                self.__enter__()
            self._begun.passes.append((wanted, sys.exception()))

    def _end_attached(self) -> None:
        failed = sys.exception()  # a hook that is called behind a failure runs as its handler
        with interrupts_held():
            wanted, before = self._begun.passes.pop() if self._begun.passes else (False, None)
            if wanted:
                self.__exit__(None if failed is before else type(failed), None, None)

    def detach(self) -> None:
        """Ends what ``attach`` began."""
        for hook in self._attached:
            hook.remove()
            if hook in self._hooks:  # else Ctrl-C has broken a detach off
                self._hooks.remove(hook)
        self._attached = []
        if self._begun.passes:
            self._begin_attached(wanted=False)
            self._begun.passes.clear()

    def close(self) -> None:
        """Brings back what is away, takes the hooks off and gives the host memory back. A second
        call does nothing, nor one in a forked process. StateError in a block."""
        if self._arena.closed or self._process != os.getpid():
            return
        if self._depth > 0 and not self._begun.passes:
            raise StateError("this ActivationOffload is in the middle of a forward pass")
        self.detach()
        with self._lock, interrupts_held():
            self._tidy()
            self._settle()
        self._end()
        self._arena.close()

    # ---- what it tells ---------------------------------------------------------------------------

    @property
    def off(self) -> str | None:
        """Why nothing leaves; None: it does. It is tried again now and then."""
        return self._off

    def stats(self) -> dict[str, float]:
        """Figures, ``refit/activation_…``: those of the C library under its names, and of the last
        whole forward pass the bytes of storages that it saved, that left, and that stayed.

        Does not block, unless another thread is in a call.
        """
        self._open()
        with self._lock:
            self._tidy()
            c_stats = gather((lib.refit_activations_stats, self._arena._live))
        saved, left, stayed = self._last
        return numbered(c_stats, "activation_") | {
            PREFIX + "activation_saved_bytes_last": float(saved),
            PREFIX + "activation_left_bytes_last": float(left),
            PREFIX + "activation_kept_bytes_last": float(stayed),
        }

    # ---- forward: what autograd saves ------------------------------------------------------------

    def _save(self, tensor: torch.Tensor) -> Any:
        forward = self._forward
        if forward is None or _in_backward() != -1 or forward.thread != threading.get_ident():
            return keep(tensor)
        forward.has_saved = True
        if not is_plain(tensor):
            return wrap(tensor, self._save)
        if tensor.device != self._on or is_owned(tensor):
            return keep(tensor)
        device = tensor.untyped_storage()
        nbytes = device.nbytes()
        identity = device._cdata
        if nbytes < self._min_bytes:
            return keep(tensor)
        forward.streams |= stream_objects(self._on)
        storage = forward.storages.get(identity)
        if storage is None or storage.device is not device:
            storage = Storage(device, nbytes, forward.order, len(forward.unfinished))
            storage.version = tensor._version
            forward.storages[identity] = storage
            forward.unfinished.append(storage)
            forward.saved += nbytes
        else:
            if storage.order != forward.order:
                storage.order = forward.order
                forward.shared.append(storage)
            if tensor._version != storage.version:
                self._save_changed(forward, storage, tensor._version)
        return Saved(storage, tensor, self._nothing_of(tensor.dtype))

    def _save_changed(self, forward: _Forward, storage: Storage, version: int) -> None:
        """A storage is saved again at another version. If it has left before it was changed, the
        bytes that count are on the device, and it stays there."""
        if storage.group is None:
            storage.version = _SEVERAL
        elif version != 0:  # at 0 its part of the storage was never changed
            with self._lock, interrupts_held():
                if storage.group is not None:
                    forward.stayed += storage.nbytes
                    self._keep_storage(storage)

    def _nothing_of(self, dtype: torch.dtype) -> torch.Tensor:
        found = self._nothing.get(dtype)
        if found is None:
            found = self._nothing[dtype] = torch.empty(0, dtype=dtype, device=self._on)
        return found

    # ---- forward: groups leave -------------------------------------------------------------------

    def _end_of_layer(self, number: int) -> None:
        forward = self._forward
        if forward is None or _in_backward() != -1 or forward.thread != threading.get_ident():
            return
        with self._lock, interrupts_held():
            self._tidy()
            self._note_streams(forward)
            found, forward.unfinished = forward.unfinished, []
            order, forward.order = forward.order, forward.order + 1
            measures = self._plan.measures
            forward_s = self._now() - forward.since if measures else 0.0
            # Before this group leaves: what it saved is still held by those who called the layer.
            self._give_back(self._in_flight - 1)
            self._look_at_waiting(forward)
            group = self._group(forward, self._layers[number][0], order)
            chosen: list[Storage] = []
            if order < max(self._lengths) - self._keep_last:
                chosen = self._chosen(forward, group, found)
                self._leave(group, chosen, forward.streams)
            forward.streams = {}
            nbytes = sum(one.nbytes for one in chosen)
            forward.stayed += sum(one.nbytes for one in found) - nbytes
            if measures:
                self._plan.note(order, nbytes, forward_s, self._copied(group))
            if measures:
                forward.since = self._now()

    def _note_streams(self, forward: _Forward) -> None:
        """The streams of a layer that has ended, before memory of those before it is let go."""
        forward.streams_of_all |= {**forward.streams, **stream_objects(self._on)}

    def _group(self, forward: _Forward, name: str, order: int) -> _Group:
        """The group of a layer that has ended, with what it shares with those before it."""
        group = _Group(name, order, forward)
        shared, forward.shared = forward.shared, []
        for storage in shared:
            storage.back = group
            group.also.append(weakref.ref(storage))
        self._groups.append(group)
        return group

    def _chosen(self, forward: _Forward, group: _Group, found: Sequence[Storage]) -> list[Storage]:
        """Those that leave, as the plan says; the large ones first where not all do."""
        may = []
        for one in found:
            if (group.order, one.at) in self._held_anyway:
                forward.passed_over.append((group.order, weakref.ref(one)))
            elif one.device.nbytes() == one.nbytes:  # its owner has not taken the memory back
                may.append(one)
        share = self._plan.share(group.order)
        if share >= 1.0:
            return may
        left = share * sum(one.nbytes for one in may)
        chosen = []
        for one in sorted(may, key=lambda one: -one.nbytes):
            if one.nbytes <= left:
                left -= one.nbytes
                chosen.append(one)
        return sorted(chosen, key=lambda one: one.at)

    def _leave(self, group: _Group, chosen: Sequence[Storage], streams: Mapping[int, Any]) -> None:
        """Starts the copies out, behind all streams that the layer has worked on."""
        if not chosen:
            return
        group.stream = current_stream(self._on)
        group.streams = list({group.stream: None, **streams})
        for one in group.streams[1:]:
            torch.cuda.current_stream(self._on).wait_stream(streams[one])
        try:
            group.number = self._arena.begin()
            self._add(group, chosen)
            self._arena.commit(group.number, group.stream)
        except RefitError as why:
            self._stays(group, why)
            return
        except BaseException:
            self._keep(group)
            raise
        if group.storages:
            self._leaving.append(group)
        else:  # the arena has room for none
            self._release(group)

    def _add(self, group: _Group, chosen: Sequence[Storage]) -> None:
        for storage in chosen:
            place = self._arena.add(group.number, storage.device.data_ptr(), storage.nbytes)
            if place is not None:
                storage.place = place
                storage.group = storage.back = group
                needed = _Needed(storage, self._over.append)
                needed.group = group
                group.storages.append(needed)
                group.held.append(storage.device)
                group.left += 1

    def _give_back(self, most: int) -> None:
        """Lets go of the device memory of groups that have left, and of so many that at most
        ``most`` are on their way."""
        while self._leaving:
            group = self._leaving[0]
            try:
                if not self._arena.is_still(group.number):
                    if len(self._leaving) <= most:
                        return
                    for stream in group.streams:
                        self._arena.join(group.number, stream)
            except RefitError as why:
                self._leaving.popleft()
                self._stays(group, why)
                continue
            self._leaving.popleft()
            self._free(group)

    def _free(self, group: _Group) -> None:
        """The group is away. Its device memory goes, but for what others hold besides us."""
        group.is_away = True
        for storage in _alive(group.storages):
            if storage.group is None:
                continue
            if users_of(storage.device) == 1:
                self._let_go(group.forward, storage)
            elif not group.forward.is_over:
                group.forward.waiting.append((group.order, storage))
            else:
                self._keep_storage(storage)
        group.held.clear()
        if group.left == 0:
            self._release(group)

    def _let_go(self, forward: _Forward, storage: Storage) -> None:
        """Its identity may be another storage's from now on, and its memory, too: that belongs to
        the stream on which it was taken, which need not be one of those that wait for the copies.
        Nor do copies alone read it: a layer behind its own may, which has not saved it."""
        used_on([storage.device], forward.streams_of_all.values())
        if forward.storages.get(storage.device._cdata) is storage:
            del forward.storages[storage.device._cdata]
        forward.freed += storage.nbytes
        storage.device = None

    def _keep_storage(self, storage: Storage) -> None:
        """It stays on the device for good."""
        group, storage.group = storage.group, None
        if group is None:
            return
        group.storages[storage.place].group = None
        group.left -= 1
        if group.left == 0:
            self._release(group)

    def _stays(self, group: _Group, why: RefitError) -> None:
        """The copies out of a group could not be started, or waited for: it stays on the device."""
        self._keep(group)
        if isinstance(why, DeviceError):
            raise _named(why, group) from why
        warnings.warn(
            f"activations of {group.name} stay on the device: {why}", RuntimeWarning, stacklevel=5
        )

    def _keep(self, group: _Group) -> None:
        for storage in _alive(group.storages):
            self._keep_storage(storage)
        self._release(group)

    def _copied(self, group: _Group) -> float:
        """Waits for the copies out of a group that is measured: how long they took."""
        began = time.perf_counter()
        if group.number and self._leaving:
            with suppress(RefitError):  # _give_back meets it again, or waits on
                self._arena.wait(group.number, _MEASURE_MS)
        return time.perf_counter() - began

    def _finish(self, forward: _Forward, whole: bool) -> None:
        """A block has ended; ``whole``: not by an exception. Its groups hold ``forward`` as long as
        they are there, so it holds no storage from here on."""
        forward.unfinished.clear()
        with self._lock, interrupts_held():
            self._tidy()
            self._note_streams(forward)
            self._give_back(len(self._leaving))
            if forward.shared:
                self._group(forward, "the end of the forward pass", forward.order)
            self._learn(forward)
            forward.is_over = True
            for group in self._leaving:
                if group.forward is forward:
                    forward.freed += sum(
                        one.nbytes for one in _alive(group.storages) if one.group is not None
                    )
            forward.storages.clear()
            if not whole or forward.order == 0 or not forward.has_saved:
                return
            self._lengths.append(forward.order)
            self._last = (forward.saved, forward.freed, forward.stayed)
            self._kept_before = forward.order
            if self._plan.measures:
                self._plan.end()
            self._judge(forward)

    def _look_at_waiting(self, forward: _Forward) -> None:
        """Lets go of what others held when it left, and do not any more."""
        waiting, forward.waiting = forward.waiting, []
        while waiting:
            order, storage = waiting.pop()
            if storage.group is None or storage.device is None:
                continue
            if users_of(storage.device) == 1:
                self._let_go(forward, storage)
            else:
                forward.waiting.append((order, storage))

    def _learn(self, forward: _Forward) -> None:
        """What others hold beyond the forward pass does not leave the next time."""
        self._look_at_waiting(forward)
        waiting, forward.waiting = forward.waiting, []
        for order, storage in waiting:
            self._held_anyway.add((order, storage.at))
            forward.stayed += storage.nbytes
            self._keep_storage(storage)
        for order, reference in forward.passed_over:
            passed = reference()
            if passed is not None and users_of(passed.device) == 1:
                self._held_anyway.discard((order, passed.at))

    def _judge(self, forward: _Forward) -> None:
        """Turns it off where it is of no use."""
        if forward.freed > 0:
            self._useless = 0
        if self._plan.measures or forward.freed > 0 or not forward.is_alone:
            return
        self._useless += 1
        if self._useless < _USELESS:
            return
        self._useless = 0
        if forward.saved == 0:
            self._off = (
                f"the forward pass saves no storage of at least {self._min_bytes} bytes "
                "(activations.min_bytes)"
            )
        elif self._plan.is_empty:
            self._off = (
                "copies take longer than the compute that they would hide behind: "
                'aim="memory" lets all leave'
            )
        elif self.stats()[PREFIX + "activation_refused_bytes_total"] > 0:
            self._off = "activations.host_bytes has room for none of the saved storages"
        else:
            self._off = "all that the forward pass saves is held by others, too"

    # ---- backward: groups return -----------------------------------------------------------------

    def _load(self, saved: Any) -> torch.Tensor:
        if type(saved) is Kept:
            return kept(saved)
        if type(saved) is Wrapped:
            return unwrap(saved, self._load)
        saved.check()
        storage = saved.storage
        with self._lock:
            device = storage.device
            if storage.group is not None:
                device = self._brought(saved, storage)
            elif storage.order < self._kept_before:
                self._begin_returns()
        made: torch.Tensor = saved.rebuilt(device)
        if storage.stream != 0 and storage.stream != current_stream(self._on):
            made.record_stream(torch.cuda.current_stream(self._on))
        return made

    def _brought(self, saved: Saved, storage: Storage) -> Any:
        """The device memory of a storage that leaves, is away or has returned."""
        self._tidy()
        back = storage.back
        if not storage.group.is_away:
            with interrupts_held():
                self._cancel(storage.group)
            return storage.device
        if storage.device is None or back.sources:
            with interrupts_held():
                if storage.device is None:
                    self._fetch(back)
                self._join(back)
                self._fetch_before(self._groups.index(back))
        stream = current_stream(self._on)
        if storage.stream != stream:  # another stream than that which has joined the copies
            try:
                self._arena.join(storage.group.number, stream)
            except RefitError as why:
                storage.device = None
                raise _named(why, back) from why
        device = storage.device
        storage.ask(saved)
        return device

    def _cancel(self, group: _Group) -> None:
        """A group that is asked for while it leaves stays."""
        for needed in group.storages:
            needed.group = None
            storage = needed()
            if storage is not None:
                storage.group = None
        group.left = 0
        self._release(group)

    def _fetch(self, group: _Group) -> None:
        """Starts the copies in of all that returns with a group."""
        stream = current_stream(self._on)
        by_source: dict[_Group, list[Storage]] = {}
        for storage in group.returning():
            by_source.setdefault(storage.group, []).append(storage)
        for source, storages in by_source.items():
            if source.arriving is not None:
                self._join(source.arriving)
            taken = [_memory(storage.nbytes, self._on) for storage in storages]
            memories = [0] * len(source.storages)
            for storage, made in zip(storages, taken, strict=True):
                memories[storage.place] = made.data_ptr()
            # Before the call: an exception that another thread sends to this one may come right
            # behind it, and copies be under way. Where none is, a join does nothing.
            group.held.extend(taken)
            source.arriving = group
            source.stream = group.stream = stream
            group.sources.append(source)
            try:
                self._arena.fetch(source.number, memories, stream)
            except RefitError as why:
                if isinstance(why, DeadlineError):
                    self._stuck.append((0, taken))
                source.arriving = None
                group.sources.pop()
                del group.held[-len(taken) :]
                raise _named(why, group) from why
            for storage, made in zip(storages, taken, strict=True):
                storage.return_to(made, stream)

    def _join(self, group: _Group) -> None:
        """The stream of the backward pass waits for the copies in."""
        stream = current_stream(self._on)
        while group.sources:
            source = group.sources[-1]
            try:
                # The stream of the fetch, too: its allocator gets the memory back.
                for one in {stream, source.stream} if source.number else ():
                    self._arena.join(source.number, one)
            except RefitError as why:
                raise _named(why, group) from why  # the copies go on, and can be waited for again
            source.arriving = None
            group.sources.pop()
        group.held.clear()

    def _begin_returns(self) -> None:
        """The backward pass has come to the layers that stay: those before them are next."""
        self._kept_before = 0
        with interrupts_held():
            self._fetch_before(len(self._groups))

    def _fetch_before(self, at: int) -> None:
        """Starts the groups that the backward pass comes to next, which stand before this one."""
        left = self._prefetch
        while at > 0 and left > 0:
            at -= 1
            before = self._groups[at]
            if before.left == 0 and not before.also:
                continue
            left -= 1
            if before.sources:
                continue
            try:
                self._fetch(before)
            except Exception as why:
                if isinstance(why, RefitError) or lacks_memory(why):
                    return  # it is fetched again when it is asked for, and then this is told
                raise

    # ---- groups end ------------------------------------------------------------------------------

    def _tidy(self) -> None:
        """Acts on storages that are not needed any more. With the lock."""
        if self._over:
            with interrupts_held():
                self._count_down()

    def _count_down(self) -> None:
        released = False
        while self._over:
            group = self._over.popleft().group
            if group is None:
                continue
            group.left -= 1
            if group.left == 0 and group.number:
                self._release(group)
                released = True
        if released:
            self._drop_ended()

    def _drop_ended(self) -> None:
        """Forgets groups with which nothing returns any more."""
        ended = [one for one in self._groups if not one.number and not _alive(one.also)]
        for group in ended:
            self._end_copies(group)
            self._groups.remove(group)

    def _end_copies(self, group: _Group) -> None:
        """The current stream waits for bytes that are on their way and not needed any more, so
        that their memory may go."""
        with suppress(RefitError):
            self._join(group)
        if group.sources:
            self._stuck.append((0, group))

    def _release(self, group: _Group) -> None:
        """Gives its room in the arena back, once all of it is on the device, or not needed."""
        if not group.number:
            return
        if group in self._leaving:
            self._leaving.remove(group)
        leaving = [] if group.is_away else list(group.held)
        self._end_copies(group)
        number = group.number
        # until it is known that no copy uses what it holds
        self._stuck.append((number, (group, leaving)))
        group.number = 0
        self._arena.release(number, group.stream)
        self._stuck.pop()
        group.storages.clear()  # they know the group, too: a cycle would wait for the collector
        # Copies out may go on: then no one needs their bytes, and what they read may change. It
        # must not be unmapped, and belongs to streams that need not wait for them.
        used_on(leaving, group.forward.streams_of_all.values())
        if not group.sources:
            group.held.clear()

    def _release_stuck(self) -> None:
        """Releases groups whose copies hung, and are over by now."""
        for one in list(self._stuck):
            number, _ = one
            try:
                if number == 0 or not self._arena.is_still(number):
                    continue
            except RefitError:
                pass  # the device is lost, which ends the copies, too
            try:
                self._arena.release(number, current_stream(self._on))
            except NotFoundError:
                pass  # an exception came right behind its release
            except RefitError:
                continue
            self._stuck.remove(one)

    def _settle(self) -> None:
        """Brings all groups back for good."""
        for group in self._groups:
            self._fetch(group)
        for group in self._groups:
            self._join(group)
        for group in self._groups:
            self._cancel(group)
        self._groups.clear()

    # ---- small things ----------------------------------------------------------------------------

    def _now(self) -> float:
        """The time, once the device has done what was queued."""
        if self._on.type == "cuda":
            torch.cuda.current_stream(self._on).synchronize()
        return time.perf_counter()

    def _open(self) -> None:
        if self._arena.closed:
            raise StateError("this ActivationOffload is closed: make another one for the model")
        refuse_fork(self._process, "ActivationOffload")

    def _refuse_other_thread(self) -> None:
        forward = self._forward
        if forward is not None and forward.thread != threading.get_ident():
            raise StateError("this ActivationOffload is in a forward pass of another thread")


class _Hook:
    """A hook of a module. It does not hold the offload, for the module holds it; a copy of the
    module has hooks that do nothing."""

    def __init__(self, offload: ActivationOffload | None = None) -> None:
        self._reference = None if offload is None else weakref.ref(offload)

    @property
    def _offload(self) -> ActivationOffload | None:
        return None if self._reference is None else self._reference()

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return type(self), ()


class _Boundary(_Hook):
    """The forward hook of a layer."""

    def __init__(self, offload: ActivationOffload | None = None, number: int = 0) -> None:
        super().__init__(offload)
        self._number = number
        self._end = None if offload is None else _untraced("_end_of_layer")

    def __call__(self, *_: Any) -> None:
        offload = self._offload
        if offload is not None and self._end is not None:
            self._end(offload, self._number)


@cache
def _untraced(method: str) -> Any:
    """A method of the offload that torch.compile does not trace: autograd calls hooks within the
    frames of compiled layers, and a layer may be compiled after it got its hook."""
    return torch.compiler.disable(getattr(ActivationOffload, method))  # type: ignore[no-untyped-call]


def _follow(layer: torch.nn.Module, boundary: _Boundary) -> Any:
    """Lets a layer tell its ends; what has ``remove`` undoes it."""
    if layer._compiled_call_impl is None:
        return layer.register_forward_hook(boundary)
    return _CompiledCall(layer, boundary)


class _CompiledCall:
    """In place of the call of a layer that was compiled in place (``layer.compile()``). A hook
    would be traced with the layer, and break its graph."""

    def __init__(self, layer: torch.nn.Module, boundary: _Boundary) -> None:
        self._layer = layer
        self._boundary: Callable[[], None] = boundary
        self._call: Any = layer._compiled_call_impl
        layer._compiled_call_impl = self

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        result = self._call(*arguments, **keywords)
        self._boundary()
        return result

    def remove(self) -> None:
        if self._layer._compiled_call_impl is self:
            self._layer._compiled_call_impl = self._call
        else:  # the layer was compiled again, or its call was replaced once more
            self._boundary = _no_boundary


def _no_boundary() -> None:
    """The end of a layer that is not followed any more."""


class _BlockBegins(_Hook):
    """The forward pre-hook of a model whose forward passes are blocks."""

    def __call__(self, model: torch.nn.Module, *_: Any) -> None:
        offload = self._offload
        if offload is not None and _in_backward() == -1:
            offload._begin_attached(model.training and torch.is_grad_enabled())


class _BlockEnds(_Hook):
    """The forward hook of such a model, which is also called when the forward pass fails."""

    def __call__(self, *_: Any) -> None:
        offload = self._offload
        if offload is not None and _in_backward() == -1:
            offload._end_attached()


def _is_innermost(saving: Any) -> bool:
    """Whether autograd saves by these hooks now. It does not behind a block that was abandoned, and
    that another one is inside of."""
    innermost = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if innermost is None:  # a PyTorch that does not tell
        return True
    hooks = innermost(True)
    return bool(hooks is not None and hooks[0] == saving.pack_hook)


def _alive(storages: Iterable["weakref.ref[Storage]"]) -> list[Storage]:
    return [one for reference in storages if (one := reference()) is not None]


def _memory(nbytes: int, device: torch.device) -> Any:
    storage: Any = torch.UntypedStorage
    return storage(nbytes, device=device)


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()


def _named(why: RefitError, group: _Group) -> RefitError:
    """A failure in the backward pass, with the layer's name."""
    text = f"activations of {group.name} could not be brought back: {why.text}"
    return type(why)(text, why.status, why.subsystem)


def _layers_of(
    model: torch.nn.Module, layers: Iterable[torch.nn.Module] | None
) -> list[tuple[str, torch.nn.Module]]:
    """The layers with their names. InvalidError for modules that the model does not have, and for
    one that is inside another."""
    chosen = list(_longest_lists(model) if layers is None else layers)
    if not chosen:
        raise InvalidError(
            "there are no layers at whose ends activations could leave: name them, "
            "layers=model.layers say"
        )
    names = {module: name for name, module in model.named_modules()}
    for layer in chosen:
        if layer not in names:
            raise InvalidError(f"a {type(layer).__name__} of layers is no module of the model")
    inner = {id(one) for layer in chosen for one in layer.modules() if one is not layer}
    for layer in chosen:
        if id(layer) in inner:
            raise InvalidError(f"layer {names[layer]} is inside another one of layers")
    return [(names[layer] or type(layer).__name__, layer) for layer in dict.fromkeys(chosen)]


def _longest_lists(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The modules in lists that are in no other list."""
    for child in model.children():
        if isinstance(child, torch.nn.ModuleList) and len(child) > 1:
            yield from child
        else:
            yield from _longest_lists(child)


def _device_of(model: torch.nn.Module) -> torch.device:
    # Megatron's DistributedDataParallel has a list in the place of the method buffers().
    for tensors in (model.named_parameters(), model.named_buffers()):
        for _, tensor in tensors:
            if tensor.device.type in ("cpu", "cuda"):
                return tensor.device
            raise UnsupportedError(
                f"the model is on {tensor.device}: activations leave a CPU's memory or a CUDA GPU"
            )
    raise InvalidError("the model has no parameters, which say on which device it is")


def _refuse_compiled(model: torch.nn.Module) -> None:
    """A graph of the whole forward pass saves at its end, when no layer is left to copy behind."""
    compiled = getattr(model, "_compiled_call_impl", None) is not None
    if compiled or hasattr(model, "_orig_mod"):
        raise UnsupportedError(
            "the model is compiled as a whole, and saves all its activations at its end: compile "
            "its layers instead (for layer in model.layers: layer.compile())"
        )
