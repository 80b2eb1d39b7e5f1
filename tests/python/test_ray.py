"""refit.integrations.ray on a real local Ray: a trainer and four rollouts, a process each."""

import hashlib
import os
import select
import signal
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

numpy = pytest.importorskip("numpy")
ray = pytest.importorskip("ray")

from refit.errors import DeadlineError, PeerError, StateError  # noqa: E402
from refit.integrations.ray import (  # noqa: E402
    ACTOR,
    RefitRollout,
    RefitTrainer,
    connect,
    node_endpoint,
    refit,
)

pytestmark = pytest.mark.timeout(300)

CONFIG = {"broadcast": {"heartbeat_ms": "200ms", "heartbeat_timeout_ms": "20s"}}
OPTIONS = {"num_cpus": 0.5, "num_gpus": 0, **ACTOR}


def digest(arrays: Iterable[tuple[str, Any]]) -> str:
    total = hashlib.sha256()
    for name, array in sorted(arrays, key=lambda pair: pair[0]):
        total.update(name.encode())
        total.update(numpy.ascontiguousarray(array).tobytes())
    return total.hexdigest()


class Halting:
    """Weights that come one after another, and stop in the middle until told to go on."""

    def __init__(self, weights: Any, halted: threading.Event, go_on: threading.Event) -> None:
        self._weights, self._halted, self._go_on = weights, halted, go_on

    def manifest(self) -> Any:
        return self._weights.manifest()

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for number, pair in enumerate(self._weights):
            if number == 1:
                self._halted.set()
                self._go_on.wait(60)
            yield pair


class Trainer(RefitTrainer):
    """A small model that learns noise; its states are away while it publishes."""

    def __init__(self) -> None:
        import torch
        from refit import Controller

        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.controller = Controller(self.optimizer, self.model)
        self._halt = False
        self._halted, self._go_on = threading.Event(), threading.Event()
        self.train()

    def train(self) -> str:
        import torch

        self.optimizer.zero_grad()
        self.model(torch.randn(8, 64)).square().mean().backward()
        self.optimizer.step()
        return digest((n, p.detach().numpy()) for n, p in self.model.named_parameters())

    def refit_weights(self) -> Any:
        weights = super().refit_weights()
        return Halting(weights, self._halted, self._go_on) if self._halt else weights

    def halt_in_the_next(self) -> None:
        self._halt = True
        self._halted.clear()
        self._go_on.clear()

    def wait_halted(self) -> bool:
        return self._halted.wait(60)

    def go_on(self) -> None:
        self._halt = False
        self._go_on.set()

    def pid(self) -> int:
        return os.getpid()

    def state_bytes(self) -> int:
        states = self.optimizer.state.values()
        return sum(s["exp_avg"].untyped_storage().nbytes() for s in states)


class Rollout(RefitRollout):
    """Has no PyTorch: NumPy is enough to hold weights."""

    def __init__(self) -> None:
        self.weights: dict[str, Any] = {}
        self.fail = ""

    def load_weights(self, update: Any) -> None:
        if self.fail == "die":
            os._exit(1)
        if self.fail:
            raise ValueError(self.fail)
        self.weights = dict(update.arrays(copy=True))

    def fail_with(self, how: str) -> None:
        self.fail = how

    def digest(self) -> str:
        return digest(self.weights.items())

    def pid(self) -> int:
        return os.getpid()


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    here = str(Path(__file__).parent)  # actors import their classes from this file
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", here, prepend=os.pathsep)
        ray.init(
            "local",
            num_cpus=4,
            num_gpus=0,
            object_store_memory=80 << 20,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
        )
        yield
        ray.shutdown()


class Fleet:
    """The trainer and four rollouts; those that a test has killed are replaced for the next one."""

    def __init__(self) -> None:
        self.rollouts = [self.one_more() for _ in range(4)]
        self.start_trainer()

    def start_trainer(self) -> None:
        self.trainer = ray.remote(Trainer).options(**OPTIONS).remote()
        self.names = [f"rollout-{i}" for i in range(4)]
        connect(self.trainer, self.rollouts, config=CONFIG)

    @staticmethod
    def one_more() -> Any:
        return ray.remote(Rollout).options(**OPTIONS).remote()

    @staticmethod
    def kill(actor: Any) -> None:
        """Returns when the process is gone: ray.kill does so before."""
        pid = ray.get(actor.pid.remote())
        gone = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        select.select([gone], [], [])
        os.close(gone)

    def replace(self, index: int) -> None:
        self.rollouts[index] = self.one_more()
        connect(self.trainer, self.rollouts, config=CONFIG)
        workers = ray.get(self.trainer.workers.remote())
        (self.names[index],) = {w.name for w in workers if w.subscribed} - set(self.names)

    def others(self, *but: int) -> list[Any]:
        return [rollout for i, rollout in enumerate(self.rollouts) if i not in but]

    def held(self, *but: int) -> list[tuple[int, str]]:
        """Version and digest in each rollout."""
        versions = ray.get([rollout.version.remote() for rollout in self.others(*but)])
        digests = ray.get([rollout.digest.remote() for rollout in self.others(*but)])
        return list(zip(versions, digests, strict=True))

    def train(self) -> str:
        """Returns the digest of the weights that came of it."""
        return str(ray.get(self.trainer.train.remote()))


@pytest.fixture(scope="module")
def fleet(cluster: None) -> Fleet:
    return Fleet()


@contextmanager
def halted(fleet: Fleet) -> Iterator[Future[int]]:
    """A cycle on a thread, whose trainer has stopped in the middle of the weights."""
    ray.get(fleet.trainer.halt_in_the_next.remote())
    with ThreadPoolExecutor(1) as pool:
        cycle = pool.submit(refit, fleet.trainer, fleet.rollouts)
        assert ray.get(fleet.trainer.wait_halted.remote())
        yield cycle


@pytest.mark.slow
def test_each_cycle_updates_every_rollout_and_returns_states(
    fleet: Fleet,
) -> None:
    pids = {ray.get(actor.pid.remote()) for actor in [fleet.trainer, *fleet.rollouts]}
    assert len(pids | {os.getpid()}) == 6
    states = ray.get(fleet.trainer.state_bytes.remote())
    assert states > 0
    first = refit(fleet.trainer, fleet.rollouts)
    for cycle in (1, 2):
        weights = fleet.train()
        assert ray.get(fleet.trainer.state_bytes.remote()) == states
        assert refit(fleet.trainer, fleet.rollouts) == first + cycle
        assert ray.get(fleet.trainer.state_bytes.remote()) == 0
        assert fleet.held() == [(first + cycle, weights)] * 4
    assert refit(fleet.trainer, fleet.rollouts, version=first + 10) == first + 10


@pytest.mark.slow
def test_rollout_killed_in_refit_is_named_and_others_go_on(
    fleet: Fleet,
) -> None:
    before = fleet.train()
    version = refit(fleet.trainer, fleet.rollouts)
    fleet.train()
    with halted(fleet) as cycle:
        fleet.kill(fleet.rollouts[2])
        ray.get(fleet.trainer.go_on.remote())
        with pytest.raises(PeerError, match=fleet.names[2]) as failed:
            cycle.result()
    assert [worker.name for worker in failed.value.workers] == [fleet.names[2]]
    assert fleet.held(2) == [(version, before)] * 3

    weights = fleet.train()
    version = refit(fleet.trainer, fleet.others(2))
    assert fleet.held(2) == [(version, weights)] * 3
    fleet.replace(2)
    assert ray.get(fleet.rollouts[2].receive.remote()) == version  # what there is, at once
    assert fleet.held() == [(version, weights)] * 4


@pytest.mark.slow
def test_rollout_dying_in_load_is_named_and_others_are_updated(
    fleet: Fleet,
) -> None:
    version = refit(fleet.trainer, fleet.rollouts)
    weights = fleet.train()
    ray.get(fleet.rollouts[0].fail_with.remote("die"))
    with pytest.raises(PeerError, match=fleet.names[0]):
        refit(fleet.trainer, fleet.rollouts)
    assert fleet.held(0) == [(version + 1, weights)] * 3
    fleet.replace(0)
    weights = fleet.train()
    assert refit(fleet.trainer, fleet.rollouts) == version + 2
    assert fleet.held() == [(version + 2, weights)] * 4


@pytest.mark.slow
def test_trainer_killed_in_refit_changes_nothing_and_is_replaced(
    fleet: Fleet,
) -> None:
    before = fleet.train()
    version = refit(fleet.trainer, fleet.rollouts)
    fleet.train()
    with halted(fleet) as cycle:
        fleet.kill(fleet.trainer)
        with pytest.raises(ray.exceptions.RayActorError):
            cycle.result()
    assert fleet.held() == [(version, before)] * 4
    fleet.start_trainer()
    weights = fleet.train()
    assert refit(fleet.trainer, fleet.rollouts) == version + 1  # another trainer counts on
    assert fleet.held() == [(version + 1, weights)] * 4


@pytest.mark.slow
def test_refusing_rollout_is_named_and_takes_next_version(fleet: Fleet) -> None:
    ray.get(fleet.rollouts[1].fail_with.remote("the engine is out of memory"))
    with pytest.raises(PeerError, match=fleet.names[1]):
        refit(fleet.trainer, fleet.rollouts)
    ray.get(fleet.rollouts[1].fail_with.remote(""))
    weights = fleet.train()
    version = refit(fleet.trainer, fleet.rollouts)
    assert fleet.held() == [(version, weights)] * 4


@pytest.mark.slow
def test_trap_27_what_cannot_travel_between_processes_says_so(cluster: None) -> None:
    trainer = RefitTrainer()
    endpoint = trainer.open_publisher()
    assert endpoint.startswith("ipc:///")
    with pytest.raises(TypeError, match="cannot be pickled"):
        ray.put(trainer)
    trainer.close_publisher()
    trainer.close_publisher()


def test_verbs_before_their_time_name_the_call_that_is_missing() -> None:
    with pytest.raises(StateError, match="open_publisher"):
        RefitTrainer().publish()
    with pytest.raises(StateError, match="subscribe"):
        RefitRollout().receive()
    with pytest.raises(NotImplementedError, match="load_weights"):
        RefitRollout().load_weights(None)


def test_wait_stopped_before_it_begins_ends_and_next_one_waits() -> None:
    trainer, rollout = RefitTrainer(), RefitRollout()
    rollout.subscribe(trainer.open_publisher())
    rollout.stop_waiting("a")
    assert rollout.receive(ticket="a") == 0
    with pytest.raises(TimeoutError):
        rollout.receive(ticket="b", timeout=0.05)
    rollout.unsubscribe()
    rollout.unsubscribe()
    trainer.close_publisher()


@pytest.mark.slow
def test_single_threaded_rollouts_are_refused_and_leave_trainer(
    cluster: None,
) -> None:
    trainer = ray.remote(Plain).options(**OPTIONS).remote()
    one_thread = ray.remote(Rollout).options(**OPTIONS | {"max_concurrency": 1}).remote()
    rollouts = [Fleet.one_more(), one_thread]
    with pytest.raises(StateError, match=r"in rollout-1, .*ACTOR"):
        connect(trainer, rollouts, config=CONFIG, timeout=30.0)
    ray.kill(one_thread)
    rollouts[1] = Fleet.one_more()
    connect(trainer, rollouts, config=CONFIG)
    assert refit(trainer, rollouts) == 1
    names = [worker.name for worker in ray.get(trainer.workers.remote())]
    assert names == ["rollout-0", "rollout-2"]
    for actor in (trainer, *rollouts):
        ray.kill(actor)


@pytest.mark.slow
def test_busy_actor_is_named_after_the_timeout(cluster: None) -> None:
    trainer = ray.remote(Trainer).options(**OPTIONS).remote()
    rollouts = [Fleet.one_more()]
    ray.get([actor.pid.remote() for actor in (trainer, *rollouts)])
    for _ in range(2):  # on both threads
        trainer.wait_halted.remote()
    with pytest.raises(DeadlineError, match=r"no answer from the trainer in 0\.5 s: .*__init__"):
        connect(trainer, rollouts, timeout=0.5)
    for actor in (trainer, *rollouts):
        ray.kill(actor)


@pytest.mark.slow
def test_refit_leaves_actors_connected_by_hand_as_they_are(cluster: None) -> None:
    trainer = ray.remote(Plain).options(**OPTIONS).remote()
    rollouts = [Fleet.one_more(), Fleet.one_more()]
    endpoint = ray.get(trainer.open_publisher.remote(config=CONFIG))
    ray.get(rollouts[0].subscribe.remote(endpoint, "by hand", CONFIG))
    with pytest.raises(StateError, match="not connected"):
        refit(trainer, rollouts)
    ray.get(rollouts[1].subscribe.remote(endpoint, "this, too", CONFIG))
    ray.get(trainer.wait_workers.remote(2, 60.0))
    assert [refit(trainer, rollouts) for _ in range(2)] == [1, 2]
    names = {worker.name for worker in ray.get(trainer.workers.remote())}
    assert names == {"by hand", "this, too"}
    for actor in (trainer, *rollouts):
        ray.kill(actor)


@pytest.mark.slow
def test_an_endpoint_for_other_nodes_has_this_nodes_address(cluster: None) -> None:
    assert node_endpoint() == f"tcp://{ray.util.get_node_ip_address()}:0"


class Plain(RefitTrainer):
    def refit_weights(self) -> Any:
        return {"a": numpy.arange(6, dtype="float32"), "b": numpy.ones(3, dtype="int64")}


def test_arrays_reach_late_workers_without_controller() -> None:
    trainer, rollout = Plain(), Rollout()
    endpoint = trainer.open_publisher(config=CONFIG)
    assert trainer.open_publisher() == endpoint
    assert trainer.publish() == 1  # to no worker yet
    rollout.subscribe(endpoint, "late", CONFIG)
    trainer.wait_workers(1, 60.0)
    assert rollout.receive(timeout=60.0) == 1
    assert rollout.digest() == digest(trainer.refit_weights().items())
    assert [worker.name for worker in trainer.workers()] == ["late"]
    rollout.unsubscribe()
    trainer.close_publisher()
    with pytest.raises(StateError, match="open_publisher"):
        trainer.version()
