"""Transactions: only the clean end of a block commits a version."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest
import torch
from broadcasting import LOCAL, both, contents, pair
from refit import module_walk
from refit.controller import Controller
from refit.errors import InvalidError, PeerError, StaleError, StateError
from refit.manifest import Typed
from refit.publisher import Publisher
from refit.transaction import Transaction
from refit.weights import named_weights
from torch import nn


def weights(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3,), value), "b": torch.full((2, 2), value)}


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().view(torch.uint8).numpy())


def bytes_of(named: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: raw(tensor) for name, tensor in named.items()}


def play(tx: Transaction, *steps: Callable[[], object]) -> None:
    """A block with these steps."""
    with tx:
        for step in steps:
            step()


def fail() -> None:
    raise KeyError("in the block")


def test_a_clean_end_commits_and_the_worker_holds_what_was_sent() -> None:
    with pair() as (publisher, worker):
        with Transaction(publisher) as tx:
            tx.send(weights())
            assert tx.version is None
            assert not tx.committed
        assert (tx.version, tx.committed, publisher.version) == (1, True, 1)
    assert worker.seen == [bytes_of(weights())]


def test_a_model_arrives_with_its_tied_names_and_its_buffers() -> None:  # traps 1, 32
    model = nn.ModuleDict({"embed": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    model["head"].weight = model["embed"].weight
    model.register_buffer("steps", torch.arange(5))
    with pair() as (publisher, worker), Transaction(publisher) as tx:
        tx.send(named_weights(model))
    assert worker.seen == [bytes_of(model.state_dict())]
    tied = {one.name: one.alias_of for one in publisher.declared}
    assert tied == {"embed.weight": None, "head.weight": "embed.weight", "steps": None}


def behind_a_send(tx: Transaction) -> None:
    tx.send(weights(2.0))
    fail()


def within_a_send(tx: Transaction) -> None:
    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(3)
        fail()

    tx.send(failing())


def before_a_send(tx: Transaction) -> None:
    fail()


def right_behind_begin(tx: Transaction) -> None:
    real = Publisher.begin

    def begin(publisher: Publisher, version: int | None = None) -> None:
        real(publisher, version)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Publisher, "begin", begin)
        tx.send(weights(2.0))


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize(
    ("step", "raised"),
    [
        (behind_a_send, KeyError),
        (within_a_send, KeyError),
        (before_a_send, KeyError),
        (right_behind_begin, KeyboardInterrupt),
    ],
)
def test_an_exception_aborts_and_the_worker_keeps_the_version_before(  # trap 12
    step: Callable[[Transaction], None], raised: type[BaseException], declared: bool
) -> None:
    with pair() as (publisher, worker):
        if declared:
            with Transaction(publisher) as tx:
                tx.send(weights())
        broken = Transaction(publisher)
        with pytest.raises(raised):
            play(broken, lambda: step(broken))
        assert (broken.committed, publisher.version) == (False, int(declared))
        with Transaction(publisher) as tx:
            tx.send(weights(3.0))
        assert tx.committed
    assert worker.seen == [bytes_of(weights())] * declared + [bytes_of(weights(3.0))]


def test_weights_may_be_sent_in_parts_once_they_are_declared() -> None:
    with pair() as (publisher, worker):
        publisher.declare(weights())
        with Transaction(publisher) as tx:
            for pair_of_them in weights().items():
                tx.send([pair_of_them])
    assert worker.seen == [bytes_of(weights())]


def test_several_parts_in_one_call_are_declared_together() -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with pair() as (publisher, worker), Transaction(publisher) as tx:
        tx.send(
            named_weights(one, names=lambda name: f"one.{name}"),
            named_weights(other, names=lambda name: f"other.{name}"),
        )
    assert set(worker.seen[0]) == {"one.weight", "one.bias", "other.weight", "other.bias"}


A, B, OTHER_A = ({name: tensor} for name, tensor in (*weights().items(), ("a", torch.ones(3))))


@pytest.mark.parametrize(
    ("declared", "parts", "sentence"),
    [
        pytest.param(False, [A, B], r'"b" came after.*publisher\.declare', id="not declared"),
        pytest.param(True, [[*A.items(), *OTHER_A.items()]], '"a" is sent twice', id="in a send"),
        pytest.param(True, [[*A.items()], [*A.items()]], '"a" is sent twice', id="in two sends"),
        pytest.param(True, [A], 'lacks "b"', id="not all"),
    ],
)
def test_other_weights_than_declared_are_named_and_the_version_aborted(  # trap 33
    declared: bool, parts: list[Any], sentence: str
) -> None:
    with pair() as (publisher, worker):
        if declared:
            publisher.declare(weights())
        tx = Transaction(publisher)
        given = [one if isinstance(one, dict) else iter(one) for one in parts]
        with pytest.raises(InvalidError, match=sentence):
            play(tx, *[partial(tx.send, one) for one in given])
        assert (tx.committed, publisher.version) == (False, 0)
        publisher.publish(weights())
    assert worker.seen == [bytes_of(weights())]


def test_new_weights_are_declared_by_the_next_transaction() -> None:
    with pair() as (publisher, worker):
        for given in (weights(), {**weights(), "c": torch.ones(1)}):
            with Transaction(publisher) as tx:
                tx.send(given)
    assert [set(one) for one in worker.seen] == [{"a", "b"}, {"a", "b", "c"}]


def reusing_one_buffer() -> Iterator[tuple[str, torch.Tensor]]:
    bucket = torch.empty(4)
    for index, name in enumerate("abc"):
        yield name, bucket.fill_(index)


@pytest.mark.parametrize("declared", [False, True])
def test_an_iterator_may_reuse_the_memory_of_what_it_gave(declared: bool) -> None:  # trap 31
    whole = {name: torch.full((4,), float(index)) for index, name in enumerate("abc")}
    with pair() as (publisher, worker):
        if declared:
            publisher.declare(whole)
        with Transaction(publisher) as tx:
            tx.send(reusing_one_buffer())
    assert worker.seen == [bytes_of(whole)]


@pytest.mark.parametrize(
    "kind", [lambda raw: Typed(raw, "U8", (4,)), memoryview], ids=["Typed", "memoryview"]
)
def test_an_iterator_may_reuse_bytes_that_cannot_copy_themselves(kind: Any) -> None:  # trap 31
    def given() -> Iterator[tuple[str, Any]]:
        bucket = bytearray(4)
        for index, name in enumerate("abc"):
            bucket[:] = bytes([index] * 4)
            yield name, kind(bucket)

    with pair() as (publisher, worker):
        with Transaction(publisher) as tx:
            tx.send(given())
        assert [one.alias_of for one in publisher.declared] == [None] * 3
    assert worker.seen == [{name: bytes([i] * 4) for i, name in enumerate("abc")}]


def test_weights_may_change_when_send_has_returned() -> None:  # trap 21
    given = weights()
    with pair() as (publisher, worker), Transaction(publisher) as tx:
        tx.send(given)
        given["a"].zero_()
    assert worker.seen == [bytes_of(weights())]


def test_a_version_that_is_committed_already_is_not_published_again() -> None:  # trap 35
    with pair() as (publisher, worker):
        for _ in range(2):
            with Transaction(publisher, 7) as tx:
                tx.send(weights())
            assert (tx.version, tx.committed) == (7, True)
    assert len(worker.seen) == 1


def test_an_older_version_is_refused() -> None:  # trap 35
    with Publisher(LOCAL) as publisher:
        publisher.publish(weights(), 7)
        tx = Transaction(publisher, 6)
        with pytest.raises(StaleError), tx:
            tx.send(weights())
        assert publisher.version == 7


def test_a_cycle_is_repeated_with_the_next_number_after_a_failure() -> None:  # trap 35
    with pair() as (publisher, worker):
        for tries in range(2):
            tx = Transaction(publisher)
            try:
                with tx:
                    tx.send(weights())
                    if tries == 0:
                        raise ConnectionError("the first try")
            except ConnectionError:
                continue
        assert tx.committed
    assert len(worker.seen) == 1


def test_abort_drops_the_version_and_sends_no_more() -> None:
    with pair() as (publisher, worker):
        with Transaction(publisher) as tx:
            tx.send(weights())
            tx.abort()
            tx.abort()
            with pytest.raises(StateError, match="over"):
                tx.send(weights())
        assert (tx.committed, publisher.version) == (False, 0)
    assert worker.seen == []


def test_a_transaction_is_used_once() -> None:
    with Publisher(LOCAL) as publisher:
        with Transaction(publisher) as tx:
            tx.send(weights())
        with pytest.raises(StateError, match="over"):
            tx.send(weights())


def test_without_a_publisher_nothing_is_published_but_bad_weights_are_still_refused() -> None:
    with Transaction(None, 5) as tx:
        tx.send(weights())
    assert (tx.version, tx.committed) == (5, False)
    with pytest.raises(InvalidError), Transaction(None) as tx:
        tx.send(["no pair"])  # type: ignore[list-item]


def test_a_block_that_sends_nothing_is_refused_and_the_workers_keep_what_they_have() -> None:
    with pair() as (publisher, worker):
        with pytest.raises(StateError, match=r"tx\.send\(.*no version yet"), Transaction(publisher):
            pass
        assert publisher.version == 0
        with Transaction(publisher, 4) as tx:
            tx.send(weights())
        tx = Transaction(publisher)
        with pytest.raises(StateError, match=r"nothing was sent.*keep version 4"):
            play(tx)
        assert (tx.committed, publisher.version) == (False, 4)
        with pytest.raises(StateError, match="over"):
            tx.send(weights())
    assert worker.seen == [bytes_of(weights())]


def test_a_send_whose_failure_was_caught_in_the_block_has_sent_nothing() -> None:
    with Publisher(LOCAL) as publisher:
        with (
            pytest.raises(StateError, match="nothing was sent"),
            Transaction(publisher) as tx,
            suppress(InvalidError),
        ):
            tx.send(["no pair"])  # type: ignore[list-item]
        publisher.publish(weights())


def test_a_block_may_send_nothing_where_that_is_no_mistake() -> None:
    with Transaction(None):
        pass
    with Publisher(LOCAL) as publisher:
        with Transaction(publisher) as aborted:
            aborted.abort()
        with Transaction(publisher, 3) as tx:
            tx.send(weights())
        with Transaction(publisher, 3) as again:  # the workers have it
            pass
        assert (aborted.committed, again.committed, publisher.version) == (False, True, 3)


def test_a_refit_that_sends_nothing_is_refused_and_the_states_are_safe() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    before = [state["exp_avg"].clone() for state in optimizer.state.values()]
    with Publisher(LOCAL) as publisher, Controller(optimizer, model) as controller:
        with (
            pytest.raises(StateError, match="nothing was sent"),
            controller.refit(publisher=publisher),
        ):
            assert controller.state == "cleared"
        assert (controller.state, publisher.version) == ("cleared", 0)
        with pytest.raises(KeyError), controller.refit(publisher=publisher):
            fail()
        with controller.refit():
            pass
        controller.prepare_for_training()
        after = [state["exp_avg"] for state in optimizer.state.values()]
        assert all(map(torch.equal, before, after))


def refuse(update: Any) -> Any:
    contents(update)
    raise ValueError("this engine cannot load it")


def test_a_worker_that_fails_after_the_commit_is_reported_and_the_version_holds() -> None:
    with pair(refuse) as (publisher, _):
        tx = Transaction(publisher)
        with pytest.raises(PeerError, match="cannot load it"), tx:
            tx.send(weights())
        assert (tx.committed, tx.version, publisher.version) == (True, 1, 1)


def test_a_worker_lost_before_the_commit_leaves_the_version_before() -> None:  # trap 12
    with both() as (publisher, subscriber):
        tx = Transaction(publisher)
        with pytest.raises(PeerError):
            play(tx, lambda: tx.send(weights()), subscriber.close)
        assert (tx.committed, publisher.version) == (False, 0)
        with Transaction(publisher) as after:
            after.send(weights())
        assert after.committed


def test_phases_are_entered_around_what_they_name() -> None:
    seen: list[str] = []

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        seen.append(f"{name} begins")
        yield
        seen.append(f"{name} ends")

    with Publisher(LOCAL) as publisher, Transaction(publisher, phases=phase) as tx:
        tx.send(weights())
    assert seen == ["publish begins", "publish ends", "commit begins", "commit ends"]


def test_a_controller_commits_and_tells_what_its_workers_did() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    with pair() as (publisher, worker), Controller(optimizer, model) as controller:
        with controller.refit(publisher=publisher) as tx:
            tx.send(named_weights(model))
        assert controller.state == "refitted"
        figures = controller.stats()
        assert all(type(one) is float for one in figures.values())
        assert figures["refit/version"] == figures["refit/workers_committed"] == 1.0
        assert figures["refit/publish_bytes"] == 40.0
        assert figures["refit/offload_bytes"] == 120.0  # two moments and the gradients
    assert worker.seen == [bytes_of(model.state_dict())]


def send_and_fail(controller: Controller, publisher: Publisher, model: nn.Module) -> None:
    with controller.refit(publisher=publisher) as tx:
        tx.send(named_weights(model))
        fail()


def test_an_exception_under_a_controller_aborts_and_the_states_come_back() -> None:  # trap 12
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    before = [state["exp_avg"].clone() for state in optimizer.state.values()]
    with Publisher(LOCAL) as publisher, Controller(optimizer, model) as controller:
        with pytest.raises(KeyError):
            send_and_fail(controller, publisher, model)
        assert (controller.state, publisher.version) == ("cleared", 0)
        controller.restore()
        optimizer.state_dict()
        after = [state["exp_avg"] for state in optimizer.state.values()]
        assert all(map(torch.equal, before, after))


def test_a_publish_looks_at_the_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[nn.Module] = []

    def walk(model: nn.Module, *, merge: bool = False) -> list[module_walk.Found]:
        looks.append(model)
        return module_walk.walk_weights(model, merge=merge)

    monkeypatch.setattr("refit.weights.walk_weights", walk)
    model = nn.Linear(3, 2)
    with Publisher(LOCAL) as publisher:
        for cycle in range(1, 4):
            with Transaction(publisher) as tx:
                tx.send(named_weights(model, dtype=torch.bfloat16))
            assert len(looks) == 2 * cycle - 1
            publisher.publish(named_weights(model, dtype=torch.bfloat16))
            assert len(looks) == 2 * cycle
