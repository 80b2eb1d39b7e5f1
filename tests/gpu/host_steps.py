"""host_steps.py [--mib N] [--rounds N] [--device cpu]: states on the host, with the real PyTorch.

First scenes: a model is trained with HostStates beside one that refit never saw, and both must
have the same bits, whatever the optimizer's way, the streams, a scaler, cycles and the memory are.
Then each way to step --mib MiB of states is measured, and written as one JSON object, like those of
`refit bench`: ``step`` is optimizer.step() alone, ``train`` a forward and backward pass and a step,
each with the device waited for at both ends, which waits for copies on the way out as well.
``peak_device_bytes`` is what PyTorch's allocator has given for states in a step.

Ends with 77 where PyTorch sees no GPU or is not there, and with 1 if a scene or a way has failed;
the others are played all the same. With --device cpu it proves itself on a machine without a GPU;
no figure means anything then.
"""

import functools
import importlib
import itertools
import json
import math
import sys
import time

import refit
from refit.bench.series import Series
from scenes import MIB, assert_same, on_gpu, parser, play, torch

adamw = importlib.import_module("torch.optim.adamw").adamw
LAYERS = 8
BATCH, BATCHES = 2048, 4
TRAINED = 3  # steps at a time, so that one's copies out meet the next one's passes
WINDOWS = 3
STEPS = 5
SLACK = 4 * MIB  # step counters, and what the libraries of CUDA take
RATES = {"lr": 1e-4, "weight_decay": 0.01, "eps": 1e-8}
BETAS = (0.9, 0.999)
MOMENTS = ("exp_avg", "exp_avg_sq")


class Training:
    """A model and its optimizer; what a step does depends on its number alone."""

    def __init__(self, device, width, batch=64, **options):
        torch.manual_seed(3)
        self.steps = 0
        self.batches = [torch.randn(batch, width).to(device) for _ in range(BATCHES)]
        wide = [torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)]
        blocks = [
            [torch.nn.Linear(a.in_features, a.out_features, device=device), torch.nn.Tanh()]
            for a in wide * (LAYERS // 2)
        ]
        self.model = torch.nn.Sequential(*itertools.chain(*blocks))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=BETAS, **RATES, **options)

    def loss(self):
        return self.model(self.batches[self.steps % BATCHES]).pow(2).mean()

    def backward(self):
        self.loss().backward()

    def step(self):
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def held(self):
        """Weights and states by name."""
        for name, one in self.model.named_parameters():
            yield name, one.detach()
            for key, value in self.optimizer.state.get(one, {}).items():
                yield f"{name}.{key}", value

    @property
    def state_bytes(self):
        return sum(2 * one.nbytes for one in self.model.parameters())


def on_host(run, **options):
    schedule = refit.HostStates(**{"window_bytes": "1MiB", "windows": WINDOWS, **options})
    return refit.Controller(run.optimizer, run.model, schedule=schedule)


def compare(alone, moved):
    assert_same(itertools.zip_longest(alone.held(), moved.held(), fillvalue=("nothing", None)))


def settle(device):
    if on_gpu(device):
        torch.cuda.synchronize()


def early(controller):
    """Whether windows have come in before the step."""
    return any(one.begun is not None for one in controller._host.placement.buffers)


# ---- Scenes


def optimizers(device):
    """Each way in which PyTorch steps, with and without windows that come in early; cycles."""
    ways = [{"foreach": True}, {"foreach": False}, {"fused": True}]
    ways.append({"fused": True, "amsgrad": True})
    if on_gpu(device):
        ways += [{"capturable": True}, {"capturable": True, "foreach": False}]
    for options, prefetch in itertools.product(ways, (True, False)):
        alone, moved = (Training(device, 128, **options) for _ in range(2))
        with on_host(moved, prefetch=prefetch) as controller:
            for number in range(STEPS):
                alone.step()
                moved.backward()
                assert early(controller) == (prefetch and number > 0), (options, number)
                moved.optimizer.step()
                moved.optimizer.zero_grad()
                moved.steps += 1
                if number in (1, 3):
                    controller.offload()
                    assert controller.stats()["refit/window_bytes"] == 0
                    if on_gpu(device):
                        torch.cuda.empty_cache()
                    torch.full((8 * MIB,), 255, dtype=torch.uint8, device=device)
                    controller.restore()
                    controller.wait()
                if number != 2:  # once two steps follow each other
                    compare(alone, moved)
        alone.step(), moved.step()
        compare(alone, moved)


def scaled(device):
    """A GradScaler with autocast, which skips the steps whose gradients overflow."""
    kind = torch.device(device).type
    dtype = torch.float16 if on_gpu(device) else torch.bfloat16
    for fused in (True, False):
        alone, moved = (Training(device, 128, fused=fused) for _ in range(2))
        scalers = [torch.amp.GradScaler(kind, init_scale=256.0) for _ in range(2)]
        with on_host(moved):
            for number in range(STEPS):
                for run, scaler in zip((alone, moved), scalers, strict=True):
                    with torch.autocast(kind, dtype):
                        loss = run.loss()
                    scaler.scale(loss).backward()
                    if number in (0, 3):
                        run.model[0].weight.grad[0] = torch.inf
                    scaler.step(run.optimizer)
                    scaler.update()
                    run.optimizer.zero_grad()
                    run.steps += 1
                assert scalers[0].get_scale() == scalers[1].get_scale()
                for name, one in alone.model.named_parameters():
                    assert torch.equal(one, moved.model.get_parameter(name)), (fused, number, name)
            compare(alone, moved)


def side_streams(device):
    """Steps on other streams than the one on which the windows' memory was taken."""
    if not on_gpu(device):
        return
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    alone, moved = (Training(device, 128, fused=True) for _ in range(2))
    with on_host(moved) as controller:
        for number in range(3 * STEPS):
            stream, before = streams[number % 3], streams[(number - 1) % 3]
            for run in (alone, moved):
                stream.wait_stream(before)
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(1_000_000)  # what follows is still queued when step returns
                    run.step()
                    noise = torch.full((4 * MIB,), 255, dtype=torch.uint8, device=device)
                    del noise
            if number % 4 == 3:
                with torch.cuda.stream(stream):
                    controller.offload()
                    controller.restore()
        torch.cuda.synchronize()
        compare(alone, moved)


def device_memory(device):
    """A step takes its windows of the device's memory and nothing else, and gives them back."""
    if not on_gpu(device):
        return
    window = 2 * MIB
    moved = Training(device, 512, fused=True)
    assert moved.state_bytes > 4 * WINDOWS * window
    with on_host(moved, window_bytes=window, prefetch=False) as controller:
        for _ in range(3):
            moved.backward()
            controller.offload()
            controller.restore(), controller.wait()
            peak = peak_of(moved.optimizer.step)
            assert peak <= WINDOWS * window + MIB, f"a step has taken {peak} bytes"
            moved.optimizer.zero_grad()
        before = torch.cuda.memory_allocated()
        moved.optimizer.state_dict()
        assert torch.cuda.memory_allocated() < before
        assert controller.stats()["refit/window_bytes"] == 0


def peak_of(action):
    """The most bytes that were asked of the allocator at once, above those before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = asked("current")
    action()
    torch.cuda.synchronize()
    return asked("peak") - before


def asked(when):
    """Bytes that were asked of the allocator, which rounds them up: "current", or their "peak"."""
    return torch.cuda.memory_stats().get(f"requested_bytes.all.{when}", 0)


def little_memory(device):
    """Where the device has memory for one window alone, and none for resident states."""
    if not on_gpu(device):
        return
    alone, moved, plain = (Training(device, 1024, fused=True) for _ in range(3))
    window, room = 16 * MIB, 24 * MIB
    assert moved.state_bytes > 8 * room
    with on_host(moved, window_bytes=window) as controller:
        for number in range(3):
            alone.step()
            moved.backward(), plain.backward()
            controller.offload()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            total = torch.cuda.get_device_properties(device).total_memory
            gradients = sum(one.grad.nbytes for one in moved.model.parameters())  # which are away
            limit = torch.cuda.memory_reserved() + gradients + room
            if number > 0:  # states are born in memory of PyTorch's, which has windows for them
                torch.cuda.set_per_process_memory_fraction(limit / total)
            try:
                moved.optimizer.step()
                taken = controller.stats()["refit/window_bytes"]
                assert number == 0 or 0 < taken <= room, f"windows of {taken:.0f} bytes"
                if number == 2:
                    fails_for_memory(plain.optimizer.step)
            finally:
                torch.cuda.set_per_process_memory_fraction(1.0)
            moved.optimizer.zero_grad(), plain.optimizer.zero_grad()
            moved.steps += 1
            compare(alone, moved)


def fails_for_memory(step):
    try:
        step()
    except torch.OutOfMemoryError:
        return
    raise AssertionError("the limit leaves room for resident states: the scene shows nothing")


SCENES = (optimizers, scaled, side_streams, device_memory, little_memory)


# ---- Ways: each has a model of its own, and they are measured one after the other.


class Resident(Training):
    """The states stay on the device."""

    name = "resident"
    options = None

    def __init__(self, device, width, window_bytes):
        super().__init__(device, width, min(BATCH, width), fused=True)
        self.device = device
        self.window_bytes = window_bytes
        self.in_bytes = self.out_bytes = 0

    def open(self):
        """Called when weights and gradients are there."""

    def close(self):
        """Gives back what it took."""


class OnHost(Resident):
    """refit, without windows that come in early."""

    name = "refit, windows"
    prefetch = False

    def open(self):
        options = {"window_bytes": self.window_bytes, "prefetch": self.prefetch}
        self.controller = on_host(self, **options)

    def close(self):
        self.optimizer.state_dict()  # waits for the last copies
        stats = self.controller.stats()
        self.in_bytes = int(stats["refit/step_in_bytes"])
        self.out_bytes = int(stats["refit/step_out_bytes"])
        self.controller.close()


class OnHostEarly(OnHost):
    """refit, whose first windows come in during the backward pass."""

    name = "refit, windows, prefetch"
    prefetch = True


class PerTensor(Resident):
    """For each parameter its states in, the step, the states out, in pinned memory on one stream:
    what trainers do that swap an optimizer's states."""

    name = "per tensor, no overlap"

    def open(self):
        parameters = list(self.model.parameters())
        pin = on_gpu(self.device)
        self.kept = [
            [torch.zeros(p.shape, dtype=p.dtype, pin_memory=pin) for _ in MOMENTS]
            for p in parameters
        ]
        self.counters = [torch.zeros((), device=self.device) for _ in parameters]
        self.in_bytes = self.out_bytes = self.state_bytes
        self.optimizer.step = self.swap

    @torch.no_grad()
    def swap(self):
        for p, kept, counter in zip(self.model.parameters(), self.kept, self.counters, strict=True):
            here = [one.to(self.device, non_blocking=True, copy=True) for one in kept]
            adamw(
                [p], [p.grad], [here[0]], [here[1]], [], [counter], fused=True, amsgrad=False,
                maximize=False, beta1=BETAS[0], beta2=BETAS[1], **RATES,
            )  # fmt: skip
            for mine, one in zip(kept, here, strict=True):
                mine.copy_(one, non_blocking=True)

    def close(self):
        for p, kept in zip(self.model.parameters(), self.kept, strict=True):
            self.optimizer.state[p] = dict(zip(MOMENTS, kept, strict=True))


WAYS = (Resident, OnHost, OnHostEarly, PerTensor)


def timed(device, action):
    settle(device)
    start = time.perf_counter()
    action()
    settle(device)
    return time.perf_counter() - start


def measured(make, device, width, window_bytes, rounds):
    """A way's figures as one row, and its weights and moments at the end."""
    way = make(device, width, window_bytes)
    way.backward()
    settle(device)
    base = asked("current") if on_gpu(device) else 0
    way.open()
    alone, train, peak = Series(), Series(), 0
    for number in range(rounds + 1):
        if number > 0:
            way.backward()
        if on_gpu(device):
            torch.cuda.reset_peak_memory_stats()
        alone.add(timed(device, way.optimizer.step))
        if on_gpu(device):
            peak = max(peak, asked("peak") - base)
        way.optimizer.zero_grad()
        way.steps += 1
        train.add(timed(device, lambda: [way.step() for _ in range(TRAINED)]) / TRAINED)
    way.close()
    row = {
        "bench": "torch window",
        "way": way.name,
        "tensors": 2 * len(list(way.model.parameters())),
        "bytes": way.state_bytes,
        "rounds": rounds,
        "step_s_median": alone.median,
        "step_s_p95": alone.p95,
        "cold_step_s": alone.cold,
        "train_s_median": train.median,
        "train_s_p95": train.p95,
        "step_in_gbps": alone.gbps(way.in_bytes),
        "step_out_gbps": alone.gbps(way.out_bytes),
        "peak_device_bytes": peak,
        "torch": torch.__version__,
        "device_name": torch.cuda.get_device_name() if on_gpu(device) else "cpu",
    }
    held = [(n, t.cpu()) for n, t in way.held() if not n.endswith(".step")]
    return row, held


def measure(device, nbytes, rounds):
    """Prints the row of each way. AssertionError for other bits, or more memory, than there are to
    be."""
    width = max(16, math.isqrt(nbytes // (LAYERS * 4 * 2 * 4)) // 16 * 16)
    window = max(1 << 16, nbytes // 16)
    expected = None
    for make in WAYS:
        row, held = measured(make, device, width, window, rounds)
        print(json.dumps(row, separators=(",", ":")), flush=True)
        expected = expected or held
        assert_same(zip(expected, held, strict=True))
        if on_gpu(device):
            limit = WINDOWS * window + SLACK
            peak = row["peak_device_bytes"]
            assert make in (Resident, PerTensor) or peak <= limit, f"{make.name}: {peak} bytes"
        del held
        if on_gpu(device):
            torch.cuda.empty_cache()


if __name__ == "__main__":
    options = parser()
    options.add_argument("--mib", type=int, default=1024)
    options.add_argument("--rounds", type=int, default=7)
    given = options.parse_args()
    plays = {scene.__name__: scene for scene in SCENES}
    plays["measure"] = functools.partial(measure, nbytes=given.mib * MIB, rounds=given.rounds)
    sys.exit(play(plays, given.device))
