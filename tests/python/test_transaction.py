"""Transactions: only the clean end of a block commits a version."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from broadcasting import Pair, Trainer
from refit.controller import Controller
from refit.errors import InvalidError, PeerError, StaleError, StateError
from refit.weights import layers
from refit.weights.manifest import RawTensor
from refit.weights.named_weights import named_weights
from refit.weights.publisher import Publisher
from refit.weights.transaction import Transaction
from torch import nn


def weights(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3,), value), "b": torch.full((2, 2), value)}


def bytes_of(named: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {
        name: bytes(tensor.detach().contiguous().view(torch.uint8).numpy())
        for name, tensor in named.items()
    }


def play(tx: Transaction, *steps: Callable[[], object]) -> None:
    """A block with these steps."""
    with tx:
        for step in steps:
            step()


def fail() -> None:
    raise KeyError("in the block")


def test_a_clean_end_commits_and_the_worker_holds_what_was_sent(pair: Pair) -> None:
    given = weights()
    with Transaction(pair.publisher) as tx:
        tx.send(given)
        given["a"].zero_()  # they may change when send has returned: trap 21
        assert tx.version is None
        assert not tx.committed
    assert (tx.version, tx.committed, pair.publisher.version) == (1, True, 1)
    assert pair.worker.seen == [bytes_of(weights())]
    with pytest.raises(StateError, match="over"):
        tx.send(weights())


def test_a_model_arrives_with_its_tied_names_and_its_buffers(pair: Pair) -> None:  # traps 1, 32
    model = nn.ModuleDict({"embed": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    model["head"].weight = model["embed"].weight
    model.register_buffer("steps", torch.arange(5))
    with Transaction(pair.publisher) as tx:
        tx.send(named_weights(model))
    assert pair.worker.seen == [bytes_of(model.state_dict())]
    tied = {one.name: one.alias_of for one in pair.publisher.declared}
    assert tied == {"embed.weight": None, "head.weight": "embed.weight", "steps": None}


def after_a_send(tx: Transaction) -> None:
    tx.send(weights(2.0))
    fail()


def within_a_send(tx: Transaction) -> None:
    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(3)
        fail()

    tx.send(failing())


def before_a_send(tx: Transaction) -> None:
    fail()


def right_after_begin(tx: Transaction) -> None:
    real = Publisher.begin

    def begin(publisher: Publisher, version: int | None = None) -> None:
        real(publisher, version)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Publisher, "begin", begin)
        tx.send(weights(2.0))


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("step", [after_a_send, within_a_send, before_a_send, right_after_begin])
def test_exception_aborts_and_worker_keeps_previous_version(
    pair: Pair, step: Callable[[Transaction], None], declared: bool
) -> None:  # trap 12
    publisher, worker = pair
    if declared:
        with Transaction(publisher) as tx:
            tx.send(weights())
    broken = Transaction(publisher)
    with pytest.raises((KeyError, KeyboardInterrupt)):
        play(broken, lambda: step(broken))
    assert (broken.committed, publisher.version) == (False, int(declared))
    with Transaction(publisher) as tx:
        tx.send(weights(3.0))
    assert tx.committed
    assert worker.seen == [bytes_of(weights())] * declared + [bytes_of(weights(3.0))]


def test_weights_may_be_sent_in_parts_once_they_are_declared(pair: Pair) -> None:
    pair.publisher.declare(weights())
    with Transaction(pair.publisher) as tx:
        for item in weights().items():
            tx.send([item])
    assert pair.worker.seen == [bytes_of(weights())]


def test_parts_are_declared_together_and_again_with_new_ones(pair: Pair) -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    parts = [
        named_weights(one, names=lambda name: f"one.{name}"),
        named_weights(other, names=lambda name: f"other.{name}"),
    ]
    for given in (parts[:1], parts):
        with Transaction(pair.publisher) as tx:
            tx.send(*given)
    assert [list(seen) for seen in pair.worker.seen] == [
        ["one.weight", "one.bias"],
        ["one.weight", "one.bias", "other.weight"],
    ]


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
def test_other_weights_than_declared_abort_the_version(
    pair: Pair, declared: bool, parts: list[Any], sentence: str
) -> None:  # trap 33
    publisher, worker = pair
    if declared:
        publisher.declare(weights())
    tx = Transaction(publisher)
    given = [one if isinstance(one, dict) else iter(one) for one in parts]
    with pytest.raises(InvalidError, match=sentence):
        play(tx, *[partial(tx.send, one) for one in given])
    assert (tx.committed, publisher.version) == (False, 0)
    publisher.publish(weights())
    assert worker.seen == [bytes_of(weights())]


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize(
    "kind",
    [
        lambda raw: torch.frombuffer(raw, dtype=torch.uint8),
        partial(numpy.frombuffer, dtype=numpy.uint8),
        partial(RawTensor, dtype="U8", shape=(4,)),
        memoryview,
    ],
    ids=["tensor", "array", "RawTensor", "memoryview"],
)
def test_an_iterator_may_reuse_the_memory_of_what_it_gave(
    pair: Pair, kind: Any, declared: bool
) -> None:  # trap 31
    def given() -> Iterator[tuple[str, Any]]:
        bucket = bytearray(4)
        for index, name in enumerate("abc"):
            bucket[:] = bytes([index] * 4)
            yield name, kind(bucket)

    whole = {name: bytes([index] * 4) for index, name in enumerate("abc")}
    if declared:
        pair.publisher.declare(whole)
    with Transaction(pair.publisher) as tx:
        tx.send(given())
    assert [one.alias_of for one in pair.publisher.declared] == [None] * 3
    assert pair.worker.seen == [whole]


def test_committed_version_is_not_published_again(pair: Pair) -> None:  # trap 35
    publisher, worker = pair
    for _ in range(2):
        with Transaction(publisher, 7) as tx:
            tx.send(weights())
        assert (tx.version, tx.committed) == (7, True)
    with Transaction(publisher, 7) as again:  # the workers have it: it may send nothing
        pass
    assert again.committed
    assert len(worker.seen) == 1
    with pytest.raises(StaleError), Transaction(publisher, 6) as tx:
        tx.send(weights())
    assert publisher.version == 7


def test_abort_drops_the_version_and_sends_no_more(pair: Pair) -> None:
    publisher, worker = pair
    with Transaction(publisher) as tx:
        tx.send(weights())
        tx.abort()
        tx.abort()
        with pytest.raises(StateError, match="over"):
            tx.send(weights())
    assert (tx.committed, publisher.version) == (False, 0)
    with Transaction(publisher) as tx:  # one that sends nothing
        tx.abort()
    assert (tx.committed, publisher.version) == (False, 0)
    assert worker.seen == []


def test_without_a_publisher_bad_weights_are_still_refused() -> None:
    with Transaction(None, 5) as tx:
        tx.send(weights())
    assert (tx.version, tx.committed) == (5, False)
    with pytest.raises(InvalidError), Transaction(None) as tx:
        tx.send(["no pair"])  # type: ignore[list-item]
    with Transaction(None):
        pass


def test_a_block_that_sends_nothing_is_refused(pair: Pair) -> None:
    publisher, worker = pair
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


def test_a_send_whose_failure_was_caught_has_sent_nothing(publisher: Publisher) -> None:
    with (
        pytest.raises(StateError, match="nothing was sent"),
        Transaction(publisher) as tx,
        suppress(InvalidError),
    ):
        tx.send(["no pair"])  # type: ignore[list-item]
    publisher.publish(weights())


def test_a_worker_that_fails_after_the_commit_is_reported(pair: Pair) -> None:
    def refuse(update: Any) -> Any:
        raise ValueError("this engine cannot load it")

    pair.worker.apply = refuse
    with pytest.raises(PeerError, match="cannot load it"), Transaction(pair.publisher) as tx:
        tx.send(weights())
    assert (tx.committed, tx.version, pair.publisher.version) == (True, 1, 1)


def test_worker_lost_before_commit_leaves_previous_version(
    trainer: Trainer,
) -> None:  # trap 12
    tx = Transaction(trainer.publisher)
    with pytest.raises(PeerError):
        play(tx, lambda: tx.send(weights()), trainer.subscriber.close)
    assert (tx.committed, trainer.publisher.version) == (False, 0)
    with Transaction(trainer.publisher) as after:
        after.send(weights())
    assert after.committed


def test_phases_are_entered_around_what_they_name(publisher: Publisher) -> None:
    seen: list[str] = []

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        seen.append(f"{name} begins")
        yield
        seen.append(f"{name} ends")

    with Transaction(publisher, phases=phase) as tx:
        tx.send(weights())
    assert seen == ["publish begins", "publish ends", "commit begins", "commit ends"]


def test_a_publish_looks_at_the_model_once(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[nn.Module] = []

    def walk(model: nn.Module, *, merge: bool = False) -> list[layers.Found]:
        looks.append(model)
        return layers.walk_weights(model, merge=merge)

    monkeypatch.setattr("refit.weights.named_weights.walk_weights", walk)
    model = nn.Linear(3, 2)
    for cycle in range(1, 4):
        with Transaction(publisher) as tx:
            tx.send(named_weights(model, dtype=torch.bfloat16))
        assert len(looks) == 2 * cycle - 1
        publisher.publish(named_weights(model, dtype=torch.bfloat16))
        assert len(looks) == 2 * cycle


# ---- Under a controller


class Training:
    """A model that has been trained for a step."""

    def __init__(self) -> None:
        self.model = nn.Linear(4, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.model(torch.ones(4)).sum().backward()
        self.optimizer.step()

    def moments(self) -> list[torch.Tensor]:
        return [state["exp_avg"] for state in self.optimizer.state.values()]


def test_a_controller_commits_and_tells_what_its_workers_did(pair: Pair) -> None:
    run = Training()
    with Controller(run.optimizer, run.model) as controller:
        with controller.refit(publisher=pair.publisher) as tx:
            tx.send(named_weights(run.model))
        assert controller.state == "refitted"
        figures = controller.stats()
    assert all(type(one) is float for one in figures.values())
    assert figures["refit/version"] == figures["refit/workers_committed"] == 1.0
    assert figures["refit/publish_bytes"] == 40.0
    assert figures["refit/offload_bytes"] == 120.0  # two moments and the gradients
    assert pair.worker.seen == [bytes_of(run.model.state_dict())]


@pytest.mark.parametrize(
    ("sends", "error"), [(False, StateError), (False, KeyError), (True, KeyError)]
)
def test_a_refit_that_publishes_nothing_leaves_the_states_safe(  # trap 12
    publisher: Publisher, sends: bool, error: type[Exception]
) -> None:
    run = Training()
    before = [one.clone() for one in run.moments()]
    with Controller(run.optimizer, run.model) as controller:

        def refit() -> None:
            with controller.refit(publisher=publisher) as tx:
                assert controller.state == "cleared"
                if sends:
                    tx.send(named_weights(run.model))
                if error is KeyError:
                    fail()

        with pytest.raises(error):
            refit()
        assert (controller.state, publisher.version) == ("cleared", 0)
        with controller.refit():
            pass
        controller.prepare_for_training()
        assert all(map(torch.equal, before, run.moments()))
