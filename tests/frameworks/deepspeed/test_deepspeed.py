"""refit.Controller around engines of DeepSpeed, one rank: the same bits with refit and without."""

import gc
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import engines
import pytest
import refit
import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from refit.errors import BusyError, StateError, UnsupportedError
from refit.integrations import deepspeed as adapter
from refit.integrations import state_offload

SLOW = pytest.mark.slow
OFF = {"offload_pin": "off"}


@pytest.fixture(autouse=True, scope="module")
def _one_process() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        engines.one_process(str(free.getsockname()[1]))


@pytest.fixture(autouse=True)
def _tidy() -> Iterator[None]:
    yield
    gc.collect()


def away(controller: Any) -> set[str]:
    """The first words of the names of what leaves."""
    controller.clear()
    decided = controller._cycle._scan
    controller.restore(non_blocking=False)
    return {name for slots in decided.slots.values() for name in slots.names}


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=SLOW), 3])
@pytest.mark.parametrize(
    "kind", [pytest.param("fp32", marks=SLOW), "bf16", pytest.param("fp16", marks=SLOW)]
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_training_is_the_same_to_the_bit(stage: int, kind: str, accumulate: int) -> None:
    chosen = {"accumulate": accumulate}
    plain = engines.train(engines.make(stage, kind, **chosen), 12, accumulate=accumulate)
    engine = engines.make(stage, kind, **chosen)
    with refit.Controller(engine, **OFF) as controller:
        ours = engines.train(engine, 12, accumulate=accumulate, before=engines.cycle(controller))
        assert controller.stats()["refit/cycles"] >= 10
        assert controller.stats()["refit/cycle_failures"] == 0
    engines.assert_same(plain, ours)


def test_the_bf16_optimizer_with_fp32_gradients() -> None:
    more = {"data_types": {"grad_accum_dtype": "fp32"}}
    plain = engines.train(engines.make(1, more=more))
    engine = engines.make(1, more=more)
    assert type(engine.optimizer).__name__ == "BF16_Optimizer"
    with refit.Controller(engine, **OFF) as controller:
        ours = engines.train(engine, before=engines.cycle(controller))
        names = away(controller)
    engines.assert_same(plain, ours)
    assert {"0.0.grad", "1.0.grad"} <= names  # the flat gradients
    assert "fp32_groups_flat_partition.1" in names


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_all_memory_of_states_masters_and_gradients_leaves(stage: int) -> None:
    engine = engines.make(stage, optimizer=torch.optim.AdamW)
    engines.train(engine, 2)
    with refit.Controller(engine, **OFF) as controller:
        names = away(controller)
        stays = [one for one in controller.resident if "step" not in one[0]]
        controller.clear()
        held = [
            tensor
            for state in engines.inner_of(engine).state.values()
            for key, tensor in state.items()
            if key != "step"
        ]
        with refit.away.untouched():
            assert all(tensor.untyped_storage().nbytes() == 0 for tensor in held)
    assert stays == []
    numel = sum(p.numel() for p in engines.Language().parameters())
    states = sum(tensor.numel() for tensor in held)
    assert states >= 2 * numel
    masters = "fp32_partitioned_groups_flat" if stage == 3 else "single_partition_of_fp32_groups"
    assert any(name.startswith(masters) for name in names)
    if stage == 3:
        assert "grad_partitions_flat_buffer" in names
        assert any(name.startswith("ipg_bucket") for name in names)


def test_masters_leave_as_the_bits_that_the_weights_lack() -> None:
    engine = engines.make(2, "bf16")
    engines.train(engine, 2)
    sizes = {}
    for masters in ("auto", "whole"):
        with refit.Controller(engine, offload_masters=masters, **OFF) as controller:
            controller.clear()
            sizes[masters] = controller.stats()["refit/host_bytes"]
            controller.restore(non_blocking=False)
    assert sizes["auto"] < sizes["whole"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_clear_amid_an_accumulation_keeps_the_gradients(stage: int) -> None:
    plain = engines.train(engines.make(stage, accumulate=3), 6, accumulate=3)
    engine = engines.make(stage, accumulate=3)
    with refit.Controller(engine, **OFF) as controller:

        def before(step: int, micro: int) -> None:
            if step >= 1:
                controller.clear()
                if step % 2:
                    controller.restore()

        ours = engines.train(engine, 6, accumulate=3, before=before)
    engines.assert_same(plain, ours)


@pytest.mark.parametrize("policy", ["zero", "discard"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_open_accumulation_is_not_lost(stage: int, policy: Any) -> None:
    plain = engines.train(engines.make(stage, accumulate=2), 6, accumulate=2)
    engine = engines.make(stage, accumulate=2)
    with refit.Controller(engine, grads=policy, **OFF) as controller:

        def before(step: int, micro: int) -> None:
            if micro == 1:
                assert controller.accumulating
                with pytest.raises(StateError, match="accumulation is open"):
                    controller.clear()
            elif step:
                assert not controller.accumulating
                controller.clear()
                controller.restore()

        ours = engines.train(engine, 6, accumulate=2, before=before)
    engines.assert_same(plain, ours)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_activation_checkpointing(stage: int) -> None:
    plain = engines.train(engines.make(stage, checkpointed=True))
    engine = engines.make(stage, checkpointed=True)
    with refit.Controller(engine, **OFF) as controller:
        ours = engines.train(engine, before=engines.cycle(controller))
    engines.assert_same(plain, ours)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.NAdam, torch.optim.RMSprop])
def test_other_optimizers(stage: int, kind: Any) -> None:
    def optimizer(groups: Any, lr: float) -> torch.optim.Optimizer:
        return kind(groups, lr=lr, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))

    plain = engines.train(engines.make(stage, optimizer=optimizer))
    engine = engines.make(stage, optimizer=optimizer)
    with refit.Controller(engine, **OFF) as controller:
        ours = engines.train(engine, before=engines.cycle(controller))
    engines.assert_same(plain, ours)


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
        controller.clear()
        assert torch.equal(safe_get_full_fp32_param(weight), expected[0])
        controller.clear()
        assert torch.equal(safe_get_full_optimizer_state(weight, "exp_avg"), expected[1])
        assert controller.state == "training"
        assert controller.stats()["refit/early_returns"] == 2


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_checkpoints_while_states_are_away(stage: int, tmp_path: Path) -> None:
    plain = engines.make(stage)
    engines.train(plain, 3)
    plain.save_checkpoint(str(tmp_path / "plain"), tag="a")
    engine = engines.make(stage)
    with refit.Controller(engine, **OFF) as controller:
        engines.train(engine, 3, before=engines.cycle(controller))
        controller.clear()
        engine.save_checkpoint(str(tmp_path / "ours"), tag="a")
        engines.train(engine, 2)  # then go back
        controller.clear()
        engine.load_checkpoint(str(tmp_path / "plain"), tag="a")
        again = engines.train(engine, 4, before=engines.cycle(controller))
    other = engines.make(stage)
    other.load_checkpoint(str(tmp_path / "ours"), tag="a")
    engines.assert_same(engines.train(other, 4), again)


@pytest.mark.parametrize("stage", [1, 2])
def test_offload_states_besides(stage: int) -> None:
    plain = engines.train(engines.make(stage), 6)
    engine = engines.make(stage)
    with refit.Controller(engine, **OFF) as controller:

        def before(step: int, micro: int) -> None:
            controller.clear()
            if step in (2, 4):
                engine.offload_states(pin_memory=False)  # brings back, then takes
                assert controller.state == "training"
                with pytest.raises(StateError, match="reload_states"):
                    controller.clear()
                engine.reload_states()
                controller.clear()

        ours = engines.train(engine, 6, before=before)
        assert controller.stats()["refit/cycle_failures"] == 2
    engines.assert_same(plain, ours)


def test_offload_states_of_zero_3_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed asks for its FusedAdam before it moves states; masters and gradients move."""
    import deepspeed.ops.adam.fused_adam as fused

    monkeypatch.setattr(fused, "FusedAdam", torch.optim.AdamW)
    plain = engines.train(engines.make(3), 6)
    engine = engines.make(3)
    with refit.Controller(engine, **OFF) as controller:

        def before(step: int, micro: int) -> None:
            controller.clear()
            if step in (2, 4):
                chosen = [one for one in OffloadStateTypeEnum if one.value != "lp_params"]
                engine.offload_states(include=chosen, pin_memory=False)
                with pytest.raises(StateError, match="reload_states"):
                    controller.clear()
                engine.reload_states()
                controller.clear()

        ours = engines.train(engine, 6, before=before)
    engines.assert_same(plain, ours)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_states_that_deepspeed_offloads_to_the_cpu(stage: int) -> None:
    """offload_optimizer with DeepSpeedCPUAdam, which its C++ steps."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    chosen = {"optimizer": DeepSpeedCPUAdam, "offload_optimizer": {"device": "cpu"}}
    plain = engines.train(engines.make(stage, **chosen))
    engine = engines.make(stage, **chosen)
    with refit.Controller(engine, **OFF) as controller:
        ours = engines.train(engine, before=engines.cycle(controller))
    engines.assert_same(plain, ours)


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
                controller.clear()
                controller.restore()
            model(tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
        if controller is not None:
            controller.close()
        ends.append([*model.parameters()] + [one["exp_avg_sq"] for one in optimizer.state.values()])
    assert all(map(torch.equal, *ends))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_weights_are_published_as_deepspeed_has_them(stage: int) -> None:
    engine = engines.make(stage)
    engines.train(engine, 1)
    expected = []
    with engines.published() as (publisher, worker), refit.Controller(engine, **OFF) as controller:
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
    monkeypatch.setattr(refit.weights, "AT_ONCE", bound)
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
    for keywords in ({"states": "host"}, {"host_fraction": 0.5}):
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
    engines.train(engine, 2, before=engines.cycle(controller))
    controller.clear()
    controller.close()
    assert (set(vars(engine.optimizer)), set(vars(engine.optimizer.optimizer))) == before
    engines.train(engine, 1)
    controller = refit.Controller(one, **OFF)
    controller.clear()
    del controller
    gc.collect()
    assert (set(vars(engine.optimizer)), set(vars(engine.optimizer.optimizer))) == before
    engines.train(engine, 1)


@pytest.mark.parametrize("stage", [2, 3])
def test_copies_that_fail(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget that is too small: nothing has moved, and training goes on."""
    plain = engines.train(engines.make(stage), 4)
    engine = engines.make(stage)
    with refit.Controller(engine, offload_budget_bytes=4096, **OFF) as controller:

        def before(step: int, micro: int) -> None:
            with pytest.raises(refit.errors.BudgetError):
                controller.clear()
            assert controller.state == "training"

        ours = engines.train(engine, 4, before=before)
    engines.assert_same(plain, ours)


def test_an_engine_of_options_that_were_taken_keeps_its_states_on_the_device() -> None:
    said: dict[str, Any] = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    assert state_offload.take(said) == {"host_fraction": 1.0}
    engine = engines.make(2, **said["zero_optimization"])
    assert engine.zero_cpu_offload() is False
    assert type(engine.optimizer.optimizer) is torch.optim.AdamW
    engines.train(engine, 1)
