"""Activations that leave on two ranks of gloo: with DDP in transformers' Trainer, and of a model
that accelerate has sharded (FSDP2).

accelerate shards on GPUs only, so its state is told here that this is such a job; what it does to
the model then is its own code: its policy, its wrappers for checkpointing and its sharding.
"""

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import ranks  # noqa: E402

os.environ["HF_HUB_OFFLINE"] = "1"
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


def sharded_training(rank: int, way: str) -> bool:
    """Whether it is the same to the bit with and without refit."""
    plain, _ = train(rank, way, False)
    ours, left = train(rank, way, True)
    layer_input = 2 * 24 * 32 * 4
    # The last of four groups stays. Under checkpointing the input of a layer is what leaves.
    assert left > 10 * layer_input if way == "plain" else left == 3 * layer_input, left
    return len(plain) == len(ours) > 3 and all(map(torch.equal, plain, ours))


def training_with_ddp(rank: int, folder: Path) -> bool:
    from refit.integrations.transformers import ActivationCallback
    from test_transformers import CHOSEN, a_trainer, assert_same, left

    chosen: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_steps": 3}
    plain = a_trainer(folder / f"trainer{rank}", [], **chosen)
    plain.train()
    ours = a_trainer(folder / f"trainer{rank}", [ActivationCallback(**CHOSEN)], **chosen)
    ours.train()
    assert type(ours.model_wrapped).__name__ == "DistributedDataParallel"
    assert_same(plain, ours)
    return rank > 0 or min(left(ours)) > 0  # the first rank alone logs


def refusal_of_accelerates_own_offload() -> str:
    from refit.errors import UnsupportedError
    from refit.integrations.transformers import ActivationCallback
    from test_transformers import CHOSEN, a_model

    accelerator = accelerator_with(
        activation_checkpointing=True, activation_checkpointing_offload=True
    )
    model = a_model()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-2))
    args: Any = SimpleNamespace(n_gpu=0)
    with pytest.raises(UnsupportedError) as refused:
        ActivationCallback(**CHOSEN).on_train_begin(args, None, None, model=model)
    return str(refused.value)


def play(rank: int, folder: Path) -> dict[str, Any]:
    """All scenes in one job: it is slow to start."""
    ranks.join_as_launched(rank, 2, folder)
    seen: dict[str, Any] = {"ddp": training_with_ddp(rank, folder)}
    # From here on accelerate is told to shard.
    seen |= {way: sharded_training(rank, way) for way in WAYS}
    return seen | {"refusal": refusal_of_accelerates_own_offload()}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks.run(play, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("scene", ["ddp", *WAYS])
def test_training_is_the_same_to_the_bit(seen: list[dict[str, Any]], scene: str) -> None:
    assert [one[scene] for one in seen] == [True, True]


def test_accelerate_offload_is_refused_if_already_on(
    seen: list[dict[str, Any]],
) -> None:
    for one in seen:
        assert re.search(r"fsdp_activation_.*_offload is on already", one["refusal"])
