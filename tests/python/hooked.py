"""Whether hooks of refit are left anywhere: what they are on calls its code."""

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def calls_refit(action: Callable[[], Any]) -> bool:
    """Whether the action, which is done once or twice, calls Python code of refit."""
    found: list[str] = []

    def follow(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith("refit."):
            found.append(frame.f_code.co_name)

    before = sys.getprofile()
    for _ in range(2):
        found.clear()
        sys.setprofile(follow)
        try:
            action()
        finally:
            sys.setprofile(before)
        if not found:
            return False
        gc.collect()  # an object of refit may have ended meanwhile: once more without it
    return True
