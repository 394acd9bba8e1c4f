"""Steps in the memory of snapshot servers: they need no commit, and are found by their done-records.

A step **is safe in memory** when the done-records of all its parts are there, as a save in storage is durable. The
processes that write it know this when they have met. A later start finds it out: process 0 asks the servers for all
done-records (``complete_steps``), and tells the others what their manifest would be, and who has which part.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import itertools
import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from gracepoint.checkpoint.format.layout import Layout, Temporary
from gracepoint.checkpoint.format.records import DoneRecord, Manifest, Writing, merge
from gracepoint.checkpoint.memory import ArrayBytes
from gracepoint.checkpoint.storage.snapshot_path import SnapshotPath
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.errors import CheckpointCorrupt, CheckpointTooNew
from gracepoint.snapshots.snapshot_servers import FoundPart, ServerAt, SnapshotServers

logger = logging.getLogger(__name__)

#: Steps that are looked at closely. There are two, but for what earlier attempts have left.
_MOST_STEPS = 4
_READ_AT_ONCE = 32


def save_of(temporary: Temporary) -> str:
    """Returns what tells a save from all others, as servers see it."""
    return f"{temporary.attempt}.{temporary.ordinal}"


def steps_of(paths: Layout) -> str:
    """Returns what the attempts end with whose snapshots are of a directory: a job may have several directories."""
    return hashlib.sha256(str(paths.root).encode()).hexdigest()[:16]


def key_of(temporary: Temporary) -> str:
    """Returns the key of a process's part of a save (``snapshot_path.OwnPart``)."""
    return f"{temporary.step}/{save_of(temporary)}"


class SnapshotCommit:
    """Makes parts durable, and commits nothing. ``commit.Commit`` documents the methods."""

    quiet_s = 0.0
    takes_parts = True

    def __init__(self, paths: Layout, root: SnapshotPath) -> None:
        self._paths = paths
        self._root = root

    @contextlib.contextmanager
    def writing(self, temporary: Temporary, begun_ns: int, *, process_index: int) -> Iterator[Writing]:
        folder = self._root.at(self._root.own.begin(temporary.step or 0, save_of(temporary)))

        def place(path: str, data: ArrayBytes, checksum: int, go_on: Callable[[], None]) -> None:
            (folder / path).send(data, checksum, go_on)

        yield Writing(folder, lambda: True, begun_ns, {}, place)

    def record(self, temporary: Temporary, done_record: DoneRecord, go_on: Callable[[], None]) -> None:
        self._root.own.finish(key_of(temporary), done_record.to_bytes(), go_on)

    def finalize(self, temporary: Temporary, *, replace: bool, go_on: Callable[[], None] | None = None) -> bool:
        return True  # all processes have met, each with its part

    def finish(self, temporary: Temporary, all_done: Sequence[DoneRecord]) -> bool:
        return True

    def is_committed(self, temporary: Temporary) -> bool:
        return False  # this process cannot say: only a start asks all servers

    def is_left_by_commit(self, temporary: Temporary) -> bool:
        return False

    def last_change_s(self, temporary: Temporary) -> float:
        return 0.0

    def give_up(self, temporary: Temporary) -> None:
        """Does nothing: what other attempts have left goes with the next step that is safe."""

    def delete_failed(self, temporary: Temporary, *, deletes: bool) -> None:
        if deletes:
            self._root.own.drop(key_of(temporary))

    def is_unfinished(self, folder: StoragePath) -> bool:
        return False

    def standing(self, folder: StoragePath) -> str | None:
        return None  # each save has keys of its own, and replaces nothing

    def discard(self, folder: StoragePath, trash: StoragePath, *, only: str | None = None) -> None:
        """Does nothing: servers drop whole steps, once a newer one is safe."""

    def seen(self) -> Layout | None:
        return self._paths

    def is_settled(self, listed: Layout) -> bool:
        return True

    def interrupted(self) -> Iterator[tuple[StoragePath, Callable[[], None]]]:
        return iter(())

    def find_condemned(self, *, after_crash: bool) -> None:
        """Does nothing, as there is no trash."""

    def empty_trash(self) -> None:
        """Does nothing, as there is no trash."""


@dataclasses.dataclass(frozen=True)
class CompleteStep:
    """A step that is safe in memory, as process 0 tells it to the others.

    Attributes:
        step: The step.
        attempt: The attempt of the workload that wrote it.
        save: See ``save_of``.
        manifest: Contents of the manifest that its done-records make.
        owners: The part that has each file of the manifest, in the order of the files: the part, and how many files.
        parts: The servers that have each part.
        age_s: Seconds since its last done-record was written.
    """

    step: int
    attempt: int
    save: str
    manifest: bytes
    owners: Sequence[tuple[int, int]]
    parts: Sequence[Sequence[ServerAt]]
    age_s: float

    def __str__(self) -> str:
        copies = min(map(len, self.parts))
        return f"step {self.step} of {len(self.parts)} processes, in {copies} copies, {self.age_s:.0f} s old"

    def is_left_by(self, other: CompleteStep) -> bool:
        """Returns whether a later start wrote ``other``, and so began before this step."""
        is_of_another_start = self.save.rpartition(".")[0] != other.save.rpartition(".")[0]
        return is_of_another_start and other.step < self.step and other.age_s < self.age_s

    def read_manifest(self) -> Manifest:
        """Returns the manifest."""
        return Manifest.from_bytes(self.manifest, f"the snapshot of step {self.step}")

    def owners_by_path(self) -> dict[str, int]:
        """Returns the part that has each file of the manifest."""
        owners = itertools.chain.from_iterable(itertools.repeat(part, count) for part, count in self.owners)
        return dict(zip(self.read_manifest().files, owners, strict=True))

    def to_json(self) -> dict[str, Any]:
        """Returns plain values."""
        servers = list(dict.fromkeys(server for part in self.parts for server in part))
        place = {server: number for number, server in enumerate(servers)}
        return {
            **{name: getattr(self, name) for name in ("step", "attempt", "save", "owners", "age_s")},
            "manifest": base64.b64encode(zlib.compress(self.manifest)).decode(),
            "servers": [dataclasses.astuple(server) for server in servers],
            "parts": [[place[server] for server in part] for part in self.parts],
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Reads what ``to_json`` returned."""
        servers = [ServerAt(*server) for server in fields["servers"]]
        return cls(
            **{name: fields[name] for name in ("step", "attempt", "save", "age_s")},
            manifest=zlib.decompress(base64.b64decode(fields["manifest"])),
            owners=[(part, count) for part, count in fields["owners"]],
            parts=[[servers[number] for number in part] for part in fields["parts"]],
        )


def complete_steps(servers: SnapshotServers, timeout_s: float, of: str = "") -> list[CompleteStep]:
    """Returns the steps that are safe in memory, newest first. Of several saves of a step, the one of the last attempt.

    A step that a later start has left, as it could not be restored then, is not among them. Steps without all
    done-records are not among them, nor those whose done-records do not fit together. The log says which, and why.

    Args:
        servers: The servers.
        timeout_s: Seconds for servers to answer.
        of: Only of this directory (``steps_of``). Empty: of all.
    """
    saves: dict[tuple[int, int, str], dict[int, FoundPart]] = {}
    for part in servers.find(timeout_s):
        name = part.name
        if of and not name.save.rpartition(".")[0].endswith(f"-{of}"):
            continue
        saves.setdefault((name.step, name.attempt, name.save), {})[name.part] = part

    def order(save: tuple[int, int, str]) -> tuple[int, int, float]:
        return save[0], save[1], -min(part.age_s for part in saves[save].values())

    complete: dict[int, CompleteStep] = {}
    for save in sorted(saves, key=order, reverse=True):
        if save[0] in complete:
            continue
        try:
            complete[save[0]] = _complete(servers, saves[save])
        except (CheckpointCorrupt, CheckpointTooNew, OSError) as error:
            logger.warning("the snapshot of step %d (%s) is not complete: %s", save[0], save[2], error)
        if len(complete) == _MOST_STEPS:
            break
    steps = list(complete.values())
    return [step for step in steps if not any(map(step.is_left_by, steps))]


def _complete(servers: SnapshotServers, parts: Mapping[int, FoundPart]) -> CompleteStep:
    """Returns the step that the parts of one save are.

    Raises:
        CheckpointCorrupt: They are not all of it, or contradict each other.
        CheckpointTooNew: A newer Gracepoint wrote them.
        FileNotFoundError: A done-record cannot be read.
    """
    some = next(iter(parts.values()))
    count = _record(servers, some).process_count
    if missing := [part for part in range(count) if part not in parts]:
        shown = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
        raise CheckpointCorrupt(f"{len(missing)} of {count} parts are missing: {shown}")
    in_order = [parts[part] for part in range(count)]
    with ThreadPoolExecutor(min(_READ_AT_ONCE, count), "gracepoint: reads records") as threads:
        records = list(threads.map(lambda part: _record(servers, part), in_order))
    for part, record in zip(in_order, records, strict=True):
        if (record.step, f"{record.attempt}.{record.ordinal}", record.process_index) != (
            part.name.step,
            part.name.save,
            part.name.part,
        ):
            raise CheckpointCorrupt(f"part {part.name.part} has a done-record of another save")
    manifest = merge(records)
    owner = {path: record.process_index for record in records for path in record.files}
    owners = [(part, len(list(files))) for part, files in itertools.groupby(owner[path] for path in manifest.files)]
    return CompleteStep(
        some.name.step,
        some.name.attempt,
        some.name.save,
        manifest.to_bytes(),
        owners,
        [part.servers for part in in_order],
        min(part.age_s for part in in_order),
    )


def _record(servers: SnapshotServers, part: FoundPart) -> DoneRecord:
    data = bytearray(part.record_bytes)
    servers.read_into(part.name.done, memoryview(data), part.servers)
    return DoneRecord.from_bytes(bytes(data), f"the done-record of part {part.name.part}")
