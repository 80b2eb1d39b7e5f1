"""Workers that switch when it suits them: ``wait="staged"`` and ``wait="none"``."""

import select
import threading
from collections.abc import Iterator

import pytest
import refit
import torch
import training
from broadcasting import LOCAL, TIMEOUT, UNHURRIED, WorkerThread
from refit.errors import InvalidError, PeerError, StateError
from refit.weights.publisher import Publisher, Wait
from refit.weights.subscriber import Subscriber
from refit.weights.transaction import Transaction

ELEMENTS = 100_000

Late = tuple[Publisher, Subscriber]
"""A trainer, and a worker that asks for a version when the test does."""


def weights(version: int) -> dict[str, torch.Tensor]:
    return {name: torch.full((ELEMENTS,), float(version)) for name in ("a", "b")}


def publish(publisher: Publisher, count: int, wait: Wait = "staged") -> None:
    for _ in range(count):
        version = publisher.version + 1
        assert publisher.publish(weights(version), wait=wait) == version


def take(subscriber: Subscriber) -> int:
    """The version that the worker gets, all of whose elements are its number."""
    with subscriber.next(TIMEOUT) as update:
        for _, tensor in update.tensors():
            assert torch.all(tensor == float(update.version))
        return update.version


def take_until(subscriber: Subscriber, version: int) -> int:
    """Takes versions until this one has come: word of it may be on its way. How many they were."""
    taken = [0]
    while taken[-1] != version:
        taken.append(take(subscriber))
        assert taken[-2] < taken[-1] <= version
    return len(taken) - 1


@pytest.fixture(params=["auto", "off"], ids=["shared memory", "sockets"])
def late(request: pytest.FixtureRequest) -> Iterator[Late]:
    with (
        Publisher(LOCAL, broadcast_shm=request.param, **UNHURRIED) as publisher,
        Subscriber(publisher.endpoint, broadcast_shm=request.param, **UNHURRIED) as subscriber,
    ):
        publisher.wait_workers(1, TIMEOUT)
        yield publisher, subscriber


def test_a_worker_that_asks_for_nothing_holds_up_nothing(late: Late) -> None:
    publisher, subscriber = late
    publish(publisher, 200)
    assert publisher.stats()["workers_evicted"] == 0
    assert [worker.version for worker in publisher.workers()] == [0]
    assert take_until(subscriber, 200) <= 2


def test_a_worker_gets_the_newest_version_and_never_an_older_one(late: Late) -> None:
    publisher, subscriber = late
    for newest in (3, 4, 9):
        publish(publisher, newest - publisher.version)
        take_until(subscriber, newest)


def test_an_engine_polls_between_two_requests(late: Late) -> None:
    publisher, subscriber = late
    assert subscriber.poll() is None
    publish(publisher, 3)
    while (update := subscriber.poll()) is None or update.version < 3:
        if update is not None:
            update.close()
    with update:
        assert torch.all(dict(update.tensors())["a"] == 3.0)
    assert subscriber.poll() is None


def test_a_poll_finds_a_version_at_every_moment(late: Late) -> None:
    """Also at the one in which a newer version takes the place of one that was not taken."""
    publisher, subscriber = late
    small = {"w": torch.zeros(8)}
    thread = threading.Thread(
        target=lambda: [publisher.publish(small, wait="staged") for _ in range(300)]
    )
    thread.start()
    version = 0
    while version < 300:
        ready, _, _ = select.select([subscriber], [], [], TIMEOUT)
        update = subscriber.poll()
        assert ready
        assert update is not None
        with update:
            version = update.version
    thread.join()


def test_a_version_in_hand_stays_whole_while_others_come(late: Late) -> None:
    """There are two slots: the third version waits until the first is closed."""
    publisher, subscriber = late
    publish(publisher, 1)
    with subscriber.next(TIMEOUT) as update:
        publish(publisher, 1)
        third = threading.Thread(target=publish, args=(publisher, 1))
        third.start()
        third.join(0.5)
        for _, tensor in update.tensors():
            assert torch.all(tensor == 1.0)
    third.join()
    take_until(subscriber, 3)


def test_a_version_that_was_refused_may_be_offered_again(late: Late) -> None:
    """When the next one is aborted, while the user has it in hand."""
    publisher, subscriber = late
    for version in range(1, 40, 3):
        publisher.publish(weights(version), version, wait="staged")
        update = subscriber.next(TIMEOUT)
        assert update.version == version
        publisher.begin()
        publisher.abort()
        update.refuse("no")
        update.close()
        publisher.publish(weights(version + 2), version + 2, wait="staged")
        take_until(subscriber, version + 2)


@pytest.mark.parametrize("wait", ["staged", "none"])
def test_a_repeated_cycle_publishes_nothing(late: Late, wait: Wait) -> None:
    publisher, _ = late
    for _ in range(2):
        with Transaction(publisher, 1, wait=wait) as tx:
            tx.send(weights(1))
        assert tx.version == 1
    publisher.begin(2, wait="staged")
    tx.abort()  # it is over, and has nothing to drop
    publisher.write_all(weights(2))
    publisher.commit()
    assert publisher.version == 2


def test_nothing_is_waited_for_but_by_the_next_version(late: Late) -> None:
    publisher, subscriber = late
    for version in range(1, 51):
        assert publisher.publish(weights(version), wait="none") == version
    publisher.publish(weights(51), wait="staged")
    assert publisher.version == 51
    assert publisher.stats()["publish_aborts"] == 0
    take_until(subscriber, 51)


def test_the_bound_is_waited_for() -> None:
    options = {"broadcast_wait": "staged", "broadcast_max_behind": 2, **UNHURRIED}
    with Publisher(LOCAL, **options) as publisher, WorkerThread(publisher.endpoint) as worker:
        publisher.wait_workers(1, TIMEOUT)
        for version in range(1, 51):
            assert publisher.publish(weights(version)) == version
            assert all(version - one.version <= 2 for one in publisher.workers())
    assert not worker.failures


def test_a_worker_that_stays_behind_the_bound_is_evicted() -> None:
    with (
        Publisher(
            LOCAL,
            broadcast_wait="staged",
            broadcast_max_behind=1,
            broadcast_commit_timeout_ms=300,
        ) as publisher,
        Subscriber(publisher.endpoint),
    ):
        publisher.wait_workers(1, TIMEOUT)
        publisher.publish(weights(1))
        with pytest.raises(PeerError):
            publisher.publish(weights(2))
        assert publisher.version == 2
        assert publisher.stats()["workers_evicted"] == 1


@pytest.mark.parametrize("wait", ["applied", "staged", "none"])
def test_a_transaction_ends_as_it_was_asked_to(wait: Wait) -> None:
    run = training.Run(training.adamw)
    run.step()
    with (
        Publisher(LOCAL, **UNHURRIED) as publisher,
        WorkerThread(publisher.endpoint) as worker,
        refit.Controller(run.optimizer) as controller,
    ):
        publisher.wait_workers(1, TIMEOUT)
        for version in (1, 2):
            with controller.refit(publisher=publisher, wait=wait) as tx:
                tx.send(weights(version))
            assert tx.version == version
            assert tx.committed or wait == "none"
            assert controller.state == "refitted"
            assert wait != "applied" or len(worker.seen) == version
            controller.restore()
        publisher.publish(weights(3))
        assert publisher.version == 3
    assert not worker.failures


def test_waits_that_there_are_not_are_refused() -> None:
    with Publisher(LOCAL) as publisher, pytest.raises(InvalidError, match="applied"):
        publisher.publish(weights(1), wait="soon")  # type: ignore[arg-type]
    with Publisher(LOCAL, broadcast_slots=1) as publisher:
        with pytest.raises(StateError, match="slots"):
            publisher.publish(weights(1), wait="staged")
        assert publisher.publish(weights(1)) == 1
