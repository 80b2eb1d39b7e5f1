"""`import refit` is quick: it imports no PyTorch and no pyzmq, and starts no thread."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import refit


def in_a_new_process(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_brings_neither_torch_nor_numpy_nor_threads() -> None:
    program = """
import sys, threading, os
import refit, refit._c.stats
refit.Config, refit.Device, refit.load_config
refit.Timeline().sample()
others = ("torch", "numpy", "zmq", "tqdm", "ray", "matplotlib")
print([name for name in others if name in sys.modules])
print(len(os.listdir("/proc/self/task")), threading.active_count())
"""
    assert in_a_new_process(program).split("\n")[:2] == ["[]", "1 1"]


@pytest.mark.parametrize("name", refit.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(refit, name) is not None
    assert name in dir(refit)


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Controler'"):
        _ = refit.Controler  # type: ignore[attr-defined]


def test_what_needs_pytorch_says_so_where_there_is_none() -> None:
    program = """
import sys
sys.modules["torch"] = None
import refit
refit.Publisher, refit.Subscriber, refit.Config
try:
    refit.Controller
except ImportError as why:
    print(why)
"""
    said = "refit.Controller needs PyTorch 2.6 or later, which is not installed"
    assert in_a_new_process(program).startswith(said)


def test_a_library_that_zeromq_calls_stays_when_it_is_unloaded() -> None:
    """Only a ZeroMQ of its own file is led to it, which others in the process may use on."""
    program = """
import ctypes
from refit._c import library as opened
library = ctypes.CDLL(opened._path())
publisher = ctypes.c_void_p()
assert library.refit_publisher_open(b"user://*", None, ctypes.byref(publisher), None) == 0
library.refit_publisher_close(publisher)
maps = open("/proc/self/maps").read().split()
others = [ctypes.CDLL(one) for one in maps if "/libzmq" in one]
close = ctypes.CDLL(None).dlclose
close.argtypes = [ctypes.c_void_p]
for one in (library, opened.lib):
    assert close(one._handle) == 0
there = "librefit.so" in open("/proc/self/maps").read()
print(there or not others, flush=True)
__import__("os")._exit(0)
"""
    assert in_a_new_process(program) == "True\n"


# What each sub-package may import, besides itself, in the order of bindings/python/README.md.
PACKAGES: dict[str, set[str]] = {
    "errors": {"_c"},  # the numbers of the C library's statuses
    "_c": {"errors"},
    "observe": {"errors", "_c"},
    "weights": {"errors", "_c"},
    "states": {"errors", "_c", "observe"},
    "step": {"errors", "_c", "observe", "states"},
    "activations": {"errors", "_c", "states"},
}
ABOVE = {"controller", "memory_pool", "integrations", "bench"}  # may import all


def modules() -> Iterator[tuple[str, Path]]:
    root = Path(refit.__file__).parent
    for path in sorted(root.rglob("*.py")):
        yield ".".join(path.relative_to(root).with_suffix("").parts), path


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imported(path: Path) -> Iterator[str]:
    """The modules of refit that a file imports when it runs, wherever in it."""
    tree = ast.parse(path.read_text())
    tree.body = [one for one in tree.body if not is_for_types(one)]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports say the whole name"
            found = [f"{node.module}.{one.name}" for one in node.names]
        elif isinstance(node, ast.Import):
            found = [one.name for one in node.names]
        else:
            continue
        yield from (one.removeprefix("refit.") for one in found if one.startswith("refit."))


def test_a_package_imports_only_those_below_it() -> None:
    wrong = []
    for name, path in modules():
        package = name.split(".")[0]
        if package in ABOVE or package in ("__init__", "_version"):
            continue
        for other in imported(path):
            if other.split(".")[0] not in {package, "_version", *PACKAGES[package]}:
                wrong.append(f"{name} imports {other}")
    assert wrong == []


def test_no_two_modules_import_each_other() -> None:
    files = dict(modules())
    uses = {
        name: {
            known
            for one in imported(path)
            for known in (one, one.rpartition(".")[0])
            if known in files and known != name
        }
        for name, path in files.items()
        if name.split(".")[0] in PACKAGES
    }
    while free := [name for name, others in uses.items() if not others & uses.keys()]:
        for name in free:
            del uses[name]
    assert sorted(uses) == []
