"""The done-record of a process, and the manifest of a checkpoint.

A done-record states that all files that one process writes in a save are durable. **A save is durable when the
done-records of all its processes exist**: together they hold all that is needed to finish it. The manifest combines
them, and is written when the save is committed. Both are JSON, and carry a checksum of their own bytes.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from gracepoint.checkpoint.format import layout
from gracepoint.checkpoint.format.array_spec import ArraySpec, grid, tree_digest
from gracepoint.checkpoint.storage.checksum import crc32
from gracepoint.errors import CheckpointCorrupt, CheckpointTooNew

# The last entry: the checksum of all bytes before it.
_CHECKSUM = b', "checksum": '


@dataclasses.dataclass(frozen=True)
class StoredFile:
    """A file's size and the CRC-32 of its bytes."""

    bytes: int
    crc32: int


def file_of(data: bytes | memoryview) -> StoredFile:
    return StoredFile(len(data), crc32(data))


@dataclasses.dataclass(frozen=True)
class DoneRecord:
    """``done.process_N.json``: process N has made ``files`` durable.

    Attributes:
        step: The step that is saved. None for a checkpoint that has a path of its own.
        item: Name of the train state's folder below the checkpoint's folder. ``layout.NO_ITEM`` if they are the same
            folder. Only a checkpoint with items has host state.
        attempt: The attempt of the job that saved. ``attempt`` and ``ordinal`` together identify the save.
        ordinal: Number of the save within the attempt.
        process_index: Index of this process.
        process_count: Number of processes that save together.
        digest: Digest of the array list. Equal in all processes.
        arrays: The array list. Only in process 0's record, as it is equal in all processes. None in other records.
        files: Size and checksum of everything that this process wrote, by path below the step's folder.
        values: CRC-32 of the values of each chunk whose file is compressed, or that has no file (in OCDBT). The key is
            the path that the chunk's file has or would have.
        copies: Checksums of this process's copies of chunks that another process wrote, by path.
        host_state: Names of the host state's values. Equal in all processes.
        begun_ns: Time at which the save began, in nanoseconds since the epoch by this process's clock.
        replaces: Identifies the folder at the target that this save replaces, as ``commit.standing`` returns it. Only
            in process 0's record. None if the save replaces nothing. Older records do not have this field.
        generations: The generation of each file that lies in the step's folder already, by path. Only in stores that
            cannot rename; empty in others. Older records do not have this field.
    """

    step: int | None
    item: str
    attempt: str
    ordinal: int
    process_index: int
    process_count: int
    digest: str
    arrays: tuple[ArraySpec, ...] | None
    files: Mapping[str, StoredFile]
    values: Mapping[str, int]
    copies: Mapping[str, int]
    host_state: tuple[str, ...]
    begun_ns: int
    replaces: str | None = None
    generations: Mapping[str, str] = dataclasses.field(default_factory=dict)

    FORMAT: ClassVar[str] = "gracepoint.done/1"

    def to_bytes(self) -> bytes:
        return _seal(self.FORMAT, _fields(self))

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Self:
        return cls(**_parse(cls.FORMAT, data, where))


@dataclasses.dataclass(frozen=True)
class Manifest:
    """``_GRACEPOINT``: the contents of a committed step. The fields have the meaning that ``DoneRecord`` documents."""

    step: int | None
    item: str
    attempt: str
    ordinal: int
    process_count: int
    arrays: tuple[ArraySpec, ...]
    files: Mapping[str, StoredFile]
    values: Mapping[str, int]
    host_state: tuple[str, ...]
    begun_ns: int

    FORMAT: ClassVar[str] = "gracepoint.checkpoint/1"

    @classmethod
    def fields_in(cls, data: bytes, where: str) -> dict[str, Any]:
        """Returns the fields as they are written in JSON, without the cost of making a ``Manifest``.

        Raises:
            CheckpointCorrupt: The fields cannot be read.
            CheckpointTooNew: This version does not know their format.
        """
        return _unsealed(cls.FORMAT, data, where)

    def to_bytes(self) -> bytes:
        return _seal(self.FORMAT, _fields(self))

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Self:
        return cls(**_parse(cls.FORMAT, data, where))


@dataclasses.dataclass(frozen=True)
class Claim:
    """Stands in place of a step's manifest in a store that cannot rename, while a save or a deletion owns the step.

    Attributes:
        attempt: The attempt of the job that claims.
        ordinal: Number of the save within the attempt.
        begun_ns: Time at which the save began, in nanoseconds since the epoch by the store's clock.
        trash: Name of the trash that the step becomes. None if the step is being written.
        nonce: Makes the contents unique, as some stores tell versions apart by their contents.
        swept_ns: When the process that deletes the step last said so, in nanoseconds by the store's clock. 0 if no
            process deletes it yet.
    """

    attempt: str
    ordinal: int
    begun_ns: int
    trash: str | None = None
    nonce: str = dataclasses.field(default_factory=lambda: Claim.new_nonce())
    swept_ns: int = 0

    FORMAT: ClassVar[str] = "gracepoint.claim/1"

    @staticmethod
    def new_nonce() -> str:
        return secrets.token_hex(8)

    @property
    def note(self) -> str:
        """What the save leaves with each object that it writes."""
        return f"{self.attempt} {self.ordinal} {self.begun_ns}"

    @classmethod
    def noted(cls, note: str) -> Claim | None:
        """Returns the save that left a note. None if Gracepoint did not leave it."""
        attempt, _, rest = note.partition(" ")
        numbers = rest.split(" ")
        if not attempt or len(numbers) < 2 or not all(number.isdecimal() for number in numbers[:2]):
            return None
        return cls(attempt, int(numbers[0]), int(numbers[1]))

    def is_same(self, other: Claim) -> bool:
        """Returns whether both are of one save."""
        return (self.attempt, self.ordinal) == (other.attempt, other.ordinal)

    def is_later(self, other: Claim) -> bool:
        """Returns whether this save began after ``other``."""
        if self.attempt == other.attempt:
            return self.ordinal > other.ordinal
        return self.begun_ns > other.begun_ns

    def to_bytes(self) -> bytes:
        return _seal(self.FORMAT, dataclasses.asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Self:
        return cls(**_unsealed(cls.FORMAT, data, where))


def is_claim(data: bytes) -> bool:
    """Returns whether ``data`` is a claim of any version, and not a manifest."""
    return data.startswith(b'{"format": "gracepoint.claim/')


def merge(records: Sequence[DoneRecord]) -> Manifest:
    """Returns the manifest of a save from the done-records of all its processes, in order.

    Raises:
        CheckpointCorrupt: The records contradict each other, or do not cover all chunks.
    """
    first = records[0]
    where = f"save {first.ordinal} of attempt {first.attempt}" + ("" if first.step is None else f", step {first.step}")
    for record in records:
        for field in ("step", "item", "attempt", "ordinal", "process_count", "digest", "host_state"):
            found, expected = getattr(record, field), getattr(first, field)
            if found != expected:
                raise CheckpointCorrupt(
                    f"{where}: {field} differs between processes: {found!r} in process {record.process_index}, "
                    f"{expected!r} in process 0"
                )
    if first.arrays is None or tree_digest(first.arrays) != first.digest:
        raise CheckpointCorrupt(f"{where}: process 0's record has no array list that fits its digest")
    files = {path: file for record in records for path, file in record.files.items()}
    values = {path: checksum for record in records for path, checksum in record.values.items()}
    missing = [path for path in _expected_files(first) if path not in files and path not in values]
    if missing:
        raise CheckpointCorrupt(f"{where}: nobody wrote {len(missing)} of its files, as {missing[0]}")
    for record in records:
        for path, checksum in record.copies.items():
            if values.get(path, files[path].crc32 if path in files else None) != checksum:
                leaf = path.removeprefix(layout.in_item(first.item, "")).rpartition("/")[0] or "of type str"
                raise CheckpointCorrupt(
                    f"{where}: leaf {leaf!r} is local to each process, and process {record.process_index} has other "
                    "values than the process that wrote it; make it equal, or one array over all processes"
                )
    return Manifest(
        step=first.step,
        item=first.item,
        attempt=first.attempt,
        ordinal=first.ordinal,
        process_count=first.process_count,
        arrays=first.arrays,
        files=files,
        values=values,
        host_state=first.host_state,
        begun_ns=first.begun_ns,
    )


def _expected_files(first: DoneRecord) -> list[str]:
    assert first.arrays is not None
    chunks = [layout.in_item(first.item, spec.chunk_file(index)) for spec in first.arrays for index in grid(spec)]
    with_host_state = range(first.process_count) if first.item else ()
    return chunks + [layout.host_state_file(process) for process in with_host_state]


def _fields(value: DoneRecord | Manifest) -> dict[str, Any]:
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    fields["files"] = {path: [file.bytes, file.crc32] for path, file in value.files.items()}
    if not fields.get("generations", True):
        del fields["generations"]
    fields["arrays"] = None if value.arrays is None else [spec.to_json() for spec in value.arrays]
    return fields


def _seal(form: str, fields: Mapping[str, Any]) -> bytes:
    body = json.dumps({"format": form, **fields}).removesuffix("}").encode()
    return body + _CHECKSUM + str(crc32(body)).encode() + b"}"


def is_whole(data: bytes) -> bool:
    """True if a record or manifest of any version matches its own checksum."""
    body, _, checksum = data.rpartition(_CHECKSUM)
    return checksum == str(crc32(body)).encode() + b"}"


def _unsealed(form: str, data: bytes, where: str) -> dict[str, Any]:
    if not is_whole(data):
        raise CheckpointCorrupt(f"{where} cannot be read: its checksum does not fit its contents")
    try:
        value = dict(json.loads(data.rpartition(_CHECKSUM)[0] + b"}"))
        found = value.pop("format")
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointCorrupt(f"{where} cannot be read: {error!r}") from error
    if found != form:
        if _is_newer(found, form):
            raise CheckpointTooNew(
                f"{where} was written by a newer Gracepoint: found format {found!r}, expected {form!r}. Install in the "
                "image the version of gracepoint that wrote it, or train in another directory; it is left as it is"
            )
        raise CheckpointCorrupt(f"{where}: found format {found!r}, expected {form!r}")
    return value


def _is_newer(found: Any, form: str) -> bool:
    name, _, version = form.partition("/")
    number = found.removeprefix(f"{name}/") if isinstance(found, str) else ""
    return number.isdecimal() and int(number) > int(version)


def _parse(form: str, data: bytes, where: str) -> dict[str, Any]:
    value = _unsealed(form, data, where)
    arrays = value["arrays"]
    return value | {
        "arrays": None if arrays is None else tuple(ArraySpec.from_json(spec) for spec in arrays),
        "files": {path: StoredFile(*file) for path, file in value["files"].items()},
        "host_state": tuple(value["host_state"]),
    }
