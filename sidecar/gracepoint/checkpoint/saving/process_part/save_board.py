"""What a training process and the worker that writes its save tell each other while it runs, in shared memory.

The trainer's thread of the save sets ``cancelled``, its training thread sets ``urgent``, and both read the rest. The
worker's main thread and the threads of its writer set the rest. Each number has one writer, or a lock in the one
process that writes it. The outcome is written before ``ended`` is set.
"""

from __future__ import annotations

import builtins
import json
import threading
from typing import Any

import numpy as np

from gracepoint.async_calls.processes.shared_memory import Block
from gracepoint.errors import CheckpointError, from_word, to_word

_CANCELLED, _DONE_BYTES, _STAGE, _ENDED, _URGENT = range(5)
_TEXT_AT = 64
_BYTES = 64 << 10
# Characters of an error's text. JSON needs at most 12 bytes for each.
_MOST_TEXT = 5000
_STAGES = ("", "written", "durable")


class SaveBoard:
    """The board of one save. ``block`` is its memory; None makes a new one."""

    def __init__(self, block: Block | None = None) -> None:
        self.block = Block(_BYTES) if block is None else block
        self._words = np.frombuffer(self.block.memory, np.int64, 5)
        self._lock = threading.Lock()

    def cancel(self) -> None:
        """Has the worker stop before its next block of bytes. Then it writes no done-record."""
        self._words[_CANCELLED] = 1

    @property
    def cancelled(self) -> bool:
        return bool(self._words[_CANCELLED])

    def hurry(self) -> None:
        """Says that somebody waits for the save, so that the worker does not leave the CPU to the training."""
        self._words[_URGENT] = 1

    @property
    def urgent(self) -> bool:
        return bool(self._words[_URGENT])

    def add_done(self, size_bytes: int) -> None:
        """Counts bytes that are written. Any thread of the worker may call it."""
        with self._lock:
            self._words[_DONE_BYTES] += size_bytes

    @property
    def done_bytes(self) -> int:
        """Bytes that are written."""
        return int(self._words[_DONE_BYTES])

    def reach(self, stage: str) -> None:
        """Says that the save has reached a stage: "written" or "durable"."""
        self._words[_STAGE] = _STAGES.index(stage)

    @property
    def reached(self) -> tuple[str, ...]:
        """The stages that the save has reached, in order."""
        return _STAGES[1 : int(self._words[_STAGE]) + 1]

    def end(self, stages: dict[str, Any]) -> None:
        """Says that the part is durable, and when it reached its stages."""
        self._put(stages)

    def fail(self, error: Exception) -> None:
        """Says with which error the save ended. A very long text is cut."""
        told: dict[str, Any] = {"error": to_word(error), "text": str(error) or repr(error)}
        if not isinstance(error, CheckpointError):
            name = type(error).__name__
            if not isinstance(error, OSError):
                told["text"] = f"{name}: {error}"
            elif getattr(builtins, name, None) is type(error):
                told["text"] = told["text"].removeprefix(f"[Errno {error.errno}] ")
                told |= {"class": name, "errno": error.errno}
            else:  # its number may not be one of the system's, as in ``ssl.SSLError``
                told |= {"class": "OSError", "errno": None}
        told["text"] = told["text"][:_MOST_TEXT]
        self._put(told)

    def _put(self, outcome: dict[str, Any]) -> None:
        data = json.dumps(outcome).encode()
        self.block.memory[_TEXT_AT : _TEXT_AT + len(data)] = data
        self._words[_ENDED] = len(data)  # last: the trainer reads the text as soon as this is not 0

    @property
    def outcome(self) -> dict[str, Any] | Exception | None:
        """How the save ended: what ``end`` was told, or the error. None: the worker has not said it.

        A ``CheckpointError`` keeps its class, and so does an ``OSError`` of Python's own classes, which also keeps its
        number. Any other ``OSError`` becomes a plain one with its text, and any other error a ``CheckpointError``.
        """
        size = int(self._words[_ENDED])
        if not size:
            return None
        told: dict[str, Any] = json.loads(self.block.memory[_TEXT_AT : _TEXT_AT + size])
        if "error" not in told:
            return told
        if "class" not in told:
            return from_word(told["error"])(told["text"])
        kind: type[OSError] = getattr(builtins, told["class"])
        return kind(told["text"]) if told["errno"] is None else kind(told["errno"], told["text"])
