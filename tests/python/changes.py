"""What a training loop may do between a backward pass and its step."""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from schedules import Layers
from torch import nn
from training import drawn


def clip(run: Layers, **options: Any) -> None:
    nn.utils.clip_grad_norm_(run.parameters(), 1e-3, **options)


def scale_and_clip(run: Layers, times: int) -> None:
    for _ in range(times):
        torch._foreach_mul_(run.gradients(), 3.5)
        clip(run)


def add_noise(run: Layers) -> None:
    source = torch.Generator().manual_seed(1)
    for one in run.gradients():
        one.add_(drawn(*one.shape, generator=source))


def zero(run: Layers) -> None:
    run.optimizer.zero_grad(set_to_none=False)
    assert not any(bool(one.any()) for one in run.gradients())


def read(run: Layers) -> None:
    assert all(bool(one.isfinite().all()) for one in run.gradients())


def copy_to_numpy(run: Layers) -> None:
    assert [(one if one.is_cpu else one.cpu()).numpy().copy() for one in run.gradients()]


def make_aliases_by_data(run: Any) -> None:
    run.aliases = [torch.empty(0, device=run.device) for _ in run.gradients()]
    for alias, one in zip(run.aliases, run.gradients(), strict=True):
        alias.data = one
        alias.mul_(0.5)


def share_a_counter(run: Layers) -> None:
    states = [state for state in run.optimizer.state.values() if state["exp_avg"].dim() > 1]
    for state in states:
        state["step"] = states[0]["step"]


def exchange(one: Any, name: Any, other: Any, other_name: Any) -> None:
    one[name], other[other_name] = other[other_name], one[name]


def exchange_names(run: Layers) -> None:
    state = state_of(run, 4)
    state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"].abs_()


def state_of(run: Layers, at: int) -> Any:
    return run.optimizer.state[run.model[at].weight]


def load_others(run: Layers) -> None:
    state = copy.deepcopy(run.optimizer.state_dict())
    for one in state["state"].values():
        one["exp_avg"] = one["exp_avg"] * 0.25
    run.optimizer.load_state_dict(state)


def set_option(name: str, value: Any) -> Callable[[Layers], None]:
    return lambda run: run.optimizer.param_groups[0].update({name: value})


def make_fused(run: Layers) -> None:
    set_option("fused", True)(run)
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))  # moves its counters


CHANGES: dict[str, Callable[[Any], Any]] = {
    # gradients
    "clip": clip,
    "clip one by one": lambda run: clip(run, foreach=False),
    "clip values": lambda run: nn.utils.clip_grad_value_(run.parameters(), 1e-4),
    "scale": lambda run: [one.mul_(3.5) for one in run.gradients()],
    "scale and clip": lambda run: scale_and_clip(run, 1),
    "scale three times": lambda run: [torch._foreach_mul_(run.gradients(), 0.7) for _ in range(3)],
    "scale and clip twice": lambda run: scale_and_clip(run, 2),
    "scale one of them": lambda run: run.gradients()[-2].mul_(0.25),
    "scale one twice": lambda run: torch._foreach_mul_(
        [*run.gradients(), run.gradients()[-2]],
        0.5,  # as a list that names a tied weight twice
    ),
    "scale by data": lambda run: [one.data.mul_(3.5) for one in run.gradients()],
    "scale by an infinity": lambda run: torch._foreach_mul_(run.gradients(), math.inf),
    "scale beyond fp32": lambda run: torch._foreach_mul_(run.gradients(), 1e39),
    "divide": lambda run: [one.div_(3) for one in run.gradients()],
    "add noise": add_noise,
    "give others": lambda run: [setattr(p, "grad", p.grad.clone() * 2) for p in run.parameters()],
    "drop one": lambda run: setattr(run.parameters()[-2], "grad", None),
    "drop all": lambda run: run.optimizer.zero_grad(),
    "zero": zero,
    "another backward pass": lambda run: run.backward(),
    "read": read,
    "copy": copy_to_numpy,
    "write storages": lambda run: [one.untyped_storage().fill_(0) for one in run.gradients()],
    "make aliases by data": make_aliases_by_data,
    # parameters
    "decay weights by data": lambda run: [one.data.mul_(0.5) for one in run.parameters()],
    "replace weights": lambda run: [
        setattr(one, "data", one.data.clone() + 1) for one in run.parameters()
    ],
    "load the model": lambda run: run.model.load_state_dict(
        {key: one * 2 for key, one in run.model.state_dict().items()}
    ),
    # states
    "change moments": lambda run: [one.mul_(0.5) for one in run.moments()],
    "replace moments": lambda run: [
        one.update(exp_avg_sq=one["exp_avg_sq"] + 1) for one in run.optimizer.state.values()
    ],
    "set counters": lambda run: [one["step"].fill_(9) for one in run.optimizer.state.values()],
    "set counters by data": lambda run: [
        one["step"].data.fill_(9) for one in run.optimizer.state.values()
    ],
    "share a counter": share_a_counter,
    "exchange names": exchange_names,
    "exchange values": lambda run: exchange(
        state_of(run, 2), "exp_avg", state_of(run, 4), "exp_avg"
    ),
    "exchange parameters": lambda run: exchange(
        *(run.optimizer.state, run.model[2].weight, run.optimizer.state, run.model[4].weight)
    ),
    "drop states": lambda run: run.optimizer.state.clear(),
    "empty states": lambda run: [run.optimizer.state.update({one: {}}) for one in run.parameters()],
    "load": load_others,
    # options
    "change the rate": set_option("lr", 0.3),
    "a rate below zero": set_option("lr", -0.01),
    "change betas": set_option("betas", (0.8, 0.96)),
    "change the decay": set_option("weight_decay", 0.1),
    "add an option": set_option("mark", 7),
    "make it fused": make_fused,
}
NOT_ON_GPU = {
    "scale beyond fp32": "refuses the factor",
    "scale one twice": "scales all at the same time",
}
