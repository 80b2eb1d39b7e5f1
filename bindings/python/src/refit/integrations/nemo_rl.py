"""NeMo-RL: optimizer states leave by refit, and weights travel by it. No fork is needed.

**The mover.** ``patch_worker(worker_or_class)`` puts refit's mover in the place of the one method
through which the loop moves optimizer states: ``move_optimizer`` of Megatron workers,
``move_optimizer_to_device`` of DTensor workers. The loop stays as it is: what it calls twice does
nothing the second time, and ``prepare_for_training`` restores during the next step. Two keys, those
of the patch that NeMo-RL has under review, say how (configs/frameworks/nemo_rl.yaml has them):

    policy.use_pinned_optimizer_offload   policy.use_coalesced_optimizer_offload   mode
    false                                 false                                    pageable
    true                                  false                                    pinned
    true                                  true                                     coalesced-pinned

The last two are one to refit: its arena is page-locked, coalesced and taken in slabs, so that there
is no single huge buffer. ``policy.refit`` may hold further options of refit's own, and the
``schedule`` of ``refit.Controller`` (docs/windows.md); with states that live on the host there is
nothing to move between steps, and the loop stays as it is.

A worker of a patched class whose ``policy.megatron_cfg.optimizer`` asks for Megatron's own offload
(``optimizer_cpu_offload`` or ``chunked_optimizer_state_offload``) has refit's in its place, where
states leave through page-locked memory (``refit.integrations.state_offload`` says what becomes of
each option); with ``use_pinned_optimizer_offload: false`` Megatron's stays.

**The transports.** ``policy.generation.refit_transport: "refit.integrations.nemo_rl:
RefitCheckpointEngine"`` for generation on other GPUs; ``RefitWeightSynchronizer`` as
``policy_generation.weight_synchronizer`` for colocated generation too.

Drawn after nemo_rl/models/policy/workers/{megatron_policy_worker,dtensor_policy_worker_v2,
checkpoint_engine}.py (NVIDIA-NeMo/RL main, 2026-08); the transports are in _nemo_rl_weights.py.
NeMo-RL is not imported here.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Literal

from refit.errors import ConfigError, InvalidError, StateError
from refit.integrations import _attached, megatron, state_offload
from refit.integrations._nemo_rl_weights import RefitCheckpointEngine, RefitWeightSynchronizer
from refit.step.schedule import named

if TYPE_CHECKING:
    from refit.controller import Controller

__all__ = [
    "OptimizerMover",
    "RefitCheckpointEngine",
    "RefitWeightSynchronizer",
    "move_optimizer",
    "mover_of",
    "offload_mode",
    "patch_worker",
    "release",
    "take_offload",
    "unpatch_worker",
]

Mode = Literal["pageable", "pinned", "coalesced-pinned"]

PINNED = "use_pinned_optimizer_offload"
COALESCED = "use_coalesced_optimizer_offload"
MOVERS = ("move_optimizer", "move_optimizer_to_device")
_MOVER = "_refit_mover"
_ORIGINAL = "_refit_original"


# ---- The mover


def offload_mode(policy: Mapping[str, Any]) -> Mode:
    """What the two keys of a policy's configuration say. ConfigError, with the sentence to act on,
    for a key that is missing or coalesced without pinned.
    """
    for key in (PINNED, COALESCED):
        if key not in policy:
            raise ConfigError(
                f"policy.{key} is not set: include configs/frameworks/nemo_rl.yaml, or start with "
                f"++policy.{key}=true"
            )
    if policy[COALESCED] and not policy[PINNED]:
        raise ConfigError(
            f"policy.{COALESCED} requires policy.{PINNED}: states are coalesced in page-locked "
            "memory only; set both, or neither"
        )
    if not policy[PINNED]:
        return "pageable"
    return "coalesced-pinned" if policy[COALESCED] else "pinned"


def take_offload(policy: MutableMapping[str, Any]) -> dict[str, Any]:
    """Puts refit's keywords into ``policy.refit`` where ``policy.megatron_cfg.optimizer`` asks for
    Megatron's own offload of states, which is switched off there. Returns them; empty if there are
    none, or if ``use_pinned_optimizer_offload`` is false.

    A patched class does it when a worker is made. Where ``refit.integrations.megatron.
    offload_keywords`` warns, Megatron's own stays. ConfigError where ``policy.refit`` says
    something else; what ``refit.integrations.state_offload.take`` raises. Nothing is changed then.
    """
    backend = policy.get("megatron_cfg") or {}
    options = backend.get("optimizer")
    if not policy.get(PINNED) or not options or backend.get("enabled") is False:
        return {}
    found = megatron.offload_keywords(options)
    if not found:
        return {}
    ours = dict(policy.get("refit") or {})
    schedule = named(ours.get("schedule"))
    for word, keywords in named(found["schedule"]).items():
        there = schedule.get(word, {})
        _refuse_another(f"schedule.{word}", there, keywords)
        schedule[word] = {**there, **keywords}
    found["schedule"] = schedule
    _refuse_another("", {key: ours[key] for key in ours if key != "schedule"}, found)
    state_offload.switch_off(options)
    policy["refit"] = {**ours, **found}
    return found


def _refuse_another(place: str, ours: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    for key, value in asked.items():
        if ours.get(key, value) != value:
            path = ".".join(filter(None, ("policy.refit", place, key)))
            raise ConfigError(
                f"{path} is {ours[key]}, and policy.megatron_cfg.optimizer asks for {value}: leave "
                "one of them out"
            )


class OptimizerMover:
    """Moves one worker's optimizer states; a worker has one, which owns its refit.Controller.

    The controller is made at the first move, since workers make their optimizer late, and again
    should the worker make another optimizer.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._policy = worker.cfg
        self.mode: Mode = offload_mode(worker.cfg)
        self.blocking = False
        self._controller: Controller | None = None
        self._optimizer: Any = None

    @property
    def controller(self) -> "Controller | None":
        """The controller of the worker's optimizer; None before the first move."""
        return self._controller

    def move(self, device: Any) -> None:
        """To "cpu": states leave, and their device memory is given back; blocks until then. To
        "cuda" (or the device they came from): they return during the next step, or, within a
        checkpoint, at once. Idempotent. InvalidError for another device, and what the controller
        raises.
        """
        if getattr(self._worker, "optimizer_cpu_offload", False):
            return
        kind = str(device).split(":", maxsplit=1)[0]
        if kind == "cpu":
            controller = self._current()
            if controller is not None:
                controller.offload()
        elif kind == "cuda":
            if _attached.lives_on_host(self._policy.get("refit")):
                self._current()
            self._return()
        else:
            raise InvalidError(f'optimizer states go to "cpu" or "cuda", and not to "{device}"')

    def release(self) -> None:
        """Gives the page-locked host memory back, with the states on the device."""
        if self._controller is not None:
            self._return()
            self._controller.wait()
            self._controller.release()

    def close(self) -> None:
        """Brings the states back and ends the controller. Idempotent."""
        controller, self._controller, self._optimizer = self._controller, None, None
        if controller is not None:
            controller.close()

    def _return(self) -> None:
        if self._controller is None:
            return
        self._controller.restore(non_blocking=True)
        if self.blocking:
            self._controller.wait()

    def _current(self) -> "Controller | None":
        optimizer = getattr(self._worker, "optimizer", None)
        if optimizer is not self._optimizer:
            self.close()
            self._optimizer = optimizer
        if self._controller is None and optimizer is not None:
            self._controller = self._make(optimizer)
        return self._controller

    def _make(self, optimizer: Any) -> "Controller | None":
        ours = dict(self._policy.get("refit") or {})
        ours[PINNED] = self.mode != "pageable"
        return _attached.controller_of(optimizer, getattr(self._worker, "model", None), ours)


def mover_of(worker: Any) -> OptimizerMover:
    """The worker's mover, made when first asked for. ConfigError: see offload_mode."""
    mover: OptimizerMover | None = getattr(worker, _MOVER, None)
    if mover is None:
        mover = OptimizerMover(worker)
        setattr(worker, _MOVER, mover)
    return mover


def patch_worker(worker: Any) -> Any:
    """Puts refit's mover into a policy worker, or into its class for all workers made from it.

    Takes the place of ``move_optimizer`` or ``move_optimizer_to_device``, and makes
    ``save_checkpoint`` wait for states that are being restored. A class also takes Megatron's own
    offload over, see ``take_offload``; a worker that is there has its optimizer already. A worker's
    configuration is checked at once, a class's when a worker first moves. A second call does
    nothing. Returns `worker`. StateError if it has neither method; ConfigError.

    Workers are Ray actors: call it where their class is defined or subclassed, or in a module that
    ``runtime_env={"worker_process_setup_hook": ...}`` names.
    """
    names = [name for name in MOVERS if callable(getattr(worker, name, None))]
    if not names:
        raise StateError(
            f"{worker!r} is not a policy worker of NeMo-RL: it has neither {' nor '.join(MOVERS)}"
        )
    if inspect.isclass(worker):
        _replace(worker, "__init__", _taking)
    else:
        mover_of(worker)
    for name in names:
        _replace(worker, name, _moving)
    if callable(getattr(worker, "save_checkpoint", None)):
        _replace(worker, "save_checkpoint", _waiting)
    return worker


def unpatch_worker(worker: Any) -> Any:
    """Undoes patch_worker; an instance's states come back first. Returns `worker`."""
    if not inspect.isclass(worker):
        mover: OptimizerMover | None = worker.__dict__.pop(_MOVER, None)
        if mover is not None:
            mover.close()
    for name in (*MOVERS, "save_checkpoint", "__init__"):
        ours = vars(worker).get(name)
        if hasattr(ours, _ORIGINAL):
            original = getattr(ours, _ORIGINAL)
            if original is None:
                delattr(worker, name)
            else:
                setattr(worker, name, original)
    return worker


def move_optimizer(worker: Any, device: Any) -> None:
    """The worker's own method, done by refit, for code that calls a function instead of patching.
    See OptimizerMover.move."""
    mover_of(worker).move(device)


def release(worker: Any) -> None:
    """Gives back the page-locked memory that moving `worker`'s states took."""
    mover_of(worker).release()


def _replace(worker: Any, name: str, make: Callable[[Any], Any]) -> None:
    """On a class, as a function of it; on an instance, bound to it. What was there is kept."""
    there = getattr(worker, name)
    if hasattr(there, _ORIGINAL):
        return
    if inspect.isclass(worker):
        ours = make(there)
        setattr(ours, _ORIGINAL, vars(worker).get(name))
        setattr(worker, name, ours)
    else:
        unbound = make(lambda _worker, *given, **named: there(*given, **named))
        ours = functools.partial(unbound, worker)
        setattr(ours, _ORIGINAL, vars(worker).get(name))
        setattr(worker, name, ours)


def _taking(original: Any) -> Callable[..., None]:
    """A constructor that is given the policy's configuration, under whichever name."""

    @functools.wraps(original)
    def __init__(worker: Any, *given: Any, **named: Any) -> None:
        for one in (*given, *named.values()):
            if isinstance(one, MutableMapping) and "megatron_cfg" in one:
                take_offload(one)
        original(worker, *given, **named)

    return __init__


def _moving(_original: Any) -> Callable[[Any, Any], None]:
    def move(worker: Any, device: Any) -> None:
        mover_of(worker).move(device)

    return move


def _waiting(original: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def save_checkpoint(worker: Any, *given: Any, **named: Any) -> Any:
        mover = mover_of(worker)
        before, mover.blocking = mover.blocking, True
        try:
            return original(worker, *given, **named)
        finally:
            mover.blocking = before

    return save_checkpoint
