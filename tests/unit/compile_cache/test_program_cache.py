"""What JAX gets of a store: programs that are exactly what it asked for, or nothing and a line in the log."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterator, Set
from typing import Any

import pytest

from gracepoint.checkpoint.storage.storage_path import StoragePath, storage_path
from gracepoint.compile_cache import program_cache
from gracepoint.compile_cache.cleaning import Bounds
from gracepoint.compile_cache.listing import ProgramListing, Stored, list_part
from gracepoint.compile_cache.program_cache import ProgramCache
from gracepoint.compile_cache.program_file import file_name, pack
from gracepoint.compile_cache.program_folders import own_part
from tests.waiting import until

FOLDER = f"jax-0.10.2-jaxlib-0.10.2-tpu-2x4-{'1' * 16}"
KEY, PROGRAM = "jit_step-1", b"program" * 100
#: Processes that run a program: two of them, or process 0 alone.
ALL, ALONE = frozenset({0, 1}), frozenset({0})
BOUNDS = Bounds(bytes=1 << 20, unused_s=1000.0)


class Caches:
    """Starts caches of one store, as the processes of several starts do, and closes them."""

    def __init__(self, top: StoragePath) -> None:
        self.top = top
        self.folder = top / FOLDER
        self._open: list[ProgramCache] = []

    def start(
        self, list_programs: Callable[[], ProgramListing] | None = None, bounds: Bounds = BOUNDS, index: int = 0
    ) -> ProgramCache:
        def list_both() -> ProgramListing:
            return ProgramListing(list_part(self.folder, "all"), list_part(self.folder, own_part(index)))

        cache = ProgramCache(self.top, FOLDER, list_programs or list_both, bounds, index)
        self._open.append(cache)
        cache.start()
        return cache

    def keep(self, key: str = KEY, program: bytes = PROGRAM, processes: Set[int] = ALL, index: int = 0) -> None:
        """Keeps a program, as an earlier start of the job did."""
        cache = self.start(index=index)
        cache.put(key, processes, program)
        cache.close(60)

    def path(self, key: str = KEY, part: str = "all") -> StoragePath:
        return self.folder / part / file_name(key)

    def close(self) -> None:
        for cache in self._open:
            cache.close(60)


@pytest.fixture
def caches(top: StoragePath) -> Iterator[Caches]:
    made = Caches(top)
    yield made
    made.close()


@pytest.fixture
def in_memory() -> Iterator[Caches]:
    made = Caches(storage_path(f"memory://programs-{secrets.token_hex(8)}"))
    yield made
    made.close()


def test_the_next_start_gets_what_this_one_compiled(caches: Caches) -> None:
    first = caches.start()
    assert first.get(KEY, ALL) is None
    first.put(KEY, ALL, PROGRAM)
    first.put("jit_slice-1", ALONE, b"slice")
    first.close(60)
    second = caches.start()
    assert second.get(KEY, ALL) == PROGRAM
    assert second.get("jit_slice-1", ALONE) == b"slice"
    assert second.get("jit_slice-1", ALL) is None
    assert (second.found, second.compiled) == (2, 1)


def test_a_program_of_this_start_is_not_used_before_the_next(in_memory: Caches) -> None:
    """Else one process could find what another has compiled itself."""
    cache = in_memory.start()
    assert cache.get(KEY, ALL) is None
    in_memory.keep()
    assert cache.get(KEY, ALL) is None
    assert in_memory.start().get(KEY, ALL) == PROGRAM


@pytest.mark.parametrize(
    ("data", "says"),
    [
        pytest.param(pack(KEY, PROGRAM)[:-1], "the file is incomplete", id="torn"),
        pytest.param(pack(KEY, PROGRAM)[:-1] + b"!", "the file is damaged", id="damaged"),
        pytest.param(b"something else", "this version of Gracepoint did not write the file", id="foreign"),
        pytest.param(pack("jit_other-1", PROGRAM), "the file holds another program", id="another's"),
    ],
)
def test_what_is_no_program_is_ignored_and_replaced(
    caches: Caches, data: bytes, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    caches.keep()
    caches.path().put(data)
    cache = caches.start()
    assert cache.get(KEY, ALL) is None
    assert f"compiled program {caches.path()} is ignored, and compiled anew: {says}" in caplog.text
    cache.put(KEY, ALL, PROGRAM)
    cache.close(60)
    assert caches.start().get(KEY, ALL) == PROGRAM


def test_a_program_that_was_deleted_meanwhile_is_compiled(in_memory: Caches) -> None:
    in_memory.keep()
    gone = ProgramListing({file_name("jit_gone-1"): Stored(10, 0.0)}, {})
    cache = in_memory.start(lambda: gone)
    assert cache.get("jit_gone-1", ALL) is None


def test_a_store_that_cannot_be_listed_costs_one_line(in_memory: Caches, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> ProgramListing:
        raise OSError("the bucket does not exist")

    cache = in_memory.start(fail)
    assert [cache.get(f"jit_{n}-1", ALL) for n in range(3)] == [None] * 3
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == [f"compiled programs in {in_memory.folder} are not used in this run: the bucket does not exist"]


def test_a_store_that_hangs_does_not_hold_up_compilation(
    in_memory: Caches, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(program_cache, "LISTED_WITHIN_S", 0.05)
    in_memory.keep()
    answers = threading.Event()

    def list_late() -> ProgramListing:
        answers.wait(60)
        return ProgramListing(list_part(in_memory.folder, "all"), {})

    cache = in_memory.start(list_late)
    assert cache.get(KEY, ALL) is None
    assert "the store was not listed within 0.05 s" in caplog.text
    answers.set()
    assert cache.get(KEY, ALL) is None, "all programs of one run come from one list"


class Refusing:
    """A store that refuses to be written to."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.puts = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def put(self, key: str, data: bytes) -> None:
        self.puts += 1
        raise PermissionError("the service account may not write")


class Hanging:
    """A store that does not return what is read, until the test ends."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.ended = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def read(self, key: str) -> Any:
        self.ended.wait(60)
        return self._real.read(key)


def test_a_program_that_does_not_come_is_compiled(
    in_memory: Caches, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(program_cache, "READ_WITHIN_S", 0.05)
    in_memory.keep()
    backend = Hanging(in_memory.top.backend)
    cache = Caches(StoragePath(backend, in_memory.top.key)).start()
    try:
        assert cache.get(KEY, ALL) is None
    finally:
        backend.ended.set()
        cache.close(60)
    assert "cannot be read, and is compiled anew: the store did not return it within 0.05 s" in caplog.text


def test_a_store_that_refuses_writes_is_soon_left_alone(in_memory: Caches, caplog: pytest.LogCaptureFixture) -> None:
    backend = Refusing(in_memory.top.backend)
    refusing = Caches(StoragePath(backend, in_memory.top.key))
    cache = refusing.start()
    for number in range(50):
        cache.put(f"jit_f-{number}", ALL, PROGRAM)
    cache.close(60)
    assert 3 <= backend.puts < 10  # a few were under way
    assert caplog.text.count("the service account may not write") == 2
    assert "the next start compiles it again" in caplog.text
    assert "compiled programs are no longer kept in this run" in caplog.text


def test_a_program_that_alone_exceeds_the_bound_is_not_kept(
    in_memory: Caches, caplog: pytest.LogCaptureFixture
) -> None:
    cache = in_memory.start(bounds=Bounds(bytes=100, unused_s=1000.0))
    for number in range(3):
        cache.put(f"jit_f-{number}", ALL, PROGRAM)
    cache.close(60)
    assert in_memory.top.entries() == []
    assert caplog.text.count("Allow more by compilationCache.maxBytes") == 1


def test_the_bound_holds_while_programs_are_added(in_memory: Caches) -> None:
    cache = in_memory.start(bounds=Bounds(bytes=10_000, unused_s=1000.0))
    for number in range(100):
        cache.put(f"jit_f-{number}", ALL, PROGRAM)
    cache.close(60)
    # A process cleans again when it has written a tenth of the bound.
    assert 0 < sum(entry.bytes for entry in in_memory.top.entries()) <= 11_000


@pytest.mark.parametrize(
    ("index", "processes", "age_s", "renewed"),
    [
        pytest.param(0, ALL, 300.0, True, id="shared, in process 0"),
        pytest.param(1, ALL, 300.0, False, id="shared, in another process"),
        pytest.param(1, {1}, 300.0, True, id="its own"),
        pytest.param(0, ALL, 200.0, False, id="young"),
    ],
)
def test_a_used_program_is_renewed_before_it_is_too_old(
    in_memory: Caches, index: int, processes: Set[int], age_s: float, renewed: bool
) -> None:
    in_memory.keep(processes=processes, index=index)
    path = in_memory.path(part="all" if processes == ALL else own_part(index))
    before = path.entry()
    programs = {path.name: Stored(900, age_s)}
    cache = in_memory.start(lambda: ProgramListing(programs, programs), index=index)
    assert cache.get(KEY, processes) == PROGRAM
    cache.close(60)
    after = path.entry()
    assert before is not None
    assert after is not None
    assert (after.generation != before.generation) == renewed
    assert in_memory.start(index=index).get(KEY, processes) == PROGRAM


@pytest.mark.parametrize(
    ("index", "processes", "alone", "keeps"),
    [
        pytest.param(0, {0, 1}, False, True, id="the first that runs it"),
        pytest.param(1, {0, 1}, False, False, id="another that runs it"),
        pytest.param(1, {1, 2}, False, True, id="the first, which is not process 0"),
        pytest.param(2, {2}, False, True, id="the only one"),
        pytest.param(1, {0, 1}, True, True, id="one that stands alone"),
        pytest.param(0, set(), False, True, id="process 0, of a program that nothing is known of"),
        pytest.param(1, set(), False, False, id="another, of a program that nothing is known of"),
    ],
)
def test_one_process_keeps_a_program(
    in_memory: Caches, index: int, processes: Set[int], alone: bool, keeps: bool
) -> None:
    cache = in_memory.start(lambda: ProgramListing({}, {}, alone), index=index)
    assert cache.keeps(processes) == keeps
    cache.put(KEY, processes, PROGRAM)
    cache.close(60)
    part = own_part(index) if alone or processes == {index} else "all"
    assert in_memory.path(part=part).is_value()


def test_more_than_fits_into_memory_is_read_when_asked_for(
    in_memory: Caches, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gracepoint")
    monkeypatch.setattr(program_cache, "AHEAD_BYTES", 2000)
    for number in range(4):
        in_memory.keep(f"jit_f-{number}")
    cache = in_memory.start()
    assert [cache.get(f"jit_f-{n}", ALL) for n in range(4)] == [PROGRAM] * 4
    # A program is found as soon as all are listed, which may be before the message.
    until(lambda: "read ahead count=2 of=4" in caplog.text, lambda: f"the message in {caplog.text}")


def test_many_threads_may_compile_at_once(in_memory: Caches) -> None:
    for number in range(20):
        in_memory.keep(f"jit_f-{number}", b"%d" % number)
    cache, found = in_memory.start(), dict[tuple[int, int], bytes | None]()

    def compile_all(thread: int) -> None:
        for number in range(20):
            found[thread, number] = cache.get(f"jit_f-{number}", ALL)

    threads = [threading.Thread(target=compile_all, args=(n,), daemon=True) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 160
    assert all(program == b"%d" % number for (_, number), program in found.items())


def test_nothing_is_kept_after_the_end(in_memory: Caches) -> None:
    cache = in_memory.start()
    cache.close(60)
    cache.put(KEY, ALL, PROGRAM)
    cache.close(60)
    assert in_memory.top.entries() == []
