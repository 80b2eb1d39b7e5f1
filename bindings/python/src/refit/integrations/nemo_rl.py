"""NeMo-RL: optimizer states leave by refit, and weights travel by it. No fork is needed.

**The mover.** ``patch_worker(worker_or_class)`` puts refit's mover in the place of the one method
through which the loop moves optimizer states: ``move_optimizer`` of Megatron workers,
``move_optimizer_to_device`` of DTensor workers. The loop stays as it is: what it calls twice does
nothing the second time, and ``prepare_for_training`` restores behind the next step. Two keys, those
of the patch that NeMo-RL has under review, say how (configs/frameworks/nemo_rl.yaml has them):

    policy.use_pinned_optimizer_offload   policy.use_coalesced_optimizer_offload   mode
    false                                 false                                    pageable
    true                                  false                                    pinned
    true                                  true                                     coalesced-pinned

The last two are one to refit: its arena is page-locked, coalesced and taken in slabs, so that there
is no single huge buffer. ``policy.refit`` may hold further options of refit's own.

**The transports.** ``policy.generation.refit_transport: "refit.integrations.nemo_rl:
RefitCheckpointEngine"`` for generation on other GPUs; ``RefitWeightSynchronizer`` as
``policy_generation.weight_synchronizer`` for colocated generation too.

Drawn after nemo_rl/models/policy/workers/{megatron_policy_worker,dtensor_policy_worker_v2,
checkpoint_engine}.py, nemo_rl/utils/checkpoint_engines/base.py and
nemo_rl/weight_sync/{interfaces,checkpoint_engine_weight_synchronizer,ipc_weight_synchronizer}.py
(NVIDIA-NeMo/RL main, 2026-08). NeMo-RL is not imported here.
"""

import functools
import inspect
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, aclosing, nullcontext
from typing import TYPE_CHECKING, Any, Literal

from refit.errors import ConfigError, InvalidError, StateError
from refit.integrations._engine import Engine

if TYPE_CHECKING:
    from refit.controller import Controller

Mode = Literal["pageable", "pinned", "coalesced-pinned"]

PINNED = "use_pinned_optimizer_offload"
COALESCED = "use_coalesced_optimizer_offload"
MOVERS = ("move_optimizer", "move_optimizer_to_device")
_MOVER = "_refit_mover"
_ORIGINAL = "_refit_original"


# ---- The mover


def offload_mode(policy: Mapping[str, Any]) -> Mode:
    """What the two keys of a policy's configuration say. ConfigError, with the sentence to act on,
    for a key that is missing or coalesced without pinned. Since 0.1.
    """
    for key in (PINNED, COALESCED):
        if key not in policy:
            raise ConfigError(
                f"policy.{key} is not set: include configs/frameworks/nemo_rl.yaml, or start with "
                f"++policy.{key}=true"
            )
    if policy[COALESCED] and not policy[PINNED]:
        raise ConfigError(
            f"policy.{COALESCED} requires policy.{PINNED}: states are coalesced in page-locked "
            "memory only; set both, or neither"
        )
    if not policy[PINNED]:
        return "pageable"
    return "coalesced-pinned" if policy[COALESCED] else "pinned"


class OptimizerMover:
    """Moves one worker's optimizer states; a worker has one, which owns its refit.Controller.

    The controller is made at the first move, since workers make their optimizer late, and again
    should the worker make another optimizer. Since 0.1.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._policy = worker.cfg
        self.mode: Mode = offload_mode(worker.cfg)
        self.blocking = False
        self._controller: Controller | None = None
        self._optimizer: Any = None

    @property
    def controller(self) -> "Controller | None":
        """The controller of the worker's optimizer; None before the first move. Since 0.1."""
        return self._controller

    def move(self, device: Any) -> None:
        """To "cpu": states leave, and their device memory is given back; blocks until then. To
        "cuda" (or the device they came from): they return behind the next step, or, within a
        checkpoint, at once. Idempotent. InvalidError for another device, and what the controller
        raises. Since 0.1.
        """
        if getattr(self._worker, "optimizer_cpu_offload", False):
            return
        kind = str(device).split(":", maxsplit=1)[0]
        if kind == "cpu":
            controller = self._current()
            if controller is not None:
                controller.clear()
        elif kind == "cuda":
            self._return()
        else:
            raise InvalidError(f'optimizer states go to "cpu" or "cuda", and not to "{device}"')

    def release(self) -> None:
        """Gives the page-locked host memory back, with the states on the device. Since 0.1."""
        if self._controller is not None:
            self._return()
            self._controller.join()
            self._controller.release()

    def close(self) -> None:
        """Brings the states back and ends the controller. Idempotent. Since 0.1."""
        controller, self._controller, self._optimizer = self._controller, None, None
        if controller is not None:
            controller.close()

    def _return(self) -> None:
        if self._controller is None:
            return
        self._controller.restore(non_blocking=True)
        if self.blocking:
            self._controller.join()

    def _current(self) -> "Controller | None":
        optimizer = getattr(self._worker, "optimizer", None)
        if optimizer is not self._optimizer:
            self.close()
            self._optimizer = optimizer
        if self._controller is None and optimizer is not None:
            self._controller = self._make(optimizer)
        return self._controller

    def _make(self, optimizer: Any) -> "Controller | None":
        from refit.integrations._attached import controller_of

        ours = dict(self._policy.get("refit") or {})
        ours[PINNED] = self.mode != "pageable"
        return controller_of(optimizer, getattr(self._worker, "model", None), ours)


def mover_of(worker: Any) -> OptimizerMover:
    """The worker's mover, made when first asked for. ConfigError: see offload_mode. Since 0.1."""
    mover: OptimizerMover | None = getattr(worker, _MOVER, None)
    if mover is None:
        mover = OptimizerMover(worker)
        setattr(worker, _MOVER, mover)
    return mover


def patch_worker(worker: Any) -> Any:
    """Puts refit's mover into a policy worker, or into its class for all workers made from it.

    Takes the place of ``move_optimizer`` or ``move_optimizer_to_device``, and makes
    ``save_checkpoint`` wait for states that are on their way back. A worker's configuration is
    checked at once, a class's when a worker first moves. A second call does nothing. Returns
    `worker`. StateError if it has neither method; ConfigError. Since 0.1.

    Workers are Ray actors: call it where their class is defined or subclassed, or in a module that
    ``runtime_env={"worker_process_setup_hook": ...}`` names.
    """
    names = [name for name in MOVERS if callable(getattr(worker, name, None))]
    if not names:
        raise StateError(
            f"{worker!r} is no policy worker of NeMo-RL: it has neither {' nor '.join(MOVERS)}"
        )
    if not inspect.isclass(worker):
        mover_of(worker)
    for name in names:
        _replace(worker, name, _moving)
    if callable(getattr(worker, "save_checkpoint", None)):
        _replace(worker, "save_checkpoint", _waiting)
    return worker


def unpatch_worker(worker: Any) -> Any:
    """Undoes patch_worker; an instance's states come back first. Returns `worker`. Since 0.1."""
    if not inspect.isclass(worker):
        mover: OptimizerMover | None = worker.__dict__.pop(_MOVER, None)
        if mover is not None:
            mover.close()
    for name in (*MOVERS, "save_checkpoint"):
        ours = vars(worker).get(name)
        if hasattr(ours, _ORIGINAL):
            original = getattr(ours, _ORIGINAL)
            if original is None:
                delattr(worker, name)
            else:
                setattr(worker, name, original)
    return worker


def move_optimizer(worker: Any, device: Any) -> None:
    """As the worker's own method, by refit; for those who call it rather than patch. See
    OptimizerMover.move. Since 0.1."""
    mover_of(worker).move(device)


def release(worker: Any) -> None:
    """Gives back the page-locked memory that moving `worker`'s states took. Since 0.1."""
    mover_of(worker).release()


def _replace(worker: Any, name: str, make: Callable[[Any], Any]) -> None:
    """On a class, as a function of it; on an instance, bound to it. What was there is kept."""
    there = getattr(worker, name)
    if hasattr(there, _ORIGINAL):
        return
    if inspect.isclass(worker):
        ours = make(there)
        setattr(ours, _ORIGINAL, vars(worker).get(name))
        setattr(worker, name, ours)
    else:
        unbound = make(lambda _worker, *given, **named: there(*given, **named))
        ours = functools.partial(unbound, worker)
        setattr(ours, _ORIGINAL, vars(worker).get(name))
        setattr(worker, name, ours)


def _moving(_original: Any) -> Callable[[Any, Any], None]:
    def move(worker: Any, device: Any) -> None:
        mover_of(worker).move(device)

    return move


def _waiting(original: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def save_checkpoint(worker: Any, *given: Any, **named: Any) -> Any:
        mover = mover_of(worker)
        before, mover.blocking = mover.blocking, True
        try:
            return original(worker, *given, **named)
        finally:
            mover.blocking = before

    return save_checkpoint


# ---- The transports


class RefitCheckpointEngine(Engine):
    """NeMo-RL's CheckpointEngine over a refit publisher, for generation on other GPUs.

    Its keywords come from ``policy.generation.refit_cfg."refit.integrations.nemo_rl:
    RefitCheckpointEngine"``: those of ``refit.integrations._engine.Engine``, and
    ``release_after_refit``, by which NeMo-RL closes it after each refit. NeMo-RL makes one on each
    policy and each generation worker; the first policy rank publishes. Since 0.1.
    """

    cleanup_after_load = True
    shard_expert_weights = False

    def get_target_weight_layout(self) -> None:
        """All weights are sent whole: every worker takes the part it needs."""
        return

    def prepare(self) -> dict[str, Any]:
        """Says where the trainer would be, were it here: which side this is comes later. Since
        0.1."""
        return {"refit": self.announce()}

    def init_policy_process_group(
        self,
        *,
        worker_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: list[Any],
    ) -> None:
        """The first policy rank keeps its publisher; the others only take part. Since 0.1."""
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
        """Subscribes to the first policy rank. Since 0.1."""
        self.connect(metadata[0]["refit"], f"rollout-{rollout_rank}")

    def finalize(self) -> None:
        """Leaves; ``prepare`` begins anew. Since 0.1."""
        self.close()

    async def send_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Publishes `weights` as the next version; returns when all workers have applied it. On
        other ranks than the first, only runs it. Since 0.1."""
        await self.publish(weights)

    async def receive_weight_batches(self) -> AsyncGenerator[list[tuple[str, Any]], None]:
        """The next version, in batches of at most the bucket's size. Its tensors stay readable
        until the version after it is asked for. Since 0.1."""
        async with aclosing(self.batches()) as batches:
            async for batch in batches:
                yield batch


class RefitWeightSynchronizer:
    """NeMo-RL's WeightSynchronizer over RefitCheckpointEngine, for colocated generation as well.

    ``policy_generation.weight_synchronizer = RefitWeightSynchronizer(policy, policy_generation)``.
    `engine` holds the keywords of RefitCheckpointEngine; `wait` waits for what workers answer
    (None: ``ray.get``). Colocated, it moves the phases too, and whatever fails, the policy is left
    offloaded and the engine has its cache back. Since 0.1.
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
        """Whether the engine's weights are older than the policy's. Since 0.1."""
        return self._stale

    def mark_stale(self) -> None:
        """Says that a training step has changed the weights. Since 0.1."""
        self._stale = True

    def init_communicator(self) -> None:
        """Makes the engines on all workers and joins them; once. Since 0.1."""
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
        weights then count as stale. Since 0.1.
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
        """Ends the engines on all workers. Idempotent. Since 0.1."""
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
