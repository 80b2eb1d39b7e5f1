"""One tensor of a received version, where it lies: for NumPy, PyTorch, DLPack, or as plain bytes.

Nothing is copied. An update's memory is the subscriber's (or the trainer's, mapped), borrowed until
the update is closed, on a GPU until it is accepted or refused: a view is asked for through the
update, which refuses then. A PyTorch tensor that was made of a view before is emptied. A NumPy
array, a memoryview, what DLPack gave, and what was made of a PyTorch tensor (a slice) cannot be
called back: on the host their memory stays mapped for as long as they live, but a later version may
be written there. A GPU's memory cannot be kept.
A process that is forked meanwhile has none of this memory, and ends by a signal where it reads it.
What is written into a PyTorch tensor on the host is seen through the update alone and ends with it;
the memory of a GPU must not be written. An archive's snapshot has memory of its own, which stays as
long as anything made of it: what is said here of an update's end does not concern its views.
"""

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from refit._c import abi, dtypes
from refit._c.library import call, lib
from refit.errors import InvalidError, NotFoundError, UnsupportedError
from refit.weights import buffers

if TYPE_CHECKING:
    from numpy import ndarray
    from torch import Tensor


class Entry(NamedTuple):
    """The description of one tensor of a version."""

    dtype: dtypes.Dtype
    shape: tuple[int, ...]
    number: int
    """By which the C library knows it."""
    alias_of: str | None
    part: tuple[slice, ...] | None = None
    """What a worker selected of it, by its first dimensions; ``shape`` is that of the part."""
    whole: tuple[int, ...] = ()
    """The shape of all of it, where there is a part."""
    holes: bool = False
    """Whether only what a recorded loader reads of it is there; ``shape`` is that of all of it."""

    def cut(self, part: tuple[slice, ...]) -> "Entry":
        """The same, of which a worker selected a part."""
        sliced = [len(range(length)[one]) for length, one in zip(self.shape, part, strict=False)]
        shape = (*sliced, *self.shape[len(sliced) :])
        if shape == self.shape:
            return self
        return self._replace(part=part, shape=shape, whole=self.shape)


def entries_of(count: int, tensor: Callable[[int, Any], None]) -> dict[str, Entry]:
    """What a version of the C library has, by name, in the trainer's order. ``tensor`` fills in a
    refit_tensor by its index."""
    raw = abi.refit_tensor(size=ctypes.sizeof(abi.refit_tensor))
    entries: dict[str, Entry] = {}
    ties: list[tuple[str, int]] = []
    for index in range(count):
        try:
            tensor(index, ctypes.byref(raw))
        except NotFoundError:  # not among what a worker selected
            continue
        name, shape = raw.name.decode(), tuple(raw.shape[: raw.rank])
        entries[name] = Entry(dtypes.by_number(raw.dtype), shape, index, None)
        if raw.alias_of != abi.REFIT_NO_ALIAS:
            ties.append((name, raw.alias_of))
    names = {one.number: name for name, one in entries.items()}
    for name, original in ties:  # last, since it may be tied to one that comes after it
        entries[name] = entries[name]._replace(alias_of=names.get(original))
    return entries


class Owner(Protocol):
    """The update that a view is of, and that it keeps alive."""

    _cuda: int
    """The CUDA device that the bytes are on, or -1."""
    _places: Any
    """The address of each tensor's bytes, by its number; empty while they are nowhere as a
    whole."""

    def _lend(self) -> None:
        """StateError if the update is closed; from now on its bytes may have been read."""

    def _remember(self, tensor: Any) -> None:
        """A PyTorch tensor that is to be emptied at the end."""

    def _keep(self) -> Any:
        """An object that keeps its host memory mapped."""

    def _lifetime_with(self, nbytes: int) -> buffers.DescriptionMemory:
        """A lifetime with so many bytes of the C library's."""


class CudaBytes:
    """Device memory as PyTorch takes it; holds the update, so that it is not dropped."""

    def __init__(self, pointer: int, nbytes: int, owner: Any) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 2,
        }


_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

release_lifetime = lib.refit_update_release
"""The C function that ends a ``Lifetime`` by its address, on any thread."""


class Lifetime:
    """Keeps an update's bytes mapped for as long as this object lives.

    A view may be left in a variable, and read after its update or its subscriber is closed. It
    holds a ``Lifetime``, or its memory, so that it then reads other bytes, and no memory that
    is gone. With ``mine`` set to False the bytes stay mapped until ``release_lifetime`` of its
    ``address``, where ``nbytes`` are for the caller of that.
    """

    mine = True
    _out: ctypes.c_void_p | None = None

    def __init__(self, update: int, nbytes: int = 0) -> None:
        self._out = ctypes.c_void_p()  # here before C fills it: Ctrl-C may come right after
        call(lib.refit_update_retain, update, nbytes, ctypes.byref(self._out))

    @property
    def address(self) -> int:
        """Where its memory is."""
        assert self._out is not None
        assert self._out.value is not None
        return self._out.value

    def __del__(
        self, _release: Callable[[ctypes.c_void_p | None], None] = release_lifetime
    ) -> None:
        if self.mine:
            _release(self._out)


_COMPARED = 64 << 20


def same_bytes(a: "View", b: "View") -> bool:
    """Whether two views of one version have the same type and bytes. Nothing is handed out, so the
    version before counts as kept. Blocks for the reading. Bytes that have not come yet are the same
    where they are tied."""
    if a.dtype != b.dtype or a.nbytes != b.nbytes:
        return False
    if a._entry.part is not None or b._entry.part is not None:
        return (a.alias_of or a.name) == (b.alias_of or b.name) and a._entry.part == b._entry.part
    one, other = a._pointer, b._pointer
    if not (one and other):
        return a.nbytes == 0 or (a.alias_of or a.name) == (b.alias_of or b.name)
    if one == other:
        return True
    if a._owner._cuda < 0:
        return bool(_libc.memcmp(one, other, a.nbytes) == 0)
    import torch

    place = f"cuda:{a._owner._cuda}"
    raw = [CudaBytes(pointer, a.nbytes, a._owner) for pointer in (one, other)]
    mine, theirs = (torch.as_tensor(memory, device=place) for memory in raw)
    return all(
        torch.equal(mine[at : at + _COMPARED], theirs[at : at + _COMPARED])
        for at in range(0, a.nbytes, _COMPARED)
    )


class View:
    """A tensor of an ``Update``, read-only and valid until that is closed, or of a ``Snapshot``,
    for as long as anything refers to it. StateError is for closed updates."""

    __slots__ = ("_entry", "_owner", "name")

    def __init__(self, owner: Owner, name: str, entry: Entry) -> None:
        self._owner = owner
        self._entry = entry
        self.name = name

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions."""
        return self._entry.shape

    @property
    def alias_of(self) -> str | None:
        """The name of the tensor that it is tied to and shares its bytes with, or None."""
        return self._entry.alias_of

    @property
    def dtype(self) -> str:
        """The element type's name: "BF16"."""
        return self._entry.dtype.name

    @property
    def nbytes(self) -> int:
        """The number of its bytes; a tied tensor has those of the tensor that it shares."""
        return self._entry.dtype.nbytes(self.shape)

    @property
    def bytes(self) -> memoryview:
        """Its bytes, read-only. UnsupportedError for a GPU's memory, and for a part of a tensor;
        StateError."""
        self._refuse_part("plain bytes")
        self._refuse_holes()
        return memoryview(self._memory("bytes")).cast("B").toreadonly()

    def numpy(self, *, bits: bool = False) -> "ndarray[Any, Any]":
        """A read-only NumPy array on the memory; holds the update.

        Do not read it once the update is closed: it may show another version's bytes by then.
        Types that NumPy lacks are those of ml_dtypes, or with ``bits`` unsigned integers of their
        width. UnsupportedError otherwise, and for a GPU's memory; StateError.
        """
        import numpy

        self._refuse_holes()
        dtype = dtypes.to_numpy(self._entry.dtype, bits=bits)
        memory = memoryview(self._memory("a NumPy array")).toreadonly()
        array: ndarray[Any, Any] = numpy.frombuffer(memory, dtype).reshape(self._whole)
        return array if self._entry.part is None else array[self._entry.part]

    def on_host(self) -> "ndarray[Any, Any]":
        """``numpy()``, of a copy where the bytes are a GPU's. Raises what that and ``torch()``
        raise, but for that."""
        if self._owner._cuda < 0:
            return self.numpy()
        import numpy
        import torch

        dtype = dtypes.to_numpy(self._entry.dtype)
        raw = self.torch().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
        return numpy.frombuffer(raw, dtype).reshape(self.shape)

    def torch(self) -> "Tensor":
        """A PyTorch tensor on the memory, on the host or on the update's GPU.

        On the host it may be written, as by a loader that adds 1 to a weight. In shared memory that
        costs the pages that are written; the trainer, other workers and later versions do not see
        it. A version that came through a socket and was written is not a base for the next one,
        which then comes whole. Tied tensors, and those that are asked for again, are on the same
        bytes. A GPU's memory is the trainer's: read it only.

        When the update is closed (on a GPU: accepted or refused) this tensor becomes empty, and
        what was made of it (slices, a Parameter) may show other bytes; until then
        ``torch.utils.swap_tensors`` refuses it. UnsupportedError for a type that PyTorch lacks;
        StateError.
        """
        self._refuse_holes()
        return self.torch_with_holes()

    def torch_with_holes(self) -> "Tensor":
        """The same of a tensor of which there may be no more than a recorded loader reads."""
        import torch

        dtype, shape, place = self._as_in_torch()
        self._owner._lend()
        if self.nbytes == 0:
            return self.empty()
        if self._owner._cuda < 0:
            made = torch.frombuffer(self._memory("a tensor"), dtype=dtype)
        else:
            raw = CudaBytes(self._pointer, self._whole_bytes, self._owner)
            made = torch.as_tensor(raw, device=place).view(dtype)
        if self._entry.part is None:
            made = made.view(shape)
        else:
            made = made.view(self._whole)[self._entry.part]
        self._owner._remember(made)
        return made

    def empty(self) -> "Tensor":
        """A PyTorch tensor of its type and shape, where the update's bytes lie, with memory of its
        own. UnsupportedError for a type that PyTorch lacks."""
        import torch

        dtype, shape, place = self._as_in_torch()
        return torch.empty(shape, dtype=dtype, device=place)

    def _refuse_holes(self) -> None:
        if self._entry.holes:
            raise UnsupportedError(
                f"of {self.name} only what the recorded loader reads was taken: load the version "
                "with load_into(parts), or call Subscriber.select(None) before the next"
            )

    @property
    def _whole(self) -> tuple[int, ...]:
        return self.shape if self._entry.part is None else self._entry.whole

    @property
    def _whole_bytes(self) -> int:
        return self._entry.dtype.nbytes(self._whole)

    def _refuse_part(self, what: str) -> None:
        if self._entry.part is not None:
            raise UnsupportedError(
                f"{self.name} is a part of a tensor and cannot be {what}: take .torch() or .numpy()"
            )

    def _as_in_torch(self) -> tuple[Any, tuple[int, ...], str]:
        shape = self.shape
        if self._entry.dtype.pack > 1:
            self._refuse_part("a tensor of packed elements")
            shape = (*shape[:-1], shape[-1] // self._entry.dtype.pack)
        place = "cpu" if self._owner._cuda < 0 else f"cuda:{self._owner._cuda}"
        return dtypes.to_torch(self._entry.dtype), shape, place

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> "ndarray[Any, Any]":
        """``numpy()`` for ``numpy.asarray``. InvalidError: another type, and no copy allowed."""
        array = self.numpy()
        if dtype is not None and array.dtype != dtype:
            if copy is False:
                raise InvalidError(f"{self.name} is {array.dtype}: another type needs a copy")
            return array.astype(dtype)
        return array.copy() if copy else array

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack's kind of device and its number: the host's memory, or the trainer's GPU."""
        on_host = self._owner._cuda < 0
        return (buffers.CPU, 0) if on_host else (buffers.CUDA, self._owner._cuda)

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """The memory as a DLPack capsule: its bytes are all there, so no stream is waited for.

        What is made of it does not hold the update, since DLPack can call nothing of Python: keep
        it open (``with update:``) while you read. Afterwards it may show another version's bytes,
        and on a GPU its memory is gone. BufferError for a copy, for another device, and of a
        ``Snapshot``; UnsupportedError for a type that DLPack lacks; StateError.
        """
        if copy or (dl_device is not None and tuple(dl_device) != self.__dlpack_device__()):
            raise BufferError("a view shows memory where it is: copy it with the library it is for")
        self._refuse_holes()
        self._refuse_part("DLPack's")
        self._owner._lend()
        dtype, pointer, owner = self._entry.dtype, self._pointer, self._owner
        if owner._cuda >= 0:
            return buffers.to_dlpack(dtype, self.shape, pointer, owner._cuda)
        return buffers.to_dlpack(
            dtype, self.shape, pointer, -1, owner._lifetime_with, release_lifetime
        )

    @property
    def _pointer(self) -> int:
        """0: it has no bytes, or they have not come yet."""
        places = self._owner._places
        return (places[self._entry.number] or 0) if places else 0

    def _memory(self, what: str) -> Any:
        if self._owner._cuda >= 0:
            raise UnsupportedError(
                f"{self.name} lies in a GPU's memory and cannot be {what}: take .torch() or DLPack"
            )
        self._owner._lend()
        memory: Any = (ctypes.c_char * self._whole_bytes).from_address(self._pointer)
        memory._owner = self._owner  # what reads the memory holds the update,
        memory._lifetime = self._owner._keep()  # and its memory, which the update's end does not
        return memory

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"{self.name} is a scalar and has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"View({self.name!r}, {self.dtype}, {list(self.shape)})"
