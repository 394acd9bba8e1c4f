"""Trains on records of which each must be used once, with snapshots in the memory of nodes.

    snapshots_process.py DIRECTORY STEPS PACE_S MIB

MIB is so much more that each process has; if it has any, storage takes ``storage_speed`` from it.
Besides what ``elastic_training`` tells, the log says each snapshot that is safe, and it prints where the state was.
At SIGUSR2 the process falls silent, as if its machine was off.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import Any

import gracepoint
from gracepoint import multihost
from tests import elastic_training
from tests.multiprocess.launcher import here, say
from tests.ports import silence_all
from tests.slow_storage import SlowStorage

#: As in a gang that ``attach`` joins.
HEARTBEAT_S = 300


def storage_speed(mib: int) -> float:
    """Bytes per second at which as many MiB take half a minute: 10 MB/s of 300."""
    return (mib << 20) / 30


def fall_silent(*_: object) -> None:
    silence_all()
    say("silent", True)
    os.kill(os.getpid(), signal.SIGSTOP)


def main() -> None:
    signal.signal(signal.SIGUSR2, fall_silent)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s", stream=sys.stdout)
    logging.getLogger("gracepoint.checkpoint.saving.memory_snapshots").setLevel(logging.DEBUG)  # says what is safe
    directory, steps, pace_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    ballast_mib = int(sys.argv[4])
    if ballast_mib:
        SlowStorage(setattr).bytes_per_s = storage_speed(ballast_mib)
    place = here()
    multihost.initialize(
        place.coordinator, place.process_count, place.process_index, heartbeat_timeout_seconds=HEARTBEAT_S
    )
    session = gracepoint.attach(directory, grace_period_s=20.0)

    def tell(word: str, value: Any) -> None:
        say(word, value)
        if word == "restored":
            where = session.restored
            say("from", "nowhere" if where is None else "memory" if where.from_memory else "storage")

    elastic_training.train(session, steps, pace_s, tell, ballast_mib=ballast_mib)


if __name__ == "__main__":
    main()
