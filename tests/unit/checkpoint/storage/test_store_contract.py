"""What every store does alike. A new one is added to the fixture ``top`` and has to pass as it is."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from gracepoint.checkpoint.memory import ArrayBytes
from gracepoint.checkpoint.storage.buffers import BLOCK_BYTES, Buffer
from gracepoint.checkpoint.storage.checks import read_checked
from gracepoint.checkpoint.storage.storage_path import Generation, StaleGeneration, StoragePath, read_all, sync_folders
from gracepoint.checksum import crc32
from gracepoint.errors import CheckpointCorrupt

RACERS = 6
ROUNDS = 10


def at_once(act: Callable[[int], object], count: int = RACERS) -> list[object]:
    """Calls ``act`` in threads that start together; returns each result or OSError in order."""
    start, found = threading.Barrier(count), dict[int, object]()

    def run(number: int) -> None:
        start.wait(30)
        try:
            found[number] = act(number)
        except OSError as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [found[number] for number in range(count)]


def filled(folder: StoragePath, contents: bytes) -> StoragePath:
    folder.make_folder()
    for name in ("a", "b", "c"):
        (folder / name).put(contents)
    return folder


def contents_of(folder: StoragePath) -> dict[str, bytes]:
    return {entry.key: (folder / entry.key).read_bytes() for entry in folder.entries()}


# --- one value


def test_a_value_is_created_once(top: StoragePath) -> None:
    (top / "v").create(b"first")
    with pytest.raises(FileExistsError):
        (top / "v").create(b"second")
    assert (top / "v").read_bytes() == b"first"


def test_of_several_creators_one_wins_and_its_value_stays(top: StoragePath) -> None:
    for number in range(ROUNDS):
        value = top / f"v{number}"

        def create(racer: int, value: StoragePath = value) -> object:
            return value.create(str(racer).encode())

        found = at_once(create)
        (winner,) = [racer for racer, result in enumerate(found) if isinstance(result, str)]
        assert all(isinstance(result, str | FileExistsError) for result in found)
        assert value.read_bytes() == str(winner).encode()
    assert {child.name for child in top.children()} == {f"v{number}" for number in range(ROUNDS)}


def test_a_value_is_replaced_only_while_it_is_of_the_expected_generation(top: StoragePath) -> None:
    first = (top / "v").create(b"1")
    assert (top / "v").read().generation == first
    second = (top / "v").replace(b"2", first)
    assert second != first
    with pytest.raises(StaleGeneration):
        (top / "v").replace(b"3", first)
    assert (top / "v").read().data == b"2"
    assert (top / "v").read().generation == second


def test_a_deleted_value_is_not_replaced(top: StoragePath) -> None:
    generation = (top / "v").create(b"1")
    (top / "v").delete()
    with pytest.raises(StaleGeneration):
        (top / "v").replace(b"2", generation)
    assert not (top / "v").exists()


def test_of_several_that_replace_one_generation_one_wins(top: StoragePath) -> None:
    value = top / "v"
    generation = value.create(b"at first")
    for number in range(ROUNDS):

        def replace(racer: int, seen: Generation = generation, number: int = number) -> object:
            # Contents that were never there before: some stores take a version's contents for its generation.
            return value.replace(f"{number}.{racer}".encode(), seen)

        found = at_once(replace)
        (winner,) = [racer for racer, result in enumerate(found) if isinstance(result, str)]
        assert all(isinstance(result, str | StaleGeneration) for result in found)
        generation = value.read().generation
        assert value.read_bytes() == f"{number}.{winner}".encode()


def test_what_is_missing_is_not_found(top: StoragePath) -> None:
    missing = top / "missing"
    with pytest.raises(FileNotFoundError):
        missing.read()
    with pytest.raises(FileNotFoundError), missing.open():
        pass
    with pytest.raises(FileNotFoundError):
        missing.children()
    assert missing.entry() is None
    assert missing.entries() == []
    assert missing.last_change_s() == 0.0
    assert not missing.exists()
    assert not missing.is_folder()
    missing.delete()
    missing.delete_folder()


def test_there_is_nothing_below_a_value(top: StoragePath) -> None:
    (top / "v").put(b"a file, where there are folders")
    below = top / "v" / "below"
    assert (below.entry(), below.exists(), below.is_folder(), below.last_change_s()) == (None, False, False, 0.0)
    with pytest.raises(FileNotFoundError):
        below.read()
    with pytest.raises(FileNotFoundError), below.open() as reader:
        reader.read_into(memoryview(bytearray(1)), 0)


def test_a_missing_folder_is_neither_published_nor_stays(renaming: StoragePath) -> None:
    missing = renaming / "missing"
    with pytest.raises(FileNotFoundError):
        missing.publish(renaming / "target")
    with pytest.raises(FileNotFoundError), missing.staying():
        pass


def test_readers_see_a_value_as_a_whole_while_it_is_put(top: StoragePath) -> None:
    value, contents = top / "v", [bytes([byte]) * 50_000 for byte in range(4)]
    value.put(contents[0])

    def act(racer: int) -> bool:
        if racer == 0:
            for number in range(40):
                value.put(contents[number % 4])
            return True
        return all(value.read_bytes() in contents for _ in range(40))

    assert at_once(act, 3) == [True, True, True]


def test_a_touched_value_is_empty(top: StoragePath) -> None:
    (top / "v").touch()
    (top / "v").touch()
    assert contents_of(top) == {"v": b""}


def test_several_put_one_value_at_once(top: StoragePath) -> None:
    def put(_: int) -> None:
        for _ in range(5):
            (top / "v").put(b"same")

    assert at_once(put) == [None] * RACERS
    assert contents_of(top) == {"v": b"same"}


@pytest.mark.parametrize("size", [0, 1, 4096, BLOCK_BYTES + 77])
def test_a_large_value_is_written_with_its_checksum_and_read_in_ranges(top: StoragePath, size: int) -> None:
    data = np.random.default_rng(7).integers(0, 256, size, np.uint8)
    checksum = (top / "v").write_large(
        ArrayBytes(data, np.dtype(np.uint8)), Buffer(), lambda: None, direct=top.has_direct_io()
    )
    sync_folders([top])
    assert checksum == crc32(data.tobytes())
    out = bytearray(size)
    read_checked(top / "v", size, checksum, memoryview(out))
    assert bytes(out) == data.tobytes()
    with (top / "v").open() as reader:
        assert reader.size_bytes == size
        part = memoryview(bytearray(10))
        count = reader.read_into(part, max(0, size - 5))
        assert bytes(part[:count]) == data[max(0, size - 5) :].tobytes()
        assert reader.read_into(part, size) == 0


def test_a_large_value_of_another_checksum_is_corrupt(top: StoragePath) -> None:
    (top / "v").put(b"0123")
    with pytest.raises(CheckpointCorrupt, match="do not fit its checksum"):
        read_checked(top / "v", 4, 0, memoryview(bytearray(4)))
    with pytest.raises(CheckpointCorrupt, match="has 4 bytes, expected 5"):
        read_checked(top / "v", 5, 0, memoryview(bytearray(5)))
    with pytest.raises(CheckpointCorrupt, match="is missing"):
        read_checked(top / "w", 4, 0, memoryview(bytearray(4)))


def test_a_write_that_is_to_stop_stops(top: StoragePath) -> None:
    def stop() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        (top / "v").write_large(ArrayBytes(np.zeros(10, np.uint8), np.dtype(np.uint8)), Buffer(), stop, direct=False)


def test_many_values_are_read_in_order_or_none_if_one_is_missing(top: StoragePath) -> None:
    values = [top / f"v{number}" for number in range(50)]
    for number, value in enumerate(values):
        value.put(str(number).encode())
    assert read_all(values) == [str(number).encode() for number in range(50)]
    values[20].delete()
    assert read_all(values) is None


# --- folders


def test_a_listing_has_sizes_and_generations(top: StoragePath) -> None:
    generation = (top / "x").create(b"123")
    (top / "f" / "g").make_folder()
    (top / "f" / "g" / "y").put(b"45")
    found = {entry.key: entry for entry in top.entries()}
    assert {key: entry.bytes for key, entry in found.items()} == {"x": 3, "f/g/y": 2}
    assert found["x"].generation == generation
    assert found["f/g/y"].generation == (top / "f/g/y").read().generation
    entry = (top / "x").entry()
    assert entry is not None
    assert (entry.bytes, entry.generation) == (3, generation)
    assert {(child.name, child.is_folder) for child in top.children()} == {("x", False), ("f", True)}


def test_a_listing_has_all_that_was_there_while_others_write_and_delete(top: StoragePath) -> None:
    for number in range(20):
        (top / f"old{number}").put(b"x")

    def act(racer: int) -> bool:
        if racer < 2:
            for number in range(30):
                (top / f"new{racer}.{number}").put(b"y")
                if number % 2:
                    (top / f"new{racer}.{number}").delete()
            return True
        wanted = {f"old{number}" for number in range(20)}
        return all(
            wanted <= {entry.key for entry in top.entries()} and wanted <= {child.name for child in top.children()}
            for _ in range(15)
        )

    assert at_once(act, 4) == [True] * 4


def test_a_folder_is_deleted_with_all_in_it_and_nothing_next_to_it(top: StoragePath) -> None:
    for name in ("f/a", "f/g/b", "f2/c", "f.d"):
        (top / name).parent.make_folder()
        (top / name).put(b"x")
    (top / "f").delete_folder()
    assert set(contents_of(top)) == {"f2/c", "f.d"}
    assert not (top / "f").exists()


def test_an_empty_folder_is_there(renaming: StoragePath) -> None:
    (renaming / "f" / "g").make_folder()
    assert (renaming / "f" / "g").is_folder()
    assert (renaming / "f" / "g").children() == []
    assert (renaming / "f" / "g").exists()
    assert (renaming / "f" / "g").entry() is None


def test_of_several_that_make_a_folder_of_their_own_one_wins(renaming: StoragePath) -> None:
    for number in range(ROUNDS):

        def make(_: int, folder: StoragePath = renaming / f"f{number}") -> None:
            folder.make_folder(parents=False, exclusive=True)

        found = at_once(make)
        assert sorted(type(result).__name__ for result in found) == ["FileExistsError"] * (RACERS - 1) + ["NoneType"]


# --- publish


def test_a_published_folder_has_its_values_at_its_new_name_alone(renaming: StoragePath) -> None:
    filled(renaming / "tmp" / "deep", b"x").parent.publish(renaming / "final")
    assert contents_of(renaming) == {f"final/deep/{name}": b"x" for name in "abc"}
    assert not (renaming / "tmp").exists()


def test_what_is_there_is_not_published_over(renaming: StoragePath) -> None:
    filled(renaming / "tmp", b"new")
    filled(renaming / "final", b"old")
    with pytest.raises(FileExistsError):
        (renaming / "tmp").publish(renaming / "final")
    assert set(contents_of(renaming / "final").values()) == {b"old"}
    assert set(contents_of(renaming / "tmp").values()) == {b"new"}


def test_an_empty_folder_gives_way(renaming: StoragePath) -> None:
    (renaming / "final").make_folder()
    filled(renaming / "tmp", b"new").publish(renaming / "final")
    assert set(contents_of(renaming / "final").values()) == {b"new"}


def test_nothing_is_published_over_a_value(renaming: StoragePath) -> None:
    filled(renaming / "tmp", b"new")
    (renaming / "final").put(b"a value of that name")
    with pytest.raises(FileExistsError):
        (renaming / "tmp").publish(renaming / "final")
    assert (renaming / "final").read().data == b"a value of that name"


def test_of_several_that_publish_to_one_name_one_wins_as_a_whole(renaming: StoragePath) -> None:
    for number in range(ROUNDS):
        target = renaming / f"final{number}"
        sources = [filled(renaming / f"tmp{number}.{racer}", str(racer).encode()) for racer in range(RACERS)]

        def publish(racer: int, sources: list[StoragePath] = sources, target: StoragePath = target) -> None:
            sources[racer].publish(target)

        found = at_once(publish)
        (winner,) = [racer for racer, result in enumerate(found) if result is None]
        assert all(result is None or isinstance(result, FileExistsError) for result in found)
        assert contents_of(target) == dict.fromkeys("abc", str(winner).encode())
        assert [source.is_folder() for source in sources] == [racer != winner for racer in range(RACERS)]


def test_of_several_that_publish_one_folder_one_wins(renaming: StoragePath) -> None:
    for number in range(ROUNDS):
        source = filled(renaming / f"tmp{number}", b"x")

        def publish(racer: int, source: StoragePath = source, number: int = number) -> None:
            source.publish(renaming / f"final{number}.{racer}")

        found = at_once(publish)
        (winner,) = [racer for racer, result in enumerate(found) if result is None]
        assert all(result is None or isinstance(result, FileNotFoundError) for result in found)
        assert contents_of(renaming / f"final{number}.{winner}") == dict.fromkeys("abc", b"x")


def test_readers_see_all_of_a_published_folder_or_nothing(renaming: StoragePath) -> None:
    ended = threading.Event()

    def act(racer: int) -> bool:
        if racer == 0:
            try:
                for number in range(20):
                    filled(renaming / f"tmp{number}", b"x").publish(renaming / f"final{number}")
            finally:
                ended.set()
            return True
        whole = True
        while not ended.is_set():
            for number in range(20):
                if (renaming / f"final{number}" / "a").exists():
                    whole = whole and all((renaming / f"final{number}" / name).exists() for name in "bc")
        return whole

    assert at_once(act, 3) == [True] * 3


def test_a_folder_that_was_renamed_or_made_again_has_not_stayed(renaming: StoragePath) -> None:
    folder = filled(renaming / "f", b"x")
    with folder.staying() as stayed:
        assert stayed()
        (folder / "d").put(b"x")
        assert stayed()
        folder.publish(renaming / "g")
        assert not stayed()
        filled(folder, b"y")
        assert not stayed()


# --- the store's clock


def test_the_stores_clock_dates_what_is_written(top: StoragePath) -> None:
    before_s = top.now_s() - (0.0 if top.renames else 1.0)  # object stores date to the second
    (top / "f").make_folder()
    (top / "f" / "v").put(b"x")
    after_s = top.now_s()
    entry = (top / "f" / "v").entry()
    assert entry is not None
    assert before_s <= entry.changed_s <= after_s
    assert before_s <= (top / "f").last_change_s() <= after_s
    assert {child.name for child in top.children()} == {"f"}


# --- locations


def test_locations_are_values(top: StoragePath) -> None:
    assert (top / "a" / "b", top / "a/b", (top / "a" / "c").with_name("b")) == (top / "a/b",) * 3
    assert top / "" == top
    assert ((top / "a/b").name, (top / "a/b").parent, (top / "a/b").below(top)) == ("b", top / "a", "a/b")
    assert list((top / "a/b/c").folders_up_to(top)) == [top / "a/b", top / "a", top]
    assert len({top / "a", top / "a"}) == 1
    assert sorted([top / "b", top / "a-", top / "a/c"]) == [top / "a/c", top / "a-", top / "b"]
    with pytest.raises(ValueError, match="is not below"):
        top.below(top / "a")
