"""Gradients while states are away: kept, zeroed or discarded, and never lost by accident."""

import pickle
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from refit import Controller  # noqa: E402
from refit.errors import InvalidError, StateError  # noqa: E402
from refit.states.grads import Accumulation  # noqa: E402
from refit.states.storages import opened  # noqa: E402
from training import Run, Wrapper, hooks_of  # noqa: E402


def gradients(run: Run) -> list[Any]:
    return [p.grad for p in run.model.parameters()]


def are_away(grads: list[Any]) -> bool:
    return all(grad.untyped_storage().nbytes() == 0 for grad in grads)


def are_zero(grads: list[Any]) -> bool:
    return not any(bool(grad.any()) for grad in grads)


def use(run: Run) -> None:
    """A backward pass and a step, whose gradients stay."""
    run.backward()
    run.optimizer.step()


def test_kept_gradients_return_as_the_same_objects(run: Run, controller: Controller) -> None:
    run.backward()
    before = gradients(run)
    values = [grad.clone() for grad in before]
    controller.offload()
    assert are_away(before)
    controller.restore()
    assert all(map(lambda a, b: a is b, gradients(run), before))
    assert all(map(torch.equal, gradients(run), values))


@pytest.mark.parametrize("then", ["backward", "restore", "step"])
def test_an_accumulation_goes_on(
    run: Run, reference_run: Run, controller: Controller, then: str
) -> None:
    # trap 11, and TRL's generation between micro batches
    run.backward(), reference_run.backward()
    controller.offload()
    if then == "restore":
        controller.restore()
    if then != "step":
        run.backward(), reference_run.backward()  # brings the gradients back before it adds to them
    run.finish(), reference_run.finish()
    assert controller.state == "training"


class Meshed(Wrapper):
    """Holds a tensor and something else, as a DTensor holds its mesh."""

    names = ("shard", "mesh")


def test_gradients_that_hold_more_than_tensors_are_watched() -> None:
    # trap 5
    shard = torch.ones(3)
    gradient = Meshed(shard, object())
    assert list(opened(gradient)) == [(("shard",), shard)]
    watched = Accumulation(lambda: [(1, gradient)], lambda grad: True)
    assert watched.open
    watched.step_done()
    assert not watched.open
    shard.add_(1)
    assert watched.open


@pytest.mark.parametrize("foreach", [False, True])
def test_zero_grad_in_place_while_away_zeroes_gradients(torch_device: str, foreach: bool) -> None:
    # trap 10: on the empty storage it would be a fault of the process
    run = Run(lambda p: torch.optim.AdamW(p, foreach=foreach), torch_device)
    use(run)
    fresh = torch.nn.Parameter(torch.ones(3, device=run.device))
    run.optimizer.add_param_group({"params": [fresh]})
    with Controller(run.optimizer) as controller:
        controller.offload()
        fresh.grad = torch.ones_like(fresh)  # one that is here, among those that are away
        run.optimizer.zero_grad(set_to_none=False)
        run.model.zero_grad(set_to_none=False)
        assert not fresh.grad.any()
        assert controller.state == "cleared"
        assert are_away(gradients(run))
        assert not controller.accumulating
        controller.restore()
        assert are_zero(gradients(run))
        assert all(grad.is_contiguous() for grad in gradients(run))


def test_what_is_written_after_zero_grad_is_what_counts(run: Run, controller: Controller) -> None:
    run.backward()
    controller.offload()
    run.optimizer.zero_grad(set_to_none=False)
    first, second, *rest = gradients(run)
    first.fill_(2.0)
    second[0] = 1.0
    assert controller.state == "training"
    assert bool((first == 2).all())
    assert float(second.sum()) == 1.0
    assert are_zero(rest)
    first.zero_()
    controller.offload()
    controller.restore()
    assert not first.any()
    assert float(second.sum()) == 1.0


def test_zeroing_a_recorded_gradient_is_left_to_pytorch(run: Run, controller: Controller) -> None:
    run.backward()
    first = gradients(run)[0].requires_grad_()
    controller.offload()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        first.zero_()
    assert controller.state == "training"
    assert bool(first.any())


def test_what_guards_a_gradient_is_not_a_hook_to_warn_of(torch_device: str) -> None:
    leaf = torch.ones(4, device=torch_device, requires_grad=True)
    with Controller(torch.optim.SGD([leaf], lr=0.1)) as controller:
        (leaf * 2).sum().backward()
        controller.offload()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            copied = pickle.loads(pickle.dumps(leaf))
        assert torch.equal(copied, leaf)
        assert hooks_of(leaf)
        assert not hooks_of(copied)
        assert controller.state == "cleared"


def test_a_backward_pass_to_a_retained_gradient_brings_it_back(torch_device: str) -> None:
    leaf = torch.ones(4, device=torch_device, requires_grad=True)
    inner = leaf * 1
    inner.retain_grad()
    with Controller(torch.optim.SGD([inner], lr=0.1)) as controller:
        loss = (inner * 2).sum()
        loss.backward(retain_graph=True)
        controller.offload()
        assert inner.grad.untyped_storage().nbytes() == 0
        loss.backward()
        assert controller.state == "training"
        assert inner.grad.tolist() == [4, 4, 4, 4]


READS: dict[str, Any] = {
    "isnan": lambda run: not any(grad.isnan().any() for grad in gradients(run)),
    "item": lambda run: gradients(run)[1][0].item(),
    "norm": lambda run: torch.nn.utils.get_total_norm(gradients(run)).item(),
    "clip": lambda run: float(torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)),
    "clip, foreach": lambda run: float(
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.1, foreach=True)
    ),
    "clip values": lambda run: torch.nn.utils.clip_grad_value_(run.model.parameters(), 1e-4),
    "scale": lambda run: torch._foreach_mul_(gradients(run), 0.5) and None,
    "one": lambda run: gradients(run)[0].mul_(2) is None,
    "unscale": lambda run: torch._amp_foreach_non_finite_check_and_unscale_(
        gradients(run), torch.zeros(1, device=run.device), torch.ones(1, device=run.device)
    ),
    "data": lambda run: gradients(run)[0].data.mul_(3) is None,
    "add": lambda run: setattr(next(run.model.parameters()), "grad", gradients(run)[0] + 1),
    "copy": lambda run: gradients(run)[2].copy_(torch.ones(4, 24)) is None,
    "from": lambda run: torch.zeros(4, device=run.device).copy_(gradients(run)[3]).tolist(),
    "model to": lambda run: run.model.to(torch.float64).to(torch.float32) and None,
}


@pytest.mark.parametrize("read", READS)
def test_a_use_finds_its_gradient(
    run: Run, reference_run: Run, controller: Controller, read: str
) -> None:
    run.backward(), reference_run.backward()
    controller.offload()
    grads = gradients(run)
    assert grads[0].shape == next(run.model.parameters()).shape
    assert are_away(grads)
    assert controller.state == "cleared"
    assert READS[read](run) == READS[read](reference_run)
    assert controller.state == "training"
    assert all(map(torch.equal, gradients(run), gradients(reference_run)))
    run.finish(), reference_run.finish()


@pytest.mark.parametrize("policy", ["discard", "zero"])
def test_losing_gradients_is_refused_during_accumulation(run: Run, policy: Any) -> None:
    # trap 11
    with Controller(run.optimizer, grads=policy) as controller:
        assert not controller.accumulating
        run.backward()
        assert controller.accumulating
        values = [grad.clone() for grad in gradients(run)]
        with pytest.raises(StateError, match="accumulation is open"):
            controller.offload()
        assert not run.away()
        assert all(map(torch.equal, gradients(run), values))
        run.optimizer.step()
        assert not controller.accumulating  # used, though still there
        controller.offload()
        assert run.away()


def test_discarded_gradients_are_gone_and_zeroed_ones_are_zero(run: Run) -> None:
    with Controller(run.optimizer, grads="discard") as controller:
        use(run)
        controller.offload()
        assert gradients(run) == [None] * 4
    with Controller(run.optimizer, grads="zero") as controller:
        use(run)
        before = gradients(run)
        controller.offload()
        assert are_away(before)
        controller.restore()
        assert all(map(lambda a, b: a is b, gradients(run), before))
        assert are_zero(before)


def test_gradients_made_while_states_are_away_are_not_discarded(run: Run) -> None:
    with Controller(run.optimizer, grads="discard") as controller:
        controller.offload()
        run.backward()
        controller.offload()
        assert all(grad is not None for grad in gradients(run))


def test_what_is_said_by_hand_holds_until_the_next_step(run: Run) -> None:
    with Controller(run.optimizer, grads="discard") as controller:
        controller.accumulating = True
        with pytest.raises(StateError):
            controller.offload()
        run.step()
        assert not controller.accumulating
        run.backward()
        controller.accumulating = False
        controller.offload()
        assert gradients(run) == [None] * 4


@pytest.mark.parametrize(("policy", "zeroed"), [("keep", False), ("keep", True), ("zero", True)])
def test_accumulating_counts_gradients_that_are_away(run: Run, policy: Any, zeroed: bool) -> None:
    # trap 11
    with Controller(run.optimizer, grads=policy) as controller:
        run.backward()
        if zeroed:
            run.optimizer.zero_grad(set_to_none=False)
        assert controller.accumulating is not zeroed
        controller.offload()
        assert are_away(gradients(run))
        assert controller.accumulating is not zeroed
        controller.restore()
        assert controller.accumulating is not zeroed
        run.step()
        assert not controller.accumulating


def test_used_gradients_are_not_an_accumulation(run: Run, controller: Controller) -> None:
    # trap 11: without zero_grad the same tensors are added to
    for goes in (False, True):
        use(run)
        assert not controller.accumulating
        if goes:
            controller.offload()
            assert not controller.accumulating
        run.backward()  # brings them back and adds to them
        assert controller.accumulating
        run.finish()


def test_what_replaces_a_gradient_that_is_away_counts(run: Run, controller: Controller) -> None:
    run.backward()
    controller.offload()
    run.optimizer.zero_grad(set_to_none=False)
    assert not controller.accumulating
    gradients(run)[0].fill_(2.0)
    next(run.model.parameters()).grad = torch.ones_like(next(run.model.parameters()))
    assert controller.accumulating
    run.optimizer.zero_grad()
    assert not controller.accumulating


def test_gradients_that_are_views_move_with_their_buffer(run: Run, controller: Controller) -> None:
    # trap 2
    parameters = list(run.model.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters), device=run.device)
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad = part.view_as(p)
    run.backward()
    values = flat.clone()
    controller.offload()
    assert flat.untyped_storage().nbytes() == 0
    controller.restore()
    assert torch.equal(flat, values)
    assert gradients(run)[1].untyped_storage().data_ptr() == flat.data_ptr()


def test_an_unknown_policy_is_refused(run: Run) -> None:
    with pytest.raises(InvalidError, match="keep, discard or zero"):
        Controller(run.optimizer, grads="lose")  # type: ignore[arg-type]
