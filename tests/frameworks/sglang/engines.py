"""A real SGLang engine in a process of its own, so that a test outlives an engine that ends.

What is under test runs there: the functions that drive an engine are called beside it, and what
they return or raise comes back.
"""

import contextlib
import multiprocessing
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import models
import torch
from refit.integrations.sglang import LOADERS
from serving import START_S
from trainers import WAIT_S

PROMPTS = [[1, 5, 6, 7], [1, 9, 10, 40, 41, 42, 43, 44], [1, 200, 17]]
GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}

Outputs = list[tuple[list[int], list[float]]]
"""Of each prompt: the tokens, and the logprobs of these."""


def options_of(path: str, **more: Any) -> dict[str, Any]:
    """For SGLang's Engine on a CPU; the prefix cache is on."""
    return {
        "model_path": path,
        "device": "cpu",
        "attention_backend": "torch_native",
        "disable_cuda_graph": True,
        "max_total_tokens": 2048,
        "max_running_requests": 8,
        "log_level": "error",
        "random_seed": 0,
        **more,
    }


def outputs(engine: Any, **more: Any) -> Outputs:
    answers = engine.generate(
        input_ids=PROMPTS, sampling_params=GREEDY, return_logprob=True, **more
    )
    return [read_answer(one) for one in answers]


def read_answer(answer: dict[str, Any]) -> tuple[list[int], list[float]]:
    logprobs = [float(one[0]) for one in answer["meta_info"]["output_token_logprobs"]]
    return list(answer["output_ids"]), logprobs


def cached_tokens(engine: Any) -> list[int]:
    """How many tokens of each prompt the prefix cache had."""
    answers = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)
    return [one["meta_info"]["cached_tokens"] for one in answers]


def versions(engine: Any) -> set[str] | None:
    """The versions by which SGLang says that it has made its answers; None if it does not say."""
    if not hasattr(engine.tokenizer_manager, "update_weight_version"):
        return None
    answers = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)
    return {one["meta_info"]["weight_version"] for one in answers}


def reload(engine: Any, folder: str) -> Outputs:
    """SGLang's own update from a folder, and what the engine says then."""
    done, why, *_ = engine.update_weights_from_disk(folder)
    assert done, why
    return outputs(engine)


def _serve(pipe: Connection, options: dict[str, Any]) -> None:
    import sglang
    from refit.integrations import sglang as refit_sglang

    ours = {
        "outputs": outputs,
        "cached_tokens": cached_tokens,
        "reload": reload,
        "versions": versions,
    }
    engine = sglang.Engine(**options)
    pipe.send(("returned", None))
    while True:
        name, values, named = pipe.recv()
        if name == "end":
            break
        try:
            if name in ours:
                result = ours[name](engine, *values, **named)
            elif name.startswith("refit_"):
                result = getattr(refit_sglang, name)(engine, *values, **named)
            else:
                result = getattr(engine, name)(*values, **named)
            pipe.send(("returned", result))
        except Exception as why:
            pipe.send(("raised", why))
    engine.shutdown()


class EngineProcess:
    """``engine("refit_update", endpoint, 1)`` calls refit's function there, ``engine("generate",
    ...)`` SGLang's method."""

    def __init__(self, options: dict[str, Any]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs, options))
        self._process.start()
        theirs.close()
        self._receive(START_S)

    def __call__(self, name: str, *values: Any, **named: Any) -> Any:
        self._pipe.send((name, values, named))
        return self._receive(WAIT_S + 60)

    def _receive(self, limit: float) -> Any:
        if not self._pipe.poll(limit):
            raise TimeoutError(f"the engine did not answer in {limit} s")
        how, what = self._pipe.recv()
        if how == "raised":
            raise what
        return what

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(("end", (), {}))
        self._process.join(60)
        if self._process.is_alive():
            self._process.kill()
        self._process.join()


@contextlib.contextmanager
def engine(path: str, **more: Any) -> Iterator[EngineProcess]:
    more.setdefault("custom_weight_loader", LOADERS)
    made = EngineProcess(options_of(path, **more))
    try:
        yield made
    finally:
        made.close()


def outputs_of_fresh(folders: Iterable[str], **more: Any) -> list[Outputs]:
    """What an engine says that was started from the first folder, without refit, and what it says
    when SGLang has loaded each of the others."""
    with engine(next(iter(folders)), custom_weight_loader=None, **more) as fresh:
        return [fresh("outputs"), *(fresh("reload", one) for one in list(folders)[1:])]


def save_versions(folder: Path, kind: str, count: int, **sizes: Any) -> list[str]:
    """Folders with versions 0 to ``count`` of a model, each changed in all its weights."""
    model = models.make(kind, **sizes)
    made = [models.save(model, folder / "0")]
    for version in range(1, count + 1):
        models.change(model, version)
        made.append(models.save(model, folder / str(version)))
    return made


def weights_of(folder: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(Path(folder) / "model.safetensors")
