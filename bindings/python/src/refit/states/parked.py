"""Parked weights: modules that nothing calls for a while leave the device, and come back by layers.

    refit.park(reference)              its weights leave, into page-locked host memory
    with refit.resident(reference):    they are back, the first layers first
        scores = reference(tokens)     each layer waits for its own weights only

The state machine, and what uses a weight that is away, are those of optimizer states (``cycle``);
which tensors leave, and in what groups, is for ``weight_source`` to say. Here are the handle, and
the hooks on the modules that wait before a layer is called.

Weights that have not changed leave without a copy: a digest of them is taken on the device
("Unchanged" in refit/offload.h). A graph that was recorded before its weights left cannot be gone
back through: PyTorch refuses that as it does for weights that were changed in place.
"""

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from refit._c.config import Config, ConfigLike, make_config
from refit._c.handle import Closing, refuse_fork
from refit._c.library import log
from refit._c.stats import flatten
from refit.errors import ExistsError, InvalidError, NotFoundError, StateError
from refit.observe.observers import Observers
from refit.states.cycle import CLEARED, TRAINING, StateCycle
from refit.states.torch_memory import Devices
from refit.states.weight_source import WeightSource, is_compiled

RESIDENT = "resident"
PARKED = "parked"
RETURNING = "returning"
CLOSED = "closed"

Parkable = nn.Module | Sequence[nn.Module] | Mapping[str, torch.Tensor] | Sequence[torch.Tensor]
"""What can be parked: a module, several, or tensors, with names or without."""

_OF_MODULE: "weakref.WeakKeyDictionary[nn.Module, Parked]" = weakref.WeakKeyDictionary()
_BY_TAG: "weakref.WeakValueDictionary[str, Parked]" = weakref.WeakValueDictionary()


class Parked(Closing):
    """Weights that leave the device together, and return; made by ``refit.park``.

    Holds tensors, but no module: it ends with the last of its modules, or by ``close`` or ``with``,
    and brings the weights back in each case. What uses a weight that is away, other than by calling
    its layer, brings all back and waits for it: a read, an in-place write, ``state_dict``,
    ``load_state_dict``, ``refit.named_weights``. ``refit.states.offloaded_tensor`` names what is
    not seen. Used by one thread at a time.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        tensors: Mapping[str, torch.Tensor],
        tag: str,
        config: Config,
        devices: Devices | None = None,
    ) -> None:
        """``devices``: of a controller whose budget they are held against."""
        self.tag = tag
        source = WeightSource(modules, tensors, config)
        observers = Observers(progress=False)
        self._source = source
        self._cycle = StateCycle(source, config, "keep", observers, devices or Devices(config, {}))
        self._hooks = _Hooks(self, source)
        self._process = os.getpid()
        self._end = weakref.finalize(self, _end, self._cycle, self._hooks, self._process)
        self._end.atexit = False  # the process ends: no pass follows

    def _open(self) -> StateCycle:
        if not self._end.alive:
            raise StateError(f'"{self.tag}" is closed: call refit.park once more')
        refuse_fork(self._process, "Parked")
        return self._cycle

    def offload(self) -> None:
        """The weights leave, and their memory is given back. Does nothing if they are away.

        Blocks until that is done; the first time also for the page-lock of the host memory. After a
        failure it goes on where it was. BudgetError, HostMemoryError, PinError (nothing has moved),
        StateError (a graph capture), DeadlineError, CopyError.
        """
        cycle = self._open()
        if cycle.phase == CLEARED and cycle.per_device.on_host:
            return
        self._hooks.follow()
        tensors = [one for one in self._source.parameters() if not one.is_inference()]
        cycle.offload()
        torch.autograd.graph.increment_version(tensors)

    def restore(self, non_blocking: bool = True) -> None:
        """Takes the weights' memory again and starts the copies back, the first layers first.

        Each layer waits for its own weights when it is called. False waits for all, as ``wait``
        does. Does nothing if they are there. DeviceMemoryError and CopyError: nothing is lost; free
        some memory and call again.
        """
        cycle = self._open()
        cycle.restore()
        if not non_blocking and cycle.phase != TRAINING:
            cycle.wait()

    def wait(self) -> None:
        """Makes the current stream wait for all weights; on a CPU the caller waits. StateError
        before ``restore``."""
        self._open().wait()

    def bring_back(self) -> None:
        """``restore`` and ``wait``, from wherever they are."""
        if self._open().phase != TRAINING:
            self._cycle.bring_back()

    def release(self) -> None:
        """Gives the pinned host memory back, while the weights are on the device; the next
        ``offload`` takes it again. StateError while they are away. Blocks for the system."""
        self._open().trim()

    @property
    def state(self) -> str:
        """ "resident", "parked", "returning" (copies back are under way) or "closed"."""
        if not self._end.alive:
            return CLOSED
        phase = self._open().phase
        return PARKED if phase == CLEARED else RESIDENT if phase == TRAINING else RETURNING

    @property
    def nbytes(self) -> int:
        """Bytes that leave, as of the last ``offload``."""
        return self._open().per_device.nbytes

    @property
    def stays(self) -> list[tuple[str, str]]:
        """Tensors that do not leave, by name, and why; as of the last ``offload``."""
        return self._open().resident

    def stats(self) -> dict[str, float]:
        """A flat dict of floats, as ``Controller.stats`` gives it. Does not block."""
        return flatten(self._open().per_device.stats(), {})

    def close(self) -> None:
        """Brings the weights back, waits for them, and frees the host memory; a second call does
        nothing. DeviceMemoryError and others: it stays open, call again."""
        if not self._end.alive or self._process != os.getpid():
            return
        self._cycle.close()
        self._hooks.remove()
        self._end.detach()
        for module in self._source.roots():
            if _OF_MODULE.get(module) is self:
                del _OF_MODULE[module]
        if _BY_TAG.get(self.tag) is self:
            del _BY_TAG[self.tag]

    def __repr__(self) -> str:
        if not self._end.alive or self._process != os.getpid():
            return f"<refit.Parked: {self.tag!r}, closed>"
        return f"<refit.Parked: {self.tag!r}, {self.state}, {self.nbytes} bytes>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("parked weights cannot be pickled or copied: call refit.park there")

    def _before(self, layer: int) -> None:
        """A layer is about to be called."""
        cycle = self._cycle
        if cycle.phase != TRAINING and self._end.alive:
            for group in self._source.groups.get(layer, ()):
                cycle.join_group(group)


def park(
    what: "Parkable | Parked",
    tag: str | None = None,
    config: ConfigLike = None,
    **overrides: Any,
) -> Parked:
    """Moves the weights of a module, or tensors, off the device, until they are used again.

    For models that are called now and then: a reference model, a reward model, a critic. Their
    parameters and buffers go to page-locked host memory, and their device memory is given back;
    tensors, views and modules stay the objects they are. What has not changed since it left leaves
    without a copy. Calling the module brings it back, layer by layer; ``refit.resident`` does that
    for a block and lets it leave again.

    ``tag`` names it, for ``refit.resident("reference")``; by default it is the class of the module.
    ``config`` and ``overrides``: as for ``load_config``. A second call lets the same module leave
    again. Blocks until all have left. InvalidError (not modules or tensors, a module of which some
    is parked already), ExistsError (the tag), ConfigError, and what ``Parked.offload`` raises.
    """
    known = _known(what)
    if known is None:
        known = parkable(cast(Parkable, what), tag, make_config(config, overrides))
    elif config is not None or overrides or tag not in (None, known.tag):
        raise InvalidError(
            f'"{known.tag}" is parked with its own tag and configuration: close it to give others'
        )
    known.offload()
    return known


def parkable(
    what: Parkable, tag: str | None, config: Config, devices: Devices | None = None
) -> Parked:
    """As ``park``, of what is not parked, and nothing leaves yet."""
    modules, tensors = _split(what)
    made = Parked(modules, tensors, _tag_of(modules, tag), config, devices)
    _BY_TAG[made.tag] = made
    for module in modules:
        _OF_MODULE[module] = made
    return made


@contextmanager
def resident(what: "nn.Module | Parked | str") -> Iterator[Parked]:
    """A block in which parked weights are there; after it they are where they were before it.

    ``what``: the module, what ``refit.park`` gave, or a tag. The copies back begin at once, and
    each layer waits for its own. NotFoundError (nothing is parked under it), and what
    ``Parked.restore`` and ``Parked.offload`` raise.
    """
    found = _BY_TAG.get(what) if isinstance(what, str) else _known(what)
    if found is None:
        named = f'"{what}"' if isinstance(what, str) else f"this {type(what).__name__}"
        raise NotFoundError(f"{named} is not parked: call refit.park first")
    away = found.state == PARKED
    found.restore()
    try:
        yield found
    finally:
        if away:
            found.offload()


# ---- What is given ------------------------------------------------------------------------------


def _known(what: Any) -> Parked | None:
    if isinstance(what, Parked):
        what._open()
        return what
    several = list(what) if isinstance(what, list | tuple) else [what]
    modules = [one for one in several if isinstance(one, nn.Module)]
    found = [_OF_MODULE.get(one) for one in modules]
    alike = len(found) == len(several) and all(one is found[0] for one in found)
    return found[0] if found and alike else None


def _split(what: Parkable) -> tuple[list[nn.Module], dict[str, torch.Tensor]]:
    given: list[Any] = [what]
    if isinstance(what, list | tuple | Mapping):
        given = list(what.values() if isinstance(what, Mapping) else what)
    modules = [one for one in given if isinstance(one, nn.Module)]
    if not given or (modules and len(modules) < len(given)):
        raise InvalidError("give park a module, several modules, or tensors")
    for module in modules:
        _refuse_shared(module)
    if modules:
        return modules, {}
    named = (
        what if isinstance(what, Mapping) else {f"tensor{i}": one for i, one in enumerate(given)}
    )
    for name, tensor in named.items():
        if not isinstance(tensor, torch.Tensor):
            raise InvalidError(f'"{name}" is a {type(tensor).__name__}: give modules or tensors')
    return [], dict(named)


def _refuse_shared(module: nn.Module) -> None:
    for inner in module.modules():
        other = _OF_MODULE.get(inner)
        if other is not None:
            raise InvalidError(
                f'a {type(inner).__name__} in this module is parked already, as "{other.tag}": '
                "close that first"
            )


def _tag_of(modules: Sequence[nn.Module], tag: str | None) -> str:
    if tag is not None:
        if tag in _BY_TAG:
            raise ExistsError(f'"{tag}" is parked already: give this one another tag')
        return tag
    plain = type(modules[0]).__name__ if modules else "tensors"
    number, found = 1, plain
    while found in _BY_TAG:
        number += 1
        found = f"{plain}#{number}"
    return found


# ---- Hooks --------------------------------------------------------------------------------------


class _Hooks:
    """Hooks before the calls of layers; they hold no handle alive."""

    def __init__(self, owner: Parked, source: WeightSource) -> None:
        self._owner = weakref.ref(owner)
        self._source = source
        self._handles: dict[int, Any] = {}

    def follow(self) -> None:
        """Puts hooks on modules that have none, and takes those of modules that are gone."""
        wanted = dict(self._wanted())
        for key in self._handles.keys() - wanted.keys():
            self._handles.pop(key).remove()
        for key, (module, call) in wanted.items():
            if key not in self._handles:
                self._handles[key] = module.register_forward_pre_hook(call, prepend=True)

    def _wanted(self) -> Iterator[tuple[int, tuple[nn.Module, Callable[..., None]]]]:
        source = self._source
        if source.is_layered:
            for layer in source.layers():
                yield id(layer), (layer, _Before(self._owner, id(layer)))
            return
        for root in source.roots():
            for module in root.modules():
                if module is root or isinstance(module, FSDPModule) or is_compiled(module):
                    yield id(module), (module, _Before(self._owner, None))

    def remove(self) -> None:
        """Takes the hooks away."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()


class _Before:
    """A hook, which compiled graphs leave out: it asks what is where, every time."""

    def __init__(self, owner: "weakref.ref[Parked]", layer: int | None) -> None:
        self._owner = owner
        self._layer = layer
        self._call = cast(Any, torch.compiler).disable(self._wait)

    def __call__(self, *_arguments: Any) -> None:
        self._call()

    def _wait(self) -> None:
        owner = self._owner()
        if owner is None:
            return
        if self._layer is None:
            owner.bring_back()
        else:
            owner._before(self._layer)


def _end(cycle: StateCycle, hooks: _Hooks, process: int) -> None:
    """No reference is left: the weights are brought back, not lost."""
    if process == os.getpid():
        with log.quiet():
            hooks.remove()
            cycle.abandon()
