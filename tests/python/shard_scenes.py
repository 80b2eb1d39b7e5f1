"""What the ranks of test_distributed.py do: the same training with every schedule and without."""

import copy
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import refit
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import join
from refit.errors import BusyError
from refit.states.offloaded_tensor import OffloadedTensor, kind_of
from refit.step.cpu_kernels import root_of_torch
from schedules import BOTH, CYCLE, SHARE, WINDOWS, Schedule, lives_on_host, stepped_by_cpu
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

Maker = Callable[..., torch.optim.Optimizer]
ALL = Schedule("all on the CPU", (refit.CpuStep(fraction=1.0),))
SCHEDULES = (CYCLE, WINDOWS, SHARE, BOTH, ALL)
WIDTH = 301
"""Of the hidden layer: each rank's shard of it has states that can live on the host."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# ---- Sharded training.


class Sharded:
    """One training run on this rank's shards; odd sizes, so that one rank has less."""

    def __init__(self, kind: str, width: int = 9, make: Maker = torch.optim.AdamW) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        torch.manual_seed(7)
        self.model: nn.Module = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))
        if kind == "fsdp2":
            fully_shard(self.model[0], mesh=mesh)  # type: ignore[index]
            fully_shard(self.model, mesh=mesh)
        elif kind.startswith("fsdp1"):
            given = {"use_orig_params": kind == "fsdp1", "device_id": torch.device("cpu")}
            self.model[0] = FullyShardedDataParallel(self.model[0], **given)  # type: ignore[index,operator,arg-type]
            self.model = FullyShardedDataParallel(self.model, **given)  # type: ignore[arg-type]
        else:
            for module in (self.model[0], self.model[2]):  # type: ignore[index]
                for name in ("weight", "bias"):
                    whole = getattr(module, name).detach()
                    setattr(module, name, nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])))
        self.kind, self.mesh, self.steps = kind, mesh, 0
        self.optimizer = make(self.model.parameters(), lr=1e-2)
        self.norm = torch.zeros(1)

    def parameters(self) -> list[Any]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def backward(self) -> None:
        """Gradients that add up."""
        self.model(self.shown(torch.ones(4, 6))).sum().backward()

    def shown(self, batch: torch.Tensor) -> torch.Tensor:
        """A batch as the model takes it."""
        if self.kind != "dtensor":
            return batch
        split = distribute_tensor(batch, self.mesh, [Shard(0)])
        return split.redistribute(placements=[Replicate()])

    def gradients(self) -> None:
        """Of the next step."""
        batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(self.steps))
        self.model(self.shown(batch)).pow(2).mean().backward()

    def finish(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def step(self) -> None:
        self.gradients()
        self.finish()

    def moments(self) -> list[torch.Tensor]:
        return [t for s in self.optimizer.state.values() for t in s.values() if t.dim() > 0]

    def shards(self) -> list[torch.Tensor]:
        return [local(one) for one in (*self.parameters(), *self.moments())]

    def counts(self) -> list[float]:
        return [float(one["step"]) for one in self.optimizer.state.values() if "step" in one]


class Clipped(Sharded):
    """Each rank has a batch of its own, several make a step, and gradients are clipped over ranks.
    The ranks' gradients are added up after the last batch only, or after each (``adds_late``)."""

    adds_late = True
    limit = 0.05

    def gathers(self, last: bool) -> Any:
        if self.kind == "fsdp2":
            self.model.set_requires_gradient_sync(last or not self.adds_late)  # type: ignore[operator]
        elif self.kind.startswith("fsdp1") and self.adds_late and not last:
            return self.model.no_sync()  # type: ignore[operator]
        return nullcontext()

    def gradients(self) -> None:
        for micro in range(3):
            seed = 100 * self.steps + 10 * micro
            if self.kind != "dtensor":
                seed += dist.get_rank()
            batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
            with self.gathers(micro == 2):
                self.model(self.shown(batch)).pow(2).mean().backward()
        if self.kind.startswith("fsdp1"):
            self.norm = self.model.clip_grad_norm_(self.limit)  # type: ignore[operator]
        else:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.limit)
            self.norm = norm.full_tensor() if isinstance(norm, DTensor) else norm


class AddedOften(Clipped):
    adds_late = False


def same(one: Any, other: Any) -> bool:
    pairs = zip(one.shards(), other.shards(), strict=True)
    equal = all(torch.equal(a, b) for a, b in pairs)
    return equal and one.counts() == other.counts() and torch.equal(one.norm, other.norm)


def opens(schedule: Schedule | None, run: Any, **options: Any) -> Any:
    if schedule is None:
        return nullcontext()
    return schedule.open(run.optimizer, run.model, **options)


def count_left(run: Any) -> int:
    """Counts the gradients that have left before the step."""
    return sum(isinstance(one.grad, OffloadedTensor) for one in run.parameters())


def leave_early(schedule: Schedule, kind: str) -> bool:
    """Whether gradients of the CPU's share leave before a step: of DTensors, which are those of all
    ranks when a backward pass has made them."""
    return schedule in (SHARE, BOTH, ALL) and kind in ("fsdp2", "dtensor")


def wrong_with(schedule: Schedule | None, run: Any, controller: Any, known: bool = True) -> str:
    """What is not as the schedule wants it where the states are, and what steps."""
    if schedule is None:
        return ""
    states = run.optimizer.state.items()
    here = [
        local(p.detach()).numel()
        for p, state in states
        if any(t.dim() > 0 and lives_on_host(local(t)) for t in state.values())
    ]
    if bool(here) != (schedule is not CYCLE):
        return f"states of {here} elements live on the host"
    names = stepped_by_cpu(controller)
    if bool(names) != (schedule.has_share or schedule is ALL):
        return f"the CPU steps {names}"
    if any("DeviceMesh" in why for _, why in controller.resident):
        return f"{controller.resident}"
    held = controller.stats()["refit/host_step_bytes"]  # gradients and parameters of the kernels
    expected = 8 * sum(here) if known and root_of_torch() is not None else 0
    if schedule in (SHARE, ALL) and not expected <= held <= 1.5 * expected:
        return f"{held} bytes are held for kernels, of {expected}"
    return ""


def looks(run: Any) -> list[Any]:
    return [(id(t), t.shape, t.stride()) for t in run.moments()]


def flat_options(schedule: Schedule, kind: str) -> dict[str, Any]:
    """Of two flat parameters, one of which has 70 % of the elements."""
    return {"fraction": 0.75} if schedule is BOTH and kind == "fsdp1_flat" else {}


def trains(
    schedule: Schedule,
    kind: str,
    of: type[Sharded] = Sharded,
    make: Maker = torch.optim.AdamW,
    known: bool = True,
) -> object:
    runs = alone, moved = of(kind, WIDTH, make), of(kind, WIDTH, make)
    with opens(schedule, moved, **flat_options(schedule, kind)) as controller:
        for number in range(5):
            for run in runs:
                run.gradients()
            used = of is Sharded and number == 4  # more was added to them after step 3
            is_early = known and number > 0 and not used and leave_early(schedule, kind)
            if bool(count_left(moved)) != is_early:
                return f"step {number}: gradients have left, or have not"
            for run in runs:
                run.finish()
            if not same(alone, moved):
                return f"step {number}: other bits"
            wrong = wrong_with(schedule, moved, controller, known)
            if wrong:
                return f"step {number}: {wrong}"
            kinds = zip(alone.moments(), moved.moments(), strict=True)
            if not all(type(mine) is kind_of(theirs) for mine, theirs in kinds):
                return "states are other kinds of tensors"
            before = looks(moved)
            controller.offload()
            leaves = sum(local(t).nbytes for t in alone.moments() if schedule is CYCLE)
            if controller.stats()["refit/offload_bytes"] < leaves:
                return "a state has not left"
            if number % 2:
                controller.restore()
            if number == 3 and of is Sharded:
                for run in runs:
                    run.backward()
                if not controller.accumulating:
                    return "no accumulation is seen"
        if looks(moved) != before:
            return "states are other tensors"
        for run in runs:
            run.step()
        if controller.accumulating or not same(alone, moved):
            return "other bits after a cycle"
    for run in runs:
        run.step()
    return same(alone, moved) or "other bits after the end"


def momentum(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, nesterov=True)


def fused(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, fused=True)


def used_by_hand(schedule: Schedule) -> object:
    """States are read and written as DTensors between steps, and gradients before a step."""
    alone, moved = Sharded("fsdp2", WIDTH), Sharded("fsdp2", WIDTH)
    with opens(schedule, moved) as controller:
        for _ in range(4):
            for run in (alone, moved):
                run.step()
                for one in run.moments():
                    one.mul_(0.5)
                run.backward()
                for one in run.parameters():
                    one.grad = one.grad * 2
                for state in run.optimizer.state.values():
                    state["step"] += 3
            seen = [[t.full_tensor() for t in run.moments()] for run in (alone, moved)]  # type: ignore[attr-defined]
            if not all(map(torch.equal, *seen)):
                return "other values"
        copied = copy.deepcopy(moved.optimizer.state_dict())
        alone.step(), moved.step()
        wrong = wrong_with(schedule, moved, controller)
        return wrong or (same(alone, moved) and len(copied["state"]) == 4)


USES: list[Callable[[Any, Any], Any]] = [
    lambda t, _: t.to_local().clone(),
    lambda t, _: getattr(t, t.__tensor_flatten__()[0][0]) + 0,
    lambda t, _: t.full_tensor(),
    lambda t, _: (t * 2).to_local(),
    lambda t, other: torch.linalg.vector_norm(t - other.mul(0.5)).full_tensor(),
    lambda t, _: torch._foreach_mul_([t], 0.5) and t.to_local().clone(),
    lambda t, _: t.add_(0.25).to_local().clone(),
    lambda t, _: copy.deepcopy(t).to_local(),
    lambda t, _: t.redistribute(placements=[Replicate()]).to_local(),
]
"""What gives plain tensors from DTensors, and changes some."""


def used_while_away(schedule: Schedule) -> object:
    """States that are away are used, as DTensors and by what they hold."""
    alone, moved = Sharded("fsdp2"), Sharded("fsdp2")
    with opens(schedule, moved) as controller:
        alone.step(), moved.step()
        for number, use in enumerate(USES):
            controller.offload()
            one, two = moved.moments()[:2]
            shapes = (one.shape, one.device_mesh, one.placements, isinstance(one, DTensor))  # type: ignore[attr-defined]
            if controller.state != "cleared" or shapes[-1] is not True:
                return f"{number}: {shapes} brought the states back"
            if not torch.equal(use(one, two), use(*alone.moments()[:2])):
                return f"{number}: other bytes"
            if controller.state != "training" or type(one) is not DTensor:
                return f"{number}: {controller.state}, {type(one)}"
        alone.step(), moved.step()
    return same(alone, moved)


def policies(schedule: Schedule, kind: str) -> object:
    """Gradients add up on both sides of a clear, with a rollout while states are away."""
    for policy in ("keep", "discard", "zero"):
        alone, moved = Sharded(kind), Sharded(kind)
        with opens(schedule, moved, grads=policy) as controller:
            for number in range(4):
                for run in (alone, moved):
                    run.step()
                    if policy == "keep":
                        run.backward()
                controller.offload()
                if any(t.untyped_storage().nbytes() for t in moved.moments() if t.numel()):
                    return "the states did not leave"
                for run in (alone, moved):
                    with torch.no_grad():
                        run.model(torch.ones(4, 6))  # a rollout
                if number % 2:
                    controller.restore()
                for run in (alone, moved):
                    run.backward()
            alone.step(), moved.step()
            controller.offload()
            mine, yours = (
                FullyShardedDataParallel.optim_state_dict(run.model, run.optimizer)["state"]
                for run in (moved, alone)
            )
        pairs = [(v, yours[name][key]) for name, one in mine.items() for key, v in one.items()]
        if not (pairs and all(torch.equal(*pair) for pair in pairs) and same(alone, moved)):
            return f"{policy}: other bits"
    return True


def weights_of_fsdp1(schedule: Schedule, rank: int) -> object:
    """Flat parameters are refused with a sentence, and sent by the way that it says."""
    run = Sharded("fsdp1")
    run.step()
    try:
        list(refit.named_weights(run.model))
        return "flat parameters were published as they are"
    except refit.UnsupportedError as why:
        if "within FSDP.summon_full_params(model)" not in str(why):
            return str(why)
    with opens(schedule, run) as controller:
        whole = FullyShardedDataParallel.summon_full_params(run.model)
        if rank:
            with controller.refit(), whole:
                pass
            return True
        with refit.Publisher("tcp://127.0.0.1:0") as publisher:
            with controller.refit(publisher=publisher) as tx, whole:
                tx.send(dict(run.model.named_parameters()))
            declared = [(one.name, one.shape) for one in publisher.declared]
            expected = [("0.weight", (9, 6)), ("0.bias", (9,)), ("2.weight", (3, 9))]
            return declared == [*expected, ("2.bias", (3,))] and tx.committed


class Mixed(Sharded):
    """Plain parameters, DTensors and shards of FSDP2 in one optimizer of two groups; of the second
    group rank 1 has a shard without elements."""

    def __init__(self) -> None:
        torch.manual_seed(9)
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        layers = nn.Sequential(
            nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 40), nn.Tanh(), nn.Linear(40, 7)
        )
        plain, shared, last = layers[0], layers[2], layers[4]
        odd = nn.Linear(300, 1)
        for name in ("weight", "bias"):
            whole = getattr(shared, name).detach()
            setattr(shared, name, nn.Parameter(distribute_tensor(whole, self.mesh, [Shard(0)])))
        fully_shard(last, mesh=self.mesh)
        fully_shard(odd, mesh=self.mesh)
        self.model = nn.ModuleList([layers, odd])
        first = {"params": [*plain.parameters(), *shared.parameters()]}
        second = {"params": [*last.parameters(), *odd.parameters()], "lr": 0.3, "eps": 1e-3}
        self.optimizer = torch.optim.AdamW([first, second], lr=1e-2)
        self.steps = 0
        self.norm = torch.zeros(1)

    def gradients(self) -> None:
        source = torch.Generator().manual_seed(self.steps)
        for one in self.parameters():
            whole = torch.randn(one.shape, generator=source)
            split = distribute_tensor(whole, self.mesh, [Shard(0)])
            one.grad = split if isinstance(one, DTensor) else whole


def mixed(schedule: Schedule, rank: int, **options: Any) -> object:
    alone, moved = Mixed(), Mixed()
    with opens(schedule, moved, **options) as controller:
        for number in range(4):
            alone.step(), moved.step()
            if not same(alone, moved):
                return f"step {number}: other bits"
        if options:  # names hold on each rank, also on one whose shard of a parameter is empty
            picked = ["0.2.weight", "1.weight"] if rank == 0 else ["0.2.weight"]
            return sorted(stepped_by_cpu(controller)) == picked
        return wrong_with(schedule, moved, controller) or True


# ---- Replicas.


class Replica(Sharded):
    """A model that each rank has as a whole; their gradients are averaged."""

    def __init__(self, hook: str = "", branches: bool = False, **options: Any) -> None:
        torch.manual_seed(5)
        layers = [nn.Linear(6, 60), nn.Tanh(), nn.Linear(60, 60), nn.Linear(60, 60)]
        self.inner = Branching(*layers) if branches else nn.Sequential(*layers)
        self.model = DistributedDataParallel(self.inner, bucket_cap_mb=0.005, **options)
        if hook:
            self.model.register_comm_hook(None, getattr(default_hooks, hook))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.batches = 1 if options.get("static_graph") else 2  # PyTorch adds none up there
        self.steps = 0

    def gathers(self, last: bool) -> Any:
        return nullcontext() if last else self.model.no_sync()  # type: ignore[operator]

    def gradients(self) -> None:
        self.inner.steps = self.steps  # type: ignore[assignment]
        for micro in range(self.batches):
            seed = 100 * self.steps + 10 * micro + dist.get_rank()
            batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
            with self.gathers(micro == self.batches - 1):
                self.model(batch).pow(2).mean().backward()

    def finish(self) -> None:
        self.norm = nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.steps % 2 == 0)
        self.steps += 1


class Branching(nn.Sequential):
    """Leaves its last layer out in some steps: on one of the ranks, or on all."""

    steps = 0

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        left_out = self.steps % 3 == 2 or (self.steps % 3 == 1 and dist.get_rank() == 1)
        for layer in self[:-1] if left_out else self:
            batch = layer(batch)
        return batch


class ByHand(Replica):
    """Without a wrapper: gradients are final after an ``all_reduce`` of the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.model = self.inner

    def gathers(self, last: bool) -> Any:
        return nullcontext()

    def gradients(self) -> None:
        super().gradients()
        for one in self.model.parameters():
            dist.all_reduce(one.grad)


class Unequal(ByHand):
    """As with experts: in some steps no parameter of rank 1's share has a gradient, in some no
    parameter at all, and each rank counts the steps of each of its parameters."""

    def gradients(self) -> None:
        Replica.gradients(self)
        if dist.get_rank() == 1 and self.steps % 3 != 1:
            for at, one in enumerate(self.model.parameters()):
                one.grad = one.grad if at < 2 and self.steps % 3 == 0 else None


def replicas(schedule: Schedule, make: Callable[[], Replica]) -> object:
    alone, moved = make(), make()
    with opens(schedule, moved) as controller:
        for number in range(7):
            alone.gradients(), moved.gradients()
            if count_left(moved):
                return "gradients have left, which the ranks are to average"
            alone.finish(), moved.finish()
            if not same(alone, moved):
                return f"step {number}: other bits"
            if number % 2:
                controller.offload()
        return bool(stepped_by_cpu(controller)) == (schedule.has_share or schedule is ALL)


def ranks_that_meet_later(rank: int, folder: Path) -> object:
    """Gradients leave during a backward pass until the ranks join a group, and then stay. Played
    before there is one."""
    alone, moved = (nn.Linear(40, 40) for _ in range(2))
    moved.load_state_dict(alone.state_dict())
    makes = [torch.optim.AdamW(one.parameters()) for one in (alone, moved)]
    with ALL.open(makes[1], moved):
        left = []
        for number in range(6):
            for one in (alone, moved):
                one(torch.full((2, 40), 0.1 * number + rank)).pow(2).mean().backward()
            left.append(any(isinstance(one.grad, OffloadedTensor) for one in moved.parameters()))
            if number == 3:
                join(rank, 2, folder, backend="cpu:gloo")
            if number >= 3:
                for model in (alone, moved):
                    for p in model.parameters():
                        dist.all_reduce(p.grad)
            for optimizer in makes:
                optimizer.step()
                optimizer.zero_grad()
        right = left == [False, True, True, True, False, False]
        equal = all(map(torch.equal, alone.parameters(), moved.parameters()))
        return (right and equal) or f"{left} {equal}"


# ---- Checkpoints.


def state_of(run: Sharded) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(run.model),
        "optimizer": get_optimizer_state_dict(run.model, run.optimizer),
    }


def load(run: Sharded, controller: Any, name: Path) -> None:
    if controller is not None:
        controller.offload()
    loaded = state_of(run)
    dcp.load(loaded, checkpoint_id=name)
    if controller is not None:
        controller.offload()
    set_model_state_dict(run.model, loaded["model"])
    set_optimizer_state_dict(run.model, run.optimizer, loaded["optimizer"])


def save(run: Sharded, controller: Any, name: Path, asynchronous: bool = False) -> bool:
    """Saves a run whose states are away. Whether what would tear them meanwhile is refused."""
    if controller is None:
        dcp.save(state_of(run), checkpoint_id=name)
        return True
    controller.offload()
    with controller.checkpoint():
        state = state_of(run)
        if controller.state != "training":
            return False
        saving: Any = None
        if asynchronous:
            saving = dcp.async_save(state, checkpoint_id=name)
        else:
            dcp.save(state, checkpoint_id=name)
        try:
            controller.offload()
            return False
        except BusyError:
            pass
        if saving is not None:
            saving.result()
    return True


def saves(
    schedule: Schedule, folder: Path, before: bool, after: bool, asynchronous: bool
) -> object:
    """A run with a schedule or without (``before``) is saved; one with or without goes on."""
    name = folder / f"{schedule.name}-{before}-{after}-{asynchronous}"
    run, other = Sharded("fsdp2", WIDTH), Sharded("fsdp2", WIDTH)
    first, second = schedule if before else None, schedule if after else None
    with opens(first, run) as controller, opens(second, other) as another:
        for _ in range(3):
            run.step()
        if not save(run, controller, name, asynchronous):
            return "what a checkpoint forbids was done"
        expected = [one.detach().clone() for one in run.shards()]
        other.step()
        load(other, another, name)
        other.steps = run.steps
        if not all(map(torch.equal, expected, other.shards())):
            return "other values were loaded"
        for _ in range(3):
            run.step(), other.step()
        wrong = wrong_with(first, run, controller) or wrong_with(second, other, another)
        return wrong or same(run, other)


def by_parameter(run: Sharded) -> list[torch.Tensor]:
    """Parameters and states in the order of the parameters: what FSDP1 loads has another."""
    states = [run.optimizer.state[one] for one in run.model.parameters()]
    return [*run.model.parameters(), *(one[key] for one in states for key in sorted(one))]


def flat_shards_are_saved_whole(schedule: Schedule) -> object:
    """FSDP1 gathers the states of flat parameters on each rank, and loads them again."""
    whole = FullyShardedDataParallel
    alone, moved = Sharded("fsdp1_flat", WIDTH), Sharded("fsdp1_flat", WIDTH)
    with opens(schedule, moved, **flat_options(schedule, "fsdp1_flat")) as controller:
        for _ in range(3):
            alone.step(), moved.step()
        controller.offload()
        mine, theirs = (whole.optim_state_dict(r.model, r.optimizer) for r in (moved, alone))
        for name, state in theirs["state"].items():
            for key, value in state.items():
                if not torch.equal(value, mine["state"][name][key]):
                    return f"{name}.{key}"
        other = Sharded("fsdp1_flat", WIDTH)
        other.step()
        for run, given in ((moved, theirs), (other, mine)):
            copied = copy.deepcopy(given)
            loaded = whole.optim_state_dict_to_load(run.model, run.optimizer, copied)
            run.optimizer.load_state_dict(loaded)
        with torch.no_grad():
            for to, one in zip(other.model.parameters(), alone.model.parameters(), strict=True):
                to.copy_(one)
        other.steps = alone.steps
        for run in (alone, moved, other):
            run.step(), run.step()
        for run in (moved, other):
            if not all(map(torch.equal, by_parameter(alone), by_parameter(run))):
                return f"other bits {'with' if run is moved else 'without'} a schedule"
        return wrong_with(schedule, moved, controller) or True


def wholes(run: Sharded) -> list[torch.Tensor]:
    held = [*run.model.parameters(), *run.moments()]
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in held]


def kept_for_others(schedule: Schedule, folder: Path) -> object:
    """Saves what another number of ranks loads."""
    run = Sharded("fsdp2", WIDTH)
    with opens(schedule, run) as controller:
        for _ in range(3):
            run.step()
        save(run, controller, folder / f"others-{schedule.name}")
        found = wholes(run)
        if dist.get_rank() == 0:
            torch.save([one.detach().clone() for one in found], folder / "others-wholes")
    return True


def play_others(rank: int, folder: Path, ranks: int, kept: Path) -> dict[str, object]:
    """Loads as one of so many ranks what two have saved, each schedule what another has."""
    join(rank, ranks, folder, backend="cpu:gloo")
    expected = torch.load(kept / "others-wholes", weights_only=True)
    seen: dict[str, object] = {}
    for schedule, source in zip(SCHEDULES, (*SCHEDULES[1:], CYCLE), strict=True):
        alone, moved = Sharded("fsdp2", WIDTH), Sharded("fsdp2", WIDTH)
        with opens(schedule, moved) as controller:
            for run, its in ((alone, None), (moved, controller)):
                load(run, its, kept / f"others-{source.name}")
                run.steps = 3
            loaded = all(map(torch.equal, expected, wholes(moved)))
            for _ in range(3):
                alone.step(), moved.step()
            seen[schedule.name] = loaded and same(alone, moved)
    return seen


# ---- Threads.


def helpers() -> int:
    """How many threads of host steps this process has, and not those that call."""
    names = []
    for one in Path("/proc/self/task").iterdir():
        try:
            names.append((one / "comm").read_text().strip())
        except OSError:
            continue  # a thread that has ended
    return sum(name.startswith("refit-step") for name in names)


def threads_with(ranks: int | None) -> int:
    """How many threads compute in a step, as one of so many ranks of this machine."""
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    if ranks is not None:
        os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
    run = Sharded("fsdp2", WIDTH)
    try:
        with opens(ALL, run) as controller:
            run.step(), run.step()
            return 1 + helpers() if controller.stats()["refit/host_step_out_bytes"] else 0
    finally:
        os.environ.pop("LOCAL_WORLD_SIZE", None)


def ranks_divide_the_cpus() -> object:
    cpus = os.sched_getaffinity(0)
    alone = threads_with(None)
    for ranks in (2, 3, len(cpus), 4 * len(cpus)):
        each_takes = threads_with(ranks)
        if not 1 <= each_takes <= max(1, len(cpus) // ranks):
            return f"{each_takes} threads of each of {ranks} ranks, on {len(cpus)} CPUs"
    if not each_takes <= alone <= len(cpus):
        return f"{alone} threads on {len(cpus)} CPUs"
    os.sched_setaffinity(0, {min(cpus)})
    try:
        bound = threads_with(None), threads_with(2)
    finally:
        os.sched_setaffinity(0, cpus)
    return (bound == (1, 1) and helpers() == 0) or f"bound to one CPU: {bound}, left: {helpers()}"


# ---- accelerate.


def accelerated(schedule: Schedule, rank: int) -> object:
    """The loop of accelerate over ranks: accumulation, clipping and a schedule are its own."""
    try:
        import accelerate
    except ImportError:
        return True
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 60), nn.Linear(60, 60), nn.Linear(60, 60))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        host = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        runs.append((host, *host.prepare(model, optimizer, rates)))
    if type(runs[0][1]) is not DistributedDataParallel:
        return f"accelerate trains a {type(runs[0][1]).__name__}"
    with schedule.open(runs[1][2], runs[1][1]):
        for number in range(10):
            for host, model, optimizer, rates in runs:
                seed = torch.Generator().manual_seed(10 * number + rank)
                with host.accumulate(model):
                    host.backward(model(torch.randn(4, 6, generator=seed)).pow(2).mean())
                    if any(isinstance(one.grad, OffloadedTensor) for one in model.parameters()):
                        return "gradients have left, which the ranks are to average"
                    if host.sync_gradients:
                        host.clip_grad_norm_(model.parameters(), 0.05)
                    optimizer.step()
                    rates.step()
                    optimizer.zero_grad()
            if not all(map(torch.equal, runs[0][1].parameters(), runs[1][1].parameters())):
                return f"batch {number}: other bits"
    return True


Scene = Callable[[Schedule, int, Path], object]

TRAININGS: dict[str, tuple[Any, ...]] = {
    **{kind: (kind,) for kind in ("fsdp1", "fsdp1_flat", "fsdp2", "dtensor")},
    **{f"clipped {k}": (k, Clipped) for k in ("fsdp1", "fsdp1_flat", "fsdp2", "dtensor")},
    "momentum": ("fsdp2", Sharded, momentum),
    "fused": ("fsdp2", Sharded, fused, False),
    "added up after each batch": ("fsdp2", AddedOften),
}
"""What is trained, how its gradients are made, by which optimizer, and whether kernels know it."""
REPLICAS: dict[str, Callable[[], Replica]] = {
    "ddp": lambda: Replica(gradient_as_bucket_view=False),
    "ddp with views": lambda: Replica(gradient_as_bucket_view=True),
    "ddp with a static graph": lambda: Replica(static_graph=True),
    "ddp with a hook": lambda: Replica("fp16_compress_hook"),
    "ddp with a hook and views": lambda: Replica("allreduce_hook", gradient_as_bucket_view=True),
    "ddp with unused parameters": lambda: Replica(branches=True, find_unused_parameters=True),
    "averaged by hand": ByHand,
    "a rank without gradients": Unequal,
}
EACH: dict[str, Scene] = {
    **{name: lambda s, *_, of=of: trains(s, *of) for name, of in TRAININGS.items()},
    **{name: lambda s, *_, make=make: replicas(s, make) for name, make in REPLICAS.items()},
    "used by hand": lambda s, *_: used_by_hand(s),
    "mixed": lambda s, rank, _: mixed(s, rank),
    "saved with": lambda s, _, folder: saves(s, folder, True, False, False),
    "loaded with": lambda s, _, folder: saves(s, folder, False, True, False),
    "saved asynchronously": lambda s, _, folder: saves(s, folder, True, True, True),
    "flat shards are saved whole": lambda s, *_: flat_shards_are_saved_whole(s),
    "kept for others": lambda s, _, folder: kept_for_others(s, folder),
    "accelerated": lambda s, rank, _: accelerated(s, rank),
}
"""What is played with each schedule."""

PICKED = {"fraction": 1.0, "params": ["1.weight", "0.2.*"]}
SOME: dict[str, tuple[Schedule, Scene]] = {
    "used while away": (CYCLE, lambda s, *_: used_while_away(s)),
    "policies of fsdp1": (CYCLE, lambda s, *_: policies(s, "fsdp1")),
    "policies of fsdp1_flat": (CYCLE, lambda s, *_: policies(s, "fsdp1_flat")),
    "weights of fsdp1": (CYCLE, lambda s, rank, _: weights_of_fsdp1(s, rank)),
    "a rank without what is picked": (SHARE, lambda s, rank, _: mixed(s, rank, **PICKED)),
    "ranks divide the CPUs": (ALL, lambda *_: ranks_divide_the_cpus()),
}
CASES: dict[str, tuple[Schedule, Scene]] = {
    **{f"{name}, {one.name}": (one, scene) for name, scene in EACH.items() for one in SCHEDULES},
    **SOME,
}


def play(rank: int, folder: Path) -> dict[str, object]:
    """What one of two ranks saw in each case."""
    seen = {"ranks that meet later": ranks_that_meet_later(rank, folder)}
    for name, (schedule, scene) in CASES.items():
        seen[name] = scene(schedule, rank, folder)
    return seen
