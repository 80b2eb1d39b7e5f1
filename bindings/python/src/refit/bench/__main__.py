"""``python -m refit.bench``: what is measured, and where the figures go."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from refit.bench import machine, table
from refit.bench.options import counts, json_to_write, lengths, packages_missing, positive
from refit.errors import HostMemoryError
from refit.observe import memory_now

PARAMETERS, ROUNDS = 0.6e9, 7
COUNTS = (1, 2, 4, 8)
EPILOG = """\
All parts take about twenty minutes on two cores, and ask for 25 GB of free memory by default. With
less memory a smaller model is measured, and a line says so first. A quick look, in about a minute:

    python -m refit.bench offload weights --parameters 0.06e9 --rounds 3 --workers 1,4

python -m refit.bench picture cycle.png draws a cycle's memory over time, and with --figures what
host_sweep or activations has written by --json. python -m refit.bench report FOLDER makes one page
of this machine's figures"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, writes tables to stdout, and JSON where it is wanted.

    What it will take is said on stderr first. 0, 1 if memory is short, or 2 for bad options.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["picture"]:
        from refit.bench import picture

        return picture.main(given[1:])
    if given[:1] == ["report"]:
        from refit.bench import report

        return report.main(given[1:])
    options = _options(given)
    try:
        for line in _memory_needed(options):
            _say(line)
        return _measure(options)
    except HostMemoryError as why:
        sys.stderr.write(f"{why}\n")
        return 1


def _measure(options: argparse.Namespace) -> int:
    results: list[dict[str, Any]] = []
    for name in options.only:
        result, shown = _PARTS[name](options)
        results.append(result)
        if options.json != "-":
            sys.stdout.write(shown + "\n")
            sys.stdout.flush()
    if options.json is not None:
        text = _lines(results) if options.lines else _whole(results)
        if options.json == "-":
            sys.stdout.write(text)
        else:
            Path(options.json).write_text(text)
    return 0


def _whole(results: list[dict[str, Any]]) -> str:
    return json.dumps({"machine": machine.describe(), "results": results}, indent=1) + "\n"


def _lines(results: list[dict[str, Any]]) -> str:
    """A line for each way, with the figures of its part and the machine, or for the part."""
    found = []
    for result in results:
        for way in result.get("ways", [{}]):
            common = {name: it for name, it in result.items() if name not in ("ways", "memory")}
            found.append(json.dumps({**common, **way, **machine.describe()}) + "\n")
    return "".join(found)


def _memory_needed(options: argparse.Namespace) -> list[str]:
    """A line for each part that needs much. HostMemoryError if one has too little."""
    from refit.bench import (
        activations,
        gpu_offload,
        host_step,
        host_sweep,
        states,
        weights,
        window,
    )

    available = memory_now.available_bytes()
    lines = []
    if "offload" in options.only:
        need = states.NEED if options.device is None else gpu_offload.NEED
        lines.append(need.told(options.parameters, available))
    if "weights" in options.only and options.device is None:
        wanted = min(options.parameters, weights.PARAMETERS)
        lines.append(weights.need(tuple(options.workers)).told(wanted, available))
    if "window" in options.only:
        wanted = min(options.parameters, window.PARAMETERS)
        lines.append(window.NEED.told(wanted, available))
    for name, need, usual in (
        ("host_step", host_step.NEED, host_step.PARAMETERS),
        ("host_sweep", host_sweep.NEED, host_sweep.PARAMETERS),
    ):
        if name in options.only:
            lines.append(need.told(options.parameters_given or usual, available))
    if "activations" in options.only:
        lines.append(activations.memory_told(options.lengths))
    return lines


def _offload(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from refit.bench import gpu_offload, offload

    if options.device is not None:
        result = gpu_offload.measure(options.parameters, options.rounds, options.device)
        return result, table.gpu_offload(result)
    result = offload.measure(options.parameters, options.rounds)
    return result, table.offload(result)


def _weights(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from refit.bench import gpu_weights, weights

    if options.device is not None:
        wanted = options.parameters_given or gpu_weights.PARAMETERS
        result = gpu_weights.measure(wanted, options.rounds, options.device)
        return result, table.gpu_weights(result)
    result = weights.measure(options.parameters, options.rounds, tuple(options.workers))
    return result, table.weights(result)


def _async_weights(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from refit.bench import async_weights

    result = async_weights.measure(options.parameters, options.rounds)
    return result, table.async_weights(result)


def _scale(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from refit.bench import scale, scale_publishers

    if options.publishers is not None:
        result = scale_publishers.measure(
            options.parameters, options.rounds, options.publishers, options.link
        )
        return result, table.scale_publishers(result)
    result = scale.measure(options.parameters, options.rounds, tuple(options.workers))
    return result, table.scale(result)


def _overhead(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from refit.bench import overhead

    result = overhead.measure(options.rounds)
    return result, table.overhead(result)


def _host_step(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from refit.bench import host_step

    wanted = options.parameters_given or host_step.PARAMETERS
    result = host_step.measure(wanted, options.rounds, tell=_say)
    return result, table.host_step(result)


def _host_sweep(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from refit.bench import host_sweep

    wanted = options.parameters_given or host_sweep.PARAMETERS
    result = host_sweep.measure(wanted, options.rounds)
    return result, table.host_sweep(result)


def _activations(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from refit.bench import activations

    result = activations.measure(options.rounds, options.lengths)
    return result, table.activations(result)


def _say(sentence: str) -> None:
    sys.stderr.write(f"{sentence}\n")


def _window(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from refit.bench import window

    result = window.measure(options.parameters, options.rounds)
    return result, table.window(result)


_PARTS: dict[str, Callable[[argparse.Namespace], tuple[dict[str, Any], str]]] = {
    "offload": _offload,
    "weights": _weights,
    "async_weights": _async_weights,
    "scale": _scale,
    "overhead": _overhead,
    "window": _window,
    "host_step": _host_step,
    "host_sweep": _host_sweep,
    "activations": _activations,
}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m refit.bench",
        description="refit measured against what trainers do today",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "only",
        nargs="*",
        metavar="PART",
        help=f"{', '.join(_PARTS)}; all if none is named",
    )
    parser.add_argument(
        "--json",
        type=json_to_write,
        metavar="FILE",
        help="write all figures there; -: to stdout, in place of the tables",
    )
    parser.add_argument(
        "--lines", action="store_true", help="of --json: a line and an object for each way"
    )
    parser.add_argument(
        "--rounds", type=positive(int), default=ROUNDS, help="after a first, cold one (7)"
    )
    parser.add_argument(
        "--parameters",
        type=positive(float),
        help="of the model (0.6e9; host_step 50e6, host_sweep 25e6)",
    )
    parser.add_argument(
        "--device",
        help="of offload and weights: on this GPU (cuda:0), compared with PyTorch alone",
    )
    parser.add_argument(
        "--workers", type=counts, default=COUNTS, metavar="N,N", help="processes (1,2,4,8)"
    )
    parser.add_argument(
        "--publishers",
        type=counts,
        metavar="N,N",
        help="of scale: so many ranks send a version to one worker, in place of its own rows",
    )
    parser.add_argument(
        "--link",
        metavar="RATE",
        help="of --publishers: each has a link of this rate (1gbit); needs unshare -rn, ip and tc",
    )
    parser.add_argument(
        "--lengths",
        type=lengths,
        metavar="N,N",
        help="of activations: one sequence of each length, in place of its own shapes",
    )
    options = parser.parse_args(arguments)
    if options.link is not None and options.publishers is None:
        parser.error("--link is of --publishers: say how many there are, --publishers 1,2,4")
    if options.lines and options.json is None:
        parser.error("--lines is of --json: name the file, or -")
    options.parameters_given = options.parameters
    options.parameters = options.parameters or PARAMETERS
    for name in options.only:
        if name in ("picture", "report"):
            parser.error(f"{name} goes by itself, and first: python -m refit.bench {name} PLACE")
        if name not in _PARTS:
            parser.error(f"there is no part {name!r}: say {', '.join(_PARTS)}")
    options.only = options.only or list(_PARTS)
    missing = packages_missing("torch", *(["pyzmq"] if "weights" in options.only else []))
    if missing is not None:
        parser.error(missing)
    return options


if __name__ == "__main__":
    sys.exit(main())
