"""Activations that leave on two ranks of gloo: with DDP in transformers' Trainer, and of a model
that accelerate has sharded (FSDP2).

accelerate shards on GPUs only, so its state is told here that this is such a job; what it does to
the model then is its own code: its policy, its wrappers for checkpointing and its sharding.
"""

import multiprocessing
import os
import socket
import traceback
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WAYS = ("plain", "checkpointing", "checkpointing with offload")


def accelerator_with(**chosen: Any) -> Any:
    """accelerate's, which is told to shard."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    AcceleratorState._reset_state()
    made = Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        **chosen,
    )
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
    return made


def train(rank: int, way: str, with_refit: bool) -> tuple[list[Any], float]:
    """Three steps: losses and this rank's shards, and the bytes that left in the last forward."""
    import torch
    from refit.integrations.transformers import ActivationCallback
    from test_transformers import CHOSEN, a_model

    accelerator = accelerator_with(
        activation_checkpointing=way != "plain",
        activation_checkpointing_offload=with_refit and way == "checkpointing with offload",
    )
    callback = ActivationCallback(**CHOSEN)
    args: Any = SimpleNamespace(n_gpu=0)
    if with_refit:
        callback.on_init_end(args, None, None)
        assert not accelerator.state.fsdp_plugin.activation_checkpointing_offload
    model = a_model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    if with_refit:
        callback.on_train_begin(args, None, None, model=model)
    torch.manual_seed(rank)
    found: list[Any] = []
    for _ in range(3):
        tokens = torch.randint(2, 16, (2, 24))
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    left = 0.0
    if callback.offload is not None:
        left = callback.offload.stats()["refit/activation_left_bytes_last"]
        callback.close()
    return found + [one.to_local().detach() for one in model.parameters()], left


def the_same_to_the_bit(rank: int, way: str) -> str:
    import torch

    plain, _ = train(rank, way, False)
    ours, left = train(rank, way, True)
    assert len(plain) == len(ours) > 3
    assert all(map(torch.equal, plain, ours))
    layer_input = 2 * 24 * 32 * 4
    # The last of four groups stays. Under checkpointing the input of a layer is what leaves.
    assert left > 10 * layer_input if way == "plain" else left == 3 * layer_input, left
    return "ok"


def trainers_of_two_ranks_are_the_same_to_the_bit(rank: int, way: str) -> str:
    from pathlib import Path
    from tempfile import TemporaryDirectory

    from refit.integrations.transformers import ActivationCallback
    from test_transformers import CHOSEN, a_trainer, assert_same, left

    with TemporaryDirectory() as folder:
        chosen: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_steps": 3}
        plain = a_trainer(Path(folder), [], **chosen)
        plain.train()
        ours = a_trainer(Path(folder), [ActivationCallback(**CHOSEN)], **chosen)
        ours.train()
    assert type(ours.model_wrapped).__name__ == "DistributedDataParallel"
    assert_same(plain, ours)
    assert min(left(ours)) > 0 or rank > 0  # the first rank alone logs
    return "ok"


def accelerates_own_offload_is_refused(rank: int, way: str) -> str:
    import torch
    from refit.errors import UnsupportedError
    from refit.integrations.transformers import ActivationCallback
    from test_transformers import CHOSEN, a_model

    accelerator = accelerator_with(
        activation_checkpointing=True, activation_checkpointing_offload=True
    )
    model = a_model()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-2))
    args: Any = SimpleNamespace(n_gpu=0)
    with pytest.raises(UnsupportedError, match=r"fsdp_activation_.*_offload is on already"):
        ActivationCallback(**CHOSEN).on_train_begin(args, None, None, model=model)
    return "ok"


SCENES = [
    (trainers_of_two_ranks_are_the_same_to_the_bit, ""),  # before accelerate is told to shard
    *((the_same_to_the_bit, way) for way in WAYS),
    (accelerates_own_offload_is_refused, ""),
]


def run_rank(rank: int, port: int, report: Connection) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        HF_HUB_OFFLINE="1",
    )
    found = []
    for scene, way in SCENES:
        try:
            found.append(scene(rank, way))
        except Exception:
            found.append(traceback.format_exc())
    report.send(found)


@pytest.fixture(scope="module")
def reports() -> list[list[str]]:
    """What became of each scene on each rank. All are played in one job: it is slow to start."""
    spawn = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    ranks: list[Any] = []
    pipes: list[Connection] = []
    for rank in (0, 1):
        ours, theirs = spawn.Pipe(duplex=False)
        ranks.append(spawn.Process(target=run_rank, args=(rank, port, theirs), daemon=True))
        ranks[-1].start()
        theirs.close()
        pipes.append(ours)
    found = [pipe.recv() for pipe in pipes]
    for one in ranks:
        one.join()
    return found


@pytest.mark.parametrize("way", WAYS)
def test_a_sharded_training_is_the_same_to_the_bit(reports: list[list[str]], way: str) -> None:
    assert [report[1 + WAYS.index(way)] for report in reports] == ["ok", "ok"]


def test_a_training_with_ddp_is_the_same_to_the_bit(reports: list[list[str]]) -> None:
    assert [report[0] for report in reports] == ["ok", "ok"]


def test_the_offload_of_accelerate_is_refused_if_it_is_on_already(reports: list[list[str]]) -> None:
    assert [report[-1] for report in reports] == ["ok", "ok"]
