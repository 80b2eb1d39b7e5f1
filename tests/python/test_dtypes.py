"""Element types: all of them by every name, and a sentence for what cannot be carried."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from refit._c import dtypes
from refit.errors import InvalidError, UnsupportedError
from refit.states.offloader import lib


def test_types_are_those_of_the_c_library_and_of_its_header(root: Path) -> None:
    for name, dtype in dtypes.DTYPES.items():
        assert lib.refit_dtype_name(dtype.number) == name.encode()
        assert lib.refit_dtype_bits(dtype.number) == dtype.bits, name
        assert dtypes.by_number(dtype.number) is dtypes.by_name(name) is dtype
    header = (root / "lib/include/refit/dtype.h").read_text()
    assert set(re.findall(r"X\((\w+), \d+, \d+\)", header)) == set(dtypes.DTYPES)


@pytest.mark.parametrize("name", [one.name for one in dtypes.DTYPES.values() if one.torch])
def test_each_pytorch_type_goes_there_and_back(name: str) -> None:
    if not hasattr(torch, dtypes.by_name(name).torch):  # PyTorch 2.6 lacks some
        with pytest.raises(UnsupportedError, match=rf"has no type for {name}: read the bytes"):
            dtypes.to_torch(dtypes.by_name(name))
        return
    there = dtypes.to_torch(dtypes.by_name(name))
    assert dtypes.of_torch(there).name == name
    assert there.itemsize * 8 == dtypes.by_name(name).bits * dtypes.by_name(name).pack


@pytest.mark.parametrize("name", [n for n in dtypes.DTYPES if hasattr(np, dtypes.DTYPES[n].numpy)])
def test_each_numpy_type_goes_there_and_back(name: str) -> None:
    there = dtypes.to_numpy(dtypes.by_name(name))
    assert dtypes.of_numpy(there).name == name
    assert there.itemsize * 8 == dtypes.by_name(name).bits


def test_bits_are_an_unsigned_integer_of_the_width() -> None:
    assert dtypes.to_numpy(dtypes.by_name("BF16"), bits=True) == np.uint16
    assert dtypes.to_numpy(dtypes.by_name("F8_E4M3"), bits=True) == np.uint8
    assert dtypes.to_numpy(dtypes.by_name("F32"), bits=True) == np.float32


def test_what_numpy_lacks_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    with pytest.raises(UnsupportedError, match=r"no type for BF16: ask for their bits"):
        dtypes.to_numpy(dtypes.by_name("BF16"))
    with pytest.raises(UnsupportedError, match=r"F6_E2M3: read \.bytes"):
        dtypes.to_numpy(dtypes.by_name("F6_E2M3"), bits=True)


def test_what_the_format_lacks_is_refused() -> None:
    for there in (torch.complex128, torch.float8_e4m3fnuz, torch.qint8):
        with pytest.raises(UnsupportedError, match="cannot be sent"):
            dtypes.of_torch(there)
    with pytest.raises(UnsupportedError, match="complex128"):
        dtypes.of_numpy(np.dtype("complex128"))
    with pytest.raises(UnsupportedError, match="other byte order"):
        dtypes.of_numpy(np.dtype("float32").newbyteorder())
    with pytest.raises(UnsupportedError, match=r"PyTorch .* has no type for F6_E2M3"):
        dtypes.to_torch(dtypes.by_name("F6_E2M3"))
    with pytest.raises(InvalidError, match="one of BOOL, F4"):
        dtypes.by_name("bfloat16")


@pytest.mark.parametrize(
    ("name", "shape", "nbytes"),
    [
        ("F4", (3,), 2),
        ("F6_E2M3", (3,), 3),
        ("F32", (), 4),
        ("BF16", (0, 7), 0),
        ("C64", (2, 3), 48),
    ],
)
def test_bytes_are_counted_packed_and_rounded_up(
    name: str, shape: tuple[int, ...], nbytes: int
) -> None:
    assert dtypes.by_name(name).nbytes(shape) == nbytes
