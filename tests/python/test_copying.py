"""Copies of whatever an optimizer may hold, and whether two values are equal to the bit."""

import functools
import logging
import random
import threading
import types
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from refit.step.copying import Draws, copied, held_in, is_same
from torch import nn


class Plain:
    """Refers to itself, by a method too, and to what cannot be copied."""

    def __init__(self) -> None:
        self.tensors = [torch.zeros(2)]
        self.lock = threading.Lock()
        self.itself = self
        self.method = self.count
        self.function = lambda: self

    def count(self) -> None:
        self.tensors[0] += 1


@dataclass(slots=True)
class Slotted:
    values: dict[str, Any] = field(default_factory=dict)


class Row(list[Any]):
    pass


class Handle:
    """Frees something at its end: a copy would free it twice."""

    def __del__(self) -> None:
        pass


def made_here() -> Any:
    class Local(random.Random):
        pass

    return Local(3)


NAN = float("nan")

DATA = {
    "object": Plain(),
    "slots": Slotted({"a": Slotted({"b": NAN})}),
    "list": [1, [torch.ones(2)], (NAN, None)],
    "dicts": {"a": OrderedDict(b=defaultdict(list, c=[1]))},
    "keys": {Slotted: 1, (1, "a"): torch.ones(1)},
    "subclass": Row([Plain(), torch.ones(1)]),
    "deque": deque([1, 2], 3),
    "counter": Counter("aab"),
    "set": {1, "a"},
    "array": np.array([1.0, NAN]),
    "partial": functools.partial(Plain().count),
    "method": Plain().count,
    "method of C": random.Random(3).random,
    "iterator": iter([1, 2]),
    "namespace": types.SimpleNamespace(a=Plain()),
    "subclass of a generator": made_here(),
    "generator of NumPy": np.random.default_rng(3),
    "legacy generator": np.random.RandomState(3),
    "bits": np.random.PCG64(3),
    "generator": torch.Generator().manual_seed(3),
    "parameter": nn.Parameter(torch.ones(2)),
}
SAME = {
    "function": made_here,
    "class": Slotted,
    "module": torch,
    "model": nn.Linear(2, 2),
    "optimizer": torch.optim.SGD([torch.ones(1)]),
    "lock": threading.Lock(),
    "handle": Handle(),
    "logger": logging.getLogger("refit"),
    "type": torch.float32,
    "generator of Python": (one for one in ()),
    "the system's numbers": random.SystemRandom(),
    "function of C": torch.add,
}


@pytest.mark.parametrize("value", DATA.values(), ids=DATA)
def test_a_copy_of_data_is_another_object_and_equal(value: Any) -> None:
    made = copied(value, {})
    assert made is not value
    assert is_same(made, value)


@pytest.mark.parametrize("value", SAME.values(), ids=SAME)
def test_what_is_not_data_is_the_same_object(value: Any) -> None:
    assert copied([value, Slotted({"a": value})], {})[1].values["a"] is value
    assert any(one is value for one in held_in(Slotted({"a": value})))


def test_a_copy_is_changed_alone() -> None:
    value = Plain()
    made = copied(value, {})
    made.method()
    made.count()
    assert made.tensors[0].tolist() == [2, 2]
    assert value.tensors[0].tolist() == [0, 0]
    assert made.itself is made
    assert made.lock is value.lock
    assert not is_same(made, value)


def test_what_is_one_object_twice_is_one_in_a_copy() -> None:
    table = torch.ones(2)
    copies: Any = {}
    one, other = copied([table, Slotted({"a": table})], copies)
    assert other.values["a"] is one is copied(table, copies)
    assert copied(table, {id(table): (table, "another")}) == "another"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2),
        (0.0, NAN),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (torch.ones(2), torch.ones(1)),
        ([1], (1,)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (Slotted({"a": 1}), Slotted({"a": 2})),
        (np.array([1.0, 2.0]), np.array([1.0, 3.0])),
        (random.Random(1), random.Random(2)),
        (np.random.default_rng(1), np.random.default_rng(2)),
        (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)),
        (deque([1]), deque([2])),
        (functools.partial(made_here, 1), functools.partial(made_here, 2)),
        (threading.Lock(), threading.Lock()),
        (nn.Linear(1, 1), nn.Linear(1, 1)),
    ],
)
def test_values_that_are_not_the_same(one: Any, other: Any) -> None:
    assert not is_same(one, other)


@pytest.mark.parametrize("draw", [lambda: torch.rand(()), random.random, np.random.rand])
def test_random_numbers_are_drawn_again_after_a_block(draw: Any) -> None:
    with Draws([]) as draws:
        assert not draws.any
        first = draw()
        assert draws.any
    assert draw() == first
