"""A process that deletes a step and sleeps meanwhile deletes nothing of a later save."""

from __future__ import annotations

import pytest

from gracepoint.checkpoint.format import layout, records
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.steps import commit, listing, object_steps
from gracepoint.checkpoint.storage.checks import check_contents
from gracepoint.deadline import Deadline
from gracepoint.errors import SaveFailed
from tests.unit.checkpoint.steps.fakes.small_saves import STEP, write
from tests.unit.checkpoint.storage.fakes.digests import DigestStore
from tests.unit.checkpoint.storage.fakes.flat import FlatPath, FlatStore

STORES = pytest.mark.parametrize("kind", [FlatStore, DigestStore], ids=["numbers", "digests"])
REQUESTS = 30  # more than a sweep makes


def condemned(kind: type[FlatStore]) -> tuple[FlatStore, Layout]:
    store = kind()
    paths = Layout(FlatPath(store, "run"))
    assert commit.of(paths).finalize(write(paths, "a", content=b"one"), replace=True)
    commit.of(paths).discard(paths.step(STEP), paths.trash(STEP, "a", 2))
    return store, paths


def check_whole(paths: Layout) -> None:
    assert listing.complete_steps(paths) == [STEP]
    manifest = records.read_manifest(paths.step(STEP))
    assert manifest is not None
    for name, file in manifest.files.items():
        check_contents(paths.step(STEP) / name, file.bytes, file.crc32)


@STORES
@pytest.mark.parametrize("request_number", range(REQUESTS))
def test_a_late_request_of_a_deletion_spares_a_later_save(kind: type[FlatStore], request_number: int) -> None:
    store, paths = condemned(kind)
    seen = 0

    def before(operation: str, key: str) -> None:
        nonlocal seen
        seen += 1
        if seen == request_number + 1:
            store.before = lambda operation, key: None
            assert commit.of(paths).finalize(write(paths, "b", content=b"two"), replace=True)

    store.before = before
    commit.of(paths).empty_trash()
    store.before = lambda operation, key: None
    if seen > request_number:
        check_whole(paths)


@STORES
def test_two_processes_do_not_delete_one_step_at_once(kind: type[FlatStore]) -> None:
    store, paths = condemned(kind)
    others: list[bool] = []

    def before(operation: str, key: str) -> None:
        if operation == "delete" and not others:
            others.append(True)
            others.append(object_steps.sweep(paths.step(STEP), paths.trash(STEP, "a", 2).name))

    store.before = before
    commit.of(paths).empty_trash()
    assert others == [True, False]
    assert not paths.step(STEP).is_folder()


def dead_deletion(kind: type[FlatStore]) -> tuple[FlatStore, Layout]:
    store, paths = condemned(kind)

    def dies(operation: str, key: str) -> None:
        if operation == "delete":
            raise KeyboardInterrupt

    store.before = dies
    with pytest.raises(KeyboardInterrupt):
        commit.of(paths).empty_trash()
    store.before = lambda operation, key: None
    return store, paths


@STORES
def test_the_next_start_deletes_all_of_a_discarded_save(kind: type[FlatStore]) -> None:
    store, paths = condemned(kind)  # process 0 dies before it deletes the folder of the save, and the objects
    assert [temporary.attempt for temporary in paths.temporaries()] == ["a"]
    store.time_s += 10_000
    commit.give_up_old(paths, attempt="b", older_than_s=3600.0)
    commit.of(paths).empty_trash()
    assert paths.root.entries() == []


@STORES
def test_a_deletion_that_became_known_to_nobody_is_found_again(kind: type[FlatStore]) -> None:
    _, paths = condemned(kind)
    for trash in paths.trashed():
        trash.delete_folder()
    assert not list(paths.trashed())
    commit.give_up_old(paths, attempt="b", older_than_s=3600.0)
    commit.of(paths).empty_trash()
    assert not paths.step(STEP).is_folder()


@STORES
def test_a_save_ends_a_deletion_whose_process_has_died(kind: type[FlatStore]) -> None:
    store, paths = dead_deletion(kind)
    began_s = store.time_s
    assert commit.of(paths).finalize(write(paths, "b", content=b"two"), replace=True)
    check_whole(paths)
    assert object_steps.FREE_S - 1 < store.time_s - began_s < object_steps.FREE_S + 5


def test_a_save_waits_for_a_deletion_until_its_deadline() -> None:
    store, paths = dead_deletion(FlatStore)
    until_s = store.time_s + 20

    def go_on() -> None:
        if store.time_s > until_s:
            raise SaveFailed("the time is over")

    temporary = write(paths, "b", content=b"two")
    with pytest.raises(SaveFailed, match="the time is over"):
        commit.of(paths).finalize(temporary, replace=True, go_on=go_on)
    assert store.time_s < until_s + 1
    listing.settle(
        paths,
        attempt="c",
        awaited=lambda _: [],
        deadline=Deadline.after(60.0, lambda: store.time_s),
        sleep=store.sleep,
    )
    check_whole(paths)


def test_a_sweeper_renews_its_claim_and_stops_when_it_has_lost_it() -> None:
    store, paths = condemned(FlatStore)
    names = [f"run/{STEP}/{name}" for name in ("default/x/0", layout.host_state_file(0))]

    def before(operation: str, key: str) -> None:
        if operation == "delete" and key in names:
            store.time_s += object_steps.LAST_REQUEST_S + 1

    store.before = before
    assert not object_steps.sweep(paths.step(STEP), paths.trash(STEP, "a", 2).name)
    assert any(name in store.objects for name in names)
