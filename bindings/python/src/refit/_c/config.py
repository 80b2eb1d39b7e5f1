"""Every choice that refit leaves to its user: the same YAML, variables and keys as in C.

A ``Config`` is a finished set of choices. It never changes, so that it may be shared; with other
values another one is made. Values go in as the file would say them ("1GiB", "30s") or as Python has
them (``1 << 30``, ``True``), and each over the one before: defaults, a file, the environment, what
is said in code. What a key means, and which values it takes, is known to the C library alone: its
sentences are the errors. Of a key that it does not know, the nearest is told as it was written: a
keyword for a keyword.
"""

import ctypes
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from numbers import Real
from typing import Any, Self, TypeAlias

from refit._c import abi
from refit._c.library import call, encoded, lib
from refit.errors import ConfigError, InvalidError, NotFoundError, RefitError

ConfigLike: TypeAlias = "Config | str | os.PathLike[str] | Mapping[str, Any] | None"
"""The ``config`` of every constructor; see ``make_config``."""

_ORIGINS = ("default", "file", "environment", "explicit")


@dataclass(frozen=True, slots=True)
class Option:
    """One option as it stands in a ``Config``. ``value`` and ``default`` as the file says them."""

    key: str
    value: str
    default: str
    unit: str
    range: str
    help: str
    origin: str


class Config:
    """A finished set of choices; ``load_config`` makes one. Equal if all values are."""

    __slots__ = ("_struct",)

    def __init__(self) -> None:
        """The defaults, and nothing from the environment."""
        self._struct = abi.refit_config()
        lib.refit_config_init(ctypes.byref(self._struct), ctypes.sizeof(self._struct))

    @property
    def _as_c(self) -> Any:
        """A ``const refit_config *`` for calls, which copy what they need."""
        return ctypes.pointer(self._struct)

    def options(self) -> list[Option]:
        """Every option, in the order of configs/refit.yaml, with its help and origin."""
        return _options(self._struct)

    def get(self, key: str) -> Any:
        """The value of ``key``, as Python has it.

        Bytes, milliseconds and counts are ints, shares floats, all else bools and text. A key may
        be written "offload.slab_bytes" or "offload_slab_bytes". Raises NotFoundError.
        """
        full = _key_of(key)
        unit = _units().get(full)
        if unit is None:
            raise _unknown(key)
        raw = getattr(self._struct, full.replace(".", "_"))
        if unit == "bool":
            return bool(raw)
        if isinstance(raw, bytes):
            return raw.decode("utf-8", "replace")
        return _choice(unit, raw)

    def items(self) -> Iterator[tuple[str, Any]]:
        """Every key with its value, as ``get`` gives it."""
        return ((key, self.get(key)) for key in _units())

    def replace(self, **overrides: Any) -> "Config":
        """Another one with some values changed; see ``load_config``."""
        other = Config._copy(self)
        other._apply(overrides)
        return other

    def __getitem__(self, key: str) -> Any:
        return self.get(key)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Config):
            return NotImplemented
        return dict(self.items()) == dict(other.items())

    def __hash__(self) -> int:
        return hash(tuple(self.items()))

    def __repr__(self) -> str:
        chosen = (one for one in self.options() if one.value != one.default)
        return "Config(" + ", ".join(f"{one.key}={one.value!r}" for one in chosen) + ")"

    def __reduce__(self) -> tuple[Any, tuple[bytes]]:
        return _from_bytes, (bytes(self._struct),)

    @classmethod
    def _copy(cls, other: Self) -> Self:
        new = cls()
        ctypes.memmove(ctypes.byref(new._struct), ctypes.byref(other._struct), other._struct.size)
        return new

    def _apply(self, *layers: Mapping[str, Any]) -> None:
        """Sets what is said and checks that all fits together. Only on one not yet shown."""
        for key, value in (pair for layer in layers for pair in _flat(layer)):
            text = _text(key, value)
            call(lib.refit_config_set, self._as_c, encoded(key, "a key"), encoded(text, key))
        call(lib.refit_config_check, self._as_c)


def load_config(
    path: str | os.PathLike[str] | None = None, *, environment: bool = True, **overrides: Any
) -> Config:
    """Reads a configuration: the defaults, then a YAML file, the environment, and ``overrides``.

    ``path`` names a file as configs/refit.yaml describes it; None reads none. ``environment=False``
    leaves the REFIT_* variables out. ``overrides`` are keys with "_" for "." and a value each, or a
    section with a mapping: ``offload_slab_bytes="512MiB"``, ``offload={"pin": "off"}``; None leaves
    an option as it is, as if it had not been given. Reads the file (blocks). Raises
    InputOutputError, ConfigError (with line, column and the nearest key), and NotFoundError for an
    override that no option has.
    """
    return _load(path, environment, overrides)


def make_config(config: ConfigLike = None, overrides: Mapping[str, Any] | None = None) -> Config:
    """The configuration that every constructor makes of its ``config`` and keywords.

    A ``Config`` is taken as it is, the environment left out; a path is a file for ``load_config``;
    a mapping is a set of overrides, nested or not; None are the defaults and the environment.
    ``overrides`` go over all of them; one of None is as if it had not been given. Raises what
    ``load_config`` raises, and InvalidError.
    """
    more = overrides or {}
    if isinstance(config, Config):
        return config.replace(**more) if more else config
    if config is None or isinstance(config, str | os.PathLike):
        return _load(config, True, more)
    if isinstance(config, Mapping):
        return _load(None, True, config, more)
    raise InvalidError(
        f"config is of type {type(config).__name__}: give a Config, the path of a YAML file, a "
        "mapping, or None"
    )


def _load(
    path: str | os.PathLike[str] | None, environment: bool, *overrides: Mapping[str, Any]
) -> Config:
    """Layer over layer; whether all fits together is asked once they all are there."""
    config = Config()
    if path is not None:
        call(lib.refit_config_load, config._as_c, encoded(os.fsdecode(path), "a path"))
    if environment:
        call(lib.refit_config_load_env, config._as_c)
    config._apply(*overrides)
    return config


def _options(struct: Any) -> list[Option]:
    found: list[Option] = []

    def take(_user: Any, pointer: Any) -> None:
        one = pointer.contents
        found.append(
            Option(
                key=one.key.decode(),
                value=one.value.decode("utf-8", "replace"),
                default=one.default_value.decode(),
                unit=one.unit.decode(),
                range=one.range.decode(),
                help=one.help.decode(),
                origin=_ORIGINS[one.origin],
            )
        )

    lib.refit_config_each(ctypes.byref(struct), abi.refit_option_fn(take), None)
    return found


@cache
def _units() -> dict[str, str]:
    """Every key with its unit: the library's table, which never changes while it is open."""
    return {one.key: one.unit for one in _options(Config()._struct)}


@cache
def _keys() -> dict[str, str]:
    """The keys by the names that Python's keywords can have."""
    return {key.replace(".", "_"): key for key in _units()}


def _key_of(name: str) -> str:
    return name if name in _units() else _keys().get(name, name)


def bytes_of(name: str, value: int | str) -> int:
    """A number of bytes, also as a text with a unit. InvalidError."""
    try:
        read = make_config({"offload.budget_bytes": value})  # reads "2GiB"
    except RefitError as why:
        raise InvalidError(
            f"{name}={value!r}: write a whole number of bytes, or of KiB, MiB, GiB or TiB, such as "
            "512MiB"
        ) from why
    return int(read.get("offload.budget_bytes"))


def _flat(overrides: Mapping[Any, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    """Sections spelt out; what is None is left out. NotFoundError for a key that is none."""
    for name, value in overrides.items():
        key = f"{section}{name}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{key}.")
        elif _key_of(key) in _units():
            if value is not None:
                yield _key_of(key), value
        elif value is not None or not _is_section(key):  # an empty section of a file is None
            raise _unknown(key)


def _is_section(name: str) -> bool:
    return any(key.startswith(f"{name}.") for key in _units())


def _unknown(name: str) -> RefitError:
    """The error for a key that no option has."""
    encoded(name, "a key")
    if _is_section(name):
        return NotFoundError(f"there is no option {name}: it is a section, and takes a mapping")
    near = _nearest(name, list(_units() if "." in name else _keys()))
    hint = f"the nearest is {near}" if near else "refit.load_config().options() has them all"
    return NotFoundError(f"there is no option {name[:80]}: {hint}")


def _nearest(name: str, known: list[str]) -> str | None:
    """Which was probably meant: one that lacks its section, or is written alike."""
    found = [one for one in known if name in (one.split(".", 1)[-1], one.split("_", 1)[-1])]
    if len(found) == 1:
        return found[0]
    return next(iter(get_close_matches(name, known, 1)), None)


def _choice(unit: str, raw: Any) -> Any:
    """The word for an enum's number, where the unit is a list of words."""
    words = unit.split("|")
    if len(words) == 1:
        return raw
    if words[-1] == "N":  # a node: the names are numbers below 0, the first -1
        return {-1: "auto", -2: "off", -3: "interleave"}.get(raw, raw)
    return words[raw] if 0 <= raw < len(words) else raw


def _text(key: str, value: Any) -> str:
    """A value as the file would say it. Whether it fits is for the library to say."""
    unit = _units().get(key, "")
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        # YAML 1.1 readers make False of the bare word off.
        return "off" if not value and "off" in unit.split("|") else str(value).lower()
    if hasattr(value, "__index__"):
        return str(value.__index__())
    if isinstance(value, Real):
        text = f"{float(value):.9f}".rstrip("0").rstrip(".")  # the most that the library reads
        if value and float(text) == 0.0:
            raise ConfigError(f"{key} is {value!r}: of a number, 9 digits after the point are read")
        return text
    raise InvalidError(f"{key} cannot be a {type(value).__name__}: give text, a number or a bool")


def _from_bytes(data: bytes) -> Config:
    """Unpickles a Config of the same refit, with its origins."""
    config = Config()
    if len(data) != ctypes.sizeof(config._struct):
        raise InvalidError("this Config was pickled by another version of refit: load it again")
    ctypes.memmove(ctypes.byref(config._struct), data, len(data))
    call(lib.refit_config_check, config._as_c)
    return config
