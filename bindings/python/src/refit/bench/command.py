"""``refit bench host-step``, the benchmark in C, run as a part of one in Python.

The kernel is no part of the library's public functions, so the command measures it.
"""

import json
import math
import shutil
import subprocess
from typing import Any

PATIENCE_S = 600.0
BYTES = 28
MIB = 1 << 20

Row = dict[str, Any]


def found(given: str | None) -> str | None:
    """The program: the one that was named, or the one on the path."""
    return shutil.which(given or "refit")


def host_step(
    program: str, parameters: int, threads: int, rounds: int, roots: str | None = None
) -> list[Row]:
    """Its rows, for about so many parameters. ``roots``: the library whose square roots are taken;
    None: they are rounded to nearest. RuntimeError with what it says if it fails.
    """
    mebibytes = math.ceil(parameters * BYTES / MIB)
    asked = [program, "bench", "host-step", "--json", "--mib", str(mebibytes)]
    asked += ["--rounds", str(rounds), "--set", f"offload.host_step_threads={threads}"]
    asked += ["--roots", roots] if roots is not None else []
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired) as why:
        raise RuntimeError(f"{' '.join(asked)}: {why}") from why
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(asked)}: {done.stderr.strip()}")
    try:
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        return [row for row in rows if row["bench"] == "host step"]
    except (ValueError, KeyError, TypeError) as why:
        raise RuntimeError(f"{' '.join(asked)} does not write rows: {why!r}") from why
