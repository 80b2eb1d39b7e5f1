"""How long a trainer waits in ``publish`` while its workers generate.

A worker takes a version, and asks for the next one seconds later. For each transport a version is
published to no worker, and then to such a worker with each ``wait``; all ways take turns, one round
after another, each with a publisher of its own. The rest of a training step is a pause.
"""

import time
from contextlib import ExitStack
from typing import Any

from refit.bench.series import Series, ratio
from refit.bench.states import shapes
from refit.bench.ways import Receiver, Weights, blank, change, shapes_of
from refit.bench.workers import TIMEOUT_S, WorkerProcesses
from refit.errors import CancelledError, ClosedError, DeadlineError
from refit.weights.publisher import Publisher, Wait
from refit.weights.subscriber import Subscriber

PARAMETERS = 0.12e9
GENERATES_S = 3.0
"""For so long a worker asks for nothing."""
TRAINS_S = 0.3
"""Of each way's training step, outside of ``publish``."""
WAITS: tuple[Wait, ...] = ("staged", "none", "applied")
APPLIED_ROUNDS = 3
"""Of ``wait="applied"``: each takes as long as a worker generates."""


def measure(
    parameters: float, rounds: int, *, generates_s: float = GENERATES_S, trains_s: float = TRAINS_S
) -> dict[str, Any]:
    """Every way, through shared memory and through sockets."""
    weights = blank(dict(shapes(min(parameters, PARAMETERS))))
    rows = []
    for transport, shm in (("shared memory", "auto"), ("sockets", "off")):
        rows += _rows(transport, shm, weights, rounds, generates_s, trains_s)
    return {
        "bench": "async_weights",
        "parameters": sum(it.numel() for it in weights.values()),
        "bytes": sum(it.nbytes for it in weights.values()),
        "rounds": rounds,
        "generates_s": generates_s,
        "ways": rows,
    }


def _rows(
    transport: str, shm: str, weights: Weights, rounds: int, generates_s: float, trains_s: float
) -> list[dict[str, Any]]:
    with ExitStack() as stack:
        alone = stack.enter_context(Publisher("user://*", broadcast_shm=shm))
        found: dict[str, tuple[Publisher, Series]] = {"no worker": (alone, Series())}
        for wait in WAITS:
            publisher = stack.enter_context(Publisher("user://*", broadcast_shm=shm))
            processes = stack.enter_context(WorkerProcesses(1))
            processes.begin(1, _generate, publisher.endpoint, shm, shapes_of(weights), generates_s)
            publisher.wait_workers(1, TIMEOUT_S)
            stack.callback(processes.end, 1)
            stack.callback(publisher.close, end=True)
            found[wait] = publisher, Series()
        for number in range(rounds + 1):
            for way, (publisher, series) in found.items():
                if way == "applied" and number > APPLIED_ROUNDS:
                    continue
                change(weights)
                time.sleep(trains_s)
                start = time.perf_counter()
                publisher.publish(weights, wait="staged" if way == "no worker" else way)  # type: ignore[arg-type]
                series.add(time.perf_counter() - start)
        return [
            {
                "transport": transport,
                "way": way,
                **series.figures(),
                **series.cold_figure(),
                "over_no_worker": ratio(series, found["no worker"][1]),
                "evicted": int(publisher.stats()["workers_evicted"]),
                "aborted": int(publisher.stats()["publish_aborts"]),
            }
            for way, (publisher, series) in found.items()
        ]


def _generate(_number: int, endpoint: str, shm: str, known: Any, generates_s: float) -> None:
    """A worker that loads the newest version, and then uses it for so long."""
    receiver = Receiver(known, load=True)
    with Subscriber(endpoint, worker="bench", broadcast_shm=shm) as subscriber:
        while True:
            try:
                with subscriber.next(TIMEOUT_S) as update:
                    receiver.load(dict(update.tensors()))
            except (CancelledError, ClosedError, DeadlineError):
                return
            time.sleep(generates_s)
