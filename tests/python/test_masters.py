"""fp32 masters leave by what their bf16 weights lack: half of the bytes, and every bit returns."""

import warnings
from typing import Any

import pytest
from stand_ins import megatron_core as mcore

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from refit.config import load_config  # noqa: E402
from refit.controller import Controller  # noqa: E402
from refit.errors import CorruptError, StateError  # noqa: E402

SMALL = 4096


def _model() -> mcore.DistributedDataParallel:
    torch.manual_seed(7)
    layers = torch.nn.Sequential(torch.nn.Linear(96, 128), torch.nn.Linear(128, 80))
    return mcore.DistributedDataParallel(layers.to(torch.bfloat16))


def _stepped() -> mcore.DistributedOptimizer:
    optimizer = mcore.DistributedOptimizer(_model())
    _step(optimizer)
    return optimizer


def _step(optimizer: mcore.DistributedOptimizer) -> None:
    torch.manual_seed(3)
    grads = optimizer.buffers[0].grad_data
    grads.copy_(torch.randn(grads.shape))
    optimizer.step()


def _masters(optimizer: Any) -> list[Any]:
    return [one for one in optimizer.shard_fp32_from_float16_groups[0] if one is not None]


def _bits(optimizer: Any) -> list[Any]:
    moments = [one["exp_avg"] for one in optimizer.optimizer.state.values()]
    return [one.detach().clone() for one in _masters(optimizer) + moments]


def _same(optimizer: Any, before: list[Any]) -> bool:
    after = _bits(optimizer)
    return all(
        torch.equal(mine.view(torch.int32), other.view(torch.int32))
        for mine, other in zip(after, before, strict=True)
    )


def _all_bytes(optimizer: Any) -> int:
    states = [v for one in optimizer.optimizer.state.values() for v in one.values() if v.dim()]
    return sum(4 * one.numel() for one in [*states, *_masters(optimizer)])


def _saved(optimizer: Any) -> int:
    """Bytes that need not leave: half of each master that is not small, but for its overhead."""
    large = [one.numel() for one in _masters(optimizer) if one.numel() >= SMALL]
    assert len(large) == 2
    return sum(2 * count - count // 16 - 512 for count in large)


@pytest.fixture
def optimizer() -> Any:
    return _stepped()


def _moved(controller: Controller) -> int:
    return int(controller.stats()["refit/offload_bytes"])


def test_half_of_the_masters_leave_and_training_goes_on_as_without(optimizer: Any) -> None:
    plain = _stepped()
    with Controller(optimizer) as controller:
        for _ in range(3):
            before = _bits(optimizer)
            controller.clear()
            assert all(one.untyped_storage().nbytes() == 0 for one in _masters(optimizer))
            controller.prepare_for_training()
            assert _same(optimizer, before)
            assert _moved(controller) <= _all_bytes(optimizer) - _saved(optimizer)
            _step(optimizer)
            _step(plain)
    assert _same(optimizer, _bits(plain))
    assert torch.equal(optimizer.buffers[0].param_data, plain.buffers[0].param_data)


def test_with_whole_all_bytes_leave(optimizer: Any) -> None:
    before = _bits(optimizer)
    config = load_config(environment=False, offload_masters="whole")
    with Controller(optimizer, config=config) as controller:
        controller.clear()
        assert _moved(controller) == _all_bytes(optimizer)
        controller.prepare_for_training()
        assert _same(optimizer, before)


def test_megatrons_own_optimizers_are_known() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("megatron.core.optimizer", reason="megatron-core is not installed")
        from test_megatron_core import _distributed, _float16
    for make in (_float16, _distributed):
        torch.manual_seed(11)
        masters = [torch.nn.Parameter(torch.randn(5000 + i)) for i in range(3)]
        made = make(masters)
        groups = "float16_groups" if make is _float16 else "model_float16_groups"
        for weight, master in zip(getattr(made, groups)[0], masters, strict=True):
            weight.data.copy_(master.data)  # as Megatron does behind each step
        before = [one.detach().clone() for one in masters]
        with Controller(made) as controller:
            controller.clear()
            whole = sum(4 * one.numel() for one in masters)
            assert _moved(controller) < 3 * whole - whole // 2 + whole // 16 + 1024
            controller.prepare_for_training()
            assert all(map(torch.equal, masters, before))


def test_masters_in_the_states_of_their_weights_are_known() -> None:
    torch.manual_seed(5)
    master = torch.randn(50, 100)
    weight = torch.nn.Parameter(master.bfloat16())
    inner = torch.optim.AdamW([weight], lr=0.0)
    weight.grad = torch.ones_like(weight)
    inner.step()
    weight.grad = None
    inner.state[weight]["master_param"] = master
    before = master.clone()
    wrapper = mcore.MegatronOptimizer(inner)
    with Controller(wrapper) as controller:
        controller.clear()
        assert master.untyped_storage().nbytes() == 0
        moments = 2 * 2 * master.numel()
        assert _moved(controller) < moments + 3 * master.numel()
        controller.prepare_for_training()
        assert torch.equal(master, before)


def test_weights_that_are_no_rounding_are_planned_for_within_one_clear(optimizer: Any) -> None:
    with Controller(optimizer) as controller:
        for spoiled in (0, 3000, 20000):
            torch.manual_seed(spoiled)
            optimizer.buffers[0].param_data[:spoiled] = torch.randn(spoiled).bfloat16()
            before = _bits(optimizer)
            controller.clear()
            assert controller.state == "cleared"
            controller.prepare_for_training()
            assert _same(optimizer, before)
        assert _moved(controller) > _all_bytes(optimizer) - _saved(optimizer)


def test_weights_that_change_meanwhile_are_found_and_masters_still_return(optimizer: Any) -> None:
    before = _bits(optimizer)
    weights = optimizer.buffers[0].param_data
    with Controller(optimizer) as controller:
        controller.clear()
        kept = weights[5].clone()
        weights[5] += 1
        with pytest.raises(CorruptError, match="weights of region"):
            controller.prepare_for_training()
        weights[5] = kept
        controller.prepare_for_training()
        assert _same(optimizer, before)


def test_weights_may_leave_meanwhile_and_return_elsewhere(optimizer: Any) -> None:
    before = _bits(optimizer)
    storage = optimizer.buffers[0].param_data.untyped_storage()
    with Controller(optimizer) as controller:
        controller.clear()
        kept, nbytes = optimizer.buffers[0].param_data.clone(), storage.nbytes()
        storage.resize_(0)
        with pytest.raises(StateError, match="bring the weights back first"):
            controller.prepare_for_training()
        in_the_way = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(4)]
        storage.resize_(nbytes)
        del in_the_way
        optimizer.buffers[0].param_data.copy_(kept)
        controller.prepare_for_training()
        assert _same(optimizer, before)


def test_a_checkpoint_reads_masters_whole_while_they_are_away(optimizer: Any) -> None:
    before = _bits(optimizer)
    masters = _masters(optimizer)
    with Controller(optimizer) as controller:
        controller.clear()
        with controller.checkpoint():
            shown = [one.detach().clone() for one in masters]
            assert all(map(torch.equal, shown, before))
        controller.prepare_for_training()
        assert _same(optimizer, before)


def test_a_master_that_shares_its_storage_travels_whole(optimizer: Any) -> None:
    masters = optimizer.shard_fp32_from_float16_groups[0]
    both = torch.cat([masters[0].detach(), torch.zeros(16)])
    masters[0].data = both[: masters[0].numel()]
    before = _bits(optimizer)
    with Controller(optimizer) as controller:
        controller.clear()
        controller.prepare_for_training()
        assert _same(optimizer, before)
