"""Key pairs in files, and which workers a publisher with keys lets in."""

import stat
from pathlib import Path

import pytest
from broadcasting import ONE, TIMEOUT, UNHURRIED, WorkerThread
from refit.errors import ExistsError, InputOutputError, InvalidError, SecurityError
from refit.weights.keys import keygen
from refit.weights.publisher import Publisher
from refit.weights.subscriber import Subscriber


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_pair_is_two_files_of_which_one_is_closed(tmp_path: Path) -> None:
    files = keygen(tmp_path / "keys", "w0")
    assert (mode(files.secret), mode(files.public)) == (0o600, 0o644)
    assert files.secret.name == "w0.secret"
    assert files.public.parent == tmp_path / "keys"
    assert files.secret.read_text().split()[-1] != files.public.read_text().split()[-1]


def test_files_that_are_there_are_kept_unless_replaced(tmp_path: Path) -> None:
    before = keygen(tmp_path, "w0").secret.read_text()
    with pytest.raises(ExistsError, match=r"w0\.secret"):
        keygen(tmp_path, "w0")
    assert (tmp_path / "w0.secret").read_text() == before
    assert keygen(tmp_path, "w0", replace=True).secret.read_text() != before


@pytest.mark.parametrize(
    ("folder", "name", "error"),
    [(".", "../w0", InvalidError), (".", "w\0", InvalidError), ("no/such", "w0", InputOutputError)],
)
def test_a_pair_that_cannot_be_is_refused(
    tmp_path: Path, folder: str, name: str, error: type[Exception]
) -> None:
    with pytest.raises(error):
        keygen(tmp_path / folder, name)
    assert list(tmp_path.iterdir()) == []


# ---- A publisher with keys


@pytest.fixture
def options(tmp_path: Path) -> dict[str, str]:
    """The trainer's."""
    trainer = keygen(tmp_path, "trainer")
    (tmp_path / "allow").mkdir()
    return {"security_key": str(trainer.secret), "security_allow": str(tmp_path / "allow")}


def worker_of(folder: Path, name: str, keys: str = "allow") -> dict[str, str]:
    """Options of a worker of that name."""
    secret = keygen(folder / keys, name).secret
    return {"security_key": str(secret), "security_server_key": str(folder / "trainer.public")}


def test_worker_gets_versions_until_its_key_file_is_gone(
    publisher: Publisher, tmp_path: Path
) -> None:
    with WorkerThread(publisher.endpoint, **worker_of(tmp_path, "w0")) as worker:
        publisher.wait_workers(1, TIMEOUT)
        publisher.publish(ONE)
        assert worker.seen == [{"w": ONE["w"].tobytes()}]
        with Subscriber(publisher.endpoint, **worker_of(tmp_path, "w1"), **UNHURRIED) as second:
            with second.next(TIMEOUT) as update:
                assert update.version == 1
            (tmp_path / "allow" / "w1.public").unlink()
            with pytest.raises(SecurityError, match=r"w1.*security\.allow"):
                second.next(TIMEOUT)
        assert publisher.publish(ONE) == 2
        assert len(worker.seen) == 2


def test_a_worker_whose_key_is_not_allowed_is_told(publisher: Publisher, tmp_path: Path) -> None:
    stranger = worker_of(tmp_path, "stranger", keys="other")
    soon = {"broadcast_heartbeat_ms": 50, "broadcast_heartbeat_timeout_ms": "2s"}
    with (
        Subscriber(publisher.endpoint, **stranger, **soon) as subscriber,
        pytest.raises(SecurityError, match="does not allow this worker's key"),
    ):
        subscriber.next(TIMEOUT)
