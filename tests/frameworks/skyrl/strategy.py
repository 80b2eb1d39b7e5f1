"""SkyRL's FSDP strategy as its training workers make and call it, on a CPU.

SkyRL names the device "cuda" in its code. What has that name here is the CPU: the device mesh, the
current device and ``Tensor.cuda``. Everything else is SkyRL's.
"""

import sys
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import typing_extensions

sys.path[:0] = [
    str(Path(__file__).with_name("stubs")),
    str(Path(__file__).parents[1] / "shared"),
]
typing.TypedDict = typing_extensions.TypedDict  # pydantic asks for it before Python 3.12

import models  # noqa: E402
import torch  # noqa: E402
from skyrl.backends.skyrl_train.distributed import fsdp_strategy, fsdp_utils  # noqa: E402
from skyrl.train.config import (  # noqa: E402
    FSDPConfig,
    MixedPrecisionConfig,
    ModelConfig,
    OptimizerConfig,
)
from torch.overrides import TorchFunctionMode  # noqa: E402


def _on_cpu() -> None:
    cuda = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.synchronize = cuda.empty_cache = lambda *given: None
    make_mesh = fsdp_utils.init_device_mesh
    fsdp_utils.init_device_mesh = lambda device, **named: make_mesh("cpu", **named)


_on_cpu()


class _CudaIsCpu(TorchFunctionMode):
    """While it is entered, what is made on "cuda", or moved there, is on the CPU."""

    def __torch_function__(
        self, function: Any, types: Any, given: Any = (), named: Any = None
    ) -> Any:
        named = dict(named or {})
        if function is torch.Tensor.cuda:
            return given[0]
        if named.get("device") == "cuda":
            named["device"] = "cpu"
        return function(*given, **named)


def make(folder: str) -> SimpleNamespace:
    """A strategy with a model, its optimizer and scheduler; torch.distributed is there."""
    from transformers import AutoModelForCausalLM

    strategy = fsdp_strategy.FSDPStrategy(
        FSDPConfig(mixed_precision=MixedPrecisionConfig(param_dtype="fp32")),
        OptimizerConfig(lr=1e-3, offload_after_step=True),
        ModelConfig(),
        num_training_steps=100,
    )
    strategy.setup_distributed()
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with _CudaIsCpu():  # SkyRL broadcasts buffers by way of the device
        model, optimizer, scheduler = strategy.prepare((model, None, None))
    return SimpleNamespace(strategy=strategy, model=model, optimizer=optimizer, scheduler=scheduler)


def train(worker: Any, step: int, rank: int) -> float:
    """A training step between a return and a leave, as SkyRL's dispatcher orders them."""
    strategy, model, optimizer = worker.strategy, worker.model, worker.optimizer
    strategy.backload_to_gpu(model, optimizer)
    source = torch.Generator().manual_seed(1000 * step + rank)
    ids = torch.randint(3, models.WORDS, (2, 12), generator=source)
    strategy.backward(model(input_ids=ids, labels=ids).loss, model, optimizer)
    norm = strategy.optimizer_step(optimizer, model, worker.scheduler)
    return float(getattr(norm, "full_tensor", lambda: norm)())


def away(worker: Any) -> None:
    worker.strategy.offload_to_cpu(worker.model, worker.optimizer)
