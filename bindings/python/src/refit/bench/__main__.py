"""``python -m refit.bench``: what is measured, and where the figures go."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from refit.bench import machine, table
from refit.bench.options import counts, json_to_write, packages_missing, positive
from refit.errors import HostMemoryError

PARAMETERS, ROUNDS = 0.6e9, 7
COUNTS = (1, 2, 4, 8)
EPILOG = """\
All parts take about ten minutes on two cores, and ask for 25 GB of free memory by default. With
less memory a smaller model is measured, and a line says so first. A quick look, in about a minute:

    python -m refit.bench offload weights --parameters 0.06e9 --rounds 3 --workers 1,4

python -m refit.bench picture cycle.png draws a cycle's memory over time"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, writes tables to stdout, and JSON where it is wanted.

    What it will take is said on stderr first. 0, 1 if memory is short, or 2 for bad options.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["picture"]:
        from refit.bench import picture

        return picture.main(given[1:])
    options = _options(given)
    try:
        for line in _memory_needed(options):
            sys.stderr.write(line + "\n")
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
        text = json.dumps({"machine": machine.describe(), "results": results}, indent=1) + "\n"
        if options.json == "-":
            sys.stdout.write(text)
        else:
            Path(options.json).write_text(text)
    return 0


def _memory_needed(options: argparse.Namespace) -> list[str]:
    """A line for each part that needs much. HostMemoryError if one has too little."""
    from refit.bench import states, weights, window

    available = machine.available_bytes()
    lines = []
    if "offload" in options.only:
        lines.append(states.NEED.told(options.parameters, available))
    if "weights" in options.only:
        wanted = min(options.parameters, weights.PARAMETERS)
        lines.append(weights.need(tuple(options.workers)).told(wanted, available))
    if "window" in options.only:
        wanted = min(options.parameters, window.PARAMETERS)
        lines.append(window.NEED.told(wanted, available))
    return lines


def _offload(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from refit.bench import offload

    result = offload.measure(options.parameters, options.rounds)
    return result, table.offload(result)


def _weights(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from refit.bench import weights

    result = weights.measure(options.parameters, options.rounds, tuple(options.workers))
    return result, table.weights(result)


def _overhead(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from refit.bench import overhead

    result = overhead.measure(options.rounds)
    return result, table.overhead(result)


def _window(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from refit.bench import window

    result = window.measure(options.parameters, options.rounds)
    return result, table.window(result)


_PARTS: dict[str, Callable[[argparse.Namespace], tuple[dict[str, Any], str]]] = {
    "offload": _offload,
    "weights": _weights,
    "overhead": _overhead,
    "window": _window,
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
        help="offload, weights, overhead, window; all if none is named",
    )
    parser.add_argument(
        "--json",
        type=json_to_write,
        metavar="FILE",
        help="write all figures there; -: to stdout, in place of the tables",
    )
    parser.add_argument(
        "--rounds", type=positive(int), default=ROUNDS, help="after a first, cold one (7)"
    )
    parser.add_argument(
        "--parameters", type=positive(float), default=PARAMETERS, help="of the model (0.6e9)"
    )
    parser.add_argument(
        "--workers", type=counts, default=COUNTS, metavar="N,N", help="processes (1,2,4,8)"
    )
    options = parser.parse_args(arguments)
    for name in options.only:
        if name == "picture":
            parser.error("picture goes by itself, and first: python -m refit.bench picture FILE")
        if name not in _PARTS:
            parser.error(f"there is no part {name!r}: offload, weights, overhead or window")
    options.only = options.only or list(_PARTS)
    missing = packages_missing("torch", *(["pyzmq"] if "weights" in options.only else []))
    if missing is not None:
        parser.error(missing)
    return options


if __name__ == "__main__":
    sys.exit(main())
