"""vLLM workers that take their weights from a refit trainer.

Two ways, the first with every vLLM that has a V1 engine:

- A worker extension: ``worker_extension_cls="refit.integrations.vllm.RefitWorkerExtension"`` for
  ``LLM(...)``, then ``llm.collective_rpc("refit_connect", args=(endpoint,))`` once, and for each
  version ``llm.collective_rpc("refit_update")``, followed by ``llm.reset_prefix_cache()``.
- vLLM's own weight transfer (0.16 and later): ``register()`` in a vLLM plugin or before the engine
  is made, then ``WeightTransferConfig(backend="refit")``. Its interface has changed twice; the
  installed version is looked at, and one that is not known is refused with a sentence.

A whole version is in hand, verified, before the model is touched; its memory stays until vLLM has
finished with it. A failed load is refused in the trainer's report, and ``refit_version`` is 0 until
a version has been loaded whole.

Drawn after vllm/v1/worker/{worker_base,gpu_model_runner}.py. The weight transfer is in
_vllm_transfer.py. vLLM is imported only by what needs it.
"""

import inspect
from collections.abc import Iterable
from typing import Any

from refit.errors import StateError, UnsupportedError
from refit.integrations._receiver import Receiver, subscribe
from refit.integrations._vllm_transfer import (
    engine_class,
    register,
    trainer_class,
    trainer_init_info_class,
)
from refit.integrations._vllm_worker import restoring, synchronize, worker_name

__all__ = ["RefitWorkerExtension", "engine_class", "load", "register", "trainer_class"]

Named = Iterable[tuple[str, Any]]


class RefitWorkerExtension:
    """Methods for vLLM's workers, to be called by ``collective_rpc``. All names begin with refit,
    since vLLM refuses an extension that shares a name with its worker.
    """

    model_runner: Any
    vllm_config: Any
    _refit_receiver: Receiver

    def refit_connect(self, endpoint: str, worker: str | None = None, config: Any = None) -> str:
        """Subscribes to the trainer and returns this worker's name; a second call moves it to
        another endpoint. Returns at once, whether or not the trainer is there.
        """
        self.refit_close()
        name = worker or worker_name(getattr(self, "rank", None))
        self._refit_receiver = subscribe(endpoint, name, config)
        return name

    def refit_update(self, version: int | None = None, timeout: float | None = None) -> int:
        """Waits for the next version (at least `version`), loads it, and returns its number.

        Returns at once if `version` is loaded already. Blocks, at most `timeout` seconds (None: the
        configured deadline). A failed load is refused, and raised here: StateError before
        refit_connect, DeadlineError, UnsupportedError, and what vLLM raises.
        """
        receiver = self._refit_connected()
        if version is not None and receiver.version == version:
            return version
        update = receiver.take(version, timeout)
        with receiver.loading(update):
            load(self.model_runner, update.tensors(), getattr(self, "vllm_config", None))
            synchronize(getattr(self, "device", None))
        receiver.let_go()
        return receiver.version

    def refit_version(self) -> int:
        """The version that was loaded whole; 0 before the first, and after a load that failed."""
        receiver: Receiver | None = getattr(self, "_refit_receiver", None)
        return 0 if receiver is None else receiver.version

    def refit_close(self) -> None:
        """Leaves the trainer. Idempotent."""
        receiver: Receiver | None = getattr(self, "_refit_receiver", None)
        if receiver is not None:
            receiver.close()
            del self._refit_receiver

    def _refit_connected(self) -> Receiver:
        receiver: Receiver | None = getattr(self, "_refit_receiver", None)
        if receiver is None:
            raise StateError('this worker knows no trainer: call "refit_connect" first')
        return receiver


def load(model_runner: Any, weights: Named, vllm_config: Any = None) -> None:
    """Loads one whole version into vLLM's model: by ``reload_weights`` where that takes weights.

    Older ones have only ``model.load_weights``, which leaves quantized weights as the kernels do
    not want them: UnsupportedError for those. Blocks.
    """
    reload_weights = getattr(model_runner, "reload_weights", None)
    if reload_weights and "weights_iterator" in inspect.signature(reload_weights).parameters:
        with restoring(model_runner.model):
            reload_weights(weights_iterator=iter(weights))
        return
    if getattr(vllm_config, "quant_config", None) is not None:
        raise UnsupportedError(
            "this vLLM cannot load weights into a quantized model again: its reload_weights takes "
            "no weights_iterator; use a newer vLLM, or a model without quantization"
        )
    model_runner.model.load_weights(weights)


def __getattr__(name: str) -> Any:
    """Classes that depend on vLLM's version: its factories and pickle ask for them by name."""
    if name == "RefitWeightTransferEngine":
        return engine_class()
    if name == "RefitTrainerWeightTransferEngine":
        return trainer_class()
    if name == "RefitTrainerInitInfo":
        return trainer_init_info_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
