"""Key pairs in files."""

import stat
from pathlib import Path

import pytest
from refit.errors import ExistsError, InputOutputError, InvalidError
from refit.keys import keygen


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


@pytest.mark.parametrize("name", ["", "../w0", "a/b", "w\0", ".w0"])
def test_names_that_are_none_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidError):
        keygen(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputOutputError):
        keygen(tmp_path / "no" / "such", "w0")
