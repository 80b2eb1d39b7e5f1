"""Ties hold in every version: however its tensors come, none takes another's place in silence."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from broadcasting import LOCAL, contents, pair
from refit.controller import Controller
from refit.errors import InvalidError, UnsupportedError
from refit.weights.archive import Archive
from refit.weights.manifest import Alias, RawTensor, TensorSpec
from refit.weights.named_weights import named_weights
from refit.weights.publisher import Publisher
from refit.weights.source import weight_of
from refit.weights.ties import TieCheck
from refit.weights.transaction import Transaction
from refit.weights.update import Update

Pair = tuple[str, torch.Tensor]
Way = Callable[[Publisher, Pair, Pair], None]


def sent(*calls: tuple[Callable[..., Any], ...]) -> Way:
    """A transaction's calls of send(), of which each is given so many of the two, each so."""

    def way(publisher: Publisher, a: Pair, b: Pair) -> None:
        left = iter((a, b))
        with Transaction(publisher) as tx:
            for kinds in calls:
                tx.send(*(kind([next(left)]) for kind in kinds))

    return way


two_mappings = sent((dict,), (dict,))


def write_all(publisher: Publisher, a: Pair, b: Pair) -> None:
    publisher.begin()
    publisher.write_all(dict([a, b]))
    publisher.commit()


def two_writes(publisher: Publisher, a: Pair, b: Pair) -> None:
    publisher.begin()
    publisher.write(*a)
    publisher.write(*b)
    publisher.commit()


def a_controller(publisher: Publisher, a: Pair, b: Pair) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    with Controller(optimizer, model) as controller, controller.refit(publisher=publisher) as tx:
        for chunk in (a, b):
            tx.send(dict([chunk]))


WAYS = {
    "two mappings": two_mappings,
    "two iterators": sent((iter,), (iter,)),
    "two iterators in one call": sent((iter, iter)),
    "a mapping and an iterator": sent((dict, iter)),
    "write_all": write_all,
    "two writes": two_writes,
    "a controller": a_controller,
}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))


def one(value: float, device: str = "cpu") -> torch.Tensor:
    return torch.full((4,), float(value), device=device)


def bytes_of(value: float) -> bytes:
    return one(value).numpy().tobytes()


@contextmanager
def tied_pair(device: str = "cpu") -> Iterator[tuple[Publisher, Any]]:
    """A publisher and a worker, which has a version in which a and b are one tensor."""
    with pair() as (publisher, worker):
        both = one(1, device)
        publisher.publish({"a": both, "b": both})
        yield publisher, worker


@every_way
def test_a_tie_that_a_version_breaks_is_refused_trap_1(way: Way, torch_device: str) -> None:
    with tied_pair(torch_device) as (publisher, worker):
        pairs = [("a", one(2, torch_device)), ("b", one(3, torch_device))]
        with pytest.raises(InvalidError, match=r"declared as tied.*declare the tensors again"):
            way(publisher, *pairs)
        if way in (write_all, two_writes):
            publisher.abort()
        publisher.publish(dict(pairs))  # looks again
    assert worker.seen == [{"a": bytes_of(x), "b": bytes_of(y)} for x, y in ((1, 1), (2, 3))]


@every_way
def test_a_tie_that_a_version_keeps_may_come_in_any_memory(way: Way, torch_device: str) -> None:
    with tied_pair(torch_device) as (publisher, worker):
        for value in (2.0, 3.0):  # what was seen counts for one version
            way(publisher, ("a", one(value, torch_device)), ("b", one(value, torch_device)))
    assert worker.seen == [{"a": bytes_of(x), "b": bytes_of(x)} for x in (1, 2, 3)]


def test_the_tied_one_may_be_sent_before_the_one_that_travels() -> None:
    with tied_pair() as (publisher, worker):
        two_mappings(publisher, ("b", one(2)), ("a", one(2)))
        with pytest.raises(InvalidError, match="declared as tied"):
            two_mappings(publisher, ("b", one(3)), ("a", one(4)))
        assert [spec.alias_of for spec in publisher.declared] == [None, "a"]
    assert worker.seen == [{"a": bytes_of(x), "b": bytes_of(x)} for x in (1, 2)]


@every_way
def test_a_tensor_may_be_tied_to_one_that_comes_after_it(way: Way, tmp_path: Path) -> None:
    """As other publishers may declare it; from the trainer to the worker, its model and a file."""
    model = {"a": one(0), "b": one(0)}

    def take(update: Update) -> Any:
        into = {"a": one(0), "b": one(0)}
        archive.keep(update)
        update.load_into(into)
        if not worker.seen:
            worker.subscriber.bind(model)
        update.apply()
        ties = {view.name: view.alias_of for view in update.views()}
        return ties, update.nbytes, contents(update), [into["a"][0].item(), model["a"][0].item()]

    with Archive(tmp_path / "kept", write=True) as archive, pair(take) as (publisher, worker):
        publisher.declare([TensorSpec("a", "F32", (4,), "b"), TensorSpec("b", "F32", (4,))])
        for value in (1.0, 2.0):
            way(publisher, ("a", one(value)), ("b", one(value)))
        assert not worker.failures
        kept = [archive.read(version) for version in (1, 2)]
    for value, seen, snapshot in zip((1, 2), worker.seen, kept, strict=True):
        bytes_here = {"a": bytes_of(value), "b": bytes_of(value)}
        assert seen == ({"a": "b", "b": None}, 16, bytes_here, [value, value])
        assert {name: bytes(view.bytes) for name, view in snapshot.items()} == bytes_here
        assert [view.alias_of for view in snapshot.values()] == ["b", None]


def test_memory_changed_between_two_calls_is_not_tied_trap_31() -> None:
    memory = one(1)
    with Publisher(LOCAL) as publisher:
        publisher.publish({"a": memory, "b": memory})
        publisher.begin()
        publisher.write("a", memory)
        memory.fill_(7)
        with pytest.raises(InvalidError, match="declared as tied"):
            publisher.write("b", memory)


def test_what_an_aborted_version_was_given_is_forgotten() -> None:
    with tied_pair() as (publisher, worker):
        publisher.begin()
        publisher.write("a", one(2))
        publisher.abort()
        publisher.begin()
        publisher.write("b", one(3))
        publisher.write("a", one(3))
        publisher.commit()
    assert worker.seen[-1] == {"a": bytes_of(3), "b": bytes_of(3)}


def test_another_shape_than_that_of_the_tie_is_refused_trap_33() -> None:
    both = one(1)
    with Publisher(LOCAL) as publisher:
        publisher.publish({"a": both, "b": both})
        with pytest.raises(InvalidError, match=r"b is F32 \[2, 2\], but was declared as F32 \[4\]"):
            publisher.publish(iter([("a", both), ("b", both.view(2, 2))]))


def tied_model() -> torch.nn.Module:
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(4, 3), "head": torch.nn.Linear(3, 4)})
    model["head"].weight = model["embed"].weight
    return model


def test_tied_weights_that_come_together_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("bytes were read")

    monkeypatch.setattr("hashlib.blake2b", refuse)
    model = tied_model()
    with pair() as (publisher, worker):
        for _ in range(2):
            publisher.publish(named_weights(model, dtype=torch.bfloat16))
        with Transaction(publisher) as tx:
            tx.send(named_weights(model, dtype=torch.bfloat16))
    assert [seen["embed.weight"] == seen["head.weight"] for seen in worker.seen] == [True] * 3


def test_an_alias_takes_the_place_of_what_cannot_be_compared() -> None:
    specs = [TensorSpec("a", "F32", (4,)), TensorSpec("b", "F32", (4,), "a")]
    check = TieCheck(specs)
    on_a_gpu = weight_of(one(1))._replace(tensor=object(), device=0)  # as by DLPack
    check.see("a", on_a_gpu, stays=False)
    check.see("b", None, stays=False)
    with pytest.raises(UnsupportedError, match=r"give refit\.Alias in its place"):
        check.see("b", on_a_gpu, stays=False)
    with pair() as (publisher, worker):
        publisher.declare(specs)
        publisher.publish(iter([("a", one(1)), ("b", Alias("a"))]))
    assert worker.seen == [{"a": bytes_of(1), "b": bytes_of(1)}]


def test_equal_tensors_of_an_iterator_are_not_tied_trap_31() -> None:
    def given(*values: int) -> Iterator[tuple[str, Any]]:
        for name, value in zip("ab", values, strict=True):
            yield name, RawTensor(bytes([value]), "U8", (1,))

    with pair() as (publisher, worker):
        publisher.publish(given(1, 1))
        assert [spec.alias_of for spec in publisher.declared] == [None, None]
        publisher.publish(given(1, 2))
    assert worker.seen == [{"a": b"\1", "b": b"\1"}, {"a": b"\1", "b": b"\2"}]
