"""refit: the refit cycle of RL post-training, for PyTorch loops.

Between an optimizer step and the next rollout it clears optimizer states and grads off the device,
hands the new weights to every rollout worker as one version that all of them switch to or none
does, and brings the states back during the next step.

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
    from refit._c.config import Config, load_config
    from refit._c.device import Device
    from refit.activations.offload import ActivationOffload
    from refit.controller import Controller
    from refit.memory_pool import MemPool, mem_pool
    from refit.observe.timeline import Timeline
    from refit.states.parked import Parked, park, resident
    from refit.step.schedule import CpuStep, Cycle, HostStates
    from refit.weights.archive import Archive, ArchivedVersion, Snapshot, materialize
    from refit.weights.keys import keygen
    from refit.weights.lockstep import LockstepError
    from refit.weights.manifest import Alias, RawTensor, TensorSpec
    from refit.weights.named_weights import NamedWeights, named_weights
    from refit.weights.parts import Part, Parts
    from refit.weights.publisher import Publisher
    from refit.weights.record import record
    from refit.weights.shards import Shard, ShardedWeights, sharded_weights
    from refit.weights.subscriber import Subscriber, SubscriberInfo
    from refit.weights.transaction import Transaction
    from refit.weights.update import Update
    from refit.weights.view import View
    from refit.weights.worker import Worker

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
    "CpuStep",
    "Cycle",
    "DeadlineError",
    "Device",
    "DeviceError",
    "DeviceMemoryError",
    "ExistsError",
    "HostMemoryError",
    "HostStates",
    "InputOutputError",
    "InvalidError",
    "LimitError",
    "LockstepError",
    "MemPool",
    "NamedWeights",
    "NotFoundError",
    "Parked",
    "Part",
    "Parts",
    "PeerError",
    "PinError",
    "ProtocolError",
    "Publisher",
    "RawTensor",
    "RefitError",
    "SecurityError",
    "Shard",
    "ShardedWeights",
    "Snapshot",
    "StaleError",
    "StateError",
    "Subscriber",
    "SubscriberInfo",
    "SystemCallError",
    "TensorSpec",
    "Timeline",
    "Transaction",
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
    "park",
    "record",
    "resident",
    "sharded_weights",
]

# Where the other public names are. They are imported when they are first asked for, so that what
# needs PyTorch is loaded only for its users.
_PLACES = {
    "ActivationOffload": "refit.activations.offload",
    "Alias": "refit.weights.manifest",
    "Archive": "refit.weights.archive",
    "ArchivedVersion": "refit.weights.archive",
    "Config": "refit._c.config",
    "Controller": "refit.controller",
    "CpuStep": "refit.step.schedule",
    "Cycle": "refit.step.schedule",
    "Device": "refit._c.device",
    "HostStates": "refit.step.schedule",
    "LockstepError": "refit.weights.lockstep",
    "MemPool": "refit.memory_pool",
    "NamedWeights": "refit.weights.named_weights",
    "Part": "refit.weights.parts",
    "Parts": "refit.weights.parts",
    "Parked": "refit.states.parked",
    "Publisher": "refit.weights.publisher",
    "Shard": "refit.weights.shards",
    "ShardedWeights": "refit.weights.shards",
    "Snapshot": "refit.weights.archive",
    "Subscriber": "refit.weights.subscriber",
    "SubscriberInfo": "refit.weights.subscriber",
    "TensorSpec": "refit.weights.manifest",
    "Timeline": "refit.observe.timeline",
    "Transaction": "refit.weights.transaction",
    "RawTensor": "refit.weights.source",
    "Update": "refit.weights.update",
    "View": "refit.weights.view",
    "Worker": "refit.weights.worker",
    "keygen": "refit.weights.keys",
    "load_config": "refit._c.config",
    "materialize": "refit.weights.archive",
    "mem_pool": "refit.memory_pool",
    "named_weights": "refit.weights.named_weights",
    "park": "refit.states.parked",
    "record": "refit.weights.record",
    "resident": "refit.states.parked",
    "sharded_weights": "refit.weights.shards",
}


_FORMER = {"Typed": "RawTensor"}
"""Former names, until 0.2."""


def __getattr__(name: str) -> Any:
    name = _FORMER.get(name, name)
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
