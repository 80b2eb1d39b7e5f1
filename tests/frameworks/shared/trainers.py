"""A trainer in the process of a test, which publishes while the test drives an engine."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

from refit import Publisher

WAIT_S = 120.0


class Trainer(NamedTuple):
    publisher: Publisher
    pool: ThreadPoolExecutor

    @property
    def endpoint(self) -> str:
        return self.publisher.endpoint

    def publish(self, weights: Any, version: int | None = None, workers: int = 1) -> Future[int]:
        """Publishes once so many workers are there; the future has the version, or why not."""

        def run() -> int:
            self.publisher.wait_workers(workers, WAIT_S)
            return self.publisher.publish(weights, version)

        return self.pool.submit(run)


@contextmanager
def trainer(endpoint: str = "user://*") -> Iterator[Trainer]:
    with Publisher(endpoint) as publisher, ThreadPoolExecutor(1) as pool:
        yield Trainer(publisher, pool)
