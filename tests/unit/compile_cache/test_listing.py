"""Which programs a process may use: the same in all processes, whatever the store shows each of them."""

from __future__ import annotations

import secrets
import threading

import pytest

from gracepoint.checkpoint.storage.storage_path import StoragePath, storage_path
from gracepoint.compile_cache.listing import MOST, ProgramListing, list_part, list_programs, tell_nothing
from gracepoint.compile_cache.program_file import file_name
from gracepoint.multihost import InMemoryStore, KeyTimeout

FOLDER = f"jax-0.10.2-jaxlib-0.10.2-tpu-2x4-{'1' * 16}"
SHARED, OWN = file_name("jit_step-1"), file_name("jit_slice-1")


def put(folder: StoragePath, part: str, name: str) -> None:
    (folder / part).make_folder()
    (folder / part / name).put(b"program")


def list_all(folders: list[StoragePath]) -> list[ProgramListing]:
    """Returns what each process finds, each in the folder that it sees."""
    store, found = InMemoryStore(), dict[int, ProgramListing]()

    def run(index: int) -> None:
        found[index] = list_programs(folders[index], index, len(folders), store, timeout_s=60)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(folders))]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join(60)
    return [found[index] for index in range(len(folders))]


def names(listing: ProgramListing) -> tuple[set[str], set[str], bool]:
    """Returns the shared programs, the process's own, and whether it stands alone."""
    return set(listing.shared), set(listing.own), listing.stands_alone


def test_each_process_finds_the_shared_programs_and_its_own(top: StoragePath) -> None:
    put(top / FOLDER, "all", SHARED)
    put(top / FOLDER, "process-1", OWN)
    first, second = list_all([top / FOLDER, top / FOLDER])
    assert names(first) == ({SHARED}, set(), False)
    assert names(second) == ({SHARED}, {OWN}, False)
    assert second.own[OWN].bytes == 7
    assert second.own[OWN].age_s < 3600


@pytest.fixture
def folder() -> StoragePath:
    return storage_path(f"memory://listing-{secrets.token_hex(8)}") / FOLDER


def test_all_use_what_process_0_sees(folder: StoragePath) -> None:
    late = storage_path(f"memory://listing-{secrets.token_hex(8)}") / FOLDER
    put(folder, "all", SHARED)
    assert [set(found.shared) for found in list_all([folder, late])] == [{SHARED}, {SHARED}]
    assert [set(found.shared) for found in list_all([late, folder])] == [set(), set()]


def test_a_process_on_another_platform_stands_alone(folder: StoragePath) -> None:
    other = folder.with_name(f"{FOLDER[:-16]}{'2' * 16}")
    put(folder, "all", SHARED)
    put(other, "all", SHARED)
    put(other, "process-1", OWN)
    first, second = list_all([folder, other])
    assert names(first) == ({SHARED}, set(), False)
    assert names(second) == (set(), {OWN}, True)


def test_a_single_process_asks_nobody(folder: StoragePath) -> None:
    put(folder, "process-0", OWN)
    assert names(list_programs(folder, 0, 1, InMemoryStore(), timeout_s=0)) == (set(), {OWN}, False)


def test_process_0_without_a_cache_tells_the_others(folder: StoragePath) -> None:
    store = InMemoryStore()
    put(folder, "all", SHARED)
    tell_nothing(0, 2, store)
    assert names(list_programs(folder, 1, 2, store, timeout_s=60)) == (set(), set(), False)
    tell_nothing(0, 2, store)  # told already
    tell_nothing(1, 2, InMemoryStore())


def test_a_silent_process_0_is_an_error(folder: StoragePath) -> None:
    with pytest.raises(KeyTimeout, match="compiled-programs/listing"):
        list_programs(folder, 1, 2, InMemoryStore(), timeout_s=0.01)


def test_only_files_of_programs_are_listed_and_not_too_many(folder: StoragePath) -> None:
    for number in range(MOST + 5):
        put(folder, "all", file_name(f"jit_f-{number}"))
    put(folder, "all", "notes.txt")
    found = list_part(folder, "all")
    assert len(found) == MOST
    assert "notes.txt" not in found
