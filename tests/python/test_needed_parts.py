"""A rank of a tensor-parallel engine takes of each version what its recorded loader reads."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import refit
import torch
from broadcasting import LOCAL, TIMEOUT, UNHURRIED, wait_until
from refit.errors import InvalidError, StateError, UnsupportedError
from refit.integrations._receiver import Receiver
from refit.integrations._recorded import RecordedLoader
from refit.weights.publisher import Publisher
from refit.weights.subscriber import Subscriber

RANKS = 4
HIDDEN, HEADS, INNER, VOCABULARY = 256, 4, 1024, 4096
Weights = dict[str, Any]


def weights(seed: int, layers: int = 2, dtype: torch.dtype = torch.bfloat16) -> Weights:
    """A small transformer, its head tied to its embedding."""
    random = torch.Generator().manual_seed(seed)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    found: Weights = {"embed": made(VOCABULARY, HIDDEN)}
    for layer in range(layers):
        for name in ("q", "k", "v"):
            found[f"{layer}.{name}"] = made(HIDDEN, HIDDEN)
        found[f"{layer}.o"] = made(HIDDEN, HIDDEN)
        found[f"{layer}.gate_up"] = made(2 * INNER, HIDDEN)
        found[f"{layer}.down"] = made(HIDDEN, INNER)
        found[f"{layer}.norm"] = made(HIDDEN)
    return {**found, "head": refit.Alias("embed")}


def nbytes(version: Weights) -> int:
    return sum(one.nbytes for one in version.values() if isinstance(one, torch.Tensor))


class Engine(torch.nn.Module):
    """One rank, loaded as vLLM's parallel layers load: from whole tensors, of which each keeps its
    rows (q, k, v, gate and up, embedding and head) or its columns (o, down), or all (norms)."""

    def __init__(self, rank: int, layers: int = 2) -> None:
        super().__init__()
        self.rank = rank
        self.calls: list[str] = []
        shapes: dict[str, tuple[int, ...]] = {
            "embed": (VOCABULARY // RANKS, HIDDEN),
            "head": (VOCABULARY // RANKS, HIDDEN),
        }
        for layer in range(layers):
            shapes[f"{layer}_qkv"] = (3 * HIDDEN // RANKS, HIDDEN)
            shapes[f"{layer}_o"] = (HIDDEN, HIDDEN // RANKS)
            shapes[f"{layer}_gate_up"] = (2 * INNER // RANKS, HIDDEN)
            shapes[f"{layer}_down"] = (HIDDEN, INNER // RANKS)
            shapes[f"{layer}_norm"] = (HIDDEN,)
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))

    def load_weights(self, pairs: Any) -> None:
        self.calls.append("load")
        for name, tensor in pairs:
            layer, _, kind = name.rpartition(".")
            place = (
                self.get_parameter(f"{layer}_{kind}" if layer else name).data
                if (kind not in "qkv")
                else self._of_qkv(layer, kind)
            )
            if kind == "gate_up":
                for half, to in zip(tensor.chunk(2), place.chunk(2), strict=True):
                    to.copy_(self._cut(half, 0))
            elif kind == "norm":
                place.copy_(tensor)
            else:
                place.copy_(self._cut(tensor, 1 if kind in ("o", "down") else 0))

    def _of_qkv(self, layer: str, kind: str) -> torch.Tensor:
        return self.get_parameter(f"{layer}_qkv").data.chunk(3)["qkv".index(kind)]

    def _cut(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        size = tensor.shape[dim] // RANKS
        return tensor.narrow(dim, self.rank * size, size)

    def share(self, version: Weights) -> int:
        """The bytes of the version that it keeps."""
        norms = sum(one.nbytes for name, one in version.items() if name.endswith("norm"))
        return (nbytes(version) - norms) // RANKS + norms


def expected(rank: int, version: Weights, layers: int = 2) -> dict[str, torch.Tensor]:
    """What the engine has after loading it without refit."""
    engine = Engine(rank, layers)
    tensors = {name: one for name, one in version.items() if isinstance(one, torch.Tensor)}
    if "head" in version:
        tensors["head"] = version["embed"]
    engine.load_weights(tensors.items())
    return dict(engine.state_dict())


class Worker:
    """An engine's process, as the integrations of vLLM and SGLang load versions."""

    def __init__(self, endpoint: str, rank: int, engine: Engine, **options: Any) -> None:
        settled = {**UNHURRIED, **options}
        self.engine = engine
        self.receiver = Receiver(
            lambda: Subscriber(endpoint, worker=f"rank{rank}", **settled), endpoint
        )
        self.loader = RecordedLoader(engine, engine.load_weights)
        self.received: list[float] = []
        """Bytes, of each version."""

    def update(self, version: int | None = None) -> None:
        before = self.receiver.subscriber.stats()["receive_bytes_total"]
        self.loader.prepare(self.receiver)
        update = self.receiver.take(version, TIMEOUT)
        with self.receiver.loading(update):
            self.loader.load(update)
        self.receiver.let_go()
        self.received.append(self.receiver.subscriber.stats()["receive_bytes_total"] - before)
        self.loader.learn(self.receiver)

    def has(self, version: Weights, layers: int = 2) -> bool:
        known = expected(self.engine.rank, version, layers)
        return all(known[name].equal(one) for name, one in self.engine.state_dict().items())


@contextmanager
def engines(ranks: int = 1, shm: str = "off", **options: Any) -> Iterator[Any]:
    """A trainer, and a call that publishes a version and has the workers load it."""
    with Publisher(LOCAL, broadcast_shm=shm, **{**UNHURRIED, **options}) as publisher:
        workers = [
            Worker(publisher.endpoint, rank, Engine(rank), **options) for rank in range(ranks)
        ]

        def publish(version: Weights) -> None:
            publisher.wait_workers(len(workers), TIMEOUT)
            number = publisher.version + 1
            threads = [threading.Thread(target=one.update, args=(number,)) for one in workers]
            for thread in threads:
                thread.start()
            publisher.publish(version)
            for thread in threads:
                thread.join()

        try:
            yield publisher, workers, publish
        finally:
            for worker in workers:
                worker.receiver.close()


def test_a_rank_receives_what_its_loader_keeps() -> None:
    with engines() as (_publisher, [worker], publish):
        version = weights(1)
        whole, share = nbytes(version), worker.engine.share(version)
        assert share < 0.26 * whole
        for seed in (1, 2, 3):
            version = weights(seed)
            publish(version)
            assert worker.has(version)
        assert worker.received == [whole, share, share]
        assert len(worker.engine.calls) == 3  # one version, and twice to record


def test_figures() -> None:
    """Those of docs/scale.md."""
    with engines(broadcast_delta="always") as (_, [worker], publish):
        for number in range(1, 7):
            if number != 4:
                version = weights(number, dtype=torch.bfloat16 if number < 5 else torch.float32)
            for name in version if number == 4 else ():
                if name != "head":
                    version[name].view(-1)[::100] += 1
            publish(version)
            assert worker.has(version)
            came = worker.received[-1]
            print(f"{number}: {came:,.0f} bytes, {came / nbytes(version):.4f}")


def test_rows_and_columns_travel_as_what_changed() -> None:
    """One element in a hundred, of each tensor."""
    with engines(broadcast_delta="always") as (_publisher, [worker], publish):
        version = weights(1)
        publish(version)
        for step in (1, 2, 3):
            for one in version.values():
                if isinstance(one, torch.Tensor):
                    one.view(-1)[step::100] += 1
            publish(version)
            assert worker.has(version)
        share = worker.engine.share(version)
        assert worker.received[1] == share  # no base of the same part
        assert worker.received[2] < 0.05 * share
        assert worker.received[3] < 0.05 * share


def test_all_ranks_together() -> None:
    """Each on a host of its own, for which host_image: off stands."""
    with engines(RANKS, broadcast_host_image="off") as (publisher, workers, publish):
        sent = []
        for seed in (1, 2, 3):
            version = weights(seed)
            before = publisher.stats()["publish_sent_bytes_total"]
            publish(version)
            sent.append(publisher.stats()["publish_sent_bytes_total"] - before)
            assert all(worker.has(version) for worker in workers)
        assert sent[0] >= RANKS * nbytes(version)
        assert sent[1] <= 1.01 * nbytes(version)
        assert sent[2] <= 1.01 * nbytes(version)


def test_ranks_of_a_host_map_one_image() -> None:
    with engines(RANKS) as (publisher, workers, publish):
        for seed in (1, 2, 3):
            version = weights(seed)
            before = publisher.stats()["publish_sent_bytes_total"]
            publish(version)
            assert all(worker.has(version) for worker in workers)
            assert publisher.stats()["publish_sent_bytes_total"] - before <= 1.01 * nbytes(version)
        paths = sorted(one.path for one in publisher.workers())
        assert paths == ["neighbor"] * (RANKS - 1) + ["socket"]


def test_half_of_the_ranks_on_a_host_are_sent_half() -> None:
    with engines(RANKS // 2) as (publisher, workers, publish):
        for seed in (1, 2, 3):
            version = weights(seed)
            before = publisher.stats()["publish_sent_bytes_total"]
            publish(version)
            assert all(worker.has(version) for worker in workers)
            sent = publisher.stats()["publish_sent_bytes_total"] - before
            assert sent <= (1.01 if seed == 1 else 0.51) * nbytes(version)


def test_other_tensors_come_whole_and_are_recorded_again() -> None:
    with engines() as (publisher, [worker], publish):
        for seed in (1, 2):
            publish(weights(seed))
        for seed, dtype in ((3, torch.float32), (4, torch.float32), (5, torch.bfloat16)):
            version = weights(seed, dtype=dtype)
            publish(version)
            assert worker.has(version)
            whole, share = nbytes(version), worker.engine.share(version)
            assert worker.received[-1] == (share if seed == 4 else whole)
        assert publisher.stats()["publish_aborts"] == 0


def test_a_model_that_moved_is_given_all_and_recorded_again() -> None:
    with engines() as (publisher, [worker], publish):
        for seed in (1, 2, 3, 4):
            if seed == 3:  # a version of the parts may have come by then, and is withdrawn
                moved = worker.engine.get_parameter("0_down")
                moved.data = moved.data.clone()
            version = weights(seed)
            publish(version)
            assert worker.has(version)
        whole, share = nbytes(version), worker.engine.share(version)
        assert worker.received[1] == worker.received[3] == share
        assert worker.received[2] >= whole
        assert len(worker.engine.calls) == 6
        assert publisher.stats()["publish_aborts"] == 0


def test_a_part_that_waits_gives_way_to_the_whole() -> None:
    """The version was committed and lies in the mailbox when the recording turns out to be void."""
    with engines(broadcast_wait="none") as (publisher, [worker], publish):
        for seed in (1, 2):
            publish(weights(seed))
        version = weights(3)
        publisher.publish(version)
        wait_until(lambda: worker.receiver.subscriber.describe().state == "applying")
        worker.engine.get_parameter("1_o").data = torch.zeros(HIDDEN, HIDDEN // RANKS)
        worker.update(3)
        assert worker.has(version)


def test_a_whole_that_waits_gives_way_to_the_part() -> None:
    with engines(broadcast_wait="none") as (publisher, [worker], _):
        publisher.publish(weights(1))
        update = worker.receiver.take(1, TIMEOUT)
        with worker.receiver.loading(update):
            worker.loader.load(update)
        worker.receiver.let_go()
        version = weights(2)
        publisher.publish(version)
        wait_until(lambda: worker.receiver.subscriber.describe().state == "applying")
        worker.loader.learn(worker.receiver)
        worker.update(2)
        assert worker.has(version)
        assert worker.loader.parts is not None
        with pytest.raises(refit.errors.DeadlineError):  # it is not given twice
            worker.receiver.subscriber.next(0)


def test_a_worker_that_comes_late_or_back_takes_its_part() -> None:
    with engines() as (publisher, [_worker], publish):
        for seed in (1, 2):
            publish(weights(seed))
        late = Worker(publisher.endpoint, 3, Engine(3))
        late.update()
        assert late.has(weights(2))
        late.receiver.join_again(kept=False)
        late.update()
        assert late.has(weights(2))
        assert late.received == [nbytes(weights(2)), late.engine.share(weights(2))]
        late.receiver.close()


def test_a_loader_that_computes_is_given_all() -> None:
    with engines() as (_publisher, [worker], publish):
        worker.loader = RecordedLoader(
            worker.engine, lambda pairs: worker.engine.load_weights((n, t + 0) for n, t in pairs)
        )
        for seed in (1, 2):
            publish(weights(seed))
            assert worker.has(weights(seed))
        assert worker.received == [nbytes(weights(1))] * 2


def test_publishers_of_a_sharded_model_send_what_is_read(tmp_path: Path) -> None:
    """Two ranks of the trainer: one has the upper half of each matrix, the other all else."""

    def part_of(rank: int, name: str, one: torch.Tensor) -> tuple[slice] | None:
        middle = one.shape[0] // 2
        return (slice(0, middle) if rank == 0 else slice(middle, None),) if one.dim() > 1 else None

    def play(rank: int, publisher: Publisher, coordinator: str, go: threading.Barrier) -> None:
        version = dict(weights_of(1))
        parts = {
            name: part_of(rank, name, one)
            for name, one in version.items()
            if rank == 1 or one.dim() > 1
        }
        publisher.declare(version)
        publisher.shard(coordinator, rank, 2, parts, TIMEOUT)
        for seed in (1, 2, 3):
            go.wait(TIMEOUT)
            tensors = dict(weights_of(seed))
            publisher.publish(
                {name: tensors[name][part or ...].contiguous() for name, part in parts.items()}
            )

    with (
        Publisher(f"ipc://{tmp_path}/0.sock", **UNHURRIED) as first,
        Publisher(f"ipc://{tmp_path}/1.sock", **UNHURRIED) as second,
    ):
        go = threading.Barrier(3)
        threads = [
            threading.Thread(target=play, args=(rank, one, first.endpoint, go))
            for rank, one in enumerate((first, second))
        ]
        for thread in threads:
            thread.start()
        worker = Worker(first.endpoint, 2, Engine(2))
        for seed in (1, 2, 3):
            wait_until(lambda: any(one.subscribed for one in first.workers()))
            go.wait(TIMEOUT)
            worker.update(seed)
            assert worker.has(dict(weights_of(seed)))
        for thread in threads:
            thread.join()
        version = dict(weights_of(3))
        worker.receiver.close()
        assert worker.received[0] >= nbytes(version)
        assert worker.received[1] <= 1.02 * worker.engine.share(version)
        assert worker.received[2] <= 1.02 * worker.engine.share(version)


def test_shared_memory_is_mapped_whole() -> None:
    with engines(shm="auto") as (_publisher, [worker], publish):
        for seed in (1, 2, 3):
            publish(weights(seed))
            assert worker.has(weights(seed))
        assert worker.received == [0, 0, 0]
        assert worker.receiver.subscriber.describe().path == "shm"


# ---- Subscriber.select


@contextmanager
def recorded() -> Iterator[tuple[Publisher, Subscriber, Engine, refit.Parts, Callable[[int], Any]]]:
    """A loader that was recorded with the first version, and a call that gives the next ones."""
    options: dict[str, Any] = {"broadcast_shm": "off", "broadcast_wait": "none", **UNHURRIED}
    engine = Engine(1)
    with (
        Publisher(LOCAL, **options) as publisher,
        Subscriber(publisher.endpoint, **options) as subscriber,
    ):

        def offer(seed: int) -> Any:
            publisher.wait_workers(1, TIMEOUT)
            publisher.publish(weights(seed))
            return subscriber.next(TIMEOUT)

        with offer(1) as update:
            parts = refit.record(engine.load_weights, update, engine)
            update.load_into(parts)
        yield publisher, subscriber, engine, parts, offer


def test_a_recorded_loader_is_selected_by_hand() -> None:
    with recorded() as (_, subscriber, engine, parts, offer):
        subscriber.select(parts)
        with offer(2) as update:
            update.load_into(parts)
            assert engine.get_parameter("0_o").equal(expected(1, weights(2))["0_o"])
            assert update["0.norm"].torch().equal(weights(2)["0.norm"])  # it came whole
            view = update["0.o"]
            for read in (view.torch, view.numpy, view.__dlpack__, lambda: view.bytes):
                with pytest.raises(
                    UnsupportedError, match=r"of 0\.o only what the recorded loader"
                ):
                    read()
            with pytest.raises(InvalidError, match="only what a recorded loader reads"):
                update.load_into(
                    {one.name: torch.zeros(one.shape) for one in update.views()}, cast=True
                )
        subscriber.select(None)
        with offer(3) as update:
            assert all(
                update[name].torch().equal(one)
                for name, one in weights(3).items()
                if isinstance(one, torch.Tensor)
            )


def test_parts_are_selected_again() -> None:
    with recorded() as (_, subscriber, _, _, offer):
        for seed, rows in ((2, 10), (3, 20)):
            subscriber.select({"embed": (slice(0, rows),)})
            with offer(seed) as update:
                assert list(update) == ["embed"]
                assert update["embed"].torch().equal(weights(seed)["embed"][:rows])
        subscriber.select(["0.norm"])
        with offer(4) as update:
            assert list(update) == ["0.norm"]


def test_an_open_update_stays_as_it_is() -> None:
    with recorded() as (publisher, subscriber, engine, parts, offer):
        with offer(2) as update:
            subscriber.select(parts)
            wait_until(lambda: publisher.wait_workers(1, TIMEOUT) is None)
            assert update["embed"].torch().equal(weights(2)["embed"])
        with offer(3) as update:
            update.load_into(parts)
        assert engine.get_parameter("1_o").equal(expected(1, weights(3))["1_o"])


def test_mistakes_are_named() -> None:
    with recorded() as (_, subscriber, _, parts, offer):
        by_hand = refit.record(Engine(0).load_weights, dict(weights_of(1)))
        with pytest.raises(InvalidError, match="of no update taken whole"):
            subscriber.select(by_hand)
        with pytest.raises(InvalidError, match="name at least one part"):
            subscriber.select([])
        subscriber.select(parts)
        with offer(2) as update:
            with pytest.raises(InvalidError, match="another recorded loader"):
                update.load_into(by_hand)
            with pytest.raises(StateError, match="not all of version 2"):
                update.check_whole()
            update.load_into(parts)


def weights_of(seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    for name, one in weights(seed).items():
        if isinstance(one, torch.Tensor):
            yield name, one


# ---- Boxes


@pytest.mark.parametrize(
    ("read", "boxes"),
    [
        (lambda t: t[2:5], [((2, 0, 0), (3, 8, 6))]),
        (lambda t: t[:, 2:4], [((0, 2, 0), (6, 2, 6))]),
        (lambda t: t[1:3, :, 3:], [((1, 0, 3), (2, 8, 3))]),
        (lambda t: t.transpose(0, 2)[4], [((0, 0, 4), (6, 8, 1))]),
        (lambda t: t.reshape(48, 6)[3:13], [((0, 0, 0), (2, 8, 6))]),  # around it
        (lambda t: t.reshape(48, 6)[3:5], [((0, 3, 0), (1, 2, 6))]),
        (lambda t: t[::2], [((0, 0, 0), (5, 8, 6))]),
        (lambda t: torch.cat([t[:1], t[4:]]), [((0, 0, 0), (1, 8, 6)), ((4, 0, 0), (2, 8, 6))]),
        (lambda t: torch.cat([t[:, :2], t[:, 6:]], 1), [((0, 0, 0), (6, 8, 6))]),  # they meet
        (lambda t: t[3, 5, 2], [((3, 5, 2), (1, 1, 1))]),
        (lambda t: t[2:3].expand(4, 8, 6), [((2, 0, 0), (1, 8, 6))]),
        (lambda t: t.view(torch.int16)[2:3], [((0, 0, 0), (6, 8, 6))]),  # of another width
    ],
)
def test_what_is_read_becomes_boxes(read: Any, boxes: Any) -> None:
    source = torch.zeros(6, 8, 6)
    place = torch.empty_like(read(source)).contiguous()

    def load(pairs: Any) -> None:
        for _, tensor in pairs:
            place.copy_(read(tensor))

    parts = refit.record(load, {"w": source}, {"place": place})
    assert parts.needed == {"w": boxes}
