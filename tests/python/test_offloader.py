"""The offloader: the C verbs as methods, their states and their sentences."""

import ctypes
import functools
import os
import pickle
from collections.abc import Iterator

import pytest
from interrupts import ctrl_c_after
from refit._c import abi
from refit._c.config import load_config
from refit._c.device import Device
from refit.errors import BusyError, ExistsError, InvalidError, NotFoundError, StateError
from refit.states.offloader import KEEP, ZERO, Offloader

SIZE = 70_000


class Bench:
    """An offloader over three buffers: kept, zeroed and discarded."""

    def __init__(self) -> None:
        self.device = Device("host")
        self.offloader = Offloader(self.device, load_config())
        self.memory = [ctypes.create_string_buffer(os.urandom(SIZE), SIZE) for _ in range(3)]
        self.bytes = [one.raw for one in self.memory]

    def add(self) -> None:
        for number, policy in enumerate((KEEP, ZERO, abi.REFIT_DISCARD)):
            self.offloader.add(f"region.{number}", self.address(number), SIZE, policy, number)

    def add_each(self, *names: str) -> None:
        """The first buffers, by one call."""
        numbers = range(len(names))
        addresses = [self.address(number) for number in numbers]
        groups = [number + 3 for number in numbers]
        policies = (KEEP, abi.REFIT_DISCARD)
        self.offloader.add_each(names, addresses, [SIZE] * 2, policies, groups, numbers)

    def address(self, number: int) -> int:
        return ctypes.addressof(self.memory[number])

    def leave(self) -> None:
        self.offloader.offload()
        self.offloader.wait()

    def close(self) -> None:
        self.offloader.close()
        self.device.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    made.add()
    made.offloader.seal()
    yield made
    made.close()


def test_bytes_leave_and_return_to_new_memory(bench: Bench) -> None:
    bench.leave()
    assert bench.offloader.state == abi.REFIT_OFFLOADED
    bench.offloader.unbind_each(range(3))
    for one in bench.memory:
        ctypes.memset(one, 0x5A, SIZE)
    bench.memory = [ctypes.create_string_buffer(SIZE) for _ in range(3)]
    bench.offloader.bind_each(range(3), [bench.address(number) for number in range(3)])
    future = bench.offloader.restore()
    future.wait_group(0)
    assert bench.memory[0].raw == bench.bytes[0]
    future.join(0)
    future.join_group(2, 0)
    future.wait()
    assert future.done
    assert bench.memory[1].raw == bytes(SIZE)
    bench.offloader.wait()
    assert bench.offloader.state == abi.REFIT_RESIDENT


def test_one_region_is_bound_and_described(bench: Bench) -> None:
    bench.leave()
    bench.offloader.unbind(1)
    assert bench.offloader.region(1).memory is None
    bench.offloader.bind(1, bench.address(1))
    info = bench.offloader.region(1)
    assert (info.name, info.memory, info.nbytes) == ("region.1", bench.address(1), SIZE)
    assert (info.policy, info.group, info.on_host, info.in_arena) == (ZERO, 1, True, False)
    assert len(bench.offloader) == 3
    with pytest.raises(NotFoundError):
        bench.offloader.region(3)


def test_many_regions_are_added_in_one_call_up_to_one_that_fails() -> None:
    bench = Bench()
    bench.add_each("a", "\u00e9")
    first, second = (bench.offloader.region(number) for number in range(2))
    assert (first.name, first.memory, first.nbytes) == ("a", bench.address(0), SIZE)
    assert (first.policy, first.group, first.priority) == (KEEP, 3, 0)
    assert (second.name, second.memory) == ("\u00e9", bench.address(1))
    assert (second.policy, second.group, second.priority) == (abi.REFIT_DISCARD, 4, 1)
    bench.offloader.clear()
    with pytest.raises(InvalidError, match="NUL"):
        bench.offloader.add("a\0b", bench.address(0), SIZE)
    with pytest.raises(ExistsError, match="a region a already"):
        bench.add_each("a", "a")
    assert len(bench.offloader) == 1
    with pytest.raises(InvalidError, match="NUL"):
        bench.add_each("a\0b")
    bench.offloader.add_each([], [], [], [], [], [])
    bench.offloader.seal()
    with pytest.raises(StateError):
        bench.add_each("c")
    bench.close()


def test_read_lock_reads_host_image_and_blocks_next_offload(bench: Bench) -> None:
    bench.leave()
    lock = bench.offloader.read_lock()
    address, count = lock.read(0)
    bench.offloader.restore().wait()
    bench.offloader.wait()
    assert ctypes.string_at(address, count) == bench.bytes[0]
    with pytest.raises(NotFoundError):
        lock.read(1)
    with pytest.raises(BusyError):
        bench.offloader.offload()
    with pytest.raises(BusyError):
        bench.offloader.close()
    lock.close()
    lock.close()
    bench.leave()


def test_ctrl_c_after_a_read_lock_holds_nothing(bench: Bench) -> None:  # trap 12
    bench.leave()
    with ctrl_c_after("refit_read_lock_acquire"):
        bench.offloader.read_lock()
    for number in range(3):
        bench.offloader.unbind(number)
        bench.offloader.bind(number, bench.address(number))
    bench.offloader.restore().wait()
    bench.offloader.trim()  # BusyError under a read lock


def test_verbs_that_do_not_fit_the_state_say_which_would(bench: Bench) -> None:
    with pytest.raises(StateError, match="unseal"):
        bench.offloader.add("late", bench.address(0), 1)
    unbind = functools.partial(bench.offloader.unbind, 0)
    for verb in (bench.offloader.clear, unbind, bench.offloader.read_lock):
        with pytest.raises(StateError):
            verb()
    bench.leave()
    for verb in (bench.offloader.unseal, bench.offloader.trim):
        with pytest.raises(StateError):
            verb()


def test_new_plans_keep_the_host_memory(bench: Bench) -> None:
    before = bench.offloader.stats().host_bytes
    bench.offloader.unseal()
    bench.offloader.clear()
    assert len(bench.offloader) == 0
    bench.offloader.add("region.0", bench.address(0), SIZE)
    with pytest.raises(ExistsError):
        bench.offloader.add("overlap", bench.address(0) + 5, 8)
    bench.offloader.seal()
    bench.offloader.seal()
    bench.offloader.prepare()
    assert bench.offloader.stats().host_bytes == before
    bench.leave()
    with pytest.raises(InvalidError, match="cannot have 2 addresses"):
        bench.offloader.bind_each([0], [bench.address(0), bench.address(1)])
    bench.offloader.restore().wait()
    bench.offloader.trim()
    assert bench.offloader.stats().host_bytes == 0


def test_it_is_neither_pickled_nor_used_once_closed(bench: Bench) -> None:
    # trap 27
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(bench.offloader)
    bench.leave()
    future = bench.offloader.restore()
    bench.offloader.wait()
    bench.offloader.close()
    assert future.done
    future.close()
    future.close()
    future.wait()
    with pytest.raises(StateError, match="closed"):
        bench.offloader.seal()
