"""SGLang engines and servers that take their weights from a refit trainer, or from a caller.

SGLang is started with refit's loaders, which run in its schedulers, and driven from outside:

    engine = sglang.Engine(model_path=..., custom_weight_loader=refit.integrations.sglang.LOADERS)
    refit_update(engine, publisher.endpoint, version)      # or Server("http://127.0.0.1:30000")

- ``pull``: a call brings only an order, and each worker fetches the version from the trainer by
  itself: its bytes do not pass through SGLang's scheduler. ``refit_update`` makes the call.
- ``load``: the tensors of a call are loaded, each name once. ``refit_load`` makes the call.
- ``refit_adapter`` hands an adapter of PEFT to SGLang's own loader of adapters.

An exception in a loader ends SGLang's scheduler, and that ends the process. So refit wraps the
method that calls loaders: a failure of refit's becomes the answer ``(False, "refit DeadlineError:
...")``, the same on all tensor-parallel ranks, and the functions here raise it as what it was. The
method is wrapped by ``plugin``, an entry point that SGLang 0.5.11 and later load in each process,
and otherwise by the first call of ``refit_update`` or ``refit_load``.

After sglang/srt/model_executor/model_runner_components/weight_updater.py and
sglang/srt/managers/scheduler_components/weight_updater.py of 0.5.23; before 0.5.18 the method is
ModelRunner's, and before 0.5.21 there are no sessions. SGLang is not imported here.
"""

import functools
import json
import os
import re
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from refit import errors
from refit.errors import (
    BusyError,
    InvalidError,
    PeerError,
    RefitError,
    StateError,
)
from refit.integrations._quantized import refuse_quantized
from refit.integrations._receiver import (
    ABSENT_S,
    TIMEOUT_S,
    Receiver,
    naming,
    subscribe,
    words_of,
)
from refit.integrations._recorded import RecordedLoader
from refit.integrations._sglang_server import Server

__all__ = [
    "LOADERS",
    "Server",
    "load",
    "order",
    "plugin",
    "pull",
    "refit_adapter",
    "refit_load",
    "refit_update",
]

Named = Iterable[tuple[str, torch.Tensor]]
Answer = tuple[bool, str]

LOAD = "refit.integrations.sglang.load"
PULL = "refit.integrations.sglang.pull"
LOADERS = [LOAD, PULL]
"""For ``custom_weight_loader`` of SGLang's engine."""

ORDER = "refit.order"
_RECEIVER = "_refit_receiver"
_LOADER = "_refit_loader"
_WRAPPED = "_refit_answers"
_CALLERS = (
    ("sglang.srt.model_executor.model_runner_components.weight_updater", "WeightUpdater"),
    ("sglang.srt.model_executor.model_runner", "ModelRunner"),
)
"""Where the method is that calls loaders: since 0.5.18, and before."""


# ---- What an engine's driver calls


def refit_update(engine: Any, endpoint: str, version: int = 0, timeout: float | None = None) -> int:
    """Lets all workers of `engine` fetch a version from the trainer and load it; returns its
    number.

    `engine`: SGLang's ``Engine`` or a ``Server``, started with LOADERS. `endpoint`: the trainer's;
    the first call subscribes, and so does one with another endpoint. `version`: that of the publish
    which is under way beside it, in another process or thread: ``publisher.version + 1`` before it,
    or 0, the next one. One that is loaded already is fetched and loaded again, if the trainer has
    no later one. `timeout`: seconds that a worker waits for the version (None:
    600), of these 30 at most while no trainer is there; loading comes on top. Opens SGLang's
    session for updates and ends it, whatever happens. SGLang waits for the requests under way
    first, and after the update empties its prefix cache; requests that come meanwhile wait.

    DeadlineError (no such version came: the weights are those of before), UnsupportedError (a
    quantized model: nothing has changed), StateError (a session is open already, or SGLang has not
    got these loaders), BusyError (the version is loaded, but requests kept the cache from being
    emptied), PeerError with the words of what a worker's model raised, or if tensor-parallel ranks
    have loaded different versions. After a PeerError weights of two versions may be mixed: the
    engine must not generate before the next update, which all ranks fetch whole.
    """
    limit = TIMEOUT_S if timeout is None else timeout
    if not limit >= 0:
        raise InvalidError(f"timeout is {timeout}: it is a number of seconds, 0 or more")
    if version < 0:
        raise InvalidError(f"version is {version}: versions count from 1, and 0 is the next one")
    if not endpoint:
        raise InvalidError("no endpoint: the engine fetches from that of the trainer's publisher")
    message = _in_session(engine, order(endpoint, version, limit), PULL)
    found = re.search(r"refit version (\d+)", message)
    if found is None:
        return 0
    loaded = int(found.group(1))
    _tell_version(engine, loaded)
    return loaded


def refit_load(engine: Any, named_tensors: Named | Mapping[str, torch.Tensor]) -> None:
    """Hands weights to `engine`, which loads them as one version. Blocks.

    The names are the checkpoint's; each comes once. A mapping has them, too. Names that SGLang's
    model does not know are not loaded, and not refused. InvalidError for a name that comes twice
    and for no weights, and what refit_update raises, but for DeadlineError. A ``Server`` is sent
    their bytes by HTTP, as many times as it has tensor-parallel ranks.
    """
    pairs = list(named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors)
    if not pairs:
        raise InvalidError("no weights to load: give the named tensors of a checkpoint")
    _in_session(engine, pairs, LOAD)


def refit_adapter(
    engine: Any, name: str, tensors: Named, peft: Any, *, replace: bool = True
) -> None:
    """Hands an adapter to `engine` (``Engine`` or ``Server``, with enable_lora): requests choose it
    by `name`.

    `tensors` are named as PEFT's checkpoints name them: what a trainer publishes with
    ``named_weights(model, lora="adapter")``, read by a ``Subscriber`` beside the engine. `peft` is
    PEFT's configuration (``model.peft_config["default"]``, or a mapping like adapter_config.json).
    `replace`: an adapter of this name leaves first, once its requests have ended; SGLang keeps
    nothing in the prefix cache from one to the other. Blocks.

    InvalidError (no tensors, or a name twice), ExistsError (without `replace`), PeerError with
    SGLang's words: no adapter of this name is loaded then.
    """
    weights = list(tensors)
    if not weights:
        raise InvalidError(f'the adapter "{name}" has no tensors')
    _refuse_twice([one for one, _ in weights])
    config = json.loads(json.dumps(_plain_config(peft), default=_plain))
    if replace:
        _unload(engine, name)
    loaded = {one: tensor.detach().cpu().clone() for one, tensor in weights}
    said = engine.load_lora_adapter_from_tensors(name, loaded, config)
    if not _field(said, "success"):
        text = str(_field(said, "error_message"))
        if "already" in text:
            raise errors.ExistsError(f'SGLang refused the adapter "{name}": {text}')
        raise PeerError(f'SGLang refused the adapter "{name}": {text}')


def order(endpoint: str, version: int = 0, timeout: float = TIMEOUT_S) -> list[tuple[str, Any]]:
    """The named tensors that make ``pull`` fetch a version, for a caller that makes SGLang's calls
    itself, within a session where SGLang has them:

        engine.begin_weight_update()
        ok, why = engine.update_weights_from_tensor(order(endpoint, 7), load_format=PULL)
        engine.end_weight_update()
    """
    said = json.dumps({"endpoint": endpoint, "version": version, "timeout": timeout})
    return [(ORDER, torch.tensor(list(said.encode()), dtype=torch.uint8).as_subclass(_Bytes))]


class _Bytes(torch.Tensor):
    """Pickled by value: PyTorch sends a CPU tensor as a descriptor, which other hosts cannot
    open."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return torch.ByteTensor, (self.tolist(),)


# ---- The loaders, in SGLang's schedulers


def load(model: Any, named_tensors: Named) -> None:
    """A custom weight loader: loads what SGLang was handed, each name once.

    InvalidError for a name that comes twice and UnsupportedError for a quantized model (nothing is
    loaded then), and what the model raises. Blocks until the copies are done: the caller may use
    the memory of the tensors again.
    """
    _wrap_caller()
    weights = list(named_tensors)
    if _only_wraps(weights):
        return
    _refuse_twice([name for name, _ in weights])
    refuse_quantized(model)
    with naming(weights) as each:
        model.load_weights(each)
    _synchronize(model)


def pull(model: Any, named_tensors: Named) -> None:
    """A custom weight loader: fetches a version from the trainer that an ``order`` names, and loads
    it.

    The first order subscribes, and so does one with another endpoint. A version that is loaded
    already is fetched again: another trainer may have given it the same number, and SGLang may have
    loaded others since. When the first one is loaded, the model's loader is recorded
    (``refit.record``), and later ones are written without it if it only copies. Blocks, at most as
    long as the order says, and for the recording. InvalidError if the
    tensors are not order, UnsupportedError for a quantized model (before anything is fetched),
    DeadlineError, and what the model raises, which the trainer's report has, too.
    """
    _wrap_caller()
    endpoint, version, timeout = _read_order(list(named_tensors))
    if not endpoint:
        return
    refuse_quantized(model)
    receiver = _receiver_of(model, endpoint)
    loader = _loader_of(model)
    loader.prepare(receiver)
    update = receiver.take(version or None, timeout, absent=ABSENT_S)
    with receiver.loading(update):
        loader.load(update)
        _synchronize(model)
    receiver.let_go()
    loader.learn(receiver)


def plugin() -> None:
    """SGLang's plugin: in a scheduler, failures of refit's loaders become answers. Idempotent."""
    if "sglang.srt.managers.scheduler" in sys.modules:
        _wrap_caller()


def _wrap_caller() -> None:
    """Wraps the method of SGLang that calls loaders, once."""
    for module, name in _CALLERS:
        kind = getattr(sys.modules.get(module), name, None)
        method = getattr(kind, "update_weights_from_tensor", None)
        if kind is not None and method is not None:
            if _WRAPPED not in vars(kind):
                kind.update_weights_from_tensor = _answering(method)
                setattr(kind, _WRAPPED, True)
            return


def _answering(method: Callable[..., Answer]) -> Callable[..., Answer]:
    """`method`, with the failures of refit's loaders as values, on which all ranks agree."""

    @functools.wraps(method)
    def answer(self: Any, named_tensors: Any, load_format: str | None = None) -> Answer:
        if load_format not in LOADERS:
            return method(self, named_tensors=named_tensors, load_format=load_format)
        failure = ""
        try:
            done, message = method(self, named_tensors=named_tensors, load_format=load_format)
            if not done:
                failure = f"UnsupportedError: {message}"
        except Exception as why:
            kind = type(why).__name__ if isinstance(why, RefitError) else "PeerError"
            text = str(why) if isinstance(why, RefitError) else words_of(why)
            failure = f"{kind}: {text}"
        found = _all_ranks((failure, _version_in(self)))
        if load_format == PULL and not _only_wraps(named_tensors) and _differ(found):
            _forget(self)
        elif not any(failure for failure, _ in found):
            return True, f"refit version {found[0][1]}"
        return False, _sentence(found)

    return answer


def _differ(found: list[tuple[str, int]]) -> bool:
    """Whether the tensor-parallel ranks have loaded different versions."""
    return len({version for _, version in found}) > 1


def _sentence(found: list[tuple[str, int]]) -> str:
    """One sentence for what the tensor-parallel ranks found, of which one failed or that differ."""
    text = ""
    for rank, (failure, _) in enumerate(found):
        if failure:
            where = f" (tensor-parallel rank {rank} of {len(found)})" if len(found) > 1 else ""
            text = f"{failure}{where}"
            break
    if _differ(found) and not text.startswith("PeerError"):
        versions = ", ".join(str(version) for _, version in found)
        text = f"PeerError: the ranks have loaded different versions, {versions}. {text}".rstrip()
    return f"refit {text}"


def _all_ranks(mine: tuple[str, int]) -> list[tuple[str, int]]:
    """What all tensor-parallel ranks found, by the group on which SGLang waits after an update."""
    distributed = sys.modules.get("sglang.srt.distributed.parallel_state")
    group = None if distributed is None else distributed.get_tp_group()
    if group is None or group.world_size == 1:
        return [mine]
    found: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(found, mine, group=group.cpu_group)
    return found


def _known(caller: Any) -> Receiver | None:
    """What the model of WeightUpdater or ModelRunner has subscribed by."""
    model = caller.get_model() if hasattr(caller, "get_model") else caller.model
    known: tuple[str, Receiver] | None = getattr(model, _RECEIVER, None)
    return None if known is None else known[1]


def _version_in(caller: Any) -> int:
    receiver = _known(caller)
    return 0 if receiver is None else receiver.version


def _forget(caller: Any) -> None:
    """Has the next order fetched by all ranks, also by those that have loaded its version."""
    receiver = _known(caller)
    if receiver is not None:
        receiver.version = 0


def _receiver_of(model: Any, endpoint: str) -> Receiver:
    """The model's subscription. It hangs on the model, whose life it shares."""
    known: tuple[str, Receiver] | None = getattr(model, _RECEIVER, None)
    if known is not None and known[0] == endpoint:
        return known[1]
    if known is not None:
        known[1].close()
        delattr(model, _RECEIVER)
    receiver = subscribe(endpoint, f"sglang-{socket.gethostname()}-{os.getpid()}"[:63])
    setattr(model, _RECEIVER, (endpoint, receiver))
    return receiver


def _loader_of(model: Any) -> RecordedLoader:
    """The model's loader. It hangs on the model, too."""

    def load(weights: Named) -> None:
        with naming(list(weights)) as each:
            model.load_weights(each)

    known: RecordedLoader | None = getattr(model, _LOADER, None)
    if known is None:
        moves = "with enable_eplb SGLang moves experts from one place to another"
        known = RecordedLoader(model, load, moves if _experts_move() else None)
        setattr(model, _LOADER, known)
    return known


def _experts_move() -> bool:
    """Whether SGLang moves experts while it serves (EPLB), or does not say."""
    context = sys.modules.get("sglang.srt.runtime_context")
    arguments = sys.modules.get("sglang.srt.server_args")  # of before
    try:
        if context is not None:
            return bool(context.get_exec().moe.enable_eplb)
        known = getattr(arguments, "get_global_server_args", None)
        return known is not None and bool(getattr(known(), "enable_eplb", False))
    except Exception:
        return True


def _read_order(said: list[tuple[str, torch.Tensor]]) -> tuple[str, int, float]:
    if [name for name, _ in said] != [ORDER]:
        raise InvalidError(
            f"pull takes what refit.integrations.sglang.order makes, and not {len(said)} tensors: "
            f'weights themselves go to load_format="{LOAD}"'
        )
    try:
        read = json.loads(bytes(said[0][1].tolist()))
        return str(read["endpoint"]), int(read["version"]), float(read["timeout"])
    except (ValueError, TypeError, KeyError, AttributeError) as why:
        raise InvalidError(f"pull cannot read the order ({why!r}): use {order.__name__}()") from why


def _only_wraps(named_tensors: Any) -> bool:
    """Whether this is the order of no trainer, with which a driver has SGLang's method wrapped."""
    said = list(named_tensors)
    try:
        return [name for name, _ in said] == [ORDER] and not _read_order(said)[0]
    except InvalidError:
        return False


def _refuse_twice(names: list[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InvalidError(f'weight "{name}" came twice: nothing was loaded')
        seen.add(name)


def _synchronize(model: Any) -> None:
    """Waits until the copies into the model are done."""
    for parameter in model.parameters():
        if parameter.is_cuda:
            torch.cuda.synchronize(parameter.device)
        return


# ---- How SGLang is called


def _in_session(engine: Any, tensors: list[tuple[str, Any]], loader: str) -> str:
    """Makes the call, in a session if this SGLang has them; returns what SGLang says."""
    _check_loaders(engine, loader)
    begin = getattr(engine, "begin_weight_update", None)
    if begin is None:
        return _call(engine, tensors, loader)
    _check(begin())
    try:
        message = _call(engine, tensors, loader)
    finally:
        ended = engine.end_weight_update()
    _check(ended)
    return message


def _check_loaders(engine: Any, loader: str) -> None:
    """StateError: a loader that SGLang does not know would end its scheduler."""
    known = engine if isinstance(engine, Server) else getattr(engine, "server_args", None)
    if loader not in (getattr(known, "custom_weight_loader", None) or []):
        raise StateError(
            f"SGLang was started without {loader}: its engine takes custom_weight_loader="
            "refit.integrations.sglang.LOADERS, its server --custom-weight-loader with these names"
        )


def _call(engine: Any, tensors: list[tuple[str, Any]], loader: str) -> str:
    verb = engine.update_weights_from_tensor
    _check(verb(order(""), load_format=loader, flush_cache=False))
    return _check(verb(tensors, load_format=loader, flush_cache=True))


def _tell_version(engine: Any, version: int) -> None:
    """With each answer SGLang says, where it can, by which version it was made."""
    if isinstance(engine, Server):
        _check(engine.update_weight_version(str(version)))
        return
    tell = getattr(getattr(engine, "tokenizer_manager", None), "update_weight_version", None)
    if tell is not None:
        kind = sys.modules["sglang.srt.managers.io_struct"].UpdateWeightVersionReqInput
        said = kind(new_version=str(version), abort_all_requests=False)
        engine.loop.run_until_complete(tell(said))


def _check(said: Any) -> str:
    """Raises what SGLang's answer ``(success, message)`` says."""
    success, message = said
    if success:
        return str(message)
    found = re.search(r"refit (\w+Error): (.*)", message, re.DOTALL)
    if found is not None:
        kind = getattr(errors, found.group(1), PeerError)
        raise kind(found.group(2))
    if "cache was not flushed" in message:
        raise BusyError(message)
    if "weight-update session" in message or "must run between" in message:
        raise StateError(message)
    raise PeerError(f"SGLang says: {message}")


def _unload(engine: Any, name: str) -> None:
    """Makes the adapter leave, if there is one."""
    said = engine.unload_lora_adapter(name)
    text = str(_field(said, "error_message"))
    if not _field(said, "success") and "does not exist" not in text:
        raise PeerError(f'SGLang kept the adapter "{name}": {text}')


def _field(said: Any, name: str) -> Any:
    return said.get(name) if isinstance(said, Mapping) else getattr(said, name, None)


def _plain_config(peft: Any) -> dict[str, Any]:
    return dict(peft if isinstance(peft, Mapping) else peft.to_dict())


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else str(value)
