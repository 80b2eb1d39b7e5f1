"""refit as a backend of vLLM's own weight transfer: ``WeightTransferConfig(backend="refit")``.

vLLM has a class for the worker's end, and later versions one for the trainer's; refit subclasses
those of the installed version. The interface has changed; which one is there is looked at, and one
that is not known is refused with a sentence. The trainer's end itself is in _vllm_trainer.py.

Drawn after vllm/distributed/weight_transfer/{base,factory,ipc_engine}.py and
vllm/model_executor/model_loader/reload. vLLM is imported only by what needs it.
"""

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, make_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from refit._c.log import LOGGER
from refit.errors import PeerError, StateError, UnsupportedError
from refit.integrations._quantized import refuse_quantized
from refit.integrations._receiver import ABSENT_S, Receiver, naming, subscribe, words_of
from refit.integrations._vllm_worker import (
    put_back,
    refuse_asleep,
    synchronize,
    together,
    worker_name,
)

if TYPE_CHECKING:
    from refit.weights.update import Update

BASE = "vllm.distributed.weight_transfer.base"
FACTORY = "vllm.distributed.weight_transfer.factory"
RELOAD = "vllm.model_executor.model_loader.reload"
PUBLIC = "refit.integrations.vllm"
"""Where vLLM's factories find the classes."""

REMEDY = 'use worker_extension_cls="refit.integrations.vllm.RefitWorkerExtension"'


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
    """The common part of the engines of all generations. vLLM's base class is added below.

    Of several workers of an engine the last one alone raises, whichever failed: vLLM's executor
    takes their answers in order, and stops at the first exception, so that its next call would get
    what is left of this one.
    """

    supports_draft_weight_update = False
    device_to_share: str | None = "auto"
    """As Subscriber takes it."""
    model: Any
    _receiver: Receiver | None = None

    def init_transfer_engine(self, init_info: Any) -> None:
        """Subscribes to the trainer, in the place of one that it had before. UnsupportedError for a
        quantized model."""
        with self._at_the_last():
            self._agree(_failure_of(lambda: self._connect(init_info)))

    def shutdown(self) -> None:
        """Leaves the trainer. Idempotent."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def _connect(self, init_info: Any) -> None:
        refuse_quantized(self.model)
        self.shutdown()
        name = init_info.worker or self._name()
        if init_info.worker and self._workers() > 1:
            name = f"{name}-rank{self._rank()}"
        self._receiver = subscribe(
            init_info.endpoint, name, init_info.config, device=self.device_to_share
        )
        if init_info.connect_s > 0:
            self._receiver.await_trainer(init_info.connect_s)

    def _connected(self) -> Receiver:
        if self._receiver is None:
            raise StateError("this worker knows no trainer: init_weight_transfer_engine first")
        return self._receiver

    def _receive(self, update_info: Any, model: Any, load: Callable[["Update"], None]) -> None:
        """Takes the next version and loads it by `load`; accepts it if all workers have loaded it.
        What fails leaves no layer of `model` without memory."""
        with self._at_the_last():
            try:
                update = self._take(update_info)
                with self._connected().loading(update):
                    self._agree(_failure_of(lambda: load(update)))
            except Exception as why:
                if model is not None:
                    put_back(model, why)
                raise

    def _take(self, update_info: Any) -> "Update":
        """The next version, where all workers of this engine have one."""
        taken: list[Update] = []

        def take() -> None:
            refuse_asleep()
            wanted, timeout = update_info.version, update_info.timeout_s
            taken.append(self._connected().take(wanted, timeout, absent=ABSENT_S))

        try:
            self._agree(_failure_of(take))
        except Exception as why:
            for update in taken:
                self._connected().pass_over(update, str(why))
            raise
        return taken[0]

    def _agree(self, failed: Exception | None) -> None:
        """Raises if a worker of this engine failed: its own exception where that was this one."""
        said = []
        if self._workers() > 1:
            said = together(None if failed is None else f"{self._name()}: {words_of(failed)}")
        if failed is not None:
            raise failed
        for one in said:
            if one is not None:
                raise PeerError(f"another worker of this engine failed: {one}")

    @contextmanager
    def _at_the_last(self) -> Iterator[None]:
        try:
            yield
        except Exception as why:
            if self._rank() in (None, self._workers() - 1):
                raise
            LOGGER.warning("vLLM's weight transfer: %s: %s", self._name(), words_of(why))

    def _workers(self) -> int:
        return int(getattr(self._parallel(), "world_size", 1))

    def _rank(self) -> int | None:
        rank = getattr(self._parallel(), "rank", None)
        return None if self._workers() == 1 else rank

    def _name(self) -> str:
        return worker_name(getattr(self._parallel(), "rank", None))

    def _parallel(self) -> Any:
        return getattr(self, "parallel_config", None)

    @staticmethod
    def trainer_send_weights(iterator: Iterator[tuple[str, Any]], trainer_args: Any) -> None:
        """Publishes what `iterator` gives, by ``trainer_args["publisher"]``; blocks until all
        workers have applied it, so their update_weights must be under way.
        """
        from refit.integrations._sender import Sender

        Sender(trainer_args["publisher"]).send(iterator, trainer_args.get("version"))


class _EngineWithCallback(_Engine):
    """vLLM below 0.25: the worker prepares the layers, hands in the function that loads, and
    finishes by itself. So the model has no weights from start to finish, and reads tensors after
    this end has accepted them: it takes them from the host."""

    device_to_share = None

    def receive_weights(self, update_info: Any, load_weights: Any) -> None:
        """Loads the next version by `load_weights`; its memory stays until the next one."""
        model = getattr(load_weights, "__self__", None)  # weights as the kernels want have no model
        self._receive(update_info, model, lambda update: load_weights(list(update.tensors())))


class _EngineWithModel(_Engine):
    """vLLM 0.25 and later: the engine knows the model and does everything itself. So the model
    keeps its weights until a whole version is in hand, and a failure before changes nothing."""

    model_config: Any
    device: Any

    def start_weight_update(self) -> None:
        """StateError for a worker that knows no trainer; otherwise nothing, until it arrives."""
        with self._at_the_last():
            self._connected()

    def receive_weights(self, update_info: Any) -> None:
        """Waits for the next version and loads it; its memory is let go."""
        self._receive(update_info, self.model, self._load)
        if self._receiver is not None:
            self._receiver.let_go()

    def _load(self, update: "Update") -> None:
        reload = importlib.import_module(RELOAD)
        with self._surroundings():
            reload.initialize_layerwise_reload(self.model)
            with naming(update.tensors()) as each:
                self.model.load_weights(each)
            reload.finalize_layerwise_reload(self.model, self.model_config)
        synchronize(self.device)

    def finish_weight_update(self) -> None:
        """Nothing: what was received is loaded."""

    def _surroundings(self) -> AbstractContextManager[Any]:
        """vLLM makes tensors on the device that is current."""
        import torch

        return nullcontext() if self.device is None else torch.device(self.device)


GENERATIONS: dict[tuple[str, ...], type[_Engine]] = {
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
    """The trainer's process makes no engine, so vLLM loads no plugins there."""
    _register()
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


def _failure_of(call: Callable[[], None]) -> Exception | None:
    try:
        call()
    except Exception as why:
        return why
    return None


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
