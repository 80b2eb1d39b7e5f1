"""refit.integrations.ray on a real Ray cluster of several nodes (raylets) on this machine."""

import os
import select
import shutil
import signal
import stat
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

numpy = pytest.importorskip("numpy")
ray = pytest.importorskip("ray")

import refit.integrations.ray as adapter  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from ray.util.placement_group import placement_group, remove_placement_group  # noqa: E402
from ray.util.scheduling_strategies import (  # noqa: E402
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)
from refit import Subscriber, keygen  # noqa: E402
from refit.errors import (  # noqa: E402
    ConfigError,
    DeadlineError,
    NotFoundError,
    PeerError,
    RefitError,
    SecurityError,
    StateError,
)
from refit.integrations.ray import (  # noqa: E402
    ACTOR,
    RefitTrainer,
    Settings,
    connect,
    node_endpoint,
    refit,
)
from test_ray import CONFIG, Rollout, digest  # noqa: E402

pytestmark = pytest.mark.timeout(300)

NODE = {"num_cpus": 4, "object_store_memory": 80 << 20}
OPTIONS: dict[str, Any] = {"num_cpus": 1, "num_gpus": 0, "max_restarts": -1, **ACTOR}


class Trainer(RefitTrainer):
    """Weights that differ with each call of train, also after a restart."""

    def __init__(self) -> None:
        self.weights: dict[str, Any] = {}
        self.halting, self.halted = False, threading.Event()
        self.train()

    def train(self) -> str:
        random = numpy.random.default_rng()
        self.weights = {name: random.standard_normal(50_000, "float32") for name in "abc"}
        return digest(self.weights.items())

    def refit_weights(self) -> Any:
        if self.halting:
            self.halted.set()
            threading.Event().wait()
        return self.weights

    def die(self) -> None:
        os._exit(1)

    def halt_in_the_next(self) -> None:
        self.halting = True

    def wait_halted(self) -> bool:
        return self.halted.wait(60)

    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def public_key(self) -> str:
        assert self._refit_meeting is not None
        return self._refit_meeting.public_key

    def pid(self) -> int:
        return os.getpid()

    def admitted(self) -> list[str]:
        assert self._refit_allow is not None
        return sorted(os.listdir(self._refit_allow.name))


class KeyedRollout(Rollout):
    """Shows its secret before it is used, as a thief on its node would have it."""

    modes: tuple[int, ...] = ()

    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def subscribe(self, *arguments: Any, **keys: Any) -> None:
        if "security_key" in keys:
            secret = Path(keys["security_key"])
            self.modes = tuple(stat.S_IMODE(p.stat().st_mode) for p in (secret.parent, secret))
            shutil.copy(secret, Path(os.environ["TMPDIR"], f"{arguments[1]}.stolen"))
        super().subscribe(*arguments, **keys)

    def key_modes(self) -> tuple[int, ...]:
        return self.modes

    def die(self) -> None:
        os._exit(1)


class Nodes:
    """A cluster: the driver's node, which runs no actors, and nodes a test names and removes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "object_store_memory": 80 << 20,
                "include_dashboard": False,
            },
        )
        ray.init(address=self.cluster.address, log_to_driver=False, configure_logging=False)
        self.nodes: dict[str, Any] = {}
        self.actors: list[Any] = []
        for name in "abc":
            self.add(name)

    def add(self, name: str) -> None:
        self.nodes[name] = self.cluster.add_node(resources={name: 8}, **NODE)

    def remove(self, name: str) -> None:
        """Returns when all processes of the node are gone: raylet and actors, by SIGKILL."""
        node = self.nodes.pop(name)
        raylet = node.all_processes["raylet"][0].process.pid
        children = Path(f"/proc/{raylet}/task/{raylet}/children").read_text().split()
        workers = [os.pidfd_open(int(pid)) for pid in children]
        self.cluster.remove_node(node, allow_graceful=False)
        for gone in workers:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(gone, signal.SIGKILL)
            select.select([gone], [], [])
            os.close(gone)

    def id(self, name: str) -> str:
        return str(self.nodes[name].node_id)

    def create(self, kind: type[Any], **options: Any) -> Any:
        self.actors.append(ray.remote(kind).options(**OPTIONS | options).remote())
        return self.actors[-1]

    def on(self, name: str, kind: type[Any] = KeyedRollout) -> Any:
        """An actor that can be on this node alone."""
        return self.create(kind, resources={name: 1})

    @staticmethod
    def end(actor: Any) -> None:
        """Returns when the process is gone: ray.kill does so before."""
        gone = os.pidfd_open(ray.get(actor.pid.remote()))
        ray.kill(actor)
        select.select([gone], [], [])
        os.close(gone)

    def end_actors(self) -> None:
        while self.actors:
            ray.kill(self.actors.pop())


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    here = str(Path(__file__).parent)  # actors import their classes from this file
    with (
        tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,  # a short name: Ray's sockets are in there, too
    ):
        patch.setenv("PYTHONPATH", here, prepend=os.pathsep)
        patch.setenv("TMPDIR", folder)
        nodes = Nodes(Path(folder))
        yield nodes
        ray.shutdown()
        nodes.cluster.shutdown()


@pytest.fixture
def nodes(cluster: Nodes) -> Iterator[Nodes]:
    yield cluster
    cluster.end_actors()
    for name in "abc":
        if name not in cluster.nodes:
            cluster.add(name)


def assert_all_hold(version: int, weights: str, rollouts: list[Any]) -> None:
    assert ray.get([r.version.remote() for r in rollouts]) == [version] * len(rollouts)
    assert ray.get([r.digest.remote() for r in rollouts]) == [weights] * len(rollouts)


def cycle(trainer: Any, rollouts: list[Any]) -> int:
    """Trains, and checks that every rollout has the bits of that; returns the version."""
    weights = ray.get(trainer.train.remote())
    version = refit(trainer, rollouts)
    assert_all_hold(version, weights, rollouts)
    return version


@pytest.mark.slow
@pytest.mark.parametrize("shm", ["auto", "off"])
def test_nodes_meet_at_tcp_with_keys_that_stay_in_actors(nodes: Nodes, shm: str) -> None:
    trainer = nodes.on("a", Trainer)
    rollouts = [nodes.on(name) for name in "abc"]
    config = CONFIG | {"broadcast.shm": shm}
    endpoint = connect(trainer, rollouts, config=config)
    assert endpoint.startswith(node_endpoint().removesuffix("0"))
    assert [cycle(trainer, rollouts) for _ in range(3)] == [1, 2, 3]
    workers = ray.get(trainer.workers.remote())
    assert {worker.name for worker in workers} == {"rollout-0", "rollout-1", "rollout-2"}
    assert all((worker.path == "shm") == (shm == "auto") for worker in workers)
    assert ray.get(rollouts[0].key_modes.remote()) == (0o700, 0o600)
    assert list(nodes.folder.rglob("*.secret")) == []
    assert connect(trainer, rollouts, config=config) == endpoint
    ray.get(trainer.close_publisher.remote())
    assert list(nodes.folder.rglob("*.public")) == []


@pytest.mark.slow
def test_one_node_meets_in_its_file_system_until_one_leaves(nodes: Nodes) -> None:
    trainer, rollouts = nodes.on("a", Trainer), [nodes.on("a")]
    assert connect(trainer, rollouts, config=CONFIG).startswith("ipc:///")
    assert cycle(trainer, rollouts) == 1
    for version, actor in ((2, rollouts[0]), (3, trainer)):
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(actor.die.remote())
        assert cycle(trainer, rollouts) == version
    assert connect(trainer, rollouts).startswith("ipc:///")
    rollouts.append(nodes.on("b"))
    assert cycle(trainer, rollouts) == 4  # versions go on in the other publisher
    assert connect(trainer, rollouts).startswith("tcp://")
    assert ray.get(trainer.admitted.remote()) == ["rollout-0.public", "rollout-1.public"]


@pytest.mark.slow
def test_rollouts_of_a_lost_node_are_left_out_then_caught_up(nodes: Nodes) -> None:
    trainer = nodes.on("a", Trainer)
    retried = nodes.create(KeyedRollout, resources={"b": 1}, max_task_retries=-1)
    rollouts = [nodes.on("a"), nodes.on("b"), retried]
    connect(trainer, rollouts, config=CONFIG)
    assert cycle(trainer, rollouts) == 1
    meeting = ray.get(trainer.refit_state.remote()).meeting
    nodes.remove("b")
    with pytest.raises((PeerError, DeadlineError), match=r"rollout-[12]|rollouts\[[12]\]"):
        refit(trainer, rollouts, timeout=10)
    with pytest.raises(DeadlineError, match=r"from rollouts\[1\], rollouts\[2\] in 10 s"):
        refit(trainer, rollouts, timeout=10)
    before = cycle(trainer, rollouts[:1])
    assert ray.get(trainer.admitted.remote()) == ["rollout-0.public"]
    nodes.add("b")
    connect(trainer, rollouts)
    caught_up = ray.get([rollout.receive.remote() for rollout in rollouts[1:]])
    assert caught_up == [before, before]
    assert len(set(ray.get([rollout.digest.remote() for rollout in rollouts]))) == 1
    assert cycle(trainer, rollouts) == before + 1
    assert ray.get(trainer.refit_state.remote()).meeting == meeting  # of the same process


@pytest.mark.slow
def test_rollouts_follow_a_trainer_whose_node_was_lost(nodes: Nodes) -> None:
    to_a = NodeAffinitySchedulingStrategy(nodes.id("a"), soft=True)
    trainer = nodes.create(Trainer, scheduling_strategy=to_a, max_task_retries=-1)
    rollouts = [nodes.on("b"), nodes.on("c")]
    endpoint = connect(trainer, rollouts, config=CONFIG)
    assert ray.get(trainer.node.remote()) == nodes.id("a")
    assert cycle(trainer, rollouts) == 1
    held = ray.get([rollout.digest.remote() for rollout in rollouts])
    ray.get(trainer.halt_in_the_next.remote())
    with ThreadPoolExecutor(1) as pool:
        failing = pool.submit(refit, trainer, rollouts)
        assert ray.get(trainer.wait_halted.remote())
        nodes.remove("a")
        with pytest.raises(ray.exceptions.RayActorError):
            failing.result()
    assert ray.get([rollout.digest.remote() for rollout in rollouts]) == held
    assert refit(trainer, rollouts) == 2
    assert cycle(trainer, rollouts) == 3
    assert ray.get(trainer.node.remote()) in (nodes.id("b"), nodes.id("c"))
    assert connect(trainer, rollouts) != endpoint


@pytest.mark.slow
def test_keys_of_strangers_and_of_lost_rollouts_are_refused(nodes: Nodes) -> None:
    trainer, rollouts = nodes.on("a", Trainer), [nodes.on("b"), nodes.on("c")]
    endpoint = connect(trainer, rollouts, config=CONFIG)
    assert cycle(trainer, rollouts) == 1
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(rollouts[0].die.remote())
    shutil.copy(nodes.folder / "rollout-0.stolen", nodes.folder / "lost.secret")
    assert cycle(trainer, rollouts) == 2  # Ray has restarted it, with another key
    left_out = rollouts.pop()
    shutil.copy(nodes.folder / "rollout-1.stolen", nodes.folder / "left_out.secret")
    assert cycle(trainer, rollouts) == 3

    server = nodes.folder / "server.public"
    server.touch(mode=0o600)
    server.write_text(ray.get(trainer.public_key.remote()))
    keygen(nodes.folder, "stranger")
    for name in ("lost", "left_out", "stranger"):
        secret = nodes.folder / f"{name}.secret"
        secret.chmod(0o600)
        keys = {"security_key": str(secret), "security_server_key": str(server)}
        with (
            Subscriber(endpoint, worker="rollout-0", **keys) as stranger,
            pytest.raises(SecurityError, match="does not allow this worker's key"),
        ):
            stranger.next(60.0)
    with (
        Subscriber(endpoint, broadcast_insecure=True) as stranger,
        pytest.raises((SecurityError, DeadlineError)),
    ):
        stranger.next(10.0)
    with pytest.raises(SecurityError, match="there are no keys"):
        Subscriber(endpoint)

    rollouts.append(left_out)
    assert cycle(trainer, rollouts) == 4
    workers = {worker.name for worker in ray.get(trainer.workers.remote()) if worker.subscribed}
    assert workers == {"rollout-0", "rollout-1"}


@pytest.mark.slow
def test_actors_that_ray_does_not_restart_are_named(nodes: Nodes) -> None:
    trainer, rollouts = nodes.on("a", Trainer), [nodes.on("b")]
    rollouts.append(nodes.create(KeyedRollout, resources={"c": 1}, max_restarts=0))
    with pytest.raises(StateError, match="connect"):
        refit(trainer, rollouts)
    connect(trainer, rollouts, config=CONFIG)
    nodes.end(rollouts[1])
    with pytest.raises(PeerError, match=r"does not restart rollouts\[1\]: create"):
        refit(trainer, rollouts)
    rollouts[1] = nodes.on("c")
    assert cycle(trainer, rollouts) == 1
    nodes.end(trainer)
    with pytest.raises(PeerError, match="does not restart the trainer: create"):
        refit(trainer, rollouts)
    assert cycle(nodes.on("a", Trainer), rollouts) == 2  # connected as the rollouts remember


@pytest.mark.slow
def test_a_quorum_publishes_although_a_rollout_is_lost(nodes: Nodes) -> None:
    trainer, rollouts = nodes.on("a", Trainer), [nodes.on(name) for name in "abc"]
    quorum = {"broadcast.commit": "quorum", "broadcast.quorum": 2}
    connect(trainer, rollouts, config=CONFIG | quorum)
    assert cycle(trainer, rollouts) == 1
    weights = ray.get(trainer.train.remote())
    ray.get(rollouts[2].fail_with.remote("die"))
    with pytest.raises((PeerError, ray.exceptions.RayActorError)):
        refit(trainer, rollouts)
    assert_all_hold(2, weights, rollouts[:2])
    assert cycle(trainer, rollouts) == 3


@pytest.mark.slow
def test_rays_placements_put_rollouts_by_node(nodes: Nodes) -> None:
    group = placement_group([{"CPU": 2}] * 2, strategy="STRICT_SPREAD")
    rollouts = [
        nodes.create(
            KeyedRollout, scheduling_strategy=PlacementGroupSchedulingStrategy(group, i // 2)
        )
        for i in range(4)
    ]
    trainer = nodes.create(
        Trainer, scheduling_strategy=NodeAffinitySchedulingStrategy(nodes.id("c"), soft=True)
    )
    connect(trainer, rollouts, config=CONFIG)
    assert cycle(trainer, rollouts) == 1
    where = ray.get([rollout.node.remote() for rollout in rollouts])
    assert where[0] == where[1] != where[2] == where[3]
    assert ray.get(trainer.node.remote()) == nodes.id("c")
    remove_placement_group(group)


@pytest.mark.slow
def test_an_endpoint_and_a_choice_about_keys_are_kept(nodes: Nodes) -> None:
    trainer, rollouts = nodes.on("a", Trainer), [nodes.on("b")]
    insecure = CONFIG | {"broadcast.insecure": True}
    endpoint = connect(trainer, rollouts, endpoint="tcp://127.0.0.1:0", config=insecure)
    assert endpoint.startswith("tcp://127.0.0.1:")
    assert cycle(trainer, rollouts) == 1
    assert ray.get(trainer.public_key.remote()) == ""
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(rollouts[0].die.remote())
    assert connect(trainer, rollouts) == endpoint
    assert cycle(trainer, rollouts) == 2
    for other in ({"config": CONFIG}, {"endpoint": "tcp://127.0.0.1:7000"}):
        with pytest.raises(StateError, match="close_publisher"):
            connect(trainer, rollouts, **other)
    ray.get(trainer.close_publisher.remote())
    assert connect(trainer, rollouts, config=CONFIG).startswith("tcp://127.0.0.1:")
    assert ray.get(trainer.public_key.remote()) != ""
    assert cycle(trainer, rollouts) == 3

    trainer = nodes.on("a", Trainer)
    folder = nodes.folder / "theirs"
    pair = keygen(folder, "trainer")
    mixed = CONFIG | {"security.key": str(pair.secret)}
    with pytest.raises(ConfigError, match=r"security.allow"):
        connect(trainer, rollouts, config=mixed)


def test_an_ipv6_address_stands_in_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "get_node_ip_address", lambda: "fd00::2")
    assert node_endpoint() == "tcp://[fd00::2]:0"


@pytest.mark.parametrize("endpoint", ["user://*", "tcp://127.0.0.1:0"])
def test_rollout_that_does_not_come_in_is_connected_anew(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    trainer, rollout = Trainer(), Rollout()
    settings = Settings(endpoint, CONFIG)
    meeting, connected = trainer.refit_meet(settings, far=False, above=6)
    has_keys = endpoint.startswith("tcp")
    assert bool(meeting.public_key) == has_keys
    assert connected == set()
    before = os.umask(0)  # files of keys are private all the same
    try:
        for _ in range(2):  # a rollout with another key each time
            key = rollout.refit_prepare(has_keys)
            assert list(tmp_path.rglob("*.secret")) == []
            names = trainer.refit_admit(["one"], {"one": key}, 60.0)
            with pytest.raises(DeadlineError, match=r"not connected after 0\.05 s: rollout-0"):
                trainer.refit_wait(["one"], 0.05)
            assert trainer.refit_meet(settings, far=False, above=0) == (meeting, set())
            rollout.refit_join(meeting, names["one"], settings)
            assert trainer.refit_wait(["one"], 60.0) == 0
            assert trainer.refit_meet(settings, far=False, above=0) == (meeting, {"one"})
            for file in tmp_path.rglob("*"):
                os.utime(file, (0, 0))
            trainer.refit_meet(settings, far=False, above=0)
            assert [file for file in tmp_path.rglob("*") if file.stat().st_mtime < 1e9] == []
            for folder in tmp_path.iterdir():  # as one does who cleans all the same
                shutil.rmtree(folder)
            found = set() if has_keys else {"one"}
            assert trainer.refit_meet(settings, far=False, above=0) == (meeting, found)
        key = rollout.refit_prepare(has_keys)
        trainer.refit_admit(["one"], {"one": key}, 60.0)
        with pytest.raises(RefitError):
            rollout.refit_join(meeting._replace(endpoint="tcp://nowhere"), "one", settings)
        assert [f.name for f in tmp_path.rglob("*") if f.is_file()] == [
            "rollout-0.public"
        ] * has_keys
        key = rollout.refit_prepare(has_keys)
        trainer.refit_admit(["one"], {"one": key}, 60.0)
        rollout.refit_join(meeting, "rollout-0", settings)
        assert trainer.refit_wait(["one"], 60.0) == 0
    finally:
        os.umask(before)
    names = trainer.refit_admit(["one"], {}, 60.0)
    assert trainer.refit_wait(["one"], 60.0) == 0
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(rollout.receive, 0, timeout=60.0)
        assert trainer.publish() == 7
        assert received.result() == 7
    rollout.unsubscribe()
    trainer.close_publisher()
    assert list(tmp_path.rglob("*")) == []


def test_rollout_left_out_without_keys_is_named_until_it_leaves() -> None:
    trainer, rollouts = Trainer(), [Rollout(), Rollout()]
    settings = Settings("user://*", CONFIG)
    meeting, _ = trainer.refit_meet(settings, far=False, above=0)
    names = trainer.refit_admit(["one", "two"], {"one": "", "two": ""}, 60.0)
    for actor, rollout in zip(names, rollouts, strict=True):
        rollout.refit_join(meeting, names[actor], settings)
    assert trainer.refit_wait(["one", "two"], 60.0) == 0
    with pytest.raises(StateError, match=r"left out is still connected .*rollout-1.*unsubscribe"):
        trainer.refit_admit(["one"], {}, 0.05)
    rollouts[1].unsubscribe()
    trainer.refit_admit(["one"], {}, 60.0)
    assert trainer.refit_wait(["one"], 60.0) == 0
    rollouts[0].unsubscribe()
    trainer.close_publisher()


def test_trainer_that_has_forgotten_its_rollouts_says_so() -> None:
    with pytest.raises(StateError, match="restarted the trainer"):
        Trainer().refit_admit(["one"], {"one": ""}, 60.0)
    with pytest.raises(StateError, match="restarted the trainer"):
        Trainer().refit_wait(["one"], 60.0)


def test_actors_lost_while_they_are_connected_are_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outcomes = [ray.exceptions.ActorDiedError(), ("user://a", 4)]

    def connect_living(*_: Any) -> Any:
        outcome = outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.setattr(adapter, "_connect_living", connect_living)
    assert connect(None, []) == "user://a"


def test_attributes_of_users_classes_are_free() -> None:
    for kind in (RefitTrainer, adapter.RefitRollout):
        private = {name for name in vars(kind) if name.startswith("_") and name[1] != "_"}
        assert {name for name in private if not name.startswith("_refit_")} == set()


def test_numbers_of_versions_go_on_after_failures() -> None:
    trainer = Trainer()
    trainer.refit_meet(Settings(None, CONFIG), far=False, above=3)
    trainer.weights, weights = {}, trainer.weights
    with pytest.raises(RefitError):
        trainer.publish()
    trainer.weights = weights
    assert trainer.publish() == 5
    assert trainer.publish(8) == 8
    trainer.close_publisher()
    trainer.refit_meet(Settings(None, CONFIG), far=False, above=2)
    assert trainer.publish() == 9
    trainer.refit_meet(Settings(None, CONFIG), far=False, above=20)  # held by one left out before
    assert trainer.publish() == 21
    trainer.close_publisher()


def test_keys_are_made_unless_someone_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    wants_keys = adapter._wants_keys
    assert wants_keys("tcp://127.0.0.1:0", None)
    assert wants_keys("tcp://192.0.2.1:7000", CONFIG)
    assert not wants_keys("user://*", None)
    assert not wants_keys("tcp://192.0.2.1:0", {"broadcast.insecure": True})
    theirs = {"key": "a.secret", "allow": "keys"}
    assert not wants_keys("tcp://192.0.2.1:0", {"security": theirs})
    with pytest.raises(NotFoundError):
        wants_keys("tcp://192.0.2.1:0", {"security.keys": "a.secret"})
    monkeypatch.setenv("REFIT_SECURITY_KEY", "a.secret")
    monkeypatch.setenv("REFIT_SECURITY_ALLOW", "keys")
    assert not wants_keys("tcp://192.0.2.1:0", CONFIG)


def test_keys_of_the_user_replace_those_of_connect(tmp_path: Path) -> None:
    """As actors have them from their environment: the trainer's and those of a rollout differ."""
    trainer, rollouts = Trainer(), [Rollout(), Rollout()]
    servers = keygen(tmp_path, "trainer")
    shared = keygen(tmp_path / "allow", "cluster")
    of_trainer = {"security.key": str(servers.secret), "security.allow": str(tmp_path / "allow")}
    of_rollout = {"security.key": str(shared.secret), "security.server_key": str(servers.public)}
    endpoint = "tcp://127.0.0.1:0"
    meeting, _ = trainer.refit_meet(Settings(endpoint, CONFIG | of_trainer), far=True, above=0)
    assert meeting.public_key == ""
    names = trainer.refit_admit(["one", "two"], {"one": "", "two": ""}, 60.0)
    for actor, rollout in zip(names, rollouts, strict=True):
        assert rollout.refit_prepare(wants_key=False) == ""
        rollout.refit_join(meeting, names[actor], Settings(endpoint, CONFIG | of_rollout))
    assert trainer.refit_wait(["one", "two"], 60.0) == 0
    workers = {worker.name for worker in trainer.workers()}
    assert workers == {"cluster/rollout-0", "cluster/rollout-1"}
    for rollout in rollouts:
        rollout.unsubscribe()
    trainer.close_publisher()
