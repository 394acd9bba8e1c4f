"""Folders are listed while other processes rename, delete and write what is in them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from gracepoint.checkpoint import ArrayHandler, ParamInfo
from gracepoint.checkpoint.format import records
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.restoring import restore_path
from gracepoint.checkpoint.steps import commit
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.process_group import SingleProcess
from tests.unit.checkpoint.fakes.engine import engine, save, small_state

Meanwhile = Callable[..., None]


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Meanwhile:
    """Has something happen once, just before a folder is listed or just after."""

    def happen(act: Callable[[], object], folder: Path, *, before: bool = False) -> None:
        left = [act]
        iterdir = Path.iterdir

        def listing(path: Path) -> Iterator[Path]:
            act_now = left.pop if path == folder and left else lambda: lambda: None
            if before:
                act_now()()
            found = list(iterdir(path))
            if not before:
                act_now()()
            return iter(found)

        monkeypatch.setattr(Path, "iterdir", listing)

    return happen


def test_save_committed_during_listing_is_not_foreign(tmp_path: Path, meanwhile: Meanwhile) -> None:
    temporary, step = tmp_path / "5.gracepoint-tmp.job-0-a.1", tmp_path / "5"
    temporary.mkdir()
    (tmp_path / "7").symlink_to(temporary)
    for name in ("8", "notes"):
        (tmp_path / name).write_text("")
    (tmp_path / "others").mkdir()
    meanwhile(lambda: temporary.rename(step), tmp_path)
    assert [child.name for child in Layout(storage_path(tmp_path)).foreign()] == ["7", "8", "notes", "others"]
    assert step.is_dir()


def test_what_is_deleted_as_it_is_looked_at_is_in_nobodys_way(tmp_path: Path, meanwhile: Meanwhile) -> None:
    target = tmp_path / "a"
    target.mkdir()
    meanwhile(target.rmdir, target, before=True)
    assert restore_path.why_not_to(storage_path(target), force=True) is None
    assert not target.exists()


def test_foreign_folder_deleted_meanwhile_stops_no_commit(tmp_path: Path, meanwhile: Meanwhile) -> None:
    target = tmp_path / "3"
    target.mkdir()

    class Dying(SingleProcess):
        def barrier(self, key: str, **_: Any) -> None:
            raise SystemExit("killed")

    with pytest.raises(SystemExit):
        save(engine(tmp_path, Dying()), 3, small_state())
    paths = Layout(storage_path(tmp_path))
    (durable,) = paths.temporaries()
    meanwhile(target.rmdir, target, before=True)
    assert commit.of(paths).finalize(durable, replace=True)
    assert paths.steps() == [3]
    assert records.read_manifest(storage_path(target)) is not None


def test_save_committed_during_recovery_is_not_reported_as_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    paths = Layout(storage_path(tmp_path))
    committed = paths.temporary(5, "job-0-a", 1)
    monkeypatch.setattr(paths, "temporaries", lambda: [committed])
    with caplog.at_level(logging.WARNING):
        commit.give_up_old(paths, attempt="job-1-b", older_than_s=60)
    assert caplog.messages == []


def test_what_a_crash_left_of_a_metadata_file_is_not_read(tmp_path: Path) -> None:
    info = ParamInfo("w", tmp_path / "tree")
    for future in ArrayHandler().serialize([jnp.arange(3.0)], [info]):
        future.result(timeout=60)
    (info.parent_dir / "array_metadatas" / "process_0_0123456789abcdef.__lock").write_text('{"array_meta')
    np.testing.assert_array_equal(ArrayHandler().deserialize([info])[0], np.arange(3.0))
