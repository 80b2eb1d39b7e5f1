"""A rollout worker's end of the broadcast: whole versions, one after another.

    for update in refit.Subscriber(endpoint, worker="rollout-0"):
        with update:                              # accepts, or refuses if the block raises
            model.load_weights(update.tensors())

A subscriber looks for its trainer until ``close``; the trainer may start later, and may come back
as another process. Versions arrive while the worker generates: only the wait for one is here.
update.py has the version, and refit/broadcast.h how it travels.
"""

import ctypes
import math
import os
import select
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from refit._c import abi, stats
from refit._c.call_lock import CallLock
from refit._c.config import ConfigLike, make_config
from refit._c.device import Device, current_cuda, open_device, use_asked
from refit._c.handle import Handle
from refit._c.library import call, encoded, lib
from refit._c.waiting import SLICE_MS, interrupts_held
from refit.errors import (
    CancelledError,
    ClosedError,
    DeadlineError,
    InvalidError,
    RefitError,
    StateError,
)
from refit.weights.bound import Bound
from refit.weights.boxes import selections, selections_of, slices_of
from refit.weights.update import Current, Needed, Selected, Update
from refit.weights.worker import PATHS

if TYPE_CHECKING:
    from refit.weights import parts as recorded


@dataclass(frozen=True, slots=True)
class SubscriberInfo:
    """A subscriber as it is now."""

    worker: str
    """The name it goes by."""
    connected: bool
    """Whether a trainer has welcomed it, and its heart beats; of an archive, whether it can be
    read."""
    path: str
    """How it gets the bytes: "none" (nothing yet), "socket", "shm", "cuda_ipc", "neighbor" or
    "archive"."""
    epoch: int
    """Of the trainer it knows: another one after a restart; 0 for none."""
    version: int
    """Applied; 0 for none."""
    state: str
    """ "connecting", "joining", "current", "staging", "staged" or "applying"."""


Parts = Mapping[str, Sequence[slice] | None] | Iterable[str]
"""Names of tensors, and slices of their first dimensions."""


class Subscriber(Handle):
    """Subscribes at ``endpoint`` (None: broadcast.endpoint of the configuration).

    That is "user://refit" by default, where ``Publisher()`` of the same user binds. Returns at
    once, whether or not the trainer is there. ``archive`` in its place is the folder of an archive,
    which is followed instead of a trainer (the endpoint "archive://FOLDER"): the newest version,
    then each newer one, read from its files and checked; a folder that is not there or cannot be
    read is waited for, as a trainer is, and ``idle_timeout`` counts how long. ``worker`` is the
    name that the trainer reports it under (None: made of host, process and a random part); with
    keys the trainer puts the name of the worker's key in front of it (``Worker.name``). ``timeout``
    in seconds is for waits that give none of their own; None waits without a limit.
    ``idle_timeout`` in seconds (broadcast.idle_timeout_ms) ends a worker whose trainer is gone,
    however that ended: when it has heard no trainer for so long, counted from here on, a ``for``
    loop ends and ``next`` raises ClosedError, for good. A trainer that ends the training does so at
    once (``Publisher.close``). A trainer that is there is heard, however long it trains; give more
    than one takes to start, and more than broadcast.heartbeat_timeout_ms (5 s). None: no limit.
    ``parts``: take these of each version alone, and have nothing else sent: names of tensors, or a
    mapping from names to slices of their first dimensions (None: the whole tensor), such as
    ``{"lm_head.weight": (slice(0, 1000),), "model.layers.3.*": None}``. A name that ends with ``*``
    stands for all that begin so. An update then has these tensors alone, and of a tensor its part:
    ``update["lm_head.weight"].shape`` is (1000, …). See refit_subscriber_select; not of an
    archive.
    ``device`` is the GPU that the engine is on, to read the weights of a trainer there where they
    lie. "auto": PyTorch's current one, once the process uses CUDA; None: none; or what
    ``use_device`` takes. ``config`` and ``overrides``: as of ``Publisher``. Starts a service thread
    of the C library, joined by ``close``. One thread at a time uses it, but for what is marked "any
    thread". Raises InvalidError, ConfigError, SecurityError (without keys: an address beyond this
    host, or an ipc path where another user listens or could), InputOutputError (a key's file, or
    the folder of user://), UnsupportedError (keys, and a libzmq without CURVE), SystemCallError.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        archive: str | os.PathLike[str] | None = None,
        worker: str | None = None,
        config: ConfigLike = None,
        timeout: float | None = None,
        idle_timeout: float | None = None,
        device: Any = "auto",
        parts: Parts | None = None,
        **overrides: Any,
    ) -> None:
        self._call_lock = CallLock("Subscriber")
        self._guard = threading.RLock()
        self._timeout = timeout
        self._ending = False
        self._current = Current()
        self._update: weakref.ref[Update] | None = None
        self._device: Device | None = None
        self._device_is_ours = False
        self._engine: int | None = None
        self._arrived = ctypes.c_void_p()
        self._delivered = False
        if worker is not None:
            overrides["broadcast_worker"] = worker
        if idle_timeout is not None:
            overrides["broadcast_idle_timeout_ms"] = _milliseconds(idle_timeout)
        if archive is not None:
            if endpoint is not None:
                raise InvalidError("a Subscriber has an endpoint or an archive, not both")
            endpoint = f"archive://{os.fsdecode(archive)}"
        settled = make_config(config, overrides)
        text = None if endpoint is None else encoded(endpoint, "an endpoint")
        self._stage_s: float = settled.get("broadcast.stage_timeout_ms") / 1000
        self._open(lib.refit_subscriber_open, text, settled._as_c)
        self._asked_device = None if settled["broadcast.gpu"] == "off" else device
        try:
            if parts is not None:
                self.select(parts)
            self._find_device(current_cuda(is_chosen=True))
        except BaseException:
            self.close()
            raise

    def select(self, parts: "Parts | recorded.Parts | None") -> None:
        """Takes these parts alone of the versions that ``next`` gives from now on, in place of what
        was selected before; None: all.

        ``parts`` as of the constructor, or what ``refit.record`` has made of an update: then what
        the recorded loader reads is sent alone, such as the rows and columns of a rank, and an
        update is for ``load_into`` with it. Tensors that came whole can be read as well. A version
        with other tensors than the recorded one comes whole, to be recorded again.
        An update that is open stays as it is. A version that has arrived, and was not taken, is
        fetched anew, and missed if the trainer had lent it on a GPU. The next one does not come as
        changes. The trainer is joined once more: a version that it begins within these
        milliseconds does not count on this worker, and comes all the same. In the trainer's memory,
        on its host or GPU, all of a version is there in any case. See refit_subscriber_select.
        Raises InvalidError, UnsupportedError (an archive is followed), HostMemoryError.
        """
        made = sys.modules.get("refit.weights.parts")  # else none was recorded
        with self._call_lock, interrupts_held():  # C and Python are to know the same
            if parts is None:
                call(lib.refit_subscriber_select, self._live, None, 0, None)
                self._current.select(None)
            elif made is not None and isinstance(parts, made.Parts):
                self._select_needed(parts)
            else:
                self._select(cast("Parts", parts))

    def _select_needed(self, parts: "recorded.Parts") -> None:
        if parts.digest is None:
            raise InvalidError(
                "the loader was recorded with tensors that are of no update taken whole: give "
                "refit.record an update"
            )
        boxes = parts.needed
        raw = selections_of([(name, one) for name, these in boxes.items() for one in these])
        digest = (ctypes.c_ubyte * 16).from_buffer_copy(parts.digest)
        call(lib.refit_subscriber_select, self._live, raw, len(raw), digest)
        self._current.select(Needed(parts, boxes, parts.digest))

    def _select(self, parts: Parts) -> None:
        if isinstance(parts, str):
            raise InvalidError(f"parts is the text {parts!r}: give a list of names, or a mapping")
        chosen = parts if isinstance(parts, Mapping) else dict.fromkeys(parts)
        if not chosen:
            raise InvalidError("parts are empty: name at least one part, or give None for all")
        slices: dict[str, tuple[slice, ...]] = {}
        for name, cut in chosen.items():
            if cut is None:
                continue
            if name.endswith("*"):
                raise InvalidError(f"{name} stands for several tensors: slices are of one")
            slices[name] = slices_of(name, cut)
        raw = selections([(name, slices.get(name, ())) for name in chosen])
        call(lib.refit_subscriber_select, self._live, raw, len(raw), None)
        self._current.select(Selected(chosen, slices))

    def _find_device(self, auto: str | None) -> None:
        """Uses the device that was asked for, once it is known: ``auto`` for "auto"."""
        self._asked_device = use_asked(self._asked_device, auto, self.use_device, "taken from")

    # ---- Versions

    def next(self, timeout: float | None = None) -> Update:
        """Waits for the next committed version; the caller closes it (``with update:``). One that
        is streamed (``Update.streamed``) is not committed yet.

        ``timeout`` in seconds; 0 polls once, None is the subscriber's own, which has no limit
        unless it was given (``math.inf``: no limit in any case). Raises DeadlineError (a
        TimeoutError: nothing new in time; the sentence says whether there is a trainer),
        CancelledError after ``wake``, ClosedError (the trainer has ended, or none was heard for
        ``idle_timeout``), StateError (an update is still open, the subscriber was closed meanwhile,
        or broadcast.gpu requires a GPU and ``use_device`` was not called), InvalidError (no such
        timeout), SecurityError or ProtocolError (the trainer refused this worker for good),
        SystemCallError and UnsupportedError (what broadcast.shm or broadcast.gpu require is not to
        be had). Ctrl-C ends the wait.
        """
        seconds = self._timeout if timeout is None else timeout
        if seconds is not None and not seconds >= 0:
            raise InvalidError(f"a timeout of {seconds} s: give seconds, 0 or more, or None")
        end = math.inf if seconds is None else time.monotonic() + seconds
        self._find_device(current_cuda())
        try:
            with self._call_lock:
                return self._await(end)
        finally:
            if self._ending:
                self.close()

    def poll(self) -> Update | None:
        """The newest committed version, for an engine between two requests; None if the caller has
        had it. Does not wait for one. What ``next`` raises, but for DeadlineError."""
        try:
            return self.next(0)
        except DeadlineError:
            return None

    def _await(self, end: float) -> Update:
        poller = select.poll()
        poller.register(lib.refit_subscriber_fd(self._live), select.POLLIN)
        while True:
            self._check_not_ending()
            try:
                return self._take()
            except DeadlineError:
                left_s = end - time.monotonic()
                if left_s <= 0:
                    raise
            except CancelledError:
                self._check_not_ending()
                raise
            # A signal that came just before, or to another thread, does not end a poll.
            poller.poll(SLICE_MS if left_s * 1000 > SLICE_MS else math.ceil(left_s * 1000))

    def _take(self) -> Update:
        """The update that is there. One that an exception kept from the caller is given again."""
        pointer = self._live
        if self._delivered or not lib.refit_update_version(self._arrived):
            self._end_forgotten()
            call(lib.refit_subscriber_next, pointer, 0, ctypes.byref(self._arrived))
            self._delivered = False
        arrived = self._arrived.value
        assert arrived is not None
        self._current.serial += 1
        try:
            on, engine = self._devices_of(arrived)
        except StateError:
            lib.refit_update_close(self._arrived)  # the trainer waits for an answer
            raise
        update = Update(self, self._call_lock, self._current, arrived, on, engine, self._stage_s)
        self._update = weakref.ref(update)
        self._delivered = True
        return update

    def _end_forgotten(self) -> None:
        """Ends an update in C whose close an exception, Ctrl-C for one, had cut short, or that was
        dropped in the middle of a call. StateError for one that is open."""
        update = None if self._update is None else self._update()
        if update is not None and not update.closed:
            raise StateError(
                f"version {update.version} is still open: close it before the next (with update: "
                "does so at the end of the block)"
            )
        lib.refit_update_close(self._arrived)

    def _devices_of(self, update: int) -> tuple[int, int]:
        """The CUDA device that the update lies on, and the engine's; -1 for host memory, or none.
        StateError if PyTorch does not see the first."""
        on_gpu = bool(lib.refit_update_device(update))
        if self._engine is None and self._device is not None and (on_gpu or "torch" in sys.modules):
            self._engine = _cuda_number(self._device)
        engine = -1 if self._engine is None else self._engine
        if on_gpu and engine < 0:
            assert self._device is not None
            raise StateError(
                f"PyTorch does not see the GPU {self._device.info.uuid} of this subscriber"
            )
        return engine if on_gpu else -1, engine

    def _check_not_ending(self) -> None:
        if self._ending:
            raise StateError("this Subscriber was closed while it waited")

    def __iter__(self) -> Iterator[Update]:
        """Versions as they come. ``wake``, ``close`` and ``idle_timeout`` end it; a deadline is
        raised."""
        while not self.closed and not self._ending:
            try:
                update = self.next()
            except (CancelledError, ClosedError):
                return
            except StateError:
                if self._ending or self.closed:
                    return
                raise
            yield update

    def wake(self) -> None:
        """Ends a waiting ``next`` or the next one by CancelledError, and a ``for`` loop cleanly.

        Any thread, and in signal handlers. StateError once closed.
        """
        with self._guard:
            lib.refit_subscriber_wake(self._live)

    def fileno(self) -> int:
        """A descriptor that polls readable while ``next`` would not wait: for select and asyncio.

        Borrowed until close; do not read it. StateError once closed.
        """
        return int(lib.refit_subscriber_fd(self._live))

    # ---- What is known

    def describe(self) -> SubscriberInfo:
        """The subscriber as of now. Any thread."""
        raw = abi.refit_subscriber_info(size=ctypes.sizeof(abi.refit_subscriber_info))
        with self._guard:
            call(lib.refit_subscriber_describe, self._live, ctypes.byref(raw))
        return SubscriberInfo(
            worker=raw.worker.decode("utf-8", "replace"),
            connected=bool(raw.connected),
            path=PATHS[raw.path],
            epoch=raw.epoch,
            version=raw.version,
            state=raw.state.decode(),
        )

    def stats(self) -> dict[str, float]:
        """Its figures under their names in refit/stats.h. Any thread."""
        with self._guard:
            figures = stats.gather((lib.refit_subscriber_stats, self._live))
        ours = ("receive_", "messages_")
        names = [name for name, *_ in figures._fields_ if name.startswith(ours)]
        return {name: getattr(figures, name) for name in names}

    def use_device(self, device: Any) -> None:
        """Says which GPU the worker is on, to read the weights in the trainer's memory there.

        A torch.device, a spec such as "cuda:0", or a ``refit.Device``, which then outlives the
        subscriber. Right after open, once. Nothing happens for a device that cannot map memory of
        other processes, unless broadcast.gpu is "require": UnsupportedError. Raises StateError
        (another device), NotFoundError.
        """
        with self._call_lock:
            pointer = self._live
            opened, ours = open_device(device)
            if ours and opened.is_same_gpu(self._device):
                opened.close()
                return
            before = self._device, self._device_is_ours
            try:
                if self._device is not None and self._device is not opened:
                    raise StateError("the subscriber has a device already, until it is closed")
                self._device, self._device_is_ours = opened, ours
                call(lib.refit_subscriber_use_device, pointer, opened.pointer)
                self._asked_device = None
            except RefitError:  # after anything else, Ctrl-C for one, C may have it in use
                self._device, self._device_is_ours = before
                if ours:
                    opened.close()
                raise

    def bind(self, target: Any, *, cast: bool = False) -> None:
        """Says where the engine has its weights, for ``update.apply()``: a module or a mapping.

        All tensors of it, on the host or on GPUs, row by row; tied ones may share their memory. It
        is kept alive until ``unbind`` or ``close``. ``cast=True`` converts F32, F16 and BF16 to
        each other where a tensor has another of these types than the version, to nearest even as
        ``Tensor.to`` does; old bytes come back as they were all the same. Raises InvalidError
        (there is no tensor, or two overlap), StateError (bound already), HostMemoryError, and what
        a GPU reports.
        """
        with self._call_lock:
            pointer = self._live
            if self._current.bound is not None:
                raise StateError("this Subscriber has something bound: call unbind first")
            bound = Bound(target, cast)
            try:
                array = bound.as_c()
            except BaseException:
                bound.close()
                raise
            self._current.bound = bound
            try:
                call(lib.refit_subscriber_bind, pointer, array, len(array))
            except RefitError:  # after anything else, Ctrl-C for one, C may have it
                self._end_bound()
                raise

    def unbind(self) -> None:
        """Gives back what was bound, as it is; does nothing if nothing is. StateError while an
        update is applied and neither accepted nor refused. What a GPU had kept from being taken
        back is taken back now, and raises what the GPU reports if that fails."""
        with self._call_lock:
            call(lib.refit_subscriber_unbind, self._live)
            self._end_bound()

    def _end_bound(self) -> None:
        bound, self._current.bound = self._current.bound, None
        if bound is not None:
            bound.close()

    def __repr__(self) -> str:
        if self.closed or self._process != os.getpid():
            return "<refit.Subscriber: closed>"
        now = self.describe()
        return f"<refit.Subscriber: worker {now.worker!r}, version {now.version}, {now.state}>"

    # ---- The end

    def close(self) -> None:
        """Leaves in good order. An open update ends with it, refused if it was undecided.

        Any thread: a ``next`` that waits in another one ends with StateError. Blocks at most for
        the message being handled and broadcast.linger_ms. A second close does nothing.
        """
        if self._process != os.getpid():
            return
        if not self.closed:  # else Ctrl-C may have come right after
            if self._call_lock.is_mine:  # a signal handler within next, which closes it at its end
                self._ending = True
                lib.refit_subscriber_wake(self._live)
                return
            self._end_waits()
            super().close()
        self._end_bound()
        device, self._device = self._device, None
        if device is not None and self._device_is_ours:
            device.close()

    def _end_waits(self) -> None:
        with self._guard:
            if self.closed:
                return
            self._ending = True
            lib.refit_subscriber_wake(self._live)
        self._call_lock.wait()

    def _refuse_use(self, pointer: int) -> None:
        pass  # some calls may be made from any thread, and are waited for

    def _close(self, pointer: int) -> None:
        update = None if self._update is None else self._update()
        if update is not None:
            update.close()
        with self._guard:
            lib.refit_subscriber_close(pointer)


def _milliseconds(seconds: float) -> int:
    if not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise InvalidError(
            f"an idle_timeout of {seconds!r}: give seconds, more than 0, or None for no end"
        )
    return math.ceil(seconds * 1000)


def _cuda_number(device: Device) -> int:
    """PyTorch's number of the GPU: its own order, which may differ from the driver's. -1: PyTorch
    does not see it, or the device is the host."""
    import torch

    uuid = device.info.uuid.removeprefix("GPU-")
    for number in range(torch.cuda.device_count()):
        theirs = str(torch.cuda.get_device_properties(number).uuid)
        if theirs.removeprefix("GPU-") == uuid:
            return number
    return -1
