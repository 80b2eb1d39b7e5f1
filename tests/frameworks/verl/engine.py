"""verl's FSDP2 engine as its workers make it, on a CPU, and a batch for it."""

import os
import sys
from pathlib import Path
from typing import Any

os.environ["VERL_PLATFORM"] = "cpu"
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "shared")]

import cpu_platform  # noqa: E402, F401
import models  # noqa: E402
import torch  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.workers.config import (  # noqa: E402
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
)
from verl.workers.engine.fsdp import transformer_impl  # noqa: E402
from verl.workers.utils.losses import sft_loss  # noqa: E402

SENTENCES, LENGTH = 4, 12


def make(folder: str, **model: Any) -> Any:
    """The engine of a model in a folder. torch.distributed is there."""
    engine = transformer_impl.FSDPEngineWithLMHead(
        HFModelConfig(
            path=folder,
            use_remove_padding=False,
            enable_gradient_checkpointing=model.pop("checkpointing", False),
            override_config={"attn_implementation": "eager"},
            **model,
        ),
        FSDPEngineConfig(
            strategy="fsdp2",
            use_torch_compile=False,
            optimizer_offload=True,
            param_offload=True,
            mixed_precision={"param_dtype": "fp32"},
        ),
        FSDPOptimizerConfig(lr=1e-3, clip_grad=1.0, total_training_steps=100),
        CheckpointConfig(),
    )
    torch.manual_seed(5)
    engine.initialize()
    return engine


def batch(step: int, rank: int = 0) -> Any:
    """What a worker gets: sentences of several lengths, two to a micro batch."""
    source = torch.Generator().manual_seed(1000 * step + rank)
    rows = [
        torch.randint(3, models.WORDS, (LENGTH - one,), generator=source)
        for one in range(SENTENCES)
    ]
    jagged = {"layout": torch.jagged}
    data = TensorDict(
        {
            "input_ids": torch.nested.as_nested_tensor(rows, **jagged),
            "position_ids": torch.nested.as_nested_tensor(
                [torch.arange(len(one)) for one in rows], **jagged
            ),
            "loss_mask": torch.nested.as_nested_tensor(
                [torch.ones(len(one)) for one in rows], **jagged
            ),
        },
        batch_size=SENTENCES,
    )
    tu.assign_non_tensor(
        data,
        use_remove_padding=False,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=2,
        temperature=1.0,
        global_batch_size=SENTENCES,
    )
    return data


def loss(model_output: Any, data: Any, dp_group: Any = None) -> Any:
    """verl's loss for supervised training."""
    return sft_loss(config=None, model_output=model_output, data=data, dp_group=dp_group)


def away(engine: Any) -> None:
    """What ``engine.to("cpu")`` does where the device is a GPU: the model and the states leave."""
    transformer_impl.offload_fsdp_model_to_cpu(engine.module)
    transformer_impl.offload_fsdp_optimizer(engine.optimizer)


def back(engine: Any) -> None:
    """What ``engine.to("cuda")`` does."""
    transformer_impl.load_fsdp_model_to_gpu(engine.module)
    transformer_impl.load_fsdp_optimizer(engine.optimizer, "cpu")


def train(engine: Any, step: int, rank: int = 0) -> float:
    """A training step by verl's engine."""
    with engine.train_mode():
        found = engine.train_batch(batch(step, rank), loss)
        engine.lr_scheduler_step()
    return float(found["metrics"]["grad_norm"])
