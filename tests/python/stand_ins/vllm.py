"""Stands for vLLM (vllm-project/vllm), as far as a refit worker sees it.

Drawn after vllm/v1/worker/worker_base.py (an extension may share no name with the worker),
vllm/v1/worker/gpu_model_runner.py (reload_weights with and without weights_iterator),
vllm/distributed/weight_transfer/{base,factory}.py of 0.26 (constructor (config, vllm_config,
device, model), start and finish), and vllm/model_executor/model_loader/reload/layerwise.py (layers
keep what they are given until they are complete). tests/frameworks/vllm has the real package; this
one is for failures that it cannot be brought to.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch


class Model:
    """Loads weights by name; layerwise it only keeps references until it is finalized."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        self.pending: list[tuple[str, torch.Tensor]] | None = None
        self.fails_at: str | None = None
        self.quant_method: Any = None
        self.quant_config: Any = None
        self.loads = 0

    def load_weights(self, weights: Any) -> set[str]:
        self.loads += 1
        loaded = set()
        for name, tensor in weights:
            if name == self.fails_at:
                raise RuntimeError(f"no room for {name}")
            if self.pending is not None:
                self.pending.append((name, tensor))
            else:
                self.weights[name].copy_(tensor)
            loaded.add(name)
        return loaded

    def finalize(self) -> None:
        pending, self.pending = self.pending or [], None
        for name, tensor in pending:
            self.weights[name].copy_(tensor)

    def modules(self) -> list["Model"]:
        return [self]

    def named_modules(self) -> list[tuple[str, "Model"]]:
        return [("layer", self)]


class LayerReloadingInfo:
    """What vLLM knows of a layer that is being reloaded."""

    kernel_tensors = ()

    def __init__(self, model: Model) -> None:
        self.model = model

    def can_load(self) -> bool:
        return self.model.pending is not None

    def reset(self) -> None: ...


class Runner:
    def __init__(self, model: Model) -> None:
        self.model = model

    def get_model(self) -> Model:
        return self.model


class ModelRunner(Runner):
    """The modern runner: reload_weights takes an iterator and brackets the layerwise reload."""

    def reload_weights(
        self,
        weights_iterator: Any = None,
        weights_path: str | None = None,
        is_checkpoint_format: bool = True,
    ) -> None:
        assert weights_iterator is not None
        self.model.pending = []
        try:
            self.model.load_weights(weights_iterator)
            self.model.finalize()
        finally:
            self.model.pending = None


class OldModelRunner(Runner):
    """An older runner: reload_weights reads the checkpoint from disk, and nothing else."""

    def reload_weights(self) -> None:
        raise AssertionError("would read the old checkpoint from disk")


class Worker:
    """What worker_extension_cls is mixed into."""

    def __init__(self, runner: Any, rank: int = 0) -> None:
        self.model_runner = runner
        self.rank = rank
        self.device = torch.device("cpu")
        self.vllm_config = SimpleNamespace()

    def load_model(self) -> None: ...

    def execute_model(self) -> None: ...


def extended(extension: type) -> type:
    """A worker class with the extension mixed in, under vLLM's condition on names."""
    for name in dir(extension):
        if not name.startswith("__"):
            assert not hasattr(Worker, name), f"the worker has a {name} already"
    return type("ExtendedWorker", (Worker, extension), {})


@dataclass
class WeightTransferInitInfo:
    pass


@dataclass
class WeightTransferUpdateInfo:
    pass


class _Parsing:
    init_info_cls: type
    update_info_cls: type

    def parse_init_info(self, said: dict[str, Any]) -> Any:
        try:
            return self.init_info_cls(**said)
        except TypeError as why:
            raise ValueError(f"Invalid init_info: {why}") from why

    def parse_update_info(self, said: dict[str, Any]) -> Any:
        try:
            return self.update_info_cls(**said)
        except TypeError as why:
            raise ValueError(f"Invalid update_info: {why}") from why


class EngineWithModel(_Parsing):
    """0.25 and later."""

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        self.config = config
        self.vllm_config = vllm_config
        self.parallel_config = vllm_config.parallel_config
        self.model_config = vllm_config.model_config
        self.device = device
        self.model = model

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))  # type: ignore[attr-defined]


class EngineOfTomorrow(_Parsing):
    """A generation that refit does not know."""

    def __init__(self, everything: Any) -> None:
        self.everything = everything


@dataclass
class TrainerInitInfo(WeightTransferInitInfo):
    rank: int = field(kw_only=True)

    @property
    def is_sender(self) -> bool:
        return self.rank == 0


class TrainerWeightTransferEngine:
    """The trainer's end, 0.26 and later."""

    def __init__(self, config: Any, *, client: Any, source: Any, is_sender: bool = True) -> None:
        self.config = config
        self.is_sender = is_sender
        self.client = client
        self.source = source


class WeightSource:
    """Names, types and shapes first; then the tensors, in a fresh pass each time."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights = weights
        self.gathered: list[str] = []

    def metadata(self) -> list[Any]:
        return [
            SimpleNamespace(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape))
            for name, tensor in self.weights.items()
        ]

    def __iter__(self) -> Any:
        for name, tensor in self.weights.items():
            self.gathered.append(name)
            yield name, tensor


class WeightSyncClient:
    """The four methods by which a trainer drives inference workers, with plain dicts."""

    def __init__(self, engines: list[Any]) -> None:
        self.engines = engines
        self.calls: list[str] = []

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.calls.append("init")
        for one in self.engines:
            one.init_transfer_engine(one.parse_init_info(dict(init_info)))

    def start_weight_update(self) -> None:
        self.calls.append("start")
        for one in self.engines:
            one.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.calls.append("update")
        with ThreadPoolExecutor(len(self.engines)) as pool:
            done = [pool.submit(one.update_weights, dict(update_info)) for one in self.engines]
        for one in done:
            one.result()

    def finish_weight_update(self) -> None:
        self.calls.append("finish")
        for one in self.engines:
            one.finish_weight_update()


class Factory:
    def __init__(self) -> None:
        self._registry: dict[str, tuple[str, str]] = {}  # as vLLM calls it

    @property
    def registered(self) -> list[str]:
        return list(self._registry)

    def register_engine(self, name: str, module: str, class_name: str) -> None:
        if name in self._registry:
            raise ValueError(f"Weight transfer engine '{name}' is already registered.")
        self._registry[name] = (module, class_name)

    def create_engine(self, name: str, *given: Any) -> Any:
        module, class_name = self._registry[name]
        return getattr(sys.modules[module], class_name)(*given)

    def trainer_init(self, name: str, config: Any, init_info: Any, **named: Any) -> Any:
        module, class_name = self._registry[name]
        made = getattr(sys.modules[module], class_name)
        return made.trainer_init(config=config, init_info=init_info, **named)


def install(
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    engine: type | None,
    trainers: Factory | None = None,
) -> Any:
    """Makes `import vllm` find this stand-in, in that version and with that base class; None: it
    has no weight transfer. With a factory of trainers it is one that has those."""
    factory = Factory()
    modules: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": version},
        "vllm.distributed": {},
        "vllm.distributed.weight_transfer": {},
        "vllm.distributed.weight_transfer.base": {
            "WeightTransferEngine": engine,
            "WeightTransferInitInfo": WeightTransferInitInfo,
            "WeightTransferUpdateInfo": WeightTransferUpdateInfo,
        },
        "vllm.distributed.weight_transfer.factory": {"WeightTransferEngineFactory": factory},
        "vllm.model_executor": {},
        "vllm.model_executor.model_loader": {},
        "vllm.model_executor.model_loader.reload.layerwise": {
            "get_layerwise_info": LayerReloadingInfo,
            "_place_kernel_tensors": lambda model, info: setattr(model, "pending", None),
        },
        "vllm.model_executor.model_loader.reload": {
            "initialize_layerwise_reload": lambda model: setattr(model, "pending", []),
            "finalize_layerwise_reload": lambda model, model_config: model.finalize(),
        },
    }
    if trainers is not None:
        modules["vllm.distributed.weight_transfer.base"] |= {
            "TrainerInitInfo": TrainerInitInfo,
            "TrainerWeightTransferEngine": TrainerWeightTransferEngine,
        }
        modules["vllm.distributed.weight_transfer.factory"] |= {
            "WeightTransferTrainerFactory": trainers
        }
    if engine is None:
        del modules["vllm.distributed.weight_transfer.base"]
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return factory
