"""What a version costs by the number of publishers that send it.

One publisher has all weights, or each of several ranks has so many rows of every tensor, as after
``Publisher.shard``; one worker, on another host than all of them, takes all. Each rank is a process
on a link of its own. All numbers take turns, one round after another.
"""

import logging
import socket
import time
from contextlib import ExitStack
from typing import Any

from refit.bench.links import Links, leave_network
from refit.bench.scale import PARAMETERS, read_all
from refit.bench.series import Series, ratio
from refit.bench.states import shapes
from refit.bench.ways import Shapes, Weights, blank, change
from refit.bench.workers import TIMEOUT_S, WorkerProcesses
from refit.weights.manifest import TensorSpec
from refit.weights.publisher import Publisher

PORT = 7471
"""Of every rank where it has an address of its own."""
OPTIONS: dict[str, Any] = {"broadcast_delta": "never", "broadcast_insecure": True}
"""The addresses are this machine's, whether they are the loopback's or not."""


def measure(
    parameters: float, rounds: int, counts: tuple[int, ...], rate: str | None
) -> dict[str, Any]:
    """A row for each number of publishers. ``rate``: of each one's link, as ``tc`` takes it; None:
    all are on the loopback, which has no limit."""
    whole = dict(shapes(min(parameters, PARAMETERS)))
    elements = sum(_elements(shape) for shape in whole.values())
    with ExitStack() as stack:
        links = None if rate is None else Links(rate)
        if links is not None:
            stack.callback(links.close)
        groups = [_Group(stack, count, whole, links) for count in counts]
        for _ in range(rounds + 1):
            for group in groups:
                group.publish()
        rows = [_row(group, groups[0], elements * 2, rounds) for group in groups]
        for group in groups:
            group.close()
    return {
        "bench": "scale_publishers",
        "parameters": elements,
        "bytes": elements * 2,
        "rounds": rounds,
        "link": rate or "the loopback",
        "ways": rows,
    }


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _row(group: "_Group", first: "_Group", nbytes: int, rounds: int) -> dict[str, Any]:
    sent = [it / (rounds + 1) / nbytes for it in group.sent_bytes()]
    return {
        "publishers": group.count,
        "way": f"{group.count} publishers",
        **group.series.figures(),
        **group.series.cold_figure(),
        "speedup": ratio(first.series, group.series),
        "sent_least": min(sent),
        "sent_most": max(sent),
    }


class _Group:
    """So many ranks and a worker, whose processes end with ``stack``."""

    def __init__(self, stack: ExitStack, count: int, whole: Shapes, links: Links | None) -> None:
        self.count = count
        self.series = Series()
        self._worker = stack.enter_context(WorkerProcesses(1))
        self._ranks = stack.enter_context(WorkerProcesses(count))
        if links is None:
            endpoints = [f"tcp://127.0.0.1:{_free_port()}" for _ in range(count)]
        else:
            self._all(_leave)
            endpoints = [f"tcp://{links.attach(pid)}:{PORT}" for pid in self._ranks.pids]
        self._worker.begin(1, _take, endpoints[0])
        self._all(_open, endpoints, whole)

    def _all(self, function: Any, *arguments: Any) -> list[Any]:
        self._ranks.begin(self.count, function, *arguments)
        return self._ranks.end(self.count)

    def publish(self) -> None:
        self._all(_change)
        start = time.perf_counter()
        self._all(_publish)
        self.series.add(time.perf_counter() - start)

    def close(self) -> None:
        """In good order."""
        self._all(_close)
        self._worker.end(1)

    def sent_bytes(self) -> list[float]:
        """By each of them."""
        return self._all(_sent)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


# ---- In a rank's process


class _Rank:
    """A publisher, and the rows that it has."""

    def __init__(self, number: int, endpoints: list[str], whole: Shapes) -> None:
        count = len(endpoints)
        rows = {
            name: slice(shape[0] * number // count, shape[0] * (number + 1) // count)
            for name, shape in whole.items()
        }
        rows = {name: it for name, it in rows.items() if it.start < it.stop}
        self.weights: Weights = blank(
            {name: (it.stop - it.start, *whole[name][1:]) for name, it in rows.items()}
        )
        self.publisher = Publisher(endpoints[number], broadcast_shm="off", **OPTIONS)
        if count > 1:
            self.publisher.declare([TensorSpec(name, "BF16", it) for name, it in whole.items()])
            parts = {name: (it,) for name, it in rows.items()}
            self.publisher.shard(endpoints[0], number, count, parts, TIMEOUT_S)
        if number == 0:
            self.publisher.wait_workers(1, TIMEOUT_S)


_own: list[_Rank] = []


def _leave(number: int) -> None:
    leave_network()


def _open(number: int, endpoints: list[str], whole: Shapes) -> None:
    logging.getLogger("refit").setLevel(logging.ERROR)  # of TCP without keys it warns
    _own.append(_Rank(number, endpoints, whole))


def _change(number: int) -> None:
    change(_own[0].weights)


def _publish(number: int) -> None:
    _own[0].publisher.publish(_own[0].weights)


def _sent(number: int) -> float:
    return _own[0].publisher.stats()["publish_sent_bytes_total"]


def _close(number: int) -> None:
    for one in _own:
        one.publisher.close(end=True)


# ---- In a worker's process


def _take(number: int, endpoint: str) -> None:
    read_all(endpoint, worker="bench", **OPTIONS)
