"""Stands for verl's offload helpers and its checkpoint engines (verl-project/verl, 2026-08).

Drawn after verl/utils/{fsdp_utils,megatron_utils,megatron/optimizer}.py (names and signatures of
the five functions; verl's move tensor by tensor), verl/workers/engine/fsdp/transformer_impl.py
(takes the names in with `from … import`), verl/utils/activation_offload.py (the signature of
enable_activation_offloading), verl/checkpoint_engine/base.py (CheckpointEngineRegistry,
CheckpointEngineManager: the order of a refit) and verl/workers/engine_workers.py
(custom_backend_module, is_master). verl itself needs a CUDA machine.
"""

import asyncio
import importlib
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch

from stand_ins import megatron_core as mcore


class CheckpointEngineRegistry:
    """As verl's: a decorator maker that takes the name of a backend."""

    _registry: ClassVar[dict[str, type]] = {}

    @staticmethod
    def register(backend: str) -> Callable[[type], type]:
        def wrapper(cls: type) -> type:
            CheckpointEngineRegistry._registry[backend] = cls
            return cls

        return wrapper

    @classmethod
    def new(cls, backend: str, *given: Any, **named: Any) -> Any:
        if backend not in cls._registry:
            raise ValueError(f"Checkpoint engine {backend} not registered")
        return cls._registry[backend](*given, **named)


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
    CheckpointEngineRegistry._registry.clear()
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
        "verl.checkpoint_engine": {},
        "verl.checkpoint_engine.base": {"CheckpointEngineRegistry": CheckpointEngineRegistry},
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


class FSDPEngine:
    """What brackets training: states come before it and go after it, if optimizer_offload is on."""

    def __init__(self, module: Any, optimizer: torch.optim.Optimizer) -> None:
        self.module = module
        self.optimizer = optimizer

    def to(self, device: str) -> None:
        if device == "cpu":
            self.module.offload_fsdp_optimizer(self.optimizer)
        else:
            self.module.load_fsdp_optimizer(self.optimizer, 0)


class EngineWorker:
    """One rank that holds a checkpoint engine, in the trainer or in a rollout."""

    def __init__(self, engine_kwargs: dict[str, Any], **named: Any) -> None:
        importlib.import_module("refit.integrations.verl")  # custom_backend_module
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            "refit", bucket_size=1 << 20, **named, **engine_kwargs
        )
        self.loaded: dict[str, torch.Tensor] = {}
        self.gathered: list[str] = []
        self.fails_at: str | None = None

    async def send(self, weights: dict[str, torch.Tensor], global_steps: int | None) -> Any:
        def generator() -> Any:
            for name, tensor in weights.items():
                self.gathered.append(name)
                yield name, tensor

        return await self.checkpoint_engine.send_weights(generator(), global_steps=global_steps)

    async def receive(self, global_steps: int | None) -> None:
        """verl's server adapter: it holds what it is given until the last one has come."""
        held = []
        stream = self.checkpoint_engine.receive_weights(global_steps=global_steps)
        async for name, tensor in stream:
            if name == self.fails_at:
                await stream.aclose()
                raise RuntimeError(f"no room for {name}")
            held.append((name, tensor))
        self.loaded = {name: tensor.clone() for name, tensor in held}


class CheckpointEngineManager:
    """prepare on all, topology, process group on all, both sides at once, finalize on all."""

    def __init__(self, trainer: list[EngineWorker], rollout: list[EngineWorker]) -> None:
        self.trainer = trainer
        self.rollout = rollout
        self._pool = ThreadPoolExecutor(len(trainer) + len(rollout))

    def update_weights(
        self, weights: dict[str, torch.Tensor], global_steps: int | None = None
    ) -> list[Any]:
        engines = [one.checkpoint_engine for one in self.trainer + self.rollout]
        metadata = [one.prepare() for one in engines]
        given = type(engines[0]).build_topology(len(self.trainer), len(self.rollout), metadata)
        for side, told in zip((self.trainer, self.rollout), given, strict=True):
            assert all(len(value) == len(side) for value in told.values())
            for at, worker in enumerate(side):
                worker.checkpoint_engine.init_process_group(
                    **{key: value[at] for key, value in told.items()}
                )
        try:
            return self._exchange(weights, global_steps)
        finally:
            for one in engines:
                one.finalize()

    def _exchange(self, weights: dict[str, torch.Tensor], global_steps: int | None) -> list[Any]:
        def run(make: Callable[[], Any]) -> Any:
            return asyncio.run(make())

        sent = [
            self._pool.submit(run, lambda one=one: one.send(weights, global_steps))
            for one in self.trainer
        ]
        taken = [
            self._pool.submit(run, lambda one=one: one.receive(global_steps))
            for one in self.rollout
        ]
        failures = [one.exception() for one in sent + taken]
        for failure in failures:
            if failure is not None:
                raise failure
        return [one.result() for one in sent]

    def close(self) -> None:
        for one in self.trainer + self.rollout:
            one.checkpoint_engine.close()
        self._pool.shutdown()
