"""A trainer for the tests of workers: a real refit publisher, publishing on a thread of its own.

Stands for the other process. It is a thread so that tests need no second process; a commit waits
for workers, which are on the test's own thread.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from refit.weights.publisher import Publisher

WAIT_S = 30.0
"""Long enough for a loaded machine; nothing here waits for it to pass."""


class Trainer:
    """Publishes when told to, and returns a future of what the publisher said."""

    def __init__(self, publisher: Publisher, pool: ThreadPoolExecutor) -> None:
        self.publisher = publisher
        self.endpoint = publisher.endpoint
        self._pool = pool

    def call(self, function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        """Calls it on the trainer's thread."""
        return self._pool.submit(function, *arguments)

    def publish(
        self, weights: Iterable[tuple[str, Any]] | dict[str, Any], workers: int = 1
    ) -> "Future[int]":
        """Publishes the next version to so many workers."""

        def run() -> int:
            self.publisher.wait_workers(workers, WAIT_S)
            return self.publisher.publish(weights)

        return self.call(run)


@contextmanager
def trainer(endpoint: str = "tcp://127.0.0.1:0", **overrides: Any) -> Iterator[Trainer]:
    """A trainer that is closed at the end, after what it was doing."""
    with Publisher(endpoint, **overrides) as publisher, ThreadPoolExecutor(1) as pool:
        yield Trainer(publisher, pool)
