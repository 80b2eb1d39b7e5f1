"""``python -m refit.bench``: what is measured, and where the figures go."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from refit.bench import machine, table

PARAMETERS, ROUNDS = 0.6e9, 7
COUNTS = (1, 2, 4, 8)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, writes tables to stdout, and JSON where it is wanted. 0, or 2 for bad options."""
    options = _options(arguments)
    results: list[dict[str, Any]] = []
    for name in options.only:
        result, shown = _PARTS[name](options)
        results.append(result)
        sys.stdout.write(shown + "\n")
        sys.stdout.flush()
    if options.json is not None:
        text = json.dumps({"machine": machine.describe(), "results": results}, indent=1) + "\n"
        if options.json == "-":
            sys.stdout.write(text)
        else:
            Path(options.json).write_text(text)
    return 0


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


_PARTS: dict[str, Callable[[argparse.Namespace], tuple[dict[str, Any], str]]] = {
    "offload": _offload,
    "weights": _weights,
    "overhead": _overhead,
}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m refit.bench",
        description="refit measured against what trainers do today",
        epilog="python -m refit.bench.picture draws a cycle's memory over time",
    )
    parser.add_argument(
        "only", nargs="*", metavar="PART", help="offload, weights, overhead; all if none is named"
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures there; -: to stdout")
    parser.add_argument(
        "--rounds", type=_positive(int), default=ROUNDS, help="after a first, cold one (7)"
    )
    parser.add_argument(
        "--parameters", type=_positive(float), default=PARAMETERS, help="of the model (0.6e9)"
    )
    parser.add_argument(
        "--workers", type=_counts, default=COUNTS, metavar="N,N", help="processes (1,2,4,8)"
    )
    options = parser.parse_args(arguments)
    for name in options.only:
        if name not in _PARTS:
            parser.error(f"there is no part {name!r}: offload, weights or overhead")
    options.only = options.only or list(_PARTS)
    return options


def _positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    def positive(text: str) -> float:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    return positive


def _counts(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(1 <= count <= 64 for count in found):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of 1 to 64 workers: 1,2,4,8")
    return found


if __name__ == "__main__":
    sys.exit(main())
