"""Stands for the optimizers and buffers of Megatron-Core (NVIDIA/Megatron-LM main, 2026-08).

Drawn after megatron/core/optimizer/optimizer.py (MegatronOptimizer, Float16Optimizer…,
ChainedOptimizer, ProxyDict), distrib_optimizer.py (DistributedOptimizer: the shard groups),
cpu_offloading/hybrid_optimizer.py (its name and its sub-optimizers) and
distributed/param_and_grad_buffer.py (grad_data, param_data, main_grad as a view, offload_to_cpu).
The real ones cannot be constructed here: their constructors ask for the current CUDA device.
"""

from types import SimpleNamespace
from typing import Any

import torch


class ParamAndGradBuffer:
    """One flat buffer of grads; `param.main_grad` are views of it."""

    def __init__(self, parameters: list[torch.nn.Parameter], *, nccl_ub: bool = False) -> None:
        count = sum(parameter.numel() for parameter in parameters)
        self.grad_data = torch.zeros(count, dtype=torch.float32)
        self.param_data = torch.zeros(count, dtype=parameters[0].dtype)
        self.nccl_ub = nccl_ub
        self.grad_data_size = 0
        at = 0
        for parameter in parameters:
            part = self.param_data[at : at + parameter.numel()].view(parameter.shape)
            part.copy_(parameter.data)
            parameter.data = part
            parameter.main_grad = self.grad_data[at : at + parameter.numel()].view(parameter.shape)
            at += parameter.numel()

    def offload_to_cpu(self, move_params: bool = True, move_grads: bool = True) -> None:
        if move_grads and self.grad_data.untyped_storage().nbytes() > 0:
            self.grad_data_size = self.grad_data.untyped_storage().nbytes()
            self.grad_data.untyped_storage().resize_(0)

    def reload_from_cpu(self, move_params: bool = True, move_grads: bool = True) -> None:
        if move_grads and self.grad_data_size > 0:
            self.grad_data.untyped_storage().resize_(self.grad_data_size)
            self.grad_data.zero_()
            self.grad_data_size = 0


class DistributedDataParallel(torch.nn.Module):
    """A model chunk with its grad buffers. `buffers` hides torch's method, as there."""

    def __init__(self, module: torch.nn.Module, **ddp_config: Any) -> None:
        super().__init__()
        self.module = module
        self.ddp_config = SimpleNamespace(overlap_param_gather=False, nccl_ub=False)
        self.ddp_config.__dict__.update(ddp_config)
        trained = [one for one in module.parameters() if one.requires_grad]
        self.buffers: list[ParamAndGradBuffer] = [ParamAndGradBuffer(trained)]
        self.expert_parallel_buffers: list[ParamAndGradBuffer] = []


class MegatronOptimizer:
    """What all wrappers have: `.optimizer` (None on a rank without parameters) and `_get_state`."""

    def __init__(self, optimizer: Any, **config: Any) -> None:
        self.optimizer = optimizer
        self.is_stub_optimizer = optimizer is None
        self.config = SimpleNamespace(**config)
        self.log: list[str] = []

    def _get_state(self) -> Any:
        return {} if self.optimizer is None else self.optimizer.state

    @property
    def state(self) -> Any:
        return self._get_state()

    def step(self) -> None:
        self.optimizer.step()
        self.log.append("step")


class DistributedOptimizer(MegatronOptimizer):
    """fp32 masters of bf16 parameters, and an inner optimizer that steps them."""

    def __init__(self, model: DistributedDataParallel, **config: Any) -> None:
        weights = [one for one in model.module.parameters() if one.requires_grad]
        self.model_float16_groups = [[one for one in weights if one.dtype != torch.float32]]
        self.shard_fp32_groups = [[one.data.view(-1) for one in weights if one.dtype.itemsize == 4]]
        masters: list[torch.nn.Parameter | None] = [
            torch.nn.Parameter(one.detach().clone().view(-1).float())
            for one in self.model_float16_groups[0]
        ]
        self.shard_fp32_from_float16_groups = [[*masters, None]]
        shards = [one.detach().view(-1) for one in self.model_float16_groups[0]]
        self.shard_float16_groups = [[*shards, None]]
        stepped = [one for one in masters if one is not None] + self.shard_fp32_groups[0]
        super().__init__(torch.optim.AdamW(stepped, lr=1e-2), **config)
        self.model_chunks = [model]
        self.buffers = model.buffers

    def step(self) -> None:
        masters = self.shard_fp32_from_float16_groups[0]
        for weight, master in zip(self.model_float16_groups[0], masters, strict=False):
            master.grad = weight.main_grad.view(-1).float()
        super().step()
        for weight, master in zip(self.model_float16_groups[0], masters, strict=False):
            weight.data.view(-1).copy_(master.data)


class ProxyDict:
    """One mapping over the states of a chain, keyed by (index, parameter)."""

    def __init__(self, inner: list[Any]) -> None:
        self._inner = inner

    def items(self) -> list[tuple[tuple[int, Any], Any]]:
        return [((at, key), v) for at, one in enumerate(self._inner) for key, v in one.items()]

    def values(self) -> list[Any]:
        return [value for _, value in self.items()]


class ChainedOptimizer:
    """Several wrappers as one (dense and expert parameters)."""

    def __init__(self, chained_optimizers: list[Any]) -> None:
        self.chained_optimizers = chained_optimizers

    @property
    def optimizer(self) -> Any:
        """Only of a chain of one; of others not even hasattr may ask."""
        assert len(self.chained_optimizers) == 1, "ChainedOptimizer has more than one optimizer"
        return self.chained_optimizers[0].optimizer

    @property
    def state(self) -> ProxyDict:
        return ProxyDict([one.state for one in self.chained_optimizers])

    def step(self) -> None:
        for one in self.chained_optimizers:
            if not one.is_stub_optimizer:
                one.step()


class HybridDeviceOptimizer(torch.optim.Optimizer):
    """Places its states by itself: part of them on the CPU, part on the GPU."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        super().__init__(parameters, {"lr": 1e-2})
        self.sub_optimizers = [torch.optim.AdamW(parameters, lr=1e-2)]
        self.inner_param_to_orig_param: dict[Any, Any] = {}
