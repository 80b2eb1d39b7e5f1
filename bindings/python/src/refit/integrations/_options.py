"""Options of a framework, as mappings or as objects with attributes: read, and changed.

Names are compared with ``_``, however they are written ("--swap-optimizer"). Independent of what an
option means.
"""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from math import isfinite
from typing import Any

from refit.errors import InvalidError

Change = tuple[Any, Any, Any]
"""The owner of an option, its name as it is there, and its new value."""


class Said:
    """What the options say, by names with ``_``. None is as if it were not said."""

    def __init__(self, options: Any) -> None:
        self._options = options
        self._by_name: dict[str, Any] | None = None
        if isinstance(options, Mapping):
            self._by_name = {plain(key): value for key, value in options.items()}

    def get(self, name: str) -> Any:
        if self._by_name is not None:
            return self._by_name.get(name)
        return getattr(self._options, name, None)

    def has(self, name: str) -> bool:
        return self.get(name) not in (None, 0)

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise InvalidError(f"{name} is {value!r}: it is true or false")
        return bool(value)

    def number(self, name: str) -> int | float | None:
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise InvalidError(f"{name} is {value!r}: it is a finite number")
        return value

    def share(self, name: str, of: str = "") -> float | None:
        """``of``: what errors write before the name."""
        value = self.number(name)
        if value is not None and not 0 <= value <= 1:
            raise InvalidError(f"{of}{name} is {value}: it is a share from 0 to 1")
        return value


def refuse_none(options: Any) -> None:
    """InvalidError for what cannot be options, such as None or a text."""
    if options is None or isinstance(options, str | bytes | int | float | Sequence):
        raise InvalidError(
            f"options are a mapping or an object with attributes, and not {options!r:.80}"
        )


def plain(key: Any) -> str:
    """A name as Python has it."""
    return str(key).lstrip("-").replace("-", "_")


def changes(owner: Any, names: tuple[str, ...], value: Any) -> Iterator[Change]:
    """For each of these options that the owner has and that is on: that it becomes ``value``."""
    if isinstance(owner, Mapping):
        found = {key: owner[key] for key in owner if plain(key) in names}
    else:
        found = {name: getattr(owner, name, None) for name in names}
    for name, there in found.items():
        if there and there != value:
            yield owner, name, value


def make(all_changes: list[Change]) -> None:
    """Makes the changes. AttributeError, TypeError or ValueError: options cannot be changed; those
    before them are, unless a mapping is at fault."""
    for owner, _, _ in all_changes:
        refuse_constant(owner)
    for owner, name, value in all_changes:
        if isinstance(owner, MutableMapping):
            owner[name] = value
        else:
            setattr(owner, name, value)


def refuse_constant(owner: Any) -> None:
    """TypeError for a mapping that cannot be changed."""
    if isinstance(owner, Mapping) and not isinstance(owner, MutableMapping):
        raise TypeError(f"a {type(owner).__name__} cannot be changed")
