"""Ranks that train together, with every schedule: FSDP1, FSDP2, DTensor, DDP with and without
hooks, accelerate, and distributed checkpoints that ranks of another number load. Ranks meet by
gloo, and their tensors lie on the host on any machine. And transformers' Trainer, which saves and
resumes."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import ranks
import shard_scenes
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import training
from refit.states.offloaded_tensor import OffloadedTensor, kind_of
from schedules import BOTH, CYCLE, SHARE, WINDOWS, Layers, Schedule, lives_on_host, stepped_by_cpu
from shard_scenes import ALL, count_left
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from training import Wrapper, drawn

pytestmark = [pytest.mark.timeout(600), ranks.needs_fsdp2]
WIDTH = 40


class Split(Layers):
    """Parameters of which each rank has rows, in the process of one rank, which asks no other."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (2,))
        self.model = nn.ParameterList(
            DTensor.from_local(drawn(150, 40), mesh, [Shard(0)], run_check=False) for _ in range(3)
        )
        self.optimizer = make(self.model.parameters())

    def backward(self) -> float:
        source = torch.Generator().manual_seed(self.steps)
        for one in self.model:
            grad = drawn(150, 40, generator=source)
            one.grad = DTensor.from_local(grad, one.device_mesh, [Shard(0)], run_check=False)
        return 0.0

    def shards(self) -> list[torch.Tensor]:
        return [one.to_local() for one in (*self.model, *self.moments())]


@pytest.fixture
def one_of_two_ranks() -> Any:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_of_two_ranks")
def test_a_rank_ends_with_the_bits_of_one_without_refit(schedule: Schedule) -> None:
    alone, moved = Split(training.adamw), Split(training.adamw)
    with schedule.open(moved.optimizer, moved.model) as controller:
        for number in range(4):
            alone.step(), moved.step()
            assert all(map(torch.equal, alone.shards(), moved.shards()))
            here = [one for one in moved.moments() if lives_on_host(one.to_local())]
            assert bool(here) == (schedule is not CYCLE)
            assert bool(stepped_by_cpu(controller)) == schedule.has_share
            kinds = zip(alone.moments(), moved.moments(), strict=True)
            assert all(type(mine) is kind_of(theirs) for mine, theirs in kinds)
            controller.offload()
            if number % 2:
                controller.restore()
    alone.step(), moved.step()
    assert all(map(torch.equal, alone.shards(), moved.shards()))


class Pair(Wrapper):
    """Of two tensors, as torchao's states are: within its operations no class is asked."""

    names = ("first", "second")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.view.default:  # a DTensor is made of one
            return cls(args[0].first, args[0].second)
        return super().__torch_dispatch__(func, types, args, kwargs)


class Sums(torch.optim.Optimizer):
    """Keeps a ``Pair`` in a DTensor of each parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            grad, mine = (shard_scenes.local(one) for one in (parameter.grad, parameter))
            state = self.state[parameter]
            if not state:
                pair: Any = Pair(*(torch.zeros_like(mine) for _ in range(2)))
                if isinstance(parameter, DTensor):
                    split = parameter.device_mesh, parameter.placements
                    pair = DTensor.from_local(pair, *split, run_check=False)
                state["sums"] = pair
            pair = getattr(state["sums"], "_local_tensor", state["sums"])
            pair.first.add_(grad)
            pair.second.add_(grad, alpha=2)
            mine.sub_(pair.first + pair.second, alpha=0.1)


@pytest.mark.usefixtures("one_of_two_ranks")
def test_a_wrapper_within_a_wrapper_waits_for_the_copies_too() -> None:
    run = Split(Sums)
    with WINDOWS.open(run.optimizer, run.model):
        run.step()  # makes the states
        for _ in range(2):
            run.step()
            for state in run.optimizer.state.values():
                outer = state["sums"]
                inner = outer._local_tensor
                for one in (outer, inner, inner.first, inner.second):
                    assert isinstance(one, OffloadedTensor)
            assert torch.equal(inner.second.clone(), 2 * inner.first)
            assert not isinstance(inner, OffloadedTensor)


@pytest.fixture
def the_only_rank(tmp_path: Path) -> Any:
    ranks.join(0, 1, tmp_path, backend="cpu:gloo")
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("the_only_rank")
def test_fsdp2_lets_windows_come_in_during_the_backward_pass() -> None:
    alone, moved = (shard_scenes.Sharded("fsdp2", shard_scenes.WIDTH) for _ in range(2))
    with WINDOWS.open(moved.optimizer, moved.model) as controller:
        for number in range(4):
            alone.gradients(), moved.gradients()
            assert (controller.stats()["refit/window_bytes"] > 0) == (number > 0)
            alone.finish(), moved.finish()
            moved.optimizer.state_dict()
            assert controller.stats()["refit/window_bytes"] == 0
            assert all(map(torch.equal, alone.shards(), moved.shards()))


@pytest.mark.usefixtures("the_only_rank")
@pytest.mark.parametrize("of", [shard_scenes.Sharded, shard_scenes.Clipped])
def test_fsdp2_lets_gradients_leave_during_the_backward_pass(of: Any) -> None:
    alone, moved = (of("fsdp2", shard_scenes.WIDTH) for _ in range(2))
    with ALL.open(moved.optimizer, moved.model):
        for number in range(4):
            alone.gradients(), moved.gradients()
            assert count_left(moved) == (3 if number else 0)
            alone.finish(), moved.finish()
            assert shard_scenes.same(alone, moved)


def keep_each(keep: Any) -> Any:
    """Keeps something of each gradient when it is made, before it can leave."""

    def prepare(run: Any, held: list[Any]) -> None:
        for one in run.parameters():
            one.register_post_accumulate_grad_hook(
                lambda one: held.append(keep(shard_scenes.local(one.grad)))
            )

    return prepare


def keep_reduced(run: Any, held: list[Any]) -> None:
    """Keeps what each reduction has made, of which gradients are views."""
    for one in (run.model[0], run.model):
        one.set_all_reduce_hook(held.append)


def keep_wrappers(run: Any, held: list[Any]) -> None:
    """Makes other DTensors of the tensors in the gradients."""
    held += [one.grad.redistribute(placements=one.grad.placements) for one in run.parameters()]


@torch.no_grad()
def halve(held: list[Any]) -> None:
    while held:
        one = held.pop()
        inner = one if isinstance(one, DTensor | numpy.ndarray) else one.numpy()
        inner *= 0.5


HOLDERS: dict[str, tuple[Any, Any, int]] = {
    "a tensor": (keep_each(lambda t: t.data), None, 0),
    "an array": (keep_each(lambda t: t.numpy()), None, 0),
    "all of it": (keep_reduced, None, 3),
    "a wrapper": (None, keep_wrappers, 3),
}
"""What has the memory of gradients, too; and how many may leave nevertheless."""


@pytest.mark.usefixtures("the_only_rank")
@pytest.mark.parametrize("how", HOLDERS)
def test_a_change_of_a_shard_by_its_memory_is_found(how: str) -> None:
    """Though what has made it is gone by the step."""
    before, between, count = HOLDERS[how]
    runs = alone, moved = [shard_scenes.Sharded("fsdp2", shard_scenes.WIDTH) for _ in range(2)]
    held: list[Any] = []
    for run in runs if before else []:
        before(run, held)
    with ALL.open(moved.optimizer, moved.model):
        for number in range(3):
            alone.gradients(), moved.gradients()
            assert count_left(moved) == (count if number == 1 else 0)
            for run in runs if between else []:
                between(run, held)
            halve(held)
            alone.finish(), moved.finish()
            assert shard_scenes.same(alone, moved)


@pytest.mark.usefixtures("the_only_rank")
@pytest.mark.parametrize("schedule", [WINDOWS, ALL], ids=lambda one: one.name)
@pytest.mark.parametrize("first", [True, False])
def test_a_hook_of_fsdp2_may_step(first: bool, schedule: Schedule) -> None:
    """Whether it comes before those of the schedule or after them."""
    runs = alone, moved = [shard_scenes.Sharded("fsdp2", shard_scenes.WIDTH) for _ in range(2)]

    def register() -> None:
        for run in runs:
            last = run.parameters()[0]  # its gradient is the last one
            last.register_post_accumulate_grad_hook(lambda _, run=run: run.finish())

    if first:
        register()
    with schedule.open(moved.optimizer, moved.model):
        if not first:
            register()
        for _ in range(4):
            alone.gradients(), moved.gradients()
            assert shard_scenes.same(alone, moved)


@pytest.mark.usefixtures("the_only_rank")
def test_gradients_that_fsdp2_brings_to_the_host_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has parameters on another device than its mesh with ``CPUOffloadPolicy`` only, and waits
    for each copy if they have hooks."""
    run = shard_scenes.Sharded("fsdp2", shard_scenes.WIDTH)
    monkeypatch.setattr(type(run.mesh), "device_type", "cuda")
    with ALL.open(run.optimizer, run.model) as controller:
        for _ in range(3):
            run.step()
            assert stepped_by_cpu(controller)
            assert not any(one._post_accumulate_grad_hooks for one in run.parameters())


def together(write: Any) -> Any:
    """A collective that others are made of."""

    def written(tensor: torch.Tensor) -> None:
        with c10d._coalescing_manager():
            write(tensor)

    return written


WRITES: dict[str, Any] = {
    "all_reduce": dist.all_reduce,
    "several": together(dist.all_reduce),
    "broadcast": lambda t: dist.broadcast(t, 0),
    "reduce": lambda t: dist.reduce(t, 0),
    "scatter": lambda t: dist.scatter(t, [torch.ones(t.shape)]),
    "all_gather": lambda t: dist.all_gather([t], torch.ones(t.shape)),
    "reduce_scatter": lambda t: dist.reduce_scatter(t, [torch.ones(t.shape)]),
}
"""What writes a tensor in C++, where no class is asked."""


@pytest.mark.usefixtures("the_only_rank")
@pytest.mark.parametrize("write", WRITES)
def test_a_collective_finds_what_has_left(write: str) -> None:
    alone, moved = (shard_scenes.Sharded("fsdp2", shard_scenes.WIDTH) for _ in range(2))
    with ALL.open(moved.optimizer, moved.model):
        alone.step(), moved.step()
        alone.gradients(), moved.gradients()
        assert count_left(moved) == 3
        for run in (alone, moved):
            WRITES[write](shard_scenes.local(run.parameters()[0].grad))
        assert count_left(moved) == 0
        alone.finish(), moved.finish()
        assert shard_scenes.same(alone, moved)
    run = shard_scenes.Sharded("fsdp2")
    with CYCLE.open(run.optimizer, run.model) as controller:
        run.step()
        controller.offload()
        WRITES[write](shard_scenes.local(run.moments()[0]))
        assert controller.state == "training"


@pytest.mark.usefixtures("the_only_rank")
@pytest.mark.parametrize("hook", ["", "fp16_compress_hook"])
def test_gradients_that_ddp_writes_stay_until_the_step(hook: str) -> None:
    alone, moved = (shard_scenes.Replica(hook) for _ in range(2))
    with ALL.open(moved.optimizer, moved.model):
        for _ in range(3):
            alone.gradients(), moved.gradients()
            assert count_left(moved) == 0
            alone.finish(), moved.finish()
            assert shard_scenes.same(alone, moved)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="module")
def seen(folder: Path) -> list[dict[str, Any]]:
    """What each rank saw in each case. A rank that hangs fails all of them by the timeout."""
    return ranks.run(shard_scenes.play, folder)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ranks that meet later", *shard_scenes.CASES])
def test_ranks_end_with_the_bits_of_ranks_without_refit(
    seen: list[dict[str, Any]], case: str
) -> None:
    assert [one[case] for one in seen] == [True, True]


@pytest.mark.slow
@pytest.mark.usefixtures("seen")
@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_ranks_loads_a_checkpoint(
    folder: Path, tmp_path: Path, count: int
) -> None:
    found = ranks.run(shard_scenes.play_others, tmp_path, count, folder, count=count)
    assert found == [dict.fromkeys((one.name for one in shard_scenes.SCHEDULES), True)] * count


class Predicts(nn.Module):
    """A model as a Trainer takes it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layers(inputs).pow(2).mean()}


def trained(folder: Path, steps: int, schedule: Schedule | None, resume: bool) -> list[Any]:
    """What a Trainer that accumulates, clips, and saves after each 4th step ends with."""
    transformers = pytest.importorskip("transformers")
    model = Predicts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    source = torch.Generator().manual_seed(5)
    batches = [{"inputs": torch.randn(WIDTH, generator=source)} for _ in range(96)]
    arguments = transformers.TrainingArguments(
        **{"output_dir": str(folder), "use_cpu": True, "report_to": [], "disable_tqdm": True},
        **{"max_steps": steps, "save_steps": 4, "max_grad_norm": 0.01},
        **{"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    )
    rates = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 8)
    trainer = transformers.Trainer(
        model, arguments, train_dataset=batches, optimizers=(optimizer, rates)
    )
    if schedule is None:
        trainer.train(resume_from_checkpoint=resume)
    else:
        with schedule.open(optimizer, model) as controller:
            trainer.train(resume_from_checkpoint=resume)
            assert bool(stepped_by_cpu(controller)) == schedule.has_share
    states = (optimizer.state[one] for one in model.parameters())
    return [*model.parameters(), *(one[key] for one in states for key in sorted(one))]


@pytest.mark.slow
def test_a_trainer_ends_with_the_same_bits_and_resumes(schedule: Schedule, tmp_path: Path) -> None:
    expected = trained(tmp_path / "alone", 8, None, False)
    assert all(map(torch.equal, expected, trained(tmp_path / "with", 8, schedule, False)))
    before: Schedule | None
    after: Schedule | None
    for before, after in ((schedule, None), (None, schedule), (BOTH, schedule), (schedule, SHARE)):
        folder = tmp_path / f"{before and before.name}-{after and after.name}"
        trained(folder, 4, before, False)
        assert all(map(torch.equal, expected, trained(folder, 8, after, True)))
