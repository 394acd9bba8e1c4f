"""Runs that were copied from one store to another by other programs, with or without what saves note with objects."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gracepoint import checkpoint
from gracepoint.checkpoint import WriteOptions
from gracepoint.checkpoint.format import layout
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.memory import ArrayBytes
from gracepoint.checkpoint.saving import planner
from gracepoint.checkpoint.steps import commit, manifest_commit
from gracepoint.checkpoint.steps.manifest_commit import ManifestCommit
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.checkpoint.verification import verify
from gracepoint.checksum import crc32
from gracepoint.errors import CheckpointCorrupt, CheckpointError, SaveFailed
from tests.object_stores.servers import Bucket
from tests.unit.checkpoint.fakes.engine import assert_same, engine, restore, save, small_state
from tests.waiting import until

pytestmark = pytest.mark.integration

FORMS = pytest.mark.parametrize("form", ["files", "OCDBT", "parts"])
WAYS = pytest.mark.parametrize("way", ["disk to bucket", "bucket to disk", "bucket to bucket", "with the notes"])


@pytest.fixture
def options(form: str, monkeypatch: pytest.MonkeyPatch) -> WriteOptions:
    if form == "parts":
        monkeypatch.setattr(planner, "MANY_CHUNKS", 1)
    return WriteOptions(use_ocdbt=form == "OCDBT")


@pytest.fixture
def ends(way: str, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Where the run is, and where it is copied to."""
    monkeypatch.setattr(ManifestCommit, "quiet_s", 0.0)  # nobody else writes
    places = {"disk": str(tmp_path / "run"), "bucket": f"{bucket.uri}/run"}
    source, target = way.split(" to ") if " to " in way else ("bucket", "bucket")
    return places[source], places[target] + "/copy"


def copy(source: str, target: str, wanted: Callable[[str], bool] = lambda path: True, *, notes: bool = False) -> None:
    """Copies the files of a run, as ``gsutil`` or ``aws s3 cp`` do."""
    here, there = storage_path(source), storage_path(target)
    for entry in here.entries():
        if not wanted(entry.key) or entry.key.startswith("copy/"):
            continue
        data, place = (here / entry.key).read_bytes(), there / entry.key
        place.parent.make_folder()
        if notes and (noted := (here / entry.key).noted()):
            body = ArrayBytes(np.frombuffer(data, np.uint8), np.dtype(np.uint8))
            place.write_if(body, crc32(data), None, noted.note, None)
        else:
            place.put(data)


def save_steps(root: str, steps: range, options: WriteOptions, *, attempt: str = "job-0-a", keep_last: int = 9) -> None:
    checkpointer = engine(root, attempt=attempt, options=options, keep_last=keep_last)
    for step in steps:
        checkpointer.save_in_background(step, small_state(step), {"at": step})
    checkpointer.executor.wait_until_finished(60)  # raises what the last save raised
    checkpointer.close(60)


def folders(root: str) -> set[str]:
    return {entry.key.split("/")[0] for entry in storage_path(root).entries() if "/" in entry.key}


def is_good(path: str) -> bool:
    try:
        return verify(path).ok
    except CheckpointCorrupt:
        return False


def check_restores(root: str, step: int) -> None:
    restored = restore(root, small_state())
    assert restored is not None
    assert (restored.step, restored.host_state) == (step, {"at": step})
    assert_same(restored.state, small_state(step))


@WAYS
@FORMS
def test_a_copied_run_continues_and_its_old_steps_are_deleted_whole(
    ends: tuple[str, str], way: str, options: WriteOptions, caplog: pytest.LogCaptureFixture
) -> None:
    source, target = ends
    save_steps(source, range(1, 4), options)
    copy(source, target, notes=way == "with the notes")
    check_restores(target, 3)
    assert [verify(storage_path(target) / str(step)).ok for step in (1, 2, 3)] == [True] * 3
    save_steps(target, range(4, 6), options, attempt="job-2-c", keep_last=2)
    assert folders(target) == {"4", "5"}
    assert "did not write" not in caplog.text
    check_restores(target, 5)
    save_steps(target, range(6, 7), options, attempt="job-3-d")
    save_steps(target, range(2, 3), options, attempt="job-3-d")  # a number that was copied and deleted
    assert verify(storage_path(target) / "2").ok


@WAYS
@FORMS
def test_a_copied_step_that_is_saved_again_is_replaced(ends: tuple[str, str], way: str, options: WriteOptions) -> None:
    source, target = ends
    save_steps(source, range(1, 3), options)
    copy(source, target, notes=way == "with the notes")
    begun_s = storage_path(target).now_s()
    until(lambda: storage_path(target).now_s() > begun_s, "the store's clock to go on")  # S3 dates to the second
    checkpointer = engine(target, attempt="job-2-c", options=options)
    save(checkpointer, 2, small_state(7.0), {"at": 2})
    checkpointer.close(60)
    restored = restore(target, small_state())
    assert restored is not None
    assert_same(restored.state, small_state(7.0))
    assert verify(storage_path(target) / "2").ok


@pytest.mark.long
@pytest.mark.parametrize("way", ["disk to bucket", "bucket to disk"])
@pytest.mark.parametrize("form", ["files", "OCDBT"])
def test_a_copy_that_lacks_any_one_file_is_not_restored_and_gives_way(
    ends: tuple[str, str], way: str, options: WriteOptions
) -> None:
    source, target = ends
    save_steps(source, range(1, 3), options)
    found = sorted(entry.key for entry in storage_path(source).entries() if entry.key.startswith("2/"))
    names = {re.sub(r"[0-9a-f.]*$", "", name): name for name in found}.values()  # one of each kind
    holds_values = re.compile(
        r"2/default/(w|b|count)/\d|2/default/(d|ocdbt.*)/|2/default/manifest.ocdbt|2/host_state/process|2/_GRACEP"
    )
    for number, missing in enumerate(names):
        root = f"{target}/{number}"
        copy(source, root, missing.__ne__, notes=way == "with the notes")
        if missing != f"2/{layout.done_record(0)}":
            assert not is_good(f"{root}/2"), missing
        restored = restore(root, small_state())
        assert restored is not None, missing
        if holds_values.match(missing):
            assert restored.step == 1, missing
        assert restored.host_state == {"at": restored.step}, missing
        assert_same(restored.state, small_state(restored.step))
        save_steps(root, range(2, 3), options, attempt=f"job-{number}-c")
        check_restores(root, 2)
        assert verify(storage_path(root) / "2").ok, missing


@pytest.mark.parametrize("way", ["disk to bucket", "bucket to bucket"])
@pytest.mark.parametrize("form", ["files"])
def test_a_copy_without_its_manifest_is_named_everywhere(ends: tuple[str, str], options: WriteOptions) -> None:
    source, target = ends
    save_steps(source, range(1, 2), options)
    copy(source, target, lambda path: path != "1/_GRACEPOINT")
    for act in (lambda path: verify(path), lambda path: checkpoint.restore(path, small_state())):
        with pytest.raises(CheckpointCorrupt, match=r"has no _GRACEPOINT\. If a copy of it was broken off, copy it"):
            act(f"{target}/1")
    with pytest.raises(CheckpointError, match="has no _GRACEPOINT"):
        restore(target, small_state())


@pytest.mark.parametrize("way", ["disk to bucket"])
@pytest.mark.parametrize("form", ["files"])
@pytest.mark.parametrize("lacks", ["nothing", "_GRACEPOINT"])
def test_what_users_put_into_a_copied_step_stays_and_is_named(
    ends: tuple[str, str], options: WriteOptions, lacks: str, caplog: pytest.LogCaptureFixture
) -> None:
    source, target = ends
    save_steps(source, range(1, 3), options)
    copy(source, target, lambda path: path != f"1/{lacks}")
    notes = storage_path(f"{target}/1/notes.md")
    notes.put(b"of a user")
    if lacks == "nothing":
        save_steps(target, range(3, 5), options, attempt="job-2-c", keep_last=1)
        assert "1 objects in it stay, as Gracepoint did not write them: notes.md" in caplog.text
        assert [entry.key for entry in storage_path(f"{target}/1").entries()] == ["notes.md"]
    else:
        with pytest.raises(SaveFailed, match=r"notes\.md is in the way, and Gracepoint did not write it"):
            save_steps(target, range(1, 2), options, attempt="job-2-c")
    assert notes.read_bytes() == b"of a user"


@pytest.mark.parametrize("way", ["disk to bucket"])
@pytest.mark.parametrize("form", ["files"])
def test_saves_and_trash_that_were_copied_in_the_making_do_not_stay(
    ends: tuple[str, str], options: WriteOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = ends
    save_steps(source, range(1, 3), options)

    def fails(*_: object, **__: object) -> bool:
        raise OSError("the process dies here")

    with monkeypatch.context() as patch:
        patch.setattr(type(commit.of(Layout(storage_path(source)))), "finalize", fails)
        with pytest.raises(SaveFailed):
            save_steps(source, range(3, 4), options, attempt="job-1-b")
    trash = storage_path(source) / "1.gracepoint-trash.job-1-b.1"
    (storage_path(source) / "1").publish(trash)
    copy(source, target)
    check_restores(target, 3)  # it was durable
    monkeypatch.setattr(manifest_commit, "NAMELESS_KEPT_S", -2.0)
    save_steps(target, range(4, 5), options, attempt="job-2-c")
    assert folders(target) == {"2", "3", "4"}
    assert verify(storage_path(target) / "3").ok
