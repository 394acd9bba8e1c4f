"""The cache: its keys and its locks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.testcluster import cache
from tests.testcluster.api import ClusterError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRACEPOINT_CACHE", str(tmp_path))


def test_the_environment_moves_it(tmp_path: Path) -> None:
    assert cache.folder("a", "b") == tmp_path / "a" / "b"
    assert (tmp_path / "a" / "b").is_dir()


def test_values_that_read_the_same_in_a_row_have_different_keys() -> None:
    assert cache.digest("ab", "c") != cache.digest("a", "bc")


def test_a_held_lock_is_waited_for_and_then_named() -> None:
    with cache.lock("one"), cache.lock("another"):
        message = r"waited 0\.1 s for the lock .*/locks/one"
        with pytest.raises(ClusterError, match=message), cache.lock("one", timeout_s=0.1):
            pass
    with cache.lock("one", timeout_s=0.1):
        pass
