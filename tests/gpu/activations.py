"""activations.py [--device cpu]: activations leave and return, with the real PyTorch.

A model's gradients are taken with refit.ActivationOffload and without, and both must have the
same bits, whatever the streams, the order of passes, checkpointing and the options are. The device
sleeps between kernels, so that copies and memory that is used too early meet. Then the device's
memory is looked at: what has left is given back, and no step takes more than one without.

Ends with 77 where PyTorch sees no GPU or is not there, and with 1 if a scene has failed; the others
are played all the same. With --device cpu it proves itself on a machine without a GPU.
"""

import itertools
import sys
import threading

import refit
from scenes import MIB, on_gpu, parser, play, torch

checkpoint = torch.utils.checkpoint.checkpoint
LAYERS = 6
WIDTH = 256
SLEEP = 300_000  # clock cycles
OPTIONS = {"host_bytes": "256MiB", "min_bytes": 1024, "aim": "memory"}


class Layer(torch.nn.Module):
    """Saves tensors of its input's size, some of them twice; may work on a stream of its own."""

    def __init__(self, device, stream=None):
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, 2 * WIDTH, device=device)
        self.down = torch.nn.Linear(2 * WIDTH, WIDTH, device=device)
        self.stream = stream

    def forward(self, x):
        pause(x.device)
        if self.stream is None:
            return x + self.down(torch.relu(self.up(x)))
        here = torch.cuda.current_stream()
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            pause(x.device)
            beside = self.down(torch.relu(self.up(x)))
        x.record_stream(self.stream)
        here.wait_stream(self.stream)
        beside.record_stream(here)
        return x + beside


class Beside(torch.nn.Module):
    """Saves what a side stream has made, which waits for nothing. Autograd holds it, so it needs no
    record_stream."""

    def __init__(self, device, number, stream):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones((), device=device))
        self.number, self.stream = number, stream

    def forward(self, x):
        with torch.cuda.stream(self.stream):
            made = torch.full_like(x.detach(), self.number + 1)
        torch.cuda.current_stream().wait_stream(self.stream)
        pause(x.device)
        return x + torch.tanh(x * made) * self.gain


class Model(torch.nn.Module):
    def __init__(self, device, stream=None, kept=None):
        super().__init__()
        torch.manual_seed(5)
        self.layers = torch.nn.ModuleList(Layer(device, stream) for _ in range(LAYERS))
        self.kept = kept  # how checkpointing is done: None, "reentrant" or "frame"

    def forward(self, x):
        for layer in self.layers:
            if self.kept is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.kept == "reentrant")
        return x


def pause(device):
    if on_gpu(device):
        torch.cuda._sleep(SLEEP)


def batch(device, number, rows=None):
    rows = rows or (512 if on_gpu(device) else 32)
    drawn = torch.Generator().manual_seed(number)
    return torch.randn(rows, WIDTH, generator=drawn).to(device).requires_grad_()


def overwrite(device):
    """Takes and fills memory that was given back: bytes read too late are then others."""
    if on_gpu(device):
        noise = [torch.full((MIB,), 255, dtype=torch.uint8, device=device) for _ in range(8)]
        del noise


def gradients(model, device, numbers, block=None, backward=None):
    """Of a pass over these batches; ``block`` is around each forward pass."""
    model.zero_grad()
    inputs = [batch(device, number) for number in numbers]
    losses = []
    for one in inputs:
        if block is None:
            losses.append(model(one).square().mean())
        else:
            with block:
                losses.append(model(one).square().mean())
        overwrite(device)
    for loss in losses:
        (backward or torch.Tensor.backward)(loss)
        overwrite(device)
    return [one.grad.clone() for one in (*model.parameters(), *inputs)]


def assert_same(plain, moved, what):
    for number, (mine, theirs) in enumerate(zip(plain, moved, strict=True)):
        assert torch.equal(mine, theirs), f"{what}: gradient {number} has other bits"


# ---- Scenes


def options(device):
    """Each form of checkpointing, and groups that leave and return sooner or later."""
    for kept in (None, "reentrant", "frame"):
        model = Model(device, kept=kept)
        plain = gradients(model, device, [1])
        for in_flight, prefetch, keep in itertools.product((1, 3), (0, 1, 3), (0, 1)):
            chosen = {"in_flight": in_flight, "prefetch": prefetch, "keep_last": keep}
            activations = refit.ActivationOffload(model, **OPTIONS, **chosen)
            for _ in range(3):
                moved = gradients(model, device, [1], activations)
                assert_same(plain, moved, f"{kept}, {chosen}")
            assert activations.stats()["refit/activation_left_bytes_last"] > 0, (kept, chosen)
            activations.close()


def orders(device):
    """Several forward passes before their backward passes; a graph that is used twice."""
    model = Model(device)

    def twice(loss):
        loss.backward(retain_graph=True)
        overwrite(device)
        loss.backward()

    for backward in (None, twice):
        plain = gradients(model, device, [1, 2, 3], backward=backward)
        activations = refit.ActivationOffload(model, **OPTIONS)
        for _ in range(3):
            assert_same(plain, gradients(model, device, [1, 2, 3], activations, backward), backward)
        activations.close()


def side_streams(device):
    """Layers that work on a stream of their own, and passes on different streams."""
    if not on_gpu(device):
        return
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    model = Model(device, torch.cuda.Stream())
    torch.cuda.synchronize()
    plain = gradients(model, device, [1, 2])
    activations = refit.ActivationOffload(model, **OPTIONS)
    for number in range(9):
        stream = streams[number % 3]
        stream.wait_stream(streams[(number - 1) % 3])
        with torch.cuda.stream(stream):
            moved = gradients(model, device, [1, 2], activations)
            assert_same(plain, moved, f"pass {number}")
    activations.close()


def taken_elsewhere(device):
    """What is saved belongs to a stream that waits for no copy, and takes memory again at once."""
    if not on_gpu(device):
        return
    side = torch.cuda.Stream()
    model = Model(device)
    model.layers = torch.nn.ModuleList(Beside(device, number, side) for number in range(LAYERS))

    def taken(block=None):
        torch.cuda.synchronize()
        return gradients(model, device, [1], block)

    plain = taken()
    activations = refit.ActivationOffload(model, **OPTIONS)
    for number in range(5):
        assert_same(plain, taken(activations), f"pass {number}")
    assert activations.stats()["refit/activation_left_bytes_last"] > 0
    activations.close()


def threads(device):
    """A backward pass in another thread than its forward pass."""
    model = Model(device)
    plain = gradients(model, device, [1])
    activations = refit.ActivationOffload(model, **OPTIONS)

    def elsewhere(loss):
        if on_gpu(device):
            torch.cuda.synchronize()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()

    for _ in range(3):
        assert_same(plain, gradients(model, device, [1], activations, elsewhere), "a thread")
    activations.close()


def mixed(device):
    """Autocast, whose copies of weights are in no parameter."""
    dtype = torch.float16 if on_gpu(device) else torch.bfloat16
    model = Model(device)
    activations = refit.ActivationOffload(model, **OPTIONS)
    with torch.autocast(torch.device(device).type, dtype):
        plain = gradients(model, device, [1])
        for _ in range(3):
            assert_same(plain, gradients(model, device, [1], activations), "autocast")
    activations.close()


def device_memory(device):
    """What has left is given back; a pass takes no more than one without, and leaves nothing."""
    if not on_gpu(device):
        return
    rows = 16384
    model, x = Model(device), batch(device, 1, rows)
    model(x).square().mean().backward()

    def measured(block):
        model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        if block is None:
            loss = model(x).square().mean()
        else:
            with block:
                loss = model(x).square().mean()
        torch.cuda.synchronize()
        between = torch.cuda.memory_allocated() - before
        loss.backward()
        torch.cuda.synchronize()
        return between, torch.cuda.max_memory_allocated() - before

    for aim in ("memory", "overlap"):
        plain = measured(None)
        chosen = {**OPTIONS, "host_bytes": "2GiB", "aim": aim}
        activations = refit.ActivationOffload(model, **chosen)
        for _ in range(4):
            moved = measured(activations)
        stats = activations.stats()
        left = stats["refit/activation_left_bytes_last"]
        print(f"aim {aim}: after forward {plain[0]} -> {moved[0]}, peak {plain[1]} -> {moved[1]}, ")
        print(f"left {left:.0f}, off: {activations.off}")
        assert moved[1] <= plain[1], "the peak is higher than without"
        assert aim != "memory" or moved[0] <= plain[0] - 0.95 * left, "memory was not given back"
        assert stats["refit/activation_used_bytes"] == 0, "a group is left in the arena"
        activations.close()


SCENES = (options, orders, side_streams, taken_elsewhere, threads, mixed, device_memory)

if __name__ == "__main__":
    device = parser().parse_args().device
    sys.exit(play({scene.__name__: scene for scene in SCENES}, device))
