"""verl: optimizer states leave by refit, and weights travel by it. No fork is needed.

**Offload.** Four functions with the names and signatures of verl's own, which moves every tensor,
``step`` included, one by one into pageable memory:

    verl.utils.fsdp_utils       offload_fsdp_optimizer(o), load_fsdp_optimizer(o, device_id)
    verl.utils.megatron_utils   offload_megatron_optimizer(o), load_megatron_optimizer(o)

``install()`` puts them in the places of those, also where a module of verl has taken the name in,
and says where; ``installation.remove()`` undoes it. Then ``optimizer_offload: True`` is refit's.
What they load comes back during the next ``step``. Options: ``install(config)``, or REFIT_*
variables; with ``install({"states": "host", "window_bytes": "256MiB"})`` states live on the host,
and are loaded only within ``step``. ``attached(optimizer)`` is the refit.Controller, with its
``stats()``, once states have left.

Where ``optim.override_optimizer_config`` asks for Megatron's own offload of states
(``optimizer_cpu_offload`` or ``chunked_optimizer_state_offload``), refit's takes its place:
``get_megatron_optimizer`` of ``verl.utils.megatron.optimizer`` switches it off and gives the
optimizer a controller (``refit.integrations.state_offload`` says what becomes of each option). With
``install({"use_pinned_optimizer_offload": False})`` Megatron's stays.

**Activations.** With ``install({"activations": {"host_bytes": "8GiB"}})`` refit's takes the place
of ``verl.utils.activation_offload.enable_activation_offloading(model, strategy, enable_ckpt)``,
which ``enable_activation_offload: True`` calls for FSDP models. Without ``activations.host_bytes``
verl's own is called.

**Weights.** ``rollout.checkpoint_engine: {backend: refit, custom_backend_module:
refit.integrations.verl}`` (configs/frameworks/verl.yaml): importing this module where verl is
makes the engine known to verl's registry.

Drawn after verl/utils/{fsdp_utils,megatron_utils,megatron/optimizer,activation_offload}.py,
verl/checkpoint_engine/base.py, verl/workers/engine/fsdp/transformer_impl.py and verl/workers/
engine_workers.py (verl-project/verl main, 2026-08). verl is not imported here.
"""

import functools
import importlib
import sys
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from refit._c.config import make_config
from refit.errors import InvalidError, NotFoundError, StateError
from refit.integrations import megatron, state_offload
from refit.integrations._attached import attach, attached, check, divided, lives_on_host
from refit.integrations._engine import Engine

FSDP_UTILS = "verl.utils.fsdp_utils"
MEGATRON_UTILS = "verl.utils.megatron_utils"
MEGATRON_OPTIMIZER = "verl.utils.megatron.optimizer"
ACTIVATIONS = "verl.utils.activation_offload"
REGISTRY = "verl.checkpoint_engine.base"


# ---- Offload


def offload_fsdp_optimizer(optimizer: Any, *, config: Any = None) -> None:
    """States leave the device and their memory is given back; blocks until then. Idempotent.

    Nothing is moved before the first step, when there is no state. States that live on the host
    (``states: host`` in `config`) are there from the first step on. Raises what
    refit.Controller.offload raises.
    """
    if optimizer.state or lives_on_host(config):
        _clear(optimizer, config)


def load_fsdp_optimizer(optimizer: Any, device_id: Any) -> None:
    """States return to where they came from, during the next step. Idempotent; does not wait.

    InvalidError if `device_id` is another device: refit moves nothing between devices.
    """
    controller = attached(optimizer)
    if controller is not None:
        _check_device(optimizer, device_id)
        controller.restore(non_blocking=True)


def offload_megatron_optimizer(optimizers: Any, *, config: Any = None) -> None:
    """States and fp32 masters of a Megatron optimizer or a chain leave, as above; scratch memory of
    Megatron and Transformer Engine is dropped first, as verl does."""
    _drop_scratch()
    _clear(optimizers, config)


def load_megatron_optimizer(optimizers: Any) -> None:
    """They return to where they came from, during the next step. Idempotent."""
    controller = attached(optimizers)
    if controller is not None:
        controller.restore(non_blocking=True)


def _drop_scratch() -> None:
    """Drops scratch tensors that Transformer Engine and Megatron keep between steps and make again.
    Does nothing where these are not loaded."""
    engine = sys.modules.get("transformer_engine.pytorch.module.base")
    wgrads = getattr(engine, "_dummy_wgrads", None)
    if wgrads is not None:
        wgrads.clear()
    state = sys.modules.get("megatron.core.parallel_state")
    shared = getattr(state, "_GLOBAL_MEMORY_BUFFER", None)
    if shared is not None:
        shared.buffer.clear()


def _clear(optimizer: Any, config: Any) -> None:
    controller = attach(optimizer, config)
    if controller is not None:
        controller.offload()


def _check_device(optimizer: Any, device_id: Any) -> None:
    """Parameters say where states belong, for these are on the host just now."""
    import torch

    wanted = device_id if isinstance(device_id, int) else torch.device(device_id).index
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.is_cuda and wanted is not None and parameter.device.index != wanted:
                raise InvalidError(
                    f"the states belong to {parameter.device} and cannot be loaded to device "
                    f"{device_id}: refit brings them back to where they were"
                )
            return


def enable_activation_offloading(
    model: Any, strategy: str, enable_ckpt: bool = False, *, config: Any = None
) -> None:
    """Activations of ``model`` leave in each forward pass in training mode, as long as it exists.

    In place of verl's, which replaces transformers' checkpointing by its own if `enable_ckpt`: here
    checkpointing stays as the model has it, and what it keeps leaves. `strategy` is not used: the
    layers are those of the model, wrapped or not. A second call for a model does nothing. Raises
    what refit.ActivationOffload raises.
    """
    from refit.activations.offload import ActivationOffload

    if getattr(model, _HELD, None) is None or getattr(model, _HELD).offload is None:
        offload = ActivationOffload(model, config=divided(config)[0])
        offload.attach()
        setattr(model, _HELD, _Held(offload))


_HELD = "_refit_activations"


class _Held:
    """Keeps a model's offload as long as the model. A copy of the model has none."""

    def __init__(self, offload: Any = None) -> None:
        self.offload = offload

    def __reduce__(self) -> Any:
        return _Held, ()


PLACES: dict[str, tuple[str, ...]] = {
    FSDP_UTILS: ("offload_fsdp_optimizer", "load_fsdp_optimizer"),
    MEGATRON_UTILS: ("offload_megatron_optimizer", "load_megatron_optimizer"),
}
TAKES = "get_megatron_optimizer"
ENABLES = "enable_activation_offloading"


@dataclass
class Installation:
    """Where refit's functions are in verl, and what was there; a context manager."""

    _before: list[tuple[Any, str, Any]] = field(default_factory=list, repr=False)

    @property
    def places(self) -> list[str]:
        """The names that were replaced: "verl.utils.fsdp_utils.offload_fsdp_optimizer", …"""
        return [f"{module.__name__}.{name}" for module, name, _ in self._before]

    def put(self, module: Any, name: str, ours: Any) -> None:
        """Replaces one name, and remembers what was there."""
        self._before.append((module, name, getattr(module, name)))
        setattr(module, name, ours)

    def remove(self) -> None:
        """Puts back what was there. Bring states back before. Idempotent."""
        while self._before:
            module, name, there = self._before.pop()
            setattr(module, name, there)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()


def install(config: Any = None) -> Installation:
    """Puts refit's four functions in the places of verl's, in all modules of verl that have them.

    `config` is refit's own (a mapping, a file, a refit.Config); a mapping may have, with
    the options, the ``schedule`` of refit.Controller (docs/windows.md). Of the two modules that
    verl has them in, one may be missing (Megatron is optional). Call it in each training worker,
    before its engine is made: a module that is imported later takes the new names in by itself.
    StateError if it was done already; NotFoundError if verl is not there, or is one without these
    functions, and for an option that refit does not have; InvalidError and ConfigError for a value
    that cannot be.
    """
    check(config)
    installation = Installation()
    ours = _functions(config)
    for path, names in PLACES.items():
        module = _import(path)
        for name in names if module is not None else ():
            there = getattr(module, name, None)
            if there is None:
                installation.remove()
                raise NotFoundError(f"{path} has no {name}: this verl is not known to refit")
            if getattr(there, "_refit", False):
                installation.remove()
                raise StateError("refit is installed in this verl already: remove it first")
            _put_everywhere(installation, there, name, ours[name])
    if not installation.places:
        raise NotFoundError(f"verl is not there: neither {' nor '.join(PLACES)} can be imported")
    _put_one(installation, MEGATRON_OPTIMIZER, TAKES, lambda there: _taking(there, config))
    _put_one(installation, ACTIVATIONS, ENABLES, lambda there: _enabling(there, config))
    return installation


def _put_one(
    installation: Installation, path: str, name: str, ours: Callable[[Any], Callable[..., Any]]
) -> None:
    """Replaces a function of a module that may be missing, by what is made of it."""
    module = _import(path)
    if module is not None:
        there = getattr(module, name, None)
        if there is None:
            installation.remove()
            raise NotFoundError(f"{path} has no {name}: this verl is not known")
        _put_everywhere(installation, there, name, ours(there))


def _functions(config: Any) -> dict[str, Callable[..., None]]:
    """The four, as verl calls them, with the configuration inside."""

    def offload_fsdp(optimizer: Any) -> None:
        offload_fsdp_optimizer(optimizer, config=config)

    def load_fsdp(optimizer: Any, device_id: Any) -> None:
        load_fsdp_optimizer(optimizer, device_id)

    def offload_megatron(optimizers: Any) -> None:
        offload_megatron_optimizer(optimizers, config=config)

    def load_megatron(optimizers: Any) -> None:
        load_megatron_optimizer(optimizers)

    names = [name for group in PLACES.values() for name in group]
    functions = (offload_fsdp, load_fsdp, offload_megatron, load_megatron)
    for name, function in zip(names, functions, strict=True):
        function.__name__ = name
        # As text, since the type of functions knows no such attribute.
        setattr(function, "_refit", True)  # noqa: B010
    return dict(zip(names, functions, strict=True))


def _taking(original: Callable[..., Any], ours: Any) -> Callable[..., Any]:
    """``get_megatron_optimizer``, with refit in the place of the offload that verl's configuration
    asks for, from the optimizer's first step on; not where refit's memory is pageable."""

    @functools.wraps(original)
    def get_megatron_optimizer(model: Any, config: Any) -> Any:
        pinned = make_config(divided(ours)[0]).get("use_pinned_optimizer_offload")
        keywords = megatron.offload_keywords(config) if pinned else {}
        if keywords:
            state_offload.switch_off(config)
        optimizer = original(model=model, config=config)
        if keywords:
            attach(optimizer, ours, **keywords)
        return optimizer

    return get_megatron_optimizer


def _enabling(original: Callable[..., None], ours: Any) -> Callable[..., None]:
    """``enable_activation_offloading`` as verl calls it, with the configuration inside; verl's own
    where refit has no host memory for activations."""

    @functools.wraps(original)
    def enabling(model: Any, strategy: str, enable_ckpt: bool = False) -> None:
        if make_config(divided(ours)[0]).get("activations.host_bytes"):
            enable_activation_offloading(model, strategy, enable_ckpt, config=ours)
        else:
            original(model, strategy, enable_ckpt)

    return enabling


def _put_everywhere(installation: Installation, there: Any, name: str, ours: Any) -> None:
    """In the module that defines it, and in those that did ``from … import`` before."""
    for path, module in sorted(sys.modules.items()):
        if path.split(".")[0] == "verl" and vars(module).get(name) is there:
            installation.put(module, name, ours)


def _import(path: str) -> Any:
    try:
        return importlib.import_module(path)
    except ImportError:
        return None


# ---- Weights


class RefitCheckpointEngine(Engine):
    """verl's CheckpointEngine over a refit publisher; ``backend: refit``.

    Its keywords are those of ``refit.integrations._engine.Engine``, from
    ``rollout.checkpoint_engine.engine_kwargs.refit``; verl adds ``bucket_size``, and ``is_master``
    on the trainer's first rank, which publishes. It stays connected from refit to refit.
    """

    wire_format = "named_tensors"

    def prepare(self) -> dict[str, Any]:
        """On the trainer's first rank opens the publisher; says where."""
        return {"refit": self.open_publisher()} if self.is_master else {}

    @classmethod
    def build_topology(
        cls, trainer_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """What each worker is told: its rank, where the trainer is, how many rollouts there are.

        StateError unless exactly one worker publishes.
        """
        where = [one["refit"] for one in metadata if one and "refit" in one]
        if len(where) != 1:
            raise StateError(f"{len(where)} workers publish: verl's trainer has one first rank")
        trainer: dict[str, list[Any]] = {
            "endpoint": [None] * trainer_world_size,
            "rank": list(range(trainer_world_size)),
            "rollouts": [rollout_world_size] * trainer_world_size,
        }
        rollout: dict[str, list[Any]] = {
            "endpoint": where * rollout_world_size,
            "rank": list(range(rollout_world_size)),
            "rollouts": [rollout_world_size] * rollout_world_size,
        }
        return trainer, rollout

    def init_process_group(self, *, endpoint: str | None, rank: int, rollouts: int) -> None:
        """Takes the side that it was told; what is connected stays so."""
        if endpoint is not None:
            self.connect(endpoint, f"rollout-{rank}")
        elif self.is_master:
            self.expect(rollouts)
        else:
            self.take_part()

    def finalize(self) -> None:
        """Lets go of the version in hand; the connection stays for the next refit."""
        self.let_go()

    async def send_weights(
        self, weights: Iterable[tuple[str, Any]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Publishes `weights`, as version `global_steps` if that number is above those before;
        returns when all workers have applied it. Other ranks only run it."""
        await self.publish(weights, global_steps)
        return self.stats()

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncGenerator[tuple[str, Any], None]:
        """The next version, tensor by tensor; readable until ``finalize``. One from before
        `global_steps` is refused: a rollout that could not load it is offered it again."""
        async with aclosing(self.batches(global_steps)) as batches:
            async for batch in batches:
                for named in batch:
                    yield named


def register() -> None:
    """Makes ``backend: refit`` known to verl. Importing this module where verl is does it."""
    registry = importlib.import_module(REGISTRY).CheckpointEngineRegistry
    registry.register("refit")(RefitCheckpointEngine)


if "verl" in sys.modules and _import(REGISTRY) is not None:
    register()
