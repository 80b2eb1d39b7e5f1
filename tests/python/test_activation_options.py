"""Frameworks' options for activations that leave, and the keywords that they become."""

import argparse
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from refit.errors import InvalidError, UnsupportedError
from refit.integrations import state_offload
from refit.integrations.activations import SWITCHES, keywords, take

pytestmark = pytest.mark.filterwarnings("error")
Make = Callable[[dict[str, Any]], Any]


def layers(**said: Any) -> dict[str, Any]:
    """Megatron's options by layer."""
    counts = {"cpu_offloading_num_layers": 20, "num_layers": 24}
    return {"cpu_offloading": True, **counts, **said}


def modules(**said: Any) -> dict[str, Any]:
    """Megatron's options by module, without the names of modules, of which a warning tells."""
    return {"fine_grained_activation_offloading": True, **said}


def parsed(line: str = "") -> argparse.Namespace:
    """A command line, as Megatron declares it, with its defaults."""
    parser = argparse.ArgumentParser()
    for name in (
        *("cpu-offloading", "cpu-offloading-weights", "bf16"),
        *("cpu-offloading-double-buffering", "fine-grained-activation-offloading"),
    ):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument(
        "--no-cpu-offloading-activations", action="store_false", dest="cpu_offloading_activations"
    )
    parser.add_argument("--cpu-offloading-num-layers", type=int, default=0)
    parser.add_argument("--num-layers", type=int, default=None)
    parser.add_argument("--offload-modules", nargs="*", default=[])
    parser.add_argument("--min-offloaded-tensor-size", type=int, default=1 << 20)
    parser.add_argument("--activation-offload-fraction", type=float, default=1.0)
    parser.add_argument("--delta-offload-bytes-across-pp-ranks", type=int, default=0)
    parser.add_argument("--fine-grained-offloading-max-inflight-offloads", type=int, default=None)
    parser.add_argument("--cuda-graph-impl", default="none")
    return parser.parse_args(line.split())


@pytest.mark.parametrize("options", [None, "cpu_offloading", 1, [("cpu_offloading", True)]])
def test_what_is_no_options_is_refused(options: Any) -> None:
    for read in (keywords, take, state_offload.keywords, state_offload.take):
        with pytest.raises(InvalidError, match="a mapping or an object with attributes, and not"):
            read(options)


LAYERS = "--cpu-offloading-num-layers 20 --num-layers 24"
BUFFERS = "--cpu-offloading --cpu-offloading-double-buffering"
MODULES = "--fine-grained-activation-offloading"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # without a switch, or with one for nothing
        (parsed(), None),
        ({}, None),
        (SimpleNamespace(), None),
        ({"cpu_offloading": False}, None),
        (dict.fromkeys(SWITCHES), None),
        ({"fsdp_config": {"activation_cpu_offload": False}}, None),
        ({"fsdp_config": "fsdp.json", "gradient_checkpointing_kwargs": None}, None),
        ({"activation_checkpointing_kwargs": {"use_reentrant": True}}, None),
        (parsed("--activation-offload-fraction 0.5"), None),
        ({"--cpu-offloading": True}, None),
        (layers(cpu_offloading_activations=False), None),
        (layers(cpu_offloading_num_layers=0), None),
        (SimpleNamespace(**layers(cpu_offloading=False)), None),  # as a TransformerConfig
        (modules(activation_offload_fraction=0.0), None),
        # layers: those that leave come first
        (parsed(LAYERS), {"keep_last": 4}),  # Megatron's arguments set the switch by it
        (parsed(f"{LAYERS} {BUFFERS}"), {"keep_last": 4, "prefetch": 1}),
        (layers(cpu_offloading_activations=True), {"keep_last": 4}),
        (layers(recompute_granularity="full"), {"keep_last": 4}),
        (SimpleNamespace(**layers()), {"keep_last": 4}),
        (layers(cpu_offloading_num_layers=0, activation_offloading=True), {}),
        # modules
        (parsed(MODULES), {"min_bytes": 4 << 20}),
        (parsed(f"{MODULES} --bf16"), {"min_bytes": 2 << 20}),
        (modules(min_offloaded_tensor_size=5, params_dtype="torch.float16"), {"min_bytes": 10}),
        (modules(min_offloaded_tensor_size=0), {}),
        (modules(fine_grained_offloading_max_inflight_offloads=1), {"in_flight": 1}),
        (modules(fine_grained_offloading_max_inflight_offloads=16), {"in_flight": 16}),
        (modules(pipeline_model_parallel_size=4), {}),  # where no layers are counted
    ],
    ids=str,
)
def test_options_become_keywords(options: Any, expected: dict[str, Any] | None) -> None:
    assert keywords(options) == expected
    assert take(options) == expected
    assert take(options) is None


@pytest.mark.parametrize("make", [dict, lambda said: SimpleNamespace(**said)])
@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_without_figures_is_taken(name: str, make: Make) -> None:
    options = make({name: True, "bf16": True})
    assert keywords(options) == {}
    assert take(options) == {}
    assert (options if isinstance(options, dict) else vars(options)) == {name: False, "bf16": True}
    assert take(options) is None


@pytest.mark.parametrize("name", ["activation_cpu_offload", "activation_checkpointing_offload"])
def test_a_switch_in_the_configuration_of_fsdp_is_taken(name: str) -> None:
    inner = {name: True, "activation_checkpointing": True}
    options = SimpleNamespace(fsdp_config=inner)
    assert take(options) == {}
    assert inner == {name: False, "activation_checkpointing": True}


def test_what_checkpointing_keeps_is_taken_and_the_key_removed() -> None:
    kwargs = {"use_reentrant": False, "offload": True}
    options = SimpleNamespace(
        activation_checkpointing_kwargs=kwargs, gradient_checkpointing_kwargs=kwargs
    )
    assert take(options) == {}
    assert kwargs == {"use_reentrant": False}
    assert take(options) is None
    off = {"gradient_checkpointing_kwargs": {"offload": False}}
    assert take(off) is None
    assert off == {"gradient_checkpointing_kwargs": {"offload": False}}


def test_what_is_taken_from_megatron_is_off_there() -> None:
    args = parsed("--cpu-offloading --cpu-offloading-num-layers 1 --num-layers 2")
    assert take(args) == {"keep_last": 1}
    assert args.cpu_offloading is False
    assert args.cpu_offloading_num_layers == 0
    assert take(args) is None
    said = modules(activation_offload_fraction=1.0)
    assert take(said) == {}
    assert said == {"fine_grained_activation_offloading": False, "activation_offload_fraction": 1.0}


def test_a_fraction_is_one_of_bytes() -> None:
    said = modules(activation_offload_fraction=0.25)
    assert keywords(said, saved_bytes=4001) == {"host_bytes": 1001}
    assert keywords(said, saved_bytes=0) == {"host_bytes": 0}
    assert keywords(modules(activation_offload_fraction=1), saved_bytes=1 << 30) == {}


@pytest.mark.parametrize(
    ("said", "sentence", "expected"),
    [
        (modules(activation_offload_fraction=0.5), "counts groups in Megatron and bytes here", {}),
        (modules(offload_modules=["core_attn"]), r"\['core_attn'\] is not used: it names", {}),
        (modules(delta_offload_bytes_across_pp_ranks=1 << 20), "=1048576 is not used", {}),
        *(
            (
                modules(fine_grained_offloading_max_inflight_offloads=count),
                f"{count} becomes in_flight={becomes}: .* 1 to 16",
                {"in_flight": becomes},
            )
            for count, becomes in ((0, 1), (100, 16))
        ),
    ],
)
def test_what_a_name_means_there_and_not_here_is_a_warning(
    said: dict[str, Any], sentence: str, expected: dict[str, Any]
) -> None:
    for call in (keywords, take):
        with pytest.warns(UserWarning, match=sentence) as seen:
            assert call(dict(said)) == expected
        assert seen[0].filename == __file__


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"activation_offloading": "yes"}, "activation_offloading is 'yes': it is true or false"),
        ({"fsdp_config": {"activation_cpu_offload": 1}}, "it is true or false"),
        (
            {"gradient_checkpointing_kwargs": {"offload": "cpu"}},
            r"""gradient_checkpointing_kwargs\["offload"\] is 'cpu'""",
        ),
        ({**layers(), **modules()}, "Megatron has either"),
        (layers(num_layers=None), "num_layers is not said"),
        (layers(cpu_offloading_num_layers=24), "less than num_layers, 24"),
        (layers(cpu_offloading_num_layers=-1), "whole number from 0"),
        (layers(cpu_offloading_num_layers=1.5), "whole number from 0"),
        (layers(cpu_offloading_num_layers="2"), "it is a finite number"),
        (layers(cpu_offloading_double_buffering=2), "it is true or false"),
        (modules(activation_offload_fraction=1.01), "a share from 0 to 1"),
        (modules(activation_offload_fraction=-0.1), "a share from 0 to 1"),
        (modules(activation_offload_fraction=float("nan")), "it is a finite number"),
        (modules(min_offloaded_tensor_size=-1), "whole number from 0"),
        (modules(activation_offload_fraction=0.5), "saved_bytes=-1"),
    ],
)
def test_invalid_values_are_refused_and_change_nothing(said: dict[str, Any], sentence: str) -> None:
    before = repr(said)
    for call in (keywords, take):
        with pytest.raises(InvalidError, match=sentence):
            call(said, saved_bytes=-1)
    assert repr(said) == before


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (layers(cpu_offloading_weights=True), "here weights stay on the device"),
        (layers(pipeline_model_parallel_size=2), "counts layers of the whole model"),
        (layers(enable_cuda_graph=True), "enable_cuda_graph captures the forward pass"),
        (layers(cuda_graph_impl="local"), "cuda_graph_impl=local captures"),
        (modules(external_cuda_graph=True), "external_cuda_graph captures"),
    ],
)
def test_options_without_a_meaning_here_are_refused(said: dict[str, Any], sentence: str) -> None:
    for call in (keywords, take):
        with pytest.raises(UnsupportedError, match=sentence):
            call(said)


def test_options_that_cannot_be_changed_are_read_and_not_taken() -> None:
    @dataclass(frozen=True)
    class Frozen:
        activation_offloading: bool = True
        fsdp_config: dict[str, bool] = field(
            default_factory=lambda: {"activation_cpu_offload": True}
        )

    constant = MappingProxyType({"offload": True})
    for options in (
        Frozen(),
        MappingProxyType({"activation_cpu_offload": True}),
        {"activation_offloading": True, "gradient_checkpointing_kwargs": constant},
    ):
        before = repr(options)
        assert keywords(options) == {}
        with pytest.raises(InvalidError, match=r"set activation_\w+.* to false yourself"):
            take(options)
        assert repr(options) == before


def test_what_is_asked_for_are_keywords_of_an_activation_offload() -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    from refit.activations.offload import ActivationOffload

    known = set(inspect.signature(ActivationOffload).parameters)
    assert {"keep_last", "prefetch", "min_bytes", "in_flight", "host_bytes"} <= known
