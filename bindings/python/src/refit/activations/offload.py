"""Activations leave the device in the forward pass and return in the backward pass.

    activations = refit.ActivationOffload(model, layers=model.layers, host_bytes="8GiB")
    for batch in loader:
        with activations:
            loss = model(batch).loss
        loss.backward()

In the block autograd hands over what it saves (``torch.autograd.graph.saved_tensors_hooks``). A
group is what is saved from the end of one layer to the end of the next; it leaves and returns as a
whole:

    open ──the layer ends──► leaving ──in_flight groups later──► away ──asked for──► returning
                                 │                                 ▲                     │
                                 └── held by others: it stays      └──asked for by all── returned

The life of one activation, with the function that takes each step (``Groups`` is in ``groups``,
``Saved`` and ``Storage`` in ``saved_tensors``, and each method of ``Arena`` is one call of C):

1. An operation of a layer saves a tensor: autograd calls ``_save``, which notes its storage, once
   for all views (``Storage``), and gives autograd a ``Saved``, which has no memory.
2. The layer ends: its hook (``_Boundary``) calls ``_end_of_layer``, which takes step 4 for groups
   before it, then step 3 for its own.
3. The storages since the last end are a group: ``Groups.new``. Those that leave are chosen
   (``Groups.choose``), get places in host memory (``Arena.add``), and are copied on a stream of
   the arena, after what the layer has queued (``Groups.leave``, ``Arena.commit``).
4. At the end of the layer ``in_flight`` groups later the layer's streams wait for the copies
   (``Arena.join``), and the storage's device memory is freed (``Groups.free_memory``). What others
   still hold is looked at again at the end of each layer (``Groups.free_held``), and stays if they
   hold it when the block ends (``_finish``, ``Groups.learn``).
5. The backward pass asks for the tensor: autograd calls ``_load``. The first that is away brings
   its whole group (``Groups.restore``): device memory is taken, the copies in start
   (``Arena.fetch``), and the current stream waits for them (``Arena.join``). Then the copies of
   the groups before it start.
6. ``Saved.rebuilt`` makes the tensor, over the memory that now has its bytes.
7. Autograd drops the last ``Saved`` of the storage. The next call in a forward pass notices it, or
   the next request for another group in a backward pass (``Groups.tidy``). A group of which nothing
   is needed gives its room back (``Arena.release``).

lib/ACTIVATION.md goes on into C.
"""

import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from refit._c.config import ConfigLike, make_config
from refit._c.handle import Closing, refuse_fork
from refit._c.library import lib
from refit._c.stats import PREFIX, gather, numbered
from refit._c.waiting import interrupts_held
from refit.activations.arena import Arena
from refit.activations.groups import Forward, Groups, LayerTime, Measure, Plan, alive
from refit.activations.saved_tensors import (
    Kept,
    Saved,
    Storage,
    Wrapped,
    is_owned,
    is_plain,
    keep,
    unwrap,
    wrap,
)
from refit.errors import (
    InvalidError,
    StateError,
    UnsupportedError,
)
from refit.states.offloader import NO_STREAM
from refit.states.torch_memory import (
    Devices,
    current_stream,
    stream_objects,
)

if TYPE_CHECKING:
    from refit.memory_pool import MemPool

_LOOKS_AGAIN = 64
"""Blocks after which an offload that is off measures again."""

_USELESS = 3
"""Forward passes in a row that have freed nothing: then it is off."""

_SEVERAL = -1
"""The version of a storage whose tensors were saved at several."""

_graph_task = torch._C._current_graph_task_id


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
    stays on the device. ``min_bytes``: smaller storages stay. ``in_flight``: a group's
    memory is freed at most this many groups later. ``prefetch``: so many groups return
    ahead of the backward pass. ``keep_last``: the last groups of a forward pass never leave.
    ``aim``: "overlap": no more leaves than copies take during the compute, which the first two
    forward passes measure; "memory": all that can. Sizes are numbers of bytes or text ("8GiB");
    None asks the configuration (``activations.*``), which ``config`` and ``overrides`` give as for
    ``load_config``. ``pool``: what the controller of the same model has as its ``pool``, if it is
    given this offload as its ``activations``.

    Saved tensors of a ``with`` block leave, and between ``attach`` and ``detach`` those of every
    forward pass of ``model`` in training mode. Parameters, buffers, what others hold anyway, what
    is saved after the last layer, and tensors of other devices stay. A gradient has the same bits
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
        pool: "MemPool | None" = None,
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
        if "beside" in overrides:
            raise TypeError(
                "beside= is not a keyword of ActivationOffload: say "
                "refit.Controller(optimizer, model, activations=...)"
            )
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
        self._device = _device_of(model)
        self._min_bytes = max(1, chosen["activations.min_bytes"])
        self._in_flight = chosen["activations.in_flight"]
        self._keep_last = chosen["activations.keep_last"]
        self._plan = Plan(self._in_flight, chosen["activations.aim"] == "memory")
        self._empty: dict[torch.dtype, torch.Tensor] = {}
        self._process = os.getpid()
        self._forward: Forward | None = None
        self._depth = 0
        self._blocks = 0
        self._lengths = deque([len(self._layers)], maxlen=_USELESS)
        """Layers of the last forward passes; a short one among long ones changes nothing."""
        self._useless = 0
        self._off: str | None = None
        self._last = (0, 0, 0)
        self._config = chosen
        self._devices = Devices(chosen, {} if pool is None else {pool.device: pool.handle})
        self._arena = Arena(self._devices[self._device], chosen)
        self._groups = Groups(self._arena, self._device, self._plan, chosen["activations.prefetch"])
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
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "a CUDA graph is being captured: it would hold the addresses of activations that "
                "leave. Capture without the block"
            )
        self._blocks += 1
        if self._off is not None and self._blocks % _LOOKS_AGAIN == 0:
            self._off = None
            self._plan.forget()
            self._groups.held_anyway.clear()
        with self._groups.lock:
            self._groups.tidy()
            if self._groups.stuck:
                self._groups.release_stuck()
            self._groups.drop_ended()
            is_alone = not any(group.arena_number for group in self._groups.all)
        if self._off is not None:
            return
        save, load = (partial(_untraced(one), self) for one in ("_save", "_load"))
        saving = torch.autograd.graph.saved_tensors_hooks(save, load)
        forward = Forward(saving, is_alone)
        if self._plan.measures:
            forward.layer_time = LayerTime(self._device)
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

    def _abandon(self) -> Forward | None:
        """Autograd keeps by itself again what it saves."""
        forward, self._forward, self._depth = self._forward, None, 0
        if forward is not None:
            saving, forward.autograd_hooks = forward.autograd_hooks, None
            forward.layer_storages = []  # its groups hold ``forward``, and would hold these
            if _is_on_top(saving):
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
        failed = sys.exception()  # a hook that is called after a failure runs as its handler
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
        with self._groups.lock, interrupts_held():
            self._groups.tidy()
            self._groups.return_all()
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
        with self._groups.lock:
            self._groups.tidy()
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
        if forward is None or _graph_task() != -1 or forward.thread != threading.get_ident():
            return keep(tensor)
        forward.has_saved = True
        if not is_plain(tensor):
            return wrap(tensor, self._save)
        if tensor.device != self._device or is_owned(tensor):
            return keep(tensor)
        memory = tensor.untyped_storage()
        nbytes = memory.nbytes()
        identity = memory._cdata
        if nbytes < self._min_bytes:
            return keep(tensor)
        stream = current_stream(self._device)
        if stream != NO_STREAM and stream not in forward.layer_streams:
            forward.layer_streams |= stream_objects(self._device)
        storage = forward.storages.get(identity)
        if storage is None or storage.memory is not memory:
            storage = Storage(memory, nbytes, forward.order, len(forward.layer_storages))
            storage.version = tensor._version
            forward.storages[identity] = storage
            forward.layer_storages.append(storage)
            forward.saved_bytes += nbytes
        else:
            if storage.order != forward.order:
                storage.order = forward.order
                forward.shared.append(storage)
            if tensor._version != storage.version:
                self._save_changed(forward, storage, tensor._version)
        return Saved(storage, tensor, self._empty_of(tensor.dtype))

    def _save_changed(self, forward: Forward, storage: Storage, version: int) -> None:
        """A storage is saved again at another version. If it has left before it was changed, the
        bytes that count are on the device, and it stays there."""
        if storage.group is None:
            storage.version = _SEVERAL
        elif version != 0:  # at 0 its part of the storage was never changed
            with self._groups.lock, interrupts_held():
                if storage.group is not None:
                    forward.stayed_bytes += storage.nbytes
                    self._groups.keep_storage(storage)

    def _empty_of(self, dtype: torch.dtype) -> torch.Tensor:
        found = self._empty.get(dtype)
        if found is None:
            found = self._empty[dtype] = torch.empty(0, dtype=dtype, device=self._device)
        return found

    # ---- forward: groups leave -------------------------------------------------------------------

    def _end_of_layer(self, number: int) -> None:
        forward = self._forward
        if forward is None or _graph_task() != -1 or forward.thread != threading.get_ident():
            return
        with self._groups.lock, interrupts_held():
            self._groups.tidy()
            self._note_streams(forward)
            found, forward.layer_storages = forward.layer_storages, []
            order, forward.order = forward.order, forward.order + 1
            if forward.layer_time is not None:
                forward.layer_time.end()
                if self._plan.measures_copies:
                    self._wait_for_device()
            # Before this group leaves: what it saved is still held by those who called the layer.
            self._groups.free_memory(self._in_flight - 1)
            self._groups.free_held(forward)
            group = self._groups.new(forward, self._layers[number][0], order)
            chosen: list[Storage] = []
            if order < max(self._lengths) - self._keep_last:
                chosen = self._groups.choose(forward, group, found)
                self._groups.leave(group, chosen, forward.layer_streams)
            forward.layer_streams = {}
            saved_bytes = sum(one.nbytes for one in found)
            left_bytes = sum(one.nbytes for one in chosen)
            forward.stayed_bytes += saved_bytes - left_bytes
            if forward.layer_time is not None:
                waits = self._plan.measures_copies
                copy_s = self._groups.time_copies(group) if waits else 0.0
                forward.measured.append((saved_bytes, left_bytes, forward.layer_time, copy_s))
                forward.layer_time = LayerTime(self._device)

    def _note_streams(self, forward: Forward) -> None:
        """The streams of a layer that has ended, before memory of those before it is let go."""
        forward.all_streams |= {**forward.layer_streams, **stream_objects(self._device)}

    def _finish(self, forward: Forward, whole: bool) -> None:
        """A block has ended; ``whole``: not by an exception. Its groups hold ``forward`` as long as
        they are there, so it holds no storage from here on."""
        forward.layer_storages.clear()
        measured, forward.measured = forward.measured, []
        with self._groups.lock, interrupts_held():
            self._groups.tidy()
            self._note_streams(forward)
            self._groups.free_memory(len(self._groups.leaving))
            if forward.shared:
                self._groups.new(forward, "the end of the forward pass", forward.order)
            self._groups.learn(forward)
            forward.is_over = True
            for group in self._groups.leaving:
                if group.forward is forward:
                    forward.freed_bytes += sum(
                        one.nbytes for one in alive(group.storages) if one.group is not None
                    )
            forward.storages.clear()
            if not whole or forward.order == 0 or not forward.has_saved:
                return
            self._lengths.append(forward.order)
            self._last = (forward.saved_bytes, forward.freed_bytes, forward.stayed_bytes)
            self._groups.layers_awaited = forward.order
            if forward.layer_time is not None:
                self._plan.end_pass(
                    [
                        Measure(saved_bytes, left_bytes, it.submitted_s, it.computed_s, copy_s)
                        for saved_bytes, left_bytes, it, copy_s in measured
                    ]
                )
            self._turn_off_if_useless(forward)

    def _turn_off_if_useless(self, forward: Forward) -> None:
        """Turns it off where it is of no use."""
        if forward.freed_bytes > 0:
            self._useless = 0
        if self._plan.measures or forward.freed_bytes > 0 or not forward.is_alone:
            return
        self._useless += 1
        if self._useless < _USELESS:
            return
        self._useless = 0
        if forward.saved_bytes == 0:
            self._off = (
                f"the forward pass saves no storage of at least {self._min_bytes} bytes "
                "(activations.min_bytes)"
            )
        elif self._plan.is_empty:
            self._off = (
                "copies take longer than the compute that they would overlap: "
                'aim="memory" lets all leave'
            )
        elif self.stats()[PREFIX + "activation_refused_bytes_total"] > 0:
            self._off = "activations.host_bytes has room for none of the saved storages"
        else:
            self._off = "all that the forward pass saves is held by others, too"

    # ---- backward: groups return -----------------------------------------------------------------

    def _load(self, saved: Any) -> torch.Tensor:
        if type(saved) is Kept:
            return saved.checked()
        if type(saved) is Wrapped:
            return unwrap(saved, self._load)
        saved.check()
        storage = saved.storage
        with self._groups.lock:
            memory = storage.memory
            if storage.group is not None:
                memory = self._groups.restore(saved, storage)
            elif storage.order < self._groups.layers_awaited:
                self._groups.begin_backward()
        made: torch.Tensor = saved.rebuilt(memory)
        if storage.stream != 0 and storage.stream != current_stream(self._device):
            made.record_stream(torch.cuda.current_stream(self._device))
        return made

    # ---- small things ----------------------------------------------------------------------------

    def _wait_for_device(self) -> None:
        """Until it has done what was queued."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

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
        if offload is not None and _graph_task() == -1:
            offload._begin_attached(model.training and torch.is_grad_enabled())


class _BlockEnds(_Hook):
    """The forward hook of such a model, which is also called when the forward pass fails."""

    def __call__(self, *_: Any) -> None:
        offload = self._offload
        if offload is not None and _graph_task() == -1:
            offload._end_attached()


def _is_on_top(saving: Any) -> bool:
    """Whether autograd saves by these hooks now. It does not after a block that was abandoned, and
    that another one is inside of."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if top is None:  # a PyTorch that does not tell
        return True
    hooks = top(True)
    return bool(hooks is not None and hooks[0] == saving.pack_hook)


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()


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
            raise InvalidError(f"a {type(layer).__name__} of layers is not a module of the model")
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
    """A graph of the whole forward pass saves at its end, when no layer is left to copy after."""
    compiled = getattr(model, "_compiled_call_impl", None) is not None
    if compiled or hasattr(model, "_orig_mod"):
        raise UnsupportedError(
            "the model is compiled as a whole, and saves all its activations at its end: compile "
            "its layers instead (for layer in model.layers: layer.compile())"
        )
