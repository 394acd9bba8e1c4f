"""Keys for barriers, unique by construction: ``job-uid/attempt/epoch/phase/counter``.

Every process has its own counters. They agree as long as every process asks for the keys of a phase in the same order.
So threads that run at the same time must use different phases (``commit``, ``cleanup``).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator


class BarrierKeys:
    """Makes keys. Any thread may call any method.

    Args:
        job_uid: The JobSet's UID. Without a JobSet, another name of the job.
        attempt: Identifies the start of the job. It is the same in all processes.
    """

    def __init__(self, job_uid: str, attempt: str | int) -> None:
        self._root = f"{_part('job_uid', job_uid)}/{_part('attempt', attempt)}"
        self._counters: dict[str, Iterator[int]] = {}
        self._lock = threading.Lock()

    def next(self, phase: str, *, epoch: str | int = 0) -> str:
        """Returns the next key of a phase of an epoch.

        Raises:
            ValueError: A part is empty or contains a slash. Then two different keys could be equal.
        """
        folder = f"{self._root}/{_part('epoch', epoch)}/{_part('phase', phase)}"
        with self._lock:
            counter = self._counters.setdefault(folder, itertools.count())
            return f"{folder}/{next(counter)}"


def _part(name: str, value: str | int) -> str:
    text = str(value)
    if not text or "/" in text:
        raise ValueError(f"{name}: expected a text without a slash that is not empty, found {text!r}")
    return text
