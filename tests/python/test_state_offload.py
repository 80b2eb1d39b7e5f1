"""Frameworks' options for states on the host, and the keywords that they become."""

import argparse
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import refit
from refit._c.config import load_config
from refit.errors import InvalidError, UnsupportedError
from refit.integrations.state_offload import SMALLEST_WINDOW, keywords, take

pytestmark = pytest.mark.filterwarnings("error")


def megatron(**said: Any) -> dict[str, Any]:
    return {
        "chunked_optimizer_state_offload": True,
        "optimizer_state_offload_chunk_size_mb": 256,
        **said,
    }


def stepped(**said: Any) -> dict[str, Any]:
    """Megatron's options for a share that the CPU steps."""
    return {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5, **said}


def swap(times: Any = None) -> dict[str, Any]:
    """MindSpeed's."""
    return {"swap_optimizer": True, "swap_optimizer_times": times}


def zero(**said: Any) -> dict[str, Any]:
    """DeepSpeed's."""
    return {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", **said}}}


def parsed(line: str) -> argparse.Namespace:
    """A command line, as Megatron and MindSpeed declare it, with their defaults."""
    parser = argparse.ArgumentParser()
    for name in (
        *("swap-optimizer", "chunked-optimizer-state-offload", "offload-optimizer-states"),
        *("optimizer-cpu-offload", "use-torch-optimizer-for-cpu-offload"),
        *("overlap-cpu-optimizer-d2h-h2d", "use-precision-aware-optimizer"),
    ):
        parser.add_argument(f"--{name}", action="store_true")
    for name in ("pin-cpu-grads", "pin-cpu-params"):
        parser.add_argument(f"--no-{name}", action="store_false", dest=name.replace("-", "_"))
    parser.add_argument("--swap-optimizer-times", type=int, default=16)
    parser.add_argument("--optimizer-state-offload-chunk-size-mb", type=int, default=0)
    parser.add_argument("--optimizer-state-offload-fraction", type=float, default=1.0)
    parser.add_argument("--optimizer-offload-fraction", type=float, default=1.0)
    return parser.parse_args(line.split())


WINDOWS = {"schedule": refit.HostStates()}
LOOSE = {"offload_pin": "off", "schedule": refit.CpuStep(fraction=1.0, overlap=False)}
CHUNKS = "--chunked-optimizer-state-offload --optimizer-state-offload-chunk-size-mb 64"
SHARE = "--optimizer-cpu-offload --optimizer-offload-fraction 0.25"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # without a switch
        (parsed(""), {}),
        ({}, {}),
        (SimpleNamespace(), {}),
        ({"swap_optimizer": False, "swap_optimizer_times": 4}, {}),
        ({"swap_optimizer": None}, {}),
        (stepped(optimizer_cpu_offload=False, overlap_cpu_optimizer_d2h_h2d=True), {}),
        ({"optimizer_offload_fraction": 7.0}, {}),
        (parsed("--overlap-cpu-optimizer-d2h-h2d"), {}),
        # windows
        (
            parsed(f"{CHUNKS} --optimizer-state-offload-fraction 0.25"),
            {"schedule": refit.HostStates(window_bytes=64 << 20, fraction=0.25)},
        ),
        (
            {"--chunked-optimizer-state-offload": True, "optimizer-state-offload-chunk-size-mb": 1},
            {"schedule": refit.HostStates(window_bytes=1 << 20)},
        ),
        (megatron(optimizer_state_offload_fraction=0.0), {}),  # off, as in Megatron
        (swap(), WINDOWS),
        # a share that the CPU steps
        (parsed(SHARE), {"schedule": refit.CpuStep(fraction=0.25, overlap=False)}),
        (
            parsed(
                f"{SHARE} --overlap-cpu-optimizer-d2h-h2d --use-torch-optimizer-for-cpu-offload"
            ),
            {"schedule": refit.CpuStep(fraction=0.25, overlap=True, backend="torch")},
        ),
        (
            parsed("--optimizer-cpu-offload"),
            {"schedule": refit.CpuStep(fraction=1.0, overlap=False)},
        ),
        (parsed("--optimizer-cpu-offload --no-pin-cpu-grads"), LOOSE),
        (parsed("--optimizer-cpu-offload --no-pin-cpu-params"), LOOSE),
        (stepped(), {"schedule": refit.CpuStep(fraction=0.5)}),
        (stepped(optimizer_offload_fraction=1), {"schedule": refit.CpuStep(fraction=1)}),
        # DeepSpeed
        (zero(), {"schedule": refit.CpuStep(fraction=1.0)}),
        (zero(ratio=0.3, pin_memory=True), {"schedule": refit.CpuStep(fraction=0.3)}),
        (zero(ratio=0.0), {"schedule": refit.CpuStep(fraction=0.0)}),
        (zero(pin_memory=False), {"offload_pin": "off", "schedule": refit.CpuStep(fraction=1.0)}),
        (zero(ratio=0.3)["zero_optimization"], {"schedule": refit.CpuStep(fraction=0.3)}),
        (
            SimpleNamespace(offload_optimizer=SimpleNamespace(device="cpu", ratio=0.5)),
            {"schedule": refit.CpuStep(fraction=0.5)},
        ),
        (zero(device="none", ratio=0.3), {}),
        (zero(device=None), {}),
        ({"zero_optimization": {"stage": 3}}, {}),
        ({"offload_optimizer": True}, {}),  # of another framework
    ],
    ids=str,
)
def test_options_become_keywords(options: Any, expected: dict[str, Any]) -> None:
    assert keywords(options) == expected
    load_config(**{name: one for name, one in expected.items() if name.startswith("offload_")})


def test_swap_times_divide_state_bytes_if_known() -> None:
    said = swap(16)
    for state_bytes, window_bytes in (
        ("12GiB", 768 << 20),
        ((16 << 20) + 1, (1 << 20) + 1),
        (0, SMALLEST_WINDOW),
    ):
        expected = {"schedule": refit.HostStates(window_bytes=window_bytes)}
        assert keywords(said, state_bytes=state_bytes) == expected
    with pytest.raises(InvalidError, match="state_bytes=-1"):
        keywords(said, state_bytes=-1)


@pytest.mark.parametrize(
    ("options", "sentence", "expected"),
    [
        (
            parsed("--offload-optimizer-states"),
            r"=0 brings all states .* offload\.window_bytes",
            {"schedule": refit.HostStates(fraction=1.0)},
        ),
        (parsed("--swap-optimizer"), "swap_optimizer_times=16 is not used.*state_bytes", WINDOWS),
        (
            stepped(optimizer_offload_fraction=0),
            "optimizer_offload_fraction is 0, .* steps nothing",
            {"schedule": refit.CpuStep(fraction=0)},
        ),
    ],
)
def test_what_a_name_means_there_and_not_here_is_a_warning(
    options: Any, sentence: str, expected: dict[str, Any]
) -> None:
    with pytest.warns(UserWarning, match=sentence) as seen:
        assert keywords(options) == expected
    assert seen[0].filename == __file__


INVALID: list[tuple[dict[str, Any], str]] = [
    ({"optimizer_cpu_offload": True}, r"1\.0 on Megatron's command line.* 0\.0 in its Optimizer"),
    (stepped(optimizer_offload_fraction=1.5), "optimizer_offload_fraction is 1.5: it is a share"),
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
    ({"swap_optimizer": "yes"}, "swap_optimizer is 'yes': it is true or false"),
    ({"swap_optimizer": 1}, "true or false"),
    (swap(0), "whole number from 1"),
    (swap(1.5), "whole number from 1"),
    (swap("16"), "it is a finite number"),
    (swap(True), "it is a finite number"),
    (megatron(swap_optimizer=True), "the same choice of two frameworks"),
    (megatron(optimizer_state_offload_chunk_size_mb=-1), "0 or more"),
    (megatron(optimizer_state_offload_chunk_size_mb=float("inf")), "it is a finite number"),
    (megatron(optimizer_state_offload_fraction=1.5), "share from 0 to 1"),
    (megatron(optimizer_state_offload_fraction=-0.5), "share from 0 to 1"),
    (megatron(optimizer_state_offload_fraction=float("nan")), "it is a finite number"),
    (megatron(optimizer_cpu_offload=True), "steps states on the CPU"),
]
BF16 = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"}
GRADS = {"use_precision_aware_optimizer": True, "main_grads_dtype": "torch.bfloat16"}
UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    (stepped(optimizer_cuda_graph=True), "captures the optimizer's step"),
    (stepped(**BF16), "exp_avg_dtype is bf16: beside optimizer_cpu_offload .* are fp32"),
    (stepped(**GRADS), "main_grads_dtype is torch.bfloat16"),
    (zero(device="nvme", nvme_path="/disk"), "in host memory here, and on no disk"),
    (megatron(optimizer_cuda_graph=True), "captures the optimizer's step"),
    ({"swap_optimizer": True, "swap_optimizer_sizes": 8.0}, "resident_bytes"),
    ({"swap_optimizer": True, "swap_optimizer_sizes": [8, 4]}, "resident_bytes"),
]


@pytest.mark.parametrize(
    ("said", "kind", "sentence"),
    [
        *((said, InvalidError, sentence) for said, sentence in INVALID),
        *((said, UnsupportedError, sentence) for said, sentence in UNSUPPORTED),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_changed(
    said: dict[str, Any], kind: Any, sentence: str
) -> None:
    before = repr(said)
    for read in (keywords, take):
        with pytest.raises(kind, match=sentence):
            read(said, state_bytes=1 << 20)
    assert repr(said) == before


# ---- What is taken is off in the framework.


@pytest.mark.parametrize("make", [dict, lambda said: SimpleNamespace(**said)])
def test_what_is_taken_is_switched_off_in_the_framework(make: Any) -> None:
    options = make(megatron(offload_optimizer_states=True, **BF16))
    assert take(options) == {"schedule": refit.HostStates(window_bytes=256 << 20)}
    assert (options if isinstance(options, dict) else vars(options)) == {
        "chunked_optimizer_state_offload": False,
        "offload_optimizer_states": False,
        "optimizer_state_offload_chunk_size_mb": 256,
        **BF16,
    }
    assert take(options) == {}
    off = megatron(optimizer_state_offload_fraction=0.0)
    assert take(off) == {}
    assert off["chunked_optimizer_state_offload"] is True


def test_taking_megatron_offload_turns_off_its_own_switches() -> None:
    switches = (
        *("optimizer_cpu_offload", "overlap_cpu_optimizer_d2h_h2d"),
        *("use_torch_optimizer_for_cpu_offload", "use_precision_aware_optimizer"),
        "use_precision_aware_optimizer_no_fp8_or_ds_fp8",
    )
    types = {"exp_avg_dtype": "torch.float32", "main_grads_dtype": "fp32"}
    kept = {"optimizer_offload_fraction": 0.5, **types}
    config = SimpleNamespace(**dict.fromkeys(switches, True), **kept)
    assert take(config) == {"schedule": refit.CpuStep(fraction=0.5, overlap=True, backend="torch")}
    assert vars(config) == {**dict.fromkeys(switches, False), **kept}
    assert take(config) == {}


def test_what_is_taken_from_deepspeed_is_off_there() -> None:
    said = zero(ratio=0.3, pin_memory=True)
    assert take(said) == {"schedule": refit.CpuStep(fraction=0.3)}
    inner = {"device": "none", "ratio": 0.3, "pin_memory": True}
    assert said["zero_optimization"] == {"stage": 3, "offload_optimizer": inner}
    assert take(said) == {}


def test_options_that_cannot_be_changed_are_refused_and_read() -> None:
    @dataclass(frozen=True)
    class Frozen:
        swap_optimizer: bool = True

    theirs = r"set swap_optimizer, .* to false yourself"
    frozen: list[tuple[Any, dict[str, Any], str]] = [
        (MappingProxyType({"swap_optimizer": True}), WINDOWS, theirs),
        (Frozen(), WINDOWS, theirs),
        (
            {"offload_optimizer": MappingProxyType({"device": "cpu"})},
            {"schedule": refit.CpuStep(fraction=1.0)},
            "cannot be switched off",
        ),
    ]
    for options, expected, sentence in frozen:
        assert keywords(options) == expected
        with pytest.raises(InvalidError, match=sentence):
            take(options)


def test_what_is_asked_for_are_keywords_of_a_controller() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from refit.controller import Controller

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


def test_the_smallest_window_is_that_of_the_option() -> None:
    load_config(offload_window_bytes=SMALLEST_WINDOW)
    with pytest.raises(Exception, match="64KiB"):
        load_config(offload_window_bytes=SMALLEST_WINDOW - 1)
