"""Megatron-Core's own optimizers, which keep fp32 masters of bf16 weights.

The classes are Megatron's, made without their constructors, which ask for a GPU, and given what
these would have set. Their own code steps, copies masters to weights, and makes checkpoints.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import refit
import torch
import training
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from schedules import Schedule, same
from torch import nn

SIZES = [3000, 50_000, 7, 4097]
"""Elements of the masters; states of the third are too small to travel."""
OVERLAID = {
    "_copy_main_params_to_model_params",
    "_copy_model_params_to_main_params",
    "load_state_dict",
}
"""Methods of Megatron's optimizers that a controller stands before."""
UNSAID = (
    *("timers", "barrier_with_L1_time", "reuse_grad_buf_for_mxfp8_param_ag", "nccl_ub", "fp16"),
    *("overlap_param_gather", "use_precision_aware_optimizer_no_fp8_or_ds_fp8"),
)


class Mastered:
    """An optimizer of Megatron, the weights of its model, and the masters that it steps."""

    def __init__(
        self, kind: type, weights: list[Any], said: dict[str, Any], members: dict[str, Any]
    ) -> None:
        self.weights = weights
        self.masters = [one.detach().clone().float() for one in weights]
        inner = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=0.01)
        told = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False}
        inner.param_groups[0].update(told, is_decoupled_lr=False, params=self.masters)
        self.optimizer: Any = object.__new__(kind)
        config = SimpleNamespace(**{**dict.fromkeys(UNSAID), **said})
        fixed = {"optimizer": inner, "is_stub_optimizer": False, "grad_scaler": None}
        vars(self.optimizer).update({**fixed, "config": config, **members})
        self.model = Model(weights)

    def give_gradients(self, seed: int) -> None:
        source = torch.Generator().manual_seed(seed)
        for at, one in enumerate(self.masters):
            none = at == 3 and seed == 1  # states of this one are born later
            one.grad = None if none else training.drawn(*one.shape, generator=source)

    def step(self, seed: int) -> None:
        self.give_gradients(seed)
        self.optimizer.step_with_ready_grads()

    def round(self) -> None:
        """As Megatron does after each step."""
        self.optimizer._copy_main_params_to_model_params()

    def held(self) -> list[int]:
        """Bytes that each master has on the device."""
        return [one.untyped_storage().nbytes() for one in self.masters]

    def values(self) -> list[Any]:
        states = [self.optimizer.optimizer.state[one] for one in self.masters]
        return [[one.detach() for one in (*self.weights, *self.masters)], states]

    def copies(self) -> list[Any]:
        return [copy.deepcopy(one) for one in self.masters]

    def saved(self) -> Any:
        states = self.model.state_dict(), self.optimizer.optimizer.state_dict()
        return *copy.deepcopy(states), self.copies()

    def count(self) -> int:
        """How often the third master was stepped."""
        return int(self.optimizer.optimizer.state[self.masters[2]]["step"])

    def overlaid(self) -> set[str]:
        return vars(self.optimizer).keys() & OVERLAID


class Model(nn.Module):
    """Weights in two modules; a load may begin at either."""

    def __init__(self, weights: list[Any]) -> None:
        super().__init__()
        self.first = nn.ParameterList(weights[:2])
        self.second = nn.ParameterList(weights[2:])


def weights_of(sizes: Sequence[int]) -> list[Any]:
    torch.manual_seed(5)
    return [training.drawn(size).bfloat16() for size in sizes]


def distributed(sizes: Sequence[int] = SIZES, **said: Any) -> Mastered:
    """One bucket, whose weights are views of its buffer; all of it is this rank's."""
    data = torch.cat(weights_of(sizes))
    bounds = list(pairwise(sum(sizes[:at]) for at in range(len(sizes) + 1)))
    weights = [nn.Parameter(data[a:b]) for a, b in bounds]
    for one, (a, b) in zip(weights, bounds, strict=True):
        one.data = data[a:b]
    ranges = [
        {
            "gbuf_world_in_bucket": SimpleNamespace(start=a, end=b, size=b - a),
            "param": SimpleNamespace(start=0, end=b - a, size=b - a),
        }
        for a, b in bounds
    ]
    dtypes = (torch.bfloat16, torch.float32)
    members = {
        "model_float16_groups": [weights],
        "model_fp32_groups": [[]],
        "shard_float16_groups": [[one.detach().view(-1) for one in weights]],
        "shard_fp32_groups": [[]],
        "model_chunks": [],
        "buffers": [SimpleNamespace(params=weights, buckets=[SimpleNamespace(param_data=data)])],
        "ddp_config": SimpleNamespace(use_megatron_fsdp=False, overlap_param_gather=True),
        "model_param_gbuf_map": dict.fromkeys(weights, (0, dtypes, 0)),
        "gbuf_ranges": [{dtypes: [{"param_map": dict(zip(weights, ranges, strict=True))}]}],
        "data_parallel_group": None,
    }
    made = Mastered(DistributedOptimizer, weights, said, members)
    made.optimizer.shard_fp32_from_float16_groups = [made.masters]
    return made


def float16(sizes: Sequence[int] = SIZES, **said: Any) -> Mastered:
    first, *rest = weights_of(sizes)
    weights = [nn.Parameter(one) for one in (first.view(1, -1), *rest)]
    members = {
        "float16_groups": [weights],
        "fp32_from_fp32_groups": [[]],
        "_dummy_overflow_buf": None,
    }
    made = Mastered(Float16OptimizerWithFloat16Params, weights, said, members)
    made.optimizer.fp32_from_float16_groups = [made.masters]
    return made


class Pair:
    """One without refit and one with a schedule, to which the same is done. At the end of its block
    both go on alike, and once more without the controller, of which nothing is left."""

    def __init__(
        self,
        schedule: Schedule,
        make: Callable[..., Mastered] = distributed,
        sizes: Sequence[int] = SIZES,
        *,
        steps: int = 2,
        **options: Any,
    ) -> None:
        self.plain, self.ours = make(sizes), make(sizes)
        self.controller = self.open(schedule, **options)
        self.step(*range(steps))

    def open(self, schedule: Schedule, **options: Any) -> refit.Controller:
        return schedule.open(self.ours.optimizer, self.ours.model, **options)

    def __iter__(self) -> Iterator[Mastered]:
        yield self.plain
        yield self.ours

    def step(self, *seeds: int) -> None:
        for seed in seeds:
            for one in self:
                one.step(seed)
            self.assert_same_weights()

    def assert_same_weights(self) -> None:
        """Without a look at a master."""
        assert all(map(torch.equal, self.plain.weights, self.ours.weights))

    def assert_same(self) -> None:
        assert same(self.plain.values(), self.ours.values())

    def go_on(self) -> None:
        self.step(5, 6)
        self.assert_same()

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is None:
            self.go_on()
            self.controller.close()
            self.assert_free()

    def assert_free(self) -> None:
        """Nothing is left of a controller, and all goes on as without."""
        assert self.ours.held() == [one.nbytes for one in self.ours.masters]
        assert not self.ours.overlaid()
        self.go_on()
