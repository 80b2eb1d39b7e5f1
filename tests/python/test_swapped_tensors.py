"""Tensors that ``torch.utils.swap_tensors`` exchanges, as ``module.to()`` does for FSDP2 and with
``torch.__future__.set_swap_module_params_on_conversion``: at each moment of each schedule, the
bits stay those of a run without refit. PyTorch refuses to swap what has a weak reference."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import refit
import torch
import torch.distributed as dist
from shard_scenes import Sharded
from torch import nn
from training import Run, assert_same

SCHEDULES: dict[str, dict[str, Any]] = {
    "none": {},
    "cycle": {"states": "cycle"},
    "discard": {"grads": "discard"},
    "zero": {"grads": "zero"},
    "host": {"states": "host", "window_bytes": "64KiB"},
    "host, resident": {"states": "host", "window_bytes": "64KiB", "host_fraction": 0.5},
    "host_fraction": {"host_fraction": 0.5},
    "all on the CPU": {"host_fraction": 1.0},
    "PyTorch on the CPU": {"host_fraction": 1.0, "host_step": "torch"},
    "host and CPU": {"states": "host", "window_bytes": "64KiB", "cpu_fraction": 0.5},
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

    def __init__(self, make: Any = None) -> None:
        super().__init__(make or (lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False)))
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(24, 300), nn.Tanh(), nn.Linear(300, 4))
        self.optimizer = (make or (lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False)))(
            self.model.parameters()
        )

    def finish(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1


MOMENTS = ["begin", "used", "cleared", "returning", "joined", "backward", "grads cleared"]
MOMENTS += ["grads returning", "at the end"]


def train(
    run: Run, controller: refit.Controller | None, change: Callable[[nn.Module], None], keeps: bool
) -> None:
    """Two steps for each moment, at which the model is changed. ``keeps``: gradients may leave."""
    for moment in MOMENTS:
        at = {moment: change}.get

        def call(verb: str) -> None:
            if controller is not None:
                getattr(controller, verb)()

        def change_at(now: str, at: Any = at) -> None:
            at(now, lambda _model: None)(run.model)

        change_at("begin")
        run.backward()
        run.optimizer.step()
        change_at("used")  # the gradients are there, and used
        run.optimizer.zero_grad()
        call("clear")
        change_at("cleared")
        call("restore")
        change_at("returning")
        call("join")
        change_at("joined")
        run.backward()
        change_at("backward")
        if keeps:
            call("clear")
            change_at("grads cleared")
            call("restore")
            change_at("grads returning")
            run.backward()
            call("clear")  # the next backward pass adds to gradients that are away
        run.steps += 1
        run.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        change_at("at the end")
        run.steps += 1


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("schedule", [one for one in SCHEDULES if one != "none"])
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


def test_gradients_leave_early_again_behind_a_swap(swaps: None) -> None:
    alone, moved = Wide(), Wide()
    with refit.Controller(moved.optimizer, moved.model, host_fraction=1.0) as controller:
        left = []
        for number in range(5):
            if number == 2:
                converted(alone.model), converted(moved.model)
            alone.backward(), moved.backward()
            (share,) = controller._host._shares  # type: ignore[union-attr]
            left.append(len(share._left))
            alone.finish(), moved.finish()
        assert left == [0, 3, 0, 0, 3]
        assert_same(alone, moved)


def test_the_first_windows_come_in_early_again_behind_a_swap(
    swaps: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = Wide()
    with refit.Controller(moved.optimizer, moved.model, **SCHEDULES["host"]) as controller:
        calls: list[int] = []
        states = controller._host
        monkeypatch.setattr(states, "come_in_early", lambda _optimizer: calls.append(moved.steps))
        for number in range(5):
            if number == 2:
                converted(moved.model)
            moved.step()
        assert calls == [1, 3, 4]


def test_hooks_that_a_swap_has_left_behind_are_not_called_by_refit(swaps: None) -> None:
    moved = Wide()
    calls: list[int] = []
    first = next(moved.model.parameters())
    first.register_post_accumulate_grad_hook(lambda _parameter: calls.append(moved.steps))
    with refit.Controller(moved.optimizer, moved.model, host_fraction=1.0):
        for number in range(4):
            if number == 2:
                converted(moved.model)
            moved.step()
    assert calls == [0, 1]


def test_no_memory_of_a_gradient_is_held_behind_a_step() -> None:
    moved = Wide()
    with refit.Controller(moved.optimizer, moved.model):
        moved.backward()
        grads = [p.grad for p in moved.model.parameters() if p.grad is not None]
        held = [torch._C._storage_Use_Count(g.untyped_storage()._cdata) for g in grads]
        moved.optimizer.step()
        assert held == [torch._C._storage_Use_Count(g.untyped_storage()._cdata) for g in grads]
        moved.optimizer.zero_grad()


def test_another_gradient_at_the_same_version_is_no_used_one() -> None:
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


class Shards(Sharded):
    """A run whose model goes to the CPU, where it is, as verl moves it out of the way."""

    def finish(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if not hasattr(torch.cpu.Stream, "record_event"):
        pytest.skip("FSDP2 of this PyTorch runs on GPUs only: 2.6")
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("cpu:gloo", rank=0, world_size=1, store=store)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("schedule", [one for one in SCHEDULES if one != "none"])
@pytest.mark.parametrize("kind", ["fsdp2", "dtensor"])
def test_a_sharded_model_is_moved_at_any_moment(group: None, kind: str, schedule: str) -> None:
    alone, moved = Shards(kind, 301), Shards(kind, 301)
    options = SCHEDULES[schedule]
    keeps = options.get("grads", "keep") == "keep"
    with refit.Controller(moved.optimizer, moved.model, **options) as controller:
        train(alone, None, lambda model: model.to("cpu"), keeps)
        train(moved, controller, lambda model: model.to("cpu"), keeps)
        assert_same_shards(alone, moved)
    assert_same_shards(alone, moved)


def assert_same_shards(one: Shards, other: Shards) -> None:
    pairs = list(zip(one.shards(), other.shards(), strict=True))
    assert pairs
    assert all(torch.equal(mine, yours) for mine, yours in pairs)


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
