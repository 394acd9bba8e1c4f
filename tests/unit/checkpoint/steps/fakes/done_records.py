"""Done-records of saves that hold plain files and no arrays, for the machines that save and crash at random."""

from __future__ import annotations

from collections.abc import Mapping

from gracepoint.checkpoint.format.array_spec import tree_digest
from gracepoint.checkpoint.format.layout import Layout, Temporary
from gracepoint.checkpoint.format.records import DoneRecord, StoredFile
from gracepoint.checkpoint.steps import commit


def done_record(
    temporary: Temporary,
    item: str,
    files: Mapping[str, StoredFile],
    *,
    process: int,
    processes: int,
    begun_ns: int,
    generations: Mapping[str, str] | None = None,
) -> DoneRecord:
    """Returns what a process writes when it has written ``files``. Process 0 looks at what the save replaces."""
    return DoneRecord(
        step=temporary.step,
        item=item,
        attempt=temporary.attempt,
        ordinal=temporary.ordinal,
        process_index=process,
        process_count=processes,
        digest=tree_digest(()),
        arrays=() if process == 0 else None,
        files=files,
        values={},
        copies={},
        host_state=(),
        begun_ns=begun_ns,
        replaces=commit.of(Layout(temporary.target.parent)).standing(temporary.target) if process == 0 else None,
        generations=dict(generations or {}),
    )
