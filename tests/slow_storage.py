"""Storage that is as slow as a test wants it: real files and real bytes, through one narrow gate.

    storage = SlowStorage(monkeypatch.setattr)     # or plain ``setattr`` in a process of its own
    storage.bytes_per_s = 1000.0                   # all threads of this process together; at any time
    storage.bytes_per_s = 0.0                      # stuck

What waits at the gate looks whether its save is to go on, as the writer does between two blocks.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from gracepoint.checkpoint.storage.posix import PosixPath


class SlowStorage:
    """See the module.

    Args:
        set_attribute: Puts the gate before the writer.

    Attributes:
        bytes_per_s: How fast.
        errno: With which every write fails; None: with none.
        only: What the path of a file has that goes through the gate; all others are as fast as they are.
        asked: Set when somebody has come to the gate.
        look_every_s: After so many seconds who waits looks again whether its save is to go on.
    """

    def __init__(self, set_attribute: Callable[[Any, str, Any], None]) -> None:
        self.bytes_per_s = math.inf
        self.errno: int | None = None
        self.only = ""
        self.asked = threading.Event()
        self.look_every_s = 0.005
        self._gate = threading.Lock()
        self._write: Callable[..., int] = PosixPath.write_large
        set_attribute(PosixPath, "write_large", lambda path, *given, **named: self._write_slowly(path, *given, **named))

    def _write_slowly(self, path: Any, data: Any, buffer: Any, go_on: Callable[[], None], **named: Any) -> int:
        if self.only not in str(path):
            return self._write(path, data, buffer, go_on, **named)
        self.asked.set()
        with self._gate:
            passed_bytes, last_s = 0.0, time.monotonic()
            while passed_bytes < len(data):
                go_on()
                if self.errno is not None:
                    raise OSError(self.errno, os.strerror(self.errno), str(path))
                if self.bytes_per_s == math.inf:
                    break
                time.sleep(self.look_every_s)
                now_s = time.monotonic()
                passed_bytes += (now_s - last_s) * self.bytes_per_s
                last_s = now_s
        return self._write(path, data, buffer, go_on, **named)
