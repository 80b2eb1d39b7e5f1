"""refit: the refit cycle of RL post-training, for PyTorch loops.

Between an optimizer step and the next rollout it clears optimizer states and grads off the device,
hands the new weights to every rollout worker as one version that all of them switch to or none
does, and brings the states back behind the next step.

What it raises is of one family, ``refit.RefitError``: ``refit.PeerError`` and so on.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from refit._version import __version__
from refit.errors import (
    BudgetError,
    BusyError,
    CallbackError,
    CancelledError,
    ClosedError,
    ConfigError,
    CopyError,
    CorruptError,
    DeadlineError,
    DeviceError,
    DeviceMemoryError,
    ExistsError,
    HostMemoryError,
    InputOutputError,
    InvalidError,
    LimitError,
    NotFoundError,
    PeerError,
    PinError,
    ProtocolError,
    RefitError,
    SecurityError,
    StaleError,
    StateError,
    SystemCallError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from refit.activation_offload import ActivationOffload
    from refit.archive import Archive, ArchivedVersion, Snapshot, materialize
    from refit.config import Config, load_config
    from refit.controller import Controller
    from refit.device import Device
    from refit.keys import keygen
    from refit.lockstep import LockstepError
    from refit.manifest import Alias, TensorSpec, Typed
    from refit.memory_pool import MemPool, mem_pool
    from refit.publisher import Publisher
    from refit.subscriber import Subscriber, SubscriberInfo
    from refit.timeline import Timeline
    from refit.transaction import Transaction
    from refit.update import Update
    from refit.view import View
    from refit.weights import NamedWeights, named_weights
    from refit.worker import Worker

__all__ = [
    "ActivationOffload",
    "Alias",
    "Archive",
    "ArchivedVersion",
    "BudgetError",
    "BusyError",
    "CallbackError",
    "CancelledError",
    "ClosedError",
    "Config",
    "ConfigError",
    "Controller",
    "CopyError",
    "CorruptError",
    "DeadlineError",
    "Device",
    "DeviceError",
    "DeviceMemoryError",
    "ExistsError",
    "HostMemoryError",
    "InputOutputError",
    "InvalidError",
    "LimitError",
    "LockstepError",
    "MemPool",
    "NamedWeights",
    "NotFoundError",
    "PeerError",
    "PinError",
    "ProtocolError",
    "Publisher",
    "RefitError",
    "SecurityError",
    "Snapshot",
    "StaleError",
    "StateError",
    "Subscriber",
    "SubscriberInfo",
    "SystemCallError",
    "TensorSpec",
    "Timeline",
    "Transaction",
    "Typed",
    "UnsupportedError",
    "Update",
    "View",
    "Worker",
    "__version__",
    "keygen",
    "load_config",
    "materialize",
    "mem_pool",
    "named_weights",
]

# Where the other public names are. They are imported when they are first asked for, so that what
# needs PyTorch is loaded only for its users.
_PLACES = {
    "ActivationOffload": "refit.activation_offload",
    "Alias": "refit.manifest",
    "Archive": "refit.archive",
    "ArchivedVersion": "refit.archive",
    "Config": "refit.config",
    "Controller": "refit.controller",
    "Device": "refit.device",
    "LockstepError": "refit.lockstep",
    "MemPool": "refit.memory_pool",
    "NamedWeights": "refit.weights",
    "Publisher": "refit.publisher",
    "Snapshot": "refit.archive",
    "Subscriber": "refit.subscriber",
    "SubscriberInfo": "refit.subscriber",
    "TensorSpec": "refit.manifest",
    "Timeline": "refit.timeline",
    "Transaction": "refit.transaction",
    "Typed": "refit.manifest",
    "Update": "refit.update",
    "View": "refit.view",
    "Worker": "refit.worker",
    "keygen": "refit.keys",
    "load_config": "refit.config",
    "materialize": "refit.archive",
    "mem_pool": "refit.memory_pool",
    "named_weights": "refit.weights",
}


def __getattr__(name: str) -> Any:
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module 'refit' has no attribute {name!r}")
    try:
        return getattr(import_module(place), name)
    except ModuleNotFoundError as why:
        if why.name != "torch":
            raise
        raise ImportError(
            f"refit.{name} needs PyTorch 2.6 or later, which is not installed (pip install torch)"
        ) from why


def __dir__() -> list[str]:
    return sorted(__all__)
