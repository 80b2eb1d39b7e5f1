"""What the processes of test_broadcast_processes.py do. Neither torch nor NumPy is needed."""

import hashlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from broadcasting import wait_until
from refit.errors import RefitError
from refit.manifest import Typed
from refit.publisher import Publisher
from refit.subscriber import Subscriber
from refit.update import Update

PATIENCE = 60.0


def weights_of(version: int, nbytes: int = 300_000) -> dict[str, Typed]:
    """Weights that differ in every version: two tensors and a small one."""
    seed = hashlib.sha256(str(version).encode()).digest()
    return {
        "layer.0": Typed(seed * (nbytes // 32), "U8", (nbytes // 32 * 32,)),
        "layer.1": Typed(seed[::-1] * (nbytes // 64), "F16", (nbytes // 64, 16)),
        "bias": Typed(seed[:4], "F32", ()),
    }


def digest(named: Mapping[str, Any]) -> str:
    """One digest of names and bytes."""
    whole = hashlib.sha256()
    for name, memory in named.items():
        whole.update(name.encode())
        whole.update(memory)
    return whole.hexdigest()


def expected(version: int) -> str:
    """The digest of ``weights_of``."""
    return digest({name: typed.memory for name, typed in weights_of(version).items()})


def received(update: Update) -> str:
    """The digest of an update, read where it lies."""
    return digest({view.name: view.bytes for view in update.views()})


def roll_out(
    endpoint: str, name: str, out: Connection, options: dict[str, Any], trouble: dict[int, str]
) -> None:
    """A worker that tells of every version, until the trainer's side closes ``out``.

    ``trouble``: what happens to it in which version: "raise", "hang" (until it is killed).
    """
    with Subscriber(endpoint, worker=name, **options) as subscriber:
        threading.Thread(target=_wake_at_end, args=(out, subscriber), daemon=True).start()
        for update in subscriber:
            try:
                with update:
                    seen = received(update)
                    kind = trouble.get(update.version)
                    if kind == "raise":
                        raise RuntimeError(f"{name} cannot load version {update.version}")
                    if kind == "hang":
                        out.send((name, update.version, "hangs", usage()))
                        signal.pause()
            except RuntimeError as why:
                out.send((name, update.version, str(why), usage()))
            else:
                epoch = subscriber.describe().epoch
                out.send((name, update.version, seen, {**usage(), "epoch": epoch}))


def _wake_at_end(out: Connection, subscriber: Subscriber) -> None:
    out.poll(None)
    subscriber.wake()


def usage() -> dict[str, int]:
    """What this process has now: resident bytes and open descriptors."""
    with open("/proc/self/statm") as figures:
        pages = int(figures.read().split()[1])
    return {"rss": pages * os.sysconf("SC_PAGE_SIZE"), "fds": len(os.listdir("/proc/self/fd"))}


def roll_out_until_idle(endpoint: str, name: str, out: Connection, options: dict[str, Any]) -> None:
    """A worker's loop as the README shows it, and what it tells when that has ended."""
    for update in Subscriber(endpoint, worker=name, **options):
        with update:
            seen = received(update)
        out.send((name, os.getpid(), seen))
    out.send((name, os.getpid(), "ended"))


def train_with_workers(out: Connection, options: dict[str, Any]) -> None:
    """A trainer whose workers are daemons of its own; it publishes once and waits to be killed."""
    publisher = Publisher("tcp://127.0.0.1:0", **options)
    spawn = multiprocessing.get_context("spawn")
    idle = {**options, "idle_timeout": 8}
    for name in ("w0", "w1"):
        arguments = (publisher.endpoint, name, out, idle)
        spawn.Process(target=roll_out_until_idle, args=arguments, daemon=True).start()
    publisher.wait_workers(2, PATIENCE)
    publisher.publish(weights_of(1))
    signal.pause()


def train(endpoint: str, versions: int, workers: int, out: Connection) -> None:
    """A trainer that publishes so many versions, tells of it, and then waits to be killed."""
    publisher = Publisher(endpoint)
    out.send(publisher.endpoint)
    publisher.wait_workers(workers, PATIENCE)
    for version in range(1, versions + 1):
        publisher.publish(weights_of(version))
    out.send(publisher.version)
    signal.pause()


# ---- Waits that Ctrl-C ends: each is run as a program, and prints what became of it


class Stuck:
    """A trainer and a worker that holds its update, in one process."""

    def __init__(self, **options: Any) -> None:
        self.publisher = Publisher("tcp://127.0.0.1:0", **options)
        self.subscriber = Subscriber(self.publisher.endpoint, worker="stuck")
        self.publisher.wait_workers(1, PATIENCE)
        self.go_on = threading.Event()

    def hold(self, accept: bool) -> None:
        """Takes one update and keeps it; sends Ctrl-C once it has it."""
        try:
            update = self.subscriber.next(PATIENCE)
            if accept:
                update.accept()
            else:
                os.kill(os.getpid(), signal.SIGINT)
            self.go_on.wait(PATIENCE)
            update.close()
        except RefitError as why:
            print("worker", why, flush=True)

    def run(self, wait: Any, accept: bool) -> None:
        """Runs ``wait`` with the worker on its thread; afterwards the next version must pass."""
        worker = threading.Thread(target=self.hold, args=(accept,))
        worker.start()
        try:
            wait(self.publisher)
        except KeyboardInterrupt:
            print("interrupted at version", self.publisher.version, flush=True)
        self.go_on.set()
        worker.join()
        self.subscriber.close()
        wait_until(lambda: self.publisher.stats()["workers"] == 0)  # its farewell has come
        print("then", self.publisher.publish(weights_of(9)), flush=True)
        self.publisher.close()


def interrupt_commit() -> None:
    """Ctrl-C while a worker has the version and has not decided."""
    Stuck().run(lambda publisher: publisher.publish(weights_of(1)), accept=False)


def interrupt_begin() -> None:
    """Ctrl-C while the only slot is still read."""

    def wait(publisher: Publisher) -> None:
        publisher.publish(weights_of(1))
        print("waits", flush=True)
        publisher.publish(weights_of(2))

    Stuck(broadcast_slots=1).run(wait, accept=True)


def interrupt_wait_workers() -> None:
    """Ctrl-C while no worker comes."""
    with Publisher("tcp://127.0.0.1:0") as publisher:
        try:
            print("waits", flush=True)
            publisher.wait_workers(1, PATIENCE)
        except KeyboardInterrupt:
            print("interrupted at version", publisher.version, flush=True)
        print("then", publisher.publish(weights_of(9)), flush=True)


def interrupt_next() -> None:
    """Ctrl-C while there is no trainer."""
    with Subscriber("tcp://127.0.0.1:9") as subscriber:
        try:
            print("waits", flush=True)
            subscriber.next()
        except KeyboardInterrupt:
            print("interrupted at version", subscriber.describe().version, flush=True)
        print("then", subscriber.describe().state, flush=True)


def interrupt_loop() -> None:
    """Ctrl-C in a worker's loop."""
    with Subscriber("tcp://127.0.0.1:9") as subscriber:
        try:
            print("waits", flush=True)
            for _ in subscriber:
                raise AssertionError
        except KeyboardInterrupt:
            print("interrupted at version", subscriber.describe().version, flush=True)
        print("then", subscriber.describe().state, flush=True)


def fork_with_live_objects() -> None:
    """A forked child is refused, and closing in it does not touch the parent's."""
    publisher = Publisher("tcp://127.0.0.1:0")
    subscriber = Subscriber(publisher.endpoint)
    publisher.wait_workers(1, PATIENCE)
    child = os.fork()
    if child == 0:
        for call in (lambda: publisher.publish(weights_of(1)), lambda: subscriber.next(0)):
            try:
                call()
            except RefitError as why:
                print(type(why).__name__, why, flush=True)
        publisher.close()
        subscriber.close()
        os._exit(0)
    os.waitpid(child, 0)
    worker = threading.Thread(target=take_one, args=(subscriber,))
    worker.start()
    print("then", publisher.publish(weights_of(1)), flush=True)
    worker.join()
    subscriber.close()
    publisher.close()


def take_one(subscriber: Subscriber) -> None:
    """Accepts one version."""
    with subscriber.next(PATIENCE) as update:
        print("took", received(update) == expected(update.version), flush=True)


def publish_without_libraries() -> None:
    """A whole version with plain Python objects; prints which big libraries were imported."""
    import sys

    with Publisher("tcp://127.0.0.1:0") as publisher, Subscriber(publisher.endpoint) as subscriber:
        publisher.wait_workers(1, PATIENCE)
        worker = threading.Thread(target=take_one, args=(subscriber,))
        worker.start()
        publisher.publish(weights_of(1))
        worker.join()
    print("imported", [name for name in ("torch", "numpy", "zmq") if name in sys.modules])


def publish_beside_pyzmq() -> None:
    """A version between two sockets of pyzmq that are in use, with its own libzmq."""
    import zmq

    with zmq.Context() as context, context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as two:
        two.connect(f"tcp://127.0.0.1:{one.bind_to_random_port('tcp://127.0.0.1')}")
        publish_without_libraries()
        one.send(b"still here")
        print(two.recv().decode(), flush=True)


def load_with_torch(endpoint: str, device: str, out: Connection, options: dict[str, Any]) -> None:
    """A worker that loads versions into PyTorch tensors on ``device``; ends with ``out``."""
    import torch

    target = {"w": torch.zeros(256, 128, device=device), "b": torch.zeros(3, device=device)}
    with Subscriber(endpoint, worker="gpu", **options) as subscriber:
        subscriber.use_device(torch.device(device))
        threading.Thread(target=_wake_at_end, args=(out, subscriber), daemon=True).start()
        for update in subscriber:
            with update:
                update.load_into(target)
                where, path = update.device, subscriber.describe().path
            sums = [float(tensor.double().sum()) for tensor in target.values()]
            out.send((update.version, where, path, sums))
