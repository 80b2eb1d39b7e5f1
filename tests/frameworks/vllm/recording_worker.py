"""A worker of vLLM that records the loader of a second model, which vLLM's kernels for CPUs have
not prepared: they keep the weights in a form of their own, and the parameters are empty then."""

import copy
import sys
from pathlib import Path
from typing import Any

from refit.integrations.vllm import RefitWorkerExtension


class RecordingExtension(RefitWorkerExtension):
    """Its model is divided as the engine's is."""

    def check_recording(self, weights: str, dtype: str) -> dict[str, Any]:
        """recording.check with the weights of a file; the model has parameters of `dtype`."""
        import torch
        from safetensors.torch import load_file
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.utils import initialize_model

        sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))
        import recording

        config = copy.copy(self.vllm_config)
        config.compilation_config = copy.copy(config.compilation_config)
        config.compilation_config.static_forward_context = {}  # layers by their names
        config.compilation_config.static_all_moe_layers = []
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, dtype))
        try:
            with set_current_vllm_config(config):
                model = initialize_model(vllm_config=config)
                return recording.check(model, model.load_weights, load_file(weights))
        finally:
            torch.set_default_dtype(before)

    def record_reload(self, weights: str) -> str:
        """Records vLLM's own reload of the engine's model; why that cannot be."""
        import refit
        from refit.errors import UnsupportedError
        from refit.integrations._vllm_extension import load
        from safetensors.torch import load_file

        try:
            refit.record(
                lambda pairs: load(self, pairs),
                load_file(weights),
                self.model_runner.get_model(),
            )
        except UnsupportedError as why:
            return why.text
        return "recorded"
