"""Methods of a framework's object that are preceded by a call of refit, until that is undone.

The object's class stays as it is. Independent of which framework it is, and of what is called.
"""

from collections.abc import Callable
from typing import Any


class Overlay:
    """What an object has in place of a method of its class. Copies of the object have the method,
    those that were pickled too."""

    def __init__(self, one: Any, name: str, method: Callable[..., Any]) -> None:
        self._one = one
        self._name = name
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._method(*args, **kwargs)

    def __reduce__(self) -> Any:
        return getattr, (self._one, self._name)  # of the copy, which has no overlay at that time


def precede(one: Any, name: str, call: Callable[[], None]) -> Callable[[], None]:
    """From now on ``call`` comes before the object's method of this name. What it gives undoes
    that."""
    overlay = Overlay(one, name, _preceded(one, name, call))
    setattr(one, name, overlay)

    def undo() -> None:
        if vars(one).get(name) is overlay:
            delattr(one, name)

    return undo


def _preceded(one: Any, name: str, call: Callable[[], None]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        call()
        return getattr(type(one), name)(one, *args, **kwargs)

    return called
