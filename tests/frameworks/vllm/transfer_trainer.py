"""A trainer of its own process: transfer_trainer.py FOLDER [URL].

With the URL of a vLLM server it sends by vLLM's WeightTransferTrainerFactory, without by a
refit.Publisher. Each line of its input is a version to send, as JSON: {"seed": 3, "name": "a",
"fault": "shape"}. Its weights are saved below FOLDER under that name. Each line of its output is
what came of it.
"""

import json
import sys
from inspect import signature
from pathlib import Path
from typing import Any

import models
import torch
from refit import Publisher, named_weights

KIND = "llama"
FAULTY = "model.layers.1.self_attn.k_proj.weight"


def faulty(weights: Any, fault: str | None) -> Any:
    """The weights, with one that vLLM cannot load after others that it can."""
    for name, tensor in weights:
        if name == FAULTY and fault == "shape":
            yield name, torch.zeros(3, 5)
        else:
            yield name, tensor
        if name == FAULTY and fault == "stranger":
            yield "model.layers.1.stranger.weight", torch.zeros(3)


class ByPublisher:
    """Publishes; the inference side is asked to update by the test."""

    def __init__(self) -> None:
        self.publisher = Publisher("user://*")
        self.says = {"endpoint": self.publisher.endpoint}

    def send(self, model: Any, fault: str | None) -> int:
        return self.publisher.publish(list(faulty(named_weights(model), fault)))


class ByFactory:
    """Lets vLLM drive the server and refit's trainer end."""

    def __init__(self, model: Any, url: str) -> None:
        from refit.integrations.vllm import RefitTrainerInitInfo
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        self.source = _source(model)
        self.says: dict[str, Any] = {}
        said = RefitTrainerInitInfo(rank=0, timeout_s=120.0)
        given = {"client": HTTPVLLMWeightSyncClient(url), "source": self.source}
        make = WeightTransferTrainerFactory.trainer_init
        before = ("refit", {}) if "config" in signature(make).parameters else ()  # 0.26
        self.engine = make(*before, said, **given)

    def send(self, model: Any, fault: str | None) -> int:
        self.source.fault = fault
        self.engine.send_weights()
        return self.engine.version


def _source(model: Any) -> Any:
    from vllm.distributed.weight_transfer.base import ModuleSource, ParamMeta

    class Source(ModuleSource):
        """vLLM's own, with a fault."""

        fault: str | None = None

        def metadata(self) -> list[Any]:
            return [ParamMeta(name, one.dtype, tuple(one.shape)) for name, one in self]

        def __iter__(self) -> Any:
            return faulty(super().__iter__(), self.fault)

    return Source(model)


def main(folder: Path, url: str | None) -> None:
    model = models.make(KIND, 1)
    models.save(model, folder / "start")
    trainer = ByFactory(model, url) if url else ByPublisher()
    print(json.dumps(trainer.says), flush=True)
    for line in sys.stdin:
        said = json.loads(line)
        models.change(model, said["seed"])
        models.save(model, folder / said["name"])
        try:
            answer = {"version": trainer.send(model, said.get("fault"))}
        except Exception as why:
            answer = {"error": type(why).__name__, "why": str(why)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:] or [None])
