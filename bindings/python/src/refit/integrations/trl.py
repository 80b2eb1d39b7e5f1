"""refit in TRL's GRPOTrainer (RLOOTrainer, too), by a callback: the trainer stays as it is.

    trainer = GRPOTrainer(..., callbacks=[RefitCallback(use_pinned_optimizer_offload=True)])

TRL generates at the start of a training step, and says nothing of it. But it does so after every
``steps_per_generation * num_iterations`` micro-batches, and the callbacks hear of each micro-batch:
so this one counts them as the trainer does, and at the event just before one that generates it
clears the optimizer states and publishes the weights. It does the same at an evaluation that the
trainer has announced, because an evaluation generates, too. States come back behind the first
forward pass that records gradients, which is where generation is over, and the optimizer's step
waits for them. Nothing of the trainer is replaced or wrapped.

``activations={"host_bytes": "8GiB"}`` lets the policy's activations leave too
(``refit.ActivationOffload``), within the same budget of host memory. For TRL's other trainers, such
as SFTTrainer, there is ``refit.integrations.transformers.ActivationCallback``.

It knows nothing of tensors, storages or sockets: it says *when*, and ``refit.Controller`` does it.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from refit.activation_offload import ActivationOffload
from refit.config import ConfigLike, make_config
from refit.controller import Controller
from refit.errors import UnsupportedError
from refit.grads import Policy, policy_of
from refit.integrations._attached import divided
from refit.integrations.transformers import add_figures, refuse_another, take_over
from refit.observers import PhaseWatcher, TimerLike
from refit.weights import named_weights

if TYPE_CHECKING:
    from transformers import Trainer

    from refit.publisher import Publisher

KNOWN_TO_WORK = "TRL 1.16 with transformers 5.23 and accelerate 1.15"

Weights = Callable[[torch.nn.Module], Iterable[tuple[str, torch.Tensor]]]


def policy_weights(model: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """The weights that the policy has: of a PEFT model those with its adapters merged into copies,
    which a worker without PEFT loads as it loads any."""
    return named_weights(model, lora="merged")


class RefitCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
    """Takes the states off the device while TRL generates, and publishes the policy's weights.

    ``publisher``: where new weights go before a generation, once per optimizer step; the
    caller owns and closes it. Without one, nothing is published. ``weights``: what is published of
    the model, as pairs of name and tensor; ``policy_weights`` unless said otherwise, which merges
    adapters, while ``partial(named_weights, lora="adapter")`` sends them alone. ``config``,
    ``overrides``, ``timer``, ``timeline`` and ``progress`` are the controller's, and so are the
    keywords that say where states live (``states="host"``, ``window_bytes``; docs/windows.md): then
    states are on the device within a step only, and TRL generates without them. So is ``grads``:
    what becomes of grads that exist at a generation. There are some only if TRL generates inside a
    step that accumulates, and then they are needed: ``"keep"``.
    ``activations``: keywords of ``refit.ActivationOffload``, such as ``host_bytes``, over
    ``config``; then activations leave in each forward pass of the training, and switches of
    transformers that ask for the same are refit's (``ActivationCallback`` says how).
    ``lockstep``: for a job of several ranks, on all of them: one has the publisher, the others help
    to gather what is sharded, and a refit that fails on one rank fails on all.

    Use one callback for one trainer. Errors of the controller and the publisher (a worker that was
    lost, a deadline) leave ``trainer.train()``; the states are safe then, and training can go on.
    The constructor raises ConfigError, NotFoundError (no such option), InvalidError.
    """

    def __init__(
        self,
        publisher: "Publisher | None" = None,
        config: ConfigLike = None,
        *,
        weights: Weights = policy_weights,
        grads: Policy = "keep",
        activations: Mapping[str, Any] | None = None,
        lockstep: bool = False,
        timer: TimerLike = None,
        timeline: PhaseWatcher | None = None,
        progress: bool | None = None,
        **overrides: Any,
    ) -> None:
        self.publisher = publisher
        self.controller: Controller | None = None
        self.activations: ActivationOffload | None = None
        options, chosen = divided(config)
        more, over = divided(overrides)
        self._activation_keywords = None if activations is None else dict(activations)
        self._config = make_config(options, more)
        self._controller_of: Callable[..., Controller] = partial(
            Controller,
            config=self._config,
            **{**chosen, **over},
            grads=policy_of(grads),
            timer=timer,
            timeline=timeline,
            progress=progress,
        )
        self._weights = weights
        self._lockstep = lockstep
        self._micro_batches = 0  # as many as the trainer has trained on since it was made,
        self._counted_all = False  # if this callback has been there all the time
        self._is_training = False
        self._published_step = -1  # the global step whose weights the workers have
        self._hook: torch.utils.hooks.RemovableHandle | None = None

    def attach(self, trainer: "Trainer") -> None:
        """Puts the callback ahead of the reporters, so that W&B and others are given refit/* too.

        Not needed for anything else: ``state.log_history`` and the console have the figures in any
        case. Call it once, before ``train()``. Does not block.
        """
        callbacks = trainer.callback_handler.callbacks
        if self not in callbacks:
            callbacks.append(self)
        callbacks.remove(self)
        callbacks.insert(1, self)  # the first decides what the trainer logs, evaluates and saves

    # ---- What the trainer tells -----------------------------------------------------------------

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The trainer is new, so from here both count the same. (Not called by add_callback.)"""
        self._counted_all = True
        if self._activation_keywords is not None:
            take_over(args)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Takes over the optimizer that the trainer has made; a resumed one has its states."""
        self._generate_every(args)
        if self._is_training:  # the last run was left by an exception, perhaps in a micro-batch
            self._counted_all = False
        self._is_training = True
        self.close()
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        if self._activation_keywords is not None:
            refuse_another(args, model)
        self.controller = self._controller_of(optimizer, model)
        try:
            self._attach_activations(model)
        except BaseException:
            self.close()
            raise
        self._hook = model.register_forward_pre_hook(self._on_forward)
        self._published_step = -1
        if args.eval_on_start:
            self._clear(state, model)

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
            self._clear(state, kwargs["model"])

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """An evaluation may follow here, too."""
        if control.should_evaluate:
            self._clear(state, kwargs["model"])

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Adds the figures of the last cycle to what is logged, as refit/*."""
        if self.controller is None:
            return
        figures = self.controller.stats()
        if self.activations is not None:
            figures.update(self.activations.stats())
        add_figures(figures, state, kwargs["logs"])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The states are back and the hooks gone: as if there had been no callback."""
        self._is_training = False
        self.close()

    # ---- What it makes of that ------------------------------------------------------------------

    def close(self) -> None:
        """Brings the states back and removes all hooks; again does nothing.

        ``train()`` does it at its end; call it where ``train()`` was left by an exception and is
        not entered again. Blocks for the copies. The publisher stays open.
        """
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        activations, self.activations = self.activations, None
        if activations is not None:
            activations.close()  # before the controller, whose device it uses
        if self.controller is not None:
            self.controller.close()
            self.controller = None

    def _attach_activations(self, model: torch.nn.Module) -> None:
        if self._activation_keywords is not None:
            keywords = {"config": self._config, **self._activation_keywords}
            self.activations = ActivationOffload(model, beside=self.controller, **keywords)
            self.activations.attach()

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
            self._clear(state, model)

    def _clear(self, state: TrainerState, model: torch.nn.Module) -> None:
        assert self.controller is not None
        publishes = self.publisher is not None or self._lockstep
        if not publishes or state.global_step == self._published_step:
            self.controller.clear()
            return
        with self.controller.refit(publisher=self.publisher, lockstep=self._lockstep) as refit:
            refit.send(self._weights(model))
        self._published_step = state.global_step

    def _on_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        """Generation records no gradients, so a pass that does is training: the states may return.

        Grads of a step that is still open are added to by the backward pass that follows, so they
        are waited for here; the states are waited for by the optimizer's step.
        """
        controller = self.controller
        if controller is not None and torch.is_grad_enabled():
            controller.restore(non_blocking=True)
