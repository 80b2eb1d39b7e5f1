"""Activations leave where ranks train together: DDP, FSDP1, FSDP2 and DTensor, with each way of
checkpointing, on two ranks, which meet by gloo: their tensors lie on the host on any machine."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import ranks
import refit
import torch
import torch.distributed as dist
import torch.nn.functional as F
from activation_scenes import MODELS, quiet, same_bits
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), ranks.needs_fsdp2]

Scene = Callable[[], object]
WIDTH = 18


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 30), nn.Linear(30, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.dropout(F.gelu(self.up(x)), 0.2))


class Net(nn.Module):
    def __init__(self, way: str = "none") -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleList(Layer() for _ in range(5))
        self.head = nn.Linear(WIDTH, 3)
        self.gain = nn.Parameter(torch.rand(WIDTH))
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.gain  # so that it has a gradient, which reentrant checkpointing asks for
        for layer in self.layers:
            if self.way in ("none", "wrapper"):
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.way == "reentrant")
        result: torch.Tensor = self.head(x).pow(2).mean()
        return result


def made(kind: str, way: str) -> tuple[nn.Module, Any]:
    """A model as it is trained, and its layers."""
    model = Net(way)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if way == "wrapper":
        for number, layer in enumerate(model.layers):
            model.layers[number] = checkpoint_wrapper(
                layer, checkpoint_impl=CheckpointImpl.NO_REENTRANT
            )
    if kind == "ddp":
        return DistributedDataParallel(model), model.layers
    if kind == "ddp static":
        return DistributedDataParallel(model, static_graph=True), model.layers
    if kind.startswith("fsdp1"):
        options: dict[str, Any] = {
            "use_orig_params": kind == "fsdp1",
            "device_id": torch.device("cpu"),
        }
        for number, layer in enumerate(model.layers):
            model.layers[number] = FullyShardedDataParallel(layer, **options)
        return FullyShardedDataParallel(model, **options), model.layers
    if kind.startswith("fsdp2"):
        shards: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": "whole" not in kind}
        if "bf16" in kind:
            shards["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for layer in model.layers:
            fully_shard(layer, **shards)
        return fully_shard(model, **shards), model.layers
    if kind == "tensor parallel":
        for layer in model.layers:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(layer, mesh, plan)
    elif kind == "dtensor":
        for module in model.modules():
            for name, one in list(module.named_parameters(recurse=False)):
                sharded = distribute_tensor(one.detach(), mesh, [Shard(0)])
                setattr(module, name, nn.Parameter(sharded))
    return model, model.layers


def batch(kind: str, number: int) -> torch.Tensor:
    alike = kind in ("dtensor", "tensor parallel")
    seed = 10 * number + (0 if alike else dist.get_rank())
    found = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))
    if kind != "dtensor":
        return found
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(found, mesh, [Replicate()])


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def trained(
    kind: str, way: str, entry: str | None, accumulation: int, **options: Any
) -> tuple[list[torch.Tensor], float]:
    """Gradients and parameters of some steps, and the bytes that left."""
    model, layers = made(kind, way)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[torch.Tensor] = []
    activations: Any = None
    if entry is not None:
        given = {"host_bytes": "4MiB", "min_bytes": 1, "aim": "memory", **options}
        activations = refit.ActivationOffload(model, layers, **given)
        if entry == "attach":
            activations.attach()
    block: Callable[[], Any] = (lambda: activations) if entry == "with" else nullcontext
    left = 0.0
    for step in range(3):
        torch.manual_seed(100 + step)
        for micro in range(accumulation):
            last = micro == accumulation - 1
            quietly: Any = nullcontext()
            if kind.startswith("fsdp2"):
                model.set_requires_gradient_sync(last)  # type: ignore[operator]
            elif not last and hasattr(model, "no_sync") and way != "reentrant":
                quietly = model.no_sync()
            with quietly:
                with block():
                    loss = model(batch(kind, 3 * step + micro))
                loss.backward()
        found = [one.grad for one in model.parameters() if one.grad is not None]
        seen += [local(one).detach().clone() for one in (*found, *model.parameters())]
        seen.append(local(loss).detach().clone())
        optimizer.step()
        optimizer.zero_grad()
        del loss
    if activations is not None:
        left = activations.stats()["refit/activation_left_bytes_last"]
        used = activations.stats()["refit/activation_used_bytes"]
        activations.close()
        assert used == 0, used
    return seen, left


def compared(kind: str, ways: tuple[str, ...], accumulation: int) -> object:
    with quiet():
        for way in ways:
            expected, _ = trained(kind, way, None, accumulation)
            for entry in ("with", "attach"):
                found, left = trained(kind, way, entry, accumulation)
                if not left > 0:
                    return f"{way}, {entry}: nothing left"
                if len(found) != len(expected) or not all(map(same_bits, expected, found)):
                    return f"{way}, {entry}: other bits"
    return True


WAYS = ("none", "reentrant", "non-reentrant", "wrapper")
COMPARED: dict[str, tuple[str, tuple[str, ...], int]] = {
    "ddp": ("ddp", ("none", "non-reentrant", "wrapper"), 2),
    "ddp_static": ("ddp static", WAYS, 1),
    "fsdp1": ("fsdp1", ("none", "non-reentrant", "wrapper"), 2),
    "fsdp1_flat": ("fsdp1 flat", ("none", "non-reentrant"), 2),
    "fsdp2": ("fsdp2", WAYS, 2),
    "fsdp2_that_stays_whole": ("fsdp2 whole", WAYS, 2),
    "fsdp2_in_bf16": ("fsdp2 bf16", WAYS, 2),
    "dtensors": ("dtensor", ("none",), 2),
    "tensor_parallel": ("tensor parallel", ("none", "non-reentrant"), 2),
}
"""The kind of model, its ways of checkpointing, and the accumulated steps."""


def fsdp2_for_overlap() -> object:
    with quiet():
        expected, _ = trained("fsdp2", "none", None, 2)
        found, _ = trained("fsdp2", "none", "with", 2, aim="overlap", prefetch=3, in_flight=2)
    return all(map(same_bits, expected, found))


def fsdp2_parameters_never_leave() -> object:
    """Nor what they are gathered to: as many bytes leave as of a model that is not sharded."""
    with quiet():
        _, whole = trained("plain", "none", "with", 2)
        lefts = {
            kind: trained(kind, "none", "with", 2)[1] for kind in ("fsdp2", "fsdp2 whole", "fsdp1")
        }
    return True if set(lefts.values()) == {whole} else f"{whole} {lefts}"


def llama_of_fsdp2() -> object:
    def run(entry: bool) -> tuple[list[torch.Tensor], float]:
        scene = MODELS["llama"]
        model: Any = scene.model()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        mesh = init_device_mesh("cpu", (2,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        activations: Any = nullcontext()
        if entry:
            activations = refit.ActivationOffload(
                model, host_bytes="8MiB", min_bytes=1, aim="memory"
            )
        for step in range(3):
            model.zero_grad()
            torch.manual_seed(step)
            with activations:
                loss = scene.loss(model, scene.drawn(dist.get_rank()))
            loss.backward()
        left = activations.stats()["refit/activation_left_bytes_last"] if entry else 0.0
        found = [local(one.grad).clone() for one in model.parameters() if one.grad is not None]
        if entry:
            activations.close()
        return found, left

    with quiet():
        (expected, _), (found, left) = run(False), run(True)
    return left > 0 and all(map(same_bits, expected, found))


OTHERS: list[Scene] = [fsdp2_for_overlap, fsdp2_parameters_never_leave, llama_of_fsdp2]


def play(rank: int, folder: Path) -> dict[str, object]:
    """What one of two ranks saw in each scene."""
    ranks.join(rank, 2, folder)
    seen = {name: compared(*of) for name, of in COMPARED.items()}
    return seen | {scene.__name__: scene() for scene in OTHERS}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    return ranks.run(play, tmp_path_factory.mktemp("activations"))


@pytest.mark.parametrize("scene", [*COMPARED, *(one.__name__ for one in OTHERS)])
def test_ranks_have_the_bits_of_ranks_without_refit(
    seen: list[dict[str, object]], scene: str
) -> None:
    assert [one[scene] for one in seen] == [True, True]
