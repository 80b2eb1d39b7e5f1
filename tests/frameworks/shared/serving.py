"""A framework's server, as a process that tests drive by HTTP."""

import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

START_S = 480.0


class Served(NamedTuple):
    url: str
    process: "subprocess.Popen[bytes]"

    def end(self) -> None:
        """Ends it, and its engine with it. Idempotent."""
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def await_health(self) -> None:
        end = time.monotonic() + START_S
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=10):
                    return
            except OSError:
                assert self.process.poll() is None, "the server ended"
                assert time.monotonic() < end, f"the server is not up after {START_S} s"
                time.sleep(0.5)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def served(
    command: Callable[[int], list[str]], env: dict[str, str] | None = None
) -> Iterator[Served]:
    """The server that the command starts at a port, once it answers, until the block ends."""
    port = free_port()
    one = Served(f"http://127.0.0.1:{port}", subprocess.Popen(command(port), env=env))
    try:
        one.await_health()
        yield one
    finally:
        one.end()
