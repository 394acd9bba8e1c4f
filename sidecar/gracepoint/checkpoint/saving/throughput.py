"""The speed of saves to one directory, kept in a file beside the checkpoints from one start to the next.

There are two ways to save, and each has its own figures. An emergency save is *streamed*, while training is stopped. A
background save is written from a *snapshot*, while training goes on. The median of the latest saves counts.

Every process reads the file when it starts. Process 0 writes it after each committed save, as a whole and by a rename.
After a background save, the thread of the save writes it. After an emergency save, a thread of its own writes it, so
that no caller waits for the storage once the step is committed. That thread ends when the file is written; a process
that exits waits for it for half a second. If the file cannot be read or written, or the system has no thread, the log
says so, and no save fails. If more processes made the figures, they are scaled down to the number of processes that
save now.
"""

from __future__ import annotations

import json
import logging
import statistics
import threading
from enum import StrEnum

from gracepoint.checkpoint.storage.storage_path import StoragePath

logger = logging.getLogger(__name__)

_VERSION = 1
_KEPT = 5


class Way(StrEnum):
    """How the bytes of a save get to the disk."""

    STREAMED = "streamed"
    SNAPSHOT = "snapshot"


class Throughput:
    """The speed of the latest saves.

    Args:
        file: The file that keeps the figures. None: they are kept in memory only.
        writes: Whether this process writes the file.
        process_count: Number of processes that save together.
    """

    def __init__(self, file: StoragePath | None, *, writes: bool, process_count: int = 1) -> None:
        self._file = file
        self._writes = writes
        self._process_count = process_count
        self._rates: dict[Way, tuple[float, ...]] = dict.fromkeys(Way, ())
        self._writing = threading.Lock()
        self._thread: threading.Thread | None = None  # the latest thread that writes the file

    def read(self) -> None:
        """Reads the figures of earlier starts."""
        if self._file is None:
            return
        try:
            self._rates = _rates_of(self._file.read_bytes(), self._process_count)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            logger.warning(
                "what saves took before is not known: %s cannot be read (%s); the next save writes it anew",
                self._file,
                error,
            )

    def learn(self, way: Way, size_bytes: int, duration_s: float) -> None:
        """Records a committed save.

        Args:
            way: How it was saved.
            size_bytes: Bytes of the state over all processes.
            duration_s: Seconds from the start of writing to the commit.
        """
        if size_bytes <= 0 or duration_s <= 0:
            return
        self._rates = {**self._rates, way: (*self._rates[way], size_bytes / duration_s)[-_KEPT:]}
        if self._file is None or not self._writes:
            return
        if way is Way.STREAMED:
            thread = threading.Thread(target=self._write, args=[self._file], name="gracepoint: throughput", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # a limit on threads: the next save writes these figures, too
                logger.warning("what a save took is not remembered: no thread writes %s (%s)", self._file, error)
            else:
                self._thread = thread
        else:
            self._write(self._file)

    def finish(self, timeout_s: float) -> None:
        """Waits until the latest figures are written, for at most ``timeout_s`` seconds."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _write(self, file: StoragePath) -> None:
        try:
            with self._writing:
                known = {"version": _VERSION, "processes": self._process_count, "bytes_per_s": self._rates}
                file.put(json.dumps(known).encode())
        except OSError as error:
            logger.warning("what a save took is not remembered: %s cannot be written (%s)", file, error)

    @property
    def streamed_bytes_per_s(self) -> float | None:
        """Speed of emergency saves, in bytes of the state over all processes per second. None if there was none."""
        return self._typical(Way.STREAMED)

    @property
    def snapshot_bytes_per_s(self) -> float | None:
        """Speed of background saves, in bytes of the state over all processes per second. None if there was none."""
        return self._typical(Way.SNAPSHOT)

    def _typical(self, way: Way) -> float | None:
        rates = self._rates[way]
        return statistics.median(rates) if rates else None


def _rates_of(data: bytes, process_count: int) -> dict[Way, tuple[float, ...]]:
    found = json.loads(data)
    if not isinstance(found, dict) or found.get("version") != _VERSION:
        raise ValueError(f"expected an object of version {_VERSION}, found {data[:80]!r}")
    rates = found.get("bytes_per_s")
    if not isinstance(rates, dict) or set(rates) != set(Way):
        raise ValueError(f"bytes_per_s: expected {[str(way) for way in Way]}, found {rates!r:.80}")
    for way, values in rates.items():
        if not isinstance(values, list) or not all(type(value) in (int, float) and value > 0 for value in values):
            raise ValueError(f"bytes_per_s.{way}: expected positive numbers, found {values!r:.80}")
    processes = found.get("processes", process_count)
    if type(processes) is not int or processes < 1:
        raise ValueError(f"processes: expected how many saved, found {processes!r:.80}")
    # Whether the processes or the storage limit the speed is not known. So fewer processes count as slower, and more
    # processes as no faster.
    part = min(1.0, process_count / processes)
    return {way: tuple(rate * part for rate in rates[way][-_KEPT:]) for way in Way}
