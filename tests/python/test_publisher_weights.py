"""What a version is made of as it is published: an iterator, a generator, a model, in any parts."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from broadcasting import ONE, Pair
from interrupts import ctrl_c_after
from refit._c.library import lib
from refit.errors import CancelledError, InvalidError, NotFoundError, StateError
from refit.weights.manifest import Alias, TensorSpec
from refit.weights.named_weights import NamedWeights, named_weights
from refit.weights.publisher import Publisher
from refit.weights.writer import PublisherCalls


class Failing:
    """Weights that say what they are, and fail at one of them."""

    def __init__(self, count: int, at: int, why: BaseException) -> None:
        self.count, self.at, self.why = count, at, why

    def manifest(self) -> list[TensorSpec]:
        return [TensorSpec(f"w{i}", "F32", (4,)) for i in range(self.count)]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for i in range(self.count):
            if i == self.at:
                raise self.why
            yield f"w{i}", np.full(4, i, np.float32)


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("why", [ValueError("broken"), KeyboardInterrupt()])
def test_a_version_that_fails_midway_never_was_trap_12(
    pair: Pair, at: int, why: BaseException
) -> None:
    publisher, worker = pair
    publisher.publish(ONE)
    with pytest.raises(type(why)):
        publisher.publish(Failing(3, at, why))
    assert publisher.version == worker.subscriber.describe().version == 1
    assert publisher.publish(Failing(3, 3, why)) == 3  # the number of the one that failed is gone
    assert [list(seen) for seen in worker.seen] == [["w"], ["w0", "w1", "w2"]]


def test_an_iterator_that_fails_early_leaves_all_as_it_was(publisher: Publisher) -> None:
    def broken() -> Iterator[tuple[str, Any]]:
        yield "w", ONE["w"]
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        publisher.publish(broken())
    assert publisher.declared == ()
    assert publisher.publish(ONE) == 1


def test_a_version_that_lacks_a_tensor_is_dropped_trap_33(publisher: Publisher) -> None:
    class Short(Failing):
        def __iter__(self) -> Iterator[tuple[str, Any]]:
            yield "w0", np.zeros(4, np.float32)

    with pytest.raises(StateError):
        publisher.publish(Short(2, 9, ValueError()))
    assert publisher.version == 0
    assert publisher.publish(ONE) > 0


def test_self_describing_weights_need_not_be_held_together(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Counted(np.ndarray):
        alive = 0
        most = 0

        def __del__(self) -> None:
            Counted.alive -= 1

    class Gathered:
        def manifest(self) -> list[TensorSpec]:
            return [TensorSpec(f"w{i}", "U8", (100,)) for i in range(50)]

        def __iter__(self) -> Iterator[tuple[str, Any]]:
            for i in range(50):
                made = np.full(100, i, np.uint8).view(Counted)
                Counted.alive += 1
                Counted.most = max(Counted.most, Counted.alive)
                yield f"w{i}", made

    monkeypatch.setattr("refit.weights.writer.HELD_BYTES", 300)
    pair.publisher.publish(Gathered())
    assert pair.worker.seen == [{f"w{i}": bytes([i]) * 100 for i in range(50)}]
    assert Counted.most <= 6


def reusing(sizes: list[int], start: int = 0) -> Iterator[tuple[str, Any]]:
    """One buffer for all: the next tensor is made in the memory of the one before."""
    bucket = torch.empty(max(sizes), dtype=torch.uint8)
    for index, size in enumerate(sizes):
        yield f"w{index}", bucket[:size].fill_(start + index)
    bucket.fill_(255)  # also the last one counts only until it is asked for the next


def whole(sizes: list[int], start: int = 0) -> dict[str, bytes]:
    return {f"w{index}": bytes([start + index]) * size for index, size in enumerate(sizes)}


@pytest.mark.parametrize("sizes", [[4, 4, 4], [4, 1 << 21, 64]])
def test_a_generator_may_reuse_one_buffer_for_all_trap_31(pair: Pair, sizes: list[int]) -> None:
    pair.publisher.publish(reusing(sizes))
    assert [one.alias_of for one in pair.publisher.declared] == [None] * 3
    pair.publisher.publish(reusing(sizes, 10))  # as it comes: all was declared
    assert pair.worker.seen == [whole(sizes), whole(sizes, 10)]


def test_a_list_and_the_items_of_a_mapping_are_there_together(publisher: Publisher) -> None:
    given = {"a": ONE["w"], "b": ONE["w"]}
    for weights in (given.items(), list(given.items()), tuple(given.items())):
        publisher.declare([TensorSpec("other", "U8", (1,))])
        publisher.publish(weights)
        assert [one.alias_of for one in publisher.declared] == [None, "a"]
    publisher.declare(reusing([4, 4]))  # an iterator ties nothing
    assert [one.alias_of for one in publisher.declared] == [None, None]


def test_tied_model_weights_arrive_through_generator_trap_1(pair: Pair) -> None:
    publisher, worker = pair
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(4, 3), "head": torch.nn.Linear(3, 4)})
    model["head"].weight = model["embed"].weight
    names = ["embed.weight", "head.weight", "head.bias"]
    publisher.publish(model.named_parameters(remove_duplicate=False))
    publisher.declare(model.state_dict(keep_vars=True))
    assert publisher.declared[1].alias_of == "embed.weight"
    publisher.publish(model.named_parameters(remove_duplicate=False))
    expected = {name: model.state_dict()[name].numpy().tobytes() for name in names}
    assert worker.seen == [expected] * 2


def test_a_tie_that_an_iterator_does_not_keep_is_refused_trap_1(
    pair: Pair, torch_device: str
) -> None:
    publisher, worker = pair
    same = torch.zeros(4, device=torch_device)
    other = torch.ones(4, device=torch_device)
    publisher.publish({"a": same, "b": same})
    for pairs in ([("a", same), ("b", other)], [("b", other), ("a", same)]):
        with pytest.raises(InvalidError, match="were declared as tied"):
            publisher.publish(iter(pairs))
    publisher.publish(iter([("a", other), ("b", Alias("a"))]))
    publisher.publish({"a": same, "b": other})
    assert [seen["a"] == seen["b"] for seen in worker.seen] == [True, True, False]


def test_iterator_gives_declared_weights_or_is_refused_trap_33(pair: Pair) -> None:
    publisher, worker = pair
    publisher.publish(iter(ONE.items()))
    with pytest.raises(NotFoundError, match="'v' was not declared"):
        publisher.publish(iter({**ONE, "v": ONE["w"]}.items()))
    with pytest.raises(InvalidError, match="declare the tensors again"):
        publisher.publish(iter([("w", np.zeros(9))]))
    publisher.publish(iter(ONE.items()))
    assert len(worker.seen) == 2


def test_copies_of_scattered_tensors_are_bounded_trap_30(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, torch_device: str
) -> None:
    monkeypatch.setattr("refit.weights.writer.HELD_BYTES", 64)  # a larger one travels alone
    scattered = {
        f"w{i}": torch.arange(8 * (i + 1.0), device=torch_device).view(-1, 4).t() for i in range(12)
    }
    pair.publisher.publish(scattered)
    expected = {name: tensor.cpu().contiguous().numpy() for name, tensor in scattered.items()}
    assert pair.worker.seen == [{name: array.tobytes() for name, array in expected.items()}]


def test_model_casts_are_held_until_written_trap_31(pair: Pair) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
    pair.publisher.publish(named_weights(model, dtype=torch.bfloat16))
    expected = {name: one.detach().bfloat16() for name, one in model.named_parameters()}
    assert pair.worker.seen == [
        {name: one.view(torch.uint8).numpy().tobytes() for name, one in expected.items()}
    ]


def test_many_bytes_are_written_part_by_part(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("refit.weights.writer.PART_BYTES", 100)
    weights = {f"w{i}": os.urandom(size) for i, size in enumerate([10, 300, 0, 60, 40, 1, 99])}
    pair.publisher.publish(weights)
    assert pair.worker.seen == [weights]


def test_ctrl_c_is_heard_between_two_parts(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    real = lib.refit_publisher_write_all
    stop: list[Callable[[], object]] = []
    written: list[int] = []

    def write_all(*arguments: Any) -> int:
        written.append(arguments[2])
        stop[-1]()  # as it is called when Ctrl-C comes
        return int(real(*arguments))

    def run(_: Any, function: Callable[[], Any], cancel: Callable[[], object]) -> Any:
        stop.append(cancel)
        return function()

    with monkeypatch.context() as patch:
        patch.setattr("refit.weights.writer.PART_BYTES", 100)
        patch.setattr(PublisherCalls, "run", run)
        patch.setattr(lib, "refit_publisher_write_all", write_all)
        with pytest.raises(CancelledError, match="interrupted"):
            pair.publisher.publish({f"w{i}": bytes([i]) * 100 for i in range(10)})
    assert written == [1]
    assert pair.publisher.version == 0
    assert pair.publisher.publish(ONE) == 2
    assert len(pair.worker.seen) == 1


@pytest.mark.parametrize("step", ["begin", "write_all", "commit"])
def test_ctrl_c_right_after_a_step_leaves_nothing_open(pair: Pair, step: str) -> None:
    publisher, worker = pair
    with ctrl_c_after(f"refit_publisher_{step}"):
        publisher.publish(ONE)
    assert publisher.version == (step == "commit")
    publisher.begin()
    publisher.abort()
    assert publisher.publish(ONE) == 3
    assert worker.subscriber.describe().version == 3


def test_ctrl_c_after_declaration_mixes_up_nothing_trap_33(pair: Pair) -> None:
    weights = {"a": bytes(4), "b": bytes([1] * 4)}
    pair.publisher.publish(weights)
    with ctrl_c_after("refit_publisher_declare"):
        pair.publisher.declare(dict(reversed(weights.items())))
    pair.publisher.publish(weights)
    assert pair.worker.seen == [weights] * 2


class TwoLayers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(3, 3)
        self.b = torch.nn.Linear(3, 3, bias=False)
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("cache", torch.ones(2), persistent=False)


def nothing(model: TwoLayers) -> None:
    """Only values change."""


def other_memory(model: TwoLayers) -> None:
    model.b.weight.data = model.b.weight.data.clone()


def other_parameter(model: TwoLayers) -> None:
    model.a.bias = torch.nn.Parameter(torch.full((3,), 2.0))


def other_type(model: TwoLayers) -> None:
    model.b.to(torch.bfloat16)


def tied(model: TwoLayers) -> None:
    model.b.weight = model.a.weight


def one_layer_more(model: TwoLayers) -> None:
    model.c = torch.nn.Linear(1, 1)


def wrapped(model: TwoLayers) -> None:
    model.b = torch.nn.Sequential(model.b)


def scattered(model: TwoLayers) -> None:
    model.b.weight.data = model.b.weight.data.t()


def other_buffer(model: TwoLayers) -> None:
    model.scale = torch.full((2,), 5.0)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {}),
        ({}, {"dtype": torch.bfloat16}),
        ({"dtype": torch.bfloat16}, {}),
        ({}, {"buffers": "all"}),
        ({}, {"buffers": "none"}),
        ({}, {"names": ["a.weight"]}),
        ({"names": ["a.weight"]}, {"names": ("a.bias", "a.weight")}),
        ({}, {"names": []}),
        ({}, {"names": str.upper}),
        ({"dtype": torch.bfloat16}, {"dtype": torch.bfloat16, "keep": ["a.*"]}),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "change",
    [
        nothing,
        other_memory,
        other_parameter,
        other_type,
        tied,
        one_layer_more,
        wrapped,
        scattered,
        other_buffer,
    ],
)
def test_a_model_that_changed_is_looked_at_again(
    pair: Pair, change: Callable[[TwoLayers], None], before: Any, after: Any
) -> None:
    model = TwoLayers()
    for options in (before, before, after, after, before):
        if options is after:
            change(model)
        with torch.no_grad():
            model.a.weight.add_(1)
        given = dict(named_weights(model, **options))
        if not given:
            continue
        pair.publisher.publish(named_weights(model, **options))
        assert list(pair.worker.seen[-1]) == list(given)
        for name, tensor in given.items():
            expected = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            assert pair.worker.seen[-1][name] == expected, name


def test_a_model_that_stays_is_walked_through_once(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, walks = TwoLayers(), []
    walk = NamedWeights._walk
    monkeypatch.setattr(NamedWeights, "_walk", lambda it: walks.append(1) or walk(it))
    for _ in range(3):
        pair.publisher.publish(named_weights(model))
    assert len(walks) == 1
    pair.publisher.publish(named_weights(torch.nn.Sequential(model)))
    assert len(walks) == 2


def test_memory_that_is_published_stays_until_the_end(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parameter gets other memory in the middle, as by a signal handler."""
    model = TwoLayers()
    for _ in range(2):
        pair.publisher.publish(named_weights(model))
    before = model.b.weight.detach().clone()
    real = lib.refit_publisher_write_all
    gone: list[bool] = []

    def write_all(*arguments: Any) -> int:
        address = model.b.weight.data_ptr()
        model.b.weight.data = torch.zeros(3, 3)
        taken = [torch.full((3, 3), 7.0) for _ in range(50)]  # what was freed is taken again
        gone.append(any(one.data_ptr() == address for one in taken))
        return int(real(*arguments))

    monkeypatch.setattr(lib, "refit_publisher_write_all", write_all)
    pair.publisher.publish(named_weights(model))
    assert gone == [False]
    assert pair.worker.seen[-1]["b.weight"] == before.numpy().tobytes()


def test_a_buffer_that_is_not_saved_any_more_is_noticed(pair: Pair) -> None:
    model = TwoLayers()
    for persistent in (True, False, True):
        model.register_buffer("scale", model.scale, persistent=persistent)
        pair.publisher.publish(named_weights(model))
        assert ("scale" in pair.worker.seen[-1]) is persistent
    bias = model.a.bias.detach()
    pair.publisher.publish(named_weights(model, buffers="none"))
    del model.a._parameters["bias"]
    model.a.register_buffer("bias", bias)
    pair.publisher.publish(named_weights(model, buffers="none"))
    assert "a.bias" not in pair.worker.seen[-1]


class Inspectable(torch.nn.Module):
    """Has methods of names that weights may have, and its own way to name parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.fingerprint = torch.nn.Linear(2, 2)

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Any:
        return super().named_parameters(prefix, recurse)


def test_names_of_a_model_do_not_matter(pair: Pair) -> None:
    model = Inspectable()
    with pytest.raises(InvalidError, match=r"give refit\.named_weights"):
        pair.publisher.publish(model)  # type: ignore[arg-type]
    names = np.array(["fingerprint.bias"])
    for _ in range(2):
        pair.publisher.publish(named_weights(model))
        pair.publisher.publish(named_weights(model, names=names))  # type: ignore[arg-type]
        assert list(pair.worker.seen[-1]) == ["fingerprint.bias"]
