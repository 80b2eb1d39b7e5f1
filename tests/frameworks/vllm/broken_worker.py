"""A worker of vLLM that fails when it is told to, at one rank alone."""

from collections.abc import Iterator
from types import MethodType
from typing import Any

from refit.integrations.vllm import RefitWorkerExtension


class BrokenExtension(RefitWorkerExtension):
    """refit's extension, inherited as a user's own may inherit it."""

    rank: int

    def break_next_load(self, rank: int, tensors: int) -> None:
        """The next load fails at that rank, after so many tensors."""
        if self.rank != rank:
            return
        model = self.model_runner.get_model()
        load = model.load_weights

        def some(weights: Any) -> Iterator[Any]:
            for place, pair in enumerate(weights):
                if place == tensors:
                    raise RuntimeError(f"no room after {tensors} tensors")
                yield pair

        def fail(self: Any, weights: Any) -> Any:
            self.load_weights = load
            return load(some(weights))

        model.load_weights = MethodType(fail, model)

    def echo(self, said: Any) -> Any:
        """What it was called with: whether the answers of a call are those of that call."""
        return said

    def read_weights(self) -> dict[str, list[float]]:
        """What this worker's layers make of one input: vLLM's kernels for CPUs keep the weights in
        a form of their own, and the parameters are empty."""
        import torch

        found: dict[str, list[float]] = {}
        for name, layer in self.model_runner.get_model().named_modules():
            method = getattr(layer, "quant_method", None)
            width = getattr(layer, "input_size_per_partition", getattr(layer, "input_size", None))
            if width is not None and hasattr(method, "apply"):
                made = method.apply(layer, torch.linspace(-1, 1, width)[None])
                found[name] = made.flatten().tolist()
            for own, one in layer.named_parameters(recurse=False):
                found[f"{name}.{own}"] = one.detach().float().flatten().tolist()
        return found
