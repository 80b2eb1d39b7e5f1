"""A trainer and workers in one process, for tests of the broadcast."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from refit.errors import CancelledError, PeerError, StateError
from refit.publisher import Publisher
from refit.subscriber import Subscriber
from refit.update import Update

LOCAL = "tcp://127.0.0.1:0"
PATIENCE = 30.0  # seconds, for what takes milliseconds


class WorkerThread:
    """A worker that applies versions until its ``with`` ends, and keeps what it saw."""

    def __init__(
        self, endpoint: str | None, apply: Callable[[Update], Any], **options: Any
    ) -> None:
        self.subscriber = Subscriber(endpoint, **options)
        self.seen: list[Any] = []
        self.failures: list[BaseException] = []
        self._apply = apply
        self._ending = False
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._ending:
            try:
                update = self.subscriber.next(PATIENCE)
            except (CancelledError, StateError):
                return
            try:
                with update:
                    self.seen.append(self._apply(update))
            except Exception as why:
                self.failures.append(why)

    def __enter__(self) -> "WorkerThread":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending = True
        self.subscriber.wake()
        self._thread.join()
        self.subscriber.close()


def wait_until(condition: Callable[[], bool]) -> None:
    """Looks until the condition holds; fails after PATIENCE."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "the condition did not hold in time"
        time.sleep(0.005)


def contents(update: Update) -> dict[str, bytes]:
    """All bytes, copied."""
    return {view.name: bytes(view.bytes) for view in update.views()}


@contextmanager
def pair(
    apply: Callable[[Update], Any] = contents, **options: Any
) -> Iterator[tuple[Publisher, WorkerThread]]:
    """A publisher and one subscribed worker on a thread."""
    with (
        Publisher(LOCAL, **options) as publisher,
        WorkerThread(publisher.endpoint, apply, worker="w0", **options) as worker,
    ):
        publisher.wait_workers(1, PATIENCE)
        yield publisher, worker


@contextmanager
def both(**options: Any) -> Iterator[tuple[Publisher, Subscriber]]:
    """A publisher and a subscriber; no thread takes versions."""
    with (
        Publisher(LOCAL, **options) as publisher,
        Subscriber(publisher.endpoint, worker="w0", **options) as subscriber,
    ):
        publisher.wait_workers(1, PATIENCE)
        yield publisher, subscriber


@contextmanager
def published(weights: Any, **options: Any) -> Iterator[Update]:
    """An open update with these weights in it; the trainer waits for its decision meanwhile."""
    with both(**options) as (publisher, subscriber):
        outcome: list[BaseException] = []

        def publish() -> None:
            try:
                publisher.publish(weights)
            except Exception as why:
                outcome.append(why)

        trainer = threading.Thread(target=publish)
        trainer.start()
        try:
            yield subscriber.next(PATIENCE)
        finally:
            subscriber.close()
            trainer.join()


def publish_in_vain(publisher: Publisher, weights: Any) -> None:
    with pytest.raises(PeerError):
        publisher.publish(weights)
