"""`import refit` is quick: it imports no PyTorch and no pyzmq, and starts no thread."""

import subprocess
import sys

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
import refit, refit.stats
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
from refit import _library
library = ctypes.CDLL(_library._path())
publisher = ctypes.c_void_p()
assert library.refit_publisher_open(b"user://*", None, ctypes.byref(publisher), None) == 0
library.refit_publisher_close(publisher)
maps = open("/proc/self/maps").read().split()
others = [ctypes.CDLL(one) for one in maps if "/libzmq" in one]
close = ctypes.CDLL(None).dlclose
close.argtypes = [ctypes.c_void_p]
for one in (library, _library.lib):
    assert close(one._handle) == 0
there = "librefit.so" in open("/proc/self/maps").read()
print(there or not others, flush=True)
__import__("os")._exit(0)
"""
    assert in_a_new_process(program) == "True\n"
