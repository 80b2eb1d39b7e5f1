"""Every failure of the C library is one exception of one family, with its sentence."""

import copy
import pickle

import pytest
import refit
from refit import errors
from refit._c import abi
from refit._c.library import call, lib, status_of
from refit.errors import RefitError, error_of

SENTENCE = "the arena needs 3GiB and 2GiB are free: lower offload.budget_share"


def statuses() -> list[tuple[str, int]]:
    return [
        (name.removeprefix("REFIT_"), value)
        for name, value in vars(abi).items()
        if name.startswith("REFIT_ERR_")
    ]


KINDS = [one for one in RefitError.__subclasses__() if one.__module__ == errors.__name__]


def test_every_status_has_exactly_one_class() -> None:
    assert sorted(kind.default_status for kind in KINDS) == sorted(
        number for _, number in statuses()
    )


@pytest.mark.parametrize(("name", "number"), statuses())
def test_status_is_the_librarys(name: str, number: int) -> None:
    assert lib.refit_status_name(number).decode() == name
    error = error_of(number, SENTENCE)
    assert type(error) is not RefitError
    assert error.status == number
    said = (type(error).__doc__ or "").rstrip(".").lower()
    assert said.startswith(lib.refit_status_text(number).decode().lower())


def test_the_library_knows_no_status_that_python_does_not() -> None:
    known = {number for _, number in statuses()} | {abi.REFIT_OK}
    for number in range(max(known) + 50):
        unknown = lib.refit_status_name(number) == b"ERR_UNKNOWN"
        assert unknown == (number not in known), number


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_the_sentence(kind: type[RefitError]) -> None:
    error = kind(SENTENCE, subsystem=28)
    assert (str(error), error.args, error.text) == (SENTENCE, (SENTENCE,), SENTENCE)
    assert (error.subsystem, error.status) == (28, kind.default_status)
    if isinstance(error, OSError):
        assert (error.errno, error.strerror) == (28, None)
        assert kind(SENTENCE).errno is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))]
)
def test_pickling_loses_nothing(kind: type[RefitError], again) -> None:  # type: ignore[no-untyped-def]
    error = kind(SENTENCE, 99, 28)
    error.add_note("while version 7 was sent")
    other = again(error)
    assert type(other) is kind
    assert (str(other), other.args) == (SENTENCE, (SENTENCE,))
    assert (other.text, other.status, other.subsystem) == (SENTENCE, 99, 28)
    assert other.__notes__ == ["while version 7 was sent"]


def test_python_knows_them_by_its_own_names() -> None:
    assert issubclass(errors.DeadlineError, TimeoutError)
    assert issubclass(errors.HostMemoryError, MemoryError)
    assert issubclass(errors.DeviceMemoryError, MemoryError)
    assert issubclass(errors.InvalidError, ValueError)
    assert issubclass(errors.NotFoundError, LookupError)
    assert issubclass(errors.StateError, RuntimeError)
    assert issubclass(errors.SystemCallError, OSError)


def test_an_unknown_status_is_of_the_family() -> None:
    error = error_of(4711, SENTENCE, 5)
    assert type(error) is RefitError
    assert (error.status, str(error)) == (4711, SENTENCE)


def test_call_raises_with_the_sentence_of_the_library() -> None:
    config = abi.refit_config()
    lib.refit_config_init(config, abi.refit_config.size.offset + 8)  # too small: does nothing
    with pytest.raises(errors.InvalidError, match="call refit_config_init before anything else"):
        call(lib.refit_config_set, config, b"device", b"host")


def test_status_of_raises_all_but_a_deadline() -> None:
    for answer in (abi.REFIT_OK, abi.REFIT_ERR_TIMEOUT):
        assert status_of(lambda _error, answer=answer: answer) == answer
    with pytest.raises(errors.PeerError):
        status_of(lambda _error: abi.REFIT_ERR_PEER)


@pytest.mark.parametrize("kind", [RefitError, *KINDS])
def test_the_family_is_at_the_door(kind: type[RefitError]) -> None:
    assert getattr(refit, kind.__name__) is kind
    assert kind.__name__ in refit.__all__


def test_what_ranks_raise_together_is_at_the_door_too() -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    assert issubclass(refit.LockstepError, refit.PeerError)
