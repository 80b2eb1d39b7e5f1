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
from ray.exceptions import ActorUnschedulableError, GetTimeoutError, RayActorError
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
    is_open: bool
    """Whether it has a publisher or a subscriber."""


def _state(
    version: int, settings: Settings | None, meeting: Meeting | None, is_open: bool
) -> State:
    here = ray.get_runtime_context()
    place = (here.get_node_id(), os.getuid())
    return State(here.get_actor_id() or "", place, version, settings, meeting, is_open)


def _write(path: Path, text: str) -> None:
    path.touch(mode=0o600)  # as the C library asks of keys, whatever the umask
    path.write_text(text)


class RefitTrainer:
    """What a trainer actor inherits: it publishes its weights, with the states away if it has any.

    The class that inherits has ``self.model`` or gives ``refit_weights``; and ``self.controller``,
    a ``refit.Controller``, if its optimizer is to leave the device meanwhile. All else is made in
    ``open_publisher``, so its own ``__init__`` is free. Attributes that begin with ``_refit_`` are
    not.
    """

    controller: Any = None
    model: Any = None
    _refit_publisher: Publisher | None = None
    _refit_settings: Settings | None = None
    _refit_meeting: Meeting | None = None
    _refit_allow: TemporaryDirectory[str] | None = None
    _refit_number: int = 0  # the highest that versions have had, of an earlier trainer, too

    def open_publisher(
        self, endpoint: str = HERE, config: Mapping[str, Any] | None = None, **overrides: Any
    ) -> str:
        """Opens the publisher and returns the endpoint that rollouts subscribe at.

        Once; a second call returns the same. Does not block.
        """
        if self._refit_publisher is None:
            self._refit_publisher = Publisher(endpoint, config, **overrides)
        return self._refit_publisher.endpoint

    def refit_weights(self) -> Iterable[tuple[str, Any]]:
        """What is published, as pairs of name and tensor: those of ``self.model``."""
        from refit.weights.named_weights import named_weights

        return named_weights(self.model)

    def wait_workers(self, count: int, timeout: float | None = None) -> None:
        """Waits until ``count`` rollouts are subscribed; DeadlineError."""
        self._refit_opened().wait_workers(count, timeout)

    def publish(self, version: int | None = None) -> int:
        """Clears the states, publishes the weights as one version, and returns its number.

        Blocks until all rollouts hold it. PeerError and DeadlineError name those that do not. All
        keeps the version before then; if it was lost only while it loaded the new one, the others
        hold that: ``workers`` gives the version of each worker.
        """
        publisher = self._refit_opened()
        if version is None:
            version = max(self._refit_number, publisher.version) + 1
        self._refit_number = max(self._refit_number, version)
        if self.controller is None:
            publisher.publish(self.refit_weights(), version)
        else:
            with self.controller.refit(version=version, publisher=publisher) as transaction:
                transaction.send(self.refit_weights())
        return publisher.version

    def version(self) -> int:
        """The version that was published last, 0 for none."""
        return self._refit_opened().version

    def workers(self) -> list[Worker]:
        """The rollouts as the publisher sees them, a ``refit.Worker`` each."""
        return self._refit_opened().workers()

    def close_publisher(self) -> None:
        """Says goodbye to the rollouts; again does nothing."""
        if self._refit_publisher is not None:
            self._refit_publisher.close()
            self._refit_publisher = None
        if self._refit_allow is not None:
            self._refit_allow.cleanup()
        self._refit_allow = self._refit_meeting = None

    # ---- For connect

    def refit_state(self) -> State:
        """What is known here. Does not block."""
        is_open = self._refit_publisher is not None
        return _state(self._refit_number, self._refit_settings, self._refit_meeting, is_open)

    def refit_meet(self, settings: Settings, far: bool, above: int) -> tuple[Meeting, set[str]]:
        """Opens the publisher if there is none, or another one if there are rollouts on other nodes
        (``far``) for the first time. Its versions are above ``above``.

        Makes a pair of keys for a tcp endpoint, unless the configuration has a key or says
        ``broadcast.insecure``. Returns how rollouts meet it, and which are connected.
        """
        met = self._refit_meeting
        if settings.endpoint is None and far and met and not met.endpoint.startswith("tcp:"):
            self.close_publisher()
        if self._refit_meeting is None:
            endpoint = settings.endpoint or (node_endpoint() if far else HERE)
            public_key = self._refit_open_with_keys(endpoint, settings.config)
            self._refit_meeting = Meeting(
                self._refit_opened().endpoint, public_key, uuid.uuid4().hex
            )
            self._refit_settings = settings
            self._refit_names: dict[str, str] = {}
            self._refit_connected: set[str] = set()
        self._refit_number = max(self._refit_number, above)
        self._refit_keep_keys()
        return self._refit_meeting, self._refit_connected

    def _refit_open_with_keys(self, endpoint: str, config: Mapping[str, Any] | None) -> str:
        """Returns what the public file says, empty if no keys were made. The secret one is in a
        private folder until the publisher has read it."""
        if self._refit_publisher is not None or not _wants_keys(endpoint, config):
            self.open_publisher(endpoint, config)
            return ""
        allow = TemporaryDirectory(prefix="refit-")
        with TemporaryDirectory(prefix="refit-") as folder:
            pair = keygen(folder, "trainer")
            keys = {"security_key": str(pair.secret), "security_allow": allow.name}
            self.open_publisher(endpoint, config, **keys)
            self._refit_allow = allow
            return pair.public.read_text()

    def _refit_keep_keys(self) -> None:
        """Keeps those who clean folders for temporary files from keys in use, which are not
        opened again. A rollout whose key is gone all the same is connected anew."""
        if self._refit_allow is None:
            return
        folder = Path(self._refit_allow.name)
        folder.mkdir(mode=0o700, exist_ok=True)
        os.utime(folder)
        for actor in list(self._refit_connected):
            try:
                os.utime(folder / f"{self._refit_names[actor]}.public")
            except FileNotFoundError:
                self._refit_connected.remove(actor)

    def refit_admit(
        self, rollouts: Sequence[str], new: Mapping[str, str], timeout: float
    ) -> dict[str, str]:
        """Admits these rollouts and no others; of ``new`` ones it gets the public keys. Returns
        their names.

        A rollout keeps its name, also if Ray restarts it. Workers that have lost their key, and
        those that had the names of ``new`` ones, are gone when it returns, so that no version
        counts on them. The same holds for workers left out of ``rollouts``. Writes files.

        DeadlineError if one of them is still connected after ``timeout`` seconds; StateError if it
        was left out, and has no key to take away.
        """
        settings = self._refit_met()
        self._refit_connected = set()
        for actor in rollouts:
            self._refit_names.setdefault(actor, f"rollout-{len(self._refit_names)}")
        kept = {self._refit_names[actor] for actor in rollouts if actor not in new}
        if self._refit_allow is None:
            names = {self._refit_names[actor] for actor in new}
            self._refit_wait_until(lambda there: there & names, timeout, "still connected")
            left_out = set(self._refit_names.values()) - kept - names
            chosen = make_config(settings.config, {})
            beats = chosen["broadcast.heartbeat_timeout_ms"] + 2 * chosen["broadcast.heartbeat_ms"]
            try:  # a dead one is not heard any more
                wait = min(timeout, beats / 1000)
                self._refit_wait_until(lambda there: there & left_out, wait, "still connected")
            except DeadlineError as why:
                raise StateError(
                    f"a rollout that is left out is {why}. Without keys it leaves by "
                    "rollout.unsubscribe.remote(), or with ray.kill"
                ) from None
        else:
            folder = Path(self._refit_allow.name)
            for file in folder.iterdir():
                if file.stem not in kept:
                    file.unlink()
            self._refit_wait_until(lambda there: there - kept, timeout, "still connected")
            for actor, key in new.items():
                _write(folder / "new", key)
                (folder / "new").replace(folder / f"{self._refit_names[actor]}.public")
        return self._refit_names

    def refit_wait(self, rollouts: Sequence[str], timeout: float) -> int:
        """Waits until these are subscribed, and returns the version that was published last.

        DeadlineError; then all are connected anew the next time, whatever has kept one away.
        """
        self._refit_met()
        self._refit_connected = set()
        names = {self._refit_names[actor] for actor in rollouts}
        self._refit_wait_until(lambda there: names - there, timeout, "not connected")
        self._refit_connected = set(rollouts)
        return self.version()

    def _refit_wait_until(
        self, wrong: Callable[[set[str]], set[str]], timeout: float, what: str
    ) -> None:
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
                self.wait_workers(len(workers) + 1, min(max(left, 0), 0.1))
            except DeadlineError as why:
                if left <= 0:
                    text = f"{what} after {timeout} s: {', '.join(sorted(names))}. {why}"
                    raise DeadlineError(text) from None

    def _refit_met(self) -> Settings:
        if self._refit_meeting is None or self._refit_settings is None:
            raise StateError(
                "Ray has restarted the trainer, or its publisher was closed, while rollouts were "
                "being connected: call connect or refit again"
            )
        return self._refit_settings

    def _refit_opened(self) -> Publisher:
        if self._refit_publisher is None:
            raise StateError("no publisher yet: call open_publisher on the trainer first")
        return self._refit_publisher


class RefitRollout:
    """What a rollout actor inherits: it receives whole versions and gives them to its engine.

    The class that inherits gives ``load_weights``, and has no attributes that begin with
    ``_refit_``. Its actor needs the options ``ACTOR``.
    """

    _refit_subscriber: Subscriber | None = None
    _refit_settings: Settings | None = None
    _refit_meeting: Meeting | None = None
    _refit_secret: str = ""  # what its file said, until it is used
    _refit_held: int = 0  # of this trainer's
    _refit_version: int = 0
    _refit_stopped: str = ""

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
        self._refit_held = 0
        self._refit_second_call = threading.Event()
        self._refit_subscriber = Subscriber(endpoint, worker=worker, config=config, **overrides)

    def receive(
        self, above: int | None = None, ticket: str = "", timeout: float | None = None
    ) -> int:
        """Waits for versions and loads them until one above ``above`` is held; returns its number.

        None: above what is held. (A worker that connects late is given the version before, and the
        trainer waits until that is loaded. A trainer that was restarted has none to give until it
        publishes.) Returns what is held if ``stop_waiting`` is called with the same ticket. An
        exception of ``load_weights`` refuses the version, and is raised. DeadlineError.
        """
        if self._refit_subscriber is None:
            raise StateError("not subscribed yet: call subscribe on the rollout first")
        least = (self._refit_held if above is None else above) + 1
        while self._refit_held < least and (self._refit_stopped != ticket or not ticket):
            try:
                update = self._refit_subscriber.next(timeout)
            except CancelledError:  # perhaps for a wait that was over already
                continue
            with update:
                self.load_weights(update)
            self._refit_held = self._refit_version = update.version
        return self._refit_held

    def stop_waiting(self, ticket: str) -> None:
        """Ends the ``receive`` of that ticket, now or when it begins."""
        self._refit_stopped = ticket
        if self._refit_subscriber is not None:
            self._refit_subscriber.wake()

    def wait_second_call(self, timeout: float) -> bool:
        """For ``connect``: whether ``second_call`` runs beside this call in ``timeout`` seconds."""
        return self._refit_second_call.wait(timeout)

    def second_call(self) -> None:
        """Ends ``wait_second_call``. Does not block."""
        self._refit_second_call.set()

    def version(self) -> int:
        """The version that is held, 0 for none."""
        return self._refit_version

    def unsubscribe(self) -> None:
        """Leaves the trainer in good order; again does nothing."""
        self._refit_meeting = None
        if self._refit_subscriber is not None:
            self._refit_subscriber.close()
            self._refit_subscriber = None

    # ---- For connect

    def refit_state(self) -> State:
        """What is known here. Does not block."""
        is_open = self._refit_subscriber is not None
        return _state(self._refit_version, self._refit_settings, self._refit_meeting, is_open)

    def refit_prepare(self, wants_key: bool) -> str:
        """Leaves a trainer, and makes a pair of keys for the next one: returns what the public file
        says. The secret one is on no disk until ``refit_join``."""
        self.unsubscribe()
        self._refit_secret = ""
        if not wants_key:
            return ""
        with TemporaryDirectory(prefix="refit-") as folder:
            pair = keygen(folder, "rollout")
            self._refit_secret = pair.secret.read_text()
            return pair.public.read_text()

    def refit_join(self, meeting: Meeting, name: str, settings: Settings) -> None:
        """Subscribes as ``name``, with the key of ``refit_prepare``. Does not block.

        The secret is in a private folder until the subscriber has read it.
        """
        secret, self._refit_secret = self._refit_secret, ""
        with TemporaryDirectory(prefix="refit-") as folder:
            keys: dict[str, Any] = {}
            if secret:
                for file, text in (("secret", secret), ("public", meeting.public_key)):
                    _write(Path(folder, file), text)
                keys = {
                    "security_key": str(Path(folder, "secret")),
                    "security_server_key": str(Path(folder, "public")),
                }
            self.subscribe(meeting.endpoint, name, settings.config, **keys)
        self._refit_meeting, self._refit_settings = meeting, settings


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
    a pair of keys, of which only the public half leaves it, and the trainer admits only these
    rollouts. No keys are made if ``config`` has ``security.key``, or says
    ``broadcast.insecure``.

    Again, it connects those that are not connected any more, which ``refit`` does by itself.
    ``endpoint`` and ``config`` are those of before, if they are not given. Others are a StateError
    while the publisher is open: ``trainer.close_publisher`` first.

    Blocks. ``timeout``, in seconds, is for actors to answer, which those do that Ray has created or
    restarted, after the calls that came before; and again for rollouts to come in: DeadlineError.
    PeerError for an actor that Ray does not restart. StateError for a rollout that runs one call at
    a time: ``stop_waiting`` would wait for ``receive``; for one that is left out of ``rollouts``
    but stays subscribed, without keys to take away; and if the trainer was lost meanwhile.
    SecurityError, InputOutputError and UnsupportedError as of ``Publisher``, where keys cannot be
    made or used.
    """
    return _connect(trainer, rollouts, Settings(endpoint, config), timeout)[0]


def refit(
    trainer: Any, rollouts: Sequence[Any], version: int | None = None, *, timeout: float = 60.0
) -> int:
    """For the driver: one cycle. Returns the version that the trainer and all rollouts hold now.

    Both sides are under way at once, as they must be. If the trainer fails, its exception is raised
    after every rollout that lives has stopped waiting; it names the dead, and a next call works. If
    only rollouts failed, theirs is raised, once the others have the version. Blocks for the cycle,
    also with a quorum.

    ``rollouts`` are all that there are. First it connects those that are not connected: new ones,
    and those that Ray has restarted, for which it waits. If Ray has restarted the trainer, all
    follow it, and version numbers go on. The exceptions of this, and ``timeout``, are those of
    ``connect``; nothing was published then. Actors that were connected by hand (``open_publisher``
    and ``subscribe``) are left as they are.
    """
    _, before = _connect(trainer, rollouts, None, timeout)
    ticket = uuid.uuid4().hex
    received = [_once(rollout.receive, before, ticket) for rollout in rollouts]
    try:
        published: int = ray.get(_once(trainer.publish, version))
    except BaseException:
        for rollout in rollouts:
            _once(rollout.stop_waiting, ticket)
        ray.wait(received, num_returns=len(received))
        raise
    ray.wait(received, num_returns=len(received))
    ray.get(received)
    return published


def _wants_keys(endpoint: str, config: Mapping[str, Any] | None) -> bool:
    chosen = make_config(config, {})
    has_choice = bool(chosen["security.key"]) or chosen.get("broadcast.insecure")
    return endpoint.startswith("tcp:") and not has_choice


def _once(method: Any, *arguments: Any) -> Any:
    """Calls a method of an actor as it is now: one that Ray has restarted meanwhile has forgotten
    what the call is about, whatever the actor's own ``max_task_retries``."""
    return method.options(max_task_retries=0).remote(*arguments)


def _states(actors: Mapping[str, Any], timeout: float) -> list[State]:
    """What each says. Those that are busy, and that Ray creates or restarts, are waited for."""
    # With retries a call waits for the restart.
    asked = {
        who: actor.refit_state.options(max_task_retries=-1).remote()
        for who, actor in actors.items()
    }
    end = time.monotonic() + timeout
    found: list[State] = []
    late: list[str] = []
    lost: dict[str, BaseException] = {}
    for who, answer in asked.items():
        try:
            found.append(ray.get(answer, timeout=max(end - time.monotonic(), 0)))
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
            f"no answer from {', '.join(late)} in {timeout} s: is there a node with the resources "
            "that they ask for, are they at their __init__ or at an earlier call? Wait longer "
            "(timeout=), or go on without those rollouts"
        )
    return found


def _connect(
    trainer: Any, rollouts: Sequence[Any], given: Settings | None, timeout: float
) -> tuple[str, int]:
    """Connects those that are not connected. Returns the endpoint, empty if all were connected by
    hand, and the version that was published there last. What is not given is as the actors remember
    it; if nothing is (None), they were connected before."""
    try:
        return _connect_living(trainer, rollouts, given, timeout)
    except RayActorError:  # lost after it had answered: now it says so, or is restarted
        return _connect_living(trainer, rollouts, given, timeout)


def _connect_living(
    trainer: Any, rollouts: Sequence[Any], given: Settings | None, timeout: float
) -> tuple[str, int]:
    actors = {f"rollouts[{i}]": rollout for i, rollout in enumerate(rollouts)}
    head, *states = _states({"the trainer": trainer} | actors, timeout)
    settings = next((s.settings for s in (head, *states) if s.settings), None)
    if given is None and settings is None:
        if not all(state.is_open for state in (head, *states)):
            raise StateError("these actors are not connected: call refit.integrations.ray.connect")
        return "", ray.get(_once(trainer.version))
    settings = settings or Settings(None, None)
    if given is not None:
        endpoint = settings.endpoint if given.endpoint is None else given.endpoint
        config = settings.config if given.config is None else given.config
        if head.meeting and (endpoint, config) != settings:
            raise StateError(
                "the trainer's publisher is open with another endpoint or config: to change them, "
                "call ray.get(trainer.close_publisher.remote()) first, and connect then"
            )
        settings = Settings(endpoint, config)
    far = any(state.place != head.place for state in states)
    above = max(state.version for state in (head, *states))
    meeting: Meeting
    meeting, connected = ray.get(_once(trainer.refit_meet, settings, far, above))
    new = {
        state.actor: rollout
        for rollout, state in zip(rollouts, states, strict=True)
        if state.meeting != meeting or state.actor not in connected
    }
    ids = [state.actor for state in states]
    if new or connected != set(ids):
        has_keys = bool(meeting.public_key)
        keys = ray.get([_once(rollout.refit_prepare, has_keys) for rollout in new.values()])
        admit = _once(trainer.refit_admit, ids, dict(zip(new, keys, strict=True)), timeout)
        names = ray.get(admit)
        ray.get([_once(r.refit_join, meeting, names[a], settings) for a, r in new.items()])
        _check_second_calls({names[actor]: rollout for actor, rollout in new.items()}, timeout)
    return meeting.endpoint, ray.get(_once(trainer.refit_wait, ids, timeout))


def _check_second_calls(rollouts: Mapping[str, Any], timeout: float) -> None:
    """StateError for those that run one call at a time; all of them leave the trainer then."""
    seconds = [_once(rollout.wait_second_call, timeout) for rollout in rollouts.values()]
    ray.get([_once(rollout.second_call) for rollout in rollouts.values()])
    single = [name for name, second in zip(rollouts, ray.get(seconds), strict=True) if not second]
    if single:
        ray.get([_once(rollout.unsubscribe) for rollout in rollouts.values()])
        raise StateError(
            f"one call at a time runs in {', '.join(single)}, which could not be told to stop "
            "waiting: create rollouts with .options(**refit.integrations.ray.ACTOR)"
        )
