"""Stands for verl's offload helpers where verl itself has none on a CPU (verl-project/verl 0.9.1).

Drawn after verl/utils/{fsdp_utils,megatron_utils,megatron/optimizer}.py (names and signatures of
the five functions; verl's move tensor by tensor), verl/workers/engine/fsdp/transformer_impl.py
(takes the names in with `from … import`) and verl/utils/activation_offload.py (the signature of
enable_activation_offloading). What verl does on a CPU is tested with verl: tests/frameworks/verl.
"""

import sys
from types import ModuleType
from typing import Any

import pytest

from stand_ins import megatron_core as mcore


def _moved(*_: Any) -> None:
    raise AssertionError("verl's own helper was called")


def get_megatron_optimizer(model: Any, config: Any) -> Any:
    """verl/utils/megatron/optimizer.py, with what Megatron makes of its OptimizerConfig."""
    made: Any = mcore.DistributedOptimizer(model[0])
    made.config = config
    if config.optimizer_cpu_offload:
        made.optimizer = mcore.HybridDeviceOptimizer(made.optimizer.param_groups[0]["params"])
    return made


def install(monkeypatch: pytest.MonkeyPatch, *, megatron: bool = True) -> Any:
    """Makes `import verl` find this stand-in; returns the engine module that took the names in."""
    fsdp = {"offload_fsdp_optimizer": lambda optimizer: _moved()}
    fsdp["load_fsdp_optimizer"] = lambda optimizer, device_id: _moved()  # type: ignore[assignment]
    moves = {"offload_megatron_optimizer": lambda optimizers: _moved()}
    moves["load_megatron_optimizer"] = lambda optimizers: _moved()
    enables = {"enable_activation_offloading": lambda model, strategy, enable_ckpt=False: _moved()}
    modules: dict[str, dict[str, Any]] = {
        "verl": {},
        "verl.utils": {},
        "verl.utils.fsdp_utils": fsdp,
        "verl.utils.activation_offload": enables,
        "verl.workers": {},
        "verl.workers.engine": {},
        "verl.workers.engine.fsdp": {},
        "verl.workers.engine.fsdp.transformer_impl": {**fsdp, **enables},
    }
    if megatron:
        modules["verl.utils.megatron_utils"] = moves
        modules["verl.utils.megatron"] = {}
        modules["verl.utils.megatron.optimizer"] = {
            "get_megatron_optimizer": get_megatron_optimizer
        }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return sys.modules["verl.workers.engine.fsdp.transformer_impl"]
