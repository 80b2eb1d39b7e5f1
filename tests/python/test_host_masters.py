"""fp32 masters of Megatron-Core's own optimizers, with states="host": they live on the host, too.

The classes are Megatron's, made without their constructors, which ask for a GPU, and given what
these would have set. Their own code steps, copies masters to weights, and makes checkpoints.
"""

import copy
import gc
import warnings
from collections.abc import Sequence
from itertools import compress, pairwise
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("megatron.core.optimizer", reason="megatron-core is not installed")

import refit.window  # noqa: E402
import training  # noqa: E402
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: E402
from megatron.core.optimizer.optimizer import (  # noqa: E402
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
)
from refit.controller import Controller  # noqa: E402
from refit.errors import CopyError, DeviceMemoryError  # noqa: E402
from refit.windowed_step import WindowedStep  # noqa: E402
from test_host_failures import FailingCall  # noqa: E402

pytestmark = pytest.mark.usefixtures("default_device")

SIZES = [3000, 50_000, 7, 4097]
ON_HOST = [0, 0, 4 * 7, 0]
"""Bytes that masters have on the device then: states of the third are too small to travel."""
HOST = {"states": "host", "window_bytes": "128KiB", "windows": 2}
WAYS = {
    "by_their_weights": {**HOST, "window_bytes": "608KiB"},
    "the_small_by_their_weights": HOST,  # windows are too small for a unit of the others
    "whole": {**HOST, "offload_masters": "whole"},
}


def _config(**said: Any) -> Any:
    named = dict.fromkeys(
        (
            "timers",
            "barrier_with_L1_time",
            "reuse_grad_buf_for_mxfp8_param_ag",
            "overlap_param_gather",
            "use_precision_aware_optimizer_no_fp8_or_ds_fp8",
            "nccl_ub",
            "fp16",
        )
    )
    return SimpleNamespace(**{**named, **said})


def _made(kind: Any, masters: list[Any], **members: Any) -> Any:
    inner = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.01)
    told = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    inner.param_groups[0].update(told, params=masters)
    made = object.__new__(kind)
    made.optimizer = inner
    made.is_stub_optimizer = False
    made.grad_scaler = None
    made.config = members.pop("config", None) or _config()
    vars(made).update(members)
    return made


def _weights(sizes: Sequence[int]) -> list[Any]:
    torch.manual_seed(5)
    return [training.drawn(size).bfloat16() for size in sizes]


def _distributed(sizes: Sequence[int] = SIZES, **said: Any) -> Any:
    """One bucket, whose weights are views of its buffer; all of it is this rank's."""
    data = torch.cat(_weights(sizes))
    bounds = [sum(sizes[:at]) for at in range(len(sizes) + 1)]
    parts = [data[a:b] for a, b in pairwise(bounds)]
    params = [torch.nn.Parameter(one) for one in parts]
    for one, part in zip(params, parts, strict=True):
        one.data = part
    masters = [one.detach().clone().float() for one in params]
    ranges = [
        {
            "gbuf_world_in_bucket": SimpleNamespace(start=a, end=b, size=b - a),
            "param": SimpleNamespace(start=0, end=b - a, size=b - a),
        }
        for a, b in pairwise(bounds)
    ]
    dtypes = (torch.bfloat16, torch.float32)
    buffer = SimpleNamespace(params=params, buckets=[SimpleNamespace(param_data=data)])
    made = _made(
        DistributedOptimizer,
        masters,
        model_float16_groups=[params],
        model_fp32_groups=[[]],
        shard_float16_groups=[[one.detach().view(-1) for one in params]],
        shard_fp32_groups=[[]],
        shard_fp32_from_float16_groups=[masters],
        model_chunks=[],
        buffers=[buffer],
        ddp_config=SimpleNamespace(use_megatron_fsdp=False, overlap_param_gather=True),
        model_param_gbuf_map=dict.fromkeys(params, (0, dtypes, 0)),
        gbuf_ranges=[{dtypes: [{"param_map": dict(zip(params, ranges, strict=True))}]}],
        data_parallel_group=None,
        config=_config(**said),
    )
    return made, params, masters


def _float16(sizes: Sequence[int] = SIZES, **said: Any) -> Any:
    shaped = [one.view(1, -1) if at == 0 else one for at, one in enumerate(_weights(sizes))]
    params = [torch.nn.Parameter(one) for one in shaped]
    masters = [one.detach().clone().float() for one in params]
    made = _made(
        Float16OptimizerWithFloat16Params,
        masters,
        float16_groups=[params],
        fp32_from_float16_groups=[masters],
        fp32_from_fp32_groups=[[]],
        _dummy_overflow_buf=None,
        config=_config(**said),
    )
    return made, params, masters


def _give_gradients(masters: list[Any], seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    for at, one in enumerate(masters):
        none = at == 3 and seed == 1  # states of this one are born later
        one.grad = None if none else training.drawn(*one.shape, generator=source)


def _step(optimizer: Any, masters: list[Any], seed: int) -> None:
    _give_gradients(masters, seed)
    optimizer.step_with_ready_grads()


def _same(one: Any, other: Any) -> None:
    (left, weights, masters), (right, others, theirs) = one, other
    assert all(map(torch.equal, weights, others))
    assert all(map(torch.equal, masters, theirs))
    for mine, other_master in zip(masters, theirs, strict=True):
        ours, its = left.optimizer.state[mine], right.optimizer.state[other_master]
        assert list(ours) == list(its)
        assert all(torch.equal(ours[key].cpu(), its[key].cpu()) for key in ours)


def _held(masters: list[Any]) -> list[int]:
    return [one.untyped_storage().nbytes() for one in masters]


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def host(request: pytest.FixtureRequest) -> Any:
    """Options of a controller."""
    return request.param


def _coded(host: Any) -> list[bool]:
    """Which masters travel by their weights."""
    if host is WAYS["whole"]:
        return [False] * 4
    return [False, host is not HOST, False, True]


BOTH = pytest.mark.parametrize("make", [_distributed, _float16])


@BOTH
def test_masters_live_on_the_host_and_training_is_the_same_to_the_bit(host: Any, make: Any) -> None:
    plain, ours = make(), make()
    optimizer, weights, masters = ours
    with Controller(optimizer, **host) as controller:
        assert _held(masters) == ON_HOST
        for seed in range(4):
            _step(plain[0], plain[2], seed)
            _step(optimizer, masters, seed)
            assert all(map(torch.equal, weights, plain[1]))  # without a look at a master
            assert _held(masters) == ON_HOST
            with controller.refit():
                assert _held(masters) == [0] * 4
            controller.restore()
        stats = controller.stats()
        assert stats["refit/step_in_bytes"] == stats["refit/step_out_bytes"]
        whole = 3 * 4 * sum(size for size in SIZES if size > 128)
        coded = sum(compress(SIZES, _coded(host)))
        assert 1.9 * coded <= whole - stats["refit/step_in_bytes"] <= 2 * coded
        on_their_way = 2 * 4 * coded  # device memory of its own for either direction
        windows = 2 * int(host["window_bytes"].removesuffix("KiB")) << 10
        assert stats["refit/window_bytes"] <= windows + on_their_way
    assert _held(masters) == [4 * size for size in SIZES]
    _same(ours, plain)
    for one in (plain, ours):
        _step(one[0], one[2], 9)
    _same(ours, plain)


@BOTH
def test_a_master_that_is_used_comes_back_and_leaves_with_the_next_step(
    host: Any, make: Any
) -> None:
    plain, ours = make(), make()
    optimizer, _, masters = ours
    with Controller(optimizer, **host):
        for seed in range(2):
            _step(plain[0], plain[2], seed)
            _step(optimizer, masters, seed)
        assert _held(masters) == ON_HOST
        assert torch.equal(masters[1], plain[2][1])
        assert _held(masters) == [4 * size for size in SIZES]
        for one in (masters, plain[2]):
            one[1].mul_(1.5)  # as a framework loads a checkpoint
        for seed in range(2, 4):
            _step(plain[0], plain[2], seed)
            _step(optimizer, masters, seed)
            assert _held(masters) == ON_HOST
        copied = copy.deepcopy(masters[0])
        assert torch.equal(copied, plain[2][0])
    _same(ours, plain)


@BOTH
def test_what_megatron_does_between_steps_needs_no_master(host: Any, make: Any) -> None:
    optimizer, _, masters = make()
    with Controller(optimizer, **host):
        _step(optimizer, masters, 0)
        assert len(optimizer._collect_main_grad_data_for_unscaling()) == 4
        optimizer.zero_grad()
        _give_gradients(masters, 0)
        assert all(one.grad is not None for one in optimizer.get_parameters())
        saved = optimizer.state_dict()
        assert _held(masters) == ON_HOST
        kept = [one for group in saved.get("fp32_from_fp16_params", []) for one in group]
        assert all(bool(one.any()) for one in kept)
        assert _held(masters) == ([4 * size for size in SIZES] if kept else ON_HOST)


@BOTH
def test_weights_that_are_not_rounded_by_refit_are_rounded_by_megatron(
    host: Any, make: Any
) -> None:
    optimizer, weights, masters = make()
    with Controller(optimizer, **host):
        _step(optimizer, masters, 1)
        masters[0].fill_(2.0)  # brings all of them to the device
        optimizer._copy_main_params_to_model_params()
        assert bool((weights[0] == 2.0).all())
    masters[1].fill_(3.0)
    optimizer._copy_main_params_to_model_params()
    assert bool((weights[1] == 3.0).all())
    assert "_copy_main_params_to_model_params" not in vars(optimizer)


def test_a_share_stays_on_the_device_with_its_masters_and_leaves_with_the_cycle(host: Any) -> None:
    plain, ours = _distributed(), _distributed()
    optimizer, _, masters = ours
    with Controller(optimizer, **host, resident_bytes=8 * 53_000) as controller:
        for seed in range(3):
            assert _held(masters[:2]) == [12_000, 200_000]
            assert _held(masters[3:]) == [0]
            _step(plain[0], plain[2], seed)
            _step(optimizer, masters, seed)
            controller.clear()
            assert _held(masters) == [0] * 4
            controller.restore(non_blocking=False)
    _same(ours, plain)


def test_masters_that_are_rounded_elsewhere_stay_on_the_device(host: Any) -> None:
    for said in ({"reuse_grad_buf_for_mxfp8_param_ag": True},):
        optimizer, _, masters = _distributed(**said)
        with Controller(optimizer, **host) as controller:
            assert _held(masters) == [4 * size for size in SIZES]
            _give_gradients(masters, 3)
            optimizer.optimizer.step()
            controller.clear()
            assert _held(masters) == [0] * 4
            controller.restore(non_blocking=False)


def test_a_chain_of_both_and_the_end_of_its_controller(host: Any) -> None:
    plain, ours = [_distributed(), _float16()], [_distributed(), _float16()]
    optimizers = [one[0] for one in ours]
    for one in optimizers:
        one.config = optimizers[0].config
    controller = Controller(ChainedOptimizer(optimizers), **host)
    for seed in range(2):
        for one in plain + ours:
            _step(one[0], one[2], seed)
    assert all(_held(one[2]) == ON_HOST for one in ours)
    del controller
    gc.collect()
    for one, other in zip(ours, plain, strict=True):
        assert _held(one[2]) == [4 * size for size in SIZES]
        _same(one, other)


def test_without_memory_for_the_masters_a_use_says_so_and_loses_nothing(
    host: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from refit import host_masters

    plain, ours = _distributed(), _distributed()
    optimizer, _, masters = ours
    with Controller(optimizer, **host):
        _step(plain[0], plain[2], 0)
        _step(optimizer, masters, 0)

        def short(_parameter: Any) -> Any:
            raise torch.OutOfMemoryError("none left")

        with monkeypatch.context() as patched:
            patched.setattr(host_masters, "_over", short)
            with pytest.raises(DeviceMemoryError, match="3 masters, which live on the host"):
                masters[0].sum()
        assert _held(masters) == ON_HOST
        _step(plain[0], plain[2], 1)
        _step(optimizer, masters, 1)
    _same(ours, plain)


@pytest.mark.parametrize("at", range(1, 4))
def test_a_step_that_breaks_off_while_weights_are_rounded_is_resumed(
    host: Any, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, ours = _distributed(), _distributed()
    optimizer, weights, masters = ours
    rounds, original = [0], WindowedStep._round
    most = 0

    def breaks(*given: Any) -> None:
        rounds[0] += 1
        if rounds[0] == at:
            raise RuntimeError("an illegal memory access")
        original(*given)

    with Controller(optimizer, **host) as controller:
        for seed in range(2):
            rounds[0] = 0
            _step(plain[0], plain[2], seed)
            with monkeypatch.context() as patched:
                patched.setattr(WindowedStep, "_round", breaks)
                try:
                    _step(optimizer, masters, seed)
                except RuntimeError:
                    controller.resume_step()
            most = max(most, rounds[0])
            assert all(map(torch.equal, weights, plain[1]))
        assert most > at
    _same(ours, plain)


def test_code_that_fails_before_it_has_changed_a_master_can_be_called_again(
    host: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, ours = _distributed(), _distributed()
    optimizer, _, masters = ours
    with Controller(optimizer, **host) as controller:
        _step(plain[0], plain[2], 0)
        _step(optimizer, masters, 0)
        for one in plain[2], masters:
            _give_gradients(one, 2)
        plain[0].step_with_ready_grads()
        with monkeypatch.context() as patched:
            patched.setattr(torch.optim.AdamW, "_init_group", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                optimizer.step_with_ready_grads()
        controller.resume_step()
        optimizer.step_with_ready_grads()
    _same(ours, plain)


@pytest.mark.parametrize("error", [CopyError("the copy failed"), KeyboardInterrupt()], ids=str)
def test_every_call_of_the_library_may_fail_once(
    host: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    failed = 0
    for at in range(1, 100):
        plain, ours = _distributed(), _distributed()
        optimizer, weights, masters = ours
        with Controller(optimizer, **host) as controller:
            _step(plain[0], plain[2], 0)
            failing = FailingCall(at, copy.copy(error), behind=isinstance(error, KeyboardInterrupt))
            _give_gradients(masters, 0)
            told = None
            with monkeypatch.context() as patched:
                patched.setattr(refit.window, "call", failing)
                try:
                    optimizer.step_with_ready_grads()
                except (CopyError, KeyboardInterrupt) as why:
                    failed += 1
                    told = " ".join([str(why), *getattr(why, "__notes__", [])])
            if told is not None and "resume_step()" in told:
                controller.resume_step()
            elif told is not None and not optimizer.optimizer.state:
                optimizer.step_with_ready_grads()
            assert all(map(torch.equal, weights, plain[1])), at
            _step(plain[0], plain[2], 1)
            _step(optimizer, masters, 1)
        _same(ours, plain)
        if failing.count < at:
            break
    else:
        pytest.fail("a step never ends")
    assert failed > 8
