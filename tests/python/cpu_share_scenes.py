"""What the ranks of test_cpu_share_distributed.py do: they train together, and a share of the
parameters is stepped on the CPU."""

import copy
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import refit
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from host_scenes import on_image
from ranks import join, leave
from refit.cpu_share import CpuShare, root_of_torch
from refit.errors import BusyError
from shard_scenes import Sharded, same
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
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

Scene = Callable[[int, Path], object]
Maker = Callable[..., torch.optim.Optimizer]
WIDTH = 301
"""Of the hidden layer: each rank's shard of it has states that live on the host."""
FRACTIONS = (0.5, 1.0)
FLAT = (0.75, 1.0)
"""Of two flat parameters, one of which has 70 % of the elements."""
THREADS = "refit-step"
"""The name of the host step's threads."""


def with_share(run: Any, fraction: float, **options: Any) -> refit.Controller:
    return refit.Controller(run.optimizer, run.model, host_fraction=fraction, **options)


def shares(controller: refit.Controller) -> list[CpuShare]:
    assert controller._host is not None
    return controller._host._shares


def by_kernel(controller: refit.Controller) -> int:
    """How many parameters the kernels of the C library step."""
    return sum(len(one._places) for one in shares(controller))


def stays(controller: refit.Controller) -> bool:
    """Whether no gradient has left before the step."""
    return not any(one._left for one in shares(controller))


def named(controller: refit.Controller) -> list[str]:
    return [name for name, why in controller.resident if "the CPU steps it" in why]


def told(controller: refit.Controller, known: bool = True) -> str | None:
    """What is wrong: the CPU is to step some parameters, all of them by kernels if ``known``."""
    on_cpu, kernels = len(named(controller)), by_kernel(controller)
    expected = on_cpu if known and root_of_torch() is not None else 0
    return None if on_cpu and kernels == expected else f"{kernels} of {on_cpu} by kernels"


# ---- Sharded training.


class Clipped(Sharded):
    """Each rank has a batch of its own, several make a step, and gradients are clipped over ranks.
    The ranks' gradients are added up behind the last batch only, or behind each (``adds_late``)."""

    adds_late = True
    limit = 0.05

    def gathers(self, last: bool) -> Any:
        if self.kind == "fsdp2":
            self.model.set_requires_gradient_sync(last or not self.adds_late)  # type: ignore[operator]
        elif self.kind.startswith("fsdp1") and self.adds_late and not last:
            return self.model.no_sync()  # type: ignore[operator]
        return nullcontext()

    def backward(self) -> None:
        for micro in range(3):
            seed = 100 * self.steps + 10 * micro
            if self.kind != "dtensor":
                seed += dist.get_rank()
            batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
            with self.gathers(micro == 2):
                self.model(self.shown(batch)).pow(2).mean().backward()

    def clip(self) -> torch.Tensor:
        if self.kind.startswith("fsdp1"):
            norm: Any = self.model.clip_grad_norm_(self.limit)  # type: ignore[operator]
        else:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.limit)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def step(self) -> None:
        self.backward()
        self.norm = self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1


def steps(
    kind: str, fraction: float, of: type[Sharded] = Sharded, make: Maker = torch.optim.AdamW
) -> object:
    known = make in KNOWN
    alone, moved = of(kind, WIDTH, make), of(kind, WIDTH, make)
    with with_share(moved, fraction) as controller:
        for number in range(5):
            alone.step(), moved.step()
            if not same(alone, moved):
                return f"step {number}: other bits"
            if of is Clipped and not torch.equal(alone.norm, moved.norm):  # type: ignore[attr-defined]
                return f"step {number}: another norm"
        moved.backward()
        if not stays(controller):
            return "gradients have left, which others may add to"
        alone.backward()
        alone.optimizer.step(), moved.optimizer.step()
        alone.optimizer.zero_grad(), moved.optimizer.zero_grad()
        wrong = told(controller, known)
        found = on_image(controller, moved.moments())
        if wrong or found != len(named(controller)) * STATES.get(make, 2):
            return wrong or f"{found} states lie on the image"
        controller.clear()
        controller.restore()
        alone.step(), moved.step()
        if not same(alone, moved):
            return "other bits behind a cycle"
    alone.step(), moved.step()
    return same(alone, moved) or "other bits behind the end"


def momentum(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, nesterov=True)


def fused(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, fused=True)


KNOWN: list[Maker] = [torch.optim.AdamW, momentum]
STATES: dict[Maker, int] = {momentum: 1}


def each(play: Callable[[float], object], fractions: tuple[float, ...] = FRACTIONS) -> object:
    """True, or what is wrong with which share."""
    seen = {fraction: play(fraction) for fraction in fractions}
    return True if all(one is True for one in seen.values()) else seen


def fsdp1(_rank: int, _folder: Path) -> object:
    return each(lambda fraction: steps("fsdp1", fraction))


def fsdp1_flat(_rank: int, _folder: Path) -> object:
    return each(lambda fraction: steps("fsdp1_flat", fraction), FLAT)


def fsdp2(_rank: int, _folder: Path) -> object:
    return each(lambda fraction: steps("fsdp2", fraction))


def dtensor(_rank: int, _folder: Path) -> object:
    return each(lambda fraction: steps("dtensor", fraction))


def momentum_of_fsdp2(_rank: int, _folder: Path) -> object:
    return each(lambda fraction: steps("fsdp2", fraction, make=momentum))


def fused_steps_of_fsdp2_are_torchs(_rank: int, _folder: Path) -> object:
    return each(lambda fraction: steps("fsdp2", fraction, make=fused))


def clipped_fsdp1(_rank: int, _folder: Path) -> object:
    return each(lambda fraction: steps("fsdp1", fraction, Clipped))


def clipped_fsdp1_flat(_rank: int, _folder: Path) -> object:
    return each(lambda fraction: steps("fsdp1_flat", fraction, Clipped), FLAT)


def clipped_fsdp2(_rank: int, _folder: Path) -> object:
    return each(lambda fraction: steps("fsdp2", fraction, Clipped))


def clipped_dtensor(_rank: int, _folder: Path) -> object:
    return each(lambda fraction: steps("dtensor", fraction, Clipped))


class AddedOften(Clipped):
    adds_late = False


def added_up_behind_each_batch(_rank: int, _folder: Path) -> object:
    return each(lambda fraction: steps("fsdp2", fraction, AddedOften))


def used_by_hand(_rank: int, _folder: Path) -> object:
    """States are read and written as DTensors between steps, and gradients before a step."""

    def play(fraction: float) -> object:
        alone, moved = Sharded("fsdp2", WIDTH), Sharded("fsdp2", WIDTH)
        with with_share(moved, fraction) as controller:
            for _ in range(4):
                for run in (alone, moved):
                    run.step()
                    for one in run.moments():
                        one.mul_(0.5)
                    run.backward()
                    for one in run.model.parameters():
                        one.grad = one.grad * 2  # type: ignore[operator]
                    for state in run.optimizer.state.values():
                        state["step"] += 3
                seen = [[t.full_tensor() for t in run.moments()] for run in (alone, moved)]  # type: ignore[attr-defined]
                if not all(map(torch.equal, *seen)):
                    return "other values"
            copied = copy.deepcopy(moved.optimizer.state_dict())
            alone.step(), moved.step()
            return told(controller) or (same(alone, moved) and len(copied["state"]) == 4)

    return each(play)


class Mixed:
    """Plain parameters, DTensors and shards of FSDP2 in one optimizer of two groups; of the second
    group rank 1 has a shard without elements."""

    def __init__(self) -> None:
        torch.manual_seed(9)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model = nn.Sequential(
            nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 40), nn.Tanh(), nn.Linear(40, 7)
        )
        plain, shared, last = self.model[0], self.model[2], self.model[4]
        self.odd = nn.Linear(300, 1)
        for name in ("weight", "bias"):
            whole = getattr(shared, name).detach()
            setattr(shared, name, nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])))
        fully_shard(last, mesh=mesh)
        fully_shard(self.odd, mesh=mesh)
        self.mesh = mesh
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [*plain.parameters(), *shared.parameters()]},
                {"params": [*last.parameters(), *self.odd.parameters()], "lr": 0.3, "eps": 1e-3},
            ],
            lr=1e-2,
        )
        self.steps = 0

    def parameters(self) -> list[Any]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def step(self) -> None:
        source = torch.Generator().manual_seed(self.steps)
        for one in self.parameters():
            whole = torch.randn(one.shape, generator=source)
            split = distribute_tensor(whole, self.mesh, [Shard(0)])
            one.grad = split if isinstance(one, DTensor) else whole
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def moments(self) -> list[torch.Tensor]:
        return [t for s in self.optimizer.state.values() for t in s.values() if t.dim() > 0]

    def shards(self) -> list[torch.Tensor]:
        held = [*self.parameters(), *self.moments()]
        return [t.to_local() if isinstance(t, DTensor) else t for t in held]


def mixed(_rank: int, _folder: Path) -> object:
    def play(fraction: float) -> object:
        alone, moved = Mixed(), Mixed()
        with with_share(moved, fraction) as controller:
            for number in range(4):
                alone.step(), moved.step()
                if not same(alone, moved):  # type: ignore[arg-type]
                    return f"step {number}: other bits"
            return told(controller) or True

    return each(play)


def a_rank_without_elements_of_what_is_picked(rank: int, _folder: Path) -> object:
    """Names hold on each rank, also on one whose shard of such a parameter is empty."""
    alone, moved = Mixed(), Mixed()
    model = nn.ModuleList([moved.model, moved.odd])
    options: dict[str, Any] = {"host_pick": ["1.weight", "0.2.*"]}
    with refit.Controller(moved.optimizer, model, **options) as controller:
        for _ in range(4):
            alone.step(), moved.step()
        picked = ["0.2.weight", "1.weight"] if rank == 0 else ["0.2.weight"]
        if sorted(named(controller)) != picked:
            return named(controller)
        return told(controller) or same(alone, moved)  # type: ignore[arg-type]


# ---- Replicas.


class Replica:
    """A model that each rank has as a whole; their gradients are averaged."""

    def __init__(self, hook: str = "", branches: bool = False, **options: Any) -> None:
        torch.manual_seed(5)
        layers = [nn.Linear(6, 60), nn.Tanh(), nn.Linear(60, 60), nn.Linear(60, 60)]
        self.inner = Branching(*layers) if branches else nn.Sequential(*layers)
        self.model: nn.Module = DistributedDataParallel(self.inner, bucket_cap_mb=0.005, **options)
        if hook:
            self.model.register_comm_hook(None, getattr(default_hooks, hook))  # type: ignore[operator]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.batches = 1 if options.get("static_graph") else 2  # PyTorch adds none up there
        self.steps = 0

    def gathers(self, last: bool) -> Any:
        return nullcontext() if last else self.model.no_sync()  # type: ignore[operator]

    def backward(self) -> None:
        self.inner.steps = self.steps
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

    def moments(self) -> list[torch.Tensor]:
        return [t for s in self.optimizer.state.values() for t in s.values() if t.dim() > 0]

    def shards(self) -> list[torch.Tensor]:
        return [*self.model.parameters(), *self.moments()]

    def counts(self) -> list[float]:
        return [float(one["step"]) for one in self.optimizer.state.values()]


class Branching(nn.Sequential):
    """Leaves its last layer out in some steps: on one of the ranks, or on all."""

    steps = 0

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        left_out = self.steps % 3 == 2 or (self.steps % 3 == 1 and dist.get_rank() == 1)
        for layer in self[:-1] if left_out else self:
            batch = layer(batch)
        return batch


def plays(make: Callable[[], Replica]) -> object:
    """The same training with and without a share, in steps that each rank ends alike."""

    def play(fraction: float) -> object:
        alone, moved = make(), make()
        with with_share(moved, fraction) as controller:
            for number in range(7):
                alone.backward(), moved.backward()
                if not stays(controller):
                    return "gradients have left, which the ranks are to average"
                alone.finish(), moved.finish()
                if not (same(alone, moved) and torch.equal(alone.norm, moved.norm)):  # type: ignore[arg-type]
                    return f"step {number}: other bits"
                if alone.counts() != moved.counts():
                    return f"step {number}: {alone.counts()} {moved.counts()}"
            return told(controller) or True

    return each(play)


def ddp(_rank: int, _folder: Path) -> object:
    return plays(lambda: Replica(gradient_as_bucket_view=False))


def ddp_with_views(_rank: int, _folder: Path) -> object:
    return plays(lambda: Replica(gradient_as_bucket_view=True))


def ddp_with_static_graph(_rank: int, _folder: Path) -> object:
    return plays(lambda: Replica(static_graph=True))


def ddp_with_a_hook(_rank: int, _folder: Path) -> object:
    return plays(lambda: Replica("fp16_compress_hook"))


def ddp_with_a_hook_and_views(_rank: int, _folder: Path) -> object:
    return plays(lambda: Replica("allreduce_hook", gradient_as_bucket_view=True))


def ddp_with_unused_parameters(_rank: int, _folder: Path) -> object:
    return plays(lambda: Replica(branches=True, find_unused_parameters=True))


class ByHand(Replica):
    """Without a wrapper: gradients are final behind an ``all_reduce`` of the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.model = self.inner

    def gathers(self, last: bool) -> Any:
        return nullcontext()

    def backward(self) -> None:
        super().backward()
        for one in self.model.parameters():
            dist.all_reduce(one.grad)


def averaged_by_hand(_rank: int, _folder: Path) -> object:
    return plays(ByHand)


class Unequal(ByHand):
    """As with experts: in some steps no parameter of rank 1's share has a gradient, in some no
    parameter at all, and each rank counts the steps of each of its parameters."""

    def backward(self) -> None:
        Replica.backward(self)
        if dist.get_rank() == 1 and self.steps % 3 != 1:
            for at, one in enumerate(self.model.parameters()):
                one.grad = one.grad if at < 2 and self.steps % 3 == 0 else None


def a_rank_without_gradients(_rank: int, _folder: Path) -> object:
    return plays(Unequal)


def ranks_that_meet_later(rank: int, folder: Path) -> object:
    """Gradients leave during a backward pass until the ranks join a group, and then stay. Played
    before there is one."""
    alone, moved = (nn.Linear(40, 40) for _ in range(2))
    moved.load_state_dict(alone.state_dict())
    makes = [torch.optim.AdamW(one.parameters()) for one in (alone, moved)]
    with refit.Controller(makes[1], moved, host_fraction=1.0) as controller:
        left = []
        for number in range(6):
            for one in (alone, moved):
                one(torch.full((2, 40), 0.1 * number + rank)).pow(2).mean().backward()
            left.append(not stays(controller))
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


def share_if(run: Any, fraction: float, wanted: bool) -> Any:
    return with_share(run, fraction) if wanted else nullcontext()


def state_of(run: Sharded) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(run.model),
        "optimizer": get_optimizer_state_dict(run.model, run.optimizer),
    }


def load(run: Sharded, name: Path) -> None:
    loaded = state_of(run)
    dcp.load(loaded, checkpoint_id=name)
    set_model_state_dict(run.model, loaded["model"])
    set_optimizer_state_dict(run.model, run.optimizer, loaded["optimizer"])


def save(run: Sharded, controller: Any, name: Path, asynchronous: bool) -> bool:
    """Saves a run. Whether a step meanwhile is refused, where a controller is to refuse it."""
    with nullcontext() if controller is None else controller.checkpoint():
        if not asynchronous:
            dcp.save(state_of(run), checkpoint_id=name)
            return True
        saving: Any = dcp.async_save(state_of(run), checkpoint_id=name)
        try:
            if controller is not None:
                run.optimizer.step()
            refused = controller is None
        except BusyError:
            refused = True
        saving.result()
        return refused


def saves(folder: Path, before: bool, behind: bool, asynchronous: bool) -> object:
    """A run with a share or without (``before``) is saved; one with or without goes on."""

    def play(fraction: float) -> object:
        name = folder / f"{before}-{behind}-{asynchronous}-{fraction}"
        run, other = Sharded("fsdp2", WIDTH), Sharded("fsdp2", WIDTH)
        with (
            share_if(run, fraction, before) as controller,
            share_if(other, fraction, behind) as second,
        ):
            for _ in range(3):
                run.step()
            if not save(run, controller, name, asynchronous):
                return "a step that a checkpoint forbids was made"
            expected = [one.detach().clone() for one in run.shards()]
            other.step()
            load(other, name)
            other.steps = run.steps
            if not all(map(torch.equal, expected, other.shards())):
                return "other values were loaded"
            for _ in range(3):
                run.step(), other.step()
            wrong = [told(one) for one in (controller, second) if one is not None]
            return next(filter(None, wrong), None) or same(run, other)

    return each(play)


def saved_with_a_share(_rank: int, folder: Path) -> object:
    return saves(folder, True, False, False)


def loaded_by_a_share(_rank: int, folder: Path) -> object:
    return saves(folder, False, True, False)


def saved_behind_by_shares(_rank: int, folder: Path) -> object:
    return saves(folder, True, True, True)


def wholes(run: Sharded) -> list[torch.Tensor]:
    held = [*run.model.parameters(), *run.moments()]
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in held]


def by_parameter(run: Sharded) -> list[torch.Tensor]:
    """Parameters and states in the order of the parameters: what FSDP1 loads has another."""
    states = [run.optimizer.state[one] for one in run.model.parameters()]
    return [*run.model.parameters(), *(one[key] for one in states for key in sorted(one))]


def flat_shards_are_saved_whole(_rank: int, _folder: Path) -> object:
    """What FSDP1 makes of the states is what it makes without a share, and is loaded by one. (With
    ``use_orig_params`` PyTorch 2.13 itself loads the one moment for the other.)"""

    def play(fraction: float) -> object:
        alone, moved = Sharded("fsdp1_flat", WIDTH), Sharded("fsdp1_flat", WIDTH)
        whole = FullyShardedDataParallel
        with with_share(moved, fraction) as controller:
            for _ in range(3):
                alone.step(), moved.step()
            mine, theirs = (whole.optim_state_dict(r.model, r.optimizer) for r in (moved, alone))
            for name, state in theirs["state"].items():
                for key, value in state.items():
                    if not torch.equal(value, mine["state"][name][key]):
                        return f"{name}.{key}"
            other = Sharded("fsdp1_flat", WIDTH)
            other.step()
            for run, given in ((moved, theirs), (other, mine)):
                loaded = whole.optim_state_dict_to_load(
                    run.model, run.optimizer, copy.deepcopy(given)
                )
                run.optimizer.load_state_dict(loaded)
            with torch.no_grad():
                for to, one in zip(other.model.parameters(), alone.model.parameters(), strict=True):
                    to.copy_(one)
            other.steps = alone.steps
            for run in (alone, moved, other):
                run.step(), run.step()
            for run in (moved, other):
                if not all(map(torch.equal, by_parameter(alone), by_parameter(run))):
                    return f"other bits {'with' if run is moved else 'without'} a share"
            return told(controller) or True

    return each(play, FLAT)


def kept_for_others(_rank: int, folder: Path) -> object:
    """Saves what ``play_others`` loads."""
    for with_it in (True, False):
        run = Sharded("fsdp2", WIDTH)
        with share_if(run, 1.0, with_it) as controller:
            for _ in range(3):
                run.step()
            save(run, controller, folder / f"others-{with_it}", False)
            found = wholes(run)
            if dist.get_rank() == 0:
                torch.save([one.detach().clone() for one in found], folder / "others-wholes")
    return True


def loaded_by_others(folder: Path) -> object:
    """Saved by two ranks, with a share and without, and loaded by as many as there are."""

    def play(fraction: float) -> object:
        expected = torch.load(folder / "others-wholes", weights_only=True)
        for saved_with in (True, False):
            alone, moved = Sharded("fsdp2", WIDTH), Sharded("fsdp2", WIDTH)
            with with_share(moved, fraction) as controller:
                for run in (alone, moved):
                    load(run, folder / f"others-{saved_with}")
                    run.steps = 3
                    if not all(map(torch.equal, expected, wholes(run))):
                        return "other values were loaded"
                for _ in range(3):
                    alone.step(), moved.step()
                if told(controller) or not same(alone, moved):
                    return told(controller) or "other bits"
        return True

    return each(play)


# ---- Threads.


def helpers() -> int:
    """How many threads of host steps this process has, besides those that call."""
    names = []
    for one in Path("/proc/self/task").iterdir():
        try:
            names.append((one / "comm").read_text().strip())
        except OSError:
            continue  # a thread that has ended
    return sum(name.startswith(THREADS) for name in names)


def threads_with(ranks: int | None) -> int:
    """How many threads compute in a step, as one of so many ranks of this machine."""
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    if ranks is not None:
        os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
    run = Sharded("fsdp2", WIDTH)
    try:
        with with_share(run, 1.0) as controller:
            run.step(), run.step()
            return 1 + helpers() if by_kernel(controller) else 0
    finally:
        os.environ.pop("LOCAL_WORLD_SIZE", None)


def ranks_divide_the_cpus(_rank: int, _folder: Path) -> object:
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


def accelerated(rank: int, _folder: Path) -> object:
    """The loop of accelerate over ranks: accumulation, clipping and a schedule are its own."""
    try:
        import accelerate
    except ImportError:
        return True
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")

    def play(fraction: float) -> object:
        runs = []
        for _ in range(2):
            torch.manual_seed(3)
            model = nn.Sequential(nn.Linear(6, 60), nn.Linear(60, 60), nn.Linear(60, 60))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            host = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
            runs.append((host, *host.prepare(model, optimizer, schedule)))
        if type(runs[0][1]) is not DistributedDataParallel:
            return f"accelerate trains a {type(runs[0][1]).__name__}"
        with refit.Controller(runs[1][2], runs[1][1], host_fraction=fraction) as controller:
            for number in range(10):
                for host, model, optimizer, schedule in runs:
                    seed = torch.Generator().manual_seed(10 * number + rank)
                    with host.accumulate(model):
                        host.backward(model(torch.randn(4, 6, generator=seed)).pow(2).mean())
                        if host.sync_gradients:
                            host.clip_grad_norm_(model.parameters(), 0.05)
                        optimizer.step()
                        schedule.step()
                        optimizer.zero_grad()
                pairs = zip(runs[0][1].parameters(), runs[1][1].parameters(), strict=True)
                if not (stays(controller) and all(torch.equal(a, b) for a, b in pairs)):
                    return f"batch {number}: other bits"
            return told(controller) or True

    return each(play)


SCENES: list[Scene] = [
    ranks_that_meet_later,
    fsdp1,
    fsdp1_flat,
    fsdp2,
    dtensor,
    momentum_of_fsdp2,
    fused_steps_of_fsdp2_are_torchs,
    clipped_fsdp1,
    clipped_fsdp1_flat,
    clipped_fsdp2,
    clipped_dtensor,
    added_up_behind_each_batch,
    used_by_hand,
    mixed,
    a_rank_without_elements_of_what_is_picked,
    ddp,
    ddp_with_views,
    ddp_with_static_graph,
    ddp_with_a_hook,
    ddp_with_a_hook_and_views,
    ddp_with_unused_parameters,
    averaged_by_hand,
    a_rank_without_gradients,
    saved_with_a_share,
    loaded_by_a_share,
    saved_behind_by_shares,
    flat_shards_are_saved_whole,
    kept_for_others,
    ranks_divide_the_cpus,
    accelerated,
]


def play(rank: int, folder: str) -> NoReturn:
    """Plays all scenes as one of two ranks."""
    torch.set_num_threads(1)
    seen = {scene.__name__: scene(rank, Path(folder)) for scene in SCENES}
    torch.save(seen, Path(folder) / f"rank{rank}of2")
    leave()


def play_others(rank: int, ranks: int, folder: str) -> NoReturn:
    """Loads as one of so many ranks what two have saved."""
    torch.set_num_threads(1)
    join(rank, ranks, Path(folder), backend="cpu:gloo")
    seen = {"loaded": loaded_by_others(Path(folder))}
    torch.save(seen, Path(folder) / f"rank{rank}of{ranks}")
    leave()
