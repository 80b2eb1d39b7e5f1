"""An engine's loader loads the first version, is recorded, and rests from then on."""

import logging
from typing import Any

import pytest
import refit
import torch
from broadcasting import Trainer
from refit.integrations import _recorded
from refit.integrations._receiver import Receiver
from refit.integrations._recorded import RecordedLoader


class Engine(torch.nn.Module):
    """Fuses two tensors; `scale` makes it compute."""

    def __init__(self, scale: float | None = None) -> None:
        super().__init__()
        self.fused = torch.nn.Parameter(torch.zeros(4, 3))
        self.scale = scale
        self.calls: list[str] = []  # a number would be put back

    @property
    def loads(self) -> int:
        return len(self.calls)

    def load_weights(self, weights: Any) -> None:
        self.calls.append("load")
        for name, tensor in weights:
            if name == "head":  # as loaders of tied models do
                continue
            rows = self.fused.data[:2] if name == "a" else self.fused.data[2:]
            rows.copy_(tensor if self.scale is None else tensor * self.scale)

    def is_version(self, value: float, scale: float = 1) -> bool:
        return bool(
            (self.fused[:2] == value * scale).all() & (self.fused[2:] == -value * scale).all()
        )


def weights(value: float, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {"a": torch.full((2, 3), value, dtype=dtype), "b": torch.full((2, 3), -value).to(dtype)}


def load(trainer: Trainer, loader: RecordedLoader, version: Any) -> None:
    with trainer.offer(version) as update:
        loader.load(update)
    loader.learn(receiver_of(trainer))


def receiver_of(trainer: Trainer) -> Receiver:
    return Receiver(lambda: trainer.subscriber, "")


def test_the_loader_rests_once_it_is_recorded(
    trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine()
    loader = RecordedLoader(engine, engine.load_weights)
    with caplog.at_level(logging.INFO, "refit"):
        for value in (1, 2, 3):
            load(trainer, loader, weights(value))
            assert engine.is_version(value)
            assert engine.loads == 3  # one version, and twice to record
    assert [one for one in caplog.messages if "own loader" in one] == [
        "versions are loaded without the engine's own loader: "
        "<refit.Parts: 2 tensors in 2 parts to 1 places>"
    ]


def test_a_loader_that_computes_loads_each_version(
    trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(scale=2)
    loader = RecordedLoader(engine, engine.load_weights)
    with caplog.at_level(logging.INFO, "refit"):
        for number, value in enumerate((1, 2, 3)):
            load(trainer, loader, weights(value))
            assert engine.is_version(value, 2)
            assert engine.loads == 2 + number  # one attempt to record
    (said,) = [one for one in caplog.messages if "own loader" in one]
    assert "each version is loaded by" in said
    assert "fused what mul makes of a" in said


def test_a_version_of_another_kind_is_loaded_and_recorded_again(trainer: Trainer) -> None:
    engine = Engine()
    loader = RecordedLoader(engine, engine.load_weights)
    load(trainer, loader, weights(1))
    load(trainer, loader, weights(2, torch.bfloat16))
    assert engine.is_version(2)
    assert engine.loads == 6
    engine.fused.data = engine.fused.data.clone()  # the model has moved
    load(trainer, loader, weights(3, torch.bfloat16))
    assert engine.is_version(3)
    assert engine.loads == 9
    load(trainer, loader, weights(4, torch.bfloat16))
    assert engine.is_version(4)
    assert engine.loads == 9


def test_a_loader_that_fails_to_be_recorded_is_not_asked_again(trainer: Trainer) -> None:
    engine = Engine()

    def fails(pairs: Any) -> None:
        if engine.loads > 0:
            engine.calls.append("fail")
            raise MemoryError("no room")
        engine.load_weights(pairs)

    loader = RecordedLoader(engine, fails)
    load(trainer, loader, weights(1))
    assert engine.is_version(1)
    assert engine.loads == 2
    loader.learn(receiver_of(trainer))
    assert engine.loads == 2
    with pytest.raises(MemoryError), trainer.offer(weights(2)) as update:
        loader.load(update)


@pytest.mark.parametrize("tied", [True, False])
def test_a_name_that_the_loader_skips_must_be_tied_to_one_that_it_takes(
    trainer: Trainer, tied: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine()
    loader = RecordedLoader(engine, engine.load_weights)
    with caplog.at_level(logging.INFO, "refit"):
        for number, value in enumerate((1, 2)):
            version = weights(value)
            version["head"] = refit.Alias("a") if tied else version["a"].clone()
            load(trainer, loader, version)
            assert engine.is_version(value)
            assert engine.loads == (3 if tied else 3 + number)
    assert ("it takes nothing of head" in caplog.text) is not tied


def test_a_loader_whose_places_change_is_not_recorded(
    trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine()
    loader = RecordedLoader(engine, engine.load_weights, "experts move")
    with caplog.at_level(logging.INFO, "refit"):
        for value in (1, 2):
            load(trainer, loader, weights(value))
            assert engine.loads == value
    assert "each version is loaded by the engine's own loader: experts move" in caplog.text


def test_what_does_not_fit_the_host_is_not_recorded(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    needed = 3 * weights(0)["a"].nbytes * 2  # the model, and twice its largest storage
    for available, loads in ((needed - 1, 1), (needed, 3)):
        monkeypatch.setattr(_recorded, "available_bytes", lambda there=available: there)
        engine = Engine()
        with caplog.at_level(logging.INFO, "refit"):
            load(trainer, RecordedLoader(engine, engine.load_weights), weights(1))
        assert engine.loads == loads
    assert "recording takes 0.0 GB of host memory" in caplog.text
