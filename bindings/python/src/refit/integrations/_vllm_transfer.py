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
from dataclasses import dataclass, make_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from refit._log import LOGGER
from refit.errors import StateError, UnsupportedError
from refit.integrations._receiver import Receiver, subscribe
from refit.integrations._vllm_worker import restoring, synchronize, worker_name

if TYPE_CHECKING:
    from refit.update import Update

BASE = "vllm.distributed.weight_transfer.base"
FACTORY = "vllm.distributed.weight_transfer.factory"
RELOAD = "vllm.model_executor.model_loader.reload"
PUBLIC = "refit.integrations.vllm"
"""Where vLLM's factories find the classes."""

REMEDY = 'use worker_extension_cls="refit.integrations.vllm.RefitWorkerExtension"'


ABSENT_S = 30.0
"""How long a worker goes on to wait for a version while no trainer is there: the one that asked for
the update is dead then, and the engine has requests to serve."""


@dataclass
class _InitInfo:
    """The message of the trainer to each worker, once. With `connect_s` the worker waits so long
    until the trainer has welcomed it; 0: it looks for the trainer beside its other work."""

    endpoint: str
    worker: str | None = None
    config: dict[str, Any] | None = None
    connect_s: float = 0.0


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
        """Subscribes to the trainer, in the place of one that it had before."""
        self.shutdown()
        rank = getattr(getattr(self, "parallel_config", None), "rank", None)
        name = init_info.worker or worker_name(rank)
        self._receiver = subscribe(init_info.endpoint, name, init_info.config)
        if init_info.connect_s > 0:
            self._receiver.await_trainer(init_info.connect_s)

    def shutdown(self) -> None:
        """Leaves the trainer. Idempotent."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def _connected(self) -> Receiver:
        if self._receiver is None:
            raise StateError("this worker knows no trainer: init_weight_transfer_engine first")
        return self._receiver

    def _arrival(self, update_info: Any) -> "Update":
        receiver = self._connected()
        return receiver.take(update_info.version, update_info.timeout_s, absent=ABSENT_S)

    @staticmethod
    def trainer_send_weights(iterator: Iterator[tuple[str, Any]], trainer_args: Any) -> None:
        """Publishes what `iterator` gives, by ``trainer_args["publisher"]``; blocks until all
        workers have applied it, so their update_weights must be under way.
        """
        from refit.integrations._sender import Sender

        Sender(trainer_args["publisher"]).send(iterator, trainer_args.get("version"))


class _EngineWithCallback(_Engine):
    """vLLM below 0.25: the worker prepares the layers, hands in the function that loads, and
    finishes by itself. So the model has no weights from start to finish."""

    def receive_weights(self, update_info: Any, load_weights: Any) -> None:
        """Loads the next version by `load_weights`; its memory stays until the next one."""
        model = getattr(load_weights, "__self__", None)  # weights as the kernels want have no model
        with nullcontext() if model is None else restoring(model):
            update = self._arrival(update_info)
            with self._connected().loading(update):
                load_weights(list(update.tensors()))


class _EngineWithModel(_Engine):
    """vLLM 0.25 and later: the engine knows the model and does everything itself. So the model
    keeps its weights until a whole version is in hand, and whoever fails before changes nothing."""

    model: Any
    model_config: Any
    device: Any

    def start_weight_update(self) -> None:
        """StateError for a worker that knows no trainer; otherwise nothing, until it arrives."""
        self._connected()

    def receive_weights(self, update_info: Any) -> None:
        """Waits for the next version and loads it; its memory is let go."""
        update = self._arrival(update_info)
        receiver = self._connected()
        reload = importlib.import_module(RELOAD)
        with receiver.loading(update), restoring(self.model):
            with self._surroundings():  # layers make new parameters while they are reloaded
                reload.initialize_layerwise_reload(self.model)
                self.model.load_weights(update.tensors())
                reload.finalize_layerwise_reload(self.model, self.model_config)
            synchronize(self.device)
        receiver.let_go()

    def finish_weight_update(self) -> None:
        """Nothing: what was received is loaded."""

    def _surroundings(self) -> AbstractContextManager[Any]:
        """vLLM makes tensors on the device that is current."""
        import torch

        return nullcontext() if self.device is None else torch.device(self.device)


GENERATIONS: dict[tuple[str, ...], type[_Engine]] = {
    ("config", "parallel_config"): _EngineWithCallback,  # 0.16 to 0.21
    ("config", "parallel_config", "model"): _EngineWithCallback,  # 0.22 to 0.24
    ("config", "vllm_config", "device", "model"): _EngineWithModel,  # 0.25 and later
}
"""By what the constructor of vLLM's engine takes: the number of a development version says less."""


def register() -> None:
    """Makes ``backend="refit"`` known to vLLM's weight transfer; a second call does nothing.

    vLLM calls it in each of its processes, by refit's entry point of the group
    ``vllm.general_plugins``. It never raises, because vLLM does not start with a plugin that does:
    where vLLM's weight transfer is not known here, a warning in the log says what to use instead.
    """
    try:
        _register()
    except Exception as why:
        LOGGER.warning('vLLM\'s weight transfer gets no backend "refit": %s', why)


def _register() -> None:
    _generation()
    factories = importlib.import_module(FACTORY)
    _add(factories.WeightTransferEngineFactory, "RefitWeightTransferEngine")
    if hasattr(factories, "WeightTransferTrainerFactory"):
        _add(factories.WeightTransferTrainerFactory, "RefitTrainerWeightTransferEngine")


def _add(factory: Any, name: str) -> None:
    if "refit" not in factory._registry:
        factory.register_engine("refit", PUBLIC, name)


def engine_class() -> type[Any]:
    """The engine for the vLLM that is installed: a subclass of its WeightTransferEngine.

    UnsupportedError for a vLLM whose weight transfer is not known here.
    """
    ours: Any = _generation()
    return _engine_class(ours, importlib.import_module(BASE))


@cache
def _engine_class(engine: Any, base: Any) -> type[Any]:
    members = {
        "init_info_cls": _info("RefitInitInfo", _InitInfo, base.WeightTransferInitInfo),
        "update_info_cls": _info("RefitUpdateInfo", _UpdateInfo, base.WeightTransferUpdateInfo),
        "__doc__": "Weights from a refit trainer, through vLLM's weight transfer.",
        "__module__": PUBLIC,
    }
    return type("RefitWeightTransferEngine", (engine, base.WeightTransferEngine), members)


def trainer_class() -> type[Any]:
    """The trainer's end, for a vLLM that has one (0.26 and later): a subclass of its
    TrainerWeightTransferEngine, which ``WeightTransferTrainerFactory.trainer_init`` makes.

    UnsupportedError for a vLLM without; publish there by refit.Publisher.
    """
    return _trainer_class(_base_with_trainer())


def trainer_init_info_class() -> type[Any]:
    """What the trainer's end is made with: a subclass of vLLM's TrainerInitInfo."""
    return _trainer_init_info_class(_base_with_trainer())


def _base_with_trainer() -> Any:
    _generation()
    base = importlib.import_module(BASE)
    if not hasattr(base, "TrainerWeightTransferEngine"):
        raise UnsupportedError(
            "this vLLM's weight transfer has no trainer's end: publish with refit.Publisher"
        )
    return base


@cache
def _trainer_class(base: Any) -> type[Any]:
    from refit.integrations._vllm_trainer import TrainerEngine, TrainerEngineWithConfig

    theirs = base.TrainerWeightTransferEngine
    takes_config = "config" in inspect.signature(theirs.__init__).parameters
    ours = TrainerEngineWithConfig if takes_config else TrainerEngine
    members = {
        "init_info_cls": _trainer_init_info_class(base),
        "config_cls": dict,
        "__doc__": "Weights to inference workers by a refit publisher.",
        "__module__": PUBLIC,
    }
    return type("RefitTrainerWeightTransferEngine", (ours, theirs), members)


@cache
def _trainer_init_info_class(base: Any) -> type[Any]:
    from refit.integrations._vllm_trainer import TrainerInitInfo

    return _info("RefitTrainerInitInfo", TrainerInitInfo, base.TrainerInitInfo, backend="refit")


def _generation() -> type[_Engine]:
    version = importlib.import_module("vllm").__version__
    try:
        there = importlib.import_module(BASE).WeightTransferEngine
    except ModuleNotFoundError:
        raise UnsupportedError(f"vLLM {version} has no weight transfer: {REMEDY}") from None
    taken = tuple(inspect.signature(there.__init__).parameters)[1:]
    if taken not in GENERATIONS:
        known = " or ".join(f"({', '.join(one)})" for one in GENERATIONS)
        raise UnsupportedError(
            f"the weight transfer of vLLM {version} takes ({', '.join(taken)}), and not {known} as "
            f"those versions do that refit knows: {REMEDY}"
        )
    return GENERATIONS[taken]


def _info(name: str, ours: type[Any], theirs: type[Any], **members: Any) -> type[Any]:
    """Of the module where `name` is found, so that it can be pickled."""
    members["__module__"] = PUBLIC
    return make_dataclass(name, [], bases=(ours, theirs), namespace=members)
