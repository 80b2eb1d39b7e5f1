"""One version of a publisher from its begin to its end, as calls of the C library that wait.

Ctrl-C ends each wait, and what that leaves is known: a begin that it ended has begun nothing, and a
commit's outcome is the publisher's version. Weights are unknown here; the caller has the call lock.
"""

import ctypes
import operator
import threading
from collections.abc import Callable

from refit import _abi
from refit._library import call, lib
from refit._waiting import run_interruptibly
from refit.errors import CancelledError, InvalidError, NotFoundError, RefitError, StateError
from refit.worker import Worker, worker_of


def begin(publisher: int, version: int | None) -> None:
    """Begins it; nothing has begun if that fails. None: the next number. InvalidError."""
    number = _number(version)
    try:
        _wait(publisher, lambda: call(lib.refit_publisher_begin, publisher, number))
    except RefitError:
        raise
    except BaseException:  # Ctrl-C is raised also where the call had succeeded
        drop(publisher)
        raise


def commit(publisher: int) -> None:
    """Ends it; whose fault a failure is, is in the exception's ``workers``."""
    try:
        _wait(publisher, lambda: call(lib.refit_publisher_commit, publisher))
    except RefitError as why:
        why.workers = tuple(worker for worker in workers(publisher) if worker.status)
        raise


def drop(publisher: int) -> None:
    """Aborts it; a commit that failed has done so already."""
    try:
        call(lib.refit_publisher_abort, publisher)
    except StateError:
        return


def workers(publisher: int) -> list[Worker]:
    """Subscribed workers and those that join anew, then those lost since the last version began."""
    found: list[Worker] = []
    raw = _abi.refit_worker_info(size=ctypes.sizeof(_abi.refit_worker_info))
    while True:
        try:
            call(lib.refit_publisher_worker, publisher, len(found), ctypes.byref(raw))
        except NotFoundError:
            return found
        found.append(worker_of(raw))


def _wait(publisher: int, function: Callable[[], None]) -> None:
    """Runs a call that waits; Ctrl-C cancels it."""
    cancelled = threading.Event()

    def cancel() -> None:
        cancelled.set()
        lib.refit_publisher_cancel(publisher)

    try:
        run_interruptibly(function, cancel)
    finally:
        if cancelled.is_set():
            _take_back_cancel(publisher)


def _take_back_cancel(publisher: int) -> None:
    """One that came too late for its call is not to end the next one."""
    try:
        call(lib.refit_publisher_wait_workers, publisher, 0, 0)
    except CancelledError:
        return


def _number(version: int | None) -> int:
    if version is None:
        return 0
    number = operator.index(version)  # of NumPy's and PyTorch's, too
    if not 1 <= number < 2**64:
        raise InvalidError(
            f"{number} cannot be a version: they count from 1 (0 means that a worker holds "
            "nothing); None takes the next number"
        )
    return number
