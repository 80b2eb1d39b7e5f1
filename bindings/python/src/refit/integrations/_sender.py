"""A trainer's end, as frameworks need it: a stream of (name, tensor) becomes one version.

Frameworks give a generator that is run once per refit, and on every rank, since making its tensors
is a collective. Two things follow. Names, types and shapes are known only once it has run: the
first version is gathered in host memory, later ones are written as they come. And whatever fails
here, the generator is run to its end, so that no other rank waits for this one.

It knows no framework.
"""

import asyncio
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from refit.errors import CancelledError, StateError

if TYPE_CHECKING:
    from refit.weights.publisher import Publisher

Named = Iterable[tuple[str, Any]]


class Sender:
    """A publisher, and whether it knows the weights' names already. Borrows it. One thread."""

    def __init__(self, publisher: "Publisher") -> None:
        self.publisher = publisher
        self._declared = bool(publisher.declared)

    def send(self, weights: Named, version: int | None = None) -> int:
        """Publishes `weights` as one version and returns its number; blocks until it is applied.

        Runs `weights` to its end, whatever happens. On an exception the version is aborted, and
        workers keep the one before. Raises what Publisher raises, and what `weights` does.
        """
        left = iter(weights)
        try:
            ready = self._declare(left)
            self._begin(version)
            self.publisher.write_all(ready)
            self.publisher.commit()
        except BaseException:
            self._give_up()
            raise
        finally:
            run_to_the_end(left)
        return self.publisher.version

    async def send_from_loop(self, weights: Named, version: int | None = None) -> int:
        """As send, on an event loop: what only waits for workers does so beside it, on a thread of
        the loop's own executor, so that a worker on the same loop gets its turn. `weights` is run
        on the loop's thread, where the current device is the caller's.
        """
        left = iter(weights)
        try:
            ready = self._declare(left)
            await self.run_in_thread(self._begin, version)
            for one in [ready] if isinstance(ready, list) else ([pair] for pair in ready):
                await self.run_in_thread(_on_current_stream(self.publisher.write_all), one)
            await self.run_in_thread(self.publisher.commit)
        except BaseException:
            self._give_up()
            raise
        finally:
            run_to_the_end(left)
        return self.publisher.version

    async def run_in_thread(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a call of the publisher that blocks, on a thread of the loop's executor. Cancelling
        ends the call, and returns when it has ended: a publisher is one thread's at a time."""
        running = asyncio.ensure_future(asyncio.to_thread(call, *arguments))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            self.publisher.cancel()
            await asyncio.wait([running])
            with suppress(CancelledError):  # one that came too late is not to end the next call
                self.publisher.wait_workers(0, 0)
            raise

    def _declare(self, weights: Iterator[tuple[str, Any]]) -> Named:
        if self._declared:
            return weights
        gathered = [(name, _on_host(tensor)) for name, tensor in weights]
        self.publisher.declare(gathered)
        self._declared = True
        return gathered

    def _begin(self, version: int | None) -> None:
        # A used number (a restarted trainer counts from 1 again) is replaced by the next one.
        usable = version is not None and version > self.publisher.version
        self.publisher.begin(version if usable else None)

    def _give_up(self) -> None:
        """Drops the version, if one is open: a commit that failed has done so. The next one
        declares its names again, since these may be the cause of the failure."""
        self._declared = False
        with suppress(StateError):
            self.publisher.abort()


def _on_current_stream(call: Callable[..., Any]) -> Callable[..., Any]:
    """The call with PyTorch's current stream as it is here: the current one is each thread's own,
    and what was made here is read after what is queued there."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return call
    stream = torch.cuda.current_stream()

    def run(*arguments: Any) -> Any:
        with torch.cuda.stream(stream):
            return call(*arguments)

    return run


def run_to_the_end(weights: Iterator[Any]) -> None:
    """Takes part in what other ranks do together; what comes is dropped."""
    for _ in weights:
        pass


def _on_host(tensor: Any) -> Any:
    """A copy in host memory, since the generator may use the tensor's memory again."""
    return tensor.detach().to("cpu", copy=True)
