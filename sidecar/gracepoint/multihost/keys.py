"""Keys for barriers, unique by construction: ``job-uid/attempt/epoch/phase/counter``.

Every process counts for itself, and all count alike as long as each asks for the keys of one phase in the same
order. So threads that run at the same time need phases of their own (``commit``, ``cleanup``), and nothing else.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator


class BarrierKeys:
    """Makes keys; every method may be called from any thread.

    Args:
        job_uid: The JobSet's UID; what else names the job where there is none.
        attempt: Which start of the job this is, the same in all processes.
    """

    def __init__(self, job_uid: str, attempt: str | int) -> None:
        self._root = f"{_part('job_uid', job_uid)}/{_part('attempt', attempt)}"
        self._counters: dict[str, Iterator[int]] = {}
        self._lock = threading.Lock()

    def next(self, phase: str, *, epoch: str | int = 0) -> str:
        """The next key of a phase of an epoch.

        Raises:
            ValueError: A part is empty or contains a slash: two different keys could read alike.
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
