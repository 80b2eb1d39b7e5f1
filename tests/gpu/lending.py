"""lending.py [--device cpu]: weights reach an engine process on the trainer's GPU, with PyTorch.

The trainer steps a model and publishes it; engines in processes of their own load each version and
answer with its bits. What is lent takes no memory besides the weights, what is freed and allocated
again is read where it lies now, and an engine that is killed in the middle costs a version. A
version that is applied in place is taken back bit for bit where the engine refuses it.

Ends with 77 where PyTorch sees no GPU or is not there, and with 1 if a scene has failed; the others
are played all the same. With --device cpu it proves itself on a machine without a GPU: versions
travel through shared memory then.
"""

import hashlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager

import refit
from scenes import MIB, on_gpu, parser, play, torch

PROCESSES = multiprocessing.get_context("spawn")
WAIT_S = 60.0
WIDTH = 512


class Model(torch.nn.Module):
    """A tied head, a buffer, an odd shape, and weights of two types."""

    def __init__(self, device, seed=7):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(1000, WIDTH, device=device)
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(WIDTH, WIDTH, device=device) for _ in range(8)
        )
        self.odd = torch.nn.Parameter(torch.randn(3, 17, 5, device=device))
        self.short = torch.nn.Parameter(torch.randn(1001, device=device, dtype=torch.bfloat16))
        self.head = torch.nn.Linear(WIDTH, 1000, bias=False, device=device)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones((), device=device))

    def loss(self):
        x = self.embed.weight[:64]
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        return self.head(x).square().mean() + self.odd.square().mean() + self.short.float().mean()


def halved(model):
    """With parameters of two bytes, as an engine may have them."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return model


class Fused(torch.nn.Module):
    """An engine that stacks, divides, turns and converts the weights, and its own loader."""

    def __init__(self, device):
        super().__init__()
        self.layers = torch.nn.Parameter(torch.zeros(8, WIDTH, WIDTH, device=device))
        self.biases = torch.nn.Parameter(torch.zeros(8 * WIDTH, device=device))
        self.short = torch.nn.Parameter(torch.zeros(1001, device=device, dtype=torch.bfloat16))
        self.odd = torch.nn.Parameter(torch.zeros(5, 3, 17, device=device))
        self.columns = torch.nn.Parameter(torch.zeros(1000, WIDTH // 2, device=device))
        self.rows = torch.nn.Parameter(torch.zeros(500, WIDTH, device=device, dtype=torch.bfloat16))

    def load_weights(self, weights):
        for name, tensor in weights:
            if name.startswith("layers"):
                _, number, kind = name.split(".")
                place = self.layers.data if kind == "weight" else self.biases.data.view(8, WIDTH)
                place[int(number)].copy_(tensor)
            elif name == "embed.weight":
                self.columns.data.copy_(tensor[:, WIDTH // 2 :])
                self.rows.data.copy_(tensor[500:])
            elif name == "odd":
                self.odd.data.copy_(tensor.permute(2, 0, 1))
            elif name == "short":
                self.short.data.copy_(tensor)


def fused_of(model, device):
    made = Fused(device)
    made.load_weights(model.state_dict().items())
    return made


def twin_of(model, device):
    twin = Model(device)
    twin.load_state_dict(model.state_dict())
    return twin


def bits_of(model):
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


# ---- An engine, in a process of its own


def refuse(update, model, pipe):
    """Answers with the bits of the version, and of what there is once it was refused."""
    with update:
        update.apply()
        applied = bits_of(model)
        update.refuse("as the scene wants it", kept=True)
    pipe.send((update.version, applied, bits_of(model)))


def work(device, endpoint, name, pipe, options):
    model, parts = Model(device, seed=0), None
    if options.get("halved"):
        halved(model)
    if options.get("fused"):
        model = Fused(device)
    given = {} if on_gpu(device) else {"device": None}
    subscriber = refit.Subscriber(endpoint, worker=name, timeout=WAIT_S, **given)
    if options.get("bind"):
        subscriber.bind(model)
    pipe.send("there")
    with subscriber:
        for update in subscriber:
            if options.get("refuse_at") == update.version:
                refuse(update, model, pipe)
                continue
            with update:
                if options.get("stop_at") == update.version:
                    views = [tensor for _, tensor in update.tensors()]
                    pipe.send(("open", len(views)))
                    pipe.recv()  # nothing comes: it is killed
                if options.get("bind"):
                    update.apply()
                elif options.get("iterates"):
                    state = model.state_dict()
                    with torch.no_grad():
                        for name, tensor in update.tensors():
                            state[name].copy_(tensor)
                elif options.get("casts"):
                    update.load_into(model, cast=True)
                elif options.get("fused"):
                    parts = parts or refit.record(model.load_weights, update, model)
                    update.load_into(parts)
                else:
                    update.load_into(model)
            pipe.send((update.version, update.device, bits_of(model)))


class Engine:
    """The process, and what it answers."""

    def __init__(self, device, endpoint, name, **options):
        self.pipe, theirs = PROCESSES.Pipe()
        arguments = (device, endpoint, name, theirs, options)
        self.process = PROCESSES.Process(target=work, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self.answer()

    def answer(self):
        assert self.pipe.poll(WAIT_S), "an engine does not answer"
        return self.pipe.recv()

    def kill(self):
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()


@contextmanager
def trainer(device, **options):
    given = {} if on_gpu(device) else {"device": None}
    with refit.Publisher("user://*", **given, **options) as publisher:
        yield publisher


def step(model, optimizer):
    optimizer.zero_grad()
    model.loss().backward()
    optimizer.step()


def expect(engine, model, version, device, *, there=True):
    number, where, bits = engine.answer()
    assert number == version, f"version {number} came, and not {version}"
    assert bits == bits_of(model), f"version {version} has other bits at the engine"
    if on_gpu(device):
        assert where.startswith("cuda") == there, f"version {version} was read on {where}"


# ---- Scenes


def each_step_is_lent(device):
    """No memory of the GPU or the host is taken for it, and no export after the first."""
    model = Model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with trainer(device) as publisher:
        engine = Engine(device, publisher.endpoint, "one")
        publisher.wait_workers(1, WAIT_S)
        free = torch.cuda.mem_get_info()[0] if on_gpu(device) else 0
        for version in range(1, 6):
            step(model, optimizer)
            publisher.publish(model.state_dict())
            expect(engine, model, version, device)
        if not on_gpu(device):
            return
        stats = publisher.stats()
        assert stats["publish_gpu_bytes"] == 0, "the GPU has a copy"
        assert stats["publish_pinned_bytes"] == 0, "the host has a copy"
        taken = free - torch.cuda.mem_get_info()[0]
        print(f"    device memory taken by five versions: {taken / MIB:.1f} MiB")


def two_engines_read_at_once(device):
    model = Model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with trainer(device) as publisher:
        engines = [Engine(device, publisher.endpoint, name) for name in ("one", "two")]
        publisher.wait_workers(2, WAIT_S)
        for version in range(1, 4):
            step(model, optimizer)
            publisher.publish(model.state_dict())
            for engine in engines:
                expect(engine, model, version, device)


def weights_that_were_freed_and_taken_again_are_read_where_they_are(device):
    with trainer(device) as publisher:
        engine = Engine(device, publisher.endpoint, "one")
        publisher.wait_workers(1, WAIT_S)
        for version in range(1, 7):
            model = Model(device, seed=version)
            publisher.publish(model.state_dict())
            expect(engine, model, version, device)
            del model
            if on_gpu(device) and version % 2 == 0:
                torch.cuda.empty_cache()  # the driver has the memory back


def what_is_made_on_the_way_is_copied(device):
    """Weights in another type, from a generator, a few of them at a time."""
    model = Model(device)
    with trainer(device) as publisher:
        engine = Engine(device, publisher.endpoint, "one", halved=True)
        publisher.wait_workers(1, WAIT_S)
        for version in range(1, 4):
            with torch.no_grad():
                model.odd.add_(version)
            publisher.publish(refit.named_weights(model, dtype=torch.bfloat16))
            expect(engine, halved(twin_of(model, device)), version, device)


def an_engine_with_a_loader_of_its_own_takes_parts(device):
    """From the trainer's memory on the GPU, and over the host."""
    for options in ({}, {"broadcast_gpu": "off"}):
        model = Model(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with trainer(device, **options) as publisher:
            engine = Engine(device, publisher.endpoint, "one", fused=True)
            publisher.wait_workers(1, WAIT_S)
            for version in range(1, 4):
                step(model, optimizer)
                publisher.publish(model.state_dict())
                expect(engine, fused_of(model, device), version, device, there=not options)


def more_copies_than_allowed_are_streamed(device):
    model = Model(device)
    with trainer(device, broadcast_gpu_bucket_bytes="64KiB") as publisher:
        loads = Engine(device, publisher.endpoint, "loads", halved=True)
        iterates = Engine(device, publisher.endpoint, "iterates", halved=True, iterates=True)
        casts = Engine(device, publisher.endpoint, "casts", casts=True)
        publisher.wait_workers(3, WAIT_S)
        for version in (1, 2, 3):
            with torch.no_grad():
                model.odd.add_(version)
            publisher.publish(refit.named_weights(model, dtype=torch.bfloat16))
            short = halved(twin_of(model, device))
            expect(loads, short, version, device)
            expect(iterates, short, version, device)
            expect(casts, twin_of(short, device), version, device)


def more_than_a_bound_engine_may_have_goes_over_the_host(device):
    model = Model(device)
    with trainer(device, broadcast_gpu_bucket_bytes="64KiB") as publisher:
        engine = Engine(device, publisher.endpoint, "one", halved=True, bind=True)
        publisher.wait_workers(1, WAIT_S)
        publisher.publish(refit.named_weights(model, dtype=torch.bfloat16))
        expect(engine, halved(twin_of(model, device)), 1, device, there=False)


def an_engine_killed_while_it_reads_costs_a_version(device):
    model = Model(device)
    with trainer(device, broadcast_heartbeat_timeout_ms=3000) as publisher:
        engine = Engine(device, publisher.endpoint, "one", stop_at=2)
        publisher.wait_workers(1, WAIT_S)
        publisher.publish(model.state_dict())
        expect(engine, model, 1, device)
        killer = threading.Thread(target=kill_once_open, args=(engine,))
        killer.start()
        try:
            publisher.publish(model.state_dict())
        except refit.PeerError:
            pass
        else:
            raise AssertionError("a version whose only engine was killed counts as applied")
        killer.join()
        other = Engine(device, publisher.endpoint, "two")
        publisher.wait_workers(1, WAIT_S)
        with torch.no_grad():
            model.odd.add_(1)
        version = publisher.publish(model.state_dict())
        number, _, bits = other.answer()
        while number != version:  # it is given the version before, too, if that is on the host
            number, _, bits = other.answer()
        assert bits == bits_of(model)


def a_version_that_the_engine_refuses_is_taken_back(device):
    """Applied in place, from what is lent."""
    model = Model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with trainer(device) as publisher:
        engine = Engine(device, publisher.endpoint, "one", bind=True, refuse_at=3)
        publisher.wait_workers(1, WAIT_S)
        for version in range(1, 3):
            step(model, optimizer)
            publisher.publish(model.state_dict())
            expect(engine, model, version, device)
        held = bits_of(model)
        step(model, optimizer)
        try:
            publisher.publish(model.state_dict())
        except refit.PeerError:
            pass
        else:
            raise AssertionError("a version that was refused counts as applied")
        assert engine.answer() == (3, bits_of(model), held), "other bits were applied or put back"
        publisher.wait_workers(1, WAIT_S)
        step(model, optimizer)
        publisher.publish(model.state_dict())
        expect(engine, model, 4, device)


def time_applies(device, endpoint, pipe, sizes):
    """An engine that applies each version; it refuses the third."""
    weights = {f"w{i}": torch.zeros(n, device=device, dtype=torch.bfloat16) for i, n in sizes}
    given = {} if on_gpu(device) else {"device": None}
    with refit.Subscriber(endpoint, worker="one", timeout=WAIT_S, **given) as subscriber:
        subscriber.bind(weights)
        pipe.send("there")
        for update in subscriber:
            with update:
                update.apply()
                applied = subscriber.stats()["receive_apply_seconds_last"]
                began = time.perf_counter()
                if update.version == 3:
                    update.refuse("to be timed", kept=True)
                pipe.send((applied, time.perf_counter() - began))


def what_an_apply_takes(device):
    """1 % of the elements change; nothing is asserted of the time."""
    sizes = [(i, 5_000_000 if on_gpu(device) else 5_000) for i in range(300)]
    weights = {f"w{i}": torch.randn(n, device=device).bfloat16() for i, n in sizes}
    pipe, theirs = PROCESSES.Pipe()
    with trainer(device) as publisher:
        arguments = (device, publisher.endpoint, theirs, sizes)
        engine = PROCESSES.Process(target=time_applies, args=arguments, daemon=True)
        engine.start()
        assert pipe.poll(WAIT_S), "the engine does not start"
        assert pipe.recv() == "there"
        publisher.wait_workers(1, WAIT_S)
        for version in range(1, 4):
            try:
                publisher.publish(weights)
            except refit.PeerError:
                assert version == 3
            assert pipe.poll(WAIT_S), "the engine does not answer"
            applied, refused = pipe.recv()
            for one in weights.values():
                picked = torch.rand(one.shape, device=device) < 0.01
                one.copy_(torch.where(picked, -one, one))
        mib = sum(2 * n for _, n in sizes) / MIB
        print(f"    {mib:.0f} MiB, 1 % changed: applied in {1e3 * applied:.1f} ms", end=", ")
        print(f"taken back in {1e3 * refused:.1f} ms")


def kill_once_open(engine):
    assert engine.answer()[0] == "open"
    engine.kill()


SCENES = {
    one.__name__.replace("_", " "): one
    for one in (
        each_step_is_lent,
        two_engines_read_at_once,
        weights_that_were_freed_and_taken_again_are_read_where_they_are,
        what_is_made_on_the_way_is_copied,
        an_engine_with_a_loader_of_its_own_takes_parts,
        more_copies_than_allowed_are_streamed,
        more_than_a_bound_engine_may_have_goes_over_the_host,
        an_engine_killed_while_it_reads_costs_a_version,
        a_version_that_the_engine_refuses_is_taken_back,
        what_an_apply_takes,
    )
}

if __name__ == "__main__":
    sys.exit(play(SCENES, parser().parse_args().device))
