"""ActivationCallback in the trainers of transformers and TRL, which are as they come; the model is
made here."""

import dataclasses
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from hooked import calls_refit  # noqa: E402
from refit.errors import ConfigError, InvalidError, StateError, UnsupportedError  # noqa: E402
from refit.integrations.transformers import ActivationCallback, RefitCallback  # noqa: E402
from transformers import (  # noqa: E402
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

CHOSEN: dict[str, Any] = {"host_bytes": "8MiB", "min_bytes": "1KiB", "aim": "memory"}


def a_model(layers: int = 4, dropout: float = 0.1) -> LlamaForCausalLM:
    torch.manual_seed(7)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=16,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=2,
            max_position_embeddings=64,
            attention_dropout=dropout,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
    )


def rows(count: int = 16) -> list[dict[str, Any]]:
    made = torch.Generator().manual_seed(3)
    tokens = torch.randint(2, 16, (count, 24), generator=made).tolist()
    return [{"input_ids": row, "labels": row} for row in tokens]


def a_trainer(folder: Path, callbacks: list[TrainerCallback], **chosen: Any) -> Trainer:
    settings = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        **chosen,
    }
    return Trainer(
        a_model(),
        TrainingArguments(
            str(folder), use_cpu=True, report_to="none", disable_tqdm=True, **settings
        ),
        train_dataset=rows(),
        eval_dataset=rows(4),
        callbacks=callbacks,
    )


def losses(trainer: Trainer) -> list[tuple[float, float]]:
    return [(e["loss"], e["grad_norm"]) for e in trainer.state.log_history if "loss" in e]


def assert_same(one: Trainer, other: Trainer) -> None:
    assert losses(one) == losses(other)
    assert len(losses(one)) > 0
    for name, tensor in one.model.state_dict().items():
        assert torch.equal(tensor, other.model.state_dict()[name]), name


def left(trainer: Trainer) -> list[float]:
    """The bytes that left in the forward pass before each line of the log."""
    key = "refit/activation_left_bytes_last"
    return [e[key] for e in trainer.state.log_history if "loss" in e]


def is_hooked(trainer: Trainer) -> bool:
    """Whether a forward pass of the model calls code of refit."""
    with torch.autograd.graph.disable_saved_tensors_hooks("hooks are left"):
        pass  # raises if autograd calls any
    return bool(calls_refit(lambda: trainer.model(torch.ones(1, 2, dtype=torch.int64))))


CHECKPOINTED = {"activation_checkpointing": True}

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "evaluations": {"eval_strategy": "steps", "eval_steps": 2},
    "bf16": {"bf16": True},
    "checkpointing": CHECKPOINTED,
    "reentrant checkpointing": {
        **CHECKPOINTED,
        "activation_checkpointing_kwargs": {"use_reentrant": True},
    },
    "every second layer checkpointed": {
        **CHECKPOINTED,
        "activation_checkpointing_kwargs": {"every_n_layers": 2},
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_a_training_is_the_same_to_the_bit(tmp_path: Path, way: str) -> None:
    plain = a_trainer(tmp_path, [], **WAYS[way])
    plain.train()
    callback = ActivationCallback(**CHOSEN)
    ours = a_trainer(tmp_path, [callback], **WAYS[way])
    ours.train()
    assert_same(plain, ours)
    assert min(left(ours)) > 0
    assert callback.offload is None
    assert not is_hooked(ours)


def test_what_checkpointing_keeps_is_refits_and_not_transformers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kwargs = {"use_reentrant": False}
    plain = a_trainer(tmp_path, [], **CHECKPOINTED, activation_checkpointing_kwargs=dict(kwargs))
    plain.train()
    ours = a_trainer(
        tmp_path,
        [ActivationCallback(**CHOSEN)],
        **CHECKPOINTED,
        activation_checkpointing_kwargs={**kwargs, "offload": True},
    )
    assert ours.args.activation_checkpointing_kwargs == kwargs
    assert 'kwargs["offload"]' in caplog.text
    assert "is refit's from here on" in caplog.text
    ours.train()
    assert_same(plain, ours)
    # A layer's input, in fp32: of three layers, since the last group never leaves.
    assert min(left(ours)) == 3 * 2 * 24 * 32 * 4


def test_callback_added_too_late_refuses_another_offload(tmp_path: Path) -> None:
    trainer = a_trainer(
        tmp_path, [], **CHECKPOINTED, activation_checkpointing_kwargs={"offload": True}
    )
    callback = ActivationCallback(**CHOSEN)
    trainer.add_callback(callback)
    with pytest.raises(UnsupportedError, match=r"is on already.* trainer's constructor"):
        trainer.train()
    assert callback.offload is None
    late = a_trainer(tmp_path, [])
    late.add_callback(callback)
    late.train()
    assert min(left(late)) > 0


def test_layers_and_the_configuration_are_the_callers(tmp_path: Path) -> None:
    def every_second(model: Any) -> Any:
        return list(model.model.layers)[1::2]

    config = {"activations": {"host_bytes": "8MiB", "min_bytes": "1KiB", "aim": "memory"}}
    ours = a_trainer(tmp_path, [ActivationCallback(every_second, config=config)], max_steps=1)
    ours.train()
    assert left(ours)[0] > 0


def test_the_callback_is_used_as_the_page_shows(root: Path, tmp_path: Path) -> None:
    page = (root / "docs" / "activations.md").read_text()
    (block,) = re.findall(r"^```python\n(from refit.integrations.transf.*?)^```", page, re.M | re.S)
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", max_steps=2)
    args.logging_steps = 1
    names = {"model": a_model(), "args": args, "rows": rows(), "Trainer": Trainer}
    exec(block.replace("8GiB", "8MiB"), names)
    key = "refit/activation_saved_bytes_last"
    assert any(key in entry for entry in names["trainer"].state.log_history)


def test_without_host_memory_the_training_does_not_begin(tmp_path: Path) -> None:
    trainer = a_trainer(tmp_path, [ActivationCallback()])
    with pytest.raises(ConfigError, match="host_bytes"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_training_that_fails_can_be_entered_again(tmp_path: Path) -> None:
    class FailsOnce(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1 and not failed:
                failed.append(1)
                raise ZeroDivisionError

    trainers = []
    for callbacks in ([], [ActivationCallback(**CHOSEN)]):
        failed: list[int] = []
        trainer = a_trainer(tmp_path, [*callbacks, FailsOnce()])
        with pytest.raises(ZeroDivisionError):
            trainer.train()
        trainer.train()
        trainers.append(trainer)
    assert_same(*trainers)
    trainers[1].add_callback(StopsAtOnce)
    trainers[1].train()


def test_ctrl_c_in_a_layer_leaves_a_model_that_can_be_trained(tmp_path: Path) -> None:
    trainers = []
    for callbacks in ([], [ActivationCallback(**CHOSEN)]):
        trainer = a_trainer(tmp_path, callbacks)
        seen: list[int] = []

        def press(*_: Any, seen: list[int] = seen) -> None:
            seen.append(1)
            if len(seen) == 2:
                raise KeyboardInterrupt

        trainer.model.model.layers[2].register_forward_pre_hook(press)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        trainer.train()
        assert not is_hooked(trainer)
        trainers.append(trainer)
    assert_same(*trainers)
    assert min(left(trainers[1])) > 0


class StopsAtOnce(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = True


def test_closed_after_a_failure_the_model_has_no_hooks(tmp_path: Path) -> None:
    class Fails(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            raise ZeroDivisionError

    callback = ActivationCallback(**CHOSEN)
    trainer = a_trainer(tmp_path, [callback, Fails()])
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    offload = callback.offload
    assert offload is not None
    callback.close()
    callback.close()
    assert not is_hooked(trainer)
    with pytest.raises(StateError):
        offload.stats()


def test_copies_of_the_model_in_threads_are_refused() -> None:
    callback = ActivationCallback(**CHOSEN)
    args = SimpleNamespace(n_gpu=2)
    with pytest.raises(UnsupportedError, match="start a process for each GPU"):
        callback.on_train_begin(args, None, None, model=a_model(1))


def test_options_taken_over_exist_in_their_packages() -> None:
    from accelerate import FullyShardedDataParallelPlugin
    from refit.integrations import activations as ours

    trl = pytest.importorskip("trl", reason="TRL is not installed")
    kinds = (TrainingArguments, trl.SFTConfig, trl.DPOConfig, FullyShardedDataParallelPlugin)
    known = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    known.add("fsdp_activation_checkpointing_offload")  # as accelerate's launcher has it
    theirs = {"activation_cpu_offload", "enable_activation_offload"}  # of ms-swift and verl
    assert {*ours.SWITCHES, *ours.CHECKPOINTING, ours.FSDP} - theirs <= known


# ---- TRL


def an_sft_trainer(folder: Path, callbacks: list[TrainerCallback], **chosen: Any) -> Any:
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    from datasets import Dataset
    from test_trl import a_tokenizer

    words = [" ".join(f"w{(i + j) % 14}" for j in range(12)) for i in range(8)]
    return trl.SFTTrainer(
        a_model(),
        args=trl.SFTConfig(
            str(folder),
            use_cpu=True,
            bf16=False,
            report_to="none",
            disable_tqdm=True,
            max_steps=3,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            **chosen,
        ),
        train_dataset=Dataset.from_list([{"text": one} for one in words]),
        processing_class=a_tokenizer(),
        callbacks=callbacks,
    )


@pytest.mark.parametrize("checkpointing", [False, True])
def test_trls_own_switch_is_refits(tmp_path: Path, checkpointing: bool) -> None:
    chosen = {"gradient_checkpointing": checkpointing}
    plain = an_sft_trainer(tmp_path, [], **chosen)
    plain.train()
    ours = an_sft_trainer(
        tmp_path, [ActivationCallback(**CHOSEN)], activation_offloading=True, **chosen
    )
    assert type(ours.maybe_activation_offload_context).__name__ == "nullcontext"
    ours.train()
    assert_same(plain, ours)
    assert min(left(ours)) > 0


@pytest.mark.parametrize(("steps", "said"), [(0, "a number from 1 on"), (2, "no publisher")])
def test_invalid_publishing_is_refused_before_trainer_exists(steps: int, said: str) -> None:
    with pytest.raises(InvalidError, match=said):
        RefitCallback(publish_steps=steps)
