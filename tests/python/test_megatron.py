"""What a Megatron optimizer holds is found, and what is the model's own is left alone."""

import pytest
from stand_ins import megatron_core as mcore

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from refit.controller import Controller  # noqa: E402
from refit.errors import StateError, UnsupportedError  # noqa: E402
from refit.integrations import megatron  # noqa: E402
from stand_ins.optimizers import is_away, moments  # noqa: E402


def _model(dtype: "torch.dtype" = torch.bfloat16, **ddp: object) -> mcore.DistributedDataParallel:
    torch.manual_seed(7)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)).to(dtype)
    return mcore.DistributedDataParallel(layers, **ddp)


def _stepped(model: mcore.DistributedDataParallel) -> mcore.DistributedOptimizer:
    optimizer = mcore.DistributedOptimizer(model)
    for buffer in model.buffers:
        buffer.grad_data.fill_(0.5)
    optimizer.step()
    return optimizer


def test_masters_beside_states_are_found_without_none_entries() -> None:
    optimizer = _stepped(_model())

    held = megatron.unwrap(optimizer)

    masters = [one for one in optimizer.shard_fp32_from_float16_groups[0] if one is not None]
    assert [tensor for _, tensor in held.tensors()] == masters
    assert held.inner == [optimizer.optimizer]
    names = [name for name, _ in held.tensors()]
    assert len(set(names)) == len(names)


def test_empty_shards_are_no_masters() -> None:  # trap 4
    optimizer = _stepped(_model())
    before = len(list(megatron.unwrap(optimizer).tensors()))
    optimizer.shard_fp32_from_float16_groups[0] += [torch.empty(0), None]
    optimizer.shard_fp32_from_float16_groups.append([])
    assert len(list(megatron.unwrap(optimizer).tensors())) == before


def test_a_rank_without_any_parameters_holds_nothing() -> None:
    held = megatron.unwrap(mcore.ChainedOptimizer([mcore.MegatronOptimizer(None)]))

    assert (held.inner, list(held.tensors()), held.resident) == ([], [], [])


def test_fp32_groups_that_view_weights_are_never_moved() -> None:  # trap 3
    model = _model(torch.float32)
    held = megatron.unwrap(mcore.DistributedOptimizer(model))

    assert list(held.tensors()) == []
    assert [name for name, _ in held.resident if "shard_fp32_groups" in name]
    assert any("own master" in reason for _, reason in held.resident)


def test_master_sharing_memory_with_weight_is_never_moved() -> None:  # trap 2, 3
    model = _model()
    optimizer = mcore.DistributedOptimizer(model)
    optimizer.shard_fp32_from_float16_groups = [[model.buffers[0].param_data.view(torch.uint8)]]

    held = megatron.unwrap(optimizer)

    assert list(held.tensors()) == []
    assert any("view of the model's weights" in reason for _, reason in held.resident)


def test_a_hybrid_device_optimizer_is_left_alone_with_the_reason() -> None:
    inner = mcore.HybridDeviceOptimizer([torch.nn.Parameter(torch.ones(4))])
    wrapper = mcore.MegatronOptimizer(inner)
    wrapper.shard_fp32_from_float16_groups = [[torch.ones(4)]]

    held = megatron.unwrap(wrapper)

    assert (held.inner, list(held.tensors())) == ([], [])
    assert held.resident == [("optimizer 0", "a HybridDeviceOptimizer places its states by itself")]


def test_dense_and_expert_grad_buffers_are_found_once() -> None:
    model = _model()
    experts = [torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))]
    model.expert_parallel_buffers = [mcore.ParamAndGradBuffer(experts), model.buffers[0]]

    held = megatron.unwrap(mcore.DistributedOptimizer(model))

    found = [tensor for _, tensor in held.gradients()]
    assert [id(one) for one in found] == [
        id(model.buffers[0].grad_data),
        id(model.expert_parallel_buffers[0].grad_data),
    ]


@pytest.mark.parametrize(
    ("why", "sentence"),
    [
        ("ddp_config", "NCCL"),  # trap 22
        ("buffer", "NCCL"),
        ("config", "shares its memory"),  # trap 2
        ("storage", "shares its memory"),
    ],
)
def test_grad_buffers_that_are_not_free_to_go_are_refused(why: str, sentence: str) -> None:
    model = _model(nccl_ub=why == "ddp_config")
    buffer = model.buffers[0]
    buffer.nccl_ub = why == "buffer"
    if why == "storage":
        buffer.grad_data = buffer.param_data.view(torch.uint8)
    config = {"reuse_grad_buf_for_mxfp8_param_ag": why == "config"}

    held = megatron.unwrap(mcore.DistributedOptimizer(model, **config), model)

    assert list(held.gradients()) == []
    assert any(sentence in reason for _, reason in held.resident)


def test_grad_buffers_freed_by_framework_are_not_freed_again() -> None:
    model = _model()
    held = megatron.unwrap(mcore.DistributedOptimizer(model))
    model.buffers[0].offload_to_cpu(move_params=False, move_grads=True)

    assert list(held.gradients()) == []

    model.buffers[0].reload_from_cpu(move_params=False, move_grads=True)
    assert len(list(held.gradients())) == 1


def test_freed_grad_buffers_return_as_zeros_in_same_views() -> None:
    model = _model()
    held = megatron.unwrap(mcore.DistributedOptimizer(model))
    weight = next(model.module.parameters())
    view = weight.main_grad
    view.fill_(3)

    assert held.release_gradients(step_open=False) == 1
    assert held.release_gradients(step_open=False) == 0
    assert model.buffers[0].grad_data.untyped_storage().nbytes() == 0
    assert ("model.0.buffers.0.grad_data" in dict(held.resident)) is True

    assert held.restore_gradients() == 1
    assert held.restore_gradients() == 0
    assert weight.main_grad is view
    assert not view.any()


def test_gradients_of_an_open_step_are_not_given_away() -> None:  # trap 11
    model = _model()
    held = megatron.unwrap(mcore.DistributedOptimizer(model))
    with pytest.raises(StateError, match="lose what it has accumulated"):
        held.release_gradients(step_open=True)
    assert not is_away([model.buffers[0].grad_data])


@pytest.mark.parametrize("thing", [object(), torch.optim.SGD([torch.ones(1)], lr=0.1)])
def test_object_that_is_not_megatron_optimizer_is_refused(thing: object) -> None:
    with pytest.raises(UnsupportedError, match="is not a Megatron optimizer"):
        megatron.unwrap(thing)


# ---- in a controller


@pytest.mark.parametrize("given", ["optimizer", "unwrapped", "chain"])
def test_controller_moves_masters_with_states_but_no_weight(given: str) -> None:  # trap 3
    optimizer, plain = _stepped(_model()), _stepped(_model())
    thing = {
        "optimizer": optimizer,
        "unwrapped": megatron.unwrap(optimizer),
        "chain": mcore.ChainedOptimizer([optimizer, mcore.MegatronOptimizer(None)]),
    }[given]
    masters = [one for one in optimizer.shard_fp32_from_float16_groups[0] if one is not None]
    identities = [id(one) for one in masters]

    with Controller(thing) as controller:
        for _ in range(3):
            controller.offload()
            assert is_away(masters + moments(optimizer.optimizer))
            assert optimizer.buffers[0].param_data.untyped_storage().nbytes() > 0
            controller.restore()
            optimizer.step()
            plain.step()

    assert [id(one) for one in masters] == identities
    for mine, other in zip(masters, plain.shard_fp32_from_float16_groups[0], strict=False):
        assert torch.equal(mine, other)
    assert all(map(torch.equal, moments(optimizer.optimizer), moments(plain.optimizer)))
    assert torch.equal(optimizer.buffers[0].param_data, plain.buffers[0].param_data)


def test_a_controller_lists_what_megatron_keeps_resident() -> None:
    optimizer = mcore.DistributedOptimizer(_model(torch.float32, nccl_ub=True))
    with Controller(optimizer) as controller:
        controller.offload()
        reasons = [reason for _, reason in controller.resident]
    assert any("own master" in reason for reason in reasons)
    assert any("NCCL" in reason for reason in reasons)


def test_precision_aware_optimizer_keeps_masters_in_state() -> None:
    weight = torch.nn.Parameter(torch.ones(16, dtype=torch.bfloat16))
    inner = torch.optim.AdamW([weight], lr=0.1)
    weight.grad = torch.ones_like(weight)
    inner.step()
    inner.state[weight]["master_param"] = torch.full((16,), 2.0)
    wrapper = mcore.MegatronOptimizer(inner)
    wrapper.shard_fp32_from_float16_groups = [[None]]

    with Controller(wrapper) as controller:
        controller.offload()
        assert is_away([inner.state[weight]["master_param"]])
        assert weight.untyped_storage().nbytes() > 0
        controller.prepare_for_training()
        assert torch.equal(inner.state[weight]["master_param"], torch.full((16,), 2.0))


def test_masters_that_appear_later_leave_with_the_next_clear() -> None:  # trap 9
    optimizer = _stepped(_model())
    with Controller(optimizer) as controller:
        controller.offload()
        controller.prepare_for_training()
        late = torch.ones(1024)
        optimizer.shard_fp32_from_float16_groups.append([late])
        controller.offload()
        assert is_away([late])
    assert torch.equal(late, torch.ones(1024))


def test_grad_buffer_is_not_moved_for_gradients_in_it() -> None:  # trap 2, 22
    model = _model(torch.float32, nccl_ub=True)
    optimizer = mcore.DistributedOptimizer(model)
    buffer = model.buffers[0].grad_data.fill_(0.5)
    for shard, weight in zip(
        optimizer.shard_fp32_groups[0], model.module.parameters(), strict=True
    ):
        shard.grad = weight.main_grad.view(-1)  # as Megatron hands grads of fp32 weights over
    optimizer.step()
    address = buffer.data_ptr()

    with Controller(optimizer) as controller:
        controller.offload()
        assert is_away(optimizer.optimizer)
        assert (buffer.data_ptr(), bool((buffer == 0.5).all())) == (address, True)
