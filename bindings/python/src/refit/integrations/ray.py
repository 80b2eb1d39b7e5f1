"""refit between Ray actors: a trainer, its rollout workers, and the driver's one call per cycle.

    class Trainer(RefitTrainer): ...          # has self.model, and self.controller if it has states
    class Rollout(RefitRollout): ...          # has load_weights(update)

    trainer = ray.remote(Trainer).options(**ACTOR).remote(...)
    rollouts = [ray.remote(Rollout).options(**ACTOR).remote(...) for _ in range(4)]
    connect(trainer, rollouts)
    for step in range(steps):
        refit(trainer, rollouts)              # every rollout holds the new version, or it raises
        ...

The endpoint is what an actor method returns, so nothing else is needed to find each other. Ray
pickles what goes into an actor and comes out of it: endpoints, configurations as plain mappings and
versions travel; publishers, subscribers and controllers stay in the actor that opened them.

The weights go from process to process by ``refit.Publisher``, never through Ray's object store.
"""

import threading
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.util import get_node_ip_address

from refit.errors import CancelledError, StateError
from refit.weights.publisher import Publisher
from refit.weights.subscriber import Subscriber
from refit.weights.update import Update
from refit.weights.worker import Worker

ACTOR: dict[str, Any] = {"max_concurrency": 2}
"""Options for the actors: a second thread, so that ``stop_waiting`` reaches one that waits."""

HERE = "user://*"
"""An endpoint for actors that are all on one node, and of one user: a free name of its own."""


def node_endpoint() -> str:
    """An endpoint that other nodes reach: this node's address and any free port.

    Beyond one node keys are needed (``security.key``), or ``broadcast.insecure: true``, only in a
    network that you trust. Does not block.
    """
    return f"tcp://{get_node_ip_address()}:0"


class RefitTrainer:
    """What a trainer actor inherits: it publishes its weights, with the states away if it has any.

    The class that inherits has ``self.model`` or gives ``refit_weights``; and ``self.controller``,
    a ``refit.Controller``, if its optimizer is to leave the device meanwhile. All else is made in
    ``open_publisher``, so its own ``__init__`` is free.
    """

    controller: Any = None
    model: Any = None
    _publisher: Publisher | None = None

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

    def _opened(self) -> Publisher:
        if self._publisher is None:
            raise StateError("no publisher yet: call open_publisher on the trainer first")
        return self._publisher


class RefitRollout:
    """What a rollout actor inherits: it receives whole versions and gives them to its engine.

    The class that inherits gives ``load_weights``. Its actor needs the options ``ACTOR``.
    """

    _subscriber: Subscriber | None = None
    _held: int = 0
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
            self._held = update.version
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
        return self._held

    def unsubscribe(self) -> None:
        """Leaves the trainer in good order; again does nothing."""
        if self._subscriber is not None:
            self._subscriber.close()
            self._subscriber = None


def connect(
    trainer: Any,
    rollouts: Sequence[Any],
    *,
    endpoint: str = HERE,
    config: Mapping[str, Any] | None = None,
    timeout: float = 60.0,
) -> str:
    """For the driver: opens the trainer's publisher and subscribes every rollout as rollout-0, 1, …

    Returns the endpoint once all are there; in ``timeout`` seconds, or DeadlineError. StateError
    for a rollout that runs one call at a time: ``stop_waiting`` would wait for ``receive``.
    """
    found: str = ray.get(trainer.open_publisher.remote(endpoint, config))
    ray.get([r.subscribe.remote(found, f"rollout-{i}", config) for i, r in enumerate(rollouts)])
    seconds = [rollout.wait_second_call.remote(timeout) for rollout in rollouts]
    ray.get([rollout.second_call.remote() for rollout in rollouts])
    single = [f"rollout-{i}" for i, second in enumerate(ray.get(seconds)) if not second]
    if single:
        ray.get([rollout.unsubscribe.remote() for rollout in rollouts])
        raise StateError(
            f"one call at a time runs in {', '.join(single)}, which could not be told to stop "
            "waiting: create rollouts with .options(**refit.integrations.ray.ACTOR)"
        )
    ray.get(trainer.wait_workers.remote(len(rollouts), timeout))
    return found


def refit(trainer: Any, rollouts: Sequence[Any], version: int | None = None) -> int:
    """For the driver: one cycle. Returns the version that the trainer and all rollouts hold now.

    Both sides are under way at once, as they must be. If the trainer fails, its exception is raised
    after every rollout that lives has stopped waiting; it names the dead, and a next call with the
    others works. If only rollouts failed, theirs is raised. Blocks for the cycle.
    """
    ticket = uuid.uuid4().hex
    before: int = ray.get(trainer.version.remote())
    received = [rollout.receive.remote(before, ticket) for rollout in rollouts]
    try:
        published: int = ray.get(trainer.publish.remote(version))
    except BaseException:
        for rollout in rollouts:
            rollout.stop_waiting.remote(ticket)
        ray.wait(received, num_returns=len(received))
        raise
    ray.get(received)
    return published
