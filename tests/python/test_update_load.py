"""Loading a version: into a module or a mapping, whole or not at all."""

import threading
from typing import Any

import numpy as np
import pytest
import torch
from broadcasting import PATIENCE, both, publish_in_vain, published
from refit.errors import InvalidError, StaleError

MATRIX = torch.arange(6.0).view(2, 3)


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def model() -> torch.nn.Module:
    made = torch.nn.ModuleDict({"embed": torch.nn.Embedding(4, 3), "head": torch.nn.Linear(3, 4)})
    made["head"].weight = made["embed"].weight
    return made


def snapshot(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


class Stateful(torch.nn.Linear):
    def get_extra_state(self) -> Any:
        return {"scale": 2}

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("it stays as it is")


def test_what_is_no_tensor_is_left_alone_or_named() -> None:
    target = Stateful(3, 2)
    weights = {"weight": MATRIX, "bias": torch.ones(2)}
    with published(weights) as update:
        with pytest.raises(InvalidError, match=r"_extra_state is a dict, no tensor.*strict=False"):
            update.load_into(target)
        assert update.load_into(target, strict=False) == (["_extra_state"], [])
        places: dict[str, Any] = {"weight": target.weight.detach().zero_(), "bias": "text"}
        assert update.load_into(places, strict=False) == ([], ["bias"])
    assert torch.equal(target.weight, MATRIX)
    assert torch.equal(target.bias, torch.ones(2))
    assert places["bias"] == "text"


def test_a_module_is_loaded_in_place() -> None:
    source, target = model(), model()
    addresses = {name: tensor.data_ptr() for name, tensor in target.state_dict().items()}
    with published(source.state_dict()) as update:
        assert update.load_into(target) == ([], [])
    assert equal(snapshot(source), snapshot(target))
    assert addresses == {name: tensor.data_ptr() for name, tensor in target.state_dict().items()}
    assert target["head"].weight is target["embed"].weight


def test_a_tied_weight_is_there_under_one_of_its_names_trap_1() -> None:
    source, target = model(), model()
    weights = source.state_dict()
    del weights["head.weight"]
    with published(weights) as update:
        assert update.load_into(target).missing == []
    assert equal(snapshot(source), snapshot(target))


def test_mappings_of_tensors_and_arrays_are_loaded(torch_device: str) -> None:
    tensors = {"w": torch.zeros(3, 2, device=torch_device).t()}
    arrays = {"w": np.zeros((2, 3), np.float32)}
    with published({"w": MATRIX}) as update:
        update.load_into(tensors)
        update.load_into(arrays)
    assert torch.equal(tensors["w"].cpu(), MATRIX)
    assert arrays["w"].tolist() == MATRIX.tolist()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda w: w.pop("head.bias"), r"it lacks head\.bias"),
        (lambda w: w.update(extra=MATRIX), "it has extra too many"),
        (lambda w: w.update({"head.bias": torch.zeros(5)}), r"head\.bias is \[5\] and not \[4\]"),
        (
            lambda w: w.update({"head.bias": torch.zeros(4).half()}),
            r"head\.bias is F16 and not F32 \(cast=True converts\)",
        ),
    ],
)
def test_what_does_not_fit_changes_nothing_trap_33(change: Any, sentence: str) -> None:
    source, target = model(), model()
    before = snapshot(target)
    weights = dict(source.state_dict())
    change(weights)
    with published(weights) as update:
        with pytest.raises(InvalidError, match=f"nothing was changed: .*{sentence}"):
            update.load_into(target)
        assert update._holds(None)
    assert equal(before, snapshot(target))


def test_everything_that_does_not_fit_is_said_at_once() -> None:
    with published({"a": MATRIX, "b": MATRIX}) as update, pytest.raises(InvalidError) as failed:
        update.load_into({"a": torch.zeros(3), "c": torch.zeros(1)})
    for part in ("a is [2, 3] and not [3]", "it lacks c", "it has b too many"):
        assert part in str(failed.value)


def test_long_lists_are_cut() -> None:
    with (
        published({f"w{i}": b"x" for i in range(20)}) as update,
        pytest.raises(InvalidError, match="w7 and 12 more too many"),
    ):
        update.load_into({})


def test_names_on_one_side_only_can_be_allowed() -> None:
    target = {"a": torch.zeros(2, 3), "c": torch.ones(1)}
    with published({"a": MATRIX, "b": MATRIX + 1}) as update:
        assert update.load_into(target, strict=False) == (["c"], ["b"])
    assert torch.equal(target["a"], MATRIX)
    assert float(target["c"]) == 1


def test_types_are_converted_only_when_asked_trap_33() -> None:
    target = {"w": torch.zeros(2, 3, dtype=torch.bfloat16)}
    arrays = {"w": np.zeros((2, 3), np.float64)}
    with published({"w": MATRIX}) as update:
        for places in (target, arrays):
            with pytest.raises(InvalidError, match="cast=True converts"):
                update.load_into(places)
            update.load_into(places, cast=True)
    assert torch.equal(target["w"], MATRIX.bfloat16())
    assert arrays["w"].tolist() == MATRIX.tolist()


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        (np.broadcast_to(np.float32(0), (2, 3)), "read-only"),
        (memoryview(bytearray(24)).cast("f", (2, 3)), "w is a memoryview, no tensor"),
        ("text", "w is a str, no tensor"),
        (torch.zeros(2, 3, device="meta"), "device meta"),
        (torch.zeros(1, 3).expand(2, 3), "expanded tensor"),
    ],
)
def test_what_cannot_be_written_is_refused_before(place: Any, sentence: str) -> None:
    good = torch.zeros(2, 3)
    with (
        published({"good": MATRIX, "w": MATRIX}) as update,
        pytest.raises(InvalidError, match=sentence),
    ):
        update.load_into({"good": good, "w": place})
    assert not good.any()


def test_what_is_no_target_is_refused() -> None:
    with (
        published({"w": MATRIX}) as update,
        pytest.raises(InvalidError, match="a int cannot be loaded into"),
    ):
        update.load_into(3)


def test_buffers_that_no_version_has_are_missing_trap_32() -> None:
    norm = torch.nn.BatchNorm1d(3)
    with published(dict(norm.named_parameters())) as update:
        with pytest.raises(InvalidError, match=r"it lacks running_mean"):
            update.load_into(norm)
        left = update.load_into(norm, strict=False)
    assert left.missing == ["running_mean", "running_var", "num_batches_tracked"]


def test_parameters_that_need_gradients_are_loaded_and_keep_them() -> None:
    target = model()
    target["head"].bias.grad = torch.ones(4)
    with published(model().state_dict()) as update:
        update.load_into(target)
    assert target["head"].bias.requires_grad
    assert target["head"].bias.grad.sum() == 4


def test_a_stale_version_is_raised_out_of_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(*_: object) -> int:
        raise StaleError("what was read of it may be torn")

    with published({"w": MATRIX}) as update:
        monkeypatch.setattr("refit.update.call", stale)
        with pytest.raises(StaleError, match="torn"), update:
            list(update.tensors())
        assert update.closed


def test_a_version_that_is_held_too_long_stays_whole_trap_12() -> None:
    options = {"broadcast_slots": 1, "broadcast_commit_timeout_ms": "50ms"}
    with both(**options) as (publisher, subscriber):
        trainer = threading.Thread(target=publish_in_vain, args=(publisher, {"w": MATRIX}))
        trainer.start()
        update = subscriber.next(PATIENCE)
        update["w"].numpy()
        trainer.join()  # it did not decide in time, and was evicted
        publisher.publish({"w": MATRIX + 1})
        assert update["w"].numpy().tolist() == MATRIX.tolist()  # the new one has other memory
        update.accept()
        update.close()
        with subscriber.next(PATIENCE) as again:
            assert again["w"].numpy().tolist() == (MATRIX + 1).tolist()


def test_models_made_in_inference_mode_are_loaded() -> None:
    source = model()
    with torch.inference_mode():
        target = model()
    with published(source.state_dict()) as update:
        update.load_into(target)
    assert equal(snapshot(source), snapshot(target))


def test_a_load_in_inference_mode_leaves_a_model_that_can_be_trained() -> None:
    source, target = model(), model()
    with published(source.state_dict()) as update, torch.inference_mode():
        update.load_into(target)
    target["head"](torch.ones(3)).sum().backward()
    assert target["head"].weight.grad is not None


def tied_engine() -> torch.nn.Module:
    """The embedding and the head are one memory."""
    made = torch.nn.ModuleDict(
        {"embed": torch.nn.Embedding(40, 3), "head": torch.nn.Linear(3, 40, bias=False)}
    )
    made["head"].weight = made["embed"].weight
    return made


def untied(difference: float) -> dict[str, torch.Tensor]:
    embed = torch.randn(40, 3)
    head = embed.clone()
    head[-1, -1] += difference
    return {"embed.weight": embed, "head.weight": head}


def test_one_memory_takes_two_tensors_of_equal_bytes() -> None:
    engine, weights = tied_engine(), untied(0)
    with published(weights) as update:
        assert update.load_into(engine) == ([], [])
    assert torch.equal(engine["head"].weight, weights["embed.weight"])


def test_one_memory_does_not_take_two_tensors_that_differ() -> None:
    engine = tied_engine()
    before = snapshot(engine)
    with published(untied(1.0)) as update:
        with pytest.raises(
            InvalidError,
            match=r"nothing was changed: embed\.weight and head\.weight have one memory here, but "
            r"differ in the version: untie them here.* or tie them at the trainer",
        ):
            update.load_into(engine)
        with pytest.raises(InvalidError, match="one memory here"):
            update.load_into(engine, strict=False)
        assert update._holds(None)
    assert equal(before, snapshot(engine))


def test_nan_is_compared_by_its_bits() -> None:
    weights = untied(0)
    for one in weights.values():
        one[0, 0] = torch.nan
    with published(weights) as update:
        update.load_into(tied_engine())


BASE = torch.zeros(4, 6)


@pytest.mark.parametrize(
    ("a", "b", "apart"),
    [
        (BASE[:2], BASE[2:], True),
        (BASE[:, :3], BASE[:, 3:], True),
        (BASE[:, ::2], BASE[:, 1::2], True),
        (BASE.numpy()[::-1, :3], BASE.numpy()[::-1, 3:], True),
        (BASE[:3], BASE[1:], False),
        (BASE[:, :4], BASE[:, 2:], False),
        (BASE, BASE.t(), False),
        (BASE[:, :3], BASE.numpy()[:, 2:5], False),
        (BASE.numpy()[::-1], BASE, False),
        (BASE, BASE.view(torch.int32), False),
    ],
)
def test_tensors_that_overlap_are_no_targets(a: Any, b: Any, apart: bool) -> None:
    BASE.zero_()
    weights = {
        "a": torch.full(a.shape, 1.0),
        "b": torch.full(b.shape, 2).to(b.dtype if isinstance(b, torch.Tensor) else torch.float32),
    }
    with published(weights) as update:
        if apart:
            update.load_into({"a": a, "b": b})
            assert a.sum() == weights["a"].sum()
            assert b.sum() == weights["b"].sum()
        else:
            with pytest.raises(InvalidError, match="the memory of a and b overlaps"):
                update.load_into({"a": a, "b": b})
            assert not BASE.any()
