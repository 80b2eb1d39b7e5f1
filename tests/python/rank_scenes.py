"""What the ranks of test_lockstep.py do, each in a process of its own, one scene after another."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from ranks import join
from refit.errors import StateError
from refit.weights.lockstep import LockstepError, agree
from refit.weights.named_weights import named_weights
from refit.weights.publisher import Publisher
from refit.weights.subscriber import Subscriber
from refit.weights.transaction import Transaction
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

Scene = Callable[[int], object]


def sharded_model() -> nn.Module:
    """Three sharded weights, one of a length that two ranks cannot halve, and a tie."""
    torch.manual_seed(7)
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Module()
    for name, rows in (("a", 4), ("b", 5), ("c", 1)):
        whole = torch.rand(rows, 3)
        setattr(model, name, nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])))
    model.d = model.a
    return model


def wholes() -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    return {name: torch.rand(rows, 3) for name, rows in (("a", 4), ("b", 5), ("c", 1))}


def gathers_on_the_root_alone(rank: int) -> object:
    weights = named_weights(sharded_model(), dtype=torch.bfloat16)
    given = dict(weights)
    right = all(torch.equal(given[n], t.to(torch.bfloat16)) for n, t in wholes().items() if given)
    right = right and given.get("d") is given.get("a")
    shapes = [one.shape for one in weights.manifest()]
    return sorted(given), weights.ties, right, shapes == [(4, 3), (4, 3), (5, 3), (1, 3)]


def root_stops_early(rank: int) -> object:
    each = iter(named_weights(sharded_model()))
    try:
        for _ in each:
            raise KeyError("the consumer failed")
    except KeyError:
        each.close()  # type: ignore[attr-defined]
        return "stopped"
    return "went through"


def refused(sentence: str, model: nn.Module | None = None, **options: Any) -> str:
    """The sentence, if gathering is refused with it; else what came instead."""
    try:
        list(named_weights(model or sharded_model(), **options))
    except LockstepError as why:
        return sentence if sentence in str(why) else str(why)
    return "no error"


def one_rank_cannot_begin(rank: int) -> object:
    def names(name: str) -> str:
        if rank == 1:
            raise StateError("this rank has lost its weights")
        return name

    return refused(LOST, names=names)


def one_rank_is_at_its_end_already(rank: int) -> object:
    model = sharded_model()
    if rank == 1:
        try:
            agree(None, "end", error="KeyError: 'before it sent anything'")
        except LockstepError:
            return "ended"
    return refused(EARLY, model)


def fsdp2_model_gives_what_it_had(rank: int) -> object:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 3))
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fully_shard(model[0])
    fully_shard(model, reshard_after_forward=False)
    model(torch.rand(2, 3))  # leaves the root's parameters whole: they are sharded again to be read
    given = dict(named_weights(model))
    sharded = all(isinstance(one, DTensor) for one in model.parameters())
    same = all(torch.equal(given[name], plain[name]) for name in given)
    return sorted(given) == (sorted(plain) if rank == 0 else []), same, sharded


def adapted_model() -> nn.Module | None:
    try:
        import peft
    except ImportError:
        return None
    torch.manual_seed(7)
    inner = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
    config = peft.LoraConfig(r=4, target_modules=["0", "2"], use_dora=True)
    model: nn.Module = peft.get_peft_model(inner, config)
    with torch.no_grad():
        for name, one in model.named_parameters():
            if "lora_B" in name:
                one.normal_()
    return model


def fsdp2_adapters_are_merged_as_one_process_would(rank: int) -> object:
    whole, model = adapted_model(), adapted_model()
    if whole is None or model is None:
        return None
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.base_model.model:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    sharded = all(isinstance(one, DTensor) for one in model.parameters())
    seen: list[object] = [sharded]
    for way in ("merged", "adapter"):
        given = dict(named_weights(model, lora=way))  # type: ignore[arg-type]
        expected = dict(named_weights(whole, lora=way))  # type: ignore[arg-type]
        same = all(torch.equal(given[name], expected[name]) for name in given)
        seen.append(same and sorted(given) == (sorted(expected) if rank == 0 else []))
    return seen


def publish_together(rank: int, version: int | None, fails: int | None = None) -> object:
    """A whole transaction: rank 0 has the publisher; one rank may fail in the block. Returns the
    kind of the error and because of which, and the version that was committed."""
    model = sharded_model()
    with Publisher("tcp://127.0.0.1:0") if rank == 0 else nullcontext(None) as publisher:
        if publisher is not None:
            publisher.publish(wholes(), 5)
        tx = Transaction(publisher, version, lockstep=True)
        try:
            with tx:
                if rank == fails:
                    raise KeyError("in the block")
                tx.send(named_weights(model))
        except Exception as why:
            because = str(why).partition("because of ")[2].split(": ")[:2]
            kinds = [type(why).__name__, *filter(None, because)]
            return ": ".join(kinds), tx.version if tx.committed else None
        return "committed", tx.version


TIE = {"d": "a"}
LOST = "rank 1: StateError: this rank has lost its weights"
EARLY = "rank 1: KeyError: 'before it sent anything'"
OTHER = "holds other weights"
NO_RANK = "rank 2 cannot be the root"


def hand_over_together(rank: int) -> object:
    """With ``wait="none"``, to a worker that takes it later; the states are away meanwhile."""
    model = sharded_model()
    with Publisher("tcp://127.0.0.1:0") if rank == 0 else nullcontext(None) as publisher:
        worker = None if publisher is None else Subscriber(publisher.endpoint)
        if publisher is not None:
            publisher.wait_workers(1, 30.0)
        with Transaction(publisher, lockstep=True, wait="none") as tx:
            tx.send(named_weights(model))
        if worker is not None:
            worker.close()
    return tx.handed_over, tx.version


SCENES: dict[str, tuple[Scene, list[Any]]] = {
    "gathers on the root alone": (
        gathers_on_the_root_alone,
        [(["a", "b", "c", "d"], TIE, True, True), ([], TIE, True, True)],
    ),
    "gathers on every rank": (
        lambda _: [name for name, _ in named_weights(sharded_model(), root=None)],
        [["a", "d", "b", "c"]] * 2,
    ),
    "the root stops early and no rank waits": (root_stops_early, ["stopped", "went through"]),
    "one rank cannot begin and all hear why": (one_rank_cannot_begin, [LOST] * 2),
    "ranks hold other weights": (
        lambda rank: refused(OTHER, names=lambda name: f"{name}{rank}"),
        [OTHER] * 2,
    ),
    "the root is not a rank": (lambda _: refused(NO_RANK, root=2), [NO_RANK] * 2),
    "one rank is at its end already": (one_rank_is_at_its_end_already, [EARLY, "ended"]),
    "an FSDP2 model gives what it had": (fsdp2_model_gives_what_it_had, [(True, True, True)] * 2),
    "FSDP2 adapters are merged as by one process": (
        fsdp2_adapters_are_merged_as_one_process_would,
        [[True, True, True]] * 2,
    ),
    "all ranks learn the version that was committed": (
        lambda rank: publish_together(rank, None),
        [("committed", 6)] * 2,
    ),
    "all ranks learn the version that was handed over": (hand_over_together, [(True, 1)] * 2),
    "a root that cannot begin stops all": (
        lambda rank: publish_together(rank, 3),
        [("StaleError", None), ("LockstepError: rank 0: StaleError", None)],
    ),
    "the root fails in the block and nothing is committed": (
        lambda rank: publish_together(rank, None, fails=0),
        [("KeyError", None), ("LockstepError: rank 0: KeyError", None)],
    ),
    "another rank fails in the block and nothing is committed": (
        lambda rank: publish_together(rank, None, fails=1),
        [("LockstepError: rank 1: KeyError", None), ("KeyError", None)],
    ),
}
"""What each of two ranks sees in each."""


def play(rank: int, folder: Path) -> dict[str, object]:
    """What one rank saw in each scene."""
    join(rank, 2, folder)
    return {name: scene(rank) for name, (scene, _) in SCENES.items()}
