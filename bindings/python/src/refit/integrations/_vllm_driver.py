"""Where a vLLM engine is driven: its workers connect, update and leave, and a failure is raised.

An update is one call of all workers (_vllm_extension.py), and after it the caches are emptied that
were computed with the weights before. ``LLM`` blocks; ``AsyncLLM`` is paused meanwhile, so that no
request is computed in part with these and in part with those weights and caches. Both take the same
steps, which are written once, as generators.
"""

import importlib
import inspect
import json
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from refit import errors
from refit.errors import InvalidError, PeerError, RefitError, StateError
from refit.integrations._receiver import words_of

Returned = TypeVar("Returned")
Steps = Generator[Callable[[], Any], Any, Returned]
"""Calls of the engine, one after another; what each returns is sent back."""

EXTENSION = "refit.integrations.vllm.RefitWorkerExtension"


def refit_connect(
    engine: Any,
    endpoint: str,
    *,
    worker: str | None = None,
    config: Mapping[str, Any] | str | None = None,
    lora: Mapping[str, Any] | None = None,
) -> list[str]:
    """Subscribes all workers of a vLLM ``LLM`` to the trainer; returns their names.

    Returns at once, whether or not the trainer is there; again moves them to another. `worker`
    names them (with ``-rank0``, ... where there are several; None: after host and process),
    `config` has refit's own options. `lora`: the trainer publishes an adapter alone
    (``named_weights(model, lora="adapter")``), as `lora_adapter` describes it. StateError (an
    engine without the extension, or that takes no adapters), UnsupportedError (a quantized model),
    and what Subscriber raises.
    """
    return _run(engine, _connecting(engine, endpoint, worker, config, lora))


def refit_update(
    engine: Any,
    version: int | None = None,
    timeout: float | None = None,
    *,
    reset_running_requests: bool = True,
) -> int:
    """Loads the trainer's next version (at least `version`) into a vLLM ``LLM``; returns its
    number.

    All workers of the engine switch to it, or none does. Then the prefix cache is emptied, that of
    a KV connector and of encoders too; requests that are under way are computed anew with the new
    weights (False: StateError if there are any, with the version loaded). A `version` that is
    loaded already is loaded again, if the trainer has no later one. Blocks, at most `timeout`
    seconds for the version (None: 600). The trainer's publish has to be under way beside it, in
    another process or thread.

    DeadlineError and StateError leave the version before in use. PeerError has the words of vLLM: a
    load failed, and all workers say version 0; some layers are new then, so generate nothing before
    the next update, which brings the trainer's version whole (say `version`, if it has published
    another one). An adapter that fails to load leaves the one before. Or the engine is dead.
    """
    return _run(engine, _updating(engine, version, timeout, reset_running_requests))


def refit_version(engine: Any) -> int:
    """The version that all workers of a vLLM ``LLM`` have loaded whole; 0 for none."""
    return _run(engine, _asking(engine))


def refit_close(engine: Any) -> None:
    """Leaves the trainer; the weights stay. Idempotent."""
    _run(engine, _closing(engine))


async def refit_connect_async(
    engine: Any,
    endpoint: str,
    *,
    worker: str | None = None,
    config: Mapping[str, Any] | str | None = None,
    lora: Mapping[str, Any] | None = None,
) -> list[str]:
    """As refit_connect, for ``AsyncLLM``."""
    return await _run_async(engine, _connecting(engine, endpoint, worker, config, lora))


async def refit_update_async(
    engine: Any,
    version: int | None = None,
    timeout: float | None = None,
    *,
    reset_running_requests: bool = True,
) -> int:
    """As refit_update, for ``AsyncLLM``, which is paused meanwhile: requests wait, and go on."""
    steps = _updating(engine, version, timeout, reset_running_requests)
    return await _run_async(engine, _paused(engine, steps))


async def refit_version_async(engine: Any) -> int:
    """As refit_version, for ``AsyncLLM``."""
    return await _run_async(engine, _asking(engine))


async def refit_close_async(engine: Any) -> None:
    """As refit_close, for ``AsyncLLM``."""
    await _run_async(engine, _closing(engine))


def lora_adapter(peft: Any, name: str = "refit", id: int = 1) -> dict[str, Any]:
    """Describes an adapter for refit_connect: `peft` is PEFT's configuration of it
    (``model.peft_config["default"]``, a mapping, or the path of an adapter_config.json).

    Requests use it by ``LoRARequest(name, id, "refit")`` once a version is loaded; it keeps one of
    the engine's max_loras. Adapters that vLLM cannot take are refused at the first update.
    """
    if isinstance(peft, str | Path):
        text = Path(peft).read_text()
    else:
        plain = peft if isinstance(peft, Mapping) else peft.to_dict()
        text = json.dumps(dict(plain), default=_plain)
    return {"name": name, "id": id, "peft": text}


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else str(value)


# ---- The steps


def _connecting(
    engine: Any,
    endpoint: str,
    worker: str | None,
    config: Mapping[str, Any] | str | None,
    lora: Mapping[str, Any] | None,
) -> Steps[list[str]]:
    _check_extension(engine)
    options = None if config is None or isinstance(config, str) else dict(config)
    said = {
        "endpoint": endpoint,
        "worker": worker,
        "config": config if options is None else options,
        "lora": None if lora is None else dict(lora),
    }
    answers = yield from _ask(engine, "refit_connect", said)
    return [answer["worker"] for answer in answers]


def _updating(
    engine: Any, version: int | None, timeout: float | None, reset_running: bool
) -> Steps[int]:
    _check_extension(engine)
    said = {"version": version, "timeout": timeout}
    answers = yield from _ask(engine, "refit_update", said)
    loaded: int = answers[0]["version"]
    yield from _empty_caches(engine, loaded, reset_running)
    yield from _tell_version(engine, loaded)
    return loaded


def _paused(engine: Any, steps: Steps[int]) -> Steps[int]:
    """Around the steps no request is computed, as long as this vLLM can keep them meanwhile."""
    taken = inspect.signature(engine.pause_generation).parameters
    if "mode" not in taken or (yield engine.is_paused):
        return (yield from steps)
    yield lambda: engine.pause_generation(mode="keep", clear_cache=False)
    try:
        return (yield from steps)
    finally:
        yield engine.resume_generation


def _asking(engine: Any) -> Steps[int]:
    _check_extension(engine)
    versions = yield from _call(engine, "refit_version", {})
    return versions[0] if len(set(versions)) == 1 else 0


def _closing(engine: Any) -> Steps[None]:
    _check_extension(engine)
    yield from _ask(engine, "refit_close", {})


def _ask(engine: Any, method: str, said: dict[str, Any]) -> Steps[list[dict[str, Any]]]:
    """What all workers answer. Raises the first failure, as the class that it was."""
    answers: list[dict[str, Any]] = yield from _call(engine, method, said)
    for answer in answers:
        if "error" in answer:
            kind: type[RefitError] = getattr(errors, answer["error"])
            raise kind(f"{answer['why']} ({answer['worker']} of the engine)")
    return answers


def _call(engine: Any, method: str, said: dict[str, Any]) -> Steps[list[Any]]:
    try:
        answers: list[Any] = yield lambda: engine.collective_rpc(method, kwargs=said)
    except RefitError:
        raise
    except Exception as why:
        raise PeerError(f"the engine did not answer: {words_of(why)}") from why
    return answers


def _tell_version(engine: Any, version: int) -> Steps[None]:
    """With each answer vLLM says, where it can, by which version it was made."""
    inner = _inner(engine)
    tell = getattr(inner, "update_weight_version", None) or getattr(
        inner, "set_weight_version", None
    )
    if tell is not None:
        yield lambda: tell(str(version))


def _empty_caches(engine: Any, version: int, reset_running: bool) -> Steps[None]:
    """What was computed with other weights: blocks of prompts, there and in a KV connector, and
    what encoders gave."""
    taken = inspect.signature(engine.reset_prefix_cache).parameters
    said: dict[str, bool] = {}
    if "reset_running_requests" in taken:
        said["reset_running_requests"] = reset_running
    if "reset_connector" in taken and _config_of(engine).kv_transfer_config is not None:
        said["reset_connector"] = True
    if (yield lambda: engine.reset_prefix_cache(**said)) is False:
        raise StateError(
            f"version {version} is loaded, but requests are under way, and the prefix cache keeps "
            "blocks of the version before: end these requests, then call reset_prefix_cache"
        )
    holder = engine if hasattr(engine, "reset_encoder_cache") else _inner(engine)
    if hasattr(holder, "reset_encoder_cache"):
        yield holder.reset_encoder_cache


# ---- The engine


def _inner(engine: Any) -> Any:
    """The LLMEngine of an LLM; AsyncLLM itself."""
    return getattr(engine, "llm_engine", engine)


def _config_of(engine: Any) -> Any:
    return _inner(engine).vllm_config


def _check_extension(engine: Any) -> None:
    """StateError: a method that a worker does not have would leave its answers out of step."""
    name = _config_of(engine).parallel_config.worker_extension_cls
    if name != EXTENSION and not _is_extension(name):
        raise StateError(
            f'the engine was made without refit: say worker_extension_cls="{EXTENSION}"'
            + (f", or let {name} inherit it" if name else "")
        )


def _is_extension(name: str) -> bool:
    from refit.integrations._vllm_extension import RefitWorkerExtension

    module, _, kind = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), kind)
    except (ImportError, AttributeError, ValueError):
        return False
    return isinstance(found, type) and issubclass(found, RefitWorkerExtension)


def _run(engine: Any, steps: Steps[Returned]) -> Returned:
    if inspect.iscoroutinefunction(engine.collective_rpc):
        raise InvalidError(
            f"{type(engine).__name__} is driven from an event loop: await the function whose name "
            "ends with _async"
        )
    value, raised = None, None
    while True:
        try:
            call = steps.send(value) if raised is None else steps.throw(raised)
        except StopIteration as end:
            returned: Returned = end.value
            return returned
        try:
            value, raised = call(), None
        except BaseException as why:
            value, raised = None, why


async def _run_async(engine: Any, steps: Steps[Returned]) -> Returned:
    if not inspect.iscoroutinefunction(engine.collective_rpc):
        raise InvalidError(
            f"{type(engine).__name__} blocks: call the function without _async at its end"
        )
    value, raised = None, None
    while True:
        try:
            call = steps.send(value) if raised is None else steps.throw(raised)
        except StopIteration as end:
            returned: Returned = end.value
            return returned
        try:
            value, raised = await call(), None
        except BaseException as why:
            value, raised = None, why
