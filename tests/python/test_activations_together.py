"""Activations leave together with autocast, loss scales, LoRA, compiled layers and states of the
optimizer; and hundreds of iterations take no more memory."""

import gc
import tracemalloc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import psutil
import pytest
import refit
import torch
import training
from activation_scenes import (
    MODELS,
    STACKS,
    Run,
    figures,
    gradients,
    left_bytes,
    offloaded,
    quiet,
    same_bits,
    used_bytes,
)

pytestmark = pytest.mark.usefixtures("default_device")


def assert_alike(trained: Callable[[bool], list[torch.Tensor]]) -> None:
    """Training without refit and with it has the same bits."""
    with quiet():
        assert all(map(same_bits, trained(False), trained(True)))


@pytest.mark.parametrize("outside", [True, False], ids=["autocast outside", "autocast inside"])
@pytest.mark.parametrize("way", ["none", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("scene", ["drops", "llama"])
def test_autocast_and_loss_scales_have_the_same_bits(scene: str, way: str, outside: bool) -> None:
    def trained(moved: bool) -> list[torch.Tensor]:
        run = Run({**STACKS, **MODELS}[scene], way)
        device = training.DEVICE.split(":")[0]
        scaler = torch.amp.GradScaler(device, init_scale=64.0)
        seen = []
        with offloaded(run) as (activations, block):
            for number in range(3):
                torch.manual_seed(number)
                around = [
                    torch.autocast(device, torch.bfloat16),
                    block() if moved else nullcontext(),
                ]
                first, second = around if outside else reversed(around)
                with first, second:
                    loss = run.scene.loss(run.model, run.scene.drawn(number))
                scaler.scale(loss).backward()
                seen += [loss.detach(), *gradients(run.model)]
            assert (left_bytes(activations) > 0) == moved
        return seen

    assert_alike(trained)


@pytest.mark.parametrize("way", ["none", "reentrant", "non-reentrant"])
def test_adapters_have_the_same_bits(way: str) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")

    def trained(moved: bool) -> list[torch.Tensor]:
        scene = MODELS["llama"]
        inner: Any = scene.model()
        model = peft.get_peft_model(
            inner, peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "up_proj"])
        )
        if way != "none":
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": way == "reentrant"}
            )
        model.train()
        seen = []
        entry = "attach" if moved else "with"
        with offloaded(model, entry, layers=inner.model.layers) as (activations, _):
            for number in range(3):
                torch.manual_seed(number)
                loss = scene.loss(model, scene.drawn(number))
                loss.backward()
                seen += [loss.detach(), *gradients(model)]
            assert (left_bytes(activations) > 0) == moved
        return seen

    assert_alike(trained)


@pytest.mark.parametrize("entry", ["with", "attach"])
def test_compiled_layers_have_the_same_bits(entry: str) -> None:
    def trained(moved: bool) -> list[torch.Tensor]:
        run = Run(STACKS["mlp"])
        for layer in run.layers:
            layer.compile(backend="aot_eager")
        seen = []
        with offloaded(run, entry if moved else "with") as (activations, block):
            for number in range(3):
                with block() if moved else nullcontext():
                    loss = run.scene.loss(run.model, run.scene.drawn(number))
                assert (left_bytes(activations) > 0) == moved
                loss.backward()
                seen += [loss.detach(), *gradients(run.model)]
        return seen

    try:
        assert_alike(trained)
    finally:
        torch.compiler.reset()


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": refit.HostStates(window_bytes="64KiB")},
        {"schedule": refit.CpuStep(fraction=0.5)},
        {"schedule": refit.Cycle()},
    ],
    ids=str,
)
def test_states_of_the_optimizer_leave_too(options: dict[str, Any]) -> None:
    def trained(moved: bool) -> list[torch.Tensor]:
        scene = MODELS["qwen2"]
        model = scene.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        entry = "attach" if moved else "with"
        with (
            offloaded(model, entry, layers=None) as (activations, _),
            refit.Controller(optimizer, model, activations=activations, **options) as controller,
        ):
            for number in range(4):
                torch.manual_seed(number)
                scene.loss(model, scene.drawn(number)).backward()
                optimizer.step()
                optimizer.zero_grad()
                if number % 2:
                    controller.offload()
                    controller.restore()
            assert (left_bytes(activations) > 0) == moved
        return [one.detach() for one in model.parameters()]

    assert_alike(trained)


@pytest.mark.slow
def test_five_hundred_iterations_take_no_more_memory_than_some() -> None:
    run = Run(STACKS["attention"])
    batch = run.scene.drawn(0)

    def iterate(times: int, block: Any) -> None:
        for number in range(times):
            with block():
                loss = run.scene.loss(run.model, batch)
            if number % 7:
                loss.backward(retain_graph=number % 3 == 0)
            if number % 5 == 0:
                with block():
                    other = run.scene.loss(run.model, batch)
                loss = loss + other
                loss.backward(retain_graph=True) if number % 7 == 0 else other.backward()
            del loss
            run.optimizer.zero_grad()

    def known() -> int:
        gc.collect()
        return len(gc.get_objects())

    with offloaded(run) as (activations, block):
        iterate(60, block)
        objects, taken = known(), psutil.Process().memory_info().rss
        tracemalloc.start()
        try:
            iterate(20, block)
            gc.collect()
            before = tracemalloc.get_traced_memory()[0]
            iterate(100, block)
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        iterate(380, block)
        assert known() - objects < 200
        assert grown < 16 << 10
        assert psutil.Process().memory_info().rss - taken < 8 << 20
        assert used_bytes(activations) == 0
        assert figures(activations)["activation_groups"] == 0
