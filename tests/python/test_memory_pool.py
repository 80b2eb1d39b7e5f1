"""refit.mem_pool(): states at addresses that stay. Here on an arena of the host device, which frees
and refills its memory as a GPU's does, with PyTorch's part played by the test."""

import ctypes
import gc
import importlib
import importlib.util
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import refit  # noqa: E402
from arena import Arena  # noqa: E402
from interrupts import press  # noqa: E402
from refit import Controller, memory_pool  # noqa: E402
from refit._c.library import lib  # noqa: E402
from refit.errors import (  # noqa: E402
    BusyError,
    DeviceMemoryError,
    InvalidError,
    StateError,
    UnsupportedError,
)
from refit.states import torch_pool  # noqa: E402
from training import WIDTH, Run, assert_same  # noqa: E402


@pytest.fixture
def run() -> Run:
    """On the CPU, where the arena is."""
    made = Run()
    made.step(2)
    return made


@pytest.fixture
def pool(run: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    # a GPU's storages can be resized; these, over memory that is not PyTorch's, say they cannot
    monkeypatch.setattr(torch.UntypedStorage, "resizable", lambda _: True)
    made = Arena(1 << 24)
    yield made
    run.optimizer.state.clear()
    run.optimizer.zero_grad()
    made.give_back()
    gc.collect()  # what a caught exception still held
    made.close()


def move_into(pool: Arena, run: Run, *keys: str) -> list[Any]:
    states = list(run.optimizer.state.values())
    moved = pool.tensors([state[key] for state in states for key in keys])
    left = iter(moved)
    for state in states:
        for key in keys:
            state[key] = next(left)
    return moved


def addresses_of(tensors: list[Any]) -> list[int]:
    return [t.data_ptr() for t in tensors]


def test_states_in_a_pool_leave_and_keep_their_addresses(
    pool: Arena, run: Run, reference_run: Run
) -> None:
    moved = move_into(pool, run, "exp_avg", "exp_avg_sq")
    addresses, used = addresses_of(moved), pool.handle.info.used_bytes
    with Controller(run.optimizer, run.model, pool=pool) as controller:
        for _ in range(3):
            controller.offload()
            assert controller.stats()["refit/regions"] == 1
            assert pool.handle.info.used_bytes < used
            with controller.checkpoint() as state_dict:  # brought back: a segment has no view
                assert state_dict["state"][0]["exp_avg"] is moved[0]
            controller.offload()
            run.step(), reference_run.step()
            assert addresses_of(moved) == addresses
            assert_same(run, reference_run)


def test_a_segment_with_anything_else_in_it_stays(pool: Arena, run: Run) -> None:
    # trap 2
    *moved, weight = pool.tensors([*run.moments()[:2], next(run.model.parameters()).data])
    state = next(iter(run.optimizer.state.values()))
    state["exp_avg"], state["exp_avg_sq"] = moved
    next(run.model.parameters()).data = weight
    with Controller(run.optimizer, run.model, pool=pool) as controller:
        controller.offload()
        reasons = dict(controller.resident)
        assert "its segment of the pool is also that of" in reasons["0.weight.exp_avg"]
        assert float(weight.abs().sum()) > 0
        assert float(moved[1].sum()) > 0
        assert controller.state == "cleared"  # what stays brings nothing back
        assert controller.stats()["refit/regions"] == 6
    next(run.model.parameters()).data = weight.clone()


def test_a_use_of_a_state_finds_its_bytes_and_address(
    pool: Arena, run: Run, reference_run: Run
) -> None:
    moved = move_into(pool, run, "exp_avg", "exp_avg_sq")
    addresses = addresses_of(moved)
    with Controller(run.optimizer, run.model, pool=pool) as controller:
        for mine, theirs in zip(run.moments(), reference_run.moments(), strict=True):
            controller.offload()
            assert mine.shape == theirs.shape
            assert controller.state == "cleared"
            assert torch.equal(mine + 1, theirs + 1)
            assert controller.state == "training"
        controller.offload()
        assert moved[0].data_ptr() == addresses[0]  # the address that PyTorch shows
        assert controller.state == "training"
        assert addresses_of(moved) == addresses
        run.step(), reference_run.step()


def test_states_in_a_pool_and_others_move_together(
    pool: Arena, run: Run, reference_run: Run
) -> None:
    move_into(pool, run, "exp_avg")
    with Controller(run.optimizer, run.model, pool=pool) as controller:
        for _ in range(3):
            controller.offload()
            assert controller.stats()["refit/regions"] == 5
            with pytest.raises(BusyError):
                pool.close()
            run.step(), reference_run.step()


def test_without_a_gpu_a_pool_is_refused_with_a_sentence() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UnsupportedError, match="needs a GPU"):
        refit.mem_pool("cuda:0", 1 << 20)


# ---- PyTorch's part, played by a stand-in that keeps its rules --------------------------------


class Allocator:
    """What a pool of PyTorch's allocates by: freed with the last reference, as there."""


class StandIn:
    """PyTorch's caching allocator on the host: what a pool, its settings and its cache do.

    A pool before 2.11 has a bare pointer to its allocator, here a weak reference. Settings that a
    call does not name are reset, expandable segments excepted, as in PyTorch. Allocations within a
    pool are by refit's own two functions.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.settings: dict[str, Any] = {"expandable_segments": False, "max_split_size": -1}
        self.settings["PYTORCH_CUDA_ALLOC_CONF"] = ""
        self.can_switch = True
        self.inside = 0
        self.largest = 1 << 40
        self.pools: list[weakref.ref[Any]] = []

    def apply(self, text: str) -> None:
        self.settings["PYTORCH_CUDA_ALLOC_CONF"] = text
        self.settings["max_split_size"] = -1
        for one in filter(None, text.split(",")):
            key, value = one.strip().split(":")
            if key == "expandable_segments" and self.can_switch:
                self.settings[key] = value == "True"
            elif key == "max_split_size_mb":
                self.settings["max_split_size"] = int(value) << 20

    def snapshot(self) -> dict[str, Any]:
        return {"allocator_settings": dict(self.settings)}

    def empty_cache(self) -> None:
        self.calls.append("empty_cache in use" if self.inside else "empty_cache")

    @contextmanager
    def use_mem_pool(self, pool: Any, device: Any = None) -> Iterator[None]:
        assert not self.settings["expandable_segments"], "PyTorch raises, or passes the pool over"
        assert pool.allocator() is not None, "the allocator has died: use after free"
        self.calls.append("use")
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    def empty_storage(self, nbytes: int, device: Any) -> Any:
        """A storage from the pool; it goes with its last tensor."""
        assert self.inside, "not from the pool"
        if nbytes > self.largest:
            raise torch.OutOfMemoryError("CUDA out of memory")
        address = lib.refit_torch_alloc(nbytes, 0, None)
        if not address:
            raise torch.OutOfMemoryError("CUDA out of memory")
        memory = (ctypes.c_char * nbytes).from_address(address)
        storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        live = self.pools[-1]().live
        live[address] = nbytes

        def freed() -> None:
            del live[address]
            lib.refit_torch_free(address, nbytes, 0, None)

        weakref.finalize(memory, freed)
        return storage


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    stand_in = StandIn()

    class Pluggable:
        def __init__(self, path: str, allocate: str, free: str) -> None:
            assert (allocate, free) == ("refit_torch_alloc", "refit_torch_free")
            assert path == lib._name
            self.made = Allocator()

        def allocator(self) -> Allocator:
            return self.made

    class Pool:
        def __init__(self, allocator: Allocator) -> None:
            self.allocator = weakref.ref(allocator)
            self.live: dict[int, int] = {}
            stand_in.pools.append(weakref.ref(self))

        def snapshot(self) -> list[dict[str, Any]]:
            return [{"address": at, "allocated_size": n} for at, n in self.live.items()]

        def __del__(self) -> None:
            stand_in.calls.append("drop with tensors" if self.live else "drop")

    monkeypatch.setattr(torch.cuda.memory, "CUDAPluggableAllocator", Pluggable)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", stand_in.snapshot)
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", stand_in.apply)
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "MemPool", Pool)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", stand_in.use_mem_pool)
    monkeypatch.setattr(torch.cuda, "empty_cache", stand_in.empty_cache)
    monkeypatch.setattr(memory_pool, "empty_storage", stand_in.empty_storage)
    importlib.reload(torch_pool)  # it keeps the allocator that it made
    yield stand_in
    importlib.reload(torch_pool)


def test_the_allocator_outlives_its_user(cuda: StandIn, pool: Arena) -> None:
    with pool.use():
        pass
    importlib.reload(torch_pool)  # as when the interpreter ends
    gc.collect()
    assert pool.pool.allocator() is not None


def test_a_pool_is_made_on_its_own_device(cuda: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    # else PyTorch ties the allocator to another device, and this one's memory is cudaMalloc's
    current = [torch.device("cuda", 0)]

    @contextmanager
    def make_current(device: Any) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    made = torch.cuda.MemPool
    monkeypatch.setattr(torch.cuda, "device", make_current)
    monkeypatch.setattr(torch.cuda, "MemPool", lambda given: (current[-1], made(given)))
    where, _ = torch_pool.make_pool(torch.device("cuda", 1))
    assert where == torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("settings", "after"),
    [
        (["max_split_size_mb:64,expandable_segments:True"], None),
        # the first call still holds, and the second one's text does not name it
        (["expandable_segments:True", "max_split_size_mb:64"], True),
    ],
)
def test_expandable_segments_are_off_within_and_on_afterwards(
    cuda: StandIn, pool: Arena, settings: list[str], after: bool | None
) -> None:
    for one in settings:
        cuda.apply(one)
    before = cuda.snapshot()
    for error in (None, ZeroDivisionError()):
        with suppress(ZeroDivisionError), pool.use():
            assert cuda.settings["expandable_segments"] is False
            assert cuda.settings["max_split_size"] == 64 << 20  # the others stay
            if error is not None:
                raise error
        if after is None:
            assert cuda.snapshot() == before
        assert cuda.settings["expandable_segments"] is True
        assert cuda.settings["max_split_size"] == 64 << 20


def test_settings_are_not_touched_where_segments_are_fixed(cuda: StandIn, pool: Arena) -> None:
    cuda.apply("max_split_size_mb:64")
    cuda.can_switch = False
    with pool.use():
        pass
    assert cuda.settings["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64"
    assert cuda.calls == ["empty_cache", "use"]  # cached memory goes before the pool is used


def test_the_last_of_two_threads_switches_segments_on(cuda: StandIn, pool: Arena) -> None:
    cuda.apply("expandable_segments:True")
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with pool.use():
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    with pool.use():
        thread.start()
        assert entered.wait(60)
    assert cuda.settings["expandable_segments"] is False  # the other is within
    leave.set()
    thread.join()
    assert cuda.settings["expandable_segments"] is True


def test_ctrl_c_as_a_pool_is_taken_leaves_it_not_in_use(
    cuda: StandIn, pool: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = cuda.use_mem_pool

    @contextmanager
    def interrupted(*arguments: Any) -> Iterator[None]:
        with ExitStack() as stack:
            entering = begin(*arguments)
            entering.__enter__()
            press()  # PyTorch's code tries nothing yet
            stack.push(entering)
            yield

    cuda.apply("expandable_segments:True")
    monkeypatch.setattr(torch.cuda, "use_mem_pool", interrupted)
    with pytest.raises(KeyboardInterrupt) as held, pool.use():
        pass
    assert cuda.inside == 0
    assert cuda.settings["expandable_segments"] is True
    del held


def test_segments_that_cannot_be_switched_off_are_refused(cuda: StandIn, pool: Arena) -> None:
    cuda.apply("expandable_segments:True")
    cuda.can_switch = False
    with pytest.raises(UnsupportedError, match="take expandable_segments:True out"), pool.use():
        pass
    assert "use" not in cuda.calls
    cuda.can_switch = True
    with pool.use():  # nothing is left of the refusal
        assert cuda.settings["expandable_segments"] is False
    assert cuda.settings["expandable_segments"] is True


def test_adopted_states_find_their_addresses_and_gradients_stay(
    cuda: StandIn, pool: Arena, run: Run, reference_run: Run
) -> None:
    for one in (run, reference_run):
        for number, parameter in enumerate(one.model.parameters()):
            parameter.grad = torch.full_like(parameter, 0.5 * number)
    grads = [parameter.grad for parameter in run.model.parameters()]
    moved = run.moments() + grads
    before = addresses_of(moved)
    stays = pool.migrate(run.optimizer, run.model)
    assert all("step counter" in reason for _, reason in stays)
    assert {name for name, _ in stays} == {f"{n}.step" for n, _ in run.model.named_parameters()}
    now = addresses_of(moved)
    assert not set(before) & set(now)
    assert addresses_of(run.moments()) == now[:-4]  # the objects are what they were
    assert {address for address, _ in pool.pieces()} == set(now)
    assert_same(run, reference_run)
    with Controller(run.optimizer, run.model, pool=pool) as controller:
        for _ in range(3):
            controller.offload()
            assert controller.stats()["refit/regions"] == len(now) - len(grads)
            assert all(grad.untyped_storage().nbytes() for grad in grads)
            run.optimizer.step(), reference_run.optimizer.step()
            assert addresses_of(moved) == now
            assert [parameter.grad.data_ptr() for parameter in run.model.parameters()] == now[-4:]
    calls = list(cuda.calls)
    assert pool.migrate(run.optimizer, run.model) == stays  # nothing is left to move
    assert cuda.calls == calls


def test_move_that_fails_halfway_goes_on_when_called_again(
    cuda: StandIn, pool: Arena, run: Run, reference_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_pool, "BATCH_BYTES", 1)  # each storage is a batch of its own
    moments = run.moments()
    cuda.largest = WIDTH * WIDTH * 4 - 1
    with pytest.raises(DeviceMemoryError, match=r"is lost.*call migrate\(\) again") as caught:
        pool.migrate(run.optimizer, run.model)
    assert "0.weight.exp_avg" in str(caught.value)
    assert_same(run, reference_run)
    run.step(), reference_run.step()
    assert_same(run, reference_run)
    cuda.largest = 1 << 40
    pool.migrate(run.optimizer, run.model)
    assert {address for address, _ in pool.pieces()} == set(addresses_of(moments))
    assert sum(nbytes for _, nbytes in pool.pieces()) == sum(t.nbytes for t in moments)


def test_a_batch_moves_whole_or_not_at_all(cuda: StandIn, pool: Arena, run: Run) -> None:
    before = addresses_of(run.moments())
    cuda.largest = WIDTH * WIDTH * 4 - 1  # what comes after the first weight would fit
    with pytest.raises(DeviceMemoryError):
        pool.migrate(run.optimizer, run.model)
    assert addresses_of(run.moments()) == before
    assert pool.pieces() == []  # what was taken for the batch was given back


def test_between_batches_freed_memory_goes_back(
    cuda: StandIn, pool: Arena, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_pool, "BATCH_BYTES", WIDTH * WIDTH * 4)
    pool.migrate(run.optimizer, run.model)
    # a batch for each moment of the first weight, one for all the others
    assert cuda.calls == ["empty_cache", "use"] * 3


def test_shared_states_stay_together(
    cuda: StandIn, pool: Arena, run: Run, reference_run: Run
) -> None:
    state = next(iter(run.optimizer.state.values()))
    both = torch.stack([state["exp_avg"], state["exp_avg_sq"]])
    whole = both.untyped_storage()
    for number, key in enumerate(("exp_avg", "exp_avg_sq")):
        state[key] = torch.empty(0).set_(whole, number * both[0].numel(), both[0].shape)
    del both, whole
    assert len(pool.migrate(run.optimizer, run.model)) == 4
    a, b = (state[key].untyped_storage().data_ptr() for key in ("exp_avg", "exp_avg_sq"))
    assert a == b
    assert a in {address for address, _ in pool.pieces()}


@pytest.mark.parametrize(
    ("name", "reason"), [("exp_avg", "a view of it is held"), ("master", "also that of")]
)
def test_a_state_with_other_users_stays_where_it_is(
    cuda: StandIn, pool: Arena, run: Run, name: str, reason: str
) -> None:
    weight = next(run.model.parameters())
    state = run.optimizer.state[weight]
    state["master"] = weight.data
    user = {"exp_avg": state["exp_avg"][0], "master": weight}[name]
    where = state[name].data_ptr()
    stays = dict(pool.migrate(run.optimizer, run.model))
    assert reason in stays[f"0.weight.{name}"]
    assert state[name].data_ptr() == where == user.data_ptr()


def test_states_away_or_under_controller_are_not_moved(
    cuda: StandIn, pool: Arena, run: Run
) -> None:
    with Controller(run.optimizer), pytest.raises(BusyError, match="close that one first"):
        pool.migrate(run.optimizer, run.model)
    run.moments()[0].untyped_storage().resize_(0)
    with pytest.raises(StateError, match="restore"):
        pool.migrate(run.optimizer, run.model)


def test_a_pool_is_not_dropped_while_tensors_live(cuda: StandIn, pool: Arena, run: Run) -> None:
    pool.migrate(run.optimizer, run.model)
    with pytest.raises(BusyError, match="tensors use"):
        pool.close()
    assert not pool.closed
    assert not any(call.startswith("drop") for call in cuda.calls)
    run.step()  # the memory is there
    run.optimizer.state.clear()
    gc.collect()
    pool.close()
    assert pool.closed
    assert cuda.calls[-2:] == ["drop", "empty_cache"]


def test_the_scene_for_a_gpu_plays(
    cuda: StandIn, pool: Arena, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # tests/gpu/torch_pool.py, but for what only a GPU has: a graph is a function here
    place = importlib.util.spec_from_file_location("torch_pool", root / "tests/gpu/torch_pool.py")
    assert place is not None
    assert place.loader is not None
    script = importlib.util.module_from_spec(place)
    place.loader.exec_module(script)
    monkeypatch.setattr(script, "WIDTH", 128)
    cuda.apply("expandable_segments:True")
    script.scene(torch, pool, "cpu", lambda _torch, step: step)
    assert script.expandable(torch)
    gc.collect()
    pool.close()
    assert script.main() == 77 or torch.cuda.is_available()


@pytest.mark.parametrize("version", ["2.8.0a0+git1234", "2.13.0", "3.0"])
def test_a_later_pytorch_fits(cuda: StandIn, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    torch_pool.refuse_unfit()


OLD, NEW, NATIVE = "2.7.1+cu126", "2.13.0", "native"


@pytest.mark.parametrize(
    ("version", "backend", "device", "size", "error", "sentence"),
    [
        ("2.6.0", NATIVE, "cuda:0", 1 << 20, UnsupportedError, r"2\.8 or later.*2\.11"),
        (OLD, NATIVE, "cuda:0", 1 << 20, UnsupportedError, r"2\.8 or later.*2\.11"),
        (NEW, "cudaMallocAsync", "cuda:0", 1 << 20, UnsupportedError, "backend:cudaMallocAsync"),
        (NEW, NATIVE, "cpu", 1 << 20, InvalidError, "not cpu"),
        (NEW, NATIVE, "cuda:0", 0, InvalidError, "holds nothing"),
    ],
)
def test_a_pool_that_cannot_be_is_refused_with_a_sentence(
    cuda: StandIn,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    backend: str,
    device: str,
    size: int,
    error: type[Exception],
    sentence: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: backend)
    with pytest.raises(error, match=sentence):
        refit.mem_pool(device, size)
