"""The bytes that leave: all that can, really freed, within host_bytes, never with a higher peak.

On a CPU each allocation of PyTorch counts, as its profiler sees it: the arena is none of them. On a
GPU torch.cuda.memory_allocated counts."""

import gc
import weakref
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import training
from activation_scenes import (
    BOTH_WAYS,
    SCENES,
    STACKS,
    Run,
    figures,
    offloaded,
    quiet,
)
from refit.activations import Arena
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("default_device")

LAYERS = 8
WIDE = 32
ROWS = 2048
EACH = ROWS * WIDE * 4
"""Bytes of each tensor that a layer of ``Deep`` saves."""


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


def given(rows: int = ROWS) -> torch.Tensor:
    return training.drawn(rows, WIDE, generator=torch.Generator().manual_seed(1))


class Allocated:
    """Bytes of PyTorch's tensors: at the highest and at the end, from those at the beginning on."""

    peak = 0
    end = 0


@contextmanager
def allocated() -> Any:
    seen = Allocated()
    if training.DEVICE != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield seen
        torch.cuda.synchronize()
        seen.peak = torch.cuda.max_memory_allocated() - before
        seen.end = torch.cuda.memory_allocated() - before
        return
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        yield seen
    todo = list(profiler.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    changes = []
    while todo:
        event = todo.pop()
        todo += event.children
        if event.tag == torch._C._profiler._EventType.Allocation:
            changes.append((event.start_time_ns, event.id, event.extra_fields.alloc_size))
    for *_, size in sorted(changes):
        seen.end += size
        seen.peak = max(seen.peak, seen.end)


def forward_and_backward(model: nn.Module, block: Callable[[], Any], x: torch.Tensor) -> list[int]:
    """Bytes behind the forward pass, at the peak of the whole, and at the end."""
    for one in model.parameters():
        one.grad = torch.zeros_like(one)  # so that gradients are no part of it
    with allocated() as forward, block():
        loss = model(x)
    with allocated() as backward:
        loss.backward()
        del loss
    peak = max(forward.peak, forward.end + backward.peak)
    return [forward.end, peak, forward.end + backward.end]


def settled(
    model: nn.Module, block: Callable[[], Any], x: torch.Tensor, steps: int = 3
) -> list[int]:
    """Of the last of some steps."""
    for _ in range(steps):
        found = forward_and_backward(model, block, x)
    return found


@pytest.fixture
def without() -> list[int]:
    return settled(deep(), nullcontext, given())


# ---- What leaves is gone from the device.


@pytest.mark.parametrize("keep_last", [0, 1, 3])
def test_what_can_leave_does_and_its_memory_is_free(without: list[int], keep_last: int) -> None:
    x = given()
    model = deep()
    with offloaded(_Model(model), keep_last=keep_last, host_bytes="8MiB") as (activations, block):
        after, peak, end = settled(model, block, x)
        found = figures(activations)
    leaves = (LAYERS - max(keep_last, 1)) * SAVED
    assert found["activation_left_bytes_last"] >= leaves
    assert without[0] - after >= 0.99 * leaves
    assert peak <= without[1] - 0.7 * leaves
    assert abs(end) <= abs(without[2]) + 4096


class _Model:
    """A model as ``offloaded`` takes it."""

    def __init__(self, model: Any) -> None:
        self.model, self.layers = model, model.layers


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_inputs_that_checkpointing_keeps_leave(reentrant: bool) -> None:
    x = given().requires_grad_()
    alone, model = deep(), deep()
    alone.checkpoints = model.checkpoints = reentrant
    before = settled(alone, nullcontext, x)
    with offloaded(_Model(model), host_bytes="8MiB") as (_, block):
        after = settled(model, block, x)
    # The caller holds the first one's; what the last layer keeps stays. A reentrant one saves them
    # behind the end of its layer, so that the last layer is counted to have two.
    leaves = (LAYERS - 2 - reentrant) * EACH
    assert before[0] - after[0] >= leaves
    assert after[1] <= before[1]
    assert abs(after[2]) <= abs(before[2]) + 4096


def saved_and_free(run: Run, keep_last: int) -> int:
    """Bytes that could leave, found without refit: of storages saved before the last groups end,
    those that nothing but autograd holds behind the forward pass. Autograd gets copies instead."""
    held: dict[int, Any] = {}
    ended = [0]
    saved: list[tuple[int, int, Any]] = []
    fixed = {
        one.untyped_storage()._cdata for one in (*run.model.parameters(), *run.model.buffers())
    }

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is torch.strided and not isinstance(tensor, nn.Parameter):
            storage = tensor.untyped_storage()
            if storage._cdata not in fixed and held.get(storage._cdata, lambda: None)() is None:
                held[storage._cdata] = weakref.ref(storage)
                saved.append((ended[0], storage.nbytes(), held[storage._cdata]))
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
        found = figures(activations)["activation_left_bytes_last"]
    assert expected > 0
    assert found >= 0.95 * expected


@pytest.mark.parametrize(
    ("scene", "way", "aim"),
    [
        *((scene, way, "memory") for scene in ("mlp", "drops", "llama") for way in BOTH_WAYS),
        *((scene, "none", aim) for scene in SCENES for aim in ("memory", "overlap")),
    ],
)
def test_the_peak_is_never_higher(scene: str, way: str, aim: str) -> None:
    def peak(run: Run, block: Callable[[], Any]) -> int:
        highest = 0
        for _ in range(4):
            batch = run.scene.drawn(1)
            run.optimizer.zero_grad(set_to_none=False)
            with allocated() as seen:
                with block():
                    loss = run.scene.loss(run.model, batch)
                loss.backward()
                del loss
            highest = seen.peak
        return highest

    with quiet():
        alone = peak(Run(SCENES[scene], way), nullcontext)
        moved = Run(SCENES[scene], way)
        with offloaded(moved, aim=aim) as (_, block):
            assert peak(moved, block) <= alone * 1.01 + 4096


# ---- Budgets.


@pytest.mark.parametrize("room", [0.6, 1.5, 3.2, 6.0])
def test_never_more_leaves_than_there_is_room_for(room: float) -> None:
    budget = int(room * SAVED)
    model = deep()
    with offloaded(_Model(model), host_bytes=budget) as (activations, block):
        for _ in range(3):
            with block():
                loss = model(given())
            found = figures(activations)
            assert budget - EACH <= found["activation_left_bytes_last"] <= budget
            assert found["activation_used_bytes_peak"] <= found["activation_host_bytes"]
            assert found["activation_host_bytes"] <= budget + (2 << 20)
            loss.backward()
            del loss
        assert figures(activations)["activation_used_bytes"] == 0


def test_what_has_no_room_stays_the_innermost_layers_first() -> None:
    """With room for three layers, the memory of the first three is free behind the forward pass."""
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
    with offloaded(_Model(model), host_bytes=int(3.1 * SAVED)) as (_, block):
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
    with offloaded(_Model(model), host_bytes=room) as (activations, block):
        after = settled(model, block, given())
        assert figures(activations)["activation_left_bytes_last"] == 0
    assert after[1] <= without[1] + 4096


def test_min_bytes_is_the_smallest_storage_that_leaves() -> None:
    for least, leaves in ((EACH, True), (EACH + 1, False), ("1MiB", False)):
        model = deep()
        with offloaded(_Model(model), min_bytes=least, host_bytes="8MiB") as (activations, block):
            settled(model, block, given())
            assert (figures(activations)["activation_left_bytes_last"] > 0) == leaves
            assert (activations.off is None) == leaves
            if not leaves:
                assert "min_bytes" in activations.off


# ---- What never leaves.


def test_what_others_hold_stays() -> None:
    model = deep()
    kept: list[torch.Tensor] = []
    x = given()
    hooks = [
        layer.register_forward_hook(lambda _, __, result: kept.append(result))
        for layer in model.layers
    ]
    with offloaded(_Model(model), host_bytes="8MiB") as (activations, block):
        for number in range(4):
            kept.clear()
            with block():
                loss = model(x)
            addresses = [one.data_ptr() for one in kept]
            left = figures(activations)["activation_left_bytes_last"]
            # Of each layer but the last one tensor is the caller's: what it gives.
            assert left <= (LAYERS - 1) * EACH
            if number:
                assert left >= (LAYERS - 1) * EACH
            loss.backward()
            assert [one.data_ptr() for one in kept] == addresses
            del loss
        for hook in hooks:  # and once they are not held any more they leave again
            hook.remove()
        kept.clear()
        settled(model, block, x, 4)
        left = figures(activations)["activation_left_bytes_last"]
        assert left >= (LAYERS - 1) * SAVED


def test_parameters_buffers_tables_and_batches_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(STACKS["mlp"])
    batch = run.scene.drawn(0)
    left: list[int] = []
    add = Arena.add

    def noted(self: Any, group: int, memory: int, nbytes: int) -> Any:
        left.append(memory)
        return add(self, group, memory, nbytes)

    monkeypatch.setattr(Arena, "add", noted)
    with offloaded(run) as (_, block):
        for number in range(3):
            left.clear()
            with block():
                loss = run.scene.loss(run.model, batch)
            assert left
            held = {one.data_ptr() for one in (*run.model.parameters(), *run.model.buffers())}
            if number:  # until the end of the first forward pass a batch may be anybody's
                held |= {one.data_ptr() for one in batch.values()}
            assert not held & set(left)
            loss.backward()


def test_one_storage_leaves_once_however_many_views_and_layers_save_it() -> None:
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
    held: dict[int, Any] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter) and not isinstance(tensor._base, nn.Parameter):
            held[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(x)
    expected = sum(one.nbytes() for one in held.values())
    del loss
    with offloaded(_Model(model), host_bytes="8MiB") as (activations, block):
        with block():
            loss = model(x)
        found = figures(activations)
        assert found["activation_out_bytes_total"] <= found["activation_saved_bytes_last"]
        # What the last layer saves, and what is saved behind it, is not counted by all.
        assert 0.6 * expected <= found["activation_saved_bytes_last"] <= expected
        loss.backward()


# ---- Nothing is kept longer than it is needed.


def test_memory_that_has_returned_goes_as_the_backward_pass_goes() -> None:
    """In the backward pass no more is on the device at once than some groups."""
    model = deep(16)
    alone = settled(deep(16), nullcontext, given())
    with offloaded(_Model(model), host_bytes="16MiB", prefetch=1) as (_, block):
        _, peak, _ = settled(model, block, given())
    assert peak <= 4 * SAVED
    assert alone[1] >= 16 * SAVED


def test_what_is_saved_behind_the_last_layer_goes_as_soon_as_it_was_used() -> None:
    model = deep()
    with offloaded(_Model(model), host_bytes="8MiB") as (_, block):
        for _ in range(2):
            with block():
                x = given()
                for layer in model.layers:
                    x = layer(x)
                result = x.exp()  # which saves it, and is held by nothing else below
                loss = result.sum()
            logits = weakref.ref(result.untyped_storage())
            seen: list[bool] = []
            first = next(model.layers[0].parameters())
            hook = first.register_hook(
                lambda _, seen=seen, logits=logits: seen.append(logits() is None)
            )
            del x, result
            loss.backward()
            hook.remove()
            assert seen == [True]


def test_a_graph_that_is_kept_does_not_keep_what_has_returned() -> None:
    model = deep(16)
    with offloaded(_Model(model), host_bytes="16MiB") as (_, block):
        for _ in range(2):
            with block():
                loss = model(given())
            with allocated() as first:
                loss.backward(retain_graph=True)
            with allocated() as second:
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
        with offloaded(_Model(model), host_bytes="8MiB") as (activations, block):
            for back in (True, False, True):
                with block():
                    loss = model(given())
                if back:
                    loss.backward()
                del loss
                assert all(one() is None for one in references)
                assert figures(activations)["activation_used_bytes"] == 0
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
