"""Ways for weights to reach worker processes, each in its simplest correct form.

A way has two halves: a class for the trainer, whose ``send`` returns once every worker has the
version whole, and a function for a worker, which takes so many versions. A worker that is to
``load`` also copies each tensor into one of its own, as an engine does; with gloo the bytes arrive
in the worker's own tensors anyway.
"""

import pickle
from datetime import timedelta
from typing import Any, Protocol

import torch

from refit.bench.workers import TIMEOUT_S, WorkerProcesses
from refit.weights.publisher import Publisher
from refit.weights.subscriber import Subscriber

Weights = dict[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]
MILLISECONDS = int(TIMEOUT_S * 1000)


class Way(Protocol):
    """A trainer's half, which has begun the workers' halves when it is open."""

    name: str

    def __init__(
        self, processes: WorkerProcesses, count: int, weights: Weights, versions: int, load: bool
    ) -> None: ...

    def send(self, weights: Weights) -> None:
        """One version; returns once every worker has it whole."""

    def close(self) -> None:
        """Gives back what it took."""


def change(weights: Weights) -> None:
    """Every element becomes another one, so that no way can leave anything out."""
    for it in weights.values():
        it.view(torch.int16).add_(1)


def blank(shapes: Shapes) -> Weights:
    """Weights of these shapes; the first element of each counts the versions."""
    made = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    for it in made.values():
        numbers = it.view(torch.int16).view(-1)
        numbers.copy_(torch.arange(numbers.numel()).remainder_(997))
    return made


class Receiver:
    """A worker's part: checks that a version is the right one, and loads it if asked."""

    def __init__(self, shapes: Shapes, load: bool) -> None:
        torch.set_num_threads(1)  # there are as many workers as cores, or more
        self._own = blank(shapes) if load else {}
        self._count = len(shapes)
        self.version = 0

    def take(self, tensors: Weights) -> None:
        """RuntimeError if a tensor is missing or of another version."""
        self.version += 1
        first = {int(it.view(torch.int16).view(-1)[0]) for it in tensors.values()}
        if len(tensors) != self._count or first != {self.version}:
            raise RuntimeError(f"version {self.version} came as {sorted(first)}")
        self.load(tensors)

    def load(self, tensors: Weights) -> None:
        """Copies them into the worker's own, if it has any. Any version."""
        for name, own in self._own.items():
            own.copy_(tensors[name])


def shapes_of(weights: Weights) -> Shapes:
    return {name: tuple(it.shape) for name, it in weights.items()}


# ---- refit ----


class RefitWay:
    """``Publisher.publish``; workers read the version where it lies."""

    name = "refit"

    def __init__(
        self, processes: WorkerProcesses, count: int, weights: Weights, versions: int, load: bool
    ) -> None:
        self._publisher = Publisher("user://*")
        endpoint = self._publisher.endpoint
        processes.begin(count, _refit_worker, endpoint, shapes_of(weights), versions, load)
        self._publisher.wait_workers(count, TIMEOUT_S)

    def send(self, weights: Weights) -> None:
        self._publisher.publish(weights)

    def close(self) -> None:
        self._publisher.close()


def _refit_worker(number: int, endpoint: str, shapes: Shapes, versions: int, load: bool) -> None:
    receiver = Receiver(shapes, load)
    with Subscriber(endpoint, worker=f"bench {number}") as subscriber:
        while receiver.version < versions:
            with subscriber.next(TIMEOUT_S) as update:
                receiver.take(dict(update.tensors()))


# ---- pyzmq and pickle ----


class PickleWay:
    """The version pickled once, sent to each worker, acknowledged by each."""

    name = "pyzmq, pickled tensors"

    def __init__(
        self, processes: WorkerProcesses, count: int, weights: Weights, versions: int, load: bool
    ) -> None:
        import zmq

        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.RCVTIMEO, MILLISECONDS)
        self._socket.setsockopt(zmq.LINGER, 0)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        endpoint = f"tcp://127.0.0.1:{port}"
        processes.begin(count, _pickle_worker, endpoint, shapes_of(weights), versions, load)
        self._workers = [self._answer() for _ in range(count)]

    def _answer(self) -> bytes:
        worker: bytes = self._socket.recv_multipart()[0]
        return worker

    def send(self, weights: Weights) -> None:
        message = pickle.dumps(weights, protocol=pickle.HIGHEST_PROTOCOL)
        for worker in self._workers:
            self._socket.send_multipart([worker, message], copy=False)
        for _ in self._workers:
            self._answer()

    def close(self) -> None:
        self._context.destroy(linger=0)


def _pickle_worker(number: int, endpoint: str, shapes: Shapes, versions: int, load: bool) -> None:
    import zmq

    receiver = Receiver(shapes, load)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.RCVTIMEO, MILLISECONDS)
        socket.connect(endpoint)
        socket.send(b"ready")
        while receiver.version < versions:
            frame: Any = socket.recv(copy=False)
            receiver.take(pickle.loads(frame.buffer))
            socket.send(b"done")


# ---- torch.distributed ----


class GlooWay:
    """A broadcast for each tensor, into tensors that the workers have, and a barrier."""

    name = "torch.distributed, gloo"

    def __init__(
        self, processes: WorkerProcesses, count: int, weights: Weights, versions: int, load: bool
    ) -> None:
        store = _store(0, is_master=True)
        processes.begin(count, _gloo_worker, store.port, count + 1, shapes_of(weights), versions)
        self._store = store
        _join_group(store, 0, count + 1)

    def send(self, weights: Weights) -> None:
        import torch.distributed as distributed

        for it in weights.values():
            distributed.broadcast(it, src=0)
        distributed.barrier()

    def close(self) -> None:
        import torch.distributed as distributed

        distributed.destroy_process_group()


def _gloo_worker(number: int, port: int, world: int, shapes: Shapes, versions: int) -> None:
    import torch.distributed as distributed

    receiver = Receiver(shapes, load=False)
    own = blank(shapes)
    _join_group(_store(port, is_master=False), number + 1, world)
    while receiver.version < versions:
        for it in own.values():
            distributed.broadcast(it, src=0)
        receiver.take(own)
        distributed.barrier()
    distributed.destroy_process_group()


def _store(port: int, is_master: bool) -> Any:
    """Where the group finds itself; any free port for the trainer."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore("127.0.0.1", port, is_master=is_master, wait_for_workers=False)


def _join_group(store: Any, rank: int, world: int) -> None:
    import torch.distributed as distributed

    limit = timedelta(seconds=TIMEOUT_S)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)


WAYS: tuple[type[Way], ...] = (RefitWay, PickleWay, GlooWay)
