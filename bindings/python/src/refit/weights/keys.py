"""Key pairs, for weights that leave this host.

A trainer and each of its workers have a pair. The secret half stays in a file that only its owner
can read; the format and the permissions of the files are known to the C library alone.
"""

import os
from pathlib import Path
from typing import NamedTuple

from refit._c.library import call, encoded, lib


class KeyFiles(NamedTuple):
    """Where the two halves of a pair are."""

    secret: Path
    public: Path


def keygen(folder: str | os.PathLike[str], name: str, *, replace: bool = False) -> KeyFiles:
    """Makes ``folder/name.secret`` (mode 0600) and ``folder/name.public``, like ``refit keygen``.

    The folder is made if it is not there. Files that are there are an ExistsError unless
    ``replace``: what the old pair opened is shut then. Writes files (blocks). InvalidError for a
    name that is none, InputOutputError, UnsupportedError where ZeroMQ was built without CURVE.
    """
    path = Path(folder)
    where, owner = encoded(os.fspath(path), "the folder"), encoded(name, "the name")
    call(lib.refit_keys_generate, where, owner, int(replace))
    return KeyFiles(path / f"{name}.secret", path / f"{name}.public")
