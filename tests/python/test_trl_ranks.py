"""RefitCallback on two ranks of one job (gloo), of which the first publishes."""

import multiprocessing
import os
import socket
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("trl")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def the_same_to_the_bit(rank: int, folder: Path) -> str:
    import torch
    from refit import Publisher
    from refit.integrations.trl import RefitCallback
    from test_trl import Worker, a_trainer, assert_same

    plain = a_trainer(folder, [], gradient_accumulation_steps=2)
    plain.train()
    publisher = Publisher("tcp://127.0.0.1:0") if rank == 0 else None
    worker = Worker(publisher) if publisher else None
    callback = RefitCallback(publisher, lockstep=True)
    ours = a_trainer(folder, [callback], gradient_accumulation_steps=2)
    ours.train()
    assert ours.args.world_size == 2
    assert_same(plain, ours)
    if worker and publisher:
        worker.close()
        assert [version for version, _held in worker.held] == [1, 2, 3, 4]
        initial = {name: tensor.clone() for name, tensor in worker.held[0][1].items()}
        assert not torch.equal(initial["lm_head.weight"], ours.model.lm_head.weight)
        publisher.close()
    return "ok"


def a_lost_worker_ends_both_ranks(rank: int, folder: Path) -> str:
    from refit import Publisher
    from refit.errors import RefitError
    from refit.integrations.trl import RefitCallback
    from test_trl import Worker, a_trainer

    publisher = Publisher("tcp://127.0.0.1:0") if rank == 0 else None
    worker = Worker(publisher, refuse=2) if publisher else None
    callback = RefitCallback(publisher, lockstep=True)
    trainer = a_trainer(folder, [callback])
    said = ""
    try:
        trainer.train()
    except RefitError as why:
        said = str(why)
    callback.close()
    assert trainer.state.global_step == 1
    assert "this engine cannot" in said, said
    if worker and publisher:
        worker.close()
        publisher.close()
    return "ok"


def run_rank(rank: int, port: int, folder: str, report: Connection) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    found = {}
    for scene in (the_same_to_the_bit, a_lost_worker_ends_both_ranks):
        try:
            found[scene.__name__] = scene(rank, Path(folder))
        except Exception:
            found[scene.__name__] = traceback.format_exc()
    report.send(found)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What became of each scene on each rank. Both are played in one job: it is slow to start."""
    spawn = multiprocessing.get_context("spawn")
    port, folder = free_port(), str(tmp_path_factory.mktemp("ranks"))
    ranks: list[Any] = []
    pipes: list[Connection] = []
    for rank in (0, 1):
        ours, theirs = spawn.Pipe(duplex=False)
        arguments = (rank, port, folder, theirs)
        ranks.append(spawn.Process(target=run_rank, args=arguments, daemon=True))
        ranks[-1].start()
        theirs.close()
        pipes.append(ours)
    found = [pipe.recv() for pipe in pipes]
    for one in ranks:
        one.join()
    return found


def test_training_on_two_ranks_is_the_same_to_the_bit_with_and_without_refit(
    reports: list[dict[str, str]],
) -> None:
    assert [report["the_same_to_the_bit"] for report in reports] == ["ok", "ok"]


def test_a_worker_that_fails_ends_the_training_on_both_ranks(reports: list[dict[str, str]]) -> None:
    assert [report["a_lost_worker_ends_both_ranks"] for report in reports] == ["ok", "ok"]
