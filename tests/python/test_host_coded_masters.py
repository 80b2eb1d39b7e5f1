"""fp32 masters of bf16 weights with states="host": half of their bytes travel, and every bit of
weights, masters and states is that of a run without refit. What reads or writes masters, and what
changes their weights, between steps; failures at every call; and the end in every state."""

import copy
import gc
import io
import pickle
import random
import signal
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import refit.window  # noqa: E402
import training  # noqa: E402
from refit.controller import Controller  # noqa: E402
from refit.errors import CopyError, CorruptError, DeviceMemoryError, StateError  # noqa: E402
from refit.home import Home  # noqa: E402
from refit.host_states import _without_shared  # noqa: E402
from refit.storage_swap import users_of  # noqa: E402
from refit.windowed_step import WindowedStep  # noqa: E402
from test_host_failures import FailingCall  # noqa: E402
from test_host_masters import (  # noqa: E402
    BOTH,
    SIZES,
    _distributed,
    _float16,
    _give_gradients,
    _held,
    _same,
    _step,
)
from test_interrupting_code import MOST, Handler  # noqa: E402

pytestmark = pytest.mark.usefixtures("default_device")

HOST = {"states": "host", "window_bytes": "608KiB", "windows": 2}
WHOLE = [4 * size for size in SIZES]
ON_HOST = [0, 0, 4 * 7, 0]
OVERLAID = {
    "_copy_main_params_to_model_params",
    "_copy_model_params_to_main_params",
    "load_state_dict",
}
"""Methods of Megatron's optimizers that a controller stands before."""
UNIT = 1 << 18
"""Elements of masters that travel together."""


class Model(torch.nn.Module):
    """Weights in two modules; a load may begin at either."""

    def __init__(self, weights: list[Any]) -> None:
        super().__init__()
        self.first = torch.nn.ParameterList(weights[:2])
        self.second = torch.nn.ParameterList(weights[2:])


def _trained(make: Any = _distributed, steps: int = 2, **options: Any) -> Any:
    """A run without refit and one with it, both some steps old, and its controller."""
    plain, ours = make(), make()
    models = Model(plain[1]), Model(ours[1])
    controller = Controller(ours[0], models[1], **{**HOST, **options})
    assert controller._host is not None
    assert [one.is_coded for one in controller._host._kept.values()] == [False, True, True]
    for seed in range(steps):
        _step(plain[0], plain[2], seed)
        _step(ours[0], ours[2], seed)
    return plain, ours, models, controller


def _goes_on(plain: Any, ours: Any) -> None:
    """Both take two steps, and end alike."""
    for seed in (5, 6):
        _step(plain[0], plain[2], seed)
        _step(ours[0], ours[2], seed)
        assert all(map(torch.equal, ours[1], plain[1]))
    _same(ours, plain)


def _moved(controller: Controller) -> tuple[float, float]:
    controller._host.settle()  # type: ignore[union-attr]
    stats = controller.stats()
    return stats["refit/step_in_bytes"], stats["refit/step_out_bytes"]


# ---- The bytes.


@pytest.mark.parametrize("make", [_distributed, _float16])
@pytest.mark.parametrize("states", ["cycle", "host"])
def test_twelve_bytes_a_parameter_are_ten_in_both_schedules(make: Any, states: Any) -> None:
    sizes = [700_000, 5000]
    moved = {}
    for masters in ("auto", "whole"):
        plain, ours = make(sizes), make(sizes)
        config = {"window_bytes": "4MiB"} if states == "host" else {}
        with Controller(ours[0], states=states, offload_masters=masters, **config) as controller:
            for seed in range(3):
                _step(plain[0], plain[2], seed)
                _step(ours[0], ours[2], seed)
                assert all(map(torch.equal, ours[1], plain[1]))
                if states == "cycle":
                    for one in ours[2]:
                        one.grad = None
                    controller.clear()
                    controller.prepare_for_training()
            if states == "host":
                into, out = _moved(controller)
                assert into == out
                assert controller.resident == []
            else:
                out = controller.stats()["refit/offload_bytes"]
            moved[masters] = out / sum(sizes)
        _same(ours, plain)
    print(f"{make.__name__}, {states}: bytes a parameter {moved}")
    assert moved["whole"] == 12
    assert 10 < moved["auto"] < 10.05


def test_large_masters_are_stepped_in_parts_of_whole_units() -> None:
    plain, ours = _distributed([2 * UNIT + 999, 5000]), _distributed([2 * UNIT + 999, 5000])
    with Controller(ours[0], states="host", window_bytes="4MiB", windows=2) as controller:
        for seed in range(4):
            _step(plain[0], plain[2], seed)
            _step(ours[0], ours[2], seed)
        host: Any = controller._host
        (entries,) = host._last.values()
        found = [(one.first, one.count) for one in entries if one.count is not None]
        assert found == [(0, UNIT), (UNIT, UNIT), (2 * UNIT, 999)]
        assert controller.stats()["refit/window_bytes"] <= (2 * 4 + 2 * 1.1) * 2**20
    _same(ours, plain)


def test_the_image_has_half_of_the_masters() -> None:
    _, ours, _, controller = _trained(steps=0)
    with controller:
        halves = 2 * (SIZES[1] + SIZES[3])
        whole = 12 * sum(size for size in SIZES if size > 128)
        assert whole - halves < controller._host.nbytes < whole - 0.9 * halves
        assert f"host_bytes={controller._host.nbytes}" in repr(controller)
    assert _held(ours[2]) == WHOLE


def test_masters_that_share_weights_travel_whole() -> None:
    def make() -> Any:
        made = _float16([5000, 5000, 5000])
        made[0].float16_groups[0][1] = made[1][0]
        return made

    plain, ours = make(), make()
    with Controller(ours[0], **HOST) as controller:
        kept = controller._host._kept.values()
        assert [one.is_coded for one in kept] == [False, False, True]
        for seed in range(3):
            _step(plain[0], plain[2], seed)
            _step(ours[0], ours[2], seed)
            assert all(map(torch.equal, ours[1], plain[1]))
    _same(ours, plain)
    assert _without_shared([8, 0, 16, 40, 44, 60], [64, 9, 8, 16, 8, 4]) == [0, 0, 0, 0, 0, 60]
    assert _without_shared([8, 16, 24], [16, 16, 16]) == [8, 16, 24]


# ---- Masters that are used.


@BOTH
def test_masters_are_read_written_and_saved_between_steps(make: Any) -> None:
    plain, ours, _, controller = _trained(make)
    with controller:
        for seed in range(3):
            saved = [copy.deepcopy(one) for one in ours[2]]
            assert all(map(torch.equal, saved, plain[2]))
            controller.clear()
            assert _held(ours[2]) == [0] * 4
            controller.restore()
            for one in (ours, plain):
                one[2][seed].mul_(1.25)
            _step(plain[0], plain[2], seed)
            _step(ours[0], ours[2], seed)
            for one in (ours, plain):
                for master, before in zip(one[2], saved, strict=True):
                    master.copy_(before)
                one[0]._copy_main_params_to_model_params()
            _goes_on(plain, ours)
    _goes_on(plain, ours)


def test_masters_whose_weights_are_no_rounding_go_whole_until_a_step_rounds_them() -> None:
    plain, ours, _, controller = _trained(steps=3)
    with controller:
        before = _moved(controller)
        for one in (ours, plain):
            one[2][1].mul_(1.25)  # and its weights are as they were
        _step(plain[0], plain[2], 1)
        _step(ours[0], ours[2], 1)
        assert _moved(controller)[0] > before[0]  # from the host
        assert torch.equal(ours[2][1], plain[2][1])
        torch.manual_seed(0)
        spoiled = training.drawn(SIZES[1]).bfloat16()
        for one in (ours, plain):
            one[1][1].data.copy_(spoiled)  # while masters are on the device
        controller.clear()
        assert _held(ours[2]) == [0] * 4
        assert torch.equal(ours[2][1], plain[2][1])
        controller.restore()
        for seed in range(3, 8):
            _step(plain[0], plain[2], seed)
            _step(ours[0], ours[2], seed)
        assert _moved(controller) == (before[0], before[0])
    _goes_on(plain, ours)


VERBS = ["step"] * 4 + ["read", "write", "round", "cycle", "save", "load", "weights", "close"]


def test_a_step_that_is_skipped_moves_nothing() -> None:
    plain, ours, _, controller = _trained()
    with controller:
        _give_gradients(ours[2], 4)
        ours[0].zero_grad()
        ours[0].optimizer.found_inf = torch.ones(1)
        _step(ours[0], ours[2], 4)
        del ours[0].optimizer.found_inf
        assert _held(ours[2]) == ON_HOST
        assert all(map(torch.equal, ours[1], plain[1]))
        _goes_on(plain, ours)


@pytest.mark.parametrize("seed", range(6))
def test_any_sequence_ends_with_the_same_bits(seed: int) -> None:
    draw = random.Random(seed)
    plain, ours, models, controller = _trained(_float16 if seed % 2 else _distributed, steps=0)
    for _ in range(40):
        verb = draw.choice(VERBS)
        at = draw.randrange(4)
        if verb == "step":
            number = draw.randrange(100)
            _step(plain[0], plain[2], number)
            _step(ours[0], ours[2], number)
        elif verb == "read":
            assert torch.equal(ours[2][at], plain[2][at])
        elif verb == "cycle":
            with controller.refit():
                assert _held(ours[2]) == [0] * 4
            controller.restore(non_blocking=bool(at & 1))
        elif verb == "close":
            controller.close()
            controller = Controller(ours[0], models[1], **{**HOST, "windows": 1 + at})
        for one, model in zip((plain, ours), models, strict=True):
            if verb == "write":
                one[2][at].mul_(0.75)
            elif verb == "round":
                one[0]._copy_main_params_to_model_params()
            elif verb == "save":
                model.saved = copy.deepcopy((model.state_dict(), one[0].optimizer.state_dict()))
                model.masters = copy.deepcopy(one[2])
            elif verb == "load" and hasattr(model, "saved"):
                model.load_state_dict(model.saved[0])
                one[0].optimizer.load_state_dict(copy.deepcopy(model.saved[1]))
                for master, before in zip(one[2], model.masters, strict=True):
                    master.detach().copy_(before.detach())
            elif verb == "weights":
                model.load_state_dict({k: v * 1.5 for k, v in model.state_dict().items()})
                if at & 1:
                    one[0].reload_model_params()
        assert all(map(torch.equal, ours[1], plain[1])), verb
    controller.close()
    _goes_on(plain, ours)


# ---- Weights that change.


@BOTH
def test_a_load_of_the_model_brings_masters_to_the_device_before(make: Any) -> None:
    plain, ours, models, controller = _trained(make)
    with controller:
        assert _held(ours[2]) == ON_HOST
        state = {key: value * 1.5 for key, value in models[0].state_dict().items()}
        for model in models:
            model.load_state_dict(state)
        assert _held(ours[2]) == WHOLE
        assert all(map(torch.equal, ours[2], plain[2]))
        for one in (plain, ours):
            one[0].reload_model_params()
        _goes_on(plain, ours)
        part = {key: value * 0.5 for key, value in models[0].second.state_dict().items()}
        for model in models:
            model.second.load_state_dict(part)
        _goes_on(plain, ours)
    assert not any(one._load_state_dict_pre_hooks for one in models[1].modules())


def test_copies_of_the_model_know_nothing_of_the_controller() -> None:
    _, ours, models, controller = _trained()
    with controller:
        written = io.BytesIO()
        torch.save(models[1], written)
        written.seek(0)
        copies = [
            copy.deepcopy(models[1]),
            pickle.loads(pickle.dumps(models[1])),
            torch.load(written, weights_only=False),
        ]
        assert b"refit" not in pickle.dumps(models[1]).replace(b"test_host_coded_masters", b"")
        for one in copies:
            one.load_state_dict(models[1].state_dict())
        assert _held(ours[2]) == ON_HOST


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_of_the_optimizer_are_loaded_and_rounded_by_themselves(copied: Any) -> None:
    plain, ours, _, controller = _trained(_float16)
    with controller:
        other = copied(ours[0])
        (masters,) = other.fp32_from_float16_groups
        (weights,) = other.float16_groups
        assert _held(masters) == WHOLE
        for one in (copied(other), other):
            zeros = [[torch.zeros_like(master) for master in masters]]
            saved = {"optimizer": one.optimizer.state_dict(), "fp32_from_fp16_params": zeros}
            one.load_state_dict(saved)
        assert not any(bool(one.any()) for one in masters)
        other._copy_main_params_to_model_params()
        assert not any(bool(one.any()) for one in weights)
        _goes_on(plain, ours)
    assert not vars(ours[0]).keys() & OVERLAID


def test_weights_are_held_only_while_copies_read_them() -> None:
    plain, ours, _, controller = _trained(_float16)

    def users() -> list[int]:
        return [users_of(one.untyped_storage()) for one in ours[1]]

    with controller:
        controller.clear()
        least = users()
        controller.restore()
        assert torch.equal(ours[2][1], plain[2][1])
        assert users() == least
        with controller.checkpoint():
            assert users() == least
        _goes_on(plain, ours)


@BOTH
@pytest.mark.parametrize("leaves", [False, True])
def test_masters_that_were_written_and_get_no_gradient_are_rounded(make: Any, leaves: bool) -> None:
    plain, ours, _, controller = _trained(make)
    with controller:
        for one in (plain, ours):
            one[2][3].mul_(1.25)
        if leaves:
            controller.clear()
            controller.restore()
        for seed in (1, 1):  # which gives that one no gradient
            _step(plain[0], plain[2], seed)
            _step(ours[0], ours[2], seed)
            assert all(map(torch.equal, ours[1], plain[1]))
            assert _held(ours[2]) == ON_HOST
        _goes_on(plain, ours)


@BOTH
def test_weights_that_were_changed_unseen_lose_nothing(make: Any) -> None:
    plain, ours, _, controller = _trained(make)
    with controller:
        kept = ours[1][1].detach().clone()
        ours[1][1].data.view(-1)[7] += 1
        for _ in range(2):
            with pytest.raises(CorruptError, match="put weights that were changed back"):
                ours[2][1].sum()
            assert _held(ours[2]) == ON_HOST
        with pytest.raises(CorruptError, match=r"put weights that were changed back.*resume_step"):
            _step(ours[0], ours[2], 2)
        with pytest.raises(CorruptError, match="put weights that were changed back"):
            controller.close()
        ours[1][1].data.copy_(kept)
        assert float(ours[2][1].sum()) == float(plain[2][1].sum())
        controller.resume_step()
        _step(plain[0], plain[2], 2)
        _goes_on(plain, ours)


def test_weights_that_were_changed_are_found_before_anything_is_stepped() -> None:
    plain, ours = _distributed([50_000, 5000]), _distributed([50_000, 5000])
    with Controller(ours[0], **HOST) as controller:
        for seed in range(3):
            _step(plain[0], plain[2], seed)
            if seed == 2:
                ours[1][0].data.mul_(2)
                with pytest.raises(CorruptError, match=r"put weights.*no parameter was step"):
                    _step(ours[0], ours[2], seed)
                controller.resume_step()  # nothing is left of it
                ours[1][0].data.mul_(0.5)
            _step(ours[0], ours[2], seed)
    _same(ours, plain)


def test_weights_that_were_changed_are_found_in_a_late_window_and_the_step_is_resumed() -> None:
    plain, ours, _, controller = _trained(windows=1)
    with controller:
        kept = ours[1][3].detach().clone()
        ours[1][3].data.mul_(2)
        _give_gradients(ours[2], 5)
        with pytest.raises(CorruptError, match="put weights that were changed back") as caught:
            ours[0].step_with_ready_grads()
        stepped: Any = getattr(caught.value, "stepped", None)
        assert 0 < len(stepped) < 4
        with pytest.raises(CorruptError):
            controller.resume_step()
        ours[1][3].data.copy_(kept)
        controller.resume_step()
        _step(plain[0], plain[2], 5)
        assert all(map(torch.equal, ours[1], plain[1]))
        _goes_on(plain, ours)


@BOTH
def test_reload_model_params_makes_masters_of_weights_that_were_changed(make: Any) -> None:
    plain, ours, _, controller = _trained(make)
    with controller:
        for one in (plain, ours):
            one[1][1].data.mul_(1.5)
        with pytest.raises(CorruptError, match="reload_model_params"):
            ours[2][1].sum()
        for one in (plain, ours):
            one[0].reload_model_params()
        assert all(map(torch.equal, ours[2], plain[2]))
        _goes_on(plain, ours)
    assert not vars(ours[0]).keys() & OVERLAID


def test_a_load_of_the_optimizer_needs_no_masters_of_weights_that_were_changed() -> None:
    plain, ours, _, controller = _trained(_float16)
    with controller:
        saved = [copy.deepcopy(one[0].optimizer.state_dict()) for one in (plain, ours)]
        masters = [copy.deepcopy(one[2]) for one in (plain, ours)]
        for one, state, before in zip((plain, ours), saved, masters, strict=True):
            _step(one[0], one[2], 3)
            one[1][1].data.mul_(1.5)
            groups = [[master.detach() for master in before]]
            one[0].load_state_dict({"optimizer": state, "fp32_from_fp16_params": groups})
        _goes_on(plain, ours)


def test_only_masters_of_weights_that_were_changed_are_made_of_them() -> None:
    plain, ours, _, controller = _trained()
    with controller:
        ours[1][1].data.mul_(1.5)
        controller._host._masters._give_up()
        assert torch.equal(ours[2][1], ours[1][1].float())
        assert torch.equal(ours[2][3], plain[2][3])
        assert torch.equal(ours[2][0], plain[2][0])


def test_weights_may_lie_elsewhere_and_be_away_between_steps() -> None:
    plain, ours, _, controller = _trained(_float16)
    with controller:
        for seed in range(3):
            for one in ours[1]:
                one.data = one.data.clone()
            gc.collect()
            _step(plain[0], plain[2], seed)
            _step(ours[0], ours[2], seed)
            for one in ours[1]:
                one.data = one.data.clone()
            if seed == 1:
                assert torch.equal(ours[2][1], plain[2][1])
        controller.clear()
        kept = [one.detach().clone() for one in ours[1]]
        for one in ours[1]:
            one.untyped_storage().resize_(0)
        with pytest.raises(StateError, match="bring the weights back first"):
            ours[2][1].sum()
        with pytest.raises(StateError, match="bring the weights back first"):
            _step(ours[0], ours[2], 4)
        for one, value in zip(ours[1], kept, strict=True):
            one.untyped_storage().resize_(value.nbytes)
            one.data.copy_(value)
        controller.restore()
        _goes_on(plain, ours)


def test_masters_leave_while_their_weights_are_away() -> None:
    plain, ours, _, controller = _trained(_float16)
    with controller:
        for one in (plain, ours):
            one[2][1].mul_(1.25)
        kept = [one.detach().clone() for one in ours[1]]
        for one in ours[1]:
            one.untyped_storage().resize_(0)
        for _ in range(2):
            controller.clear()
            assert _held(ours[2]) == [0] * 4
            controller.restore()
        assert torch.equal(ours[2][1], plain[2][1])
        controller.clear()
        for one, value in zip(ours[1], kept, strict=True):
            one.untyped_storage().resize_(value.nbytes)
            one.data.copy_(value)
        controller.restore()
        assert torch.equal(ours[2][3], plain[2][3])
        _goes_on(plain, ours)


def test_weights_of_another_type_are_refused_and_can_be_put_back() -> None:
    plain, ours, _, controller = _trained(_float16)
    with controller:
        kept = ours[1][1].data
        ours[1][1].data = kept.float()
        with pytest.raises(StateError, match="of bfloat16 in a row"):
            ours[2][1].sum()
        with pytest.raises(StateError, match="of bfloat16 in a row"):
            _step(ours[0], ours[2], 4)
        ours[1][1].data = kept
        _goes_on(plain, ours)


def test_masters_that_got_memory_of_others_are_refused_before_anything_leaves() -> None:
    plain, ours, _, controller = _trained()
    with controller:
        before = ours[2][1].detach().clone()  # brings all to the device
        both = torch.cat([before, before])
        ours[2][1].data = both[: SIZES[1]]
        with pytest.raises(StateError, match="memory that is not its own"):
            _step(ours[0], ours[2], 4)
        assert torch.equal(both, torch.cat([before, before]))
        ours[2][1].data = before
        _goes_on(plain, ours)


# ---- Failures.

ERRORS = pytest.mark.parametrize(
    "error", [CopyError("the copy failed"), KeyboardInterrupt()], ids=["copy", "Ctrl-C"]
)


@ERRORS
@pytest.mark.parametrize("verb", ["use", "leave", "close"])
def test_every_call_of_the_library_may_fail_once_outside_a_step(
    monkeypatch: pytest.MonkeyPatch, verb: str, error: BaseException
) -> None:
    failed = 0
    for at in range(1, 60):
        plain, ours, _, controller = _trained(steps=1)
        if verb == "leave":
            assert torch.equal(ours[2][1], plain[2][1])
        act = {
            "use": lambda one=ours: one[2][1].sum(),
            "leave": controller.clear,
            "close": controller.close,
        }[verb]
        failing = FailingCall(at, copy.copy(error), behind=isinstance(error, KeyboardInterrupt))
        with monkeypatch.context() as patched:
            patched.setattr(refit.window, "call", failing)
            try:
                act()
            except (CopyError, KeyboardInterrupt):
                failed += 1
        act()
        if verb == "leave":
            assert _held(ours[2]) == [0] * 4
            controller.restore()
        else:
            assert torch.equal(ours[2][1], plain[2][1])
        if verb != "close":
            _goes_on(plain, ours)
            controller.close()
        _goes_on(plain, ours)
        if failing.count < at:
            break
    else:
        pytest.fail("it never ends")
    assert failed > 4


@pytest.mark.parametrize("verb", ["use", "leave", "load", "close"])
def test_ctrl_c_before_any_line_outside_a_step(verb: str) -> None:
    def press() -> None:
        handler = signal.getsignal(signal.SIGINT)
        assert callable(handler)
        handler(signal.SIGINT, None)  # raises, or notes it for the end of a block that holds it

    broken = 0
    for at in range(1, MOST, 23):
        plain, ours, models, controller = _trained(steps=1)
        if verb == "leave":
            assert torch.equal(ours[2][1], plain[2][1])
        state = copy.deepcopy(models[0].state_dict())
        act = {
            "use": lambda one=ours: one[2][1].sum(),
            "leave": controller.clear,
            "load": lambda two=models, state=state: two[1].load_state_dict(state),
            "close": controller.close,
        }[verb]
        handler = Handler(press, at)
        try:
            with handler:
                act()
        except KeyboardInterrupt:
            broken += 1
        act()
        if verb == "leave":
            assert _held(ours[2]) == [0] * 4
            controller.restore()
        assert torch.equal(ours[2][1], plain[2][1])
        _goes_on(plain, ours)
        if verb != "close":
            controller.close()
            _goes_on(plain, ours)
        if not handler.done:
            break
    else:
        pytest.fail("it never ends")
    assert broken > 5


def test_a_write_behind_a_departure_that_failed_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, ours, _, controller = _trained()
    with controller:
        for one in (plain, ours):
            one[2][1].mul_(1.5)
        with monkeypatch.context() as patched:
            patched.setattr(Home, "done", _fails_behind(Home.done))
            with pytest.raises(CopyError):
                controller.clear()
        for one in (plain, ours):
            one[2][1].mul_(1.5)
        controller.clear()
        controller.restore()
        _goes_on(plain, ours)


def _fails_behind(original: Any) -> Any:
    def done(*given: Any) -> None:
        original(*given)
        raise CopyError("the copy failed")

    return done


def test_masters_that_are_used_while_a_step_is_broken_off_keep_what_it_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for when in (2, 3):
        plain, ours, _, controller = _trained()
        with controller:
            _give_gradients(ours[2], 5)
            count, original = [0], Home.done

            def breaks(*given: Any, when=when, count=count, original=original) -> None:
                count[0] += 1
                if count[0] == when:
                    raise CopyError("the copy failed")
                original(*given)

            with monkeypatch.context() as patched:
                patched.setattr(Home, "done", breaks)
                with pytest.raises(CopyError) as caught:
                    ours[0].step_with_ready_grads()
            assert "resume_step" in str(caught.value)
            assert float(ours[2][1].sum()) != 0
            assert _held(ours[2]) == WHOLE
            controller.resume_step()
            assert _held(ours[2]) == ON_HOST
            _step(plain[0], plain[2], 5)
            _goes_on(plain, ours)


@pytest.mark.parametrize("use", [True, False])
def test_a_window_that_could_not_be_rounded_is_before_a_master_is_used(
    monkeypatch: pytest.MonkeyPatch, use: bool
) -> None:
    plain, ours, _, controller = _trained()
    with controller:
        _give_gradients(ours[2], 5)

        def breaks(*_: Any) -> None:
            raise RuntimeError("an illegal memory access")

        with monkeypatch.context() as patched:
            patched.setattr(WindowedStep, "_round", breaks)
            with pytest.raises(RuntimeError, match="illegal"):  # and again as it is unwound
                ours[0].step_with_ready_grads()
        if use:
            assert float(ours[2][1].sum()) != 0
        controller.resume_step()
        _step(plain[0], plain[2], 5)
        assert all(map(torch.equal, ours[1], plain[1]))
        _goes_on(plain, ours)


def test_without_memory_for_a_window_masters_stay_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, ours, _, controller = _trained()
    with controller:
        with monkeypatch.context() as patched:
            patched.setattr(Home, "_allocate", lambda *_: False)
            with pytest.raises(DeviceMemoryError, match="3 masters, which live on the host"):
                ours[2][1].sum()
            assert _held(ours[2]) == ON_HOST
        _goes_on(plain, ours)


# ---- The end.


def _let_go(last: list[Any]) -> None:
    last.clear()
    gc.collect()


@pytest.mark.parametrize("state", ["away", "home", "cleared", "broken"])
@pytest.mark.parametrize("end", ["close", "del"])
def test_the_end_in_every_state(state: str, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, ours, _, controller = _trained()
    if state == "home":
        ours[2][1].sum()
    elif state == "cleared":
        controller.clear()
    elif state == "broken":
        _give_gradients(ours[2], 5)
        with monkeypatch.context() as patched:
            patched.setattr(Home, "done", _fails_behind(Home.done))
            with pytest.raises(CopyError):
                ours[0].step_with_ready_grads()
        controller.resume_step()
        _step(plain[0], plain[2], 5)
    if end == "close":
        controller.close()
    del controller
    gc.collect()
    assert _held(ours[2]) == WHOLE
    assert not vars(ours[0]).keys() & OVERLAID
    _goes_on(plain, ours)


@pytest.mark.parametrize("stays", [False, True])
def test_a_controller_that_is_gone_leaves_masters_of_changed_weights_for_later(stays: bool) -> None:
    plain, ours, _, controller = _trained()
    kept = ours[1][1].detach().clone()
    for one in (ours, plain)[: 1 + stays]:
        one[1][1].data.mul_(2)
    last = [controller]
    del controller
    with pytest.warns(RuntimeWarning, match=r"let go of.*weights that were changed back"):
        _let_go(last)
    assert _held(ours[2]) == ON_HOST
    with pytest.raises(CorruptError, match="put weights that were changed back"):
        ours[2][3].sum()
    if stays:
        for one in (ours, plain):
            one[0].reload_model_params()
    else:
        ours[1][1].data.copy_(kept)
    assert torch.equal(ours[2][3], plain[2][3])
    assert not vars(ours[0]).keys() & OVERLAID
    _goes_on(plain, ours)
