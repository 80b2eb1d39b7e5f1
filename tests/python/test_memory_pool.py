"""refit.mem_pool(): states at addresses that stay. Here on an arena of the host device, which frees
and refills its memory as a GPU's does, with PyTorch's part played by the test."""

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import refit  # noqa: E402
from refit._library import call, lib  # noqa: E402
from refit.errors import BusyError, InvalidError, UnsupportedError  # noqa: E402
from refit.memory_pool import MemPool  # noqa: E402
from training import Run, assert_same  # noqa: E402


class Segments:
    """PyTorch's part: pieces of the arena, and tensors that lie in them."""

    def __init__(self, pool: MemPool) -> None:
        self.pool = pool
        self.taken: list[int] = []

    def tensors(self, like: list[Any]) -> list[Any]:
        """Tensors with the values of others, one behind the other in a segment of their own."""
        address = ctypes.c_void_p()
        room = sum(t.numel() * t.element_size() for t in like)
        call(lib.refit_arena_alloc, self.pool._live, room, ctypes.byref(address))
        assert address.value is not None
        self.taken.append(address.value)
        return list(self._lay(address.value, like))

    def _lay(self, address: int, like: list[Any]) -> Iterator[Any]:
        for t in like:
            nbytes = t.numel() * t.element_size()
            memory = (ctypes.c_char * nbytes).from_address(address)
            made = torch.frombuffer(memory, dtype=t.dtype).view(t.shape)
            yield made.copy_(t)
            address += nbytes

    def give_back(self) -> None:
        for address in self.taken:
            call(lib.refit_arena_free, self.pool._live, address)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemPool]:
    # a GPU's storages can be resized; these, over memory that is not PyTorch's, say they cannot
    monkeypatch.setattr(torch.UntypedStorage, "resizable", lambda _: True)
    made = MemPool(torch.device("cpu"), 1 << 24)
    yield made
    made.close()


def move_into(segments: Segments, run: Run, keys: tuple[str, ...]) -> list[Any]:
    states = list(run.optimizer.state.values())
    moved = segments.tensors([state[key] for state in states for key in keys])
    left = iter(moved)
    for state in states:
        for key in keys:
            state[key] = next(left)
    return moved


def test_states_in_a_pool_leave_by_segments_and_keep_their_addresses(pool: MemPool) -> None:
    run, same = Run(), Run()
    run.step(), same.step()
    segments = Segments(pool)
    moved = move_into(segments, run, ("exp_avg", "exp_avg_sq"))
    addresses = [t.data_ptr() for t in moved]
    used = pool.handle.info.used_bytes
    with refit.Controller(run.optimizer, run.model, pool=pool) as controller:
        for _ in range(3):
            controller.clear()
            assert controller.stats()["refit/regions"] == 1
            assert pool.handle.info.used_bytes < used
            with controller.checkpoint() as state_dict:  # brought back: a segment has no view
                assert state_dict["state"][0]["exp_avg"] is moved[0]
            controller.clear()
            run.step(), same.step()
            assert [t.data_ptr() for t in moved] == addresses
            assert_same(run, same)
    segments.give_back()


def test_a_segment_with_anything_else_in_it_stays(pool: MemPool) -> None:
    # trap 2
    run = Run()
    run.step()
    segments = Segments(pool)
    *moved, weight = segments.tensors([*run.moments()[:2], next(run.model.parameters()).data])
    state = next(iter(run.optimizer.state.values()))
    state["exp_avg"], state["exp_avg_sq"] = moved
    next(run.model.parameters()).data = weight
    with refit.Controller(run.optimizer, run.model, pool=pool) as controller:
        controller.clear()
        reasons = dict(controller.resident)
        assert "its segment of the pool is also that of" in reasons["0.weight.exp_avg"]
        assert float(weight.abs().sum()) > 0
        assert controller.stats()["refit/regions"] == 6
    segments.give_back()


def test_states_in_and_beside_a_pool_move_together(pool: MemPool) -> None:
    run, same = Run(), Run()
    run.step(), same.step()
    segments = Segments(pool)
    move_into(segments, run, ("exp_avg",))
    with refit.Controller(run.optimizer, run.model, pool=pool) as controller:
        for _ in range(3):
            controller.clear()
            assert controller.stats()["refit/regions"] == 5
            run.step(), same.step()
    assert_same(run, same)
    segments.give_back()


def test_a_pool_that_is_in_use_is_not_closed(pool: MemPool) -> None:
    run = Run()
    run.step()
    segments = Segments(pool)
    move_into(segments, run, ("exp_avg",))
    with refit.Controller(run.optimizer, pool=pool) as controller:
        controller.clear()
        with pytest.raises(BusyError):
            pool.close()
        run.step()
    segments.give_back()


def test_without_a_gpu_a_pool_is_refused_with_a_sentence() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UnsupportedError, match="needs a GPU"):
        refit.mem_pool("cuda:0", 1 << 20)


def test_a_pool_for_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(InvalidError, match="cpu is none"):
        refit.mem_pool("cpu", 1 << 20)
    with pytest.raises(InvalidError, match="holds nothing"):
        refit.mem_pool("cuda:0", 0)
