"""The trainer's end of the broadcast: new weights for every rollout worker, as one version.

    publisher = refit.Publisher()
    publisher.wait_workers(4)
    publisher.publish(model.state_dict())        # all four switch to it, or none does

``publish`` is the whole of it; ``declare``, ``begin``, ``write``, ``commit`` and ``abort`` are its
steps, for weights that are made one after another. The store, the digests, the sockets and the
heartbeats are the C library's (refit/broadcast.h). Independent of the model that the weights belong
to, and the optimizer states.
"""

import ctypes
import operator
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Final, Literal, TypeAlias

from refit._c import abi, stats
from refit._c.call_lock import CallLock
from refit._c.config import ConfigLike, make_config
from refit._c.device import Device, current_cuda, open_device, use_asked
from refit._c.handle import Handle
from refit._c.library import call, encoded, lib
from refit._c.waiting import wait_in_slices
from refit.errors import InvalidError, NotFoundError, RefitError, StateError
from refit.weights import manifest
from refit.weights.boxes import Box, Cut, selections_of
from refit.weights.manifest import Declared, Tensors, TensorSpec, is_settled
from refit.weights.worker import Worker, worker_of
from refit.weights.writer import PublisherCalls, Writer, settled

Wait: TypeAlias = Literal["applied", "staged", "none"]

_WAITS: Final[dict[str, int]] = {
    "applied": abi.REFIT_WAIT_APPLIED,
    "staged": abi.REFIT_WAIT_STAGED,
    "none": abi.REFIT_WAIT_NONE,
}


class Publisher(Handle):
    """Binds an endpoint and publishes versions. Belongs to the process that opened it.

    ``endpoint`` is None for broadcast.endpoint of the configuration ("user://refit"),
    "user://NAME", a socket that only this user reaches ("user://*": a free name),
    "ipc:///run/refit.sock", or "tcp://127.0.0.1:0" (0: any free port). Without keys a tcp endpoint
    is open to all users of this machine, and a warning in the log says so. ``config``: a
    ``refit.Config``, a YAML file's path, a mapping of options, or None for the defaults and the
    environment; ``overrides``: single options, ``Publisher(broadcast_shm="off")``. ``device`` is
    the GPU that the trainer is on: workers there read its tensors where they lie. "auto": PyTorch's
    current one, once the process uses CUDA; None: none; or what ``use_device`` takes. Starts a
    service thread of the C library, joined by ``close``. One thread at a time uses it, but for what
    is marked "any thread". Raises BusyError (another process has the endpoint, or the socket of
    another user lies at its path), ExistsError (a file that is not a socket has its place),
    SecurityError (without keys: an address beyond this host, or a path that other users could lead
    elsewhere; another user made the folder of user:// first), InputOutputError (a key's file, or
    the folder of user://), UnsupportedError (keys, and a libzmq without CURVE), ConfigError,
    InvalidError, HostMemoryError, SystemCallError.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        config: ConfigLike = None,
        *,
        device: Any = "auto",
        **overrides: Any,
    ) -> None:
        self._call_lock = CallLock("Publisher")
        self._guard = threading.RLock()
        self._declared: Declared | None = None
        self._rank = 0
        self._collector = manifest.Collector()
        self._writer = Writer()
        self._ends = False
        self._own_devices: list[Device] = []
        self._shared: Device | None = None
        chosen = make_config(config, overrides)
        self._begin_s: float = chosen.get("broadcast.stage_timeout_ms") / 1000
        self._configured_wait: Wait = chosen.get("broadcast.wait")
        self._waits_until: Wait | None = self._configured_wait
        self._last = 0
        text = None if endpoint is None else encoded(endpoint, "an endpoint")
        self._open(lib.refit_publisher_open, text, chosen._as_c)
        self._endpoint: str = lib.refit_publisher_endpoint(self._live).decode()
        self._device = None if chosen["broadcast.gpu"] == "off" else device
        try:
            self._find_device(current_cuda(is_chosen=True))
        except BaseException:
            self.close()
            raise

    def _find_device(self, auto: str | None) -> None:
        """Uses the device that was asked for, once it is known: ``auto`` for "auto"."""
        self._device = use_asked(self._device, auto, self._use_device, "lent on")

    def _refuse_use(self, pointer: int) -> None:
        pass  # some calls may be made from any thread, and are waited for

    def _close(self, pointer: int) -> None:
        with self._call_lock, self._guard:
            close = lib.refit_publisher_end if self._ends else lib.refit_publisher_close
            close(pointer)

    def close(self, end: bool = False) -> None:
        """Aborts a version under way and says goodbye to the workers.

        ``end=True`` tells them that the training is over: their loops end at once, and
        ``Subscriber.next`` raises ClosedError. Otherwise they look for the next trainer until
        ``idle_timeout``. A ``with`` block that no exception leaves ends the training, and so does a
        process that exits without one. Blocks at most broadcast.linger_ms and a moment. A second
        close does nothing. StateError while another thread is in a call of it.
        """
        self._ends = end
        super().close()
        if not self.closed:  # a forked process has its parent's
            return
        self._writer.forget()
        self._writer.close()
        while self._own_devices:
            self._own_devices.pop().close()

    def _close_at_exit(self) -> None:
        # Set by an exception that ended the program, or was printed where there is a prompt.
        self.close(end=getattr(sys, "last_value", None) is None)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(end=kind is None)

    # ---- One call for a version

    def publish(
        self, weights: Tensors, version: int | None = None, *, wait: Wait | None = None
    ) -> int:
        """Publishes named tensors as one version and returns its number.

        ``weights`` is a mapping, a list or an iterator of (name, tensor): tensors of PyTorch (host
        or CUDA), NumPy, DLPack or any buffer, ``RawTensor`` bytes, or an ``Alias``. They are
        declared when names, types, shapes or ties differ from the version before. What is not
        contiguous is made so for the write, at most 64 MiB at a time or one tensor. When it
        returns, the tensors may change.

        The tensors of a mapping (or its ``items()``) and of a list are there together: those that
        share memory are tied and travel once. An iterator may make each tensor in the memory of the
        one before, so each is taken before the next one is asked for, and nothing is seen to be
        tied: say it with ``Alias``, or use ``refit.named_weights``. Where nothing is declared yet
        an iterator's tensors are copied to host memory first, to learn what there is; later ones
        are written as they come, and must be what was declared.
        Weights with a method ``manifest()``, which gives their ``TensorSpec`` before there are
        bytes, are also written as they come.

        Workers on the trainer's GPU (``device``) read tensors that are there together where they
        lie, and have copied them when it returns: those must not change meanwhile, on other
        streams or threads. What is made on the way (casts, gathered shards) is copied for them.

        ``wait``: what it waits for once all is written. "applied": until all workers run on the
        version. "staged": until they have it; each goes on with the one before, and gets the newest
        one when it asks for the next. "none": for nothing; the next version, or declaration, waits
        until this one is over, and ``close`` at most broadcast.linger_ms; ``publisher.version``
        then tells whether it was committed, and the log why not. None: broadcast.wait. Unless it is
        "applied", tensors of a GPU are copied, and not read where they lie; broadcast.max_behind
        bounds how much older the versions of workers may be. StateError with broadcast.slots=1.

        ``version`` is above all before it, at least 1, or None for the next number. Blocks for the
        copies, until workers let go of an older version (broadcast.stage_timeout_ms), and for what
        ``commit`` waits for. On any exception, Ctrl-C included, the version is aborted and workers
        keep the one before, unless it was committed: ``publisher.version`` tells. Ctrl-C does not
        end a version that was left with "none", nor in a wait for its end. Raises what
        ``declare``, ``begin``, ``write`` and ``commit`` raise.
        """
        with self._call_lock, PublisherCalls(self._live) as calls:
            send = self._prepare(calls, weights)
            number = self._begin(calls, version, wait)
            try:
                send(calls)
                _commit(calls)
            except BaseException:
                _drop(self._live)
                raise
            finally:
                self._writer.forget()
            return self._learned(number)

    # ---- Its steps

    def declare(self, tensors: Tensors | Iterable[TensorSpec]) -> None:
        """Says which tensors versions have from now on: ``TensorSpec``s, or named tensors.

        Nothing happens if they are the ones declared. Between versions only; ``begin`` takes the
        memory for them, in shared memory where that is on. Blocks only for a version that was
        published with ``wait="none"``. Raises StateError (a version is under way), InvalidError
        (duplicate or bad names, ties that lead nowhere), UnsupportedError, LimitError,
        HostMemoryError, SystemCallError, CancelledError.
        """
        with self._call_lock, PublisherCalls(self._live) as calls:
            self._declare(calls, manifest.specs_of(tensors))

    def shard(
        self,
        coordinator: str,
        rank: int,
        ranks: int,
        parts: Mapping[str, Cut],
        timeout: float | None = None,
    ) -> None:
        """Says which part of the declared tensors this publisher has, as rank ``rank`` of
        ``ranks`` publishers that publish together: nothing is gathered.

        Every rank has declared the same tensors, with the shapes of all of them, and calls this.
        ``coordinator`` is the endpoint of rank 0's publisher, which workers subscribe to; rank 0
        itself does not look at it. The others' must be ones that workers reach, and no wildcards;
        with keys all ranks have the same. ``parts``: of each tensor that this rank has something
        of, None for all of it, or slices, or (first, length), of its first dimensions. From then on
        ``write``, ``write_all``, ``lend_all`` and ``publish`` take the parts, as tensors of their
        own; what this rank has nothing of is left out. Rank 0 decides when a version begins and
        whether it is committed: ``begin`` of another rank waits for rank 0's, with the number that
        rank 0 takes (StaleError) or None for whichever, and its ``commit`` tells what was decided
        (PeerError: aborted, or a rank was lost). ``abort`` of any rank drops it on all. A later
        declaration of other tensors ends it, as ``unshard`` does; ``refit.Transaction`` does all of
        this by itself.
        Versions travel through sockets then, not through shared memory or a GPU's.

        Between versions. Blocks until all ranks have called it, at most ``timeout`` seconds (None:
        broadcast.stage_timeout_ms). Raises DeadlineError (names the ranks that are missing),
        InvalidError (parts that are not within their tensors, or on any rank parts that overlap or
        leave a hole), NotFoundError (a name that was not declared), StateError (nothing declared,
        or a version is under way), UnsupportedError (broadcast.gpu is "require"),
        SecurityError, PeerError, CancelledError.
        """
        if self._declared is None:
            raise StateError("no tensors are declared: call publisher.declare before shard")
        if not 2 <= ranks < 2**32 or not 0 <= rank < ranks:
            raise InvalidError(
                f"rank {rank} of {ranks}: ranks count from 0, and there are 2 or more"
            )
        seconds = self._begin_s if timeout is None else timeout
        if not 0 <= seconds * 1000 < 2**32:
            raise InvalidError(f"a timeout of {seconds} s: give seconds, 0 or more, or None")
        with self._call_lock, PublisherCalls(self._live) as calls:
            pointer, declared = self._live, self._declared.sharded(parts)
            boxes = declared.boxes or {}
            raw = abi.refit_shards(
                size=ctypes.sizeof(abi.refit_shards),
                coordinator=encoded(coordinator, "an endpoint") if rank else None,
                rank=rank,
                ranks=ranks,
                list=selections_of(boxes.items()),
                count=len(boxes),
            )
            self._declared = None  # as in _declare
            try:
                calls.run_cancellably(
                    lambda: call(
                        lib.refit_publisher_shard, pointer, ctypes.byref(raw), int(seconds * 1000)
                    )
                )
            except RefitError:  # C has taken the parts before it waited
                self._declared, self._rank = declared, rank
                raise
            self._declared, self._rank = declared, rank

    def unshard(self) -> None:
        """Ends what ``shard`` has begun: this publisher has all of the declared tensors again.

        The other ranks cannot publish then until all have called ``shard`` once more. Does nothing
        where ``shards`` is None. Between versions. Raises what ``declare`` raises.
        """
        with self._call_lock, PublisherCalls(self._live) as calls:
            self._unshard(calls)

    def _unshard(self, calls: PublisherCalls) -> None:
        if self._declared is None or self._declared.boxes is None:
            return
        pointer, specs = self._live, self._declared.specs
        alone = abi.refit_shards(size=ctypes.sizeof(abi.refit_shards), ranks=1)
        self._declared = None  # as in _declare
        calls.run_cancellably(
            lambda: call(lib.refit_publisher_shard, pointer, ctypes.byref(alone), 0)
        )
        self._declared = Declared(specs)

    def wait_workers(self, count: int, timeout: float | None = None) -> None:
        """Waits until ``count`` workers are subscribed.

        ``timeout`` in seconds, None: broadcast.stage_timeout_ms. Raises DeadlineError, which says
        how many there are, CancelledError after ``cancel``, InvalidError. Ctrl-C ends it.
        """
        if not 0 <= count < 2**32:
            raise InvalidError(f"{count} workers cannot be waited for")
        pointer = self._live

        def step(slice_ms: int) -> None:
            call(lib.refit_publisher_wait_workers, pointer, count, slice_ms)

        with self._call_lock:
            self._find_device(current_cuda(is_chosen=True))
            wait_in_slices(step, self._begin_s if timeout is None else timeout)

    def begin(self, version: int | None = None, *, wait: Wait | None = None) -> int:
        """Begins a version: a number above all before it, at least 1, or None for the next one.
        Returns the number; 0 for None where rank 0's publisher chooses it (see ``shard``).
        ``wait``: for what ``commit`` waits, as in ``publish``.

        The workers subscribed now are its members. Blocks until they let go of the version whose
        memory it takes, at most broadcast.stage_timeout_ms. Raises StateError (nothing declared, or
        one is under way), StaleError (the number was used), InvalidError, HostMemoryError,
        SystemCallError, DeviceMemoryError, CancelledError; nothing has begun then.
        """
        with self._call_lock, PublisherCalls(self._live) as calls:
            return self._begin(calls, version, wait)

    def write(self, name: str, tensor: Any) -> None:
        """Writes one tensor of the version; when it returns, the tensor may change.

        Each name once, in any order. Tied names are not written, but compared (see ``write_all``).
        A CUDA tensor is read after PyTorch's current stream. Blocks for the copy. Raises
        NotFoundError (a name that was not declared), InvalidError (another type or shape than
        declared, other bytes than what it is tied to), UnsupportedError, StateError (no version
        begun, or written already), DeadlineError, CopyError, DeviceError.
        """
        with self._call_lock:
            self._write([(name, tensor)], together=True)

    def write_all(self, weights: Tensors, *, together: bool | None = None) -> None:
        """``write`` for each of the named tensors, faster.

        ``together``: whether the tensors stay as they are while others are taken; they are held
        then, at most 64 MiB at a time or one tensor. If not, each is taken before the next one is
        asked for. None: a mapping, its ``items()`` and a list stay, an iterator does not.

        What was declared as tied must be the same tensor in every version: in one call of tensors
        that stay the same memory is, and else their bytes are read and compared, whichever call
        they came in. InvalidError if they differ. Raises what ``write`` raises, and what iterating
        raises.
        """
        with self._call_lock:
            self._write(weights, together=is_settled(weights) if together is None else together)

    def lend_all(self, weights: Tensors) -> None:
        """``write_all`` of tensors that must not change before ``commit`` or ``abort`` has
        returned: workers on the trainer's GPU read them where they lie, as in ``publish``."""
        with self._call_lock:
            self._write(weights, together=is_settled(weights), lend=True)

    def commit(self) -> None:
        """Ends the version: every worker has it and switches to it, or none does.

        Blocks until all members (or the quorum) have staged it, at most
        broadcast.stage_timeout_ms, and have applied it, at most broadcast.commit_timeout_ms. Raises
        PeerError or DeadlineError if workers failed or were lost: ``workers`` of the exception are
        those, and ``version`` of the publisher tells whether the others have it all the same;
        CancelledError after ``cancel``; StateError if no version is under way, or if it lacks a
        tensor and stays open.
        """
        with self._call_lock:
            try:
                with PublisherCalls(self._live) as calls:
                    _commit(calls)
            except StateError:
                raise  # the version stays open
            except BaseException:
                self._writer.forget()
                raise
            self._writer.forget()
            self._learned(0)

    def cancel(self) -> None:
        """Ends the wait of another thread in this publisher, or else the next one: CancelledError.

        What that leaves is what Ctrl-C leaves: ``begin`` has begun nothing, a ``commit`` that had
        not told the workers to switch drops the version, and a later one stands. Any thread.
        """
        with self._guard:
            lib.refit_publisher_cancel(self._live)

    def abort(self) -> None:
        """Drops the version under way: workers keep the one before. StateError if there is none."""
        with self._call_lock:
            call(lib.refit_publisher_abort, self._live)
            self._writer.forget()

    # ---- What is known

    @property
    def endpoint(self) -> str:
        """The endpoint for workers, with the port that was bound. Any thread."""
        return self._endpoint

    @property
    def version(self) -> int:
        """The last committed version, 0 if there is none. Any thread."""
        with self._guard:
            return int(lib.refit_publisher_version(self._live))

    @property
    def declared(self) -> tuple[TensorSpec, ...]:
        """The tensors that a version has now."""
        return () if self._declared is None else self._declared.specs

    @property
    def shards(self) -> Mapping[str, Box] | None:
        """The boxes that this publisher has of the declared tensors, by name, after ``shard``;
        None: it has all of them."""
        return None if self._declared is None else self._declared.boxes

    @property
    def next_version(self) -> int:
        """The number that ``begin`` takes if it is given none."""
        return self._last + 1

    def workers(self) -> list[Worker]:
        """The subscribed workers and those of the last version that are joining again, then
        those lost since it began."""
        with self._guard:
            return _workers(self._live)

    def stats(self) -> dict[str, float]:
        """Its figures under their names in refit/stats.h. Any thread."""
        with self._guard:
            figures = stats.gather((lib.refit_publisher_stats, self._live))
        ours = ("publish_", "workers", "messages_")
        names = [name for name, *_ in figures._fields_ if name.startswith(ours)]
        return {name: getattr(figures, name) for name in names}

    def __repr__(self) -> str:
        if self.closed or self._process != os.getpid():
            return f"<refit.Publisher: {self._endpoint!r}, closed>"
        count = sum(worker.subscribed for worker in self.workers())
        workers = "1 worker" if count == 1 else f"{count} workers"
        return f"<refit.Publisher: {self._endpoint!r}, version {self.version}, {workers}>"

    def use_device(self, device: Any) -> None:
        """Says which GPU the trainer is on, so that workers on it read the weights in its memory.

        A torch.device, a spec such as "cuda:0", or a ``refit.Device``, which then outlives the
        publisher. Right after open, once. Nothing happens for a device whose memory cannot be shown
        to other processes, unless broadcast.gpu is "require": UnsupportedError. Raises StateError
        (another device, or a version is under way), NotFoundError.
        """
        with self._call_lock:
            self._use_device(device)
            self._device = None

    def _use_device(self, device: Any) -> None:
        pointer = self._live
        opened, ours = open_device(device)
        if ours and opened.is_same_gpu(self._shared):
            opened.close()
            return
        if ours:
            self._own_devices.append(opened)
        try:
            with PublisherCalls(pointer) as calls:
                calls.run_cancellably(
                    lambda: call(lib.refit_publisher_use_device, pointer, opened.pointer)
                )
            self._shared = opened
        except RefitError:  # after anything else, Ctrl-C for one, C may have it in use
            if ours:
                self._own_devices.remove(opened)
                opened.close()
            raise

    # ---- Below: the call lock is held

    def _begin(self, calls: PublisherCalls, version: int | None, wait: Wait | None) -> int:
        """Begins it; nothing has begun if that fails. None: the next number. InvalidError."""
        self._find_device(current_cuda())
        pointer, number = self._live, _number(version)
        if number == 0 and not self._follows:
            number = self._last + 1
        self._wait_until(calls, wait or self._configured_wait)
        before, self._last = self._last, max(self._last, number)
        try:
            calls.run_cancellably(lambda: call(lib.refit_publisher_begin, pointer, number))
            self._writer.forget()
        except RefitError:
            self._last = before
            raise
        except BaseException:  # Ctrl-C is raised also where the call had succeeded
            if not _drop(pointer):
                self._last = before
            raise
        return number

    def _learned(self, number: int) -> int:
        """The number of the version that was committed, where rank 0 has chosen it."""
        if number or not self._follows:
            return number
        version = int(lib.refit_publisher_version(self._live))
        self._last = max(self._last, version)
        return version

    @property
    def _follows(self) -> bool:
        """Whether another rank's publisher chooses the versions."""
        return self._rank > 0 and self.shards is not None

    def _wait_until(self, calls: PublisherCalls, wait: Wait) -> None:
        """Says for what commits wait from now on. Waits for a version that may not be over."""
        if wait not in _WAITS:
            raise InvalidError(f'wait={wait!r} is not "applied", "staged" or "none"')
        if wait != self._waits_until:
            pointer, code = self._live, _WAITS[wait]
            self._waits_until = None  # Ctrl-C is raised also where C has taken the new
            calls.run_cancellably(lambda: call(lib.refit_publisher_set_wait, pointer, code))
            self._waits_until = wait

    def _prepare(self, calls: PublisherCalls, weights: Tensors) -> Callable[[PublisherCalls], None]:
        """Declares what there is; gives what writes it."""
        if self.shards is not None and not callable(getattr(weights, "manifest", None)):
            settles = is_settled(weights)
            return lambda calls: self._write_by(calls, weights, together=settles, lend=True)
        self._unshard(calls)
        found = self._collector.known(weights)
        if found is None:
            given, together = manifest.planned(weights), is_settled(weights)
            has_manifest = callable(getattr(given, "manifest", None))
            as_they_come = has_manifest or (self._declared is not None and not together)
            if as_they_come and manifest.fingerprint_of(given)[0] is None:
                if has_manifest:
                    self._declare(calls, manifest.specs_of(given))
                return lambda calls: self._write_by(calls, given, together=together, lend=True)
            found = self._collector.collect(settled(given))
        number = found.cuda_number
        self._find_device(None if number is None else f"cuda:{number}")
        self._declare(calls, found.specs)
        return lambda calls: self._writer.write_collected(calls, found)

    def _declare(self, calls: PublisherCalls, specs: tuple[TensorSpec, ...]) -> None:
        before = self._declared
        if before is not None and (specs is before.specs or specs == before.specs):
            return
        self._find_device(current_cuda())
        pointer, array = self._live, manifest.to_c(specs)
        self._declared = None  # Ctrl-C is raised also where C has taken the new
        try:
            calls.run_cancellably(
                lambda: call(lib.refit_publisher_declare, pointer, array, len(array))
            )
        except RefitError:
            self._declared = before
            raise
        self._declared = Declared(specs)

    def _write(self, weights: Tensors, *, together: bool, lend: bool = False) -> None:
        with PublisherCalls(self._live) as calls:
            self._write_by(calls, weights, together=together, lend=lend)

    def _write_by(
        self, calls: PublisherCalls, weights: Tensors, *, together: bool, lend: bool
    ) -> None:
        declared = self._declared or Declared(())
        if together:
            self._writer.write_together(calls, declared, weights, lend=lend)
        else:
            self._writer.write_each(calls, declared, weights)


# ---- One version, as calls of the C library that wait. Ctrl-C ends each wait, and what it leaves
# is known: a begin that it ended has begun nothing, and a commit's outcome is the publisher's
# version.


def _commit(calls: PublisherCalls) -> None:
    """Ends it; whose fault a failure is, is in the exception's ``workers``."""
    publisher = calls.publisher
    try:
        calls.run_cancellably(lambda: call(lib.refit_publisher_commit, publisher))
    except RefitError as why:
        why.workers = tuple(worker for worker in _workers(publisher) if worker.status)
        raise


def _drop(publisher: int) -> bool:
    """Aborts it. False: there is none; a commit that failed has done so already."""
    try:
        call(lib.refit_publisher_abort, publisher)
    except StateError:
        return False
    return True


def _workers(publisher: int) -> list[Worker]:
    """Subscribed workers and those joining again, then those lost since the last version began."""
    found: list[Worker] = []
    raw = abi.refit_worker_info(size=ctypes.sizeof(abi.refit_worker_info))
    while True:
        try:
            call(lib.refit_publisher_worker, publisher, len(found), ctypes.byref(raw))
        except NotFoundError:
            return found
        found.append(worker_of(raw))


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
