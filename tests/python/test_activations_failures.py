"""Copies that fail and Ctrl-C, in the forward pass and in the backward pass, at every call and at
lines all over the code: a typed error or none, nothing else lost, and training goes on with the
bits of a run without refit."""

import gc
import itertools
import signal
import sys
import warnings
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from types import FrameType
from typing import Any

import pytest
import refit.activations.arena
import refit.activations.groups
import refit.activations.offload
import torch
import training
from activation_scenes import (
    Block,
    Net,
    batch,
    figures,
    gradients,
    is_hooked,
    left_bytes,
    loss_of,
    net,
    offloaded,
    same_bits,
    stepped,
    used_bytes,
)
from failures import FailingCall
from interrupts import AtLine, lines, press
from refit.errors import CopyError, DeadlineError, HostMemoryError

pytestmark = pytest.mark.usefixtures("default_device")

LAYERS = 4
ENDS = ("_join", "_wait")
"""A join that tells of copies that failed comes after their end: until then they use memory."""


@pytest.fixture(scope="module")
def expected(default_device: None) -> list[torch.Tensor]:
    return stepped(net(LAYERS))


def assert_as_ever(
    model: Net, activations: Any, block: Block, expected: list[torch.Tensor]
) -> None:
    """Nothing is kept of what failed; and steps have their bits, and leave."""
    if training.DEVICE == "cpu":  # a GPU's copies may be under way
        assert used_bytes(activations) == 0
    model.zero_grad()
    for _ in range(2):
        assert all(map(same_bits, stepped(model, block), expected))
    assert used_bytes(activations) == 0


@pytest.mark.parametrize(
    ("times", "aim"), [(1, "memory"), (2, "memory"), (500, "memory"), (1, "overlap")]
)
def test_every_call_of_the_library_may_fail(
    expected: list[torch.Tensor], times: int, aim: str
) -> None:
    """In the forward pass what should leave stays; in the backward pass an error names the layer,
    and the pass can be done again."""
    seen = set()
    for at in range(1, 100):
        model = net(LAYERS)
        with offloaded(model, aim=aim) as (activations, block):
            stepped(model, block)
            never = ("refit_activations_release",)
            error = CopyError("the link is down")
            failing = FailingCall(at, error, times=times, late=ENDS, never=never)
            with failing, warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                loss = loss_of(model, block)  # which never raises
                forward = failing.count
                raised: BaseException | None = None
                try:
                    loss.backward(retain_graph=True)
                except CopyError as why:
                    raised = why
                seen |= set(failing.failed)
                if raised is not None:
                    assert failing.count > forward
                    assert "layers." in str(raised)
                    assert "the link is down" in str(raised)
                    model.zero_grad()
            if raised is not None:  # the link is up again, and nothing is lost
                del raised
                loss.backward(retain_graph=True)
            assert all(map(same_bits, gradients(model), expected))
            loss.backward()
            assert all(map(same_bits, gradients(model), expected))
            del loss
            if failing.failed:
                gc.collect()  # exceptions hold frames
            assert_as_ever(model, activations, block, expected)
        if failing.count < at:
            break
    else:
        pytest.fail("a step never ends")
    assert {"refit_activations_begin", "refit_activations_commit"} <= seen
    assert "refit_activations_fetch" in seen or aim == "overlap"


@pytest.mark.parametrize("times", [1, 3])
def test_release_with_hung_copy_raises_and_training_goes_on(
    expected: list[torch.Tensor], times: int
) -> None:
    never = tuple(
        f"refit_activations_{one}" for one in ("begin", "add", "commit", "join", "wait", "fetch")
    )
    told = 0
    for at in range(1, 30):
        model = net(LAYERS)
        with offloaded(model) as (_, block):
            stepped(model, block)
            with FailingCall(
                at, DeadlineError("a copy hangs"), times=times, never=never
            ) as failing:
                for _ in range(4):
                    try:
                        assert all(map(same_bits, stepped(model, block), expected))
                    except DeadlineError:
                        model.zero_grad()
                        told += 1
            for _ in range(2):
                assert all(map(same_bits, stepped(model, block), expected))
        if failing.count < at:
            break
    assert told > 0


def test_what_fails_in_a_forward_pass_is_told_with_its_layer(
    monkeypatch: pytest.MonkeyPatch, expected: list[torch.Tensor]
) -> None:
    model = net(LAYERS)
    with offloaded(model) as (activations, block):
        commit = refit.activations.arena.Arena.commit

        def fails(self: Any, group: int, stream: int) -> None:
            if group == 2:
                raise CopyError("no more descriptors")
            commit(self, group, stream)

        monkeypatch.setattr(refit.activations.arena.Arena, "commit", fails)
        with pytest.warns(
            RuntimeWarning, match=r"layers\.1 stay on the device: no more descriptors"
        ):
            loss = loss_of(model, block)
        assert left_bytes(activations) > 0
        loss.backward()
        assert all(map(same_bits, gradients(model), expected))
        del loss
        assert_as_ever(model, activations, block, expected)


def test_backward_out_of_device_memory_raises_and_can_run_again(
    monkeypatch: pytest.MonkeyPatch, expected: list[torch.Tensor]
) -> None:
    real = torch.UntypedStorage
    for at in range(1, 60):
        model = net(LAYERS)
        count = itertools.count(1)

        def short(*arguments: Any, at: int = at, count: Any = count, **options: Any) -> Any:
            if next(count) == at:
                raise torch.OutOfMemoryError("no memory")
            return real(*arguments, **options)

        with offloaded(model) as (activations, block):
            loss = loss_of(model, block)
            with monkeypatch.context() as patch:
                patch.setattr(torch, "UntypedStorage", short)
                try:
                    loss.backward(retain_graph=True)
                except (torch.OutOfMemoryError, MemoryError):
                    model.zero_grad()
                    loss.backward(retain_graph=True)
            assert all(map(same_bits, gradients(model), expected))
            del loss
            assert_as_ever(model, activations, block, expected)
        if next(count) <= at:
            break
    assert at > 5


@pytest.mark.parametrize("error", [HostMemoryError("none left"), KeyboardInterrupt()], ids=repr)
def test_failed_arena_leaves_model_unchanged(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise error

    model = net(LAYERS)
    monkeypatch.setattr(refit.activations.offload, "Arena", fails)
    with pytest.raises(type(error)):
        refit.ActivationOffload(model, model.layers, host_bytes="1MiB")
    assert not is_hooked(model)


# ---- Ctrl-C.


class Press(AtLine):
    """Ctrl-C before a numbered line, but for those of finalizers: what they raise goes nowhere."""

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_name in ("__del__", "forget"):
            return None
        return super().trace(frame, event, argument)


class Alarm(Exception):
    """What the handler of a time limit raises, or another thread in this one."""


def alarm(*_: object) -> None:
    raise Alarm


@pytest.fixture
def alarms() -> Iterator[None]:
    """SIGALRM raises."""
    before = signal.signal(signal.SIGALRM, alarm)
    yield
    signal.signal(signal.SIGALRM, before)


def ring() -> None:
    signal.raise_signal(signal.SIGALRM)


@pytest.mark.usefixtures("alarms")
@pytest.mark.parametrize(
    ("entry", "aim", "what"),
    [
        ("with", "memory", press),
        ("attach", "memory", press),
        ("with", "overlap", press),
        ("with", "memory", ring),
    ],
)
def test_signal_before_any_line_of_backward_pass_loses_nothing(
    entry: str, aim: str, what: Any, expected: list[torch.Tensor]
) -> None:
    broken = 0
    for at in lines(False, f"{entry} {aim} {what.__name__}"):
        model = net(LAYERS)
        with offloaded(model, entry, aim=aim) as (activations, block):
            stepped(model, block)
            loss = loss_of(model, block)
            handler = Press(at, what)
            try:
                with handler:
                    loss.backward(retain_graph=True)
            except (KeyboardInterrupt, Alarm):
                broken += 1
            model.zero_grad()
            loss.backward(retain_graph=True)
            assert all(map(same_bits, gradients(model), expected)), at
            del loss
            assert_as_ever(model, activations, block, expected)
        assert not is_hooked(model)
        if not handler.done:
            break
    # A GPU's backward pass has a thread of its own, in which no signal's exception is raised.
    assert broken > 20 or training.DEVICE != "cpu"


class InHook(Press):
    """In the hooks by which ``attach`` follows a forward pass."""

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_name not in ("_begin_attached", "_end_attached"):
            return None
        return super().trace(frame, event, argument)


def test_ctrl_c_in_attached_forward_hooks_leaves_no_block_open(
    expected: list[torch.Tensor],
) -> None:
    broken = 0
    for at in lines(True, ""):
        model = net(LAYERS)
        handler = InHook(at)
        with offloaded(model, "attach") as (activations, _):
            stepped(model)
            try:
                with handler:
                    loss_of(model)
            except KeyboardInterrupt:
                broken += 1
                if at % 2:
                    continue  # closes it
            assert_as_ever(model, activations, nullcontext, expected)
        if not handler.done:
            break
    assert broken > 4


@pytest.mark.usefixtures("alarms")
@pytest.mark.parametrize("name", ["add", "commit", "join", "fetch", "release"])
@pytest.mark.parametrize("how", [ring, alarm], ids=["signal", "other thread"])
def test_exception_after_call_does_not_free_memory_being_copied(
    how: Any, name: str, expected: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal's waits for the end of the call that holds it; another thread's does not."""
    made: list[weakref.ref[Any]] = []
    real_memory = refit.activations.groups._take_memory
    real = getattr(refit.activations.arena.Arena, name)

    def memory(*arguments: Any) -> Any:
        found = real_memory(*arguments)
        made.append(weakref.ref(found))
        return found

    def interrupted(*arguments: Any) -> Any:
        result = real(*arguments)
        if next(calls) == at:
            how()
        return result

    monkeypatch.setattr(refit.activations.groups, "_take_memory", memory)
    for at in range(1, 100):
        calls = itertools.count(1)
        model = net(LAYERS)
        with offloaded(model, prefetch=2) as (activations, block):
            with monkeypatch.context() as patch:
                patch.setattr(refit.activations.arena.Arena, name, interrupted)
                loss: Any = None
                raised = False
                try:
                    stepped(model, block)
                    loss = loss_of(model, block)
                    loss.backward(retain_graph=True)
                except Alarm:
                    raised = True  # its frames go with it
                if name == "fetch" and raised and training.DEVICE == "cpu":
                    # A GPU's backward pass has a thread of its own, which no signal ends.
                    assert made[-1]() is not None
            model.zero_grad()
            if loss is not None:
                loss.backward()
                assert all(map(same_bits, gradients(model), expected))
            del loss
            gc.collect()
            assert_as_ever(model, activations, block, expected)
        if next(calls) <= at:
            break
    assert at > LAYERS - 2


def test_forward_pass_ended_by_ctrl_c_leaves_arena_empty(
    expected: list[torch.Tensor],
) -> None:
    """Modules call no hook after KeyboardInterrupt; what others held meanwhile is let go, too."""
    kept: list[torch.Tensor] = []
    ends: list[bool] = [True, False]

    def held(number: int, x: torch.Tensor) -> torch.Tensor:
        if number == 1:
            kept.extend((x.sin(), x))
        if number == LAYERS - 1 and ends and ends.pop(0):
            raise KeyboardInterrupt
        return x

    model = net(LAYERS)
    model.seen = held
    with offloaded(model, "attach", keep_last=0) as (activations, _):
        with pytest.raises(KeyboardInterrupt):
            loss_of(model)
        for _ in range(2):
            kept.clear()
            assert all(map(same_bits, stepped(model), expected))
        kept.clear()
        gc.collect()
        assert figures(activations)["activation_groups"] == 0
        assert used_bytes(activations) == 0


def test_ctrl_c_while_graph_is_freed_is_not_lost_and_frees_room() -> None:
    """What is raised in ``__del__`` is printed and gone, so a storage's end must run no code."""
    model = net(LAYERS)
    with offloaded(model, keep_last=0) as (activations, block):
        with block():
            loss = model(batch()).sum()
        assert figures(activations)["activation_groups"] == LAYERS
        calls: list[str] = []

        def follow(frame: Any, event: str, _: Any) -> None:
            if event == "call":
                calls.append(f"{frame.f_code.co_filename}: {frame.f_code.co_name}")

        sys.setprofile(follow)
        try:
            del loss
        finally:
            sys.setprofile(None)
        assert calls == []
        assert figures(activations)["activation_groups"] == 0


def test_where_pytorch_counts_no_uses_the_gradients_are_the_same(
    expected: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    # PyTorch 2.6 has the count in its builds for GPUs alone.
    monkeypatch.setattr(refit.activations.groups, "users_of", lambda _: 0)
    model = net(LAYERS)
    with offloaded(model) as (activations, block):
        for _ in range(4):
            assert all(map(same_bits, stepped(model, block), expected))
        assert used_bytes(activations) == 0
