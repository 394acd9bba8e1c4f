"""Where the time of this process goes, in a file that viewers of traces open (``GRACEPOINT_TRACE``).

There is one trace in a process. ``begin`` opens it, and ``end`` closes it. Between them, any thread may add spans. The
file is written as a whole by ``write``: when training continues after a start, at a preemption, and at the end. It is
in the JSON form of Chrome's trace events, which https://ui.perfetto.dev and ``chrome://tracing`` read. Times are those
of the wall clock, so the files of several processes and of several starts can be put side by side.

Without ``begin``, all functions do nothing: a span costs one comparison.

No threads. The list of events is guarded by a lock, which nobody holds while the file is written. Nothing here raises:
a trace that cannot be written is one line in the log.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gracepoint import machine

logger = logging.getLogger(__name__)

#: More events than this are counted, and not kept. A start has some hundred.
MOST_EVENTS = 20_000
_US = 1_000_000


class Trace:
    """The events of one process.

    Args:
        folder: Where the file is written. It is made if it is missing.
        name: Names the process, in the file and in its name. For example the pod's name.

    Attributes:
        index: The number of the process among those that train together. None while it is not known.
        path: The file.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self.index: int | None = None
        self._lock = threading.Lock()  # held for moments: every thread adds events
        self._writing = threading.Lock()  # held while the file is written, which may hang
        self._events: list[dict[str, Any]] = []
        self._threads: dict[int, str] = {}
        self._left_out = 0
        self._facts: dict[str, Any] = {}
        self._failed = False
        self.path = folder / f"{name}.{time.time_ns() // _US}.{machine.process_id()}.trace.json"

    def add(self, name: str, began_unix_s: float, took_s: float | None, facts: dict[str, Any]) -> None:
        """Adds an event.

        Args:
            name: What was done.
            began_unix_s: When it began, in seconds since the epoch.
            took_s: How long it took. None: it is a moment.
            facts: What is known of it.
        """
        thread = threading.current_thread()
        event = {"name": name, "ts": round(began_unix_s * _US), "tid": thread.native_id or 0, "args": facts}
        event |= {"ph": "i", "s": "p"} if took_s is None else {"ph": "X", "dur": round(took_s * _US)}
        with self._lock:
            if len(self._events) >= MOST_EVENTS:
                self._left_out += 1
                return
            self._threads[thread.native_id or 0] = thread.name
            self._events.append(event)

    def tell(self, facts: dict[str, Any]) -> None:
        """Adds facts about the process as a whole."""
        with self._lock:
            self._facts.update(facts)

    def write(self) -> None:
        """Writes the file again. A reader sees the file before or the file after."""
        with self._writing:
            self._write(self._body())

    def _body(self) -> dict[str, Any]:
        with self._lock:
            pid = machine.process_id() if self.index is None else self.index
            named = [("process_name", 0, self._name), *(("thread_name", tid, n) for tid, n in self._threads.items())]
            about = [{"name": kind, "ph": "M", "tid": tid, "args": {"name": text}} for kind, tid, text in named]
            events = [{**event, "pid": pid} for event in (*about, *self._events)]
            return {
                "displayTimeUnit": "ms",
                "otherData": {"process": self._name, "events_left_out": self._left_out, **self._facts},
                "traceEvents": events,
            }

    def _write(self, body: dict[str, Any]) -> None:
        partial = self.path.with_suffix(".partial")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(body, default=str) + "\n")
            os.replace(partial, self.path)
        except OSError as error:
            if not self._failed:
                logger.warning("the trace cannot be written path=%s error=%s", self.path, error)
            self._failed = True


_open: Trace | None = None


def begin(folder: str | os.PathLike[str], name: str) -> None:
    """Opens the trace of this process. The arguments are those of ``Trace``."""
    global _open
    _open = Trace(Path(folder), name)


def end() -> None:
    """Writes the trace, and closes it. Safe to repeat."""
    global _open
    write()
    _open = None


def write() -> None:
    """Writes the trace as it is now."""
    if _open is not None:
        _open.write()


@contextlib.contextmanager
def span(name: str, **facts: Any) -> Iterator[None]:
    """Adds an event that lasts as long as the block."""
    if _open is None:
        yield
        return
    began_unix_s, began_s = time.time(), time.monotonic()
    try:
        yield
    finally:
        ended(name, time.monotonic() - began_s, began_unix_s=began_unix_s, **facts)


def ended(name: str, took_s: float, *, began_unix_s: float | None = None, **facts: Any) -> None:
    """Adds an event that has ended now.

    Args:
        name: What was done.
        took_s: How long it took.
        began_unix_s: When it began, in seconds since the epoch. None: ``took_s`` before now.
        **facts: What is known of it.
    """
    if _open is not None:
        _open.add(name, time.time() - took_s if began_unix_s is None else began_unix_s, took_s, facts)


def moment(name: str, **facts: Any) -> None:
    """Adds an event that takes no time."""
    if _open is not None:
        _open.add(name, time.time(), None, facts)


def tell(*, index: int | None = None, **facts: Any) -> None:
    """Adds facts about the process as a whole.

    Args:
        index: The number of the process among those that train together. None: it is not known.
        **facts: Others.
    """
    if _open is not None:
        _open.index = _open.index if index is None else index
        _open.tell(facts)
