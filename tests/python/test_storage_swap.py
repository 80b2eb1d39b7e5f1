"""States whose memory PyTorch will not resize: they leave all the same, and return to the bit."""

import io
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import numpy as np  # noqa: E402
import refit  # noqa: E402
import refit.states.storage_swap  # noqa: E402
from interrupts import AtLine  # noqa: E402
from refit import Controller  # noqa: E402
from training import Run  # noqa: E402


@pytest.fixture
def run() -> Run:
    """On the CPU: a GPU's storages can be resized."""
    made = Run()
    made.step(2)
    return made


def freed(run: Run) -> list[bool]:
    return [moment.untyped_storage().nbytes() == 0 for moment in run.moments()]


def reloaded(run: Run) -> Any:
    file = io.BytesIO()
    torch.save(run.optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file)


def first(run: Run) -> Any:
    return run.optimizer.state[next(run.model.parameters())]["exp_avg"]


def become_numpys(run: Run, _view: Any) -> tuple[Any, Any]:
    """The memory, and what is in it."""
    owned = first(run).numpy().copy()
    run.optimizer.state[next(run.model.parameters())]["exp_avg"] = torch.from_numpy(owned)
    return owned, owned.copy()


FIXES: dict[str, Callable[[Run, Any], Any]] = {
    "a load": lambda run, _: run.optimizer.load_state_dict(reloaded(run)),
    "an array": lambda run, _: first(run).numpy() is None,
    "an array of a view": lambda _, view: view.numpy() is None,
    "memory of numpy": become_numpys,
}


@pytest.mark.parametrize("when", ["training", "cleared", "returning"])
@pytest.mark.parametrize("fix", FIXES)
def test_states_that_pytorch_fixes_leave_and_return(
    run: Run, reference_run: Run, controller: Controller, fix: str, when: str
) -> None:
    for _ in range(3):
        view = first(run).detach()
        if when != "training":
            controller.offload()
        if when == "returning":
            controller.restore()
        numpys = FIXES[fix](run, view)
        del view
        assert all(freed(run)) == (fix == "an array of a view" and when == "cleared")
        moments = run.moments()
        controller.offload()
        assert all(freed(run))
        controller.restore()
        run.step(), reference_run.step()
        assert all(a is b for a, b in zip(moments, run.moments(), strict=True))
        assert not numpys or np.array_equal(*numpys)  # nothing of refit's is written there
    with controller.checkpoint() as states:
        assert states["state"]


def in_one_buffer(run: Run) -> tuple[dict[str, Any], Any]:
    """Puts two moments into one storage: their state, and a tensor of it."""
    state = run.optimizer.state[next(run.model.parameters())]
    flat = torch.stack([state["exp_avg"], state["exp_avg_sq"]])
    state["exp_avg"], state["exp_avg_sq"] = flat[0], flat[1]
    return state, flat


def share_memory(state: dict[str, Any]) -> bool:
    one, other = (state[key].untyped_storage() for key in ("exp_avg", "exp_avg_sq"))
    return bool(one.data_ptr() == other.data_ptr())


def test_tensors_of_one_buffer_still_share_it(
    run: Run, reference_run: Run, controller: Controller
) -> None:
    state, flat = in_one_buffer(run)
    controller.offload()
    flat.numpy()
    controller.restore()
    assert share_memory(state)
    run.step(), reference_run.step()


def test_ctrl_c_in_a_swap_loses_nothing(
    run: Run, reference_run: Run, controller: Controller
) -> None:
    for at in range(1, 100):
        state, flat = in_one_buffer(run)
        controller.offload()
        flat.numpy()
        interrupt = AtLine(at, within=refit.states.storage_swap.__file__)
        with suppress(KeyboardInterrupt), interrupt:
            controller.restore()
        controller.restore()
        assert share_memory(state)
        run.step(), reference_run.step()
        if not interrupt.done:
            break
    assert at > 10


def test_an_array_that_is_held_keeps_its_state(
    run: Run, reference_run: Run, controller: Controller
) -> None:
    array = first(run).numpy()
    controller.offload()
    assert freed(run).count(False) == 1
    assert any("drop the NumPy array" in reason for _, reason in controller.resident)
    run.step(), reference_run.step()
    assert np.array_equal(array, first(run).numpy())  # still one memory
    del array
    controller.offload()
    assert all(freed(run))
    run.step(), reference_run.step()


@pytest.mark.parametrize("verb", ["clear", "restore"])
def test_without_memory_for_others_a_verb_is_called_again(
    run: Run, reference_run: Run, controller: Controller, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("not enough memory")

    if verb == "clear":
        run.optimizer.load_state_dict(reloaded(run))
        module, error = "storage_swap", pytest.raises(refit.HostMemoryError, match="nothing has")
    else:
        view = first(run).detach()
        controller.offload()
        view.numpy()
        module, error = "regions", pytest.raises(refit.DeviceMemoryError)
    with monkeypatch.context() as patch, error:
        patch.setattr(f"refit.states.{module}.empty_storage", fails)
        getattr(controller, verb)()
    assert any(freed(run)) == (verb == "restore")
    getattr(controller, verb)()
    run.step(), reference_run.step()


@pytest.mark.parametrize("away", [False, True])
def test_kept_gradients_that_were_made_arrays_leave_and_return(
    run: Run, reference_run: Run, controller: Controller, away: bool
) -> None:
    run.backward(), reference_run.backward()
    gradient = next(run.model.parameters()).grad
    view = gradient.detach() if away else None
    for _ in range(2):
        if not away:
            gradient.numpy()
        controller.offload()
        assert gradient.untyped_storage().nbytes() == 0
        if view is not None:
            view.numpy()
        controller.prepare_for_training()
    assert next(run.model.parameters()).grad is gradient
    assert torch.equal(gradient, next(reference_run.model.parameters()).grad)
    run.step(), reference_run.step()


def test_it_is_said_once_that_no_state_leaves(run: Run, controller: Controller) -> None:
    for state in run.optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key].share_memory_()
    with pytest.warns(UserWarning, match="no optimizer state leaves.*share_memory_"):
        controller.offload()
    run.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state["exp_avg"] = state["exp_avg"].clone().share_memory_()  # decided again
        controller.offload()
