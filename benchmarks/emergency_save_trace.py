"""Where the time of an emergency save goes, in one process.

``traced`` notes each write, copy and sync of all threads while a block runs. ``Trace.parts`` divides the time from the
call to its return into parts that follow each other, and tells how much time the threads spent in each kind of call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gracepoint.checkpoint.storage import posix

_WRITE, _COPY, _SYNC, _FOLDER = "writes", "copies with checksums", "syncs of files", "syncs of folders"

_Span = tuple[float, float]  # begin and end


@dataclasses.dataclass
class Trace:
    """The calls of one save.

    Attributes:
        began_s: When the save was called.
        ended_s: When it returned.
        spans: Begin and end of each call, by kind.
        stages: When each stage was reached, by name.
    """

    began_s: float = 0.0
    ended_s: float = 0.0
    spans: dict[str, list[_Span]] = dataclasses.field(default_factory=dict)
    stages: dict[str, float] = dataclasses.field(default_factory=dict)

    def on_stage(self, stage: str) -> None:
        self.stages[stage] = time.perf_counter()

    def parts(self) -> dict[str, float]:
        """Returns seconds by what they are. The parts of the time come first, and their sum is the time."""
        writes, syncs = self.spans[_WRITE], self.spans[_SYNC]
        first_s, last_s = min(begin for begin, _ in writes), max(end for _, end in writes)
        synced_s = max(last_s, *(end for _, end in syncs if end <= self.stages["written"]))
        busy_s = union_s(writes)
        of_time = {
            "until the first write": first_s - self.began_s,
            "with a write under way": busy_s,
            "with no write under way": last_s - first_s - busy_s,
            "after the last write: files synced": synced_s - last_s,
            "folders synced": self.stages["written"] - synced_s,
            "done-record": self.stages["durable"] - self.stages["written"],
            "meeting and commit": self.ended_s - self.stages["durable"],
        }
        of_threads = {
            f"all threads together: {kind}": sum(end - begin for begin, end in spans)
            for kind, spans in self.spans.items()
        }
        return of_time | of_threads


def union_s(spans: Sequence[_Span]) -> float:
    """Returns the seconds in which at least one of the spans is under way."""
    found_s = until_s = 0.0
    for begin, end in sorted(spans):
        found_s += max(0.0, end - max(begin, until_s))
        until_s = max(until_s, end)
    return found_s


@contextlib.contextmanager
def traced() -> Iterator[Trace]:
    """Notes the calls of all threads until the block ends."""
    trace = Trace(spans={kind: [] for kind in (_WRITE, _COPY, _SYNC, _FOLDER)})
    pwrite, fsync, copied = os.pwrite, os.fsync, posix._copied

    def timed(kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def act(*given: Any) -> Any:
            began_s = time.perf_counter()
            try:
                return call(*given)
            finally:
                trace.spans[kind].append((began_s, time.perf_counter()))

        return act

    sync_file, sync_folder = timed(_SYNC, fsync), timed(_FOLDER, fsync)

    def sync(fd: Any) -> None:
        (sync_folder if stat.S_ISDIR(os.fstat(fd).st_mode) else sync_file)(fd)

    os.pwrite, os.fsync = timed(_WRITE, pwrite), sync
    posix._copied = timed(_COPY, copied)
    trace.began_s = time.perf_counter()
    try:
        yield trace
    finally:
        trace.ended_s = time.perf_counter()
        os.pwrite, os.fsync, posix._copied = pwrite, fsync, copied
