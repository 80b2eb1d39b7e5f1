"""Copies of what an optimizer holds, and whether two values are equal to the bit.

An optimizer may hold anything: tensors, generators, a schedule that counts its calls. ``copied``
copies data of any class, with all that it refers to, as ``pickle`` does. What is not data is the
same object in a copy: functions (with what they close over), classes, modules of Python and of
PyTorch, optimizers, what has a ``__del__``, and what Python cannot copy, such as a lock or a
process group.

``copy.deepcopy`` would copy a model that an object refers to, and fails where one object of many
cannot be copied.
"""

import copy
import copyreg
import io
import pickle
import random
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from refit.states.storages import opened

# ---- Generators of random numbers: the ones of the process, and objects that are generators ------


def is_generator(value: Any) -> bool:
    """Whether an object is a generator of PyTorch, NumPy or Python, whose state can be had."""
    numpy = sys.modules.get("numpy")
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    if numpy is not None:
        theirs = numpy.random
        kinds += (theirs.Generator, theirs.RandomState, theirs.BitGenerator)
    return isinstance(value, kinds) and not isinstance(value, random.SystemRandom)


def copy_of(generator: Any) -> Any:
    """A generator that gives the numbers that this one would give."""
    if not isinstance(generator, torch.Generator):
        return copy.deepcopy(generator)
    made = torch.Generator(device=generator.device)
    made.set_state(generator.get_state())
    return made


def state_of(generator: Any) -> bytes:
    """Equal for generators of a class that give the same numbers from here on."""
    if isinstance(generator, torch.Generator):
        return _bytes(generator.get_state())
    if isinstance(generator, random.Random):
        return _bytes(generator.getstate())
    if hasattr(generator, "get_state"):
        return _bytes(generator.get_state(legacy=False))
    return _bytes(getattr(generator, "bit_generator", generator).state)


def _bytes(state: Any) -> bytes:
    return pickle.dumps(state.tolist() if isinstance(state, torch.Tensor) else state)


class Draws:
    """A block after which the generators of the process are as they were before it: PyTorch's for
    the CPU and for ``devices``, NumPy's and Python's."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        own = [torch.default_generator]
        own += [torch.cuda.default_generators[one.index] for one in devices if one.type == "cuda"]
        self._generators: list[tuple[Any, Any]] = [(one.get_state, one.set_state) for one in own]
        self._generators.append((random.getstate, random.setstate))
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            get = partial(numpy.random.get_state, legacy=False)
            self._generators.append((get, numpy.random.set_state))

    @property
    def any(self) -> bool:
        """Whether the block has drawn random numbers until now."""
        pairs = zip(self._generators, self._before, strict=True)
        return any(_bytes(get()) != _bytes(before) for (get, _), before in pairs)

    def __enter__(self) -> "Draws":
        self._before = [get() for get, _ in self._generators]
        return self

    def __exit__(self, *_: object) -> None:
        for (_, give), before in zip(self._generators, self._before, strict=True):
            give(before)


Copies = dict[int, tuple[Any, Any]]
"""Objects and what stands for them in a copy, by the identity of the object."""

_Pairs = dict[tuple[int, int], tuple[Any, Any]]
_DATA = frozenset(
    {type(None), bool, int, float, complex, str, bytes}
    | {list, tuple, dict, set, frozenset, OrderedDict, defaultdict}
)
_NOT_DATA = (type, ModuleType, FunctionType, torch.nn.Module, torch.optim.Optimizer)


def copied(value: Any, copies: Copies) -> Any:
    """A copy that may be changed while the value stays as it is.

    ``copies`` says what stands for some of the tensors, generators and objects that are not data;
    it gets what stands for the others.
    """
    taken = _TakenApart()
    taken.dump(value)
    for one in taken.others:
        if id(one) not in copies:
            copies[id(one)] = one, _copy_of(one)
    return _Joined(taken.data, [copies[id(one)][1] for one in taken.others]).load()


def held_in(value: Any) -> list[Any]:
    """The tensors, the generators and what is not data, in all that a value refers to; of what
    ``pickle`` cannot go through to its end, those that it has met."""
    taken = _TakenApart()
    with suppress(Exception):
        taken.dump(value)
    return taken.others


def is_same(one: Any, other: Any, compared: _Pairs | None = None) -> bool:
    """Whether values are equal to the bit, whatever they are, and wherever. Optimizers of one class
    are equal: each is the one that holds the value, or its stand-in.

    ``compared``: pairs of objects that are equal if all else is, as one that refers to itself.
    """
    if one is other:
        return True
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and _same_bits(one, other)
    if isinstance(one, Mapping):
        return isinstance(other, Mapping) and is_same([*one.items()], [*other.items()], compared)
    if isinstance(one, list | tuple):
        if type(one) is not type(other) or len(one) != len(other):
            return False
        return all(is_same(*pair, compared) for pair in zip(one, other, strict=True))
    if type(one) in _DATA:
        return _is_equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.optim.Optimizer):
        return True
    if is_generator(one):
        return state_of(one) == state_of(other)
    if not _is_data(one):
        return _is_equal(one, other)
    known = {} if compared is None else compared
    pair = id(one), id(other)
    if pair not in known:
        known[pair] = one, other
        return is_same(_reduced(one), _reduced(other), known)
    return True


def _is_equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other) or bool(one != one and other != other)
    except Exception:  # whatever a comparison of other code raises
        return False


def _reduced(one: Any) -> list[Any]:
    """An object as ``pickle`` has it: class, arguments, state and items."""
    reduce = copyreg.dispatch_table.get(type(one))
    found: Any = one.__reduce_ex__(4) if reduce is None else reduce(one)
    return [*found[:3], *(part and list(part) for part in found[3:5])]


class _TakenApart(pickle.Pickler):
    """Takes a value apart into ``data``, its bytes, and the ``others`` in it: tensors, generators
    and what is not data."""

    def __init__(self) -> None:
        self.data = io.BytesIO()
        super().__init__(self.data, protocol=4)
        self.others: list[Any] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, one: Any) -> int | None:
        """Called by ``pickle`` with each object: the number of one of ``others``."""
        if _is_data(one):
            return None
        number = self._numbers.setdefault(id(one), len(self.others))
        if number == len(self.others):
            self.others.append(one)
        return number

    def reducer_override(self, one: Any) -> Any:
        """Called by ``pickle`` with each object that it does not know by itself. It would look for
        a method under its name."""
        is_method = isinstance(one, MethodType)
        return (MethodType, (one.__func__, one.__self__)) if is_method else NotImplemented


class _Joined(pickle.Unpickler):
    """Makes a value of ``data`` and what stands for each of ``others``."""

    def __init__(self, data: io.BytesIO, others: list[Any]) -> None:
        data.seek(0)
        super().__init__(data)
        self._others = others

    def persistent_load(self, number: int) -> Any:
        """Called by ``pickle`` with the number of one."""
        return self._others[number]


def _is_data(one: Any) -> bool:
    if type(one) in _DATA:
        return True
    if isinstance(one, torch.Tensor) or is_generator(one):
        return False
    if isinstance(one, _NOT_DATA) or hasattr(type(one), "__del__"):
        return False
    if isinstance(one, MethodType | BuiltinMethodType):  # functions of C have their module
        return not isinstance(one.__self__, type(None) | type | ModuleType)
    try:
        return copy.copy(one) is not one
    except Exception:  # whatever other code raises
        return False


def _copy_of(one: Any) -> Any:
    if isinstance(one, torch.Tensor):
        return one.detach().clone()
    return copy_of(one) if is_generator(one) else one


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    pairs = list(zip(opened(one), opened(other), strict=False))
    if len(list(opened(one))) != len(list(opened(other))):
        return False
    for (_, a), (_, b) in pairs:
        if (a.dtype, a.shape, a.layout) != (b.dtype, b.shape, b.layout):
            return False
        if a.layout is not torch.strided:
            a, b = a.coalesce(), b.coalesce()
            if not _same_bits(a.indices(), b.indices()):
                return False
            a, b = a.values(), b.values()
            if a.shape != b.shape:
                return False
        a, b = (x.detach().contiguous().flatten().view(torch.uint8) for x in (a, b))
        if not torch.equal(a, b.to(a.device)):
            return False
    return True
