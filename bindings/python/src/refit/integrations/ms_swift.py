"""ms-swift: ``activation_cpu_offload`` is refit's. No fork is needed.

    swift sft --external_plugins refit_plugin.py ...        # with the two lines below in it

    import refit.integrations.ms_swift
    refit.integrations.ms_swift.install(host_bytes="8GiB")

ms-swift makes the callback that its table ``callbacks_map`` has under that name if ``fsdp_config``
asks for it (configs/frameworks/ms_swift.yaml); ``install`` puts refit's there. ms-swift's own works
with FSDP only; refit's does in any of its trainers: ``--callbacks activation_cpu_offload``.

Drawn after swift/callbacks/{mapping,base,activation_cpu_offload}.py, swift/trainers/{arguments,
mixin}.py (ms-swift 4.6).
"""

from typing import Any

from refit.errors import StateError
from refit.integrations.transformers import ActivationCallback

NAME = "activation_cpu_offload"


def install(layers: Any = None, **keywords: Any) -> Any:
    """Puts refit's callback in the place of ms-swift's, and returns a function that undoes it.

    Arguments are those of ``refit.integrations.transformers.ActivationCallback``. Call it before
    the trainer is made: in a file that ``--external_plugins`` names. ImportError without ms-swift;
    StateError if it was done already.
    """
    from swift.callbacks import callbacks_map  # type: ignore[import-not-found,unused-ignore]

    before = callbacks_map[NAME]
    if getattr(before, "_refit", False):
        raise StateError("refit is installed in this ms-swift already: remove it first")

    def callback(args: Any, trainer: Any) -> ActivationCallback:
        return ActivationCallback(layers, **keywords)

    def remove() -> None:
        if callbacks_map[NAME] is callback:
            callbacks_map[NAME] = before

    setattr(callback, "_refit", True)  # noqa: B010  # the type of functions knows no such attribute
    callbacks_map[NAME] = callback
    return remove
