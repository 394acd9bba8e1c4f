"""Real text, shuffled, cut into this process's batches and read ahead.

Who runs: the training thread (``next``, ``state``, ``restore``, ``close``) and one prefetch thread, which
owns the random generator and fills a small queue. They share nothing but that queue and a stop flag. Each
queued batch carries the loader's state *after* it, so ``state()`` counts what training has consumed and
nothing of what was only read ahead. The thread is a daemon; ``close`` and ``restore`` stop and join it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import queue
import sysconfig
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "__pycache__"}
_WAIT_S = 60.0


def standard_library(limit_bytes: int) -> bytes:
    """Returns the first ``limit_bytes`` of the Python standard library's own sources, in order of path."""
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in _sources(root):
        text += path.read_bytes()
        if len(text) >= limit_bytes:
            break
    if not text:
        raise FileNotFoundError(f"no Python sources below {root}; expected the standard library's own")
    return bytes(text[:limit_bytes])


def _sources(folder: Path) -> Iterator[Path]:
    """Yields the Python sources below a folder in order of path, and looks into no more folders than are asked for."""
    for path in sorted(folder.iterdir()):
        if path.name in _NOT_LIBRARY:
            continue
        if path.is_dir():
            yield from _sources(path)
        elif path.suffix == ".py":
            yield path


def windows(text: bytes, length: int, *, process_index: int, process_count: int) -> npt.NDArray[np.uint8]:
    """Cuts text into rows of ``length + 1`` bytes (inputs, next byte); returns this process's share."""
    count = (len(text) - 1) // length
    rows = np.lib.stride_tricks.sliding_window_view(np.frombuffer(text, np.uint8), length + 1)[::length]
    return rows[:count][process_index::process_count]


@dataclasses.dataclass(frozen=True)
class _Item:
    batch: Any
    digest: str
    state_after: dict[str, Any]


class Loader:
    """Endless shuffled batches; every epoch has its own order, drawn from one seeded generator.

    Args:
        rows: What to draw from, one example a row.
        batch: Examples a batch, of this process alone.
        seed: Seed of the order.
        place: Called in the prefetch thread with each batch, for example to put it on the devices.
        ahead: How many batches are read ahead.
    """

    def __init__(
        self,
        rows: npt.NDArray[np.uint8],
        batch: int,
        *,
        seed: int,
        place: Callable[[npt.NDArray[np.uint8]], Any] = lambda batch: batch,
        ahead: int = 4,
    ) -> None:
        if len(rows) < batch:
            raise ValueError(f"a batch of {batch} needs as many rows, found {len(rows)}: give more text")
        self._rows = rows
        self._batch = batch
        self._place = place
        self._ahead = ahead
        self._state: dict[str, Any] = {"position": 0, "rng": np.random.PCG64(seed).state}
        self._reader: _Reader | None = None
        #: Digest of the rows in the batch handed out last.
        self.digest = ""

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Any:
        if self._reader is None:
            self._reader = _Reader(self._items(self._state), self._ahead)
        item = self._reader.get()
        self._state, self.digest = item.state_after, item.digest
        return item.batch

    def state(self) -> dict[str, Any]:
        """Returns where the order stands after the batch handed out last; plain JSON."""
        return self._state

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from what ``state`` returned; what was read ahead is dropped."""
        self.close()
        self._state = state

    def close(self) -> None:
        """Stops the prefetch thread. The next ``next`` starts another."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _items(self, state: dict[str, Any]) -> Iterator[_Item]:
        bits = np.random.PCG64()
        bits.state = state["rng"]
        position = state["position"]
        while True:
            epoch_began = bits.state
            order = np.random.Generator(bits).permutation(len(self._rows))
            while position + self._batch <= len(order):
                chosen = order[position : position + self._batch]
                position += self._batch
                yield _Item(
                    batch=self._place(self._rows[chosen]),
                    digest=hashlib.sha256(chosen.astype("<i8").tobytes()).hexdigest()[:16],
                    state_after={"position": position, "rng": epoch_began},
                )
            position = 0


class _Reader:
    """The prefetch thread and its queue; an error in the thread is raised by ``get``."""

    def __init__(self, items: Iterator[_Item], ahead: int) -> None:
        self._queue: queue.Queue[_Item | Exception] = queue.Queue(ahead)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(items,), name="prefetch", daemon=True)
        self._thread.start()

    def get(self) -> _Item:
        try:
            item = self._queue.get(timeout=_WAIT_S)
        except queue.Empty:
            raise TimeoutError(f"the prefetch thread made no batch within {_WAIT_S:.0f} s") from None
        if isinstance(item, Exception):
            raise item
        return item

    def close(self) -> None:
        self._stopped.set()
        self._thread.join(_WAIT_S)
        if self._thread.is_alive():
            raise TimeoutError(f"the prefetch thread did not end within {_WAIT_S:.0f} s; it is making a batch")

    def _run(self, items: Iterator[_Item]) -> None:
        try:
            for item in items:
                if not self._put(item):
                    return
        except Exception as error:  # noqa: BLE001 - handed to the training thread, which raises it
            self._put(error)

    def _put(self, item: _Item | Exception) -> bool:
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False
