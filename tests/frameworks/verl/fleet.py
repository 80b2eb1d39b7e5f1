"""verl's workers on Ray: trainers with an FSDP2 engine, and rollouts with verl's own worker."""

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine as verl_engine
import ray
import torch
from verl.checkpoint_engine import CheckpointEngineManager
from verl.checkpoint_engine.base import CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig
from verl.workers.rollout import BaseRollout

HOLDS = "model.layers.1.mlp.up_proj.weight"
"""The tensor at which a worker that is told to wait waits."""


def config(**engine_kwargs: Any) -> CheckpointEngineConfig:
    """``rollout.checkpoint_engine`` as configs/frameworks/verl.yaml has it."""
    options = {"broadcast": {"heartbeat_ms": "200ms", "heartbeat_timeout_ms": "20s"}}
    return CheckpointEngineConfig(
        backend="refit",
        custom_backend_module="refit.integrations.verl",
        update_weights_bucket_megabytes=1,
        engine_kwargs={"refit": {"timeout_s": 30.0, "config": options, **engine_kwargs}},
    )


class Trainer(Worker):
    """What verl's ActorRolloutRefWorker does for a checkpoint engine, with its FSDP2 engine."""

    def __init__(self, folder: str, store: str, install: Any = None) -> None:
        super().__init__()
        if install is not None:
            from refit.integrations import verl

            verl.install(install)
        torch.set_num_threads(1)
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=self.rank, world_size=self.world_size
        )
        self.engine = verl_engine.make(folder)
        given = config()
        import_external_libs(given.custom_backend_module)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            given.backend,
            is_master=self.rank == 0,
            bucket_size=given.update_weights_bucket_megabytes << 20,
            **given.engine_kwargs[given.backend],
        )
        self.sign = ""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self, step: int) -> float:
        verl_engine.back(self.engine)
        norm = verl_engine.train(self.engine, step, self.rank)
        verl_engine.away(self.engine)
        return norm

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: one.clone() for name, one in self.engine.get_per_tensor_param()[0]}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_halts(self, sign: str) -> int:
        """From now on the weights stop in the middle, and a pipe says so; gives the process."""
        self.sign = sign
        return os.getpid()

    def _halting(self, weights: Any) -> Iterator[tuple[str, Any]]:
        for name, one in weights:
            if self.sign and name == HOLDS:
                Path(self.sign).write_bytes(b".")
                time.sleep(600)
            yield name, one

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> Any:
        weights, _ = self.engine.get_per_tensor_param()
        sent = self.checkpoint_engine.send_weights
        return await sent(self._halting(weights), global_steps=global_steps) or {}

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)


class Adapter(BaseRollout):
    """Stands where verl's vLLM adapter does: it holds all tensors, and then loads them."""

    replica_rank, is_leader_rank = 0, True

    def __init__(self) -> None:
        self.loaded: dict[str, torch.Tensor] = {}
        self.at_tensor: str | None = None
        self.sign = ""

    async def resume(self, tags: list[str]) -> None:
        """Nothing sleeps."""

    async def release(self) -> None:
        """Nothing sleeps."""

    async def update_weights(
        self, weights: Any, wire_format: str = "named_tensors", **_named: Any
    ) -> None:
        assert wire_format == "named_tensors"
        held = []
        async for name, tensor in weights:
            if name == HOLDS and self.at_tensor == "waits":
                Path(self.sign).write_bytes(b".")
                await asyncio.sleep(600)
            if name == HOLDS and self.at_tensor == "fails":
                raise ValueError(f"no place for {name}")
            held.append((name, tensor))
        self.loaded = {name: one.clone() for name, one in held}


class Rollout(CheckpointEngineWorker):
    """verl's worker of a rollout."""

    def __init__(self, folder: str) -> None:
        rollout = RolloutConfig(
            name="vllm", tensor_model_parallel_size=1, checkpoint_engine=config()
        )
        super().__init__(rollout, HFModelConfig(path=folder), Adapter())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def loaded(self) -> tuple[int, dict[str, torch.Tensor]]:
        return self.checkpoint_engine.version, self.server_adapter.loaded

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_at_tensor(self, does: str | None, sign: str = "") -> int:
        """What the adapter does in the middle; "waits" tells the pipe first. Gives the process."""
        self.server_adapter.at_tensor = does
        self.server_adapter.sign = sign
        return os.getpid()


class Replica:
    """What the manager asks of a replica's server; ``workers`` are verl's."""

    def __init__(self, group: RayWorkerGroup) -> None:
        self.group = group
        self.workers = group.workers

    async def _nothing(self, **_named: Any) -> None:
        """There is no server."""

    abort_all_requests = resume_generation = release_kv_cache = resume_kv_cache = _nothing


def group_of(kind: type, world: int, *given: Any) -> RayWorkerGroup:
    pool = RayResourcePool([world], use_gpu=False, max_colocate_count=1)
    made = RayClassWithInitArgs(ray.remote(kind), *given)
    return RayWorkerGroup(pool, made, device_name="cpu", use_gpu=False)


class Fleet:
    """Two trainers, two replicas, and verl's manager between them."""

    def __init__(self, folder: str, store: str) -> None:
        self.folder = folder
        self.trainers = group_of(Trainer, 2, folder, store)
        self.replicas = [Replica(group_of(Rollout, 1, folder)) for _ in range(2)]
        self.manager = CheckpointEngineManager(config(), self.trainers, list(self.replicas))

    def new_trainers(self, store: str) -> None:
        """Others in the place of those that are gone."""
        self.trainers = group_of(Trainer, 2, self.folder, store)
        self.manager.actor_wg = self.trainers

    def holds(self) -> list[int]:
        """The versions that the replicas hold; all have the trainers' weights, to the bit."""
        here = self.trainers.weights()[0]
        found = []
        for replica in self.manager.replicas:
            ((version, there),) = replica.group.loaded()
            assert here.keys() == there.keys()
            assert all(torch.equal(here[name], there[name]) for name in here)
            found.append(version)
        return found

    def begin(self, version: int) -> tuple[list[Any], list[Any]]:
        """Both ends begin an update, as the manager begins it; what Ray promises of each."""
        workers = [worker for one in self.manager.replicas for worker in one.workers]
        rollouts = RayWorkerGroup(
            worker_handles=workers,
            ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(CheckpointEngineWorker)),
        )
        self.manager.build_process_group(rollouts)
        sent = self.trainers.update_weights(global_steps=version, mode="refit")
        return sent, rollouts.update_weights(global_steps=version)

    def finish(self) -> None:
        """What the manager calls after an update that did not fail."""
        for group in (self.trainers, *(one.group for one in self.manager.replicas)):
            ray.get(group.execute_checkpoint_engine(["finalize"] * group.world_size))
