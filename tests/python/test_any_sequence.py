"""Any sequence of what a training loop may do, on random optimizers: with states that come and go,
and without refit, the same to the bit after each step."""

import copy
import pickle
import random
from typing import Any

import pytest
import refit
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from refit.errors import StateError
from torch import nn

MAKERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw one by one": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True),
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=2, history_size=2),
}

MOVES = ["clear", "restore", "restore and wait", "join", "refit", "refit that fails", "release"]
"""What only the run with refit does; none of it may show."""

WORK = ["step", "backward", "zero_grad", "drop grads", "reload", "add a group", "read the state"]
"""What both do."""

USES: dict[str, Any] = {
    "look": lambda t, _: (t.shape, t.dtype, t.stride(), t.device, t.requires_grad, len(t)),
    "read": lambda t, _: t.tolist(),
    "sum": lambda t, _: float(t.sum()),
    "norms": lambda t, other: [float(one) for one in torch._foreach_norm([t, other])],
    "compare": lambda t, other: bool((t.flatten()[0] < other.flatten()[-1]).item()),
    "copy": lambda t, _: copy.deepcopy(t).mul_(2).tolist(),
    "pickle": lambda t, _: pickle.loads(pickle.dumps(t)).tolist(),
    "numpy": lambda t, _: float(t.numpy().sum()),
    "view": lambda t, _: t.detach().flatten()[1:].tolist(),
    "scale": lambda t, _: t.mul_(0.5) is t,
    "write one": lambda t, _: t.view(-1).__setitem__(0, 0.125),
    "fill": lambda t, _: t.fill_(0.25) is t,
    "zero": lambda t, _: t.zero_() is t,
    "zero two": lambda t, other: torch._foreach_zero_([t, other]) and None,
    "lerp": lambda t, other: t.lerp_(torch.full_like(t, float(other.flatten()[0])), 0.5) is t,
    "out": lambda t, _: torch.add(t, 0.5, out=t) is t,
    "data": lambda t, _: t.data.add_(0.25) is None,
    "set data": lambda t, _: setattr(t, "data", t.clone()),
}
"""What a loop may do with a state or a gradient, wherever it is, and what it gets from that."""

GRADIENTS: dict[str, Any] = {
    "clip": lambda p: float(nn.utils.clip_grad_norm_(p, 0.1)),
    "clip values": lambda p: nn.utils.clip_grad_value_(p, 0.01),
    "norm": lambda p: float(nn.utils.get_total_norm([one.grad for one in p])),
    "drop one": lambda p: setattr(p[0], "grad", None),
    "replace one": lambda p: setattr(p[-1], "grad", torch.full_like(p[-1], 0.5)),
    "add to one": lambda p: setattr(p[0], "grad", p[0].grad + 0.5),
}
"""What it may do with the gradients of parameters, which have one each."""

BY_HAND = ["use a state", "use a gradient", "use gradients"]

VERBS = st.lists(st.sampled_from(MOVES + WORK + ["step"] * 3 + ["clear"] * 3), max_size=24)


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [found for key in sorted(value, key=str) for found in tensors_in(value[key])]
    if isinstance(value, list | tuple):
        return [found for one in value for found in tensors_in(one)]
    return []


class Twin:
    """One of two equal runs."""

    def __init__(self, maker: str) -> None:
        torch.manual_seed(5)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.more = [nn.Linear(3, 3) for _ in range(2)]
        self.optimizer = MAKERS[maker](self.model.parameters())
        self.alone = maker == "lbfgs"
        self.passes = 0
        self.chosen = random.Random(7)

    def loss(self) -> torch.Tensor:
        source = torch.Generator().manual_seed(self.passes)
        self.passes += 1
        out = self.model(torch.randn(4, 6, generator=source))
        for one in self.more:
            out = one(out)
        return out.pow(2).mean()

    def backward(self) -> float:
        loss = self.loss()
        loss.backward()
        return float(loss.detach())

    def step(self) -> float:
        if self.alone:
            loss = self.loss

            def closure() -> torch.Tensor:
                self.optimizer.zero_grad()
                value = loss()
                value.backward()
                return value

            return float(self.optimizer.step(closure).detach())
        value = self.backward()
        self.optimizer.step()
        return value

    def work(self, verb: str) -> Any:
        if verb == "step":
            return self.step()
        if verb == "backward":
            return self.backward()
        if verb == "zero_grad":
            return self.optimizer.zero_grad(set_to_none=False)
        if verb == "drop grads":
            return self.optimizer.zero_grad(set_to_none=True)
        if verb == "reload":  # trap 15
            return self.optimizer.load_state_dict(self.optimizer.state_dict())
        if verb == "add a group" and self.more and not self.alone:  # trap 9
            return self.optimizer.add_param_group({"params": list(self.more.pop().parameters())})
        if verb == "use a state":
            return self.use(tensors_in(list(self.optimizer.state.values())))
        if verb == "use a gradient":
            return self.use([p.grad for p in self.parameters() if p.grad is not None])
        if verb == "use gradients":
            way = self.chosen.choice(sorted(GRADIENTS))
            having = [p for p in self.parameters() if p.grad is not None]
            return GRADIENTS[way](having) if having else None
        return None

    def parameters(self) -> list[Any]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @torch.no_grad()
    def use(self, tensors: list[torch.Tensor]) -> Any:
        """Something by chance, with two by chance; the twins have the same luck."""
        way, one, other = self.chosen.choice(sorted(USES)), *self.chosen.choices(range(99), k=2)
        large = [tensor for tensor in tensors if tensor.dim() > 0]
        if not large:
            return None
        return USES[way](large[one % len(large)], large[other % len(large)])

    def everything(self) -> list[torch.Tensor]:
        """All tensors there are, where states are at home."""
        found = tensors_in(self.optimizer.state_dict()["state"])
        for p in self.model.parameters():
            found.append(p.detach())
            if p.grad is not None:
                found.append(p.grad)
        return found


def move(controller: refit.Controller, verb: str) -> None:
    """Verbs that do not fit the state say so with a StateError, and change nothing."""
    try:
        if verb == "clear":
            controller.clear()
        elif verb == "restore":
            controller.restore()
        elif verb == "restore and wait":
            controller.restore(non_blocking=False)
        elif verb == "join":
            controller.join()
        elif verb == "refit":
            with controller.refit():
                pass
        elif verb == "refit that fails":
            with pytest.raises(ZeroDivisionError), controller.refit():
                raise ZeroDivisionError
        elif verb == "release":
            controller.release()
    except StateError:
        assert controller.state in ("cleared", "refitted"), verb
        assert verb in ("join", "release"), verb


def assert_alike(one: Twin, other: Twin) -> None:
    mine, theirs = one.everything(), other.everything()
    assert len(mine) == len(theirs)
    assert all(map(same_bits, mine, theirs))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """What is written by chance may well make a step give NaN."""
    return a.dtype == b.dtype and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


@example(maker="adamw", verbs=["step", "clear", "zero_grad"], pinned=True)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(maker=st.sampled_from(sorted(MAKERS)), verbs=VERBS, pinned=st.booleans())
def test_no_sequence_of_verbs_changes_a_bit(maker: str, verbs: list[str], pinned: bool) -> None:
    alone, moved = Twin(maker), Twin(maker)
    with refit.Controller(
        moved.optimizer, moved.model, use_pinned_optimizer_offload=pinned
    ) as controller:
        for verb in verbs:
            if verb in MOVES:
                move(controller, verb)
            elif verb == "read the state":
                assert_alike(alone, moved)
            else:
                assert alone.work(verb) == moved.work(verb)
        assert_alike(alone, moved)
    assert_alike(alone, moved)


HANDS = st.lists(st.sampled_from(MOVES + WORK + 4 * BY_HAND + ["step"] * 4 + ["clear"] * 6))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(maker=st.sampled_from(sorted(MAKERS)), verbs=HANDS, seed=st.integers(0, 2**32))
def test_states_and_gradients_may_be_used_at_any_time(
    maker: str, verbs: list[str], seed: int
) -> None:
    alone, moved = Twin(maker), Twin(maker)
    alone.chosen.seed(seed), moved.chosen.seed(seed)
    alone.step(), moved.step()
    with refit.Controller(moved.optimizer, moved.model) as controller:
        for verb in verbs:
            if verb in MOVES:
                move(controller, verb)
            else:
                assert repr(alone.work(verb)) == repr(moved.work(verb)), verb
        assert_alike(alone, moved)
        kinds = {type(one) for one in tensors_in(list(moved.optimizer.state.values()))}
        assert kinds <= {torch.Tensor}
    assert_alike(alone, moved)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(verbs=st.lists(st.sampled_from(["clear", "restore", "step", "join"]), max_size=14))
def test_zeroed_gradients_are_zero_and_no_other_bit_changes(verbs: list[str]) -> None:
    alone, moved = Twin("adamw"), Twin("adamw")
    with refit.Controller(moved.optimizer, moved.model, grads="zero") as controller:
        for verb in verbs:
            if verb == "step":
                for one in (alone, moved):
                    one.optimizer.zero_grad(set_to_none=False)
                assert alone.step() == moved.step()
            else:
                move(controller, verb)
        controller.clear()
        controller.restore(non_blocking=False)
        grads = [p.grad for p in moved.model.parameters() if p.grad is not None]
        assert all(not grad.any() for grad in grads)
        alone.optimizer.zero_grad(set_to_none=False)
        assert_alike(alone, moved)
