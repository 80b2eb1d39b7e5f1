"""The adapter on the classes of Megatron-Core itself, where that is installed.

They are made without their constructors, which ask for a GPU, and given what these would have set;
their own code runs: chains, states, state_dict, and the offload and restore of buffers.
"""

import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import refit

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("megatron.core.optimizer", reason="megatron-core is not installed")

import megatron_checkpoint  # noqa: E402
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer  # noqa: E402
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: E402
from megatron.core.optimizer.optimizer import (  # noqa: E402
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
)
from megatron.core.optimizer.optimizer_config import OptimizerConfig  # noqa: E402
from refit.controller import Controller  # noqa: E402
from refit.errors import UnsupportedError  # noqa: E402
from refit.integrations import megatron, nemo_rl, state_offload, verl  # noqa: E402
from stand_ins.optimizers import is_away, moments, step  # noqa: E402

KEYS = {"use_pinned_optimizer_offload": True, "use_coalesced_optimizer_offload": True}


def _make(kind: Any, inner: Any, **members: Any) -> Any:
    made = object.__new__(kind)
    made.optimizer = inner
    made.is_stub_optimizer = inner is None
    made.grad_scaler = None
    made.config = SimpleNamespace(nccl_ub=False)
    vars(made).update(members)
    return made


def _adamw(tensors: list[Any]) -> Any:
    inner = torch.optim.AdamW(tensors, lr=0.1)
    step(inner)
    return inner


def _masters(count: int = 3) -> list[Any]:
    torch.manual_seed(11)
    return [torch.nn.Parameter(torch.randn(40 + i)) for i in range(count)]


def _float16(masters: list[Any]) -> Any:
    weights = [[torch.nn.Parameter(one.detach().bfloat16()) for one in masters]]
    groups = {"float16_groups": weights, "fp32_from_float16_groups": [masters]}
    return _make(
        Float16OptimizerWithFloat16Params, _adamw(masters), fp32_from_fp32_groups=[[]], **groups
    )


def _distributed(masters: list[Any]) -> Any:
    weights = [[torch.nn.Parameter(one.detach().bfloat16()) for one in masters]]
    return _make(
        DistributedOptimizer,
        _adamw(masters),
        model_float16_groups=weights,
        shard_fp32_groups=[[]],
        shard_fp32_from_float16_groups=[[*masters, None]],
        model_chunks=[],
    )


@pytest.mark.parametrize("make", [_float16, _distributed])
def test_masters_and_states_leave_and_return_to_the_bit(make: Any) -> None:
    masters = _masters()
    optimizer = make(masters)
    before = [one.detach().clone() for one in masters + moments(optimizer.optimizer)]
    with Controller(optimizer) as controller:
        controller.offload()
        assert is_away(masters + moments(optimizer.optimizer))
        controller.prepare_for_training()
        assert all(map(torch.equal, masters + moments(optimizer.optimizer), before))


def test_chain_is_recognized_and_its_dict_shows_returned_states() -> None:
    first, second = _distributed(_masters()), _distributed(_masters())
    stub = _make(FP32Optimizer, None)
    for one in (first, second, stub):
        one.config = first.config
    chain = ChainedOptimizer([first, stub, second])
    assert megatron.is_megatron(chain)
    assert megatron.unwrap(chain).inner == [first.optimizer, second.optimizer]

    with Controller(chain) as controller:
        controller.offload()
        assert is_away(moments(first.optimizer) + moments(second.optimizer))
        controller.prepare_for_training()
    keys = [key for key, _ in first.state.items()]
    assert all(bool(first.state[key]["exp_avg"].any()) for key in keys)


def test_megatrons_own_state_dict_finds_states_and_masters_back() -> None:  # trap 13
    masters = _masters()
    optimizer = _float16(masters)
    before = [one.detach().clone() for one in masters]
    with Controller(optimizer) as controller:
        controller.offload()
        saved = optimizer.state_dict()
        assert controller.state == "training"
        kept = saved["fp32_from_fp16_params"][0]
        assert all(map(torch.equal, kept, before))
        assert not is_away([one["exp_avg"] for one in saved["optimizer"]["state"].values()])


def test_grad_buffers_go_and_come_by_megatrons_own_methods() -> None:
    grads = torch.full((64,), 2.0)
    buffer = object.__new__(_ParamAndGradBuffer)
    buffer.grad_data, buffer.param_data, buffer.param_data_cpu = grads, None, None
    buffer.grad_data_size, buffer.nccl_ub = 0, False
    chunk = torch.nn.Linear(2, 2)
    chunk.buffers = [buffer]
    chunk.expert_parallel_buffers = []
    optimizer = _distributed(_masters())
    held = megatron.unwrap(optimizer, chunk)

    assert held.release_gradients(step_open=False) == 1
    assert grads.untyped_storage().nbytes() == 0
    assert held.restore_gradients() == 1
    assert (grads.shape, bool(grads.any())) == ((64,), False)


def test_the_movers_of_nemo_rl_and_verl_move_them() -> None:
    first, second = _distributed(_masters()), _distributed(_masters())
    worker = SimpleNamespace(optimizer=first, cfg=KEYS)
    nemo_rl.move_optimizer(worker, "cpu")
    verl.offload_megatron_optimizer(second)
    assert is_away(moments(first.optimizer) + moments(second.optimizer))
    nemo_rl.move_optimizer(worker, "cuda")
    verl.load_megatron_optimizer(second)
    assert not is_away(moments(first.optimizer) + moments(second.optimizer))
    nemo_rl.mover_of(worker).close()
    verl.attached(second).close()


def test_windows_are_refused_for_decoupled_gradients() -> None:
    masters = _masters()
    optimizer = _distributed(masters)
    optimizer.optimizer.use_decoupled_grad = True  # Transformer Engine's FusedAdam
    with pytest.raises(UnsupportedError, match="decoupled_grad"):
        Controller(optimizer, schedule=refit.HostStates())
    with Controller(optimizer) as controller:
        controller.offload()
        assert is_away(masters)


def test_its_own_options_become_keywords_and_are_off_there() -> None:
    config = OptimizerConfig(
        optimizer_cpu_offload=True,
        optimizer_offload_fraction=0.5,
        overlap_cpu_optimizer_d2h_h2d=True,
        use_torch_optimizer_for_cpu_offload=True,
    )
    assert state_offload.keywords(OptimizerConfig()) == {}
    assert state_offload.take(config) == {
        "schedule": refit.CpuStep(fraction=0.5, overlap=True, backend="torch")
    }
    assert not config.optimizer_cpu_offload
    assert state_offload.keywords(config) == {}


def test_its_default_share_is_0_and_a_warning_says_so() -> None:
    with pytest.warns(UserWarning, match="optimizer_offload_fraction is 0"):
        found = state_offload.keywords(OptimizerConfig(optimizer_cpu_offload=True))
    assert found == {"schedule": refit.CpuStep(fraction=0.0, overlap=False)}


@pytest.mark.slow
@pytest.mark.parametrize("way", list(megatron_checkpoint.WAYS))
def test_forked_megatron_writers_write_states_on_host(way: str, tmp_path: Path) -> None:
    pytest.importorskip("psutil", reason="Megatron's writers ask for it")
    import torch.distributed.checkpoint as dcp

    folder = tmp_path / "checkpoint"
    script = str(Path(megatron_checkpoint.__file__))
    subprocess.run([sys.executable, script, str(folder), way], check=True, timeout=100)
    model, optimizer = megatron_checkpoint.trained()
    megatron_checkpoint.step(model, optimizer)
    expected = megatron_checkpoint.moments(optimizer.state_dict())
    loaded = {name: torch.empty_like(value) for name, value in expected.items()}
    dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())
