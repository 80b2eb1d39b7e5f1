"""What autograd allows besides one backward pass for each forward pass: graphs that are kept, gone
through in parts, differentiated again, read, changed in place, or dropped; hooks of others, and
threads. Each is done with and without refit, and gives the same bits or the same error."""

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import refit
import torch
import torch.nn.functional as F
import training
from activation_scenes import (
    ROWS,
    STACKS,
    WIDTH,
    Attention,
    Relu,
    Run,
    figures,
    offloaded,
    quiet,
    same_bits,
)
from refit.errors import InvalidError, RefitError, StateError
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("default_device")

Block = Callable[[], Any]
Action = Callable[["Net", Block], list[torch.Tensor]]


class Net(nn.Module):
    """Layers one behind the other; smooth, so that second derivatives are not zero."""

    def __init__(self, layers: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.SiLU())
            for _ in range(layers)
        )
        self.seen: Callable[[int, torch.Tensor], torch.Tensor] = lambda _, x: x
        """Sees what each layer gives, and says what the next one takes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = self.seen(number, layer(x))
        return x

    def gradients(self) -> list[torch.Tensor]:
        return [one.grad.clone() for one in self.parameters() if one.grad is not None]


def net() -> Net:
    torch.manual_seed(5)
    return Net().to(training.DEVICE)


def batch(number: int = 0) -> torch.Tensor:
    return training.drawn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))


def moved(action: Action, steps: int = 2, **options: Any) -> list[list[torch.Tensor]]:
    """What an action gives with refit, several times over."""
    model = net()
    made = []
    with offloaded(_OfNet(model), **options) as (activations, block):
        for _ in range(steps):
            made.append(action(model, block))
            model.zero_grad()
        model.seen = _seen
        with block():
            loss = model(batch(7)).sum()
        loss.backward()  # it goes on as ever
        assert figures(activations)["activation_left_bytes_last"] > 0
        made.append(model.gradients())
        del loss
        assert held(activations) == 0
    return made


class _OfNet:
    """A model as ``offloaded`` takes it."""

    def __init__(self, model: Any) -> None:
        self.model, self.layers = model, model.layers


def held(activations: Any) -> float:
    """Bytes of the arena that are in use."""
    return figures(activations)["activation_used_bytes"]


def alone(action: Action, steps: int = 2) -> list[list[torch.Tensor]]:
    model = net()
    made = []
    for _ in range(steps):
        made.append(action(model, nullcontext))
        model.zero_grad()
    model.seen = _seen
    model(batch(7)).sum().backward()
    made.append(model.gradients())
    return made


def assert_alike(action: Action, **options: Any) -> None:
    mine, theirs = alone(action), moved(action, **options)
    for number, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        assert len(one) == len(other) > 0
        assert all(map(same_bits, one, other)), f"time {number}"


# ---- Graphs that are used more than once, or in parts.


def kept_graph(model: Net, block: Block) -> list[torch.Tensor]:
    with block():
        loss = model(batch()).pow(2).sum()
    for _ in range(3):
        loss.backward(retain_graph=True)
    loss.backward()
    return model.gradients()


def kept_and_dropped(model: Net, block: Block) -> list[torch.Tensor]:
    with block():
        loss = model(batch()).pow(2).sum()
    loss.backward(retain_graph=True)
    del loss
    return model.gradients()


def partly(model: Net, block: Block) -> list[torch.Tensor]:
    given = batch().requires_grad_()
    with block():
        loss = model(given).pow(2).sum()
    parameters = list(model.parameters())
    made = [*torch.autograd.grad(loss, parameters[-4:], retain_graph=True)]
    made += torch.autograd.grad(loss, parameters[5:9], retain_graph=True)
    made += torch.autograd.grad(loss, [given], retain_graph=True)
    loss.backward(inputs=parameters[:2], retain_graph=True)
    loss.backward()
    return [*made, *model.gradients()]


def to_the_middle(model: Net, block: Block) -> list[torch.Tensor]:
    middle: list[torch.Tensor] = []

    def see(_: int, x: torch.Tensor) -> torch.Tensor:
        middle.append(x)
        return x

    model.seen = see
    with block():
        loss = model(batch()).pow(2).sum()
    first = torch.autograd.grad(loss, middle[2], retain_graph=True)[0]
    rest = torch.autograd.grad(middle[2], list(model.layers[:3].parameters()), first)
    return [first, *rest, *(one.detach() for one in middle)]


def penalty(model: Net, block: Block) -> list[torch.Tensor]:
    given = batch().requires_grad_()
    with block():
        loss = model(given).pow(2).sum()
    (slope,) = torch.autograd.grad(loss, given, create_graph=True)
    (loss + slope.pow(2).sum()).backward()
    return model.gradients()


def penalty_in_the_block(model: Net, block: Block) -> list[torch.Tensor]:
    given = batch().requires_grad_()
    with block():
        loss = model(given).pow(2).sum()
        (slope,) = torch.autograd.grad(loss, given, create_graph=True)
        total = loss + slope.pow(2).sum()
    total.backward()
    return model.gradients()


def third_derivative(model: Net, block: Block) -> list[torch.Tensor]:
    given = batch().requires_grad_()
    with block():
        value = model(given).sum()
        for _ in range(2):
            (slope,) = torch.autograd.grad(value, given, create_graph=True)
            value = slope.pow(2).sum()
    value.backward()
    return model.gradients()


def hessian_product(model: Net, block: Block) -> list[torch.Tensor]:
    parameters = list(model.parameters())
    with block():
        loss = model(batch()).pow(2).sum()
    slopes = torch.autograd.grad(loss, parameters, create_graph=True)
    product = sum((one * one.detach().cos()).sum() for one in slopes)
    made = torch.autograd.grad(product, parameters, retain_graph=True)
    again = torch.autograd.grad(product, parameters)
    assert all(map(torch.equal, made, again))
    return [*made]


def read(model: Net, block: Block) -> list[torch.Tensor]:
    """Saved tensors are read by hand, before and between backward passes."""
    with block():
        loss = model(batch()).pow(2).sum()
    made = saved_of(loss)
    loss.backward(retain_graph=True)
    made += saved_of(loss)
    made += saved_of(loss)
    loss.backward()
    return [*made, *model.gradients()]


def saved_of(loss: torch.Tensor) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    nodes, todo = set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in nodes:
            continue
        nodes.add(node)
        for name in dir(node):
            if name.startswith("_saved_"):
                one = getattr(node, name)
                if isinstance(one, torch.Tensor):
                    found.append(one.detach().clone())
        todo += [one for one, _ in node.next_functions]
    return found


def anomaly(model: Net, block: Block) -> list[torch.Tensor]:
    with torch.autograd.detect_anomaly(check_nan=True):
        with block():
            loss = model(batch()).pow(2).sum()
        loss.backward()
    return model.gradients()


def tensor_hooks(model: Net, block: Block) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []

    def watch(_: int, x: torch.Tensor) -> torch.Tensor:
        x.retain_grad()
        x.register_hook(lambda gradient: gradient * 1.5)
        seen.append(x)
        return x

    model.seen = watch
    with block():
        loss = model(batch()).pow(2).sum()
    loss.backward()
    return [*model.gradients(), *(one.grad for one in seen if one.grad is not None)]


# ---- Orders.


def pipeline(model: Net, block: Block) -> list[torch.Tensor]:
    """One forward, one backward, with three forwards under way."""
    losses: list[torch.Tensor] = []
    for number in range(8):
        with block():
            losses.append(model(batch(number)).pow(2).sum())
        if len(losses) == 3:
            losses.pop(0).backward()
    while losses:
        losses.pop(0).backward()
    return model.gradients()


def scattered(model: Net, block: Block) -> list[torch.Tensor]:
    """Backward passes in no order, some graphs dropped, others kept."""
    losses: list[Any] = []
    for number in range(9):
        with block():
            losses.append(model(batch(number)).pow(2).sum())
        if number == 5:
            losses[3] = None
            losses[1].backward()
            losses[4].backward(retain_graph=True)
    for number in (7, 0, 4, 8, 2):
        losses[number].backward()
        losses[number] = None
    return model.gradients()


def interleaved(model: Net, block: Block) -> list[torch.Tensor]:
    """Two forward passes in one block, layer by layer in turns; others without gradients."""
    with block():
        one, other = batch(1), batch(2)
        for layer in model.layers:
            with torch.no_grad():
                layer(one)
            one, other = layer(one), layer(other)
        model.eval()
        with torch.no_grad():
            model(batch(3))
        with torch.inference_mode():
            model(batch(3))
        model.train()
        loss = model(batch(4)).sum() + (one * other).sum()
    loss.backward()
    return model.gradients()


def again_and_out_of_order(model: Net, block: Block) -> list[torch.Tensor]:
    """Layers are called twice, in another order, or not at all; another way each time."""
    order = torch.randint(0, 5, (7,), generator=torch.Generator().manual_seed(1))
    with block():
        x = batch()
        for number in [4, 2, 2, *order.tolist()]:
            x = model.layers[number](x)
        loss = x.sum()
    loss.backward()
    with block():
        loss = model.layers[3](batch(2)).sum()
    loss.backward()
    return model.gradients()


def without_gradients(model: Net, block: Block) -> list[torch.Tensor]:
    model.eval()
    with block(), torch.no_grad():
        made = [model(batch())]
    with torch.no_grad(), block():
        made.append(model(batch()))
    model.train()
    with block():
        pass
    with block():
        frozen = model(batch()).detach()
    return [*made, frozen]


def frozen_layers(model: Net, block: Block) -> list[torch.Tensor]:
    for one in model.layers[:2].parameters():
        one.requires_grad_(False)
    with block():
        loss = model(batch()).pow(2).sum()
    loss.backward()
    for one in model.parameters():
        one.requires_grad_(True)
    return model.gradients()


def growing_batches(model: Net, block: Block) -> list[torch.Tensor]:
    for rows in (2, 40, 7, 300, 1, 64):
        with block():
            loss = model(batch().repeat(rows, 1)).pow(2).sum()
        loss.backward()
    return model.gradients()


def other_blocks(model: Net, block: Block) -> list[torch.Tensor]:
    """A block in a block, and layers that are used outside of any."""
    with block():
        with block():
            loss = model(batch()).pow(2).sum()
        loss = loss + model(batch(2)).sum()
    outside = model(batch(3)).sum()
    (loss + outside).backward()
    return model.gradients()


def functional(model: Net, block: Block) -> list[torch.Tensor]:
    """With other tensors in place of the parameters."""
    given = {name: (one * 1.5).detach() for name, one in model.named_parameters()}
    for one in given.values():
        one.requires_grad_()
    with block():
        loss = torch.func.functional_call(model, given, batch()).pow(2).sum()
    return [*torch.autograd.grad(loss, list(given.values()))]


def mapped(model: Net, block: Block) -> list[torch.Tensor]:
    with block():
        made = torch.vmap(model)(batch()[None].repeat(3, 1, 1))
        loss = made.pow(2).sum()
    loss.backward()
    return model.gradients()


def assigned(model: Net, block: Block) -> list[torch.Tensor]:
    """Parameters are other tensors between forward and backward, and get other values."""
    with block():
        loss = model(batch()).pow(2).sum()
    for one in model.parameters():
        one.data = one.data * 1.25
    loss.backward()
    for one in model.parameters():
        one.data.mul_(0.75)
    with block():
        loss = model(batch()).pow(2).sum()
    for one in model.parameters():
        one.data.mul_(0.5)
    loss.backward()
    made = model.gradients()
    with torch.no_grad():
        for one in model.parameters():
            one.mul_(1.5)
    return made


def from_cpu_and_back(model: Net, block: Block) -> list[torch.Tensor]:
    """Tensors of other devices and types on the way."""

    def through(number: int, x: torch.Tensor) -> torch.Tensor:
        return x.double().cpu().sin().to(training.DEVICE).float() if number % 2 else x

    model.seen = through
    with block():
        loss = model(batch()).pow(2).sum()
    loss.backward()
    return model.gradients()


ACTIONS: list[Action] = [
    *(kept_graph, kept_and_dropped, partly, to_the_middle, penalty, penalty_in_the_block),
    *(third_derivative, hessian_product, read, anomaly, tensor_hooks),
    *(pipeline, scattered, interleaved, again_and_out_of_order, without_gradients),
    *(frozen_layers, growing_batches, other_blocks, functional, mapped, assigned),
    from_cpu_and_back,
]


@pytest.mark.parametrize(
    "options", [{}, {"keep_last": 0, "prefetch": 0}, {"host_bytes": "20KiB"}], ids=str
)
@pytest.mark.parametrize("action", ACTIONS, ids=lambda one: one.__name__)
def test_what_autograd_allows_gives_the_same_bits(action: Action, options: dict[str, Any]) -> None:
    with quiet():
        assert_alike(action, **options)


@pytest.mark.parametrize("action", [pipeline, kept_graph, scattered], ids=lambda one: one.__name__)
@pytest.mark.parametrize("aim", ["memory", "overlap"])
def test_more_iterations_give_the_same_bits(action: Action, aim: str) -> None:
    mine, theirs = alone(action, 6), moved(action, 6, aim=aim, in_flight=3, prefetch=2)
    for one, other in zip(mine, theirs, strict=True):
        assert all(map(same_bits, one, other))


# ---- Tensors that are changed in place.

CHANGED = "modified by an inplace operation"


def outcome(
    model: Net, block: Block, change: Callable[[Net, Any], None], early: bool
) -> str | None:
    """The error of a backward pass behind a change of what layer 1 gave, and layer 2 saved."""
    given: list[torch.Tensor] = []

    def see(number: int, x: torch.Tensor) -> torch.Tensor:
        if number == 1:
            given.append(x)
        if number == 3 and early:
            change(model, given)
        return x

    model.seen = see
    with block():
        loss = model(batch()).pow(2).sum()
    if not early:
        change(model, given)
    try:
        loss.backward()
    except RuntimeError as why:
        return str(why)
    finally:
        model.zero_grad()
        model.seen = _seen
    return None


def _mul(_: Net, given: list[torch.Tensor]) -> None:
    with torch.no_grad():
        given[0].mul_(2)


def _mul_and_forget(_: Net, given: list[torch.Tensor]) -> None:
    with torch.no_grad():
        given.pop().mul_(2)


def _view(_: Net, given: list[torch.Tensor]) -> None:
    with torch.no_grad():
        given[0][1:, 3].zero_()


def _detached(_: Net, given: list[torch.Tensor]) -> None:
    given.pop().detach().add_(1)


def _weight(model: Net, _: Any) -> None:
    with torch.no_grad():
        model.layers[2][0].weight.mul_(2)


def _bias(model: Net, _: Any) -> None:
    """Which backward passes do not need."""
    with torch.no_grad():
        model.layers[2][0].bias.mul_(1)


def _nothing(_: Net, given: list[torch.Tensor]) -> None:
    (given[0] * 2).mul_(3)


@pytest.mark.parametrize("early", [True, False], ids=["in the forward pass", "behind it"])
@pytest.mark.parametrize(
    ("change", "refused"),
    [
        (_mul, True),
        (_mul_and_forget, True),
        (_view, True),
        (_detached, True),
        (_weight, True),
        (_bias, False),
        (_nothing, False),
    ],
)
@pytest.mark.parametrize("options", [{}, {"in_flight": 16}, {"host_bytes": "4KiB"}], ids=str)
def test_a_saved_tensor_that_was_changed_is_refused_as_without(
    change: Any, refused: bool, early: bool, options: dict[str, Any]
) -> None:
    expected = outcome(net(), nullcontext, change, early)
    assert (expected is not None) == refused
    model = net()
    with offloaded(_OfNet(model), **options) as (activations, block):
        for _ in range(3):
            found = outcome(model, block, change, early)
            assert (found is not None) == refused
            assert found is None or CHANGED in found
        with block():
            loss = model(batch()).sum()
        loss.backward()
        del loss
        assert held(activations) == 0


@pytest.mark.parametrize("number", range(5))
def test_relu_that_changes_what_a_layer_saved_is_refused(number: int) -> None:
    class Changes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu_(torch.sigmoid(x)).sin()

    def loss(model: Net, block: Block) -> None:
        with block():
            value = model(batch()).sum()
        value.backward()

    for run in (alone, moved):
        with pytest.raises(RuntimeError, match=CHANGED):
            run_changed(run, loss, number, Changes())


def run_changed(run: Any, loss: Any, number: int, layer: nn.Module) -> None:
    def action(model: Net, block: Block) -> list[torch.Tensor]:
        model.layers[number][1] = layer
        loss(model, block)
        return []

    run(action)


# ---- Hooks of others.


def on_cpu_outside(model: Net, block: Block) -> list[torch.Tensor]:
    with torch.autograd.graph.save_on_cpu(), block():
        loss = model(batch()).pow(2).sum()
    loss.backward()
    return model.gradients()


def on_cpu_inside(model: Net, block: Block) -> list[torch.Tensor]:
    with block():
        x = batch()
        for number, layer in enumerate(model.layers):
            with torch.autograd.graph.save_on_cpu() if number % 2 else nullcontext():
                x = layer(x)
        loss = x.pow(2).sum()
    loss.backward()
    return model.gradients()


def packed_inside(model: Net, block: Block) -> list[torch.Tensor]:
    """Hooks that compute, and of which some keep tensors of their own."""
    kept: list[torch.Tensor] = []

    def pack(x: torch.Tensor) -> Any:
        kept.append(x)
        return x * 2

    def unpack(x: Any) -> torch.Tensor:
        return x / 2  # type: ignore[no-any-return]

    with block():
        x = batch()
        for number, layer in enumerate(model.layers):
            hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
            with hooks if number == 2 else nullcontext():
                x = layer(x)
        loss = x.pow(2).sum()
    loss.backward()
    return [*model.gradients(), *kept]


HOOKS: list[Action] = [on_cpu_outside, on_cpu_inside, packed_inside]


@pytest.mark.parametrize("action", HOOKS, ids=lambda one: one.__name__)
def test_hooks_of_others_do_what_they_do_without(action: Action) -> None:
    assert_alike(action)


def test_hooks_that_are_refused_leave_no_block_open() -> None:
    model = net()
    with offloaded(_OfNet(model)) as (activations, block):
        for _ in range(2):
            with (
                torch.autograd.graph.disable_saved_tensors_hooks("not here"),
                pytest.raises(RuntimeError, match="not here"),
                block(),
            ):
                model(batch())
            with (
                block(),
                pytest.raises(RuntimeError, match="not here"),
                torch.autograd.graph.disable_saved_tensors_hooks("not here"),
            ):
                model(batch())
        with block():
            loss = model(batch()).sum()
        loss.backward()
        assert figures(activations)["activation_left_bytes_last"] > 0


def test_torch_func_says_that_it_takes_no_hooks() -> None:
    model = net()
    refused = pytest.raises(RuntimeError, match="saved tensor hooks")
    with offloaded(_OfNet(model)) as (_, block), block(), refused:
        torch.func.grad(lambda x: model(x).sum())(batch())


# ---- Two at once.


def test_two_models_leave_in_one_block() -> None:
    def run(wrapped: bool) -> list[torch.Tensor]:
        one, other = net(), Net(3).to(training.DEVICE)
        torch.manual_seed(6)
        for parameter in other.parameters():
            nn.init.normal_(parameter, std=0.3)
        blocks: list[Any] = [nullcontext, nullcontext]
        with (
            offloaded(_OfNet(one)) as (first, first_block),
            offloaded(_OfNet(other)) as (second, second_block),
        ):
            if wrapped:
                blocks = [first_block, second_block]
            for _ in range(3):
                with blocks[0]():
                    x = one(batch())
                    with blocks[1]():
                        y = other(x)
                    z = one(y)
                z.sum().backward()
                with blocks[0](), blocks[1]():
                    loss = other(one(batch(4))).sum()
                loss.backward()
            del x, y, z, loss
            if wrapped:
                assert held(first) == held(second) == 0
        return [*one.gradients(), *other.gradients()]

    assert all(map(same_bits, run(False), run(True)))


def test_two_offloads_of_one_model_leave_the_same_bits() -> None:
    def action(model: Net, block: Block) -> list[torch.Tensor]:
        with offloaded(_OfNet(model)) as (_, second):
            with block(), second():
                loss = model(batch()).pow(2).sum()
            loss.backward()
            with second(), block():
                loss = model(batch()).pow(2).sum()
            loss.backward()
        return model.gradients()

    mine = alone(lambda model, _: action(model, nullcontext))
    assert all(map(same_bits, mine[0], moved(action)[0]))


# ---- Threads.


def in_thread(action: Callable[[], Any]) -> Any:
    made: list[Any] = []

    def run() -> None:
        try:
            made.append(action())
        except BaseException as why:
            made.append(why)

    one = threading.Thread(target=run)
    one.start()
    one.join(60)
    assert not one.is_alive()
    if isinstance(made[0], BaseException):
        raise made[0]
    return made[0]


def forward_in_a_thread(model: Net, block: Block) -> list[torch.Tensor]:
    def forward() -> torch.Tensor:
        with block():
            return model(batch()).pow(2).sum()

    in_thread(forward).backward()
    return model.gradients()


def backward_in_a_thread(model: Net, block: Block) -> list[torch.Tensor]:
    with block():
        loss = model(batch()).pow(2).sum()
    in_thread(lambda: loss.backward(retain_graph=True))
    in_thread(loss.backward)
    return model.gradients()


def dropped_in_a_thread(model: Net, block: Block) -> list[torch.Tensor]:
    made = []
    with block():
        made.append(model(batch()).pow(2).sum())
    in_thread(made.clear)
    with block():
        loss = model(batch()).pow(2).sum()
    loss.backward()
    return model.gradients()


THREADED = [forward_in_a_thread, backward_in_a_thread, dropped_in_a_thread]


@pytest.mark.parametrize("action", THREADED, ids=lambda one: one.__name__)
def test_threads_give_the_same_bits(action: Action) -> None:
    assert_alike(action)


def test_a_forward_pass_of_another_thread_is_refused_with_a_sentence() -> None:
    model = net()
    with offloaded(_OfNet(model)) as (_, block):
        with block():
            with pytest.raises(StateError, match="another thread"):
                in_thread(lambda: block().__enter__())
            loss = model(batch()).sum()
        loss.backward()
        assert len(in_thread(lambda: forward_in_a_thread(model, block))) == 20


def test_many_backward_passes_at_once() -> None:
    """Of graphs that share nothing but the arena, and of one graph that is kept."""
    expected = [one * 1 for one in alone(pipeline, 1)[0]]
    model = net()
    with offloaded(_OfNet(model), prefetch=2) as (activations, block):
        for _ in range(5):
            losses = []
            for number in range(8):
                with block():
                    losses.append(model(batch(number)).pow(2).sum())
            made: list[Any] = [None] * 16

            def work(number: int, losses: Any = losses, made: Any = made) -> None:
                loss, parameters = losses[number // 2], list(model.parameters())
                made[number] = torch.autograd.grad(loss, parameters, retain_graph=True)

            threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
            for one in threads:
                one.start()
            for one in threads:
                one.join(60)
            assert all(one is not None for one in made)
            for number in range(8):
                assert all(map(same_bits, made[2 * number], made[2 * number + 1]))
            total = [sum(parts) for parts in zip(*made[::2], strict=True)]
            assert all(map(torch.allclose, total, expected))
            made.clear()
            losses.clear()
        assert held(activations) == 0


# ---- Forward passes that end early, and graphs that are dropped.


class Broken(Exception):
    """Of a layer."""


@pytest.mark.parametrize("entry", ["with", "attach"])
@pytest.mark.parametrize("at", range(5))
def test_an_exception_in_a_layer_comes_through_and_loses_nothing(at: int, entry: str) -> None:
    model = net()
    expected = alone(kept_and_dropped, 1)[0]
    with offloaded(_OfNet(model), entry) as (activations, block):
        for _ in range(3):

            def see(number: int, x: torch.Tensor) -> torch.Tensor:
                if number == at:
                    raise Broken
                return x

            model.seen = see
            with pytest.raises(Broken), block():
                model(batch())
            gc.collect()
            assert held(activations) == 0
            model.seen = _seen
            made = kept_and_dropped(model, block)
            model.zero_grad()
            assert all(map(same_bits, made, expected))
            assert held(activations) == 0


def test_a_loss_that_is_dropped_gives_all_back_at_once() -> None:
    model = net()
    gc.collect()
    gc.disable()
    try:
        with offloaded(_OfNet(model)) as (activations, block):
            for _ in range(3):
                with block():
                    loss = model(batch()).sum()
                assert held(activations) > 0
                del loss
                assert held(activations) == 0
    finally:
        gc.enable()


def test_an_exception_that_holds_a_graph_does_not_stop_the_next_forward_pass() -> None:
    """Its arena is full of what the exception's frames hold."""
    model = net()
    expected = alone(kept_and_dropped, 1)[0]
    room = 3 * 4 * ROWS * WIDTH * 4
    with offloaded(_OfNet(model), host_bytes=room) as (activations, block):
        held_errors = []
        for _ in range(4):
            try:
                with block():
                    loss = model(batch()).sum()
                    raise Broken
            except Broken as why:
                held_errors.append((why, loss))
            made = kept_and_dropped(model, block)
            model.zero_grad()
            assert all(map(same_bits, made, expected))
        del loss
        for _, one in held_errors:
            one.backward()
        held_errors.clear()
        gc.collect()
        assert held(activations) == 0


# ---- Lives.


def test_an_offload_that_is_closed_brings_back_what_is_away() -> None:
    expected = alone(kept_graph, 1)[0]
    model = net()
    activations = refit.ActivationOffload(
        model, model.layers, host_bytes="1MiB", min_bytes=1, aim="memory"
    )
    with activations:
        loss = model(batch()).pow(2).sum()
    activations.close()
    activations.close()
    for last in (False, False, False, True):
        loss.backward(retain_graph=not last)
    assert all(map(same_bits, expected, model.gradients()))
    with pytest.raises(StateError, match="closed"), activations:
        pass
    with pytest.raises(StateError, match="closed"):
        activations.attach()
    with pytest.raises(StateError, match="closed"):
        activations.stats()
    assert not any(layer._forward_hooks for layer in model.layers)


@pytest.mark.parametrize("kept", [True, False], ids=["graph kept", "graph dropped"])
@pytest.mark.parametrize("entry", ["with", "attach"])
def test_one_that_is_dropped_takes_its_hooks_off_and_brings_all_back(
    entry: str, kept: bool
) -> None:
    expected = alone(kept_and_dropped, 1)[0]
    model = net()
    activations: Any = refit.ActivationOffload(
        model, model.layers, host_bytes="1MiB", min_bytes=1, aim="memory"
    )
    if entry == "attach":
        activations.attach()
    with nullcontext() if entry == "attach" else activations:
        loss = model(batch()).pow(2).sum()
    gone = weakref.ref(activations)
    if not kept:
        del loss
    gc.disable()
    try:
        del activations
        if not kept:
            assert gone() is None
    finally:
        gc.enable()
    if kept:
        loss.backward()
        assert all(map(same_bits, expected, model.gradients()))
        del loss
        gc.collect()
        assert gone() is None
    assert not any(layer._forward_hooks for layer in model.layers)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_a_model_that_is_copied_or_pickled_leaves_its_offload_alone() -> None:
    """As TRL does for a reference model, and torch.optim.swa_utils for averages."""
    model = net()
    model.seen = _seen
    with offloaded(_OfNet(model), "attach") as (activations, block):
        model(batch()).sum().backward()
        before = figures(activations)
        other = copy.deepcopy(model)
        third = pickle.loads(pickle.dumps(model))
        for one in (other, third):
            one.zero_grad()
            one(batch()).sum().backward()
            assert figures(activations) == before
            assert all(map(same_bits, one.gradients(), model.gradients()))
        with block():
            other(batch()).sum().backward()  # in a block, as any code is
        model.zero_grad()
        model(batch()).sum().backward()
        assert figures(activations)["activation_left_bytes_last"] > 0
    other(batch()).sum().backward()


def _seen(_: int, x: torch.Tensor) -> torch.Tensor:
    return x


def test_attached_only_while_the_model_trains() -> None:
    model = net()
    with offloaded(_OfNet(model)) as (activations, _):

        def left() -> float:
            model(batch()).sum().backward()
            return figures(activations)["activation_left_bytes_last"]

        assert left() == 0
        assert activations.attach() is activations
        activations.attach()
        assert left() > 0
        figures_before = figures(activations)
        model.eval()
        model(batch()).sum().backward()
        with torch.no_grad():
            model.train()(batch())
        assert figures(activations) == figures_before
        activations.detach()
        activations.detach()
        assert not model._forward_hooks
        model(batch()).sum().backward()
        assert figures(activations) == figures_before


def test_layers_have_to_be_modules_of_the_model_side_by_side() -> None:
    model = net()
    cases: list[tuple[Any, str]] = [
        ([nn.Linear(2, 2)], "no module of the model"),
        ([model.layers[0], model.layers[0][1]], "inside another"),
        ([model.layers[0], model], "inside another"),
        ([model.layers], ""),
        ([], "no layers"),
        ([model], ""),
    ]
    for layers, said in cases:
        if said:
            with pytest.raises(InvalidError, match=said):
                refit.ActivationOffload(model, layers, host_bytes="1MiB")
        else:
            refit.ActivationOffload(model, layers, host_bytes="1MiB").close()
    with pytest.raises(RefitError):
        refit.ActivationOffload(nn.Sequential(nn.Linear(3, 3)), host_bytes="1MiB")
    with pytest.raises((RefitError, TypeError, ValueError)):
        refit.ActivationOffload(model, [3], host_bytes="1MiB")  # type: ignore[list-item]
    assert not any(one._forward_hooks for one in model.modules())


BAD_OPTIONS: list[dict[str, Any]] = [
    {},
    {"host_bytes": 0},
    {"host_bytes": -1},
    {"host_bytes": "much"},
    {"host_bytes": "1MiB", "in_flight": 0},
    {"host_bytes": "1MiB", "in_flight": 17},
    {"host_bytes": "1MiB", "prefetch": -1},
    {"host_bytes": "1MiB", "prefetch": 17},
    {"host_bytes": "1MiB", "keep_last": 1025},
    {"host_bytes": "1MiB", "aim": "speed"},
    {"host_bytes": "1MiB", "min_bytes": "few"},
    {"host_bytes": 1 << 60},
]


@pytest.mark.parametrize("options", BAD_OPTIONS, ids=str)
def test_options_that_are_wrong_are_refused_before_anything_is_hooked(
    options: dict[str, Any],
) -> None:
    model = net()
    with pytest.raises(RefitError):
        refit.ActivationOffload(model, model.layers, **options)
    assert not any(one._forward_hooks for one in model.modules())


def test_close_in_a_block_is_refused() -> None:
    model = net()
    with offloaded(_OfNet(model)) as (activations, block):
        with block():
            with pytest.raises(StateError, match="forward pass"):
                activations.close()
            loss = model(batch()).sum()
        loss.backward()


def test_checkpoints_of_the_user_around_several_layers() -> None:
    """A checkpoint that spans layers, so that all their ends are in it, and others around none."""

    def action(model: Net, block: Block) -> list[torch.Tensor]:
        def two(x: torch.Tensor) -> Any:
            return model.layers[1](model.layers[0](x))

        def rest(x: torch.Tensor, *, scale: torch.Tensor) -> Any:
            return model.layers[4](model.layers[3](x * scale))

        with block():
            x = checkpoint(two, batch().requires_grad_(), use_reentrant=True)
            x = model.layers[2](x)
            x = checkpoint(rest, x, scale=x.exp(), use_reentrant=False)
            loss = x.pow(2).sum()
        loss.backward()
        return model.gradients()

    assert_alike(action)


def test_what_is_saved_behind_a_model_that_is_inside_another() -> None:
    """Layers of two kinds at two depths, called in turns."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Net(2)
            self.layers = nn.ModuleList([Relu(), Attention(), self.inner.layers[0], Relu()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[3](self.layers[1](self.inner(self.layers[0](x))))

    def run(entry: str | None) -> list[torch.Tensor]:
        torch.manual_seed(4)
        model = Both().to(training.DEVICE)
        if entry is None:
            model(batch()).sum().backward()
        else:
            with offloaded(_OfNet(model), entry) as (_, block):
                with block():
                    loss = model(batch()).sum()
                loss.backward()
        return [one.grad for one in model.parameters() if one.grad is not None]

    expected = run(None)
    for entry in ("with", "attach"):
        assert all(map(same_bits, expected, run(entry)))


def test_a_run_that_stops_and_goes_on() -> None:
    """Blocks for some steps, none for others."""
    mine, theirs = Run(STACKS["drops"]), Run(STACKS["drops"])
    with offloaded(theirs) as (_, block):
        for number in range(6):
            mine.step()
            theirs.step(block if number % 3 else nullcontext)
    mine.step(), theirs.step()
    for one, other in zip(mine.seen, theirs.seen, strict=True):
        assert all(same_bits(one[name], other[name]) for name in one)
