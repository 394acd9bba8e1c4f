"""A page of shared memory in which the training process says that it runs. Its worker process reads that.

In the training process, the stall thread alone writes. In the worker, the main thread once writes the worker's process
ID, so that the training process can allow the worker to read its stack, and the thread "gracepoint-beside" reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Callable

from gracepoint.async_calls.processes.shared_memory import Block

_PAGE = 4096
#: The number of beats, the step, the worker's process ID, the size of the text.
_WORDS = struct.Struct("=QQQQ")
_WATCHER_AT = 16
_MOST_TEXT = 1024
#: prctl(2): which process may trace this one where the kernel's module Yama limits that.
_PR_SET_PTRACER = 0x59616D61


class SharedHeartbeat:
    """See the module.

    Args:
        block: The memory. None: it is made.
        step: Returns the step that training has reached. The training process knows it.
    """

    def __init__(self, block: Block | None = None, step: Callable[[], int] = lambda: 0) -> None:
        self.block = Block(_PAGE) if block is None else block
        self._step = step
        self._beats = 0
        self._allowed = 0

    # The training process.

    def beat(self, stage: str) -> None:
        """Says that the process runs, and what the training does, in words."""
        text = stage.encode()[:_MOST_TEXT]
        self._beats += 1
        memory, watcher = self.block.memory, self._read()[2]
        memory[_WORDS.size : _WORDS.size + len(text)] = text
        memory[:_WATCHER_AT] = struct.pack("=QQ", self._beats, self._step())
        memory[_WATCHER_AT + 8 : _WORDS.size] = struct.pack("=Q", len(text))
        if watcher not in (0, self._allowed):
            self._allowed = watcher
            _allow_tracing_by(watcher)

    def end(self) -> None:
        """Says that nobody needs to look any more."""
        self.block.memory[:8] = bytes(8)

    # The worker process.

    def watch(self, process_id: int) -> None:
        """Says which process looks."""
        self.block.memory[_WATCHER_AT : _WATCHER_AT + 8] = struct.pack("=Q", process_id)

    @property
    def beats(self) -> int:
        """How often the process has said that it runs. 0: nobody needs to look."""
        return int(self._read()[0])

    @property
    def step(self) -> int:
        """The step that training had reached at the last beat."""
        return int(self._read()[1])

    @property
    def stage(self) -> str:
        """What the training did at the last beat."""
        return self.block.memory[_WORDS.size : _WORDS.size + self._read()[3]].decode(errors="replace")

    def _read(self) -> tuple[int, ...]:
        return _WORDS.unpack_from(self.block.memory)


def _allow_tracing_by(process_id: int) -> None:
    """Lets a process and its children read the stack of this one. Yama may otherwise allow that to parents alone."""
    with contextlib.suppress(OSError, AttributeError, ValueError):
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(process_id), 0, 0, 0)  # fails if there is no Yama
