"""What the checkpoint engines of NeMo-RL and verl have in common: refit's two ends in one object.

Both frameworks make the same object on every worker, ask each to prepare, and only then tell it
which side it is on. So it may hold a publisher (the trainer's first rank), a subscriber (rollout
workers), or neither (the trainer's other ranks, which only run the weights' generator).

Which methods a framework calls, and when, is in nemo_rl.py and verl.py.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from refit.errors import ConfigError, StateError
from refit.integrations._receiver import Receiver, subscribe
from refit.integrations._sender import Sender, run_to_the_end

if TYPE_CHECKING:
    from refit.weights.publisher import Publisher

ANY_HOST = ("0.0.0.0", "*", "::", "[::]")


class Engine:
    """A publisher or a subscriber, by the role that the framework gives. One thread at a time.

    `bucket_size`: most bytes in a batch that the engine is handed at once. `bind`: where the
    trainer binds, by default a socket that only this user reaches; workers on other hosts need an
    address that they can reach (``tcp://0.0.0.0:5757``) and ``config: {broadcast: {insecure:
    true}}``. `host`: the name under which they reach it, for an address that says any. `device`:
    where tensors are handed over (None: on refit's memory, without a copy). `timeout_s`: how long
    workers and versions are waited for. `config`: refit's own options, a mapping or a file.
    """

    def __init__(
        self,
        bucket_size: int,
        *,
        bind: str = "user://*",
        host: str | None = None,
        device: str | None = None,
        timeout_s: float = 600.0,
        config: Mapping[str, Any] | str | None = None,
        release_after_refit: bool = False,
        is_master: bool = False,
    ) -> None:
        if any(f"//{name}:" in bind for name in ANY_HOST) and host is None:
            raise ConfigError(
                f"bind is {bind}, which is not an address to connect to: say under which host name "
                "workers reach the trainer (host)"
            )
        if not timeout_s >= 0:
            raise ConfigError(f"timeout_s is {timeout_s}: it is a number of seconds, 0 or more")
        self.bucket_size = bucket_size
        self.is_master = is_master
        self.release_after_refit = release_after_refit
        self._bind = bind
        self._host = host
        self._device = device
        self._timeout_s = timeout_s
        self._config = config
        self._publisher: Publisher | None = None
        self._sender: Sender | None = None
        self._receiver: Receiver | None = None
        self._expected = 0

    @property
    def endpoint(self) -> str | None:
        """Where workers connect; None where nothing is published."""
        if self._publisher is None:
            return None
        return reachable(self._publisher.endpoint, self._host)

    @property
    def version(self) -> int:
        """The version that was published, or loaded whole; 0 for none."""
        if self._publisher is not None:
            return self._publisher.version
        return 0 if self._receiver is None else self._receiver.version

    def stats(self) -> dict[str, float]:
        """The figures of the end that this one has; empty on ranks that have none."""
        if self._publisher is not None:
            return self._publisher.stats()
        return {} if self._receiver is None else self._receiver.subscriber.stats()

    def announce(self) -> str:
        """Where workers will connect, before the side of this process is known. A free port or name
        is bound here, because it is not known before. A fixed one is not bound, because all ranks
        of a machine share it."""
        if self._bind.endswith((":0", "*")):
            return self.open_publisher()
        return reachable(self._bind, self._host)

    def open_publisher(self) -> str:
        """Binds, unless that was done; returns where workers connect."""
        if self._publisher is None:
            from refit.weights.publisher import Publisher

            self._publisher = Publisher(self._bind, config=self._config)
            self._sender = Sender(self._publisher)
        return reachable(self._publisher.endpoint, self._host)

    def expect(self, workers: int) -> None:
        """Says how many workers must be there before anything is published."""
        self._expected = workers

    def take_part(self) -> None:
        """This rank publishes nothing; it only runs what all ranks run."""
        self._close_publisher()

    def connect(self, endpoint: str, worker: str) -> None:
        """Subscribes to the trainer; does nothing if that was done already. A trainer that was
        started again may be at another endpoint: then a wait for the one before ends, with a
        StateError."""
        self._close_publisher()
        receiver = self._receiver
        if receiver is not None and receiver.endpoint != endpoint:
            self._receiver = None
            receiver.close()
        if self._receiver is None:
            # Without a device of its own for what comes, its reader has it until ``let_go``.
            device = None if self._device in (None, "cpu") else self._device
            self._receiver = subscribe(endpoint, worker, self._config, device=device)

    def let_go(self) -> None:
        """Ends the views of the version in hand."""
        if self._receiver is not None:
            self._receiver.let_go()

    def close(self) -> None:
        """Closes whichever end there is. Idempotent."""
        self._close_publisher()
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()

    async def publish(self, weights: Iterable[tuple[str, Any]], version: int | None = None) -> int:
        """Publishes `weights` as one version, or only runs them where nothing is published."""
        if self._publisher is None or self._sender is None:
            run_to_the_end(iter(weights))
            return 0
        left = iter(weights)
        try:
            wait = self._publisher.wait_workers
            await self._sender.run_in_thread(wait, self._expected, self._timeout_s)
            return await self._sender.send_from_loop(left, version)
        finally:
            run_to_the_end(left)

    async def batches(
        self, version: int | None = None
    ) -> AsyncGenerator[list[tuple[str, Any]], None]:
        """The next version in batches; below the number, if one is given, they are refused. It is
        accepted when the last batch has been taken and more is asked for, and refused if the reader
        stops before. Views stay until ``let_go``."""
        if self._receiver is None:
            raise StateError("this worker knows no trainer: its process group was not initialized")
        update = await self._receiver.arrival(self._timeout_s, version)
        with self._receiver.loading(update):
            batches = iter(_batched(update.tensors(), self.bucket_size))
            while batch := await _next_of(batches, in_thread=update.streamed):
                yield [(name, self._placed(tensor)) for name, tensor in batch]

    def _placed(self, tensor: Any) -> Any:
        return tensor if self._device is None else tensor.to(self._device, copy=True)

    def _close_publisher(self) -> None:
        publisher, self._publisher, self._sender = self._publisher, None, None
        if publisher is not None:
            publisher.close()


async def _next_of(batches: Iterator[list[Any]], *, in_thread: bool) -> list[Any]:
    """The next batch, or an empty one. A streamed version waits for its trainer, which may need
    the loop."""
    if in_thread:
        return await asyncio.to_thread(next, batches, [])
    return next(batches, [])


def _batched(tensors: Iterable[tuple[str, Any]], most: int) -> Iterable[list[tuple[str, Any]]]:
    """Runs of tensors with at most `most` bytes together; a larger tensor is a batch of its own."""
    batch: list[tuple[str, Any]] = []
    held = 0
    for name, tensor in tensors:
        if batch and held + tensor.nbytes > most:
            yield batch
            batch, held = [], 0
        batch.append((name, tensor))
        held += tensor.nbytes
    if batch:
        yield batch


def reachable(endpoint: str, host: str | None) -> str:
    """The endpoint under the name `host`; as it is without one, or where there are no hosts."""
    if host is None or not endpoint.startswith("tcp://"):
        return endpoint
    return f"tcp://{host}:{urlsplit(endpoint).port}"
