"""Weights reach an engine process on the trainer's GPU: by refit, and by PyTorch alone.

A version is timed from the trainer's call until the engine has copied it into tensors of its own,
its GPU is done, and it has said so. That every tensor is of the right version is looked at outside
the time. Each way is in its simplest correct form; refit's is the only one that compares digests.
On the CPU the ways work as well, which is for tests: PyTorch shares host memory then.
"""

import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol, Self

import torch
import torch.multiprocessing  # with it ForkingPickler sends where a tensor is, and not its bytes

from refit.bench.device_memory import free_bytes, is_gpu, synchronize
from refit.bench.memory import MemoryNeed
from refit.bench.series import Series
from refit.bench.states import shapes
from refit.bench.ways import MILLISECONDS, Shapes, Weights, blank, change, shapes_of
from refit.bench.workers import TIMEOUT_S, WorkerProcesses
from refit.observe import memory_now
from refit.weights.publisher import Publisher
from refit.weights.subscriber import Subscriber

PARAMETERS = 1.5e9
BUCKET_BYTES = 512 << 20
SLOW_ROUNDS = 3
NEED = MemoryNeed("weights", 2 * 4, 1 << 30)  # on the host: what is pickled, at both ends


class Way(Protocol):
    """A trainer's half, which has begun the engine's half when it is open."""

    name: str
    is_slow: bool
    """A version takes seconds: few rounds are enough."""

    def __init__(self, processes: WorkerProcesses, weights: Weights, versions: int) -> None: ...

    def send(self, weights: Weights) -> None:
        """One version; returns once the engine has it whole."""

    def close(self) -> None:
        """Gives back what it took."""


def measure(parameters: float, rounds: int, device: str) -> dict[str, Any]:
    """All ways to one engine on ``device``."""
    fits = NEED.fitting(min(parameters, PARAMETERS), memory_now.available_bytes())
    weights = {name: it.to(device) for name, it in blank(dict(shapes(fits))).items()}
    nbytes = sum(it.nbytes for it in weights.values())
    with WorkerProcesses(1) as processes:
        processes.begin(1, _warm, device)
        processes.end(1)
        found = {way.name: _time(way, processes, weights, rounds, nbytes) for way in WAYS}
    return {
        "bench": "gpu_weights",
        "device": device if not is_gpu(device) else torch.cuda.get_device_name(device),
        "parameters": sum(it.numel() for it in weights.values()),
        "tensors": len(weights),
        "bytes": nbytes,
        "rounds": rounds,
        "ways": [
            {
                "way": name,
                **series.figures(),
                **series.cold_figure(),
                "gbps": series.gbps(nbytes),
                "over_handles": series.median / found[HandlesWay.name][0].median,
                "device_bytes": taken,
            }
            for name, (series, taken) in found.items()
        ],
    }


def _time(
    make: type[Way], processes: WorkerProcesses, weights: Weights, rounds: int, nbytes: int
) -> tuple[Series, int]:
    """A cold version and one for each round; and the device memory besides both ends' weights."""
    device = next(iter(weights.values())).device
    rounds = min(rounds, SLOW_ROUNDS) if make.is_slow else rounds
    for it in weights.values():
        numbers = it.view(torch.int16).view(-1)
        numbers.sub_(numbers[0].clone())  # the first element counts versions
    before = free_bytes(device)
    way = make(processes, weights, rounds + 1)
    series, taken = Series(), 0
    try:
        for _ in range(rounds + 1):
            change(weights)
            synchronize(device)
            start = time.perf_counter()
            way.send(weights)
            series.add(time.perf_counter() - start)
            taken = max(taken, before - free_bytes(device) - nbytes)
        processes.end(1)
    finally:
        way.close()
    return series, max(taken, 0)


# ---- The engine's process


def _warm(_number: int, device: str) -> None:
    """Takes what a process takes of a GPU before it has any weights."""
    torch.ones(1, device=device)
    synchronize(device)


class Engine:
    """Its own weights, and what it has been given."""

    def __init__(self, known: Shapes, device: str) -> None:
        self.device = device
        self.own = {name: it.to(device) for name, it in blank(known).items()}
        self.version = 0

    def copy(self, weights: Weights | Iterator[tuple[str, torch.Tensor]]) -> None:
        """All of them, and waits for the GPU."""
        for name, it in weights.items() if isinstance(weights, dict) else weights:
            self.own[name].copy_(it)
        synchronize(self.device)

    def check(self) -> None:
        """RuntimeError if a tensor is not of the next version."""
        self.version += 1
        first = torch.stack([it.view(torch.int16).view(-1)[0] for it in self.own.values()])
        if set(first.tolist()) != {self.version}:
            raise RuntimeError(f"version {self.version} came as {sorted(set(first.tolist()))}")

    def close(self) -> None:
        """PyTorch gives the memory back to the driver."""
        self.own.clear()
        if is_gpu(self.device):
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()


class Line:
    """Messages between the trainer and the engine, over ZeroMQ."""

    def __init__(self, address: str | None = None) -> None:
        import zmq

        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.RCVTIMEO, MILLISECONDS)
        self._socket.setsockopt(zmq.LINGER, 0)
        if address is None:
            address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        else:
            self._socket.connect(address)
        self.address = address

    def send(self, message: Any = b"") -> None:
        self._socket.send(message, copy=False)

    def receive(self) -> Any:
        return self._socket.recv(copy=False).buffer

    def ask(self, message: Any = b"") -> None:
        """Sends, and waits for the answer."""
        self.send(message)
        self.receive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)


Take = Callable[[Line, "Engine"], None]
"""Takes one version by a line, and answers."""


def _serve(
    _number: int,
    address: str,
    known: Shapes,
    device: str,
    versions: int,
    open_: Callable[..., Take],
) -> None:
    """An engine's half: ``open_`` is given the line and gives what takes a version."""
    engine = Engine(known, device)
    with Line(address) as line:
        line.send()
        take = open_(line, known)
        while engine.version < versions:
            take(line, engine)
            engine.check()
        del take  # and what it holds of the trainer's memory
    engine.close()


class _LineWay:
    """A way whose halves talk by a line. ``open_`` is what its engine does first."""

    name: str
    is_slow = False
    open_: Callable[..., Take]

    def __init__(self, processes: WorkerProcesses, weights: Weights, versions: int) -> None:
        self.line = Line()
        device = str(next(iter(weights.values())).device)
        arguments = (self.line.address, shapes_of(weights), device, versions, type(self).open_)
        processes.begin(1, _serve, *arguments)
        self.line.receive()

    def close(self) -> None:
        self.line.__exit__()


# ---- refit


class RefitWay:
    """``Publisher.publish``, and ``Update.load_into``; digests are compared."""

    name = "refit"
    is_slow = False

    def __init__(self, processes: WorkerProcesses, weights: Weights, versions: int) -> None:
        device = str(next(iter(weights.values())).device)
        self._publisher = Publisher("user://*", device=device if is_gpu(device) else None)
        processes.begin(
            1, _refit_engine, self._publisher.endpoint, shapes_of(weights), device, versions
        )
        self._publisher.wait_workers(1, TIMEOUT_S)

    def send(self, weights: Weights) -> None:
        self._publisher.publish(weights)

    def close(self) -> None:
        self._publisher.close()


class RefitRingWay(RefitWay):
    """The same from an iterator, as of weights that are gathered: they are streamed."""

    name = "refit, from an iterator"

    def __init__(self, processes: WorkerProcesses, weights: Weights, versions: int) -> None:
        super().__init__(processes, weights, versions)
        self._publisher.declare(weights)

    def send(self, weights: Weights) -> None:
        self._publisher.publish(iter(weights.items()))


def _refit_engine(_number: int, endpoint: str, known: Shapes, device: str, versions: int) -> None:
    engine = Engine(known, device)
    on = device if is_gpu(device) else None
    with Subscriber(endpoint, worker="engine", device=on) as subscriber:
        while engine.version < versions:
            with subscriber.next(TIMEOUT_S) as update:
                update.load_into(engine.own)
            engine.check()
    engine.close()


# ---- The parameters themselves, by PyTorch's IPC handles


def _open_handles(line: Line, known: Shapes) -> Take:
    shared = dict(zip(known, pickle.loads(line.receive()), strict=True))
    line.send()

    def take(line: Line, engine: Engine) -> None:
        line.receive()
        engine.copy(shared)
        line.send()

    return take


class HandlesWay(_LineWay):
    """The engine is given the handles of the parameters once, and copies from them."""

    name = "torch IPC, parameters"
    open_ = _open_handles

    def __init__(self, processes: WorkerProcesses, weights: Weights, versions: int) -> None:
        super().__init__(processes, weights, versions)
        self.line.ask(ForkingPickler.dumps(list(weights.values())))

    def send(self, weights: Weights) -> None:
        self.line.ask()


# ---- Buckets, by an IPC handle


def _buckets(known: Shapes) -> list[list[tuple[str, int, int]]]:
    """Names, offsets and bytes, bucket by bucket. A larger tensor has a bucket of its own."""
    found: list[list[tuple[str, int, int]]] = [[]]
    end = 0
    for name, shape in known.items():
        nbytes = 2 * torch.Size(shape).numel()
        if end + nbytes > BUCKET_BYTES and found[-1]:
            found.append([])
            end = 0
        found[-1].append((name, end, nbytes))
        end += (nbytes + 511) // 512 * 512
    return found


def _in_bucket(
    bucket: torch.Tensor, entries: Sequence[tuple[str, int, int]], known: Shapes
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, begin, nbytes in entries:
        yield name, bucket[begin : begin + nbytes].view(torch.bfloat16).view(known[name])


def _open_bucket(line: Line, known: Shapes) -> Take:
    bucket = pickle.loads(line.receive())
    line.send()

    def take(line: Line, engine: Engine) -> None:
        for entries in _buckets(known):
            line.receive()
            engine.copy(_in_bucket(bucket, entries, known))
            line.send()

    return take


class BucketWay(_LineWay):
    """Tensors are packed into a bucket, from which the engine copies, and then the next ones."""

    name = "torch IPC, 512 MiB buckets"
    open_ = _open_bucket

    def __init__(self, processes: WorkerProcesses, weights: Weights, versions: int) -> None:
        super().__init__(processes, weights, versions)
        self._known = shapes_of(weights)
        self._device = next(iter(weights.values())).device
        room = max(one[-1][1] + one[-1][2] for one in _buckets(self._known))
        self._bucket = torch.empty(room, dtype=torch.uint8, device=self._device)
        self.line.ask(ForkingPickler.dumps(self._bucket))

    def send(self, weights: Weights) -> None:
        for entries in _buckets(self._known):
            for name, place in _in_bucket(self._bucket, entries, self._known):
                place.copy_(weights[name])
            synchronize(self._bucket.device)
            self.line.ask()

    def close(self) -> None:
        super().close()
        del self._bucket
        if is_gpu(self._device):
            torch.cuda.empty_cache()


# ---- Over the host, pickled


def _open_pickles(_line: Line, _known: Shapes) -> Take:
    def take(line: Line, engine: Engine) -> None:
        engine.copy(pickle.loads(line.receive()))
        line.send()

    return take


class PickleWay(_LineWay):
    """Copied to the host, pickled, sent, and copied to the GPU again."""

    name = "pyzmq, pickled host tensors"
    is_slow = True
    open_ = _open_pickles

    def send(self, weights: Weights) -> None:
        on_host = {name: it.cpu() for name, it in weights.items()}
        self.line.ask(pickle.dumps(on_host, protocol=pickle.HIGHEST_PROTOCOL))


WAYS: tuple[type[Way], ...] = (RefitWay, RefitRingWay, HandlesWay, BucketWay, PickleWay)
