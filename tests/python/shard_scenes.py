"""What the ranks of test_distributed.py do: the same sharded training, with and without refit."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import refit
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import join
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

Scene = Callable[[int, Path], object]


def net(width: int = 9) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))


class Sharded:
    """One training run on this rank's shards; odd sizes, so that one rank has less."""

    def __init__(
        self, kind: str, width: int = 9, make: Callable[..., Any] = torch.optim.AdamW
    ) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model: nn.Module = net(width)
        if kind == "fsdp2":
            fully_shard(self.model[0], mesh=mesh)  # type: ignore[index]
            fully_shard(self.model, mesh=mesh)
        elif kind.startswith("fsdp1"):
            given = {"use_orig_params": kind == "fsdp1", "device_id": torch.device("cpu")}
            self.model[0] = FullyShardedDataParallel(self.model[0], **given)  # type: ignore[index,operator,arg-type]
            self.model = FullyShardedDataParallel(self.model, **given)  # type: ignore[arg-type]
        else:
            for module in (self.model[0], self.model[2]):  # type: ignore[index]
                weight = distribute_tensor(module.weight.detach(), mesh, [Shard(0)])
                module.weight = nn.Parameter(weight)
                module.bias = nn.Parameter(
                    distribute_tensor(module.bias.detach(), mesh, [Shard(0)])
                )
        self.kind, self.mesh, self.steps = kind, mesh, 0
        self.optimizer = make(self.model.parameters(), lr=1e-2)

    def backward(self) -> None:
        """Gradients that add up."""
        self.model(self.shown(torch.ones(4, 6))).sum().backward()

    def shown(self, batch: torch.Tensor) -> torch.Tensor:
        """A batch as the model takes it."""
        if self.kind != "dtensor":
            return batch
        return distribute_tensor(batch, self.mesh, [Shard(0)]).redistribute(
            placements=[torch.distributed.tensor.Replicate()]
        )

    def step(self) -> None:
        batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(self.steps))
        self.model(self.shown(batch)).pow(2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def moments(self) -> list[torch.Tensor]:
        return [t for s in self.optimizer.state.values() for t in s.values() if t.dim() > 0]

    def shards(self) -> list[torch.Tensor]:
        held = [*self.model.parameters(), *self.moments()]
        return [t.to_local() if isinstance(t, DTensor) else t for t in held]


def same(one: Sharded, other: Sharded) -> bool:
    pairs = zip(one.shards(), other.shards(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def cycles(kind: str) -> object:
    alone, moved = Sharded(kind), Sharded(kind)
    with refit.Controller(moved.optimizer, moved.model) as controller:
        for _ in range(3):
            alone.step()
            moved.step()
            before = [(id(t), t.shape, t.stride()) for t in moved.moments()]
            kinds = [type(t) for t in moved.moments()]
            controller.clear()
            shards = [t._local_tensor for t in moved.moments() if isinstance(t, DTensor)]
            away = all(t.untyped_storage().nbytes() == 0 for t in shards)
            controller.restore()
            alone.backward(), moved.backward()
            if not controller.accumulating:
                return "no accumulation is seen"
            alone.step()
            moved.step()
            after = [(id(t), t.shape, t.stride()) for t in moved.moments()]
            if not (away and before == after and kinds == [type(t) for t in moved.moments()]):
                return f"away {away}, {before} {after}"
            if controller.accumulating or any(
                "DeviceMesh" in why for _, why in controller.resident
            ):
                return f"{controller.accumulating} {controller.resident}"
    return len(shards) > 0 and same(alone, moved)


USES: list[Callable[[Any, Any], Any]] = [
    lambda t, _: t.to_local().clone(),
    lambda t, _: t._local_tensor + 0,
    lambda t, _: t.full_tensor(),
    lambda t, _: (t * 2).to_local(),
    lambda t, other: torch.linalg.vector_norm(t - other.mul(0.5)).full_tensor(),
    lambda t, _: torch._foreach_mul_([t], 0.5) and t.to_local().clone(),
    lambda t, _: t.add_(0.25).to_local().clone(),
    lambda t, _: copy.deepcopy(t).to_local(),
    lambda t, _: t.redistribute(placements=[torch.distributed.tensor.Replicate()]).to_local(),
]
"""What gives plain tensors from DTensors, and changes some."""


def used_by_hand(_rank: int, _folder: Path) -> object:
    """States that are away are used, as DTensors and by what they hold."""
    alone, moved = Sharded("fsdp2"), Sharded("fsdp2")
    with refit.Controller(moved.optimizer, moved.model) as controller:
        alone.step(), moved.step()
        for number, use in enumerate(USES):
            controller.clear()
            one, two = moved.moments()[:2]
            shapes = (one.shape, one.device_mesh, one.placements, isinstance(one, DTensor))
            if controller.state != "cleared" or shapes[-1] is not True:
                return f"{number}: {shapes} brought the states back"
            if not torch.equal(use(one, two), use(*alone.moments()[:2])):
                return f"{number}: other bytes"
            if controller.state != "training" or type(one) is not DTensor:
                return f"{number}: {controller.state}, {type(one)}"
        alone.step(), moved.step()
    return same(alone, moved)


def fsdp1_cycles(kind: str) -> object:
    found = [fsdp1_policy(kind, policy) for policy in ("keep", "discard", "zero")]
    return found == [True] * 3 or found


def fsdp1_policy(kind: str, policy: Any) -> object:
    """Gradients add up on both sides of a clear, with a rollout while states are away."""
    alone, moved = Sharded(kind), Sharded(kind)
    with refit.Controller(moved.optimizer, moved.model, grads=policy) as controller:
        for number in range(4):
            for run in (alone, moved):
                run.step()
                if policy == "keep":
                    run.backward()
            controller.clear()
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
        controller.clear()
        mine = FullyShardedDataParallel.optim_state_dict(moved.model, moved.optimizer)
        yours = FullyShardedDataParallel.optim_state_dict(alone.model, alone.optimizer)
    equal = all(
        torch.equal(value, yours["state"][name][key])
        for name, state in mine["state"].items()
        for key, value in state.items()
    )
    return equal and bool(mine["state"]) and same(alone, moved)


def fsdp1_weights(rank: int, _folder: Path) -> object:
    """Flat parameters are refused with a sentence, and sent by the way that it says."""
    run = Sharded("fsdp1")
    run.step()
    try:
        list(refit.named_weights(run.model))
    except refit.UnsupportedError as why:
        said = str(why)
    with refit.Controller(run.optimizer, run.model) as controller:
        whole = FullyShardedDataParallel.summon_full_params(run.model)
        if rank:
            with controller.refit() as tx, whole:
                pass
            return "within FSDP.summon_full_params(model)" in said or said
        with refit.Publisher("tcp://127.0.0.1:0") as publisher:
            with controller.refit(publisher=publisher) as tx, whole:
                tx.send(dict(run.model.named_parameters()))
            names = [one.name for one in publisher.declared]
            shapes = [one.shape for one in publisher.declared]
            right = (names, shapes) == (
                ["0.weight", "0.bias", "2.weight", "2.bias"],
                [(9, 6), (9,), (3, 9), (3,)],
            )
            right = right and "within FSDP.summon_full_params(model)" in said
            return (right and tx.committed) or f"{said} {names} {shapes}"


def whole(state: dict[str, Any]) -> dict[str, Any]:
    """A copy of a state_dict whose tensors nothing else writes."""
    return copy.deepcopy(state)


def optimizer_state_is_asked_for_while_away(_rank: int, _folder: Path) -> object:
    run = Sharded("fsdp2")
    run.step()
    expected = whole(get_optimizer_state_dict(run.model, run.optimizer))
    with refit.Controller(run.optimizer, run.model) as controller:
        controller.clear()
        given = get_optimizer_state_dict(run.model, run.optimizer)
        there = controller.state == "training"
        equal = all(
            torch.equal(local(value), local(given["state"][name][key]))
            for name, state in expected["state"].items()
            for key, value in state.items()
        )
        controller.clear()
        set_optimizer_state_dict(run.model, run.optimizer, expected)
        run.step()
    return there and equal


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def saves(folder: Path, asynchronous: bool) -> object:
    """Saved while away; then loaded into another run, which goes on as one that never stopped."""
    run, other = Sharded("fsdp2"), Sharded("fsdp2")
    run.step()
    with refit.Controller(run.optimizer, run.model) as controller:
        controller.clear()
        state = {
            "model": get_model_state_dict(run.model),
            "optimizer": get_optimizer_state_dict(run.model, run.optimizer),
        }
        if asynchronous:
            with controller.checkpoint():  # no clear() may take what the writer still reads
                saving = dcp.async_save(state, checkpoint_id=folder / "async")
                try:
                    controller.clear()
                except refit.errors.BusyError:
                    refused = True
                saving.result()
        else:
            refused = True
            dcp.save(state, checkpoint_id=folder / "sync")
        controller.clear()
    other.step()
    loaded = {
        "model": get_model_state_dict(other.model),
        "optimizer": get_optimizer_state_dict(other.model, other.optimizer),
    }
    for tensor in other.shards():
        tensor.detach().zero_()
    dcp.load(loaded, checkpoint_id=folder / ("async" if asynchronous else "sync"))
    set_optimizer_state_dict(other.model, other.optimizer, loaded["optimizer"])
    run.step()
    other.step()
    return refused and same(run, other)


SCENES: dict[str, Scene] = {
    "fsdp2": lambda *_: cycles("fsdp2"),
    "dtensor": lambda *_: cycles("dtensor"),
    "fsdp1": lambda *_: fsdp1_cycles("fsdp1"),
    "fsdp1_flat": lambda *_: fsdp1_cycles("fsdp1 flat"),
    "fsdp1_weights_are_not_published_as_they_are": fsdp1_weights,
    "states_that_are_away_may_be_used": used_by_hand,
    "a_distributed_state_dict_brings_states_back_first": optimizer_state_is_asked_for_while_away,
    "a_checkpoint_saved_while_states_were_away_is_whole": lambda _, folder: saves(folder, False),
    "an_asynchronous_checkpoint_is_not_torn_by_a_clear": lambda _, folder: saves(folder, True),
}
"""Traps 2, 5, 11, 13 to 16 and 34. Each scene returns True."""


def play(rank: int, folder: Path) -> dict[str, object]:
    """What one of two ranks saw in each scene."""
    join(rank, 2, folder)
    return {name: scene(rank, folder) for name, scene in SCENES.items()}
