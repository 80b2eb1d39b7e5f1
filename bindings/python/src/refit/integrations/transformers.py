"""refit in the Trainer of transformers, and in TRL's trainers, by callbacks.

    trainer = Trainer(..., callbacks=[RefitCallback(publisher, publish_steps=10)])

Optimizer states leave while weights are published and while the trainer evaluates, or live on the
host (``schedule``). For TRL's trainers that generate there is ``refit.integrations.trl``.

    trainer = Trainer(..., callbacks=[ActivationCallback(host_bytes="8GiB")])

From the beginning to the end of ``train()`` every forward pass in training mode is one of
``refit.ActivationOffload``. Switches that ask for the offload of TRL, transformers or accelerate
are refit's then (``refit.integrations.activations`` lists them): the callback switches them off
when the trainer is made, before the trainer reads them.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from refit._c.config import ConfigLike, make_config
from refit.activations.offload import ActivationOffload
from refit.controller import Controller
from refit.errors import InvalidError, UnsupportedError
from refit.integrations import activations as options
from refit.integrations._attached import divided
from refit.observe.observers import PhaseWatcher, TimerLike
from refit.states.grads import Policy, policy_of
from refit.step.schedule import ScheduleLike, refuse_keywords
from refit.weights.named_weights import named_weights

if TYPE_CHECKING:
    from transformers import Trainer

    from refit.weights.publisher import Publisher

Layers = Callable[[torch.nn.Module], Sequence[torch.nn.Module]]

Weights = Callable[[torch.nn.Module], Iterable[tuple[str, torch.Tensor]]]

_log = logging.getLogger("refit")


class ActivationCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
    """Lets the activations of the trainer's model leave in the forward pass, and return in the
    backward pass.

    ``layers``: a function of the model that gives the modules whose ends divide the forward pass;
    None: the model's own, as ``refit.ActivationOffload`` finds them. Keywords are those of
    ``refit.ActivationOffload``. ``offload`` is that object while ``train()`` runs. Use one callback
    for one trainer, and give it to the trainer's constructor: ``add_callback`` is too late for
    switches that have to be taken over. ``train()`` raises UnsupportedError there, and what
    ``refit.ActivationOffload`` raises.
    """

    def __init__(self, layers: Layers | None = None, **keywords: Any) -> None:
        self.offload: ActivationOffload | None = None
        self._layers = layers
        self._keywords = keywords

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The trainer is new: what it has read of other offloads it has not used yet."""
        take_over(args)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.close()
        model = kwargs["model"]
        refuse_another(args, model)
        layers = None if self._layers is None else self._layers(model)
        self.offload = ActivationOffload(model, layers, **self._keywords)
        self.offload.attach()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Adds the figures to what is logged, as refit/*."""
        if self.offload is not None:
            add_figures(self.offload.stats(), state, kwargs["logs"])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.close()

    def close(self) -> None:
        """Removes the hooks and gives the host memory back; again does nothing.

        ``train()`` does it at its end; call it where ``train()`` was left by an exception and is
        not entered again. Blocks for copies that are under way.
        """
        offload, self.offload = self.offload, None
        if offload is not None:
            offload.close()


def policy_weights(model: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """The weights that the policy has: of a PEFT model those with its adapters merged into copies,
    which a worker without PEFT loads as it loads any."""
    return named_weights(model, lora="merged")


class RefitCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
    """Takes optimizer states off the device while the trainer does not need them, and publishes the
    model's weights.

    States leave before an evaluation and return during the first forward pass of the training.
    ``publisher``: where new weights go; the caller owns and closes it. They go after every
    ``publish_steps``-th optimizer step, and after the last one; states are away meanwhile. None:
    nothing is published. ``weights``: what is published of the model, as pairs of name and tensor;
    ``policy_weights`` unless said otherwise, which merges adapters, while
    ``partial(named_weights, lora="adapter")`` sends them alone. ``config``,
    ``overrides``, ``timer``, ``timeline`` and ``progress`` are the controller's, and so is the
    ``schedule``, which says where states live (docs/windows.md). So is ``grads``: what becomes of
    grads that exist when states leave. ``activations``: keywords of ``refit.ActivationOffload``,
    such as
    ``host_bytes``, over ``config``; then activations leave in each forward pass of the training,
    and switches of transformers that ask for the same are refit's (``ActivationCallback`` says
    how). ``lockstep``: for a job of several ranks, on all of them: one has the publisher, the
    others help to gather what is sharded, and a refit that fails on one rank fails on all.

    With DeepSpeed (``TrainingArguments(deepspeed=...)``) its flat states and masters leave.
    Use one callback for one trainer. Errors of the controller and the publisher (a worker that was
    lost, a deadline) leave ``trainer.train()``; the states are safe then, and training can go on.
    The constructor raises ConfigError, NotFoundError (no such option), InvalidError.
    """

    def __init__(
        self,
        publisher: "Publisher | None" = None,
        config: ConfigLike = None,
        *,
        publish_steps: int = 1,
        weights: Weights = policy_weights,
        schedule: ScheduleLike = None,
        grads: Policy = "keep",
        activations: Mapping[str, Any] | None = None,
        lockstep: bool = False,
        timer: TimerLike = None,
        timeline: PhaseWatcher | None = None,
        progress: bool | None = None,
        **overrides: Any,
    ) -> None:
        if publish_steps < 1:
            raise InvalidError(f"publish_steps={publish_steps!r}: say a number from 1 on")
        if publish_steps > 1 and publisher is None:
            raise InvalidError(
                f"publish_steps={publish_steps}, and no publisher: nothing would be published. "
                "Give a refit.Publisher, or leave publish_steps out"
            )
        self.publisher = publisher
        self.controller: Controller | None = None
        self.activations: ActivationOffload | None = None
        options, of_config = divided(config)
        refuse_keywords(overrides)
        if schedule is None:
            schedule = of_config.get("schedule")
        self._publish_steps = publish_steps
        self._activation_keywords = None if activations is None else dict(activations)
        self._config = make_config(options, overrides)
        self._controller_of: Callable[..., Controller] = partial(
            Controller,
            config=self._config,
            schedule=schedule,
            grads=policy_of(grads),
            timer=timer,
            timeline=timeline,
            progress=progress,
        )
        self._weights = weights
        self._lockstep = lockstep
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
        """The trainer is new. (Not called by add_callback.)"""
        if self._activation_keywords is not None:
            take_over(args)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Takes over the optimizer that the trainer has made; a resumed one has its states."""
        self.close()
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        if self._activation_keywords is not None:
            refuse_another(args, model)
        if self._activation_keywords is not None:
            keywords = {"config": self._config, **self._activation_keywords}
            self.activations = ActivationOffload(model, **keywords)
        try:
            self.controller = self._controller_of(optimizer, model, activations=self.activations)
            if self.activations is not None:
                self.activations.attach()
        except BaseException:
            self.close()
            raise
        self._hook = model.register_forward_pre_hook(self._on_forward)
        self._published_step = -1
        if args.eval_on_start:
            self._before_evaluation(state, model)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The step is done; it may be one to publish, and an evaluation may follow."""
        if self._publishes and state.global_step % self._publish_steps == 0:
            self._refit(state, kwargs["model"])
        if control.should_evaluate:
            self._before_evaluation(state, kwargs["model"])

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """An evaluation may follow here, too."""
        if control.should_evaluate:
            self._before_evaluation(state, kwargs["model"])

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Adds the figures of the last cycle to what is logged, as refit/*."""
        if self.controller is None:
            return
        add_figures(self.controller.stats(), state, kwargs["logs"])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The last weights are published, the states are back, and the hooks gone: as if there had
        been no callback."""
        try:
            if self._publishes and state.global_step != self._published_step:
                self._refit(state, kwargs["model"])
        finally:
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
            activations.close()
        if self.controller is not None:
            self.controller.close()
            self.controller = None

    @property
    def _publishes(self) -> bool:
        return self.publisher is not None or self._lockstep

    def _before_evaluation(self, state: TrainerState, model: torch.nn.Module) -> None:
        """States leave; the evaluation's passes record no gradients, so they stay away."""
        assert self.controller is not None
        self.controller.offload()

    def _refit(self, state: TrainerState, model: torch.nn.Module) -> None:
        """States leave, and the weights are published, once for each step."""
        assert self.controller is not None
        if not self._publishes or state.global_step == self._published_step:
            self.controller.offload()
            return
        with self.controller.refit(publisher=self.publisher, lockstep=self._lockstep) as refit:
            refit.send(self._weights(model))
        self._published_step = state.global_step

    def _on_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        """A pass that records gradients is training, so the states may return.

        Grads of a step that is still open are added to by the backward pass that follows, so they
        are waited for here; the states are waited for by the optimizer's step.
        """
        controller = self.controller
        if controller is not None and torch.is_grad_enabled():
            controller.restore(non_blocking=True)


def take_over(args: TrainingArguments) -> None:
    """Switches other offloads off in what a new trainer has: its arguments, and accelerate's plugin
    for FSDP. Says which in the log."""
    for place in (args, _fsdp_plugin()):
        names = options.asked(place)
        if names:
            options.switch_off(place)
            _log.warning("%s is refit's from here on: the other is off", " and ".join(names))


def refuse_another(args: TrainingArguments, model: torch.nn.Module) -> None:
    """UnsupportedError if another offload is on at the beginning of the training."""
    names = options.asked(args)
    if any(type(module).__name__ == "OffloadWrapper" for module in model.modules()):
        names.append("fsdp_activation_checkpointing_offload")
    if names:
        raise UnsupportedError(
            f"{' and '.join(names)} is on already, and takes the place of refit's: give the "
            "callback to the trainer's constructor, which switches it off, or leave it out"
        )
    if args.n_gpu > 1:
        raise UnsupportedError(
            f"this process trains on {args.n_gpu} GPUs by nn.DataParallel, whose copies of the "
            "model run in threads: start a process for each GPU (torchrun)"
        )


def add_figures(figures: dict[str, float], state: TrainerState, logs: dict[str, float]) -> None:
    """To a line of the log, and to the trainer's history of it."""
    logs.update(figures)
    if state.log_history:
        state.log_history[-1].update(figures)


def _fsdp_plugin() -> Any:
    """accelerate's, in a process that shards by FSDP."""
    from accelerate.state import AcceleratorState

    if not AcceleratorState._shared_state:
        return None
    return getattr(AcceleratorState(), "fsdp_plugin", None)
