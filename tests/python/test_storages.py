"""What can leave and what cannot: decided by storage, before anything is moved."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from refit import Controller  # noqa: E402
from refit.states.storages import opened  # noqa: E402
from training import Run, assert_same, whole_cycle  # noqa: E402


def first_state(run: Run) -> dict[str, Any]:
    state: dict[str, Any] = run.optimizer.state[next(run.model.parameters())]
    return state


def why(controller: Any, name: str) -> str:
    return "; ".join(reason for found, reason in controller.resident if found == name)


NAME = "0.weight.exp_avg"


def from_buffer(like: Any) -> Any:
    return torch.frombuffer(bytearray(like.numpy().tobytes()), dtype=like.dtype).view_as(like)


@pytest.mark.parametrize(
    ("made", "reason"),
    [(from_buffer, "fixed in its place"), (lambda t: t.clone().share_memory_(), "share_memory_()")],
    ids=["frombuffer", "shared"],
)
def test_memory_shared_or_seen_through_another_tensor_stays(made: Any, reason: str) -> None:
    # trap 6
    run, same = Run(), Run()
    run.step(), same.step()
    state = first_state(run)
    state["exp_avg"] = made(state["exp_avg"])
    with Controller(run.optimizer, run.model) as controller:
        controller.offload()
        assert reason in why(controller, NAME)
        assert state["exp_avg"].untyped_storage().nbytes() > 0
        assert state["exp_avg_sq"].untyped_storage().nbytes() == 0
        run.step(), same.step()
    assert_same(run, same)


@pytest.mark.parametrize("kind", ["parameter", "buffer", "gradient", "another model's parameter"])
def test_memory_that_other_code_knows_stays(run: Run, kind: str) -> None:
    # traps 2 and 3
    state = first_state(run)
    parameter = next(run.model.parameters())
    if kind == "buffer":
        run.model.register_buffer("seen", state["exp_avg"].view(-1))
    elif kind == "gradient":
        parameter.grad = state["exp_avg"]
    elif kind == "parameter":
        parameter.data = state["exp_avg"]
    else:
        run.model.register_parameter("other", torch.nn.Parameter(state["exp_avg"].t()))
    grads: Any = "discard" if kind == "gradient" else "keep"
    with Controller(run.optimizer, run.model, grads=grads) as controller:
        controller.accumulating = False
        controller.offload()
        assert "also that of" in why(controller, NAME)
        assert state["exp_avg"].untyped_storage().nbytes() > 0
        assert state["exp_avg_sq"].untyped_storage().nbytes() == 0


def test_a_storage_with_one_tensor_that_stays_stays_whole(run: Run, controller: Controller) -> None:
    # traps 2 and 8: a step counter in the same buffer
    state = first_state(run)
    numel = state["exp_avg"].numel()
    flat = torch.zeros(numel + 1, device=run.device)
    flat[0] = 1.0
    state["step"] = flat[0]
    state["exp_avg"] = flat[1:].view_as(state["exp_avg"])
    controller.offload()
    assert flat.untyped_storage().nbytes() > 0
    assert why(controller, NAME) == "its memory is also that of 0.weight.step, which stays"


def test_states_in_one_buffer_leave_as_one(
    run: Run, reference_run: Run, controller: Controller
) -> None:
    # traps 1 and 2
    moments = run.moments()
    flat = torch.cat([t.reshape(-1) for t in moments])
    parts = iter(flat.split([t.numel() for t in moments]))
    for state in run.optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = next(parts).view_as(state[key])
    controller.offload()
    assert flat.untyped_storage().nbytes() == 0
    assert controller.stats()["refit/regions"] == 1
    run.step(), reference_run.step()


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.t().contiguous().t(),
        lambda t: torch.stack([t, t])[1],
        lambda t: t.to(torch.float64),
        lambda t: t.to(torch.bfloat16),
        lambda t: t.to(torch.float16),
        lambda t: t.to(torch.float8_e4m3fn),
        lambda t: t[:1].expand(3, -1),
        lambda t: torch.complex(t, t),
    ],
    ids=["transposed", "offset", "fp64", "bf16", "fp16", "fp8", "expanded", "complex"],
)
def test_layouts_and_dtypes_return_exactly(run: Run, controller: Controller, change: Any) -> None:
    # trap 4
    state = first_state(run)
    state["exp_avg"] = change(state["exp_avg"])
    before = state["exp_avg"]
    bytes_before = bytes(before.untyped_storage().cpu())
    shape = (before.shape, before.stride(), before.storage_offset(), before.dtype)
    controller.offload()
    assert before.untyped_storage().nbytes() == 0
    controller.prepare_for_training()
    assert state["exp_avg"] is before
    assert bytes(before.untyped_storage().cpu()) == bytes_before
    assert (before.shape, before.stride(), before.storage_offset(), before.dtype) == shape


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda: torch.eye(4).to_sparse(), "strided"),
        (lambda: torch.empty(4, device="meta"), "meta"),
        (lambda: torch.eye(4).as_subclass(type("Mine", (torch.Tensor,), {})), "Mine"),
        (lambda: object(), "a object is not looked into"),
    ],
    ids=["sparse", "meta", "subclass", "object"],
)
def test_what_has_no_plain_storage_stays_and_is_named(
    run: Run, controller: Controller, made: Any, reason: str
) -> None:  # traps 5 and 6
    first_state(run)["extra"] = made()
    controller.offload()
    assert reason in why(controller, "0.weight.extra")
    assert first_state(run)["exp_avg"].untyped_storage().nbytes() == 0
    controller.prepare_for_training()
    controller.offload()


def test_empty_and_0_dim_tensors_stay(run: Run, controller: Controller) -> None:
    # trap 4
    state = first_state(run)
    state["none"] = torch.empty(0, 3, device=run.device)
    state["scale"] = torch.tensor(2.0, device=run.device)
    controller.offload()
    assert float(state["scale"]) == 2.0
    assert why(controller, "0.weight.scale") == "a 0-dim tensor stays where it is"
    assert why(controller, "0.weight.none") == ""


def test_tensors_in_lists_and_dicts_are_found(run: Run, controller: Controller) -> None:
    first, second = torch.ones(5, device=run.device), torch.ones(6, device=run.device)
    first_state(run)["old"] = [first, {"new": (second,)}]
    controller.offload()
    assert first.untyped_storage().nbytes() == second.untyped_storage().nbytes() == 0
    controller.prepare_for_training()
    assert float(first.sum() + second.sum()) == 11.0


def test_nothing_is_added_to_a_state(run: Run, controller: Controller) -> None:
    # trap 7
    unused = torch.nn.Parameter(torch.ones(3, device=run.device))
    run.optimizer.add_param_group({"params": [unused]})
    whole_cycle(controller)
    assert unused not in run.optimizer.state


def test_only_the_configured_device_is_moved() -> None:
    # trap 6
    run = Run()
    run.step()
    with Controller(run.optimizer, device="cuda:0") as controller:
        controller.offload()
        assert not run.away()
        assert any("device: cuda:0" in reason for _, reason in controller.resident)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    """A mesh of this process alone."""
    import ranks
    from torch.distributed.device_mesh import init_device_mesh

    ranks.join(0, 1, tmp_path)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("grads", ["keep", "discard"])
def test_a_dtensor_holds_its_local_tensor_and_its_mesh_is_none(mesh: Any, grads: Any) -> None:
    # trap 2; a newer PyTorch names the mesh among what a DTensor holds
    from torch.distributed.tensor import Shard, distribute_tensor

    weight = torch.nn.Parameter(distribute_tensor(torch.ones(8), mesh, [Shard(0)]))
    optimizer = torch.optim.AdamW([weight])
    with Controller(optimizer, device="host", grads=grads) as controller:
        for _ in range(2):
            (weight * 2).sum().backward()
            optimizer.step()
            if grads == "discard":
                weight.grad = None
            controller.offload()
            state = optimizer.state[weight]["exp_avg"]
            assert [inner.untyped_storage().nbytes() for _, inner in opened(state)] == [0]
            with controller.checkpoint() as saved:
                assert saved["param_groups"]
            controller.restore()
    assert optimizer.state[weight]["exp_avg"].to_local().untyped_storage().nbytes() == 8 * 4
