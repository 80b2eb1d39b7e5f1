"""A worker's end: waits and what ends them, one update at a time, and what goes wrong."""

import asyncio
import gc
import math
import pickle
import select
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
from broadcasting import LOCAL, PATIENCE, both, contents, wait_until
from refit._library import lib
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
from refit.publisher import Publisher
from refit.subscriber import Subscriber

ONE = {"w": np.arange(4, dtype=np.float32)}
UNUSED = "tcp://127.0.0.1:9"
"""An endpoint where no trainer is."""


def publish_on_a_thread(publisher: Publisher, weights: Any = ONE) -> threading.Thread:
    def publish() -> None:
        try:
            publisher.publish(weights)
        except Exception as why:
            failed.append(why)

    failed: list[Exception] = []
    trainer = threading.Thread(target=publish)
    trainer.start()
    return trainer


def taken(subscriber: Subscriber) -> dict[str, bytes]:
    with subscriber.next(PATIENCE) as update:
        return contents(update)


def test_nothing_new_in_time_is_a_timeout_that_says_whether_there_is_a_trainer() -> None:
    with both() as (publisher, subscriber):
        trainer = publish_on_a_thread(publisher)
        taken(subscriber)  # so that it has joined
        trainer.join()
        for seconds in (0, 0.01):
            with pytest.raises(DeadlineError, match="the trainer is there"):
                subscriber.next(seconds)
        with pytest.raises(TimeoutError):
            subscriber.next(0)
        publisher.close()
        wait_until(lambda: not subscriber.describe().connected)
        with pytest.raises(DeadlineError, match="is gone, and this worker holds version 1"):
            subscriber.next(0)
    with (
        Subscriber(UNUSED) as subscriber,
        pytest.raises(DeadlineError, match="no trainer has answered"),
    ):
        subscriber.next(0.01)


def test_a_trainer_beyond_this_host_needs_keys_or_leave() -> None:
    with pytest.raises(SecurityError, match=r"security.server_key.*broadcast.insecure: true"):
        Subscriber("tcp://192.0.2.1:7711")
    with (
        Subscriber("tcp://192.0.2.1:7711", broadcast_insecure=True) as subscriber,
        pytest.raises(DeadlineError),
    ):
        subscriber.next(0)


def test_a_time_that_is_none_is_refused() -> None:
    with Subscriber(UNUSED) as subscriber:
        for bad in (-1, float("nan")):
            with pytest.raises(InvalidError, match="a timeout of"):
                subscriber.next(bad)


def test_its_own_timeout_is_for_loops_and_for_waits_without_one() -> None:
    with Subscriber(UNUSED, timeout=0.01) as subscriber:
        with pytest.raises(DeadlineError):
            subscriber.next()
        with pytest.raises(DeadlineError):
            list(subscriber)


def test_a_worker_that_hears_no_trainer_ends_its_loop_and_its_wait() -> None:
    quick: Any = {"broadcast_heartbeat_ms": "10ms", "broadcast_heartbeat_timeout_ms": "50ms"}
    with Subscriber(UNUSED, idle_timeout=0.1, **quick) as subscriber:
        assert list(subscriber) == []
        for _ in range(2):
            with pytest.raises(ClosedError, match="no trainer was heard for 100 ms"):
                subscriber.next(0)


def test_a_trainer_may_come_later() -> None:
    with Publisher(LOCAL) as found:
        endpoint = found.endpoint
    with Subscriber(endpoint) as subscriber, Publisher(endpoint) as publisher:
        publisher.wait_workers(1, PATIENCE)
        trainer = publish_on_a_thread(publisher)
        assert taken(subscriber) == {"w": ONE["w"].tobytes()}
        trainer.join()


def test_one_update_is_open_at_a_time() -> None:
    with both() as (publisher, subscriber):
        trainer = publish_on_a_thread(publisher)
        first = subscriber.next(PATIENCE)
        with pytest.raises(StateError, match="version 1 is still open"):
            subscriber.next(0)
        first.accept()
        with pytest.raises(StateError, match="version 1 is still open"):
            subscriber.next(0)
        first.close()
        with pytest.raises(DeadlineError):
            subscriber.next(0)
        trainer.join()


def test_a_loop_takes_version_after_version() -> None:
    seen = []
    with both() as (publisher, subscriber):

        def train() -> None:
            for _ in range(3):
                publisher.publish(ONE)
            subscriber.wake()

        trainer = threading.Thread(target=train)
        trainer.start()
        for update in subscriber:
            with update:
                seen.append(update.version)
        trainer.join()
    assert seen == [1, 2, 3]


def test_wake_ends_a_wait_of_another_thread() -> None:
    with Subscriber(UNUSED) as subscriber:
        waker = threading.Thread(target=subscriber.wake)
        waker.start()
        with pytest.raises(CancelledError):
            subscriber.next(PATIENCE)
        waker.join()


def test_wake_ends_the_next_wait_once() -> None:
    with Subscriber(UNUSED) as subscriber:
        subscriber.wake()
        with pytest.raises(CancelledError):
            subscriber.next(PATIENCE)
        with pytest.raises(DeadlineError):
            subscriber.next(0)
        subscriber.wake()
        assert list(subscriber) == []


@pytest.mark.parametrize("looping", [False, True])
def test_close_in_another_thread_ends_a_wait(looping: bool) -> None:
    subscriber = Subscriber(UNUSED)
    outcome: list[Any] = []

    def wait() -> None:
        try:
            outcome.append(list(subscriber) if looping else subscriber.next())
        except StateError as why:
            outcome.append(str(why))

    waiter = threading.Thread(target=wait)
    waiter.start()
    subscriber.close()
    waiter.join(PATIENCE)
    assert not waiter.is_alive()
    assert subscriber.closed
    if looping:
        assert outcome == [[]]
    else:
        assert outcome[0] in (
            "this Subscriber was closed while it waited",
            "this Subscriber is closed",
        )


def test_a_signal_handler_may_close_what_is_waiting() -> None:
    subscriber = Subscriber(UNUSED)
    before = signal.signal(signal.SIGALRM, lambda *_: subscriber.close())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(StateError, match="closed"):
            subscriber.next(PATIENCE)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert subscriber.closed


@pytest.mark.parametrize("taker", ["the waiting thread", "another thread"])
def test_an_exception_of_a_signal_handler_ends_a_wait_and_nothing_is_lost(taker: str) -> None:
    class Alarm(Exception):
        pass

    def ring(*_: object) -> None:
        raise Alarm

    def take() -> None:
        target = (
            threading.get_ident() if taker == "another thread" else threading.main_thread().ident
        )
        signal.pthread_kill(target or 0, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, ring)
    try:
        with both() as (publisher, subscriber):
            timer = threading.Timer(0.05, take)
            timer.start()
            with pytest.raises(Alarm):
                subscriber.next(PATIENCE)
            timer.join()
            trainer = publish_on_a_thread(publisher)
            assert taken(subscriber) == {"w": ONE["w"].tobytes()}
            trainer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_update_that_did_not_reach_the_caller_is_given_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with both() as (publisher, subscriber):
        trainer = publish_on_a_thread(publisher)
        with monkeypatch.context() as broken:
            broken.setattr("refit.subscriber.Update", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                subscriber.next(PATIENCE)
        with subscriber.next(0) as update:
            assert update.version == 1
        trainer.join()
        assert publisher.workers()[0].committed


def test_the_descriptor_is_readable_while_there_is_a_version() -> None:
    with both() as (publisher, subscriber):
        assert select.select([subscriber], [], [], 0)[0] == []
        trainer = publish_on_a_thread(publisher)
        assert select.select([subscriber], [], [], PATIENCE)[0] == [subscriber]
        with subscriber.next(0):
            pass
        trainer.join()
        assert select.select([subscriber], [], [], 0)[0] == []


def test_it_waits_in_asyncio() -> None:
    async def work(subscriber: Subscriber) -> int:
        ready = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(subscriber, ready.set)
        try:
            await asyncio.wait_for(ready.wait(), PATIENCE)
        finally:
            loop.remove_reader(subscriber)
        with subscriber.next(0) as update:
            return update.version

    with both() as (publisher, subscriber):
        trainer = publish_on_a_thread(publisher)
        assert asyncio.run(work(subscriber)) == 1
        trainer.join()


def test_one_thread_at_a_time_waits() -> None:
    with Subscriber(UNUSED) as subscriber:
        waiter = threading.Thread(target=lambda: list(subscriber))
        waiter.start()
        end = time.monotonic() + PATIENCE
        refused = False
        while not refused and time.monotonic() < end:
            try:
                subscriber.next(0)
            except DeadlineError:
                continue  # the other one has not begun
            except StateError as why:
                refused = "one thread at a time" in str(why)
        assert refused
        assert subscriber.describe().state == "connecting"  # this is for any thread
        assert subscriber.stats()["receive_version"] == 0
        subscriber.wake()
        waiter.join()


def test_a_dropped_update_is_refused_and_the_version_comes_again() -> None:
    with both() as (publisher, subscriber):
        trainer = publish_on_a_thread(publisher)
        update = subscriber.next(PATIENCE)
        update["w"].numpy()
        held = [update]
        del update
        with pytest.warns(ResourceWarning, match=r"use it in a block \(with update:\)"):
            held.clear()
        trainer.join()
        with subscriber.next(PATIENCE) as again:
            assert again.version == 1


def test_an_update_dropped_in_the_middle_of_a_call_waits_for_its_turn() -> None:
    with both() as (publisher, subscriber):
        trainer = publish_on_a_thread(publisher)
        update = subscriber.next(PATIENCE)
        closes: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lib, "refit_update_close", closes.append)
            held = [update]
            del update
            with subscriber._call_lock, pytest.warns(ResourceWarning):
                held.clear()
        assert closes == []
        with subscriber.next(PATIENCE) as again:  # ends the one before; the version comes again
            assert again.version == 1
        trainer.join()


def test_it_says_what_it_is() -> None:
    with both() as (publisher, subscriber):
        assert repr(publisher).endswith("', version 0, 1 worker>")
        assert repr(subscriber).startswith("<refit.Subscriber: worker 'w0', version 0, ")
        trainer = publish_on_a_thread(publisher)
        update = subscriber.next(PATIENCE)
        assert repr(update) == "<refit.Update: version 1, 1 tensors, open>"
        update.accept()
        assert repr(update) == "<refit.Update: version 1, 1 tensors, decided>"
        update.close()
        trainer.join()
    assert repr(subscriber) == "<refit.Subscriber: closed>"
    assert repr(publisher) == f"<refit.Publisher: {publisher.endpoint!r}, closed>"


def test_the_second_worker_of_a_name_hears_why_it_waits() -> None:
    with both() as (publisher, _), Subscriber(publisher.endpoint, worker="w0") as second:
        hears = "another worker goes by this name: give this one a name of its own"
        for _ in range(int(PATIENCE / 0.05)):
            with pytest.raises(DeadlineError) as late:
                second.next(0.05)
            if "no trainer has answered" not in str(late.value):
                break
        assert hears in str(late.value)
        with pytest.raises(DeadlineError, match=rf"1 of 2 workers have .* refused is .*{hears}"):
            publisher.wait_workers(2, 0)


def test_a_dropped_subscriber_leaves() -> None:
    with Publisher(LOCAL) as publisher:
        subscriber = Subscriber(publisher.endpoint)
        publisher.wait_workers(1, PATIENCE)
        del subscriber
        gc.collect()
        assert publisher.publish(ONE) == 1


def test_an_open_update_ends_with_its_subscriber() -> None:
    with both() as (publisher, subscriber):
        trainer = publish_on_a_thread(publisher)
        update = subscriber.next(PATIENCE)
        subscriber.close()
        assert update.closed
        with pytest.raises(StateError):
            update["w"]
        with pytest.raises(StateError):
            update.accept()
        update.close()
        trainer.join()


def test_it_describes_itself() -> None:
    with both() as (publisher, subscriber):
        trainer = publish_on_a_thread(publisher)
        taken(subscriber)
        trainer.join()
        info = subscriber.describe()
        assert (info.worker, info.version, info.connected) == ("w0", 1, True)
        assert info.epoch
        trainer = publish_on_a_thread(publisher)
        taken(subscriber)
        trainer.join()
        figures = subscriber.stats()
        assert figures["receive_count"] >= 1  # the last one may still be on its way to the figures
        assert all(isinstance(value, (int, float)) for value in figures.values())
    with Subscriber(UNUSED) as subscriber:
        assert subscriber.describe().worker
        assert not subscriber.describe().connected


@pytest.mark.parametrize(
    ("endpoint", "options", "error", "sentence"),
    [
        ("nonsense", {}, InvalidError, "nonsense"),
        (f"{UNUSED}\0", {}, InvalidError, "NUL"),
        (UNUSED, {"worker": "w" * 64}, ConfigError, "worker"),
        (UNUSED, {"broadcast_slot": 1}, NotFoundError, "broadcast_slot"),
        *(
            (UNUSED, {"idle_timeout": bad}, InvalidError, "an idle_timeout of")
            for bad in ("10m", 0, -1, math.nan, math.inf)
        ),
        (
            UNUSED,
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


def test_a_device_is_named_in_the_callers_words() -> None:
    with Subscriber(UNUSED) as subscriber:
        subscriber.use_device("host")
        with pytest.raises(StateError, match="has a device already"):
            subscriber.use_device("host")
        with pytest.raises(InvalidError):
            subscriber.use_device(None)
    with Subscriber(UNUSED, broadcast_gpu="require") as subscriber:
        with pytest.raises(StateError, match="refit_subscriber_use_device"):
            subscriber.next(0)
        with pytest.raises(UnsupportedError):
            subscriber.use_device("host")


def test_after_close_everything_is_refused_and_a_second_close_does_nothing() -> None:
    subscriber = Subscriber(UNUSED)
    subscriber.close()
    subscriber.close()
    for call in (
        subscriber.next,
        subscriber.wake,
        subscriber.fileno,
        subscriber.describe,
        subscriber.stats,
        lambda: subscriber.use_device("host"),
    ):
        with pytest.raises(StateError, match="closed"):
            call()
    assert list(subscriber) == []


def test_it_cannot_be_pickled_trap_27() -> None:
    with (
        Subscriber(UNUSED) as subscriber,
        pytest.raises(TypeError, match="cannot be pickled"),
    ):
        pickle.dumps(subscriber)
