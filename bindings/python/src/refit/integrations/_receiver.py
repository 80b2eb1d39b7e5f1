"""A worker's end, as inference engines need it: one version in hand until the engine is done.

Engines keep references to the tensors they are given: vLLM's layerwise reload until a layer is
complete, which may be long after the call that brought them. So a version is accepted when all of
it is loaded, and its memory is let go later: at ``let_go``, or when the next version is taken. That
holds for memory of the host. What the trainer lends on a GPU ends with the acceptance: only an
engine that has read all by then subscribes with a device.

A load that fails is refused in the trainer's report, with the words of the exception, and counts as
holding nothing: part of the model may be new by then. It knows no engine.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn

from refit.errors import ClosedError, DeadlineError, StateError

if TYPE_CHECKING:
    from refit.weights.parts import Parts
    from refit.weights.subscriber import Subscriber
    from refit.weights.update import Update

TIMEOUT_S = 600.0
"""How long a worker waits for a version where its framework says nothing: a trainer that is gone is
then reported, instead of an engine that hangs."""

ABSENT_S = 30.0
"""How long a worker goes on to wait for a version while no trainer is there: the one that asked for
the update is dead then, and the engine has requests to serve."""

_WORTH = 0.9
"""Of a version: a loader that reads more is given all."""

LOOK_S = 1.0
"""How often a wait looks whether there is a trainer."""


def subscribe(
    endpoint: str, worker: str | None = None, config: Any = None, *, device: Any = "auto"
) -> "Receiver":
    """Subscribes at `endpoint`; returns at once, whether or not the trainer is there. `device`: as
    Subscriber takes it; None for an engine that reads on after it has accepted."""
    from refit.weights.subscriber import Subscriber

    return Receiver(
        lambda: Subscriber(endpoint, worker=worker, config=config, device=device), endpoint
    )


class Receiver:
    """A subscriber, the version in hand, and the number of the one that was loaded whole.

    It owns the subscriber. One thread at a time.
    """

    def __init__(self, subscriber: Callable[[], "Subscriber"], endpoint: str) -> None:
        self.subscriber = subscriber()
        self.endpoint = endpoint
        self.version = 0
        self._make_subscriber = subscriber
        self._answered = (0, 0)
        """The epoch and the version to which this subscription gave its last answer."""
        self._update: Update | None = None
        self._needed: Parts | None = None
        self._kept = False
        self._end_wait: Callable[[], None] | None = None

    def take(
        self,
        version: int | None = None,
        timeout: float | None = None,
        absent: float | None = None,
    ) -> "Update":
        """The next version, which is at least `version`; blocks, at most `timeout` seconds (None:
        TIMEOUT_S), and at most `absent` seconds in which no trainer is there (None: no such
        limit).

        What was in hand is let go first. A version that was applied or refused here before comes
        again, to a subscription of its own, unless the trainer had lent it. Versions below the one
        wanted are refused as they come (the engine keeps what it has). DeadlineError, and what
        Subscriber.next raises.
        """
        self.let_go()
        end = time.monotonic() + (TIMEOUT_S if timeout is None else timeout)
        offered = None
        while True:
            try:
                update = self._next(end, absent, version)
            except DeadlineError as why:
                _raise_late(why, version, offered)
            if version is None or update.version >= version:
                return update
            offered = update.version
            self._pass_below(update, version)

    def await_trainer(self, timeout: float) -> None:
        """Waits until a trainer has welcomed this worker; DeadlineError after `timeout` seconds."""
        end = time.monotonic() + timeout
        while not self.subscriber.describe().connected:
            if time.monotonic() >= end:
                raise DeadlineError(f"{self._absence()} after {timeout:g} s")
            time.sleep(0.02)

    async def arrival(self, timeout: float | None = None, version: int | None = None) -> "Update":
        """As take, on an event loop: others run meanwhile. Uses no thread.
        StateError if it is closed meanwhile, on this loop."""
        self.let_go()
        end = time.monotonic() + (TIMEOUT_S if timeout is None else timeout)
        offered = None
        while True:
            try:
                update = self.subscriber.next(0)
            except ClosedError:
                self.join_again(kept=True)
                continue
            except DeadlineError as why:
                if time.monotonic() >= end:
                    _raise_late(why, version, offered)
                await self._readable(self.subscriber.fileno(), end)
                continue
            if version is None or update.version >= version:
                return update
            offered = update.version
            self._pass_below(update, version)

    def join_again(self, *, kept: bool) -> None:
        """Leaves and comes back, so that the trainer sends its version whole. `kept`: the engine
        goes on with the version that it has until then. A version that was lent does not come
        again: the next one does."""
        self.let_go()
        self.subscriber.close()
        self.subscriber = self._make_subscriber()
        if self._needed is not None:
            self.subscriber.select(self._needed)
        self._answered = (0, 0)
        if not kept:
            self.version = 0

    def need(self, parts: "Parts | None") -> None:
        """Takes of each version from now on what a recorded loader reads, where that is less than
        most of it and the bytes travel; None: all. A version that is in hand must have been let go.
        """
        if parts is self._needed:
            return
        if parts is not None:
            travels = self.subscriber.describe().path in ("socket", "neighbor")
            if parts.digest is None or not travels or parts.share > _WORTH:
                parts = None
        if parts is not self._needed:
            self.subscriber.select(parts)
            self._needed = parts

    def pass_over(self, update: "Update", reason: str, *, kept: bool = True) -> None:
        """Refuses an update that was taken and not loaded, and closes it. `kept`: as in refuse."""
        self._answer(update.version)
        try:
            update.refuse(reason, kept=kept)
        finally:
            update.close()

    @contextmanager
    def loading(self, update: "Update") -> Iterator["Update"]:
        """Accepts `update` when the block ends; refuses it if it fails, with nothing kept, unless
        the block has said ``keep``.

        On the host the update stays readable until ``let_go``.
        """
        if self._update is not None:
            raise StateError(f"version {self._update.version} is still in hand: let it go first")
        self._update = update
        before, self.version = self.version, 0
        self._kept = False
        try:
            yield update
        except BaseException as why:
            if self._kept:
                self.version = before
            self._refuse(update, _reason(why), self._kept)
            raise
        try:
            update.accept()
        except BaseException:
            self.let_go()
            raise
        self.version = update.version
        self._answer(update.version)

    def keep(self) -> None:
        """Says, within ``loading``, that the engine still has the version before, should the block
        fail."""
        self._kept = True

    def let_go(self) -> None:
        """Ends the views of the version in hand; nothing may read them any more. Idempotent."""
        update, self._update = self._update, None
        if update is not None:
            update.close()

    def close(self) -> None:
        """Lets go and leaves. Idempotent."""
        if self._end_wait is not None:
            self._end_wait()  # before its descriptor may become that of something else
        self.let_go()
        self.subscriber.close()

    def _next(self, end: float, absent: float | None, version: int | None) -> "Update":
        """The next update, before the time `end` and before a trainer was away for `absent`."""
        heard = time.monotonic()
        while True:
            if self._has_answered(version):  # at every look: the answer may be on its way at first
                self.join_again(kept=True)
            now = time.monotonic()
            if self.subscriber.describe().connected:
                heard = now
            last = end if absent is None else min(end, heard + absent)
            try:
                return self.subscriber.next(min(max(0.0, last - now), LOOK_S))
            except ClosedError:  # the engine outlives a training that has ended
                self.join_again(kept=True)
            except DeadlineError as why:
                if time.monotonic() < last:
                    continue
                if last < end:
                    raise DeadlineError(f"{self._absence()} for {absent:g} s") from why
                raise

    def _absence(self) -> str:
        return f'worker "{self.subscriber.describe().worker}" hears no trainer at {self.endpoint}'

    async def _readable(self, descriptor: int, end: float) -> None:
        """Until the descriptor polls readable, the time `end` of the monotonic clock has come, or
        this is closed."""
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()

        def stop() -> None:
            self._end_wait = None
            loop.remove_reader(descriptor)
            if not ready.done():
                ready.set_result(None)

        loop.add_reader(descriptor, stop)
        self._end_wait = stop
        try:
            await asyncio.wait([ready], timeout=max(0.0, end - time.monotonic()))
        finally:
            if self._end_wait is stop:
                stop()

    def _refuse(self, update: "Update", reason: str, kept: bool) -> None:
        self._update = None
        try:
            update.refuse(reason, kept=kept)
        finally:
            update.close()

    def _pass_below(self, update: "Update", wanted: int) -> None:
        self.pass_over(update, f"version {wanted} is waited for", kept=self.version > 0)

    def _has_answered(self, version: int | None) -> bool:
        """Whether `version` was applied or refused here, of the trainer that is there. It does not
        offer that one again to this subscription; ``join_again`` makes another."""
        there = self.subscriber.describe()
        return there.state == "current" and (there.epoch, version) == self._answered

    def _answer(self, version: int) -> None:
        self._answered = (self.subscriber.describe().epoch, version)


def _raise_late(why: DeadlineError, wanted: int | None, offered: int | None) -> NoReturn:
    """Raises `why`, with the version that came instead of the one that was wanted."""
    if offered is None:
        raise why
    raise DeadlineError(
        f"{why}: version {wanted} is waited for, and {offered} was refused"
    ) from why


def _reason(why: BaseException) -> str:
    if isinstance(why, GeneratorExit | asyncio.CancelledError):
        return "the engine stopped before it had read all weights: its own log says why"
    return words_of(why)


_AT = 'at weight "'


@contextmanager
def naming(weights: Iterable[tuple[str, Any]]) -> Iterator[Iterator[tuple[str, Any]]]:
    """The weights for a model that loads them within the block, one after the other. What it raises
    before it has taken all of them gets a note that names the last one: engines raise sizes, and no
    names."""
    last = ""

    def each() -> Iterator[tuple[str, Any]]:
        nonlocal last
        for name, tensor in weights:
            last = name
            yield name, tensor
        last = ""

    try:
        yield each()
    except Exception as why:
        if last:
            with suppress(Exception):  # some exceptions take no notes
                why.add_note(f'{_AT}{last}"')
        raise


def words_of(why: BaseException) -> str:
    """An exception as one text, after the weight that ``naming`` has noted."""
    notes = [one for one in getattr(why, "__notes__", ()) if str(one).startswith(_AT)]
    return ": ".join([*notes[-1:], type(why).__name__, str(why)])
