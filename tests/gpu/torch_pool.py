"""torch_pool.py: a pool of refit's with the real PyTorch on a GPU, through whole cycles.

A step makes the states, they are adopted, a CUDA graph of the step is captured; then the states
leave, PyTorch's cache is emptied, other bytes take their place, the states return, and the graph is
replayed: addresses and bits are those of a run that was left alone. Ends with 77 where PyTorch sees
no GPU or is not there. Run it with and without expandable_segments:True; it says which it was.
"""

import gc
import sys

import refit

CYCLES = 3
WIDTH = 1024
WIDTH_ON_GPU = 4096
SLACK = 4 << 20
"""Bytes of PyTorch's and the driver's own."""
CHUNK = {"offload": {"chunk_bytes": "8MiB"}}
"""By chunks an arena gives memory back: those in which something stays are kept."""


class Training:
    """Steps with gradients that stay the same, so that a graph of one can be replayed."""

    def __init__(self, torch, device):
        torch.manual_seed(3)
        on_gpu = torch.device(device).type == "cuda"
        width = WIDTH_ON_GPU if on_gpu else WIDTH
        layers = [torch.nn.Linear(width, width) for _ in range(3)]
        self.model = torch.nn.Sequential(*layers).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, capturable=on_gpu)
        for number, parameter in enumerate(self.model.parameters()):
            parameter.grad = torch.full_like(parameter, 0.01 * (number + 1))

    def moments(self):
        states = self.optimizer.state.values()
        return [state[key] for state in states for key in ("exp_avg", "exp_avg_sq")]


def same(torch, one, other):
    ours = [*one.model.parameters(), *one.moments()]
    theirs = [*other.model.parameters(), *other.moments()]
    return all(map(torch.equal, ours, theirs))


def inside(pool, tensors):
    """Whether all lie in segments of the pool."""
    pieces = pool.pieces()
    addresses = [tensor.data_ptr() for tensor in tensors]
    return all(any(at <= a < at + size for at, size in pieces) for a in addresses)


def taken(torch, pool, device):
    """The bytes of the device that are in use, as its driver counts them; or the pool's."""
    if torch.device(device).type != "cuda":
        return pool.handle.info.used_bytes
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def captured(torch, step):
    """A CUDA graph of a step, as a function that replays it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def scene(torch, pool, device, capture=captured):
    """Everything but closing the pool; nothing of it is alive afterwards."""
    run, alone = Training(torch, device), Training(torch, device)
    run.optimizer.step(), alone.optimizer.step()
    stays = pool.adopt(run.optimizer, run.model)
    assert all(name.endswith(".step") for name, _ in stays), stays
    assert inside(pool, run.moments())
    assert same(torch, run, alone), "adopt() changed a value"
    addresses = [tensor.data_ptr() for tensor in run.moments()]
    replay = capture(torch, run.optimizer.step)
    with refit.Controller(run.optimizer, run.model, pool=pool) as controller:
        for _ in range(CYCLES):
            torch.cuda.empty_cache()
            full, ours = taken(torch, pool, device), pool.handle.info.used_bytes
            controller.offload()
            torch.cuda.empty_cache()
            given, less = full - taken(torch, pool, device), ours - pool.handle.info.used_bytes
            said = f"the device has {given} bytes more, the pool says {less}"
            assert less > 0, said
            assert abs(given - less) <= SLACK, said
            noise = torch.full((given,), 255, dtype=torch.uint8, device=device)
            del noise
            torch.cuda.empty_cache()
            controller.restore()
            controller.wait()
            replay()
            alone.optimizer.step()
            assert [tensor.data_ptr() for tensor in run.moments()] == addresses
            assert same(torch, run, alone), "a replay after a cycle gave other values"


def expandable(torch):
    return torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]


def used(torch, pool, device):
    """What is allocated within a pool lies in it, and settings come back."""
    before = torch.cuda.memory._snapshot()["allocator_settings"]
    with pool.use():
        assert not expandable(torch)
        inner = torch.ones(WIDTH, WIDTH, device=device)
    assert torch.cuda.memory._snapshot()["allocator_settings"] == before
    assert inside(pool, [inner])
    outer = torch.ones(WIDTH, WIDTH, device=device)
    assert not inside(pool, [outer])
    assert torch.equal(inner, outer)
    try:
        pool.close()
    except refit.BusyError:
        return
    raise AssertionError("a pool was closed in which a tensor lives")


def main():
    try:
        import torch
    except ImportError:
        return 77
    if not torch.cuda.is_available():
        return 77
    device = "cuda:0"
    pool = refit.mem_pool(device, 2 << 30, CHUNK)
    used(torch, pool, device)
    scene(torch, pool, device)
    gc.collect()
    pool.close()
    torch.cuda.empty_cache()
    torch.ones(WIDTH, WIDTH, device=device).sum().item()
    print(f"torch {torch.__version__}, expandable segments: {expandable(torch)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
