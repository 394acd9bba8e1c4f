"""What a commit in a store that cannot rename does at its limits: marks that fail, large steps, deadlines."""

from __future__ import annotations

import errno

import pytest

from gracepoint.checkpoint.format import layout
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.format.records import DoneRecord
from gracepoint.checkpoint.steps import commit, listing, object_steps
from gracepoint.errors import SaveFailed
from tests.unit.checkpoint.steps.fakes.small_saves import STEP, write
from tests.unit.checkpoint.storage.fakes.flat import FlatPath, FlatStore


def new_store() -> tuple[FlatStore, Layout]:
    store = FlatStore()
    return store, Layout(FlatPath(store, "run"))


@pytest.mark.parametrize("mark", [layout.COMMIT_SUCCESS, layout.STEP_METADATA])
@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "500"), TimeoutError(errno.ETIMEDOUT, "slow")], ids=["io", "time"]
)
def test_a_save_whose_marks_fail_is_committed_and_a_start_adds_them(mark: str, error: OSError) -> None:
    store, paths = new_store()
    temporary = write(paths, "a")

    def fails(operation: str, key: str) -> None:
        if operation in ("put", "write_if") and key.endswith(mark):
            raise error

    store.before = fails
    assert commit.of(paths).finalize(temporary, replace=True)
    store.before = lambda operation, key: None
    assert listing.complete_steps(paths) == [STEP]
    assert f"run/{STEP}/{mark}" not in store.objects
    assert commit.of(paths).is_committed(temporary)
    assert f"run/{STEP}/{mark}" in store.objects


def test_a_replaced_step_is_moved_in_bounded_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    _, paths = new_store()
    assert commit.of(paths).finalize(write(paths, "a"), replace=True)
    temporary = write(paths, "b", content=b"12345678")
    monkeypatch.setattr(object_steps, "MOVED_AT_ONCE_BYTES", 8)
    batches: list[int] = []
    real = FlatPath.at_once

    def at_once(path: FlatPath, acts: object) -> None:
        listed = list(acts)  # type: ignore[call-overload]
        if listed and "move" in str(listed[0]):
            batches.append(len(listed))
        real(path, listed)

    monkeypatch.setattr(FlatPath, "at_once", at_once)
    assert commit.of(paths).finalize(temporary, replace=True)
    assert batches == [1, 1]


def test_a_move_ends_at_the_deadline_and_the_next_start_continues() -> None:
    store, paths = new_store()
    assert commit.of(paths).finalize(write(paths, "a"), replace=True)
    temporary = write(paths, "b", content=b"other")
    moved: list[str] = []

    def before(operation: str, key: str) -> None:
        if operation == "write_if" and key.startswith(f"run/{STEP}/"):
            moved.append(key)

    def go_on() -> None:
        if moved:
            raise SaveFailed("the time is over")

    store.before = before
    with pytest.raises(SaveFailed, match="the time is over"):
        commit.of(paths).finalize(temporary, replace=True, go_on=go_on)
    assert len(moved) == 1
    assert commit.of(paths).finalize(temporary, replace=True)
    assert commit.of(paths).is_committed(temporary)


def test_a_done_record_is_not_written_after_the_deadline() -> None:
    _, paths = new_store()
    temporary = write(paths, "a")
    record = DoneRecord.from_bytes((temporary.path / layout.done_record(0)).read_bytes(), "it")
    (temporary.path / layout.done_record(0)).delete()

    def go_on() -> None:
        raise SaveFailed("the time is over")

    with pytest.raises(SaveFailed, match="the time is over"):
        commit.of(paths).record(temporary, record, go_on)
    assert not commit.is_durable(paths, temporary)
    for _ in range(2):  # a record may be written again
        commit.of(paths).record(temporary, record, lambda: None)
    assert commit.is_durable(paths, temporary)
