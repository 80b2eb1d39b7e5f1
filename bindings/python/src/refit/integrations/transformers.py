"""refit in the Trainer of transformers, and in TRL's trainers, by a callback.

    trainer = Trainer(..., callbacks=[ActivationCallback(host_bytes="8GiB")])

From the beginning to the end of ``train()`` every forward pass in training mode is one of
``refit.ActivationOffload``. Switches that ask for the offload of TRL, transformers or accelerate
are refit's then (``refit.integrations.activations`` lists them): the callback switches them off
when the trainer is made, before the trainer reads them.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from refit.activation_offload import ActivationOffload
from refit.errors import UnsupportedError
from refit.integrations import activations as options

Layers = Callable[[torch.nn.Module], Sequence[torch.nn.Module]]

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
