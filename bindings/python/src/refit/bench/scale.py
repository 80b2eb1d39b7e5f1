"""What a version costs by the number of workers that receive it, and of hosts that they are on.

The trainer shares no memory with its workers, as if it were on another host, and sends through TCP.
The workers are all on one host, where one of them receives for all, or each is on a host of its
own, which is what ``broadcast.host_image: off`` amounts to; there each takes all of a version, or
its share: so many rows of each tensor. All ways take turns, one round after another, each with a
publisher and processes of its own.
"""

import logging
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from refit.bench.series import Series, ratio
from refit.bench.states import shapes
from refit.bench.ways import Weights, blank, change
from refit.bench.workers import TIMEOUT_S, WorkerProcesses
from refit.errors import CancelledError, ClosedError, DeadlineError
from refit.weights.publisher import Publisher
from refit.weights.subscriber import Subscriber

PARAMETERS = 0.06e9
PLACES = (("one host", "auto", False), ("a host each", "off", False), ("a share each", "off", True))
"""What it is called, broadcast.host_image, and whether a worker takes its share alone."""
PAGE_ELEMENTS = 2048
"""Of bf16 in a page."""


_Share = dict[str, tuple[slice, ...]]


def _shares(weights: Weights, count: int) -> list[_Share]:
    """Rows of each tensor for so many workers."""
    return [
        {
            name: (slice(len(it) * number // count, len(it) * (number + 1) // count),)
            for name, it in weights.items()
        }
        for number in range(count)
    ]


def measure(parameters: float, rounds: int, counts: tuple[int, ...]) -> dict[str, Any]:
    """Both ways for each number of workers, against a single worker."""
    logging.getLogger("refit").setLevel(logging.ERROR)  # of TCP without keys it warns
    weights = blank(dict(shapes(min(parameters, PARAMETERS))))
    rows = []
    one: Series | None = None
    for count in counts:
        found = _rows(count, weights, rounds, one)
        one = one or found[0].pop("series")
        rows += [{name: it for name, it in row.items() if name != "series"} for row in found]
    return {
        "bench": "scale",
        "parameters": sum(it.numel() for it in weights.values()),
        "bytes": sum(it.nbytes for it in weights.values()),
        "rounds": rounds,
        "ways": rows,
    }


def _rows(count: int, weights: Weights, rounds: int, one: Series | None) -> list[dict[str, Any]]:
    nbytes = sum(it.nbytes for it in weights.values())
    with ExitStack() as stack:
        found = [
            (place, _Group(stack, count, host_image, _shares(weights, count) if shares else None))
            for place, host_image, shares in PLACES
            if count > 1 or host_image == "auto"
        ]
        for _place, group in found:  # once all are there: they share the pages of libraries
            group.begin()
        for _ in range(rounds + 1):
            for _place, group in found:
                change(weights)
                group.publish(weights)
        return [
            {
                "workers": count,
                "hosts": 1 if place == "one host" else count,
                "way": f"{count}, {place}",
                **group.series.figures(),
                **group.series.cold_figure(),
                "over_one_worker": ratio(group.series, one or group.series),
                "sent": group.sent_bytes() / (rounds + 1) / nbytes,
                "images": group.memory_bytes() / nbytes,
                "series": group.series,
            }
            for place, group in found
        ]


class _Group:
    """A publisher and so many workers, which end with ``stack``."""

    def __init__(
        self, stack: ExitStack, count: int, host_image: str, shares: list[_Share] | None
    ) -> None:
        self.series = Series()
        self._processes = stack.enter_context(WorkerProcesses(count))
        self._publisher = stack.enter_context(
            Publisher("tcp://127.0.0.1:*", broadcast_shm="off", broadcast_delta="never")
        )
        self._processes.begin(count, _take, self._publisher.endpoint, host_image, shares)
        self._publisher.wait_workers(count, TIMEOUT_S)
        stack.callback(self._processes.end, count)
        stack.callback(self._publisher.close, end=True)
        self._before = 0

    def begin(self) -> None:
        """Notes what the workers have before the first version."""
        self._before = self._pss()

    def publish(self, weights: Weights) -> None:
        start = time.perf_counter()
        self._publisher.publish(weights)
        self.series.add(time.perf_counter() - start)

    def sent_bytes(self) -> float:
        return self._publisher.stats()["publish_sent_bytes_total"]

    def memory_bytes(self) -> int:
        """What the workers have now that they had not before the first version.

        Memory that several share counts once.
        """
        return self._pss() - self._before

    def _pss(self) -> int:
        total = 0
        for pid in self._processes.pids:
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
        return total


def _take(number: int, endpoint: str, host_image: str, shares: list[_Share] | None) -> None:
    read_all(
        endpoint,
        worker=f"bench {number}",
        broadcast_host_image=host_image,
        broadcast_delta="never",
        parts=None if shares is None else shares[number],
    )


def read_all(endpoint: str, **options: Any) -> None:
    """A worker, opened with these options of ``Subscriber``: it reads each version, all that it
    takes of it, where it lies, until the trainer ends."""
    logging.getLogger("refit").setLevel(logging.ERROR)
    with Subscriber(endpoint, **options) as subscriber:
        while True:
            try:
                with subscriber.next(TIMEOUT_S) as update:
                    for it in dict(update.tensors()).values():
                        it.reshape(-1)[::PAGE_ELEMENTS].sum()
            except (CancelledError, ClosedError, DeadlineError):
                return
