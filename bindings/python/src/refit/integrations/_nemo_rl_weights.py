"""NeMo-RL's two ways to carry weights, over refit: a CheckpointEngine and a WeightSynchronizer.

The engine is on every policy and generation worker; the synchronizer is on the driver and tells
them what to do, by NeMo-RL's own remote calls. Both are named in nemo_rl.py, from where NeMo-RL
takes them; how versions travel is in _engine.py.

Drawn after nemo_rl/utils/checkpoint_engines/base.py, nemo_rl/models/policy/workers/
checkpoint_engine.py and nemo_rl/weight_sync/{interfaces,checkpoint_engine_weight_synchronizer,
ipc_weight_synchronizer}.py (NVIDIA-NeMo/RL main, 2026-08).
"""

import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, aclosing, nullcontext
from typing import Any

from refit.errors import StateError
from refit.integrations._engine import Engine


class RefitCheckpointEngine(Engine):
    """NeMo-RL's CheckpointEngine over a refit publisher, for generation on other GPUs.

    Its keywords come from ``policy.generation.refit_cfg."refit.integrations.nemo_rl:
    RefitCheckpointEngine"``: those of ``refit.integrations._engine.Engine``, and
    ``release_after_refit``, by which NeMo-RL closes it after each refit. NeMo-RL makes one on each
    policy and each generation worker; the first policy rank publishes.
    """

    cleanup_after_load = True
    shard_expert_weights = False

    def get_target_weight_layout(self) -> None:
        """All weights are sent whole: every worker takes the part it needs."""
        return

    def prepare(self) -> dict[str, Any]:
        """Says where the trainer would be, were it here: which side this is comes later."""
        return {"refit": self.announce()}

    def init_policy_process_group(
        self,
        *,
        worker_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: list[Any],
    ) -> None:
        """The first policy rank keeps its publisher; the others only take part."""
        if worker_rank != 0:
            self.take_part()
        elif metadata[0].get("refit") != self.open_publisher():
            raise StateError("the first in the metadata is not the first policy rank")
        else:
            self.expect(rollout_world_size)

    def init_rollout_process_group(
        self,
        *,
        rollout_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: list[Any],
    ) -> None:
        """Subscribes to the first policy rank."""
        self.connect(metadata[0]["refit"], f"rollout-{rollout_rank}")

    def finalize(self) -> None:
        """Closes the connection; ``prepare`` opens another one."""
        self.close()

    async def send_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Publishes `weights` as the next version; returns when all workers have applied it. On
        other ranks than the first, only runs it."""
        await self.publish(weights)

    async def receive_weight_batches(self) -> AsyncGenerator[list[tuple[str, Any]], None]:
        """The next version, in batches of at most the bucket's size. Its tensors stay readable
        until the version after it is asked for."""
        async with aclosing(self.batches()) as batches:
            async for batch in batches:
                yield batch


class RefitWeightSynchronizer:
    """NeMo-RL's WeightSynchronizer over RefitCheckpointEngine, for colocated generation as well.

    ``policy_generation.weight_synchronizer = RefitWeightSynchronizer(policy, policy_generation)``.
    `engine` holds the keywords of RefitCheckpointEngine; `wait` waits for what workers answer
    (None: ``ray.get``). Colocated, it moves the phases too, and whatever fails, the policy is left
    offloaded and the engine has its cache back.
    """

    backend = "refit.integrations.nemo_rl:RefitCheckpointEngine"

    def __init__(
        self,
        policy: Any,
        generation: Any,
        *,
        colocated: bool = True,
        engine: Mapping[str, Any] | None = None,
        bucket_bytes: int = 256 << 20,
        wait: Callable[[list[Any]], list[Any]] | None = None,
    ) -> None:
        self._policy = policy
        self._generation = generation
        self._colocated = colocated
        self._kwargs = {"release_after_refit": False, **(engine or {})}
        self._bucket_bytes = bucket_bytes
        self._wait = wait or _wait_for_ray
        self._stale = True
        self._ready = False

    @property
    def is_stale(self) -> bool:
        """Whether the engine's weights are older than the policy's."""
        return self._stale

    def mark_stale(self) -> None:
        """Says that a training step has changed the weights."""
        self._stale = True

    def init_communicator(self) -> None:
        """Makes the engines on all workers and joins them; once."""
        if self._ready:
            return
        described = self._policy.prepare_refit_info()
        self._generation.prepare_refit_info(described)
        made = {
            "backend": self.backend,
            "bucket_size_bytes": self._bucket_bytes,
            "engine_kwargs": self._kwargs,
        }
        self._wait(
            self._run_policy("init_checkpoint_engine", **made)
            + self._run_generation("init_checkpoint_engine", tuple(made.values()))
        )
        self._join()
        self._ready = True

    def sync_weights(
        self,
        *,
        timer: Any = None,
        kv_scales: dict[str, float] | None = None,
    ) -> dict[str, float]:
        """Gives all generation workers the policy's weights, as one version; returns figures.

        RuntimeError (StateError) if a worker did not take it, and what workers raise; the engine's
        weights then count as stale.
        """
        self._stale = True
        began = time.monotonic()
        if self._colocated:
            self._policy.offload_before_refit()
            self._generation.prepare_for_generation(tags=["weights"])
        try:
            with _timed(timer, "prepare_for_generation/transfer_and_update_weights"):
                self.init_communicator()
                self._transfer(kv_scales)
        finally:
            if self._colocated:
                self._policy.offload_after_refit()
                self._generation.prepare_for_generation(tags=["kv_cache"])
        self._stale = False
        return {"sync_s": time.monotonic() - began, **self._figures()}

    def shutdown(self) -> None:
        """Ends the engines on all workers. Idempotent."""
        if self._ready:
            self._ready = False
            self._wait(
                self._run_policy("finalize_checkpoint_engine")
                + self._run_generation("finalize_checkpoint_engine")
            )

    def _transfer(self, kv_scales: dict[str, float] | None) -> None:
        """Both sides are started before either is waited for: each waits for the other."""
        sent = self._run_policy("send_weights_via_checkpoint_engine", kv_scales=kv_scales)
        taken = self._run_generation("update_weights_from_checkpoint_engine")
        answers = self._wait(sent + taken)[len(sent) :]
        if not all(answer for answer in answers if answer is not None):
            raise StateError("a generation worker did not take the new weights: see its log")

    def _figures(self) -> dict[str, float]:
        answers = self._wait(self._run_policy("stats"))
        return {key: value for one in answers if one for key, value in one.items()}

    def _join(self) -> None:
        prepared = self._run_policy("prepare_checkpoint_engine")
        theirs = self._run_generation("prepare_checkpoint_engine")
        answers = self._wait(prepared + theirs)
        trainers = sorted(_flat(answers[: len(prepared)]), key=lambda one: int(one.get("rank", 0)))
        rollouts = list(_flat(answers[len(prepared) :]))
        topology = {
            "metadata": trainers + rollouts,
            "train_world_size": len(trainers),
            "rollout_world_size": len(rollouts),
        }
        self._wait(
            self._run_policy("init_checkpoint_engine_process_group", **topology)
            + self._join_generation(topology)
        )

    def _join_generation(self, topology: dict[str, Any]) -> list[Any]:
        group = self._generation.worker_group
        count = len(group.workers)
        told = (topology["train_world_size"], topology["rollout_world_size"], topology["metadata"])
        answers: list[Any] = group.run_all_workers_multiple_data(
            self._generation_rpc(),
            method_args=[
                (first, *told) for first in range(0, count, count // self._generation.dp_size)
            ],
            run_rank_0_only_axes=["tensor_parallel", "pipeline_parallel"],
            common_kwargs={"checkpoint_method": "init_checkpoint_engine_process_group"},
        )
        return answers

    def _run_policy(self, method: str, **named: Any) -> list[Any]:
        answers: list[Any] = self._policy.worker_group.run_all_workers_single_data(
            "checkpoint_engine_rpc", checkpoint_method=method, method_kwargs=named
        )
        return answers

    def _run_generation(self, method: str, given: tuple[Any, ...] = ()) -> list[Any]:
        answers: list[Any] = self._generation.worker_group.run_all_workers_single_data(
            self._generation_rpc(),
            checkpoint_method=method,
            method_args=given,
            run_rank_0_only_axes=["tensor_parallel", "pipeline_parallel"],
        )
        return answers

    def _generation_rpc(self) -> str:
        asynchronous = self._generation.cfg["vllm_cfg"]["async_engine"]
        return "checkpoint_engine_rpc_async" if asynchronous else "checkpoint_engine_rpc"


def _flat(answers: Iterable[Any]) -> Iterator[Any]:
    for answer in answers:
        if isinstance(answer, list):
            yield from answer
        else:
            yield answer


def _timed(timer: Any, label: str) -> AbstractContextManager[Any]:
    timed: AbstractContextManager[Any] = nullcontext() if timer is None else timer.time(label)
    return timed


def _wait_for_ray(answers: list[Any]) -> list[Any]:
    import ray

    gathered: list[Any] = ray.get(answers)
    return gathered
