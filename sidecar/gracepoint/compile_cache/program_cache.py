"""The cache that JAX asks for compiled programs, and to which JAX gives the programs that it has compiled.

The threads that compile call ``get`` and ``put``. One daemon thread ("gracepoint: compiled programs") lists the store
when the job starts, and reads programs ahead of the requests. In process 0 it then deletes programs that are too old.
At last it drops the bytes that nobody asked for. ``ProgramUploads`` and ``ProgramDownloads`` have threads of their own.
``close`` has all threads end, and waits only for those that write.

A process uses the programs that were in the store at its start, and no others (``listing`` says why). If the list is
not there in time, the process uses none of them. If a program cannot be used, JAX compiles it and gives it to ``put``,
which writes it again.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Set

from gracepoint.checkpoint.storage import posix
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.compile_cache.cleaning import Bounds, clean
from gracepoint.compile_cache.downloads import ProgramDownloads
from gracepoint.compile_cache.listing import NOTHING, ProgramListing, Stored
from gracepoint.compile_cache.program_file import NotThisProgram, file_name, pack, unpack
from gracepoint.compile_cache.program_folders import SHARED, own_part
from gracepoint.compile_cache.uploads import ProgramUploads

logger = logging.getLogger(__name__)

#: Seconds from the start in which the list of programs must be there. Until then a compilation waits for it.
LISTED_WITHIN_S = 30.0
#: Seconds that reading a program may take. If it takes longer, compiling the program is hardly slower.
READ_WITHIN_S = 60.0
#: Bytes of programs that are read ahead of the requests, and held in host memory. Others are read when JAX asks.
AHEAD_BYTES = 1 << 30
#: Seconds after which bytes that nobody asked for are dropped.
_HELD_S = 900.0
#: A program that is used is written again if its file has not changed for this part of ``Bounds.unused_s``.
_RENEWED_AT = 0.25
#: Process 0 cleans again when it has written this part of ``Bounds.bytes``.
_CLEANED_AT = 0.1


class ProgramCache:
    """See the module.

    Args:
        top: The folder of all compiled programs.
        folder: Name of the platform's folder in it.
        list_programs: Lists the programs that this process may use.
        bounds: How much is kept.
        process_index: This process. Process 0 cleans, and renews the programs that several processes use.

    Attributes:
        found: Number of programs that were returned to JAX.
        compiled: Number of programs that JAX asked for and did not get.
    """

    def __init__(
        self,
        top: StoragePath,
        folder: str,
        list_programs: Callable[[], ProgramListing],
        bounds: Bounds,
        process_index: int,
    ) -> None:
        self._top = top
        self._folder = top / folder
        self._list_programs = list_programs
        self._bounds = bounds
        self._process_index = process_index
        self._is_first = process_index == 0
        self._began_s = time.monotonic()
        self._lock = threading.Lock()
        self._listing: ProgramListing | None = None  # None until it is known
        self._listed = threading.Event()
        self._ended = threading.Event()
        self._downloads = ProgramDownloads(READ_WITHIN_S)
        self._uploads = ProgramUploads(self._clean_if_much)
        self._written_bytes = 0  # since the last cleaning; used by one thread at a time
        self._said: set[str] = set()
        self.found = 0
        self.compiled = 0

    def start(self) -> None:
        """Begins to list and to read."""
        threading.Thread(target=self._run, name="gracepoint: compiled programs", daemon=True).start()

    def get(self, key: str, processes: Set[int]) -> bytes | None:
        """Returns a compiled program. None if there is none, or if it cannot be used. Never raises.

        Args:
            key: JAX's key of the program.
            processes: The processes on whose devices it runs. Empty if that is not known.
        """
        listing = self._known()
        part = self._part(processes, listing)
        program = self._get(listing.shared if part == SHARED else listing.own, part, key)
        with self._lock:
            if program is None:
                self.compiled += 1
            else:
                self.found += 1
        return program

    def keeps(self, processes: Set[int]) -> bool:
        """Returns whether this process must ``put`` a program that runs on these processes. One of them must."""
        return self._known().stands_alone or self._process_index == min(processes, default=0)

    def put(self, key: str, processes: Set[int], program: bytes) -> None:
        """Keeps a compiled program. Returns at once, and never raises."""
        path = self._folder / self._part(processes, self._known()) / file_name(key)
        if len(program) > self._bounds.bytes:
            self._warn_once(
                "too large",
                f"compiled program {path} is not kept: it has {len(program)} bytes, and all programs together may have "
                f"{self._bounds.bytes}. Allow more by compilationCache.maxBytes of the policy",
            )
            return
        self._uploads.add(path, len(program), functools.partial(pack, key, program))

    def close(self, timeout_s: float) -> None:
        """Waits for programs that are being written, and has all threads end. Safe to repeat. Never raises.

        Args:
            timeout_s: Seconds to wait.
        """
        if self._ended.is_set():
            return
        self._uploads.close(timeout_s)
        self._ended.set()
        self._downloads.forget()
        logger.info(
            "compiled programs found=%d compiled=%d kept=%d directory=%s",
            self.found,
            self.compiled,
            self._uploads.written,
            self._folder,
        )

    def _part(self, processes: Set[int], listing: ProgramListing) -> str:
        is_own = listing.stands_alone or processes == {self._process_index}
        return own_part(self._process_index) if is_own else SHARED

    def _get(self, programs: Mapping[str, Stored], part: str, key: str) -> bytes | None:
        name = file_name(key)
        stored = programs.get(name)
        if stored is None:
            logger.debug("compiled program not found, and compiled folder=%s key=%s", part, key)
            return None
        path = self._folder / part / name
        try:
            data = self._downloads.read(path)
            program = unpack(key, data)
        except FileNotFoundError:
            logger.info("compiled program %s was deleted meanwhile, and is compiled anew", path)
            return None
        except NotThisProgram as error:
            logger.warning("compiled program %s is ignored, and compiled anew: %s", path, error)
            return None
        except Exception as error:  # noqa: BLE001 - whatever a store raises, JAX can compile
            self._warn_once("unreadable", f"compiled program {path} cannot be read, and is compiled anew: {error}")
            return None
        if stored.age_s > self._bounds.unused_s * _RENEWED_AT and (self._is_first or part != SHARED):
            self._uploads.add(path, len(data), lambda: data)
        return program

    def _known(self) -> ProgramListing:
        """Returns the programs that were in the store at the start. Waits for them, but not for long."""
        left_s = self._began_s + LISTED_WITHIN_S - time.monotonic()
        if not self._listed.wait(max(0.0, left_s)) and self._set_listing(NOTHING):
            logger.warning(
                "compiled programs in %s are not used in this run: the store was not listed within %g s",
                self._folder,
                LISTED_WITHIN_S,
            )
        assert self._listing is not None
        return self._listing

    def _set_listing(self, listing: ProgramListing) -> bool:
        """Sets the listing, once. Returns False if it was set before."""
        with self._lock:
            if self._listing is not None:
                return False
            self._listing = listing
        self._listed.set()
        return True

    def _run(self) -> None:
        try:
            listing = self._list_programs()
        except Exception as error:  # noqa: BLE001 - without the list everything is compiled
            listing = NOTHING
            logger.warning("compiled programs in %s are not used in this run: %s", self._folder, error)
        if self._set_listing(listing):
            self._downloads.prefetch(self._ahead(listing))
        if self._is_first:
            self._clean()
        self._ended.wait(_HELD_S)
        self._downloads.forget()

    def _ahead(self, listing: ProgramListing) -> list[StoragePath]:
        """Returns what to read ahead: the newest programs, the largest of them first, as they take longest."""
        parts = {SHARED: listing.shared, own_part(self._process_index): listing.own}
        found = [(stored, part, name) for part, programs in parts.items() for name, stored in programs.items()]
        found.sort(key=lambda program: program[0].age_s)
        wanted, total = [], 0
        for stored, part, name in found:
            total += stored.bytes
            if total > AHEAD_BYTES:
                break
            wanted.append((stored.bytes, part, name))
        wanted.sort(reverse=True)
        logger.info("compiled programs read ahead count=%d of=%d directory=%s", len(wanted), len(found), self._folder)
        return [self._folder / part / name for _, part, name in wanted]

    def _clean_if_much(self, written_bytes: int) -> None:
        self._written_bytes += written_bytes
        if self._is_first and self._written_bytes > self._bounds.bytes * _CLEANED_AT:
            self._clean()

    def _clean(self) -> None:
        self._written_bytes = 0
        try:
            with posix.telling(self._top):
                clean(self._top, self._bounds)
        except Exception as error:  # noqa: BLE001 - what is not deleted today is deleted at another start
            self._warn_once("cleaning", f"compiled programs in {self._top}: what is too old cannot be deleted: {error}")

    def _warn_once(self, kind: str, text: str) -> None:
        with self._lock:
            if kind in self._said:
                return
            self._said.add(kind)
        logger.warning("%s", text)
