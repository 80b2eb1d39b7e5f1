"""librefit.so: where it is found, and how it is called.

The library lies in this package, put there when the package was built; ``REFIT_LIBRARY`` names
another one (a debug or sanitizer build). It is opened so that its symbols stay its own: a process
may hold another libzmq, such as pyzmq's. Every call gives up the GIL while it is in C. After it,
what the library has said meanwhile is handed to Python's logging (see ``log``).

Independent of what arguments mean: see the C headers, which ``abi`` is made from.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import get_ident
from typing import Any

from refit._c import abi
from refit._c.log import LogRing
from refit._version import __version__
from refit.errors import InvalidError, RefitError, error_of

_NAME = "librefit.so"


def _path() -> Path:
    chosen = os.environ.get("REFIT_LIBRARY")
    if chosen:
        return Path(chosen)
    return Path(__file__).resolve().parents[1] / "lib" / _NAME


def _open() -> ctypes.CDLL:
    path = _path()
    try:
        library = ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)
    except OSError as why:
        raise ImportError(
            f"refit's C library could not be opened: {why}. Install the package again "
            "(pip install ./bindings/python), or name the library with REFIT_LIBRARY."
        ) from why
    for name, (result, arguments) in abi.PROTOTYPES.items():
        function = getattr(library, name, None)
        if function is None:
            raise ImportError(f"{path} has no {name}: it is not the library of refit {__version__}")
        function.restype, function.argtypes = result, arguments
    found: bytes = library.refit_version()
    if found.decode() != __version__:
        raise ImportError(f"{path} is refit {found.decode()}, and this package is {__version__}")
    return library


lib: Any = _open()
"""The C functions as they are. Use ``call`` for those that return a status."""

log = LogRing(lib)
_count = log.count


def encoded(text: str, what: str) -> bytes:
    """Text for a ``const char *``, which would end at a NUL: InvalidError says ``what`` has one."""
    if "\0" in text:
        raise InvalidError(f"{what} has a NUL character in it: {text!r}")
    return os.fsencode(text)


_in_use: dict[int, tuple[Any, ...]] = {}
"""By thread: the objects that its calls under way are about. What Ctrl-C leaves behind is the main
thread's, and lasts until its next call."""


def _leave(me: int, before: tuple[Any, ...]) -> None:
    if before:
        _in_use[me] = before
    else:
        _in_use.pop(me, None)


@contextmanager
def using(pointer: int) -> Iterator[None]:
    """A block whose calls need that object, too, though they are not given it."""
    me = get_ident()
    before = _in_use.get(me, ())
    _in_use[me] = (*before, pointer)
    try:
        yield
    finally:
        _leave(me, before)


def is_used_elsewhere(pointer: int) -> bool:
    """Whether another thread is in a call about that object: to free it would be to free memory
    that is read."""
    me = get_ident()
    return any(who != me and pointer in used for who, used in list(_in_use.items()))


def call(function: Any, *arguments: Any) -> None:
    """Calls a function that ends with a ``refit_error *``; raises its failure, sentence and all."""
    error = abi.refit_error()
    me = get_ident()
    before = _in_use.get(me, ())
    _in_use[me] = (*before, *arguments[:1])
    try:
        status = function(*arguments, ctypes.byref(error))
    finally:
        _leave(me, before)
    if _count.value != log.seen:
        log.drain()
    if status != abi.REFIT_OK:
        raise error_of(status, error.text.decode("utf-8", "replace"), error.subsystem)


def status_of(function: Any, *arguments: Any) -> int:
    """As ``call``, but a deadline that passed is not a failure here: returns whether it was met.

    ``REFIT_OK`` or ``REFIT_ERR_TIMEOUT``; everything else is raised.
    """
    try:
        call(function, *arguments)
    except RefitError as why:
        if why.status == abi.REFIT_ERR_TIMEOUT:
            return abi.REFIT_ERR_TIMEOUT
        raise
    return abi.REFIT_OK
