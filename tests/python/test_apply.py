"""Versions written into the engine's own tensors: whole, or as if nothing had been done."""

import gc
import signal
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
import torch
from broadcasting import PATIENCE, both
from refit._library import lib
from refit.errors import InvalidError, PeerError, StateError
from refit.publisher import Publisher
from refit.subscriber import Subscriber
from refit.update import Update


def model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    made = torch.nn.ModuleDict(
        {"embed": torch.nn.Embedding(40, 30), "head": torch.nn.Linear(30, 40)}
    )
    made["head"].weight = made["embed"].weight
    return made.to(torch.bfloat16)


def snapshot(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


@contextmanager
def offered(publisher: Publisher, subscriber: Subscriber, weights: Any) -> Iterator[Update]:
    """A version in the worker's hands, undecided; the trainer waits for the decision meanwhile."""

    def publish() -> None:
        with suppress(PeerError):
            publisher.publish(weights)

    trainer = threading.Thread(target=publish)
    trainer.start()
    try:
        update = subscriber.next(PATIENCE)
        try:
            yield update
        finally:
            update.close()
    finally:
        trainer.join()


@pytest.mark.parametrize("shm", ["auto", "off"])
def test_an_applied_version_is_in_the_model(shm: str) -> None:
    engine = model(0)
    addresses = [one.data_ptr() for one in engine.parameters()]
    with both(broadcast_shm=shm) as (publisher, subscriber):
        subscriber.bind(engine)
        for seed in range(1, 4):
            weights = model(seed).state_dict()
            with offered(publisher, subscriber, weights) as update:
                assert update.apply() == ([], [])
                update.accept()
            assert equal(snapshot(engine), weights)
    assert [one.data_ptr() for one in engine.parameters()] == addresses


def apply_and_fail(update: Update) -> None:
    with update:
        update.apply()
        raise KeyError


def test_an_exception_in_the_block_puts_the_old_weights_back() -> None:
    engine = model(0)
    before = snapshot(engine)
    with both() as (publisher, subscriber):
        subscriber.bind(engine)
        with (
            offered(publisher, subscriber, model(1).state_dict()) as update,
            pytest.raises(KeyError),
        ):
            apply_and_fail(update)
        assert equal(snapshot(engine), before)
        figures = subscriber.stats()
        assert figures["receive_bound"] == len(before)
        assert figures["receive_rollbacks"] == 1
        assert figures["receive_applied_bytes_total"] > 0
        assert figures["receive_apply_seconds_last"] > 0
        with offered(publisher, subscriber, model(2).state_dict()) as update:
            update.apply()
            update.accept()
        assert equal(snapshot(engine), snapshot(model(2)))


@pytest.mark.parametrize("how", ["refuse", "close", "subscriber"])
def test_what_is_not_accepted_was_never_there(how: str) -> None:
    engine = model(0)
    before = snapshot(engine)
    with both() as (publisher, subscriber):
        subscriber.bind(engine)
        with offered(publisher, subscriber, model(1).state_dict()) as update:
            update.apply()
            {"refuse": update.refuse, "close": update.close, "subscriber": subscriber.close}[how]()
            assert equal(snapshot(engine), before)


def test_numpy_arrays_are_bound_as_well() -> None:
    arrays = {"a": np.zeros((300, 7), np.float32), "b": np.zeros(3, np.int64)}
    weights = {"a": np.random.default_rng(1).random((300, 7), np.float32), "b": np.arange(3)}
    with both() as (publisher, subscriber):
        subscriber.bind(arrays)
        with offered(publisher, subscriber, weights) as update:
            update.apply()
            update.accept()
        assert all((arrays[name] == weights[name]).all() for name in weights)


def test_names_on_one_side_are_refused_or_returned() -> None:
    engine = {"a": torch.zeros(3), "mine": torch.zeros(2)}
    with both() as (publisher, subscriber):
        subscriber.bind(engine)
        with offered(publisher, subscriber, {"a": torch.ones(3), "b": torch.ones(1)}) as update:
            with pytest.raises(InvalidError, match="it lacks mine"):
                update.apply()
            assert engine["a"].tolist() == [0, 0, 0]
            assert update.apply(strict=False) == (["mine"], ["b"])
            update.accept()
        assert engine["a"].tolist() == [1, 1, 1]
        assert engine["mine"].tolist() == [0, 0]


@pytest.mark.parametrize("wrong", [torch.zeros(4), torch.zeros(3, dtype=torch.int32)])
def test_shapes_and_types_are_those_of_the_version(wrong: torch.Tensor) -> None:
    with both() as (publisher, subscriber):
        subscriber.bind({"a": wrong})
        with (
            offered(publisher, subscriber, {"a": torch.ones(3)}) as update,
            pytest.raises(InvalidError, match="a is "),
        ):
            update.apply()
        assert not wrong.any()


def test_memory_that_is_read_only_is_not_written() -> None:
    frozen = np.zeros(3, np.float32)
    frozen.flags.writeable = False
    with both() as (publisher, subscriber):
        subscriber.bind({"a": frozen})
        with (
            offered(publisher, subscriber, {"a": torch.ones(3)}) as update,
            pytest.raises(InvalidError, match="read-only"),
        ):
            update.apply()
        assert not frozen.any()


def test_a_model_that_was_moved_is_bound_again() -> None:
    engine = model(0)
    with both() as (publisher, subscriber):
        subscriber.bind(engine)
        engine["head"].bias = torch.nn.Parameter(torch.zeros(40, dtype=torch.bfloat16))
        with offered(publisher, subscriber, model(1).state_dict()) as update:
            with pytest.raises(StateError, match=r"head.bias is not where it was bound"):
                update.apply()
            subscriber.unbind()
            subscriber.bind(engine)
            update.apply()
            update.accept()
        assert equal(snapshot(engine), snapshot(model(1)))


def test_bind_and_unbind_in_turn() -> None:
    engine = model(0)
    with both() as (publisher, subscriber):
        with offered(publisher, subscriber, model(1).state_dict()) as update:
            with pytest.raises(StateError, match="nothing is bound"):
                update.apply()
            subscriber.unbind()
            subscriber.bind(engine)
            with pytest.raises(StateError, match="call unbind first"):
                subscriber.bind(engine)
            update.apply()
            with pytest.raises(StateError, match="accept or refuse it first"):
                subscriber.unbind()
            update.accept()
            subscriber.unbind()
            with pytest.raises(StateError, match="accepted or refused"):
                update.apply()
        assert equal(snapshot(engine), snapshot(model(1)))


def test_ctrl_c_right_behind_bind_leaves_bound_what_c_has_trap_12(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = lib.refit_subscriber_bind

    def interrupted(*arguments: Any) -> int:
        status: int = real(*arguments)
        signal.raise_signal(signal.SIGINT)
        return status

    engine = {"a": torch.zeros(4)}
    alive = weakref.ref(engine["a"])
    with Subscriber("tcp://127.0.0.1:1") as subscriber:
        with monkeypatch.context() as patch:
            patch.setattr(lib, "refit_subscriber_bind", interrupted)
            with pytest.raises(KeyboardInterrupt):
                subscriber.bind(engine)
        del engine
        gc.collect()
        assert alive() is not None
        subscriber.unbind()
        gc.collect()
        assert alive() is None


def test_a_tensor_that_came_after_bind_is_not_passed_over() -> None:
    engine = {"a": torch.zeros(3)}
    with both() as (publisher, subscriber):
        subscriber.bind(engine)
        engine["b"] = torch.zeros(3)
        with offered(publisher, subscriber, {"a": torch.ones(3), "b": torch.ones(3)}) as update:
            with pytest.raises(StateError, match="b was no tensor yet when the model was bound"):
                update.apply()
            with pytest.raises(StateError, match="could not be applied"):
                update.accept()
            subscriber.unbind()
            subscriber.bind(engine)
            update.apply()
            update.accept()
        assert engine["b"].tolist() == [1, 1, 1]


def test_an_apply_that_failed_is_not_accepted_at_the_end_of_the_block() -> None:
    engine = {"a": torch.zeros(3)}
    with both() as (publisher, subscriber):
        subscriber.bind(engine)
        with (
            pytest.raises(StateError, match="could not be applied"),
            offered(publisher, subscriber, {"b": torch.ones(3)}) as update,
            update,
            suppress(InvalidError),
        ):
            update.apply()
        assert subscriber.describe().version == 0
        with offered(publisher, subscriber, {"a": torch.ones(3)}) as update, update:
            update.apply()
        assert engine["a"].tolist() == [1, 1, 1]


def test_what_was_loaded_by_hand_after_an_apply_that_failed_may_be_accepted() -> None:
    engine = {"a": torch.zeros(3, dtype=torch.float64)}
    with both() as (publisher, subscriber):
        subscriber.bind(engine)
        with offered(publisher, subscriber, {"a": torch.ones(3)}) as update:
            with pytest.raises(InvalidError, match="a is F32"):
                update.apply()
            subscriber.unbind()
            update.load_into(engine, cast=True)
            update.accept()
        assert engine["a"].tolist() == [1, 1, 1]


def test_what_cannot_be_bound_is_named() -> None:
    with both() as (_, subscriber):
        with pytest.raises(InvalidError, match=r"t has its elements in another order"):
            subscriber.bind({"t": torch.zeros(3, 2).t()})
        whole = torch.zeros(8)
        with pytest.raises(InvalidError, match="overlap"):
            subscriber.bind({"a": whole[:5], "b": whole[3:]})
        with pytest.raises(InvalidError, match="no tensor to bind"):
            subscriber.bind({})
        with pytest.raises(InvalidError, match="cannot be loaded into"):
            subscriber.bind(3)
        subscriber.bind({"a": torch.zeros(2)})


def test_what_is_bound_lives_until_it_is_unbound() -> None:
    engine = {"a": torch.zeros(1000)}
    there = weakref.ref(engine["a"])
    with both() as (_, subscriber):
        subscriber.bind(engine)
        del engine
        gc.collect()
        assert there() is not None
        subscriber.unbind()
        gc.collect()
        assert there() is None


def untied(seed: int, difference: float) -> dict[str, torch.Tensor]:
    """What ``model`` ties, as two tensors."""
    weights = snapshot(model(seed))
    weights["head.weight"] = weights["embed.weight"].clone()
    weights["head.weight"][-1, -1] += difference
    return weights


def test_one_memory_takes_two_tensors_while_their_bytes_are_equal() -> None:
    engine = model(0)
    with both() as (publisher, subscriber):
        subscriber.bind(engine)
        for seed in range(1, 3):
            with offered(publisher, subscriber, untied(seed, 0)) as update, update:
                assert update.apply() == ([], [])
            assert equal(snapshot(engine), snapshot(model(seed)))
        before = snapshot(engine)
        with offered(publisher, subscriber, untied(3, 1.0)) as update:
            with pytest.raises(InvalidError, match=r"have one memory here.*tie them at the train"):
                update.apply()
            assert update.version == 3
        assert equal(snapshot(engine), before)


HALVES = torch.arange(-32768, 32768).to(torch.int16)
FLOATS = torch.cat(
    [
        torch.randn(70_000) * 10.0 ** torch.randint(-12, 12, (70_000,)),
        HALVES.view(torch.float16).float(),
        HALVES.view(torch.bfloat16).float(),
        torch.tensor([65504.0, 65519.996, 65520.0, 2.0**-25, 2.0**-24 * 1.5, 3.4e38, -0.0]),
    ]
).nan_to_num(0.0, torch.inf, -torch.inf)
VALUES = {
    torch.float32: FLOATS,
    torch.float16: HALVES.view(torch.float16).nan_to_num(0.0, torch.inf, -torch.inf),
    torch.bfloat16: HALVES.view(torch.bfloat16).nan_to_num(0.0, torch.inf, -torch.inf),
}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


@pytest.mark.parametrize("to", VALUES)
@pytest.mark.parametrize("come", VALUES)
def test_bound_tensors_of_another_type_are_converted_as_pytorch_does(
    come: torch.dtype, to: torch.dtype
) -> None:
    weights = {"w": VALUES[come]}
    engine = {"w": torch.randn(weights["w"].shape).to(to)}
    before = engine["w"].clone()
    with both(broadcast_verify="always") as (publisher, subscriber):
        subscriber.bind(engine, cast=True)
        with (
            offered(publisher, subscriber, weights) as update,
            pytest.raises(KeyError),
        ):
            apply_and_fail(update)
        assert torch.equal(bits(engine["w"]), bits(before))
        with offered(publisher, subscriber, weights) as update, update:
            update.apply()
    assert torch.equal(bits(engine["w"]), bits(weights["w"].to(to)))


def test_what_bind_does_not_convert_is_refused() -> None:
    engine = {"w": torch.zeros(5)}
    for come in (torch.int64, torch.float64):
        with both() as (publisher, subscriber):
            subscriber.bind(engine, cast=True)
            with (
                offered(publisher, subscriber, {"w": torch.ones(5, dtype=come)}) as update,
                pytest.raises(InvalidError, match="only F32, F16 and BF16"),
            ):
                update.apply()
    assert not engine["w"].any()


def test_renamed_and_fused_weights_are_bound_as_a_mapping_of_slices() -> None:
    """q, k and v of an fp32 trainer become the rows of one matrix of a bf16 engine."""
    qkv, gate = torch.zeros(24, 6, dtype=torch.bfloat16), torch.zeros(7, 6, dtype=torch.bfloat16)
    trainer = {name: torch.randn(8, 6) for name in ("q.weight", "k.weight", "v.weight")}
    trainer["mlp.gate.weight"] = torch.randn(7, 6)
    parts = dict(zip(("q.weight", "k.weight", "v.weight"), qkv.split(8), strict=True))
    with both() as (publisher, subscriber):
        subscriber.bind({**parts, "mlp.gate.weight": gate}, cast=True)
        with offered(publisher, subscriber, trainer) as update, update:
            assert update.apply() == ([], [])
        whole = torch.cat([trainer[name] for name in parts]).bfloat16()
        assert torch.equal(qkv, whole)
        assert torch.equal(gate, trainer["mlp.gate.weight"].bfloat16())
        with (
            offered(publisher, subscriber, {name: one + 1 for name, one in trainer.items()}) as u,
            pytest.raises(KeyError),
        ):
            apply_and_fail(u)
        assert torch.equal(qkv, whole)
