"""A received version in the worker's hands: whole, verified, committed by the trainer.

    with update:                                  # accepts, or refuses if the block raises
        update.load_into(model)

Its bytes are borrowed until it is closed, those in a GPU's memory until it is accepted or refused,
and the trainer may wait for that. What the C library does to bring it is in refit/broadcast.h; how
weights are applied is the worker's affair, with ``load_into`` (load.py) for plain PyTorch models.
"""

import ctypes
import math
import os
import struct
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, KeysView
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from refit._c import abi, dtypes
from refit._c.call_lock import CallLock
from refit._c.device import stream_of
from refit._c.handle import Handle
from refit._c.library import call, lib
from refit._c.waiting import interrupts_held, run_interruptibly, wait_in_slices
from refit.errors import InvalidError, NotFoundError, RefitError, StateError, UnsupportedError
from refit.weights import load
from refit.weights.bound import Bound
from refit.weights.source import Weight, cuda_number
from refit.weights.target import Fingerprint, fingerprint_of
from refit.weights.view import CudaBytes, Entry, Lifetime, View, entries_of

if TYPE_CHECKING:
    import numpy
    import torch

    from refit.weights.needs import Boxes
    from refit.weights.parts import Part, Parts


_TARGET = struct.Struct("@IPQP")  # refit_target
assert _TARGET.size == ctypes.sizeof(abi.refit_target)
_BOX = struct.Struct("@iI4QQ4Q4Q")  # refit_box
assert _BOX.size == ctypes.sizeof(abi.refit_box)


def _as_targets(packed: bytearray) -> Any:
    """The array of refit_target."""
    return (abi.refit_target * (len(packed) // _TARGET.size)).from_buffer(packed)


def _padded(numbers: tuple[int, ...]) -> tuple[int, ...]:
    """As many as a refit_box has."""
    return numbers + (0,) * (4 - len(numbers))


class Selected:
    """The tensors that a worker takes of each version, by name, and the slices of some."""

    def __init__(self, names: Iterable[str], parts: dict[str, tuple[slice, ...]]) -> None:
        self._parts = parts
        self._names = frozenset(names)
        self._begins = tuple(name[:-1] for name in self._names if name.endswith("*"))

    def of(self, entries: dict[str, Entry]) -> dict[str, Entry]:
        """Those of a version that are selected, in its order."""
        chosen = {
            name: one.cut(self._parts.get(name, ()))
            for name, one in entries.items()
            if name in self._names or name.startswith(self._begins)
        }
        for name, one in chosen.items():
            if one.alias_of not in chosen:  # tied to one that was not selected by its name
                chosen[name] = one._replace(alias_of=None)
        return chosen


class Needed:
    """What a recorded loader reads of each version, which a worker takes alone. Versions with other
    tensors are taken whole."""

    def __init__(self, parts: "Parts", boxes: "Boxes", manifest: bytes) -> None:
        self.parts = weakref.ref(parts)
        self.manifest = manifest
        self._cut = frozenset(
            name
            for name, (one, *more) in boxes.items()
            if more or one.shape != parts.manifest[name][1]
        )

    def of(self, entries: dict[str, Entry]) -> dict[str, Entry]:
        """Those of a version, some with holes."""
        return {
            name: one._replace(holes=True) if (one.alias_of or name) in self._cut else one
            for name, one in entries.items()
        }


class Current:
    """State that a subscriber and its updates share.

    ``serial`` is the number of the open update: C keeps all updates of a subscriber in one place,
    one after another. ``bound`` holds the tensors that versions are written into. What was found
    out about the tensors of one version counts for the next one, if that has the same.
    """

    def __init__(self) -> None:
        self.serial = 0
        self.bound: Bound | None = None
        self.selected: Selected | Needed | None = None
        """What the worker takes of each version; None: all. With ``select``."""
        self.fit: load.Fit | None = None
        """The last ``load_into`` that was one call of the C library."""
        self._known: tuple[bytes, dict[str, Entry]] = b"", {}

    def select(self, selected: Selected | Needed | None) -> None:
        """Of the versions from now on."""
        self.selected = selected
        self._known = b"", {}

    def selected_of(self, manifest: bytes) -> Selected | Needed | None:
        """What is taken of a version of these tensors; None: all."""
        one = self.selected
        return None if isinstance(one, Needed) and one.manifest != manifest else one

    def entries_of(self, update: int) -> tuple[bytes, dict[str, Entry]]:
        """What tells the tensors of a version, and their descriptions: the same object for the same
        tensors."""
        raw = (ctypes.c_ubyte * 16)()
        call(lib.refit_update_manifest, update, raw)
        digest = bytes(raw)
        if digest != self._known[0]:
            count = lib.refit_update_count(update)
            tensor = partial(call, lib.refit_update_tensor, update)
            entries = entries_of(count, lambda index, raw: tensor(index, raw, None))
            if (selected := self.selected_of(digest)) is not None:
                entries = selected.of(entries)
            self._known = digest, entries
        return self._known


class Update(Handle):
    """One version. ``Subscriber.next`` gives it; one is open at a time.

    Use it with ``with``: a clean exit accepts it (the engine runs on this version from now on), an
    exception refuses it with the exception's text and goes on, also KeyboardInterrupt. Both close
    it. One that is dropped undecided is refused, with a ResourceWarning. ``close`` never waits: if
    another thread is in a call of the subscriber, the trainer hears of it before the next version.
    """

    kept: bool | None = None
    """For a refusal: whether the engine still runs on the version before. None: as long as no
    tensor was handed out."""

    def __init__(
        self,
        subscriber: Handle,
        call_lock: CallLock,
        current: Current,
        pointer: int,
        device: int,
        engine: int,
        stage_s: float,
    ) -> None:
        self._subscriber = subscriber
        self._call_lock = call_lock
        self._current = current
        self._serial = current.serial
        self._decided = False
        self._failed = False  # the last apply
        self._cuda = device
        self._engine = engine
        self._stage_s = stage_s  # broadcast.stage_timeout_ms
        self._was_read = False
        self._tensors: list[weakref.ref[Any]] = []
        self._lifetime: Lifetime | None = None
        self._keeping = threading.RLock()  # a signal handler may come back into it
        self._adopt(pointer)
        self._version = int(lib.refit_update_version(pointer))
        self._streamed = bool(lib.refit_update_is_streamed(pointer))
        self._manifest, self._entries = current.entries_of(pointer)
        self._selected = current.selected_of(self._manifest)
        count = 0 if self._streamed else lib.refit_update_count(pointer)
        self._places = (ctypes.c_void_p * count)()
        if not self._streamed:
            call(lib.refit_update_places, pointer, self._places, len(self._places))

    # ---- What is in it

    @property
    def version(self) -> int:
        """Its number; known also when it is closed."""
        return self._version

    @property
    def device(self) -> str:
        """Where its bytes lie: "cpu", or "cuda:0" in the trainer's memory there."""
        return "cpu" if self._cuda < 0 else f"cuda:{self._cuda}"

    @property
    def streamed(self) -> bool:
        """Whether it comes piece by piece, through a bounded part of the GPU's memory, while the
        trainer writes it. It is not committed yet, and ``accept`` waits for that. ``load_into`` and
        ``tensors`` take it, once; its views have no bytes. If it fails in the middle, the engine
        has lost the version before, too. See refit_update_is_streamed in refit/broadcast.h."""
        return self._streamed

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors, tied ones once."""
        return sum(
            one.dtype.nbytes(one.shape) for one in self._entries.values() if one.alias_of is None
        )

    def keys(self) -> KeysView[str]:
        """The tensors' names, in the trainer's order, tied ones included."""
        return self._entries.keys()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __getitem__(self, name: str) -> View:
        """The tensor as a ``View``: ``.torch()``, ``.numpy()``, ``.bytes``, or for DLPack.
        NotFoundError, which is a LookupError and no KeyError; StateError once closed."""
        self._check()
        found = self._entries.get(name)
        if found is None:
            raise NotFoundError(f"version {self._version} has no tensor {name!r}")
        return View(self, name, found)

    def views(self) -> Iterator[View]:
        """All tensors as ``View``. StateError."""
        for name, entry in self._entries.items():
            self._check()
            yield View(self, name, entry)

    def tensors(self, *, copy: bool = False) -> Iterator[tuple[str, "torch.Tensor"]]:
        """(name, PyTorch tensor) of all, zero-copy on the update's memory, or copies that stay.

        Tied names give tensors on the same bytes. Without ``copy`` see ``View.torch``: do not use
        them beyond the update, and do not write those on a GPU. A streamed version gives copies, in
        the order in which they come. Raises UnsupportedError, StateError; for a streamed version
        also CancelledError and others if it comes to nothing, and CorruptError.
        """
        if self._streamed:
            yield from self._pieced_together()
            return
        for view in self.views():
            tensor = view.torch()
            yield view.name, tensor.clone() if copy else tensor

    def arrays(
        self, *, copy: bool = False, bits: bool = False
    ) -> Iterator[tuple[str, "numpy.ndarray[Any, Any]"]]:
        """(name, NumPy array) of all, read-only on the update's memory, or copies that stay.

        ``bits``: see ``View.numpy``. Raises UnsupportedError, StateError.
        """
        for view in self.views():
            array = view.numpy(bits=bits)
            yield view.name, array.copy() if copy else array

    def load_into(self, target: Any, *, strict: bool = True, cast: bool = False) -> load.Loaded:
        """Copies into existing tensors: a module, or a mapping of names to tensors or arrays.

        Of a module, its own parameters and buffers are written, whatever its ``state_dict()``
        gives; its names come without what DDP and ``torch.compile`` put into them, and buffers that
        are in no checkpoint are written if the version has them. Names, types and shapes are
        checked before the first byte is written: a version that does not fit leaves ``target`` as
        it was. So does one with two tensors that differ, for which ``target`` has one memory (a
        worker ties what the trainer does not). ``strict=False`` allows names on one side only, and
        entries of ``target`` that are not tensors (``_extra_state``), which stay as they are; both
        are returned. ``cast=True`` converts to the target's types where they differ; without it
        that is refused. Names of either side that are tied to one that is loaded count as loaded.
        Blocks for the copies, those to a GPU included. Tensors on the GPU of the subscriber
        (``Subscriber(device=…)``) are copied by one call of the C library: there, what was written
        into views is not copied. Raises InvalidError, StateError, UnsupportedError (FSDP1, which
        has no parameters of its own), CorruptError (on the trainer's GPU: it changed its weights
        while they were read, and ``target`` holds no version whole), DeadlineError.

        ``target`` may be what ``refit.record`` gave: the version is then written as the recorded
        loader writes it, and the other arguments do not count. The loader's own ``strict`` was that
        of the recording: the names that it leaves out are returned. InvalidError for a version of
        other names, types or shapes, StateError for a model whose tensors lie elsewhere by now.
        """
        recorded = sys.modules.get("refit.weights.parts")  # else none was made
        if recorded is not None and isinstance(target, recorded.Parts):
            return self._load_parts(target, recorded.write)
        fit, (found, _held) = self._current.fit, self._fingerprint_of(target)
        known = fit is not None and fit.is_for(self._entries, found, strict, cast)
        if fit is not None and known and self._copy_to_gpu(fit.targets):
            return fit.left_out
        views = {view.name: view for view in self.views()}
        plan = load.check(views, target, strict=strict, cast=cast)
        targets, rest = self._targets(plan)
        if self._streamed and (self._engine < 0 or rest):
            return load.apply_as_they_come(plan, self._pieced_together())
        if (len(targets) or self._streamed) and self._copy_to_gpu(targets):
            if found is not None and not rest and plan.is_into(target):
                self._current.fit = self._fit_of(plan, found, strict, cast, targets)
            plan = plan._replace(copies=rest)
        return load.apply(plan)

    def _fingerprint_of(self, target: Any) -> tuple[Fingerprint | None, list[Any]]:
        """What tells that a target is where it was; and what holds its memory meanwhile. Only a
        copy to the engine's GPU asks."""
        return (None, []) if self._engine < 0 else fingerprint_of(target)

    def _fit_of(
        self, plan: load.Plan, found: Fingerprint, strict: bool, cast: bool, targets: Any
    ) -> load.Fit:
        missing, unexpected = map(tuple, plan.left_out)
        return load.Fit(self._entries, found, strict, cast, missing, unexpected, targets)

    def _load_parts(self, parts: "Parts", write: Callable[..., None]) -> load.Loaded:
        self._check_needed(parts)
        found, _held = self._fingerprint_of(parts.model)
        known = parts.packed_for(self._entries, found, self._cuda >= 0)

        def tensor_of(name: str) -> "torch.Tensor":
            return self[name].torch_with_holes()

        if known is not None and not self._streamed and self._copy_to_gpu(known.targets):
            write(known.left, tensor_of)
            return parts.left_out
        if isinstance(self._selected, Needed):  # it is a version of the same tensors
            parts.check_model()
        else:
            parts.check({name: (one.dtype.name, one.shape) for name, one in self._entries.items()})
        if self._streamed:
            self._stream_parts(parts, write)
            return parts.left_out
        self._lend()  # a copy that fails leaves the model torn
        write(parts.places() if parts.overlap else self._parts_left(parts, found), tensor_of)
        return parts.left_out

    def check_whole(self) -> None:
        """StateError: the worker has taken a part of the version alone."""
        if self._selected is not None:
            raise StateError(
                f"not all of version {self._version} was taken: select None, or its parts"
            )

    def _check_needed(self, parts: "Parts") -> None:
        if isinstance(self._selected, Needed) and self._selected.parts() is not parts:
            raise InvalidError(
                "only what another recorded loader reads was taken of the version: call "
                "Subscriber.select with this one before the next"
            )

    def _stream_parts(self, parts: "Parts", write: Callable[..., None]) -> None:
        """Each tensor's parts once it is there; parts that overlap in their order, at the end."""
        if parts.overlap:
            tensors = dict(self._pieced_together())
            write(parts.places(), tensors.__getitem__)
            return
        of_source: dict[str, list[tuple[Part, torch.Tensor]]] = {}
        for part, place in parts.places():
            of_source.setdefault(part.source, []).append((part, place))
        for name, tensor in self._pieced_together():
            write(of_source.get(name, []), {name: tensor}.__getitem__)

    def _parts_left(
        self, parts: "Parts", found: Fingerprint | None
    ) -> "list[tuple[Part, torch.Tensor]]":
        """Copies the parts on the engine's GPU, by one call of the C library; those that are left:
        elsewhere, or more than copies of rows."""
        places = parts.places()
        if self._engine < 0:
            return places
        boxes, targets = bytearray(), []
        left: list[tuple[Part, torch.Tensor]] = []
        for (part, place), box in zip(places, parts.rows(self._cuda >= 0), strict=True):
            if box is None or cuda_number(place) != self._engine:
                left.append((part, place))
                continue
            entry = self._entries[part.source]
            if entry.part is not None:
                left.append((part, place))
                continue
            whole = box.shape == (math.prod(entry.shape),) and box.dtype is entry.dtype
            targets.append((entry.number, place.data_ptr(), box.nbytes, whole, len(boxes)))
            shape, source, target = map(_padded, (box.shape, box.source, box.target))
            rank = len(box.shape)
            boxes += _BOX.pack(box.dtype.number, rank, *shape, box.offset, *source, *target)
        if not targets:
            return places
        begin = ctypes.addressof((ctypes.c_char * len(boxes)).from_buffer(boxes))
        array = bytearray()
        for number, pointer, nbytes, whole, at in targets:
            array += _TARGET.pack(number, pointer, nbytes, 0 if whole else begin + at)
        packed = _as_targets(array)
        if not self._copy_to_gpu(packed):
            return places
        if found is not None:
            parts.pack(self._entries, found, self._cuda >= 0, packed, boxes, left)
        return left

    def _copy_to_gpu(self, targets: Any) -> bool:
        """Copies to the engine's GPU, by one call of the C library. False: the GPU takes no
        digests, and nothing was copied."""
        self._check_lendable()
        self._was_read = True  # a copy that fails leaves the target torn
        stream = abi.refit_stream_ref(stream_of(self._engine))
        try:
            with self._call_lock:
                pointer = self._live
                self._run(
                    lambda: call(lib.refit_update_copy, pointer, targets, len(targets), stream)
                )
        except UnsupportedError:
            if self._streamed:
                raise
            return False
        return True

    def _pieced_together(self) -> "Iterator[tuple[str, torch.Tensor]]":
        """The tensors of a streamed version, each once all of it has come; tied ones with it."""
        import torch

        names = list(self._entries)
        tied: dict[str, list[str]] = {}
        for name, entry in self._entries.items():
            tied.setdefault(entry.alias_of or name, []).append(name)
        under_way: dict[str, torch.Tensor] = {}
        for view in self.views():  # types that PyTorch lacks are found out before the first piece
            dtypes.to_torch(view._entry.dtype)
            if view.nbytes == 0:
                yield view.name, view.empty()
        for tensor, offset, nbytes, memory in self._pieces():
            name = names[tensor]
            if name not in under_way:
                under_way[name] = View(self, name, self._entries[name]).empty()
            whole = under_way[name].view(-1).view(torch.uint8)
            whole[offset : offset + nbytes].copy_(memory)
            if offset + nbytes == whole.nbytes:
                made = under_way.pop(name)
                yield from ((one, made) for one in tied[name])

    def _pieces(self) -> "Iterator[tuple[int, int, int, torch.Tensor]]":
        """Number of the tensor, offset in it, bytes, and these: until the next list is taken."""
        import torch

        self._check_undecided()
        pieces, count = ctypes.POINTER(abi.refit_piece)(), ctypes.c_uint32()

        def take(slice_ms: int) -> None:
            with self._call_lock:
                call(
                    lib.refit_update_next_pieces,
                    self._live,
                    slice_ms,
                    ctypes.byref(pieces),
                    ctypes.byref(count),
                )

        while True:
            torch.cuda.synchronize(self._cuda)  # those before have been copied, on whatever stream
            wait_in_slices(take, self._stage_s)
            self._was_read = True
            if not count.value:
                return
            for piece in pieces[: count.value]:
                raw = CudaBytes(piece.memory or 0, piece.bytes, self)
                memory = torch.as_tensor(raw, device=f"cuda:{self._cuda}")
                yield piece.tensor, piece.offset, piece.bytes, memory

    def _targets(self, plan: load.Plan) -> tuple[Any, list[tuple[View, Weight]]]:
        """What goes to the engine's GPU as it is, as C takes it, and the rest."""
        targets, rest = bytearray(), []
        for view, place in plan.copies:
            whole = self._entries[view.name].part is None
            alike = whole and place.dtype.name == view.dtype and place.layout is None
            if alike and place.device == self._engine >= 0:
                number = self._entries[view.name].number
                targets += _TARGET.pack(number, place.pointer, place.nbytes, 0)
            else:
                rest.append((view, place))
        return _as_targets(targets), rest

    def apply(self, *, strict: bool = True) -> load.Loaded:
        """Writes the version into what ``Subscriber.bind`` was given, whole or not at all.

        Only what differs is written, and can be taken back: ``accept`` makes it final, while
        ``refuse``, ``close``, an exception in the ``with`` block or a failure of this call put
        every byte back as it was. The engine must not run meanwhile. ``strict`` and what is
        returned are those of ``load_into``. Blocks for the copies. Raises InvalidError (it does not
        fit), StateError (nothing is bound, it is no longer where it was, or the update is decided
        or closed), StaleError, CorruptError (the trainer has changed what it lent on a GPU, or with
        broadcast.verify: always), HostMemoryError or DeviceMemoryError (no memory for the old
        bytes), and what a GPU reports; the sentence says so if not every byte could be put back.
        The first version since ``bind`` replaces none: nothing can be put back until one was
        accepted. Old bytes count against offload.budget_bytes (BudgetError).
        """
        with self._call_lock:
            pointer = self._live
            self._check_undecided()
            bound = self._current.bound
            if bound is None:
                raise StateError("nothing is bound: call Subscriber.bind(model) first")
            self._failed = True
            left_out = self._check_bound(bound, strict)
            bound.wait()
            call(lib.refit_update_apply, pointer, ctypes.byref(ctypes.c_uint32()))
            self._failed = False
            return left_out

    def _check_bound(self, bound: Bound, strict: bool) -> load.Loaded:
        fit, (found, _) = bound.fit, fingerprint_of(bound.target)
        if fit is not None and fit.is_for(self._entries, found, strict, bound.cast):
            return fit.left_out
        views = {view.name: view for view in self.views()}
        plan = load.check(views, bound.as_bound(views), strict=strict, cast=bound.cast)
        if found is not None and plan.is_into(bound.target):
            bound.fit = self._fit_of(plan, found, strict, bound.cast, None)
        return plan.left_out

    # ---- What becomes of it

    def accept(self) -> None:
        """Tells the trainer that the engine runs on this version. Views of host memory stay until
        close; those of a GPU's end here, as the trainer may write there again.

        Raises StaleError if the trainer has evicted this worker meanwhile: what was read may be
        torn, what was applied is put back, and the next version is to be waited for. StateError if
        it is decided or closed, or the last ``apply`` failed, or one could not be put back, and the
        model is still bound (an engine without the version must not say that it has it). With bytes
        in a GPU's memory it waits for that GPU's work first. Nothing is raised if the trainer was
        lost: the engine runs on the version, and the next trainer is told so. For a streamed
        version it waits for the trainer's decision: CancelledError if that is an abort, ClosedError
        if the trainer is lost; the engine then holds no version whole. StateError if not all of it
        was taken.
        """
        with self._call_lock:
            pointer = self._live
            self._check_undecided()
            self._check_applied()
            self._wait()
            self._decided = True
            try:
                self._run(lambda: call(lib.refit_update_accept, pointer))
            except StateError:  # it can still be applied, or refused
                self._decided = False
                raise
            finally:
                if self._decided and self._cuda >= 0:
                    self._call_back()

    def refuse(self, reason: str = "", kept: bool | None = None) -> None:
        """Tells the trainer that it could not be applied, and why (cut to 160 bytes).

        ``kept``: whether the engine still runs on the version before; None asks the attribute.
        With False the worker joins again and is offered the current version in full, or the next
        one if that was lent on a GPU; with True the next one. What was applied is put back first;
        if a GPU cannot, its error is raised, and the refusal counts with False. StateError if it is
        decided or closed.
        """
        with self._call_lock:
            pointer = self._live
            self._check_undecided()
            self._decided = True
            text = reason.encode("utf-8", "replace").replace(b"\0", b" ")
            try:
                self._wait()
            finally:
                if self._cuda >= 0:
                    self._call_back()
                call(lib.refit_update_refuse, pointer, text, int(self._holds(kept)))

    def _check_applied(self) -> None:
        if self._failed and self._current.bound is not None:
            raise StateError(
                f"version {self.version} could not be applied: apply it again, or refuse it; if it "
                "was loaded in another way, call Subscriber.unbind first"
            )

    def _holds(self, kept: bool | None) -> bool:
        kept = self.kept if kept is None else kept
        return not self._was_read if kept is None else kept

    def _close(self, pointer: int) -> None:
        """Views end. An undecided update is refused, with nothing held."""
        try:
            self._wait()
        finally:
            self._end(pointer)
            self._call_back()
            self._lifetime = None

    def _end(self, pointer: int) -> None:
        """Ends it in C, in a call of its own: the collector may come in the middle of another
        thread's call, or of this one's. The subscriber ends it then, before it takes the next."""
        if self._subscriber.closed or not self._is_current:
            return
        try:
            with self._call_lock:
                lib.refit_update_close(pointer)
        except StateError:
            return

    def _wait(self) -> None:
        """Work on a GPU that reads the trainer's memory there must be done before it may go."""
        if self._cuda >= 0 and self._was_read:
            import torch

            torch.cuda.synchronize(self._cuda)

    def _call_back(self) -> None:
        """Empties the PyTorch tensors that are still referred to."""
        kept = [tensor for ref in self._tensors if (tensor := ref()) is not None]
        self._tensors.clear()
        if not kept:
            return
        import torch

        # In this mode tensors that were made in it and out of it may be changed.
        with interrupts_held(), torch.inference_mode():
            for tensor in kept:
                tensor.set_()

    def _run(self, function: Callable[[], None]) -> None:
        """A call that waits for the trainer where the version is streamed."""
        if self._streamed:
            run_interruptibly(function)
        else:
            function()

    def _lend(self) -> None:
        if self._streamed:
            raise StateError(
                f"version {self._version} is streamed, and its tensors have no memory of their "
                "own: take it with load_into or tensors"
            )
        self._check_lendable()
        self._was_read = True

    def _check_lendable(self) -> None:
        self._check()
        if self._decided and self._cuda >= 0:
            raise StateError(
                f"version {self._version} was accepted or refused, and its memory on the GPU is "
                "the trainer's again: copy what is to stay before (copy=True)"
            )

    def _keep(self) -> Lifetime:
        with self._keeping:  # views may be taken by several threads
            if self._lifetime is None:
                self._lifetime = Lifetime(self._live)
            return self._lifetime

    def _lifetime_with(self, nbytes: int) -> Lifetime:
        with self._keeping:
            return Lifetime(self._live, nbytes)

    def _remember(self, tensor: Any) -> None:
        self._tensors.append(weakref.ref(tensor))

    @property
    def _is_current(self) -> bool:
        """False once another one has come: a close that Ctrl-C cut short had ended this one."""
        return self._serial == self._current.serial

    @property
    def _live(self) -> int:
        self._check_open()
        return super()._live

    def _check(self) -> None:
        _ = self._live

    def _check_open(self) -> None:
        if self.closed or not self._is_current:
            raise StateError(
                f"version {self._version} is closed, and its tensors ended with it: copy what is "
                "to stay (copy=True)"
            )

    def _check_undecided(self) -> None:
        if self._decided:
            raise StateError(f"version {self._version} was accepted or refused before")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if not self._decided and not self.closed:
                self._decide(value)
        finally:
            self.close()

    def _decide(self, failure: BaseException | None) -> None:
        if failure is None:
            self.accept()
            return
        text, name = str(failure), type(failure).__name__
        try:
            self.refuse(f"{name}: {text}" if text else name)
        except RefitError as why:
            failure.add_note(f"refit: the trainer could not be told: {why}")

    def __del__(self, _is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if _is_ending() or self.closed:
            return
        forgotten = not self._decided and self._process == os.getpid()
        super().__del__()
        if forgotten:
            text = (
                f"version {self._version} was dropped undecided, so the trainer hears that it is "
                "refused: use it in a block (with update:), which accepts it at its end"
            )
            warnings.warn(text, ResourceWarning, stacklevel=2)

    def __repr__(self) -> str:
        state = "closed" if self.closed else "decided" if self._decided else "open"
        return f"<refit.Update: version {self._version}, {len(self)} tensors, {state}>"
