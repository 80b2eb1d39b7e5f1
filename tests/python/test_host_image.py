"""Workers of a host that is not the trainer's: one receives a version, the others map it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import refit
import torch
from broadcasting import LOCAL, TIMEOUT, UNHURRIED, WorkerThread, contents
from refit.weights.publisher import Publisher
from refit.weights.update import Update

COUNT = 3
REMOTE = {"broadcast_shm": "off", **UNHURRIED}
"""A trainer that shares no memory, as if it were on another host."""


def weights(version: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(version)
    return {"a": torch.randn(300, 500), "b": torch.randn(1000).to(torch.bfloat16)}


def nbytes(version: dict[str, torch.Tensor]) -> int:
    return sum(it.nbytes for it in version.values())


@contextmanager
def host(apply: Any = contents, **options: Any) -> Iterator[tuple[Publisher, list[WorkerThread]]]:
    with ExitStack() as stack:
        publisher = stack.enter_context(Publisher(LOCAL, **REMOTE))
        workers = [
            stack.enter_context(
                WorkerThread(publisher.endpoint, apply, worker=f"w{number}", **options)
            )
            for number in range(COUNT)
        ]
        publisher.wait_workers(COUNT, TIMEOUT)
        yield publisher, workers


def paths(publisher: Publisher) -> list[str]:
    return sorted(worker.path for worker in publisher.workers())


def test_a_host_receives_a_version_once() -> None:
    with host(broadcast_delta="never") as (publisher, workers):
        for version in (1, 2, 3):
            publisher.publish(weights(version))
            assert publisher.stats()["publish_sent_bytes_total"] < version * 1.01 * nbytes(
                weights(1)
            )
        expected = [
            {
                name: it.contiguous().view(torch.uint8).numpy().tobytes()
                for name, it in weights(version).items()
            }
            for version in (1, 2, 3)
        ]
        assert all(worker.seen == expected for worker in workers)
        assert paths(publisher) == ["neighbor", "neighbor", "socket"]
        assert publisher.stats()["workers_neighbor"] == 2


@pytest.mark.parametrize(
    ("publishers", "workers"),
    [
        pytest.param({"broadcast_host_image": "off"}, {}, id="off at the trainer"),
        pytest.param({}, {"broadcast_host_image": "off"}, id="off at the workers"),
        pytest.param({}, {"broadcast_shm": "off"}, id="workers share no memory"),
    ],
)
def test_each_receives_for_itself(publishers: dict[str, str], workers: dict[str, str]) -> None:
    with ExitStack() as stack:
        publisher = stack.enter_context(Publisher(LOCAL, **{**REMOTE, **publishers}))
        for number in range(2):
            stack.enter_context(WorkerThread(publisher.endpoint, worker=f"w{number}", **workers))
        publisher.wait_workers(2, TIMEOUT)
        publisher.publish(weights(1))
        assert paths(publisher) == ["socket", "socket"]
        assert publisher.stats()["publish_sent_bytes_total"] >= 2 * nbytes(weights(1))


def test_what_a_worker_writes_stays_with_it() -> None:
    seen = []
    expected = {version: weights(version)["a"] for version in (1, 2, 3)}

    def overwrite(update: Update) -> None:
        tensor = update["a"].torch()
        seen.append(bool(tensor.equal(expected[update.version])))
        tensor.fill_(7)

    with host(overwrite) as (publisher, workers):
        for version in (1, 2, 3):
            publisher.publish(weights(version))
        assert seen == [True] * 9
        assert not any(worker.failures for worker in workers)


def test_versions_are_applied_and_taken_back() -> None:
    with ExitStack() as stack:
        publisher = stack.enter_context(Publisher(LOCAL, **REMOTE))
        models = [torch.nn.Linear(64, 64) for _ in range(COUNT)]

        def apply(update: Update) -> None:
            update.apply()
            if update.version == 2:
                raise ValueError("the engine does not want it")

        for number, model in enumerate(models):
            worker = WorkerThread(publisher.endpoint, apply, worker=f"w{number}")
            worker.subscriber.bind(model)
            stack.enter_context(worker)
        publisher.wait_workers(COUNT, TIMEOUT)
        sources = [torch.nn.Linear(64, 64) for _ in range(3)]
        for number, source in enumerate(sources, 1):
            if number == 2:
                with pytest.raises(refit.errors.PeerError):
                    publisher.publish(source.state_dict())
            else:
                publisher.publish(source.state_dict())
            kept = sources[0] if number == 2 else source
            for model in models:
                assert all(
                    torch.equal(it, kept.state_dict()[name])
                    for name, it in model.state_dict().items()
                )


def test_a_worker_that_joins_maps_what_is_there() -> None:
    with host() as (publisher, _):
        publisher.publish(weights(1))
        sent = publisher.stats()["publish_sent_bytes_total"]
        with WorkerThread(publisher.endpoint, worker="late") as late:
            publisher.wait_workers(COUNT + 1, TIMEOUT)
            publisher.publish(weights(2))
            assert late.seen[-1] == {
                name: it.contiguous().view(torch.uint8).numpy().tobytes()
                for name, it in weights(2).items()
            }
        assert publisher.stats()["publish_sent_bytes_total"] <= sent + 1.01 * nbytes(weights(2))


def test_a_worker_that_leaves_takes_nothing_along() -> None:
    with host(broadcast_delta="auto") as (publisher, workers):
        for version in range(1, 6):
            if version in (3, 4):
                leaving = next(it for it in publisher.workers() if it.path == "socket")
                number = int(leaving.name[1:])
                workers[number].subscriber.close()
            publisher.publish(weights(version))
        assert paths(publisher).count("socket") == 1
