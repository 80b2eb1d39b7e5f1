"""Versions written into the engine's own tensors: whole, or as if nothing had been done."""

import gc
import weakref
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import pytest
import torch
from broadcasting import Trainer, same
from interrupts import ctrl_c_after
from refit.errors import InvalidError, StateError
from refit.weights import load
from refit.weights.update import Update


def model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    made = torch.nn.ModuleDict(
        {"embed": torch.nn.Embedding(40, 30), "head": torch.nn.Linear(30, 40)}
    )
    made["head"].weight = made["embed"].weight
    return made.to(torch.bfloat16)


def snapshot(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def hold(update: Update) -> None:
    """The engine has this version, loaded in another way: there is one to go back to."""
    with update:
        pass


def apply_and_fail(update: Update) -> None:
    with update:
        update.apply()
        raise KeyError


@pytest.mark.parametrize("options", [{"broadcast_shm": "auto"}, {"broadcast_shm": "off"}])
def test_an_applied_version_is_in_the_model(trainer: Trainer) -> None:
    engine = model(0)
    addresses = [one.data_ptr() for one in engine.parameters()]
    trainer.subscriber.bind(engine)
    for seed in range(1, 4):
        weights = model(seed).state_dict()
        with trainer.offer(weights) as update:
            assert update.apply() == ([], [])
        assert same(snapshot(engine), weights)
    assert [one.data_ptr() for one in engine.parameters()] == addresses


def test_an_exception_in_the_block_puts_the_old_weights_back(trainer: Trainer) -> None:
    engine = model(0)
    before = snapshot(engine)
    trainer.subscriber.bind(engine)
    hold(trainer.offer(engine.state_dict()))
    with pytest.raises(KeyError):
        apply_and_fail(trainer.offer(model(1).state_dict()))
    assert same(snapshot(engine), before)
    figures = trainer.subscriber.stats()
    assert figures["receive_bound"] == len(before)
    assert figures["receive_rollbacks"] == 1
    assert figures["receive_applied_bytes_total"] > 0
    assert figures["receive_apply_seconds_last"] > 0
    with trainer.offer(model(2).state_dict()) as update:
        update.apply()
    assert same(snapshot(engine), snapshot(model(2)))


def test_before_the_first_version_there_is_nothing_to_go_back_to(trainer: Trainer) -> None:
    engine = model(0)
    trainer.subscriber.bind(engine)
    with pytest.raises(KeyError):
        apply_and_fail(trainer.offer(model(1).state_dict()))
    assert same(snapshot(engine), snapshot(model(1)))
    assert trainer.subscriber.stats()["receive_rollbacks"] == 0
    update = trainer.offer(model(2).state_dict())
    with pytest.raises(StateError, match="hold no version whole"):
        update.accept()
    with update:
        update.apply()
    assert same(snapshot(engine), snapshot(model(2)))


@pytest.mark.parametrize("how", ["refuse", "close", "subscriber"])
def test_what_is_not_accepted_was_never_there(trainer: Trainer, how: str) -> None:
    engine = model(0)
    before = snapshot(engine)
    trainer.subscriber.bind(engine)
    hold(trainer.offer(engine.state_dict()))
    update = trainer.offer(model(1).state_dict())
    update.apply()
    {"refuse": update.refuse, "close": update.close, "subscriber": trainer.subscriber.close}[how]()
    assert same(snapshot(engine), before)


def test_numpy_arrays_are_bound_as_well(trainer: Trainer) -> None:
    arrays = {"a": np.zeros((300, 7), np.float32), "b": np.zeros(3, np.int64)}
    weights = {"a": np.random.default_rng(1).random((300, 7), np.float32), "b": np.arange(3)}
    trainer.subscriber.bind(arrays)
    with trainer.offer(weights) as update:
        update.apply()
    assert all((arrays[name] == weights[name]).all() for name in weights)


def test_names_on_one_side_are_refused_or_returned(trainer: Trainer) -> None:
    engine = {"a": torch.zeros(3), "mine": torch.zeros(2)}
    trainer.subscriber.bind(engine)
    with trainer.offer({"a": torch.ones(3), "b": torch.ones(1)}) as update:
        with pytest.raises(InvalidError, match="it lacks mine"):
            update.apply()
        assert engine["a"].tolist() == [0, 0, 0]
        assert update.apply(strict=False) == (["mine"], ["b"])
    assert engine["a"].tolist() == [1, 1, 1]
    assert engine["mine"].tolist() == [0, 0]


def read_only() -> Any:
    made = np.zeros(3, np.float32)
    made.flags.writeable = False
    return made


@pytest.mark.parametrize(
    ("place", "come", "cast", "sentence"),
    [
        (torch.zeros(4), torch.float32, False, r"a is \[3\] and not \[4\]"),
        (torch.zeros(3, dtype=torch.int32), torch.float32, False, "a is F32 and not I32"),
        (read_only(), torch.float32, False, "read-only"),
        (torch.zeros(3), torch.int64, True, "only F32, F16 and BF16"),
        (torch.zeros(3), torch.float64, True, "only F32, F16 and BF16"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_written(
    trainer: Trainer, place: Any, come: torch.dtype, cast: bool, sentence: str
) -> None:
    trainer.subscriber.bind({"a": place}, cast=cast)
    update = trainer.offer({"a": torch.ones(3, dtype=come)})
    with pytest.raises(InvalidError, match=sentence):
        update.apply()
    assert not place.any()


def test_a_model_that_was_moved_is_bound_again(trainer: Trainer) -> None:
    engine = model(0)
    trainer.subscriber.bind(engine)
    engine["head"].bias = torch.nn.Parameter(torch.zeros(40, dtype=torch.bfloat16))
    with trainer.offer(model(1).state_dict()) as update:
        with pytest.raises(StateError, match=r"head.bias is not where it was bound"):
            update.apply()
        trainer.subscriber.unbind()
        trainer.subscriber.bind(engine)
        update.apply()
    assert same(snapshot(engine), snapshot(model(1)))


def test_a_tensor_that_came_after_bind_is_not_passed_over(trainer: Trainer) -> None:
    engine = {"a": torch.zeros(3)}
    trainer.subscriber.bind(engine)
    engine["b"] = torch.zeros(3)
    with trainer.offer({"a": torch.ones(3), "b": torch.ones(3)}) as update:
        with pytest.raises(StateError, match="b was not a tensor yet when the model was bound"):
            update.apply()
        with pytest.raises(StateError, match="could not be applied"):
            update.accept()
        trainer.subscriber.unbind()
        trainer.subscriber.bind(engine)
        update.apply()
    assert engine["b"].tolist() == [1, 1, 1]


def test_bind_and_unbind_in_turn(trainer: Trainer) -> None:
    engine = model(0)
    update = trainer.offer(model(1).state_dict())
    with pytest.raises(StateError, match="nothing is bound"):
        update.apply()
    trainer.subscriber.unbind()
    trainer.subscriber.bind(engine)
    with pytest.raises(StateError, match="call unbind first"):
        trainer.subscriber.bind(engine)
    update.apply()
    with pytest.raises(StateError, match="accept or refuse it first"):
        trainer.subscriber.unbind()
    update.accept()
    trainer.subscriber.unbind()
    with pytest.raises(StateError, match="accepted or refused"):
        update.apply()
    assert same(snapshot(engine), snapshot(model(1)))


@pytest.mark.parametrize("interrupted", [False, True])
def test_what_is_bound_lives_until_it_is_unbound_trap_12(
    trainer: Trainer, interrupted: bool
) -> None:
    engine = {"a": torch.zeros(4)}
    alive = weakref.ref(engine["a"])
    with ctrl_c_after("refit_subscriber_bind") if interrupted else nullcontext():
        trainer.subscriber.bind(engine)
    del engine
    gc.collect()
    assert alive() is not None
    trainer.subscriber.unbind()
    assert alive() is None


def test_failed_apply_is_not_accepted_at_end_of_block(trainer: Trainer) -> None:
    engine = {"a": torch.zeros(3)}
    trainer.subscriber.bind(engine)
    with (
        pytest.raises(StateError, match="could not be applied"),
        trainer.offer({"b": torch.ones(3)}) as update,
        suppress(InvalidError),
    ):
        update.apply()
    assert trainer.subscriber.describe().version == 0
    with trainer.offer({"a": torch.ones(3)}) as update:
        update.apply()
    assert engine["a"].tolist() == [1, 1, 1]


def test_what_was_loaded_after_a_failed_apply_may_be_accepted(trainer: Trainer) -> None:
    engine = {"a": torch.zeros(3, dtype=torch.float64)}
    trainer.subscriber.bind(engine)
    with trainer.offer({"a": torch.ones(3)}) as update:
        with pytest.raises(InvalidError, match="a is F32"):
            update.apply()
        trainer.subscriber.unbind()
        update.load_into(engine, cast=True)
    assert engine["a"].tolist() == [1, 1, 1]


WHOLE = torch.zeros(8)


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ({"t": torch.zeros(3, 2).t()}, "t has its elements in another order"),
        ({"a": WHOLE[:5], "b": WHOLE[3:]}, "overlap"),
        ({}, "no tensor to bind"),
        (3, "cannot be loaded into"),
    ],
)
def test_what_cannot_be_bound_is_named(trainer: Trainer, target: Any, sentence: str) -> None:
    with pytest.raises(InvalidError, match=sentence):
        trainer.subscriber.bind(target)
    trainer.subscriber.bind({"a": torch.zeros(2)})


def untied(seed: int, difference: float) -> dict[str, torch.Tensor]:
    """What ``model`` ties, as two tensors."""
    weights = snapshot(model(seed))
    weights["head.weight"] = weights["embed.weight"].clone()
    weights["head.weight"][-1, -1] += difference
    return weights


def test_one_memory_takes_two_tensors_only_if_bytes_are_equal(trainer: Trainer) -> None:
    engine = model(0)
    trainer.subscriber.bind(engine)
    with trainer.offer(untied(1, 0)) as update:
        assert update.apply() == ([], [])
    assert same(snapshot(engine), snapshot(model(1)))
    update = trainer.offer(untied(2, 1.0))
    with pytest.raises(InvalidError, match=r"have one memory here.*tie them at the train"):
        update.apply()
    assert same(snapshot(engine), snapshot(model(1)))


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


@pytest.mark.parametrize("options", [{"broadcast_verify": "always"}])
@pytest.mark.parametrize("to", VALUES)
@pytest.mark.parametrize("come", VALUES)
def test_bound_tensors_of_other_type_are_converted_like_pytorch(
    trainer: Trainer, come: torch.dtype, to: torch.dtype
) -> None:
    weights = {"w": VALUES[come]}
    engine = {"w": torch.randn(weights["w"].shape).to(to)}
    before = engine["w"].clone()
    trainer.subscriber.bind(engine, cast=True)
    hold(trainer.offer(weights))
    with pytest.raises(KeyError):
        apply_and_fail(trainer.offer(weights))
    assert torch.equal(bits(engine["w"]), bits(before))
    with trainer.offer(weights) as update:
        update.apply()
    assert torch.equal(bits(engine["w"]), bits(weights["w"].to(to)))


def test_renamed_and_fused_weights_bind_as_mapping_of_slices(trainer: Trainer) -> None:
    """q, k and v of an fp32 trainer become the rows of one matrix of a bf16 engine."""
    qkv, gate = torch.zeros(24, 6, dtype=torch.bfloat16), torch.zeros(7, 6, dtype=torch.bfloat16)
    weights = {name: torch.randn(8, 6) for name in ("q.weight", "k.weight", "v.weight")}
    weights["mlp.gate.weight"] = torch.randn(7, 6)
    parts = dict(zip(weights, qkv.split(8), strict=False))
    trainer.subscriber.bind({**parts, "mlp.gate.weight": gate}, cast=True)
    with trainer.offer(weights) as update:
        assert update.apply() == ([], [])
    whole = torch.cat([weights[name] for name in parts]).bfloat16()
    assert torch.equal(qkv, whole)
    assert torch.equal(gate, weights["mlp.gate.weight"].bfloat16())
    with pytest.raises(KeyError):
        apply_and_fail(trainer.offer({name: one + 1 for name, one in weights.items()}))
    assert torch.equal(qkv, whole)


# ---- What is found out of one version holds for the next, while nothing has changed.


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many names were compared, each time."""
    compared: list[int] = []
    whole = load.check

    def check(views: Any, target: Any, **options: Any) -> Any:
        compared.append(len(views))
        return whole(views, target, **options)

    monkeypatch.setattr(load, "check", check)
    return compared


def test_a_bound_model_with_ties_is_compared_once(trainer: Trainer, checks: list[int]) -> None:
    engine = model(0)
    trainer.subscriber.bind(engine)
    for seed in range(1, 5):
        with trainer.offer(model(seed).state_dict()) as update:
            update.apply()
        assert same(snapshot(engine), snapshot(model(seed)))
    assert len(checks) == 1


def test_what_was_left_out_is_the_callers(trainer: Trainer, checks: list[int]) -> None:
    engine = model(0)
    trainer.subscriber.bind(engine)
    weights = model(1).state_dict()
    del weights["head.bias"]
    for _ in range(3):
        with trainer.offer(weights) as update:
            left_out = update.apply(strict=False)
            assert left_out == (["head.bias"], [])
            left_out.missing.clear()
            left_out.unexpected.append("mine")
    assert len(checks) == 1


class Divided(torch.nn.Module):
    """Shows its one weight in two parts, cut anew each time that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.cut = torch.nn.Parameter(torch.zeros(6)), 2

    def state_dict(self, *_: Any, **__: Any) -> Any:
        return {"a": self.both.data[: self.cut], "b": self.both.data[self.cut :]}


def test_a_model_that_shows_itself_otherwise_is_compared_again(trainer: Trainer) -> None:
    engine = Divided()
    trainer.subscriber.bind(engine)
    weights = {"a": torch.ones(2), "b": torch.full((4,), 2.0)}
    for _ in range(2):
        with trainer.offer(weights) as update:
            update.apply(strict=False)
    engine.cut = 3
    with (
        pytest.raises(StateError, match="is not where it was bound"),
        trainer.offer(weights) as update,
    ):
        update.apply(strict=False)


ARRAY = np.zeros(3, np.float32)


class WithArray(torch.nn.Linear):
    def get_extra_state(self) -> Any:
        return ARRAY

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("it is written where it is")


def test_a_state_that_is_an_array_is_not_in_the_way(trainer: Trainer) -> None:
    engine = WithArray(3, 2)
    trainer.subscriber.bind(engine)
    weights = {**torch.nn.Linear(3, 2).state_dict(), "_extra_state": np.ones(3, np.float32)}
    for _ in range(2):
        with trainer.offer(weights) as update:
            update.apply(strict=False)
        assert torch.equal(engine.weight, weights["weight"])
    assert ARRAY.tolist() == [1, 1, 1]


class Buffered(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(2))
        self.register_buffer("b", torch.zeros(2), persistent=False)


def test_a_buffer_that_a_version_must_bring_now_is_missed(trainer: Trainer) -> None:
    engine = Buffered()
    trainer.subscriber.bind(engine)
    for _ in range(2):
        with trainer.offer({"w": torch.ones(2)}) as update:
            update.apply()
    engine.register_buffer("b", engine.b, persistent=True)
    with (
        pytest.raises(InvalidError, match="it lacks b"),
        trainer.offer({"w": torch.ones(2)}) as update,
    ):
        update.apply()


class OwnParameter(torch.nn.Parameter):
    """As engines have them, with loaders of their own."""

    def load(self) -> None: ...


def test_an_engines_own_class_of_parameter_is_compared_once(
    trainer: Trainer, checks: list[int]
) -> None:
    engine = torch.nn.Linear(3, 2)
    engine.weight = OwnParameter(engine.weight.detach())
    trainer.subscriber.bind(engine)
    for value in range(3):
        weights = {"weight": torch.full((2, 3), float(value)), "bias": torch.ones(2)}
        with trainer.offer(weights) as update:
            update.apply()
        assert torch.equal(engine.weight.data, weights["weight"])
    assert len(checks) == 1
