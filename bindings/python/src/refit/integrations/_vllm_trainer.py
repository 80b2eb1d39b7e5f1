"""The trainer's end of vLLM's weight transfer, for vLLM versions that have one (0.26 and later).

vLLM drives it on every trainer rank: ``trainer_init`` once, ``send_weights`` for each version. Rank
0 publishes and tells the inference side through vLLM's client what to do; the other ranks only run
the source, since making its tensors is a collective.

Which class of vLLM this is mixed into, and where it is registered, is in vllm.py. Drawn after
TrainerWeightTransferEngine, WeightSource and VLLMWeightSyncClient of
vllm/distributed/weight_transfer/base.py.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from refit import dtypes
from refit.errors import StateError
from refit.integrations._sender import run_to_the_end
from refit.manifest import TensorSpec

if TYPE_CHECKING:
    from refit.publisher import Publisher


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
    """What vLLM calls. `client` and `source` are vLLM's; the publisher is its own."""

    client: Any
    source: Any
    is_sender: bool
    _publisher: "Publisher | None" = None
    _timeout_s = 600.0

    @classmethod
    def trainer_init(cls, config: Any, init_info: Any, *, client: Any, source: Any) -> Self:
        """On rank 0 binds and makes every inference worker subscribe."""
        made = cls(config, client=client, source=source, is_sender=init_info.is_sender)  # type: ignore[call-arg]
        made._timeout_s = init_info.timeout_s
        if init_info.is_sender:
            made._open(init_info)
        return made

    def send_weights(self) -> None:
        """Publishes the source's weights and has all workers load them. On an exception workers
        keep the version before, if they have not been told to commit."""
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
        from refit.publisher import Publisher

        self._publisher = Publisher(init_info.bind, config=init_info.config)
        endpoint = reachable(self._publisher.endpoint, init_info.host)
        self.client.init_weight_transfer_engine({"endpoint": endpoint, "config": init_info.config})

    def _send(self, weights: Iterator[tuple[str, Any]]) -> None:
        publisher = self._publisher
        if publisher is None:
            raise StateError("this engine was shut down: trainer_init makes another one")
        publisher.declare(_specs(self.source))
        publisher.begin()
        try:
            for name, tensor in weights:
                publisher.write(name, tensor)
            self._let_load(publisher)
        except BaseException:
            with suppress(StateError):  # a commit that failed has aborted it
                publisher.abort()
            raise

    def _let_load(self, publisher: "Publisher") -> None:
        """The commit waits for workers to load, and they for the commit: both at once."""
        wanted = {"version": publisher.version + 1, "timeout_s": self._timeout_s}
        self.client.start_weight_update()
        with ThreadPoolExecutor(1) as pool:
            loading = pool.submit(self.client.update_weights, wanted)
            publisher.commit()
        loading.result()
        self.client.finish_weight_update()


def _specs(source: Any) -> list[TensorSpec]:
    """The source says names, types and shapes before it makes any tensor."""
    return [
        TensorSpec(one.name, dtypes.of_torch(one.dtype).name, tuple(one.shape))
        for one in source.metadata()
    ]
