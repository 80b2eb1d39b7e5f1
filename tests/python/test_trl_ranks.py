"""RefitCallback on two ranks of one job (gloo), of which the first publishes."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

import ranks  # noqa: E402
from refit import Publisher  # noqa: E402
from refit.errors import RefitError  # noqa: E402
from refit.integrations.trl import RefitCallback  # noqa: E402
from test_trl import Worker, a_trainer, assert_same  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def the_same_to_the_bit(rank: int, folder: Path) -> bool:
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
    return True


def what_a_lost_worker_makes_of_a_rank(rank: int, folder: Path) -> str:
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
    if worker and publisher:
        worker.close()
        publisher.close()
    return said


def play(rank: int, folder: Path) -> dict[str, Any]:
    """Both scenes in one job: it is slow to start."""
    ranks.join_as_launched(rank, 2, folder)
    return {
        "same": the_same_to_the_bit(rank, folder),
        "said": what_a_lost_worker_makes_of_a_rank(rank, folder),
    }


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks.run(play, tmp_path_factory.mktemp("ranks"))


def test_training_on_two_ranks_has_same_bits_as_without_refit(
    seen: list[dict[str, Any]],
) -> None:
    assert [one["same"] for one in seen] == [True, True]


def test_a_worker_that_fails_ends_the_training_on_both_ranks(seen: list[dict[str, Any]]) -> None:
    for one in seen:
        assert "this engine cannot" in one["said"]
