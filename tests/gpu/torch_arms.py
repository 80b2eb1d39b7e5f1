"""torch_arms.py LIST [--rounds N] [--seconds N]: how PyTorch itself moves the same tensors.

LIST has a name and a number of bytes a line (`refit bench tensors`). Each way is timed by the wall
clock with the device waited for at both ends, in turn with the others, and written as one JSON
object, like those of `refit bench`. The first round of each is cold: caches and page-locked memory
are taken then. Stops with what it has when the seconds are over, and never in a first round.
"""

import argparse
import json
import statistics
import time

import torch

GIB = 1 << 30


def aligned(size):
    return (size + 511) // 512 * 512


class Large:
    """One large pinned copy, as often as the bytes need it: the ceiling."""

    name = "torch, one large pinned copy"

    def __init__(self, sizes):
        self.total = sum(sizes)
        self.size = min(self.total, 4 * GIB)
        self.device = torch.full((self.size,), 90, dtype=torch.uint8, device="cuda")
        self.host = None

    def move(self, to, source):
        left = self.total
        while left > 0:
            part = min(left, self.size)
            to[:part].copy_(source[:part], non_blocking=True)
            left -= part

    def out(self):
        if self.host is None:
            self.host = torch.empty(self.size, dtype=torch.uint8, pin_memory=True)
        self.move(self.host, self.device)

    def back(self):
        self.move(self.device, self.host)


class Tensors:
    """The tensors on the device, or where a way has put them."""

    def __init__(self, sizes):
        self.sizes = sizes
        self.device = [torch.full((size,), 90, dtype=torch.uint8, device="cuda") for size in sizes]
        self.host = [None] * len(sizes)


class Pageable(Tensors):
    """.to("cpu"), one after the other: what trainers do by default."""

    name = "torch, pageable per tensor"

    def out(self):
        for i, tensor in enumerate(self.device):
            self.host[i] = tensor.to("cpu")
            self.device[i] = None

    def back(self):
        for i, tensor in enumerate(self.host):
            self.device[i] = tensor.to("cuda")
            self.host[i] = None


class Pinned(Tensors):
    """A pinned tensor for each, kept; copies queued, the device waited for at the end."""

    name = "torch, pinned per tensor"

    def room(self):
        self.host = [torch.empty(s, dtype=torch.uint8, pin_memory=True) for s in self.sizes]

    def out(self):
        if self.host[0] is None:
            self.room()
        for i, tensor in enumerate(self.device):
            self.host[i].copy_(tensor, non_blocking=True)
        torch.cuda.synchronize()
        self.device = [None] * len(self.sizes)

    def back(self):
        self.device = [tensor.to("cuda", non_blocking=True) for tensor in self.host]


class Coalesced(Pinned):
    """One pinned buffer, kept, and views of it; still a copy for every tensor."""

    name = "torch, coalesced pinned buffer"

    def room(self):
        buffer = torch.empty(sum(map(aligned, self.sizes)), dtype=torch.uint8, pin_memory=True)
        at = 0
        for i, size in enumerate(self.sizes):
            self.host[i] = buffer[at : at + size]
            at += aligned(size)


def timed(move):
    torch.cuda.synchronize()
    start = time.perf_counter()
    move()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def p95(series):
    return sorted(series)[int(0.95 * (len(series) - 1) + 0.5)]


def row(way, sizes, outs, backs):
    total = sum(sizes)
    warm_out, warm_back = outs[1:] or outs, backs[1:] or backs
    return {
        "bench": "torch",
        "way": way.name,
        "tensors": len(sizes),
        "bytes": total,
        "rounds": len(outs) - 1,
        "offload_gbps": total / statistics.median(warm_out) * 1e-9,
        "restore_gbps": total / statistics.median(warm_back) * 1e-9,
        "out_seconds_median": statistics.median(warm_out),
        "out_seconds_p95": p95(warm_out),
        "back_seconds_median": statistics.median(warm_back),
        "back_seconds_p95": p95(warm_back),
        "cold_out_seconds": outs[0],
        "cold_back_seconds": backs[0],
        "torch": torch.__version__,
        "device_name": torch.cuda.get_device_name(),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("list")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=50.0)
    options = parser.parse_args()
    with open(options.list, encoding="utf-8") as file:
        sizes = [int(line.split()[1]) for line in file]
    end = time.monotonic() + options.seconds
    ways = [(make(sizes), [], []) for make in (Large, Pageable, Pinned, Coalesced)]
    for turn in range(options.rounds + 1):
        if turn > 1 and time.monotonic() > end:
            break
        for way, outs, backs in ways:
            outs.append(timed(way.out))
            backs.append(timed(way.back))
    for way, outs, backs in ways:
        print(json.dumps(row(way, sizes, outs, backs), separators=(",", ":")), flush=True)


if __name__ == "__main__":
    main()
