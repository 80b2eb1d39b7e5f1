"""Copies that fail and Ctrl-C, in the forward pass and in the backward pass, at every call and at
lines all over the code: a typed error or none, nothing else lost, and training goes on with the
bits of a run without refit."""

import copy
import gc
import itertools
import signal
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import refit.activation_offload
import refit.activations
import torch
import training
from activation_scenes import ROWS, WIDTH, figures, offloaded, same_bits
from refit.errors import CopyError, DeadlineError, HostMemoryError
from test_interrupting_code import MOST, Handler
from torch import nn

pytestmark = pytest.mark.usefixtures("default_device")

LAYERS = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.SiLU())
            for _ in range(LAYERS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).sum()


def net() -> Net:
    torch.manual_seed(5)
    return Net().to(training.DEVICE)


def batch() -> torch.Tensor:
    return training.drawn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found = [one.grad.clone() for one in model.parameters() if one.grad is not None]
    model.zero_grad()
    return found


@pytest.fixture(scope="module")
def expected() -> list[torch.Tensor]:
    model = net()
    model(batch()).backward()
    return gradients(model)


def step(model: Net, block: Callable[[], Any]) -> list[torch.Tensor]:
    with block():
        loss = model(batch())
    loss.backward()
    return gradients(model)


def assert_as_ever(
    model: Net, activations: Any, block: Callable[[], Any], expected: list[torch.Tensor]
) -> None:
    """Nothing is kept of what failed; and steps have their bits, and leave."""
    assert figures(activations)["activation_used_bytes"] == 0
    model.zero_grad()
    for _ in range(2):
        assert all(map(same_bits, step(model, block), expected))
    assert figures(activations)["activation_used_bytes"] == 0


class FailingCall:
    """Stands for ``call``: fails from a given number on, but for functions that do not fail so. A
    join that tells of copies that failed comes behind their end: until then they use memory."""

    def __init__(
        self, at: int, error: BaseException, times: int = 1, never: tuple[str, ...] = ()
    ) -> None:
        self.at, self.error, self.times, self.never = at, error, times, never
        self.count = 0
        self.failed: list[str] = []
        self.real = refit.activations.call

    def __call__(self, function: Any, *arguments: Any) -> None:
        self.count += function.__name__ not in self.never
        fails = self.at <= self.count < self.at + self.times and function.__name__ not in self.never
        if not fails or function.__name__.endswith(("_join", "_wait")):
            self.real(function, *arguments)
        if fails:
            self.failed.append(function.__name__)
            raise copy.copy(self.error)  # whose traceback nothing holds


class _Model:
    def __init__(self, model: Any) -> None:
        self.model, self.layers = model, model.layers


@pytest.mark.parametrize(
    ("times", "aim"), [(1, "memory"), (2, "memory"), (500, "memory"), (1, "overlap")]
)
def test_every_call_of_the_library_may_fail(
    monkeypatch: pytest.MonkeyPatch, expected: list[torch.Tensor], times: int, aim: str
) -> None:
    """In the forward pass what should leave stays; in the backward pass an error names the layer,
    and the pass can be done again."""
    seen = set()
    for at in range(1, 100):
        model = net()
        with offloaded(_Model(model), aim=aim) as (activations, block):
            step(model, block)
            release = ("refit_activations_release",)
            failing = FailingCall(at, CopyError("the link is down"), times, release)
            with monkeypatch.context() as patch, warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                patch.setattr(refit.activations, "call", failing)
                loss = None
                with block():  # which never raises
                    loss = model(batch())
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
def test_a_release_that_must_wait_for_a_copy_that_hangs_is_told_and_training_goes_on(
    monkeypatch: pytest.MonkeyPatch, expected: list[torch.Tensor], times: int
) -> None:
    others = tuple(
        f"refit_activations_{one}" for one in ("begin", "add", "commit", "join", "wait", "fetch")
    )
    told = 0
    for at in range(1, 30):
        model = net()
        with offloaded(_Model(model)) as (_, block):
            step(model, block)
            failing = FailingCall(at, DeadlineError("a copy hangs"), times, others)
            with monkeypatch.context() as patch:
                patch.setattr(refit.activations, "call", failing)
                for _ in range(4):
                    try:
                        assert all(map(same_bits, step(model, block), expected))
                    except DeadlineError:
                        model.zero_grad()
                        told += 1
            for _ in range(2):
                assert all(map(same_bits, step(model, block), expected))
        if failing.count < at:
            break
    assert told > 0


def test_what_fails_in_a_forward_pass_is_told_with_its_layer(
    monkeypatch: pytest.MonkeyPatch, expected: list[torch.Tensor]
) -> None:
    model = net()
    with offloaded(_Model(model)) as (activations, block):
        commit = refit.activations.Arena.commit

        def fails(self: Any, group: int, stream: int) -> None:
            if group == 2:
                raise CopyError("no more descriptors")
            commit(self, group, stream)

        monkeypatch.setattr(refit.activations.Arena, "commit", fails)
        with (
            pytest.warns(
                RuntimeWarning, match=r"layers\.1 stay on the device: no more descriptors"
            ),
            block(),
        ):
            loss = model(batch())
        assert figures(activations)["activation_left_bytes_last"] > 0
        loss.backward()
        assert all(map(same_bits, gradients(model), expected))
        del loss
        assert_as_ever(model, activations, block, expected)


def test_device_memory_that_is_short_in_the_backward_pass_is_told_and_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, expected: list[torch.Tensor]
) -> None:
    import refit.activation_offload as module

    name = "_memory"
    real = getattr(module, name)
    for at in range(1, 60):
        model = net()
        count = itertools.count(1)

        def short(*arguments: Any, at: int = at, count: Any = count) -> Any:
            if next(count) == at:
                raise torch.OutOfMemoryError("no memory")
            return real(*arguments)

        with offloaded(_Model(model)) as (activations, block):
            with block():
                loss = model(batch())
            with monkeypatch.context() as patch:
                patch.setattr(module, name, short)
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


def test_an_arena_that_cannot_be_taken_leaves_the_model_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = net()
    for error in (HostMemoryError("none left"), KeyboardInterrupt()):
        for at in range(1, 4):
            failing = FailingCall(at, error)
            with monkeypatch.context() as patch:
                patch.setattr("refit._handle.call", failing)
                try:
                    refit.ActivationOffload(model, model.layers, host_bytes="1MiB").close()
                except type(error):
                    failing.failed.append("")
            assert not any(one._forward_hooks for one in model.modules()), at


# ---- Ctrl-C.


def press() -> None:
    handler = signal.getsignal(signal.SIGINT)
    assert callable(handler)
    handler(signal.SIGINT, None)  # raises, or notes it for the end of a block that holds it


class Press(Handler):
    """Ctrl-C before a numbered line, but for those of finalizers: what they raise goes nowhere."""

    def __init__(self, at: int) -> None:
        super().__init__(press, at)

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_name in ("__del__", "forget"):
            return None
        return super().trace(frame, event, argument)


@pytest.fixture
def no_collection() -> Iterator[None]:
    """No ``__del__`` of an earlier run is called at any line: what is raised there goes nowhere."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def forward(model: Net, block: Callable[[], Any], losses: list[torch.Tensor]) -> None:
    with block():
        losses.append(model(batch()))


def backward(_: Net, __: Callable[[], Any], losses: list[torch.Tensor]) -> None:
    losses[-1].backward(retain_graph=True)


def dropped(_: Net, block: Callable[[], Any], losses: list[torch.Tensor]) -> None:
    losses.clear()
    with block():
        pass


VERBS: list[Any] = [forward, backward, dropped]
STRIDES = {forward: 41, backward: 23, dropped: 2}
"""How far apart the lines are before which Ctrl-C is pressed."""


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize(
    ("entry", "aim"), [("with", "memory"), ("attach", "memory"), ("with", "overlap")]
)
@pytest.mark.parametrize("verb", [backward], ids=lambda one: one.__name__)
def test_ctrl_c_before_any_line_loses_nothing(
    verb: Any, entry: str, aim: str, expected: list[torch.Tensor]
) -> None:
    broken = 0
    for at in range(1, MOST, STRIDES[verb]):
        model = net()
        with offloaded(_Model(model), entry, aim=aim) as (activations, block):
            step(model, block)
            losses: list[torch.Tensor] = []
            if verb is not forward:
                forward(model, block, losses)
            handler = Press(at)
            try:
                with handler:
                    verb(model, block, losses)
            except KeyboardInterrupt:
                broken += 1
            if verb is backward:
                model.zero_grad()
                backward(model, block, losses)
                assert all(map(same_bits, gradients(model), expected)), at
            losses.clear()
            assert_as_ever(model, activations, block, expected)
        assert not model._forward_hooks
        if not handler.done:
            break
    else:
        pytest.fail("it never ends")
    assert broken > 0 or verb is dropped


def test_where_pytorch_counts_no_uses_the_gradients_are_the_same(
    expected: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    # PyTorch 2.6 has the count in its builds for GPUs alone.
    monkeypatch.setattr(refit.activation_offload, "users_of", lambda _: 0)
    model = net()
    with offloaded(_Model(model)) as (activations, block):
        for _ in range(4):
            assert all(map(same_bits, step(model, block), expected))
        assert figures(activations)["activation_used_bytes"] == 0
