"""Hooks on optimizers: on the innermost one, before those of others, and gone when not needed."""

import logging
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import refit  # noqa: E402
from refit import Controller  # noqa: E402
from refit.errors import InvalidError  # noqa: E402
from refit.states.optimizers import innermost, innermost_of  # noqa: E402
from schedules import Schedule  # noqa: E402
from training import Run, assert_same, hooks_of  # noqa: E402


class Wrapper:
    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer


class WrappingOptimizer(torch.optim.Optimizer):
    """An optimizer itself, as accelerate's is, around the one that steps."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.state = optimizer.state


class OptimizerAdapter:
    """What a framework hands over: see ``refit.states.optimizers.OptimizerAdapter``."""

    def __init__(self, *inner: Any) -> None:
        self.inner = list(inner)
        self.masters: list[tuple[str, Any]] = []
        self.resident: list[tuple[str, str]] = []

    def tensors(self) -> list[tuple[str, Any]]:
        return self.masters

    def others(self) -> list[tuple[str, Any]]:
        return []


def test_wrappers_are_opened_to_the_optimizer_that_steps(run: Run) -> None:
    assert innermost(run.optimizer) is run.optimizer
    assert innermost(Wrapper(WrappingOptimizer(run.optimizer))) is run.optimizer
    assert innermost_of([run.optimizer, Wrapper(run.optimizer)]) == [run.optimizer]


def test_a_wrapper_around_itself_or_around_nothing_is_refused() -> None:
    circle = Wrapper(None)
    circle.optimizer = circle
    for wrong in (circle, Wrapper(None), Wrapper(3)):
        with pytest.raises(InvalidError, match="not a torch optimizer"):
            innermost(wrong)


def test_an_optimizer_that_takes_no_hooks_is_refused(schedule: Schedule) -> None:
    class Bare(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            self.param_groups = [{"params": list(parameters)}]
            self.state = {}  # type: ignore[assignment]

    model = torch.nn.Linear(4, 4)
    with pytest.raises(InvalidError, match="a Bare takes no hooks on its step, because it never"):
        schedule.open(Bare(model.parameters()), model)


def test_ours_runs_before_the_hooks_of_others(run: Run) -> None:
    seen: list[bool] = []
    run.optimizer.register_step_pre_hook(lambda *_: seen.append(run.away()))
    run.optimizer.register_state_dict_pre_hook(lambda *_: seen.append(run.away()))
    with Controller(Wrapper(WrappingOptimizer(run.optimizer))) as controller:
        controller.offload()
        assert run.away()
        run.step()
        controller.offload()
        run.optimizer.state_dict()
    assert seen == [False, False]


def test_a_distributed_checkpoint_may_step_to_make_states(torch_device: str) -> None:
    # trap 16: it calls step() to make the states, in the midst of a cycle
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    run = Run(device=torch_device)
    with Controller(run.optimizer, run.model) as controller:
        controller.offload()
        found = get_optimizer_state_dict(run.model, run.optimizer)
        assert len(found["state"]) == 4
        controller.offload()
        assert run.away()
        again = get_optimizer_state_dict(run.model, run.optimizer)
        assert again["state"]["0.weight"]["exp_avg"].untyped_storage().nbytes() > 0


def test_a_refused_controller_leaves_no_hook(run: Run, controller: Controller) -> None:
    other = Run(device=run.device)
    with pytest.raises(refit.RefitError, match="controller already"):
        Controller([other.optimizer, run.optimizer])
    assert not hooks_of(other.optimizer)


def test_what_else_a_framework_holds_moves_with_the_states(run: Run) -> None:
    # traps 2 and 3: fp32 masters are parameters of the inner optimizer, and no weights
    masters = list(run.model.parameters())
    values = [one.detach().clone() for one in masters]
    held = OptimizerAdapter(run.optimizer)
    held.masters = [(f"master.{index}", one) for index, one in enumerate(masters)]
    held.resident = [("hybrid", "it places its states by itself")]
    with Controller(held) as controller:
        controller.offload()
        assert run.away()
        assert all(one.untyped_storage().nbytes() == 0 for one in masters)
        assert held.resident[0] in controller.resident
        controller.prepare_for_training()
        assert all(map(torch.equal, masters, values))


def test_hooks_outlive_a_failed_step(run: Run, reference_run: Run, controller: Controller) -> None:
    controller.offload()
    with pytest.raises(ZeroDivisionError):
        run.optimizer.step(lambda: 1 / 0)
    assert controller.state == "training"
    controller.offload()
    run.step(), reference_run.step()


def test_a_compiled_step_brings_the_states_back(caplog: pytest.LogCaptureFixture) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def train(run: Run, controller: Any) -> list[int]:
        counts = []
        step = torch.compile(run.optimizer.step, backend=backend)
        graphs.clear()
        for number in range(5):
            if controller is not None and number != 1:
                controller.offload()
                assert run.away()
            run.backward()
            step()
            counts.append(len(graphs))
        return counts

    caplog.set_level(logging.WARNING)
    same, run = Run(), Run()
    same.step(), run.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", DeprecationWarning)  # of PyTorch's own modules
        train(same, None)
        with Controller(run.optimizer, run.model) as controller:
            counts = train(run, controller)
            assert controller.state == "training"
    assert counts[-1] == counts[1] > 0
    assert_same(run, same)
    assert not [one for one in caplog.records if "refit" in one.getMessage()]
