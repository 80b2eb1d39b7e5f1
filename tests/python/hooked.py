"""Whether hooks of refit are left anywhere: what they are on calls its code."""

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def calls_refit(action: Callable[[], Any]) -> list[str]:
    """The functions of refit that an action calls. No garbage is collected meanwhile: finalizers of
    what an earlier test has dropped are not the action's."""
    found: list[str] = []

    def follow(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith("refit."):
            found.append(frame.f_code.co_name)

    before = sys.getprofile()
    gc.collect()
    gc.disable()
    sys.setprofile(follow)
    try:
        action()
    finally:
        sys.setprofile(before)
        gc.enable()
    return found
