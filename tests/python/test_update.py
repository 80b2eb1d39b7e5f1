"""A received version: its views, the decision on it, and its close."""

import ctypes
import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import broadcasting
import numpy as np
import pytest
import refit
import torch
from broadcasting import TIMEOUT, Pair, Trainer, same, wait_until
from interrupts import ctrl_c_after
from refit._c import abi
from refit._c.library import lib
from refit.errors import (
    DeadlineError,
    HostMemoryError,
    InvalidError,
    NotFoundError,
    StateError,
    UnsupportedError,
)
from refit.weights import load
from refit.weights.manifest import RawTensor
from refit.weights.parts import Parts
from refit.weights.update import Update
from refit.weights.view import View

MATRIX = torch.arange(6.0).view(2, 3)


# ---- Views


def test_tensors_are_views_of_the_same_memory(trainer: Trainer) -> None:
    update = trainer.offer({"w": MATRIX, "tied": MATRIX})
    first, second = dict(update.tensors()), dict(update.tensors())
    assert torch.equal(first["w"], MATRIX)
    assert first["w"].data_ptr() == second["w"].data_ptr() == second["tied"].data_ptr()
    assert first["w"].data_ptr() % 64 == 0
    assert update["tied"].alias_of == "w"
    assert update["w"].alias_of is None
    assert update.nbytes == MATRIX.nbytes
    assert update.device == "cpu"


def test_arrays_are_read_only_views(trainer: Trainer) -> None:
    update = trainer.offer({"w": MATRIX})
    array = dict(update.arrays())["w"]
    assert array.tolist() == MATRIX.tolist()
    assert np.asarray(update["w"]).ctypes.data == array.ctypes.data
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.flags.writeable = True
    with pytest.raises(TypeError):
        update["w"].bytes[0] = 1  # type: ignore[index]


def test_it_is_a_collection_of_names(trainer: Trainer) -> None:
    update = trainer.offer({"b": MATRIX, "a": torch.tensor(1)})
    assert list(update) == list(update.keys()) == ["b", "a"]
    assert len(update) == 2
    assert "a" in update
    assert "c" not in update
    assert (update["b"].dtype, update["b"].shape, update["b"].nbytes) == ("F32", (2, 3), 24)
    assert len(update["b"]) == 2
    with pytest.raises(TypeError, match="a is a scalar"):
        len(update["a"])
    with pytest.raises(LookupError, match="no tensor 'c'"):
        update["c"]
    with pytest.raises(NotFoundError):
        update["c"]


def test_types_that_numpy_lacks_come_as_bits_or_with_a_sentence(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    update = trainer.offer({"w": MATRIX.bfloat16()})
    for look in (update["w"].numpy, lambda: dict(update.arrays())):
        with pytest.raises(UnsupportedError, match="bits=True"):
            look()
    bits = dict(update.arrays(bits=True))["w"]
    assert bits.dtype == np.uint16
    assert torch.equal(torch.from_numpy(bits.copy()).view(torch.bfloat16), MATRIX.bfloat16())


def can_be_exchanged(tensor: torch.Tensor) -> bool:
    """Whether PyTorch takes by DLPack what it gives: 2.6 knows no FP8 there."""
    try:
        torch.from_dlpack(tensor)
    except (BufferError, RuntimeError, ValueError):
        return False
    return True


def test_dlpack_shows_the_memory_to_other_libraries(trainer: Trainer) -> None:
    weights = {
        "matrix": MATRIX,
        "bf16": MATRIX.bfloat16(),
        "fp8": MATRIX.to(torch.float8_e5m2),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "bool": torch.ones(2, 1, 2, dtype=torch.bool),
        "complex": torch.tensor([1 + 2j]),
    }
    update = trainer.offer(weights)
    for name, tensor in weights.items():
        if not can_be_exchanged(tensor):
            continue
        there = torch.from_dlpack(update[name])
        assert there.dtype == tensor.dtype, name
        assert torch.equal(there, tensor), name
        assert not tensor.numel() or there.data_ptr() == update[name].torch().data_ptr(), name
        assert update[name].__dlpack_device__() == (1, 0), name


def test_dlpack_neither_copies_nor_moves_and_leaks_nothing(trainer: Trainer) -> None:
    update = trainer.offer({"w": MATRIX, "raw": RawTensor(b"abc", "F6_E2M3", (4,))})
    view = update["w"]
    for _ in range(1000):
        np.from_dlpack(view)
    with pytest.raises(BufferError, match="copy it with"):
        view.__dlpack__(copy=True)
    with pytest.raises(BufferError):
        view.__dlpack__(dl_device=(2, 0))
    with pytest.raises(UnsupportedError, match="no code for F6_E2M3"):
        update["raw"].__dlpack__()
    assert bytes(update["raw"].bytes) == b"abc"


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this PyTorch has no FP4")
def test_packed_types_have_pytorchs_shape(trainer: Trainer) -> None:
    raw = bytes(range(6))
    tensor = trainer.offer({"w": RawTensor(raw, "F4", (2, 6))})["w"].torch()
    assert (tensor.dtype, tuple(tensor.shape)) == (torch.float4_e2m1fn_x2, (2, 3))
    assert tensor.view(torch.uint8).flatten().tolist() == list(raw)


@pytest.mark.parametrize("options", [{"broadcast_shm": "off", "broadcast_frame_bytes": "64KiB"}])
def test_tensors_from_a_socket_are_whole_and_aligned_traps_29_30(trainer: Trainer) -> None:
    weights = {
        "odd": torch.ones(3, dtype=torch.bfloat16),
        "wide": torch.arange(4, dtype=torch.float64),
        "byte": torch.ones(1, dtype=torch.uint8),
        "several frames": torch.arange(100_000, dtype=torch.int32),
    }
    for name, tensor in trainer.offer(weights).tensors():
        assert torch.equal(tensor, weights[name])
        assert tensor.data_ptr() % 64 == 0


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("path", ["require", "off"])
def test_a_loader_may_write_what_it_loads(path: str, slots: int) -> None:
    """As vLLM does with the norms of PLaMo 2. Each version comes as it was sent,
    also where the one before it is its base."""
    options = {"broadcast_shm": path, "broadcast_slots": slots}

    def add_one(update: Update) -> Any:
        for _, tensor in update.tensors():
            tensor += 1
        return {name: tensor.clone() for name, tensor in update.tensors()}

    weights = {"norm": torch.arange(40_000.0), "w": torch.zeros(7)}
    with broadcasting.pair(add_one, **options) as (publisher, worker):
        for number in range(4):
            weights["norm"][number] = 100.0 + number
            publisher.publish(weights)
        assert not worker.failures
        assert len(worker.seen) == 4
        assert same(worker.seen[-1], {name: one + 1 for name, one in weights.items()})


# ---- The end


@pytest.mark.parametrize("inference", [False, True])
def test_what_was_kept_of_a_closed_update_is_empty_trap_31(
    trainer: Trainer, inference: bool
) -> None:
    with torch.inference_mode(inference):
        update = trainer.offer({"w": MATRIX})
        kept = update["w"].torch()
        update.close()
        assert kept.numel() == 0
        with pytest.raises(RuntimeError):
            torch.zeros(2, 3).copy_(kept)


def test_after_close_nothing_is_handed_out(trainer: Trainer) -> None:
    update = trainer.offer({"w": MATRIX})
    view, tensors = update["w"], update.tensors()
    update.close()
    update.close()
    for call in (
        lambda: update["w"],
        lambda: next(tensors),
        lambda: list(update.views()),
        lambda: list(update.arrays()),
        lambda: update.load_into({}),
        lambda: view.bytes,
        view.torch,
        view.numpy,
        view.__dlpack__,
        update.accept,
        update.refuse,
    ):
        with pytest.raises(StateError, match="closed"):
            call()
    assert update.version == 1
    assert update.closed
    assert repr(update) == "<refit.Update: version 1, 1 tensors, closed>"


def test_a_view_holds_its_update(trainer: Trainer) -> None:
    held = [trainer.offer({"w": MATRIX})["w"].numpy()]
    with pytest.raises(StateError, match="still open"):
        trainer.subscriber.next(0)
    assert held[0].tolist() == MATRIX.tolist()
    with pytest.warns(ResourceWarning, match=r"version 1 was dropped .*with update:"):
        held.clear()  # no reference is left: it is refused
    trainer.join()
    assert "closed without a decision" in trainer.publisher.workers()[0].reason
    with trainer.subscriber.next(TIMEOUT) as again:
        assert again.version == 1


def mapped(place: int) -> bool:
    with open("/proc/self/maps", encoding="ascii") as maps:
        spans = [line.split()[0].split("-") for line in maps]
    return any(int(first, 16) <= place < int(last, 16) for first, last in spans)


@pytest.mark.parametrize("options", [{"broadcast_shm": "auto"}, {"broadcast_shm": "off"}])
@pytest.mark.parametrize("end", ["update", "subscriber", "collector"])
def test_a_view_read_too_late_finds_its_memory_there(trainer: Trainer, end: str) -> None:
    """Everything that lent memory, and its mapping, is gone; a process that reads it goes on."""
    update = trainer.offer({"w": MATRIX})
    view = update["w"]
    late = [view.numpy(), np.from_dlpack(view), np.asarray(view.bytes)]
    late += [torch.from_dlpack(view).numpy(), view.torch()[1:].numpy()]
    place = late[0].ctypes.data
    update.accept()
    trainer.join()
    if end == "collector":
        del update, view, late[0], late[1], late[-1]
        gc.collect()
    else:
        update.close()
    if end != "update":
        trainer.subscriber.close()
        wait_until(lambda: trainer.publisher.stats()["workers"] == 0)  # its farewell has come
        trainer.publisher.publish({"other": torch.zeros(50_000)})  # in another store
    assert mapped(place)
    assert all(one.nbytes for one in late)
    assert sum(int(one.view(np.uint8).sum()) for one in late) > 0
    if end == "subscriber":
        del update, view
        late.clear()
        assert not mapped(place)


def test_views_taken_by_many_threads_share_what_keeps_them(trainer: Trainer) -> None:
    update = trainer.offer({f"w{i}": MATRIX + i for i in range(8)})
    with ThreadPoolExecutor(8) as pool:
        arrays = list(pool.map(View.numpy, [update[name] for name in list(update) * 20]))
    place = arrays[0].ctypes.data
    update.close()
    assert [array[0, 0] for array in arrays[:8]] == list(range(8))
    trainer.subscriber.close()
    assert mapped(place)
    del update
    arrays.clear()
    assert not mapped(place)


def test_ctrl_c_while_making_capsule_keeps_no_mapping_trap_12(trainer: Trainer) -> None:
    update = trainer.offer({"w": MATRIX})
    place = update["w"].torch().data_ptr()
    with ctrl_c_after("refit_update_retain"):
        update["w"].__dlpack__()
    trainer.subscriber.close()
    del update
    gc.collect()
    assert not mapped(place)


def test_a_signal_handler_may_take_a_view_while_one_is_taken(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = lib.refit_update_retain
    taken: list[Any] = []
    update = trainer.offer({"w": MATRIX, "v": MATRIX + 1})

    def keep(*arguments: Any) -> int:
        if not taken:
            taken.append(None)
            taken.append(update["v"].numpy())
        status: int = real(*arguments)
        return status

    monkeypatch.setattr(lib, "refit_update_retain", keep)
    taken.append(update["w"].numpy())
    assert [array[0, 0] for array in taken[1:]] == [1, 0]


def test_a_memory_that_cannot_be_kept_is_an_error_and_no_view(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = trainer.offer({"w": MATRIX})
    with monkeypatch.context() as patch:
        patch.setattr(lib, "refit_update_retain", lambda *_: abi.REFIT_ERR_HOST_MEMORY)
        for take in (lambda: update["w"].numpy(), lambda: np.from_dlpack(update["w"])):
            with pytest.raises(HostMemoryError):
                take()
    assert update["w"].numpy().tolist() == MATRIX.tolist()


# ---- Decisions


@pytest.mark.parametrize("copies", [Update.tensors, Update.arrays])
def test_a_clean_exit_accepts_and_copies_stay(pair: Pair, copies: Any) -> None:
    pair.worker.apply = lambda update: dict(copies(update, copy=True))
    for value in range(4):
        pair.publisher.publish({"w": torch.full((8,), float(value))})
        assert pair.publisher.workers()[0].committed
    assert [float(seen["w"].sum()) for seen in pair.worker.seen] == [0, 8, 16, 24]
    pair.worker.seen[0]["w"][0] = 9


def asleep(update: Update) -> None:
    raise ValueError("the engine is asleep\0!")


def without_text(update: Update) -> None:
    raise ZeroDivisionError


def interrupted(update: Update) -> None:
    raise KeyboardInterrupt


def refusing(update: Update) -> None:
    update.refuse("too hot")


@pytest.mark.parametrize(
    ("apply", "reason"),
    [
        (asleep, "ValueError: the engine is asleep"),
        (without_text, "ZeroDivisionError"),
        (interrupted, "KeyboardInterrupt"),
        (refusing, "too hot"),
    ],
)
def test_the_trainer_is_told_why_a_worker_refused(
    trainer: Trainer, apply: Callable[[Update], None], reason: str
) -> None:
    with suppress(ValueError, ZeroDivisionError, KeyboardInterrupt), trainer.offer() as update:
        apply(update)
    trainer.join()
    assert reason in trainer.publisher.workers()[0].reason


def look(update: Update) -> None:
    list(update.tensors())


def look_and_keep(update: Update) -> None:
    look(update)
    update.kept = True


@pytest.mark.parametrize(
    ("apply", "kept", "holds"),
    [
        (len, None, True),
        (look, None, False),
        (look_and_keep, None, True),
        (look, True, True),
        (len, False, False),
    ],
)
def test_refusal_keeps_previous_version_if_untouched(
    trainer: Trainer, apply: Callable[[Update], object], kept: bool | None, holds: bool
) -> None:
    with trainer.offer():
        pass
    with trainer.offer() as update:
        apply(update)
        update.refuse(kept=kept)
    trainer.join()
    assert trainer.subscriber.describe().version == holds
    if holds:
        with pytest.raises(DeadlineError):
            trainer.subscriber.next(0)
    else:  # it has joined again
        with trainer.subscriber.next(TIMEOUT) as again:
            assert again.version == 2


def test_a_decision_is_made_once(trainer: Trainer) -> None:
    with trainer.offer({"w": MATRIX}) as update:
        update.accept()
        for again in (update.accept, update.refuse):
            with pytest.raises(StateError, match="accepted or refused before"):
                again()
        assert torch.equal(update["w"].torch(), MATRIX)  # the views stay until close


def test_a_failed_refusal_hides_no_failure(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unable(*_: object) -> None:
        raise StateError("no mailbox")

    update = trainer.offer()
    monkeypatch.setattr(update, "refuse", unable)
    with pytest.raises(ValueError, match="asleep") as failed, update:
        asleep(update)
    assert failed.value.__notes__ == ["refit: the trainer could not be told: no mailbox"]
    assert update.closed


def test_a_subscriber_closed_in_the_block_hides_no_failure(trainer: Trainer) -> None:
    def close_and_fail(update: Update) -> None:
        with update:
            trainer.subscriber.close()
            asleep(update)

    with pytest.raises(ValueError, match="asleep"):
        close_and_fail(trainer.offer())


@pytest.mark.parametrize("ended", [False, True])
def test_close_cut_short_by_ctrl_c_leaves_next_update_trap_12(
    trainer: Trainer, ended: bool
) -> None:
    first = trainer.offer({"w": MATRIX})
    first.accept()
    with ctrl_c_after("refit_update_close", done=ended):
        first.close()
    with trainer.offer({"w": MATRIX}) as second:
        for call in (first.views().__next__, first.refuse, first.accept):
            with pytest.raises(StateError, match="version 1 is closed"):
                call()
        first.close()
        assert second["w"].numpy().tolist() == MATRIX.tolist()


# ---- In a GPU's memory, as far as a machine without one can tell


@pytest.fixture
def waited(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The bytes of versions are said to lie on the GPU of number 3; host memory is there. Gives
    the GPUs whose work was waited for."""

    def properties(number: int) -> Any:
        return SimpleNamespace(uuid="" if number == 3 else f"GPU-1234-{number}")  # "": the host's

    def at_address(raw: Any, device: str) -> torch.Tensor:
        described = raw.__cuda_array_interface__
        assert (device, described["typestr"]) == ("cuda:3", "|u1")
        (nbytes,), (address, read_only) = described["shape"], described["data"]
        assert not read_only
        return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)

    done: list[int] = []
    trainer.subscriber.use_device("host")
    with monkeypatch.context() as patch:
        patch.setattr(lib, "refit_update_device", lambda _: 1)
        patch.setattr(torch.cuda, "device_count", lambda: 4)
        patch.setattr(torch.cuda, "get_device_properties", properties)
        patch.setattr(torch.cuda, "synchronize", done.append)
        patch.setattr(torch, "as_tensor", at_address)
        yield done


def test_a_gpus_memory_is_shown_to_pytorch_and_dlpack_only(
    trainer: Trainer, waited: list[int]
) -> None:
    update = trainer.offer({"w": MATRIX})
    view = update["w"]
    assert update.device == "cuda:3"
    assert view.__dlpack_device__() == (2, 3)
    assert torch.equal(view.torch(), MATRIX)
    with pytest.raises(UnsupportedError, match="w lies in a GPU's memory and cannot be bytes"):
        _ = view.bytes
    with pytest.raises(UnsupportedError, match="cannot be a NumPy array"):
        view.numpy()
    assert np.array_equal(view.on_host(), MATRIX.numpy())
    arrays = {"w": np.zeros((2, 3), np.float32)}
    update.load_into(arrays)
    assert np.array_equal(arrays["w"], MATRIX.numpy())


def test_a_gpu_that_pytorch_does_not_see_is_named(
    trainer: Trainer, waited: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(StateError, match="does not see the GPU"):
        trainer.offer()


@pytest.mark.parametrize(
    ("take", "waits"),
    [
        pytest.param(len, 0, id="nothing"),
        pytest.param(View.__dlpack__, 1, id="dlpack"),
        pytest.param(View.torch, 1, id="torch"),
    ],
)
def test_work_on_the_gpu_ends_before_the_memory_may_go_trap_19(
    trainer: Trainer, waited: list[int], take: Callable[[View], Any], waits: int
) -> None:
    update = trainer.offer({"w": MATRIX})
    kept = take(update["w"])
    update.accept()
    assert waited == [3] * waits
    update.close()
    assert waited == [3, 3] * waits
    assert not isinstance(kept, torch.Tensor) or kept.numel() == 0


@pytest.fixture
def looks(trainer: Trainer, waited: list[int], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """All tensors of PyTorch are said to lie on GPU 3 as well, and are copied there by the CPU.
    Gives the names that were compared, each time."""
    compared: list[str] = []
    whole = load.check

    def copy(update: int, targets: Any, *_: Any) -> int:
        for one in targets:
            place = ctypes.c_void_p()
            lib.refit_update_tensor(update, one.tensor, None, ctypes.byref(place), None)
            ctypes.memmove(one.memory, place, one.bytes)
        return 0

    def check(views: Any, target: Any, **options: Any) -> Any:
        compared.append(",".join(views))
        return whole(views, target, **options)

    monkeypatch.setattr(load, "check", check)
    monkeypatch.setattr(lib, "refit_update_copy", copy)
    for module in ("source", "update"):
        monkeypatch.setattr(f"refit.weights.{module}.cuda_number", lambda _: 3)
    monkeypatch.setattr("refit.weights.update.stream_of", lambda _: 0)
    return compared


def replace(target: Any, tensor: torch.Tensor) -> None:
    if isinstance(target, dict):
        target["w"] = tensor
    else:
        target.w.data = tensor


class OneWeight(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(2, 3))


@pytest.mark.parametrize("make", [OneWeight, lambda: {"w": torch.zeros(2, 3)}])
def test_an_engine_that_stays_where_it_was_is_compared_once(
    trainer: Trainer, looks: list[str], make: Callable[[], Any]
) -> None:
    target = make()

    def load_next(matrix: torch.Tensor, compared: int, **options: Any) -> None:
        with trainer.offer({"w": matrix.numpy()}) as update:
            assert update.load_into(target, **options) == ([], [])
        assert len(looks) == compared
        held = target["w"] if isinstance(target, dict) else target.w
        assert torch.equal(held, matrix)

    load_next(MATRIX, 1)
    load_next(MATRIX + 1, 1)
    replace(target, torch.zeros(2, 3))
    load_next(MATRIX + 2, 2)
    load_next(MATRIX + 3, 2)
    load_next(MATRIX + 4, 3, strict=False)
    load_next(MATRIX + 5, 4, cast=True)
    replace(target, torch.zeros(7))
    with pytest.raises(InvalidError, match=r"w is \[2, 3\] and not \[7\]"):
        load_next(MATRIX, 0)
    replace(target, torch.zeros(2, 3))
    load_next(MATRIX + 6, 6)
    with pytest.raises(InvalidError, match="w is F64 and not F32"):
        load_next(MATRIX.double(), 0)
    load_next(MATRIX + 7, 8)


def test_an_engine_is_compared_each_time_where_bytes_decide(
    trainer: Trainer, looks: list[str]
) -> None:
    one = torch.zeros(2, 3)
    target = {"a": one, "b": one}
    for count in (1, 2):
        with trainer.offer({"a": MATRIX.numpy(), "b": (MATRIX + 0).numpy()}) as update:
            update.load_into(target)
        assert len(looks) == count
    with (
        pytest.raises(InvalidError, match="have one memory here, but differ"),
        trainer.offer({"a": MATRIX.numpy(), "b": (MATRIX + 1).numpy()}) as update,
    ):
        update.load_into(target)
    assert torch.equal(one, MATRIX)


def test_what_was_found_out_holds_no_tensor(trainer: Trainer, looks: list[str]) -> None:
    target = {"w": torch.zeros(2, 3)}
    gone = weakref.ref(target["w"])
    with trainer.offer({"w": MATRIX.numpy()}) as update:
        update.load_into(target)
    target.clear()
    gc.collect()
    assert gone() is None


class Stacked(torch.nn.Module):
    """An engine that has two weights in one, and a loader for them."""

    def __init__(self) -> None:
        super().__init__()
        self.both = torch.nn.Parameter(torch.zeros(4, 3))

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            at = 2 * (name == "b")
            self.both.data[at : at + 2].copy_(tensor)


def test_parts_of_a_model_that_stays_are_packed_once(
    trainer: Trainer, looks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, parts, checks = Stacked(), None, []
    whole = Parts.check
    monkeypatch.setattr(Parts, "check", lambda it, given: checks.append(1) or whole(it, given))
    for version, seen in enumerate([1, 1, 2, 2]):
        if version == 2:
            parts = None  # the model has other memory: it is recorded again
            model.both.data = torch.zeros(4, 3)
        a, b = MATRIX + version, MATRIX - version
        with trainer.offer({"a": a.numpy(), "b": b.numpy()}) as update:
            parts = parts or refit.record(model.load_weights, update, model)
            assert update.load_into(parts) == ([], [])
        assert torch.equal(model.both, torch.cat([a, b]))
        assert len(checks) == seen
    model.both.data = torch.zeros(4, 3)
    with (
        pytest.raises(StateError, match="both is not where it was recorded"),
        trainer.offer({"a": a.numpy(), "b": b.numpy()}) as update,
    ):
        update.load_into(parts)
