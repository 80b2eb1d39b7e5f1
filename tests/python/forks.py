"""What a forked process may do with objects of its parent."""

import os
from collections.abc import Callable

from refit.errors import StateError


def said_in_a_fork(action: Callable[[], object]) -> str:
    """What ``action`` returns in a forked process, as text; empty for None. The sentence if it
    raises a StateError."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            try:
                found = action()
            except StateError as why:
                found = why
            os.write(writing, b"" if found is None else str(found).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with open(reading, encoding="utf-8") as told:
        sentence = told.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return sentence
