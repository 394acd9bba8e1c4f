"""A save of one process, as the tests of commits begin with."""

from __future__ import annotations

import numpy as np

from gracepoint.checkpoint.format import layout
from gracepoint.checkpoint.format.array_spec import tree_digest
from gracepoint.checkpoint.format.layout import Layout, Temporary
from gracepoint.checkpoint.format.manifest import DoneRecord, file_of
from gracepoint.checkpoint.memory import ArrayBytes
from gracepoint.checkpoint.steps import commit
from gracepoint.checkpoint.storage.direct_io import Buffer

STEP = 200


def write(paths: Layout, attempt: str, *, durable: bool = True, content: bytes = b"ours") -> Temporary:
    """Writes a save of one process."""
    temporary = paths.temporary(STEP, attempt, 1)
    with commit.of(paths).writing(temporary, 0, process_index=0) as writing:
        files = {}
        for path, data in ((layout.host_state_file(0), b"same"), ("default/x/0", content)):
            place, values = writing.folder / path, np.frombuffer(data, np.uint8)
            place.parent.make_folder()
            place.backend.write_large(place.key, ArrayBytes(values, values.dtype), Buffer(), lambda: None, direct=False)
            files[path] = file_of(data)
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
