"""Optimizer states at addresses that stay: PyTorch allocates them from an arena of refit.

    pool = refit.mem_pool("cuda:0", 40 << 30)
    optimizer.step()                                      # the first one makes the states
    pool.migrate(optimizer)                               # they move into the pool, and gradients
    controller = refit.Controller(optimizer, pool=pool)

Their memory goes when they are cleared and returns to the same addresses, so graphs that were
captured after ``migrate`` stay valid. PyTorch takes memory from the arena in segments, and a
segment leaves as one: put nothing but states and gradients into the pool. Independent of what a
controller does with it.
"""

import bisect
import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from refit._c.config import ConfigLike, make_config
from refit._c.device import Device, spec_of
from refit._c.handle import Handle
from refit._c.library import call, lib
from refit.errors import (
    BusyError,
    DeviceMemoryError,
    InvalidError,
    NotFoundError,
    StateError,
    UnsupportedError,
)
from refit.integrations._recognized import adapted
from refit.states import torch_pool
from refit.states.hooks import refuse_second
from refit.states.optimizers import OptimizerAdapters
from refit.states.state_source import StateSource
from refit.states.storage_swap import move
from refit.states.storages import OffloadPlan, StateInventory, is_emptied, why_tensor_stays
from refit.states.torch_memory import empty_storage, refuse_capture, users_of


def mem_pool(
    device: torch.device | str | int | None, nbytes: int, config: ConfigLike = None
) -> "MemPool":
    """A pool of at most ``nbytes`` for a GPU's optimizer states. None is the current device.

    Reserves addresses and takes no memory yet. One pool for each device and process (ExistsError).
    It takes PyTorch 2.8 or later, and its native allocator. Expandable segments may be on. With
    2.11 or later tensors may outlive the pool. UnsupportedError (without a GPU, or with another
    PyTorch), InvalidError, DeviceMemoryError.
    """
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "refit.mem_pool() needs a GPU that PyTorch can use: on a CPU the states move without it"
        )
    found = torch.device("cuda" if device is None else device)
    if found.type != "cuda":
        raise InvalidError(f"a pool needs a CUDA device, not {found}")
    torch_pool.refuse_unfit()
    index = torch.cuda.current_device() if found.index is None else found.index
    return MemPool(torch.device("cuda", index), nbytes, config)


class MemPool(Handle):
    """An arena that PyTorch allocates from. Made by ``mem_pool``; outlives its tensors."""

    def __init__(self, device: torch.device, nbytes: int, config: ConfigLike = None) -> None:
        if nbytes <= 0:
            raise InvalidError(f"a pool of {nbytes} bytes holds nothing: say how large it may grow")
        self.device = device
        self._config = make_config(config)
        self.handle = Device(spec_of(device), self._config)
        self._pool: Any = None
        self._attached = False
        self._open(lib.refit_arena_open, self.handle.pointer, nbytes)

    @property
    def pool(self) -> "torch.cuda.MemPool":
        """The pool of PyTorch's, made when first asked for."""
        if self._pool is None:
            if not self._attached:
                call(lib.refit_torch_attach, self._live)
                self._attached = True
            self._pool = torch_pool.make_pool(self.device)
        made: torch.cuda.MemPool = self._pool
        return made

    def use(self) -> AbstractContextManager[None]:
        """This thread's allocations on the device within the block come from the pool.

        Temporaries too, and they keep their memory when states leave: so let no step run within;
        ``migrate`` moves what a step has made. Entering gives PyTorch's cached memory back to the
        device, since PyTorch does not while a pool is in use. Expandable segments are off in the
        whole process within the block, however they were switched on; its end brings back the
        allocator's settings as they were. UnsupportedError if they cannot be switched off.
        """
        return torch_pool.allocating(self.pool, self.device)

    def migrate(
        self, optimizer: Any, model: torch.nn.Module | None = None
    ) -> list[tuple[str, str]]:
        """Moves the states that an optimizer has, after its first step, into the pool.

        Gradients that are there move too: a captured step reads them. (``zero_grad()`` frees them;
        ``zero_grad(set_to_none=False)`` keeps them where they are.)
        ``optimizer`` and ``model``: as for ``refit.Controller``, which is made afterwards. Tensors
        stay the objects they are, their bytes too; their addresses change, so capture graphs
        afterwards. Takes at most 256 MiB more than there was, or one more of the largest state.
        Returns what stays outside, by name, and why. Waits for the device. Does nothing for states
        that are in the pool already: call it again after a failure, or when states were added.

        BusyError: the optimizer has a controller; close that one first. DeviceMemoryError: the pool
        is full, or the GPU; what has moved stays moved, the others where they were, nothing is
        lost. StateError, UnsupportedError (see ``use``).
        """
        refuse_capture(self.device)
        adapters = OptimizerAdapters(adapted(optimizer, model))
        for one in adapters.optimizers:
            refuse_second(one)
        source = StateSource(adapters.optimizers, model, self._config, "keep", adapters)
        inventory = source.take_inventory()
        plan = source.survey(inventory, self._why_stays)
        return _migrate(inventory, plan, self.device, self.pieces(), self.use)

    adopt = migrate
    """``migrate``; goes in 0.2."""

    def _why_stays(self, device: torch.device) -> str | None:
        if device == self.device:
            return None
        return f"it is on {device}, and the pool on {self.device}"

    def pieces(self) -> list[tuple[int, int]]:
        """Address and length of every segment that PyTorch has taken."""
        found: list[tuple[int, int]] = []
        memory, nbytes = ctypes.c_void_p(), ctypes.c_uint64()
        while True:
            to = ctypes.byref(memory), ctypes.byref(nbytes)
            try:
                call(lib.refit_arena_piece, self._live, len(found), *to)
            except NotFoundError:
                return found
            found.append((memory.value or 0, nbytes.value))

    def _close(self, pointer: int) -> None:
        """BusyError while tensors or a controller use it; then it stays open, close it again."""
        used = 0 if self._pool is None else torch_pool.live_bytes(self._pool)
        if used > 0:
            raise BusyError(
                f"tensors use {used} bytes of the pool: drop them (the optimizer, its states, "
                "captured graphs), then close the pool"
            )
        self._pool = None
        if self._attached:
            torch.cuda.empty_cache()
            call(lib.refit_torch_detach, pointer)
            self._attached = False
        call(lib.refit_arena_close, pointer)
        self.handle.close()


# ---- migrate: states that exist already move into a pool, and stay the objects that they are.
# A step that runs within ``pool.use()`` puts its temporaries there as well, and memory of a pool
# goes back only as whole segments. So the step runs outside; then each storage of a state is copied
# to one from the pool, and its tensors are given that one.

BATCH_BYTES = 256 << 20
"""How many bytes are there twice at most, or those of the largest state."""


def _migrate(
    inventory: StateInventory,
    plan: OffloadPlan,
    device: torch.device,
    pieces: Sequence[tuple[int, int]],
    allocating: Callable[[], AbstractContextManager[Any]],
) -> list[tuple[str, str]]:
    """Moves what ``plan`` says can leave, unless it lies in one of ``pieces``, byte for byte.

    In batches, each of which moves whole or not at all; between them the memory that became free
    goes back to the device. Returns what stays where it was, by name, and why. StateError while
    states are away. DeviceMemoryError: what has moved stays moved, nothing is lost, call again.
    """
    if any(map(is_emptied, inventory.tensors[: inventory.states])):
        raise StateError("states are away: restore() them, then move them into the pool")
    tensors = _by_storage(inventory)
    stays = list(plan.resident)
    outside = [one for one in _leaving(plan) if not _is_inside(_storage(inventory, one), pieces)]
    for batch in _batches(outside):
        _synchronize(device)  # other streams may still use them
        with allocating():
            fresh = [_allocate(one, device) for one in batch]
        for one, to in zip(batch, fresh, strict=True):
            storage = _storage(inventory, one)
            mine = tensors[storage._cdata]
            if users_of(storage) != len(mine) + 1:  # and the Python object that stands for it
                stays.append((one.name, "a view of it is held, which would stay behind"))
                continue
            to.copy_(storage, True)
            move(mine, storage, to)
        _synchronize(device)  # the old memory goes to others now
    return stays


def _by_storage(inventory: StateInventory) -> dict[int, list[torch.Tensor]]:
    found: dict[int, dict[int, torch.Tensor]] = {}
    for tensor in inventory.tensors:
        if why_tensor_stays(tensor) is None:
            found.setdefault(tensor.untyped_storage()._cdata, {})[id(tensor)] = tensor
    return {storage: list(tensors.values()) for storage, tensors in found.items()}


class _Leaving(NamedTuple):
    """A storage that is to move. It is not held: once its tensors have left it, it is to go."""

    name: str
    nbytes: int
    tensor: int
    """The number in the inventory of one that lies in it."""


def _leaving(plan: OffloadPlan) -> Iterator[_Leaving]:
    for specs in plan.specs.values():
        yield from map(_Leaving, specs.names, specs.nbytes, specs.tensors)


def _storage(inventory: StateInventory, one: _Leaving) -> torch.UntypedStorage:
    storage: torch.UntypedStorage = inventory.tensors[one.tensor].untyped_storage()
    return storage


def _is_inside(storage: torch.UntypedStorage, pieces: Sequence[tuple[int, int]]) -> bool:
    """Whether a storage lies in a piece; they come in the order of their addresses."""
    at = bisect.bisect_right(pieces, (storage.data_ptr(), 1 << 63)) - 1
    return at >= 0 and storage.data_ptr() < pieces[at][0] + pieces[at][1]


def _batches(storages: Iterable[_Leaving]) -> Iterator[list[_Leaving]]:
    batch: list[_Leaving] = []
    nbytes = 0
    for one in storages:
        if batch and nbytes + one.nbytes > BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(one)
        nbytes += one.nbytes
    if batch:
        yield batch


def _allocate(one: _Leaving, device: torch.device) -> torch.UntypedStorage:
    try:
        return empty_storage(one.nbytes, device)
    except (RuntimeError, MemoryError) as why:  # torch.OutOfMemoryError is the first
        raise DeviceMemoryError(
            f"no memory in the pool for the {one.nbytes} bytes of {one.name}, which stays where "
            "it is; what has moved stays moved, and nothing is lost. Free memory of the GPU, or "
            f"make a larger pool, then call migrate() again: {why}"
        ) from why


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
