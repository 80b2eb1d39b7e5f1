"""What a version has: tensors of every library, ties, names, and what is refused."""

import array
import ctypes
import struct
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refit.errors import InvalidError, RefitError, StateError, UnsupportedError
from refit.weights import manifest
from refit.weights.manifest import Alias, RawTensor, TensorSpec
from refit.weights.source import in_row_order, weight_of


def bytes_at(tensor: Any) -> bytes:
    weight = in_row_order(weight_of(tensor))
    assert weight.nbytes == weight.dtype.nbytes(weight.shape)
    return ctypes.string_at(weight.pointer, weight.nbytes) if weight.nbytes else b""


class OnlyDlpack:
    """A tensor of a library that is not known here."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.tensor.__dlpack_device__()  # type: ignore[no-any-return]


EXPECTED = struct.pack("6f", *range(6))
SIX = torch.arange(6, dtype=torch.float32)


@pytest.mark.parametrize(
    ("tensor", "shape"),
    [
        (SIX, (6,)),
        (SIX.view(2, 3), (2, 3)),
        (torch.nn.Parameter(SIX), (6,)),
        (SIX.view(3, 2).t().contiguous().t(), (3, 2)),
        (SIX.numpy(), (6,)),
        (np.asfortranarray(SIX.numpy().reshape(2, 3)), (2, 3)),
        (OnlyDlpack(SIX.view(2, 3)), (2, 3)),
        (array.array("f", range(6)), (6,)),
        (memoryview(EXPECTED).cast("f", (2, 3)), (2, 3)),
        (RawTensor(EXPECTED, "F32", (3, 2)), (3, 2)),
        (np.frombuffer(EXPECTED, np.float32), (6,)),
    ],
)
def test_every_kind_of_tensor_shows_its_bytes_in_row_order(
    tensor: Any, shape: tuple[int, ...]
) -> None:
    weight = weight_of(tensor)
    assert (weight.dtype.name, weight.shape, weight.device) == ("F32", shape, -1)
    assert bytes_at(tensor) == EXPECTED


COMPLEX = torch.tensor([1 + 2j, 3 - 4j])


@pytest.mark.parametrize(
    ("tensor", "shape", "sent"),
    [
        (torch.tensor(2.5), (), struct.pack("f", 2.5)),
        (np.float32(2.5), (), struct.pack("f", 2.5)),
        (torch.empty(0, 4), (0, 4), b""),
        (b"", (0,), b""),
        (torch.tensor([1.0]).expand(3), (3,), struct.pack("3f", 1, 1, 1)),  # trap 4
        (np.broadcast_to(np.float32(1), (3,)), (3,), struct.pack("3f", 1, 1, 1)),
        (COMPLEX.conj(), (2,), struct.pack("4f", 1, -2, 3, 4)),
        (COMPLEX.conj().imag, (2,), struct.pack("2f", -2, 4)),
        (memoryview(b"abcdef")[::2], (3,), b"ace"),
    ],
)
def test_scalars_empty_and_scattered_ones_are_sent_as_they_read(
    tensor: Any, shape: tuple[int, ...], sent: bytes
) -> None:
    assert weight_of(tensor).shape == shape
    assert bytes_at(tensor) == sent


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this PyTorch has no FP4")
def test_packed_types_count_their_elements() -> None:
    packed = torch.zeros(2, 3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert weight_of(packed).shape == (2, 6)
    assert weight_of(packed).dtype.name == "F4"


def test_the_memory_of_a_buffer_is_held() -> None:
    weight = weight_of(bytearray(b"x" * 100_000))
    assert in_row_order(weight) is weight
    assert ctypes.string_at(weight.pointer, 100_000) == b"x" * 100_000


@pytest.mark.parametrize(
    ("tensor", "kind", "sentence"),
    [
        (object(), InvalidError, "give a torch.Tensor"),
        (3.5, InvalidError, "a float is not a tensor"),
        (None, InvalidError, "a NoneType is not a tensor"),
        (torch.empty(2, device="meta"), UnsupportedError, "device meta"),
        (torch.eye(2).to_sparse(), UnsupportedError, "make it dense"),
        (torch.zeros(2, dtype=torch.complex128), UnsupportedError, "complex128"),
        (torch.nn.UninitializedParameter(), InvalidError, "run the model once"),
        (np.array(["a"]), UnsupportedError, "cannot be sent"),
        (np.array([object()]), UnsupportedError, "object cannot be sent"),
        (OnlyDlpack(SIX.view(2, 3).t()), InvalidError, "not contiguous"),
        (OnlyDlpack(torch.zeros(2, dtype=torch.complex128)), UnsupportedError, "128 bits"),
        (RawTensor(b"abc", "F32", (1,)), InvalidError, "has 4 bytes, but 3 were given"),
        (RawTensor(b"abcd", "FLOAT", (1,)), InvalidError, "no element type 'FLOAT'"),
        (memoryview(b"ab").cast("c"), UnsupportedError, "format 'c'"),
    ],
)
def test_what_cannot_be_sent_is_refused_with_a_sentence(
    tensor: Any, kind: type[RefitError], sentence: str
) -> None:
    with pytest.raises(kind, match=sentence):
        weight_of(tensor)
    with pytest.raises(kind, match=f"^the.name: .*{sentence}"):
        manifest.collect({"the.name": tensor})


def test_a_tensor_that_keeps_its_bytes_elsewhere_is_refused() -> None:
    # trap 5
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, inner: torch.Tensor) -> "Wrapper":
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape)  # type: ignore[attr-defined, no-any-return]

        @classmethod
        def __torch_dispatch__(cls, *_: Any) -> Any:
            raise NotImplementedError

    with pytest.raises(UnsupportedError, match="a Wrapper keeps its bytes in other tensors"):
        weight_of(Wrapper(torch.zeros(2)))


Weights = dict[str, Any]


def put(name: str, make: Callable[[torch.Tensor], Any]) -> Callable[[Weights], None]:
    return lambda weights: weights.update({name: make(weights["a"])})


def negated(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes, read with the other sign."""
    return torch.view_as_complex(tensor.view(3, 2)).conj().imag


CHANGES: dict[str, Callable[[Weights], None]] = {
    "other memory": put("a", torch.clone),
    "other shape": put("a", lambda it: it.view(3, 2)),
    "other type": put("a", lambda it: it.view(torch.int32)),
    "part of it": put("a", lambda it: it[:4]),
    "other order": put("a", lambda it: it.view(2, 3).t()),
    "negated": put("a", negated),
    "tied": put("b", lambda it: it),
    "one more": put("c", torch.clone),
    "one fewer": lambda weights: weights.pop("b"),
    "other names": lambda weights: weights.update(d=weights.pop("a")),
    "an array": put("a", torch.Tensor.numpy),
    "parameter": put("a", torch.nn.Parameter),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_weights_that_changed_are_looked_at_again(change: Callable[[Weights], None]) -> None:
    weights: Weights = {"a": torch.arange(6.0), "b": torch.ones(3)}
    collector = manifest.Collector()
    first = collector.collect(weights)
    again = collector.collect({name: it.detach() for name, it in weights.items()})
    assert again.rows is first.rows
    change(weights)
    for _ in range(2):
        found = collector.collect(weights)
        assert found[:2] == manifest.collect(weights)[:2]
        assert [it[1].pointer for it in found.scattered] == [
            it[1].pointer for it in manifest.collect(weights).scattered
        ]


def test_an_emptied_storage_is_noticed_by_a_second_look() -> None:
    collector, weights = manifest.Collector(), {"a": torch.arange(6.0)}
    collector.collect(weights)
    weights["a"].untyped_storage().resize_(4)
    with pytest.raises(StateError, match="a: it has no memory now"):
        collector.collect(weights)


def test_a_collector_keeps_no_tensor() -> None:
    collector, weights = manifest.Collector(), {"a": torch.arange(6.0)}
    gone = weakref.ref(weights["a"])
    held = collector.collect(weights).held
    weights.clear()
    assert gone() is not None
    assert len(held) == 1
    del held
    assert gone() is None


def test_tied_weights_travel_once_trap_1() -> None:
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(4, 3), "head": torch.nn.Linear(3, 4)})
    model["head"].weight = model["embed"].weight
    found = manifest.collect(model.state_dict())
    ties = {spec.name: spec.alias_of for spec in found.specs}
    assert ties == {"embed.weight": None, "head.weight": "embed.weight", "head.bias": None}
    assert [row.number for row in found.rows[-1]] == [0, 2]


def test_identical_views_of_one_storage_are_tied_trap_2() -> None:
    flat = torch.arange(6.0)
    found = manifest.collect(
        {
            "whole": flat,
            "front": flat[:3],
            "matrix": flat.view(2, 3),
            "turned": flat.view(2, 3).t(),
            "again": flat.view(2, 3),
            "turned.again": flat.view(2, 3).t(),
            "array": flat.numpy(),
            "no": torch.empty(0),
            "none": torch.empty(0),
            "nil": b"",
            "nought": b"",
        }
    )
    ties = {spec.name: spec.alias_of for spec in found.specs if spec.alias_of}
    assert ties == {"again": "matrix", "turned.again": "turned", "array": "whole"}


def test_a_tie_can_be_declared() -> None:
    found = manifest.collect([("a", SIX), ("b", Alias("a")), ("c", Alias("b"))])
    assert [spec.alias_of for spec in found.specs] == [None, "a", "a"]


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        ([("a", SIX), ("a", SIX)], "two tensors are named 'a'"),
        ([("b", Alias("z"))], "tied to 'z', which must come before it"),
        ([(3, SIX)], "3 is a int"),
        ([("", SIX)], "it is empty"),
        ([("a\0b", SIX)], "has a NUL in it"),
        ([SIX], "one of them is a Tensor"),
        (["ab", 3], "is not a tensor"),
        ([3], "one of them is a int"),
    ],
)
def test_bad_names_and_ties_are_refused_trap_33(weights: Any, sentence: str) -> None:
    with pytest.raises(InvalidError, match=sentence):
        manifest.collect(weights)


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (TensorSpec("a", "F32", (1,) * 9), "9 dimensions: 8 are the most"),
        (TensorSpec("\ud800", "F32", (1,)), "not UTF-8"),
        (TensorSpec("a", "F32", (1,), "z"), "tied to 'z', which is not there"),
    ],
)
def test_a_manifest_that_c_cannot_say_is_refused(spec: TensorSpec, sentence: str) -> None:
    with pytest.raises(InvalidError, match=sentence):
        manifest.to_c([spec])


@pytest.mark.parametrize("look", [manifest.specs_of, manifest.collect])
def test_model_instead_of_its_weights_is_refused(look: Any) -> None:
    with pytest.raises(InvalidError, match=r"not a Linear: .* refit\.named_weights\(model\)"):
        look(torch.nn.Linear(2, 2))


def test_specs_are_taken_from_whatever_has_them() -> None:
    specs = (TensorSpec("a", "F32", (6,)), TensorSpec("b", "F32", (6,), "a"))

    class Weights:
        def manifest(self) -> tuple[TensorSpec, ...]:
            return specs

    assert manifest.specs_of(Weights()) == specs
    assert manifest.specs_of(list(specs)) == specs
    assert manifest.specs_of({"a": SIX, "b": SIX}) == specs
    # trap 31: an iterator may make each in the memory of the one before
    assert manifest.specs_of(iter([("a", SIX), ("b", SIX)])) == (specs[0], ("b", "F32", (6,), None))


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(0, 4), max_size=4),
    order=st.permutations(range(4)),
    steps=st.lists(st.integers(1, 3), min_size=4, max_size=4),
)
def test_any_view_is_sent_as_it_reads(shape: list[int], order: list[int], steps: list[int]) -> None:
    whole = torch.arange(int(np.prod(shape)), dtype=torch.int32).reshape(shape)
    view = whole[tuple(slice(None, None, step) for step in steps[: whole.ndim])]
    view = view.permute([axis for axis in order if axis < view.ndim])
    assert bytes_at(view) == bytes_at(view.numpy()) == view.numpy().tobytes()
