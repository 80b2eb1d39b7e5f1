"""The trainer's end of vLLM's weight transfer, for vLLM versions that have one (0.26 and later).

vLLM drives it on every trainer rank: ``trainer_init`` once, ``send_weights`` for each version. Rank
0 publishes and tells the inference side through vLLM's client what to do; the other ranks only run
the source, since making its tensors is a collective.

Which class of vLLM this is mixed into, and where it is registered, is in _vllm_transfer.py. Drawn
after TrainerWeightTransferEngine, WeightSource and VLLMWeightSyncClient of
vllm/distributed/weight_transfer/base.py.
"""

import inspect
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from threading import Event
from typing import TYPE_CHECKING, Any, Self

from refit._c import dtypes
from refit.errors import CancelledError, InvalidError, StateError
from refit.integrations._sender import run_to_the_end
from refit.weights.manifest import TensorSpec

if TYPE_CHECKING:
    from refit.weights.publisher import Publisher

CONNECT_S = 30.0
"""How long a worker may take to reach the trainer, which waits for it meanwhile."""

GRACE_S = 5.0
"""How long a commit goes on when vLLM says that its workers failed: their own words are better."""


@dataclass
class TrainerInitInfo:
    """The caller's options on each trainer rank, besides ``rank``.

    Where rank 0 binds, the name under which workers reach it (None: as it is bound), and how long
    a version may take them.
    """

    bind: str = "user://*"
    host: str | None = None
    config: dict[str, Any] | None = None
    timeout_s: float = 600.0


class TrainerEngine:
    """What vLLM 0.27 and later calls. `client` and `source` are the caller's."""

    client: Any
    source: Any
    is_sender: bool
    _publisher: "Publisher | None" = None
    _timeout_s = 600.0
    _half_way = False

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Self:
        """On rank 0 binds and makes every inference worker subscribe. On an exception nothing stays
        open. InvalidError for a source that refit cannot send."""
        return cls._made((), init_info, client, source)

    @classmethod
    def _made(cls, config: tuple[Any, ...], init_info: Any, client: Any, source: Any) -> Self:
        _check_whole(source)
        made = cls(*config, client=client, source=source, is_sender=init_info.is_sender)  # type: ignore[call-arg]
        made._timeout_s = init_info.timeout_s
        if init_info.is_sender:
            try:
                made._open(init_info)
            except BaseException:
                made.shutdown()
                raise
        return made

    @property
    def version(self) -> int:
        """The last version that was committed; 0 for none, and at ranks that publish nothing."""
        return 0 if self._publisher is None else self._publisher.version

    def send_weights(self) -> None:
        """Publishes the source's weights and has all workers load them. On an exception workers
        keep the version before, if they have not been told to commit; the next call may heal it.

        PeerError or DeadlineError: workers failed or were lost, and said why. Raises what the
        client raises where the inference side cannot be asked.
        """
        left = iter(self.source)
        try:
            if self.is_sender:
                self._send(left)
        finally:
            run_to_the_end(left)

    def shutdown(self) -> None:
        """Closes the publisher. Idempotent."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()

    def _open(self, init_info: Any) -> None:
        from refit.integrations._engine import reachable
        from refit.weights.publisher import Publisher

        self._publisher = Publisher(init_info.bind, config=init_info.config)
        endpoint = reachable(self._publisher.endpoint, init_info.host)
        said = {"endpoint": endpoint, "config": init_info.config, "connect_s": CONNECT_S}
        self.client.init_weight_transfer_engine(said)

    def _send(self, weights: Iterator[tuple[str, Any]]) -> None:
        publisher = self._publisher
        if publisher is None:
            raise StateError("this engine was shut down: trainer_init makes another one")
        publisher.declare(_specs(self.source))
        publisher.begin()
        try:
            for name, tensor in weights:
                publisher.write(name, tensor)
            self._start()
            self._let_load(publisher)
            self._finish(publisher.version)
        except BaseException:
            with suppress(StateError):  # a commit that failed has aborted it
                publisher.abort()
            raise

    def _start(self) -> None:
        """vLLM's workers refuse to start where they did not finish: those that loaded a version
        that failed at another worker."""
        if self._half_way:
            with suppress(Exception):  # workers that failed have nothing to finish, and say so
                self.client.finish_weight_update()
        self._half_way = True
        self.client.start_weight_update()

    def _finish(self, version: int) -> None:
        finish = self.client.finish_weight_update
        if "weight_version" in inspect.signature(finish).parameters:  # 0.27 and later
            finish(weight_version=str(version))
        else:
            finish()
        self._half_way = False

    def _let_load(self, publisher: "Publisher") -> None:
        """The commit waits for workers to load, and they for the commit: both at once.

        Where vLLM cannot have them load, the commit would wait until its deadline; it is ended
        after a moment in which workers may say why.
        """
        wanted = {"version": publisher.version + 1, "timeout_s": self._timeout_s}
        ended = Event()
        with ThreadPoolExecutor(2) as pool:
            loading = pool.submit(self.client.update_weights, wanted)
            watching = pool.submit(_end_commit, loading, ended, publisher)
            try:
                publisher.commit()
            except CancelledError as why:
                raise (loading.exception() or why) from None
            finally:
                ended.set()
                if watching.result():
                    with suppress(CancelledError):  # it came too late, and is not to end the next
                        publisher.wait_workers(0, 0)
        loading.result()


class TrainerEngineWithConfig(TrainerEngine):
    """vLLM 0.26: its factory and its base class also take a configuration, which refit ignores."""

    @classmethod
    def trainer_init(  # type: ignore[override]
        cls, config: Any, init_info: Any, *, client: Any, source: Any
    ) -> Self:
        """As for later versions."""
        return cls._made((config,), init_info, client, source)


def _end_commit(loading: "Future[None]", ended: Event, publisher: "Publisher") -> bool:
    """Ends the commit if the load has failed, and whether it was told to."""
    if loading.exception() is None or ended.wait(GRACE_S):
        return False
    publisher.cancel()
    return True


def _check_whole(source: Any) -> None:
    if source is None:
        raise InvalidError("refit sends whole versions: give a source of all weights")
    held = getattr(source, "held_names", None)
    if held is not None and held() is not None:
        raise InvalidError(
            "refit sends all weights from rank 0: this source holds only some of them on each "
            "rank (held_names); give one that gathers them"
        )


def _specs(source: Any) -> list[TensorSpec]:
    """The source says names, types and shapes before it makes any tensor."""
    return [
        TensorSpec(one.name, dtypes.of_torch(one.dtype).name, tuple(one.shape))
        for one in source.metadata()
    ]
