"""A device says what it is, and is closed when nothing is open on it."""

import ctypes
from typing import Any

import pytest
from refit._c.device import Device, DeviceInfo
from refit._c.library import call, lib
from refit.errors import BusyError, ConfigError, InvalidError, NotFoundError, StateError


def test_host_device_says_what_it_is() -> None:
    with Device("host:capacity=64MiB") as device:
        info = device.info
        assert isinstance(info, DeviceInfo)
        assert info.kind == "host"
        assert info.capacity_bytes == 64 << 20
        assert info.used_bytes == 0
        assert info.host_addressable
        assert info.stable_arena
        assert info.driver_version is None
        assert info.uuid == ""
        assert info.name in repr(device)
    assert repr(device) == "Device(closed)"


def test_capacity_may_be_missing_or_come_from_configuration() -> None:
    with Device("host") as device:
        assert device.info.capacity_bytes is None
    with Device(None, {"device": "host:capacity=1MiB"}) as device:
        assert device.info.capacity_bytes == 1 << 20


def test_memory_is_counted_and_keeps_it_open() -> None:
    memory = ctypes.c_void_p()
    device = Device("host:capacity=64MiB")
    call(lib.refit_memory_alloc, device.pointer, 1 << 20, ctypes.byref(memory))
    assert device.info.used_bytes >= 1 << 20
    with pytest.raises(BusyError):
        device.close()
    assert not device.closed
    call(lib.refit_memory_free, device.pointer, memory)
    device.close()
    assert device.closed
    device.close()


def test_closed_device_is_refused() -> None:
    device = Device("host")
    device.close()
    with pytest.raises(StateError, match="this Device is closed"):
        _ = device.info
    with pytest.raises(StateError):
        _ = device.pointer


@pytest.mark.parametrize(
    ("spec", "config", "error"),
    [
        ("", None, InvalidError),
        ("hast", None, InvalidError),
        ("host:capacity=", None, InvalidError),
        ("host:capacity=lots", None, InvalidError),
        ("cuda:x", None, InvalidError),
        ("host\0", None, InvalidError),
        ("cuda:4096", None, NotFoundError),
        ("host", {"offload_batch": 0}, ConfigError),
    ],
)
def test_what_cannot_be_opened_is_refused(spec: str, config: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        Device(spec, config)
