"""The bytes that leave: all that can, really freed, within host_bytes, never with a higher peak.

On a CPU each allocation of PyTorch counts, as its profiler sees it: the arena is none of them. On a
GPU torch.cuda.memory_allocated counts."""

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import training
from activation_scenes import (
    BOTH_WAYS,
    SCENES,
    STACKS,
    Block,
    Run,
    figures,
    left_bytes,
    net,
    offloaded,
    quiet,
    stepped,
    used_bytes,
)
from refit.activations.arena import Arena
from refit.activations.groups import Groups, LayerTime, Measure, Plan
from refit.bench.device_memory import DeviceMemory
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("default_device", "copies_are_over_at_once")

LAYERS = 8
WIDE = 32
ROWS = 2048
EACH = ROWS * WIDE * 4
"""Bytes of each tensor that a layer of ``Deep`` saves."""


is_still = Arena.is_still


@pytest.fixture
def copies_are_over_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that memory at a point of time does not depend on the speed of the machine."""

    def has_left(self: Arena, group: int) -> bool:
        self.wait(group, 60_000)
        return True

    monkeypatch.setattr(Arena, "is_still", has_left)


class Layer(nn.Module):
    """Saves what its first and its second half give, two tensors of EACH bytes, and its input,
    which the layer before gave."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh()).sigmoid()


SAVED = 2 * EACH


class Deep(nn.Module):
    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.checkpoints: bool | None = None
        """None: it does not; whether reentrant."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.checkpoints is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.checkpoints)
        return x.mean()


def deep(layers: int = LAYERS) -> Deep:
    torch.manual_seed(2)
    return Deep(layers).to(training.DEVICE)


def given() -> torch.Tensor:
    return training.drawn(ROWS, WIDE, generator=torch.Generator().manual_seed(1))


class Allocated(DeviceMemory):
    """Bytes of PyTorch's tensors, from those at the beginning on."""

    def __init__(self) -> None:
        super().__init__(torch.device(training.DEVICE), 0)

    @property
    def peak(self) -> int:
        """At the highest."""
        return self.peak_bytes - self.resident_bytes

    @property
    def end(self) -> int:
        """At the end; on a GPU now."""
        if self.on_gpu:
            torch.cuda.synchronize()
            return torch.cuda.memory_allocated() - self.resident_bytes
        return self.points[-1][1]


def settled(model: nn.Module, block: Block, x: torch.Tensor, steps: int = 3) -> list[int]:
    """Bytes after the forward pass, at the peak of the whole, and at the end, of the last step."""
    for _ in range(steps - 1):
        with block():
            loss = model(x)
        loss.backward()
    del loss  # gradients are there from now on, and are not part of it
    with Allocated() as forward, block():
        loss = model(x)
    after = forward.end
    with Allocated() as backward:
        loss.backward()
        del loss
    return [after, max(forward.peak, after + backward.peak), after + backward.end]


@pytest.fixture
def without() -> list[int]:
    return settled(deep(), nullcontext, given())


# ---- What leaves is gone from the device.


@pytest.mark.parametrize("keep_last", [0, 1, 3])
def test_what_can_leave_does_and_its_memory_is_free(without: list[int], keep_last: int) -> None:
    x = given()
    model = deep()
    with offloaded(model, keep_last=keep_last, host_bytes="8MiB") as (activations, block):
        after, peak, end = settled(model, block, x)
        left = left_bytes(activations)
    leaves = (LAYERS - max(keep_last, 1)) * SAVED
    assert left >= leaves
    assert without[0] - after >= 0.99 * leaves
    assert peak <= without[1] - 0.7 * leaves
    assert abs(end) <= abs(without[2]) + 4096


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_inputs_that_checkpointing_keeps_leave(reentrant: bool) -> None:
    x = given().requires_grad_()
    alone, model = deep(), deep()
    alone.checkpoints = model.checkpoints = reentrant
    before = settled(alone, nullcontext, x)
    with offloaded(model, host_bytes="8MiB") as (_, block):
        after = settled(model, block, x)
    # The caller holds the first one's; what the last layer keeps stays. A reentrant one saves them
    # at the end of its layer, so that the last layer is counted to have two.
    leaves = (LAYERS - 2 - reentrant) * EACH
    assert before[0] - after[0] >= leaves
    assert after[1] <= before[1]
    assert abs(after[2]) <= abs(before[2]) + 4096


def saved_and_free(run: Run, keep_last: int) -> int:
    """Bytes that could leave, found without refit: of storages saved before the last groups end,
    those that nothing but autograd holds after the forward pass. Autograd gets copies instead."""
    held: dict[int, Any] = {}
    ended = [0]
    saved: list[tuple[int, int, Any]] = []
    fixed = {one.untyped_storage().data_ptr() for one in run.model.state_dict().values()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is torch.strided and not isinstance(tensor, nn.Parameter):
            storage = tensor.untyped_storage()
            place = storage.data_ptr()
            if place not in fixed and held.get(place, lambda: None)() is None:
                held[place] = weakref.ref(storage)
                saved.append((ended[0], storage.nbytes(), held[place]))
        return tensor.clone()

    def end(*_: Any) -> None:
        ended[0] += 1

    hooks = [layer.register_forward_hook(end) for layer in run.layers]
    batch = run.scene.drawn(1)
    with quiet(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = run.scene.loss(run.model, batch)
    for hook in hooks:
        hook.remove()
    last = ended[0] - max(keep_last, 1)
    del batch
    found = sum(size for group, size, one in saved if group < last and one() is None)
    loss.backward()
    return found


@pytest.mark.parametrize("scene", list(SCENES))
def test_nearly_every_saved_byte_that_can_leave_does(scene: str) -> None:
    expected = saved_and_free(Run(SCENES[scene]), 1)
    run = Run(SCENES[scene])
    with quiet(), offloaded(run) as (activations, block):
        for _ in range(3):
            run.step(block)
        found = left_bytes(activations)
    assert expected > 0
    assert found >= 0.95 * expected


@pytest.mark.parametrize(
    ("scene", "way", "aim"),
    [
        *((scene, way, "memory") for scene in ("mlp", "drops", "llama") for way in BOTH_WAYS[1:]),
        *((scene, "none", aim) for scene in SCENES for aim in ("memory", "overlap")),
    ],
)
def test_the_peak_is_never_higher(scene: str, way: str, aim: str) -> None:
    def peak(run: Run, block: Block, untimed: int = 0) -> int:
        for number in range(untimed + 1):
            batch = run.scene.drawn(1)
            run.optimizer.zero_grad(set_to_none=False)
            with Allocated() if number == untimed else nullcontext() as seen:
                with block():
                    loss = run.scene.loss(run.model, batch)
                loss.backward()
                del loss
        return seen.peak

    with quiet():
        alone = peak(Run(SCENES[scene], way), nullcontext, 1)
        moved = Run(SCENES[scene], way)
        with offloaded(moved, aim=aim) as (_, block):
            assert peak(moved, block, 3) <= alone * 1.01 + 4096


# ---- Budgets.


@pytest.mark.parametrize("room", [0.6, 1.5, 3.2, 6.0])
def test_never_more_leaves_than_there_is_room_for(room: float) -> None:
    budget = int(room * SAVED)
    model = deep()
    with offloaded(model, host_bytes=budget) as (activations, block):
        for _ in range(3):
            with block():
                loss = model(given())
            found = figures(activations)
            assert budget - EACH <= found["activation_left_bytes_last"] <= budget
            assert found["activation_used_bytes_peak"] <= found["activation_host_bytes"]
            assert found["activation_host_bytes"] <= budget + (2 << 20)
            loss.backward()
            del loss
        assert used_bytes(activations) == 0


def test_what_has_no_room_stays_the_innermost_layers_first() -> None:
    """With room for three layers, the memory of the first three is free after the forward pass."""
    model = deep()
    kept: list[Any] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            made = x.tanh()
            ctx.save_for_backward(made)
            kept.append(weakref.ref(made.untyped_storage()))
            return made

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (made,) = ctx.saved_tensors
            return gradient * (1 - made * made)

    for layer in model.layers:
        layer.forward = lambda x, layer=layer: layer.down(Watched.apply(layer.up(x))).sigmoid()  # type: ignore[method-assign,misc]
    with offloaded(model, host_bytes=int(3.1 * SAVED)) as (_, block):
        for _ in range(3):
            kept.clear()
            with block():
                loss = model(given())
            gone = [one() is None for one in kept]
            loss.backward()
            del loss
    assert gone == [True] * 3 + [False] * (LAYERS - 3)


@pytest.mark.parametrize("room", [1, 64, 4096])
def test_a_budget_of_nearly_nothing_changes_nothing(without: list[int], room: int) -> None:
    model = deep()
    with offloaded(model, host_bytes=room) as (activations, block):
        after = settled(model, block, given())
        assert left_bytes(activations) == 0
        with block():
            loss = model(given())
            assert figures(activations)["activation_groups"] == 0  # given back at once
        del loss
    assert after[1] <= without[1] + 4096


@pytest.mark.parametrize(("least", "leaves"), [(EACH, True), (EACH + 1, False), ("1MiB", False)])
def test_min_bytes_is_the_smallest_storage_that_leaves(least: int | str, leaves: bool) -> None:
    model = deep()
    with offloaded(model, min_bytes=least, host_bytes="8MiB") as (activations, block):
        settled(model, block, given())
        assert (left_bytes(activations) > 0) == leaves
        assert (activations.off is None) == leaves
        assert leaves or "min_bytes" in activations.off


# ---- What never leaves.


def test_what_others_hold_stays() -> None:
    model = deep()
    kept: list[torch.Tensor] = []
    x = given()
    hooks = [
        layer.register_forward_hook(lambda _, __, result: kept.append(result))
        for layer in model.layers
    ]
    with offloaded(model, host_bytes="8MiB") as (activations, block):
        for number in range(4):
            kept.clear()
            with block():
                loss = model(x)
            addresses = [one.data_ptr() for one in kept]
            # Of each layer but the last one tensor is the caller's: what it gives.
            others = (LAYERS - 1) * EACH
            assert (others if number else 0) <= left_bytes(activations) <= others
            loss.backward()
            assert [one.data_ptr() for one in kept] == addresses
            del loss
        for hook in hooks:  # and once they are not held any more they leave again
            hook.remove()
        kept.clear()
        settled(model, block, x, 4)
        assert left_bytes(activations) >= (LAYERS - 1) * SAVED


def test_parameters_buffers_tables_and_batches_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(STACKS["mlp"])
    batch = run.scene.drawn(0)
    left: list[int] = []
    add = Arena.add

    def noted(self: Any, group: int, memories: list[int], nbytes: list[int]) -> Any:
        left.extend(memories)
        return add(self, group, memories, nbytes)

    monkeypatch.setattr(Arena, "add", noted)
    with offloaded(run) as (_, block):
        for number in range(3):
            left.clear()
            with block():
                loss = run.scene.loss(run.model, batch)
            assert left
            held = {one.data_ptr() for one in run.model.state_dict().values()}
            if number:  # until the end of the first forward pass a batch may be anybody's
                held |= {one.data_ptr() for one in batch.values()}
            assert not held & set(left)
            loss.backward()


def test_storage_leaves_once_for_all_views_and_layers() -> None:
    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            common = x.exp()
            for number, layer in enumerate(self.layers):
                x = layer(x * common) * common[number].sin() + common.t().exp().t() * common[1:2]
            return x.sum()

    torch.manual_seed(2)
    model = Shares().to(training.DEVICE)
    x = given()
    fixed = {one.data_ptr() for one in model.parameters()}
    held: dict[int, Any] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in fixed:
            held[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(x)
    expected = sum(one.nbytes() for one in held.values())
    del loss
    with offloaded(model, host_bytes="8MiB") as (activations, block):
        with block():
            loss = model(x)
        found = figures(activations)
        assert found["activation_out_bytes_total"] <= found["activation_saved_bytes_last"]
        # What the last layer saves, and what is saved after it, is not counted by all.
        assert 0.6 * expected <= found["activation_saved_bytes_last"] <= expected
        loss.backward()


# ---- Nothing is kept longer than it is needed.


def test_memory_that_has_returned_goes_as_the_backward_pass_goes() -> None:
    """In the backward pass no more is on the device at once than some groups."""
    model = deep(16)
    alone = settled(deep(16), nullcontext, given())
    with offloaded(model, host_bytes="16MiB", prefetch=1) as (_, block):
        _, peak, _ = settled(model, block, given())
    assert peak <= 4 * SAVED
    assert alone[1] >= 16 * SAVED


class Probe(torch.autograd.Function):
    """Calls a function once the backward pass comes by."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, called: Callable[[], None]) -> torch.Tensor:
        ctx.called = called
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.called()
        return grad, None


def test_memory_saved_after_last_layer_is_freed_in_its_backward() -> None:
    """The logits are the largest of all, and nothing but autograd needs them by then."""
    held: list[weakref.ref[Any]] = []
    alive: list[bool] = []

    def logits(number: int, x: torch.Tensor) -> torch.Tensor:
        if number < 4:
            return x
        x = Probe.apply(x, lambda: alive.append(held[-1]() is not None)).exp()
        held.append(weakref.ref(x.untyped_storage()))
        return x

    model = net()
    model.seen = logits
    with offloaded(model) as (activations, block):
        for _ in range(2):
            with block():
                loss = model(torch.ones(6, 24, device=training.DEVICE)).sum()
            assert held[-1]() is not None
            loss.backward()
            assert figures(activations)["activation_in_bytes_total"] > 0
    assert alive == [False, False]


def test_groups_requested_while_leaving_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Copies that take longer than the forward pass: each group is cancelled, none is released."""
    monkeypatch.setattr(Arena, "is_still", lambda *_: False)
    model = net(3)
    known = []
    with offloaded(model, in_flight=3) as (activations, block):
        for _ in range(3):
            for _ in range(20):
                stepped(model, block)
            gc.collect()
            known.append(len(gc.get_objects()))
        assert known[2] < known[1] + 20
        monkeypatch.undo()
        assert figures(activations)["activation_groups"] == 0


def test_the_second_forward_pass_that_measures_runs_as_those_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[int] = []
    wait = Arena.wait

    def waited(self: Arena, group: int, timeout_ms: int) -> None:
        waits.append(group)
        wait(self, group, timeout_ms)

    monkeypatch.setattr(Arena, "is_still", is_still)
    monkeypatch.setattr(Arena, "wait", waited)
    model, x = deep(), given()
    with offloaded(model, host_bytes="8MiB", aim="overlap") as (_, block):
        for expected in (LAYERS - 1, 0):
            waits.clear()
            with block():
                loss = model(x)
            assert len(waits) == expected
            loss.backward()


def measured(
    copy_s: float, *layers: float, saved: int = 1000, left: int = 1000, submitted_s: float = 0.0
) -> list[Measure]:
    return [Measure(saved, left, submitted_s, layer_s, copy_s) for layer_s in layers]


def planned(first: list[Measure], second: list[Measure]) -> list[float]:
    """The shares that leave after two passes that have found this."""
    plan = Plan(in_flight=1, for_memory=False)
    plan.end_pass(first)
    assert plan.measures
    assert not plan.measures_copies
    plan.end_pass(second)
    assert not plan.measures
    return [plan.share(order) for order in range(len(second))]


NOTHING = {"saved": 0, "left": 0}


@pytest.mark.parametrize(
    ("first", "second", "shares"),
    [
        # The shorter time of a layer counts, of the CPU and of the device.
        (measured(2.0, 4, 4), measured(0, 1, 1), [0.5, 1]),
        (measured(2.0, 1, 1), measured(0, 4, 4), [0.5, 1]),
        (measured(2.0, 4, 4, submitted_s=1), measured(0, 0.5, 0.5, submitted_s=9), [0.5, 1]),
        # Twice the batch: twice the time, and twice the bytes.
        (measured(2.0, 4, 4), measured(0, 2, 2, saved=2000, left=2000), [0.5, 1]),
        # Less leaves of the same batch, since others hold it: the copies take less time.
        (measured(2.0, 4, 4), measured(0, 1, 1, left=500), [1, 1]),
        # A layer that saves nothing has a time, too.
        (
            [*measured(4.0, 9), *measured(0, 9, **NOTHING), *measured(4.0, 9)],
            [*measured(0, 1), *measured(0, 1, **NOTHING), *measured(0, 1)],
            [0.25, 1, 1],
        ),
        # What left for the first time in the second pass takes as long as other bytes.
        (
            [*measured(2.0, 1), *measured(0, 1, 1, left=0)],
            measured(0, 1, 1, 1),
            [0.5, 0.5, 1],
        ),
        # The second pass has more layers.
        (measured(2.0, 1), measured(0, 1, 1, 1), [0.5, 0.5, 1]),
    ],
)
def test_as_much_leaves_as_the_layers_have_time_for(
    first: list[Measure], second: list[Measure], shares: list[float]
) -> None:
    assert planned(first, second) == shares


def test_a_gpu_tells_the_time_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in for its events: one that was not waited for has no time yet."""
    clock = iter([10.0, 13.5])

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.is_over = False

        def record(self, stream: object) -> None:
            assert stream == "a stream of cuda:1"
            self.at_ms = next(clock)

        def synchronize(self) -> None:
            self.is_over = True

        def elapsed_time(self, end: "Event") -> float:
            assert self.is_over
            assert end.is_over
            return end.at_ms - self.at_ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"a stream of {device}")
    layer = LayerTime(torch.device("cuda:1"))
    layer.end()
    assert layer.submitted_s > 0
    assert layer.computed_s == 0.0035


def test_a_backward_pass_acts_on_what_has_ended_once_a_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[None] = []
    tidy = Groups.tidy

    def counted(self: Groups) -> None:
        calls.append(None)
        tidy(self)

    many = [nn.Tanh() for _ in range(50)]
    model = deep(4)
    model.layers = nn.ModuleList(nn.Sequential(layer, *many) for layer in model.layers)
    with offloaded(model, host_bytes="64MiB") as (activations, block):
        with block():
            loss = model(given())
        monkeypatch.setattr(Groups, "tidy", counted)
        loss.backward()
        assert left_bytes(activations) >= 3 * 50 * EACH
    assert len(calls) <= 2 * 4


def test_a_graph_that_is_kept_does_not_keep_what_has_returned() -> None:
    model = deep(16)
    with offloaded(model, host_bytes="16MiB") as (_, block):
        for _ in range(2):
            with block():
                loss = model(given())
            with Allocated() as first:
                loss.backward(retain_graph=True)
            with Allocated() as second:
                loss.backward(retain_graph=True)
            del loss
    assert first.end <= 4 * SAVED
    assert second.end <= SAVED


def test_all_is_freed_without_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        model = deep()
        references: list[Any] = []

        def watch(_: Any, __: Any, result: torch.Tensor) -> None:
            references.append(weakref.ref(result.untyped_storage()))

        hooks = [layer.up.register_forward_hook(watch) for layer in model.layers]  # type: ignore[union-attr]
        with offloaded(model, host_bytes="8MiB") as (activations, block):
            for back in (True, False, True):
                with block():
                    loss = model(given())
                assert used_bytes(activations) > 0
                if back:
                    loss.backward()
                del loss
                assert all(one() is None for one in references)
                assert used_bytes(activations) == 0
        for hook in hooks:
            hook.remove()
        activations_gone = weakref.ref(activations)
        del activations, block
        assert activations_gone() is None
        gone = weakref.ref(model)
        del model, watch, hooks, hook
        assert gone() is None
    finally:
        gc.enable()
