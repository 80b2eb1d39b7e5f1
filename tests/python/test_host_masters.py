"""fp32 masters of Megatron-Core's own optimizers: with windows they live on the host, too, and
those of bf16 weights travel by half of their bytes; with a share the CPU steps them. Every bit is
that of a run without refit, whatever reads or writes masters or changes their weights between
steps, and whatever fails."""

import copy
import gc
import io
import pickle
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("megatron.core.optimizer", reason="megatron-core is not installed")

import refit  # noqa: E402
import refit.step.window  # noqa: E402
import training  # noqa: E402
from device_space import ROOM, ChangingSpace, Space  # noqa: E402
from failures import FailingCall, refuse_to_allocate  # noqa: E402
from interrupts import MOST, AtLine  # noqa: E402
from megatron.core.optimizer.optimizer import ChainedOptimizer  # noqa: E402
from megatron_scenes import SIZES, Mastered, Pair, distributed, float16  # noqa: E402
from refit.errors import CopyError, CorruptError, DeviceMemoryError, StateError  # noqa: E402
from refit.states.torch_memory import users_of  # noqa: E402
from refit.step.host_buffer import HostBuffer  # noqa: E402
from refit.step.host_masters import HostMasters  # noqa: E402
from refit.step.stand_in import Stepping  # noqa: E402
from schedules import BOTH, CYCLE, SHARE, Schedule  # noqa: E402

pytestmark = pytest.mark.usefixtures("default_device")

CODED = Schedule("by their weights", (refit.HostStates(windows=2, window_bytes="608KiB"),))
SMALL = Schedule(
    "the small by their weights", (refit.HostStates(windows=2, window_bytes="128KiB"),)
)
"""Windows are too small for a unit of the others."""
WHOLE = Schedule("whole", SMALL.parts, {"offload_masters": "whole"})
WINDOWED = (CODED, SMALL, WHOLE)
OF_CPU = (
    Schedule("all on the CPU", (refit.CpuStep(fraction=1.0),)),
    Schedule("half, at the step", (refit.CpuStep(fraction=0.5, overlap=False),)),
)
AWAY = [0] * 4
ON_DEVICE = [4 * size for size in SIZES]
ON_HOST = [0, 0, 4 * 7, 0]
"""Bytes that masters have on the device between steps in windows: the third is too small to go."""
CODES = {CODED.name: [1, 3], SMALL.name: [3], WHOLE.name: []}
"""Which masters travel by their weights."""
UNIT = 1 << 18
"""Elements of masters that travel together."""

BY_NAME: Any = {"ids": lambda one: one.name}
MAKES = pytest.mark.parametrize("make", [distributed, float16])
WAYS = pytest.mark.parametrize("way", WINDOWED, **BY_NAME)
ALL = pytest.mark.parametrize("way", [*WINDOWED, CYCLE, SHARE, BOTH, *OF_CPU], **BY_NAME)
ERRORS = pytest.mark.parametrize(
    "error", [CopyError("the copy failed"), KeyboardInterrupt()], ids=["copy", "Ctrl-C"]
)


def moved(pair: Pair) -> tuple[float, float]:
    """Bytes that the last step has moved to the device, and back."""
    pair.ours.optimizer.optimizer.state_dict()  # waits for it
    stats = pair.controller.stats()
    return stats["refit/step_in_bytes"], stats["refit/step_out_bytes"]


# ---- With every schedule.


@ALL
@MAKES
def test_training_is_the_same_to_the_bit(way: Schedule, make: Any) -> None:
    with Pair(way, make, steps=0) as pair:
        for seed in range(4):
            pair.step(seed)
            if way in WINDOWED:
                assert pair.ours.held() == ON_HOST
            with pair.controller.refit():
                assert pair.ours.held() == AWAY or way in (SHARE, BOTH, *OF_CPU)
            pair.controller.restore()
            if seed == 2:
                pair.assert_same()


@ALL
@MAKES
def test_masters_are_read_written_and_saved_between_steps(way: Schedule, make: Any) -> None:
    with Pair(way, make) as pair:
        for seed in range(3):
            saved = pair.ours.copies()
            assert all(map(torch.equal, saved, pair.plain.masters))
            pair.controller.offload()
            pair.controller.restore()
            for one in pair:
                one.masters[seed].mul_(1.25)
            pair.step(seed)
            for one in pair:
                for master, before in zip(one.masters, saved, strict=True):
                    master.copy_(before)
                one.round()
            pair.go_on()


@ALL
def test_what_megatron_saves_is_whole_and_loaded(way: Schedule) -> None:
    loaded = Pair(way, float16, steps=0)
    with Pair(way, float16) as pair, loaded:
        written = [copy.deepcopy(one.optimizer.state_dict()) for one in pair]
        for one, saved in zip(loaded, written, strict=True):
            one.optimizer.load_state_dict(saved)
            one.round()
        assert all(map(torch.equal, loaded.ours.masters, pair.plain.masters))
        loaded.go_on()


@MAKES
@pytest.mark.parametrize("way", [CYCLE, CODED], **BY_NAME)
def test_twelve_bytes_a_parameter_are_ten(make: Any, way: Schedule) -> None:
    sizes = [700_000, 5000]
    for masters, least, most in (("whole", 12, 12), ("auto", 10, 10.05)):
        window = {"window_bytes": "4MiB"} if way is CODED else {}
        with Pair(way, make, sizes, steps=3, offload_masters=masters, **window) as pair:
            if way is CYCLE:
                for one in pair.ours.masters:
                    one.grad = None
                pair.controller.offload()
                out = pair.controller.stats()["refit/offload_bytes"]
            else:
                into, out = moved(pair)
                assert into == out
                assert pair.controller.resident == []
            assert least <= out / sum(sizes) <= most


# ---- Where masters are with windows.


@WAYS
@MAKES
def test_masters_travel_as_a_step_tells(way: Schedule, make: Any) -> None:
    with Pair(way, make, steps=4) as pair:
        into, out = moved(pair)
        assert into == out
        whole = 3 * 4 * sum(size for size in SIZES if size > 128)
        coded = sum(SIZES[at] for at in CODES[way.name])
        assert 1.9 * coded <= whole - into <= 2 * coded
        pair.step(2)
        on_their_way = 2 * 4 * coded  # device memory of its own for either direction
        windows = 2 * int(way.parts[0].window_bytes.removesuffix("KiB")) << 10
        assert pair.controller.stats()["refit/window_bytes"] <= windows + on_their_way


@WAYS
@MAKES
def test_a_used_master_comes_back_and_leaves_in_the_next_step(way: Schedule, make: Any) -> None:
    with Pair(way, make) as pair:
        assert pair.ours.held() == ON_HOST
        assert torch.equal(pair.ours.masters[1], pair.plain.masters[1])
        assert pair.ours.held() == ON_DEVICE
        for one in pair:
            one.masters[1].mul_(1.5)  # as a framework loads a checkpoint
        for seed in (2, 3):
            pair.step(seed)
            assert pair.ours.held() == ON_HOST
        assert torch.equal(copy.deepcopy(pair.ours.masters[0]), pair.plain.masters[0])


@WAYS
@MAKES
def test_what_megatron_does_between_steps_needs_no_master(way: Schedule, make: Any) -> None:
    with Pair(way, make, steps=1) as pair:
        optimizer = pair.ours.optimizer
        pair.ours.give_gradients(0)
        optimizer.zero_grad()
        pair.ours.give_gradients(0)
        assert all(one.grad is not None for one in optimizer.get_parameters())
        saved = optimizer.state_dict()
        assert pair.ours.held() == ON_HOST
        kept = [one for group in saved.get("fp32_from_fp16_params", []) for one in group]
        assert all(bool(one.any()) for one in kept)
        assert pair.ours.held() == (ON_DEVICE if kept else ON_HOST)


@WAYS
@MAKES
def test_megatron_rounds_weights_that_refit_does_not(way: Schedule, make: Any) -> None:
    with Pair(way, make) as pair:
        for at in (0, 1):
            for one in pair:
                one.masters[at].fill_(2.0 + at)  # brings all of them to the device
                one.round()
            assert bool((pair.ours.weights[at] == 2.0 + at).all())
            pair.assert_same_weights()


@WAYS
def test_a_share_stays_with_its_masters_and_leaves_in_a_cycle(way: Schedule) -> None:
    with Pair(way, steps=0, resident_bytes=8 * 53_000) as pair:
        for seed in range(3):
            assert pair.ours.held()[:2] == ON_DEVICE[:2]
            assert pair.ours.held()[3] == 0
            pair.step(seed)
            pair.controller.offload()
            assert pair.ours.held() == AWAY
            pair.controller.restore(non_blocking=False)


@WAYS
@MAKES
def test_masters_stay_with_their_states_while_there_is_memory(way: Schedule, make: Any) -> None:
    with Space().patched() as space, Pair(way, make, resident_bytes="auto") as pair:
        for left, held in [(4 * ROOM, ON_DEVICE), (-ROOM, ON_HOST)] * 2:
            space.leave(left)
            for seed in (0, 1):  # of which the second gives one no gradient
                pair.step(seed)
                assert pair.ours.held() == held
            pair.controller.offload()
            assert pair.ours.held() == AWAY
            pair.controller.restore()
            if held == ON_DEVICE:
                for one in pair:
                    one.masters[3].mul_(1.25)
            pair.step(1)
            assert pair.ours.held() == held


@WAYS
@MAKES
@pytest.mark.parametrize("at", range(1, 6))
def test_masters_that_cannot_come_to_stay_do_not(way: Schedule, make: Any, at: int) -> None:
    with Space().patched() as space, Pair(way, make, resident_bytes="auto") as pair:
        space.leave(4 * ROOM)
        pair.ours.give_gradients(2)
        real = HostMasters.bring_back

        def failing(self: Any, found: Any = None) -> None:
            if found is None:
                return real(self)
            with FailingCall(at, CopyError("the copy failed")):
                return real(self, found)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HostMasters, "bring_back", failing)
            pair.step(2)  # is made all the same
        pair.step(3, 4)
        assert pair.ours.held() == ON_DEVICE


@WAYS
def test_masters_that_stay_make_room_for_a_window(
    way: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = HostBuffer._allocate
    margin = int(way.parts[0].window_bytes.removesuffix("KiB")) << 10

    def allocate(self: Any, size: int, count: int) -> bool:
        return pair.ours.held() == ON_HOST and real(self, size, count)

    with Space().patched() as space, Pair(way, resident_bytes="auto") as pair:
        space.leave(3 * 4 * SIZES[0], margin)
        pair.step(2)
        assert pair.ours.held() == [ON_DEVICE[0], *ON_HOST[1:]]
        for one in pair:
            one.masters[0].mul_(1.25)
        pair.step(3)
        for one in pair:
            one.masters[0].mul_(1.25)
        pair.ours.optimizer.optimizer.state_dict()  # gives the windows back
        space.leave(-ROOM)
        with monkeypatch.context() as patch:
            patch.setattr(HostBuffer, "_allocate", allocate)
            pair.step(4)
        assert pair.ours.held() == ON_HOST


@WAYS
def test_masters_that_are_rounded_elsewhere_stay_on_the_device(way: Schedule) -> None:
    made = distributed(reuse_grad_buf_for_mxfp8_param_ag=True)
    with way.open(made.optimizer) as controller:
        assert made.held() == ON_DEVICE
        made.give_gradients(3)
        made.optimizer.optimizer.step()
        controller.offload()
        assert made.held() == AWAY
        controller.restore(non_blocking=False)


@WAYS
def test_a_chain_of_both_and_the_end_of_its_controller(way: Schedule) -> None:
    plain, ours = [distributed(), float16()], [distributed(), float16()]
    for one in ours:
        one.optimizer.config = ours[0].optimizer.config
    controller = way.open(ChainedOptimizer([one.optimizer for one in ours]))
    for one in plain + ours:
        one.step(0), one.step(1)
    assert [one.held() for one in ours] == [ON_HOST] * 2
    del controller
    gc.collect()
    assert [one.held() for one in ours] == [ON_DEVICE] * 2
    for mine, other in zip(ours, plain, strict=True):
        assert all(map(torch.equal, mine.masters, other.masters))
        assert all(map(torch.equal, mine.weights, other.weights))


def test_large_masters_are_stepped_in_parts_of_whole_units() -> None:
    seen: set[tuple[int, int]] = set()
    call = refit.step.window.call

    def watched(function: Any, *arguments: Any) -> None:
        if function.__name__ == "refit_window_begin":
            seen.update((part.offset, part.bytes) for part in arguments[1])
        call(function, *arguments)

    sizes = [2 * UNIT + 999, 5000]
    with Pair(CODED, sizes=sizes, steps=3, window_bytes="4MiB") as pair:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(refit.step.window, "call", watched)
            pair.step(3)
        parts = [(0, 4 * UNIT), (4 * UNIT, 4 * UNIT), (8 * UNIT, 4 * 999), (0, 4 * 5000)]
        assert seen == set(parts)
        assert pair.controller.stats()["refit/window_bytes"] <= (2 * 4 + 2 * 1.1) * 2**20


def on_host(pair: Pair) -> int:
    return int(repr(pair.controller).split("host_bytes=")[1].rstrip(")"))


def test_the_image_has_half_of_the_masters() -> None:
    with Pair(CODED, steps=0) as pair:
        halves = 2 * (SIZES[1] + SIZES[3])
        whole = 12 * sum(size for size in SIZES if size > 128)
        assert whole - halves < on_host(pair) < whole - 0.9 * halves


@pytest.mark.parametrize("first", [0, 2500], ids=["the same weights", "some of the same"])
def test_masters_that_share_weights_travel_whole(first: int) -> None:
    def make(sizes: Any) -> Mastered:
        made = float16(sizes)
        data = torch.cat([one.detach().view(-1) for one in made.weights[:2]])
        made.weights[0].data = data[:5000].view(1, -1)
        made.weights[1].data = data[first : first + 5000]
        for master, weight in zip(made.masters, made.weights, strict=True):
            master.copy_(weight.detach().view_as(master))
        return made

    with Pair(CODED, make, [5000] * 3, steps=3) as pair:
        assert 0.9 * 10_000 < 12 * 15_000 - on_host(pair) < 10_000  # half of the third one


# ---- Masters that are written, and weights that are not rounded from them.


def test_masters_go_whole_until_a_step_rounds_their_weights() -> None:
    with Pair(CODED, steps=3) as pair:
        before = moved(pair)
        for one in pair:
            one.masters[1].mul_(1.25)  # and its weights are as they were
        pair.step(1)
        assert moved(pair)[0] > before[0]  # from the host
        assert torch.equal(pair.ours.masters[1], pair.plain.masters[1])
        torch.manual_seed(0)
        spoiled = training.drawn(SIZES[1]).bfloat16()
        for one in pair:
            one.weights[1].data.copy_(spoiled)  # while masters are on the device
        pair.controller.offload()
        assert pair.ours.held() == AWAY
        assert torch.equal(pair.ours.masters[1], pair.plain.masters[1])
        pair.controller.restore()
        pair.step(*range(3, 8))
        assert moved(pair) == (before[0], before[0])


def test_a_step_that_is_skipped_moves_nothing() -> None:
    with Pair(CODED) as pair:
        pair.ours.give_gradients(4)
        pair.ours.optimizer.zero_grad()
        pair.ours.optimizer.optimizer.found_inf = torch.ones(1)
        pair.ours.step(4)
        del pair.ours.optimizer.optimizer.found_inf
        assert pair.ours.held() == ON_HOST
        pair.assert_same_weights()


@MAKES
@pytest.mark.parametrize("leaves", [False, True])
def test_written_masters_without_a_gradient_are_rounded(make: Any, leaves: bool) -> None:
    with Pair(CODED, make) as pair:
        for one in pair:
            one.masters[3].mul_(1.25)
        if leaves:
            pair.controller.offload()
            pair.controller.restore()
        for _ in range(2):
            pair.step(1)  # which gives that one no gradient
            assert pair.ours.held() == ON_HOST


VERBS = ["step"] * 4 + ["read", "write", "round", "cycle", "save", "load", "weights", "close"]


@pytest.mark.parametrize("stay", [None, "auto"])
@pytest.mark.parametrize("seed", range(6))
def test_any_sequence_ends_with_the_same_bits(seed: int, stay: str | None) -> None:
    draw, share = random.Random(seed), {"resident_bytes": stay}
    make = float16 if seed % 2 else distributed
    with ChangingSpace(seed).patched(), Pair(CODED, make, steps=0, **share) as pair:
        saved: list[Any] = []
        for _ in range(40):
            verb, at = draw.choice(VERBS), draw.randrange(4)
            if verb == "step":
                pair.step(draw.randrange(100))
            elif verb == "read":
                assert torch.equal(pair.ours.masters[at], pair.plain.masters[at])
            elif verb == "cycle":
                with pair.controller.refit():
                    assert pair.ours.held() == AWAY
                pair.controller.restore(non_blocking=bool(at & 1))
            elif verb == "close":
                pair.controller.close()
                pair.controller = pair.open(CODED, windows=1 + at, **share)
            elif verb == "save":
                saved = [one.saved() for one in pair]
            for number, one in enumerate(pair):
                if verb == "write":
                    one.masters[at].mul_(0.75)
                elif verb == "round":
                    one.round()
                elif verb == "load" and saved:
                    weights, states, masters = saved[number]
                    one.model.load_state_dict(weights)
                    one.optimizer.optimizer.load_state_dict(copy.deepcopy(states))
                    for master, before in zip(one.masters, masters, strict=True):
                        master.detach().copy_(before.detach())
                elif verb == "weights":
                    loaded = {k: v * 1.5 for k, v in one.model.state_dict().items()}
                    one.model.load_state_dict(loaded)
                    if at & 1:
                        one.optimizer.reload_model_params()
            pair.assert_same_weights()


# ---- Weights that change.


@MAKES
def test_a_load_of_the_model_brings_masters_to_the_device_before(make: Any) -> None:
    with Pair(CODED, make) as pair:
        assert pair.ours.held() == ON_HOST
        state = {key: value * 1.5 for key, value in pair.plain.model.state_dict().items()}
        for one in pair:
            one.model.load_state_dict(state)
        assert pair.ours.held() == ON_DEVICE
        assert all(map(torch.equal, pair.ours.masters, pair.plain.masters))
        for one in pair:
            one.optimizer.reload_model_params()
        pair.go_on()
        state = {k: value * 0.5 for k, value in pair.plain.model.second.state_dict().items()}
        for one in pair:
            one.model.second.load_state_dict(state)


def test_copies_of_the_model_know_nothing_of_the_controller() -> None:
    with Pair(CODED) as pair:
        model = pair.ours.model
        written = io.BytesIO()
        torch.save(model, written)
        written.seek(0)
        copies = [
            copy.deepcopy(model),
            pickle.loads(pickle.dumps(model)),
            torch.load(written, weights_only=False),
        ]
        assert b"refit" not in pickle.dumps(model)
        for one in copies:
            one.load_state_dict(model.state_dict())
        assert pair.ours.held() == ON_HOST


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_of_the_optimizer_are_loaded_by_themselves(copied: Any) -> None:
    with Pair(CODED, float16) as pair:
        other = copied(pair.ours.optimizer)
        (masters,), (weights,) = other.fp32_from_float16_groups, other.float16_groups
        assert [one.untyped_storage().nbytes() for one in masters] == ON_DEVICE
        for one in (copied(other), other):
            zeros = [[torch.zeros_like(master) for master in masters]]
            saved = {"optimizer": one.optimizer.state_dict(), "fp32_from_fp16_params": zeros}
            one.load_state_dict(saved)
        assert not any(bool(one.any()) for one in masters)
        other._copy_main_params_to_model_params()
        assert not any(bool(one.any()) for one in weights)


def test_weights_are_held_only_while_copies_read_them() -> None:
    with Pair(CODED, float16) as pair:

        def users() -> list[int]:
            return [users_of(one.untyped_storage()) for one in pair.ours.weights]

        pair.controller.offload()
        least = users()
        pair.controller.restore()
        assert torch.equal(pair.ours.masters[1], pair.plain.masters[1])
        assert users() == least
        with pair.controller.checkpoint():
            assert users() == least


PUT_BACK = "put weights that were changed back"


@MAKES
def test_weights_that_were_changed_unseen_lose_nothing(make: Any) -> None:
    with Pair(CODED, make) as pair:
        weight, master = pair.ours.weights[1], pair.ours.masters[1]
        kept = weight.detach().clone()
        weight.data.view(-1)[7] += 1
        for _ in range(2):
            with pytest.raises(CorruptError, match=PUT_BACK):
                master.sum()
            assert pair.ours.held() == ON_HOST
        with pytest.raises(CorruptError, match=rf"{PUT_BACK}.*resume_step"):
            pair.ours.step(2)
        with pytest.raises(CorruptError, match=PUT_BACK):
            pair.controller.close()
        weight.data.copy_(kept)
        assert torch.equal(master, pair.plain.masters[1])
        pair.controller.resume_step()
        pair.plain.step(2)


def test_changed_weights_are_found_before_anything_is_stepped() -> None:
    with Pair(CODED, sizes=[50_000, 5000]) as pair:
        pair.ours.weights[0].data.mul_(2)
        with pytest.raises(CorruptError, match=r"put weights.*no parameter was step"):
            pair.ours.step(2)
        pair.controller.resume_step()  # nothing is left of it
        pair.ours.weights[0].data.mul_(0.5)
        pair.step(2)


def test_changed_weights_are_found_in_a_late_window() -> None:
    with Pair(CODED, windows=1) as pair:
        kept = pair.ours.weights[3].detach().clone()
        pair.ours.weights[3].data.mul_(2)
        with pytest.raises(CorruptError, match=PUT_BACK) as caught:
            pair.ours.step(5)
        assert 0 < len(caught.value.stepped) < 4  # type: ignore[attr-defined]
        with pytest.raises(CorruptError):
            pair.controller.resume_step()
        pair.ours.weights[3].data.copy_(kept)
        pair.controller.resume_step()
        pair.plain.step(5)
        pair.assert_same_weights()


@MAKES
def test_reload_model_params_makes_masters_of_changed_weights(make: Any) -> None:
    with Pair(CODED, make) as pair:
        for one in pair:
            one.weights[1].data.mul_(1.5)
        with pytest.raises(CorruptError, match="reload_model_params"):
            pair.ours.masters[1].sum()
        for one in pair:
            one.optimizer.reload_model_params()
        assert all(map(torch.equal, pair.ours.masters, pair.plain.masters))


def test_a_load_of_the_optimizer_needs_no_masters() -> None:
    with Pair(CODED, float16) as pair:
        states = [copy.deepcopy(one.optimizer.optimizer.state_dict()) for one in pair]
        masters = [one.copies() for one in pair]
        for one, state, before in zip(pair, states, masters, strict=True):
            one.step(3)
            one.weights[1].data.mul_(1.5)
            groups = [[master.detach() for master in before]]
            one.optimizer.load_state_dict({"optimizer": state, "fp32_from_fp16_params": groups})


def test_only_masters_of_changed_weights_are_made_of_them() -> None:
    def make(sizes: Any) -> Mastered:
        made = distributed(sizes)
        kind = type(made.optimizer)
        idle = {"load_state_dict": lambda *_: None}  # which leaves masters as they are
        made.optimizer.__class__ = type("Idle", (kind,), idle)
        return made

    pair = Pair(CODED, make)
    with pair.controller:
        pair.ours.weights[1].data.mul_(1.5)
        pair.ours.optimizer.load_state_dict({})
        assert torch.equal(pair.ours.masters[1], pair.ours.weights[1].float())
        for at in (0, 2, 3):
            assert torch.equal(pair.ours.masters[at], pair.plain.masters[at])


def leave(pair: Pair) -> Callable[[], None]:
    """The memory of the weights is given back. What brings them back."""
    kept = [one.detach().clone() for one in pair.ours.weights]
    for one in pair.ours.weights:
        one.untyped_storage().resize_(0)

    def bring_back() -> None:
        for one, value in zip(pair.ours.weights, kept, strict=True):
            one.untyped_storage().resize_(value.nbytes)
            one.data.copy_(value)

    return bring_back


def test_weights_may_lie_elsewhere_and_be_away_between_steps() -> None:
    with Pair(CODED, float16) as pair:
        for seed in range(3):
            for _ in range(2):
                for one in pair.ours.weights:
                    one.data = one.data.clone()
                gc.collect()
            pair.step(seed)
            if seed == 1:
                assert torch.equal(pair.ours.masters[1], pair.plain.masters[1])
        pair.controller.offload()
        bring_back = leave(pair)
        for use in (pair.ours.masters[1].sum, lambda: pair.ours.step(4)):
            with pytest.raises(StateError, match="bring the weights back first"):
                use()
        bring_back()
        pair.controller.restore()


def test_masters_leave_while_their_weights_are_away() -> None:
    with Pair(CODED, float16) as pair:
        for one in pair:
            one.masters[1].mul_(1.25)
        bring_back = leave(pair)
        for _ in range(2):
            pair.controller.offload()
            assert pair.ours.held() == AWAY
            pair.controller.restore()
        assert torch.equal(pair.ours.masters[1], pair.plain.masters[1])
        pair.controller.offload()
        bring_back()
        pair.controller.restore()
        assert torch.equal(pair.ours.masters[3], pair.plain.masters[3])


def test_weights_of_another_type_are_refused_and_can_be_put_back() -> None:
    with Pair(CODED, float16) as pair:
        kept = pair.ours.weights[1].data
        pair.ours.weights[1].data = kept.float()
        for use in (pair.ours.masters[1].sum, lambda: pair.ours.step(4)):
            with pytest.raises(StateError, match="of bfloat16 in a row"):
                use()
        pair.ours.weights[1].data = kept


def test_masters_over_memory_of_others_are_refused() -> None:
    with Pair(CODED) as pair:
        before = pair.ours.masters[1].detach().clone()  # brings all to the device
        both = torch.cat([before, before])
        pair.ours.masters[1].data = both[: SIZES[1]]
        with pytest.raises(StateError, match="memory that is not its own"):
            pair.ours.step(4)
        assert torch.equal(both, torch.cat([before, before]))
        pair.ours.masters[1].data = before


# ---- Failures.


@WAYS
@ERRORS
@pytest.mark.parametrize("stride", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_every_call_of_the_library_may_fail_once_in_a_step(
    way: Schedule, error: BaseException, stride: int
) -> None:
    for at in range(1, 100, stride):
        with Pair(way, steps=1) as pair:
            after = isinstance(error, KeyboardInterrupt)
            told = None
            with FailingCall(at, error, after=after) as failing:
                try:
                    pair.ours.step(0)
                except (CopyError, KeyboardInterrupt) as why:
                    told = " ".join([str(why), *getattr(why, "__notes__", [])])
            if told is not None and "resume_step()" in told:
                pair.controller.resume_step()
            elif (
                told is not None
                and pair.ours.optimizer.optimizer.state[pair.ours.masters[2]]["step"] < 2
            ):
                pair.ours.optimizer.step_with_ready_grads()
            pair.plain.step(0)
            pair.assert_same_weights()
        if not failing.done:
            break
    assert 8 < at < 99


def use(pair: Pair) -> None:
    pair.ours.masters[1].sum()


def clear(pair: Pair) -> None:
    pair.controller.offload()
    assert pair.ours.held() == AWAY


def close(pair: Pair) -> None:
    pair.controller.close()


def load(pair: Pair) -> None:
    pair.ours.model.load_state_dict(pair.ours.model.state_dict())


def begun(act: Any) -> Pair:
    pair = Pair(CODED, steps=1)
    if act is clear:
        use(pair)
    return pair


@pytest.mark.parametrize("stride", [9, pytest.param(1, marks=pytest.mark.slow)])
@ERRORS
@pytest.mark.parametrize("act", [use, clear, close])
def test_every_call_of_the_library_may_fail_once_outside_a_step(
    act: Callable[[Pair], None], error: BaseException, stride: int
) -> None:
    failed = 0
    for at in range(1, 60, stride):
        with begun(act) as pair:
            after = isinstance(error, KeyboardInterrupt)
            with FailingCall(at, error, after=after) as failing:
                try:
                    act(pair)
                except (CopyError, KeyboardInterrupt):
                    failed += 1
            act(pair)
            pair.controller.restore() if act is clear else use(pair)
        if not failing.done:
            break
    assert failed > 4 // stride
    assert at < 59


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("act", [use, clear, load, close])
def test_ctrl_c_before_any_line_outside_a_step(act: Callable[[Pair], None], every: bool) -> None:
    broken = 0
    for at in range(1, MOST, 23 if every else 173):
        with begun(act) as pair:
            pressed = AtLine(at)
            try:
                with pressed:
                    act(pair)
            except KeyboardInterrupt:
                broken += 1
            act(pair)
            if act is clear:
                pair.controller.restore()
            use(pair)
        if not pressed.done:
            break
    assert not pressed.done
    assert broken > (20 if every else 4)


def fails_after(monkeypatch: pytest.MonkeyPatch, when: int = 1) -> None:
    """The given call of ``Home.done`` fails, and all after it, once they have done their work."""
    done = HostBuffer.done
    count: list[int] = []

    def failing(*given: Any) -> None:
        done(*given)
        count.append(1)
        if len(count) >= when:
            raise CopyError("the copy failed")

    monkeypatch.setattr(HostBuffer, "done", failing)


def test_a_write_after_a_failed_departure_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with Pair(CODED) as pair:
        for one in pair:
            one.masters[1].mul_(1.5)
        with monkeypatch.context() as patch:
            fails_after(patch)
            with pytest.raises(CopyError):
                pair.controller.offload()
        for one in pair:
            one.masters[1].mul_(1.5)
        pair.controller.offload()
        pair.controller.restore()


@pytest.mark.parametrize("when", [1, 2])
def test_masters_used_in_a_broken_step_keep_what_it_made(
    monkeypatch: pytest.MonkeyPatch, when: int
) -> None:
    with Pair(CODED) as pair:
        with monkeypatch.context() as patch:
            fails_after(patch, when)
            with pytest.raises(CopyError, match="resume_step"):
                pair.ours.step(5)
        use(pair)
        assert pair.ours.held() == ON_DEVICE
        pair.controller.resume_step()
        assert pair.ours.held() == ON_HOST
        pair.plain.step(5)


@WAYS
@pytest.mark.parametrize("used", [False, True], ids=["resumed", "used first"])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_step_broken_off_while_it_rounds_is_resumed(
    way: Schedule, at: int, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow, left = torch.Tensor.narrow, at

    def breaks(*given: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0 or (used and left < 0):  # as it is unwound
            raise RuntimeError("an illegal memory access")
        return narrow(*given)

    with Pair(way, steps=1) as pair:
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "narrow", breaks)
            with pytest.raises(RuntimeError, match="illegal"):
                pair.ours.step(2)
        if used:
            use(pair)
        pair.controller.resume_step()
        pair.plain.step(2)
        pair.assert_same_weights()


@WAYS
def test_code_that_fails_before_it_changes_a_master_runs_again(
    way: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Pair(way, steps=1) as pair:
        with monkeypatch.context() as patch:
            patch.setattr(Stepping, "run_on", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                pair.ours.step(2)
        pair.controller.resume_step()
        pair.step(2)


@WAYS
@pytest.mark.parametrize("lacks", ["a window", "masters"])
def test_a_use_without_memory_for_masters_loses_nothing(
    way: Schedule, lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resize = torch.UntypedStorage.resize_

    def no_memory(storage: torch.UntypedStorage, nbytes: int) -> None:
        if nbytes:
            raise torch.OutOfMemoryError("none left")
        resize(storage, nbytes)

    with Pair(way) as pair:
        with monkeypatch.context() as patch:
            if lacks == "masters":
                patch.setattr(torch.UntypedStorage, "resize_", no_memory)
            elif way is not WHOLE:
                patch.setattr(torch, "empty", refuse_to_allocate(torch.OutOfMemoryError("none")))
            if lacks == "masters" or way is not WHOLE:  # those that travel whole need no window
                with pytest.raises(DeviceMemoryError, match="3 masters, which live on the host"):
                    use(pair)
        assert pair.ours.held() == ON_HOST


# ---- The end.


@pytest.mark.parametrize("state", ["away", "home", "cleared", "resumed"])
@pytest.mark.parametrize("end", ["close", "del"])
def test_the_end_in_every_state(state: str, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(CODED)
    if state == "home":
        use(pair)
    elif state == "cleared":
        pair.controller.offload()
    elif state == "resumed":
        with monkeypatch.context() as patch:
            fails_after(patch)
            with pytest.raises(CopyError):
                pair.ours.step(5)
        pair.controller.resume_step()
        pair.plain.step(5)
    if end == "close":
        pair.controller.close()
    let_go(pair)
    pair.assert_free()


def let_go(pair: Pair) -> None:
    del pair.controller
    gc.collect()


@pytest.mark.parametrize("stays", [False, True])
def test_a_dropped_controller_leaves_masters_of_changed_weights(stays: bool) -> None:
    pair = Pair(CODED)
    kept = pair.ours.weights[1].detach().clone()
    for one in list(pair)[1 - stays :]:
        one.weights[1].data.mul_(2)
    with pytest.warns(RuntimeWarning, match=rf"let go of.*{PUT_BACK[4:]}"):
        let_go(pair)
    assert pair.ours.held() == ON_HOST
    with pytest.raises(CorruptError, match=PUT_BACK):
        pair.ours.masters[3].sum()
    if stays:
        for one in pair:
            one.optimizer.reload_model_params()
    else:
        pair.ours.weights[1].data.copy_(kept)
    assert torch.equal(pair.ours.masters[3], pair.plain.masters[3])
    pair.assert_free()


def test_masters_whose_empty_memory_was_shared_are_refused() -> None:
    """Only code that took their storages before can do that. resize_() would end the process."""
    refused = pytest.raises(StateError, match="was shared or fixed by other code")
    with refused, Pair(WHOLE, float16, steps=2, offload_masters="whole") as pair:
        storages = [one.untyped_storage() for one in pair.ours.masters]
        pair.step()
        if all(one.nbytes() for one in storages) or storages[0].device.type != "cpu":
            pytest.skip("no master is away, or memory of a GPU is not moved")
        for one in storages:
            one.share_memory_()
        pair.step()
