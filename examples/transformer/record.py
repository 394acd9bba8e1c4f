"""What a run leaves behind to be compared: every step's loss, bit for bit, and which data it saw.

One file a process and attempt, ``losses.process_N.attempt_M.jsonl``, one line a step. Losses stay on the
devices until they are ready, so recording never makes training wait.
"""

from __future__ import annotations

import collections
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Losses:
    """Append-only record of this attempt's steps; all calls from the training thread.

    Args:
        folder: Shared by all processes and attempts; made if missing.
        process_index: Whose record this is.
        on_step: Called with each step and its loss as it is written.
    """

    def __init__(
        self,
        folder: Path,
        process_index: int,
        on_step: Callable[[int, float], None] = lambda step, loss: None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = _new_attempt(folder, process_index)
        self._on_step = on_step
        self._waiting: collections.deque[tuple[int, Any, str]] = collections.deque()

    def add(self, step: int, loss: Any, digest: str) -> None:
        """Notes a step whose loss the devices may still be computing; writes those that are ready."""
        self._waiting.append((step, loss, digest))
        self.write_ready()

    def write_ready(self) -> None:
        """Writes the steps whose losses are ready, in order; never waits for a device."""
        lines = []
        while self._waiting and self._waiting[0][1].is_ready():
            step, loss, digest = self._waiting.popleft()
            value = float(loss)
            lines.append(json.dumps({"step": step, "loss": value.hex(), "batch": digest, "unix_s": time.time()}))
            self._on_step(step, value)
        if lines:
            # One write of whole lines to an unbuffered file: a killed process leaves no half line behind it.
            self._file.write("".join(line + "\n" for line in lines).encode())

    def close(self, timeout_s: float = 1.0) -> None:
        """Writes what is left and closes. A loss that needs a dead peer never comes, hence the timeout."""
        gives_up = time.monotonic() + timeout_s
        self.write_ready()
        while self._waiting and time.monotonic() < gives_up:
            time.sleep(0.005)
            self.write_ready()
        if self._waiting:
            steps = [step for step, _, _ in self._waiting]
            print(f"not recorded: steps {steps}, whose losses were not there within {timeout_s} s", flush=True)
        self._file.close()


def _new_attempt(folder: Path, process_index: int) -> Any:
    """Opens the first file of this process that no earlier attempt has made."""
    attempt = 0
    while True:
        try:
            path = folder / f"losses.process_{process_index}.attempt_{attempt}.jsonl"
            return open(path, "xb", buffering=0)
        except FileExistsError:
            attempt += 1


def write_result(folder: Path, process_index: int, result: dict[str, Any]) -> None:
    """Writes ``result.process_N.json`` so that a reader sees all of it or none."""
    path = folder / f"result.process_{process_index}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result) + "\n")
    os.replace(partial, path)
