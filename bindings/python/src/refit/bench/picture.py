"""The pictures of docs/python.md and docs/windows.md: real cycles, or real steps of states that
live on the host, and the memory of device and host meanwhile.

    python -m refit.bench picture cycle.png --trace cycle.json
    python -m refit.bench picture step.png --states host
    python -m refit.bench picture sweep.svg --figures sweep.json

A stack of linear layers is trained with AdamW. In a cycle two worker processes get its weights, and
the trainer's own forward passes stand for the rollouts. With ``--figures`` nothing is run: see
``host_picture`` and ``activation_picture``.
"""

import argparse
import copy
import sys
from collections.abc import Sequence
from typing import Any

import torch

from refit.bench import activation_picture, figures, host_picture
from refit.bench.memory import MemoryNeed
from refit.bench.options import file_to_write, packages_missing, picture_to_write, positive
from refit.bench.workers import TIMEOUT_S, WorkerProcesses
from refit.controller import Controller
from refit.errors import HostMemoryError
from refit.observe import memory_now
from refit.observe.timeline import Timeline
from refit.step.schedule import HostStates
from refit.weights.publisher import Publisher
from refit.weights.subscriber import Subscriber

WIDTH, BATCH, ROLLOUTS = 1024, 64, 4
CYCLES, WORKERS = 2, 2
STEPS, STATES_IN_WINDOWS = 2, 12
EVERY_S = 0.01
NEED = MemoryNeed(
    "picture", 40, 1 << 30
)  # weights, gradients, states, their image, the workers' store

DRAWN: dict[str, Any] = {"host_sweep": host_picture, "activations": activation_picture}
"""The modules that draw a result, by its part of the bench."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the cycles and writes the picture, and the trace if it is wanted.

    0, 1 if memory is short, or 2 for bad options.
    """
    options = _options(arguments)
    if options.figures is not None:
        result, where = options.figures
        DRAWN[result["bench"]].draw(options.picture, result, where)
        return 0
    try:
        told = NEED.told(options.parameters, memory_now.available_bytes())
        parameters = NEED.fitting(options.parameters, memory_now.available_bytes())
    except HostMemoryError as why:
        sys.stderr.write(f"{why}\n")
        return 1
    sys.stderr.write(f"{told}\n")
    on_host = options.states == "host"
    timeline = record_steps(parameters) if on_host else record(parameters)
    timeline.picture(options.picture, _title(parameters, options.states))
    if options.trace:
        timeline.save(options.trace)
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m refit.bench picture",
        description="two refit cycles, or two steps of states that live on the host, and the "
        "memory of device and host meanwhile, as a picture",
        epilog="takes seconds, and asks for 40 bytes of free memory a parameter: 4.5 GB for 1e8",
    )
    parser.add_argument(
        "picture", type=picture_to_write, help="the file to draw: .png, .svg or .pdf"
    )
    parser.add_argument(
        "--trace", type=file_to_write, metavar="FILE", help="also a trace for ui.perfetto.dev"
    )
    parser.add_argument(
        "--states", choices=("cycle", "host"), default="cycle", help="where they live (cycle)"
    )
    parser.add_argument(
        "--parameters", type=positive(float), default=1e8, help="of the model (1e8)"
    )
    parser.add_argument(
        "--figures",
        metavar="FILE",
        help="run nothing: draw what host_sweep or activations has written there by --json",
    )
    options = parser.parse_args(arguments)
    if options.figures is not None:
        if options.trace is not None:
            parser.error("--trace is of a run, and with --figures nothing is run")
        try:
            checks = {bench: it.check for bench, it in DRAWN.items()}
            options.figures = figures.read(options.figures, checks)
        except ValueError as why:
            parser.error(str(why))
    if (missing := packages_missing("matplotlib")) is not None:
        parser.error(missing)
    return options


def _title(parameters: float, states: str) -> str:
    if states == "host":
        return (
            f"Two steps on a CPU of states that live on the host: {parameters / 1e6:.0f} M "
            "parameters, AdamW"
        )
    return (
        f"Two refit cycles on a CPU: {parameters / 1e6:.0f} M parameters, AdamW, {WORKERS} workers"
    )


def record(parameters: float) -> Timeline:
    """A timeline of some cycles after a first one."""
    model, optimizer = _trained(parameters)
    inputs = torch.randn(BATCH, WIDTH)
    _step(model, optimizer, inputs)
    timeline = Timeline(sample_every_s=EVERY_S)
    with WorkerProcesses(WORKERS) as processes, Publisher("user://*") as publisher:
        processes.begin(WORKERS, _follow, publisher.endpoint, CYCLES + 1)
        publisher.wait_workers(WORKERS, TIMEOUT_S)
        with Controller(optimizer, model, device="host", timeline=timeline) as controller:
            _cycle(controller, publisher, model, optimizer, inputs, timeline)
            timeline.forget()  # the first cycle takes the arena and the store, once
            with timeline:
                for _ in range(CYCLES):
                    _cycle(controller, publisher, model, optimizer, inputs, timeline)
        processes.end(WORKERS)
    return timeline


def record_steps(parameters: float) -> Timeline:
    """A timeline of some steps after a first one, with states that live on the host."""
    model, optimizer = _trained(parameters)
    inputs = torch.randn(BATCH, WIDTH)
    timeline = Timeline(sample_every_s=EVERY_S)
    window_bytes = max(1 << 20, round(8 * parameters / STATES_IN_WINDOWS))
    with Controller(
        optimizer,
        model,
        device="host",
        timeline=timeline,
        schedule=HostStates(window_bytes=window_bytes, windows=3),
    ) as controller:
        _step_in_phases(model, optimizer, inputs, timeline)  # which makes the states
        controller.offload()
        controller.restore(non_blocking=False)
        timeline.forget()
        with timeline:
            for _ in range(STEPS):
                _step_in_phases(model, optimizer, inputs, timeline)
            with timeline.phase("forward"):
                model(inputs)
            _use_a_state(optimizer)
        spans, series = list(timeline.spans), copy.deepcopy(timeline.series)
    timeline.spans, timeline.series = spans, series  # not how the states move out in the end
    return timeline


def _use_a_state(optimizer: torch.optim.Optimizer) -> None:
    """Waits for the copies of the last step, and gives back the memory of the windows."""
    state = next(one for one in optimizer.state.values() if one["exp_avg"].numel() > WIDTH)
    state["exp_avg"].sum()


def _trained(parameters: float) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    layers = max(1, round(parameters / WIDTH**2))
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def _step_in_phases(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: torch.Tensor,
    timeline: Timeline,
) -> None:
    with timeline.phase("forward"):
        loss = model(inputs).square().mean()
    with timeline.phase("backward"):
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _cycle(
    controller: Controller,
    publisher: Publisher,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: torch.Tensor,
    timeline: Timeline,
) -> None:
    with controller.refit(publisher=publisher) as transaction:
        transaction.send(model.state_dict().items())
    with timeline.phase("rollouts"), torch.no_grad():
        for _ in range(ROLLOUTS):
            model(inputs)
    controller.restore()
    with timeline.phase("forward, backward, step"):
        _step(model, optimizer, inputs)


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _follow(number: int, endpoint: str, versions: int) -> None:
    """A worker: takes so many versions."""
    with Subscriber(endpoint, worker=f"rollout {number}") as subscriber:
        for _ in range(versions):
            with subscriber.next(TIMEOUT_S) as update:
                for _, view in update.tensors():
                    view.sum()


if __name__ == "__main__":
    sys.exit(main())
