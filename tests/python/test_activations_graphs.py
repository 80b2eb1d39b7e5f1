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
    Block,
    Net,
    Relu,
    Run,
    as_given,
    assert_same,
    batch,
    figures,
    gradients,
    is_hooked,
    left_bytes,
    loss_of,
    net,
    offloaded,
    quiet,
    same_bits,
    stepped,
    used_bytes,
)
from refit.activations.arena import Arena
from refit.errors import InvalidError, RefitError, StateError
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("default_device")

Action = Callable[[Net, Block], list[torch.Tensor]]


def moved(action: Action, steps: int = 2, **options: Any) -> list[list[torch.Tensor]]:
    """What an action gives with refit, several times over, and a plain step after it."""
    model = net()
    with offloaded(model, **options) as (activations, block):
        made = repeated(action, model, block, steps)
        assert left_bytes(activations) > 0
        assert used_bytes(activations) == 0
    return made


def alone(action: Action, steps: int = 2) -> list[list[torch.Tensor]]:
    return repeated(action, net(), nullcontext, steps)


def repeated(action: Action, model: Net, block: Block, steps: int) -> list[list[torch.Tensor]]:
    made = []
    for _ in range(steps):
        made.append(action(model, block))
        model.zero_grad()
    model.seen = as_given
    return [*made, stepped(model, block)]


def assert_alike(action: Action, steps: int = 2, **options: Any) -> None:
    mine, theirs = alone(action, steps), moved(action, steps, **options)
    for number, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        assert len(one) == len(other) > 0
        assert all(map(same_bits, one, other)), f"time {number}"


# ---- Graphs that are used more than once, or in parts.


def kept_graph(model: Net, block: Block) -> list[torch.Tensor]:
    loss = loss_of(model, block)
    for _ in range(3):
        loss.backward(retain_graph=True)
    loss.backward()
    return gradients(model)


def kept_and_dropped(model: Net, block: Block) -> list[torch.Tensor]:
    loss_of(model, block).backward(retain_graph=True)
    return gradients(model)


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
    return [*made, *gradients(model)]


def to_the_middle(model: Net, block: Block) -> list[torch.Tensor]:
    middle: list[torch.Tensor] = []

    def see(_: int, x: torch.Tensor) -> torch.Tensor:
        middle.append(x)
        return x

    model.seen = see
    loss = loss_of(model, block)
    first = torch.autograd.grad(loss, middle[2], retain_graph=True)[0]
    rest = torch.autograd.grad(middle[2], list(model.layers[:3].parameters()), first)
    return [first, *rest, *(one.detach() for one in middle)]


def penalty(model: Net, block: Block) -> list[torch.Tensor]:
    given = batch().requires_grad_()
    with block():
        loss = model(given).pow(2).sum()
    (slope,) = torch.autograd.grad(loss, given, create_graph=True)
    (loss + slope.pow(2).sum()).backward()
    return gradients(model)


def third_derivative_in_the_block(model: Net, block: Block) -> list[torch.Tensor]:
    given = batch().requires_grad_()
    with block():
        value = model(given).pow(2).sum()
        for _ in range(2):
            (slope,) = torch.autograd.grad(value, given, create_graph=True)
            value = value + slope.pow(2).sum()
    value.backward()
    return gradients(model)


def hessian_product(model: Net, block: Block) -> list[torch.Tensor]:
    parameters = list(model.parameters())
    slopes = torch.autograd.grad(loss_of(model, block), parameters, create_graph=True)
    product = sum((one * one.detach().cos()).sum() for one in slopes)
    made = torch.autograd.grad(product, parameters, retain_graph=True)
    again = torch.autograd.grad(product, parameters)
    assert all(map(torch.equal, made, again))
    return [*made]


def read(model: Net, block: Block) -> list[torch.Tensor]:
    """Saved tensors are read by hand, before and between backward passes."""
    loss = loss_of(model, block)
    made = saved_of(loss)
    loss.backward(retain_graph=True)
    made += saved_of(loss)
    made += saved_of(loss)
    loss.backward()
    return [*made, *gradients(model)]


def saved_of(loss: torch.Tensor) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    nodes, todo = set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in nodes:
            continue
        nodes.add(node)
        saved = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        found += [one.detach().clone() for one in saved if isinstance(one, torch.Tensor)]
        todo += [one for one, _ in node.next_functions]
    return found


def anomaly(model: Net, block: Block) -> list[torch.Tensor]:
    with torch.autograd.detect_anomaly(check_nan=True):
        return stepped(model, block)


def tensor_hooks(model: Net, block: Block) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []

    def watch(_: int, x: torch.Tensor) -> torch.Tensor:
        x.retain_grad()
        x.register_hook(lambda gradient: gradient * 1.5)
        seen.append(x)
        return x

    model.seen = watch
    return [*stepped(model, block), *(one.grad for one in seen if one.grad is not None)]


# ---- Orders.


def pipeline(model: Net, block: Block) -> list[torch.Tensor]:
    """One forward, one backward, with three forwards under way."""
    losses: list[torch.Tensor] = []
    for number in range(8):
        losses.append(loss_of(model, block, number))
        if len(losses) == 3:
            losses.pop(0).backward()
    while losses:
        losses.pop(0).backward()
    return gradients(model)


def scattered(model: Net, block: Block) -> list[torch.Tensor]:
    """Backward passes in no order, some graphs dropped, others kept."""
    losses: list[Any] = []
    for number in range(9):
        losses.append(loss_of(model, block, number))
        if number == 5:
            losses[3] = None
            losses[1].backward()
            losses[4].backward(retain_graph=True)
    for number in (7, 0, 4, 8, 2):
        losses[number].backward()
        losses[number] = None
    return gradients(model)


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
    return gradients(model)


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
    return gradients(model)


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
    model.layers[:2].requires_grad_(False)
    made = stepped(model, block)
    model.requires_grad_(True)
    return made


def growing_batches(model: Net, block: Block) -> list[torch.Tensor]:
    for rows in (2, 40, 7, 300, 1, 64):
        with block():
            loss = model(batch().repeat(rows, 1)).pow(2).sum()
        loss.backward()
    return gradients(model)


def other_blocks(model: Net, block: Block) -> list[torch.Tensor]:
    """A block in a block, and layers that are used outside of any."""
    with block():
        loss = loss_of(model, block) + model(batch(2)).sum()
    outside = model(batch(3)).sum()
    (loss + outside).backward()
    return gradients(model)


def checkpoints_around_several_layers(model: Net, block: Block) -> list[torch.Tensor]:
    """A checkpoint that spans layers, so that all their ends are in it, and others around none."""

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
    return gradients(model)


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
        loss = torch.vmap(model)(batch()[None].repeat(3, 1, 1)).pow(2).sum()
    loss.backward()
    return gradients(model)


def assigned(model: Net, block: Block) -> list[torch.Tensor]:
    """Parameters are other tensors between forward and backward, and get other values."""
    loss = loss_of(model, block)
    for one in model.parameters():
        one.data = one.data * 1.25
    loss.backward()
    for one in model.parameters():
        one.data.mul_(0.75)
    loss = loss_of(model, block)
    for one in model.parameters():
        one.data.mul_(0.5)
    loss.backward()
    for one in model.parameters():
        one.data.mul_(1.5)
    return gradients(model)


def from_cpu_and_back(model: Net, block: Block) -> list[torch.Tensor]:
    """Tensors of other devices and types on the way."""

    def through(number: int, x: torch.Tensor) -> torch.Tensor:
        return x.double().cpu().sin().to(training.DEVICE).float() if number % 2 else x

    model.seen = through
    return stepped(model, block)


# ---- Hooks of others.


def on_cpu_outside(model: Net, block: Block) -> list[torch.Tensor]:
    with save_on_cpu():
        loss = loss_of(model, block)
    loss.backward()
    return gradients(model)


def on_cpu_inside(model: Net, block: Block) -> list[torch.Tensor]:
    return with_hooks_around(model, block, save_on_cpu, (1, 3))


def packed_inside(model: Net, block: Block) -> list[torch.Tensor]:
    """Hooks that compute, and of which some keep tensors of their own."""
    kept: list[torch.Tensor] = []

    def pack(x: torch.Tensor) -> Any:
        kept.append(x)
        return x * 2

    def unpack(x: Any) -> Any:
        return x / 2

    return [
        *with_hooks_around(model, block, lambda: saved_tensors_hooks(pack, unpack), (2,)),
        *kept,
    ]


def with_hooks_around(
    model: Net, block: Block, hooks: Callable[[], Any], layers: tuple[int, ...]
) -> list[torch.Tensor]:
    with block():
        x = batch()
        for number, layer in enumerate(model.layers):
            with hooks() if number in layers else nullcontext():
                x = layer(x)
        loss = x.pow(2).sum()
    loss.backward()
    return gradients(model)


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
    in_thread(lambda: loss_of(model, block)).backward()
    return gradients(model)


def backward_in_a_thread(model: Net, block: Block) -> list[torch.Tensor]:
    loss = loss_of(model, block)
    in_thread(lambda: loss.backward(retain_graph=True))
    in_thread(loss.backward)
    return gradients(model)


def dropped_in_a_thread(model: Net, block: Block) -> list[torch.Tensor]:
    made = [loss_of(model, block)]
    in_thread(made.clear)
    return stepped(model, block)


ACTIONS: list[Action] = [
    *(kept_graph, kept_and_dropped, partly, to_the_middle, penalty),
    *(third_derivative_in_the_block, hessian_product, read, anomaly, tensor_hooks),
    *(pipeline, scattered, interleaved, again_and_out_of_order, without_gradients),
    *(frozen_layers, growing_batches, other_blocks, checkpoints_around_several_layers),
    *(functional, mapped, assigned, from_cpu_and_back),
    *(on_cpu_outside, on_cpu_inside, packed_inside),
    *(forward_in_a_thread, backward_in_a_thread, dropped_in_a_thread),
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
    assert_alike(action, 6, aim=aim, in_flight=3, prefetch=2)


# ---- Tensors that are changed in place.

REFUSED = "modified by an inplace operation"
CHANGES: dict[str, tuple[Callable[[Net, list[torch.Tensor]], Any], bool]] = {
    "in place": (lambda _, given: given[0].mul_(2), True),
    "in place, and let go": (lambda _, given: given.pop().mul_(2), True),
    "by a view": (lambda _, given: given[0][1:, 3].zero_(), True),
    "detached": (lambda _, given: given.pop().detach().add_(1), True),
    "a weight": (lambda model, _: model.layers[2][0].weight.mul_(2), True),
    "a bias, which backward passes do not need": (
        lambda model, _: model.layers[2][0].bias.mul_(1),
        False,
    ),
    "a copy": (lambda _, given: (given[0] * 2).mul_(3), False),
}
"""Of what layer 1 gave and layer 2 saved, or of layer 2; and whether the backward pass needs it."""


def outcome(model: Net, block: Block, change: str, early: bool) -> str | None:
    """The error of a backward pass after a change."""
    given: list[torch.Tensor] = []

    def see(number: int, x: torch.Tensor) -> torch.Tensor:
        if number == 1:
            given.append(x)
        if number == 3 and early:
            changed()
        return x

    @torch.no_grad()
    def changed() -> None:
        CHANGES[change][0](model, given)

    model.seen = see
    loss = loss_of(model, block)
    if not early:
        changed()
    try:
        loss.backward()
    except RuntimeError as why:
        return str(why)
    finally:
        model.zero_grad()
        model.seen = as_given
    return None


@pytest.mark.parametrize("early", [True, False], ids=["in the forward pass", "after it"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("options", [{}, {"in_flight": 16}, {"host_bytes": "4KiB"}], ids=str)
def test_a_saved_tensor_that_was_changed_is_refused_as_without(
    change: str, early: bool, options: dict[str, Any]
) -> None:
    refused = CHANGES[change][1]
    assert (outcome(net(), nullcontext, change, early) is not None) == refused
    model = net()
    with offloaded(model, **options) as (activations, block):
        for _ in range(3):
            found = outcome(model, block, change, early)
            assert (found is not None) == refused
            assert found is None or REFUSED in found
        stepped(model, block)
        assert used_bytes(activations) == 0


@pytest.mark.parametrize("number", range(5))
def test_relu_that_changes_what_a_layer_saved_is_refused(number: int) -> None:
    class Changes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu_(torch.sigmoid(x)).sin()

    def action(model: Net, block: Block) -> list[torch.Tensor]:
        model.layers[number][1] = Changes()  # type: ignore[index,operator]
        return stepped(model, block)

    for run in (alone, moved):
        with pytest.raises(RuntimeError, match=REFUSED):
            run(action)


# ---- Storages that several layers save, and that are changed in place in between.

Pair = tuple[torch.Tensor, torch.Tensor]


class Stage(nn.Module):
    """A layer that is one function."""

    def __init__(self, function: Callable[..., Pair]) -> None:
        super().__init__()
        self.function = function

    def forward(self, given: Pair) -> Pair:
        return self.function(*given)


class Stages(nn.Module):
    def __init__(self, *functions: Callable[..., Pair]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1.0, 2.0, 8))
        self.layers = nn.ModuleList(Stage(one) for one in functions)

    def forward(self, x: torch.Tensor) -> Pair:
        given = (x * self.weight, x)
        for layer in self.layers:
            given = layer(given)
        return given


def gradient(model: Stages) -> torch.Tensor:
    """Of the first output; the second one lives until then."""
    model.zero_grad()
    first, second = model(torch.linspace(0.0, 1.0, 8192).reshape(1024, 8))
    first.sum().backward()
    del second
    assert model.weight.grad is not None
    return model.weight.grad.clone()


def rest(first: torch.Tensor, second: torch.Tensor) -> Pair:
    return first * 2, second


CHANGED = {
    # The sine is held and never asked for; the cosine is.
    "in the next layer": (
        lambda y, _: (y, y.sin()),
        lambda y, aside: (y.add_(1.0).cos(), aside),
        rest,
        rest,
    ),
    "after a layer that saved it too": (
        lambda y, _: (y, y.sin()),
        lambda y, aside: (y, aside + y.sin()),
        lambda y, aside: (y.add_(1.0).cos(), aside),
        rest,
    ),
    "between two saves of the next layer": (
        lambda y, _: (y, y.sin()),
        lambda y, aside: (y, aside + y.sin() + y.add_(1.0).cos() * 0),
        lambda y, aside: (y.cos(), aside),
        rest,
    ),
    "before the first layer ends, and after it": (
        lambda y, _: (y, y.sin() + y.add_(1.0).tan() * 0),
        lambda y, aside: (y.mul_(0.5).cos(), aside),
        rest,
        rest,
    ),
    "in another part with a version of its own": (
        lambda y, _: (lambda a, b: (a.sin(), b))(*(y * 1.0).unsafe_chunk(2)),
        lambda a, b: (a + b.add_(1.0).cos(), a),
        rest,
        rest,
    ),
}


@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("where", CHANGED)
def test_storage_may_change_between_two_layers_that_save_it(where: str, in_flight: int) -> None:
    model = Stages(*CHANGED[where])
    wanted = gradient(model)
    with offloaded(model, "attach", keep_last=0, in_flight=in_flight) as (activations, _):
        for _ in range(3):
            assert torch.equal(gradient(model), wanted)
        assert figures(activations)["activation_out_bytes_total"] > 0
        assert figures(activations)["activation_groups"] == 0


@pytest.mark.parametrize("where", CHANGED)
def test_group_changed_while_leaving_is_released_after_backward(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first pass learns what others hold, so that later ones have groups of one storage."""

    def has_left(self: Arena, number: int) -> bool:
        self.wait(number, 60_000)
        return True

    model = Stages(*CHANGED[where])
    wanted = gradient(model)
    with offloaded(model, "attach", keep_last=0, in_flight=3) as (activations, _):
        for is_still in (has_left, lambda *_: False, has_left):
            monkeypatch.setattr(Arena, "is_still", is_still)
            assert torch.equal(gradient(model), wanted)
            assert figures(activations)["activation_groups"] == 0
            assert used_bytes(activations) == 0
        assert figures(activations)["activation_out_bytes_total"] > 0


# ---- Hooks that are refused.


def test_hooks_that_are_refused_leave_no_block_open() -> None:
    model = net()
    refused = pytest.raises(RuntimeError, match="not here")
    with offloaded(model) as (activations, block):
        for _ in range(2):
            with disable_saved_tensors_hooks("not here"), refused, block():
                model(batch())
            with block(), refused, disable_saved_tensors_hooks("not here"):
                model(batch())
        stepped(model, block)
        assert left_bytes(activations) > 0


def test_torch_func_says_that_it_takes_no_hooks() -> None:
    model = net()
    refused = pytest.raises(RuntimeError, match="saved tensor hooks")
    with offloaded(model) as (_, block), block(), refused:
        torch.func.grad(lambda x: model(x).sum())(batch())


# ---- Two at once.


def test_two_models_leave_in_one_block() -> None:
    def run(wrapped: bool) -> list[torch.Tensor]:
        one, other = net(), net(3)
        for parameter in other.parameters():
            nn.init.normal_(parameter, std=0.3)
        with offloaded(one) as (first, outer), offloaded(other) as (second, inner):
            if not wrapped:
                outer = inner = nullcontext
            for _ in range(3):
                with outer():
                    x = one(batch())
                    with inner():
                        y = other(x)
                    z = one(y)
                z.sum().backward()
                with outer(), inner():
                    loss = other(one(batch(4))).sum()
                loss.backward()
            del x, y, z, loss
            assert used_bytes(first) == used_bytes(second) == 0
        return [*gradients(one), *gradients(other)]

    assert all(map(same_bits, run(False), run(True)))


def test_two_offloads_of_one_model_leave_the_same_bits() -> None:
    def action(model: Net, block: Block) -> list[torch.Tensor]:
        with offloaded(model) as (_, second):
            for outer, inner in ((block, second), (second, block)):
                with outer():
                    loss = loss_of(model, inner)
                loss.backward()
        return gradients(model)

    mine = alone(lambda model, _: action(model, nullcontext))
    assert all(map(same_bits, mine[0], moved(action)[0]))


def test_forward_pass_in_another_thread_is_refused() -> None:
    model = net()
    with offloaded(model) as (_, block):
        with block():
            with pytest.raises(StateError, match="another thread"):
                in_thread(lambda: block().__enter__())
            loss = model(batch()).sum()
        loss.backward()
        assert len(in_thread(lambda: forward_in_a_thread(model, block))) == 20


def test_rollout_in_another_thread_leaves_attached_pass_alone() -> None:
    """A rollout without gradients, in the middle of a training step."""
    runs = [True]

    def rollout(number: int, x: torch.Tensor) -> torch.Tensor:
        if number == 4 and runs and runs.pop():
            in_thread(torch.no_grad()(lambda: model(batch())))
        return x

    model = net()
    model.seen = rollout
    with offloaded(model, "attach") as (activations, _):
        stepped(model)
        with disable_saved_tensors_hooks("hooks are left"):
            pass
        assert left_bytes(activations) > 0


def test_many_backward_passes_at_once() -> None:
    """Of graphs that share nothing but the arena, and of one graph that is kept."""
    expected = alone(pipeline, 1)[0]
    model = net()
    parameters = list(model.parameters())
    with offloaded(model, prefetch=2) as (activations, block):
        for _ in range(5):
            losses = [loss_of(model, block, number) for number in range(8)]
            made: list[Any] = [None] * 16

            def work(number: int, losses: Any = losses, made: Any = made) -> None:
                made[number] = torch.autograd.grad(
                    losses[number // 2], parameters, retain_graph=True
                )

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
        assert used_bytes(activations) == 0


# ---- Forward passes that end early, and graphs that are dropped.


class Broken(Exception):
    """Of a layer."""


@pytest.mark.parametrize("entry", ["with", "attach"])
@pytest.mark.parametrize("at", range(5))
def test_an_exception_in_a_layer_comes_through_and_loses_nothing(at: int, entry: str) -> None:
    def breaks(number: int, x: torch.Tensor) -> torch.Tensor:
        if number == at:
            raise Broken
        return x

    model = net()
    expected = stepped(net())
    with offloaded(model, entry) as (activations, block):
        for _ in range(3):
            model.seen = breaks
            with pytest.raises(Broken), block():
                model(batch())
            gc.collect()
            assert used_bytes(activations) == 0
            model.seen = as_given
            assert all(map(same_bits, stepped(model, block), expected))
            assert used_bytes(activations) == 0


def test_exception_holding_graph_does_not_stop_next_forward_pass() -> None:
    """Its arena is full of what the exception's frames hold."""
    model = net()
    expected = stepped(net())
    room = 3 * 4 * ROWS * WIDTH * 4
    with offloaded(model, host_bytes=room) as (activations, block):
        held_errors = []
        for _ in range(4):
            try:
                with block():
                    loss = model(batch()).sum()
                    raise Broken
            except Broken as why:
                held_errors.append((why, loss))
            assert all(map(same_bits, stepped(model, block), expected))
        del loss
        for _, one in held_errors:
            one.backward()
        held_errors.clear()
        gc.collect()
        assert used_bytes(activations) == 0


# ---- Lives.


def test_an_offload_that_is_closed_brings_back_what_is_away() -> None:
    expected = alone(kept_graph, 1)[0]
    model = net()
    with offloaded(model) as (activations, block):
        loss = loss_of(model, block)
        activations.close()
        for last in (False, False, False, True):
            loss.backward(retain_graph=not last)
        assert all(map(same_bits, expected, gradients(model)))
        for call in (block().__enter__, activations.attach, activations.stats):
            with pytest.raises(StateError, match="closed"):
                call()
    assert not is_hooked(model)


@pytest.mark.parametrize("kept", [True, False], ids=["graph kept", "graph dropped"])
@pytest.mark.parametrize("entry", ["with", "attach"])
def test_dropped_offload_removes_hooks_and_returns_everything(entry: str, kept: bool) -> None:
    expected = stepped(net())
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
        assert all(map(same_bits, expected, gradients(model)))
        del loss
        gc.collect()
        assert gone() is None
    assert not is_hooked(model)


def test_copied_or_pickled_model_leaves_offload_alone() -> None:
    """As TRL does for a reference model, and torch.optim.swa_utils for averages."""
    model = net()
    with offloaded(model, "attach") as (activations, block):
        expected = stepped(model)
        before = figures(activations)
        other = copy.deepcopy(model)
        third = pickle.loads(pickle.dumps(model))
        for one in (other, third):
            assert all(map(same_bits, stepped(one), expected))
            assert figures(activations) == before
        stepped(other, block)  # in a block, as any code is
        stepped(model)
        assert left_bytes(activations) > 0
    stepped(other)


def test_attached_only_while_the_model_trains() -> None:
    model = net()
    with offloaded(model) as (activations, _):
        stepped(model)
        assert left_bytes(activations) == 0
        assert activations.attach() is activations
        activations.attach()
        stepped(model)
        assert is_hooked(model)
        assert left_bytes(activations) > 0
        figures_before = figures(activations)
        model.eval()
        stepped(model)
        with torch.no_grad():
            model.train()(batch())
        assert figures(activations) == figures_before
        activations.detach()
        activations.detach()
        stepped(model)
        assert figures(activations) == figures_before
    assert not is_hooked(model)


def test_layers_have_to_be_modules_of_the_model_side_by_side() -> None:
    model = net()
    refused: list[tuple[Any, str]] = [
        ([nn.Linear(2, 2)], "not a module of the model"),
        ([model.layers[0], model.layers[0][1]], "inside another"),  # type: ignore[index]
        ([model.layers[0], model], "inside another"),
        ([], "no layers"),
    ]
    for layers, said in refused:
        with pytest.raises(InvalidError, match=said):
            refit.ActivationOffload(model, layers, host_bytes="1MiB")
    for module in (model.layers, model):
        refit.ActivationOffload(model, [module], host_bytes="1MiB").close()
    with pytest.raises(RefitError):
        refit.ActivationOffload(nn.Sequential(nn.Linear(3, 3)), host_bytes="1MiB")
    with pytest.raises((RefitError, TypeError, ValueError)):
        refit.ActivationOffload(model, [3], host_bytes="1MiB")  # type: ignore[list-item]
    assert not is_hooked(model)


BAD_OPTIONS: list[dict[str, Any]] = [
    {"host_bytes": None},
    *({"host_bytes": one} for one in (0, -1, "much", 1 << 60)),
    *({"in_flight": one} for one in (0, 17)),
    *({"prefetch": one} for one in (-1, 17)),
    {"keep_last": 1025},
    {"aim": "speed"},
    {"min_bytes": "few"},
]


@pytest.mark.parametrize("options", BAD_OPTIONS, ids=str)
def test_invalid_options_are_refused_before_hooks_are_added(
    options: dict[str, Any],
) -> None:
    model = net()
    with pytest.raises(RefitError):
        refit.ActivationOffload(model, model.layers, **{"host_bytes": "1MiB", **options})
    assert not is_hooked(model)


def test_close_in_a_block_is_refused() -> None:
    model = net()
    with offloaded(model) as (activations, block):
        with block():
            with pytest.raises(StateError, match="forward pass"):
                activations.close()
            loss = model(batch()).sum()
        loss.backward()


def test_what_is_saved_after_a_model_that_is_inside_another() -> None:
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
            return stepped(model)
        with offloaded(model, entry) as (_, block):
            return stepped(model, block)

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
    assert_same(mine, theirs)
