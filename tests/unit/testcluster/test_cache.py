"""The cache: its keys and its locks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.testcluster import cache
from tests.testcluster.api import ClusterError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTCLUSTER_CACHE", str(tmp_path))


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


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_several_want_at_once_is_made_once_as_a_whole(tmp_path: Path, kind: str) -> None:
    made: list[Path] = []
    kept = tmp_path / "kept.tar"

    def make(path: Path) -> None:
        made.append(path)
        inside = path
        if kind == "folder":
            path.mkdir()
            inside = path / "inside"
        with inside.open("w") as file:
            assert not kept.exists()
            file.write("whole")

    def ask() -> str:
        path = cache.once(kept, make)
        return (path / "inside" if path.is_dir() else path).read_text()

    with ThreadPoolExecutor(4) as pool:  # the kernel's file lock keeps threads apart as it does processes
        assert list(pool.map(lambda _: ask(), range(8))) == ["whole"] * 8
    assert [path.suffix for path in made] == [".tar"]


def test_what_could_not_be_made_leaves_nothing_and_is_tried_again(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        path.mkdir()
        (path / "begun").touch()
        raise ClusterError("no space left")

    (tmp_path / ".kept").mkdir()  # of a process that was killed
    with pytest.raises(ClusterError, match="no space left"):
        cache.once(tmp_path / "kept", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["locks"]
    assert cache.once(tmp_path / "kept", Path.touch).exists()
