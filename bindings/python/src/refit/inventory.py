"""What the optimizers of a cycle hold, and what else is known to lie in the same memory.

It asks the optimizers, the model, and what stands for optimizers of another kind; ``storages`` then
decides what can leave. How and when that leaves is unknown here.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from refit.config import Config
from refit.device import Device
from refit.grads import Policy
from refit.held import Holdings
from refit.regions import spec_of
from refit.rehousing import rehouse
from refit.storages import STATES, Place, Scan, Stock, places, scan, take_stock

if TYPE_CHECKING:
    from refit.memory_pool import MemPool


class Inventory:
    """Looks at optimizers, a model and a pool. It changes no value; but a state whose memory cannot
    be resized gets memory that can (see ``rehousing``)."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        model: torch.nn.Module | None,
        config: Config,
        grads: Policy,
        held: Holdings,
        pool: "MemPool | None" = None,
    ) -> None:
        self.optimizers = list(optimizers)
        self._model = model
        self._config = config
        self._grads = grads
        self._held = held
        self._pool = pool
        self._warned = False

    def parameters(self) -> list[Any]:
        """Every parameter that is optimized."""
        return [p for one in self.optimizers for group in one.param_groups for p in group["params"]]

    def take(self) -> Stock:
        """What there is now."""
        return take_stock(self.optimizers, self._grads != "discard", list(self._held.tensors()))

    def decide(self, stock: Stock) -> Scan:
        """What of it can leave. HostMemoryError (see ``rehouse``)."""
        pieces = [] if self._pool is None else self._pool.pieces()
        others = self._others()
        passing = rehouse(stock, others, self._why_device_stays)
        found = scan(stock, others, self._namer(), self._why_device_stays, pieces)
        found.passing = passing
        self._warn(stock, found)
        return found

    def survey(self, stock: Stock, why_device_stays: Callable[[torch.device], str | None]) -> Scan:
        """What of a stock has memory of its own, storage by storage; changes nothing."""
        return scan(stock, self._others(), self._namer(), why_device_stays)

    def _warn(self, stock: Stock, found: Scan) -> None:
        """Says, once, that there are states and none of them leaves."""
        moments = [True for _, _, keys, _ in stock.states if "step" not in keys]
        if self._warned or not moments or any(slot.group == STATES for slot in found.slots):
            return
        self._warned = True
        stays = [one for one in found.resident if "a step counter" not in one[1]]
        name, reason = stays[0] if stays else ("the states", "all are empty or step counters")
        warnings.warn(
            f"no optimizer state leaves: {name}: {reason}; controller.resident names all",
            stacklevel=2,
        )

    def arenas_of(self, device: torch.device) -> Device | None:
        """The pool's own handle, which knows its arena; None for memory that is not the pool's."""
        if self._pool is None or self._pool.device != device:
            return None
        return self._pool.handle

    def _others(self) -> dict[Place, str]:
        """Memory that is not the optimizers' own: weights, buffers, gradients that do not leave.

        What is kept beside a state may be a parameter to the optimizer, and is its own all the
        same: masters of weights in a shorter type.
        """
        beside = list(self._held.tensors())
        masters = {id(tensor) for _, tensor in beside}
        parameters = self.parameters()
        known: list[tuple[str, Any]] = list(self._held.others())
        known += [("a parameter", p) for p in parameters if id(p) not in masters]
        if self._model is not None:
            known += [(f"parameter {name}", p) for name, p in self._model.named_parameters()]
            known += [(f"buffer {name}", b) for name, b in self._model.named_buffers()]
        ours = set() if self._grads == "discard" else {id(p) for p in parameters}
        others = [*parameters, *(p for _, p in known)]
        grads = [p.grad for p in others if p.grad is not None and id(p) not in ours]
        return places([*known, *_named("a gradient", grads)])

    def _namer(self) -> Callable[[Any], tuple[str, ...]]:
        """Names parameters: as the model does, as their group does, or by their place in it."""
        names: dict[int, str] = {}
        if self._model is not None:
            names = {id(p): name for name, p in self._model.named_parameters()}
        for number, optimizer in enumerate(self.optimizers):
            which = f"optimizer{number}." if len(self.optimizers) > 1 else ""
            for place, group in enumerate(optimizer.param_groups):
                given = group.get("param_names") or []
                for index, p in enumerate(group["params"]):
                    name = given[index] if index < len(given) else f"{which}{place}.{index}"
                    names.setdefault(id(p), name)
        return lambda owner: () if owner is None else (names.get(id(owner), "state"),)

    def _why_device_stays(self, device: torch.device) -> str | None:
        chosen = str(self._config.get("device")).partition(":capacity")[0]
        if chosen == "auto":
            on_gpu = any(p.device.type == "cuda" for p in self.parameters())
            return "it is in host memory already" if on_gpu and device.type == "cpu" else None
        if chosen in (spec_of(device, self._config).partition(":capacity")[0], device.type):
            return None
        return f"it is on {device}, and the configuration says device: {chosen}"


def _named(name: str, tensors: Iterable[Any]) -> list[tuple[str, Any]]:
    return [(name, tensor) for tensor in tensors]
