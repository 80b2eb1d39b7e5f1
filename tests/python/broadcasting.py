"""A trainer and workers in one process, for tests of the broadcast; conftest.py makes fixtures."""

import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from refit.errors import CancelledError, RefitError, StateError
from refit.weights import buffers
from refit.weights.publisher import Publisher
from refit.weights.subscriber import Subscriber
from refit.weights.update import Update
from refit.weights.view import View

LOCAL = "tcp://127.0.0.1:0"
NOWHERE = "ipc:///nowhere/refit.sock"
"""An endpoint where no trainer can be."""
TIMEOUT = 30.0  # seconds, for what takes milliseconds
UNHURRIED = {"broadcast_heartbeat_timeout_ms": "1min", "broadcast_heartbeat_ms": "50ms"}
"""For both ends: one that a busy machine stops for a while does not count as lost, and one that
joins again does so soon."""
ONE = {"w": array("f", range(4))}


def wait_until(condition: Callable[[], bool]) -> None:
    """Looks until the condition holds; fails after TIMEOUT."""
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < end, "the condition did not hold in time"
        time.sleep(0.005)


def contents(update: Update) -> dict[str, bytes]:
    """All bytes, copied to the host."""
    return {view.name: bytes_of(view) for view in update.views()}


def bytes_of(view: View) -> bytes:
    """Of a view, wherever it lies."""
    if view.__dlpack_device__()[0] == buffers.CPU:
        return bytes(view.bytes)
    import torch

    raw = view.torch().reshape(-1).view(torch.uint8)
    return raw.cpu().numpy().tobytes()


def same(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Whether two mappings have equal PyTorch tensors."""
    return left.keys() == right.keys() and all(left[name].equal(right[name]) for name in left)


class WorkerThread:
    """A worker that applies versions until its ``with`` ends, and keeps what it saw."""

    def __init__(
        self, endpoint: str | None, apply: Callable[[Update], Any] = contents, **options: Any
    ) -> None:
        self.subscriber = Subscriber(endpoint, **{**UNHURRIED, **options})
        self.apply = apply
        self.seen: list[Any] = []
        """What ``apply`` returned for each version; there when the trainer's publish returns."""
        self.failures: list[BaseException] = []
        self._ending = False
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._ending:
            try:
                update = self.subscriber.next(TIMEOUT)
            except (CancelledError, StateError):
                return
            try:
                with update:
                    self.seen.append(self.apply(update))
            except Exception as why:
                self.failures.append(why)

    def __enter__(self) -> "WorkerThread":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending = True
        if not self.subscriber.closed:
            self.subscriber.wake()
        self._thread.join()
        self.subscriber.close()


class Trainer:
    """Publishes on a thread, for tests that take the versions themselves."""

    def __init__(self, publisher: Publisher, subscriber: Subscriber) -> None:
        self.publisher = publisher
        self.subscriber = subscriber
        self._thread = threading.Thread()

    def publish(self, weights: Any = ONE) -> None:
        """Begins to; what it raises is not told. The version before must be decided."""
        self.join()
        self._thread = threading.Thread(target=self._publish, args=(weights,))
        self._thread.start()

    def offer(self, weights: Any = ONE) -> Update:
        """A version in the worker's hands, undecided: the trainer waits for the decision. A worker
        that held nothing is offered the version before first, if it comes back in time."""
        self.join()
        before = self.publisher.version
        self.publish(weights)
        while (update := self.subscriber.next(TIMEOUT)).version <= before:
            with update:
                update.refuse("a later one is waited for", kept=True)
        return update

    def join(self) -> None:
        """Until it has published."""
        if self._thread.ident is not None:
            self._thread.join()

    def _publish(self, weights: Any) -> None:
        with suppress(RefitError):
            self.publisher.publish(weights)


class Pair(NamedTuple):
    """A publisher and one subscribed worker on a thread."""

    publisher: Publisher
    worker: WorkerThread


@contextmanager
def pair(apply: Callable[[Update], Any] = contents, **options: Any) -> Iterator[Pair]:
    """Both, until the block ends."""
    with (
        Publisher(LOCAL, **{**UNHURRIED, **options}) as publisher,
        WorkerThread(publisher.endpoint, apply, worker="w0", **options) as worker,
    ):
        publisher.wait_workers(1, TIMEOUT)
        yield Pair(publisher, worker)


@contextmanager
def both(**options: Any) -> Iterator[tuple[Publisher, Subscriber]]:
    """A publisher and a subscriber; no thread takes versions."""
    options = {**UNHURRIED, **options}
    with (
        Publisher(LOCAL, **options) as publisher,
        Subscriber(publisher.endpoint, worker="w0", **options) as subscriber,
    ):
        publisher.wait_workers(1, TIMEOUT)
        yield publisher, subscriber
