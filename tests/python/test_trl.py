"""RefitCallback in TRL's own GRPOTrainer, which is as it comes, on a model made here."""

import functools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import refit

os.environ["HF_HUB_OFFLINE"] = "1"
torch = pytest.importorskip("torch")
pytest.importorskip("trl")

import test_transformers  # noqa: E402
from datasets import Dataset  # noqa: E402
from hooked import calls_refit  # noqa: E402
from refit import Publisher, Subscriber, errors  # noqa: E402
from refit.integrations.trl import RefitCallback  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import PreTrainedTokenizerFast, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer  # noqa: E402

WORDS = ["<pad>", "<eos>", *[f"w{i}" for i in range(14)]]


def a_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def a_model() -> Any:
    return test_transformers.a_model(2, dropout=0.0)


def count_w3(completions: list[str], **_: Any) -> list[float]:
    return [float(completion.split().count("w3")) for completion in completions]


def a_trainer(
    folder: Path,
    callbacks: list[TrainerCallback],
    reward: Callable[..., list[float]] = count_w3,
    kinds: tuple[type[Any], type[Any]] = (GRPOTrainer, GRPOConfig),
    adapters: Any = None,
    **chosen: Any,
) -> GRPOTrainer:
    settings = {
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 5,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        **chosen,
    }
    trainer, config = kinds
    return trainer(
        a_model(),
        reward_funcs=reward,
        args=config(
            str(folder),
            use_cpu=True,
            bf16=False,
            report_to="none",
            disable_tqdm=True,
            **{"gradient_checkpointing": False, **settings},
        ),
        train_dataset=Dataset.from_list([{"prompt": f"w{i} w{i + 1}"} for i in range(8)]),
        eval_dataset=Dataset.from_list([{"prompt": "w1 w2"}]),
        processing_class=a_tokenizer(),
        callbacks=callbacks,
        peft_config=adapters,
    )


def moments(trainer: GRPOTrainer) -> list[torch.Tensor]:
    states = trainer.optimizer.optimizer.state.values()
    return [state[key] for state in states for key in ("exp_avg", "exp_avg_sq")]


def assert_same(one: GRPOTrainer, other: GRPOTrainer) -> None:
    test_transformers.assert_same(one, other)
    assert len(moments(one)) == len(moments(other)) > 0
    assert all(map(torch.equal, moments(one), moments(other)))


class Seen:
    """A training whose reward, which TRL calls right after a generation, looks at the states."""

    def __init__(self, folder: Path, callbacks: list[TrainerCallback], **chosen: Any) -> None:
        self.bytes: list[int] = []
        self.open_step: list[bool] = []
        self.trainer = a_trainer(folder, callbacks, self, **chosen)

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        if self.trainer.optimizer is not None:
            self.bytes.append(sum(m.untyped_storage().nbytes() for m in moments(self.trainer)))
            parameters = self.trainer.model.parameters()
            self.open_step.append(any(p.grad is not None for p in parameters))
        return count_w3(completions)


LOOPS: dict[str, dict[str, Any]] = {
    "a generation for each step": {},
    "a generation for two micro-batches": {"gradient_accumulation_steps": 2},
    "a generation inside an open step": {
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 1,
    },
    "a generation for two steps": {"steps_per_generation": 2},
    "two passes over a generation": {"num_iterations": 2},
    "with evaluations": {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True},
    "epochs that end inside a step, with evaluations": {
        "max_steps": -1,
        "num_train_epochs": 2,
        "gradient_accumulation_steps": 3,
        "steps_per_generation": 1,
        "eval_strategy": "epoch",
    },
}


QUICK = ("a generation for each step", "with evaluations")
MODES: dict[str, dict[str, Any]] = {
    "in cycles": {},
    "in windows": {"schedule": refit.HostStates(window_bytes="64KiB", windows=2)},
    "a share that the CPU steps": {"schedule": refit.CpuStep(fraction=0.5)},
}
FUSED, OF_TENSORS = "adamw_torch_fused", "adamw_torch"

Trained = Callable[..., GRPOTrainer]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Trains without refit; each loop once."""

    @functools.cache
    def trained(loop: str, optimizer: str = FUSED) -> GRPOTrainer:
        made = a_trainer(tmp_path_factory.mktemp("plain"), [], optim=optimizer, **LOOPS[loop])
        made.train()
        return made

    return trained


class Figures(TrainerCallback):
    """What the last step whose copies have ended has moved, after each step."""

    def __init__(self, callback: RefitCallback) -> None:
        self.callback = callback
        self.moved: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        assert self.callback.controller is not None
        self.moved.append(self.callback.controller.stats()["refit/step_in_bytes"])


@pytest.mark.parametrize(
    "loop", [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in LOOPS]
)
@pytest.mark.parametrize(
    ("mode", "optimizer"),
    [*((one, FUSED) for one in MODES), ("a share that the CPU steps", OF_TENSORS)],
)
def test_training_is_the_same_to_the_bit(
    tmp_path: Path, plain: Trained, mode: str, optimizer: str, loop: str
) -> None:
    callback = RefitCallback(**MODES[mode])
    figures = Figures(callback)
    seen = Seen(tmp_path, [callback, figures], optim=optimizer, **LOOPS[loop])
    seen.trainer.train()
    assert_same(plain(loop, optimizer), seen.trainer)
    assert len(seen.bytes) >= 2
    if mode == "in cycles":  # states are away at every generation, and back at the end
        assert set(seen.bytes) == {0}
        assert all(moment.untyped_storage().nbytes() > 0 for moment in moments(seen.trainer))
        logged = [entry for entry in seen.trainer.state.log_history if "loss" in entry]
        assert logged[-1]["refit/offload_bytes"] > 0
        assert all(type(v) is float for one in logged for k, v in one.items() if "refit/" in k)
    if mode == "in windows":  # states are born on the device, and leave
        assert (figures.moved[0], figures.moved[-1] > 64 << 10) == (0, True)


@pytest.mark.parametrize("mode", list(MODES)[1:])
def test_host_states_are_saved_and_loaded_as_without_refit(tmp_path: Path, mode: str) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2}
    for folder, callbacks in (("plain", []), ("host", [RefitCallback(None, MODES[mode])])):
        a_trainer(tmp_path / folder, callbacks, **saving).train()
    paths = [tmp_path / folder / "checkpoint-2" for folder in ("plain", "host")]
    assert_saved_alike(*paths)
    resumed = a_trainer(tmp_path / "again", [RefitCallback(**MODES[mode])])
    resumed.train(resume_from_checkpoint=str(paths[1]))
    straight = a_trainer(tmp_path / "straight", [])
    straight.train(resume_from_checkpoint=str(paths[0]))
    assert_same(straight, resumed)


def assert_saved_alike(one: Path, other: Path) -> None:
    """With no keys of refit's own."""
    plain, ours = (torch.load(path / "optimizer.pt")["state"] for path in (one, other))
    assert list(plain) == list(ours)
    for number, state in plain.items():
        assert list(state) == list(ours[number])
        assert all(torch.equal(value, ours[number][key]) for key, value in state.items())


@pytest.mark.slow
def test_rloo_generates_at_the_same_moments(tmp_path: Path) -> None:
    loop = {"kinds": (RLOOTrainer, RLOOConfig), "num_iterations": 2, "beta": 0.0}
    plain = a_trainer(tmp_path, [], **loop)
    plain.train()
    seen = Seen(tmp_path, [RefitCallback()], **loop)
    seen.trainer.train()
    assert_same(plain, seen.trainer)
    assert seen.bytes == [0, 0]


def test_trap_11_grads_of_open_step_survive_generation_in_it(
    tmp_path: Path, plain: Trained
) -> None:
    loop = "a generation inside an open step"
    seen = Seen(tmp_path, [RefitCallback()], **LOOPS[loop])
    seen.trainer.train()
    assert seen.open_step == [False, True] * 4
    assert_same(plain(loop), seen.trainer)


@pytest.mark.slow
def test_trap_9_before_the_first_step_there_is_nothing_to_move(tmp_path: Path) -> None:
    callback = RefitCallback()
    callback.close()
    trainer = a_trainer(tmp_path, [callback], max_steps=1)
    trainer.train()
    callback.close()
    callback.close()
    assert callback.controller is None


def test_trap_13_checkpoint_saved_with_states_away_is_whole(tmp_path: Path) -> None:
    loop = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    for folder, callbacks in (("plain", []), ("refit", [RefitCallback()])):
        a_trainer(tmp_path / folder, callbacks, **loop).train()
    for step in (2, 4):
        name = f"checkpoint-{step}"
        assert_saved_alike(tmp_path / "plain" / name, tmp_path / "refit" / name)  # trap 7


@pytest.mark.slow
def test_trap_15_training_resumes_as_without_refit(tmp_path: Path) -> None:
    a_trainer(tmp_path / "a", [], save_strategy="steps", save_steps=2, max_steps=2).train()
    checkpoint = str(tmp_path / "a" / "checkpoint-2")
    plain = a_trainer(tmp_path / "b", [])
    plain.train(resume_from_checkpoint=checkpoint)
    callback, stay = RefitCallback(), []

    class Last(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            assert callback.controller is not None
            stay.append(dict(callback.controller.resident))

    resumed = a_trainer(tmp_path / "c", [callback, Last()])
    resumed.train(resume_from_checkpoint=checkpoint)
    assert_same(plain, resumed)
    # Memory that torch.load gave to CPU tensors cannot be given back: they got other memory.
    assert len(stay) == 2
    assert not [name for name in stay[-1] if "exp_avg" in name]
    assert len(test_transformers.losses(plain)) == 4  # two of them from before


def test_training_leaves_nothing_of_refit_and_returns_states(tmp_path: Path) -> None:
    callback = RefitCallback()
    trainer = a_trainer(tmp_path, [callback])
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert callback.controller is None
    assert all(moment.untyped_storage().nbytes() > 0 for moment in moments(trainer))
    assert not calls_refit(optimizer.step)
    assert not calls_refit(optimizer.state_dict)
    assert not calls_refit(lambda: trainer.model(torch.ones(1, 2, dtype=torch.int64)))


@pytest.mark.slow
def test_a_second_training_and_evaluations_of_ones_own_work(tmp_path: Path) -> None:
    trainers = []
    for callbacks in ([], [RefitCallback()]):
        trainer = a_trainer(tmp_path, callbacks, max_steps=2, steps_per_generation=2)
        trainer.train()
        trainer.evaluate()
        trainer.train()
        trainers.append(trainer)
    assert_same(*trainers)


def test_states_can_be_trained_on_after_exception(
    tmp_path: Path,
) -> None:
    def fails_once(completions: list[str], **_: Any) -> list[float]:
        calls.append(len(calls))
        if calls[-1] == 2:
            raise ZeroDivisionError("no reward this time")
        return count_w3(completions)

    trainers = []
    callback = RefitCallback()
    for callbacks in ([], [callback]):
        calls: list[int] = []
        trainer = a_trainer(tmp_path, callbacks, fails_once)
        with pytest.raises(ZeroDivisionError):
            trainer.train()
        callback.close()
        if callbacks:
            assert all(moment.untyped_storage().nbytes() > 0 for moment in moments(trainer))
        trainer.train()
        trainers.append(trainer)
    assert_same(*trainers)


@pytest.mark.slow
def test_states_are_away_at_generations_even_if_count_is_wrong(
    tmp_path: Path,
) -> None:
    seen = Seen(tmp_path, [], max_steps=3, steps_per_generation=2)
    seen.trainer.train()
    seen.bytes.clear()
    callback = RefitCallback()
    seen.trainer.add_callback(callback)  # too late to have counted: the trainer is at an odd step
    seen.trainer.train()
    callback.close()
    assert len(seen.bytes) >= 1
    assert set(seen.bytes) == {0}


@pytest.mark.slow
def test_step_failing_after_its_count_keeps_generations_in_step(
    tmp_path: Path,
) -> None:
    class FailsOnce(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1 and not failed:
                failed.append(1)
                raise ZeroDivisionError("only the trainer has counted this micro-batch")

    failed: list[int] = []
    callback = RefitCallback()
    seen = Seen(tmp_path, [callback, FailsOnce()], steps_per_generation=2)
    with pytest.raises(ZeroDivisionError):
        seen.trainer.train()
    callback.close()
    seen.trainer.train()
    assert len(seen.bytes) == 3
    assert set(seen.bytes) == {0}


def test_invalid_settings_are_refused_before_trainer_exists() -> None:
    with pytest.raises(errors.NotFoundError, match="no_such"):
        RefitCallback(offload_no_such=1)
    with pytest.raises(errors.InvalidError, match="keep"):
        RefitCallback(grads="lose")  # type: ignore[arg-type]


def test_trainer_without_known_generations_is_refused(
    tmp_path: Path,
) -> None:
    from transformers import Trainer, TrainingArguments

    trainer = Trainer(
        a_model(),
        TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", max_steps=1),
        train_dataset=[{"input_ids": [2, 3], "labels": [2, 3]}] * 8,
        callbacks=[RefitCallback()],
    )
    with pytest.raises(errors.UnsupportedError, match=r"steps_per_generation.*TRL 1\.16"):
        trainer.train()


@pytest.mark.slow
def test_attached_callback_logs_before_earlier_reporters(
    tmp_path: Path,
) -> None:
    class Reporter(TrainerCallback):
        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            logged.append(dict(logs))

    logged: list[dict[str, float]] = []
    callback = RefitCallback()
    seen = Seen(tmp_path, [Reporter(), callback], eval_strategy="steps", eval_steps=1)
    callback.attach(seen.trainer)
    callback.attach(seen.trainer)
    assert seen.trainer.callback_handler.callbacks.count(callback) == 1
    seen.trainer.train()
    assert "refit/offload_bytes" in logged[-2]
    assert set(seen.bytes) == {0}  # evaluations are still seen to come


class Worker:
    """A rollout worker on a thread of this test: what it was given, version by version."""

    def __init__(self, publisher: Publisher, refuse: int = 0) -> None:
        self.held: list[tuple[int, dict[str, torch.Tensor]]] = []
        self._refuse = refuse
        self._subscriber = Subscriber(publisher.endpoint, worker="rollout")
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        publisher.wait_workers(1, 30.0)

    def _run(self) -> None:
        for update in self._subscriber:
            try:
                with update:
                    if update.version == self._refuse:
                        raise ValueError("this engine cannot")
                    self.held.append((update.version, dict(update.tensors(copy=True))))
            except ValueError:
                continue

    def close(self) -> None:
        self._subscriber.close()
        self._thread.join()


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    with Publisher("tcp://127.0.0.1:0") as opened:
        yield opened


LEAVING = {"host_bytes": "8MiB", "min_bytes": "1KiB", "aim": "memory", "keep_last": 0}


@pytest.mark.parametrize(
    "loop",
    [
        pytest.param({}),
        pytest.param({"gradient_accumulation_steps": 2}, marks=pytest.mark.slow),
        pytest.param({"num_iterations": 2}, marks=pytest.mark.slow),
        pytest.param({"gradient_checkpointing": True}, marks=pytest.mark.slow),
        pytest.param(
            {
                "gradient_checkpointing": True,
                "gradient_checkpointing_kwargs": {"offload": True, "use_reentrant": False},
            }
        ),
    ],
    ids=str,
)
def test_activations_leave_with_the_states(tmp_path: Path, loop: dict[str, Any]) -> None:
    kwargs = dict(loop.get("gradient_checkpointing_kwargs", {}))
    kwargs.pop("offload", None)
    alone = {**loop, "gradient_checkpointing_kwargs": kwargs} if kwargs else loop
    plain = a_trainer(tmp_path, [], **alone)
    plain.train()
    callback = RefitCallback(activations=LEAVING)
    seen = Seen(tmp_path, [callback], **loop)
    seen.trainer.train()
    assert_same(plain, seen.trainer)
    assert set(seen.bytes) == {0}
    left = "refit/activation_left_bytes_last"
    steps = [entry for entry in seen.trainer.state.log_history if "loss" in entry]
    assert all(entry[left] > 0 for entry in steps)
    assert steps[-1]["refit/offload_bytes"] > 0
    assert callback.activations is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "chosen", [{"schedule": refit.HostStates()}, {"schedule": refit.CpuStep(fraction=0.5)}], ids=str
)
def test_activations_share_a_budget_with_states_on_the_host(
    tmp_path: Path, chosen: dict[str, Any]
) -> None:
    plain = a_trainer(tmp_path, [], max_steps=2)
    plain.train()
    ours = a_trainer(tmp_path, [RefitCallback(activations=LEAVING, **chosen)], max_steps=2)
    ours.train()
    assert_same(plain, ours)
    callback = RefitCallback(activations=LEAVING, offload_budget_bytes="8MiB", **chosen)
    trainer = a_trainer(tmp_path, [callback], max_steps=2)
    with pytest.raises(errors.BudgetError, match=r"offload\.budget_bytes"):
        trainer.train()
    callback.close()


def test_activations_without_host_memory_end_training_at_start(tmp_path: Path) -> None:
    callback = RefitCallback(activations={})
    trainer = a_trainer(tmp_path, [callback])
    with pytest.raises(errors.ConfigError, match="host_bytes"):
        trainer.train()
    assert callback.controller is None
    assert not calls_refit(lambda: trainer.model(torch.ones(1, 2, dtype=torch.int64)))


@pytest.mark.parametrize("beta", [0.0, pytest.param(0.1, marks=pytest.mark.slow)])
def test_workers_get_merged_weights_of_policy_with_adapters(
    tmp_path: Path, publisher: Publisher, beta: float
) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")

    def adapters() -> Any:
        return peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"])

    plain = a_trainer(tmp_path, [], adapters=adapters(), beta=beta)
    plain.train()
    worker = Worker(publisher)
    policies: list[dict[str, torch.Tensor]] = []

    class Keeps(Seen):
        def __call__(self, completions: list[str], **_: Any) -> list[float]:
            policies.append({n: one.clone() for n, one in self.trainer.model.state_dict().items()})
            return super().__call__(completions)

    seen = Keeps(tmp_path, [RefitCallback(publisher)], adapters=adapters(), beta=beta)
    try:
        seen.trainer.train()
    finally:
        worker.close()
    assert_same(plain, seen.trainer)
    assert set(seen.bytes) == {0}
    assert len(worker.held) == len(policies) == 4
    for (_, held), policy in zip(worker.held, policies, strict=True):
        other = peft.get_peft_model(a_model(), adapters())
        assert other.load_state_dict(policy, strict=False).missing_keys == []
        merged = other.merge_and_unload().state_dict()
        assert held.keys() == merged.keys() == a_model().state_dict().keys()
        assert all(torch.equal(merged[name], one) for name, one in held.items())
    first, last = worker.held[0][1], worker.held[-1][1]
    changed = {name for name, one in first.items() if not torch.equal(one, last[name])}
    assert len(changed) == 4, changed
    assert all("q_proj" in name or "down_proj" in name for name in changed)


@pytest.mark.parametrize(
    ("loop", "versions"),
    [
        pytest.param("a generation for each step", 4),
        pytest.param("a generation inside an open step", 4, marks=pytest.mark.slow),
        pytest.param("a generation for two steps", 2, marks=pytest.mark.slow),
        pytest.param("with evaluations", 5),
    ],
)
def test_workers_hold_generating_policy_at_each_generation(
    tmp_path: Path, publisher: Publisher, loop: str, versions: int
) -> None:
    worker = Worker(publisher)
    generations = 0

    def compare(completions: list[str], **_: Any) -> list[float]:
        nonlocal generations
        generations += 1
        policy, (_version, held) = trainer.model.state_dict(), worker.held[-1]
        assert policy.keys() == held.keys()
        assert all(torch.equal(tensor, held[name]) for name, tensor in policy.items())
        return count_w3(completions)

    trainer = a_trainer(tmp_path, [RefitCallback(publisher)], compare, **LOOPS[loop])
    trainer.train()
    worker.close()
    assert generations >= versions
    assert [version for version, _held in worker.held] == list(range(1, versions + 1))
    assert publisher.version == versions


class StopsAfterTwo(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= 2


def test_failing_worker_ends_training_and_leaves_states_whole(
    tmp_path: Path, publisher: Publisher
) -> None:
    worker = Worker(publisher, refuse=3)
    callback = RefitCallback(publisher)
    trainer = a_trainer(tmp_path, [callback])
    with pytest.raises(errors.PeerError, match=r"rollout.*this engine cannot"):
        trainer.train()
    callback.close()
    worker.close()
    plain = a_trainer(tmp_path, [StopsAfterTwo()])
    plain.train()
    assert_same(plain, trainer)
    assert len(test_transformers.losses(trainer)) == 2


@pytest.mark.slow
def test_what_is_published_can_be_chosen(tmp_path: Path, publisher: Publisher) -> None:
    def only_the_head(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        yield "head", model.lm_head.weight

    worker = Worker(publisher)
    a_trainer(tmp_path, [RefitCallback(publisher, weights=only_the_head)], max_steps=1).train()
    worker.close()
    assert [list(held) for _version, held in worker.held] == [["head"]]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "weights with and without refit: the same to the bit"),
        (["--workers", "2"], "in 2 workers"),
        (["--activations"], "MB activations"),
    ],
    ids=["own generation", "workers", "activations"],
)
def test_the_example_runs(root: Path, options: list[str], said: str) -> None:
    example = [sys.executable, str(root / "examples" / "grpo_trl.py"), "--steps", "12", *options]
    done = subprocess.run(example, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    assert ("ms publish" in done.stdout) == ("--workers" in options)
    if "--activations" in options:
        assert "the same to the bit" in done.stdout
        assert float(done.stdout.split("\n")[1].split()[-1]) > 0
