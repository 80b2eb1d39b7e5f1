"""What a tiny probe of an optimizer tells: the states to come, whether parameters may be stepped
apart, whether one may be stepped in parts. And what it does not disturb."""

import inspect
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import training
from refit.errors import UnsupportedError
from refit.step.probe import ELEMENTWISE, Foreseen, StateLayout, kind_of_parameter, learn
from refit.step.stand_in import Stepping, arithmetic_of, flat, is_dense, part_of, stand_in
from torch import nn
from training import drawn

pytestmark = pytest.mark.usefixtures("default_device")

Optimizer = torch.optim.Optimizer


def learned(optimizer: Optimizer, **options: Any) -> StateLayout:
    parameter = optimizer.param_groups[0]["params"][0]
    return learn(optimizer, kind_of_parameter(0, parameter), **options)


def matrix(*shape: int) -> nn.Parameter:
    return nn.Parameter(drawn(*(shape or (6, 4))))


class Base(Optimizer):
    """What the optimizers below share; each is a way in which third-party ones step."""

    def __init__(self, parameters: Any, **defaults: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, **defaults})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            self.begin(group, parameters)
            for p in parameters:
                p.sub_(self.direction(group, p), alpha=group["lr"])
        return loss

    def begin(self, group: dict[str, Any], parameters: list[Any]) -> None:
        """What a step does for all parameters of a group."""

    def direction(self, group: dict[str, Any], p: Any) -> Any:
        """Where a parameter goes, once its states are up to date."""
        return p.grad


class Normalized(Base):
    """Reads the norm of all gradients."""

    def begin(self, group: dict[str, Any], parameters: list[Any]) -> None:
        self.norm = torch.stack([p.grad.norm() for p in parameters]).norm() if parameters else 1.0

    def direction(self, group: dict[str, Any], p: Any) -> Any:
        return p.grad / self.norm


class Clipped(Normalized):
    """The same, but only above a limit."""

    def direction(self, group: dict[str, Any], p: Any) -> Any:
        return p.grad * min(1.0, 500.0 / (float(self.norm) + 1e-6))


class Counting(Base):
    """Counts its steps in the group, and steps by the count."""

    def begin(self, group: dict[str, Any], parameters: list[Any]) -> None:
        group["k"] = group.get("k", 0) + 1

    def direction(self, group: dict[str, Any], p: Any) -> Any:
        mean = self.state[p].setdefault("mean", torch.zeros_like(p))
        return mean.lerp_(p.grad, 1 / group["k"]) / group["k"]


class Counter:
    """Counts calls, as a schedule may."""

    def __init__(self, *held: Any) -> None:
        self.calls = 0
        self.held = held

    def count(self) -> int:
        self.calls += 1
        return self.calls


@dataclass(slots=True)
class SlotCounter:
    """The same without a dict."""

    calls: int = 0

    def count(self) -> int:
        self.calls += 1
        return self.calls


class CountingInPlace(Base):
    """Counts by something that stays the same object."""

    def __init__(self, parameters: Any, counter: Any, count: Callable[[Any], Any]) -> None:
        super().__init__(parameters)
        self.counter = counter
        self.count = count

    def begin(self, group: dict[str, Any], parameters: list[Any]) -> None:
        group["lr"] = 1 / (self.count(self.counter) or 1)


class CountingBesides(Base):
    """Counts in a state that is of no parameter."""

    def begin(self, group: dict[str, Any], parameters: list[Any]) -> None:
        self.state["k"] = self.state.get("k", 0) + 1

    def direction(self, group: dict[str, Any], p: Any) -> Any:
        return p.grad / self.state["k"]


class Accumulating(Base):
    """Adds up, in the group, what it reads of parameters."""

    def direction(self, group: dict[str, Any], p: Any) -> Any:
        group["seen"] = group.get("seen", 0.0) + float(p.grad.abs().sum())
        return p.grad


class OutOfPlace(Base):
    """Makes its state anew in each step."""

    def direction(self, group: dict[str, Any], p: Any) -> Any:
        before = self.state[p].get("mean", torch.zeros_like(p))
        self.state[p]["mean"] = before * 0.9 + p.grad * 0.1
        return self.state[p]["mean"]


class Constant(Base):
    """Has a state whose size does not come from the parameter."""

    def direction(self, group: dict[str, Any], p: Any) -> Any:
        codes = self.state[p].setdefault("codes", torch.zeros(1000, device=p.device))
        codes[0] += float(p.grad.sum())
        return p.grad


class Flattened(Base):
    """Keeps its state as one row."""

    def direction(self, group: dict[str, Any], p: Any) -> Any:
        row = self.state[p].setdefault("row", torch.zeros(p.numel(), device=p.device))
        return row.add_(p.grad.flatten()).view_as(p)


class Squared(Base):
    """Keeps a square for each dimension."""

    def direction(self, group: dict[str, Any], p: Any) -> Any:
        square = torch.zeros(p.shape[0], p.shape[0], device=p.device)
        left = self.state[p].setdefault("left", square)
        return left.add_(p.grad @ p.grad.T) @ p.grad * 1e-8


class Rounding(Base):
    """Rounds at random."""

    def __init__(self, parameters: Any, draw: Callable[[], Any] = lambda: torch.rand(())) -> None:
        super().__init__(parameters)
        self.draw = draw

    def direction(self, group: dict[str, Any], p: Any) -> Any:
        return p.grad * float(self.draw())


class RoundingByItsOwn(Base):
    """The same, by a generator that it holds, at least once for a step."""

    def __init__(self, parameters: Any, source: Any, draw: Callable[[Any], Any]) -> None:
        super().__init__(parameters)
        self.source = source
        self.draw = draw

    def begin(self, group: dict[str, Any], parameters: list[Any]) -> None:
        self.draw(self.source)


class Closed(Base):
    """Cannot be stepped without a closure."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return closure()


class Outer(Base):
    """Steps another optimizer."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.base_optimizer = torch.optim.SGD(self.param_groups[0]["params"])


class Holding(Base):
    """Holds its parameters by itself."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.table = {"all": [(p, 0) for p in self.param_groups[0]["params"]]}


class HoldingInAnObject(Base):
    """Holds them in an object of another class."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.table = Counter(*self.param_groups[0]["params"])


class SteppingByItself(Base):
    """Makes states by a method that it holds: of the optimizer, whichever object is stepped."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.mean_of = self.make_mean

    def make_mean(self, p: Any) -> Any:
        return self.state[p].setdefault("mean", torch.zeros_like(p))

    def direction(self, group: dict[str, Any], p: Any) -> Any:
        return self.mean_of(p).add_(p.grad)


class Sharing(Base):
    """Keeps some of what it holds in the state of each parameter."""

    def __init__(self, parameters: Any, is_changed: bool = False) -> None:
        super().__init__(parameters)
        self.table = torch.ones(500, device=training.DEVICE)
        self.sum = torch.zeros(500, device=training.DEVICE)
        self.is_changed = is_changed

    def direction(self, group: dict[str, Any], p: Any) -> Any:
        state = self.state[p]
        if not state:
            state.update(mean=torch.zeros_like(p), part=self.table[:300], one=self.table[3])
        if self.is_changed:
            state.setdefault("sum", self.sum).add_(1)
        return state["mean"].add_(p.grad) * state["one"] * state["part"][0]


class Evaluated(Base):
    """Uses its states outside of step."""

    def eval(self) -> None:
        for state in self.state.values():
            state.clear()


TOGETHER = (Normalized, Clipped, Accumulating)
APART = (Counting, CountingBesides, OutOfPlace, Constant, Flattened, Squared)


@pytest.mark.parametrize("kind", TOGETHER)
def test_parameters_that_depend_on_each_other_are_refused(kind: Any) -> None:
    optimizer = kind([matrix()])
    with pytest.raises(UnsupportedError, match=f"{kind.__name__} ends with other values"):
        learned(optimizer)
    assert isinstance(learned(optimizer, allow_unverified=True), StateLayout)


@pytest.mark.parametrize("kind", APART)
def test_optimizer_stepping_each_parameter_by_itself_is_taken(kind: Any) -> None:
    assert not learned(kind([matrix()])).elementwise


@pytest.mark.parametrize("draw", [lambda: torch.rand(()), random.random, np.random.rand])
def test_an_optimizer_that_draws_random_numbers_is_refused(draw: Any) -> None:
    optimizer = Rounding([matrix()], draw)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with pytest.raises(UnsupportedError, match="Rounding draws random numbers"):
        learned(optimizer)
    learned(optimizer, allow_unverified=True)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), np.random.get_state()[1].tolist())


@pytest.mark.parametrize(
    ("hold", "held_by"),
    [
        (lambda one: one, lambda held: held),
        (lambda one: [one], lambda held: held[0]),
        (lambda one: Counter(one), lambda held: held.held[0]),
    ],
    ids=["itself", "in a list", "in an object"],
)
@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (lambda: torch.Generator().manual_seed(3), lambda one: torch.rand((), generator=one)),
        (lambda: random.Random(3), lambda one: one.random()),
        (lambda: np.random.default_rng(3), lambda one: one.random()),
        (lambda: np.random.RandomState(3), lambda one: one.rand()),
    ],
    ids=["torch", "random", "numpy", "legacy"],
)
def test_a_generator_of_the_optimizer_is_not_advanced(
    make: Any, draw: Any, hold: Any, held_by: Any
) -> None:
    source = make()
    optimizer = RoundingByItsOwn([matrix()], hold(source), lambda held: draw(held_by(held)))
    with pytest.raises(UnsupportedError, match="draws random numbers"):
        learned(optimizer)
    learned(optimizer, allow_unverified=True)
    assert draw(source) == draw(make())


def test_a_method_of_a_generator_draws_from_a_copy() -> None:
    source = random.Random(3)
    with pytest.raises(UnsupportedError, match="draws random numbers"):
        learned(Rounding([matrix()], source.random))
    assert source.random() == random.Random(3).random()


def add_one(held: Any) -> Any:
    held[-1] += 1
    return held[-1]


@pytest.mark.parametrize(
    ("counter", "count"),
    [
        (Counter(), lambda one: one.count()),
        (Counter(threading.Lock()), lambda one: one.count()),
        (SlotCounter(), lambda one: one.count()),
        (Counter().count, lambda one: one()),
        ([Counter()], lambda one: one[0].count()),
        ({"n": [0]}, lambda one: add_one(one["n"])),
        (deque([0]), add_one),
        (torch.zeros(1), add_one),
        (np.zeros(1), add_one),
    ],
    ids=["object", "lock", "slots", "method", "in a list", "dict", "deque", "tensor", "array"],
)
def test_an_object_that_a_step_changes_is_refused_by_name(counter: Any, count: Any) -> None:
    optimizer = CountingInPlace([matrix()], counter, count)
    with pytest.raises(UnsupportedError, match="a CountingInPlace changes counter in its step"):
        learned(optimizer)
    learned(optimizer, allow_unverified=True)
    assert count(counter) == 1


def test_what_a_step_only_reads_is_no_reason_to_refuse() -> None:
    model = nn.Linear(4, 4)
    optimizer = CountingInPlace([matrix()], Counter(model, threading.Lock()), lambda one: one.calls)
    optimizer.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    optimizer.table = np.ones(3)
    optimizer.text = Counter
    assert learned(optimizer).states == ()


def test_optimizer_making_states_by_held_method_is_refused() -> None:
    optimizer = SteppingByItself([matrix()])
    with pytest.raises(UnsupportedError, match="makes states by something that it holds"):
        learned(optimizer, allow_unverified=True)
    assert not optimizer.state


def test_what_parameters_share_and_only_read_stays() -> None:
    found = learned(Sharing([matrix()]))
    assert found.states == (Foreseen("mean", torch.float32, None),)
    assert found.stays == dict.fromkeys(("part", "one"), "parameters share it and only read it")
    assert found.written == {"mean"}


def test_a_state_that_parameters_share_and_change_is_refused() -> None:
    optimizer = Sharing([matrix()], is_changed=True)
    with pytest.raises(UnsupportedError, match="has one sum for several parameters"):
        learned(optimizer)
    assert learned(optimizer, allow_unverified=True).written == {"mean", "sum"}


def test_classes_that_begin_to_depend_later_are_refused_by_name() -> None:
    kind = type("Prodigy", (torch.optim.SGD,), {})
    with pytest.raises(UnsupportedError, match="a Prodigy estimates a rate from all parameters"):
        learned(kind([matrix()]))


def test_an_optimizer_that_cannot_be_tried_is_refused() -> None:
    optimizer = Closed([matrix()])
    with pytest.raises(UnsupportedError, match="could not be tried") as seen:
        learned(optimizer)
    assert isinstance(seen.value.__cause__, TypeError)
    assert learned(optimizer, allow_unverified=True) == StateLayout(None, False)


@pytest.mark.parametrize("allow_unverified", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Holding, HoldingInAnObject, Outer])
def test_an_optimizer_that_holds_parameters_is_refused(kind: Any, allow_unverified: bool) -> None:
    with pytest.raises(UnsupportedError, match="not in its groups alone"):
        learned(kind([matrix()]), allow_unverified=allow_unverified)


def test_optimizer_using_states_outside_step_is_refused() -> None:
    optimizer = Evaluated([matrix()])
    with pytest.raises(UnsupportedError, match=r"uses its states in eval\(\)"):
        learned(optimizer)
    assert learned(optimizer, allow_unverified=True).states == ()


@pytest.mark.parametrize(
    ("package", "name", "sentence"),
    [
        ("schedulefree", "AdamWScheduleFree", "uses its states in"),
        ("schedulefree", "SGDScheduleFree", "uses its states in"),
        ("schedulefree", "RAdamScheduleFree", "uses its states in"),
        ("pytorch_optimizer", "Prodigy", ""),
        ("pytorch_optimizer", "DAdaptAdam", ""),
        ("pytorch_optimizer", "MADGRAD", ""),
        ("prodigyopt", "Prodigy", ""),
        ("dadaptation", "DAdaptAdam", ""),
    ],
)
def test_optimizers_of_other_packages_are_refused(package: str, name: str, sentence: str) -> None:
    kind = getattr(pytest.importorskip(package), name)
    with pytest.raises(UnsupportedError, match=sentence):
        learned(kind([matrix()]))


def test_sizes_of_states_are_told_by_those_of_the_parameter() -> None:
    assert learned(Flattened([matrix()])).states == (Foreseen("row", torch.float32, ((0, 1),)),)
    assert learned(Squared([matrix()])).states == (Foreseen("left", torch.float32, ((0,), (0,))),)
    assert learned(Constant([matrix()])).states is None
    assert learned(OutOfPlace([matrix()])).states == (Foreseen("mean", torch.float32, None),)
    rows = Foreseen("row_var", torch.float32, ((0,), ()))
    columns = Foreseen("col_var", torch.float32, ((), (1,)))
    assert learned(torch.optim.Adafactor([matrix()])).states == (rows, columns)
    assert rows.like(torch.empty(40, 50)).shape == (40, 1)
    assert Foreseen("x", torch.float16, ((0, 1), ())).like(torch.empty(4, 5)).shape == (20, 1)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (1, 1), (5, 1), (3, 4), (2, 3, 4), (2, 1, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_states_are_foreseen_for_any_parameter(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    parameter = nn.Parameter(drawn(*shape, dtype=dtype))
    found = learned(torch.optim.AdamW([parameter]))
    assert found.states is not None
    assert found.elementwise == (shape != ())
    for one in found.states:
        assert one.like(parameter).shape == parameter.shape
        assert one.like(parameter).stride() == parameter.stride()


def test_a_state_has_the_strides_that_pytorch_would_give_it() -> None:
    for parameter in (
        nn.Parameter(drawn(4, 6).t()),
        nn.Parameter(drawn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)),
        nn.Parameter(drawn(6, 8)[:, ::2]),
    ):
        optimizer = torch.optim.Adam([parameter])
        parameter.grad = torch.ones_like(parameter)
        found = learned(optimizer)
        optimizer.step()
        assert found.states is not None
        for one in found.states:
            assert one.like(parameter).stride() == optimizer.state[parameter][one.key].stride()


def test_which_classes_are_stepped_in_parts() -> None:
    for name, kind in vars(torch.optim).items():
        if not inspect.isclass(kind) or name in ("Optimizer", "LBFGS"):
            continue
        parameter = matrix()
        if name == "SparseAdam":
            parameter.grad = drawn(6, 4).to_sparse(1)
        assert learned(kind([parameter])).elementwise == (kind in ELEMENTWISE), name

    class Mine(torch.optim.Adam):
        pass

    assert not learned(Mine([matrix()])).elementwise
    on_cpu = ("Adagrad",) if training.DEVICE == "cpu" else ()  # not every CUDA build has it
    for name in ("Adam", "AdamW", "SGD", *on_cpu):
        assert learned(getattr(torch.optim, name)([matrix()], fused=True)).elementwise, name


def test_an_optimizer_of_sparse_gradients_is_tried_with_those() -> None:
    assert learned(torch.optim.SparseAdam([matrix()])).states is not None


def test_nothing_is_disturbed() -> None:
    seen: list[str] = []
    parameter = matrix()
    optimizer = Counting([parameter])
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    parameter.grad = torch.ones_like(parameter)
    before, attributes = parameter.detach().clone(), dict(vars(optimizer))
    torch.manual_seed(5)
    expected = torch.rand(3), torch.rand_like(parameter)
    torch.manual_seed(5)
    learned(optimizer)
    assert torch.equal(torch.rand(3), expected[0])
    assert torch.equal(torch.rand_like(parameter), expected[1])
    assert torch.equal(parameter, before)
    assert not optimizer.state
    assert "k" not in optimizer.param_groups[0]
    assert vars(optimizer).keys() == attributes.keys()
    assert seen == []


def test_a_scaler_of_gradients_is_not_part_of_the_probe() -> None:
    optimizer = torch.optim.AdamW([matrix()], fused=True)
    optimizer.grad_scale = torch.tensor(4.0)
    optimizer.found_inf = torch.tensor(1.0)
    assert learned(optimizer).states


def test_a_learning_rate_that_is_a_tensor_stays_as_it_is() -> None:
    rate = torch.tensor(0.5)
    learned(torch.optim.SGD([matrix()], lr=rate, momentum=0.9))
    assert rate.item() == 0.5


def test_a_parameter_of_whole_numbers_is_refused() -> None:
    optimizer = torch.optim.SGD([torch.zeros(3, dtype=torch.int64, device=training.DEVICE)])
    with pytest.raises(UnsupportedError, match="has no gradient"):
        learned(optimizer)


def test_optimizer_with_fixed_groups_is_refused() -> None:
    class Fixed(torch.optim.SGD):
        param_groups = property(lambda _: [{"params": []}])

        def __init__(self) -> None:
            pass

    with pytest.raises(UnsupportedError, match="does not let its groups"):
        stand_in(Fixed(), [], {})


# ---- Steps of some parameters at a time.


def test_a_step_in_windows_counts_once() -> None:
    one, other = matrix(), matrix()
    optimizer = Counting([{"params": [one]}, {"params": [other]}, {"params": [matrix()]}])
    one.grad, other.grad = torch.ones_like(one), torch.ones_like(other)
    for number in (1, 2):
        stepping = Stepping(optimizer)
        states: dict[Any, Any] = {}
        for chosen in ([[one], [], []], [[], [other], []]):
            states.update(stepping.run(chosen, {}))
        assert all(group.get("k", 0) == number - 1 for group in optimizer.param_groups)
        idle = stepping.empty()
        arithmetic_of(optimizer)(idle)
        stepping.take(idle)
        stepping.finish()
        stepping.finish()
        assert [group["k"] for group in optimizer.param_groups] == [number] * 3
        assert torch.equal(states[one]["mean"], torch.ones_like(one) / number)
    assert not optimizer.state


def test_a_stand_in_shares_no_hook_and_no_step_of_the_object() -> None:
    optimizer = torch.optim.SGD([matrix()])
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("the hook ran"))
    optimizer.step = lambda: pytest.fail("the step of the object ran")
    made = stand_in(optimizer, [], {})
    made.step()
    assert type(made) is torch.optim.SGD


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.zeros(3, 4), True),
        (torch.zeros(3, 4).t(), True),
        (torch.zeros(1, 4).expand(3, 4), False),
        (torch.zeros(6, 4)[::2], False),
        (torch.zeros(6, 4)[2:4], True),
        (torch.zeros(0, 4), True),
        (torch.zeros(()), True),
        (torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), True),
        (torch.zeros(3, 4).to_sparse(), False),
    ],
)
def test_which_tensors_leave_no_gap(tensor: torch.Tensor, dense: bool) -> None:
    assert is_dense(tensor) == dense


def test_parts_of_a_parameter_are_views_in_the_order_of_memory() -> None:
    parameter = nn.Parameter(torch.arange(12.0, device=training.DEVICE).view(3, 4).t())
    parameter.grad = torch.zeros_like(parameter)
    part = part_of(parameter, 5, 3)
    assert part.tolist() == [5.0, 6.0, 7.0]
    with torch.no_grad():
        part.fill_(-1)
    assert flat(parameter.detach(), 0, 12).tolist() == [0, 1, 2, 3, 4, -1, -1, -1, 8, 9, 10, 11]
    assert part.grad is not None
    part.grad.add_(1)
    assert parameter.grad.sum() == 3
