"""Runs in the trainer's container, in the place of the example: the same training, with a record of what it logs.

Lies in a folder that the container mounts, and needs nothing of this repository. Writes a line of JSON for each record
of the library's loggers into ``words.<pod>.jsonl``, with the time: what a replay knows of a process, it knows from
there, also if the cluster's own logs are lost with a node. Starts no thread.

All times are those of the machine's own clock, also while the process is told another time of day (``clocks.py``).

The cloud's metadata of the pod's node is looked for at the address that ``metadata.json`` beside this file names. If
there is a file ``steps`` in the run's folder, the number in it is the last step, whatever the flags say. If there is a
file ``program``, a program of so many operations is compiled before the example's. After SIGUSR1 the process allocates
memory until the kernel kills it.
"""

from __future__ import annotations

import json
import logging
import os
import runpy
import signal
import sys
import time
import types
from pathlib import Path
from typing import Any

EXAMPLE = "/app"
STEPS = "steps"
PROGRAM = "program"
#: The logger that says each snapshot that is skipped, but at a higher level only the first one of several in a row.
SNAPSHOTS = "gracepoint.checkpoint.saving.memory_snapshots"
TAKE_MEMORY = signal.SIGUSR1
BEGAN = "began"
ENDED = "ended"
#: The variable with the seconds by which the kernel's atomic time is ahead of the time of day. Absent: the time of day
#: that the process is told is right.
TAI_AHEAD = "REPLAY_TAI_AHEAD_S"


class Words(logging.Handler):
    """Writes each record at once, so that a killed process has written all but what it did not get to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("ab", buffering=0)

    def emit(self, record: logging.LogRecord) -> None:
        self.write(unix_s(), record.name, record.getMessage())

    def write(self, unix_s: float, logger: str, message: str) -> None:
        line = {"unix_s": unix_s, "logger": logger, "message": message}
        self._file.write((json.dumps(line) + "\n").encode())


def main() -> None:
    """Trains as the flags say, until the last step if that is decided."""
    began_unix_s = _began_unix_s()
    output = Path(next(word.partition("=")[2] for word in sys.argv if word.startswith("--output=")))
    words = Words(output / f"words.{os.environ['GRACEPOINT_POD_NAME']}.jsonl")
    words.write(began_unix_s, "replay", BEGAN)
    logging.getLogger("gracepoint").addHandler(words)
    logging.getLogger(SNAPSHOTS).setLevel(logging.DEBUG)
    _metadata(Path(__file__).with_name("metadata.json"))
    sys.path.insert(0, EXAMPLE)
    sys.argv[0] = f"{EXAMPLE}/train.py"
    signal.signal(TAKE_MEMORY, _take_memory)
    if (decided := output / STEPS).exists():
        sys.argv.append(f"--steps={decided.read_text()}")  # the last one counts
    if (asked := output / PROGRAM).exists():
        _compile_first(int(asked.read_text()))
    _record_right_times()
    runpy.run_path(f"{EXAMPLE}/train.py", run_name="__main__")
    words.write(unix_s(), "replay", ENDED)


def _compile_first(operations: int) -> None:
    """Lets a session compile a program before those that it is asked to compile."""
    import gracepoint

    attach = gracepoint.attach

    def attach_and_compile(*args: Any, **settings: Any) -> gracepoint.Session:
        import jax
        import jax.numpy as jnp

        def program(value: jax.Array) -> jax.Array:
            for operation in range(operations):
                value = jnp.sin(value @ value + operation)
            return value

        session = attach(*args, **settings)
        session.compile(program, jax.ShapeDtypeStruct((8, 8), "float32"))
        return session

    vars(gracepoint)["attach"] = attach_and_compile


def unix_s() -> float:
    """Returns the seconds since the epoch by the machine's clock, whatever the process is told."""
    ahead_s = os.environ.get(TAI_AHEAD)
    return time.time() if ahead_s is None else time.clock_gettime(time.CLOCK_TAI) - float(ahead_s)


def _record_right_times() -> None:
    """Lets the example's record of steps have the machine's time."""
    import record  # of the example

    vars(record)["time"] = types.SimpleNamespace(time=unix_s, monotonic=time.monotonic, sleep=time.sleep)


def _take_memory(number: int, frame: object) -> None:
    """Fills memory, page by page, until the limit of the container ends it."""
    taken = []
    while True:
        taken.append(b"\x01" * (16 << 20))


def _began_unix_s() -> float:
    """Returns when the kernel made this process. Python itself may take a second to begin on a busy machine."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # since the boot
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return unix_s() - age_s


def _metadata(addresses: Path) -> None:
    """Sets the address of the metadata server. The real one's cannot exist on several nodes of one machine."""
    from gracepoint.receivers import metadata

    if not addresses.exists():  # a cluster that is not the replay's own
        return
    known = json.loads(addresses.read_text())
    metadata.BASE_URL = known[os.environ["GRACEPOINT_NODE_NAME"]]


if __name__ == "__main__":
    main()
