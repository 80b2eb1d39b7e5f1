"""torch_cases.py LIST [--rounds N] [--seconds N] [--mib N]: how PyTorch itself, and refit from
Python, move the same tensors.

LIST has a name and a number of bytes a line (`refit bench tensors`). Each way is timed by the wall
clock with the device waited for at both ends, in turn with the others, and written as one JSON
object, like those of `refit bench`. The first round of each is cold: caches and page-locked memory
are taken then. What there is so far is written after each round, so of each way the last line
counts, whenever this is stopped; it stops by itself when the seconds are over.
Tensors of the list count until they have --mib MiB, 1024 at first: all ways together then lock
less than 8 GiB of host memory.
With --device cpu it proves itself on a machine without a GPU; no figure means anything then.
"""

import argparse
import json
import time

import refit
import torch
from refit.bench.series import Series

GIB = 1 << 30


def aligned(size):
    return (size + 511) // 512 * 512


class Large:
    """One large pinned copy, as often as the bytes need it: the ceiling."""

    name = "torch, one large pinned copy"

    def __init__(self, sizes, place):
        self.total = sum(sizes)
        self.size = min(self.total, 4 * GIB)
        self.device = torch.full((self.size,), 90, dtype=torch.uint8, device=place)
        self.host = None

    def move(self, to, source):
        left = self.total
        while left > 0:
            part = min(left, self.size)
            to[:part].copy_(source[:part], non_blocking=True)
            left -= part

    def out(self):
        if self.host is None:
            self.host = pinned(self.size, self.device)
        self.move(self.host, self.device)

    def back(self):
        self.move(self.device, self.host)


class Tensors:
    """The tensors on the device, or where a way has put them."""

    def __init__(self, sizes, place):
        self.sizes = sizes
        self.place = place
        self.device = [torch.full((size,), 90, dtype=torch.uint8, device=place) for size in sizes]
        self.host = [None] * len(sizes)


class Pageable(Tensors):
    """.to("cpu"), one after the other: what trainers do by default."""

    name = "torch, pageable per tensor"

    def out(self):
        for i, tensor in enumerate(self.device):
            self.host[i] = tensor.to("cpu", copy=True)
            self.device[i] = None

    def back(self):
        for i, tensor in enumerate(self.host):
            self.device[i] = tensor.to(self.place, copy=True)
            self.host[i] = None


class Pinned(Tensors):
    """A pinned tensor for each, kept; copies queued, the device waited for at the end."""

    name = "torch, pinned per tensor"

    def room(self):
        self.host = [pinned(size, self.device[0]) for size in self.sizes]

    def out(self):
        if self.host[0] is None:
            self.room()
        for i, tensor in enumerate(self.device):
            self.host[i].copy_(tensor, non_blocking=True)
        settle()
        self.device = [None] * len(self.sizes)

    def back(self):
        self.device = [t.to(self.place, non_blocking=True, copy=True) for t in self.host]


class Coalesced(Pinned):
    """One pinned buffer, kept, and views of it; still a copy for every tensor."""

    name = "torch, coalesced pinned buffer"

    def room(self):
        buffer = pinned(sum(map(aligned, self.sizes)), self.device[0])
        at = 0
        for i, size in enumerate(self.sizes):
            self.host[i] = buffer[at : at + size]
            at += aligned(size)


class Refit(Tensors):
    """An optimizer's states, by refit.Controller: storages emptied and filled again in place."""

    name = "refit.Controller"

    def __init__(self, sizes, place):
        super().__init__(sizes, place)
        parameter = torch.nn.Parameter(torch.zeros(1, device=place))
        optimizer = torch.optim.SGD([parameter])
        optimizer.state[parameter] = {f"{i}": tensor for i, tensor in enumerate(self.device)}
        self.controller = refit.Controller(optimizer)

    def out(self):
        self.controller.offload()
        assert not any(tensor.untyped_storage().nbytes() for tensor in self.device)

    def back(self):
        self.controller.prepare_for_training()


def pinned(size, like):
    return torch.empty(size, dtype=torch.uint8, pin_memory=like.is_cuda)


def settle():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(move):
    settle()
    start = time.perf_counter()
    move()
    settle()
    return time.perf_counter() - start


def within(sizes, most):
    """Those of the sizes that fit into `most` bytes, in their order; one as large if none does."""
    kept = []
    for size in sizes:
        if aligned(size) <= most:
            kept.append(size)
            most -= aligned(size)
    return kept or [most]


def row(way, sizes, out, back):
    total = sum(sizes)
    return {
        "bench": "torch",
        "way": way.name,
        "tensors": len(sizes),
        "bytes": total,
        "rounds": len(out.seconds),
        "offload_gbps": out.gbps(total),
        "restore_gbps": back.gbps(total),
        **out.figures("out_"),
        **back.figures("back_"),
        **out.cold_figure("out_"),
        **back.cold_figure("back_"),
        "torch": torch.__version__,
        "device_name": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("list")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=50.0)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    with open(options.list, encoding="utf-8") as file:
        sizes = within([int(line.split()[1]) for line in file], options.mib << 20)
    end = time.monotonic() + options.seconds
    makers = (Large, Pageable, Pinned, Coalesced, Refit)
    ways = [(make(sizes, options.device), Series(), Series()) for make in makers]
    for _ in range(options.rounds + 1):
        for way, out, back in ways:
            out.add(timed(way.out))
            back.add(timed(way.back))
            print(json.dumps(row(way, sizes, out, back), separators=(",", ":")), flush=True)
        if time.monotonic() > end:
            break


if __name__ == "__main__":
    main()
