"""The trainer's end: what is declared, written and committed, and what goes wrong."""

import os
import struct
from typing import Any

import numpy as np
import pytest
import torch
from broadcasting import pair
from refit import dtypes
from refit.manifest import Alias, Typed

ONE = {"w": np.arange(4, dtype=np.float32)}


def test_a_version_reaches_a_worker_whole() -> None:
    matrix = torch.arange(6.0).view(2, 3)
    weights = {
        "a": matrix,
        "a.tied": matrix,
        "a.turned": matrix.t(),
        "bf16": matrix.bfloat16(),
        "fp8": matrix.to(torch.float8_e4m3fn),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 4),
        "array": np.arange(3, dtype=np.int16),
        "bytes": b"abc",
        "alias": Alias("array"),
    }
    with pair() as (publisher, worker):
        assert publisher.publish(weights) == 1
        assert publisher.version == 1
        assert worker.subscriber.describe().version == 1
    seen = worker.seen[0]
    assert list(seen) == list(weights)
    assert seen["a"] == seen["a.tied"] == struct.pack("6f", *range(6))
    assert seen["a.turned"] == struct.pack("6f", 0, 3, 1, 4, 2, 5)
    assert seen["bf16"] == matrix.bfloat16().view(torch.uint8).numpy().tobytes()
    assert seen["fp8"] == matrix.to(torch.float8_e4m3fn).view(torch.uint8).numpy().tobytes()
    assert seen["scalar"] == struct.pack("q", 3)
    assert seen["empty"] == b""
    assert seen["array"] == seen["alias"] == struct.pack("3h", 0, 1, 2)
    assert seen["bytes"] == b"abc"


@pytest.mark.parametrize("shm", ["auto", "off"])
@pytest.mark.parametrize("name", dtypes.DTYPES)
def test_every_type_is_carried(name: str, shm: str) -> None:
    shape = (3, 4)
    raw = os.urandom(dtypes.by_name(name).nbytes(shape))

    def look(update: Any) -> Any:
        return update["w"].dtype, update["w"].shape, bytes(update["w"].bytes)

    with pair(look, broadcast_shm=shm) as (publisher, worker):
        publisher.publish({"w": Typed(raw, name, shape)})
    assert worker.seen == [(name, shape, raw)]
