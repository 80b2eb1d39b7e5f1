"""verl's hooks with refit behind them. verl is a stand-in, refit is real."""

import asyncio
import copy
import importlib
import pickle
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from stand_ins import megatron_core as mcore
from stand_ins import verl as fake

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from refit.errors import NotFoundError, StateError  # noqa: E402
from refit.integrations import verl  # noqa: E402
from refit.integrations._attached import attached, detach  # noqa: E402

WEIGHTS = {f"layer.{i}": torch.full((31,), float(i), dtype=torch.bfloat16) for i in range(9)}
ENGINE: dict[str, Any] = {"timeout_s": 30.0}


def _adamw(**named: Any) -> Any:
    torch.manual_seed(3)
    parameter = torch.nn.Parameter(torch.randn(64, 8))
    return torch.optim.AdamW([parameter], lr=0.1, **named)


def _step(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def _is_away(optimizer: Any) -> bool:
    moments = [one["exp_avg"] for one in optimizer.state.values()]
    return bool(moments) and all(one.untyped_storage().nbytes() == 0 for one in moments)


# ---- Offload


def test_installing_says_where_and_removing_puts_everything_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = fake.install(monkeypatch)
    before = dict(vars(engine))

    installation = verl.install()

    assert sorted(installation.places) == [
        "verl.utils.activation_offload.enable_activation_offloading",
        "verl.utils.fsdp_utils.load_fsdp_optimizer",
        "verl.utils.fsdp_utils.offload_fsdp_optimizer",
        "verl.utils.megatron.optimizer.get_megatron_optimizer",
        "verl.utils.megatron_utils.load_megatron_optimizer",
        "verl.utils.megatron_utils.offload_megatron_optimizer",
        "verl.workers.engine.fsdp.transformer_impl.enable_activation_offloading",
        "verl.workers.engine.fsdp.transformer_impl.load_fsdp_optimizer",
        "verl.workers.engine.fsdp.transformer_impl.offload_fsdp_optimizer",
    ]
    with pytest.raises(StateError, match="installed in this verl already"):
        verl.install()
    installation.remove()
    installation.remove()
    assert vars(engine) == before


def test_the_loop_ends_with_the_states_it_would_have_had_without_refit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = fake.install(monkeypatch)
    plain, ours = _adamw(), _adamw()
    with verl.install():
        engine = fake.FSDPEngine(module, ours)
        for _ in range(3):
            engine.to("cpu")
            engine.to("cpu")
            engine.to("cuda")
            engine.to("cuda")
            _step(ours)
            _step(plain)
            engine.to("cpu")
            assert _is_away(ours)
            engine.to("cuda")
    for mine, other in zip(ours.state.values(), plain.state.values(), strict=True):
        detach(ours)
        assert all(torch.equal(mine[key], other[key]) for key in other)


def test_step_stays_where_it_is_and_states_stay_the_same_objects() -> None:  # trap 7, 8
    optimizer = _adamw(fused=True)
    _step(optimizer)
    before = {key: id(value) for one in optimizer.state.values() for key, value in one.items()}
    verl.offload_fsdp_optimizer(optimizer)
    assert [float(one["step"]) for one in optimizer.state.values()] == [1.0]
    verl.load_fsdp_optimizer(optimizer, 0)
    _step(optimizer)
    after = {key: id(value) for one in optimizer.state.values() for key, value in one.items()}
    assert after == before
    detach(optimizer)


def test_an_optimizer_without_state_or_without_a_controller_is_left_alone() -> None:  # trap 9
    optimizer = _adamw()
    verl.load_fsdp_optimizer(optimizer, 0)
    verl.offload_fsdp_optimizer(optimizer)
    assert attached(optimizer) is None


HOST = {"states": "host", "window_bytes": "64KiB", "offload": {"timeout_ms": 20_000}}


def test_states_live_on_the_host_from_the_first_step_on(monkeypatch: pytest.MonkeyPatch) -> None:
    module = fake.install(monkeypatch)
    plain, ours = _adamw(), _adamw()
    with verl.install(HOST):
        engine = fake.FSDPEngine(module, ours)
        engine.to("cpu")  # as verl does when it has made the engine
        controller = attached(ours)
        for _ in range(3):
            engine.to("cuda")
            _step(ours)
            _step(plain)
            engine.to("cpu")
        stats = controller.stats()
        assert stats["refit/step_in_bytes"] == stats["refit/step_out_bytes"] == 64 * 8 * 4 * 2
    detach(ours)
    for mine, other in zip(ours.state.values(), plain.state.values(), strict=True):
        assert all(torch.equal(mine[key], other[key]) for key in other)


def _megatron(**said: Any) -> tuple[Any, Any]:
    """verl's Megatron engine makes its optimizer, with `override_optimizer_config`."""
    torch.manual_seed(5)
    layers = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)).bfloat16()
    model = mcore.DistributedDataParallel(layers)
    config = SimpleNamespace(optimizer="adam", **{"optimizer_cpu_offload": False, **said})
    makes = importlib.import_module("verl.utils.megatron.optimizer").get_megatron_optimizer
    return model, makes(model=[model], config=config)


def _megatron_steps(model: Any, optimizer: Any) -> list[Any]:
    moves = sys.modules["verl.utils.megatron_utils"]
    for step in range(3):
        moves.load_megatron_optimizer(optimizer)
        model.buffers[0].grad_data.copy_(torch.linspace(-1, 1 + step, 2 * 33 * 32))
        optimizer.step()
        moves.offload_megatron_optimizer(optimizer)
    detach(optimizer)
    return [*model.parameters(), *(one["exp_avg"] for one in optimizer.optimizer.state.values())]


CPU = {
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 0.5,
    "overlap_cpu_optimizer_d2h_h2d": True,
    "use_precision_aware_optimizer": True,
}


def test_megatrons_switches_give_the_optimizer_a_controller_from_its_first_step_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake.install(monkeypatch)
    with verl.install({"offload": {"timeout_ms": 20_000}}):
        plain = _megatron_steps(*_megatron())
        model, optimizer = _megatron(**CPU)
        assert attached(optimizer) is not None
        assert type(optimizer.optimizer) is torch.optim.AdamW
        assert optimizer.config.use_precision_aware_optimizer is False
        ours = _megatron_steps(model, optimizer)
    assert all(map(torch.equal, ours, plain))


def test_megatrons_own_offload_stays_where_memory_is_pageable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake.install(monkeypatch)
    with verl.install({"use_pinned_optimizer_offload": False}):
        _, optimizer = _megatron(**CPU)
        assert type(optimizer.optimizer) is mcore.HybridDeviceOptimizer
        assert attached(optimizer) is None


def test_a_verl_that_makes_its_megatron_optimizer_elsewhere_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = fake.install(monkeypatch)
    before = dict(vars(engine))
    monkeypatch.delattr(sys.modules["verl.utils.megatron.optimizer"], "get_megatron_optimizer")
    with pytest.raises(NotFoundError, match="has no get_megatron_optimizer"):
        verl.install()
    assert vars(engine) == before


ACTIVATIONS = {"activations": {"host_bytes": "1MiB", "min_bytes": "1KiB", "aim": "memory"}}


class Deep(torch.nn.Module):
    """A model whose layers are in a list."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def test_activations_leave_by_refit_where_they_have_host_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = fake.install(monkeypatch)
    before = dict(vars(engine))
    plain, ours, x = Deep(), Deep(), torch.randn(64, 32)
    installation = verl.install(ACTIVATIONS)
    engine.enable_activation_offloading(ours, "fsdp2", True)
    engine.enable_activation_offloading(ours, "fsdp2")
    offload = ours._refit_activations.offload
    for model in (plain, ours):
        model(x).square().mean().backward()
    assert offload.stats()["refit/activation_left_bytes_last"] > 0
    for mine, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)
    copied = copy.deepcopy(ours)
    assert copied._refit_activations.offload is None
    offload.close()
    installation.remove()
    assert vars(engine) == before


def test_without_host_memory_activations_leave_by_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake.install(monkeypatch)
    with verl.install(), pytest.raises(AssertionError, match="verl's own helper was called"):
        engine.enable_activation_offloading(Deep(), "fsdp2", True)


def test_a_verl_without_the_function_for_activations_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = fake.install(monkeypatch)
    before = dict(vars(engine))
    monkeypatch.delattr(
        sys.modules["verl.utils.activation_offload"], "enable_activation_offloading"
    )
    with pytest.raises(NotFoundError, match="has no enable_activation_offloading"):
        verl.install(ACTIVATIONS)
    assert vars(engine) == before


def test_a_step_without_the_load_brings_the_states_back() -> None:  # trap 10
    optimizer = _adamw()
    _step(optimizer)
    verl.offload_fsdp_optimizer(optimizer)
    _step(optimizer)
    assert not _is_away(optimizer)
    detach(optimizer)


def test_neither_a_state_dict_nor_a_copy_has_the_controller() -> None:  # trap 7, 27
    optimizer = _adamw()
    _step(optimizer)
    verl.offload_fsdp_optimizer(optimizer)
    state = optimizer.state_dict()
    assert not _is_away(optimizer)
    assert set(state) == {"state", "param_groups"}
    assert attached(copy.deepcopy(optimizer)) is None
    assert attached(pickle.loads(pickle.dumps(optimizer))) is None
    detach(optimizer)
    detach(optimizer)


def test_megatron_masters_and_chains_leave_and_return() -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(8, 16)).bfloat16()
    model = mcore.DistributedDataParallel(layers)
    inner = mcore.DistributedOptimizer(model)
    model.buffers[0].grad_data.fill_(0.5)
    inner.step()
    chain = mcore.ChainedOptimizer([inner, mcore.MegatronOptimizer(None)])
    masters = [one for one in inner.shard_fp32_from_float16_groups[0] if one is not None]
    before = [one.detach().clone() for one in masters]

    verl.offload_megatron_optimizer(chain)
    verl.offload_megatron_optimizer(chain)
    assert _is_away(inner.optimizer)
    assert all(one.untyped_storage().nbytes() == 0 for one in masters)
    verl.load_megatron_optimizer(chain)
    attached(chain).join()

    assert all(torch.equal(mine, other) for mine, other in zip(masters, before, strict=True))
    detach(chain)


def test_scratch_memory_is_dropped_as_verl_drops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # after offload_megatron_optimizer of verl 0.9.1
    wgrads, shared = {"w": torch.ones(2)}, SimpleNamespace(buffer={"b": torch.ones(2)})
    engine, state = "transformer_engine.pytorch.module.base", "megatron.core.parallel_state"
    monkeypatch.setitem(sys.modules, engine, SimpleNamespace(_dummy_wgrads=wgrads))
    monkeypatch.setitem(sys.modules, state, SimpleNamespace(_GLOBAL_MEMORY_BUFFER=shared))
    verl.offload_megatron_optimizer(mcore.MegatronOptimizer(None))
    assert (wgrads, shared.buffer) == ({}, {})
    shared_gone = SimpleNamespace(_GLOBAL_MEMORY_BUFFER=None)
    monkeypatch.setitem(sys.modules, state, shared_gone)
    verl.offload_megatron_optimizer(mcore.MegatronOptimizer(None))


def test_a_rank_without_parameters_offloads_nothing() -> None:
    chain = mcore.ChainedOptimizer([mcore.MegatronOptimizer(None)])
    verl.offload_megatron_optimizer(chain)
    verl.load_megatron_optimizer(chain)
    assert attached(chain) is None


def test_options_reach_the_controller_and_bad_ones_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = fake.install(monkeypatch)
    optimizer = _adamw()
    _step(optimizer)
    with (
        verl.install({"offload": {"slabs": 1}}),
        pytest.raises(NotFoundError, match="slab_bytes"),
    ):
        module.offload_fsdp_optimizer(optimizer)
    assert not _is_away(optimizer)


def test_one_of_the_two_modules_may_be_missing_but_not_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake.install(monkeypatch, megatron=False)
    with verl.install() as installation:
        assert not [place for place in installation.places if "megatron" in place]
    monkeypatch.undo()
    with pytest.raises(NotFoundError, match="verl is not there"):
        verl.install()


def test_a_verl_without_the_helpers_is_refused_and_left_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = fake.install(monkeypatch)
    before = module.offload_fsdp_optimizer
    del sys.modules["verl.utils.megatron_utils"].load_megatron_optimizer
    with pytest.raises(NotFoundError, match="has no load_megatron_optimizer"):
        verl.install()
    assert module.offload_fsdp_optimizer is before


# ---- Weights


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake.CheckpointEngineManager]:
    fake.install(monkeypatch)
    verl.register()
    trainer = [fake.EngineWorker(ENGINE, is_master=rank == 0) for rank in range(2)]
    rollout = [fake.EngineWorker(ENGINE) for _ in range(2)]
    made = fake.CheckpointEngineManager(trainer, rollout)
    yield made
    made.close()


def _hold(manager: fake.CheckpointEngineManager, value: float) -> bool:
    return all(
        worker.loaded.keys() == WEIGHTS.keys()
        and all(torch.equal(worker.loaded[name], WEIGHTS[name] + value) for name in WEIGHTS)
        for worker in manager.rollout
    )


def _plus(value: float) -> dict[str, Any]:
    return {name: tensor + value for name, tensor in WEIGHTS.items()}


def test_all_rollouts_get_each_version_under_the_trainers_number(
    manager: fake.CheckpointEngineManager,
) -> None:
    for step in (10, 20, 30):
        figures = manager.update_weights(_plus(step), global_steps=step)
        assert _hold(manager, step)
        assert manager.rollout[0].checkpoint_engine.version == step
        assert figures[0]["workers"] == 2


def test_tensors_stay_readable_until_the_engine_is_done(
    manager: fake.CheckpointEngineManager,
) -> None:  # trap 31: the adapter copies after the last tensor has come
    manager.update_weights(_plus(1))
    assert _hold(manager, 1)


def test_a_number_that_is_used_up_is_replaced_by_the_next_one(
    manager: fake.CheckpointEngineManager,
) -> None:  # trap 35
    manager.update_weights(_plus(1), global_steps=7)
    manager.update_weights(_plus(2), global_steps=1)
    assert _hold(manager, 2)
    assert manager.trainer[0].checkpoint_engine.version == 8


def test_every_rank_runs_the_generator_to_its_end(
    manager: fake.CheckpointEngineManager,
) -> None:  # trap 34
    manager.update_weights(_plus(0))
    assert [worker.gathered for worker in manager.trainer] == [list(WEIGHTS)] * 2


def test_a_rollout_that_stops_early_refuses_and_the_next_refit_heals(
    manager: fake.CheckpointEngineManager,
) -> None:  # trap 12
    manager.rollout[0].fails_at = "layer.4"
    with pytest.raises(Exception, match=r"rollout-0: the engine stopped before"):
        manager.update_weights(_plus(1))
    assert manager.rollout[0].checkpoint_engine.version == 0
    assert manager.trainer[1].gathered == list(WEIGHTS)

    manager.rollout[0].fails_at = None
    manager.update_weights(_plus(2))
    while not _hold(manager, 2):  # it may be offered first what it has refused
        manager.update_weights(_plus(2))


def test_other_weights_than_before_are_declared_again(
    manager: fake.CheckpointEngineManager,
) -> None:
    manager.update_weights(_plus(1))
    more = {**_plus(2), "head": torch.ones(3)}
    engine = manager.trainer[0].checkpoint_engine
    with pytest.raises(NotFoundError, match="'head' was not declared"):
        asyncio.run(engine.send_weights(iter(more.items())))
    assert engine.version == 1
    manager.update_weights(more)
    assert all(worker.loaded.keys() == more.keys() for worker in manager.rollout)


def test_a_generator_that_fails_aborts_the_version(
    manager: fake.CheckpointEngineManager,
) -> None:
    manager.update_weights(_plus(1))
    engine = manager.trainer[0].checkpoint_engine

    def broken() -> Any:
        yield "layer.0", WEIGHTS["layer.0"]
        raise OSError("the shard is gone")

    with pytest.raises(OSError, match="the shard is gone"):
        asyncio.run(engine.send_weights(broken()))
    assert engine.version == 1
    manager.update_weights(_plus(3))
    assert _hold(manager, 3)


def test_a_topology_has_one_publisher() -> None:
    with pytest.raises(StateError, match="0 workers publish"):
        verl.RefitCheckpointEngine.build_topology(1, 1, [{}, {}])


def test_a_rollout_that_was_not_told_where_to_go_says_so() -> None:
    async def receive() -> None:
        async for _ in verl.RefitCheckpointEngine(1 << 20).receive_weights():
            raise AssertionError

    with pytest.raises(StateError, match="process group was not initialized"):
        asyncio.run(receive())
