"""Any sequence of what a training loop may do, on random optimizers: with states that come and go,
and without refit, the same to the bit after each step."""

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

VERBS = st.lists(st.sampled_from(MOVES + WORK + ["step"] * 3 + ["clear"] * 3), max_size=24)


class Twin:
    """One of two equal runs."""

    def __init__(self, maker: str) -> None:
        torch.manual_seed(5)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.more = [nn.Linear(3, 3) for _ in range(2)]
        self.optimizer = MAKERS[maker](self.model.parameters())
        self.alone = maker == "lbfgs"
        self.passes = 0

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
        return None

    def everything(self) -> list[torch.Tensor]:
        """All tensors there are, where states are at home."""
        found: list[torch.Tensor] = []

        def look(value: Any) -> None:
            if isinstance(value, torch.Tensor):
                found.append(value)
            elif isinstance(value, dict):
                for key in sorted(value, key=str):
                    look(value[key])
            elif isinstance(value, list | tuple):
                for one in value:
                    look(one)

        look(self.optimizer.state_dict()["state"])
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
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


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
