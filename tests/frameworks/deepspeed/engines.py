"""Engines of DeepSpeed for the tests, and training with and without refit."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import deepspeed
import refit
import torch
from deepspeed.accelerator import get_accelerator
from refit.errors import CancelledError, StateError
from refit.integrations import deepspeed as adapter
from torch.utils.checkpoint import checkpoint

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
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


def one_process(port: str) -> None:
    """The surroundings of a job of one rank."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1"
    )


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
    states = adapter.unwrap(engine)
    return [master.detach().clone() for _, master, _ in states._masters()]


def result_of(engine: Any, losses: list[float]) -> Trained:
    states = [
        value.clone()
        for state in inner_of(engine).state.values()
        for key, value in state.items()
        if torch.is_tensor(value) and not key.endswith("_offload_buffer")  # of offload_states
    ]
    return Trained(losses, weights_of(engine), states, masters_of(engine))


def train(
    engine: Any,
    steps: int = 10,
    *,
    accumulate: int = 1,
    rank: int = 0,
    before: Callable[[int, int], None] = lambda step, micro: None,
) -> Trained:
    """Trains with the same batches each time; ``before`` is called ahead of each micro-batch."""
    losses = []
    tokens = batches(steps * accumulate, rank)
    for step in range(steps):
        for micro in range(accumulate):
            before(step, micro)
            loss = engine(next(tokens))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return result_of(engine, losses)


def cycle(controller: Any) -> Callable[[int, int], None]:
    """States leave before each optimizer step and return: in good time, or when they are used."""

    def before(step: int, micro: int) -> None:
        if micro == 0:
            controller.clear()
            assert controller.state == "cleared"
            if step % 3 != 2:
                controller.restore(non_blocking=step % 3 == 0)

    return before


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


class Worker:
    """Applies versions on a thread until its ``with`` ends, and keeps their bytes."""

    def __init__(self, endpoint: str) -> None:
        self.seen: list[dict[str, bytes]] = []
        self._subscriber = refit.Subscriber(endpoint, worker="w0")
        self._ending = False
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._ending:
            try:
                update = self._subscriber.next(60)
            except (CancelledError, StateError):
                return
            with update:
                self.seen.append({view.name: bytes(view.bytes) for view in update.views()})

    def __enter__(self) -> "Worker":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending = True
        self._subscriber.wake()
        self._thread.join()
        self._subscriber.close()


@contextmanager
def published() -> Iterator[tuple[Any, Worker]]:
    """A publisher and a worker that has subscribed."""
    with (
        refit.Publisher("tcp://127.0.0.1:0") as publisher,
        Worker(publisher.endpoint) as worker,
    ):
        publisher.wait_workers(1, 60)
        yield publisher, worker
