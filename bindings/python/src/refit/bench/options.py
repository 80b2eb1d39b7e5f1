"""Values on the command lines of the benchmarks: a bad one is refused before minutes of work.

Each function here is a ``type=`` of argparse, or makes one. Independent of the use of the values.
"""

import argparse
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

PICTURES = (".png", ".svg", ".pdf")
MOST_WORKERS = 64
MOST_TOKENS = 1 << 20
MODULES = {"pyzmq": "zmq"}
"""Under which name a package is imported, where that is another one."""


def packages_missing(*packages: str) -> str | None:
    """A sentence about those of the packages that are not installed; None if all are."""
    missing = [one for one in packages if find_spec(MODULES.get(one, one)) is None]
    return f"install what it measures: pip install {' '.join(missing)}" if missing else None


def positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    """Numbers above 0."""

    def positive(text: str) -> float:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    return positive


def counts(text: str) -> tuple[int, ...]:
    """Numbers of workers or of publishers, parted by commas."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(1 <= count <= MOST_WORKERS for count in found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers from 1 to 64: 1,2,4,8")
    return found


def lengths(text: str) -> tuple[int, ...]:
    """Lengths of sequences in tokens, parted by commas."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(1 <= length <= MOST_TOKENS for length in found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of lengths: 128,512,2048")
    return found


def file_to_write(text: str) -> str:
    """A path that a file can be written to; nothing is written yet."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a directory: name a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {path.parent}: make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written here")
    return text


def json_to_write(text: str) -> str:
    """A path as ``file_to_write`` takes it, or "-" for stdout."""
    return text if text == "-" else file_to_write(text)


def picture_to_write(text: str) -> str:
    """A path as ``file_to_write`` takes it, with the ending of a picture format."""
    if Path(text).suffix.lower() not in PICTURES:
        raise argparse.ArgumentTypeError(f"{text} does not end in .png, .svg or .pdf")
    return file_to_write(text)
