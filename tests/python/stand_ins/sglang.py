"""Stands for SGLang before 0.5.18, which has neither sessions nor a WeightUpdater.

Drawn after sglang/srt/model_executor/model_runner.py of 0.5.15 (``update_weights_from_tensor``: a
loader is imported by its path and called with the model and the named tensors; whatever does not
raise is a success) and sglang/srt/entrypoints/engine.py. Newer versions are tested for real
(tests/frameworks/sglang); this one does not install together with the others.
"""

import importlib
import pickle
from types import SimpleNamespace
from typing import Any

import torch

MODULE = "sglang.srt.model_executor.model_runner"


class Model(torch.nn.Module):
    """A model with the one method that all of SGLang's have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)
        self.loads = 0

    def load_weights(self, weights: Any) -> None:
        self.loads += 1
        ours = dict(self.named_parameters())
        with torch.no_grad():
            for name, tensor in weights:
                ours[name].copy_(tensor)


def model_runner_class() -> type:
    """A new class each time: what refit does to one is not seen by the next test."""

    class ModelRunner:
        def __init__(self) -> None:
            self.model = Model()

        def update_weights_from_tensor(
            self, named_tensors: list[tuple[str, torch.Tensor]], load_format: str | None = None
        ) -> tuple[bool, str]:
            if load_format is None:
                self.model.load_weights(named_tensors)
            else:
                module, _, name = load_format.rpartition(".")
                getattr(importlib.import_module(module), name)(self.model, named_tensors)
            return True, "Success"

    return ModelRunner


class Engine:
    """The engine of one worker, whose arguments travel pickled."""

    def __init__(self, runner: Any, loaders: list[str]) -> None:
        self.runner = runner
        self.server_args = SimpleNamespace(custom_weight_loader=loaders)
        self.flushes = 0

    def update_weights_from_tensor(
        self, named_tensors: Any, load_format: str | None = None, flush_cache: bool = True
    ) -> tuple[bool, str]:
        arrived = pickle.loads(pickle.dumps(named_tensors))
        said: tuple[bool, str] = self.runner.update_weights_from_tensor(
            arrived, load_format=load_format
        )
        self.flushes += flush_cache
        return said
