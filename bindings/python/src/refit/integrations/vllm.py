"""vLLM workers that take their weights from a refit trainer.

Two ways, the first with every vLLM that has a V1 engine:

- A worker extension: ``worker_extension_cls="refit.integrations.vllm.RefitWorkerExtension"`` for
  ``LLM(...)``, then ``refit_connect(llm, endpoint)`` once, and ``refit_update(llm)`` for each
  version; for ``AsyncLLM`` the same with ``_async``. It can take adapters of PEFT alone.
- vLLM's own weight transfer (0.16 and later): ``register()`` in a vLLM plugin or before the engine
  is made, then ``WeightTransferConfig(backend="refit")``. Its interface has changed twice; the
  installed version is looked at, and one that is not known is refused with a sentence.

A whole version is in hand, verified, before the model is touched; its memory stays until vLLM has
finished with it. A failed load is refused in the trainer's report, and ``refit_version`` is 0 until
a version has been loaded whole.

The extension is in _vllm_extension.py, the functions that drive it in _vllm_driver.py, and the
weight transfer in _vllm_transfer.py. vLLM is imported only by what needs it.
"""

from typing import Any

from refit.integrations._vllm_driver import (
    lora_adapter,
    refit_close,
    refit_close_async,
    refit_connect,
    refit_connect_async,
    refit_update,
    refit_update_async,
    refit_version,
    refit_version_async,
)
from refit.integrations._vllm_extension import RefitWorkerExtension
from refit.integrations._vllm_transfer import (
    engine_class,
    register,
    trainer_class,
    trainer_init_info_class,
)

__all__ = [
    "RefitWorkerExtension",
    "engine_class",
    "lora_adapter",
    "refit_close",
    "refit_close_async",
    "refit_connect",
    "refit_connect_async",
    "refit_update",
    "refit_update_async",
    "refit_version",
    "refit_version_async",
    "register",
    "trainer_class",
]


def __getattr__(name: str) -> Any:
    """Classes that depend on vLLM's version: its factories and pickle ask for them by name."""
    if name == "RefitWeightTransferEngine":
        return engine_class()
    if name == "RefitTrainerWeightTransferEngine":
        return trainer_class()
    if name == "RefitTrainerInitInfo":
        return trainer_init_info_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
