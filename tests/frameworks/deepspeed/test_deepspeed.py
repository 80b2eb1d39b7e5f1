"""refit.Controller around engines of DeepSpeed, one rank: the same bits with refit and without."""

import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import engines
import pytest
import refit
import torch
from broadcasting import pair
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from refit.errors import BudgetError, BusyError, StateError, UnsupportedError
from refit.integrations import deepspeed as adapter
from refit.integrations import state_offload
from torch.optim import SGD, NAdam, RMSprop

OFF = engines.OFF
OTHERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": functools.partial(SGD, momentum=0.9),
    "NAdam": NAdam,
    "RMSprop": RMSprop,
}
SLOW = pytest.mark.slow
ZERO = [pytest.param(1, marks=SLOW), pytest.param(2, marks=SLOW), 3]
"""Stages; the third divides all that there is, and is run quickly."""
FP32_GRADIENTS = {"data_types": {"grad_accum_dtype": "fp32"}}
"""DeepSpeed has its BF16_Optimizer for that."""


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=SLOW), 3])
@pytest.mark.parametrize(
    "kind", [pytest.param("fp32", marks=SLOW), "bf16", pytest.param("fp16", marks=SLOW)]
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_training_is_the_same_to_the_bit(stage: int, kind: str, accumulate: int) -> None:
    _, figures = engines.train_the_same(stage, kind, steps=12, accumulate=accumulate)
    assert figures["refit/cycles"] >= 10
    assert figures["refit/cycle_failures"] == 0


@pytest.mark.parametrize(
    ("stage", "chosen"),
    [
        pytest.param(1, {"more": FP32_GRADIENTS}, id="BF16_Optimizer"),
        *(
            pytest.param(stage, {"checkpointed": True}, id=f"checkpointed-{stage}", marks=SLOW)
            for stage in (0, 2, 3)
        ),
        *(
            pytest.param(stage, {"optimizer": kind}, id=f"{name}-{stage}", marks=SLOW)
            for name, kind in OTHERS.items()
            for stage in (1, 3)
        ),
    ],
)
def test_other_engines_train_the_same(stage: int, chosen: dict[str, Any]) -> None:
    engines.train_the_same(stage, **chosen)


@pytest.mark.parametrize(
    ("stage", "more", "attributes"),
    [
        (1, FP32_GRADIENTS, ["fp32_groups_flat_partition", "fp32_groups_gradients_flat"]),
        (1, {}, ["single_partition_of_fp32_groups"]),
        (2, {}, ["single_partition_of_fp32_groups"]),
        (3, {}, ["fp32_partitioned_groups_flat", "grad_partitions_flat_buffer"]),
    ],
)
def test_all_memory_of_states_masters_and_gradients_leaves(
    stage: int, more: dict[str, Any], attributes: list[str]
) -> None:
    engine = engines.make(stage, more=more)
    engines.train(engine, 2)
    numel = sum(p.numel() for p in engines.Language().parameters())
    states = [one for one in engines.states_of(engine) if one.dim()]  # but the count of steps
    assert sum(map(torch.numel, states)) >= 2 * numel
    buckets = [one.buffer for one in getattr(engine.optimizer, "ipg_buckets", {}).values()]
    beside = tensors_in([*(getattr(engine.optimizer, name) for name in attributes), *buckets])
    with refit.Controller(engine, **OFF) as controller:
        controller.offload()
        assert [one for one in controller.resident if "step" not in one[0]] == []
        assert engines.bytes_on_device([*states, *beside]) == 0


def tensors_in(held: Any) -> list[torch.Tensor]:
    if isinstance(held, list):
        return [tensor for one in held for tensor in tensors_in(one)]
    return [held] if torch.is_tensor(held) else []


def test_masters_leave_as_the_bits_that_the_weights_lack() -> None:
    engine = engines.make(2, "bf16")
    engines.train(engine, 2)
    sizes = {}
    for masters in ("auto", "whole"):
        with refit.Controller(engine, offload_masters=masters, **OFF) as controller:
            controller.offload()
            sizes[masters] = controller.stats()["refit/host_bytes"]
            controller.restore(non_blocking=False)
    assert sizes["auto"] < sizes["whole"]


@pytest.mark.parametrize("stage", ZERO)
def test_clear_amid_an_accumulation_keeps_the_gradients(stage: int) -> None:
    def leaving(_engine: Any, controller: Any, step: int, micro: int) -> None:
        if step >= 1:
            controller.offload()
            if step % 2:
                controller.restore()

    engines.train_the_same(stage, steps=6, accumulate=3, before=leaving)


@pytest.mark.parametrize("policy", [pytest.param("zero", marks=SLOW), "discard"])
@pytest.mark.parametrize("stage", ZERO)
def test_an_open_accumulation_is_not_lost(stage: int, policy: Any) -> None:
    def refused(_engine: Any, controller: Any, step: int, micro: int) -> None:
        assert controller.accumulating is (micro == 1)
        if micro == 1:
            with pytest.raises(StateError, match="accumulation is open"):
                controller.offload()
        elif step:
            controller.offload()
            controller.restore()

    chosen = {"accumulate": 2, "refits": {"grads": policy}}
    engines.train_the_same(stage, steps=6, before=refused, **chosen)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeeds_own_ways_to_a_state_bring_it_back(stage: int) -> None:
    engine = engines.make(stage)
    engines.train(engine, 2)
    weight = engine.module.blocks[1][1].weight
    expected = [
        safe_get_full_fp32_param(weight).clone(),
        safe_get_full_optimizer_state(weight, "exp_avg").clone(),
    ]
    with refit.Controller(engine, **OFF) as controller:
        controller.offload()
        assert torch.equal(safe_get_full_fp32_param(weight), expected[0])
        controller.offload()
        assert torch.equal(safe_get_full_optimizer_state(weight, "exp_avg"), expected[1])
        assert controller.state == "training"
        assert controller.stats()["refit/early_returns"] == 2


@pytest.mark.parametrize("stage", [pytest.param(0, marks=SLOW), *ZERO])
def test_checkpoints_while_states_are_away(stage: int, tmp_path: Path) -> None:
    plain = engines.make(stage)
    engines.train(plain, 3)
    plain.save_checkpoint(str(tmp_path / "plain"), tag="a")
    engine = engines.make(stage)
    with refit.Controller(engine, **OFF) as controller:
        engines.train(engine, 3, controller)
        controller.offload()
        engine.save_checkpoint(str(tmp_path / "ours"), tag="a")
        engines.train(engine, 2)  # then go back
        controller.offload()
        engine.load_checkpoint(str(tmp_path / "plain"), tag="a")
        again = engines.train(engine, 4, controller)
    other = engines.make(stage)
    other.load_checkpoint(str(tmp_path / "ours"), tag="a")
    engines.assert_same(engines.train(other, 4), again)


def take(engine: Any, controller: Any, step: int, _micro: int, **said: Any) -> None:
    """DeepSpeed's own ``offload_states`` between two steps, while refit has the states."""
    controller.offload()
    if step in (2, 4):
        engine.offload_states(pin_memory=False, **said)  # brings back, then takes
        assert controller.state == "training"
        with pytest.raises(StateError, match="reload_states"):
            controller.offload()
        engine.reload_states()
        controller.offload()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_offload_states_besides(stage: int) -> None:
    _, figures = engines.train_the_same(stage, steps=6, before=take)
    assert figures["refit/cycle_failures"] == 2


def test_offload_states_of_zero_3_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed asks for its FusedAdam before it moves states; masters and gradients move."""
    import deepspeed.ops.adam.fused_adam as fused

    monkeypatch.setattr(fused, "FusedAdam", torch.optim.AdamW)
    chosen = [one for one in OffloadStateTypeEnum if one.value != "lp_params"]
    engines.train_the_same(3, steps=6, before=functools.partial(take, include=chosen))


@pytest.mark.slow  # its C++ is compiled
@pytest.mark.parametrize("stage", ZERO)
def test_states_that_deepspeed_offloads_to_the_cpu(stage: int) -> None:
    """offload_optimizer with DeepSpeedCPUAdam, which its C++ steps."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    engines.train_the_same(stage, optimizer=DeepSpeedCPUAdam, offload_optimizer={"device": "cpu"})


@pytest.mark.slow
def test_a_cpu_adam_of_deepspeed_without_an_engine() -> None:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    ends = []
    for ours in (False, True):
        torch.manual_seed(1)
        model = engines.Language()
        optimizer = DeepSpeedCPUAdam(model.parameters(), lr=1e-2)
        controller = refit.Controller(optimizer, model, **OFF) if ours else None
        for tokens in engines.batches(10):
            if controller is not None:
                controller.offload()
                controller.restore()
            model(tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
        if controller is not None:
            controller.close()
        ends.append([*model.parameters()] + [one["exp_avg_sq"] for one in optimizer.state.values()])
    assert all(map(torch.equal, *ends))


@pytest.mark.parametrize("stage", [pytest.param(0, marks=SLOW), *ZERO])
def test_the_weights_are_published_as_deepspeed_has_them(stage: int) -> None:
    engine = engines.make(stage)
    engines.train(engine, 1)
    expected = []
    with pair() as (publisher, worker), refit.Controller(engine, **OFF) as controller:
        for version in (1, 2, 3):
            with controller.refit(publisher=publisher) as refitting:
                refitting.send(refit.named_weights(engine))
            assert controller.state == "refitted"
            assert publisher.version == version
            expected.append(engines.bytes_of(engines.weights_of(engine)))
            engines.train(engine, 1)
    assert worker.seen == expected
    assert expected[0] != expected[1]


def test_zero_3_is_gathered_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engines.make(3, stage3_param_persistence_threshold=0)
    engines.train(engine, 1)
    expected = engines.weights_of(engine)
    together: list[int] = []
    real = deepspeed.zero.GatheredParameters.__enter__

    def enter(self: Any) -> Any:
        together.append(sum(p.ds_numel * p.element_size() for p in self.params))
        return real(self)

    bound = 30_000
    monkeypatch.setattr(deepspeed.zero.GatheredParameters, "__enter__", enter)
    monkeypatch.setattr(refit.weights.named_weights, "AT_ONCE", bound)
    weights = refit.named_weights(engine)
    assert weights.ties == {"head.weight": "embedding.weight"}
    kept = dict(weights)
    assert len(together) > 2
    assert max(together) <= bound
    assert set(expected) == set(kept)
    for name, tensor in expected.items():
        assert torch.equal(kept[name], tensor), name
    specs = {one.name: tuple(one.shape) for one in weights.manifest()}
    assert specs == {name: tuple(tensor.shape) for name, tensor in expected.items()}
    empty = [p.numel() for p in engine.module.parameters()]
    assert set(empty) == {0}  # as it was


def test_what_is_refused() -> None:
    engine = engines.make(2)
    for keywords in ({"schedule": refit.HostStates()}, {"schedule": refit.CpuStep(fraction=0.5)}):
        with pytest.raises(UnsupportedError, match="offload_optimizer"):
            refit.Controller(engine, **keywords, **OFF)
    controller = refit.Controller(engine, **OFF)
    for other in (engine, engine.optimizer, engine.optimizer.optimizer):
        with pytest.raises(BusyError, match="has a controller already"):
            refit.Controller(other, **OFF)
    controller.close()
    with pytest.raises(UnsupportedError, match="no optimizer"):
        adapter.unwrap(torch.nn.Linear(2, 2))
    without, *_ = deepspeed.initialize(
        model=engines.Language(),
        config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}},
    )
    with pytest.raises(UnsupportedError, match="no optimizer"):
        refit.Controller(without, **OFF)
    engine.optimizer.swap_optimizer = True
    with pytest.raises(UnsupportedError, match="nvme"):
        refit.Controller(engine, **OFF)


@pytest.mark.parametrize("given", ["engine", "optimizer"])
def test_close_leaves_the_engine_as_it_was(given: str) -> None:
    engine = engines.make(2)
    before = set(vars(engine.optimizer)), set(vars(engine.optimizer.optimizer))
    one = engine if given == "engine" else engine.optimizer
    controller = refit.Controller(one, **OFF)
    engines.train(engine, 2, controller)
    controller.offload()
    controller.close()
    assert (set(vars(engine.optimizer)), set(vars(engine.optimizer.optimizer))) == before
    engines.train(engine, 1)
    controller = refit.Controller(one, **OFF)
    controller.offload()
    del controller
    gc.collect()
    assert (set(vars(engine.optimizer)), set(vars(engine.optimizer.optimizer))) == before
    engines.train(engine, 1)


@pytest.mark.parametrize("stage", [2, 3])
def test_copies_that_fail(stage: int) -> None:
    """A budget that is too small: nothing has moved, and training goes on."""

    def failing(_engine: Any, controller: Any, step: int, micro: int) -> None:
        with pytest.raises(BudgetError):
            controller.offload()
        assert controller.state == "training"

    refits = {"offload_budget_bytes": 4096}
    engines.train_the_same(stage, steps=4, before=failing, refits=refits)


def test_engine_with_taken_options_keeps_states_on_device() -> None:
    said: dict[str, Any] = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    assert state_offload.take(said) == {"schedule": refit.CpuStep(fraction=1.0)}
    engine = engines.make(2, **said["zero_optimization"])
    assert engine.zero_cpu_offload() is False
    assert type(engine.optimizer.optimizer) is torch.optim.AdamW
    engines.train(engine, 1)
