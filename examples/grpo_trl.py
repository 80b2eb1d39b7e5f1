#!/usr/bin/env python3
"""TRL's own GRPOTrainer with refit: one callback, and the trainer stays as it is.

    python examples/grpo_trl.py               # trains with refit and without, and compares the bits
    python examples/grpo_trl.py --workers 2   # processes that hold the weights sample with them
    python examples/grpo_trl.py --activations # activations leave until the backward pass, too

The task: a prompt is a digit, the answer is the digit that follows. The model, the tokenizer and
the data are made here. While TRL generates, the optimizer's states are not on the device (here: the
host's memory, where the same happens); they are back by the optimizer's step. Lines show that per
step. With workers, each new version of the weights goes to all of them as one, before they sample.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import refit
from grpo_trl_worker import WORDS, digest, run_worker, tiny_model

# All that the tiny model saves may leave; larger ones keep small tensors, and the last layer's.
ACTIVATIONS = {"host_bytes": "8MiB", "min_bytes": "1KiB", "keep_last": 0, "aim": "memory"}


def follows(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """The reward: 1 for the digit that follows, 0 for all else. Chance is 0.08."""
    pairs = zip(prompts, completions, strict=True)
    return [float(said.strip() == str((int(digit) + 1) % 10)) for digit, said in pairs]


def tokenizer() -> Any:
    """Twelve words, made here."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


class Fleet:
    """The worker processes, and the function by which TRL asks them for completions."""

    def __init__(self, count: int, endpoint: str) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        self.held = ""
        for index in range(count):
            ours, theirs = spawn.Pipe()
            arguments = (f"worker-{index}", endpoint, theirs, index)
            process = spawn.Process(target=run_worker, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def complete(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """TRL's rollout_func: shares the prompts out, and looks at what weights answered."""
        ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        count = len(self.pipes)
        for index, pipe in enumerate(self.pipes):
            pipe.send(ids[index::count])
        answers = [pipe.recv() for pipe in self.pipes]
        policy = digest(trainer.model.named_parameters())
        if any(held != policy for _, held, _ in answers):
            raise SystemExit(f"a worker does not hold the policy {policy}: {answers}")
        self.held = f"version {answers[0][0]} = {policy} in {count} workers"
        completions: list[Any] = [None] * len(ids)
        for index, (_, _, sampled) in enumerate(answers):
            completions[index::count] = sampled
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}

    def close(self) -> None:
        """Ends the processes: a worker whose pipe is closed has nothing to wait for."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join()


def trainer_of(folder: str, steps: int, callbacks: list[Any], rollouts: Any = None) -> Any:
    """TRL's trainer, as it comes."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    return GRPOTrainer(
        tiny_model(),
        reward_funcs=follows,
        args=GRPOConfig(
            folder,
            max_steps=steps,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            per_device_train_batch_size=80,
            num_generations=8,
            max_completion_length=1,
            logging_steps=1,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([{"prompt": str(digit)} for digit in range(10)]),
        processing_class=tokenizer(),
        callbacks=callbacks,
        rollout_func=rollouts,
    )


def printer(fleet: Fleet | None) -> Any:
    """A callback that shows one line for every tenth step."""
    from transformers import TrainerCallback

    class Printer(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
            step = state.global_step
            if "reward" in logs and (step % 10 == 0 or step <= 2):
                away = logs["refit/offload_bytes"] / 1e6
                wait = logs["refit/restore_blocked_s"] * 1e3
                left = logs.get("refit/activation_left_bytes_last")
                room = "" if left is None else f"{left / 1e6:14.2f} "
                held = fleet.held if fleet else ""
                sent = f"{logs['refit/publish_s'] * 1e3:11.3f}  {held}" if fleet else ""
                line = f"{step:4} {logs['reward']:7.2f} {away:12.2f} {wait:11.3f} {room}{sent}"
                print(line.rstrip())

    return Printer()


def quiet() -> None:
    """What the libraries would say about their own future is not about this example."""
    import warnings

    import torch
    from transformers.utils import logging

    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)


def same_bits(one: Any, other: Any) -> bool:
    """Whether both have the same weights."""
    return digest(one.model.named_parameters()) == digest(other.model.named_parameters())


def train(folder: str, steps: int, workers: int, activations: bool) -> Any:
    """Trains with refit; with workers, they are sent the weights and sample."""
    from refit.integrations.trl import RefitCallback
    from transformers import PrinterCallback

    publisher = refit.Publisher("user://*") if workers else None
    fleet = Fleet(workers, publisher.endpoint) if publisher else None
    callback = RefitCallback(
        publisher,
        activations=ACTIVATIONS if activations else None,
        use_pinned_optimizer_offload=True,
    )
    rollouts = fleet.complete if fleet else None
    trainer = trainer_of(folder, steps, [callback, printer(fleet)], rollouts)
    trainer.remove_callback(PrinterCallback)
    shown = ("  MB activations" if activations else "") + ("  ms publish" if fleet else "")
    print("step  reward  MB offloaded  ms blocked" + shown)
    try:
        if publisher:
            publisher.wait_workers(workers, 120.0)
        trainer.train()
    finally:
        callback.close()
        if publisher and fleet:
            fleet.close()
            publisher.close()
    return trainer


def reward_of(trainer: Any) -> float:
    """The mean reward of the last ten steps."""
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry][-10:]
    return sum(rewards) / len(rewards)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--workers", type=int, default=0, help="processes that sample (0: TRL does)"
    )
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps (80)")
    parser.add_argument(
        "--activations", action="store_true", help="they leave until the backward pass"
    )
    chosen = parser.parse_args()
    quiet()
    with tempfile.TemporaryDirectory() as folder:
        ours = train(folder, chosen.steps, chosen.workers, chosen.activations)
        print(f"reward {reward_of(ours):.2f} over the last ten steps; 1.00 is the most")
        if chosen.workers:
            return 0
        from transformers import PrinterCallback

        plain = trainer_of(folder, chosen.steps, [])
        plain.remove_callback(PrinterCallback)
        plain.train()
        same = same_bits(ours, plain)
    print(f"weights with and without refit: {'the same to the bit' if same else 'DIFFERENT'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
