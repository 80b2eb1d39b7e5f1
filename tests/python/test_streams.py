"""Memory that one stream of a GPU has taken and others use: it is not used again before they have
done with it. The streams, and PyTorch's allocator with its memory of each stream, are played."""

import ctypes
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import refit
import refit.states.regions
import refit.step.host_buffer
import refit.weights.writer
import torch
from activation_scenes import figures, gradients, offloaded, same_bits
from refit.activations import groups, offload
from refit.activations.arena import Arena
from refit.weights.manifest import Declared, TensorSpec
from refit.weights.source import Weight, weight_of
from refit.weights.writer import PublisherCalls, Writer
from torch import nn
from training import Run

MAIN, SIDE = 7, 8
ELEMENTS = 512
LAYERS = 6


@dataclass
class Stream:
    number: int
    waited: set[int] = field(default_factory=set)
    """Groups whose copies out its further work waits for."""
    after: list[int] = field(default_factory=list)

    def wait_stream(self, other: "Stream") -> None:
        self.waited |= other.waited
        self.after.append(other.number)


@dataclass(eq=False)
class Block:
    memory: bytearray
    owner: int
    users: set[int] = field(default_factory=set)
    until: set[int] = field(default_factory=set)
    """Groups whose copies out come before what its users had queued when it was freed."""


class Machine:
    """Copies out are made as late as they may be, and memory is used again as early."""

    def __init__(self) -> None:
        self.streams = {one: Stream(one) for one in (MAIN, SIDE)}
        self.current = MAIN
        self.late: dict[int, Callable[[], None]] = {}
        self.blocks: list[Block] = []
        self.free: list[Block] = []
        self.freed_after: list[set[int]] = []

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    # ---- the allocator

    def take(self) -> torch.Tensor:
        """Memory of the current stream."""
        fits = [one for one in self.free if one.owner == self.current and not self.waits(one)]
        if fits:
            block = fits[-1]
            self.free.remove(block)
        else:
            block = Block(bytearray(4 * ELEMENTS), self.current)
            self.blocks.append(block)
        block.users.clear()
        array = (ctypes.c_char * len(block.memory)).from_buffer(block.memory)
        weakref.finalize(array, self.give_back, block)
        return torch.frombuffer(array, dtype=torch.float32)

    def waits(self, block: Block) -> bool:
        return not block.until.isdisjoint(self.late)

    def give_back(self, block: Block) -> None:
        block.until = set().union(*(self.streams[one].waited for one in block.users))
        self.free.append(block)
        self.freed_after.append(set(block.users))

    def used_on(self, storages: Iterable[torch.UntypedStorage], streams: Iterable[Stream]) -> None:
        at = {ctypes.addressof(ctypes.c_char.from_buffer(one.memory)): one for one in self.blocks}
        for storage in storages:
            at[storage.data_ptr()].users |= {one.number for one in streams}

    def write(self, tensor: torch.Tensor, value: float) -> None:
        """By work that the current stream gets."""
        for group in self.streams[self.current].waited & self.late.keys():
            self.copy(group)
        tensor.fill_(value)

    # ---- refit's copies

    def copy(self, group: int) -> None:
        if group in self.late:
            self.late.pop(group)()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        real = {name: getattr(Arena, name) for name in ("commit", "join", "fetch", "release")}

        def commit(arena: Arena, group: int, _: int) -> None:
            def copies() -> None:
                real["commit"](arena, group, 0)
                real["join"](arena, group, 0)

            self.late[group] = copies

        def join(arena: Arena, group: int, stream: int) -> None:
            if group in self.late:
                self.streams[stream].waited.add(group)
            else:
                real["join"](arena, group, 0)

        def fetch(arena: Arena, group: int, memories: list[int], _: int) -> None:
            self.copy(group)
            real["fetch"](arena, group, memories, 0)

        def release(arena: Arena, group: int, _: int) -> None:
            self.copy(group)
            real["release"](arena, group, 0)

        for one in (commit, join, fetch, release):
            patch.setattr(Arena, one.__name__, one)
        patch.setattr(Arena, "is_still", lambda _, group: group not in self.late)
        for name, ours in (
            ("current_stream", lambda _: self.current),
            ("stream_objects", self.stream_objects),
            ("used_on", self.used_on),
        ):
            for where in (groups, offload):
                if hasattr(where, name):
                    patch.setattr(where, name, ours)
        patch.setattr(torch.cuda, "current_stream", lambda _: self.streams[self.current])

    def stream_objects(self, _: torch.device) -> dict[int, Any]:
        return {self.current: self.streams[self.current]}


class Beside(nn.Module):
    """Saves on the main stream what a side stream has made, which waits for nothing."""

    def __init__(self, machine: Machine, number: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((ELEMENTS,), 1 / ELEMENTS))
        self.machine = machine
        self.number = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.machine.on(SIDE):
            made = self.machine.take()
            self.machine.write(made, self.number + 1)
        torch.cuda.current_stream().wait_stream(self.machine.streams[SIDE])
        return x * (self.weight * made).sum()


class Model(nn.Module):
    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Beside(machine, number) for number in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("in_flight", [1, 2])
def test_memory_taken_on_side_stream_is_not_reused_during_copy(
    in_flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine()
    machine.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: machine.streams[machine.current])
    model = Model(machine)
    model(torch.ones(())).backward()
    expected = gradients(model)
    options = {"min_bytes": 4 * ELEMENTS, "in_flight": in_flight}
    with offloaded(model, **options) as (activations, block):
        for _ in range(3):
            machine.freed_after.clear()
            with block():
                loss = model(torch.ones(()))
            let_go = list(machine.freed_after)
            loss.backward()
            # What was asked for while it left stays mapped until the copies are over.
            asked = machine.freed_after[len(let_go) :]
            assert sum(MAIN in one for one in asked) == in_flight - 1
            assert all(map(same_bits, gradients(model), expected))
            assert figures(activations)["activation_left_bytes_last"] > 0
            # A layer after the copies may read on the main stream what it has not saved.
            assert let_go
            assert all(MAIN in one for one in let_go)


def test_stream_is_made_an_object_once_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, asked = Machine(), [0]
    machine.install(monkeypatch)
    monkeypatch.setattr(groups, "used_on", lambda *_: None)

    def stream_objects(device: torch.device) -> dict[int, Any]:
        asked[0] += 1
        return machine.stream_objects(device)

    monkeypatch.setattr(offload, "stream_objects", stream_objects)
    model = nn.Module()
    model.layers = nn.ModuleList(
        nn.Sequential(nn.Linear(ELEMENTS, ELEMENTS), nn.GELU(), nn.SiLU()) for _ in range(LAYERS)
    )
    with offloaded(model, min_bytes=1) as (_, block):
        x = torch.ones(4, ELEMENTS)
        with block():
            for layer in model.layers:
                x = layer(x)
        # As the first tensor of each is saved, and where each layer, and the block, ends.
        assert asked[0] == 2 * LAYERS + 1
        x.sum().backward()


class Told:
    """What PyTorch's allocator was told: the streams that use memory, besides its own."""

    def __init__(self, patch: pytest.MonkeyPatch, where: Any) -> None:
        self.stream = Stream(MAIN)
        self.streams: list[int] = []
        patch.setattr(where, "stream_objects", lambda _: {self.stream.number: self.stream})
        patch.setattr(where, "used_on", self.used_on)

    def used_on(self, storages: Iterable[Any], streams: Iterable[Stream]) -> None:
        self.streams += [one.number for one in streams for _ in storages]


def test_step_stream_uses_states_restored_on_another_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = Told(monkeypatch, refit.states.regions)
    run = Run()
    run.step()
    with refit.Controller(run.optimizer, run.model) as controller:
        controller.offload()
        controller.restore()
        assert told.streams == []  # one stream alone: memory may be used again at once
        controller.offload()
        told.stream = Stream(SIDE)
        controller.restore()
        count = len(told.streams)
        assert count > 0
        told.stream = Stream(9)
        for _ in range(2):
            controller.prepare_for_training()
        assert told.streams == [MAIN] * count + [9] * count


def test_gradients_restored_on_another_stream_reach_step_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = Told(monkeypatch, refit.states.regions)
    steps = told.stream
    run = Run()
    run.step()
    run.backward()  # adds to them without a join
    with refit.Controller(run.optimizer, run.model) as controller:
        controller.accumulating = False
        controller.offload()
        controller.restore()
        assert steps.after == []
        controller.offload()
        told.stream = Stream(SIDE)
        controller.restore()
        assert steps.after == [SIDE]
        told.stream = steps
        run.optimizer.zero_grad()
        controller.offload()
        told.stream = Stream(SIDE)
        controller.restore()
        assert steps.after == [SIDE]  # there are none


def test_failed_restore_goes_on_after_stream_that_took_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = Told(monkeypatch, refit.states.regions)
    run = Run()
    run.step()
    with refit.Controller(run.optimizer, run.model) as controller:
        controller.offload()
        ahead, told.stream = told.stream, Stream(SIDE)
        real, left = torch.UntypedStorage.resize_, [2]

        def resize(storage: Any, nbytes: int) -> Any:
            if nbytes and not left[0]:
                raise torch.OutOfMemoryError("CUDA out of memory")
            left[0] -= bool(nbytes)
            return real(storage, nbytes)

        with monkeypatch.context() as patch:
            patch.setattr(torch.UntypedStorage, "resize_", resize)
            with pytest.raises(refit.DeviceMemoryError):
                controller.restore()
        told.stream = ahead
        controller.prepare_for_training()
        assert told.stream.after == [SIDE]  # its work may have used that memory last
        assert set(told.streams) == {MAIN}  # and it does not own all of it
        told.streams.clear()
        controller.offload()
        controller.prepare_for_training()
        assert told.stream.after == [SIDE]
        assert told.streams == []


def test_weights_made_on_side_stream_are_read_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    current = [MAIN]
    read: list[tuple[int, list[int]]] = []

    def write_all(_: Any, __: int, part: Any, count: int, ___: Any, stream: Any) -> None:
        read.append((stream, [part[at].tensor for at in range(count)]))

    def match(_: Declared, name: str, tensor: torch.Tensor) -> tuple[int, Weight]:
        return int(name), weight_of(tensor)._replace(device=0)

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield "0", torch.ones(4)
        current[0] = SIDE
        yield "1", torch.ones(4)
        yield "2", torch.ones(4).view(2, 2).T
        current[0] = MAIN

    monkeypatch.setattr(refit.weights.writer, "stream_of", lambda _: current[0])
    monkeypatch.setattr(refit.weights.writer, "call", write_all)
    monkeypatch.setattr(Declared, "match", match)
    specs = tuple(TensorSpec(str(number), "F32", (4,)) for number in range(3))
    for together in (False, True):
        writer = Writer()
        monkeypatch.setattr(writer, "_device", lambda _: SimpleNamespace(pointer=0))
        with PublisherCalls(0) as calls:
            if together:
                writer.write_together(calls, Declared(specs), weights(), lend=False)
            else:
                writer.write_each(calls, Declared(specs), weights())
        assert [(one.native, which) for one, which in read] == [(MAIN, [0]), (SIDE, [1, 2])]
        read.clear()


def test_windows_follow_the_steps_to_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch, refit.step.host_buffer)
    run = Run()
    with refit.Controller(run.optimizer, run.model, schedule=refit.HostStates()):
        for _ in range(3):
            run.step()
        assert told.streams == told.stream.after == []
        told.stream = Stream(SIDE)
        for _ in range(2):
            run.step()
        assert told.streams == [SIDE]
        assert told.stream.after == [MAIN]
