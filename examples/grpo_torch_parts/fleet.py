"""The worker processes: started, replaced when they die, ended with the trainer.

Each is spawned, not forked: a forked process would share the trainer's threads and sockets, which
no library survives. Batches come back through a pipe of its own.
"""

import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from refit import Subscriber, Update
from refit.errors import DeadlineError

from .policy import Batch

GATHER_TIMEOUT_S = 120.0
END_TIMEOUT_S = 10.0
REPLACEMENTS_MOST = 8

Work = Callable[[str, int, int, Connection], None]


class WorkerLost(Exception):
    """A worker died too often."""


class _Worker(NamedTuple):
    process: Any
    pipe: Connection


class Fleet:
    """`count` processes that run `work`. A context manager: they have ended when it has."""

    def __init__(self, count: int, work: Work, endpoint: str, seed: int) -> None:
        self.count = count
        self._work = work
        self._endpoint = endpoint
        self._seed = seed
        self._spawn = multiprocessing.get_context("spawn")
        self._workers: list[_Worker] = []

    def __enter__(self) -> Self:
        for index in range(self.count):
            self._workers.append(self._start(index))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for worker in self._workers:
            worker.process.terminate()
        for worker in self._workers:
            worker.process.join(END_TIMEOUT_S)
            worker.process.kill()
            worker.process.join()
            worker.pipe.close()

    def gather(self, version: int) -> list[Batch]:
        """What each worker has sampled from `version`."""
        return [self._receive(index, version) for index in range(self.count)]

    def repair(self) -> None:
        """Replaces the workers that have died."""
        for index, worker in enumerate(self._workers):
            if not worker.process.is_alive():
                self._replace(index)

    def _receive(self, index: int, version: int) -> Batch:
        for _ in range(REPLACEMENTS_MOST):
            batch = self._read(index)
            while batch is not None and batch.version < version:  # of a publish that was repeated
                batch = self._read(index)
            if batch is not None:
                return batch
            self._replace(index)
        raise WorkerLost(f"worker {index} died {REPLACEMENTS_MOST} times: giving up")

    def _read(self, index: int) -> Batch | None:
        """None if the worker is gone, or says nothing for too long."""
        pipe = self._workers[index].pipe
        try:
            if not pipe.poll(GATHER_TIMEOUT_S):
                return None
            version, *arrays = pipe.recv()
        except (EOFError, ConnectionResetError):
            return None
        return Batch(version, *map(torch.from_numpy, arrays))

    def _replace(self, index: int) -> None:
        old = self._workers[index]
        old.process.kill()
        old.process.join()
        old.pipe.close()
        print(
            f"grpo: worker rollout-{index} (pid {old.process.pid}) ended with "
            f"{old.process.exitcode}; a new one takes its place",
            file=sys.stderr,
        )
        self._workers[index] = self._start(index)

    def _start(self, index: int) -> _Worker:
        mine, theirs = self._spawn.Pipe(duplex=False)
        arguments = (self._endpoint, index, self._seed, theirs)
        process = self._spawn.Process(target=self._work, args=arguments, daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, mine)


def obey_the_trainer() -> None:
    """In a worker: Ctrl-C is the trainer's, which then asks its workers to end, in good order."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))


def versions(subscriber: Subscriber) -> Iterator[Update]:
    """Like iterating the subscriber, but it ends when the trainer's process is gone, too."""
    trainer = multiprocessing.parent_process()
    gone = [] if trainer is None else [trainer.sentinel]
    while not any(one in gone for one in wait([*gone, subscriber.fileno()])):
        try:
            update = subscriber.next(0)
        except DeadlineError:
            continue
        yield update


def send_batch(pipe: Connection, batch: Batch) -> None:
    """Through the pipe as arrays: torch would share each tensor's memory by a file of its own."""
    pipe.send((batch.version, *(tensor.numpy() for tensor in batch[1:])))
