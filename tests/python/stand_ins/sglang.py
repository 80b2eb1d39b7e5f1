"""Stands for an SGLang server's model runner (sgl-project/sglang, main of 2026-08).

Drawn after sglang/srt/model_executor/model_runner.py, `update_weights_from_tensor`: "direct", None,
or one of the paths given by --custom-weight-loader, which is imported and called with the model and
the list of named tensors; whatever does not raise is a success. And after the external receivers of
newer servers: WeightUpdateReceiverContext, a factory by path, `receive(payload)`, `destroy()`.
"""

import importlib
from dataclasses import dataclass
from typing import Any

import torch


class Model(torch.nn.Module):
    """A model with the one method that all of SGLang's have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)
        self.fails_at: str | None = None
        self.loads = 0

    def load_weights(self, weights: Any) -> None:
        self.loads += 1
        ours = dict(self.named_parameters())
        with torch.no_grad():
            for name, tensor in weights:
                if name == self.fails_at:
                    raise RuntimeError(f"no room for {name}")
                ours[name].copy_(tensor)


def dynamic_import(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


class ModelRunner:
    """One TP worker of a server that was started with these loaders."""

    def __init__(self, custom_weight_loader: list[str]) -> None:
        self.model = Model()
        self.custom_weight_loader = custom_weight_loader

    def update_weights_from_tensor(
        self, named_tensors: list[tuple[str, torch.Tensor]], load_format: str | None = None
    ) -> tuple[bool, str]:
        if load_format in self.custom_weight_loader:
            dynamic_import(load_format)(self.model, named_tensors)
        elif load_format is None:
            self.model.load_weights(named_tensors)
        else:
            raise NotImplementedError(f"Unknown load_format={load_format}")
        return True, "Success"


@dataclass(frozen=True, kw_only=True)
class WeightUpdateReceiverContext:
    model: Any
    device: Any
    tp_rank: int
    tp_size: int
    group_name: str = ""
    master_address: str = ""
    master_port: int = 0
    world_size: int = 1
    rank_offset: int = 0
    init_payload: dict[str, Any] | None = None
