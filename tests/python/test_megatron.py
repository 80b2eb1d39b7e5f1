"""What a Megatron optimizer holds is found, and what is the model's own is left alone."""

import pytest
from stand_ins import megatron_core as mcore

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from refit.errors import UnsupportedError  # noqa: E402
from refit.integrations import megatron  # noqa: E402


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


def test_masters_beside_the_states_are_found_and_none_entries_are_not() -> None:
    optimizer = _stepped(_model())

    held = megatron.unwrap(optimizer)

    masters = [one for one in optimizer.shard_fp32_from_float16_groups[0] if one is not None]
    assert [tensor for _, tensor in held.tensors()] == masters
    assert held.inner == [optimizer.optimizer]
    names = [name for name, _ in held.tensors()]
    assert len(set(names)) == len(names)


def test_a_chain_is_taken_apart_and_a_stub_without_an_optimizer_is_skipped() -> None:
    dense, expert = _stepped(_model()), _stepped(_model())
    stub = mcore.MegatronOptimizer(None)

    held = megatron.unwrap(mcore.ChainedOptimizer([dense, stub, expert]))

    assert held.inner == [dense.optimizer, expert.optimizer]
    assert len(list(held.tensors())) == 8


def test_a_rank_without_any_parameters_holds_nothing() -> None:
    held = megatron.unwrap(mcore.ChainedOptimizer([mcore.MegatronOptimizer(None)]))

    assert (held.inner, list(held.tensors()), held.resident) == ([], [], [])


def test_fp32_groups_that_are_views_of_the_weights_are_never_moved() -> None:  # trap 3
    model = _model(torch.float32)
    held = megatron.unwrap(mcore.DistributedOptimizer(model))

    assert list(held.tensors()) == []
    assert [name for name, _ in held.resident if "shard_fp32_groups" in name]
    assert any("own master" in reason for _, reason in held.resident)


def test_a_master_that_shares_its_memory_with_a_weight_is_never_moved() -> None:  # trap 2, 3
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


def test_grad_buffers_of_dense_and_expert_parameters_are_found_once() -> None:
    model = _model()
    experts = [torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))]
    model.expert_parallel_buffers = [mcore.ParamAndGradBuffer(experts), model.buffers[0]]

    held = megatron.unwrap(mcore.DistributedOptimizer(model))

    found = [tensor for _, tensor in held.gradients()]
    assert [id(one) for one in found] == [
        id(model.buffers[0].grad_data),
        id(model.expert_parallel_buffers[0].grad_data),
    ]


@pytest.mark.parametrize("where", ["ddp_config", "buffer"])
def test_grad_buffers_that_nccl_has_registered_are_refused(where: str) -> None:  # trap 22
    model = _model(nccl_ub=where == "ddp_config")
    model.buffers[0].nccl_ub = where == "buffer"

    held = megatron.unwrap(mcore.DistributedOptimizer(model), model)

    assert list(held.gradients()) == []
    assert any("NCCL" in reason for _, reason in held.resident)


@pytest.mark.parametrize("by", ["config", "storage"])
def test_grad_buffers_that_share_memory_with_weights_are_refused(by: str) -> None:  # trap 2
    model = _model()
    config = {"reuse_grad_buf_for_mxfp8_param_ag": by == "config"}
    if by == "storage":
        model.buffers[0].grad_data = model.buffers[0].param_data.view(torch.uint8)

    held = megatron.unwrap(mcore.DistributedOptimizer(model, **config))

    assert list(held.gradients()) == []
    assert any("shares its memory" in reason for _, reason in held.resident)


def test_grad_buffers_that_the_framework_has_freed_are_not_freed_again() -> None:
    model = _model()
    held = megatron.unwrap(mcore.DistributedOptimizer(model))
    model.buffers[0].offload_to_cpu(move_params=False, move_grads=True)

    assert list(held.gradients()) == []

    model.buffers[0].reload_from_cpu(move_params=False, move_grads=True)
    assert len(list(held.gradients())) == 1


def test_what_it_holds_is_asked_anew_each_time() -> None:  # trap 9
    model = _model()
    optimizer = mcore.DistributedOptimizer(model)
    held = megatron.unwrap(optimizer)
    before = len(list(held.tensors()))

    optimizer.shard_fp32_from_float16_groups.append([torch.ones(3)])

    assert len(list(held.tensors())) == before + 1


@pytest.mark.parametrize("thing", [object(), torch.optim.SGD([torch.ones(1)], lr=0.1)])
def test_what_is_no_megatron_optimizer_is_refused_with_a_sentence(thing: object) -> None:
    with pytest.raises(UnsupportedError, match="is no Megatron optimizer"):
        megatron.unwrap(thing)
