"""What a controller is given: torch optimizers, or what stands for an optimizer of another kind.

Some optimizers are wrappers that keep tensors of their own beside the state of a torch optimizer:
fp32 masters of bf16 weights. A ``Held`` stands for such a one; Megatron's are recognized. How bytes
move is unknown here.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from refit.hooks import innermost_of


@runtime_checkable
class Held(Protocol):
    """Stands for an optimizer that is not torch's. Asked anew at each clear."""

    @property
    def inner(self) -> Sequence[torch.optim.Optimizer]:
        """The torch optimizers that step."""
        ...

    def tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        """What leaves besides their states, by name; none that somebody else uses meanwhile."""
        ...

    def others(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Whose memory stays whatever lies in it: buffers that a framework moves by itself."""
        ...

    @property
    def resident(self) -> list[tuple[str, str]]:
        """What it leaves where it is, and why."""
        ...


class Holdings:
    """The torch optimizers in what was given, and the tensors beside their states.

    InvalidError if there is no optimizer.
    """

    def __init__(self, given: Any, model: Any = None) -> None:
        several = given if isinstance(given, list | tuple) else [given]
        opened = [_recognized(one, model) for one in several]
        self._held = [one for one in opened if isinstance(one, Held)]
        found: list[Any] = []
        for one in opened:
            found += one.inner if isinstance(one, Held) else [one]
        self.optimizers = innermost_of(found)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What leaves besides the states."""
        for one in self._held:
            yield from one.tensors()

    def others(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whose memory stays."""
        for one in self._held:
            yield from one.others()

    def resident(self) -> Iterator[tuple[str, str]]:
        """What stays, by those who know why."""
        for one in self._held:
            yield from one.resident


def _recognized(optimizer: Any, model: Any) -> Any:
    from refit.integrations.megatron import is_megatron, unwrap

    return unwrap(optimizer, model) if is_megatron(optimizer) else optimizer
