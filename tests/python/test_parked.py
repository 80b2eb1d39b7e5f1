"""Weights that leave the device while nothing uses them: what brings them back, and their bits."""

import copy
import gc
import os
import random
import weakref
from pathlib import Path
from typing import Any

import parked_scenes
import pytest
import ranks
import refit
import torch
from refit.errors import (
    BudgetError,
    ExistsError,
    InvalidError,
    NotFoundError,
    RefitError,
    StateError,
)
from refit.states import parked as module_of_parked
from torch import nn

KIB = 1024


def model(device: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """An embedding that is tied to the last layer, layers, and a buffer."""
    torch.manual_seed(7)
    made = nn.Sequential(
        nn.Embedding(300, 64),
        *(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(5)),
        nn.BatchNorm1d(64),
        nn.Linear(64, 300, bias=False),
    )
    made[-1].weight = made[0].weight
    return made.to(device=device, dtype=dtype).eval()


def tokens(device: str) -> torch.Tensor:
    return torch.arange(32, device=device) * 7 % 300


def held(made: nn.Module) -> int:
    """Bytes of memory that its storages have."""
    tensors = [*made.parameters(), *made.buffers()]
    found = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}
    return sum(found.values())


def floats(made: nn.Module) -> int:
    """Bytes of the memory that can leave: of more than one number."""
    tensors = {id(one): one for one in [*made.parameters(), *made.buffers()] if one.dim()}
    return sum(one.numel() * one.element_size() for one in tensors.values())


def test_a_model_leaves_and_returns(torch_device: str) -> None:
    made, x = model(torch_device), tokens(torch_device)
    whole, want = held(made), made(x)
    with refit.park(made, tag="reference") as handle:
        assert handle.state == "parked"
        assert held(made) == whole - floats(made)
        assert handle.nbytes == floats(made)
        with refit.resident(made) as same:
            assert same is handle
            assert handle.state == "returning"
            assert torch.equal(made(x), want)
        assert handle.state == "parked"
        with refit.resident("reference"), refit.resident(handle):
            assert torch.equal(made(x), want)
        assert handle.state == "parked"
        with torch.no_grad():
            made(x)  # without a word
        handle.wait()
        assert handle.state == "resident"
    assert held(made) == whole
    assert torch.equal(made(x), want)


def test_layers_wait_for_their_own(torch_device: str) -> None:
    made = model(torch_device)
    handle = refit.park(made)
    groups = handle._source.groups
    *order, last = [groups[id(layer)] for layer in handle._source.layers()]
    assert last == order[0]  # of the weight that both have
    assert order == sorted(order, key=max, reverse=True)  # the higher comes back first
    order = [max(one) for one in order]
    assert len(set(order)) > 3
    handle.restore()
    made[0](tokens(torch_device))
    classes = [type(one.weight).__name__ for one in (made[0], made[3][0])]
    assert classes == ["Parameter", "AwayParameter"]
    handle.close()
    assert type(made[3][0].weight) is nn.Parameter


def test_what_has_not_changed_leaves_without_a_copy(torch_device: str) -> None:
    made, x = model(torch_device), tokens(torch_device)
    handle = refit.park(made)
    assert handle.stats()["refit/offload_bytes"] == floats(made)
    for _ in range(2):
        with refit.resident(made):
            made(x)
        assert handle.stats()["refit/offload_bytes"] == 0
    with torch.no_grad():
        made[2][0].weight.data.add_(1)  # PyTorch counts no change
    refit.park(made)
    assert handle.stats()["refit/offload_bytes"] == 64 * 256 * 4
    handle.close()


USES: dict[str, Any] = {
    "state_dict": lambda made: made.state_dict(),
    "read": lambda made: made[1][0].weight.sum(),
    "write": lambda made: made[1][0].weight.data.mul_(1),
    "load": lambda made: made.load_state_dict(made.state_dict()),
    "deepcopy": copy.deepcopy,
    "named_weights": lambda made: dict(refit.named_weights(made)),
    "print": repr,
    "a layer": lambda made: made[2](torch.zeros(1, 64, device=made[0].weight.device)),
    "to": lambda made: made.to(torch.float64).to(torch.float32),
}


@pytest.mark.parametrize("use", USES)
def test_a_use_brings_weights_back(torch_device: str, use: str) -> None:
    made, twin = model(torch_device), model(torch_device)
    handle = refit.park(made)
    with torch.no_grad():
        USES[use](made)
    pairs = zip(made.state_dict().values(), twin.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    handle.close()


def test_a_graph_of_before_is_refused(torch_device: str) -> None:
    made = model(torch_device)
    loss = made(tokens(torch_device)).sum()
    handle = refit.park(made)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()
    made(tokens(torch_device)).sum().backward()
    handle.close()


def test_tensors_leave_too(torch_device: str) -> None:
    given = {"cache": torch.arange(9000.0, device=torch_device), "scalar": torch.tensor(3.0)}
    view, want = given["cache"][10:20], given["cache"].clone()
    handle = refit.park(given, tag="cache")
    assert given["cache"].untyped_storage().nbytes() == 0
    assert [name for name, _ in handle.stays] == ["scalar"]
    handle.restore(non_blocking=False)
    assert torch.equal(given["cache"], want)
    assert torch.equal(view, want[10:20])
    handle.close()


def test_wrong_calls_are_refused(torch_device: str) -> None:
    made = model(torch_device)
    handle = refit.park(made, tag="a")
    for what in (3, [], [made, torch.zeros(2)], {"a": 3}):
        with pytest.raises(InvalidError):
            refit.park(what)  # type: ignore[arg-type]
    with pytest.raises(InvalidError, match="parked already"):
        refit.park(nn.Sequential(made, nn.Linear(2, 2)))
    with pytest.raises(InvalidError, match="its own tag"):
        refit.park(made, tag="b")
    with pytest.raises(ExistsError):
        refit.park(nn.Linear(2, 2), tag="a")
    with pytest.raises(NotFoundError, match='"b" is not parked'), refit.resident("b"):
        pass
    with pytest.raises(TypeError):
        copy.deepcopy(handle)
    handle.close()
    handle.close()
    with pytest.raises(StateError):
        handle.offload()
    with refit.park(made, tag="a") as again:
        assert again is not handle
    assert repr(again) == "<refit.Parked: 'a', closed>"


def test_without_host_memory_nothing_leaves(torch_device: str) -> None:
    made = model(torch_device)
    whole = held(made)
    with pytest.raises(BudgetError):
        refit.park(made, offload_budget_bytes=64 * KIB)
    assert held(made) == whole
    with refit.resident(made) as handle:
        assert handle.state == "resident"
    handle.close()
    with refit.park(made):
        assert held(made) < whole


def test_a_module_that_is_freed_takes_all_along(torch_device: str) -> None:
    made = model(torch_device)
    refit.park(made, tag="gone")
    known = weakref.ref(made)
    del made
    gc.collect()
    assert known() is None
    assert "gone" not in module_of_parked._BY_TAG
    with pytest.raises(NotFoundError), refit.resident("gone"):
        pass


def test_a_child_process_leaves_it_alone(torch_device: str) -> None:
    if torch_device != "cpu":
        pytest.skip("a forked process cannot use the GPU")
    made = model(torch_device)
    handle = refit.park(made)
    child = os.fork()
    if child == 0:
        try:
            handle.restore()
        except StateError:
            handle.close()
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    handle.close()


# ---- With a controller --------------------------------------------------------------------------

SCHEDULES: dict[str, Any] = {
    "cycle": lambda: None,
    "host": refit.HostStates,
    "cpu": lambda: refit.CpuStep(fraction=0.5),
    "both": lambda: [refit.HostStates(), refit.CpuStep(fraction=0.3)],
}


def train(made: nn.Module, optimizer: torch.optim.Optimizer, verbs: Any) -> list[float]:
    losses = []
    x = tokens(str(made[0].weight.device))  # type: ignore[index]
    for step in range(8):
        verbs(step)
        loss = made(x).square().mean()
        loss.backward()
        verbs(step)
        optimizer.step()
        verbs(step)
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_training_has_the_same_bits(schedule: str, seed: int, torch_device: str) -> None:
    source = random.Random(seed)
    plain, made = model(torch_device).train(), model(torch_device).train()
    want = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), lambda _: None)
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    with refit.Controller(optimizer, made, schedule=SCHEDULES[schedule](), weights="park") as one:

        def verbs(_: int) -> None:
            for verb in source.choices(["offload", "restore", "wait", "state_dict", ""], k=2):
                if verb == "wait":
                    one.restore(non_blocking=False)
                elif verb == "state_dict":
                    made.state_dict()
                elif verb:
                    getattr(one, verb)()

        got = train(made, optimizer, verbs)
    if schedule == "cycle" or torch_device == "cpu":
        assert got == want
        pairs = zip(plain.parameters(), made.parameters(), strict=True)
        assert all(torch.equal(p, q) for p, q in pairs)


def test_weights_leave_after_the_workers_have_them(torch_device: str) -> None:
    from broadcasting import LOCAL, TIMEOUT, UNHURRIED, WorkerThread

    made = model(torch_device)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)
    want = {name: one.clone() for name, one in refit.named_weights(made)}
    with (
        refit.Publisher(LOCAL, **UNHURRIED) as publisher,
        WorkerThread(publisher.endpoint, worker="w") as worker,
        refit.Controller(optimizer, made, weights="park") as one,
    ):
        publisher.wait_workers(1, TIMEOUT)
        with one.refit(publisher=publisher) as tx:
            assert one.state == "cleared"
            tx.send(refit.named_weights(made))
            assert held(made) > 0
        assert one._weights is not None
        assert one._weights.state == "parked"
        assert one.stats()["refit/parked_bytes"] == floats(made)
        assert len(worker.seen) == 1
        one.prepare_for_training()
        assert one._weights.state == "resident"
        now = dict(refit.named_weights(made))
        assert all(torch.equal(now[name], tensor) for name, tensor in want.items())


def test_what_a_controller_cannot_park_is_refused(torch_device: str) -> None:
    made = model(torch_device)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    with pytest.raises(InvalidError, match="needs the model"):
        refit.Controller(optimizer, weights="park")
    with pytest.raises(InvalidError, match="is not"):
        refit.Controller(optimizer, made, weights="gone")  # type: ignore[arg-type]
    with refit.park(made), pytest.raises(RefitError, match="parked already"):
        refit.Controller(optimizer, made, weights="park")
    refit.Controller(optimizer, made, weights="park").close()


@pytest.mark.slow
@ranks.needs_fsdp2
@pytest.mark.parametrize("kind", parked_scenes.MODELS)
def test_ranks_have_the_same_bits(kind: str, tmp_path: Path) -> None:
    count = parked_scenes.RANKS
    assert ranks.run(parked_scenes.play, tmp_path, kind, count=count) == [True] * count


def test_a_frozen_base_leaves_once(torch_device: str) -> None:
    """As under LoRA: what trains is copied, and the rest is given up."""
    base, adapter = nn.Linear(256, 256), nn.Linear(256, 8)
    made = nn.Sequential(base.requires_grad_(False), adapter).to(torch_device)
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-2)
    with refit.Controller(optimizer, made, weights="park") as one:
        for step in range(3):
            one.offload()
            assert one._weights is not None
            copied = one._weights.stats()["refit/offload_bytes"]
            if step:
                assert copied == sum(p.numel() * 4 for p in adapter.parameters())
            one.restore()
            made(torch.ones(2, 256, device=torch_device)).sum().backward()
            optimizer.step()
