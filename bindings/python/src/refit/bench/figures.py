"""Reads what ``--json`` has written, for the pictures that are drawn from it."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Result = dict[str, Any]
Check = Callable[[Result], None]


def read(path: str, checks: Mapping[str, Check]) -> tuple[Result, dict[str, Any]]:
    """The first result of one of these parts of the bench, and the machine. A check raises
    ValueError, KeyError or TypeError for figures that cannot be drawn. ValueError if there are
    none.
    """
    try:
        written = json.loads(Path(path).read_text())
        for result in written["results"]:
            if result["bench"] in checks:
                checks[result["bench"]](result)
                return result, written["machine"]
    except (OSError, ValueError, KeyError, TypeError) as why:
        raise ValueError(f"{path} is not a file of --json: {why!r}") from why
    raise ValueError(f"{path} has no figures of {' or '.join(checks)}")
