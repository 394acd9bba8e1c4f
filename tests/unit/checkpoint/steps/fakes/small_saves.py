"""A save of one process, as the tests of commits begin with."""

from __future__ import annotations

from collections.abc import Callable

from gracepoint.checkpoint.format import layout
from gracepoint.checkpoint.format.array_spec import tree_digest
from gracepoint.checkpoint.format.layout import Layout, Temporary
from gracepoint.checkpoint.format.records import DoneRecord, StoredFile, Writing
from gracepoint.checkpoint.memory import bytes_of
from gracepoint.checkpoint.steps import commit
from gracepoint.checkpoint.storage.buffers import Buffer
from gracepoint.checkpoint.writing.pool import Folders

STEP = 200


def write_file(writing: Writing, path: str, data: bytes, go_on: Callable[[], None] = lambda: None) -> StoredFile:
    """Writes a file of a save, as its writers do."""
    return Folders(writing.folder, writing.place, direct=False).write(path, bytes_of(data), Buffer(), go_on)


def write(paths: Layout, attempt: str, *, durable: bool = True, content: bytes = b"ours") -> Temporary:
    """Writes a save of one process."""
    temporary = paths.temporary(STEP, attempt, 1)
    with commit.of(paths).writing(temporary, 0, process_index=0) as writing:
        files = {}
        for path, data in ((layout.host_state_file(0), b"same"), ("default/x/0", content)):
            files[path] = write_file(writing, path, data)
        if durable:
            record = DoneRecord(
                step=STEP,
                item=paths.item,
                attempt=attempt,
                ordinal=1,
                process_index=0,
                process_count=1,
                digest=tree_digest(()),
                arrays=(),
                files=files,
                values={},
                copies={},
                host_state=(),
                begun_ns=writing.begun_ns,
                replaces=commit.of(paths).standing(temporary.target),
                generations=dict(writing.generations),
            )
            (temporary.path / layout.done_record(0)).put(record.to_bytes())
    return temporary
