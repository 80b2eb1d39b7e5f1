"""The package holds what it should, and its C library keeps to itself in a process of others."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import refit

PAIR = """
import threading, refit

def refit_round(version):
    got = []
    with (
        refit.Publisher("tcp://127.0.0.1:0", device="host") as publisher,
        refit.Subscriber(publisher.endpoint, device="host") as subscriber,
    ):
        def receive():
            with subscriber.next(60) as update:
                got.extend(bytes(view.bytes) for view in update.views())

        worker = threading.Thread(target=receive)
        worker.start()
        publisher.wait_workers(1, 60)
        publisher.publish({"w": b"version %d" % version}, version)
        worker.join()
    assert got == [b"version %d" % version], got
"""

ZMQ = """
import zmq

def zmq_round(text):
    context = zmq.Context()
    with context, context.socket(zmq.REP) as server, context.socket(zmq.REQ) as client:
        port = server.bind_to_random_port("tcp://127.0.0.1")
        client.connect(f"tcp://127.0.0.1:{port}")
        client.send_string(text)
        server.send_string(server.recv_string() + "!")
        assert client.recv_string() == text + "!"
"""

ROUNDS = """
for number in range(1, 4):
    zmq_round(f"before {number}")
    refit_round(number)
    zmq_round(f"after {number}")
with open("/proc/self/maps") as maps:
    print(sorted({line.split()[-1] for line in maps if "libzmq" in line}))
"""


@pytest.mark.parametrize("order", ["pyzmq first", "refit first"])
def test_pyzmq_and_refit_work_in_one_process(order: str) -> None:
    """pyzmq brings a libzmq of its own: each side calls the one that it was built for."""
    pytest.importorskip("zmq", reason="pyzmq is not installed")
    program = ZMQ + PAIR if order == "pyzmq first" else PAIR + ZMQ
    done = subprocess.run(
        [sys.executable, "-c", program + ROUNDS], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "libzmq" in done.stdout


def test_the_library_shows_its_door_and_nothing_else() -> None:
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("there is no nm here")
    refit.load_config(environment=False)  # which loads the library
    maps = Path("/proc/self/maps").read_text().splitlines()
    library = next(line.split()[-1] for line in maps if "librefit.so" in line)
    command = [nm, "-D", "--defined-only", library]
    rows = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = {row.split()[-1].split("@")[0] for row in rows.splitlines()}
    assert len(names) > 50
    assert {name for name in names if not name.startswith("refit_")} <= {"REFIT_0.1"}


def test_one_version_for_all(root: Path) -> None:
    """Python's is read from _version.py by the build; the C library's is compared at import."""
    text = (root / "bindings" / "python" / "pyproject.toml").read_text()
    assert tomllib.loads(text)["project"]["dynamic"] == ["version"]
    found = re.search(r"project\(refit VERSION (\S+)", (root / "CMakeLists.txt").read_text())
    assert found is not None
    assert found[1] == refit.__version__


def installed() -> importlib.metadata.Distribution:
    try:
        found = importlib.metadata.distribution("refit")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("refit is imported from its sources here")
    if not Path(refit.__file__).is_relative_to(Path(str(found.locate_file("")))):
        pytest.skip("refit is imported from its sources here")
    return found


def test_the_wheel_is_for_every_python_and_needs_nothing() -> None:
    wheel = installed().read_text("WHEEL") or ""
    assert re.search(r"^Tag: py3-none-linux_\w+$", wheel, re.MULTILINE)
    assert [one for one in installed().requires or [] if "extra ==" not in one] == []
    files = {str(one) for one in installed().files or []}
    assert {"refit/lib/librefit.so", "refit/py.typed"} <= files
    assert any(one.endswith("/licenses/LICENSE") for one in files)
    assert all(one.split("/")[0].startswith("refit") for one in files)


def test_the_library_of_the_wheel_is_hardened(root: Path) -> None:
    library = installed().locate_file("refit/lib/librefit.so")
    script = root / "tests" / "abi" / "hardening.sh"
    done = subprocess.run([script, "1", str(library)], capture_output=True, text=True, timeout=60)
    if done.returncode == 77:
        pytest.skip("readelf is missing")
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_installed_is_what_the_sources_say(root: Path) -> None:
    """Otherwise all other tests would prove something else."""
    where = Path(str(installed().locate_file("refit")))
    sources = root / "bindings" / "python" / "src" / "refit"
    for file in sources.rglob("*.py"):
        assert (where / file.relative_to(sources)).read_bytes() == file.read_bytes(), file
