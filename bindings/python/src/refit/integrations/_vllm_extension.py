"""vLLM's workers take their weights: the worker extension, and what it loads them by.

An update is one call of all workers of an engine. They agree between its steps, over vLLM's own
group of processes: first each has the same version in hand, then each has loaded it, and only then
do they accept it. So all of an engine's workers switch to a version, or none says that it has.

Nothing is raised to vLLM: its executor takes the answers in order, and stops at the first exception
of a worker, so that with more than one worker the next call would get the answers of this one. A
failure is an answer, ``{"error": ...}``, and _vllm_driver.py raises it where the engine is driven.

Drawn after vllm/v1/worker/{worker_base,gpu_worker,gpu_model_runner}.py, vllm/v1/executor,
vllm/model_executor/model_loader/reload and vllm/lora. vLLM is imported only by what needs it.
"""

import fcntl
import importlib
import inspect
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refit.errors import PeerError, RefitError, StateError, UnsupportedError
from refit.integrations._quantized import refuse_quantized
from refit.integrations._receiver import TIMEOUT_S, Receiver, naming, subscribe, words_of
from refit.integrations._recorded import RecordedLoader
from refit.integrations._vllm_worker import (
    refuse_asleep,
    restoring,
    synchronize,
    together,
    worker_name,
)

if TYPE_CHECKING:
    from refit.weights.update import Update

Named = Iterable[tuple[str, Any]]
Answer = dict[str, Any]


class RefitWorkerExtension:
    """Methods for vLLM's workers, which the functions of refit.integrations.vllm call by
    ``collective_rpc``. All names begin with refit, since vLLM refuses an extension that shares a
    name with its worker.

    Each answers a mapping of plain values, with ``error`` (the exception's class) and ``why`` in it
    if it failed; none raises.
    """

    model_runner: Any
    vllm_config: Any
    _refit: "_Subscription"

    def refit_connect(
        self,
        endpoint: str,
        worker: str | None = None,
        config: Any = None,
        lora: Mapping[str, Any] | None = None,
    ) -> Answer:
        """Subscribes to the trainer and answers this worker's name; a second call moves it to
        another endpoint. Returns at once, whether or not the trainer is there.

        `lora`: ``name``, ``id`` and ``peft`` (the text of PEFT's
        adapter_config.json) of an adapter, if that is what the trainer publishes. UnsupportedError
        for a quantized model.
        """
        return _answer(self, lambda: _connect(self, endpoint, worker, config, lora))

    def refit_update(self, version: int | None = None, timeout: float | None = None) -> Answer:
        """Waits for the next version (at least `version`), loads it, and answers its number.

        At once if `version` is loaded already. Blocks, at most `timeout` seconds (None: 600). All
        workers of the engine have to be called. StateError before refit_connect, and for an engine
        whose weights sleep; DeadlineError; PeerError with the words of what vLLM raises.
        """
        return _answer(self, lambda: {"version": _update(self, version, timeout)})

    def refit_version(self) -> int:
        """The version that was loaded whole; 0 before the first, and after a load that failed."""
        refit: _Subscription | None = getattr(self, "_refit", None)
        return 0 if refit is None else refit.receiver.version

    def refit_close(self) -> Answer:
        """Leaves the trainer. The weights stay; an adapter's too. Idempotent."""
        return _answer(self, lambda: _close(self))


@dataclass
class _Subscription:
    """What a worker knows of its trainer."""

    name: str
    receiver: Receiver
    into: "_Model | _Adapter"


# ---- Answers


def _answer(worker: Any, call: Callable[[], Answer]) -> Answer:
    try:
        return call()
    except Exception as why:
        return _failure(worker, why)


def _failure(worker: Any, why: BaseException) -> Answer:
    """What the driver raises again. Of several workers' failures all answer the first one."""
    if isinstance(why, EngineWorkerError):
        return why.answer
    refit: _Subscription | None = getattr(worker, "_refit", None)
    name = worker_name(getattr(worker, "rank", None)) if refit is None else refit.name
    if isinstance(why, RefitError):
        kind, text = type(why).__name__, why.text
    else:
        kind, text = PeerError.__name__, words_of(why)
    return {"error": kind, "why": text, "worker": name, "version": 0}


class EngineWorkerError(PeerError):
    """An update that failed at one of the engine's workers, this one or another."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"{answer['worker']} failed, of the same engine: {answer['why']}")
        self.answer = answer


def _agree(worker: Any, failed: Exception | None, value: Any = None) -> list[Any]:
    """Every worker's `value`, if none failed. Raises what the first of them has failed by."""
    said = together((None if failed is None else _failure(worker, failed), value))
    for answer, _ in said:
        if answer is not None:
            raise EngineWorkerError(answer)
    return [value for _, value in said]


# ---- The steps of an update


def _connect(
    worker: Any,
    endpoint: str,
    name: str | None,
    config: Any,
    lora: Mapping[str, Any] | None,
) -> Answer:
    refuse_quantized(worker.model_runner.get_model())
    into = _Model(worker) if lora is None else _Adapter(worker, **lora)
    _close(worker)
    rank = getattr(worker, "rank", None)
    workers = getattr(worker.vllm_config.parallel_config, "world_size", 1)
    if name is None:
        name = worker_name(rank)
    elif workers > 1:
        name = f"{name}-rank{rank}"
    worker._refit = _Subscription(name, subscribe(endpoint, name, config), into)
    return {"worker": name}


def _close(worker: Any) -> Answer:
    refit: _Subscription | None = getattr(worker, "_refit", None)
    if refit is not None:
        refit.receiver.close()
        refit.into.close()
        del worker._refit
    return {"version": 0}


def _update(worker: Any, version: int | None, timeout: float | None) -> int:
    refit: _Subscription | None = getattr(worker, "_refit", None)
    missing = None
    if refit is None:
        missing = StateError('this worker knows no trainer: call "refit_connect" first')
    held = _agree(worker, missing, worker.refit_version())
    assert refit is not None
    if len(set(held)) > 1:  # one of them was lost to the trainer: all begin anew
        refit.receiver.join_again(kept=False)
    update = _take_the_same(worker, refit, version, timeout)
    _load_the_same(worker, refit, update)
    return refit.receiver.version


def _take_the_same(
    worker: Any, refit: _Subscription, version: int | None, timeout: float | None
) -> "Update":
    """One version, in the hands of all workers. What fails leaves all with the one before."""
    receiver = refit.receiver
    end = time.monotonic() + (TIMEOUT_S if timeout is None else timeout)
    update: Update | None = None
    while True:
        failed: Exception | None = None
        try:
            refuse_asleep()
            if update is None:
                refit.into.prepare(receiver)
                update = receiver.take(version, max(0.0, end - time.monotonic()))
        except Exception as why:
            failed = why
        try:
            there = _agree(worker, failed, None if update is None else update.version)
            if len(set(there)) == 1:
                assert update is not None
                return update
        except BaseException as why:
            if update is not None:
                receiver.pass_over(update, str(why))
            raise
        version = max(there)
        if update is not None and update.version != version:
            receiver.pass_over(update, f"another worker of this engine has version {version}")
            update = None


def _load_the_same(worker: Any, refit: _Subscription, update: "Update") -> None:
    """Loads on all workers, and accepts where all have loaded."""
    receiver = refit.receiver
    loaded = False
    given_up: Exception | None = None
    try:
        with receiver.loading(update):
            _load_or_go_back(worker, refit, update)
            loaded = True
        receiver.let_go()
    except Exception as why:
        if not loaded:
            raise
        given_up = why  # by the trainer, before this worker could accept
    try:
        _agree(worker, given_up)
    except EngineWorkerError:
        receiver.join_again(kept=False)
        raise
    refit.into.accepted(receiver)


def _load_or_go_back(worker: Any, refit: _Subscription, update: "Update") -> None:
    failed: Exception | None = None
    try:
        refit.into.load(update)
        synchronize(getattr(worker, "device", None))
    except Exception as why:
        failed = why
    try:
        _agree(worker, failed)
    except EngineWorkerError as elsewhere:
        if refit.into.go_back():
            refit.receiver.keep()
        raise elsewhere if failed is None else failed from None


# ---- Whole models


class _Model:
    """The engine's model. vLLM's reload loads the first version, and is recorded: later ones are
    written to the same places, which graphs go on to read."""

    def __init__(self, worker: Any) -> None:
        parallel = worker.vllm_config.parallel_config
        moves = None
        if getattr(parallel, "enable_eplb", False):
            moves = "with enable_eplb vLLM moves experts from one place to another"
        self._runner = worker.model_runner
        self._loader = RecordedLoader(
            worker.model_runner.get_model(), lambda weights: load(worker, weights), moves
        )

    def load(self, update: "Update") -> None:
        self._loader.load(update)
        for name in ("reset_lora_state", "reset_encoder_cache", "reset_mm_cache"):
            getattr(self._runner, name, _nothing)()  # as vLLM's reload does

    def prepare(self, receiver: Receiver) -> None:
        """Before a version is taken."""
        self._loader.prepare(receiver)

    def accepted(self, receiver: Receiver) -> None:
        """The version is the model's: a time at which its loader can be recorded."""
        self._loader.learn(receiver)

    def go_back(self) -> bool:
        """Whether the version before is the model's again."""
        return False

    def close(self) -> None:
        """Nothing: the model is vLLM's."""


def _nothing() -> None:
    """In place of what a version of vLLM does not have."""


def load(worker: Any, weights: Named) -> None:
    """Loads one whole version into the model of vLLM's worker; blocks.

    A load that fails leaves all layers in use, those that were loaded with new weights.
    """
    runner = worker.model_runner
    reload_weights = getattr(runner, "reload_weights", None)
    if reload_weights is None or not _takes_weights(reload_weights):
        raise UnsupportedError(
            "this vLLM cannot load other weights into a model: its reload_weights takes no "
            "weights_iterator; use vLLM 0.16 or later"
        )
    with _config_of(worker), restoring(runner.model), naming(weights) as each:
        reload_weights(weights_iterator=each)


def _takes_weights(reload_weights: Any) -> bool:
    return "weights_iterator" in inspect.signature(reload_weights).parameters


# ---- Adapters of PEFT


class _Adapter:
    """An adapter that travels alone. vLLM's own manager loads it, from files in memory: so it is
    checked, divided and put into its slot as any other adapter of this engine is."""

    def __init__(self, worker: Any, name: str, id: int, peft: str) -> None:
        if getattr(worker.vllm_config, "lora_config", None) is None:
            raise StateError(
                "the engine takes no adapters: start it with enable_lora=True, and max_lora_rank "
                "as large as the adapter's"
            )
        self._worker = worker
        self._name = name
        self._id = id
        self._peft = json.loads(peft)
        self._folder: _Folder | None = None
        self._next: _Folder | None = None
        self._loaded = False
        _remove_left()

    def load(self, update: "Update") -> None:
        """Writes the tensors to files, and has vLLM load them in place of the version before."""
        from safetensors.torch import save_file

        self._next = _Folder()
        tensors = {name: tensor.contiguous() for name, tensor in update.tensors()}
        save_file(tensors, self._next.path / "adapter_model.safetensors")
        (self._next.path / "adapter_config.json").write_text(json.dumps(self._peft))
        self._loaded = False
        self._put(self._next.path)
        self._loaded = True

    def prepare(self, receiver: Receiver) -> None:
        """Nothing: an adapter is taken whole."""

    def accepted(self, receiver: Receiver) -> None:
        """The version that was loaded is the adapter's; the one before goes."""
        self._remove(self._folder)
        self._folder, self._next = self._next, None

    def go_back(self) -> bool:
        """The version before is the adapter's again."""
        if self._loaded:
            self._take_out() if self._folder is None else self._put(self._folder.path)
        self._loaded = False
        self._remove(self._next)
        self._next = None
        return True

    def close(self) -> None:
        """Ends the files. vLLM keeps what it has loaded."""
        self._remove(self._folder)
        self._folder = None

    def _put(self, folder: Path) -> None:
        kind = importlib.import_module("vllm.lora.request").LoRARequest
        request = kind(self._name, self._id, str(folder), load_inplace=True)
        with _config_of(self._worker):
            if not self._worker.add_lora(request):
                raise PeerError(f'vLLM did not take the adapter "{self._name}"')
            self._worker.pin_lora(self._id)  # requests name no files that it could come from again

    def _take_out(self) -> None:
        self._worker.remove_lora(self._id)

    @staticmethod
    def _remove(folder: "_Folder | None") -> None:
        if folder is not None:
            folder.remove()


class _Folder:
    """A new folder for one version. Its lock, which ends with the process however that ends, tells
    it from what killed engines have left: a process id would not, as containers share /dev/shm."""

    def __init__(self) -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_in_memory()))
            lock = _lock(self.path)
            if lock is not None:
                self._lock = lock
                return

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


_PREFIX = "refit-lora-"


def _lock(folder: Path) -> int | None:
    """The descriptor that holds the folder; None if another one does, or it is gone."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), os.stat(folder)):
            return lock
    except OSError:
        pass
    os.close(lock)
    return None


def _remove_left() -> None:
    """Removes what engines of this user left that were killed."""
    for folder in Path(_in_memory() or tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        lock = _lock(folder)
        if lock is not None:
            if os.fstat(lock).st_uid == os.geteuid():
                shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _in_memory() -> str | None:
    """A folder whose files are in memory, if there is one; None for the usual one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else None


# ---- What both have in common


def _config_of(worker: Any) -> AbstractContextManager[Any]:
    """vLLM's layers ask for its configuration while they are made and loaded."""
    config = importlib.import_module("vllm.config")
    within: Callable[[Any], AbstractContextManager[Any]] | None
    within = getattr(config, "set_current_vllm_config", None)
    return nullcontext() if within is None else within(worker.vllm_config)
