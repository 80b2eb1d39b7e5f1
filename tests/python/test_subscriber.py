"""A worker's end: waits and what ends them, one update at a time, and what goes wrong."""

import asyncio
import math
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from broadcasting import LOCAL, NOWHERE, ONE, TIMEOUT, UNHURRIED, Trainer, contents, wait_until
from refit._c.library import lib
from refit.errors import (
    CancelledError,
    ClosedError,
    ConfigError,
    DeadlineError,
    InvalidError,
    NotFoundError,
    SecurityError,
    StateError,
    UnsupportedError,
)
from refit.weights.publisher import Publisher
from refit.weights.subscriber import Subscriber

WHOLE = {"w": ONE["w"].tobytes()}


@pytest.fixture
def lonely() -> Iterator[Subscriber]:
    """One that has no trainer."""
    with Subscriber(NOWHERE) as opened:
        yield opened


def taken(subscriber: Subscriber) -> dict[str, bytes]:
    with subscriber.next(TIMEOUT) as update:
        return contents(update)


# ---- Waits


def test_a_timeout_says_whether_there_is_a_trainer(trainer: Trainer, lonely: Subscriber) -> None:
    with trainer.offer():
        pass  # so that it has joined
    trainer.join()
    for seconds in (0, 0.01):
        with pytest.raises(DeadlineError, match="the trainer is there"):
            trainer.subscriber.next(seconds)
    trainer.publisher.close()
    wait_until(lambda: not trainer.subscriber.describe().connected)
    with pytest.raises(TimeoutError, match="is gone, and this worker holds version 1"):
        trainer.subscriber.next(0)
    with pytest.raises(DeadlineError, match="no trainer has answered"):
        lonely.next(0.01)


def test_its_own_timeout_is_for_loops_and_for_waits_without_one(lonely: Subscriber) -> None:
    with Subscriber(NOWHERE, timeout=0.01) as subscriber:
        for wait in (subscriber.next, lambda: list(subscriber)):
            with pytest.raises(DeadlineError):
                wait()
    for bad in (-1, math.nan):
        with pytest.raises(InvalidError, match="a timeout of"):
            lonely.next(bad)


def test_worker_without_trainer_ends_its_loop_and_wait() -> None:
    quick: Any = {"broadcast_heartbeat_ms": "10ms", "broadcast_heartbeat_timeout_ms": "50ms"}
    with Subscriber(NOWHERE, idle_timeout=0.1, **quick) as subscriber:
        assert list(subscriber) == []
        for _ in range(2):
            with pytest.raises(ClosedError, match="no trainer was heard for 100 ms"):
                subscriber.next(0)


def test_a_trainer_that_ends_the_training_ends_all_loops_at_once() -> None:
    publisher = Publisher(LOCAL, **UNHURRIED)
    workers = [Subscriber(publisher.endpoint, **UNHURRIED) for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        loops = [pool.submit(list, worker) for worker in workers]
        publisher.wait_workers(6, TIMEOUT)
        publisher.close(end=True)
        assert [loop.result(TIMEOUT) for loop in loops] == [[]] * 6
    for worker in workers:
        with worker, pytest.raises(ClosedError, match="the training has ended"):
            worker.next(0)


TRAINER = "import refit; p = refit.Publisher({0!r}); print(p.endpoint, flush=True); input(); {1}"


@pytest.mark.parametrize(("last", "ends"), [("pass", True), ("1 / 0", False), ("p.close()", False)])
def test_a_process_that_exits_in_order_ends_the_training(last: str, ends: bool) -> None:
    command = [sys.executable, "-c", TRAINER.format(LOCAL, last)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, **pipes) as trainer:
        subscriber = Subscriber(trainer.stdout.readline().strip(), **UNHURRIED)
        wait_until(lambda: subscriber.describe().connected)
        trainer.communicate("\n", timeout=TIMEOUT)
    if not ends:  # it has said goodbye, and another one may come
        wait_until(lambda: not subscriber.describe().connected)
    with subscriber, pytest.raises(ClosedError if ends else DeadlineError):
        subscriber.next(TIMEOUT if ends else 0)


def test_a_loop_takes_version_after_version(trainer: Trainer) -> None:
    def train() -> None:
        for _ in range(3):
            trainer.publisher.publish(ONE)
        trainer.subscriber.wake()

    seen = []
    thread = threading.Thread(target=train)
    thread.start()
    for update in trainer.subscriber:
        with update:
            seen.append(update.version)
    thread.join()
    assert seen == [1, 2, 3]


def test_wake_ends_a_wait_of_another_thread_or_the_next_one_once(lonely: Subscriber) -> None:
    waker = threading.Thread(target=lonely.wake)
    waker.start()
    with pytest.raises(CancelledError):
        lonely.next(TIMEOUT)
    waker.join()
    with pytest.raises(DeadlineError):
        lonely.next(0)
    lonely.wake()
    assert list(lonely) == []


@pytest.mark.parametrize("looping", [False, True])
def test_close_in_another_thread_ends_a_wait(lonely: Subscriber, looping: bool) -> None:
    outcome: list[Any] = []

    def wait() -> None:
        try:
            outcome.append(list(lonely) if looping else lonely.next())
        except StateError as why:
            outcome.append(str(why))

    waiter = threading.Thread(target=wait)
    waiter.start()
    lonely.close()
    waiter.join(TIMEOUT)
    assert not waiter.is_alive()
    assert lonely.closed
    said = ("this Subscriber was closed while it waited", "this Subscriber is closed")
    assert outcome[0] == [] if looping else outcome[0] in said


class Alarm(Exception):
    """Raised by a signal's handler."""


@contextmanager
def signalled(handler: Callable[[], Any], thread: int | None) -> Iterator[None]:
    """A thread, or the one that sends it, gets a signal soon: most likely amid the block's wait."""

    def send() -> None:
        signal.pthread_kill(thread or threading.get_ident(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda *_: handler())
    timer = threading.Timer(0.05, send)
    timer.start()
    try:
        yield
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_handler_may_close_what_is_waiting(lonely: Subscriber) -> None:
    with (
        signalled(lonely.close, threading.main_thread().ident),
        pytest.raises(StateError, match="closed"),
    ):
        lonely.next(TIMEOUT)
    assert lonely.closed


@pytest.mark.parametrize("thread", [threading.main_thread().ident, None], ids=["waiting", "other"])
def test_signal_handler_exception_ends_wait_and_loses_nothing(
    trainer: Trainer, thread: int | None
) -> None:
    def ring() -> None:
        raise Alarm

    with pytest.raises(Alarm), signalled(ring, thread):
        trainer.subscriber.next(TIMEOUT)
    trainer.publish()
    assert taken(trainer.subscriber) == WHOLE


def test_the_descriptor_is_readable_while_there_is_a_version(trainer: Trainer) -> None:
    assert select.select([trainer.subscriber], [], [], 0)[0] == []
    trainer.publish()
    assert select.select([trainer.subscriber], [], [], TIMEOUT)[0] == [trainer.subscriber]
    taken(trainer.subscriber)
    trainer.join()
    assert select.select([trainer.subscriber], [], [], 0)[0] == []


def test_it_waits_in_asyncio(trainer: Trainer) -> None:
    async def wait() -> None:
        ready = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(trainer.subscriber, ready.set)
        trainer.publish()
        await asyncio.wait_for(ready.wait(), TIMEOUT)
        loop.remove_reader(trainer.subscriber)

    asyncio.run(wait())
    with trainer.subscriber.next(0) as update:
        assert update.version == 1


def test_one_thread_at_a_time_waits(lonely: Subscriber) -> None:
    def refused() -> bool:
        try:
            lonely.next(0)
        except DeadlineError:
            return False  # the other one has not begun
        except StateError as why:
            return "one thread at a time" in str(why)
        return False

    waiter = threading.Thread(target=lambda: list(lonely))
    waiter.start()
    wait_until(refused)
    assert lonely.describe().state == "connecting"  # this is for any thread
    assert lonely.stats()["receive_version"] == 0
    lonely.wake()
    waiter.join()


# ---- One update at a time


def test_one_update_is_open_at_a_time(trainer: Trainer) -> None:
    first = trainer.offer()
    for step in (first.accept, first.close):
        with pytest.raises(StateError, match="version 1 is still open"):
            trainer.subscriber.next(0)
        step()
    with pytest.raises(DeadlineError):
        trainer.subscriber.next(0)


def test_an_update_that_did_not_reach_the_caller_is_given_again(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr("refit.weights.subscriber.Update", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            trainer.offer()
    with trainer.subscriber.next(0) as update:
        assert update.version == 1
    trainer.join()
    assert trainer.publisher.workers()[0].committed


def test_update_dropped_during_call_waits_for_its_turn(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dropping(dict[str, Any]):
        """What is looked at in the middle of ``bind``."""

        def items(self) -> Any:
            held.clear()
            return super().items()

    held, closes = [trainer.offer()], []
    with monkeypatch.context() as patch:
        patch.setattr(lib, "refit_update_close", closes.append)
        with pytest.warns(ResourceWarning):
            trainer.subscriber.bind(Dropping(w=np.zeros(4, np.float32)))
    assert closes == []
    with trainer.subscriber.next(TIMEOUT) as again:  # ends the one before; the version comes again
        assert again.version == 1


def test_an_open_update_ends_with_its_subscriber(trainer: Trainer) -> None:
    update = trainer.offer()
    trainer.subscriber.close()
    assert update.closed
    for use in (lambda: update["w"], update.accept):
        with pytest.raises(StateError):
            use()
    update.close()


# ---- What is known, and what is refused


def test_the_second_worker_of_a_name_hears_why_it_waits(trainer: Trainer) -> None:
    with Subscriber(trainer.publisher.endpoint, worker="w0", **UNHURRIED) as second:

        def is_told() -> bool:
            with pytest.raises(DeadlineError) as late:
                second.next(0)
            return "another worker goes by this name: give this one" in str(late.value)

        wait_until(is_told)


def test_both_ends_say_what_they_are(trainer: Trainer, lonely: Subscriber) -> None:
    assert repr(trainer.publisher).endswith("', version 0, 1 worker>")
    assert repr(trainer.subscriber).startswith("<refit.Subscriber: worker 'w0', version 0, ")
    update = trainer.offer()
    assert repr(update) == "<refit.Update: version 1, 1 tensors, open>"
    update.accept()
    assert repr(update) == "<refit.Update: version 1, 1 tensors, decided>"
    update.close()
    trainer.join()
    info = trainer.subscriber.describe()
    assert (info.worker, info.version, info.connected) == ("w0", 1, True)
    assert info.epoch
    with trainer.offer():
        pass
    trainer.join()
    figures = trainer.subscriber.stats()
    assert figures["receive_count"] >= 1  # the last one may still be on its way to the figures
    assert all(isinstance(value, (int, float)) for value in figures.values())
    assert lonely.describe().worker
    assert not lonely.describe().connected
    for end in (trainer.subscriber, trainer.publisher):
        end.close()
    assert repr(trainer.subscriber) == "<refit.Subscriber: closed>"
    assert repr(trainer.publisher) == f"<refit.Publisher: {trainer.publisher.endpoint!r}, closed>"


@pytest.mark.parametrize(
    ("endpoint", "options", "error", "sentence"),
    [
        ("nonsense", {}, InvalidError, "nonsense"),
        (f"{NOWHERE}\0", {}, InvalidError, "NUL"),
        ("tcp://192.0.2.1:7711", {}, SecurityError, r"server_key.*broadcast.insecure: true"),
        (NOWHERE, {"worker": "w" * 64}, ConfigError, "worker"),
        (NOWHERE, {"broadcast_slot": 1}, NotFoundError, "broadcast_slot"),
        *(
            (NOWHERE, {"idle_timeout": bad}, InvalidError, "an idle_timeout of")
            for bad in ("10m", 0, -1, math.nan, math.inf)
        ),
        (
            NOWHERE,
            {"idle_timeout": 5},
            ConfigError,
            r"must be 0 or above broadcast\.heartbeat_timeout_ms",
        ),
    ],
)
def test_a_subscriber_that_cannot_be_is_refused_with_a_sentence(
    endpoint: str, options: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        Subscriber(endpoint, **options)


def test_a_device_is_named_in_the_callers_words(lonely: Subscriber) -> None:
    lonely.use_device("host")
    with pytest.raises(StateError, match="has a device already"):
        lonely.use_device("host")
    with pytest.raises(InvalidError):
        lonely.use_device(None)
    with Subscriber(NOWHERE, broadcast_gpu="require") as subscriber:
        with pytest.raises(StateError, match="refit_subscriber_use_device"):
            subscriber.next(0)
        with pytest.raises(UnsupportedError):
            subscriber.use_device("host")


def test_after_close_all_calls_but_a_second_close_are_refused(lonely: Subscriber) -> None:
    lonely.close()
    lonely.close()
    for call in (
        lonely.next,
        lonely.wake,
        lonely.fileno,
        lonely.describe,
        lonely.stats,
        lambda: lonely.use_device("host"),
    ):
        with pytest.raises(StateError, match="closed"):
            call()
    assert list(lonely) == []
