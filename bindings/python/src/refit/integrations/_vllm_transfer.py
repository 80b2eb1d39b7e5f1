"""refit as a backend of vLLM's own weight transfer: ``WeightTransferConfig(backend="refit")``.

vLLM has a class for the worker's end, and later versions one for the trainer's; refit subclasses
those of the installed version. The interface has changed; which one is there is looked at, and one
that is not known is refused with a sentence. The trainer's end itself is in _vllm_trainer.py.

Drawn after vllm/distributed/weight_transfer/{base,factory,ipc_engine}.py and
vllm/model_executor/model_loader/reload. vLLM is imported only by what needs it.
"""

import importlib
import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, make_dataclass
from typing import Any

from refit.errors import StateError, UnsupportedError
from refit.integrations._receiver import Receiver, subscribe
from refit.integrations._vllm_worker import synchronize, worker_name

BASE = "vllm.distributed.weight_transfer.base"
FACTORY = "vllm.distributed.weight_transfer.factory"
RELOAD = "vllm.model_executor.model_loader.reload"
PUBLIC = "refit.integrations.vllm"
"""Where vLLM's factories find the classes."""


@dataclass
class _InitInfo:
    """The message of the trainer to each worker, once."""

    endpoint: str
    worker: str | None = None
    config: dict[str, Any] | None = None


@dataclass
class _UpdateInfo:
    """The message of the trainer to each worker, for each version."""

    version: int | None = None
    timeout_s: float | None = None


class _Engine:
    """The common part of the engines of all generations. vLLM's base class is added below."""

    supports_draft_weight_update = False
    _receiver: Receiver | None = None

    def init_transfer_engine(self, init_info: Any) -> None:
        """Subscribes to the trainer."""
        self.shutdown()
        rank = getattr(getattr(self, "parallel_config", None), "rank", None)
        name = init_info.worker or worker_name(rank)
        self._receiver = subscribe(init_info.endpoint, name, init_info.config)

    def shutdown(self) -> None:
        """Leaves the trainer. Idempotent."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def _connected(self) -> Receiver:
        if self._receiver is None:
            raise StateError("this worker knows no trainer: init_weight_transfer_engine first")
        return self._receiver

    @staticmethod
    def trainer_send_weights(iterator: Iterator[tuple[str, Any]], trainer_args: Any) -> None:
        """Publishes what `iterator` gives, by ``trainer_args["publisher"]``; blocks until all
        workers have applied it, so their update_weights must be under way.
        """
        from refit.integrations._sender import Sender

        Sender(trainer_args["publisher"]).send(iterator, trainer_args.get("version"))


class _EngineWithCallback(_Engine):
    """vLLM 0.16 to 0.22: the worker hands in the function that loads, and finishes by itself."""

    def receive_weights(self, update_info: Any, load_weights: Any) -> None:
        """Loads the next version by `load_weights`; its memory stays until the next one."""
        receiver = self._connected()
        update = receiver.take(update_info.version, update_info.timeout_s)
        with receiver.loading(update):
            load_weights(list(update.tensors()))


class _EngineWithModel(_Engine):
    """vLLM 0.23 and later: the engine knows the model and brackets the update itself."""

    model: Any
    model_config: Any
    vllm_config: Any
    device: Any

    def start_weight_update(self) -> None:
        """Prepares the layers to be loaded again."""
        with self._surroundings():
            importlib.import_module(RELOAD).initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Any) -> None:
        """Loads the next version. Layers that are incomplete keep its tensors until finish.

        The trainer is told here that it was applied, for it waits for that before it goes on to
        finish; a finish that fails is raised to it by vLLM itself.
        """
        receiver = self._connected()
        update = receiver.take(update_info.version, update_info.timeout_s)
        with receiver.loading(update):
            self.model.load_weights(update.tensors())

    def finish_weight_update(self) -> None:
        """Finishes the layers; then the version's memory is let go."""
        receiver = self._connected()
        try:
            with self._surroundings():
                reload = importlib.import_module(RELOAD)
                reload.finalize_layerwise_reload(self.model, self.model_config)
            synchronize(self.device)
        except BaseException:
            receiver.version = 0
            raise
        finally:
            receiver.let_go()

    def _surroundings(self) -> AbstractContextManager[Any]:
        """Layers make new parameters while they are reloaded: on the worker's device."""
        import torch

        return nullcontext() if self.device is None else torch.device(self.device)


@dataclass(frozen=True)
class _Generation:
    """One shape of vLLM's interface: from which version, below which, and how engines are made."""

    first: tuple[int, int]
    end: tuple[int, int]
    arguments: tuple[str, ...]
    engine: type[_Engine] = field(repr=False)


GENERATIONS = (
    _Generation((0, 16), (0, 23), ("config", "parallel_config"), _EngineWithCallback),
    _Generation((0, 23), (1, 0), ("config", "vllm_config", "device", "model"), _EngineWithModel),
)


def register() -> None:
    """Makes ``backend="refit"`` known to vLLM's weight transfer; a second call does nothing.

    Call it in every process that makes an engine: from a vLLM plugin (entry point group
    ``vllm.general_plugins``) it is. UnsupportedError for a vLLM whose weight transfer is not known
    here.
    """
    _generation()
    factory = importlib.import_module(FACTORY).WeightTransferEngineFactory
    if "refit" not in factory._registry:
        factory.register_engine("refit", PUBLIC, "RefitWeightTransferEngine")
    trainers = getattr(importlib.import_module(FACTORY), "WeightTransferTrainerFactory", None)
    if trainers is not None and "refit" not in trainers._registry:
        trainers.register_engine("refit", PUBLIC, "RefitTrainerWeightTransferEngine")


def engine_class() -> type[Any]:
    """The engine for the vLLM that is installed: a subclass of its WeightTransferEngine.

    UnsupportedError for a vLLM whose weight transfer is not known here.
    """
    generation = _generation()
    base = importlib.import_module(BASE)
    members = {
        "init_info_cls": _info("RefitInitInfo", _InitInfo, base.WeightTransferInitInfo),
        "update_info_cls": _info("RefitUpdateInfo", _UpdateInfo, base.WeightTransferUpdateInfo),
        "__doc__": "Weights from a refit trainer, through vLLM's weight transfer.",
        "__module__": PUBLIC,
    }
    bases = (generation.engine, base.WeightTransferEngine)
    return type("RefitWeightTransferEngine", bases, members)


def trainer_class() -> type[Any]:
    """The trainer's end, for a vLLM that has one (0.26 and later): a subclass of its
    TrainerWeightTransferEngine, for ``WeightTransferTrainerFactory.trainer_init("refit", ...)``.

    UnsupportedError for a vLLM without; publish there by refit.Publisher.
    """
    from refit.integrations._vllm_trainer import TrainerEngine, TrainerInitInfo

    _generation()
    base = importlib.import_module(BASE)
    theirs = getattr(base, "TrainerWeightTransferEngine", None)
    if theirs is None:
        raise UnsupportedError(
            "this vLLM's weight transfer has no trainer's end: publish with refit.Publisher"
        )
    members = {
        "init_info_cls": _info("RefitTrainerInitInfo", TrainerInitInfo, base.TrainerInitInfo),
        "config_cls": dict,
        "__doc__": "Weights to inference workers by a refit publisher.",
        "__module__": PUBLIC,
    }
    return type("RefitTrainerWeightTransferEngine", (TrainerEngine, theirs), members)


def _generation() -> _Generation:
    version = str(importlib.import_module("vllm").__version__)
    for generation in GENERATIONS:
        if generation.first <= _numbers(version) < generation.end:
            _check_shape(version, generation)
            return generation
    raise UnsupportedError(
        f"vLLM {version} has no weight transfer that refit knows (0.16 to 0.x): use "
        'worker_extension_cls="refit.integrations.vllm.RefitWorkerExtension"'
    )


def _check_shape(version: str, generation: _Generation) -> None:
    """Development versions have numbers that say little: what the constructor takes says more."""
    there = importlib.import_module(BASE).WeightTransferEngine
    taken = tuple(inspect.signature(there.__init__).parameters)[1:]
    if taken != generation.arguments:
        raise UnsupportedError(
            f"the weight transfer of vLLM {version} takes {', '.join(taken)}, and not "
            f"{', '.join(generation.arguments)} as those versions did that refit knows: use "
            'worker_extension_cls="refit.integrations.vllm.RefitWorkerExtension"'
        )


def _numbers(version: str) -> tuple[int, int]:
    parts = version.split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        return (-1, -1)
    return int(parts[0]), int(parts[1])


def _info(name: str, ours: type[Any], theirs: type[Any]) -> type[Any]:
    return make_dataclass(name, [], bases=(ours, theirs))
