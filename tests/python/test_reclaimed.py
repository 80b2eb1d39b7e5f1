"""``refit/reclaimed_bytes`` is what the system got, and not what an allocator kept."""

import ctypes
import gc
import mmap

import pytest
import refit
import torch


def optimizer_between_live_tensors(
    count: int, elements: int
) -> tuple[torch.optim.Optimizer, list[torch.Tensor]]:
    """An optimizer with ``count`` states, each followed by a tensor that stays."""
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(count)]
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    stay = []
    for weight in weights:
        optimizer.state[weight]["momentum_buffer"] = torch.ones(elements)
        stay.append(torch.ones(min(elements, 512)))  # in nearly each page that small states have
    return optimizer, stay


def pages_of(optimizer: torch.optim.Optimizer) -> set[int]:
    states = [state["momentum_buffer"].untyped_storage() for state in optimizer.state.values()]
    return {
        page
        for it in states
        for page in range(
            it.data_ptr() // mmap.PAGESIZE, -(-(it.data_ptr() + it.nbytes()) // mmap.PAGESIZE)
        )
    }


def is_resident(page: int) -> bool:
    """Whether the system has memory for this page. It is not if nothing is mapped there."""
    found = ctypes.c_ubyte(0)
    at = ctypes.c_void_p(page * mmap.PAGESIZE)
    refused = ctypes.CDLL(None).mincore(at, ctypes.c_size_t(mmap.PAGESIZE), ctypes.byref(found))
    return refused == 0 and bool(found.value & 1)


@pytest.mark.parametrize(
    ("count", "elements", "gives_back"),
    [(10_000, 400, False), (80, 1 << 16, True), (40, 1 << 18, True), (1, 16 << 20, True)],
    ids=["1.6KiB", "256KiB", "1MiB", "64MiB"],
)
def test_what_malloc_keeps_is_not_reclaimed(count: int, elements: int, gives_back: bool) -> None:
    optimizer, stay = optimizer_between_live_tensors(count, elements)
    nbytes = count * elements * 4
    with refit.Controller(optimizer) as controller:
        gc.collect()
        for _ in range(2 if gives_back else 1):  # they come back next to each other
            stay.append(torch.ones(elements))  # after the states in the heap
            pages = pages_of(optimizer)
            controller.offload()
            given = sum(not is_resident(page) for page in pages) * mmap.PAGESIZE
            reclaimed = controller.stats()["refit/reclaimed_bytes"]
            assert abs(reclaimed - given) < nbytes / 4
            assert given > 0.9 * nbytes if gives_back else given < nbytes / 4
            controller.restore(non_blocking=False)
    assert len(stay) > count
