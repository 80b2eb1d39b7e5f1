"""A worker of vLLM whose layers compute with their parameters, by PyTorch's own kernels, as they do
on a GPU: vLLM's kernels for CPUs keep weights in a form of their own."""

import functools
import hashlib

import torch
import vllm._custom_ops
from refit.integrations._vllm_extension import load
from refit.integrations.vllm import RefitWorkerExtension
from safetensors.torch import load_file

vllm._custom_ops._supports_onednn = False


class PlainExtension(RefitWorkerExtension):
    """Counts what vLLM itself reloads."""

    reloads = 0

    def count_reloads(self) -> None:
        """From here on."""
        reload_weights = self.model_runner.reload_weights

        @functools.wraps(reload_weights)
        def counted(**said: object) -> None:
            self.reloads += 1
            reload_weights(**said)

        self.model_runner.reload_weights = counted

    def reload(self, weights: str) -> None:
        """vLLM's own reload, of a file."""
        load(self, load_file(weights).items())

    def read_model(self) -> tuple[int, dict[str, str], list[int]]:
        """The number of reloads; a digest of each parameter, and where they lie."""
        digests = {}
        places = []
        for name, one in self.model_runner.get_model().named_parameters():
            raw = one.detach().contiguous().view(-1).view(torch.uint8)
            digests[name] = hashlib.sha256(raw.numpy().tobytes()).hexdigest()
            places.append(one.data_ptr())
        return self.reloads, digests, places
