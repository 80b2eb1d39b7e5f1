"""SGLang workers that take their weights from a refit trainer, or from a caller of SGLang.

SGLang calls functions that its server was started with; all three here may be named at once:

    --custom-weight-loader refit.integrations.sglang.load refit.integrations.sglang.pull
    --weight-update-receivers refit.integrations.sglang.receiver

- ``load``: tensors that ``update_weights_from_tensor`` brought are loaded as one version.
- ``pull``: that call brings only an order (``order(endpoint, version)`` makes it), and each worker
  fetches the version from the trainer by itself: its bytes do not pass through SGLang's scheduler.
- ``receiver``: the same for newer servers, which keep a receiver for each worker.

A whole version is in hand, verified, before the model is touched. A failed load is refused in the
trainer's report and raised, so that SGLang answers with the failure.

Drawn after sglang/srt/model_executor/model_runner.py (``update_weights_from_tensor``: a loader is
called with the model and the list of named tensors) and its ``WeightUpdateReceiverContext``
(2026-08). SGLang is not imported here.
"""

import os
import socket
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from refit.errors import InvalidError
from refit.integrations._receiver import Receiver, subscribe

Named = Iterable[tuple[str, torch.Tensor]]

ENDPOINT = "refit.endpoint"
VERSION = "refit.version"
_RECEIVER = "_refit_receiver"


def load(model: Any, named_tensors: Named) -> None:
    """A custom weight loader: loads what SGLang was handed, each name once.

    InvalidError for a name that comes twice (nothing is loaded then), and what the model raises.
    Blocks until the copies are done: the caller may use the memory of the tensors again.
    """
    weights = list(named_tensors)
    _refuse_twice([name for name, _ in weights])
    model.load_weights(weights)
    _synchronize(model)


def order(endpoint: str, version: int = 0) -> list[tuple[str, torch.Tensor]]:
    """The named tensors that make ``pull`` fetch a version: at least `version` (0: the next one).

    engine.update_weights_from_tensor(
        order(publisher.endpoint, 7), load_format="refit.integrations.sglang.pull")

    """
    text = torch.tensor(list(endpoint.encode()), dtype=torch.uint8)
    return [(ENDPOINT, text), (VERSION, torch.tensor([version], dtype=torch.int64))]


def pull(model: Any, named_tensors: Named) -> None:
    """A custom weight loader: fetches a version from the trainer that an ``order`` names, and loads
    it.

    The first order subscribes, and so does one with another endpoint. A version that is loaded
    already is not fetched again. Blocks, at most the configured deadline. InvalidError if the
    tensors are no order, DeadlineError, and what the model raises.
    """
    endpoint, version = _read_order(dict(named_tensors))
    receiver = _receiver_of(model, endpoint)
    _fetch(model, receiver, version, None)


class RefitReceiver:
    """A weight update receiver, one for each worker of a server."""

    def __init__(self, model: Any, receiver: Receiver) -> None:
        self._model = model
        self._receiver = receiver

    @property
    def version(self) -> int:
        """The version that was loaded whole; 0 before the first, and after a load that failed."""
        return self._receiver.version

    def receive(self, payload: Mapping[str, Any] | None = None) -> None:
        """Fetches a version and loads it. `payload` may say ``version`` and ``timeout_s``."""
        said = dict(payload or {})
        _fetch(self._model, self._receiver, int(said.get("version") or 0), said.get("timeout_s"))

    def destroy(self) -> None:
        """Leaves the trainer. Idempotent."""
        self._receiver.close()


def receiver(context: Any) -> RefitReceiver:
    """Makes the receiver of one worker; ``init_payload`` says ``endpoint``, and ``config`` if need
    be.

    InvalidError without an endpoint. Does not block.
    """
    said = dict(context.init_payload or {})
    if not said.get("endpoint"):
        raise InvalidError('the init payload names no trainer: {"endpoint": publisher.endpoint}')
    name = _worker_name(context.tp_rank)
    return RefitReceiver(context.model, subscribe(said["endpoint"], name, said.get("config")))


def close(model: Any) -> None:
    """Leaves the trainer that ``pull`` subscribed `model` to. Idempotent."""
    known: tuple[str, Receiver] | None = getattr(model, _RECEIVER, None)
    if known is not None:
        known[1].close()
        delattr(model, _RECEIVER)


def _fetch(model: Any, receiver: Receiver, version: int, timeout: float | None) -> None:
    if version and receiver.version == version:
        return
    update = receiver.take(version or None, timeout)
    with receiver.loading(update):
        model.load_weights(list(update.tensors()))
        _synchronize(model)
    receiver.let_go()


def _receiver_of(model: Any, endpoint: str) -> Receiver:
    """The model's subscription. It hangs on the model, whose life it shares."""
    known: tuple[str, Receiver] | None = getattr(model, _RECEIVER, None)
    if known is not None and known[0] == endpoint:
        return known[1]
    close(model)
    receiver = subscribe(endpoint, _worker_name(None))
    setattr(model, _RECEIVER, (endpoint, receiver))
    return receiver


def _read_order(said: dict[str, torch.Tensor]) -> tuple[str, int]:
    if set(said) != {ENDPOINT, VERSION}:
        raise InvalidError(
            f"pull takes what refit.integrations.sglang.order makes, and not {len(said)} tensors: "
            'weights themselves go to load_format="refit.integrations.sglang.load"'
        )
    return bytes(said[ENDPOINT].tolist()).decode(), int(said[VERSION].item())


def _refuse_twice(names: list[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InvalidError(f'weight "{name}" came twice: nothing was loaded')
        seen.add(name)


def _worker_name(rank: int | None) -> str:
    place = "" if rank is None else f"-tp{rank}"
    return f"sglang-{socket.gethostname()}-{os.getpid()}{place}"[:63]


def _synchronize(model: Any) -> None:
    """Waits until the copies into the model are done."""
    for parameter in model.parameters():
        if parameter.is_cuda:
            torch.cuda.synchronize(parameter.device)
        return
