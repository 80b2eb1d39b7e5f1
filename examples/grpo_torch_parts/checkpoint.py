"""Checkpoints as others write them: a .pt to go on from, and beside it the weights alone in
safetensors, in bfloat16, which is what an inference engine loads. Knows nothing of refit.
"""

import importlib.util
import os
import pickle
from pathlib import Path
from typing import Any

import torch

from .policy import Policy


class CheckpointError(Exception):
    """A checkpoint that cannot be written or loaded."""


def write(folder: Path, cycle: int, policy: Policy, optimizer: dict[str, Any]) -> None:
    """Both files of a cycle; each gets its name when it is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"cycle-{cycle:05d}.pt"
    _write_weights(path.with_suffix(".safetensors"), policy)
    part = path.with_suffix(".pt.part")
    torch.save({"cycle": cycle, "policy": policy.state_dict(), "optimizer": optimizer}, part)
    os.replace(part, path)


def load_weights(path: Path, policy: Policy) -> None:
    """The weights of an earlier run's .pt; its optimizer's states are left where they are."""
    try:
        policy.load_state_dict(torch.load(path, weights_only=True)["policy"])
    except (OSError, RuntimeError, KeyError, TypeError, EOFError, pickle.UnpicklingError) as why:
        raise CheckpointError(
            f"{path} does not hold the weights of a policy like this one (with these --width, "
            f"--layers, --ppo): {why}"
        ) from why


def require_safetensors() -> None:
    """CheckpointError if weights cannot be written as safetensors, before any work is lost."""
    if importlib.util.find_spec("safetensors") is None:
        raise CheckpointError("--save-every writes safetensors: pip install safetensors")


def _write_weights(path: Path, policy: Policy) -> None:
    from safetensors.torch import save_file

    weights = {name: one.to(torch.bfloat16).clone() for name, one in policy.named_parameters()}
    part = path.with_suffix(".safetensors.part")
    save_file(weights, part)
    os.replace(part, path)
