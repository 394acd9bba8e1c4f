"""What an error of a full, limited or read-only store is explained with."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from gracepoint.checkpoint.storage import checks
from gracepoint.checkpoint.storage.locations import storage_path


@pytest.mark.parametrize(
    ("number", "said", "is_full"),
    [
        pytest.param(errno.ENOSPC, "the file system is full", True, id="full disk"),
        pytest.param(errno.EDQUOT, "a quota is used up", True, id="quota"),
        pytest.param(errno.EFBIG, "ulimit -f", False, id="size of a file"),
        pytest.param(errno.EROFS, "mounted read-only", False, id="read-only"),
    ],
)
def test_an_error_of_room_says_path_needed_and_free_bytes(
    tmp_path: Path, number: int, said: str, is_full: bool
) -> None:
    error = OSError(number, os.strerror(number), "/somewhere/0.0")
    told = checks.explained(error, storage_path(tmp_path / "not" / "made"), 4096)
    assert os.strerror(number) in told
    assert said in told
    assert f"{tmp_path / 'not' / 'made'}: 4096 bytes are needed" in told
    assert "bytes are free there" in told
    assert checks.is_full(error) is is_full


def test_an_error_without_a_number_is_known_by_its_words_or_its_cause(tmp_path: Path) -> None:
    of_tensorstore = ValueError("RESOURCE_EXHAUSTED: Failed to write: No space left on device [write_bytes='5']")
    assert checks.is_full(of_tensorstore)
    wrapped = RuntimeError("not written")
    wrapped.__cause__ = OSError(errno.EDQUOT, "quota")
    assert checks.is_full(wrapped)
    other = OSError(errno.EIO, "broken")
    assert not checks.knows(other)
    assert checks.explained(other, storage_path(tmp_path)) == str(other)


def test_a_file_system_without_free_files_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(f_bavail=10, f_frsize=4096, f_blocks=100, f_files=50, f_favail=0)
    monkeypatch.setattr(os, "statvfs", lambda place: found)
    told = checks.explained(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), storage_path(tmp_path))
    assert "40960 of 409600 bytes are free there, only 0 more files can be made" in told


def test_the_room_of_an_object_store_is_not_known() -> None:
    place = storage_path("memory://bucket/run")
    assert checks.room_at(place) is None
    told = checks.explained(OSError(errno.EDQUOT, "507 QuotaExceeded"), place, 10)
    assert "memory://bucket/run: 10 bytes are needed" in told
