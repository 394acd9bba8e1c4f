"""Runs in the trainer's container, in the place of the example: the same training, with a record of what it logs.

Lies in a folder that the container mounts, and needs nothing of this repository. Writes a line of JSON for each record
of the library's loggers into ``words.<pod>.jsonl``, with the time: what a replay knows of a process, it knows from
there, also if the cluster's own logs are lost with a node. Starts no thread.

The cloud's metadata of the pod's node is looked for at the address that ``metadata.json`` beside this file names. If
there is a file ``steps`` in the run's folder, the number in it is the last step, whatever the flags say. After SIGUSR1
the process allocates memory until the kernel kills it.
"""

from __future__ import annotations

import json
import logging
import os
import runpy
import signal
import sys
import time
from pathlib import Path

EXAMPLE = "/app"
STEPS = "steps"
TAKE_MEMORY = signal.SIGUSR1
BEGAN = "began"
ENDED = "ended"


class Words(logging.Handler):
    """Writes each record at once, so that a killed process has written all but what it did not get to."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.INFO)
        self._file = path.open("ab", buffering=0)

    def emit(self, record: logging.LogRecord) -> None:
        self.write(record.created, record.name, record.getMessage())

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
    _metadata(Path(__file__).with_name("metadata.json"))
    sys.path.insert(0, EXAMPLE)
    sys.argv[0] = f"{EXAMPLE}/train.py"
    signal.signal(TAKE_MEMORY, _take_memory)
    if (decided := output / STEPS).exists():
        sys.argv.append(f"--steps={decided.read_text()}")  # the last one counts
    runpy.run_path(f"{EXAMPLE}/train.py", run_name="__main__")
    words.write(time.time(), "replay", ENDED)


def _take_memory(number: int, frame: object) -> None:
    """Fills memory, page by page, until the limit of the container ends it."""
    taken = []
    while True:
        taken.append(b"\x01" * (16 << 20))


def _began_unix_s() -> float:
    """Returns when the kernel made this process. Python itself may take a second to begin on a busy machine."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # since the boot
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


def _metadata(addresses: Path) -> None:
    """Sets the address of the metadata server. The real one's cannot exist on several nodes of one machine."""
    from gracepoint.receivers import metadata

    if not addresses.exists():  # a cluster that is not the replay's own
        return
    known = json.loads(addresses.read_text())
    metadata.BASE_URL = known[os.environ["GRACEPOINT_NODE_NAME"]]


if __name__ == "__main__":
    main()
