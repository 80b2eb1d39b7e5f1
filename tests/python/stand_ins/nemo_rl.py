"""Stands for NeMo-RL's policy workers, groups and checkpoint-engine RPCs (NVIDIA-NeMo/RL, 2026-08).

Drawn after nemo_rl/models/policy/workers/megatron_policy_worker.py (offload_before_refit,
offload_after_refit, prepare_for_training, move_optimizer, save_checkpoint, and the order in which
they call each other), dtensor_policy_worker_v2.py (move_optimizer_to_device), checkpoint_engine.py
(checkpoint_engine_rpc), nemo_rl/utils/checkpoint_engines/base.py (create_checkpoint_engine) and the
worker groups as nemo_rl/weight_sync/checkpoint_engine_weight_synchronizer.py uses them. The package
itself wants Python 3.13, CUDA and dependencies from git.
"""

import asyncio
import importlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from stand_ins import megatron_core as mcore


class MegatronPolicyWorkerImpl:
    """The phases of a Megatron worker, with what they tell each other in `events`."""

    def __init__(self, optimizer: Any, model: Any = None, **policy: Any) -> None:
        self.optimizer = optimizer
        self.model = model
        self.optimizer_cpu_offload = False
        self.offload_optimizer_for_refit = True
        self.offload_optimizer_for_logprob = False
        self.cfg: dict[str, Any] = {"megatron_cfg": {"empty_unused_memory_level": 0}, **policy}
        self.events: list[str] = []
        self.while_saving: Callable[[], None] = lambda: None

    def finalize_async_save(self) -> None:
        self.events.append("finalize_async_save")

    def move_model(self, device: str) -> None:
        self.events.append(f"move_model_{device}")

    def move_optimizer(self, device: str) -> None:
        self.events.append(f"move_optimizer_{device}")

    def offload_before_refit(self) -> None:
        self.finalize_async_save()
        with torch.no_grad():
            self.move_model("cpu")
            movable = self.optimizer is not None and not self.optimizer_cpu_offload
            if movable and self.offload_optimizer_for_refit:
                self.move_optimizer("cpu")

    def offload_after_refit(self) -> None:
        self.finalize_async_save()
        with torch.no_grad():
            self.move_model("cpu")
            self.offload_before_refit()

    def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None:
        self.move_model("cuda")
        if not keep_train_buffers and self.offload_optimizer_for_logprob:
            self.move_optimizer("cpu")

    def prepare_for_training(self) -> None:
        self.move_model("cuda")
        if self.optimizer is not None and not self.optimizer_cpu_offload:
            self.move_optimizer("cuda")

    def save_checkpoint(self, weights_path: str, optimizer_path: str | None = None) -> str:
        self.move_model("cuda")
        if optimizer_path is not None and not self.optimizer_cpu_offload:
            self.move_optimizer("cuda")
        self.events.append("synchronize")
        self.while_saving()
        self.events.append("mcore_save")
        return weights_path


class MegatronPolicyWorker(MegatronPolicyWorkerImpl):
    """A worker that makes its optimizer by its configuration, as nemo_rl/models/megatron/setup.py
    does: with `optimizer_cpu_offload` a HybridDeviceOptimizer, without it states on the device."""

    def __init__(self, config: dict[str, Any], tokenizer: Any = None, *, model: Any) -> None:
        said = config["megatron_cfg"]["optimizer"]
        if said["optimizer_cpu_offload"] and not 0 < said["optimizer_offload_fraction"] <= 1:
            raise ValueError("requires 0 < optimizer_offload_fraction <= 1")
        if said["overlap_cpu_optimizer_d2h_h2d"] and not said["optimizer_cpu_offload"]:
            raise ValueError("overlap_cpu_optimizer_d2h_h2d requires optimizer_cpu_offload")
        made: Any = mcore.DistributedOptimizer(model)
        if said["optimizer_cpu_offload"]:
            made.optimizer = mcore.HybridDeviceOptimizer(made.optimizer.param_groups[0]["params"])
        super().__init__(made, model)
        self.cfg = config
        self.optimizer_cpu_offload = said["optimizer_cpu_offload"]


class DTensorPolicyWorkerV2Impl:
    """The mover of DTensor workers has another name, and moves `step` as well."""

    def __init__(self, optimizer: torch.optim.Optimizer, **policy: Any) -> None:
        self.optimizer = optimizer
        self.cfg = policy

    def move_optimizer_to_device(self, device: str) -> None:
        raise AssertionError("the generic mover was called")

    def offload_before_refit(self) -> None:
        self.move_optimizer_to_device("cpu")

    def prepare_for_training(self) -> None:
        self.move_optimizer_to_device("cuda")


def create_checkpoint_engine(
    backend: str, *, bucket_size_bytes: int, engine_kwargs: dict[str, Any]
) -> Any:
    module, class_name = backend.split(":", 1)
    made = getattr(importlib.import_module(module), class_name)
    return made(bucket_size=bucket_size_bytes, **engine_kwargs)


class PolicyWorker:
    """A policy worker's end of checkpoint_engine_rpc."""

    def __init__(self, rank: int, weights: dict[str, torch.Tensor]) -> None:
        self.rank = rank
        self.weights = weights
        self.checkpoint_engine: Any = None
        self.gathered: list[str] = []

    def _iterate(self) -> Any:
        for name, tensor in self.weights.items():
            self.gathered.append(name)
            yield name, tensor

    async def checkpoint_engine_rpc(self, checkpoint_method: str, method_kwargs: Any) -> Any:
        named = method_kwargs or {}
        if checkpoint_method == "init_checkpoint_engine":
            if self.checkpoint_engine is None:
                self.checkpoint_engine = create_checkpoint_engine(
                    named["backend"],
                    bucket_size_bytes=named["bucket_size_bytes"],
                    engine_kwargs=named["engine_kwargs"],
                )
            return None
        if checkpoint_method == "prepare_checkpoint_engine":
            return {**self.checkpoint_engine.prepare(), "rank": self.rank}
        if checkpoint_method == "init_checkpoint_engine_process_group":
            return self.checkpoint_engine.init_policy_process_group(worker_rank=self.rank, **named)
        if checkpoint_method == "send_weights_via_checkpoint_engine":
            return await self.checkpoint_engine.send_weights(self._iterate())
        if checkpoint_method == "finalize_checkpoint_engine":
            return self.checkpoint_engine.finalize()
        return getattr(self.checkpoint_engine, checkpoint_method)(**named)


class GenerationWorker:
    """A vLLM worker's end: it loads each batch as it comes, and answers True for success."""

    def __init__(self) -> None:
        self.checkpoint_engine: Any = None
        self.loaded: dict[str, torch.Tensor] = {}
        self.batches = 0
        self.fails = False

    async def _update(self) -> bool:
        async for batch in self.checkpoint_engine.receive_weight_batches():
            self.batches += 1
            if self.fails:
                raise RuntimeError("no room for the weights")
            self.loaded.update((name, tensor.clone()) for name, tensor in batch)
        return True

    async def checkpoint_engine_rpc(self, checkpoint_method: str, method_args: Any) -> Any:
        given = tuple(method_args)
        if checkpoint_method == "init_checkpoint_engine":
            backend, bucket, kwargs = given
            self.checkpoint_engine = create_checkpoint_engine(
                backend, bucket_size_bytes=bucket, engine_kwargs=kwargs
            )
            return None
        if checkpoint_method == "prepare_checkpoint_engine":
            return [self.checkpoint_engine.prepare()]
        if checkpoint_method == "init_checkpoint_engine_process_group":
            rank, trainers, rollouts, metadata = given
            return self.checkpoint_engine.init_rollout_process_group(
                rollout_rank=rank,
                train_world_size=trainers,
                rollout_world_size=rollouts,
                metadata=metadata,
            )
        if checkpoint_method == "update_weights_from_checkpoint_engine":
            return await self._update()
        return self.checkpoint_engine.finalize()


class WorkerGroup:
    """Workers that are called like Ray actors: each on its own thread, answers as futures."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers
        self._pools = [ThreadPoolExecutor(1) for _ in workers]

    def run_all_workers_single_data(self, rpc: str, **named: Any) -> list["Future[Any]"]:
        axes = {"run_rank_0_only_axes"}
        kept = {key: value for key, value in named.items() if key not in axes}
        return [self._run(index, rpc, kept) for index in range(len(self.workers))]

    def run_all_workers_multiple_data(
        self, rpc: str, *, method_args: list[Any], common_kwargs: Any, run_rank_0_only_axes: Any
    ) -> list["Future[Any]"]:
        return [
            self._run(index, rpc, {"method_args": given, **common_kwargs})
            for index, given in enumerate(method_args)
        ]

    def _run(self, index: int, rpc: str, named: dict[str, Any]) -> "Future[Any]":
        method = getattr(self.workers[index], rpc)
        return self._pools[index].submit(lambda: asyncio.run(method(**named)))

    def close(self) -> None:
        for pool in self._pools:
            pool.shutdown()


class Policy:
    """A ColocatablePolicyInterface."""

    def __init__(self, weights: dict[str, torch.Tensor], ranks: int, events: list[str]) -> None:
        self.worker_group = WorkerGroup([PolicyWorker(rank, weights) for rank in range(ranks)])
        self.events = events

    def prepare_refit_info(self) -> dict[str, Any]:
        return {}

    def offload_before_refit(self) -> None:
        self.events.append("offload_before_refit")

    def offload_after_refit(self) -> None:
        self.events.append("offload_after_refit")


class Generation:
    """A GenerationInterface with vLLM workers."""

    def __init__(self, workers: int, events: list[str]) -> None:
        self.worker_group = WorkerGroup([GenerationWorker() for _ in range(workers)])
        self.cfg = {"vllm_cfg": {"async_engine": False}}
        self.dp_size = workers
        self.events = events

    def prepare_refit_info(self, described: dict[str, Any]) -> None:
        return

    def prepare_for_generation(self, tags: list[str]) -> None:
        self.events.append(f"generation_{tags[0]}")


class Timer:
    """Labels are measured by a context manager; one that is running is refused."""

    def __init__(self) -> None:
        self.labels: list[str] = []

    def time(self, label: str) -> "Timer":
        self.labels.append(label)
        return self

    def __enter__(self) -> "Timer":
        return self

    def __exit__(self, *_: Any) -> None:
        return
