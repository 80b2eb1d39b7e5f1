"""A received version: its views, the decision on it, loading it, and its close."""

import gc
import pickle
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from broadcasting import PATIENCE, both, pair, publish_in_vain, published, wait_until
from refit import _abi
from refit._library import lib
from refit.errors import HostMemoryError, NotFoundError, PeerError, StateError, UnsupportedError
from refit.manifest import Typed
from refit.subscriber import _cuda_number
from refit.update import Update
from refit.view import View, _CudaBytes

MATRIX = torch.arange(6.0).view(2, 3)


def can_be_exchanged(tensor: torch.Tensor) -> bool:
    """Whether PyTorch takes by DLPack what it gives: 2.6 knows no FP8 there."""
    try:
        torch.from_dlpack(tensor)
    except (BufferError, RuntimeError, ValueError):
        return False
    return True


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


# ---- Views


def test_tensors_are_views_of_the_same_memory() -> None:
    with published({"w": MATRIX, "tied": MATRIX}) as update:
        first, second = dict(update.tensors()), dict(update.tensors())
        assert torch.equal(first["w"], MATRIX)
        assert first["w"].data_ptr() == second["w"].data_ptr() == second["tied"].data_ptr()
        assert first["w"].data_ptr() % 64 == 0
        assert update["tied"].alias_of == "w"
        assert update["w"].alias_of is None
        assert update.nbytes == MATRIX.nbytes
        assert update.device == "cpu"


def test_arrays_are_read_only_views() -> None:
    with published({"w": MATRIX}) as update:
        array = dict(update.arrays())["w"]
        assert array.tolist() == MATRIX.tolist()
        assert np.asarray(update["w"]).ctypes.data == array.ctypes.data
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
        with pytest.raises(TypeError):
            update["w"].bytes[0] = 1  # type: ignore[index]


def test_copies_are_the_callers_own() -> None:
    with published({"w": MATRIX}) as update:
        tensors, arrays = dict(update.tensors(copy=True)), dict(update.arrays(copy=True))
        update.close()
        arrays["w"][0, 0] = 9
        assert torch.equal(tensors["w"], MATRIX)


def test_it_is_a_collection_of_names() -> None:
    with published({"b": MATRIX, "a": torch.tensor(1)}) as update:
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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    with published({"w": MATRIX.bfloat16()}) as update:
        with pytest.raises(UnsupportedError, match="bits=True"):
            update["w"].numpy()
        with pytest.raises(UnsupportedError, match="bits=True"):
            dict(update.arrays())
        bits = dict(update.arrays(bits=True))["w"]
        assert bits.dtype == np.uint16
        assert torch.equal(torch.from_numpy(bits.copy()).view(torch.bfloat16), MATRIX.bfloat16())


@pytest.mark.parametrize(
    "tensor",
    [
        MATRIX,
        MATRIX.bfloat16(),
        MATRIX.to(torch.float8_e5m2),
        torch.tensor(7),
        torch.empty(0, 3),
        torch.ones(2, 1, 2, dtype=torch.bool),
        torch.tensor([1 + 2j]),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{list(tensor.shape)}",
)
def test_dlpack_shows_the_memory_to_other_libraries(tensor: torch.Tensor) -> None:
    if not can_be_exchanged(tensor):
        pytest.skip(f"this PyTorch knows no {tensor.dtype} in DLPack")
    with published({"w": tensor}) as update:
        view = update["w"]
        there = torch.from_dlpack(view)
        assert there.dtype == tensor.dtype
        assert torch.equal(there, tensor)
        if tensor.numel():
            assert there.data_ptr() == view.torch().data_ptr()
        assert view.__dlpack_device__() == (1, 0)


def test_dlpack_neither_copies_nor_moves_and_leaks_nothing() -> None:
    with published({"w": MATRIX, "raw": Typed(b"abc", "F6_E2M3", (4,))}) as update:
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
def test_packed_types_have_pytorchs_shape() -> None:
    raw = bytes(range(6))
    with published({"w": Typed(raw, "F4", (2, 6))}) as update:
        tensor = update["w"].torch()
        assert (tensor.dtype, tuple(tensor.shape)) == (torch.float4_e2m1fn_x2, (2, 3))
        assert tensor.view(torch.uint8).flatten().tolist() == list(raw)


ODD_SIZES = {
    "odd": torch.ones(3, dtype=torch.bfloat16),
    "wide": torch.arange(4, dtype=torch.float64),
    "byte": torch.ones(1, dtype=torch.uint8),
    "complex": torch.tensor([1j]),
}


@pytest.mark.parametrize(
    ("weights", "frame_bytes"),
    [
        pytest.param(ODD_SIZES, "1MiB", id="odd sizes, trap 29"),
        pytest.param(
            {"w": torch.arange(100_000, dtype=torch.int32)}, "64KiB", id="several frames, trap 30"
        ),
    ],
)
def test_tensors_from_a_socket_are_whole_and_aligned(
    weights: dict[str, torch.Tensor], frame_bytes: str
) -> None:
    options = {"broadcast_shm": "off", "broadcast_frame_bytes": frame_bytes}
    with published(weights, **options) as update:
        assert equal(dict(update.tensors(copy=True)), weights)
        assert {tensor.data_ptr() % 64 for _, tensor in update.tensors()} == {0}


def test_references_that_a_loader_keeps_can_be_owned_trap_31() -> None:
    with pair(lambda update: dict(update.tensors(copy=True))) as (publisher, worker):
        for value in range(4):
            publisher.publish({"w": torch.full((8,), float(value))})
    assert [float(seen["w"].sum()) for seen in worker.seen] == [0, 8, 16, 24]


# ---- The end


@pytest.mark.parametrize("inference", [False, True])
def test_what_was_kept_of_a_closed_update_is_empty_and_not_torn_trap_31(inference: bool) -> None:
    with published({"w": MATRIX}) as update, torch.inference_mode(inference):
        kept = update["w"].torch()
        update.close()
        assert kept.numel() == 0
        with pytest.raises(RuntimeError):
            torch.zeros(2, 3).copy_(kept)


def test_after_close_nothing_is_handed_out() -> None:
    with published({"w": MATRIX}) as update:
        view = update["w"]
        tensors = update.tensors()
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


def test_it_cannot_be_pickled_trap_27() -> None:
    with published({"w": MATRIX}) as update, pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(update)


def test_a_view_holds_its_update() -> None:
    held: list[np.ndarray[Any, Any]] = []
    with both() as (publisher, subscriber):
        trainer = threading.Thread(target=publish_in_vain, args=(publisher, {"w": MATRIX}))
        trainer.start()
        update = subscriber.next(PATIENCE)
        held.append(update["w"].numpy())
        del update
        gc.collect()
        with pytest.raises(StateError, match="still open"):
            subscriber.next(0)
        assert held[0].tolist() == MATRIX.tolist()
        with pytest.warns(ResourceWarning, match=r"version 1 was dropped .*with update:"):
            held.clear()  # no reference is left: it is refused
        trainer.join()
        assert "closed without a decision" in publisher.workers()[0].reason


@pytest.mark.parametrize("shm", ["auto", "off"])
@pytest.mark.parametrize("end", ["update", "subscriber", "collector"])
def test_a_view_read_too_late_finds_its_memory_there(shm: str, end: str) -> None:
    """Everything that lent memory, and its mapping, is gone; a process that reads it goes on."""
    with both(broadcast_shm=shm) as (publisher, subscriber):
        trainer = threading.Thread(target=publisher.publish, args=({"w": MATRIX},))
        trainer.start()
        update = subscriber.next(PATIENCE)
        view = update["w"]
        late = [view.numpy(), np.from_dlpack(view), np.asarray(view.bytes)]
        late += [torch.from_dlpack(view).numpy(), view.torch()[1:].numpy()]
        place = view._entry.pointer
        update.accept()
        trainer.join()
        if end == "collector":
            del update, view, late[0], late[1], late[-1]
            gc.collect()
        else:
            update.close()
        if end != "update":
            subscriber.close()
            wait_until(lambda: publisher.stats()["workers"] == 0)  # its farewell has come
            publisher.publish({"other": torch.zeros(50_000)})  # in another store
    assert mapped(place)
    assert all(one.nbytes for one in late)
    assert sum(int(one.view(np.uint8).sum()) for one in late) > 0
    if end == "subscriber":
        del update, view
        late.clear()
        gc.collect()
        assert not mapped(place)


def mapped(place: int) -> bool:
    with open("/proc/self/maps", encoding="ascii") as maps:
        spans = [line.split()[0].split("-") for line in maps]
    return any(int(first, 16) <= place < int(last, 16) for first, last in spans)


def test_views_taken_by_many_threads_share_what_keeps_them() -> None:
    with published({f"w{i}": MATRIX + i for i in range(8)}) as update:
        with ThreadPoolExecutor(8) as pool:
            arrays = list(pool.map(View.numpy, [update[name] for name in list(update) * 20]))
        place = update["w0"]._entry.pointer
        update.close()
        assert [array[0, 0] for array in arrays[:8]] == list(range(8))
    assert mapped(place)
    del update
    arrays.clear()
    gc.collect()
    assert not mapped(place)


def test_ctrl_c_while_a_capsule_is_made_keeps_nothing_mapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # trap 12
    real = lib.refit_update_keep

    def interrupted(*arguments: Any) -> int:
        status: int = real(*arguments)
        signal.raise_signal(signal.SIGINT)
        return status

    with published({"w": MATRIX}) as update:
        view = update["w"]
        monkeypatch.setattr(lib, "refit_update_keep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            view.__dlpack__()
        monkeypatch.undo()
        place = view._entry.pointer
        update.close()
        del view
    del update
    gc.collect()
    assert not mapped(place)


def test_a_signal_handler_may_take_a_view_while_one_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = lib.refit_update_keep
    taken: list[Any] = []
    with published({"w": MATRIX, "v": MATRIX + 1}) as update:

        def keep(*arguments: Any) -> int:
            if not taken:
                taken.append(None)
                taken.append(update["v"].numpy())
            status: int = real(*arguments)
            return status

        monkeypatch.setattr(lib, "refit_update_keep", keep)
        taken.append(update["w"].numpy())
        assert [array[0, 0] for array in taken[1:]] == [1, 0]


def test_a_memory_that_cannot_be_kept_is_an_error_and_no_view(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_memory(*_: Any) -> int:
        return _abi.REFIT_ERR_HOST_MEMORY

    with published({"w": MATRIX}) as update:
        with monkeypatch.context() as patch:
            patch.setattr(lib, "refit_update_keep", no_memory)
            for take in (lambda: update["w"].numpy(), lambda: np.from_dlpack(update["w"])):
                with pytest.raises(HostMemoryError):
                    take()
        assert update["w"].numpy().tolist() == MATRIX.tolist()


# ---- Decisions


def test_a_clean_exit_accepts() -> None:
    with pair(lambda update: update.version) as (publisher, worker):
        publisher.publish({"w": MATRIX})
        assert publisher.workers()[0].committed
        assert worker.seen == [1]


def asleep(update: Update) -> None:
    raise ValueError("the engine is asleep\0!")


def without_text(update: Update) -> None:
    raise ZeroDivisionError


def refusing(update: Update) -> None:
    update.refuse("too hot", kept=False)


@pytest.mark.parametrize(
    ("apply", "reason"),
    [
        (asleep, "ValueError: the engine is asleep"),
        (without_text, "ZeroDivisionError"),
        (refusing, "too hot"),
    ],
)
def test_the_trainer_is_told_why_a_worker_refused(
    apply: Callable[[Update], None], reason: str
) -> None:
    with pair(apply) as (publisher, _worker):
        with pytest.raises(PeerError) as failed:
            publisher.publish({"w": MATRIX})
        (one,) = failed.value.workers
        assert reason in one.reason


def test_a_base_exception_refuses_too() -> None:
    with both() as (publisher, subscriber):
        trainer = threading.Thread(target=publish_in_vain, args=(publisher, {"w": MATRIX}))
        trainer.start()
        with pytest.raises(KeyboardInterrupt), subscriber.next(PATIENCE):
            raise KeyboardInterrupt
        trainer.join()
        assert "KeyboardInterrupt" in publisher.workers()[0].reason


def test_a_refusal_without_a_look_keeps_the_version_before() -> None:
    outcomes: list[Any] = []

    def fail_the_second(update: Update) -> None:
        if update.version == 2:
            raise ValueError("not today")
        outcomes.append(update.version)

    with pair(fail_the_second) as (publisher, worker):
        publisher.publish({"w": MATRIX})
        with pytest.raises(PeerError):
            publisher.publish({"w": MATRIX})
        assert worker.subscriber.describe().version == 1
        publisher.publish({"w": MATRIX})
        assert worker.subscriber.describe().version == 3
    assert outcomes == [1, 3]


def test_a_refusal_after_a_look_holds_nothing() -> None:
    def fail(update: Update) -> None:
        list(update.tensors())
        held.append(update._holds(None))
        update.kept = True
        held.append(update._holds(None))
        raise ValueError

    held: list[bool] = []
    with pair(fail) as (publisher, _worker), pytest.raises(PeerError):
        publisher.publish({"w": MATRIX})
    assert held[:2] == [False, True]


def test_a_decision_is_made_once() -> None:
    with published({"w": MATRIX}) as update:
        update.accept()
        for again in (update.accept, update.refuse):
            with pytest.raises(StateError, match="accepted or refused before"):
                again()
        assert torch.equal(update["w"].torch(), MATRIX)  # the views stay until close
        with update:
            pass


def test_a_failed_refusal_does_not_hide_the_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def unable(*_: object) -> None:
        raise StateError("no mailbox")

    with published({"w": MATRIX}) as update:
        monkeypatch.setattr(update, "refuse", unable)
        with pytest.raises(ValueError, match="mine") as failed, update:
            raise ValueError("mine")
        assert failed.value.__notes__ == ["refit: the trainer could not be told: no mailbox"]
        assert update.closed


def test_a_subscriber_closed_within_the_block_does_not_hide_the_failure() -> None:
    def close_and_fail(update: Update) -> None:
        with update:
            subscriber.close()
            raise ValueError("mine")

    with both() as (publisher, subscriber):
        trainer = threading.Thread(target=publish_in_vain, args=(publisher, {"w": MATRIX}))
        trainer.start()
        update = subscriber.next(PATIENCE)
        with pytest.raises(ValueError, match="mine"):
            close_and_fail(update)
        trainer.join()


# ---- In a GPU's memory, as far as a machine without one can tell


class OnAGpu:
    """An update whose bytes are said to lie on a GPU; host memory is there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, update: Update) -> None:
        self.waited: list[int] = []
        monkeypatch.setattr(update, "_cuda", 3)
        monkeypatch.setattr(torch.cuda, "synchronize", self.waited.append)


def test_a_gpus_memory_is_shown_to_pytorch_and_dlpack_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with published({"w": MATRIX}) as update:
        OnAGpu(monkeypatch, update)
        view = update["w"]
        assert update.device == "cuda:3"
        assert view.__dlpack_device__() == (2, 3)
        with pytest.raises(UnsupportedError, match="w lies in a GPU's memory and cannot be bytes"):
            _ = view.bytes
        with pytest.raises(UnsupportedError, match="cannot be a NumPy array"):
            view.numpy()
        assert not update._lent
        update.refuse()


@pytest.mark.parametrize(
    ("take", "waits"),
    [
        pytest.param(lambda view: None, 0, id="nothing"),
        pytest.param(lambda view: view.__dlpack__(), 1, id="dlpack"),
        pytest.param(lambda view: view.torch(), 1, id="torch"),
    ],
)
def test_work_on_the_gpu_is_waited_for_before_the_memory_may_go_trap_19(
    monkeypatch: pytest.MonkeyPatch, take: Callable[[View], Any], waits: int
) -> None:
    with published({"w": MATRIX}) as update:
        kept = take(update["w"])
        gpu = OnAGpu(monkeypatch, update)
        update.accept()
        assert gpu.waited == [3] * waits
        update.close()
        assert gpu.waited == [3, 3] * waits
        assert not isinstance(kept, torch.Tensor) or kept.numel() == 0


def test_work_on_what_dlpack_gave_of_a_gpu_is_waited_for_too_trap_19(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with published({"w": MATRIX}) as update:
        gpu = OnAGpu(monkeypatch, update)
        update["w"].__dlpack__()
        update.accept()
        assert gpu.waited == [3]


def test_device_memory_is_described_to_pytorch_as_bytes() -> None:
    owner = object()
    raw = _CudaBytes(4096, 24, owner)
    described = raw.__cuda_array_interface__
    assert described["data"] == (4096, False)
    assert (described["shape"], described["typestr"]) == ((24,), "|u1")
    assert raw._owner is owner


def test_the_gpu_is_found_by_its_uuid_and_not_by_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Properties:
        def __init__(self, number: int) -> None:
            self.uuid = f"1234-{number}"

    class Info:
        uuid = "GPU-1234-2"

    class Named:
        info = Info

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", Properties)
    assert _cuda_number(Named) == 2
    Info.uuid = "GPU-99"
    with pytest.raises(StateError, match="does not see the GPU 99"):
        _cuda_number(Named)


@pytest.mark.parametrize("ended", [False, True])
def test_a_close_that_ctrl_c_cut_short_neither_blocks_nor_ends_the_next_update_trap_12(
    monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    real = lib.refit_update_close

    def close_and_raise(pointer: int) -> None:
        if ended:
            real(pointer)
        raise KeyboardInterrupt

    def take_two() -> None:
        first = subscriber.next(PATIENCE)
        first.accept()
        with monkeypatch.context() as patch:
            patch.setattr(lib, "refit_update_close", close_and_raise)
            with pytest.raises(KeyboardInterrupt):
                first.close()
        with subscriber.next(PATIENCE) as second:
            for call in (first.views().__next__, first.refuse, first.accept):
                with pytest.raises(StateError, match="version 1 is closed"):
                    call()
            first.close()
            seen.append(second["w"].numpy().tolist())

    seen: list[Any] = []
    with both() as (publisher, subscriber):
        worker = threading.Thread(target=take_two)
        worker.start()
        publisher.publish({"w": MATRIX})
        publisher.publish({"w": MATRIX})
        worker.join()
    assert seen == [MATRIX.tolist()]
