"""refit between Ray actors: a trainer, its rollout workers, and the driver's one call per cycle.

    class Trainer(RefitTrainer): ...          # has self.model, and self.controller if it has states
    class Rollout(RefitRollout): ...          # has load_weights(update)

    trainer = ray.remote(Trainer).options(**ACTOR).remote(...)
    rollouts = [ray.remote(Rollout).options(**ACTOR).remote(...) for _ in range(4)]
    connect(trainer, rollouts)
    for step in range(steps):
        refit(trainer, rollouts)              # every rollout holds the new version, or it raises
        ...

Ray pickles what goes into an actor and comes out of it: endpoints, public keys, configurations as
plain mappings and versions travel; publishers, subscribers, controllers and secret keys stay in the
actor that made them. The weights go from process to process by ``refit.Publisher``, never through
Ray's object store.

An actor that Ray restarts has forgotten everything. So nothing here is kept by the driver:
``refit`` asks each actor what it is connected to, and connects those that have forgotten, as
``connect`` had done, which the others remember.
"""

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import ray
from ray.exceptions import (
    ActorUnavailableError,
    ActorUnschedulableError,
    GetTimeoutError,
    RayActorError,
)
from ray.util import get_node_ip_address

from refit._c.config import make_config
from refit.errors import CancelledError, DeadlineError, PeerError, StateError
from refit.weights.keys import keygen
from refit.weights.publisher import Publisher
from refit.weights.subscriber import Subscriber
from refit.weights.update import Update
from refit.weights.worker import Worker

ACTOR: dict[str, Any] = {"max_concurrency": 2}
"""Options for the actors: a second thread, so that ``stop_waiting`` reaches one that waits."""

HERE = "user://*"
"""An endpoint for actors that are all on one node, and of one user: a free name of its own."""


def node_endpoint() -> str:
    """An endpoint that other nodes reach: the address that Ray has for this node, and any free
    port. Does not block."""
    address = get_node_ip_address()
    return f"tcp://[{address}]:0" if ":" in address else f"tcp://{address}:0"


class Settings(NamedTuple):
    """What ``connect`` was given. Each actor keeps it for those that have forgotten it."""

    endpoint: str | None
    config: Mapping[str, Any] | None


class Meeting(NamedTuple):
    """A publisher, as rollouts need it."""

    endpoint: str
    public_key: str
    """What the trainer's .public file says; empty if ``connect`` made no keys."""
    serial: str
    """Another one for each publisher."""


class State(NamedTuple):
    """What an actor answers to ``connect``. One that Ray has restarted knows the first two."""

    actor: str
    """Ray's id, which a restart keeps."""
    place: tuple[str, int]
    """Its node and its user."""
    version: int
    settings: Settings | None
    meeting: Meeting | None


def _state(version: int, settings: Settings | None, meeting: Meeting | None) -> State:
    here = ray.get_runtime_context()
    place = (here.get_node_id(), os.getuid())
    return State(here.get_actor_id() or "", place, version, settings, meeting)


def _write(path: Path, text: str) -> None:
    path.touch(mode=0o600)  # as the C library asks of keys, whatever the umask
    path.write_text(text)


class RefitTrainer:
    """What a trainer actor inherits: it publishes its weights, with the states away if it has any.

    The class that inherits has ``self.model`` or gives ``refit_weights``; and ``self.controller``,
    a ``refit.Controller``, if its optimizer is to leave the device meanwhile. All else is made in
    ``open_publisher``, so its own ``__init__`` is free.
    """

    controller: Any = None
    model: Any = None
    _publisher: Publisher | None = None
    _settings: Settings | None = None
    _meeting: Meeting | None = None
    _allow: TemporaryDirectory[str] | None = None
    _number: int = 0  # the highest that versions have had, of an earlier trainer, too

    def open_publisher(
        self, endpoint: str = HERE, config: Mapping[str, Any] | None = None, **overrides: Any
    ) -> str:
        """Opens the publisher and returns the endpoint that rollouts subscribe at.

        Once; a second call returns the same. Does not block.
        """
        if self._publisher is None:
            self._publisher = Publisher(endpoint, config, **overrides)
        return self._publisher.endpoint

    def refit_weights(self) -> Iterable[tuple[str, Any]]:
        """What is published, as pairs of name and tensor: those of ``self.model``."""
        from refit.weights.named_weights import named_weights

        return named_weights(self.model)

    def wait_workers(self, count: int, timeout: float | None = None) -> None:
        """Waits until ``count`` rollouts are subscribed; DeadlineError."""
        self._opened().wait_workers(count, timeout)

    def publish(self, version: int | None = None) -> int:
        """Clears the states, publishes the weights as one version, and returns its number.

        Blocks until all rollouts hold it. PeerError and DeadlineError name those that do not. All
        keeps the version before then; if it was lost only while it loaded the new one, the others
        hold that: ``workers`` gives the version of each worker.
        """
        publisher = self._opened()
        if version is None:
            version = max(self._number, publisher.version) + 1
        self._number = max(self._number, version)
        if self.controller is None:
            publisher.publish(self.refit_weights(), version)
        else:
            with self.controller.refit(version=version, publisher=publisher) as transaction:
                transaction.send(self.refit_weights())
        return publisher.version

    def version(self) -> int:
        """The version that was published last, 0 for none."""
        return self._opened().version

    def workers(self) -> list[Worker]:
        """The rollouts as the publisher sees them, a ``refit.Worker`` each."""
        return self._opened().workers()

    def close_publisher(self) -> None:
        """Says goodbye to the rollouts; again does nothing."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None
        if self._allow is not None:
            self._allow.cleanup()
        self._allow = self._meeting = None

    # ---- For connect

    def refit_state(self) -> State:
        """What is known here. Does not block."""
        return _state(self._number, self._settings, self._meeting)

    def refit_meet(self, settings: Settings, far: bool, above: int) -> tuple[Meeting, set[str]]:
        """Opens the publisher if there is none, or another one if there are rollouts on other nodes
        (``far``) for the first time. Its versions are above ``above``.

        Makes a pair of keys for a tcp endpoint, unless the configuration has a key or says
        ``broadcast.insecure``. Returns how rollouts meet it, and which are connected.
        """
        automatic = settings.endpoint is None
        if automatic and far and self._meeting and not self._meeting.endpoint.startswith("tcp:"):
            self.close_publisher()
        if self._meeting is None:
            endpoint = settings.endpoint or (node_endpoint() if far else HERE)
            public_key = self._open_with_keys(endpoint, settings.config)
            self._meeting = Meeting(self._opened().endpoint, public_key, uuid.uuid4().hex)
            self._number = max(self._number, above)
            self._names: dict[str, str] = {}
            self._connected: set[str] = set()
        self._settings = settings
        return self._meeting, self._connected

    def _open_with_keys(self, endpoint: str, config: Mapping[str, Any] | None) -> str:
        """Returns what the public file says, empty if no keys were made. The secret one is in a
        private folder until the publisher has read it."""
        if self._publisher is not None or not _wants_keys(endpoint, config):
            self.open_publisher(endpoint, config)
            return ""
        allow = TemporaryDirectory(prefix="refit-")
        with TemporaryDirectory(prefix="refit-") as folder:
            pair = keygen(folder, "trainer")
            keys = {"security_key": str(pair.secret), "security_allow": allow.name}
            self.open_publisher(endpoint, config, **keys)
            self._allow = allow
            return pair.public.read_text()

    def refit_admit(
        self, rollouts: Sequence[str], new: Mapping[str, str], timeout: float
    ) -> dict[str, str]:
        """Admits these rollouts and no others; of ``new`` ones it gets the public keys. Returns
        their names.

        A rollout keeps its name, also if Ray restarts it. Workers that have lost their key, and
        those that had the names of ``new`` ones, are gone when it returns, so that no version
        counts on them; DeadlineError. Writes files.
        """
        for actor in rollouts:
            self._names.setdefault(actor, f"rollout-{len(self._names)}")
        kept = {self._names[actor] for actor in rollouts if actor not in new}
        if self._allow is None:
            names = {self._names[actor] for actor in new}
            self._wait_until(lambda there: there & names, timeout, "still connected")
        else:
            folder = Path(self._allow.name)
            for file in folder.iterdir():
                if file.stem not in kept:
                    file.unlink()
            self._wait_until(lambda there: there - kept, timeout, "still connected")
            for actor, key in new.items():
                _write(folder / "new", key)
                (folder / "new").replace(folder / f"{self._names[actor]}.public")
        return self._names

    def refit_wait(self, rollouts: Sequence[str], timeout: float) -> int:
        """Waits until these are subscribed, and returns the version that was published last.

        DeadlineError; then all are connected anew the next time, whatever has kept one away.
        """
        self._connected = set()
        names = {self._names[actor] for actor in rollouts}
        self._wait_until(lambda there: names - there, timeout, "not connected")
        self._connected = set(rollouts)
        return self.version()

    def _wait_until(self, wrong: Callable[[set[str]], set[str]], timeout: float, what: str) -> None:
        """Waits until nothing is ``wrong`` with the names of those that are subscribed."""
        end = time.monotonic() + timeout
        while True:
            workers = [worker.name for worker in self.workers() if worker.subscribed]
            there = {name.rpartition("/")[2] for name in workers}  # KEY/NAME with a user's keys
            names = wrong(there)
            if not names:
                return
            left = end - time.monotonic()
            try:  # for one more, but not for long: one may leave, too
                self.wait_workers(len(there) + 1, min(max(left, 0), 0.1))
            except DeadlineError as why:
                if left <= 0:
                    text = f"{what} after {timeout} s: {', '.join(sorted(names))}. {why}"
                    raise DeadlineError(text) from None

    def _opened(self) -> Publisher:
        if self._publisher is None:
            raise StateError("no publisher yet: call open_publisher on the trainer first")
        return self._publisher


class RefitRollout:
    """What a rollout actor inherits: it receives whole versions and gives them to its engine.

    The class that inherits gives ``load_weights``. Its actor needs the options ``ACTOR``.
    """

    _subscriber: Subscriber | None = None
    _settings: Settings | None = None
    _meeting: Meeting | None = None
    _keys: TemporaryDirectory[str] | None = None
    _held: int = 0  # of this trainer's
    _version: int = 0
    _stopped: str = ""

    def load_weights(self, update: Update) -> None:
        """Takes a version over, such as by ``update.load_into(model)``: it ends with this call."""
        raise NotImplementedError(f"{type(self).__name__} has no load_weights(update)")

    def subscribe(
        self,
        endpoint: str,
        worker: str | None = None,
        config: Mapping[str, Any] | None = None,
        **overrides: Any,
    ) -> None:
        """Subscribes at the trainer's endpoint as ``worker``; leaves another trainer first.

        Does not block: the trainer waits for its workers.
        """
        self.unsubscribe()
        self._held = 0
        self._second_call = threading.Event()
        self._subscriber = Subscriber(endpoint, worker=worker, config=config, **overrides)

    def receive(
        self, above: int | None = None, ticket: str = "", timeout: float | None = None
    ) -> int:
        """Waits for versions and loads them until one above ``above`` is held; returns its number.

        None: above what is held. (A worker that connects late is given the version before, and the
        trainer waits until that is loaded.) Returns what is held if ``stop_waiting`` is called with
        the same ticket. An exception of ``load_weights`` refuses the version, and is raised.
        DeadlineError.
        """
        if self._subscriber is None:
            raise StateError("not subscribed yet: call subscribe on the rollout first")
        least = (self._held if above is None else above) + 1
        while self._held < least and (self._stopped != ticket or not ticket):
            try:
                update = self._subscriber.next(timeout)
            except CancelledError:  # perhaps for a wait that was over already
                continue
            with update:
                self.load_weights(update)
            self._held = self._version = update.version
        return self._held

    def stop_waiting(self, ticket: str) -> None:
        """Ends the ``receive`` of that ticket, now or when it begins."""
        self._stopped = ticket
        if self._subscriber is not None:
            self._subscriber.wake()

    def wait_second_call(self, timeout: float) -> bool:
        """For ``connect``: whether ``second_call`` runs beside this call in ``timeout`` seconds."""
        return self._second_call.wait(timeout)

    def second_call(self) -> None:
        """Ends ``wait_second_call``. Does not block."""
        self._second_call.set()

    def version(self) -> int:
        """The version that is held, 0 for none."""
        return self._version

    def unsubscribe(self) -> None:
        """Leaves the trainer in good order; again does nothing."""
        self._meeting = None
        if self._subscriber is not None:
            self._subscriber.close()
            self._subscriber = None

    # ---- For connect

    def refit_state(self) -> State:
        """What is known here. Does not block."""
        return _state(self._version, self._settings, self._meeting)

    def refit_prepare(self, wants_key: bool) -> str:
        """Leaves a trainer, and makes a pair of keys for the next one: returns what the public file
        says. The secret one is in a private folder until ``refit_join`` has read it."""
        self.unsubscribe()
        self._forget_keys()
        if not wants_key:
            return ""
        self._keys = TemporaryDirectory(prefix="refit-")
        return keygen(self._keys.name, "rollout").public.read_text()

    def refit_join(self, meeting: Meeting, name: str, settings: Settings) -> None:
        """Subscribes as ``name``, with the key of ``refit_prepare``. Does not block."""
        overrides: dict[str, Any] = {}
        if self._keys is not None:
            folder = Path(self._keys.name)
            _write(folder / "trainer.public", meeting.public_key)
            overrides = {
                "security_key": str(folder / "rollout.secret"),
                "security_server_key": str(folder / "trainer.public"),
            }
        self.subscribe(meeting.endpoint, name, settings.config, **overrides)
        self._forget_keys()
        self._meeting, self._settings = meeting, settings

    def _forget_keys(self) -> None:
        if self._keys is not None:
            self._keys.cleanup()
        self._keys = None


def connect(
    trainer: Any,
    rollouts: Sequence[Any],
    *,
    endpoint: str | None = None,
    config: Mapping[str, Any] | None = None,
    timeout: float = 60.0,
) -> str:
    """For the driver: opens the trainer's publisher and subscribes every rollout, as rollout-0, 1 …

    Returns the endpoint once all are there. Where all actors are on one node, that is a socket in
    its file system, and else ``node_endpoint``; or ``endpoint``. At a tcp endpoint each actor makes
    a pair of keys, of which the public half alone leaves it, and the trainer admits these rollouts
    and nobody else. No keys are made if ``config`` has ``security.key``, or says
    ``broadcast.insecure``.

    Again, it connects those that are not connected any more, which ``refit`` does by itself.

    Blocks until Ray has created the actors. ``timeout``, in seconds, is for actors that Ray
    restarts, and again for rollouts to come in: DeadlineError. PeerError for an actor that Ray does
    not restart. StateError for a rollout that runs one call at a time: ``stop_waiting`` would wait
    for ``receive``. SecurityError, InputOutputError and UnsupportedError as of ``Publisher``, where
    keys cannot be made or used.
    """
    return _connect(trainer, rollouts, Settings(endpoint, config), timeout)[0]


def refit(
    trainer: Any, rollouts: Sequence[Any], version: int | None = None, *, timeout: float = 60.0
) -> int:
    """For the driver: one cycle. Returns the version that the trainer and all rollouts hold now.

    Both sides are under way at once, as they must be. If the trainer fails, its exception is raised
    after every rollout that lives has stopped waiting; it names the dead, and a next call works. If
    only rollouts failed, theirs is raised, once the others have the version. Blocks for the cycle.

    ``rollouts`` are all that there are. First it connects those that are not connected: new ones,
    and those that Ray has restarted, for which it waits. If Ray has restarted the trainer, all
    follow it, and version numbers go on. The exceptions of this, and ``timeout``, are those of
    ``connect``; nothing was published then.
    """
    _, before = _connect(trainer, rollouts, None, timeout)
    ticket = uuid.uuid4().hex
    received = [rollout.receive.remote(before, ticket) for rollout in rollouts]
    try:
        published: int = ray.get(trainer.publish.remote(version))
    except BaseException:
        for rollout in rollouts:
            rollout.stop_waiting.remote(ticket)
        ray.wait(received, num_returns=len(received))
        raise
    ray.wait(received, num_returns=len(received))
    ray.get(received)
    return published


def _wants_keys(endpoint: str, config: Mapping[str, Any] | None) -> bool:
    chosen = make_config(config, {})
    has_choice = bool(chosen["security.key"]) or chosen.get("broadcast.insecure")
    return endpoint.startswith("tcp:") and not has_choice


def _states(actors: Mapping[str, Any], timeout: float) -> list[State]:
    """What each says. One that is busy is waited for, one that Ray restarts until the deadline."""
    asked = {who: actor.refit_state.remote() for who, actor in actors.items()}
    found: list[State] = []
    late: list[str] = []
    lost: dict[str, BaseException] = {}
    end: float | None = None
    for who, actor in actors.items():
        try:
            try:
                found.append(ray.get(asked[who]))
            except ActorUnavailableError:  # with retries the call waits for the restart
                again = actor.refit_state.options(max_task_retries=-1).remote()
                end = end or time.monotonic() + timeout
                found.append(ray.get(again, timeout=max(end - time.monotonic(), 0)))
        except GetTimeoutError:
            late.append(who)
        except (RayActorError, ActorUnschedulableError) as why:
            lost[who] = why
    if lost:
        raise PeerError(
            f"Ray does not restart {', '.join(lost)}: create others in their place with "
            f"max_restarts, or go on without those rollouts. {next(iter(lost.values()))}"
        ) from next(iter(lost.values()))
    if late:
        raise DeadlineError(
            f"Ray has not restarted {', '.join(late)} in {timeout} s: is there a node with the "
            "resources that they ask for? Wait longer (timeout=), or go on without those rollouts"
        )
    return found


def _connect(
    trainer: Any, rollouts: Sequence[Any], settings: Settings | None, timeout: float
) -> tuple[str, int]:
    """Connects those that are not connected. Returns the endpoint, and the version that was
    published there last. Without settings, as the actors remember them."""
    actors = {f"rollouts[{i}]": rollout for i, rollout in enumerate(rollouts)}
    head, *states = _states({"the trainer": trainer} | actors, timeout)
    settings = settings or next((s.settings for s in (head, *states) if s.settings), None)
    if settings is None:
        raise StateError("these actors are not connected: call refit.integrations.ray.connect")
    far = any(state.place != head.place for state in states)
    above = max(state.version for state in (head, *states))
    meeting: Meeting
    meeting, connected = ray.get(trainer.refit_meet.remote(settings, far, above))
    new = {
        state.actor: rollout
        for rollout, state in zip(rollouts, states, strict=True)
        if state.meeting != meeting or state.actor not in connected
    }
    ids = [state.actor for state in states]
    if new or connected != set(ids):
        has_keys = bool(meeting.public_key)
        keys = ray.get([rollout.refit_prepare.remote(has_keys) for rollout in new.values()])
        admit = trainer.refit_admit.remote(ids, dict(zip(new, keys, strict=True)), timeout)
        names = ray.get(admit)
        ray.get([r.refit_join.remote(meeting, names[a], settings) for a, r in new.items()])
        _check_second_calls({names[actor]: rollout for actor, rollout in new.items()}, timeout)
    return meeting.endpoint, ray.get(trainer.refit_wait.remote(ids, timeout))


def _check_second_calls(rollouts: Mapping[str, Any], timeout: float) -> None:
    """StateError for those that run one call at a time; all of them leave the trainer then."""
    seconds = [rollout.wait_second_call.remote(timeout) for rollout in rollouts.values()]
    ray.get([rollout.second_call.remote() for rollout in rollouts.values()])
    single = [name for name, second in zip(rollouts, ray.get(seconds), strict=True) if not second]
    if single:
        ray.get([rollout.unsubscribe.remote() for rollout in rollouts.values()])
        raise StateError(
            f"one call at a time runs in {', '.join(single)}, which could not be told to stop "
            "waiting: create rollouts with .options(**refit.integrations.ray.ACTOR)"
        )
