"""What verl's hooks do that tests/frameworks/verl does not show with verl itself: Megatron's pair,
which verl offers on GPUs, and failures. verl is a stand-in here.
"""

import asyncio
import copy
import gc
import importlib
import os
import pickle
import select
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from stand_ins import megatron_core as mcore
from stand_ins import verl as fake

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from hooked import calls_refit  # noqa: E402
from refit import ActivationOffload, Publisher  # noqa: E402
from refit.errors import (  # noqa: E402
    BudgetError,
    ConfigError,
    InvalidError,
    NotFoundError,
    StateError,
)
from refit.integrations import verl  # noqa: E402
from refit.integrations._receiver import subscribe  # noqa: E402
from refit.integrations.verl import attached  # noqa: E402
from stand_ins.optimizers import adamw, is_away, step, stepped  # noqa: E402

WEIGHTS = {f"layer.{i}": torch.full((31,), float(i), dtype=torch.bfloat16) for i in range(9)}
ENGINE: dict[str, Any] = {"timeout_s": 30.0}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of verl that calls the helpers."""
    return fake.install(monkeypatch)


# ---- Offload


def test_installing_says_where_and_removing_puts_everything_back(engine: Any) -> None:
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


def test_step_stays_where_it_is_and_states_stay_the_same_objects() -> None:  # trap 7, 8
    optimizer = stepped(fused=True)
    before = {key: id(value) for one in optimizer.state.values() for key, value in one.items()}
    verl.offload_fsdp_optimizer(optimizer)
    assert [float(one["step"]) for one in optimizer.state.values()] == [1.0]
    verl.load_fsdp_optimizer(optimizer, 0)
    step(optimizer)
    after = {key: id(value) for one in optimizer.state.values() for key, value in one.items()}
    assert after == before
    attached(optimizer).close()


def test_optimizer_without_state_or_controller_is_left_alone() -> None:  # trap 9
    optimizer = adamw()
    verl.load_fsdp_optimizer(optimizer, 0)
    verl.offload_fsdp_optimizer(optimizer)
    assert attached(optimizer) is None


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
    for number in range(3):
        moves.load_megatron_optimizer(optimizer)
        model.buffers[0].grad_data.copy_(torch.linspace(-1, 1 + number, 2 * 33 * 32))
        optimizer.step()
        moves.offload_megatron_optimizer(optimizer)
    attached(optimizer).close()
    return [*model.parameters(), *(one["exp_avg"] for one in optimizer.optimizer.state.values())]


CPU = {
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 0.5,
    "overlap_cpu_optimizer_d2h_h2d": True,
    "use_precision_aware_optimizer": True,
}


@pytest.mark.usefixtures("engine")
def test_megatron_switches_add_controller_from_first_step() -> None:
    with verl.install({"offload": {"timeout_ms": 20_000}}):
        plain = _megatron_steps(*_megatron())
        model, optimizer = _megatron(**CPU)
        assert attached(optimizer) is not None
        assert type(optimizer.optimizer) is torch.optim.AdamW
        assert optimizer.config.use_precision_aware_optimizer is False
        ours = _megatron_steps(model, optimizer)
    assert all(map(torch.equal, ours, plain))


@pytest.mark.usefixtures("engine")
def test_megatrons_own_offload_stays_where_memory_is_pageable() -> None:
    with verl.install({"use_pinned_optimizer_offload": False}):
        _, optimizer = _megatron(**CPU)
        assert type(optimizer.optimizer) is mcore.HybridDeviceOptimizer
        assert attached(optimizer) is None


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("verl.utils.megatron.optimizer", "get_megatron_optimizer"),
        ("verl.utils.megatron_utils", "load_megatron_optimizer"),
        ("verl.utils.activation_offload", "enable_activation_offloading"),
    ],
)
def test_verl_without_one_function_is_refused_and_unchanged(
    engine: Any, monkeypatch: pytest.MonkeyPatch, module: str, name: str
) -> None:
    before = dict(vars(engine))
    monkeypatch.delattr(sys.modules[module], name)
    with pytest.raises(NotFoundError, match=f"has no {name}"):
        verl.install(ACTIVATIONS)
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


def test_copied_model_has_no_offload_and_second_call_adds_none() -> None:
    def offloads() -> list[Any]:
        return [one for one in gc.get_objects() if type(one) is ActivationOffload]

    model, before = Deep(), offloads()
    verl.enable_activation_offloading(model, "fsdp2", config=ACTIVATIONS)
    verl.enable_activation_offloading(model, "fsdp2", config=ACTIVATIONS)
    (offload,) = [one for one in offloads() if one not in before]
    model(torch.ones(64, 32)).sum().backward()
    figures = offload.stats()
    assert figures["refit/activation_left_bytes_last"] > 0
    copy.deepcopy(model)(torch.ones(64, 32)).sum().backward()
    assert offload.stats() == figures
    offload.close()
    assert not calls_refit(lambda: model(torch.ones(64, 32)))


def test_without_host_memory_activations_leave_by_verl(engine: Any) -> None:
    with verl.install(), pytest.raises(AssertionError, match="verl's own helper was called"):
        engine.enable_activation_offloading(Deep(), "fsdp2", True)


def test_neither_a_state_dict_nor_a_copy_has_the_controller() -> None:  # trap 7, 27
    optimizer = stepped()
    verl.offload_fsdp_optimizer(optimizer)
    state = optimizer.state_dict()
    assert not is_away(optimizer)
    assert set(state) == {"state", "param_groups"}
    assert attached(copy.deepcopy(optimizer)) is None
    assert attached(pickle.loads(pickle.dumps(optimizer))) is None
    attached(optimizer).close()


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
    assert is_away(inner.optimizer)
    assert is_away(masters)
    verl.load_megatron_optimizer(chain)
    attached(chain).join()

    assert all(torch.equal(mine, other) for mine, other in zip(masters, before, strict=True))
    attached(chain).close()


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


def test_options_reach_the_controller_and_bad_ones_are_refused(engine: Any) -> None:
    before = engine.offload_fsdp_optimizer
    for bad, kind, words in (
        ({"offload": {"slabs": 1}}, NotFoundError, "slab_bytes"),
        ({"window_byte": 1}, NotFoundError, "window_bytes"),
        ({"state": "host"}, NotFoundError, "or schedule"),
        ({"schedule": "hosts"}, InvalidError, "say cycle, host_states"),
        ({"schedule": {"host_states": {"windows": 9}}}, ConfigError, "1 to 4"),
        ({"schedule": {"cpu_step": {"fraction": 2}}}, InvalidError, "a share from 0 to 1"),
    ):
        with pytest.raises(kind, match=words):
            verl.install(bad)
        assert engine.offload_fsdp_optimizer is before
    optimizer = stepped()
    with verl.install({"offload": {"budget_bytes": "1KiB"}}) as installation:
        with pytest.raises(BudgetError):
            engine.offload_fsdp_optimizer(optimizer)
        assert attached(optimizer) is not None
        assert "offload_fsdp_optimizer" not in repr(installation)
        engine.load_fsdp_optimizer(optimizer, 0)
    attached(optimizer).close()


def test_one_of_the_two_modules_may_be_missing_but_not_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake.install(monkeypatch, megatron=False)
    with verl.install() as installation:
        assert not [place for place in installation.places if "megatron" in place]
    monkeypatch.undo()
    with pytest.raises(NotFoundError, match="verl is not there"):
        verl.install()


# ---- Weights


def _plus(value: float) -> dict[str, Any]:
    return {name: tensor + value for name, tensor in WEIGHTS.items()}


class Pair:
    """A trainer's engine and a rollout's."""

    def __init__(self) -> None:
        self.trainer = verl.RefitCheckpointEngine(1 << 20, is_master=True, **ENGINE)
        self.rollout = verl.RefitCheckpointEngine(1 << 20, **ENGINE)
        metadata = [self.trainer.prepare(), self.rollout.prepare()]
        sides = verl.RefitCheckpointEngine.build_topology(1, 1, metadata)
        for engine, told in zip((self.trainer, self.rollout), sides, strict=True):
            engine.init_process_group(**{name: value[0] for name, value in told.items()})

    def update(self, weights: dict[str, Any], version: int | None = None) -> dict[str, Any]:
        """What the rollout holds after an update."""

        async def receive() -> dict[str, Any]:
            held = [named async for named in self.rollout.receive_weights(version)]
            return {name: tensor.clone() for name, tensor in held}

        async def both() -> dict[str, Any]:
            sent = self.trainer.send_weights(iter(weights.items()), version)
            return (await asyncio.gather(receive(), sent))[0]

        taken = asyncio.run(both())
        self.rollout.finalize()
        return taken

    def send(self, weights: Any) -> None:
        asyncio.run(self.trainer.send_weights(weights))


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.rollout.close()
    made.trainer.close()


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_number_that_is_used_up_is_replaced_by_the_next_one(pair: Pair) -> None:  # trap 35
    pair.update(_plus(1), 7)
    assert _same(pair.update(_plus(2), 1), _plus(2))
    assert (pair.trainer.version, pair.rollout.version) == (8, 8)


def test_failed_version_does_not_take_place_of_next_one(pair: Pair) -> None:
    pair.update(_plus(1), 1)

    async def stops() -> None:
        stream = pair.rollout.receive_weights(2)
        await anext(stream)
        await stream.aclose()

    async def refused() -> Any:
        sent = pair.trainer.send_weights(iter(_plus(2).items()), 2)
        return (await asyncio.gather(stops(), sent, return_exceptions=True))[1]

    assert "the engine stopped before" in str(asyncio.run(refused()))
    receiver = pair.rollout._receiver
    assert select.select([receiver.subscriber.fileno()], [], [], 20)[0]  # it is offered again
    assert _same(pair.update(_plus(3), 3), _plus(3))
    assert pair.rollout.version == 3


def test_other_weights_than_before_are_declared_again(pair: Pair) -> None:
    pair.update(_plus(1))
    more = {**_plus(2), "head": torch.ones(3)}
    with pytest.raises(NotFoundError, match="'head' was not declared"):
        pair.send(iter(more.items()))
    assert pair.trainer.version == 1
    assert _same(pair.update(more), more)


def test_a_generator_that_fails_aborts_the_version(pair: Pair) -> None:
    pair.update(_plus(1))

    def broken() -> Any:
        yield "layer.0", WEIGHTS["layer.0"]
        raise OSError("the shard is gone")

    with pytest.raises(OSError, match="the shard is gone"):
        pair.send(broken())
    assert pair.trainer.version == 1
    assert _same(pair.update(_plus(3)), _plus(3))


def test_a_topology_has_one_publisher() -> None:
    with pytest.raises(StateError, match="0 workers publish"):
        verl.RefitCheckpointEngine.build_topology(1, 1, [{}, {}])


def test_a_rollout_that_was_not_told_where_to_go_says_so() -> None:
    async def receive() -> None:
        async for _ in verl.RefitCheckpointEngine(1 << 20).receive_weights():
            raise AssertionError

    with pytest.raises(StateError, match="process group was not initialized"):
        asyncio.run(receive())


def test_wait_for_replaced_trainer_ends_and_new_one_is_heard() -> None:
    def publisher() -> Any:
        made = verl.RefitCheckpointEngine(1 << 20, is_master=True, **ENGINE)
        made.expect(1)
        return made, made.open_publisher()

    (gone, before), (made, after) = publisher(), publisher()
    rollout = verl.RefitCheckpointEngine(1 << 20, **ENGINE)

    async def received() -> dict[str, Any]:
        return {name: one.clone() async for name, one in rollout.receive_weights()}

    async def play() -> None:
        rollout.init_process_group(endpoint=before, rank=0, rollouts=1)
        waiting = asyncio.create_task(received())
        await asyncio.sleep(0)  # it waits now
        gone.close()
        rollout.init_process_group(endpoint=after, rank=0, rollouts=1)
        with pytest.raises(StateError, match="closed"):
            await waiting
        taken, _ = await asyncio.gather(received(), made.send_weights(iter(WEIGHTS.items())))
        assert taken.keys() == WEIGHTS.keys()

    asyncio.run(play())
    rollout.close(), made.close()


def test_a_rollout_outlives_the_training() -> None:
    """Another trainer that begins at the endpoint is heard."""
    endpoint = f"user://outlived-{os.getpid()}"
    receiver = subscribe(endpoint)

    async def received(version: int) -> Any:
        update = await receiver.arrival(60.0, version)
        with receiver.loading(update):
            return update["a"].torch().clone()

    for value in (1.0, 2.0):
        with Publisher(endpoint) as trainer, ThreadPoolExecutor() as threads:
            done = threads.submit(trainer.publish, {"a": torch.full((3,), value)})
            assert asyncio.run(received(1)).eq(value).all()
            receiver.let_go()
            assert done.result() == 1
    receiver.close()
