"""What both ways to commit promise, in stores that rename folders and in stores that cannot."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from gracepoint.checkpoint.format import layout
from gracepoint.checkpoint.format.layout import Layout, Temporary
from gracepoint.checkpoint.format.records import Manifest, done_records
from gracepoint.checkpoint.steps import commit, listing
from gracepoint.checkpoint.steps.commit import RenameCommit
from gracepoint.checkpoint.steps.manifest_commit import ManifestCommit
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.errors import CheckpointTooNew
from tests.unit.checkpoint.steps.fakes.small_saves import STEP, write
from tests.unit.checkpoint.storage.fakes.digests import DigestStore
from tests.unit.checkpoint.storage.fakes.flat import FlatPath, FlatStore
from tests.unit.checkpoint.storage.fakes.volatile import VolatilePath, VolatileStore

#: Every change is so old. Negative, as nothing that these tests write has any age.
ANY_AGE_S = -60.0


@pytest.fixture(params=["posix", "memory", "volatile", "flat", "digests"])
def paths(request: pytest.FixtureRequest, tmp_path: Path) -> Layout:
    match request.param:
        case "posix":
            root = storage_path(tmp_path / "run")
        case "memory":
            root = storage_path(f"memory://commit-{secrets.token_hex(8)}")
        case "volatile":
            root = VolatilePath(VolatileStore(), "/run")
        case "flat":
            root = FlatPath(FlatStore(), "run")
        case _:
            root = FlatPath(DigestStore(), "run")
    root.make_folder()
    return Layout(root)


def contents(paths: Layout) -> bytes | None:
    """Returns what a restore of the step would read. None if there is no complete step."""
    return (paths.step(STEP) / "default/x/0").read_bytes() if listing.complete_steps(paths) == [STEP] else None


def committed(paths: Layout, attempt: str, content: bytes) -> Temporary:
    temporary = write(paths, attempt, content=content)
    assert commit.of(paths).finalize(temporary, replace=True)
    return temporary


def names(paths: Layout) -> set[str]:
    """Returns what is left in the directory. Folders that hold nothing do not count."""
    return {entry.key.partition("/")[0] for entry in paths.root.entries()}


def test_the_store_decides_how_its_steps_are_committed(paths: Layout) -> None:
    expected = ManifestCommit if isinstance(paths.root, FlatPath) else RenameCommit
    assert isinstance(commit.of(paths), expected)


def test_a_save_without_its_done_record_is_not_durable_and_not_committed(paths: Layout) -> None:
    temporary = write(paths, "a", durable=False)
    assert not commit.is_durable(paths, temporary)
    assert not commit.of(paths).finalize(temporary, replace=True)
    assert not commit.of(paths).is_committed(temporary)
    assert contents(paths) is None


def test_a_durable_save_is_committed_once_and_stays_so(paths: Layout) -> None:
    temporary = write(paths, "a")
    assert commit.is_durable(paths, temporary)
    assert contents(paths) is None
    for _ in range(2):  # as another process may do at the same time
        assert commit.of(paths).finalize(temporary, replace=False)
        assert commit.of(paths).is_committed(temporary)
        assert commit.is_durable(paths, temporary)
    assert contents(paths) == b"ours"
    assert not commit.of(paths).is_unfinished(paths.step(STEP))


def test_a_done_record_makes_a_save_durable(paths: Layout) -> None:
    temporary = write(paths, "a")
    done = done_records(temporary.path)
    assert done is not None
    record = next(entry.key for entry in temporary.path.entries() if entry.key.startswith("done."))
    (temporary.path / record).delete()
    assert not commit.is_durable(paths, temporary)
    commit.of(paths).record(temporary, done[0], lambda: None)
    assert commit.is_durable(paths, temporary)
    assert commit.of(paths).finalize(temporary, replace=False)


def test_only_a_save_that_replaces_takes_the_place_of_another(paths: Layout) -> None:
    first = committed(paths, "a", b"first")
    second = write(paths, "b", content=b"second")
    assert not commit.of(paths).finalize(second, replace=False)
    assert contents(paths) == b"first"
    assert commit.of(paths).finalize(second, replace=True)
    assert contents(paths) == b"second"
    assert commit.of(paths).is_committed(second)
    assert not commit.of(paths).is_committed(first)


def test_a_step_of_a_newer_version_is_not_replaced(paths: Layout) -> None:
    committed(paths, "a", b"first")
    family = Manifest.FORMATS[False].partition("/")[0]
    (paths.step(STEP) / layout.MANIFEST).put(layout.seal(f"{family}/99", {}))
    second = write(paths, "b", content=b"second")
    with pytest.raises(CheckpointTooNew):
        commit.of(paths).finalize(second, replace=True)
    assert (paths.step(STEP) / "default/x/0").read_bytes() == b"first"


def test_a_start_finishes_a_replacement_that_had_become_durable(paths: Layout) -> None:
    committed(paths, "a", b"first")
    write(paths, "b", content=b"second")
    assert commit.salvage(paths) == []
    assert contents(paths) == b"second"


def test_a_start_leaves_a_step_that_the_save_was_not_to_replace(paths: Layout) -> None:
    committed(paths, "a", b"first")
    second = write(paths, "b", content=b"second")
    committed(paths, "c", b"third")
    done = done_records(second.path)
    assert done is not None
    assert not commit.of(paths).finish(second, done)
    assert contents(paths) == b"third"


def test_a_start_replaces_a_step_that_is_known_to_be_damaged(paths: Layout) -> None:
    second = write(paths, "b", content=b"second")  # it found nothing to replace
    committed(paths, "a", b"first")
    if isinstance(commit.of(paths), ManifestCommit):
        second = write(paths, "d", content=b"second")  # there, a later save has the last word
    paths.damage_mark(STEP).put(b"a chunk is missing")
    done = done_records(second.path)
    assert done is not None
    assert commit.of(paths).finish(second, done)
    assert contents(paths) == b"second"
    assert not paths.damage_mark(STEP).is_value()


def test_a_committed_save_is_nothing_to_salvage(paths: Layout) -> None:
    committed(paths, "a", b"first")
    assert commit.salvage(paths) == []
    assert list(commit.of(paths).interrupted()) == []
    assert contents(paths) == b"first"


def test_the_checkpoint_of_a_step_has_an_identifier(paths: Layout) -> None:
    standing = commit.of(paths).standing
    assert standing(paths.step(STEP)) is None
    committed(paths, "a", b"first")
    assert standing(paths.step(STEP)) == "a.1"
    committed(paths, "b", b"second")
    assert standing(paths.step(STEP)) == "b.1"


def test_a_discarded_step_is_gone_at_once_and_its_bytes_with_the_trash(paths: Layout) -> None:
    committed(paths, "a", b"first")
    commit.of(paths).empty_trash()
    commit.of(paths).discard(paths.step(STEP), paths.trash(STEP, "a", 2), only="a.1")
    assert contents(paths) is None
    assert len(paths.trashed()) == 1
    commit.of(paths).discard(paths.step(STEP), paths.trash(STEP, "a", 3), only="a.1")  # there is nothing to discard
    commit.of(paths).empty_trash()
    assert names(paths) == set()


def test_a_failed_save_leaves_nothing_and_the_checkpoint_before_it(paths: Layout) -> None:
    committed(paths, "a", b"first")
    commit.of(paths).empty_trash()
    failed = write(paths, "b", durable=False, content=b"second")
    for _ in range(2):  # by any process, and again
        commit.give_up_failed(paths, failed)
    commit.of(paths).empty_trash()
    assert contents(paths) == b"first"
    assert names(paths) == {str(STEP)}


def test_a_durable_save_is_not_given_up(paths: Layout) -> None:
    durable = write(paths, "a")
    commit.give_up_failed(paths, durable)
    commit.give_up_old(paths, attempt="next", older_than_s=ANY_AGE_S)
    commit.of(paths).empty_trash()
    assert commit.of(paths).finalize(durable, replace=False)
    assert contents(paths) == b"ours"


def test_an_old_unfinished_save_of_another_attempt_is_deleted(paths: Layout) -> None:
    unfinished = write(paths, "a", durable=False)
    assert commit.of(paths).last_change_s(unfinished) > 0.0
    commit.give_up_old(paths, attempt="a", older_than_s=ANY_AGE_S)
    commit.of(paths).empty_trash()
    assert paths.temporaries() == [unfinished], "an attempt keeps its own saves"
    commit.give_up_old(paths, attempt="next", older_than_s=ANY_AGE_S)
    commit.of(paths).empty_trash()
    assert names(paths) == set()
    assert commit.of(paths).last_change_s(unfinished) == 0.0


def test_a_directory_that_is_not_there_has_nothing_to_list_and_nothing_to_delete(paths: Layout) -> None:
    nowhere = Layout(paths.root / "nowhere")
    assert commit.of(nowhere).seen() is None
    commit.give_up_old(nowhere, attempt="next", older_than_s=ANY_AGE_S)
    commit.of(nowhere).empty_trash()


def test_a_directory_with_an_unfinished_save_is_not_settled(paths: Layout) -> None:
    write(paths, "a", durable=False)
    seen = commit.of(paths).seen()
    assert seen is not None
    assert not commit.of(paths).is_settled(seen)
