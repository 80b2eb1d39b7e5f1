"""Weights on a device: which one, and behind whose work they are read."""

import ctypes
import gc
import signal
import sys
from typing import Any

import numpy as np
import pytest
import torch
from broadcasting import LOCAL, pair
from refit import _abi
from refit import device as devices
from refit._library import call as call_c
from refit._library import lib
from refit.device import Device
from refit.errors import InvalidError, UnsupportedError
from refit.publisher import Publisher
from refit.source import Weight, weight_of
from refit.subscriber import Subscriber

ONE = {"w": np.arange(4, dtype=np.float32)}


def test_a_device_is_named_in_the_callers_words() -> None:
    with Publisher(LOCAL) as publisher:
        publisher.use_device(torch.device("cpu"))  # nothing to share: nothing happens
        publisher.use_device("host")
        with pytest.raises(InvalidError, match=r"3\.5 is no device"):
            publisher.use_device(3.5)
        with pytest.raises(InvalidError):
            publisher.use_device("mainframe")
        assert publisher.publish(ONE) == 1


def test_a_device_is_required_where_there_is_none_to_share() -> None:
    with (
        Publisher(LOCAL, broadcast_gpu="require") as publisher,
        pytest.raises(UnsupportedError),
    ):
        publisher.use_device("host")


@pytest.mark.parametrize("end", [Publisher, Subscriber])
def test_ctrl_c_right_behind_use_device_leaves_the_device_open_for_its_users_trap_12(
    end: type[Publisher | Subscriber], monkeypatch: pytest.MonkeyPatch
) -> None:
    what = end.__name__.lower()
    ended: list[str] = []

    def noting(name: str) -> Any:
        real = getattr(lib, name)

        def close(*arguments: Any) -> Any:
            ended.append(name)
            return real(*arguments)

        return close

    def interrupted(*_: Any) -> int:
        signal.raise_signal(signal.SIGINT)
        return 0

    for name in ("refit_device_close", f"refit_{what}_close"):
        monkeypatch.setattr(lib, name, noting(name))
    monkeypatch.setattr(lib, f"refit_{what}_use_device", interrupted)
    with end("ipc:///nowhere" if end is Subscriber else LOCAL) as one:
        with pytest.raises(KeyboardInterrupt):
            one.use_device("host")
        gc.collect()
        assert ended == []
    assert ended == [f"refit_{what}_close", "refit_device_close"]


class OnADevice:
    """Host memory that looks like a CUDA tensor's, for the way that such bytes take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, publisher: Publisher) -> None:
        self.device = Device("host")
        stream = _abi.refit_stream_ref()
        call_c(lib.refit_stream_open, self.device.pointer, ctypes.byref(stream))
        self.stream = stream
        self.asked: list[int] = []
        monkeypatch.setattr("refit._writer.stream_of", self.stream_of)
        monkeypatch.setattr("refit._writer.Device", self.open)

    def stream_of(self, number: int) -> int:
        self.asked.append(number)
        return int(self.stream.native)

    def open(self, spec: str) -> Device:
        assert spec == "cuda:3"
        return self.device

    def weight(self, data: np.ndarray[Any, Any]) -> Weight:
        return weight_of(data)._replace(device=3)

    def end(self) -> None:
        """Before the publisher, which closes the device."""
        call_c(lib.refit_stream_close, self.device.pointer, self.stream)


def test_bytes_on_a_device_are_read_behind_the_callers_stream_trap_17(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pair() as (publisher, worker):
        there = OnADevice(monkeypatch, publisher)
        known = {"a": ONE["w"], "b": ONE["w"] + 1, "c": ONE["w"] + 2}
        placed = {name: there.weight(data) for name, data in known.items() if name != "b"}
        monkeypatch.setattr(
            "refit.manifest.weight_of", lambda one: placed.get(one, weight_of(known[one]))
        )
        publisher.publish([(name, name) for name in known])
        assert there.asked == [3, 3]  # once for each run of tensors there
        assert publisher.publish((name, name) for name in known) == 2  # nothing copied there
        assert there.asked == [3] * 4
        assert publisher.publish({"x": "a"}) == 3
        there.end()
    expected = {name: data.tobytes() for name, data in known.items()}
    assert worker.seen[:2] == [expected] * 2


class OfAnotherLibrary:
    """Memory that is said to be a GPU's, as CuPy shows it."""

    def __init__(self) -> None:
        self.asked: list[int | None] = []
        self.memory = np.arange(4, dtype=np.float32)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 3

    def __dlpack__(self, stream: int | None = None) -> Any:
        self.asked.append(stream)
        return self.memory.__dlpack__()


def test_work_of_another_library_comes_before_the_stream_that_reads_trap_17(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Stream:
        cuda_stream = 0x7F00

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: Stream)
    other = OfAnotherLibrary()
    assert weight_of(other).device == 3
    monkeypatch.delitem(sys.modules, "torch")
    weight_of(other)
    assert devices.stream_of(3) == 1
    assert other.asked == [0x7F00, 1]


def test_the_default_stream_is_not_none_trap_17(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        cuda_stream = 0

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: Stream)
    assert devices.stream_of(0) == 1
    Stream.cuda_stream = 0x7F00
    assert devices.stream_of(0) == 0x7F00


@pytest.mark.parametrize(
    ("device", "spec"),
    [
        (torch.device("cuda", 2), "cuda:2"),
        (torch.device("cpu"), "host"),
        (1, "cuda:1"),
        ("cuda:0:capacity=1GiB", "cuda:0:capacity=1GiB"),
    ],
)
def test_devices_by_any_name(device: Any, spec: str) -> None:
    assert devices.spec_of(device) == spec


def test_a_publisher_keeps_the_devices_that_it_opened_until_it_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publisher = Publisher(LOCAL)
    mine = Device("host")
    publisher.use_device(mine)
    publisher.use_device("host")
    assert len(publisher._own_devices) == 1
    theirs = publisher._own_devices[0]
    publisher.close()
    assert theirs.closed
    assert not mine.closed
    mine.close()
