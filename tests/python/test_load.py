"""Loading a version: into a module or a mapping, whole or not at all."""

from typing import Any

import numpy as np
import pytest
import torch
from broadcasting import Trainer, same
from refit.errors import InvalidError, StaleError, StateError, UnsupportedError

MATRIX = torch.arange(6.0).view(2, 3)


def model() -> torch.nn.Module:
    """The embedding and the head are one memory."""
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


def test_what_is_not_a_tensor_is_left_alone_or_named(trainer: Trainer) -> None:
    target = Stateful(3, 2)
    update = trainer.offer({"weight": MATRIX, "bias": torch.ones(2)})
    with pytest.raises(InvalidError, match=r"_extra_state is a dict, no tensor.*strict=False"):
        update.load_into(target)
    assert update.load_into(target, strict=False) == (["_extra_state"], [])
    places: dict[str, Any] = {"weight": target.weight.detach().zero_(), "bias": "text"}
    assert update.load_into(places, strict=False) == ([], ["bias"])
    assert torch.equal(target.weight, MATRIX)
    assert torch.equal(target.bias, torch.ones(2))
    assert places["bias"] == "text"


def test_a_module_is_loaded_in_place(trainer: Trainer) -> None:
    source, target = model(), model()
    target["head"].bias.grad = torch.ones(4)
    addresses = {name: tensor.data_ptr() for name, tensor in target.state_dict().items()}
    assert trainer.offer(source.state_dict()).load_into(target) == ([], [])
    assert same(snapshot(source), snapshot(target))
    assert addresses == {name: tensor.data_ptr() for name, tensor in target.state_dict().items()}
    assert target["head"].weight is target["embed"].weight
    assert target["head"].bias.requires_grad
    assert target["head"].bias.grad.sum() == 4


def test_a_tied_weight_is_there_under_one_of_its_names_trap_1(trainer: Trainer) -> None:
    source, target = model(), model()
    weights = source.state_dict()
    del weights["head.weight"]
    assert trainer.offer(weights).load_into(target).missing == []
    assert same(snapshot(source), snapshot(target))


def test_name_tied_to_loaded_name_is_not_unexpected(trainer: Trainer) -> None:
    """An engine need not know each name of a weight."""
    weights = {"lm_head": MATRIX, "embed": MATRIX, "norm": MATRIX[0], "other": MATRIX[0]}
    for known in ("embed", "lm_head"):
        target = {known: torch.zeros(2, 3), "norm": torch.zeros(3)}
        assert trainer.offer(weights).load_into(target) == ([], [])
        assert target[known].equal(MATRIX)


def test_mappings_of_tensors_and_arrays_are_loaded(trainer: Trainer, torch_device: str) -> None:
    tensors = {"w": torch.zeros(3, 2, device=torch_device).t()}
    arrays = {"w": np.zeros((2, 3), np.float32)}
    update = trainer.offer({"w": MATRIX})
    update.load_into(tensors)
    update.load_into(arrays)
    assert torch.equal(tensors["w"].cpu(), MATRIX)
    assert arrays["w"].tolist() == MATRIX.tolist()


def differs(weights: dict[str, torch.Tensor]) -> None:
    weights["head.weight"] = weights["embed.weight"] + torch.tensor([0, 0, 1.0])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda w: w.pop("head.bias"), r"it lacks head\.bias"),
        (lambda w: w.update(extra=MATRIX), "it has extra, which the target lacks"),
        (lambda w: w.update({"head.bias": torch.zeros(5)}), r"head\.bias is \[5\] and not \[4\]"),
        (
            lambda w: w.update({"head.bias": torch.zeros(4).half()}),
            r"head\.bias is F16 and not F32 \(cast=True converts\)",
        ),
        (
            differs,
            r"embed\.weight and head\.weight have one memory here, but differ in the version: "
            r"untie them here.* or tie them at the trainer",
        ),
    ],
    ids=["lacks", "extra", "shape", "type", "untied"],
)
def test_what_does_not_fit_changes_nothing_trap_33(
    trainer: Trainer, change: Any, sentence: str
) -> None:
    source, target = model(), model()
    before = snapshot(target)
    weights = dict(source.state_dict())
    with trainer.offer(weights):
        pass
    change(weights)
    update = trainer.offer(weights)
    with pytest.raises(InvalidError, match=f"nothing was changed: .*{sentence}"):
        update.load_into(target)
    assert same(before, snapshot(target))
    update.refuse()
    assert trainer.subscriber.describe().version == 1  # so that the worker holds what it had


def test_everything_that_does_not_fit_is_said_at_once(trainer: Trainer) -> None:
    update = trainer.offer({"a": MATRIX, "b": MATRIX + 1, **{f"w{i}": b"x" for i in range(20)}})
    with pytest.raises(InvalidError) as failed:
        update.load_into({"a": torch.zeros(3), "c": torch.zeros(1)})
    for part in (
        "a is [2, 3] and not [3]",
        "it lacks c",
        "it has b, w0",
        "and 13 more, which the target lacks",
    ):
        assert part in str(failed.value)
    with pytest.raises(InvalidError, match="a int cannot be loaded into"):
        update.load_into(3)


def test_names_on_one_side_only_can_be_allowed(trainer: Trainer) -> None:
    target = {"a": torch.zeros(2, 3), "c": torch.ones(1)}
    update = trainer.offer({"a": MATRIX, "b": MATRIX + 1})
    assert update.load_into(target, strict=False) == (["c"], ["b"])
    assert torch.equal(target["a"], MATRIX)
    assert float(target["c"]) == 1


@pytest.mark.parametrize(
    "place", [torch.zeros(2, 3, dtype=torch.bfloat16), np.zeros((2, 3), np.float64)]
)
def test_types_are_converted_only_when_asked_trap_33(trainer: Trainer, place: Any) -> None:
    update = trainer.offer({"w": MATRIX})
    with pytest.raises(InvalidError, match="cast=True converts"):
        update.load_into({"w": place})
    update.load_into({"w": place}, cast=True)
    assert place.tolist() == MATRIX.tolist()


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
def test_what_cannot_be_written_is_refused_before(
    trainer: Trainer, place: Any, sentence: str
) -> None:
    good = torch.zeros(2, 3)
    update = trainer.offer({"good": MATRIX, "w": MATRIX})
    with pytest.raises(InvalidError, match=sentence):
        update.load_into({"good": good, "w": place})
    assert not good.any()


def test_buffers_that_no_version_has_are_missing_trap_32(trainer: Trainer) -> None:
    norm = torch.nn.BatchNorm1d(3)
    update = trainer.offer(dict(norm.named_parameters()))
    with pytest.raises(InvalidError, match=r"it lacks running_mean"):
        update.load_into(norm)
    left = update.load_into(norm, strict=False)
    assert left.missing == ["running_mean", "running_var", "num_batches_tracked"]


def test_a_stale_version_is_raised_out_of_the_block(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(*_: object) -> int:
        raise StaleError("what was read of it may be torn")

    update = trainer.offer({"w": MATRIX})
    monkeypatch.setattr("refit.weights.update.call", stale)
    with pytest.raises(StaleError, match="torn"), update:
        list(update.tensors())
    assert update.closed


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("loaded", [False, True])
def test_models_may_be_made_or_loaded_in_inference_mode(
    trainer: Trainer, made: bool, loaded: bool
) -> None:
    source = model()
    with torch.inference_mode(made):
        target = model()
    update = trainer.offer(source.state_dict())
    with torch.inference_mode(loaded):
        update.load_into(target)
    assert same(snapshot(source), snapshot(target))
    if not made:
        target["head"](torch.ones(3)).sum().backward()
        assert target["head"].weight.grad is not None


def test_one_memory_takes_two_tensors_of_equal_bytes(trainer: Trainer) -> None:
    engine, weights = model(), snapshot(model())
    weights["embed.weight"][0, 0] = torch.nan  # compared by its bits
    weights["head.weight"] = weights["embed.weight"].clone()
    assert trainer.offer(weights).load_into(engine) == ([], [])
    assert torch.equal(engine["head"].weight[1:], weights["embed.weight"][1:])


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
def test_tensors_that_overlap_are_not_targets(
    trainer: Trainer, a: Any, b: Any, apart: bool
) -> None:
    BASE.zero_()
    weights = {
        "a": torch.full(a.shape, 1.0),
        "b": torch.full(b.shape, 2).to(b.dtype if isinstance(b, torch.Tensor) else torch.float32),
    }
    update = trainer.offer(weights)
    if apart:
        update.load_into({"a": a, "b": b})
        assert a.sum() == weights["a"].sum()
        assert b.sum() == weights["b"].sum()
    else:
        with pytest.raises(InvalidError, match="the memory of a and b overlaps"):
            update.load_into({"a": a, "b": b})
        assert not BASE.any()


class Copying(torch.nn.Sequential):
    """Its ``state_dict()`` gives what ``give`` makes of its tensors, under other names perhaps."""

    def __init__(self, give: Any = torch.clone, rename: Any = str) -> None:
        super().__init__(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))

        def copied(_module: Any, found: dict[str, Any], *_: Any) -> None:
            for name in list(found):
                found[rename(name)] = give(found.pop(name))

        self.register_state_dict_post_hook(copied)


@pytest.mark.parametrize("give", [torch.clone, lambda one: one.double() if one.dim() else one * 1])
def test_engine_itself_is_written_if_state_dict_gives_copies(trainer: Trainer, give: Any) -> None:
    source, engine = torch.nn.Sequential(*Copying()), Copying(give)
    assert trainer.offer(source.state_dict()).load_into(engine) == ([], [])
    assert all(map(torch.equal, source.parameters(), engine.parameters()))
    assert all(map(torch.equal, source.buffers(), engine.buffers()))


def test_copies_under_other_names_are_no_places(trainer: Trainer) -> None:
    refuse_copies(trainer, Copying(rename=lambda name: f"other.{name}"), "other.0.weight")


@pytest.mark.parametrize("give", [lambda one: one + 1, lambda one: one.clone().t_()])
def test_copies_of_other_values_are_no_places(trainer: Trainer, give: Any) -> None:
    """What is loaded would be read as it was not meant."""
    refuse_copies(trainer, Copying(give), "0.weight")


class Holder:
    """No module: all that is known of its tensors is what its ``state_dict()`` gives."""

    def __init__(self, give: Any) -> None:
        self.weight, self.bias, self._give = torch.zeros(3), np.zeros(2, np.float32), give

    def state_dict(self) -> dict[str, Any]:
        return {"w": self._give(self.weight), "b": self._give(self.bias), "steps": 3}


def test_copies_of_what_is_no_module_are_no_places(trainer: Trainer) -> None:
    update = trainer.offer({"w": torch.ones(3), "b": np.ones(2, np.float32)})
    engine = Holder(lambda one: one[:])
    assert update.load_into(engine, strict=False) == (["steps"], [])
    assert engine.weight.sum() == 3
    assert engine.bias.sum() == 2
    with pytest.raises(InvalidError, match=r"w is a copy that .* b is a copy that"):
        update.load_into(Holder(lambda one: one + 0))


def test_parameter_with_cut_memory_is_not_compared_with_copy(trainer: Trainer) -> None:
    engine = Copying(lambda one: torch.ones(one.shape))
    update = trainer.offer(engine.state_dict())
    engine[0].weight.untyped_storage().resize_(4)
    with pytest.raises(InvalidError, match=r"0\.weight: it has no memory now"):
        update.load_into(engine)


def refuse_copies(trainer: Trainer, engine: Any, name: str) -> None:
    before = [one.clone() for one in engine.parameters()]
    update = trainer.offer(engine.state_dict())
    with pytest.raises(InvalidError, match=rf"{name} is a copy that state_dict\(\) makes"):
        update.load_into(engine)
    assert name in update.load_into(engine, strict=False).unexpected
    assert all(map(torch.equal, before, engine.parameters()))


class Own(torch.nn.Linear):
    """Its ``state_dict()`` takes no keywords, and gives a tensor that is not a parameter."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.scale = torch.zeros(3)

    def state_dict(self) -> Any:  # type: ignore[override]
        return {"scale": self.scale, **super().state_dict()}


class Extra(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)
        self.scale = torch.zeros(3)

    def get_extra_state(self) -> Any:
        return self.scale

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("it is written where it is")


@pytest.mark.parametrize("kind", [Own, Extra])
def test_tensors_that_are_not_parameters_are_written_in_place(trainer: Trainer, kind: Any) -> None:
    engine = kind()
    weights = {name: torch.ones(one.shape) for name, one in engine.state_dict().items()}
    assert trainer.offer(weights).load_into(engine) == ([], [])
    assert all(bool(one.eq(1).all()) for one in (engine.weight, engine.bias, engine.scale))


def test_an_engine_in_fsdp1_is_refused_with_a_way_out(trainer: Trainer, tmp_path: Any) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp

    weights = {"weight": MATRIX, "bias": torch.ones(2)}
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        engine = Fsdp(torch.nn.Linear(3, 2), use_orig_params=True, device_id=torch.device("cpu"))
        update = trainer.offer(weights)
        with pytest.raises(UnsupportedError, match="summon_full_params"):
            update.load_into(engine)
        with Fsdp.summon_full_params(engine):
            update.load_into(dict(engine.module.named_parameters()))
        assert engine(torch.eye(3)).equal(MATRIX.t() + 1)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("inner", [torch.nn.Sequential, torch.compile, torch.nn.DataParallel])
@pytest.mark.parametrize("outer", [lambda one: one, torch.compile, torch.nn.DataParallel])
@pytest.mark.parametrize("bound", [False, True])
def test_engines_in_wrappers_have_plain_names(
    trainer: Trainer, inner: Any, outer: Any, bound: bool
) -> None:
    source = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(3, 2)))
    layer = torch.nn.Sequential(torch.nn.Linear(3, 2))
    engine = torch.nn.Sequential(layer if inner is torch.nn.Sequential else inner(layer))
    target = outer(engine)
    if bound:
        trainer.subscriber.bind(target)
    with trainer.offer(source.state_dict()) as update:
        assert (update.apply() if bound else update.load_into(target)) == ([], [])
    assert all(map(torch.equal, source.parameters(), engine.parameters()))


@pytest.mark.parametrize("bound", [False, True])
def test_buffers_of_no_checkpoint_are_written_if_they_come(trainer: Trainer, bound: bool) -> None:
    engine = torch.nn.Linear(3, 2)
    engine.register_buffer("frequencies", torch.zeros(4), persistent=False)
    weights = {"weight": MATRIX, "bias": torch.ones(2)}
    if bound:
        trainer.subscriber.bind(engine)
    for more in ({}, {"frequencies": torch.arange(4.0)}):
        with trainer.offer({**weights, **more}) as update:
            assert (update.apply() if bound else update.load_into(engine)) == ([], [])
    assert engine.frequencies.equal(torch.arange(4.0))


def replaced(engine: Any) -> None:
    engine.frequencies = torch.ones(7)


def on_meta(engine: Any) -> None:
    engine.frequencies = torch.ones(4, device="meta")


def freed(engine: Any) -> None:
    emptied(engine.frequencies)


def over_a_weight(engine: Any) -> None:
    engine.frequencies = engine.weight.detach()[0]


def transposed(engine: Any) -> None:
    engine.frequencies = torch.ones(2, 3).t()


@pytest.mark.parametrize("changed", [replaced, on_meta, freed, over_a_weight, transposed])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("bound", [False, True])
def test_non_persistent_buffers_may_be_anything_unless_sent(
    trainer: Trainer, changed: Any, before: bool, bound: bool
) -> None:
    engine = torch.nn.Linear(3, 2)
    engine.register_buffer("frequencies", torch.zeros(4), persistent=False)
    if before:
        changed(engine)
    if bound:
        trainer.subscriber.bind(engine)
    changed(engine)
    with trainer.offer({"weight": MATRIX, "bias": torch.ones(2)}) as update:
        assert (update.apply() if bound else update.load_into(engine)) == ([], [])
    assert engine.weight.equal(MATRIX)


def test_a_buffer_that_comes_and_has_moved_is_refused(trainer: Trainer) -> None:
    engine = torch.nn.Linear(3, 2)
    engine.register_buffer("frequencies", torch.zeros(4), persistent=False)
    trainer.subscriber.bind(engine)
    kept, engine.frequencies = engine.frequencies, torch.zeros(4)
    weights = {"weight": MATRIX, "bias": torch.ones(2), "frequencies": torch.ones(4)}
    with pytest.raises(StateError, match="frequencies is not where it was bound"):
        trainer.offer(weights).apply()
    assert not kept.any()


def emptied(tensor: Any, nbytes: int = 0) -> Any:
    tensor.untyped_storage().resize_(nbytes)
    return tensor


@pytest.mark.parametrize("nbytes", [0, 32])
@pytest.mark.parametrize(
    "make", [lambda: torch.zeros(9)[3:].view(2, 3), lambda: torch.zeros(3, 4)[:, 2:].t()]
)
def test_an_engine_that_sleeps_is_refused_by_name(trainer: Trainer, make: Any, nbytes: int) -> None:
    other, place = torch.zeros(2, 3), emptied(make(), nbytes)
    with pytest.raises(StateError, match="asleep: it has no memory now"):
        trainer.subscriber.bind({"other": other, "asleep": place})
    update = trainer.offer({"other": MATRIX, "asleep": MATRIX})
    with pytest.raises(InvalidError, match="asleep: it has no memory now"):
        update.load_into({"other": other, "asleep": place})
    assert not other.any()


@pytest.mark.parametrize(
    "give", [dict, lambda pairs: iter(pairs.items())], ids=["dict", "iterator"]
)
@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.t(), lambda x: x[1:]])
def test_weights_without_memory_are_not_published(trainer: Trainer, give: Any, view: Any) -> None:
    with pytest.raises(StateError, match="asleep: it has no memory now"):
        trainer.publisher.publish(give({"a": MATRIX, "asleep": emptied(view(torch.ones(9, 3)))}))
