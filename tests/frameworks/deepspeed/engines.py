"""Engines of DeepSpeed for the tests, and training with and without refit."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import refit
import torch
from deepspeed.accelerator import get_accelerator
from ranks import join as join_by_gloo
from refit.integrations import deepspeed as adapter
from torch.utils.checkpoint import checkpoint

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OFF = {"offload_pin": "off"}
WIDTH = 48
WORDS = 40


class Language(torch.nn.Module):
    """Tied embedding, blocks, a buffer; small, and every weight takes part."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embedding = torch.nn.Embedding(WORDS, WIDTH)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.LayerNorm(WIDTH),
                torch.nn.Linear(WIDTH, 4 * WIDTH),
                torch.nn.GELU(),
                torch.nn.Linear(4 * WIDTH, WIDTH),
            )
            for _ in range(3)
        )
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x))
        return torch.nn.functional.cross_entropy(
            self.head(x)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()
        )


def allow_fp16() -> None:
    """DeepSpeed asks for AVX512-FP16 on a CPU; PyTorch computes fp16 on others as well."""
    type(get_accelerator()).is_fp16_supported = lambda _self: True


def join(rank: int, ranks: int, folder: Path) -> None:
    """Joins a job of so many ranks, which meet in ``folder``, as one that torchrun has launched."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(one) for name, one in names.items()})
    # An all-reduce for inference: no test needs it, and it is compiled for minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    join_by_gloo(rank, ranks, folder)


def make(
    stage: int,
    kind: str = "bf16",
    *,
    accumulate: int = 1,
    checkpointed: bool = False,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    more: dict[str, Any] | None = None,
    **zero: Any,
) -> Any:
    """An engine; the same weights each time."""
    torch.manual_seed(7)
    model = Language(checkpointed)
    biases = [p for p in model.parameters() if p.dim() == 1]
    others = [p for p in model.parameters() if p.dim() > 1]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 20000,
            "stage3_param_persistence_threshold": 60,
            "sub_group_size": 12000,
            **zero,
        },
        **(more or {}),
    }
    if kind == "bf16":
        config["bf16"] = {"enabled": True}
    if kind == "fp16":  # the first steps overflow and are left out, and the scale shrinks
        allow_fp16()
        config["fp16"] = {"enabled": True, "initial_scale_power": 19, "hysteresis": 1}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer(groups, lr=3e-3), config=config
    )
    return engine


def batches(count: int, rank: int = 0) -> Iterator[torch.Tensor]:
    made = torch.Generator().manual_seed(100 + rank)
    for _ in range(count):
        yield torch.randint(0, WORDS, (2, 12), generator=made)


class Trained(NamedTuple):
    """What a training ends with."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    states: list[torch.Tensor]
    masters: list[torch.Tensor]


def inner_of(engine: Any) -> torch.optim.Optimizer:
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


@contextmanager
def whole(engine: Any) -> Iterator[None]:
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        yield


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    """The weights by DeepSpeed's own ways, copied."""
    with whole(engine):
        return {name: one.detach().clone() for name, one in engine.module.state_dict().items()}


def masters_of(engine: Any) -> list[torch.Tensor]:
    held = adapter.unwrap(engine).tensors()
    return [master for name, master in held if not name.startswith("weight.")]


def states_of(engine: Any) -> list[torch.Tensor]:
    return [
        value
        for state in inner_of(engine).state.values()
        for key, value in state.items()
        if torch.is_tensor(value) and not key.endswith("_offload_buffer")  # of offload_states
    ]


def bytes_on_device(tensors: Iterable[torch.Tensor]) -> int:
    """Of these tensors, which are found before they leave."""
    with refit.states.offloaded_tensor.untouched():
        return sum(one.untyped_storage().nbytes() for one in tensors)


def result_of(engine: Any, losses: list[float]) -> Trained:
    states, masters = (
        [one.detach().clone() for one in all_of(engine)] for all_of in (states_of, masters_of)
    )
    return Trained(losses, weights_of(engine), states, masters)


def cycle(_engine: Any, controller: Any, step: int, micro: int) -> None:
    """States leave before each optimizer step and return: in good time, or when they are used."""
    if micro == 0:
        controller.offload()
        assert controller.state == "cleared"
        if step % 3 != 2:
            controller.restore(non_blocking=step % 3 == 0)


def train(
    engine: Any,
    steps: int = 10,
    controller: Any = None,
    *,
    accumulate: int = 1,
    rank: int = 0,
    before: Callable[[Any, Any, int, int], None] = cycle,
) -> Trained:
    """Trains with the same batches each time. With a controller ``before`` is called ahead of each
    micro-batch: ``before(engine, controller, step, micro)``."""
    losses = []
    tokens = batches(steps * accumulate, rank)
    for step in range(steps):
        for micro in range(accumulate):
            if controller is not None:
                before(engine, controller, step, micro)
            loss = engine(next(tokens))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return result_of(engine, losses)


def train_the_same(
    stage: int,
    kind: str = "bf16",
    *,
    steps: int = 10,
    accumulate: int = 1,
    rank: int = 0,
    before: Callable[[Any, Any, int, int], None] = cycle,
    refits: dict[str, Any] | None = None,
    **chosen: Any,
) -> tuple[Trained, dict[str, float]]:
    """Trains without refit and with it, and compares the two to the bit: how both ended, and the
    controller's figures. ``refits`` are the controller's keywords, ``chosen`` those of ``make``."""
    named: dict[str, Any] = {"accumulate": accumulate, "rank": rank}
    plain = train(make(stage, kind, accumulate=accumulate, **chosen), steps, **named)
    engine = make(stage, kind, accumulate=accumulate, **chosen)
    with refit.Controller(engine, **OFF, **(refits or {})) as controller:
        ours = train(engine, steps, controller, before=before, **named)
        figures = controller.stats()
    assert_same(plain, ours)
    return ours, figures


def assert_same(one: Trained, other: Trained) -> None:
    assert one.losses == other.losses
    assert len(one.states) == len(other.states) > 0
    for mine, theirs in zip(one.states + one.masters, other.states + other.masters, strict=True):
        assert torch.equal(mine, theirs)
    assert one.weights.keys() == other.weights.keys()
    for name, tensor in one.weights.items():
        assert torch.equal(tensor, other.weights[name]), name


def bytes_of(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {
        name: one.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        for name, one in tensors.items()
    }
