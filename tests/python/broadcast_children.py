"""What the processes of test_broadcast_processes.py do. Neither torch nor NumPy is needed."""

import hashlib
import os
import signal
import threading
from multiprocessing.connection import Connection
from typing import Any

from broadcasting import LOCAL, TIMEOUT, UNHURRIED, Trainer, contents
from refit.weights.publisher import Publisher
from refit.weights.subscriber import Subscriber


def weights_of(version: int) -> dict[str, bytes]:
    """Weights that differ in every version: two tensors and a small one."""
    seed = hashlib.sha256(str(version).encode()).digest()
    return {"layer.0": seed * 10_000, "layer.1": seed[::-1] * 5_000, "bias": seed[:4]}


def usage() -> dict[str, int]:
    """What this process has now: resident bytes and open descriptors."""
    with open("/proc/self/statm") as figures:
        pages = int(figures.read().split()[1])
    return {"rss": pages * os.sysconf("SC_PAGE_SIZE"), "fds": len(os.listdir("/proc/self/fd"))}


def wake_at_end(out: Connection, subscriber: Subscriber) -> None:
    """Once the trainer's side closes ``out``."""

    def wake() -> None:
        out.poll(None)
        subscriber.wake()

    threading.Thread(target=wake, daemon=True).start()


def train(out: Connection) -> None:
    """A trainer of two workers, which publishes once and waits to be killed."""
    with Publisher(LOCAL, **UNHURRIED) as publisher:
        out.send(publisher.endpoint)
        publisher.wait_workers(2, TIMEOUT)
        publisher.publish(weights_of(1))
        signal.pause()


def roll_out(endpoint: str, name: str, out: Connection, options: dict[str, Any]) -> None:
    """A worker that tells of every version, until the trainer's side closes ``out``."""
    with Subscriber(endpoint, worker=name, **options) as subscriber:
        wake_at_end(out, subscriber)
        for update in subscriber:
            with update:
                seen = contents(update)
            out.send((update.version, seen, usage()))


def load_with_torch(endpoint: str, device: str, out: Connection, options: dict[str, Any]) -> None:
    """A worker that loads versions into PyTorch tensors on ``device``; ends with ``out``."""
    import torch

    target = {"w": torch.zeros(256, 128, device=device), "b": torch.zeros(3, device=device)}
    with Subscriber(endpoint, worker="gpu", **options) as subscriber:
        subscriber.use_device(torch.device(device))
        wake_at_end(out, subscriber)
        for update in subscriber:
            with update:
                update.load_into(target)
                where, path = update.device, subscriber.describe().path
            sums = [float(tensor.double().sum()) for tensor in target.values()]
            out.send((update.version, where, path, sums))


def publish_without_libraries() -> None:
    """A whole version with plain Python objects; prints which big libraries were imported."""
    import sys

    with (
        Publisher(LOCAL, **UNHURRIED) as publisher,
        Subscriber(publisher.endpoint, **UNHURRIED) as subscriber,
    ):
        publisher.wait_workers(1, TIMEOUT)
        trainer = Trainer(publisher, subscriber)
        with trainer.offer(weights_of(1)) as update:
            print("took", contents(update) == weights_of(1), flush=True)
        trainer.join()
    print("imported", [name for name in ("torch", "numpy", "zmq") if name in sys.modules])


def publish_with_pyzmq() -> None:
    """A version between two sockets of pyzmq that are in use, with its own libzmq."""
    import zmq

    with zmq.Context() as context, context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as two:
        two.connect(f"tcp://127.0.0.1:{one.bind_to_random_port('tcp://127.0.0.1')}")
        publish_without_libraries()
        one.send(b"still here")
        print(two.recv().decode(), flush=True)
