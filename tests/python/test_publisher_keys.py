"""A publisher with keys: which workers get its versions, and what a refused worker is told."""

from pathlib import Path

import numpy as np
import pytest
from broadcasting import LOCAL, PATIENCE, WorkerThread, contents
from refit.errors import SecurityError
from refit.keys import keygen
from refit.publisher import Publisher
from refit.subscriber import Subscriber

ONE = {"w": np.arange(4, dtype=np.float32)}


def keyed(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Options of a trainer and of a worker that it allows."""
    trainer, worker = keygen(folder, "trainer"), keygen(folder / "allow", "w0")
    return (
        {"security_key": str(trainer.secret), "security_allow": str(folder / "allow")},
        {"security_key": str(worker.secret), "security_server_key": str(trainer.public)},
    )


def test_with_keys_a_version_reaches_a_worker_until_its_file_is_gone(tmp_path: Path) -> None:
    ours, theirs = keyed(tmp_path)
    with (
        Publisher(LOCAL, **ours) as publisher,
        WorkerThread(publisher.endpoint, contents, **theirs) as worker,
    ):
        publisher.wait_workers(1, PATIENCE)
        publisher.publish(ONE)
        assert worker.seen == [{"w": ONE["w"].tobytes()}]
        other = keygen(tmp_path / "allow", "w1")
        theirs["security_key"] = str(other.secret)
        with Subscriber(publisher.endpoint, **theirs) as second:
            with second.next(PATIENCE) as update:
                assert update.version == 1
            other.public.unlink()
            with pytest.raises(SecurityError, match=r"w1.*security\.allow"):
                second.next(PATIENCE)
        assert publisher.publish(ONE) == 2
        assert len(worker.seen) == 2


def test_a_worker_whose_key_is_not_allowed_is_told(tmp_path: Path) -> None:
    ours, theirs = keyed(tmp_path)
    theirs["security_key"] = str(keygen(tmp_path, "stranger").secret)
    soon = {"broadcast_heartbeat_ms": 50, "broadcast_heartbeat_timeout_ms": 300}
    with (
        Publisher(LOCAL, **ours) as publisher,
        Subscriber(publisher.endpoint, **theirs, **soon) as subscriber,
        pytest.raises(SecurityError, match="does not allow this worker's key"),
    ):
        subscriber.next(PATIENCE)


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    ours, _ = keyed(tmp_path)
    Path(ours["security_key"]).chmod(0o644)
    with pytest.raises(SecurityError, match="chmod 600"):
        Publisher(LOCAL, **ours)
