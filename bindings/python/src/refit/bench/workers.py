"""Worker processes of a benchmark: started once, given tasks, and read when each is done.

They are spawned, not forked: nothing of the trainer is in them. A failure in one is raised in the
trainer with its sentence.
"""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

TIMEOUT_S = 120.0


def serve(ends: Connection) -> None:
    """A worker's whole life: tasks, each answered with what failed, or None, and what it found."""
    while (task := ends.recv()) is not None:
        function, arguments = task
        try:
            found = function(*arguments)
        except Exception as why:  # told to the trainer, which raises it
            ends.send((f"{type(why).__name__}: {why}", None))
        else:
            ends.send((None, found))


class WorkerProcesses:
    """So many processes, closed as a context manager."""

    def __init__(self, count: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._members: list[tuple[Any, Connection]] = []
        for number in range(count):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=serve, args=(theirs,), name=f"worker {number}")
            process.start()
            theirs.close()
            self._members.append((process, ours))

    @property
    def pids(self) -> list[int]:
        """Of all of them."""
        return [process.pid for process, _ in self._members]

    def begin(self, count: int, function: Callable[..., Any], *arguments: Any) -> None:
        """The first ``count`` of them call ``function(number, *arguments)``, number from 0."""
        for number, (_, ends) in enumerate(self._members[:count]):
            ends.send((function, (number, *arguments)))

    def end(self, count: int) -> list[Any]:
        """Waits until they are done, and returns what they found. RuntimeError with the sentence of
        one that failed."""
        results = []
        for process, ends in self._members[:count]:
            if not ends.poll(TIMEOUT_S):
                raise RuntimeError(f"{process.name} is not done after {TIMEOUT_S:.0f} s")
            failure, found = ends.recv()
            if failure is not None:
                raise RuntimeError(f"{process.name}: {failure}")
            results.append(found)
        return results

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process, ends in self._members:
            if kind is None and process.is_alive():
                ends.send(None)
            else:
                process.terminate()
        for process, ends in self._members:
            process.join()
            ends.close()
