"""A small training run that is the same to the bit every time, for tests to disturb."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

WIDTH = 24
DEVICE = "cpu"
"""Where tensors lie if no device is named; see the fixture ``default_device``."""

Optimizer = torch.optim.Optimizer
Maker = Callable[[Any], Optimizer]


def drawn(*shape: int, **options: Any) -> torch.Tensor:
    """Random numbers, the same on each device."""
    return torch.randn(shape, **options).to(DEVICE)


def adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


class Run:
    """A model, its optimizer, and steps that depend on nothing but their number."""

    def __init__(self, make: Maker = adamw, device: str | None = None, layers: int = 2) -> None:
        self.device = device or DEVICE
        torch.manual_seed(11)
        inner = [nn.Linear(WIDTH, WIDTH), nn.Tanh()] if layers == 2 else []
        self.model = nn.Sequential(*inner, nn.Linear(WIDTH, 4))
        self.model.to(self.device)
        self.optimizer = make(self.model.parameters())
        self.steps = 0

    def backward(self) -> float:
        """One forward and backward pass; gradients add up."""
        source = torch.Generator().manual_seed(self.steps)
        batch = torch.randn(8, WIDTH, generator=source).to(self.device)
        loss = self.model(batch).pow(2).mean()
        loss.backward()
        return float(loss.detach())

    def step(self, count: int = 1) -> float:
        """Whole steps; the loss of the last."""
        loss = 0.0
        for _ in range(count):
            loss = self.backward()
            self.finish()
        return loss

    def finish(self) -> None:
        """The rest of a step, when there are gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def moments(self) -> list[torch.Tensor]:
        """The state tensors that a clear moves."""
        states = self.optimizer.state.values()
        found = [t for state in states for t in state.values()]
        return [t for t in found if isinstance(t, torch.Tensor) and t.dim() > 0]

    def away(self) -> bool:
        """Whether no moment has memory."""
        return all(t.untyped_storage().nbytes() == 0 for t in self.moments())


HOOKS = [f"_optimizer_{when}_hooks" for when in ("step_pre", "step_post", "state_dict_pre")]
HOOKS += ["_optimizer_load_state_dict_pre_hooks", "_backward_hooks"]


def hooks_of(*things: Any) -> list[Any]:
    """What is registered on optimizers and tensors, which PyTorch shows nowhere."""
    found = [getattr(one, name, None) or {} for one in things for name in HOOKS]
    return [hook for hooks in found for hook in hooks.values()]


def whole_cycle(controller: Any) -> None:
    controller.offload()
    controller.restore()
    controller.wait()


def assert_same(one: Run, other: Run) -> None:
    """Weights and states of two runs are equal to the bit."""
    for mine, yours in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(mine, yours)
    assert_same_states(one.optimizer.state_dict(), other.optimizer.state_dict())


def assert_same_states(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["state"].keys() == other["state"].keys()
    for key, state in one["state"].items():
        assert list(state) == list(other["state"][key])
        for name, value in state.items():
            assert torch.equal(value.cpu(), other["state"][key][name].cpu()), (key, name)


class Wrapper(torch.Tensor):
    """A tensor subclass that wraps others, with PyTorch's own ``__torch_function__``."""

    names: tuple[str, ...] = ("inner",)

    @staticmethod
    def __new__(cls, *wrapped: Any) -> Any:
        first = wrapped[0]
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, first.shape, dtype=first.dtype, device=first.device
        )
        for name, one in zip(cls.names, wrapped, strict=True):
            setattr(made, name, one)
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return list(self.names), None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, *_: Any) -> Any:
        return cls(*(inner[name] for name in cls.names))

    def plain(self) -> Any:
        """The tensor that this one stands for."""
        return getattr(self, self.names[0])

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [one.plain() if isinstance(one, Wrapper) else one for one in args]
        return func(*plain, **(kwargs or {}))
