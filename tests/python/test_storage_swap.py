"""States whose memory PyTorch will not resize: they leave all the same, and return to the bit."""

import io
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import numpy as np  # noqa: E402
import refit  # noqa: E402
import refit.storage_swap  # noqa: E402
from training import Run, assert_same  # noqa: E402


def pair() -> tuple[Run, Run]:
    run, same = Run(), Run()
    run.step(), same.step()
    return run, same


def freed(run: Run) -> list[bool]:
    return [moment.untyped_storage().nbytes() == 0 for moment in run.moments()]


def reloaded(run: Run) -> Any:
    file = io.BytesIO()
    torch.save(run.optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file)


def first(run: Run) -> Any:
    return run.optimizer.state[next(run.model.parameters())]["exp_avg"]


@pytest.mark.parametrize("when", ["before", "after", "away"])
def test_states_that_torch_load_gave_leave_and_return(when: str) -> None:
    run, same = pair()
    saved = reloaded(run)
    if when == "before":
        run.optimizer.load_state_dict(saved)
    with refit.Controller(run.optimizer, run.model) as controller:
        if when == "away":
            controller.clear()
        if when != "before":
            run.optimizer.load_state_dict(saved)
        moments = run.moments()
        for _ in range(3):
            controller.clear()
            assert all(freed(run))
            controller.restore()
            run.step(), same.step()
        assert all(a is b for a, b in zip(moments, run.moments(), strict=True))
    assert_same(run, same)


def test_a_state_made_a_numpy_array_while_away_comes_back_first() -> None:
    run, same = pair()
    with refit.Controller(run.optimizer, run.model) as controller:
        for _ in range(2):
            controller.clear()
            assert np.array_equal(first(run).numpy(), first(same).numpy())
            assert not any(freed(run))
            run.step(), same.step()
    assert_same(run, same)


def test_a_state_fixed_by_an_array_of_a_view_while_away_comes_back() -> None:
    run, same = pair()
    with refit.Controller(run.optimizer, run.model) as controller:
        for _ in range(2):
            view = first(run).detach()
            controller.clear()
            view.numpy()
            assert all(freed(run))
            controller.restore()
            run.step(), same.step()
            assert not any(freed(run))
        with controller.checkpoint():
            pass
        run.optimizer.state_dict()
    assert_same(run, same)


def test_tensors_of_one_buffer_fixed_while_away_still_share_it() -> None:
    run, same = pair()
    state = run.optimizer.state[next(run.model.parameters())]
    flat = torch.cat([state["exp_avg"].reshape(-1), state["exp_avg_sq"].reshape(-1)])
    half = flat.numel() // 2
    state["exp_avg"] = flat[:half].view_as(state["exp_avg"])
    state["exp_avg_sq"] = flat[half:].view_as(state["exp_avg_sq"])
    with refit.Controller(run.optimizer, run.model) as controller:
        controller.clear()
        flat.numpy()
        controller.restore()
        run.step(), same.step()
    one, other = state["exp_avg"].untyped_storage(), state["exp_avg_sq"].untyped_storage()
    assert one.data_ptr() == other.data_ptr()
    assert_same(run, same)


def test_a_numpy_array_that_was_dropped_keeps_nothing_from_leaving() -> None:
    run, same = pair()
    with refit.Controller(run.optimizer, run.model) as controller:
        controller.clear()
        run.step(), same.step()  # the plan is made, the states are home
        first(run).numpy()
        controller.clear()
        assert all(freed(run))
        run.step(), same.step()
    assert_same(run, same)


def test_a_numpy_array_that_is_held_keeps_its_state_and_no_other() -> None:
    run, same = pair()
    array = first(run).numpy()
    with refit.Controller(run.optimizer, run.model) as controller:
        controller.clear()
        assert freed(run).count(False) == 1
        assert any("drop the NumPy array" in reason for _, reason in controller.resident)
        run.step(), same.step()
        assert np.array_equal(array, first(run).numpy())  # still one memory
        del array
        controller.clear()
        assert all(freed(run))
        run.step(), same.step()
    assert_same(run, same)


def test_memory_that_numpy_owns_keeps_the_bytes_it_had() -> None:
    run, same = pair()
    owned = first(run).numpy().copy()
    run.optimizer.state[next(run.model.parameters())]["exp_avg"] = torch.from_numpy(owned)
    before = owned.copy()
    with refit.Controller(run.optimizer, run.model) as controller:
        controller.clear()
        assert all(freed(run))
        run.step(), same.step()
    assert np.array_equal(owned, before)
    assert_same(run, same)


def test_without_memory_for_the_others_nothing_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    run, same = pair()
    run.optimizer.load_state_dict(reloaded(run))

    def fails(*_: Any) -> Any:
        raise RuntimeError("not enough memory")

    with refit.Controller(run.optimizer, run.model) as controller:
        with monkeypatch.context() as patch:
            patch.setattr("refit.storage_swap.empty_storage", fails)
            with pytest.raises(refit.HostMemoryError, match="nothing has moved"):
                controller.clear()
        assert not any(freed(run))
        controller.clear()
        assert all(freed(run))
        run.step(), same.step()
    assert_same(run, same)


def test_without_memory_for_a_restore_it_is_called_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, same = pair()
    view = first(run).detach()
    with refit.Controller(run.optimizer, run.model) as controller:
        controller.clear()
        view.numpy()

        def fails(*_: Any) -> Any:
            raise RuntimeError("not enough memory")

        with monkeypatch.context() as patch:
            patch.setattr("refit.regions.empty_storage", fails)
            with pytest.raises(refit.DeviceMemoryError):
                controller.restore()
        controller.restore()
        run.step(), same.step()
    assert_same(run, same)


def test_ctrl_c_between_two_tensors_of_a_buffer_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, same = pair()
    state = run.optimizer.state[next(run.model.parameters())]
    flat = torch.stack([state["exp_avg"], state["exp_avg_sq"]])
    state["exp_avg"], state["exp_avg_sq"] = flat[0], flat[1]
    put, calls = refit.storage_swap._put, []

    def interrupted(*what: Any) -> None:
        calls.append(what)
        if len(calls) == 2:
            raise KeyboardInterrupt
        put(*what)

    with refit.Controller(run.optimizer, run.model) as controller:
        controller.clear()
        flat.numpy()
        with monkeypatch.context() as patch:
            patch.setattr("refit.storage_swap._put", interrupted)
            with pytest.raises(KeyboardInterrupt):
                controller.restore()
        controller.restore()
        run.step(), same.step()
    assert state["exp_avg"].untyped_storage()._cdata == state["exp_avg_sq"].untyped_storage()._cdata
    assert_same(run, same)


@pytest.mark.parametrize("away", [False, True])
def test_kept_gradients_that_were_made_arrays_leave_and_return(away: bool) -> None:
    run, same = pair()
    run.backward(), same.backward()
    gradient = next(run.model.parameters()).grad
    view = gradient.detach() if away else None
    with refit.Controller(run.optimizer, run.model, grads="keep") as controller:
        for _ in range(2):
            if not away:
                gradient.numpy()
            controller.clear()
            assert gradient.untyped_storage().nbytes() == 0
            if view is not None:
                view.numpy()
            controller.restore()
            controller.join()
        assert next(run.model.parameters()).grad is gradient
        assert torch.equal(gradient, next(same.model.parameters()).grad)
        run.step(), same.step()
    assert_same(run, same)


def test_it_is_said_once_that_no_state_leaves() -> None:
    run, _ = pair()
    for state in run.optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key].share_memory_()
    with refit.Controller(run.optimizer, run.model) as controller:
        with pytest.warns(UserWarning, match="no optimizer state leaves.*share_memory_"):
            controller.clear()
        run.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            state["exp_avg"] = state["exp_avg"].clone().share_memory_()  # decided again
            controller.clear()
