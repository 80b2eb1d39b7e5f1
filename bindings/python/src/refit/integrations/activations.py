"""Options by which frameworks let activations leave the device, as keywords of
``refit.ActivationOffload``.

    chosen = refit.integrations.activations.take(args)      # before the framework reads them
    ...
    if chosen is not None:
        activations = refit.ActivationOffload(model, **{"host_bytes": "8GiB", **chosen})

| option | framework | keyword |
|---|---|---|
| ``activation_offloading`` | TRL | |
| ``activation_checkpointing_kwargs["offload"]``, ``gradient_…`` | transformers | |
| ``activation_checkpointing_offload``, ``fsdp_…``, also in ``fsdp_config`` | accelerate | |
| ``activation_cpu_offload``, also in ``fsdp_config`` | ms-swift | |
| ``enable_activation_offload`` | verl | |
| ``cpu_offloading`` with ``cpu_offloading_num_layers`` | Megatron | ``keep_last``, the others |
| ``cpu_offloading_double_buffering`` | Megatron | ``prefetch=1``, if true |
| ``fine_grained_activation_offloading`` | Megatron | |
| ``activation_offload_fraction`` | Megatron | ``host_bytes``, if ``saved_bytes`` is given |
| ``min_offloaded_tensor_size`` | Megatron | ``min_bytes``, of elements |
| ``fine_grained_offloading_max_inflight_offloads`` | Megatron | ``in_flight`` |

The first five say no more than that activations leave, or those that checkpointing keeps. What a
name means there and not here is a warning, or an error where memory cannot be had as it is asked
for. docs/framework-transformers.md and docs/framework-megatron.md have the differences. The names
and defaults are those of trl/trainer/sft_config.py (TRL 1.16), transformers/training_args.py
(5.23), accelerate/utils/dataclasses.py (1.15), swift/trainers/arguments.py (ms-swift 4.6),
verl/workers/config/model.py (verl 0.9.1), and megatron/core/model_parallel_config.py with
transformer/transformer_config.py (NVIDIA/Megatron-LM main, 2026-08). None of them is imported here.
"""

import warnings
from argparse import Namespace
from collections.abc import Iterator, Mapping
from math import ceil
from typing import Any

from refit._c.config import bytes_of
from refit.errors import InvalidError, UnsupportedError
from refit.integrations._options import (
    Change,
    Said,
    changes,
    make,
    plain,
    refuse_constant,
    refuse_none,
)

SWITCHES = (
    "activation_offloading",
    "activation_checkpointing_offload",
    "fsdp_activation_checkpointing_offload",
    "activation_cpu_offload",
    "enable_activation_offload",
)
"""True or false, and nothing beside it."""

CHECKPOINTING = ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")
OFFLOAD = "offload"
FSDP = "fsdp_config"

LAYERS = "cpu_offloading"
LAYER_COUNT = "cpu_offloading_num_layers"
LAYER_ACTIVATIONS = "cpu_offloading_activations"
LAYER_WEIGHTS = "cpu_offloading_weights"
DOUBLE_BUFFERING = "cpu_offloading_double_buffering"

MODULES = "fine_grained_activation_offloading"
MODULE_NAMES = "offload_modules"
FRACTION = "activation_offload_fraction"
SMALLEST = "min_offloaded_tensor_size"
IN_FLIGHT = "fine_grained_offloading_max_inflight_offloads"
BY_STAGE = "delta_offload_bytes_across_pp_ranks"

GRAPHS = ("enable_cuda_graph", "external_cuda_graph")
GRAPH_KIND = "cuda_graph_impl"

MOST_IN_FLIGHT = 16
"""Of ``activations.in_flight``."""

HALF = ("bf16", "fp16")


def keywords(options: Any, *, saved_bytes: int | str | None = None) -> dict[str, Any] | None:
    """The keywords of ``refit.ActivationOffload`` that a framework's options ask for, and None if
    none of them lets activations leave.

    ``options``: a mapping or an object with attributes, such as an ``argparse.Namespace``,
    ``TrainingArguments`` or an FSDP plugin of accelerate; names with ``-`` or ``_``.
    ``saved_bytes``: what a forward pass of this rank saves, of which a fraction may leave
    (``refit/activation_saved_bytes_last`` of an iteration without it), or "8GiB". Changes nothing;
    does not block. InvalidError: a value that cannot be. UnsupportedError: an option that has no
    meaning here.
    """
    return _read(options, saved_bytes)


def take(options: Any, *, saved_bytes: int | str | None = None) -> dict[str, Any] | None:
    """As ``keywords``, and switches the framework's own offload off in ``options``, which would
    take the same place: call it before the framework reads them.

    InvalidError also if ``options`` cannot be changed; then nothing is.
    """
    found = _read(options, saved_bytes)
    if found is not None:
        switch_off(options)
    return found


def switch_off(options: Any) -> None:
    """What ``take`` does with options of which ``keywords`` were read before. InvalidError: they
    cannot be changed, and nothing is."""
    removed = [one for one in _checkpointing(options) if _offload_of(one) is not None]
    try:
        for owner in removed:
            refuse_constant(owner)
        make(list(_switched_off(options)))
    except (AttributeError, TypeError, ValueError) as why:
        raise InvalidError(
            f"the framework's own offload cannot be switched off in its options: {why}; set "
            f"{', '.join(asked(options))} to false yourself, and call keywords"
        ) from why
    for owner in removed:
        del owner[_offload_of(owner)]


def asked(options: Any) -> list[str]:
    """The names of the options that let activations leave, as the framework has them."""
    found = []
    for place in _places(options):
        said = Said(place)
        found += [name for name in SWITCHES if said.flag(name)]
    found += [
        f'{name}["{OFFLOAD}"]'
        for name in CHECKPOINTING
        if _offload_is_on(Said(options).get(name), name)
    ]
    said = Said(options)
    # Megatron sets the switch by the count where it makes a TransformerConfig of its arguments.
    counts = isinstance(options, Namespace | Mapping) or said.get(LAYERS) is None
    if said.flag(LAYERS) or (counts and said.has(LAYER_COUNT)):
        found.append(LAYERS)
    if said.flag(MODULES):
        found.append(MODULES)
    return found


def _read(options: Any, saved_bytes: int | str | None) -> dict[str, Any] | None:
    refuse_none(options)
    names = asked(options)
    if LAYERS in names and MODULES in names:
        raise InvalidError(
            f"{LAYERS} and {MODULES} are both set: Megatron has either; leave one out"
        )
    said = Said(options)
    if LAYERS in names:
        found = _of_layers(said)
    elif MODULES in names:
        found = _of_modules(said, saved_bytes)
    else:
        return {} if names else None
    others = [name for name in names if name not in (LAYERS, MODULES)]
    return {} if found is None and others else found


def _of_layers(said: Said) -> dict[str, Any] | None:
    _refuse_graphs(said)
    if said.flag(LAYER_WEIGHTS):
        raise UnsupportedError(
            f"{LAYER_WEIGHTS} moves weights with the activations; here weights stay on the device: "
            "leave it out"
        )
    if said.get(LAYER_ACTIVATIONS) is not None and not said.flag(LAYER_ACTIVATIONS):
        return None
    leave = _count(said, LAYER_COUNT) or 0
    if leave == 0:  # to Transformer Engine this is as without the switch
        return None
    stages = said.number("pipeline_model_parallel_size")
    if stages is not None and stages > 1:
        raise UnsupportedError(
            f"{LAYER_COUNT} counts layers of the whole model, and a stage of "
            f"pipeline_model_parallel_size={stages} has some of them: give "
            "refit.ActivationOffload keep_last, the layers of this stage that stay, and leave it "
            "out"
        )
    layers = _count(said, "num_layers")
    if layers is None:
        raise InvalidError(
            f"{LAYER_COUNT} is {leave} and num_layers is not said: the last layers stay, and how "
            "many these are is not known"
        )
    if leave >= layers:
        raise InvalidError(f"{LAYER_COUNT} is {leave}: it is less than num_layers, {layers}")
    found: dict[str, Any] = {"keep_last": layers - leave}
    if said.flag(DOUBLE_BUFFERING):
        found["prefetch"] = 1
    return found


def _of_modules(said: Said, saved_bytes: int | str | None) -> dict[str, Any] | None:
    _refuse_graphs(said)
    fraction = said.share(FRACTION)
    if fraction == 0:
        return None
    found: dict[str, Any] = {}
    elements, in_flight = _count(said, SMALLEST), _count(said, IN_FLIGHT)
    if elements:
        found["min_bytes"] = elements * _width(said)
    if in_flight is not None:
        found["in_flight"] = min(max(in_flight, 1), MOST_IN_FLIGHT)
        if found["in_flight"] != in_flight:
            _warn(
                f"{IN_FLIGHT}={in_flight} becomes in_flight={found['in_flight']}: here it is from "
                f"1 to {MOST_IN_FLIGHT}"
            )
    names = said.get(MODULE_NAMES)
    if names:
        _warn(
            f"{MODULE_NAMES}={names!r} is not used: it names modules whose inputs leave; here all "
            "leaves that a layer saves, and is large enough"
        )
    if said.has(BY_STAGE):
        _warn(
            f"{BY_STAGE}={said.get(BY_STAGE)} is not used: give the ranks of each stage a "
            "host_bytes of their own"
        )
    if fraction is None or fraction == 1:
        return found
    if saved_bytes is None:
        _warn(
            f"{FRACTION}={fraction} is not used: it counts groups in Megatron and bytes here, and "
            "how many bytes are saved is not known; give saved_bytes, or a host_bytes that is as "
            "large as what may leave"
        )
    else:
        found["host_bytes"] = ceil(bytes_of("saved_bytes", saved_bytes) * fraction)
    return found


def _refuse_graphs(said: Said) -> None:
    kind = said.get(GRAPH_KIND)
    on = [name for name in GRAPHS if said.flag(name)]
    if kind not in (None, "none"):
        on.append(f"{GRAPH_KIND}={kind}")
    if on:
        raise UnsupportedError(
            f"{on[0]} captures the forward pass in a CUDA graph, where no hook sees what is saved: "
            "leave it out, or Megatron's own offload on"
        )


def _width(said: Said) -> int:
    """Bytes of an element of the activations."""
    named = str(said.get("params_dtype") or "").removeprefix("torch.")
    if named in ("bfloat16", "float16") or any(said.flag(name) for name in HALF):
        return 2
    return 4


def _count(said: Said, name: str) -> int | None:
    value = said.number(name)
    if value is not None and (value < 0 or value != int(value)):
        raise InvalidError(f"{name} is {value}: it is a whole number from 0 on")
    return None if value is None else int(value)


def _places(options: Any) -> Iterator[Any]:
    """Where switches are: the options, and what they have as the configuration of FSDP."""
    yield options
    inner = Said(options).get(FSDP)
    if isinstance(inner, Mapping):
        yield inner


def _checkpointing(options: Any) -> list[Any]:
    """The mappings with options of checkpointing; one mapping may have both names."""
    found = [Said(options).get(name) for name in CHECKPOINTING]
    return list({id(one): one for one in found if isinstance(one, Mapping)}.values())


def _offload_of(kwargs: Mapping[Any, Any]) -> Any:
    """The key, which has to be removed: what reads it hands the others to PyTorch."""
    return next((key for key in kwargs if plain(key) == OFFLOAD), None)


def _offload_is_on(kwargs: Any, name: str) -> bool:
    if not isinstance(kwargs, Mapping):
        return False
    value = Said(kwargs).get(OFFLOAD)
    if value is not None and not isinstance(value, bool):
        raise InvalidError(f'{name}["{OFFLOAD}"] is {value!r}: it is true or false')
    return bool(value)


def _switched_off(options: Any) -> Iterator[Change]:
    yield from changes(options, (LAYERS, MODULES), False)
    yield from changes(options, (LAYER_COUNT,), 0)  # Megatron's arguments set the switch by it
    for place in _places(options):
        yield from changes(place, SWITCHES, False)


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=5)  # the code that called keywords or take
