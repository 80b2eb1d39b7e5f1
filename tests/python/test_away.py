"""Tensors whose memory is away: a use finds the bytes, and a look at the metadata brings
nothing back."""

import copy
import ctypes
import io
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import numpy as np  # noqa: E402
from forks import said_in_a_fork  # noqa: E402
from refit import Controller  # noqa: E402
from refit.errors import DeviceMemoryError, StateError  # noqa: E402
from refit.states.offloaded_tensor import OffloadedTensors  # noqa: E402
from refit.states.offloader import Offloader  # noqa: E402
from training import Run, Wrapper, assert_same, assert_same_states, whole_cycle  # noqa: E402

WAIT_S = 60


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def bytes_at(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def at_hand(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def parameter_of(tensor: torch.Tensor) -> Any:
    made = torch.nn.Parameter(tensor)
    return isinstance(made, torch.nn.Parameter), made.requires_grad, made.tolist()


def doubled(tensor: torch.Tensor) -> torch.Tensor:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(_context: Any, given: torch.Tensor) -> torch.Tensor:
            return given * 2

    return Double.apply(tensor)


USES: dict[str, Callable[[list[Any]], Any]] = {
    "+": lambda t: t[0] + 1,
    "1 +": lambda t: 1 + t[0],
    "other +": lambda t: torch.ones_like(t[0]) + t[0],
    "==": lambda t: t[0] == t[0].clone(),
    "in": lambda t: 1e9 in t[0],
    "bool": lambda t: bool(t[0][0, 0] > 0),
    "float": lambda t: float(t[0][0, 0]),
    "iter": lambda t: [one.tolist() for one in t[0]],
    "index": lambda t: t[0][1:3],
    "index with it": lambda t: torch.arange(99.0, device=t[0].device)[t[0].abs().long()],
    "set an index": lambda t: t[0].__setitem__(0, 5.0),
    "set from it": lambda t: torch.zeros_like(t[0]).__setitem__(0, t[0][0]),
    "lerp_": lambda t: t[0].lerp_(torch.ones_like(t[0]), 0.25),
    "lerp_ to it": lambda t: torch.ones_like(t[0]).lerp_(end=t[0], weight=0.25),
    "copy_": lambda t: t[0].copy_(torch.ones_like(t[0])),
    "copy_ from": lambda t: torch.zeros_like(t[0]).copy_(t[0]),
    "zero_": lambda t: t[0].zero_(),
    "fill_": lambda t: t[0].fill_(3.0),
    "out": lambda t: torch.add(t[0].clone(), 1, out=t[0]),
    "where": lambda t: torch.where(t[0] > 0, t[0], 0.0),
    "cat": lambda t: torch.cat([t[0], t[0]]),
    "stack": lambda t: torch.stack([torch.ones_like(t[1]), t[1]]),
    "einsum": lambda t: torch.einsum("ij,ij->i", t[0], t[0]),
    "norm": lambda t: torch.linalg.vector_norm(t[0]),
    "foreach norm": lambda t: torch._foreach_norm(t),
    "foreach add": lambda t: torch._foreach_add_(t, 1.0),
    "foreach mixed": lambda t: torch._foreach_add([torch.ones_like(t[0])], [t[0]]),
    "foreach zero": lambda t: torch._foreach_zero_(t),
    "ops": lambda t: torch.ops.aten.mul.Tensor(t[0], 2),
    "a Function": lambda t: doubled(t[0]),
    "vmap of a copy": lambda t: torch.vmap(lambda one: one * 2)(t[0].clone()),
    "detach": lambda t: t[0].detach(),
    "data": lambda t: t[0].data,
    "view": lambda t: t[0].view(-1),
    "T": lambda t: t[0].mT,
    "to": lambda t: t[0].to(torch.float64),
    "cpu": lambda t: t[0].cpu(),
    "contiguous": lambda t: t[0].contiguous(),
    "set data": lambda t: setattr(t[0], "data", t[0].clone() + 2),
    "item": lambda t: t[0][0, 0].item(),
    "tolist": lambda t: t[0].tolist(),
    "numpy": lambda t: t[0].numpy() if at_hand(t[0]) else t[0].cpu().numpy(),
    "into numpy": lambda t: np.add(np.ones((1,)), np.asarray(t[1])) if at_hand(t[1]) else t[1] + 1,
    "DLPack": lambda t: torch.from_dlpack(t[0]).clone(),
    "repr": lambda t: repr(t[0]),
    "format": lambda t: f"{t[1]}",
    "its memory": lambda t: bytes_at(t[0]) if at_hand(t[0]) else t[0].data_ptr() > 0,
    "Parameter": lambda t: parameter_of(t[0]),
    "deepcopy": lambda t: copy.deepcopy(t),
    "copy": lambda t: copy.copy(t[0]),
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "save": lambda t: torch.load(io.BytesIO(saved(t))),
    "collate": lambda t: torch.utils.data.default_collate([t[0], t[0]]),
    "flatten": lambda t: torch._utils._flatten_dense_tensors(t),
    "compiled": lambda t: torch.compile(lambda one: one * 2 + 1, backend="eager")(t[0]),
}


def told(value: Any) -> Any:
    """What an operation gave, to compare: tensors as their bytes, and their class."""
    if isinstance(value, torch.Tensor):
        return type(value), value.dtype, value.tolist()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [told(one) for one in value]
    return value


@pytest.mark.parametrize("when", ["cleared", "returning"])
@pytest.mark.parametrize("use", USES)
def test_what_uses_a_state_that_is_away_finds_its_bytes(
    run: Run, reference_run: Run, controller: Controller, use: str, when: str
) -> None:
    controller.offload()
    if when == "returning":
        controller.restore()
    assert controller.state == when
    assert told(USES[use](run.moments())) == told(USES[use](reference_run.moments()))
    assert controller.state == "training"
    assert {type(moment) for moment in run.moments()} == {torch.Tensor}
    run.step(), reference_run.step()


LOOKS: dict[str, Callable[[Any], Any]] = {
    "shape": lambda t: (t.shape, t.size(), t.size(0), t.ndim, t.dim(), len(t)),
    "numel": lambda t: (t.numel(), t.nelement(), torch.numel(t), t.nbytes, t.itemsize),
    "element size": lambda t: t.element_size(),
    "stride": lambda t: (t.stride(), t.storage_offset(), t.is_contiguous(), t.layout),
    "dtype": lambda t: (t.dtype, t.is_floating_point(), t.is_signed()),
    "torch.": lambda t: (torch.is_tensor(t), torch.is_floating_point(t)),
    "device": lambda t: (t.device, t.is_cuda, t.is_cpu, t.is_meta, t.get_device()),
    "kind": lambda t: (t.is_sparse, t.is_quantized, t.is_nested, t.is_inference()),
    "autograd": lambda t: (t.requires_grad, t.grad_fn, t.is_leaf, t.grad, t._version),
    "class": lambda t: isinstance(t, torch.Tensor) and not isinstance(t, torch.nn.Parameter),
    "hash": lambda t: {t: 1}[t] + (id(t) == hash(t)),
    "storage": lambda t: type(t.untyped_storage()),
    "weak": lambda t: weakref.ref(t)() is t,
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_look_at_a_state_brings_nothing_back(run: Run, controller: Controller, look: str) -> None:
    moment = run.moments()[0]
    seen = LOOKS[look](moment)
    controller.offload()
    assert LOOKS[look](moment) == seen
    assert run.away()
    assert controller.state == "cleared"


def test_returns_before_restore_are_counted(run: Run, controller: Controller) -> None:
    whole_cycle(controller)
    run.step()
    assert controller.stats()["refit/early_returns"] == 0
    controller.offload()
    run.moments()[0].norm()
    assert controller.stats()["refit/early_returns"] == 1
    controller.offload()
    run.optimizer.state_dict()
    run.moments()[0].norm()
    assert controller.stats()["refit/early_returns"] == 2


# ---- optimizers and code that handles their states ----------------------------------------------


SCHEDULE_FREE = ["AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree"]


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", SCHEDULE_FREE)
def test_schedule_free_may_change_its_mode(torch_device: str, name: str, foreach: bool) -> None:
    kind = getattr(pytest.importorskip("schedulefree"), name)

    def make(parameters: Any) -> Any:
        return kind(parameters, lr=0.1, foreach=foreach)

    run, same = Run(make, torch_device), Run(make, torch_device)
    with Controller(run.optimizer, run.model) as controller:
        for number in range(6):
            run.optimizer.train(), same.optimizer.train()
            run.step(), same.step()
            controller.offload()
            run.optimizer.eval(), same.optimizer.eval()
            controller.offload()
            assert run.away()
            run.optimizer.eval(), same.optimizer.eval()  # it is in that mode
            assert controller.state == "cleared"
            if number % 2:
                controller.restore()
            assert all(map(torch.equal, run.model.parameters(), same.model.parameters()))
        run.optimizer.train(), same.optimizer.train()
        assert_same(run, same)


def test_a_state_dict_of_before_is_loaded(run: Run, controller: Controller, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"optimizer": run.optimizer.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    expected = [moment.clone() for moment in run.moments()]
    run.step()
    taken = run.optimizer.state_dict()
    controller.offload()
    dcp.load({"optimizer": taken}, checkpoint_id=tmp_path, no_dist=True)
    assert all(map(torch.equal, run.moments(), expected))


WAYS: list[Callable[[Any], Any]] = [
    copy.deepcopy,
    lambda value: pickle.loads(pickle.dumps(value)),
    lambda value: torch.load(io.BytesIO(saved(value))),
]


@pytest.mark.parametrize("way", WAYS, ids=["deepcopy", "pickle", "save"])
def test_a_state_dict_taken_before_can_be_copied_and_saved(
    run: Run, reference_run: Run, controller: Controller, way: Callable[[Any], Any]
) -> None:
    taken = run.optimizer.state_dict()
    controller.offload()
    copied = way(taken)
    assert_same_states(copied, reference_run.optimizer.state_dict())
    kinds = {type(one) for state in copied["state"].values() for one in state.values()}
    assert kinds == {torch.Tensor}


def test_states_of_two_controllers_meet_in_one_operation(run: Run, controller: Controller) -> None:
    other = Run(device=run.device)
    other.step(3)
    expected = [a + b for a, b in zip(run.moments(), other.moments(), strict=True)]
    with Controller(other.optimizer) as second:
        controller.offload(), second.clear()
        assert all(map(torch.equal, torch._foreach_add(run.moments(), other.moments()), expected))
        assert (controller.state, second.state) == ("training", "training")


# ---- tensors of other kinds ----------------------------------------------------------------------


class Scaled(Wrapper):
    """Of two tensors, as torchao's are: within its operations no class is asked."""

    names = ("codes", "scale")

    def plain(self) -> Any:
        return self.codes * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mul_.Tensor:
            args[0].scale.mul_(args[1])
            return args[0]
        return super().__torch_dispatch__(func, types, args, kwargs)


class Alone(type(torch.Tensor)):  # type: ignore[misc]
    """Makes classes that no other derives from."""

    def __new__(mcs, name: str, bases: Any, names: Any) -> Any:
        if any(isinstance(base, Alone) for base in bases):
            raise TypeError("no class derives from this one")
        return super().__new__(mcs, name, bases, names)


class Final(Wrapper, metaclass=Alone):
    """Leaves all to its one tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl


def holding(state: Any, device: str) -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.zeros(4, device=device))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter]["held"] = state
    return optimizer


def test_wrappers_and_what_is_in_them_are_found(torch_device: str) -> None:
    codes, scale = torch.arange(6.0, device=torch_device), torch.full((6,), 2.0).to(torch_device)
    expected = codes * 2
    inner = Scaled(codes, scale)
    with Controller(holding(inner, torch_device)) as controller:
        uses: list[Callable[[], Any]] = [
            lambda: inner + 0,
            lambda: torch.zeros(6, device=torch_device) + inner,
            lambda: codes * scale,
            lambda: inner.codes * 2,
        ]
        for use in uses:
            controller.offload()
            assert codes.untyped_storage().nbytes() == scale.untyped_storage().nbytes() == 0
            assert (inner.shape, inner.dtype, inner.device) == ((6,), torch.float32, codes.device)
            assert isinstance(inner, Scaled)
            assert controller.state == "cleared"
            assert torch.equal(use(), expected)
            assert controller.state == "training"
            assert type(inner) is Scaled
        controller.offload()
        inner.mul_(3)
        assert torch.equal(inner + 0, 3 * expected)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_wrapper_of_a_final_class_is_found_by_its_tensor(
    torch_device: str, wrapped: bool
) -> None:
    bytes_of, expected = (torch.arange(6.0, device=torch_device) for _ in range(2))
    inner = Scaled(bytes_of, torch.ones(6, device=torch_device)) if wrapped else bytes_of
    state = Final(inner)
    with Controller(holding(state, torch_device)) as controller:
        for use in (lambda: inner + 0, lambda: state + 0):
            controller.offload()
            assert bytes_of.untyped_storage().nbytes() == 0
            assert type(state) is Final
            assert torch.equal(use(), expected)
            assert controller.state == "training"


def test_a_parameter_that_is_a_state_stays_a_parameter(torch_device: str) -> None:
    master = torch.nn.Parameter(torch.arange(4.0, device=torch_device))
    with Controller(holding(master, torch_device)) as controller:
        controller.offload()
        assert isinstance(master, torch.nn.Parameter)
        assert (master.requires_grad, master.grad, master.shape) == (True, None, (4,))
        assert controller.state == "cleared"
        loss = (master * 2).sum()
        assert controller.state == "training"
        assert type(master) is torch.nn.Parameter
        loss.backward()
        assert torch.equal(master.grad, torch.full((4,), 2.0, device=torch_device))


def test_views_in_state_are_found_even_if_made_while_away(torch_device: str) -> None:
    flat = torch.arange(8.0, device=torch_device)
    first, second = flat[:4], flat[4:]
    with Controller(holding([first, second, flat], torch_device)) as controller:
        controller.offload()
        view = second[1:]
        assert view.tolist() == [5, 6, 7]
        controller.offload()
        first.add_(1)
        assert flat.tolist() == [1, 2, 3, 4, 4, 5, 6, 7]


# ---- failures ------------------------------------------------------------------------------------


def test_use_without_memory_raises_and_next_use_finds_bytes(
    run: Run, reference_run: Run, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    controller.offload()
    with monkeypatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", fails)
        for _ in range(2):
            with pytest.raises(DeviceMemoryError, match="call restore"):
                run.moments()[0] + 1
        assert controller.state == "cleared"
    assert torch.equal(run.moments()[0] + 1, reference_run.moments()[0] + 1)
    assert controller.state == "training"
    run.step(), reference_run.step()


def test_a_tensor_that_does_not_come_back_is_refused() -> None:
    state = torch.ones(3)
    away = OffloadedTensors(lambda: None, threading.Lock(), zeroable=1)
    away.mark(0, [state])
    with pytest.raises(StateError, match="did not come back"):
        state.sum()
    away.unmark(0)
    assert state.sum() == 3


@pytest.mark.parametrize("swapped", [True, False], ids=["swap_tensors", "as_subclass"])
def test_a_tensor_given_the_class_is_used(run: Run, controller: Controller, swapped: bool) -> None:
    state = run.moments()[0]
    value = state.clone()
    controller.offload()
    other = torch.ones_like(value)
    if swapped:
        torch.utils.swap_tensors(state, other)
    else:
        other = other.as_subclass(type(state))
    whole = value if swapped else torch.ones_like(value)
    controller.prepare_for_training()
    assert type(other) is not torch.Tensor
    assert torch.equal(torch.stack([other, other])[0], whole)
    assert type(other) is torch.Tensor


def test_another_thread_in_the_midst_of_a_clear_finds_the_bytes(
    run: Run, reference_run: Run, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, found, waits = Offloader.wait, [], []
    begun = threading.Event()

    def read() -> None:
        begun.set()
        found.append(run.moments()[0].clone())

    reader = threading.Thread(target=read)

    def finish(*arguments: Any) -> Any:
        if not reader.ident:
            reader.start()
            assert begun.wait(WAIT_S)
            reader.join(0.05)  # as far as it gets
            waits.append(reader.is_alive())
        return real(*arguments)

    monkeypatch.setattr(Offloader, "wait", finish)
    controller.offload()
    reader.join(WAIT_S)
    assert not reader.is_alive()
    assert torch.equal(found[0], reference_run.moments()[0])
    assert waits == [True]
    assert controller.state == "training"
    run.step(), reference_run.step()


def test_an_observer_of_a_phase_may_use_states(run: Run, reference_run: Run) -> None:
    class Timer:
        @contextmanager
        def time(self, _label: str) -> Iterator[None]:
            norms.append(float(run.moments()[0].norm()))
            yield
            norms.append(float(run.moments()[0].norm()))

    norms: list[float] = []
    with Controller(run.optimizer, timer=Timer()) as controller:
        controller.offload()
        controller.restore()
        controller.wait() if controller.state == "returning" else None
        assert set(norms) == {float(reference_run.moments()[0].norm())}
        run.step(), reference_run.step()


def test_a_forked_process_is_told(run: Run, controller: Controller) -> None:  # trap 27
    if run.device != "cpu":
        pytest.skip("PyTorch refuses to use a GPU in a forked process")
    controller.offload()
    assert "belongs to process" in said_in_a_fork(lambda: run.moments()[0] + 1)
