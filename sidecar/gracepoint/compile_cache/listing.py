"""Which compiled programs are in the store when a process starts. All processes get the same answer.

On GPUs two processes must not run one program in two versions, one from the store and one compiled anew: XLA's
autotuning may have chosen differently, and then the order of the collectives may differ, too. So process 0 alone lists
the programs that several processes share, and tells the others. Each process lists the programs that it has for itself.

A process whose platform's folder has another name than that of process 0 **stands alone**: it has all its programs for
itself. On CPUs every process stands alone, as JAX's keys differ from process to process there.

This module has no threads and no state.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import zlib
from collections.abc import Mapping

from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.compile_cache.program_file import is_file_name
from gracepoint.compile_cache.program_folders import SHARED, own_part
from gracepoint.errors import GracepointError
from gracepoint.multihost import KeyValueStore

#: The key under which process 0 tells what it found.
KEY = "compiled-programs/listing"
_NO_FOLDER = ""  # what process 0 tells if it has no cache
#: At most this many programs are listed, the newest ones. The list goes through JAX's key-value store.
MOST = 1000


@dataclasses.dataclass(frozen=True)
class Stored:
    """A file in the store.

    Attributes:
        bytes: Size of the file.
        age_s: Seconds since it was written, when it was listed.
    """

    bytes: int
    age_s: float


@dataclasses.dataclass(frozen=True)
class ProgramListing:
    """The programs that a process may use, by the names of their files, newest first.

    Attributes:
        shared: Programs on devices of several processes.
        own: The programs that this process has for itself.
        stands_alone: True if the process uses no shared programs, as its platform's folder is another one than that of
            process 0.
    """

    shared: Mapping[str, Stored]
    own: Mapping[str, Stored]
    stands_alone: bool = False


NOTHING = ProgramListing({}, {})


def list_part(folder: StoragePath, part: str) -> dict[str, Stored]:
    """Returns the programs in one folder, newest first. Empty if it does not exist.

    Raises:
        OSError: The store cannot be listed.
    """
    entries = [entry for entry in (folder / part).entries() if is_file_name(entry.key)]
    if not entries:
        return {}
    now_s = folder.now_s()
    entries.sort(key=lambda entry: (-entry.changed_s, entry.key))
    return {entry.key: Stored(entry.bytes, max(0.0, now_s - entry.changed_s)) for entry in entries[:MOST]}


def list_programs(
    folder: StoragePath, process_index: int, process_count: int, store: KeyValueStore, *, timeout_s: float
) -> ProgramListing:
    """Returns the programs that this process may use.

    Args:
        folder: The platform's folder.
        process_index: This process.
        process_count: How many processes there are. They all call this function.
        store: The key-value store that they share.
        timeout_s: Seconds to wait for process 0.

    Raises:
        OSError: The store cannot be listed.
        GracepointError: Process 0 told nothing in time.
    """
    shared: dict[str, Stored] = {}
    stands_alone = False
    if process_index == 0 and process_count > 1:
        try:
            shared = list_part(folder, SHARED)
        finally:  # even after an error, as the other processes wait for it
            store.set(KEY, to_text(folder.name, shared))
    elif process_count > 1:
        named, shared = from_text(store.get(KEY, timeout_s=timeout_s))
        stands_alone = named not in (folder.name, _NO_FOLDER)
    own = list_part(folder, own_part(process_index))
    return ProgramListing({} if stands_alone else shared, own, stands_alone)


def tell_nothing(process_index: int, process_count: int, store: KeyValueStore) -> None:
    """Tells the other processes, from process 0, that they are to use no shared programs. Never raises."""
    if process_index == 0 and process_count > 1:
        with contextlib.suppress(GracepointError):  # the list was told already, or the key-value store is gone
            store.set(KEY, to_text(_NO_FOLDER, {}))


def to_text(folder: str, programs: Mapping[str, Stored]) -> str:
    """Returns the text with which process 0 tells what it found in a platform's folder."""
    rows = [[name, found.bytes, round(found.age_s)] for name, found in programs.items()]
    return base64.b64encode(zlib.compress(json.dumps([folder, rows]).encode())).decode()


def from_text(text: str) -> tuple[str, dict[str, Stored]]:
    """Returns the name of the platform's folder, and the programs that process 0 found there."""
    folder, rows = json.loads(zlib.decompress(base64.b64decode(text)))
    return folder, {name: Stored(size, age_s) for name, size, age_s in rows}
