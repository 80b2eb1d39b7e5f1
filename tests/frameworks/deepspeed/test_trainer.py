"""RefitCallback in transformers' Trainer with DeepSpeed, and accelerate's own loop around it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engines
import models
import pytest
import refit
import torch
from broadcasting import pair

os.environ["HF_HUB_OFFLINE"] = "1"
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin
from refit.errors import BudgetError, BusyError, InvalidError
from refit.integrations.transformers import RefitCallback
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

SLOW = pytest.mark.slow
ZERO = [pytest.param(1, marks=SLOW), pytest.param(2, marks=SLOW), 3]


def start_anew() -> None:
    """accelerate keeps what the last one chose."""
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    start_anew()


def rows(count: int) -> list[dict[str, Any]]:
    made = torch.Generator().manual_seed(3)
    tokens = torch.randint(2, 32, (count, 16), generator=made).tolist()
    return [{"input_ids": row, "labels": row} for row in tokens]


def config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 60},
    }


class Probe(TrainerCallback):
    """After RefitCallback: what it finds after the steps, and within evaluations."""

    def __init__(self, refitting: RefitCallback, trainer: list[Trainer]) -> None:
        self._refitting = refitting
        self._trainer = trainer
        self.bytes_after: dict[int, int] = {}
        self.bytes_evaluating: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bytes_after[state.global_step] = self._bytes()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bytes_evaluating.append(self._bytes())

    def _bytes(self) -> int:
        """Of the states and masters, on the device."""
        engine = self._trainer[0].model_wrapped
        with refit.states.offloaded_tensor.untouched():
            states = [one for one in engines.states_of(engine) if one.dim()]
            return engines.bytes_on_device([*engines.masters_of(engine), *states])


def a_trainer(folder: Path, stage: int, callbacks: list[Any], **more: Any) -> Trainer:
    start_anew()
    chosen: dict[str, Any] = {
        "max_steps": 10,
        "save_strategy": "no",
        "eval_strategy": "steps",
        "eval_steps": 4,
        **more,
    }
    trainer = Trainer(
        models.make("llama", 5, vocab_size=32, hidden_size=32, intermediate_size=64),
        TrainingArguments(
            str(folder),
            use_cpu=True,
            bf16=True,
            report_to="none",
            disable_tqdm=True,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            logging_steps=1,
            deepspeed=config(stage),
            optim="adamw_torch",
            **chosen,
        ),
        train_dataset=rows(24),
        eval_dataset=rows(4),
        callbacks=callbacks,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def of_log(trainer: Trainer) -> list[float]:
    history = trainer.state.log_history
    return [e[key] for e in history for key in ("loss", "grad_norm", "eval_loss") if key in e]


def ended(trainer: Trainer) -> engines.Trained:
    return engines.result_of(trainer.model_wrapped, of_log(trainer))


def a_plain_training(folder: Path, stage: int, **more: Any) -> engines.Trained:
    trainer = a_trainer(folder, stage, [], **more)
    trainer.train()
    return ended(trainer)


@pytest.mark.parametrize("stage", ZERO)
def test_a_trainer_publishes_and_trains_the_same(stage: int, tmp_path: Path) -> None:
    expected = a_plain_training(tmp_path, stage)
    assert len(expected.losses) > 20
    with pair() as (publisher, worker):
        callback = RefitCallback(publisher, publish_steps=4, **engines.OFF)
        made: list[Trainer] = []
        probe = Probe(callback, made)
        made.append(a_trainer(tmp_path, stage, [callback, probe]))
        made[0].train()
        assert publisher.version == 3  # after steps 4 and 8, and the last one
    engines.assert_same(expected, ended(made[0]))
    assert worker.seen[-1] == engines.bytes_of(engines.weights_of(made[0].model_wrapped))
    assert probe.bytes_after[4] == probe.bytes_after[8] == 0  # published, and an evaluation follows
    assert probe.bytes_after[5] == probe.bytes_after[3] > 0
    assert probe.bytes_evaluating == [0, 0, 0]  # steps 4, 8 and 10
    history = made[0].state.log_history
    assert [entry for entry in history if entry.get("refit/cycles", 0) >= 2]
    assert callback.controller is None


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_while_states_are_away_and_resuming(stage: int, tmp_path: Path) -> None:
    """Step 4 is published, evaluated and saved; a new trainer goes on from there."""
    saving = {"save_strategy": "steps", "save_steps": 4}
    expected = a_plain_training(tmp_path / "plain", stage, **saving)
    with pair() as (publisher, _):
        for resumed in (None, str(tmp_path / "ours" / "checkpoint-4")):
            callback = RefitCallback(publisher, publish_steps=4, **engines.OFF)
            trainer = a_trainer(tmp_path / "ours", stage, [callback], **saving)
            trainer.train(resume_from_checkpoint=resumed)
            engines.assert_same(expected, ended(trainer))
    # and a checkpoint that was written with states away is one for a trainer without refit
    trainer = a_trainer(tmp_path / "ours", stage, [], **saving)
    trainer.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-4"))
    engines.assert_same(expected, ended(trainer))


@pytest.mark.slow
def test_one_callback_that_was_given_twice(tmp_path: Path) -> None:
    expected = a_plain_training(tmp_path, 2)
    with pair() as (publisher, _):
        callback = RefitCallback(publisher, publish_steps=4, **engines.OFF)
        trainer = a_trainer(tmp_path, 2, [callback, callback])
        trainer.train()
        assert publisher.version == 3
    engines.assert_same(expected, ended(trainer))


@pytest.mark.slow
def test_two_callbacks_of_one_trainer(tmp_path: Path) -> None:
    """The second is refused; the first then trains by itself."""
    expected = a_plain_training(tmp_path, 3)
    first, second = (RefitCallback(**engines.OFF) for _ in range(2))
    trainer = a_trainer(tmp_path, 3, [first, second])
    with pytest.raises(BusyError, match="has a controller already"):
        trainer.train()
    assert second.controller is None
    first.close()
    trainer = a_trainer(tmp_path, 3, [first])
    trainer.train()
    engines.assert_same(expected, ended(trainer))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_a_full_host(stage: int, tmp_path: Path) -> None:
    """The budget is too small at the first refit: train() ends there, and nothing has moved."""
    expected = a_plain_training(tmp_path, stage, max_steps=4, eval_strategy="no")
    with pair() as (publisher, _):
        callback = RefitCallback(
            publisher, publish_steps=4, offload_budget_bytes=4096, **engines.OFF
        )
        trainer = a_trainer(tmp_path, stage, [callback], eval_strategy="no")
        with pytest.raises(BudgetError):
            trainer.train()
        assert publisher.version == 0
        callback.close()
    engine = trainer.model_wrapped
    engines.assert_same(expected._replace(losses=[]), engines.result_of(engine, []))
    tokens = torch.tensor([row["input_ids"] for row in rows(2)])
    for _ in range(2):
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()


def an_accelerator(stage: int) -> Accelerator:
    """accelerate takes no DeepSpeed with ``cpu=True``; without a GPU it is on the CPU anyway."""
    start_anew()
    plugin = DeepSpeedPlugin(hf_ds_config={**config(stage), "gradient_accumulation_steps": 1})
    accelerator = Accelerator(deepspeed_plugin=plugin)
    assert accelerator.device.type == "cpu"
    return accelerator


def by_accelerate(stage: int, is_ours: bool, too_early: bool = False) -> engines.Trained:
    """accelerate's loop: refit.Controller of what prepare returned, or of what it was given."""
    accelerator = an_accelerator(stage)
    torch.manual_seed(7)
    model = engines.Language()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    early = refit.Controller(optimizer, **engines.OFF) if too_early else None
    model, optimizer = accelerator.prepare(model, optimizer)
    if early is not None:
        with pytest.raises(BusyError, match="has a controller already"):
            refit.Controller(optimizer, **engines.OFF)
    controller = early or (refit.Controller(optimizer, **engines.OFF) if is_ours else None)
    masters = engines.masters_of(model)
    losses = []
    for step, tokens in enumerate(engines.batches(10)):
        if controller is not None:
            controller.offload()
            assert (engines.bytes_on_device(masters) == 0) is not too_early
            if step % 2:
                controller.restore()
        loss = model(tokens)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if controller is not None:
        assert controller.stats()["refit/cycles"] == 10
        controller.close()
    return engines.result_of(model, losses)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_accelerates_own_loop(stage: int) -> None:
    plain = by_accelerate(stage, False)
    engines.assert_same(plain, by_accelerate(stage, True))


@pytest.mark.slow
def test_an_engine_that_was_not_yet_made() -> None:
    """Before prepare there are no masters that a controller could know: the states alone leave."""
    from accelerate.utils import DummyOptim

    with pytest.raises(InvalidError, match="give the optimizers that step"):
        refit.Controller(DummyOptim(engines.Language().parameters()), **engines.OFF)
    plain = by_accelerate(2, False)
    engines.assert_same(plain, by_accelerate(2, True, too_early=True))
