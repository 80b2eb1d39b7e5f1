"""Tensors that ``torch.utils.swap_tensors`` exchanges, as ``module.to()`` does for FSDP2 and with
``torch.__future__.set_swap_module_params_on_conversion``: at each moment of each schedule, the
bits stay those of a run without refit. PyTorch refuses to swap what has a weak reference."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ranks
import refit
import torch
import torch.distributed as dist
from refit.states.offloaded_tensor import OffloadedTensor
from refit.step.host_states import HostStateManager
from shard_scenes import Sharded
from shard_scenes import same as same_shards
from torch import nn
from training import Run, assert_same

SCHEDULES: dict[str, dict[str, Any]] = {
    "cycle": {"schedule": refit.Cycle()},
    "discard": {"grads": "discard"},
    "zero": {"grads": "zero"},
    "host": {"schedule": refit.HostStates(window_bytes="64KiB")},
    "host, resident": {"schedule": refit.HostStates(window_bytes="64KiB", fraction=0.5)},
    "host_fraction": {"schedule": refit.CpuStep(fraction=0.5)},
    "all on the CPU": {"schedule": refit.CpuStep(fraction=1.0)},
    "PyTorch on the CPU": {"schedule": refit.CpuStep(fraction=1.0, backend="torch")},
    "host and CPU": {
        "schedule": [refit.HostStates(window_bytes="64KiB"), refit.CpuStep(fraction=0.5)]
    },
}


def converted(model: nn.Module) -> None:
    """To another type and back: each parameter and each gradient is swapped twice."""
    model.to(torch.float64)
    model.to(torch.float32)


def swapped_by_hand(model: nn.Module) -> None:
    """Each parameter and each gradient, with a copy of it."""
    for parameter in model.parameters():
        grad = parameter.grad
        parameter.grad = None
        with torch.no_grad():
            torch.utils.swap_tensors(parameter, nn.Parameter(parameter.clone()))
            if grad is not None:
                torch.utils.swap_tensors(grad, grad.clone())
                parameter.grad = grad


def saved_and_loaded(model: nn.Module) -> None:
    """With gradients and hooks in place."""
    model.load_state_dict(copy.deepcopy(model.state_dict()))


CHANGES = {one.__name__: one for one in (converted, swapped_by_hand, saved_and_loaded)}


@pytest.fixture
def swaps() -> Iterator[None]:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


class Wide(Run):
    """States that are large enough for windows and for the CPU's share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(24, 300), nn.Tanh(), nn.Linear(300, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=False)


VERBS = ["clear", "restore", "join"]
CYCLE = ["begin", "backward", "step", "zero_grad", *VERBS, "backward"]
GRADS_LEAVE = ["clear", "restore", "backward", "clear"]
END = ["backward", "step", "zero_grad"]


def act(run: Any, controller: refit.Controller | None, action: str) -> None:
    if action in VERBS:
        if controller is not None:
            getattr(controller, action)()
    elif action == "backward":
        run.backward()
    elif action != "begin":
        getattr(run.optimizer, action)()


def train(
    run: Any, controller: refit.Controller | None, change: Callable[[nn.Module], None], keeps: bool
) -> None:
    """Two steps for each moment of them, at which the model is changed. ``keeps``: gradients may
    leave."""
    actions = [*CYCLE, *(GRADS_LEAVE if keeps else []), *END]
    for moment in range(len(actions)):
        for number, action in enumerate(actions):
            act(run, controller, action)
            if number == moment:
                change(run.model)
        run.steps += 1


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_swapped_model_trains_as_without_refit(swaps: None, schedule: str, change: str) -> None:
    alone, moved = Wide(), Wide()
    options = SCHEDULES[schedule]
    keeps = options.get("grads", "keep") == "keep"
    with refit.Controller(moved.optimizer, moved.model, **options) as controller:
        train(alone, None, CHANGES[change], keeps)
        train(moved, controller, CHANGES[change], keeps)
        assert_same(alone, moved)
    assert_same(alone, moved)


@pytest.mark.parametrize("schedule", ["cycle", "host", "host_fraction"])
def test_states_are_swapped_like_other_tensors(schedule: str) -> None:
    alone, moved = Wide(), Wide()
    with refit.Controller(moved.optimizer, moved.model, **SCHEDULES[schedule]) as controller:
        for verbs in ((), ("clear",), ("clear", "restore"), ("clear", "restore", "join")):
            alone.step(), moved.step()
            for verb in verbs:
                getattr(controller, verb)()
            for run in (alone, moved):
                for moment in run.moments():
                    torch.utils.swap_tensors(moment, moment.clone())
            alone.step(), moved.step()
            assert_same(alone, moved)
    assert_same(alone, moved)


def test_gradients_leave_early_again_after_a_swap(swaps: None) -> None:
    alone, moved = Wide(), Wide()
    with refit.Controller(moved.optimizer, moved.model, schedule=refit.CpuStep(fraction=1.0)):
        left = []
        for number in range(5):
            if number == 2:
                converted(alone.model), converted(moved.model)
            alone.backward(), moved.backward()
            left.append(sum(isinstance(p.grad, OffloadedTensor) for p in moved.model.parameters()))
            alone.finish(), moved.finish()
        assert left == [0, 3, 0, 0, 3]
        assert_same(alone, moved)


def test_windows_come_early_again_after_swaps(swaps: None, monkeypatch: pytest.MonkeyPatch) -> None:
    moved, calls = Wide(), []
    monkeypatch.setattr(HostStateManager, "prefetch", lambda *_: calls.append(moved.steps))
    with refit.Controller(moved.optimizer, moved.model, **SCHEDULES["host"]):
        for number in range(5):
            if number == 2:
                converted(moved.model)
            moved.step()
    assert calls == [1, 3, 4]


def test_hooks_that_a_swap_has_left_are_not_called_by_refit(swaps: None) -> None:
    moved = Wide()
    calls: list[int] = []
    first = next(moved.model.parameters())
    first.register_post_accumulate_grad_hook(lambda _parameter: calls.append(moved.steps))
    with refit.Controller(moved.optimizer, moved.model, schedule=refit.CpuStep(fraction=1.0)):
        for number in range(4):
            if number == 2:
                converted(moved.model)
            moved.step()
    assert calls == [0, 1]


def test_no_memory_of_a_gradient_is_held_after_a_step() -> None:
    moved = Wide()
    with refit.Controller(moved.optimizer, moved.model):
        moved.backward()
        grads = [p.grad for p in moved.model.parameters() if p.grad is not None]
        held = [torch._C._storage_Use_Count(g.untyped_storage()._cdata) for g in grads]
        moved.optimizer.step()
        assert held == [torch._C._storage_Use_Count(g.untyped_storage()._cdata) for g in grads]
        moved.optimizer.zero_grad()


def test_another_gradient_at_the_same_version_is_not_used() -> None:
    moved = Wide()
    with refit.Controller(moved.optimizer, moved.model, grads="discard") as controller:
        first = next(moved.model.parameters())
        buffer = torch.zeros_like(first)
        first.grad = buffer.data  # a counter of its own
        moved.optimizer.step()
        assert not controller.accumulating
        for _ in range(8):  # often at the address of the one before
            first.grad = None
            buffer.data.fill_(1.0)
            first.grad = buffer.data
            assert controller.accumulating


# ---- sharded ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    ranks.join(0, 1, tmp_path_factory.mktemp("group"), backend="cpu:gloo")
    yield
    dist.destroy_process_group()


@ranks.needs_fsdp2
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", ["fsdp2", "dtensor"])
def test_a_sharded_model_is_moved_at_any_moment(group: None, kind: str, schedule: str) -> None:
    """To the CPU, where it is, as verl moves it out of the way."""
    alone, moved = Sharded(kind, 301), Sharded(kind, 301)
    options = SCHEDULES[schedule]
    keeps = options.get("grads", "keep") == "keep"
    with refit.Controller(moved.optimizer, moved.model, **options) as controller:
        train(alone, None, lambda model: model.to("cpu"), keeps)
        train(moved, controller, lambda model: model.to("cpu"), keeps)
        assert same_shards(alone, moved)
    assert same_shards(alone, moved)


# ---- others that look at tensors ----------------------------------------------------------------


def test_a_model_whose_activations_leave_is_swapped(swaps: None) -> None:
    alone, moved = Wide(), Wide()
    layers = list(moved.model.children())[:2]
    offload = refit.ActivationOffload(
        moved.model, layers, host_bytes="1MiB", min_bytes=64, aim="memory", keep_last=0
    )
    offload.attach()
    for number in range(6):
        for run in (alone, moved):
            if number % 2:
                converted(run.model)
            run.backward()
            if number >= 3:
                swapped_by_hand(run.model)
            run.finish()
        assert_same(alone, moved)
    assert offload.stats()["refit/activation_left_bytes_last"] > 0
    offload.close()
