"""Versions kept as files, and rebuilt from them: what ``refit subscribe --archive`` writes.

    weights = refit.materialize("kept", 3)             # version 3, byte for byte: names to tensors

    with refit.Archive("kept", write=True) as archive: # in a rollout worker
        for update in refit.Subscriber(endpoint):
            with update:
                archive.keep(update)

    archive.keep(refit.named_weights(model))           # or in a trainer, whose engines follow it

An archive is a folder with whole versions and, between them, what changed since the one before. How
a file looks, and how one is rebuilt and checked, is known to the C library
(refit/advanced/archive.h).
"""

import ctypes
import operator
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from refit._c import abi
from refit._c.call_lock import CallLock
from refit._c.config import ConfigLike, make_config
from refit._c.handle import Handle
from refit._c.library import call, encoded, lib
from refit.errors import InvalidError, NotFoundError, RefitError, StateError, UnsupportedError
from refit.weights import load, manifest
from refit.weights.manifest import Tensors
from refit.weights.source import Weight, in_row_order, weight_named
from refit.weights.update import Update
from refit.weights.view import View, entries_of
from refit.weights.writer import copy_of

if TYPE_CHECKING:
    import numpy
    import torch


@dataclass(frozen=True, slots=True)
class ArchivedVersion:
    """The description of one file of an archive."""

    version: int
    epoch: int
    """Of the trainer: a trainer that is restarted counts from 1 again, in another epoch."""
    base: int | None
    """The version that it builds on; None: it is whole, an anchor."""
    file: str
    """The file's name in the folder."""
    file_bytes: int
    weight_bytes: int
    elements: int
    changed: int
    """How many elements differ from the base; of an anchor all."""
    tensors: int
    """Tied ones included."""
    blocks: tuple[int, int, int]
    """As in the base, kept as what changed, kept as they are."""
    digest: str
    """32 hexadecimal digits: equal digests are equal weights."""

    @property
    def density(self) -> float:
        """``changed`` over ``elements``."""
        return self.changed / self.elements if self.elements else 0.0


def _described(function: Any, *arguments: Any) -> ArchivedVersion:
    """The refit_archive_info that a C function fills."""
    raw = abi.refit_archive_info(size=ctypes.sizeof(abi.refit_archive_info))
    call(function, *arguments, ctypes.byref(raw))
    return ArchivedVersion(
        version=raw.version,
        epoch=raw.epoch,
        base=raw.base or None,
        file=raw.name.decode("utf-8", "replace"),
        file_bytes=raw.file_bytes,
        weight_bytes=raw.weight_bytes,
        elements=raw.elements,
        changed=raw.changed,
        tensors=raw.tensors,
        blocks=(raw.blocks_same, raw.blocks_sparse, raw.blocks_dense),
        digest=bytes(raw.digest).hex(),
    )


class Snapshot(Mapping[str, View]):
    """A version that ``Archive.read`` has rebuilt, whole and checked, in memory of its own.

    A mapping of names to ``View``, in the trainer's order, tied names included. There is nothing to
    close: the memory, all of it, goes when neither the snapshot nor a tensor or an array of it is
    referred to. It has no other reader, so its tensors may be written to.
    """

    _cuda = -1
    _process = 0
    _out: ctypes.c_void_p | None = None

    def __init__(self, archive: int, epoch: int, version: int) -> None:
        self._process = os.getpid()
        self._out = ctypes.c_void_p()  # here before C fills it: Ctrl-C may come right after
        call(lib.refit_archive_read, archive, epoch, version, ctypes.byref(self._out))
        assert self._out.value is not None
        self.info = _described(lib.refit_snapshot_describe, self._out)
        """The description of its file; ``changed`` is against the version before."""
        snapshot = self._out.value
        place = ctypes.c_void_p()
        self._places: list[int] = []

        def tensor(index: int, raw: Any) -> None:
            call(lib.refit_snapshot_tensor, snapshot, index, raw, ctypes.byref(place), None)
            self._places.append(place.value or 0)

        self._entries = entries_of(lib.refit_snapshot_count(snapshot), tensor)

    @property
    def version(self) -> int:
        """Its number."""
        return self.info.version

    def __getitem__(self, name: str) -> View:
        """The tensor as a ``View``: ``.torch()``, ``.numpy()``, ``.bytes``; not for DLPack.
        NotFoundError, which is a LookupError and no KeyError."""
        found = self._entries.get(name)
        if found is None:
            raise NotFoundError(f"version {self.version} has no tensor {name!r}")
        return View(self, name, found)

    def get(self, key: str, default: Any = None) -> Any:
        """The ``View`` of that name, or ``default``."""
        found = self._entries.get(key)
        return default if found is None else View(self, key, found)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def tensors(self) -> Iterator[tuple[str, "torch.Tensor"]]:
        """(name, PyTorch tensor) of all, on the snapshot's memory; tied ones share their bytes.

        UnsupportedError for a type that PyTorch lacks: read ``.bytes`` of that one.
        """
        for name, view in self.items():
            yield name, view.torch()

    def arrays(self, *, bits: bool = False) -> Iterator[tuple[str, "numpy.ndarray[Any, Any]"]]:
        """(name, read-only NumPy array) of all. ``bits``: see ``View.numpy``.
        UnsupportedError."""
        for name, view in self.items():
            yield name, view.numpy(bits=bits)

    def load_into(self, target: Any, *, strict: bool = True, cast: bool = False) -> load.Loaded:
        """Copies into a module or a mapping of tensors, as ``Update.load_into``."""
        return load.apply(load.check(dict(self), target, strict=strict, cast=cast))

    # ---- What views ask of their owner

    def _lend(self) -> None:
        """They hold the snapshot, and it changes no more."""

    def _remember(self, tensor: Any) -> None:
        """Its tensors stay good: nothing takes their memory."""

    def _keep(self) -> "Snapshot":
        return self

    def _lifetime_with(self, nbytes: int) -> NoReturn:
        raise BufferError(
            "what DLPack gives would not hold the memory of an archive's version: take .torch() or "
            ".numpy() of it first"
        )

    def __del__(
        self,
        _free: Callable[[ctypes.c_void_p | None], None] = lib.refit_snapshot_close,
        _pid: Callable[[], int] = os.getpid,
    ) -> None:
        if self._process == _pid():
            _free(self._out)

    def __repr__(self) -> str:
        return f"<refit.Snapshot: version {self.version}, {len(self)} tensors>"


class Archive(Handle):
    """A folder of versions, as it is when this is made.

    With ``write=True`` the folder is made if it is missing (its parent must be there; mode 0700, so
    that other users read it only if you let them), and is this object's alone until ``close``:
    BusyError where another one writes. Any number of others read meanwhile, each what is there when
    it opens it. ``config`` and ``overrides``: as of ``Publisher``; ``archive.*``, ``limits.*``,
    ``broadcast.frame_bytes`` and, for what is written, ``broadcast.compress`` and its level count.
    Blocks for the disk. Raises NotFoundError (no such folder), InputOutputError, InvalidError,
    ConfigError, HostMemoryError. One thread at a time.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        write: bool = False,
        config: ConfigLike = None,
        **overrides: Any,
    ) -> None:
        self._call_lock = CallLock("Archive")
        self._epoch = secrets.randbits(64) | 1
        self._last = 0  # number that weights were kept as, or were to be: it may have been seen
        self._writes = write
        settled = make_config(config, overrides)
        mode = abi.REFIT_ARCHIVE_WRITE if write else abi.REFIT_ARCHIVE_READ
        where = encoded(os.fspath(folder), "the folder")
        self._open(lib.refit_archive_open, where, mode, settled._as_c)

    def __len__(self) -> int:
        """The number of versions of all trainers, with those kept since it was opened."""
        with self._call_lock:
            return int(lib.refit_archive_count(self._live))

    def versions(self, *, strict: bool = True) -> list[ArchivedVersion]:
        """The versions, in the order in which they came; reads the first bytes of each file.

        A file that cannot be used raises, or is left out with ``strict=False``: CorruptError (it is
        damaged, or no file of an archive at all), StaleError (it holds another version than its
        name says), UnsupportedError, LimitError, NotFoundError (it was removed meanwhile),
        InputOutputError.
        """
        found: list[ArchivedVersion] = []
        with self._call_lock:
            pointer = self._live
            for index in range(lib.refit_archive_count(pointer)):
                try:
                    found.append(_described(lib.refit_archive_describe, pointer, index))
                except RefitError:
                    if strict:
                        raise
        return found

    def read(self, version: int, *, epoch: int | str | None = None) -> Snapshot:
        """Rebuilds a version, from its anchor on, and checks every digest.

        ``epoch``: of which trainer, as a number or as the 16 digits that ``refit inspect`` shows;
        None, if only one has this version. Blocks for the disk, also
        against Ctrl-C. Raises NotFoundError (it, or a file that it builds on, is not there),
        ExistsError (several trainers have it), CorruptError (a file is damaged, or no file of an
        archive at all), StaleError (a file builds on another version than the one that is there, or
        holds another than its name says), InvalidError (no number), UnsupportedError (a format that
        this refit does not know), LimitError, InputOutputError, HostMemoryError. The snapshot needs
        the archive no longer.
        """
        of = _epoch(epoch)
        with self._call_lock:
            return Snapshot(self._live, of, _number(version, "a version"))

    def keep(self, update: Update | Tensors, *, version: int | None = None) -> ArchivedVersion:
        """Writes a received version, while it is open, and says what became of it.

        Or a trainer's own weights, named as for ``Publisher.publish``, such as
        ``refit.named_weights(model)``: as ``version``, or the one after that which this object kept
        last, or failed to write, from 1 on. Each object that keeps weights counts as a trainer of
        its own. Those of a GPU, and what an iterator gives, are copied to the host first, all of
        them.

        One that is there already is compared, and nothing is written. A file has its name when its
        bytes are on the disk, and only if they are those that the trainer has digested. Blocks for
        the disk. Raises StateError (not opened to write, or the update is closed), ExistsError
        (this version is there, with other bytes), UnsupportedError (an update lies in a GPU's
        memory or is a part of a version, or weights lie in a GPU's memory that are not PyTorch's,
        or their type is unknown), InvalidError,
        CorruptError, LimitError, NotFoundError (the folder was removed), InputOutputError,
        HostMemoryError, and what ``versions`` raises for a file of this version that is there;
        nothing of it is left then (if the disk refuses even that, ``len`` counts it), and the
        version after it can be kept all the same.
        """
        if not isinstance(update, Update):
            return self._keep_weights(update, version)
        if version is not None:
            raise InvalidError("a received version has its number: give none")
        if update.device != "cpu":
            raise UnsupportedError(
                "an update in a GPU's memory cannot be archived: its bytes are "
                "to be in host memory, so let this worker use no device"
            )
        if update._selected is not None:
            raise UnsupportedError(
                "an archive keeps whole versions: let this worker take no parts of them"
            )
        with self._call_lock:
            pointer = self._live
            described, _held = _version_of(update)
            return self._write(pointer, described)

    def _keep_weights(self, weights: Tensors, version: int | None) -> ArchivedVersion:
        with self._call_lock:
            _ = self._live
            if not self._writes:
                raise StateError("the archive is open for reading: open it with write=True")
        tensors, rows, _held = _host_rows(weights)
        with self._call_lock:
            number = _number(self._last + 1 if version is None else version, "a version")
            described = abi.refit_archive_version(
                size=ctypes.sizeof(abi.refit_archive_version),
                epoch=self._epoch,
                version=number,
                tensors=tensors,
                weights=rows,
                count=len(tensors),
                weight_count=len(rows),
            )
            self._last = max(self._last, number)
            info = self._write(self._live, described)
            self._last = number
            return info

    def _write(self, pointer: int, version: Any) -> ArchivedVersion:
        try:
            call(lib.refit_archive_write, pointer, ctypes.byref(version))
            return _described(lib.refit_archive_commit, pointer)
        except BaseException:  # Ctrl-C between the two, or after them
            lib.refit_archive_abort(pointer, None)
            raise

    def prune(self, anchors: int) -> int:
        """Removes what is older than the last ``anchors`` anchors and what builds on them.

        Returns how many files that were. Whenever it ends, every file that is left can be rebuilt.
        Reads the first bytes of each file, and blocks for that. Raises StateError (not opened to
        write), InvalidError (0 anchors), InputOutputError (call it again).
        """
        removed = ctypes.c_uint32()
        if not 0 < anchors < 1 << 32:
            raise InvalidError(f"{anchors} anchors cannot be kept: 1 or more")
        with self._call_lock:
            call(lib.refit_archive_prune, self._live, anchors, ctypes.byref(removed))
        return removed.value

    def _close(self, pointer: int) -> None:
        with self._call_lock:
            lib.refit_archive_close(pointer)

    def __repr__(self) -> str:
        if self.closed or self._process != os.getpid():
            return "<refit.Archive: closed>"
        return f"<refit.Archive: {len(self)} versions>"


def _number(value: int, what: str) -> int:
    number = operator.index(value)  # of NumPy's and PyTorch's, too
    if not 0 <= number < 1 << 64:
        raise InvalidError(f"{number} is not {what}")
    return number


def _epoch(value: int | str | None) -> int:
    """As a number, or as ``refit inspect`` and error sentences write it."""
    if isinstance(value, str):
        if re.fullmatch("[0-9a-fA-F]{16}", value) is None:
            raise InvalidError(f"{value!r} is not an epoch: they have 16 hexadecimal digits")
        return int(value, 16)
    return _number(value or 0, "an epoch")


def _version_of(update: Update) -> tuple[Any, Any]:
    """The update as refit_archive_write takes it, and what that refers to."""
    pointer = update._live
    count = len(update)
    tensors = (abi.refit_tensor * count)()
    weights = (abi.refit_weight * count)()
    place = ctypes.c_void_p()
    digest = (ctypes.c_ubyte * 16)()
    originals = 0
    for index, tensor in enumerate(tensors):
        tensor.size = ctypes.sizeof(tensor)
        call(lib.refit_update_tensor, pointer, index, ctypes.byref(tensor), ctypes.byref(place))
        if tensor.alias_of == abi.REFIT_NO_ALIAS:
            weights[originals] = abi.refit_weight(index, place.value, tensor.bytes)
            originals += 1
    call(lib.refit_update_digest, pointer, digest)
    version = abi.refit_archive_version(
        size=ctypes.sizeof(abi.refit_archive_version),
        epoch=lib.refit_update_epoch(pointer),
        version=update.version,
        digest=digest,
        tensors=tensors,
        weights=weights,
        count=count,
        weight_count=originals,
    )
    return version, (tensors, weights, digest)


def _host_rows(weights: Tensors) -> tuple[Any, Any, list[Weight]]:
    """Weights as refit_archive_write takes them, and what holds their bytes. InvalidError,
    UnsupportedError, StateError."""
    together = manifest.is_settled(weights)
    given = manifest.pairs_of(weights)
    pairs = [(name, tensor if together else copy_of(name, tensor)) for name, tensor in given]
    found = manifest.collect(pairs, ties=together)
    numbers = [row.number for rows in found.rows.values() for row in rows]
    numbers += [number for number, _ in found.scattered]
    held = [_host_weight(*pairs[number]) for number in numbers]
    rows = (abi.refit_weight * len(numbers))()
    for row, number, weight in zip(rows, numbers, held, strict=True):
        row.tensor, row.memory, row.bytes = number, weight.pointer, weight.nbytes
    return manifest.to_c(found.specs), rows, held


def _host_weight(name: str, tensor: Any) -> Weight:
    """In host memory and in row order."""
    weight = weight_named(name, tensor)
    if weight.device >= 0:
        if not hasattr(tensor, "data_ptr"):
            raise UnsupportedError(f"{name} is in a GPU's memory: give a tensor of PyTorch")
        weight = weight_named(name, tensor.detach().to("cpu"))
    return in_row_order(weight)


def materialize(
    folder: str | os.PathLike[str],
    version: int,
    *,
    epoch: int | str | None = None,
    config: ConfigLike = None,
    **overrides: Any,
) -> dict[str, "torch.Tensor"]:
    """The weights of a version of an archive, byte for byte, as PyTorch tensors by name.

    Tied names share their bytes. The command ``refit materialize`` writes them as a safetensors
    file. Raises what ``Archive`` and ``Archive.read`` raise, and UnsupportedError for a type that
    PyTorch lacks (``Archive.read`` gives its bytes).
    """
    with Archive(folder, config=config, **overrides) as archive:
        return dict(archive.read(version, epoch=epoch).tensors())
