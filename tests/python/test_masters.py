"""fp32 masters leave by what their bf16 weights lack: half of the bytes, and every bit returns."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from stand_ins import megatron_core as mcore

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from refit._c.config import load_config  # noqa: E402
from refit.controller import Controller  # noqa: E402
from refit.errors import CorruptError, StateError  # noqa: E402

SMALL = 4096


def stepped() -> Any:
    torch.manual_seed(7)
    layers = torch.nn.Sequential(torch.nn.Linear(96, 128), torch.nn.Linear(128, 80))
    model = mcore.DistributedDataParallel(layers.to(torch.bfloat16))
    made = mcore.DistributedOptimizer(model)
    step(made)
    return made


@pytest.fixture
def optimizer() -> Any:
    return stepped()


def step(optimizer: Any) -> None:
    torch.manual_seed(3)
    grads = optimizer.buffers[0].grad_data
    grads.copy_(torch.randn(grads.shape))
    optimizer.step()


def masters_of(optimizer: Any) -> list[Any]:
    return [one for one in optimizer.shard_fp32_from_float16_groups[0] if one is not None]


def moments_of(optimizer: Any) -> list[Any]:
    return [v for one in optimizer.optimizer.state.values() for v in one.values() if v.dim()]


def bits(optimizer: Any) -> list[Any]:
    held = [*masters_of(optimizer), *moments_of(optimizer)]
    return [one.detach().clone().view(torch.int32) for one in held]


def all_bytes(optimizer: Any) -> int:
    return sum(4 * one.numel() for one in [*moments_of(optimizer), *masters_of(optimizer)])


def saved(optimizer: Any) -> int:
    """Bytes that need not leave: half of each master that is not small, but for its overhead."""
    large = [one.numel() for one in masters_of(optimizer) if one.numel() >= SMALL]
    assert len(large) == 2
    return sum(2 * count - count // 16 - 512 for count in large)


def moved(controller: Controller) -> int:
    return int(controller.stats()["refit/offload_bytes"])


@contextmanager
def away(controller: Controller, optimizer: Any) -> Iterator[None]:
    """States and masters are away in the block, and return to the bit."""
    before = bits(optimizer)
    controller.offload()
    assert all(one.untyped_storage().nbytes() == 0 for one in masters_of(optimizer))
    yield
    controller.prepare_for_training()
    assert all(map(torch.equal, bits(optimizer), before))


def test_half_of_the_masters_leave_and_training_goes_on(optimizer: Any) -> None:
    plain = stepped()
    with Controller(optimizer) as controller:
        for _ in range(3):
            with away(controller, optimizer):
                pass
            assert moved(controller) <= all_bytes(optimizer) - saved(optimizer)
            step(optimizer)
            step(plain)
    assert all(map(torch.equal, bits(optimizer), bits(plain)))
    assert torch.equal(optimizer.buffers[0].param_data, plain.buffers[0].param_data)


def test_with_whole_all_bytes_leave(optimizer: Any) -> None:
    config = load_config(environment=False, offload_masters="whole")
    with Controller(optimizer, config=config) as controller, away(controller, optimizer):
        assert moved(controller) == all_bytes(optimizer)


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
    with Controller(mcore.MegatronOptimizer(inner)) as controller:
        controller.offload()
        assert master.untyped_storage().nbytes() == 0
        assert moved(controller) < (2 * 2 + 3) * master.numel()  # moments, and less than 4 of 4
        controller.prepare_for_training()
        assert torch.equal(master, before)


def test_weights_that_are_not_rounded_need_no_second_clear(optimizer: Any) -> None:
    with Controller(optimizer) as controller:
        for spoiled in (0, 3000, 20000):
            torch.manual_seed(spoiled)
            optimizer.buffers[0].param_data[:spoiled] = torch.randn(spoiled).bfloat16()
            with away(controller, optimizer):
                assert controller.state == "cleared"
        assert moved(controller) > all_bytes(optimizer) - saved(optimizer)


def test_weights_that_change_are_found_and_masters_return(optimizer: Any) -> None:
    weights = optimizer.buffers[0].param_data
    with Controller(optimizer) as controller, away(controller, optimizer):
        kept = weights[5].clone()
        weights[5] += 1
        with pytest.raises(CorruptError, match="weights of region"):
            controller.prepare_for_training()
        weights[5] = kept


def test_weights_may_leave_meanwhile_and_return_elsewhere(optimizer: Any) -> None:
    storage = optimizer.buffers[0].param_data.untyped_storage()
    with Controller(optimizer) as controller, away(controller, optimizer):
        kept, nbytes = optimizer.buffers[0].param_data.clone(), storage.nbytes()
        storage.resize_(0)
        with pytest.raises(StateError, match="bring the weights back first"):
            controller.prepare_for_training()
        in_the_way = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(4)]
        storage.resize_(nbytes)
        del in_the_way
        optimizer.buffers[0].param_data.copy_(kept)


def test_a_checkpoint_reads_masters_whole_while_they_are_away(optimizer: Any) -> None:
    before = [one.detach().clone() for one in masters_of(optimizer)]
    with Controller(optimizer) as controller:
        controller.offload()
        with controller.checkpoint():
            assert all(map(torch.equal, masters_of(optimizer), before))
        with away(controller, optimizer):
            pass


def test_a_master_that_shares_its_storage_travels_whole(optimizer: Any) -> None:
    first = masters_of(optimizer)[0]
    both = torch.cat([first.detach(), torch.zeros(16)])
    first.data = both[: first.numel()]
    with Controller(optimizer) as controller, away(controller, optimizer):
        pass
