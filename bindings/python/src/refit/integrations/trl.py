"""refit in TRL's GRPOTrainer (RLOOTrainer, too), by a callback: the trainer stays as it is.

    trainer = GRPOTrainer(..., callbacks=[RefitCallback(use_pinned_optimizer_offload=True)])

TRL generates at the start of a training step, and says nothing of it. But it does so after every
``steps_per_generation * num_iterations`` micro-batches, and the callbacks hear of each micro-batch:
so this one counts them as the trainer does, and at the event just before one that generates it
clears the optimizer states and publishes the weights. It does the same at an evaluation that the
trainer has announced, because an evaluation generates, too. States come back during the first
forward pass that records gradients, which is where generation is over, and the optimizer's step
waits for them. Nothing of the trainer is replaced or wrapped.

``activations={"host_bytes": "8GiB"}`` lets the policy's activations leave too
(``refit.ActivationOffload``), within the same budget of host memory. For TRL's other trainers, such
as SFTTrainer, there is ``refit.integrations.transformers.ActivationCallback``.

It knows nothing of tensors, storages or sockets: it says *when*, and ``refit.Controller`` does it.
"""

from typing import Any

import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from refit.errors import UnsupportedError
from refit.integrations import transformers
from refit.integrations.transformers import Weights, policy_weights

__all__ = ["KNOWN_TO_WORK", "RefitCallback", "Weights", "policy_weights"]

KNOWN_TO_WORK = "TRL 1.16 with transformers 5.23 and accelerate 1.15"


class RefitCallback(transformers.RefitCallback):
    """Takes the states off the device while TRL generates, and publishes the policy's weights.

    Weights are published before a generation, once per optimizer step. The arguments are those of
    ``refit.integrations.transformers.RefitCallback``, without ``publish_steps``; TRL generates
    without states that live on the host. ``grads``: there are some only if TRL generates inside a
    step that accumulates, and then they are needed: ``"keep"``.

    Use one callback for one trainer, and mind what the other says of errors.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        if "publish_steps" in keywords:
            raise UnsupportedError(
                "publish_steps is for trainers that do not generate: before each generation the "
                "workers get the weights of the last step"
            )
        super().__init__(*arguments, **keywords)
        self._micro_batches = 0  # as many as the trainer has trained on since it was made,
        self._counted_all = False  # if this callback has been there all the time
        self._is_training = False

    # ---- What the trainer tells -----------------------------------------------------------------

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The trainer is new, so from here both count the same. (Not called by add_callback.)"""
        self._counted_all = True
        super().on_init_end(args, state, control, **kwargs)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Takes over the optimizer that the trainer has made; a resumed one has its states."""
        self._generate_every(args)
        if self._is_training:  # the last run was left by an exception, perhaps in a micro-batch
            self._counted_all = False
        self._is_training = True
        super().on_train_begin(args, state, control, **kwargs)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The first micro-batch of an optimizer step follows."""
        self._before_micro_batch(args, state, kwargs["model"])

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Another micro-batch of the same step follows: its grads are there and are needed."""
        self._micro_batches += 1
        self._before_micro_batch(args, state, kwargs["model"])

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The step is done; an evaluation may follow, which generates."""
        self._micro_batches += 1
        if control.should_evaluate:
            self._before_evaluation(state, kwargs["model"])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The states are back and the hooks gone: as if there had been no callback."""
        self._is_training = False
        self.close()

    # ---- What it makes of that ------------------------------------------------------------------

    def _generate_every(self, args: TrainingArguments) -> int:
        """After how many micro-batches the trainer generates, as it reckons itself."""
        try:
            return int(args.steps_per_generation * args.num_iterations)
        except AttributeError as why:
            raise UnsupportedError(
                f"RefitCallback cannot tell when this trainer generates: {why}. It works with "
                f"TRL's GRPOTrainer and RLOOTrainer; known to work: {KNOWN_TO_WORK}."
            ) from why

    def _before_micro_batch(
        self, args: TrainingArguments, state: TrainerState, model: torch.nn.Module
    ) -> None:
        """Where the count may differ from the trainer's, any micro-batch may generate."""
        if not self._counted_all or self._micro_batches % self._generate_every(args) == 0:
            self._refit(state, model)

    def _before_evaluation(self, state: TrainerState, model: torch.nn.Module) -> None:
        """An evaluation generates, too."""
        self._refit(state, model)
