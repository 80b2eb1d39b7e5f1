"""One page of figures of this machine, with tables and pictures, to be shown to others.

    python -m refit.bench report FOLDER --device cuda:0

Runs the parts that compare refit with what PyTorch loops do, in their short form, and writes
report.md, the pictures it shows, and report.json with all figures, anew after each part.
"""

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from refit._version import __version__
from refit.bench import (
    activation_picture,
    activations,
    gpu_offload,
    gpu_weights,
    host_picture,
    host_sweep,
    machine,
    table,
)
from refit.bench.options import lengths, packages_missing, positive
from refit.errors import HostMemoryError

ROUNDS = 3
PARAMETERS = 0.6e9
SWEEP_PARAMETERS = 25e6
FRACTIONS = (0.0, 0.25, 1.0)
Result = dict[str, Any]


class Part(NamedTuple):
    """A section of the page."""

    title: str
    measure: Callable[[argparse.Namespace], Result]
    table: Callable[[Result], str]
    says: str
    """What its table compares, and how it is read."""
    draw: Callable[[str, Result, dict[str, Any]], None] | None = None


PARTS = (
    Part(
        "Optimizer states leave and return",
        lambda it: gpu_offload.measure(it.parameters, it.rounds, it.device),
        table.gpu_offload,
        "All ways move the same states. *Out* ends when their memory is the driver's again, where "
        "an inference engine can take it. *A step waits*: how much longer a step takes when the "
        "states return during its passes. *Host memory* is what the way takes for itself.",
    ),
    Part(
        "Weights reach an engine on the same device",
        lambda it: gpu_weights.measure(it.parameters, it.rounds, it.device),
        table.gpu_weights,
        "*Loaded* is from the trainer's call until the engine has copied the version into weights "
        "of its own. refit alone compares digests.",
    ),
    Part(
        "States on the host, and a share stepped on the CPU",
        lambda it: host_sweep.measure(min(it.parameters, SWEEP_PARAMETERS), it.rounds, FRACTIONS),
        table.host_sweep,
        "Steps with the states on the device, in windows from the host, and stepped by the CPU.",
        host_picture.draw,
    ),
    Part(
        "Activations leave in the forward pass",
        lambda it: activations.measure(it.rounds, it.lengths),
        table.activations,
        "Device memory at its peak and the time of a step, without offload, with checkpointing, "
        "and with refit.",
        activation_picture.draw,
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes the page. 0, 1 if memory is short, or 2 for bad options."""
    options = _options(arguments)
    where = machine.describe()
    results, sections = [], [_head(options, where)]
    try:
        for number, part in enumerate(PARTS, 1):
            sys.stderr.write(f"{number} of {len(PARTS)}: {part.title}\n")
            result = part.measure(options)
            results.append(result)
            sections.append(_section(part, result, where, options.folder))
            (options.folder / "report.md").write_text("\n".join(sections))
            written = {"machine": where, "results": results}
            (options.folder / "report.json").write_text(json.dumps(written, indent=1) + "\n")
    except HostMemoryError as why:
        sys.stderr.write(f"{why}\n")
        return 1
    sys.stderr.write(f"{options.folder / 'report.md'}\n")
    return 0


def _head(options: argparse.Namespace, where: dict[str, Any]) -> str:
    device = options.device
    name = "a CPU" if device == "cpu" else torch.cuda.get_device_name(device)
    text = (
        f"# refit {__version__} on {name}\n\n"
        f"`python -m refit.bench report` on {datetime.date.today():%d %B %Y}: {where['cores']} "
        f"cores of {where['processor']}, {where['memory_bytes'] / 1e9:.0f} GB, PyTorch "
        f"{where['torch']}. Each figure is the median of {options.rounds} rounds after a first "
        "one, in which all ways take their memory.\n"
    )
    if device == "cpu":
        text += "\nWithout a GPU both ends of a copy are main memory: this says nothing of one.\n"
    return text


def _section(part: Part, result: Result, where: dict[str, Any], folder: Path) -> str:
    text = f"## {part.title}\n\n{part.says}\n\n{part.table(result)}"
    if part.draw is not None:
        picture = f"{result['bench']}.svg"
        part.draw(str(folder / picture), result, where)
        text += f"\n![{part.title}]({picture})\n"
    return text


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        prog="python -m refit.bench report",
        description="a page with the figures of this machine",
        epilog="takes some minutes",
    )
    parser.add_argument("folder", type=Path, help="where it is written; made if it is not there")
    parser.add_argument("--device", default="cuda:0" if gpu else "cpu", help="cuda:0, or cpu")
    parser.add_argument("--rounds", type=positive(int), default=ROUNDS)
    parser.add_argument(
        "--parameters",
        type=positive(float),
        default=PARAMETERS if gpu else SWEEP_PARAMETERS,
        help=f"of the model ({PARAMETERS:.1e}; {SWEEP_PARAMETERS:.1e} on a CPU)",
    )
    parser.add_argument(
        "--lengths",
        type=lengths,
        metavar="N,N",
        help="of activations: of one sequence each, in tokens",
    )
    options = parser.parse_args(arguments)
    missing = packages_missing("matplotlib", "pyzmq")
    if missing is not None:
        parser.error(missing)
    usual = parser.get_default("device")
    if gpu and options.device != usual:
        parser.error(
            f"some parts run on {usual} wherever PyTorch sees a GPU: choose another one, or none, "
            "by CUDA_VISIBLE_DEVICES"
        )
    try:
        torch.empty(1, device=options.device)
    except (RuntimeError, AssertionError) as why:
        parser.error(f"--device {options.device}: {why}")
    try:
        options.folder.mkdir(parents=True, exist_ok=True)
    except OSError as why:
        parser.error(f"{options.folder} cannot be made: {why.strerror}")
    return options
