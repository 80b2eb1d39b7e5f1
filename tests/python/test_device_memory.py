"""The bytes of the device's tensors, as the benches record them, against cases counted by hand."""

import gc
import os
from contextlib import suppress

import pytest
import torch
from refit.bench.device_memory import DeviceMemory, HostMemory, storage_bytes
from torch.autograd.graph import saved_tensors_hooks

CPU = torch.device("cpu")
MIB = 1 << 20
SCALARS = 64
"""Bytes that sums and their gradients may take besides."""


def test_each_storage_counts_once_until_its_last_view_is_gone() -> None:
    with DeviceMemory(CPU, resident_bytes=1000) as memory:
        first = torch.empty(MIB, dtype=torch.uint8)
        view = first.view(torch.float32)[5:].view(-1)
        second = torch.empty(3 * MIB, dtype=torch.uint8)
        del first
        third = second.clone()
        del view, second
        fourth = torch.empty(2 * MIB, dtype=torch.uint8)
        del third, fourth
    held = [1000 + mib * MIB for mib in (0, 1, 4, 7, 6, 3, 5, 2, 0)]
    assert [nbytes for _, nbytes in memory.points] == held
    assert memory.peak_bytes == 1000 + 7 * MIB
    times = [at for at, _ in memory.points]
    assert times == sorted(times)
    assert times[-1] <= memory.seconds()


def chain(leaf: torch.Tensor, length: int) -> torch.Tensor:
    """Each exponential saves its result."""
    for _ in range(length):
        leaf = leaf.exp()
    return leaf.sum()


@pytest.mark.parametrize("length", [1, 2, 7])
def test_the_peak_of_a_chain_is_what_it_saves_and_one_gradient(length: int) -> None:
    leaf = torch.zeros(MIB // 4, requires_grad=True)
    with DeviceMemory(CPU, storage_bytes(leaf)) as memory:
        loss = chain(leaf, length)
        in_forward = memory.seconds()
        loss.backward()
        del loss
    forward = [nbytes for at, nbytes in memory.points if at <= in_forward]
    assert 0 <= max(forward) - (1 + length) * MIB <= SCALARS
    assert 0 <= memory.peak_bytes - (1 + length + 1) * MIB <= SCALARS
    assert memory.points[-1][1] == 2 * MIB  # the leaf and its gradient


def test_what_leaves_does_not_count_until_it_returns() -> None:
    host = HostMemory()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return host.like(tensor).copy_(tensor.detach())

    leaf = torch.zeros(MIB // 4, requires_grad=True)
    with DeviceMemory(CPU, storage_bytes(leaf)) as memory:
        with saved_tensors_hooks(pack, lambda away: torch.empty_like(away).copy_(away)):
            loss = chain(leaf, 8)
        loss.backward()
        del loss
    # the leaf; then two results of the forward pass, or a result and two gradients
    assert 0 <= memory.peak_bytes - (1 + 3) * MIB <= SCALARS


def test_kernel_temporaries_count_and_tensors_are_not_touched() -> None:
    values = torch.randn(1000, 1000)
    with DeviceMemory(CPU) as memory:
        uses = torch._C._storage_Use_Count(values.untyped_storage()._cdata)
        values.t().reshape(-1).sort()
    assert uses == torch._C._storage_Use_Count(values.untyped_storage()._cdata)
    assert memory.peak_bytes >= 4_000_000 + 4_000_000 + 8_000_000
    assert memory.points[-1][1] == 0


def test_what_is_written_to_stderr_meanwhile_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    os.write(2, b"before\n")
    with DeviceMemory(CPU):
        os.write(2, b"within\n")
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "before\nwithin\nafter\n"


def test_an_exception_ends_the_recording() -> None:
    for error in (ValueError, None):
        memory = DeviceMemory(CPU)
        with suppress(ValueError), memory:
            torch.empty(MIB, dtype=torch.uint8)
            if error is not None:
                raise error
        assert memory.peak_bytes == MIB


def test_garbage_of_before_is_not_given_back_meanwhile() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.me, self.kept = self, torch.empty(MIB, dtype=torch.uint8)

    with DeviceMemory(CPU):
        Cycle()
    with DeviceMemory(CPU, resident_bytes=5) as memory:
        gc.collect()
    assert memory.points == [(0.0, 5)]


def test_storages_of_views_are_counted_once() -> None:
    whole = torch.empty(100)
    assert storage_bytes(whole, whole[3:], torch.empty(2, dtype=torch.int64)) == 400 + 16
    assert storage_bytes() == 0


@pytest.mark.parametrize(
    "like",
    [
        torch.ones(3, 5, dtype=torch.bfloat16).t(),
        torch.ones(7, 1).expand(7, 9),
        torch.ones(5, 0),
        torch.tensor(True),
        torch.ones(4, 6, dtype=torch.complex64)[:, ::2],
    ],
    ids=["transposed", "expanded", "empty", "scalar", "strided"],
)
def test_host_memory_has_the_values_and_is_not_the_devices(like: torch.Tensor) -> None:
    with DeviceMemory(CPU) as memory:
        made = HostMemory().like(like)
    assert memory.peak_bytes == 0
    made.copy_(like)
    assert made.dtype == like.dtype
    assert torch.equal(made, like)


def test_host_memory_is_used_again_once_its_last_tensor_is_gone() -> None:
    host = HostMemory()
    first = host.like(torch.empty(1000))
    address, view = first.data_ptr(), first[5:]
    del first
    second = host.like(torch.empty(1000))
    assert second.data_ptr() != address
    del view
    assert host.like(torch.empty(600)).data_ptr() == address  # 4,096 bytes, too
