"""NeMo-RL's loop with refit's mover and transports. NeMo-RL is a stand-in, refit is real."""

import asyncio
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from broadcasting import wait_until
from stand_ins import megatron_core as mcore
from stand_ins import nemo_rl as fake

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from refit.errors import ConfigError, InvalidError, StateError, UnsupportedError  # noqa: E402
from refit.integrations import nemo_rl  # noqa: E402
from stand_ins.optimizers import (  # noqa: E402
    assert_same_states,
    is_away,
    moments,
    step,
    stepped,
)

PINNED = {"use_pinned_optimizer_offload": True, "use_coalesced_optimizer_offload": False}
MODES = {
    "pageable": {"use_pinned_optimizer_offload": False, "use_coalesced_optimizer_offload": False},
    "pinned": PINNED,
    "coalesced-pinned": {**PINNED, "use_coalesced_optimizer_offload": True},
}


Make = Callable[..., Any]


@pytest.fixture
def patched() -> Iterator[Make]:
    """Makes a worker with refit's mover; its keys are PINNED, if no others are given."""
    made: list[Any] = []

    def make(optimizer: Any, model: Any = None, kind: Any = None, **keys: Any) -> Any:
        more = {} if model is None else {"model": model}
        kind = kind or fake.MegatronPolicyWorkerImpl
        worker = nemo_rl.patch_worker(kind(optimizer, **more, **(keys or PINNED)))
        made.append(worker)
        return worker

    yield make
    for worker in made:
        nemo_rl.unpatch_worker(worker)


def _megatron() -> Any:
    torch.manual_seed(5)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)).bfloat16()
    model = mcore.DistributedDataParallel(layers)
    optimizer = mcore.DistributedOptimizer(model)
    model.buffers[0].grad_data.fill_(0.5)
    optimizer.step()
    return optimizer, model


# ---- the keys


def test_coalesced_without_pinned_is_refused_with_a_sentence(patched: Make) -> None:
    keys = {**MODES["pageable"], "use_coalesced_optimizer_offload": True}
    with pytest.raises(ConfigError, match="coalesced_optimizer_offload requires"):
        nemo_rl.offload_mode(keys)
    with pytest.raises(ConfigError):
        patched(stepped(), **keys)


@pytest.mark.parametrize("missing", PINNED)
def test_a_key_that_is_not_there_is_refused_with_what_to_write(missing: str) -> None:
    keys = {key: value for key, value in PINNED.items() if key != missing}
    with pytest.raises(ConfigError, match=rf"\+\+policy.{missing}=true"):
        nemo_rl.offload_mode(keys)


# ---- the mover in the loop


@pytest.mark.parametrize("mode", MODES)
def test_loop_ends_with_same_states_as_without_refit(patched: Make, mode: str) -> None:
    plain, ours = stepped(), stepped()
    worker = patched(ours, **MODES[mode])
    for _ in range(3):
        worker.offload_before_refit()
        assert is_away(ours)
        worker.offload_after_refit()  # trap: it offloads again
        assert is_away(ours)
        worker.prepare_for_training()
        worker.prepare_for_training()
        assert not is_away(ours)
        step(ours)
        step(plain)
    assert_same_states(ours, plain)
    assert nemo_rl.mover_of(worker).mode == mode


def test_states_live_on_host_if_policy_configuration_says_so(patched: Make) -> None:
    plain, ours = stepped(), stepped()
    refit_options = {
        "offload": {"window_bytes": "64KiB"},
        "schedule": {"host_states": {"windows": 2}},
    }
    worker = patched(ours, **MODES["coalesced-pinned"], refit=refit_options)
    for _ in range(2):
        worker.offload_before_refit()
        worker.offload_after_refit()
        worker.prepare_for_training()
        step(ours)
        step(plain)
    assert_same_states(ours, plain)
    stats = nemo_rl.mover_of(worker).controller.stats()
    assert stats["refit/step_out_bytes"] == 64 * 8 * 4 * 2


def test_states_on_the_host_are_refused_without_pinned_memory(patched: Make) -> None:
    worker = patched(stepped(), **MODES["pageable"], refit={"schedule": "host_states"})
    with pytest.raises(UnsupportedError, match="use_pinned_optimizer_offload"):
        worker.offload_before_refit()


def test_megatron_masters_and_states_leave_and_return(patched: Make) -> None:
    plain, _ = _megatron()
    ours, model = _megatron()
    worker = patched(ours, model)
    masters = [one for one in ours.shard_fp32_from_float16_groups[0] if one is not None]

    worker.offload_before_refit()
    assert is_away(ours.optimizer)
    assert is_away(masters)
    assert not is_away([model.buffers[0].param_data])

    worker.prepare_for_training()
    ours.step()
    plain.model_chunks[0].buffers[0].grad_data.copy_(model.buffers[0].grad_data)
    plain.step()
    for mine, other in zip(masters, plain.shard_fp32_from_float16_groups[0], strict=False):
        assert torch.equal(mine, other)


def test_dtensor_workers_keep_step_where_it_is(patched: Make) -> None:  # trap 8
    optimizer = stepped()
    worker = patched(optimizer, kind=fake.DTensorPolicyWorkerV2Impl)
    steps = [one["step"] for one in optimizer.state.values()]
    worker.offload_before_refit()
    assert is_away(optimizer)
    assert [float(one) for one in steps] == [1.0]
    worker.prepare_for_training()
    step(optimizer)
    assert [one["step"] for one in optimizer.state.values()] == steps


@pytest.mark.parametrize("by", ["instance", "class"])
def test_megatron_before_refit_finalizes_async_save_first(by: str) -> None:  # trap 14
    optimizer = stepped()
    kind = type("Worker", (fake.MegatronPolicyWorkerImpl,), {})
    if by == "class":
        nemo_rl.patch_worker(kind)
    worker = kind(optimizer, **PINNED)
    if by == "instance":
        nemo_rl.patch_worker(worker)
    seen: list[bool] = []
    worker.finalize_async_save = lambda: seen.append(is_away(optimizer))

    worker.offload_before_refit()

    assert seen == [False]
    assert is_away(optimizer)


@pytest.mark.parametrize("wanted", [False, True])
def test_megatron_before_refit_honors_optimizer_offload_option(patched: Make, wanted: bool) -> None:
    worker = patched(stepped())
    worker.offload_optimizer_for_refit = wanted
    worker.offload_before_refit()
    assert is_away(worker.optimizer) is wanted


def test_megatron_after_refit_finalizes_save_before_model_move(patched: Make) -> None:
    worker = patched(stepped())
    worker.offload_after_refit()
    assert worker.events[:2] == ["finalize_async_save", "move_model_cpu"]


def test_megatron_save_checkpoint_onloads_before_save(patched: Make) -> None:  # trap 13
    optimizer = stepped()
    before = [one.clone() for one in moments(optimizer)]
    worker = patched(optimizer)
    worker.offload_before_refit()
    seen: list[Any] = []
    worker.while_saving = lambda: seen.extend(one.clone() for one in moments(optimizer))

    assert worker.save_checkpoint("weights", "optimizer") == "weights"

    assert all(map(torch.equal, seen, before))
    assert nemo_rl.mover_of(worker).controller.state == "training"
    assert not nemo_rl.mover_of(worker).blocking


def test_megatron_native_cpu_optimizer_keeps_its_placement(patched: Make) -> None:
    worker = patched(stepped())
    worker.optimizer_cpu_offload = True
    worker.offload_before_refit()
    worker.move_optimizer("cpu")
    worker.prepare_for_training()
    assert not is_away(worker.optimizer)
    assert nemo_rl.mover_of(worker).controller is None


def test_open_train_buffers_are_left_alone_before_log_probs(patched: Make) -> None:  # trap 11
    worker = patched(stepped())
    worker.offload_optimizer_for_logprob = True
    worker.prepare_for_lp_inference(keep_train_buffers=True)
    assert not is_away(worker.optimizer)
    worker.prepare_for_lp_inference()
    assert is_away(worker.optimizer)


# ---- Megatron's own offload of states


def _layers() -> Any:
    torch.manual_seed(5)
    layers = [torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32)]
    return mcore.DistributedDataParallel(torch.nn.Sequential(*layers).bfloat16())


def _asked(pinned: bool = True, **said: Any) -> dict[str, Any]:
    """A policy that asks for Megatron's own offload of states."""
    offload = {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": 0.5,
        "overlap_cpu_optimizer_d2h_h2d": True,
        "use_precision_aware_optimizer": True,
        **said,
    }
    keys = MODES["pinned" if pinned else "pageable"]
    return {"megatron_cfg": {"enabled": True, "optimizer": offload}, **keys}


def _trained(worker: Any, steps: int = 3) -> list[Any]:
    for number in range(steps):
        worker.offload_before_refit()
        worker.prepare_for_training()
        worker.model.buffers[0].grad_data.copy_(torch.linspace(-1, 1 + number, 2 * 33 * 32))
        worker.optimizer.step()
    return [one.detach().clone() for one in worker.model.parameters()]


@pytest.fixture
def patched_class() -> Iterator[Any]:
    yield nemo_rl.patch_worker(fake.MegatronPolicyWorker)
    nemo_rl.unpatch_worker(fake.MegatronPolicyWorker)
    assert nemo_rl.take_offload.__name__ not in repr(fake.MegatronPolicyWorker.__init__)


def test_refit_takes_megatron_switches_with_pinned_memory(
    patched_class: Any,
) -> None:
    plain = _asked(optimizer_cpu_offload=False, overlap_cpu_optimizer_d2h_h2d=False)
    expected = _trained(fake.MegatronPolicyWorker(plain, model=_layers()))
    policy = _asked()
    worker = patched_class(policy, None, model=_layers())

    assert (worker.optimizer_cpu_offload, policy["refit"]) == (
        False,
        {"schedule": {"cpu_step": {"fraction": 0.5}}},
    )
    assert policy["megatron_cfg"]["optimizer"]["use_precision_aware_optimizer"] is False
    found = _trained(worker)
    assert all(map(torch.equal, found, expected))
    states = worker.optimizer.optimizer.state.values()
    assert sum(one["exp_avg"].untyped_storage().nbytes() > 0 for one in states) == 4
    nemo_rl.mover_of(worker).close()


def test_host_share_exists_before_first_step_without_refit(
    patched_class: Any,
) -> None:
    worker = patched_class(_asked(), model=_layers())
    worker.offload_optimizer_for_refit = False
    _trained(worker, 1)
    assert nemo_rl.mover_of(worker).controller is not None
    nemo_rl.mover_of(worker).close()


def test_megatron_offload_stays_if_states_use_pageable_memory(
    patched_class: Any,
) -> None:
    policy = _asked(pinned=False)
    worker = patched_class(policy, model=_layers())
    assert type(worker.optimizer.optimizer) is mcore.HybridDeviceOptimizer
    assert "refit" not in policy
    worker.prepare_for_training()
    assert nemo_rl.mover_of(worker).controller is None


def test_contradicting_options_are_refused_and_change_nothing() -> None:
    policy = {**_asked(), "refit": {"schedule": {"cpu_step": {"fraction": 0.25}}}}
    before = repr(policy)
    with pytest.raises(
        ConfigError, match=r"schedule.cpu_step.fraction is 0.25, and .* asks for 0.5"
    ):
        nemo_rl.take_offload(policy)
    with pytest.raises(InvalidError, match="share from 0 to 1"):
        nemo_rl.take_offload(_asked(optimizer_offload_fraction=2))
    assert repr(policy) == before
    picked = {"schedule": {"cpu_step": {"fraction": 0.5, "params": "largest"}}}
    policy["refit"] = picked
    assert nemo_rl.take_offload(policy) == policy["refit"] == picked
    assert nemo_rl.take_offload(policy) == {}


def test_a_policy_without_megatron_is_left_alone() -> None:
    policy = _asked()
    policy["megatron_cfg"]["enabled"] = False
    before = repr(policy)
    assert nemo_rl.take_offload(policy) == nemo_rl.take_offload(dict(PINNED)) == {}
    assert repr(policy) == before


def test_megatron_offload_stays_if_optimizers_step_on_gpus_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = SimpleNamespace(USING_PYTORCH_OPTIMIZER=False)  # of Transformer Engine
    monkeypatch.setitem(sys.modules, "megatron.core.optimizer", found)
    policy = _asked()
    before = repr(policy)
    with pytest.warns(UserWarning, match="stays Megatron's own: .* steps on GPUs only"):
        assert nemo_rl.take_offload(policy) == {}
    assert repr(policy) == before
    policy["megatron_cfg"]["optimizer"] = {
        "chunked_optimizer_state_offload": True,
        "optimizer_state_offload_chunk_size_mb": 1,
    }
    assert nemo_rl.take_offload(policy) == {"schedule": {"host_states": {"window_bytes": 1 << 20}}}


def test_windows_of_megatron_are_refits_too() -> None:
    policy = _asked(optimizer_cpu_offload=False, chunked_optimizer_state_offload=True)
    with pytest.warns(UserWarning, match="=0 brings all states") as seen:
        assert nemo_rl.take_offload(policy) == {"schedule": {"host_states": {}}}
    assert len(seen) == 1
    assert policy["refit"] == {"schedule": {"host_states": {}}}


# ---- patching


def test_second_patch_does_nothing_and_unpatch_restores_worker() -> None:
    optimizer = stepped()
    worker = fake.MegatronPolicyWorkerImpl(optimizer, **PINNED)
    nemo_rl.patch_worker(nemo_rl.patch_worker(worker))
    worker.offload_before_refit()

    nemo_rl.unpatch_worker(nemo_rl.unpatch_worker(worker))

    assert not is_away(optimizer)
    worker.offload_before_refit()
    assert worker.events[-1] == "move_optimizer_cpu"
    assert not is_away(optimizer)


def test_a_patched_class_moves_for_each_of_its_workers() -> None:
    kind = type("Worker", (fake.MegatronPolicyWorkerImpl,), {})
    nemo_rl.patch_worker(nemo_rl.patch_worker(kind))
    first, second = kind(stepped(), **PINNED), kind(stepped(), **PINNED)

    first.offload_before_refit()

    assert is_away(first.optimizer)
    assert not is_away(second.optimizer)
    nemo_rl.unpatch_worker(kind)
    assert "move_optimizer" not in vars(kind)
    first.move_optimizer("cpu")
    assert first.events[-1] == "move_optimizer_cpu"


def test_a_worker_that_is_gone_leaves_its_optimizer_whole() -> None:
    optimizer = stepped()
    worker = nemo_rl.patch_worker(fake.MegatronPolicyWorkerImpl(optimizer, **PINNED))
    worker.offload_before_refit()
    del worker
    gc.collect()
    assert not is_away(optimizer)
    step(optimizer)


def test_another_optimizer_gets_another_controller(patched: Make) -> None:
    worker = patched(stepped())
    worker.offload_before_refit()
    old, worker.optimizer = worker.optimizer, stepped()
    worker.offload_before_refit()
    assert not is_away(old)
    assert is_away(worker.optimizer)


def test_release_gives_the_host_memory_back(patched: Make) -> None:
    worker = patched(stepped())
    nemo_rl.release(worker)
    nemo_rl.move_optimizer(worker, "cpu")
    nemo_rl.release(worker)
    assert not is_away(worker.optimizer)
    nemo_rl.move_optimizer(worker, torch.device("cpu"))
    assert is_away(worker.optimizer)


def test_what_is_no_device_and_what_is_no_worker_are_refused(patched: Make) -> None:
    with pytest.raises(InvalidError, match='"cpu" or "cuda"'):
        patched(stepped()).move_optimizer("disk")
    with pytest.raises(StateError, match="not a policy worker"):
        nemo_rl.patch_worker(object())


# ---- the transports

WEIGHTS = {f"layer.{i}": torch.full((31,), float(i)) for i in range(9)}
ENGINE = {"timeout_s": 30.0}


class Cluster:
    """A policy of two ranks and two generation workers, and what happened to them in order."""

    def __init__(self, **said: Any) -> None:
        self.events: list[str] = []
        self.weights = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
        self.policy = fake.Policy(self.weights, 2, self.events)
        self.generation = fake.Generation(2, self.events)
        self.synchronizer = nemo_rl.RefitWeightSynchronizer(
            self.policy,
            self.generation,
            engine=ENGINE,
            bucket_bytes=300,
            wait=lambda answers: [one.result() for one in answers],
            **said,
        )

    @property
    def rollouts(self) -> list[Any]:
        return self.generation.worker_group.workers

    def close(self) -> None:
        self.synchronizer.shutdown()
        self.policy.worker_group.close()
        self.generation.worker_group.close()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.close()


def test_all_generation_workers_get_each_version_in_batches(cluster: Cluster) -> None:
    timer = fake.Timer()
    for version in (1, 2, 3):
        for tensor in cluster.weights.values():
            tensor.add_(100)
        assert cluster.synchronizer.is_stale
        figures = cluster.synchronizer.sync_weights(timer=timer)
        assert not cluster.synchronizer.is_stale
        cluster.synchronizer.mark_stale()
        assert figures["sync_s"] > 0
        assert all(type(value) in (int, float) for value in figures.values())
        for worker in cluster.rollouts:
            assert worker.checkpoint_engine.version == version
            assert worker.loaded.keys() == WEIGHTS.keys()
            for name, tensor in cluster.weights.items():
                assert torch.equal(worker.loaded[name], tensor)
    assert cluster.rollouts[0].batches == 3 * 5
    assert timer.labels == ["prepare_for_generation/transfer_and_update_weights"] * 3


def test_every_rank_runs_the_generator_to_its_end(cluster: Cluster) -> None:  # trap 34
    cluster.synchronizer.sync_weights()
    for worker in cluster.policy.worker_group.workers:
        assert worker.gathered == list(WEIGHTS)


def test_colocated_generation_is_given_its_phases_in_order(cluster: Cluster) -> None:
    cluster.synchronizer.sync_weights()
    assert cluster.events == [
        "offload_before_refit",
        "generation_weights",
        "offload_after_refit",
        "generation_kv_cache",
    ]


def test_failing_worker_leaves_weights_stale_and_phases_whole(
    cluster: Cluster,
) -> None:  # trap 12, 34
    cluster.rollouts[1].fails = True

    with pytest.raises(Exception, match=r"rollout-1: the engine stopped before"):
        cluster.synchronizer.sync_weights()

    assert cluster.synchronizer.is_stale
    assert cluster.events[-2:] == ["offload_after_refit", "generation_kv_cache"]
    for worker in cluster.policy.worker_group.workers:
        assert worker.gathered == list(WEIGHTS)

    cluster.rollouts[1].fails = False
    while cluster.synchronizer.is_stale:
        cluster.synchronizer.sync_weights()
    assert all(worker.loaded.keys() == WEIGHTS.keys() for worker in cluster.rollouts)


def test_generation_elsewhere_keeps_its_phases_to_the_loop() -> None:
    made = Cluster(colocated=False)
    made.synchronizer.sync_weights()
    assert made.events == []
    made.close()
    made.synchronizer.shutdown()


def test_engines_can_be_closed_and_reopened_after_each_refit(cluster: Cluster) -> None:
    for _ in range(2):
        cluster.synchronizer.sync_weights()
        cluster.synchronizer.shutdown()
    assert all(worker.checkpoint_engine.version == 0 for worker in cluster.rollouts)
    assert all(worker.loaded.keys() == WEIGHTS.keys() for worker in cluster.rollouts)


def test_engine_takes_nemo_rl_options_and_refuses_bad_address() -> None:
    made = fake.create_checkpoint_engine(
        nemo_rl.RefitWeightSynchronizer.backend,
        bucket_size_bytes=1 << 20,
        engine_kwargs={"release_after_refit": True},
    )
    assert (made.shard_expert_weights, made.cleanup_after_load) == (False, True)
    assert made.get_target_weight_layout() is None
    with pytest.raises(ConfigError, match="timeout_s is -1: it is a number of seconds"):
        fake.create_checkpoint_engine(
            nemo_rl.RefitWeightSynchronizer.backend,
            bucket_size_bytes=1 << 20,
            engine_kwargs={"timeout_s": -1},
        )
    with pytest.raises(ConfigError, match="under which host name"):
        nemo_rl.RefitCheckpointEngine(1 << 20, bind="tcp://0.0.0.0:0")


def test_the_first_policy_rank_must_be_the_first_in_the_metadata() -> None:
    made = nemo_rl.RefitCheckpointEngine(1 << 20)
    made.prepare()
    with pytest.raises(StateError, match="first policy rank"):
        made.init_policy_process_group(
            worker_rank=0,
            train_world_size=1,
            rollout_world_size=1,
            metadata=[{"refit": "tcp://127.0.0.1:1"}],
        )
    made.finalize()


def test_a_fixed_address_is_bound_by_the_first_policy_rank_only(runtime_dir: Path) -> None:
    said = {"bind": f"ipc://{runtime_dir}/policy", "timeout_s": 30.0}
    ranks = [nemo_rl.RefitCheckpointEngine(1 << 20, **said) for _ in range(3)]
    metadata = [one.prepare() for one in ranks]
    topology = {"train_world_size": 2, "rollout_world_size": 1, "metadata": metadata}
    for rank, one in enumerate(ranks[:2]):
        one.init_policy_process_group(worker_rank=rank, **topology)
    ranks[2].init_rollout_process_group(rollout_rank=0, **topology)

    assert [one.endpoint for one in ranks] == [said["bind"], None, None]

    async def refit() -> list[str]:
        sending = asyncio.gather(*(one.send_weights(iter(WEIGHTS.items())) for one in ranks[:2]))
        names = [name async for batch in ranks[2].receive_weight_batches() for name, _ in batch]
        await sending
        return names

    assert asyncio.run(refit()) == list(WEIGHTS)  # both ends on one loop do not wait for each other
    for one in ranks:
        one.finalize()


def _alone(rollouts: int) -> Any:
    engine = nemo_rl.RefitCheckpointEngine(1 << 20, timeout_s=300.0)
    engine.init_policy_process_group(
        worker_rank=0, train_world_size=1, rollout_world_size=rollouts, metadata=[engine.prepare()]
    )
    return engine


def test_sender_cancelled_while_waiting_ends_and_can_send_later() -> None:
    engine = _alone(rollouts=1)  # no rollout connects

    async def cancel() -> None:
        task = asyncio.create_task(engine.send_weights(iter(WEIGHTS.items())))
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancel())
    engine.expect(0)
    asyncio.run(engine.send_weights(iter(WEIGHTS.items())))
    assert engine.version == 1
    engine.finalize()


def test_sender_cancelled_during_commit_drops_version() -> None:
    engine = _alone(rollouts=1)
    worker = nemo_rl.RefitCheckpointEngine(1 << 20, timeout_s=30.0)
    worker.connect(engine.endpoint, "slow")
    seen: list[str] = []

    def weights() -> Any:
        for name, tensor in WEIGHTS.items():
            seen.append(name)
            yield name, tensor

    async def cancel() -> None:
        task = asyncio.create_task(engine.send_weights(weights()))
        arrival = asyncio.create_task(anext(aiter(worker.receive_weight_batches())))
        await arrival  # committed by the trainer, and not yet applied
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancel())
    assert seen == list(WEIGHTS)
    worker.finalize()
    wait_until(lambda: engine.stats()["workers"] == 0)
    engine.expect(0)
    asyncio.run(engine.send_weights(weights()))
    assert engine.version == 2
    engine.finalize()
