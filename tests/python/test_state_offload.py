"""Frameworks' options for states on the host, and the keywords that they become."""

import argparse
import inspect
import warnings
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from refit.config import load_config
from refit.errors import InvalidError, UnsupportedError
from refit.integrations.state_offload import SMALLEST_WINDOW, keywords, take


def megatron(**said: Any) -> dict[str, Any]:
    return {
        "chunked_optimizer_state_offload": True,
        "optimizer_state_offload_chunk_size_mb": 256,
        **said,
    }


def stepped(**said: Any) -> dict[str, Any]:
    """Megatron's options for a share that the CPU steps."""
    return {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5, **said}


def zero(**said: Any) -> dict[str, Any]:
    """DeepSpeed's."""
    return {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", **said}}}


def parsed(*words: str) -> argparse.Namespace:
    """As Megatron and MindSpeed declare them, with their defaults."""
    parser = argparse.ArgumentParser()
    for name in ("--swap-optimizer", "--chunked-optimizer-state-offload"):
        parser.add_argument(name, action="store_true")
    parser.add_argument("--offload-optimizer-states", action="store_true")
    parser.add_argument("--swap-optimizer-times", type=int, default=16)
    parser.add_argument("--optimizer-state-offload-chunk-size-mb", type=int, default=0)
    parser.add_argument("--optimizer-state-offload-fraction", type=float, default=1.0)
    parser.add_argument("--optimizer-cpu-offload", action="store_true")
    parser.add_argument("--optimizer-offload-fraction", type=float, default=1.0)
    parser.add_argument("--use-torch-optimizer-for-cpu-offload", action="store_true")
    parser.add_argument("--overlap-cpu-optimizer-d2h-h2d", action="store_true")
    parser.add_argument("--no-pin-cpu-grads", action="store_false", dest="pin_cpu_grads")
    parser.add_argument("--no-pin-cpu-params", action="store_false", dest="pin_cpu_params")
    parser.add_argument("--use-precision-aware-optimizer", action="store_true")
    return parser.parse_args(words)


@pytest.fixture(autouse=True)
def no_warning() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("options", [None, "swap_optimizer", 1, [("swap_optimizer", True)]])
def test_what_is_no_options_is_refused(options: Any) -> None:
    for read in (keywords, take):
        with pytest.raises(InvalidError, match="a mapping or an object with attributes, and not"):
            read(options)


def test_without_a_switch_nothing_is_asked_for() -> None:
    assert keywords(parsed()) == keywords({}) == keywords(SimpleNamespace()) == {}
    assert keywords({"swap_optimizer": False, "swap_optimizer_times": 4}) == {}
    assert keywords({"swap_optimizer": None}) == {}


def test_megatrons_arguments() -> None:
    words = "--optimizer-state-offload-chunk-size-mb 64 --optimizer-state-offload-fraction 0.25"
    found = keywords(parsed("--chunked-optimizer-state-offload", *words.split()))
    assert found == {"states": "host", "window_bytes": 64 << 20, "host_fraction": 0.25}


def test_names_may_be_written_as_on_a_command_line() -> None:
    said = {
        "--chunked-optimizer-state-offload": True,
        "optimizer-state-offload-chunk-size-mb": 1,
    }
    assert keywords(said) == {"states": "host", "window_bytes": 1 << 20}


def test_a_chunk_size_of_zero_has_windows_all_the_same_and_says_so() -> None:
    with pytest.warns(UserWarning, match=r"=0 brings all states .* offload\.window_bytes") as seen:
        found = keywords(parsed("--offload-optimizer-states"))
    assert found == {"states": "host", "host_fraction": 1.0}
    assert seen[0].filename == __file__


def test_a_fraction_of_zero_switches_it_off_as_in_megatron() -> None:
    assert keywords(megatron(optimizer_state_offload_fraction=0.0)) == {}
    said = megatron(optimizer_state_offload_fraction=0.0)
    assert take(said) == {}
    assert said["chunked_optimizer_state_offload"] is True


def test_times_divide_the_bytes_of_the_states_where_these_are_known() -> None:
    said = {"swap_optimizer": True, "swap_optimizer_times": 16}
    assert keywords(said, state_bytes="12GiB") == keywords(said, state_bytes=12 << 30)
    assert keywords(said, state_bytes=12 << 30) == {"states": "host", "window_bytes": 768 << 20}
    assert keywords(said, state_bytes=(16 << 20) + 1)["window_bytes"] == (1 << 20) + 1
    assert keywords(said, state_bytes=0)["window_bytes"] == SMALLEST_WINDOW
    assert keywords({"swap_optimizer": True}) == {"states": "host"}


def test_times_without_bytes_are_not_used_and_a_warning_says_so() -> None:
    with pytest.warns(UserWarning, match="swap_optimizer_times=16 is not used.*state_bytes"):
        assert keywords(parsed("--swap-optimizer")) == {"states": "host"}


def test_megatrons_arguments_for_a_share_that_the_cpu_steps() -> None:
    words = ["--optimizer-cpu-offload", "--optimizer-offload-fraction", "0.25"]
    assert keywords(parsed(*words)) == {"host_fraction": 0.25, "overlap": False}
    words += ["--overlap-cpu-optimizer-d2h-h2d", "--use-torch-optimizer-for-cpu-offload"]
    expected = {"host_fraction": 0.25, "overlap": True, "host_step": "torch"}
    assert keywords(parsed(*words)) == expected
    assert keywords(parsed("--optimizer-cpu-offload"))["host_fraction"] == 1.0
    assert keywords(stepped()) == {"host_fraction": 0.5}


def test_without_optimizer_cpu_offload_the_options_beside_it_are_not_read() -> None:
    assert keywords(stepped(optimizer_cpu_offload=False, overlap_cpu_optimizer_d2h_h2d=True)) == {}
    assert keywords({"optimizer_offload_fraction": 7.0}) == {}
    assert keywords(parsed("--overlap-cpu-optimizer-d2h-h2d")) == {}


@pytest.mark.parametrize("fraction", [1, 1.0])
def test_a_share_of_all_is_a_share(fraction: float) -> None:
    assert keywords(stepped(optimizer_offload_fraction=fraction)) == {"host_fraction": fraction}


@pytest.mark.parametrize("fraction", [0, 0.0])
def test_a_share_of_nothing_is_one_and_a_warning_says_so(fraction: float) -> None:
    with pytest.warns(UserWarning, match="optimizer_offload_fraction is 0, .* steps nothing"):
        found = keywords(stepped(optimizer_offload_fraction=fraction))
    assert found == {"host_fraction": fraction}


@pytest.mark.parametrize("word", ["--no-pin-cpu-grads", "--no-pin-cpu-params"])
def test_memory_is_not_locked_where_megatron_is_told_not_to(word: str) -> None:
    found = keywords(parsed("--optimizer-cpu-offload", word))
    assert found == {"host_fraction": 1.0, "overlap": False, "offload_pin": "off"}
    assert load_config(offload_pin=found["offload_pin"]).get("offload.pin") == "off"


def test_deepspeeds_configuration() -> None:
    assert keywords(zero()) == {"host_fraction": 1.0}
    assert keywords(zero(ratio=0.3, pin_memory=True)) == {"host_fraction": 0.3}
    assert keywords(zero(ratio=0.0)) == {"host_fraction": 0.0}
    assert keywords(zero(pin_memory=False)) == {"host_fraction": 1.0, "offload_pin": "off"}
    assert keywords(zero(ratio=0.3)["zero_optimization"]) == {"host_fraction": 0.3}
    assert keywords(SimpleNamespace(offload_optimizer=SimpleNamespace(device="cpu", ratio=0.5)))
    for device in ("none", None):
        assert keywords(zero(device=device, ratio=0.3)) == {}
    assert keywords({"zero_optimization": {"stage": 3}}) == {}
    assert keywords({"offload_optimizer": True}) == {}  # of another framework


def test_what_is_taken_from_megatron_is_off_with_what_only_its_own_optimizer_reads() -> None:
    said = stepped(overlap_cpu_optimizer_d2h_h2d=True, use_torch_optimizer_for_cpu_offload=True)
    config = SimpleNamespace(
        **said,
        use_precision_aware_optimizer=True,
        use_precision_aware_optimizer_no_fp8_or_ds_fp8=True,
        exp_avg_dtype="torch.float32",
        main_grads_dtype="fp32",
    )
    assert take(config) == {"host_fraction": 0.5, "overlap": True, "host_step": "torch"}
    assert vars(config) == {
        "optimizer_cpu_offload": False,
        "optimizer_offload_fraction": 0.5,
        "overlap_cpu_optimizer_d2h_h2d": False,
        "use_torch_optimizer_for_cpu_offload": False,
        "use_precision_aware_optimizer": False,
        "use_precision_aware_optimizer_no_fp8_or_ds_fp8": False,
        "exp_avg_dtype": "torch.float32",
        "main_grads_dtype": "fp32",
    }
    assert take(config) == {}


def test_other_offloads_leave_a_precision_aware_optimizer_as_it_is() -> None:
    said = megatron(use_precision_aware_optimizer=True, exp_avg_dtype="bf16")
    take(said)
    assert said["use_precision_aware_optimizer"] is True


def test_what_is_taken_from_deepspeed_is_off_there() -> None:
    said = zero(ratio=0.3, pin_memory=True)
    assert take(said) == {"host_fraction": 0.3}
    inner = {"device": "none", "ratio": 0.3, "pin_memory": True}
    assert said["zero_optimization"] == {"stage": 3, "offload_optimizer": inner}
    assert take(said) == {}
    frozen = {"offload_optimizer": MappingProxyType({"device": "cpu"})}
    with pytest.raises(InvalidError, match="cannot be switched off"):
        take(frozen)
    assert keywords(frozen) == {"host_fraction": 1.0}


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (
            {"optimizer_cpu_offload": True},
            r"1\.0 on Megatron's command line.* 0\.0 in its Optimizer",
        ),
        (
            stepped(optimizer_offload_fraction=1.5),
            "optimizer_offload_fraction is 1.5: it is a share",
        ),
        (stepped(optimizer_offload_fraction=-0.1), "share from 0 to 1"),
        (stepped(optimizer_offload_fraction=float("nan")), "it is a finite number"),
        (stepped(optimizer_offload_fraction="0.5"), "it is a finite number"),
        (stepped(optimizer_cpu_offload="yes"), "true or false"),
        (stepped(overlap_cpu_optimizer_d2h_h2d=1), "true or false"),
        (stepped(use_torch_optimizer_for_cpu_offload="no"), "true or false"),
        (stepped(pin_cpu_grads="no"), "true or false"),
        (stepped(swap_optimizer=True), "the same choice of two frameworks"),
        ({**stepped(), **zero()}, "the same choice of two frameworks"),
        (zero(ratio=1.01), r"offload_optimizer.ratio is 1\.01: it is a share from 0 to 1"),
        (zero(ratio="all"), "it is a finite number"),
        (zero(pin_memory="yes"), "true or false"),
        (zero(device="gpu"), "it is none or cpu"),
    ],
)
def test_shares_that_cannot_be_are_refused(said: dict[str, Any], sentence: str) -> None:
    before = repr(said)
    with pytest.raises(InvalidError, match=sentence):
        keywords(said)
    with pytest.raises(InvalidError, match=sentence):
        take(said)
    assert repr(said) == before


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (stepped(optimizer_cuda_graph=True), "captures the optimizer's step"),
        (
            stepped(use_precision_aware_optimizer=True, exp_avg_dtype="bf16"),
            "exp_avg_dtype is bf16: beside optimizer_cpu_offload .* are fp32",
        ),
        (
            stepped(use_precision_aware_optimizer=True, main_grads_dtype="torch.bfloat16"),
            "main_grads_dtype is torch.bfloat16",
        ),
        (zero(device="nvme", nvme_path="/disk"), "in host memory here, and on no disk"),
    ],
)
def test_shares_without_a_meaning_here_are_refused(said: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        keywords(said)


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"swap_optimizer": "yes"}, "swap_optimizer is 'yes': it is true or false"),
        ({"swap_optimizer": 1}, "true or false"),
        ({"swap_optimizer": True, "swap_optimizer_times": 0}, "whole number from 1"),
        ({"swap_optimizer": True, "swap_optimizer_times": 1.5}, "whole number from 1"),
        ({"swap_optimizer": True, "swap_optimizer_times": "16"}, "it is a finite number"),
        ({"swap_optimizer": True, "swap_optimizer_times": True}, "it is a finite number"),
        (megatron(swap_optimizer=True), "the same choice of two frameworks"),
        (megatron(optimizer_state_offload_chunk_size_mb=-1), "0 or more"),
        (megatron(optimizer_state_offload_fraction=1.5), "share from 0 to 1"),
        (megatron(optimizer_state_offload_fraction=-0.5), "share from 0 to 1"),
        (megatron(optimizer_state_offload_fraction=float("nan")), "it is a finite number"),
        (megatron(optimizer_state_offload_chunk_size_mb=float("inf")), "it is a finite number"),
        (megatron(optimizer_cpu_offload=True), "steps states on the CPU"),
    ],
)
def test_values_that_cannot_be_are_refused(said: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidError, match=sentence):
        keywords(said, state_bytes=1 << 20)


def test_negative_bytes_are_refused() -> None:
    with pytest.raises(InvalidError, match="state_bytes=-1"):
        keywords({"swap_optimizer": True, "swap_optimizer_times": 2}, state_bytes=-1)


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (megatron(optimizer_cuda_graph=True), "captures the optimizer's step"),
        ({"swap_optimizer": True, "swap_optimizer_sizes": 8.0}, "resident_bytes"),
        ({"swap_optimizer": True, "swap_optimizer_sizes": [8, 4]}, "resident_bytes"),
    ],
)
def test_options_without_a_meaning_here_are_refused(said: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        keywords(said)


@pytest.mark.parametrize("make", [dict, lambda said: SimpleNamespace(**said)])
def test_what_is_taken_is_switched_off_in_the_framework(make: Any) -> None:
    options = make(megatron(offload_optimizer_states=True))
    found = take(options)
    assert found == {"states": "host", "window_bytes": 256 << 20}
    left = options if isinstance(options, dict) else vars(options)
    assert left == {
        "chunked_optimizer_state_offload": False,
        "offload_optimizer_states": False,
        "optimizer_state_offload_chunk_size_mb": 256,
    }
    assert take(options) == {}


def test_options_that_cannot_be_changed_are_refused_and_read() -> None:
    @dataclass(frozen=True)
    class Frozen:
        swap_optimizer: bool = True

    for options in (MappingProxyType({"swap_optimizer": True}), Frozen()):
        assert keywords(options) == {"states": "host"}
        with pytest.raises(InvalidError, match=r"set swap_optimizer, .* to false yourself"):
            take(options)


def test_what_is_asked_for_are_keywords_of_a_controller() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from refit.controller import Controller
    from refit.integrations._attached import KEYWORDS

    assert set(KEYWORDS) <= set(inspect.signature(Controller).parameters)
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 256)).sum().backward()
    options = megatron(
        optimizer_state_offload_fraction=1.0, optimizer_state_offload_chunk_size_mb=1
    )
    with Controller(optimizer, model, **take(options)) as controller:
        optimizer.step()
        assert all(bool(state["exp_avg"].any()) for state in optimizer.state.values())  # waits
        assert controller.stats()["refit/step_out_bytes"] > 0
        assert repr(controller).endswith(f"host_bytes={2 * 4 * 257 * 256})")
        assert all(state["exp_avg"].is_cpu for state in optimizer.state.values())


def test_the_smallest_window_is_that_of_the_option() -> None:
    load_config(offload_window_bytes=SMALLEST_WINDOW)
    with pytest.raises(Exception, match="64KiB"):
        load_config(offload_window_bytes=SMALLEST_WINDOW - 1)
