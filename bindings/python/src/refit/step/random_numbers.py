"""Generators of random numbers: the ones of the process, and objects that are generators."""

import copy
import pickle
import random
import sys
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch


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
