"""Network links of processes: each in a network namespace of its own, which a cable with a bounded
rate leads to.

It takes root of the network, which ``unshare -rn`` gives, and the commands ``ip`` and ``tc``.
"""

import ctypes
import os
import subprocess

CLONE_NEWNET = 0x40000000
NETWORK = "10.77.0"
HUB = "refit-hub"


def leave_network() -> None:
    """Moves this process to a network namespace that has nothing, not even a loopback."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0:
        why = os.strerror(ctypes.get_errno())
        raise RuntimeError(f"no network namespace can be had ({why}): run it under unshare -rn")


class Links:
    """A hub, and a cable to it for each process."""

    def __init__(self, rate: str) -> None:
        self._rate = rate
        self._count = 0
        _run("ip link set lo up")
        _run(f"ip link add {HUB} type bridge")
        _run(f"ip addr add {NETWORK}.1/24 dev {HUB}")
        _run(f"ip link set {HUB} up")

    def attach(self, pid: int) -> str:
        """Connects a process that has left the network; returns its address there."""
        self._count += 1
        near, address = f"refit-{self._count}", f"{NETWORK}.{self._count + 1}"
        _run(f"ip link add {near} type veth peer name cable netns {pid}")
        _run(f"ip link set {near} master {HUB} up")
        inside = f"nsenter --net --target {pid} "
        _run(f"{inside} ip link set lo up")
        _run(f"{inside} ip addr add {address}/24 dev cable")
        _run(f"{inside} ip link set cable up")
        _run(f"{inside} tc qdisc add dev cable root tbf rate {self._rate} burst 1mb latency 100ms")
        return address

    def close(self) -> None:
        """Takes the hub away; cables end with their processes."""
        _run(f"ip link del {HUB}")


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{command}: {done.stderr.strip()}: run it under unshare -rn")
