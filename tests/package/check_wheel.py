"""check_wheel.py WHEEL [--run]: whether a self-contained wheel is one.

It holds one librefit.so, which asks for nothing but libc and names no folder of this machine, and
the licences of its parts. With --run, for a wheel of this machine, its library sends weights in one
process with pyzmq's libzmq: by a Python that has pyzmq, NumPy and the package refit. Says each
check that fails, and exits with 1 then.
"""

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

LOADER_ASKED_FOR = re.compile(r"\(NEEDED\).*\[(.+)\]")
ROOT = Path(__file__).resolve().parents[2]
LIST = (ROOT / "lib" / "package" / "parts" / "list.txt").read_text()
OF_LIBC = re.compile(r"(lib(c|m|dl|pthread|rt)|ld-linux-(x86-64|aarch64))\.so\.\d")
PARTS = [line.split()[0] for line in LIST.splitlines() if not line.startswith("#")]
PARTS += ["libcxx", "libcxxabi", "libunwind"]  # of the compiler

BESIDE_PYZMQ = """
import threading

import numpy as np
import zmq

context = zmq.Context()
here, there = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
here.bind("inproc://beside")
there.connect("inproc://beside")

import refit

weights = {"w": np.arange(1000, dtype=np.float32)}
got = []


def work():
    with refit.Subscriber(endpoint, worker="one", timeout=60) as subscriber:
        with subscriber.next() as update:
            got.extend(dict(update.arrays(copy=True)).values())


with refit.Publisher("ipc://" + FOLDER + "/beside") as publisher:
    endpoint = publisher.endpoint
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    publisher.wait_workers(1, timeout=60)
    publisher.publish(weights)
    thread.join(60)
assert len(got) == 1 and (got[0] == weights["w"]).all(), got
here.send(b"still there")
assert there.poll(10_000) and there.recv() == b"still there"
loaded = {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
assert LIBRARY in loaded, loaded
assert any("libzmq" in path for path in loaded), loaded
"""


def beside_pyzmq(library: str, folder: str) -> list[str]:
    program = f"LIBRARY, FOLDER = {library!r}, {folder!r}\n{BESIDE_PYZMQ}"
    environment = os.environ | {"REFIT_LIBRARY": library}
    try:
        run = subprocess.run([sys.executable, "-c", program], env=environment, timeout=180)
    except subprocess.TimeoutExpired:
        return ["it waits for ever beside pyzmq"]
    return [] if run.returncode == 0 else ["it does not work beside pyzmq"]


def main(wheel: str, run: bool) -> int:
    wrong = []
    with zipfile.ZipFile(wheel) as inside, tempfile.TemporaryDirectory() as folder:
        names = inside.namelist()
        for part in PARTS:
            if not any(f"/licenses/{part}/" in name for name in names):
                wrong.append(f"the licence of {part} is not in it")
        libraries = [name for name in names if ".so" in name]
        if libraries != ["refit/lib/librefit.so"]:
            wrong.append(f"it has the libraries {libraries}")
        path = inside.extract("refit/lib/librefit.so", folder)
        dynamic = subprocess.run(
            ["readelf", "-Wd", path], check=True, capture_output=True, text=True
        ).stdout
        others = [name for name in LOADER_ASKED_FOR.findall(dynamic) if not OF_LIBC.fullmatch(name)]
        if others:
            wrong.append(f"its library asks for {others}")
        if f"{ROOT}/".encode() in Path(path).read_bytes():
            wrong.append("its library names folders of the machine that compiled it")
        if run:
            wrong += beside_pyzmq(path, folder)
    for sentence in wrong:
        print(f"{wheel}: {sentence}")
    return 1 if wrong else 0


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 3 or sys.argv[2:] not in ([], ["--run"]):
        sys.exit("usage: check_wheel.py WHEEL [--run]")
    sys.exit(main(sys.argv[1], run=len(sys.argv) == 3))
